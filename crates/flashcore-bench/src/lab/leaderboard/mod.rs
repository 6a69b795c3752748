//! Leaderboard: the best verified time of each problem on each machine, with its history.
//!
//! The file is a list of promotions, oldest first; the leader of a problem is the last of its promotions, and the others
//! are its history.

mod check;
mod plot;
mod promote;

use serde::{Deserialize, Serialize};

pub use check::{Checked, Regression, check};
pub use plot::plot;
pub use promote::{Candidate, MINIMUM_GAIN, MOST_SPREAD, Refusal, promote};

use crate::lab::compare::Interval;
use crate::lab::record::{Build, Content, Kind, Machine, Measurement, Origin, ProblemKey, impossible_seconds};

/// All promotions, oldest first.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Leaderboard {
    /// The promotions.
    pub promotions: Vec<Promotion>,
}

impl Content for Leaderboard {
    const KIND: Kind = Kind::Leaderboard;

    fn impossible(&self) -> Option<String> {
        let of = |promotion: &Promotion| {
            let Promotion { median_seconds, quarter_seconds, three_quarters_seconds, nine_tenths_seconds, .. } =
                promotion;
            let times = [median_seconds, quarter_seconds, three_quarters_seconds, nine_tenths_seconds];
            let times = times.into_iter().chain([&promotion.floor_seconds]);
            let reason = times.copied().find_map(impossible_seconds)?;
            Some(format!("{}, {}: {reason}", promotion.place.problem, promotion.kernel))
        };
        self.promotions.iter().find_map(of)
    }
}

/// A problem on a machine: what there is one leader of.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// `cpu` or `cuda`.
    pub backend: String,
    /// The processor or GPU.
    pub device: String,
    /// Threads, on a CPU.
    pub threads: Option<usize>,
    /// The problem.
    pub problem: ProblemKey,
}

impl Place {
    /// Place of a measurement.
    pub fn of(machine: &Machine, problem: &ProblemKey) -> Self {
        Self {
            backend: machine.backend.clone(),
            device: machine.device.clone(),
            threads: machine.threads,
            problem: problem.clone(),
        }
    }
}

/// A record that was the best of its place.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Promotion {
    /// Machine and problem that it leads.
    pub place: Place,
    /// The kernel.
    pub kernel: String,
    /// The architecture or level.
    pub arch: String,
    /// The median, in seconds.
    pub median_seconds: f64,
    /// The time below which a quarter of the samples lies.
    pub quarter_seconds: f64,
    /// The time below which three quarters lie.
    pub three_quarters_seconds: f64,
    /// The time below which nine tenths lie.
    pub nine_tenths_seconds: f64,
    /// Number of samples.
    pub samples: usize,
    /// The SHA-256 of the samples.
    pub samples_sha256: String,
    /// The time under which the machine cannot go.
    pub floor_seconds: f64,
    /// By how much it is faster than the one before, where there was one.
    pub gain: Option<Interval>,
    /// The program.
    pub build: Build,
    /// The driver, on a GPU.
    pub driver: Option<String>,
    /// Clocks, temperature and power, or load, when it was measured.
    pub state: Vec<(String, String)>,
    /// When it was measured.
    pub measured: String,
    /// Command that measured it.
    pub command: String,
}

impl Promotion {
    fn new(origin: &Origin, measurement: &Measurement, gain: Option<Interval>) -> Self {
        let hot = measurement.hot();
        Self {
            place: Place::of(&origin.machine, &measurement.problem),
            kernel: measurement.kernel.clone(),
            arch: origin.machine.arch.clone(),
            median_seconds: hot.quantile(0.5),
            quarter_seconds: hot.quantile(0.25),
            three_quarters_seconds: hot.quantile(0.75),
            nine_tenths_seconds: hot.quantile(0.9),
            samples: hot.seconds.len(),
            samples_sha256: measurement.samples_sha256.clone(),
            floor_seconds: measurement.floor_seconds,
            gain,
            build: origin.build.clone(),
            driver: origin.machine.driver.clone(),
            state: origin.machine.state.clone(),
            measured: origin.time.clone(),
            command: origin.command.clone(),
        }
    }
}

impl Leaderboard {
    /// The best of a place.
    pub fn leader(&self, place: &Place) -> Option<&Promotion> {
        self.promotions.iter().rev().find(|promotion| promotion.place == *place)
    }

    /// The best of every place, in the order in which places were first promoted.
    pub fn leaders(&self) -> Vec<&Promotion> {
        self.places().into_iter().filter_map(|place| self.leader(place)).collect()
    }

    /// All places, in the order in which they were first promoted.
    pub fn places(&self) -> Vec<&Place> {
        let mut places: Vec<&Place> = Vec::new();
        for promotion in &self.promotions {
            if !places.contains(&&promotion.place) {
                places.push(&promotion.place);
            }
        }
        places
    }

    /// All promotions of a place, oldest first.
    pub fn history(&self, place: &Place) -> Vec<&Promotion> {
        self.promotions.iter().filter(|promotion| promotion.place == *place).collect()
    }
}
