//! `flashcore bench`: times, and the least time that the machine allows.

mod cpu;
mod gpu;
mod peers;
mod sim;

use std::path::PathBuf;
use std::sync::Mutex;

use clap::{Args, ValueEnum};
use flashcore_bench::lab::problems::BenchSuite;
use flashcore_bench::testkit::Workload;
use flashcore_bench::testkit::gpu::Gpu;
use flashcore_problem::{Alignment, DType, DTypes, Mask, SequenceLengths};

use super::threads::Threads;
use crate::output::{Format, Output, Table};
use crate::{Ending, Failure, interrupt};

/// Measure attention on the GPU or CPU of this machine
///
/// Every problem is verified on fresh random inputs before it is timed. Beside each time stands its floor, the least time
/// that this machine's peak rate allows; efficiency is floor / p50. On a GPU, hot times are those of a replayed graph of 20
/// launches on the same tensors, cold times those of single launches after a flush of the L2 cache. With --backend sim a
/// GPU kernel runs in the simulator with all checks on: the figures are its counters and the speed of the simulator, not
/// the speed of a GPU.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashcore bench\n  flashcore bench --backend cuda --suite prefill --dtype bf16 --record prefill.json\n  flashcore bench --backend sim --shape 1x8x512x64\n  flashcore bench --shape 8x32/8x1,8192x128+scales=head --dtype 'bf16 kv e4m3'"
)]
pub(crate) struct Bench {
    /// The backend that computes: the first GPU by default, or the CPU if there is no GPU
    #[arg(long, value_enum, default_value_t = BackendName::Auto)]
    backend: BackendName,
    /// The problems to measure
    #[arg(long, value_enum, default_value_t = SuiteName::Quick)]
    suite: SuiteName,
    /// A problem instead of a suite, or several: batch x heads[/key heads] x queries[,keys] x dim[+feature], such as 8x32/8x1,2048x128+seqused_k+pages=1024x16; of FP8, +scales (a form drawn by the seed) or +scales=tensor, head, sequence or token
    #[arg(long, conflicts_with = "suite")]
    shape: Vec<String>,
    /// The element type, or those of query, key and value, and output, such as 'bf16 kv e4m3' or 'e4m3 out bf16' [default: f32 on the CPU, f16 elsewhere]
    #[arg(long)]
    dtype: Option<DTypes>,
    /// The GPU kernel, by family (scalar, steps, ampere, hopper) or by config [default: chosen for the GPU and the problem]
    #[arg(long)]
    kernel: Option<String>,
    /// Seconds to measure each problem for, on the CPU [default: 1]
    #[arg(long, value_parser = crate::commands::parse_seconds, allow_negative_numbers = true)]
    seconds: Option<f64>,
    /// Write a JSON record with the machine, every sample and every verdict
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Show a record of bench/peers/gpu.py, flashcore beside other libraries, instead of measuring
    #[arg(long, value_name = "FILE", conflicts_with_all = ["backend", "suite", "shape", "dtype", "kernel", "seconds", "record", "threads"])]
    peers_record: Option<PathBuf>,
    #[command(flatten)]
    threads: Threads,
    /// The output format
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
    /// Four shapes, for a first look
    Quick,
    /// Eight canonical shapes, the ones that the leaderboard keeps
    Seeds,
    /// Prompts of 512 to 16k tokens, 16k tokens in each batch
    Prefill,
    /// One query row over a long key cache
    Decode,
    /// One query row over a paged KV cache, its pages in random order
    Paged,
    /// Prompts of random lengths, packed (varlen)
    Varlen,
    /// Chunks of prompts among rows that decode, over a paged KV cache
    Chunked,
}

impl From<SuiteName> for BenchSuite {
    fn from(name: SuiteName) -> Self {
        match name {
            SuiteName::Quick => Self::Quick,
            SuiteName::Seeds => Self::Seeds,
            SuiteName::Prefill => Self::Prefill,
            SuiteName::Decode => Self::Decode,
            SuiteName::Paged => Self::Paged,
            SuiteName::Varlen => Self::Varlen,
            SuiteName::Chunked => Self::Chunked,
        }
    }
}

impl Bench {
    pub(crate) fn run(&self, output: &Output) -> Result<Ending, Failure> {
        if let Some(file) = &self.peers_record {
            return peers::show_peers(output, file, self.format);
        }
        interrupt::watch();
        self.threads.apply()?;
        match self.backend {
            BackendName::Cpu if self.kernel.is_some() => {
                Err(Failure::Usage("--kernel chooses a GPU kernel; --backend cpu has none".to_owned()))
            }
            BackendName::Cpu => cpu::run(self, output, &self.problems(DType::F32)?),
            BackendName::Sim if self.record.is_some() => Err(Failure::Usage(
                "--record keeps times, and --backend sim has none; --format json has its counters".to_owned(),
            )),
            BackendName::Sim => {
                self.refuse_seconds("--backend sim")?;
                sim::run(self, output, &self.problems(DType::F16)?)
            }
            BackendName::Cuda => {
                self.refuse_seconds("--backend cuda")?;
                let gpu = Gpu::open(0).map_err(|error| Failure::Environment(error.to_string()))?;
                gpu::run(self, output, &gpu, &self.problems(DType::F16)?)
            }
            BackendName::Auto => match Gpu::open(0) {
                Ok(gpu) => {
                    self.refuse_seconds("a GPU, which this machine has")?;
                    gpu::run(self, output, &gpu, &self.problems(DType::F16)?)
                }
                // Whoever names a GPU kernel wants that one.
                Err(reason) if self.kernel.is_some() => Err(Failure::Environment(reason.to_string())),
                Err(_) => {
                    let problems = self.problems(DType::F32)?;
                    output.note("no usable GPU (`flashcore doctor` says why); measuring on the CPU");
                    cpu::run(self, output, &problems)
                }
            },
        }
    }

    /// Refuses the time limit, which is one of the CPU.
    fn refuse_seconds(&self, of: &str) -> Result<(), Failure> {
        match self.seconds {
            None => Ok(()),
            Some(seconds) => Err(Failure::Usage(format!(
                "--seconds {seconds} is for the CPU; {of} makes a fixed number of runs: leave it out, or give --backend cpu"
            ))),
        }
    }

    fn is_for_people(&self) -> bool {
        matches!(self.format, Format::Table | Format::Markdown)
    }

    /// Shows a table, and how many problems Ctrl-C left out of it.
    fn show<T>(&self, output: &Output, table: &Table, pass: &Pass<T>, verb: &str) -> Result<(), Failure> {
        output.table(table, self.format)?;
        if self.is_for_people() && pass.ending == Ending::Interrupted {
            let Pass { done, of, .. } = *pass;
            output.line(format!("{done} {verb}{}", interrupt::left_out(done, of)))?;
        }
        Ok(())
    }

    /// Lengths of the sequences of every problem.
    fn lengths(&self) -> SequenceLengths {
        if self.shape.is_empty() { BenchSuite::from(self.suite).lengths() } else { SequenceLengths::Ragged }
    }

    fn problems(&self, default_dtype: DType) -> Result<Vec<Workload>, Failure> {
        let types = self.dtype.unwrap_or(super::one_type(default_dtype));
        if self.shape.is_empty() {
            return super::suite_of_types(BenchSuite::from(self.suite).problems(types.query), types);
        }
        let mut problems = Vec::new();
        for shape in &self.shape {
            let problem = super::computable_problem(shape, types, "full")?;
            let masks = [Mask::None, Mask::Causal(Alignment::BottomRight)];
            problems.extend(masks.map(|mask| problem.clone().with_mask(mask)));
        }
        Ok(problems)
    }
}

/// A pass over problems: what was measured, and how it ended.
struct Pass<T> {
    rows: Vec<T>,
    /// Problems that were begun, and all there are.
    done: usize,
    of: usize,
    ending: Ending,
}

/// Measures problem after problem until Ctrl-C, and finishes with what there is then. For a problem that is wrong,
/// `measure` gives the complaint.
fn measure_each<T: Send>(
    output: &Output,
    problems: &[Workload],
    mut measure: impl FnMut(usize, &Workload) -> Result<Result<T, String>, Failure> + Send,
    finish: impl FnOnce(Pass<T>) -> Result<Ending, Failure>,
) -> Result<Ending, Failure> {
    let pass = Mutex::new(Pass { rows: Vec::new(), done: 0, of: problems.len(), ending: Ending::Well });
    let work = || {
        for (index, problem) in problems.iter().enumerate() {
            if interrupt::requested() {
                break;
            }
            output.progress(index, problems.len(), &problem.shape());
            let measured = measure(index, problem)?;
            let mut pass = interrupt::aside(&pass);
            match measured {
                Ok(row) => pass.rows.push(row),
                Err(complaint) => {
                    pass.ending = Ending::Failed;
                    output.complain(&complaint);
                }
            }
            pass.done += 1;
        }
        Ok(())
    };
    interrupt::abandonable(output, work, |_| {
        let rows = std::mem::take(&mut interrupt::aside(&pass).rows);
        let Pass { done, of, ending, .. } = *interrupt::aside(&pass);
        let ending = if interrupt::requested() && done < of { Ending::Interrupted } else { ending };
        finish(Pass { rows, done, of, ending })
    })
}
