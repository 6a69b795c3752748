//! `flashcore completions`: shell completions.

use clap::{Args, CommandFactory};
use clap_complete::{Shell, generate};

use crate::output::Output;
use crate::{Ending, Failure};

/// Print completions for a shell
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashcore completions bash > ~/.local/share/bash-completion/completions/flashcore\n  flashcore completions zsh > ~/.zfunc/_flashcore\n  flashcore completions fish > ~/.config/fish/completions/flashcore.fish"
)]
pub(crate) struct Completions {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

impl Completions {
    pub(crate) fn run(&self, output: &Output) -> Result<Ending, Failure> {
        let mut text = Vec::new();
        generate(self.shell, &mut crate::Arguments::command(), "flashcore", &mut text);
        output.line(String::from_utf8_lossy(&text).trim_end())?;
        Ok(Ending::Well)
    }
}
