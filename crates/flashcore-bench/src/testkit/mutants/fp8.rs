//! Planted bugs in keys and values of 8 bits: the wrong scale, codes that are widened to other numbers, columns exchanged.

use flashcore_ir::{Op, Operand, Type};

use super::Group;
use super::addressing::capped;
use super::catalogue::{Mutation, always_copy, is_mul, is_select, mutations};
use super::edit::{Find, change, drop};

/// Bugs of FP8 caches.
pub const FP8: &[Mutation] = mutations! { Group::Fp8;
    "ampere": "key-scale-of-another-head", "all KV heads have the key scales of the first" =>
        |kernel| capped(kernel, "k_scale_key_head_stride", 0);
    "ampere": "value-scale-of-another-head", "all KV heads have the value scales of the first" =>
        |kernel| capped(kernel, "v_scale_key_head_stride", 0);
    "ampere": "key-scale-of-another-sequence", "all sequences have the key scales of the first" =>
        |kernel| capped(kernel, "k_scale_sequence_stride", 0);
    "ampere": "value-scale-of-another-sequence", "all sequences have the value scales of the first" =>
        |kernel| capped(kernel, "v_scale_sequence_stride", 0);
    "ampere": "key-scale-of-another-page", "all pages, or batches, have the key scales of the first" =>
        |kernel| capped(kernel, "k_scale_batch_stride", 0);
    "ampere": "value-scale-of-the-first-token", "all tokens of a page have the value scale of the first" =>
        |kernel| capped(kernel, "v_scale_row_stride", 0);
    "ampere": "key-scales-one-token-off", "each pair of scores has the key scales of the pair after it" =>
        |kernel| change(kernel, Find::every(&["key scales"], is_load), next_pair);
    "ampere": "value-scales-one-token-off", "each pair of weights has the value scales of the pair after it" =>
        |kernel| change(kernel, Find::every(&["value scales"], is_load), next_pair);
    "ampere": "key-scale-forgotten-in-one-tile", "the scores of eight keys of a block lack their scales" =>
        |kernel| (0..4).map(|_| drop(kernel, Find::nth(&["key scales"], is_mul, 4))).sum();
    "ampere": "key-scale-forgotten-in-the-softmax-scale", "the one scale of all keys is not in the softmax scale" =>
        |kernel| change(kernel, Find::every(&["softmax scale"], is_mul), |op| {
            if let Op::Mul { ty, d, a, .. } = *op { *op = Op::Mov { ty, d, a }; }
        });
    "ampere": "value-scale-forgotten", "neither weights nor output are multiplied by the scales of values" =>
        |kernel| drop(kernel, Find::every(&["value scales"], is_mul));
    "ampere": "output-not-rescaled-to-a-new-power", "the output stays as it is when the power of a row grows" =>
        |kernel| drop(kernel, Find::every(&["value scales", "rescale"], is_mul));
    "ampere": "scale-tail-not-zero-filled", "scales of rows that no row attends are copied like the others" =>
        |kernel| change(kernel, Find::every(&["load scales"], is_select), always_copy);
    "ampere": "scales-not-copied", "scales of tokens are never copied to shared memory" =>
        |kernel| drop(kernel, Find::every(&["load scales"], |op| matches!(op, Op::CopyAsync { .. })));
    "ampere": "value-columns-exchanged", "even and odd columns of the values are exchanged" =>
        |kernel| change(kernel, Find::every(&["output", "widen fp8"], is_permute), |op| other_bytes(op, 0x1010));
    "ampere": "key-columns-exchanged", "columns of keys meet those of the query that are two further on" =>
        |kernel| change(kernel, Find::every(&["scores", "widen fp8"], is_permute), |op| other_bytes(op, 0x2020));
    "ampere": "nan-code-lost", "the NaN code of e4m3 becomes 480" =>
        |kernel| change(kernel, Find::every(&["widen fp8"], |op| is_and_with(op, NAN_FLAGS)), |op| {
            if let Op::And { b, .. } = op { *b = Operand::Constant(0); }
        });
    "ampere": "signs-lost", "codes lose their signs" =>
        |kernel| change(kernel, Find::every(&["scores", "widen fp8"], |op| is_and_with(op, SIGNS)), |op| {
            if let Op::And { b, .. } = op { *b = Operand::Constant(0); }
        });
};

/// Bits that the magnitude of a NaN code of `e4m3` carries into, for `f16`.
const NAN_FLAGS: u64 = 0x4000_4000;
const SIGNS: u64 = 0x8000_8000;

fn is_load(op: &Op) -> bool {
    matches!(op, Op::Load { ty: Type::F32, .. })
}

fn is_permute(op: &Op) -> bool {
    matches!(op, Op::Permute { .. })
}

fn is_and_with(op: &Op, bits: u64) -> bool {
    matches!(op, Op::And { b: Operand::Constant(constant), .. } if *constant == bits)
}

fn next_pair(op: &mut Op) {
    if let Op::Load { source, .. } = op {
        source.offset += 8;
    }
}

/// Chooses other bytes of a word, of those that are chosen at all.
fn other_bytes(op: &mut Op, bits: u64) {
    if let Op::Permute { selector: Operand::Constant(selector), .. } = op {
        *selector ^= bits;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::mutants::Trials;

    /// Every planted bug is noticed.
    #[test]
    fn every_bug_is_killed() {
        let trials = Trials::prepare(FP8, |_, _, _| true).expect("kernels pass").expect("all of them");
        let survivors: Vec<_> = FP8
            .iter()
            .filter(|mutation| trials.fate(**mutation).expect("something to change").killed.is_none())
            .map(|mutation| mutation.name)
            .collect();
        assert_eq!(survivors, [""; 0]);
    }
}
