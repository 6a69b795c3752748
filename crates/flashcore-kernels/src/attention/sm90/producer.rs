//! Producer: the warp that starts the TMA loads of Q, K and V.

use flashcore_ir::builder::CachePolicy;
use flashcore_ir::types::{Pred, S32, U32};
use flashcore_ir::{Builder, Compare, Reg};

use super::Cta;
use crate::attention::kv_range::KvBlockRange;
use crate::attention::kv_source::{PageBoxes, TmaKvSource};
use crate::attention::scheduler::WorkTile;
use crate::primitives::{LANES, PipelineState, SwizzledTile, TensorRows};

/// One warp of the warpgroup is the producer; the others end.
pub(super) fn run(k: &mut Builder, cta: &Cta, thread: Reg<U32>) {
    let is_first = k.eval((thread >> LANES.ilog2()).eq(0));
    k.if_uniform(is_first, |k| {
        let producer = Producer::new(k, cta);
        if cta.loads_kv_range() {
            cta.grid_dependency_wait(k);
        }
        let row_group = cta.block_mask_group(k, None);
        cta.scheduler.each_tile(k, row_group, |_| None, |k, tile| producer.load_tile(k, cta, tile));
    });
}

struct Producer {
    /// Holds in the lane that starts TMA loads.
    leader: Reg<Pred>,
    query: PipelineState,
    keys: PipelineState,
    values: PipelineState,
}

impl Producer {
    fn new(k: &mut Builder, cta: &Cta) -> Self {
        let shared = &cta.shared;
        Self {
            leader: k.elect(),
            query: shared.query_pipeline.state(k, cta.base),
            keys: shared.key_pipeline.state(k, cta.base),
            values: shared.value_pipeline.state(k, cta.base),
        }
    }

    fn load_tile(&self, k: &mut Builder, cta: &Cta, tile: &WorkTile) {
        let range = tile.kv_blocks(k, cta.config);
        cta.grid_dependency_wait(k);
        // Of a cluster, each CTA has every `cluster`-th block down from its own last.
        let (last, nonempty) = if cta.config.cluster > 1 {
            let rank = k.cluster_rank();
            let last = k.eval(range.last - rank.signed());
            (last, k.eval(last.ge(range.first) & range.nonempty))
        } else {
            (range.last, range.nonempty)
        };
        let query_stage = cta.shared.work_info.zip(tile.record).map(|(work_info, record)| {
            let query_bytes = k.select(nonempty, cta.shared.query.bytes(), 0u32);
            work_info.produce(k, &self.query, tile, record, query_bytes, self.leader)
        });
        k.if_uniform(nonempty, |k| self.load_blocks(k, cta, tile, range, last, query_stage));
    }

    /// Starts the loads of Q and of the KV blocks down from `last`, in the order in which they are needed: the values of a
    /// block after the keys of the next. `query_stage` is the Q stage and its *full* barrier, where work-tile info has been
    /// produced through it already.
    fn load_blocks(
        &self,
        k: &mut Builder,
        cta: &Cta,
        tile: &WorkTile,
        range: KvBlockRange,
        last: Reg<S32>,
        query_stage: Option<[Reg<U32>; 2]>,
    ) {
        let (step, maps, coord) = (cta.config.cluster as i32, cta.maps, tile.coord);
        let [head, kv_head, batch, row] =
            [coord.head, coord.kv_head, coord.batch, coord.first_row].map(|index| k.reinterpret::<U32, S32>(index));
        // Every tile of query rows of a head reads its keys and values again; nobody reads its Q again.
        let (evict_last, evict_first) =
            (k.cache_policy(CachePolicy::EvictLast), k.cache_policy(CachePolicy::EvictFirst));
        let source = TmaKvSource::new(k, &tile.context, [kv_head, batch], evict_last);
        let query = TensorRows { map: maps.query, row, head, batch, policy: Some(evict_first) };
        let query = tile.context.sequence.place_rows(k, query);
        k.section("query", |k| match query_stage {
            Some([target, barrier]) => {
                k.section("copy", |k| cta.shared.query.tma_load(k, query, target, barrier, self.leader));
            }
            None => self.load_stage(k, &self.query, cta.shared.query, query),
        });
        let block = k.copy(last);
        let page_box = cta.specialization.page_box;
        let load_keys = |k: &mut Builder, block, boxes: Option<PageBoxes>| {
            k.section("keys", |k| {
                let first_key = range.first_key(k, block);
                let rows = source.rows(k, maps.key, first_key);
                self.load_block(k, &self.keys, cta.shared.key, rows, boxes.map(|boxes| (boxes, page_box)));
            });
        };
        let load_values = |k: &mut Builder, block, boxes: Option<PageBoxes>| {
            k.section("values", |k| {
                let first_key = range.first_key(k, block);
                let rows = source.rows(k, maps.value, first_key);
                self.load_block(k, &self.values, cta.shared.value, rows, boxes.map(|boxes| (boxes, page_box)));
            });
        };
        // The page table is read a block ahead of the keys.
        let boxes_before = |k: &mut Builder, block: Reg<S32>| {
            source.is_paged().then(|| k.sub(block, step)).and_then(|block| {
                let first_key = range.first_key(k, block);
                source.boxes(k, first_key)
            })
        };
        let boxes = source.is_paged().then(|| range.first_key(k, block)).and_then(|key| source.boxes(k, key));
        let boxes = boxes.map(|boxes| boxes.copied(k));
        let next_boxes = boxes_before(k, block).map(|boxes| boxes.copied(k));
        load_keys(k, block, boxes);
        k.while_uniform(
            |k| {
                let next = if step == 1 { block } else { k.sub(block, step - 1) };
                k.compare(Compare::Gt, next, range.first)
            },
            |k| {
                let next = k.sub(block, step);
                let boxes_after_next = boxes_before(k, next);
                load_keys(k, next, next_boxes);
                load_values(k, block, boxes);
                k.set(block, next);
                if let (Some(boxes), Some(next), Some(after_next)) = (boxes, next_boxes, boxes_after_next) {
                    boxes.set(k, next);
                    next.set(k, after_next);
                }
            },
        );
        load_values(k, block, boxes);
    }

    /// Fills the next stage of a pipeline with a KV block: by boxes of so many rows, where it lies in pages.
    fn load_block(
        &self,
        k: &mut Builder,
        state: &PipelineState,
        tile: SwizzledTile,
        rows: TensorRows,
        pages: Option<(PageBoxes, u32)>,
    ) {
        let Some((boxes, box_rows)) = pages else {
            return self.load_stage(k, state, tile, rows);
        };
        state.producer_acquire(k);
        state.expect_tx(k, self.leader, tile.bytes());
        let (target, barrier) = (state.stage_address(k), state.full_barrier(k));
        k.section("copy", |k| {
            for (number, first) in (0..tile.rows).step_by(box_rows as usize).enumerate() {
                let rows = boxes.rows(k, number as u32, rows);
                tile.tma_load_rows(k, first, rows, target, barrier, self.leader);
            }
        });
        state.advance(k);
    }

    /// Fills the next stage of a pipeline.
    fn load_stage(&self, k: &mut Builder, state: &PipelineState, tile: SwizzledTile, rows: TensorRows) {
        state.producer_acquire(k);
        state.expect_tx(k, self.leader, tile.bytes());
        let (target, barrier) = (state.stage_address(k), state.full_barrier(k));
        k.section("copy", |k| tile.tma_load(k, rows, target, barrier, self.leader));
        state.advance(k);
    }
}
