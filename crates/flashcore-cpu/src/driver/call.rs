//! From a problem to work items, and from what they give to the output.

use super::spin_wait;
use crate::attend::blocked::{AttendedPanel, MAX_LANES};
use crate::attend::group::Group;
use crate::attend::softmax::{Finished, finish, row_scale};
use crate::attend::{blocked, decode};
use crate::driver::output::{Disjoint, OutputRows};
use crate::driver::scheduler::{Item, TileScheduler};
use crate::driver::scratch::{Purpose, arena_bytes, with_scratch};
use crate::driver::workers::Workers;
use crate::microkernel::Microkernel;
use crate::microkernel::prefetch::CacheLines;
use crate::simd::real::Real;
use flashcore_problem::{InputViews, OutputViews, Problem};
use rayon::Scope;
use rayon::prelude::*;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use zerocopy::FromBytes;

/// Multiply-adds, at least, that another thread is woken for: a few microseconds of work.
const SMALLEST_SHARE: usize = 1 << 18;

/// Computes a problem whose inputs and outputs validated.
pub(crate) fn attend<K: Microkernel>(kernel: &K, problem: &Problem, inputs: &InputViews<'_>, outputs: OutputViews<'_>) {
    if problem.output_shape().is_empty() {
        return;
    }
    let call = Call {
        kernel,
        problem,
        inputs,
        outputs: OutputRows::new(problem, outputs),
        scheduler: TileScheduler::new(problem, inputs, K::PANEL_ROWS, K::MAX_ITEM_ROWS, Workers::find().count()),
    };
    let splits = call.scheduler.num_splits();
    if splits == 1 {
        call.each_item(
            |group, _, row, row_max, row_sum, values| call.finish_row(group, row, row_max, row_sum, values),
            |group, _, panel| call.finish_panel(group, panel),
        );
        return;
    }
    let (groups, rows) = (call.scheduler.groups, Group::row_count(problem));
    let parts = groups * rows * splits;
    let size = problem.value_dim;
    let bytes = 2 * arena_bytes::<K::Real>(parts) + arena_bytes::<K::Real>(parts * size);
    with_scratch(Purpose::Partials, bytes, |mut arena| {
        let partials = Partials {
            row_max: Disjoint::new(arena.take::<K::Real>(parts)),
            row_sum: Disjoint::new(arena.take::<K::Real>(parts)),
            values: Disjoint::new(arena.take::<K::Real>(parts * size)),
            size,
        };
        let keep = |item: &Item, row: usize, row_max: K::Real, row_sum: K::Real, values: &[K::Real]| {
            // SAFETY: each chunk of a row is of one item, and each item is computed once.
            let part = unsafe { partials.get((item.group * rows + row) * splits + item.split_index, 1) };
            (part.row_max[0], part.row_sum[0]) = (row_max, row_sum);
            part.values.copy_from_slice(values);
        };
        call.each_item(
            |_, item, row, row_max, row_sum, values| keep(item, row, row_max, row_sum, values),
            |_, item, panel| {
                let factors = [K::Real::ONE; MAX_LANES];
                kernel.transpose(panel.columns, &factors[..panel.row_sum.len()], panel.rows_scratch);
                for (lane, (row, values)) in panel.rows.zip(panel.rows_scratch.chunks_exact(size)).enumerate() {
                    keep(item, row, panel.row_max[lane], panel.row_sum[lane], values);
                }
            },
        );
        for_each(groups * rows, splits * size, LoopSchedule::Dynamic, |index| {
            // SAFETY: each row is put together once, and the items are done.
            let mut parts = unsafe { partials.get(index * splits, splits) };
            let (row_max, row_sum) = parts.merge();
            call.finish_row(&call.group(index / rows), index % rows, row_max, row_sum, &parts.values[..size]);
        });
    });
}

/// One problem while it is computed.
struct Call<'a, K> {
    kernel: &'a K,
    problem: &'a Problem,
    inputs: &'a InputViews<'a>,
    outputs: OutputRows<'a>,
    scheduler: TileScheduler,
}

impl<K: Microkernel> Call<'_, K> {
    /// Computes all items. Hands each of their rows with its maximum, sum and weighted sum to `deliver_row`, or each strip
    /// of rows to `deliver_panel`.
    fn each_item(
        &self,
        deliver_row: impl Fn(&Group<'_>, &Item, usize, K::Real, K::Real, &[K::Real]) + Sync,
        deliver_panel: impl Fn(&Group<'_>, &Item, AttendedPanel<'_, K::Real>) + Sync,
    ) {
        let (problem, scheduler) = (self.problem, &self.scheduler);
        let (rows, keys) = (Group::row_count(problem), scheduler.keys.len());
        let columns = problem.head_dim + problem.value_dim;
        let work =
            scheduler.groups.saturating_mul(rows).saturating_mul(keys).saturating_mul(columns) / scheduler.items();
        let bytes = if scheduler.is_decode {
            decode::scratch_bytes::<K::Real>(problem)
        } else {
            blocked::scratch_bytes::<K>(problem, scheduler.largest_rows())
        };
        let order = if scheduler.is_decode { LoopSchedule::Guided } else { LoopSchedule::Dynamic };
        for_each(scheduler.items(), work, order, |index| {
            let item = scheduler.item(index);
            let group = self.group(item.group);
            with_scratch(Purpose::Item, bytes, |mut arena| {
                let (rows, keys) = (item.rows.clone(), item.keys.clone());
                self.kernel.on_thread(|| {
                    if scheduler.is_decode {
                        decode::attend_rows(self.kernel, &group, keys, &mut arena, |row, row_max, row_sum, values| {
                            deliver_row(&group, &item, row, row_max, row_sum, values);
                        });
                    } else {
                        let output_lines = |rows: &Range<usize>| self.output_lines(&group, rows);
                        blocked::attend_rows(self.kernel, &group, rows, keys, &mut arena, output_lines, |panel| {
                            deliver_panel(&group, &item, panel);
                        });
                    }
                });
            });
        });
    }

    fn group(&self, index: usize) -> Group<'_> {
        Group::new(self.problem, self.inputs, index / self.problem.key_heads, index % self.problem.key_heads)
    }

    /// Where rows will be written when they have met their last keys, if that is one place.
    fn output_lines(&self, group: &Group<'_>, rows: &Range<usize>) -> CacheLines {
        let rows = group.rows_of_one_head(rows).filter(|_| self.scheduler.num_splits() == 1);
        rows.and_then(|(head, rows)| self.outputs.addresses(group.batch, head, &rows))
            .map_or(CacheLines::NONE, CacheLines::new)
    }

    /// Writes the output of a strip of rows whose keys have all been attended: at once where they lie one behind the other.
    fn finish_panel(&self, group: &Group<'_>, panel: AttendedPanel<'_, K::Real>) {
        let (lanes, value_dim) = (panel.row_sum.len(), self.problem.value_dim);
        let mut factors = [K::Real::ONE; MAX_LANES];
        // SAFETY: each row is finished once.
        let Some((head, bytes, mut log_sum_exp)) = (unsafe { self.neighbours(group, &panel) }) else {
            self.kernel.transpose(panel.columns, &factors[..lanes], panel.rows_scratch);
            for (lane, (row, values)) in panel.rows.zip(panel.rows_scratch.chunks_exact(value_dim)).enumerate() {
                self.finish_row(group, row, panel.row_max[lane], panel.row_sum[lane], values);
            }
            return;
        };
        let sink = group.scoring.sink(head);
        let mut attend_nothing = [false; MAX_LANES];
        for (lane, (&row_max, &row_sum)) in panel.row_max.iter().zip(panel.row_sum).enumerate() {
            let finished = finish(row_max, row_sum, sink);
            if let Some(places) = &mut log_sum_exp {
                places[lane] = log_sum_exp_of(finished.as_ref());
            }
            attend_nothing[lane] = finished.is_none();
            factors[lane] = finished.map_or(K::Real::ZERO, |finished| finished.factor);
        }
        let write = |rows: &mut [K::Real]| {
            self.kernel.transpose(panel.columns, &factors[..lanes], rows);
            for (row, &attends_nothing) in rows.chunks_exact_mut(value_dim).zip(&attend_nothing) {
                if attends_nothing {
                    row.fill(K::Real::ZERO);
                }
            }
        };
        let dtype = self.problem.dtype;
        if dtype == K::Real::DTYPE
            && let Ok(rows) = <[K::Real]>::mut_from_bytes(bytes)
        {
            write(rows);
        } else {
            write(panel.rows_scratch);
            self.kernel.store(dtype, panel.rows_scratch, K::Real::ONE, bytes);
        }
    }

    /// The head of a strip and where its rows are written, with their log-sum-exps where those are wanted, if every lane is
    /// a row, and they lie one behind the other.
    ///
    /// # Safety
    ///
    /// No row of the strip is in use.
    #[expect(clippy::type_complexity, reason = "two places are written")]
    #[expect(clippy::mut_from_ref, reason = "callers vouch that no row is in use")]
    unsafe fn neighbours(
        &self,
        group: &Group<'_>,
        panel: &AttendedPanel<'_, K::Real>,
    ) -> Option<(usize, &mut [u8], Option<&mut [f32]>)> {
        let (head, rows) = group.rows_of_one_head(&panel.rows)?;
        if rows.len() != panel.row_sum.len() {
            return None;
        }
        // SAFETY: the caller vouches for the rows.
        let (bytes, log_sum_exp) = unsafe { self.outputs.neighbours(group.batch, head, rows)? };
        Some((head, bytes, log_sum_exp))
    }

    /// Writes the output of a row whose keys have all been attended.
    fn finish_row(&self, group: &Group<'_>, row: usize, row_max: K::Real, row_sum: K::Real, values: &[K::Real]) {
        let (head, row) = group.place(row);
        let finished = finish(row_max, row_sum, group.scoring.sink(head));
        // SAFETY: each row is finished once.
        let (bytes, log_sum_exp) = unsafe { self.outputs.row(group.batch, head, row) };
        if let Some(finished) = &finished {
            self.kernel.store(self.problem.dtype, values, finished.factor, bytes);
        } else {
            bytes.fill(0);
        }
        if let Some(place) = log_sum_exp {
            *place = log_sum_exp_of(finished.as_ref());
        }
    }
}

/// What is written for a row; minus infinity where nothing was attended.
fn log_sum_exp_of<R: Real>(finished: Option<&Finished<R>>) -> f32 {
    finished.map_or(f32::NEG_INFINITY, |finished| finished.log_sum_exp().to_f64() as f32)
}

/// What the chunks of all rows have given: those of a row lie one beside the other, in order.
struct Partials<'a, R> {
    row_max: Disjoint<'a, R>,
    row_sum: Disjoint<'a, R>,
    values: Disjoint<'a, R>,
    /// Elements of `values` for each chunk of a row.
    size: usize,
}

/// Some of them.
struct Parts<'a, R> {
    row_max: &'a mut [R],
    row_sum: &'a mut [R],
    values: &'a mut [R],
}

impl<R: Real> Partials<'_, R> {
    /// # Safety
    ///
    /// None of them is in use.
    unsafe fn get(&self, first: usize, count: usize) -> Parts<'_, R> {
        // SAFETY: the caller vouches that nobody else uses these parts.
        unsafe {
            Parts {
                row_max: self.row_max.part(first, count),
                row_sum: self.row_sum.part(first, count),
                values: self.values.part(first * self.size, count * self.size),
            }
        }
    }
}

impl<R: Real> Parts<'_, R> {
    /// Returns maximum and sum of the whole row; its weighted sum is left in the first part.
    fn merge(&mut self) -> (R, R) {
        let row_max = self.row_max.iter().fold(R::NEGATIVE_INFINITY, |largest, &other| largest.maximum(other));
        let (first, others) = self.values.split_at_mut(self.values.len() / self.row_sum.len());
        let factor = row_scale(self.row_max[0], row_max);
        let mut row_sum = self.row_sum[0] * factor;
        for element in &mut *first {
            *element *= factor;
        }
        for (part, values) in others.chunks_exact(first.len()).enumerate() {
            let factor = row_scale(self.row_max[part + 1], row_max);
            row_sum += self.row_sum[part + 1] * factor;
            for (element, &value) in first.iter_mut().zip(values) {
                *element += value * factor;
            }
        }
        (row_max, row_sum)
    }
}

/// Calls `work` with each index below `count`, on as many [threads](Workers) as it is worth.
///
/// Threads take indices in order from one counter, as `order` says. A calling thread that is none of the pool takes part in place of one of
/// them: were it to wait, as many threads as it asks for would have to be woken, and a scheduler that puts two of them on
/// the core it still sees busy leaves another idle for as long as a small problem takes.
///
/// Nothing is allocated inside of the pool, where a thread that comes late, or never, is not waited for. From outside,
/// rayon allocates a few bytes for each helper.
pub(crate) fn for_each(count: usize, multiply_adds: usize, order: LoopSchedule, work: impl Fn(usize) + Sync) {
    let worth = (count.saturating_mul(multiply_adds) / SMALLEST_SHARE).max(1);
    let workers = Workers::find();
    let threads = workers.count().min(count).min(worth);
    if threads <= 1 {
        return (0..count).for_each(work);
    }
    let next = AtomicUsize::new(0);
    let take = || {
        let after = |first: usize| (first < count).then(|| first + order.run(count - first, threads));
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

/// Calls `take` on so many threads, the calling one included, which waits for the others awake: they are about to be done,
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

/// How indices are handed out to threads.
#[derive(Clone, Copy)]
pub(crate) enum LoopSchedule {
    /// One after the other, to whoever asks next.
    Dynamic,
    /// Several neighbours at once, fewer and fewer, to threads that are faster when they read on where they have read. What
    /// is asked for ahead of time is then what the same thread needs next.
    Guided,
}

impl LoopSchedule {
    /// How many indices are handed out at once, when so many are left.
    fn run(self, left: usize, threads: usize) -> usize {
        match self {
            Self::Dynamic => 1,
            Self::Guided => (left / (RUNS_PER_THREAD * threads)).max(1),
        }
    }
}

/// Runs that each thread would have if all were as long as the first: so many that threads rarely wait for the last.
const RUNS_PER_THREAD: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    /// Every index once, on any number of threads, in either order.
    #[test]
    fn every_index_is_handed_out_once() {
        for threads in [1, 2, 7] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            for order in [LoopSchedule::Dynamic, LoopSchedule::Guided] {
                for count in [0, 1, 5, 256, 1000] {
                    let taken: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                    let take = |index: usize| _ = taken[index].fetch_add(1, Ordering::Relaxed);
                    pool.install(|| for_each(count, SMALLEST_SHARE, order, take));
                    for_each(count, SMALLEST_SHARE, order, take);
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
