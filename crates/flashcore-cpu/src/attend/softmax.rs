//! The online softmax of a row, as far as it is done once per part or once per row: row scale, sink, log-sum-exp. The part
//! that is done once per score is [`Softmax::online_softmax`](crate::microkernel::Softmax::online_softmax).

use crate::planted::planted;
use crate::simd::real::Real;
use flashcore_problem::LseBase;
use std::f64::consts::LN_2;

/// Normalization of a row whose scores have all been seen.
pub(crate) struct Finished<R> {
    /// Factor of the weighted sum of the values.
    pub(crate) factor: R,
    shift: R,
    row_sum: R,
}

impl<R: Real> Finished<R> {
    /// Log-sum-exp.
    pub(crate) fn lse(&self, base: LseBase) -> R {
        let log2 = self.shift + self.row_sum.log2();
        match planted!(LseNatural: LseBase::Natural, base) {
            LseBase::Natural => log2 * R::from_f64(LN_2),
            LseBase::Two => log2,
        }
    }
}

/// Finishes a row, given its row max and row sum. A sink is one more score without a value. `None` if nothing was
/// attended: the output is zero, whatever the weighted sum says.
pub(crate) fn finish<R: Real>(row_max: R, row_sum: R, sink: Option<R>) -> Option<Finished<R>> {
    let with_sink = sink.map_or(row_max, |sink| planted!(SinkNotInMaximum: row_max, row_max.maximum(sink)));
    let row_scale = row_scale(row_max, with_sink);
    let sink_weight = sink.map_or(R::ZERO, |sink| (sink - finite_shift(with_sink)).exp2());
    let row_sum = row_sum * row_scale + sink_weight;
    if row_sum == R::ZERO {
        return None;
    }
    Some(Finished { factor: row_scale * row_sum.reciprocal(), shift: finite_shift(with_sink), row_sum })
}

/// Row scale `2^(old - new)`, also when both are minus infinity.
pub(crate) fn row_scale<R: Real>(old: R, new: R) -> R {
    if old == new { R::ONE } else { (old - new).exp2() }
}

/// The value to subtract from scores: the row max, or 0 where that is minus infinity and the difference would be a NaN.
pub(crate) fn finite_shift<R: Real>(row_max: R) -> R {
    if row_max == R::NEGATIVE_INFINITY { R::ZERO } else { row_max }
}
