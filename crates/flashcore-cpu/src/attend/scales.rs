//! Scales of 8-bit tensors, for the rows of one group.
//!
//! What all rows of a group share is one more factor of the products. Scales that differ from key to key multiply a column of
//! scores, those that differ from row to row a row of them, and those of values the weights, or the packed values.

use crate::attend::blocked::MAX_KV_TILE;
use crate::simd::real::Real;
use flashcore_problem::{InputViews, Problem, ScaleView, Sequence};
use std::ops::Range;

/// Scales of the tensors of one sequence and key head.
pub(crate) struct GroupScales<'a> {
    sequence: Sequence<'a>,
    key_head: usize,
    /// Product of the scales of query and key that are the same for all rows and keys.
    pub(crate) factor: f64,
    /// The scale of the query, where rows differ.
    query: Option<ScaleView<'a>>,
    /// The scale of the key, where keys differ.
    key: Option<ScaleView<'a>>,
    value: Option<ScaleView<'a>>,
}

/// True if the scale of query or key differs among the rows or the keys of a group.
pub(crate) fn differ(problem: &Problem, inputs: &InputViews<'_>) -> bool {
    query_differs(inputs).is_some() || key_differs(problem, inputs).is_some()
}

fn query_differs<'a>(inputs: &InputViews<'a>) -> Option<ScaleView<'a>> {
    inputs.q_scale.filter(|scale| scale.strides.row != 0 || scale.strides.query_head != 0)
}

fn key_differs<'a>(problem: &Problem, inputs: &InputViews<'a>) -> Option<ScaleView<'a>> {
    inputs.k_scale.filter(|scale| !scale.strides.is_constant_in(problem))
}

impl<'a> GroupScales<'a> {
    pub(crate) fn new(problem: &Problem, inputs: &InputViews<'a>, sequence: Sequence<'a>, key_head: usize) -> Self {
        let (query, key) = (query_differs(inputs), key_differs(problem, inputs));
        let heads = problem.query_heads / problem.key_heads;
        // A sequence without rows or keys has no scale, and no need of one.
        let of_query = inputs.q_scale.filter(|_| query.is_none() && sequence.query_length > 0);
        let of_key = inputs.k_scale.filter(|_| key.is_none() && !sequence.attended_range(problem).is_empty());
        let query_factor = of_query.map_or(1.0, |scale| scale.of_query(problem, &sequence, 0, key_head * heads));
        let first = sequence.attended_range(problem).start;
        let key_factor = of_key.map_or(1.0, |scale| scale.of_key(&sequence, first, key_head));
        let factor = f64::from(query_factor) * f64::from(key_factor);
        Self { sequence, key_head, factor, query, key, value: inputs.v_scale }
    }

    /// True if query rows of the group have scales of their own.
    pub(crate) fn rows_differ(&self) -> bool {
        self.query.is_some()
    }

    /// The scale of a query row; 1 unless rows differ.
    pub(crate) fn of_query(&self, problem: &Problem, head: usize, row: usize) -> f32 {
        self.query.map_or(1.0, |scale| scale.of_query(problem, &self.sequence, row, head))
    }

    /// Scales of some keys, where keys differ; 1 past the last.
    pub(crate) fn of_keys<R: Real>(&self, keys: Range<usize>) -> Option<[R; MAX_KV_TILE]> {
        self.key.map(|scale| self.listed(scale, keys))
    }

    /// Scales of the values of some keys, where they have one; 1 past the last.
    pub(crate) fn of_values<R: Real>(&self, keys: Range<usize>) -> Option<[R; MAX_KV_TILE]> {
        self.value.map(|scale| self.listed(scale, keys))
    }

    /// The scale of the value of a key.
    pub(crate) fn of_value(&self, key: usize) -> Option<f32> {
        self.value.map(|scale| scale.of_key(&self.sequence, key, self.key_head))
    }

    /// Read run by run: the rows of a page follow one another.
    fn listed<R: Real>(&self, scale: ScaleView<'_>, keys: Range<usize>) -> [R; MAX_KV_TILE] {
        let mut scales = [R::ONE; MAX_KV_TILE];
        let (mut key, mut places) = (keys.start, &mut scales[..keys.len()]);
        while !places.is_empty() {
            let count = self.sequence.contiguous_keys(key).min(places.len());
            let first = scale.strides.key_index(self.sequence.index, self.sequence.key_row(key), self.key_head);
            let (run, rest) = places.split_at_mut(count);
            for (index, place) in run.iter_mut().enumerate() {
                *place = R::from_f64(f64::from(scale.data[first + index * scale.strides.row]));
            }
            (key, places) = (key + count, rest);
        }
        scales
    }
}
