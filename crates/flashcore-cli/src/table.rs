//! Tables: aligned columns that fit the terminal, Markdown, JSON and CSV.
//!
//! A column has a heading for people and a key for programs, which is `snake_case` and ends in its unit. Where a table is
//! wider than the terminal, long texts and headings are broken between words, and columns that few people need are left
//! out and named below the table; the formats for programs have all of them.

use clap::ValueEnum;
use flashcore_bench::lab::record::ProblemKey;
use flashcore_bench::testkit::{mask_text, shape_text};
use flashcore_bench::util::printable::{printable, printable_json};
use flashcore_problem::Problem;
use serde_json::{Map, Value};

use crate::colour::verdict_colour;

/// Format of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum Format {
    /// Aligned columns that fit the terminal
    #[default]
    Table,
    /// A Markdown table
    Markdown,
    /// A JSON array of objects
    Json,
    /// Comma-separated values with a header of keys
    Csv,
}

/// A column of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Column {
    heading: &'static str,
    key: &'static str,
    rank: Rank,
    is_verdict: bool,
}

/// Which columns a narrow terminal does without.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rank {
    /// Left out only where nothing else helps.
    Usual,
    /// Left out first.
    Minor,
    /// In the formats for programs alone.
    Programs,
}

/// A column with a heading for people and a key for programs.
pub(crate) const fn column(heading: &'static str, key: &'static str) -> Column {
    Column { heading, key, rank: Rank::Usual, is_verdict: false }
}

/// A column that only programs see.
pub(crate) const fn field(key: &'static str) -> Column {
    Column { heading: key, key, rank: Rank::Programs, is_verdict: false }
}

impl Column {
    /// A column that is left out where the terminal is narrow.
    pub(crate) const fn minor(self) -> Self {
        Self { rank: Rank::Minor, ..self }
    }

    /// A column of verdicts, in colour.
    pub(crate) const fn verdict(self) -> Self {
        Self { is_verdict: true, ..self }
    }

    /// A column for programs alone.
    pub(crate) const fn for_programs(self) -> Self {
        Self { rank: Rank::Programs, ..self }
    }

    const fn is_for_people(&self) -> bool {
        !matches!(self.rank, Rank::Programs)
    }
}

/// A problem: as one text for people, with its numbers for programs.
pub(crate) const PROBLEM: [Column; 10] = [
    column("shape", "shape"),
    column("dtype", "dtype"),
    column("mask", "mask"),
    field("batch"),
    field("query_heads"),
    field("key_heads"),
    field("query_length"),
    field("key_length"),
    field("head_dim"),
    field("value_dim"),
];

/// The cells of the columns [`PROBLEM`].
pub(crate) fn problem_cells(problem: &Problem) -> Vec<Cell> {
    let texts = [shape_text(problem), problem.dtypes().to_string(), mask_text(problem.mask)].map(Cell::from);
    texts.into_iter().chain(numbers(Some(problem))).collect()
}

/// The cells of the columns [`PROBLEM`] for a problem of a record.
pub(crate) fn recorded_cells(key: &ProblemKey) -> Vec<Cell> {
    let texts = [&key.shape, &key.dtype, &key.mask].map(|text| Cell::from(text.as_str()));
    texts.into_iter().chain(numbers(key.problem().ok().as_ref())).collect()
}

fn numbers(problem: Option<&Problem>) -> [Cell; 7] {
    let parts = problem.map(|problem| {
        let Problem { batch, query_heads, key_heads, query_length, key_length, head_dim, value_dim, .. } = problem;
        [batch, query_heads, key_heads, query_length, key_length, head_dim, value_dim].map(|part| Cell::from(*part))
    });
    parts.unwrap_or_else(|| std::array::from_fn(|_| Cell::none()))
}

/// Rows of cells under headings.
#[derive(Debug, Clone)]
pub(crate) struct Table {
    columns: Vec<Column>,
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

impl From<u64> for Cell {
    fn from(number: u64) -> Self {
        Self { text: number.to_string(), value: Value::from(number) }
    }
}

impl From<usize> for Cell {
    fn from(number: usize) -> Self {
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

    /// A number, shown with some decimals, and with more where it would have fewer than two digits.
    pub(crate) fn precise(number: f64, decimals: usize) -> Self {
        const MOST: usize = 9;
        let needed = if number == 0.0 || !number.is_finite() { 0 } else { 1 - number.abs().log10().floor() as i64 };
        Self::number(number, decimals.max(usize::try_from(needed).unwrap_or(0).min(MOST)))
    }

    /// A number that may be missing.
    pub(crate) fn figure(number: Option<f64>, decimals: usize) -> Self {
        number.map_or_else(Self::none, |number| Self::number(number, decimals))
    }

    /// A number of any size that may be missing, shown with three digits.
    pub(crate) fn scientific(number: Option<f64>) -> Self {
        number.map_or_else(Self::none, |number| Self { text: format!("{number:.2e}"), value: Value::from(number) })
    }

    /// A count that may be missing.
    pub(crate) fn count(number: Option<impl Into<Self>>) -> Self {
        number.map_or_else(Self::none, Into::into)
    }

    /// Nothing is known.
    pub(crate) fn none() -> Self {
        Self { text: "-".to_owned(), value: Value::Null }
    }

    fn width(&self) -> usize {
        self.text.chars().count()
    }

    fn is_numeric(&self) -> bool {
        self.value.is_number() || self.value.is_null()
    }
}

/// Width and colours of a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Look {
    /// Characters of a line; no limit where nobody says so.
    pub(crate) width: Option<usize>,
    /// Verdicts are coloured.
    pub(crate) is_coloured: bool,
}

/// Blanks between two columns.
const GAP: usize = 2;
/// A column of text is not broken to less than this while others can be left out.
const COMFORTABLE: usize = 24;

impl Table {
    pub(crate) fn new(columns: &[Column]) -> Self {
        Self { columns: columns.to_vec(), rows: Vec::new() }
    }

    pub(crate) fn push(&mut self, row: Vec<Cell>) {
        debug_assert_eq!(row.len(), self.columns.len(), "a cell for each column");
        self.rows.push(row);
    }

    /// Adds the rows of a table of the same columns.
    pub(crate) fn append(&mut self, other: Self) {
        debug_assert_eq!(other.columns, self.columns, "the same columns");
        self.rows.extend(other.rows);
    }

    pub(crate) fn render(&self, format: Format, look: Look) -> String {
        match format {
            Format::Table => self.aligned(look),
            Format::Markdown => self.markdown(),
            Format::Json => self.json(),
            Format::Csv => self.csv(),
        }
    }

    /// The columns that people see.
    fn for_people(&self) -> impl Iterator<Item = (usize, &Column)> {
        self.columns.iter().enumerate().filter(|(_, column)| column.is_for_people())
    }

    fn aligned(&self, look: Look) -> String {
        let Fitted { columns, left_out } = self.fitted(look.width);
        let line = |texts: Vec<(&str, bool)>| {
            let broken: Vec<Vec<String>> =
                texts.iter().zip(&columns).map(|((text, _), column)| broken(text, column.width)).collect();
            let height = broken.iter().map(Vec::len).max().unwrap_or(0);
            let mut lines = String::new();
            for row in 0..height {
                let padded = columns.iter().enumerate().map(|(index, Shown { width, is_numeric, column, .. })| {
                    let text = broken[index].get(row).map_or("", String::as_str);
                    let padded = if *is_numeric { format!("{text:>width$}") } else { format!("{text:<width$}") };
                    let (whole, is_cell) = texts[index];
                    let is_verdict = look.is_coloured && column.is_verdict && is_cell;
                    match verdict_colour(whole).filter(|_| is_verdict) {
                        Some(colour) => padded.replacen(text, &colour.paint(text), 1),
                        None => padded,
                    }
                });
                lines += padded.collect::<Vec<_>>().join("  ").trim_end();
                lines.push('\n');
            }
            lines
        };
        let mut text = line(columns.iter().map(|shown| (shown.column.heading, false)).collect());
        for row in &self.rows {
            text += &line(columns.iter().map(|shown| (row[shown.index].text.as_str(), true)).collect());
        }
        if !left_out.is_empty() {
            let note = format!(
                "not shown in {} columns: {}; a wider terminal or --format json shows all",
                look.width.unwrap_or_default(),
                left_out.join(", ")
            );
            text += &broken(&note, look.width.unwrap_or(usize::MAX)).join("\n");
            text.push('\n');
        }
        text
    }

    /// The columns that fit a width, and how wide each is.
    fn fitted(&self, limit: Option<usize>) -> Fitted<'_> {
        let mut measured: Vec<Measured<'_>> =
            self.for_people().map(|(index, column)| self.measured(index, column)).collect();
        let total = |columns: &[Measured<'_>], width: fn(&Measured<'_>) -> usize| {
            columns.iter().map(width).sum::<usize>() + GAP * columns.len().saturating_sub(1)
        };
        let limit = limit.unwrap_or(usize::MAX);
        let mut left_out: Vec<(usize, &'static str)> = Vec::new();
        if total(&measured, |column| column.natural) > limit {
            let mut leave_out = |measured: &mut Vec<Measured<'_>>, width: fn(&Measured<'_>) -> usize, rank: Rank| {
                while total(measured, width) > limit {
                    // The first column says what a row is about, a verdict what came of it.
                    let candidate = |(index, column): &(usize, &Measured<'_>)| {
                        *index > 0 && column.column.rank == rank && !column.column.is_verdict
                    };
                    let Some((last, _)) = measured.iter().enumerate().rev().find(candidate) else { break };
                    let column = measured.remove(last);
                    left_out.push((column.index, column.column.heading));
                }
            };
            leave_out(&mut measured, |column| column.comfortable, Rank::Minor);
            if total(&measured, |column| column.comfortable) > limit {
                for column in &mut measured {
                    column.comfortable = column.least;
                }
                leave_out(&mut measured, |column| column.least, Rank::Usual);
            }
        }
        let is_broken = total(&measured, |column| column.natural) > limit;
        let mut spare = limit.saturating_sub(total(&measured, |column| column.comfortable));
        let mut widths: Vec<usize> =
            measured.iter().map(|column| if is_broken { column.comfortable } else { column.natural }).collect();
        while is_broken && spare > 0 {
            let before = spare;
            for (width, column) in widths.iter_mut().zip(&measured) {
                if *width < column.natural && spare > 0 {
                    *width += 1;
                    spare -= 1;
                }
            }
            if spare == before {
                break;
            }
        }
        let columns = measured.into_iter().zip(widths);
        let columns = columns.map(|(Measured { index, column, is_numeric, .. }, width)| Shown {
            index,
            column,
            width,
            is_numeric,
        });
        left_out.sort_unstable();
        Fitted { columns: columns.collect(), left_out: left_out.into_iter().map(|(_, heading)| heading).collect() }
    }

    fn measured<'a>(&'a self, index: usize, column: &'a Column) -> Measured<'a> {
        let cells = || self.rows.iter().filter_map(|row| row.get(index));
        // A column of numbers is read by its last digits.
        let is_numeric = cells().all(Cell::is_numeric);
        let widest = cells().map(Cell::width).max().unwrap_or(0);
        let natural = widest.max(column.heading.chars().count());
        let longest_word = cells().map(|cell| longest_word(&cell.text)).max().unwrap_or(0);
        let least = if is_numeric { widest } else { longest_word }.max(longest_word_of_heading(column));
        let comfortable = if is_numeric { least } else { least.max(natural.min(COMFORTABLE)) };
        Measured { index, column, is_numeric, natural, comfortable, least }
    }

    fn markdown(&self) -> String {
        let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
        let headings: Vec<String> = self.for_people().map(|(_, column)| column.heading.to_owned()).collect();
        let rule = headings.iter().map(|_| "---".to_owned()).collect();
        let mut text = line(headings) + &line(rule);
        for row in &self.rows {
            // A bar in a cell would end it.
            text += &line(self.for_people().map(|(index, _)| row[index].text.replace('|', "\\|")).collect());
        }
        text
    }

    fn json(&self) -> String {
        let rows = self.rows.iter().map(|row| {
            let pairs = self.columns.iter().zip(row).map(|(column, cell)| (column.key.to_owned(), cell.value.clone()));
            Value::Object(pairs.collect::<Map<_, _>>())
        });
        printable_json(&format!("{:#}\n", Value::Array(rows.collect()))).into_owned()
    }

    fn csv(&self) -> String {
        let field = |text: &str| {
            if text.contains([',', '"', '\n', '\r']) {
                format!("\"{}\"", text.replace('"', "\"\""))
            } else {
                text.to_owned()
            }
        };
        let line = |cells: Vec<&str>| cells.into_iter().map(field).collect::<Vec<_>>().join(",") + "\n";
        let mut text = line(self.columns.iter().map(|column| column.key).collect());
        for row in &self.rows {
            // What is not known is an empty field.
            text += &line(row.iter().map(|cell| if cell.value.is_null() { "" } else { cell.text.as_str() }).collect());
        }
        text
    }
}

/// A column and the widths it can have.
struct Measured<'a> {
    index: usize,
    column: &'a Column,
    is_numeric: bool,
    /// Nothing is broken.
    natural: usize,
    /// Long texts are broken, and read well.
    comfortable: usize,
    /// No word is broken.
    least: usize,
}

/// A column and the width it has.
struct Shown<'a> {
    index: usize,
    column: &'a Column,
    width: usize,
    is_numeric: bool,
}

/// The part of a table that is shown, and the headings of the rest.
struct Fitted<'a> {
    columns: Vec<Shown<'a>>,
    left_out: Vec<&'static str>,
}

fn longest_word(text: &str) -> usize {
    text.split_whitespace().map(|word| word.chars().count()).max().unwrap_or(0)
}

fn longest_word_of_heading(column: &Column) -> usize {
    longest_word(column.heading)
}

/// The lines of a text, broken between words where it is longer than a line.
pub(crate) fn broken(text: &str, width: usize) -> Vec<String> {
    if text.chars().count() <= width && !text.contains('\n') {
        return vec![text.to_owned()];
    }
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let last = lines.len() - 1;
        let length = lines[last].chars().count();
        if length > 0 && length + 1 + word.chars().count() > width {
            lines.push(word.to_owned());
        } else {
            if length > 0 {
                lines[last].push(' ');
            }
            lines[last].push_str(word);
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::new(&[column("name", "name"), column("time us", "time_us"), field("runs")]);
        table.push(vec![Cell::from("a, b"), Cell::number(12.345, 1), Cell::from(3usize)]);
        table.push(vec![Cell::from("c"), Cell::none(), Cell::from(40usize)]);
        table
    }

    #[test]
    fn a_table_has_four_forms() {
        let check = |format, expected: &str| assert_eq!(table().render(format, Look::default()), expected);
        check(Format::Table, "name  time us\na, b     12.3\nc           -\n");
        check(Format::Markdown, "| name | time us |\n| --- | --- |\n| a, b | 12.3 |\n| c | - |\n");
        check(Format::Csv, "name,time_us,runs\n\"a, b\",12.3,3\nc,,40\n");
        let json: Value = serde_json::from_str(&table().render(Format::Json, Look::default())).expect("JSON");
        assert_eq!(
            json,
            serde_json::json!([
                {"name": "a, b", "time_us": 12.345, "runs": 3}, {"name": "c", "time_us": null, "runs": 40}
            ])
        );
    }

    fn wide() -> Table {
        let mut table = Table::new(&[
            column("problem", "problem"),
            column("verdict", "verdict").verdict(),
            column("shared transactions per request", "transactions_per_request").minor(),
            column("p50 us", "p50_us"),
            column("said", "said"),
        ]);
        table.push(vec![
            Cell::from("1x8x512x64"),
            Cell::from("passed"),
            Cell::number(1.5, 2),
            Cell::number(4.25, 2),
            Cell::from("nothing of note happened here today at all"),
        ]);
        table
    }

    #[test]
    fn a_table_fits_the_terminal() {
        let check = |width: Option<usize>, expected: &str| {
            let text = wide().render(Format::Table, Look { width, is_coloured: false });
            assert_eq!(text, expected);
            let widest = text.lines().map(|line| line.chars().count()).max().unwrap_or(0);
            assert!(width.is_none_or(|width| widest <= width), "{widest} of {width:?}:\n{text}");
        };
        let full = "\
problem     verdict  shared transactions per request  p50 us  said
1x8x512x64  passed                              1.50    4.25  nothing of note happened here today at all
";
        check(None, full);
        check(Some(120), full);
        // Headings and long texts are broken between words.
        check(
            Some(70),
            "\
problem     verdict          shared  p50 us  said
                       transactions
                        per request
1x8x512x64  passed             1.50    4.25  nothing of note happened
                                             here today at all
",
        );
        // What few people need is left out, and named.
        check(
            Some(56),
            "\
problem     verdict  p50 us  said
1x8x512x64  passed     4.25  nothing of note happened
                             here today at all
not shown in 56 columns: shared transactions per
request; a wider terminal or --format json shows all
",
        );
        check(
            Some(30),
            "\
problem     verdict  p50 us
1x8x512x64  passed     4.25
not shown in 30 columns:
shared transactions per
request, said; a wider
terminal or --format json
shows all
",
        );
    }

    #[test]
    fn a_verdict_has_a_colour_on_a_terminal() {
        let mut table = Table::new(&[column("verdict", "verdict").verdict(), column("name", "name")]);
        for verdict in ["passed", "FAILED", "AMBIGUOUS", "else"] {
            table.push(vec![Cell::from(verdict), Cell::from("FAILED")]);
        }
        let text = table.render(Format::Table, Look { width: None, is_coloured: true });
        let expected = "verdict    name\n\
                        \x1b[32mpassed\x1b[0m     FAILED\n\
                        \x1b[31mFAILED\x1b[0m     FAILED\n\
                        \x1b[33mAMBIGUOUS\x1b[0m  FAILED\n\
                        else       FAILED\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_tiny_number_keeps_two_digits() {
        let check = |number: f64, expected: &str| assert_eq!(Cell::precise(number, 2).text, expected);
        check(0.001_234, "0.0012");
        check(0.0, "0.00");
        check(0.56, "0.56");
        check(12.345, "12.35");
        check(3e-12, "0.000000000");
    }

    #[test]
    fn a_problem_has_its_numbers() {
        let key = ProblemKey { shape: "2x8/2x97,203x64".into(), dtype: "f16".into(), mask: "causal".into() };
        let mut table = Table::new(&PROBLEM);
        table.push(recorded_cells(&key));
        table.push(problem_cells(&key.problem().expect("a problem")));
        let json: Value = serde_json::from_str(&table.render(Format::Json, Look::default())).expect("JSON");
        let expected = serde_json::json!({
            "shape": "2x8/2x97,203x64", "dtype": "f16", "mask": "causal", "batch": 2, "query_heads": 8,
            "key_heads": 2, "query_length": 97, "key_length": 203, "head_dim": 64, "value_dim": 64,
        });
        assert_eq!(json, serde_json::json!([expected, expected]));
    }
}
