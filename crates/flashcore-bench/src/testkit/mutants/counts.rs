//! Bugs that show where a count is large, or where the largest score comes late.

use flashcore_ir::{Instruction, Kernel, Op, Operand, Type};

use super::Group;
use super::addressing::capped;
use super::catalogue::{Mutation, mutations};
use super::edit::{Find, rewrite};
use super::numeric::skipped_from;

/// Splits and chunks that are forgotten from some number on, and rescaling that is right for scores of usual size.
pub const COUNTS: &[Mutation] = mutations! { Group::Counts;
    "combine": "row-max-of-32-splits", "the row max is that of the first 32 splits" =>
        |kernel| skipped_from(kernel, Find::nth(&["row max"], is_max, 0), 1);
    "combine": "splits-past-64-have-no-sum", "row sums of splits past the 64th are left out" =>
        |kernel| skipped_from(kernel, Find::nth(&["splits"], |op| matches!(op, Op::Fma { .. }), 0), 2);
    "combine": "splits-past-64-are-the-64th", "splits past the 64th are read as the 64th" => |kernel| capped(kernel, "rows", 63);
    "ampere": "splits-stored-past-64", "splits past the 64th are stored as the 64th" => |kernel| capped(kernel, "rows", 63);
    "ampere": "rescale-never-below", "an output is rescaled by 1/256 at least" =>
        |kernel| at_least(kernel, Find::every(&["softmax", "row max"], is_exp2));
    "hopper": "rescale-never-below", "an output is rescaled by 1/256 at least" =>
        |kernel| at_least(kernel, Find::every(&["row max"], is_exp2));
};

fn is_max(op: &Op) -> bool {
    matches!(op, Op::Max { ty: Type::F32, .. })
}

fn is_exp2(op: &Op) -> bool {
    matches!(op, Op::Exp2 { .. })
}

/// The powers of two found are 1/256 at least.
fn at_least(kernel: &mut Kernel, find: Find) -> usize {
    let least = Operand::Constant(u64::from((1.0f32 / 256.0).to_bits()));
    rewrite(kernel, find, |_, instruction| {
        let Op::Exp2 { ty, d, .. } = instruction.op else { return vec![instruction] };
        let raised = Op::Max { ty, d, a: Operand::Register(d), b: least };
        vec![instruction.clone(), Instruction { op: raised, ..instruction }]
    })
}
