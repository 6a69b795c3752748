//! A head of Q, K or V: a strided view of its rows in memory.

use super::convert::are_finite;
use super::prefetch::prefetch;
use crate::simd::real::Real;
use flashcore_problem::{DType, Shape, Strides, TensorView};
use std::ops::Range;
use zerocopy::FromBytes;

/// Rows of one head of one batch of a tensor, or of several interleaved heads (GQA).
#[derive(Clone, Copy)]
pub(crate) struct Head<'a> {
    tensor: TensorView<'a>,
    columns: usize,
    row_stride: usize,
    start: usize,
    /// Number of interleaved heads: row `r` is row `r / heads` of head `r % heads`.
    heads: usize,
    /// Elements from a head to the next.
    stride_of_heads: usize,
}

impl<'a> Head<'a> {
    pub(crate) fn new(tensor: TensorView<'a>, shape: Shape, strides: Strides, batch: usize, head: usize) -> Self {
        Self::of_group(tensor, shape, strides, batch, head, 1)
    }

    /// Rows of `heads` heads from `first_head` on, interleaved.
    pub(crate) fn of_group(
        tensor: TensorView<'a>,
        shape: Shape,
        strides: Strides,
        batch: usize,
        first_head: usize,
        heads: usize,
    ) -> Self {
        let start = strides.row_start(batch, first_head, 0);
        Self { tensor, columns: shape.columns, row_stride: strides.row, start, heads, stride_of_heads: strides.head }
    }

    pub(crate) fn dtype(self) -> DType {
        self.tensor.dtype
    }

    pub(crate) fn columns(self) -> usize {
        self.columns
    }

    /// Bytes of one row.
    pub(crate) fn row(self, row: usize) -> &'a [u8] {
        let size = self.tensor.dtype.size_bytes();
        let row = if self.heads == 1 {
            row * self.row_stride
        } else {
            row / self.heads * self.row_stride + row % self.heads * self.stride_of_heads
        };
        let start = (self.start + row) * size;
        &self.tensor.data[start..start + self.columns * size]
    }

    /// Elements from one row to the next, if that is always the same.
    pub(crate) fn row_stride(self) -> Option<usize> {
        (self.heads == 1).then_some(self.row_stride)
    }

    /// Bytes from one row of a single head to the next.
    pub(crate) fn row_bytes(self) -> usize {
        self.row_stride * self.tensor.dtype.size_bytes()
    }

    /// Rows of a single head in place, if they are contiguous, of the type wanted, and aligned for it.
    pub(crate) fn in_place<R: Real>(self, rows: Range<usize>) -> Option<&'a [R]> {
        if self.tensor.dtype != R::DTYPE || self.row_stride != self.columns || self.heads != 1 || rows.is_empty() {
            return None;
        }
        let size = self.tensor.dtype.size_bytes();
        let start = (self.start + rows.start * self.row_stride) * size;
        <[R]>::ref_from_bytes(&self.tensor.data[start..start + rows.len() * self.columns * size]).ok()
    }

    /// Bytes of rows of a single head, if they are contiguous.
    pub(crate) fn bytes(self, rows: &Range<usize>) -> Option<&'a [u8]> {
        if self.row_stride != self.columns || self.heads != 1 {
            return None;
        }
        let row_bytes = self.row_bytes();
        self.tensor
            .data
            .get(self.start * self.tensor.dtype.size_bytes() + rows.start * row_bytes..)?
            .get(..rows.len() * row_bytes)
    }

    /// Prefetches rows.
    pub(crate) fn prefetch(self, rows: Range<usize>) {
        for row in rows {
            prefetch(self.row(row));
        }
    }

    /// True if rows of a single head have no NaN and no infinity. Inlined into functions with vector instructions.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "instructions of a level must end up in its functions")]
    pub(crate) fn are_finite(self, mut rows: Range<usize>) -> bool {
        if rows.is_empty() {
            return true;
        }
        let dtype = self.tensor.dtype;
        if self.heads == 1 && self.row_stride == self.columns {
            // Contiguous rows are as good as one.
            let start = (self.start + rows.start * self.columns) * dtype.size_bytes();
            return are_finite(dtype, &self.tensor.data[start..][..rows.len() * self.columns * dtype.size_bytes()]);
        }
        rows.all(|row| are_finite(dtype, self.row(row)))
    }
}
