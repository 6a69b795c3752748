//! Bugs of an append inside of the attention launch, and their trials: one launch is held against two, bit by bit, with
//! chunks of packed heads and with splits of single heads.

use flashcore_ir::{Compare, Instruction, Kernel, Op, Operand, Type, VerifiedKernel};
use flashcore_kernels::{Config, LaunchPlan};
use flashcore_problem::{
    Alignment, DType, KvCacheProblem, Layout, Mask, PagedKv, Problem, Rotary, RotaryStyle, SequenceLengths,
};

use super::addressing::capped;
use super::catalogue::{Mutation, is_barrier, is_compare, mutations, set_compare};
use super::edit::{Find, change, drop, parameter, rewrite, rewrite_if};
use super::{Group, Kill, Killer, MutantsError, OtherTrial};
use crate::testkit::kv_cache::KvCacheTrial;
use crate::testkit::verify::{NoVerdict, SIMULATED, SIMULATED_ARCH};

/// New keys from the wrong place, to the wrong place, by too many, or seen too early.
pub const FUSED_APPEND: &[Mutation] = mutations! { Group::FusedAppend;
    "ampere": "fused-new-key-of-the-next-row", "new keys are those of the next row" =>
        |kernel| further(kernel, "new_key_row_stride");
    "ampere": "fused-new-value-of-the-next-row", "new values are those of the next row" =>
        |kernel| further(kernel, "new_value_row_stride");
    "ampere": "fused-new-key-of-another-head", "all KV heads have the new keys of the first" =>
        |kernel| capped(kernel, "new_key_head_stride", 0);
    "ampere": "fused-new-key-one-late", "blocks of keys have new keys one row late" => one_row_late;
    "ampere": "fused-every-chunk-writes", "the CTAs of all chunks or splits write new keys to the cache" =>
        |kernel| every_writer(kernel, Type::U32, 1);
    "ampere": "fused-every-tile-writes", "the CTAs of all query tiles write new keys to the cache" =>
        |kernel| every_writer(kernel, Type::U32, 0);
    "ampere": "fused-every-head-writes", "the CTAs of all query heads write new keys to the cache" =>
        |kernel| every_writer(kernel, Type::U64, 0);
    "ampere": "fused-nobody-writes", "the CTA that writes has the second tile of query rows" =>
        |kernel| change(kernel, Find::every(&["writer"], |op| is_compare(op, Compare::Eq)), |op| set_compare(op, Compare::Ne));
    "ampere": "fused-positions-from-zero", "every sequence is rotated as if it began" => positions_from_zero;
    "ampere": "fused-query-at-one-position", "all query rows of a sequence have the position of the first" =>
        query_at_one_position;
    "ampere": "fused-drop-fill-barrier", "no barrier after new rows were stored to a block" =>
        |kernel| drop(kernel, Find::every(&["fill block"], is_barrier));
    "ampere": "fused-drop-query-barrier", "no barrier after query and new rows were stored" =>
        |kernel| drop(kernel, Find::every(&["query fragments"], is_barrier));
    "ampere": "fused-page-of-the-neighbour", "new keys are written to the page after theirs" => next_page;
    "ampere": "fused-reads-what-is-written", "blocks of keys also copy the rows of the cache that new keys go to" =>
        copies_new_rows;
    "ampere": "fused-new-keys-unattended", "blocks of keys do not get their new rows" =>
        |kernel| drop(kernel, Find::every(&["fill block"], |op| matches!(op, Op::Store { .. })));
};

/// Indices that are multiplied by a stride become one more.
fn further(kernel: &mut Kernel, stride: &str) -> usize {
    let Some(stride) = parameter(kernel, stride).map(Operand::Register) else { return 0 };
    let multiplies = |op: &Op| matches!(op, Op::Mad { ty: Type::U64, b, .. } if *b == stride);
    rewrite_if(kernel, multiplies, |kernel, mut instruction| {
        let Op::Mad { a, .. } = &mut instruction.op else { return vec![instruction] };
        let changed = kernel.add_register(Type::U64, instruction.origin.section);
        let change = Op::Add { ty: Type::U64, d: changed, a: *a, b: Operand::Constant(1) };
        *a = Operand::Register(changed);
        vec![Instruction { op: change, ..instruction.clone() }, instruction]
    })
}

/// Adds one to the results of the operations found.
fn plus_one(kernel: &mut Kernel, find: Find) -> usize {
    rewrite(kernel, find, |_, instruction| {
        let (Op::Add { ty, d, .. } | Op::Sub { ty, d, .. }) = instruction.op else { return vec![instruction] };
        let more = Op::Add { ty, d, a: Operand::Register(d), b: Operand::Constant(1) };
        vec![instruction.clone(), Instruction { op: more, ..instruction }]
    })
}

/// Rows of blocks are key less first key of the block.
fn one_row_late(kernel: &mut Kernel) -> usize {
    plus_one(kernel, Find::every(&["fill block"], |op| matches!(op, Op::Sub { ty: Type::S32, .. })))
}

/// One of the conditions of the CTA that writes always holds.
fn every_writer(kernel: &mut Kernel, wanted: Type, number: usize) -> usize {
    let find = match wanted {
        Type::U64 => Find::nth(&["writer"], |op| is_equal(op, Type::U64), number),
        _ => Find::nth(&["writer"], |op| is_equal(op, Type::U32), number),
    };
    change(kernel, find, |op| {
        if let Op::SetPredicate { compare, a, b, .. } = op {
            (*compare, *b) = (Compare::Eq, *a);
        }
    })
}

fn is_equal(op: &Op, wanted: Type) -> bool {
    matches!(op, Op::SetPredicate { compare: Compare::Eq, ty, .. } if *ty == wanted)
}

fn positions_from_zero(kernel: &mut Kernel) -> usize {
    let Some(last) = parameter(kernel, "last_position").map(Operand::Register) else { return 0 };
    let starts = |op: &Op| matches!(op, Op::Min { b, .. } if *b == last);
    rewrite_if(kernel, starts, |_, mut instruction| {
        if let Op::Min { b, .. } = &mut instruction.op {
            *b = Operand::Constant(0);
        }
        vec![instruction]
    })
}

/// The first bound of each position is that of the index of the row.
fn query_at_one_position(kernel: &mut Kernel) -> usize {
    let row = Find::nth(&["positions"], |op| matches!(op, Op::Min { .. }), 0);
    change(kernel, row, |op| {
        if let Op::Min { b, .. } = op {
            *b = Operand::Constant(0);
        }
    })
}

/// The index into the page table becomes one more.
fn next_page(kernel: &mut Kernel) -> usize {
    let entries = Find::every(&["cache row"], |op| matches!(op, Op::MadWide { .. }));
    rewrite(kernel, entries, |kernel, mut instruction| {
        let Op::MadWide { a, .. } = &mut instruction.op else { return vec![instruction] };
        let changed = kernel.add_register(Type::U32, instruction.origin.section);
        let change = Op::Add { ty: Type::U32, d: changed, a: *a, b: Operand::Constant(1) };
        *a = Operand::Register(changed);
        vec![Instruction { op: change, ..instruction.clone() }, instruction]
    })
}

/// The bound of what is copied is that of all keys.
fn copies_new_rows(kernel: &mut Kernel) -> usize {
    let bounds = Find::every(&["cached rows"], |op| matches!(op, Op::Min { .. }));
    change(kernel, bounds, |op| {
        if let Op::Min { a, b, .. } = op {
            *b = *a;
        }
    })
}

/// A growing cache that one launch and two give the same bits for.
#[derive(Debug)]
pub(super) struct FusedTrial {
    problem: KvCacheProblem,
    config: Config,
    plan: LaunchPlan,
    trial: KvCacheTrial,
}

impl FusedTrial {
    /// All of them.
    pub(super) fn all() -> Result<Vec<Self>, MutantsError> {
        [
            ("ampere-16x64-3stage-swizzled-4kvwarps-packgqa-3persistent-64chunk", RotaryStyle::Neox),
            ("ampere-32x32-2stage-swizzled-3splits", RotaryStyle::GptJ),
        ]
        .map(|(name, style)| Self::new(name, style))
        .into_iter()
        .collect()
    }

    fn new(name: &str, style: RotaryStyle) -> Result<Self, MutantsError> {
        let mut attention = Problem::new(5, 4, 9, 64, DType::F16).with_layout(Layout::Bshd);
        (attention.key_heads, attention.key_length, attention.seqused_k) = (2, 203, true);
        attention.mask = Mask::Causal(Alignment::BottomRight);
        (attention.leftpad_k, attention.kv_batch) = (true, Some(7));
        attention.paged = Some(PagedKv::new(16, 7 * 13 + 1, 13));
        let problem =
            KvCacheProblem::new(attention, 9).with_total_new(Some(31)).with_rotary(Rotary::new(style, 32, 210));
        let baseline = |complaint: String| MutantsError::Baseline {
            kernel: name.to_owned(),
            problem: problem.append_text(),
            complaint,
        };
        let config: Config = name.parse().map_err(|error| baseline(format!("{error}")))?;
        let plan = LaunchPlan::with_append(&problem, config, SIMULATED).map_err(MutantsError::Refused)?;
        let trial =
            KvCacheTrial::of(&problem, SequenceLengths::Ragged, 0).map_err(|error| baseline(error.to_string()))?;
        Ok(Self { problem, config, plan, trial })
    }

    /// The check that a kernel does not pass, and its complaint.
    fn killer(&self, kernel: &VerifiedKernel) -> Option<(Killer, String)> {
        match self.trial.verify_fused_kernel(self.config, kernel, 0) {
            Ok(verdict) => verdict.failures.first().map(|failure| (Killer::Gate, failure.to_string())),
            Err(NoVerdict::Simulator(error)) => Some((Killer::Fault, error.to_string())),
            Err(other) => Some((Killer::Gate, other.to_string())),
        }
    }
}

impl OtherTrial for FusedTrial {
    fn group(&self) -> Group {
        Group::FusedAppend
    }

    fn name(&self) -> String {
        format!("{} {}", self.config, self.problem.append_text())
    }

    fn kernel(&self) -> Result<VerifiedKernel, MutantsError> {
        Ok(VerifiedKernel::clone(&self.plan.attention().kernel()))
    }

    fn pass(&self) -> Result<(), MutantsError> {
        let kernel = self.kernel()?;
        match self.killer(&kernel) {
            None => Ok(()),
            Some((_, complaint)) => Err(MutantsError::Baseline {
                kernel: self.config.to_string(),
                problem: self.problem.append_text(),
                complaint,
            }),
        }
    }

    fn try_to_kill(&self, kernel: Kernel) -> Option<Kill> {
        let (by, report) = match kernel.verify(SIMULATED_ARCH) {
            Err(errors) => (Killer::Verifier, errors[0].to_string()),
            Ok(kernel) => self.killer(&kernel)?,
        };
        Some(Kill { by, report: super::one_line(&report), problem: self.name() })
    }
}
