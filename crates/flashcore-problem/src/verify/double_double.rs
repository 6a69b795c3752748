//! Double-double numbers: sums of two `f64`, 106 bits in all.
//!
//! The oracle of results in `f64` computes in them. In plain `f64` it has the rounding errors of what it judges: in one
//! row of one key, 128 columns, a softcap and a sink it was wrong by 2.3 roundoffs, and the backend by 4.0 to the other
//! side.

use core::ops::{Add, Div, Mul, Neg, Sub};

use crate::expression::ExpressionReal;

/// A sum of two `f64`, of which the second is at most half a unit in the last place of the first. Infinities and NaN are
/// in the first, and the second is then 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub(crate) struct DoubleDouble {
    high: f64,
    low: f64,
}

/// The natural logarithm of 2.
const LN_2: DoubleDouble = DoubleDouble { high: core::f64::consts::LN_2, low: 2.319_046_813_846_299_6e-17 };
/// Halvings of the argument of the exponential's series, each undone by a squaring.
const HALVINGS: i32 = 6;
/// Terms of the exponential's series after the first: the next one is 0.0055^11 / 11! = 3e-33.
const EXP_TERMS: u8 = 10;
/// Below this magnitude the series of the hyperbolic tangent has 106 bits after three terms.
const SMALL_TANGENT: f64 = 1e-5;

impl DoubleDouble {
    fn new(high: f64, low: f64) -> Self {
        Self { high, low: if high.is_finite() { low } else { 0.0 } }
    }

    /// The product of two `f64`, exactly.
    pub(crate) fn product(left: f64, right: f64) -> Self {
        let high = left * right;
        Self::new(high, left.mul_add(right, -high))
    }

    /// The nearest `f64`.
    pub(crate) fn to_f64(self) -> f64 {
        self.high
    }

    /// The sum, exactly (Knuth).
    fn sum(left: f64, right: f64) -> Self {
        let high = left + right;
        let of_right = high - left;
        Self::new(high, (left - (high - of_right)) + (right - of_right))
    }

    /// The sum, exactly, of a number and one of smaller magnitude (Dekker).
    fn sum_ordered(larger: f64, smaller: f64) -> Self {
        let high = larger + smaller;
        Self::new(high, smaller - (high - larger))
    }

    fn scaled(self, power_of_two: f64) -> Self {
        Self::new(self.high * power_of_two, self.low * power_of_two)
    }
}

impl From<f64> for DoubleDouble {
    fn from(value: f64) -> Self {
        Self { high: value, low: 0.0 }
    }
}

impl Add for DoubleDouble {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let (high, low) = (Self::sum(self.high, other.high), Self::sum(self.low, other.low));
        let sum = Self::sum_ordered(high.high, high.low + low.high);
        Self::sum_ordered(sum.high, sum.low + low.low)
    }
}

impl Neg for DoubleDouble {
    type Output = Self;

    fn neg(self) -> Self {
        Self { high: -self.high, low: -self.low }
    }
}

impl Sub for DoubleDouble {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        self + -other
    }
}

impl Mul for DoubleDouble {
    type Output = Self;

    fn mul(self, other: Self) -> Self {
        let product = Self::product(self.high, other.high);
        let cross = self.high * other.low + self.low * other.high;
        Self::sum_ordered(product.high, if product.high.is_finite() { product.low + cross } else { 0.0 })
    }
}

impl Div for DoubleDouble {
    type Output = Self;

    fn div(self, other: Self) -> Self {
        let first = self.high / other.high;
        if !first.is_finite() || !other.high.is_finite() {
            return first.into();
        }
        let rest = self - other * first.into();
        let second = rest.high / other.high;
        let rest = rest - other * second.into();
        Self::sum_ordered(first, second) + (rest.high / other.high).into()
    }
}

impl ExpressionReal for DoubleDouble {
    fn from_f32(value: f32) -> Self {
        f64::from(value).into()
    }

    fn from_i32(value: i32) -> Self {
        Self::from_f32(value as f32)
    }

    fn magnitude(self) -> Self {
        if self.high < 0.0 { -self } else { self }
    }

    /// `2^k exp(r)` with `r` up to ln(2) / 2; `exp(r)` is the series of `r / 64`, squared six times.
    fn exponential(self) -> Self {
        // Infinite, NaN, or past the range of normal numbers, where low parts would be subnormal.
        if self.high.is_nan() || self.high.abs() > 700.0 {
            return self.high.exp().into();
        }
        let power = (self.high / core::f64::consts::LN_2).round_ties_even();
        let rest = (self - LN_2 * power.into()).scaled(2_f64.powi(-HALVINGS));
        let one = Self::from(1.0);
        let mut sum = one;
        for term in (1..=EXP_TERMS).rev() {
            sum = one + rest * sum / f64::from(term).into();
        }
        for _ in 0..HALVINGS {
            sum = sum * sum;
        }
        sum.scaled(2_f64.powi(power as i32))
    }

    fn tangent(self) -> Self {
        let one = Self::from(1.0);
        let magnitude = self.magnitude();
        let tangent = if magnitude.high < SMALL_TANGENT {
            let square = magnitude * magnitude;
            magnitude * (one - square * (one / 3.0.into() - square * (2.0 / 15.0).into()))
        } else {
            let power = (-(magnitude + magnitude)).exponential();
            (one - power) / (one + power)
        };
        if self.high < 0.0 { -tangent } else { tangent }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(found: DoubleDouble, expected: DoubleDouble, bound: f64) {
        let error = (found - expected).high.abs() / expected.high.abs();
        assert!(error <= bound, "{found:?}, not {expected:?}: {error:e}");
    }

    #[test]
    fn arithmetic_has_106_bits() {
        let (one, three) = (DoubleDouble::from(1.0), DoubleDouble::from(3.0));
        check(one / three * three, one, 1e-31);
        check(one / three + one / three + one / three, one, 1e-31);
        let more = DoubleDouble::from(1.0 + f64::EPSILON);
        assert_eq!(more * more, DoubleDouble { high: 1.0 + 2.0 * f64::EPSILON, low: f64::EPSILON * f64::EPSILON });
        let large = DoubleDouble::from(1e20);
        assert_eq!((large + one) - large, one);
    }

    /// Identities that hold only if both sides have more bits than an `f64`.
    #[test]
    fn functions_have_more_bits_than_f64() {
        let one = DoubleDouble::from(1.0);
        // e = 2.71828182845904523536028747135266249775724709...
        check(one.exponential(), DoubleDouble { high: core::f64::consts::E, low: 1.445_646_891_729_250_2e-16 }, 1e-29);
        for x in [-600.0, -20.3, -1.0, 1e-9, 0.9e-5, 1.1e-5, 0.3, 7.0, 600.0] {
            let x = DoubleDouble::from(x);
            check(x.exponential() * (-x).exponential(), one, 1e-28);
        }
        for x in [1e-9, 0.9e-5, 1.1e-5, 0.01, 0.3, 1.0, 5.0, -0.7] {
            let tangent = DoubleDouble::from(x).tangent();
            check((tangent + tangent) / (one + tangent * tangent), DoubleDouble::from(2.0 * x).tangent(), 1e-24);
        }
    }

    #[test]
    fn infinities_and_nan_are_those_of_f64() {
        let numbers = [0.0, -0.0, 1.5, -3.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN];
        let same = |found: DoubleDouble, expected: f64, what: &str| {
            let agrees = found.to_f64() == expected || (found.to_f64().is_nan() && expected.is_nan());
            assert!(agrees, "{what}: {found:?}, not {expected}");
            assert!(found.low.is_finite(), "{what}: {found:?}");
        };
        for left in numbers {
            same(DoubleDouble::from(left).exponential(), left.exp(), &format!("exp({left})"));
            same(DoubleDouble::from(left).tangent(), left.tanh(), &format!("tanh({left})"));
            for right in numbers {
                let (a, b) = (DoubleDouble::from(left), DoubleDouble::from(right));
                same(a + b, left + right, &format!("{left} + {right}"));
                same(a - b, left - right, &format!("{left} - {right}"));
                same(a * b, left * right, &format!("{left} * {right}"));
                same(a / b, left / right, &format!("{left} / {right}"));
                assert_eq!(a < b, left < right, "{left} < {right}");
            }
        }
    }
}
