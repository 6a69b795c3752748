//! Ctrl-C: the first press ends a long command after what it is doing, so that what was finished is written down; the
//! second ends it at once.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// From now on Ctrl-C is a request. Only commands that ask [`requested`] between two things they do call this.
pub(crate) fn watch() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // Where no handler can be had, Ctrl-C ends the process as ever; files are written whole all the same.
        let _ = ctrlc::set_handler(|| {
            if REQUESTED.swap(true, Ordering::Relaxed) {
                std::process::exit(130);
            }
        });
    });
}

/// Whether somebody pressed Ctrl-C.
pub(crate) fn requested() -> bool {
    REQUESTED.load(Ordering::Relaxed)
}
