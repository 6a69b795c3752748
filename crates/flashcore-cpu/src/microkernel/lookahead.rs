//! Software prefetch while [decoding](super::decode): lines of the rows that come next, a few with every step of the loops.
//!
//! A processor drops prefetches that it cannot queue. On Zen 5 a quarter to a half of 512 lines are not there when one is
//! asked for every 0.6 ns, 5 in 100 at 1 to 1.2 ns, and none at 1.7 ns; each that is missing costs as much as hundreds of
//! multiply-adds. In a long run of memory the hardware finds most of them again, at the beginning of a page none. So lines
//! are spread over all of the steps as evenly as the loops allow.

#![expect(clippy::inline_always, reason = "instructions of a level must end up in its functions")]

use crate::attend::decode::{KV_TILE, PrefetchRows};
use crate::microkernel::head::Head;
use crate::microkernel::prefetch::CacheLines;
use crate::simd::vector::Vector;
use std::mem::MaybeUninit;

/// Rows and lines to prefetch during a loop over the keys of a tile.
pub(super) struct Lookahead<'a> {
    /// Rows that the next loop reads: one with every key, into the first-level cache.
    pub(super) next: NextRows<'a>,
    /// Lines that are needed in a tile from now: some with every step, into the second-level cache.
    pub(super) far: FarLines<'a>,
}

/// Memory for a list of rows, one for each key of a tile.
pub(super) type RowList = [MaybeUninit<*const u8>; KV_TILE];

/// Rows of a head that are read next, as many as the tile has keys.
#[derive(Clone, Copy)]
pub(super) struct NextRows<'a> {
    /// Address of each; all of them are written.
    rows: &'a [MaybeUninit<*const u8>],
    /// Bytes of a row; none where nothing is prefetched.
    bytes: usize,
}

impl<'a> NextRows<'a> {
    pub(super) const NOTHING: Self = Self { rows: &[], bytes: 0 };

    /// Of the first `keys` rows, the last that exists in place of those that do not. Of each of several pages the first and the
    /// last line are prefetched at once: pages are anywhere in memory, and so their addresses are translated side by side,
    /// before any is waited for.
    ///
    /// # Safety
    ///
    /// The processor has the instructions of `V`.
    #[inline(always)]
    pub(super) unsafe fn new<V: Vector>(of: &PrefetchRows<'_>, keys: usize, list: &'a mut RowList) -> Self {
        let PrefetchRows { head, rows } = of;
        let list = &mut list[..keys];
        let (bytes, row_bytes) = (head.columns() * head.dtype().size_bytes(), head.row_bytes());
        let (mut count, mut last) = (0, None);
        while count < keys.min(rows.len())
            && let Some(first) = head.address(rows.start + count)
        {
            let left = keys.min(rows.len()) - count;
            let of_page = head.rows_of_page_from(rows.start + count).min(left);
            for (index, place) in list[count..count + of_page].iter_mut().enumerate() {
                place.write(first.wrapping_add(index.wrapping_mul(row_bytes)));
            }
            let last_row = first.wrapping_add((of_page - 1).wrapping_mul(row_bytes));
            if count > 0 || of_page < left {
                // SAFETY: the caller vouches for the instructions.
                unsafe {
                    V::prefetch(first);
                    V::prefetch(last_row.wrapping_add(bytes - 1));
                }
            }
            (count, last) = (count + of_page, Some(last_row));
        }
        let Some(last) = last else { return Self::NOTHING };
        for place in &mut list[count..] {
            place.write(last);
        }
        Self { rows: list, bytes }
    }

    /// Of rows of so many bytes by their addresses.
    #[inline(always)]
    pub(super) fn listed(
        list: &'a mut RowList,
        keys: usize,
        bytes: usize,
        address: impl Fn(usize) -> *const u8,
    ) -> Self {
        let rows = &mut list[..keys];
        for (row, place) in rows.iter_mut().enumerate() {
            place.write(address(row));
        }
        Self { rows, bytes }
    }

    /// Prefetches so many lines from a byte on of each of the rows that go with `KEYS` keys, unless the byte lies past them.
    ///
    /// # Safety
    ///
    /// The processor has the instructions of `V`, and the tile has these keys.
    #[inline(always)]
    pub(super) unsafe fn lines<V: Vector, const KEYS: usize>(self, first: usize, byte: usize, lines: usize) {
        if byte < self.bytes {
            for key in first..first + KEYS {
                // SAFETY: there are as many rows as keys where there are any bytes, and all of them are written.
                let row = unsafe { self.rows.get_unchecked(key).assume_init() };
                for line in 0..lines {
                    // SAFETY: the caller vouches for the instructions.
                    unsafe { V::prefetch_next(row.wrapping_add(byte + line * CacheLines::SIZE)) };
                }
            }
        }
    }

    /// Prefetches all lines from a byte on of each of the rows that go with `KEYS` keys.
    ///
    /// # Safety
    ///
    /// The processor has the instructions of `V`, and the tile has these keys.
    #[inline(always)]
    pub(super) unsafe fn rest<V: Vector, const KEYS: usize>(self, first: usize, byte: usize) {
        let mut byte = byte.next_multiple_of(CacheLines::SIZE);
        while byte < self.bytes {
            // SAFETY: the caller vouches for instructions and keys.
            unsafe { self.lines::<V, KEYS>(first, byte, 1) };
            byte += CacheLines::SIZE;
        }
    }
}

/// Upper bound of the [`FarLines`] of a tile: those of two rows of eight heads of 128 columns of `f32`, keys and values.
const MAX_FAR_LINES: usize = 256;

/// Memory for a list of lines.
pub(super) type LineList = [MaybeUninit<*const u8>; MAX_FAR_LINES];

/// Lines of rows of several heads that are needed in a tile from now, a few of which are prefetched at a time.
pub(super) struct FarLines<'a> {
    /// All of them are written.
    lines: &'a [MaybeUninit<*const u8>],
}

impl<'a> FarLines<'a> {
    /// No lines: there is one head.
    pub(super) const NONE: Self = Self { lines: &[] };

    /// Of rows of keys and values by their addresses, each of adjacent heads like these two, as far as the list has room.
    pub(super) fn new(
        rows: &[&[*const u8]; 2],
        heads_like: [&Head<'_>; 2],
        heads: usize,
        list: &'a mut LineList,
    ) -> Self {
        let mut count = 0;
        for (rows, head) in rows.iter().zip(heads_like) {
            let lines = (heads * head.columns() * head.dtype().size_bytes()).div_ceil(CacheLines::SIZE);
            for row in *rows {
                let Some(places) = list.get_mut(count..count + lines) else { break };
                for (index, place) in places.iter_mut().enumerate() {
                    place.write(row.wrapping_add(index * CacheLines::SIZE));
                }
                count += lines;
            }
        }
        Self { lines: &list[..count] }
    }

    /// Number of lines that are left.
    #[inline(always)]
    pub(super) fn count(&self) -> usize {
        self.lines.len()
    }

    /// Prefetches the next lines, if so many are left.
    ///
    /// # Safety
    ///
    /// The processor has the instructions of `V`.
    #[inline(always)]
    pub(super) unsafe fn advance<V: Vector, const LINES: usize>(&mut self) {
        if let Some((lines, rest)) = self.lines.split_first_chunk::<LINES>() {
            for line in lines {
                // SAFETY: all of the lines are written, and the caller vouches for the instructions.
                unsafe { V::prefetch(line.assume_init()) };
            }
            self.lines = rest;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::microkernel::head::tests::paged;
    use crate::simd::portable::Array;

    /// Every key has a row to prefetch: the next ones, and the last of these again where there are no more.
    #[test]
    fn every_key_has_a_row() {
        let (table, data) = ([3, 1, 2], [0; 9 * 80]);
        let head = paged(&data, &table, 4, 1);
        let row = |row: usize| head.row(row).as_ptr();
        for (rows, keys, expected) in [
            (2..10, 5, vec![2, 3, 4, 5, 6]),
            (9..13, 4, vec![9, 10, 10, 10]),
            (0..2, 3, vec![0, 1, 1]),
            (11..13, 2, vec![]),
        ] {
            let mut list: RowList = [MaybeUninit::uninit(); _];
            // SAFETY: the portable level needs no instructions.
            let next = unsafe { NextRows::new::<Array<f32>>(&PrefetchRows { head: &head, rows }, keys, &mut list) };
            // SAFETY: all rows are written.
            let rows: Vec<*const u8> = next.rows.iter().map(|row| unsafe { row.assume_init() }).collect();
            assert_eq!((rows, next.bytes), (expected.iter().map(|&at| row(at)).collect(), expected.len().min(1) * 10));
        }
    }

    /// Lines come in order, keys first, in whole rows of all heads, and end with the list.
    #[test]
    fn lines_come_in_order() {
        let (table, data) = ([3, 1, 2], [0; 9 * 80]);
        let head = paged(&data, &table, 4, 0);
        let rows: Vec<*const u8> = (0..200).map(|row| data.as_ptr().wrapping_add(1000 * row)).collect();
        let lines = |of_keys: usize, of_values: usize, heads: usize| {
            let mut list: LineList = [MaybeUninit::uninit(); _];
            let rows = [&rows[..of_keys], &rows[100..100 + of_values]];
            let mut far = FarLines::new(&rows, [&head; 2], heads, &mut list);
            // SAFETY: all lines are written.
            let lines: Vec<*const u8> = far.lines.iter().map(|line| unsafe { line.assume_init() }).collect();
            // SAFETY: the portable level needs no instructions.
            unsafe { far.advance::<Array<f32>, 3>() };
            assert_eq!(far.count(), if lines.len() < 3 { lines.len() } else { lines.len() - 3 });
            lines
        };
        let line = |row: usize, line: usize| rows[row].wrapping_add(64 * line);
        // 13 heads of 10 bytes are three lines.
        assert_eq!(lines(1, 1, 13), [line(0, 0), line(0, 1), line(0, 2), line(100, 0), line(100, 1), line(100, 2)]);
        assert_eq!(lines(2, 0, 6), [line(0, 0), line(1, 0)]);
        assert_eq!(lines(100, 100, 13).len(), MAX_FAR_LINES / 3 * 3);
    }
}
