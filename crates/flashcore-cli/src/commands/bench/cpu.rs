//! Times of the CPU backend.

use std::time::Duration;

use flashcore_bench::floor::{Ceilings, Work};
use flashcore_bench::lab::peak::{Peak, working_threads};
use flashcore_bench::lab::record::{Machine, Measurement, Measurements, ProblemKey, Verified};
use flashcore_bench::testkit::verify::{NoVerdict, Yardstick, verify_with};
use flashcore_bench::testkit::{Backend, Case, Workload};
use flashcore_bench::timing::{measured_cpu_bandwidth, time_cpu};
use flashcore_bench::util::digest::{sha256, sha256_of_numbers};
use flashcore_cpu::Level;
use flashcore_problem::DType;

use super::super::origin::write_record;
use super::{Bench, measure_each};
use crate::output::{Cell, Output, PROBLEM, Table, column, recorded_cells};
use crate::{Ending, Failure};

pub(super) fn run(bench: &Bench, output: &mut Output, problems: &[Workload]) -> Result<Ending, Failure> {
    let level = Level::default_level().map_err(|error| Failure::Environment(error.to_string()))?;
    let threads = working_threads();
    let mut peak = Peak::of_cpu(level, DType::F32);
    let is_bf16 = |problem: &Workload| problem.dtypes().to_string() == DType::Bf16.to_string();
    let has_bf16 = problems.iter().any(is_bf16);
    let mut bf16_peak = has_bf16.then(|| Peak::of_cpu(level, DType::Bf16));
    let mut pass = measure_each(output, problems, |_, problem| {
        let of_problem = Case::new(problem.problem.clone(), 0, Backend::Cpu(level));
        let case = Case { lengths: bench.lengths(), scales: problem.scales, ..of_problem };
        let yardstick = Yardstick::of(&case).map_err(|error| match error {
            NoVerdict::Impossible(error) => super::super::impossible(error),
            error => Failure::Usage(error.to_string()),
        })?;
        let outcome = verify_with(&case, &yardstick, None);
        let verdict = match &outcome.verdict {
            Ok(verdict) if verdict.passed() => verdict,
            _ => return Ok(Err(format!("{case}: {}", outcome.complaints().join("; ")))),
        };
        let (times, outputs) = time_cpu(problem, yardstick.inputs(), Duration::from_secs_f64(bench.seconds))
            .map_err(|error| Failure::Usage(error.to_string()))?;
        let work = Work::of_inputs(problem, yardstick.inputs());
        let peak = bf16_peak.as_mut().filter(|_| is_bf16(problem)).unwrap_or(&mut peak);
        // Between two problems the machine may be quieter than before the first.
        peak.look();
        let (floor, bound) = peak.floor_below(work, times.quantile(0.5));
        Ok(Ok(Measurement {
            kernel: level.to_string(),
            problem: ProblemKey::of_workload(problem),
            seed: 0,
            verified: Verified::of(verdict),
            output_sha256: Some(sha256(&outputs.output.data)),
            work,
            floor_seconds: floor,
            bound,
            samples_sha256: sha256_of_numbers(&times.seconds),
            hot_seconds: times.seconds,
            cold_seconds: Vec::new(),
            launch_seconds: None,
        }))
    })?;
    // All floors come from the highest peak, which may have been seen last.
    for row in &mut pass.rows {
        let is_bf16 = row.problem.dtype == DType::Bf16.to_string();
        let peak = bf16_peak.as_ref().filter(|_| is_bf16).unwrap_or(&peak);
        (row.floor_seconds, row.bound) = peak.ceilings().floor(row.work);
    }
    if bench.is_for_people() {
        let in_bf16 = bf16_peak.as_ref().map_or(String::new(), |peak| format!(", {:.0} in bf16", peak.flops() / 1e9));
        let plural = if threads == 1 { "" } else { "s" };
        output.sentence(format!(
            "cpu, level {level}, {threads} thread{plural}, measured peak {:.0} GFLOP/s in f32{in_bf16}; \
             every problem verified, then timed",
            peak.flops() / 1e9
        ))?;
    }
    bench.show(output, &table(&pass.rows), &pass, "measured")?;
    for row in pass.rows.iter().filter(|row| row.is_below_floor(0.0)) {
        output.note(&format!(
            "{}: p50 is {:.3} ms and the floor is {:.3} ms, so the measured peak is too low and no efficiency is shown; \
             measure again when less runs on this machine",
            row.problem,
            row.median() * 1e3,
            row.floor_seconds * 1e3
        ));
    }
    if let Some(file) = &bench.record {
        // These problems stay in the caches, so memory is in no floor; a roofline shows it.
        let ceilings = Ceilings { bytes: measured_cpu_bandwidth(threads), ..peak.ceilings() };
        let machine = Machine::cpu(&level.to_string(), threads, Some(ceilings));
        write_record(file, machine, Measurements { rows: pass.rows })?;
    }
    Ok(pass.ending)
}

fn table(timed: &[Measurement]) -> Table {
    let columns = [
        column("verdict", "verdict").verdict(),
        column("p50 ms", "p50_ms"),
        column("p90 ms", "p90_ms").minor(),
        column("p99 ms", "p99_ms").minor(),
        column("mean ms", "mean_ms").minor(),
        column("std ms", "std_ms").minor(),
        column("runs", "runs").minor(),
        column("GFLOP/s", "gflops_per_s"),
        column("floor ms", "floor_ms"),
        column("efficiency %", "efficiency_percent"),
    ];
    let mut table = Table::new(&[&PROBLEM[..], &columns].concat());
    for row in timed {
        let (hot, median) = (row.hot(), row.median());
        let times = [0.5, 0.9, 0.99].map(|quantile| Cell::number(hot.quantile(quantile) * 1e3, 3));
        let mut cells = recorded_cells(&row.problem);
        cells.push(Cell::from("passed"));
        cells.extend(times);
        cells.extend([
            Cell::number(hot.mean() * 1e3, 3),
            Cell::number(hot.deviation() * 1e3, 3),
            Cell::from(hot.seconds.len()),
            Cell::number(row.work.flops / median / 1e9, 1),
            Cell::precise(row.floor_seconds * 1e3, 3),
            Cell::figure(row.efficiency_percent(), 1),
        ]);
        table.push(cells);
    }
    table
}
