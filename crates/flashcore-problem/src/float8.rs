//! FP8: the 8-bit floats e4m3 and e5m2 of the Open Compute Project, bit by bit.
//!
//! | | e4m3 (`e4m3fn`) | e5m2 |
//! |---|---|---|
//! | exponent, stored mantissa bits | 4, 3 | 5, 2 |
//! | smallest subnormal, smallest normal | 2^-9, 2^-6 | 2^-16, 2^-14 |
//! | largest number | 448 (`0x7e`) | 57344 (`0x7b`) |
//! | infinity | none | `0x7c`, `0xfc` |
//! | NaN | `0x7f`, `0xff` | `0x7d` to `0x7f`, `0xfd` to `0xff` |
//!
//! Rounding is that of `cvt.rn.satfinite` of PTX, the only conversion to these types that GPUs have: to nearest, ties to
//! even; a magnitude above the largest number, infinity included, becomes the largest number with the sign of the input;
//! a NaN becomes `0x7f`. An infinity of e5m2 can be read but is never written.

/// The layout of an 8-bit float: the rest follows from these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Float8 {
    /// Stored bits of the mantissa.
    mantissa_bits: u32,
    /// Exponent of the smallest normal number.
    least_exponent: i32,
    /// Code of the largest number.
    largest_code: u8,
    /// True if the code after the largest is an infinity.
    has_infinity: bool,
}

impl Float8 {
    pub(crate) const E4M3: Self =
        Self { mantissa_bits: 3, least_exponent: -6, largest_code: 0x7E, has_infinity: false };
    pub(crate) const E5M2: Self =
        Self { mantissa_bits: 2, least_exponent: -14, largest_code: 0x7B, has_infinity: true };

    /// The number of a code; exact.
    pub(crate) const fn decode(self, code: u8) -> f32 {
        let magnitude = code & 0x7F;
        let sign = ((code & 0x80) as u32) << 24;
        if magnitude > self.largest_code {
            let is_infinity = self.has_infinity && magnitude == self.largest_code + 1;
            return f32::from_bits(if is_infinity { 0x7F80_0000 } else { 0x7FC0_0000 } | sign);
        }
        let (exponent, mantissa) = ((magnitude >> self.mantissa_bits) as i32, magnitude % (1 << self.mantissa_bits));
        let normal = if exponent == 0 { 0 } else { 1 << self.mantissa_bits };
        let quantum =
            power_of_two(self.least_exponent - self.mantissa_bits as i32 + if exponent > 1 { exponent - 1 } else { 0 });
        let number = (normal + mantissa as u32) as f32 * quantum;
        f32::from_bits(number.to_bits() | sign)
    }

    /// The code of a number: rounded to nearest, ties to even, saturated; a NaN is `0x7f`.
    pub(crate) fn encode(self, value: f64) -> u8 {
        if value.is_nan() {
            return 0x7F;
        }
        let sign = u8::from(value.is_sign_negative()) << 7;
        // Saturated before it is rounded: nothing then rounds beyond the largest number.
        let magnitude = value.abs().min(f64::from(self.decode(self.largest_code)));
        // The exponent of numbers that are subnormal in f64 is far below the least here.
        let exponent = ((magnitude.to_bits() >> 52) as i32 - 1023).max(self.least_exponent);
        let quantum = f64::from(power_of_two(exponent - self.mantissa_bits as i32));
        // A division by a power of two is exact. A mantissa that is rounded up to the next power of two carries into the
        // exponent, and one of a subnormal has no leading bit to take off.
        let quanta = (magnitude / quantum).round_ties_even() as i32;
        sign | (((exponent - self.least_exponent) << self.mantissa_bits) + quanta) as u8
    }

    /// Every number, by its code.
    pub(crate) const fn table(self) -> [f32; 256] {
        let mut table = [0.0; 256];
        let mut code = 0;
        while code < table.len() {
            table[code] = self.decode(code as u8);
            code += 1;
        }
        table
    }
}

/// `2^exponent`, normal in `f32`.
const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    const TYPES: [(Float8, DType); 2] = [(Float8::E4M3, DType::E4m3), (Float8::E5M2, DType::E5m2)];

    /// Values from the OCP specification, and by hand.
    #[test]
    fn codes_are_those_of_the_specification() {
        let e4m3 = [
            (0x00, 0.0),
            (0x01, 0.001_953_125),
            (0x07, 0.013_671_875),
            (0x08, 0.015_625),
            (0x38, 1.0),
            (0x3C, 1.5),
            (0xC0, -2.0),
            (0x7E, 448.0),
            (0xFE, -448.0),
        ];
        for (code, value) in e4m3 {
            assert_eq!(Float8::E4M3.decode(code), value, "e4m3 {code:#04x}");
        }
        let e5m2 = [
            (0x01, 2.0_f32.powi(-16)),
            (0x03, 3.0 * 2.0_f32.powi(-16)),
            (0x04, 2.0_f32.powi(-14)),
            (0x3C, 1.0),
            (0x3F, 1.75),
            (0x7B, 57_344.0),
            (0x7C, f32::INFINITY),
            (0xFC, f32::NEG_INFINITY),
        ];
        for (code, value) in e5m2 {
            assert_eq!(Float8::E5M2.decode(code), value, "e5m2 {code:#04x}");
        }
        for code in 0..=u8::MAX {
            assert_eq!(Float8::E4M3.decode(code).is_nan(), code & 0x7F == 0x7F, "e4m3 {code:#04x}");
            assert_eq!(Float8::E5M2.decode(code).is_nan(), code & 0x7F > 0x7C, "e5m2 {code:#04x}");
        }
        assert_eq!(Float8::E4M3.decode(0x80).to_bits(), (-0.0_f32).to_bits());
    }

    /// An e5m2 is the upper half of an `f16`.
    #[test]
    fn e5m2_is_half_of_a_half() {
        for code in 0..=u8::MAX {
            let half = half::f16::from_bits(u16::from(code) << 8).to_f32();
            let number = Float8::E5M2.decode(code);
            assert!(
                number == half && number.is_sign_negative() == half.is_sign_negative()
                    || number.is_nan() && half.is_nan(),
                "{code:#04x}"
            );
        }
    }

    #[test]
    fn every_code_survives_a_round_trip() {
        for (format, dtype) in TYPES {
            for code in 0..=u8::MAX {
                let value = f64::from(format.decode(code));
                let expected = match value {
                    _ if value.is_nan() => 0x7F,
                    _ if value.is_infinite() => code & 0x80 | format.largest_code,
                    _ => code,
                };
                assert_eq!(format.encode(value), expected, "{dtype} {code:#04x}");
                assert_eq!(dtype.decode(&[code]).to_bits() << 1, value.to_bits() << 1, "{dtype} {code:#04x}");
                assert_eq!(format.table()[usize::from(code)].to_bits(), format.decode(code).to_bits());
            }
        }
    }

    /// The midpoint of two neighbours goes to the even one; the closest `f64` on either side does not.
    #[test]
    fn ties_go_to_even_and_near_ties_to_the_nearest() {
        for (format, dtype) in TYPES {
            for code in 0..format.largest_code {
                let (below, above) = (f64::from(format.decode(code)), f64::from(format.decode(code + 1)));
                let middle = f64::midpoint(below, above);
                for sign in [0, 0x80] {
                    let signed = |value: f64| if sign == 0 { value } else { -value };
                    let even = code + code % 2;
                    assert_eq!(format.encode(signed(middle)), even | sign, "{dtype} {code:#04x}");
                    assert_eq!(format.encode(signed(middle.next_down())), code | sign, "{dtype} {code:#04x}");
                    assert_eq!(format.encode(signed(middle.next_up())), (code + 1) | sign, "{dtype} {code:#04x}");
                }
            }
        }
    }

    #[test]
    fn overflow_saturates_and_nan_stays() {
        for (format, dtype) in TYPES {
            let largest = f64::from(format.decode(format.largest_code));
            for beyond in [largest, largest.next_up(), 1.5 * largest, 1e300, f64::INFINITY] {
                assert_eq!(format.encode(beyond), format.largest_code, "{dtype} {beyond}");
                assert_eq!(format.encode(-beyond), format.largest_code | 0x80, "{dtype} -{beyond}");
            }
            assert_eq!(format.encode(f64::NAN), 0x7F, "{dtype}");
            assert_eq!(format.encode(-f64::NAN), 0x7F, "{dtype}");
            let least = f64::from(format.decode(1));
            let tiny = [(least / 2.0, 0), ((least / 2.0).next_up(), 1), (f64::from_bits(1), 0), (0.0, 0)];
            for (value, code) in tiny {
                assert_eq!(format.encode(value), code, "{dtype} {value:e}");
                assert_eq!(format.encode(-value), code | 0x80, "{dtype} -{value:e}");
            }
        }
    }
}
