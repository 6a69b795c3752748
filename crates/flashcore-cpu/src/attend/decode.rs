//! Decoding: a few query rows over many keys, which are read once, in place, and never packed.
//!
//! Such a problem is as fast as memory is. Vectors go along the columns of keys and values, all query rows that attend
//! the same keys share the loads, and a key that a row does not attend is not touched for it.

use crate::attend::blocked::MAX_KV_TILE;
use crate::attend::group::Group;
use crate::attend::scoring::Scoring;
use crate::driver::scratch::{Arena, arena_bytes};
use crate::microkernel::Decode;
use crate::microkernel::convert;
use crate::microkernel::head::{self, Head};
use crate::microkernel::score::ScoreModifiers;
use crate::planted::planted;
use crate::simd::real::Real;
use flashcore_problem::Problem;
use std::ops::Range;

/// Upper bound of the rows of a group for which keys are not packed: with more, the sums across lanes cost more than packing.
pub(crate) const MAX_ROWS: usize = 8;

/// Upper bound of the keys of a tile. Those of 128 columns of `f32` are 64 KiB, so that keys and values of this tile and of
/// the next, which are prefetched, fit into a second-level cache.
pub(crate) const KV_TILE: usize = 128;

/// Keys of a tile that several heads attend: those of eight heads of 128 columns of `bf16` are 32 KiB, and of a paged cache
/// one page of the usual size, whose rows need no list of addresses. Every tile costs a step of the online softmax.
pub(crate) const INTERLEAVED_KV_TILE: usize = 16;

/// Upper bound of the KV heads that attend a tile one after the other.
pub(crate) const MAX_HEADS: usize = 8;

/// Bytes of keys and values from which heads attend tiles together: fewer are found in a cache, whatever their order. All in
/// builds with debug assertions, so that tests of small problems go this way too.
const MIN_INTERLEAVED_BYTES: usize = if cfg!(debug_assertions) { 1 } else { 8 << 20 };

/// True if KV heads attend a tile one after the other, before any of them attends the next: where they lie beside each other
/// in every row (`BSHD`, packed sequences, pages of rows of all heads), only that reads memory in order. Of 8 sequences of
/// 4,096 keys, 8 heads of 128 columns of `bf16`, one thread read 134 MB in 7.3 ms so, and in 16 ms head by head.
pub(crate) fn interleaves_heads(problem: &Problem) -> bool {
    let (strides, key, value) = (problem.strides(), problem.key_shape(), problem.value_shape());
    let bytes = (key.columns + value.columns).saturating_mul(problem.dtypes().key_value.size_bytes());
    let keys = problem.batch.saturating_mul(problem.key_length).saturating_mul(key.heads);
    head::are_heads_adjacent(key, strides.key)
        && head::are_heads_adjacent(value, strides.value)
        && keys.saturating_mul(bytes) >= MIN_INTERLEAVED_BYTES
}

/// Keys of a tile. Sums are rounded by tiles, so this depends on the problem alone, and not on how many heads share an item.
fn tile_keys(problem: &Problem) -> usize {
    if interleaves_heads(problem) { INTERLEAVED_KV_TILE } else { KV_TILE }
}

/// A tile of keys, and a few query rows that all attend it.
pub(crate) struct DecodeTile<'a, R> {
    pub(crate) key: Head<'a>,
    pub(crate) value: Head<'a>,
    /// At most [`KV_TILE`].
    pub(crate) keys: Range<usize>,
    /// Number of rows, at most [`MAX_ROWS`].
    pub(crate) rows: usize,
    /// `head_dim` elements for each row.
    pub(crate) query: &'a [R],
    /// Factor of the products.
    pub(crate) factor: R,
    /// Score modifiers, if products are not scores already.
    pub(crate) modifiers: Option<&'a RowModifiers<'a, R>>,
    /// Scales of the values, if they have any: of each key, 1 past the last.
    pub(crate) value_scales: Option<&'a [R; MAX_KV_TILE]>,
    /// Scratch for [`KV_TILE`] scores of each row.
    pub(crate) scores: &'a mut [R],
    /// Row max of each row.
    pub(crate) row_max: &'a mut [R],
    /// Row sum of each row.
    pub(crate) row_sum: &'a mut [R],
    /// `value_dim` elements for each row.
    pub(crate) output: &'a mut [R],
    pub(crate) prefetch: TilePrefetch<'a>,
}

/// Rows to prefetch while a tile is attended, beside the values of the tile, which are prefetched while scores are computed.
pub(crate) struct TilePrefetch<'a> {
    pub(crate) while_adding: WhileAdding<'a>,
    /// All the time.
    pub(crate) far: Option<FarRows<'a>>,
}

/// Keys and values of the next tile: the rows of all heads of the item, which lie beside each other.
pub(crate) struct FarRows<'a> {
    pub(crate) rows: [&'a [*const u8]; 2],
    pub(crate) heads: usize,
}

/// Keys to prefetch while values are added: those that are attended next.
pub(crate) enum WhileAdding<'a> {
    /// The same keys of the next head, which lies beside this.
    NextHead,
    NextTile(PrefetchRows<'a>),
}

/// Rows of a head to prefetch.
pub(crate) struct PrefetchRows<'a> {
    pub(crate) head: &'a Head<'a>,
    /// Rows by their index; of those past the last, memory next to the tensor is prefetched, or nothing.
    pub(crate) rows: Range<usize>,
}

/// Keys and values that a thread attends after those of an item.
#[derive(Clone, Copy)]
pub(crate) struct Following<'a> {
    pub(crate) key: Head<'a>,
    pub(crate) value: Head<'a>,
    pub(crate) first_key: usize,
}

/// Score modifiers of each row of a tile.
pub(crate) struct RowModifiers<'a, R> {
    scoring: &'a Scoring<'a>,
    terms: crate::attend::scoring::LaneTerms<R>,
}

impl<R: Real> RowModifiers<'_, R> {
    pub(crate) fn of_row<'b>(&'b self, row: usize, scores: &'b mut [R]) -> ScoreModifiers<'b, R> {
        self.scoring.modifiers(&self.terms, row, scores, 0)
    }
}

/// Bytes that [`attend_rows`] takes of an arena.
pub(crate) fn scratch_bytes<R: Real>(problem: &Problem, heads: usize) -> usize {
    let row = [problem.head_dim, problem.value_dim, 1, 1];
    let of_heads: usize = row.iter().map(|count| arena_bytes::<R>(count * MAX_ROWS * heads)).sum();
    of_heads + arena_bytes::<R>(KV_TILE * MAX_ROWS)
}

/// Attends `keys` with all rows of the groups, whose KV heads follow one another. Hands each row with the index of its group,
/// row max, row sum and weighted sum to `deliver`. Keys and values that are attended next are prefetched in the end.
///
/// Groups take turns at every tile: where heads are adjacent, that reads memory in order.
pub(crate) fn attend_rows<K: Decode>(
    kernel: &K,
    groups: &[Option<Group<'_>>; MAX_HEADS],
    keys: Range<usize>,
    following: Option<Following<'_>>,
    arena: &mut Arena<'_>,
    mut deliver: impl FnMut(usize, usize, K::Real, K::Real, &[K::Real]),
) {
    let Some(first_group) = &groups[0] else { return };
    let heads = groups.iter().flatten().count();
    let problem = first_group.problem;
    let (head_dim, value_dim) = (problem.head_dim, problem.value_dim);
    let rows = first_group.row_count();
    let query = arena.take::<K::Real>(heads * rows * head_dim);
    let output = arena.take::<K::Real>(heads * rows * value_dim);
    let (row_max, row_sum) = (arena.take::<K::Real>(heads * rows), arena.take::<K::Real>(heads * rows));
    let scores = arena.take::<K::Real>(rows * KV_TILE);
    for (index, query) in query.chunks_exact_mut(head_dim).enumerate() {
        let Some(group) = &groups[index / rows] else { break };
        convert::load(group.query.dtype(), group.query.row(index % rows), query);
    }
    output.fill(K::Real::ZERO);
    row_max.fill(K::Real::NEGATIVE_INFINITY);
    row_sum.fill(K::Real::ZERO);
    // Only keys that some row attends: there may be far more. All groups attend the same.
    let keys = first_group.attended_of(&keys);
    let tile_keys = tile_keys(problem);
    let mut next_rows = [[std::ptr::null(); INTERLEAVED_KV_TILE]; 2];
    let keys = planted!(DecodeTilesPast16: keys.start..keys.end.min(keys.start + 16 * tile_keys), keys);
    for first in keys.clone().step_by(tile_keys) {
        let tile = first..keys.end.min(first + tile_keys);
        let next = Following { key: first_group.key, value: first_group.value, first_key: tile.end };
        let next = following.filter(|_| tile.end == keys.end).unwrap_or(next);
        let next_keys = next.first_key..next.first_key + tile_keys;
        let next_count = if heads == 1 {
            [0; 2]
        } else {
            let [of_keys, of_values] = &mut next_rows;
            [next.key.addresses(&next_keys, of_keys), next.value.addresses(&next_keys, of_values)]
        };
        let mut row = 0;
        while row < rows {
            let (attended, _) = first_group.attended_by(&(row..row + 1), &tile);
            let same =
                (row..rows).take_while(|&other| first_group.attended_by(&(other..other + 1), &tile).0 == attended);
            let same = row..row + same.count();
            row = same.end;
            if attended.is_empty() {
                continue;
            }
            for (head, group) in groups.iter().flatten().enumerate() {
                let of_group = head * rows + same.start..head * rows + same.end;
                let places = same.clone().map(|row| group.place(row));
                let terms = group.scoring.lane_terms::<K::Real>(attended.clone(), places);
                let modifiers = terms.map(|terms| RowModifiers { scoring: &group.scoring, terms });
                let value_scales = group.scoring.scales.of_values(attended.clone());
                let while_adding = if head + 1 < heads {
                    WhileAdding::NextHead
                } else {
                    WhileAdding::NextTile(PrefetchRows { head: &next.key, rows: next_keys.clone() })
                };
                // Every head prefetches its share of the next tile.
                let far = (heads > 1).then(|| {
                    let share = |count: usize| count * head / heads..count * (head + 1) / heads;
                    let [of_keys, of_values] = &next_rows;
                    FarRows { rows: [&of_keys[share(next_count[0])], &of_values[share(next_count[1])]], heads }
                });
                kernel.decode_tile(DecodeTile {
                    key: group.key,
                    value: group.value,
                    keys: attended.clone(),
                    rows: same.len(),
                    query: &query[of_group.start * head_dim..],
                    factor: K::Real::from_f64(group.scoring.factor()),
                    modifiers: modifiers.as_ref(),
                    value_scales: value_scales.as_ref(),
                    scores,
                    row_max: &mut row_max[of_group.clone()],
                    row_sum: &mut row_sum[of_group.clone()],
                    output: &mut output[of_group.start * value_dim..of_group.end * value_dim],
                    prefetch: TilePrefetch { while_adding, far },
                });
            }
        }
    }
    for (index, output) in output.chunks_exact(value_dim).enumerate() {
        deliver(index / rows, index % rows, row_max[index], row_sum[index], output);
    }
}
