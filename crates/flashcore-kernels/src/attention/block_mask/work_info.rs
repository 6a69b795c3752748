//! What a tile is, handed from the warp that copies to those that compute.
//!
//! Which tile comes next, where tiles are sorted, and which rows and keys it has takes divisions and loads, one after the
//! other. The warp that copies is ahead of the others and has the time: beside each query it puts down whose it is, and has
//! what is known of the tile copied there from global memory. Who computes waits for the query anyway.

use flashcore_ir::types::{Pred, S32, U32, U64};
use flashcore_ir::{Builder, Reg, SharedAddress};

use crate::attention::block_mask::{BlockMaskTiles, KvBlocks, TileExtent};
use crate::attention::scheduler::{Tile, WorkTileInfo};
use crate::primitives::PipelineState;

/// Bytes for the head and the batch, behind which copies begin.
const PLACE_BYTES: u32 = 16;
/// Copies begin at a multiple of this.
const ALIGNMENT: u32 = 16;

/// The memory beside each place for a query.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WorkInfoSlots {
    first: u32,
    tiles: BlockMaskTiles,
}

impl WorkInfoSlots {
    /// Bytes for each place.
    pub(crate) const fn bytes(tiles: BlockMaskTiles) -> u32 {
        PLACE_BYTES + tiles.bytes()
    }

    pub(crate) fn reserve(k: &mut Builder, places: u32, tiles: BlockMaskTiles) -> Self {
        Self { first: k.reserve_shared(places.saturating_mul(Self::bytes(tiles)), ALIGNMENT), tiles }
    }

    fn address(self, k: &mut Builder, query: &PipelineState) -> Reg<U32> {
        query.beside(k, self.first, Self::bytes(self.tiles))
    }

    /// Bytes of which the barrier of the query hears.
    pub(crate) const fn announced(self) -> u32 {
        self.tiles.bytes()
    }

    /// Puts down whose tile it is; before the query is announced. The lane does it in which `leader` holds.
    pub(crate) fn write(self, k: &mut Builder, query: &PipelineState, tile: &Tile, leader: Reg<Pred>) {
        let address = self.address(k, query);
        let place = [tile.place.head, tile.place.batch];
        k.when(leader, |k| k.store_shared(address, &place));
    }

    /// Starts the copy of the rest.
    pub(crate) fn copy(self, k: &mut Builder, query: &PipelineState, record: Reg<U64>, leader: Reg<Pred>) {
        let (address, barrier) = (self.address(k, query), query.full(k));
        let target = SharedAddress::from(address).plus(PLACE_BYTES as i32);
        k.when(leader, |k| k.bulk_load(target, record, self.tiles.bytes(), barrier));
    }

    /// Waits for the query, and reads what stands beside it of a part of the rows.
    pub(crate) fn read(self, k: &mut Builder, query: &PipelineState, part: Reg<U32>) -> WorkTileInfo {
        k.section("ticket", |k| {
            query.consumer_wait(k);
            let address = self.address(k, query);
            let place = k.load_shared::<U32>(address, 2);
            let behind = SharedAddress::from(address).plus(PLACE_BYTES as i32);
            let extent = k.load_shared::<U32>(behind, 4);
            let [origin, end_key] = [extent[2], extent[3]].map(|key| k.reinterpret::<U32, S32>(key));
            let extent = TileExtent { first_row: extent[0], end_row: extent[1], origin, end_key };
            let of_part = k.mad(part, BlockMaskTiles::PART_BYTES, address);
            let of_part = SharedAddress::from(of_part).plus((PLACE_BYTES + BlockMaskTiles::PART_BYTES) as i32);
            let tiles = k.load_shared::<S32>(of_part, 4);
            let ranges = KvBlocks { first: tiles[0], last: tiles[1], full_begin: tiles[2], full_end: tiles[3] };
            let (head, batch) = (place[0], place[1]);
            let (first_row, extent, ranges) = (extent.first_row, Some(extent), Some(ranges));
            WorkTileInfo { first_row, head, batch, record: None, extent, ranges }
        })
    }
}
