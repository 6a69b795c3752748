//! KV-cache kernels: append of new keys and values by slot, with QK-norm and rotary embedding (`RoPE`).

mod append;
mod rotary_rows;
mod spec;

pub use append::{APPEND_WORDS, AppendPlan, AppendValues};
pub use spec::{AppendSpec, RotarySpec};
