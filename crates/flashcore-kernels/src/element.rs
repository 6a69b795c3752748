//! Element types that the kernels are generic over, and the layout in memory that follows from an element's size.

use flashcore_ir::types::{Bf16x2, F16x2, F32, HalfPair, MatrixOperand, U32};
use flashcore_ir::{Builder, Reg};
use flashcore_problem::DType;

use crate::primitives::{CHUNK_BYTES, PANEL_ROW_BYTES};

/// Bytes of a row of A that one `mma` or `wgmma` multiplies, whatever the element type.
const MMA_K_BYTES: u32 = 32;

/// Element layout: the hardware counts in bytes, tensors in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ElementLayout {
    /// Bytes of one element.
    pub bytes: u32,
}

impl ElementLayout {
    /// The layout of an element type.
    pub const fn of(dtype: DType) -> Self {
        Self { bytes: dtype.size_bytes() as u32 }
    }

    /// Depth of a tensor-core product: `m16n8k16` and `wgmma` k16 of 16-bit elements, k32 of 8-bit ones, `m16n8k8` of `tf32`.
    pub const fn mma_k(self) -> u32 {
        MMA_K_BYTES / self.bytes
    }

    /// Columns rounded up to whole depth steps.
    pub const fn padded_columns(self, columns: u32) -> u32 {
        columns.next_multiple_of(self.mma_k())
    }

    /// Elements of a chunk: a row of an `ldmatrix` matrix, the widest `cp.async`, the unit that a swizzle exchanges.
    pub const fn chunk_elements(self) -> u32 {
        CHUNK_BYTES / self.bytes
    }

    /// Columns of a panel, a row of the atom of the 128-byte swizzle: the widest TMA box that `wgmma` can read.
    pub const fn panel_columns(self) -> u32 {
        PANEL_ROW_BYTES / self.bytes
    }
}

/// A pair of 16-bit floats, packed in a register, that memory holds, tensor cores multiply, and the scalar kernel takes
/// apart.
pub trait Element: HalfPair + MatrixOperand {
    /// The layout of one element of the pair.
    const LAYOUT: ElementLayout;

    /// The two elements as `f32`, the one with the lower index first.
    fn widen(k: &mut Builder, pair: Reg<Self>) -> [Reg<F32>; 2];
}

impl Element for F16x2 {
    const LAYOUT: ElementLayout = ElementLayout::of(DType::F16);

    fn widen(k: &mut Builder, pair: Reg<Self>) -> [Reg<F32>; 2] {
        let (low, high) = k.unpack(pair);
        [k.f16_to_f32(low), k.f16_to_f32(high)]
    }
}

impl Element for Bf16x2 {
    const LAYOUT: ElementLayout = ElementLayout::of(DType::Bf16);

    /// A `bf16` is the upper half of an `f32`, so two bit operations take a pair apart without unpacking it.
    fn widen(k: &mut Builder, pair: Reg<Self>) -> [Reg<F32>; 2] {
        let bits = k.reinterpret::<Self, U32>(pair);
        let low = k.shl(bits, 16u32);
        let high = k.and(bits, 0xffff_0000u32);
        [k.reinterpret(low), k.reinterpret(high)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::primitives::{SharedLayout, SharedTile, SwizzledTile};

    #[test]
    fn columns_follow_from_bytes() {
        let columns = |bytes| {
            let element = ElementLayout { bytes };
            [element.mma_k(), element.chunk_elements(), element.panel_columns()]
        };
        assert_eq!(columns(2), [16, 8, 64]);
        assert_eq!(columns(1), [32, 16, 128]);
        assert_eq!(columns(4), [8, 4, 32]);
    }

    /// Half the bytes and twice the columns are the same tile: the hardware sees bytes alone.
    #[test]
    fn tiles_are_bytes() {
        for columns in [16, 32, 64, 96, 256] {
            let swizzled = |bytes| {
                let tile = SwizzledTile { rows: 64, columns: columns * 2 / bytes, element: ElementLayout { bytes } };
                [tile.panels(), tile.panel_bytes(), tile.bytes()]
            };
            assert_eq!(swizzled(1), swizzled(2));
            for layout in SharedLayout::ALL {
                let shared = |bytes| {
                    let element = ElementLayout { bytes };
                    let columns = SharedTile::columns_for(columns * 2 / bytes, element);
                    let tile = SharedTile { offset: 0, rows: 64, columns, layout, element };
                    [tile.panels(), tile.panel_chunks(), tile.row_bytes(), tile.panel_step(1), tile.bytes()]
                };
                assert_eq!(shared(1), shared(2), "{columns} columns, {layout}");
            }
        }
    }
}
