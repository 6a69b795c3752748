//! `flashcore profile`: counters of a kernel, and what limits it.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use clap::Args;
use flashcore_bench::lab::peak::working_threads;
use flashcore_bench::lab::profile::{
    Evidence, Gates, Ncu, Profile, ProfiledKernel, Sampled, Simulated, classify, metrics, parse_csv, simulate_counters,
};
use flashcore_bench::lab::record::{Machine, ProblemKey};
use flashcore_bench::lab::roofline::{Floors, RoofDevice};
use flashcore_bench::testkit::gpu::Gpu;
use flashcore_bench::testkit::memory::require_tensors;
use flashcore_bench::testkit::{Workload, mask_text};
use flashcore_kernels::{Config, heuristics};
use flashcore_problem::{DType, DTypes, Problem};

use super::origin::write_record;
use super::overwriting::refuse_overwriting;
use super::reference_gpu;
use crate::output::{Cell, Column, Format, Output, PROBLEM, Table, column, field, recorded_cells};
use crate::{Ending, Failure, interrupt};

/// Show the hardware and simulator counters of a kernel, and what limits its speed
///
/// On a GPU with ncu: its counters (clocks are not locked), exported as .ncu-rep and .csv, beside the counters of the
/// simulator for the same kernel, with the reason where the two differ by more than 2 %. Gates from a TOML file are
/// applied, and the verdict is tensor-, exp-, memory-, shared-memory-, latency- or launch-bound, with its numbers. Without
/// ncu the verdict comes from times and floors, without a GPU from the simulator alone. Exit code 1 if a gate fails.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashcore profile --shape 4x16x2048x128\n  flashcore profile --kernel ampere-64x64-2stage-plain --gates bench/gates.toml\n  flashcore profile --shape 1x8x512x64 --out profiles --record profile.json\n  flashcore profile --device l4 --shape 1x8x512x64      without a GPU, as if on an L4\n  flashcore profile --shape 8x32/8x1,8192x128+scales=head --dtype 'bf16 kv e4m3'\n  flashcore profile --import profiles/NAME.csv --kernel ampere --shape 1x8x512x64"
)]
pub(crate) struct ProfileCommand {
    /// The GPU kernel, by family or by config, or several [default: chosen for the GPU and the problem]
    #[arg(long)]
    kernel: Vec<String>,
    /// A problem, or several: batch x heads[/key heads] x queries[,keys] x dim[+feature]; of FP8, +scales[=tensor|head|sequence|token]
    #[arg(long, default_values = ["1x8x512x64"])]
    shape: Vec<String>,
    /// The element type, or those of query, key and value, and output, such as 'bf16 kv e4m3' or 'e4m3 out bf16'
    #[arg(long, default_value_t = super::one_type(DType::F16))]
    dtype: DTypes,
    /// The mask: full, causal, causal-top-left or window:LEFT,RIGHT
    #[arg(long, default_value = "full")]
    mask: String,
    /// A TOML file of gates; bench/gates.toml is an example
    #[arg(long, value_name = "FILE")]
    gates: Option<PathBuf>,
    /// Flush caches before each pass of ncu
    #[arg(long)]
    cold: bool,
    /// Read what an earlier profile exported (.csv) instead of running anything; needs --kernel and one --shape
    #[arg(long, value_name = "FILE", requires = "kernel", conflicts_with_all = ["cold", "ncu", "out"])]
    import: Option<PathBuf>,
    /// The path of ncu
    #[arg(long, value_name = "PATH", default_value = "ncu")]
    ncu: PathBuf,
    /// The device whose floors are used if there is no GPU
    #[arg(long, value_name = "NAME", default_value = reference_gpu::NAME)]
    device: String,
    /// The directory for .ncu-rep and .csv files
    #[arg(long, value_name = "DIR", default_value = "profiles")]
    out: PathBuf,
    /// Write a JSON record with the machine, the counters and the verdicts
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// The output format
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// Counters of a launch on the GPU.
#[derive(Default)]
struct Launched {
    seconds: Option<f64>,
    ctas: Option<(u32, u32)>,
    ncu: Option<String>,
    counted: std::collections::BTreeMap<String, f64>,
    notes: Vec<String>,
}

impl ProfileCommand {
    pub(crate) fn run(&self, output: &Output) -> Result<Ending, Failure> {
        interrupt::watch();
        let read: Vec<&Path> = [&self.gates, &self.import].into_iter().filter_map(Option::as_deref).collect();
        refuse_overwriting(&read, self.record.as_deref().as_slice())?;
        if self.import.is_some() && (self.shape.len() > 1 || self.kernel.len() > 1) {
            return Err(Failure::Usage(format!(
                "--import reads one launch, and {} kernels on {} problems are named; give one --kernel and one --shape",
                self.kernel.len(),
                self.shape.len()
            )));
        }
        let gates = match &self.gates {
            Some(file) => Gates::read(file).map_err(|error| Failure::Usage(error.to_string()))?,
            None => Gates::default(),
        };
        let gpu = if self.import.is_some() { None } else { Some(Gpu::open(0)) };
        let device = match &gpu {
            Some(Ok(gpu)) => RoofDevice::this_gpu(gpu).map_err(|error| Failure::Environment(error.to_string()))?,
            _ => RoofDevice::named(&self.device).map_err(|error| Failure::Usage(error.to_string()))?,
        };
        if let Some(Err(_)) = &gpu {
            output.note(&format!(
                "no usable GPU (`flashcore doctor` says why); counters from the simulator, floors of {}",
                device.name
            ));
        }
        let gpu = gpu.and_then(Result::ok);
        if let (true, None, None) = (self.cold, &gpu, &self.import) {
            return Err(Failure::Usage(
                "--cold has ncu flush the caches of a GPU, and there is none here; leave it out".to_owned(),
            ));
        }
        let kept = Mutex::new(Vec::new());
        let of = self.shape.len() * self.kernel.len().max(1);
        let work = || {
            let mut done = 0;
            for problem in self.problems()? {
                for config in self.configs(&problem, gpu.as_ref())? {
                    if interrupt::requested() {
                        return Ok(());
                    }
                    output.progress(done, of, &format!("{config} {}", problem.shape()));
                    let mut row = self.profile(&problem, config, gpu.as_ref(), &device)?;
                    gates.apply(&row.kernel, &mut row.metrics);
                    if matches!(self.format, Format::Table | Format::Markdown) {
                        self.show(&row, output)?;
                    }
                    interrupt::aside(&kept).push(row);
                    done += 1;
                }
            }
            Ok(())
        };
        interrupt::abandonable(output, work, |_| {
            let machine = Self::machine(gpu.as_ref(), &device, self.import.is_some());
            self.conclude(std::mem::take(&mut *interrupt::aside(&kept)), of, machine, output)
        })
    }

    /// Shows and records what was profiled.
    fn conclude(
        &self,
        rows: Vec<ProfiledKernel>,
        of: usize,
        machine: Machine,
        output: &Output,
    ) -> Result<Ending, Failure> {
        let is_well = rows.iter().all(ProfiledKernel::passed);
        let left_out = interrupt::left_out(rows.len(), of);
        if !left_out.is_empty() {
            output.note(&format!("{} profiled{left_out}", rows.len()));
        }
        // Programs read one table.
        if matches!(self.format, Format::Json | Format::Csv) {
            let mut all = Table::new(&columns());
            for row in &rows {
                all.append(table(row));
            }
            output.table(&all, self.format)?;
        }
        if let Some(file) = &self.record {
            write_record(file, machine, Profile { rows })?;
        }
        Ok(if !left_out.is_empty() {
            Ending::Interrupted
        } else if is_well {
            Ending::Well
        } else {
            Ending::Failed
        })
    }

    fn problems(&self) -> Result<Vec<Workload>, Failure> {
        self.shape.iter().map(|shape| super::problem(shape, self.dtype, &self.mask)).collect()
    }

    /// The configs that were asked for, or the one that the device takes.
    fn configs(&self, problem: &Problem, gpu: Option<&Gpu>) -> Result<Vec<Config>, Failure> {
        if !self.kernel.is_empty() {
            return self.kernel.iter().map(|name| super::config(name)).collect();
        }
        let reasons = |unsupported: flashcore::Unsupported| {
            Failure::Usage(unsupported.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))
        };
        match gpu {
            Some(gpu) => {
                let plan = gpu.plan(problem, None).map_err(reasons)?;
                Ok(plan.report().kernel.iter().filter_map(|kernel| kernel.config).collect())
            }
            None => Ok(vec![heuristics::select(problem, reference_gpu::TARGET)]),
        }
    }

    fn profile(
        &self,
        problem: &Workload,
        config: Config,
        gpu: Option<&Gpu>,
        device: &RoofDevice,
    ) -> Result<ProfiledKernel, Failure> {
        let mut launched = match (gpu, &self.import) {
            (Some(gpu), _) => self.launch(problem, config, gpu)?,
            (None, Some(file)) => imported(file)?,
            (None, None) => Launched::default(),
        };
        let simulated = match simulate_counters(problem, config) {
            Ok(simulated) => Some(simulated),
            Err(error) => {
                launched.notes.push(format!("the simulator cannot run it: {error}"));
                None
            }
        };
        let counters = simulated.as_ref().map(|simulated| (&simulated.counters, simulated.factor));
        let metrics = metrics(&launched.counted, counters);
        let floors = Floors::of(problem, device);
        let evidence =
            Evidence { metrics: &metrics, floors: &floors, device, seconds: launched.seconds, ctas: launched.ctas };
        let (bottleneck, reason) = classify(&evidence);
        let simulated =
            simulated.map(|Simulated { workload, factor, .. }| (ProblemKey::of_workload(&workload), factor));
        Ok(ProfiledKernel {
            kernel: config.to_string(),
            problem: ProblemKey::of_workload(problem),
            simulated,
            seconds: launched.seconds,
            ncu: launched.ncu,
            metrics,
            bottleneck,
            reason,
            notes: launched.notes,
        })
    }

    /// Times a kernel, and has ncu count where that is possible.
    fn launch(&self, problem: &Workload, config: Config, gpu: &Gpu) -> Result<Launched, Failure> {
        require_tensors(problem).map_err(super::impossible)?;
        let mut launched = Launched::default();
        match gpu.time(problem, Some(config), &problem.inputs(0)) {
            Ok(Ok(times)) => launched.seconds = Some(times.hot.quantile(0.5)),
            Ok(Err(verdict)) => {
                return Err(Failure::Usage(format!("{config} gives wrong results, so it is not profiled: {verdict}")));
            }
            Err(error) => return Err(Failure::Usage(error.to_string())),
        }
        let num_sms = gpu.device().context().map_or(0, |context| context.device().attributes.num_sms);
        if let Ok(plan) = gpu.plan(problem, Some(config)) {
            let grid = plan.report().kernel.as_ref().map_or([0; 3], |kernel| kernel.grid);
            launched.ctas = Some((grid.iter().product(), num_sms));
        }
        let ncu = match Ncu::find(&self.ncu) {
            Ok(ncu) => ncu,
            Err(error) => {
                launched.notes.push(error.to_string());
                return Ok(launched);
            }
        };
        std::fs::create_dir_all(&self.out)?;
        let (shape, types) = (problem.shape(), problem.dtypes().to_string());
        let name = format!("{config}-{shape}-{types}-{}", mask_text(problem.mask));
        let name: String =
            name.chars().map(|letter| if letter.is_alphanumeric() || letter == '-' { letter } else { '_' }).collect();
        let arguments = [
            "profile-target",
            "--kernel",
            &config.to_string(),
            "--shape",
            &shape,
            "--dtype",
            &types,
            "--mask",
            &mask_text(problem.mask),
        ]
        .map(str::to_owned);
        match ncu.profile(&std::env::current_exe()?, &arguments, &self.out.join(name), self.cold) {
            Ok(launches) => {
                launched.counted = longest(launches).map(|launch| launch.counted).unwrap_or_default();
                launched.ncu = Some(ncu.version);
            }
            Err(error) => launched.notes.push(error.to_string()),
        }
        Ok(launched)
    }

    fn show(&self, row: &ProfiledKernel, output: &Output) -> Result<(), Failure> {
        output.line(format!("\n{} on {}", row.kernel, row.problem))?;
        if let Some((problem, factor)) = &row.simulated {
            output.line(format!("the simulator executed {problem}; its counters are multiplied by {factor}"))?;
        }
        output.table(&table(row), self.format)?;
        for note in &row.notes {
            output.line(format!("note: {note}"))?;
        }
        let failed = row.metrics.iter().filter(|metric| metric.gate.as_ref().is_some_and(|gate| !gate.passed));
        for metric in failed {
            let words = metric.gate.as_ref().map_or("", |gate| gate.words.as_str());
            output.verdict(format!("FAILED {}: {words}", metric.name))?;
        }
        output.line(format!("{}: {}", row.bottleneck.word(), row.reason))?;
        Ok(())
    }

    fn machine(gpu: Option<&Gpu>, device: &RoofDevice, is_imported: bool) -> Machine {
        match gpu.and_then(|gpu| gpu.device().context()) {
            Some(context) => Machine::gpu(context.device(), None),
            None if is_imported => Machine {
                backend: "cuda".to_owned(),
                device: device.name.clone(),
                arch: "as ncu exported it".to_owned(),
                threads: None,
                driver: None,
                ceilings: None,
                state: Vec::new(),
            },
            None => Machine {
                backend: "sim".to_owned(),
                device: device.name.clone(),
                ..Machine::cpu("simulator", working_threads(), None)
            },
        }
    }
}

/// A combine kernel may follow; the launch that takes longest is the attention kernel.
fn longest(launches: Vec<Sampled>) -> Option<Sampled> {
    let time = |launch: &Sampled| launch.counted.get("gpu__time_duration.sum").copied().unwrap_or(0.0);
    launches.into_iter().max_by(|one, other| time(one).total_cmp(&time(other)))
}

/// Reads an earlier export of ncu.
fn imported(file: &Path) -> Result<Launched, Failure> {
    let text = std::fs::read_to_string(file).map_err(|error| Failure::Usage(format!("{}: {error}", file.display())))?;
    let launch = longest(parse_csv(&text)).ok_or_else(|| {
        Failure::Usage(format!(
            "{}: this is not a raw page of ncu; `flashcore profile --out DIR` exports one",
            file.display()
        ))
    })?;
    let seconds = launch.counted.get("gpu__time_duration.sum").map(|nanoseconds| nanoseconds / 1e9);
    let notes = vec![format!("counters are from {}", file.display())];
    let num_sms = launch.counted.get("device__attribute_multiprocessor_count");
    let ctas = launch.ctas.zip(num_sms.map(|count| *count as u32));
    Ok(Launched { seconds, ctas, counted: launch.counted, notes, ..Launched::default() })
}

fn columns() -> Vec<Column> {
    let shown = [
        column("metric", "metric"),
        column("unit", "unit"),
        column("hardware", "hardware"),
        column("simulator", "simulator"),
        column("gate", "gate").verdict(),
        column("difference", "difference").minor(),
        field("kernel"),
        field("bottleneck"),
    ];
    shown.into_iter().chain(PROBLEM.map(Column::for_programs)).collect()
}

fn table(row: &ProfiledKernel) -> Table {
    let mut table = Table::new(&columns());
    let number = |value: Option<f64>| Cell::figure(value, 2);
    for metric in &row.metrics {
        let gate = metric
            .gate
            .as_ref()
            .map_or(String::new(), |gate| format!("{}: {}", if gate.passed { "ok" } else { "FAILED" }, gate.words));
        let mut cells = vec![
            Cell::from(metric.name.as_str()),
            Cell::from(metric.unit.as_str()),
            number(metric.hardware),
            number(metric.simulator),
            Cell::from(gate),
            Cell::from(metric.difference.clone().unwrap_or_default()),
            Cell::from(row.kernel.as_str()),
            Cell::from(row.bottleneck.word()),
        ];
        cells.extend(recorded_cells(&row.problem));
        table.push(cells);
    }
    table
}

/// The program that ncu runs for `profile`: a few launches of one kernel.
#[derive(Debug, Args)]
pub(crate) struct ProfileTarget {
    #[arg(long)]
    kernel: String,
    #[arg(long)]
    shape: String,
    #[arg(long)]
    dtype: DTypes,
    #[arg(long)]
    mask: String,
}

impl ProfileTarget {
    pub(crate) fn run(&self) -> Result<Ending, Failure> {
        let problem = super::computable_problem(&self.shape, self.dtype, &self.mask)?;
        let gpu = Gpu::open(0).map_err(|error| Failure::Environment(error.to_string()))?;
        let launched = gpu.launch_some(&problem, Some(super::config(&self.kernel)?), &problem.inputs(0));
        launched.map_err(|error| Failure::Usage(error.to_string()))?;
        Ok(Ending::Well)
    }
}
