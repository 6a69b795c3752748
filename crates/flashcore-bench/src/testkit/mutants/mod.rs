//! Mutation testing: planted bugs, and the check that kills each.
//!
//! A gate that has never seen a wrong kernel proves nothing. Here each bug of the [catalogue](all) is planted in
//! the real kernels, and the same checks that accept the kernels must refuse the mutant: the verifier, a fault of the
//! simulator, the gate, or, for bugs that only cost time, the simulator's counters. A mutant that survives is a hole.

mod addressing;
mod block_mask;
mod catalogue;
mod chunks;
mod counts;
mod dynamic;
mod edit;
mod fp8;
mod fp8_mma;
mod fp8_query;
mod fused_append;
mod hopper;
mod invariance;
mod kv_cache;
mod lse_forms;
mod merge;
mod numeric;
mod overlap;
mod quantize;
mod sequences;
mod tf32;
mod trials;
mod wrong_arrays;

use core::fmt;
use std::sync::Arc;

use flashcore_ir::{Arch, Kernel, VerifiedKernel};
use flashcore_kernels::{Config, KernelLaunch, LaunchPlan, Reason, Stage, Target};
use flashcore_problem::{Invalid, Problem, Verdict};
use flashcore_sim::{Counters, SimError};

pub use addressing::{ADDRESSING, FAR, PARTS};
pub use block_mask::BLOCK_MASK;
pub use catalogue::{CATALOGUE, Mutation};
pub use chunks::{CHUNKS, SCANS};
pub use counts::COUNTS;
pub use dynamic::DYNAMIC;
pub use fp8::FP8;
pub use fp8_mma::FP8_MMA;
pub use fp8_query::FP8_QUERY;
pub use fused_append::FUSED_APPEND;
pub use hopper::HOPPER;
pub use invariance::INVARIANCE;
pub use kv_cache::{KV_CACHE, SEARCHES};
pub use lse_forms::LSE_FORMS;
pub use merge::MERGE;
pub use numeric::{CLUSTERS, LATE, NUMERIC};
pub use overlap::OVERLAP;
pub use quantize::QUANTIZE;
pub use sequences::SEQUENCES;
pub use tf32::TF32;
pub use trials::Group;
pub use wrong_arrays::WRONG_ARRAYS;

use crate::testkit::shape_text;
use crate::testkit::simulate::FarApart;
use crate::testkit::verify::{NoVerdict, SIMULATED_CTAS, Yardstick, plan_far, verify_plan, verify_plan_far};
use fused_append::FusedTrial;
use invariance::InvarianceTrial;
use kv_cache::AppendTrial;
use merge::MergeTrial;
use trials::Start;
use wrong_arrays::WrongArraysTrial;

/// All planted bugs.
pub fn all() -> impl Iterator<Item = &'static Mutation> {
    let lists = [
        CATALOGUE,
        HOPPER,
        BLOCK_MASK,
        ADDRESSING,
        FAR,
        PARTS,
        COUNTS,
        NUMERIC,
        LATE,
        CLUSTERS,
        SEQUENCES,
        CHUNKS,
        DYNAMIC,
        INVARIANCE,
        MERGE,
        LSE_FORMS,
        KV_CACHE,
        QUANTIZE,
        FUSED_APPEND,
        TF32,
        FP8,
        FP8_QUERY,
        FP8_MMA,
        OVERLAP,
        WRONG_ARRAYS,
        SCANS,
        SEARCHES,
    ];
    lists.into_iter().flatten()
}

/// The architecture that mutants of a kernel are verified for.
fn arch(config: Config, group: Group) -> Arch {
    match (config.traits().only_arch, config.family(), group) {
        (Some(arch), ..) => arch,
        // Products of 8-bit floats, and two levels of them.
        (None, "ampere", Group::Fp8Mma) => Arch::Sm89,
        (None, "ampere", _) => Arch::Sm90,
        (None, ..) => Arch::Sm80,
    }
}

/// The block-mask precompute kernel, as the catalogues call it.
const RANGES_FAMILY: &str = "ranges";
/// The split-KV combine kernel.
const COMBINE_FAMILY: &str = "combine";
/// The kernel that resets the counter of a dynamic scheduler.
const RESET_FAMILY: &str = "reset";

/// Orders of warps that the kernels as they are must pass under, in the trials that most bugs are tried on.
const BASELINE_SEEDS: u64 = 8;
/// Seeds of the other trials, which have the same kernels.
const FEWER_SEEDS: u64 = 2;

const fn baseline_seeds(group: Group) -> u64 {
    match group {
        Group::Plain => BASELINE_SEEDS,
        _ => FEWER_SEEDS,
    }
}

/// The check that killed a mutant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Killer {
    /// A rule of the language.
    Verifier,
    /// A fault of the simulator.
    Fault,
    /// The correctness gate.
    Gate,
    /// More shared-memory transactions than the kernel as it is.
    Counters,
}

impl Killer {
    /// The name in the matrix.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Verifier => "verifier",
            Self::Fault => "simulator",
            Self::Gate => "gate",
            Self::Counters => "counters",
        }
    }
}

/// Fate of a mutant.
#[derive(Debug, Clone)]
pub struct Fate {
    /// The bug.
    pub mutation: Mutation,
    /// The check that killed it and its report; `None` if it survived.
    pub killed: Option<Kill>,
}

/// Death of a mutant.
#[derive(Debug, Clone)]
pub struct Kill {
    /// The check.
    pub by: Killer,
    /// Its report, in one line.
    pub report: String,
    /// The problem it was killed on.
    pub problem: String,
}

/// Reason why mutants could not be tried.
#[derive(Debug, thiserror::Error)]
pub enum MutantsError {
    /// A problem of the trials is impossible.
    #[error("a trial is not a valid problem: {0}")]
    Invalid(#[from] Invalid),
    /// A kernel does not take a problem of the trials.
    #[error("a kernel does not take a trial: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Refused(Vec<Reason>),
    /// The kernel as it is does not pass.
    #[error("the unchanged {kernel} kernel fails on {problem}: {complaint}")]
    Baseline {
        /// The kernel: its config, or the operation.
        kernel: String,
        /// The problem.
        problem: String,
        /// The complaint.
        complaint: String,
    },
    /// A mutation found nothing to change: the kernel has changed, and the mutation must follow.
    #[error("the mutation `{name}` of the {family} kernel finds nothing to change; adapt it to the kernel")]
    NothingToChange {
        /// The mutation.
        name: &'static str,
        /// The kernel.
        family: &'static str,
    },
    /// The simulator broke.
    #[error("{0}")]
    Simulator(SimError),
}

/// The problems that mutants are tried on, with kernels that pass them.
#[derive(Debug)]
pub struct Trials {
    trials: Vec<Trial>,
    others: Vec<Box<dyn OtherTrial>>,
}

/// A trial that is no problem of attention held against the oracle.
trait OtherTrial: fmt::Debug {
    /// Group of the mutations that it can kill.
    fn group(&self) -> Group;
    /// True if bugs of a family are planted in its kernel.
    fn is_of(&self, _family: &str) -> bool {
        true
    }
    /// The text that reports name it by.
    fn name(&self) -> String;
    /// The kernel that bugs are planted in, as it is.
    fn kernel(&self) -> Result<VerifiedKernel, MutantsError>;
    /// An error unless the kernel as it is passes.
    fn pass(&self) -> Result<(), MutantsError>;
    /// The death of a mutant, unless it survives.
    fn try_to_kill(&self, kernel: Kernel) -> Option<Kill>;
}

/// All of them.
fn other_trials() -> Result<Vec<Box<dyn OtherTrial>>, MutantsError> {
    let mut all: Vec<Box<dyn OtherTrial>> = vec![Box::new(InvarianceTrial::new()?)];
    for merge in MergeTrial::all()? {
        all.push(Box::new(merge));
    }
    for append in AppendTrial::all()? {
        all.push(Box::new(append));
    }
    for fused in FusedTrial::all()? {
        all.push(Box::new(fused));
    }
    for wrong in WrongArraysTrial::all()? {
        all.push(Box::new(wrong));
    }
    Ok(all)
}

#[derive(Debug)]
struct Trial {
    group: Group,
    config: Config,
    plan: LaunchPlan,
    problem: Problem,
    far: Option<FarApart>,
    yardstick: Yardstick,
    transactions_per_request: f64,
}

impl Trials {
    /// Prepares the trials that can kill `mutations`: the kernels as they are must pass all of them, under several orders
    /// of warps. `go_on` hears of each trial before it begins, with its index and how many there are; there are no trials
    /// if it says no.
    pub fn prepare(
        mutations: &[Mutation],
        mut go_on: impl FnMut(usize, usize, &str) -> bool,
    ) -> Result<Option<Self>, MutantsError> {
        let mut starts = trials::all();
        starts.retain(|start| mutations.iter().any(|mutation| mutation.group == start.group));
        let mut others = other_trials()?;
        others.retain(|trial| mutations.iter().any(|mutation| mutation.group == trial.group()));
        let (count, mut trials) = (starts.len() + others.len(), Vec::new());
        for start in starts {
            if !go_on(trials.len(), count, &format!("{} {}", start.config, shape_text(&start.problem))) {
                return Ok(None);
            }
            trials.push(Trial::prepare(start)?);
        }
        for (index, trial) in others.iter().enumerate() {
            if !go_on(trials.len() + index, count, &trial.name()) {
                return Ok(None);
            }
            trial.pass()?;
        }
        Ok(Some(Self { trials, others }))
    }

    /// Number of mutants.
    pub const fn count(&self) -> usize {
        self.trials.len() + self.others.len()
    }

    /// Number of problems, kernels and orders of warps that the unchanged kernels have passed.
    pub fn passed(&self) -> u64 {
        let attention: u64 = self.trials.iter().map(|trial| baseline_seeds(trial.group)).sum();
        attention + self.others.iter().map(|trial| baseline_seeds(trial.group())).sum::<u64>()
    }

    /// Plants one bug and finds what kills it.
    pub fn fate(&self, mutation: Mutation) -> Result<Fate, MutantsError> {
        let mut planted = false;
        for attempt in self.attempts(mutation) {
            planted = true;
            if let (_, Some(kill)) = attempt? {
                return Ok(Fate { mutation, killed: Some(kill) });
            }
        }
        if planted {
            Ok(Fate { mutation, killed: None })
        } else {
            Err(MutantsError::NothingToChange { name: mutation.name, family: mutation.family })
        }
    }

    /// Plants one bug in each trial of its group that has a place for it: the name of the trial, and what killed it there.
    pub fn attempts(
        &self,
        mutation: Mutation,
    ) -> impl Iterator<Item = Result<(String, Option<Kill>), MutantsError>> + '_ {
        let plant = move |mut kernel: Kernel| ((mutation.plant)(&mut kernel) > 0).then_some(kernel);
        let others =
            self.others.iter().filter(move |trial| mutation.group == trial.group() && trial.is_of(mutation.family));
        let others = others.filter_map(move |trial| match trial.kernel() {
            Ok(kernel) => plant(kernel.into_kernel()).map(|kernel| Ok((trial.name(), trial.try_to_kill(kernel)))),
            Err(error) => Some(Err(error)),
        });
        let attention = self.trials.iter().filter(move |trial| trial.group == mutation.group);
        let attention = attention.filter_map(move |trial| {
            let kernel = plant(VerifiedKernel::clone(&*trial.kernel_of(mutation.family)?).into_kernel())?;
            Some(trial.try_to_kill(kernel, mutation.family).map(|kill| (trial.name(), kill)))
        });
        others.chain(attention)
    }

    /// The trials that are problems of attention: the name, the problem and the plan of each.
    pub fn plans(&self) -> impl Iterator<Item = (String, &Problem, &LaunchPlan)> {
        self.trials.iter().map(|trial| (trial.name(), &trial.problem, &trial.plan))
    }
}

impl Trial {
    fn prepare(start: Start) -> Result<Self, MutantsError> {
        let Start { group, problem, config, bias, far, seed, numbers } = start;
        let plan = if let Some(far) = &far {
            plan_far(config, &problem, far, arch(config, group)).map_err(MutantsError::Refused)?
        } else {
            let target = Target::new(arch(config, group), SIMULATED_CTAS);
            LaunchPlan::new(&problem, config, target).map_err(MutantsError::Refused)?
        };
        let yardstick = Yardstick::new(&problem, numbers.inputs(&problem, seed, bias))?;
        let mut trial = Self { group, config, plan, problem, far, yardstick, transactions_per_request: 0.0 };
        let baseline = |complaint| MutantsError::Baseline {
            kernel: config.to_string(),
            problem: shape_text(&trial.problem),
            complaint,
        };
        let mut counters = None;
        let verdict = trial
            .verify(&trial.plan, baseline_seeds(group) - 1, &mut counters)
            .map_err(|no_verdict| baseline(no_verdict.to_string()))?;
        if !verdict.passed() {
            return Err(baseline(verdict.to_string()));
        }
        trial.transactions_per_request = counters.map_or(0.0, |counters| counters.transactions_per_request());
        Ok(trial)
    }

    fn name(&self) -> String {
        format!("{} {}", self.config, shape_text(&self.problem))
    }

    fn verify(&self, plan: &LaunchPlan, repeats: u64, counters: &mut Option<Counters>) -> Result<Verdict, NoVerdict> {
        match &self.far {
            Some(far) => verify_plan_far(plan, far, &self.problem, &self.yardstick, 0, repeats, counters),
            None => verify_plan(plan, &self.problem, &self.yardstick, 0, repeats, counters),
        }
    }

    /// The kernel that bugs of a family are planted in, if there is one.
    fn kernel_of(&self, family: &str) -> Option<Arc<VerifiedKernel>> {
        kernel_of(&self.plan, family)
    }

    fn try_to_kill(&self, kernel: Kernel, family: &str) -> Result<Option<Kill>, MutantsError> {
        let kill =
            |by, report: String| Some(Kill { by, report: one_line(&report), problem: shape_text(&self.problem) });
        let kernel = match kernel.verify(arch(self.config, self.group)) {
            Err(errors) => return Ok(kill(Killer::Verifier, errors[0].to_string())),
            Ok(kernel) => kernel,
        };
        let mut counters = None;
        let plan = self.plan.with_kernel(stage_of(family), kernel);
        let verdict = match self.verify(&plan, 1, &mut counters) {
            Ok(verdict) => verdict,
            Err(NoVerdict::Simulator(SimError::Fault(fault))) => return Ok(kill(Killer::Fault, fault.to_string())),
            Err(NoVerdict::Simulator(error)) => return Err(MutantsError::Simulator(error)),
            Err(NoVerdict::Invalid(invalid)) => return Err(invalid.into()),
            Err(
                other @ (NoVerdict::Impossible(_)
                | NoVerdict::Refused(_)
                | NoVerdict::RefusedByGpu(_)
                | NoVerdict::Gpu(_)
                | NoVerdict::Cpu(_)
                | NoVerdict::Panicked(_)
                | NoVerdict::Append(_)
                | NoVerdict::Written(_)
                | NoVerdict::Taken
                | NoVerdict::GuardPages(_)),
            ) => {
                return Ok(kill(Killer::Verifier, other.to_string()));
            }
        };
        if let Some(failure) = verdict.failures.first() {
            return Ok(kill(Killer::Gate, failure.to_string()));
        }
        let transactions = counters.map_or(0.0, |counters| counters.transactions_per_request());
        if transactions > self.transactions_per_request {
            let report = format!(
                "{transactions:.2} shared-memory transactions per request instead of {:.2}",
                self.transactions_per_request
            );
            return Ok(kill(Killer::Counters, report));
        }
        Ok(None)
    }
}

fn one_line(text: &str) -> String {
    text.lines().map(str::trim).collect::<Vec<_>>().join(" ")
}

impl fmt::Display for Killer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// The stage whose kernel bugs of a family are planted in.
fn stage_of(family: &str) -> Stage {
    match family {
        RANGES_FAMILY => Stage::BlockMask,
        COMBINE_FAMILY => Stage::Combine,
        RESET_FAMILY => Stage::ResetCounter,
        _ => Stage::Attention,
    }
}

/// The kernel of a plan that bugs of a family are planted in, if it has one.
fn kernel_of(plan: &LaunchPlan, family: &str) -> Option<Arc<VerifiedKernel>> {
    let stage = stage_of(family);
    let is_of_family = stage != Stage::Attention || plan.config.is_some_and(|config| config.family() == family);
    plan.launch(stage).filter(|_| is_of_family).map(KernelLaunch::kernel)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A kernel that changes leaves no mutation that changes nothing.
    #[test]
    fn every_mutation_finds_something_to_change() {
        let plans: Vec<(Group, Config, LaunchPlan)> = trials::all()
            .into_iter()
            .map(|Start { group, problem, config, .. }| {
                (group, config, LaunchPlan::new(&problem, config, arch(config, group)).expect("a plan"))
            })
            .collect();
        let finds = |mutation: &&Mutation| {
            plans.iter().filter(|(group, _, _)| *group == mutation.group).any(|(_, config, plan)| {
                let _ = config;
                let kernel = kernel_of(plan, mutation.family);
                kernel.is_some_and(|kernel| (mutation.plant)(&mut VerifiedKernel::clone(&kernel).into_kernel()) > 0)
            })
        };
        let others = other_trials().expect("trials");
        let finds_in_others = |mutation: &&Mutation| {
            let others = others.iter().filter(|trial| trial.group() == mutation.group && trial.is_of(mutation.family));
            others.into_iter().any(|trial| {
                let kernel = trial.kernel().expect("a kernel");
                (mutation.plant)(&mut kernel.into_kernel()) > 0
            })
        };
        let finds = |mutation: &&Mutation| finds(mutation) || finds_in_others(mutation);
        let idle: Vec<_> = all().filter(|mutation| !finds(mutation)).map(|m| (m.family, m.name)).collect();
        assert_eq!(idle, []);
        let mut names: Vec<_> =
            all().map(|mutation| (mutation.family, mutation.group as usize, mutation.name)).collect();
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count, "two mutations of one name");
    }
}
