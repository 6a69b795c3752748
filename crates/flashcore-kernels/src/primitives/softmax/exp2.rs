//! Weights of scores, `2^(score · scale + shift)`: by the special-function unit, or every fourth by FMA emulation.
//!
//! In the online softmax the shift of a row is minus its row max. Where the LSE of a row is known, as in a backward pass, the
//! shift is minus the LSE, and weights are those of the whole row ([`Exponential::weights_of_lse`]).

use core::f32::consts::LOG2_E;

use flashcore_ir::types::{F32, U32};
use flashcore_ir::{Builder, Compare, Reg};
use flashcore_problem::LseBase;

use crate::primitives::Accumulator;

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
    /// Replaces scores by weights, `2^(score · scale + shift)`, in place; scale and shift are those of a row. Visits each
    /// weight with its row and column, as [`Accumulator::each`].
    pub(super) fn weights(
        self,
        k: &mut Builder,
        scores: &Accumulator,
        scale: impl Fn(usize) -> Option<Reg<F32>>,
        shift: &[Reg<F32>],
        mut visit: impl FnMut(&mut Builder, usize, u32, Reg<F32>),
    ) {
        let mut index = 0;
        scores.each(|row, column, score| {
            match scale(row) {
                Some(scale) => k.scale_add_to(score, scale, shift[row]),
                None => k.add_to(score, shift[row]),
            }
            self.apply(k, score, index);
            index += 1;
            visit(k, row, column, score);
        });
    }

    /// Replaces scores by weights, in place, given the LSE of each of a lane's rows: `exp(score - lse)`. `scale` is
    /// `scale * log2(e)`, or none where scores are scaled and in base 2 already. The weights of an empty row are zero.
    pub fn weights_of_lse(
        self,
        k: &mut Builder,
        scores: &Accumulator,
        scale: Option<Reg<F32>>,
        lse: &[Reg<F32>],
        base: LseBase,
    ) {
        k.section("weights of lse", |k| {
            let shift = lse.iter().map(|lse| {
                let empty = k.compare(Compare::Eq, *lse, f32::NEG_INFINITY);
                let shift = match base {
                    LseBase::Natural => k.mul(*lse, -LOG2_E),
                    LseBase::Two => k.neg(*lse),
                };
                k.select(empty, 0.0f32, shift)
            });
            let shift: Vec<_> = shift.collect();
            self.weights(k, scores, |_| scale, &shift, |_, _, _, _| {});
        });
    }

    /// `score = 2^score`, of score `index` of a lane.
    fn apply(self, k: &mut Builder, score: Reg<F32>, index: usize) {
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
