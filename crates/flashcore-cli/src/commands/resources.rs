//! `flashcore resources`: registers, spills, shared memory and occupancy of the kernels.

use std::collections::BTreeMap;
use std::sync::Mutex;

use clap::Args;
use flashcore_bench::testkit::resources::{self, ResourcesError, Row};
use flashcore_bench::testkit::simulate::simulate;
use flashcore_ir::{Arch, UnknownArch};
use flashcore_kernels::primitives::SharedLayout;
use flashcore_kernels::{Config, LaunchPlan, Specialization};
use flashcore_problem::{DType, Inputs, Problem};
use rayon::prelude::*;

use crate::output::{Cell, Format, Output, Table, column};
use crate::{Ending, Failure, interrupt};

/// List the registers, spills, shared memory, occupancy and bank conflicts of each kernel
///
/// Kernels are compiled by ptxas, which needs no GPU, and gated: no spills, no stack, registers within the budget that the
/// config declares. ptxas is part of the CUDA toolkit and of the PyPI package nvidia-cuda-nvcc; put it on PATH or set
/// FLASHCORE_PTXAS (in a checkout, scripts/install-ptxas.sh installs it). A second table counts shared-memory transactions
/// per request in the simulator for each layout; 1.0 means no bank conflicts.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashcore resources --arch sm_89\n  flashcore resources --arch all --defaults\n  flashcore resources --arch sm_80,sm_90a --head-dims 64,128\n  flashcore resources --arch sm_90a --format json"
)]
pub(crate) struct Resources {
    /// The architectures, separated by commas, or `all`: sm_80, sm_86, sm_89, sm_90, sm_90a and sm_120
    #[arg(long, default_value = "sm_89", value_delimiter = ',')]
    arch: Vec<String>,
    /// Only kernels of these head dimensions, separated by commas: 32, 64, 96, 128, 192 and 256
    #[arg(long, value_name = "DIMS", value_delimiter = ',')]
    head_dims: Vec<u32>,
    /// Only the configs that are a default of some problem
    #[arg(long)]
    defaults: bool,
    /// The output format
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// Kernels between two looks at the progress; each thread compiles one at a time.
const KERNELS_AT_ONCE: usize = 32;

impl Resources {
    pub(crate) fn run(&self, output: &Output) -> Result<Ending, Failure> {
        let mut architectures = Vec::new();
        for name in &self.arch {
            let one = |name: &str| name.parse().map_err(|error: UnknownArch| Failure::Usage(error.to_string()));
            match name.as_str() {
                "all" => architectures.extend(Arch::ALL),
                name => architectures.push(one(name)?),
            }
        }
        if let Some(unlisted) = self.head_dims.iter().find(|dim| !Specialization::HEAD_DIMS.contains(dim)) {
            let listed = Specialization::HEAD_DIMS.map(|dim| dim.to_string()).join(", ");
            return Err(Failure::Usage(format!("--head-dims has {unlisted}; kernels are listed for {listed}")));
        }
        let configs = if self.defaults { Config::defaults() } else { Config::all() };
        let kernels: Vec<_> = architectures
            .iter()
            .flat_map(|arch| {
                let kernels = resources::kernels(&configs, *arch).into_iter();
                let kernels = kernels.chain(resources::fp8_mma_kernels(self.defaults, *arch));
                kernels.map(|(config, dim, kind)| (config, dim, kind, *arch))
            })
            .filter(|(_, dim, _, _)| self.head_dims.is_empty() || self.head_dims.contains(dim))
            .collect();
        if kernels.is_empty() {
            return Err(Failure::Usage(
                "no kernel matches these architectures, head dimensions and configs".to_owned(),
            ));
        }
        interrupt::watch();
        let kept = Mutex::new(BTreeMap::new());
        let work = || {
            for (chunk, first) in kernels.chunks(KERNELS_AT_ONCE).zip((0..).step_by(KERNELS_AT_ONCE)) {
                let (config, _, _, arch) = chunk[0];
                output.progress(first, kernels.len(), &format!("{config} on {arch}"));
                let compiled = chunk.par_iter().enumerate().try_for_each(|(index, &(config, head_dim, kind, arch))| {
                    if !interrupt::requested() {
                        let row = resources::row(config, head_dim, kind, arch)?;
                        interrupt::aside(&kept).insert(first + index, row);
                    }
                    Ok(())
                });
                match compiled {
                    Ok(()) => {}
                    Err(ResourcesError::Ptxas(error)) => return Err(Failure::Environment(error.to_string())),
                    Err(error @ ResourcesError::Verify { .. }) => return Ok(Some(error)),
                }
            }
            Ok(None)
        };
        interrupt::abandonable(output, work, |worked| {
            if let Some(Some(error)) = worked {
                output.complain(&error.to_string());
                return Ok(Ending::Failed);
            }
            let rows: Vec<Row> = std::mem::take(&mut *interrupt::aside(&kept)).into_values().collect();
            self.show(&rows, kernels.len(), output)
        })
    }

    fn show(&self, rows: &[Row], of: usize, output: &Output) -> Result<Ending, Failure> {
        output.table(&table(rows), self.format)?;
        let complaints: Vec<(&Row, &String)> =
            rows.iter().flat_map(|row| row.complaints.iter().map(move |complaint| (row, complaint))).collect();
        if matches!(self.format, Format::Table | Format::Markdown) {
            output.line("")?;
            if !interrupt::requested() {
                output.table(&shared_memory()?, self.format)?;
                output.line("")?;
            }
            for (row, complaint) in &complaints {
                let (arch, kind) = (&row.resources.arch, row.kind.name());
                output.verdict(format!("FAILED {} d{} {kind} on {arch}: {complaint}", row.config, row.head_dim))?;
            }
            let spilling = rows.iter().filter(|row| row.resources.spill_store_bytes > 0).count();
            let left_out = interrupt::left_out(rows.len(), of);
            let (count, complaints) = (rows.len(), complaints.len());
            output.line(format!("{count} kernels, {spilling} with spills, {complaints} complaints{left_out}"))?;
        }
        if interrupt::requested() && rows.len() < of {
            return Ok(Ending::Interrupted);
        }
        Ok(if complaints.is_empty() { Ending::Well } else { Ending::Failed })
    }
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new(&[
        column("config", "config"),
        column("arch", "arch"),
        column("dtype", "dtype").minor(),
        column("dim", "dim"),
        column("mask", "mask"),
        column("threads", "threads").minor(),
        column("registers", "registers"),
        column("budget", "register_budget"),
        column("shared bytes", "shared_bytes"),
        column("CTAs/SM", "ctas_per_sm"),
        column("stack bytes", "stack_bytes").minor(),
        column("spilled bytes", "spilled_bytes"),
        column("compile ms", "compile_ms").minor(),
        column("gate", "gate").verdict(),
    ]);
    for row in rows {
        table.push(vec![
            Cell::from(row.config.as_str()),
            Cell::from(row.resources.arch.as_str()),
            Cell::from(row.dtype.as_str()),
            Cell::from(row.head_dim),
            Cell::from(row.kind.name()),
            Cell::from(row.threads),
            Cell::from(row.resources.registers),
            Cell::from(row.register_budget),
            Cell::from(row.shared_bytes),
            Cell::from(row.ctas_per_sm),
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
    let mut table = Table::new(&[
        column("layout", "layout"),
        column("dim", "dim"),
        column("requests", "requests"),
        column("transactions", "transactions"),
        column("transactions per request", "transactions_per_request"),
    ]);
    for layout in SharedLayout::ALL {
        for dim in [32, 64, 96, 128] {
            let problem = Problem::new(1, 1, 64, dim, DType::F16);
            let inputs = Inputs::random(&problem, 0);
            let plan = LaunchPlan::new(&problem, Config::ampere_with_layout(layout), Arch::Sm80)
                .map_err(|reasons| Failure::Usage(format!("{reasons:?}")))?;
            let simulation =
                simulate(&plan, &problem, &inputs, 0).map_err(|error| Failure::Usage(error.to_string()))?;
            let shared = simulation.counters.shared();
            table.push(vec![
                Cell::from(layout.name()),
                Cell::from(dim as u32),
                Cell::from(shared.requests),
                Cell::from(shared.transactions),
                Cell::number(shared.transactions_per_request(), 2),
            ]);
        }
    }
    Ok(table)
}
