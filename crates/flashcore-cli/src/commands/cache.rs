//! `flashcore cache`: the compiled kernels on disk.

use std::path::Path;

use clap::{Args, Subcommand};
use flashcore_cuda::cache::{CacheOptions, KernelCache, NoDisk, SelfCheck};

use crate::output::{Cell, Format, Output, Table};
use crate::{Ending, Failure};

/// List, check or remove the compiled kernels on disk
///
/// They lie in `$FLASHCORE_CACHE_DIR`, else in `$XDG_CACHE_HOME/flashcore`, else in `~/.cache/flashcore`;
/// `FLASHCORE_CACHE=off` turns the cache off. Nothing in it is needed: what is missing is compiled again.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  flashcore cache list\n  flashcore cache verify --format json")]
pub(crate) struct Cache {
    #[command(subcommand)]
    action: Action,
    /// How results are written
    #[arg(long, value_enum, default_value_t, global = true)]
    format: Format,
}

#[derive(Debug, Clone, Copy, Subcommand)]
enum Action {
    /// List the sound entries
    List,
    /// Read every entry, and set aside as *.bad what is not exactly what was written
    Verify,
    /// Remove every entry, and what was set aside, without asking
    Clear,
}

impl Cache {
    pub(crate) fn run(&self, output: &mut Output) -> Result<Ending, Failure> {
        let cache = KernelCache::open(CacheOptions::default());
        let folder = match cache.disk() {
            Ok(folder) => folder,
            Err(NoDisk::Off) => {
                // Formats for programs get a table without rows.
                if self.for_people() {
                    output.line("the disk cache is turned off; there is nothing on disk to look at")?;
                } else {
                    output.table(&Table::new(&["key"]), self.format)?;
                }
                return Ok(Ending::Well);
            }
            Err(reason) => return Err(Failure::Environment(reason.to_string())),
        };
        match self.action {
            Action::List => self.list(output, &cache, folder),
            Action::Verify => self.verify(output, &cache, folder),
            Action::Clear => self.clear(output, &cache, folder),
        }
    }

    fn list(&self, output: &mut Output, cache: &KernelCache, folder: &Path) -> Result<Ending, Failure> {
        let entries = cache.list()?;
        let mut table = Table::new(&["kernel", "arch", "driver", "bytes", "compile ms", "self-check", "key"]);
        for entry in &entries {
            let check = match &entry.metadata.self_check {
                SelfCheck::NotRun => "not run".to_owned(),
                SelfCheck::Passed => "passed".to_owned(),
                SelfCheck::Failed { reason } => format!("FAILED: {reason}"),
            };
            table.push(vec![
                Cell::from(entry.metadata.kernel.as_str()),
                Cell::from(entry.metadata.arch.as_str()),
                Cell::from(entry.metadata.driver.as_str()),
                Cell::number(entry.payload_bytes as f64, 0),
                Cell::number(entry.metadata.compile_milliseconds as f64, 0),
                Cell::from(check),
                Cell::from(entry.key.to_string()),
            ]);
        }
        self.table(output, &table, entries.len())?;
        if self.for_people() {
            let bytes: usize = entries.iter().map(|entry| entry.payload_bytes).sum();
            let count = counted(entries.len());
            output.line(format!("{count} with {bytes} bytes of code in {}", folder.display()))?;
        }
        Ok(Ending::Well)
    }

    fn verify(&self, output: &mut Output, cache: &KernelCache, folder: &Path) -> Result<Ending, Failure> {
        let verified = cache.verify()?;
        let mut table = Table::new(&["key", "state", "reason"]);
        // What is listed after the check is what passed it.
        for entry in cache.list()? {
            table.push(vec![Cell::from(entry.key.to_string()), Cell::from("sound"), Cell::from("")]);
        }
        for (key, reason) in &verified.quarantined {
            table.push(vec![Cell::from(key.to_string()), Cell::from("SET ASIDE"), Cell::from(reason.to_string())]);
        }
        for (key, reason) in &verified.unreadable {
            table.push(vec![Cell::from(key.to_string()), Cell::from("UNREADABLE"), Cell::from(reason.as_str())]);
        }
        let (aside, unreadable) = (verified.quarantined.len(), verified.unreadable.len());
        self.table(output, &table, verified.sound + aside + unreadable)?;
        if self.for_people() {
            let sound = verified.sound;
            output.line(format!(
                "{sound} sound, {aside} set aside as *.bad, {unreadable} unreadable in {}",
                folder.display()
            ))?;
        }
        Ok(if aside + unreadable == 0 { Ending::Well } else { Ending::Failed })
    }

    fn clear(&self, output: &mut Output, cache: &KernelCache, folder: &Path) -> Result<Ending, Failure> {
        let cleared = cache.clear()?;
        if self.for_people() {
            output.line(format!("removed {} from {}", counted(cleared.removed), folder.display()))?;
            for path in &cleared.kept {
                output.line(format!("could not remove {}", path.display()))?;
            }
        } else {
            let mut table = Table::new(&["folder", "removed", "kept"]);
            table.push(vec![
                Cell::from(folder.display().to_string()),
                Cell::number(cleared.removed as f64, 0),
                Cell::number(cleared.kept.len() as f64, 0),
            ]);
            output.table(&table, self.format)?;
        }
        Ok(if cleared.kept.is_empty() { Ending::Well } else { Ending::Failed })
    }

    /// A table, unless it would be headings alone before people's eyes.
    fn table(&self, output: &mut Output, table: &Table, rows: usize) -> Result<(), Failure> {
        if rows > 0 || !self.for_people() {
            output.table(table, self.format)?;
        }
        Ok(())
    }

    const fn for_people(&self) -> bool {
        matches!(self.format, Format::Table | Format::Markdown)
    }
}

fn counted(entries: usize) -> String {
    if entries == 1 { "1 entry".to_owned() } else { format!("{entries} entries") }
}
