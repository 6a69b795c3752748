//! A model of tensor-core kernels on the host: their online softmax, the rounding of P, and the addition of tensor cores.
//!
//! A row goes over the keys tile by tile. Products are added as the simulator adds them ([`TensorSum`]), one instruction's
//! depth at a time; everything else is `f32`:
//!
//! 1. scores of a tile, times scales; `row_max` and the row scale of what was summed before;
//! 2. P as powers of two, at most 1; their sum, before they are rounded;
//! 3. P rounded: to the 16-bit type, split in `tf32`, or 2^8 times P to e4m3. Scales of V that differ between keys
//!    multiply P first, relative to the largest;
//! 4. P times V, in one level or two: into the accumulator of the row for all keys, or into one of the tile, which is
//!    then added to the row's by ordinary additions.
//!
//! The power of two is rounded once; `ex2.approx` of a GPU is off by up to two units in the last place more.

use core::fmt;

use flashcore_ir::{Fp8, Type};
use flashcore_kernels::Tf32Products;
use flashcore_problem::{DType, InputViews, Inputs, Problem, Sequence};
use flashcore_sim::{Factor, TensorSum};
use rayon::prelude::*;

/// Keys of a tile of the models.
pub const KEY_TILE: usize = 128;
/// The largest weight where weights are e4m3: a power of two below the largest number, 448.
const LARGEST_WEIGHT: f32 = 256.0;
/// Depth of an instruction for `tf32`, and the steps that a chain of them has.
const TF32_DEPTH: usize = 8;
const TF32_CHAIN: usize = 4;

/// Accumulators of P times V.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Levels {
    /// One accumulator of the row, in the tensor core, for all keys.
    One,
    /// One of each key tile in the tensor core, added to that of the row in `f32`.
    Two,
}

/// Factors of the products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Products {
    /// `f32` as one or two `tf32`, in short chains.
    Tf32(Tf32Products),
    /// The 16-bit type of the query; codes of 8 bits are converted to it, exactly.
    Half,
    /// e4m3 weights and query; codes of key and value as they are.
    Fp8(Levels),
}

/// A tensor-core kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Model {
    /// Factors of the products.
    pub products: Products,
    /// The addition of the tensor core.
    pub sum: TensorSum,
}

impl fmt::Display for Model {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bits = match (self.sum, self.products) {
            (TensorSum::Exact, _) => "exact sums".to_owned(),
            (TensorSum::Truncating { fp8_fraction, .. }, Products::Fp8(_)) => format!("{fp8_fraction} bits"),
            (TensorSum::Truncating { fraction, .. }, _) => format!("{fraction} bits"),
        };
        match self.products {
            Products::Tf32(Tf32Products::One) => write!(formatter, "model 1xTF32, {bits}"),
            Products::Tf32(Tf32Products::Three) => write!(formatter, "model 3xTF32, {bits}"),
            Products::Half => write!(formatter, "model, {bits}"),
            Products::Fp8(Levels::One) => write!(formatter, "model one level, {bits}"),
            Products::Fp8(Levels::Two) => write!(formatter, "model two levels, {bits}"),
        }
    }
}

/// Inputs as `f32`, contiguous: codes of 8 bits without their scales.
struct Operands<'a> {
    problem: &'a Problem,
    views: InputViews<'a>,
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
}

impl Model {
    /// The output, rounded to its type, contiguous.
    ///
    /// # Panics
    ///
    /// When the problem is not valid, or has more than query, key, value and scales: no mask, no packed or paged sequences.
    pub fn attend(&self, problem: &Problem, inputs: &Inputs) -> Vec<f64> {
        assert_eq!(inputs.validate(problem), Ok(()), "a model attends valid inputs");
        let plain = without_features(problem);
        assert_eq!(*problem, plain, "a model has no features");
        let narrow = |values: Vec<f64>| values.into_iter().map(|value| value as f32).collect();
        let strides = problem.strides();
        let operands = Operands {
            problem,
            views: inputs.views(),
            query: narrow(inputs.query.dense(problem.query_shape(), strides.query)),
            key: narrow(inputs.key.dense(problem.key_shape(), strides.key)),
            value: narrow(inputs.value.dense(problem.value_shape(), strides.value)),
        };
        let sequences: Vec<Sequence<'_>> = operands.views.sequences(problem).collect();
        let rows = problem.batch * problem.query_heads * problem.query_length;
        let rows: Vec<Vec<f64>> = (0..rows)
            .into_par_iter()
            .map(|index| {
                let (head, row) = (index / problem.query_length, index % problem.query_length);
                let sequence = &sequences[head / problem.query_heads];
                self.row(&operands, sequence, head % problem.query_heads, row)
            })
            .collect();
        rows.concat()
    }

    fn row(&self, operands: &Operands<'_>, sequence: &Sequence<'_>, head: usize, row: usize) -> Vec<f64> {
        let Operands { problem, views, query, key, value } = operands;
        let (head_dim, value_dim, keys) = (problem.head_dim, problem.value_dim, problem.key_length);
        let types = problem.dtypes();
        let query_row = (sequence.index * problem.query_heads + head) * problem.query_length + row;
        let query = &query[query_row * head_dim..][..head_dim];
        let key_head = problem.key_head(head);
        let first_key = (sequence.index * problem.key_heads + key_head) * keys;
        let key = &key[first_key * head_dim..][..keys * head_dim];
        let value = &value[first_key * value_dim..][..keys * value_dim];

        let query_scale = views.q_scale.map_or(1.0, |scale| scale.of_query(problem, sequence, row, head));
        let key_scale = |key| views.k_scale.map_or(1.0, |scale| scale.of_key(sequence, key, key_head));
        let value_scale = |key| views.v_scale.map_or(1.0, |scale| scale.of_key(sequence, key, key_head));
        let largest_scale = (0..keys).map(value_scale).fold(f32::MIN_POSITIVE, f32::max);
        let unit = (problem.scale * std::f64::consts::LOG2_E) as f32 * query_scale;

        let mut row_max = f32::NEG_INFINITY;
        let mut row_sum = 0.0_f32;
        let mut sums = vec![0.0_f32; value_dim];
        for tile in (0..keys).step_by(KEY_TILE) {
            let tile = tile..keys.min(tile + KEY_TILE);
            let score = |j: usize| {
                let dot = self.dot(types.query, types.key_value, query, &key[j * head_dim..][..head_dim]);
                dot * (unit * key_scale(j))
            };
            let scores: Vec<f32> = tile.clone().map(score).collect();
            let new_max = scores.iter().copied().fold(row_max, f32::max);
            let row_scale = exp2(row_max - new_max);
            row_max = new_max;
            let weights: Vec<f32> = scores.iter().map(|score| exp2(score - row_max)).collect();
            row_sum = row_sum * row_scale + weights.iter().sum::<f32>();
            let scaled = weights.iter().zip(tile.clone()).map(|(weight, j)| weight * (value_scale(j) / largest_scale));
            let rounded: Vec<f32> = match self.products {
                Products::Tf32(_) => scaled.collect(),
                Products::Half => scaled.map(|weight| types.query.round(f64::from(weight)) as f32).collect(),
                Products::Fp8(_) => {
                    scaled.map(|weight| DType::E4m3.round(f64::from(weight * LARGEST_WEIGHT)) as f32).collect()
                }
            };
            let value = &value[tile.start * value_dim..tile.end * value_dim];
            for (column, sum) in sums.iter_mut().enumerate() {
                let column = value[column..].iter().step_by(value_dim).copied();
                *sum = self.accumulate(types.key_value, types.query, *sum * row_scale, &rounded, column);
            }
        }
        let weight_unit = if matches!(self.products, Products::Fp8(_)) { LARGEST_WEIGHT } else { 1.0 };
        let unit = largest_scale / (weight_unit * row_sum);
        sums.into_iter().map(|sum| types.output.round(f64::from(sum * unit))).collect()
    }

    /// A score before its scales: query times key.
    fn dot(&self, query_type: DType, key_type: DType, query: &[f32], key: &[f32]) -> f32 {
        match self.products {
            Products::Tf32(products) => self.tf32_chains(products, 0.0, query, key.iter().copied()),
            Products::Half => self.steps(half_factors(query_type), 0.0, query, key.iter().copied()),
            Products::Fp8(_) => {
                self.steps(([fp8_factor(query_type), fp8_factor(key_type)], 32), 0.0, query, key.iter().copied())
            }
        }
    }

    /// A column of the output after one more tile: P times V, added to what there is.
    fn accumulate(
        &self,
        value_type: DType,
        query_type: DType,
        before: f32,
        weights: &[f32],
        values: impl Iterator<Item = f32> + Clone,
    ) -> f32 {
        let fp8 = ([fp8_factor(DType::E4m3), fp8_factor(value_type)], 32);
        match self.products {
            Products::Tf32(products) => self.tf32_chains(products, before, weights, values),
            Products::Half => self.steps(half_factors(query_type), before, weights, values),
            Products::Fp8(Levels::One) => self.steps(fp8, before, weights, values),
            Products::Fp8(Levels::Two) => before + self.steps(fp8, 0.0, weights, values),
        }
    }

    /// Instructions of a depth, one after the other into one accumulator.
    fn steps(
        &self,
        (factors, depth): ([Factor; 2], usize),
        start: f32,
        left: &[f32],
        mut right: impl Iterator<Item = f32> + Clone,
    ) -> f32 {
        let mut sum = start;
        let mut buffer = [0.0_f64; 32];
        for left in left.chunks(depth) {
            for (slot, right) in buffer.iter_mut().zip(right.by_ref().take(left.len())) {
                *slot = f64::from(right);
            }
            let products = left.iter().zip(&buffer).map(|(left, right)| (f64::from(*left), *right));
            sum = self.sum.add(factors, sum, products);
        }
        sum
    }

    /// Chains of four `tf32` steps, and beside each one of the products with the low parts, added in `f32`.
    fn tf32_chains(
        &self,
        products: Tf32Products,
        start: f32,
        left: &[f32],
        right: impl Iterator<Item = f32> + Clone,
    ) -> f32 {
        let factors = ([Factor::of(Type::Tf32); 2], TF32_DEPTH);
        let split = |number: f32| {
            let high = to_tf32(number);
            (high, to_tf32(number - high))
        };
        let (left_high, left_low): (Vec<f32>, Vec<f32>) = left.iter().map(|&number| split(number)).unzip();
        let (right_high, right_low): (Vec<f32>, Vec<f32>) = right.map(split).unzip();
        let chain = TF32_DEPTH * TF32_CHAIN;
        let mut sum = start;
        for first in (0..left.len()).step_by(chain) {
            let chain = first..left.len().min(first + chain);
            let of = |left: &[f32], right: &[f32], start: f32| self.steps(factors, start, left, right.iter().copied());
            let (left_high, right_high) = (&left_high[chain.clone()], &right_high[chain.clone()]);
            let high = of(left_high, right_high, 0.0);
            sum += match products {
                Tf32Products::One => high,
                Tf32Products::Three => {
                    let mut low = 0.0;
                    for step in (0..chain.len()).step_by(TF32_DEPTH) {
                        let here = step..chain.len().min(step + TF32_DEPTH);
                        low = of(&left_low[chain.clone()][here.clone()], &right_high[here.clone()], low);
                        low = of(&left_high[here.clone()], &right_low[chain.clone()][here], low);
                    }
                    high + low
                }
            };
        }
        sum
    }
}

/// The problem of the same sizes, types and scales, without features.
fn without_features(problem: &Problem) -> Problem {
    let Problem { batch, query_heads, query_length, head_dim, dtype, .. } = *problem;
    let plain = Problem::new(batch, query_heads, query_length, head_dim, dtype).with_dtypes(problem.dtypes());
    let mut plain = plain.with_q_scale(problem.q_scale).with_k_scale(problem.k_scale).with_v_scale(problem.v_scale);
    (plain.key_heads, plain.key_length, plain.value_dim) = (problem.key_heads, problem.key_length, problem.value_dim);
    plain.scale = problem.scale;
    plain
}

/// Factors of a 16-bit type, and the depth of their instruction.
fn half_factors(dtype: DType) -> ([Factor; 2], usize) {
    let register = if dtype == DType::Bf16 { Type::Bf16x2 } else { Type::F16x2 };
    ([Factor::of(register); 2], 16)
}

fn fp8_factor(dtype: DType) -> Factor {
    Factor::of_fp8(if dtype == DType::E5m2 { Fp8::E5m2 } else { Fp8::E4m3 })
}

fn exp2(exponent: f32) -> f32 {
    f64::from(exponent).exp2() as f32
}

/// An `f32` rounded to the ten fraction bits of `tf32`, ties away from zero.
fn to_tf32(number: f32) -> f32 {
    f32::from_bits((number.to_bits() + 0x1000) & 0xffff_e000)
}

#[cfg(test)]
mod tests {
    use flashcore_problem::{Tensor, reference};

    use super::*;
    use crate::lab::accuracy::{Distribution, Errors, Sample, Sizes};

    const H200: TensorSum = TensorSum::H200;

    fn fp8(levels: Levels, sum: TensorSum) -> Model {
        Model { products: Products::Fp8(levels), sum }
    }

    /// Equal scores and values of 1: each product is 2^8. A sum with 13 bits takes none any more from 2^22 on, which is
    /// that of 16,384 keys.
    #[test]
    fn one_level_stays_where_products_are_less_than_its_last_bit() {
        let check = |keys: usize, levels, expected: f64| {
            let mut problem = Problem::new(1, 1, 1, 8, DType::E4m3).with_out_dtype(Some(DType::F16));
            problem.key_length = keys;
            let ones = |count: usize| Tensor::from_values(DType::E4m3, &vec![1.0; count]);
            let inputs = Inputs::new(ones(8), ones(8 * keys), ones(8 * keys));
            assert_eq!(fp8(levels, H200).attend(&problem, &inputs), [expected; 8], "{keys} {levels:?}");
        };
        check(16_384, Levels::One, 1.0);
        check(32_768, Levels::One, 0.5);
        check(65_536, Levels::One, 0.25);
        check(65_536, Levels::Two, 1.0);
        check(333, Levels::One, 1.0);
        check(333, Levels::Two, 1.0);
    }

    /// With exact sums, a model differs from the reference of its type by the rounding of weights.
    #[test]
    fn models_with_exact_sums_are_like_the_reference() {
        let sizes = Sizes { heads: 2, queries: 3, keys: 300, head_dim: 64 };
        let sample = Sample::draw(Distribution::Gaussian, sizes, 5).expect("a sample");
        let check = |types: &str, products, bound: f64| {
            let types = types.parse().expect("types");
            for scales in [flashcore_problem::ScaleMode::KeyHead, flashcore_problem::ScaleMode::Token] {
                let options = flashcore_problem::Quantization::new(types, scales);
                let quantized = flashcore_problem::quantize(&sample.problem, &sample.inputs.views(), options);
                let quantized = quantized.expect("it can be quantised");
                let model = Model { products, sum: TensorSum::Exact };
                let actual = model.attend(&quantized.problem, &quantized.inputs);
                let expected = reference(&quantized.problem, &quantized.inputs).expect("it is valid").output;
                let (shape, strides) = (quantized.problem.output_shape(), quantized.problem.strides().output);
                let errors = Errors::measure(&actual, &expected.dense(shape, strides));
                assert!(errors.relative_l2 < bound, "{types} {scales}: {errors:?}");
            }
        };
        check("f32", Products::Tf32(Tf32Products::Three), 2e-6);
        check("f16", Products::Half, 1e-3);
        check("bf16 kv e4m3", Products::Half, 6e-3);
        // Both round weights, relative to different numbers: twice the square of 2^-4 / 3^(1/2), at most.
        check("e4m3 out bf16", Products::Fp8(Levels::One), 0.051);
        check("e4m3 out bf16", Products::Fp8(Levels::Two), 0.051);
    }

    /// Outputs shrink towards zero by what tensor cores cut off, more in one level than in two.
    #[test]
    fn sums_shrink_in_one_level() {
        let sizes = Sizes { heads: 1, queries: 2, keys: 8192, head_dim: 16 };
        let mut sample = Sample::draw(Distribution::Gaussian, sizes, 5).expect("a sample");
        for index in 0..sample.inputs.value.len() {
            sample.inputs.value.set(index, sample.inputs.value.get(index) + 1.0);
        }
        let sample = Sample::of(sample.problem, sample.inputs).expect("a sample");
        let types = "e4m3 out bf16".parse().expect("types");
        let options = flashcore_problem::Quantization::new(types, flashcore_problem::ScaleMode::Tensor);
        let quantized = flashcore_problem::quantize(&sample.problem, &sample.inputs.views(), options);
        let quantized = quantized.expect("it can be quantised");
        let bias = |model: Model| {
            let actual = model.attend(&quantized.problem, &quantized.inputs);
            Errors::measure(&actual, &sample.expected).projection_bias
        };
        let (one, two, exact) =
            (bias(fp8(Levels::One, H200)), bias(fp8(Levels::Two, H200)), bias(fp8(Levels::Two, TensorSum::Exact)));
        assert!(exact.abs() < 0.004, "{exact}");
        assert!((-0.008..exact).contains(&two), "{two}");
        assert!(one < -0.1, "{one}");
    }
}
