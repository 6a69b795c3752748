//! Decoding: a few query rows over many keys, which are read once, in place, and never packed.
//!
//! Such a problem is as fast as memory is. Vectors go along the columns of keys and values, all query rows that attend
//! the same keys share the loads, and a key that a row does not attend is not touched for it.

use crate::attend::blocked::MAX_KV_TILE;
use crate::attend::group::Group;
use crate::attend::scoring::Scoring;
use crate::driver::scratch::{Arena, arena_bytes};
use crate::microkernel::Microkernel;
use crate::microkernel::convert;
use crate::microkernel::head::Head;
use crate::microkernel::score::ScoreModifiers;
use crate::simd::real::Real;
use flashcore_problem::Problem;
use std::ops::Range;

/// Upper bound of the rows of a group for which keys are not packed: with more, the sums across lanes cost more than packing.
pub(crate) const MAX_ROWS: usize = 8;

/// Keys of one tile. Those of 128 columns of `f32` are 64 KiB, so that keys and values of this tile and of the next, which
/// are prefetched, fit into a second-level cache.
pub(crate) const KV_TILE: usize = 128;

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
pub(crate) fn scratch_bytes<R: Real>(problem: &Problem) -> usize {
    let row = [problem.head_dim, problem.value_dim, KV_TILE, 1, 1];
    row.iter().map(|count| arena_bytes::<R>(count * MAX_ROWS)).sum()
}

/// Attends `keys` with all rows of a group. Hands each row with its row max, row sum and weighted sum to `deliver`.
pub(crate) fn attend_rows<K: Microkernel>(
    kernel: &K,
    group: &Group<'_>,
    keys: Range<usize>,
    arena: &mut Arena<'_>,
    mut deliver: impl FnMut(usize, K::Real, K::Real, &[K::Real]),
) {
    let (head_dim, value_dim) = (group.problem.head_dim, group.problem.value_dim);
    let rows = group.row_count();
    let query = arena.take::<K::Real>(rows * head_dim);
    let output = arena.take::<K::Real>(rows * value_dim);
    let scores = arena.take::<K::Real>(rows * KV_TILE);
    let (row_max, row_sum) = (arena.take::<K::Real>(rows), arena.take::<K::Real>(rows));
    for (row, query) in query.chunks_exact_mut(head_dim).enumerate() {
        convert::load(group.query.dtype(), group.query.row(row), query);
    }
    output.fill(K::Real::ZERO);
    row_max.fill(K::Real::NEGATIVE_INFINITY);
    row_sum.fill(K::Real::ZERO);
    // Only keys that some row attends: there may be far more.
    let keys = group.attended_of(&keys);
    for first in keys.clone().step_by(KV_TILE) {
        let tile = first..keys.end.min(first + KV_TILE);
        let mut row = 0;
        while row < rows {
            let (attended, _) = group.attended_by(&(row..row + 1), &tile);
            let same = (row..rows).take_while(|&other| group.attended_by(&(other..other + 1), &tile).0 == attended);
            let same = row..row + same.count();
            if !attended.is_empty() {
                let places = same.clone().map(|row| group.place(row));
                let terms = group.scoring.lane_terms::<K::Real>(attended.clone(), places);
                let modifiers = terms.map(|terms| RowModifiers { scoring: &group.scoring, terms });
                let value_scales = group.scoring.scales.of_values(attended.clone());
                kernel.decode_tile(DecodeTile {
                    key: group.key,
                    value: group.value,
                    keys: attended,
                    rows: same.len(),
                    query: &query[same.start * head_dim..],
                    factor: K::Real::from_f64(group.scoring.factor()),
                    modifiers: modifiers.as_ref(),
                    value_scales: value_scales.as_ref(),
                    scores,
                    row_max: &mut row_max[same.clone()],
                    row_sum: &mut row_sum[same.clone()],
                    output: &mut output[same.start * value_dim..same.end * value_dim],
                });
            }
            row = same.end;
        }
    }
    for (row, output) in output.chunks_exact(value_dim).enumerate() {
        deliver(row, row_max[row], row_sum[row], output);
    }
}
