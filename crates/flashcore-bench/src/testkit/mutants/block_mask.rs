//! Bugs in the block mask: in the kernel that precomputes it from a `mask_mod`, and in the kernel that reads it.

use flashcore_ir::{Compare, Op, Operand, ReduceOp, ShuffleMode, Space, Type};

use super::catalogue::{Mutation, is_barrier, is_compare, mutations, set_compare};
use super::edit::{Find, change, drop};
use super::hopper::{is_arrival, is_mbarrier_wait};

/// Of the instructions that take the lower of two rows, the first so many are for the row after that of each lane.
const LANES: usize = 32;

/// All of them.
pub const BLOCK_MASK: &[Mutation] = mutations! {
    "ranges": "warps-do-not-meet", "warps read what others have found before it is there" =>
        |kernel| drop(kernel, Find::every(&["all warps"], is_barrier));
    "ranges": "first-key-too-late", "tiles begin at the last key that some row attends" =>
        |kernel| change(kernel, Find::every(&["attended keys"], is_lower), higher);
    "ranges": "first-key-of-one-warp", "tiles begin at the first key that the rows of one warp attend, not those of all" =>
        |kernel| change(kernel, Find::nth(&["attended keys", "all warps"], is_reduction, 0), |op| reduce_by(op, ReduceOp::Max));
    "ranges": "tiles-after-the-first-forgotten", "no tile of keys after the first is looked at" =>
        |kernel| change(kernel, Find::every(&["may attend", "all warps"], is_reduction), |op| reduce_by(op, ReduceOp::Min));
    "ranges": "tiles-known-too-early", "what is known of the tiles is gathered before all of it is" =>
        |kernel| drop(kernel, Find::every(&["classify"], is_barrier));
    "ranges": "partial-tiles-called-full", "every tile counts as full" =>
        |kernel| change(kernel, Find::every(&["classify"], |op| is_choice(op, 2)), always);
    "ranges": "tiles-called-empty", "no tile counts as one that is attended" =>
        |kernel| change(kernel, Find::every(&["classify"], |op| is_choice(op, 1)), |op| {
            if let Op::Select { a, .. } = op { *a = Operand::Constant(0); }
        });
    "ranges": "last-tile-of-one-lane", "the last attended tile is the first one that a lane has found" =>
        |kernel| change(kernel, Find::nth(&["store record"], is_reduction, 1), |op| reduce_by(op, ReduceOp::Min));
    "ranges": "partial-tiles-before-full-ones", "tiles that are partial on the left count as full" =>
        |kernel| change(kernel, Find::nth(&["store record"], is_reduction, 3), |op| reduce_by(op, ReduceOp::Min));
    "ranges": "rows-of-another-part", "all rows of a CTA have the tiles of its first" =>
        |kernel| change(kernel, Find::every(&["store record"], |op| matches!(op, Op::Mad { c: Operand::Register(_), b: Operand::Constant(2), .. })), |op| {
            if let Op::Mad { c, .. } = op { *c = Operand::Constant(0); }
        });
    "ranges": "last-key-of-one-warp", "keys end after the last that the rows of one warp attend, not those of all" =>
        |kernel| change(kernel, Find::nth(&["attended keys", "all warps"], is_reduction, 1), |op| reduce_by(op, ReduceOp::Min));
    "ranges": "extent-not-stored", "which rows and keys a tile has is not stored" =>
        |kernel| drop(kernel, Find::nth(&["store record"], is_global_store, 1));
    "ranges": "boundaries-read-too-early", "a warp makes tiles of rows before all document boundaries are found" =>
        |kernel| drop(kernel, Find::nth(&["rows"], is_barrier, 1));
    "ranges": "rows-read-too-early", "warps go on before it is known which rows they have" =>
        |kernel| drop(kernel, Find::nth(&["rows"], is_barrier, 2));
    "ranges": "rows-past-a-boundary", "a tile of rows does not end where the next one begins" =>
        |kernel| change(kernel, Find::nth(&["tile rows"], is_lower_row, LANES), |op| {
            if let Op::Min { ty, d, a, .. } = op { *op = Op::Mov { ty: *ty, d: *d, a: *a }; }
        });
    "ranges": "tiles-before-not-counted", "tiles of rows before a document boundary are not counted" =>
        |kernel| change(kernel, Find::every(&["tile rows"], is_below), |op| {
            set_compare(op, Compare::Ne);
        });
    "hopper": "tiles-begin-at-key-0", "keys are copied from the first on, not from where tiles begin" =>
        |kernel| change(kernel, Find::every(&["producer", "keys"], is_key_of_tile), |op| {
            if let Op::Mad { c, .. } = op { *c = Operand::Constant(0); }
        });
    "hopper": "rows-of-the-next-tile-overwritten", "a copy stores rows that a tile does not have" =>
        |kernel| change(kernel, Find::every(&["epilogue", "write output"], is_above), |op| {
            set_compare(op, Compare::Lt);
        });
    "hopper": "tiles-sorted-too-early", "tiles are sorted before all of them are there to be sorted" =>
        |kernel| drop(kernel, Find::nth(&["sorted tiles"], is_barrier, 0));
    "hopper": "order-read-too-early", "tiles are taken before all of them are sorted" =>
        |kernel| drop(kernel, Find::nth(&["sorted tiles"], is_barrier, 1));
    "hopper": "tiles-counted-twice", "a thread adds what it has counted to itself, and not what another has" =>
        |kernel| change(kernel, Find::nth(&["sorted tiles"], is_butterfly, 0), |op| {
            if let Op::Shuffle { index, .. } = op { *index = Operand::Constant(0); }
        });
    "hopper": "work-info-read-too-early", "work-tile info is read before it has arrived" =>
        |kernel| drop(kernel, Find::every(&["work info", "consumer wait"], is_mbarrier_wait));
    "hopper": "work-info-overwritten", "work-tile info is written before that of the tile before has been read" =>
        |kernel| drop(kernel, Find::every(&["work info", "producer acquire"], is_mbarrier_wait));
    "hopper": "work-info-without-expect-tx", "there is no expect_tx for the bytes of work-tile info" =>
        |kernel| change(kernel, Find::every(&["producer", "work info"], |op| matches!(op, Op::Add { b: Operand::Constant(_), .. })), |op| {
            if let Op::Add { b, .. } = op { *b = Operand::Constant(0); }
        });
    "hopper": "work-info-of-another-warpgroup", "a warpgroup reads which KV blocks another has" =>
        |kernel| change(kernel, Find::every(&["work info"], |op| matches!(op, Op::Mad { b: Operand::Constant(16), .. })), |op| {
            if let Op::Mad { b, .. } = op { *b = Operand::Constant(0); }
        });
    "hopper": "tiles-of-others-kept", "a warpgroup does not release the KV blocks of another" =>
        |kernel| drop(kernel, Find::nth(&["skipped blocks", "consumer release"], is_arrival, 0));
    "hopper": "tiles-of-others-released-early", "a warpgroup releases the KV blocks of another before they are there" =>
        |kernel| drop(kernel, Find::every(&["skipped blocks", "consumer wait"], is_mbarrier_wait));
};

fn is_reduction(op: &Op) -> bool {
    matches!(op, Op::ReduceWarp { .. })
}
/// The lower of two keys in registers.
fn is_lower(op: &Op) -> bool {
    matches!(op, Op::Min { ty: Type::S32, a: Operand::Register(_), b: Operand::Register(_), .. })
}
/// The lower of two rows in registers.
fn is_lower_row(op: &Op) -> bool {
    matches!(op, Op::Min { ty: Type::U32, a: Operand::Register(_), b: Operand::Register(_), .. })
}
/// True if one number is compared as below or above another.
fn is_below(op: &Op) -> bool {
    is_compare(op, Compare::Lt)
}
fn is_above(op: &Op) -> bool {
    is_compare(op, Compare::Gt)
}
fn is_butterfly(op: &Op) -> bool {
    matches!(op, Op::Shuffle { mode: ShuffleMode::Butterfly, .. })
}
fn is_global_store(op: &Op) -> bool {
    matches!(op, Op::Store { space: Space::Global, .. })
}
/// The first key of a tile, from where tiles begin on.
fn is_key_of_tile(op: &Op) -> bool {
    matches!(op, Op::Mad { ty: Type::S32, c: Operand::Register(_), .. })
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
