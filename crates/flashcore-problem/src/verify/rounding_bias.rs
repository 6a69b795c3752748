//! The bias of rounding to nearest: the sum of errors that ought to cancel, on given inputs.
//!
//! Rounding to nearest errs to both sides, truncation only to one: a kernel that truncates its weights, or its output,
//! makes every output about 0.6 unit roundoffs too small. That is too little for a bound on errors and on their norm,
//! which leave room for three times as much, but it adds up over all elements, where the errors of rounding cancel: the
//! projection of the errors on the expected output shows it.
//!
//! The cancellation of errors depends on the inputs. Where all weights are equal, so are their roundings, and a row of
//! one weight has one rounding. That rounding depends on the number that weights are relative to: the row max, the
//! running max of the tiles so far, or the sum, and all of these are right. So the weights of every row are rounded
//! relative to the largest of them, and, [`WAYS`] less one times, to multiples of their sum; outputs are rounded after
//! [`WAYS`] shifts of less than a unit in the last place. The largest projection is the bias that rounding to nearest
//! may have.

use crate::DType;
use std::ops::AddAssign;

/// Ways to round.
pub(crate) const WAYS: usize = 8;

/// The projection of rounding errors on the expected output, for each way to round.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Leaning([f64; WAYS]);

/// Factors for the weights of a row, the largest of which is 1, before they are rounded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scales([f32; WAYS]);

impl Scales {
    /// The factors for a row with this sum of weights. Weights of 8 bits are relative to a row max: that of all keys, or of
    /// those so far, which is below it by something that differs from row to row like the sum does.
    pub(crate) fn new(dtype: DType, sum: f32) -> Self {
        if dtype.is_float8() {
            let shift = |way: usize| (way as f32 / WAYS as f32 + sum.log2()).rem_euclid(1.0);
            return Self(core::array::from_fn(|way| if way == 0 { 1.0 } else { (-shift(way)).exp2() }));
        }
        // Seven mantissas from 1 to 2, none of which is simple.
        let of_sum = |way: usize| (way as f32 / (WAYS - 1) as f32).exp2() / sum;
        Self(core::array::from_fn(|way| if way == 0 { 1.0 } else { of_sum(way) }))
    }

    /// The factor of one way.
    pub(crate) const fn of(&self, way: usize) -> f32 {
        self.0[way]
    }
}

impl Leaning {
    /// Adds the rounding of one weight, whose value has the product `value` with the expected output.
    pub(crate) fn add_weight(&mut self, dtype: DType, scales: &Scales, weight: f32, value: f64) {
        let factor = split_factor(dtype);
        for (sum, scale) in self.0.iter_mut().zip(scales.0) {
            let scaled = weight * scale;
            // Veltkamp splitting: the part of the mantissa that is left after the product is subtracted again is
            // rounded to nearest.
            let product = scaled * factor;
            let mut rounded = product - (product - scaled);
            if dtype.is_float8() && scaled < LEAST_NORMAL {
                // Subnormal: a multiple of the least number. What is added is the number whose last bit that is.
                let shift = LEAST_NORMAL * (1 << 20) as f32;
                rounded = (scaled + shift) - shift;
            }
            *sum += f64::from(rounded - scaled) / f64::from(scale) * value;
        }
    }

    /// Divides by the sum of the weights.
    pub(crate) fn divide(&mut self, sum: f64) {
        self.0.iter_mut().for_each(|projection| *projection /= sum);
    }

    /// The largest magnitude.
    pub(crate) fn largest(self) -> f64 {
        self.0.iter().fold(0.0, |largest, projection| largest.max(projection.abs()))
    }
}

impl AddAssign for Leaning {
    fn add_assign(&mut self, other: Self) {
        for (sum, term) in self.0.iter_mut().zip(other.0) {
            *sum += term;
        }
    }
}

/// One more than the power of two of the bits of an `f32` that a narrower type lacks.
const fn split_factor(dtype: DType) -> f32 {
    match dtype {
        DType::F16 => 8193.0,
        DType::Bf16 => 65537.0,
        DType::F32 | DType::F64 => 1.0,
        DType::E4m3 => 1_048_577.0,
        DType::E5m2 => 2_097_153.0,
    }
}

/// The smallest normal weight of e4m3, where the largest weight is 1 and stands for 256.
const LEAST_NORMAL: f32 = 1.0 / 16_384.0;

/// The projection of the roundings of the outputs, which other errors have shifted by up to two unit roundoffs.
pub(crate) fn output_leaning(dtype: DType, expected: &[f64]) -> Leaning {
    let mut leaning = Leaning::default();
    for &value in expected.iter().filter(|value| value.is_finite()) {
        for (number, sum) in leaning.0.iter_mut().enumerate() {
            let shift = (number as f64 + 0.5) / WAYS as f64 * 4.0 - 2.0;
            let shifted = value * (1.0 + shift * dtype.unit_roundoff());
            let rounding = dtype.round(shifted) - shifted;
            *sum += if rounding.is_finite() { rounding * value } else { 0.0 };
        }
    }
    leaning
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The splitting rounds as the conversion does.
    #[test]
    fn weights_are_rounded_to_nearest() {
        for dtype in [DType::F16, DType::Bf16] {
            for step in 1..1000 {
                let weight = step as f32 / 1000.0 + 1e-4;
                let mut leaning = Leaning::default();
                leaning.add_weight(dtype, &Scales::new(dtype, 1.0), weight, 1.0);
                assert_eq!(leaning.0[0], dtype.round(f64::from(weight)) - f64::from(weight), "{weight}");
            }
        }
    }

    /// Down to weights that vanish.
    #[test]
    fn weights_of_8_bits_are_rounded_to_nearest() {
        for step in 0..4000 {
            let weight = (step as f32 * -0.005_31).exp2();
            let mut leaning = Leaning::default();
            leaning.add_weight(DType::E4m3, &Scales::new(DType::E4m3, 1.0), weight, 1.0);
            let rounded = DType::E4m3.round(f64::from(weight) * 256.0) / 256.0;
            assert_eq!(leaning.0[0], rounded - f64::from(weight), "{weight}");
        }
    }

    #[test]
    fn equal_weights_lean_to_one_side_and_others_do_not() {
        let of = |weights: &[f32]| {
            let (mut leaning, sum) = (Leaning::default(), weights.iter().sum());
            for &weight in weights {
                leaning.add_weight(DType::F16, &Scales::new(DType::F16, sum), weight, 1.0);
            }
            leaning.divide(f64::from(sum));
            leaning.largest() / DType::F16.unit_roundoff()
        };
        let equal = of(&[0.3; 1000]);
        assert!((0.5..1.0).contains(&equal), "{equal}");
        let different: Vec<f32> = (0..1000).map(|number| (-0.005_17 * number as f32).exp()).collect();
        assert!(of(&different) < 0.06, "{}", of(&different));
    }
}
