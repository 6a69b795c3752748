//! Which tiles of keys the rows of a tile attend, and which of them are cut by masks.

use flashcore_ir::types::{Pred, S32, U32};
use flashcore_ir::{Builder, Compare, Reg};

use super::schedule::Tile;
use crate::attention::tile_ranges::TileRanges;
use crate::hopper_config::HopperConfig;

/// Tiles of keys by number.
#[derive(Debug, Clone, Copy)]
pub(super) struct KeyTiles {
    /// Whether there are any. The rest is about those there are.
    pub(super) any: Reg<Pred>,
    /// The first that some row attends.
    pub(super) first: Reg<S32>,
    /// The last that some row attends.
    pub(super) last: Reg<S32>,
    /// The tiles from here on up to `whole_end` are attended by every row, whole; those before it are not.
    pub(super) whole_first: Reg<S32>,
    /// Behind the last that every row attends.
    pub(super) whole_end: Reg<S32>,
    /// The same as far as an expression alone goes, if there is one.
    whole_by_expression: Option<[Reg<S32>; 2]>,
    /// The key that tile 0 begins with, where that is not the first.
    origin: Option<Reg<S32>>,
    tile_n: u32,
}

impl KeyTiles {
    /// Those of a tile of query rows.
    pub(super) fn new(k: &mut Builder, tile: &Tile, config: HopperConfig) -> Self {
        k.section("key tiles", |k| {
            let (work, origin, tile_n) = (&tile.work, tile.origin, config.tile_n);
            let last_row = k.add(work.first_row, config.tile_m() - 1);
            let last_that_exists = k.sub(work.row_count, 1u32);
            let last_row = k.min(last_row, last_that_exists);
            let first_key = work.first_key(k, work.first_row);
            let first_key = origin.map_or(first_key, |origin| k.max(first_key, origin));
            let first = below(k, first_key, origin, tile_n);
            let end_key = work.end_key(k, last_row);
            let any = k.compare(Compare::Gt, end_key, first_key);
            let last_key = k.sub(end_key, 1i32);
            let last_key = k.max(last_key, first_key);
            let last = below(k, last_key, origin, tile_n);
            let all_end = work.end_key(k, work.first_row);
            let whole_end = below(k, all_end, origin, tile_n);
            let whole_end = k.max(whole_end, first);
            let whole_first = if work.specialization.left {
                let all_from = work.first_key(k, last_row);
                let all_from = k.add(all_from, tile_n as i32 - 1);
                below(k, all_from, origin, tile_n)
            } else {
                first
            };
            let tiles = Self { any, first, last, whole_first, whole_end, whole_by_expression: None, origin, tile_n };
            match tile.ranges {
                Some(ranges) if !config.has_own_ranges(work.specialization) => tiles.within(k, ranges),
                // What lies between the first and the last key that some warpgroup attends.
                _ => tiles,
            }
        })
    }

    /// Those of one of the warpgroups that share these, where each has its own.
    pub(super) fn of_group(&self, k: &mut Builder, tile: &Tile) -> Self {
        k.section("key tiles", |k| tile.ranges.map_or(*self, |ranges| self.within(k, ranges)))
    }

    /// What an expression leaves of them.
    fn within(self, k: &mut Builder, ranges: TileRanges) -> Self {
        let first = k.max(self.first, ranges.first);
        let last = k.min(self.last, ranges.last);
        let some = k.compare(Compare::Ge, last, first);
        let any = k.and(self.any, some);
        let whole_end = k.min(self.whole_end, ranges.whole_end);
        let whole_end = k.max(whole_end, first);
        let whole_first = k.max(self.whole_first, ranges.whole_first);
        let whole_first = k.max(whole_first, first);
        let whole_by_expression = Some([ranges.whole_first, ranges.whole_end]);
        Self { any, first, last, whole_first, whole_end, whole_by_expression, ..self }
    }

    /// The first key of a tile.
    pub(super) fn first_key(&self, k: &mut Builder, tile: Reg<S32>) -> Reg<S32> {
        let keys = self.tile_n as i32;
        match self.origin {
            Some(origin) => k.mad(tile, keys, origin),
            None => k.mul(tile, keys),
        }
    }

    /// Whether some row does not attend some key of the tile.
    pub(super) fn is_cut(&self, k: &mut Builder, tile: Reg<S32>) -> Reg<Pred> {
        is_outside(k, tile, [self.whole_first, self.whole_end])
    }

    /// Whether an expression takes some key of the tile from some row, of the keys there are.
    pub(super) fn is_cut_by_expression(&self, k: &mut Builder, tile: Reg<S32>) -> Option<Reg<Pred>> {
        self.whole_by_expression.map(|whole| is_outside(k, tile, whole))
    }
}

/// Whether a tile is not among those from one on to before another.
fn is_outside(k: &mut Builder, tile: Reg<S32>, [first, end]: [Reg<S32>; 2]) -> Reg<Pred> {
    let behind = k.compare(Compare::Ge, tile, end);
    let before = k.compare(Compare::Lt, tile, first);
    k.or(behind, before)
}

/// The tile that a key is in, of those that begin at a key; the first, if it is before that.
fn below(k: &mut Builder, key: Reg<S32>, origin: Option<Reg<S32>>, tile_n: u32) -> Reg<S32> {
    let key = match origin {
        Some(origin) => {
            let key = k.sub(key, origin);
            k.max(key, 0i32)
        }
        None => key,
    };
    let key = k.reinterpret::<S32, U32>(key);
    let tile = k.div(key, tile_n);
    k.reinterpret(tile)
}
