//! Records: what was measured, where, by which build, in full. Every command that writes or reads one does it here.
//!
//! A record is a JSON object with a `schema` number, a `kind`, its `origin` (build, command, moment, machine) and a
//! `content` of that kind. A reader looks at the number first: a record of another schema is refused, never misread.

mod measurement;
mod origin;
mod verification;

use std::fs;
use std::path::Path;

use flashcore_cpu::Level;
use flashcore_kernels::Config;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use measurement::{Measurement, Measurements, ProblemKey, Verified};
pub use origin::{Build, Machine, Origin, gpu_state};
pub use verification::{FailedCase, Verification};

use crate::util::nearest::nearest;
use crate::util::printable::printable;

/// The version of the form of records.
pub const SCHEMA: u64 = 2;

/// Kind of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Times of problems: `flashcore bench --record`.
    Measurements,
    /// Two things beside each other: `flashcore compare --record`.
    Comparison,
    /// Counters of hardware and simulator: `flashcore profile --record`.
    Profile,
    /// Passed and failed cases: `flashcore verify --record`.
    Verification,
    /// Gain of each step: `flashcore ladder --record`.
    Ladder,
    /// Errors of element types: `flashcore accuracy --record`.
    Accuracy,
    /// Throughput of instructions: `flashcore microbench --record`.
    Microbenchmark,
    /// The best of each problem: `flashcore leaderboard`.
    Leaderboard,
    /// Contents of a bundle: `flashcore repro`.
    Manifest,
}

impl Kind {
    /// Name of the kind in records.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Measurements => "measurements",
            Self::Comparison => "comparison",
            Self::Profile => "profile",
            Self::Verification => "verification",
            Self::Ladder => "ladder",
            Self::Accuracy => "accuracy",
            Self::Microbenchmark => "microbenchmark",
            Self::Leaderboard => "leaderboard",
            Self::Manifest => "manifest",
        }
    }

    /// All kinds.
    pub const ALL: [Self; 9] = [
        Self::Measurements,
        Self::Comparison,
        Self::Profile,
        Self::Verification,
        Self::Ladder,
        Self::Accuracy,
        Self::Microbenchmark,
        Self::Leaderboard,
        Self::Manifest,
    ];

    /// The command that writes records of this kind.
    const fn command(self) -> &'static str {
        match self {
            Self::Measurements => "flashcore bench --record FILE",
            Self::Comparison => "flashcore compare A B --record FILE",
            Self::Profile => "flashcore profile --record FILE",
            Self::Verification => "flashcore verify --record FILE",
            Self::Ladder => "flashcore ladder --record FILE",
            Self::Accuracy => "flashcore accuracy --record FILE",
            Self::Microbenchmark => "flashcore microbench --record FILE",
            Self::Leaderboard => "flashcore leaderboard promote FILE",
            Self::Manifest => "flashcore repro",
        }
    }
}

/// Content of a record.
pub trait Content: Serialize + DeserializeOwned {
    /// Kind of the record.
    const KIND: Kind;

    /// A number that no machine can have measured, in words; nothing if there is none. Asked before anything is drawn.
    fn impossible(&self) -> Option<String> {
        None
    }
}

/// A record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record<C> {
    /// The version of the form.
    pub schema: u64,
    /// Kind of the content.
    pub kind: Kind,
    /// Build, command, moment and machine.
    pub origin: Origin,
    /// The content.
    pub content: C,
}

/// Reason why a record cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The file cannot be read.
    #[error("{file}: {error}")]
    File {
        /// The file.
        file: String,
        /// The cause.
        error: std::io::Error,
    },
    /// Not JSON, or JSON of something else.
    #[error("{file}: {}{}", printable(&error.to_string()), meant(error))]
    Json {
        /// The file.
        file: String,
        /// The cause, with line and column.
        error: serde_json::Error,
    },
    /// No number of a schema.
    #[error("{file}: not a record of flashcore, since it has no `schema`; `{command}` writes one")]
    NoSchema {
        /// The file.
        file: String,
        /// Command that writes such a record.
        command: &'static str,
    },
    /// Another schema.
    #[error("{file}: it has schema {found}, and this program reads schema {SCHEMA}; write a new one with `{command}`")]
    Schema {
        /// The file.
        file: String,
        /// The schema found.
        found: String,
        /// Command that writes such a record.
        command: &'static str,
    },
    /// A number that cannot have been measured.
    #[error("{file}: {reason}; the record has been changed, or was never one")]
    Impossible {
        /// The file.
        file: String,
        /// The number, and what is possible.
        reason: String,
    },
    /// Another kind.
    #[error("{file}: its kind is `{found}`, and `{}` is needed here; `{}` writes one", wanted.name(), wanted.command())]
    Kind {
        /// The file.
        file: String,
        /// Kind that was found.
        found: String,
        /// Kind that was wanted.
        wanted: Kind,
    },
}

/// The field that was probably meant, where a field is unknown.
fn meant(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let mut quoted = text.split('`').skip(1).step_by(2);
    let (true, Some(name)) = (text.starts_with("unknown field"), quoted.next()) else { return String::new() };
    nearest(name, quoted).map_or_else(String::new, |known| format!("; did you mean `{known}`?"))
}

impl<C: Content> Record<C> {
    /// A record of something just found.
    pub const fn new(origin: Origin, content: C) -> Self {
        Self { schema: SCHEMA, kind: C::KIND, origin, content }
    }

    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self, RecordError> {
        let file = path.display().to_string();
        let text = fs::read_to_string(path).map_err(|error| RecordError::File { file: file.clone(), error })?;
        Self::parse(&text, &file)
    }

    /// Reads a text; `file` is for complaints.
    pub fn parse(text: &str, file: &str) -> Result<Self, RecordError> {
        let found = kind_of(text, file, C::KIND)?;
        if found != C::KIND.name() {
            return Err(RecordError::Kind { file: file.to_owned(), found, wanted: C::KIND });
        }
        let record: Self =
            serde_json::from_str(text).map_err(|error| RecordError::Json { file: file.to_owned(), error })?;
        match record.origin.machine.impossible().or_else(|| record.content.impossible()) {
            None => Ok(record),
            Some(reason) => Err(RecordError::Impossible { file: file.to_owned(), reason }),
        }
    }

    /// The text of the file.
    pub fn to_json(&self) -> String {
        // Everything in a record has a form in JSON, so there is nothing that could fail.
        let mut text = serde_json::to_string_pretty(self).unwrap_or_default();
        text.push('\n');
        text
    }
}

/// The kind that a text says it is of, if its schema is ours; `wanted` is for complaints.
fn kind_of(text: &str, file: &str, wanted: Kind) -> Result<String, RecordError> {
    let file = || file.to_owned();
    let command = wanted.command();
    let value: Value = serde_json::from_str(text).map_err(|error| RecordError::Json { file: file(), error })?;
    match &value["schema"] {
        Value::Null => Err(RecordError::NoSchema { file: file(), command }),
        schema if schema.as_u64() == Some(SCHEMA) => {
            Ok(printable(value["kind"].as_str().unwrap_or("thing without a kind")).into_owned())
        }
        other => Err(RecordError::Schema { file: file(), found: other.to_string(), command }),
    }
}

/// The most seconds that anything here takes: 30 years.
const MOST_SECONDS: f64 = 1e9;

/// The words for seconds that nothing takes; nothing for those that are possible.
pub(crate) fn impossible_seconds(seconds: f64) -> Option<String> {
    let is_possible = (0.0..=MOST_SECONDS).contains(&seconds);
    (!is_possible).then(|| format!("a time is {seconds:e} s; times are from 0 to {MOST_SECONDS:e}"))
}

/// The name of a kernel as people read it: one that this build does not have is marked, since no command takes it.
pub fn kernel_words(name: &str) -> String {
    let is_known = name == "default" || name.parse::<Level>().is_ok() || name.parse::<Config>().is_ok();
    if is_known { name.to_owned() } else { format!("{name} (of an older build)") }
}

/// Kind of a file, without reading all of it; none if it is no record of this schema.
pub fn sniff(path: &Path) -> Option<Kind> {
    let text = fs::read_to_string(path).ok()?;
    let found = kind_of(&text, "", Kind::Measurements).ok()?;
    Kind::ALL.into_iter().find(|kind| kind.name() == found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::floor::Ceilings;

    #[test]
    fn a_number_that_no_machine_measures_is_refused() {
        let check = |change: &dyn Fn(&mut Record<Measurements>), expected: &str| {
            let mut record = record();
            change(&mut record);
            let found = Record::<Measurements>::parse(&record.to_json(), "a.json").map_err(|error| error.to_string());
            let end = "; the record has been changed, or was never one";
            assert_eq!(found.map(|_| ()), Err(format!("a.json: {expected}{end}")));
        };
        let name = "1x8x512x64 f32 full, avx2";
        check(
            &|record| record.content.rows[0].hot_seconds[3] = 1e303,
            &format!("{name}: a time is 1e303 s; times are from 0 to 1e9"),
        );
        check(
            &|record| record.content.rows[0].floor_seconds = -1.0,
            &format!("{name}: a time is -1e0 s; times are from 0 to 1e9"),
        );
        check(
            &|record| record.content.rows[0].work.flops = 1e301,
            &format!("{name}: its work is 1e301 operations; at most 1e30 are possible"),
        );
        let ceilings = |flops, bytes| {
            move |record: &mut Record<Measurements>| {
                record.origin.machine.ceilings = Some(Ceilings { flops, bytes, exponentials: f64::INFINITY });
            }
        };
        check(
            &ceilings(1e12, 0.0),
            "the machine's peak rate of bytes is 0e0 a second; it must be above 0 and at most 1e30, or null where it is unknown",
        );
        check(
            &ceilings(1e303, 1e9),
            "the machine's peak rate of flops is 1e303 a second; it must be above 0 and at most 1e30, or null where it is unknown",
        );
    }

    #[test]
    fn kernels_of_older_builds_are_marked() {
        for name in ["default", "avx512bf16", "ampere-64x64-2stage-swizzled"] {
            assert_eq!(kernel_words(name), name);
        }
        assert_eq!(
            kernel_words("hopper-128x128-2stage-hidden-persistent"),
            "hopper-128x128-2stage-hidden-persistent (of an older build)"
        );
    }

    fn record() -> Record<Measurements> {
        Record::new(Origin::for_tests(), Measurements { rows: vec![Measurement::for_tests("1x8x512x64", 1e-3)] })
    }

    #[test]
    fn records_survive_the_round_trip() {
        let record = record();
        assert_eq!(Record::parse(&record.to_json(), "a.json").expect("a record"), record);
    }

    #[test]
    fn every_sample_survives_to_its_last_bit() {
        let mut record = record();
        let mut random = flashcore_problem::SplitMix64::new(1);
        let row = &mut record.content.rows[0];
        row.hot_seconds = (0..1000).map(|_| random.uniform() * 1e-5).collect();
        row.samples_sha256 = crate::util::digest::sha256_of_numbers(&row.hot_seconds);
        let read = Record::<Measurements>::parse(&record.to_json(), "a.json").expect("a record");
        assert!(read.content.rows[0].is_intact());
    }

    #[test]
    fn what_is_no_record_of_ours_is_refused_with_the_reason() {
        let check = |text: &str, expected: &str| {
            let error = Record::<Measurements>::parse(text, "a.json").expect_err("no record");
            assert_eq!(error.to_string(), expected);
        };
        check("{", "a.json: EOF while parsing an object at line 1 column 1");
        check(
            "{}",
            "a.json: not a record of flashcore, since it has no `schema`; `flashcore bench --record FILE` writes one",
        );
        check(
            r#"{"schema": 1, "rows": []}"#,
            "a.json: it has schema 1, and this program reads schema 2; write a new one with `flashcore bench --record FILE`",
        );
        check(
            r#"{"schema": 2, "kind": "comparison"}"#,
            "a.json: its kind is `comparison`, and `measurements` is needed here; `flashcore bench --record FILE` writes one",
        );
        let misspelt = record().to_json().replace("\"mask\"", "\"mast\"");
        let line = 1 + misspelt.lines().position(|line| line.contains("\"mast\"")).expect("it is there");
        check(
            &misspelt,
            &format!(
                "a.json: unknown field `mast`, expected one of `shape`, `dtype`, `mask` at line {line} column 16; did you mean `mask`?"
            ),
        );
    }
}
