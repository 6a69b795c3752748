//! `flashcore bench`: how fast is it?

mod cpu;
mod gpu;
mod peers;
mod sim;

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use flashcore_bench::gpu::Gpu;
use flashcore_bench::problems::BenchSuite;
use flashcore_problem::{Alignment, DType, Mask, Problem};

use crate::output::{Format, Output};
use crate::{Ending, Failure, interrupt};

/// Measure attention on whatever hardware is there
///
/// Every problem is verified on fresh random inputs before it is timed, and every time stands beside the floor under
/// which the machine cannot go. On a GPU, hot times are those of a replayed graph of 20 launches on the same tensors, cold
/// ones those of single launches behind a flush of the L2 cache. With --backend sim a GPU kernel runs in the simulator,
/// with all checks on; the figures are what it counted, and how fast the simulator is, not how fast a GPU would be.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashcore bench\n  flashcore bench --backend cuda --suite prefill --dtype bf16 --record prefill.json\n  flashcore bench --backend sim --shape 1x8x512x64"
)]
pub(crate) struct Bench {
    /// Who computes; by default the first GPU, or the CPU where there is none
    #[arg(long, value_enum, default_value_t = BackendName::Auto)]
    backend: BackendName,
    /// What is measured
    #[arg(long, value_enum, default_value_t = SuiteName::Quick)]
    suite: SuiteName,
    /// One problem instead: batch x heads[/key heads] x queries[,keys] x dim[+formula]
    #[arg(long, conflicts_with = "suite")]
    shape: Option<String>,
    /// The element type; f32 on the CPU and f16 elsewhere unless said
    #[arg(long)]
    dtype: Option<DType>,
    /// The GPU kernel, by family or by config; on a GPU the default of the device unless said
    #[arg(long)]
    kernel: Option<String>,
    /// Seconds to measure each problem for, on the CPU
    #[arg(long, default_value_t = 1.0, value_parser = crate::commands::parse_seconds, allow_negative_numbers = true)]
    seconds: f64,
    /// A file for everything: machine, every sample, every verdict, as JSON
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Show a record of bench/peers/gpu.py, us beside others, instead of measuring
    #[arg(long, value_name = "FILE", conflicts_with_all = ["suite", "shape", "record"])]
    peers_record: Option<PathBuf>,
    /// How results are written
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BackendName {
    /// The first GPU, or the CPU where there is none
    Auto,
    /// The native CPU kernels
    Cpu,
    /// The first GPU
    Cuda,
    /// A GPU kernel in the simulator
    Sim,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum SuiteName {
    /// A few, for a first look
    Quick,
    /// The shapes of the project's history
    Seeds,
    /// Long sequences, 16k tokens in all
    Prefill,
    /// One query row over a long key cache
    Decode,
}

impl Bench {
    pub(crate) fn run(&self, output: &mut Output) -> Result<Ending, Failure> {
        if let Some(file) = &self.peers_record {
            return peers::show_peers(output, file, self.format);
        }
        interrupt::watch();
        match self.backend {
            BackendName::Cpu => cpu::run(self, output, &self.problems(DType::F32)?),
            BackendName::Sim => sim::run(self, output, &self.problems(DType::F16)?),
            BackendName::Cuda => {
                let gpu = Gpu::open(0).map_err(|error| Failure::Environment(error.to_string()))?;
                gpu::run(self, output, &gpu, &self.problems(DType::F16)?)
            }
            BackendName::Auto => match Gpu::open(0) {
                Ok(gpu) => gpu::run(self, output, &gpu, &self.problems(DType::F16)?),
                // Never silently: the reason stands above the table.
                Err(reason) => {
                    if self.is_for_people() {
                        output.line(format!("no GPU: {reason}"))?;
                    }
                    cpu::run(self, output, &self.problems(DType::F32)?)
                }
            },
        }
    }

    fn is_for_people(&self) -> bool {
        matches!(self.format, Format::Table | Format::Markdown)
    }

    fn problems(&self, default_dtype: DType) -> Result<Vec<Problem>, Failure> {
        let dtype = self.dtype.unwrap_or(default_dtype);
        let Some(shape) = &self.shape else {
            let suite = match self.suite {
                SuiteName::Quick => BenchSuite::Quick,
                SuiteName::Seeds => BenchSuite::Seeds,
                SuiteName::Prefill => BenchSuite::Prefill,
                SuiteName::Decode => BenchSuite::Decode,
            };
            return Ok(suite.problems(dtype));
        };
        let problem = super::computable_problem(shape, dtype, "full")?;
        Ok([Mask::None, Mask::Causal(Alignment::BottomRight)]
            .map(|mask| Problem { mask, ..problem.clone() })
            .into_iter()
            .collect())
    }
}
