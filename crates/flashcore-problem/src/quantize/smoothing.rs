//! Smoothing: the mean key of a sequence and KV head, subtracted from each of its keys.

use super::QuantizeError;
use super::codes::Rows;
use crate::{InputViews, Operand, Problem, Shape};

/// The mean of the keys of each sequence and KV head.
pub(super) struct KeyMeans {
    /// `[sequence, KV head, column]`.
    means: Vec<f64>,
    heads: usize,
    head_dim: usize,
}

/// Refuses problems whose softmax is not of scores plus terms that do not depend on them.
pub(super) fn require_invariance(problem: &Problem) -> Result<(), QuantizeError> {
    let features = [
        ("a softcap", problem.softcap.is_some()),
        ("sinks", problem.sinks),
        ("a score_mod", problem.score_mod.is_some()),
    ];
    match features.into_iter().find(|(_, is_there)| *is_there) {
        Some((feature, _)) => Err(QuantizeError::Smoothing { feature }),
        None => Ok(()),
    }
}

/// The means of keys that some query attends.
pub(super) fn key_means(problem: &Problem, inputs: &InputViews<'_>) -> Result<KeyMeans, QuantizeError> {
    let (heads, head_dim) = (problem.key_heads, problem.head_dim);
    let mut means = KeyMeans { means: vec![0.0; problem.batch * heads * head_dim], heads, head_dim };
    let strides = problem.strides().key;
    let rows = Rows { problem, inputs, tensor: inputs.key, operand: Operand::Key, strides };
    rows.each(|place, numbers| {
        for (sum, number) in means.of_mut(place.sequence, place.head).iter_mut().zip(numbers) {
            *sum += *number;
        }
        Ok(())
    })?;
    for sequence in inputs.sequences(problem) {
        let count = sequence.attended_range(problem).len().max(1) as f64;
        for head in 0..heads {
            means.of_mut(sequence.index, head).iter_mut().for_each(|sum| *sum /= count);
        }
    }
    Ok(means)
}

impl KeyMeans {
    fn start(&self, sequence: usize, head: usize) -> usize {
        (sequence * self.heads + head) * self.head_dim
    }

    fn of_mut(&mut self, sequence: usize, head: usize) -> &mut [f64] {
        let start = self.start(sequence, head);
        &mut self.means[start..start + self.head_dim]
    }

    pub(super) fn subtract(&self, sequence: usize, head: usize, key: &mut [f64]) {
        for (number, mean) in key.iter_mut().zip(&self.means[self.start(sequence, head)..]) {
            *number -= mean;
        }
    }

    /// `scale * dot(query, mean)` of each row of the output, in the base of its log-sum-exp.
    pub(super) fn lse_shift(&self, query: &Rows<'_>) -> Vec<f32> {
        let problem = query.problem;
        let Shape { batch, heads, rows, .. } = problem.output_shape();
        let unit = problem.scale * problem.lse_form.base.per_natural();
        let mut shifts = vec![0.0; batch * heads * rows];
        let done = query.each(|place, numbers| {
            let mean = &self.means[self.start(place.sequence, problem.key_head(place.head))..];
            let product: f64 = numbers.iter().zip(mean).map(|(query, mean)| query * mean).sum();
            shifts[(place.batch * heads + place.head) * rows + place.row] = (unit * product) as f32;
            Ok(())
        });
        debug_assert_eq!(done, Ok(()), "nothing here refuses");
        shifts
    }
}
