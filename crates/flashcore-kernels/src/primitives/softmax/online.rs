//! Online softmax: weights from scores, block by block, without having seen all scores.
//!
//! Each row keeps `row_max`, the maximum of its scores so far, and `row_sum`, the sum of their weights; the output so far
//! is a sum of values by weights relative to `row_max`. When a block raises it, sum and output are multiplied by
//! `exp(old_max - new_max)`. Exponentials are powers of two with the scale of the scores folded in:
//! `exp(scale * (s - m)) = 2^(s * scale * log2(e) - m * scale * log2(e))`, one multiply-add and one `ex2`.
//!
//! There are two schedules of the same arithmetic. [`OnlineSoftmax::update`] does all of it at once, for kernels whose
//! products have ended. [`update_row_max`](OnlineSoftmax::update_row_max), [`exp_and_sum`](OnlineSoftmax::exp_and_sum)
//! and [`rescale_output`](OnlineSoftmax::rescale_output) are its steps for kernels in which products are under way
//! meanwhile: what needs the scores comes first, what touches the output when the product that adds to it has ended.

use flashcore_ir::types::F32;
use flashcore_ir::{Builder, Compare, Reg, ShuffleMode, VoteMode};

use super::exp2::Exponential;
use crate::primitives::Accumulator;

/// Binary logarithm of how far weights may exceed 1 under [`Rescale::Threshold`].
const THRESHOLD: f32 = 8.0;
/// Binary logarithm of the weight of the row max where weights are rounded to `e4m3`, which has little room below 1.
pub const E4M3_WEIGHT_EXPONENT: f32 = 8.0;
/// Chains of dependent operations in which the scores of a row are gone through: a lane has few rows, and would wait for
/// each result before the next.
const CHAINS: usize = 2;

/// `row_max` and `row_sum` of each of a lane's rows.
#[derive(Debug, Clone)]
pub struct OnlineSoftmax {
    /// `scale * log2(e)`, or none where scores are scaled and in base 2 already.
    scale: Option<Reg<F32>>,
    /// The same of each row, where rows have scales of their own (FP8).
    row_scales: Option<Vec<Reg<F32>>>,
    /// Binary logarithm of the weight of the row max, if that is not 1: `row_sum` and the output are as much larger.
    weight_exponent: Option<f32>,
    /// The maximum of the whole row, the same in the four lanes that share it; with [`Rescale::Threshold`] it may be
    /// stale.
    pub(super) row_max: Vec<Reg<F32>>,
    /// The sum over the columns of this lane.
    pub(super) row_sum: Vec<Reg<F32>>,
    rescale: Rescale,
    exponential: Exponential,
}

/// Condition under which the output is rescaled to a new row max.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rescale {
    /// With each block.
    Always,
    /// When the row max of some row of the warp rose.
    IfChanged,
    /// Lazy rescale with a threshold: when the row max of some row of the warp rose by more than 2^8. Until then the row
    /// max is stale, and exponentials may exceed 1, up to 2^8, which every type has room for.
    Threshold,
}

/// Row scale: what a new row max means for each of a lane's rows.
#[derive(Debug, Clone)]
pub struct RowScale {
    /// Minus the scaled row max: added to the scaled scores.
    shift: Vec<Reg<F32>>,
    /// `exp(old_max - new_max)`: multiplied into earlier weights.
    factors: Vec<Reg<F32>>,
}

impl RowScale {
    /// The factors of earlier weights, by row.
    pub fn factors(&self) -> &[Reg<F32>] {
        &self.factors
    }

    /// The scale of no scores, in `rows` rows of a lane.
    pub fn none(k: &mut Builder, rows: u32) -> Self {
        let mut all = |value: f32| (0..rows).map(|_| k.copy(value)).collect();
        Self { shift: all(0.0), factors: all(1.0) }
    }

    /// Writes `rescale` for a warp that has to: always, or if some factor of some lane is not 1.
    fn when_needed(&self, k: &mut Builder, policy: Rescale, rescale: impl FnOnce(&mut Builder)) {
        match policy {
            Rescale::Always => rescale(k),
            Rescale::IfChanged | Rescale::Threshold => {
                let mut any = k.compare(Compare::Ne, self.factors[0], 1.0f32);
                for factor in &self.factors[1..] {
                    let rose = k.compare(Compare::Ne, *factor, 1.0f32);
                    any = k.or(any, rose);
                }
                let any = k.vote(VoteMode::Any, any);
                k.if_uniform(any, rescale);
            }
        }
    }
}

impl OnlineSoftmax {
    /// The softmax of no scores, in `rows` rows of a lane. `scale` is the softmax scale times `log2(e)`, and positive.
    pub fn new(
        k: &mut Builder,
        rows: u32,
        scale: Option<Reg<F32>>,
        rescale: Rescale,
        exponential: Exponential,
    ) -> Self {
        Self {
            scale,
            row_scales: None,
            weight_exponent: None,
            row_max: (0..rows).map(|_| k.copy(f32::NEG_INFINITY)).collect(),
            row_sum: (0..rows).map(|_| k.copy(0.0f32)).collect(),
            rescale,
            exponential,
        }
    }

    /// The same with weights of `2^exponent` at the row max, for a type that has little room below 1, until
    /// [`end_weight_exponent`](Self::end_weight_exponent); and with the scale of each row, if they have their own.
    #[must_use]
    pub fn with_weight_exponent(self, exponent: f32, row_scales: Option<Vec<Reg<F32>>>) -> Self {
        Self { weight_exponent: Some(exponent), row_scales, ..self }
    }

    /// Divides the row sums by the weight of the row max, and returns what the output is still to be multiplied by.
    pub fn end_weight_exponent(&self, k: &mut Builder) -> f32 {
        let factor = (-self.weight_exponent.unwrap_or(0.0)).exp2();
        for sum in &self.row_sum {
            k.mul_to(*sum, factor);
        }
        factor
    }

    /// Replaces scores by weights, in place, and rescales `output` to the new row max.
    pub fn update(&self, k: &mut Builder, scores: &Accumulator, output: &Accumulator) {
        if self.rescale == Rescale::Threshold {
            let row_scale = RowScale::none(k, self.row_max.len() as u32);
            self.update_row_max(k, scores, &row_scale);
            self.exp_and_sum(k, scores, &row_scale);
            return self.rescale_output(k, output, &row_scale);
        }
        let row_scale = k.section("row max", |k| self.new_row_scale(k, scores));
        k.section("rescale", |k| {
            row_scale.when_needed(k, self.rescale, |k| {
                for (sum, factor) in self.row_sum.iter().zip(&row_scale.factors) {
                    k.mul_to(*sum, *factor);
                }
                output.scale_rows(k, &row_scale.factors);
            });
        });
        k.section("exp and sum", |k| {
            self.weights(k, scores, &row_scale, |k, row, _, weight| k.add_to(self.row_sum[row], weight));
        });
    }

    /// Raises the row max by the scores, one chain for each row.
    fn new_row_scale(&self, k: &mut Builder, scores: &Accumulator) -> RowScale {
        let before: Vec<_> = self.row_max.iter().map(|row_max| k.copy(*row_max)).collect();
        scores.each(|row, _, score| k.max_to(self.row_max[row], score));
        for row_max in &self.row_max {
            reduce_row(k, *row_max, |k, row_max, other| k.max_to(row_max, other));
        }
        let mut row_scale = RowScale { shift: Vec::new(), factors: Vec::new() };
        for (row, (row_max, before)) in self.row_max.iter().zip(before).enumerate() {
            let shift = self.shift(k, row, *row_max);
            let exponent = self.relative(k, row, before, shift);
            row_scale.factors.push(k.exp2(exponent));
            row_scale.shift.push(shift);
        }
        row_scale
    }

    /// Raises the row max by the scores, in two chains for each row, and sets `row_scale`.
    pub fn update_row_max(&self, k: &mut Builder, scores: &Accumulator, row_scale: &RowScale) {
        k.section("row max", |k| {
            let rows = self.row_max.len();
            let mut chains: Vec<[Option<Reg<F32>>; CHAINS]> = vec![[None; CHAINS]; rows];
            scores.each(|row, column, score| match chains[row][column as usize % CHAINS] {
                Some(chain) => k.max_to(chain, score),
                None => chains[row][column as usize % CHAINS] = Some(k.copy(score)),
            });
            for (row, (row_max, chains)) in self.row_max.iter().zip(chains).enumerate() {
                let before = k.copy(*row_max);
                let highest = k.copy(before);
                for chain in chains.into_iter().flatten() {
                    k.max_to(highest, chain);
                }
                reduce_row(k, highest, |k, highest, other| k.max_to(highest, other));
                if self.rescale == Rescale::Threshold {
                    // Where both are minus infinity, the difference is a NaN, and not above the threshold.
                    let rise = k.sub(highest, before);
                    let rise = self.scaled(k, row, rise);
                    let passes = k.compare(Compare::Gt, rise, THRESHOLD);
                    k.set_where(*row_max, passes, highest);
                } else {
                    k.set(*row_max, highest);
                }
                let shift = self.shift(k, row, *row_max);
                let exponent = self.relative(k, row, before, shift);
                k.exp2_to(exponent);
                k.set(row_scale.factors[row], exponent);
                let shift = match self.weight_exponent {
                    Some(weight) => k.add(shift, weight),
                    None => shift,
                };
                k.set(row_scale.shift[row], shift);
            }
        });
    }

    /// Replaces scores by weights, in place, and adds them to the rescaled row sums, in two chains for each row.
    pub fn exp_and_sum(&self, k: &mut Builder, scores: &Accumulator, row_scale: &RowScale) {
        k.section("exp and sum", |k| {
            for (sum, factor) in self.row_sum.iter().zip(&row_scale.factors) {
                k.mul_to(*sum, *factor);
            }
            let mut others: Vec<Option<Reg<F32>>> = vec![None; self.row_sum.len()];
            self.weights(k, scores, row_scale, |k, row, column, weight| {
                match (column as usize % CHAINS, others[row]) {
                    (0, _) => k.add_to(self.row_sum[row], weight),
                    (_, Some(other)) => k.add_to(other, weight),
                    (_, None) => others[row] = Some(k.copy(weight)),
                }
            });
            for (sum, other) in self.row_sum.iter().zip(others) {
                if let Some(other) = other {
                    k.add_to(*sum, other);
                }
            }
        });
    }

    /// Rescales the output to the new row max.
    pub fn rescale_output(&self, k: &mut Builder, output: &Accumulator, row_scale: &RowScale) {
        k.section("rescale", |k| {
            row_scale.when_needed(k, self.rescale, |k| output.scale_rows(k, &row_scale.factors));
        });
    }

    /// The scale of a row.
    fn scale(&self, row: usize) -> Option<Reg<F32>> {
        self.row_scales.as_ref().map_or(self.scale, |scales| Some(scales[row]))
    }

    fn weights(
        &self,
        k: &mut Builder,
        scores: &Accumulator,
        row_scale: &RowScale,
        visit: impl FnMut(&mut Builder, usize, u32, Reg<F32>),
    ) {
        self.exponential.weights(k, scores, |row| self.scale(row), &row_scale.shift, visit);
    }

    /// Minus the scaled row max. A row without a key so far has none; its weights are `2^(-inf - 0) = 0`.
    pub(super) fn shift(&self, k: &mut Builder, row: usize, row_max: Reg<F32>) -> Reg<F32> {
        let none = k.compare(Compare::Eq, row_max, f32::NEG_INFINITY);
        let finite = k.select(none, 0.0f32, row_max);
        let scaled = self.scaled(k, row, finite);
        k.neg(scaled)
    }

    /// An earlier row max, scaled and shifted: exactly 0 if the shift is still its own, so that its factor is 1. In one
    /// step, what rounding took from the shift would be left, and again with every block of keys.
    pub(super) fn relative(&self, k: &mut Builder, row: usize, row_max: Reg<F32>, shift: Reg<F32>) -> Reg<F32> {
        let scaled = self.scaled(k, row, row_max);
        k.add(scaled, shift)
    }

    /// A raw score or row max in base 2.
    pub(super) fn scaled(&self, k: &mut Builder, row: usize, score: Reg<F32>) -> Reg<F32> {
        match self.scale(row) {
            Some(scale) => k.mul(score, scale),
            None => score,
        }
    }
}

/// Reduces `value` over the four lanes that share a row.
pub(crate) fn reduce_row(k: &mut Builder, value: Reg<F32>, reduce: impl Fn(&mut Builder, Reg<F32>, Reg<F32>)) {
    for distance in [1u32, 2] {
        let other = k.shuffle(ShuffleMode::Butterfly, value, distance);
        reduce(k, value, other);
    }
}
