//! Runs cases and judges them.

use std::time::{Duration, Instant};

use flashcore_ir::Arch;
use flashcore_kernels::{Plan, Reason};
use flashcore_problem::{
    Evidence, Expected, Inputs, Invalid, Outputs, Problem, ReferenceError, Verdict, judge, oracle,
};
use flashcore_sim::{Counters, SimError};

use crate::case::{Backend, Case};
use crate::gpu::Gpu;
use crate::simulate::{Simulation, simulate};

/// The architecture that kernels are verified for before they are simulated: the least of all.
const SIMULATED_ARCH: Arch = Arch::Sm80;

/// What came of a case.
#[derive(Debug)]
pub struct Outcome {
    /// The verdict, or why there is none.
    pub verdict: Result<Verdict, NoVerdict>,
    /// The simulator's counters of the first run, where it was simulated.
    pub counters: Option<Counters>,
    /// How long the backend took, all runs together.
    pub duration: Duration,
}

impl Outcome {
    /// Whether there is a verdict and it is good.
    pub fn passed(&self) -> bool {
        self.verdict.as_ref().is_ok_and(Verdict::passed)
    }

    /// What is wrong, one line each; nothing when it passed.
    pub fn complaints(&self) -> Vec<String> {
        match &self.verdict {
            Ok(verdict) => verdict.failures.iter().map(ToString::to_string).collect(),
            Err(no_verdict) => no_verdict.to_string().lines().map(str::to_owned).collect(),
        }
    }
}

/// Why a run could not be judged.
#[derive(Debug, thiserror::Error)]
pub enum NoVerdict {
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
    RefusedByGpu(Vec<flashcore::Reason>),
    /// The GPU, or the way there, failed.
    #[error("{0}")]
    Gpu(#[from] flashcore::Error),
    /// The CPU backend refused.
    #[error("{0}")]
    Cpu(#[from] flashcore_cpu::CpuError),
}

fn lines(reasons: &[Reason]) -> String {
    reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

/// What a run is judged by: computed once, used for every backend.
#[derive(Debug)]
pub struct Yardstick {
    inputs: Inputs,
    expected: Expected,
    reference: ReferenceError,
}

impl Yardstick {
    /// The oracle's answer, and how far a careful implementation of the same precision is from it.
    pub fn new(problem: &Problem, inputs: Inputs) -> Result<Self, Invalid> {
        let expected = oracle(problem, &inputs)?;
        let reference = ReferenceError::measure(problem, &inputs, &expected)?;
        Ok(Self { inputs, expected, reference })
    }

    /// Judges what a run left behind.
    pub fn judge(&self, problem: &Problem, evidence: &Evidence<'_>) -> Verdict {
        judge(problem, &self.expected, &self.reference, evidence)
    }

    /// The inputs it belongs to.
    pub const fn inputs(&self) -> &Inputs {
        &self.inputs
    }
}

/// Runs and judges one case; `gpu` is needed for those of the GPU.
pub fn verify(case: &Case, gpu: Option<&Gpu>) -> Outcome {
    let start = Instant::now();
    match Yardstick::new(&case.problem, case.inputs()) {
        Ok(yardstick) => verify_with(case, &yardstick, gpu),
        Err(invalid) => Outcome { verdict: Err(invalid.into()), counters: None, duration: start.elapsed() },
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
        Backend::Cpu => verify_cpu(&case.problem, yardstick, case.repeats),
        Backend::Sim(config) => {
            Plan::new(&case.problem, config, SIMULATED_ARCH).map_err(NoVerdict::Refused).and_then(|plan| {
                verify_plan(&plan, &case.problem, yardstick, case.seed, case.repeats as u64, &mut counters)
            })
        }
        Backend::Cuda(config) => match gpu {
            Some(gpu) => gpu.verify(&case.problem, Some(config), yardstick, case.repeats),
            None => Gpu::open(0)
                .map_err(NoVerdict::Gpu)
                .and_then(|gpu| gpu.verify(&case.problem, Some(config), yardstick, case.repeats)),
        },
    };
    Outcome { verdict, counters, duration: start.elapsed() }
}

/// Simulates a plan and judges what it computed. Each repeat runs the warps in another order.
pub fn verify_plan(
    plan: &Plan,
    problem: &Problem,
    yardstick: &Yardstick,
    seed: u64,
    repeats: u64,
    counters: &mut Option<Counters>,
) -> Result<Verdict, NoVerdict> {
    let Simulation { outputs, inputs_after, counters: counted } = simulate(plan, problem, &yardstick.inputs, seed)?;
    *counters = Some(counted);
    let repeated: Vec<Outputs> = (1..=repeats)
        .map(|repeat| simulate(plan, problem, &yardstick.inputs, seed + repeat).map(|simulation| simulation.outputs))
        .collect::<Result<_, _>>()?;
    let evidence = Evidence {
        inputs: &yardstick.inputs,
        inputs_after: &inputs_after,
        outputs: &outputs,
        repeats: &repeated,
        guards: &[],
    };
    Ok(yardstick.judge(problem, &evidence))
}

fn verify_cpu(problem: &Problem, yardstick: &Yardstick, repeats: usize) -> Result<Verdict, NoVerdict> {
    let run = || {
        let mut outputs = Outputs::poisoned(problem);
        flashcore_cpu::attend(problem, &yardstick.inputs, &mut outputs).map(|()| outputs)
    };
    let outputs = run()?;
    let repeats: Vec<Outputs> = (0..repeats).map(|_| run()).collect::<Result<_, _>>()?;
    let evidence = Evidence { repeats: &repeats, ..Evidence::new(&yardstick.inputs, &outputs) };
    Ok(yardstick.judge(problem, &evidence))
}
