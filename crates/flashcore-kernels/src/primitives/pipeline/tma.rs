//! Places in shared memory that tensor copies fill and warpgroups read.
//!
//! Each stage has two `mbarrier`s. *Full* completes a phase when the announced bytes have arrived, *empty* when every
//! reader has let go of them. Who fills waits for empty, who reads waits for full, and each side counts the phases it
//! has gone through in a [`PipelineState`] of its own: nobody ever waits for both.

use flashcore_ir::types::{Pred, U32};
use flashcore_ir::{Builder, Compare, Reg, SharedAddress, Value};

/// Bytes of an `mbarrier`.
const BARRIER_BYTES: u32 = 8;
/// What the 128-byte swizzle repeats after.
const STAGE_ALIGNMENT: u32 = 1024;

/// Stages of equal size and their barriers.
#[derive(Debug, Clone, Copy)]
pub struct TmaPipeline {
    stages: u32,
    stage_bytes: u32,
    tiles: u32,
    full: u32,
    empty: u32,
}

impl TmaPipeline {
    /// Reserves the memory of `stages` stages of `stage_bytes` bytes and of their barriers.
    pub fn reserve(k: &mut Builder, stages: u32, stage_bytes: u32) -> Self {
        let stage_bytes = stage_bytes.next_multiple_of(STAGE_ALIGNMENT);
        let tiles = k.reserve_shared(stages.saturating_mul(stage_bytes), STAGE_ALIGNMENT);
        Self { stages, stage_bytes, tiles, full: 0, empty: 0 }
    }

    /// Reserves the memory of the barriers: behind that of all tiles, so that those stay aligned.
    pub fn reserve_barriers(&mut self, k: &mut Builder) {
        let bytes = self.stages.saturating_mul(BARRIER_BYTES);
        self.full = k.reserve_shared(bytes, BARRIER_BYTES);
        self.empty = k.reserve_shared(bytes, BARRIER_BYTES);
    }

    /// Makes the barriers, for `readers` arrivals that each say that a warp has let go of a stage. One thread does this.
    pub fn initialise(&self, k: &mut Builder, base: Reg<U32>, readers: u32) {
        for stage in 0..self.stages {
            let barrier = |first: u32| SharedAddress::from(base).plus((first + stage * BARRIER_BYTES) as i32);
            k.mbarrier_init(barrier(self.full), 1u32);
            k.mbarrier_init(barrier(self.empty), readers);
        }
    }

    /// One side's way through the stages, from the first on.
    pub fn cursor(&self, k: &mut Builder, base: Reg<U32>) -> PipelineState {
        let stage = (self.stages > 1).then(|| k.copy(0u32));
        PipelineState { ring: *self, base, stage, phase: k.copy(0u32), step: 1 }
    }

    /// The way of one of `step` readers that take turns, the one of number `first`. The stages are a multiple of them.
    pub fn cursor_of(&self, k: &mut Builder, base: Reg<U32>, first: Reg<U32>, step: u32) -> PipelineState {
        PipelineState { ring: *self, base, stage: Some(k.copy(first)), phase: k.copy(0u32), step }
    }
}

/// Where one side stands in a ring: its stage, and the parity of its phase.
#[derive(Debug, Clone, Copy)]
pub struct PipelineState {
    ring: TmaPipeline,
    base: Reg<U32>,
    /// None where there is but one.
    stage: Option<Reg<U32>>,
    phase: Reg<U32>,
    /// Stages from one of its own to the next.
    step: u32,
}

impl PipelineState {
    /// The address of the stage.
    pub fn tile(&self, k: &mut Builder) -> Reg<U32> {
        self.at(k, self.ring.tiles, self.ring.stage_bytes)
    }

    /// The address of the barrier that copies into the stage report to.
    pub fn full(&self, k: &mut Builder) -> Reg<U32> {
        self.at(k, self.ring.full, BARRIER_BYTES)
    }

    /// The address of what the stage has besides, of which that of the first begins at `first`, and each takes `step` bytes.
    pub fn beside(&self, k: &mut Builder, first: u32, step: u32) -> Reg<U32> {
        self.at(k, first, step)
    }

    fn at(&self, k: &mut Builder, first: u32, step: u32) -> Reg<U32> {
        match self.stage {
            Some(stage) => {
                let address = k.mad(stage, step, self.base);
                k.add(address, first)
            }
            None => k.add(self.base, first),
        }
    }

    /// Waits until the bytes of the stage have arrived.
    pub fn consumer_wait(&self, k: &mut Builder) {
        k.section("wait for full", |k| {
            let barrier = self.full(k);
            k.mbarrier_wait(barrier, self.phase);
        });
    }

    /// Waits until every reader has let go of the stage; of one that was never filled, at once.
    pub fn producer_acquire(&self, k: &mut Builder) {
        k.section("wait for empty", |k| {
            let barrier = self.at(k, self.ring.empty, BARRIER_BYTES);
            let before = k.xor(self.phase, 1u32);
            k.mbarrier_wait(barrier, before);
        });
    }

    /// Announces the bytes that copies will bring into the stage.
    pub fn expect_tx(&self, k: &mut Builder, leader: Reg<Pred>, bytes: impl Into<Value<U32>>) {
        let (barrier, bytes) = (self.full(k), bytes.into());
        k.when(leader, |k| k.mbarrier_arrive_expect(barrier, bytes));
    }

    /// Lets go of the stage, once for the warp, and goes on to the next. `leader` holds in one lane.
    pub fn consumer_release(&self, k: &mut Builder, leader: Reg<Pred>) {
        let left = self.advance_holding(k);
        left.consumer_release(k, leader);
    }

    /// Goes on to the next stage; the one it leaves is still being read.
    pub fn advance_holding(&self, k: &mut Builder) -> HeldStage {
        let empty = self.at(k, self.ring.empty, BARRIER_BYTES);
        self.advance(k);
        HeldStage { empty }
    }

    /// Goes on to the next stage.
    pub fn advance(&self, k: &mut Builder) {
        k.section("advance", |k| {
            if let Some(stage) = self.stage {
                k.add_to(stage, self.step);
                let wraps = k.compare(Compare::Ge, stage, self.ring.stages);
                let other = k.xor(self.phase, 1u32);
                k.set_where(self.phase, wraps, other);
                let first = if self.step == 1 { k.copy(0u32) } else { k.sub(stage, self.ring.stages) };
                k.set_where(stage, wraps, first);
            } else {
                let other = k.xor(self.phase, 1u32);
                k.set(self.phase, other);
            }
        });
    }
}

/// A stage that a cursor has gone past, and that has not been let go of.
#[derive(Debug, Clone, Copy)]
pub struct HeldStage {
    empty: Reg<U32>,
}

/// In place of the address of a barrier: none.
const NO_BARRIER: u32 = u32::MAX;

/// A stage out of which copies store, at most one at a time.
#[derive(Debug, Clone, Copy)]
pub struct TmaStoreGuard {
    empty: Reg<U32>,
}

impl TmaStoreGuard {
    /// None yet.
    pub fn none(k: &mut Builder) -> Self {
        Self { empty: k.copy(NO_BARRIER) }
    }

    /// Copies out of a stage have started.
    pub fn begin(self, k: &mut Builder, stage: HeldStage) {
        k.set(self.empty, stage.empty);
    }

    /// Lets go of the stage, if there is one, when the copies that this warp has started have read it. `leader` holds in the
    /// lane that started them.
    pub fn end(self, k: &mut Builder, leader: Reg<Pred>) {
        k.section("stored", |k| {
            let is_there = k.compare(Compare::Ne, self.empty, NO_BARRIER);
            k.if_uniform(is_there, |k| {
                k.when(leader, |k| k.bulk_wait(0, true));
                HeldStage { empty: self.empty }.consumer_release(k, leader);
                k.set(self.empty, NO_BARRIER);
            });
        });
    }
}

impl HeldStage {
    /// Lets go of it, once for the warp. `leader` holds in one lane.
    pub fn consumer_release(self, k: &mut Builder, leader: Reg<Pred>) {
        k.section("release", |k| {
            // What the other lanes have read, they have read before this.
            k.warp_sync();
            k.when(leader, |k| k.mbarrier_arrive(self.empty, 1u32));
        });
    }
}
