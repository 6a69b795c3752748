//! What a first run of a kernel on a tiny problem said of it.

use serde::{Deserialize, Serialize};

/// The verdict on a compiled kernel, kept with it in the cache.
///
/// Drivers have compiled valid PTX into wrong programs, so a kernel that is new to a driver is run once against the
/// oracle before it is trusted. This crate stores the verdict; whoever knows the oracle gives it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "verdict")]
pub enum SelfCheck {
    /// Nobody has run it yet.
    #[default]
    NotRun,
    /// Its output agreed with the oracle.
    Passed,
    /// Its output did not agree with the oracle: it must not be used.
    Failed {
        /// What was wrong.
        reason: String,
    },
}
