//! Keys and values on their way: which of them a CTA needs, and the stream of tiles in which they come.
//!
//! Either all threads copy the next tile before they multiply the one that is there, and one barrier per tile says that
//! it has arrived for everybody and that everybody is done with the tile before. Or some warps do nothing but copy, the
//! producers: a pair of barriers for each stage then says that its tile has arrived, and that it may be replaced.

use flashcore_ir::types::{Pred, S32, U32};
use flashcore_ir::{Builder, Compare, Reg, SpecialRegister};

use super::Work;
use super::tile_ranges::{self, RangeTiles, TileRanges};
use crate::parameters::SplitParameters;
use crate::specialization::Specialization;
use crate::tile::{GlobalRows, LANES, Ring, SharedLayout, SharedTile, TileCopy};

/// How tiles come.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Supply {
    /// Tiles in shared memory at a time.
    pub(crate) stages: u32,
    /// Keys of a tile.
    pub(crate) tile_n: u32,
    /// Warps that multiply, and that copy where nobody else does.
    pub(crate) warps: u32,
    /// Warps that only copy.
    pub(crate) producers: u32,
    /// Bytes of one copy, at most.
    pub(crate) load_bytes: u32,
}

impl Supply {
    const fn all_threads(self) -> u32 {
        (self.warps + self.producers) * LANES
    }

    const fn copying_threads(self) -> u32 {
        match self.producers {
            0 => self.warps * LANES,
            producers => producers * LANES,
        }
    }

    /// Rows of a tensor, copied in pieces that are no wider than chosen.
    pub(super) fn rows(self, rows: GlobalRows) -> GlobalRows {
        GlobalRows { width: rows.width.min(self.load_bytes), ..rows }
    }
}

/// Where the tiles of keys and values lie.
#[derive(Debug, Clone, Copy)]
pub(super) struct StreamTiles {
    /// Of stage 0; the others follow behind both.
    pub(super) key: SharedTile,
    pub(super) value: SharedTile,
    pub(super) stage_bytes: u32,
}

impl StreamTiles {
    pub(super) fn reserve(
        k: &mut Builder,
        supply: Supply,
        layout: SharedLayout,
        specialization: Specialization,
    ) -> Self {
        let Specialization { head_dim, value_dim, .. } = specialization;
        let [key_columns, value_columns] = [head_dim, value_dim].map(SharedTile::columns_for);
        let key = SharedTile::reserve(k, supply.tile_n, key_columns, layout);
        let value = SharedTile::reserve(k, supply.tile_n, value_columns, layout);
        let stage_bytes = key.bytes() + value.bytes();
        for _ in 1..supply.stages {
            k.reserve_shared(stage_bytes, 128);
        }
        Self { key, value, stage_bytes }
    }
}

/// The stream of tiles of keys and values.
pub(super) struct Stream {
    pub(super) ring: Ring,
    key_copy: TileCopy,
    value_copy: TileCopy,
    /// The first key of the tile that is copied next.
    next_key: Reg<S32>,
    supply: Supply,
    /// The number of the stage that a warp is at, where producers need to know.
    stage: Option<Reg<U32>>,
}

impl Stream {
    /// `thread` is the number of this thread among those that copy.
    pub(super) fn new(
        k: &mut Builder,
        supply: Supply,
        tiles: &StreamTiles,
        range: &KeyRange,
        [key, value]: [GlobalRows; 2],
        shared_base: Reg<U32>,
        thread: Reg<U32>,
    ) -> Self {
        let [key, value] = [key, value].map(|rows| range.rows_from_first(k, supply.rows(rows)));
        let threads = supply.copying_threads();
        Self {
            ring: Ring::new(k, supply.stages, tiles.stage_bytes),
            key_copy: TileCopy::new(k, tiles.key, key, shared_base, thread, threads),
            value_copy: TileCopy::new(k, tiles.value, value, shared_base, thread, threads),
            next_key: k.copy(range.first),
            supply,
            stage: (supply.producers > 0).then(|| k.copy(0u32)),
        }
    }

    /// Groups of copies that are behind that of the query when it is waited for.
    pub(super) const fn groups_behind_query(&self) -> u32 {
        match self.supply.producers {
            0 => self.ring.ahead(),
            _ => 0,
        }
    }

    /// Starts the copies of the first tiles.
    pub(super) fn start(&self, k: &mut Builder, keys: &KeyRange) {
        for _ in 0..self.groups_behind_query() {
            self.load_next(k, keys);
        }
    }

    /// Waits for the next tile, and starts the copy of one that comes later.
    pub(super) fn arrive(&self, k: &mut Builder, keys: &KeyRange) {
        match self.stage {
            Some(stage) => k.section("wait", |k| {
                let full = full(k, stage);
                k.barrier_sync(full, self.supply.all_threads());
            }),
            None if self.supply.stages == 1 => {
                // Nobody reads the tile before any more; and this one has to be there for everybody.
                k.section("wait", Builder::cta_sync);
                self.load_next(k, keys);
                k.section("wait", |k| {
                    k.copy_async_wait(0);
                    k.cta_sync();
                });
            }
            None => {
                self.ring.wait(k);
                self.load_next(k, keys);
            }
        }
    }

    /// Is done with the tile that begins at `first_key`.
    pub(super) fn release(&self, k: &mut Builder, keys: &KeyRange, first_key: Reg<S32>) {
        if let Some(stage) = self.stage {
            // Where another tile will take its place, the producers wait for this.
            let replaced = k.add(first_key, (self.supply.stages * self.supply.tile_n) as i32);
            let is_replaced = k.compare(Compare::Lt, replaced, keys.end);
            k.if_uniform(is_replaced, |k| {
                let empty = self.empty(k, stage);
                k.barrier_arrive(empty, self.supply.all_threads());
            });
            self.next_stage(k, stage);
        }
        self.ring.read(k);
    }

    /// What producers do: copy tile after tile.
    pub(super) fn produce(&self, k: &mut Builder, keys: &KeyRange) {
        let Some(stage) = self.stage else { return };
        let (ahead, tile_n) = (self.ring.ahead(), self.supply.tile_n as i32);
        // The stage of the tile that arrives next.
        let arriving = k.copy(0u32);
        let last = k.add(keys.end, ahead as i32 * tile_n);
        let first_replaced = k.add(keys.first, self.supply.stages as i32 * tile_n);
        let first_arrived = k.add(keys.first, ahead as i32 * tile_n);
        // An empty range has no tile that could arrive.
        let some = k.compare(Compare::Lt, keys.first, keys.end);
        k.if_uniform(some, |k| {
            // As many groups as tiles, and so many empty ones behind them that all have arrived.
            let last = k.sub(last, keys.first);
            let tiles = k.add(last, tile_n - 1);
            let tiles = k.reinterpret::<S32, U32>(tiles);
            let tiles = k.div(tiles, self.supply.tile_n);
            k.for_uniform(0u32, tiles, 1u32, |k, _| {
                let copies = k.compare(Compare::Lt, self.next_key, keys.end);
                let replaces = k.compare(Compare::Ge, self.next_key, first_replaced);
                let waits = k.and(copies, replaces);
                k.if_uniform(waits, |k| {
                    let empty = self.empty(k, stage);
                    k.barrier_sync(empty, self.supply.all_threads());
                });
                let arrives = k.compare(Compare::Ge, self.next_key, first_arrived);
                self.load_next(k, keys);
                self.next_stage(k, stage);
                k.copy_async_wait(ahead);
                k.if_uniform(arrives, |k| {
                    let full = full(k, arriving);
                    k.barrier_arrive(full, self.supply.all_threads());
                    self.next_stage(k, arriving);
                });
            });
        });
    }

    /// The barrier at which the tile of a stage may be replaced.
    fn empty(&self, k: &mut Builder, stage: Reg<U32>) -> Reg<U32> {
        k.add(stage, FIRST_STAGE_BARRIER + self.supply.stages)
    }

    fn next_stage(&self, k: &mut Builder, stage: Reg<U32>) {
        k.add_to(stage, 1u32);
        let wrapped = k.compare(Compare::Eq, stage, self.supply.stages);
        k.set_where(stage, wrapped, 0u32);
    }

    /// Starts copying the next tile, if there is one.
    fn load_next(&self, k: &mut Builder, keys: &KeyRange) {
        let exists = k.compare(Compare::Lt, self.next_key, keys.end);
        k.if_uniform(exists, |k| {
            let left = k.sub(keys.length, self.next_key);
            let left = k.reinterpret(left);
            k.section("load keys", |k| {
                self.key_copy.start(k, Some(self.ring.filling()), left);
                self.key_copy.advance(k);
            });
            k.section("load values", |k| {
                let skipped = keys.first_of_batch.map(|first| k.sub(first, self.next_key));
                self.value_copy.start_from(k, Some(self.ring.filling()), skipped, left);
                self.value_copy.advance(k);
            });
        });
        k.add_to(self.next_key, self.supply.tile_n as i32);
        self.ring.filled(k);
    }
}

/// The barrier at which the tile of a stage has arrived.
fn full(k: &mut Builder, stage: Reg<U32>) -> Reg<U32> {
    k.add(stage, FIRST_STAGE_BARRIER)
}

/// Barrier 0 is for all threads, the next for the warps that multiply; then come two for each stage, of 16 in all.
pub(super) const MULTIPLYING_BARRIER: u32 = 1;
const FIRST_STAGE_BARRIER: u32 = 2;

/// Which keys the rows of a CTA attend.
pub(super) struct KeyRange {
    /// All there are.
    pub(super) length: Reg<S32>,
    /// The first that any row attends, or a few before it: where a tile begins.
    pub(super) first: Reg<S32>,
    /// Behind the last that any row attends.
    pub(super) end: Reg<S32>,
    /// The first that any row of the batch attends, where rows do not attend from key 0 on.
    first_of_batch: Option<Reg<S32>>,
    /// The first that every row attends, where rows do not attend from key 0 on.
    attended_by_all_from: Option<Reg<S32>>,
    /// Behind the last that every row attends.
    attended_by_all: Reg<S32>,
    tile_n: u32,
}

impl KeyRange {
    /// That of `tile_m` rows, in tiles of `tile_n` keys.
    pub(super) fn new(k: &mut Builder, work: &Work, tile_m: u32, tile_n: u32) -> Self {
        k.section("key range", |k| {
            let last_row = k.add(work.first_row, tile_m - 1);
            let last_that_exists = k.sub(work.row_count, 1u32);
            let last_row = k.min(last_row, last_that_exists);
            let first = work.first_key(k, work.first_row);
            let first = k.reinterpret::<S32, U32>(first);
            let tile = k.div(first, tile_n);
            let first = k.mul(tile, tile_n);
            let first = k.reinterpret::<U32, S32>(first);
            let left = work.specialization.left;
            let range = Self {
                length: work.key_length,
                first,
                end: work.end_key(k, last_row),
                first_of_batch: left.then(|| {
                    let first_row = k.copy(0u32);
                    work.first_key(k, first_row)
                }),
                attended_by_all_from: left.then(|| work.first_key(k, last_row)),
                attended_by_all: work.end_key(k, work.first_row),
                tile_n,
            };
            if work.specialization.mask_mod.is_none() {
                return range;
            }
            let tiles = RangeTiles::at_multiples(tile_m, tile_n);
            let (tile, part) = (k.div(work.first_row, tile_m), k.copy(0u32));
            let tile = tile_ranges::address(k, work, tiles, tile);
            match TileRanges::load(k, tile, part) {
                Some(ranges) => range.within(k, ranges),
                None => range,
            }
        })
    }

    /// What an expression leaves of it.
    fn within(self, k: &mut Builder, ranges: TileRanges) -> Self {
        let tiles = self.tile_n as i32;
        let first = k.mul(ranges.first, tiles);
        let end = k.mad(ranges.last, tiles, tiles);
        let all_from = k.mul(ranges.whole_first, tiles);
        let all_end = k.mul(ranges.whole_end, tiles);
        Self {
            first: k.max(self.first, first),
            end: k.min(self.end, end),
            attended_by_all_from: Some(match self.attended_by_all_from {
                Some(from) => k.max(from, all_from),
                None => all_from,
            }),
            attended_by_all: k.min(self.attended_by_all, all_end),
            ..self
        }
    }

    /// The part of it that this CTA has, by its place in the grid: whole tiles, as many as the other parts have or fewer.
    pub(super) fn part(self, k: &mut Builder, splits: SplitParameters) -> Self {
        k.section("key range", |k| {
            let place = k.special(SpecialRegister::CtaX);
            let part = k.rem(place, splits.num_splits);
            let keys = k.sub(self.end, self.first);
            let keys = k.max(keys, 0i32);
            let keys = k.reinterpret::<S32, U32>(keys);
            let rounded = k.add(keys, self.tile_n - 1);
            let tiles = k.div(rounded, self.tile_n);
            let other_parts = k.sub(splits.num_splits, 1u32);
            let rounded = k.add(tiles, other_parts);
            let tiles_per_part = k.div(rounded, splits.num_splits);
            let keys_per_part = k.mul(tiles_per_part, self.tile_n);
            let before = k.mul(part, keys_per_part);
            let [keys_per_part, before] = [keys_per_part, before].map(|keys| k.reinterpret::<U32, S32>(keys));
            let first = k.add(self.first, before);
            let behind = k.add(first, keys_per_part);
            Self { first, end: k.min(self.end, behind), ..self }
        })
    }

    /// Rows of a head of keys or values from the first key on.
    fn rows_from_first(&self, k: &mut Builder, rows: GlobalRows) -> GlobalRows {
        let first = k.reinterpret::<S32, U32>(self.first);
        let first = k.widen(first);
        GlobalRows { first: k.mad(first, rows.stride, rows.first), ..rows }
    }

    /// Whether some row does not attend some key of the tile.
    pub(super) fn is_partly_masked(&self, k: &mut Builder, first_key: Reg<S32>) -> Reg<Pred> {
        let end = k.add(first_key, self.tile_n as i32);
        let behind = k.compare(Compare::Gt, end, self.attended_by_all);
        match self.attended_by_all_from {
            Some(from) => {
                let before = k.compare(Compare::Lt, first_key, from);
                k.or(behind, before)
            }
            None => behind,
        }
    }
}
