//! Pipelines: stages in shared memory that are filled while others are read.

mod cp_async;
mod tma;

pub use cp_async::Ring;
pub use tma::{LeftStage, StoredStage, TransferCursor, TransferRing};
