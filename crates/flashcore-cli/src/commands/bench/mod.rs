//! `flashcore bench`: how fast is it?

use std::time::Duration;

use clap::{Args, ValueEnum};
use flashcore_bench::timing::{flops, time_cpu};
use flashcore_bench::verify::{Yardstick, verify, verify_with};
use flashcore_bench::{Backend, Case, mask_text, parse_shape, shape_text};
use flashcore_kernels::Config;
use flashcore_problem::{Alignment, DType, Mask, Problem};

use crate::output::{Cell, Format, Output, Table};
use crate::{Ending, Failure};

/// Measure attention on whatever hardware is there
///
/// Every problem is verified before it is timed. On the CPU, times stand beside the floor that this machine's measured
/// arithmetic rate allows. With --backend sim a GPU kernel runs in the simulator, with all checks on; the figures are
/// what it counted, and how fast the simulator is, not how fast a GPU would be.
///
/// Examples:
///   flashcore bench
///   flashcore bench --backend sim --shape 1x8x512x64
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Bench {
    /// Who computes
    #[arg(long, value_enum, default_value_t = BackendName::Cpu)]
    backend: BackendName,
    /// One problem instead of the usual ones: batch x heads[/key heads] x queries[,keys] x dim
    #[arg(long)]
    shape: Option<String>,
    /// The element type; the usual problems have f32 on the CPU and f16 in the simulator
    #[arg(long)]
    dtype: Option<DType>,
    /// The kernel that is simulated, by family or by config
    #[arg(long, default_value = "ampere")]
    kernel: String,
    /// Seconds to measure each problem for
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// How results are written
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BackendName {
    /// The native CPU kernels
    Cpu,
    /// A GPU kernel in the simulator
    Sim,
}

impl Bench {
    pub(crate) fn run(&self, output: &mut Output) -> Result<Ending, Failure> {
        let default_dtype = match self.backend {
            BackendName::Cpu => DType::F32,
            BackendName::Sim => DType::F16,
        };
        let dtype = self.dtype.unwrap_or(default_dtype);
        let shapes: Vec<&str> = match (&self.shape, self.backend) {
            (Some(shape), _) => vec![shape],
            (None, BackendName::Cpu) => vec!["1x8x512x64", "2x8x256x64", "2x8x512x64", "1x8x2048x64"],
            (None, BackendName::Sim) => vec!["1x8x512x64"],
        };
        let mut problems = Vec::new();
        for shape in shapes {
            for mask in [Mask::None, Mask::Causal(Alignment::BottomRight)] {
                let mut problem = parse_shape(shape, dtype).map_err(|error| Failure::Usage(error.to_string()))?;
                problem.mask = mask;
                if let Err(errors) = problem.validate() {
                    return Err(Failure::Usage(errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")));
                }
                problems.push(problem);
            }
        }
        match self.backend {
            BackendName::Cpu => self.run_cpu(output, &problems),
            BackendName::Sim => self.run_sim(output, &problems),
        }
    }

    fn run_cpu(&self, output: &mut Output, problems: &[Problem]) -> Result<Ending, Failure> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let peak = flashcore_cpu::measured_peak(threads);
        if matches!(self.format, Format::Table | Format::Markdown) {
            output.line(format!(
                "cpu, {threads} threads, measured peak {:.0} GFLOP/s in f32 multiply-adds; verified, then timed",
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
        let mut ending = Ending::Well;
        for (index, problem) in problems.iter().enumerate() {
            output.progress(index, problems.len(), &shape_text(problem));
            let case = Case::new(problem.clone(), 0, Backend::Cpu);
            let yardstick =
                Yardstick::new(problem, case.inputs()).map_err(|error| Failure::Usage(error.to_string()))?;
            let outcome = verify_with(&case, &yardstick);
            if !outcome.passed() {
                ending = Ending::Failed;
                output.complain(&format!("{case}: {}", outcome.complaints().join("; ")));
                continue;
            }
            let times = time_cpu(problem, yardstick.inputs(), Duration::from_secs_f64(self.seconds))
                .map_err(|error| Failure::Usage(error.to_string()))?;
            let median = times.quantile(0.5);
            let floor = flops(problem) / peak;
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
                Cell::number(flops(problem) / median / 1e9, 1),
                Cell::number(floor * 1e3, 3),
                Cell::number(100.0 * floor / median, 1),
            ]);
        }
        output.table(&table, self.format)?;
        Ok(ending)
    }

    fn run_sim(&self, output: &mut Output, problems: &[Problem]) -> Result<Ending, Failure> {
        let config: Config = super::config(&self.kernel)?;
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
            let outcome = verify(&case);
            let Some(counters) = outcome.counters.as_ref().filter(|_| outcome.passed()) else {
                ending = Ending::Failed;
                output.complain(&format!("{case}: {}", outcome.complaints().join("; ")));
                continue;
            };
            // The case was run twice, under two orders of warps.
            let seconds = outcome.duration.as_secs_f64() / 2.0;
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
                Cell::number((counters.global_loads.bytes + counters.copy_async_bytes) as f64 / 1e6, 2),
                Cell::number(counters.transactions_per_request(), 2),
                Cell::number(counters.barriers as f64, 0),
            ]);
        }
        output.table(&table, self.format)?;
        Ok(ending)
    }
}
