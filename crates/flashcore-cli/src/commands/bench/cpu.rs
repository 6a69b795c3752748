//! Times of the CPU backend.

use std::time::Duration;

use flashcore_bench::digest::{sha256, sha256_of_numbers};
use flashcore_bench::floor::{Ceilings, Work};
use flashcore_bench::record::{Machine, Measurement, Measurements, ProblemKey, Verified};
use flashcore_bench::timing::time_cpu;
use flashcore_bench::verify::{NoVerdict, Yardstick, verify_with};
use flashcore_bench::{Backend, Case, mask_text, shape_text};
use flashcore_cpu::Level;
use flashcore_problem::{DType, Problem};

use super::super::origin::write_record;
use super::Bench;
use crate::output::{Cell, Output, Table};
use crate::{Ending, Failure, interrupt};

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
        if interrupt::requested() {
            ending = Ending::Interrupted;
            break;
        }
        output.progress(index, problems.len(), &shape_text(problem));
        let case = Case::new(problem.clone(), 0, Backend::Cpu(level));
        let yardstick = Yardstick::of(&case).map_err(|error| match error {
            NoVerdict::Impossible(error) => super::super::impossible(error),
            error => Failure::Usage(error.to_string()),
        })?;
        let outcome = verify_with(&case, &yardstick, None);
        let verdict = match &outcome.verdict {
            Ok(verdict) if verdict.passed() => verdict,
            _ => {
                ending = Ending::Failed;
                output.complain(&format!("{case}: {}", outcome.complaints().join("; ")));
                continue;
            }
        };
        let (times, outputs) = time_cpu(problem, yardstick.inputs(), Duration::from_secs_f64(bench.seconds))
            .map_err(|error| Failure::Usage(error.to_string()))?;
        let median = times.quantile(0.5);
        let work = Work::of(problem);
        let flops = bf16_peak.filter(|_| problem.dtype == DType::Bf16).unwrap_or(peak);
        // These problems stay in the caches, and a processor's exponentials are arithmetic.
        let ceilings = Ceilings { flops, bytes: f64::INFINITY, exponentials: f64::INFINITY };
        let (floor, bound) = ceilings.floor(work);
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
        rows.push(Measurement {
            kernel: level.to_string(),
            problem: ProblemKey::of(problem),
            seed: 0,
            verified: Verified::of(verdict),
            output_sha256: Some(sha256(&outputs.output.data)),
            work,
            floor_seconds: floor,
            bound,
            samples_sha256: sha256_of_numbers(&times.seconds),
            hot_seconds: times.seconds,
            cold_seconds: Vec::new(),
        });
    }
    output.table(&table, bench.format)?;
    if let Some(file) = &bench.record {
        let ceilings = Ceilings { flops: peak, bytes: f64::INFINITY, exponentials: f64::INFINITY };
        write_record(file, Machine::cpu(&level.to_string(), threads, Some(ceilings)), Measurements { rows })?;
    }
    Ok(ending)
}
