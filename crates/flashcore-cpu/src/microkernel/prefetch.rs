//! Asking for memory before it is needed.

use super::convert::Head;
use std::ops::Range;

/// Asks for bytes that will be read soon. Does nothing where the processor cannot be asked.
pub(crate) fn prefetch(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        /// Bytes that come to a cache together.
        const LINE: usize = 64;
        for line in bytes.chunks(LINE) {
            // SAFETY: every processor of this architecture has it, and it has no effect but on caches.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}

/// Memory that is needed soon, which a kernel may [ask for](Microkernel::ASKS_ALONG) along with a product. Nothing is read
/// or written through these addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Soon {
    /// Rows of the query.
    pub(crate) query: Lines,
    /// Keys and values of the next tile, or some of them.
    pub(crate) tile: [Lines; 2],
    /// Where the output is written.
    pub(crate) output: Lines,
}

/// What a block of a product asks for: lines from an address on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    Nothing,
    Read(*const u8),
    Written(*const u8),
}

impl Soon {
    pub(crate) const NOTHING: Self = Self { query: Lines::NONE, tile: [Lines::NONE; 2], output: Lines::NONE };

    /// What the next block asks for, when each asks for up to `lines` and so many have done so.
    #[inline]
    pub(crate) fn after_blocks(self, blocks: usize, lines: usize) -> Ask {
        let mut index = blocks * lines;
        let [key, value] = self.tile;
        for read in [self.query, key, value] {
            if let Some(address) = read.get(index) {
                return Ask::Read(address);
            }
            // A block asks for one kind.
            index = index.saturating_sub(read.count.next_multiple_of(lines));
        }
        self.output.get(index).map_or(Ask::Nothing, Ask::Written)
    }
}

/// Bytes that lie one behind the other, in lines that come to a cache together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lines {
    first: *const u8,
    count: usize,
}

impl Lines {
    /// Bytes of a line.
    pub(crate) const SIZE: usize = 64;

    pub(crate) const NONE: Self = Self { first: std::ptr::null(), count: 0 };

    pub(crate) fn new(bytes: *const [u8]) -> Self {
        Self { first: bytes.cast(), count: bytes.len().div_ceil(Self::SIZE) }
    }

    /// Those of rows, where these lie one behind the other.
    pub(crate) fn of_rows(head: Head<'_>, rows: &Range<usize>) -> Self {
        head.bytes(rows).map_or(Self::NONE, |bytes| Self::new(bytes))
    }

    /// The address of a line, if it is one of them.
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
            let lines = Lines::new(&raw const *bytes);
            let addresses: Vec<*const u8> = (0..200).map_while(|index| lines.get(index)).collect();
            let expected: Vec<*const u8> = bytes.chunks(64).map(<[u8]>::as_ptr).collect();
            assert_eq!((addresses.len(), addresses), (count, expected));
        }
        assert_eq!(Lines::NONE.get(0), None);
    }

    #[test]
    fn blocks_ask_for_one_thing_after_the_other() {
        let bytes = [0_u8; 20 * Lines::SIZE];
        let lines =
            |range: Range<usize>| Lines::new(&raw const bytes[Lines::SIZE * range.start..Lines::SIZE * range.end]);
        let soon = Soon { query: lines(0..5), tile: [lines(5..9), Lines::NONE], output: lines(9..12) };
        let address = |line: usize| bytes[Lines::SIZE * line..].as_ptr();
        let asks: Vec<Ask> = (0..6).map(|blocks| soon.after_blocks(blocks, 4)).collect();
        let (read, written) = (|line| Ask::Read(address(line)), |line| Ask::Written(address(line)));
        assert_eq!(asks, [read(0), read(4), read(5), written(9), Ask::Nothing, Ask::Nothing]);
        let asks: Vec<Ask> = (0..5).map(|blocks| soon.after_blocks(blocks, 8)).collect();
        assert_eq!(asks, [read(0), read(5), written(9), Ask::Nothing, Ask::Nothing]);
        assert_eq!(Soon::NOTHING.after_blocks(0, 1), Ask::Nothing);
    }
}
