//! Mainloop of the Hopper kernel: the KV blocks of a tile, with PV of one block overlapped with the softmax of the next.

use flashcore_ir::builder::Adds;
use flashcore_ir::types::{S32, U32};
use flashcore_ir::{Builder, Compare, Reg};

use super::pv::{BlockKeys, PvStrategy, TileRows};
use super::{Consumer, Cta};
use crate::attention::TileContext;
use crate::attention::block_mask;
use crate::attention::kv_range::KvBlockRange;
use crate::attention::scoring::Scoring;
use crate::config::WarpScheduler;
use crate::primitives::{
    Accumulator, KeyMask, OnlineSoftmax, ROW_STEP, RowScale, ScorePositions, WgmmaA, WgmmaOperand,
};

/// Rows of a lane.
pub(super) const LANE_ROWS: u32 = 2;

/// The loop over the KV blocks of a tile, and its state.
pub(crate) struct Mainloop<'a, P: PvStrategy> {
    pub(crate) consumer: &'a Consumer<P>,
    pub(crate) cta: &'a Cta,
    pub(crate) context: &'a TileContext,
    pub(crate) scoring: Scoring,
    pub(crate) mask: KeyMask,
    pub(super) softmax: OnlineSoftmax,
    /// The row scale of the last block.
    row_scale: RowScale,
    pub(super) scales: P::Scales,
    pub(crate) range: KvBlockRange,
}

/// Kind of a KV block: full, or partial and masked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    Full,
    Partial,
}

impl<'a, P: PvStrategy> Mainloop<'a, P> {
    pub(super) fn new(
        k: &mut Builder,
        consumer: &'a Consumer<P>,
        cta: &'a Cta,
        context: &'a TileContext,
        range: KvBlockRange,
    ) -> Self {
        let positions = k.section("rows", |k| score_positions(k, consumer, context));
        let scoring = Scoring::new(k, context, positions);
        let softmax_scale = scoring.softmax_scale(context);
        let has_window = context.specialization.left || context.specialization.right;
        // Packed rows of several heads are not as far apart as they are in the tile.
        let others = (context.packed.is_some() && has_window).then(|| {
            let row = k.eval(context.first_row + consumer.row + ROW_STEP);
            context.position(k, row)
        });
        let mask = context.key_mask(&scoring.positions, Vec::from_iter(others));
        let softmax = k.section("softmax", |k| {
            OnlineSoftmax::new(k, LANE_ROWS, softmax_scale, cta.config.rescale, cta.config.exponential)
        });
        let rows = TileRows { context, positions: &scoring.positions, softmax_scale, nonempty: range.nonempty };
        let (softmax, scales) = P::load_scales(k, softmax, &rows);
        consumer.output.clear(k);
        let row_scale = RowScale::none(k, LANE_ROWS);
        Self { consumer, cta, context, scoring, mask, softmax, row_scale, scales, range }
    }

    /// Goes through the KV blocks, of which there is at least one.
    pub(crate) fn run(&self, k: &mut Builder) {
        let Self { consumer, cta, range, .. } = self;
        let specialization = cta.specialization;
        let query = k.section("query", |k| {
            consumer.wait_for_query(k, cta);
            let rows = consumer.query_rows(k);
            cta.shared.query.k_major(k, rows)
        });
        let block = match consumer.epilogue.kv_split() {
            Some(split) => split.last_block(k, range),
            None => k.copy(range.last),
        };
        self.first_block(k, &query, block);
        // Partial blocks on the right, full blocks, partial blocks on the left.
        if specialization.right || specialization.mask_mod.is_some() {
            self.blocks_down_to(k, &query, block, range.full_end, Block::Partial);
        }
        self.blocks_down_to(k, &query, block, range.full_begin, Block::Full);
        if specialization.left || specialization.mask_mod.is_some() {
            self.blocks_down_to(k, &query, block, range.first, Block::Partial);
        }
        consumer.release_query(k);
        self.last_pv(k, block);
    }

    /// QK and softmax of the first block.
    fn first_block(&self, k: &mut Builder, query: &WgmmaOperand, block: Reg<S32>) {
        let Self { consumer, softmax, row_scale, .. } = self;
        let first_key = self.range.first_key(k, block);
        k.section("first scores", |k| {
            consumer.keys.consumer_wait(k);
            k.wgmma_fence();
            self.start_qk(k, query);
            consumer.wait_for_store(k);
            k.wgmma_wait(0);
            consumer.keys.consumer_release(k, consumer.leader);
        });
        k.section("first softmax", |k| {
            block_mask::consumer::with_existing_columns(k, self, &consumer.scores, first_key, |k, scores| {
                self.apply_terms(k, scores, first_key);
                self.mask_if_partial(k, scores, block, first_key);
                softmax.update_row_max(k, scores, row_scale);
                softmax.exp_and_sum(k, scores, row_scale);
                consumer.pv.round(k, &self.scales, scores, &self.block_keys(first_key));
            });
        });
        k.section("first values", |k| {
            consumer.values.consumer_wait(k);
            self.zero_values_past_end(k, first_key);
        });
    }

    /// The blocks before `block`, down to `bound`.
    fn blocks_down_to(&self, k: &mut Builder, query: &WgmmaOperand, block: Reg<S32>, bound: Reg<S32>, kind: Block) {
        let splits = self.cta.config.kv_splits() as i32;
        k.while_uniform(
            |k| {
                let next = if splits == 1 { block } else { k.sub(block, splits - 1) };
                k.compare(Compare::Gt, next, bound)
            },
            |k| {
                k.add_to(block, -splits);
                let name = match kind {
                    Block::Full => "full block",
                    Block::Partial => "partial block",
                };
                k.section(name, |k| self.block(k, query, block, kind));
            },
        );
    }

    /// One iteration: QK of a block and PV of the block before, together; then the softmax of the one.
    fn block(&self, k: &mut Builder, query: &WgmmaOperand, block: Reg<S32>, kind: Block) {
        let Self { consumer, cta, softmax, row_scale, scales, .. } = self;
        let Consumer { keys, values, warp_scheduler, scores, pv, output, .. } = consumer;
        keys.consumer_wait(k);
        warp_scheduler.sync(k, WarpScheduler::PingPong);
        k.section("scores", |k| {
            k.wgmma_fence();
            self.start_qk(k, query);
        });
        let stage = k.section("output", |k| {
            if cta.config.overlap_rescale {
                pv.rescale_output(k, softmax, output, row_scale);
            }
            self.start_pv(k)
        });
        warp_scheduler.arrive(k, WarpScheduler::PingPong);
        let first_key = self.range.first_key(k, block);
        k.wgmma_wait(1);
        keys.consumer_release(k, consumer.leader);
        self.apply_terms(k, scores, first_key);
        if kind == Block::Partial {
            self.mask_partial(k, scores, first_key);
        }
        pv.keep_row_scale(k, row_scale);
        softmax.update_row_max(k, scores, row_scale);
        warp_scheduler.sync(k, WarpScheduler::ExclusiveExp);
        softmax.exp_and_sum(k, scores, row_scale);
        let held = values.advance_holding(k);
        // Here and not before PV: a wait for an mbarrier is a loop, across which compilers do not move the end of the product
        // up; without it they do, to before the exponentials.
        values.consumer_wait(k);
        warp_scheduler.arrive(k, WarpScheduler::ExclusiveExp);
        k.wgmma_wait(0);
        pv.finish(k, scales, stage, output, |k| held.consumer_release(k, consumer.leader));
        pv.round(k, scales, scores, &self.block_keys(first_key));
        if !cta.config.overlap_rescale {
            pv.rescale_output(k, softmax, output, row_scale);
        }
    }

    /// PV of the last block.
    fn last_pv(&self, k: &mut Builder, block: Reg<S32>) {
        let Self { consumer, softmax, row_scale, scales, .. } = self;
        let Consumer { values, pv, output, .. } = consumer;
        k.section("last output", |k| {
            self.zero_values_before_window(k, block);
            pv.keep_row_scale(k, row_scale);
            if self.cta.config.overlap_rescale {
                pv.rescale_output(k, softmax, output, row_scale);
            }
            let stage = self.start_pv(k);
            k.wgmma_wait(0);
            pv.finish(k, scales, stage, output, |k| values.consumer_release(k, consumer.leader));
        });
    }

    fn start_qk(&self, k: &mut Builder, query: &WgmmaOperand) {
        let Consumer { keys, scores, pv, .. } = self.consumer;
        let stage = keys.stage_address(k);
        let keys = self.cta.shared.key.k_major(k, stage);
        scores.multiply_async(k, pv.query_key_types(), WgmmaA::Shared(query), &keys, Adds::Replace);
    }

    /// Starts PV of a block; returns the address of its V.
    fn start_pv(&self, k: &mut Builder) -> Reg<U32> {
        let Consumer { values, pv, output, .. } = self.consumer;
        k.wgmma_fence();
        let stage = values.stage_address(k);
        pv.start(k, stage, output);
        stage
    }

    /// The keys of a block, as scales of tokens are found.
    fn block_keys(&self, first_key: Reg<S32>) -> BlockKeys<'_> {
        BlockKeys { positions: &self.scoring.positions, first_key }
    }

    fn apply_terms(&self, k: &mut Builder, scores: &Accumulator, first_key: Reg<S32>) {
        P::scale_scores(k, &self.scales, scores, &self.block_keys(first_key));
        let config = self.cta.config;
        self.scoring.apply_terms(k, self.context, scores, first_key, (config.tile_m(), config.tile_n));
    }

    /// Masks a block that may be partial. Most often no row attends any of its keys from one on, and all attend the others,
    /// for which a `mask_mod` need not be evaluated.
    fn mask_if_partial(&self, k: &mut Builder, scores: &Accumulator, block: Reg<S32>, first_key: Reg<S32>) {
        let is_partial = self.range.is_partial(k, block);
        k.if_uniform(is_partial, |k| {
            k.section("mask", |k| match self.range.is_partial_by_mask_mod(k, block) {
                Some(is_partial) => {
                    self.mask.apply_window(k, scores, first_key, self.cta.config.tile_n);
                    k.if_uniform(is_partial, |k| block_mask::consumer::apply_mask_mod(k, self, scores, first_key));
                }
                None => self.mask.apply(k, scores, first_key),
            });
        });
    }

    /// Masks a partial block.
    fn mask_partial(&self, k: &mut Builder, scores: &Accumulator, first_key: Reg<S32>) {
        k.section("mask", |k| {
            if self.scoring.mask_mod.is_some() {
                self.mask.apply_window(k, scores, first_key, self.cta.config.tile_n);
                block_mask::consumer::apply_mask_mod(k, self, scores, first_key);
            } else {
                self.mask.apply(k, scores, first_key);
            }
        });
    }
}

/// The positions of a lane's scores.
fn score_positions<P: PvStrategy>(k: &mut Builder, consumer: &Consumer<P>, context: &TileContext) -> ScorePositions {
    context.score_positions(k, consumer.position.member, |k, last_row| {
        let first = k.add(context.first_row, consumer.row);
        let position = context.position(k, first);
        let rows = (0..LANE_ROWS).map(|row| k.eval((first + row * ROW_STEP).min(last_row)));
        (rows.collect(), position)
    })
}
