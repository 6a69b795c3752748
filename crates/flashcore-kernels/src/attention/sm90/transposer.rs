//! Transposers: the warps beside the producer that transpose V blocks of 8-bit floats.
//!
//! TMA brings a block as it lies in memory, keys by columns, into a pipeline of its own. Three warps write it transposed to
//! the pipeline that the consumers read, and leave out keys that no row attends, which may hold anything.

use flashcore_ir::types::U32;
use flashcore_ir::{Builder, Compare, Reg, SharedAddress};

use super::{Cta, WARPGROUP};
use crate::attention::kv_range::KvBlockRange;
use crate::attention::scheduler::WorkTile;
use crate::primitives::{CHUNK_BYTES, LANES, PipelineState, SwizzledTile, TileTranspose, TmaPipeline, TransposedRows};
use flashcore_problem::Operand;

/// Warps that transpose: those of the producer's warpgroup but the first, which starts the TMA loads.
pub(super) const TRANSPOSERS: u32 = WARPGROUP / LANES - 1;

/// V in shared memory as TMA brings it, and a chunk of zeros.
#[derive(Debug, Clone, Copy)]
pub(super) struct RawValues {
    pub(super) pipeline: TmaPipeline,
    tile: SwizzledTile,
    transposed: SwizzledTile,
    zeros: u32,
}

impl RawValues {
    pub(super) fn new(pipeline: TmaPipeline, tile: SwizzledTile, transposed: SwizzledTile, zeros: u32) -> Self {
        Self { pipeline, tile, transposed, zeros }
    }

    pub(super) const fn transposed(&self) -> SwizzledTile {
        self.transposed
    }

    /// Writes the zeros. One thread does it.
    pub(super) fn init(&self, k: &mut Builder, base: Reg<U32>) {
        let zero = k.copy(0u32);
        k.store_shared(SharedAddress::from(base).plus(self.zeros as i32), &[zero; (CHUNK_BYTES / 4) as usize]);
    }
}

/// Transposes the V blocks of every tile of the CTA.
pub(super) fn run(k: &mut Builder, cta: &Cta, raw: &RawValues, thread: Reg<U32>) {
    let (lane, warp) = (k.and(thread, LANES - 1), k.eval((thread >> LANES.ilog2()) - 1));
    let transposer = Transposer {
        transpose: TileTranspose::new(k, (raw.tile, raw.transposed), lane, (warp, TRANSPOSERS)),
        leader: k.elect(),
        raw: raw.pipeline.state(k, cta.base),
        values: cta.shared.value_pipeline.state(k, cta.base),
        zeros: k.add(cta.base, raw.zeros),
    };
    if cta.loads_kv_range() {
        cta.grid_dependency_wait(k);
    }
    let row_group = cta.block_mask_group(k, None);
    cta.scheduler.each_tile(k, row_group, |_| None, |k, tile| transposer.tile(k, cta, tile));
}

struct Transposer {
    transpose: TileTranspose,
    /// Holds in one lane of the warp.
    leader: Reg<flashcore_ir::types::Pred>,
    raw: PipelineState,
    values: PipelineState,
    zeros: Reg<U32>,
}

impl Transposer {
    /// Transposes the V blocks of a tile, from the last to the first.
    fn tile(&self, k: &mut Builder, cta: &Cta, tile: &WorkTile) {
        let range = tile.kv_blocks(k, cta.config);
        // Of a cluster, each CTA has every `cluster`-th block down from its own last.
        let (step, last, nonempty) = if cta.config.cluster > 1 {
            let rank = k.cluster_rank();
            let last = k.eval(range.last - rank.signed());
            (cta.config.cluster as i32, last, k.eval(last.ge(range.first) & range.nonempty))
        } else {
            (1, range.last, range.nonempty)
        };
        k.if_uniform(nonempty, |k| {
            let block = k.copy(last);
            k.while_uniform(
                |k| k.compare(Compare::Ge, block, range.first),
                |k| {
                    let rows = self.attended_rows(k, tile, &range, block);
                    self.raw.consumer_wait(k);
                    self.values.producer_acquire(k);
                    let (source, target) = (self.raw.stage_address(k), self.values.stage_address(k));
                    k.section("transpose", |k| self.transpose.run(k, source, target, rows));
                    self.raw.consumer_release(k, self.leader);
                    self.values.producer_commit(k, self.leader);
                    k.add_to(block, -step);
                },
            );
        });
    }

    /// The rows of a block that some row of the sequence attends, where others are in the tensor that nobody does.
    fn attended_rows(
        &self,
        k: &mut Builder,
        tile: &WorkTile,
        range: &KvBlockRange,
        block: Reg<flashcore_ir::types::S32>,
    ) -> Option<TransposedRows> {
        let specialization = tile.context.specialization;
        let has_lengths = specialization.has(Operand::SequsedK) || specialization.is_ragged();
        (specialization.left || has_lengths).then(|| {
            let first_key = range.first_key(k, block);
            let first_row = k.copy(0u32);
            let begin = tile.context.first_key(k, first_row);
            let (begin, end) = (k.sub(begin, first_key), k.sub(tile.context.key_length, first_key));
            TransposedRows { begin, end, zeros: self.zeros }
        })
    }
}
