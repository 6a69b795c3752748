//! Softmax of the ladder kernel: in shared memory, by two lanes for each row.

use flashcore_ir::types::{F32, S32, U32};
use flashcore_ir::{Builder, Compare, Reg, ShuffleMode};

use super::{ROWS, Tiles, WORD_BYTES, Warp};
use crate::attention::TileContext;
use crate::attention::epilogue::store_lse;
use crate::attention::scalar::modified_score;
use crate::config::{LadderConfig, Product};
use crate::element::Element;
use crate::primitives::{ExpressionCode, LANES, ScoreTerms, lse_log2, normalize_row};
use flashcore_problem::Operand;

/// Lanes that share a row in the softmax.
const LANES_PER_ROW: u32 = LANES / ROWS;

/// The online softmax of the row that a lane shares with its neighbour.
pub(super) struct SharedSoftmax {
    /// The row among those of the warp.
    row: Reg<U32>,
    /// The lane among those of the row.
    member: Reg<U32>,
    query_row: Reg<U32>,
    position: Reg<S32>,
    /// The keys that the row attends.
    first_key: Reg<S32>,
    end_key: Reg<S32>,
    terms: ScoreTerms,
    mask_mod: Option<ExpressionCode>,
    row_max: Reg<F32>,
    /// The sum over this lane's keys.
    row_sum: Reg<F32>,
}

impl SharedSoftmax {
    pub(super) fn new(k: &mut Builder, context: &TileContext, warp: &Warp) -> Self {
        let row = k.shr(warp.lane, LANES_PER_ROW.ilog2());
        let query_row = k.eval(context.first_row + (warp.first_row + row));
        Self {
            row,
            member: k.and(warp.lane, LANES_PER_ROW - 1),
            query_row,
            position: context.position(k, query_row),
            first_key: context.first_key(k, query_row),
            end_key: context.end_key(k, query_row),
            terms: context.score_terms(k, query_row, 1),
            mask_mod: context.mask_mod(k, query_row, 1),
            row_max: k.copy(f32::NEG_INFINITY),
            row_sum: k.copy(0.0f32),
        }
    }

    /// Replaces the scores of a block by weights, and stores the row scale of the output.
    pub(super) fn update<T: Element>(
        &self,
        k: &mut Builder,
        context: &TileContext,
        tiles: &Tiles,
        warp: &Warp,
        config: LadderConfig,
        first_key: Reg<S32>,
    ) {
        let keys = tiles.tile_n / LANES_PER_ROW;
        let first = k.mul(self.member, keys);
        let row = tiles.score_row(k, warp, self.row);
        let scores = k.mad(first, WORD_BYTES, row);
        let before = k.copy(self.row_max);
        k.section("row max", |k| {
            k.for_uniform(0u32, keys, 2u32, |k, index| {
                let address = k.mad(index, WORD_BYTES, scores);
                let products = k.load_shared::<F32>(address, 2);
                let key = k.eval(first_key + (first + index).signed());
                let scores: Vec<_> = (0..)
                    .zip(products)
                    .map(|(next, product)| {
                        let key = k.add(key, next);
                        let score = self.score(k, context, product, key);
                        k.max_to(self.row_max, score);
                        score
                    })
                    .collect();
                k.store_shared(address, &scores);
            });
            let other = k.shuffle(ShuffleMode::Butterfly, self.row_max, 1u32);
            k.max_to(self.row_max, other);
        });
        let none = k.compare(Compare::Eq, self.row_max, f32::NEG_INFINITY);
        let shift = k.select(none, 0.0f32, self.row_max);
        let lost = k.sub(before, shift);
        let factor = k.exp2(lost);
        k.mul_to(self.row_sum, factor);
        self.set_factor(k, tiles, warp, factor);
        k.section("exp and sum", |k| {
            k.for_uniform(0u32, keys, 2u32, |k, index| {
                let address = k.mad(index, WORD_BYTES, scores);
                let weights: Vec<_> = k
                    .load_shared::<F32>(address, 2)
                    .into_iter()
                    .map(|score| {
                        let below = k.sub(score, shift);
                        let weight = k.exp2(below);
                        k.add_to(self.row_sum, weight);
                        weight
                    })
                    .collect();
                match config.output {
                    Product::Scalar => k.store_shared(address, &weights),
                    Product::Tensor => {
                        let column = k.add(first, index);
                        let row = k.add(warp.first_row, self.row);
                        let chunk = k.shr(column, T::LAYOUT.chunk_elements().ilog2());
                        let chunk = tiles.weights.chunk_address(k, warp.shared_base, row, chunk);
                        let within = k.and(column, T::LAYOUT.chunk_elements() - 1);
                        let address = k.mad(within, T::LAYOUT.bytes, chunk);
                        let pair = k.pair::<T>(weights[0], weights[1]);
                        k.store_shared(address, &[pair]);
                    }
                }
            });
        });
    }

    /// The score of a key in base 2; minus infinity where the row does not attend it.
    fn score(&self, k: &mut Builder, context: &TileContext, product: Reg<F32>, key: Reg<S32>) -> Reg<F32> {
        let distance = self.terms.slope.map(|_| {
            let distance = k.sub(self.position, key);
            k.to_f32(distance)
        });
        let bias = self.terms.bias.map(|bias| {
            // Rows and keys past the last read that of the last.
            let row = self.query_row.min(context.end_row - 1).widen().mul_add(bias.row_stride, bias.first);
            let row = k.eval(row);
            let key = key.min(context.key_length - 1).unsigned().widen();
            let address = k.eval(key.mul_add(bias.key_stride, row));
            k.load_one::<F32>(address)
        });
        let score = self.terms.score(k, product, distance, bias);
        let score = modified_score(k, &self.terms, self.mask_mod.as_ref(), score, key);
        k.section("mask", |k| {
            let masked = k.eval(key.lt(self.first_key) | key.ge(self.end_key));
            k.select(masked, f32::NEG_INFINITY, score)
        })
    }

    /// Stores the row scale: one lane of the row does.
    fn set_factor(&self, k: &mut Builder, tiles: &Tiles, warp: &Warp, factor: Reg<F32>) {
        let factors = tiles.factors_of_warp(k, warp);
        let address = k.mad(self.row, WORD_BYTES, factors);
        let first = k.compare(Compare::Eq, self.member, 0u32);
        k.when(first, |k| k.store_shared(address, &[factor]));
    }

    /// Stores one over the row sums, and the LSE.
    pub(super) fn finish(&self, k: &mut Builder, context: &TileContext, tiles: &Tiles, warp: &Warp) {
        let other = k.shuffle(ShuffleMode::Butterfly, self.row_sum, 1u32);
        k.add_to(self.row_sum, other);
        let sink = context.sink(k);
        let form = context.specialization.lse_form;
        let lse_of_keys = (!form.includes_sink).then(|| lse_log2(k, self.row_max, self.row_sum, form.base));
        let (row_max, inverse) = normalize_row(k, self.row_max, self.row_sum, sink);
        self.set_factor(k, tiles, warp, inverse);
        if context.specialization.has(Operand::Lse) {
            let lse = lse_of_keys.unwrap_or_else(|| lse_log2(k, row_max, self.row_sum, form.base));
            let exists = k.compare(Compare::Lt, self.query_row, context.end_row);
            store_lse(k, context, (self.query_row, exists), self.member, lse);
        }
    }
}
