//! Tile scheduler: the tiles of query rows that a CTA works on, and their order.
//!
//! The tiles of one head come together, so that its keys and values stay in L2; where some are longer than others, the
//! tiles of a section of heads, in the order that [`LptOrder`](lpt::LptOrder) has planned. A [`Policy`] says which tile
//! comes next; the rest is the same for all.

pub(crate) mod chunks;
pub(crate) mod dynamic;
pub(crate) mod lpt;
mod persistent;
mod single_tile;
pub(crate) mod sorted;

use flashcore_ir::types::{Pred, S32, U32, U64};
use flashcore_ir::{Builder, Compare, Reg, SpecialRegister};

use crate::attention::block_mask::mode::{BlockMaskMode, RangePer};
use crate::attention::block_mask::{self, KvBlocks, TileExtent};
use crate::attention::kv_range::KvBlockRange;
use crate::attention::{TileContext, TileCoord};
use crate::config::HopperConfig;
use crate::parameters::{Parameters, SplitParameters};
use crate::primitives::PipelineState;
use crate::specialization::Specialization;
use chunks::{ChunkParameters, Units, each_unit};
use dynamic::TileSlots;
use lpt::LptSections;
use sorted::SortedTiles;

/// The scheduler of a kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TileScheduler {
    pub(crate) tiles_per_head: Reg<U32>,
    /// Query heads.
    heads: Reg<U32>,
    /// Heads of all batches.
    pub(crate) matrices: Reg<U32>,
    /// All tiles.
    pub(crate) tiles: Reg<U32>,
    sections: LptSections,
    policy: Policy,
    /// Set where each chunk of the keys of a tile has a CTA of its own.
    pub(crate) chunks: Option<ChunkParameters>,
    pub(crate) config: HopperConfig,
    parameters: Parameters,
    specialization: Specialization,
}

/// The order of tiles.
#[derive(Debug, Clone, Copy)]
enum Policy {
    /// One tile for each CTA.
    SingleTile,
    /// Persistent CTAs: each loops over tiles, head by head.
    Persistent,
    /// Persistent CTAs with the longest tiles first (LPT), in sections of heads.
    Lpt,
    /// Persistent CTAs with the tiles sorted by their nonempty KV blocks in a block mask.
    Sorted(SortedTiles),
}

impl TileScheduler {
    /// Declares and loads its parameters.
    pub(crate) fn load(
        k: &mut Builder,
        config: HopperConfig,
        parameters: &Parameters,
        specialization: Specialization,
        chunks: Option<ChunkParameters>,
    ) -> Self {
        let [tiles_per_head, heads, matrices, tiles] =
            ["query_tiles", "heads", "matrices", "tiles"].map(|name| k.parameter::<U32>(name));
        let sections = LptSections::load(k);
        let chunks = chunks.filter(|_| config.chunk_keys > 0);
        let policy = match (config.persistent, specialization.right) {
            (false, _) => Policy::SingleTile,
            (true, false) => Policy::Persistent,
            (true, true) => Policy::Lpt,
        };
        let parameters = *parameters;
        Self { tiles_per_head, heads, matrices, tiles, sections, policy, chunks, config, parameters, specialization }
    }

    /// Writes `body` for each tile of this CTA. `read` returns the work-tile info that a producer has broadcast; where it
    /// has none, the info of the tile and of a row group of it is looked up.
    pub(crate) fn each_tile(
        &self,
        k: &mut Builder,
        row_group: Option<Reg<U32>>,
        read: impl FnOnce(&mut Builder) -> Option<WorkTileInfo>,
        body: impl FnOnce(&mut Builder, &WorkTile),
    ) {
        let cta = k.special(SpecialRegister::CtaX);
        if matches!(self.policy, Policy::SingleTile) {
            let info = k.section("scheduler", |k| {
                let tile = single_tile::tile(k, self, cta);
                self.info(k, tile, row_group)
            });
            let mut tile = self.work_tile(k, info);
            tile.chunk = self.chunks.map(|chunks| single_tile::chunk(k, &tile.context, chunks, cta));
            return match tile.exists(k) {
                None => body(k, &tile),
                Some(exists) => k.if_uniform(exists, |k| body(k, &tile)),
            };
        }
        if self.specialization.has_query_lengths() {
            // Tiles that exist, and no others: only the device knows how many a sequence has.
            let sequences = k.div(self.matrices, self.heads);
            let (last_tiles_first, dynamic) = (self.specialization.right, self.config.dynamic);
            let units = Units { chunk_keys: None, sequences, heads: self.heads, last_tiles_first, dynamic };
            let shape = (self.config.tile_m(), false);
            return each_unit(k, &self.parameters, units, self.specialization, shape, |k, unit| {
                let TileCoord { first_row, head, batch, .. } = unit.coord;
                let info = WorkTileInfo { first_row, head, batch, record: None, extent: None, blocks: None };
                let tile = self.work_tile(k, info);
                body(k, &tile);
            });
        }
        persistent::each_index(k, self, cta, |k, place| {
            let info = read(k).unwrap_or_else(|| {
                k.section("scheduler", |k| {
                    let tile = self.tile_at(k, place.index);
                    self.info(k, tile, row_group)
                })
            });
            let tile = self.work_tile(k, info);
            body(k, &tile);
            place.advance(k);
        });
    }

    /// Writes `body` for each tile that the producer has broadcast.
    pub(crate) fn each_broadcast(
        &self,
        k: &mut Builder,
        slots: TileSlots,
        query: &PipelineState,
        body: impl FnOnce(&mut Builder, &WorkTile),
    ) {
        slots.each_tile(k, query, |k, info| {
            let tile = self.work_tile(k, info);
            body(k, &tile);
        });
    }

    /// True if tiles come in sections of heads, in serpentine order.
    const fn has_sections(&self) -> bool {
        matches!(self.policy, Policy::Lpt | Policy::Sorted(_))
    }

    /// The tile of a linear index: its index in its head, the head and the batch.
    fn tile_at(&self, k: &mut Builder, index: Reg<U32>) -> [Reg<U32>; 3] {
        let (matrix, tile) = match self.policy {
            Policy::Sorted(sorted) => sorted.tile_at(k, self, index),
            Policy::Lpt => self.sections.tile_at(k, self, index),
            Policy::SingleTile | Policy::Persistent => persistent::tile_at(k, self.tiles_per_head, index),
        };
        let batch = k.div(matrix, self.heads);
        let head = k.eval(matrix - batch * self.heads);
        [tile, head, batch]
    }

    /// The work-tile info of a tile, and of a row group of it.
    fn info(&self, k: &mut Builder, [tile, head, batch]: [Reg<U32>; 3], row_group: Option<Reg<U32>>) -> WorkTileInfo {
        let first_row = k.mul(tile, self.config.tile_m());
        if self.specialization.is_ragged() {
            // Sequences have no block mask.
            return WorkTileInfo { first_row, head, batch, record: None, extent: None, blocks: None };
        }
        let coord = TileCoord { first_row, head, kv_head: head, batch };
        let context = TileContext::at(k, &self.parameters, self.specialization, coord, Some(self.heads));
        let tiles = self.config.block_mask_tiles(self.specialization);
        let record = tiles.map(|tiles| block_mask::record_address(k, &context, tiles, tile));
        let is_unaligned = tiles.is_some_and(|tiles| tiles.unaligned_kv);
        let extent = record.filter(|_| is_unaligned).and_then(|record| TileExtent::load(k, record));
        let blocks = record.zip(row_group).and_then(|(record, group)| KvBlocks::load(k, record, group));
        WorkTileInfo { first_row, head, batch, record, extent, blocks }
    }

    /// The work tile of its info.
    fn work_tile(&self, k: &mut Builder, info: WorkTileInfo) -> WorkTile {
        let WorkTileInfo { first_row, head, batch, record, extent, blocks } = info;
        let group = self.parameters.heads_per_key_head;
        let (head, kv_head) =
            if self.config.pack_gqa { (k.mul(head, group), head) } else { (head, k.div(head, group)) };
        let coord = TileCoord { first_row, head, kv_head, batch };
        let context = TileContext::at(k, &self.parameters, self.specialization, coord, Some(self.heads));
        let context = context.with_packed_heads(k, self.config.pack_gqa.then_some(group));
        match extent {
            // As if there were no other rows, and no keys past the last that any of these attends.
            Some(TileExtent { first_row, end_row, origin, end_key }) => {
                let key_length = k.min(context.key_length, end_key);
                let context = TileContext { first_row, end_row, key_length, ..context };
                let coord = TileCoord { first_row, ..coord };
                WorkTile { coord, context, record, blocks, origin: Some(origin), chunk: None }
            }
            None => WorkTile { coord, context, record, blocks, origin: None, chunk: None },
        }
    }
}

/// Work-tile info: what has to be looked up for a tile, or is broadcast by the producer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WorkTileInfo {
    /// The first row, unless `extent` has it.
    pub(crate) first_row: Reg<U32>,
    pub(crate) head: Reg<U32>,
    pub(crate) batch: Reg<U32>,
    /// The address of its block-mask record.
    pub(crate) record: Option<Reg<U64>>,
    pub(crate) extent: Option<TileExtent>,
    /// The nonempty KV blocks of a row group in the block mask.
    pub(crate) blocks: Option<KvBlocks>,
}

/// A tile of query rows to work on.
pub(crate) struct WorkTile {
    pub(crate) coord: TileCoord,
    pub(crate) context: TileContext,
    /// The address of its block-mask record.
    pub(crate) record: Option<Reg<U64>>,
    /// The nonempty KV blocks of a row group in the block mask.
    blocks: Option<KvBlocks>,
    /// The first key of block 0, where it is not key 0.
    origin: Option<Reg<S32>>,
    /// The chunk of its keys, where it has only that.
    pub(crate) chunk: Option<TileChunk>,
}

/// A chunk of the keys of a tile.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TileChunk {
    pub(crate) splits: SplitParameters,
    /// The chunk among those of the sequence.
    pub(crate) index: Reg<U32>,
    /// The chunks of the sequence.
    pub(crate) count: Reg<U32>,
    /// The first key of the chunk, and one past its last.
    pub(crate) keys: [Reg<S32>; 2],
}

impl WorkTile {
    /// True if its sequence has the tile; `None` where all have.
    fn exists(&self, k: &mut Builder) -> Option<Reg<Pred>> {
        let has_lengths = self.context.specialization.has_query_lengths();
        let has_tile = has_lengths.then(|| k.compare(Compare::Lt, self.context.first_row, self.context.end_row));
        let Some(chunk) = self.chunk else { return has_tile };
        let has_chunk = k.compare(Compare::Lt, chunk.index, chunk.count);
        Some(has_tile.map_or(has_chunk, |has_tile| k.and(has_tile, has_chunk)))
    }

    /// The KV blocks that the CTA goes through. Where each warpgroup has a range of its own, all between the first and the
    /// last block that any of them attends.
    pub(crate) fn kv_blocks(&self, k: &mut Builder, config: HopperConfig) -> KvBlockRange {
        k.section("kv range", |k| {
            let range = KvBlockRange::new(k, &self.context, (config.tile_m(), config.tile_n), self.origin);
            let range = self.chunk.map_or(range, |chunk| range.chunk(k, chunk.keys));
            let mode = BlockMaskMode::of(config, self.context.specialization);
            match (self.blocks, mode.map(|mode| mode.range)) {
                (Some(blocks), Some(RangePer::Cta)) => range.intersect(k, blocks),
                _ => range,
            }
        })
    }

    /// The blocks of `range` that a warpgroup with a range of its own attends.
    pub(crate) fn warpgroup_blocks(&self, k: &mut Builder, range: KvBlockRange) -> KvBlockRange {
        k.section("kv range", |k| self.blocks.map_or(range, |blocks| range.intersect(k, blocks)))
    }
}
