//! What the simulator counts, and how fast it is.

use flashcore_bench::verify::verify;
use flashcore_bench::{Backend, Case, mask_text, shape_text};
use flashcore_problem::Problem;

use super::Bench;
use crate::output::{Cell, Output, Table};
use crate::{Ending, Failure};

/// Each case is run under this many orders of warps.
const RUNS: f64 = 2.0;

pub(super) fn run(bench: &Bench, output: &mut Output, problems: &[Problem]) -> Result<Ending, Failure> {
    let config = super::super::config(bench.kernel.as_deref().unwrap_or("ampere"))?;
    // One problem says how fast the simulator is; a suite would take minutes.
    let problems = if bench.shape.is_none() { &problems[..2] } else { problems };
    let mut table = Table::new(&[
        "kernel",
        "shape",
        "dtype",
        "mask",
        "verdict",
        "simulated s",
        "warp instructions",
        "instructions/s",
        "tensor GFLOP",
        "exponentials",
        "global read MB",
        "shared transactions per request",
        "barriers",
    ]);
    let mut ending = Ending::Well;
    for (index, problem) in problems.iter().enumerate() {
        output.progress(index, problems.len(), &shape_text(problem));
        let case = Case::new(problem.clone(), 0, Backend::Sim(config));
        let outcome = verify(&case, None);
        let Some(counters) = outcome.counters.as_ref().filter(|_| outcome.passed()) else {
            ending = Ending::Failed;
            output.complain(&format!("{case}: {}", outcome.complaints().join("; ")));
            continue;
        };
        let seconds = outcome.duration.as_secs_f64() / RUNS;
        let instructions = counters.instructions_in_all();
        table.push(vec![
            Cell::from(config.to_string()),
            Cell::from(shape_text(problem)),
            Cell::from(problem.dtype.to_string()),
            Cell::from(mask_text(problem.mask)),
            Cell::from("passed"),
            Cell::number(seconds, 2),
            Cell::number(instructions as f64, 0),
            Cell::number(instructions as f64 / seconds, 0),
            Cell::number(counters.tensor_flops as f64 / 1e9, 3),
            Cell::number(counters.exponentials as f64, 0),
            Cell::number(counters.global_loads.bytes as f64 / 1e6, 2),
            Cell::number(counters.transactions_per_request(), 2),
            Cell::number(counters.barriers as f64, 0),
        ]);
    }
    output.table(&table, bench.format)?;
    Ok(ending)
}
