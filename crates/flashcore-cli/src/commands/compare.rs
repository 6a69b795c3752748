//! `flashcore compare`: which of two is faster, and is that so?

use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use flashcore_bench::compare::{
    CompareError, ComparedRow, Comparison, Conclusion, Finding, Options, Progress, Side, Subject, binary_of_revision,
    compare_in_process, compare_records, compare_workers, measure_ceilings, serve, slack,
};
use flashcore_bench::gpu::Gpu;
use flashcore_bench::printable::printable;
use flashcore_bench::problems::BenchSuite;
use flashcore_bench::record::{Machine, Measurements, Record};
use flashcore_bench::{mask_text, shape_text};
use flashcore_cpu::Level;
use flashcore_problem::{DType, Problem};

use super::origin::{build, write_record};
use super::overwriting::refuse_overwriting;
use crate::output::{Cell, Format, Output, Table};
use crate::{Ending, Failure, interrupt};

/// Compare two configs, kernels, CPU levels, builds or records, and say which is faster
///
/// A and B run in turn, in random order, with A a second time in every round: what A differs from itself is what the
/// machine makes of nothing. Both are verified before and after they are timed. B is FASTER or SLOWER when the whole
/// bootstrap interval of the median difference lies beyond --minimum and beyond twice the A/A difference, SAME when it
/// lies within --minimum, and else AMBIGUOUS. A time below the floor of the machine is REJECTED as an error of measuring.
///
/// Exit codes: 0 for FASTER and SAME, 1 for SLOWER and REJECTED, 4 for AMBIGUOUS; with --expect, 0 for what was expected
/// and 1 for anything else.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashcore compare cpu:avx2 cpu:avx512\n  flashcore compare cuda:ampere-64x64-2stage-swizzled cuda:ampere-64x64-3stage-swizzled --suite seeds\n  flashcore compare rev:main rev:HEAD --shape 1x8x512x64      builds both, once, into a cache folder\n  flashcore compare before.json after.json                    two records of `flashcore bench`\n  flashcore compare cpu cpu --slow-b 5 --expect slower        does the instrument see 5 %?"
)]
pub(crate) struct Compare {
    /// What B is held against: cpu[:LEVEL], cuda[:CONFIG], rev:REVISION, bin:PATH, or the .json file of a record
    a: Side,
    /// What is in question
    b: Side,
    /// What two builds run
    #[arg(long, value_name = "SUBJECT", default_value = "cpu")]
    run: Subject,
    /// The problems
    #[arg(long, value_enum, default_value_t = SuiteName::One)]
    suite: SuiteName,
    /// One problem instead: batch x heads[/key heads] x queries[,keys] x dim
    #[arg(long, conflicts_with = "suite")]
    shape: Option<String>,
    /// The element type; f32 on the CPU and f16 on a GPU unless said
    #[arg(long)]
    dtype: Option<DType>,
    /// The mask of the problem: full, causal, causal-top-left or window:LEFT,RIGHT
    #[arg(long, default_value = "full")]
    mask: String,
    /// The percent by which times must differ to be called different, fixed before anything is measured
    #[arg(long, default_value_t = 2.0, value_name = "PERCENT")]
    minimum: f64,
    /// Seconds for each problem, at most
    #[arg(long, default_value_t = 20.0, value_parser = super::parse_seconds, allow_negative_numbers = true)]
    seconds: f64,
    /// The seed of inputs, orders and resamples
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Make every run of B take this percent longer, by waiting within it: a test of the instrument, on the CPU
    #[arg(long, default_value_t = 0.0, value_name = "PERCENT", value_parser = super::parse_percent, allow_negative_numbers = true)]
    slow_b: f64,
    /// The verdict that is wanted on every problem: exit code 0 for it, 1 for any other
    #[arg(long, value_enum)]
    expect: Option<Expected>,
    /// A file for everything: machine, every round, every verdict, as JSON
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// How results are written
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum SuiteName {
    /// 1x8x512x64 alone
    One,
    /// A few, for a first look
    Quick,
    /// The shapes of the project's history: what promotion asks for
    Seeds,
    /// Long sequences, 16k tokens in all
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
    /// They take the same
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
    pub(crate) fn run(&self, output: &mut Output) -> Result<Ending, Failure> {
        interrupt::watch();
        if !(self.minimum > 0.0 && self.minimum < 100.0) {
            return Err(Failure::Usage(format!("--minimum is {}; it must be above 0 and below 100", self.minimum)));
        }
        let records: Vec<&Path> = [&self.a, &self.b].into_iter().filter_map(Side::record).collect();
        refuse_overwriting(&records, self.record.as_deref().as_slice())?;
        let (comparison, machine) = match (&self.a, &self.b) {
            (Side::Record(a), Side::Record(b)) => {
                let read = |file| Record::<Measurements>::read(file).map_err(|error| Failure::Usage(error.to_string()));
                let (a, b) = (read(a)?, read(b)?);
                let names = [self.a.to_string(), self.b.to_string()];
                let slack = if a.origin.machine.backend == "cpu" { slack(Subject::Cpu(None)) } else { 0.0 };
                let options = Options { least_rounds: 10, ..self.options() };
                let comparison = compare_records(&a, &b, names, &options, slack)
                    .map_err(|error| Failure::Usage(error.to_string()))?;
                (comparison, b.origin.machine)
            }
            (Side::Record(_), other) | (other, Side::Record(_)) => {
                return Err(Failure::Usage(format!(
                    "a record can be compared with another record only, not with {other}"
                )));
            }
            (Side::Subject(a), Side::Subject(b)) => self.subjects([*a, *b], output)?,
            _ => self.programs(output)?,
        };
        if let Some(file) = &self.record {
            write_record(file, machine, comparison.clone())?;
        }
        output.table(&table(&comparison), self.format)?;
        self.conclude(&comparison, output)
    }

    fn options(&self) -> Options {
        Options {
            minimum: self.minimum / 100.0,
            budget: Duration::from_secs_f64(self.seconds),
            seed: self.seed,
            slow_b: self.slow_b / 100.0,
            ..Options::default()
        }
    }

    /// Two subjects of this program.
    fn subjects(&self, sides: [Subject; 2], output: &mut Output) -> Result<(Comparison, Machine), Failure> {
        let is_gpu = matches!(sides, [Subject::Cuda(_), _]);
        let gpu = if is_gpu { Some(open_gpu()?) } else { None };
        let problems = self.problems(is_gpu)?;
        let Some(first) = problems.first() else {
            return Err(Failure::Usage("there is nothing to compare".to_owned()));
        };
        let ceiling = |side| measure_ceilings(side, first, gpu.as_ref()).map_err(failure);
        let ceilings = [ceiling(sides[0])?, ceiling(sides[1])?];
        let options = self.options();
        let mut rows = Vec::new();
        for (index, problem) in problems.iter().enumerate() {
            let go_on = progress(output, index, problems.len(), problem);
            rows.push(compare_in_process(sides, problem, gpu.as_ref(), ceilings, &options, go_on).map_err(failure)?);
            if interrupt::requested() {
                break;
            }
        }
        let machine = machine(sides[1], gpu.as_ref(), Some(ceilings[1]))?;
        Ok((Comparison { a: self.a.to_string(), b: self.b.to_string(), rows }, machine))
    }

    /// Two programs, or this one and another.
    fn programs(&self, output: &mut Output) -> Result<(Comparison, Machine), Failure> {
        if self.slow_b != 0.0 {
            return Err(Failure::Usage("--slow-b is for subjects of this program, not for builds".to_owned()));
        }
        let side = |side: &Side, output: &mut Output| -> Result<(PathBuf, Subject), Failure> {
            Ok(match side {
                Side::Subject(subject) => (std::env::current_exe()?, *subject),
                Side::Binary(path) => (path.clone(), self.run),
                Side::Revision(revision) => {
                    let program = binary_of_revision(revision, &builds_folder()?, |said| output.note(said));
                    (program.map_err(|error| Failure::Environment(error.to_string()))?, self.run)
                }
                Side::Record(_) => return Err(Failure::Usage("a record is no program".to_owned())),
            })
        };
        let (a, b) = (side(&self.a, output)?, side(&self.b, output)?);
        let problems = self.problems(matches!(b.1, Subject::Cuda(_)))?;
        let options = self.options();
        let mut rows = Vec::new();
        // Where a program lies is nobody's business.
        let label = |side: &Side| match side {
            Side::Binary(path) => format!("bin:{}", path.file_name().unwrap_or_default().to_string_lossy()),
            other => other.to_string(),
        };
        let (mut name_a, mut name_b) = (label(&self.a), label(&self.b));
        for (index, problem) in problems.iter().enumerate() {
            let go_on = progress(output, index, problems.len(), problem);
            let (row, builds) = compare_workers([&a.0, &b.0], [a.1, b.1], problem, &options, go_on).map_err(failure)?;
            rows.push(row);
            name_a = format!("{} ({})", label(&self.a), builds[0].short());
            name_b = format!("{} ({})", label(&self.b), builds[1].short());
            if interrupt::requested() {
                break;
            }
        }
        let gpu = if matches!(b.1, Subject::Cuda(_)) { Some(open_gpu()?) } else { None };
        Ok((Comparison { a: name_a, b: name_b, rows }, machine(b.1, gpu.as_ref(), None)?))
    }

    fn problems(&self, is_gpu: bool) -> Result<Vec<Problem>, Failure> {
        let dtype = self.dtype.unwrap_or(if is_gpu { DType::F16 } else { DType::F32 });
        let one = |shape: &str| Ok(vec![super::computable_problem(shape, dtype, &self.mask)?]);
        match (&self.shape, self.suite) {
            (Some(shape), _) => one(shape),
            (None, SuiteName::One) => one("1x8x512x64"),
            (None, SuiteName::Quick) => Ok(BenchSuite::Quick.problems(dtype)),
            (None, SuiteName::Seeds) => Ok(BenchSuite::Seeds.problems(dtype)),
            (None, SuiteName::Prefill) => Ok(BenchSuite::Prefill.problems(dtype)),
            (None, SuiteName::Decode) => Ok(BenchSuite::Decode.problems(dtype)),
        }
    }

    /// The verdicts in words, and how the command ends.
    fn conclude(&self, comparison: &Comparison, output: &mut Output) -> Result<Ending, Failure> {
        if matches!(self.format, Format::Table | Format::Markdown) {
            for ComparedRow { b, conclusion, .. } in &comparison.rows {
                output.line(printable(&format!("{}: {}", b.problem, sentence(comparison, conclusion))))?;
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
    let (difference, control) = (difference.percent(), control.percent());
    format!("{finding}: the time of {b} is that of {a} {difference}; A/A {control}; {rounds} rounds; {reason}")
}

fn table(comparison: &Comparison) -> Table {
    let mut table = Table::new(&[
        "shape",
        "dtype",
        "mask",
        "verdict",
        "A us",
        "B us",
        "change %",
        "low %",
        "high %",
        "A/A %",
        "A/A low %",
        "A/A high %",
        "rounds",
        "% of floor",
    ]);
    for ComparedRow { a, b, conclusion, .. } in &comparison.rows {
        let percent = |part: f64| Cell::number(100.0 * part, 2);
        table.push(vec![
            Cell::from(b.problem.shape.as_str()),
            Cell::from(b.problem.dtype.as_str()),
            Cell::from(b.problem.mask.as_str()),
            Cell::from(conclusion.finding.to_string()),
            Cell::number(a.median() * 1e6, 2),
            Cell::number(b.median() * 1e6, 2),
            percent(conclusion.difference.median),
            percent(conclusion.difference.low),
            percent(conclusion.difference.high),
            percent(conclusion.control.median),
            percent(conclusion.control.low),
            percent(conclusion.control.high),
            Cell::number(conclusion.rounds as f64, 0),
            Cell::number(100.0 * b.floor_seconds / b.median(), 1),
        ]);
    }
    table
}

fn open_gpu() -> Result<Gpu, Failure> {
    Gpu::open(0).map_err(|error| Failure::Environment(error.to_string()))
}

/// Shows the progress, and stops when somebody presses Ctrl-C.
fn progress<'a>(
    output: &'a mut Output,
    index: usize,
    of: usize,
    problem: &Problem,
) -> impl FnMut(Progress) -> bool + 'a {
    let name = format!("{} {}", shape_text(problem), mask_text(problem.mask));
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
            Ok(Machine::cpu(&level.to_string(), rayon::current_num_threads(), ceilings))
        }
        Subject::Cuda(_) => {
            let context = gpu.and_then(|gpu| gpu.device().context());
            let context = context.ok_or_else(|| Failure::Environment("there is no GPU".to_owned()))?;
            Ok(Machine::gpu(context.device(), ceilings))
        }
    }
}

/// Where the programs of revisions are kept.
pub(super) fn builds_folder() -> Result<PathBuf, Failure> {
    let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let base = base
        .or_else(home)
        .ok_or_else(|| Failure::Environment("there is no folder for builds; set HOME or XDG_CACHE_HOME".to_owned()))?;
    Ok(base.join("flashcore").join("builds"))
}

/// What `compare` starts processes of its own for.
#[derive(Debug, Args)]
pub(crate) struct CompareWorker {
    #[arg(long)]
    subject: Subject,
    #[arg(long)]
    shape: String,
    #[arg(long)]
    dtype: DType,
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
