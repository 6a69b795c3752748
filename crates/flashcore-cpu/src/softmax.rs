//! The softmax of a row whose scores come in parts.

use crate::microkernel::Microkernel;
use crate::real::Real;
use std::f64::consts::LN_2;

/// The running maximum of the scores, in base 2, and the sum of their weights `2^(score - maximum)`.
///
/// Before anything was attended the maximum is minus infinity. A NaN never becomes the maximum; it shows in the sum.
#[derive(Clone, Copy)]
pub(crate) struct RunningSoftmax<R> {
    maximum: R,
    sum: R,
}

/// What is left to do when all scores have been seen.
pub(crate) struct Finished<R> {
    /// What the weighted sum of the values is to be multiplied by.
    pub(crate) factor: R,
    /// In base e.
    pub(crate) log_sum_exp: R,
    /// Nothing was attended: the output is zero, whatever the weighted sum says.
    pub(crate) is_empty: bool,
}

impl<R: Real> RunningSoftmax<R> {
    pub(crate) const EMPTY: Self = Self { maximum: R::NEGATIVE_INFINITY, sum: R::ZERO };

    /// Replaces more scores by their weights and returns what the weighted sum so far is to be multiplied by.
    pub(crate) fn update(&mut self, kernel: &impl Microkernel<R>, scores: &mut [R]) -> R {
        let maximum = kernel.maximum(scores, self.maximum);
        let correction = correction(self.maximum, maximum);
        let added = kernel.exponentiate(scores, finite_shift(maximum));
        *self = Self { maximum, sum: self.sum * correction + added };
        correction
    }

    pub(crate) fn finish(self, sink: Option<R>) -> Finished<R> {
        let maximum = sink.map_or(self.maximum, |sink| self.maximum.maximum(sink));
        let correction = correction(self.maximum, maximum);
        let sink_weight = sink.map_or(R::ZERO, |sink| (sink - finite_shift(maximum)).exp2());
        let sum = self.sum * correction + sink_weight;
        if sum == R::ZERO {
            return Finished { factor: R::ZERO, log_sum_exp: R::NEGATIVE_INFINITY, is_empty: true };
        }
        Finished {
            factor: correction * sum.reciprocal(),
            log_sum_exp: (finite_shift(maximum) + sum.log2()) * R::from_f64(LN_2),
            is_empty: false,
        }
    }
}

/// `2^(old - new)`, also when both are minus infinity.
fn correction<R: Real>(old: R, new: R) -> R {
    if old == new { R::ONE } else { (old - new).exp2() }
}

/// What is subtracted from scores: the maximum, unless that is minus infinity, where the difference would be a NaN.
fn finite_shift<R: Real>(maximum: R) -> R {
    if maximum == R::NEGATIVE_INFINITY { R::ZERO } else { maximum }
}
