//! The functions on CPU tensors against a plain `f64` reference, and refusals.
//!
//! With the feature `cuda` and `FLASHCORE_CANDLE_CUDA=1` the same tests run on GPU 0.

mod dense;
mod named;
mod paged;
mod prefix;
mod reference;
mod refusals;
mod varlen;
