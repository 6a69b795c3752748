//! Element types, encoded and decoded here and nowhere else.

use crate::abi::header::Header;

/// The type of the elements of query, key, value and output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    F16,
    Bf16,
    F32,
    F64,
}

impl Element {
    pub(crate) const ALL: [Self; 4] = [Self::F16, Self::Bf16, Self::F32, Self::F64];

    pub(crate) fn code(self) -> i32 {
        let name = match self {
            Self::F16 => "DTYPE_F16",
            Self::Bf16 => "DTYPE_BF16",
            Self::F32 => "DTYPE_F32",
            Self::F64 => "DTYPE_F64",
        };
        Header::get().constant(name)
    }

    pub(crate) fn size(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }

    /// Bits after the point, and the exponent of the least normal number.
    fn format(self) -> (i32, i32) {
        match self {
            Self::F16 => (10, -14),
            Self::Bf16 => (7, -126),
            Self::F32 => (23, -126),
            Self::F64 => (52, -1022),
        }
    }

    /// Half of the distance from 1 to the next number: the largest relative error of rounding.
    pub(crate) fn roundoff(self) -> f64 {
        2_f64.powi(-self.format().0 - 1)
    }

    /// The roundoff of the type in which sums are made.
    pub(crate) fn sum_roundoff(self) -> f64 {
        if self == Self::F64 { Self::F64.roundoff() } else { Self::F32.roundoff() }
    }

    /// The least number above 0.
    pub(crate) fn least(self) -> f64 {
        let (digits, least_exponent) = self.format();
        // In two steps: 2^-1074 is no power that `powi` gets right in one.
        2_f64.powi(least_exponent) * 2_f64.powi(-digits)
    }

    pub(crate) fn largest(self) -> f64 {
        match self {
            Self::F16 => 65504.0,
            Self::Bf16 => f64::from(f32::from_bits(0x7f7f_0000)),
            Self::F32 => f64::from(f32::MAX),
            Self::F64 => f64::MAX,
        }
    }

    /// The nearest finite number of this type, ties to even.
    pub(crate) fn round(self, value: f64) -> f64 {
        match self {
            Self::F64 => value,
            _ if !value.is_finite() || value == 0.0 => value,
            Self::F32 => f64::from(value as f32).clamp(-self.largest(), self.largest()),
            Self::F16 | Self::Bf16 => {
                let (digits, least_exponent) = self.format();
                let exponent = ((value.to_bits() >> 52 & 0x7ff) as i32 - 1023).max(least_exponent);
                let step = 2_f64.powi(exponent - digits);
                ((value / step).round_ties_even() * step).clamp(-self.largest(), self.largest())
            }
        }
    }

    /// Writes a number, rounded.
    pub(crate) fn write(self, value: f64, bytes: &mut [u8]) {
        let value = self.round(value);
        match self {
            Self::F64 => bytes.copy_from_slice(&value.to_ne_bytes()),
            Self::F32 => bytes.copy_from_slice(&(value as f32).to_ne_bytes()),
            Self::Bf16 => bytes.copy_from_slice(&(((value as f32).to_bits() >> 16) as u16).to_ne_bytes()),
            Self::F16 => {
                let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
                let magnitude = value.abs();
                let bits = if value.is_nan() {
                    0x7e00
                } else if value.is_infinite() {
                    0x7c00
                } else if magnitude < 2_f64.powi(-14) {
                    (magnitude * 2_f64.powi(24)) as u16
                } else {
                    let exponent = (magnitude.to_bits() >> 52) as i32 - 1023;
                    let digits = (magnitude * 2_f64.powi(10 - exponent)) as u16 & 0x3ff;
                    ((exponent + 15) as u16) << 10 | digits
                };
                bytes.copy_from_slice(&(sign | bits).to_ne_bytes());
            }
        }
    }

    pub(crate) fn read(self, bytes: &[u8]) -> f64 {
        match self {
            Self::F64 => f64::from_ne_bytes(bytes.try_into().unwrap()),
            Self::F32 => f64::from(f32::from_ne_bytes(bytes.try_into().unwrap())),
            Self::Bf16 => f64::from(f32::from_bits(u32::from(u16::from_ne_bytes(bytes.try_into().unwrap())) << 16)),
            Self::F16 => {
                let bits = u16::from_ne_bytes(bytes.try_into().unwrap());
                let digits = f64::from(bits & 0x3ff);
                let magnitude = match i32::from(bits >> 10 & 0x1f) {
                    0 => digits * 2_f64.powi(-24),
                    31 if digits == 0.0 => f64::INFINITY,
                    31 => f64::NAN,
                    exponent => (digits + 1024.0) * 2_f64.powi(exponent - 25),
                };
                if bits >> 15 == 1 { -magnitude } else { magnitude }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Element;
    use half::{bf16, f16};

    /// Every number of 16 bits, there and back, and the ties between neighbours, as another crate has them.
    #[test]
    fn numbers_of_16_bits() {
        for bits in 0..=u16::MAX {
            for (element, other) in
                [(Element::F16, f16::from_bits(bits).to_f64()), (Element::Bf16, bf16::from_bits(bits).to_f64())]
            {
                let value = element.read(&bits.to_ne_bytes());
                assert!(value == other || value.is_nan() && other.is_nan(), "{element:?} {bits:#x}");
                if value.is_finite() {
                    let mut bytes = [0; 2];
                    element.write(value, &mut bytes);
                    assert_eq!(u16::from_ne_bytes(bytes), bits, "{element:?}");
                    let next = element.read(&(bits + 1).to_ne_bytes());
                    let between = f64::midpoint(value, next);
                    if next.is_finite() {
                        element.write(between, &mut bytes);
                        let expected = match element {
                            Element::F16 => f16::from_f64(between).to_bits(),
                            _ => bf16::from_f64(between).to_bits(),
                        };
                        assert_eq!(u16::from_ne_bytes(bytes), expected, "{element:?} {between}");
                    }
                }
            }
        }
    }
}
