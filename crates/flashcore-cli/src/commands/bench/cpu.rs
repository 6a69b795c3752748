//! Times of the CPU backend.

use std::sync::Mutex;
use std::time::Duration;

use flashcore_bench::floor::{Ceilings, Work};
use flashcore_bench::lab::leaderboard::MOST_SPREAD;
use flashcore_bench::lab::load::{OtherLoad, most_others};
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
use crate::output::{Cell, Output, PROBLEM, Table, column, field, recorded_cells};
use crate::{Ending, Failure, interrupt};

/// Time to measure each problem for, where the command line does not say.
const SECONDS: f64 = 1.0;

/// The largest rates that were seen, in operations per second.
#[derive(Clone, Copy)]
struct Rates {
    f32: f64,
    bf16: Option<f64>,
}

impl Rates {
    /// The rate that a problem is measured against.
    fn of(self, is_bf16: bool) -> f64 {
        self.bf16.filter(|_| is_bf16).unwrap_or(self.f32)
    }
}

pub(super) fn run(bench: &Bench, output: &Output, problems: &[Workload]) -> Result<Ending, Failure> {
    let level = Level::default_level().map_err(|error| Failure::Environment(error.to_string()))?;
    let threads = working_threads();
    let is_bf16 = |types: &str| types == DType::Bf16.to_string();
    let has_bf16 = problems.iter().any(|problem| is_bf16(&problem.dtypes().to_string()));
    let bf16 = has_bf16.then(|| Peak::of_cpu(level, DType::Bf16).flops());
    let rates = Mutex::new(Rates { f32: Peak::of_cpu(level, DType::F32).flops(), bf16 });
    let load = OtherLoad::begin();
    let measure = |_: usize, problem: &Workload| {
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
        let load = OtherLoad::begin();
        let seconds = Duration::from_secs_f64(bench.seconds.unwrap_or(SECONDS));
        let (times, outputs) =
            time_cpu(problem, yardstick.inputs(), seconds).map_err(|error| Failure::Usage(error.to_string()))?;
        let other_cpus = load.cpus();
        let work = Work::of_inputs(problem, yardstick.inputs());
        let is_bf16 = is_bf16(&problem.dtypes().to_string());
        let known = interrupt::aside(&rates).of(is_bf16);
        let mut peak = Peak::known_of_cpu(known, level, if is_bf16 { DType::Bf16 } else { DType::F32 });
        // Between two problems the machine may be quieter than before the first.
        peak.look();
        let (floor, bound) = peak.floor_below(work, times.quantile(0.5));
        {
            let mut rates = interrupt::aside(&rates);
            let seen = if is_bf16 { rates.bf16.get_or_insert(0.0) } else { &mut rates.f32 };
            *seen = seen.max(peak.flops());
        }
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
            other_cpus,
        }))
    };
    measure_each(output, problems, measure, |mut pass| {
        let rates = *interrupt::aside(&rates);
        let ceilings = |flops| Ceilings { flops, bytes: f64::INFINITY, exponentials: f64::INFINITY };
        // All floors come from the highest peak, which may have been seen last.
        for row in &mut pass.rows {
            (row.floor_seconds, row.bound) = ceilings(rates.of(is_bf16(&row.problem.dtype))).floor(row.work);
        }
        if bench.is_for_people() {
            let in_bf16 = rates.bf16.map_or(String::new(), |rate| format!(", {:.0} in bf16", rate / 1e9));
            let plural = if threads == 1 { "" } else { "s" };
            output.sentence(format!(
                "cpu, level {level}, {threads} thread{plural}, measured peak of the level {:.0} GFLOP/s in f32{in_bf16}; \
                 every problem verified, then timed",
                rates.f32 / 1e9
            ))?;
        }
        bench.show(output, &table(&pass.rows, threads), &pass, "measured")?;
        note_load(output, &pass.rows, threads, load);
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
            // These problems stay in the caches, so memory is in no floor; a roofline shows it. After Ctrl-C there is no
            // time to measure it.
            let bytes = if interrupt::requested() { f64::INFINITY } else { measured_cpu_bandwidth(threads) };
            let machine = Machine::cpu(&level.to_string(), threads, Some(Ceilings { bytes, ..ceilings(rates.f32) }));
            write_record(file, machine, Measurements { rows: pass.rows })?;
        }
        Ok(pass.ending)
    })
}

/// Mark of a time that the machine disturbed, by the bounds of `leaderboard promote`.
fn disturbance(row: &Measurement, threads: usize) -> Option<&'static str> {
    match row.other_cpus {
        Some(others) if others > most_others(threads) => Some("LOADED"),
        _ if row.spread() > MOST_SPREAD => Some("NOISY"),
        _ => None,
    }
}

/// Says if other programs disturbed the times, which the table marks.
fn note_load(output: &Output, rows: &[Measurement], threads: usize, load: OtherLoad) {
    let marked = rows.iter().filter(|row| disturbance(row, threads).is_some()).count();
    let others = load.cpus().filter(|others| *others > most_others(threads));
    if marked == 0 && others.is_none() {
        return;
    }
    let why = others.map_or_else(
        || format!("half of the samples of a time spread over more than {:.0} % of it", 100.0 * MOST_SPREAD),
        |others| format!("other programs kept {others:.1} CPUs busy beside the {threads} that measured"),
    );
    output.note(&format!(
        "the machine was loaded: {why}; {marked} of {} times are marked, and the marked ones say little: measure again when \
         nothing else runs",
        rows.len()
    ));
}

fn table(timed: &[Measurement], threads: usize) -> Table {
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
        column("machine", "machine").verdict(),
        field("other_cpus"),
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
            Cell::from(disturbance(row, threads).unwrap_or("quiet")),
            Cell::figure(row.other_cpus, 2),
        ]);
        table.push(cells);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_bench::floor::Bound;

    #[test]
    fn a_disturbed_time_is_marked() {
        let row = |other_cpus, seconds: &[f64]| Measurement {
            kernel: "avx2".to_owned(),
            problem: ProblemKey { shape: "1x1x8x8".to_owned(), dtype: "f32".to_owned(), mask: "full".to_owned() },
            seed: 0,
            verified: Verified {
                passed: true,
                max_error: None,
                reference_max_error: None,
                relative_l2: None,
                complaints: vec![],
            },
            output_sha256: None,
            work: Work { flops: 1.0, bytes: 1.0, exponentials: 1.0 },
            floor_seconds: 1e-9,
            bound: Bound::Arithmetic,
            hot_seconds: seconds.to_vec(),
            cold_seconds: Vec::new(),
            launch_seconds: None,
            other_cpus,
            samples_sha256: String::new(),
        };
        let check = |other_cpus, seconds: &[f64], threads, expected| {
            assert_eq!(disturbance(&row(other_cpus, seconds), threads), expected);
        };
        let steady = [1.0; 8];
        check(Some(0.4), &steady, 2, None);
        check(Some(0.6), &steady, 2, Some("LOADED"));
        // Of sixteen threads a quarter may be taken.
        check(Some(3.9), &steady, 16, None);
        check(None, &steady, 2, None);
        check(None, &[1.0, 1.0, 1.0, 1.3, 1.3, 1.3], 2, Some("NOISY"));
    }
}
