//! Every microkernel that this machine can run, against plain loops.

use crate::microkernel::head::Head;
use crate::microkernel::prefetch::PrefetchPlan;
use crate::microkernel::score::ScoreModifiers;
use crate::microkernel::{
    AccumulateArgs, LaneRows, MultiplyArgs, Operands, Products, Softmax, SoftmaxArgs, SoftmaxOutcome, padded,
};
use flashcore_problem::{DType, Shape, Strides, Tensor, TensorView};
use zerocopy::FromBytes;

/// Calls a function of a kernel with each that works here.
macro_rules! with_every_kernel {
    ($check:path) => {
        $crate::microkernel::tests::with_every_f32_kernel!($check);
        #[cfg(target_arch = "x86_64")]
        {
            if let Some(kernel) = crate::bf16::avx512_bf16::detect() {
                $check(&kernel, "avx512bf16");
            }
            if let Some(kernel) = crate::bf16::amx::detect() {
                $check(&kernel, "amx");
            }
        }
    };
}

/// Calls a function of a kernel with each that works here and computes in `f32` throughout.
macro_rules! with_every_f32_kernel {
    ($check:path) => {
        $check(&$crate::simd::portable::Portable::<f32>::new(), "portable");
        #[cfg(target_arch = "aarch64")]
        if let Some(kernel) = crate::simd::neon::Neon::detect() {
            $check(&kernel, "neon");
        }
        #[cfg(target_arch = "x86_64")]
        {
            if let Some(kernel) = crate::simd::avx2::Avx2::detect() {
                $check(&kernel, "avx2");
            }
            if let Some(kernel) = crate::simd::avx512::Avx512::detect() {
                $check(&kernel, "avx512");
            }
        }
    };
}

pub(crate) use {with_every_f32_kernel, with_every_kernel};

/// Small integers, so that every order of summation gives the same.
fn integers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|index| ((index * 7 + seed) % 11) as f32 - 5.0).collect()
}

/// Some rows of integers as a tensor, with their number of columns.
fn tensor(rows: usize, columns: usize, seed: usize) -> (Tensor, Shape) {
    let values: Vec<f64> = integers(rows * columns, seed).into_iter().map(f64::from).collect();
    (Tensor::from_values(DType::Bf16, &values), Shape { batch: 1, heads: 1, rows, columns })
}

pub(super) fn head((tensor, shape): &(Tensor, Shape)) -> Head<'_> {
    Head::new(tensor.into(), (*shape, Strides::bhsd(*shape)), (0, 0), 0)
}

pub(super) fn dense((tensor, shape): &(Tensor, Shape)) -> Vec<f64> {
    tensor.dense(*shape, Strides::bhsd(*shape))
}

/// One step of the online softmax of a row panel, with the row max and row sum before it and after it.
pub(crate) struct SoftmaxCase<K: Products> {
    pub(crate) row_max: Vec<f32>,
    pub(crate) row_sum: Vec<f32>,
    pub(crate) row_scale: Vec<f32>,
    pub(crate) weights: Vec<K::Packed>,
    pub(crate) updates_row_max: bool,
    pub(crate) factor: f32,
}

impl<K: Softmax<Real = f32>> SoftmaxCase<K> {
    pub(crate) fn new(row_max: Vec<f32>, row_sum: Vec<f32>) -> Self {
        let row_scale = vec![9.0; row_max.len()];
        Self { row_max, row_sum, row_scale, weights: Vec::new(), updates_row_max: true, factor: 1.0 }
    }

    /// Turns the scores of so many keys into weights.
    pub(crate) fn run(&mut self, kernel: &K, scores: &mut [f32], keys: usize) -> SoftmaxOutcome {
        self.run_lanes(kernel, scores, keys, LaneRows::new(|_| keys))
    }

    fn run_lanes(&mut self, kernel: &K, scores: &mut [f32], keys: usize, lane_rows: LaneRows) -> SoftmaxOutcome {
        // NaNs, which must be overwritten.
        let poison = K::Packed::read_from_bytes(&[0xFF; 8][..size_of::<K::Packed>()]).unwrap();
        self.weights = vec![poison; K::weight_size(keys)];
        kernel.online_softmax(&mut SoftmaxArgs {
            lanes: self.row_max.len(),
            rows: keys,
            lane_rows,
            updates_row_max: self.updates_row_max,
            factor: self.factor,
            scores,
            weights: &mut self.weights,
            keeps_weights: true,
            row_max: &mut self.row_max,
            row_sum: &mut self.row_sum,
            row_scale: &mut self.row_scale,
        })
    }
}

/// Packed from `bf16`, which all kernels read; the tiles are exactly as large as they must be.
#[test]
fn scores() {
    fn check<K: Softmax<Real = f32>>(kernel: &K, name: &str) {
        let first = K::ROW_ALIGNMENT;
        for head_dim in [1, 2, 5, 40, 64] {
            for keys in [0..1, 0..2, 0..7, first..first + 1, first..first + 37, 0..97] {
                for rows in [1, K::LANE_BLOCK, K::LANE_BLOCK + 1, K::PANEL_LANES] {
                    let (query, key) = (tensor(rows + 3, head_dim, 1), tensor(keys.end + 2, head_dim, 2));
                    let lanes = padded(rows, K::LANE_BLOCK);
                    let mut packed_query = vec![K::Packed::default(); K::right_size(head_dim)];
                    let mut packed_key = vec![K::Packed::default(); K::left_size(head_dim, keys.end)];
                    kernel.pack_right(head(&query), 3..3 + rows, lanes, &mut packed_query);
                    kernel.pack_left(head(&key), 2..2 + keys.end, &mut packed_key);
                    let mut scores = vec![9.0; padded(keys.len(), K::ROW_BLOCK) * lanes];
                    let (left, right) = (&packed_key[..], &packed_query[..]);
                    kernel.multiply(MultiplyArgs {
                        operands: &Operands { depth: head_dim, rows: keys.clone(), left, right },
                        lanes,
                        lane_rows: LaneRows::new(|_| keys.len()),
                        factor: 0.25,
                        product: &mut scores,
                    });
                    let (query, key) = (dense(&query), dense(&key));
                    for (row, index) in keys.clone().enumerate() {
                        for lane in 0..lanes {
                            let product = |column: usize| {
                                query[(lane + 3) * head_dim + column] * key[(index + 2) * head_dim + column]
                            };
                            let sum: f64 = if lane < rows { (0..head_dim).map(product).sum() } else { 0.0 };
                            let score = f64::from(scores[row * lanes + lane]);
                            assert!(score == 0.25 * sum, "{name} {head_dim} {keys:?} {rows} ({row}, {lane}): {score}");
                        }
                    }
                }
            }
        }
    }
    with_every_kernel!(check);
}

/// The weights are powers of two, which 16 bits hold exactly, and come from the kernel itself.
#[test]
fn outputs() {
    fn check<K: Softmax<Real = f32>>(kernel: &K, name: &str) {
        let first = K::ROW_ALIGNMENT;
        for value_dim in [1, 3, 8, 13, 64] {
            for keys in [0..1, 0..2, 0..7, first..first + 1, first..first + 37, 0..97] {
                for lanes in [K::LANE_BLOCK, K::PANEL_LANES] {
                    let value = tensor(keys.end + 2, value_dim, 1);
                    let mut packed = vec![K::Packed::default(); K::transposed_size(value_dim, keys.end)];
                    kernel.pack_transposed(head(&value), 2..2 + keys.end, &mut packed);
                    let mut scores: Vec<f32> = integers(padded(keys.len(), K::ROW_BLOCK) * lanes, 3);
                    let mut softmax = SoftmaxCase::<K>::new(vec![5.0; lanes], vec![1.0; lanes]);
                    softmax.run(kernel, &mut scores, keys.len());
                    let row_scale: Vec<f32> = (0..lanes).map(|lane| [1.0, 0.5, 0.25][lane % 3]).collect();
                    let value = dense(&value);
                    for is_first in [false, true] {
                        let before = integers(padded(value_dim, K::COLUMN_BLOCK) * lanes, 4);
                        let mut output = if is_first { vec![f32::NAN; before.len()] } else { before.clone() };
                        kernel.accumulate(AccumulateArgs {
                            columns: value_dim,
                            lanes,
                            rows: keys.clone(),
                            lane_rows: LaneRows::new(|_| keys.len()),
                            left: &packed,
                            weights: &scores,
                            packed_weights: &softmax.weights,
                            lane_scale: &row_scale,
                            sums: &mut output,
                            is_first,
                            prefetch: PrefetchPlan::NOTHING,
                        });
                        for (place, &actual) in output[..value_dim * lanes].iter().enumerate() {
                            let (column, lane) = (place / lanes, place % lanes);
                            let product = |(row, key): (usize, usize)| {
                                f64::from(scores[row * lanes + lane]) * value[(key + 2) * value_dim + column]
                            };
                            let sum: f64 = keys.clone().enumerate().map(product).sum();
                            let before = if is_first { 0.0 } else { before[place] * row_scale[lane] };
                            let is_same = f64::from(actual) == f64::from(before) + sum;
                            assert!(is_same, "{name} {value_dim} {keys:?} ({column}, {lane}) {is_first}: {actual}");
                        }
                    }
                }
            }
        }
    }
    with_every_kernel!(check);
}

/// Outputs become rows, each times its factor.
#[test]
fn outputs_as_rows() {
    fn check<K: Softmax<Real = f32>>(kernel: &K, name: &str) {
        for count in [1, 3, 8, 16, 17, 64, 70] {
            for lanes in [K::LANE_BLOCK, K::PANEL_LANES] {
                let columns = integers(count * lanes, 5);
                let factors: Vec<f32> = (0..lanes).map(|lane| lane as f32 * 0.5 - 3.0).collect();
                let mut rows = vec![9.0; count * lanes];
                kernel.transpose(&columns, &factors, &mut rows);
                for (place, &actual) in rows.iter().enumerate() {
                    let (lane, column) = (place / count, place % count);
                    let expected = columns[column * lanes + lane] * factors[lane];
                    assert!(actual == expected, "{name} {count} ({lane}, {column}): {actual} for {expected}");
                }
            }
        }
    }
    with_every_kernel!(check);
}

/// Scores in whole numbers have weights that are powers of two, and their sums are exact.
#[test]
fn weights() {
    fn check<K: Softmax<Real = f32>>(kernel: &K, name: &str) {
        let infinite = f32::NEG_INFINITY;
        for columns in [K::LANE_BLOCK, 2 * K::LANE_BLOCK] {
            for keys in [0, 1, 2, 3, 17] {
                let scores: Vec<f32> = (0..keys * columns).map(|index| (index * 5 % 13) as f32 - 9.0).collect();
                // Lanes that have attended nothing, something lower, the same and something higher.
                let old: Vec<f32> = (0..columns).map(|lane| [infinite, -20.0, 3.0, 8.0][lane % 4]).collect();
                let old_sum: Vec<f32> = old.iter().map(|&old| if old == infinite { 0.0 } else { 2.0 }).collect();
                let mut weights = scores.clone();
                let mut softmax = SoftmaxCase::<K>::new(old.clone(), old_sum.clone());
                softmax.run(kernel, &mut weights, keys);
                for lane in 0..columns {
                    let of_lane = || scores.iter().skip(lane).step_by(columns);
                    let largest = of_lane().copied().fold(old[lane], f32::max);
                    let factor = if largest == old[lane] { 1.0 } else { (old[lane] - largest).exp2() };
                    let expected: Vec<f32> = of_lane().map(|score| (score - largest).exp2()).collect();
                    let actual: Vec<f32> = weights.iter().skip(lane).step_by(columns).copied().collect();
                    assert_eq!(actual, expected, "{name} {keys} keys, lane {lane}");
                    let total = old_sum[lane] * factor + expected.iter().sum::<f32>();
                    let state = [softmax.row_max[lane], softmax.row_sum[lane], softmax.row_scale[lane]];
                    assert_eq!(state, [largest, total, factor], "{name} {keys} keys, lane {lane}");
                }
            }
        }
    }
    with_every_kernel!(check);
}

/// Lazy rescale: a row max that need not be updated is stale while scores rise a little above it, and the kernel reports when
/// they rise too far, however much: nothing but the scores is changed then. A lane that has attended nothing gets a row max
/// of its own.
#[test]
fn weights_above_a_stale_row_max() {
    fn check<K: Softmax<Real = f32>>(kernel: &K, name: &str) {
        let columns = 2 * K::LANE_BLOCK;
        for last_score in [-3.0, 4.0, 10.0, 12.0, 21.0, 127.0, 128.0, 129.0, 256.0, 300.0, 1e6, 1e30, f32::INFINITY] {
            let mut scores = vec![1.0; 3 * columns];
            scores[3 * columns - 1] = last_score;
            let mut softmax = SoftmaxCase::<K>::new(vec![0.0; columns], vec![8.0; columns]);
            softmax.updates_row_max = false;
            let outcome = softmax.run(kernel, &mut scores, 3);
            let state = (outcome, softmax.row_max[columns - 1], softmax.row_sum[columns - 1]);
            let expected = if last_score < 11.0 {
                (SoftmaxOutcome::Done, 0.0, 12.0 + last_score.exp2())
            } else {
                (SoftmaxOutcome::StaleRowMax, 0.0, 8.0)
            };
            assert_eq!(state, expected, "{name} {last_score}");
            let first = if expected.0 == SoftmaxOutcome::Done { (14.0, 1.0) } else { (8.0, softmax.row_scale[0]) };
            assert_eq!((softmax.row_sum[0], softmax.row_scale[0]), first, "{name} {last_score}");
        }
        let mut softmax = SoftmaxCase::<K>::new(vec![f32::NEG_INFINITY; columns], vec![0.0; columns]);
        softmax.updates_row_max = false;
        let outcome = softmax.run(kernel, &mut vec![-300.0; columns], 1);
        assert_eq!((outcome, softmax.row_max[0], softmax.row_sum[0]), (SoftmaxOutcome::Done, -300.0, 1.0), "{name}");
    }
    with_every_f32_kernel!(check);
}

/// Keys that the first lanes do not attend are left out of their sums, whatever is there.
#[test]
fn keys_of_the_first_lanes() {
    fn check<K: Softmax<Real = f32, Packed = f32>>(kernel: &K, name: &str) {
        let (lanes, keys, dim) = (K::PANEL_LANES, 37, 20);
        for first in [0, 1, 16, 37] {
            let lane_rows = LaneRows::new(|block| if block == 0 { first } else { keys });
            let (query, key) = (integers(dim * lanes, 1), integers(keys * dim, 2));
            let mut scores = vec![f32::NAN; keys * lanes];
            kernel.multiply(MultiplyArgs {
                operands: &Operands { depth: dim, rows: 0..keys, left: &key, right: &query },
                lanes,
                lane_rows,
                factor: 1.0,
                product: &mut scores,
            });
            let mut softmax = SoftmaxCase::<K>::new(vec![f32::NEG_INFINITY; lanes], vec![0.0; lanes]);
            let mut weights = scores.clone();
            softmax.run_lanes(kernel, &mut weights, keys, lane_rows);
            let mut output = vec![1.0; dim * lanes];
            kernel.accumulate(AccumulateArgs {
                columns: dim,
                lanes,
                rows: 0..keys,
                lane_rows,
                left: &key,
                weights: &scores,
                packed_weights: &[],
                lane_scale: &vec![1.0; lanes],
                sums: &mut output,
                is_first: false,
                prefetch: PrefetchPlan::NOTHING,
            });
            for lane in 0..lanes {
                let of_lane = if lane < K::LANE_BLOCK { first } else { keys };
                let score = |key_index: usize| -> f32 {
                    (0..dim).map(|at| query[at * lanes + lane] * key[key_index * dim + at]).sum()
                };
                for index in 0..of_lane {
                    assert!(scores[index * lanes + lane] == score(index), "{name} {first}: ({index}, {lane})");
                }
                let largest = (0..of_lane).map(score).fold(f32::NEG_INFINITY, f32::max);
                assert!(
                    softmax.row_max[lane] == largest && softmax.row_sum[lane].is_finite(),
                    "{name} {first}: row_max of {lane}"
                );
                for column in 0..dim {
                    let expected: f32 = 1.0 + (0..of_lane).map(|at| score(at) * key[at * dim + column]).sum::<f32>();
                    assert!(output[column * lanes + lane] == expected, "{name} {first}: ({column}, {lane})");
                }
            }
        }
    }
    with_every_f32_kernel!(check);
}

/// A NaN never becomes the row max and always shows in the row sum; nothing but minus infinity leaves a lane empty.
#[test]
fn weights_of_special_scores() {
    fn check<K: Softmax<Real = f32>>(kernel: &K, name: &str) {
        let (infinite, nan) = (f32::NEG_INFINITY, f32::NAN);
        for (scores, old, expected_maximum, expected_sum) in [
            ([infinite, infinite], infinite, infinite, 0.0),
            ([infinite, 3.0], infinite, 3.0, 1.0),
            ([infinite, infinite], 3.0, 3.0, 1.0),
            ([nan, 2.0], infinite, 2.0, nan),
            ([2.0, nan], 5.0, 5.0, nan),
            ([nan, nan], infinite, infinite, nan),
            ([f32::INFINITY, 0.0], 1.0, f32::INFINITY, nan),
        ] {
            let columns = K::LANE_BLOCK;
            let mut lanes = [vec![scores[0]; columns], vec![scores[1]; columns]].concat();
            let old_sum = if old == infinite { 0.0 } else { 1.0 };
            let mut softmax = SoftmaxCase::<K>::new(vec![old; columns], vec![old_sum; columns]);
            softmax.run(kernel, &mut lanes, 2);
            let same = |left: f32, right: f32| left == right || left.is_nan() && right.is_nan();
            for lane in 0..columns {
                assert!(
                    softmax.row_max[lane] == expected_maximum,
                    "{name} {scores:?}: row_max {}",
                    softmax.row_max[lane]
                );
                assert!(same(softmax.row_sum[lane], expected_sum), "{name} {scores:?}: sum {}", softmax.row_sum[lane]);
            }
        }
    }
    with_every_kernel!(check);
}

/// `2^x` of each exponent, as the kernel computes it for a weight.
fn powers<K: Softmax<Real = f32>>(kernel: &K, exponents: &[f32]) -> Vec<f32> {
    let columns = K::LANE_BLOCK;
    let mut powers = exponents.to_vec();
    powers.resize(exponents.len().div_ceil(columns) * columns, 0.0);
    // With a row max of zero nothing is subtracted.
    let mut softmax = SoftmaxCase::<K>::new(vec![0.0; columns], vec![0.0; columns]);
    let keys = powers.len() / columns;
    softmax.run(kernel, &mut powers, keys);
    powers.truncate(exponents.len());
    powers
}

/// The largest error of the powers of every `step`th `f32` from -126 to 0, relative to the value.
fn largest_error<K: Softmax<Real = f32>>(kernel: &K, step: usize) -> f64 {
    const CHUNK: usize = 1 << 16;
    let (first, last) = ((-0.0_f32).to_bits(), (-126.0_f32).to_bits());
    let mut worst = 0.0_f64;
    for start in (first..=last).step_by(step * CHUNK) {
        let exponents: Vec<f32> = (start..=last).step_by(step).take(CHUNK).map(f32::from_bits).collect();
        for (&exponent, power) in exponents.iter().zip(powers(kernel, &exponents)) {
            assert!(power <= 1.0, "2^{exponent} is {power}");
            let exact = f64::from(exponent).exp2();
            worst = worst.max((f64::from(power) - exact).abs() / exact);
        }
    }
    worst
}

/// A prime step, so that all ends of fractions come up; with a step of 1, which takes a minute, the errors are 9.7e-8 at
/// the portable level, 1.715e-7 with the shorter polynomial and 7.376e-8 with the longer.
#[test]
fn powers_of_two_are_as_exact_as_stated() {
    fn check<K: Softmax<Real = f32>>(kernel: &K, name: &str) {
        let bound = match name {
            "portable" => f64::from(f32::EPSILON),
            "avx512" => crate::simd::exp2::MAX_SHORT_ERROR,
            _ => crate::simd::exp2::MAX_ERROR,
        };
        let error = largest_error(kernel, 251);
        assert!(error < bound, "{name}: {error:e} is above {bound:e}");
    }
    with_every_f32_kernel!(check);
}

#[test]
fn special_powers_of_two() {
    fn check<K: Softmax<Real = f32>>(kernel: &K, name: &str) {
        let just_below = f32::from_bits((-126.0_f32).to_bits() + 1);
        let exponents = [0.0, -0.0, -1.0, -126.0, just_below, -127.0, -150.0, -1e9, f32::MIN, f32::NEG_INFINITY];
        let expected = [1.0, 1.0, 0.5, f32::MIN_POSITIVE, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&powers(kernel, &exponents)), bits(&expected), "{name}");
        for payload in [0x7FC0_0000, 0x7FA5_A5A5, 0xFFFF_FFFF_u32] {
            assert!(powers(kernel, &[f32::from_bits(payload)])[0].is_nan(), "{name} {payload:#x}");
        }
    }
    with_every_f32_kernel!(check);
}

/// Every bit pattern of the 16-bit types, and rows of every length.
#[test]
fn conversions() {
    fn check<K: Softmax<Real = f32, Packed = f32>>(kernel: &K, name: &str) {
        for dtype in [DType::F16, DType::Bf16] {
            let bytes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
            for count in (1..70).chain([1 << 16]) {
                let bytes = &bytes[..2 * count];
                let shape = Shape { batch: 1, heads: 1, rows: 1, columns: count };
                let row = Head::new(TensorView { dtype, data: bytes }, (shape, Strides::bhsd(shape)), (0, 0), 0);
                let mut values = vec![0.5_f32; count];
                kernel.pack_left(row, 0..1, &mut values);
                for (value, pair) in values.into_iter().zip(bytes.chunks_exact(2)) {
                    let exact = dtype.decode(pair) as f32;
                    let is_same = value.to_bits() == exact.to_bits() || value.is_nan() && exact.is_nan();
                    assert!(is_same, "{name} {dtype} {pair:?}: {value}");
                }
            }
        }
    }
    with_every_f32_kernel!(check);
}

/// The hyperbolic tangent of each number, as the kernel computes it for a softcap of 1, times `log2(e)`.
fn tangents<K: Softmax<Real = f32>>(kernel: &K, numbers: &[f32]) -> Vec<f64> {
    let lanes = K::LANE_BLOCK;
    let mut scores = numbers.to_vec();
    scores.resize(numbers.len().next_multiple_of(lanes), 0.0);
    kernel.modify_scores(ScoreModifiers {
        scores: &mut scores,
        lanes,
        lane_scales: None,
        tile_row_scales: None,
        softcap: Some(1.0),
        alibi: None,
        bias: None,
        base: std::f32::consts::LOG2_E,
    });
    scores.truncate(numbers.len());
    scores.into_iter().map(|score| f64::from(score) / f64::from(std::f32::consts::LOG2_E)).collect()
}

/// Every 251st `f32` of both signs up to 100, where the tangent has long been 1.
#[test]
fn tangents_are_as_exact_as_stated() {
    fn check<K: Softmax<Real = f32>>(kernel: &K, name: &str) {
        const CHUNK: usize = 1 << 16;
        let mut worst = 0.0_f64;
        for sign in [1.0, -1.0] {
            for start in (f32::MIN_POSITIVE.to_bits()..100.0_f32.to_bits()).step_by(251 * CHUNK) {
                let bits = (start..100.0_f32.to_bits()).step_by(251).take(CHUNK);
                let numbers: Vec<f32> = bits.map(|bits| sign * f32::from_bits(bits)).collect();
                for (&number, tangent) in numbers.iter().zip(tangents(kernel, &numbers)) {
                    let exact = f64::from(number).tanh();
                    worst = worst.max((tangent - exact).abs() / exact.abs());
                }
            }
        }
        // The multiplication by log2(e) rounds once more.
        let bound = crate::simd::tanh::MAX_ERROR + DType::F32.unit_roundoff();
        assert!(worst < bound, "{name}: {worst:e} is above {bound:e}");
        let special = tangents(kernel, &[0.0, f32::INFINITY, f32::NEG_INFINITY, 1e30, f32::NAN]);
        let one = tangents(kernel, &[50.0])[0];
        assert_eq!(special[..4], [0.0, one, -one, one], "{name}");
        assert!(special[4].is_nan(), "{name}");
    }
    with_every_kernel!(check);
}

#[test]
fn sizes_are_padded() {
    assert_eq!([0, 1, 8, 9].map(|size| padded(size, 8)), [0, 8, 8, 16]);
}

/// Every code of 8 bits, in whole vectors and in the rest of a row.
fn check_codes<K: Softmax<Real = f32, Packed = f32>>(kernel: &K, name: &str) {
    for dtype in DType::FLOAT8 {
        let data: Vec<u8> = (0..=u8::MAX).chain(0..=u8::MAX).collect();
        for (rows, columns) in [(1, 512), (7, 73), (102, 5)] {
            let shape = Shape { batch: 1, heads: 1, rows, columns };
            let tensor = (Tensor { dtype, data: data.clone() }, shape);
            let mut packed = vec![0.0; K::left_size(columns, rows)];
            kernel.pack_left(head(&tensor), 0..rows, &mut packed);
            for (code, &found) in data.iter().zip(&packed[..rows * columns]) {
                let expected = dtype.decode(&[*code]) as f32;
                let is_same = found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
                assert!(is_same, "{name} {dtype} {code:#04x}: {found} and not {expected}");
            }
            for row in 0..rows {
                let codes = &data[row * columns..][..columns];
                let are_finite = codes.iter().all(|code| dtype.decode(&[*code]).is_finite());
                assert_eq!(kernel.are_finite(head(&tensor), row..row + 1), are_finite, "{name} {dtype} row {row}");
            }
        }
    }
}

#[test]
fn codes_of_8_bits_are_widened_exactly() {
    with_every_f32_kernel!(check_codes);
}
