//! Results of a product, written to a tile in shared memory: what an epilogue stores from there, or another product reads.

use flashcore_ir::types::{F32, Storable, Tf32, U32};
use flashcore_ir::{Builder, Reg, SharedAddress};

use super::swizzle::{CHUNKS_PER_ROW, PANEL_ROW_BYTES, SwizzledTile};
use super::tile::{CHUNK_BYTES, SharedTile};
use crate::element::Element;
use crate::primitives::{Accumulator, FragmentPosition, LaneColumns, MMA_M, MMA_N, ROW_STEP};

/// Lanes that have the columns of a row between them.
const MEMBERS: u32 = 4;

/// An element that results are stored as.
pub trait StoredElement {
    /// A register of adjacent columns.
    type Register: Storable;

    /// Rounds adjacent columns.
    fn round(k: &mut Builder, columns: &[Reg<F32>]) -> Vec<Reg<Self::Register>>;
}

impl<T: Element> StoredElement for T {
    type Register = T;

    fn round(k: &mut Builder, columns: &[Reg<F32>]) -> Vec<Reg<T>> {
        columns.chunks_exact(2).map(|pair| k.pair(pair[0], pair[1])).collect()
    }
}

impl StoredElement for Tf32 {
    type Register = F32;

    fn round(_: &mut Builder, columns: &[Reg<F32>]) -> Vec<Reg<F32>> {
        columns.to_vec()
    }
}

impl SharedTile {
    /// Writes the results of a warp, rounded to `T`, to the rows of the tile from `first_row` on. `base` is the address of
    /// shared memory.
    pub fn write_rows<T: StoredElement>(
        self,
        k: &mut Builder,
        (results, columns): (&Accumulator, LaneColumns),
        base: Reg<U32>,
        first_row: Reg<U32>,
        FragmentPosition { group, member }: FragmentPosition,
    ) {
        let row = k.add(first_row, group);
        // Of the columns of the four lanes, each lane has a quarter of a chunk or half of one.
        let lane_bytes = columns.lane_step() * self.element.bytes;
        let (lane_chunk, within_chunk) = if lane_bytes * MEMBERS == CHUNK_BYTES {
            (None, k.mul(member, lane_bytes))
        } else {
            (Some(k.shr(member, 1u32)), k.and(member, 1u32))
        };
        let tiles_per_step = (columns.lane_step() / 2) as usize;
        let tiles = results.m_tiles.first().map_or(0, Vec::len);
        for tile in (0..tiles).step_by(tiles_per_step) {
            let column = tile as u32 * MMA_N;
            let (panel, chunk) =
                (column / self.panel_columns(), column % self.panel_columns() / self.element.chunk_elements());
            let address = match lane_chunk {
                None => {
                    let chunk = k.copy(chunk);
                    let chunk_address = self.chunk_address(k, base, row, chunk);
                    k.add(chunk_address, within_chunk)
                }
                Some(lane_chunk) => {
                    let chunk = k.add(lane_chunk, chunk);
                    let chunk_address = self.chunk_address(k, base, row, chunk);
                    k.mad(within_chunk, lane_bytes, chunk_address)
                }
            };
            for (m_tile, fragments) in results.m_tiles.iter().enumerate() {
                for half in 0..2 {
                    let fragments = &fragments[tile..][..tiles_per_step];
                    let columns: Vec<_> =
                        fragments.iter().flat_map(|fragment| fragment[2 * half..][..2].to_vec()).collect();
                    let rounded = T::round(k, &columns);
                    let rows_below = m_tile as u32 * MMA_M + half as u32 * ROW_STEP;
                    let below = rows_below * self.row_bytes() + self.panel_step(panel);
                    k.store_shared(SharedAddress::from(address).plus(below as i32), &rounded);
                }
            }
        }
    }
}

impl SwizzledTile {
    /// Writes 16 rows of results, those of a warp, rounded, to an address in the tile, by `stmatrix`.
    pub fn write_rows<T: Element>(self, k: &mut Builder, results: &Accumulator, address: Reg<U32>, lane: Reg<U32>) {
        // `stmatrix` stores 8 x 8 elements of 16 bits. Lanes point at the rows of 16 x 16: the first 16 lanes of the left
        // half, the others of the right.
        let (row, half) = (k.and(lane, 15u32), k.shr(lane, 4u32));
        let row_address = k.mad(row, PANEL_ROW_BYTES, address);
        let pattern = k.and(lane, CHUNKS_PER_ROW - 1);
        let steps = (0..CHUNKS_PER_ROW).step_by(2).map(|first| {
            let chunk = (half + first) ^ pattern;
            k.eval(chunk.mul_add(CHUNK_BYTES, row_address))
        });
        let steps: Vec<_> = steps.collect();
        for (number, fragments) in results.m_tiles[0].chunks(2).enumerate() {
            let pairs = fragments.iter().flat_map(|fragment| fragment.chunks_exact(2));
            let words: Vec<Reg<T>> = pairs.map(|pair| k.pair(pair[0], pair[1])).collect();
            let panel = (number / steps.len()) as u32;
            let target = SharedAddress::from(steps[number % steps.len()]).plus((panel * self.panel_bytes()) as i32);
            k.store_matrix(target, &words, false);
        }
    }
}
