//! What is worth writing by hand for each processor.
//!
//! Vector lanes are query rows. The scores of a strip of query rows lie key by key, with one lane per query row, so that
//! maximum, exponential and sum of the softmax go down the columns and nothing is ever added up across lanes. Keys and
//! values are then the left factors of both products, an element at a time for all lanes, and need no transposition.

use crate::pack;
use crate::real::Real;
use flashcore_problem::DType;
use std::ops::Range;

/// How the left factor of a product lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// A row after the other: keys, whose rows are the rows of the scores.
    RowByRow,
    /// A column after the other: values, whose columns are the rows of the output.
    ColumnByColumn,
}

/// What a product does with what was there before.
#[derive(Clone, Copy)]
pub(crate) enum Target<'a, R> {
    /// `product = left * right * factor`: scores.
    Scaled(R),
    /// `product = product * correction + left * right`, with a correction for each column: the output.
    Corrected(&'a [R]),
}

/// The operands of a product of tiles.
pub(crate) struct TileProduct<'a, R> {
    /// Rows of `left` and of `product`; a multiple of [`Microkernel::ROW_BLOCK`].
    pub(crate) rows: usize,
    /// Columns of `left` and rows of `right`.
    pub(crate) depth: usize,
    /// Columns of `right` and of `product`; a multiple of [`Microkernel::COLUMN_BLOCK`].
    pub(crate) columns: usize,
    pub(crate) left: &'a [R],
    /// Elements from one row of `left` to the next, or from one column to the next.
    pub(crate) left_stride: usize,
    pub(crate) left_order: Order,
    /// `depth` rows of `columns` elements.
    pub(crate) right: &'a [R],
    pub(crate) target: Target<'a, R>,
    /// `rows` rows of `columns` elements.
    pub(crate) product: &'a mut [R],
}

impl<R> TileProduct<'_, R> {
    /// Where in `left` the element of a row and a column lies.
    pub(crate) fn left_index(&self, row: usize, column: usize) -> usize {
        match self.left_order {
            Order::RowByRow => row * self.left_stride + column,
            Order::ColumnByColumn => column * self.left_stride + row,
        }
    }

    /// Whether every element that a kernel of these block sizes touches is there.
    pub(crate) fn fits(&self, row_block: usize, column_block: usize) -> bool {
        let last_left = match (self.rows.checked_sub(1), self.depth.checked_sub(1)) {
            (Some(row), Some(column)) => Some(self.left_index(row, column)),
            _ => None,
        };
        self.rows.is_multiple_of(row_block)
            && self.columns.is_multiple_of(column_block)
            && last_left.is_none_or(|last| last < self.left.len())
            && self.right.len() >= self.depth * self.columns
            && self.product.len() >= self.rows * self.columns
            && match self.target {
                Target::Scaled(_) => true,
                Target::Corrected(correction) => correction.len() >= self.columns,
            }
    }
}

/// The scores of some keys for a strip of query rows, and the softmax of these rows so far.
///
/// The running maximum of the scores, in base 2, is minus infinity before anything was attended. A NaN never becomes the
/// maximum; it shows in the sum.
pub(crate) struct Strip<'a, R> {
    /// Lanes of each of the following; a multiple of [`Microkernel::COLUMN_BLOCK`].
    pub(crate) columns: usize,
    /// As many rows as there are keys. Scores come in, weights `2^(score - maximum)` go out.
    pub(crate) scores: &'a mut [R],
    /// The running maximum of each lane.
    pub(crate) maximum: &'a mut [R],
    /// The sum of the weights of each lane.
    pub(crate) sum: &'a mut [R],
    /// Out: what the weighted sum of the values so far is to be multiplied by.
    pub(crate) correction: &'a mut [R],
}

impl<R> Strip<'_, R> {
    /// Whether every element that a kernel of this block size touches is there.
    pub(crate) fn fits(&self, column_block: usize) -> bool {
        self.columns > 0
            && self.columns.is_multiple_of(column_block)
            && self.scores.len().is_multiple_of(self.columns)
            && [self.maximum.len(), self.sum.len(), self.correction.len()].iter().all(|&len| len >= self.columns)
    }
}

/// The inner loops of the driver on packed tiles. One implementation per instruction set.
pub(crate) trait Microkernel<R: Real>: Sync {
    /// Rows of every product are padded to a multiple of this.
    const ROW_BLOCK: usize;
    /// Columns of every product are padded to a multiple of this: the lanes of a vector.
    const COLUMN_BLOCK: usize;
    /// Query rows of a strip: the columns of the widest block that stays in registers.
    const STRIP: usize;

    /// The product of two tiles; serves keys by queries and values by weights.
    fn multiply(&self, product: TileProduct<'_, R>);

    /// One step of the softmax: scores to weights, running maximum and sum brought up to date.
    fn weigh(&self, strip: Strip<'_, R>);

    /// Reads as many elements as there are in `bytes`.
    fn load(&self, dtype: DType, bytes: &[u8], values: &mut [R]) {
        pack::load(dtype, bytes, values);
    }
}

/// `size` rounded up to a multiple of `block`.
pub(crate) fn padded(size: usize, block: usize) -> usize {
    size.div_ceil(block) * block
}

/// What `range` covers of the tile that begins at `start` and is `length` long, counted from its beginning.
pub(crate) fn within(range: &Range<usize>, start: usize, length: usize) -> Range<usize> {
    let first = range.start.clamp(start, start + length) - start;
    let end = range.end.clamp(start, start + length) - start;
    first..end.max(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_cut_to_the_tile() {
        let cases =
            [(0..100, 0..16), (0..70, 0..6), (70..75, 6..11), (75..200, 11..16), (0..10, 0..0), (90..95, 16..16)];
        for (range, expected) in cases {
            assert_eq!(within(&range, 64, 16), expected, "{range:?}");
        }
        assert_eq!([0, 1, 8, 9].map(|size| padded(size, 8)), [0, 8, 8, 16]);
    }
}
