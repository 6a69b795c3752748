//! The warp that copies.

use flashcore_ir::builder::CachePolicy;
use flashcore_ir::types::{Pred, S32, U32, U64};
use flashcore_ir::{Builder, Compare, Reg};

use super::Cta;
use crate::attention::block_mask::work_info::WorkInfoSlots;
use crate::attention::kv_range::KvBlockRange;
use crate::attention::scheduler::Tile;
use crate::primitives::{LANES, PipelineState, SwizzledTile, TensorRows};

/// One warp of the warpgroup copies; the others are done.
pub(crate) fn run(k: &mut Builder, cta: &Cta, thread: Reg<U32>) {
    let warp = k.shr(thread, LANES.ilog2());
    let copies = k.compare(Compare::Eq, warp, 0u32);
    k.if_uniform(copies, |k| {
        let producer = Producer::new(k, cta);
        if cta.reads_early() {
            cta.wait_for_kernel_before(k);
        }
        let part = cta.common_part(k);
        cta.schedule.each_tile(k, part, |_| None, |k, tile| producer.copy(k, cta, tile));
    });
}

struct Producer {
    /// Holds in the lane that copies.
    leader: Reg<Pred>,
    query: PipelineState,
    keys: PipelineState,
    values: PipelineState,
}

impl Producer {
    fn new(k: &mut Builder, cta: &Cta) -> Self {
        let shared = &cta.shared;
        Self {
            leader: k.elect(),
            query: shared.query_ring.cursor(k, cta.base),
            keys: shared.key_ring.cursor(k, cta.base),
            values: shared.value_ring.cursor(k, cta.base),
        }
    }

    fn copy(&self, k: &mut Builder, cta: &Cta, tile: &Tile) {
        let tiles = KvBlockRange::new(k, tile, cta.config);
        cta.wait_for_kernel_before(k);
        let (last, any) = if cta.config.cluster > 1 {
            let rank = k.cluster_rank();
            let rank = k.reinterpret::<U32, S32>(rank);
            let last = k.sub(tiles.last, rank);
            let some = k.compare(Compare::Ge, last, tiles.first);
            (last, k.and(some, tiles.any))
        } else {
            (tiles.last, tiles.any)
        };
        let announced = cta.shared.work_info.zip(tile.record).map(|(work_info, record)| {
            let query_bytes = k.select(any, cta.shared.query.bytes(), 0u32);
            self.hand_over(k, work_info, record, tile, query_bytes)
        });
        k.if_uniform(any, |k| self.copy_tiles(k, cta, tile, tiles, last, announced));
    }

    /// Hands over what a tile is, and announces its query, of so many bytes: for a place and its barrier.
    fn hand_over(
        &self,
        k: &mut Builder,
        work_info: WorkInfoSlots,
        record: Reg<U64>,
        tile: &Tile,
        query_bytes: Reg<U32>,
    ) -> [Reg<U32>; 2] {
        k.section("ticket", |k| {
            self.query.producer_acquire(k);
            work_info.write(k, &self.query, tile, self.leader);
            k.warp_sync();
            let bytes = k.add(query_bytes, work_info.announced());
            self.query.expect_tx(k, self.leader, bytes);
            work_info.copy(k, &self.query, record, self.leader);
            let place = [self.query.tile(k), self.query.full(k)];
            self.query.advance(k);
            place
        })
    }

    /// Copies what a tile of query rows needs, in the order in which it is needed: the values of a tile of keys after
    /// the keys of the next. Of a cluster, each CTA has the tiles that are a multiple of its CTAs below its `last`. The query
    /// may have been announced already, for a place and its barrier.
    fn copy_tiles(
        &self,
        k: &mut Builder,
        cta: &Cta,
        tile: &Tile,
        tiles: KvBlockRange,
        last: Reg<S32>,
        announced: Option<[Reg<U32>; 2]>,
    ) {
        let step = cta.config.cluster as i32;
        let maps = cta.maps;
        let [head, key_head, batch, row] =
            [tile.place.head, tile.place.key_head, tile.place.batch, tile.place.first_row]
                .map(|index| k.reinterpret::<U32, S32>(index));
        // Every tile of query rows of a head reads its keys and values again; its own query nobody does.
        let (kept, passing) = (k.cache_policy(CachePolicy::EvictLast), k.cache_policy(CachePolicy::EvictFirst));
        let query = TensorRows { map: maps.query, row, head, batch, policy: Some(passing) };
        k.section("query", |k| match announced {
            Some([target, barrier]) => {
                k.section("copy", |k| cta.shared.query.load(k, query, target, barrier, self.leader));
            }
            None => self.next(k, &self.query, cta.shared.query, query),
        });
        let key_tile = k.copy(last);
        let rows_of = |k: &mut Builder, map, tile| {
            let row = tiles.first_key(k, tile);
            TensorRows { map, row, head: key_head, batch, policy: Some(kept) }
        };
        let keys = |k: &mut Builder, tile| {
            k.section("keys", |k| {
                let rows = rows_of(k, maps.key, tile);
                self.next(k, &self.keys, cta.shared.key, rows);
            });
        };
        let values = |k: &mut Builder, tile| {
            k.section("values", |k| {
                let rows = rows_of(k, maps.value, tile);
                self.next(k, &self.values, cta.shared.value, rows);
            });
        };
        keys(k, key_tile);
        k.while_uniform(
            |k| {
                let next = if step == 1 { key_tile } else { k.sub(key_tile, step - 1) };
                k.compare(Compare::Gt, next, tiles.first)
            },
            |k| {
                let before = k.sub(key_tile, step);
                keys(k, before);
                values(k, key_tile);
                k.set(key_tile, before);
            },
        );
        values(k, key_tile);
    }

    /// Fills the next stage of a ring.
    fn next(&self, k: &mut Builder, cursor: &PipelineState, tile: SwizzledTile, rows: TensorRows) {
        cursor.producer_acquire(k);
        cursor.expect_tx(k, self.leader, tile.bytes());
        let (target, barrier) = (cursor.tile(k), cursor.full(k));
        k.section("copy", |k| tile.load(k, rows, target, barrier, self.leader));
        cursor.advance(k);
    }
}
