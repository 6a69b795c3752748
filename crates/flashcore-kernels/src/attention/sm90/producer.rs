//! Producer: the warp that starts the TMA loads of Q, K and V; the others of its warpgroup transpose V of 8-bit floats.

use flashcore_ir::builder::CachePolicy;
use flashcore_ir::types::{Pred, S32, U32};
use flashcore_ir::{Builder, Compare, Reg};

use super::{Cta, transposer};
use crate::attention::kv_range::KvBlockRange;
use crate::attention::kv_source::{TmaKvSource, TmaPages};
use crate::attention::scheduler::WorkTile;
use crate::primitives::{LANES, PipelineState, SwizzledTile, TensorRows};

/// One warp of the warpgroup is the producer; the others end, or transpose values.
pub(super) fn run(k: &mut Builder, cta: &Cta, thread: Reg<U32>) {
    let is_first = k.eval((thread >> LANES.ilog2()).eq(0));
    let produce = |k: &mut Builder| {
        let producer = Producer::new(k, cta);
        if cta.loads_kv_range() {
            cta.grid_dependency_wait(k);
        }
        let row_group = cta.block_mask_group(k, None);
        cta.scheduler.each_tile(k, row_group, |_| None, |k, tile| producer.load_tile(k, cta, tile));
        if let Some(slots) = cta.shared.tile_slots {
            slots.end(k, &producer.query, producer.leader);
        }
    };
    match &cta.shared.raw_values {
        None => k.if_uniform(is_first, produce),
        Some(raw) => k.if_else_uniform(is_first, produce, |k| {
            k.section("transposer", |k| transposer::run(k, cta, raw, thread));
        }),
    }
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
            values: shared.raw_values.map_or(shared.value_pipeline, |raw| raw.pipeline).state(k, cta.base),
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
        let query_bytes = |k: &mut Builder| k.select(nonempty, cta.shared.query.bytes(), 0u32);
        let query_stage = match (cta.shared.tile_slots, cta.shared.work_info.zip(tile.record)) {
            (Some(slots), _) => {
                let bytes = query_bytes(k);
                Some(slots.produce(k, &self.query, tile, bytes, self.leader))
            }
            (None, Some((work_info, record))) => {
                let bytes = query_bytes(k);
                Some(work_info.produce(k, &self.query, tile, record, bytes, self.leader))
            }
            (None, None) => None,
        };
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
        let row = match tile.context.packed {
            Some(group) => k.div(coord.first_row, group),
            None => coord.first_row,
        };
        let [head, kv_head, batch, row] =
            [coord.head, coord.kv_head, coord.batch, row].map(|index| k.reinterpret::<U32, S32>(index));
        // Every tile of query rows of a head reads its keys and values again; nobody reads its Q again.
        let (evict_last, evict_first) =
            (k.cache_policy(CachePolicy::EvictLast), k.cache_policy(CachePolicy::EvictFirst));
        let source = TmaKvSource::new(k, &tile.context, [kv_head, batch], evict_last);
        let query = TensorRows { map: maps.query, row, head, batch, policy: Some(evict_first) };
        let query = tile.context.sequence.place_rows(k, query);
        // The heads of a group come before its rows in the tensor map.
        let query = if cta.config.pack_gqa { TensorRows { row: query.head, head: query.row, ..query } } else { query };
        k.section("query", |k| match query_stage {
            Some([target, barrier]) => {
                k.section("copy", |k| cta.shared.query.tma_load(k, query, target, barrier, self.leader));
            }
            None => self.load_stage(k, &self.query, cta.shared.query, query),
        });
        let block = k.copy(last);
        let load_keys = |k: &mut Builder, block, page| {
            k.section("keys", |k| {
                let first_key = range.first_key(k, block);
                let rows = source.rows(k, maps.key, first_key);
                self.load_block(k, &self.keys, cta.shared.key, rows, source.pages.zip(page));
            });
        };
        let load_values = |k: &mut Builder, block, page| {
            k.section("values", |k| {
                let first_key = range.first_key(k, block);
                let rows = source.rows(k, maps.value, first_key);
                self.load_block(k, &self.values, cta.shared.value, rows, source.pages.zip(page));
            });
        };
        let look_up = |k: &mut Builder, block| {
            source.pages.map(|pages| {
                let first_key = range.first_key(k, block);
                pages.look_up(k, first_key)
            })
        };
        // The page table is read a block ahead of the keys.
        let page = look_up(k, block).map(|page| k.copy(page));
        let next_page = source.pages.map(|_| k.sub(block, step)).and_then(|next| look_up(k, next));
        let next_page = next_page.map(|page| k.copy(page));
        load_keys(k, block, page);
        k.while_uniform(
            |k| {
                let next = if step == 1 { block } else { k.sub(block, step - 1) };
                k.compare(Compare::Gt, next, range.first)
            },
            |k| {
                let next = k.sub(block, step);
                let after_next = source.pages.map(|_| k.sub(next, step)).and_then(|block| look_up(k, block));
                load_keys(k, next, next_page);
                load_values(k, block, page);
                k.set(block, next);
                if let (Some(page), Some(next_page), Some(after_next)) = (page, next_page, after_next) {
                    k.set(page, next_page);
                    k.set(next_page, after_next);
                }
            },
        );
        load_values(k, block, page);
    }

    /// Fills the next stage of a pipeline with a KV block: box by box where it lies in pages, given that of the lane.
    fn load_block(
        &self,
        k: &mut Builder,
        state: &PipelineState,
        tile: SwizzledTile,
        rows: TensorRows,
        pages: Option<(TmaPages, Reg<U32>)>,
    ) {
        let Some((pages, page)) = pages else {
            return self.load_stage(k, state, tile, rows);
        };
        state.producer_acquire(k);
        state.expect_tx(k, self.leader, tile.bytes());
        let (target, barrier) = (state.stage_address(k), state.full_barrier(k));
        k.section("copy", |k| {
            pages.each_box(k, rows, page, tile.rows, |k, first, rows| {
                tile.tma_load_rows(k, first, rows, target, barrier, self.leader);
            });
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
