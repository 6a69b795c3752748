//! The verdict of a kernel's first run, on a tiny problem.

use serde::{Deserialize, Serialize};

/// The verdict on a compiled kernel, kept with it in the cache.
///
/// Drivers have compiled valid PTX into wrong programs, so a kernel that is new to a driver is run once against the
/// oracle before it is trusted. This crate stores the verdict; the caller, who knows the oracle, gives it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "verdict")]
pub enum SelfCheck {
    /// Not run yet.
    #[default]
    NotRun,
    /// The output agreed with the oracle.
    Passed,
    /// The output did not agree with the oracle: the kernel must not be used.
    Failed {
        /// The difference.
        reason: String,
    },
}
