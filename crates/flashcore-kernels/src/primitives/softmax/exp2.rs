//! `exp2` of scores: by the special-function unit, or every fourth by FMA emulation.

use flashcore_ir::types::{F32, U32};
use flashcore_ir::{Builder, Compare, Reg};

/// Implementation of the exponentials of scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Exponential {
    /// All by the special-function unit.
    Unit,
    /// Every fourth by a polynomial on the FMA units, which have time where the special-function unit has none.
    Shared,
}

/// One exponential of this many is a polynomial under [`Exponential::Shared`].
const EMULATED_EVERY: usize = 4;

impl Exponential {
    /// The other implementation.
    pub(crate) const fn other(self) -> Self {
        match self {
            Self::Unit => Self::Shared,
            Self::Shared => Self::Unit,
        }
    }

    /// `score = 2^score`, of score `index` of a lane.
    pub(super) fn apply(self, k: &mut Builder, score: Reg<F32>, index: usize) {
        match self {
            Self::Shared if index.is_multiple_of(EMULATED_EVERY) => emulate(k, score),
            _ => k.exp2_to(score),
        }
    }
}

/// `target = 2^target` of a number that is not positive: a polynomial for the fraction, and the integer into the bits of
/// the exponent. The relative error is at most `3e-6`; what is below the smallest normal number becomes zero.
fn emulate(k: &mut Builder, target: Reg<F32>) {
    /// Added to a number, it leaves the nearest integer in the low bits.
    const MAGIC: f32 = 12_582_912.0;
    /// `2^x` from -1/2 to 1/2, the highest power first: least squares of the relative error at Chebyshev nodes.
    const COEFFICIENTS: [f32; 5] = [0.009_560_51, 0.055_917_04, 0.240_249_81, 0.693_121_97, 0.999_999_2];
    const SMALLEST: f32 = -126.0;
    const MANTISSA_BITS: u32 = 23;
    let vanishes = k.compare(Compare::Lt, target, SMALLEST);
    let clamped = k.max(target, SMALLEST);
    let shifted = k.add(clamped, MAGIC);
    let integer = k.sub(shifted, MAGIC);
    let fraction = k.sub(clamped, integer);
    let power = k.copy(COEFFICIENTS[0]);
    for coefficient in &COEFFICIENTS[1..] {
        k.scale_add_to(power, fraction, *coefficient);
    }
    let bits = k.reinterpret::<F32, U32>(shifted);
    let exponent = k.shl(bits, MANTISSA_BITS);
    let power = k.reinterpret::<F32, U32>(power);
    let bits = k.add(power, exponent);
    let power = k.reinterpret::<U32, F32>(bits);
    let result = k.select(vanishes, 0.0f32, power);
    k.set(target, result);
}
