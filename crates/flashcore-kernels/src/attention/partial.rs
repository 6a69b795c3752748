//! What a CTA knows of a part of the keys, kept for the kernel that combines the parts.
//!
//! The workspace has, for each part and each row of the output, the row in `f32`, relative to the maximum of the part's
//! scores; and behind all of those, for each part and row, that maximum, in base 2, and the sum of the weights.

use flashcore_ir::types::{F32, U32, U64};
use flashcore_ir::{Builder, Compare, GlobalAddress, Reg, SpecialRegister};

use super::Work;
use super::ampere::Warp;
use crate::parameters::SplitParameters;
use crate::tile::{Accumulator, OnlineSoftmax};

/// Bytes of an `f32`.
const WORD_BYTES: u32 = 4;

/// Bytes of the workspace.
pub(crate) const fn workspace_bytes(num_splits: u64, rows: u64, value_dim: u64) -> u64 {
    num_splits * rows * (value_dim + 2) * WORD_BYTES as u64
}

/// Where what is known of one row of one part lies.
#[derive(Debug, Clone, Copy)]
pub(super) struct PartialRow {
    /// The address of its output.
    pub(super) output: Reg<U64>,
    /// The address of its maximum, which its sum stands behind.
    pub(super) sums: Reg<U64>,
}

impl PartialRow {
    /// That of a row, by its number among all, in a part.
    pub(super) fn new(
        k: &mut Builder,
        num_splits: SplitParameters,
        part: Reg<U32>,
        row: Reg<U64>,
        value_dim: u32,
    ) -> Self {
        let part = k.widen(part);
        let number = k.mad(part, num_splits.rows, row);
        let row_bytes = u64::from(value_dim * WORD_BYTES);
        let count = k.widen(num_splits.num_splits);
        let outputs = k.mul(count, num_splits.rows);
        let sums = k.mad(outputs, row_bytes, num_splits.workspace);
        Self {
            output: k.mad(number, row_bytes, num_splits.workspace),
            sums: k.mad(number, u64::from(2 * WORD_BYTES), sums),
        }
    }
}

/// Stores what the warp has for its rows.
pub(super) fn store_partials(
    k: &mut Builder,
    work: &Work,
    warp: &Warp,
    num_splits: SplitParameters,
    softmax: &OnlineSoftmax,
    output: &Accumulator,
) {
    let place = k.special(SpecialRegister::CtaX);
    let part = k.rem(place, num_splits.num_splits);
    let sums = softmax.partial(k);
    let value_dim = work.specialization.value_dim;
    let column = k.mul(warp.position.member, 2u32);
    for (index, (maximum, sum)) in sums.maximum.iter().zip(&sums.sum).enumerate() {
        let row = warp.row(k, work, index as u32);
        let exists = k.compare(Compare::Lt, row, work.row_count);
        let row = work.row_of_all(k, row);
        let partial = PartialRow::new(k, num_splits, part, row, value_dim);
        // The four lanes of a row have the same sums; one stores them.
        let first = k.compare(Compare::Eq, warp.position.member, 0u32);
        let stores = k.and(exists, first);
        k.when(stores, |k| k.store::<F32>(partial.sums, &[*maximum, *sum]));
        let lane_columns = k.mad_wide(column, WORD_BYTES, partial.output);
        let mut pair = Vec::new();
        output.each(|element_row, column, element| {
            if element_row != index {
                return;
            }
            pair.push(element);
            if let [left, right] = pair[..] {
                let column = column - 1;
                if column < value_dim {
                    let to = GlobalAddress::from(lane_columns).plus((column * WORD_BYTES) as i32);
                    k.when(exists, |k| k.store(to, &[left, right]));
                }
                pair.clear();
            }
        });
    }
}
