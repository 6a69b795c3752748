//! A/A noise: the difference between two timings of the same problem on this machine.

use std::time::Instant;

use flashcore_bench::timing::Times;
use flashcore_problem::{DType, Inputs, Outputs, Problem};
use serde_json::json;

use super::finding::{Finding, Section, State};

const PAIRS: usize = 40;
/// Runs that warm caches, clocks and threads, and do not count.
const WARM_UP: usize = 5;
/// Above this, nine pairs in ten are no help in telling versions apart.
const NOISY_PERCENT: f64 = 10.0;

pub(super) fn section() -> Section {
    let problem = Problem::new(1, 4, 256, 64, DType::F32);
    let inputs = Inputs::random(&problem, 0);
    let mut outputs = Outputs::poisoned(&problem);
    let mut time = || {
        let start = Instant::now();
        flashcore_cpu::attend(&problem, &inputs, &mut outputs).map(|()| start.elapsed().as_secs_f64())
    };
    let mut measure = || {
        for _ in 0..WARM_UP {
            time()?;
        }
        (0..PAIRS).map(|_| Ok((time()?, time()?))).collect::<Result<Vec<(f64, f64)>, flashcore_cpu::CpuError>>()
    };
    let (state, text, value) = match measure() {
        Err(error) => (State::Failed, error.to_string(), json!({ "reason": error.to_string() })),
        Ok(pairs) => {
            let noise = Noise::of(&pairs);
            let state = if noise.nine_in_ten > NOISY_PERCENT { State::Note } else { State::Well };
            let value = json!({
                "pairs": PAIRS,
                "milliseconds": noise.milliseconds,
                "median_percent": noise.median,
                "half_within_percent": noise.half,
                "nine_in_ten_within_percent": noise.nine_in_ten,
            });
            (state, noise.words(), value)
        }
    };
    Section { key: "noise", value, findings: vec![Finding::new("A/A noise", state, text)] }
}

/// Difference of the second of a pair from the first, in percent of their mean.
struct Noise {
    milliseconds: f64,
    median: f64,
    half: f64,
    nine_in_ten: f64,
}

impl Noise {
    fn of(pairs: &[(f64, f64)]) -> Self {
        // A is the first and the second run alternately, so that drift cancels.
        let difference = |(index, &(first, second)): (usize, &(f64, f64))| {
            let (a, b) = if index % 2 == 0 { (first, second) } else { (second, first) };
            200.0 * (b - a) / (a + b)
        };
        let signed = Times { seconds: pairs.iter().enumerate().map(difference).collect() };
        let distances = Times { seconds: signed.seconds.iter().map(|percent| percent.abs()).collect() };
        let all = Times { seconds: pairs.iter().flat_map(|&(first, second)| [first, second]).collect() };
        Self {
            milliseconds: all.quantile(0.5) * 1e3,
            median: signed.quantile(0.5),
            half: distances.quantile(0.5),
            nine_in_ten: distances.quantile(0.9),
        }
    }

    fn words(&self) -> String {
        let Self { milliseconds, median, half, nine_in_ten } = self;
        format!(
            "one problem of {milliseconds:.2} ms, timed in {PAIRS} pairs on the CPU: the two times differ by {median:+.1} % in \
             the median, by less than {half:.1} % in half of the pairs and by less than {nine_in_ten:.1} % in 90 %; \
             smaller differences between single timings are noise"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_times_have_no_noise_and_drift_cancels() {
        let still = Noise::of(&[(1.0, 1.0); 4]);
        assert_eq!((still.milliseconds, still.median, still.half, still.nine_in_ten), (1e3, 0.0, 0.0, 0.0));
        let drift = Noise::of(&[(0.9, 1.1); 4]);
        assert!(drift.median.abs() < 1e-9 && (drift.half - 20.0).abs() < 1e-9, "{}", drift.words());
    }
}
