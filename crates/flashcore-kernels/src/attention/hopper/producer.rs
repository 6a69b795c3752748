//! The warp that copies.

use flashcore_ir::builder::CachePolicy;
use flashcore_ir::types::{Pred, S32, U32};
use flashcore_ir::{Builder, Compare, Reg};

use super::key_tiles::KeyTiles;
use super::schedule::Tile;
use super::{Cta, TAKEN_BYTES};
use crate::tile::{LANES, PanelTile, TensorRows, TransferCursor};

/// One warp of the warpgroup copies; the others are done.
pub(super) fn run(k: &mut Builder, cta: &Cta, thread: Reg<U32>) {
    let warp = k.shr(thread, LANES.ilog2());
    let copies = k.compare(Compare::Eq, warp, 0u32);
    k.if_uniform(copies, |k| {
        let producer = Producer::new(k, cta);
        if cta.reads_early() {
            cta.wait_for_kernel_before(k);
        }
        if cta.shared.taken.is_some() {
            producer.take_tiles(k, cta, thread);
        } else {
            cta.schedule.each_tile(k, |k, tile| producer.copy(k, cta, tile));
        }
    });
}

struct Producer {
    /// Holds in the lane that copies.
    leader: Reg<Pred>,
    query: TransferCursor,
    keys: TransferCursor,
    values: TransferCursor,
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

    /// Copies what the tiles need that it takes, and tells the warps that compute which they are, one behind the last too.
    fn take_tiles(&self, k: &mut Builder, cta: &Cta, lane: Reg<U32>) {
        let schedule = &cta.schedule;
        let number = schedule.first(k);
        k.while_uniform(
            |k| schedule.has(k, number),
            |k| {
                let tile = schedule.tile(k, number);
                self.query.wait_until_empty(k);
                self.tell(k, cta, number);
                self.copy_query(k, cta, &tile);
                let next = schedule.take(k, lane);
                self.copy(k, cta, &tile);
                let next = schedule.taken(k, next);
                k.set(number, next);
            },
        );
        self.query.wait_until_empty(k);
        self.tell(k, cta, number);
        self.query.announce(k, self.leader, 0);
    }

    /// Writes the number of a tile beside its query; who waits for that sees it.
    fn tell(&self, k: &mut Builder, cta: &Cta, number: Reg<U32>) {
        if let Some(taken) = cta.shared.taken {
            let place = self.query.beside(k, taken, TAKEN_BYTES);
            k.when(self.leader, |k| k.store_shared(place, &[number]));
            // The announcement that follows is one of the whole warp.
            k.warp_sync();
        }
    }

    fn copy(&self, k: &mut Builder, cta: &Cta, tile: &Tile) {
        let tiles = KeyTiles::new(k, &tile.work, cta.config);
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
        k.if_uniform(any, |k| self.copy_tiles(k, cta, tile, tiles, last));
    }

    /// Copies what a tile of query rows needs, in the order in which it is needed: the values of a tile of keys after
    /// the keys of the next. Of a cluster, each CTA has the tiles that are a multiple of its CTAs below its `last`.
    fn copy_tiles(&self, k: &mut Builder, cta: &Cta, tile: &Tile, tiles: KeyTiles, last: Reg<S32>) {
        let step = cta.config.cluster as i32;
        let maps = cta.maps;
        if cta.shared.taken.is_none() {
            self.query.wait_until_empty(k);
            self.copy_query(k, cta, tile);
        }
        let [key_head, batch] = [tile.place.key_head, tile.place.batch].map(|index| k.reinterpret::<U32, S32>(index));
        // Every tile of query rows of a head reads its keys and values again.
        let kept = k.cache_policy(CachePolicy::EvictLast);
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

    /// Copies the query of a tile to a place that is empty. Nobody reads it again.
    fn copy_query(&self, k: &mut Builder, cta: &Cta, tile: &Tile) {
        k.section("query", |k| {
            let [row, head, batch] =
                [tile.place.first_row, tile.place.head, tile.place.batch].map(|index| k.reinterpret::<U32, S32>(index));
            let policy = Some(k.cache_policy(CachePolicy::EvictFirst));
            let rows = TensorRows { map: cta.maps.query, row, head, batch, policy };
            self.fill(k, &self.query, cta.shared.query, rows);
        });
    }

    /// Fills the next stage of a ring when it is empty.
    fn next(&self, k: &mut Builder, cursor: &TransferCursor, tile: PanelTile, rows: TensorRows) {
        cursor.wait_until_empty(k);
        self.fill(k, cursor, tile, rows);
    }

    /// Fills a stage that is empty, and goes on to the next.
    fn fill(&self, k: &mut Builder, cursor: &TransferCursor, tile: PanelTile, rows: TensorRows) {
        cursor.announce(k, self.leader, tile.bytes());
        let (target, barrier) = (cursor.tile(k), cursor.full(k));
        k.section("copy", |k| tile.load(k, rows, target, barrier, self.leader));
        cursor.advance(k);
    }
}
