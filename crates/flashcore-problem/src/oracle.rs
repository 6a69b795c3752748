//! Attention in plain `f64` loops. Its only virtue is to be obviously right.

use crate::{DType, Inputs, Invalid, Problem};
use rayon::prelude::*;

/// What is right.
#[derive(Clone, Debug, PartialEq)]
pub struct Expected {
    /// Contiguous `[batch, query head, query row, value column]`, whatever the problem's layout.
    pub output: Vec<f64>,
    /// Contiguous `[batch, query head, query row]`, whether the problem wants it or not.
    pub lse: Vec<f64>,
    /// The largest magnitude among the finite scores, before and after softcap, `ALiBi`, bias and expression.
    ///
    /// A score of this size is rounded by this much times the roundoff of the accumulator, in any implementation.
    pub largest_score: f64,
}

/// Computes attention as defined in the [crate documentation](crate), in `f64`, one row at a time.
pub fn oracle(problem: &Problem, inputs: &Inputs) -> Result<Expected, Invalid> {
    inputs.validate(problem)?;
    let operands = Operands::new(problem, inputs);
    let shape = problem.output_shape();
    let rows: Vec<(usize, usize, usize)> = shape.each_row().collect();

    let mut output = vec![0.0; rows.len() * shape.columns];
    let mut lse = vec![0.0; rows.len()];
    let largest_score = output
        .par_chunks_mut(shape.columns)
        .zip(&mut lse)
        .zip(&rows)
        .map(|((output, lse), &(batch, head, row))| {
            let answer = match problem.dtype {
                // The gate of results in `f64` sees what plain sums in `f64` round away.
                DType::F64 => operands.row::<Compensated>(batch, head, row, output),
                DType::F16 | DType::Bf16 | DType::F32 => operands.row::<f64>(batch, head, row, output),
            };
            *lse = answer.lse;
            answer.largest_score
        })
        .reduce(|| 0.0, f64::max);
    Ok(Expected { output, lse, largest_score })
}

/// The inputs in `f64`, contiguous.
struct Operands<'a> {
    problem: &'a Problem,
    inputs: &'a Inputs,
    query: Vec<f64>,
    key: Vec<f64>,
    value: Vec<f64>,
}

struct RowAnswer {
    lse: f64,
    largest_score: f64,
}

impl<'a> Operands<'a> {
    fn new(problem: &'a Problem, inputs: &'a Inputs) -> Self {
        let strides = problem.strides();
        Self {
            problem,
            inputs,
            query: inputs.query.dense(problem.query_shape(), strides.query),
            key: inputs.key.dense(problem.key_shape(), strides.key),
            value: inputs.value.dense(problem.value_shape(), strides.value),
        }
    }

    /// Writes the output of one row, which is zero before.
    fn row<S: Sum>(&self, batch: usize, head: usize, row: usize, output: &mut [f64]) -> RowAnswer {
        let problem = self.problem;
        let (head_dim, value_dim) = (problem.head_dim, problem.value_dim);
        let batch_key_length = self.inputs.key_length(problem, batch);
        let position = row as isize + problem.position_offset(batch_key_length);

        let query_start = ((batch * problem.query_heads + head) * problem.query_length + row) * head_dim;
        let query = &self.query[query_start..query_start + head_dim];
        let first_key_row = (batch * problem.key_heads + problem.key_head(head)) * problem.key_length;

        let keys = problem.attended_keys(batch_key_length, row);
        let keys: Vec<usize> = match problem.mask_mod {
            Some(mask_mod) => mask_mod.attended(self.inputs.views().tables(), (batch, head, row), keys),
            None => keys.collect(),
        };
        let mut largest_score = 0.0_f64;
        let mut scores = Vec::with_capacity(keys.len());
        for &j in &keys {
            let key_start = (first_key_row + j) * head_dim;
            let key = &self.key[key_start..key_start + head_dim];
            let mut product = S::default();
            for column in 0..head_dim {
                product.add(query[column] * key[column]);
            }
            let mut score = product.value() * problem.scale;
            largest_score = largest_score.max(finite_magnitude(score));
            if let Some(softcap) = problem.softcap.map(f64::from) {
                score = softcap * (score / softcap).tanh();
            }
            if let Some(slopes) = &self.inputs.alibi_slopes {
                score -= f64::from(slopes[head]) * (position - j as isize).abs() as f64;
            }
            if let Some(bias) = &self.inputs.bias {
                score += f64::from(bias.data[bias.strides.index(batch, head, row, j)]);
            }
            largest_score = largest_score.max(finite_magnitude(score));
            scores.push(score);
        }
        if let Some(score_mod) = problem.score_mod {
            score_mod.apply_to_row(self.inputs.views().tables(), (batch, head, row), &keys, &mut scores);
            largest_score = scores.iter().fold(largest_score, |largest, &score| largest.max(finite_magnitude(score)));
        }
        let sink = self.inputs.sinks.as_ref().map(|sinks| f64::from(sinks[head]));

        // `f64::max` passes over a NaN; the sum below does not.
        let maximum = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
        let shift = if maximum == f64::NEG_INFINITY { 0.0 } else { maximum };
        let mut sum = S::default();
        sum.add(sink.map_or(0.0, |sink| (sink - shift).exp()));
        let mut sums = vec![S::default(); value_dim];
        for (j, score) in keys.into_iter().zip(scores) {
            let weight = (score - shift).exp();
            sum.add(weight);
            let value_start = (first_key_row + j) * value_dim;
            let value = &self.value[value_start..value_start + value_dim];
            for column in 0..value_dim {
                sums[column].add(weight * value[column]);
            }
        }
        let sum = sum.value();
        // Nothing attended, or nothing but scores of minus infinity.
        if sum == 0.0 {
            output.fill(0.0);
            return RowAnswer { lse: f64::NEG_INFINITY, largest_score };
        }
        for (element, total) in output.iter_mut().zip(sums) {
            *element = total.value() / sum;
        }
        RowAnswer { lse: shift + sum.ln(), largest_score }
    }
}

/// A sum of many terms.
trait Sum: Copy + Default {
    fn add(&mut self, term: f64);
    fn value(self) -> f64;
}

impl Sum for f64 {
    fn add(&mut self, term: f64) {
        *self += term;
    }

    fn value(self) -> f64 {
        self
    }
}

/// A sum that keeps what each addition rounds away: where all terms are the same, plain sums are rounded to the same side
/// again and again.
#[derive(Clone, Copy, Default)]
struct Compensated {
    sum: f64,
    lost: f64,
}

impl Sum for Compensated {
    fn add(&mut self, term: f64) {
        let sum = self.sum + term;
        let of_term = sum - self.sum;
        let lost = (self.sum - (sum - of_term)) + (term - of_term);
        // What is not finite has lost nothing.
        self.lost += if lost.is_nan() { 0.0 } else { lost };
        self.sum = sum;
    }

    fn value(self) -> f64 {
        self.sum + self.lost
    }
}

fn finite_magnitude(score: f64) -> f64 {
    if score.is_finite() { score.abs() } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compensated_sum_keeps_what_is_rounded_away() {
        let (mut plain, mut compensated) = (0.0, Compensated::default());
        for _ in 0..1_000_000 {
            Sum::add(&mut plain, 0.1);
            compensated.add(0.1);
        }
        assert!((plain - 100_000.0).abs() > 1e-7, "{plain}");
        assert_eq!(compensated.value(), 100_000.0);
        compensated.add(f64::INFINITY);
        assert_eq!(compensated.value(), f64::INFINITY);
        compensated.add(f64::NEG_INFINITY);
        assert!(compensated.value().is_nan());
    }
}
