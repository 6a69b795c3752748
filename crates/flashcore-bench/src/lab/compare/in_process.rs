//! Subjects that this program runs itself.

use std::time::{Duration, Instant};

use flashcore_cpu::Level;
use flashcore_problem::{DType, Inputs, Outputs, Problem};

use super::comparison::ComparedRow;
use super::rounds::{Arm, Options, Progress, rounds};
use super::statistics::Round;
use super::subject::Subject;
use super::worker::CompareError;
use crate::floor::{Ceilings, Work};
use crate::lab::peak::Peak;
use crate::lab::record::{Measurement, ProblemKey, Verified};
use crate::testkit::Workload;
use crate::testkit::gpu::{Gpu, GpuArm};
use crate::testkit::sample::judge_worst;
use crate::timing::Times;
use crate::util::digest::sha256;

/// A run is repeated until it takes as long as this, so that the clock and waking threads count little.
const SHORTEST_SLOT: Duration = Duration::from_millis(1);
/// Error of the measured peak of a processor: other work on the machine makes it smaller than it is.
const CPU_SLACK: f64 = 0.15;

/// Relative error of the ceilings of a subject.
pub const fn slack(subject: Subject) -> f64 {
    match subject {
        Subject::Cpu(_) => CPU_SLACK,
        Subject::Cuda(_) => 0.0,
    }
}

/// Measures the peak rates of a subject's machine, for problems of one kind.
pub fn measure_ceilings(subject: Subject, problem: &Problem, gpu: Option<&Gpu>) -> Result<Ceilings, CompareError> {
    match subject {
        Subject::Cpu(level) => {
            let level = level.map_or_else(Level::default_level, Ok)?;
            Ok(Peak::of_cpu(level, multiplied_type(problem)).ceilings())
        }
        Subject::Cuda(_) => {
            let ceilings = gpu.ok_or(CompareError::NoGpu)?.ceilings()?;
            // Warm times: inputs may come from the cache.
            Ok(Ceilings { bytes: f64::INFINITY, ..ceilings }.of_types(problem.dtypes()))
        }
    }
}

/// The type in which a processor multiplies a problem: 8-bit numbers become `f32`, and so does what they meet.
fn multiplied_type(problem: &Problem) -> DType {
    let types = problem.dtypes();
    if types.are_same() { types.query } else { DType::F32 }
}

/// A measurement without its times.
fn measurement(workload: &Workload, kernel: String, seed: u64, verified: Verified, ceilings: &Ceilings) -> Measurement {
    let work = Work::of(workload);
    let (floor_seconds, bound) = ceilings.floor(work);
    Measurement {
        kernel,
        problem: ProblemKey::of_workload(workload),
        seed,
        verified,
        output_sha256: None,
        work,
        floor_seconds,
        bound,
        hot_seconds: Vec::new(),
        cold_seconds: Vec::new(),
        launch_seconds: None,
        other_cpus: None,
        samples_sha256: String::new(),
    }
}

/// The tensors of a problem, which all arms of a comparison share: where tensors lie makes tiny problems faster or slower
/// by several percent, which would be found and called an effect.
pub(super) struct CpuTensors {
    workload: Workload,
    inputs: Inputs,
    outputs: Outputs,
}

impl CpuTensors {
    pub(super) fn new(workload: &Workload, seed: u64) -> Self {
        let (inputs, outputs) = (workload.inputs(seed), Outputs::poisoned(workload));
        Self { workload: workload.clone(), inputs, outputs }
    }
}

/// A CPU level on a problem.
#[derive(Debug, Clone, Copy)]
pub(super) struct CpuArm {
    level: Level,
    repetitions: usize,
    slower: f64,
}

impl CpuArm {
    pub(super) fn new(level: Option<Level>, tensors: &mut CpuTensors, slower: f64) -> Result<Self, CompareError> {
        let level = level.map_or_else(Level::default_level, Ok)?;
        let mut arm = Self { level, repetitions: 1, slower };
        arm.seconds(tensors)?;
        let once = arm.seconds(tensors)?;
        arm.repetitions = (SHORTEST_SLOT.as_secs_f64() / once).ceil().clamp(1.0, 10_000.0) as usize;
        Ok(arm)
    }

    /// Seconds of one run, of as many as make a slot.
    pub(super) fn seconds(self, tensors: &mut CpuTensors) -> Result<f64, CompareError> {
        let CpuTensors { workload, inputs, outputs } = tensors;
        let start = Instant::now();
        for _ in 0..self.repetitions {
            flashcore_cpu::attend_with(self.level, workload, &*inputs, &mut *outputs)?;
        }
        let mut seconds = start.elapsed().as_secs_f64();
        let end = seconds * (1.0 + self.slower);
        while seconds < end {
            core::hint::spin_loop();
            seconds = start.elapsed().as_secs_f64();
        }
        Ok(seconds / self.repetitions as f64)
    }

    /// Measures the peak of the processor again if the median of some times lies below the floor: a neighbour's load
    /// makes a measured peak smaller than it is.
    pub(super) fn settle_floor(self, measurement: &mut Measurement, ceilings: &Ceilings, seconds: &[f64]) {
        let median = Times { seconds: seconds.to_vec() }.quantile(0.5);
        if let Ok(problem) = measurement.problem.problem() {
            let mut peak = Peak::known_of_cpu(ceilings.flops, self.level, multiplied_type(&problem));
            (measurement.floor_seconds, measurement.bound) = peak.floor_below(measurement.work, median);
        }
    }

    /// Verdict of the gates on its output, and the hash of that output.
    pub(super) fn judge(
        self,
        tensors: &mut CpuTensors,
        ceilings: &Ceilings,
        seed: u64,
    ) -> Result<Measurement, CompareError> {
        tensors.outputs = Outputs::poisoned(&tensors.workload);
        self.seconds(tensors)?;
        let CpuTensors { workload, inputs, outputs } = tensors;
        let verdict = judge_worst(workload, None, inputs, outputs)?;
        let output_sha256 = Some(sha256(&outputs.output.data));
        let verified = Verified::of(&verdict);
        Ok(Measurement { output_sha256, ..measurement(workload, self.level.to_string(), seed, verified, ceilings) })
    }
}

/// Verdict of the gates on the output of a GPU kernel, and the hash of that output.
pub(super) fn judge_gpu(
    arm: &GpuArm,
    workload: &Workload,
    inputs: &Inputs,
    ceilings: &Ceilings,
    seed: u64,
) -> Result<Measurement, CompareError> {
    let (verdict, output_sha256) = arm.judge(workload, inputs)?;
    let measurement = measurement(workload, arm.name(), seed, Verified::of(&verdict), ceilings);
    Ok(Measurement { output_sha256: Some(output_sha256), ..measurement })
}

/// Compares two subjects of this program on a problem. Both are verified before they are timed, and what they wrote while
/// they were timed is verified after.
pub fn compare_in_process(
    sides: [Subject; 2],
    workload: &Workload,
    gpu: Option<&Gpu>,
    ceilings: [Ceilings; 2],
    options: &Options,
    go_on: impl FnMut(Progress) -> bool,
) -> Result<ComparedRow, CompareError> {
    match sides {
        [Subject::Cpu(a), Subject::Cpu(b)] => {
            let mut tensors = CpuTensors::new(workload, options.seed);
            let first = CpuArm::new(a, &mut tensors, 0.0)?;
            let second = CpuArm::new(b, &mut tensors, options.slow_b)?;
            let judged = |tensors: &mut CpuTensors| -> Result<[Measurement; 2], CompareError> {
                let mut judge = |arm: CpuArm, ceilings| trusted(arm.judge(tensors, ceilings, options.seed)?);
                Ok([judge(first, &ceilings[0])?, judge(second, &ceilings[1])?])
            };
            judged(&mut tensors)?;
            let run = |arm: Arm| match arm {
                Arm::A | Arm::Again => first.seconds(&mut tensors),
                Arm::B => second.seconds(&mut tensors),
            };
            let (rounds, conclusion) = rounds(options, run, go_on)?;
            let [mut a, mut b] = judged(&mut tensors)?;
            let times = |time: fn(&Round) -> f64| rounds.iter().map(time).collect::<Vec<f64>>();
            first.settle_floor(&mut a, &ceilings[0], &times(|round| round.a));
            second.settle_floor(&mut b, &ceilings[1], &times(|round| round.b));
            Ok(ComparedRow::new(a, b, rounds, conclusion, CPU_SLACK))
        }
        [Subject::Cuda(a), Subject::Cuda(b)] => {
            if options.slow_b != 0.0 {
                return Err(CompareError::SlowOnGpu);
            }
            let gpu = gpu.ok_or(CompareError::NoGpu)?;
            let inputs = workload.inputs(options.seed);
            let arm = |config| GpuArm::new(gpu, workload, config, &inputs);
            let arms = [arm(a)?, arm(a)?, arm(b)?];
            let judged = || -> Result<[Measurement; 2], CompareError> {
                let judge = |arm, ceilings| judge_gpu(arm, workload, &inputs, ceilings, options.seed).and_then(trusted);
                Ok([judge(&arms[0], &ceilings[0])?, judge(&arms[2], &ceilings[1])?])
            };
            judged()?;
            let timers = arms.each_ref().map(GpuArm::timer);
            let [first, again, second] = timers;
            let mut timers = [first?, again?, second?];
            let (rounds, conclusion) = rounds(options, |arm: Arm| timers[arm as usize].seconds(), go_on)?;
            drop(timers);
            let [a, b] = judged()?;
            Ok(ComparedRow::new(a, b, rounds, conclusion, 0.0))
        }
        [Subject::Cpu(_), Subject::Cuda(_)] | [Subject::Cuda(_), Subject::Cpu(_)] => Err(CompareError::TwoMachines),
    }
}

/// A measurement whose output the gates let pass; others are not worth timing.
pub(super) fn trusted(measurement: Measurement) -> Result<Measurement, CompareError> {
    if measurement.verified.passed {
        return Ok(measurement);
    }
    let complaints = measurement.verified.complaints.join("; ");
    Err(CompareError::Wrong { kernel: measurement.kernel, problem: measurement.problem.to_string(), complaints })
}
