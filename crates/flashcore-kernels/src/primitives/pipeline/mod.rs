//! Pipelines: stages of shared memory that one side fills while the other reads.
//!
//! The verbs are those of CUTLASS, the same for both kinds:
//!
//! | verb | [`CpAsyncPipeline`]: `cp.async` groups and CTA barriers | [`TmaPipeline`]: TMA and `mbarrier`s |
//! |---|---|---|
//! | `producer_acquire` | the barrier in `consumer_wait` | waits for the stage's *empty* barrier |
//! | `expect_tx` | | adds the bytes to the transaction count of the stage's *full* barrier |
//! | `producer_commit` | closes the group and advances | the bytes themselves complete the barrier |
//! | `consumer_wait` | waits for the oldest group, then for all threads | waits for the *full* barrier |
//! | `consumer_release` | advances; the next `consumer_wait` is the release | arrives at the *empty* barrier and advances |
//! | `advance` | | goes on to the next stage without releasing this one |

mod cp_async;
pub(crate) mod named_barrier;
mod state;
mod tma;

pub use cp_async::CpAsyncPipeline;
pub use state::{HeldStage, PipelineState, StageIndex};
pub use tma::{TmaPipeline, TmaStoreGuard};
