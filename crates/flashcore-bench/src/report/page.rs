//! The page itself.

use core::fmt::Write;

use flashcore_problem::{DType, Problem};

use super::{Sources, charts, tables};
use crate::digest::sha256;
use crate::leaderboard;
use crate::record::{Machine, Measurement};
use crate::roofline::{MeasuredPoint, RoofDevice, plot};
use crate::svg::{escape, style};

/// The most bytes of a page.
pub const MOST_BYTES: usize = 3_000_000;
/// The most bytes of raw data in it; files beyond that are named with their hash.
const MOST_RAW_BYTES: usize = 2_000_000;
/// Rows of one picture of times.
const MOST_ROWS: usize = 24;

const PAGE_STYLE: &str = include_str!("page.css");
/// Changes colours, and marks the page when everything in it is there.
const SCRIPT: &str = include_str!("page.js");

/// The page.
pub fn html(sources: &Sources) -> String {
    let mut page = Page::default();
    page.section("verdicts", "Verdicts", &summary(sources), &tables::verdicts(sources));
    page.section(
        "times",
        "Times",
        "Each dot is a run; the bar is the median, the line spans the 10th to the 90th percentile.",
        &times(sources),
    );
    page.section("roofline", "Roofline", "Peak rates of the machine, and what was measured.", &rooflines(sources));
    let ladders: String = sources.ladders.iter().map(|(_, ladder)| figure(&charts::waterfall(ladder))).collect();
    page.section(
        "ladder",
        "Ladder",
        "What each step gained. Struck through: steps without gain, or with wrong results.",
        &ladders,
    );
    page.section(
        "leaders",
        "Leaders and experiments",
        "The best verified times, and the experiments.",
        &leaders(sources),
    );
    let errors: String = sources.errors.iter().map(|map| figure(&charts::heat(map))).collect();
    page.section("errors", "Error map", "The largest error of a weight, by tile of queries and tile of keys.", &errors);
    page.section(
        "profile",
        "Profile",
        "Counters of the hardware and of the simulator, and the gates.",
        &tables::profiles(sources),
    );
    let resources = if sources.resources.is_empty() { String::new() } else { tables::resources(sources) };
    page.section("resources", "Resources", "Registers, shared memory and spills of the kernels, by ptxas.", &resources);
    page.section(
        "environment",
        "Environment",
        "The machine, the build and the command of each record.",
        &tables::environment(sources),
    );
    let title = escape(&sources.title);
    let (links, body, raw) = (page.links, page.body, raw(sources));
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<link rel=\"icon\" href=\"data:,\">\n<title>{title}</title>\n\
         <style>{}{PAGE_STYLE}</style>\n</head>\n<body>\n<header><h1>{title}</h1><button id=\"theme\" type=\"button\">light / dark</button></header>\n\
         <nav>{links}</nav>\n{body}{raw}<script>{SCRIPT}</script>\n</body>\n</html>\n",
        style()
    )
}

#[derive(Default)]
struct Page {
    links: String,
    body: String,
}

impl Page {
    /// A section, if there is anything in it.
    fn section(&mut self, id: &str, title: &str, lead: &str, content: &str) {
        if content.is_empty() {
            return;
        }
        // Writing to a string cannot fail.
        let _ = write!(self.links, "<a href=\"#{id}\">{title}</a>");
        let _ = writeln!(
            self.body,
            "<section id=\"{id}\"><h2>{title}</h2><p class=\"lead\">{lead}</p>\n{content}</section>"
        );
    }
}

fn figure(svg: &crate::svg::Svg) -> String {
    format!("<figure>{}</figure>\n", svg.inline())
}

fn summary(sources: &Sources) -> String {
    let rows: Vec<&Measurement> = sources.measurements.iter().flat_map(|(_, record)| &record.content.rows).collect();
    let wrong = rows.iter().filter(|row| !row.verified.passed).count();
    let compared: usize = sources.comparisons.iter().map(|(_, record)| record.content.rows.len()).sum();
    format!(
        "{} problems measured, {wrong} of them with wrong results; {compared} compared. Every output was verified against plain loops in f64 before it was timed.",
        rows.len()
    )
}

fn times(sources: &Sources) -> String {
    let mut text = String::new();
    for (_, record) in &sources.measurements {
        let rows: Vec<&Measurement> = record.content.rows.iter().collect();
        for rows in rows.chunks(MOST_ROWS) {
            text += &figure(&charts::distributions(rows));
        }
    }
    for (_, record) in &sources.comparisons {
        text += &figure(&charts::intervals(&record.content));
    }
    text
}

fn leaders(sources: &Sources) -> String {
    let mut text = tables::leaders(sources);
    // A place that has had one leader has no history yet.
    let mut places = sources.leaderboard.places();
    places.retain(|place| sources.leaderboard.history(place).len() > 1);
    if !places.is_empty() {
        text += &figure(&leaderboard::plot(&sources.leaderboard, &places));
    }
    text
}

/// A picture for each machine and element type.
fn rooflines(sources: &Sources) -> String {
    let mut text = String::new();
    for (_, record) in &sources.measurements {
        let Some(device) = roof(&record.origin.machine) else { continue };
        let mut dtypes: Vec<&str> = record.content.rows.iter().map(|row| row.problem.dtype.as_str()).collect();
        dtypes.sort_unstable();
        dtypes.dedup();
        for dtype in dtypes.into_iter().filter_map(|dtype| dtype.parse::<DType>().ok()) {
            let of_type = record.content.rows.iter().filter(|row| row.problem.dtype == dtype.to_string());
            let points: Vec<MeasuredPoint> = of_type
                .filter_map(|row| {
                    let problem = row.problem.problem().ok()?;
                    Some(MeasuredPoint { problem, kernel: row.kernel.clone(), seconds: row.median() })
                })
                .collect();
            let problems: Vec<Problem> = points.iter().map(|point| point.problem.clone()).collect();
            text += &figure(&plot(&device, dtype, &problems, &points));
        }
    }
    text
}

/// The machine of a record as a device with roofs.
fn roof(machine: &Machine) -> Option<RoofDevice> {
    let ceilings = machine.ceilings?;
    let known = RoofDevice::table().into_iter().find(|device| device.name == machine.device);
    Some(RoofDevice {
        key: machine.device.clone(),
        name: machine.device.clone(),
        source: "as recorded".to_owned(),
        tensor_flops: ceilings.flops,
        vector_flops: ceilings.flops,
        dram_bytes: ceilings.bytes,
        l2_bytes: known.as_ref().map_or(f64::INFINITY, |device| device.l2_bytes),
        l2_size: known.map_or(0.0, |device| device.l2_size),
        exponentials: ceilings.exponentials,
        launch_seconds: None,
    })
}

/// Everything as it was read, for programs.
fn raw(sources: &Sources) -> String {
    let mut text = String::from(
        "<section id=\"raw\"><h2>Raw data</h2><p class=\"lead\">This file contains the records of everything above.</p>\n<ul>\n",
    );
    let mut left = MOST_RAW_BYTES;
    let mut embedded = String::new();
    for (index, (file, raw)) in sources.raw.iter().enumerate() {
        let (name, hash) = (escape(file), sha256(raw.as_bytes()));
        if raw.len() <= left {
            left -= raw.len();
            // The only way out of such an element.
            let safe = raw.replace("</", "<\\/");
            let _ = writeln!(
                embedded,
                "<script type=\"application/json\" id=\"raw-{index}\" data-file=\"{name}\">{safe}</script>"
            );
            let _ = writeln!(text, "<li>{name}: element <code>raw-{index}</code>, SHA-256 {hash}</li>");
        } else {
            let _ = writeln!(text, "<li>{name}: too large for a page, {} bytes, SHA-256 {hash}</li>", raw.len());
        }
    }
    text + "</ul></section>\n" + &embedded
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Measurements, Origin, Record};

    fn sources() -> Sources {
        let mut row = Measurement::for_tests("1x8x512x64", 1e-3);
        row.kernel = "</script><b>kernel".to_owned();
        let mut origin = Origin::for_tests();
        origin.machine.ceilings =
            Some(crate::floor::Ceilings { flops: 1e12, bytes: f64::INFINITY, exponentials: f64::INFINITY });
        let record = Record::new(origin, Measurements { rows: vec![row] });
        Sources {
            title: "Test & more".to_owned(),
            raw: vec![
                ("bench.json".to_owned(), record.to_json()),
                ("large.json".to_owned(), "1".repeat(MOST_RAW_BYTES)),
            ],
            measurements: vec![("bench.json".to_owned(), record)],
            ladders: vec![("ladder.json".to_owned(), super::super::ladder::example())],
            ..Sources::default()
        }
    }

    #[test]
    fn a_page_has_what_there_is_and_nothing_else() {
        let page = html(&sources());
        assert!(page.len() < MOST_BYTES);
        let count = |text: &str| page.matches(text).count();
        // Times, roofline and ladder; no experiments, no errors, no resources.
        assert_eq!((count("<figure><svg"), count("</svg></figure>")), (3, 0));
        assert_eq!(count("</svg>\n</figure>"), 3);
        assert_eq!(
            ["times", "ladder", "errors", "resources"].map(|id| count(&format!("<section id=\"{id}\">"))),
            [1, 1, 0, 0]
        );
        // Nothing of the data is taken for HTML, and the file that is too large is named.
        assert_eq!(count("<b>kernel"), count(r"<\/script><b>kernel"));
        assert_eq!(count("large.json: too large for a page, 2000000 bytes"), 1);
        assert_eq!(count("<title>Test &amp; more</title>"), 1);
        // Nothing is fetched: no address of the network but the name of the vector format.
        assert_eq!(count("http"), count("http://www.w3.org/2000/svg"));
    }
}
