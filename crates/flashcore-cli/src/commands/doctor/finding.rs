//! Findings of the doctor: lines for people, one value for programs.

use serde_json::Value;

/// One part of the examination.
#[derive(Debug)]
pub(super) struct Section {
    /// Name in the JSON object.
    pub(super) key: &'static str,
    /// Value for programs.
    pub(super) value: Value,
    /// Lines for people.
    pub(super) findings: Vec<Finding>,
}

/// One line.
#[derive(Debug)]
pub(super) struct Finding {
    pub(super) subject: String,
    pub(super) state: State,
    pub(super) text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Well,
    /// Not there, and nothing is wrong with that.
    Absent,
    /// There, working, and worth a look.
    Note,
    /// Damaged, or slower than its limit: exit code 1.
    Failed,
    /// There and of no use: exit code 3.
    Unusable,
}

impl State {
    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::Well => "ok",
            Self::Absent => "none",
            Self::Note => "note",
            Self::Failed => "FAILED",
            Self::Unusable => "UNUSABLE",
        }
    }
}

impl Finding {
    pub(super) fn new(subject: impl Into<String>, state: State, text: impl Into<String>) -> Self {
        Self { subject: subject.into(), state, text: text.into() }
    }
}
