//! Sorted scheduler: LPT order of tiles by their nonempty KV blocks in a block mask.
//!
//! The lengths are not known before the kernel runs, so every persistent CTA sorts the tiles for itself, once for all
//! heads: four threads have a tile and count those that come before it.
//!
//! Tiles with the same KV blocks make a group, those of one document for example. Where that is common, a group of one head
//! follows that of another, and then the next group, from the longest to the shortest: every CTA gets as much of each, and
//! keys and values are in use at one time only.

use flashcore_ir::types::{Pred, U32};
use flashcore_ir::{Builder, Compare, Reg, ShuffleMode, SpecialRegister};

use super::{Policy, TileScheduler};
use crate::attention::block_mask::mode::{BlockMaskMode, RangePer};

/// The most tiles of a head that are sorted; of more, every CTA has enough of each length.
const MAX_TILES: u32 = 1 << TILE_BITS;
const TILE_BITS: u32 = 8;
const WORD_BYTES: u32 = 4;
/// Bytes of shared memory: the sort keys of tiles, and their order.
pub(crate) const BYTES: u32 = 2 * MAX_TILES * WORD_BYTES;
/// Bits of each part of a sort key: the number of KV blocks, then the first of them; the index of the tile comes last.
const KEY_BITS: u32 = (32 - TILE_BITS) / 2;
/// The sort key of tiles that do not exist.
const NOTHING: u32 = u32::MAX;

/// The tiles of a head in shared memory, the longest last.
#[derive(Debug, Clone, Copy)]
pub(super) struct SortedTiles {
    /// True if they are sorted.
    is_sorted: Reg<Pred>,
    /// True if most tiles have the same KV blocks as others.
    is_grouped: Reg<Pred>,
    /// A word for each: 8 bits of its index, 8 of the rank of the first of its group, then the size of the group.
    order: Reg<U32>,
    count: Reg<U32>,
}

/// A tile in the order: its index, the rank of the first of its group, and the size of the group.
struct Entry {
    tile: Reg<U32>,
    group_first: Reg<U32>,
    group_size: Reg<U32>,
}

impl TileScheduler {
    /// Sorts the tiles in shared memory at `memory`, where there are more than CTAs. Every thread of the CTA takes part.
    #[must_use]
    pub(crate) fn sorted(self, k: &mut Builder, memory: Reg<U32>) -> Self {
        let (count, all) = (k.copy(self.tiles_per_head), k.copy(self.tiles));
        let sorted = k.section("sorted tiles", |k| {
            let order = k.add(memory, MAX_TILES * WORD_BYTES);
            let ctas = k.special(SpecialRegister::GridX);
            let is_sorted = k.eval(count.le(MAX_TILES) & all.gt(ctas));
            let group_size = k.copy(0u32);
            k.if_uniform(is_sorted, |k| {
                self.store_sort_keys(k, memory);
                k.cta_sync();
                self.store_order(k, [memory, order], count);
                k.cta_sync();
                let exists = k.mul(count, self.matrices);
                k.set(all, exists);
                let middle = k.shr(count, 1u32);
                let middle = SortedTiles::entry(k, order, middle);
                k.set(group_size, middle.group_size);
            });
            let is_grouped = k.compare(Compare::Gt, group_size, 1u32);
            SortedTiles { is_sorted, is_grouped, order, count }
        });
        Self { tiles_per_head: count, tiles: all, policy: Policy::Sorted(sorted), ..self }
    }

    /// Stores the sort key of each tile; [`NOTHING`] for those that do not exist.
    fn store_sort_keys(&self, k: &mut Builder, memory: Reg<U32>) {
        let config = self.config;
        let thread = k.special(SpecialRegister::ThreadX);
        let last = k.sub(self.tiles_per_head, 1u32);
        for first in (0..MAX_TILES).step_by(config.threads() as usize) {
            let index = k.add(thread, first);
            let tile = k.min(index, last);
            let zero = k.copy(0u32);
            let mode = BlockMaskMode::of(config, self.specialization);
            let row_group = mode.and_then(|mode| (mode.range == RangePer::Cta).then_some(zero));
            let info = self.info(k, [tile, zero, zero], row_group);
            let work_tile = self.work_tile(k, info);
            let range = work_tile.kv_blocks(k, config);
            let count = k.eval((range.last - range.first + 1).unsigned());
            let count = k.select(range.nonempty, count, 0u32);
            let count = k.min(count, (1 << KEY_BITS) - 2);
            let first_key = range.first_key(k, range.first);
            let begin = k.eval((first_key.unsigned() / config.tile_n) & ((1 << KEY_BITS) - 1));
            // No two are the same.
            let sort_key = k.eval(count.mul_add(1 << KEY_BITS, begin).mul_add(MAX_TILES, tile));
            let context = &work_tile.context;
            let exists = k.eval(context.first_row.lt(context.end_row) & index.le(last));
            let sort_key = k.select(exists, sort_key, NOTHING);
            let address = k.mad(index, WORD_BYTES, memory);
            let fits = k.compare(Compare::Lt, index, MAX_TILES);
            k.when(fits, |k| k.store_shared(address, &[sort_key]));
        }
    }

    /// Stores the order of the tiles, and counts those that exist.
    fn store_order(&self, k: &mut Builder, [memory, order]: [Reg<U32>; 2], count: Reg<U32>) {
        /// Threads that count together the tiles before one, and words that each of them reads at a time.
        const COUNTING: u32 = 4;
        const WORDS: u32 = 4;
        let tiles = self.tiles_per_head;
        let thread = k.special(SpecialRegister::ThreadX);
        let (counted, member) = (k.shr(thread, COUNTING.ilog2()), k.and(thread, COUNTING - 1));
        let first_word = k.mul(member, WORDS);
        k.set(count, 0u32);
        k.for_uniform(0u32, tiles, self.config.threads() / COUNTING, |k, first| {
            let tile = k.eval((first + counted).min(MAX_TILES - 1));
            let address = k.mad(tile, WORD_BYTES, memory);
            let own = k.load_shared::<U32>(address, 1)[0];
            let group_begin = k.eval(own >> TILE_BITS << TILE_BITS);
            let group_end = k.add(group_begin, MAX_TILES);
            // The number of sort keys below each of these.
            let limits = [own, group_begin, group_end, k.copy(NOTHING)].map(|limit| (limit, k.copy(0u32)));
            k.for_uniform(0u32, tiles, COUNTING * WORDS, |k, others| {
                let address = k.eval((others + first_word).mul_add(WORD_BYTES, memory));
                for other in k.load_shared::<U32>(address, WORDS) {
                    for (limit, below) in limits {
                        let is_below = k.compare(Compare::Lt, other, limit);
                        let more = k.add(below, 1u32);
                        k.set_where(below, is_below, more);
                    }
                }
            });
            let [rank, group_first, after_group, existing] = limits.map(|(_, below)| {
                (0..COUNTING.ilog2()).fold(below, |sum, bit| {
                    let other = k.shuffle(ShuffleMode::Butterfly, sum, 1u32 << bit);
                    k.add(sum, other)
                })
            });
            // All lanes agree, which compilers cannot see.
            let existing = k.shuffle(ShuffleMode::Index, existing, 0u32);
            k.set(count, existing);
            let group_size = k.sub(after_group, group_first);
            let address = k.mad(rank, WORD_BYTES, order);
            let word = k.eval(group_size.mul_add(MAX_TILES, group_first).mul_add(MAX_TILES, tile));
            let stores = k.eval(own.ne(NOTHING) & member.eq(0));
            k.when(stores, |k| k.store_shared(address, &[word]));
        });
    }
}

impl SortedTiles {
    /// The tile of a rank.
    fn entry(k: &mut Builder, order: Reg<U32>, rank: Reg<U32>) -> Entry {
        let address = k.mad(rank, WORD_BYTES, order);
        let word = k.load_shared::<U32>(address, 1)[0];
        let rest = k.shr(word, TILE_BITS);
        let [tile, group_first] = [word, rest].map(|word| k.and(word, MAX_TILES - 1));
        Entry { tile, group_first, group_size: k.shr(rest, TILE_BITS) }
    }

    /// The head of all batches, and the tile in it, of a linear index: group by group where several tiles have the same KV
    /// blocks, and section by section elsewhere.
    pub(super) fn tile_at(self, k: &mut Builder, scheduler: &TileScheduler, index: Reg<U32>) -> (Reg<U32>, Reg<U32>) {
        let (matrix, tile) = (k.register(), k.register());
        k.if_else_uniform(
            self.is_grouped,
            |k| {
                let (grouped_matrix, grouped_tile) = self.grouped_tile_at(k, scheduler.matrices, index);
                k.set(matrix, grouped_matrix);
                k.set(tile, grouped_tile);
            },
            |k| {
                let (section_matrix, rank) = scheduler.sections.tile_at(k, scheduler, index);
                let ranked_tile = self.ranked_tile(k, rank);
                k.set(matrix, section_matrix);
                k.set(tile, ranked_tile);
            },
        );
        (matrix, tile)
    }

    /// The tile of a rank; of tiles that are not sorted, the rank itself.
    fn ranked_tile(self, k: &mut Builder, rank: Reg<U32>) -> Reg<U32> {
        let tile = k.copy(rank);
        k.if_uniform(self.is_sorted, |k| {
            let entry = Self::entry(k, self.order, rank);
            k.set(tile, entry.tile);
        });
        tile
    }

    /// The head, of so many, and the tile in it of a linear index, where the tiles of a group come together.
    fn grouped_tile_at(self, k: &mut Builder, heads: Reg<U32>, index: Reg<U32>) -> (Reg<U32>, Reg<U32>) {
        // Each tile has as many indices as there are heads; all of them lead to some tile of the same group.
        let from_last = k.div(index, heads);
        let rank = k.eval(self.count - 1 - from_last);
        let group = Self::entry(k, self.order, rank);
        let group_end = k.add(group.group_first, group.group_size);
        let within = k.eval(index - (self.count - group_end) * heads);
        let head = k.div(within, group.group_size);
        let rank = k.eval(group.group_first + (within - head * group.group_size));
        (head, Self::entry(k, self.order, rank).tile)
    }
}
