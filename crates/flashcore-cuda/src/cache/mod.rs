//! The kernel cache: memory, then disk. It knows nothing of CUDA; what it keeps are bytes with a description.
//!
//! ```
//! use flashcore_cuda::cache::{CacheOptions, Compiled, Key, KeySource, KernelCache, Metadata, SelfCheck, Source};
//!
//! let cache = KernelCache::open(CacheOptions::memory());
//! let key = Key::of(&KeySource { ptx: "…", options: "O4", arch: "sm_90", driver: "13000", crate_version: "0.1.0" });
//! let compile = || {
//!     let metadata = Metadata {
//!         kernel: "attention".to_owned(),
//!         arch: "sm_90".to_owned(),
//!         driver: "13000".to_owned(),
//!         log: String::new(),
//!         compile_milliseconds: 200,
//!         self_check: SelfCheck::NotRun,
//!     };
//!     Ok::<_, std::convert::Infallible>(Compiled { metadata, payload: b"\x7fELF".to_vec() })
//! };
//! assert_eq!(cache.get_or_compile(key, compile)?.source, Source::Compiled);
//! assert_eq!(cache.get_or_compile(key, compile)?.source, Source::Memory);
//! # Ok::<(), std::convert::Infallible>(())
//! ```
//!
//! What holds, whoever is killed when and whatever happens to the files:
//!
//! * A payload that is returned is the payload that was compiled for that key. Each load checks length, checksum and
//!   key; a file that fails is renamed to `*.bad` and compiled again.
//! * Nothing waits without bound. Locks are the operating system's and die with their holder; they save work and
//!   guarantee nothing, so the cache works without them.
//! * No failure of the disk is a failure of the call. A place that cannot be used or trusted, a full or read-only disk
//!   turn the cache into one of memory alone, with one [`Warning`].
//! * No clock decides anything, and a later format lives in another folder.
//! * Only what this user wrote is read: the folder is made with mode 0700 and refused where it belongs to or can be
//!   written by somebody else; links are not followed. The checksum is integrity, not authenticity.

mod disk;
mod entry;
mod file;
mod folder;
mod key;
mod lock;
#[cfg(test)]
pub(crate) mod scratch;
mod self_check;
#[cfg(all(test, unix))]
mod tests;
mod warning;

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LockResult, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use disk::{Disk, Miss};

pub use disk::Unsound;
pub use entry::{Compiled, Corruption, Entry, Metadata};
pub(crate) use file::write as write_whole;
pub use folder::NoDisk;
pub use key::{InvalidKey, Key, KeySource};
pub use self_check::SelfCheck;
pub use warning::{Warning, Warnings};

/// How long to wait for another process that compiles the same kernel: longer than a compilation takes.
const LOCK_WAIT: Duration = Duration::from_secs(20);

/// Where entries are kept beside the memory of the process.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Place {
    /// `$FLASHCORE_CACHE_DIR`, else `$XDG_CACHE_HOME/flashcore`, else `~/.cache/flashcore`; nowhere with
    /// `FLASHCORE_CACHE=off`.
    #[default]
    Environment,
    /// In a folder below this one.
    Folder(PathBuf),
    /// Nowhere.
    Memory,
}

/// How a cache is opened.
#[derive(Debug)]
pub struct CacheOptions {
    /// Where entries are kept.
    pub place: Place,
    /// How long to wait for another process that compiles the same kernel, before compiling it too.
    pub lock_wait: Duration,
    /// Hears what a user should know.
    pub warnings: Warnings,
}

impl Default for CacheOptions {
    fn default() -> Self {
        Self { place: Place::default(), lock_wait: LOCK_WAIT, warnings: Warnings::ignored() }
    }
}

impl CacheOptions {
    /// A cache that ends with the process.
    pub fn memory() -> Self {
        Self { place: Place::Memory, ..Self::default() }
    }

    /// A cache in a folder below `base`.
    pub fn folder(base: impl Into<PathBuf>) -> Self {
        Self { place: Place::Folder(base.into()), ..Self::default() }
    }

    /// The same with somebody who listens.
    #[must_use]
    pub fn with_warnings(self, listener: impl Fn(&Warning) + Send + Sync + 'static) -> Self {
        Self { warnings: Warnings::to(listener), ..self }
    }
}

/// Where an entry came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// This process had it.
    Memory,
    /// An earlier process had left it, or another one just did.
    Disk,
    /// It was compiled now.
    Compiled,
}

/// An entry, and where it came from.
#[derive(Debug, Clone)]
pub struct Found {
    /// The entry.
    pub entry: Arc<Entry>,
    /// Where it came from.
    pub source: Source,
}

/// An entry on disk as `list` shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its name.
    pub key: Key,
    /// What is known of it.
    pub metadata: Metadata,
    /// Bytes of its code.
    pub payload_bytes: usize,
}

/// What `verify` found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Verified {
    /// Entries that are exactly what was written.
    pub sound: usize,
    /// Files that were not, and are now `*.bad`.
    pub quarantined: Vec<(Key, Unsound)>,
    /// Files that could not be read, and what the system said.
    pub unreadable: Vec<(Key, String)>,
}

/// What `clear` did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Cleared {
    /// Entries removed from disk.
    pub removed: usize,
    /// Files that could not be removed.
    pub kept: Vec<PathBuf>,
}

/// Compiled kernels by what they were compiled from. Shared between threads by reference, between processes by files.
pub struct KernelCache {
    disk: Result<Disk, NoDisk>,
    /// Set by the first write that fails for a reason that will last.
    read_only: OnceLock<Warning>,
    memory: Mutex<HashMap<Key, Arc<Slot>>>,
    lock_wait: Duration,
    warnings: Warnings,
}

/// The place of one entry in memory. Its lock is held while the entry is compiled, so that threads of one process wait
/// for each other also where there is no disk.
type Slot = Mutex<Option<Arc<Entry>>>;

impl KernelCache {
    /// Opens the cache. Always succeeds: where there is no usable place on disk, it is one of memory alone, and
    /// [`disk`](Self::disk) says why.
    pub fn open(options: CacheOptions) -> Self {
        let CacheOptions { place, lock_wait, warnings } = options;
        let disk = match place {
            Place::Memory => Err(NoDisk::Off),
            Place::Folder(base) => Disk::open(&base),
            Place::Environment => folder::from_environment(|name| std::env::var_os(name), std::env::home_dir())
                .and_then(|base| Disk::open(&base)),
        };
        if let Err(reason) = &disk
            && *reason != NoDisk::Off
        {
            warnings.say(&Warning::NoDisk { reason: reason.clone() });
        }
        Self { disk, read_only: OnceLock::new(), memory: Mutex::default(), lock_wait, warnings }
    }

    /// The folder of the entries, or why there is none.
    pub fn disk(&self) -> Result<&Path, &NoDisk> {
        self.disk.as_ref().map(Disk::folder)
    }

    /// The warning by which this process stopped writing to disk, if it did.
    pub fn read_only(&self) -> Option<&Warning> {
        self.read_only.get()
    }

    /// The entry of a key: from memory, else from disk, else compiled and kept.
    ///
    /// Threads and processes that ask for the same key at the same time compile it once, as far as locks allow. The only
    /// errors are those of `compile`.
    pub fn get_or_compile<E>(&self, key: Key, compile: impl FnOnce() -> Result<Compiled, E>) -> Result<Found, E> {
        let slot = self.slot(key);
        let mut slot = unpoisoned(slot.lock());
        if let Some(entry) = &*slot {
            return Ok(Found { entry: entry.clone(), source: Source::Memory });
        }
        let mut found = self.load(key);
        if found.is_none() {
            // Held until the entry is on disk, or until this process is no more.
            let _lock = self.writable_disk().and_then(|disk| disk.lock(key, self.lock_wait));
            // Whoever held the lock before may have compiled it.
            found = self.load(key);
            if found.is_none() {
                let Compiled { metadata, payload } = compile()?;
                let entry = Arc::new(Entry { key, metadata, payload });
                self.store(&entry);
                *slot = Some(entry.clone());
                return Ok(Found { entry, source: Source::Compiled });
            }
        }
        let entry = Arc::new(found.expect("a missing entry was compiled above"));
        *slot = Some(entry.clone());
        Ok(Found { entry, source: Source::Disk })
    }

    /// Keeps the verdict on an entry with it, in memory and on disk. False if there is no such entry.
    pub fn set_verdict(&self, key: Key, verdict: SelfCheck) -> bool {
        let slot = self.slot(key);
        let mut slot = unpoisoned(slot.lock());
        let known = slot.as_deref().cloned().or_else(|| self.load(key));
        let Some(mut entry) = known else { return false };
        if entry.metadata.self_check != verdict {
            entry.metadata.self_check = verdict;
            self.store(&entry);
        }
        *slot = Some(Arc::new(entry));
        true
    }

    /// Forgets an entry that turned out to be of no use, and takes its file out of the way.
    pub fn discard(&self, key: Key, reason: Unsound) {
        let slot = self.slot(key);
        *unpoisoned(slot.lock()) = None;
        if let Ok(disk) = &self.disk {
            self.quarantine(disk, key, reason);
        }
    }

    /// The sound entries on disk, by key. Files that are no sound entries are left out; `verify` names them.
    pub fn list(&self) -> io::Result<Vec<Listed>> {
        let Ok(disk) = &self.disk else { return Ok(Vec::new()) };
        let sound = |key: Key| disk.load(key).ok();
        let listed =
            |entry: Entry| Listed { key: entry.key, metadata: entry.metadata, payload_bytes: entry.payload.len() };
        Ok(disk.keys()?.into_iter().filter_map(sound).map(listed).collect())
    }

    /// Reads every file, and takes those that are no sound entries out of the way.
    pub fn verify(&self) -> io::Result<Verified> {
        let mut verified = Verified::default();
        let Ok(disk) = &self.disk else { return Ok(verified) };
        for key in disk.keys()? {
            match disk.load(key) {
                Ok(_) => verified.sound += 1,
                // Another process removed it since the listing.
                Err(Miss::Absent) => {}
                Err(Miss::Unreadable(error)) => verified.unreadable.push((key, error.to_string())),
                Err(Miss::Unsound(reason)) => {
                    self.quarantine(disk, key, reason.clone());
                    verified.quarantined.push((key, reason));
                }
            }
        }
        Ok(verified)
    }

    /// Forgets everything and removes the files of this cache, and no others.
    pub fn clear(&self) -> io::Result<Cleared> {
        unpoisoned(self.memory.lock()).clear();
        let Ok(disk) = &self.disk else { return Ok(Cleared::default()) };
        let (removed, kept) = disk.clear()?;
        Ok(Cleared { removed, kept })
    }

    fn slot(&self, key: Key) -> Arc<Slot> {
        unpoisoned(self.memory.lock()).entry(key).or_default().clone()
    }

    fn writable_disk(&self) -> Option<&Disk> {
        self.disk.as_ref().ok().filter(|_| self.read_only.get().is_none())
    }

    fn load(&self, key: Key) -> Option<Entry> {
        let disk = self.disk.as_ref().ok()?;
        match disk.load(key) {
            Ok(entry) => Some(entry),
            Err(Miss::Absent | Miss::Unreadable(_)) => None,
            Err(Miss::Unsound(reason)) => {
                self.quarantine(disk, key, reason);
                None
            }
        }
    }

    fn store(&self, entry: &Entry) {
        let Some(disk) = self.writable_disk() else { return };
        let Err(error) = disk.store(entry) else { return };
        if file::is_passing(&error) {
            return;
        }
        let warning = Warning::ReadOnly { folder: disk.folder().to_owned(), reason: error.to_string() };
        if self.read_only.set(warning.clone()).is_ok() {
            self.warnings.say(&warning);
        }
    }

    fn quarantine(&self, disk: &Disk, key: Key, reason: Unsound) {
        disk.quarantine(key);
        self.warnings.say(&Warning::Quarantined { path: disk.path(key), reason });
    }
}

impl fmt::Debug for KernelCache {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("KernelCache").field("disk", &self.disk).finish_non_exhaustive()
    }
}

/// What a lock protects. A thread that panicked with it held has left a map that is whole: each change is one step.
fn unpoisoned<T>(locked: LockResult<MutexGuard<'_, T>>) -> MutexGuard<'_, T> {
    locked.unwrap_or_else(PoisonError::into_inner)
}
