//! Every microkernel that this machine can run, against plain loops.

use crate::microkernel::{Microkernel, Order, Strip, Target, TileProduct};
use crate::portable::Portable;
use flashcore_problem::DType;

/// Calls a function of a kernel with each that works here.
macro_rules! with_every_kernel {
    ($check:path) => {
        $check(&Portable, "portable");
        #[cfg(target_arch = "x86_64")]
        {
            if let Some(kernel) = crate::avx2::Avx2::detect() {
                $check(&kernel, "avx2");
            }
            if let Some(kernel) = crate::avx512::Avx512::detect() {
                $check(&kernel, "avx512");
            }
        }
    };
}

/// Small integers, so that every order of summation gives the same.
fn integers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|index| ((index * 7 + seed) % 11) as f32 - 5.0).collect()
}

#[test]
fn products() {
    fn check<K: Microkernel<f32>>(kernel: &K, name: &str) {
        for row_blocks in 0..8 {
            for depth in [0, 1, 2, 5, 64] {
                for column_blocks in 1..=3 {
                    for order in [Order::RowByRow, Order::ColumnByColumn] {
                        for is_corrected in [false, true] {
                            let size = [row_blocks * K::ROW_BLOCK, depth, column_blocks * K::COLUMN_BLOCK];
                            check_product(kernel, name, size, order, is_corrected);
                        }
                    }
                }
            }
        }
    }
    with_every_kernel!(check);
}

/// The tiles are exactly as large as they must be, the left one but for its stride.
fn check_product<K: Microkernel<f32>>(kernel: &K, name: &str, size: [usize; 3], order: Order, is_corrected: bool) {
    const SPARE: usize = 3;
    let [rows, depth, columns] = size;
    let (lines, length) = match order {
        Order::RowByRow => (rows, depth),
        Order::ColumnByColumn => (depth, rows),
    };
    let stride = length + SPARE;
    let left = integers((lines * stride).saturating_sub(SPARE), 1);
    let right = integers(depth * columns, 2);
    let correction = integers(columns, 3);
    let before = integers(rows * columns, 4);
    let target = if is_corrected { Target::Corrected(&correction) } else { Target::Scaled(0.25) };
    let mut product = before.clone();
    kernel.multiply(TileProduct {
        rows,
        depth,
        columns,
        left: &left,
        left_stride: stride,
        left_order: order,
        right: &right,
        target,
        product: &mut product,
    });
    for row in 0..rows {
        for column in 0..columns {
            let left_of = |step: usize| match order {
                Order::RowByRow => left[row * stride + step],
                Order::ColumnByColumn => left[step * stride + row],
            };
            let sum: f32 = (0..depth).map(|step| left_of(step) * right[step * columns + column]).sum();
            let place = row * columns + column;
            let expected = if is_corrected { before[place] * correction[column] + sum } else { sum * 0.25 };
            assert!(product[place] == expected, "{name} {size:?} {order:?} at ({row}, {column}): {}", product[place]);
        }
    }
}

/// Scores in whole numbers have weights that are powers of two, and their sums are exact.
#[test]
fn weights() {
    fn check<K: Microkernel<f32>>(kernel: &K, name: &str) {
        let infinite = f32::NEG_INFINITY;
        for columns in [K::COLUMN_BLOCK, 2 * K::COLUMN_BLOCK] {
            for keys in [0, 1, 2, 3, 17] {
                let scores: Vec<f32> = (0..keys * columns).map(|index| (index * 5 % 13) as f32 - 9.0).collect();
                // Lanes that have seen nothing, something lower, the same and something higher.
                let old: Vec<f32> = (0..columns).map(|lane| [infinite, -20.0, 3.0, 8.0][lane % 4]).collect();
                let old_sum: Vec<f32> = old.iter().map(|&old| if old == infinite { 0.0 } else { 2.0 }).collect();
                let mut weights = scores.clone();
                let (mut maximum, mut sum, mut correction) = (old.clone(), old_sum.clone(), vec![9.0; columns]);
                kernel.weigh(Strip {
                    columns,
                    scores: &mut weights,
                    maximum: &mut maximum,
                    sum: &mut sum,
                    correction: &mut correction,
                });
                for lane in 0..columns {
                    let of_lane = || scores.iter().skip(lane).step_by(columns);
                    let largest = of_lane().copied().fold(old[lane], f32::max);
                    let factor = if largest == old[lane] { 1.0 } else { (old[lane] - largest).exp2() };
                    let expected: Vec<f32> = of_lane().map(|score| (score - largest).exp2()).collect();
                    let actual: Vec<f32> = weights.iter().skip(lane).step_by(columns).copied().collect();
                    assert_eq!(actual, expected, "{name} {keys} keys, lane {lane}");
                    let total = old_sum[lane] * factor + expected.iter().sum::<f32>();
                    let state = [maximum[lane], sum[lane], correction[lane]];
                    assert_eq!(state, [largest, total, factor], "{name} {keys} keys, lane {lane}");
                }
            }
        }
    }
    with_every_kernel!(check);
}

/// A NaN never becomes the maximum and always shows in the sum; nothing but minus infinity leaves a lane empty.
#[test]
fn weights_of_special_scores() {
    fn check<K: Microkernel<f32>>(kernel: &K, name: &str) {
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
            let columns = K::COLUMN_BLOCK;
            let mut lanes = [vec![scores[0]; columns], vec![scores[1]; columns]].concat();
            let old_sum = if old == infinite { 0.0 } else { 1.0 };
            let (mut maximum, mut sum, mut correction) =
                (vec![old; columns], vec![old_sum; columns], vec![9.0; columns]);
            kernel.weigh(Strip {
                columns,
                scores: &mut lanes,
                maximum: &mut maximum,
                sum: &mut sum,
                correction: &mut correction,
            });
            let same = |left: f32, right: f32| left == right || left.is_nan() && right.is_nan();
            for lane in 0..columns {
                assert!(maximum[lane] == expected_maximum, "{name} {scores:?}: maximum {}", maximum[lane]);
                assert!(same(sum[lane], expected_sum), "{name} {scores:?}: sum {}", sum[lane]);
            }
        }
    }
    with_every_kernel!(check);
}

/// `2^x` of each exponent, as the kernel computes it for a weight.
fn powers<K: Microkernel<f32>>(kernel: &K, exponents: &[f32]) -> Vec<f32> {
    let columns = K::COLUMN_BLOCK;
    let mut powers = exponents.to_vec();
    powers.resize(exponents.len().div_ceil(columns) * columns, 0.0);
    // With a maximum of zero nothing is subtracted.
    let (mut maximum, mut sum, mut correction) = (vec![0.0; columns], vec![0.0; columns], vec![0.0; columns]);
    kernel.weigh(Strip {
        columns,
        scores: &mut powers,
        maximum: &mut maximum,
        sum: &mut sum,
        correction: &mut correction,
    });
    powers.truncate(exponents.len());
    powers
}

/// The largest error of the powers of every `step`th `f32` from -126 to 0, relative to the value.
fn largest_error<K: Microkernel<f32>>(kernel: &K, step: usize) -> f64 {
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
/// the portable level and 7.376e-8 at both others.
#[test]
fn powers_of_two_are_as_exact_as_stated() {
    fn check<K: Microkernel<f32>>(kernel: &K, name: &str) {
        let bound = if name == "portable" { f64::from(f32::EPSILON) } else { crate::exp2::MAX_ERROR };
        let error = largest_error(kernel, 251);
        assert!(error < bound, "{name}: {error:e} is above {bound:e}");
    }
    with_every_kernel!(check);
}

#[test]
fn special_powers_of_two() {
    fn check<K: Microkernel<f32>>(kernel: &K, name: &str) {
        let just_below = f32::from_bits((-126.0_f32).to_bits() + 1);
        let exponents = [0.0, -0.0, -1.0, -126.0, just_below, -127.0, -150.0, -1e9, f32::MIN, f32::NEG_INFINITY];
        let expected = [1.0, 1.0, 0.5, f32::MIN_POSITIVE, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&powers(kernel, &exponents)), bits(&expected), "{name}");
        for payload in [0x7FC0_0000, 0x7FA5_A5A5, 0xFFFF_FFFF_u32] {
            assert!(powers(kernel, &[f32::from_bits(payload)])[0].is_nan(), "{name} {payload:#x}");
        }
    }
    with_every_kernel!(check);
}

/// Every bit pattern of the 16-bit types, and rows of every length.
#[test]
fn conversions() {
    fn check<K: Microkernel<f32>>(kernel: &K, name: &str) {
        for dtype in [DType::F16, DType::Bf16] {
            let bytes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
            for count in (0..70).chain([1 << 16]) {
                let bytes = &bytes[..2 * count];
                let mut values = vec![0.5_f32; count];
                kernel.load(dtype, bytes, &mut values);
                for (value, pair) in values.into_iter().zip(bytes.chunks_exact(2)) {
                    let exact = dtype.decode(pair) as f32;
                    let is_same = value.to_bits() == exact.to_bits() || value.is_nan() && exact.is_nan();
                    assert!(is_same, "{name} {dtype} {pair:?}: {value}");
                }
            }
        }
    }
    with_every_kernel!(check);
}
