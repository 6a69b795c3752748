//! Peak rate of a processor: the highest of what was measured, on which its floors rest.
//!
//! Whatever else runs on a machine makes a measured peak smaller than it is, and never larger; a peak that is too small
//! makes a floor that is too high, and a right time looks impossible. So a peak is measured in several windows, before,
//! between and after the times that stand beside it, and the largest counts. A time that is still below its floor has
//! the peak measured again.

use std::time::Duration;

use flashcore_cpu::Level;
use flashcore_problem::DType;

use crate::floor::{Bound, Ceilings, Work};

/// Windows that a time below its floor is worth.
const FURTHER_WINDOWS: usize = 8;
/// From one of these windows to the next, so that a neighbour's burst does not hit all of them.
const PAUSE: Duration = Duration::from_millis(20);

/// The threads that CPU work is done by: those of the pool, which `RAYON_NUM_THREADS`, the affinity of the process and
/// `--threads` decide.
pub fn working_threads() -> usize {
    rayon::current_num_threads()
}

/// The largest rate that has been measured, in operations per second.
pub struct Peak<M> {
    measure: M,
    pause: Duration,
    seen: f64,
}

impl Peak<Box<dyn FnMut() -> f64>> {
    /// The peak of this machine's processor for problems of a type, on the threads that work.
    pub fn of_cpu(level: Level, dtype: DType) -> Self {
        let mut peak = Self::known_of_cpu(0.0, level, dtype);
        peak.look();
        peak
    }

    /// Peak of a processor of which one rate has been measured already.
    pub fn known_of_cpu(flops: f64, level: Level, dtype: DType) -> Self {
        let threads = working_threads();
        Self::known(flops, Box::new(move || flashcore_cpu::measured_peak_of(level, dtype, threads)))
    }
}

impl<M: FnMut() -> f64> Peak<M> {
    /// A peak that is measured once, now.
    pub fn new(measure: M) -> Self {
        let mut peak = Self { measure, pause: PAUSE, seen: 0.0 };
        peak.look();
        peak
    }

    /// A peak that has been measured, and will be measured again where that is needed.
    pub const fn known(flops: f64, measure: M) -> Self {
        Self { measure, pause: PAUSE, seen: flops }
    }

    /// Measures another window.
    pub fn look(&mut self) {
        self.seen = self.seen.max((self.measure)());
    }

    /// The largest rate so far.
    pub const fn flops(&self) -> f64 {
        self.seen
    }

    /// The ceilings of a processor: its problems stay in the caches, and its exponentials are arithmetic.
    pub const fn ceilings(&self) -> Ceilings {
        Ceilings { flops: self.seen, bytes: f64::INFINITY, exponentials: f64::INFINITY }
    }

    /// The floor of some work, measured again while a time lies below it.
    pub fn floor_below(&mut self, work: Work, seconds: f64) -> (f64, Bound) {
        for _ in 0..FURTHER_WINDOWS {
            if self.ceilings().floor(work).0 <= seconds {
                break;
            }
            std::thread::sleep(self.pause);
            self.look();
        }
        self.ceilings().floor(work)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine whose windows give these rates, and the last of them for ever.
    fn peak(rates: &[f64]) -> Peak<impl FnMut() -> f64> {
        let mut rates = rates.to_vec();
        let next = move || if rates.len() > 1 { rates.remove(0) } else { rates[0] };
        Peak { pause: Duration::ZERO, ..Peak::new(next) }
    }

    const WORK: Work = Work { flops: 1000.0, bytes: 1.0, exponentials: 1.0 };

    #[test]
    fn the_largest_window_counts() {
        let mut peak = peak(&[100.0, 200.0, 50.0]);
        assert_eq!(peak.flops(), 100.0);
        peak.look();
        peak.look();
        assert_eq!(peak.flops(), 200.0);
    }

    #[test]
    fn a_neighbour_makes_no_time_impossible() {
        // The machine does 200 a second and is disturbed in all windows but one; the work took 5.5 seconds.
        let mut disturbed = peak(&[90.0, 100.0, 95.0, 200.0, 80.0]);
        assert_eq!(disturbed.floor_below(WORK, 5.5), (5.0, Bound::Arithmetic));
        assert_eq!(disturbed.flops(), 200.0);
    }

    #[test]
    fn a_time_above_its_floor_costs_no_window() {
        let mut windows = 0;
        let floor = Peak::new(|| {
            windows += 1;
            100.0
        })
        .floor_below(WORK, 10.0);
        assert_eq!((floor, windows), ((10.0, Bound::Arithmetic), 1));
    }

    #[test]
    fn what_stays_below_its_floor_is_not_hidden() {
        let mut never = peak(&[100.0]);
        assert_eq!(never.floor_below(WORK, 4.0), (10.0, Bound::Arithmetic));
    }
}
