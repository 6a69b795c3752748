//! The table of launches by keys.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::key::BuildWordHasher;
use crate::launch::Launch;

/// Most launches of a table; when it is full, all of them go, and the next calls find their plans in Python's cache.
const CAPACITY: usize = 4096;
/// Times that a thread tries a lock before it goes on without: another one holds it for the time of a lookup, or it belongs
/// to a thread that does not exist after a fork.
const TRIES: usize = 1000;

type Launches = HashMap<Box<[u64]>, Arc<Launch>, BuildWordHasher>;

/// Launches by keys. Its lock is only tried, never waited for.
#[derive(Default)]
pub(crate) struct Table(Mutex<Launches>);

impl Table {
    fn lock(&self) -> Option<MutexGuard<'_, Launches>> {
        for _ in 0..TRIES {
            if let Ok(launches) = self.0.try_lock() {
                return Some(launches);
            }
            std::thread::yield_now();
        }
        None
    }

    /// The launch of a key; none if there is none, or if the table cannot be looked at.
    pub(crate) fn find(&self, key: &[u64]) -> Option<Arc<Launch>> {
        self.lock()?.get(key).cloned()
    }

    /// Puts a launch into the table. The lock of the interpreter must be held.
    pub(crate) fn keep(&self, key: &[u64], launch: Launch) {
        // What goes is dropped after the lock: dropping runs code of Python.
        let mut gone = None;
        let launch = Arc::new(launch);
        if let Some(mut launches) = self.lock() {
            if launches.len() >= CAPACITY {
                gone = Some(std::mem::take(&mut *launches));
            }
            launches.insert(key.into(), launch);
        }
        drop(gone);
    }

    /// Forgets all launches. The lock of the interpreter must be held.
    pub(crate) fn clear(&self) {
        let gone = self.lock().map(|mut launches| std::mem::take(&mut *launches));
        drop(gone);
    }

    /// Number of launches.
    pub(crate) fn count(&self) -> usize {
        self.lock().map_or(0, |launches| launches.len())
    }
}
