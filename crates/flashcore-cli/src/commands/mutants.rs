//! `flashcore mutants`: planted bugs, and what kills each.

use std::sync::Mutex;

use clap::Args;
use flashcore_bench::testkit::mutants::{self, Fate, Killer, MutantsError, Mutation, Trials};

use crate::output::{Cell, Format, Output, Table, column};
use crate::{Ending, Failure, interrupt};

/// Plant bugs in the kernels and show what kills each
///
/// The unchanged kernels must pass every trial under several orders of warps. Then each bug of the catalogue is planted, one
/// at a time, and must be killed by the verifier, by a fault in the simulator, by the correctness gate, or, if it only
/// costs time, by the simulator's counters. A survivor is a hole in the checks, and the command fails.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  flashcore mutants --only swizzle")]
pub(crate) struct Mutants {
    /// Only mutations whose name contains this text
    #[arg(long)]
    only: Option<String>,
    /// The output format
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// Results so far.
#[derive(Default)]
struct Kept {
    /// Clean runs of the unchanged kernels, and the pairs of kernel and problem.
    trials: Option<(u64, usize)>,
    /// The fates of the first mutations.
    fates: Vec<Fate>,
}

impl Mutants {
    pub(crate) fn run(&self, output: &Output) -> Result<Ending, Failure> {
        let wanted = |mutation: &&Mutation| self.only.as_ref().is_none_or(|only| mutation.name.contains(only.as_str()));
        let mutations: Vec<Mutation> = mutants::all().filter(wanted).copied().collect();
        if mutations.is_empty() {
            let names: Vec<_> = mutants::all().map(|mutation| mutation.name).collect();
            let only = self.only.as_deref().unwrap_or_default();
            return Err(Failure::Usage(format!(
                "no mutation has `{only}` in its name; there are {}",
                names.join(", ")
            )));
        }
        interrupt::watch();
        let kept = Mutex::new(Kept::default());
        let work = || {
            let trials = match Trials::prepare(&mutations, |done, count, what| {
                output.progress(done, count, &format!("unchanged: {what}"));
                !interrupt::requested()
            }) {
                Ok(Some(trials)) => trials,
                Ok(None) => return Ok(Ok(())),
                Err(error) => return Ok(Err(error)),
            };
            interrupt::aside(&kept).trials = Some((trials.passed(), trials.count()));
            for (index, mutation) in mutations.iter().enumerate() {
                if interrupt::requested() {
                    break;
                }
                output.progress(index, mutations.len(), mutation.name);
                match trials.fate(*mutation) {
                    Ok(fate) => interrupt::aside(&kept).fates.push(fate),
                    Err(error) => return Ok(Err(error)),
                }
            }
            Ok(Ok(()))
        };
        interrupt::abandonable(output, work, |worked| match worked {
            Some(Err(error)) => Ok(failed(output, &error)),
            Some(Ok(())) | None => self.show(&mutations, &std::mem::take(&mut *interrupt::aside(&kept)), output),
        })
    }

    fn show(&self, mutations: &[Mutation], kept: &Kept, output: &Output) -> Result<Ending, Failure> {
        let mut table = table();
        let done = kept.fates.len();
        let mut counts = [0usize; 4];
        let mut survivors = Vec::new();
        for (mutation, fate) in mutations.iter().zip(&kept.fates) {
            let killers = [Killer::Verifier, Killer::Fault, Killer::Gate, Killer::Counters];
            let marks = killers.map(|killer| fate.killed.as_ref().is_some_and(|kill| kill.by == killer));
            for (count, mark) in counts.iter_mut().zip(marks) {
                *count += usize::from(mark);
            }
            let report = match &fate.killed {
                Some(kill) => shortened(&kill.report, self.format),
                None => format!("SURVIVED: {}", mutation.bug),
            };
            if fate.killed.is_none() {
                survivors.push(mutation);
            }
            let mut row = vec![Cell::from(mutation.name), Cell::from(mutation.family)];
            row.extend(marks.map(|mark| Cell::from(if mark { "killed" } else { "" })));
            row.push(Cell::from(report));
            table.push(row);
        }
        output.table(&table, self.format)?;
        if matches!(self.format, Format::Table | Format::Markdown) {
            let [verifier, simulator, gate, counters] = counts;
            let Some((passed, count)) = kept.trials else {
                output.line(format!("0 mutants{}", interrupt::left_out(0, mutations.len())))?;
                return Ok(Ending::Interrupted);
            };
            output.line(format!(
                "\nunchanged kernels: {passed} clean runs ({count} pairs of kernel and problem, two to eight orders of warps each)"
            ))?;
            output.line(format!(
                "{done} mutants: {verifier} killed by the verifier, {simulator} by a fault in the simulator, {gate} by the gate, {counters} by counters; {} survived{}",
                survivors.len(),
                interrupt::left_out(done, mutations.len())
            ))?;
        }
        Ok(match (interrupt::requested() && done < mutations.len(), survivors.is_empty()) {
            (true, _) => Ending::Interrupted,
            (false, true) => Ending::Well,
            (false, false) => Ending::Failed,
        })
    }
}

fn table() -> Table {
    Table::new(&[
        column("mutant", "mutant"),
        column("kernel", "kernel"),
        column("verifier", "verifier").verdict(),
        column("simulator", "simulator").verdict(),
        column("gate", "gate").verdict(),
        column("counters", "counters").verdict(),
        column("report", "report").verdict(),
    ])
}

fn failed(output: &Output, error: &MutantsError) -> Ending {
    output.complain(&error.to_string());
    Ending::Failed
}

/// A report on one line of a terminal; programs get all of it.
fn shortened(report: &str, format: Format) -> String {
    const MOST: usize = 110;
    match format {
        Format::Table if report.chars().count() > MOST => report.chars().take(MOST - 1).chain(['…']).collect(),
        Format::Table | Format::Markdown | Format::Json | Format::Csv => report.to_owned(),
    }
}
