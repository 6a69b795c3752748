//! KV-cache kernels: append of new keys and values, by slot or by sequence, with QK-norm and rotary embedding (`RoPE`).

mod append;
mod rotary_rows;
mod rows;
mod sequences;
mod spec;

pub use append::{APPEND_WORDS, AppendPlan, AppendValues};
pub use sequences::{SEQUENCE_WORDS, SequencePlan, SequenceValues};
pub use spec::{AppendSpec, RotarySpec, SequenceSpec};
