//! Ctrl-C: the first press ends a long command after the step it is in, so that what was finished is written down; the
//! second ends it at once.

use std::io::Write;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// From now on Ctrl-C is a request. Only commands that ask [`requested`] between two steps call this.
pub(crate) fn watch() {
    watch_and(|| {
        // The terminal shows where the line ends that Ctrl-C stands in.
        let _ = writeln!(
            std::io::stderr(),
            "\nflashcore: stopping after the current step; press Ctrl-C again to stop at once"
        );
    });
}

/// Watches without a message, for a process whose parent says it.
pub(crate) fn watch_quietly() {
    watch_and(|| {});
}

fn watch_and(announce: impl Fn() + Send + 'static) {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // Where no handler can be had, Ctrl-C ends the process as ever; files are written whole all the same.
        let _ = ctrlc::set_handler(move || {
            if REQUESTED.swap(true, Ordering::Relaxed) {
                std::process::exit(130);
            }
            announce();
        });
    });
}

/// True once somebody has pressed Ctrl-C.
pub(crate) fn requested() -> bool {
    REQUESTED.load(Ordering::Relaxed)
}

/// Summary of the steps that Ctrl-C left out: `, 201 not run: interrupted`; empty if none was.
pub(crate) fn left_out(done: usize, of: usize) -> String {
    if requested() && done < of { format!(", {} not run: interrupted", of - done) } else { String::new() }
}
