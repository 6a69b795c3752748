//! Element types and their conversions to and from `f64`.

use crate::float8::Float8;
use half::{bf16, f16};
use std::fmt;
use std::str::FromStr;

/// The type of the elements of query, key, value or output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE half precision: 5 exponent bits, 10 stored mantissa bits.
    F16,
    /// bfloat16: 8 exponent bits, 7 stored mantissa bits.
    Bf16,
    /// IEEE single precision.
    F32,
    /// IEEE double precision.
    F64,
    /// FP8 with 4 exponent bits and 3 stored mantissa bits (OCP `e4m3fn`): up to 448, no infinity.
    E4m3,
    /// FP8 with 5 exponent bits and 2 stored mantissa bits (OCP): up to 57344, with infinities.
    E5m2,
}

impl DType {
    /// The types that all tensors of a problem can have.
    pub const ALL: [Self; 4] = [Self::F16, Self::Bf16, Self::F32, Self::F64];
    /// The types of 8 bits (FP8), which some tensors of a problem can have: see [`Problem::dtypes`](crate::Problem::dtypes).
    pub const FLOAT8: [Self; 2] = [Self::E4m3, Self::E5m2];

    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::E4m3 | Self::E5m2 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }

    /// The name used in commands, records and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::E4m3 => "e4m3",
            Self::E5m2 => "e5m2",
        }
    }

    /// The largest relative error of rounding a normal number to this type: half a unit in the last place.
    pub const fn unit_roundoff(self) -> f64 {
        match self {
            Self::F16 => 1.0 / (1_u64 << 11) as f64,
            Self::Bf16 => 1.0 / (1_u64 << 8) as f64,
            Self::F32 => 1.0 / (1_u64 << 24) as f64,
            Self::F64 => 1.0 / (1_u64 << 53) as f64,
            Self::E4m3 => 1.0 / 16.0,
            Self::E5m2 => 1.0 / 8.0,
        }
    }

    /// True for the types of 8 bits (FP8), which may come with scales.
    pub const fn is_float8(self) -> bool {
        matches!(self, Self::E4m3 | Self::E5m2)
    }

    /// The smallest normal number.
    pub const fn smallest_normal(self) -> f64 {
        match self {
            Self::F16 | Self::E5m2 => 1.0 / (1_u64 << 14) as f64,
            Self::Bf16 | Self::F32 => f32::MIN_POSITIVE as f64,
            Self::F64 => f64::MIN_POSITIVE,
            Self::E4m3 => 1.0 / 64.0,
        }
    }

    /// The largest finite number.
    pub const fn largest(self) -> f64 {
        match self {
            Self::F16 => 65_504.0,
            Self::Bf16 => f32::from_bits(0x7F7F_0000) as f64,
            Self::F32 => f32::MAX as f64,
            Self::F64 => f64::MAX,
            Self::E4m3 => 448.0,
            Self::E5m2 => 57_344.0,
        }
    }

    /// The type in which scores, softmax and sums are computed: `f32`, and `f64` for `f64`.
    #[must_use]
    pub const fn accumulator(self) -> Self {
        match self {
            Self::F16 | Self::Bf16 | Self::F32 | Self::E4m3 | Self::E5m2 => Self::F32,
            Self::F64 => Self::F64,
        }
    }

    /// The bit pattern with which outputs are poisoned before a run.
    ///
    /// A signalling NaN with a payload of its own: arithmetic only ever produces quiet NaNs, so a backend can leave
    /// this pattern in an output only by not writing the element. (e4m3 has two NaN; conversions write the positive one.)
    pub const fn poison(self) -> u64 {
        match self {
            Self::F16 => 0x7D5A,
            Self::Bf16 => 0x7FA5,
            Self::F32 => 0x7FA5_A5A5,
            Self::F64 => 0x7FF5_A5A5_A5A5_A5A5,
            Self::E4m3 => 0xFF,
            Self::E5m2 => 0xFD,
        }
    }

    /// Writes `value`, rounded to nearest with ties to even, as the first [`size_bytes`](Self::size_bytes)
    /// little-endian bytes. Beyond the largest number lies infinity, but for the types of 8 bits, which saturate: see
    /// `float8.rs`.
    ///
    /// # Panics
    ///
    /// When `bytes` is shorter than one element.
    pub fn encode(self, value: f64, bytes: &mut [u8]) {
        match self {
            Self::F16 => bytes[..2].copy_from_slice(&f16::from_f32(round_to_odd(value)).to_le_bytes()),
            Self::Bf16 => bytes[..2].copy_from_slice(&bf16::from_f32(round_to_odd(value)).to_le_bytes()),
            Self::F32 => bytes[..4].copy_from_slice(&(value as f32).to_le_bytes()),
            Self::F64 => bytes[..8].copy_from_slice(&value.to_le_bytes()),
            Self::E4m3 => bytes[0] = Float8::E4M3.encode(value),
            Self::E5m2 => bytes[0] = Float8::E5M2.encode(value),
        }
    }

    /// Reads one element from the first [`size_bytes`](Self::size_bytes) little-endian bytes; exact.
    ///
    /// # Panics
    ///
    /// When `bytes` is shorter than one element.
    pub fn decode(self, bytes: &[u8]) -> f64 {
        let bits = self.bits(bytes);
        match self {
            Self::F16 => f16::from_bits(bits as u16).to_f64(),
            Self::Bf16 => bf16::from_bits(bits as u16).to_f64(),
            Self::F32 => f32::from_bits(bits as u32) as f64,
            Self::F64 => f64::from_bits(bits),
            Self::E4m3 => f64::from(Float8::E4M3.decode(bits as u8)),
            Self::E5m2 => f64::from(Float8::E5M2.decode(bits as u8)),
        }
    }

    /// The bit pattern of the first element of `bytes`, in the low bits.
    pub(crate) fn bits(self, bytes: &[u8]) -> u64 {
        let mut wide = [0; 8];
        wide[..self.size_bytes()].copy_from_slice(&bytes[..self.size_bytes()]);
        u64::from_le_bytes(wide)
    }

    /// The numbers of all 256 codes of a type of 8 bits; `None` for the others.
    pub const fn float8_table(self) -> Option<&'static [f32; 256]> {
        static E4M3: [f32; 256] = Float8::E4M3.table();
        static E5M2: [f32; 256] = Float8::E5M2.table();
        match self {
            Self::E4m3 => Some(&E4M3),
            Self::E5m2 => Some(&E5M2),
            Self::F16 | Self::Bf16 | Self::F32 | Self::F64 => None,
        }
    }

    /// `value` rounded to this type.
    pub fn round(self, value: f64) -> f64 {
        let mut bytes = [0; 8];
        self.encode(value, &mut bytes);
        self.decode(&bytes)
    }
}

/// `f64` to `f32`, truncated, with the last bit set when anything was lost.
///
/// Rounding to nearest twice, first to `f32` and then to a 16-bit type, can land on the wrong side of a tie. An odd
/// last bit is never a tie for a narrower type, so the second rounding sees which side the value was on. (The `half`
/// crate's own conversion from `f64` rounds twice on processors with F16C.)
fn round_to_odd(value: f64) -> f32 {
    let nearest = value as f32;
    if value.is_nan() || nearest as f64 == value {
        return nearest;
    }
    let rounded_away = (nearest as f64).abs() > value.abs();
    f32::from_bits((nearest.to_bits() - u32::from(rounded_away)) | 1)
}

impl fmt::Display for DType {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// A name that is not an element type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not an element type; use f16, bf16, f32, f64, e4m3 or e5m2")]
pub struct ParseDTypeError(String);

impl FromStr for DType {
    type Err = ParseDTypeError;

    fn from_str(name: &str) -> Result<Self, ParseDTypeError> {
        Self::ALL
            .into_iter()
            .chain(Self::FLOAT8)
            .find(|dtype| dtype.name() == name)
            .ok_or_else(|| ParseDTypeError(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for dtype in DType::ALL.into_iter().chain(DType::FLOAT8) {
            assert_eq!(dtype.to_string().parse(), Ok(dtype));
        }
        assert_eq!("half".parse::<DType>(), Err(ParseDTypeError("half".to_owned())));
    }

    #[test]
    fn every_16_bit_pattern_survives_a_round_trip() {
        for dtype in [DType::F16, DType::Bf16] {
            for pattern in 0..=u16::MAX {
                let value = dtype.decode(&pattern.to_le_bytes());
                let mut bytes = [0; 2];
                dtype.encode(value, &mut bytes);
                assert!(value.is_nan() || u16::from_le_bytes(bytes) == pattern, "{dtype} {pattern:#06x}");
            }
        }
    }

    /// The midpoint of two neighbours goes to the even one; the closest `f64` on either side does not.
    #[test]
    fn ties_go_to_even_and_near_ties_to_the_nearest() {
        for dtype in [DType::F16, DType::Bf16] {
            let largest = if dtype == DType::F16 { 0x7BFE } else { 0x7F7E };
            for pattern in 0..largest {
                let below = dtype.decode(&u16::to_le_bytes(pattern));
                let above = dtype.decode(&u16::to_le_bytes(pattern + 1));
                let middle = f64::midpoint(below, above);
                let even = if pattern % 2 == 0 { below } else { above };
                for sign in [1.0, -1.0] {
                    assert_eq!(dtype.round(sign * middle), sign * even, "{dtype} {pattern:#06x}");
                    assert_eq!(dtype.round(sign * middle.next_down()), sign * below, "{dtype} {pattern:#06x}");
                    assert_eq!(dtype.round(sign * middle.next_up()), sign * above, "{dtype} {pattern:#06x}");
                }
            }
        }
    }

    #[test]
    fn extremes_round_as_ieee_says() {
        let cases = [
            (DType::F16, 65519.0, 65504.0),
            (DType::F16, 65520.0, f64::INFINITY),
            (DType::F16, 1e300, f64::INFINITY),
            (DType::Bf16, -1e300, f64::NEG_INFINITY),
            (DType::F32, 1e300, f64::INFINITY),
            (DType::F16, 1e-300, 0.0),
            (DType::Bf16, 1e-300, 0.0),
            (DType::E4m3, 449.0, 448.0),
            (DType::E4m3, f64::NEG_INFINITY, -448.0),
            (DType::E5m2, 1e300, 57_344.0),
            (DType::E5m2, 1e-300, 0.0),
        ];
        for (dtype, value, expected) in cases {
            assert_eq!(dtype.round(value), expected, "{dtype} {value}");
        }
        for dtype in DType::ALL.into_iter().chain(DType::FLOAT8) {
            assert_eq!(dtype.round(dtype.largest()), dtype.largest(), "{dtype}");
            assert!(dtype.round(f64::NAN).is_nan());
            let poison = dtype.poison().to_le_bytes();
            assert!(dtype.decode(&poison).is_nan(), "the poison of {dtype} is a NaN");
        }
    }
}
