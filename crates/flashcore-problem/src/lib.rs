//! The attention problem, and the verification of every backend's answer to it.
//!
//! Every backend of flashcore (the CPU kernels, the simulator, the GPU) answers the same [`Problem`] on the same
//! [`Inputs`] and is judged by the same gate:
//!
//! ```
//! use flashcore_problem::{
//!     Alignment, DType, Evidence, Inputs, Mask, Problem, ReferenceError, judge, oracle, reference,
//! };
//!
//! let mut problem = Problem::new(1, 2, 97, 64, DType::F16);
//! problem.mask = Mask::Causal(Alignment::BottomRight);
//! problem.lse = true;
//! let inputs = Inputs::random(&problem, 7);
//!
//! // The right answer, in f64, and the error of a careful implementation in f16.
//! let expected = oracle(&problem, &inputs)?;
//! let yardstick = ReferenceError::measure(&problem, &inputs, &expected)?;
//!
//! // Any backend would stand here.
//! let outputs = reference(&problem, &inputs)?;
//!
//! let verdict = judge(&problem, &expected, &yardstick, &Evidence::new(&inputs, &outputs));
//! assert!(verdict.passed(), "{verdict}");
//! # Ok::<(), flashcore_problem::Invalid>(())
//! ```
//!
//! # The definition
//!
//! For each batch and query head, query row `i` and key `j`, with `offset` from the [`Alignment`] of the mask
//! (without a mask, from [`Alignment::BottomRight`]):
//!
//! 1. `score = scale * q_scale[i] * k_scale[j] * dot(query[i], key[j])`, the scales only of tensors of 8 bits that have
//!    them: see [`ScaleStrides`];
//! 2. with a softcap `c`, `score = c * tanh(score / c)`;
//! 3. with `ALiBi`, `score -= slope[head] * |i + offset - j|`;
//! 4. with a bias, `score += bias[batch, head, i, j]`;
//! 5. with a [`ScoreMod`], `score` becomes what it says;
//! 6. keys outside the [`Mask`], past the batch's key length, or taken out by a [`MaskMod`], take no part: see
//!    [below](#nan-in-keys-that-take-no-part) for what that means where they hold a NaN;
//! 7. `output[i] = sum(exp(score) * v_scale * value) / (sum(exp(score)) + exp(sink[head]))`, the sink only where there is
//!    one;
//! 8. `lse[i]` is the logarithm of that denominator, natural or in base 2, or of `sum(exp(score))` alone: see [`LseForm`].
//!
//! A row that attends no key gives output 0 and a log-sum-exp of minus infinity, or of the sink where there is one and the
//! form includes it.
//!
//! # NaN in keys that take no part
//!
//! A KV cache has rows that nobody has written yet. The table says if a NaN or an infinity there can reach an output:
//!
//! | it stands in | oracle, CPU | GPU kernels |
//! |---|---|---|
//! | K or V of a key that no row of the batch attends, by the mask and the batch's key length: see [`Problem::attended_range`] | never | never |
//! | K of a key that this row does not attend, or its bias | never | never |
//! | V of a key that this row does not attend and another row of the head does | never | possibly |
//! | V of a key that only a [`MaskMod`] takes out | never | possibly |
//!
//! *Possibly* is because tensor cores multiply a whole tile of V by weights of which some are zero, as in `FlashAttention`
//! and cuDNN: a row in the same tile as one that attends the key gets `0 * NaN`. So memory past a length, past the causal
//! end or before every window may be uninitialised; V rows that some query attends must be finite.
//!
//! # Numbers that are not finite
//!
//! * For NaN in keys that take no part, see above.
//! * A score of minus infinity is a weight of 0. A score that is NaN or plus infinity makes output and log-sum-exp of its
//!   row NaN, where step 8 taken by the letter would give plus infinity: the quotient of step 7 is NaN then, and whoever
//!   merges rows by their log-sum-exp must not take it for a number.
//! * Backends divide last, as every flash kernel does: where weights times values add up to more than the type of the
//!   sums holds, the output is infinite although the quotient may not be. With weights up to 1 that takes values above the
//!   largest number over the number of keys: 600 keys of equal scores and values of 1e37 in `f32` or `bf16`.
//!
//! # Invariants
//!
//! * This crate depends on no other flashcore crate and contains no unsafe code.
//! * Which keys a row attends is decided in one function, [`Problem::attended_keys`], less those that a [`MaskMod`] takes
//!   out.
//! * The gate is never loosened to let something pass.

#[macro_use]
mod operands;

mod append;
mod attention;
mod conversions;
mod display;
mod dtype;
mod dtypes;
pub mod expression;
mod float8;
mod invalid;
mod kv_cache;
mod layout;
mod lse_form;
mod mask;
mod merge;
mod problem;
pub mod quantize;
mod rows;
mod scale;
mod sequence;
mod sequence_check;
mod tensor_view;
mod tensors;
mod validated;
mod verify;
mod views;

pub use append::{
    AppendExpected, AppendProblem, AppendStrides, MOST_APPEND_COLUMNS, MOST_SLOTS, PositionType, Positions, QkNorm,
    Rotary, RotaryStyle, ScaleSource, ValueCache, append_oracle, append_oracle_with,
};
pub use conversions::{kv_cache_inputs, kv_cache_outputs};
pub use dtype::{DType, ParseDTypeError};
pub use dtypes::{DTypes, ParseDTypesError};
pub use expression::{MaskMod, ScoreMod};
pub use invalid::{Invalid, ProblemError, TensorError};
pub use kv_cache::{
    KvCacheData, KvCacheExpected, KvCacheInputs, KvCacheOutputs, KvCacheProblem, RowMove, kv_cache_oracle,
    kv_cache_oracle_with,
};
pub use layout::{Layout, Shape, Strides, TensorStrides};
pub use lse_form::{LseBase, LseForm};
pub use mask::{Alignment, Mask};
pub use merge::{MOST_MERGE_COLUMNS, MOST_PARTS, MergeExpected, MergeProblem, MergeStrides, StateMerge, merge_oracle};
pub use operands::{Access, Operand, OperandSet};
pub use problem::Problem;
pub use quantize::{
    ParseScaleModeError, Quantization, QuantizeError, Quantized, Rotation, Saturated, ScaleMode, quantize,
};
pub use rows::{ElementType, Extent, Fill, Row, Slot, Switch};
pub use scale::{CallStrides, Scale, ScaleStrides, ScaleView, ScaleViewMut};
pub use sequence::{PagedKv, Paging, Sequence, TotalRows};
pub use sequence_check::check_sequence_operands;
pub use tensor_view::{BiasView, HostElement, TensorList, TensorView, TensorViewMut};
pub use tensors::{Bias, BiasStrides, Inputs, Outputs, PositionNumbers, Tensor, Value};
pub use validated::Validated;
pub use verify::{
    Element, Evidence, Expected, Failure, GuardError, Guarded, Limits, ReferenceError, SequenceLengths, SplitMix64,
    Stress, Verdict, Worst, judge, oracle, reference,
};
pub use views::{InputViews, OutputViews};
