//! Planted bugs in the products of `f32` on tensor cores: lost parts, the wrong key, chains that are too long.

use flashcore_ir::{Kernel, Op, Rounding, Type};

use super::Group;
use super::catalogue::{Mutation, is_mma, mutations};
use super::edit::{Find, change, drop, rewrite};

/// Bugs of 3xTF32.
pub const TF32: &[Mutation] = mutations! { Group::Tf32;
    "ampere": "scores-without-a-low-product", "the scores lack the product of the rest of the query and the keys" =>
        |kernel| drop_each_third(kernel, &["scores"], 0);
    "ampere": "scores-without-the-other-low-product", "the scores lack the product of the query and the rest of the keys" =>
        |kernel| drop_each_third(kernel, &["scores"], 1);
    "ampere": "output-without-a-low-product", "the output lacks the product of the rest of the weights and the values" =>
        |kernel| drop_each_third(kernel, &["output"], 0);
    "ampere": "output-without-the-other-low-product", "the output lacks the product of the weights and the rest of the values" =>
        |kernel| drop_each_third(kernel, &["output"], 1);
    "ampere": "one-low-product-missing", "one product of a rest is missing" =>
        |kernel| drop(kernel, Find::nth(&["output"], is_mma, 4));
    "ampere": "keys-of-values-not-permuted", "the weights of two keys are exchanged with those of two others" =>
        |kernel| change(kernel, Find::every(&["output"], is_mma), |op| {
            if let Op::Mma { a, .. } = op { a.swap(1, 2); }
        });
    "ampere": "odd-keys-for-even-ones", "the two rows of values that a lane loads are exchanged" =>
        |kernel| change(kernel, Find::every(&["output"], is_mma), |op| {
            if let Op::Mma { b, .. } = op { b.swap(0, 1); }
        });
    "ampere": "rest-of-the-wrong-part", "the rest is taken from the value and not from what was rounded off" =>
        |kernel| change(kernel, Find::every(&["output"], is_f32_sub), |op| {
            if let Op::Sub { d, a, .. } = op { *op = Op::Mov { ty: Type::F32, d: *d, a: *a }; }
        });
    "ampere": "rounding-left-out-once", "the first part is cut off and has no rest" => |kernel| unrounded(kernel);
};

fn is_f32_sub(op: &Op) -> bool {
    matches!(op, Op::Sub { ty: Type::F32, .. })
}

/// Drops every third product of a section, from `first` on: a product of three has a place in their order.
fn drop_each_third(kernel: &mut Kernel, section: &'static [&'static str], first: usize) -> usize {
    let mut number = 0;
    let find = Find::every(section, is_mma);
    let count = rewrite(kernel, find, |_, instruction| {
        let is_dropped = number % 3 == first;
        number += 1;
        if is_dropped { Vec::new() } else { vec![instruction] }
    });
    count / 3
}

/// Reads the bits of a value as `tf32`, without rounding: the tensor core ignores those that it does not have, and the
/// rest, which is taken from all of them, is nothing.
fn unrounded(kernel: &mut Kernel) -> usize {
    let is_conversion = |op: &Op| matches!(op, Op::Convert { to: Type::Tf32, rounding: Rounding::NearestAway, .. });
    let find = Find::every(&["output"], is_conversion);
    let rounded = change(kernel, find, |op| {
        if let Op::Convert { d, a, .. } = op {
            *op = Op::Reinterpret { to: Type::Tf32, from: Type::F32, d: *d, a: *a };
        }
    });
    let is_mask = |op: &Op| matches!(op, Op::And { ty: Type::U32, .. });
    rounded
        + change(kernel, Find::every(&["output"], is_mask), |op| {
            if let Op::And { d, a, .. } = op {
                *op = Op::Mov { ty: Type::U32, d: *d, a: *a };
            }
        })
}
