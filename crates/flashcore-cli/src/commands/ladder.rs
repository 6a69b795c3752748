//! `flashcore ladder`: what each optimization step gains.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use clap::{Args, ValueEnum};
use flashcore_bench::lab::ladder::{Gain, Ground, Ladder, Ladders, Standing, picture, steps, walk};
use flashcore_bench::lab::peak::working_threads;
use flashcore_bench::lab::record::{Machine, ProblemKey, Record};
use flashcore_bench::testkit::gpu::Gpu;
use flashcore_bench::util::printable::printable;
use flashcore_ir::Arch;
use flashcore_kernels::{Target, heuristics};
use flashcore_problem::{DType, DTypes};

use super::origin::{write_file, write_record};
use super::overwriting::refuse_overwriting;
use super::reference_gpu;
use crate::output::{Cell, Column, Format, Output, PROBLEM, Table, column, recorded_cells};
use crate::{Ending, Failure, interrupt};

/// Show what each optimization gains, from one thread per row to the fastest kernel
///
/// The steps: tiles in shared memory, padding, swizzle, wider loads, pipeline stages, tensor cores for one product, for the
/// other and for both, softmax in registers, larger tiles, and later attempts. Each is verified before it is timed. A step
/// without gain stays in the list and says so; a step that the correctness gate refuses is shown as refused and never
/// counts. Counters come from the simulator, on one head of a shorter sequence, per score (a pair of a query and a key that
/// it attends).
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashcore ladder\n  flashcore ladder --backend cuda --shape 2x16x2048x128 --record ladder.json --svg ladder.svg\n  flashcore ladder --backend sim --shape 1x8x512x64 --arch sm_89\n  flashcore ladder --from ladder.json --svg ladder.svg"
)]
pub(crate) struct LadderCommand {
    /// The backend that runs the steps
    #[arg(long, value_enum, default_value_t)]
    backend: BackendName,
    /// A problem, or several: batch x heads[/key heads] x queries[,keys] x dim
    #[arg(long, default_values = ["1x8x512x64", "2x16x2048x128"])]
    shape: Vec<String>,
    /// The element type; FP8 is refused, since the steps are those of 16 bits
    #[arg(long, default_value_t = super::one_type(DType::F16))]
    dtype: DTypes,
    /// The mask: full, causal, causal-top-left or window:LEFT,RIGHT
    #[arg(long, default_value = "full")]
    mask: String,
    /// The architecture of the kernels in the simulator; the default is that of an H200
    #[arg(long, default_value_t = reference_gpu::ARCH)]
    arch: Arch,
    /// Show a record instead of running anything
    #[arg(long, value_name = "FILE", conflicts_with_all = ["backend", "shape", "dtype", "mask", "arch"])]
    from: Option<PathBuf>,
    /// Write a JSON record with everything that was measured
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Write a plot of the times as SVG; with several problems, the shape is added to the name
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// The output format
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
    /// The simulator: counters, and resources if ptxas is installed
    Sim,
}

impl LadderCommand {
    pub(crate) fn run(&self, output: &Output) -> Result<Ending, Failure> {
        let written: Vec<&Path> = [&self.record, &self.svg].into_iter().filter_map(Option::as_deref).collect();
        refuse_overwriting(self.from.as_deref().as_slice(), &written)?;
        if let Some(file) = &self.from {
            let record = Record::<Ladders>::read(file).map_err(|error| Failure::Usage(error.to_string()))?;
            return self.conclude(record.origin.machine, record.content.ladders, "", output);
        }
        self.walk(output)
    }

    /// Shows, draws and records ladders, and says what was left out of them.
    fn conclude(
        &self,
        machine: Machine,
        ladders: Vec<Ladder>,
        left_out: &str,
        output: &Output,
    ) -> Result<Ending, Failure> {
        if matches!(self.format, Format::Table | Format::Markdown) {
            for ladder in &ladders {
                self.show(output, ladder)?;
            }
        } else {
            // Programs read one table.
            let mut all = Table::new(&columns());
            for ladder in &ladders {
                all.append(table(ladder));
            }
            output.table(&all, self.format)?;
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
        if left_out.is_empty() {
            return Ok(Ending::Well);
        }
        output.note(&format!("steps: {left_out}"));
        Ok(Ending::Interrupted)
    }

    fn walk(&self, output: &Output) -> Result<Ending, Failure> {
        interrupt::watch();
        if !self.dtype.are_same() {
            return Err(Failure::Usage(format!(
                "--dtype {}: the steps of the ladder are kernels of one element type; use f16 or bf16 here, and `flashcore bench` or `flashcore profile` for FP8",
                self.dtype
            )));
        }
        let problems: Vec<_> = self
            .shape
            .iter()
            .map(|shape| super::computable_problem(shape, self.dtype, &self.mask).map(|workload| workload.problem))
            .collect::<Result<_, _>>()?;
        let environment = |error: flashcore::Error| Failure::Environment(error.to_string());
        let gpu = match self.backend {
            BackendName::Sim => None,
            BackendName::Cuda => Some(Gpu::open(0).map_err(environment)?),
            BackendName::Auto => {
                let gpu = Gpu::open(0).ok();
                if gpu.is_none() {
                    output.note("no usable GPU (`flashcore doctor` says why); counters from the simulator, no times");
                }
                gpu
            }
        };
        let (ground, arch, num_sms, machine) = match &gpu {
            None => {
                let processor = Machine::cpu("simulator", working_threads(), None);
                let machine = Machine { backend: "sim".to_owned(), arch: self.arch.to_string(), ..processor };
                (Ground::Simulator(self.arch), self.arch, reference_gpu::TARGET.num_sms, machine)
            }
            Some(gpu) => {
                let ceilings = gpu.ceilings().map_err(environment)?;
                let context = gpu.device().context().ok_or_else(|| Failure::Environment("no context".to_owned()))?;
                let device = context.device();
                let arch = device.specific_arch().map_err(|error| Failure::Environment(error.to_string()))?;
                let machine = Machine::gpu(device, Some(ceilings));
                (Ground::Gpu(gpu, ceilings), arch, device.attributes.num_sms, machine)
            }
        };
        let steps_of = |problem| steps(problem, heuristics::select(problem, Target::new(arch, num_sms)), arch, num_sms);
        let of = problems.iter().map(|problem| steps_of(problem).len()).sum();
        let kept: Mutex<Vec<Ladder>> = Mutex::default();
        let work = || {
            for (index, problem) in problems.iter().enumerate() {
                let steps = steps_of(problem);
                let go_on = |ladder: &Ladder| {
                    let number = ladder.rungs.len();
                    let mut kept = interrupt::aside(&kept);
                    kept.truncate(index);
                    kept.push(ladder.clone());
                    if let Some(step) = steps.get(number) {
                        output.progress(number, steps.len(), &format!("{problem}: {}", step.name));
                    }
                    !interrupt::requested()
                };
                walk(problem, &steps, ground, go_on).map_err(|error| Failure::Environment(error.to_string()))?;
            }
            Ok(())
        };
        interrupt::abandonable(output, work, |_| {
            let mut ladders = std::mem::take(&mut *interrupt::aside(&kept));
            // A ladder without a step says nothing.
            ladders.retain(|ladder| !ladder.rungs.is_empty());
            let done = ladders.iter().map(|ladder| ladder.rungs.len()).sum();
            let left_out = interrupt::left_out(done, of);
            let left_out = if left_out.is_empty() { left_out } else { format!("{done} run{left_out}") };
            self.conclude(machine, ladders, &left_out, output)
        })
    }

    fn show(&self, output: &Output, ladder: &Ladder) -> Result<(), Failure> {
        let floor = match (ladder.floor_seconds, &ladder.bound_by) {
            (Some(seconds), Some(bound)) => format!("; floor {:.2} us, bound by {bound}", seconds * 1e6),
            _ => String::new(),
        };
        let Ladder { shape, dtype, mask, counted_shape, .. } = ladder;
        let title = format!("{shape} {dtype} {mask}{floor}; counted on {counted_shape}");
        output.line(format!("\n{}\n", printable(&title)))?;
        output.table(&table(ladder), self.format)?;
        if let Some(factor) = ladder.in_all() {
            output.line(format!("\nthe fastest step that passed is {factor:.1} times as fast as the first"))?;
        }
        for rung in &ladder.rungs {
            match &rung.standing {
                Standing::Passed => {}
                Standing::Refused(reason) => {
                    output.line(printable(&format!("{}: refused by the correctness gate: {reason}", rung.name)))?;
                }
                Standing::NotRun(reason) => {
                    output.line(printable(&format!("{}: does not run here: {reason}", rung.name)))?;
                }
            }
        }
        Ok(())
    }
}

fn columns() -> Vec<Column> {
    let shown = [
        column("step", "step"),
        column("name", "name"),
        column("kernel", "kernel").minor(),
        column("gate", "gate").verdict(),
        column("p50 us", "p50_us"),
        column("cold us", "cold_us").minor(),
        column("efficiency %", "efficiency_percent").minor(),
        column("compared with", "compared_with").minor(),
        column("speedup", "speedup"),
        column("verdict", "verdict").verdict(),
        column("registers", "registers").minor(),
        column("spilled bytes", "spilled_bytes").minor(),
        column("shared KB", "shared_kb").minor(),
        column("instructions per 1000 scores", "instructions_per_1000_scores").minor(),
        column("global bytes per score", "global_bytes_per_score").minor(),
        column("shared bytes per score", "shared_bytes_per_score").minor(),
        column("transactions per request", "transactions_per_request").minor(),
        column("tensor-core fraction", "tensor_core_fraction").minor(),
    ];
    shown.into_iter().chain(PROBLEM.map(Column::for_programs)).collect()
}

fn table(ladder: &Ladder) -> Table {
    let mut table = Table::new(&columns());
    let Ladder { shape, dtype, mask, .. } = ladder.clone();
    let problem = recorded_cells(&ProblemKey { shape, dtype, mask });
    for (number, rung) in ladder.rungs.iter().enumerate() {
        let seconds = rung.seconds();
        let cold = flashcore_bench::timing::Times { seconds: rung.cold_seconds.clone() }.quantile(0.5);
        let (gain, verdict) = match ladder.gain(number) {
            Gain::Unknown => (f64::NAN, ""),
            Gain::Faster(factor) => (factor, "faster"),
            Gain::Nothing(factor) => (factor, "no gain"),
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
            None => "best so far",
        };
        let figure = |value: Option<f64>, decimals| Cell::figure(value.filter(|value| value.is_finite()), decimals);
        let taken =
            |part: fn(&flashcore_bench::lab::ladder::Taken) -> u32| Cell::count(rung.resources.as_ref().map(part));
        let counted = |part: fn(&flashcore_bench::lab::ladder::Counted) -> f64| rung.counted.as_ref().map(part);
        let mut cells = vec![
            Cell::from(number),
            Cell::from(rung.name.as_str()),
            Cell::from(rung.config.as_str()),
            Cell::from(gate),
            figure(seconds.map(|seconds| seconds * 1e6), 2),
            figure(Some(cold * 1e6), 2),
            figure(ladder.floor_seconds.zip(seconds).map(|(floor, seconds)| 100.0 * floor / seconds), 1),
            Cell::from(against),
            figure(Some(gain), 2),
            Cell::from(verdict),
            taken(|taken| taken.registers),
            taken(|taken| taken.spilled_bytes),
            taken(|taken| taken.shared_bytes / 1024),
            figure(counted(|counted| counted.instructions_per_thousand), 0),
            figure(counted(|counted| counted.global_bytes), 1),
            figure(counted(|counted| counted.shared_bytes), 1),
            figure(counted(|counted| counted.transactions_per_request), 2),
            figure(counted(|counted| counted.tensor_part), 2),
        ];
        cells.extend(problem.iter().cloned());
        table.push(cells);
    }
    table
}

fn with_shape(file: &Path, shape: &str) -> PathBuf {
    let stem = file.file_stem().unwrap_or_default().to_string_lossy();
    let shape = shape.replace(['/', ','], "-");
    file.with_file_name(format!("{stem}-{shape}.svg"))
}
