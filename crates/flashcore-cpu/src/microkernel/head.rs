//! A head of Q, K or V: a view of the rows of one sequence in memory. The one place where rows and keys become addresses,
//! whether the sequence is of a rectangular batch, packed (varlen) or in pages.

use super::convert::are_finite;
use super::prefetch::prefetch;
use crate::planted::planted;
use crate::simd::real::Real;
use flashcore_problem::{DType, Sequence, Shape, Strides, TensorView};
use std::ops::Range;
use zerocopy::FromBytes;

/// Rows of one head of one sequence of a tensor, or of several interleaved heads (GQA).
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
    /// Pages that the rows of a single head lie in, where they do.
    pages: Option<Pages<'a>>,
}

/// True if the heads of a row lie beside each other, and rows apart (`BSHD`, packed sequences, pages of rows of all heads).
pub(crate) const fn are_heads_adjacent(shape: Shape, strides: Strides) -> bool {
    shape.heads > 1 && strides.head == shape.columns && strides.row >= shape.heads.saturating_mul(shape.columns)
}

/// Pages of a sequence in a KV cache.
#[derive(Clone, Copy)]
struct Pages<'a> {
    /// The page table of the sequence, whose entries are pages as far as there are rows.
    table: &'a [i32],
    page_size: usize,
    /// Binary logarithm of the page size, if it is a power of two: a division takes as long as ten multiply-adds.
    page_log2: Option<u32>,
    /// Rows in the pages before the first of the sequence.
    first: usize,
    /// Rows of the sequence.
    rows: usize,
    /// Elements from a page to the next.
    stride: usize,
}

impl Pages<'_> {
    /// Index of the page of a row, and the row in it.
    fn place(&self, row: usize) -> (usize, usize) {
        let row = self.first + row;
        match self.page_log2 {
            Some(log2) => (row >> log2, row & (self.page_size - 1)),
            None => (row / self.page_size, row % self.page_size),
        }
    }
}

impl<'a> Head<'a> {
    /// Rows of `heads` query heads from `first_head` on, interleaved.
    pub(crate) fn of_queries(
        tensor: TensorView<'a>,
        (shape, strides): (Shape, Strides),
        sequence: &Sequence<'a>,
        first_head: usize,
        heads: usize,
    ) -> Self {
        let (batch, row) = sequence.query_row(0);
        let head = Self::new(tensor, (shape, strides), (batch, row), first_head);
        Self { heads, ..head }
    }

    /// Keys or values of one head.
    pub(crate) fn of_keys(
        tensor: TensorView<'a>,
        (shape, strides): (Shape, Strides),
        sequence: &Sequence<'a>,
        head: usize,
    ) -> Self {
        let Some((table, page_size, first)) = sequence.pages() else {
            return Self::new(tensor, (shape, strides), sequence.key_row(0), head);
        };
        let page_log2 = page_size.is_power_of_two().then_some(page_size.trailing_zeros());
        let first = planted!(LeftpadPastAPage: first % page_size, first);
        let pages = Pages { table, page_size, page_log2, first, rows: sequence.key_length, stride: strides.batch };
        Self { pages: Some(pages), ..Self::new(tensor, (shape, strides), (0, 0), head) }
    }

    /// Rows of one head that follow one another from a batch and row on.
    pub(crate) fn new(
        tensor: TensorView<'a>,
        (shape, strides): (Shape, Strides),
        (batch, row): (usize, usize),
        head: usize,
    ) -> Self {
        Self {
            tensor,
            columns: shape.columns,
            row_stride: strides.row,
            start: strides.row_start(batch, head, row),
            heads: 1,
            stride_of_heads: strides.head,
            pages: None,
        }
    }

    pub(crate) fn dtype(self) -> DType {
        self.tensor.dtype
    }

    pub(crate) fn columns(self) -> usize {
        self.columns
    }

    /// Elements before a row of a page, by its index in the page table.
    fn row_of_page(self, pages: Pages<'_>, index: usize, row: usize) -> usize {
        let index = planted!(PagesPast1024: index.min(1024), index);
        self.start + pages.table[index] as usize * pages.stride + row * self.row_stride
    }

    /// Elements before a row.
    fn offset(self, row: usize) -> usize {
        if let Some(pages) = self.pages {
            let (index, row) = pages.place(row);
            return self.row_of_page(pages, index, row);
        }
        if self.heads == 1 {
            self.start + row * self.row_stride
        } else {
            let head = planted!(GroupHeadsPast8: (row % self.heads).min(7), row % self.heads);
            self.start + row / self.heads * self.row_stride + head * self.stride_of_heads
        }
    }

    /// Bytes of one row.
    pub(crate) fn row(self, row: usize) -> &'a [u8] {
        let size = self.tensor.dtype.size_bytes();
        let start = self.offset(row) * size;
        &self.tensor.data[start..start + self.columns * size]
    }

    /// Bytes from the first of some rows of a single head to the last, if they are [equally far apart](Self::row_bytes), as
    /// within one page.
    pub(crate) fn strided(self, rows: &Range<usize>) -> Option<&'a [u8]> {
        let start = match self.pages {
            Some(pages) => {
                let (index, row) = pages.place(rows.start);
                (row + rows.len() <= pages.page_size).then(|| self.row_of_page(pages, index, row))?
            }
            None => self.offset(rows.start),
        };
        let size = self.tensor.dtype.size_bytes();
        let end = start + rows.len().saturating_sub(1) * self.row_stride + self.columns;
        Some(&self.tensor.data[start * size..end * size])
    }

    /// Addresses of rows of a single head, as far as they exist: good for prefetching and nothing else. Returns their number.
    pub(crate) fn addresses(self, rows: &Range<usize>, list: &mut [*const u8]) -> usize {
        let mut count = 0;
        while count < rows.len().min(list.len())
            && let Some(first) = self.address(rows.start + count)
        {
            let left = rows.len().min(list.len()) - count;
            let of_page = self.rows_of_page_from(rows.start + count).min(left);
            for (index, place) in list[count..count + of_page].iter_mut().enumerate() {
                *place = first.wrapping_add(index.wrapping_mul(self.row_bytes()));
            }
            count += of_page;
        }
        count
    }

    /// True if rows of a single head are [equally far apart](Self::row_bytes), as within one page.
    pub(crate) fn are_strided(self, rows: &Range<usize>) -> bool {
        self.pages.is_none_or(|pages| pages.place(rows.start).1 + rows.len() <= pages.page_size)
    }

    /// Address of a row of a single head, which need not exist: good for prefetching and nothing else. `None` past the last
    /// page.
    pub(crate) fn address(self, row: usize) -> Option<*const u8> {
        let elements = match self.pages {
            Some(pages) if row >= planted!(PrefetchPastTheEnd: usize::MAX, pages.rows) => return None,
            Some(_) => self.offset(row),
            None => self.start.wrapping_add(row.wrapping_mul(self.row_stride)),
        };
        Some(self.tensor.data.as_ptr().wrapping_add(elements.wrapping_mul(self.tensor.dtype.size_bytes())))
    }

    /// Number of rows from `row` on that are in one page; `usize::MAX` where the sequence is not in pages.
    pub(crate) fn rows_of_page_from(self, row: usize) -> usize {
        self.pages.map_or(usize::MAX, |pages| pages.page_size - pages.place(row).1)
    }

    /// Runs of rows that are in one page each: the first row as bytes, and the number of rows. None where the sequence is not in
    /// pages.
    pub(crate) fn runs(self, rows: Range<usize>) -> impl Iterator<Item = (&'a [u8], usize)> {
        let pages = self.pages;
        let size = self.tensor.dtype.size_bytes();
        let (mut index, mut row) = pages.map_or((0, 0), |pages| pages.place(rows.start));
        let mut left = rows.len();
        std::iter::from_fn(move || {
            let pages = pages.filter(|_| left > 0)?;
            let count = left.min(pages.page_size - row);
            let start = self.row_of_page(pages, index, row) * size;
            let end = start + ((count - 1) * self.row_stride + self.columns) * size;
            (index, row, left) = (index + 1, 0, left - count);
            Some((&self.tensor.data[start..end], count))
        })
    }

    /// True if rows of a single head follow one another without a gap.
    fn are_contiguous(self, rows: &Range<usize>) -> bool {
        self.row_stride == self.columns && self.heads == 1 && self.are_strided(rows)
    }

    /// Elements from one row to the next, if that is always the same.
    pub(crate) fn row_stride(self) -> Option<usize> {
        (self.heads == 1).then_some(self.row_stride)
    }

    /// Bytes from one row of a single head to the next. The stride of the only row there is may be anything.
    pub(crate) fn row_bytes(self) -> usize {
        self.row_stride.wrapping_mul(self.tensor.dtype.size_bytes())
    }

    /// Rows of a single head in place, if they are contiguous, of the type wanted, and aligned for it.
    pub(crate) fn in_place<R: Real>(self, rows: Range<usize>) -> Option<&'a [R]> {
        if self.tensor.dtype != R::DTYPE || rows.is_empty() || !self.are_contiguous(&rows) {
            return None;
        }
        let size = self.tensor.dtype.size_bytes();
        let start = self.offset(rows.start) * size;
        <[R]>::ref_from_bytes(&self.tensor.data[start..start + rows.len() * self.columns * size]).ok()
    }

    /// Bytes of rows of a single head, if they are contiguous.
    pub(crate) fn bytes(self, rows: &Range<usize>) -> Option<&'a [u8]> {
        if rows.is_empty() || !self.are_contiguous(rows) {
            return None;
        }
        let start = self.offset(rows.start) * self.tensor.dtype.size_bytes();
        self.tensor.data.get(start..)?.get(..rows.len() * self.row_bytes())
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
        if self.are_contiguous(&rows) {
            // Contiguous rows are as good as one.
            let start = self.offset(rows.start) * dtype.size_bytes();
            return are_finite(dtype, &self.tensor.data[start..][..rows.len() * self.columns * dtype.size_bytes()]);
        }
        rows.all(|row| are_finite(dtype, self.row(row)))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A head of 5 columns, the second of 2, in the pages of a table, from a row of the first on.
    pub(crate) fn paged<'a>(data: &'a [u8], table: &'a [i32], page_size: usize, first: usize) -> Head<'a> {
        let tensor = TensorView { dtype: DType::Bf16, data };
        let shape = Shape { batch: 9, heads: 2, rows: page_size, columns: 5 };
        let strides = Strides { batch: 10 * page_size, head: 5, row: 10 };
        let page_log2 = page_size.is_power_of_two().then_some(page_size.trailing_zeros());
        let rows = table.len() * page_size - first;
        let pages = Pages { table, page_size, page_log2, first, rows, stride: strides.batch };
        Head { pages: Some(pages), ..Head::new(tensor, (shape, strides), (0, 0), 1) }
    }

    /// Rows of pages are where the table says, whichever way they are asked for.
    #[test]
    fn rows_of_pages_are_where_the_table_says() {
        let table = [7, 2, 8, 0, 5];
        for page_size in [1, 3, 4, 7, 16] {
            let data = vec![0; 9 * page_size * 20];
            for first in 0..page_size {
                let head = paged(&data, &table, page_size, first);
                let rows = 5 * page_size - first;
                let expected: Vec<*const u8> = (first..5 * page_size)
                    .map(|row| (table[row / page_size] as usize * page_size + row % page_size) * 20 + 10)
                    .map(|byte| data[byte..].as_ptr())
                    .collect();
                let of_rows: Vec<*const u8> = (0..rows).map(|row| head.row(row).as_ptr()).collect();
                assert_eq!(of_rows, expected, "pages of {page_size} from {first}");
                let mut list = vec![std::ptr::null(); rows];
                for start in 0..rows {
                    let count = head.addresses(&(start..rows + 3), &mut list);
                    assert_eq!(list[..count], expected[start..], "pages of {page_size} from {first}, row {start}");
                    for end in start + 1..=rows {
                        let is_strided = (first + start) / page_size == (first + end - 1) / page_size;
                        let bytes = head.strided(&(start..end));
                        let extent = bytes.map(|bytes| (bytes.as_ptr(), bytes.len()));
                        let of_page = (expected[start], (end - start - 1) * 20 + 10);
                        assert_eq!(extent, is_strided.then_some(of_page), "pages of {page_size}, {start} to {end}");
                    }
                }
                assert_eq!(head.addresses(&(rows..rows + 1), &mut list), 0);
            }
        }
    }
}
