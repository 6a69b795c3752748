//! Times of the CPU backend.

use std::time::Duration;

use flashcore_bench::floor::{Ceilings, Work};
use flashcore_bench::timing::time_cpu;
use flashcore_bench::verify::{Yardstick, verify_with};
use flashcore_bench::{Backend, Case, mask_text, shape_text};
use flashcore_cpu::Level;
use flashcore_problem::{DType, Problem};
use serde_json::json;

use super::{Bench, record};
use crate::output::{Cell, Output, Table};
use crate::{Ending, Failure};

pub(super) fn run(bench: &Bench, output: &mut Output, problems: &[Problem]) -> Result<Ending, Failure> {
    let level = Level::default_level().map_err(|error| Failure::Environment(error.to_string()))?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let peak = flashcore_cpu::measured_peak(threads);
    let has_bf16 = problems.iter().any(|problem| problem.dtype == DType::Bf16);
    let bf16_peak = has_bf16.then(|| flashcore_cpu::measured_peak_of(level, DType::Bf16, threads));
    if bench.is_for_people() {
        let in_bf16 = bf16_peak.map_or(String::new(), |peak| format!(", {:.0} for problems in bf16", peak / 1e9));
        output.line(format!(
            "cpu, level {level}, {threads} threads, measured peak {:.0} GFLOP/s in f32 multiply-adds{in_bf16}; verified, then timed",
            peak / 1e9
        ))?;
    }
    let mut table = Table::new(&[
        "shape",
        "dtype",
        "mask",
        "verdict",
        "p50 ms",
        "p90 ms",
        "p99 ms",
        "mean ms",
        "std ms",
        "runs",
        "GFLOP/s",
        "floor ms",
        "% of floor",
    ]);
    let mut rows = Vec::new();
    let mut ending = Ending::Well;
    for (index, problem) in problems.iter().enumerate() {
        output.progress(index, problems.len(), &shape_text(problem));
        let case = Case::new(problem.clone(), 0, Backend::Cpu(level));
        let yardstick = Yardstick::new(problem, case.inputs()).map_err(|error| Failure::Usage(error.to_string()))?;
        let outcome = verify_with(&case, &yardstick, None);
        if !outcome.passed() {
            ending = Ending::Failed;
            output.complain(&format!("{case}: {}", outcome.complaints().join("; ")));
            continue;
        }
        let times = time_cpu(problem, yardstick.inputs(), Duration::from_secs_f64(bench.seconds))
            .map_err(|error| Failure::Usage(error.to_string()))?;
        let median = times.quantile(0.5);
        let work = Work::of(problem);
        let flops = bf16_peak.filter(|_| problem.dtype == DType::Bf16).unwrap_or(peak);
        // These problems stay in the caches, and a processor's exponentials are arithmetic.
        let ceilings = Ceilings { flops, bytes: f64::INFINITY, exponentials: f64::INFINITY };
        let (floor, _) = ceilings.floor(work);
        table.push(vec![
            Cell::from(shape_text(problem)),
            Cell::from(problem.dtype.to_string()),
            Cell::from(mask_text(problem.mask)),
            Cell::from("passed"),
            Cell::number(median * 1e3, 3),
            Cell::number(times.quantile(0.9) * 1e3, 3),
            Cell::number(times.quantile(0.99) * 1e3, 3),
            Cell::number(times.mean() * 1e3, 3),
            Cell::number(times.deviation() * 1e3, 3),
            Cell::number(times.seconds.len() as f64, 0),
            Cell::number(work.flops / median / 1e9, 1),
            Cell::number(floor * 1e3, 3),
            Cell::number(100.0 * floor / median, 1),
        ]);
        rows.push(json!({
            "shape": shape_text(problem), "dtype": problem.dtype.to_string(), "mask": mask_text(problem.mask),
            "verdict": "passed", "work": work, "floor_seconds": floor, "seconds": times.seconds,
        }));
    }
    output.table(&table, bench.format)?;
    if let Some(file) = &bench.record {
        record::write(
            file,
            &json!({
                "backend": "cpu", "level": level.to_string(), "threads": threads, "measured_peak_flops": peak,
                "measured_bf16_peak_flops": bf16_peak,
            }),
            &rows,
        )?;
    }
    Ok(ending)
}
