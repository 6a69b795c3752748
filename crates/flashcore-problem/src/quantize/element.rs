//! Quantisation of elements on append: the one definition that oracle, CPU and kernels share to the bit.
//!
//! An element is rounded to a code as `encode(x / scale)`: a division of `f32`, rounded to nearest, and then the saturating
//! conversion of `float8.rs`. Whatever the scale is, this is the result: a division by 0 saturates, and a NaN (0 / 0, or a
//! scale that is NaN) is the NaN code.
//!
//! A scale that is computed is `amax / largest` of the elements it is for, also a division of `f32`: the largest element
//! has the code of the largest number. `amax` takes no notice of NaN and is at most the largest `f32`, so that an infinity
//! saturates; the scale is at least 2^-126, the smallest normal number. A row of zeros has a scale of 1.

use crate::DType;

/// The scale of elements whose largest magnitude is `amax`.
pub fn computed_scale(dtype: DType, amax: f32) -> f32 {
    if amax == 0.0 {
        return 1.0;
    }
    (amax.min(f32::MAX) / dtype.largest() as f32).max(f32::MIN_POSITIVE)
}

/// The scale of a row: that of its largest magnitude.
pub fn row_scale(dtype: DType, row: &[f32]) -> f32 {
    // The maximum of a number and a NaN is the number.
    computed_scale(dtype, row.iter().fold(0.0, |amax: f32, x| amax.max(x.abs())))
}

/// The code of an element under a scale.
pub fn quantized(dtype: DType, x: f32, scale: f32) -> u8 {
    let mut code = [0];
    dtype.encode(f64::from(x / scale), &mut code);
    code[0]
}

/// True if an element lies beyond the numbers that round to the largest one of the type: saturation loses more of it than
/// rounding would.
pub fn saturates(dtype: DType, x: f32, scale: f32) -> bool {
    f64::from(x / scale).abs() > saturation_limit(dtype)
}

/// The magnitude up to which a number is rounded to the largest one of its type, as if there were larger ones.
pub(super) fn saturation_limit(dtype: DType) -> f64 {
    // The largest numbers of both types are 1.75 times a power of two; with 3 fraction bits it has 14 units, with 2 it has 7.
    let units = if dtype == DType::E4m3 { 14.0 } else { 7.0 };
    dtype.largest() + dtype.largest() / (2.0 * units)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_element_of_a_row_has_the_largest_code() {
        for (dtype, largest) in [(DType::E4m3, 0x7E), (DType::E5m2, 0x7B)] {
            for amax in [1e-30, 0.3, 1.0, 448.0, 3e5, f32::MAX] {
                let scale = row_scale(dtype, &[0.1 * amax, -amax, f32::NAN, 0.7 * amax]);
                assert_eq!(scale, amax / dtype.largest() as f32);
                assert_eq!(quantized(dtype, -amax, scale), largest | 0x80, "{dtype} {amax}");
                assert_eq!(quantized(dtype, amax, scale), largest);
                assert_eq!(quantized(dtype, 0.0, scale), 0);
                assert_eq!(quantized(dtype, f32::NAN, scale), 0x7F);
            }
        }
    }

    #[test]
    fn scales_are_finite_and_positive_whatever_a_row_holds() {
        for dtype in DType::FLOAT8 {
            for (row, expected) in [
                (vec![0.0, -0.0], 1.0),
                (vec![f32::NAN; 3], 1.0),
                (vec![f32::from_bits(1)], f32::MIN_POSITIVE),
                (vec![], 1.0),
                (vec![1.0, f32::NEG_INFINITY], f32::MAX / dtype.largest() as f32),
            ] {
                assert_eq!(row_scale(dtype, &row), expected, "{dtype} {row:?}");
            }
            let largest = quantized(dtype, f32::MAX, row_scale(dtype, &[f32::MAX]));
            assert_eq!(quantized(dtype, f32::INFINITY, row_scale(dtype, &[f32::INFINITY])), largest);
        }
    }

    #[test]
    fn scales_that_are_wrong_have_results_too() {
        let code = |x: f32, scale: f32| quantized(DType::E4m3, x, scale);
        assert_eq!([code(1.0, 0.0), code(-1.0, 0.0), code(0.0, 0.0)], [0x7E, 0xFE, 0x7F]);
        assert_eq!([code(1.0, f32::NAN), code(1.0, f32::INFINITY), code(1.0, -1.0)], [0x7F, 0x00, 0xB8]);
        assert!(saturates(DType::E4m3, -464.1, 1.0) && !saturates(DType::E4m3, 464.0, 1.0));
        assert!(saturates(DType::E5m2, 61441.0, 1.0) && !saturates(DType::E5m2, -61440.0, 1.0));
        assert!(saturates(DType::E5m2, -1.0, 0.0) && !saturates(DType::E5m2, f32::NAN, 1.0));
    }
}
