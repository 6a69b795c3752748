//! Findings of the files in a folder.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::lab::accuracy::AccuracyRecord;
use crate::lab::compare::{Comparison, Finding};
use crate::lab::ladder::Ladders;
use crate::lab::leaderboard::Leaderboard;
use crate::lab::microbench::Microbenchmark;
use crate::lab::profile::{Profile, ProfiledKernel};
use crate::lab::record::{Kind, Measurements, Record, RecordError, Verification, sniff};
use crate::lab::repro::{open, read_manifest};

/// Finding of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The subject.
    pub subject: String,
    /// The file, from the folder.
    pub file: String,
    /// True if it reports no failure.
    pub is_well: bool,
    /// The finding, in words.
    pub words: String,
}

/// Findings of the files in a folder and its subfolders. Files that are no records are passed over.
pub fn survey(folder: &Path) -> Vec<Found> {
    let mut files = Vec::new();
    collect(folder, &mut files);
    files.sort();
    files
        .iter()
        .filter_map(|file| {
            let name = file.strip_prefix(folder).unwrap_or(file).display().to_string();
            let (subject, is_well, words) = look(file)?;
            Some(Found { subject, file: name, is_well, words })
        })
        .collect()
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect(&path, files);
        } else {
            files.push(path);
        }
    }
}

type Said = (String, bool, String);

fn look(file: &Path) -> Option<Said> {
    let name = file.file_name()?.to_string_lossy().into_owned();
    if name.ends_with(".tar.gz") {
        let opened = fs::read(file).ok().map(|bytes| open(&bytes).and_then(|files| read_manifest(&files)))?;
        return Some(match opened {
            Ok(record) => ("bundle".to_owned(), true, format!("sealed, {} cases", record.content.cases.len())),
            Err(error) => ("bundle".to_owned(), false, error.to_string()),
        });
    }
    let extension = file.extension().map(|extension| extension.to_string_lossy().into_owned()).unwrap_or_default();
    if name.starts_with("verify") && extension == "csv" {
        return verification_table(&fs::read_to_string(file).ok()?);
    }
    if extension != "json" {
        return None;
    }
    let unreadable = |subject: &str, error: &RecordError| (subject.to_owned(), false, error.to_string());
    Some(match sniff(file) {
        Some(Kind::Verification) => match Record::<Verification>::read(file) {
            Ok(record) => verification(&record),
            Err(error) => unreadable("verify sim", &error),
        },
        Some(Kind::Measurements) => match Record::<Measurements>::read(file) {
            Ok(record) => measurements(&record),
            Err(error) => unreadable("measured cpu", &error),
        },
        Some(Kind::Comparison) => match Record::<Comparison>::read(file) {
            Ok(record) => comparison(&record),
            Err(error) => unreadable("compared", &error),
        },
        Some(Kind::Profile) => match Record::<Profile>::read(file) {
            Ok(record) => profile(&record),
            Err(error) => unreadable("profile", &error),
        },
        Some(Kind::Leaderboard) => match Record::<Leaderboard>::read(file) {
            Ok(record) => {
                let words = format!(
                    "{} leaders, {} promotions",
                    record.content.places().len(),
                    record.content.promotions.len()
                );
                ("leaderboard".to_owned(), true, words)
            }
            Err(error) => unreadable("leaderboard", &error),
        },
        Some(Kind::Ladder) => match Record::<Ladders>::read(file) {
            Ok(record) => ladders(&record),
            Err(error) => unreadable("ladder", &error),
        },
        Some(Kind::Accuracy) => match Record::<AccuracyRecord>::read(file) {
            Ok(record) => accuracy(&record),
            Err(error) => unreadable("accuracy", &error),
        },
        Some(Kind::Microbenchmark) => match Record::<Microbenchmark>::read(file) {
            Ok(record) => microbenchmark(&record),
            Err(error) => unreadable("microbenchmark", &error),
        },
        Some(Kind::Manifest) => return None,
        None => return other(&serde_json::from_str(&fs::read_to_string(file).ok()?).ok()?),
    })
}

fn verification(record: &Record<Verification>) -> Said {
    let Verification { backend, passed, failed, is_complete } = &record.content;
    let subject = format!("verify {}", backend.split(' ').next().unwrap_or_default());
    let stopped = if *is_complete { "" } else { ", stopped early" };
    (subject, failed.is_empty() && *is_complete, format!("{passed} passed, {} failed{stopped}", failed.len()))
}

/// The table that `flashcore verify --format csv` writes.
fn verification_table(text: &str) -> Option<Said> {
    let rows: Vec<&str> = text.lines().skip(1).collect();
    let backend = rows.first()?.trim_start_matches('"').split(' ').next()?.to_owned();
    let failed = rows.iter().filter(|row| row.contains(",FAILED,")).count();
    let passed = rows.iter().filter(|row| row.contains(",passed,")).count();
    Some((format!("verify {backend}"), failed == 0 && passed > 0, format!("{passed} passed, {failed} failed")))
}

fn measurements(record: &Record<Measurements>) -> Said {
    let rows = &record.content.rows;
    let is_well = rows.iter().all(|row| row.verified.passed && row.is_intact());
    let subject = format!("measured {}", record.origin.machine.backend);
    (subject, is_well, format!("{} problems on {}", rows.len(), record.origin.machine.device))
}

fn comparison(record: &Record<Comparison>) -> Said {
    let count = |finding| record.content.rows.iter().filter(|row| row.conclusion.finding == finding).count();
    let rejected = count(Finding::Rejected);
    let words = format!(
        "{} against {}: {} faster, {} slower, {} same, {} ambiguous",
        record.content.b,
        record.content.a,
        count(Finding::Faster),
        count(Finding::Slower),
        count(Finding::Same),
        count(Finding::Ambiguous)
    );
    ("compared".to_owned(), rejected == 0, words)
}

fn ladders(record: &Record<Ladders>) -> Said {
    let ladders = &record.content.ladders;
    let timed = ladders.iter().any(|ladder| ladder.rungs.iter().any(|rung| !rung.hot_seconds.is_empty()));
    let steps: Vec<String> =
        ladders.iter().map(|ladder| format!("{}: {} steps", ladder.shape, ladder.rungs.len())).collect();
    ("ladder".to_owned(), timed, format!("{} on {}", steps.join(", "), record.origin.machine.device))
}

fn accuracy(record: &Record<AccuracyRecord>) -> Said {
    let AccuracyRecord { rows, gates, .. } = &record.content;
    let failed = gates.iter().filter(|gate| !gate.passed).count();
    let words = format!("errors of {} cases, {} of {} gates passed", rows.len(), gates.len() - failed, gates.len());
    ("accuracy".to_owned(), failed == 0, words)
}

fn microbenchmark(record: &Record<Microbenchmark>) -> Said {
    let found = &record.content;
    let (timed, count) =
        (found.conversions.iter().filter(|row| row.measured.is_some()).count(), found.conversions.len());
    let words = format!("{count} conversions of FP8 judged, {timed} timed, on {}", found.arch);
    ("microbenchmark".to_owned(), found.passed(), words)
}

fn profile(record: &Record<Profile>) -> Said {
    let rows = &record.content.rows;
    let failed = rows.iter().filter(|row| !row.passed()).count();
    let verdicts: Vec<String> =
        rows.iter().map(|row: &ProfiledKernel| format!("{} {}", row.problem, row.bottleneck.word())).collect();
    let gates = if failed == 0 { String::new() } else { format!(", {failed} failed a gate") };
    ("profile".to_owned(), failed == 0, format!("{}{gates}", verdicts.join(", ")))
}

/// Files with forms of their own: conformance, and the scripts for peers.
fn other(value: &Value) -> Option<Said> {
    if let (Some(cases), Some(device)) = (value["cases"].as_array(), value["device"].as_str()) {
        return Some(("conformance".to_owned(), !cases.is_empty(), format!("{} cases on {device}", cases.len())));
    }
    let rows = value["rows"].as_array()?;
    value.get("peers")?;
    Some(("peers".to_owned(), !rows.is_empty(), format!("{} problems", rows.len())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::record::{FailedCase, Measurement, Origin};
    use crate::lab::status::{State, status};

    #[test]
    fn records_are_found_and_read() {
        let folder = std::env::temp_dir().join(format!("flashcore-status-{}", std::process::id()));
        let results = folder.join("results").join("today");
        fs::create_dir_all(&results).expect("a folder");
        let state = |what: &str| {
            let table = status(&folder.join("results"), &folder.join("experiments"));
            table.into_iter().find(|row| row.what == what).map(|row| row.state)
        };
        assert_eq!(state("verified on a CPU"), Some(State::Missing));
        let verification = |failed: Vec<FailedCase>| Verification {
            backend: "cpu avx2".to_owned(),
            passed: 5,
            failed,
            is_complete: true,
        };
        let write = |name: &str, text: String| fs::write(results.join(name), text).expect("a file");
        write("verify.json", Record::new(Origin::for_tests(), verification(vec![])).to_json());
        assert_eq!(state("verified on a CPU"), Some(State::Done));
        let failed = FailedCase { case: "a".to_owned(), complaints: vec![], repeat: "b".to_owned() };
        write("verify-2.json", Record::new(Origin::for_tests(), verification(vec![failed])).to_json());
        assert_eq!(state("verified on a CPU"), Some(State::Failing));
        write(
            "verify-full.csv",
            "case,verdict,max error\ncuda scalar-64 1x2x64x64 f16 full seed 0,passed,0.1\n".to_owned(),
        );
        assert_eq!(state("verified on a GPU"), Some(State::Done));
        let rows = vec![Measurement::for_tests("1x8x512x64", 1e-3)];
        write("bench.json", Record::new(Origin::for_tests(), Measurements { rows }).to_json());
        assert_eq!(state("measured on a CPU"), Some(State::Done));
        write("bundle.tar.gz", "no bundle".to_owned());
        assert_eq!(state("bundle for others to replay"), Some(State::Failing));
        fs::remove_dir_all(&folder).expect("it is ours");
    }
}
