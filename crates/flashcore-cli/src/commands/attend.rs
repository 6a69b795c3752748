//! `flashcore attend`: attention of the tensors in a file.

mod look_alikes;
mod tensors;

use std::path::PathBuf;
use std::time::Instant;

use clap::{Args, ValueEnum};
use flashcore::{Device, Plan, PlanOptions, Reason};
use flashcore_bench::memory::{output_bytes, read_file, require};
use flashcore_bench::parse_mask;
use flashcore_bench::whole_file::is_standard_output;
use flashcore_problem::{Layout, Outputs, Problem};
use safetensors::SafeTensors;

use self::tensors::{Contents, Names};
use super::origin::write_file;
use super::overwriting::refuse_overwriting;
use crate::output::{Cell, Format, Output, Table};
use crate::{Ending, Failure};

/// Compute attention of the tensors in a file
///
/// IN is a safetensors file with `query`, `key` and `value` of shape [batch, heads, rows, dim], in F16, BF16, F32 or F64;
/// `alibi_slopes` [heads], `sinks` [heads], `bias` [batch, heads, queries, keys] (1 where it is repeated) and
/// `key_lengths` [batch] take part when they are there. OUT gets `output`, and with --lse `log_sum_exp`
/// [batch, heads, rows]. A tensor that takes no part is named at the end; one that looks like an input under the name of
/// another library, such as `attn_mask`, is an error.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashcore attend in.safetensors out.safetensors --mask causal --lse\n  flashcore attend in.safetensors out.safetensors --layout bshd --device cuda --kernel ampere\n  flashcore attend in.safetensors out.safetensors --query-name q --key-name k --value-name v --ignore mask"
)]
pub(crate) struct Attend {
    /// The file that is read
    #[arg(value_name = "IN")]
    input: PathBuf,
    /// The file that is written, as a whole or not at all; /dev/stdout for standard output
    #[arg(value_name = "OUT")]
    output: PathBuf,
    /// The tensor that is the query
    #[arg(long, value_name = "NAME", default_value = "query")]
    query_name: String,
    /// The tensor that is the key
    #[arg(long, value_name = "NAME", default_value = "key")]
    key_name: String,
    /// The tensor that is the value
    #[arg(long, value_name = "NAME", default_value = "value")]
    value_name: String,
    /// A tensor to leave out, or several, though they look like inputs
    #[arg(long, value_name = "NAME")]
    ignore: Vec<String>,
    /// What the axes of query, key, value and output are
    #[arg(long, value_enum, default_value_t = LayoutName::Bhsd)]
    layout: LayoutName,
    /// Which keys a row attends: full, causal, causal-top-left or window:LEFT,RIGHT
    #[arg(long, default_value = "full")]
    mask: String,
    /// What products of query and key are multiplied by; 1 / sqrt(dim) unless given
    #[arg(long, allow_negative_numbers = true)]
    scale: Option<f32>,
    /// Scores become SOFTCAP * tanh(score / SOFTCAP)
    #[arg(long, allow_negative_numbers = true)]
    softcap: Option<f32>,
    /// Who computes
    #[arg(long, value_enum, default_value_t = DeviceName::Auto)]
    device: DeviceName,
    /// With the log-sum-exp as a second output
    #[arg(long)]
    lse: bool,
    /// The GPU kernel, by family (scalar, steps, ampere, hopper) or by config; needs a GPU
    #[arg(long)]
    kernel: Option<String>,
    /// How results are written
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
    /// The first GPU if it takes the problem, else the CPU
    Auto,
    /// The CPU
    Cpu,
    /// The first GPU
    Cuda,
}

impl Attend {
    pub(crate) fn run(&self, output: &mut Output) -> Result<Ending, Failure> {
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
        let mut contents = Contents::read(&file, layout, &names)
            .map_err(|complaint| Failure::Usage(format!("{shown}: {complaint}")))?;
        self.complete(&mut contents.problem)?;
        let problem = &contents.problem;
        // The outputs, and the file of them. Asked again where more has been taken meanwhile: threads have stacks.
        let fits = |what: &str, copies: u64| {
            let bytes = output_bytes(problem).and_then(|bytes| bytes.checked_mul(copies));
            require(what, bytes).map_err(|error| Failure::Environment(format!("{shown}: {error}")))
        };
        fits("the output and its file", 2)?;

        let planning = Instant::now();
        let Planned { plan, note } = match self.plan(problem)? {
            Ok(planned) => planned,
            Err(complaint) => {
                output.complain(&complaint);
                return Ok(Ending::Failed);
            }
        };
        let plan_seconds = planning.elapsed().as_secs_f64();
        fits("the output and its file", 2)?;
        let mut outputs = Outputs::poisoned(problem);
        let running = Instant::now();
        plan.run(contents.views(), &mut outputs).map_err(|error| match error {
            flashcore::Error::Cuda(error) => Failure::Environment(error.to_string()),
            error => Failure::Usage(format!("{shown}: {error}")),
        })?;
        let run_seconds = running.elapsed().as_secs_f64();

        fits("the file of the output", 1)?;
        let written = contents.written(&outputs).map_err(Failure::Environment)?;
        write_file(&self.output, &written)?;
        if is_standard_output(&self.output) {
            // Words among the bytes of the file would make it another.
            return Ok(Ending::Well);
        }

        let kernel =
            plan.report().kernel.as_ref().map_or_else(|| "native".to_owned(), |kernel| kernel.config.to_string());
        let mut table = Table::new(&["device", "kernel", "problem", "plan ms", "run ms"]);
        table.push(vec![
            Cell::from(plan.device().to_string()),
            Cell::from(kernel),
            Cell::from(problem.to_string()),
            Cell::number(plan_seconds * 1e3, 3),
            Cell::number(run_seconds * 1e3, 3),
        ]);
        output.table(&table, self.format)?;
        if matches!(self.format, Format::Table | Format::Markdown) {
            if let Some(note) = note {
                output.line(format!("not on a GPU: {note}"))?;
            }
            if plan.device().is_cuda() {
                output.line("the run includes the copies to the GPU and back")?;
            }
            if !contents.unused.is_empty() {
                output.line(format!("not used: {}", contents.unused.join(", ")))?;
            }
            output.line(format!("wrote {}", self.output.display()))?;
        }
        Ok(Ending::Well)
    }

    /// What the command line says of the problem.
    fn complete(&self, problem: &mut Problem) -> Result<(), Failure> {
        problem.mask = parse_mask(&self.mask).map_err(|error| Failure::Usage(error.to_string()))?;
        problem.scale = self.scale.unwrap_or(problem.scale);
        problem.softcap = self.softcap;
        problem.log_sum_exp = self.lse;
        problem.validate().map_err(|errors| Failure::Usage(joined(&errors)))
    }

    /// A plan, or that the kernel failed its self-check.
    fn plan(&self, problem: &Problem) -> Result<Result<Planned, String>, Failure> {
        let config = self.kernel.as_deref().map(super::config).transpose()?;
        let options = PlanOptions { config, ..PlanOptions::default() };
        let on_cpu = |note| {
            start_threads()?;
            match Plan::new(problem, &Device::cpu(), PlanOptions::default()) {
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
            DeviceName::Auto | DeviceName::Cuda => Device::cuda(0),
        };
        let gpu = match gpu {
            Ok(gpu) => gpu,
            Err(error) if insists => return Err(Failure::Environment(error.to_string())),
            Err(error) => return on_cpu(Some(error.to_string())),
        };
        match Plan::new(problem, &gpu, options) {
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

/// Starts the threads that compute. Where the first use starts them, a system without threads to give is a panic.
fn start_threads() -> Result<(), Failure> {
    rayon::ThreadPoolBuilder::new().build_global().map_err(|error| {
        Failure::Environment(format!(
            "the threads that compute cannot be started: {error}; RAYON_NUM_THREADS=1 takes one, and `ulimit` shows limits"
        ))
    })
}

/// A plan, and why it is not on a GPU if one was looked for.
struct Planned {
    plan: Plan,
    note: Option<String>,
}

fn joined(reasons: &[impl ToString]) -> String {
    reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}
