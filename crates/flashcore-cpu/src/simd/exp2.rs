//! `exp2` of the vector kernels.
//!
//! `2^x` for `x` up to 100: `x` is split at the nearest integer (Cody and Waite), the power of the rest, which lies in
//! [-1/2, 1/2], is a polynomial of degree 6, and the integer goes into the exponent. The polynomial interpolates
//! `(2^x - 1) / x` at Chebyshev nodes; alone it is wrong by at most 5.1e-9 of the value, the rest is rounding. With
//! fused multiply-adds the result is within 7.4e-8 of the exact one, relative to it, and never above 1 for `x` up to 0.
//! Below [`MIN_EXPONENT`], where it would be subnormal, it is 0; of minus infinity it is 0, of 0 it is 1, of a NaN a NaN.

/// Coefficients, highest power first; the last is exact, so that `2^0` is.
pub(crate) const COEFFICIENTS: [f32; 7] =
    [1.545_316_3e-4, 1.339_086_3e-3, 9.618_082e-3, 5.550_357e-2, 0.240_226_5, std::f32::consts::LN_2, 1.0];

/// Least exponent whose power is not subnormal.
pub(crate) const MIN_EXPONENT: f32 = -126.0;

/// Exponents above this count as this: the power of one above 100 need only be above that of 100.
pub(crate) const MAX_EXPONENT: f32 = 127.0;

/// Largest error relative to the value, measured over every `f32` from [`MIN_EXPONENT`] to 0 (7.376e-8); half a unit in the
/// last place is 5.96e-8 of the values that end in one.
#[cfg(test)]
pub(crate) const MAX_ERROR: f64 = 7.4e-8;

/// A shorter polynomial, of degree 5 and wrong by at most 1.1e-7, for processors that split numbers and scale powers by
/// instructions of their own.
#[cfg(target_arch = "x86_64")]
pub(crate) mod short {
    use core::f32::consts::LN_2;

    /// Coefficients, highest power first; the last is exact, so that `2^0` is.
    pub(crate) const COEFFICIENTS: [f32; 6] =
        [1.326_472_7e-3, 9.671_513e-3, 5.550_733_6e-2, 0.240_222_42, LN_2 - 1.5 * f32::EPSILON, 1.0];
}

/// Largest error with the shorter polynomial, relative to the value, measured over every `f32` from [`MIN_EXPONENT`] to 0
/// (1.715e-7).
#[cfg(test)]
pub(crate) const MAX_SHORT_ERROR: f64 = 1.72e-7;
