//! Accuracy of configs: what a kernel makes of the precision of its operands, and the yardstick that it is judged by.

use core::fmt;

use flashcore_problem::{DType, Expected, Inputs, Invalid, Problem, ReferenceError, Tensor};

use crate::config::Config;

/// Unit roundoff of `tf32`: 10 fraction bits, as `f16` has.
const TF32_ROUNDOFF: f64 = 1.0 / 2048.0;
/// Half of what the gate adds to twice the error of the reference for rounded weights, in roundoffs: that of `f16`, for the
/// relative L2 error and for the largest error in units of the largest output.
const WEIGHT_L2: f64 = 0.375;
const WEIGHT_MAX: f64 = 1.0;

/// Precision of the operands as a kernel multiplies them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accuracy {
    /// It multiplies them as they are, and sums in `f32`.
    Exact,
    /// `f32` as the sum of two `tf32` (3xTF32): the gate of `f32` holds as it is.
    NearF32,
    /// `f32` rounded to `tf32` (1xTF32): a relative error of up to 2^-11 of each operand.
    Tf32,
}

impl fmt::Display for Accuracy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Exact => "operands as they are",
            Self::NearF32 => "f32 by three products of tf32 (3xTF32): errors near those of f32; the scalar kernel multiplies f32 as it is",
            Self::Tf32 => "f32 rounded to tf32 (1xTF32): relative errors up to 2^-11 of each operand, as f16 has",
        })
    }
}

/// The error of a careful implementation with the accuracy of a config, by which the gate judges its outputs.
///
/// That is the same for all but 1xTF32, which is measured with query, key and value rounded to `tf32`, against the answer
/// to the inputs as they are; for the weights, which it rounds too, it has the allowance of `f16`, whose fraction is as long.
pub fn reference_error(
    config: Config,
    problem: &Problem,
    inputs: &Inputs,
    expected: &Expected,
) -> Result<ReferenceError, Invalid> {
    if config.accuracy() != Accuracy::Tf32 {
        return ReferenceError::measure(problem, inputs, expected);
    }
    let mut rounded = inputs.clone();
    for tensor in [&mut rounded.query, &mut rounded.key, &mut rounded.value] {
        round_to_tf32(tensor);
    }
    let measured = ReferenceError::measure(problem, &rounded, expected)?;
    let finite = expected.output.iter().map(|value| value.abs()).filter(|value| value.is_finite());
    let largest = finite.fold(0.0, f64::max);
    Ok(ReferenceError {
        max_error: measured.max_error + WEIGHT_MAX * TF32_ROUNDOFF * largest,
        relative_l2: measured.relative_l2 + WEIGHT_L2 * TF32_ROUNDOFF,
        ..measured
    })
}

/// Rounds finite `f32` to nearest, ties away from zero.
fn round_to_tf32(tensor: &mut Tensor) {
    if tensor.dtype != DType::F32 {
        return;
    }
    for bytes in tensor.data.chunks_exact_mut(4) {
        let bits = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        if f32::from_bits(bits).is_finite() {
            bytes.copy_from_slice(&(bits.wrapping_add(0x1000) & !0x1fff).to_le_bytes());
        }
    }
}
