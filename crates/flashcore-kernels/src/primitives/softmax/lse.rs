//! Log-sum-exp (LSE): by the logarithm instruction, or to the last bits of an `f32`.

use core::f32::consts::{LN_2, LOG2_E};

use flashcore_ir::types::{F32, U32};
use flashcore_ir::{Builder, Compare, Reg};
use flashcore_problem::LseBase;

/// The rounding error of the natural logarithm of 2 in `f32`.
const LN_2_REST: f32 = (core::f64::consts::LN_2 - LN_2 as f64) as f32;
/// The bits of the square root of one half.
const ROOT_OF_HALF_BITS: u32 = core::f32::consts::FRAC_1_SQRT_2.to_bits();
const MANTISSA_BITS: u32 = 23;
/// `2 / 9`, `2 / 7`, `2 / 5` and `2 / 3`: the series of the logarithm after its first term.
const SERIES: [f32; 4] = [2.0 / 9.0, 2.0 / 7.0, 2.0 / 5.0, 2.0 / 3.0];

/// The log-sum-exp of a row from its row max, in base 2, and its row sum, by the approximate logarithm.
pub(crate) fn lse_log2(k: &mut Builder, row_max: Reg<F32>, row_sum: Reg<F32>, base: LseBase) -> Reg<F32> {
    // In an empty row both terms are minus infinity, and so is their sum.
    let logarithm = k.log2(row_sum);
    match base {
        LseBase::Natural => k.eval((row_max + logarithm) * LN_2),
        LseBase::Two => k.add(row_max, logarithm),
    }
}

/// The log-sum-exp of a row from its row max, in base 2, and its row sum, for results with all bits of an `f32`.
///
/// The instruction for logarithms is off by `2^-22` of its result, and adding a row max of 40 in base 2 rounds by twice
/// that: together more than `f32` can bear. Here only the last addition rounds by as much as a bit of the result.
pub(crate) fn lse_exact(k: &mut Builder, row_max: Reg<F32>, row_sum: Reg<F32>, base: LseBase) -> Reg<F32> {
    k.section("logarithm", |k| {
        let logarithm = natural_logarithm(k, row_sum);
        if base == LseBase::Two {
            // The row max of an empty row is minus infinity.
            return k.fma(logarithm, LOG2_E, row_max);
        }
        // An empty row has no row max, and a sum of zero.
        let empty = k.compare(Compare::Eq, row_sum, 0.0f32);
        let rest = k.mul(row_max, LN_2_REST);
        let rest = k.select(empty, 0.0f32, rest);
        let small = k.add(logarithm, rest);
        k.fma(row_max, LN_2, small)
    })
}

/// The natural logarithm of a positive normal number; a NaN stays one.
fn natural_logarithm(k: &mut Builder, x: Reg<F32>) -> Reg<F32> {
    // `x = 2^exponent * mantissa`, the mantissa from the square root of one half to that of two.
    let bits = k.reinterpret::<F32, U32>(x);
    let exponent = k.eval((bits - ROOT_OF_HALF_BITS).signed() >> MANTISSA_BITS);
    let mantissa = k.eval(bits - (exponent << MANTISSA_BITS).unsigned());
    let mantissa = k.reinterpret::<U32, F32>(mantissa);
    // `ln(m) = 2 * (s + s^3 / 3 + s^5 / 5 + ...)` with `s = (m - 1) / (m + 1)`, which is at most 0.172.
    let (numerator, denominator) = (k.sub(mantissa, 1.0f32), k.add(mantissa, 1.0f32));
    let s = k.div(numerator, denominator);
    let square = k.mul(s, s);
    let series = k.copy(SERIES[0]);
    for coefficient in &SERIES[1..] {
        k.scale_add_to(series, square, *coefficient);
    }
    let cube = k.mul(square, s);
    let twice = k.add(s, s);
    let logarithm = k.fma(cube, series, twice);
    let exponent = k.to_f32(exponent);
    // A NaN has bits like any other number, so it is passed on separately.
    let nan = k.mul(x, 0.0f32);
    let logarithm = k.add(logarithm, nan);
    k.fma(exponent, LN_2, logarithm)
}
