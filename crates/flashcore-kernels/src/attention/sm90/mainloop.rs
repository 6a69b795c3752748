//! Mainloop of the Hopper kernel: the KV blocks of a tile, with PV of one block overlapped with the softmax of the next.

use flashcore_ir::types::{S32, U32};
use flashcore_ir::{Builder, Compare, Reg};

use super::consumer::Weights;
use super::fp8::{BlockKeys, Fp8Scales, WEIGHT_EXPONENT};
use super::{Consumer, Cta};
use crate::attention::TileContext;
use crate::attention::block_mask;
use crate::attention::kv_range::KvBlockRange;
use crate::attention::scoring::Scoring;
use crate::config::WarpScheduler;
use crate::element::{Element, ElementLayout};
use crate::primitives::{Accumulator, KeyMask, OnlineSoftmax, ROW_STEP, RowScale, ScorePositions, WgmmaOperand};
use flashcore_problem::Operand;

/// Rows of a lane.
pub(super) const LANE_ROWS: u32 = 2;

/// State of the loop over the KV blocks of a tile.
pub(crate) struct Mainloop<'a> {
    pub(crate) cta: &'a Cta,
    pub(crate) context: &'a TileContext,
    pub(crate) scoring: Scoring,
    pub(crate) mask: KeyMask,
    pub(super) softmax: OnlineSoftmax,
    /// The row scale of the last block.
    row_scale: RowScale,
    /// Scales of 8-bit floats.
    pub(super) fp8_scales: Option<Fp8Scales>,
    pub(crate) range: KvBlockRange,
}

/// Kind of a KV block: full, or partial and masked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    Full,
    Partial,
}

impl<'a> Mainloop<'a> {
    pub(super) fn new<T: Element>(
        k: &mut Builder,
        consumer: &Consumer<T>,
        cta: &'a Cta,
        context: &'a TileContext,
        range: KvBlockRange,
    ) -> Self {
        let positions = k.section("rows", |k| score_positions(k, consumer, context));
        let scoring = Scoring::new(k, context, positions);
        let scale = scoring.softmax_scale(context);
        let has_window = context.specialization.left || context.specialization.right;
        // Packed rows of several heads are not as far apart as they are in the tile.
        let others = (context.packed.is_some() && has_window).then(|| {
            let row = k.eval(context.first_row + consumer.row + ROW_STEP);
            context.position(k, row)
        });
        let mask = context.key_mask(&scoring.positions, Vec::from_iter(others));
        let softmax = k.section("softmax", |k| {
            OnlineSoftmax::new(k, LANE_ROWS, scale, cta.config.rescale, cta.config.exponential)
        });
        let (softmax, fp8_scales) = if cta.specialization.has_fp8_query() {
            let (scales, row_scales) =
                k.section("scales", |k| Fp8Scales::new(k, context, &scoring.positions, scale, range.nonempty));
            (softmax.with_weight_exponent(WEIGHT_EXPONENT, row_scales), Some(scales))
        } else {
            (softmax, None)
        };
        consumer.output.clear(k);
        let row_scale = RowScale::none(k, LANE_ROWS);
        Self { cta, context, scoring, mask, softmax, row_scale, fp8_scales, range }
    }

    /// The keys of a block, as scales of tokens are found.
    fn block_keys(&self, first_key: Reg<S32>) -> BlockKeys<'_> {
        BlockKeys { positions: &self.scoring.positions, first_key }
    }

    fn apply_terms(&self, k: &mut Builder, scores: &Accumulator, first_key: Reg<S32>) {
        if let Some(scales) = &self.fp8_scales {
            scales.apply(k, scores, &self.block_keys(first_key));
        }
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

impl<T: Element> Consumer<T> {
    /// Goes through the KV blocks, of which there is at least one.
    pub(crate) fn attend(&self, k: &mut Builder, mainloop: &Mainloop<'_>) {
        let (cta, range) = (mainloop.cta, &mainloop.range);
        let specialization = cta.specialization;
        let query = k.section("query", |k| {
            self.wait_for_query(k, cta);
            let rows = self.query_rows(k);
            cta.shared.query.k_major(k, rows)
        });
        let block = match self.epilogue.kv_split() {
            Some(split) => split.last_block(k, range),
            None => k.copy(range.last),
        };
        self.first_block(k, mainloop, &query, block);
        // Partial blocks on the right, full blocks, partial blocks on the left.
        if specialization.right || specialization.mask_mod.is_some() {
            self.blocks_down_to(k, mainloop, &query, block, range.full_end, Block::Partial);
        }
        self.blocks_down_to(k, mainloop, &query, block, range.full_begin, Block::Full);
        if specialization.left || specialization.mask_mod.is_some() {
            self.blocks_down_to(k, mainloop, &query, block, range.first, Block::Partial);
        }
        self.release_query(k);
        self.last_pv(k, mainloop, block);
    }

    /// QK and softmax of the first block.
    fn first_block(&self, k: &mut Builder, mainloop: &Mainloop<'_>, query: &WgmmaOperand, block: Reg<S32>) {
        let cta = mainloop.cta;
        let first_key = mainloop.range.first_key(k, block);
        k.section("first scores", |k| {
            self.keys.consumer_wait(k);
            k.wgmma_fence();
            self.start_qk(k, cta, query);
            self.wait_for_store(k);
            k.wgmma_wait(0);
            self.keys.consumer_release(k, self.leader);
        });
        k.section("first softmax", |k| {
            block_mask::consumer::with_existing_columns(k, mainloop, &self.scores, first_key, |k, scores| {
                mainloop.apply_terms(k, scores, first_key);
                mainloop.mask_if_partial(k, scores, block, first_key);
                mainloop.softmax.update_row_max(k, scores, &mainloop.row_scale);
                mainloop.softmax.exp_and_sum(k, scores, &mainloop.row_scale);
                self.round(k, mainloop, scores, first_key);
            });
        });
        k.section("first values", |k| {
            self.values.consumer_wait(k);
            let has_lengths = cta.specialization.has(Operand::SequsedK) || cta.specialization.is_ragged();
            if has_lengths && cta.shared.raw_values.is_none() {
                self.zero_values_past_end(k, mainloop, first_key);
            }
        });
    }

    /// The blocks before `block`, down to `bound`.
    fn blocks_down_to(
        &self,
        k: &mut Builder,
        mainloop: &Mainloop<'_>,
        query: &WgmmaOperand,
        block: Reg<S32>,
        bound: Reg<S32>,
        kind: Block,
    ) {
        let splits = mainloop.cta.config.kv_splits() as i32;
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
                k.section(name, |k| self.block(k, mainloop, query, block, kind));
            },
        );
    }

    /// One iteration: QK of a block and PV of the block before, together; then the softmax of the one.
    fn block(&self, k: &mut Builder, mainloop: &Mainloop<'_>, query: &WgmmaOperand, block: Reg<S32>, kind: Block) {
        let Mainloop { cta, softmax, row_scale, .. } = mainloop;
        self.keys.consumer_wait(k);
        self.warp_scheduler.sync(k, WarpScheduler::PingPong);
        k.section("scores", |k| {
            k.wgmma_fence();
            self.start_qk(k, cta, query);
        });
        let stage = k.section("output", |k| {
            if cta.config.overlap_rescale && self.p.two_levels().is_none() {
                softmax.rescale_output(k, &self.output, row_scale);
            }
            k.wgmma_fence();
            self.start_pv(k, cta)
        });
        self.warp_scheduler.arrive(k, WarpScheduler::PingPong);
        let first_key = mainloop.range.first_key(k, block);
        k.wgmma_wait(1);
        self.keys.consumer_release(k, self.leader);
        mainloop.apply_terms(k, &self.scores, first_key);
        if kind == Block::Partial {
            mainloop.mask_partial(k, &self.scores, first_key);
        }
        if let Some(weights) = self.p.two_levels() {
            weights.hold_factors(k, row_scale);
        }
        softmax.update_row_max(k, &self.scores, row_scale);
        self.warp_scheduler.sync(k, WarpScheduler::ExclusiveExp);
        softmax.exp_and_sum(k, &self.scores, row_scale);
        let held = self.values.advance_holding(k);
        // Here and not before PV: a wait for an mbarrier is a loop, across which compilers do not move the end of the product
        // up; without it they do, to before the exponentials.
        self.values.consumer_wait(k);
        self.warp_scheduler.arrive(k, WarpScheduler::ExclusiveExp);
        k.wgmma_wait(0);
        self.promote_but_last(k, mainloop, stage);
        held.consumer_release(k, self.leader);
        self.promote_last(k, mainloop);
        self.round(k, mainloop, &self.scores, first_key);
        if !cta.config.overlap_rescale && self.p.two_levels().is_none() {
            softmax.rescale_output(k, &self.output, row_scale);
        }
    }

    /// PV of the last block.
    fn last_pv(&self, k: &mut Builder, mainloop: &Mainloop<'_>, block: Reg<S32>) {
        k.section("last output", |k| {
            if mainloop.cta.specialization.left && mainloop.cta.shared.raw_values.is_none() {
                let first_key = mainloop.range.first_key(k, block);
                self.zero_values_before_window(k, mainloop, first_key);
            }
            if let Some(weights) = self.p.two_levels() {
                weights.hold_factors(k, &mainloop.row_scale);
            } else if mainloop.cta.config.overlap_rescale {
                mainloop.softmax.rescale_output(k, &self.output, &mainloop.row_scale);
            }
            k.wgmma_fence();
            let stage = self.start_pv(k, mainloop.cta);
            k.wgmma_wait(0);
            self.promote_but_last(k, mainloop, stage);
            self.values.consumer_release(k, self.leader);
            self.promote_last(k, mainloop);
        });
    }

    /// Rounds the weights of a block to P.
    fn round(&self, k: &mut Builder, mainloop: &Mainloop<'_>, weights: &Accumulator, first_key: Reg<S32>) {
        match (&self.p, &mainloop.fp8_scales) {
            (Weights::Fp8(p), Some(scales)) => p.round(k, scales, weights, &mainloop.block_keys(first_key)),
            (Weights::Pairs(p), _) => p.round(k, weights),
            (Weights::Fp8(_), None) => {}
        }
    }

    /// Where P · V of a block has an accumulator of its own: adds its slices to the output, the first of which has ended, and
    /// ends the last, which is still to be added. V is read no more then.
    fn promote_but_last(&self, k: &mut Builder, mainloop: &Mainloop<'_>, stage: Reg<U32>) {
        if let (Some(weights), Some(scales)) = (self.p.two_levels(), &mainloop.fp8_scales) {
            weights.promote_but_last(k, scales, &self.output, (&mainloop.cta.shared, stage));
        }
    }

    /// Adds the last slice of P · V of a block to the output, where it has an accumulator of its own.
    fn promote_last(&self, k: &mut Builder, mainloop: &Mainloop<'_>) {
        if let (Some(weights), Some(scales)) = (self.p.two_levels(), &mainloop.fp8_scales) {
            weights.promote_last(k, scales, &self.output);
        }
    }

    fn start_qk(&self, k: &mut Builder, cta: &Cta, query: &WgmmaOperand) {
        let stage = self.keys.stage_address(k);
        let keys = cta.shared.key.k_major(k, stage);
        let depth = ElementLayout::of(cta.specialization.dtype).padded_columns(cta.specialization.head_dim);
        match &self.p {
            Weights::Pairs(_) => self.scores.start_qk::<T>(k, query, &keys, depth),
            Weights::Fp8(weights) => weights.start_qk(k, &self.scores, (query, &keys), depth),
        }
    }

    /// Starts PV of a block; returns the address of its V.
    fn start_pv(&self, k: &mut Builder, cta: &Cta) -> Reg<U32> {
        let stage = self.values.stage_address(k);
        match &self.p {
            Weights::Pairs(p) => {
                let values = cta.shared.value.mn_major(k, stage);
                self.output.start_pv(k, p, &values);
            }
            Weights::Fp8(weights) => weights.start_pv(k, &cta.shared, stage, &self.output),
        }
        stage
    }
}

/// The positions of a lane's scores.
fn score_positions<T: Element>(k: &mut Builder, consumer: &Consumer<T>, context: &TileContext) -> ScorePositions {
    context.score_positions(k, consumer.position.member, |k, last_row| {
        let first = k.add(context.first_row, consumer.row);
        let position = context.position(k, first);
        let rows = (0..LANE_ROWS).map(|row| k.eval((first + row * ROW_STEP).min(last_row)));
        (rows.collect(), position)
    })
}
