//! `cp.async` pipeline: stages of shared memory that all threads fill and all threads read.
//!
//! The copies of one tile form one commit group, committed even when it is empty, so that the number of groups in flight
//! tells which tile has arrived.

use flashcore_ir::types::U32;
use flashcore_ir::{Builder, Reg};

use super::state::StageIndex;

/// The stage to fill next and the stage to read next, in bytes from the first.
#[derive(Debug, Clone, Copy)]
pub struct CpAsyncPipeline {
    stages: u32,
    write: StageIndex,
    read: StageIndex,
}

impl CpAsyncPipeline {
    /// `stages` stages of `stage_bytes` bytes each, all empty.
    pub fn new(k: &mut Builder, stages: u32, stage_bytes: u32) -> Self {
        let [write, read] = [(); 2].map(|()| StageIndex::first(k, stages, stage_bytes));
        Self { stages, write, read }
    }

    /// Tiles in flight while one is read.
    pub const fn prefetched(&self) -> u32 {
        self.stages - 1
    }

    /// The stage to fill.
    pub const fn write_stage(&self) -> Reg<U32> {
        self.write.index()
    }

    /// The stage to read.
    pub const fn read_stage(&self) -> Reg<U32> {
        self.read.index()
    }

    /// Commits the group of the tile that is being filled, and advances to the next stage.
    pub fn producer_commit(&self, k: &mut Builder) {
        k.copy_async_commit();
        self.write.advance(k);
    }

    /// Waits until the tile to read has arrived for all threads, and all have finished with the one before it.
    pub fn consumer_wait(&self, k: &mut Builder) {
        k.section("wait", |k| {
            k.copy_async_wait(self.stages.saturating_sub(2));
            k.cta_sync();
        });
    }

    /// Advances to the next stage; the barrier of the next [`consumer_wait`](Self::consumer_wait) releases this one.
    pub fn consumer_release(&self, k: &mut Builder) {
        self.read.advance(k);
    }
}
