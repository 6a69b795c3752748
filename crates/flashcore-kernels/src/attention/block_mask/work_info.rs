//! Work-tile info that the producer broadcasts to the consumers.
//!
//! The next tile of a sorted scheduler, and its rows and keys, take divisions and dependent loads. The producer warp is
//! ahead of the consumers and has the time: beside each Q stage it writes the head and batch of the tile, and has its
//! block-mask record copied there by a bulk copy. Consumers wait for Q anyway.

use flashcore_ir::types::{Pred, S32, U32, U64};
use flashcore_ir::{Builder, Reg, SharedAddress};

use super::{BlockMaskTiles, KvBlocks, TileExtent};
use crate::attention::scheduler::{WorkTile, WorkTileInfo};
use crate::primitives::PipelineState;

/// Bytes of head and batch, after which the record follows.
const HEAD_AND_BATCH_BYTES: u32 = 16;
/// Alignment of bulk copies.
const ALIGNMENT: u32 = 16;

/// The shared memory beside each Q stage.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WorkInfoSlots {
    first: u32,
    tiles: BlockMaskTiles,
}

impl WorkInfoSlots {
    /// Bytes of a slot.
    const fn slot_bytes(tiles: BlockMaskTiles) -> u32 {
        HEAD_AND_BATCH_BYTES + tiles.bytes()
    }

    pub(crate) fn reserve(k: &mut Builder, q_stages: u32, tiles: BlockMaskTiles) -> Self {
        Self { first: k.reserve_shared(q_stages.saturating_mul(Self::slot_bytes(tiles)), ALIGNMENT), tiles }
    }

    fn address(self, k: &mut Builder, query: &PipelineState) -> Reg<U32> {
        query.indexed(k, self.first, Self::slot_bytes(self.tiles))
    }

    /// Broadcasts the info of a tile through the Q stage, of which it expects `query_bytes` bytes: returns the stage and
    /// its *full* barrier, and advances. `leader` holds in one lane.
    pub(crate) fn produce(
        self,
        k: &mut Builder,
        query: &PipelineState,
        tile: &WorkTile,
        record: Reg<U64>,
        query_bytes: Reg<U32>,
        leader: Reg<Pred>,
    ) -> [Reg<U32>; 2] {
        k.section("work info", |k| {
            query.producer_acquire(k);
            let address = self.address(k, query);
            k.when(leader, |k| k.store_shared(address, &[tile.coord.head, tile.coord.batch]));
            k.warp_sync();
            let bytes = k.add(query_bytes, self.tiles.bytes());
            query.expect_tx(k, leader, bytes);
            let (address, barrier) = (self.address(k, query), query.full_barrier(k));
            let target = SharedAddress::from(address).plus(HEAD_AND_BATCH_BYTES as i32);
            k.when(leader, |k| k.bulk_load(target, record, self.tiles.bytes(), barrier));
            let stage = [query.stage_address(k), query.full_barrier(k)];
            query.advance(k);
            stage
        })
    }

    /// Waits for Q, and reads the info beside it, of a row group.
    pub(crate) fn consume(self, k: &mut Builder, query: &PipelineState, row_group: Reg<U32>) -> WorkTileInfo {
        k.section("work info", |k| {
            query.consumer_wait(k);
            let address = self.address(k, query);
            let head_and_batch = k.load_shared::<U32>(address, 2);
            let record = SharedAddress::from(address).plus(HEAD_AND_BATCH_BYTES as i32);
            let extent = k.load_shared::<U32>(record, 4);
            let [origin, end_key] = [extent[2], extent[3]].map(|key| k.reinterpret::<U32, S32>(key));
            let extent = TileExtent { first_row: extent[0], end_row: extent[1], origin, end_key };
            let group = k.mad(row_group, BlockMaskTiles::GROUP_BYTES, address);
            let group = SharedAddress::from(group).plus((HEAD_AND_BATCH_BYTES + BlockMaskTiles::GROUP_BYTES) as i32);
            let blocks = k.load_shared::<S32>(group, 4);
            let blocks = KvBlocks { first: blocks[0], last: blocks[1], full_begin: blocks[2], full_end: blocks[3] };
            WorkTileInfo {
                first_row: extent.first_row,
                head: head_and_batch[0],
                batch: head_and_batch[1],
                record: None,
                extent: Some(extent),
                blocks: Some(blocks),
            }
        })
    }
}
