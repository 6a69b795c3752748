//! From products of query and key to scores in base 2.

use crate::real::Real;
use flashcore_problem::{InputViews, Problem};
use std::f64::consts::LOG2_E;
use std::ops::Range;

/// What turns the products of one head into scores.
///
/// Scores are multiplied by `log2(e)`, so that the softmax can use powers of two. A factor that comes before everything
/// else is left to the kernel that computes the products. It is not put on the query, though that would be fewer
/// multiplications: each element would be rounded once more, and sums over 256 columns then miss the gate.
pub(crate) struct Scoring<'a> {
    problem: &'a Problem,
    inputs: &'a InputViews<'a>,
    batch: usize,
    head: usize,
    position_offset: isize,
}

impl<'a> Scoring<'a> {
    pub(crate) fn new(problem: &'a Problem, inputs: &'a InputViews<'a>, batch: usize, head: usize) -> Self {
        let position_offset = problem.position_offset(inputs.key_length(problem, batch));
        Self { problem, inputs, batch, head, position_offset }
    }

    /// Products times the [`factor`](Self::factor) are scores already.
    fn is_plain(&self) -> bool {
        self.problem.softcap.is_none() && self.inputs.alibi_slopes.is_none() && self.inputs.bias.is_none()
    }

    /// What products are multiplied by before everything else.
    pub(crate) fn factor(&self) -> f64 {
        let scale = f64::from(self.problem.scale);
        match self.problem.softcap {
            Some(softcap) => scale / f64::from(softcap),
            None if self.is_plain() => scale * LOG2_E,
            None => scale,
        }
    }

    /// Replaces the products of `rows` with `keys`, times the factor, by scores. They lie key by key, `columns` for each, of which those
    /// of `rows` are the first.
    pub(crate) fn apply<R: Real>(&self, rows: Range<usize>, keys: Range<usize>, products: &mut [R], columns: usize) {
        if self.is_plain() {
            return;
        }
        let softcap = self.problem.softcap.map(|softcap| R::from_f64(f64::from(softcap)));
        let slope = self.inputs.alibi_slopes.map(|slopes| R::from_f64(f64::from(slopes[self.head])));
        let to_base_two = R::from_f64(LOG2_E);
        for (products, key) in products.chunks_exact_mut(columns).zip(keys) {
            for (score, row) in products.iter_mut().zip(rows.clone()) {
                if let Some(softcap) = softcap {
                    *score = score.tanh() * softcap;
                }
                if let Some(slope) = slope {
                    let distance = (row as isize + self.position_offset - key as isize).unsigned_abs();
                    *score = *score - slope * R::from_f64(distance as f64);
                }
                if let Some(bias) = &self.inputs.bias {
                    let term = bias.data[bias.strides.index(self.batch, self.head, row, key)];
                    *score += R::from_f64(f64::from(term));
                }
                *score *= to_base_two;
            }
        }
    }

    /// The sink of the head in base 2, where there is one.
    pub(crate) fn sink<R: Real>(&self) -> Option<R> {
        self.inputs.sinks.map(|sinks| R::from_f64(f64::from(sinks[self.head]) * LOG2_E))
    }
}
