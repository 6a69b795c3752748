//! The disk level of the cache: one file per entry in one folder.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::Duration;

use super::entry::{Corruption, Entry};
use super::file::{self, FileContents};
use super::folder::{self, NoDisk};
use super::key::Key;
use super::lock::{self, Lock};

/// File extension of entries.
const ENTRY: &str = "kernel";
/// File extension of quarantined files, which were not sound entries.
const QUARANTINED: &str = "bad";

/// The reason why a file under the name of an entry is not that entry.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unsound {
    /// A file whose contents have changed.
    #[error(transparent)]
    Corrupt(#[from] Corruption),
    /// A file that this crate does not write.
    #[error("it is {what}")]
    Foreign {
        /// A description of it.
        what: String,
    },
    /// Code that the driver refuses.
    #[error("the driver cannot load it: {reason}")]
    Refused {
        /// The driver's message.
        reason: String,
    },
}

/// The reason why there is no entry.
#[derive(Debug)]
pub(super) enum Miss {
    Absent,
    /// Not readable now. It may be sound, so it is left alone.
    Unreadable(io::Error),
    Unsound(Unsound),
}

#[derive(Debug)]
pub(super) struct Disk {
    base: PathBuf,
    folder: PathBuf,
    swept: Once,
}

impl Disk {
    pub(super) fn open(base: &Path) -> Result<Self, NoDisk> {
        Ok(Self { base: base.to_owned(), folder: folder::prepare(base)?, swept: Once::new() })
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(super) fn path(&self, key: Key) -> PathBuf {
        self.folder.join(format!("{key}.{ENTRY}"))
    }

    pub(super) fn load(&self, key: Key) -> Result<Entry, Miss> {
        match file::read(&self.path(key)) {
            Ok(FileContents::Nothing) => Err(Miss::Absent),
            Ok(FileContents::Foreign(what)) => Err(Miss::Unsound(Unsound::Foreign { what })),
            Ok(FileContents::Bytes(bytes)) => Entry::decode(&bytes, key).map_err(|error| Miss::Unsound(error.into())),
            Err(error) => Err(Miss::Unreadable(error)),
        }
    }

    pub(super) fn store(&self, entry: &Entry) -> io::Result<()> {
        self.swept.call_once(|| {
            file::sweep(&self.folder);
        });
        let name = format!("{}.{ENTRY}", entry.key);
        let bytes = entry.encode();
        match file::write(&self.folder, &name, &bytes) {
            // Another process removed the folder, or the temporary file, meanwhile. Try once more, with the same care.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                folder::prepare(&self.base).map_err(io::Error::other)?;
                file::write(&self.folder, &name, &bytes)
            }
            written => written,
        }
    }

    /// Renames an unsound file and keeps it for inspection. If another process has just put a sound one in its place,
    /// that one goes, and is compiled again: a loss of time, not of correctness.
    pub(super) fn quarantine(&self, key: Key) {
        // A folder that cannot be written to keeps the file; it is recognised again next time.
        let _ = fs::rename(self.path(key), self.folder.join(format!("{key}.{QUARANTINED}")));
    }

    pub(super) fn lock(&self, key: Key, wait: Duration) -> Option<Lock> {
        Lock::acquire(&self.folder.join(format!("{key}.{}", lock::LOCK)), wait)
    }

    /// The keys of all entries, in order.
    pub(super) fn keys(&self) -> io::Result<Vec<Key>> {
        let mut keys: Vec<Key> =
            self.names()?.iter().filter_map(|name| name.strip_suffix(ENTRY)?.strip_suffix('.')?.parse().ok()).collect();
        keys.sort();
        Ok(keys)
    }

    /// Removes every file of the cache: entries, quarantined files, locks and leftovers of dead writers. Returns the
    /// number of entries removed and the files that could not be removed.
    pub(super) fn clear(&self) -> io::Result<(usize, Vec<PathBuf>)> {
        let mut removed = 0;
        let mut kept = Vec::new();
        for name in self.names()? {
            let Some((stem, kind)) = name.rsplit_once('.') else { continue };
            if stem.parse::<Key>().is_err() || ![ENTRY, QUARANTINED, lock::LOCK].contains(&kind) {
                continue;
            }
            let path = self.folder.join(&name);
            match fs::remove_file(&path) {
                Ok(()) => removed += usize::from(kind == ENTRY),
                // Another process was faster.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(_) => kept.push(path),
            }
        }
        file::sweep(&self.folder);
        Ok((removed, kept))
    }

    fn names(&self) -> io::Result<Vec<String>> {
        match fs::read_dir(&self.folder) {
            Ok(files) => Ok(files.flatten().filter_map(|file| file.file_name().into_string().ok()).collect()),
            // An empty cache.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }
}
