//! The online softmax step by step, for kernels in which products are under way meanwhile: what needs the scores comes
//! first, what touches the output when the product that adds to it has ended.

use flashcore_ir::types::F32;
use flashcore_ir::{Builder, Compare, Reg, VoteMode};

use super::fragment::Accumulator;
use super::softmax::{OnlineSoftmax, Raised, Rescale, over_row};

/// The binary logarithm of how far weights may grow beyond 1 under [`Rescale::Threshold`].
const FAR: f32 = 8.0;
/// Chains of dependent operations in which the scores of a row are gone through: a lane has few rows, and would wait for
/// each result before the next.
const CHAINS: usize = 2;

impl Raised {
    /// Of no scores yet, in `rows` rows of a lane.
    pub fn none(k: &mut Builder, rows: u32) -> Self {
        let mut all = |value: f32| (0..rows).map(|_| k.copy(value)).collect();
        Self { shift: all(0.0), factors: all(1.0) }
    }
}

impl OnlineSoftmax {
    /// Raises the maxima to those of the scores; `raised` is what came of it.
    pub fn raise(&self, k: &mut Builder, scores: &Accumulator, raised: &Raised) {
        k.section("maximum", |k| {
            let rows = self.maximum.len();
            let mut chains: Vec<[Option<Reg<F32>>; CHAINS]> = vec![[None; CHAINS]; rows];
            scores.each(|row, column, score| match chains[row][column as usize % CHAINS] {
                Some(chain) => k.max_to(chain, score),
                None => chains[row][column as usize % CHAINS] = Some(k.copy(score)),
            });
            for (row, (maximum, chains)) in self.maximum.iter().zip(chains).enumerate() {
                let before = k.copy(*maximum);
                let highest = k.copy(before);
                for chain in chains.into_iter().flatten() {
                    k.max_to(highest, chain);
                }
                over_row(k, highest, |k, highest, other| k.max_to(highest, other));
                if self.rescale == Rescale::Threshold {
                    // Where both are minus infinity, the difference is a NaN, and not far.
                    let rise = k.sub(highest, before);
                    let rise = self.scaled(k, rise);
                    let is_far = k.compare(Compare::Gt, rise, FAR);
                    k.set_where(*maximum, is_far, highest);
                } else {
                    k.set(*maximum, highest);
                }
                let shift = self.shift(k, *maximum);
                let exponent = self.relative(k, before, shift);
                k.exp2_to(exponent);
                k.set(raised.factors[row], exponent);
                k.set(raised.shift[row], shift);
            }
        });
    }

    /// Turns scores into weights, in place, and adds them to the sums.
    pub fn weigh(&self, k: &mut Builder, scores: &Accumulator, raised: &Raised) {
        k.section("weights", |k| {
            for (sum, factor) in self.sum.iter().zip(&raised.factors) {
                k.mul_to(*sum, *factor);
            }
            let mut others: Vec<Option<Reg<F32>>> = vec![None; self.sum.len()];
            let mut number = 0;
            scores.each(|row, column, score| {
                match self.scale {
                    Some(scale) => k.scale_add_to(score, scale, raised.shift[row]),
                    None => k.add_to(score, raised.shift[row]),
                }
                self.exp2_to(k, score, number);
                number += 1;
                match (column as usize % CHAINS, others[row]) {
                    (0, _) => k.add_to(self.sum[row], score),
                    (_, Some(other)) => k.add_to(other, score),
                    (_, None) => others[row] = Some(k.copy(score)),
                }
            });
            for (sum, other) in self.sum.iter().zip(others) {
                if let Some(other) = other {
                    k.add_to(*sum, other);
                }
            }
        });
    }

    /// Brings the output to the new maxima.
    pub fn rescale(&self, k: &mut Builder, output: &Accumulator, raised: &Raised) {
        k.section("rescale", |k| match self.rescale {
            Rescale::Always => output.scale_rows(k, &raised.factors),
            Rescale::IfChanged | Rescale::Threshold => {
                let mut any = k.compare(Compare::Ne, raised.factors[0], 1.0f32);
                for factor in &raised.factors[1..] {
                    let rose = k.compare(Compare::Ne, *factor, 1.0f32);
                    any = k.or(any, rose);
                }
                let any = k.vote(VoteMode::Any, any);
                k.if_uniform(any, |k| output.scale_rows(k, &raised.factors));
            }
        });
    }
}
