//! Autotuning: searches the configs of a problem on a GPU, from the defaults of other problems, then one choice at a
//! time.

use std::time::{Duration, Instant};

use flashcore_ir::Arch;
use flashcore_kernels::{Config, Target, heuristics};

use crate::testkit::Workload;
use crate::testkit::gpu::Gpu;

/// A config must take less than this part of the time of the best to take its place.
const GAIN: f64 = 0.98;

/// Result of a config.
#[derive(Debug, Clone, PartialEq)]
pub struct Trial {
    /// The config.
    pub config: Config,
    /// Median time, if it was right.
    pub seconds: Result<f64, String>,
}

/// Result of a search.
#[derive(Debug, Clone, PartialEq)]
pub struct Found {
    /// The fastest config.
    pub best: Config,
    /// Median time of the best config.
    pub seconds: f64,
    /// The config that the problem has otherwise.
    pub default: Config,
    /// Median time of the default config.
    pub default_seconds: f64,
    /// Everything that was tried, in order.
    pub trials: Vec<Trial>,
}

/// Looks for at most `budget`. Every config is verified before it is timed; `go_on` hears of each before it begins, and
/// can stop the search.
pub fn tune(
    gpu: &Gpu,
    workload: &Workload,
    arch: Arch,
    num_sms: u32,
    budget: Duration,
    go_on: impl FnMut(usize, Config) -> bool,
) -> Result<Found, String> {
    let (problem, inputs) = (&workload.problem, workload.inputs(0));
    let points = heuristics::starting_points(problem, Target::new(arch, num_sms));
    let time = |config: Config| match gpu.time(problem, Some(config), &inputs) {
        Ok(Ok(times)) => Ok(times.hot.quantile(0.5)),
        Ok(Err(verdict)) => Err(verdict.to_string()),
        Err(error) => Err(error.to_string()),
    };
    climb(&points, |config| heuristics::search_space(config, problem, arch), time, budget, go_on)
}

/// Times the points, then the search space of the best, until none is better or the time is up.
fn climb(
    points: &[Config],
    search_space: impl Fn(Config) -> Vec<Config>,
    mut time: impl FnMut(Config) -> Result<f64, String>,
    budget: Duration,
    mut go_on: impl FnMut(usize, Config) -> bool,
) -> Result<Found, String> {
    let start = Instant::now();
    let default = *points.first().ok_or("no kernel takes the problem")?;
    let mut trials: Vec<Trial> = Vec::new();
    let mut queue: Vec<Config> = points.to_vec();
    let mut best: Option<(Config, f64)> = None;
    let mut is_stopped = false;
    while !queue.is_empty() && !is_stopped {
        let mut better = None;
        for config in queue.drain(..) {
            let is_over = start.elapsed() > budget && best.is_some();
            if is_stopped || is_over || trials.iter().any(|trial| trial.config == config) {
                continue;
            }
            if !go_on(trials.len(), config) {
                is_stopped = true;
                continue;
            }
            let seconds = time(config);
            if let Ok(seconds) = seconds
                && best.is_none_or(|(_, fastest)| seconds < GAIN * fastest)
            {
                best = Some((config, seconds));
                better = Some(config);
            }
            trials.push(Trial { config, seconds });
        }
        queue = better.map(&search_space).unwrap_or_default();
    }
    let first = trials.first().ok_or("nothing was tried")?;
    let default_seconds = first.seconds.clone().map_err(|error| format!("{default}: {error}"))?;
    let (best, seconds) = best.ok_or("no config is right")?;
    Ok(Found { best, seconds, default, default_seconds, trials })
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_kernels::ScalarConfig;

    fn scalar(threads: u32) -> Config {
        ScalarConfig { threads }.into()
    }

    fn threads(config: Config) -> u32 {
        config.tile_m()
    }

    #[test]
    fn the_search_goes_on_while_it_gets_better() {
        let search_space = |config: Config| vec![scalar(threads(config) / 2), scalar(threads(config) * 2)];
        // The best is 8; 16 is wrong whatever its time.
        let time = |config: Config| match threads(config) {
            16 => Err("wrong".to_owned()),
            threads => Ok(f64::from(threads).log2().mul_add(0.1, -0.3).abs() + 1.0),
        };
        let found = climb(&[scalar(64), scalar(32)], search_space, time, Duration::MAX, |_, _| true).expect("found");
        assert_eq!((found.best, found.default), (scalar(32), scalar(64)));
        let found = climb(&[scalar(64), scalar(2)], search_space, time, Duration::MAX, |_, _| true).expect("found");
        assert_eq!(found.best, scalar(8));
        assert_eq!(found.trials.len(), 6, "{:?}", found.trials);
        assert!(found.seconds < found.default_seconds);
    }

    #[test]
    fn a_little_faster_is_not_faster() {
        let search_space = |config: Config| vec![scalar(threads(config) + 1)];
        let time = |config: Config| Ok(1.0 - 0.001 * f64::from(threads(config)));
        let found = climb(&[scalar(64)], search_space, time, Duration::MAX, |_, _| true).expect("found");
        assert_eq!(found.best, scalar(64));
        assert_eq!(found.trials.len(), 2);
    }

    #[test]
    fn a_search_that_is_stopped_keeps_what_it_has() {
        let search_space = |config: Config| vec![scalar(threads(config) / 2)];
        let time = |config: Config| Ok(f64::from(threads(config)));
        let found = climb(&[scalar(64)], search_space, time, Duration::MAX, |number, _| number < 2).expect("found");
        assert_eq!((found.best, found.trials.len()), (scalar(32), 2));
        let nothing = climb(&[scalar(64)], search_space, time, Duration::MAX, |_, _| false);
        assert_eq!(nothing, Err("nothing was tried".to_owned()));
    }

    #[test]
    fn a_wrong_default_is_an_error() {
        let time = |_: Config| Err("wrong".to_owned());
        let found = climb(&[scalar(64)], |_| Vec::new(), time, Duration::MAX, |_, _| true);
        assert_eq!(found, Err("scalar-64: wrong".to_owned()));
    }
}
