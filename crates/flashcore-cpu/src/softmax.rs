//! The softmax of a row whose scores come in parts: what is done once per part or once per row. What is done once per
//! score is [`Microkernel::weigh`](crate::microkernel::Microkernel::weigh).

use crate::real::Real;
use std::f64::consts::LN_2;

/// What is left to do when all scores have been seen.
pub(crate) struct Finished<R> {
    /// What the weighted sum of the values is to be multiplied by.
    pub(crate) factor: R,
    shift: R,
    sum: R,
}

impl<R: Real> Finished<R> {
    /// In base e.
    pub(crate) fn lse(&self) -> R {
        (self.shift + self.sum.log2()) * R::from_f64(LN_2)
    }
}

/// From the maximum of all scores and the sum of their weights. A sink is one more score without a value. `None` where
/// nothing was attended: the output is zero, whatever the weighted sum says.
pub(crate) fn finish<R: Real>(maximum: R, sum: R, sink: Option<R>) -> Option<Finished<R>> {
    let with_sink = sink.map_or(maximum, |sink| maximum.maximum(sink));
    let correction = correction(maximum, with_sink);
    let sink_weight = sink.map_or(R::ZERO, |sink| (sink - finite_shift(with_sink)).exp2());
    let sum = sum * correction + sink_weight;
    if sum == R::ZERO {
        return None;
    }
    Some(Finished { factor: correction * sum.reciprocal(), shift: finite_shift(with_sink), sum })
}

/// `2^(old - new)`, also when both are minus infinity.
pub(crate) fn correction<R: Real>(old: R, new: R) -> R {
    if old == new { R::ONE } else { (old - new).exp2() }
}

/// What is subtracted from scores: the maximum, unless that is minus infinity, where the difference would be a NaN.
pub(crate) fn finite_shift<R: Real>(maximum: R) -> R {
    if maximum == R::NEGATIVE_INFINITY { R::ZERO } else { maximum }
}
