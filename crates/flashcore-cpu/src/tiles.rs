//! Tiles of query rows and tiles of keys: which meet, and what happens when they do.

use crate::formulas;
use crate::group::Group;
use crate::masking::LaneRanges;
use crate::microkernel::{Factors, LaneKeys, Microkernel, OutputProduct, ScoreProduct, Strip, Weighed, padded};
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
    let (head_dim, value_dim, strips) = (problem.head_dim, problem.value_dim, rows.div_ceil(K::STRIP));
    let packed = [
        strips * K::query_size(head_dim),
        K::key_size(head_dim, K::KEY_TILE),
        K::value_size(value_dim, K::KEY_TILE),
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

/// The attention of `rows`, which begin with a strip, to `keys`, which begin with a tile. Hands each row with its
/// maximum, sum and weighted sum to `deliver`.
pub(crate) fn attend_rows<K: Microkernel>(
    kernel: &K,
    group: &Group<'_>,
    rows: Range<usize>,
    keys: Range<usize>,
    arena: &mut Arena<'_>,
    mut deliver: impl FnMut(usize, K::Real, K::Real, &[K::Real]),
) {
    const { assert!(K::STRIP <= MOST_LANES && K::KEY_TILE.is_multiple_of(K::FIRST_KEY_BLOCK)) };
    const { assert!(MOST_KEY_TILE.is_multiple_of(K::KEY_TILE)) };
    let (head_dim, value_dim) = (group.problem.head_dim, group.problem.value_dim);
    let strips = rows.len().div_ceil(K::STRIP);
    let (query_size, output_size) = (K::query_size(head_dim), padded(value_dim, K::VALUE_BLOCK) * K::STRIP);
    let query = arena.take::<K::Packed>(strips * query_size);
    let output = arena.take::<K::Real>(strips * output_size);
    let maximum = arena.take::<K::Real>(strips * K::STRIP);
    let sum = arena.take::<K::Real>(strips * K::STRIP);
    let room_for_key = arena.take::<K::Packed>(K::key_size(head_dim, K::KEY_TILE));
    let room_for_value = arena.take::<K::Packed>(K::value_size(value_dim, K::KEY_TILE));
    let mut room = Room {
        scores: arena.take(padded(K::KEY_TILE, K::KEY_BLOCK) * K::STRIP),
        weights: arena.take(K::weight_size(K::KEY_TILE)),
        correction: arena.take(K::STRIP),
    };
    let strip_rows = |index: usize| {
        let first = rows.start + index * K::STRIP;
        first..rows.end.min(first + K::STRIP)
    };
    for (index, query) in query.chunks_exact_mut(query_size).enumerate() {
        let rows = strip_rows(index);
        group.query.prefetch(rows.end..strip_rows(index + 1).end);
        kernel.pack_query(group.query, rows.clone(), padded(rows.len(), K::LANE_BLOCK), query);
    }
    output.fill(K::Real::ZERO);
    maximum.fill(K::Real::NEGATIVE_INFINITY);
    sum.fill(K::Real::ZERO);

    let (attended, _) = group.attended_by(&rows, &keys);
    let first = attended.start - (attended.start - keys.start) % K::KEY_TILE;
    for start in (first..attended.end).step_by(K::KEY_TILE) {
        let keys = start..attended.end.min(start + K::KEY_TILE);
        let tile = KeyTile::<K> {
            key: K::in_place(group.key, keys.clone()).unwrap_or_else(|| {
                kernel.pack_keys(group.key, keys.clone(), room_for_key);
                room_for_key
            }),
            value: K::in_place(group.value, keys.clone()).unwrap_or_else(|| {
                kernel.pack_values(group.value, keys.clone(), room_for_value);
                room_for_value
            }),
            keys,
        };
        for index in 0..strips {
            let lanes = index * K::STRIP..(index + 1) * K::STRIP;
            let mut strip = QueryStrip::<K> {
                rows: strip_rows(index),
                query: &query[index * query_size..(index + 1) * query_size],
                output: &mut output[index * output_size..(index + 1) * output_size],
                maximum: &mut maximum[lanes.clone()],
                sum: &mut sum[lanes],
            };
            meet(kernel, group, &tile, &mut strip, &mut room);
        }
    }

    let in_rows = arena.take::<K::Real>(value_dim * K::STRIP);
    for (index, output) in output.chunks_exact(output_size).enumerate() {
        let rows = strip_rows(index);
        let lanes = padded(rows.len(), K::LANE_BLOCK);
        kernel.transpose(&output[..value_dim * lanes], lanes, &mut in_rows[..value_dim * lanes]);
        for (lane, (row, output)) in rows.zip(in_rows.chunks_exact(value_dim)).enumerate() {
            let lane = index * K::STRIP + lane;
            deliver(row, maximum[lane], sum[lane], output);
        }
    }
}

/// Query rows side by side in vector lanes, and what has become of them so far.
struct QueryStrip<'a, K: Microkernel> {
    rows: Range<usize>,
    query: &'a [K::Packed],
    /// A row of lanes for each column of the value, padded.
    output: &'a mut [K::Real],
    maximum: &'a mut [K::Real],
    sum: &'a mut [K::Real],
}

/// Keys and values, packed or in place.
struct KeyTile<'a, K: Microkernel> {
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

/// The strip attends what it attends of the keys of a tile.
fn meet<K: Microkernel>(
    kernel: &K,
    group: &Group<'_>,
    tile: &KeyTile<'_, K>,
    strip: &mut QueryStrip<'_, K>,
    room: &mut Room<'_, K>,
) {
    let (any, all) = group.attended_by(&strip.rows, &tile.keys);
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
        group.attended_by(&rows, &tile.keys).0.end.saturating_sub(first_key).min(keys.len())
    });
    // Any key may be one that a formula takes out.
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
        // Under ALiBi or a bias scores may well rise from tile to tile, and a formula may leave nothing of the first.
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
        formulas::apply(group, &strip.rows, first_key, scores, lanes);
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
                if group.attended(row).contains(&key) && formulas::takes_part(group, row, key) {
                    *sum += weight * element;
                }
            }
        });
    }
}
