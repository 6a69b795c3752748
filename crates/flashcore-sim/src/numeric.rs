//! Rounding: the arithmetic of `f16`, `bf16`, `tf32` and fused `f32`, each exact and rounded once.
//!
//! Results are computed in `f64`, which holds every product of two operands exactly. Where a sum may not fit, it is
//! rounded *to odd* first, and rounding such a value to fewer bits gives what rounding the exact sum would
//! (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums").

/// The NaN that floating-point operations on `f32` return.
pub(crate) const CANONICAL_NAN: u32 = 0x7fff_ffff;

/// The NaN that operations on `f16` and `bf16` return.
const CANONICAL_NAN_16: u16 = 0x7fff;

/// A 16-bit float format.
pub(crate) trait Half {
    /// Bits of the mantissa.
    const MANTISSA: u32;
    /// Bias of the exponent.
    const BIAS: i32;
    /// The value, exactly.
    fn decode(bits: u16) -> f32;

    /// Rounds to nearest even; every NaN becomes the canonical one.
    fn encode(value: f64) -> u16 {
        const F64_MANTISSA: u32 = 52;
        let bits = value.to_bits();
        let sign = (bits >> 48) as u16 & 0x8000;
        let infinity = ((1 << (15 - Self::MANTISSA)) - 1) << Self::MANTISSA;
        if value.is_nan() {
            return CANONICAL_NAN_16;
        }
        if value.is_infinite() {
            return sign | infinity;
        }
        if !value.is_normal() {
            return sign;
        }
        let exponent = (bits >> F64_MANTISSA & 0x7ff) as i32 - 1023;
        let significand = bits & ((1 << F64_MANTISSA) - 1) | 1 << F64_MANTISSA;
        let lowest = 1 - Self::BIAS;
        let below = (lowest - exponent).max(0) as u32;
        let shift = F64_MANTISSA - Self::MANTISSA + below;
        if shift > F64_MANTISSA + 1 {
            return sign;
        }
        let quotient = significand >> shift;
        let remainder = significand & ((1 << shift) - 1);
        let half = 1u64 << (shift - 1);
        let up = remainder > half || remainder == half && quotient & 1 == 1;
        let rounded = quotient + u64::from(up);
        // The leading one of a normal significand adds 1 to the exponent field, and so does a carry of the rounding.
        let biased = (exponent.max(lowest) + Self::BIAS - 1) as u64;
        let magnitude = (biased << Self::MANTISSA) + rounded;
        sign | magnitude.min(u64::from(infinity)) as u16
    }
}

/// IEEE half precision.
pub(crate) struct F16;

impl Half for F16 {
    const MANTISSA: u32 = 10;
    const BIAS: i32 = 15;

    fn decode(bits: u16) -> f32 {
        const REBIAS: f32 = f32::from_bits((127 + 127 - 15) << 23);
        let sign = u32::from(bits & 0x8000) << 16;
        let magnitude = u32::from(bits & 0x7fff) << 13;
        let finite = (f32::from_bits(magnitude) * REBIAS).to_bits();
        let special = magnitude | 0x7f80_0000;
        let value = if bits & 0x7c00 == 0x7c00 { special } else { finite };
        f32::from_bits(sign | value)
    }
}

/// The upper half of an `f32`.
pub(crate) struct Bf16;

impl Half for Bf16 {
    const MANTISSA: u32 = 7;
    const BIAS: i32 = 127;

    fn decode(bits: u16) -> f32 {
        f32::from_bits(u32::from(bits) << 16)
    }
}

/// The two elements of a pair.
pub(crate) fn split(pair: u32) -> [u16; 2] {
    [pair as u16, (pair >> 16) as u16]
}

/// Two elements as a pair, the first in the lower half.
pub(crate) fn join(elements: [u16; 2]) -> u32 {
    u32::from(elements[0]) | u32::from(elements[1]) << 16
}

/// The bits of a result, with the canonical NaN for every NaN.
pub(crate) fn canonical(value: f32) -> u32 {
    if value.is_nan() { CANONICAL_NAN } else { value.to_bits() }
}

/// `a + b` rounded to odd: if inexact, the neighbour whose last bit is one.
pub(crate) fn add_to_odd(a: f64, b: f64) -> f64 {
    let sum = a + b;
    let from_b = sum - a;
    let error = (a - (sum - from_b)) + (b - from_b);
    if !sum.is_finite() || error == 0.0 || sum.to_bits() & 1 == 1 {
        return sum;
    }
    // Even and inexact: the odd neighbour lies on the side of the error. Away from zero is one up in the bits.
    let away = (error > 0.0) == (sum > 0.0);
    f64::from_bits(if away { sum.to_bits() + 1 } else { sum.to_bits() - 1 })
}

/// `a * b + c` rounded once.
pub(crate) fn fma(a: f32, b: f32, c: f32) -> f32 {
    add_to_odd(f64::from(a) * f64::from(b), f64::from(c)) as f32
}

/// The smaller, or the number if one is a NaN; -0 is smaller than +0.
pub(crate) fn minimum(a: f32, b: f32) -> f32 {
    match (a.is_nan(), b.is_nan()) {
        (true, _) => b,
        (false, true) => a,
        (false, false) if a == b => f32::from_bits(a.to_bits() | b.to_bits() & 0x8000_0000),
        (false, false) => a.min(b),
    }
}

/// The larger, or the number if one is a NaN; +0 is larger than -0.
pub(crate) fn maximum(a: f32, b: f32) -> f32 {
    -minimum(-a, -b)
}

/// A subnormal becomes zero of its sign.
pub(crate) fn flush(value: f32) -> f32 {
    if value.is_subnormal() { 0.0f32.copysign(value) } else { value }
}

/// The bits of an `f32` rounded to the ten mantissa bits of `tf32`, ties away from zero. Infinities and NaNs lose their
/// low bits and nothing else: a NaN with no other bits becomes an infinity, as on an H200.
pub(crate) fn to_tf32(bits: u32) -> u32 {
    const EXPONENT: u32 = 0x7f80_0000;
    let rounded = if bits & EXPONENT == EXPONENT { bits } else { bits + 0x1000 };
    rounded & TF32_MASK
}

/// The bits of an `f32` that a tensor core reads as `tf32`.
pub(crate) const TF32_MASK: u32 = 0xffff_e000;

#[cfg(test)]
mod tests {
    use super::*;

    /// Values at which rounding to 16 bits is decided: all ties, their neighbours, and the borders of the formats.
    fn interesting() -> impl Iterator<Item = f64> {
        let borders =
            [65504.0, 65519.99, 65520.0, 65520.01, 5.9e-8, 2.98e-8, 2.99e-8, 6.1e-5, 3.4e38, 9.2e-41, 4.5e-41];
        let ties = (0..=u16::MAX).flat_map(|bits| {
            let value = f64::from(half::f16::from_bits(bits));
            let next = f64::from(half::f16::from_bits(bits.wrapping_add(1)));
            let tie = f64::midpoint(value, next);
            [value, tie, tie.next_up(), tie.next_down()]
        });
        ties.chain(borders).filter(|value| value.is_finite())
    }

    #[test]
    fn decodes_every_half() {
        for bits in 0..=u16::MAX {
            let (f16, bf16) = (half::f16::from_bits(bits), half::bf16::from_bits(bits));
            assert_eq!(canonical(F16::decode(bits)), canonical(f16.to_f32_const()), "f16 {bits:#x}");
            assert_eq!(canonical(Bf16::decode(bits)), canonical(bf16.to_f32_const()), "bf16 {bits:#x}");
        }
    }

    #[test]
    fn encodes_what_it_decodes() {
        for bits in 0..=u16::MAX {
            let (f16, bf16) = (F16::decode(bits), Bf16::decode(bits));
            let expected = |value: f32| if value.is_nan() { CANONICAL_NAN_16 } else { bits };
            assert_eq!(F16::encode(f64::from(f16)), expected(f16));
            assert_eq!(Bf16::encode(f64::from(bf16)), expected(bf16));
        }
    }

    #[test]
    fn rounds_f32_like_half() {
        for value in interesting() {
            let single = value as f32;
            assert_eq!(F16::encode(f64::from(single)), half::f16::from_f32(single).to_bits(), "{single:e}");
            assert_eq!(Bf16::encode(f64::from(single)), half::bf16::from_f32(single).to_bits(), "{single:e}");
        }
    }

    /// A tie of `f16` and a little more, which a detour through `f32` would round down.
    #[test]
    fn rounds_f64_once() {
        let tie = 1.0 + 2f64.powi(-11);
        assert_eq!(F16::encode(tie), 0x3c00);
        assert_eq!(F16::encode(tie.next_up()), 0x3c01);
        assert_eq!(F16::encode(tie.next_down()), 0x3c00);
    }

    #[test]
    fn fused_multiply_add_is_that_of_the_machine() {
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            f32::from_bits((state >> 32) as u32)
        };
        for _ in 0..200_000 {
            let (a, b) = (next(), next());
            for c in [next(), -(a * b), (-(a * b)).next_up(), 1.0, f32::MIN_POSITIVE] {
                assert_eq!(canonical(fma(a, b, c)), canonical(a.mul_add(b, c)), "{a:e} * {b:e} + {c:e}");
            }
        }
    }

    #[test]
    fn minimum_and_maximum_prefer_numbers_and_order_zeros() {
        let bits = |value: f32| value.to_bits();
        assert_eq!(bits(minimum(0.0, -0.0)), bits(-0.0));
        assert_eq!(bits(maximum(-0.0, 0.0)), bits(0.0));
        assert_eq!(bits(maximum(-0.0, -0.0)), bits(-0.0));
        assert_eq!(bits(minimum(f32::NAN, 3.0)), bits(3.0));
        assert_eq!(bits(maximum(3.0, f32::NAN)), bits(3.0));
        assert_eq!(bits(maximum(-2.0, -3.0)), bits(-2.0));
        assert!(minimum(f32::NAN, f32::NAN).is_nan());
    }

    #[test]
    fn rounds_to_tf32_away_from_zero() {
        assert_eq!(to_tf32(0x3f80_1000), 0x3f80_2000);
        assert_eq!(to_tf32(0xbf80_1000), 0xbf80_2000);
        assert_eq!(to_tf32(0x3f80_0fff), 0x3f80_0000);
        assert_eq!(to_tf32(f32::MAX.to_bits()), f32::INFINITY.to_bits());
        assert_eq!(to_tf32(f32::NEG_INFINITY.to_bits()), f32::NEG_INFINITY.to_bits());
        assert_eq!(to_tf32(0x7f80_0001), f32::INFINITY.to_bits());
        assert_eq!(to_tf32(0x7fff_ffff), 0x7fff_e000);
    }
}
