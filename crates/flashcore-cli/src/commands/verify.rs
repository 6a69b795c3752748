//! `flashcore verify`: results judged against plain loops in f64.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use clap::{Args, ValueEnum};
use flashcore_bench::lab::peak::working_threads;
use flashcore_bench::lab::record::{FailedCase, Machine, Verification};
use flashcore_bench::testkit::gpu::Gpu;
use flashcore_bench::testkit::jobs::{Judged, judge_case, judge_in_processes, serve_cases};
use flashcore_bench::testkit::memory::require_judging;
use flashcore_bench::testkit::suites::{self, Kernels, Runner};
use flashcore_bench::testkit::verify::NoVerdict;
use flashcore_bench::testkit::{Backend, Case, Workload};
use flashcore_cpu::{Level, LevelError};
use flashcore_problem::{DType, DTypes, Layout, LseBase, Stress};
use rayon::prelude::*;

use super::origin::write_record;
use super::threads::Threads;
use crate::output::{Cell, Column, Format, Output, PROBLEM, Table, column, field, problem_cells};
use crate::{Ending, Failure, interrupt};

/// Verify that attention gives right results
///
/// The backend computes every case from independent random inputs into poisoned outputs, and the result is judged against
/// plain loops in f64: error at most twice that of a same-precision reference, relative L2, every element written and
/// finite, inputs unchanged, the same bits in a second run. In the simulator every race, missing wait, out-of-bounds access
/// and read of uninitialized memory fails the case too. On the CPU every tensor is placed between guard pages, so that an
/// access one byte out of bounds ends the command with a segmentation fault that says which tensor was left.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashcore verify --backend sim --suite seeds\n  flashcore verify --backend cuda --suite full\n  flashcore verify --backend cpu --cpu-level all --suite full\n  flashcore verify --backend cpu --fuzz 1000 --seed 7\n  flashcore verify --backend cpu --suite serving --fuzz 1000\n  flashcore verify --backend sim --suite wrong-arrays --part 0/5\n  flashcore verify --backend cpu --shape 4x8/2x1,300x128+scales=head --dtype 'bf16 kv e4m3'\n  flashcore verify --backend cuda --fuzz 10000 --jobs 14\n  flashcore verify --backend sim --kernel ampere --shape 1x8/2x97,203x64 --dtype bf16 --mask causal --seed 2"
)]
pub(crate) struct Verify {
    /// The backend that computes
    #[arg(long, value_enum, default_value_t = BackendName::Sim)]
    backend: BackendName,
    /// The suite of cases [default: seeds]
    #[arg(long, value_enum)]
    suite: Option<SuiteName>,
    /// N random cases instead of a suite, numbered from --seed; a case depends on its number alone. With --suite serving,
    /// cases of packed and paged sequences
    #[arg(long, value_name = "N", conflicts_with = "shape")]
    fuzz: Option<usize>,
    /// Only this kernel, by family (scalar, steps, ampere, hopper) or by config
    #[arg(long)]
    kernel: Option<String>,
    /// Only case N of the suite, counted from 0
    #[arg(long, value_name = "N", conflicts_with_all = ["fuzz", "shape"])]
    only: Option<usize>,
    /// Only every Nth case starting at case I, so that N commands can share a suite
    #[arg(long, value_name = "I/N", conflicts_with = "only", value_parser = parse_part)]
    part: Option<(usize, usize)>,
    /// Share the cases among N processes; useful because a GPU driver compiles one kernel at a time in each process
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=256))]
    jobs: u16,
    /// A process of --jobs: judges the cases whose numbers it reads
    #[arg(long, hide = true)]
    serve: bool,
    /// The instruction set of the cpu backend, such as portable or avx2, or `all` that this machine has, one after the other
    /// [default: the fastest]
    #[arg(long, value_name = "LEVEL")]
    cpu_level: Option<LevelChoice>,
    /// A single case instead of a suite: batch x heads[/key heads] x queries[,keys] x dim[+feature], such as 1x8x512x64, 1x2x300x64+documents or 4x8/2x1,300x64+seqused_k+pages=80x16; of FP8, +scales (a form drawn by the seed) or +scales=tensor, head, sequence or token
    #[arg(long, conflicts_with = "suite")]
    shape: Option<String>,
    #[command(flatten)]
    of_case: OfCase,
    /// The seed of the inputs and of the order of warps of --shape; with --fuzz the number of the first case [default: 0]
    #[arg(long)]
    seed: Option<u64>,
    /// Further runs of each case, which must give the same bits
    #[arg(long, value_name = "N", default_value_t = 1)]
    repeats: usize,
    #[command(flatten)]
    threads: Threads,
    /// Write a JSON record with the counts, the failures and the machine
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// The output format
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// Options of the single case that --shape gives. Suites and random cases have these choices of their own.
#[derive(Debug, Args)]
#[group(requires = "shape", conflicts_with_all = ["suite", "fuzz", "only"], multiple = true)]
struct OfCase {
    /// The element type of the case, or those of query, key and value, and output, such as 'bf16 kv e4m3' or 'e4m3 out bf16'
    #[arg(long, default_value_t = super::one_type(DType::F16))]
    dtype: DTypes,
    /// The element type of key and value of the case, e4m3 or e5m2: a KV cache in FP8 [default: as --dtype says]
    #[arg(long, value_name = "DTYPE")]
    kv_dtype: Option<DType>,
    /// The element type of the output of the case, f16 or bf16 where --dtype is e4m3 [default: as --dtype says]
    #[arg(long, value_name = "DTYPE")]
    out_dtype: Option<DType>,
    /// Scales for the tensors of the case that are of 8 bits, per tensor, head, sequence or token as the seed says; the same
    /// as +scales in --shape, which takes a form, as in +scales=head
    #[arg(long)]
    scales: bool,
    /// The mask of the case: full, causal, causal-top-left or window:LEFT,RIGHT
    #[arg(long, default_value = "full")]
    mask: String,
    /// Compute the log-sum-exp as well
    #[arg(long)]
    lse: bool,
    /// The log-sum-exp in base 2
    #[arg(long, requires = "lse")]
    lse_base2: bool,
    /// The memory layout of the tensors
    #[arg(long, value_enum, default_value_t = LayoutName::Bhsd)]
    layout: LayoutName,
    /// Special inputs instead of random ones
    #[arg(long, value_enum)]
    stress: Option<StressName>,
}

/// Value of `--cpu-level`.
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
    /// Canonical shapes with three seeds each
    Seeds,
    /// Lengths around tile sizes, every head dimension, rows that attend no key
    Edge,
    /// Every config that is a default of some problem, once each: for compute-sanitizer
    Defaults,
    /// Every pair of features (pairwise design), by each kernel alternately
    Features,
    /// Every count that code loops over (splits, chunks, pages, sequences, heads, rows) at 0, 1, each constant of the code, one
    /// more, and far more
    Counts,
    /// Packed (varlen) and paged sequences, decode, few rows over many keys, chunked prefill
    Serving,
    /// Device arrays that the host refuses (offsets, lengths, padding, batches, pages), in the simulator: nothing outside of
    /// the tensors, and sequences whose entries are right have right results; the cpu must refuse them
    WrongArrays,
    /// Every pair of choices that `tune` can make, for GPU kernels
    Configs,
    /// Tensors of 4 GiB and more, for GPU kernels: a GPU needs 40 GiB for them and its host 100, the simulator little
    Huge,
    /// All of the above but serving, wrong-arrays, configs and huge, a grid of lengths, dimensions, masks and types, every config, and stress inputs; on the cpu also
    /// 2,000 cases that cover every pair of values of every pair of features
    Full,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum StressName {
    /// Queries and keys 50 times larger than usual: scores up to about 10,000
    LargeScores,
    /// Each query matches the keys of one residue class and no others
    OneHot,
    /// Queries and keys all 1, values all 0.75
    Constant,
    /// Integers from -2 to 2, whose sums are exact
    SmallIntegers,
    /// Scores that rise along the keys of each sequence
    Rising,
    /// Scores that fall along the keys
    Falling,
    /// One large score among the first keys
    SpikeFirst,
    /// One large score among the last keys
    SpikeLast,
    /// All keys masked but one
    OneKey,
    /// Zeros of both signs and subnormal numbers
    ZerosAndSubnormals,
}

impl From<StressName> for Stress {
    fn from(name: StressName) -> Self {
        match name {
            StressName::LargeScores => Self::LargeScores,
            StressName::OneHot => Self::OneHot,
            StressName::Constant => Self::Constant,
            StressName::SmallIntegers => Self::SmallIntegers,
            StressName::Rising => Self::Rising,
            StressName::Falling => Self::Falling,
            StressName::SpikeFirst => Self::SpikeFirst,
            StressName::SpikeLast => Self::SpikeLast,
            StressName::OneKey => Self::OneKey,
            StressName::ZerosAndSubnormals => Self::ZerosAndSubnormals,
        }
    }
}

fn parse_part(text: &str) -> Result<(usize, usize), String> {
    let parts = text.split_once('/').and_then(|(first, of)| Some((first.parse().ok()?, of.parse().ok()?)));
    parts.filter(|(first, of)| first < of).ok_or_else(|| "I/N with I below N is needed, such as 0/4 or 3/4".to_owned())
}

/// Cases of the CPU or a GPU that are verified before progress is shown again. They run in parallel, so that the oracle's
/// many small rows do not wait for one another, nor kernels for the compiler of others.
const CASES_AT_ONCE: usize = 64;
/// Cases at once on a GPU, where some kernels take a hundred times as long to compile as others to run.
const GPU_CASES_AT_ONCE: usize = 512;

/// The list of cases is in memory; with another --seed there are others.
const MOST_FUZZ_CASES: usize = 1_000_000;

/// Variable with the number of threads of a process.
const THREADS: &str = "RAYON_NUM_THREADS";

/// Verdicts by the place of the case in the list.
type Kept = Mutex<BTreeMap<usize, Vec<Judged>>>;

/// Numbers of passed and failed cases, by level where there are levels.
struct Tally {
    name: String,
    passed: usize,
    failed: usize,
    /// Values of new rows that FP8 caches saturated.
    saturated: usize,
}

impl Verify {
    pub(crate) fn run(&self, output: &Output) -> Result<Ending, Failure> {
        if self.serve {
            interrupt::end_soon();
        } else {
            interrupt::watch();
        }
        self.threads.apply()?;
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
            output.note(&format!("{} cases on the CPU at level {}", cases.len(), names.join(", ")));
        }
        let kept = Kept::default();
        let work = || {
            if self.jobs > 1 && cases.len() > 1 {
                self.judge_in_processes(&cases, &kept, output)
            } else {
                self.judge_here(&cases, &levels, gpu.as_ref(), &kept, output)
            }
        };
        interrupt::abandonable(output, work, |_| {
            let judged: Vec<Vec<Judged>> = std::mem::take(&mut *interrupt::aside(&kept)).into_values().collect();
            self.conclude(&judged, &cases, &levels, gpu.as_ref(), output)
        })
    }

    /// Shows and records what was judged.
    fn conclude(
        &self,
        judged: &[Vec<Judged>],
        cases: &[Case],
        levels: &[Level],
        gpu: Option<&Gpu>,
        output: &Output,
    ) -> Result<Ending, Failure> {
        let mut tallies: Vec<Tally> = match levels {
            [] => vec![Tally::new(String::new())],
            levels => levels.iter().map(|level| Tally::new(format!("cpu {level}: "))).collect(),
        };
        let cases_by_name = by_name(cases, levels);
        let mut table = Table::new(&columns());
        for (level, judged) in judged.iter().flat_map(|levels| levels.iter().enumerate()) {
            table.push(cells(judged, cases_by_name.get(&judged.case)));
            tallies[level].count(judged);
        }
        let failed: Vec<&Judged> = judged.iter().flatten().filter(|judged| !judged.passed()).collect();
        output.table(&table, self.format)?;
        // A format for programs carries the verdicts already; people get the reasons too.
        if matches!(self.format, Format::Table | Format::Markdown) {
            write_failures(output, &failed)?;
            write_tallies(output, &tallies, &interrupt::left_out(judged.len(), cases.len()))?;
        }
        if let Some(file) = &self.record {
            let is_complete = judged.len() == cases.len();
            self.write_record(file, (levels, gpu), &tallies, &failed, is_complete)?;
        }
        Ok(if interrupt::requested() && judged.len() < cases.len() {
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
        kept: &Kept,
        output: &Output,
    ) -> Result<(), Failure> {
        let at_once = match self.backend {
            // One by one: each takes most of the memory.
            _ if self.suite == Some(SuiteName::Huge) && self.shape.is_none() && self.fuzz.is_none() => 1,
            BackendName::Sim => 1,
            BackendName::Cpu => CASES_AT_ONCE,
            BackendName::Cuda => GPU_CASES_AT_ONCE,
        };
        let failed = AtomicUsize::new(0);
        for (chunk, first) in cases.chunks(at_once).zip((0..).step_by(at_once)) {
            let failures = failed.load(Ordering::Relaxed);
            output.progress(first, cases.len(), &format!("{}, {failures} failed", chunk[0]));
            chunk.par_iter().enumerate().try_for_each(|(index, case)| {
                if interrupt::requested() {
                    return Ok(());
                }
                let outcomes = judge_case(case, levels, gpu);
                // A case that the user spelled out and that no kernel takes is a wrong call, not a wrong kernel.
                let refusal = outcomes.iter().find_map(|(_, outcome)| match &outcome.verdict {
                    Err(refused @ (NoVerdict::Refused(_) | NoVerdict::RefusedByGpu(_))) => Some(refused),
                    _ => None,
                });
                if let (Some(_), Some(refused)) = (&self.shape, refusal) {
                    return Err(Failure::Usage(refused.to_string()));
                }
                let judged: Vec<_> = outcomes.iter().map(|(case, outcome)| Judged::new(case, outcome)).collect();
                failed.fetch_add(judged.iter().filter(|judged| !judged.passed()).count(), Ordering::Relaxed);
                interrupt::aside(kept).insert(first + index, judged);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Has processes of this program judge the cases. They are called as this one was, and so have the same list.
    fn judge_in_processes(&self, cases: &[Case], kept: &Kept, output: &Output) -> Result<(), Failure> {
        // What is computed by several threads is to be verified as such.
        const FEWEST_THREADS: usize = 2;
        let program = std::env::current_exe()?;
        let jobs = usize::from(self.jobs).min(cases.len());
        let threads = working_threads() / jobs;
        let start = || {
            let mut command = Command::new(&program);
            command.args(std::env::args_os().skip(1)).arg("--serve");
            if std::env::var_os(THREADS).is_none() && self.threads.asked_for().is_none() {
                command.env(THREADS, threads.max(FEWEST_THREADS).to_string());
            }
            command
        };
        let mut failed = 0;
        let found = |done: usize, judged: &[Judged]| {
            failed += judged.iter().filter(|judged| !judged.passed()).count();
            let case = judged.first().map_or("", |judged| &judged.case);
            output.progress(done, cases.len(), &format!("{case}, {failed} failed"));
            // In the order in which they were done, until all are there.
            interrupt::aside(kept).insert(done, judged.to_vec());
        };
        let judged = judge_in_processes(jobs, cases, start, interrupt::requested, found)
            .map_err(|error| Failure::Environment(error.to_string()))?;
        *interrupt::aside(kept) = judged.into_iter().enumerate().collect();
        Ok(())
    }

    fn write_record(
        &self,
        file: &Path,
        (levels, gpu): (&[Level], Option<&Gpu>),
        tallies: &[Tally],
        failed: &[&Judged],
        is_complete: bool,
    ) -> Result<(), Failure> {
        let threads = working_threads();
        let names = levels.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let (backend, machine) = match (self.backend, gpu.and_then(|gpu| gpu.device().context())) {
            (BackendName::Cuda, Some(context)) => ("cuda".to_owned(), Machine::gpu(context.device(), None)),
            (BackendName::Cpu, _) => (format!("cpu {names}"), Machine::cpu(&names, threads, None)),
            _ => ("sim".to_owned(), Machine { backend: "sim".to_owned(), ..Machine::cpu("simulator", threads, None) }),
        };
        let verification = Verification {
            backend,
            passed: tallies.iter().map(|tally| tally.passed).sum(),
            failed: failed.iter().map(|judged| FailedCase::from(*judged)).collect(),
            is_complete,
        };
        write_record(file, machine, verification)
    }

    /// The levels to verify at; none for a backend that has none.
    fn levels(&self) -> Result<Vec<Level>, Failure> {
        if self.backend != BackendName::Cpu {
            return match self.cpu_level {
                Some(_) => Err(Failure::Usage("--cpu-level needs --backend cpu".to_owned())),
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
            return Err(Failure::Usage("no case is selected, so nothing was verified".to_owned()));
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
            return Err(Failure::Usage("--kernel chooses a GPU kernel; --backend cpu has none".to_owned()));
        }
        let kernels = only.map_or(Kernels::All, Kernels::Only);
        let runner = match self.backend {
            BackendName::Cpu => Runner::Cpu(level),
            BackendName::Sim => Runner::Sim(kernels),
            BackendName::Cuda => Runner::Cuda(kernels),
        };
        let seed = self.seed.unwrap_or(0);
        if let (Some(seed), None, None) = (self.seed, &self.shape, self.fuzz) {
            return Err(Failure::Usage(format!(
                "--seed {seed}: the cases of a suite have seeds of their own; give it with --shape or --fuzz, or leave it out"
            )));
        }
        if let Some(count) = self.fuzz {
            if !(1..=MOST_FUZZ_CASES).contains(&count) {
                return Err(Failure::Usage(format!(
                    "--fuzz {count}: nothing was verified; it takes from 1 to {MOST_FUZZ_CASES} cases"
                )));
            }
            return match self.suite {
                None => Ok(suites::fuzz(runner, count, seed)),
                Some(SuiteName::Serving) => Ok(suites::fuzz_serving(runner, count, seed)),
                Some(_) => Err(Failure::Usage(
                    "--fuzz takes the place of a suite; only --suite serving has random cases of its own".to_owned(),
                )),
            };
        }
        let Some(shape) = &self.shape else {
            return Ok(match self.suite.unwrap_or(SuiteName::Seeds) {
                SuiteName::Seeds => suites::seeds(runner),
                SuiteName::Edge => suites::edge(runner),
                SuiteName::Defaults => suites::defaults(runner),
                SuiteName::Features => suites::features(runner),
                SuiteName::Counts => suites::counts(runner),
                SuiteName::Serving => suites::serving(runner),
                SuiteName::Configs | SuiteName::Huge if self.backend == BackendName::Cpu => {
                    return Err(Failure::Usage(
                        "--suite configs and --suite huge are for GPU kernels: give --backend sim or --backend cuda"
                            .to_owned(),
                    ));
                }
                SuiteName::WrongArrays if self.backend == BackendName::Cuda => {
                    return Err(Failure::Usage(
                        "--suite wrong-arrays is for the simulator and the CPU: give --backend sim or --backend cpu"
                            .to_owned(),
                    ));
                }
                SuiteName::WrongArrays => suites::wrong_arrays(runner),
                SuiteName::Configs => suites::configs(runner),
                SuiteName::Huge => suites::huge(runner),
                SuiteName::Full => suites::full(runner),
            });
        };
        let Workload { mut problem, scales } = super::problem(shape, self.dtypes(), &self.of_case.mask)?;
        if self.of_case.scales {
            let types = problem.dtypes();
            if !types.query.is_float8() && !types.key_value.is_float8() {
                return Err(Failure::Usage(format!(
                    "--scales: scales are for tensors of 8 bits, and the case is {types}; give a --dtype such as 'bf16 kv e4m3'"
                )));
            }
            problem.q_scale = types.query.is_float8();
            (problem.k_scale, problem.v_scale) = (types.key_value.is_float8(), types.key_value.is_float8());
        }
        problem.lse = self.of_case.lse;
        problem.lse_form.base = if self.of_case.lse_base2 { LseBase::Two } else { LseBase::Natural };
        problem.layout = match self.of_case.layout {
            LayoutName::Bhsd => Layout::Bhsd,
            LayoutName::Bshd => Layout::Bshd,
            LayoutName::PackedQkv => Layout::PackedQkv,
        };
        require_judging(&problem, self.repeats).map_err(super::impossible)?;
        let backend = match self.backend {
            BackendName::Cpu => Backend::Cpu(level),
            BackendName::Sim => Backend::Sim(only.unwrap_or_else(|| super::simulated_config(&problem))),
            BackendName::Cuda => Backend::Cuda(only.unwrap_or_else(|| super::simulated_config(&problem))),
        };
        Ok(vec![Case {
            numbers: self.of_case.stress.map(Stress::from).into(),
            scales,
            ..Case::new(problem, seed, backend)
        }])
    }
}

impl Verify {
    /// The element types of the case.
    fn dtypes(&self) -> DTypes {
        let DTypes { query, key_value, output } = self.of_case.dtype;
        DTypes {
            query,
            key_value: self.of_case.kv_dtype.unwrap_or(key_value),
            output: self.of_case.out_dtype.unwrap_or(output),
        }
    }
}

impl Tally {
    const fn new(name: String) -> Self {
        Self { name, passed: 0, failed: 0, saturated: 0 }
    }

    fn count(&mut self, judged: &Judged) {
        self.saturated += judged.saturated;
        if judged.passed() {
            self.passed += 1;
        } else {
            self.failed += 1;
        }
    }
}

/// Every case at every level by its name, which is what is known of it when it is judged.
fn by_name(cases: &[Case], levels: &[Level]) -> HashMap<String, Case> {
    let at_levels = |case: &Case| match case.backend {
        Backend::Cpu(_) => {
            levels.iter().map(|level| Case { backend: Backend::Cpu(*level), ..case.clone() }).collect::<Vec<_>>()
        }
        Backend::Sim(_) | Backend::Cuda(_) => vec![case.clone()],
    };
    cases.iter().flat_map(at_levels).map(|case| (case.to_string(), case)).collect()
}

fn columns() -> Vec<Column> {
    let shown = [
        column("case", "case"),
        column("verdict", "verdict").verdict(),
        column("max error", "max_error"),
        column("reference", "reference_max_error"),
        column("relative L2", "relative_l2"),
        column("ms", "milliseconds"),
        field("backend"),
        field("kernel"),
        field("seed"),
    ];
    // The name of a case has its problem.
    shown.into_iter().chain(PROBLEM.map(Column::for_programs)).collect()
}

fn cells(judged: &Judged, case: Option<&Case>) -> Vec<Cell> {
    let [error, reference, relative] = judged.errors();
    let mut cells = vec![
        Cell::from(judged.case.as_str()),
        Cell::from(if judged.passed() { "passed" } else { "FAILED" }),
        Cell::number(error, 6),
        Cell::number(reference, 6),
        Cell::number(relative, 6),
        Cell::number(judged.milliseconds, 1),
    ];
    match case {
        Some(case) => {
            let (backend, kernel) = match case.backend {
                Backend::Cpu(level) => ("cpu", level.to_string()),
                Backend::Sim(config) => ("sim", config.to_string()),
                Backend::Cuda(config) => ("cuda", config.to_string()),
            };
            cells.extend([Cell::from(backend), Cell::from(kernel), Cell::from(case.seed)]);
            cells.extend(problem_cells(&case.problem));
        }
        None => cells.resize_with(columns().len(), Cell::none),
    }
    cells
}

fn write_failures(output: &Output, failed: &[&Judged]) -> Result<(), Failure> {
    for Judged { case, complaints, repeat, .. } in failed {
        output.verdict(format!("\nFAILED {case}"))?;
        for complaint in complaints {
            output.line(format!("  {complaint}"))?;
        }
        output.line(format!("  repeat: {repeat}"))?;
    }
    Ok(())
}

/// A line for each level, and one for all where there are several, each with what was left out.
fn write_tallies(output: &Output, tallies: &[Tally], left_out: &str) -> Result<(), Failure> {
    for Tally { name, passed, failed, saturated } in tallies {
        let saturated =
            if *saturated > 0 { format!("; {saturated} values saturated in FP8 caches") } else { String::new() };
        output.line(format!("{name}{passed} passed, {failed} failed{left_out}{saturated}"))?;
    }
    if tallies.len() > 1 {
        let passed: usize = tallies.iter().map(|tally| tally.passed).sum();
        let failed: usize = tallies.iter().map(|tally| tally.failed).sum();
        output.line(format!("all levels: {passed} passed, {failed} failed{left_out}"))?;
    }
    Ok(())
}
