//! Softmax: the online softmax over blocks of keys, its partial results and their merge, and what ends it.

mod exp2;
mod finalize;
mod lse;
mod merge;
mod online;

pub use exp2::Exponential;
pub(crate) use finalize::normalize_row;
pub use finalize::{FinishedRows, RowStats, add_sink};
pub(crate) use lse::{lse_exact, lse_log2};
pub(crate) use online::reduce_row;
pub use online::{E4M3_WEIGHT_EXPONENT, OnlineSoftmax, Rescale, RowScale};
