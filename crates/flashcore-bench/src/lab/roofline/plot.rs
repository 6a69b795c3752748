//! Roofline plot: rate over intensity, the roofs, the problems, and what was measured.

use flashcore_problem::{DTypes, Problem};

use super::device::RoofDevice;
use super::floors::Floors;
use crate::lab::svg::{Anchor, Axis, Svg, series, short};
use crate::testkit::shape_text;

/// A time that was measured on the device.
#[derive(Debug, Clone, PartialEq)]
pub struct MeasuredPoint {
    /// The problem.
    pub problem: Problem,
    /// The kernel.
    pub kernel: String,
    /// Seconds.
    pub seconds: f64,
}

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 430.0;
/// The roof of the cache.
const L2: &str = "L2, hot";

/// Draws a device's roofs for problems of some types, the floors of some problems and what was measured.
pub fn plot(device: &RoofDevice, types: DTypes, problems: &[Problem], measured: &[MeasuredPoint]) -> Svg {
    let peak = device.flops(types).unwrap_or(device.vector_flops);
    let mut svg = Svg::new(&format!("Roofline of {} in {types}", device.name), WIDTH, HEIGHT);
    let all = problems.iter().chain(measured.iter().map(|point| &point.problem));
    let intensities: Vec<f64> = all.map(|problem| Floors::of(problem, device).intensity()).collect();
    let rates = measured.iter().map(|point| Floors::of(&point.problem, device).work.flops / point.seconds);
    let least_rate = rates.fold(peak / 100.0, f64::min);
    // Where the roofs meet; where nothing is known of memory there is but one, and the problems say what is shown of it.
    let ridge = (device.dram_bytes.is_finite()).then(|| peak / device.dram_bytes);
    let low = intensities.iter().copied().fold(ridge.map_or(f64::INFINITY, |ridge| ridge / 20.0), f64::min) / 2.0;
    let high = intensities.iter().copied().fold(ridge.map_or(0.0, |ridge| ridge * 4.0), f64::max) * 2.0;
    let (left, right, bottom, top) = (70.0, WIDTH - 20.0, HEIGHT - 50.0, 56.0);
    let x = Axis::logarithmic(low, high, left, right);
    let y = Axis::logarithmic(least_rate / 2.0 / 1e12, peak * 2.0 / 1e12, bottom, top);
    svg.horizontal_axis(&x, bottom, top, "operations per byte of memory");
    svg.vertical_axis(&y, left, right, "TFLOP/s");
    let roofs = [("DRAM, cold", device.dram_bytes, 0, false), (L2, device.l2_bytes, 3, true)];
    for (name, bandwidth, colour, is_dashed) in roofs.into_iter().filter(|roof| roof.1.is_finite()) {
        let corner = (peak / bandwidth).clamp(low, high);
        let start = low.max(least_rate / 2.0 / bandwidth);
        let points = [start, corner, high].map(|at| (x.place(at), y.place((at * bandwidth).min(peak) / 1e12)));
        svg.path(&series(colour), &points, is_dashed);
        let label = (start * corner).sqrt();
        let (across, height) = (x.place(label), y.place(label * bandwidth / 1e12));
        let text = format!("{name}, {} TB/s", short(bandwidth / 1e12));
        // The cache is faster than memory, so its line is on the left: each label is on the side without the other line.
        if name == L2 {
            svg.text("faint", Anchor::End, across - 4.0, height - 8.0, &text);
        } else {
            svg.text("faint", Anchor::Start, across + 8.0, height + 14.0, &text);
        }
    }
    svg.path(&series(5), &[(left, y.place(peak / 1e12)), (right, y.place(peak / 1e12))], false);
    svg.text("faint", Anchor::End, right - 4.0, y.place(peak / 1e12) - 6.0, &format!("{} TFLOP/s", short(peak / 1e12)));
    for problem in problems {
        let floors = Floors::of(problem, device);
        let (cold, hot) = (floors.cold(), floors.hot());
        for (time, colour, state) in [(cold, 0, "cold"), (hot, 3, "hot")] {
            let rate = floors.work.flops / time.0 / 1e12;
            let (shape, us) = (shape_text(problem), short(time.0 * 1e6));
            let tip = format!("{shape}: floor {us} us {state}, bound by {}", time.1);
            svg.dot(&series(colour), x.place(floors.intensity()), y.place(rate), 3.0, &tip);
        }
    }
    for point in measured {
        let floors = Floors::of(&point.problem, device);
        let rate = floors.work.flops / point.seconds / 1e12;
        let (shape, us) = (shape_text(&point.problem), short(point.seconds * 1e6));
        let tip = format!("{} {shape} {}: {us} us, {} TFLOP/s", point.kernel, point.problem.mask, short(rate));
        svg.dot(&series(1), x.place(floors.intensity()), y.place(rate), 4.5, &tip);
    }
    let legend = [(0, "floor, cold"), (3, "floor, hot"), (1, "measured")];
    let shown = if measured.is_empty() { &legend[..2] } else { &legend[..] };
    for (place, (colour, name)) in shown.iter().enumerate() {
        let at = left + 130.0 * place as f64 + 90.0;
        svg.dot(&series(*colour), at, 36.0, 4.0, name);
        svg.text("faint", Anchor::Start, at + 9.0, 40.0, name);
    }
    svg
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_problem::DType;

    fn f16() -> DTypes {
        Problem::new(1, 1, 1, 8, DType::F16).dtypes()
    }

    /// Texts of a picture: what each says, its anchor, and its place.
    fn texts(picture: &str) -> Vec<(String, String, f64, f64)> {
        let value = |line: &str, name: &str| {
            line.split_once(&format!("{name}=\""))
                .and_then(|(_, rest)| rest.split_once('"'))
                .map(|(value, _)| value.to_owned())
        };
        let number =
            |line: &str, name: &str| value(line, name).and_then(|value| value.parse().ok()).unwrap_or(f64::NAN);
        let lines = picture.lines().filter(|line| line.starts_with("<text"));
        lines
            .filter_map(|line| {
                let said = line.split_once('>')?.1.split_once('<')?.0.to_owned();
                Some((said, value(line, "text-anchor")?, number(line, " x"), number(line, " y")))
            })
            .collect()
    }

    #[test]
    fn no_label_is_crossed_by_the_other_roof() {
        for device in RoofDevice::table() {
            let picture = plot(&device, f16(), &[Problem::new(1, 8, 512, 64, DType::F16)], &[]).inline();
            let find = |name: &str| texts(&picture).into_iter().find(|text| text.0.starts_with(name)).expect("a label");
            let (dram, l2) = (find("DRAM, cold"), find(L2));
            // To the right of the right line and below it; to the left of the left line and above it.
            assert_eq!((dram.1.as_str(), l2.1.as_str()), ("start", "end"), "{}", device.key);
            assert!(dram.2 > l2.2, "{}", device.key);
        }
    }

    #[test]
    fn the_slope_of_memory_is_drawn() {
        let device = RoofDevice::named("h200").expect("a device");
        // Far to the right of where the roofs meet.
        let long = Problem::new(1, 1, 16_384, 128, DType::F16);
        let picture = plot(&device, f16(), &[long], &[]).inline();
        let slope = picture.lines().find(|line| line.starts_with("<polyline")).expect("a roof");
        let points = slope.split_once("points=\"").and_then(|(_, rest)| rest.split_once('"')).expect("points").0;
        let points: Vec<Vec<f64>> =
            points.split(' ').map(|point| point.split(',').filter_map(|part| part.parse().ok()).collect()).collect();
        // It rises over at least a quarter of the picture, and is level from there on.
        assert!(points[1][0] - points[0][0] > WIDTH / 4.0 && points[0][1] - points[1][1] > HEIGHT / 4.0, "{points:?}");
        assert_eq!(points[1][1], points[2][1]);
    }
}
