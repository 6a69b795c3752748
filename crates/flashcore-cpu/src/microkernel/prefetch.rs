//! Software prefetch: cache lines that are requested before they are needed.

use super::head::Head;
use std::ops::Range;

/// Prefetches bytes into the second-level cache. Does nothing where there is no such instruction.
pub(crate) fn prefetch(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        for line in bytes.chunks(CacheLines::SIZE) {
            // SAFETY: every processor of this architecture has it, and it has no effect but on caches.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}

/// Memory that is needed next, which a kernel may prefetch [during a product](super::Products::FUSED_PREFETCH). Nothing
/// is read or written through these addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PrefetchPlan {
    /// Rows of the query.
    pub(crate) query: CacheLines,
    /// Keys and values of the next tile, or some of them.
    pub(crate) tile: [CacheLines; 2],
    /// The lines that the output will be written to.
    pub(crate) output: CacheLines,
}

/// Prefetch of one block of a product: lines from an address on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Prefetch {
    Nothing,
    Read(*const u8),
    Write(*const u8),
}

impl PrefetchPlan {
    pub(crate) const NOTHING: Self =
        Self { query: CacheLines::NONE, tile: [CacheLines::NONE; 2], output: CacheLines::NONE };

    /// The prefetch of the next block, when each prefetches up to `lines` lines and so many blocks have done so.
    #[inline]
    pub(crate) fn for_block(self, blocks: usize, lines: usize) -> Prefetch {
        let mut index = blocks * lines;
        let [key, value] = self.tile;
        for read in [self.query, key, value] {
            if let Some(address) = read.get(index) {
                return Prefetch::Read(address);
            }
            // A block prefetches one kind.
            index = index.saturating_sub(read.count.next_multiple_of(lines));
        }
        self.output.get(index).map_or(Prefetch::Nothing, Prefetch::Write)
    }
}

/// Cache lines of contiguous bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheLines {
    first: *const u8,
    count: usize,
}

impl CacheLines {
    /// Bytes of a line.
    pub(crate) const SIZE: usize = 64;

    pub(crate) const NONE: Self = Self { first: std::ptr::null(), count: 0 };

    pub(crate) fn new(bytes: *const [u8]) -> Self {
        Self { first: bytes.cast(), count: bytes.len().div_ceil(Self::SIZE) }
    }

    /// Cache lines of rows; none if the rows are not contiguous.
    pub(crate) fn of_rows(head: Head<'_>, rows: &Range<usize>) -> Self {
        head.bytes(rows).map_or(Self::NONE, |bytes| Self::new(bytes))
    }

    /// Address of line number `index`, if there are so many.
    pub(crate) fn get(self, index: usize) -> Option<*const u8> {
        (index < self.count).then(|| self.first.wrapping_add(index * Self::SIZE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_end_with_their_bytes() {
        for (bytes, count) in [(0, 0), (1, 1), (64, 1), (65, 2), (8192, 128)] {
            let bytes = vec![0_u8; bytes];
            let lines = CacheLines::new(&raw const *bytes);
            let addresses: Vec<*const u8> = (0..200).map_while(|index| lines.get(index)).collect();
            let expected: Vec<*const u8> = bytes.chunks(64).map(<[u8]>::as_ptr).collect();
            assert_eq!((addresses.len(), addresses), (count, expected));
        }
        assert_eq!(CacheLines::NONE.get(0), None);
    }

    #[test]
    fn blocks_prefetch_one_kind_after_the_other() {
        let bytes = [0_u8; 20 * CacheLines::SIZE];
        let lines = |range: Range<usize>| {
            CacheLines::new(&raw const bytes[CacheLines::SIZE * range.start..CacheLines::SIZE * range.end])
        };
        let plan = PrefetchPlan { query: lines(0..5), tile: [lines(5..9), CacheLines::NONE], output: lines(9..12) };
        let address = |line: usize| bytes[CacheLines::SIZE * line..].as_ptr();
        let prefetches: Vec<Prefetch> = (0..6).map(|blocks| plan.for_block(blocks, 4)).collect();
        let (read, written) = (|line| Prefetch::Read(address(line)), |line| Prefetch::Write(address(line)));
        assert_eq!(prefetches, [read(0), read(4), read(5), written(9), Prefetch::Nothing, Prefetch::Nothing]);
        let prefetches: Vec<Prefetch> = (0..5).map(|blocks| plan.for_block(blocks, 8)).collect();
        assert_eq!(prefetches, [read(0), read(5), written(9), Prefetch::Nothing, Prefetch::Nothing]);
        assert_eq!(PrefetchPlan::NOTHING.for_block(0, 1), Prefetch::Nothing);
    }
}
