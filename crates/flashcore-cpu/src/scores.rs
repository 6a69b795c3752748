//! From products of query and key to scores in base 2.

use crate::real::{Real, multiply_all};
use flashcore_problem::{InputViews, Problem};
use std::f64::consts::LOG2_E;
use std::ops::Range;

/// What turns the products of one head into scores.
///
/// Scores are multiplied by `log2(e)`, so that the softmax can use powers of two.
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

    /// Replaces the products of query row `row` with `keys` by scores.
    pub(crate) fn apply<R: Real>(&self, row: usize, keys: Range<usize>, products: &mut [R]) {
        let scale = f64::from(self.problem.scale);
        let is_plain =
            self.problem.softcap.is_none() && self.inputs.alibi_slopes.is_none() && self.inputs.bias.is_none();
        if is_plain {
            multiply_all(products, R::from_f64(scale * LOG2_E));
            return;
        }
        if let Some(softcap) = self.problem.softcap.map(f64::from) {
            let (inward, outward) = (R::from_f64(scale / softcap), R::from_f64(softcap));
            for product in &mut *products {
                *product = (*product * inward).tanh() * outward;
            }
        } else {
            multiply_all(products, R::from_f64(scale));
        }
        if let Some(slopes) = self.inputs.alibi_slopes {
            let slope = R::from_f64(f64::from(slopes[self.head]));
            let position = row as isize + self.position_offset;
            for (score, key) in products.iter_mut().zip(keys.clone()) {
                let distance = R::from_f64((position - key as isize).unsigned_abs() as f64);
                *score = *score - slope * distance;
            }
        }
        if let Some(bias) = &self.inputs.bias {
            for (score, key) in products.iter_mut().zip(keys) {
                let term = bias.data[bias.strides.index(self.batch, self.head, row, key)];
                *score += R::from_f64(f64::from(term));
            }
        }
        multiply_all(products, R::from_f64(LOG2_E));
    }

    /// The sink of the head in base 2, where there is one.
    pub(crate) fn sink<R: Real>(&self) -> Option<R> {
        self.inputs.sinks.map(|sinks| R::from_f64(f64::from(sinks[self.head]) * LOG2_E))
    }
}
