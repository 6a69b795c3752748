//! The process that uses CUDA. Contexts, modules and memory of a process mean nothing in its forked children.
//!
//! Every launch asks whether this is still that process. Asking the system costs a call of it, which in a sandbox takes as
//! long as a launch; so the number is kept, and forgotten in the child of a fork (`pthread_atfork`).

#[cfg(not(unix))]
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
        let process = this_process();
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
        let (opened_by, process) = (self.0.load(Ordering::Relaxed), this_process());
        if opened_by == 0 || opened_by == process { Ok(()) } else { Err(Forked { opened_by, process }) }
    }
}

/// The number of this process.
fn this_process() -> u32 {
    #[cfg(unix)]
    return unix::this_process();
    #[cfg(not(unix))]
    process::id()
}

#[cfg(unix)]
#[expect(unsafe_code, reason = "pthread_atfork has no safe form")]
mod unix {
    use std::ffi::c_int;
    use std::process;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    /// The number of this process; 0 for unknown, as after a fork.
    static PROCESS: AtomicU32 = AtomicU32::new(0);

    type Handler = unsafe extern "C" fn();

    unsafe extern "C" {
        fn pthread_atfork(prepare: Option<Handler>, parent: Option<Handler>, child: Option<Handler>) -> c_int;
    }

    pub(super) fn this_process() -> u32 {
        match PROCESS.load(Ordering::Relaxed) {
            0 => ask(),
            known => known,
        }
    }

    #[cold]
    fn ask() -> u32 {
        static IS_WATCHED: AtomicBool = AtomicBool::new(false);
        // SAFETY: the handler stores a number and touches nothing else; registering it twice forgets twice.
        if IS_WATCHED.load(Ordering::Acquire) || unsafe { pthread_atfork(None, None, Some(forget)) } == 0 {
            IS_WATCHED.store(true, Ordering::Release);
            PROCESS.store(process::id(), Ordering::Relaxed);
        }
        process::id()
    }

    extern "C" fn forget() {
        PROCESS.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process;

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
