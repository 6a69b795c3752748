//! `flashcore cache`: the compiled kernels on disk.

use std::path::Path;

use clap::{Args, Subcommand};
use flashcore_cuda::cache::{CacheOptions, KernelCache, NoDisk, SelfCheck};

use crate::output::{Cell, Column, Format, Output, Table, column};
use crate::{Ending, Failure};

/// List, check or remove the compiled kernels on disk
///
/// They are in `$FLASHCORE_CACHE_DIR`, else in `$XDG_CACHE_HOME/flashcore`, else in `~/.cache/flashcore`;
/// `FLASHCORE_CACHE=off` turns the cache off. The cache is safe to remove: missing kernels are compiled again.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  flashcore cache list\n  flashcore cache verify --format json")]
pub(crate) struct Cache {
    #[command(subcommand)]
    action: Action,
    /// The output format
    #[arg(long, value_enum, default_value_t, global = true)]
    format: Format,
}

#[derive(Debug, Clone, Copy, Subcommand)]
enum Action {
    /// List the valid entries
    List,
    /// Check every entry against its checksum, and rename damaged ones to *.bad
    Verify,
    /// Remove all entries and all *.bad files, without asking
    Clear,
}

impl Action {
    /// The columns of its table, which a cache that is off has too.
    const fn columns(self) -> &'static [Column] {
        const LIST: [Column; 7] = [
            column("kernel", "kernel"),
            column("arch", "arch"),
            column("driver", "driver"),
            column("bytes", "bytes"),
            column("compile ms", "compile_ms"),
            column("self-check", "self_check").verdict(),
            column("key", "key").minor(),
        ];
        const VERIFY: [Column; 3] =
            [column("key", "key"), column("state", "state").verdict(), column("reason", "reason")];
        const CLEAR: [Column; 3] =
            [column("directory", "directory"), column("removed", "removed"), column("kept", "kept")];
        match self {
            Self::List => &LIST,
            Self::Verify => &VERIFY,
            Self::Clear => &CLEAR,
        }
    }
}

impl Cache {
    pub(crate) fn run(&self, output: &Output) -> Result<Ending, Failure> {
        let cache = KernelCache::open(CacheOptions::default());
        let folder = match cache.disk() {
            Ok(folder) => folder,
            Err(NoDisk::Off) => {
                // Formats for programs get a table without rows.
                if self.for_people() {
                    output.line("the disk cache is turned off (FLASHCORE_CACHE=off); nothing to show")?;
                } else {
                    output.table(&Table::new(self.action.columns()), self.format)?;
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

    fn list(&self, output: &Output, cache: &KernelCache, folder: &Path) -> Result<Ending, Failure> {
        let entries = cache.list()?;
        let mut table = Table::new(self.action.columns());
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
                Cell::from(entry.payload_bytes),
                Cell::from(entry.metadata.compile_milliseconds),
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

    fn verify(&self, output: &Output, cache: &KernelCache, folder: &Path) -> Result<Ending, Failure> {
        let verified = cache.verify()?;
        let mut table = Table::new(self.action.columns());
        // What is listed after the check is what passed it.
        for entry in cache.list()? {
            table.push(vec![Cell::from(entry.key.to_string()), Cell::from("ok"), Cell::from("")]);
        }
        for (key, reason) in &verified.quarantined {
            table.push(vec![Cell::from(key.to_string()), Cell::from("DAMAGED"), Cell::from(reason.to_string())]);
        }
        for (key, reason) in &verified.unreadable {
            table.push(vec![Cell::from(key.to_string()), Cell::from("UNREADABLE"), Cell::from(reason.as_str())]);
        }
        let (aside, unreadable) = (verified.quarantined.len(), verified.unreadable.len());
        self.table(output, &table, verified.sound + aside + unreadable)?;
        if self.for_people() {
            let sound = verified.sound;
            output.line(format!(
                "{sound} ok, {aside} damaged and renamed to *.bad, {unreadable} unreadable in {}",
                folder.display()
            ))?;
        }
        Ok(if aside + unreadable == 0 { Ending::Well } else { Ending::Failed })
    }

    fn clear(&self, output: &Output, cache: &KernelCache, folder: &Path) -> Result<Ending, Failure> {
        let cleared = cache.clear()?;
        if self.for_people() {
            output.line(format!("removed {} from {}", counted(cleared.removed), folder.display()))?;
            for path in &cleared.kept {
                output.line(format!("could not remove {}", path.display()))?;
            }
        } else {
            let mut table = Table::new(self.action.columns());
            table.push(vec![
                Cell::from(folder.display().to_string()),
                Cell::from(cleared.removed),
                Cell::from(cleared.kept.len()),
            ]);
            output.table(&table, self.format)?;
        }
        Ok(if cleared.kept.is_empty() { Ending::Well } else { Ending::Failed })
    }

    /// A table, unless it would be headings alone before people's eyes.
    fn table(&self, output: &Output, table: &Table, rows: usize) -> Result<(), Failure> {
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
