//! `flashcore attend`: attention on the tensors of a file.

mod look_alikes;
mod scales;
mod tensors;

use std::path::PathBuf;
use std::time::Instant;

use clap::{Args, ValueEnum};
use flashcore::{Device, Plan, PlanOptions, Reason};
use flashcore_bench::testkit::memory::{output_bytes, read_file, require};
use flashcore_bench::testkit::parse_mask;
use flashcore_bench::testkit::verify::{NoVerdict, Yardstick, attend_in_simulator};
use flashcore_bench::util::whole_file::is_standard_output;
use flashcore_problem::{DType, Evidence, Layout, LseBase, Outputs, Problem};
use safetensors::SafeTensors;

use self::tensors::{Contents, Names};
use super::origin::write_file;
use super::overwriting::refuse_overwriting;
use super::threads::Threads;
use crate::output::{Cell, Column, Format, Output, PROBLEM, Table, column, problem_cells};
use crate::{Ending, Failure};

/// Compute attention on the tensors of a file
///
/// IN is a safetensors file with `query`, `key` and `value` of shape [batch, heads, rows, dim], in F16, BF16, F32 or F64,
/// key and value also in F8_E4M3 or F8_E5M2, and the query in F8_E4M3 with --out-dtype; their scales are `q_scale`,
/// `k_scale` and `v_scale`, of shape [1], [kv heads], [batch, kv heads] or [batch, heads, rows]. `alibi_slopes` [heads], `sinks` [heads], `bias` [batch, heads, queries, keys] (1 to broadcast an axis) and `seqused_k`
/// [batch] are used if they are present. OUT gets `output`, and with --lse `lse` [batch, heads, rows]. Other tensors
/// are listed as not used; one that looks like an input under the name of another library, such as `attn_mask`, is an
/// error.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashcore attend in.safetensors out.safetensors --mask causal --lse\n  flashcore attend in.safetensors out.safetensors --layout bshd --device cuda --kernel ampere\n  flashcore attend in.safetensors out.safetensors --query-name q --key-name k --value-name v --ignore mask\n  flashcore attend in.safetensors out.safetensors --device sim --kernel hopper --verify"
)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of the command line")]
pub(crate) struct Attend {
    /// The file to read
    #[arg(value_name = "IN")]
    input: PathBuf,
    /// The file to write, as a whole or not at all; /dev/stdout for standard output
    #[arg(value_name = "OUT")]
    output: PathBuf,
    /// The name of the query tensor
    #[arg(long, value_name = "NAME", default_value = "query")]
    query_name: String,
    /// The name of the key tensor
    #[arg(long, value_name = "NAME", default_value = "key")]
    key_name: String,
    /// The name of the value tensor
    #[arg(long, value_name = "NAME", default_value = "value")]
    value_name: String,
    /// A tensor to leave out although it looks like an input; may be repeated
    #[arg(long, value_name = "NAME")]
    ignore: Vec<String>,
    /// The order of the axes of query, key, value and output
    #[arg(long, value_enum, default_value_t = LayoutName::Bhsd)]
    layout: LayoutName,
    /// Which keys a row attends: full, causal, causal-top-left or window:LEFT,RIGHT
    #[arg(long, default_value = "full")]
    mask: String,
    /// The factor of the products of query and key [default: 1 / sqrt(dim)]
    #[arg(long, allow_negative_numbers = true)]
    scale: Option<f64>,
    /// Cap scores: SOFTCAP * tanh(score / SOFTCAP) [default: no cap]
    #[arg(long, allow_negative_numbers = true)]
    softcap: Option<f32>,
    /// The element type of the output of an FP8 query, f16 or bf16 [default: that of the query]
    #[arg(long, value_name = "DTYPE")]
    out_dtype: Option<DType>,
    /// The device that computes
    #[arg(long, value_enum, default_value_t = DeviceName::Auto)]
    device: DeviceName,
    /// Write the log-sum-exp as well
    #[arg(long)]
    lse: bool,
    /// The log-sum-exp in base 2
    #[arg(long, requires = "lse")]
    lse_base2: bool,
    /// The log-sum-exp of the keys alone, without the sink
    #[arg(long, requires = "lse")]
    lse_without_sink: bool,
    /// The GPU kernel, by family (scalar, steps, ampere, hopper) or by config; needs a GPU or --device sim
    #[arg(long)]
    kernel: Option<String>,
    /// Judge the result by the oracle, as `flashcore verify` does; what fails is written all the same
    #[arg(long)]
    verify: bool,
    #[command(flatten)]
    threads: Threads,
    /// The output format
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LayoutName {
    /// Batch, head, row, column
    Bhsd,
    /// Batch, row, head, column
    Bshd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum DeviceName {
    /// The first GPU if it supports the problem, else the CPU
    Auto,
    /// The CPU
    Cpu,
    /// The first GPU
    Cuda,
    /// A GPU kernel in the simulator, which checks every access and every wait
    Sim,
}

impl Attend {
    pub(crate) fn run(&self, output: &Output) -> Result<Ending, Failure> {
        self.threads.apply()?;
        let shown = self.input.display();
        refuse_overwriting(&[&self.input], &[&self.output])?;
        let bytes = read_file(&self.input).map_err(|error| Failure::Usage(format!("cannot read {shown}: {error}")))?;
        let file = SafeTensors::deserialize(&bytes)
            .map_err(|error| Failure::Usage(format!("{shown} is not a safetensors file: {error}")))?;
        let layout = match self.layout {
            LayoutName::Bhsd => Layout::Bhsd,
            LayoutName::Bshd => Layout::Bshd,
        };
        let names =
            Names { query: &self.query_name, key: &self.key_name, value: &self.value_name, ignored: &self.ignore };
        let mut contents = Contents::read(&file, layout, &names, self.out_dtype)
            .map_err(|complaint| Failure::Usage(format!("{shown}: {complaint}")))?;
        self.complete(&mut contents.problem)?;
        let problem = &contents.problem;
        self.require_room(problem, "the output and its file", 2)?;

        let run = match self.device {
            DeviceName::Sim => self.run_in_simulator(&contents)?,
            DeviceName::Auto | DeviceName::Cpu | DeviceName::Cuda => self.run_plan(&contents)?,
        };
        let Computed { outputs, device, kernel, plan_seconds, run_seconds, notes } = match run {
            Ok(run) => run,
            Err(complaint) => {
                output.complain(&complaint);
                return Ok(Ending::Failed);
            }
        };
        let verdict = if self.verify {
            let inputs = contents.inputs();
            let invalid = |invalid| Failure::Usage(format!("{shown}: {invalid}"));
            let yardstick = Yardstick::new(problem, inputs).map_err(invalid)?;
            Some(yardstick.judge(problem, &Evidence::new(yardstick.inputs(), &outputs)))
        } else {
            None
        };

        self.require_room(problem, "the file of the output", 1)?;
        let written = contents.written(&outputs).map_err(Failure::Environment)?;
        write_file(&self.output, &written)?;
        if is_standard_output(&self.output) {
            // Words among the bytes of the file would make it another.
            return Ok(Ending::Well);
        }

        let columns = [
            column("device", "device"),
            column("kernel", "kernel"),
            column("problem", "problem"),
            column("plan ms", "plan_ms"),
            column("run ms", "run_ms"),
        ];
        let mut table = Table::new(&[&columns[..], &PROBLEM.map(Column::for_programs)].concat());
        let mut cells = vec![
            Cell::from(device),
            Cell::from(kernel),
            Cell::from(problem.to_string()),
            Cell::number(plan_seconds * 1e3, 3),
            Cell::number(run_seconds * 1e3, 3),
        ];
        cells.extend(problem_cells(problem));
        table.push(cells);
        output.table(&table, self.format)?;
        if matches!(self.format, Format::Table | Format::Markdown) {
            notes.iter().try_for_each(|note| output.line(note))?;
            if !contents.unused.is_empty() {
                output.line(format!("not used: {}", contents.unused.join(", ")))?;
            }
            output.line(format!("wrote {}", self.output.display()))?;
        }
        match verdict {
            Some(verdict) if !verdict.passed() => {
                output.complain(&verdict.to_string());
                Ok(Ending::Failed)
            }
            Some(verdict) => {
                if matches!(self.format, Format::Table | Format::Markdown) {
                    output.line(verdict.to_string())?;
                }
                Ok(Ending::Well)
            }
            None => Ok(Ending::Well),
        }
    }

    /// Runs a plan of the library, on a GPU or the CPU; or what the self-check of a kernel complained of.
    fn run_plan(&self, contents: &Contents<'_>) -> Result<Result<Computed, String>, Failure> {
        let problem = &contents.problem;
        let planning = Instant::now();
        let Planned { plan, note } = match self.plan(problem)? {
            Ok(planned) => planned,
            Err(complaint) => return Ok(Err(complaint)),
        };
        let plan_seconds = planning.elapsed().as_secs_f64();
        self.require_room(problem, "the output and its file", 2)?;
        let mut outputs = Outputs::poisoned(problem);
        let running = Instant::now();
        plan.run(contents.views(), &mut outputs).map_err(|error| match error {
            flashcore::Error::Cuda(error) => Failure::Environment(error.to_string()),
            error => Failure::Usage(format!("{}: {error}", self.input.display())),
        })?;
        let run_seconds = running.elapsed().as_secs_f64();
        let kernel = plan
            .report()
            .kernel
            .as_ref()
            .and_then(|kernel| kernel.config)
            .map_or_else(|| "native".to_owned(), |config| config.to_string());
        let mut notes: Vec<String> = note.map(|note| format!("not on a GPU: {note}")).into_iter().collect();
        if plan.device().is_cuda() {
            notes.push("run ms includes the copies to the GPU and back".to_owned());
        }
        Ok(Ok(Computed { outputs, device: plan.device().to_string(), kernel, plan_seconds, run_seconds, notes }))
    }

    /// Runs a GPU kernel in the simulator; or the fault that it found.
    fn run_in_simulator(&self, contents: &Contents<'_>) -> Result<Result<Computed, String>, Failure> {
        let config = self.kernel.as_deref().map(super::config).transpose()?;
        let running = Instant::now();
        let (config, outputs) = match attend_in_simulator(&contents.problem, config, &contents.inputs()) {
            Ok(run) => run,
            Err(NoVerdict::Simulator(error)) => return Ok(Err(error.to_string())),
            Err(refused) => return Err(Failure::Usage(refused.to_string())),
        };
        let run_seconds = running.elapsed().as_secs_f64();
        let (device, kernel) = ("simulator".to_owned(), config.to_string());
        Ok(Ok(Computed { outputs, device, kernel, plan_seconds: 0.0, run_seconds, notes: Vec::new() }))
    }

    /// Checks that the outputs fit the memory, so many times: themselves, and the file of them. Asked again where more has
    /// been taken meanwhile: threads have stacks.
    fn require_room(&self, problem: &Problem, what: &str, copies: u64) -> Result<(), Failure> {
        let bytes = output_bytes(problem).and_then(|bytes| bytes.checked_mul(copies));
        require(what, bytes).map_err(|error| Failure::Environment(format!("{}: {error}", self.input.display())))
    }

    /// Applies the options of the command line to the problem.
    fn complete(&self, problem: &mut Problem) -> Result<(), Failure> {
        problem.mask = parse_mask(&self.mask).map_err(|error| Failure::Usage(error.to_string()))?;
        problem.scale = self.scale.unwrap_or(problem.scale);
        if let Some(softcap) = self.softcap.filter(|softcap| !(softcap.is_finite() && *softcap > 0.0)) {
            return Err(Failure::Usage(format!(
                "--softcap is {softcap}; it must be finite and above 0; leave it out for no softcap"
            )));
        }
        problem.softcap = self.softcap;
        problem.lse = self.lse;
        problem.lse_form.base = if self.lse_base2 { LseBase::Two } else { LseBase::Natural };
        problem.lse_form.includes_sink = !self.lse_without_sink;
        let errors = problem.errors();
        if errors.is_empty() { Ok(()) } else { Err(Failure::Usage(joined(&errors))) }
    }

    /// A plan, or that the kernel failed its self-check.
    fn plan(&self, problem: &Problem) -> Result<Result<Planned, String>, Failure> {
        let config = self.kernel.as_deref().map(super::config).transpose()?;
        let options = PlanOptions::default().with_config(config);
        let on_cpu = |note| {
            self.threads.start()?;
            match Plan::new(problem, &Device::cpu()) {
                Ok(plan) => Ok(Ok(Planned { plan, note })),
                Err(reasons) => Err(Failure::Usage(joined(&reasons))),
            }
        };
        // Whoever names a GPU kernel wants that one.
        let insists = self.device == DeviceName::Cuda || config.is_some();
        let gpu = match self.device {
            DeviceName::Cpu if config.is_some() => {
                return Err(Failure::Usage("--kernel chooses a GPU kernel; --device cpu has none".to_owned()));
            }
            DeviceName::Cpu => return on_cpu(None),
            DeviceName::Auto | DeviceName::Cuda | DeviceName::Sim => Device::cuda(0),
        };
        let gpu = match gpu {
            Ok(gpu) => gpu,
            Err(error) if insists => return Err(Failure::Environment(error.to_string())),
            Err(error) => return on_cpu(Some(error.to_string())),
        };
        match Plan::with_options(problem, &gpu, options) {
            Ok(plan) => Ok(Ok(Planned { plan, note: None })),
            Err(reasons) if reasons.iter().any(|reason| matches!(reason, Reason::SelfCheck { .. })) => {
                Ok(Err(joined(&reasons)))
            }
            Err(reasons) if reasons.iter().any(|reason| matches!(reason, Reason::Cuda(_))) => {
                Err(Failure::Environment(joined(&reasons)))
            }
            Err(reasons) if insists => Err(Failure::Usage(joined(&reasons))),
            Err(reasons) => on_cpu(Some(joined(&reasons))),
        }
    }
}

/// The outputs, and who computed them in which time.
struct Computed {
    outputs: Outputs,
    device: String,
    kernel: String,
    plan_seconds: f64,
    run_seconds: f64,
    notes: Vec<String>,
}

/// A plan, and why it is not on a GPU if one was looked for.
struct Planned {
    plan: Plan,
    note: Option<String>,
}

fn joined(reasons: &[impl ToString]) -> String {
    reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}
