//! Pipelines: stages in shared memory that are filled while others are read.

mod cp_async;
mod tma;

pub use cp_async::CpAsyncPipeline;
pub use tma::{HeldStage, PipelineState, TmaPipeline, TmaStoreGuard};
