//! SVG plots: a few shapes, two kinds of axes, and colours for light and for dark.

use core::fmt::Write;

const LIGHT: &str = "--paper: #ffffff; --ink: #1c2430; --faint: #5d6b7c; --rule: #d9dee5; --good: #16794a; --bad: #b3261e; \
    --series-0: #1f6feb; --series-1: #d1660a; --series-2: #16794a; --series-3: #8a3ffc; --series-4: #b3261e; --series-5: #5d6b7c;";
const DARK: &str = "--paper: #11161d; --ink: #e6ebf2; --faint: #9aa7b6; --rule: #2b3440; --good: #4cc38a; --bad: #ff7b72; \
    --series-0: #6cb0ff; --series-1: #ffa657; --series-2: #4cc38a; --series-3: #c297ff; --series-4: #ff7b72; --series-5: #9aa7b6;";
const SHAPES: &str = "svg { font: 12px system-ui, sans-serif; background: var(--paper); }
svg text { fill: var(--ink); } svg text.faint { fill: var(--faint); } svg text.title { font-weight: 600; font-size: 14px; }
svg .rule { stroke: var(--rule); stroke-width: 1; } svg .axis { stroke: var(--faint); stroke-width: 1; }
svg .bar { stroke: none; } svg .line { fill: none; stroke-width: 2; }
";

/// Colours and type of every picture: those that the reader prefers, or those of a `data-theme` on the page.
pub fn style() -> String {
    format!(
        ":root {{ {LIGHT} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}\n\
         :root[data-theme=light] {{ {LIGHT} }}\n:root[data-theme=dark] {{ {DARK} }}\n{SHAPES}"
    )
}

/// Text as XML and HTML take it.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The colour of a series.
pub fn series(index: usize) -> String {
    format!("var(--series-{})", index % 6)
}

/// A number in few digits: three of them from 1 on, two below, whatever stands beside it.
pub fn short(number: f64) -> String {
    let size = number.abs();
    if number == 0.0 {
        "0".to_owned()
    } else if !number.is_finite() {
        "-".to_owned()
    } else if !(1e-6..1e7).contains(&size) {
        format!("{number:.1e}")
    } else {
        // The place of the first digit; a number below 1 gets one digit more.
        let first = size.log10().floor() as i32;
        let decimals = if first < 0 { 1 - first } else { (2 - first).max(0) };
        format!("{number:.*}", usize::try_from(decimals).unwrap_or(0))
    }
}

/// Horizontal anchor of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Anchor {
    /// It begins there.
    Start,
    /// It is centred there.
    Middle,
    /// It ends there.
    End,
}

/// The largest bound of an axis: between it and its negative there are finite differences.
const LARGEST: f64 = 1e100;
/// The most powers of ten that an axis marks.
const MOST_TICKS: f64 = 12.0;

/// From values to places.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Axis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
    is_logarithmic: bool,
}

impl Axis {
    /// Equal steps for equal differences. Bounds that no plot has are brought to those that it can have.
    pub fn linear(low: f64, high: f64, from: f64, to: f64) -> Self {
        let bound =
            |value: f64, otherwise: f64| if value.is_nan() { otherwise } else { value.clamp(-LARGEST, LARGEST) };
        let (low, high) = (bound(low, 0.0), bound(high, 1.0));
        let high = if high > low { high } else { low + low.abs().max(1.0) };
        Self { low, high, from, to, is_logarithmic: false }
    }

    /// Equal steps for equal ratios.
    pub fn logarithmic(low: f64, high: f64, from: f64, to: f64) -> Self {
        let low = if low > 0.0 && low.is_finite() { low.clamp(1.0 / LARGEST, LARGEST) } else { 1e-12 };
        let high = if high > low { high.min(10.0 * LARGEST) } else { low * 10.0 };
        Self { low: low.ln(), high: high.ln(), from, to, is_logarithmic: true }
    }

    /// The place of a value.
    pub fn place(&self, value: f64) -> f64 {
        let value = if self.is_logarithmic { value.max(f64::MIN_POSITIVE).ln() } else { value };
        let fraction = ((value - self.low) / (self.high - self.low)).clamp(-0.05, 1.05);
        self.from + fraction * (self.to - self.from)
    }

    /// Values worth a mark: powers of ten, or round steps.
    pub fn ticks(&self) -> Vec<f64> {
        if self.is_logarithmic {
            let (low, high) = (self.low.exp(), self.high.exp());
            let decades = low.log10().floor() as i32..=high.log10().ceil() as i32;
            let all = (high / low).log10();
            let steps: &[f64] = if all < 1.6 { &[1.0, 2.0, 5.0] } else { &[1.0] };
            return decades
                .step_by((all / MOST_TICKS).ceil().max(1.0) as usize)
                .flat_map(|decade| steps.iter().map(move |step| step * 10f64.powi(decade)))
                .filter(|tick| (low * 0.999..=high * 1.001).contains(tick))
                .collect();
        }
        let rough = (self.high - self.low) / 6.0;
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * power).find(|step| *step >= rough);
        let step = step.unwrap_or(rough);
        let (first, last) = ((self.low / step).ceil() as i64, (self.high / step + 1e-6).floor() as i64);
        (first..=last).map(|count| count as f64 * step).collect()
    }
}

/// A picture.
#[derive(Debug)]
pub struct Svg {
    width: f64,
    height: f64,
    title: String,
    body: String,
}

impl Svg {
    /// An empty picture with a title, which is also what it says to those who cannot see it.
    pub fn new(title: &str, width: f64, height: f64) -> Self {
        let mut svg = Self { width, height, title: title.to_owned(), body: String::new() };
        svg.text("title", Anchor::Start, 12.0, 22.0, title);
        svg
    }

    /// Writing to a string cannot fail.
    fn add(&mut self, element: core::fmt::Arguments<'_>) {
        let _ = self.body.write_fmt(element);
        self.body.push('\n');
    }

    /// A line of a class of the style.
    pub fn line(&mut self, class: &str, from: (f64, f64), to: (f64, f64)) {
        let ((x1, y1), (x2, y2)) = (from, to);
        self.add(format_args!(r#"<line class="{class}" x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}"/>"#));
    }

    /// A line through points, in a colour.
    pub fn path(&mut self, colour: &str, points: &[(f64, f64)], is_dashed: bool) {
        let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let dash = if is_dashed { r#" stroke-dasharray="5 4""# } else { "" };
        self.add(format_args!(
            r#"<polyline class="line" style="stroke:{colour}"{dash} points="{}"/>"#,
            points.join(" ")
        ));
    }

    /// A text.
    pub fn text(&mut self, class: &str, anchor: Anchor, x: f64, y: f64, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let text = escape(text);
        self.add(format_args!(r#"<text class="{class}" text-anchor="{anchor}" x="{x:.1}" y="{y:.1}">{text}</text>"#));
    }

    /// A dot that says what it is when pointed at.
    pub fn dot(&mut self, colour: &str, x: f64, y: f64, radius: f64, tip: &str) {
        let tip = escape(tip);
        self.add(format_args!(
            r#"<circle style="fill:{colour}" cx="{x:.1}" cy="{y:.1}" r="{radius:.1}"><title>{tip}</title></circle>"#
        ));
    }

    /// A filled box that says what it is when pointed at.
    pub fn bar(&mut self, colour: &str, corner: (f64, f64), size: (f64, f64), tip: &str) {
        let ((x, y), (width, height), tip) = (corner, size, escape(tip));
        self.add(format_args!(
            r#"<rect class="bar" style="fill:{colour}" x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}"><title>{tip}</title></rect>"#
        ));
    }

    /// Marks, numbers and rules of a horizontal axis, from the height `bottom` up to `top`.
    pub fn horizontal_axis(&mut self, axis: &Axis, bottom: f64, top: f64, label: &str) {
        for tick in axis.ticks() {
            let x = axis.place(tick);
            self.line("rule", (x, bottom), (x, top));
            self.text("faint", Anchor::Middle, x, bottom + 16.0, &short(tick));
        }
        self.line("axis", (axis.from, bottom), (axis.to, bottom));
        self.text("faint", Anchor::Middle, f64::midpoint(axis.from, axis.to), bottom + 34.0, label);
    }

    /// Marks, numbers and rules of a vertical axis, from the place `left` to `right`.
    pub fn vertical_axis(&mut self, axis: &Axis, left: f64, right: f64, label: &str) {
        for tick in axis.ticks() {
            let y = axis.place(tick);
            self.line("rule", (left, y), (right, y));
            self.text("faint", Anchor::End, left - 6.0, y + 4.0, &short(tick));
        }
        self.line("axis", (left, axis.from), (left, axis.to));
        self.text("faint", Anchor::Start, 12.0, 40.0, label);
    }

    /// The picture, to stand in a page that has the style.
    pub fn inline(&self) -> String {
        let Self { width, height, title, body } = self;
        let title = escape(title);
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" role=\"img\" aria-label=\"{title}\">\n{body}</svg>\n"
        )
    }

    /// The picture as a file of its own.
    pub fn file(&self) -> String {
        self.inline().replacen(">\n", &format!(">\n<style>{}</style>\n", style()), 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_place_and_mark() {
        let axis = Axis::logarithmic(1.0, 1000.0, 0.0, 300.0);
        assert_eq!([1.0, 10.0, 1000.0].map(|value| axis.place(value).round()), [0.0, 100.0, 300.0]);
        assert_eq!(axis.ticks().len(), 4);
        let axis = Axis::linear(0.0, 11.0, 100.0, 0.0);
        assert_eq!(axis.place(11.0), 0.0);
        assert_eq!(axis.ticks(), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        // A value far outside stays near the picture.
        assert_eq!(axis.place(1e9), -5.0);
    }

    /// Bounds of any size, and what is no number: a few marks, each finite and in the picture.
    #[test]
    fn no_axis_loops() {
        let sizes = [0.0, 1e-300, 1e-12, 1.0, 1e12, 1e303, f64::MAX, f64::INFINITY, f64::NAN];
        let bounds: Vec<f64> = sizes.iter().flat_map(|size| [*size, -size]).collect();
        for &low in &bounds {
            for &high in &bounds {
                for axis in [Axis::linear(low, high, 0.0, 100.0), Axis::logarithmic(low, high, 0.0, 100.0)] {
                    let ticks = axis.ticks();
                    assert!(ticks.len() <= 20, "{low:e} to {high:e}: {} marks", ticks.len());
                    let places = ticks.iter().chain(&bounds).map(|value| axis.place(*value));
                    for place in places.filter(|place| !place.is_nan()) {
                        assert!((-6.0..=106.0).contains(&place), "{low:e} to {high:e}: {place}");
                    }
                    assert!(ticks.iter().all(|tick| tick.is_finite()), "{low:e} to {high:e}");
                }
            }
        }
    }

    #[test]
    fn small_numbers_have_one_form() {
        for (number, text) in [
            (0.0, "0"),
            (9.9e-4, "0.00099"),
            (0.004, "0.0040"),
            (0.25, "0.25"),
            (1.0, "1.00"),
            (12.34, "12.3"),
            (123.4, "123"),
            (-0.5, "-0.50"),
            (1_234_567.0, "1234567"),
            (1e303, "1.0e303"),
            (f64::NAN, "-"),
        ] {
            assert_eq!(short(number), text);
        }
    }

    #[test]
    fn texts_cannot_break_the_picture() {
        let mut svg = Svg::new("a < b", 100.0, 50.0);
        svg.dot("red", 1.0, 2.0, 3.0, "\"tip\" & more");
        let text = svg.inline();
        assert_eq!(text.matches("a &lt; b").count(), 2);
        assert_eq!(text.matches("&quot;tip&quot; &amp; more").count(), 1);
        assert_eq!(svg.file().matches("<style>").count(), 1);
    }
}
