//! HTML report: one page, no network, light and dark, printable.

mod charts;
mod error_map;
mod ladder;
mod page;
mod peers;
mod tables;

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

pub use error_map::{ErrorMap, error_map};
pub use ladder::{LadderView, RungView};
pub use page::{MOST_BYTES, html};
pub use peers::{PeerRow, Peers};

use crate::lab::accuracy::AccuracyRecord;
use crate::lab::compare::Comparison;
use crate::lab::experiments::Experiment;
use crate::lab::ladder::Ladders;
use crate::lab::leaderboard::Leaderboard;
use crate::lab::microbench::Microbenchmark;
use crate::lab::profile::Profile;
use crate::lab::record::{Content, Kind, Measurements, Origin, Record, RecordError, SCHEMA, Verification, sniff};
use crate::testkit::conformance;

/// Everything that a page shows, each by file.
#[derive(Debug, Default)]
pub struct Sources {
    /// The title.
    pub title: String,
    /// Times.
    pub measurements: Vec<(String, Record<Measurements>)>,
    /// Comparisons.
    pub comparisons: Vec<(String, Record<Comparison>)>,
    /// Times beside others.
    pub peers: Vec<(String, Peers)>,
    /// Verifications.
    pub verifications: Vec<(String, Verification)>,
    /// The simulator beside a GPU, operation by operation.
    pub conformance: Vec<(String, conformance::Record)>,
    /// Errors of element types.
    pub accuracy: Vec<(String, AccuracyRecord)>,
    /// Throughput of instructions.
    pub microbenchmarks: Vec<(String, Microbenchmark)>,
    /// Profiles.
    pub profiles: Vec<(String, Record<Profile>)>,
    /// Ladders.
    pub ladders: Vec<(String, LadderView)>,
    /// Resources of kernels, as `flashcore resources --format json` writes them.
    pub resources: Vec<(String, Vec<Value>)>,
    /// The leaders.
    pub leaderboard: Leaderboard,
    /// Experiments, by name.
    pub experiments: Vec<(String, Experiment)>,
    /// Errors by tile.
    pub errors: Vec<ErrorMap>,
    /// Machines, builds and commands of the records.
    pub origins: Vec<(String, Origin)>,
    /// Everything as it was read.
    pub raw: Vec<(String, String)>,
}

/// Reason why a file cannot be in a page.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// It is a record that cannot be read.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// It is a record of the conformance suite that cannot be read.
    #[error("{file}: {error}")]
    Conformance {
        /// The file.
        file: String,
        /// The cause.
        error: conformance::RecordError,
    },
    /// It holds a number that nothing measures.
    #[error("{file}: {reason}")]
    Impossible {
        /// The file.
        file: String,
        /// The number, and what is possible.
        reason: String,
    },
    /// It is a record of a form that this program does not know.
    #[error(
        "{file}: it has schema {found}, and this program reads schema {SCHEMA} and the older forms in results/; use the program that wrote it"
    )]
    Schema {
        /// The file.
        file: String,
        /// The schema.
        found: String,
    },
    /// It is the manifest of a bundle.
    #[error(
        "{file}: this is the manifest of a bundle; `flashcore repro --replay` reads the whole bundle, which has a page of its own"
    )]
    Manifest {
        /// The file.
        file: String,
    },
    /// It is nothing that a page shows.
    #[error(
        "{file}: not a record that a page shows; those are records of bench, compare, verify, accuracy, microbench, profile, ladder, conformance and leaderboard, of the scripts in bench/peers, and the output of `flashcore resources --format json`"
    )]
    Unknown {
        /// The file.
        file: String,
    },
}

impl Sources {
    /// Adds a file, whatever of these it is.
    pub fn add(&mut self, path: &Path) -> Result<(), ReportError> {
        let file =
            path.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned());
        let text =
            fs::read_to_string(path).map_err(|error| RecordError::File { file: path.display().to_string(), error })?;
        match sniff(path) {
            Some(Kind::Leaderboard) => {
                self.leaderboard = Record::<Leaderboard>::read(path)?.content;
                return Ok(());
            }
            Some(Kind::Comparison) => {
                let record = self.read(&file, path)?;
                self.comparisons.push((file.clone(), record));
            }
            Some(Kind::Profile) => {
                let record = self.read(&file, path)?;
                self.profiles.push((file.clone(), record));
            }
            Some(Kind::Measurements) => {
                let record = self.read(&file, path)?;
                self.measurements.push((file.clone(), record));
            }
            Some(Kind::Verification) => {
                let record = self.read(&file, path)?;
                self.verifications.push((file.clone(), record.content));
            }
            Some(Kind::Accuracy) => {
                let record = self.read(&file, path)?;
                self.accuracy.push((file.clone(), record.content));
            }
            Some(Kind::Microbenchmark) => {
                let record = self.read(&file, path)?;
                self.microbenchmarks.push((file.clone(), record.content));
            }
            Some(Kind::Ladder) => {
                let ladders = self.read::<Ladders>(&file, path)?.content.ladders;
                let views =
                    serde_json::to_value(ladders).map(|ladders| LadderView::find(&json!({ "ladders": ladders })));
                self.ladders.extend(views.unwrap_or_default().into_iter().map(|ladder| (file.clone(), ladder)));
            }
            Some(Kind::Manifest) => return Err(ReportError::Manifest { file: path.display().to_string() }),
            None => self.add_other(&file, path, &text)?,
        }
        // As compact as JSON can be; what is no JSON has been refused above.
        let compact = serde_json::from_str::<Value>(&text).map_or(text, |value| value.to_string());
        self.raw.push((file, compact));
        Ok(())
    }

    /// Reads a record, and keeps where it comes from.
    fn read<C: Content>(&mut self, file: &str, path: &Path) -> Result<Record<C>, ReportError> {
        let record = Record::<C>::read(path)?;
        self.origins.push((file.to_owned(), record.origin.clone()));
        Ok(record)
    }

    /// Forms of their own: older ladders, resources, times beside others, the simulator beside a GPU.
    fn add_other(&mut self, file: &str, path: &Path, text: &str) -> Result<(), ReportError> {
        let shown = || path.display().to_string();
        let value: Value = serde_json::from_str(text).map_err(|error| RecordError::Json { file: shown(), error })?;
        let ladders = LadderView::find(&value);
        let is_resources = value.as_array().is_some_and(|rows| rows.iter().all(|row| row.get("registers").is_some()));
        if !ladders.is_empty() {
            if let Some(reason) = ladders.iter().find_map(LadderView::impossible) {
                return Err(ReportError::Impossible { file: shown(), reason });
            }
            self.ladders.extend(ladders.into_iter().map(|ladder| (file.to_owned(), ladder)));
        } else if is_resources {
            self.resources.push((file.to_owned(), value.as_array().cloned().unwrap_or_default()));
        } else if let Some(peers) = Peers::find(&value) {
            let peers = peers.map_err(|reason| ReportError::Impossible { file: shown(), reason })?;
            self.peers.push((file.to_owned(), peers));
        } else if value.get("cases").is_some() && value.get("target").is_some() {
            let record = conformance::Record::parse(text);
            let record = record.map_err(|error| ReportError::Conformance { file: shown(), error })?;
            self.conformance.push((file.to_owned(), record));
        } else {
            return Err(match &value["schema"] {
                Value::Null => ReportError::Unknown { file: shown() },
                schema if schema.as_u64() == Some(SCHEMA) => ReportError::Unknown { file: shown() },
                schema => ReportError::Schema { file: shown(), found: schema.to_string() },
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// All JSON files of a folder and those in it.
    fn json_files(folder: &Path) -> Vec<PathBuf> {
        let entries = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
        let (folders, files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
        let mut files: Vec<PathBuf> =
            files.into_iter().filter(|path| path.extension().is_some_and(|it| it == "json")).collect();
        files.extend(folders.iter().flat_map(|folder| json_files(folder)));
        files.sort();
        files
    }

    #[test]
    fn every_committed_record_is_drawn() {
        let files = json_files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../results"));
        assert!(files.len() >= 37, "{} records", files.len());
        let mut together = Sources { title: "All".to_owned(), ..Sources::default() };
        for file in &files {
            let mut sources = Sources::default();
            sources.add(file).unwrap_or_else(|error| panic!("{error}"));
            together.add(file).expect("it was read a moment ago");
            let page = html(&sources);
            let tables = page.matches("<table>").count() + page.matches("<figure>").count();
            assert!(tables > 0, "{}: an empty page", file.display());
            let shown = page.split("<section id=\"raw\">").next().expect("what is before it");
            assert!(!shown.contains("NaN") && !shown.contains(">inf<"), "{}", file.display());
        }
        let page = html(&together);
        assert!(page.len() < MOST_BYTES, "{} bytes", page.len());
    }

    #[test]
    fn a_file_that_is_not_drawn_says_why() {
        let folder = crate::util::temporary_folder::TemporaryFolder::new("report").expect("a folder");
        let check = |text: &str, expected: &str| {
            let file = folder.path().join("a.json");
            fs::write(&file, text).expect("written");
            let error = Sources::default().add(&file).expect_err("it cannot be drawn").to_string();
            assert_eq!(error.strip_prefix(&format!("{}: ", file.display())), Some(expected), "{error}");
        };
        let others = "not a record that a page shows; those are records of bench, compare, verify, accuracy, microbench, profile, ladder, conformance and leaderboard, of the scripts in bench/peers, and the output of `flashcore resources --format json`";
        check("{}", others);
        check("[1, 2]", others);
        check(
            r#"{"schema": 3, "kind": "measurements"}"#,
            "it has schema 3, and this program reads schema 2 and the older forms in results/; use the program that wrote it",
        );
        check(
            r#"{"rows": [{"shape": "1x8x512x64", "seconds": {"flashcore": 1e303, "torch": 1}}]}"#,
            "1x8x512x64: a time is 1e303 s; times are from 0 to 1e9",
        );
        check(
            r#"{"shape": "1x8x512x64", "dtype": "f16", "mask": "full", "floor_seconds": 1e303, "rungs": []}"#,
            "1x8x512x64 f16 full: a time is 1e303 s; times are from 0 to 1e9",
        );
    }
}
