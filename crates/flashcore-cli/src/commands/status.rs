//! `flashcore status`: where does the project stand?

use std::path::PathBuf;

use clap::Args;
use flashcore_bench::status::{State, status};

use crate::output::{Cell, Format, Output, Table};
use crate::{Ending, Failure};

/// Say where the project stands, by its own records: what is verified, measured, promoted, failing
///
/// The folders of results and experiments are read, and each row of the definition of done is held against what they
/// say. Exit code 1 when a record says that something is not well; with --strict also when there is no record of it.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  flashcore status\n  flashcore status --strict --format json")]
pub(crate) struct StatusCommand {
    /// The folder of results
    #[arg(long, value_name = "FOLDER", default_value = "results")]
    results: PathBuf,
    /// The folder of experiments
    #[arg(long, value_name = "FOLDER", default_value = "experiments")]
    experiments: PathBuf,
    /// What has no record fails too
    #[arg(long)]
    strict: bool,
    /// How the table is written
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

impl StatusCommand {
    pub(crate) fn run(&self, output: &mut Output) -> Result<Ending, Failure> {
        if !self.results.is_dir() {
            let folder = self.results.display();
            return Err(Failure::Usage(format!("{folder} is no folder; name that of the results with --results")));
        }
        let rows = status(&self.results, &self.experiments);
        let mut table = Table::new(&["what", "state", "by"]);
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
