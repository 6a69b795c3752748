//! The ladder: from one thread a row to the fastest kernel, one optimization at a time, and the gain of each.
//!
//! Each step is verified before it is timed. One that the gate refuses is timed all the same, and says that it was refused;
//! it never counts as a gain. One without a gain stays in the list.

mod steps;
mod svg;

use flashcore::{Plan as GpuPlan, PlanOptions, SelfCheckPolicy};
use flashcore_ir::Arch;
use flashcore_kernels::{Config, LaunchPlan};
use flashcore_problem::{Inputs, Problem};
use flashcore_ptx::{assemble, print};
use flashcore_sim::Counters;
use serde::{Deserialize, Serialize};

use crate::floor::{Ceilings, Work};
use crate::lab::record::{Content, Kind, impossible_seconds};
use crate::testkit::gpu::{Gpu, GpuTimes};
use crate::testkit::simulate::simulate;
use crate::testkit::verify::{NoVerdict, SIMULATED_ARCH, Yardstick, verify_plan};
use crate::testkit::{mask_text, shape_text};

pub use steps::{Step, steps};
pub use svg::picture;

/// A step is a gain if it takes less than this part of the time before.
const GAIN: f64 = 0.98;

/// The steps of some problems, as a record has them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ladders {
    /// By problem.
    pub ladders: Vec<Ladder>,
}

impl Content for Ladders {
    const KIND: Kind = Kind::Ladder;

    fn impossible(&self) -> Option<String> {
        let of = |ladder: &Ladder| {
            let times = ladder.rungs.iter().flat_map(|rung| rung.hot_seconds.iter().chain(&rung.cold_seconds));
            let reason = times.chain(&ladder.floor_seconds).find_map(|seconds| impossible_seconds(*seconds))?;
            Some(format!("{} {} {}: {reason}", ladder.shape, ladder.dtype, ladder.mask))
        };
        self.ladders.iter().find_map(of)
    }
}

/// The steps of one problem.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ladder {
    /// The problem.
    pub shape: String,
    /// Element type.
    pub dtype: String,
    /// Mask.
    pub mask: String,
    /// The problem that the simulator counted: the same, with one head and shorter.
    pub counted_shape: String,
    /// Seconds that the problem takes at least on the machine, where it was timed.
    pub floor_seconds: Option<f64>,
    /// The resource that bounds it there.
    pub bound_by: Option<String>,
    /// The steps.
    pub rungs: Vec<Rung>,
}

/// Result of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rung {
    /// Name of the step.
    pub name: String,
    /// The change from the step before.
    pub what: String,
    /// The config.
    pub config: String,
    /// The number of the step that it is compared with.
    pub from: Option<usize>,
    /// Verdict of the gate.
    pub standing: Standing,
    /// Seconds of each run, with warm caches.
    pub hot_seconds: Vec<f64>,
    /// Seconds of each launch after a flush of L2.
    pub cold_seconds: Vec<f64>,
    /// Counters of the simulator.
    pub counted: Option<Counted>,
    /// Registers and shared memory of the kernel.
    pub resources: Option<Taken>,
}

/// Verdict of the gate on a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// It is right.
    Passed,
    /// It is not right enough; with the reason.
    Refused(String),
    /// It does not run on this machine or in this simulator; with the reason.
    NotRun(String),
}

/// Counters of the simulator, mostly per score: a query row and a key that it attends.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Counted {
    /// Instructions of warps, in thousands of scores.
    pub instructions_per_thousand: f64,
    /// Bytes from global memory.
    pub global_bytes: f64,
    /// Bytes between registers and shared memory.
    pub shared_bytes: f64,
    /// Transactions of a request to shared memory; 1 means no bank conflicts.
    pub transactions_per_request: f64,
    /// The part of the multiplications that tensor cores did.
    pub tensor_part: f64,
    /// Barriers, in thousands of scores.
    pub barriers_per_thousand: f64,
}

/// Registers and shared memory of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taken {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of local memory of a thread: spilled registers.
    pub spilled_bytes: u32,
    /// Bytes of shared memory of a CTA.
    pub shared_bytes: u32,
    /// Threads of a CTA.
    pub threads: u32,
}

/// Gain of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gain {
    /// There is nothing to compare, or nothing was timed.
    Unknown,
    /// It is that much faster than the step it changes.
    Faster(f64),
    /// No gain: the time before over its own.
    Nothing(f64),
    /// It is not right enough to count, whatever its time: the time before over its own.
    Refused(f64),
}

impl Rung {
    /// Median time.
    pub fn seconds(&self) -> Option<f64> {
        let times = crate::timing::Times { seconds: self.hot_seconds.clone() };
        (!self.hot_seconds.is_empty()).then(|| times.quantile(0.5))
    }
}

impl Ladder {
    /// Gain of a step over the one before.
    pub fn gain(&self, number: usize) -> Gain {
        let rung = &self.rungs[number];
        let passed = |rung: &&Rung| rung.standing == Standing::Passed;
        let before = match rung.from {
            Some(from) => self.rungs.get(from).and_then(Rung::seconds),
            None => self.rungs[..number].iter().filter(passed).filter_map(Rung::seconds).reduce(f64::min),
        };
        match (before, rung.seconds()) {
            (Some(before), Some(seconds)) if rung.standing != Standing::Passed => Gain::Refused(before / seconds),
            (Some(before), Some(seconds)) if seconds < GAIN * before => Gain::Faster(before / seconds),
            (Some(before), Some(seconds)) => Gain::Nothing(before / seconds),
            _ => Gain::Unknown,
        }
    }

    /// The whole way: the time of the first step over that of the fastest that passed.
    pub fn in_all(&self) -> Option<f64> {
        let passed = self.rungs.iter().filter(|rung| rung.standing == Standing::Passed);
        Some(self.rungs.first()?.seconds()? / passed.filter_map(Rung::seconds).reduce(f64::min)?)
    }
}

/// Backend that runs the steps.
#[derive(Debug, Clone, Copy)]
pub enum Ground<'a> {
    /// On a GPU: times, and counters of the simulator beside them.
    Gpu(&'a Gpu, Ceilings),
    /// In the simulator alone: counters.
    Simulator(Arch),
}

/// Sequences are no longer than this in the simulator.
const COUNTED_LENGTH: usize = 256;

/// Walks all steps of a problem; `progress` hears of each before it begins.
pub fn walk(
    problem: &Problem,
    steps: &[Step],
    ground: Ground<'_>,
    mut go_on: impl FnMut(&Ladder) -> bool,
) -> Result<Ladder, NoVerdict> {
    let counted = counted_problem(problem);
    let yardstick = Yardstick::new(&counted, Inputs::random(&counted, 1))?;
    let inputs = Inputs::random(problem, 0);
    let floor = match ground {
        Ground::Gpu(_, ceilings) => Some(ceilings.floor(Work::of(problem))),
        Ground::Simulator(_) => None,
    };
    let mut ladder = Ladder {
        shape: shape_text(problem),
        dtype: problem.dtype.to_string(),
        mask: mask_text(problem.mask),
        counted_shape: shape_text(&counted),
        floor_seconds: floor.map(|(seconds, _)| seconds),
        bound_by: floor.map(|(_, bound)| bound.to_string()),
        rungs: Vec::new(),
    };
    for step in steps {
        if !go_on(&ladder) {
            return Ok(ladder);
        }
        let (config, what) = (step.config.to_string(), step.what.to_owned());
        let mut rung = Rung {
            name: step.name.to_owned(),
            what,
            config,
            from: step.from,
            standing: Standing::Passed,
            hot_seconds: Vec::new(),
            cold_seconds: Vec::new(),
            counted: None,
            resources: None,
        };
        match ground {
            Ground::Gpu(gpu, _) => {
                on_gpu(gpu, problem, &inputs, step.config, &mut rung)?;
                if let Ok(plan) = LaunchPlan::new(&counted, step.config, SIMULATED_ARCH) {
                    rung.counted = simulate(&plan, &counted, yardstick.inputs(), 0)
                        .ok()
                        .map(|simulation| Counted::of(&counted, &simulation.counters));
                }
            }
            Ground::Simulator(arch) => in_simulator(&counted, &yardstick, arch, step.config, &mut rung)?,
        }
        ladder.rungs.push(rung);
    }
    go_on(&ladder);
    Ok(ladder)
}

/// The problem that is counted: one head, and no longer than the simulator does in a moment.
fn counted_problem(problem: &Problem) -> Problem {
    let mut counted = problem.clone();
    (counted.batch, counted.query_heads, counted.key_heads) = (1, 1, 1);
    counted.query_length = counted.query_length.min(COUNTED_LENGTH);
    counted.key_length = counted.key_length.min(COUNTED_LENGTH);
    counted
}

fn on_gpu(gpu: &Gpu, problem: &Problem, inputs: &Inputs, config: Config, rung: &mut Rung) -> Result<(), NoVerdict> {
    // Whoever times a kernel here has judged it; the check of new kernels would refuse what is to be shown as refused.
    let options = PlanOptions::default().with_config(config).with_self_check(SelfCheckPolicy::Off);
    let plan = match GpuPlan::with_options(problem, gpu.device(), options) {
        Ok(plan) => plan,
        Err(unsupported) => {
            rung.standing = Standing::NotRun(unsupported.to_string());
            return Ok(());
        }
    };
    let GpuTimes { hot, cold, verdict, .. } = gpu.judge_and_time(&plan, inputs)?;
    if !verdict.passed() {
        let failures: Vec<_> = verdict.failures.iter().map(ToString::to_string).collect();
        rung.standing = Standing::Refused(failures.join("; "));
    }
    (rung.hot_seconds, rung.cold_seconds) = (hot.seconds, cold.seconds);
    rung.resources = plan.report().kernel.as_ref().map(|kernel| Taken {
        registers: kernel.usage.registers,
        spilled_bytes: kernel.usage.local_bytes,
        shared_bytes: kernel.shared_bytes,
        threads: kernel.threads,
    });
    Ok(())
}

fn in_simulator(
    counted: &Problem,
    yardstick: &Yardstick,
    arch: Arch,
    config: Config,
    rung: &mut Rung,
) -> Result<(), NoVerdict> {
    let plan = match LaunchPlan::new(counted, config, arch) {
        Ok(plan) => plan,
        Err(reasons) => {
            let reasons: Vec<_> = reasons.iter().map(ToString::to_string).collect();
            rung.standing = Standing::NotRun(reasons.join("; "));
            return Ok(());
        }
    };
    let mut counters = None;
    let verdict = verify_plan(&plan, counted, yardstick, 0, 1, &mut counters)?;
    if !verdict.passed() {
        let failures: Vec<_> = verdict.failures.iter().map(ToString::to_string).collect();
        rung.standing = Standing::Refused(failures.join("; "));
    }
    rung.counted = counters.map(|counters| Counted::of(counted, &counters));
    // Without ptxas there are no figures, and that is all.
    let kernel = plan.attention().kernel();
    rung.resources = assemble(&print(&kernel), arch).ok().map(|resources| Taken {
        registers: resources.registers,
        spilled_bytes: resources.spill_store_bytes,
        shared_bytes: kernel.shared_bytes,
        threads: kernel.threads,
    });
    Ok(())
}

impl Counted {
    fn of(problem: &Problem, counters: &Counters) -> Self {
        let work = Work::of(problem);
        let scores = work.exponentials.max(1.0);
        let shared = counters.shared();
        Self {
            instructions_per_thousand: counters.instructions_in_all() as f64 * 1e3 / scores,
            global_bytes: counters.global_loads.bytes as f64 / scores,
            shared_bytes: shared.bytes as f64 / scores,
            transactions_per_request: if shared.requests == 0 { 0.0 } else { shared.transactions_per_request() },
            tensor_part: (counters.tensor_flops as f64 / work.flops).min(1.0),
            barriers_per_thousand: counters.barriers as f64 * 1e3 / scores,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rung(seconds: f64, from: Option<usize>, standing: Standing) -> Rung {
        Rung {
            name: "a step".to_owned(),
            what: "a change".to_owned(),
            config: "scalar-64".to_owned(),
            from,
            standing,
            hot_seconds: vec![seconds; 3],
            cold_seconds: Vec::new(),
            counted: None,
            resources: None,
        }
    }

    fn ladder() -> Ladder {
        Ladder {
            shape: "1x8x512x64".to_owned(),
            dtype: "f16".to_owned(),
            mask: "full".to_owned(),
            counted_shape: "1x1x192x64".to_owned(),
            floor_seconds: Some(1e-6),
            bound_by: Some("arithmetic".to_owned()),
            rungs: vec![
                rung(64e-6, None, Standing::Passed),
                rung(16e-6, Some(0), Standing::Passed),
                rung(15.9e-6, Some(1), Standing::Passed),
                rung(4e-6, Some(1), Standing::Refused("too far".to_owned())),
                rung(8e-6, None, Standing::Passed),
            ],
        }
    }

    #[test]
    fn what_brought_nothing_and_what_was_refused_is_no_gain() {
        let ladder = ladder();
        assert_eq!(ladder.gain(0), Gain::Unknown);
        assert_eq!(ladder.gain(1), Gain::Faster(64e-6 / 16e-6));
        assert_eq!(ladder.gain(2), Gain::Nothing(16e-6 / 15.9e-6));
        assert_eq!(ladder.gain(3), Gain::Refused(16e-6 / 4e-6));
        // The last is compared with the best that passed.
        assert_eq!(ladder.gain(4), Gain::Faster(15.9e-6 / 8e-6));
        assert_eq!(ladder.in_all(), Some(64e-6 / 8e-6));
    }

    #[test]
    fn a_ladder_survives_the_way_through_a_file() {
        let text = serde_json::to_string(&ladder()).expect("JSON");
        assert_eq!(serde_json::from_str::<Ladder>(&text).expect("a ladder"), ladder());
    }

    #[test]
    fn a_picture_has_a_bar_for_each_step() {
        let svg = picture(&ladder());
        assert_eq!(svg.matches("<rect class=\"bar").count(), 5);
        assert_eq!(svg.matches("<rect class=\"bar refused\"").count(), 1);
        assert_eq!(svg.matches("<rect class=\"bar nothing\"").count(), 1);
        assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"));
    }
}
