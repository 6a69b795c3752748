//! Planted bugs in the Hopper kernel of 8-bit floats: transposition of values, order of keys, two levels, and scales.

use flashcore_ir::{Op, Operand, ShuffleMode, Type};

use super::Group;
use super::catalogue::{Mutation, is_mul, is_select, mutations};
use super::edit::{Find, change, drop};
use super::hopper::{is_arrival, is_mbarrier_wait};

/// Bugs of query, key and value in FP8.
pub const FP8_QUERY: &[Mutation] = mutations! { Group::Fp8Query;
    // Two levels
    "hopper": "fp8-query-promotion-missing", "one element of the product of a block is never added to the output" =>
        |kernel| drop(kernel, Find::nth(&["full block", "promote"], is_fma, 3));
    "hopper": "fp8-query-promotion-without-rescale", "the output is added to as if the row max had not risen" =>
        |kernel| change(kernel, Find::every(&["promote"], is_fma), |op| {
            if let Op::Fma { a, b, .. } = op && matches!(a, Operand::Register(_)) { *b = Operand::Constant(1f32.to_bits().into()); }
        });
    "hopper": "fp8-query-factors-of-the-next-block", "a block is added with the rescale factor of the next" =>
        |kernel| drop(kernel, Find::every(&["hold factors"], |op| matches!(op, Op::Mov { .. })));
    "hopper": "fp8-query-promoted-too-early", "the product of a block is added while it is multiplied" =>
        |kernel| drop(kernel, Find::nth(&["full block"], |op| matches!(op, Op::WgmmaWait { .. }), 1));
    "hopper": "fp8-query-products-of-blocks-added-up", "the product of a block is added to that of the block before" =>
        |kernel| change(kernel, Find::nth(&["full block", "output"], is_product, 0), |op| {
            if let Op::WgmmaFp8 { accumulation, c, d, .. } = op {
                (*accumulation, *c) = (flashcore_ir::Accumulation::Add, d.clone());
            }
        });

    // Slices of the columns
    "hopper": "fp8-query-columns-of-the-first-slice", "every slice of the columns is multiplied with those of the first" =>
        |kernel| change(kernel, Find::every(&["next slice"], is_offset), |op| {
            if let Op::Add { b, .. } = op { *b = Operand::Constant(0); }
        });
    "hopper": "fp8-query-slice-promoted-too-early", "a slice of the columns is added while it is multiplied" =>
        |kernel| drop(kernel, Find::nth(&["full block", "next slice"], |op| matches!(op, Op::WgmmaWait { .. }), 1));
    "hopper": "fp8-query-last-slice-not-promoted", "one element of the last slice of the columns is never added" =>
        |kernel| LAST_SLICE_SUMS.map(|sum| drop(kernel, Find::nth(&["full block", "promote"], is_fma, sum))).iter().sum();
    "hopper": "fp8-query-slices-added-up", "a slice of the columns is added to the one before" =>
        |kernel| change(kernel, Find::every(&["next slice"], is_product), |op| {
            if let Op::WgmmaFp8 { accumulation, c, d, .. } = op {
                (*accumulation, *c) = (flashcore_ir::Accumulation::Add, d.clone());
            }
        });

    // Pages, and keys that CTAs share
    "hopper": "fp8-query-values-of-the-first-page", "all rows of a block of values are of its first page" =>
        |kernel| change(kernel, Find::every(&["values", "copy"], is_lane_read), |op| {
            if let Op::Shuffle { index, .. } = op { *index = Operand::Constant(0); }
        });
    "hopper": "fp8-query-scales-of-the-first-page", "scales of tokens are of the first page of the cache" =>
        |kernel| change(kernel, Find::every(&["scale page"], is_wide_mad), |op| {
            if let Op::Mad { b, .. } = op { *b = Operand::Constant(0); }
        });
    "hopper": "fp8-query-blocks-of-other-ctas-transposed", "every block is transposed, also those of the other CTA of a cluster" =>
        |kernel| change(kernel, Find::every(&["transposer"], is_step_of_two), |op| {
            if let Op::Add { b, .. } = op { *b = Operand::Constant(u64::from(u32::MAX)); }
        });
    "hopper": "fp8-query-scale-of-the-first-packed-head", "rows of all heads of a tile have the scale of the first" =>
        |kernel| change(kernel, Find::every(&["scales"], |op| matches!(op, Op::Rem { .. })), |op| {
            if let Op::Rem { ty, d, .. } = op { *op = Op::Mov { ty: *ty, d: *d, a: Operand::Constant(0) }; }
        });

    // Values transposed, and the order of keys
    "hopper": "fp8-query-values-not-transposed", "values are written in the order in which they lie" =>
        |kernel| change(kernel, Find::every(&["transpose"], |op| matches!(op, Op::LoadMatrix { .. })), |op| {
            if let Op::LoadMatrix { transposed, .. } = op { *transposed = false; }
        });
    "hopper": "fp8-query-keys-of-values-exchanged", "eight keys of values are exchanged with the next eight" =>
        |kernel| change(kernel, Find::every(&["transpose"], is_permute), |op| {
            if let Op::Permute { a, b, .. } = op { core::mem::swap(a, b); }
        });
    "hopper": "fp8-query-columns-of-values-exchanged", "two columns of values are exchanged" =>
        |kernel| change(kernel, Find::every(&["transposer"], |op| is_select(op) && selects_bytes(op)), |op| {
            if let Op::Select { a, b, .. } = op { core::mem::swap(a, b); }
        });
    "hopper": "fp8-query-keys-permuted-in-p-only", "the weights of two keys are exchanged with those eight further on" =>
        |kernel| change(kernel, Find::every(&["full block"], is_join), |op| {
            if let Op::Pack { low, high, .. } = op { core::mem::swap(low, high); }
        });
    "hopper": "fp8-query-transposed-chunks-not-exchanged", "transposed values are written as if wgmma did not swizzle" =>
        |kernel| change(kernel, Find::nth(&["transposer"], |op| matches!(op, Op::Xor { .. }), 1), |op| {
            if let Op::Xor { b, .. } = op { *b = Operand::Constant(0); }
        });
    "hopper": "fp8-query-transposed-values-not-published", "wgmma reads transposed values that it need not see yet" =>
        |kernel| drop(kernel, Find::every(&["producer commit"], |op| matches!(op, Op::FenceProxyAsync {})));
    "hopper": "fp8-query-transposed-by-one-lane-alone", "a stage is handed over before all lanes have written it" =>
        |kernel| {
            let sections: [&[_]; 2] = [&["transposer", "consumer release"], &["producer commit"]];
            sections.map(|section| drop(kernel, Find::every(section, is_warp_sync))).iter().sum()
        };
    "hopper": "fp8-query-transposed-too-early", "values are transposed before they have arrived" =>
        |kernel| drop(kernel, Find::every(&["transposer", "consumer wait"], is_mbarrier_wait));
    "hopper": "fp8-query-transposed-over-values-in-use", "values are transposed into a stage that is still read" =>
        |kernel| drop(kernel, Find::every(&["transposer", "producer acquire"], is_mbarrier_wait));
    "hopper": "fp8-query-raw-values-not-released", "the stage of values as they came is never released" =>
        |kernel| drop(kernel, Find::every(&["transposer", "consumer release"], is_arrival));
    "hopper": "fp8-query-keys-past-the-end-kept", "values of keys that nobody attends are transposed as they are" =>
        |kernel| change(kernel, Find::every(&["transpose"], is_select), |op| {
            if let Op::Select { a, b, .. } = op { *b = *a; }
        });

    // Weights and scales
    "hopper": "fp8-query-weights-beyond-e4m3", "weights are 2^9 at the row max, and the largest saturate" =>
        |kernel| change(kernel, Find::every(&["row max"], is_weight_exponent), |op| {
            if let Op::Add { b, .. } = op { *b = Operand::Constant(9f32.to_bits().into()); }
        });
    "hopper": "fp8-query-sum-of-large-weights", "the row sum is not divided by the size of the weights" =>
        |kernel| drop(kernel, Find::nth(&["output scale"], is_mul, 0));
    "hopper": "fp8-query-scale-of-the-first-head", "every head has the scale of the first" =>
        |kernel| change(kernel, Find::every(&["scales"], is_wide_mad), |op| {
            if let Op::Mad { b, .. } = op { *b = Operand::Constant(0); }
        });
    "hopper": "fp8-query-scale-of-keys-missing", "the scale of keys that is not of a token is missing" =>
        |kernel| change(kernel, Find::every(&["scales"], is_single_mul), |op| {
            if let Op::Mul { ty, d, a, .. } = op { *op = Op::Mov { ty: *ty, d: *d, a: *a }; }
        });
    "hopper": "fp8-query-scales-of-keys-elsewhere", "scales of keys are read from where they are not" =>
        |kernel| change(kernel, Find::every(&["key scales"], |op| matches!(op, Op::Mad { ty: Type::U64, .. })), |op| {
            if let Op::Mad { c, b, .. } = op { *c = *b; }
        });
    "hopper": "fp8-query-column-without-scale", "some scores of keys with scales of their own lack them" =>
        |kernel| drop(kernel, Find::nth(&["full block", "key scales"], is_mul, 2));
    "hopper": "fp8-query-unit-of-values-missing", "the product of a block is not multiplied by the unit of its weights" =>
        |kernel| drop(kernel, Find::nth(&["value scales"], is_mul, 1));
};

/// A sum of the last of four slices of 64 columns, 32 elements of a lane: where tokens have scales, and where they have not.
const LAST_SLICE_SUMS: [usize; 2] = [3 * 64 + 5, 3 * 64 + 32 + 5];

/// The address of a slice of the columns.
fn is_offset(op: &Op) -> bool {
    matches!(op, Op::Add { ty: Type::U32, b: Operand::Constant(_), .. })
}

/// A register of another lane.
fn is_lane_read(op: &Op) -> bool {
    matches!(op, Op::Shuffle { mode: ShuffleMode::Index, .. })
}

/// From one block of a CTA to the next, in a cluster of two.
fn is_step_of_two(op: &Op) -> bool {
    matches!(op, Op::Add { ty: Type::S32, b: Operand::Constant(step), .. } if *step as u32 == (-2i32) as u32)
}

fn is_warp_sync(op: &Op) -> bool {
    matches!(op, Op::WarpSync {})
}

fn is_fma(op: &Op) -> bool {
    matches!(op, Op::Fma { .. })
}

fn is_product(op: &Op) -> bool {
    matches!(op, Op::WgmmaFp8 { .. })
}

fn is_permute(op: &Op) -> bool {
    matches!(op, Op::Permute { .. })
}

fn is_join(op: &Op) -> bool {
    matches!(op, Op::Pack { to: Type::U32, .. })
}

/// A choice between the selectors of byte permutes.
fn selects_bytes(op: &Op) -> bool {
    matches!(op, Op::Select { a: Operand::Constant(0x6420 | 0x7531), .. })
}

fn is_weight_exponent(op: &Op) -> bool {
    matches!(op, Op::Add { ty: Type::F32, b: Operand::Constant(bits), .. } if *bits == u64::from(8f32.to_bits()))
}

fn is_wide_mad(op: &Op) -> bool {
    matches!(op, Op::Mad { ty: Type::U64, .. })
}

fn is_single_mul(op: &Op) -> bool {
    matches!(op, Op::Mul { ty: Type::F32, .. })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::mutants::Trials;

    /// Every planted bug is noticed.
    #[test]
    fn every_bug_is_killed() {
        let trials = Trials::prepare(FP8_QUERY, |_, _, _| true).expect("kernels pass").expect("all of them");
        let fate = |mutation: &Mutation| trials.fate(*mutation).expect("something to change");
        let survivors: Vec<_> = FP8_QUERY.iter().filter(|mutation| fate(mutation).killed.is_none()).collect();
        assert!(survivors.is_empty(), "{:?}", survivors.iter().map(|mutation| mutation.name).collect::<Vec<_>>());
    }
}
