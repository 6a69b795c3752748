//! From the accumulators to the output.
//!
//! Where there are two places for the query, a warp writes its rows to that of the one it is done with, in the panels of the
//! copy engine, which stores them while the next tile is worked on, and leaves out rows and columns that do not exist.
//!
//! Elsewhere a lane, which has two columns of each 8 of a row, exchanges them with three others so that each gets 8 adjacent
//! columns, 16 bytes, and stores these itself.

use flashcore_ir::types::{Pred, S32, U32, U64};
use flashcore_ir::{Builder, Compare, GlobalAddress, Reg, ShuffleMode, SpecialRegister};
use flashcore_problem::Operand;

use super::consumer::Consumer;
use super::schedule::Tile;
use super::{Cta, WARPGROUP};
use crate::attention::Work;
use crate::element::{ELEMENT_BYTES, Element};
use crate::tile::{
    CHUNK_BYTES, CHUNK_ELEMENTS, LANES, OnlineSoftmax, PANEL_ROW_BYTES, PanelTile, ROW_STEP, ROWS_PER_BLOCK, TensorRows,
};

/// Lanes that have the columns of a row between them.
const MEMBERS: usize = 4;
/// The barrier at which the first warpgroup waits before it writes to the place of its query; the others have the next ones.
const FIRST_WRITE: u32 = 12;

/// Finishes the softmax and stores what it was; returns which of a lane's two rows exist.
fn finish<T: Element>(k: &mut Builder, consumer: &Consumer<T>, work: &Work, softmax: &OnlineSoftmax) -> [Reg<Pred>; 2] {
    let sink = work.sink(k);
    let sums = softmax.finish(k, &consumer.output, sink);
    let first_row = k.add(work.first_row, consumer.row);
    let rows: [Reg<U32>; 2] = core::array::from_fn(|half| k.add(first_row, half as u32 * ROW_STEP));
    let exists = rows.map(|row| k.compare(Compare::Lt, row, work.row_count));
    if work.specialization.has(Operand::Lse) {
        for ((row, exists), value) in rows.into_iter().zip(exists).zip(sums.lse(k)) {
            // The four lanes of a row have the same value; one stores it.
            let first = k.compare(Compare::Eq, consumer.position.member, 0u32);
            let stores = k.and(exists, first);
            let address = work.lse(k, row);
            k.when(stores, |k| k.store_one(address, value));
        }
    }
    exists
}

/// Finishes the rows of a warpgroup and has the copy engine store them, from the place of their query.
pub(super) fn store_by_copy<T: Element>(
    k: &mut Builder,
    consumer: &Consumer<T>,
    cta: &Cta,
    tile: &Tile,
    target: Reg<U64>,
    softmax: &OnlineSoftmax,
) {
    let exists = finish(k, consumer, &tile.work, softmax);
    let output = PanelTile { rows: cta.shared.query.rows, columns: cta.shared.value.columns };
    k.section("write output", |k| {
        let thread = k.special(SpecialRegister::ThreadX);
        let (lane, warp) = (k.and(thread, LANES - 1), k.shr(thread, LANES.ilog2()));
        let warp = k.and(warp, WARPGROUP / LANES - 1);
        let rows = consumer.tile_m(k);
        let source = k.mad(warp, ROWS_PER_BLOCK * PANEL_ROW_BYTES, rows);
        // No warp of the warpgroup reads the query any more.
        let barrier = k.add(consumer.row_group, FIRST_WRITE);
        k.barrier_sync(barrier, WARPGROUP);
        let first = k.sub(consumer.row, consumer.position.group);
        let first = k.add(tile.place.first_row, first);
        let copy = |k: &mut Builder| {
            output.write_rows::<T>(k, &consumer.output, source, lane);
            k.fence_proxy_async();
            k.warp_sync();
            let [row, head, batch] =
                [first, tile.place.head, tile.place.batch].map(|index| k.reinterpret::<U32, S32>(index));
            output.store(k, TensorRows { map: target, row, head, batch, policy: None }, source, consumer.leader);
        };
        if cta.config.sorts_tiles(cta.specialization) {
            let is_cut = is_cut_short(k, &tile.work, first);
            k.if_else_uniform(is_cut, |k| store_rows(k, consumer, &tile.work, exists), copy);
        } else {
            copy(k);
        }
    });
    if let Some(stored) = consumer.stored {
        let place = consumer.query.leave(k);
        stored.begin(k, place);
    }
}

/// Whether the rows of a warp, from its first on, are followed by some of another tile, which a copy would overwrite.
fn is_cut_short(k: &mut Builder, work: &Work, first: Reg<U32>) -> Reg<Pred> {
    let behind = k.add(first, ROWS_PER_BLOCK);
    let has_others = k.compare(Compare::Gt, behind, work.row_count);
    let have_rows = k.compare(Compare::Lt, work.row_count, work.parameters.query_length);
    k.and(has_others, have_rows)
}

/// Finishes the rows of a warpgroup and stores them.
pub(super) fn store<T: Element>(k: &mut Builder, consumer: &Consumer<T>, work: &Work, softmax: &OnlineSoftmax) {
    let exists = finish(k, consumer, work, softmax);
    store_rows(k, consumer, work, exists);
}

/// Stores those of the lanes' rows that exist.
fn store_rows<T: Element>(k: &mut Builder, consumer: &Consumer<T>, work: &Work, exists: [Reg<Pred>; 2]) {
    k.section("store output", |k| {
        let bits = [1u32, 2].map(|bit| {
            let bit = k.and(consumer.position.member, bit);
            k.compare(Compare::Ne, bit, 0u32)
        });
        let target = work.output(k);
        for half in 0..2 {
            let within = k.add(consumer.row, half as u32 * ROW_STEP);
            let within = k.widen(within);
            let row = k.mad(within, target.stride, target.first);
            let lane = k.mad_wide(consumer.position.member, CHUNK_BYTES, row);
            let tiles = &consumer.output.blocks[0];
            for (group, tiles) in tiles.chunks(MEMBERS).enumerate() {
                let words: Vec<_> = tiles
                    .iter()
                    .map(|tile| {
                        let pair = k.pair::<T>(tile[2 * half], tile[2 * half + 1]);
                        k.reinterpret::<T, U32>(pair)
                    })
                    .collect();
                // Where there are fewer than four, some lanes get what they do not store.
                let words: [Reg<U32>; MEMBERS] = core::array::from_fn(|index| words[index.min(words.len() - 1)]);
                let words = k.section("exchange", |k| transpose(k, words, bits));
                let stores = if tiles.len() == MEMBERS {
                    exists[half]
                } else {
                    let has = k.compare(Compare::Lt, consumer.position.member, tiles.len() as u32);
                    k.and(exists[half], has)
                };
                let column = group as u32 * MEMBERS as u32 * CHUNK_ELEMENTS;
                let to = GlobalAddress::from(lane).plus((column * ELEMENT_BYTES) as i32);
                k.when(stores, |k| k.store(to, &words));
            }
        }
    });
}

/// The word of number `m` of each of the four lanes, in the order of the lanes, for lane `m` of four. `bits` are those of
/// its number.
fn transpose(k: &mut Builder, mut words: [Reg<U32>; MEMBERS], bits: [Reg<Pred>; 2]) -> [Reg<U32>; MEMBERS] {
    for (bit, distance) in bits.into_iter().zip([1usize, 2]) {
        for low in (0..MEMBERS).filter(|index| index & distance == 0) {
            let high = low + distance;
            let sent = k.select(bit, words[low], words[high]);
            let received = k.shuffle(ShuffleMode::Butterfly, sent, distance as u32);
            (words[low], words[high]) = (k.select(bit, received, words[low]), k.select(bit, words[high], received));
        }
    }
    words
}
