//! Which tiles of keys the rows of a tile attend, and which of them are cut by masks.

use flashcore_ir::types::{Pred, S32, U32};
use flashcore_ir::{Builder, Compare, Reg};

use crate::attention::Work;
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
    key_rows: u32,
}

impl KeyTiles {
    /// Those of a tile of query rows.
    pub(super) fn new(k: &mut Builder, work: &Work, config: HopperConfig) -> Self {
        k.section("key tiles", |k| {
            let key_rows = config.key_rows;
            let last_row = k.add(work.first_row, config.query_rows() - 1);
            let last_that_exists = k.sub(work.parameters.query_length, 1u32);
            let last_row = k.min(last_row, last_that_exists);
            let first_key = work.first_key(k, work.first_row);
            let first = below(k, first_key, key_rows);
            let end_key = work.end_key(k, last_row);
            let any = k.compare(Compare::Gt, end_key, first_key);
            let last_key = k.sub(end_key, 1i32);
            let last_key = k.max(last_key, first_key);
            let last = below(k, last_key, key_rows);
            let all_end = work.end_key(k, work.first_row);
            let whole_end = below(k, all_end, key_rows);
            let whole_end = k.max(whole_end, first);
            let whole_first = if work.specialisation.left {
                let all_from = work.first_key(k, last_row);
                let all_from = k.add(all_from, key_rows as i32 - 1);
                below(k, all_from, key_rows)
            } else {
                first
            };
            let Some(ranges) = TileRanges::load(k, work, config.query_rows()) else {
                return Self { any, first, last, whole_first, whole_end, key_rows };
            };
            let first = k.max(first, ranges.first);
            let last = k.min(last, ranges.last);
            let some = k.compare(Compare::Ge, last, first);
            let any = k.and(any, some);
            let whole_end = k.min(whole_end, ranges.whole_end);
            let whole_end = k.max(whole_end, first);
            let whole_first = k.max(whole_first, ranges.whole_first);
            let whole_first = k.max(whole_first, first);
            Self { any, first, last, whole_first, whole_end, key_rows }
        })
    }

    /// The first key of a tile.
    pub(super) fn first_key(&self, k: &mut Builder, tile: Reg<S32>) -> Reg<S32> {
        k.mul(tile, self.key_rows as i32)
    }

    /// Whether some row does not attend some key of the tile.
    pub(super) fn is_cut(&self, k: &mut Builder, tile: Reg<S32>) -> Reg<Pred> {
        let behind = k.compare(Compare::Ge, tile, self.whole_end);
        let before = k.compare(Compare::Lt, tile, self.whole_first);
        k.or(behind, before)
    }
}

/// The tile that a key is in.
fn below(k: &mut Builder, key: Reg<S32>, key_rows: u32) -> Reg<S32> {
    let key = k.reinterpret::<S32, U32>(key);
    let tile = k.div(key, key_rows);
    k.reinterpret(tile)
}
