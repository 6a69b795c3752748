//! Parallel loops over work items, on the threads of a pool and the calling one.

use super::spin_wait;
use super::workers::Workers;
use rayon::Scope;
use rayon::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Multiply-adds that another thread is woken for, at least: a few microseconds of work.
const MIN_MULTIPLY_ADDS: usize = 1 << 18;

/// Calls `work` with each index below `count`, on as many [threads](Workers) as it is worth.
///
/// Threads take indices in order from one counter. A calling thread that is none of the pool takes part in place of one of
/// them: were it to wait, as many threads as it wants would have to be woken, and an operating system that puts two of them
/// on the core it still sees busy leaves another idle for as long as a small problem takes.
///
/// Nothing is allocated inside of the pool, where a thread that comes late, or never, is not waited for. From outside,
/// rayon allocates a few bytes for each helper.
pub(crate) fn for_each(count: usize, multiply_adds: usize, schedule: LoopSchedule, work: impl Fn(usize) + Sync) {
    let worth = (count.saturating_mul(multiply_adds) / MIN_MULTIPLY_ADDS).max(1);
    let workers = Workers::find();
    let threads = workers.count().min(count).min(worth);
    if threads <= 1 {
        return (0..count).for_each(work);
    }
    let next = AtomicUsize::new(0);
    let take = || {
        let after = |first: usize| (first < count).then(|| first + schedule.run(count - first, threads));
        while let Ok(first) = next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, after) {
            (first..after(first).unwrap_or(count)).for_each(&work);
        }
    };
    let done = AtomicUsize::new(0);
    match workers {
        Workers::Alone => return take(),
        Workers::Current => return (0..threads).into_par_iter().with_max_len(1).for_each(|_| take()),
        Workers::Global => rayon::in_place_scope(|scope| share(scope, threads, &done, &take)),
        Workers::Own(pool) => pool.in_place_scope(|scope| share(scope, threads, &done, &take)),
    }
    spin_wait::keep_awake(threads - 1, workers);
}

/// Calls `take` on so many threads, the calling one included, which spin-waits for the others: they are about to be done,
/// and a thread that sleeps takes as long to wake as a small problem.
fn share<'scope>(scope: &Scope<'scope>, threads: usize, done: &'scope AtomicUsize, take: &'scope (impl Fn() + Sync)) {
    for _ in 1..threads {
        scope.spawn(|_| {
            take();
            done.fetch_add(1, Ordering::Release);
        });
    }
    take();
    spin_wait::wait_until(|| done.load(Ordering::Acquire) == threads - 1);
}

/// Loop schedule: indices that a thread takes at once (`dynamic` and `guided` of OpenMP).
#[derive(Clone, Copy)]
pub(crate) enum LoopSchedule {
    /// One at a time.
    Dynamic,
    /// A run of consecutive indices, shorter and shorter, for threads that are faster when they read on where they have
    /// read: what one has prefetched is then what it needs next.
    Guided,
}

impl LoopSchedule {
    /// Number of indices to take at once, when so many are left.
    fn run(self, left: usize, threads: usize) -> usize {
        match self {
            Self::Dynamic => 1,
            Self::Guided => (left / (RUNS_PER_THREAD * threads)).max(1),
        }
    }
}

/// Runs of each thread if all were as long as the first: so many that threads rarely wait for the last.
const RUNS_PER_THREAD: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    /// Every index once, on any number of threads, in either schedule.
    #[test]
    fn every_index_is_handed_out_once() {
        for threads in [1, 2, 7] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            for schedule in [LoopSchedule::Dynamic, LoopSchedule::Guided] {
                for count in [0, 1, 5, 256, 1000] {
                    let taken: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                    let take = |index: usize| _ = taken[index].fetch_add(1, Ordering::Relaxed);
                    pool.install(|| for_each(count, MIN_MULTIPLY_ADDS, schedule, take));
                    for_each(count, MIN_MULTIPLY_ADDS, schedule, take);
                    assert!(taken.iter().all(|times| times.load(Ordering::Relaxed) == 2), "{count} on {threads}");
                }
            }
        }
    }

    /// 256 items on 8 threads: the first runs are of 8, the last of 1.
    #[test]
    fn runs_get_shorter() {
        let runs: Vec<usize> = [256, 255, 128, 63, 1].map(|left| LoopSchedule::Guided.run(left, 8)).to_vec();
        assert_eq!(runs, [8, 7, 4, 1, 1]);
        assert_eq!(LoopSchedule::Dynamic.run(256, 8), 1);
    }
}
