//! `flashcore compare`: which of two is faster, given the noise of the machine.

use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use clap::{Args, ValueEnum};
use flashcore_bench::lab::compare::{
    CompareError, ComparedRow, Comparison, Conclusion, Finding, Options, Progress, Side, Subject, binary_of_revision,
    compare_in_process, compare_records, compare_workers, measure_ceilings, serve, slack,
};
use flashcore_bench::lab::peak::working_threads;
use flashcore_bench::lab::problems::BenchSuite;
use flashcore_bench::lab::record::{Machine, Measurements, Record};
use flashcore_bench::testkit::gpu::Gpu;
use flashcore_bench::testkit::{Workload, mask_text};
use flashcore_bench::util::printable::printable;
use flashcore_cpu::Level;
use flashcore_problem::{DType, DTypes};

use super::origin::{build, write_record};
use super::overwriting::refuse_overwriting;
use super::threads::Threads;
use crate::output::{Cell, Format, Output, PROBLEM, Table, column, recorded_cells};
use crate::{Ending, Failure, interrupt};

/// Compare two configs, kernels, CPU levels, builds or records, and say which is faster
///
/// Each round runs A, B and A once more in random order. The difference between the two runs of A (A/A) is the noise of
/// the machine. Both are verified before and after they are timed. B is FASTER or SLOWER if the whole bootstrap interval
/// of the median difference lies beyond --minimum and beyond twice the A/A difference, SAME if it lies within --minimum,
/// and AMBIGUOUS otherwise. A time below the floor, the least time that the machine's peak rate allows, is a measurement
/// error and REJECTED.
///
/// Exit codes: 0 for FASTER and SAME, 1 for SLOWER and REJECTED, 4 for AMBIGUOUS; with --expect, 0 for what was expected
/// and 1 for anything else.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashcore compare cpu:avx2 cpu:avx512\n  flashcore compare cuda:ampere-64x64-2stage-swizzled cuda:ampere-64x64-3stage-swizzled --suite seeds\n  flashcore compare rev:main rev:HEAD --shape 1x8x512x64      builds both, once, into a cache folder\n  flashcore compare before.json after.json                    two records of `flashcore bench`\n  flashcore compare cpu cpu --slow-b 5 --expect slower        does the instrument see 5 %?\n  flashcore compare cpu:avx2 cpu:avx512 --shape 8x8/2x1,2048x128+scales=head --dtype 'bf16 kv e4m3'"
)]
pub(crate) struct Compare {
    /// The baseline: cpu[:LEVEL], cuda[:CONFIG], rev:REVISION, bin:PATH, or the .json file of a record
    a: Side,
    /// The candidate, in the same form
    b: Side,
    /// The subject that builds (rev:, bin:) run
    /// [default: cpu]
    #[arg(long, value_name = "SUBJECT")]
    run: Option<Subject>,
    /// The problems to run [default: one]
    #[arg(long, value_enum)]
    suite: Option<SuiteName>,
    /// A single problem instead of a suite: batch x heads[/key heads] x queries[,keys] x dim[+feature]; of FP8,
    /// +scales[=tensor|head|sequence|token]
    #[arg(long, conflicts_with = "suite")]
    shape: Option<String>,
    /// The element type, or those of query, key and value, and output, such as 'bf16 kv e4m3' or 'e4m3 out bf16'
    /// [default: f32 on the CPU, f16 on a GPU]
    #[arg(long)]
    dtype: Option<DTypes>,
    /// The mask of the problem: full, causal, causal-top-left or window:LEFT,RIGHT; the problems of a suite have theirs
    /// [default: full]
    #[arg(long, conflicts_with = "suite")]
    mask: Option<String>,
    /// The least difference that counts, in percent; fixed before anything is measured
    #[arg(long, default_value_t = 2.0, value_name = "PERCENT")]
    minimum: f64,
    /// Time limit for each problem, in seconds [default: 20]
    #[arg(long, value_parser = super::parse_seconds, allow_negative_numbers = true)]
    seconds: Option<f64>,
    /// The seed of inputs, orders and resamples
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Make every run of B on the CPU this much slower, in percent: a test of the comparison itself
    #[arg(long, value_name = "PERCENT", value_parser = super::parse_percent, allow_negative_numbers = true)]
    slow_b: Option<f64>,
    /// Exit with 0 if every problem has this verdict, and with 1 otherwise
    #[arg(long, value_enum)]
    expect: Option<Expected>,
    /// Write a JSON record with the machine, every round and every verdict
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    #[command(flatten)]
    threads: Threads,
    /// The output format
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum SuiteName {
    /// 1x8x512x64 alone
    One,
    /// Four shapes, for a first look
    Quick,
    /// Eight canonical shapes, which a promotion on the leaderboard needs
    Seeds,
    /// Prompts of 512 to 16k tokens, 16k tokens in each batch
    Prefill,
    /// One query row over a long key cache
    Decode,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Expected {
    /// B takes less time
    Faster,
    /// B takes more time
    Slower,
    /// Both take the same time
    Same,
}

impl Expected {
    const fn finding(self) -> Finding {
        match self {
            Self::Faster => Finding::Faster,
            Self::Slower => Finding::Slower,
            Self::Same => Finding::Same,
        }
    }
}

fn failure(error: CompareError) -> Failure {
    match error {
        CompareError::NoGpu | CompareError::Gpu(_) | CompareError::Level(_) | CompareError::Worker { .. } => {
            Failure::Environment(error.to_string())
        }
        error => Failure::Usage(error.to_string()),
    }
}

impl Compare {
    pub(crate) fn run(&self, output: &Output) -> Result<Ending, Failure> {
        interrupt::watch();
        self.threads.apply()?;
        if !(self.minimum > 0.0 && self.minimum < 100.0) {
            return Err(Failure::Usage(format!("--minimum is {}; it must be above 0 and below 100", self.minimum)));
        }
        let records: Vec<&Path> = [&self.a, &self.b].into_iter().filter_map(Side::record).collect();
        refuse_overwriting(&records, self.record.as_deref().as_slice())?;
        match (&self.a, &self.b) {
            (Side::Record(a), Side::Record(b)) => {
                self.refuse_options_of_runs()?;
                let read = |file| Record::<Measurements>::read(file).map_err(|error| Failure::Usage(error.to_string()));
                let (a, b) = (read(a)?, read(b)?);
                let names = [self.a.to_string(), self.b.to_string()];
                let slack = if a.origin.machine.backend == "cpu" { slack(Subject::Cpu(None)) } else { 0.0 };
                let options = Options { least_rounds: 10, ..self.options() };
                let comparison = compare_records(&a, &b, names, &options, slack)
                    .map_err(|error| Failure::Usage(error.to_string()))?;
                let of = comparison.rows.len();
                self.conclude(&comparison, b.origin.machine, of, output)
            }
            (Side::Record(_), other) | (other, Side::Record(_)) => {
                Err(Failure::Usage(format!("a record can only be compared with another record, not with {other}")))
            }
            (Side::Subject(a), Side::Subject(b)) => match self.run {
                None => self.subjects([*a, *b], output),
                Some(run) => Err(Failure::Usage(format!(
                    "--run {run} is the subject that builds (rev:, bin:) run, and neither A nor B is a build: leave it out"
                ))),
            },
            _ => self.programs(output),
        }
    }

    /// Refuses what a comparison of records, which runs nothing, would ignore.
    fn refuse_options_of_runs(&self) -> Result<(), Failure> {
        let given = [
            ("--run", self.run.is_some()),
            ("--suite", self.suite.is_some()),
            ("--shape", self.shape.is_some()),
            ("--dtype", self.dtype.is_some()),
            ("--mask", self.mask.is_some()),
            ("--seconds", self.seconds.is_some()),
            ("--slow-b", self.slow_b.is_some()),
            ("--threads", self.threads.asked_for().is_some()),
        ];
        match given.into_iter().find(|(_, is_given)| *is_given) {
            None => Ok(()),
            Some((option, _)) => Err(Failure::Usage(format!(
                "{option} is for a comparison that runs something; records hold the problems and times that they have: leave it out"
            ))),
        }
    }

    fn options(&self) -> Options {
        const SECONDS: f64 = 20.0;
        Options {
            minimum: self.minimum / 100.0,
            budget: Duration::from_secs_f64(self.seconds.unwrap_or(SECONDS)),
            seed: self.seed,
            slow_b: self.slow_b.unwrap_or(0.0) / 100.0,
            ..Options::default()
        }
    }

    /// Two subjects of this program.
    fn subjects(&self, sides: [Subject; 2], output: &Output) -> Result<Ending, Failure> {
        let is_gpu = matches!(sides, [Subject::Cuda(_), _]);
        let gpu = if is_gpu { Some(open_gpu()?) } else { None };
        let problems = self.problems(is_gpu)?;
        let Some(first) = problems.first() else {
            return Err(Failure::Usage("the suite has no problem to compare".to_owned()));
        };
        let ceiling = |side| measure_ceilings(side, first, gpu.as_ref()).map_err(failure);
        let ceilings = [ceiling(sides[0])?, ceiling(sides[1])?];
        let options = self.options();
        let kept = Mutex::new(Vec::new());
        let work = || {
            for (index, problem) in problems.iter().enumerate() {
                let go_on = progress(output, index, problems.len(), problem);
                let row =
                    compare_in_process(sides, problem, gpu.as_ref(), ceilings, &options, go_on).map_err(failure)?;
                interrupt::aside(&kept).push(row);
                if interrupt::requested() {
                    break;
                }
            }
            Ok(())
        };
        interrupt::abandonable(output, work, |_| {
            let machine = machine(sides[1], gpu.as_ref(), Some(ceilings[1]))?;
            let rows = std::mem::take(&mut *interrupt::aside(&kept));
            let comparison = Comparison { a: self.a.to_string(), b: self.b.to_string(), rows };
            self.conclude(&comparison, machine, problems.len(), output)
        })
    }

    /// Two programs, or this one and another.
    fn programs(&self, output: &Output) -> Result<Ending, Failure> {
        if self.slow_b.is_some() {
            return Err(Failure::Usage("--slow-b works on subjects of this program, not on builds".to_owned()));
        }
        let run = self.run.unwrap_or(Subject::Cpu(None));
        let side = |side: &Side| -> Result<(PathBuf, Subject), Failure> {
            Ok(match side {
                Side::Subject(subject) => (std::env::current_exe()?, *subject),
                Side::Binary(path) => (path.clone(), run),
                Side::Revision(revision) => {
                    let program = binary_of_revision(revision, &builds_folder()?, |said| output.note(said));
                    (program.map_err(|error| Failure::Environment(error.to_string()))?, run)
                }
                Side::Record(_) => return Err(Failure::Usage("a record cannot be run".to_owned())),
            })
        };
        let options = self.options();
        let subject = |side: &Side| if let Side::Subject(subject) = side { *subject } else { run };
        let is_gpu = matches!(subject(&self.b), Subject::Cuda(_));
        let problems = self.problems(is_gpu)?;
        // Where a program lies is nobody's business.
        let label = |side: &Side| match side {
            Side::Binary(path) => format!("bin:{}", path.file_name().unwrap_or_default().to_string_lossy()),
            other => other.to_string(),
        };
        let kept = Mutex::new(Comparison { a: label(&self.a), b: label(&self.b), rows: Vec::new() });
        let work = || {
            let (a, b) = (side(&self.a)?, side(&self.b)?);
            for (index, problem) in problems.iter().enumerate() {
                if interrupt::requested() {
                    break;
                }
                let go_on = progress(output, index, problems.len(), problem);
                let compared = compare_workers([&a.0, &b.0], [a.1, b.1], problem, &options, go_on);
                let (row, builds) = match compared {
                    // Ctrl-C reaches the workers too.
                    Err(_) if interrupt::requested() => break,
                    compared => compared.map_err(failure)?,
                };
                let mut kept = interrupt::aside(&kept);
                kept.rows.push(row);
                kept.a = format!("{} ({})", label(&self.a), builds[0].short());
                kept.b = format!("{} ({})", label(&self.b), builds[1].short());
            }
            Ok(())
        };
        interrupt::abandonable(output, work, |_| {
            let gpu = if is_gpu { Some(open_gpu()?) } else { None };
            let machine = machine(subject(&self.b), gpu.as_ref(), None)?;
            self.conclude(&interrupt::aside(&kept), machine, problems.len(), output)
        })
    }

    fn problems(&self, is_gpu: bool) -> Result<Vec<Workload>, Failure> {
        let types = self.dtype.unwrap_or(super::one_type(if is_gpu { DType::F16 } else { DType::F32 }));
        let mask = self.mask.as_deref().unwrap_or("full");
        let one = |shape: &str| Ok(vec![super::computable_problem(shape, types, mask)?]);
        let all = |suite: BenchSuite| super::suite_of_types(suite.problems(types.query), types);
        match (&self.shape, self.suite.unwrap_or(SuiteName::One)) {
            (Some(shape), _) => one(shape),
            (None, SuiteName::One) => one("1x8x512x64"),
            (None, SuiteName::Quick) => all(BenchSuite::Quick),
            (None, SuiteName::Seeds) => all(BenchSuite::Seeds),
            (None, SuiteName::Prefill) => all(BenchSuite::Prefill),
            (None, SuiteName::Decode) => all(BenchSuite::Decode),
        }
    }

    /// The record, the table, the verdicts in words, and how the command ends.
    fn conclude(
        &self,
        comparison: &Comparison,
        machine: Machine,
        of: usize,
        output: &Output,
    ) -> Result<Ending, Failure> {
        if let Some(file) = &self.record {
            write_record(file, machine, comparison.clone())?;
        }
        output.table(&table(comparison), self.format)?;
        if matches!(self.format, Format::Table | Format::Markdown) {
            for ComparedRow { b, conclusion, .. } in &comparison.rows {
                output.verdict(printable(&format!("{}: {}", b.problem, sentence(comparison, conclusion))))?;
            }
            let (done, of) = (comparison.rows.len(), of.max(comparison.rows.len()));
            if interrupt::requested() {
                output.line(format!("{done} compared{}", interrupt::left_out(done, of)))?;
            }
        }
        let has = |finding| comparison.rows.iter().any(|row| row.conclusion.finding == finding);
        if interrupt::requested() {
            return Ok(Ending::Interrupted);
        }
        if comparison.rows.is_empty() {
            return Err(Failure::Usage("nothing was compared".to_owned()));
        }
        if let Some(expected) = self.expect {
            let all = comparison.rows.iter().all(|row| row.conclusion.finding == expected.finding());
            return Ok(if all { Ending::Well } else { Ending::Failed });
        }
        Ok(if has(Finding::Slower) || has(Finding::Rejected) {
            Ending::Failed
        } else if has(Finding::Ambiguous) {
            Ending::Ambiguous
        } else {
            Ending::Well
        })
    }
}

/// The verdict in one sentence.
pub(super) fn sentence(comparison: &Comparison, conclusion: &Conclusion) -> String {
    let Conclusion { finding, reason, difference, control, rounds, .. } = conclusion;
    let (a, b) = (&comparison.a, &comparison.b);
    let (change, low, high) = (100.0 * difference.median, 100.0 * difference.low, 100.0 * difference.high);
    let takes = match change {
        change if change < 0.0 => format!("takes {:.1} % less time than", -change),
        change => format!("takes {change:.1} % more time than"),
    };
    format!(
        "{finding}: {b} {takes} {a} (interval {low:+.1} to {high:+.1} %, A/A {}, {rounds} rounds): {reason}",
        control.percent()
    )
}

fn table(comparison: &Comparison) -> Table {
    let columns = [
        column("verdict", "verdict").verdict(),
        column("A us", "a_us"),
        column("B us", "b_us"),
        column("change %", "change_percent"),
        column("low %", "change_low_percent"),
        column("high %", "change_high_percent"),
        column("A/A %", "a_a_percent"),
        column("A/A low %", "a_a_low_percent").minor(),
        column("A/A high %", "a_a_high_percent").minor(),
        column("rounds", "rounds").minor(),
        column("B efficiency %", "b_efficiency_percent").minor(),
    ];
    let mut table = Table::new(&[&PROBLEM[..], &columns].concat());
    for ComparedRow { a, b, conclusion, .. } in &comparison.rows {
        let percent = |part: f64| Cell::number(100.0 * part, 2);
        let mut cells = recorded_cells(&b.problem);
        cells.extend([
            Cell::from(conclusion.finding.to_string()),
            Cell::number(a.median() * 1e6, 2),
            Cell::number(b.median() * 1e6, 2),
            percent(conclusion.difference.median),
            percent(conclusion.difference.low),
            percent(conclusion.difference.high),
            percent(conclusion.control.median),
            percent(conclusion.control.low),
            percent(conclusion.control.high),
            Cell::from(conclusion.rounds),
            Cell::figure(b.efficiency_percent(), 1),
        ]);
        table.push(cells);
    }
    table
}

fn open_gpu() -> Result<Gpu, Failure> {
    Gpu::open(0).map_err(|error| Failure::Environment(error.to_string()))
}

/// Shows the progress, and stops when somebody presses Ctrl-C.
fn progress<'a>(output: &'a Output, index: usize, of: usize, problem: &Workload) -> impl FnMut(Progress) -> bool + 'a {
    let name = format!("{} {}", problem.shape(), mask_text(problem.mask));
    move |progress: Progress| {
        output.progress(index, of, &format!("{name}: {} rounds, {:.0} s", progress.rounds, progress.seconds));
        !interrupt::requested()
    }
}

fn machine(
    subject: Subject,
    gpu: Option<&Gpu>,
    ceilings: Option<flashcore_bench::floor::Ceilings>,
) -> Result<Machine, Failure> {
    match subject {
        Subject::Cpu(level) => {
            let level = level.map_or_else(Level::default_level, Ok);
            let level = level.map_err(|error| Failure::Environment(error.to_string()))?;
            Ok(Machine::cpu(&level.to_string(), working_threads(), ceilings))
        }
        Subject::Cuda(_) => {
            let context = gpu.and_then(|gpu| gpu.device().context());
            let context = context.ok_or_else(|| Failure::Environment("there is no GPU".to_owned()))?;
            Ok(Machine::gpu(context.device(), ceilings))
        }
    }
}

/// Folder of the programs of revisions.
pub(super) fn builds_folder() -> Result<PathBuf, Failure> {
    let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let base = base.or_else(home).ok_or_else(|| {
        Failure::Environment("there is no directory for builds; set HOME or XDG_CACHE_HOME".to_owned())
    })?;
    Ok(base.join("flashcore").join("builds"))
}

/// Process that `compare` starts.
#[derive(Debug, Args)]
pub(crate) struct CompareWorker {
    #[arg(long)]
    subject: Subject,
    #[arg(long)]
    shape: String,
    #[arg(long)]
    dtype: DTypes,
    #[arg(long)]
    mask: String,
    #[arg(long)]
    seed: u64,
}

impl CompareWorker {
    pub(crate) fn run(&self) -> Result<Ending, Failure> {
        let problem = super::computable_problem(&self.shape, self.dtype, &self.mask)?;
        let orders = BufReader::new(std::io::stdin());
        serve(self.subject, &problem, self.seed, &build(), orders, std::io::stdout()).map_err(failure)?;
        Ok(Ending::Well)
    }
}
