//! Experiments: a hypothesis, a prediction, and what was measured. What did not help is kept with what did.
//!
//! An experiment is a TOML file that people write and read; the evidence is the record of a comparison beside it, named
//! with its hash.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::lab::compare::{Comparison, Finding};
use crate::lab::record::Record;
use crate::util::digest::sha256;
use crate::util::nearest::{nearest, unknown};

/// One experiment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experiment {
    /// The subject, in few words.
    pub title: String,
    /// The day.
    pub date: String,
    /// The hypothesis, and its reason.
    pub hypothesis: String,
    /// The change of time that was expected, in percent; negative is faster.
    pub predicted_percent: f64,
    /// The baseline, as `flashcore compare` takes it.
    pub a: String,
    /// The candidate.
    pub b: String,
    /// Further arguments of `flashcore compare`.
    #[serde(default)]
    pub arguments: Vec<String>,
    /// The conclusion, in words.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub conclusion: String,
    /// Hours that it took.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hours: Option<f64>,
    /// The result; none before it was run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<Measured>,
}

/// Result of an experiment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// The machine.
    pub machine: String,
    /// The commit.
    pub commit: String,
    /// The verdict on the hypothesis.
    pub outcome: Outcome,
    /// The record of the comparison, from the folder of the experiments.
    pub evidence: String,
    /// The SHA-256 of that file.
    pub evidence_sha256: String,
    /// One for each problem.
    pub rows: Vec<MeasuredRow>,
}

/// Result on one problem.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredRow {
    /// The problem.
    pub problem: String,
    /// The change of time, in percent.
    pub percent: f64,
    /// The lower end of its interval.
    pub low: f64,
    /// The upper end.
    pub high: f64,
    /// The verdict.
    pub verdict: Finding,
}

/// Fate of a hypothesis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// The effect is there, at least half as large as predicted on the problem where it is largest.
    Confirmed,
    /// It is there and smaller.
    Partly,
    /// There is none, or the opposite one.
    Negative,
    /// The data could not tell.
    Undecided,
}

impl Outcome {
    /// Name of the outcome.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Confirmed => "confirmed",
            Self::Partly => "partly",
            Self::Negative => "negative",
            Self::Undecided => "undecided",
        }
    }
}

/// Reason why an experiment cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ExperimentError {
    /// The file or folder cannot be read.
    #[error("{file}: {error}")]
    File {
        /// The file.
        file: String,
        /// The cause.
        error: std::io::Error,
    },
    /// It is no TOML of an experiment.
    #[error("{file}: {error}{meant}")]
    Toml {
        /// The file.
        file: String,
        /// The cause, with line and column.
        error: Box<toml::de::Error>,
        /// The name that was probably meant.
        meant: String,
    },
    /// There is none of that name.
    #[error("{0}")]
    Unknown(String),
}

/// Reads TOML, with the file, the line and the nearest valid name in complaints.
pub fn parse_toml<T: serde::de::DeserializeOwned>(text: &str, file: &str) -> Result<T, ExperimentError> {
    toml::from_str(text).map_err(|error: toml::de::Error| {
        let message = error.message().to_owned();
        let mut quoted = message.split('`').skip(1).step_by(2);
        let name = quoted.next().filter(|_| message.starts_with("unknown"));
        let meant = name.and_then(|name| nearest(name, quoted)).map(|meant| format!("did you mean `{meant}`?"));
        ExperimentError::Toml { file: file.to_owned(), error: Box::new(error), meant: meant.unwrap_or_default() }
    })
}

impl Experiment {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self, ExperimentError> {
        let file = path.display().to_string();
        let text = fs::read_to_string(path).map_err(|error| ExperimentError::File { file: file.clone(), error })?;
        parse_toml(&text, &file)
    }

    /// The text of the file.
    pub fn to_toml(&self) -> String {
        // Everything in an experiment has a form in TOML.
        toml::to_string_pretty(self).unwrap_or_default()
    }

    /// Writes down what a comparison found; `evidence` is the name of its file.
    pub fn measure(&mut self, record: &Record<Comparison>, evidence: String, bytes: &[u8]) {
        let percent = |part: f64| (1e4 * part).round() / 100.0;
        let rows: Vec<MeasuredRow> = record
            .content
            .rows
            .iter()
            .map(|row| MeasuredRow {
                problem: row.b.problem.to_string(),
                percent: percent(row.conclusion.difference.median),
                low: percent(row.conclusion.difference.low),
                high: percent(row.conclusion.difference.high),
                verdict: row.conclusion.finding,
            })
            .collect();
        self.measured = Some(Measured {
            machine: record.origin.machine.words(),
            commit: record.origin.build.short(),
            outcome: outcome(self.predicted_percent, &rows),
            evidence,
            evidence_sha256: sha256(bytes),
            rows,
        });
    }

    /// Compares the evidence with its hash; `folder` is that of the experiments.
    pub fn evidence(&self, folder: &Path) -> Evidence {
        let Some(measured) = &self.measured else { return Evidence::None };
        match fs::read(folder.join(&measured.evidence)) {
            Err(_) => Evidence::Missing,
            Ok(bytes) if sha256(&bytes) == measured.evidence_sha256 => Evidence::Intact,
            Ok(_) => Evidence::Changed,
        }
    }

    /// Fate of the hypothesis, in a word.
    pub fn outcome(&self) -> &'static str {
        self.measured.as_ref().map_or("not run", |measured| measured.outcome.name())
    }
}

/// The state of the evidence of an experiment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Evidence {
    /// It was not run.
    None,
    /// The file is there and unchanged.
    Intact,
    /// The file is there and another.
    Changed,
    /// The file is not there.
    Missing,
}

impl Evidence {
    /// Name of the state.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Intact => "intact",
            Self::Changed => "CHANGED",
            Self::Missing => "missing",
        }
    }
}

/// Fate of a prediction. One that holds on one problem and is reversed on another holds in part.
fn outcome(predicted_percent: f64, rows: &[MeasuredRow]) -> Outcome {
    let both = (Finding::Faster, Finding::Slower);
    let (wanted, opposite) = if predicted_percent < 0.0 { both } else { (both.1, both.0) };
    let is_even = !rows.iter().any(|row| row.verdict == opposite);
    let effects = rows.iter().filter(|row| row.verdict == wanted).map(|row| row.percent.abs());
    match effects.reduce(f64::max) {
        Some(effect) if is_even && effect >= predicted_percent.abs() / 2.0 => Outcome::Confirmed,
        Some(_) => Outcome::Partly,
        None if rows.iter().any(|row| matches!(row.verdict, Finding::Ambiguous | Finding::Rejected)) => {
            Outcome::Undecided
        }
        None => Outcome::Negative,
    }
}

/// All experiments of a folder by name, sorted; a folder that is not there has none.
pub fn list(folder: &Path) -> Result<Vec<(String, Experiment)>, ExperimentError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(ExperimentError::File { file: folder.display().to_string(), error }),
    };
    let mut files: Vec<PathBuf> = entries.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "toml"));
    files.sort();
    let name = |file: &Path| file.file_stem().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    files.iter().map(|file| Ok((name(file), Experiment::read(file)?))).collect()
}

/// The experiment of a name.
pub fn find(folder: &Path, name: &str) -> Result<Experiment, ExperimentError> {
    let mut all = list(folder)?;
    if let Some(place) = all.iter().position(|(known, _)| known == name) {
        return Ok(all.swap_remove(place).1);
    }
    let known: Vec<&str> = all.iter().map(|(known, _)| known.as_str()).collect();
    Err(ExperimentError::Unknown(unknown("experiment", name, &known)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn experiment() -> Experiment {
        Experiment {
            title: "Three stages".to_owned(),
            date: "2026-11-15".to_owned(),
            hypothesis: "Copies hide better".to_owned(),
            predicted_percent: -5.0,
            a: "cpu".to_owned(),
            b: "cpu:avx2".to_owned(),
            arguments: vec!["--suite".to_owned(), "seeds".to_owned()],
            conclusion: String::new(),
            hours: Some(0.5),
            measured: Some(Measured {
                machine: "Test processor".to_owned(),
                commit: "0123456789".to_owned(),
                outcome: Outcome::Negative,
                evidence: "three-stages.json".to_owned(),
                evidence_sha256: sha256(b"evidence"),
                rows: vec![row(Finding::Same, 0.1)],
            }),
        }
    }

    fn row(verdict: Finding, percent: f64) -> MeasuredRow {
        MeasuredRow {
            problem: "1x8x512x64 f32 full".to_owned(),
            percent,
            low: percent - 0.5,
            high: percent + 0.5,
            verdict,
        }
    }

    #[test]
    fn experiments_survive_the_round_trip() {
        let text = experiment().to_toml();
        assert_eq!(parse_toml::<Experiment>(&text, "a.toml").expect("an experiment"), experiment(), "{text}");
    }

    #[test]
    fn complaints_have_file_line_and_the_nearest_name() {
        let text = experiment().to_toml().replace("hypothesis", "hypotesis");
        let error = parse_toml::<Experiment>(&text, "a.toml").expect_err("a misspelt field").to_string();
        let expected = "a.toml: TOML parse error at line 3, column 1
  |
3 | hypotesis = \"Copies hide better\"
  | ^^^^^^^^^
unknown field `hypotesis`, expected one of `title`, `date`, `hypothesis`, `predicted_percent`, `a`, `b`, `arguments`, `conclusion`, `hours`, `measured`
did you mean `hypothesis`?";
        assert_eq!(error, expected);
    }

    #[test]
    fn predictions_are_held_against_what_came_out() {
        let check = |rows: &[MeasuredRow], expected| assert_eq!(outcome(-5.0, rows), expected);
        check(&[row(Finding::Faster, -4.0), row(Finding::Same, 0.0)], Outcome::Confirmed);
        check(&[row(Finding::Faster, -2.0)], Outcome::Partly);
        check(&[row(Finding::Faster, -4.0), row(Finding::Slower, 1.0)], Outcome::Partly);
        check(&[row(Finding::Same, -1.0), row(Finding::Slower, 9.0)], Outcome::Negative);
        check(&[row(Finding::Ambiguous, -4.0)], Outcome::Undecided);
    }

    #[test]
    fn changed_evidence_is_noticed() {
        let folder = std::env::temp_dir().join(format!("flashcore-experiments-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let file = folder.join("three-stages.json");
        assert_eq!(experiment().evidence(&folder), Evidence::Missing);
        fs::write(&file, b"evidence").expect("a file");
        assert_eq!(experiment().evidence(&folder), Evidence::Intact);
        fs::write(&file, b"evidencf").expect("a file");
        assert_eq!(experiment().evidence(&folder), Evidence::Changed);
        fs::remove_dir_all(&folder).expect("it is ours");
    }
}
