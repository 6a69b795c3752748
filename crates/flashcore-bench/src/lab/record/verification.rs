//! Verification results as records keep them.

use serde::{Deserialize, Serialize};

use super::{Content, Kind};
use crate::testkit::jobs::Judged;

/// Results of a list of cases.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Verification {
    /// Backend, with its level where there is one.
    pub backend: String,
    /// Number of cases that passed.
    pub passed: usize,
    /// Cases that failed.
    pub failed: Vec<FailedCase>,
    /// True if all cases were run; somebody may have pressed Ctrl-C.
    pub is_complete: bool,
}

/// A case that was not right.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FailedCase {
    /// The case.
    pub case: String,
    /// Complaints of the gates.
    pub complaints: Vec<String>,
    /// The command that repeats it.
    pub repeat: String,
}

impl From<&Judged> for FailedCase {
    fn from(Judged { case, complaints, repeat, .. }: &Judged) -> Self {
        Self { case: case.clone(), complaints: complaints.clone(), repeat: repeat.clone() }
    }
}

impl Content for Verification {
    const KIND: Kind = Kind::Verification;
}
