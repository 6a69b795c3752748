//! `flashcore status`: what is verified and measured, by the records of the project.

use std::path::PathBuf;

use clap::Args;
use flashcore_bench::lab::status::{State, status};

use crate::output::{Cell, Format, Output, Table, column};
use crate::{Ending, Failure};

/// Show what is verified, measured, promoted and failing, by the records of the project
///
/// Reads the directories of results and experiments and checks each row of the definition of done against them. Exit code
/// 1 if a record shows a failure; with --strict also if there is no record.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  flashcore status\n  flashcore status --strict --format json")]
pub(crate) struct StatusCommand {
    /// The directory of results
    #[arg(long, value_name = "DIR", default_value = "results")]
    results: PathBuf,
    /// The directory of experiments
    #[arg(long, value_name = "DIR", default_value = "experiments")]
    experiments: PathBuf,
    /// Fail on missing records as well
    #[arg(long)]
    strict: bool,
    /// The output format
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

impl StatusCommand {
    pub(crate) fn run(&self, output: &Output) -> Result<Ending, Failure> {
        if !self.results.is_dir() {
            let folder = self.results.display();
            return Err(Failure::Usage(format!(
                "`{folder}` is not a directory; run this in a checkout of flashcore, or use --results DIR"
            )));
        }
        let rows = status(&self.results, &self.experiments);
        let mut table =
            Table::new(&[column("what", "what"), column("state", "state").verdict(), column("evidence", "evidence")]);
        for row in &rows {
            table.push(vec![Cell::from(row.what), Cell::from(row.state.word()), Cell::from(row.evidence.as_str())]);
        }
        output.table(&table, self.format)?;
        let count = |state| rows.iter().filter(|row| row.state == state).count();
        let (done, failing, missing) = (count(State::Done), count(State::Failing), count(State::Missing));
        if matches!(self.format, Format::Table | Format::Markdown) {
            output.line(format!("{done} done, {failing} failing, {missing} missing"))?;
        }
        let is_well = failing == 0 && (missing == 0 || !self.strict);
        Ok(if is_well { Ending::Well } else { Ending::Failed })
    }
}
