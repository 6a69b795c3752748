//! Times on a GPU.

use flashcore_bench::floor::Work;
use flashcore_bench::gpu::{Gpu, GpuTimes};
use flashcore_bench::{mask_text, shape_text};
use flashcore_problem::{Inputs, Problem};
use serde_json::json;

use super::{Bench, record};
use crate::output::{Cell, Output, Table};
use crate::{Ending, Failure};

pub(super) fn run(bench: &Bench, output: &mut Output, gpu: &Gpu, problems: &[Problem]) -> Result<Ending, Failure> {
    let config = bench.kernel.as_deref().map(super::super::config).transpose()?;
    let ceilings = gpu.ceilings().map_err(|error| Failure::Environment(error.to_string()))?;
    if bench.is_for_people() {
        output.line(format!(
            "{}; ceilings: {:.0} TFLOP/s by clock, {:.2} TB/s by a copy; verified, then timed",
            gpu.device(),
            ceilings.flops / 1e12,
            ceilings.bytes / 1e12
        ))?;
    }
    let mut table = Table::new(&[
        "kernel",
        "shape",
        "dtype",
        "mask",
        "verdict",
        "p50 us",
        "p90 us",
        "p99 us",
        "mean us",
        "std us",
        "cold us",
        "TFLOP/s",
        "GB/s",
        "floor us",
        "bound by",
        "% of floor",
    ]);
    let mut rows = Vec::new();
    let mut ending = Ending::Well;
    for (index, problem) in problems.iter().enumerate() {
        output.progress(index, problems.len(), &shape_text(problem));
        let inputs = Inputs::random(problem, index as u64);
        let times = match gpu.time(problem, config, &inputs) {
            Ok(Ok(times)) => times,
            Ok(Err(verdict)) => {
                ending = Ending::Failed;
                output.complain(&format!("{}: {verdict}", shape_text(problem)));
                continue;
            }
            Err(error) => {
                ending = Ending::Failed;
                output.complain(&format!("{}: {error}", shape_text(problem)));
                continue;
            }
        };
        let GpuTimes { hot, cold } = &times;
        let median = hot.quantile(0.5);
        let work = Work::of(problem);
        let (floor, bound) = ceilings.floor(work);
        let kernel = config.map_or_else(|| "default".to_owned(), |config| config.to_string());
        table.push(vec![
            Cell::from(kernel.as_str()),
            Cell::from(shape_text(problem)),
            Cell::from(problem.dtype.to_string()),
            Cell::from(mask_text(problem.mask)),
            Cell::from("passed"),
            Cell::number(median * 1e6, 2),
            Cell::number(hot.quantile(0.9) * 1e6, 2),
            Cell::number(hot.quantile(0.99) * 1e6, 2),
            Cell::number(hot.mean() * 1e6, 2),
            Cell::number(hot.deviation() * 1e6, 2),
            Cell::number(cold.quantile(0.5) * 1e6, 2),
            Cell::number(work.flops / median / 1e12, 1),
            Cell::number(work.bytes / median / 1e9, 0),
            Cell::number(floor * 1e6, 2),
            Cell::from(bound.to_string()),
            Cell::number(100.0 * floor / median, 1),
        ]);
        rows.push(json!({
            "kernel": kernel, "shape": shape_text(problem), "dtype": problem.dtype.to_string(),
            "mask": mask_text(problem.mask), "verdict": "passed", "work": work, "floor_seconds": floor,
            "hot_seconds": hot.seconds, "cold_seconds": cold.seconds,
        }));
    }
    output.table(&table, bench.format)?;
    if let Some(file) = &bench.record {
        let machine = json!({
            "backend": "cuda", "device": gpu.device().to_string(), "ceilings": ceilings, "state": record::gpu_state(),
        });
        record::write(file, &machine, &rows)?;
    }
    Ok(ending)
}
