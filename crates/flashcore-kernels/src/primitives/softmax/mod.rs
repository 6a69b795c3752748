//! Softmax.

mod lse;
mod online;
mod steps;

pub(crate) use lse::lse;
pub use online::{Exponential, OnlineSoftmax, Rescale, RowScale, RowStats, add_sink};
