//! The power of two that the vector kernels share.
//!
//! `2^x` for `x` up to 0: `x` is split at the nearest integer (Cody and Waite), the power of the rest, which lies in
//! [-1/2, 1/2], is a polynomial of degree 6, and the integer goes into the exponent. The polynomial interpolates
//! `(2^x - 1) / x` at Chebyshev nodes; alone it is wrong by at most 5.1e-9 of the value, the rest is rounding. With
//! fused multiply-adds the result is within 7.4e-8 of the exact one, relative to it, and never above 1. Below [`LEAST`], where it
//! would be subnormal, it is 0; of minus infinity it is 0, of 0 it is 1, of a NaN a NaN.

/// Highest power first; the last is exact, so that `2^0` is.
pub(crate) const COEFFICIENTS: [f32; 7] =
    [1.545_316_3e-4, 1.339_086_3e-3, 9.618_082e-3, 5.550_357e-2, 0.240_226_5, std::f32::consts::LN_2, 1.0];

/// The least exponent whose power is not subnormal.
pub(crate) const LEAST: f32 = -126.0;

/// The largest error relative to the value, measured over every `f32` from [`LEAST`] to 0 (7.376e-8); half a unit in the
/// last place is 5.96e-8 of the values that end in one.
#[cfg(test)]
pub(crate) const MAX_ERROR: f64 = 7.4e-8;

/// For processors that can look up a vector of numbers in a register: `x` is split at the nearest sixteenth, and the
/// power of the rest, in [-1/32, 1/32], is a polynomial of degree 3, wrong by at most 2.4e-9. That of the sixteenths comes
/// from a table, rounded, which takes the error to [`MAX_TABLE_ERROR`] and half of the multiplications away.
#[cfg(target_arch = "x86_64")]
pub(crate) mod table {
    /// Highest power first.
    pub(crate) const COEFFICIENTS: [f32; 3] = [0.055_505_086, 0.240_233_56, core::f32::consts::LN_2];

    /// Added to a number, it leaves the number in sixteenths, an integer, in the lowest bits of the sum.
    pub(crate) const TO_SIXTEENTHS: f32 = 1.5 * (1 << 19) as f32;

    /// How far those bits must go for whole numbers to become exponents.
    pub(crate) const TO_EXPONENT: u32 = 19;

    /// The bits of `2^(index / 16)`, less what the index itself adds when it goes the same way.
    #[expect(clippy::cast_possible_wrap, reason = "bits are bits")]
    pub(crate) const BITS: [i32; 16] = {
        const POWERS: [f32; 16] = [
            1.0,
            1.044_273_7,
            1.090_507_7,
            1.138_788_6,
            1.189_207_1,
            1.241_857_8,
            1.296_839_6,
            1.354_255_6,
            core::f32::consts::SQRT_2,
            1.476_826_2,
            1.542_210_8,
            1.610_490_3,
            1.681_792_9,
            1.756_252_2,
            1.834_008_1,
            1.915_206_6,
        ];
        let mut bits = [0; 16];
        let mut index = 0;
        while index < 16 {
            bits[index] = POWERS[index].to_bits() as i32 - ((index as i32) << TO_EXPONENT);
            index += 1;
        }
        bits
    };
}

/// The largest error with the table, relative to the value, measured over every `f32` from [`LEAST`] to 0 (1.439e-7, where
/// a product is subnormal; 1.08e-7 above).
#[cfg(test)]
pub(crate) const MAX_TABLE_ERROR: f64 = 1.44e-7;
