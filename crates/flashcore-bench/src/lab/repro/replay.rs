//! Replay of a bundle: everything is run again and compared.

use std::time::Duration;

use flashcore_cpu::Level;
use flashcore_ir::Arch;
use flashcore_kernels::{Config, LaunchPlan};
use flashcore_problem::{Inputs, Outputs, Problem, Tensor};
use flashcore_ptx::print;

use super::bundle::Files;
use super::cases::{Computed, compute, inputs_sha256};
use super::manifest::{CaseEntry, Manifest};
use crate::lab::record::Machine;
use crate::lab::svg::short;
use crate::testkit::gpu::Gpu;
use crate::testkit::memory::require_tensors;
use crate::testkit::sample::judge_worst;
use crate::timing::Times;
use crate::util::digest::sha256;

/// Agreement of a result here with the bundle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Agreement {
    /// It is.
    Yes,
    /// It is not.
    No,
    /// This machine cannot tell.
    Unknown,
}

impl Agreement {
    /// Name of the agreement.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Yes => "agrees",
            Self::No => "DISAGREES",
            Self::Unknown => "not here",
        }
    }
}

/// One thing that was done again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replayed {
    /// Subject of the row.
    pub what: String,
    /// The agreement.
    pub agreement: Agreement,
    /// The result here.
    pub found: String,
    /// True of a time, which differs between runs; what was computed does not.
    pub is_time: bool,
}

impl Replayed {
    fn new(what: impl Into<String>, agreement: Agreement, found: impl Into<String>) -> Self {
        Self { what: what.into(), agreement, found: found.into(), is_time: false }
    }

    fn of_time(what: impl Into<String>, agreement: Agreement, found: impl Into<String>) -> Self {
        Self { is_time: true, ..Self::new(what, agreement, found) }
    }
}

/// Times of different runs on the same machine may differ by this factor, either way.
const TIME_FACTOR: f64 = 1.5;

/// Generates the inputs of each case again, judges the output in the bundle, and computes it again, while `go_on` says so;
/// `found` gets what comes of it.
pub fn replay_cases(
    manifest: &Manifest,
    files: &Files,
    gpu: Option<&Gpu>,
    mut go_on: impl FnMut(usize, &CaseEntry) -> bool,
    mut found: impl FnMut(Replayed),
) {
    for (index, case) in manifest.cases.iter().enumerate() {
        if !go_on(index, case) {
            break;
        }
        let name = format!("{} {}", case.kernel, case.problem);
        let problem = match case.problem.workload() {
            Ok(problem) => problem,
            Err(error) => {
                found(Replayed::new(name, Agreement::No, error.to_string()));
                continue;
            }
        };
        // What is no problem at all is not in a manifest that was read.
        if let Err(error) = require_tensors(&problem) {
            found(Replayed::new(name, Agreement::Unknown, error.to_string()));
            continue;
        }
        let inputs = problem.inputs(case.seed);
        let agreement = if inputs_sha256(&inputs) == case.inputs_sha256 { Agreement::Yes } else { Agreement::No };
        found(Replayed::new(format!("inputs of {name}"), agreement, format!("from seed {}", case.seed)));
        if let Some(file) = &case.output_file {
            found(judge_bundled(&name, case, file, files, &problem, &inputs));
        }
        found(compute_again(&name, case, &problem, &inputs, gpu));
    }
}

/// The output that was computed there, judged by the gates here.
fn judge_bundled(
    name: &str,
    case: &CaseEntry,
    file: &str,
    files: &Files,
    problem: &Problem,
    inputs: &Inputs,
) -> Replayed {
    let what = format!("bundled output of {name}");
    let Some((_, data)) = files.iter().find(|(path, _)| path == file) else {
        return Replayed::new(what, Agreement::No, format!("{file} is not in the bundle"));
    };
    if sha256(data) != case.output_sha256 {
        return Replayed::new(what, Agreement::No, "it is not the output that was hashed");
    }
    let expected =
        problem.strides().output.extent(problem.output_shape()).unwrap_or(0) * problem.dtypes().output.size_bytes();
    if data.len() != expected {
        return Replayed::new(what, Agreement::No, format!("it has {} bytes, and should have {expected}", data.len()));
    }
    let output = Tensor { dtype: problem.dtypes().output, data: data.clone() };
    judged(what, problem, inputs, &Outputs { output, ..Outputs::default() }, "judged right here")
}

fn judged(what: String, problem: &Problem, inputs: &Inputs, outputs: &Outputs, praise: &str) -> Replayed {
    match judge_worst(problem, None, inputs, outputs) {
        Ok(verdict) if verdict.passed() => {
            Replayed::new(what, Agreement::Yes, format!("{praise}, max error {:.1e}", verdict.max_error))
        }
        Ok(verdict) => Replayed::new(what, Agreement::No, verdict.to_string()),
        Err(error) => Replayed::new(what, Agreement::No, error.to_string()),
    }
}

fn compute_again(name: &str, case: &CaseEntry, problem: &Problem, inputs: &Inputs, gpu: Option<&Gpu>) -> Replayed {
    let what = format!("output of {name}");
    match compute(case, problem, inputs, gpu) {
        Ok(Computed::Same(outputs)) if sha256(&outputs.output.data) == case.output_sha256 => {
            Replayed::new(what, Agreement::Yes, "the same bits")
        }
        Ok(Computed::Same(outputs)) => judged(what, problem, inputs, &outputs, "other bits, right by the gates"),
        Ok(Computed::Simulated(outputs)) => {
            judged(what, problem, inputs, &outputs, "right by the gates in the simulator")
        }
        Ok(Computed::Not(reason)) => Replayed::new(what, Agreement::Unknown, reason),
        Err(error) => Replayed::new(what, Agreement::No, error.to_string()),
    }
}

/// Generates the kernels again, and holds their PTX against that of the bundle. Another build may well write another text.
pub fn replay_kernels(manifest: &Manifest, files: &Files, is_same_build: bool) -> Vec<Replayed> {
    let again = |config: &str, problem: &Problem, arch: &str| -> Result<String, String> {
        let config: Config = config.parse().map_err(|_| format!("this program has no kernel {config}"))?;
        let arch: Arch = arch.parse().map_err(|_| format!("this program knows no {arch}"))?;
        let plan = LaunchPlan::new(problem, config, arch);
        let reasons = |reasons: Vec<flashcore_kernels::Reason>| {
            reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
        };
        Ok(print(&plan.map_err(reasons)?.attention().kernel()))
    };
    manifest
        .kernels
        .iter()
        .map(|kernel| {
            let what = format!("PTX of {} for {} on {}", kernel.config, kernel.problem, kernel.arch);
            let bundled = files.iter().find(|(path, _)| *path == kernel.ptx).map(|(_, contents)| contents);
            let generated = kernel.problem.problem().map_err(|error| error.to_string());
            let generated = generated.and_then(|problem| again(&kernel.config, &problem, &kernel.arch));
            match (bundled, generated) {
                (None, _) => Replayed::new(what, Agreement::No, "it is not in the bundle"),
                (_, Err(reason)) => Replayed::new(what, Agreement::Unknown, reason),
                (Some(bundled), Ok(generated)) if *bundled == generated.as_bytes() => {
                    Replayed::new(what, Agreement::Yes, "generated again, the same text")
                }
                (Some(_), Ok(_)) if is_same_build => {
                    Replayed::new(what, Agreement::No, "this program generates another text")
                }
                (Some(_), Ok(_)) => {
                    Replayed::new(what, Agreement::Unknown, "this program, of another commit, generates another text")
                }
            }
        })
        .collect()
}

/// Times the cases again, where the machine is like the one of the bundle, while `go_on` says so; `found` gets what comes of
/// it.
pub fn replay_times(
    manifest: &Manifest,
    machine: &Machine,
    here: &Machine,
    gpu: Option<&Gpu>,
    budget: Duration,
    go_on: impl Fn() -> bool,
    mut found: impl FnMut(Replayed),
) {
    for case in manifest.cases.iter().take_while(|_| go_on()) {
        let what = format!("time of {} {}", case.kernel, case.problem);
        let Ok(problem) = case.problem.workload() else { continue };
        if require_tensors(&problem).is_err() {
            continue;
        }
        let inputs = problem.inputs(case.seed);
        let seconds = match (case.backend.as_str(), gpu) {
            ("cpu", _) => {
                case.kernel.parse::<Level>().ok().filter(|level| Level::available().contains(level)).and_then(|level| {
                    let mut outputs = Outputs::poisoned(&problem);
                    let attend = || flashcore_cpu::attend_with(level, &problem, &inputs, &mut outputs);
                    Times::measure(budget, 5, attend).ok().map(|times| times.quantile(0.5))
                })
            }
            (_, Some(gpu)) => {
                let timed = gpu.time(&problem, case.kernel.parse().ok(), &inputs);
                timed.ok().and_then(Result::ok).map(|times| times.hot.quantile(0.5))
            }
            _ => None,
        };
        let Some(seconds) = seconds else {
            found(Replayed::of_time(what, Agreement::Unknown, format!("it ran on {}", machine.words())));
            continue;
        };
        let ratio = seconds / case.median_seconds;
        let times = format!("{} us then, {} us now", short(case.median_seconds * 1e6), short(seconds * 1e6));
        let agreement = if !machine.is_like(here) {
            Agreement::Unknown
        } else if (1.0 / TIME_FACTOR..=TIME_FACTOR).contains(&ratio) {
            Agreement::Yes
        } else {
            Agreement::No
        };
        let elsewhere = if agreement == Agreement::Unknown {
            format!(", on another machine: {}", machine.words())
        } else {
            String::new()
        };
        found(Replayed::of_time(what, agreement, format!("{times}{elsewhere}")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::record::ProblemKey;
    use serde_json::Value;

    fn bundle() -> (Manifest, Files) {
        let problem = Problem::new(1, 2, 40, 16, flashcore_problem::DType::F32);
        let (inputs, mut outputs) = (Inputs::random(&problem, 5), Outputs::poisoned(&problem));
        flashcore_cpu::attend_with(Level::Portable, &problem, &inputs, &mut outputs).expect("every machine has it");
        let case = CaseEntry {
            backend: "cpu".to_owned(),
            kernel: "portable".to_owned(),
            problem: ProblemKey::of(&problem),
            seed: 5,
            inputs_sha256: inputs_sha256(&inputs),
            output_sha256: sha256(&outputs.output.data),
            output_file: Some("outputs/0.bin".to_owned()),
            median_seconds: 1.0,
        };
        let manifest = Manifest {
            commands: vec![],
            left_out: vec![],
            environment: Value::Null,
            cases: vec![case],
            kernels: vec![],
            files: vec![],
        };
        (manifest, vec![("outputs/0.bin".to_owned(), outputs.output.data)])
    }

    fn cases(manifest: &Manifest, files: &Files) -> Vec<Replayed> {
        let mut replayed = Vec::new();
        replay_cases(manifest, files, None, |_, _| true, |found| replayed.push(found));
        replayed
    }

    fn agreements(manifest: &Manifest, files: &Files) -> Vec<Agreement> {
        cases(manifest, files).into_iter().map(|replayed| replayed.agreement).collect()
    }

    #[test]
    fn what_was_computed_is_computed_again() {
        use Agreement::{No, Unknown, Yes};
        let (manifest, files) = bundle();
        assert_eq!(agreements(&manifest, &files), [Yes, Yes, Yes]);
        let mut other = manifest.clone();
        other.cases[0].seed = 6;
        assert_eq!(agreements(&other, &files), [No, No, Yes]);
        let mut wrong = files.clone();
        wrong[0].1[3] ^= 0x40;
        assert_eq!(agreements(&manifest, &wrong), [Yes, No, Yes]);
        // Other bits that are right: another level, or a GPU that is not here.
        let mut bits = manifest.clone();
        (bits.cases[0].output_sha256, bits.cases[0].output_file) = (String::new(), None);
        assert_eq!(agreements(&bits, &files), [Yes, Yes]);
        let mut gpu = manifest;
        (gpu.cases[0].backend, gpu.cases[0].kernel) = ("cuda".to_owned(), "scalar".to_owned());
        assert_eq!(agreements(&gpu, &files), [Yes, Yes, Yes]);
        gpu.cases[0].kernel = "of a later day".to_owned();
        assert_eq!(agreements(&gpu, &files), [Yes, Yes, Unknown]);
    }

    #[test]
    fn what_does_not_fit_the_memory_is_not_computed() {
        let (mut manifest, files) = bundle();
        manifest.cases[0].problem.shape = "1x1x1000000000,1x65536".to_owned();
        let replayed = cases(&manifest, &files);
        let said = "batch 1 heads 1/1 queries 1000000000 keys 1 dims 65536/65536 f32 unmasked would take at least 1048576001048576 bytes of memory (953.7 TiB), and ";
        assert_eq!(replayed.len(), 1);
        assert_eq!((replayed[0].agreement, &replayed[0].found[..said.len()]), (Agreement::Unknown, said));
        let machine = Machine::cpu("portable", 1, None);
        let mut times = Vec::new();
        replay_times(&manifest, &machine, &machine, None, Duration::ZERO, || true, |found| times.push(found));
        assert_eq!(times, []);
    }
}
