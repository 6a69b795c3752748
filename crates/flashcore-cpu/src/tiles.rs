//! Tiles of query rows and tiles of keys: which meet, and what happens when they do.

use crate::expressions;
use crate::group::Group;
use crate::masking::LaneRanges;
use crate::microkernel::{
    Factors, LaneKeys, Lines, Microkernel, OutputProduct, ScoreProduct, Soon, Strip, Weighed, WholeMeeting, padded,
};
use crate::pack;
use crate::real::Real;
use crate::scratch::{Arena, arena_bytes};
use flashcore_problem::Problem;
use std::ops::Range;

/// Keys of one tile, unless a kernel wants others. The scores of a strip of 32 query rows are then 16 KiB, which stay in a first-level cache between
/// the two products, and keys and values of 128 columns 64 KiB each, which stay in a second-level cache. A mask wastes
/// no more with large tiles than with small ones, since each strip takes only the keys of a tile that it attends.
pub(crate) const KEY_TILE: usize = 128;

/// No kernel has larger tiles.
pub(crate) const MOST_KEY_TILE: usize = 256;

/// No strip has more lanes than this.
pub(crate) const MOST_LANES: usize = 64;

/// The bytes that [`attend_rows`] takes of an arena for so many rows.
pub(crate) fn scratch_bytes<K: Microkernel>(problem: &Problem, rows: usize) -> usize {
    let (head_dim, value_dim) = (problem.head_dim, problem.value_dim);
    let strips = strips_kept::<K>(problem, rows);
    let packed = [
        strips * K::query_size(head_dim),
        tiles_at_once::<K>(problem) * K::key_size(head_dim, K::KEY_TILE),
        tiles_at_once::<K>(problem) * K::value_size(value_dim, K::KEY_TILE),
        K::weight_size(K::KEY_TILE),
    ];
    let real = [
        strips * padded(value_dim, K::VALUE_BLOCK) * K::STRIP,
        strips * K::STRIP,
        strips * K::STRIP,
        padded(K::KEY_TILE, K::KEY_BLOCK) * K::STRIP,
        K::STRIP,
        value_dim * K::STRIP,
    ];
    packed.iter().map(|&count| arena_bytes::<K::Packed>(count)).sum::<usize>()
        + real.iter().map(|&count| arena_bytes::<K::Real>(count)).sum::<usize>()
}

/// Tiles that are packed before the first strip meets them.
fn tiles_at_once<K: Microkernel>(problem: &Problem) -> usize {
    problem.key_length.div_ceil(K::KEY_TILE).clamp(1, K::TILES_AT_ONCE)
}

/// Strips that are kept: where all keys are packed at once, a strip is done before the next begins.
fn strips_kept<K: Microkernel>(problem: &Problem, rows: usize) -> usize {
    if problem.key_length <= tiles_at_once::<K>(problem) * K::KEY_TILE { 1 } else { rows.div_ceil(K::STRIP) }
}

/// Query rows that have attended their keys, still side by side in lanes.
pub(crate) struct AttendedStrip<'a, R> {
    pub(crate) rows: Range<usize>,
    /// The maximum of each lane; those behind the rows mean nothing.
    pub(crate) maximum: &'a [R],
    pub(crate) sum: &'a [R],
    /// The weighted sums, a row of lanes for each column.
    pub(crate) columns: &'a [R],
    /// Room for them as rows.
    pub(crate) room: &'a mut [R],
}

/// The attention of `rows`, which begin with a strip, to `keys`, which begin with a tile. Hands each strip to `deliver`,
/// which will write to `place_of` its rows.
pub(crate) fn attend_rows<K: Microkernel>(
    kernel: &K,
    group: &Group<'_>,
    rows: Range<usize>,
    keys: Range<usize>,
    arena: &mut Arena<'_>,
    place_of: impl Fn(&Range<usize>) -> Lines,
    mut deliver: impl FnMut(AttendedStrip<'_, K::Real>),
) {
    const { assert!(K::STRIP <= MOST_LANES && K::KEY_TILE.is_multiple_of(K::FIRST_KEY_BLOCK)) };
    const { assert!(MOST_KEY_TILE.is_multiple_of(K::KEY_TILE)) };
    let (head_dim, value_dim) = (group.problem.head_dim, group.problem.value_dim);
    let strips = rows.len().div_ceil(K::STRIP);
    let kept = strips_kept::<K>(group.problem, rows.len());
    let (query_size, output_size) = (K::query_size(head_dim), padded(value_dim, K::VALUE_BLOCK) * K::STRIP);
    let query = arena.take::<K::Packed>(kept * query_size);
    let output = arena.take::<K::Real>(kept * output_size);
    let maximum = arena.take::<K::Real>(kept * K::STRIP);
    let sum = arena.take::<K::Real>(kept * K::STRIP);
    let (key_size, value_size) = (K::key_size(head_dim, K::KEY_TILE), K::value_size(value_dim, K::KEY_TILE));
    let at_once = tiles_at_once::<K>(group.problem);
    let room_for_key = arena.take::<K::Packed>(at_once * key_size);
    let room_for_value = arena.take::<K::Packed>(at_once * value_size);
    let in_rows = arena.take::<K::Real>(value_dim * K::STRIP);
    let mut room = Room {
        scores: arena.take(padded(K::KEY_TILE, K::KEY_BLOCK) * K::STRIP),
        weights: arena.take(K::weight_size(K::KEY_TILE)),
        correction: arena.take(K::STRIP),
    };
    let strip_rows = |index: usize| {
        let first = rows.start + index * K::STRIP;
        first..rows.end.min(first + K::STRIP)
    };

    // Keys that no row of the group attends are as good as not there: neither their bits nor their number matter. Tiles
    // begin and end with those that some row does, whichever rows are here, so that a strip gives the same bits with any.
    let keys = group.attended_of(&keys);
    let (attended, _) = group.attended_by(&rows, &keys);
    let last_key = keys.end;
    let first = attended.start - (attended.start - keys.start) % K::KEY_TILE;
    let span = at_once * K::KEY_TILE;
    // Rows that attend nothing have an output too.
    for start in (first..attended.end.max(first + 1)).step_by(span) {
        let keys = start..attended.end.min(start + span);
        let tile_keys = |start: usize| start..last_key.min(start + K::KEY_TILE);
        let starts = || keys.clone().step_by(K::KEY_TILE);
        let rooms = room_for_key.chunks_exact_mut(key_size).zip(room_for_value.chunks_exact_mut(value_size));
        for (keys, (key, value)) in starts().map(tile_keys).zip(rooms) {
            if K::in_place(group.key, keys.clone()).is_none() {
                kernel.pack_keys(group.key, keys.clone(), key);
            }
            if K::in_place(group.value, keys.clone()).is_none() {
                kernel.pack_values(group.value, keys, value);
            }
        }
        for index in 0..strips {
            let place = index % kept;
            let query = &mut query[place * query_size..][..query_size];
            let mut strip = QueryStrip::<K> {
                rows: strip_rows(index),
                query,
                output: &mut output[place * output_size..][..output_size],
                maximum: &mut maximum[place * K::STRIP..][..K::STRIP],
                sum: &mut sum[place * K::STRIP..][..K::STRIP],
                is_first: start == first,
                soon: Soon::NOTHING,
            };
            let lanes = padded(strip.rows.len(), K::LANE_BLOCK);
            if start + span >= attended.end {
                strip.soon.output = place_of(&strip.rows);
            }
            if K::ASKS_ALONG {
                strip.soon.tile = share_of_tile(group, keys.end..attended.end.min(keys.end + span), index, strips);
            }
            if start == first {
                let next = strip_rows(index + 1);
                match group.query.bytes(&next).filter(|_| K::ASKS_ALONG) {
                    Some(bytes) => strip.soon.query = Lines::new(bytes),
                    None => group.query.prefetch(next),
                }
                kernel.pack_query(group.query, strip.rows.clone(), lanes, strip.query);
                strip.maximum.fill(K::Real::NEGATIVE_INFINITY);
                strip.sum.fill(K::Real::ZERO);
            }
            let packed = PackedKeys::<K> { keys: keys.clone(), key: room_for_key, value: room_for_value };
            let done = meet_at_once(kernel, group, &packed, &mut strip, &mut room);
            let rooms = room_for_key.chunks_exact(key_size).zip(room_for_value.chunks_exact(value_size));
            for (keys, (key, value)) in starts().map(tile_keys).zip(rooms) {
                let tile = PackedKeys::<K> {
                    key: K::in_place(group.key, keys.clone()).unwrap_or(key),
                    value: K::in_place(group.value, keys.clone()).unwrap_or(value),
                    keys: keys.clone(),
                };
                for keys in [keys.start..keys.end.min(done.start), keys.start.max(done.end)..keys.end] {
                    if !keys.is_empty() {
                        meet(kernel, group, &tile, keys, &mut strip, &mut room);
                    }
                }
            }
            // No key of theirs has been met yet.
            strip.fill_first();
            if start + span >= attended.end {
                deliver(AttendedStrip {
                    rows: strip.rows,
                    maximum: &strip.maximum[..lanes],
                    sum: &strip.sum[..lanes],
                    columns: &strip.output[..value_dim * lanes],
                    room: &mut in_rows[..value_dim * lanes],
                });
            }
        }
    }
}

/// What one of so many strips asks for of the keys and values that come next, so that all of them ask for all.
fn share_of_tile(group: &Group<'_>, keys: Range<usize>, strip: usize, strips: usize) -> [Lines; 2] {
    let share = keys.len().div_ceil(strips);
    let start = keys.end.min(keys.start + strip * share);
    let those = start..keys.end.min(start + share);
    [group.key, group.value].map(|head| Lines::of_rows(head, &those))
}

/// Query rows side by side in vector lanes, and what has become of them so far.
struct QueryStrip<'a, K: Microkernel> {
    rows: Range<usize>,
    query: &'a mut [K::Packed],
    /// A row of lanes for each column of the value, padded.
    output: &'a mut [K::Real],
    maximum: &'a mut [K::Real],
    sum: &'a mut [K::Real],
    /// Whether nothing has been written to the output, which is taken as zero.
    is_first: bool,
    /// What is needed after the strip and a tile have met.
    soon: Soon,
}

impl<K: Microkernel> QueryStrip<'_, K> {
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

/// What a strip and a tile need while they meet. What lies past the end was left there by others: it is computed with
/// and never looked at.
struct Room<'a, K: Microkernel> {
    /// For each key of a tile, padded, a lane for each query row of a strip: products, scores, weights.
    scores: &'a mut [K::Real],
    weights: &'a mut [K::Packed],
    /// What the softmax of a strip says its output is to be multiplied by.
    correction: &'a mut [K::Real],
}

/// The strip attends keys that all of its rows attend, where the kernel can do many of them at once. Returns which; where it
/// cannot, none.
fn meet_at_once<K: Microkernel>(
    kernel: &K,
    group: &Group<'_>,
    tiles: &PackedKeys<'_, K>,
    strip: &mut QueryStrip<'_, K>,
    room: &mut Room<'_, K>,
) -> Range<usize> {
    let first = tiles.keys.start;
    let none = first..first;
    let factor = K::Real::from_f64(group.scoring.factor());
    if K::TILES_AT_ONCE == 1
        || !group.scoring.is_plain()
        || group.problem.mask_mod.is_some()
        || factor <= K::Real::ZERO
        || K::in_place(group.key, tiles.keys.clone()).is_some()
    {
        return none;
    }
    let (_, all) = group.attended_by(&strip.rows, &tiles.keys);
    let start = padded(all.start - first, K::FIRST_KEY_BLOCK);
    let end = all.end.saturating_sub(first) / K::FIRST_KEY_BLOCK * K::FIRST_KEY_BLOCK;
    if start >= end {
        return none;
    }
    strip.fill_first();
    let is_done = kernel.attend_at_once(WholeMeeting {
        head_dim: group.problem.head_dim,
        value_dim: group.problem.value_dim,
        lanes: padded(strip.rows.len(), K::LANE_BLOCK),
        keys: start..end,
        key: tiles.key,
        value: tiles.value,
        query: strip.query,
        factor,
        scores: room.scores,
        weights: room.weights,
        maximum: strip.maximum,
        sum: strip.sum,
        output: strip.output,
    });
    if is_done { first + start..first + end } else { none }
}

/// The strip attends what it attends of some keys of a tile.
fn meet<K: Microkernel>(
    kernel: &K,
    group: &Group<'_>,
    tile: &PackedKeys<'_, K>,
    keys: Range<usize>,
    strip: &mut QueryStrip<'_, K>,
    room: &mut Room<'_, K>,
) {
    let those = keys;
    let (any, all) = group.attended_by(&strip.rows, &those);
    if any.is_empty() {
        return;
    }
    let start = any.start - tile.keys.start;
    let keys = start - start % K::FIRST_KEY_BLOCK..any.end - tile.keys.start;
    let first_key = tile.keys.start + keys.start;
    let lanes = padded(strip.rows.len(), K::LANE_BLOCK);

    let factor = K::Real::from_f64(group.scoring.factor());
    // Nothing is done to plain scores between product and softmax, and a mask of minus infinity stays what it is
    // where the factor is above zero.
    let (early, late) = if K::MULTIPLIES_IN_WEIGH && group.scoring.is_plain() && factor > K::Real::ZERO {
        (K::Real::ONE, factor)
    } else {
        (factor, K::Real::ONE)
    };
    let lane_keys = LaneKeys::new(|block| {
        if all.end == any.end {
            return keys.len();
        }
        let rows = strip.rows.start..strip.rows.end.min(strip.rows.start + (block + 1) * K::LANE_BLOCK);
        group.attended_by(&rows, &those).0.end.saturating_sub(first_key).min(keys.len())
    });
    // Any key may be one that an expression takes out.
    let takes_out = group.problem.mask_mod.is_some();
    let surely = if takes_out { first_key..first_key } else { all.clone() };
    // A kernel that takes several keys at once multiplies those behind the last by zero.
    let end = (tile.keys.start + padded(keys.end, K::FIRST_KEY_BLOCK)).min(tile.keys.end);
    let are_finite = |keys: Range<usize>| kernel.are_finite(group.value, keys);
    let is_finite =
        are_finite(first_key..surely.start.clamp(first_key, end)) && are_finite(surely.end.max(first_key)..end);
    let is_plain = group.scoring.is_plain();
    let factors = Factors { head_dim: group.problem.head_dim, keys: keys.clone(), key: tile.key, query: strip.query };
    let mut softmax = Strip {
        lanes,
        keys: keys.len(),
        lane_keys,
        // Under ALiBi or a bias scores may well rise from tile to tile, and an expression may leave nothing of the first.
        follows_maximum: !is_plain || takes_out,
        factor: late,
        scores: room.scores,
        weights: room.weights,
        keeps_weights: !is_finite,
        maximum: strip.maximum,
        sum: strip.sum,
        correction: room.correction,
    };
    let is_whole = all == (first_key..any.end) && !takes_out;
    let mut is_done = is_plain && is_whole && late == factor && kernel.score_and_weigh(factors, &mut softmax);
    while !is_done {
        kernel.score(ScoreProduct {
            head_dim: group.problem.head_dim,
            lanes,
            keys: keys.clone(),
            lane_keys,
            key: tile.key,
            query: strip.query,
            factor: early,
            scores: softmax.scores,
        });
        let scores = &mut softmax.scores[..keys.len() * lanes];
        let places = strip.rows.clone().map(|row| group.place(row));
        if let Some(terms) = group.scoring.lane_terms(first_key, places) {
            kernel.shape(group.scoring.shaping(&terms, 0, scores, lanes));
        }
        expressions::apply(group, &strip.rows, first_key, scores, lanes);
        for keys in [first_key..all.start, all.end..any.end] {
            if !keys.is_empty() {
                let ranges = LaneRanges::new(keys.start, strip.rows.clone().map(|row| group.attended(row)));
                let scores = &mut scores[(keys.start - first_key) * lanes..(keys.end - first_key) * lanes];
                kernel.mask(scores, lanes, &ranges);
            }
        }
        match kernel.weigh(&mut softmax) {
            Weighed::Done => is_done = true,
            Weighed::TooLarge => softmax.follows_maximum = true,
        }
    }
    if !is_finite {
        accumulate_attended(group, strip, first_key..any.end, room, lanes);
        return;
    }
    kernel.accumulate(OutputProduct {
        value_dim: group.problem.value_dim,
        lanes,
        keys,
        lane_keys,
        value: tile.value,
        scores: room.scores,
        weights: room.weights,
        correction: room.correction,
        output: strip.output,
        is_first: std::mem::take(&mut strip.is_first),
        soon: strip.soon,
    });
}

/// Adds weights times values for attended keys only: a weight of zero does not hide a NaN or an infinity.
fn accumulate_attended<K: Microkernel>(
    group: &Group<'_>,
    strip: &mut QueryStrip<'_, K>,
    keys: Range<usize>,
    room: &Room<'_, K>,
    lanes: usize,
) {
    strip.fill_first();
    let output = &mut strip.output[..group.problem.value_dim * lanes];
    for column in output.chunks_exact_mut(lanes) {
        for (element, &factor) in column.iter_mut().zip(&*room.correction) {
            *element *= factor;
        }
    }
    for (key, weights) in keys.zip(room.scores.chunks_exact(lanes)) {
        pack::for_each(group.value.dtype(), group.value.row(key), |column, element: K::Real| {
            let sums = &mut output[column * lanes..];
            for ((sum, &weight), row) in sums.iter_mut().zip(weights).zip(strip.rows.clone()) {
                if group.attended(row).contains(&key) && expressions::takes_part(group, row, key) {
                    *sum += weight * element;
                }
            }
        });
    }
}
