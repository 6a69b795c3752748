//! The ladder as a picture: a bar for each step on a logarithmic scale, readable on light and on dark.

use std::fmt::Write;

use super::{Gain, Ladder, Rung};

const ROW: f64 = 22.0;
const TOP: f64 = 64.0;
const BOTTOM: f64 = 34.0;
/// Left and right end of the bars; labels stand to their left, figures to their right.
const LEFT: f64 = 190.0;
const RIGHT: f64 = 610.0;
const WIDTH: f64 = 900.0;

/// Colours for light and for dark backgrounds; the text takes that of the page where there is one.
const STYLE: &str = "text{font:12px system-ui,sans-serif;fill:#24292f}\
.title{font-size:15px;font-weight:600}.small{font-size:11px;fill:#57606a}\
.bar{fill:#2f6fdb}.nothing{fill:#9aa4b1}.refused{fill:none;stroke:#c4432b;stroke-width:1.5;stroke-dasharray:4 3}\
.best{fill:#1a7f4b}.grid{stroke:#d0d7de}.floor{stroke:#c4432b;stroke-dasharray:2 3}\
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9aa7b4}.bar{fill:#5b93f5}.nothing{fill:#5d6875}\
.refused{fill:none;stroke:#f0876f}.best{fill:#3fb36f}.grid{stroke:#30363d}.floor{stroke:#f0876f}}";

/// The ladder as SVG. Steps without a time have no bar.
pub fn picture(ladder: &Ladder) -> String {
    let times: Vec<f64> = ladder.rungs.iter().filter_map(Rung::seconds).collect();
    let slowest = times.iter().copied().fold(1e-6, f64::max);
    let fastest = times.iter().copied().fold(slowest, f64::min);
    let floor = ladder.floor_seconds.filter(|floor| *floor > 0.0);
    let scale = Scale::new(floor.map_or(fastest, |floor| floor.min(fastest)), slowest);
    let height = TOP + ROW * ladder.rungs.len() as f64 + BOTTOM;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" \
         aria-label=\"Times of the steps\">\n<style>{STYLE}</style>\n"
    );
    let Ladder { shape, dtype, mask, .. } = ladder;
    let in_all = ladder.in_all().map_or(String::new(), |factor| format!(", {factor:.0} times in all"));
    text(
        &mut svg,
        12.0,
        24.0,
        "title",
        &format!("{shape} {dtype} {mask}: from one thread a row to the fastest{in_all}"),
    );
    let note = "median time of one launch, logarithmic; grey has no gain, dashed was refused by the correctness gate";
    text(&mut svg, 12.0, 42.0, "small", note);
    for seconds in scale.marks() {
        let x = scale.x(seconds);
        let end = height - BOTTOM;
        line(&mut svg, "grid", x, TOP - 6.0, end);
        text(&mut svg, x - 12.0, end + 16.0, "small", &duration(seconds));
    }
    if let Some(floor) = floor {
        line(&mut svg, "floor", scale.x(floor), TOP - 6.0, height - BOTTOM);
        text(&mut svg, scale.x(floor) + 4.0, height - BOTTOM + 30.0, "small", &format!("floor {}", duration(floor)));
    }
    let best = (0..ladder.rungs.len())
        .filter(|&number| ladder.rungs[number].standing == super::Standing::Passed)
        .filter_map(|number| Some((number, ladder.rungs[number].seconds()?)))
        .min_by(|one, other| one.1.total_cmp(&other.1))
        .map(|(number, _)| number);
    for (number, rung) in ladder.rungs.iter().enumerate() {
        let y = TOP + ROW * number as f64;
        text(&mut svg, 12.0, y + 14.0, "label", &rung.name);
        let Some(seconds) = rung.seconds() else {
            text(&mut svg, LEFT, y + 14.0, "small", "does not run here");
            continue;
        };
        let (class, words) = match ladder.gain(number) {
            Gain::Unknown => ("bar", String::new()),
            Gain::Faster(factor) => ("bar", format!("{factor:.2} times faster")),
            Gain::Nothing(factor) => ("bar nothing", format!("no gain ({factor:.2})")),
            Gain::Refused(factor) => ("bar refused", format!("refused by the gate ({factor:.2})")),
        };
        let class = if Some(number) == best { "bar best" } else { class };
        let width = (scale.x(seconds) - LEFT).max(1.0);
        let _ = writeln!(
            svg,
            "<rect class=\"{class}\" x=\"{LEFT}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"{:.1}\" rx=\"2\"/>",
            y + 3.0,
            ROW - 7.0
        );
        let comma = if words.is_empty() { "" } else { ", " };
        let figures = format!("{}{comma}{words}", duration(seconds));
        text(&mut svg, LEFT + width + 6.0, y + 14.0, "figure", &figures);
    }
    svg += "</svg>\n";
    svg
}

/// From seconds to a place between the ends of the bars.
struct Scale {
    first: f64,
    last: f64,
}

impl Scale {
    /// A little beyond the shortest time, so that its bar can be seen.
    fn new(shortest: f64, longest: f64) -> Self {
        Self { first: (shortest / 1.5).log10(), last: longest.max(shortest * 2.0).log10() }
    }

    fn x(&self, seconds: f64) -> f64 {
        LEFT + (seconds.log10() - self.first) / (self.last - self.first) * (RIGHT - LEFT)
    }

    /// The powers of ten between the ends.
    fn marks(&self) -> Vec<f64> {
        ((self.first.ceil() as i32)..=(self.last.floor() as i32)).map(|power| 10f64.powi(power)).collect()
    }
}

fn duration(seconds: f64) -> String {
    match seconds {
        1e-3.. => format!("{:.2} ms", seconds * 1e3),
        _ => format!("{:.2} us", seconds * 1e6),
    }
}

fn text(svg: &mut String, x: f64, y: f64, class: &str, words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(svg, "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{words}</text>");
}

fn line(svg: &mut String, class: &str, x: f64, top: f64, bottom: f64) {
    let _ = writeln!(svg, "<line class=\"{class}\" x1=\"{x:.1}\" y1=\"{top:.1}\" x2=\"{x:.1}\" y2=\"{bottom:.1}\"/>");
}
