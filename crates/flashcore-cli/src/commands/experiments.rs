//! `flashcore experiments`: hypotheses with their measured results.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use flashcore_bench::lab::compare::Comparison;
use flashcore_bench::lab::experiments::{Experiment, ExperimentError, find, list};
use flashcore_bench::lab::record::Record;
use flashcore_bench::util::command_line::command_line;
use flashcore_bench::util::moment;
use flashcore_bench::util::printable::printable;
use flashcore_bench::util::temporary_folder::TemporaryFolder;
use flashcore_bench::util::whole_file::is_same_file;

use super::origin::write_file;
use crate::output::{Cell, Format, Output, Table, column};
use crate::{Ending, Failure, interrupt};

/// List, show, write and repeat experiments: hypotheses with their measured results
///
/// An experiment is a TOML file with a hypothesis, a predicted effect, the measured effect with its interval, the verdict
/// and the hash of the evidence. Experiments without gain are kept too, so that nobody repeats them unknowingly.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashcore experiments list\n  flashcore experiments show three-stages\n  flashcore experiments new wider-tiles --from compare.json --predicted -5 --hypothesis 'Fewer barriers per key'\n  flashcore experiments run wider-tiles"
)]
pub(crate) struct Experiments {
    #[command(subcommand)]
    action: Action,
    /// The directory of the experiments
    #[arg(long, global = true, value_name = "DIR", default_value = "experiments")]
    folder: PathBuf,
    /// The output format
    #[arg(long, global = true, value_enum, default_value_t)]
    format: Format,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// List all experiments
    List,
    /// Show one in full; exit code 1 if its evidence has changed
    Show {
        /// The name of its file, without .toml
        name: String,
    },
    /// Write a new one from the record of a comparison
    #[command(
        after_help = "Example:\n  flashcore compare cpu:avx2 cpu:avx512 --record compare.json\n  flashcore experiments new avx512 --from compare.json --predicted -40 --hypothesis 'Vectors of twice the width'"
    )]
    New {
        /// The name of the file, without .toml
        name: String,
        /// The record of `flashcore compare`; it is copied beside the experiment as its evidence
        #[arg(long, value_name = "FILE")]
        from: PathBuf,
        /// The hypothesis, with its reason
        #[arg(long)]
        hypothesis: String,
        /// The predicted change of time in percent; negative is faster
        #[arg(long, value_name = "PERCENT", allow_negative_numbers = true, value_parser = super::parse_finite)]
        predicted: f64,
        /// The title [default: the name]
        #[arg(long)]
        title: Option<String>,
        /// The conclusion
        #[arg(long, default_value = "")]
        conclusion: String,
        /// Hours of work
        #[arg(long, allow_negative_numbers = true, value_parser = super::parse_finite)]
        hours: Option<f64>,
    },
    /// Repeat the comparison of an experiment; exit code 1 if the outcome differs
    Run {
        /// The name of its file, without .toml
        name: String,
        /// Replace the result and the evidence of the experiment by the new ones
        #[arg(long)]
        write: bool,
    },
}

#[expect(clippy::needless_pass_by_value, reason = "map_err hands it over")]
fn failure(error: ExperimentError) -> Failure {
    Failure::Usage(error.to_string())
}

impl Experiments {
    pub(crate) fn run(&self, output: &Output) -> Result<Ending, Failure> {
        if !matches!(self.action, Action::New { .. }) && !self.folder.is_dir() {
            let folder = self.folder.display();
            return Err(Failure::Usage(format!(
                "`{folder}` is not a directory; run this in a checkout of flashcore, or use --folder DIR"
            )));
        }
        match &self.action {
            Action::List => {
                output.table(&table(&list(&self.folder).map_err(failure)?, &self.folder), self.format)?;
                Ok(Ending::Well)
            }
            Action::Show { name } => self.show(name, output),
            Action::New { name, from, hypothesis, predicted, title, conclusion, hours } => {
                let record = Record::<Comparison>::read(from).map_err(|error| Failure::Usage(error.to_string()))?;
                let experiment = Experiment {
                    title: title.clone().unwrap_or_else(|| name.clone()),
                    date: moment::now()[..10].to_owned(),
                    hypothesis: hypothesis.clone(),
                    predicted_percent: *predicted,
                    a: record.content.a.clone(),
                    b: record.content.b.clone(),
                    arguments: further_arguments(&record.origin.command),
                    conclusion: conclusion.clone(),
                    hours: *hours,
                    measured: None,
                };
                let file = self.folder.join(format!("{name}.toml"));
                let evidence = self.folder.join(format!("{name}.json"));
                // The record may lie where its copy will.
                let is_taken = evidence.symlink_metadata().is_ok() && !is_same_file(&evidence, from);
                if let Some(taken) = [(&file, file.symlink_metadata().is_ok()), (&evidence, is_taken)]
                    .into_iter()
                    .find_map(|(file, is_taken)| is_taken.then_some(file))
                {
                    return Err(Failure::Usage(format!("{} exists; choose another name", taken.display())));
                }
                self.write(name, experiment, &record, from)?;
                output.note(&format!("wrote {}", file.display()));
                self.show(name, output)
            }
            Action::Run { name, write } => self.repeat(name, *write, output),
        }
    }

    /// Writes an experiment, with its evidence beside it.
    fn write(
        &self,
        name: &str,
        mut experiment: Experiment,
        record: &Record<Comparison>,
        from: &Path,
    ) -> Result<(), Failure> {
        let bytes = fs::read(from)?;
        let evidence = format!("{name}.json");
        fs::create_dir_all(&self.folder)?;
        write_file(&self.folder.join(&evidence), &bytes)?;
        experiment.measure(record, evidence, &bytes);
        write_file(&self.folder.join(format!("{name}.toml")), experiment.to_toml().as_bytes())
    }

    fn show(&self, name: &str, output: &Output) -> Result<Ending, Failure> {
        let experiment = find(&self.folder, name).map_err(failure)?;
        let evidence = experiment.evidence(&self.folder);
        if matches!(self.format, Format::Table | Format::Markdown) {
            let hours = experiment.hours.map_or(String::new(), |hours| format!(", {hours} hours"));
            // What is in the file is one line each, whatever it holds.
            let line = |text: String| output.line(printable(&text));
            line(format!("{} ({}{hours})", experiment.title, experiment.date))?;
            line(format!("hypothesis: {}", experiment.hypothesis))?;
            line(format!("predicted: {:+} % change of the time of {}", experiment.predicted_percent, experiment.a))?;
            let arguments = command_line(&experiment.arguments);
            line(format!("repeat: flashcore compare {} {} {arguments}", experiment.a, experiment.b))?;
            if let Some(measured) = &experiment.measured {
                line(format!("measured: {} at {}", measured.machine, measured.commit))?;
                line(format!("evidence: {}, {}", measured.evidence, evidence.name()))?;
            }
            if !experiment.conclusion.is_empty() {
                line(format!("conclusion: {}", experiment.conclusion))?;
            }
            output.line(format!("outcome: {}\n", experiment.outcome()))?;
        }
        let mut table = Table::new(&[
            column("problem", "problem"),
            column("change %", "change_percent"),
            column("low %", "change_low_percent"),
            column("high %", "change_high_percent"),
            column("verdict", "verdict").verdict(),
        ]);
        for row in experiment.measured.iter().flat_map(|measured| &measured.rows) {
            table.push(vec![
                Cell::from(row.problem.as_str()),
                Cell::number(row.percent, 2),
                Cell::number(row.low, 2),
                Cell::number(row.high, 2),
                Cell::from(row.verdict.to_string()),
            ]);
        }
        output.table(&table, self.format)?;
        let is_changed = evidence == flashcore_bench::lab::experiments::Evidence::Changed;
        Ok(if is_changed { Ending::Failed } else { Ending::Well })
    }

    fn repeat(&self, name: &str, write: bool, output: &Output) -> Result<Ending, Failure> {
        let experiment = find(&self.folder, name).map_err(failure)?;
        let folder = TemporaryFolder::new("experiment")?;
        let file = folder.path().join("comparison.json");
        // What was compared, without what people read of builds.
        let side = |name: &str| name.split(" (").next().unwrap_or(name).to_owned();
        interrupt::watch_quietly();
        let child = Command::new(std::env::current_exe()?)
            .args(["compare", &side(&experiment.a), &side(&experiment.b)])
            .args(&experiment.arguments)
            .arg("--record")
            .arg(&file)
            .spawn()?;
        let ended = wait(child)?;
        if interrupt::requested() {
            output.note(&format!("the comparison was interrupted; `{name}` stays as it is"));
            return Ok(Ending::Interrupted);
        }
        let read = Record::<Comparison>::read(&file);
        let Ok(record) = read else {
            let code = ended.code().map_or_else(|| "a signal".to_owned(), |code| format!("exit code {code}"));
            return Err(Failure::Environment(format!("the comparison ended with {code} and left no record")));
        };
        let mut now = experiment.clone();
        now.measure(&record, format!("{name}.json"), &fs::read(&file)?);
        let (then, outcome) = (experiment.outcome(), now.outcome());
        output.line(format!("\nrecorded outcome: {then}; outcome now: {outcome}"))?;
        if write {
            self.write(name, experiment.clone(), &record, &file)?;
        }
        Ok(if then == outcome || experiment.measured.is_none() { Ending::Well } else { Ending::Failed })
    }
}

/// Waits for a comparison. A Ctrl-C of the terminal reaches it as well, and it ends within a second; one that has not
/// heard of it is ended.
fn wait(mut child: Child) -> io::Result<ExitStatus> {
    const PATIENCE: Duration = Duration::from_millis(700);
    let mut requested: Option<Instant> = None;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if interrupt::requested() && requested.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
            // It may have ended by itself meanwhile; then there is nothing to end.
            let _ = child.kill();
            return child.wait();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Arguments of a comparison besides its two sides, without files and formats.
fn further_arguments(command: &str) -> Vec<String> {
    let words: Vec<&str> = command.split_whitespace().collect();
    let mut arguments = Vec::new();
    let mut words = words.into_iter().skip_while(|word| !word.starts_with("--")).peekable();
    while let Some(word) = words.next() {
        // A value of several words is between quotes.
        let mut value: Vec<&str> = Vec::new();
        while let Some(next) = words.next_if(|next| !next.starts_with("--")) {
            value.push(next);
        }
        if !matches!(word, "--record" | "--format" | "--expect") {
            arguments.push(word.to_owned());
            arguments.extend((!value.is_empty()).then(|| value.join(" ").trim_matches('\'').to_owned()));
        }
    }
    arguments
}

/// All experiments, one line each.
pub(super) fn table(tried: &[(String, Experiment)], folder: &Path) -> Table {
    let mut table = Table::new(&[
        column("experiment", "experiment"),
        column("date", "date").minor(),
        column("title", "title"),
        column("predicted %", "predicted_percent"),
        column("best %", "best_percent"),
        column("outcome", "outcome"),
        column("machine", "machine").minor(),
        column("evidence", "evidence").minor().verdict(),
    ]);
    for (name, experiment) in tried {
        let rows = experiment.measured.iter().flat_map(|measured| &measured.rows);
        let best = rows.map(|row| row.percent).reduce(f64::min);
        table.push(vec![
            Cell::from(name.as_str()),
            Cell::from(experiment.date.as_str()),
            Cell::from(experiment.title.as_str()),
            Cell::number(experiment.predicted_percent, 1),
            Cell::figure(best, 1),
            Cell::from(experiment.outcome()),
            Cell::from(experiment.measured.as_ref().map_or("-", |measured| measured.machine.as_str())),
            Cell::from(experiment.evidence(folder).name()),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_comparison_was_called_with() {
        let check = |command: &str, expected: &[&str]| assert_eq!(further_arguments(command), expected);
        check(
            "flashcore compare cpu:avx2 cpu:avx512 --suite seeds --record a.json --minimum 3",
            &["--suite", "seeds", "--minimum", "3"],
        );
        check("flashcore compare a b", &[]);
        check(
            "flashcore compare cpu cpu --dtype 'bf16 kv e4m3' --shape 1x2x9x64+scales=head",
            &["--dtype", "bf16 kv e4m3", "--shape", "1x2x9x64+scales=head"],
        );
    }
}
