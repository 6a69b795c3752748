//! What people and programs read: tables in four formats, progress, complaints.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use flashcore_bench::printable::{printable, printable_json, printable_lines};
use serde_json::{Map, Value};

/// How a table is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum Format {
    /// Aligned columns.
    #[default]
    Table,
    /// A Markdown table.
    Markdown,
    /// A JSON array of objects.
    Json,
    /// Comma-separated values with a header.
    Csv,
}

/// Standard output and standard error.
pub(crate) struct Output {
    out: io::Stdout,
    error: io::Stderr,
    last_progress: Option<Instant>,
    transient: bool,
    /// Whoever read standard output has gone.
    is_closed: bool,
}

impl Output {
    pub(crate) fn new() -> Self {
        let error = io::stderr();
        let transient = error.is_terminal();
        Self { out: io::stdout(), error, last_progress: None, transient, is_closed: false }
    }

    /// Writes a line to standard output.
    pub(crate) fn line(&mut self, text: impl AsRef<str>) -> io::Result<()> {
        self.clear_progress();
        self.write(&format!("{}\n", printable_lines(text.as_ref())))
    }

    /// Writes to standard output, while there is somebody who reads it. When there is not, that is no error, and what
    /// the command finds is still its verdict: `flashcore verify | head` fails where `flashcore verify` does.
    fn write(&mut self, text: &str) -> io::Result<()> {
        if self.is_closed {
            return Ok(());
        }
        match self.out.write_all(text.as_bytes()).and_then(|()| self.out.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                self.is_closed = true;
                Ok(())
            }
            written => written,
        }
    }

    /// Says how far a long command is: in place on a terminal, a line now and then elsewhere.
    pub(crate) fn progress(&mut self, done: usize, of: usize, what: &str) {
        const EVERY: Duration = Duration::from_secs(10);
        let due = match self.last_progress {
            None => self.transient,
            Some(last) => last.elapsed() >= if self.transient { Duration::from_millis(50) } else { EVERY },
        };
        if self.last_progress.is_none() {
            self.last_progress = Some(Instant::now());
        }
        if !due {
            return;
        }
        self.last_progress = Some(Instant::now());
        // Progress that cannot be shown is no reason to stop.
        let _ = if self.transient {
            let line: String = format!("{done}/{of} {}", printable(what)).chars().take(100).collect();
            write!(self.error, "\r\x1b[2K{line}").and_then(|()| self.error.flush())
        } else {
            writeln!(self.error, "{done}/{of} {}", printable(what))
        };
    }

    fn clear_progress(&mut self) {
        if self.transient && self.last_progress.is_some() {
            let _ = write!(self.error, "\r\x1b[2K");
        }
    }

    /// Says what is being done, beside the results.
    pub(crate) fn note(&mut self, message: &str) {
        self.clear_progress();
        let _ = writeln!(self.error, "{}", printable_lines(message));
    }

    /// Says what went wrong.
    pub(crate) fn complain(&mut self, message: &str) {
        self.clear_progress();
        let _ = writeln!(self.error, "flashcore: {}", printable_lines(message));
    }

    /// Writes a table.
    pub(crate) fn table(&mut self, table: &Table, format: Format) -> io::Result<()> {
        self.clear_progress();
        self.write(&table.render(format))
    }
}

/// Rows of cells under headings.
#[derive(Debug, Clone)]
pub(crate) struct Table {
    headings: Vec<&'static str>,
    rows: Vec<Vec<Cell>>,
}

/// A cell: what people read, one line of it, and what programs read.
#[derive(Debug, Clone)]
pub(crate) struct Cell {
    text: String,
    value: Value,
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        Self { text: printable(text).into_owned(), value: Value::from(text) }
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Self {
        Self::from(text.as_str())
    }
}

impl From<u32> for Cell {
    fn from(number: u32) -> Self {
        Self { text: number.to_string(), value: Value::from(number) }
    }
}

impl Cell {
    /// A number, shown with some decimals, or in few digits where it is too large for a column.
    pub(crate) fn number(number: f64, decimals: usize) -> Self {
        const WIDEST: f64 = 1e12;
        let is_wide = number.abs() >= WIDEST;
        let text = if is_wide { format!("{number:.3e}") } else { format!("{number:.decimals$}") };
        Self { text, value: Value::from(number) }
    }
}

impl Cell {
    /// A number that may be missing.
    pub(crate) fn figure(number: Option<f64>, decimals: usize) -> Self {
        number
            .map_or_else(|| Self { text: "-".to_owned(), value: Value::Null }, |number| Self::number(number, decimals))
    }
}

impl Table {
    pub(crate) fn new(headings: &[&'static str]) -> Self {
        Self { headings: headings.to_vec(), rows: Vec::new() }
    }

    pub(crate) fn push(&mut self, row: Vec<Cell>) {
        self.rows.push(row);
    }

    fn render(&self, format: Format) -> String {
        match format {
            Format::Table => self.aligned(),
            Format::Markdown => self.markdown(),
            Format::Json => self.json(),
            Format::Csv => self.csv(),
        }
    }

    fn aligned(&self) -> String {
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.text.chars().count());
            cells.chain([self.headings[column].chars().count()]).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.headings.len()).map(width).collect();
        // A column of numbers is read by its last digits.
        let numeric: Vec<bool> = (0..self.headings.len())
            .map(|column| {
                self.rows
                    .iter()
                    .filter_map(|row| row.get(column))
                    .all(|cell| cell.value.is_number() || cell.value.is_null())
            })
            .collect();
        let line = |cells: Vec<&str>| {
            let padded = cells.iter().enumerate().map(|(column, text)| {
                let width = widths[column];
                if numeric[column] { format!("{text:>width$}") } else { format!("{text:<width$}") }
            });
            padded.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
        };
        let mut text = line(self.headings.clone());
        for row in &self.rows {
            text += &line(row.iter().map(|cell| cell.text.as_str()).collect());
        }
        text
    }

    fn markdown(&self) -> String {
        let line = |cells: Vec<&str>| format!("| {} |\n", cells.join(" | "));
        let rule: Vec<&str> = self.headings.iter().map(|_| "---").collect();
        let mut text = line(self.headings.clone()) + &line(rule);
        for row in &self.rows {
            text += &line(row.iter().map(|cell| cell.text.as_str()).collect());
        }
        text
    }

    fn json(&self) -> String {
        let rows = self.rows.iter().map(|row| {
            let pairs = self.headings.iter().zip(row).map(|(heading, cell)| {
                let key: String = heading.chars().map(|c| if c.is_alphanumeric() { c } else { '_' }).collect();
                (key, cell.value.clone())
            });
            Value::Object(pairs.collect::<Map<_, _>>())
        });
        printable_json(&format!("{:#}\n", Value::Array(rows.collect()))).into_owned()
    }

    fn csv(&self) -> String {
        let field = |text: &str| {
            if text.contains([',', '"', '\n']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text.to_owned() }
        };
        let line = |cells: Vec<&str>| cells.into_iter().map(field).collect::<Vec<_>>().join(",") + "\n";
        let mut text = line(self.headings.clone());
        for row in &self.rows {
            text += &line(row.iter().map(|cell| cell.text.as_str()).collect());
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::new(&["name", "time us"]);
        table.push(vec![Cell::from("a, b"), Cell::number(12.345, 1)]);
        table.push(vec![Cell::from("c"), Cell::number(1.0, 1)]);
        table
    }

    #[test]
    fn a_table_has_four_forms() {
        let check = |format, expected: &str| assert_eq!(table().render(format), expected);
        check(Format::Table, "name  time us\na, b     12.3\nc         1.0\n");
        check(Format::Markdown, "| name | time us |\n| --- | --- |\n| a, b | 12.3 |\n| c | 1.0 |\n");
        check(Format::Csv, "name,time us\n\"a, b\",12.3\nc,1.0\n");
        let json: Value = serde_json::from_str(&table().render(Format::Json)).expect("JSON");
        assert_eq!(json, serde_json::json!([{"name": "a, b", "time_us": 12.345}, {"name": "c", "time_us": 1.0}]));
    }
}
