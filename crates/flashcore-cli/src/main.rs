//! The `flashcore` command: arguments in, tables and progress out.
//!
//! Exit codes: 0 when all is well, 1 when a gate failed or a kernel is at fault, 2 for wrong usage, 3 when the
//! environment lacks something, 4 when a comparison stayed ambiguous, 130 after Ctrl-C.

#![expect(clippy::doc_markdown, reason = "doc comments of arguments are help texts, where backticks would be shown")]

mod colour;
mod commands;
mod help;
mod interrupt;
mod output;
mod table;

use std::process::ExitCode;

use clap::{FromArgMatches, Parser, Subcommand};

use crate::output::Output;

const HELP: &str = "\
Examples:
  flashcore bench                           times on this machine
  flashcore verify --backend sim            GPU kernels in the simulator
  flashcore compare cpu:avx2 cpu:avx512     which is faster
  flashcore repro                           a bundle with which others can repeat a result

Exit codes:
  0    success
  1    a gate failed, a kernel is wrong, or results disagree
  2    wrong usage
  3    something is missing on this machine
  4    a comparison is ambiguous
  130  interrupted by Ctrl-C; records of what was finished are complete

`flashcore COMMAND --help` shows options and examples.";

/// FlashAttention for Rust with nothing to compile: generate, verify and measure attention kernels
#[derive(Debug, Parser)]
#[command(
    name = "flashcore",
    bin_name = "flashcore",
    version,
    max_term_width = 110,
    subcommand_required = true,
    arg_required_else_help = true,
    after_help = HELP
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Bench(commands::bench::Bench),
    Verify(commands::verify::Verify),
    Accuracy(commands::accuracy::Accuracy),
    Ladder(commands::ladder::LadderCommand),
    Tune(commands::tune::Tune),
    Mutants(commands::mutants::Mutants),
    Resources(commands::resources::Resources),
    Ptx(commands::ptx::Ptx),
    Attend(commands::attend::Attend),
    Doctor(commands::doctor::Doctor),
    Conformance(commands::conformance::Conformance),
    Cache(commands::cache::Cache),
    Roofline(commands::roofline::Roofline),
    Compare(commands::compare::Compare),
    Microbench(commands::microbench::Microbench),
    Leaderboard(commands::leaderboard::LeaderboardCommand),
    Experiments(commands::experiments::Experiments),
    Profile(commands::profile::ProfileCommand),
    Report(commands::report::ReportCommand),
    Repro(commands::repro::Repro),
    Status(commands::status::StatusCommand),
    Completions(commands::completions::Completions),
    #[command(hide = true)]
    ProfileTarget(commands::profile::ProfileTarget),
    #[command(hide = true)]
    CompareWorker(commands::compare::CompareWorker),
}

/// Ending of a command that could be carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// All is well.
    Well,
    /// A gate failed, or a kernel is at fault.
    Failed,
    /// A comparison that cannot be decided.
    Ambiguous,
    /// Somebody pressed Ctrl-C; what was finished is written down.
    Interrupted,
}

/// Reason why a command could not be carried out.
#[derive(Debug)]
enum Failure {
    /// The arguments make no sense.
    Usage(String),
    /// Something is missing on this machine.
    Environment(String),
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::Environment(error.to_string())
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::from_arg_matches(&help::command().get_matches()).unwrap_or_else(|error| error.exit());
    let output = Output::new();
    let result = match arguments.command {
        Command::Bench(command) => command.run(&output),
        Command::Verify(command) => command.run(&output),
        Command::Accuracy(command) => command.run(&output),
        Command::Ladder(command) => command.run(&output),
        Command::Tune(command) => command.run(&output),
        Command::Mutants(command) => command.run(&output),
        Command::Resources(command) => command.run(&output),
        Command::Ptx(command) => command.run(&output),
        Command::Attend(command) => command.run(&output),
        Command::Doctor(command) => command.run(&output),
        Command::Conformance(command) => command.run(&output),
        Command::Cache(command) => command.run(&output),
        Command::Roofline(command) => command.run(&output),
        Command::Compare(command) => command.run(&output),
        Command::Microbench(command) => command.run(&output),
        Command::Leaderboard(command) => command.run(&output),
        Command::Experiments(command) => command.run(&output),
        Command::Profile(command) => command.run(&output),
        Command::Report(command) => command.run(&output),
        Command::Repro(command) => command.run(&output),
        Command::Status(command) => command.run(&output),
        Command::Completions(command) => command.run(&output),
        Command::ProfileTarget(command) => command.run(),
        Command::CompareWorker(command) => command.run(),
    };
    match result {
        Ok(Ending::Well) => ExitCode::SUCCESS,
        Ok(Ending::Failed) => ExitCode::from(1),
        Ok(Ending::Ambiguous) => ExitCode::from(4),
        Ok(Ending::Interrupted) => ExitCode::from(130),
        Err(Failure::Usage(message)) => {
            output.complain(&message);
            ExitCode::from(2)
        }
        Err(Failure::Environment(message)) => {
            output.complain(&message);
            ExitCode::from(3)
        }
    }
}
