//! Swizzled shared-memory tile: what TMA writes and reads, and `wgmma` multiplies.
//!
//! A tile is cut into *panels* as wide as the atom of the 128-byte swizzle. The rows of a panel are 128 bytes long
//! and follow each other; within each, TMA exchanges the chunks of 16 bytes, which `wgmma` undoes as it reads.
//! A panel is one box of a tensor map; columns that the tensor does not have are zero.

use flashcore_ir::builder::TensorCopyOptions;
use flashcore_ir::types::{Pred, S32, U32, U64};
use flashcore_ir::{Builder, Reg, SharedAddress};

use super::tile::CHUNK_BYTES;
use crate::element::ElementLayout;

/// Bytes of a row of a panel: the width of the swizzle.
pub const PANEL_ROW_BYTES: u32 = 128;
/// Chunks of 16 bytes in a row of a panel.
pub(crate) const CHUNKS_PER_ROW: u32 = PANEL_ROW_BYTES / CHUNK_BYTES;

/// A tile with the 128-byte swizzle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SwizzledTile {
    /// Rows.
    pub rows: u32,
    /// Columns of the tensor.
    pub columns: u32,
    /// The layout of an element.
    pub element: ElementLayout,
}

impl SwizzledTile {
    /// Panels.
    pub const fn panels(self) -> u32 {
        self.columns.div_ceil(self.element.panel_columns())
    }

    /// Bytes of a panel.
    pub const fn panel_bytes(self) -> u32 {
        self.rows.saturating_mul(PANEL_ROW_BYTES)
    }

    /// Bytes of the tile, which is also what TMA brings.
    pub const fn bytes(self) -> u32 {
        self.panels().saturating_mul(self.panel_bytes())
    }

    /// Starts the TMA loads of the tile, which complete `barrier`. Only the lane in which `leader` holds does it.
    pub fn tma_load(self, k: &mut Builder, source: TensorRows, target: Reg<U32>, barrier: Reg<U32>, leader: Reg<Pred>) {
        self.tma_load_rows(k, 0, source, target, barrier, leader);
    }

    /// Starts the TMA loads of the rows of the tile from `first` on, as many as a box of the tensor map has.
    pub fn tma_load_rows(
        self,
        k: &mut Builder,
        first: u32,
        source: TensorRows,
        target: Reg<U32>,
        barrier: Reg<U32>,
        leader: Reg<Pred>,
    ) {
        let TensorRows { map, row, head, batch, policy } = source;
        for panel in 0..self.panels() {
            let column = k.copy((panel * self.element.panel_columns()) as i32);
            let offset = panel * self.panel_bytes() + first * PANEL_ROW_BYTES;
            let target = SharedAddress::from(target).plus(offset as i32);
            let options = TensorCopyOptions { policy, ..TensorCopyOptions::default() };
            k.when(leader, |k| k.tensor_load(target, map, &[column, row, head, batch], barrier, options));
        }
    }

    /// Starts the TMA stores of the rows at an address to those of a tensor from `row` on, as one bulk group. Only the
    /// lane in which `leader` holds does it.
    pub fn tma_store(self, k: &mut Builder, target: TensorRows, source: Reg<U32>, leader: Reg<Pred>) {
        let TensorRows { map, row, head, batch, policy } = target;
        for panel in 0..self.panels() {
            let column = k.copy((panel * self.element.panel_columns()) as i32);
            let source = SharedAddress::from(source).plus((panel * self.panel_bytes()) as i32);
            k.when(leader, |k| k.tensor_store(map, &[column, row, head, batch], source, policy));
        }
        k.when(leader, Builder::bulk_commit);
    }
}

/// TMA coordinates: the rows of one head of one batch, or of one page, from `row` on.
#[derive(Debug, Clone, Copy)]
pub struct TensorRows {
    /// The tensor map.
    pub map: Reg<U64>,
    /// The first row.
    pub row: Reg<S32>,
    /// The head.
    pub head: Reg<S32>,
    /// The batch, or the page.
    pub batch: Reg<S32>,
    /// The L2 cache policy.
    pub policy: Option<Reg<U64>>,
}
