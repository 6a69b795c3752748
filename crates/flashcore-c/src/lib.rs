//! The C ABI of flashcore.
//!
//! For users it is documented in `include/flashcore.h`, which a test generates from this source; for C see
//! `examples/attend.c`, for Python `examples/attend.py`.
//!
//! Every function catches panics, every pointer that can be checked is, and a plan is a number in a table: a plan that
//! was destroyed, or never created, is an error and not a crash.
//!
//! Forked children can use the CPU, with plans of the parent or their own; plans for a GPU are an error there.

// Functions are `unsafe` towards C as a matter of course; the header says what each of them needs.
#![expect(unsafe_code, reason = "a C ABI is made of raw pointers")]
#![expect(clippy::doc_markdown, reason = "what is public here is documented for C, in the header")]

mod append;
mod call;
mod device;
mod merge;
mod plan;
mod problem;
mod registry;
mod status;
mod tensor;
mod text;

pub use append::*;
pub use device::*;
pub use merge::*;
pub use plan::*;
pub use problem::*;
pub use status::*;
pub use tensor::*;
pub use text::*;
