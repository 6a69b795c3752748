//! From the accumulators to the output.
//!
//! A lane has two columns of each 8 of a row. Four lanes exchange what they have so that each gets 8 adjacent columns,
//! 16 bytes, and store them: no shared memory takes part, which the copies for the next tile can fill meanwhile.

use flashcore_ir::types::{Pred, U32};
use flashcore_ir::{Builder, Compare, GlobalAddress, Reg, ShuffleMode};

use super::consumer::Consumer;
use crate::attention::Work;
use crate::element::{ELEMENT_BYTES, Element};
use crate::tile::{Accumulator, CHUNK_BYTES, CHUNK_ELEMENTS, OnlineSoftmax, ROW_STEP};

/// Lanes that have the columns of a row between them.
const MEMBERS: usize = 4;

/// Finishes the softmax and stores the rows of a warpgroup.
pub(super) fn store<T: Element>(
    k: &mut Builder,
    consumer: &Consumer<T>,
    work: &Work,
    softmax: &OnlineSoftmax,
    output: &Accumulator,
) {
    let sink = work.sink(k);
    let sums = softmax.finish(k, output, sink);
    let first_row = k.add(work.first_row, consumer.row);
    let rows: [Reg<U32>; 2] = core::array::from_fn(|half| k.add(first_row, half as u32 * ROW_STEP));
    let exists = rows.map(|row| k.compare(Compare::Lt, row, work.parameters.query_length));
    if work.specialisation.log_sum_exp {
        for ((row, exists), value) in rows.into_iter().zip(exists).zip(sums.log_sum_exp(k)) {
            // The four lanes of a row have the same value; one stores it.
            let first = k.compare(Compare::Eq, consumer.position.member, 0u32);
            let stores = k.and(exists, first);
            let address = work.log_sum_exp(k, row);
            k.when(stores, |k| k.store_one(address, value));
        }
    }
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
            let tiles = &output.blocks[0];
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
