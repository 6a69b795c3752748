//! Errors of an output against the answer in `f64`.

use serde::{Deserialize, Serialize};

/// Errors of an output.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Errors {
    /// The Euclidean norm of the errors over that of the answer.
    pub relative_l2: f64,
    /// The root of the mean squared error.
    pub rmse: f64,
    /// The largest error.
    pub max_error: f64,
    /// The cosine of the angle between output and answer.
    pub cosine: f64,
    /// The norm of the output over that of the answer, less 1: below 0 where sums shrink. Errors at random add half of
    /// their square to it.
    pub size_bias: f64,
    /// The part of the answer that is in the output, less 1: its projection, to which errors at random add nothing.
    pub projection_bias: f64,
}

impl Errors {
    /// The errors of `actual`; NaN where one of its elements is.
    ///
    /// # Panics
    ///
    /// When the lengths differ.
    pub fn measure(actual: &[f64], expected: &[f64]) -> Self {
        assert_eq!(actual.len(), expected.len(), "an output has as many elements as the answer");
        let (mut squares, mut largest) = (0.0, 0.0_f64);
        let (mut of_actual, mut of_expected, mut product) = (0.0, 0.0, 0.0);
        for (&actual, &expected) in actual.iter().zip(expected) {
            let error = (actual - expected).abs();
            squares += error * error;
            largest = if error.is_nan() || largest.is_nan() { f64::NAN } else { largest.max(error) };
            of_actual += actual * actual;
            of_expected += expected * expected;
            product += actual * expected;
        }
        Self {
            relative_l2: (squares / of_expected).sqrt(),
            rmse: (squares / expected.len() as f64).sqrt(),
            max_error: largest,
            cosine: product / (of_actual * of_expected).sqrt(),
            size_bias: (of_actual / of_expected).sqrt() - 1.0,
            projection_bias: product / of_expected - 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_those_worked_out_by_hand() {
        let found = Errors::measure(&[2.7, 3.6], &[3.0, 4.0]);
        let expected = Errors {
            relative_l2: 0.1,
            rmse: 0.5 / 2.0_f64.sqrt(),
            max_error: 0.4,
            cosine: 1.0,
            size_bias: -0.1,
            projection_bias: -0.1,
        };
        let near = |left: f64, right: f64| assert!((left - right).abs() < 1e-12, "{found:?}");
        near(found.relative_l2, expected.relative_l2);
        near(found.rmse, expected.rmse);
        near(found.max_error, expected.max_error);
        near(found.cosine, expected.cosine);
        near(found.size_bias, expected.size_bias);
        near(found.projection_bias, expected.projection_bias);
        // An error across the answer lengthens the output and leaves the projection.
        let across = Errors::measure(&[3.0 - 0.4, 4.0 + 0.3], &[3.0, 4.0]);
        near(across.projection_bias, 0.0);
        near(across.size_bias, 1.01_f64.sqrt() - 1.0);
        assert!(Errors::measure(&[f64::NAN, 1.0], &[1.0, 1.0]).max_error.is_nan());
    }
}
