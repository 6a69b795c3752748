//! Files that are there as a whole or not at all.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// Writes a file, replacing what has its name in one step. Who reads it sees the old file or the new one, never a part.
pub(super) fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let name = path.file_name().ok_or_else(|| io::Error::other("this is not the name of a file"))?;
    let mut temporary = OsString::from(".");
    temporary.push(name);
    temporary.push(format!(".{}.tmp", std::process::id()));
    // In the same folder: a rename cannot cross file systems.
    let temporary = path.with_file_name(temporary);
    let write = |mut file: File| file.write_all(bytes).and_then(|()| file.sync_all());
    let written = File::create_new(&temporary)?;
    let written = write(written).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // The error that is returned is the one to hear of.
        let _ = fs::remove_file(&temporary);
    }
    written
}
