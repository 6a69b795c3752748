//! Compilation locks: one process compiles, the others wait for it. They save work; correctness does not depend on
//! them.
//!
//! The lock belongs to the operating system, which releases it when its holder dies; the existence of its file means
//! nothing. A process that waits too long, or is on a file system without locks, compiles as well: entries are written
//! whole and under their keys, so two writers of one entry do no harm.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// File extension of lock files.
pub(super) const LOCK: &str = "lock";
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// A held lock.
#[derive(Debug)]
pub(super) struct Lock {
    path: PathBuf,
    file: File,
}

impl Lock {
    /// Waits for the lock for at most `wait`; `None` on timeout, or if there are no locks here.
    pub(super) fn acquire(path: &Path, wait: Duration) -> Option<Self> {
        let deadline = Instant::now() + wait;
        let mut pause = FIRST_PAUSE;
        loop {
            let file = open(path)?;
            match file.try_lock() {
                Ok(()) => return Some(Self { path: path.to_owned(), file }),
                Err(TryLockError::Error(_)) => return None,
                Err(TryLockError::WouldBlock) => {}
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            // Opened anew each time: the holder removes the file when it is done.
            drop(file);
            thread::sleep(pause.min(left));
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // A process that already has the file open locks a file without a name, and compiles in parallel with another.
        let _ = fs::remove_file(&self.path);
        // A process forked by another thread meanwhile has the file open too; its copy holds no lock after this.
        let _ = self.file.unlock();
    }
}

fn open(path: &Path) -> Option<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).mode(0o600);
    }
    options.open(path).ok()
}

#[cfg(test)]
mod tests {
    use super::super::scratch::Scratch;
    use super::*;

    #[test]
    fn the_wait_is_bounded_and_the_lock_is_passed_on() {
        let scratch = Scratch::new("lock");
        let path = scratch.path().join("key.lock");
        let held = Lock::acquire(&path, Duration::ZERO).expect("nobody holds it");
        let start = Instant::now();
        assert!(Lock::acquire(&path, Duration::from_millis(60)).is_none());
        assert!((60..5_000).contains(&(start.elapsed().as_millis())), "{:?}", start.elapsed());
        drop(held);
        assert!(!path.exists());
        assert!(Lock::acquire(&path, Duration::ZERO).is_some());
    }

    #[test]
    fn a_lock_file_that_was_left_behind_holds_nobody_up() {
        let scratch = Scratch::new("lock-left");
        let path = scratch.path().join("key.lock");
        fs::write(&path, b"4711").unwrap();
        assert!(Lock::acquire(&path, Duration::ZERO).is_some());
    }

    #[test]
    fn without_a_place_for_locks_there_is_no_wait() {
        let scratch = Scratch::new("lock-none");
        let start = Instant::now();
        assert!(Lock::acquire(&scratch.path().join("missing/key.lock"), Duration::from_secs(60)).is_none());
        assert!(start.elapsed() < Duration::from_secs(5));
    }
}
