//! The addition of a tensor core: how the products of an `mma` or a `wgmma` and its `f32` accumulator become one number.
//!
//! PTX leaves it open. [`TensorSum::Truncating`] is what an H200 does. It repeats to the bit what an H200 recorded of `mma`
//! with `f16`, `bf16` and `tf32`, and of `wgmma` with 8-bit floats: products are exact; each has the sum of its factors' exponents
//! as its own, whether or not its significand reaches 2; all products of the instruction and the accumulator are shifted
//! to the largest of these exponents, and cut off, not rounded, so many bits below; the sum of what is left is exact, and
//! cut off to `f32`. Subnormal factors keep the least exponent of their type.
//!
//! For 8-bit floats the model is the same with 13 bits, where tensor cores multiply them: by `wgmma`, and by `mma` from
//! `sm_89` on except on Hopper. The sum too is cut off to 13 fraction bits, not to the 23 of `f32`, so that an accumulator
//! has no more. That `mma` of `sm_89` and `sm_120` adds like `wgmma` is what others report (the paper of `SageAttention2`);
//! no GPU of these is recorded. On Hopper an `mma` of 8-bit floats is two of `f16` and an addition in `f32`, which ptxas
//! makes of it ([`Arch::has_fp8_mma`](flashcore_ir::Arch::has_fp8_mma)). The simulator adds by the rules of those, and
//! repeats the record to the bit.
//!
//! Cutting off pulls sums towards zero by up to a unit in the last place for each instruction of a chain: harmless where
//! operands have 16 bits, and what an `f32` kernel has to be judged with.

use flashcore_ir::{Fp8, Type};

use crate::fp8;

/// Fraction bits of `f32`.
const F32_FRACTION: i32 = 23;
/// The least exponent of a normal `f32`.
const F32_LEAST: i32 = -126;

/// The addition of products and an `f32` accumulator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TensorSum {
    /// Exact products, summed in `f64` from the accumulator on in order of the depth, and rounded once to nearest even.
    #[default]
    Exact,
    /// Terms are cut off `fraction` bits below the largest exponent, and the sum to as many fraction bits, or to `f32` if that
    /// has fewer.
    Truncating {
        /// Bits of a term below the largest exponent, and of the sum below its own.
        fraction: u32,
        /// The same for 8-bit floats, where tensor cores multiply them as such.
        fp8_fraction: u32,
    },
}

/// The type of a factor of tensor-core products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Factor {
    fraction: i32,
    /// The least normal exponent.
    least: i32,
    is_fp8: bool,
}

impl Factor {
    /// A factor of a 16-bit type or `tf32`, by the type of its register.
    pub const fn of(operand: Type) -> Self {
        let (fraction, least) = match operand {
            Type::F16x2 => (10, -14),
            Type::Bf16x2 => (7, F32_LEAST),
            _ => (10, F32_LEAST),
        };
        Self { fraction, least, is_fp8: false }
    }

    /// An 8-bit float.
    pub const fn of_fp8(ty: Fp8) -> Self {
        let (fraction, bias) = fp8::format(ty);
        Self { fraction: fraction as i32, least: 1 - bias, is_fp8: true }
    }
}

impl TensorSum {
    /// An H200, as recorded: for operands of 16 bits and `tf32` two bits more than `f32` has, for 8-bit floats 13.
    pub const H200: Self = Self::Truncating { fraction: 25, fp8_fraction: 13 };

    /// The sum of the `products` of one instruction and its accumulator `start`, rounded or cut off to `f32`. Models of
    /// kernels outside of the simulator add by the same rules.
    pub fn add(self, factors: [Factor; 2], start: f32, products: impl Iterator<Item = (f64, f64)> + Clone) -> f32 {
        let fraction = match self {
            Self::Exact => return exact(start, products),
            Self::Truncating { fp8_fraction, .. } if factors[0].is_fp8 => fp8_fraction,
            Self::Truncating { fraction, .. } => fraction,
        };
        // Infinities and NaNs are those of the exact sum.
        truncating(fraction as i32, factors, start, products.clone()).unwrap_or_else(|| exact(start, products))
    }
}

/// The sum in `f64`, rounded once.
fn exact(start: f32, products: impl Iterator<Item = (f64, f64)>) -> f32 {
    products.fold(f64::from(start), |sum, (a, b)| sum + a * b) as f32
}

/// A number as significand and exponent: `significand * 2^(exponent - fraction)`, a subnormal with the least exponent.
fn decompose(value: f64, Factor { fraction, least, .. }: Factor) -> (i64, i32) {
    let exponent = ((value.to_bits() >> 52 & 0x7ff) as i32 - 1023).max(least);
    ((value * power(fraction - exponent)) as i64, exponent)
}

/// 2 to the power of an exponent that a normal `f64` has.
fn power(exponent: i32) -> f64 {
    f64::from_bits(((1023 + exponent) as u64) << 52)
}

/// The truncated sum, or nothing if a term is not finite.
fn truncating(
    fraction: i32,
    factors: [Factor; 2],
    start: f32,
    products: impl Iterator<Item = (f64, f64)> + Clone,
) -> Option<f32> {
    const START: Factor = Factor { fraction: F32_FRACTION, least: F32_LEAST, is_fp8: false };
    let [left, right] = factors;
    let own = left.fraction + right.fraction;
    // Significand, its fraction bits, and exponent of each term.
    let terms = products.map(|(a, b)| {
        let (a, b) = (finite(a)?, finite(b)?);
        let ((a, a_exponent), (b, b_exponent)) = (decompose(a, left), decompose(b, right));
        Some((a * b, own, a_exponent + b_exponent))
    });
    let (significand, exponent) = decompose(finite(start.into())?, START);
    let terms = terms.chain([Some((significand, F32_FRACTION, exponent))]);
    let mut largest = i32::MIN;
    for term in terms.clone() {
        let (significand, _, exponent) = term?;
        if significand != 0 {
            largest = largest.max(exponent);
        }
    }
    if largest == i32::MIN {
        return Some(0.0);
    }
    // The exponent of a zero may lie far above the largest.
    let sum: i64 = terms
        .flatten()
        .filter(|(significand, _, _)| *significand != 0)
        .map(|(significand, of, exponent)| shifted(significand, fraction - of - (largest - exponent)))
        .sum();
    Some(to_f32(sum, largest - fraction, fraction.min(F32_FRACTION)))
}

fn finite(value: f64) -> Option<f64> {
    value.is_finite().then_some(value)
}

/// `value * 2^bits`, cut off towards zero.
const fn shifted(value: i64, bits: i32) -> i64 {
    let magnitude = value.unsigned_abs();
    let shifted = match bits {
        0.. => magnitude << bits,
        -63..0 => magnitude >> -bits,
        _ => 0,
    };
    if value < 0 { -(shifted as i64) } else { shifted as i64 }
}

/// `sum * 2^unit`, cut off to a float of so many fraction bits, with the exponents of `f32`.
fn to_f32(sum: i64, unit: i32, fraction: i32) -> f32 {
    let width = 64 - sum.unsigned_abs().leading_zeros() as i32;
    let exponent = (unit + width - 1).max(F32_LEAST);
    let last = exponent - fraction;
    let cut = if last > unit { shifted(sum, unit - last) } else { sum };
    let unit = unit.max(last);
    // In two steps: a unit below the least power of `f64` is only reached by sums that are cut off to nothing.
    (cut as f64 * power(unit / 2) * power(unit - unit / 2)) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(sum: TensorSum, start: f32, products: &[(f64, f64)], expected: f32) {
        let actual = sum.add([Factor::of(Type::F16x2); 2], start, products.iter().copied());
        assert_eq!(actual.to_bits(), expected.to_bits(), "{actual:e} and {expected:e}");
    }

    #[test]
    fn terms_are_cut_off_below_the_largest() {
        let ulp = f32::EPSILON;
        // Both factors are normal numbers of `f16`.
        let small = |exponent: i32| (power(exponent / 2), power(exponent - exponent / 2));
        // Half a unit above 1 is a tie, which goes to even when rounded, and is cut off otherwise.
        check(TensorSum::Exact, 1.0, &[small(-24)], 1.0);
        check(TensorSum::Exact, 1.0, &[small(-24), small(-25)], 1.0 + ulp);
        check(TensorSum::H200, 1.0, &[small(-24), small(-25)], 1.0);
        // Four quarters of a unit are a whole one; eight eighths are cut off each.
        check(TensorSum::H200, 1.0, &[small(-25); 4], 1.0 + ulp);
        check(TensorSum::H200, 1.0, &[small(-26); 8], 1.0);
        check(TensorSum::Truncating { fraction: 26, fp8_fraction: 13 }, 1.0, &[small(-26); 8], 1.0 + ulp);
        // Towards zero on both sides.
        check(TensorSum::H200, -1.0, &[(-1.0, power(-24))], -1.0);
        check(TensorSum::H200, 0.0, &[(3.0, 5.0), (-2.0, 7.5)], 0.0);
    }

    /// Terms of 8-bit floats are cut off 13 bits below the largest, and their sum to 13 bits of its own.
    #[test]
    fn sums_of_fp8_have_thirteen_bits() {
        let check = |start: f32, products: &[(f64, f64)], expected: f32| {
            let sum = TensorSum::H200.add([Factor::of_fp8(Fp8::E4m3); 2], start, products.iter().copied());
            assert_eq!(sum, expected);
        };
        check(8192.0, &[(1.0, 1.0)], 8193.0);
        check(16384.0, &[(1.0, 1.0)], 16384.0);
        // Each term is kept, and the last bit of the sum is not.
        check(8192.0, &[(64.0, 128.0), (1.0, 1.0)], 16384.0);
        check(-8192.0, &[(-64.0, 128.0), (-1.0, 1.0)], -16384.0);
        check(8192.0, &[(64.0, 128.0), (1.0, 1.0), (1.0, 1.0)], 16386.0);
        // An accumulator alone is cut off too.
        check(1.0 + f32::EPSILON, &[], 1.0);
    }

    #[test]
    fn what_is_not_finite_stays() {
        check(TensorSum::H200, f32::INFINITY, &[(1.0, 1.0)], f32::INFINITY);
        assert!(TensorSum::H200.add([Factor::of(Type::Tf32); 2], 0.0, [(f64::INFINITY, 0.0)].into_iter()).is_nan());
        check(TensorSum::H200, 0.0, &[(0.0, 0.0)], 0.0);
    }

    /// A product with zero has the exponent of the other factor, and yet no part in the largest.
    #[test]
    fn zero_times_a_large_number_is_zero() {
        let sum = TensorSum::H200.add([Factor::of(Type::Tf32); 2], f32::MIN_POSITIVE, [(0.0, 1e38)].into_iter());
        assert_eq!(sum.to_bits(), f32::MIN_POSITIVE.to_bits());
    }

    /// Products of `f16` are exact in `f32`, so that one alone is kept, subnormals too.
    #[test]
    fn one_product_is_exact() {
        for (a, b) in [(1.5, -1.25), (65504.0, 65504.0), (power(-24), power(-24)), (power(-14), 3.0 * power(-24))] {
            check(TensorSum::H200, 0.0, &[(a, b)], (a * b) as f32);
        }
    }
}
