//! Split-KV among the CTAs of a cluster, whose partial results are merged through shared memory (DSMEM) in the same launch.
//!
//! Each CTA stores its partial result in its own shared memory: rows of `f32` relative to the row max of the split, then
//! row max, in base 2, and row sum of each row. After a barrier of the cluster every thread of every CTA merges some
//! columns of some row, of all splits in the order of keys.

use flashcore_ir::types::{F32, U32};
use flashcore_ir::{Builder, Compare, Reg, SharedAddress};

use crate::attention::TileContext;
use crate::attention::epilogue::store_lse;
use crate::attention::sm80::element::TensorElement;
use crate::attention::sm80::epilogue::store_chunk;
use crate::primitives::{Accumulator, LaneColumns, OnlineSoftmax, lse_log2, normalize_row};
use flashcore_problem::Operand;

/// Bytes of an `f32`.
const WORD_BYTES: u32 = 4;
/// Bytes between rows, so that the lanes of a fragment store to different banks.
const ROW_PADDING: u32 = 32;
/// Columns that a thread has beside each other.
const COLUMNS: u32 = 4;
/// Bytes of row max and row sum.
const STATS_BYTES: u32 = 2 * WORD_BYTES;

/// Shared memory for the partial result of a CTA.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClusterMerge {
    /// The address of row 0.
    address: Reg<U32>,
    ctas: u32,
    rows: u32,
    value_dim: u32,
}

impl ClusterMerge {
    /// Reserves memory for `rows` rows, in clusters of `ctas` CTAs.
    pub(crate) fn reserve(k: &mut Builder, ctas: u32, rows: u32, value_dim: u32) -> Self {
        let offset = k.reserve_shared(rows * (row_bytes(value_dim) + STATS_BYTES), 16);
        let base = k.shared_base();
        Self { address: k.add(base, offset), ctas, rows, value_dim }
    }

    fn row(self, k: &mut Builder, row: Reg<U32>) -> Reg<U32> {
        k.mad(row, row_bytes(self.value_dim), self.address)
    }

    fn stats(self, k: &mut Builder, row: Reg<U32>) -> SharedAddress {
        let address = k.mad(row, STATS_BYTES, self.address);
        SharedAddress::from(address).plus((self.rows * row_bytes(self.value_dim)) as i32)
    }

    /// Stores the partial result of the rows of a warp. `rows` are those of the lane in the tile, which is the `member`-th of
    /// the four that have them, with `columns`.
    pub(crate) fn store_partials(
        self,
        k: &mut Builder,
        (rows, member, columns): (&[Reg<U32>], Reg<U32>, LaneColumns),
        softmax: &OnlineSoftmax,
        output: &Accumulator,
    ) {
        let stats = softmax.row_stats(k);
        let is_first = k.compare(Compare::Eq, member, 0u32);
        for (index, (row_max, row_sum)) in stats.row_max.iter().zip(&stats.row_sum).enumerate() {
            let to = self.stats(k, rows[index]);
            k.when(is_first, |k| k.store_shared(to, &[*row_max, *row_sum]));
            let row = self.row(k, rows[index]);
            let lane_columns = k.mad(member, columns.lane_step() * WORD_BYTES, row);
            let mut pair = Vec::new();
            output.each(|element_row, column, element| {
                if element_row != index {
                    return;
                }
                pair.push(element);
                if let [left, right] = pair[..] {
                    let column = columns.of_lane_0(column - 1);
                    if column < self.value_dim {
                        let to = SharedAddress::from(lane_columns).plus((column * WORD_BYTES) as i32);
                        k.store_shared(to, &[left, right]);
                    }
                    pair.clear();
                }
            });
        }
    }

    /// Merges the partial results of all CTAs of the cluster, and stores output and LSE. Every thread of the cluster takes
    /// part.
    pub(crate) fn merge<T: TensorElement>(
        self,
        k: &mut Builder,
        context: &TileContext,
        (thread, threads): (Reg<U32>, u32),
    ) {
        k.cluster_sync();
        let rank = k.cluster_rank();
        let first = k.mad(rank, threads, thread);
        let per_row = self.value_dim / COLUMNS;
        let target = context.output(k);
        for step in (0..self.rows * per_row).step_by((self.ctas * threads) as usize) {
            let index = k.add(first, step);
            let row = k.div(index, per_row);
            let part = k.eval(index - row * per_row);
            let query_row = k.add(context.first_row, row);
            let exists = k.eval(query_row.lt(context.end_row) & row.lt(self.rows));
            k.if_then(exists, |k| {
                let (row_max, row_sum, columns) = self.merge_columns(k, row, part);
                let sink = context.sink(k);
                let form = context.specialization.lse_form;
                let lse_of_keys = (!form.includes_sink).then(|| lse_log2(k, row_max, row_sum, form.base));
                let (row_max, inverse) = normalize_row(k, row_max, row_sum, sink);
                let scaled = columns.map(|column| k.mul(column, inverse));
                let words = T::words(k, &scaled);
                let to = target.row(k, row);
                let to = k.mad_wide(part, COLUMNS * T::LAYOUT.bytes, to);
                store_chunk(k, to.into(), &words, target.vec_bytes.min(COLUMNS * T::LAYOUT.bytes), exists);
                if context.specialization.has(Operand::Lse) {
                    let lse = lse_of_keys.unwrap_or_else(|| lse_log2(k, row_max, row_sum, form.base));
                    store_lse(k, context, (query_row, exists), part, lse);
                }
            });
        }
        // Nobody ends while others read its shared memory.
        k.cluster_sync();
    }

    /// Row max, row sum and some columns of a row, of all splits.
    fn merge_columns(
        self,
        k: &mut Builder,
        row: Reg<U32>,
        part: Reg<U32>,
    ) -> (Reg<F32>, Reg<F32>, [Reg<F32>; COLUMNS as usize]) {
        let stats = self.stats(k, row);
        let row_address = self.row(k, row);
        let columns = k.mad(part, COLUMNS * WORD_BYTES, row_address);
        let splits: Vec<_> = (0..self.ctas)
            .map(|rank| {
                let stats = k.map_shared(stats, rank);
                let stats = k.load_cluster::<F32>(stats, 2);
                let columns = k.map_shared(columns, rank);
                (stats, k.load_cluster::<F32>(columns, COLUMNS))
            })
            .collect();
        let row_max = k.copy(f32::NEG_INFINITY);
        for (stats, _) in &splits {
            k.max_to(row_max, stats[0]);
        }
        let none = k.compare(Compare::Eq, row_max, f32::NEG_INFINITY);
        let shift = k.select(none, 0.0f32, row_max);
        let row_sum = k.copy(0.0f32);
        let merged = [(); COLUMNS as usize].map(|()| k.copy(0.0f32));
        for (stats, columns) in &splits {
            let exponent = k.sub(stats[0], shift);
            let factor = k.exp2(exponent);
            k.fma_to(row_sum, stats[1], factor);
            for (merged, column) in merged.iter().zip(columns) {
                k.fma_to(*merged, *column, factor);
            }
        }
        (row_max, row_sum, merged)
    }
}

/// Bytes from one row to the next.
const fn row_bytes(value_dim: u32) -> u32 {
    value_dim * WORD_BYTES + ROW_PADDING
}
