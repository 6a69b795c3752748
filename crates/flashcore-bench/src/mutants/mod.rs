//! Planted bugs, and what kills them.
//!
//! A gate that has never seen a wrong kernel proves nothing. Here each bug of the [catalogue](all) is planted in
//! the real kernels, and the same checks that accept the kernels must refuse the mutant: the verifier, a fault of the
//! simulator, the gate, or, for bugs that only cost time, the simulator's counters. A mutant that survives is a hole.

mod catalogue;
mod edit;
mod hopper;
mod ranges;

use core::fmt;

use flashcore_ir::{Arch, Kernel, VerifiedKernel};
use flashcore_kernels::{Config, HopperConfig, InTurn, Plan, Reason};
use flashcore_problem::{Alignment, DType, Inputs, Invalid, Mask, MaskMod, Problem};
use flashcore_sim::SimError;

pub use catalogue::{CATALOGUE, Mutation};
pub use hopper::HOPPER;
pub use ranges::RANGES;

use crate::formulas;
use crate::shape::shape_text;
use crate::verify::{NoVerdict, SIMULATED_CTAS, Yardstick, verify_plan};

/// All planted bugs.
pub fn all() -> impl Iterator<Item = &'static Mutation> {
    CATALOGUE.iter().chain(HOPPER).chain(RANGES)
}

/// The architecture that mutants of a kernel are verified for.
const fn arch(config: Config) -> Arch {
    match config {
        Config::Hopper(_) => Arch::Sm90a,
        Config::Scalar(_) | Config::Steps(_) | Config::Ampere(_) => Arch::Sm80,
    }
}

/// The Hopper kernel with tiles so small that every problem here has several of them.
fn small_hopper() -> Config {
    Config::Hopper(HopperConfig { key_rows: 48, ..HopperConfig::default() })
}

/// The Hopper kernel whose warpgroups share keys, in the two CTAs of a cluster.
fn sharing_hopper() -> Config {
    Config::Hopper(HopperConfig {
        key_groups: 2,
        cluster: 2,
        key_rows: 16,
        stages: 4,
        in_turn: InTurn::Nothing,
        persistent: false,
        ..HopperConfig::default()
    })
}

/// The Hopper kernel whose warpgroups go through tiles of keys of their own, where a formula leaves them some.
fn alone_hopper() -> Config {
    Config::Hopper(HopperConfig { key_rows: 48, in_turn: InTurn::Nothing, ..HopperConfig::default() })
}

/// The kernel before another that finds out what a formula leaves it, as the catalogues call it.
const RANGES_FAMILY: &str = "ranges";

/// Orders of warps that the kernels as they are must pass under.
pub const BASELINE_SEEDS: u64 = 8;

/// What killed a mutant.
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

/// What became of a mutant.
#[derive(Debug, Clone)]
pub struct Fate {
    /// The bug.
    pub mutation: Mutation,
    /// What killed it and what was said; `None` if it survived.
    pub killed: Option<Kill>,
}

/// How a mutant was killed.
#[derive(Debug, Clone)]
pub struct Kill {
    /// What killed it.
    pub by: Killer,
    /// What was said, in one line.
    pub report: String,
    /// The problem it was killed on.
    pub problem: String,
}

/// Why mutants could not be tried.
#[derive(Debug, thiserror::Error)]
pub enum MutantsError {
    /// A problem of the trials is impossible.
    #[error("a trial is not a valid problem: {0}")]
    Invalid(#[from] Invalid),
    /// A kernel does not take a problem of the trials.
    #[error("a kernel does not take a trial: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Refused(Vec<Reason>),
    /// The kernel as it is does not pass.
    #[error("the unchanged {config} kernel fails on {problem}: {complaint}")]
    Baseline {
        /// The kernel.
        config: Config,
        /// The problem.
        problem: String,
        /// What is wrong.
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
}

#[derive(Debug)]
struct Trial {
    config: Config,
    plan: Plan,
    problem: Problem,
    yardstick: Yardstick,
    transactions_per_request: f64,
}

impl Trials {
    /// How many there are.
    pub fn count() -> usize {
        trials().len()
    }

    /// Prepares the trials: the kernels as they are must pass all of them, under [`BASELINE_SEEDS`] orders of warps.
    /// `go_on` hears of each trial before it begins; there are no trials if it says no.
    pub fn prepare(mut go_on: impl FnMut(&str) -> bool) -> Result<Option<Self>, MutantsError> {
        let mut prepared = Vec::new();
        for (problem, config) in trials() {
            if !go_on(&format!("{config} {}", shape_text(&problem))) {
                return Ok(None);
            }
            prepared.push(Trial::prepare(&problem, config)?);
        }
        Ok(Some(Self { trials: prepared }))
    }

    /// How many problems, kernels and orders of warps the kernels as they are have passed.
    pub fn passed(&self) -> u64 {
        self.trials.len() as u64 * BASELINE_SEEDS
    }

    /// Plants one bug and finds what kills it.
    pub fn fate(&self, mutation: Mutation) -> Result<Fate, MutantsError> {
        let mut planted = false;
        for trial in &self.trials {
            let Some(kernel) = trial.kernel_of(mutation.family) else { continue };
            let mut kernel = kernel.clone().into_kernel();
            if (mutation.plant)(&mut kernel) == 0 {
                continue;
            }
            planted = true;
            if let Some(kill) = trial.try_to_kill(kernel, mutation.family)? {
                return Ok(Fate { mutation, killed: Some(kill) });
            }
        }
        if planted {
            Ok(Fate { mutation, killed: None })
        } else {
            Err(MutantsError::NothingToChange { name: mutation.name, family: mutation.family })
        }
    }
}

/// Every problem with every kernel, and a formula with those that have a kernel before them.
fn trials() -> Vec<(Problem, Config)> {
    let configs = [Config::ampere(), Config::scalar(), small_hopper(), sharing_hopper()];
    let plain = problems().into_iter().flat_map(|problem| configs.map(|config| (problem.clone(), config)));
    // Documents that end within tiles of rows and of keys; rows of which each attends one key less than the one before, or
    // one more; two documents, the second of which begins within a tile of rows.
    let documents = masked(formulas::mask_mod("documents"));
    let later = masked(Some(MaskMod::new("later", |at| at.key.at_least(at.query))));
    let earlier = masked(Some(MaskMod::new("earlier", |at| at.query.at_least(at.key))));
    let halves = masked(Some(MaskMod::new("halves", |at| {
        let [row, key] = [at.query, at.key].map(|position| position.less(150));
        (row & key) | (!row & !key)
    })));
    // Several tiles of rows for each CTA, with one of keys each.
    let short = earlier.clone().with_query_heads(12).with_key_heads(12).with_query_length(33).with_key_length(40);
    let on_hopper = [documents.clone(), later, earlier, halves, short].map(|problem| (problem, alone_hopper()));
    plain.chain(on_hopper).chain([(documents, Config::ampere())]).collect()
}

fn masked(mask_mod: Option<MaskMod>) -> Problem {
    let mut problem = Problem::new(1, 2, 300, 64, DType::F16);
    problem.log_sum_exp = true;
    formulas::give(&mut problem, None, mask_mod);
    problem
}

/// Independent inputs, more than three tiles of keys with a ragged tail, groups of heads, rows that attend nothing.
fn problems() -> Vec<Problem> {
    let problem = |query_length, key_length, mask| {
        let mut problem = Problem::new(1, 4, query_length, 64, DType::F16);
        (problem.key_heads, problem.key_length) = (2, key_length);
        (problem.mask, problem.log_sum_exp) = (mask, true);
        problem
    };
    vec![
        problem(97, 203, Mask::Causal(Alignment::BottomRight)),
        problem(97, 203, Mask::None),
        problem(203, 97, Mask::Causal(Alignment::BottomRight)),
        // Scores that raise the maximum far, and more than once.
        problem(33, 70, Mask::None).with_scale(4.0),
        // Several tiles of rows for each CTA, with one of keys each: copies run furthest ahead.
        problem(33, 40, Mask::None).with_query_heads(12),
    ]
}

impl Trial {
    fn prepare(problem: &Problem, config: Config) -> Result<Self, MutantsError> {
        let plan = Plan::new(problem, config, arch(config)).map_err(MutantsError::Refused)?;
        let plan = plan.with_at_most(SIMULATED_CTAS);
        let yardstick = Yardstick::new(problem, Inputs::random(problem, 0))?;
        let baseline = |complaint| MutantsError::Baseline { config, problem: shape_text(problem), complaint };
        let mut counters = None;
        let verdict = verify_plan(&plan, problem, &yardstick, 0, BASELINE_SEEDS - 1, &mut counters)
            .map_err(|no_verdict| baseline(no_verdict.to_string()))?;
        if !verdict.passed() {
            return Err(baseline(verdict.to_string()));
        }
        let transactions_per_request = counters.map_or(0.0, |counters| counters.transactions_per_request());
        Ok(Self { config, plan, problem: problem.clone(), yardstick, transactions_per_request })
    }

    /// The kernel that bugs of a family are planted in, if there is one.
    fn kernel_of(&self, family: &str) -> Option<&VerifiedKernel> {
        if family == RANGES_FAMILY {
            return self.plan.ranges.as_ref().map(|side| &side.kernel);
        }
        (self.config.family() == family).then_some(&self.plan.kernel)
    }

    fn try_to_kill(&self, kernel: Kernel, family: &str) -> Result<Option<Kill>, MutantsError> {
        let kill =
            |by, report: String| Some(Kill { by, report: one_line(&report), problem: shape_text(&self.problem) });
        let kernel = match kernel.verify(arch(self.config)) {
            Err(errors) => return Ok(kill(Killer::Verifier, errors[0].to_string())),
            Ok(kernel) => kernel,
        };
        let mut counters = None;
        let plan = if family == RANGES_FAMILY { self.plan.with_ranges(kernel) } else { self.plan.with_kernel(kernel) };
        let verdict = match verify_plan(&plan, &self.problem, &self.yardstick, 0, 1, &mut counters) {
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
