//! Pipeline state: the stage that one side stands at, and the parity of its phase.

use flashcore_ir::types::{Pred, U32};
use flashcore_ir::{Builder, Compare, Reg, Value};

use super::tma::{BARRIER_BYTES, TmaPipeline};

/// A stage index that wraps, in units of `step`: bytes, or stages.
///
/// Commit groups and named barriers count arrivals for themselves, so no phase is needed beside it.
#[derive(Debug, Clone, Copy)]
pub struct StageIndex {
    index: Reg<U32>,
    step: u32,
    stages: u32,
}

impl StageIndex {
    /// Starts at the first of `stages` stages.
    pub fn first(k: &mut Builder, stages: u32, step: u32) -> Self {
        Self { index: k.copy(0u32), step, stages }
    }

    /// The register of the index.
    pub const fn index(self) -> Reg<U32> {
        self.index
    }

    /// Goes on to the next stage.
    pub fn advance(self, k: &mut Builder) {
        k.section("advance", |k| {
            k.add_to(self.index, self.step);
            let wrapped = k.compare(Compare::Eq, self.index, self.stages * self.step);
            k.set_where(self.index, wrapped, 0u32);
        });
    }
}

/// One side's position in a [`TmaPipeline`]: its stage, and the parity of its phase.
#[derive(Debug, Clone, Copy)]
pub struct PipelineState {
    pipeline: TmaPipeline,
    /// The address of shared memory.
    base: Reg<U32>,
    /// None in a pipeline of one stage.
    stage: Option<Reg<U32>>,
    phase: Reg<U32>,
    /// Stages from one of its own to the next.
    stride: u32,
}

impl PipelineState {
    pub(super) fn new(
        k: &mut Builder,
        pipeline: TmaPipeline,
        base: Reg<U32>,
        stage: Option<Reg<U32>>,
        stride: u32,
    ) -> Self {
        Self { pipeline, base, stage, phase: k.copy(0u32), stride }
    }

    /// The address of the stage.
    pub fn stage_address(&self, k: &mut Builder) -> Reg<U32> {
        self.indexed(k, self.pipeline.tiles, self.pipeline.stage_bytes)
    }

    /// The address of the *full* barrier, which TMA loads into the stage complete.
    pub fn full_barrier(&self, k: &mut Builder) -> Reg<U32> {
        self.indexed(k, self.pipeline.full, BARRIER_BYTES)
    }

    fn empty_barrier(&self, k: &mut Builder) -> Reg<U32> {
        self.indexed(k, self.pipeline.empty, BARRIER_BYTES)
    }

    /// The element of this stage in an array of shared memory that has one of `bytes` bytes per stage from `first` on.
    pub fn indexed(&self, k: &mut Builder, first: u32, bytes: u32) -> Reg<U32> {
        match self.stage {
            Some(stage) => k.eval(stage.mul_add(bytes, self.base) + first),
            None => k.add(self.base, first),
        }
    }

    /// Waits until every consumer has released the stage; of a stage that was never filled, returns at once.
    pub fn producer_acquire(&self, k: &mut Builder) {
        k.section("producer acquire", |k| {
            let barrier = self.empty_barrier(k);
            let previous = k.xor(self.phase, 1u32);
            k.mbarrier_wait(barrier, previous);
        });
    }

    /// Adds the bytes that TMA will write to the stage's transaction count. `leader` holds in the lane that does it.
    pub fn expect_tx(&self, k: &mut Builder, leader: Reg<Pred>, bytes: impl Into<Value<U32>>) {
        let (barrier, bytes) = (self.full_barrier(k), bytes.into());
        k.when(leader, |k| k.mbarrier_arrive_expect(barrier, bytes));
    }

    /// Hands a stage that the lanes of a warp have written to the async proxy of its consumers, once for the warp, and
    /// advances. `leader` holds in one lane.
    pub fn producer_commit(&self, k: &mut Builder, leader: Reg<Pred>) {
        k.section("producer commit", |k| {
            k.fence_proxy_async();
            let barrier = self.full_barrier(k);
            k.warp_sync();
            k.when(leader, |k| k.mbarrier_arrive(barrier, 1u32));
            self.advance(k);
        });
    }

    /// Waits until the bytes of the stage have arrived.
    pub fn consumer_wait(&self, k: &mut Builder) {
        k.section("consumer wait", |k| {
            let barrier = self.full_barrier(k);
            k.mbarrier_wait(barrier, self.phase);
        });
    }

    /// Releases the stage, once for the warp, and advances. `leader` holds in one lane.
    pub fn consumer_release(&self, k: &mut Builder, leader: Reg<Pred>) {
        let held = self.advance_holding(k);
        held.consumer_release(k, leader);
    }

    /// Advances past a stage that is still being read.
    pub fn advance_holding(&self, k: &mut Builder) -> HeldStage {
        let empty = self.empty_barrier(k);
        self.advance(k);
        HeldStage { empty }
    }

    /// Goes on to the next stage; the phase flips where stages wrap.
    pub fn advance(&self, k: &mut Builder) {
        k.section("advance", |k| {
            if let Some(stage) = self.stage {
                k.add_to(stage, self.stride);
                let wraps = k.compare(Compare::Ge, stage, self.pipeline.stages);
                let other = k.xor(self.phase, 1u32);
                k.set_where(self.phase, wraps, other);
                let first = if self.stride == 1 { k.copy(0u32) } else { k.sub(stage, self.pipeline.stages) };
                k.set_where(stage, wraps, first);
            } else {
                let other = k.xor(self.phase, 1u32);
                k.set(self.phase, other);
            }
        });
    }
}

/// A stage that a consumer has advanced past and not released.
#[derive(Debug, Clone, Copy)]
pub struct HeldStage {
    /// The address of its *empty* barrier.
    pub(super) empty: Reg<U32>,
}

impl HeldStage {
    /// Releases it, once for the warp. `leader` holds in one lane.
    pub fn consumer_release(self, k: &mut Builder, leader: Reg<Pred>) {
        k.section("consumer release", |k| {
            // The other lanes have finished reading before the leader arrives.
            k.warp_sync();
            k.when(leader, |k| k.mbarrier_arrive(self.empty, 1u32));
        });
    }
}
