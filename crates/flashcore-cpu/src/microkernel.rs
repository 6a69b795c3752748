//! What is worth writing by hand for each processor.

use crate::real::Real;
use std::ops::Range;

/// The operands of a product of tiles, each row by row: `product += left * right`.
pub(crate) struct TileProduct<'a, R> {
    /// Rows of `left` and of `product`; a multiple of [`Microkernel::ROW_BLOCK`].
    pub(crate) rows: usize,
    /// Columns of `left` and rows of `right` that take part.
    pub(crate) depth: usize,
    /// Columns of `right` and of `product`; a multiple of [`Microkernel::COLUMN_BLOCK`].
    pub(crate) columns: usize,
    /// `rows` rows of `left_stride` elements.
    pub(crate) left: &'a [R],
    /// Elements from one row of `left` to the next.
    pub(crate) left_stride: usize,
    /// `depth` rows of `columns` elements.
    pub(crate) right: &'a [R],
    /// `rows` rows of `columns` elements.
    pub(crate) product: &'a mut [R],
}

/// The inner loops of the driver on packed tiles. One implementation per instruction set.
pub(crate) trait Microkernel<R: Real>: Sync {
    /// Rows of every tile are padded to a multiple of this.
    const ROW_BLOCK: usize;
    /// Columns of every tile are padded to a multiple of this.
    const COLUMN_BLOCK: usize;

    /// `product += left * right`; serves queries by keys and weights by values.
    fn multiply_accumulate(&self, tiles: TileProduct<'_, R>);

    /// The largest of `scores`, or `floor` if that is larger. NaNs are passed over.
    fn maximum(&self, scores: &[R], floor: R) -> R;

    /// Replaces each score by `2^(score - shift)` and returns their sum.
    fn exponentiate(&self, scores: &mut [R], shift: R) -> R;
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
