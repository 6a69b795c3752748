//! `flashcore verify`: is it right?

use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;
use std::thread::available_parallelism;

use clap::{Args, ValueEnum};
use flashcore_bench::gpu::Gpu;
use flashcore_bench::jobs::{Judged, judge_case, judge_in_processes, serve_cases};
use flashcore_bench::memory::require_judging;
use flashcore_bench::record::{Machine, Verification};
use flashcore_bench::suites::{self, Kernels, Runner};
use flashcore_bench::verify::NoVerdict;
use flashcore_bench::{Backend, Case, stress_name};
use flashcore_cpu::{Level, LevelError};
use flashcore_kernels::Config;
use flashcore_problem::{DType, Layout, Stress};
use rayon::prelude::*;

use super::origin::write_record;
use crate::output::{Cell, Format, Output, Table};
use crate::{Ending, Failure, interrupt};

/// Verify that attention comes out right
///
/// Every case is computed by the backend on independent random inputs, with poisoned outputs, and judged against plain
/// loops in f64: error at most twice that of a same-precision reference, relative L2, every element written, finite,
/// inputs unchanged, the same bits when run again. In the simulator every race, missing wait, out-of-bounds access and
/// read of unwritten memory is a failure too. On the CPU every tensor lies between pages that cannot be touched and
/// begins or ends at one, so that one byte too far ends the command with a segmentation fault, which says where.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashcore verify --backend sim --suite seeds\n  flashcore verify --backend cuda --suite full\n  flashcore verify --backend cpu --cpu-level all --suite full\n  flashcore verify --backend cpu --fuzz 1000 --seed 7\n  flashcore verify --backend cuda --fuzz 10000 --jobs 14\n  flashcore verify --backend sim --kernel ampere --shape 1x8/2x97,203x64 --dtype bf16 --mask causal --seed 2"
)]
pub(crate) struct Verify {
    /// Who computes
    #[arg(long, value_enum, default_value_t = BackendName::Sim)]
    backend: BackendName,
    /// The list of cases
    #[arg(long, value_enum, default_value_t = SuiteName::Seeds)]
    suite: SuiteName,
    /// Random cases instead of a list; each follows from its number alone, counted from --seed
    #[arg(long, value_name = "N", conflicts_with_all = ["suite", "shape"])]
    fuzz: Option<usize>,
    /// Only this kernel, by family (scalar, steps, ampere, hopper) or by config
    #[arg(long)]
    kernel: Option<String>,
    /// Only this case of the suite, counted from 0
    #[arg(long, value_name = "N", conflicts_with_all = ["fuzz", "shape"])]
    only: Option<usize>,
    /// Only a part of the cases: I/N for every Nth from the Ith on, counted from 0, so that N commands share them
    #[arg(long, value_name = "I/N", conflicts_with = "only", value_parser = parse_part)]
    part: Option<(usize, usize)>,
    /// Processes that share the cases, for a machine of many cores: a GPU's driver compiles one kernel at a time in each
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=256))]
    jobs: u16,
    /// What --jobs starts: judges the cases whose numbers it reads
    #[arg(long, hide = true)]
    serve: bool,
    /// The instructions of the cpu backend, such as portable or avx2, or all that the machine has, one after the other;
    /// the best unless said
    #[arg(long, value_name = "LEVEL")]
    cpu_level: Option<LevelChoice>,
    /// One case: batch x heads[/key heads] x queries[,keys] x dim[+formula], such as 1x8x512x64 or 1x2x300x64+documents
    #[arg(long, conflicts_with = "suite")]
    shape: Option<String>,
    /// The element type of the case
    #[arg(long, default_value_t = DType::F16, requires = "shape")]
    dtype: DType,
    /// The mask of the case: full, causal, causal-top-left or window:LEFT,RIGHT
    #[arg(long, default_value = "full", requires = "shape")]
    mask: String,
    /// The seed of the inputs and of the order of warps, or the number of the first random case
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Runs after the first of each case, which must give the same bits
    #[arg(long, value_name = "N", default_value_t = 1)]
    repeats: usize,
    /// With the log-sum-exp as a second output
    #[arg(long, requires = "shape")]
    lse: bool,
    /// How the tensors of the case lie in memory
    #[arg(long, value_enum, default_value_t = LayoutName::Bhsd, requires = "shape")]
    layout: LayoutName,
    /// Special inputs instead of random ones
    #[arg(long, value_parser = parse_stress, requires = "shape")]
    stress: Option<Stress>,
    /// A file for the tally, the failures and the machine, as JSON
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// How results are written
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// What `--cpu-level` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LevelChoice {
    All,
    One(Level),
}

impl FromStr for LevelChoice {
    type Err = LevelError;

    fn from_str(name: &str) -> Result<Self, LevelError> {
        if name == "all" { Ok(Self::All) } else { name.parse().map(Self::One) }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BackendName {
    /// GPU kernels in the simulator
    Sim,
    /// The native CPU kernels
    Cpu,
    /// GPU kernels on the first GPU
    Cuda,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LayoutName {
    /// Batch, head, row, column
    Bhsd,
    /// Batch, row, head, column
    Bshd,
    /// Query, key and value of a row side by side
    PackedQkv,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum SuiteName {
    /// The shapes of the project's history, three seeds each
    Seeds,
    /// Lengths around tiles, every head dimension, rows that attend nothing
    Edge,
    /// Every config that some problem gets by default, once each: for compute-sanitizer
    Defaults,
    /// A pairwise design over every feature, the kernels in turn
    Features,
    /// Both of these, a grid of lengths, dimensions, masks and types, every config, and inputs made to find trouble; for
    /// the cpu also 2,000 cases in which every two values of every two features meet
    Full,
}

const STRESSES: [Stress; 4] = [Stress::LargeScores, Stress::OneHot, Stress::Constant, Stress::SmallIntegers];

fn parse_stress(name: &str) -> Result<Stress, String> {
    STRESSES.into_iter().find(|stress| stress_name(*stress) == name).ok_or_else(|| {
        let known: Vec<_> = STRESSES.into_iter().map(stress_name).collect();
        format!("there are {}", known.join(", "))
    })
}

fn parse_part(text: &str) -> Result<(usize, usize), String> {
    let parts = text.split_once('/').and_then(|(first, of)| Some((first.parse().ok()?, of.parse().ok()?)));
    parts.filter(|(first, of)| first < of).ok_or_else(|| "such as 0/4, 1/4, 2/4 and 3/4".to_owned())
}

/// Cases of the CPU or a GPU that are verified before progress is shown again. They run in parallel, so that the oracle's
/// many small rows do not wait for one another, nor kernels for the compiler of others.
const CASES_AT_ONCE: usize = 64;
/// The same for a GPU, where some kernels take a hundred times as long to compile as others to run.
const GPU_CASES_AT_ONCE: usize = 512;

/// The list of cases is in memory; with another --seed there are others.
const MOST_FUZZ_CASES: usize = 1_000_000;

/// What says how many threads a process has.
const THREADS: &str = "RAYON_NUM_THREADS";

/// How many cases passed and failed, by level where there are levels.
struct Tally {
    name: String,
    passed: usize,
    failed: usize,
}

impl Verify {
    pub(crate) fn run(&self, output: &mut Output) -> Result<Ending, Failure> {
        interrupt::watch();
        let levels = self.levels()?;
        let cases = self.cases(&levels)?;
        let gpu = match self.backend {
            BackendName::Cuda => Some(Gpu::open(0).map_err(|error| Failure::Environment(error.to_string()))?),
            BackendName::Sim | BackendName::Cpu => None,
        };
        if self.serve {
            let (orders, answers) = (std::io::stdin().lock(), std::io::stdout().lock());
            return match serve_cases(&cases, &levels, gpu.as_ref(), orders, answers) {
                // Who asked has gone; there is nobody to tell.
                Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(Ending::Failed),
                served => Ok(served.map(|()| Ending::Well)?),
            };
        }
        if let ([_, _, ..], [_, ..], Format::Table | Format::Markdown) = (&cases[..], &levels[..], self.format) {
            let names: Vec<String> = levels.iter().map(ToString::to_string).collect();
            output.note(&format!("{} cases on the cpu, level {}", cases.len(), names.join(", ")));
        }
        let judged = if self.jobs > 1 && cases.len() > 1 {
            self.judge_in_processes(&cases, output)?
        } else {
            self.judge_here(&cases, &levels, gpu.as_ref(), output)?
        };
        let mut tallies: Vec<Tally> = match &levels[..] {
            [] => vec![Tally::new(String::new())],
            levels => levels.iter().map(|level| Tally::new(format!("cpu {level}: "))).collect(),
        };
        let mut table = Table::new(&["case", "verdict", "max error", "reference", "relative L2", "ms"]);
        for (level, judged) in judged.iter().flat_map(|levels| levels.iter().enumerate()) {
            table.push(cells(judged));
            tallies[level].count(judged);
        }
        let failed: Vec<&Judged> = judged.iter().flatten().filter(|judged| !judged.passed()).collect();
        output.table(&table, self.format)?;
        // A format for programs carries the verdicts already; people get the reasons too.
        if matches!(self.format, Format::Table | Format::Markdown) {
            write_failures(output, &failed)?;
            write_tallies(output, &tallies)?;
        }
        if let Some(file) = &self.record {
            self.write_record(file, &levels, gpu.as_ref(), &tallies, &failed)?;
        }
        Ok(if interrupt::requested() {
            Ending::Interrupted
        } else if failed.is_empty() {
            Ending::Well
        } else {
            Ending::Failed
        })
    }

    /// Judges the cases in this process: those of the simulator one by one, since its CTAs run in parallel, others in
    /// threads.
    fn judge_here(
        &self,
        cases: &[Case],
        levels: &[Level],
        gpu: Option<&Gpu>,
        output: &mut Output,
    ) -> Result<Vec<Vec<Judged>>, Failure> {
        let at_once = match self.backend {
            BackendName::Sim => 1,
            BackendName::Cpu => CASES_AT_ONCE,
            BackendName::Cuda => GPU_CASES_AT_ONCE,
        };
        let mut all: Vec<Vec<Judged>> = Vec::new();
        let mut failed = 0;
        for chunk in cases.chunks(at_once) {
            if interrupt::requested() {
                break;
            }
            output.progress(all.len(), cases.len(), &format!("{}, {failed} failed", chunk[0]));
            let outcomes: Vec<_> = chunk.par_iter().map(|case| judge_case(case, levels, gpu)).collect();
            // A case that the user spelled out and that no kernel takes is a wrong call, not a wrong kernel.
            let refusal = outcomes.iter().flatten().find_map(|(_, outcome)| match &outcome.verdict {
                Err(refused @ (NoVerdict::Refused(_) | NoVerdict::RefusedByGpu(_))) => Some(refused),
                _ => None,
            });
            if let (Some(_), Some(refused)) = (&self.shape, refusal) {
                return Err(Failure::Usage(refused.to_string()));
            }
            for levels in outcomes {
                let judged: Vec<_> = levels.iter().map(|(case, outcome)| Judged::new(case, outcome)).collect();
                failed += judged.iter().filter(|judged| !judged.passed()).count();
                all.push(judged);
            }
        }
        Ok(all)
    }

    /// Has processes of this program judge the cases. They are called as this one was, and so have the same list.
    fn judge_in_processes(&self, cases: &[Case], output: &mut Output) -> Result<Vec<Vec<Judged>>, Failure> {
        // What is computed by several threads is to be verified as such.
        const FEWEST_THREADS: usize = 2;
        let program = std::env::current_exe()?;
        let jobs = usize::from(self.jobs).min(cases.len());
        let threads = available_parallelism().map_or(1, usize::from) / jobs;
        let start = || {
            let mut command = Command::new(&program);
            command.args(std::env::args_os().skip(1)).arg("--serve");
            if std::env::var_os(THREADS).is_none() {
                command.env(THREADS, threads.max(FEWEST_THREADS).to_string());
            }
            command
        };
        let mut failed = 0;
        let found = |done: usize, judged: &[Judged]| {
            failed += judged.iter().filter(|judged| !judged.passed()).count();
            let case = judged.first().map_or("", |judged| &judged.case);
            output.progress(done, cases.len(), &format!("{case}, {failed} failed"));
        };
        judge_in_processes(jobs, cases, start, interrupt::requested, found)
            .map_err(|error| Failure::Environment(error.to_string()))
    }

    fn write_record(
        &self,
        file: &Path,
        levels: &[Level],
        gpu: Option<&Gpu>,
        tallies: &[Tally],
        failed: &[&Judged],
    ) -> Result<(), Failure> {
        let threads = rayon::current_num_threads();
        let names = levels.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let (backend, machine) = match (self.backend, gpu.and_then(|gpu| gpu.device().context())) {
            (BackendName::Cuda, Some(context)) => ("cuda".to_owned(), Machine::gpu(context.device(), None)),
            (BackendName::Cpu, _) => (format!("cpu {names}"), Machine::cpu(&names, threads, None)),
            _ => ("sim".to_owned(), Machine { backend: "sim".to_owned(), ..Machine::cpu("simulator", threads, None) }),
        };
        let verification = Verification {
            backend,
            passed: tallies.iter().map(|tally| tally.passed).sum(),
            failed: failed.iter().filter_map(|judged| judged.failed()).collect(),
            is_complete: !interrupt::requested(),
        };
        write_record(file, machine, verification)
    }

    /// The levels to verify at; none for a backend that has none.
    fn levels(&self) -> Result<Vec<Level>, Failure> {
        if self.backend != BackendName::Cpu {
            return match self.cpu_level {
                Some(_) => Err(Failure::Usage("--cpu-level is for --backend cpu".to_owned())),
                None => Ok(Vec::new()),
            };
        }
        let missing = |error: LevelError| Failure::Environment(error.to_string());
        match self.cpu_level {
            Some(LevelChoice::All) => Ok(Level::available()),
            Some(LevelChoice::One(level)) => level.set_default().map(|()| vec![level]).map_err(missing),
            None => Level::default_level().map(|level| vec![level]).map_err(missing),
        }
    }

    /// The cases, those of the CPU at the first of the levels.
    fn cases(&self, levels: &[Level]) -> Result<Vec<Case>, Failure> {
        let mut cases = self.listed_cases(levels)?;
        if let Some(only) = self.only {
            let count = cases.len();
            cases = cases.into_iter().skip(only).take(1).collect();
            if cases.is_empty() {
                let last = count.saturating_sub(1);
                return Err(Failure::Usage(format!("--only {only}: the suite has cases 0 to {last}")));
            }
        }
        if let Some((first, step)) = self.part {
            let count = cases.len();
            cases = cases.into_iter().skip(first).step_by(step).collect();
            if cases.is_empty() {
                return Err(Failure::Usage(format!(
                    "--part {first}/{step}: there are {count} cases, so this part has none and nothing was verified"
                )));
            }
        }
        if cases.is_empty() {
            return Err(Failure::Usage("no case is left to run: nothing was verified".to_owned()));
        }
        for case in &mut cases {
            case.repeats = self.repeats;
        }
        Ok(cases)
    }

    fn listed_cases(&self, levels: &[Level]) -> Result<Vec<Case>, Failure> {
        let level = levels.first().copied().unwrap_or(Level::Portable);
        let only = self.kernel.as_deref().map(super::config).transpose()?;
        if only.is_some() && self.backend == BackendName::Cpu {
            return Err(Failure::Usage("--kernel chooses a GPU kernel; the cpu backend has none".to_owned()));
        }
        let kernels = only.map_or(Kernels::All, Kernels::Only);
        let runner = match self.backend {
            BackendName::Cpu => Runner::Cpu(level),
            BackendName::Sim => Runner::Sim(kernels),
            BackendName::Cuda => Runner::Cuda(kernels),
        };
        if let Some(count) = self.fuzz {
            if !(1..=MOST_FUZZ_CASES).contains(&count) {
                return Err(Failure::Usage(format!(
                    "--fuzz {count}: nothing was verified; it takes from 1 to {MOST_FUZZ_CASES} cases"
                )));
            }
            return Ok(suites::fuzz(runner, count, self.seed));
        }
        let Some(shape) = &self.shape else {
            return Ok(match self.suite {
                SuiteName::Seeds => suites::seeds(runner),
                SuiteName::Edge => suites::edge(runner),
                SuiteName::Defaults => suites::defaults(runner),
                SuiteName::Features => suites::features(runner),
                SuiteName::Full => suites::full(runner),
            });
        };
        let mut problem = super::problem(shape, self.dtype, &self.mask)?;
        problem.log_sum_exp = self.lse;
        problem.layout = match self.layout {
            LayoutName::Bhsd => Layout::Bhsd,
            LayoutName::Bshd => Layout::Bshd,
            LayoutName::PackedQkv => Layout::PackedQkv,
        };
        require_judging(&problem, self.repeats).map_err(super::impossible)?;
        let backend = match self.backend {
            BackendName::Cpu => Backend::Cpu(level),
            BackendName::Sim => Backend::Sim(only.unwrap_or_else(Config::ampere)),
            BackendName::Cuda => Backend::Cuda(only.unwrap_or_else(Config::ampere)),
        };
        Ok(vec![Case { numbers: self.stress.into(), ..Case::new(problem, self.seed, backend) }])
    }
}

impl Tally {
    const fn new(name: String) -> Self {
        Self { name, passed: 0, failed: 0 }
    }

    fn count(&mut self, judged: &Judged) {
        if judged.passed() {
            self.passed += 1;
        } else {
            self.failed += 1;
        }
    }
}

fn cells(judged: &Judged) -> Vec<Cell> {
    let [error, reference, relative] = judged.errors();
    vec![
        Cell::from(judged.case.as_str()),
        Cell::from(if judged.passed() { "passed" } else { "FAILED" }),
        Cell::number(error, 6),
        Cell::number(reference, 6),
        Cell::number(relative, 6),
        Cell::number(judged.milliseconds, 1),
    ]
}

fn write_failures(output: &mut Output, failed: &[&Judged]) -> Result<(), Failure> {
    for Judged { case, complaints, repeat, .. } in failed {
        output.line(format!("\nFAILED {case}"))?;
        for complaint in complaints {
            output.line(format!("  {complaint}"))?;
        }
        output.line(format!("  repeat: {repeat}"))?;
    }
    Ok(())
}

/// A line for each level, and one for all where there are several.
fn write_tallies(output: &mut Output, tallies: &[Tally]) -> Result<(), Failure> {
    for Tally { name, passed, failed } in tallies {
        output.line(format!("{name}{passed} passed, {failed} failed"))?;
    }
    if tallies.len() > 1 {
        let passed: usize = tallies.iter().map(|tally| tally.passed).sum();
        let failed: usize = tallies.iter().map(|tally| tally.failed).sum();
        output.line(format!("all levels: {passed} passed, {failed} failed"))?;
    }
    Ok(())
}
