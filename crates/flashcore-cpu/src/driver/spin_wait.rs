//! Helpers that stay awake for a moment after a call.
//!
//! Attention is seldom called once. A helper that falls asleep between two calls has to be woken, and on a virtual machine
//! whose processor was given away meanwhile that can take longer than the call. So for [`SPIN_TIMEOUT`] helpers keep looking
//! for work, of anybody's in the pool, before they sleep.

use crate::driver::workers::Workers;
use std::hint;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long helpers look for work: longer than what a caller does between two calls that follow each other.
const SPIN_TIMEOUT: Duration = Duration::from_micros(100);

/// The helpers of this process that look for work.
static HELPERS: Helpers = Helpers::new();

/// Keeps so many of the threads awake for a moment; those that are awake already count.
pub(crate) fn keep_awake(helpers: usize, workers: Workers) {
    HELPERS.keep_awake(helpers, workers);
}

/// Waits until something is so, for a moment at most.
pub(crate) fn wait_until(is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() && start.elapsed() < SPIN_TIMEOUT {
        hint::spin_loop();
    }
}

/// Forgets helpers that were left in the process that this one was forked from.
#[cfg_attr(not(unix), expect(dead_code, reason = "only there a process forks"))]
pub(crate) fn forget() {
    HELPERS.awake.store(0, Ordering::Relaxed);
}

struct Helpers {
    /// Calls so far: the moment begins with each.
    calls: AtomicUsize,
    /// How many look for work.
    awake: AtomicUsize,
}

impl Helpers {
    const fn new() -> Self {
        Self { calls: AtomicUsize::new(0), awake: AtomicUsize::new(0) }
    }

    fn keep_awake(&'static self, helpers: usize, workers: Workers) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let one_more = |awake: usize| (awake < helpers).then_some(awake + 1);
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

    /// No more than were asked for, however often, and none in the end.
    #[test]
    fn helpers_are_counted_and_fall_asleep() {
        static OURS: Helpers = Helpers::new();
        for _ in 0..1000 {
            OURS.keep_awake(2, Workers::find());
            assert!(OURS.awake.load(Ordering::Relaxed) <= 2);
        }
        let start = Instant::now();
        while OURS.awake.load(Ordering::Relaxed) > 0 {
            assert!(start.elapsed() < Duration::from_secs(60), "a helper never sleeps");
            thread::sleep(Duration::from_millis(1));
        }
    }
}
