//! The bf16 microkernel against plain loops in `f64`; what it shares with others is in `microkernel/tests.rs`.

use super::pack::{self, DEPTH, HEADER, LANES, PAIRS};
use super::{Bf16Kernel, PairMultiplier, softmax};
use crate::microkernel::head::Head;
use crate::microkernel::prefetch::PrefetchPlan;
use crate::microkernel::tests::SoftmaxCase;
use crate::microkernel::{AccumulateArgs, LaneRows, MultiplyArgs, Operands, Products, padded};
use flashcore_problem::{DType, Shape, Strides, Tensor};

/// Calls a function of a kernel with each bf16 level that works here.
macro_rules! with_every_bf16_kernel {
    ($check:path) => {
        if let Some(kernel) = crate::bf16::avx512_bf16::detect() {
            $check(&kernel, "avx512bf16");
        }
        if let Some(kernel) = crate::bf16::amx::detect() {
            $check(&kernel, "amx");
        }
    };
}

/// Rows of numbers in `bf16`.
pub(super) struct Rows(Tensor, Shape);

impl Rows {
    pub(super) fn new(rows: usize, columns: usize, at: impl Fn(usize, usize) -> f64) -> Self {
        let values: Vec<f64> = (0..rows * columns).map(|index| at(index / columns, index % columns)).collect();
        Self(Tensor::from_values(DType::Bf16, &values), Shape { batch: 1, heads: 1, rows, columns })
    }

    /// Between -1 and 1, in no order.
    pub(super) fn scattered(rows: usize, columns: usize, seed: usize) -> Self {
        Self::new(rows, columns, |row, column| {
            let mixed = (row * 8191 + column * 131 + seed * 37 + 1) as u32;
            f64::from(mixed.wrapping_mul(2_654_435_761) >> 8) / f64::from(1 << 23) - 1.0
        })
    }

    pub(super) fn head(&self) -> Head<'_> {
        Head::new((&self.0).into(), (self.1, Strides::bhsd(self.1)), (0, 0), 0)
    }

    fn dense(&self) -> Vec<f64> {
        self.0.dense(self.1, Strides::bhsd(self.1))
    }

    fn at(&self, row: usize, column: usize) -> u16 {
        let bytes = &self.0.data[2 * (row * self.1.columns + column)..];
        u16::from_le_bytes([bytes[0], bytes[1]])
    }
}

/// The halves of a pair.
fn halves(pair: u32) -> [u16; 2] {
    [pair as u16, (pair >> 16) as u16]
}

#[test]
fn right_operands_are_pairs_of_columns_in_lanes() {
    fn check<M: PairMultiplier>(kernel: &Bf16Kernel<M>, name: &str) {
        for (rows, columns) in [(1, 1), (5, 2), (16, 31), (17, 32), (32, 33), (20, 100)] {
            let query = Rows::scattered(rows + 2, columns, 1);
            let lanes = padded(rows, LANES);
            let mut packed = vec![u32::MAX; Bf16Kernel::<M>::right_size(columns)];
            kernel.pack_right(query.head(), 2..2 + rows, lanes, &mut packed);
            for (index, &pair) in packed.iter().enumerate().take(padded(columns, DEPTH) / 2 * lanes) {
                let (first, lane) = (index / lanes * 2, index % lanes);
                let expected = [first, first + 1]
                    .map(|column| if lane < rows && column < columns { query.at(lane + 2, column) } else { 0 });
                assert_eq!(halves(pair), expected, "{name} {rows}x{columns}: pair {index}");
            }
        }
    }
    with_every_bf16_kernel!(check);
}

#[test]
fn left_operands_are_slabs_of_columns() {
    fn check<M: PairMultiplier>(kernel: &Bf16Kernel<M>, name: &str) {
        for (keys, columns) in [(1, 1), (5, 2), (16, 31), (17, 32), (32, 33), (100, 100)] {
            let key = Rows::scattered(keys + 2, columns, 1);
            let mut packed = vec![u32::MAX; Bf16Kernel::<M>::left_size(columns, keys)];
            kernel.pack_left(key.head(), 2..2 + keys, &mut packed);
            let rows = padded(keys, LANES);
            for (index, &pair) in packed.iter().enumerate() {
                let (slab, row, pair_index) = (index / PAIRS / rows, index / PAIRS % rows, index % PAIRS);
                if row < keys {
                    let first = slab * DEPTH + 2 * pair_index;
                    let expected = [first, first + 1].map(|at| if at < columns { key.at(row + 2, at) } else { 0 });
                    assert_eq!(halves(pair), expected, "{name} {keys}x{columns}: pair {index}");
                }
            }
        }
    }
    with_every_bf16_kernel!(check);
}

#[test]
fn transposed_operands_are_slabs_of_rows() {
    fn check<M: PairMultiplier>(kernel: &Bf16Kernel<M>, name: &str) {
        for (keys, columns) in [(1, 1), (5, 2), (31, 16), (32, 17), (33, 32), (100, 100)] {
            let value = Rows::scattered(keys + 2, columns, 1);
            let mut packed = vec![u32::MAX; Bf16Kernel::<M>::transposed_size(columns, keys)];
            kernel.pack_transposed(value.head(), 2..2 + keys, &mut packed);
            assert_eq!(pack::divisor(&packed), None);
            let rows = padded(columns, LANES);
            for (index, &pair) in packed[HEADER..].iter().enumerate() {
                let (slab, column, pair_index) = (index / PAIRS / rows, index / PAIRS % rows, index % PAIRS);
                let first = slab * DEPTH + 2 * pair_index;
                let expected = [first, first + 1]
                    .map(|key| if key < keys && column < columns { value.at(key + 2, column) } else { 0 });
                assert_eq!(halves(pair), expected, "{name} {keys}x{columns}: pair {index}");
            }
        }
    }
    with_every_bf16_kernel!(check);
}

/// Numbers that are no integers: sums are as exact as `f32` makes them in any order.
#[test]
fn scores_are_as_exact_as_their_sums() {
    fn check<M: PairMultiplier>(kernel: &Bf16Kernel<M>, name: &str) {
        for head_dim in [1, 31, 64, 100, 256] {
            for (first, keys) in [(0, 16), (32, 50), (64, 128)] {
                let (query, key) =
                    (Rows::scattered(M::PANEL_LANES, head_dim, 1), Rows::scattered(first + keys, head_dim, 2));
                let mut packed_query = vec![0; Bf16Kernel::<M>::right_size(head_dim)];
                let mut packed_key = vec![u32::MAX; Bf16Kernel::<M>::left_size(head_dim, first + keys)];
                kernel.pack_right(query.head(), 0..M::PANEL_LANES, M::PANEL_LANES, &mut packed_query);
                kernel.pack_left(key.head(), 0..first + keys, &mut packed_key);
                let mut scores = vec![9.0; padded(keys, LANES) * M::PANEL_LANES];
                let rows = first..first + keys;
                kernel.multiply(MultiplyArgs {
                    operands: &Operands { depth: head_dim, rows, left: &packed_key, right: &packed_query },
                    lanes: M::PANEL_LANES,
                    lane_rows: LaneRows::new(|_| keys),
                    factor: -0.3,
                    product: &mut scores,
                });
                let (query, key) = (query.dense(), key.dense());
                for (index, &score) in scores[..keys * M::PANEL_LANES].iter().enumerate() {
                    let (row, lane) = (first + index / M::PANEL_LANES, index % M::PANEL_LANES);
                    let products = (0..head_dim).map(|at| query[lane * head_dim + at] * key[row * head_dim + at]);
                    let exact = f64::from(-0.3_f32) * products.clone().sum::<f64>();
                    let bound =
                        f64::from(f32::EPSILON) * products.map(f64::abs).sum::<f64>() * (head_dim as f64).sqrt();
                    assert!((f64::from(score) - exact).abs() <= bound, "{name} {head_dim} ({row}, {lane}): {score}");
                }
            }
        }
    }
    with_every_bf16_kernel!(check);
}

/// The output of values that are all as small as `magnitude`, for random weights, next to NaNs that are not attended.
fn check_outputs<M: PairMultiplier>(kernel: &Bf16Kernel<M>, name: &str, magnitude: f64) {
    for (value_dim, keys) in [(1, 0..1), (17, 0..33), (64, 32..93), (100, 0..128), (48, 64..96)] {
        let scattered = Rows::scattered(130, value_dim, 1).dense();
        let value = Rows::new(130, value_dim, |row, column| {
            if row < keys.end { magnitude * scattered[row * value_dim + column] } else { f64::NAN }
        });
        let mut packed = vec![u32::MAX; Bf16Kernel::<M>::transposed_size(value_dim, 130)];
        kernel.pack_transposed(value.head(), 0..keys.end, &mut packed);
        if magnitude == 1.0 {
            // So that the padding of the last keys is a NaN.
            kernel.pack_transposed(value.head(), 0..130, &mut packed);
        }
        let mut scores = vec![0.0; 128 * M::PANEL_LANES];
        for (index, score) in scores.iter_mut().enumerate() {
            *score = ((index * 37) % 101) as f32 * 0.05 - 2.0;
        }
        let mut softmax = SoftmaxCase::new(vec![0.0; M::PANEL_LANES], vec![0.0; M::PANEL_LANES]);
        softmax.factor = 0.7;
        softmax.run(kernel, &mut scores, keys.len());
        let before = magnitude as f32;
        let mut output = vec![before; padded(value_dim, LANES) * M::PANEL_LANES];
        kernel.accumulate(AccumulateArgs {
            columns: value_dim,
            lanes: M::PANEL_LANES,
            rows: keys.clone(),
            lane_rows: LaneRows::new(|_| keys.len()),
            left: &packed,
            weights: &scores,
            packed_weights: &softmax.weights,
            lane_scale: &vec![0.5; M::PANEL_LANES],
            sums: &mut output,
            is_first: false,
            prefetch: PrefetchPlan::NOTHING,
        });
        let value = value.dense();
        for (index, &actual) in output[..value_dim * M::PANEL_LANES].iter().enumerate() {
            let (column, lane) = (index / M::PANEL_LANES, index % M::PANEL_LANES);
            let products = keys.clone().enumerate().map(|(row, key)| {
                let pair = halves(softmax.weights[row / 2 * M::PANEL_LANES + lane])[row % 2];
                let weight = f32::from_bits(u32::from(pair) << 16);
                assert!((weight - scores[row * M::PANEL_LANES + lane]).abs() <= weight / 256.0, "{name}: {weight}");
                f64::from(weight) * value[key * value_dim + column]
            });
            let exact = 0.5 * f64::from(before) + products.clone().sum::<f64>();
            let bound = 4.0 * f64::from(f32::EPSILON) * (magnitude + products.map(f64::abs).sum::<f64>());
            // Subnormal results are rounded to a multiple of the least of them, twice.
            let bound = bound + 2.0 * f64::from(f32::from_bits(1));
            let error = (f64::from(actual) - exact).abs();
            assert!(error <= bound, "{name} {value_dim} {keys:?} ({column}, {lane}): {actual:e}, {exact:e}");
        }
    }
}

#[test]
fn outputs_are_as_exact_as_their_sums() {
    fn check<M: PairMultiplier>(kernel: &Bf16Kernel<M>, name: &str) {
        check_outputs(kernel, name, 1.0);
    }
    with_every_bf16_kernel!(check);
}

/// The instructions flush subnormal elements, products and sums to zero; outputs do not show it.
#[test]
fn small_and_subnormal_values_are_not_lost() {
    fn check<M: PairMultiplier>(kernel: &Bf16Kernel<M>, name: &str) {
        for exponent in [-40, -61, -62, -63, -100, -120, -126, -128, -131] {
            check_outputs(kernel, name, 2.0_f64.powi(exponent));
        }
    }
    with_every_bf16_kernel!(check);
}

/// `2^x` of each exponent, as the kernel computes it for a weight.
fn powers<M: PairMultiplier>(kernel: &Bf16Kernel<M>, exponents: &[f32]) -> Vec<f32> {
    let keys = exponents.len().div_ceil(LANES);
    let mut powers = exponents.to_vec();
    powers.resize(keys * LANES, 0.0);
    // With a row max of zero nothing is subtracted.
    SoftmaxCase::new(vec![0.0; LANES], vec![0.0; LANES]).run(kernel, &mut powers, keys);
    powers.truncate(exponents.len());
    powers
}

/// A prime step, so that all ends of fractions come up; a step of 1 takes a minute and finds no larger error.
#[test]
fn powers_of_two_are_as_exact_as_stated() {
    fn check<M: PairMultiplier>(kernel: &Bf16Kernel<M>, name: &str) {
        const STEP: usize = 251;
        let (first, last) = ((-0.0_f32).to_bits(), (-126.0_f32).to_bits());
        let exponents: Vec<f32> = (first..=last).step_by(STEP).map(f32::from_bits).collect();
        let mut worst = 0.0_f64;
        for (&exponent, power) in exponents.iter().zip(powers(kernel, &exponents)) {
            assert!(power <= 1.0, "{name}: 2^{exponent} is {power}");
            let exact = f64::from(exponent).exp2();
            worst = worst.max((f64::from(power) - exact).abs() / exact);
        }
        assert!(worst < softmax::MAX_ERROR, "{name}: {worst:e}");
        assert!(worst > 0.9 * softmax::MAX_ERROR, "{name}: only {worst:e}");
    }
    with_every_bf16_kernel!(check);
}

#[test]
fn special_powers_of_two() {
    fn check<M: PairMultiplier>(kernel: &Bf16Kernel<M>, name: &str) {
        let exponents = [0.0, -0.0, -1.0, -126.0, -150.0, -1e9, f32::MIN, f32::NEG_INFINITY];
        let expected = [1.0, 1.0, 0.5, f32::MIN_POSITIVE, 0.0, 0.0, 0.0, 0.0];
        assert_eq!(powers(kernel, &exponents), expected, "{name}");
        for payload in [0x7FC0_0000, 0x7FA5_A5A5, 0xFFFF_FFFF_u32] {
            assert!(powers(kernel, &[f32::from_bits(payload)])[0].is_nan(), "{name} {payload:#x}");
        }
    }
    with_every_bf16_kernel!(check);
}

/// Lazy rescale: the row max is stale while scores rise by less than the threshold, and updated when they rise by more.
#[test]
fn the_row_max_is_updated_lazily() {
    fn check<M: PairMultiplier>(kernel: &Bf16Kernel<M>, name: &str) {
        for (score, expected, weight, factor) in
            [(3.0, 0.0, 8.0, 1.0), (4.0, 0.0, 16.0, 1.0), (5.0, 5.0, 1.0, 0.031_25)]
        {
            let mut softmax = SoftmaxCase::new(vec![0.0; LANES], vec![2.0; LANES]);
            softmax.factor = 2.0;
            let mut scores = vec![score / 2.0; LANES];
            softmax.run(kernel, &mut scores, 1);
            assert_eq!(
                (softmax.row_max, softmax.row_scale),
                (vec![expected; LANES], vec![factor; LANES]),
                "{name} {score}"
            );
            assert_eq!(
                (scores, softmax.row_sum),
                (vec![weight; LANES], vec![2.0 * factor + weight; LANES]),
                "{name} {score}"
            );
        }
    }
    with_every_bf16_kernel!(check);
}
