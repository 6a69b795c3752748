//! Tables of the report.

use core::fmt::Write;

use super::Sources;
use crate::lab::compare::Finding;
use crate::lab::svg::{escape, short};

/// Cells of fewer characters are not broken into lines.
const LONG_CELL: usize = 30;

/// A table of HTML.
pub(super) struct HtmlTable {
    text: String,
}

impl HtmlTable {
    pub(super) fn new(headings: &[&str]) -> Self {
        let cells: String = headings.iter().fold(String::new(), |mut text, heading| {
            let _ = write!(text, "<th>{}</th>", escape(heading));
            text
        });
        Self { text: format!("<div class=\"wide\"><table><thead><tr>{cells}</tr></thead><tbody>\n") }
    }

    /// A row; cells that begin with `!`, `+` or `~` are bad, good or faint.
    pub(super) fn row<S: AsRef<str>>(&mut self, cells: &[S]) {
        self.text += "<tr>";
        for cell in cells {
            let cell = cell.as_ref();
            let (class, cell) = match cell.split_at_checked(1) {
                Some(("!", rest)) => ("bad", rest),
                Some(("+", rest)) if !rest.starts_with(|letter: char| letter.is_ascii_digit()) => ("good", rest),
                Some(("~", rest)) => ("faint", rest),
                _ if cell.parse::<f64>().is_ok() => ("number", cell),
                _ if cell.chars().count() < LONG_CELL => ("short", cell),
                _ => ("long", cell),
            };
            let _ = write!(self.text, "<td class=\"{class}\">{}</td>", escape(cell));
        }
        self.text += "</tr>\n";
    }

    pub(super) fn html(mut self) -> String {
        self.text += "</tbody></table></div>\n";
        self.text
    }
}

/// The summary: is it right, how fast is it, is it faster.
pub(super) fn verdicts(sources: &Sources) -> String {
    let mut table = HtmlTable::new(&[
        "problem",
        "kernel",
        "verdict",
        "p50 us",
        "p90 us",
        "floor us",
        "efficiency %",
        "bound by",
        "machine",
    ]);
    for (_, record) in &sources.measurements {
        for row in &record.content.rows {
            let right = if row.verified.passed {
                "+verified".to_owned()
            } else {
                format!("!WRONG: {}", row.verified.complaints.join("; "))
            };
            let hot = row.hot();
            table.row(&[
                row.problem.to_string(),
                row.kernel.clone(),
                right,
                short(row.median() * 1e6),
                short(hot.quantile(0.9) * 1e6),
                short(row.floor_seconds * 1e6),
                row.efficiency_percent().map_or_else(|| "!below floor".to_owned(), short),
                row.bound.to_string(),
                record.origin.machine.device.clone(),
            ]);
        }
    }
    let measured = table.html();
    let mut table = HtmlTable::new(&["problem", "A", "B", "verdict", "change", "A/A", "rounds", "reason"]);
    for (_, record) in &sources.comparisons {
        for row in &record.content.rows {
            let conclusion = &row.conclusion;
            let mark = match conclusion.finding {
                Finding::Faster => "+",
                Finding::Slower | Finding::Rejected => "!",
                Finding::Ambiguous => "~",
                Finding::Same => "",
            };
            table.row(&[
                row.b.problem.to_string(),
                format!("{} ({})", record.content.a, row.a.kernel),
                format!("{} ({})", record.content.b, row.b.kernel),
                format!("{mark}{}", conclusion.finding),
                conclusion.difference.percent(),
                conclusion.control.percent(),
                conclusion.rounds.to_string(),
                conclusion.reason.clone(),
            ]);
        }
    }
    let compared = table.html();
    let mut text = String::new();
    if !sources.measurements.is_empty() {
        text += &measured;
    }
    if !sources.comparisons.is_empty() {
        text += &compared;
    }
    text
}

/// The leaders, and beside them what was tried.
pub(super) fn leaders(sources: &Sources) -> String {
    let mut text = String::new();
    if !sources.leaderboard.promotions.is_empty() {
        let mut table =
            HtmlTable::new(&["device", "problem", "kernel", "p50 us", "efficiency %", "change", "commit", "measured"]);
        for leader in sources.leaderboard.leaders() {
            table.row(&[
                leader.place.device.clone(),
                leader.place.problem.to_string(),
                leader.kernel.clone(),
                short(leader.median_seconds * 1e6),
                short(100.0 * leader.floor_seconds / leader.median_seconds),
                leader.gain.map_or_else(|| "first".to_owned(), |gain| gain.percent()),
                leader.build.short(),
                leader.measured.clone(),
            ]);
        }
        text += &table.html();
    }
    if !sources.experiments.is_empty() {
        text += "<h3>Experiments</h3>\n";
        let mut table =
            HtmlTable::new(&["experiment", "hypothesis", "predicted %", "measured %", "outcome", "conclusion"]);
        for (name, experiment) in &sources.experiments {
            let rows = experiment.measured.iter().flat_map(|measured| &measured.rows);
            let measured: Vec<_> = rows.collect();
            // One line: the best of them, and how far the others are from it.
            let best = measured.iter().min_by(|one, other| one.percent.total_cmp(&other.percent));
            let worst = measured.iter().map(|row| row.percent).fold(f64::NEG_INFINITY, f64::max);
            let measured = best.map_or_else(String::new, |best| {
                let others = match measured.len() {
                    1 => String::new(),
                    count => format!("; {count} problems from {:+.1} to {worst:+.1}", best.percent),
                };
                format!("{}: {:+.1} [{:+.1}, {:+.1}]{others}", best.problem, best.percent, best.low, best.high)
            });
            let mark = if experiment.outcome() == "confirmed" { "+" } else { "~" };
            table.row(&[
                name.clone(),
                experiment.hypothesis.clone(),
                format!("{:+}", experiment.predicted_percent),
                measured,
                format!("{mark}{}", experiment.outcome()),
                experiment.conclusion.clone(),
            ]);
        }
        text += &table.html();
    }
    text
}

/// Resources of the kernels.
pub(super) fn resources(sources: &Sources) -> String {
    const COLUMNS: [&str; 9] =
        ["arch", "config", "dtype", "dim", "mask", "registers", "shared_bytes", "spilled_bytes", "gate"];
    let mut table = HtmlTable::new(&COLUMNS.map(|column| match column {
        "shared_bytes" => "shared bytes",
        "spilled_bytes" => "spilled bytes",
        column => column,
    }));
    for row in sources.resources.iter().flat_map(|(_, rows)| rows) {
        let cells = COLUMNS.map(|column| match &row[column] {
            serde_json::Value::String(text) => text.clone(),
            value => value.to_string(),
        });
        table.row(&cells);
    }
    table.html()
}

/// Counters and bottlenecks.
pub(super) fn profiles(sources: &Sources) -> String {
    let mut text = String::new();
    for (_, record) in &sources.profiles {
        for row in &record.content.rows {
            let _ = write!(
                text,
                "<h3>{} on {}</h3>\n<p class=\"verdict\">{}: {}</p>\n",
                escape(&row.kernel),
                escape(&row.problem.to_string()),
                row.bottleneck.word(),
                escape(&row.reason)
            );
            let mut table = HtmlTable::new(&["metric", "hardware", "simulator", "gate"]);
            for metric in &row.metrics {
                let number = |value: Option<f64>| value.map_or_else(|| "~-".to_owned(), short);
                let gate = metric
                    .gate
                    .as_ref()
                    .map_or(String::new(), |gate| format!("{}{}", if gate.passed { "+" } else { "!" }, gate.words));
                table.row(&[metric.name.clone(), number(metric.hardware), number(metric.simulator), gate]);
            }
            text += &table.html();
        }
    }
    text
}

/// Machines and builds of the measurements.
pub(super) fn environment(sources: &Sources) -> String {
    let mut table = HtmlTable::new(&["file", "machine", "state", "commit", "command", "time"]);
    let origins = sources
        .measurements
        .iter()
        .map(|(file, record)| (file, &record.origin))
        .chain(sources.comparisons.iter().map(|(file, record)| (file, &record.origin)))
        .chain(sources.profiles.iter().map(|(file, record)| (file, &record.origin)));
    for (file, origin) in origins {
        let state: Vec<String> = origin.machine.state.iter().map(|(field, value)| format!("{field} {value}")).collect();
        let build = format!("{} {}, {}", origin.build.version, origin.build.short(), origin.build.profile);
        table.row(&[
            file.clone(),
            origin.machine.words(),
            state.join(", "),
            build,
            origin.command.clone(),
            origin.time.clone(),
        ]);
    }
    table.html()
}
