//! Origin of the records of this program.

use std::path::Path;

use flashcore_bench::lab::record::{Build, Content, Machine, Origin, Record};
use flashcore_bench::util::whole_file::write_whole;

use crate::Failure;

/// This program.
pub(crate) fn build() -> Build {
    let commit = env!("FLASHCORE_BUILD_COMMIT");
    Build {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        commit: (!commit.is_empty()).then(|| commit.to_owned()),
        dirty: env!("FLASHCORE_BUILD_DIRTY") == "true",
        profile: if cfg!(debug_assertions) { "debug" } else { "release" }.to_owned(),
    }
}

/// Writes a record.
pub(crate) fn write_record<C: Content>(file: &Path, machine: Machine, content: C) -> Result<(), Failure> {
    let record = Record::new(Origin::now(build(), machine), content);
    write_file(file, record.to_json().as_bytes())
}

/// Writes an output file, a regular one whole or not at all.
pub(crate) fn write_file(file: &Path, bytes: &[u8]) -> Result<(), Failure> {
    write_whole(file, bytes).map_err(|error| Failure::Environment(format!("cannot write {}: {error}", file.display())))
}
