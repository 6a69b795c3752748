//! Times on a GPU.

use flashcore_bench::floor::Work;
use flashcore_bench::lab::record::{Machine, Measurement, Measurements, ProblemKey, Verified};
use flashcore_bench::testkit::Workload;
use flashcore_bench::testkit::gpu::{Gpu, GpuTimes};
use flashcore_bench::timing::Times;
use flashcore_bench::util::digest::sha256_of_numbers;

use super::super::origin::write_record;
use super::{Bench, measure_each};
use crate::output::{Cell, Output, PROBLEM, Table, column, recorded_cells};
use crate::{Ending, Failure, interrupt};

pub(super) fn run(bench: &Bench, output: &Output, gpu: &Gpu, problems: &[Workload]) -> Result<Ending, Failure> {
    let config = bench.kernel.as_deref().map(super::super::config).transpose()?;
    let ceilings = gpu.ceilings().map_err(|error| Failure::Environment(error.to_string()))?;
    if bench.is_for_people() {
        output.sentence(format!(
            "{}; peak {:.0} TFLOP/s by its clock, {:.2} TB/s measured by a copy; every problem verified, then timed",
            gpu.device(),
            ceilings.flops / 1e12,
            ceilings.bytes / 1e12
        ))?;
    }
    let columns = [
        column("kernel", "kernel"),
        column("verdict", "verdict").verdict(),
        column("p50 us", "p50_us"),
        column("p90 us", "p90_us").minor(),
        column("p99 us", "p99_us").minor(),
        column("mean us", "mean_us").minor(),
        column("std us", "std_us").minor(),
        column("cold us", "cold_us"),
        column("launch us", "launch_us"),
        column("TFLOP/s", "tflops_per_s"),
        column("GB/s", "gbytes_per_s").minor(),
        column("floor us", "floor_us"),
        column("bound by", "bound_by").minor(),
        column("efficiency %", "efficiency_percent"),
    ];
    let measure = |index: usize, problem: &Workload| {
        let inputs = problem.inputs_of_lengths(bench.lengths(), index as u64);
        let times = match gpu.time(problem, config, &inputs) {
            Ok(Ok(times)) => times,
            Ok(Err(verdict)) => return Ok(Err(format!("{}: {verdict}", problem.shape()))),
            Err(error) => return Ok(Err(format!("{}: {error}", problem.shape()))),
        };
        let GpuTimes { hot, cold, launch, kernel, verdict, output_sha256 } = &times;
        let (median, launch) = (hot.quantile(0.5), launch.quantile(0.5));
        let work = Work::of_inputs(problem, &inputs);
        let (floor, bound) = gpu.hot_floor(&ceilings.of_types(problem.dtypes()), work);
        let mut cells = recorded_cells(&ProblemKey::of_workload(problem));
        cells.extend([
            Cell::from(kernel.as_str()),
            Cell::from("passed"),
            Cell::number(median * 1e6, 2),
            Cell::number(hot.quantile(0.9) * 1e6, 2),
            Cell::number(hot.quantile(0.99) * 1e6, 2),
            Cell::number(hot.mean() * 1e6, 2),
            Cell::number(hot.deviation() * 1e6, 2),
            Cell::number(cold.quantile(0.5) * 1e6, 2),
            Cell::number(launch * 1e6, 2),
            Cell::number(work.flops / median / 1e12, 1),
            Cell::number(work.bytes / median / 1e9, 0),
            Cell::precise(floor * 1e6, 2),
            Cell::from(bound.to_string()),
            Cell::figure(Some(100.0 * floor / median).filter(|percent| *percent <= 100.0), 1),
        ]);
        let measurement = Measurement {
            kernel: kernel.clone(),
            problem: ProblemKey::of_workload(problem),
            seed: index as u64,
            verified: Verified::of(verdict),
            output_sha256: Some(output_sha256.clone()),
            work,
            floor_seconds: floor,
            bound,
            samples_sha256: sha256_of_numbers(&hot.seconds),
            hot_seconds: hot.seconds.clone(),
            cold_seconds: cold.seconds.clone(),
            launch_seconds: Some(launch),
            other_cpus: None,
        };
        Ok(Ok((cells, measurement)))
    };
    measure_each(output, problems, measure, |pass| {
        let mut table = Table::new(&[&PROBLEM[..], &columns].concat());
        pass.rows.iter().for_each(|(cells, _)| table.push(cells.clone()));
        bench.show(output, &table, &pass, "measured")?;
        if bench.is_for_people() && !pass.rows.is_empty() && !interrupt::requested() {
            let launches = Times { seconds: pass.rows.iter().filter_map(|(_, row)| row.launch_seconds).collect() };
            let empty = gpu.empty_launch().map_err(|error| Failure::Environment(error.to_string()))?;
            output.sentence(format!(
                "launch on the host: median {:.2} us, most {:.2} us; a kernel that does nothing takes {:.2} us",
                launches.quantile(0.5) * 1e6,
                launches.quantile(1.0) * 1e6,
                empty * 1e6
            ))?;
        }
        let ending = pass.ending;
        if let Some(file) = &bench.record {
            let rows = pass.rows.into_iter().map(|(_, measurement)| measurement).collect();
            let context = gpu.device().context();
            let device = context.ok_or_else(|| Failure::Environment("this device is not a GPU".to_owned()))?.device();
            write_record(file, Machine::gpu(device, Some(ceilings)), Measurements { rows })?;
        }
        Ok(ending)
    })
}
