//! What attention is, and who decides whether a backend computed it.
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
//! problem.log_sum_exp = true;
//! let inputs = Inputs::random(&problem, 7);
//!
//! // What is right, in f64, and how far a careful implementation in f16 is from it.
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
//! For each batch and query head, query row `i` and key `j`, with `offset` from the [`Alignment`]:
//!
//! 1. `score = scale * dot(query[i], key[j])`;
//! 2. with a softcap `c`, `score = c * tanh(score / c)`;
//! 3. with `ALiBi`, `score -= slope[head] * |i + offset - j|`;
//! 4. with a bias, `score += bias[batch, head, i, j]`;
//! 5. with a [`ScoreMod`], `score` becomes what it says;
//! 6. keys outside the [`Mask`], past the batch's key length, or taken out by a [`MaskMod`], take no part: not even a NaN
//!    there is seen;
//! 7. `output[i] = sum(exp(score) * value) / (sum(exp(score)) + exp(sink[head]))`, the sink only where there is one;
//! 8. `log_sum_exp[i]` is the natural logarithm of that denominator.
//!
//! A row that attends no key gives output 0 and a log-sum-exp of minus infinity, or of the sink where there is one.
//!
//! # Invariants
//!
//! * This crate depends on no other flashcore crate and contains no unsafe code.
//! * Which keys a row attends is decided in one function, [`Problem::attended_keys`], less those that a [`MaskMod`] takes
//!   out.
//! * The gate is never loosened to let something pass.

mod dtype;
pub mod formula;
mod gate;
mod guard;
mod invalid;
mod layout;
mod limits;
mod mask;
mod oracle;
mod problem;
mod random;
mod reference;
mod rounding_bias;
mod tensors;
mod verdict;
mod views;

pub use dtype::{DType, ParseDTypeError};
pub use formula::{MaskMod, ScoreMod};
pub use gate::{Evidence, judge};
pub use guard::{GuardError, Guarded};
pub use invalid::{Invalid, ProblemError, TensorError};
pub use layout::{Layout, Shape, Strides, TensorStrides};
pub use limits::Limits;
pub use mask::{Alignment, Mask};
pub use oracle::{Expected, oracle};
pub use problem::Problem;
pub use random::{SplitMix64, Stress};
pub use reference::{ReferenceError, reference};
pub use tensors::{Bias, BiasStrides, Inputs, Outputs, Tensor};
pub use verdict::{Element, Failure, Verdict, Worst};
pub use views::{BiasView, HostElement, InputViews, OutputViews, TensorView, TensorViewMut};
