//! Bugs of the merge kernel, and their trials: few parts, which are loaded all at once, and many, with a ragged tail.

use flashcore_ir::{Arch, Compare, Kernel, Op, Operand, Type, VerifiedKernel};
use flashcore_kernels::{LaunchPlan, Stage};
use flashcore_problem::{DType, Inputs, MergeProblem};

use super::addressing::capped;
use super::catalogue::{Mutation, is_compare, is_select, mutations, take_second};
use super::chunks::one_fewer;
use super::edit::{Find, change, drop, parameter, rewrite_if};
use super::{Group, Kill, Killer, MutantsError, OtherTrial};
use crate::testkit::operations::{OperationError, check_merge_of};
use crate::testkit::suites;

/// The architecture that they are verified for.
const ARCH: Arch = Arch::Sm80;
/// Orders of warps of every trial.
const SEEDS: u64 = 2;

/// Wrong parts, weights and sums.
pub const MERGE: &[Mutation] = mutations! { Group::Merge;
    "merge": "merge-weights-by-the-lse-of-another", "parts from the third on have the weight of the LSE of the second" =>
        |kernel| capped(kernel, "part_lse_stride", 1);
    "merge": "merge-adds-another-part", "parts from the third on are read as the second" =>
        |kernel| capped(kernel, "part_stride", 1);
    "merge": "merge-parts-past-64", "parts past the 64th are read as the 64th" => |kernel| capped(kernel, "part_stride", 63);
    "merge": "merge-weights-in-base-two", "a natural LSE is taken as one of base two" => weights_in_base_two;
    "merge": "merge-sum-misses-a-part", "the weight of the second part is left out of the sum" =>
        |kernel| drop(kernel, Find::nth(&[], is_sum, 1));
    "merge": "merge-last-part-skipped", "the last part has no weight" =>
        |kernel| one_fewer(kernel, Find::every(&["parts"], is_part_test));
    "merge": "merge-tail-counted-again", "the last part counts once more for each that is missing in a step" =>
        |kernel| change(kernel, Find::every(&["parts"], is_part_test), |op| {
            if let Op::SetPredicate { b, .. } = op { *b = Operand::Constant(256); }
        });
    "merge": "merge-empty-part-counted", "an LSE of plus infinity is not taken as that of an empty part" =>
        |kernel| change(kernel, Find::every(&[], is_select), take_second);
    "merge": "merge-lse-without-the-largest", "the merged LSE leaves out the largest one" =>
        |kernel| change(kernel, Find::nth(&["epilogue"], |op| matches!(op, Op::Fma { .. }), 0), |op| {
            if let Op::Fma { c, .. } = op { *c = Operand::Constant(0); }
        });
};

fn is_sum(op: &Op) -> bool {
    matches!(op, Op::Add { ty: Type::F32, d, a: Operand::Register(a), .. } if a == d)
}

fn is_part_test(op: &Op) -> bool {
    is_compare(op, Compare::Lt)
}

fn weights_in_base_two(kernel: &mut Kernel) -> usize {
    let Some(factor) = parameter(kernel, "to_log2").map(Operand::Register) else { return 0 };
    let multiplies = |op: &Op| matches!(op, Op::Mul { b, .. } if *b == factor);
    rewrite_if(kernel, multiplies, |_, mut instruction| {
        if let Op::Mul { b, .. } = &mut instruction.op {
            *b = Operand::Constant(u64::from(1.0f32.to_bits()));
        }
        vec![instruction]
    })
}

/// A merge that the kernel as it is passes.
#[derive(Debug)]
pub(super) struct MergeTrial {
    problem: MergeProblem,
    plan: LaunchPlan,
    data: Inputs,
}

impl MergeTrial {
    /// All of them.
    pub(super) fn all() -> Result<Vec<Self>, MutantsError> {
        let small = [3, 6].map(|parts| MergeProblem::new(parts, 23, 3, 128, DType::F16));
        small.into_iter().chain(suites::merges()).map(Self::new).collect()
    }

    fn new(problem: MergeProblem) -> Result<Self, MutantsError> {
        let plan = LaunchPlan::merge(&problem, ARCH).map_err(MutantsError::Refused)?;
        let data = problem.random(0);
        Ok(Self { problem, plan, data })
    }

    fn baseline(&self, complaint: String) -> MutantsError {
        MutantsError::Baseline { kernel: "merge".to_owned(), problem: self.name(), complaint }
    }

    /// The check that a kernel does not pass, and its complaint.
    fn killer(&self, kernel: &VerifiedKernel) -> Option<(Killer, String)> {
        let plan = self.plan.with_kernel(Stage::Merge, kernel.clone());
        (0..SEEDS).find_map(|seed| match check_merge_of(&plan, &self.problem, &self.data, seed) {
            Ok(()) => None,
            Err(OperationError::Simulator(report)) => Some((Killer::Fault, report)),
            Err(OperationError::Wrong(report)) => Some((Killer::Gate, report)),
        })
    }
}

impl OtherTrial for MergeTrial {
    fn group(&self) -> Group {
        Group::Merge
    }

    fn name(&self) -> String {
        let MergeProblem { num_parts, tokens, heads, value_dim, .. } = self.problem;
        format!("merge {num_parts} parts {tokens}x{heads}x{value_dim}")
    }

    fn kernel(&self) -> Result<VerifiedKernel, MutantsError> {
        Ok(VerifiedKernel::clone(&self.plan.launches[0].kernel()))
    }

    fn pass(&self) -> Result<(), MutantsError> {
        let kernel = self.kernel()?;
        match self.killer(&kernel) {
            None => Ok(()),
            Some((_, complaint)) => Err(self.baseline(complaint)),
        }
    }

    fn try_to_kill(&self, kernel: Kernel) -> Option<Kill> {
        let (by, report) = match kernel.verify(ARCH) {
            Err(errors) => (Killer::Verifier, errors[0].to_string()),
            Ok(kernel) => self.killer(&kernel)?,
        };
        Some(Kill { by, report: super::one_line(&report), problem: self.name() })
    }
}
