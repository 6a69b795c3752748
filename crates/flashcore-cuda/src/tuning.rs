//! The tuning store: the configs measured to be best on this machine, in a file beside the compiled kernels. It is in
//! this crate because it shares the folder of the cache and its atomic file writes.
//!
//! One JSON file with a schema version; a file of another version is an error that says so, and is never misread.
//! Devices, drivers and classes of problems are opaque names here, which the caller chooses.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::cache::{KernelCache, NoDisk, write_whole};

/// The schema version of the file.
const SCHEMA: u32 = 1;
/// The name of the file in the folder of the cache.
const FILE: &str = "tuned.json";

/// The best config of a class of problems.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Tuned {
    /// The device.
    pub device: String,
    /// The driver.
    pub driver: String,
    /// The class of problems.
    pub class: String,
    /// The name of the config that was best.
    pub config: String,
    /// Seconds that it took.
    pub seconds: f64,
    /// The config that the class has by default.
    pub default_config: String,
    /// Seconds that the default took.
    pub default_seconds: f64,
    /// The problem that was measured.
    pub problem: String,
}

impl Tuned {
    fn key(&self) -> (&str, &str, &str) {
        (&self.device, &self.driver, &self.class)
    }
}

#[derive(Serialize, Deserialize)]
struct File {
    schema: u32,
    tuned: Vec<Tuned>,
}

/// The reason why the store could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum TuningError {
    /// Nothing is kept on disk.
    #[error(transparent)]
    NoDisk(#[from] NoDisk),
    /// The file cannot be read or written.
    #[error("cannot use {}: {reason}", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// The system's message.
        reason: io::Error,
    },
    /// The file is not a tuning store of this version.
    #[error("{} cannot be read: {reason}; `flashcore tune --forget all` removes it", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The problem.
        reason: String,
    },
}

/// The file of tuned configs.
#[derive(Debug, Clone)]
pub struct TuningStore {
    folder: PathBuf,
}

impl TuningStore {
    /// The store in the folder of a cache.
    pub fn of(cache: &KernelCache) -> Result<Self, TuningError> {
        match cache.disk() {
            Ok(folder) => Ok(Self { folder: folder.to_owned() }),
            Err(reason) => Err(reason.clone().into()),
        }
    }

    /// The path of the file.
    pub fn path(&self) -> PathBuf {
        self.folder.join(FILE)
    }

    /// All tuned configs; empty where there is no file.
    pub fn read(&self) -> Result<Vec<Tuned>, TuningError> {
        let path = self.path();
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(reason) => return Err(TuningError::Unusable { path, reason }),
        };
        let unreadable = |reason: String| TuningError::Unreadable { path: path.clone(), reason };
        // The version first: in another version the rest may be anything.
        let value: serde_json::Value = serde_json::from_str(&text).map_err(|error| unreadable(error.to_string()))?;
        match value["schema"].as_u64() {
            Some(schema) if schema == u64::from(SCHEMA) => {}
            other => return Err(unreadable(format!("its schema is {other:?}, and this version reads {SCHEMA}"))),
        }
        let file: File = serde_json::from_value(value).map_err(|error| unreadable(error.to_string()))?;
        Ok(file.tuned)
    }

    /// Stores one, replacing the one of the same device, driver and class.
    pub fn remember(&self, tuned: Tuned) -> Result<(), TuningError> {
        let mut all = self.read()?;
        all.retain(|other| other.key() != tuned.key());
        all.push(tuned);
        self.write(all)
    }

    /// Removes those for which `which` returns true; returns their number.
    pub fn forget(&self, which: impl Fn(&Tuned) -> bool) -> Result<usize, TuningError> {
        let mut all = self.read()?;
        let before = all.len();
        all.retain(|tuned| !which(tuned));
        let forgotten = before - all.len();
        if forgotten > 0 {
            self.write(all)?;
        }
        Ok(forgotten)
    }

    /// Removes the file, whatever is in it; returns true if there was one.
    pub fn forget_all(&self) -> Result<bool, TuningError> {
        let path = self.path();
        match fs::remove_file(&path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(reason) => Err(TuningError::Unusable { path, reason }),
        }
    }

    /// The configs of a device and a driver, by class.
    pub fn configs(&self, device: &str, driver: &str) -> Result<BTreeMap<String, String>, TuningError> {
        let all = self.read()?.into_iter().filter(|tuned| tuned.device == device && tuned.driver == driver);
        Ok(all.map(|tuned| (tuned.class, tuned.config)).collect())
    }

    fn write(&self, tuned: Vec<Tuned>) -> Result<(), TuningError> {
        let unusable = |reason: io::Error| TuningError::Unusable { path: self.path(), reason };
        let file = File { schema: SCHEMA, tuned };
        let text = serde_json::to_string_pretty(&file).map_err(|error| unusable(io::Error::other(error)))?;
        write_whole(Path::new(&self.folder), FILE, text.as_bytes()).map_err(unusable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::CacheOptions;
    use crate::cache::scratch::Scratch;

    fn entry(driver: &str, class: &str, config: &str) -> Tuned {
        Tuned {
            device: "a GPU".to_owned(),
            driver: driver.to_owned(),
            class: class.to_owned(),
            config: config.to_owned(),
            seconds: 1e-6,
            default_config: "default".to_owned(),
            default_seconds: 2e-6,
            problem: "a problem".to_owned(),
        }
    }

    fn store(scratch: &Scratch) -> TuningStore {
        TuningStore::of(&KernelCache::open(CacheOptions::folder(scratch.path()))).expect("a folder")
    }

    #[test]
    fn what_is_remembered_replaces_what_was_known_and_can_be_forgotten() {
        let scratch = Scratch::new("tuning");
        let store = store(&scratch);
        assert_eq!(store.read().expect("nothing yet"), []);
        for (driver, class, config) in [("1", "x", "a"), ("1", "y", "b"), ("2", "x", "c"), ("1", "x", "d")] {
            store.remember(entry(driver, class, config)).expect("remembered");
        }
        let expected = BTreeMap::from([("x".to_owned(), "d".to_owned()), ("y".to_owned(), "b".to_owned())]);
        assert_eq!(store.configs("a GPU", "1").expect("read"), expected);
        assert_eq!(store.configs("another GPU", "1").expect("read"), BTreeMap::new());
        assert_eq!(store.forget(|tuned| tuned.class == "x").expect("forgotten"), 2);
        assert_eq!(store.read().expect("read"), [entry("1", "y", "b")]);
        assert!(store.forget_all().expect("removed"));
        assert!(!store.forget_all().expect("nothing to remove"));
    }

    #[test]
    fn a_file_of_another_version_or_of_none_is_never_misread() {
        let scratch = Scratch::new("tuning-version");
        let store = store(&scratch);
        for (text, complaint) in [
            ("{\"schema\": 2, \"tuned\": []}", "its schema is Some(2), and this version reads 1"),
            ("{\"tuned\": []}", "its schema is None, and this version reads 1"),
            ("{\"schema\": 1}", "missing field `tuned`"),
        ] {
            fs::write(store.path(), text).expect("written");
            let error = store.read().expect_err("another version").to_string();
            assert_eq!(
                error,
                format!(
                    "{} cannot be read: {complaint}; `flashcore tune --forget all` removes it",
                    store.path().display()
                )
            );
            // A file that is not understood is not overwritten.
            assert!(store.remember(entry("1", "x", "a")).is_err());
        }
    }
}
