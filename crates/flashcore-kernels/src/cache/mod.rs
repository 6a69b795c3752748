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

pub(crate) use fused::Parameters as FusedParameters;
pub use fused::{FusedAppend, MAX_NEW_KEYS};
pub use quantize::QuantizeSpec;
pub(crate) use sequences::PART_ALIGNMENT;
pub use spec::{AppendSpec, RotarySpec, SequenceSpec};
