//! KV-cache kernels: append of new keys and values, by slot or by sequence, with QK-norm, rotary embedding (`RoPE`)
//! and quantisation to FP8;
//! and `fused`, what an append inside of the attention launch is compiled for and called with.

mod append;
pub(crate) mod fused;
pub(crate) mod quantize;
pub(crate) mod rotary_rows;
mod rows;
mod sequences;
pub(crate) mod spec;

pub use append::{APPEND_WORDS, AppendPlan, AppendValues};
pub use fused::{FUSED_WORDS, FusedAppend, FusedParameters, FusedValues, MAX_NEW_KEYS};
pub use quantize::{QUANTIZE_WORDS, QuantizeSpec, quantize_words};
pub use sequences::{SEQUENCE_WORDS, SequencePlan, SequenceValues};
pub use spec::{AppendSpec, RotarySpec, SequenceSpec};
