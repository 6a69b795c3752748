//! Attention in plain `f64` loops. Its only virtue is to be obviously right.

use crate::{Inputs, Invalid, Problem};
use rayon::prelude::*;

/// What is right.
#[derive(Clone, Debug, PartialEq)]
pub struct Expected {
    /// Contiguous `[batch, query head, query row, value column]`, whatever the problem's layout.
    pub output: Vec<f64>,
    /// Contiguous `[batch, query head, query row]`, whether the problem wants it or not.
    pub log_sum_exp: Vec<f64>,
    /// The largest magnitude among the finite scores, before and after softcap, `ALiBi` and bias.
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
    let mut log_sum_exp = vec![0.0; rows.len()];
    let largest_score = output
        .par_chunks_mut(shape.columns)
        .zip(&mut log_sum_exp)
        .zip(&rows)
        .map(|((output, log_sum_exp), &(batch, head, row))| {
            let answer = operands.row(batch, head, row, output);
            *log_sum_exp = answer.log_sum_exp;
            answer.largest_score
        })
        .reduce(|| 0.0, f64::max);
    Ok(Expected { output, log_sum_exp, largest_score })
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
    log_sum_exp: f64,
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
    fn row(&self, batch: usize, head: usize, row: usize, output: &mut [f64]) -> RowAnswer {
        let problem = self.problem;
        let (head_dim, value_dim) = (problem.head_dim, problem.value_dim);
        let batch_key_length = self.inputs.key_length(problem, batch);
        let position = row as isize + problem.position_offset(batch_key_length);

        let query_start = ((batch * problem.query_heads + head) * problem.query_length + row) * head_dim;
        let query = &self.query[query_start..query_start + head_dim];
        let first_key_row = (batch * problem.key_heads + problem.key_head(head)) * problem.key_length;

        let keys = problem.attended_keys(batch_key_length, row);
        let mut largest_score = 0.0_f64;
        let mut scores = Vec::with_capacity(keys.len());
        for j in keys.clone() {
            let key_start = (first_key_row + j) * head_dim;
            let key = &self.key[key_start..key_start + head_dim];
            let mut product = 0.0;
            for column in 0..head_dim {
                product += query[column] * key[column];
            }
            let mut score = product * f64::from(problem.scale);
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
        let sink = self.inputs.sinks.as_ref().map(|sinks| f64::from(sinks[head]));

        // `f64::max` passes over a NaN; the sum below does not.
        let maximum = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
        let shift = if maximum == f64::NEG_INFINITY { 0.0 } else { maximum };
        let mut sum = sink.map_or(0.0, |sink| (sink - shift).exp());
        for (j, score) in keys.zip(scores) {
            let weight = (score - shift).exp();
            sum += weight;
            let value_start = (first_key_row + j) * value_dim;
            let value = &self.value[value_start..value_start + value_dim];
            for column in 0..value_dim {
                output[column] += weight * value[column];
            }
        }
        // Nothing attended, or nothing but scores of minus infinity.
        if sum == 0.0 {
            output.fill(0.0);
            return RowAnswer { log_sum_exp: f64::NEG_INFINITY, largest_score };
        }
        for element in output {
            *element /= sum;
        }
        RowAnswer { log_sum_exp: shift + sum.ln(), largest_score }
    }
}

fn finite_magnitude(score: f64) -> f64 {
    if score.is_finite() { score.abs() } else { 0.0 }
}
