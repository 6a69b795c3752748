//! Tolerances: the largest errors that the gate accepts.
//!
//! A fixed tolerance is either too loose for long sequences, where outputs are small, or too tight for short ones. The
//! bounds here are multiples of the error that the same-precision [`reference`](crate::reference()) makes on the same
//! inputs, plus a floor for inputs on which the reference happens to be lucky. Both are in units of `u`, the
//! [unit roundoff](DType::unit_roundoff) of the problem's type.
//!
//! Measured needs of a correct tiled kernel (weights rounded before they are normalised, tiles of 32 and 128 keys),
//! over 10 shapes from 1x1x8 to 512x512x64 (queries, keys, columns), causal and not, 400 seeds of random inputs for one
//! to three rows and 2 to 8 for 64 and more, and up to 20 of each stress:
//!
//! | | `f16`, `bf16` | `f32` |
//! |---|---|---|
//! | relative L2 of the kernel, random inputs, 64 rows and more | 0.48 u to 0.57 u | 4 u to 10 u |
//! | relative L2 of the reference, the same | 0.57 u to 0.64 u | 4 u to 10 u |
//! | relative L2 beyond twice the reference's, worst: one row of 97 keys | 0.54 u | 6.4 u |
//! | largest error beyond twice the reference's, worst: one row of 97 keys | 1.40 u of the largest output | 7.7 u |
//! | the same two with scores to 10,000, for which the allowance is 10,000 u of `f32` | below 0 | 97 u and 566 u |
//! | log-sum-exp error, scores of ordinary size | 2.6e-6 | 2.6e-6 |
//! | log-sum-exp error, scores to 10,000 | 3.9e-3 | 4.1e-3 |
//!
//! Measured needs of the CPU backend at all of its levels, over 1,200 random problems of every feature (2,512 results
//! in 16-bit types), and the errors that the bounds catch:
//!
//! | | `f16` | `bf16` |
//! |---|---|---|
//! | log-sum-exp error, scores below 30, for which at least 1.5e-5 is allowed | 3.4e-6 | 9.0e-6 |
//! | log-sum-exp error over its bound, all scores | 0.38 | 0.43 |
//! | relative bias, where at most half a roundoff is allowed (852 and 728 results) | 0.115 u | 0.085 u |
//! | relative bias over its bound, where at most a roundoff is allowed | 0.28 | 0.36 |
//! | relative bias of a tiled kernel that truncates weights, 40 rows of 64 keys and more | 0.54 u to 0.62 u | 0.54 u to
//! 0.62 u |
//! | relative bias of one that truncates outputs, the same | 0.71 u to 0.72 u | 0.71 u to 0.72 u |
//!
//! Sums of scores or of outputs in `f16` are coarser than the reference, which sums in `f32`: measured to fail on some
//! inputs (0.65e-3 relative L2, largest error 6% to 18% above the bound, log-sum-exp 1.3e-3). They are configurations
//! to be measured, and this gate makes no exception for them.
//!
//! An output of few elements is a small sample: both are rounded to nearest, and weights relative to the row max may be
//! several times as wrong as normalized ones. So the reference of an 8-bit or 16-bit problem with at most 32 elements is
//! the worst of nine ways to round its weights. Measured with `f16` and `bf16`, 8 to 203 keys, 60 to 1,500 seeds each: of the
//! bound on the relative L2 error that one way gives, a correct tiled kernel of 32 keys a tile needs at most
//!
//! | elements | 1 | 2 | 4 | 8 | 16 | 32 | 64 | 256 | 1024 |
//! |---|---|---|---|---|---|---|---|---|---|
//! | one way | 31 | 2.7 | 1.5 | 0.81 | 0.54 | 0.42 | 0.39 | 0.35 | 0.34 |
//!
//! and with nine ways, 300 seeds of 97 keys, 0.48 with 4 elements, 0.43 with 8 and 0.36 with 32. These nine let through
//! weights of 8 bits in 13 of 300 outputs of 4 elements (one way: 3) and 2 of 300 of 8 elements (1), and no other planted
//! mistake that one way catches, truncation apart, which neither sees in so few elements.
//!
//! Types of 8 bits: codes are exact in every type that sums have, and so are products of two codes in `f32`. Against the
//! oracle on the same codes, key and value in FP8 under a query of 16 or 32 bits have the bounds of the query's type and
//! nothing more: their error is that of the computation. Where the query is `e4m3`, weights are rounded to `e4m3` and the
//! output to 16 bits, so the floors have the roundoff of the coarser, the weights, 2^-4: a row that one key dominates may
//! have that key's weight off by 2^-4, rounded relative to a maximum of earlier keys, where the reference rounds it to
//! exactly 1. The multiples of the reference's error are those of its own weights in e4m3.
//!
//! With 64 rows and more, the bound on the relative L2 error comes to at most 1.0e-3 for `f16` and 8.0e-3 for `bf16`,
//! and that on the largest error to at most 5 u of the largest output.

use crate::{DType, Expected, Problem, ReferenceError};

/// Floor of the bound on the log-sum-exp of 16-bit types: 2^-16.
const LSE_FLOOR: f64 = 1.0 / 65_536.0;
/// Floor of the bound on the relative bias, in unit roundoffs.
const BIAS_FLOOR: f64 = 0.125;

/// The bounds of the gate for one problem and its inputs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Bound on the absolute error of each output element: twice the reference's, plus one rounding step at the largest
    /// output.
    pub max_error: f64,
    /// Bound on the Euclidean norm of the errors over that of the expected output: twice the reference's, plus three
    /// quarters of a roundoff.
    pub relative_l2: f64,
    /// Bound on the absolute error of each log-sum-exp: twice the reference's, plus 2^-16 in 16-bit types, and for
    /// large scores the error of rounding them to `f32`; in base 2 the same error in its unit, 1.44 times the number.
    /// Merging the splits of a split-KV run scales them by the exponentials of these numbers: 2^-16 is then 1/32 of a
    /// roundoff of `f16`.
    pub lse: f64,
    /// Bound on the magnitude of the [relative bias](crate::Verdict::relative_bias): twice that of rounding to nearest
    /// on the same inputs, plus an eighth of a roundoff; no limit where nothing is rounded to 16 bits.
    pub relative_bias: f64,
}

impl Limits {
    /// The bounds for `problem` on the inputs that gave `expected` and `reference`.
    pub fn new(problem: &Problem, expected: &Expected, reference: &ReferenceError) -> Self {
        // Of the weights and of the output, which are of one type unless both inputs are of 8 bits.
        let (weights, output) = (problem.dtype.unit_roundoff(), problem.dtypes().output.unit_roundoff());
        let roundoff = weights.max(output);
        let accumulator = problem.dtype.accumulator().unit_roundoff();
        // The log-sum-exp is an f32 even when everything else is f64.
        let lse_roundoff = DType::F32.unit_roundoff();
        let magnitudes = expected.output.iter().map(|value| value.abs());
        let largest_output = magnitudes.filter(|value| value.is_finite()).fold(0.0, f64::max);

        // Sums of n terms in the problem's own precision differ by about sqrt(n) roundoffs when their order does; in a
        // wider accumulator the difference vanishes.
        let is_narrow = problem.dtype != problem.dtype.accumulator();
        let sum_noise = if is_narrow { 0.0 } else { (problem.key_length as f64).sqrt() };
        // A rounded score multiplies its weight by exp(rounding).
        let score_noise = accumulator * expected.largest_score;
        Self {
            max_error: 2.0 * reference.max_error
                + (weights + output + sum_noise * roundoff + score_noise) * largest_output,
            relative_l2: 2.0 * reference.relative_l2 + (0.75 + sum_noise) * roundoff + score_noise,
            lse: 2.0 * reference.lse
                + problem.lse_form.base.per_natural()
                    * (if is_narrow { LSE_FLOOR } else { (8.0 + sum_noise) * lse_roundoff }
                        + 4.0 * lse_roundoff * expected.largest_score),
            relative_bias: if is_narrow {
                2.0 * reference.relative_bias + BIAS_FLOOR * roundoff + score_noise
            } else {
                f64::INFINITY
            },
        }
    }
}
