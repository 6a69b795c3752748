//! Split-KV: partial results of the splits of each row, merged in their order.

use super::output::Disjoint;
use super::scratch::{Arena, arena_bytes};
use crate::attend::softmax::row_scale;
use crate::planted::planted;
use crate::simd::real::Real;
use std::ops::Range;

/// Partial results of all rows: those of a row are contiguous, in the order of its splits.
pub(super) struct Partials<'a, R> {
    row_max: Disjoint<'a, R>,
    row_sum: Disjoint<'a, R>,
    values: Disjoint<'a, R>,
    /// Elements of `values` for each split of a row.
    size: usize,
}

impl<'a, R: Real> Partials<'a, R> {
    /// Bytes that [`take`](Self::take) takes of an arena.
    pub(super) fn scratch_bytes(count: usize, size: usize) -> usize {
        2 * arena_bytes::<R>(count) + arena_bytes::<R>(count * size)
    }

    /// So many partial results of `size` values each.
    pub(super) fn take(arena: &mut Arena<'a>, count: usize, size: usize) -> Self {
        Self {
            row_max: Disjoint::new(arena.take(count)),
            row_sum: Disjoint::new(arena.take(count)),
            values: Disjoint::new(arena.take(count * size)),
            size,
        }
    }

    /// Stores the partial result of one split of a row at its place.
    ///
    /// # Safety
    ///
    /// It is not in use.
    pub(super) unsafe fn store(&self, index: usize, row_max: R, row_sum: R, values: &[R]) {
        // SAFETY: the caller vouches that nobody else uses this partial result.
        unsafe {
            self.row_max.part(index, 1)[0] = row_max;
            self.row_sum.part(index, 1)[0] = row_sum;
            self.values.part(index * self.size, self.size).copy_from_slice(values);
        }
    }

    /// Merges the splits of a row, which are at these places. Returns its row max, row sum and weighted sum.
    ///
    /// # Safety
    ///
    /// They are stored, and not in use.
    pub(super) unsafe fn merge(&self, splits: &Range<usize>) -> (R, R, &[R]) {
        let (first, num_splits) = (splits.start, planted!(SplitsPast16: splits.len().min(16), splits.len()));
        // SAFETY: the caller vouches that nobody else uses these partial results.
        let (row_maxes, row_sums, values) = unsafe {
            (
                self.row_max.part(first, num_splits),
                self.row_sum.part(first, num_splits),
                self.values.part(first * self.size, num_splits * self.size),
            )
        };
        let of_maximum = planted!(RowMaxOf32Splits: num_splits.min(32), num_splits);
        let row_max =
            row_maxes[..of_maximum].iter().fold(R::NEGATIVE_INFINITY, |largest, &other| largest.maximum(other));
        let (merged, others) = values.split_at_mut(self.size);
        let factor = row_scale(row_maxes[0], row_max);
        let mut row_sum = row_sums[0] * factor;
        for element in &mut *merged {
            *element *= factor;
        }
        for (split, values) in others.chunks_exact(self.size).enumerate() {
            let factor = row_scale(row_maxes[planted!(SplitWeightOfAnother: split, split + 1)], row_max);
            row_sum += row_sums[split + 1] * factor;
            for (element, &value) in merged.iter_mut().zip(values) {
                *element += value * factor;
            }
        }
        (row_max, row_sum, merged)
    }
}
