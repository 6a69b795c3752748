//! Shows a record of the peers script: flashcore beside other libraries.

use std::fs;
use std::path::Path;

use flashcore_bench::util::printable::printable;
use serde_json::Value;

use crate::output::{Cell, Format, Output, Table, column};
use crate::{Ending, Failure};

/// The version of the form that the script writes; others are refused.
const SCHEMA: u64 = 1;

/// Shows a record of the peers script: flashcore beside other libraries, from one run.
pub(super) fn show_peers(output: &Output, file: &Path, format: Format) -> Result<Ending, Failure> {
    let unreadable = |reason: String| Failure::Usage(format!("{}: {reason}", file.display()));
    let text = fs::read_to_string(file).map_err(|error| unreadable(error.to_string()))?;
    let record: Value = serde_json::from_str(&text).map_err(|error| unreadable(error.to_string()))?;
    match record["schema"].as_u64() {
        Some(SCHEMA) => {}
        other => return Err(unreadable(format!("its schema is {other:?}; this command reads {SCHEMA}"))),
    }
    let rows = record["rows"].as_array().ok_or_else(|| unreadable("it has no rows".to_owned()))?;
    let peers: Vec<&str> = record["peers"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    if matches!(format, Format::Table | Format::Markdown) {
        let machine = &record["machine"];
        output.line(format!(
            "{}; {}; medians of graph replays, interleaved in one process; every output checked against f64",
            printable(machine["device"].as_str().unwrap_or("unknown device")),
            printable(machine["software"].as_str().unwrap_or("unknown software")),
        ))?;
    }
    let mut table = Table::new(&[
        column("shape", "shape"),
        column("dtype", "dtype"),
        column("mask", "mask"),
        column("flashcore us", "flashcore_us"),
        column("TFLOP/s", "tflops_per_s"),
        column("best peer", "best_peer"),
        column("best peer us", "best_peer_us"),
        column("peer / flashcore", "peer_over_flashcore"),
        column("other peers us", "other_peers_us").minor(),
    ]);
    let mut logarithms = Vec::new();
    for row in rows {
        let time = |name: &str| row["microseconds"][name].as_f64();
        let Some(ours) = time("flashcore") else { continue };
        let best = peers
            .iter()
            .filter_map(|peer| time(peer).map(|time| (*peer, time)))
            .min_by(|one, other| one.1.total_cmp(&other.1));
        let Some((best, best_time)) = best else { continue };
        logarithms.push((best_time / ours).ln());
        let others: Vec<String> = peers
            .iter()
            .filter(|peer| **peer != best)
            .filter_map(|peer| time(peer).map(|time| format!("{peer} {time:.2}")))
            .collect();
        table.push(vec![
            Cell::from(row["shape"].as_str().unwrap_or("")),
            Cell::from(row["dtype"].as_str().unwrap_or("")),
            Cell::from(row["mask"].as_str().unwrap_or("")),
            Cell::number(ours, 2),
            Cell::number(row["flops"].as_f64().unwrap_or(f64::NAN) / ours / 1e6, 1),
            Cell::from(best),
            Cell::number(best_time, 2),
            Cell::number(best_time / ours, 2),
            Cell::from(others.join(", ")),
        ]);
    }
    output.table(&table, format)?;
    if matches!(format, Format::Table | Format::Markdown) && !logarithms.is_empty() {
        let mean = (logarithms.iter().sum::<f64>() / logarithms.len() as f64).exp();
        output.line(format!("geometric mean of peer / flashcore: {mean:.3}"))?;
    }
    Ok(Ending::Well)
}
