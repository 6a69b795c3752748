//! `flashcore ladder`: what did each step bring?

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use flashcore_bench::gpu::Gpu;
use flashcore_bench::ladder::{Gain, Ground, Ladder, Ladders, Standing, picture, steps, walk};
use flashcore_bench::printable::printable;
use flashcore_bench::record::{Machine, Record};
use flashcore_ir::Arch;
use flashcore_kernels::Config;
use flashcore_problem::DType;

use super::origin::{write_file, write_record};
use super::overwriting::refuse_overwriting;
use crate::output::{Cell, Format, Output, Table};
use crate::{Ending, Failure};

/// Walk from one thread a row to the fastest kernel, one step at a time
///
/// The steps are those of the history of this problem: tiles in shared memory, padding, swizzle, wider loads, stages,
/// tensor cores for one product, for the other and for both, the softmax in registers, larger tiles, and what was tried
/// after that. Each is verified before it is timed. A step that brought nothing stays in the list and says so; one that
/// the gate refuses is timed, shown as refused, and never counts. Counters come from the simulator, on one head of a
/// shorter sequence, for each score: a query row and a key that it attends.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashcore ladder\n  flashcore ladder --backend cuda --shape 2x16x2048x128 --record ladder.json --svg ladder.svg\n  flashcore ladder --backend sim --shape 1x8x512x64 --arch sm_89\n  flashcore ladder --from ladder.json --svg ladder.svg"
)]
pub(crate) struct LadderCommand {
    /// Where the steps are taken
    #[arg(long, value_enum, default_value_t)]
    backend: BackendName,
    /// A problem, or several: batch x heads[/key heads] x queries[,keys] x dim
    #[arg(long, default_values = ["1x8x512x64", "2x16x2048x128"])]
    shape: Vec<String>,
    /// The element type
    #[arg(long, default_value_t = DType::F16)]
    dtype: DType,
    /// The mask: full, causal, causal-top-left or window:LEFT,RIGHT
    #[arg(long, default_value = "full")]
    mask: String,
    /// The architecture that the simulator takes kernels for
    #[arg(long, default_value_t = Arch::Sm90)]
    arch: Arch,
    /// Shows a record instead of walking
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
    /// Writes everything that was measured to a JSON file
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Writes a picture of the times; of several problems, the shape is added to the name
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// How tables are written
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum BackendName {
    /// The first GPU, or the simulator where there is none
    #[default]
    Auto,
    /// The first GPU: times, counters and resources
    Cuda,
    /// The simulator: counters, and resources if ptxas is there
    Sim,
}

/// The multiprocessors of an H200, which the simulator has no number of.
const SIMULATED_MULTIPROCESSORS: u32 = 132;

impl LadderCommand {
    pub(crate) fn run(&self, output: &mut Output) -> Result<Ending, Failure> {
        let written: Vec<&Path> = [&self.record, &self.svg].into_iter().filter_map(Option::as_deref).collect();
        refuse_overwriting(self.from.as_deref().as_slice(), &written)?;
        let (machine, ladders) = match &self.from {
            Some(file) => {
                let record = Record::<Ladders>::read(file).map_err(|error| Failure::Usage(error.to_string()))?;
                (record.origin.machine, record.content.ladders)
            }
            None => self.walk(output)?,
        };
        for ladder in &ladders {
            self.show(output, ladder)?;
        }
        if let Some(file) = &self.svg {
            for ladder in &ladders {
                let file = if ladders.len() == 1 { file.clone() } else { with_shape(file, &ladder.shape) };
                write_file(&file, picture(ladder).as_bytes())?;
            }
        }
        if let Some(file) = &self.record {
            write_record(file, machine, Ladders { ladders })?;
        }
        Ok(Ending::Well)
    }

    fn walk(&self, output: &mut Output) -> Result<(Machine, Vec<Ladder>), Failure> {
        let problems: Vec<_> = self
            .shape
            .iter()
            .map(|shape| super::computable_problem(shape, self.dtype, &self.mask))
            .collect::<Result<_, _>>()?;
        let environment = |error: flashcore::Error| Failure::Environment(error.to_string());
        let gpu = match self.backend {
            BackendName::Sim => None,
            BackendName::Cuda => Some(Gpu::open(0).map_err(environment)?),
            BackendName::Auto => match Gpu::open(0) {
                Ok(gpu) => Some(gpu),
                Err(reason) => {
                    output.note(&format!("no GPU, so counters of the simulator and no times: {reason}"));
                    None
                }
            },
        };
        let (ground, arch, multiprocessors, machine) = match &gpu {
            None => {
                let threads = std::thread::available_parallelism().map_or(1, usize::from);
                let processor = Machine::cpu("simulator", threads, None);
                let machine = Machine { backend: "sim".to_owned(), arch: self.arch.to_string(), ..processor };
                (Ground::Simulator(self.arch), self.arch, SIMULATED_MULTIPROCESSORS, machine)
            }
            Some(gpu) => {
                let ceilings = gpu.ceilings().map_err(environment)?;
                let context = gpu.device().context().ok_or_else(|| Failure::Environment("no context".to_owned()))?;
                let device = context.device();
                let arch = device.specific_arch().map_err(|error| Failure::Environment(error.to_string()))?;
                let machine = Machine::gpu(device, Some(ceilings));
                (Ground::Gpu(gpu, ceilings), arch, device.attributes.multiprocessors, machine)
            }
        };
        let mut ladders = Vec::new();
        for problem in &problems {
            let steps = steps(problem, Config::tuned(problem, arch, multiprocessors), arch, multiprocessors);
            let ladder = walk(problem, &steps, ground, |number, step| {
                output.progress(number, steps.len(), &format!("{problem}: {}", step.name));
            });
            ladders.push(ladder.map_err(|error| Failure::Environment(error.to_string()))?);
        }
        Ok((machine, ladders))
    }

    fn show(&self, output: &mut Output, ladder: &Ladder) -> Result<(), Failure> {
        let is_for_people = matches!(self.format, Format::Table | Format::Markdown);
        if is_for_people {
            let floor = match (ladder.floor_seconds, &ladder.bound_by) {
                (Some(seconds), Some(bound)) => format!("; floor {:.2} us, bound by {bound}", seconds * 1e6),
                _ => String::new(),
            };
            let Ladder { shape, dtype, mask, counted_shape, .. } = ladder;
            let title = format!("{shape} {dtype} {mask}{floor}; counted on {counted_shape}");
            output.line(format!("\n{}\n", printable(&title)))?;
        }
        output.table(&table(ladder), self.format)?;
        if is_for_people {
            if let Some(factor) = ladder.in_all() {
                output.line(format!("\nfrom the first step to the fastest that passed: {factor:.1} times faster"))?;
            }
            for rung in &ladder.rungs {
                match &rung.standing {
                    Standing::Passed => {}
                    Standing::Refused(reason) => {
                        output.line(printable(&format!("{}: refused by the gate: {reason}", rung.name)))?;
                    }
                    Standing::NotRun(reason) => {
                        output.line(printable(&format!("{}: does not run here: {reason}", rung.name)))?;
                    }
                }
            }
        }
        Ok(())
    }
}

fn table(ladder: &Ladder) -> Table {
    let mut table = Table::new(&[
        "step",
        "name",
        "kernel",
        "gate",
        "p50 us",
        "cold us",
        "% of floor",
        "against",
        "gain",
        "verdict",
        "registers",
        "spilled",
        "shared KB",
        "instructions per 1000 scores",
        "global bytes per score",
        "shared bytes per score",
        "transactions per request",
        "tensor part",
    ]);
    for (number, rung) in ladder.rungs.iter().enumerate() {
        let seconds = rung.seconds();
        let cold = flashcore_bench::timing::Times { seconds: rung.cold_seconds.clone() }.quantile(0.5);
        let (gain, verdict) = match ladder.gain(number) {
            Gain::Unknown => (f64::NAN, ""),
            Gain::Faster(factor) => (factor, "faster"),
            Gain::Nothing(factor) => (factor, "brought nothing"),
            Gain::Refused(factor) => (factor, "refused by the gate"),
        };
        let gate = match rung.standing {
            Standing::Passed => "passed",
            Standing::Refused(_) => "REFUSED",
            Standing::NotRun(_) => "not run",
        };
        let against = match rung.from {
            Some(from) => ladder.rungs[from].name.as_str(),
            None if number == 0 => "",
            None => "the best",
        };
        let figure = |value: Option<f64>, decimals| Cell::figure(value.filter(|value| value.is_finite()), decimals);
        let taken = |part: fn(&flashcore_bench::ladder::Taken) -> u32| {
            rung.resources.as_ref().map(|taken| f64::from(part(taken)))
        };
        let counted = |part: fn(&flashcore_bench::ladder::Counted) -> f64| rung.counted.as_ref().map(part);
        table.push(vec![
            Cell::from(number as u32),
            Cell::from(rung.name.as_str()),
            Cell::from(rung.config.as_str()),
            Cell::from(gate),
            figure(seconds.map(|seconds| seconds * 1e6), 2),
            figure(Some(cold * 1e6), 2),
            figure(ladder.floor_seconds.zip(seconds).map(|(floor, seconds)| 100.0 * floor / seconds), 1),
            Cell::from(against),
            figure(Some(gain), 2),
            Cell::from(verdict),
            figure(taken(|taken| taken.registers), 0),
            figure(taken(|taken| taken.spilled_bytes), 0),
            figure(taken(|taken| taken.shared_bytes / 1024), 0),
            figure(counted(|counted| counted.instructions_per_thousand), 0),
            figure(counted(|counted| counted.global_bytes), 1),
            figure(counted(|counted| counted.shared_bytes), 1),
            figure(counted(|counted| counted.transactions_per_request), 2),
            figure(counted(|counted| counted.tensor_part), 2),
        ]);
    }
    table
}

fn with_shape(file: &Path, shape: &str) -> PathBuf {
    let stem = file.file_stem().unwrap_or_default().to_string_lossy();
    let shape = shape.replace(['/', ','], "-");
    file.with_file_name(format!("{stem}-{shape}.svg"))
}
