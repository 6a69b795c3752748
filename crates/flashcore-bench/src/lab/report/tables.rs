//! Tables of the report.

use core::fmt::Write;

use super::{Peers, Sources};
use crate::lab::accuracy::Outcome;
use crate::lab::compare::Finding;
use crate::lab::load::most_others;
use crate::lab::record::kernel_words;
use crate::lab::svg::{escape, short};

/// Cells of fewer characters are not broken into lines.
const LONG_CELL: usize = 30;

/// A table of HTML.
pub(super) struct HtmlTable {
    /// The headings, which stand beside the cells on a narrow page.
    headings: Vec<String>,
    text: String,
}

impl HtmlTable {
    pub(super) fn new(headings: &[&str]) -> Self {
        let headings: Vec<String> = headings.iter().map(|heading| escape(heading)).collect();
        let cells: String = headings.iter().flat_map(|heading| ["<th>", heading, "</th>"]).collect();
        Self { headings, text: format!("<div class=\"wide\"><table><thead><tr>{cells}</tr></thead><tbody>\n") }
    }

    /// A row; cells that begin with `!`, `+` or `~` are bad, good or faint.
    pub(super) fn row<S: AsRef<str>>(&mut self, cells: &[S]) {
        self.text += "<tr>";
        for (cell, heading) in cells.iter().zip(&self.headings) {
            let cell = cell.as_ref();
            let (class, cell) = match cell.split_at_checked(1) {
                Some(("!", rest)) => ("bad", rest),
                Some(("+", rest)) if !rest.starts_with(|letter: char| letter.is_ascii_digit()) => ("good", rest),
                Some(("~", rest)) => ("faint", rest),
                _ if cell.parse::<f64>().is_ok() => ("number", cell),
                _ if cell.chars().count() < LONG_CELL => ("short", cell),
                _ => ("long", cell),
            };
            let _ = write!(self.text, "<td class=\"{class}\" data-of=\"{heading}\">{}</td>", escape(cell));
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
            let most = most_others(record.origin.machine.threads.unwrap_or(1));
            let right = if row.verified.passed && row.other_cpus.is_some_and(|others| others > most) {
                "!verified, timed on a loaded machine".to_owned()
            } else if row.verified.passed {
                "+verified".to_owned()
            } else {
                format!("!WRONG: {}", row.verified.complaints.join("; "))
            };
            let hot = row.hot();
            table.row(&[
                row.problem.to_string(),
                kernel_words(&row.kernel),
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
                format!("{} ({})", record.content.a, kernel_words(&row.a.kernel)),
                format!("{} ({})", record.content.b, kernel_words(&row.b.kernel)),
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
                kernel_words(&leader.kernel),
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

/// Times of one record, beside the times of other programs.
pub(super) fn peers(file: &str, peers: &Peers) -> String {
    let summary = peers.summary().map_or_else(String::new, |(mean, least, problem)| {
        format!(
            "; fastest other over {}: geometric mean {}, least {} ({problem})",
            peers.ours,
            short(mean),
            short(least)
        )
    });
    let mut table =
        HtmlTable::new(&["problem", "us", "fastest other", "its us", "other / ours", "all others, us", "note"]);
    for row in &peers.rows {
        let best = row.best();
        let ratio = row.ratio();
        let others: Vec<String> =
            row.others.iter().map(|(name, seconds)| format!("{name} {}", short(seconds * 1e6))).collect();
        table.row(&[
            row.problem.clone(),
            short(row.seconds * 1e6),
            best.map_or_else(|| "~-".to_owned(), |(name, _)| name.clone()),
            best.map_or_else(|| "~-".to_owned(), |(_, seconds)| short(seconds * 1e6)),
            ratio.map_or_else(|| "~-".to_owned(), short),
            others.join(", "),
            row.note.clone(),
        ]);
    }
    format!("<h3>{}</h3>\n<p>{}</p>\n{}", escape(file), escape(&(peers.machine.clone() + &summary)), table.html())
}

/// Verdicts of `flashcore verify` and `flashcore conformance`.
pub(super) fn verifications(sources: &Sources) -> String {
    let mut text = String::new();
    if !sources.verifications.is_empty() {
        let mut table = HtmlTable::new(&["file", "backend", "verdict", "passed", "failed", "complete"]);
        for (file, verification) in &sources.verifications {
            let verdict = if verification.failed.is_empty() { "+passed" } else { "!FAILED" };
            table.row(&[
                file.clone(),
                verification.backend.clone(),
                verdict.to_owned(),
                verification.passed.to_string(),
                verification.failed.len().to_string(),
                if verification.is_complete { "yes" } else { "!no, interrupted" }.to_owned(),
            ]);
        }
        text += &table.html();
    }
    let failed: Vec<_> = sources.verifications.iter().flat_map(|(_, verification)| &verification.failed).collect();
    if !failed.is_empty() {
        let mut table = HtmlTable::new(&["failed case", "complaints", "repeat"]);
        for case in failed {
            table.row(&[case.case.clone(), format!("!{}", case.complaints.join("; ")), case.repeat.clone()]);
        }
        text += &table.html();
    }
    if !sources.conformance.is_empty() {
        let mut table =
            HtmlTable::new(&["file", "device", "driver", "target", "date", "cases", "elements", "largest ULP"]);
        for (file, record) in &sources.conformance {
            let header = &record.header;
            table.row(&[
                file.clone(),
                header.device.clone(),
                header.driver.clone(),
                header.target.clone(),
                header.date.clone(),
                record.cases.len().to_string(),
                record.cases.iter().map(|case| case.elements).sum::<usize>().to_string(),
                record.cases.iter().map(|case| case.worst.ulps).max().unwrap_or(0).to_string(),
            ]);
        }
        text += &table.html();
    }
    text
}

/// Errors of element types, needles and gates.
pub(super) fn accuracy(sources: &Sources) -> String {
    let mut text = String::new();
    for (file, record) in &sources.accuracy {
        let _ = writeln!(text, "<h3>{}</h3>", escape(file));
        let mut table = HtmlTable::new(&["gate", "computed by", "value", "bound", "verdict"]);
        for gate in &record.gates {
            table.row(&[
                gate.name.clone(),
                gate.computed_by.clone(),
                gate.value.map_or_else(|| "~-".to_owned(), short),
                gate.bound.clone(),
                if gate.passed { "+passed" } else { "!FAILED" }.to_owned(),
            ]);
        }
        if !record.gates.is_empty() {
            text += &table.html();
        }
        let mut table = HtmlTable::new(&["keys", "types", "computed by", "found", "of"]);
        for row in &record.needles {
            table.row(&[
                row.keys.to_string(),
                row.types.clone(),
                row.computed_by.clone(),
                row.found.map_or_else(|| "~refused".to_owned(), |found| found.to_string()),
                row.trials.to_string(),
            ]);
        }
        if !record.needles.is_empty() {
            text += &table.html();
        }
        let mut table = HtmlTable::new(&[
            "keys",
            "data",
            "types",
            "scales",
            "options",
            "computed by",
            "relative L2",
            "RMSE",
            "max error",
        ]);
        for row in &record.rows {
            let errors = match &row.outcome {
                Outcome::Errors(errors) => {
                    [errors.relative_l2, errors.rmse, errors.max_error].map(|error| format!("{error:.2e}"))
                }
                Outcome::Refused(reason) => ["~refused".to_owned(), String::new(), reason.clone()],
            };
            let cells = [
                row.sizes.keys.to_string(),
                row.data.to_string(),
                row.types.clone(),
                row.scales.clone().unwrap_or_default(),
                row.options.clone(),
                row.computed_by.clone(),
            ];
            table.row(&[&cells[..], &errors[..]].concat());
        }
        if !record.rows.is_empty() {
            text += &table.html();
        }
    }
    text
}

/// Conversions of FP8 and products.
pub(super) fn microbenchmarks(sources: &Sources) -> String {
    let mut text = String::new();
    for (file, record) in &sources.microbenchmarks {
        let _ = writeln!(text, "<h3>{}, {}</h3>", escape(file), escape(&record.arch));
        let mut table =
            HtmlTable::new(&["from", "to", "way", "order", "default", "verdict", "instructions", "codes/clock/SM"]);
        for row in &record.conversions {
            table.row(&[
                row.from.clone(),
                row.to.clone(),
                row.way.clone(),
                row.order.clone(),
                if row.is_default { "default" } else { "" }.to_owned(),
                if row.wrong_codes.is_empty() {
                    "+right".to_owned()
                } else {
                    format!("!{} codes WRONG", row.wrong_codes.len())
                },
                row.instructions.to_string(),
                row.measured.as_ref().map_or_else(|| "~-".to_owned(), |rate| short(rate.codes_per_clock_per_sm)),
            ]);
        }
        text += &table.html();
        let mut table = HtmlTable::new(&["product", "verdict", "TFLOP/s"]);
        for row in &record.products {
            table.row(&[
                row.form.clone(),
                if row.is_right { "+right" } else { "!WRONG" }.to_owned(),
                row.measured.as_ref().map_or_else(|| "~-".to_owned(), |rate| short(rate.tflops())),
            ]);
        }
        text += &table.html();
    }
    text
}

/// Counters and bottlenecks.
pub(super) fn profiles(sources: &Sources) -> String {
    let mut text = String::new();
    for (_, record) in &sources.profiles {
        for row in &record.content.rows {
            let _ = write!(
                text,
                "<h3>{} on {}</h3>\n<p class=\"verdict\">{}: {}</p>\n",
                escape(&kernel_words(&row.kernel)),
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
    if sources.origins.is_empty() {
        return String::new();
    }
    for (file, origin) in &sources.origins {
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
