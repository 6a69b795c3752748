//! Overview of commands: those for users, then those for the development of flashcore itself.

use std::fmt::Write;

use clap::{Command, CommandFactory};

use crate::output::{broken, terminal_width};

/// Commands for users, in the order of their overview.
const FOR_USERS: [&str; 14] = [
    "bench",
    "verify",
    "accuracy",
    "attend",
    "doctor",
    "tune",
    "compare",
    "roofline",
    "profile",
    "report",
    "repro",
    "ptx",
    "cache",
    "completions",
];

/// Commands for those who change flashcore, most of which need a checkout.
const FOR_DEVELOPERS: [&str; 8] =
    ["mutants", "experiments", "leaderboard", "ladder", "status", "conformance", "microbench", "resources"];

/// The command line with an overview under two headings.
pub(crate) fn command() -> Command {
    const WIDEST: usize = 110;
    let command = crate::Arguments::command();
    let width = terminal_width().unwrap_or(WIDEST).min(WIDEST);
    let users = overview(&command, &FOR_USERS, width);
    let developers = overview(&command, &FOR_DEVELOPERS, width);
    let template = format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\nCommands:\n{users}\n\
         Commands for the development of flashcore:\n{developers}\nOptions:\n{{options}}{{after-help}}"
    );
    command.help_template(template)
}

/// A line or more for each command: its name and what it does.
fn overview(command: &Command, names: &[&str], width: usize) -> String {
    const INDENT: usize = 2;
    let longest = FOR_USERS.iter().chain(&FOR_DEVELOPERS).map(|name| name.len()).max().unwrap_or(0);
    let margin = 2 * INDENT + longest;
    let mut text = String::new();
    for name in names {
        let about = command.find_subcommand(name).and_then(Command::get_about);
        let about = about.map_or_else(String::new, ToString::to_string);
        for (index, line) in broken(&about, width.saturating_sub(margin)).iter().enumerate() {
            let name = if index == 0 { name } else { "" };
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{:INDENT$}{name:<longest$}{:INDENT$}{line}", "", "");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_is_under_one_heading() {
        let command = crate::Arguments::command();
        let mut there: Vec<&str> =
            command.get_subcommands().filter(|command| !command.is_hide_set()).map(Command::get_name).collect();
        let mut listed: Vec<&str> = FOR_USERS.into_iter().chain(FOR_DEVELOPERS).collect();
        there.sort_unstable();
        listed.sort_unstable();
        assert_eq!(listed, there);
    }

    #[test]
    fn the_overview_fits_the_terminal() {
        let command = crate::Arguments::command();
        let text = overview(&command, &["bench", "resources"], 60);
        assert_eq!(
            text,
            "  bench        Measure attention on the GPU or CPU of this\n               machine\n  \
             resources    List the registers, spills, shared memory,\n               \
             occupancy and bank conflicts of each kernel\n"
        );
    }
}
