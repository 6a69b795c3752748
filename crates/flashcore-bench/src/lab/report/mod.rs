//! HTML report: one page, no network, light and dark, printable.

mod charts;
mod error_map;
mod ladder;
mod page;
mod tables;

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

pub use error_map::{ErrorMap, error_map};
pub use ladder::{LadderView, RungView};
pub use page::{MOST_BYTES, html};

use crate::lab::compare::Comparison;
use crate::lab::experiments::Experiment;
use crate::lab::ladder::Ladders;
use crate::lab::leaderboard::Leaderboard;
use crate::lab::profile::Profile;
use crate::lab::record::{Kind, Measurements, Record, RecordError, sniff};

/// Everything that a page shows.
#[derive(Debug, Default)]
pub struct Sources {
    /// The title.
    pub title: String,
    /// Times, by file.
    pub measurements: Vec<(String, Record<Measurements>)>,
    /// Comparisons, by file.
    pub comparisons: Vec<(String, Record<Comparison>)>,
    /// Profiles, by file.
    pub profiles: Vec<(String, Record<Profile>)>,
    /// Ladders, by file.
    pub ladders: Vec<(String, LadderView)>,
    /// Resources of kernels, as `flashcore resources --format json` writes them, by file.
    pub resources: Vec<(String, Vec<Value>)>,
    /// The leaders.
    pub leaderboard: Leaderboard,
    /// Experiments, by name.
    pub experiments: Vec<(String, Experiment)>,
    /// Errors by tile.
    pub errors: Vec<ErrorMap>,
    /// Everything as it was read, by file.
    pub raw: Vec<(String, String)>,
}

/// Reason why a file cannot be in a page.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// It is a record that cannot be read.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// It is nothing that a page shows.
    #[error(
        "{file}: not a record that a page shows; those are records of bench, compare, profile and ladder, and the output of `flashcore resources --format json`"
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
            Some(Kind::Comparison) => self.comparisons.push((file.clone(), Record::read(path)?)),
            Some(Kind::Profile) => self.profiles.push((file.clone(), Record::read(path)?)),
            Some(Kind::Leaderboard) => {
                self.leaderboard = Record::<Leaderboard>::read(path)?.content;
                return Ok(());
            }
            Some(Kind::Ladder) => {
                let ladders = Record::<Ladders>::read(path)?.content.ladders;
                let views =
                    serde_json::to_value(ladders).map(|ladders| LadderView::find(&json!({ "ladders": ladders })));
                self.ladders.extend(views.unwrap_or_default().into_iter().map(|ladder| (file.clone(), ladder)));
            }
            Some(Kind::Measurements) => self.measurements.push((file.clone(), Record::read(path)?)),
            Some(Kind::Verification | Kind::Manifest | Kind::Accuracy | Kind::Microbenchmark) | None => {
                self.add_other(&file, path, &text)?;
            }
        }
        // As compact as JSON can be; what is no JSON has been refused above.
        let compact = serde_json::from_str::<Value>(&text).map_or(text, |value| value.to_string());
        self.raw.push((file, compact));
        Ok(())
    }

    /// Ladders and lists of what kernels cost have forms of their own.
    fn add_other(&mut self, file: &str, path: &Path, text: &str) -> Result<(), ReportError> {
        let shown = || path.display().to_string();
        let value: Value = serde_json::from_str(text).map_err(|error| RecordError::Json { file: shown(), error })?;
        let ladders = LadderView::find(&value);
        let is_resources = value.as_array().is_some_and(|rows| rows.iter().all(|row| row.get("registers").is_some()));
        if !ladders.is_empty() {
            self.ladders.extend(ladders.into_iter().map(|ladder| (file.to_owned(), ladder)));
        } else if is_resources {
            self.resources.push((file.to_owned(), value.as_array().cloned().unwrap_or_default()));
        } else {
            // Whatever it is, a record says best why it is none that is read here.
            Record::<Measurements>::parse(text, &shown())?;
            return Err(ReportError::Unknown { file: shown() });
        }
        Ok(())
    }
}
