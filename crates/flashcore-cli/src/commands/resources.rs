//! `flashcore resources`: what do the kernels cost?

use clap::Args;
use flashcore_bench::resources::{self, ResourcesError, Row};
use flashcore_bench::simulate::simulate;
use flashcore_ir::{Arch, UnknownArch};
use flashcore_kernels::tile::SharedLayout;
use flashcore_kernels::{Config, Plan, Specialisation};
use flashcore_problem::{DType, Inputs, Problem};
use rayon::prelude::*;

use crate::output::{Cell, Format, Output, Table};
use crate::{Ending, Failure};

/// List what each kernel costs: registers, spills, shared memory, occupancy, bank conflicts
///
/// Kernels are compiled by ptxas, which needs no GPU (scripts/install-ptxas.sh gets it), and gated: no spills, no
/// stack, registers within the budget that the config declares. A second table counts shared-memory transactions per
/// request in the simulator, for each layout; 1.0 means no bank conflicts.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashcore resources --arch sm_89\n  flashcore resources --arch all --defaults\n  flashcore resources --arch sm_80,sm_90a --head-dims 64,128\n  flashcore resources --arch sm_90a --format json"
)]
pub(crate) struct Resources {
    /// The architecture, several with commas between them, or `all`: sm_80, sm_86, sm_89, sm_90, sm_90a and sm_120
    #[arg(long, default_value = "sm_89", value_delimiter = ',')]
    arch: Vec<String>,
    /// Lists only kernels of these head dimensions, with commas between them, of 32, 64, 96, 128, 192 and 256
    #[arg(long, value_name = "DIMS", value_delimiter = ',')]
    head_dims: Vec<u32>,
    /// Lists only the configs that some problem gets by default
    #[arg(long)]
    defaults: bool,
    /// How tables are written
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// Kernels between two looks at the progress; each thread compiles one at a time.
const KERNELS_AT_ONCE: usize = 32;

impl Resources {
    pub(crate) fn run(&self, output: &mut Output) -> Result<Ending, Failure> {
        let mut architectures = Vec::new();
        for name in &self.arch {
            let one = |name: &str| name.parse().map_err(|error: UnknownArch| Failure::Usage(error.to_string()));
            match name.as_str() {
                "all" => architectures.extend(Arch::ALL),
                name => architectures.push(one(name)?),
            }
        }
        if let Some(unlisted) = self.head_dims.iter().find(|dim| !Specialisation::HEAD_DIMS.contains(dim)) {
            let listed = Specialisation::HEAD_DIMS.map(|dim| dim.to_string()).join(", ");
            return Err(Failure::Usage(format!(
                "no kernels of head dimension {unlisted} are listed; there are {listed}"
            )));
        }
        let configs = if self.defaults { Config::defaults() } else { Config::all() };
        let kernels: Vec<_> = architectures
            .iter()
            .flat_map(|arch| {
                resources::kernels(&configs, *arch).into_iter().map(|(config, dim, kind)| (config, dim, kind, *arch))
            })
            .filter(|(_, dim, _, _)| self.head_dims.is_empty() || self.head_dims.contains(dim))
            .collect();
        if kernels.is_empty() {
            return Err(Failure::Usage("no kernel is left of these architectures, dimensions and configs".to_owned()));
        }
        let mut rows: Vec<Row> = Vec::new();
        for chunk in kernels.chunks(KERNELS_AT_ONCE) {
            let (config, _, _, arch) = chunk[0];
            output.progress(rows.len(), kernels.len(), &format!("{config} on {arch}"));
            let compiled: Result<Vec<Row>, ResourcesError> = chunk
                .par_iter()
                .map(|&(config, head_dim, kind, arch)| resources::row(config, head_dim, kind, arch))
                .collect();
            match compiled {
                Ok(compiled) => rows.extend(compiled),
                Err(ResourcesError::Ptxas(error)) => return Err(Failure::Environment(error.to_string())),
                Err(error @ ResourcesError::Verify { .. }) => {
                    output.complain(&error.to_string());
                    return Ok(Ending::Failed);
                }
            }
        }
        output.table(&table(&rows), self.format)?;
        let complaints: Vec<(&Row, &String)> =
            rows.iter().flat_map(|row| row.complaints.iter().map(move |complaint| (row, complaint))).collect();
        if matches!(self.format, Format::Table | Format::Markdown) {
            output.line("")?;
            output.table(&shared_memory()?, self.format)?;
            output.line("")?;
            for (row, complaint) in &complaints {
                let (arch, kind) = (&row.resources.arch, row.kind.name());
                output.line(format!("FAILED {} d{} {kind} on {arch}: {complaint}", row.config, row.head_dim))?;
            }
            let spilling = rows.iter().filter(|row| row.resources.spill_store_bytes > 0).count();
            output.line(format!("{} kernels, {spilling} with spills, {} complaints", rows.len(), complaints.len()))?;
        }
        Ok(if complaints.is_empty() { Ending::Well } else { Ending::Failed })
    }
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new(&[
        "arch",
        "config",
        "dtype",
        "dim",
        "mask",
        "threads",
        "registers",
        "budget",
        "shared bytes",
        "CTAs/SM",
        "stack",
        "spills",
        "compile ms",
        "gate",
    ]);
    for row in rows {
        table.push(vec![
            Cell::from(row.resources.arch.as_str()),
            Cell::from(row.config.as_str()),
            Cell::from(row.dtype.as_str()),
            Cell::from(row.head_dim),
            Cell::from(row.kind.name()),
            Cell::from(row.threads),
            Cell::from(row.resources.registers),
            Cell::from(row.register_budget),
            Cell::from(row.shared_bytes),
            Cell::from(row.ctas_per_multiprocessor),
            Cell::from(row.resources.stack_frame_bytes),
            Cell::from(row.resources.spill_store_bytes + row.resources.spill_load_bytes),
            Cell::number(row.resources.compile_milliseconds, 0),
            Cell::from(if row.complaints.is_empty() { "ok" } else { "FAILED" }),
        ]);
    }
    table
}

/// Bank conflicts of the layouts, counted by the simulator.
fn shared_memory() -> Result<Table, Failure> {
    let mut table = Table::new(&["layout", "dim", "requests", "transactions", "transactions per request"]);
    for layout in SharedLayout::ALL {
        for dim in [32, 64, 96, 128] {
            let problem = Problem::new(1, 1, 64, dim, DType::F16);
            let inputs = Inputs::random(&problem, 0);
            let plan = Plan::new(&problem, Config::ampere_with_layout(layout), Arch::Sm80)
                .map_err(|reasons| Failure::Usage(format!("{reasons:?}")))?;
            let simulation =
                simulate(&plan, &problem, &inputs, 0).map_err(|error| Failure::Usage(error.to_string()))?;
            let shared = simulation.counters.shared();
            table.push(vec![
                Cell::from(layout.name()),
                Cell::from(dim as u32),
                Cell::number(shared.requests as f64, 0),
                Cell::number(shared.transactions as f64, 0),
                Cell::number(shared.transactions_per_request(), 2),
            ]);
        }
    }
    Ok(table)
}
