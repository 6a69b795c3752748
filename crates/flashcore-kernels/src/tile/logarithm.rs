//! Logarithms to the last bits of an `f32`.

use core::f32::consts::LN_2;

use flashcore_ir::types::{F32, S32, U32};
use flashcore_ir::{Builder, Compare, Reg};

/// What rounding took from the natural logarithm of 2.
const LN_2_REST: f32 = (core::f64::consts::LN_2 - LN_2 as f64) as f32;
/// The bits of the square root of one half.
const ROOT_OF_HALF_BITS: u32 = core::f32::consts::FRAC_1_SQRT_2.to_bits();
const MANTISSA_BITS: u32 = 23;
/// `2 / 9`, `2 / 7`, `2 / 5` and `2 / 3`: the series of the logarithm behind its first term.
const SERIES: [f32; 4] = [2.0 / 9.0, 2.0 / 7.0, 2.0 / 5.0, 2.0 / 3.0];

/// The natural logarithm of the sum of exponentials whose largest is `2^maximum`, of which `sum` is relative to it.
///
/// The instruction for logarithms is off by `2^-22` of its result, and adding a maximum of 40 in base 2 rounds by twice
/// that: together more than `f32` can bear. Here only the last addition rounds by as much as a bit of the result.
pub(crate) fn lse(k: &mut Builder, maximum: Reg<F32>, sum: Reg<F32>) -> Reg<F32> {
    k.section("logarithm", |k| {
        let logarithm = natural_logarithm(k, sum);
        // An empty row has no maximum, and a sum of zero.
        let empty = k.compare(Compare::Eq, sum, 0.0f32);
        let rest = k.mul(maximum, LN_2_REST);
        let rest = k.select(empty, 0.0f32, rest);
        let small = k.add(logarithm, rest);
        k.fma(maximum, LN_2, small)
    })
}

/// The natural logarithm of a positive normal number; a NaN stays one.
fn natural_logarithm(k: &mut Builder, x: Reg<F32>) -> Reg<F32> {
    // `x = 2^exponent * mantissa`, the mantissa from the square root of one half to that of two.
    let bits = k.reinterpret::<F32, U32>(x);
    let above = k.sub(bits, ROOT_OF_HALF_BITS);
    let above = k.reinterpret::<U32, S32>(above);
    let exponent = k.shr(above, MANTISSA_BITS);
    let exponent_bits = k.shl(exponent, MANTISSA_BITS);
    let exponent_bits = k.reinterpret::<S32, U32>(exponent_bits);
    let mantissa = k.sub(bits, exponent_bits);
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
    // A NaN has bits like any other number, so it is let through on its own.
    let nan = k.mul(x, 0.0f32);
    let logarithm = k.add(logarithm, nan);
    k.fma(exponent, LN_2, logarithm)
}
