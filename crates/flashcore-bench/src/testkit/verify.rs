//! Runs cases and judges them.

use std::any::Any;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::time::{Duration, Instant};

use flashcore_cpu::Level;
use flashcore_ir::Arch;
use flashcore_kernels::{Accuracy, Config, LaunchPlan, Reason, Target, heuristics, reference_error};
use flashcore_problem::{
    Evidence, Expected, Inputs, Invalid, Layout, Outputs, Problem, ReferenceError, Verdict, judge, oracle,
};
use flashcore_sim::{Counters, SimError};

use crate::testkit::gpu::Gpu;
use crate::testkit::guard_pages::{Edge, GuardedInputs, GuardedOutputs};
use crate::testkit::kv_cache::KvCacheTrial;
use crate::testkit::memory::{Impossible, require_judging};
use crate::testkit::simulate::{FarApart, Simulation, simulate, simulate_far};
use crate::testkit::suites::huge;
use crate::testkit::wrong_arrays::{Arrays, RowFate, WrongAttention, refused, take_outputs};
use crate::testkit::{Backend, Case};

/// The architecture that kernels are verified for before they are simulated: the one with most shared memory.
pub(crate) const SIMULATED_ARCH: Arch = Arch::Sm90a;
/// The GPU whose default configs are simulated.
pub(crate) const H200: Target = Target::new(SIMULATED_ARCH, 132);
/// Persistent CTAs: few, so that each takes several tiles.
pub(crate) const SIMULATED_CTAS: u32 = 3;
pub(crate) const SIMULATED: Target = Target::new(SIMULATED_ARCH, SIMULATED_CTAS);

/// Result of a case.
#[derive(Debug)]
pub struct Outcome {
    /// The verdict, or why there is none.
    pub verdict: Result<Verdict, NoVerdict>,
    /// The simulator's counters of the first run, where it was simulated.
    pub counters: Option<Counters>,
    /// Values of new rows beyond the largest number of an FP8 cache, whose codes are the largest instead.
    pub saturated: usize,
    /// Time of the backend, all runs together, and in parallel with other cases where there were any.
    pub duration: Duration,
}

impl Outcome {
    /// True if there is a verdict and it is good.
    pub fn passed(&self) -> bool {
        self.verdict.as_ref().is_ok_and(Verdict::passed)
    }

    /// Complaints, one line each; none if it passed.
    pub fn complaints(&self) -> Vec<String> {
        match &self.verdict {
            Ok(verdict) => verdict.failures.iter().map(ToString::to_string).collect(),
            Err(no_verdict) => no_verdict.to_string().lines().map(str::to_owned).collect(),
        }
    }
}

/// Reason why a run could not be judged.
#[derive(Debug, thiserror::Error)]
pub enum NoVerdict {
    /// The problem is impossible, or larger than the memory.
    #[error("{0}")]
    Impossible(#[from] Impossible),
    /// The problem is impossible, or the inputs do not belong to it.
    #[error("{0}")]
    Invalid(#[from] Invalid),
    /// The kernel cannot run the problem.
    #[error("{}", lines(.0))]
    Refused(Vec<Reason>),
    /// The simulator stopped: the kernel is at fault, or, and then it says so, the simulator is.
    #[error("{0}")]
    Simulator(#[from] SimError),
    /// There is no such plan on the GPU.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    RefusedByGpu(flashcore::Unsupported),
    /// The GPU, or the way there, failed.
    #[error("{0}")]
    Gpu(#[from] flashcore::Error),
    /// The CPU backend refused.
    #[error("{0}")]
    Cpu(#[from] flashcore_cpu::CpuError),
    /// The append to a KV cache, before attention, is wrong.
    #[error("{0}")]
    Append(String),
    /// Something was written that no sequence has.
    #[error("{0} was written")]
    Written(String),
    /// The CPU backend took what it must refuse.
    #[error("the backend took arrays that it must refuse")]
    Taken,
    /// The CPU backend panicked.
    #[error("the backend panicked: {0}")]
    Panicked(String),
    /// The operating system gave no guarded memory.
    #[error("no memory between guard pages: {0}; fewer cases at once need less of it (RAYON_NUM_THREADS=1)")]
    GuardPages(#[from] io::Error),
}

fn lines(reasons: &[Reason]) -> String {
    reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

/// Yardstick of a run: computed once, used for every backend.
#[derive(Debug)]
pub struct Yardstick {
    inputs: Inputs,
    expected: Expected,
    reference: ReferenceError,
}

impl Yardstick {
    /// The yardstick of a case, on its own inputs, if the machine has the memory.
    pub fn of(case: &Case) -> Result<Self, NoVerdict> {
        require_judging(&case.problem, case.repeats)?;
        Ok(Self::new(&case.problem, case.inputs())?)
    }

    /// The oracle's answer, and how far a careful implementation of the same precision is from it.
    pub fn new(problem: &Problem, inputs: Inputs) -> Result<Self, Invalid> {
        let expected = oracle(problem, &inputs)?;
        let reference = ReferenceError::measure(problem, &inputs, &expected)?;
        Ok(Self { inputs, expected, reference })
    }

    /// Judges the results of a run.
    pub fn judge(&self, problem: &Problem, evidence: &Evidence<'_>) -> Verdict {
        judge(problem, &self.expected, &self.reference, evidence)
    }

    /// Judges the results of a GPU kernel, by the accuracy of its config.
    pub fn judge_kernel(
        &self,
        problem: &Problem,
        config: Option<Config>,
        evidence: &Evidence<'_>,
    ) -> Result<Verdict, Invalid> {
        match config.filter(|config| config.accuracy() == Accuracy::Tf32) {
            None => Ok(self.judge(problem, evidence)),
            Some(config) => {
                let reference = reference_error(config, problem, &self.inputs, &self.expected)?;
                Ok(judge(problem, &self.expected, &reference, evidence))
            }
        }
    }

    /// The inputs it belongs to.
    pub const fn inputs(&self) -> &Inputs {
        &self.inputs
    }
}

/// Runs and judges one case; `gpu` is needed for those of the GPU.
pub fn verify(case: &Case, gpu: Option<&Gpu>) -> Outcome {
    let start = Instant::now();
    if let Some(problem) = &case.kv_cache {
        let trial = KvCacheTrial::new(case, problem);
        let saturated = trial.as_ref().map_or(0, KvCacheTrial::saturated);
        let verdict = trial.and_then(|trial| trial.verify(case, gpu));
        return Outcome { verdict, counters: None, saturated, duration: start.elapsed() };
    }
    if let (Backend::Sim(config), Some(far)) = (case.backend, huge::far_apart(case)) {
        let near = case.problem.clone().with_layout(Layout::Bhsd);
        let mut counters = None;
        let verdict = verify_far(config, &near, &far, case.seed, case.repeats as u64, &mut counters);
        return Outcome { verdict, counters, saturated: 0, duration: start.elapsed() };
    }
    match Yardstick::of(case) {
        Ok(yardstick) => verify_with(case, &yardstick, gpu),
        Err(reason) => Outcome { verdict: Err(reason), counters: None, saturated: 0, duration: start.elapsed() },
    }
}

/// Runs and judges one case of the CPU at every one of `levels`, with one yardstick for all.
pub fn verify_at_levels(case: &Case, levels: &[Level]) -> Vec<(Case, Outcome)> {
    let cases = levels.iter().map(|&level| Case { backend: Backend::Cpu(level), ..case.clone() });
    if case.kv_cache.is_some() {
        return cases.map(|case| (case.clone(), verify(&case, None))).collect();
    }
    match Yardstick::of(case) {
        Ok(yardstick) => cases.map(|case| (case.clone(), verify_with(&case, &yardstick, None))).collect(),
        Err(_) => cases.map(|case| (case.clone(), verify(&case, None))).collect(),
    }
}

/// Runs and judges one case whose yardstick is known.
pub fn verify_with(case: &Case, yardstick: &Yardstick, gpu: Option<&Gpu>) -> Outcome {
    let start = Instant::now();
    let mut counters = None;
    let verdict = match case.backend {
        // What has no element is not launched, and comes out as it went in.
        Backend::Sim(_) | Backend::Cuda(_) if case.problem.output_shape().is_empty() => {
            let outputs = Outputs::poisoned(&case.problem);
            Ok(yardstick.judge(&case.problem, &Evidence::new(yardstick.inputs(), &outputs)))
        }
        Backend::Cpu(level) => match case.arrays {
            Arrays::Wrong(number) => refused_by_cpu(case, level, yardstick, number),
            Arrays::Right | Arrays::Crowded => verify_cpu(case, level, yardstick),
        },
        Backend::Sim(config) => {
            LaunchPlan::new(&case.problem, config, SIMULATED).map_err(NoVerdict::Refused).and_then(|plan| {
                let (problem, repeats) = (&case.problem, case.repeats as u64);
                match case.arrays {
                    Arrays::Wrong(number) => {
                        WrongAttention::new(problem, yardstick, number).verify(&plan, case.seed, repeats)
                    }
                    _ => verify_plan(&plan, problem, yardstick, case.seed, repeats, &mut counters),
                }
            })
        }
        Backend::Cuda(config) => match gpu {
            Some(gpu) => gpu.verify(&case.problem, Some(config), yardstick, case.repeats),
            None => Gpu::open(0)
                .map_err(NoVerdict::Gpu)
                .and_then(|gpu| gpu.verify(&case.problem, Some(config), yardstick, case.repeats)),
        },
    };
    Outcome { verdict, counters, saturated: 0, duration: start.elapsed() }
}

/// The outputs of a GPU kernel in the simulator, and its config: the default of an H200 unless one is given.
pub fn attend_in_simulator(
    problem: &Problem,
    config: Option<Config>,
    inputs: &Inputs,
) -> Result<(Config, Outputs), NoVerdict> {
    inputs.validate(problem)?;
    let config = config.unwrap_or_else(|| heuristics::select(problem, H200));
    let Some(plan) = launch_plan(problem, config, H200).map_err(NoVerdict::Refused)? else {
        return Ok((config, Outputs::poisoned(problem)));
    };
    Ok((config, simulate(&plan, problem, inputs, 0)?.outputs))
}

/// The kernels of a config for a problem, or every reason against it. None for an empty problem, which a plan of the library
/// takes too, with a config that takes all else of it.
pub(crate) fn launch_plan(
    problem: &Problem,
    config: Config,
    target: impl Into<Target>,
) -> Result<Option<LaunchPlan>, Vec<Reason>> {
    LaunchPlan::new(problem, config, target).map(Some).or_else(|mut reasons| {
        reasons.retain(|reason| *reason != Reason::Empty);
        if reasons.is_empty() { Ok(None) } else { Err(reasons) }
    })
}

/// Simulates a plan and judges what it computed. Each repeat runs the warps in another order.
pub fn verify_plan(
    plan: &LaunchPlan,
    problem: &Problem,
    yardstick: &Yardstick,
    seed: u64,
    repeats: u64,
    counters: &mut Option<Counters>,
) -> Result<Verdict, NoVerdict> {
    verify_runs((problem, plan.config), yardstick, seed, repeats, counters, |seed| {
        simulate(plan, problem, &yardstick.inputs, seed)
    })
}

/// Simulates a config on random inputs that lie far apart, and judges what it computed as if they lay as in `problem`.
pub fn verify_far(
    config: Config,
    problem: &Problem,
    far: &FarApart,
    seed: u64,
    repeats: u64,
    counters: &mut Option<Counters>,
) -> Result<Verdict, NoVerdict> {
    let yardstick = Yardstick::new(problem, Inputs::random(problem, seed))?;
    let plan = plan_far(config, problem, far, SIMULATED_ARCH).map_err(NoVerdict::Refused)?;
    verify_plan_far(&plan, far, problem, &yardstick, seed, repeats, counters)
}

/// The plan for tensors that lie far apart, with CTAs for those rows alone that `problem` has.
pub(crate) fn plan_far(
    config: Config,
    problem: &Problem,
    far: &FarApart,
    arch: Arch,
) -> Result<LaunchPlan, Vec<Reason>> {
    if far.problem.query_length == problem.query_length {
        return LaunchPlan::new(&far.problem, config, Target::new(arch, SIMULATED_CTAS));
    }
    Ok(LaunchPlan::new(&far.problem, config, arch)?.with_grids_of(&LaunchPlan::new(problem, config, arch)?))
}

/// Simulates such a plan and judges what it computed.
pub(crate) fn verify_plan_far(
    plan: &LaunchPlan,
    far: &FarApart,
    problem: &Problem,
    yardstick: &Yardstick,
    seed: u64,
    repeats: u64,
    counters: &mut Option<Counters>,
) -> Result<Verdict, NoVerdict> {
    let inputs = &yardstick.inputs;
    verify_runs((problem, plan.config), yardstick, seed, repeats, counters, |seed| {
        simulate_far(plan, far, problem, inputs, seed)
    })
}

fn verify_runs(
    (problem, config): (&Problem, Option<Config>),
    yardstick: &Yardstick,
    seed: u64,
    repeats: u64,
    counters: &mut Option<Counters>,
    run: impl Fn(u64) -> Result<Simulation, SimError>,
) -> Result<Verdict, NoVerdict> {
    let Simulation { outputs, inputs_after, counters: counted, .. } = run(seed)?;
    *counters = Some(counted);
    let repeated: Vec<Outputs> = (1..=repeats)
        .map(|repeat| run(seed.wrapping_add(repeat)).map(|simulation| simulation.outputs))
        .collect::<Result<_, _>>()?;
    let evidence = Evidence {
        inputs: &yardstick.inputs,
        inputs_after: &inputs_after,
        outputs: &outputs,
        repeats: &repeated,
        guards: &[],
    };
    Ok(yardstick.judge_kernel(problem, config, &evidence)?)
}

/// Runs in guarded memory. Where the first run ends at an inaccessible page the second begins after one, and so on; half
/// of all cases begin with either.
fn verify_cpu(case: &Case, level: Level, yardstick: &Yardstick) -> Result<Verdict, NoVerdict> {
    let name: Arc<str> = format!("{case}\n  repeat: {}", case.command()).into();
    let mut edge = if case.seed.is_multiple_of(2) { Edge::End } else { Edge::Start };
    let mut run = || -> Result<Outputs, NoVerdict> {
        let inputs = GuardedInputs::new(&yardstick.inputs, edge, &name)?;
        let mut outputs = GuardedOutputs::poisoned(&case.problem, edge, &name)?;
        edge = edge.other();
        // Nothing that a panic left half done is looked at.
        let attend = || flashcore_cpu::attend_with(level, &case.problem, inputs.views(), outputs.views_mut());
        panic::catch_unwind(AssertUnwindSafe(attend)).map_err(|payload| NoVerdict::Panicked(words(&*payload)))??;
        Ok(outputs.to_outputs())
    };
    let outputs = run()?;
    let repeats: Vec<Outputs> = (0..case.repeats).map(|_| run()).collect::<Result<_, _>>()?;
    // Inputs cannot have changed: their pages are read-only.
    let evidence = Evidence { repeats: &repeats, ..Evidence::new(&yardstick.inputs, &outputs) };
    Ok(yardstick.judge(&case.problem, &evidence))
}

/// Holds the CPU to refuse arrays by number, between guard pages, with nothing written.
fn refused_by_cpu(case: &Case, level: Level, yardstick: &Yardstick, number: u64) -> Result<Verdict, NoVerdict> {
    let name: Arc<str> = format!("{case}\n  repeat: {}", case.command()).into();
    let wrong = WrongAttention::new(&case.problem, yardstick, number);
    for edge in [Edge::End, Edge::Start] {
        let inputs = GuardedInputs::new(wrong.arrays(), edge, &name)?;
        let mut outputs = GuardedOutputs::poisoned(&case.problem, edge, &name)?;
        let attend = || flashcore_cpu::attend_with(level, &case.problem, inputs.views(), outputs.views_mut());
        let attended = panic::catch_unwind(AssertUnwindSafe(attend));
        if attended.map_err(|payload| NoVerdict::Panicked(words(&*payload)))?.is_ok() {
            return Err(NoVerdict::Taken);
        }
        // With no row of any sequence, every row must be as it was.
        let (outputs, rows) = (outputs.to_outputs(), case.problem.output_shape());
        take_outputs(&case.problem, &vec![RowFate::Untouched; rows.batch * rows.rows], [&outputs; 2])?;
    }
    Ok(refused())
}

/// Message of a panic.
fn words(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("without words").to_owned()
}
