//! Consumers: the warpgroups that multiply and compute the softmax, each on 64 rows.

use flashcore_ir::types::{Pred, U32, U64};
use flashcore_ir::{Builder, Reg};

use super::kv_split::KvSplit;
use super::mainloop::Mainloop;
use super::warp_scheduler::WarpSchedulerBarrier;
use super::{Cta, PvStrategy, WARPGROUP, WARPGROUP_ROWS, epilogue};
use crate::attention::block_mask;
use crate::attention::scheduler::WorkTile;
use crate::primitives::{
    Accumulator, FragmentPosition, LANES, MMA_M, MMA_N, PANEL_ROW_BYTES, PipelineState, TmaStoreGuard,
};

/// Computes every tile of the CTA.
pub(super) fn run<P: PvStrategy>(k: &mut Builder, cta: &Cta, thread: Reg<U32>, warpgroup: Reg<U32>) {
    let consumer = Consumer::<P>::new(k, cta, thread, warpgroup);
    if cta.loads_kv_range() {
        cta.grid_dependency_wait(k);
    }
    consumer.warp_scheduler.init(k);
    let row_group = cta.block_mask_group(k, Some(consumer.row_group));
    let work_info = cta.shared.work_info.zip(row_group);
    let read = |k: &mut Builder| work_info.map(|(slots, row_group)| slots.consume(k, &consumer.query, row_group));
    let tile = |k: &mut Builder, tile: &WorkTile| consumer.tile(k, cta, tile);
    match cta.shared.tile_slots {
        Some(slots) => cta.scheduler.each_broadcast(k, slots, &consumer.query, tile),
        None => cta.scheduler.each_tile(k, row_group, read, tile),
    }
    consumer.wait_for_store(k);
    consumer.warp_scheduler.finish(k);
}

/// A consumer warpgroup: its registers, and its state in the pipelines.
pub(crate) struct Consumer<P: PvStrategy> {
    /// The first of the lane's rows in the tile of the CTA; the other is 8 further on.
    pub(super) row: Reg<U32>,
    pub(super) position: FragmentPosition,
    /// Holds in one lane of each warp.
    pub(crate) leader: Reg<Pred>,
    pub(crate) query: PipelineState,
    pub(crate) keys: PipelineState,
    pub(crate) values: PipelineState,
    /// Bytes from the Q tile to the rows of the warpgroup.
    query_offset: Reg<U32>,
    pub(super) row_group: Reg<U32>,
    pub(super) epilogue: Epilogue,
    pub(super) warp_scheduler: WarpSchedulerBarrier,
    pub(super) scores: Accumulator,
    pub(super) pv: P,
    pub(super) output: Accumulator,
}

/// Epilogue of a warpgroup. Named barriers of the first two share ids, so a warpgroup has only one of them.
pub(super) enum Epilogue {
    /// The first split of the same rows merges the others, and stores the rows.
    ReduceSplits(KvSplit),
    /// TMA stores the rows from the stage of their Q.
    TmaStore { map: Reg<U64>, guard: TmaStoreGuard },
    /// Lanes store the rows.
    Store,
}

impl Epilogue {
    pub(super) const fn kv_split(&self) -> Option<&KvSplit> {
        match self {
            Self::ReduceSplits(split) => Some(split),
            Self::TmaStore { .. } | Self::Store => None,
        }
    }
}

impl<P: PvStrategy> Consumer<P> {
    fn new(k: &mut Builder, cta: &Cta, thread: Reg<U32>, warpgroup: Reg<U32>) -> Self {
        let (shared, config) = (&cta.shared, cta.config);
        let lane = k.and(thread, LANES - 1);
        let position = FragmentPosition::new(k, lane);
        let warp = k.shr(thread, LANES.ilog2());
        let kv_split = (config.kv_splits() > 1).then(|| KvSplit::new(k, cta, warp, lane, warpgroup));
        let (warp, row_group) = match &kv_split {
            Some(split) => (split.row_warp, split.row_group),
            // The warps of the producer come first.
            None => (k.sub(warp, WARPGROUP / LANES), warpgroup),
        };
        let row = k.mad(warp, MMA_M, position.group);
        let [keys, values] = [shared.key_pipeline, shared.value_pipeline].map(|pipeline| match &kv_split {
            Some(split) => pipeline.strided_state(k, cta.base, split.split, config.kv_split_warpgroups),
            None => pipeline.state(k, cta.base),
        });
        let value_columns = cta.specialization.value_dim.next_multiple_of(MMA_N);
        Self {
            row,
            position,
            leader: k.elect(),
            query: shared.query_pipeline.state(k, cta.base),
            epilogue: match (kv_split, cta.maps.output) {
                (Some(split), _) => Epilogue::ReduceSplits(split),
                (None, Some(map)) => Epilogue::TmaStore { map, guard: TmaStoreGuard::none(k) },
                (None, None) => Epilogue::Store,
            },
            keys,
            values,
            query_offset: k.mul(row_group, WARPGROUP_ROWS * PANEL_ROW_BYTES),
            row_group,
            warp_scheduler: WarpSchedulerBarrier::new(k, config.warp_scheduler, warpgroup, config.warpgroups),
            scores: k.section("scores", |k| Accumulator::unset(k, config.tile_n)),
            pv: P::new(k, cta),
            output: k.section("output", |k| Accumulator::unset(k, value_columns)),
        }
    }

    /// Computes and stores a tile of query rows.
    fn tile(&self, k: &mut Builder, cta: &Cta, tile: &WorkTile) {
        let range = tile.kv_blocks(k, cta.config);
        let own_range = block_mask::consumer::own_range(k, cta, tile, range);
        cta.grid_dependency_wait(k);
        let mainloop = Mainloop::new(k, self, cta, &tile.context, own_range);
        let attend = |k: &mut Builder| block_mask::consumer::attend(k, &mainloop, &range);
        let skip = |k: &mut Builder| block_mask::consumer::skip_tile(k, self, cta);
        let store = |k: &mut Builder| k.section("epilogue", |k| epilogue::store(k, &mainloop, tile));
        match &self.epilogue {
            Epilogue::ReduceSplits(split) => {
                let is_nonempty = split.is_nonempty(k, &range);
                k.if_uniform(is_nonempty, |k| mainloop.run(k));
                let softmax = &mainloop.softmax;
                k.section("reduce splits", |k| split.reduce_splits(k, cta.config, softmax, &self.output));
                let is_first = split.is_first(k);
                k.if_uniform(is_first, store);
            }
            Epilogue::TmaStore { map, guard } => k.if_else_uniform(
                range.nonempty,
                |k| {
                    attend(k);
                    k.section("epilogue", |k| epilogue::tma_store(k, &mainloop, tile, (*map, *guard)));
                },
                // Without keys there is no Q either, whose stage the output could go through.
                |k| {
                    skip(k);
                    store(k);
                },
            ),
            Epilogue::Store => {
                k.if_else_uniform(range.nonempty, attend, skip);
                store(k);
            }
        }
    }

    /// Waits for Q, unless that was done to read which tile it is of.
    pub(crate) fn wait_for_query(&self, k: &mut Builder, cta: &Cta) {
        if !cta.shared.broadcasts_tiles() {
            self.query.consumer_wait(k);
        }
    }

    /// Releases the Q stage, unless the output goes through it.
    pub(crate) fn release_query(&self, k: &mut Builder) {
        if !matches!(self.epilogue, Epilogue::TmaStore { .. }) {
            k.section("query", |k| self.query.consumer_release(k, self.leader));
        }
    }

    /// Releases the Q stage from which TMA stores the rows of the tile before, when it has read them.
    pub(crate) fn wait_for_store(&self, k: &mut Builder) {
        if let Epilogue::TmaStore { guard, .. } = self.epilogue {
            guard.release(k, self.leader);
        }
    }

    /// The address of the rows of the warpgroup in the Q stage.
    pub(super) fn query_rows(&self, k: &mut Builder) -> Reg<U32> {
        let stage = self.query.stage_address(k);
        k.add(stage, self.query_offset)
    }
}
