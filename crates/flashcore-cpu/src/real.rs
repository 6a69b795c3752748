//! The arithmetic in which attention is computed: `f32` and `f64`.

use flashcore_problem::DType;
use flashcore_problem::expression::ExpressionReal;
use std::ops::{Add, AddAssign, Mul, MulAssign, Sub};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A floating-point type to compute in.
pub(crate) trait Real:
    Copy
    + Default
    + PartialOrd
    + Send
    + Sync
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + AddAssign
    + MulAssign
    + ExpressionReal
    + FromBytes
    + IntoBytes
    + Immutable
    + KnownLayout
    + 'static
{
    /// The type of problems whose elements are of this type.
    const DTYPE: DType;
    const ZERO: Self;
    const ONE: Self;
    const NEGATIVE_INFINITY: Self;
    /// Terms of a long sum that are added up by themselves, before they are added to the others. Sums of many terms round
    /// less often that way; where it would cost speed, all are added one by one.
    const TERMS_AT_ONCE: usize;

    /// Rounded to this type.
    fn from_f64(value: f64) -> Self;
    /// Exact.
    fn to_f64(self) -> f64;
    fn tanh(self) -> Self;
    fn log2(self) -> Self;
    fn reciprocal(self) -> Self;
    fn is_finite(self) -> bool;

    /// `2^self` for `self` up to 0, to one unit in the last place; 0 where that would be subnormal; NaN of NaN.
    fn exp2(self) -> Self;

    /// The larger one; `self` when either is NaN.
    fn maximum(self, other: Self) -> Self {
        if other > self { other } else { self }
    }
}

impl Real for f32 {
    const DTYPE: DType = DType::F32;
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const NEGATIVE_INFINITY: Self = Self::NEG_INFINITY;
    const TERMS_AT_ONCE: usize = usize::MAX;

    fn from_f64(value: f64) -> Self {
        value as Self
    }

    fn to_f64(self) -> f64 {
        f64::from(self)
    }

    fn tanh(self) -> Self {
        self.tanh()
    }

    fn log2(self) -> Self {
        self.log2()
    }

    fn reciprocal(self) -> Self {
        1.0 / self
    }

    fn is_finite(self) -> bool {
        Self::is_finite(self)
    }

    /// Written without a branch or a call, so that a loop over it becomes vector instructions.
    #[inline]
    fn exp2(self) -> Self {
        // Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the sum.
        const ROUNDER: f32 = 12_582_912.0;
        // Above 100 a power need only be above that of 100.
        const MOST: f32 = 127.0;
        // The Taylor series of 2^x: ln(2)^n / n!. At the ends of [-0.5, 0.5] the next term is below 2^-27.
        const COEFFICIENTS: [f32; 8] = [
            1.525_273_4e-5,
            1.540_353e-4,
            1.333_355_8e-3,
            9.618_129e-3,
            5.550_411e-2,
            2.402_265e-1,
            std::f32::consts::LN_2,
            1.0,
        ];
        let exponent = if self > MOST { MOST } else { self };
        let shifted = exponent + ROUNDER;
        let fraction = exponent - (shifted - ROUNDER);
        let mut power = COEFFICIENTS[0];
        for coefficient in &COEFFICIENTS[1..] {
            power = power * fraction + coefficient;
        }
        let exponent = shifted.to_bits().wrapping_add(127) << 23;
        // Not `max`, which would turn a NaN into a number.
        if self < -126.0 { 0.0 } else { power * Self::from_bits(exponent) }
    }
}

impl Real for f64 {
    const DTYPE: DType = DType::F64;
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const NEGATIVE_INFINITY: Self = Self::NEG_INFINITY;
    const TERMS_AT_ONCE: usize = 16;

    fn from_f64(value: f64) -> Self {
        value
    }

    fn to_f64(self) -> f64 {
        self
    }

    fn tanh(self) -> Self {
        self.tanh()
    }

    fn log2(self) -> Self {
        self.log2()
    }

    fn reciprocal(self) -> Self {
        1.0 / self
    }

    fn is_finite(self) -> bool {
        Self::is_finite(self)
    }

    fn exp2(self) -> Self {
        if self < -1022.0 { 0.0 } else { self.exp2() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp2_is_right_to_one_unit_in_the_last_place() {
        let mut worst = 0.0_f64;
        for step in 0..1_260_000 {
            let exponent = -(step as f32) * 1e-4;
            let exact = f64::from(exponent).exp2();
            let error = (f64::from(Real::exp2(exponent)) - exact).abs() / exact;
            worst = worst.max(error);
        }
        assert!(worst < f64::from(f32::EPSILON), "{worst:e}");
    }

    #[test]
    fn exp2_of_special_values() {
        let cases =
            [(0.0_f32, 1.0), (-0.0, 1.0), (-1.0, 0.5), (-126.0, f32::MIN_POSITIVE), (-127.0, 0.0), (-1e30, 0.0)];
        for (exponent, expected) in cases {
            assert_eq!(Real::exp2(exponent).to_bits(), f32::to_bits(expected), "{exponent}");
        }
        assert_eq!(Real::exp2(f32::NEG_INFINITY).to_bits(), 0);
        assert_eq!(Real::exp2(f64::NEG_INFINITY).to_bits(), 0);
        for payload in [0x7FC0_0000, 0x7FA5_A5A5, 0xFFFF_FFFF_u32] {
            assert!(Real::exp2(f32::from_bits(payload)).is_nan(), "{payload:#x}");
        }
    }
}
