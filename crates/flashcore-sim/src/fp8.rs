//! 8-bit floats: exact values, and rounding to nearest even that saturates.

use flashcore_ir::Fp8;

/// The code that a NaN becomes.
const NAN: u8 = 0x7f;

/// Fraction bits and exponent bias.
pub(crate) const fn format(ty: Fp8) -> (u32, i32) {
    match ty {
        Fp8::E4m3 => (3, 7),
        Fp8::E5m2 => (2, 15),
    }
}

/// The code of the largest number.
const fn largest(ty: Fp8) -> u64 {
    match ty {
        // One below the NaN.
        Fp8::E4m3 => 0x7e,
        // One below the infinity.
        Fp8::E5m2 => 0x7b,
    }
}

/// The value of a code, exactly.
pub(crate) fn decode(ty: Fp8, code: u8) -> f32 {
    let (fraction_bits, bias) = format(ty);
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let magnitude = u32::from(code & 0x7f);
    if u64::from(magnitude) > largest(ty) {
        let is_infinity = ty == Fp8::E5m2 && magnitude == 0x7c;
        return if is_infinity { sign * f32::INFINITY } else { f32::NAN };
    }
    let (exponent, fraction) = (magnitude >> fraction_bits, magnitude & ((1 << fraction_bits) - 1));
    let (significand, exponent) = if exponent == 0 { (fraction, 1) } else { (fraction | 1 << fraction_bits, exponent) };
    let unit = exponent as i32 - bias - fraction_bits as i32;
    sign * significand as f32 * f32::from_bits(((127 + unit) as u32) << 23)
}

/// The nearest code, ties to even; the largest number for all beyond it, infinities too.
pub(crate) fn encode(ty: Fp8, value: f32) -> u8 {
    let (fraction_bits, bias) = format(ty);
    if value.is_nan() {
        return NAN;
    }
    let sign = (value.to_bits() >> 24) as u8 & 0x80;
    let magnitude = f64::from(value.abs());
    if magnitude.is_infinite() {
        return sign | largest(ty) as u8;
    }
    let exponent = ((magnitude.to_bits() >> 52) as i32 - 1023).max(1 - bias);
    let unit = f64::from_bits(((1023 + exponent - fraction_bits as i32) as u64) << 52);
    let rounded = (magnitude / unit).round_ties_even() as u64;
    // The leading one of a normal significand adds 1 to the exponent field, and so does a carry of the rounding.
    let code = (((exponent + bias - 1) as u64) << fraction_bits) + rounded;
    sign | code.min(largest(ty)) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_survives() {
        for ty in [Fp8::E4m3, Fp8::E5m2] {
            for code in 0..=u8::MAX {
                let value = decode(ty, code);
                match () {
                    () if value.is_nan() => assert_eq!(encode(ty, value), NAN),
                    () if value.is_infinite() => assert_eq!(u64::from(encode(ty, value) & 0x7f), largest(ty)),
                    () => assert_eq!(encode(ty, value), code, "{ty} {code:#04x}"),
                }
            }
        }
    }

    #[test]
    fn values_are_those_of_the_formats() {
        let values = |ty, codes: [u8; 4]| codes.map(|code| decode(ty, code));
        assert_eq!(values(Fp8::E4m3, [0x38, 0x7e, 0x01, 0xfe]), [1.0, 448.0, 1.0 / 512.0, -448.0]);
        assert_eq!(values(Fp8::E5m2, [0x3c, 0x7b, 0x01, 0xfc]), [1.0, 57344.0, 1.0 / 65536.0, f32::NEG_INFINITY]);
        assert!([0x7f, 0xff].iter().all(|code| decode(Fp8::E4m3, *code).is_nan()));
        assert!([0x7d, 0x7e, 0x7f].iter().all(|code| decode(Fp8::E5m2, *code).is_nan()));
    }

    /// Between two neighbours the nearer one, at the middle the even one; beyond the last the last.
    #[test]
    fn rounds_to_nearest_even_and_saturates() {
        for ty in [Fp8::E4m3, Fp8::E5m2] {
            for code in 0..largest(ty) as u8 {
                let (below, above) = (decode(ty, code), decode(ty, code + 1));
                let middle = f32::midpoint(below, above);
                let even = if code % 2 == 0 { code } else { code + 1 };
                for (sign, value) in [(0, 1.0), (0x80, -1.0)] {
                    assert_eq!(encode(ty, value * middle), sign | even, "{ty} {code:#04x}");
                    assert_eq!(encode(ty, value * middle.next_down()), sign | code, "{ty} {code:#04x}");
                    assert_eq!(encode(ty, value * middle.next_up()), sign | (code + 1), "{ty} {code:#04x}");
                }
            }
            for value in [f32::INFINITY, f32::MAX, decode(ty, largest(ty) as u8) * 1.25] {
                assert_eq!(u64::from(encode(ty, value)), largest(ty));
                assert_eq!(u64::from(encode(ty, -value)), 0x80 | largest(ty));
            }
            assert_eq!((encode(ty, 0.0), encode(ty, -0.0), encode(ty, f32::MIN_POSITIVE)), (0, 0x80, 0));
        }
    }
}
