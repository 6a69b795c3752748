//! Planted bugs in products of 8-bit floats by `mma.sync`: columns and keys of values, two levels, and scales.

use flashcore_ir::{Op, Operand, Type};

use super::Group;
use super::addressing::capped;
use super::catalogue::{Mutation, is_mul, mutations};
use super::edit::{Find, change, drop};

/// Bugs of query, key and value in FP8 where a warp multiplies them.
pub const FP8_MMA: &[Mutation] = mutations! { Group::Fp8Mma;
    // Two levels
    "ampere": "fp8-mma-promotion-missing", "one element of the product of a block is never added to the output" =>
        |kernel| drop(kernel, Find::nth(&["promote"], is_promotion, 3));
    "ampere": "fp8-mma-promotion-without-rescale", "the output is added to as if the row max had not risen" =>
        |kernel| change(kernel, Find::every(&["promote"], is_promotion), |op| match op {
            Op::Fma { b, .. } => *b = Operand::Constant(1f32.to_bits().into()),
            // Where the output is rescaled before, it is added to twice.
            Op::Add { a, b, .. } => *a = *b,
            _ => {}
        });
    "ampere": "fp8-mma-products-added-up", "the product of 16 columns begins with what its registers held" =>
        |kernel| drop(kernel, Find::every(&["output"], is_zero));
    "ampere": "fp8-mma-product-left-out", "the product of the first 32 keys with eight columns is missing" =>
        |kernel| drop(kernel, Find::nth(&["output"], is_product, 1));

    // Values: columns and keys
    "ampere": "fp8-mma-value-columns-exchanged", "even and odd columns of the values are exchanged" =>
        |kernel| change(kernel, Find::every(&["output"], is_permute), |op| {
            if let Op::Permute { selector: Operand::Constant(selector), .. } = op { *selector ^= 0x1111; }
        });
    "ampere": "fp8-mma-values-not-transposed", "values are multiplied in the order in which they lie" =>
        |kernel| change(kernel, Find::every(&["output"], |op| matches!(op, Op::LoadMatrix { .. })), |op| {
            if let Op::LoadMatrix { transposed, .. } = op { *transposed = false; }
        });
    "ampere": "fp8-mma-keys-of-values-exchanged", "eight keys of values are exchanged with the next eight" =>
        |kernel| change(kernel, Find::every(&["output"], is_permute), |op| {
            if let Op::Permute { a, b, .. } = op { core::mem::swap(a, b); }
        });
    "ampere": "fp8-mma-keys-permuted-in-p-only", "the weights of two keys are exchanged with those eight further on" =>
        |kernel| change(kernel, Find::every(&["output"], |op| matches!(op, Op::Pack { to: Type::U32, .. })), |op| {
            if let Op::Pack { low, high, .. } = op { core::mem::swap(low, high); }
        });

    // Weights
    "ampere": "fp8-mma-weights-beyond-e4m3", "weights are 2^9 at the row max, and the largest saturate" =>
        |kernel| change(kernel, Find::every(&["row max"], is_weight_exponent), |op| {
            if let Op::Add { b, .. } = op { *b = Operand::Constant(9f32.to_bits().into()); }
        });
    "ampere": "fp8-mma-sum-of-large-weights", "the row sum is not divided by the size of the weights" =>
        |kernel| drop(kernel, Find::nth(&["output scale"], is_mul, 0));

    // Scales
    "ampere": "fp8-mma-query-scale-of-another-kv-head", "all KV heads have the query scales of the first" =>
        |kernel| capped(kernel, "q_scale_key_head_stride", 0);
    "ampere": "fp8-mma-query-scale-of-another-head", "all query heads of a KV head have the scales of its first" =>
        |kernel| capped(kernel, "q_scale_query_head_stride", 0);
    "ampere": "fp8-mma-query-scale-of-another-sequence", "all sequences have the query scales of the first" =>
        |kernel| capped(kernel, "q_scale_sequence_stride", 0);
    "ampere": "fp8-mma-query-scale-of-another-batch", "all batches have the query scales of the first" =>
        |kernel| capped(kernel, "q_scale_batch_stride", 0);
    "ampere": "fp8-mma-query-scale-of-the-first-row", "all rows have the query scale of the first" =>
        |kernel| capped(kernel, "q_scale_row_stride", 0);
    "ampere": "fp8-mma-query-scale-missing", "scores are not multiplied by the scales of the query" =>
        |kernel| change(kernel, Find::every(&["scales"], is_fold), |op| {
            if let Op::Mul { ty, d, b, .. } = op { *op = Op::Mov { ty: *ty, d: *d, a: *b }; }
        });
    "ampere": "fp8-mma-output-in-the-unit-before", "the output stays as it is when the unit of a row changes" =>
        |kernel| drop(kernel, Find::every(&["value scales"], |op| matches!(op, Op::Mov { ty: Type::F32, .. })));

    // The output goes out where the query lay.
    "ampere": "fp8-mma-query-overwritten-too-early", "the output is written where other warps still read the query" =>
        |kernel| drop(kernel, Find::every(&["release query"], |op| matches!(op, Op::BarrierSync { .. })));
};

fn is_promotion(op: &Op) -> bool {
    matches!(op, Op::Fma { .. } | Op::Add { ty: Type::F32, .. })
}

fn is_zero(op: &Op) -> bool {
    matches!(op, Op::Mov { ty: Type::F32, a: Operand::Constant(0), .. })
}

fn is_product(op: &Op) -> bool {
    matches!(op, Op::MmaFp8 { .. })
}

fn is_permute(op: &Op) -> bool {
    matches!(op, Op::Permute { .. })
}

fn is_weight_exponent(op: &Op) -> bool {
    matches!(op, Op::Add { ty: Type::F32, b: Operand::Constant(bits), .. } if *bits == u64::from(8f32.to_bits()))
}

/// The product of a row's scale and the softmax scale.
fn is_fold(op: &Op) -> bool {
    matches!(op, Op::Mul { ty: Type::F32, b: Operand::Register(_), .. })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::mutants::Trials;

    /// Every planted bug is noticed.
    #[test]
    fn every_bug_is_killed() {
        let trials = Trials::prepare(FP8_MMA, |_, _, _| true).expect("kernels pass").expect("all of them");
        let fate = |mutation: &Mutation| trials.fate(*mutation).expect("something to change");
        let survivors: Vec<_> = FP8_MMA.iter().filter(|mutation| fate(mutation).killed.is_none()).collect();
        assert!(survivors.is_empty(), "{:?}", survivors.iter().map(|mutation| mutation.name).collect::<Vec<_>>());
    }
}
