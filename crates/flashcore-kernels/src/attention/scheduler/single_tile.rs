//! Single-tile scheduler: the grid is by tile, head and batch, and nothing needs to be divided.

use flashcore_ir::types::U32;
use flashcore_ir::{Builder, Reg, SpecialRegister};

use super::chunks::{ChunkParameters, SequenceChunks};
use super::{TileChunk, TileScheduler};
use crate::attention::TileContext;

/// The chunk of a CTA: those of a tile are adjacent.
pub(super) fn chunk(k: &mut Builder, context: &TileContext, chunks: ChunkParameters, cta: Reg<U32>) -> TileChunk {
    let index = k.rem(cta, chunks.splits.num_splits);
    let SequenceChunks { first, count } = SequenceChunks::of(k, context, chunks.chunk_keys);
    let begin = k.eval(((first + index) * chunks.chunk_keys).signed());
    let end = k.eval(begin + chunks.chunk_keys.signed());
    TileChunk { splits: chunks.splits, index, count, keys: [begin, end] }
}

/// The tile of a CTA: its index in its head, the head and the batch. All CTAs of a cluster have the same.
pub(super) fn tile(k: &mut Builder, scheduler: &TileScheduler, cta: Reg<U32>) -> [Reg<U32>; 3] {
    let cluster = scheduler.config.cluster;
    let index = match scheduler.chunks {
        Some(chunks) => k.div(cta, chunks.splits.num_splits),
        None if cluster > 1 => k.shr(cta, cluster.ilog2()),
        None => cta,
    };
    // LPT order: the last rows attend most keys.
    let tile = if scheduler.specialization.right { k.eval(scheduler.tiles_per_head - 1 - index) } else { index };
    let [head, batch] = [SpecialRegister::CtaY, SpecialRegister::CtaZ].map(|index| k.special(index));
    [tile, head, batch]
}
