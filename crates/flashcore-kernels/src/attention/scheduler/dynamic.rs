//! Dynamic scheduler: persistent CTAs take the next tile from a counter when they have none.
//!
//! Tiles of sequences of different length differ in their work by more than any order that is dealt out beforehand evens
//! out, and the order in which keys stay in L2, sequence by sequence, is not the one that is most even. So the first tile
//! of a CTA is its own index, and the producer takes every further one from a counter in the workspace, which a
//! preceding kernel sets to zero. It broadcasts the tile to the consumers beside its Q stage, for which they wait anyway, and at the
//! end that there is none.
//!
//! Which CTA computes a tile changes no bit of it.

use flashcore_ir::types::{Pred, U32};
use flashcore_ir::{Builder, Compare, GlobalAddress, Kernel, ReduceOp, Reg, ShuffleMode, SpecialRegister};

use super::{WorkTile, WorkTileInfo};
use crate::parameters::Parameters;
use crate::primitives::{LANES, PipelineState};
use crate::specialization::Specialization;
use flashcore_problem::DType;

/// Bytes of the counter in the workspace.
pub(crate) const COUNTER_BYTES: u64 = 16;
/// Bytes of a slot: first row, head and batch of a tile, in a vector of four words.
const SLOT_BYTES: u32 = 16;
/// In place of the first row: there are no more tiles.
const NO_TILE: u32 = u32::MAX;

/// Writes the kernel that sets the counter to zero, in one thread.
pub(crate) fn reset_kernel(pdl: bool) -> Kernel {
    let mut builder = Builder::new(format!("flashcore_reset_counter{}", if pdl { "_pdl" } else { "" }), LANES);
    let k = &mut builder;
    // Those that every kernel of attention has: element type and dimensions add none.
    let parameters = Parameters::load(k, Specialization::new(DType::F16, 64));
    if pdl {
        // The preceding launch of this plan may still take tiles from it.
        k.section("grid dependency wait", Builder::grid_dependency_wait);
    }
    let thread = k.special(SpecialRegister::ThreadX);
    let is_first = k.compare(Compare::Eq, thread, 0u32);
    let zero = k.copy(0u32);
    k.when(is_first, |k| k.store_one(parameters.workspace, zero));
    builder.finish()
}

/// Takes the next tile: its index is the number of CTAs, which have a first tile each, plus what the counter held.
/// Convergent: every lane of the warp takes part.
pub(super) fn next_unit(k: &mut Builder, parameters: &Parameters, lane: Reg<U32>) -> Reg<U32> {
    k.section("next tile", |k| {
        let (taken, one) = (k.copy(0u32), k.copy(1u32));
        let is_first = k.compare(Compare::Eq, lane, 0u32);
        k.if_then(is_first, |k| {
            let old = k.atomic::<U32, GlobalAddress>(ReduceOp::Add, parameters.workspace, one);
            k.set(taken, old);
        });
        let taken = k.shuffle(ShuffleMode::Index, taken, 0u32);
        let ctas = k.special(SpecialRegister::GridX);
        k.add(taken, ctas)
    })
}

/// The shared memory beside each Q stage.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TileSlots {
    first: u32,
}

impl TileSlots {
    pub(crate) fn reserve(k: &mut Builder, q_stages: u32) -> Self {
        Self { first: k.reserve_shared(q_stages.saturating_mul(SLOT_BYTES), SLOT_BYTES) }
    }

    /// Broadcasts a tile through the Q stage, of which it expects `query_bytes` bytes: returns the stage and its *full*
    /// barrier, and advances. `leader` holds in one lane.
    pub(crate) fn produce(
        self,
        k: &mut Builder,
        query: &PipelineState,
        tile: &WorkTile,
        query_bytes: Reg<U32>,
        leader: Reg<Pred>,
    ) -> [Reg<U32>; 2] {
        let (row, batch) = (tile.coord.first_row, tile.coord.batch);
        self.broadcast(k, query, [row, tile.coord.head, batch], query_bytes, leader)
    }

    /// Broadcasts that there is no further tile.
    pub(crate) fn end(self, k: &mut Builder, query: &PipelineState, leader: Reg<Pred>) {
        let (nothing, zero) = (k.copy(NO_TILE), k.copy(0u32));
        self.broadcast(k, query, [nothing, zero, zero], zero, leader);
    }

    fn broadcast(
        self,
        k: &mut Builder,
        query: &PipelineState,
        [row, head, batch]: [Reg<U32>; 3],
        query_bytes: Reg<U32>,
        leader: Reg<Pred>,
    ) -> [Reg<U32>; 2] {
        k.section("broadcast", |k| {
            query.producer_acquire(k);
            let address = query.indexed(k, self.first, SLOT_BYTES);
            k.when(leader, |k| k.store_shared(address, &[row, head, batch, batch]));
            k.warp_sync();
            query.expect_tx(k, leader, query_bytes);
            let stage = [query.stage_address(k), query.full_barrier(k)];
            query.advance(k);
            stage
        })
    }

    /// Writes `body` for the tiles that are broadcast: waits for the Q stage of each, and reads the slot beside it.
    pub(crate) fn each_tile(
        self,
        k: &mut Builder,
        query: &PipelineState,
        body: impl FnOnce(&mut Builder, WorkTileInfo),
    ) {
        let [first_row, head, batch] = [(); 3].map(|()| k.copy(0u32));
        k.while_uniform(
            |k| {
                k.section("next tile", |k| {
                    query.consumer_wait(k);
                    let address = query.indexed(k, self.first, SLOT_BYTES);
                    let slot = k.load_shared::<U32>(address, 4);
                    for (register, word) in [first_row, head, batch].into_iter().zip(slot) {
                        k.set(register, word);
                    }
                    k.compare(Compare::Ne, first_row, NO_TILE)
                })
            },
            |k| body(k, WorkTileInfo { first_row, head, batch, record: None, extent: None, blocks: None }),
        );
    }
}
