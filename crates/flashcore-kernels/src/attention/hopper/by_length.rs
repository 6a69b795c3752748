//! Tiles of query rows in the order of how many keys a formula leaves them.
//!
//! Nobody knows that before the kernel runs, so every CTA that stays sorts them for itself, once for all heads: each
//! thread has a tile and counts those that come before it.

use flashcore_ir::types::{Pred, S32, U32};
use flashcore_ir::{Builder, Compare, Reg, SpecialRegister};

use super::key_tiles::KeyTiles;
use super::schedule::Schedule;
use crate::hopper_config::HopperConfig;

/// Tiles of a head that are sorted; of more, every CTA has enough of each length.
pub(crate) const MOST_TILES: u32 = 256;
const WORD_BYTES: u32 = 4;
/// Bytes of shared memory: what tiles are sorted by, and their order.
pub(crate) const BYTES: u32 = 2 * MOST_TILES * WORD_BYTES;

/// The tiles of a head in shared memory, the longest last.
#[derive(Debug, Clone, Copy)]
pub(super) struct ByLength {
    /// Whether they are sorted.
    is_sorted: Reg<Pred>,
    order: Reg<U32>,
}

impl ByLength {
    /// Sorts them, in the memory at an address, where there are more than CTAs. Every thread of the CTA takes part.
    pub(super) fn new(k: &mut Builder, schedule: &Schedule, config: HopperConfig, memory: Reg<U32>) -> Self {
        k.section("tiles by length", |k| {
            let order = k.add(memory, MOST_TILES * WORD_BYTES);
            let (tiles, all) = (schedule.query_tiles, schedule.tiles);
            let ctas = k.special(SpecialRegister::GridX);
            let few = k.compare(Compare::Le, tiles, MOST_TILES);
            let more = k.compare(Compare::Gt, all, ctas);
            let is_sorted = k.and(few, more);
            let thread = k.special(SpecialRegister::ThreadX);
            k.if_uniform(is_sorted, |k| {
                let last = k.sub(tiles, 1u32);
                k.for_uniform(0u32, tiles, config.threads(), |k, first| {
                    let (tile, exists) = own_tile(k, first, thread, last);
                    let zero = k.copy(0u32);
                    let tile_of_head = schedule.place(k, tile, zero, zero);
                    let keys = KeyTiles::new(k, &tile_of_head.work, config);
                    let count = k.sub(keys.last, keys.first);
                    let count = k.add(count, 1i32);
                    let count = k.reinterpret::<S32, U32>(count);
                    let count = k.select(keys.any, count, 0u32);
                    // No two are the same.
                    let place = k.mad(count, MOST_TILES, tile);
                    let address = k.mad(tile, WORD_BYTES, memory);
                    k.when(exists, |k| k.store_shared(address, &[place]));
                });
                k.cta_sync();
                k.for_uniform(0u32, tiles, config.threads(), |k, first| {
                    let (tile, exists) = own_tile(k, first, thread, last);
                    let address = k.mad(tile, WORD_BYTES, memory);
                    let own = k.load_shared::<U32>(address, 1)[0];
                    let before = k.copy(0u32);
                    k.for_uniform(0u32, tiles, 1u32, |k, other| {
                        let address = k.mad(other, WORD_BYTES, memory);
                        let other = k.load_shared::<U32>(address, 1)[0];
                        let is_before = k.compare(Compare::Lt, other, own);
                        let one = k.select(is_before, 1u32, 0u32);
                        k.add_to(before, one);
                    });
                    let address = k.mad(before, WORD_BYTES, order);
                    k.when(exists, |k| k.store_shared(address, &[tile]));
                });
                k.cta_sync();
            });
            Self { is_sorted, order }
        })
    }

    /// The tile that has so many shorter ones; of tiles that are not sorted, that of the number.
    pub(super) fn tile(self, k: &mut Builder, number: Reg<U32>) -> Reg<U32> {
        let tile = k.copy(number);
        k.if_uniform(self.is_sorted, |k| {
            let address = k.mad(number, WORD_BYTES, self.order);
            let sorted = k.load_shared::<U32>(address, 1)[0];
            k.set(tile, sorted);
        });
        tile
    }
}

/// The tile of a thread, and whether there is one.
fn own_tile(k: &mut Builder, first: Reg<U32>, thread: Reg<U32>, last: Reg<U32>) -> (Reg<U32>, Reg<Pred>) {
    let tile = k.add(first, thread);
    (k.min(tile, last), k.compare(Compare::Le, tile, last))
}
