//! The online softmax: weights from scores, tile by tile, without having seen all scores.
//!
//! Each row keeps the maximum `m` of its scores so far and the sum `l` of their weights, and the output so far is a
//! sum of values by weights relative to `m`. When a tile raises the maximum, sum and output are multiplied by
//! `exp(m_old - m_new)`. Exponentials are powers of two with the scale of the scores folded in:
//! `exp(scale * (s - m)) = 2^(s * scale * log2(e) - m * scale * log2(e))`, one multiply-add and one `ex2`.

use core::f32::consts::LN_2;

use flashcore_ir::types::F32;
use flashcore_ir::{Builder, Compare, Reg, ShuffleMode};

use super::fragment::Accumulator;

/// The maximum and the sum of a lane's two rows.
#[derive(Debug, Clone, Copy)]
pub struct OnlineSoftmax {
    /// `scale * log2(e)`.
    scale: Reg<F32>,
    /// The maximum over the whole row, the same in the four lanes that share it.
    maximum: [Reg<F32>; 2],
    /// The sum over the columns of this lane.
    sum: [Reg<F32>; 2],
}

impl OnlineSoftmax {
    /// No scores yet. `scale` is the scale of the scores times `log2(e)`, and positive.
    pub fn new(k: &mut Builder, scale: Reg<F32>) -> Self {
        Self {
            scale,
            maximum: core::array::from_fn(|_| k.copy(f32::NEG_INFINITY)),
            sum: core::array::from_fn(|_| k.copy(0.0f32)),
        }
    }

    /// Turns scores into weights, in place, and brings `output` to the new maximum.
    pub fn update(&self, k: &mut Builder, scores: &Accumulator, output: &Accumulator) {
        let (shift, factors) = k.section("maximum", |k| self.raise_maximum(k, scores));
        k.section("rescale", |k| {
            for (sum, factor) in self.sum.iter().zip(factors) {
                k.mul_to(*sum, factor);
            }
            output.scale_rows(k, factors);
        });
        k.section("weights", |k| {
            scores.each(|row, _, score| {
                k.scale_add_to(score, self.scale, shift[row]);
                k.exp2_to(score);
                k.add_to(self.sum[row], score);
            });
        });
    }

    /// The new maximum; returns what is added to the scaled scores, and what earlier weights are multiplied by.
    fn raise_maximum(&self, k: &mut Builder, scores: &Accumulator) -> ([Reg<F32>; 2], [Reg<F32>; 2]) {
        let before = self.maximum.map(|maximum| k.copy(maximum));
        scores.each(|row, _, score| k.max_to(self.maximum[row], score));
        for maximum in self.maximum {
            over_row(k, maximum, |k, maximum, other| k.max_to(maximum, other));
        }
        let shift = self.maximum.map(|maximum| {
            // A row with no key so far has no maximum; its weights are 2^(-inf - 0) = 0.
            let none = k.compare(Compare::Eq, maximum, f32::NEG_INFINITY);
            let finite = k.select(none, 0.0f32, maximum);
            let scaled = k.mul(finite, self.scale);
            k.neg(scaled)
        });
        let factors = core::array::from_fn(|row| {
            let exponent = k.fma(before[row], self.scale, shift[row]);
            k.exp2(exponent)
        });
        (shift, factors)
    }

    /// Divides `output` by the sums of its rows, and returns what the rows were.
    pub fn finish(&self, k: &mut Builder, output: &Accumulator) -> RowSums {
        for sum in self.sum {
            over_row(k, sum, |k, sum, other| k.add_to(sum, other));
        }
        let empty = self.sum.map(|sum| k.compare(Compare::Eq, sum, 0.0f32));
        let inverse = core::array::from_fn(|row| {
            let inverse = k.reciprocal(self.sum[row]);
            k.select(empty[row], 0.0f32, inverse)
        });
        output.scale_rows(k, inverse);
        RowSums { softmax: *self }
    }
}

/// Combines `value` over the four lanes that share a row.
fn over_row(k: &mut Builder, value: Reg<F32>, combine: impl Fn(&mut Builder, Reg<F32>, Reg<F32>)) {
    for distance in [1u32, 2] {
        let other = k.shuffle(ShuffleMode::Butterfly, value, distance);
        combine(k, value, other);
    }
}

/// The finished sums of a lane's two rows.
#[derive(Debug, Clone, Copy)]
pub struct RowSums {
    softmax: OnlineSoftmax,
}

impl RowSums {
    /// The natural logarithm of the sum of the exponentials of the scaled scores; minus infinity for an empty row.
    pub fn log_sum_exp(&self, k: &mut Builder) -> [Reg<F32>; 2] {
        core::array::from_fn(|row| {
            // In an empty row both terms are minus infinity, and so is their sum.
            let logarithm = k.log2(self.softmax.sum[row]);
            let base_two = k.fma(self.softmax.maximum[row], self.softmax.scale, logarithm);
            k.mul(base_two, LN_2)
        })
    }
}
