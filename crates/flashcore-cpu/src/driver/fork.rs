//! Fork counter: in the child of a fork the threads of every pool are gone.
//!
//! Missing threads cannot be detected, so the system is asked to report forks (`pthread_atfork`). The handler in the child
//! only stores numbers, since other threads may have held any lock when the memory was copied.

/// Registers the fork handler. Called before any thread is made or used: forks before the first call do not matter.
#[cfg(unix)]
pub(crate) fn watch() {
    unix::watch();
}

/// Number of forks between the first call of [`watch`] and this process.
#[cfg(unix)]
pub(crate) fn count() -> usize {
    unix::FORKS.load(std::sync::atomic::Ordering::Relaxed)
}

/// True if this thread was one of a rayon pool when it forked: rayon takes it for a worker still, and its pool is dead.
#[cfg(unix)]
pub(crate) fn is_orphan() -> bool {
    unix::IS_ORPHAN.get()
}

#[cfg(unix)]
mod unix {
    use std::cell::Cell;
    use std::ffi::c_int;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    pub(super) static FORKS: AtomicUsize = AtomicUsize::new(0);

    thread_local! {
        pub(super) static IS_ORPHAN: Cell<bool> = const { Cell::new(false) };
    }

    type Handler = unsafe extern "C" fn();

    unsafe extern "C" {
        fn pthread_atfork(prepare: Option<Handler>, parent: Option<Handler>, child: Option<Handler>) -> c_int;
    }

    pub(super) fn watch() {
        static IS_WATCHED: AtomicBool = AtomicBool::new(false);
        if !IS_WATCHED.load(Ordering::Acquire) {
            // SAFETY: the handler stores numbers and touches nothing else. Threads that come here at the same time all
            // register it, and a fork that is counted twice is a fork.
            let is_registered = unsafe { pthread_atfork(None, None, Some(in_child)) } == 0;
            // Where there was no memory for it, the next call tries again.
            IS_WATCHED.store(is_registered, Ordering::Release);
        }
    }

    extern "C" fn in_child() {
        FORKS.fetch_add(1, Ordering::Relaxed);
        IS_ORPHAN.set(rayon::current_thread_index().is_some());
        crate::driver::spin_wait::forget();
    }
}

#[cfg(not(unix))]
pub(crate) fn watch() {}

#[cfg(not(unix))]
pub(crate) fn count() -> usize {
    0
}

#[cfg(not(unix))]
pub(crate) fn is_orphan() -> bool {
    false
}
