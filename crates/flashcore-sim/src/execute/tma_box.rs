//! The box of a tensor that TMA copies: its bytes in global memory, and their swizzled layout in shared memory.

use flashcore_ir::tensor_map::MOST_DIMENSIONS;
use flashcore_ir::{OutOfBounds, TensorElement, TensorMap};

/// A box of a tensor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TensorBox {
    pub(crate) map: TensorMap,
    /// The coordinates of the first element, the innermost first.
    pub(crate) at: [i32; MOST_DIMENSIONS],
}

/// Adjacent bytes of a box that lie within the tensor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece {
    /// In global memory.
    pub(crate) address: u64,
    pub(crate) bytes: u32,
    /// The start of the piece in the box without swizzle.
    offset: u32,
}

impl TensorBox {
    /// The contents of the box before the load: the fill value, for elements outside the tensor.
    pub(crate) fn filled(&self) -> Vec<u8> {
        let bytes = self.map.box_bytes() as usize;
        match (self.map.fill, self.map.element) {
            (OutOfBounds::Nan, TensorElement::F16 | TensorElement::Bf16) => [0xff, 0x7f].repeat(bytes / 2),
            (OutOfBounds::Nan, TensorElement::F32) => 0x7fff_ffffu32.to_le_bytes().repeat(bytes / 4),
            (OutOfBounds::Nan, TensorElement::U8 | TensorElement::U16 | TensorElement::U32)
            | (OutOfBounds::Zero, _) => {
                vec![0; bytes]
            }
        }
    }

    /// The rows of the box, clipped to the tensor.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Piece> {
        let Self { map, at } = *self;
        let moved = map.moved();
        let element = map.element.bytes();
        // The innermost dimension is moved as a whole: its elements are adjacent.
        let first = i64::from(at[0]).max(0);
        let end = (i64::from(at[0]) + i64::from(moved[0])).min(map.dimensions[0] as i64);
        let count = (end - first).max(0) as u32;
        let skipped = (first - i64::from(at[0])) as u32;
        let rows: u32 = moved[1..].iter().product();
        (0..rows).filter_map(move |row| {
            let mut rest = row;
            let mut address = map.base as i64 + first * i64::from(element);
            for axis in 1..MOST_DIMENSIONS {
                let index = rest % moved[axis];
                rest /= moved[axis];
                let coordinate = i64::from(at[axis]) + i64::from(index * map.element_strides[axis]);
                if coordinate < 0 || coordinate as u64 >= map.dimensions[axis] {
                    return None;
                }
                address += coordinate * map.strides[axis - 1] as i64;
            }
            let offset = (row * moved[0] + skipped) * element;
            (count > 0).then_some(Piece { address: address as u64, bytes: count * element, offset })
        })
    }

    /// Writes the bytes of a piece into a box at `target`, swizzled by the address.
    pub(crate) fn write_piece(&self, target: u32, piece: Piece, bytes: &[u8], data: &mut [u8]) {
        for (offset, pair) in (piece.offset..).step_by(2).zip(bytes.chunks_exact(2)) {
            let at = (self.map.swizzle.apply(target + offset) - target) as usize;
            data[at..at + 2].copy_from_slice(pair);
        }
    }

    /// Reads the bytes of a piece from a box at `source`.
    pub(crate) fn read_piece(&self, source: u32, piece: Piece, data: &[u8]) -> Vec<u8> {
        let offsets = (piece.offset..piece.offset + piece.bytes).step_by(2);
        let pairs = offsets.map(|offset| (self.map.swizzle.apply(source + offset) - source) as usize);
        pairs.flat_map(|at| [data[at], data[at + 1]]).collect()
    }
}
