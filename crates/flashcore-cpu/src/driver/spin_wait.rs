//! Spin-wait: workers that stay awake for [`SPIN_TIMEOUT`] after a call.
//!
//! Attention is seldom called once. A worker that falls asleep between two calls has to be woken, and on a virtual machine
//! whose processor was given away meanwhile that can take longer than the call. So workers keep looking for work, of
//! anybody's in the pool, before they sleep.

use crate::driver::workers::Workers;
use std::hint;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Time for which workers look for work: longer than what a caller does between two calls that follow each other.
const SPIN_TIMEOUT: Duration = Duration::from_micros(100);

/// Spinning workers of this process.
static SPINNING: SpinningWorkers = SpinningWorkers::new();

/// Keeps so many of the threads spinning; those that are spinning already count.
pub(crate) fn keep_awake(count: usize, workers: Workers) {
    SPINNING.keep_awake(count, workers);
}

/// Spins until a condition holds, for [`SPIN_TIMEOUT`] at most.
pub(crate) fn wait_until(holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() && start.elapsed() < SPIN_TIMEOUT {
        hint::spin_loop();
    }
}

/// Forgets workers that were left in the process that this one was forked from.
#[cfg_attr(not(unix), expect(dead_code, reason = "only there a process forks"))]
pub(crate) fn forget() {
    SPINNING.awake.store(0, Ordering::Relaxed);
}

struct SpinningWorkers {
    /// Calls so far: the timeout begins anew with each.
    calls: AtomicUsize,
    /// Number of workers that look for work.
    awake: AtomicUsize,
}

impl SpinningWorkers {
    const fn new() -> Self {
        Self { calls: AtomicUsize::new(0), awake: AtomicUsize::new(0) }
    }

    fn keep_awake(&'static self, count: usize, workers: Workers) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let one_more = |awake: usize| (awake < count).then_some(awake + 1);
        while self.awake.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_ok() {
            workers.spawn(|| self.look_for_work());
        }
    }

    fn look_for_work(&self) {
        let (mut calls, mut start) = (self.calls.load(Ordering::Relaxed), Instant::now());
        while start.elapsed() < SPIN_TIMEOUT {
            if !matches!(rayon::yield_now(), Some(rayon::Yield::Executed)) {
                hint::spin_loop();
            }
            let now = self.calls.load(Ordering::Relaxed);
            if now != calls {
                (calls, start) = (now, Instant::now());
            }
        }
        self.awake.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// Never more than wanted, however often, and none in the end.
    #[test]
    fn workers_are_counted_and_fall_asleep() {
        static OURS: SpinningWorkers = SpinningWorkers::new();
        for _ in 0..1000 {
            OURS.keep_awake(2, Workers::find());
            assert!(OURS.awake.load(Ordering::Relaxed) <= 2);
        }
        let start = Instant::now();
        while OURS.awake.load(Ordering::Relaxed) > 0 {
            assert!(start.elapsed() < Duration::from_secs(60), "a worker never sleeps");
            thread::sleep(Duration::from_millis(1));
        }
    }
}
