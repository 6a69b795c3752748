//! The numbers in which the reference computes: `f64` for types up to `f32`, and pairs of `f64` (106 bits) for `f64`.

use std::ops::{Add, Div, Mul, Neg, Sub};

/// Arithmetic that the reference needs.
pub(crate) trait Real:
    Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self> + Neg<Output = Self>
{
    fn from_f64(value: f64) -> Self;
    /// The product of two `f64`, exactly where the type can.
    fn product(left: f64, right: f64) -> Self;
    fn exp(self) -> Self;
    fn tanh(self) -> Self;
    /// The nearest `f64`.
    fn high(self) -> f64;
    /// The rest that `high` leaves.
    fn low(self) -> f64;
}

impl Real for f64 {
    fn from_f64(value: f64) -> Self {
        value
    }

    fn product(left: f64, right: f64) -> Self {
        left * right
    }

    fn exp(self) -> Self {
        f64::exp(self)
    }

    fn tanh(self) -> Self {
        f64::tanh(self)
    }

    fn high(self) -> f64 {
        self
    }

    fn low(self) -> f64 {
        0.0
    }
}

/// A sum of two `f64` of which the second is at most half a unit in the last place of the first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Pair {
    high: f64,
    low: f64,
}

/// The sum and what rounding took from it (Knuth).
fn two_sum(left: f64, right: f64) -> Pair {
    let high = left + right;
    let part = high - left;
    Pair { high, low: (left - (high - part)) + (right - part) }
}

/// The sum and what rounding took from it, where the first is the larger (Dekker).
fn quick_two_sum(left: f64, right: f64) -> Pair {
    let high = left + right;
    Pair { high, low: right - (high - left) }
}

impl Add for Pair {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let (high, low) = (two_sum(self.high, other.high), two_sum(self.low, other.low));
        let sum = quick_two_sum(high.high, high.low + low.high);
        quick_two_sum(sum.high, sum.low + low.low)
    }
}

impl Neg for Pair {
    type Output = Self;

    fn neg(self) -> Self {
        Self { high: -self.high, low: -self.low }
    }
}

impl Sub for Pair {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        self + -other
    }
}

impl Mul for Pair {
    type Output = Self;

    fn mul(self, other: Self) -> Self {
        let product = Self::product(self.high, other.high);
        let cross = self.high.mul_add(other.low, self.low * other.high);
        quick_two_sum(product.high, product.low + cross)
    }
}

impl Div for Pair {
    type Output = Self;

    fn div(self, other: Self) -> Self {
        let first = self.high / other.high;
        let rest = self - other * Self::from_f64(first);
        let second = rest.high / other.high;
        let rest = rest - other * Self::from_f64(second);
        quick_two_sum(first, second) + Self::from_f64(rest.high / other.high)
    }
}

/// The natural logarithm of 2 to 106 bits.
const LN_2: Pair = Pair { high: std::f64::consts::LN_2, low: 2.319_046_813_846_299_6e-17 };
/// The argument of the series of the exponential is divided by 2 so often.
const HALVINGS: i32 = 6;

impl Real for Pair {
    fn from_f64(value: f64) -> Self {
        Self { high: value, low: 0.0 }
    }

    fn product(left: f64, right: f64) -> Self {
        let high = left * right;
        Self { high, low: left.mul_add(right, -high) }
    }

    /// `2^k exp(r)` with `r` up to ln(2) / 2; `exp(r)` is the series of `r / 64`, which is up to 0.0055, squared six
    /// times. The first term left out is 0.0055^11 / 11! = 3e-33.
    fn exp(self) -> Self {
        if self.high < -1000.0 {
            return Self::from_f64(0.0);
        }
        let power = (self.high / std::f64::consts::LN_2).round_ties_even();
        let rest = self - LN_2 * Self::from_f64(power);
        let scale = 2_f64.powi(-HALVINGS);
        let rest = Self { high: rest.high * scale, low: rest.low * scale };
        let mut sum = Self::from_f64(1.0);
        for term in (1..=10).rev() {
            sum = Self::from_f64(1.0) + rest * sum / Self::from_f64(f64::from(term));
        }
        for _ in 0..HALVINGS {
            sum = sum * sum;
        }
        // In two steps: the second may lead to subnormals, the first does not.
        let (first, second) = (2_f64.powi(power as i32 / 2), 2_f64.powi(power as i32 - power as i32 / 2));
        Self { high: sum.high * first * second, low: sum.low * first * second }
    }

    fn tanh(self) -> Self {
        let one = Self::from_f64(1.0);
        if self.high.abs() < 1e-5 {
            let square = self * self;
            let series = one - square * (one / Self::from_f64(3.0) - square * Self::from_f64(2.0 / 15.0));
            return self * series;
        }
        let magnitude = if self.high < 0.0 { -self } else { self };
        let power = (-(magnitude + magnitude)).exp();
        let tangent = (one - power) / (one + power);
        if self.high < 0.0 { -tangent } else { tangent }
    }

    fn high(self) -> f64 {
        self.high
    }

    fn low(self) -> f64 {
        self.low
    }
}

#[cfg(test)]
mod tests {
    use super::{Pair, Real};

    /// Digits from a table, as the sum of two `f64`.
    fn check(found: Pair, high: f64, low: f64) {
        let error = (found - Pair { high, low }).high.abs();
        assert!(error <= high.abs() * 1e-28, "{found:?}, not {high:e} + {low:e}: {error:e}");
    }

    #[test]
    fn functions_of_pairs() {
        let one = Pair::from_f64(1.0);
        // e = 2.718281828459045 2353602874713526625, and its reciprocal.
        check(one.exp(), std::f64::consts::E, 1.445_646_891_729_250_2e-16);
        check(one.exp() * (-one).exp(), 1.0, 0.0);
        check(Pair::from_f64(-300.0).exp() * Pair::from_f64(300.0).exp(), 1.0, 0.0);
        for x in [1e-9, 3e-6, 0.9e-5, 1.1e-5, 0.01, 0.3, 1.0, 5.0, -0.7] {
            let x = Pair::from_f64(x);
            let tangent = x.tanh();
            // tanh(2x) = 2 tanh(x) / (1 + tanh(x)^2)
            let double = (tangent + tangent) / (one + tangent * tangent);
            let error = ((x + x).tanh() - double).high / double.high;
            assert!(error.abs() < 1e-24, "{x:?} {error:e}");
        }
        let third = one / Pair::from_f64(3.0);
        check(third + third + third, 1.0, 0.0);
        check(Pair::product(1.0 + f64::EPSILON, 1.0 + f64::EPSILON), 1.0 + 2.0 * f64::EPSILON, f64::EPSILON.powi(2));
    }
}
