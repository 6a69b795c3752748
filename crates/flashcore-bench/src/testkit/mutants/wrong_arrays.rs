//! Bounds that are left out: of offsets, lengths, padding, cache batches and pages on the device. Arrays that the host allows
//! stay within them, so that only wrong ones show it.

use std::collections::HashSet;

use flashcore_ir::{Compare, Instruction, Kernel, Op, Operand, Type, VerifiedKernel};
use flashcore_kernels::{Config, LaunchPlan, Stage};
use flashcore_problem::{
    Alignment, DType, Inputs, KvCacheProblem, Layout, Mask, PagedKv, Problem, Rotary, RotaryStyle, SequenceLengths,
    Verdict,
};

use super::catalogue::{Mutation, mutations};
use super::edit::{parameter, rewrite_if};
use super::{COMBINE_FAMILY, Group, Kill, Killer, MutantsError, OtherTrial, stage_of};
use crate::testkit::kv_cache::{Kernels, KvCacheTrial, WrongAppend};
use crate::testkit::shape_text;
use crate::testkit::verify::{NoVerdict, SIMULATED, SIMULATED_ARCH, Yardstick};
use crate::testkit::wrong_arrays::{WrongAttention, count};

/// Offsets, lengths, padding, batches and pages without their bounds.
pub const WRONG_ARRAYS: &[Mutation] = mutations! { Group::WrongArrays;
    "scalar": "query-offset-unbounded", "offsets of query rows may pass the total" => |kernel| unbounded(kernel, "cu_seqlens_q");
    "scalar": "key-offset-unbounded", "offsets of keys may pass the total" => |kernel| unbounded(kernel, "cu_seqlens_k");
    "scalar": "falling-offsets-wrap", "a sequence whose offsets fall has as many rows as any may have" => falling;
    "scalar": "query-length-unbounded", "seqused_q may pass the bound of the problem" => |kernel| unbounded(kernel, "seqused_q");
    "scalar": "key-length-unbounded", "seqused_k may pass the bound of the problem" => |kernel| unbounded(kernel, "seqused_k");
    "scalar": "padding-unbounded", "padding may be longer than its sequence" => |kernel| unbounded(kernel, "leftpad_k");
    "scalar": "cache-batch-unbounded", "kv_batch_idx may pass the last batch" => |kernel| unbounded(kernel, "kv_batch_idx");
    "scalar": "page-unbounded", "pages may pass the last" => |kernel| without_bound(kernel, "last_page");
    "ampere": "query-offset-unbounded", "offsets of query rows may pass the total" => |kernel| unbounded(kernel, "cu_seqlens_q");
    "ampere": "key-offset-unbounded", "offsets of keys may pass the total" => |kernel| unbounded(kernel, "cu_seqlens_k");
    "ampere": "falling-offsets-wrap", "a sequence whose offsets fall has as many rows as any may have" => falling;
    "ampere": "query-length-unbounded", "seqused_q may pass the bound of the problem" => |kernel| unbounded(kernel, "seqused_q");
    "ampere": "key-length-unbounded", "seqused_k may pass the bound of the problem" => |kernel| unbounded(kernel, "seqused_k");
    "ampere": "padding-unbounded", "padding may be longer than its sequence" => |kernel| unbounded(kernel, "leftpad_k");
    "ampere": "cache-batch-unbounded", "kv_batch_idx may pass the last batch" => |kernel| unbounded(kernel, "kv_batch_idx");
    "ampere": "page-unbounded", "pages may pass the last" => |kernel| without_bound(kernel, "last_page");
    "hopper": "query-offset-unbounded", "offsets of query rows may pass the total" => |kernel| unbounded(kernel, "cu_seqlens_q");
    "hopper": "falling-offsets-wrap", "a sequence whose offsets fall has as many rows as any may have" => falling;
    "hopper": "query-length-unbounded", "seqused_q may pass the bound of the problem" => |kernel| unbounded(kernel, "seqused_q");
    "combine": "query-offset-unbounded", "offsets of query rows may pass the total" => |kernel| unbounded(kernel, "cu_seqlens_q");
    "combine": "key-length-unbounded", "seqused_k may pass the bound of the problem" => |kernel| unbounded(kernel, "seqused_k");
    "append": "append-lengths-unbounded", "cache_seqlens may pass the rows of the cache" => |kernel| unbounded(kernel, "cache_seqlens");
    "append": "append-without-room", "new keys past the rows of the cache are stored" => without_room;
    "append": "append-to-any-batch", "kv_batch_idx may pass the last batch" => |kernel| always(kernel, "cache_batches");
    "append": "append-to-any-page", "pages may pass the last" => |kernel| always(kernel, "num_pages");
    "append": "append-at-any-position", "positions may pass the tables" => |kernel| without_bound(kernel, "last_position");
    "fused": "append-lengths-unbounded", "cache_seqlens may pass the rows of the cache" => |kernel| unbounded(kernel, "seqused_k");
    "fused": "append-to-any-batch", "kv_batch_idx may pass the last batch" => |kernel| always(kernel, "last_cache_batch");
    "fused": "append-to-any-page", "pages may pass the last" => |kernel| always(kernel, "last_page");
    "fused": "append-offset-unbounded", "offsets of new keys may pass the total" => |kernel| unbounded(kernel, "cu_seqlens_k_new");
    "fused": "append-without-room", "new keys past the rows of the cache are stored" => without_room;
    "fused": "new-keys-begin-at-zero", "padding that reaches into the new keys takes away the last ones" => begin_at_zero;
    "fused": "append-at-any-position", "positions may pass the tables" => |kernel| without_bound(kernel, "last_position");
};

/// The append inside of the attention launch, as the list calls it.
const FUSED_FAMILY: &str = "fused";
const APPEND_FAMILY: &str = "append";

/// Replaces the smaller of two numbers by the first where `is_bounded` says so.
fn first_of(kernel: &mut Kernel, is_bounded: impl Fn(&Op) -> bool) -> usize {
    rewrite_if(kernel, is_bounded, |_, mut instruction| {
        if let Op::Min { ty, d, a, .. } | Op::Max { ty, d, a, .. } = instruction.op {
            instruction.op = Op::Mov { ty, d, a };
        }
        vec![instruction]
    })
}

/// Leaves out the bound of whatever is bounded by a parameter.
fn without_bound(kernel: &mut Kernel, bound: &str) -> usize {
    let Some(bound) = parameter(kernel, bound).map(Operand::Register) else { return 0 };
    first_of(kernel, |op| matches!(op, Op::Min { b, .. } if *b == bound))
}

/// The registers that entries of an array are loaded into.
fn entries(kernel: &Kernel, array: &str) -> HashSet<Operand> {
    let Some(array) = parameter(kernel, array).map(Operand::Register) else { return HashSet::new() };
    let (mut addresses, mut loaded) = (HashSet::new(), HashSet::new());
    kernel.instructions(&mut |instruction| match &instruction.op {
        Op::Mad { d, c, .. } | Op::MadWide { d, c, .. } if *c == array => {
            addresses.insert(*d);
        }
        Op::Load { d, source, .. } if addresses.contains(&source.base) => {
            loaded.extend(d.iter().copied().map(Operand::Register));
        }
        _ => {}
    });
    loaded
}

/// Leaves out the bound of the entries of an array.
fn unbounded(kernel: &mut Kernel, array: &str) -> usize {
    let entries = entries(kernel, array);
    let is_entry = |operand: &Operand| entries.contains(operand);
    let swapped = rewrite_if(
        kernel,
        |op| matches!(op, Op::Min { a, b, .. } if is_entry(b) && !is_entry(a)),
        |_, mut instruction| {
            if let Op::Min { ty, d, b, .. } = instruction.op {
                instruction.op = Op::Mov { ty, d, a: b };
            }
            vec![instruction]
        },
    );
    swapped + first_of(kernel, |op| matches!(op, Op::Min { a, .. } if is_entry(a)))
}

/// The end of a sequence may lie before its beginning, as far as below 0: a large number.
fn falling(kernel: &mut Kernel) -> usize {
    let offsets = entries(kernel, "cu_seqlens_q");
    let mut bounded = HashSet::new();
    kernel.instructions(&mut |instruction| {
        if let Op::Min { d, a, .. } = &instruction.op
            && offsets.contains(a)
        {
            bounded.insert(Operand::Register(*d));
        }
    });
    first_of(kernel, |op| matches!(op, Op::Max { a, b, .. } if bounded.contains(a) && bounded.contains(b)))
}

/// A comparison with a parameter always holds.
fn always(kernel: &mut Kernel, bound: &str) -> usize {
    let Some(bound) = parameter(kernel, bound).map(Operand::Register) else { return 0 };
    let compares = |op: &Op| matches!(op, Op::SetPredicate { compare: Compare::Lt | Compare::Le, ty: Type::U32, b, .. } if *b == bound);
    rewrite_if(kernel, compares, |_, mut instruction| {
        if let Op::SetPredicate { compare, a, b, .. } = &mut instruction.op {
            (*compare, *b) = (Compare::Eq, *a);
        }
        vec![instruction]
    })
}

/// There is as much room as the cache has rows.
fn without_room(kernel: &mut Kernel) -> usize {
    let bounds = ["key_length", "cache_length"].map(|bound| parameter(kernel, bound).map(Operand::Register));
    let is_room = |op: &Op| matches!(op, Op::Sub { a, .. } if bounds.contains(&Some(*a)));
    rewrite_if(kernel, is_room, |_, mut instruction| {
        if let Op::Sub { b, .. } = &mut instruction.op {
            *b = Operand::Constant(0);
        }
        vec![instruction]
    })
}

/// The index of the first new key among those of its sequence is 0 where it is less.
fn begin_at_zero(kernel: &mut Kernel) -> usize {
    let padding = entries(kernel, "leftpad_k");
    let mut bounded = HashSet::new();
    kernel.instructions(&mut |instruction| match &instruction.op {
        Op::Min { d, a, .. } if padding.contains(a) => {
            bounded.insert(Operand::Register(*d));
        }
        Op::Reinterpret { d, a, .. } if bounded.contains(a) => {
            bounded.insert(Operand::Register(*d));
        }
        _ => {}
    });
    let is_first = |op: &Op| matches!(op, Op::Sub { ty: Type::S32, b, .. } if bounded.contains(b));
    rewrite_if(kernel, is_first, |_, instruction| {
        let Op::Sub { ty, d, .. } = instruction.op else { return vec![instruction] };
        let least = Op::Max { ty, d, a: Operand::Register(d), b: Operand::Constant(0) };
        vec![instruction.clone(), Instruction { op: least, ..instruction }]
    })
}

/// Seeds of the numbers of a trial.
const SEED: u64 = 3;
/// Rounds through the arrays of a trial, with other wrong numbers each.
const ROUNDS: u64 = 4;

/// Wrong arrays that a kernel as it is passes.
#[derive(Debug)]
pub(super) enum WrongArraysTrial {
    /// Attention, and the kernel that bugs are planted in.
    Attention { problem: Box<Problem>, plan: Box<LaunchPlan>, yardstick: Box<Yardstick>, family: &'static str },
    /// An append by sequence, in a launch of its own or inside of the attention.
    Append { problem: Box<KvCacheProblem>, config: Config, trial: Box<KvCacheTrial>, family: &'static str },
    /// The same without room for all new keys, with padding that reaches into them, by several seeds.
    Crowded { problem: Box<KvCacheProblem>, config: Config, trials: Vec<KvCacheTrial>, family: &'static str },
}

impl WrongArraysTrial {
    /// All of them.
    pub(super) fn all() -> Result<Vec<Self>, MutantsError> {
        let chunks = "ampere-32x32-2stage-swizzled-packgqa-3persistent-64chunk";
        let mut all = Vec::new();
        for problem in attention() {
            for (family, config) in [
                ("scalar", "scalar"),
                ("ampere", "ampere-64x32-2stage-swizzled"),
                ("hopper", "hopper-64x48-2stage"),
                (COMBINE_FAMILY, chunks),
            ] {
                all.push(Self::attention(&problem, config, family)?);
            }
        }
        for problem in growing() {
            all.push(Self::append(&problem, "scalar", APPEND_FAMILY)?);
            all.push(Self::append(&problem, chunks, FUSED_FAMILY)?);
            all.push(Self::crowded(&problem, "scalar", APPEND_FAMILY)?);
            all.push(Self::crowded(&problem, chunks, FUSED_FAMILY)?);
        }
        Ok(all.into_iter().flatten().collect())
    }

    /// None where the config does not take the problem.
    fn attention(problem: &Problem, config: &str, family: &'static str) -> Result<Option<Self>, MutantsError> {
        let Ok(plan) = LaunchPlan::new(problem, named(config), SIMULATED) else { return Ok(None) };
        let yardstick = Yardstick::new(problem, Inputs::random(problem, SEED))?;
        let (problem, plan, yardstick) = (Box::new(problem.clone()), Box::new(plan), Box::new(yardstick));
        Ok(Some(Self::Attention { problem, plan, yardstick, family }))
    }

    fn append(problem: &KvCacheProblem, config: &str, family: &'static str) -> Result<Option<Self>, MutantsError> {
        let config = named(config);
        let trial =
            KvCacheTrial::of(problem, SequenceLengths::Ragged, SEED).map_err(|error| MutantsError::Baseline {
                kernel: config.to_string(),
                problem: problem.append_text(),
                complaint: error.to_string(),
            })?;
        let (problem, trial) = (Box::new(problem.clone()), Box::new(trial));
        Ok(Some(Self::Append { problem, config, trial, family }))
    }

    fn crowded(problem: &KvCacheProblem, config: &str, family: &'static str) -> Result<Option<Self>, MutantsError> {
        let (config, mut problem) = (named(config), Box::new(problem.clone()));
        problem.attention.leftpad_k = true;
        let trials = (0..ROUNDS).map(|seed| KvCacheTrial::crowded(&problem, SequenceLengths::Ragged, seed));
        let trials = trials.collect::<Result<_, _>>().map_err(|error: NoVerdict| MutantsError::Baseline {
            kernel: config.to_string(),
            problem: problem.append_text(),
            complaint: error.to_string(),
        })?;
        Ok(Some(Self::Crowded { problem, config, trials, family }))
    }

    const fn family(&self) -> &'static str {
        match self {
            Self::Attention { family, .. } | Self::Append { family, .. } | Self::Crowded { family, .. } => family,
        }
    }

    fn baseline(&self, complaint: String) -> MutantsError {
        MutantsError::Baseline { kernel: self.family().to_owned(), problem: self.name(), complaint }
    }

    /// The verdict on a kernel with arrays by number.
    fn verdict(&self, kernel: &VerifiedKernel, number: u64) -> Result<Verdict, NoVerdict> {
        match self {
            Self::Attention { problem, plan, yardstick, family } => {
                let plan = plan.with_kernel(stage_of(family), kernel.clone());
                WrongAttention::new(problem, yardstick, number).verify(&plan, SEED, 0)
            }
            Self::Append { config, trial, family, .. } => {
                let is_fused = *family == FUSED_FAMILY;
                let kernels = Kernels { append: (!is_fused).then_some(kernel), fused: is_fused.then_some(kernel) };
                WrongAppend::new(trial, number).verify(*config, kernels, SEED)
            }
            Self::Crowded { config, trials, family, .. } if *family == FUSED_FAMILY => {
                trials[number as usize].verify_fused_kernel(*config, kernel, SEED)
            }
            Self::Crowded { config, trials, .. } => trials[number as usize].verify_kernel(*config, kernel, SEED),
        }
    }

    /// The check that a kernel does not pass, and its complaint.
    fn killer(&self, kernel: &VerifiedKernel) -> Option<(Killer, String)> {
        let rounds = |arrays: usize| ROUNDS * (arrays as u64 + 1);
        let numbers = match self {
            Self::Attention { problem, .. } => rounds(count(problem)),
            Self::Append { problem, .. } => {
                rounds(count(&problem.attention) + usize::from(problem.total_new.is_some()))
            }
            Self::Crowded { trials, .. } => trials.len() as u64,
        };
        (0..numbers).find_map(|number| match self.verdict(kernel, number) {
            Ok(verdict) => verdict.failures.first().map(|failure| (Killer::Gate, failure.to_string())),
            Err(NoVerdict::Simulator(error)) => Some((Killer::Fault, error.to_string())),
            Err(other) => Some((Killer::Gate, other.to_string())),
        })
    }
}

impl OtherTrial for WrongArraysTrial {
    fn group(&self) -> Group {
        Group::WrongArrays
    }

    fn is_of(&self, family: &str) -> bool {
        self.family() == family
    }

    fn name(&self) -> String {
        match self {
            Self::Attention { problem, plan, .. } => {
                let config = plan.config.map(|config| config.to_string()).unwrap_or_default();
                format!("{config} {} on wrong arrays", shape_text(problem))
            }
            Self::Append { problem, config, .. } => format!("{config} {} on wrong arrays", problem.append_text()),
            Self::Crowded { problem, config, .. } => format!("{config} {} without room", problem.append_text()),
        }
    }

    fn kernel(&self) -> Result<VerifiedKernel, MutantsError> {
        match self {
            Self::Attention { plan, family, .. } => {
                let launch =
                    plan.launch(stage_of(family)).ok_or_else(|| self.baseline("it has no kernel".to_owned()))?;
                Ok(VerifiedKernel::clone(&launch.kernel()))
            }
            Self::Append { problem, config, .. } | Self::Crowded { problem, config, .. }
                if self.family() == FUSED_FAMILY =>
            {
                let plan = LaunchPlan::with_append(problem, *config, SIMULATED).map_err(MutantsError::Refused)?;
                let launch =
                    plan.launch(Stage::Attention).ok_or_else(|| self.baseline("it has no kernel".to_owned()))?;
                Ok(VerifiedKernel::clone(&launch.kernel()))
            }
            Self::Append { problem, .. } | Self::Crowded { problem, .. } => {
                let plan = LaunchPlan::kv_cache(problem, None, SIMULATED_ARCH).map_err(MutantsError::Refused)?;
                Ok(VerifiedKernel::clone(&plan.launches[0].kernel()))
            }
        }
    }

    fn pass(&self) -> Result<(), MutantsError> {
        let kernel = self.kernel()?;
        self.killer(&kernel).map_or(Ok(()), |(_, complaint)| Err(self.baseline(complaint)))
    }

    fn try_to_kill(&self, kernel: Kernel) -> Option<Kill> {
        let (by, report) = match kernel.verify(SIMULATED_ARCH) {
            Err(errors) => (Killer::Verifier, errors[0].to_string()),
            Ok(kernel) => self.killer(&kernel)?,
        };
        Some(Kill { by, report: super::one_line(&report), problem: self.name() })
    }
}

fn named(name: &str) -> Config {
    name.parse().unwrap_or_else(|_| Config::ampere())
}

/// Every array: packed rows and keys, lengths and padding of rectangular batches, and pages.
fn attention() -> [Problem; 3] {
    let mut base = Problem::new(5, 2, 9, 32, DType::F16).with_lse(true);
    (base.key_heads, base.key_length, base.mask) = (1, 100, Mask::Causal(Alignment::BottomRight));
    let packed = base.clone().with_total_q(Some(40)).with_total_k(Some(300));
    let mut rows = base.clone().with_seqused_q(true).with_seqused_k(true).with_kv_batch(Some(4));
    rows.leftpad_k = true;
    let mut paged = base.with_seqused_k(true);
    paged.paged = Some(PagedKv::new(16, 40, 7));
    [packed, rows, paged]
}

/// Packed new keys over pages with batch indices, and a rotary embedding at positions of its own.
fn growing() -> [KvCacheProblem; 2] {
    let mut base = Problem::new(5, 2, 3, 32, DType::F16).with_layout(Layout::Bshd);
    (base.key_heads, base.key_length, base.seqused_k) = (1, 100, true);
    (base.mask, base.kv_batch) = (Mask::Causal(Alignment::BottomRight), Some(7));
    let mut paged = base.clone();
    paged.paged = Some(PagedKv::new(16, 7 * 7 + 1, 7));
    let rotary = Rotary::new(RotaryStyle::Neox, 32, 60);
    [
        KvCacheProblem::new(paged, 9).with_total_new(Some(31)),
        KvCacheProblem::new(base, 5).with_rotary(rotary).with_rotary_seqlens(true),
    ]
}
