//! Charts of the report.

use super::error_map::ErrorMap;
use super::ladder::{LadderView, Worth};
use super::peers::{PeerRow, Peers};
use crate::lab::compare::{Comparison, Finding};
use crate::lab::record::Measurement;
use crate::lab::svg::{Anchor, Axis, Svg, series, short};

const WIDTH: f64 = 760.0;
const ROW: f64 = 22.0;

/// Every sample as a dot, over its distance from the median of its row: how much do times differ?
pub(super) fn distributions(rows: &[&Measurement]) -> Svg {
    const MOST_DOTS: usize = 200;
    let height = 90.0 + ROW * rows.len() as f64;
    let mut svg = Svg::new("Every time, relative to its median", WIDTH, height);
    let (left, right, top) = (250.0, WIDTH - 24.0, 40.0);
    let bottom = height - 46.0;
    let relative = |row: &Measurement| {
        let median = row.median();
        row.hot_seconds.iter().map(|seconds| seconds / median).collect::<Vec<f64>>()
    };
    let widest = rows.iter().map(|row| row.hot().quantile(0.98) / row.median()).fold(1.02, f64::max);
    let least = rows.iter().map(|row| row.hot().quantile(0.0) / row.median()).fold(0.98, f64::min);
    let x = Axis::linear(least, widest, left, right);
    svg.horizontal_axis(&x, bottom, top, "time over median");
    for (index, row) in rows.iter().enumerate() {
        let y = top + ROW * (index as f64 + 0.5);
        let name = format!("{} {}", row.problem, row.kernel);
        svg.text("faint", Anchor::End, left - 8.0, y + 4.0, &row.problem.to_string());
        let times = relative(row);
        // Evenly thinned, so that a page stays small.
        let step = times.len().div_ceil(MOST_DOTS).max(1);
        for (sample, time) in times.iter().enumerate().step_by(step) {
            let shift = (sample * 7 % 11) as f64 - 5.0;
            let colour = format!("color-mix(in srgb, {} 35%, transparent)", series(index));
            svg.dot(&colour, x.place(*time), y + shift, 1.8, &format!("{name}: {} of the median", short(*time)));
        }
        let quantile = |part: f64| x.place(row.hot().quantile(part) / row.median());
        svg.line("axis", (quantile(0.1), y), (quantile(0.9), y));
        svg.bar(
            &series(index),
            (quantile(0.5) - 1.5, y - 8.0),
            (3.0, 16.0),
            &format!("{name}: median {} us", short(row.median() * 1e6)),
        );
    }
    svg
}

/// Intervals of a comparison beside those of A against itself.
pub(super) fn intervals(comparison: &Comparison) -> Svg {
    let height = 100.0 + 2.0 * ROW * comparison.rows.len() as f64;
    let mut svg = Svg::new(&format!("Change of time from {} to {}", comparison.a, comparison.b), WIDTH, height);
    let (left, right, top, bottom) = (250.0, WIDTH - 110.0, 40.0, height - 46.0);
    let all = comparison.rows.iter().flat_map(|row| [row.conclusion.difference, row.conclusion.control]);
    let (low, high) = all.fold((-0.05f64, 0.05f64), |(low, high), interval| {
        // An interval that is very wide would make all others narrow.
        (low.min(interval.low.max(-0.6)), high.max(interval.high.min(1.0)))
    });
    let x = Axis::linear(100.0 * low, 100.0 * high, left, right);
    svg.horizontal_axis(&x, bottom, top, "percent; B takes longer to the right");
    svg.line("axis", (x.place(0.0), top), (x.place(0.0), bottom));
    for (index, row) in comparison.rows.iter().enumerate() {
        let y = top + ROW * (2.0 * index as f64 + 0.7);
        svg.text("", Anchor::End, left - 8.0, y + 4.0, &row.b.problem.to_string());
        let colour = match row.conclusion.finding {
            Finding::Faster => "var(--good)",
            Finding::Slower | Finding::Rejected => "var(--bad)",
            Finding::Same => "var(--series-0)",
            Finding::Ambiguous => "var(--faint)",
        };
        let mut interval = |interval: crate::lab::compare::Interval, y: f64, colour: &str, name: &str| {
            let (from, to) = (x.place(100.0 * interval.low), x.place(100.0 * interval.high));
            let tip = format!("{name}: {}", interval.percent());
            svg.bar(colour, (from, y - 3.0), ((to - from).max(1.0), 6.0), &tip);
            svg.dot(colour, x.place(100.0 * interval.median), y, 5.0, &tip);
        };
        interval(row.conclusion.difference, y, colour, "B against A");
        interval(row.conclusion.control, y + ROW * 0.8, "var(--rule)", "A against A");
        svg.text("", Anchor::Start, right + 10.0, y + 4.0, &row.conclusion.finding.to_string());
    }
    svg
}

/// Times of others over ours, a dot for each: right of the line ours is faster.
pub(super) fn ratios(peers: &Peers, rows: &[PeerRow]) -> Svg {
    let height = 100.0 + ROW * rows.len() as f64;
    let mut svg = Svg::new(&format!("Time of others over {}", peers.ours), WIDTH, height);
    let (left, right, top, bottom) = (250.0, WIDTH - 24.0, 56.0, height - 46.0);
    let mut names: Vec<&str> = peers.rows.iter().flat_map(|row| &row.others).map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    let of = |row: &PeerRow| row.others.iter().map(|(_, seconds)| seconds / row.seconds).collect::<Vec<f64>>();
    let all: Vec<f64> = rows.iter().flat_map(of).collect();
    let (low, high) = all.iter().fold((0.9_f64, 1.1_f64), |(low, high), ratio| (low.min(*ratio), high.max(*ratio)));
    let x = Axis::logarithmic(low / 1.05, high * 1.05, left, right);
    svg.horizontal_axis(&x, bottom, top, "time over ours");
    svg.line("axis", (x.place(1.0), top), (x.place(1.0), bottom));
    let mut at = left;
    for (index, name) in names.iter().enumerate() {
        svg.dot(&series(index), at, 38.0, 4.0, name);
        svg.text("faint", Anchor::Start, at + 8.0, 42.0, name);
        at += 30.0 + 7.0 * name.chars().count() as f64;
    }
    for (index, row) in rows.iter().enumerate() {
        let y = top + ROW * (index as f64 + 0.5);
        let note = if row.note.is_empty() { String::new() } else { format!(", {}", row.note) };
        svg.text("faint", Anchor::End, left - 8.0, y + 4.0, &row.problem);
        for (name, seconds) in &row.others {
            let ratio = seconds / row.seconds;
            let colour = series(names.iter().position(|known| known == name).unwrap_or(0));
            let tip = format!("{}{note}: {name} {} of ours", row.problem, short(ratio));
            svg.dot(&colour, x.place(ratio), y, 4.0, &tip);
        }
    }
    svg
}

/// The steps of a ladder, each as long as its time; those without gain are struck through.
pub(super) fn waterfall(ladder: &LadderView) -> Svg {
    let timed: Vec<usize> =
        (0..ladder.rungs.len()).filter(|&number| ladder.rungs[number].seconds().is_some()).collect();
    let height = 100.0 + ROW * timed.len() as f64;
    let title = format!("From step to step: {} {} {}", ladder.shape, ladder.dtype, ladder.mask);
    let mut svg = Svg::new(&title, WIDTH, height);
    let (left, right, top, bottom) = (230.0, WIDTH - 90.0, 40.0, height - 46.0);
    let times: Vec<f64> =
        timed.iter().filter_map(|&number| ladder.rungs[number].seconds()).map(|time| time * 1e6).collect();
    let low = times.iter().copied().fold(f64::INFINITY, f64::min);
    let low = ladder.floor_seconds.map_or(low, |floor| low.min(floor * 1e6)) / 1.3;
    let x = Axis::logarithmic(low, times.iter().copied().fold(0.0, f64::max) * 1.1, left, right);
    svg.horizontal_axis(&x, bottom, top, "median, us");
    for (index, (&number, us)) in timed.iter().zip(&times).enumerate() {
        let rung = &ladder.rungs[number];
        let y = top + ROW * (index as f64 + 0.5);
        let (colour, class, word) = match ladder.worth(number) {
            Worth::Gain => ("var(--series-0)", "", ""),
            Worth::Nothing => ("var(--series-5)", "faint negative", " no gain"),
            Worth::Refused => ("var(--bad)", "faint negative", " refused: wrong"),
        };
        svg.text(class, Anchor::End, left - 8.0, y + 4.0, &rung.name);
        let tip = format!("{}: {} us{word}. {}", rung.name, short(*us), rung.what);
        svg.bar(colour, (left, y - 7.0), (x.place(*us) - left, 14.0), &tip);
        svg.text("faint", Anchor::Start, x.place(*us) + 6.0, y + 4.0, &short(*us));
    }
    if let Some(floor) = ladder.floor_seconds {
        let at = x.place(floor * 1e6);
        svg.path("var(--bad)", &[(at, top), (at, bottom)], true);
        svg.text("faint", Anchor::Start, at + 4.0, top - 2.0, &format!("floor {} us", short(floor * 1e6)));
    }
    svg
}

/// Errors by tile of queries and tile of keys.
pub(super) fn heat(map: &ErrorMap) -> Svg {
    let (rows, columns) = (map.cells.len(), map.cells.first().map_or(0, Vec::len));
    let size = (420.0 / rows.max(columns).max(1) as f64).clamp(6.0, 40.0);
    let (left, top) = (70.0, 56.0);
    let height = top + size * rows as f64 + 40.0;
    let title = format!("Errors of {} on {}, by tiles of {}", map.subject, map.problem, map.tile);
    let mut svg = Svg::new(&title, WIDTH, height);
    svg.text("faint", Anchor::Start, left, top - 14.0, "tile of keys \u{2192}");
    svg.text("faint", Anchor::End, left - 8.0, top + 12.0, "queries");
    // Twice the error of a careful implementation is what the gate allows.
    let allowed = (2.0 * map.reference).max(f64::MIN_POSITIVE);
    for (row, cells) in map.cells.iter().enumerate() {
        for (column, error) in cells.iter().enumerate() {
            let part = error / allowed;
            let colour = if part > 1.0 {
                "var(--bad)".to_owned()
            } else {
                format!("color-mix(in srgb, var(--series-0) {:.0}%, var(--paper))", 10.0 + 90.0 * part)
            };
            let corner = (left + size * column as f64, top + size * row as f64);
            let tip = format!("queries {row}, keys {column}: {error:.2e}, {:.0} % of the limit", 100.0 * part);
            svg.bar(&colour, corner, (size - 1.0, size - 1.0), &tip);
        }
    }
    let worst = map.cells.iter().flatten().copied().fold(0.0, f64::max);
    let x = left + size * columns as f64 + 24.0;
    svg.text("", Anchor::Start, x, top + 16.0, &format!("worst {worst:.2e}"));
    svg.text("", Anchor::Start, x, top + 36.0, &format!("limit {allowed:.2e}"));
    svg.text("faint", Anchor::Start, x, top + 56.0, "full colour is the limit, red is above it");
    svg
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn negatives_stay_in_the_picture() {
        let picture = waterfall(&super::super::ladder::example()).inline();
        assert_eq!(picture.matches("<rect").count(), 4);
        assert_eq!(picture.matches(r#"class="faint negative""#).count(), 2);
        assert_eq!(picture.matches(" no gain").count(), 1);
    }

    #[test]
    fn a_cell_beyond_the_limit_is_red() {
        let map = ErrorMap {
            problem: Measurement::for_tests("1x1x32x32", 1.0).problem,
            subject: "test".to_owned(),
            tile: 16,
            cells: vec![vec![0.0, 1e-3], vec![3e-3, 1e-3]],
            reference: 1e-3,
        };
        assert_eq!(heat(&map).inline().matches("fill:var(--bad)").count(), 1);
    }
}
