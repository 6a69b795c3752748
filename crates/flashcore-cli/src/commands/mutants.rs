//! `flashcore mutants`: would we notice?

use clap::Args;
use flashcore_bench::mutants::{self, Killer, MutantsError, Mutation, Trials};

use crate::output::{Cell, Format, Output, Table};
use crate::{Ending, Failure};

/// Plant bugs in the kernels and show what kills each
///
/// The kernels as they are must pass on every trial under several orders of warps; then each bug of the catalogue is
/// planted, one at a time, and must be killed by the verifier, by a fault of the simulator, by the gate, or, if it only
/// costs time, by the simulator's counters. A survivor is a hole in the checks, and the command fails.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  flashcore mutants --only swizzle")]
pub(crate) struct Mutants {
    /// Only mutations whose name contains this
    #[arg(long)]
    only: Option<String>,
    /// How the matrix is written
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

impl Mutants {
    pub(crate) fn run(&self, output: &mut Output) -> Result<Ending, Failure> {
        let wanted = |mutation: &&Mutation| self.only.as_ref().is_none_or(|only| mutation.name.contains(only.as_str()));
        let mutations: Vec<Mutation> = mutants::all().filter(wanted).copied().collect();
        if mutations.is_empty() {
            let names: Vec<_> = mutants::all().map(|mutation| mutation.name).collect();
            return Err(Failure::Usage(format!("no mutation is called so; there are {}", names.join(", "))));
        }
        let as_it_is = |done: usize, count: usize, what: &str| {
            output.progress(done, count, &format!("as it is: {what}"));
        };
        let trials = match Trials::prepare(&mutations, as_it_is) {
            Ok(trials) => trials,
            Err(error) => return Ok(failed(output, &error)),
        };
        let mut table = Table::new(&["kernel", "mutant", "verifier", "simulator", "gate", "counters", "what it said"]);
        let mut counts = [0usize; 4];
        let mut survivors = Vec::new();
        for (index, mutation) in mutations.iter().enumerate() {
            output.progress(index, mutations.len(), mutation.name);
            let fate = match trials.fate(*mutation) {
                Ok(fate) => fate,
                Err(error) => return Ok(failed(output, &error)),
            };
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
            let mut row = vec![Cell::from(mutation.family), Cell::from(mutation.name)];
            row.extend(marks.map(|mark| Cell::from(if mark { "killed" } else { "" })));
            row.push(Cell::from(report));
            table.push(row);
        }
        output.table(&table, self.format)?;
        if matches!(self.format, Format::Table | Format::Markdown) {
            let [verifier, simulator, gate, counters] = counts;
            output.line(format!(
                "\nkernels as they are: {} runs clean ({} kernels and problems, each under two to eight orders of warps)",
                trials.passed(),
                trials.count()
            ))?;
            output.line(format!(
                "{} mutants: {verifier} killed by the verifier, {simulator} by a fault of the simulator, {gate} by the gate, {counters} by counters; {} survived",
                mutations.len(),
                survivors.len()
            ))?;
        }
        Ok(if survivors.is_empty() { Ending::Well } else { Ending::Failed })
    }
}

fn failed(output: &mut Output, error: &MutantsError) -> Ending {
    output.complain(&error.to_string());
    Ending::Failed
}

/// What people read on one line of a terminal; programs get all of it.
fn shortened(report: &str, format: Format) -> String {
    const MOST: usize = 110;
    match format {
        Format::Table if report.chars().count() > MOST => report.chars().take(MOST - 1).chain(['…']).collect(),
        Format::Table | Format::Markdown | Format::Json | Format::Csv => report.to_owned(),
    }
}
