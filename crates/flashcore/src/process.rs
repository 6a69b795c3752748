//! The process that uses CUDA. Contexts, modules and memory of a process mean nothing in its forked children.

use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

/// CUDA is used by the process that this one was forked from, and cannot be used here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "process {opened_by} uses CUDA, and process {process} was forked from it; CUDA does not survive a fork: start \
     processes anew (in Python by the start method \"spawn\"), fork before anything uses the GPU, or use the CPU"
)]
#[non_exhaustive]
pub struct Forked {
    /// The process that opened the driver.
    pub opened_by: u32,
    /// This process.
    pub process: u32,
}

/// A process that uses something that does not survive a fork; 0 for none.
pub(crate) struct Owner(AtomicU32);

/// The process that opened the driver.
pub(crate) static CUDA: Owner = Owner::new();

impl Owner {
    const fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Makes this process the owner, unless one that it was forked from is. Takes no lock: others may be held for ever here.
    pub(crate) fn claim(&self) -> Result<(), Forked> {
        let process = process::id();
        match self.0.compare_exchange(0, process, Ordering::Relaxed, Ordering::Relaxed) {
            Err(opened_by) if opened_by != process => Err(Forked { opened_by, process }),
            _ => Ok(()),
        }
    }

    /// This process does not own it after all.
    pub(crate) fn release(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// An error where a process that this one was forked from is the owner.
    pub(crate) fn check(&self) -> Result<(), Forked> {
        let (opened_by, process) = (self.0.load(Ordering::Relaxed), process::id());
        if opened_by == 0 || opened_by == process { Ok(()) } else { Err(Forked { opened_by, process }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_process_owns() {
        let owner = Owner::new();
        assert_eq!((owner.check(), owner.claim(), owner.claim(), owner.check()), (Ok(()), Ok(()), Ok(()), Ok(())));
        owner.release();
        assert_eq!(owner.0.load(Ordering::Relaxed), 0);
    }

    #[test]
    #[cfg(unix)]
    #[expect(unsafe_code, reason = "fork is a function of C")]
    fn a_forked_child_is_refused() {
        use std::ffi::c_int;
        unsafe extern "C" {
            fn fork() -> c_int;
            fn waitpid(process: c_int, status: *mut c_int, options: c_int) -> c_int;
            fn _exit(status: c_int) -> !;
        }
        let owner = Owner::new();
        assert_eq!(owner.claim(), Ok(()));
        let opened_by = process::id();
        // SAFETY: the child compares numbers and ends.
        let child = unsafe { fork() };
        if child == 0 {
            let expected = Err(Forked { opened_by, process: process::id() });
            let is_right = owner.check() == expected && owner.claim() == expected;
            // SAFETY: it ends the child at once.
            unsafe { _exit(c_int::from(!is_right)) };
        }
        let mut status = -1;
        // SAFETY: the status outlives the call.
        assert_eq!(unsafe { waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child was not refused");
        assert_eq!(owner.check(), Ok(()));
        assert_eq!(
            Forked { opened_by: 7, process: 9 }.to_string(),
            "process 7 uses CUDA, and process 9 was forked from it; CUDA does not survive a fork: start processes anew (in \
             Python by the start method \"spawn\"), fork before anything uses the GPU, or use the CPU"
        );
    }
}
