//! Softmax.

mod lse;
mod online;
mod steps;

pub(crate) use lse::lse;
pub use online::{Exponential, OnlineSoftmax, Raised, Rescale, RowSums, add_sink};
