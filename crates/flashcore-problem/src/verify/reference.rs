//! The reference in the problem's own precision, a careful implementation: the yardstick of the gate.

use super::oracle::{output_row, output_rows};
use super::rounding_bias::{Leaning, Scales, WAYS, output_leaning};
use crate::expression::ExpressionReal;
use crate::{DType, Element, Expected, Inputs, Invalid, Outputs, Problem, Scale, Sequence};
use rayon::prelude::*;

/// The number that stands for the largest weight of a row where weights are e4m3: a power of two below the largest number.
const LARGEST_WEIGHT: f64 = 256.0;

/// Naive attention in the problem's precision: inputs in the problem's types, scores and softmax in `f32`, weights
/// normalised and rounded to the type of the query, weights times values summed in `f32`, output rounded once.
///
/// For `f32` only the order of operations differs from a kernel's, and `f64` computes all of this in `f64`.
///
/// Codes of 8 bits are exact in `f32`; their scales multiply scores and weights. Key and value in FP8 under a query of 16
/// or 32 bits therefore add no rounding. Where the query is `e4m3`, so are the weights: 256 at the largest of a row, so
/// that e4m3 reaches 2^-17 of it, rounded; the row sum is taken before. Sums of their products are `f32`, as they are in a
/// kernel that accumulates in two levels; one level of a tensor core keeps fewer bits, which no gate should allow.
/// Where the scale of the value depends on the token, weights are multiplied by it, relative to the largest product, before
/// they are rounded.
pub fn reference(problem: &Problem, inputs: &Inputs) -> Result<Outputs, Invalid> {
    inputs.validate(problem)?;
    Ok(match problem.dtype.accumulator() {
        DType::F64 => attend::<f64>(problem, inputs, WeightRounding::Usual, None).0,
        DType::F16 | DType::Bf16 | DType::F32 | DType::E4m3 | DType::E5m2 => {
            attend::<f32>(problem, inputs, WeightRounding::Usual, None).0
        }
    })
}

/// Elements of an output up to which the error of one way to round weights says little about that of another: the least
/// power of two from which a correct kernel needs less than half of what the usual way alone would allow. The table is in
/// the prose of [`Limits`](crate::Limits).
const FEW_ELEMENTS: usize = 32;

/// The error of the [`reference()`] against the [`oracle`](crate::oracle()).
///
/// Of a 16-bit output of few elements, the largest of all ways to round its weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReferenceError {
    /// The largest absolute error of an output element.
    pub max_error: f64,
    /// The Euclidean norm of the errors over that of the expected output.
    pub relative_l2: f64,
    /// The largest absolute error of a log-sum-exp.
    pub lse: f64,
    /// The largest [relative bias](crate::Verdict::relative_bias) of rounding weights and outputs to nearest on these
    /// inputs, over several ways to scale the weights; 0 where nothing is rounded to 16 bits.
    pub relative_bias: f64,
}

impl ReferenceError {
    /// Computes the reference and measures it.
    pub fn measure(problem: &Problem, inputs: &Inputs, expected: &Expected) -> Result<Self, Invalid> {
        let mut with_lse = problem.clone();
        with_lse.lse = true;
        inputs.validate(problem)?;
        let is_narrow = problem.dtype != problem.dtype.accumulator();
        let rounding = WeightRounding::Usual;
        let (outputs, leaning) = match problem.dtype.accumulator() {
            DType::F64 => attend::<f64>(&with_lse, inputs, rounding, None),
            _ => attend::<f32>(&with_lse, inputs, rounding, is_narrow.then_some(expected)),
        };
        let relative_bias = if is_narrow {
            let squared = squared_norm(&expected.output);
            (leaning.largest() + output_leaning(problem.dtypes().output, &expected.output).largest()) / squared
        } else {
            0.0
        };
        let errors_of = |outputs: &Outputs| {
            let actual = outputs.output.dense(problem.output_shape(), problem.strides().output);
            ErrorNorms::measure(&actual, &expected.output)
        };
        let ErrorNorms { mut max_error, mut relative_l2, .. } = errors_of(&outputs);
        let elements = output_rows(problem, inputs).len().saturating_mul(problem.value_dim);
        if is_narrow && elements <= FEW_ELEMENTS {
            for way in 0..WAYS {
                let errors = errors_of(&attend::<f32>(problem, inputs, WeightRounding::Scaled(way), None).0);
                max_error = max_error.max(errors.max_error);
                relative_l2 = relative_l2.max(errors.relative_l2);
            }
        }
        let lse: Vec<f64> = outputs.lse.iter().flatten().map(|&value| f64::from(value)).collect();
        Ok(Self {
            max_error,
            relative_l2,
            lse: ErrorNorms::measure(&lse, &expected.lse).max_error,
            relative_bias: if relative_bias.is_finite() { relative_bias } else { 0.0 },
        })
    }
}

/// Errors over all elements whose expected and actual values are both finite.
pub(crate) struct ErrorNorms {
    pub(crate) max_error: f64,
    pub(crate) worst: Option<usize>,
    pub(crate) relative_l2: f64,
    /// The projection of the errors on the expected output, over its norm.
    pub(crate) relative_bias: f64,
}

fn squared_norm(values: &[f64]) -> f64 {
    values.iter().filter(|value| value.is_finite()).map(|value| value * value).sum()
}

impl ErrorNorms {
    pub(crate) fn measure(actual: &[f64], expected: &[f64]) -> Self {
        let (mut max_error, mut worst) = (0.0, None);
        let (mut squared_errors, mut squared_expected, mut projection) = (0.0, 0.0, 0.0);
        for (index, (&actual, &expected)) in actual.iter().zip(expected).enumerate() {
            if !(actual.is_finite() && expected.is_finite()) {
                continue;
            }
            let error = (actual - expected).abs();
            if worst.is_none() || error > max_error {
                (max_error, worst) = (error, Some(index));
            }
            squared_errors += error * error;
            squared_expected += expected * expected;
            projection += (actual - expected) * expected;
        }
        let relative_l2 = if squared_errors == 0.0 { 0.0 } else { (squared_errors / squared_expected).sqrt() };
        let relative_bias = if projection == 0.0 { 0.0 } else { projection / squared_expected };
        Self { max_error, worst, relative_l2, relative_bias }
    }
}

/// The arithmetic of the accumulator.
trait Real: ExpressionReal + Send + Sync {
    fn from_f64(value: f64) -> Self;
    fn to_f64(self) -> f64;
    fn exp(self) -> Self;
    fn ln(self) -> Self;
    fn tanh(self) -> Self;
}

macro_rules! real {
    ($type:ident) => {
        impl Real for $type {
            fn from_f64(value: f64) -> Self {
                value as $type
            }
            fn to_f64(self) -> f64 {
                self as f64
            }
            fn exp(self) -> Self {
                $type::exp(self)
            }
            fn ln(self) -> Self {
                $type::ln(self)
            }
            fn tanh(self) -> Self {
                $type::tanh(self)
            }
        }
    };
}
real!(f32);
real!(f64);

/// The log-sum-exp of scores in base e.
fn lse<R: Real>(scores: &[R]) -> R {
    let (zero, nothing) = (R::from_f64(0.0), R::from_f64(f64::NEG_INFINITY));
    let maximum = scores.iter().fold(nothing, |left, &right| if right > left { right } else { left });
    let shift = if maximum > nothing { maximum } else { zero };
    shift + scores.iter().fold(zero, |sum, &score| sum + (score - shift).exp()).ln()
}

/// The number to which weights are relative when they are rounded. All are right.
#[derive(Clone, Copy, Debug)]
enum WeightRounding {
    /// The sum of the row; of 8-bit weights, and of those with scales, the largest.
    Usual,
    /// One of the ways of [`Scales`]: the row max, or a multiple of the sum.
    Scaled(usize),
}

/// The outputs, and, if expected values are given, the leaning of rounded weights to one side.
fn attend<R: Real>(
    problem: &Problem,
    inputs: &Inputs,
    rounding: WeightRounding,
    expected: Option<&Expected>,
) -> (Outputs, Leaning) {
    let strides = problem.strides();
    let converted = |values: Vec<f64>| values.into_iter().map(R::from_f64).collect::<Vec<R>>();
    let operands = Operands {
        problem,
        inputs,
        rounding,
        query: converted(inputs.query.dense(problem.query_shape(), strides.query)),
        key: converted(inputs.key.dense(problem.key_shape(), strides.key)),
        value: converted(inputs.value.dense(problem.value_shape(), strides.value)),
    };
    let rows = output_rows(problem, inputs);
    let answers: Vec<RowAnswer<R>> = rows
        .par_iter()
        .map(|(sequence, at)| {
            let first = output_row(problem, sequence, *at) * problem.value_dim;
            let expected = expected.map(|expected| &expected.output[first..first + problem.value_dim]);
            operands.row(sequence, *at, expected)
        })
        .collect();

    let (mut outputs, mut leaning) = (Outputs::poisoned(problem), Leaning::default());
    for ((sequence, at), answer) in rows.into_iter().zip(answers) {
        let RowAnswer { output, lse, leaning: of_row } = answer;
        leaning += of_row;
        let (batch, row) = sequence.query_row(at.row);
        let start = strides.output.row_start(batch, at.head, row);
        for (column, element) in output.into_iter().enumerate() {
            outputs.output.set(start + column, element.to_f64());
        }
        if let Some(all) = &mut outputs.lse {
            all[output_row(problem, &sequence, at)] = lse.to_f64() as f32;
        }
    }
    (outputs, leaning)
}

/// Keys with their weights.
fn pairs<R: Real>(keys: &[usize], weights: &[R]) -> impl Iterator<Item = (usize, R)> {
    keys.iter().copied().zip(weights.iter().copied())
}

struct RowAnswer<R> {
    output: Vec<R>,
    lse: R,
    leaning: Leaning,
}

struct Operands<'a, R> {
    problem: &'a Problem,
    inputs: &'a Inputs,
    rounding: WeightRounding,
    query: Vec<R>,
    key: Vec<R>,
    value: Vec<R>,
}

impl<R: Real> Operands<'_, R> {
    /// The output and the log-sum-exp of one row, and, if expected values are given, the leaning of its weights.
    fn row(&self, sequence: &Sequence<'_>, at: Element, expected: Option<&[f64]>) -> RowAnswer<R> {
        let (problem, zero) = (self.problem, R::from_f64(0.0));
        let nothing = R::from_f64(f64::NEG_INFINITY);
        let keys = sequence.attended_keys(problem, at.row);
        let place = (at.batch, at.head, at.row);
        let keys: Vec<usize> = match problem.mask_mod {
            Some(mask_mod) => mask_mod.attended(self.inputs.views().tables(), place, keys),
            None => keys.collect(),
        };
        let mut scores: Vec<R> = keys.iter().map(|&j| self.score(sequence, at, j)).collect();
        if let Some(score_mod) = problem.score_mod {
            score_mod.apply_to_row(self.inputs.views().tables(), place, &keys, &mut scores);
        }
        let sink = self.inputs.sinks.as_ref().map(|sinks| R::from_f64(f64::from(sinks[at.head])));
        let maximum =
            scores.iter().copied().chain(sink).fold(nothing, |left, right| if right > left { right } else { left });
        let shift = if maximum > nothing { maximum } else { zero };
        let mut sum = sink.map_or(zero, |sink| (sink - shift).exp());
        let weights: Vec<R> = scores.iter().map(|&score| (score - shift).exp()).collect();
        for &weight in &weights {
            sum = sum + weight;
        }

        let mut output = vec![zero; problem.value_dim];
        let mut leaning = Leaning::default();
        if sum == zero {
            return RowAnswer { output, lse: nothing, leaning };
        }
        let value_row =
            |j: usize| &self.value[self.key_row(sequence, at, j) * problem.value_dim..][..problem.value_dim];
        let Some((terms, unit)) = self.scaled_weights(sequence, at, &keys, &weights) else {
            if let Some(expected) = expected {
                leaning = self.leaning(sum, pairs(&keys, &weights), expected, value_row);
            }
            let way = self.way(sum);
            let divisor = way.map_or(sum, |scale| R::from_f64(1.0) / scale);
            for (j, weight) in keys.into_iter().zip(weights) {
                let weight = R::from_f64(problem.dtype.round((weight / divisor).to_f64()));
                for (element, &value) in output.iter_mut().zip(value_row(j)) {
                    *element = *element + weight * value;
                }
            }
            if let Some(scale) = way {
                for element in &mut output {
                    *element = *element / (scale * sum);
                }
            }
            return self.answer((shift, sum), &scores, output, leaning);
        };
        if let Some(expected) = expected {
            leaning = self.leaning(sum / unit, pairs(&keys, &terms), expected, value_row);
        }
        let largest = if problem.dtype.is_float8() { LARGEST_WEIGHT } else { 1.0 };
        let largest = R::from_f64(largest) * self.way(sum / unit).unwrap_or(R::from_f64(1.0));
        for (j, term) in keys.into_iter().zip(terms) {
            let weight = R::from_f64(problem.dtype.round((term * largest).to_f64()));
            for (element, &value) in output.iter_mut().zip(value_row(j)) {
                *element = *element + weight * value;
            }
        }
        let factor = unit / sum / largest;
        for element in &mut output {
            *element = *element * factor;
        }
        self.answer((shift, sum), &scores, output, leaning)
    }

    /// The answer of a row, given the shift of its scores and the sum of its weights.
    fn answer(&self, (shift, sum): (R, R), scores: &[R], output: Vec<R>, leaning: Leaning) -> RowAnswer<R> {
        let form = self.problem.lse_form;
        let lse = if form.includes_sink { shift + sum.ln() } else { lse(scores) };
        RowAnswer { output, lse: lse * R::from_f64(form.base.per_natural()), leaning }
    }

    /// The factor of weights, of which the largest is 1, before they are rounded; `None` for the usual one.
    fn way(&self, sum: R) -> Option<R> {
        match self.rounding {
            WeightRounding::Usual => None,
            WeightRounding::Scaled(way) => {
                let scales = Scales::new(self.problem.dtype, sum.to_f64() as f32);
                Some(R::from_f64(f64::from(scales.of(way))))
            }
        }
    }

    /// Weights times the scales of their values, relative to the largest of these products, and that product. `None` where
    /// there is nothing to scale and weights are not of 8 bits.
    fn scaled_weights(
        &self,
        sequence: &Sequence<'_>,
        at: Element,
        keys: &[usize],
        weights: &[R],
    ) -> Option<(Vec<R>, R)> {
        let scale = self.inputs.v_scale.as_ref().map(Scale::view);
        if scale.is_none() && !self.problem.dtype.is_float8() {
            return None;
        }
        let (zero, key_head) = (R::from_f64(0.0), self.problem.key_head(at.head));
        let of_key = |key| scale.map_or(1.0, |scale| f64::from(scale.of_key(sequence, key, key_head)));
        let terms: Vec<R> = keys.iter().zip(weights).map(|(&key, &weight)| weight * R::from_f64(of_key(key))).collect();
        let largest = terms.iter().fold(zero, |left, &right| if right > left { right } else { left });
        let unit = if largest > zero && largest.to_f64().is_finite() { largest } else { R::from_f64(1.0) };
        Some((terms.into_iter().map(|term| term / unit).collect(), unit))
    }

    /// The leaning of rounded weights, where all expected values are finite.
    fn leaning<'b>(
        &self,
        sum: R,
        weights: impl Iterator<Item = (usize, R)>,
        expected: &[f64],
        value_row: impl Fn(usize) -> &'b [R],
    ) -> Leaning
    where
        R: 'b,
    {
        let mut leaning = Leaning::default();
        if expected.iter().all(|value| value.is_finite()) {
            let (dtype, sum) = (self.problem.dtype, sum.to_f64());
            let scales = Scales::new(dtype, sum as f32);
            for (j, weight) in weights {
                let value = value_row(j).iter().zip(expected).map(|(value, expected)| value.to_f64() * expected).sum();
                leaning.add_weight(dtype, &scales, weight.to_f64() as f32, value);
            }
            leaning.divide(sum);
        }
        leaning
    }

    /// The index of a key of a sequence among the rows of key and value.
    fn key_row(&self, sequence: &Sequence<'_>, at: Element, key: usize) -> usize {
        let shape = self.problem.key_shape();
        let (batch, row) = sequence.key_row(key);
        (batch * shape.heads + self.problem.key_head(at.head)) * shape.rows + row
    }

    fn score(&self, sequence: &Sequence<'_>, at: Element, j: usize) -> R {
        let (problem, head_dim) = (self.problem, self.problem.head_dim);
        let query_start = output_row(problem, sequence, at) * head_dim;
        let query = &self.query[query_start..query_start + head_dim];
        let key_start = self.key_row(sequence, at, j) * head_dim;
        let key = &self.key[key_start..key_start + head_dim];
        let product = query.iter().zip(key).fold(R::from_f64(0.0), |sum, (&query, &key)| sum + query * key);
        let mut score = product * R::from_f64(problem.scale);
        let views = self.inputs.views();
        if let Some(scale) = views.q_scale {
            score = score * R::from_f64(f64::from(scale.of_query(problem, sequence, at.row, at.head)));
        }
        if let Some(scale) = views.k_scale {
            score = score * R::from_f64(f64::from(scale.of_key(sequence, j, problem.key_head(at.head))));
        }
        if let Some(softcap) = problem.softcap.map(|softcap| R::from_f64(f64::from(softcap))) {
            score = softcap * (score / softcap).tanh();
        }
        if let Some(slopes) = &self.inputs.alibi_slopes {
            let position = at.row as isize + sequence.position_offset(problem);
            let distance = R::from_f64((position - j as isize).abs() as f64);
            score = score - R::from_f64(f64::from(slopes[at.head])) * distance;
        }
        if let Some(bias) = &self.inputs.bias {
            score = score + R::from_f64(f64::from(bias.data[bias.strides.index(at.batch, at.head, at.row, j)]));
        }
        score
    }
}
