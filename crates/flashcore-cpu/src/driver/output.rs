//! The output: memory that several threads write at once, each its own part.

use flashcore_problem::{OutputViews, Problem, Strides};
use std::marker::PhantomData;
use std::ops::Range;

/// A slice whose disjoint parts are lent to threads.
pub(crate) struct Disjoint<'a, T> {
    first: *mut T,
    len: usize,
    borrowed: PhantomData<&'a mut [T]>,
}

// SAFETY: it is a mutable slice that threads use parts of, which may be sent where its elements may.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}
// SAFETY: parts are handed out only by `part`, whose callers vouch that no two of them overlap at the same time.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { first: slice.as_mut_ptr(), len: slice.len(), borrowed: PhantomData }
    }

    /// Lends the elements from `start` on.
    ///
    /// # Safety
    ///
    /// No two parts that overlap are in use at the same time.
    #[expect(clippy::mut_from_ref, reason = "callers vouch that parts do not overlap")]
    pub(crate) unsafe fn part(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start, "a part outside of the slice");
        // SAFETY: the part lies within the slice, which is borrowed mutably for as long as `self` is, and the caller
        // vouches that nobody else has any of it.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(start), len) }
    }
}

/// Outputs of a problem, row by row.
pub(crate) struct OutputRows<'a> {
    output: Disjoint<'a, u8>,
    lse: Option<Disjoint<'a, f32>>,
    strides: Strides,
    row_bytes: usize,
    element_bytes: usize,
    heads: usize,
    rows: usize,
}

impl<'a> OutputRows<'a> {
    /// From outputs that have been validated.
    pub(crate) fn new(problem: &Problem, outputs: OutputViews<'a>) -> Self {
        let (shape, element_bytes) = (problem.output_shape(), problem.dtypes().output.size_bytes());
        Self {
            output: Disjoint::new(outputs.output.data),
            lse: outputs.lse.map(Disjoint::new),
            strides: problem.strides().output,
            row_bytes: shape.columns * element_bytes,
            element_bytes,
            heads: shape.heads,
            rows: shape.rows,
        }
    }

    /// Output of one row, and its log-sum-exp where that is wanted.
    ///
    /// # Safety
    ///
    /// No row is in use twice at the same time. Rows of valid outputs do not overlap.
    #[expect(clippy::mut_from_ref, reason = "callers vouch that no row is in use twice")]
    pub(crate) unsafe fn row(&self, batch: usize, head: usize, row: usize) -> (&mut [u8], Option<&mut f32>) {
        let start = self.strides.row_start(batch, head, row) * self.element_bytes;
        let index = (batch * self.heads + head) * self.rows + row;
        // SAFETY: validation refuses outputs whose rows overlap, and the caller vouches that this row is not in use.
        unsafe {
            let lse = self.lse.as_ref().and_then(|rows| rows.part(index, 1).first_mut());
            (self.output.part(start, self.row_bytes), lse)
        }
    }

    /// Addresses of rows of one head, if these are contiguous.
    pub(crate) fn addresses(&self, batch: usize, head: usize, rows: &Range<usize>) -> Option<*const [u8]> {
        let first = self.strides.row_start(batch, head, rows.start) * self.element_bytes;
        let start = self.output.first.wrapping_add(first).cast_const();
        let are_contiguous = self.strides.row * self.element_bytes == self.row_bytes;
        are_contiguous.then(|| std::ptr::slice_from_raw_parts(start, rows.len() * self.row_bytes))
    }

    /// Outputs of rows of one head, and their log-sum-exps where those are wanted, if the rows are contiguous.
    ///
    /// # Safety
    ///
    /// As [`row`](Self::row).
    #[expect(clippy::mut_from_ref, reason = "callers vouch that no row is in use twice")]
    pub(crate) unsafe fn contiguous_rows(
        &self,
        batch: usize,
        head: usize,
        rows: Range<usize>,
    ) -> Option<(&mut [u8], Option<&mut [f32]>)> {
        let start = self.addresses(batch, head, &rows)?.addr() - self.output.first.addr();
        let index = (batch * self.heads + head) * self.rows + rows.start;
        // SAFETY: as for one row; there is nothing between them.
        unsafe {
            let lse = self.lse.as_ref().map(|all| all.part(index, rows.len()));
            Some((self.output.part(start, rows.len() * self.row_bytes), lse))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_problem::{DType, Layout, Outputs};

    /// Every element gets the number of its row, whatever the layout.
    #[test]
    fn every_row_has_its_place() {
        for layout in [Layout::Bhsd, Layout::Bshd] {
            let mut problem = Problem::new(2, 3, 7, 4, DType::F32);
            problem.lse = true;
            problem.layout = layout;
            let mut outputs = Outputs::poisoned(&problem);
            let rows = OutputRows::new(&problem, outputs.views_mut());
            let number = |batch: usize, head: usize, row: usize| (batch * 100 + head * 10 + row) as f32;
            for (batch, head, row) in problem.output_shape().each_row() {
                // SAFETY: one row after the other.
                let (bytes, lse) = unsafe { rows.row(batch, head, row) };
                *lse.unwrap() = number(batch, head, row);
                for element in bytes.chunks_exact_mut(4) {
                    element.copy_from_slice(&number(batch, head, row).to_le_bytes());
                }
            }
            let dense = outputs.output.dense(problem.output_shape(), problem.strides().output);
            for (index, (batch, head, row)) in problem.output_shape().each_row().enumerate() {
                let number = f64::from(number(batch, head, row));
                assert_eq!(dense[index * 4..][..4], [number; 4], "{layout:?}");
                assert_eq!(outputs.lse.as_ref().map(|rows| f64::from(rows[index])), Some(number));
            }
        }
    }

    /// Contiguous rows are the places of their rows, one after the other, where the layout has them so.
    #[test]
    fn contiguous_rows_are_rows() {
        for layout in [Layout::Bhsd, Layout::Bshd] {
            let mut problem = Problem::new(2, 3, 7, 4, DType::F32);
            problem.lse = true;
            problem.layout = layout;
            let mut outputs = Outputs::poisoned(&problem);
            let rows = OutputRows::new(&problem, outputs.views_mut());
            for (batch, head) in [(0, 0), (0, 2), (1, 1)] {
                // SAFETY: nothing is written.
                let contiguous = unsafe { rows.contiguous_rows(batch, head, 2..6) };
                assert_eq!(contiguous.is_some(), layout == Layout::Bhsd);
                let Some((bytes, lse)) = contiguous else { continue };
                assert_eq!(rows.addresses(batch, head, &(2..6)), Some(&raw const *bytes));
                let (bytes, lse) = (bytes.as_ptr_range(), lse.unwrap().as_ptr_range());
                for (index, row) in (2..6).enumerate() {
                    // SAFETY: nothing is written.
                    let (of_row, lse_of_row) = unsafe { rows.row(batch, head, row) };
                    assert_eq!(of_row.as_ptr(), bytes.start.wrapping_add(index * 16), "{batch} {head} {row}");
                    assert_eq!(&raw const *lse_of_row.unwrap(), lse.start.wrapping_add(index));
                }
                assert_eq!(bytes.end, bytes.start.wrapping_add(4 * 16));
                assert_eq!(lse.end, lse.start.wrapping_add(4));
            }
        }
    }
}
