//! KV range: the keys that the rows of a tile attend, and its full and partial blocks.
//!
//! Every row attends all keys of a *full* block; a *partial* block is masked. [`KvRange`] counts in keys, for kernels that
//! go from the first key to the last; [`KvBlockRange`] counts in blocks of `tile_n` keys, for kernels that go from the last
//! block to the first, so that blocks that are partial on the right come first.

use flashcore_ir::types::{Pred, S32, U32};
use flashcore_ir::{Builder, Compare, Reg, SpecialRegister};

use super::TileContext;
use super::block_mask::{self, BlockMaskTiles, KvBlocks};

/// The last row of a tile of `tile_m` rows that exists.
fn last_row(k: &mut Builder, context: &TileContext, tile_m: u32) -> Reg<U32> {
    k.eval((context.first_row + (tile_m - 1)).min(context.end_row - 1))
}

/// The KV range of a tile, in keys.
pub(crate) struct KvRange {
    /// The keys of the batch.
    pub(crate) key_length: Reg<S32>,
    /// The first key that any row attends, rounded down to a multiple of `tile_n`.
    pub(crate) begin: Reg<S32>,
    /// One past the last key that any row attends.
    pub(crate) end: Reg<S32>,
    /// The first key that any row of the batch attends, under a left window.
    pub(crate) batch_begin: Option<Reg<S32>>,
    /// The first new key, where keys from there on are not in the cache yet.
    pub(crate) first_new_key: Option<Reg<S32>>,
    /// The first key that every row attends, under a left window or a block mask.
    full_begin: Option<Reg<S32>>,
    /// One past the last key that every row attends.
    full_end: Reg<S32>,
    tile_n: u32,
}

impl KvRange {
    /// The range of `tile_m` rows, in blocks of `tile_n` keys.
    pub(crate) fn new(k: &mut Builder, context: &TileContext, tile_m: u32, tile_n: u32) -> Self {
        k.section("kv range", |k| {
            let rows = [context.first_row, last_row(k, context, tile_m)];
            let window = context.window();
            let [begin, end] = window.attended_by_some(k, rows, tile_n);
            let batch_begin = window.before.map(|_| {
                let first_row = k.copy(0u32);
                window.first(k, first_row)
            });
            let (full_begin, full_end) = window.attended_by_all(k, rows);
            let range = Self {
                key_length: context.key_length,
                begin,
                end,
                batch_begin,
                first_new_key: context.sequence.new_keys.map(|new_keys| new_keys.first_key),
                full_begin,
                full_end,
                tile_n,
            };
            if context.specialization.mask_mod.is_none() {
                return range;
            }
            let tiles = BlockMaskTiles::aligned(tile_m, tile_n);
            let (tile, group) = (k.div(context.first_row, tile_m), k.copy(0u32));
            let record = block_mask::record_address(k, context, tiles, tile);
            match KvBlocks::load(k, record, group) {
                Some(blocks) => range.intersect(k, blocks),
                None => range,
            }
        })
    }

    /// The intersection with the nonempty blocks of a block mask.
    fn intersect(self, k: &mut Builder, blocks: KvBlocks) -> Self {
        let tile_n = self.tile_n as i32;
        let begin = k.mul(blocks.first, tile_n);
        let end = k.mad(blocks.last, tile_n, tile_n);
        let full_begin = k.mul(blocks.full_begin, tile_n);
        let full_end = k.mul(blocks.full_end, tile_n);
        Self {
            begin: k.max(self.begin, begin),
            end: k.min(self.end, end),
            full_begin: Some(match self.full_begin {
                Some(own) => k.max(own, full_begin),
                None => full_begin,
            }),
            full_end: k.min(self.full_end, full_end),
            ..self
        }
    }

    /// The range, or an empty one.
    pub(crate) fn only_if(self, k: &mut Builder, condition: Reg<Pred>) -> Self {
        Self { end: k.select(condition, self.end, self.begin), ..self }
    }

    /// This CTA's split of the range: whole blocks, as many as the other splits have or fewer.
    pub(crate) fn split(self, k: &mut Builder, num_splits: Reg<U32>) -> Self {
        k.section("kv range", |k| {
            let cta = k.special(SpecialRegister::CtaX);
            let split = k.rem(cta, num_splits);
            let keys = (self.end - self.begin).max(0).unsigned();
            let blocks = k.eval((keys + (self.tile_n - 1)) / self.tile_n);
            let keys_per_split = k.eval((blocks + (num_splits - 1)) / num_splits * self.tile_n);
            let skipped = k.mul(split, keys_per_split);
            let [keys_per_split, skipped] = [keys_per_split, skipped].map(|keys| k.reinterpret::<U32, S32>(keys));
            let begin = k.add(self.begin, skipped);
            Self { begin, end: k.eval(self.end.min(begin + keys_per_split)), ..self }
        })
    }

    /// The chunk of the range that begins at `first_key`.
    pub(crate) fn chunk(self, k: &mut Builder, first_key: Reg<S32>, chunk_keys: Reg<U32>) -> Self {
        k.section("kv range", |k| {
            let begin = k.max(self.begin, first_key);
            let end = k.eval((first_key + chunk_keys.signed()).min(self.end));
            Self { begin, end, ..self }
        })
    }

    /// True if some row does not attend some key of the block from `first_key` on.
    pub(crate) fn is_partial(&self, k: &mut Builder, first_key: Reg<S32>) -> Reg<Pred> {
        let past_full = (first_key + self.tile_n as i32).gt(self.full_end);
        match self.full_begin {
            Some(full_begin) => k.eval(past_full | first_key.lt(full_begin)),
            None => k.eval(past_full),
        }
    }
}

/// The KV range of a tile, in blocks of `tile_n` keys.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KvBlockRange {
    /// False if the range is empty; the other fields are then undefined.
    pub(crate) nonempty: Reg<Pred>,
    /// The first block that some row attends.
    pub(crate) first: Reg<S32>,
    /// The last block that some row attends.
    pub(crate) last: Reg<S32>,
    /// The first full block.
    pub(crate) full_begin: Reg<S32>,
    /// One past the last full block.
    pub(crate) full_end: Reg<S32>,
    /// The full blocks as far as a `mask_mod` alone goes, where there is one.
    full_by_mask_mod: Option<[Reg<S32>; 2]>,
    /// The first key of block 0, where it is not key 0.
    origin: Option<Reg<S32>>,
    tile_n: u32,
}

impl KvBlockRange {
    /// The range of `tile_m` rows, in blocks of `tile_n` keys from `origin` on.
    pub(crate) fn new(
        k: &mut Builder,
        context: &TileContext,
        (tile_m, tile_n): (u32, u32),
        origin: Option<Reg<S32>>,
    ) -> Self {
        let last_row = last_row(k, context, tile_m);
        let first_key = context.first_key(k, context.first_row);
        let first_key = origin.map_or(first_key, |origin| k.max(first_key, origin));
        let first = block_of(k, first_key, origin, tile_n);
        let end_key = context.end_key(k, last_row);
        let nonempty = k.compare(Compare::Gt, end_key, first_key);
        let last_key = k.eval((end_key - 1).max(first_key));
        let last = block_of(k, last_key, origin, tile_n);
        let full_end_key = context.end_key(k, context.first_row);
        let full_end = block_of(k, full_end_key, origin, tile_n);
        let full_end = k.max(full_end, first);
        let full_begin = if context.specialization.left {
            let full_key = context.first_key(k, last_row);
            let rounded_up = k.add(full_key, tile_n as i32 - 1);
            block_of(k, rounded_up, origin, tile_n)
        } else {
            first
        };
        Self { nonempty, first, last, full_begin, full_end, full_by_mask_mod: None, origin, tile_n }
    }

    /// The blocks of a chunk of the keys, which begins and ends where blocks do.
    pub(crate) fn chunk(self, k: &mut Builder, [begin, end]: [Reg<S32>; 2]) -> Self {
        let tile_n = self.tile_n;
        let first = k.eval((begin.unsigned() / tile_n).signed().max(self.first));
        let last = k.eval(((end.unsigned() / tile_n).signed() - 1).min(self.last));
        let some = k.eval(last.ge(first));
        let nonempty = k.and(self.nonempty, some);
        let full_end = k.eval(self.full_end.min(last + 1).max(first));
        let full_begin = k.max(self.full_begin, first);
        Self { nonempty, first, last, full_begin, full_end, ..self }
    }

    /// The intersection with the nonempty blocks of a block mask.
    pub(crate) fn intersect(self, k: &mut Builder, blocks: KvBlocks) -> Self {
        let first = k.max(self.first, blocks.first);
        let last = k.min(self.last, blocks.last);
        let some = k.eval(last.ge(first));
        let nonempty = k.and(self.nonempty, some);
        let full_end = k.eval(self.full_end.min(blocks.full_end).max(first));
        let full_begin = k.eval(self.full_begin.max(blocks.full_begin).max(first));
        let full_by_mask_mod = Some([blocks.full_begin, blocks.full_end]);
        Self { nonempty, first, last, full_begin, full_end, full_by_mask_mod, ..self }
    }

    /// The first key of a block.
    pub(crate) fn first_key(&self, k: &mut Builder, block: Reg<S32>) -> Reg<S32> {
        let tile_n = self.tile_n as i32;
        match self.origin {
            Some(origin) => k.mad(block, tile_n, origin),
            None => k.mul(block, tile_n),
        }
    }

    /// True if some row does not attend some key of a block.
    pub(crate) fn is_partial(&self, k: &mut Builder, block: Reg<S32>) -> Reg<Pred> {
        is_outside(k, block, [self.full_begin, self.full_end])
    }

    /// True if a `mask_mod` takes some key of a block from some row, of the keys there are.
    pub(crate) fn is_partial_by_mask_mod(&self, k: &mut Builder, block: Reg<S32>) -> Option<Reg<Pred>> {
        self.full_by_mask_mod.map(|full| is_outside(k, block, full))
    }
}

/// True if a block is not among those from `begin` to before `end`.
fn is_outside(k: &mut Builder, block: Reg<S32>, [begin, end]: [Reg<S32>; 2]) -> Reg<Pred> {
    k.eval(block.ge(end) | block.lt(begin))
}

/// The block that a key is in; block 0 for a key before the origin.
fn block_of(k: &mut Builder, key: Reg<S32>, origin: Option<Reg<S32>>, tile_n: u32) -> Reg<S32> {
    let key = match origin {
        Some(origin) => k.eval((key - origin).max(0)),
        None => key,
    };
    k.eval((key.unsigned() / tile_n).signed())
}
