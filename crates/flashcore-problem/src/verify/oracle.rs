//! The oracle: attention in plain `f64` loops. Its only virtue is to be obviously right.

use super::double_double::DoubleDouble;
use crate::expression::ExpressionReal;
use crate::{DType, Element, Inputs, Invalid, Problem, Sequence};
use rayon::prelude::*;

/// The right answer to a problem.
#[derive(Clone, Debug, PartialEq)]
pub struct Expected {
    /// Contiguous `[batch, query head, query row, value column]` of the output's shape, whatever the problem's layout.
    /// NaN in rows that belong to no sequence, which a backend leaves alone.
    pub output: Vec<f64>,
    /// Contiguous `[batch, query head, query row]`, even if the problem does not ask for it.
    pub lse: Vec<f64>,
    /// The largest magnitude among the finite scores, before and after softcap, `ALiBi`, bias and expression.
    ///
    /// A score of this size is rounded by this much times the roundoff of the accumulator, in any implementation.
    pub largest_score: f64,
    /// True for each row of the output, `[batch, query head, query row]`, that belongs to no sequence; empty where all
    /// rows do.
    pub untouched: Vec<bool>,
}

/// The rows of the output that belong to a sequence: the sequence, its row, and the place in the output.
pub(crate) fn output_rows<'a>(problem: &Problem, inputs: &'a Inputs) -> Vec<(Sequence<'a>, Element)> {
    let sequences = inputs.views().sequences(problem).collect::<Vec<_>>();
    let rows = sequences.into_iter().flat_map(|sequence| {
        let heads = 0..problem.query_heads;
        heads.flat_map(move |head| (0..sequence.query_length).map(move |row| (sequence, head, row)))
    });
    rows.map(|(sequence, head, row)| (sequence, Element { batch: sequence.index, head, row, column: 0 })).collect()
}

/// The index of a row of a sequence among the rows of the output.
pub(crate) fn output_row(problem: &Problem, sequence: &Sequence<'_>, at: Element) -> usize {
    let shape = problem.output_shape();
    let (batch, row) = sequence.query_row(at.row);
    (batch * shape.heads + at.head) * shape.rows + row
}

/// Computes attention as defined in the [crate documentation](crate), in `f64`, one row at a time.
pub fn oracle(problem: &Problem, inputs: &Inputs) -> Result<Expected, Invalid> {
    inputs.validate(problem)?;
    let operands = Operands::new(problem, inputs);
    let shape = problem.output_shape();
    let rows = output_rows(problem, inputs);
    let answers: Vec<RowAnswer> = rows
        .par_iter()
        .map(|(sequence, at)| match problem.dtype {
            // The gate of results in `f64` sees rounding errors of `f64`.
            DType::F64 => operands.row::<DoubleDouble>(sequence, *at),
            DType::F16 | DType::Bf16 | DType::F32 | DType::E4m3 | DType::E5m2 => operands.row::<f64>(sequence, *at),
        })
        .collect();
    let all = shape.batch * shape.heads * shape.rows;
    let mut expected = Expected {
        output: vec![f64::NAN; all * shape.columns],
        lse: vec![f64::NAN; all],
        largest_score: answers.iter().fold(0.0, |largest, answer| largest.max(answer.largest_score)),
        untouched: vec![true; all],
    };
    for ((sequence, at), answer) in rows.iter().zip(answers) {
        let row = output_row(problem, sequence, *at);
        expected.output[row * shape.columns..][..shape.columns].copy_from_slice(&answer.output);
        expected.lse[row] = answer.lse;
        expected.untouched[row] = false;
    }
    if !expected.untouched.contains(&true) {
        expected.untouched = Vec::new();
    }
    Ok(expected)
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
    output: Vec<f64>,
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

    fn row<R: OracleReal>(&self, sequence: &Sequence<'_>, at: Element) -> RowAnswer {
        let (problem, Element { batch, head, row, .. }) = (self.problem, at);
        let (head_dim, value_dim) = (problem.head_dim, problem.value_dim);
        let position = row as isize + sequence.position_offset(problem);

        let query_start = output_row(problem, sequence, at) * head_dim;
        let query = &self.query[query_start..query_start + head_dim];
        let key_shape = problem.key_shape();
        let key_row = |key: usize| {
            let (batch, row) = sequence.key_row(key);
            (batch * key_shape.heads + problem.key_head(head)) * key_shape.rows + row
        };

        let keys = sequence.attended_keys(problem, row);
        let keys: Vec<usize> = match problem.mask_mod {
            Some(mask_mod) => mask_mod.attended(self.inputs.views().tables(), (batch, head, row), keys),
            None => keys.collect(),
        };
        let views = self.inputs.views();
        let key_head = problem.key_head(head);
        // Products of codes, times the scales of their tensors.
        let query_scale = views.q_scale.map_or(1.0, |scale| f64::from(scale.of_query(problem, sequence, row, head)));
        let key_scale = |key| views.k_scale.map_or(1.0, |scale| f64::from(scale.of_key(sequence, key, key_head)));
        let value_scale = |key| views.v_scale.map_or(1.0, |scale| f64::from(scale.of_key(sequence, key, key_head)));
        let mut largest_score = 0.0_f64;
        let mut scores: Vec<R> = Vec::with_capacity(keys.len());
        for &j in &keys {
            let key_start = key_row(j) * head_dim;
            let key = &self.key[key_start..key_start + head_dim];
            let product = query.iter().zip(key).fold(R::from(0.0), |sum, (&q, &k)| sum + R::product(q, k));
            let mut score = product * R::from(problem.scale) * R::from(query_scale) * R::from(key_scale(j));
            largest_score = largest_score.max(finite_magnitude(score));
            if let Some(softcap) = problem.softcap.map(R::from_f32) {
                score = softcap * (score / softcap).tangent();
            }
            if let Some(slopes) = &self.inputs.alibi_slopes {
                score = score - R::product(f64::from(slopes[head]), (position - j as isize).abs() as f64);
            }
            if let Some(bias) = &self.inputs.bias {
                score = score + R::from_f32(bias.data[bias.strides.index(batch, head, row, j)]);
            }
            largest_score = largest_score.max(finite_magnitude(score));
            scores.push(score);
        }
        if let Some(score_mod) = problem.score_mod {
            score_mod.apply_to_row(self.inputs.views().tables(), (batch, head, row), &keys, &mut scores);
            largest_score = scores.iter().fold(largest_score, |largest, &score| largest.max(finite_magnitude(score)));
        }
        let sink = self.inputs.sinks.as_ref().map(|sinks| R::from_f32(sinks[head]));

        let shift = finite_maximum(scores.iter().copied().chain(sink));
        // Beside a large sink the weights of all keys may vanish, so an LSE without it has a shift of its own.
        let lse_of_keys = (!problem.lse_form.includes_sink).then(|| lse(&scores));
        let mut sum = sink.map_or(R::from(0.0), |sink| (sink - shift).exponential());
        let mut sums = vec![R::from(0.0); value_dim];
        for (j, score) in keys.into_iter().zip(scores) {
            let weight = (score - shift).exponential();
            sum = sum + weight;
            let value_start = key_row(j) * value_dim;
            let value = &self.value[value_start..value_start + value_dim];
            let scale = value_scale(j);
            for column in 0..value_dim {
                sums[column] = sums[column] + weight * R::product(scale, value[column]);
            }
        }
        // No key attended, or only scores of minus infinity.
        if sum.to_f64() == 0.0 {
            return RowAnswer { output: vec![0.0; value_dim], lse: f64::NEG_INFINITY, largest_score };
        }
        let output = sums.into_iter().map(|total| (total / sum).to_f64()).collect();
        let lse = lse_of_keys.unwrap_or(shift.to_f64() + sum.to_f64().ln()) * problem.lse_form.base.per_natural();
        RowAnswer { output, lse, largest_score }
    }
}

/// The log-sum-exp of scores in base e.
fn lse<R: OracleReal>(scores: &[R]) -> f64 {
    let shift = finite_maximum(scores.iter().copied());
    let sum = scores.iter().fold(R::from(0.0), |sum, &score| sum + (score - shift).exponential());
    shift.to_f64() + sum.to_f64().ln()
}

/// The largest score, or 0 where there is none but minus infinity. It ignores a NaN; sums of exponentials do not.
fn finite_maximum<R: OracleReal>(scores: impl Iterator<Item = R>) -> R {
    let nothing = R::from(f64::NEG_INFINITY);
    let maximum = scores.fold(nothing, |left, right| if right > left { right } else { left });
    if maximum > nothing { maximum } else { R::from(0.0) }
}

/// The numbers in which the oracle computes.
trait OracleReal: ExpressionReal + From<f64> {
    /// The product of two `f64`, exactly where the numbers have the bits.
    fn product(left: f64, right: f64) -> Self;
    /// The nearest `f64`.
    fn to_f64(self) -> f64;
}

impl OracleReal for f64 {
    fn product(left: f64, right: f64) -> Self {
        left * right
    }

    fn to_f64(self) -> f64 {
        self
    }
}

impl OracleReal for DoubleDouble {
    fn product(left: f64, right: f64) -> Self {
        Self::product(left, right)
    }

    fn to_f64(self) -> f64 {
        self.to_f64()
    }
}

fn finite_magnitude(score: impl OracleReal) -> f64 {
    let score = score.to_f64();
    if score.is_finite() { score.abs() } else { 0.0 }
}
