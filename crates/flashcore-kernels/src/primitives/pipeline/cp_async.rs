//! A few places in shared memory as a stream of tiles.

use flashcore_ir::types::U32;
use flashcore_ir::{Builder, Compare, Reg};

/// Which of several stages is filled next and which is read next, as bytes behind the first.
///
/// The copies of one tile form one group, committed even when it is empty, so that the number of groups in flight
/// tells which tile has arrived.
#[derive(Debug, Clone, Copy)]
pub struct CpAsyncPipeline {
    stages: u32,
    stage_bytes: u32,
    filling: Reg<U32>,
    reading: Reg<U32>,
}

impl CpAsyncPipeline {
    /// `stages` stages of `stage_bytes` bytes each, all empty.
    pub fn new(k: &mut Builder, stages: u32, stage_bytes: u32) -> Self {
        Self { stages, stage_bytes, filling: k.copy(0u32), reading: k.copy(0u32) }
    }

    /// Tiles that are on their way while one is read.
    pub const fn ahead(&self) -> u32 {
        self.stages - 1
    }

    /// The stage to fill.
    pub const fn filling(&self) -> Reg<U32> {
        self.filling
    }

    /// The stage to read.
    pub const fn reading(&self) -> Reg<U32> {
        self.reading
    }

    /// Closes the group of the tile that is being filled and goes on to the next stage.
    pub fn filled(&self, k: &mut Builder) {
        k.copy_async_commit();
        self.next(k, self.filling);
    }

    /// Waits until the tile to read is there for all threads, and all are done with the one before it.
    pub fn wait(&self, k: &mut Builder) {
        k.section("wait", |k| {
            k.copy_async_wait(self.stages.saturating_sub(2));
            k.cta_sync();
        });
    }

    /// Goes on to the next stage.
    pub fn read(&self, k: &mut Builder) {
        self.next(k, self.reading);
    }

    fn next(&self, k: &mut Builder, stage: Reg<U32>) {
        k.section("ring", |k| {
            k.add_to(stage, self.stage_bytes);
            let wrapped = k.compare(Compare::Eq, stage, self.stages * self.stage_bytes);
            k.set_where(stage, wrapped, 0u32);
        });
    }
}
