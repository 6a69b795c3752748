//! Matrix descriptors: matrices in shared memory as `wgmma` reads them.
//!
//! A descriptor gives the address of the first element, two strides and the swizzle. Memory is read in *chunks* of 16
//! bytes, 8 elements of 16 bits along the adjacent dimension or 16 of 8 bits. The address of a chunk follows the canonical layouts of the PTX
//! manual (see [`flashcore_ir::builder::MatrixLayout`]); the swizzle then permutes chunks by the bits of their
//! addresses, which is why a matrix must begin where the permutation does, except for the offset within a row of the
//! swizzle's width.

use flashcore_ir::{Major, Swizzle};

/// Bytes along the depth of one product.
pub(crate) const DEPTH_BYTES: usize = 32;
/// Bytes of a chunk.
pub(crate) const CHUNK_BYTES: u32 = 16;
/// Elements along the depth of one product, and of a chunk, if they have 16 bits: only these can be adjacent along the outer
/// dimension.
const DEPTH: usize = 16;
const CHUNK: usize = 8;

/// A matrix of `outer` × 32 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SharedMatrix {
    pub(crate) start: u32,
    leading: u32,
    stride: u32,
    swizzle: Swizzle,
    major: Major,
    outer: usize,
    /// Bytes of an element.
    element: usize,
}

impl SharedMatrix {
    /// Reads a descriptor; `None` if it has a base offset, which the language does not support.
    pub(crate) fn new(descriptor: u64, major: Major, outer: usize, element: usize) -> Option<Self> {
        let field = |shift: u32| ((descriptor >> shift & 0x3fff) as u32) << 4;
        let swizzle = match descriptor >> 62 {
            0 => Swizzle::None,
            1 => Swizzle::Bytes128,
            2 => Swizzle::Bytes64,
            _ => Swizzle::Bytes32,
        };
        let base_offset = descriptor >> 49 & 7;
        let matrix = Self { start: field(0), leading: field(16), stride: field(32), swizzle, major, outer, element };
        (base_offset == 0).then_some(matrix)
    }

    /// True if the address is aligned for its swizzle, except for the offset within a row of the swizzle's width.
    pub(crate) fn is_aligned(&self) -> bool {
        self.swizzle.bytes().is_none_or(|width| self.start % self.swizzle.period() < width)
    }

    /// The alignment that [`SharedMatrix::is_aligned`] requires.
    pub(crate) fn alignment(&self) -> u32 {
        self.swizzle.period()
    }

    /// The number of chunks.
    pub(crate) fn chunk_count(&self) -> usize {
        self.outer * DEPTH_BYTES / CHUNK_BYTES as usize
    }

    /// The address of a chunk by its number: along the depth first, then along the outer dimension.
    pub(crate) fn chunk(&self, number: usize) -> u32 {
        let offset = match (self.major, self.swizzle.bytes()) {
            (Major::Depth, width) => {
                let (outer, depth) = ((number / 2) as u32, (number % 2) as u32);
                let row = width.unwrap_or(CHUNK_BYTES);
                let along = if width.is_some() { depth * CHUNK_BYTES } else { depth * self.leading };
                outer % 8 * row + outer / 8 * self.stride + along
            }
            (Major::Outer, None) => {
                let (outer, depth) = ((number / DEPTH) as u32, (number % DEPTH) as u32);
                outer * self.stride + depth % 8 * CHUNK_BYTES + depth / 8 * self.leading
            }
            (Major::Outer, Some(width)) => {
                let (outer, depth) = ((number / DEPTH) as u32, (number % DEPTH) as u32);
                let chunks = width / CHUNK_BYTES;
                outer % chunks * CHUNK_BYTES
                    + outer / chunks * self.leading
                    + depth % 8 * width
                    + depth / 8 * self.stride
            }
        };
        self.swizzle.apply(self.start.wrapping_add(offset))
    }

    /// The outer index and the depth of element `index` of a chunk.
    pub(crate) fn position(&self, number: usize, index: usize) -> (usize, usize) {
        match self.major {
            Major::Depth => (number / 2, number % 2 * (CHUNK_BYTES as usize / self.element) + index),
            Major::Outer => (number / DEPTH * CHUNK + index, number % DEPTH),
        }
    }
}
