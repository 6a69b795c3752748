//! The page of the report.

use core::fmt::Write;

use flashcore_problem::{DTypes, Problem};

use super::{Sources, charts, tables};
use crate::lab::leaderboard;
use crate::lab::record::{Machine, Measurement};
use crate::lab::roofline::{MeasuredPoint, RoofDevice, plot};
use crate::lab::svg::{escape, style};
use crate::util::digest::sha256;

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
    page.section(
        "peers",
        "Beside others",
        "Times of other programs over ours, from the same run; above 1, ours is faster.",
        &beside_others(sources),
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
    page.section(
        "verification",
        "Verification",
        "Results judged against plain loops in f64, and the simulator against a GPU.",
        &tables::verifications(sources),
    );
    page.section(
        "accuracy",
        "Accuracy",
        "Errors of element types against f64 on inputs that were not rounded.",
        &tables::accuracy(sources),
    );
    page.section(
        "microbench",
        "Microbenchmarks",
        "Throughput of the instructions that kernels choose between.",
        &tables::microbenchmarks(sources),
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

fn figure(svg: &crate::lab::svg::Svg) -> String {
    format!("<figure>{}</figure>\n", svg.inline())
}

fn summary(sources: &Sources) -> String {
    let rows: Vec<&Measurement> = sources.measurements.iter().flat_map(|(_, record)| &record.content.rows).collect();
    let wrong = rows.iter().filter(|row| !row.verified.passed).count();
    let compared: usize = sources.comparisons.iter().map(|(_, record)| record.content.rows.len()).sum();
    if rows.is_empty() && compared == 0 {
        return String::new();
    }
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

fn beside_others(sources: &Sources) -> String {
    let mut text = String::new();
    for (file, peers) in &sources.peers {
        text += &tables::peers(file, peers);
        for rows in peers.rows.chunks(MOST_ROWS) {
            text += &figure(&charts::ratios(peers, rows));
        }
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
        for dtype in dtypes.into_iter().filter_map(|dtype| dtype.parse::<DTypes>().ok()) {
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
        // The architecture of a record says whether there are such units, and no kernel without them is in it.
        fp8_flops: (machine.backend == "cuda").then_some(2.0 * ceilings.flops),
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
            // In such an element `<!--` and `<script` mean something too, and not only `</script`. In JSON the sign stands
            // in strings alone.
            let safe = raw.replace('<', "\\u003c");
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
    use crate::lab::record::{Measurements, Origin, Record};

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
        assert_eq!(count("<b>kernel"), 0);
        assert_eq!(count(r"\u003c/script>\u003cb>kernel"), 1);
        assert_eq!(count("large.json: too large for a page, 2000000 bytes"), 1);
        assert_eq!(count("<title>Test &amp; more</title>"), 1);
        // Nothing is fetched: no address of the network but the name of the vector format.
        assert_eq!(count("http"), count("http://www.w3.org/2000/svg"));
    }

    /// The contents of the script elements of a page, as browsers find them ("script data" and its states in the HTML
    /// standard, 13.2.5): after `<!--`, a `<script` makes the next `</script` a part of the text.
    fn scripts(page: &str) -> Vec<&str> {
        let page_lower = page.to_ascii_lowercase();
        let tag = |at: usize, name: &str| {
            let rest = page_lower[at..].strip_prefix(name)?;
            rest.starts_with(['>', ' ', '/', '\n', '\t']).then_some(())
        };
        let mut found = Vec::new();
        let mut place = 0;
        while let Some(open) = page_lower[place..].find("<script").map(|open| place + open) {
            let start = open + page[open..].find('>').expect("the end of the tag") + 1;
            let (mut is_comment, mut is_double, mut at) = (false, false, start);
            while at < page.len() {
                let rest = &page_lower[at..];
                if !is_comment && rest.starts_with("<!--") {
                    // `<!-->` and `<!--->` end at once.
                    is_comment = true;
                    at += 2;
                } else if is_comment && rest.starts_with("-->") {
                    (is_comment, is_double) = (false, false);
                } else if is_comment && !is_double && tag(at, "<script").is_some() {
                    is_double = true;
                } else if is_double && tag(at, "</script").is_some() {
                    is_double = false;
                } else if tag(at, "</script").is_some() {
                    break;
                }
                at += 1;
            }
            found.push(&page[start..at.min(page.len())]);
            place = at;
        }
        found
    }

    #[test]
    fn no_text_of_a_record_ends_or_swallows_a_script() {
        // The parser itself: what was swallowed before.
        let swallowed = "<script a>[\"<!--<script>\"]</script><script>own</script>";
        assert_eq!(scripts(swallowed), ["[\"<!--<script>\"]</script><script>own</script>"]);
        assert_eq!(scripts("<script>a</script><p><SCRIPT b>c<!-- </script >"), ["a", "c<!-- "]);
        for text in [
            "<!--<script>",
            "<!--<script ",
            "<!--<SCRIPT/",
            "--><!--<script>-->",
            "</script><script>alert(1)</script>",
            "</SCRIPT >",
            "]]><![CDATA[",
            "<\u{0}script>",
        ] {
            let mut sources = sources();
            sources.raw.truncate(1);
            let mut record = sources.measurements.remove(0).1;
            record.content.rows[0].kernel = text.to_owned();
            record.origin.machine.device = text.to_owned();
            record.origin.command = text.to_owned();
            (sources.raw[0].0, sources.raw[0].1) = (text.to_owned(), record.to_json());
            sources.title = text.to_owned();
            sources.measurements = vec![(text.to_owned(), record.clone())];
            let page = html(&sources);
            let found = scripts(&page);
            assert_eq!(found.len(), 2, "{text}");
            assert_eq!(found[1], SCRIPT, "{text}");
            let read = Record::<Measurements>::parse(found[0], "raw").expect("the record, as it was");
            assert_eq!(read, record, "{text}");
        }
    }
}
