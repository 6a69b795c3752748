//! Standard output and standard error: tables, lines, progress, complaints.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use flashcore_bench::util::printable::{printable, printable_lines};

use crate::colour;
use crate::table::Look;
pub(crate) use crate::table::{
    Cell, Column, Format, PROBLEM, Table, broken, column, field, problem_cells, recorded_cells,
};

/// Standard output and standard error, of all threads of a command.
pub(crate) struct Output {
    out: io::Stdout,
    error: io::Stderr,
    last_progress: Mutex<Option<Instant>>,
    transient: bool,
    look: Look,
    /// Whoever read standard output has gone.
    is_closed: AtomicBool,
}

/// Characters of a line: what `COLUMNS` says, or the terminal; no limit where neither does.
pub(crate) fn terminal_width() -> Option<usize> {
    let out = io::stdout();
    let said = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok()).filter(|columns| *columns > 0);
    let terminal = || terminal_size::terminal_size_of(&out).map(|(width, _)| usize::from(width.0));
    said.or_else(|| out.is_terminal().then(terminal).flatten())
}

impl Output {
    pub(crate) fn new() -> Self {
        let error = io::stderr();
        let transient = error.is_terminal();
        let out = io::stdout();
        let look = Look { width: terminal_width(), is_coloured: colour::is_wanted(&out) };
        Self { out, error, last_progress: Mutex::new(None), transient, look, is_closed: AtomicBool::new(false) }
    }

    /// Writes a line to standard output.
    pub(crate) fn line(&self, text: impl AsRef<str>) -> io::Result<()> {
        self.clear_progress();
        self.write(&format!("{}\n", printable_lines(text.as_ref())))
    }

    /// Writes to standard output, while there is somebody who reads it. When there is not, that is no error, and what
    /// the command finds is still its verdict: `flashcore verify | head` fails where `flashcore verify` does.
    fn write(&self, text: &str) -> io::Result<()> {
        if self.is_closed.load(Ordering::Relaxed) {
            return Ok(());
        }
        match (&self.out).write_all(text.as_bytes()).and_then(|()| (&self.out).flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                self.is_closed.store(true, Ordering::Relaxed);
                Ok(())
            }
            written => written,
        }
    }

    /// Writes a sentence for people, broken between words where the terminal is narrow.
    pub(crate) fn sentence(&self, text: impl AsRef<str>) -> io::Result<()> {
        let text = self.fitted(text.as_ref());
        self.line(text)
    }

    /// Prints a line with its verdict in colour, if the terminal has colours.
    pub(crate) fn verdict(&self, text: impl AsRef<str>) -> io::Result<()> {
        let text = self.fitted(text.as_ref());
        if !self.look.is_coloured {
            return self.line(text);
        }
        self.clear_progress();
        // The codes of the colour are the only ones that the terminal gets.
        self.write(&format!("{}\n", colour::painted(&printable_lines(&text))))
    }

    /// A sentence in lines that fit the terminal; a line break before it stays.
    fn fitted(&self, text: &str) -> String {
        let Some(width) = self.look.width else { return text.to_owned() };
        let sentence = text.trim_start_matches('\n');
        "\n".repeat(text.len() - sentence.len()) + &broken(sentence, width).join("\n")
    }

    /// Says how far a long command is: in place on a terminal, a line now and then elsewhere.
    pub(crate) fn progress(&self, done: usize, of: usize, what: &str) {
        const EVERY: Duration = Duration::from_secs(10);
        let mut last_progress = self.last_progress();
        let due = match *last_progress {
            None => self.transient,
            Some(last) => last.elapsed() >= if self.transient { Duration::from_millis(50) } else { EVERY },
        };
        if !due {
            last_progress.get_or_insert_with(Instant::now);
            return;
        }
        *last_progress = Some(Instant::now());
        // Progress that cannot be shown is no reason to stop.
        let _ = if self.transient {
            let line: String = format!("{done}/{of} {}", printable(what)).chars().take(100).collect();
            write!(&self.error, "\r\x1b[2K{line}").and_then(|()| (&self.error).flush())
        } else {
            writeln!(&self.error, "{done}/{of} {}", printable(what))
        };
    }

    fn last_progress(&self) -> MutexGuard<'_, Option<Instant>> {
        self.last_progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn clear_progress(&self) {
        if self.transient && self.last_progress().is_some() {
            let _ = write!(&self.error, "\r\x1b[2K");
        }
    }

    /// Says what is being done, beside the results.
    pub(crate) fn note(&self, message: &str) {
        self.clear_progress();
        let _ = writeln!(&self.error, "{}", printable_lines(message));
    }

    /// Says what went wrong.
    pub(crate) fn complain(&self, message: &str) {
        self.clear_progress();
        let _ = writeln!(&self.error, "flashcore: {}", printable_lines(message));
    }

    /// Writes a table.
    pub(crate) fn table(&self, table: &Table, format: Format) -> io::Result<()> {
        self.clear_progress();
        self.write(&table.render(format, self.look))
    }
}
