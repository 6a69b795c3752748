//! Epilogue of the Hopper kernel: the division by the row sum, the LSE, and the output.
//!
//! Where there are two Q stages, a warp writes its rows to the stage of the Q it is done with, in the swizzled layout of
//! TMA, which stores them while the next tile is worked on, and leaves out rows and columns that do not exist.
//!
//! Elsewhere a lane, which has two columns of each 8 of a row, exchanges them with three others so that each gets 8 adjacent
//! columns, 16 bytes, and stores these itself.

use flashcore_ir::types::{Pred, S32, U32, U64};
use flashcore_ir::{Builder, Compare, GlobalAddress, Reg, ShuffleMode, SpecialRegister};

use super::{Mainloop, PvStrategy, WARPGROUP};
use crate::attention::TileContext;
use crate::attention::epilogue::store_lse;
use crate::attention::scheduler::WorkTile;
use crate::attention::split_kv::partial::store_partials;
use crate::primitives::{
    CHUNK_BYTES, LANES, LaneColumns, MMA_M, NamedBarrier, PANEL_ROW_BYTES, ROW_STEP, TensorRows, TmaStoreGuard,
};
use flashcore_problem::Operand;

/// Lanes that have the columns of a row between them.
const MEMBERS: usize = 4;

/// Ends the softmax and stores the LSE; returns for each of a lane's two rows if it exists.
fn finish<P: PvStrategy>(k: &mut Builder, mainloop: &Mainloop<'_, P>) -> [Reg<Pred>; 2] {
    let Mainloop { consumer, context, softmax, scales, .. } = mainloop;
    P::scale_output(k, scales, softmax, &consumer.output);
    let sink = context.sink(k);
    let stats = softmax.finish(k, &consumer.output, sink, context.specialization.lse_form);
    let first_row = k.add(context.first_row, consumer.row);
    let rows: [Reg<U32>; 2] = core::array::from_fn(|half| k.add(first_row, half as u32 * ROW_STEP));
    let exists = rows.map(|row| k.compare(Compare::Lt, row, context.end_row));
    if context.specialization.has(Operand::Lse) {
        for (row, value) in rows.into_iter().zip(exists).zip(stats.lse(k)) {
            store_lse(k, context, row, consumer.position.member, value);
        }
    }
    exists
}

/// Ends the softmax of a warpgroup's rows and has TMA store them, from the stage of their Q.
pub(super) fn tma_store<P: PvStrategy>(
    k: &mut Builder,
    mainloop: &Mainloop<'_, P>,
    tile: &WorkTile,
    (map, guard): (Reg<U64>, TmaStoreGuard),
) {
    let Mainloop { consumer, cta, .. } = mainloop;
    let exists = finish(k, mainloop);
    let output = cta.config.output_tile(cta.specialization);
    k.section("write output", |k| {
        let thread = k.special(SpecialRegister::ThreadX);
        let (lane, warp) = (k.and(thread, LANES - 1), k.shr(thread, LANES.ilog2()));
        let warp = k.and(warp, WARPGROUP / LANES - 1);
        let rows = consumer.query_rows(k);
        let source = k.mad(warp, MMA_M * PANEL_ROW_BYTES, rows);
        // No warp of the warpgroup reads Q any more.
        let barrier = NamedBarrier::OutputTile.indexed(k, consumer.row_group);
        k.barrier_sync(barrier, WARPGROUP);
        let first_row = k.sub(consumer.row, consumer.position.group);
        let first_row = k.add(tile.coord.first_row, first_row);
        let store = |k: &mut Builder| {
            output.write_rows::<P::Output>(k, &consumer.output, source, lane);
            k.fence_proxy_async();
            k.warp_sync();
            let [row, head, batch] =
                [first_row, tile.coord.head, tile.coord.batch].map(|index| k.reinterpret::<U32, S32>(index));
            let rows = TensorRows { map, row, head, batch, policy: None };
            let rows = tile.context.sequence.place_rows(k, rows);
            output.tma_store(k, rows, source, consumer.leader);
        };
        if cta.block_mask.is_some_and(|mode| mode.sorted) || cta.specialization.has_query_lengths() {
            let is_short = is_short(k, &tile.context, first_row);
            k.if_else_uniform(is_short, |k| store_rows(k, mainloop, exists), store);
        } else {
            store(k);
        }
    });
    let stage = consumer.query.advance_holding(k);
    guard.hold(k, stage);
}

/// True if the rows of a warp, from its first on, are followed by those of another tile or sequence, which TMA would
/// overwrite.
fn is_short(k: &mut Builder, context: &TileContext, first_row: Reg<U32>) -> Reg<Pred> {
    let has_fewer = (first_row + MMA_M).gt(context.end_row);
    if context.sequence.first_row.is_some() {
        return k.eval(has_fewer);
    }
    k.eval(has_fewer & context.end_row.lt(context.parameters.query_length))
}

/// Ends the softmax of a warpgroup's rows and stores them; of a chunk that is not all keys, stores a partial result.
pub(super) fn store<P: PvStrategy>(k: &mut Builder, mainloop: &Mainloop<'_, P>, tile: &WorkTile) {
    let Mainloop { consumer, context, softmax, scales, .. } = mainloop;
    let store_all = |k: &mut Builder| {
        let exists = finish(k, mainloop);
        store_rows(k, mainloop, exists);
    };
    let Some(chunk) = tile.chunk else { return store_all(k) };
    let is_partial = k.compare(Compare::Gt, chunk.count, 1u32);
    k.if_else_uniform(
        is_partial,
        |k| {
            P::scale_output(k, scales, softmax, &consumer.output);
            let first_row = k.add(context.first_row, consumer.row);
            let rows: [Reg<U32>; 2] = core::array::from_fn(|half| k.add(first_row, half as u32 * ROW_STEP));
            let lane = (&rows[..], consumer.position.member, LaneColumns::Pairs);
            store_partials(k, context, lane, (chunk.splits, chunk.index), softmax, &consumer.output);
        },
        store_all,
    );
}

/// Stores those of the lanes' rows that exist.
fn store_rows<P: PvStrategy>(k: &mut Builder, mainloop: &Mainloop<'_, P>, exists: [Reg<Pred>; 2]) {
    let Mainloop { consumer, context, .. } = mainloop;
    k.section("store output", |k| {
        let bits = [1u32, 2].map(|bit| k.eval((consumer.position.member & bit).ne(0)));
        let target = context.output(k);
        for half in 0..2 {
            let within = k.eval(consumer.row + half as u32 * ROW_STEP);
            let row = target.row(k, within);
            let lane = k.mad_wide(consumer.position.member, CHUNK_BYTES, row);
            for (group, fragments) in consumer.output.m_tiles[0].chunks(MEMBERS).enumerate() {
                let words: Vec<_> = fragments
                    .iter()
                    .map(|fragment| {
                        let pair = k.pair::<P::Output>(fragment[2 * half], fragment[2 * half + 1]);
                        k.reinterpret::<P::Output, U32>(pair)
                    })
                    .collect();
                // Where there are fewer than four, some lanes get what they do not store.
                let words: [Reg<U32>; MEMBERS] = core::array::from_fn(|index| words[index.min(words.len() - 1)]);
                let words = k.section("exchange", |k| transpose(k, words, bits));
                let stores = if fragments.len() == MEMBERS {
                    exists[half]
                } else {
                    let has_columns = k.compare(Compare::Lt, consumer.position.member, fragments.len() as u32);
                    k.and(exists[half], has_columns)
                };
                let to = GlobalAddress::from(lane).plus((group * MEMBERS) as i32 * CHUNK_BYTES as i32);
                k.when(stores, |k| k.store(to, &words));
            }
        }
    });
}

/// Transposes four words of four lanes: lane `m` gets word `m` of each, in the order of the lanes. `bits` are those of its
/// index.
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
