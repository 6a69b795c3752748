//! The kernel cache: memory, then disk. It knows nothing of CUDA; an entry is bytes with a description.
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
//! Guarantees, whichever process is killed when and whatever happens to the files:
//!
//! * A payload that is returned is the payload that was compiled for that key. Each load checks length, checksum and
//!   key; a file that fails is renamed to `*.bad` and compiled again.
//! * Nothing waits without bound. Locks are the operating system's and die with their holder; they save work and
//!   guarantee nothing, so the cache works without them.
//! * No failure of the disk is a failure of the call. With a folder that cannot be used or trusted, or a full or
//!   read-only disk, the cache works in memory alone, with one [`Warning`].
//! * No clock decides anything, and a later format lives in another folder.
//! * Only files that this user wrote are read: the folder is made with mode 0700 and refused where it belongs to or can
//!   be written by another user; links are not followed. The checksum is integrity, not authenticity.

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

/// Time to wait for another process that compiles the same kernel: longer than a compilation takes.
const LOCK_WAIT: Duration = Duration::from_secs(20);

/// The location of entries beside the memory of the process.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Location {
    /// `$FLASHCORE_CACHE_DIR`, else `$XDG_CACHE_HOME/flashcore`, else `~/.cache/flashcore`; nowhere with
    /// `FLASHCORE_CACHE=off`.
    #[default]
    Environment,
    /// In a folder below this one.
    Folder(PathBuf),
    /// Nowhere.
    Memory,
}

/// Options to open a cache with.
#[derive(Debug)]
pub struct CacheOptions {
    /// The location of entries.
    pub location: Location,
    /// Time to wait for another process that compiles the same kernel, before compiling it too.
    pub lock_wait: Duration,
    /// The listener for warnings.
    pub warnings: Warnings,
}

impl Default for CacheOptions {
    fn default() -> Self {
        Self { location: Location::default(), lock_wait: LOCK_WAIT, warnings: Warnings::ignored() }
    }
}

impl CacheOptions {
    /// A cache that ends with the process.
    pub fn memory() -> Self {
        Self { location: Location::Memory, ..Self::default() }
    }

    /// A cache in a folder below `base`.
    pub fn folder(base: impl Into<PathBuf>) -> Self {
        Self { location: Location::Folder(base.into()), ..Self::default() }
    }

    /// These options with a listener for warnings.
    #[must_use]
    pub fn with_warnings(self, listener: impl Fn(&Warning) + Send + Sync + 'static) -> Self {
        Self { warnings: Warnings::to(listener), ..self }
    }
}

/// The origin of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The memory of this process.
    Memory,
    /// The disk, from an earlier process or a concurrent one.
    Disk,
    /// A compilation just now.
    Compiled,
}

/// The result of a lookup: an entry and its origin.
#[derive(Debug, Clone)]
pub struct Lookup {
    /// The entry.
    pub entry: Arc<Entry>,
    /// The origin.
    pub source: Source,
}

/// An entry on disk as `list` shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedEntry {
    /// The key.
    pub key: Key,
    /// The description.
    pub metadata: Metadata,
    /// Bytes of the code.
    pub payload_bytes: usize,
}

/// The result of `verify`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VerifyReport {
    /// Number of sound entries.
    pub sound: usize,
    /// Unsound files, renamed to `*.bad`.
    pub quarantined: Vec<(Key, Unsound)>,
    /// Files that could not be read, with the system's message.
    pub unreadable: Vec<(Key, String)>,
}

/// The result of `clear`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ClearReport {
    /// Entries removed from disk.
    pub removed: usize,
    /// Files that could not be removed.
    pub kept: Vec<PathBuf>,
}

/// A cache of compiled kernels by key. Shared between threads by reference, between processes by files.
pub struct KernelCache {
    disk: Result<Disk, NoDisk>,
    /// Set by the first write that fails for a lasting reason.
    read_only: OnceLock<Warning>,
    memory: Mutex<HashMap<Key, Arc<Slot>>>,
    lock_wait: Duration,
    warnings: Warnings,
}

/// The slot of one entry in memory. Its lock is held while the entry is compiled, so that threads of one process wait
/// for each other even without a disk.
type Slot = Mutex<Option<Arc<Entry>>>;

impl KernelCache {
    /// Opens the cache. Always succeeds: without a usable folder on disk, it works in memory alone, and
    /// [`disk`](Self::disk) says why.
    pub fn open(options: CacheOptions) -> Self {
        let CacheOptions { location, lock_wait, warnings } = options;
        let disk = match location {
            Location::Memory => Err(NoDisk::Off),
            Location::Folder(base) => Disk::open(&base),
            Location::Environment => folder::from_environment(|name| std::env::var_os(name), std::env::home_dir())
                .and_then(|base| Disk::open(&base)),
        };
        if let Err(reason) = &disk
            && *reason != NoDisk::Off
        {
            warnings.say(&Warning::NoDisk { reason: reason.clone() });
        }
        Self { disk, read_only: OnceLock::new(), memory: Mutex::default(), lock_wait, warnings }
    }

    /// The folder of the entries, or the reason why there is none.
    pub fn disk(&self) -> Result<&Path, &NoDisk> {
        self.disk.as_ref().map(Disk::folder)
    }

    /// The warning with which this process stopped writing to disk, if it did.
    pub fn read_only(&self) -> Option<&Warning> {
        self.read_only.get()
    }

    /// The entry of a key: from memory, else from disk, else compiled and kept.
    ///
    /// Threads and processes that ask for the same key at the same time compile it once, as far as locks allow. The only
    /// errors are those of `compile`.
    pub fn get_or_compile<E>(&self, key: Key, compile: impl FnOnce() -> Result<Compiled, E>) -> Result<Lookup, E> {
        let slot = self.slot(key);
        let mut slot = unpoisoned(slot.lock());
        if let Some(entry) = &*slot {
            return Ok(Lookup { entry: entry.clone(), source: Source::Memory });
        }
        let mut found = self.load(key);
        if found.is_none() {
            // Held until the entry is on disk, or until this process ends.
            let _lock = self.writable_disk().and_then(|disk| disk.lock(key, self.lock_wait));
            // The previous holder of the lock may have compiled it.
            found = self.load(key);
            if found.is_none() {
                let Compiled { metadata, payload } = compile()?;
                let entry = Arc::new(Entry { key, metadata, payload });
                self.store(&entry);
                *slot = Some(entry.clone());
                return Ok(Lookup { entry, source: Source::Compiled });
            }
        }
        let entry = Arc::new(found.expect("a missing entry was compiled above"));
        *slot = Some(entry.clone());
        Ok(Lookup { entry, source: Source::Disk })
    }

    /// Stores the verdict on an entry with it, in memory and on disk. Returns false if there is no such entry.
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

    /// Removes an entry that turned out to be unusable, and quarantines its file.
    pub fn discard(&self, key: Key, reason: Unsound) {
        let slot = self.slot(key);
        *unpoisoned(slot.lock()) = None;
        if let Ok(disk) = &self.disk {
            self.quarantine(disk, key, reason);
        }
    }

    /// The sound entries on disk, by key. Other files are left out; `verify` names them.
    pub fn list(&self) -> io::Result<Vec<ListedEntry>> {
        let Ok(disk) = &self.disk else { return Ok(Vec::new()) };
        let sound = |key: Key| disk.load(key).ok();
        let listed =
            |entry: Entry| ListedEntry { key: entry.key, metadata: entry.metadata, payload_bytes: entry.payload.len() };
        Ok(disk.keys()?.into_iter().filter_map(sound).map(listed).collect())
    }

    /// Reads every file, and quarantines those that are not sound entries.
    pub fn verify(&self) -> io::Result<VerifyReport> {
        let mut verified = VerifyReport::default();
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

    /// Clears the memory and removes the files of this cache, and no others.
    pub fn clear(&self) -> io::Result<ClearReport> {
        unpoisoned(self.memory.lock()).clear();
        let Ok(disk) = &self.disk else { return Ok(ClearReport::default()) };
        let (removed, kept) = disk.clear()?;
        Ok(ClearReport { removed, kept })
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

/// The value in a lock. A thread that panicked with it held has left a consistent map: each change is one step.
fn unpoisoned<T>(locked: LockResult<MutexGuard<'_, T>>) -> MutexGuard<'_, T> {
    locked.unwrap_or_else(PoisonError::into_inner)
}
