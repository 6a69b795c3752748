//! One block of attention: a row panel and the keys of a KV tile, through QK, score modifiers, mask, softmax and PV.

use super::blocked::{KvTile, RowPanel};
use super::group::Group;
use super::score_mod;
use crate::driver::scratch::Arena;
use crate::microkernel::mask::LaneRanges;
use crate::microkernel::{
    AccumulateArgs, FullBlocksArgs, FusedForward, LaneRows, MultiplyArgs, Operands, Products, Softmax, SoftmaxArgs,
    SoftmaxOutcome, convert, padded,
};
use crate::simd::real::Real;
use std::ops::Range;

/// Scratch of one block. What lies past the end is left over from other blocks: it is computed with and never looked at.
pub(super) struct BlockScratch<'a, K: Products> {
    /// For each key of a tile, padded, a lane for each query row of a panel: products, scores, weights.
    scores: &'a mut [K::Real],
    weights: &'a mut [K::Packed],
    /// Factors by which the softmax of a panel rescales its output.
    row_scale: &'a mut [K::Real],
}

impl<'a, K: Products> BlockScratch<'a, K> {
    pub(super) fn take(arena: &mut Arena<'a>) -> Self {
        Self {
            scores: arena.take(padded(K::TILE_ROWS, K::ROW_BLOCK) * K::PANEL_LANES),
            weights: arena.take(K::weight_size(K::TILE_ROWS)),
            row_scale: arena.take(K::PANEL_LANES),
        }
    }
}

/// Attends the keys of several tiles that all rows of the panel attend, where the kernel can do that at once. Returns these
/// keys: none where it cannot.
pub(super) fn attend_full_blocks<K: FusedForward>(
    kernel: &K,
    group: &Group<'_>,
    tiles: &KvTile<'_, K>,
    panel: &mut RowPanel<'_, K>,
    scratch: &mut BlockScratch<'_, K>,
) -> Range<usize> {
    let first = tiles.keys.start;
    let none = first..first;
    let factor = K::Real::from_f64(group.scoring.factor());
    if K::PACKED_TILES == 1
        || !group.scoring.is_plain()
        || group.problem.mask_mod.is_some()
        || factor <= K::Real::ZERO
        || K::in_place(group.key, tiles.keys.clone()).is_some()
    {
        return none;
    }
    let (_, all) = group.attended_by(&panel.rows, &tiles.keys);
    let start = padded(all.start - first, K::ROW_ALIGNMENT);
    let end = all.end.saturating_sub(first) / K::ROW_ALIGNMENT * K::ROW_ALIGNMENT;
    if start >= end {
        return none;
    }
    panel.zero_if_first();
    let is_done = kernel.attend_full_blocks(FullBlocksArgs {
        head_dim: group.problem.head_dim,
        value_dim: group.problem.value_dim,
        lanes: panel.lanes(),
        keys: start..end,
        key: tiles.key,
        value: tiles.value,
        query: panel.query,
        factor,
        scores: scratch.scores,
        weights: scratch.weights,
        row_max: panel.row_max,
        row_sum: panel.row_sum,
        output: panel.output,
    });
    if is_done { first + start..first + end } else { none }
}

/// The keys of a tile that a panel attends.
struct Block {
    /// Keys that some row attends.
    any: Range<usize>,
    /// Keys that all rows attend.
    all: Range<usize>,
    /// The first key of the block: aligned for the kernel, at or before the first of `any`.
    first_key: usize,
    /// Keys of the block, counted from the first of the tile.
    keys: Range<usize>,
    lanes: usize,
    lane_rows: LaneRows,
}

impl Block {
    /// `None` if no row attends any of `keys`, which are some of `tile`.
    fn new<K: Products>(
        group: &Group<'_>,
        rows: &Range<usize>,
        tile: &Range<usize>,
        keys: &Range<usize>,
    ) -> Option<Self> {
        let (any, all) = group.attended_by(rows, keys);
        if any.is_empty() {
            return None;
        }
        let start = any.start - tile.start;
        let block_keys = start - start % K::ROW_ALIGNMENT..any.end - tile.start;
        let first_key = tile.start + block_keys.start;
        let lane_rows = LaneRows::new(|block| {
            if all.end == any.end {
                return block_keys.len();
            }
            let rows = rows.start..rows.end.min(rows.start + (block + 1) * K::LANE_BLOCK);
            group.attended_by(&rows, keys).0.end.saturating_sub(first_key).min(block_keys.len())
        });
        Some(Self { any, all, first_key, keys: block_keys, lanes: padded(rows.len(), K::LANE_BLOCK), lane_rows })
    }

    /// True if every row attends every key.
    fn is_full(&self, group: &Group<'_>) -> bool {
        self.all == (self.first_key..self.any.end) && group.problem.mask_mod.is_none()
    }

    /// True if no value that a weight of zero may be multiplied by is a NaN or an infinity.
    fn masked_values_are_finite<K: Products>(&self, kernel: &K, group: &Group<'_>, tile: &Range<usize>) -> bool {
        // A `mask_mod` may take out any key.
        let surely = if group.problem.mask_mod.is_some() { self.first_key..self.first_key } else { self.all.clone() };
        // A kernel that takes several keys at once multiplies those past the last by zero.
        let end = (tile.start + padded(self.keys.end, K::ROW_ALIGNMENT)).min(tile.end);
        let are_finite = |keys: Range<usize>| kernel.are_finite(group.value, keys);
        are_finite(self.first_key..surely.start.clamp(self.first_key, end))
            && are_finite(surely.end.max(self.first_key)..end)
    }

    /// Turns products into scores: modifiers, `score_mod`, `mask_mod` and mask.
    fn modify_and_mask<K: Softmax>(&self, kernel: &K, group: &Group<'_>, rows: &Range<usize>, scores: &mut [K::Real]) {
        let (first_key, lanes) = (self.first_key, self.lanes);
        let scores = &mut scores[..self.keys.len() * lanes];
        let places = rows.clone().map(|row| group.place(row));
        if let Some(terms) = group.scoring.lane_terms(first_key..self.any.end, places) {
            kernel.modify_scores(group.scoring.modifiers(&terms, 0, scores, lanes));
        }
        score_mod::apply(group, rows, first_key, scores, lanes);
        for keys in [first_key..self.all.start, self.all.end..self.any.end] {
            if !keys.is_empty() {
                let ranges = LaneRanges::new(keys.start, rows.clone().map(|row| group.attended(row)));
                let scores = &mut scores[(keys.start - first_key) * lanes..(keys.end - first_key) * lanes];
                kernel.mask(scores, lanes, &ranges);
            }
        }
    }
}

/// Attends those of some keys of a tile that the panel attends.
pub(super) fn attend_block<K: FusedForward>(
    kernel: &K,
    group: &Group<'_>,
    tile: &KvTile<'_, K>,
    keys: Range<usize>,
    panel: &mut RowPanel<'_, K>,
    scratch: &mut BlockScratch<'_, K>,
) {
    let Some(block) = Block::new::<K>(group, &panel.rows, &tile.keys, &keys) else { return };
    let (head_dim, value_dim) = (group.problem.head_dim, group.problem.value_dim);
    let (lanes, lane_rows, rows) = (block.lanes, block.lane_rows, block.keys.clone());
    let is_plain = group.scoring.is_plain();
    let factor = K::Real::from_f64(group.scoring.factor());
    // Nothing is done to plain scores between product and softmax, and a mask of minus infinity stays what it is where the
    // factor is above zero.
    let (early, late) =
        if is_plain && factor > K::Real::ZERO { (K::Real::ONE, factor) } else { (factor, K::Real::ONE) };
    let is_finite = block.masked_values_are_finite(kernel, group, &tile.keys);
    let mut softmax = SoftmaxArgs {
        lanes,
        rows: rows.len(),
        lane_rows,
        // Under ALiBi or a bias scores may well rise from tile to tile, and a `mask_mod` may leave nothing of the first.
        updates_row_max: !is_plain || group.problem.mask_mod.is_some(),
        factor: late,
        scores: scratch.scores,
        weights: scratch.weights,
        keeps_weights: !is_finite,
        row_max: panel.row_max,
        row_sum: panel.row_sum,
        row_scale: scratch.row_scale,
    };
    let operands = Operands { depth: head_dim, rows: rows.clone(), left: tile.key, right: panel.query };
    let mut is_done =
        is_plain && block.is_full(group) && late == factor && kernel.qk_softmax_fused(&operands, &mut softmax);
    while !is_done {
        let product = &mut *softmax.scores;
        kernel.multiply(MultiplyArgs { operands: &operands, lanes, lane_rows, factor: early, product });
        block.modify_and_mask(kernel, group, &panel.rows, softmax.scores);
        match kernel.online_softmax(&mut softmax) {
            SoftmaxOutcome::Done => is_done = true,
            SoftmaxOutcome::StaleRowMax => softmax.updates_row_max = true,
        }
    }
    if !is_finite {
        accumulate_attended(group, panel, &block, scratch);
        return;
    }
    kernel.accumulate(AccumulateArgs {
        columns: value_dim,
        lanes,
        rows,
        lane_rows,
        left: tile.value,
        weights: scratch.scores,
        packed_weights: scratch.weights,
        lane_scale: scratch.row_scale,
        sums: panel.output,
        is_first: std::mem::take(&mut panel.is_first),
        prefetch: panel.prefetch,
    });
}

/// Adds weights times values for attended keys only: a weight of zero does not hide a NaN or an infinity.
fn accumulate_attended<K: Products>(
    group: &Group<'_>,
    panel: &mut RowPanel<'_, K>,
    block: &Block,
    scratch: &BlockScratch<'_, K>,
) {
    let lanes = block.lanes;
    panel.zero_if_first();
    let output = &mut panel.output[..group.problem.value_dim * lanes];
    for column in output.chunks_exact_mut(lanes) {
        for (element, &factor) in column.iter_mut().zip(&*scratch.row_scale) {
            *element *= factor;
        }
    }
    for (key, weights) in (block.first_key..block.any.end).zip(scratch.scores.chunks_exact(lanes)) {
        let scale = group.scoring.scales.of_value(key).map(|scale| K::Real::from_f64(f64::from(scale)));
        convert::for_each(group.value.dtype(), group.value.row(key), |column, element: K::Real| {
            let element = scale.map_or(element, |scale| element * scale);
            let sums = &mut output[column * lanes..];
            for ((sum, &weight), row) in sums.iter_mut().zip(weights).zip(panel.rows.clone()) {
                if group.attended(row).contains(&key) && score_mod::takes_part(group, row, key) {
                    *sum += weight * element;
                }
            }
        });
    }
}
