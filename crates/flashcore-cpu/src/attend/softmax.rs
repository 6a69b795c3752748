//! The softmax of a row whose scores come in parts: what is done once per part or once per row. What is done once per
//! score is [`Microkernel::weigh`](crate::microkernel::Microkernel::weigh).

use crate::simd::real::Real;
use std::f64::consts::LN_2;

/// What is left to do when all scores have been seen.
pub(crate) struct Finished<R> {
    /// What the weighted sum of the values is to be multiplied by.
    pub(crate) factor: R,
    shift: R,
    row_sum: R,
}

impl<R: Real> Finished<R> {
    /// In base e.
    pub(crate) fn log_sum_exp(&self) -> R {
        (self.shift + self.row_sum.log2()) * R::from_f64(LN_2)
    }
}

/// From the maximum of all scores and the sum of their weights. A sink is one more score without a value. `None` where
/// nothing was attended: the output is zero, whatever the weighted sum says.
pub(crate) fn finish<R: Real>(row_max: R, row_sum: R, sink: Option<R>) -> Option<Finished<R>> {
    let with_sink = sink.map_or(row_max, |sink| row_max.maximum(sink));
    let row_scale = row_scale(row_max, with_sink);
    let sink_weight = sink.map_or(R::ZERO, |sink| (sink - finite_shift(with_sink)).exp2());
    let row_sum = row_sum * row_scale + sink_weight;
    if row_sum == R::ZERO {
        return None;
    }
    Some(Finished { factor: row_scale * row_sum.reciprocal(), shift: finite_shift(with_sink), row_sum })
}

/// `2^(old - new)`, also when both are minus infinity.
pub(crate) fn row_scale<R: Real>(old: R, new: R) -> R {
    if old == new { R::ONE } else { (old - new).exp2() }
}

/// What is subtracted from scores: the maximum, unless that is minus infinity, where the difference would be a NaN.
pub(crate) fn finite_shift<R: Real>(row_max: R) -> R {
    if row_max == R::NEGATIVE_INFINITY { R::ZERO } else { row_max }
}
