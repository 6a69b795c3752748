//! Inputs of the cases: values at which operations are decided, crossed with each other, and random ones.
//!
//! The inputs belong to the definition of a case, since a record holds what a GPU made of them; so they are the same
//! on every machine: nothing here goes through the mathematics library of the platform.

use flashcore_ir::{Fp8, Type};
use flashcore_problem::SplitMix64;
use half::{bf16, f16};

/// Contents of the elements of an input.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fill {
    /// Operand `operand` of `of`: first every combination of special values, as many as a good half of the elements
    /// hold, then special values, random bits, normal numbers and small integers as they come.
    Mixed {
        /// Which operand, from 0.
        operand: u32,
        /// Of how many.
        of: u32,
    },
    /// Like `Mixed`, with 1 in place of 0: divisors.
    NonZero {
        /// Which operand, from 0.
        operand: u32,
        /// Of how many.
        of: u32,
    },
    /// Uniform bits.
    Bits,
    /// Bits of which 31 in 32 are ones: what an `and` over a warp leaves something of.
    Dense,
    /// Bits of which 31 in 32 are zeros: what an `or` over a warp leaves something of.
    Sparse,
    /// Uniform below a bound.
    Below(u64),
    /// Below a bound, and now and then any bits: shift counts, positions of bit fields.
    Count(u64),
    /// One of these.
    Among(&'static [u64]),
    /// The index of the element, cut to the type: all values of 16 bits, where there are as many elements.
    Index,
    /// 0 or 1; the lanes of a warp all agree, all but one agree, or each goes its own way.
    WarpPredicate,
    /// Normal numbers of mean 0 and variance 1.
    Normal,
    /// Random signs and significands, exponents uniform between -12 and 12: sums in which small terms meet large ones.
    Wide,
    /// Subnormals and the least normal numbers.
    Tiny,
    /// Numbers, and one infinity or NaN in sixteen.
    Exceptional,
    /// Integers from -8 to 8, whose sums are exact in every order.
    SmallInteger,
    /// Four 8-bit floats, any of the finite ones: exponents over their whole range.
    FiniteFp8(Fp8),
    /// Four 8-bit floats that are integers from -8 to 8.
    SmallFp8(Fp8),
}

impl Fill {
    /// The bits of `count` elements.
    pub fn values(self, ty: Type, count: usize, random: &mut SplitMix64) -> Vec<u64> {
        if let Self::WarpPredicate = self {
            return warp_predicates(count, random);
        }
        let pair = pair_element(ty);
        (0..count)
            .map(|index| match pair {
                None => self.value(ty, index, count, random),
                // The upper half counts down, so that the halves differ.
                Some(element) => {
                    let low = self.value(element, index, count, random);
                    low | self.value(element, count - 1 - index, count, random) << 16
                }
            })
            .collect()
    }

    fn value(self, ty: Type, index: usize, count: usize, random: &mut SplitMix64) -> u64 {
        let bits = match self {
            Self::Mixed { operand, of } => mixed(ty, index, count, (operand, of), random),
            Self::NonZero { operand, of } => mixed(ty, index, count, (operand, of), random).max(1),
            Self::Bits => random.next_u64(),
            Self::Dense => (0..5).fold(0, |bits, _| bits | random.next_u64()),
            Self::Sparse => (0..5).fold(u64::MAX, |bits, _| bits & random.next_u64()),
            Self::Below(bound) => random.next_u64() % bound,
            Self::Count(bound) => {
                if random.below(8) == 0 {
                    random.next_u64()
                } else {
                    random.next_u64() % bound
                }
            }
            Self::Among(values) => values[random.below(values.len())],
            Self::Index => index as u64,
            Self::WarpPredicate => random.next_u64() & 1,
            Self::Normal => number(ty, normal(random)),
            Self::Wide => number(ty, wide(random)),
            Self::Tiny => tiny(ty, random),
            Self::Exceptional => {
                if random.below(16) == 0 {
                    exceptional(ty, random.below(3))
                } else {
                    number(ty, normal(random))
                }
            }
            Self::SmallInteger => number(ty, random.below(17) as f64 - 8.0),
            Self::FiniteFp8(ty) => four(|| finite_fp8(ty, random)),
            Self::SmallFp8(ty) => four(|| small_fp8(ty, random)),
        };
        cut(ty, bits)
    }
}

/// Four bytes as a word.
fn four(mut byte: impl FnMut() -> u8) -> u64 {
    u32::from_le_bytes(core::array::from_fn(|_| byte())).into()
}

/// Any code of a finite number.
fn finite_fp8(ty: Fp8, random: &mut SplitMix64) -> u8 {
    // The NaNs of e4m3 are the codes with all other bits set; of e5m2 the largest exponent has no number.
    let finite = match ty {
        Fp8::E4m3 => 0x7f,
        Fp8::E5m2 => 0x7c,
    };
    let sign = if random.below(2) == 0 { 0 } else { 0x80 };
    sign | random.below(finite) as u8
}

/// An integer from -8 to 8.
fn small_fp8(ty: Fp8, random: &mut SplitMix64) -> u8 {
    // Fraction bits and exponent of 1.
    let (fraction, one) = match ty {
        Fp8::E4m3 => (3, 7),
        Fp8::E5m2 => (2, 15),
    };
    let integer = random.below(17) as i32 - 8;
    let magnitude = integer.unsigned_abs();
    let code = match magnitude.checked_ilog2() {
        None => 0,
        Some(exponent) => (one + exponent) << fraction | (magnitude << fraction >> exponent) & ((1 << fraction) - 1),
    };
    code as u8 | if integer < 0 { 0x80 } else { 0 }
}

/// The element of a pair.
pub(super) const fn pair_element(ty: Type) -> Option<Type> {
    match ty {
        Type::F16x2 => Some(Type::F16),
        Type::Bf16x2 => Some(Type::Bf16),
        _ => None,
    }
}

fn cut(ty: Type, bits: u64) -> u64 {
    match ty.bits() {
        64 => bits,
        width => bits & ((1 << width) - 1),
    }
}

fn mixed(ty: Type, index: usize, count: usize, (operand, of): (u32, u32), random: &mut SplitMix64) -> u64 {
    let special = special_values(ty);
    let side = (1..=special.len()).rev().find(|side| side.pow(of) <= count * 3 / 4).unwrap_or(0);
    if index < side.pow(of) {
        return special[index / side.pow(operand) % side];
    }
    match random.below(4) {
        0 => special[random.below(special.len())],
        1 => random.next_u64(),
        2 => number(ty, normal(random)),
        _ => {
            let magnitude = random.below(ty.bits() as usize);
            match ty {
                Type::F32 | Type::Tf32 | Type::F16 | Type::Bf16 => number(ty, wide(random)),
                _ => cut(ty, random.next_u64()) >> magnitude,
            }
        }
    }
}

/// A normal number: the sum of twelve uniform ones has variance 1, and is the same on every machine.
fn normal(random: &mut SplitMix64) -> f64 {
    (0..12).map(|_| random.uniform()).sum::<f64>() - 6.0
}

fn wide(random: &mut SplitMix64) -> f64 {
    let exponent = random.below(25) as i32 - 12;
    let sign = if random.below(2) == 0 { 1.0 } else { -1.0 };
    // A power of two by its bits: `powi` may round differently elsewhere.
    let power = f64::from_bits(((1023 + exponent) as u64) << 52);
    sign * (1.0 + random.uniform()) * power
}

/// A number in a type; integers take what is left of it.
fn number(ty: Type, value: f64) -> u64 {
    match ty {
        Type::F32 | Type::Tf32 => u64::from((value as f32).to_bits()),
        // Software conversions: those of the processor are not everywhere.
        Type::F16 => u64::from(f16::from_f32_const(value as f32).to_bits()),
        Type::Bf16 => u64::from(bf16::from_f32_const(value as f32).to_bits()),
        _ => (value * 1000.0) as i64 as u64,
    }
}

/// Subnormals, and normal numbers of the lowest exponents.
fn tiny(ty: Type, random: &mut SplitMix64) -> u64 {
    let bits = random.next_u64();
    match ty {
        // Half of a tf32 subnormal lies in the bits that the tensor core ignores.
        Type::F32 | Type::Tf32 => bits & 0x81ff_ffff,
        Type::F16 => bits & 0x8fff,
        Type::Bf16 => bits & 0x81ff,
        _ => bits & 3,
    }
}

fn exceptional(ty: Type, which: usize) -> u64 {
    let [infinity, minus_infinity, nan] = match ty {
        Type::F16 => [0x7c00, 0xfc00, 0x7e00],
        Type::Bf16 => [0x7f80, 0xff80, 0x7fc0],
        _ => [0x7f80_0000, 0xff80_0000, 0x7fc0_0000],
    };
    [infinity, minus_infinity, nan][which]
}

fn warp_predicates(count: usize, random: &mut SplitMix64) -> Vec<u64> {
    let mut values = Vec::with_capacity(count);
    while values.len() < count {
        let mask: u32 = match random.below(5) {
            0 => 0,
            1 => u32::MAX,
            2 => 1 << random.below(32),
            3 => !(1 << random.below(32)),
            _ => random.next_u64() as u32,
        };
        values.extend((0..32).map(|lane| u64::from(mask >> lane & 1)));
    }
    values.truncate(count);
    values
}

/// The values at which operations on a type are decided, the most telling first: operations of three operands see
/// every combination of the first few only.
pub(super) const fn special_values(ty: Type) -> &'static [u64] {
    match ty {
        Type::Pred => &[0, 1],
        Type::U16 => &[0, 1, 0xffff, 0x8000, 0x7fff, 2, 0xff, 0x100, 0xfffe],
        Type::F16 => F16_VALUES,
        Type::Bf16 => BF16_VALUES,
        Type::U32 | Type::S32 | Type::F16x2 | Type::Bf16x2 => WORDS,
        Type::F32 | Type::Tf32 => F32_VALUES,
        Type::U64 | Type::S64 => WIDE_WORDS,
    }
}

const WORDS: &[u64] = &[
    0,
    1,
    0xffff_ffff,
    0x8000_0000,
    0x7fff_ffff,
    2,
    0xffff_fffe,
    0x8000_0001,
    0x1_0000,
    0xffff,
    3,
    31,
    32,
    33,
    63,
    64,
    0x7fff_fffe,
    0xffff_0000,
    0xaaaa_aaaa,
    0x5555_5555,
    0xff,
    0x100,
    0xffff_ff9c,
    100,
    0x00ff_ffff,
    0x0100_0000,
    0x0100_0001,
    0x7fff_ffc0,
    0xffff_ff80,
];

const WIDE_WORDS: &[u64] = &[
    0,
    1,
    u64::MAX,
    1 << 63,
    (1 << 63) - 1,
    0xffff_ffff,
    1 << 32,
    0x8000_0000,
    u64::MAX - 1,
    2,
    0x7fff_ffff,
    (1 << 63) | 1,
    0xffff_ffff_0000_0000,
    0xffff_ffff_8000_0000,
    3,
    100,
    -100i64 as u64,
    63,
    64,
    0xaaaa_aaaa_aaaa_aaaa,
    0x1_0000_0001,
];

const F32_VALUES: &[u64] = &[
    0x0000_0000, // 0
    0x8000_0000, // -0
    0x3f80_0000, // 1
    0xbf80_0000, // -1
    0x7f80_0000, // infinity
    0xff80_0000, // -infinity
    0x7fc0_0000, // NaN
    0x0000_0001, // the least subnormal
    0x7f7f_ffff, // the greatest number
    0x0080_0000, // the least normal number
    0xff7f_ffff, // the lowest number
    0x807f_ffff, // the greatest negative subnormal
    0x8080_0000, // minus the least normal number
    0x7f80_0001, // a signalling NaN
    0xffc1_2345, // a NaN with a sign and a payload
    0x3f00_0000, // 0.5
    0x3fc0_0000, // 1.5
    0x4020_0000, // 2.5
    0xbf00_0000, // -0.5
    0xc020_0000, // -2.5
    0x4000_0000, // 2
    0x4040_0000, // 3
    0x3eaa_aaab, // 1/3
    0x4b00_0001, // 2^23 + 1
    0x4b7f_ffff, // 2^24 - 1
    0x4b80_0000, // 2^24
    0x4f00_0000, // 2^31
    0x4eff_ffff, // the number below 2^31
    0xcf00_0000, // -2^31
    0xcf00_0001, // the number below -2^31
    0x4f80_0000, // 2^32
    0x4f7f_ffff, // the number below 2^32
    0x3f80_1000, // 1 + 2^-11: a tie of f16 and of tf32
    0x3f80_3000, // 1 + 3 · 2^-11: the next one
    0x3f80_1001, // a little more than a tie
    0x3f80_8000, // 1 + 2^-8: a tie of bf16
    0x3f81_8000, // 1 + 3 · 2^-8: the next one
    0x477f_e000, // 65504, the greatest f16
    0x477f_efff, // the number below 65520
    0x477f_f000, // 65520, the tie between 65504 and infinity
    0x3380_0000, // 2^-24, the least f16
    0x3300_0000, // 2^-25, the tie between it and 0
    0x3300_0001, // a little more
    0x3880_0000, // 2^-14, the least normal f16
    0x387f_e000, // a tie among the subnormals of f16
    0x7f7f_8000, // the tie between the greatest bf16 and infinity
    0x0000_8000, // a tie among the subnormals of bf16
    0x4300_0000, // 128
    0x42ff_ffff, // the number below it
    0xc2fc_0000, // -126
    0xc2fc_0001, // the number below it
    0xc314_8000, // -148.5
    0xc316_0000, // -150
    0x0080_0001, // the second normal number
    0x7e80_0000, // 2^126
    0x7e80_0001, // the number above it
    0x7f00_0000, // 2^127
    0x3fb5_04f3, // the root of 2
    0x3f7f_ffff, // the number below 1
    0x3f80_0001, // the number above 1
    0x007f_ffff, // the greatest subnormal
    0x0040_0000, // 2^-127
];

const F16_VALUES: &[u64] = &[
    0x0000, 0x8000, 0x3c00, 0xbc00, 0x7c00, 0xfc00, 0x7e00, 0x0001, 0x7bff, 0x0400, 0xfbff, 0x83ff, 0x8400, 0x7c01,
    0xfe12, 0x3800, 0x3e00, 0x4100, 0xb800, 0xc100, 0x4000, 0x4200, 0x3555, 0x6400, 0x6801, 0x67ff, 0x7800, 0x1400,
    0x1000, 0x3c01, 0x3bff, 0x03ff, 0x0200, 0x0401, 0xcb80, 0xce40, 0x4c00, 0x2e66,
];

const BF16_VALUES: &[u64] = &[
    0x0000, 0x8000, 0x3f80, 0xbf80, 0x7f80, 0xff80, 0x7fc0, 0x0001, 0x7f7f, 0x0080, 0xff7f, 0x807f, 0x8080, 0x7f81,
    0xffc1, 0x3f00, 0x3fc0, 0x4020, 0xbf00, 0xc020, 0x4000, 0x4040, 0x3eab, 0x4300, 0x437f, 0xc2fc, 0xc316, 0x3c00,
    0x3f81, 0x3f7f, 0x007f, 0x0040, 0x0081, 0x7f00, 0x5f00, 0x2000, 0x4180, 0x3b80,
];

#[cfg(test)]
mod tests {
    use super::*;

    fn values(fill: Fill, ty: Type, count: usize) -> Vec<u64> {
        fill.values(ty, count, &mut SplitMix64::new(7))
    }

    #[test]
    fn two_operands_meet_in_every_combination_of_special_values() {
        let [a, b] = [0, 1].map(|operand| values(Fill::Mixed { operand, of: 2 }, Type::F32, 2048));
        let pairs: std::collections::BTreeSet<(u64, u64)> = a.into_iter().zip(b).collect();
        let side = 39;
        assert_eq!(side * side, 1521, "which is within three quarters of 2048, and 40 squared is not");
        for a in &F32_VALUES[..side] {
            for b in &F32_VALUES[..side] {
                assert!(pairs.contains(&(*a, *b)), "{a:#x} with {b:#x}");
            }
        }
    }

    #[test]
    fn inputs_stay_what_they_were() {
        // A record holds what a GPU made of these: whoever changes them must make a new one.
        let first = |fill, ty| values(fill, ty, 4096)[4000..4003].to_vec();
        assert_eq!(first(Fill::Normal, Type::F32), [0xbed4_af23, 0xbc15_6280, 0x3e74_b942]);
        assert_eq!(first(Fill::Wide, Type::Bf16x2), [0xc0f3_3bd7, 0x4278_4054, 0x4187_c0cb]);
        assert_eq!(first(Fill::Mixed { operand: 0, of: 1 }, Type::U64), [0xfef0_8f0d_d354_5a98, 0x40, 0x31a]);
    }

    #[test]
    fn normal_numbers_are_normal() {
        let numbers: Vec<f64> = values(Fill::Normal, Type::F32, 20_000)
            .iter()
            .map(|bits| f64::from(f32::from_bits(*bits as u32)))
            .collect();
        let mean = numbers.iter().sum::<f64>() / 20_000.0;
        let variance = numbers.iter().map(|number| number * number).sum::<f64>() / 20_000.0;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05, "mean {mean}, variance {variance}");
    }
}
