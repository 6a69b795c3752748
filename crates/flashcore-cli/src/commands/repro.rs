//! `flashcore repro`: a bundle with which others can repeat a result, and its replay.

mod replay;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::{Args, ValueEnum};
use flashcore_bench::lab::compare::binary_of_revision;
use flashcore_bench::lab::record::{Machine, Measurement, Measurements, Origin, Record};
use flashcore_bench::lab::repro::{
    CaseEntry, Computed, FileEntry, Files, KernelEntry, MANIFEST, Manifest, compute, inputs_sha256, pack,
};
use flashcore_bench::testkit::gpu::Gpu;
use flashcore_bench::util::command_line::command_line;
use flashcore_bench::util::digest::sha256;
use flashcore_bench::util::temporary_folder::TemporaryFolder;
use flashcore_ir::Arch;
use flashcore_kernels::{Config, LaunchPlan};
use flashcore_problem::{DTypes, Inputs, Problem};
use flashcore_ptx::{print, ptxas};
use serde_json::Value;

use super::origin::{build, write_file};
use crate::output::Output;
use crate::{Ending, Failure, interrupt};

/// Pack a bundle with which others can repeat this machine's results and times, or replay one
///
/// Examines the machine, verifies, measures, profiles if possible, writes the report page, and packs it all with a manifest
/// (commit, versions, driver, clocks, seeds, commands, hashes), the kernels as PTX and cubin, the outputs and every sample
/// into one .tar.gz. A seal covers every bit, so a bundle that was changed is refused, as is one that holds anything that
/// the manifest does not list. --replay generates the inputs again, judges the outputs in the bundle, computes again what
/// this machine can compute (a GPU kernel in the simulator if there is no GPU), and shows what agrees. Exit code 1 if
/// something fails or disagrees.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashcore repro\n  flashcore repro --backend cuda --suite seeds --out bundle.tar.gz\n  flashcore repro --dtype 'bf16 kv e4m3'\n  flashcore repro --build HEAD                        from a clean build of a revision\n  flashcore repro --replay bundle.tar.gz"
)]
pub(crate) struct Repro {
    /// The backend that computes: the first GPU by default, or the CPU if there is no GPU
    #[arg(long, value_enum, default_value_t = BackendName::Auto, conflicts_with = "replay")]
    backend: BackendName,
    /// The problems to verify and measure
    #[arg(long, value_enum, default_value_t = SuiteName::Quick, conflicts_with = "replay")]
    suite: SuiteName,
    /// The element type, or those of query, key and value, and output, such as 'bf16 kv e4m3' or 'e4m3 out bf16'
    /// [default: f32 on the CPU, f16 on a GPU]
    #[arg(long, conflicts_with = "replay")]
    dtype: Option<DTypes>,
    /// Seconds to measure each problem for, on the CPU
    #[arg(long, default_value_t = 0.5, value_parser = super::parse_seconds, allow_negative_numbers = true)]
    seconds: f64,
    /// Build this revision from a clean checkout and use that program instead of this one
    #[arg(long, value_name = "REVISION", conflicts_with = "replay")]
    build: Option<String>,
    /// The bundle to write [default: flashcore-COMMIT-TIME.tar.gz]
    #[arg(long, value_name = "FILE", conflicts_with = "replay")]
    out: Option<PathBuf>,
    /// Replay a bundle instead of making one
    #[arg(long, value_name = "FILE")]
    replay: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BackendName {
    /// The first GPU, or the CPU where there is none
    Auto,
    /// The native CPU kernels
    Cpu,
    /// The first GPU
    Cuda,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum SuiteName {
    /// Four shapes
    Quick,
    /// Eight canonical shapes
    Seeds,
}

/// The largest output that travels in a bundle.
const MOST_OUTPUT_BYTES: usize = 1 << 20;

impl Repro {
    pub(crate) fn run(&self, output: &Output) -> Result<Ending, Failure> {
        interrupt::watch();
        if let Some(file) = &self.replay {
            return replay::run(file, self.seconds, output);
        }
        let work = TemporaryFolder::new("repro")?;
        let make = || self.make(work.path(), output);
        interrupt::abandonable(output, make, |made| {
            if made.is_none() {
                // The process ends without any destructor.
                let _ = fs::remove_dir_all(work.path());
            }
            match made {
                Some(ending) if !interrupt::requested() => Ok(ending),
                _ => {
                    output.note("stopped; no bundle is written");
                    Ok(Ending::Interrupted)
                }
            }
        })
    }

    fn make(&self, work: &Path, output: &Output) -> Result<Ending, Failure> {
        let program = match &self.build {
            None => std::env::current_exe()?,
            Some(revision) => {
                let folder = super::compare::builds_folder()?;
                binary_of_revision(revision, &folder, |said| output.note(said))
                    .map_err(|error| Failure::Environment(error.to_string()))?
            }
        };
        let gpu = match self.backend {
            BackendName::Cpu => None,
            BackendName::Cuda => Some(Gpu::open(0).map_err(|error| Failure::Environment(error.to_string()))?),
            BackendName::Auto => Gpu::open(0).ok(),
        };
        let mut steps = Steps { program, folder: work, commands: Vec::new(), left_out: Vec::new() };
        let is_well = self.steps(&mut steps, gpu.is_some(), output)?;
        if interrupt::requested() {
            return Ok(Ending::Interrupted);
        }
        let bench = Record::<Measurements>::read(&work.join("bench.json"))
            .map_err(|error| Failure::Environment(error.to_string()))?;
        let mut files = steps.files()?;
        output.note("computing outputs and kernels for the bundle");
        let (cases, kernels) = contents(&bench, gpu.as_ref(), &mut files, &mut steps.left_out)?;
        let mut environment = Value::Null;
        for (_, text) in files.iter_mut().filter(|(name, _)| name == "doctor.json") {
            environment = serde_json::from_slice(text).map_or(Value::Null, without_paths);
            *text = format!("{environment:#}\n").into_bytes();
        }
        let manifest = Manifest {
            commands: steps.commands,
            left_out: steps.left_out,
            environment,
            cases,
            kernels,
            files: files.iter().map(|(name, contents)| FileEntry::of(name, contents)).collect(),
        };
        for left_out in &manifest.left_out {
            output.note(&format!("left out: {left_out}"));
        }
        let origin = Origin { machine: bench.origin.machine.clone(), ..Origin::now(build(), machine(gpu.as_ref())) };
        let record = Record::new(origin, manifest);
        files.insert(0, (MANIFEST.to_owned(), record.to_json().into_bytes()));
        let bundle = pack(&files)?;
        let time: String = record.origin.time.chars().filter(char::is_ascii_alphanumeric).collect();
        let name = format!("flashcore-{}-{time}.tar.gz", record.origin.build.short());
        let file = self.out.clone().unwrap_or_else(|| PathBuf::from(name));
        write_file(&file, &bundle)?;
        output.line(format!(
            "{}: {} files, {} cases, {} kernels, {} KB, SHA-256 {}",
            file.display(),
            files.len(),
            record.content.cases.len(),
            record.content.kernels.len(),
            bundle.len() / 1000,
            sha256(&bundle)
        ))?;
        output.line(format!("repeat: flashcore repro --replay {}", file.display()))?;
        Ok(if is_well { Ending::Well } else { Ending::Failed })
    }

    /// Looks, verifies, measures, profiles, writes the page. Says whether everything was right.
    fn steps(&self, steps: &mut Steps<'_>, has_gpu: bool, output: &Output) -> Result<bool, Failure> {
        let backend = if has_gpu { "cuda" } else { "cpu" };
        let suite = match self.suite {
            SuiteName::Quick => "quick",
            SuiteName::Seeds => "seeds",
        };
        let seconds = self.seconds.to_string();
        // A GPU makes a fixed number of runs.
        let seconds: &[&str] = if has_gpu { &[] } else { &["--seconds", &seconds] };
        let mut step = |arguments: &[&str], keep: Option<&str>| {
            if interrupt::requested() {
                return Ok(false);
            }
            output.note(&format!("flashcore {}", command_line(arguments)));
            steps.run(arguments, keep)
        };
        step(&["doctor", "--format", "json"], Some("doctor.json"))?;
        let verified =
            step(&["verify", "--backend", backend, "--suite", "seeds", "--record", "verify.json"], Some("verify.txt"))?;
        let types = self.dtype.map(|types| types.to_string());
        let mut bench = vec!["bench", "--backend", backend, "--suite", suite];
        bench.extend(seconds);
        bench.extend(types.iter().flat_map(|types| ["--dtype", types]));
        bench.extend(["--record", "bench.json"]);
        let measured = step(&bench, Some("bench.txt"))?;
        let mut report =
            vec!["report", "bench.json", "--errors", if has_gpu { "cuda" } else { "cpu" }, "--out", "report.html"];
        if has_gpu {
            let mut profile = vec!["profile", "--record", "profile.json", "--out", "profile"];
            profile.extend(types.iter().flat_map(|types| ["--dtype", types]));
            step(&profile, Some("profile.txt"))?;
            if steps.folder.join("profile.json").exists() {
                report.insert(2, "profile.json");
            }
        } else {
            steps.left_out.push("profile: there is no GPU".to_owned());
        }
        output.note(&format!("flashcore {}", report.join(" ")));
        steps.run(&report, None)?;
        Ok(verified && measured)
    }
}

/// Commands of the program, in a folder of their own.
struct Steps<'a> {
    program: PathBuf,
    folder: &'a Path,
    commands: Vec<String>,
    left_out: Vec<String>,
}

impl Steps<'_> {
    /// Runs a command; what it writes to standard output is kept in a file. Says whether it ended well.
    fn run(&mut self, arguments: &[&str], keep: Option<&str>) -> Result<bool, Failure> {
        let child = Command::new(&self.program)
            .args(arguments)
            .current_dir(self.folder)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let output = interrupt::output_of(child)?;
        self.commands.push(format!("flashcore {}", command_line(arguments)));
        if let Some(name) = keep {
            fs::write(self.folder.join(name), &output.stdout)?;
        }
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            let code = output.status.code().map_or_else(|| "a signal".to_owned(), |code| format!("exit code {code}"));
            self.left_out.push(format!("flashcore {} ended with {code}: {}", arguments[0], said.trim()));
        }
        Ok(output.status.success())
    }

    /// Everything that the commands left.
    fn files(&self) -> Result<Files, Failure> {
        let mut files = Files::new();
        let mut folders = vec![(String::new(), self.folder.to_owned())];
        while let Some((prefix, folder)) = folders.pop() {
            let mut entries: Vec<_> = fs::read_dir(folder)?.collect::<Result<_, _>>()?;
            entries.sort_by_key(fs::DirEntry::file_name);
            for entry in entries {
                let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
                // Reports of ncu hold the paths of the machine; what they counted is in the table beside them.
                let is_report = entry.path().extension().is_some_and(|extension| extension == "ncu-rep");
                if entry.file_type()?.is_dir() {
                    folders.push((format!("{name}/"), entry.path()));
                } else if !is_report {
                    files.push((name, fs::read(entry.path())?));
                }
            }
        }
        Ok(files)
    }
}

/// A value with file names in place of paths: where things lie on a machine is nobody's business.
fn without_paths(value: Value) -> Value {
    match value {
        Value::String(text) if Path::new(&text).is_absolute() => {
            Value::from(Path::new(&text).file_name().unwrap_or_default().to_string_lossy())
        }
        Value::Array(values) => values.into_iter().map(without_paths).collect(),
        Value::Object(fields) => fields.into_iter().map(|(name, value)| (name, without_paths(value))).collect(),
        other => other,
    }
}

/// The outputs of what was measured, and the kernels.
fn contents(
    bench: &Record<Measurements>,
    gpu: Option<&Gpu>,
    files: &mut Files,
    left_out: &mut Vec<String>,
) -> Result<(Vec<CaseEntry>, Vec<KernelEntry>), Failure> {
    let (mut cases, mut kernels) = (Vec::new(), Vec::new());
    for (index, row) in bench.content.rows.iter().enumerate() {
        let problem = row.problem.workload().map_err(|error| Failure::Usage(error.to_string()))?;
        let inputs = problem.inputs(row.seed);
        let mut case = case(&bench.origin.machine, row, &inputs);
        match compute(&case, &problem, &inputs, gpu) {
            Ok(Computed::Same(outputs)) => {
                let data = outputs.output.data;
                if row.output_sha256.as_ref().is_some_and(|then| *then != sha256(&data)) {
                    left_out.push(format!("{}: two runs gave different bits", row.problem));
                }
                case.output_sha256 = sha256(&data);
                if data.len() <= MOST_OUTPUT_BYTES {
                    let name = format!("outputs/{index}.bin");
                    files.push((name.clone(), data));
                    case.output_file = Some(name);
                }
            }
            Ok(Computed::Simulated(_)) => left_out.push(format!("{}: no GPU to compute it", row.problem)),
            Ok(Computed::Not(reason)) => left_out.push(format!("{}: {reason}", row.problem)),
            Err(error) => left_out.push(format!("{}: {error}", row.problem)),
        }
        cases.push(case);
        if let Ok(config) = row.kernel.parse::<Config>() {
            kernel(config, &problem, &bench.origin.machine, files, &mut kernels, left_out);
        }
    }
    Ok((cases, kernels))
}

fn case(machine: &Machine, row: &Measurement, inputs: &Inputs) -> CaseEntry {
    CaseEntry {
        backend: machine.backend.clone(),
        kernel: row.kernel.clone(),
        problem: row.problem.clone(),
        seed: row.seed,
        inputs_sha256: inputs_sha256(inputs),
        output_sha256: row.output_sha256.clone().unwrap_or_default(),
        output_file: None,
        median_seconds: row.median(),
    }
}

/// Adds the kernel of a config for a problem, as PTX and as what ptxas makes of it, once.
fn kernel(
    config: Config,
    problem: &Problem,
    machine: &Machine,
    files: &mut Files,
    kernels: &mut Vec<KernelEntry>,
    left_out: &mut Vec<String>,
) {
    // Kernels of Hopper are for an architecture with a suffix.
    let plain = machine.arch.parse::<Arch>().unwrap_or(Arch::Sm90);
    let found =
        [plain, Arch::Sm90a].into_iter().find_map(|arch| Some((arch, LaunchPlan::new(problem, config, arch).ok()?)));
    let Some((arch, plan)) = found else { return };
    let kernel = plan.attention().kernel();
    let name = &kernel.name;
    let ptx = format!("kernels/{}.{arch}.ptx", name.chars().take(70).collect::<String>());
    if kernels.iter().any(|kernel| kernel.ptx == ptx) {
        return;
    }
    let text = print(&kernel);
    let cubin = match ptxas::cubin(&text, arch) {
        Ok(bytes) => {
            let file = ptx.replace(".ptx", ".cubin");
            files.push((file.clone(), bytes));
            Some(file)
        }
        Err(error) => {
            left_out.push(format!("{name}: no cubin: {error}"));
            None
        }
    };
    files.push((ptx.clone(), text.into_bytes()));
    let problem = flashcore_bench::lab::record::ProblemKey::of(problem);
    kernels.push(KernelEntry { config: config.to_string(), problem, arch: arch.to_string(), ptx, cubin });
}

/// This machine.
fn machine(gpu: Option<&Gpu>) -> Machine {
    if let Some(context) = gpu.and_then(|gpu| gpu.device().context()) {
        return Machine::gpu(context.device(), None);
    }
    let level = flashcore_cpu::Level::default_level();
    let level = level.map_or_else(|_| "unknown".to_owned(), |level| level.to_string());
    Machine::cpu(&level, flashcore_bench::lab::peak::working_threads(), None)
}
