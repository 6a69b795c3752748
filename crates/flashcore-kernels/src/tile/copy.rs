//! Tiles from global to shared memory.

use flashcore_ir::builder::CopyBytes;
use flashcore_ir::types::{U32, U64};
use flashcore_ir::{Builder, Compare, GlobalAddress, L2Prefetch, Reg, SharedAddress};

use super::shared::{CHUNK_BYTES, SharedTile};
use crate::element::ELEMENT_BYTES;

/// Rows of a matrix in global memory.
#[derive(Debug, Clone, Copy)]
pub struct GlobalRows {
    /// The address of the first.
    pub first: Reg<U64>,
    /// Bytes from one to the next.
    pub stride: Reg<U64>,
}

/// One thread's part of copying tiles of one shape: a chunk in each of several rows, in each panel.
#[derive(Debug, Clone, Copy)]
pub struct TileCopy {
    tile: SharedTile,
    /// The first row of this thread.
    row: Reg<U32>,
    /// Where this thread's first chunk goes, in stage 0.
    target: Reg<U32>,
    /// Where its first chunk of the next tile comes from.
    source: Reg<U64>,
    stride: Reg<U64>,
    rows_per_step: u32,
}

impl TileCopy {
    /// Divides the tile among the threads of the CTA; copies begin at the first of `rows`.
    pub fn new(k: &mut Builder, tile: SharedTile, rows: GlobalRows, base: Reg<U32>, thread: Reg<U32>) -> Self {
        let chunks = tile.panel_chunks();
        let row = k.shr(thread, chunks.ilog2());
        let chunk = k.and(thread, chunks - 1);
        let target = tile.chunk_address(k, base, row, chunk);
        let row_wide = k.widen(row);
        let row_start = k.mad(row_wide, rows.stride, rows.first);
        let source = k.mad_wide(chunk, CHUNK_BYTES, row_start);
        Self { tile, row, target, source, stride: rows.stride, rows_per_step: k.threads() / chunks }
    }

    /// Starts copying the next tile into the stage `stage` bytes behind the first. Only its first `rows_left` rows
    /// exist, which may be none or more than the tile has; the others become zero.
    pub fn start(&self, k: &mut Builder, stage: Option<Reg<U32>>, rows_left: Reg<U32>) {
        let target = match stage {
            Some(stage) => k.add(self.target, stage),
            None => self.target,
        };
        let step_bytes = k.mul(self.stride, u64::from(self.rows_per_step));
        let mut source = self.source;
        for step in 0..self.tile.rows.div_ceil(self.rows_per_step) {
            let row = k.add(self.row, step * self.rows_per_step);
            let bytes = k.section("tail", |k| {
                let exists = k.compare(Compare::Lt, row, rows_left);
                k.select(exists, CHUNK_BYTES, 0u32)
            });
            // The last step of a tile with fewer rows than threads would write behind it.
            let overhangs = (step + 1) * self.rows_per_step > self.tile.rows;
            let copy = |k: &mut Builder| {
                for panel in 0..self.tile.panels() {
                    let below = step * self.rows_per_step * self.tile.row_bytes();
                    let to = SharedAddress::from(target).plus((below + self.tile.panel_step(panel)) as i32);
                    let beside = panel * self.tile.panel_columns() * ELEMENT_BYTES;
                    let from = GlobalAddress::from(source).plus(beside as i32);
                    let bytes = CopyBytes::ZeroFill { written: CHUNK_BYTES, read: bytes };
                    k.copy_async(to, from, bytes, L2Prefetch::Bytes128);
                }
            };
            if overhangs {
                let inside = k.compare(Compare::Lt, row, self.tile.rows);
                k.when(inside, copy);
            } else {
                copy(k);
            }
            source = k.add(source, step_bytes);
        }
    }

    /// Goes on to the next tile.
    pub fn advance(&self, k: &mut Builder) {
        let tile_bytes = k.mul(self.stride, u64::from(self.tile.rows));
        k.add_to(self.source, tile_bytes);
    }
}
