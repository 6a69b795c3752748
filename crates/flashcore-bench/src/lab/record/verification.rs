//! What passed and what did not.

use serde::{Deserialize, Serialize};

use super::{Content, Kind};
use crate::testkit::jobs::Judged;

/// What came of a list of cases.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Verification {
    /// Who computed: a backend, with its level where there is one.
    pub backend: String,
    /// How many cases were right.
    pub passed: usize,
    /// Those that were not.
    pub failed: Vec<FailedCase>,
    /// Whether all cases were reached; somebody may have pressed Ctrl-C.
    pub is_complete: bool,
}

/// A case that was not right.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FailedCase {
    /// The case.
    pub case: String,
    /// What the gates said.
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
