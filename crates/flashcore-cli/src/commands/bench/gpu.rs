//! Times on a GPU.

use flashcore_bench::digest::sha256_of_numbers;
use flashcore_bench::floor::Work;
use flashcore_bench::gpu::{Gpu, GpuTimes};
use flashcore_bench::record::{Machine, Measurement, Measurements, ProblemKey, Verified};
use flashcore_bench::{mask_text, shape_text};
use flashcore_problem::{Inputs, Problem};

use super::super::origin::write_record;
use super::Bench;
use crate::output::{Cell, Output, Table};
use crate::{Ending, Failure, interrupt};

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
        if interrupt::requested() {
            ending = Ending::Interrupted;
            break;
        }
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
        let GpuTimes { hot, cold, kernel, verdict, output_sha256 } = &times;
        let median = hot.quantile(0.5);
        let work = Work::of(problem);
        let (floor, bound) = gpu.hot_floor(&ceilings, work);
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
        rows.push(Measurement {
            kernel: kernel.clone(),
            problem: ProblemKey::of(problem),
            seed: index as u64,
            verified: Verified::of(verdict),
            output_sha256: Some(output_sha256.clone()),
            work,
            floor_seconds: floor,
            bound,
            samples_sha256: sha256_of_numbers(&hot.seconds),
            hot_seconds: hot.seconds.clone(),
            cold_seconds: cold.seconds.clone(),
        });
    }
    output.table(&table, bench.format)?;
    if let Some(file) = &bench.record {
        let context = gpu.device().context();
        let device = context.ok_or_else(|| Failure::Environment("this is no GPU".to_owned()))?.device();
        write_record(file, Machine::gpu(device, Some(ceilings)), Measurements { rows })?;
    }
    Ok(ending)
}
