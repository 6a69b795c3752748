//! TMA pipeline: stages of shared memory that TMA fills and warpgroups read.
//!
//! Each stage has two `mbarrier`s. *Full* completes a phase when the expected bytes have arrived, *empty* when every
//! consumer warp has released the stage. The producer waits for empty, consumers wait for full, and each side counts the
//! phases it has gone through in a [`PipelineState`] of its own: nobody ever waits for both.

use flashcore_ir::types::{Pred, U32};
use flashcore_ir::{Builder, Compare, Reg, SharedAddress};

use super::state::{HeldStage, PipelineState};

/// Bytes of an `mbarrier`.
pub(super) const BARRIER_BYTES: u32 = 8;
/// The period of the 128-byte swizzle, to which stages are aligned.
const STAGE_ALIGNMENT: u32 = 1024;

/// Stages of equal size and their barriers.
#[derive(Debug, Clone, Copy)]
pub struct TmaPipeline {
    pub(super) stages: u32,
    pub(super) stage_bytes: u32,
    pub(super) tiles: u32,
    pub(super) full: u32,
    pub(super) empty: u32,
}

impl TmaPipeline {
    /// Reserves the memory of `stages` stages of `stage_bytes` bytes.
    pub fn reserve(k: &mut Builder, stages: u32, stage_bytes: u32) -> Self {
        let stage_bytes = stage_bytes.next_multiple_of(STAGE_ALIGNMENT);
        let tiles = k.reserve_shared(stages.saturating_mul(stage_bytes), STAGE_ALIGNMENT);
        Self { stages, stage_bytes, tiles, full: 0, empty: 0 }
    }

    /// Reserves the memory of the barriers: after that of the stages of all pipelines, which so stay aligned.
    pub fn reserve_barriers(&mut self, k: &mut Builder) {
        let bytes = self.stages.saturating_mul(BARRIER_BYTES);
        self.full = k.reserve_shared(bytes, BARRIER_BYTES);
        self.empty = k.reserve_shared(bytes, BARRIER_BYTES);
    }

    /// Initializes the barriers for `consumers` warps, each of which arrives once to release a stage. One thread does it.
    pub fn init_barriers(&self, k: &mut Builder, base: Reg<U32>, consumers: u32) {
        self.init_barriers_of_warps(k, base, 1, consumers);
    }

    /// Initializes the barriers of stages that `producers` warps fill, each of which arrives once.
    pub fn init_barriers_of_warps(&self, k: &mut Builder, base: Reg<U32>, producers: u32, consumers: u32) {
        for stage in 0..self.stages {
            let barrier = |first: u32| SharedAddress::from(base).plus((first + stage * BARRIER_BYTES) as i32);
            k.mbarrier_init(barrier(self.full), producers);
            k.mbarrier_init(barrier(self.empty), consumers);
        }
    }

    /// The state of one side that goes through every stage from the first on.
    pub fn state(&self, k: &mut Builder, base: Reg<U32>) -> PipelineState {
        let stage = (self.stages > 1).then(|| k.copy(0u32));
        PipelineState::new(k, *self, base, stage, 1)
    }

    /// The state of consumer `first` of `stride` that take every `stride`-th stage, which divides the stages.
    pub fn strided_state(&self, k: &mut Builder, base: Reg<U32>, first: Reg<U32>, stride: u32) -> PipelineState {
        let stage = Some(k.copy(first));
        PipelineState::new(k, *self, base, stage, stride)
    }
}

/// In place of the address of a barrier: none.
const NO_BARRIER: u32 = u32::MAX;

/// TMA store guard: the stage that TMA stores read, at most one at a time, which is released when they have.
#[derive(Debug, Clone, Copy)]
pub struct TmaStoreGuard {
    empty: Reg<U32>,
}

impl TmaStoreGuard {
    /// Guards no stage yet.
    pub fn none(k: &mut Builder) -> Self {
        Self { empty: k.copy(NO_BARRIER) }
    }

    /// Guards a stage out of which TMA stores have started.
    pub fn hold(self, k: &mut Builder, stage: HeldStage) {
        k.set(self.empty, stage.empty);
    }

    /// Releases the guarded stage, if there is one, when the TMA stores that this warp has started have read it. `leader`
    /// holds in the lane that started them.
    pub fn release(self, k: &mut Builder, leader: Reg<Pred>) {
        k.section("tma store wait", |k| {
            let is_held = k.compare(Compare::Ne, self.empty, NO_BARRIER);
            k.if_uniform(is_held, |k| {
                k.when(leader, |k| k.bulk_wait(0, true));
                HeldStage { empty: self.empty }.consumer_release(k, leader);
                k.set(self.empty, NO_BARRIER);
            });
        });
    }
}
