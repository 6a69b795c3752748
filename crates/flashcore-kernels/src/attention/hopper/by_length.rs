//! Tiles of query rows in the order of how many keys an expression leaves them.
//!
//! Nobody knows that before the kernel runs, so every CTA that stays sorts them for itself, once for all heads: four
//! threads have a tile and count those that come before it.
//!
//! Tiles with the same keys make a group, those of one document for example. Where that is common, a group of one head comes
//! behind that of another, and then the next group, from the longest to the shortest: every CTA gets as much of each, and
//! keys and values are in use at one time only.

use flashcore_ir::types::{Pred, S32, U32};
use flashcore_ir::{Builder, Compare, Reg, ShuffleMode, SpecialRegister};

use super::key_tiles::KeyTiles;
use super::schedule::Schedule;
use crate::hopper_config::HopperConfig;

/// Tiles of a head that are sorted; of more, every CTA has enough of each length.
pub(crate) const MOST_TILES: u32 = 1 << TILE_BITS;
const TILE_BITS: u32 = 8;
const WORD_BYTES: u32 = 4;
/// Bytes of shared memory: what tiles are sorted by, and their order.
pub(crate) const BYTES: u32 = 2 * MOST_TILES * WORD_BYTES;
/// Tiles are sorted by how many tiles of keys they have, then by where these begin, in as many bits each, then by number.
const KEY_BITS: u32 = (32 - TILE_BITS) / 2;
/// What tiles that do not exist are sorted by.
const NOTHING: u32 = u32::MAX;

/// The tiles of a head in shared memory, the longest last.
#[derive(Debug, Clone, Copy)]
pub(super) struct ByLength {
    /// Whether they are sorted.
    is_sorted: Reg<Pred>,
    /// Whether most have the same keys as others.
    pub(super) is_grouped: Reg<Pred>,
    /// A word for each, of 8 bits for its number, 8 for the place of the first of its group, and the number of those.
    order: Reg<U32>,
    count: Reg<U32>,
}

impl ByLength {
    /// Sorts those of a schedule, in the memory at an address, where there are more than CTAs. Every thread of the CTA takes
    /// part.
    pub(super) fn sort(k: &mut Builder, schedule: &mut Schedule, config: HopperConfig, memory: Reg<U32>) {
        let (count, all) = (k.copy(schedule.query_tiles), k.copy(schedule.tiles));
        let by_length = k.section("tiles by length", |k| {
            let order = k.add(memory, MOST_TILES * WORD_BYTES);
            let ctas = k.special(SpecialRegister::GridX);
            let few = k.compare(Compare::Le, count, MOST_TILES);
            let more = k.compare(Compare::Gt, all, ctas);
            let is_sorted = k.and(few, more);
            let groups = k.copy(0u32);
            k.if_uniform(is_sorted, |k| {
                place_tiles(k, schedule, config, memory);
                k.cta_sync();
                order_tiles(k, schedule.query_tiles, config, [memory, order], count);
                k.cta_sync();
                let exists = k.mul(count, schedule.matrices);
                k.set(all, exists);
                // Those of the tile in the middle.
                let middle = k.shr(count, 1u32);
                let (_, group) = Self::entry(k, order, middle);
                k.set(groups, group[1]);
            });
            let is_grouped = k.compare(Compare::Gt, groups, 1u32);
            Self { is_sorted, is_grouped, order, count }
        });
        (schedule.query_tiles, schedule.tiles) = (count, all);
        schedule.by_length = Some(by_length);
    }

    /// The tile that has so many before it; the place of the first of its group, and how many these are.
    fn entry(k: &mut Builder, order: Reg<U32>, place: Reg<U32>) -> (Reg<U32>, [Reg<U32>; 2]) {
        let address = k.mad(place, WORD_BYTES, order);
        let word = k.load_shared::<U32>(address, 1)[0];
        let rest = k.shr(word, TILE_BITS);
        let [tile, first] = [word, rest].map(|word| k.and(word, MOST_TILES - 1));
        (tile, [first, k.shr(rest, TILE_BITS)])
    }

    /// The tile that has so many shorter ones; of tiles that are not sorted, that of the number.
    pub(super) fn tile(self, k: &mut Builder, number: Reg<U32>) -> Reg<U32> {
        let tile = k.copy(number);
        k.if_uniform(self.is_sorted, |k| {
            let (sorted, _) = Self::entry(k, self.order, number);
            k.set(tile, sorted);
        });
        tile
    }

    /// The head, of so many, and the tile in it of a number, where those of a group come together.
    pub(super) fn in_group(self, k: &mut Builder, heads: Reg<U32>, index: Reg<U32>) -> (Reg<U32>, Reg<U32>) {
        // As many numbers as heads are for one tile, and all of them for one of the same group.
        let from_last = k.div(index, heads);
        let last = k.sub(self.count, 1u32);
        let some_place = k.sub(last, from_last);
        let (_, [first, tiles]) = Self::entry(k, self.order, some_place);
        let end = k.add(first, tiles);
        let longer = k.sub(self.count, end);
        let skipped = k.mul(longer, heads);
        let within = k.sub(index, skipped);
        let head = k.div(within, tiles);
        let skipped = k.mul(head, tiles);
        let of_group = k.sub(within, skipped);
        let place = k.add(first, of_group);
        (head, Self::entry(k, self.order, place).0)
    }
}

/// Stores what each tile is sorted by; nothing, for those there could be.
fn place_tiles(k: &mut Builder, schedule: &Schedule, config: HopperConfig, memory: Reg<U32>) {
    let thread = k.special(SpecialRegister::ThreadX);
    let last = k.sub(schedule.query_tiles, 1u32);
    for first in (0..MOST_TILES).step_by(config.threads() as usize) {
        let number = k.add(thread, first);
        let tile = k.min(number, last);
        let zero = k.copy(0u32);
        let part = config.has_common_ranges(schedule.specialization).then_some(zero);
        let found = schedule.find(k, [tile, zero, zero], part);
        let tile_of_head = schedule.tile(k, found);
        let keys = KeyTiles::new(k, &tile_of_head, config);
        let count = k.sub(keys.last, keys.first);
        let count = k.add(count, 1i32);
        let count = k.reinterpret::<S32, U32>(count);
        let count = k.select(keys.any, count, 0u32);
        let count = k.min(count, (1 << KEY_BITS) - 2);
        let first_key = keys.first_key(k, keys.first);
        let first_key = k.reinterpret::<S32, U32>(first_key);
        let begin = k.div(first_key, config.tile_n);
        let begin = k.and(begin, (1 << KEY_BITS) - 1);
        // No two are the same.
        let place = k.mad(count, 1 << KEY_BITS, begin);
        let place = k.mad(place, MOST_TILES, tile);
        let work = &tile_of_head.work;
        let has_rows = k.compare(Compare::Lt, work.first_row, work.row_count);
        let is_counted = k.compare(Compare::Le, number, last);
        let exists = k.and(has_rows, is_counted);
        let place = k.select(exists, place, NOTHING);
        let address = k.mad(number, WORD_BYTES, memory);
        let fits = k.compare(Compare::Lt, number, MOST_TILES);
        k.when(fits, |k| k.store_shared(address, &[place]));
    }
}

/// Threads that count together what comes before a tile, and words that each of them reads at a time.
const COUNTING: u32 = 4;
const WORDS: u32 = 4;

/// Stores which tile comes where, and how many there are.
fn order_tiles(
    k: &mut Builder,
    tiles: Reg<U32>,
    config: HopperConfig,
    [memory, order]: [Reg<U32>; 2],
    count: Reg<U32>,
) {
    let thread = k.special(SpecialRegister::ThreadX);
    let (counted, member) = (k.shr(thread, COUNTING.ilog2()), k.and(thread, COUNTING - 1));
    let first_word = k.mul(member, WORDS);
    k.set(count, 0u32);
    k.for_uniform(0u32, tiles, config.threads() / COUNTING, |k, first| {
        let tile = k.add(first, counted);
        let tile = k.min(tile, MOST_TILES - 1);
        let address = k.mad(tile, WORD_BYTES, memory);
        let own = k.load_shared::<U32>(address, 1)[0];
        let group = k.shr(own, TILE_BITS);
        let of_group = k.shl(group, TILE_BITS);
        let behind_group = k.add(of_group, MOST_TILES);
        // How many are below each of these.
        let limits = [own, of_group, behind_group, k.copy(NOTHING)].map(|limit| (limit, k.copy(0u32)));
        k.for_uniform(0u32, tiles, COUNTING * WORDS, |k, others| {
            let word = k.add(others, first_word);
            let address = k.mad(word, WORD_BYTES, memory);
            for other in k.load_shared::<U32>(address, WORDS) {
                for (limit, below) in limits {
                    let is_below = k.compare(Compare::Lt, other, limit);
                    let more = k.add(below, 1u32);
                    k.set_where(below, is_below, more);
                }
            }
        });
        let [before, shorter, not_longer, there] = limits.map(|(_, below)| {
            (0..COUNTING.ilog2()).fold(below, |sum, bit| {
                let other = k.shuffle(ShuffleMode::Butterfly, sum, 1u32 << bit);
                k.add(sum, other)
            })
        });
        // All lanes agree, which compilers cannot see.
        let there = k.shuffle(ShuffleMode::Index, there, 0u32);
        k.set(count, there);
        let same = k.sub(not_longer, shorter);
        let address = k.mad(before, WORD_BYTES, order);
        let group = k.mad(same, MOST_TILES, shorter);
        let word = k.mad(group, MOST_TILES, tile);
        let is_there = k.compare(Compare::Ne, own, NOTHING);
        let is_first = k.compare(Compare::Eq, member, 0u32);
        let stores = k.and(is_there, is_first);
        k.when(stores, |k| k.store_shared(address, &[word]));
    });
}
