//! Epilogue of the Ampere kernel: the division by the row sum, the LSE, and the output through shared memory.

use flashcore_ir::types::{F16x2, Pred, U32};
use flashcore_ir::{Builder, Compare, GlobalAddress, Reg, SharedAddress, SpecialRegister};

use super::element::TensorElement;
use super::{Split, Tiles, Warp};
use crate::attention::TileContext;
use crate::attention::epilogue::store_lse;
use crate::attention::split_kv::partial::store_partials;
use crate::primitives::{Accumulator, CHUNK_BYTES, HALF_BYTES, LANES, MMA_M, OnlineSoftmax};
use flashcore_problem::Operand;

/// Stores the warp's rows: a partial result where keys are split among CTAs, else the output and the LSE.
pub(super) fn store<T: TensorElement>(
    k: &mut Builder,
    context: &TileContext,
    warp: &Warp,
    tiles: &Tiles,
    splits: Option<Split>,
    softmax: &OnlineSoftmax,
    output: &Accumulator,
) {
    match splits {
        Some(Split::Cta(splits)) => {
            let cta = k.special(SpecialRegister::CtaX);
            let split = k.rem(cta, splits.num_splits);
            let rows = rows(k, context, warp);
            store_partials(k, context, (&rows, warp.position.member, T::COLUMNS), (splits, split), softmax, output);
        }
        Some(Split::Cluster { merge, .. }) => {
            let rows: Vec<_> = (0..2 * warp.m_tiles).map(|index| warp.tile_row(k, index)).collect();
            merge.store_partials(k, (&rows, warp.position.member, T::COLUMNS), softmax, output);
        }
        Some(Split::Chunk { splits, index, count, .. }) => {
            let is_partial = k.compare(Compare::Gt, count, 1u32);
            k.if_else_uniform(
                is_partial,
                |k| {
                    let rows = rows(k, context, warp);
                    store_partials(
                        k,
                        context,
                        (&rows, warp.position.member, T::COLUMNS),
                        (splits, index),
                        softmax,
                        output,
                    );
                },
                |k| store_rows::<T>(k, context, warp, tiles, softmax, output),
            );
        }
        None => store_rows::<T>(k, context, warp, tiles, softmax, output),
    }
}

/// The rows of a lane.
fn rows(k: &mut Builder, context: &TileContext, warp: &Warp) -> Vec<Reg<U32>> {
    (0..2 * warp.m_tiles).map(|index| warp.row(k, context, index)).collect()
}

/// Stores output and LSE of rows that have all their keys.
fn store_rows<T: TensorElement>(
    k: &mut Builder,
    context: &TileContext,
    warp: &Warp,
    tiles: &Tiles,
    softmax: &OnlineSoftmax,
    output: &Accumulator,
) {
    let sink = context.sink(k);
    let stats = softmax.finish(k, output, sink, context.specialization.lse_form);
    if context.specialization.has(Operand::Lse) {
        for (index, value) in (0..).zip(stats.lse(k)) {
            let row = warp.row(k, context, index);
            let exists = k.compare(Compare::Lt, row, context.end_row);
            store_lse(k, context, (row, exists), warp.position.member, value);
        }
    }
    store_output::<T>(k, context, warp, tiles, output);
}

/// Stores the warp's rows: through shared memory, so that lanes store 16 bytes beside each other.
fn store_output<T: TensorElement>(
    k: &mut Builder,
    context: &TileContext,
    warp: &Warp,
    tiles: &Tiles,
    output: &Accumulator,
) {
    // The rows of this warp are its own, so that only its lanes wait for each other.
    k.warp_sync();
    k.section("stage output", |k| {
        let Warp { shared_base, first_row, position, .. } = *warp;
        tiles.output.write_rows::<T::Stored>(k, (output, T::COLUMNS), shared_base, first_row, position);
    });
    k.warp_sync();
    k.section("store output", |k| copy_output(k, context, warp, tiles));
}

/// Copies the warp's rows from shared memory to the output.
fn copy_output(k: &mut Builder, context: &TileContext, warp: &Warp, tiles: &Tiles) {
    let tile = tiles.output;
    let rows = context.output(k);
    let chunks = tile.panel_chunks();
    let rows_per_step = LANES / chunks;
    let lane_row = k.shr(warp.lane, chunks.ilog2());
    let chunk = k.and(warp.lane, chunks - 1);
    let row = k.add(warp.first_row, lane_row);
    for step in 0..warp.m_tiles * MMA_M / rows_per_step {
        let row = k.add(row, step * rows_per_step);
        let source = tile.chunk_address(k, warp.shared_base, row, chunk);
        let row_start = rows.row(k, row);
        let target = k.mad_wide(chunk, CHUNK_BYTES, row_start);
        let exists = k.eval((context.first_row + row).lt(context.end_row));
        for first in (0..rows.columns).step_by(tile.panel_columns() as usize) {
            let panel = first / tile.panel_columns();
            let existing_chunks = (rows.columns - first) / tile.element.chunk_elements();
            let (exists, source) = if existing_chunks < chunks {
                // Lanes without a chunk read that of another.
                let has_chunk = k.compare(Compare::Lt, chunk, existing_chunks);
                let nearest = k.min(chunk, existing_chunks - 1);
                (k.and(has_chunk, exists), tile.chunk_address(k, warp.shared_base, row, nearest))
            } else {
                (exists, source)
            };
            let from = SharedAddress::from(source).plus(tile.panel_step(panel) as i32);
            let to = GlobalAddress::from(target).plus((first * tile.element.bytes) as i32);
            let words = k.load_shared::<U32>(from, 4);
            store_chunk(k, to, &words, rows.vec_bytes, exists);
        }
    }
}

/// Stores words beside each other, `vec_bytes` at a time, where they exist.
pub(crate) fn store_chunk(k: &mut Builder, to: GlobalAddress, words: &[Reg<U32>], vec_bytes: u32, exists: Reg<Pred>) {
    if vec_bytes == HALF_BYTES {
        for (index, word) in words.iter().enumerate() {
            let pair = k.reinterpret::<U32, F16x2>(*word);
            let (low, high) = k.unpack(pair);
            let to = to.plus((index as u32 * 2 * HALF_BYTES) as i32);
            k.when(exists, |k| {
                k.store_one(to, low);
                k.store_one(to.plus(HALF_BYTES as i32), high);
            });
        }
        return;
    }
    k.when(exists, |k| {
        for (index, words) in words.chunks_exact((vec_bytes / 4) as usize).enumerate() {
            k.store(to.plus((index as u32 * vec_bytes) as i32), words);
        }
    });
}
