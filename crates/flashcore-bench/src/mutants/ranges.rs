//! The bugs planted where a formula leaves tiles of keys: in the small kernel that finds them, and in what is made of it.

use flashcore_ir::{Op, Operand, ReduceOp, Space, Type};

use super::catalogue::{Mutation, is_barrier, mutations};
use super::edit::{Find, change, drop};
use super::hopper::{is_arrival, is_mbarrier_wait};

/// All of them.
pub const RANGES: &[Mutation] = mutations! {
    "ranges": "warps-do-not-meet", "warps read what others have found before it is there" =>
        |kernel| drop(kernel, Find::every(&["all warps"], is_barrier));
    "ranges": "first-key-too-late", "tiles begin at the last key that some row attends" =>
        |kernel| change(kernel, Find::every(&["first key"], is_lower), higher);
    "ranges": "first-key-of-one-warp", "tiles begin at the first key that the rows of one warp attend, not those of all" =>
        |kernel| change(kernel, Find::every(&["first key", "all warps"], is_reduction), |op| reduce_by(op, ReduceOp::Max));
    "ranges": "tiles-behind-the-first-forgotten", "no tile of keys behind the first is looked at" =>
        |kernel| change(kernel, Find::every(&["may attend", "all warps"], is_reduction), |op| reduce_by(op, ReduceOp::Min));
    "ranges": "tiles-known-too-early", "what is known of the tiles is gathered before all of it is" =>
        |kernel| drop(kernel, Find::every(&["tiles"], is_barrier));
    "ranges": "cut-tiles-called-whole", "every tile counts as one that all rows attend" =>
        |kernel| change(kernel, Find::every(&["tiles"], |op| is_choice(op, 2)), always);
    "ranges": "tiles-called-empty", "no tile counts as one that is attended" =>
        |kernel| change(kernel, Find::every(&["tiles"], |op| is_choice(op, 1)), |op| {
            if let Op::Select { a, .. } = op { *a = Operand::Constant(0); }
        });
    "ranges": "last-tile-of-one-lane", "the last attended tile is the first one that a lane has found" =>
        |kernel| change(kernel, Find::nth(&["gather"], is_reduction, 1), |op| reduce_by(op, ReduceOp::Min));
    "ranges": "cut-tiles-before-whole-ones", "tiles that are cut on the left count as whole" =>
        |kernel| change(kernel, Find::nth(&["gather"], is_reduction, 3), |op| reduce_by(op, ReduceOp::Min));
    "ranges": "rows-of-another-part", "all rows of a CTA have the tiles of its first" =>
        |kernel| change(kernel, Find::every(&["gather"], |op| matches!(op, Op::Mad { c: Operand::Register(_), b: Operand::Constant(2), .. })), |op| {
            if let Op::Mad { c, .. } = op { *c = Operand::Constant(0); }
        });
    "ranges": "origin-not-stored", "where tiles begin is not stored" =>
        |kernel| drop(kernel, Find::every(&["gather"], |op| matches!(op, Op::Store { space: Space::Global, count: 1, .. })));
    "hopper": "tiles-begin-at-key-0", "tiles are counted from the first key, not from where they begin" =>
        |kernel| change(kernel, Find::every(&["tile ranges"], |op| matches!(op, Op::Load { count: 1, .. })), |op| {
            if let Op::Load { ty, d, .. } = op { *op = Op::Mov { ty: *ty, d: d[0], a: Operand::Constant(0) }; }
        });
    "hopper": "tiles-of-others-kept", "a warpgroup does not let go of the tiles of another" =>
        |kernel| drop(kernel, Find::nth(&["tiles of others", "release"], is_arrival, 0));
    "hopper": "tiles-of-others-let-go-early", "a warpgroup lets go of the tiles of another before they are there" =>
        |kernel| drop(kernel, Find::every(&["tiles of others", "wait for full"], is_mbarrier_wait));
};

fn is_reduction(op: &Op) -> bool {
    matches!(op, Op::ReduceWarp { .. })
}
/// The lower of two keys in registers.
fn is_lower(op: &Op) -> bool {
    matches!(op, Op::Min { ty: Type::S32, a: Operand::Register(_), b: Operand::Register(_), .. })
}
/// A flag, or none.
fn is_choice(op: &Op, flag: u64) -> bool {
    matches!(op, Op::Select { a: Operand::Constant(yes), b: Operand::Constant(0), .. } if *yes == flag)
}

fn higher(op: &mut Op) {
    if let Op::Min { ty, d, a, b } = op {
        *op = Op::Max { ty: *ty, d: *d, a: *a, b: *b };
    }
}
fn always(op: &mut Op) {
    if let Op::Select { a, b, .. } = op {
        *b = *a;
    }
}
fn reduce_by(op: &mut Op, by: ReduceOp) {
    if let Op::ReduceWarp { op, .. } = op {
        *op = by;
    }
}
