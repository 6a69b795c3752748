//! Ctrl-C: the first press ends a long command within a second, with all that was finished written down; the second ends
//! it at once.

use std::io::{self, Read, Write};
use std::process::{Child, Output};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, MutexGuard, Once, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::output::Output as Streams;
use crate::{Ending, Failure};

/// Time that the step in which a command is has to end by itself after Ctrl-C.
const GRACE: Duration = Duration::from_millis(400);
/// Time between two looks at the clock.
const LOOK: Duration = Duration::from_millis(50);

static REQUESTED: OnceLock<Instant> = OnceLock::new();

/// From now on Ctrl-C is a request. Only commands that ask [`requested`] between two steps call this.
pub(crate) fn watch() {
    watch_and(|| {
        // The terminal shows where the line ends that Ctrl-C stands in.
        let _ = writeln!(
            io::stderr(),
            "\nflashcore: stopping, and writing down what is finished; press Ctrl-C again to stop at once"
        );
    });
}

/// Watches without a message, for a process whose parent says it.
pub(crate) fn watch_quietly() {
    watch_and(|| {});
}

/// Ends the process soon after Ctrl-C, for one that has nothing to write down: its parent, which got the signal too, does not
/// take it for one that failed.
pub(crate) fn end_soon() {
    watch_and(|| {
        thread::sleep(GRACE);
        std::process::exit(130);
    });
}

fn watch_and(announce: impl Fn() + Send + 'static) {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // Where no handler can be had, Ctrl-C ends the process as ever; files are written whole all the same.
        let _ = ctrlc::set_handler(move || {
            if REQUESTED.set(Instant::now()).is_err() {
                std::process::exit(130);
            }
            announce();
        });
    });
}

/// True once somebody has pressed Ctrl-C.
pub(crate) fn requested() -> bool {
    REQUESTED.get().is_some()
}

/// Does the `work` of a command in a thread, and finishes with what came of it: tables and records. Where the work goes on
/// for more than a moment after Ctrl-C, it is abandoned in the middle of its step: `finish` gets nothing, finds what the
/// work had put aside, and the process ends.
pub(crate) fn abandonable<T: Send>(
    output: &Streams,
    work: impl FnOnce() -> Result<T, Failure> + Send,
    finish: impl FnOnce(Option<T>) -> Result<Ending, Failure>,
) -> Result<Ending, Failure> {
    let worked = thread::scope(|scope| {
        let (sender, receiver) = channel();
        let worker = thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, move || {
            let _ = sender.send(work());
        })?;
        loop {
            match receiver.recv_timeout(LOOK) {
                Ok(worked) => return worked.map(|worked| (Some(worked), finish)),
                Err(RecvTimeoutError::Timeout) if REQUESTED.get().is_none_or(|since| since.elapsed() < GRACE) => {}
                Err(RecvTimeoutError::Timeout) => {
                    if let Err(Failure::Usage(said) | Failure::Environment(said)) = finish(None) {
                        output.complain(&said);
                    }
                    // Not out of this scope, which would wait for the work.
                    std::process::exit(130);
                }
                Err(RecvTimeoutError::Disconnected) => match worker.join() {
                    Err(panic) => std::panic::resume_unwind(panic),
                    Ok(()) => {
                        return Err(Failure::Environment("the work of this command ended without a result".to_owned()));
                    }
                },
            }
        }
    });
    let (worked, finish) = worked?;
    finish(worked)
}

/// Waits for a child and gives what it said. After Ctrl-C, which reaches it too, a child that goes on is ended.
pub(crate) fn output_of(mut child: Child) -> io::Result<Output> {
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    thread::scope(|scope| {
        let stdout = scope.spawn(|| all_of(stdout));
        let stderr = scope.spawn(|| all_of(stderr));
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if REQUESTED.get().is_some_and(|since| since.elapsed() > GRACE / 2) {
                // It may have ended by itself meanwhile; then there is nothing to end.
                let _ = child.kill();
            }
            thread::sleep(LOOK / 2);
        };
        let bytes = |reader: thread::ScopedJoinHandle<'_, Vec<u8>>| reader.join().unwrap_or_default();
        Ok(Output { status, stdout: bytes(stdout), stderr: bytes(stderr) })
    })
}

/// Reads a pipe to its end.
fn all_of(pipe: Option<impl Read>) -> Vec<u8> {
    let mut bytes = Vec::new();
    // What was said before a pipe broke is all that there is.
    let _ = pipe.map(|mut pipe| pipe.read_to_end(&mut bytes));
    bytes
}

/// The stack of a main thread, which the work would have had.
const STACK_BYTES: usize = 8 << 20;

/// Access to the steps that a command has finished. A panic in one of them has ended the command already.
pub(crate) fn aside<T>(kept: &Mutex<T>) -> MutexGuard<'_, T> {
    kept.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Summary of the steps that Ctrl-C left out: `, 201 not run: interrupted`; empty if none was.
pub(crate) fn left_out(done: usize, of: usize) -> String {
    if requested() && done < of { format!(", {} not run: interrupted", of - done) } else { String::new() }
}
