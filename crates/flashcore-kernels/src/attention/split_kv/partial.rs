//! Partial results of the KV splits of different CTAs, in a workspace that the combine kernel reads.
//!
//! The workspace has, for each split and each row of the output, the row in `f32`, relative to the row max of the split;
//! after all of those, for each split and row, that row max, in base 2, and the row sum.

use flashcore_ir::types::{F32, U32, U64};
use flashcore_ir::{Builder, Compare, GlobalAddress, Reg};

use crate::attention::TileContext;
use crate::parameters::SplitParameters;
use crate::primitives::{Accumulator, LaneColumns, OnlineSoftmax};

/// Bytes of an `f32`.
const WORD_BYTES: u32 = 4;

/// Bytes of the workspace.
pub(crate) const fn workspace_bytes(num_splits: u64, rows: u64, value_dim: u64) -> u64 {
    num_splits * rows * (value_dim + 2) * WORD_BYTES as u64
}

/// Addresses of the partial result of one row of one split.
#[derive(Debug, Clone, Copy)]
pub(super) struct PartialRow {
    /// The address of its output.
    pub(super) output: Reg<U64>,
    /// The address of its row max, which its row sum follows.
    pub(super) stats: Reg<U64>,
}

impl PartialRow {
    /// The row of an index among all rows, in a split.
    pub(super) fn new(
        k: &mut Builder,
        splits: SplitParameters,
        split: Reg<U32>,
        row: Reg<U64>,
        value_dim: u32,
    ) -> Self {
        let index = k.eval(split.widen().mul_add(splits.rows, row));
        let row_bytes = u64::from(value_dim * WORD_BYTES);
        let outputs = splits.num_splits.widen() * splits.rows;
        let stats = k.eval(outputs.mul_add(row_bytes, splits.workspace));
        Self {
            output: k.mad(index, row_bytes, splits.workspace),
            stats: k.mad(index, u64::from(2 * WORD_BYTES), stats),
        }
    }
}

/// Stores the partial result of the rows of a warp. `rows` are those of the lane, which is the `member`-th of the four that
/// have them, with `columns`.
pub(crate) fn store_partials(
    k: &mut Builder,
    context: &TileContext,
    (rows, member, columns): (&[Reg<U32>], Reg<U32>, LaneColumns),
    (splits, split): (SplitParameters, Reg<U32>),
    softmax: &OnlineSoftmax,
    output: &Accumulator,
) {
    let stats = softmax.row_stats(k);
    let value_dim = context.specialization.value_dim;
    let column = k.mul(member, columns.lane_step());
    for (index, (row_max, row_sum)) in stats.row_max.iter().zip(&stats.row_sum).enumerate() {
        let row = rows[index];
        let exists = k.compare(Compare::Lt, row, context.end_row);
        let row = context.global_row(k, row);
        let partial = PartialRow::new(k, splits, split, row, value_dim);
        // The four lanes of a row have the same statistics; one stores them.
        let stores = k.eval(exists & member.eq(0));
        k.when(stores, |k| k.store::<F32>(partial.stats, &[*row_max, *row_sum]));
        let lane_columns = k.mad_wide(column, WORD_BYTES, partial.output);
        let mut pair = Vec::new();
        output.each(|element_row, column, element| {
            if element_row != index {
                return;
            }
            pair.push(element);
            if let [left, right] = pair[..] {
                let column = columns.of_lane_0(column - 1);
                if column < value_dim {
                    let to = GlobalAddress::from(lane_columns).plus((column * WORD_BYTES) as i32);
                    k.when(exists, |k| k.store(to, &[left, right]));
                }
                pair.clear();
            }
        });
    }
}
