//! Helpers that stay awake for a moment after a call.
//!
//! Attention is seldom called once. A helper that falls asleep between two calls has to be woken, and on a virtual machine
//! whose processor was given away meanwhile that can take longer than the call. So for [`A_MOMENT`] helpers keep looking
//! for work, of anybody's in the pool, before they sleep.

use std::hint;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long helpers look for work: longer than what a caller does between two calls that follow each other.
const A_MOMENT: Duration = Duration::from_micros(100);

/// The helpers of this process that look for work.
static HELPERS: Helpers = Helpers::new();

/// Keeps so many threads of the current pool awake for a moment; those that are awake already count.
pub(crate) fn keep_awake(helpers: usize) {
    HELPERS.keep_awake(helpers);
}

struct Helpers {
    /// Where times are counted from.
    start: LazyLock<Instant>,
    /// Until when they look for work, in nanoseconds.
    until: AtomicU64,
    /// How many do.
    awake: AtomicUsize,
}

impl Helpers {
    const fn new() -> Self {
        Self { start: LazyLock::new(Instant::now), until: AtomicU64::new(0), awake: AtomicUsize::new(0) }
    }

    fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    fn keep_awake(&'static self, helpers: usize) {
        self.until.store(self.now() + A_MOMENT.as_nanos() as u64, Ordering::Relaxed);
        let one_more = |awake: usize| (awake < helpers).then_some(awake + 1);
        while self.awake.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_ok() {
            rayon::spawn(|| self.look_for_work());
        }
    }

    fn look_for_work(&self) {
        while self.now() < self.until.load(Ordering::Relaxed) {
            if !matches!(rayon::yield_now(), Some(rayon::Yield::Executed)) {
                hint::spin_loop();
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
            OURS.keep_awake(2);
            assert!(OURS.awake.load(Ordering::Relaxed) <= 2);
        }
        let start = Instant::now();
        while OURS.awake.load(Ordering::Relaxed) > 0 {
            assert!(start.elapsed() < Duration::from_secs(60), "a helper never sleeps");
            thread::sleep(Duration::from_millis(1));
        }
    }
}
