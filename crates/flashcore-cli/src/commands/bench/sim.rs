//! Counters of the simulator, and its speed.

use flashcore_bench::lab::record::ProblemKey;
use flashcore_bench::testkit::verify::verify;
use flashcore_bench::testkit::{Backend, Case, Workload};

use super::{Bench, measure_each};
use crate::output::{Cell, Output, PROBLEM, Table, column, recorded_cells};
use crate::{Ending, Failure};

/// Each case is run under this many orders of warps.
const RUNS: f64 = 2.0;

pub(super) fn run(bench: &Bench, output: &Output, problems: &[Workload]) -> Result<Ending, Failure> {
    let named = bench.kernel.as_deref().map(super::super::config).transpose()?;
    // One shape says how fast the simulator is; a suite would take minutes.
    let problems = if bench.shape.is_empty() {
        let (first, others) = problems.split_at(problems.len().min(2));
        if !others.is_empty() {
            output.note(&format!(
                "the simulator runs the first shape of the suite; --shape takes others ({} problems left out)",
                others.len()
            ));
        }
        first
    } else {
        problems
    };
    let columns = [
        column("kernel", "kernel"),
        column("verdict", "verdict").verdict(),
        column("simulated s", "simulated_s"),
        column("warp instructions", "warp_instructions"),
        column("instructions/s", "instructions_per_s"),
        column("tensor GFLOP", "tensor_gflop").minor(),
        column("exponentials", "exponentials").minor(),
        column("global read MB", "global_read_mb").minor(),
        column("shared transactions per request", "shared_transactions_per_request").minor(),
        column("barriers", "barriers").minor(),
    ];
    let measure = |_: usize, problem: &Workload| {
        let config = named.unwrap_or_else(|| super::super::simulated_config(problem));
        let case = Case { scales: problem.scales, ..Case::new(problem.problem.clone(), 0, Backend::Sim(config)) };
        let outcome = verify(&case, None);
        let Some(counters) = outcome.counters.as_ref().filter(|_| outcome.passed()) else {
            return Ok(Err(format!("{case}: {}", outcome.complaints().join("; "))));
        };
        let seconds = outcome.duration.as_secs_f64() / RUNS;
        let instructions = counters.instructions_in_all();
        let mut cells = recorded_cells(&ProblemKey::of_workload(problem));
        cells.extend([
            Cell::from(config.to_string()),
            Cell::from("passed"),
            Cell::number(seconds, 2),
            Cell::from(instructions),
            Cell::number(instructions as f64 / seconds, 0),
            Cell::number(counters.tensor_flops as f64 / 1e9, 3),
            Cell::from(counters.exponentials),
            Cell::number(counters.global_loads.bytes as f64 / 1e6, 2),
            Cell::number(counters.transactions_per_request(), 2),
            Cell::from(counters.barriers),
        ]);
        Ok(Ok(cells))
    };
    measure_each(output, problems, measure, |pass| {
        let mut table = Table::new(&[&PROBLEM[..], &columns].concat());
        pass.rows.iter().for_each(|cells| table.push(cells.clone()));
        bench.show(output, &table, &pass, "simulated")?;
        Ok(pass.ending)
    })
}
