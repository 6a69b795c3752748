//! `tanh` of the vector kernels, for softcap.
//!
//! Below [`BEND`] it is `x + x^3 P(x^2)` with a polynomial that interpolates at Chebyshev nodes and alone is wrong by at
//! most 1.7e-8 of the value. Above, it is `(1 - t) / (1 + t)` with `t = exp(-2 |x|)`, where nothing cancels.

#![expect(clippy::inline_always, reason = "instructions of a level must end up in its functions")]

use crate::simd::vector::Vector;
use std::f32::consts::LOG2_E;

/// Argument from which on the exponential is used.
const BEND: f32 = 0.625;

/// Coefficients, highest power of `x^2` first.
const COEFFICIENTS: [f32; 5] = [-6.096_714e-3, 2.099_718e-2, -5.385_091e-2, 0.133_327_7, -0.333_333_28];

/// Largest error relative to the value.
#[cfg(test)]
pub(crate) const MAX_ERROR: f64 = 2.5e-7;

/// The operations on vectors of `f32` that it needs.
pub(crate) trait TanhVector: Vector<Real = f32> {
    unsafe fn div(self, other: Self) -> Self;
    /// `yes` in lanes where `self` is less than `other`, `no` elsewhere.
    unsafe fn if_less(self, other: Self, yes: Self, no: Self) -> Self;
}

/// Hyperbolic tangent of each lane.
///
/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn tanh<V: TanhVector>(x: V) -> V {
    // SAFETY: the caller vouches for the instructions.
    unsafe {
        let (zero, one) = (V::splat(0.0), V::splat(1.0));
        let magnitude = x.max(zero.sub(x));
        let square = x.mul(x);
        let mut polynomial = V::splat(COEFFICIENTS[0]);
        for coefficient in &COEFFICIENTS[1..] {
            polynomial = polynomial.mul_add(square, V::splat(*coefficient));
        }
        let near = polynomial.mul(square).mul_add(x, x);
        let power = magnitude.mul(V::splat(-2.0 * LOG2_E)).exp2();
        let far = one.sub(power).div(one.add(power));
        let far = x.if_less(zero, zero.sub(far), far);
        magnitude.if_less(V::splat(BEND), near, far)
    }
}
