//! `flashcore doctor`: what this machine has, and if it works.

mod cpu;
mod finding;
mod first_call;
mod gpu;
mod kernel_cache;
mod loaded;
mod noise;
mod tools;

use clap::Args;
use flashcore_bench::util::printable::printable_json;
use serde_json::{Map, Value};

use self::finding::{Section, State};
use crate::output::{Cell, Format, Output, Table, column};
use crate::{Ending, Failure};

/// Show what this machine has and check that it works
///
/// Driver, GPUs, processor, ptxas, the kernel cache, and the noise of timings. A missing part is not an error; a broken one
/// is: exit code 1 for a damaged cache or an exceeded limit, 3 for a driver that is installed but unusable.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  flashcore doctor\n  flashcore doctor --timings --format json")]
pub(crate) struct Doctor {
    /// Time the first call of new kernels, of kernels from the disk cache, and plans and launches of loaded kernels
    #[arg(long)]
    timings: bool,
    /// The output format; json prints one object
    #[arg(long, value_enum, default_value_t)]
    format: Format,
    /// A process of --timings
    #[arg(long, hide = true)]
    first_call_probe: bool,
}

impl Doctor {
    pub(crate) fn run(&self, output: &Output) -> Result<Ending, Failure> {
        if self.first_call_probe {
            output.line(first_call::probe().map_err(Failure::Environment)?.to_string())?;
            return Ok(Ending::Well);
        }
        let mut sections = vec![tools::version()];
        sections.extend(gpu::sections());
        sections.extend([cpu::section(), tools::ptxas(), kernel_cache::section(), noise::section()]);
        if self.timings {
            sections.push(first_call::section());
        }
        self.show(output, &sections)?;
        let findings = || sections.iter().flat_map(|section| &section.findings);
        if let Some(broken) = findings().find(|finding| finding.state == State::Unusable) {
            return Err(Failure::Environment(format!("{}: {}", broken.subject, broken.text)));
        }
        let failed = findings().any(|finding| finding.state == State::Failed);
        Ok(if failed { Ending::Failed } else { Ending::Well })
    }

    fn show(&self, output: &Output, sections: &[Section]) -> Result<(), Failure> {
        if self.format == Format::Json {
            let pairs = sections.iter().map(|section| (section.key.to_owned(), section.value.clone()));
            let text = format!("{:#}", Value::Object(pairs.collect::<Map<_, _>>()));
            output.line(printable_json(&text))?;
            return Ok(());
        }
        let mut table = Table::new(&[
            column("subject", "subject"),
            column("state", "state").verdict(),
            column("finding", "finding"),
        ]);
        for finding in sections.iter().flat_map(|section| &section.findings) {
            table.push(vec![
                Cell::from(finding.subject.as_str()),
                Cell::from(finding.state.word()),
                Cell::from(finding.text.as_str()),
            ]);
        }
        Ok(output.table(&table, self.format)?)
    }
}
