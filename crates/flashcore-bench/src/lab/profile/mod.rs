//! Profile of a kernel: counters of the hardware, those of the simulator beside them, gates, and the bottleneck in words.
//!
//! Hardware counters come from `ncu`, where there is a GPU and `ncu`; the simulator counts everywhere.

mod bottleneck;
mod gates;
mod metrics;
mod ncu;
mod simulated;

use serde::{Deserialize, Serialize};

pub use bottleneck::{Bottleneck, Evidence, classify};
pub use gates::{Gate, GateResult, Gates};
pub use metrics::{DEFINITIONS, Definition, Metric, metrics};
pub use ncu::{Ncu, NcuError, Sampled, parse_csv};
pub use simulated::{Simulated, simulate_counters};

use crate::lab::record::{Content, Kind, ProblemKey, impossible_seconds};

/// Profiles of kernels.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// One for each kernel and problem.
    pub rows: Vec<ProfiledKernel>,
}

impl Content for Profile {
    const KIND: Kind = Kind::Profile;

    fn impossible(&self) -> Option<String> {
        let of = |row: &ProfiledKernel| {
            let reason = impossible_seconds(row.seconds?)?;
            Some(format!("{}, {}: {reason}", row.problem, row.kernel))
        };
        self.rows.iter().find_map(of)
    }
}

/// One kernel on one problem.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfiledKernel {
    /// The config.
    pub kernel: String,
    /// The problem.
    pub problem: ProblemKey,
    /// The problem that the simulator executed, and how many times as much the whole is.
    pub simulated: Option<(ProblemKey, f64)>,
    /// Seconds of a launch between events, where there is a GPU.
    pub seconds: Option<f64>,
    /// The version of ncu, where it ran.
    pub ncu: Option<String>,
    /// Counters of hardware and simulator.
    pub metrics: Vec<Metric>,
    /// The bottleneck.
    pub bottleneck: Bottleneck,
    /// The numbers that show it.
    pub reason: String,
    /// Metrics that are missing, and how to get them.
    pub notes: Vec<String>,
}

impl ProfiledKernel {
    /// True if all gates passed.
    pub fn passed(&self) -> bool {
        self.metrics.iter().all(|metric| metric.gate.as_ref().is_none_or(|gate| gate.passed))
    }
}
