//! Measurements: the times of one problem, with its verdict, floor and hashes.

use core::fmt;

use flashcore_problem::{DTypes, Problem, Verdict};
use serde::{Deserialize, Serialize};

use super::{Content, Kind, impossible_seconds};
use crate::floor::{Bound, Work};
use crate::testkit::{ShapeError, Workload, mask_text, parse_mask, parse_workload};
use crate::timing::Times;
use crate::util::digest::sha256_of_numbers;

/// A problem as records name it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProblemKey {
    /// Batch, heads, lengths and dims, as `--shape` takes them.
    pub shape: String,
    /// The element type, with those of key and value and of the output where they are others, as in `f16 kv e4m3`.
    pub dtype: String,
    /// The mask, as `--mask` takes it.
    pub mask: String,
}

impl ProblemKey {
    /// The name of a problem without further features.
    pub fn of(problem: &Problem) -> Self {
        Self::of_workload(&problem.clone().into())
    }

    /// The name of a problem with scales of a form.
    pub fn of_workload(workload: &Workload) -> Self {
        let (dtype, mask) = (workload.dtypes().to_string(), mask_text(workload.mask));
        Self { shape: workload.shape(), dtype, mask }
    }

    /// The problem of this name, if it is one: records come from anywhere.
    pub fn problem(&self) -> Result<Problem, ShapeError> {
        Ok(self.workload()?.problem)
    }

    /// The problem of this name, with the form of its scales.
    pub fn workload(&self) -> Result<Workload, ShapeError> {
        let types: DTypes = self.dtype.parse().map_err(|_| ShapeError::Number {
            text: self.to_string(),
            part: self.dtype.clone(),
            meaning: "element type",
        })?;
        let workload = parse_workload(&self.shape, types)?.with_mask(parse_mask(&self.mask)?);
        let errors = workload.errors();
        if errors.is_empty() { Ok(workload) } else { Err(ShapeError::Problem { text: self.to_string(), errors }) }
    }
}

impl fmt::Display for ProblemKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} {} {}", self.shape, self.dtype, self.mask)
    }
}

/// Verdict of the gates before anything was timed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Verified {
    /// True if all of them passed.
    pub passed: bool,
    /// The largest error of an element; nothing where an element is no number.
    pub max_error: Option<f64>,
    /// Largest error of a careful implementation of the same precision.
    pub reference_max_error: Option<f64>,
    /// The norm of the errors over that of the output.
    pub relative_l2: Option<f64>,
    /// Complaints of the gates.
    pub complaints: Vec<String>,
}

impl Verified {
    /// Summary of a verdict.
    pub fn of(verdict: &Verdict) -> Self {
        let number = |value: f64| value.is_finite().then_some(value);
        Self {
            passed: verdict.passed(),
            max_error: number(verdict.max_error),
            reference_max_error: number(verdict.reference_max_error),
            relative_l2: number(verdict.relative_l2),
            complaints: verdict.failures.iter().map(ToString::to_string).collect(),
        }
    }
}

/// Times of one problem.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measurement {
    /// The kernel: a config of a GPU kernel, `default` for the one that the device takes, or the level of a CPU.
    pub kernel: String,
    /// The problem.
    pub problem: ProblemKey,
    /// The seed of its inputs.
    pub seed: u64,
    /// Verdict of the gates.
    pub verified: Verified,
    /// The SHA-256 of the output that was judged.
    pub output_sha256: Option<String>,
    /// Work of the problem.
    pub work: Work,
    /// Seconds under which the machine cannot do it.
    pub floor_seconds: f64,
    /// The resource that bounds the floor.
    pub bound: Bound,
    /// Seconds of each run with warm caches, in order.
    pub hot_seconds: Vec<f64>,
    /// Seconds of each run after a flush of the cache; none where that was not measured.
    pub cold_seconds: Vec<f64>,
    /// Median seconds of the host for one launch; nothing where that was not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub launch_seconds: Option<f64>,
    /// Processors that other programs kept busy meanwhile; nothing where that was not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other_cpus: Option<f64>,
    /// The SHA-256 of the warm samples.
    pub samples_sha256: String,
}

impl Measurement {
    /// The warm times.
    pub fn hot(&self) -> Times {
        Times { seconds: self.hot_seconds.clone() }
    }

    /// The median of the warm times.
    pub fn median(&self) -> f64 {
        self.hot().quantile(0.5)
    }

    /// True if it is faster than the machine can be, which only an error in measuring explains. `slack` is the relative
    /// error of a measured ceiling.
    pub fn is_below_floor(&self, slack: f64) -> bool {
        self.median() < self.floor_seconds * (1.0 - slack)
    }

    /// Spread of the middle half of the hot times, relative to the median.
    pub fn spread(&self) -> f64 {
        let hot = self.hot();
        (hot.quantile(0.75) - hot.quantile(0.25)) / hot.quantile(0.5)
    }

    /// The floor in percent of the median; nothing where the median lies below it, since one of the two is then wrong.
    pub fn efficiency_percent(&self) -> Option<f64> {
        let percent = 100.0 * self.floor_seconds / self.median();
        (percent <= 100.0).then_some(percent)
    }

    /// A number that nothing measures, in words.
    pub(crate) fn impossible(&self) -> Option<String> {
        const MOST_WORK: f64 = 1e30;
        let Work { flops, bytes, exponentials } = self.work;
        let times = self.hot_seconds.iter().chain(&self.cold_seconds).chain(&self.launch_seconds);
        let reason =
            times.chain([&self.floor_seconds]).find_map(|seconds| impossible_seconds(*seconds)).or_else(|| {
                let work = [flops, bytes, exponentials].into_iter().find(|work| !(0.0..=MOST_WORK).contains(work))?;
                Some(format!("its work is {work:e} operations; at most {MOST_WORK:e} are possible"))
            })?;
        Some(format!("{}, {}: {reason}", self.problem, self.kernel))
    }

    /// True if the samples match their hash.
    pub fn is_intact(&self) -> bool {
        sha256_of_numbers(&self.hot_seconds) == self.samples_sha256
    }
}

/// Times of problems.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measurements {
    /// One for each problem.
    pub rows: Vec<Measurement>,
}

impl Content for Measurements {
    const KIND: Kind = Kind::Measurements;

    fn impossible(&self) -> Option<String> {
        self.rows.iter().find_map(Measurement::impossible)
    }
}

#[cfg(test)]
impl Measurement {
    /// One for tests, of ten samples around a time.
    pub(crate) fn for_tests(shape: &str, seconds: f64) -> Self {
        let hot_seconds: Vec<f64> = (0..10).map(|sample| seconds * (1.0 + 0.001 * f64::from(sample % 3))).collect();
        let problem = ProblemKey { shape: shape.to_owned(), dtype: "f32".to_owned(), mask: "full".to_owned() };
        let work = Work::of(&problem.problem().expect("a problem"));
        Self {
            kernel: "avx2".to_owned(),
            problem,
            seed: 0,
            verified: Verified {
                passed: true,
                max_error: Some(1e-7),
                reference_max_error: Some(2e-7),
                relative_l2: Some(1e-7),
                complaints: Vec::new(),
            },
            output_sha256: None,
            work,
            floor_seconds: seconds / 2.0,
            bound: Bound::Arithmetic,
            samples_sha256: sha256_of_numbers(&hot_seconds),
            hot_seconds,
            cold_seconds: Vec::new(),
            launch_seconds: None,
            other_cpus: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_efficiency_is_above_a_hundred() {
        let measurement = Measurement::for_tests("1x8x512x64", 1e-3);
        let efficiency = |floor_seconds: f64| {
            let percent = Measurement { floor_seconds, ..measurement.clone() }.efficiency_percent();
            percent.map(f64::round)
        };
        assert_eq!(efficiency(0.5e-3), Some(50.0));
        assert_eq!(efficiency(1.1e-3), None);
    }
}
