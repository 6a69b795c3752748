//! Quantisation: `f32`, `f16` or `bf16` query, key and value as FP8 codes with scales.
//!
//! A scale is the largest magnitude of its elements over the largest number of the type, so that nothing saturates; the
//! [`ScaleMode`] says which elements share one. Codes are `value / scale`, rounded once. Two options lower the error, and
//! both leave attention unchanged in exact arithmetic:
//!
//! * [`smooth_keys`](Quantization::smooth_keys) subtracts from every key of a sequence the mean `m` of these keys, of each
//!   KV head. All scores of a row change by `scale * dot(query, m)`, which softmax does not see. The log-sum-exp does:
//!   it is less by the same number, which [`Quantized::lse_shift`] gives back. (The smoothing of `SageAttention`.)
//! * [`rotation`](Quantization::rotation) multiplies query and key by the same orthogonal matrix: random signs, then a
//!   Hadamard matrix. An outlier of one column is spread over all, and scores stay what they are. (The incoherent
//!   processing of `FlashAttention-3`.)
//!
//! ```
//! # use flashcore_problem as flashcore;
//! use flashcore::{DType, Inputs, Problem, Quantization, ScaleMode, quantize};
//!
//! let mut problem = Problem::new(1, 8, 1, 64, DType::Bf16);
//! (problem.key_heads, problem.key_length) = (2, 300);
//! let inputs = Inputs::random(&problem, 7);
//!
//! // A KV cache in e4m3 under the query of 16 bits, one scale per KV head.
//! let options = Quantization::new("bf16 kv e4m3".parse()?, ScaleMode::KeyHead);
//! let quantized = quantize(&problem, &inputs.views(), options)?;
//! assert_eq!(quantized.problem.kv_dtype, Some(DType::E4m3));
//! assert_eq!(quantized.inputs.k_scale.as_ref().map(|scale| scale.data.len()), Some(2));
//! assert_eq!(quantized.saturated.total(), 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod codes;
mod element;
mod rotation;
mod smoothing;

pub use element::{computed_scale, quantized, row_scale, saturates};
pub use rotation::Rotation;

use crate::{DType, DTypes, InputViews, Inputs, Invalid, Operand, Problem, ScaleStrides};
use codes::{Rows, encode, round};
use std::fmt;
use std::str::FromStr;

/// The elements that share a scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ScaleMode {
    /// All, and the scale is given: elements beyond the largest number saturate, and are counted.
    Fixed(f32),
    /// All of a tensor.
    Tensor,
    /// Elements of a KV head; of the query, of the heads that share it.
    KeyHead,
    /// Elements of a sequence and KV head, as in `FlashAttention-3`.
    Sequence,
    /// Elements of a row and head.
    Token,
    /// Elements of so many rows of a tensor, counted from its beginning or that of a page, and of a head.
    ///
    /// [`ScaleStrides`] has no blocks, so the scale is repeated for each row; where the block is a page of the cache, there
    /// is one per page.
    Block(usize),
}

impl fmt::Display for ScaleMode {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(scale) => write!(formatter, "fixed:{scale}"),
            Self::Tensor => formatter.write_str("tensor"),
            Self::KeyHead => formatter.write_str("head"),
            Self::Sequence => formatter.write_str("sequence"),
            Self::Token => formatter.write_str("token"),
            Self::Block(rows) => write!(formatter, "block:{rows}"),
        }
    }
}

/// Text that does not name a scale mode.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no scale mode; there are tensor, head, sequence, token, block:64 and fixed:1")]
pub struct ParseScaleModeError(String);

impl FromStr for ScaleMode {
    type Err = ParseScaleModeError;

    fn from_str(text: &str) -> Result<Self, ParseScaleModeError> {
        let error = || ParseScaleModeError(text.to_owned());
        let (name, number) = text.split_once(':').map_or((text, None), |(name, number)| (name, Some(number)));
        Ok(match (name, number) {
            ("tensor", None) => Self::Tensor,
            ("head", None) => Self::KeyHead,
            ("sequence", None) => Self::Sequence,
            ("token", None) => Self::Token,
            ("block", Some(rows)) => Self::Block(rows.parse().ok().filter(|rows| *rows > 0).ok_or_else(error)?),
            ("fixed", Some(scale)) => {
                let is_right = |scale: &f32| *scale > 0.0 && scale.is_finite();
                Self::Fixed(scale.parse().ok().filter(is_right).ok_or_else(error)?)
            }
            _ => return Err(error()),
        })
    }
}

/// A way to quantise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quantization {
    /// The types that the tensors shall have. A type that is not of 8 bits has no scale; its tensor is rounded to it.
    pub types: DTypes,
    /// The elements that share a scale.
    pub scales: ScaleMode,
    /// True to subtract the mean of the keys of a sequence and KV head from each of them.
    pub smooth_keys: bool,
    /// The seed of the signs of a [`Rotation`] of query and key; none to leave them as they are.
    pub rotation: Option<u64>,
}

impl Quantization {
    /// Types and scales, and no option.
    pub const fn new(types: DTypes, scales: ScaleMode) -> Self {
        Self { types, scales, smooth_keys: false, rotation: None }
    }

    /// With or without smoothed keys.
    #[must_use]
    pub const fn with_smooth_keys(self, smooth_keys: bool) -> Self {
        Self { smooth_keys, ..self }
    }

    /// With a rotation whose signs come from a seed, or none.
    #[must_use]
    pub const fn with_rotation(self, rotation: Option<u64>) -> Self {
        Self { rotation, ..self }
    }
}

/// Elements beyond the largest number of their type, by more than rounding takes back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Saturated {
    /// Of the query.
    pub query: usize,
    /// Of the key.
    pub key: usize,
    /// Of the value.
    pub value: usize,
}

impl Saturated {
    /// Of all three.
    pub const fn total(self) -> usize {
        self.query + self.key + self.value
    }
}

/// A problem and its inputs in 8 bits.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    /// The problem with its new types, and with scales.
    pub problem: Problem,
    /// The inputs: codes and scales of rows that take part. Codes of other rows are 0, their scales 1.
    pub inputs: Inputs,
    /// Elements that were cut down to the largest number.
    pub saturated: Saturated,
    /// With smoothed keys, the number to add to the log-sum-exp of each row of the output, contiguous
    /// `[batch, query head, query row]`, in the base of the problem's [`LseForm`](crate::LseForm).
    pub lse_shift: Option<Vec<f32>>,
}

/// Reason why inputs cannot be quantised.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum QuantizeError {
    /// Inputs that do not fit the problem, or types that no problem has.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// Elements that are codes already.
    #[error("{tensor} is {dtype} already; quantise from f16, bf16, f32 or f64")]
    Codes {
        /// The tensor.
        tensor: &'static str,
        /// Element type of the tensor.
        dtype: DType,
    },
    /// A number without a scale.
    #[error("{tensor} has {value} in row {row} of batch or page {batch}, head {head}; a scale needs finite numbers")]
    NotFinite {
        /// The tensor.
        tensor: &'static str,
        /// The number.
        value: String,
        /// Batch, or page of a paged cache, that has the number.
        batch: usize,
        /// Head that has the number.
        head: usize,
        /// Row of the number in its batch or page.
        row: usize,
    },
    /// A scale that is not above 0 and finite, or a block without rows.
    #[error("the scale mode {0} is impossible; a fixed scale is finite and above 0, and a block has 1 row or more")]
    ScaleMode(ScaleMode),
    /// A rotation of a head dimension that few powers of two divide.
    #[error(
        "a Hadamard rotation needs a head dimension that is a multiple of {least}, and {head_dim} is not; pad the head, or \
         quantise without rotation"
    )]
    HeadDim {
        /// The head dimension.
        head_dim: usize,
        /// The least block of a rotation.
        least: usize,
    },
    /// Scores that are more than added to before softmax.
    #[error(
        "smoothing keys changes all scores of a row by one number, which {feature} does not leave without effect; quantise \
         without smoothing, or the problem without {feature}"
    )]
    Smoothing {
        /// The feature.
        feature: &'static str,
    },
    /// A row of the cache in two sequences, which would need two codes.
    #[error(
        "row {row} of batch or page {batch} belongs to sequences {first} and {second}, and {what} is of one sequence; use \
         scales per tensor, head, token or block without smoothing, or give each sequence rows of its own"
    )]
    SharedRow {
        /// Batch, or page of a paged cache, that has the row.
        batch: usize,
        /// Number of the row in its batch or page.
        row: usize,
        /// The first sequence that the row belongs to.
        first: usize,
        /// The other sequence that the row belongs to.
        second: usize,
        /// The thing that differs between the two.
        what: &'static str,
    },
}

/// Quantises query, key and value of a problem; all other inputs stay.
///
/// Only rows that take part count: those of no sequence, and keys that no query attends, may hold anything and become 0.
/// Rows of zeros have a scale of 1, and no scale is below the least normal `f32`.
pub fn quantize(problem: &Problem, inputs: &InputViews<'_>, options: Quantization) -> Result<Quantized, QuantizeError> {
    inputs.validate(problem)?;
    let Quantization { types, scales, smooth_keys, rotation } = options;
    let was = problem.dtypes();
    for (tensor, dtype) in [("query", was.query), ("key", was.key_value)] {
        if dtype.is_float8() {
            return Err(QuantizeError::Codes { tensor, dtype });
        }
    }
    let is_possible = match scales {
        ScaleMode::Fixed(scale) => scale > 0.0 && scale.is_finite(),
        ScaleMode::Block(rows) => rows > 0,
        ScaleMode::Tensor | ScaleMode::KeyHead | ScaleMode::Sequence | ScaleMode::Token => true,
    };
    if !is_possible {
        return Err(QuantizeError::ScaleMode(scales));
    }
    let quantized = problem
        .clone()
        .with_dtypes(types)
        .with_q_scale(types.query.is_float8())
        .with_k_scale(types.key_value.is_float8())
        .with_v_scale(types.key_value.is_float8());
    quantized.validate()?;
    let rotation = rotation.map(|seed| Rotation::new(problem.head_dim, seed)).transpose()?;
    if smooth_keys {
        smoothing::require_invariance(problem)?;
    }
    let sequence_of = match (scales, smooth_keys) {
        (_, true) => Some("the mean of keys"),
        (ScaleMode::Sequence, false) => Some("a scale"),
        _ => None,
    };
    if let Some(what) = sequence_of {
        refuse_shared_rows(problem, inputs, what)?;
    }
    let means = smooth_keys.then(|| smoothing::key_means(problem, inputs)).transpose()?;

    let strides = problem.strides();
    let query = Rows { problem, inputs, tensor: inputs.query, operand: Operand::Query, strides: strides.query };
    let key = Rows { tensor: inputs.key, operand: Operand::Key, strides: strides.key, ..query };
    let value = Rows { tensor: inputs.value, operand: Operand::Value, strides: strides.value, ..query };
    let rotate = |row: &mut [f64]| {
        if let Some(rotation) = &rotation {
            rotation.apply(row);
        }
    };
    let smooth_and_rotate = |sequence: usize, head: usize, row: &mut [f64]| {
        if let Some(means) = &means {
            means.subtract(sequence, head, row);
        }
        rotate(row);
    };
    let mut result = Inputs::copied(inputs);
    let mut saturated = Saturated::default();
    let rotate_query = |_: usize, _: usize, row: &mut [f64]| rotate(row);
    if types.query.is_float8() {
        let coded = encode(&query, types.query, scales, &rotate_query)?;
        (result.query, result.q_scale, saturated.query) = (coded.tensor, Some(coded.scale), coded.saturated);
    } else {
        result.query = round(&query, types.query, &rotate_query);
    }
    if types.key_value.is_float8() {
        let coded = encode(&key, types.key_value, scales, &smooth_and_rotate)?;
        (result.key, result.k_scale, saturated.key) = (coded.tensor, Some(coded.scale), coded.saturated);
        let coded = encode(&value, types.key_value, scales, &|_, _, _| ())?;
        (result.value, result.v_scale, saturated.value) = (coded.tensor, Some(coded.scale), coded.saturated);
    } else {
        result.key = round(&key, types.key_value, &smooth_and_rotate);
        result.value = round(&value, types.key_value, &|_, _, _| ());
    }
    let lse_shift = means.map(|means| means.lse_shift(&query));
    Ok(Quantized { problem: quantized, inputs: result, saturated, lse_shift })
}

/// Names a row of key and value that two sequences have.
fn refuse_shared_rows(problem: &Problem, inputs: &InputViews<'_>, what: &'static str) -> Result<(), QuantizeError> {
    let shape = problem.key_shape();
    let mut owners: Vec<Option<usize>> = vec![None; shape.batch * shape.rows];
    for sequence in inputs.sequences(problem) {
        for key in sequence.attended_range(problem) {
            let (batch, row) = sequence.key_row(key);
            let owner = &mut owners[batch * shape.rows + row];
            match *owner {
                Some(first) if first != sequence.index => {
                    return Err(QuantizeError::SharedRow { batch, row, first, second: sequence.index, what });
                }
                _ => *owner = Some(sequence.index),
            }
        }
    }
    Ok(())
}

/// The strides of the scales of a mode, and the rows of a tensor that share one.
fn scale_strides(mode: ScaleMode, scale: Operand, problem: &Problem) -> (ScaleStrides, usize) {
    let per_token = ScaleStrides::per_token(scale, problem);
    match mode {
        ScaleMode::Fixed(_) | ScaleMode::Tensor => (ScaleStrides::TENSOR, 1),
        ScaleMode::KeyHead => (ScaleStrides::KEY_HEAD, 1),
        ScaleMode::Sequence => (ScaleStrides::per_sequence(problem), 1),
        ScaleMode::Token => (per_token, 1),
        ScaleMode::Block(rows) => match problem.paged {
            Some(paged) if paged.page_size == rows && scale != Operand::QScale => {
                (ScaleStrides { batch: problem.key_heads, ..ScaleStrides::KEY_HEAD }, 1)
            }
            _ => (per_token, rows),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_have_names() {
        for name in ["tensor", "head", "sequence", "token", "block:64", "fixed:0.5"] {
            assert_eq!(name.parse::<ScaleMode>().map(|mode| mode.to_string()), Ok(name.to_owned()));
        }
        for wrong in ["", "row", "block", "block:0", "block:-1", "fixed:0", "fixed:nan", "fixed:inf", "tensor:1"] {
            assert_eq!(wrong.parse::<ScaleMode>(), Err(ParseScaleModeError(wrong.to_owned())));
        }
    }
}
