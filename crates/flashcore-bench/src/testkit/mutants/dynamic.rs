//! Bugs of the dynamic scheduler: of its counter, and of the tiles that the producer broadcasts.

use flashcore_ir::{Op, Operand};

use super::Group;
use super::catalogue::{Mutation, mutations};
use super::edit::{Find, change, drop};
use super::hopper::is_mbarrier_wait;

/// Tiles that are left out, computed twice or taken for others; a counter or a slot that is used too early.
pub const DYNAMIC: &[Mutation] = mutations! { Group::Dynamic;
    "hopper": "tile-left-out", "every tile from the counter is taken as the one after it" =>
        |kernel| change(kernel, Find::nth(&["next tile"], |op| matches!(op, Op::Add { .. }), 0), |op| {
            if let Op::Add { d, b, ty, a } = *op { *op = Op::Mad { ty, d, a: Operand::Constant(2), b: a, c: b }; }
        });
    "hopper": "tile-taken-twice", "the tiles that CTAs begin with are taken from the counter again" =>
        |kernel| change(kernel, Find::nth(&["next tile"], |op| matches!(op, Op::Add { .. }), 0), |op| {
            if let Op::Add { b, .. } = op { *b = Operand::Constant(0); }
        });
    "hopper": "tile-slot-overwritten", "a tile is broadcast without waiting until its slot is empty" =>
        |kernel| drop(kernel, Find::every(&["broadcast", "producer acquire"], is_mbarrier_wait));
    "hopper": "tile-slot-read-too-early", "a slot is read before the tile is broadcast" =>
        |kernel| drop(kernel, Find::every(&["next tile", "consumer wait"], is_mbarrier_wait));
    "hopper": "tile-of-another-head", "consumers take the batch of a tile for its head" =>
        |kernel| change(kernel, Find::nth(&["broadcast"], |op| matches!(op, Op::Store { .. }), 0), |op| {
            if let Op::Store { a, .. } = op { a[1] = a[2]; }
        });
    "reset": "counter-not-reset", "the counter is left as it was" =>
        |kernel| drop(kernel, Find::every(&[], |op| matches!(op, Op::Store { .. })));
    "reset": "counter-begins-at-one", "the first tile of the counter is left out" =>
        |kernel| change(kernel, Find::every(&[], |op| matches!(op, Op::Mov { .. })), |op| {
            if let Op::Mov { a, .. } = op { *a = Operand::Constant(1); }
        });
};
