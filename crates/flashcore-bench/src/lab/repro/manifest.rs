//! Manifest of a bundle.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::bundle::{BundleError, Files};
use crate::lab::record::{Content, Kind, ProblemKey, Record};
use crate::util::digest::sha256;
use crate::util::printable::printable;

/// The name of the manifest in a bundle.
pub const MANIFEST: &str = "manifest.json";

/// Contents of a bundle.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Commands that made it.
    pub commands: Vec<String>,
    /// Steps that were left out, with the reason.
    pub left_out: Vec<String>,
    /// The machine, as `flashcore doctor` describes it.
    pub environment: Value,
    /// Cases with their results.
    pub cases: Vec<CaseEntry>,
    /// The kernels.
    pub kernels: Vec<KernelEntry>,
    /// Every other file of the bundle.
    pub files: Vec<FileEntry>,
}

impl Content for Manifest {
    const KIND: Kind = Kind::Manifest;
}

/// Something that was computed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CaseEntry {
    /// `cpu` or `cuda`.
    pub backend: String,
    /// The level or the config.
    pub kernel: String,
    /// The problem.
    pub problem: ProblemKey,
    /// The seed of its inputs.
    pub seed: u64,
    /// The SHA-256 of the inputs.
    pub inputs_sha256: String,
    /// The SHA-256 of the output.
    pub output_sha256: String,
    /// The output itself, where it is small.
    pub output_file: Option<String>,
    /// The median time, in seconds.
    pub median_seconds: f64,
}

/// A kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelEntry {
    /// The config.
    pub config: String,
    /// A problem that it is for.
    pub problem: ProblemKey,
    /// The architecture, as compilers spell it.
    pub arch: String,
    /// The file of its PTX.
    pub ptx: String,
    /// The file of what ptxas made of it, where there was one.
    pub cubin: Option<String>,
}

/// A file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Name.
    pub path: String,
    /// Length.
    pub bytes: usize,
    /// SHA-256.
    pub sha256: String,
}

impl FileEntry {
    /// Entry of a file.
    pub fn of(path: &str, contents: &[u8]) -> Self {
        Self { path: path.to_owned(), bytes: contents.len(), sha256: sha256(contents) }
    }
}

/// The manifest of a bundle, when every file is as it says.
pub fn read_manifest(files: &Files) -> Result<Record<Manifest>, BundleError> {
    let wrong =
        |file: &str, reason: &str| BundleError::File { file: printable(file).into_owned(), reason: reason.to_owned() };
    let find = |name: &str| files.iter().find(|(path, _)| path == name).map(|(_, contents)| contents);
    let contents = find(MANIFEST).ok_or_else(|| wrong(MANIFEST, "it is not there"))?;
    let text = String::from_utf8_lossy(contents);
    let record = Record::<Manifest>::parse(&text, MANIFEST).map_err(|error| BundleError::Unpack(error.to_string()))?;
    let mut listed = BTreeSet::new();
    for entry in &record.content.files {
        if entry.path == MANIFEST || !listed.insert(entry.path.as_str()) {
            return Err(wrong(&entry.path, "the manifest lists it twice, or lists itself"));
        }
        let contents = find(&entry.path).ok_or_else(|| wrong(&entry.path, "it is not there"))?;
        if FileEntry::of(&entry.path, contents) != *entry {
            return Err(wrong(&entry.path, "its length or its SHA-256 is another"));
        }
    }
    let named = |path: &str| path == MANIFEST || listed.contains(path);
    if let Some((path, _)) = files.iter().find(|(path, _)| !named(path)) {
        return Err(wrong(path, "it is not in it"));
    }
    let cases = record.content.cases.iter().map(|case| &case.problem);
    for problem in cases.chain(record.content.kernels.iter().map(|kernel| &kernel.problem)) {
        problem.problem().map_err(|error| BundleError::Problem(error.to_string()))?;
    }
    Ok(record)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::record::Origin;

    #[test]
    fn every_file_is_held_against_the_manifest() {
        let manifest = Manifest {
            commands: vec![],
            left_out: vec![],
            environment: Value::Null,
            cases: vec![],
            kernels: vec![],
            files: vec![FileEntry::of("a", b"hello")],
        };
        let text = Record::new(Origin::for_tests(), manifest).to_json().into_bytes();
        let files = |other: &[(&str, &[u8])]| -> Files {
            let others = other.iter().map(|(name, contents)| ((*name).to_owned(), contents.to_vec()));
            std::iter::once((MANIFEST.to_owned(), text.clone())).chain(others).collect()
        };
        let check = |other: &[(&str, &[u8])], expected: Option<&str>| {
            let error = read_manifest(&files(other)).err().map(|error| error.to_string());
            assert_eq!(error.as_deref(), expected);
        };
        check(&[("a", b"hello")], None);
        check(&[("a", b"hellp")], Some("a does not match the manifest: its length or its SHA-256 is another"));
        check(&[], Some("a does not match the manifest: it is not there"));
        check(&[("a", b"hello"), ("b", b"")], Some("b does not match the manifest: it is not in it"));
    }

    #[test]
    fn what_a_manifest_says_must_make_sense() {
        let check = |shape: &str, listed: &[&str], expected: Option<&str>| {
            let problem = ProblemKey { shape: shape.to_owned(), dtype: "f32".to_owned(), mask: "full".to_owned() };
            let case = CaseEntry {
                backend: "cpu".to_owned(),
                kernel: "portable".to_owned(),
                problem,
                seed: 0,
                inputs_sha256: String::new(),
                output_sha256: String::new(),
                output_file: None,
                median_seconds: 1.0,
            };
            let manifest = Manifest {
                commands: vec![],
                left_out: vec![],
                environment: Value::Null,
                cases: vec![case],
                kernels: vec![],
                files: listed.iter().map(|path| FileEntry::of(path, b"")).collect(),
            };
            let text = Record::new(Origin::for_tests(), manifest).to_json().into_bytes();
            let files = vec![(MANIFEST.to_owned(), text), ("a".to_owned(), vec![])];
            assert_eq!(read_manifest(&files).err().map(|error| error.to_string()).as_deref(), expected, "{shape}");
        };
        check("1x2x40x16", &["a"], None);
        let twice = "does not match the manifest: the manifest lists it twice, or lists itself";
        check("1x2x40x16", &["a", "a"], Some(&format!("a {twice}")));
        check("1x2x40x16", &["a", MANIFEST], Some(&format!("{MANIFEST} {twice}")));
        let impossible = "the manifest names an invalid problem:";
        check(
            "1x3/2x40x16",
            &["a"],
            Some(&format!(
                "{impossible} `1x3/2x40x16 f32 full`: query_heads is 3 and key_heads is 2; query_heads must be a multiple of key_heads"
            )),
        );
        check(
            "1x1x18446744073709551615,4x16",
            &["a"],
            Some(&format!(
                "{impossible} `1x1x18446744073709551615,4x16 f32 full`: query_length is 18446744073709551615; it may be at most 9223372036854775807; query of 1 batches, 1 heads, 18446744073709551615 rows and 16 columns spans more than 9223372036854775807 bytes; output of 1 batches, 1 heads, 18446744073709551615 rows and 16 columns spans more than 9223372036854775807 bytes"
            )),
        );
        check(
            "1x1x18446744073709551616x16",
            &["a"],
            Some(&format!(
                "{impossible} `18446744073709551616` in `1x1x18446744073709551616x16` is not a valid queries"
            )),
        );
    }
}
