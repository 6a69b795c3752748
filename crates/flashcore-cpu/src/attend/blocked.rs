//! Tiles of query rows and tiles of keys: which attend_block, and what happens when they do.

use crate::attend::group::Group;
use crate::attend::score_mod;
use crate::driver::scratch::{Arena, arena_bytes};
use crate::microkernel::convert;
use crate::microkernel::mask::LaneRanges;
use crate::microkernel::prefetch::{CacheLines, PrefetchPlan};
use crate::microkernel::{
    FullBlocksArgs, LaneKeys, Microkernel, PvArgs, QkArgs, QkOperands, SoftmaxArgs, SoftmaxOutcome, padded,
};
use crate::simd::real::Real;
use flashcore_problem::Problem;
use std::ops::Range;

/// Keys of one tile, unless a kernel wants others. The scores of a strip of 32 query rows are then 16 KiB, which stay in a first-level cache between
/// the two products, and keys and values of 128 columns 64 KiB each, which stay in a second-level cache. A mask wastes
/// no more with large tiles than with small ones, since each strip takes only the keys of a tile that it attends.
pub(crate) const KV_TILE: usize = 128;

/// No kernel has larger tiles.
pub(crate) const MAX_KV_TILE: usize = 256;

/// No strip has more lanes than this.
pub(crate) const MAX_LANES: usize = 64;

/// The bytes that [`attend_rows`] takes of an arena for so many rows.
pub(crate) fn scratch_bytes<K: Microkernel>(problem: &Problem, rows: usize) -> usize {
    let (head_dim, value_dim) = (problem.head_dim, problem.value_dim);
    let panels = panels_kept::<K>(problem, rows);
    let packed = [
        panels * K::query_size(head_dim),
        packed_tiles::<K>(problem) * K::key_size(head_dim, K::KV_TILE),
        packed_tiles::<K>(problem) * K::value_size(value_dim, K::KV_TILE),
        K::weight_size(K::KV_TILE),
    ];
    let real = [
        panels * padded(value_dim, K::VALUE_BLOCK) * K::PANEL_ROWS,
        panels * K::PANEL_ROWS,
        panels * K::PANEL_ROWS,
        padded(K::KV_TILE, K::KEY_BLOCK) * K::PANEL_ROWS,
        K::PANEL_ROWS,
        value_dim * K::PANEL_ROWS,
    ];
    packed.iter().map(|&count| arena_bytes::<K::Packed>(count)).sum::<usize>()
        + real.iter().map(|&count| arena_bytes::<K::Real>(count)).sum::<usize>()
}

/// Tiles that are packed before the first strip meets them.
fn packed_tiles<K: Microkernel>(problem: &Problem) -> usize {
    problem.key_length.div_ceil(K::KV_TILE).clamp(1, K::PACKED_TILES)
}

/// Strips that are kept: where all keys are packed at once, a strip is done before the next begins.
fn panels_kept<K: Microkernel>(problem: &Problem, rows: usize) -> usize {
    if problem.key_length <= packed_tiles::<K>(problem) * K::KV_TILE { 1 } else { rows.div_ceil(K::PANEL_ROWS) }
}

/// Query rows that have attended their keys, still side by side in lanes.
pub(crate) struct AttendedPanel<'a, R> {
    pub(crate) rows: Range<usize>,
    /// The maximum of each lane; those behind the rows mean nothing.
    pub(crate) row_max: &'a [R],
    pub(crate) row_sum: &'a [R],
    /// The weighted sums, a row of lanes for each column.
    pub(crate) columns: &'a [R],
    /// BlockScratch for them as rows.
    pub(crate) rows_scratch: &'a mut [R],
}

/// The attention of `rows`, which begin with a strip, to `keys`, which begin with a tile. Hands each strip to `deliver`,
/// which will write to `output_lines` its rows.
pub(crate) fn attend_rows<K: Microkernel>(
    kernel: &K,
    group: &Group<'_>,
    rows: Range<usize>,
    keys: Range<usize>,
    arena: &mut Arena<'_>,
    output_lines: impl Fn(&Range<usize>) -> CacheLines,
    mut deliver: impl FnMut(AttendedPanel<'_, K::Real>),
) {
    const { assert!(K::PANEL_ROWS <= MAX_LANES && K::KV_TILE.is_multiple_of(K::KEY_ALIGNMENT)) };
    const { assert!(MAX_KV_TILE.is_multiple_of(K::KV_TILE)) };
    let (head_dim, value_dim) = (group.problem.head_dim, group.problem.value_dim);
    let panels = rows.len().div_ceil(K::PANEL_ROWS);
    let kept = panels_kept::<K>(group.problem, rows.len());
    let (query_size, output_size) = (K::query_size(head_dim), padded(value_dim, K::VALUE_BLOCK) * K::PANEL_ROWS);
    let query = arena.take::<K::Packed>(kept * query_size);
    let output = arena.take::<K::Real>(kept * output_size);
    let row_max = arena.take::<K::Real>(kept * K::PANEL_ROWS);
    let row_sum = arena.take::<K::Real>(kept * K::PANEL_ROWS);
    let (key_size, value_size) = (K::key_size(head_dim, K::KV_TILE), K::value_size(value_dim, K::KV_TILE));
    let at_once = packed_tiles::<K>(group.problem);
    let packed_key = arena.take::<K::Packed>(at_once * key_size);
    let packed_value = arena.take::<K::Packed>(at_once * value_size);
    let in_rows = arena.take::<K::Real>(value_dim * K::PANEL_ROWS);
    let mut scratch = BlockScratch {
        scores: arena.take(padded(K::KV_TILE, K::KEY_BLOCK) * K::PANEL_ROWS),
        weights: arena.take(K::weight_size(K::KV_TILE)),
        row_scale: arena.take(K::PANEL_ROWS),
    };
    let panel_rows = |index: usize| {
        let first = rows.start + index * K::PANEL_ROWS;
        first..rows.end.min(first + K::PANEL_ROWS)
    };

    // Keys that no row of the group attends are as good as not there: neither their bits nor their number matter. Tiles
    // begin and end with those that some row does, whichever rows are here, so that a strip gives the same bits with any.
    let keys = group.attended_of(&keys);
    let (attended, _) = group.attended_by(&rows, &keys);
    let last_key = keys.end;
    let first = attended.start - (attended.start - keys.start) % K::KV_TILE;
    let span = at_once * K::KV_TILE;
    // Rows that attend nothing have an output too.
    for start in (first..attended.end.max(first + 1)).step_by(span) {
        let keys = start..attended.end.min(start + span);
        let tile_keys = |start: usize| start..last_key.min(start + K::KV_TILE);
        let starts = || keys.clone().step_by(K::KV_TILE);
        let rooms = packed_key.chunks_exact_mut(key_size).zip(packed_value.chunks_exact_mut(value_size));
        for (keys, (key, value)) in starts().map(tile_keys).zip(rooms) {
            if K::in_place(group.key, keys.clone()).is_none() {
                kernel.pack_keys(group.key, keys.clone(), key);
            }
            if K::in_place(group.value, keys.clone()).is_none() {
                kernel.pack_values(group.value, keys, value);
            }
        }
        for index in 0..panels {
            let place = index % kept;
            let query = &mut query[place * query_size..][..query_size];
            let mut panel = RowPanel::<K> {
                rows: panel_rows(index),
                query,
                output: &mut output[place * output_size..][..output_size],
                row_max: &mut row_max[place * K::PANEL_ROWS..][..K::PANEL_ROWS],
                row_sum: &mut row_sum[place * K::PANEL_ROWS..][..K::PANEL_ROWS],
                is_first: start == first,
                prefetch: PrefetchPlan::NOTHING,
            };
            let lanes = padded(panel.rows.len(), K::LANE_BLOCK);
            if start + span >= attended.end {
                panel.prefetch.output = output_lines(&panel.rows);
            }
            if K::FUSED_PREFETCH {
                panel.prefetch.tile = share_of_tile(group, keys.end..attended.end.min(keys.end + span), index, panels);
            }
            if start == first {
                let next = panel_rows(index + 1);
                match group.query.bytes(&next).filter(|_| K::FUSED_PREFETCH) {
                    Some(bytes) => panel.prefetch.query = CacheLines::new(bytes),
                    None => group.query.prefetch(next),
                }
                kernel.pack_query(group.query, panel.rows.clone(), lanes, panel.query);
                panel.row_max.fill(K::Real::NEGATIVE_INFINITY);
                panel.row_sum.fill(K::Real::ZERO);
            }
            let packed = PackedKeys::<K> { keys: keys.clone(), key: packed_key, value: packed_value };
            let done = attend_full_blocks(kernel, group, &packed, &mut panel, &mut scratch);
            let rooms = packed_key.chunks_exact(key_size).zip(packed_value.chunks_exact(value_size));
            for (keys, (key, value)) in starts().map(tile_keys).zip(rooms) {
                let tile = PackedKeys::<K> {
                    key: K::in_place(group.key, keys.clone()).unwrap_or(key),
                    value: K::in_place(group.value, keys.clone()).unwrap_or(value),
                    keys: keys.clone(),
                };
                for keys in [keys.start..keys.end.min(done.start), keys.start.max(done.end)..keys.end] {
                    if !keys.is_empty() {
                        attend_block(kernel, group, &tile, keys, &mut panel, &mut scratch);
                    }
                }
            }
            // No key of theirs has been met yet.
            panel.fill_first();
            if start + span >= attended.end {
                deliver(AttendedPanel {
                    rows: panel.rows,
                    row_max: &panel.row_max[..lanes],
                    row_sum: &panel.row_sum[..lanes],
                    columns: &panel.output[..value_dim * lanes],
                    rows_scratch: &mut in_rows[..value_dim * lanes],
                });
            }
        }
    }
}

/// What one of so many panels asks for of the keys and values that come next, so that all of them ask for all.
fn share_of_tile(group: &Group<'_>, keys: Range<usize>, panel: usize, panels: usize) -> [CacheLines; 2] {
    let share = keys.len().div_ceil(panels);
    let start = keys.end.min(keys.start + panel * share);
    let those = start..keys.end.min(start + share);
    [group.key, group.value].map(|head| CacheLines::of_rows(head, &those))
}

/// Query rows side by side in vector lanes, and what has become of them so far.
struct RowPanel<'a, K: Microkernel> {
    rows: Range<usize>,
    query: &'a mut [K::Packed],
    /// A row of lanes for each column of the value, padded.
    output: &'a mut [K::Real],
    row_max: &'a mut [K::Real],
    row_sum: &'a mut [K::Real],
    /// Whether nothing has been written to the output, which is taken as zero.
    is_first: bool,
    /// What is needed after the strip and a tile have met.
    prefetch: PrefetchPlan,
}

impl<K: Microkernel> RowPanel<'_, K> {
    /// Writes an output of zero where nothing has been written.
    fn fill_first(&mut self) {
        if self.is_first {
            self.output.fill(K::Real::ZERO);
            self.is_first = false;
        }
    }
}

/// Keys and values, packed or in place.
struct PackedKeys<'a, K: Microkernel> {
    keys: Range<usize>,
    key: &'a [K::Packed],
    value: &'a [K::Packed],
}

/// What a strip and a tile need while they attend_block. What lies past the end was left there by others: it is computed with
/// and never looked at.
struct BlockScratch<'a, K: Microkernel> {
    /// For each key of a tile, padded, a lane for each query row of a strip: products, scores, weights.
    scores: &'a mut [K::Real],
    weights: &'a mut [K::Packed],
    /// What the softmax of a strip says its output is to be multiplied by.
    row_scale: &'a mut [K::Real],
}

/// The strip attends keys that all of its rows attend, where the kernel can do many of them at once. Returns which; where it
/// cannot, none.
fn attend_full_blocks<K: Microkernel>(
    kernel: &K,
    group: &Group<'_>,
    tiles: &PackedKeys<'_, K>,
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
    let start = padded(all.start - first, K::KEY_ALIGNMENT);
    let end = all.end.saturating_sub(first) / K::KEY_ALIGNMENT * K::KEY_ALIGNMENT;
    if start >= end {
        return none;
    }
    panel.fill_first();
    let is_done = kernel.attend_full_blocks(FullBlocksArgs {
        head_dim: group.problem.head_dim,
        value_dim: group.problem.value_dim,
        lanes: padded(panel.rows.len(), K::LANE_BLOCK),
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

/// The strip attends what it attends of some keys of a tile.
fn attend_block<K: Microkernel>(
    kernel: &K,
    group: &Group<'_>,
    tile: &PackedKeys<'_, K>,
    keys: Range<usize>,
    panel: &mut RowPanel<'_, K>,
    scratch: &mut BlockScratch<'_, K>,
) {
    let those = keys;
    let (any, all) = group.attended_by(&panel.rows, &those);
    if any.is_empty() {
        return;
    }
    let start = any.start - tile.keys.start;
    let keys = start - start % K::KEY_ALIGNMENT..any.end - tile.keys.start;
    let first_key = tile.keys.start + keys.start;
    let lanes = padded(panel.rows.len(), K::LANE_BLOCK);

    let factor = K::Real::from_f64(group.scoring.factor());
    // Nothing is done to plain scores between product and softmax, and a mask of minus infinity stays what it is
    // where the factor is above zero.
    let (early, late) = if K::SCALES_IN_SOFTMAX && group.scoring.is_plain() && factor > K::Real::ZERO {
        (K::Real::ONE, factor)
    } else {
        (factor, K::Real::ONE)
    };
    let lane_keys = LaneKeys::new(|block| {
        if all.end == any.end {
            return keys.len();
        }
        let rows = panel.rows.start..panel.rows.end.min(panel.rows.start + (block + 1) * K::LANE_BLOCK);
        group.attended_by(&rows, &those).0.end.saturating_sub(first_key).min(keys.len())
    });
    // Any key may be one that a formula takes out.
    let takes_out = group.problem.mask_mod.is_some();
    let surely = if takes_out { first_key..first_key } else { all.clone() };
    // A kernel that takes several keys at once multiplies those behind the last by zero.
    let end = (tile.keys.start + padded(keys.end, K::KEY_ALIGNMENT)).min(tile.keys.end);
    let are_finite = |keys: Range<usize>| kernel.are_finite(group.value, keys);
    let is_finite =
        are_finite(first_key..surely.start.clamp(first_key, end)) && are_finite(surely.end.max(first_key)..end);
    let is_plain = group.scoring.is_plain();
    let factors =
        QkOperands { head_dim: group.problem.head_dim, keys: keys.clone(), key: tile.key, query: panel.query };
    let mut softmax = SoftmaxArgs {
        lanes,
        keys: keys.len(),
        lane_keys,
        // Under ALiBi or a bias scores may well rise from tile to tile, and a formula may leave nothing of the first.
        updates_row_max: !is_plain || takes_out,
        factor: late,
        scores: scratch.scores,
        weights: scratch.weights,
        keeps_weights: !is_finite,
        row_max: panel.row_max,
        row_sum: panel.row_sum,
        row_scale: scratch.row_scale,
    };
    let is_whole = all == (first_key..any.end) && !takes_out;
    let mut is_done = is_plain && is_whole && late == factor && kernel.qk_softmax_fused(factors, &mut softmax);
    while !is_done {
        kernel.qk_product(QkArgs {
            head_dim: group.problem.head_dim,
            lanes,
            keys: keys.clone(),
            lane_keys,
            key: tile.key,
            query: panel.query,
            factor: early,
            scores: softmax.scores,
        });
        let scores = &mut softmax.scores[..keys.len() * lanes];
        let places = panel.rows.clone().map(|row| group.place(row));
        if let Some(terms) = group.scoring.lane_terms(first_key, places) {
            kernel.modify_scores(group.scoring.modifiers(&terms, 0, scores, lanes));
        }
        score_mod::apply(group, &panel.rows, first_key, scores, lanes);
        for keys in [first_key..all.start, all.end..any.end] {
            if !keys.is_empty() {
                let ranges = LaneRanges::new(keys.start, panel.rows.clone().map(|row| group.attended(row)));
                let scores = &mut scores[(keys.start - first_key) * lanes..(keys.end - first_key) * lanes];
                kernel.mask(scores, lanes, &ranges);
            }
        }
        match kernel.online_softmax(&mut softmax) {
            SoftmaxOutcome::Done => is_done = true,
            SoftmaxOutcome::StaleRowMax => softmax.updates_row_max = true,
        }
    }
    if !is_finite {
        accumulate_attended(group, panel, first_key..any.end, scratch, lanes);
        return;
    }
    kernel.pv_product(PvArgs {
        value_dim: group.problem.value_dim,
        lanes,
        keys,
        lane_keys,
        value: tile.value,
        scores: scratch.scores,
        weights: scratch.weights,
        row_scale: scratch.row_scale,
        output: panel.output,
        is_first: std::mem::take(&mut panel.is_first),
        prefetch: panel.prefetch,
    });
}

/// Adds weights times values for attended keys only: a weight of zero does not hide a NaN or an infinity.
fn accumulate_attended<K: Microkernel>(
    group: &Group<'_>,
    panel: &mut RowPanel<'_, K>,
    keys: Range<usize>,
    scratch: &BlockScratch<'_, K>,
    lanes: usize,
) {
    panel.fill_first();
    let output = &mut panel.output[..group.problem.value_dim * lanes];
    for column in output.chunks_exact_mut(lanes) {
        for (element, &factor) in column.iter_mut().zip(&*scratch.row_scale) {
            *element *= factor;
        }
    }
    for (key, weights) in keys.zip(scratch.scores.chunks_exact(lanes)) {
        convert::for_each(group.value.dtype(), group.value.row(key), |column, element: K::Real| {
            let sums = &mut output[column * lanes..];
            for ((sum, &weight), row) in sums.iter_mut().zip(weights).zip(panel.rows.clone()) {
                if group.attended(row).contains(&key) && score_mod::takes_part(group, row, key) {
                    *sum += weight * element;
                }
            }
        });
    }
}
