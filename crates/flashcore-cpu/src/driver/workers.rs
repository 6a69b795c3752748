//! Worker threads: those of rayon's current pool, of its global pool, or of a pool of this process.
//!
//! * On a thread of a rayon pool: that pool.
//! * Elsewhere: rayon's global pool, which is made here unless the program has made it.
//! * In the child of a fork, where the threads of all earlier pools are gone: a pool that is made anew. The dead one is
//!   leaked: its threads cannot be waited for. A thread that was of a pool when it forked computes alone.
//! * Where no threads can be made: the calling thread, until they can be.

use crate::driver::fork;
use rayon::{ThreadBuilder, ThreadPool, ThreadPoolBuilder};
use std::num::NonZero;
use std::panic::catch_unwind;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{SystemTime, UNIX_EPOCH};
use std::{env, io, thread};

/// Milliseconds until threads are tried again where none could be made.
const RETRY_AFTER: u64 = 100;

/// Threads to compute on.
#[derive(Clone, Copy)]
pub(crate) enum Workers {
    /// The calling thread alone.
    Alone,
    /// The pool that the calling thread is of.
    Current,
    /// Rayon's global pool, of which the calling thread is not.
    Global,
    /// A pool of this process, of which the calling thread is not.
    Own(&'static ThreadPool),
}

impl Workers {
    /// Returns the threads for a call from this thread.
    pub(crate) fn find() -> Self {
        fork::watch();
        if rayon::current_thread_index().is_some() {
            return if fork::is_orphan() { Self::Alone } else { Self::Current };
        }
        match (fork::count(), GLOBAL.load(Ordering::Acquire)) {
            (0, READY) => Self::Global,
            (0, UNKNOWN) => make_global(),
            (forks, _) => own(forks),
        }
    }

    /// Number of threads that compute, the calling one included.
    pub(crate) fn count(self) -> usize {
        match self {
            Self::Alone => 1,
            Self::Current | Self::Global => rayon::current_num_threads(),
            Self::Own(pool) => pool.current_num_threads(),
        }
    }

    /// Runs `work` on one of the threads, at some time.
    pub(crate) fn spawn(self, work: impl FnOnce() + Send + 'static) {
        match self {
            Self::Alone => work(),
            Self::Current | Self::Global => rayon::spawn(work),
            Self::Own(pool) => pool.spawn(work),
        }
    }
}

/// Nothing is known of the global pool.
const UNKNOWN: u8 = 0;
/// The global pool has its threads.
const READY: u8 = 1;
/// An attempt to make the global pool failed, after which rayon panics when it is used.
const BROKEN: u8 = 2;

/// The global pool of the process that loaded this library, not of its children.
static GLOBAL: AtomicU8 = AtomicU8::new(UNKNOWN);

/// Makes the global pool unless it exists.
///
/// Rayon tries that once in a process, and where a thread cannot be made, never again. So the threads are made first.
fn make_global() -> Workers {
    if !is_retried() {
        return Workers::Alone;
    }
    let count = thread_count();
    let Ok(mut waiting) = waiting_threads(count) else {
        postpone();
        return Workers::Alone;
    };
    let hand_over = move |worker: ThreadBuilder| {
        let thread = waiting.pop().ok_or(io::ErrorKind::WouldBlock)?;
        thread.send(worker).map_err(|_| io::ErrorKind::BrokenPipe.into())
    };
    let made = ThreadPoolBuilder::new().num_threads(count).spawn_handler(hand_over).build_global();
    // An error says that there is one, or that an attempt to make it failed.
    let is_ready = made.is_ok() || catch_unwind(rayon::current_num_threads).is_ok();
    GLOBAL.store(if is_ready { READY } else { BROKEN }, Ordering::Release);
    if is_ready { Workers::Global } else { own(0) }
}

/// Threads that wait to be told what to run, and end if they are told nothing.
fn waiting_threads(count: usize) -> io::Result<Vec<SyncSender<ThreadBuilder>>> {
    (0..count)
        .map(|_| {
            let (sender, receiver) = sync_channel::<ThreadBuilder>(1);
            let run = move || {
                if let Ok(worker) = receiver.recv() {
                    worker.run();
                }
            };
            thread::Builder::new().spawn(run).map(|_| sender)
        })
        .collect()
}

/// The threads that rayon would make: those that `RAYON_NUM_THREADS` names, or one for each processor.
fn thread_count() -> usize {
    let named = env::var("RAYON_NUM_THREADS").ok().and_then(|count| count.parse().ok()).filter(|&count| count > 0);
    let count = named.unwrap_or_else(|| thread::available_parallelism().map_or(1, NonZero::get));
    count.min(rayon::max_num_threads())
}

/// A pool of one process.
struct Pool {
    /// Number of forks before that process.
    forks: usize,
    threads: ThreadPool,
}

/// The pool of this process that is none of rayon's, or that of the process that it was forked from.
static OWN: AtomicPtr<Pool> = AtomicPtr::new(ptr::null_mut());

/// The pool of this process, which has so many forks before it.
fn own(forks: usize) -> Workers {
    let known = OWN.load(Ordering::Acquire);
    // SAFETY: what is stored here is from a box that is never freed.
    if let Some(pool) = unsafe { known.as_ref() }.filter(|pool| pool.forks == forks) {
        return Workers::Own(&pool.threads);
    }
    if !is_retried() {
        return Workers::Alone;
    }
    let Ok(threads) = ThreadPoolBuilder::new().build() else {
        postpone();
        return Workers::Alone;
    };
    let made = Box::into_raw(Box::new(Pool { forks, threads }));
    let pool = match OWN.compare_exchange(known, made, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => made,
        Err(first) => {
            // SAFETY: it is from a box, and nobody else has seen it.
            drop(unsafe { Box::from_raw(made) });
            first
        }
    };
    // SAFETY: it is from a box that is never freed once it is here; another thread of this process stored it, if not this.
    Workers::Own(unsafe { &(*pool).threads })
}

/// Time at which threads are tried again, in milliseconds of the system's clock.
static RETRY: AtomicU64 = AtomicU64::new(0);

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// True if it is time to make threads. A clock that was set back does not put it off for longer.
fn is_retried() -> bool {
    let (retry, now) = (RETRY.load(Ordering::Relaxed), now());
    now >= retry || retry - now > RETRY_AFTER
}

fn postpone() {
    RETRY.store(now() + RETRY_AFTER, Ordering::Relaxed);
}
