//! KV pipeline of chunks: a `cp.async` pipeline that producer warps fill without a pause from one unit of work to the next.
//!
//! Blocks are counted over all units of a CTA. A pair of named barriers for each stage says that its block has arrived, and
//! that it may be replaced; producers run ahead of the consumers by all stages, into the next unit while the consumers are
//! in the epilogue of this one.

use flashcore_ir::types::U32;
use flashcore_ir::{Builder, Compare, Reg};

use super::kv_pipeline::{KvPipelineConfig, KvTiles};
use crate::attention::kv_range::KvRange;
use crate::attention::kv_source::KvSource;
use crate::primitives::{CpAsyncPipeline, NamedBarrier, StageIndex, TileCopy};

/// One side of the pipeline: that of the producers or that of the consumers.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChunkPipeline {
    config: KvPipelineConfig,
    /// The stage in bytes.
    bytes: CpAsyncPipeline,
    /// The stage in named barriers.
    stage: StageIndex,
}

impl ChunkPipeline {
    pub(super) fn new(k: &mut Builder, config: KvPipelineConfig, tiles: &KvTiles) -> Self {
        Self {
            config,
            bytes: CpAsyncPipeline::new(k, config.stages, tiles.stage_bytes),
            stage: StageIndex::first(k, config.stages, 1),
        }
    }

    /// The stage to read, in bytes from the first.
    pub(super) const fn read_stage(&self) -> Reg<U32> {
        self.bytes.read_stage()
    }

    /// Waits for the next block.
    pub(super) fn consumer_wait(&self, k: &mut Builder) {
        k.section("wait", |k| {
            let full = NamedBarrier::Sm80Stages.indexed(k, self.stage.index());
            k.barrier_sync(full, self.config.all_threads());
        });
    }

    /// Releases the block.
    pub(super) fn consumer_release(&self, k: &mut Builder) {
        let empty = self.empty_barrier(k, self.stage.index());
        k.barrier_arrive(empty, self.config.all_threads());
        self.stage.advance(k);
        self.bytes.consumer_release(k);
    }

    /// The named barrier at which the block of a stage may be replaced.
    fn empty_barrier(&self, k: &mut Builder, stage: Reg<U32>) -> Reg<U32> {
        k.add(stage, NamedBarrier::Sm80Stages.id() + self.config.stages)
    }
}

/// The producers' side.
pub(super) struct ChunkProducer {
    pipeline: ChunkPipeline,
    tiles: KvTiles,
    /// The stage of the block that arrives next.
    arriving: StageIndex,
    /// Blocks so far.
    blocks: Reg<U32>,
}

impl ChunkProducer {
    pub(super) fn new(k: &mut Builder, config: KvPipelineConfig, tiles: &KvTiles) -> Self {
        Self {
            pipeline: ChunkPipeline::new(k, config, tiles),
            tiles: *tiles,
            arriving: StageIndex::first(k, config.stages, 1),
            blocks: k.copy(0u32),
        }
    }

    /// Blocks in flight before the first of them is waited for. The next one must not have to wait for the consumers, who
    /// hold the one before: two less than the stages.
    const fn ahead(&self) -> u32 {
        if self.pipeline.config.stages > 2 { self.pipeline.config.stages - 2 } else { self.pipeline.config.stages - 1 }
    }

    /// Copies the blocks of a range.
    pub(super) fn produce(
        &self,
        k: &mut Builder,
        range: &KvRange,
        source: KvSource,
        shared_base: Reg<U32>,
        thread: Reg<U32>,
    ) {
        let config = self.pipeline.config;
        let KvSource { key, value } = source.starting_at(k, range.begin, config.load_bytes);
        let [key_copy, value_copy] = [(self.tiles.key, key), (self.tiles.value, value)]
            .map(|(tile, rows)| TileCopy::new(k, tile, rows, shared_base, thread, config.copying_threads()));
        k.for_uniform(range.begin, range.end, config.tile_n as i32, |k, first_key| {
            let acquires = k.compare(Compare::Ge, self.blocks, config.stages);
            k.if_uniform(acquires, |k| {
                let empty = self.pipeline.empty_barrier(k, self.pipeline.stage.index());
                k.barrier_sync(empty, config.all_threads());
            });
            let left = k.eval((range.key_length - first_key).unsigned());
            let stage = Some(self.pipeline.bytes.write_stage());
            k.section("load keys", |k| {
                key_copy.start(k, stage, left);
                key_copy.advance(k);
            });
            k.section("load values", |k| {
                let skipped = range.batch_begin.map(|first| k.sub(first, first_key));
                value_copy.start_from(k, stage, skipped, left);
                value_copy.advance(k);
            });
            self.pipeline.bytes.producer_commit(k);
            self.pipeline.stage.advance(k);
            k.copy_async_wait(self.ahead());
            let arrives = k.compare(Compare::Ge, self.blocks, self.ahead());
            k.if_uniform(arrives, |k| self.arrive(k));
            k.add_to(self.blocks, 1u32);
        });
    }

    /// Arrives at the barrier of the oldest block.
    fn arrive(&self, k: &mut Builder) {
        let full = NamedBarrier::Sm80Stages.indexed(k, self.arriving.index());
        k.barrier_arrive(full, self.pipeline.config.all_threads());
        self.arriving.advance(k);
    }

    /// Arrives for the last blocks, and waits until the consumers have released all of them: no barrier is left half full.
    pub(super) fn finish(&self, k: &mut Builder) {
        let stages = self.pipeline.config.stages;
        k.copy_async_wait(0);
        for arrived in 0..self.ahead() {
            let is_left = k.compare(Compare::Gt, self.blocks, arrived);
            k.if_uniform(is_left, |k| self.arrive(k));
        }
        let has_wrapped = k.compare(Compare::Ge, self.blocks, stages);
        let first = k.select(has_wrapped, self.pipeline.stage.index(), 0u32);
        for released in 0..stages {
            let is_left = k.compare(Compare::Gt, self.blocks, released);
            k.if_uniform(is_left, |k| {
                let stage = k.eval((first + released) % stages);
                let empty = self.pipeline.empty_barrier(k, stage);
                k.barrier_sync(empty, self.pipeline.config.all_threads());
            });
        }
    }
}
