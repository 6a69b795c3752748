//! Timing: repeated runs, quantiles, memory bandwidth.

use std::time::{Duration, Instant};

use flashcore_problem::{Inputs, Outputs, Problem};
use serde::Serialize;

/// Measured times of one thing.
#[derive(Debug, Clone, Serialize)]
pub struct Times {
    /// Seconds of each run, in the order they were made.
    pub seconds: Vec<f64>,
}

impl Times {
    /// Runs `work` once to warm up, then until `budget` is spent, at least `least` times.
    pub fn measure<E>(budget: Duration, least: usize, mut work: impl FnMut() -> Result<(), E>) -> Result<Self, E> {
        work()?;
        let begin = Instant::now();
        let mut seconds = Vec::new();
        while seconds.len() < least || begin.elapsed() < budget {
            let start = Instant::now();
            work()?;
            seconds.push(start.elapsed().as_secs_f64());
        }
        Ok(Self { seconds })
    }

    /// The value below which the fraction `quantile` of the runs lies.
    pub fn quantile(&self, quantile: f64) -> f64 {
        let mut sorted = self.seconds.clone();
        sorted.sort_by(f64::total_cmp);
        let position = quantile * (sorted.len().saturating_sub(1)) as f64;
        let (below, above) = (position.floor() as usize, position.ceil() as usize);
        let (Some(below_value), Some(above_value)) = (sorted.get(below), sorted.get(above)) else { return f64::NAN };
        below_value + (above_value - below_value) * (position - below as f64)
    }

    /// The mean.
    pub fn mean(&self) -> f64 {
        self.seconds.iter().sum::<f64>() / self.seconds.len() as f64
    }

    /// The standard deviation.
    pub fn deviation(&self) -> f64 {
        let mean = self.mean();
        let squares: f64 = self.seconds.iter().map(|seconds| (seconds - mean).powi(2)).sum();
        (squares / self.seconds.len() as f64).sqrt()
    }
}

/// Bytes per second, read and written together, of copies in memory by `threads` threads at once, measured now.
pub fn measured_cpu_bandwidth(threads: usize) -> f64 {
    const TRIES: usize = 5;
    // Larger than any cache that a thread has to itself; all together larger than any cache that they share, and no more
    // than a large machine has to spare.
    const MOST_IN_ALL: usize = 1 << 32;
    let bytes = (MOST_IN_ALL / (2 * threads.max(1))).min(1 << 26);
    let best_of_one_thread = || {
        let from = vec![1u8; bytes];
        let mut to = vec![2u8; bytes];
        let mut copy = || {
            let start = Instant::now();
            to.copy_from_slice(std::hint::black_box(&from));
            std::hint::black_box(&mut to);
            (2 * bytes) as f64 / start.elapsed().as_secs_f64()
        };
        (0..TRIES).map(|_| copy()).fold(0.0, f64::max)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(best_of_one_thread)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or(0.0)).sum()
    })
}

/// Times the CPU backend on a problem, and gives what the last run wrote.
pub fn time_cpu(
    problem: &Problem,
    inputs: &Inputs,
    budget: Duration,
) -> Result<(Times, Outputs), flashcore_cpu::CpuError> {
    let mut outputs = Outputs::poisoned(problem);
    let times = Times::measure(budget, 5, || flashcore_cpu::attend(problem, inputs, &mut outputs))?;
    Ok((times, outputs))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_interpolate() {
        let times = Times { seconds: vec![4.0, 1.0, 3.0, 2.0] };
        assert_eq!(times.quantile(0.0).to_bits(), 1.0f64.to_bits());
        assert_eq!(times.quantile(0.5).to_bits(), 2.5f64.to_bits());
        assert_eq!(times.quantile(1.0).to_bits(), 4.0f64.to_bits());
    }
}
