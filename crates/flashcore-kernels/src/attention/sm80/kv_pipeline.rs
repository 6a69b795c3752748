//! KV pipeline of the sm80 and ladder kernels: keys and values through a `cp.async` pipeline.
//!
//! Either all threads copy the next block before they multiply the one that has arrived, and one barrier per block says
//! that it has arrived for everybody and that everybody has finished with the block before. Or some warps do nothing but
//! copy, the producers: a pair of named barriers for each stage then says that its block has arrived, and that it may be
//! replaced.

use flashcore_ir::types::{S32, U32};
use flashcore_ir::{Builder, Compare, Reg};

use super::scales::{ScaleCopies, ScaleTiles};
use crate::attention::kv_range::KvRange;
use crate::attention::kv_source::KvSource;
use crate::element::ElementLayout;
use crate::primitives::{CpAsyncPipeline, LANES, NamedBarrier, SharedLayout, SharedTile, StageIndex, TileCopy};
use crate::specialization::Specialization;

/// Shape of the pipeline, and the warps that fill and read it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KvPipelineConfig {
    /// KV blocks in shared memory at a time.
    pub(crate) stages: u32,
    /// Keys of a block.
    pub(crate) tile_n: u32,
    /// Warps that multiply, and that copy where there are no producers.
    pub(crate) warps: u32,
    /// Producer warps, which only copy.
    pub(crate) producers: u32,
    /// Bytes of one copy, at most.
    pub(crate) load_bytes: u32,
}

impl KvPipelineConfig {
    pub(super) const fn all_threads(self) -> u32 {
        (self.warps + self.producers) * LANES
    }

    pub(crate) const fn copying_threads(self) -> u32 {
        match self.producers {
            0 => self.warps * LANES,
            producers => producers * LANES,
        }
    }
}

/// The shared-memory tiles of keys and values.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KvTiles {
    /// The tile of stage 0; the other stages follow both.
    pub(crate) key: SharedTile,
    pub(crate) value: SharedTile,
    /// The scales of the keys and values.
    pub(crate) scales: ScaleTiles,
    pub(crate) stage_bytes: u32,
}

impl KvTiles {
    pub(crate) fn reserve(
        k: &mut Builder,
        config: KvPipelineConfig,
        layout: SharedLayout,
        specialization: Specialization,
    ) -> Self {
        let Specialization { head_dim, value_dim, .. } = specialization;
        let element = ElementLayout::of(specialization.key_value_dtype());
        let [key, value] = [head_dim, value_dim].map(|columns| {
            SharedTile::reserve(k, config.tile_n, SharedTile::columns_for(columns, element), layout, element)
        });
        let scales = ScaleTiles::reserve(k, config.tile_n, specialization);
        let stage_bytes = key.bytes() + value.bytes() + scales.bytes(config.tile_n);
        for _ in 1..config.stages {
            k.reserve_shared(stage_bytes, 128);
        }
        Self { key, value, scales, stage_bytes }
    }
}

/// The pipeline of one tile of query rows.
pub(crate) struct KvPipeline {
    pipeline: CpAsyncPipeline,
    key_copy: TileCopy,
    value_copy: TileCopy,
    scale_copies: ScaleCopies,
    /// The first key of the block that is copied next.
    next_key: Reg<S32>,
    config: KvPipelineConfig,
    /// The stage that a warp is at, for named barriers, where there are producers.
    stage: Option<StageIndex>,
}

impl KvPipeline {
    /// The pipeline of a KV range. `thread` is the index of this thread among those that copy.
    pub(crate) fn new(
        k: &mut Builder,
        config: KvPipelineConfig,
        tiles: &KvTiles,
        range: &KvRange,
        source: KvSource,
        shared_base: Reg<U32>,
        thread: Reg<U32>,
    ) -> Self {
        let scale_copies = ScaleCopies::new(k, tiles.scales, source.scales, shared_base, (thread, config));
        let KvSource { key, value, .. } = source.starting_at(k, range.begin, config.load_bytes);
        let threads = config.copying_threads();
        Self {
            pipeline: CpAsyncPipeline::new(k, config.stages, tiles.stage_bytes),
            key_copy: TileCopy::new(k, tiles.key, key, shared_base, thread, threads),
            value_copy: TileCopy::new(k, tiles.value, value, shared_base, thread, threads),
            scale_copies,
            next_key: k.copy(range.begin),
            config,
            stage: (config.producers > 0).then(|| StageIndex::first(k, config.stages, 1)),
        }
    }

    /// The stage to read, in bytes from the first.
    pub(crate) const fn read_stage(&self) -> Reg<U32> {
        self.pipeline.read_stage()
    }

    /// Commit groups of this thread that follow that of the query when it is waited for.
    pub(crate) const fn prefetched_groups(&self) -> u32 {
        match self.config.producers {
            0 => self.pipeline.prefetched(),
            _ => 0,
        }
    }

    /// Starts the copies of the first blocks.
    pub(crate) fn prefetch(&self, k: &mut Builder, range: &KvRange) {
        for _ in 0..self.prefetched_groups() {
            self.load_next(k, range);
        }
    }

    /// Waits for the next block, and starts the copy of one that comes later.
    pub(crate) fn consumer_wait(&self, k: &mut Builder, range: &KvRange) {
        match self.stage {
            Some(stage) => k.section("wait", |k| {
                let full = Self::full_barrier(k, stage);
                k.barrier_sync(full, self.config.all_threads());
            }),
            None if self.config.stages == 1 => {
                // Nobody reads the block before any more; and this one has to be there for everybody.
                k.section("wait", Builder::cta_sync);
                self.load_next(k, range);
                k.section("wait", |k| {
                    k.copy_async_wait(0);
                    k.cta_sync();
                });
            }
            None => {
                self.pipeline.consumer_wait(k);
                self.load_next(k, range);
            }
        }
    }

    /// Releases the block that begins at `first_key`.
    pub(crate) fn consumer_release(&self, k: &mut Builder, range: &KvRange, first_key: Reg<S32>) {
        if let Some(stage) = self.stage {
            // The producers wait for this if another block takes its place.
            let replaced_by = first_key + (self.config.stages * self.config.tile_n) as i32;
            let is_replaced = k.eval(replaced_by.lt(range.end));
            k.if_uniform(is_replaced, |k| {
                let empty = self.empty_barrier(k, stage);
                k.barrier_arrive(empty, self.config.all_threads());
            });
            stage.advance(k);
        }
        self.pipeline.consumer_release(k);
    }

    /// Copies block after block: the loop of the producer warps.
    pub(crate) fn produce(&self, k: &mut Builder, range: &KvRange) {
        let Some(stage) = self.stage else { return };
        let (ahead, tile_n) = (self.pipeline.prefetched(), self.config.tile_n as i32);
        let arriving = StageIndex::first(k, self.config.stages, 1);
        let last = k.add(range.end, ahead as i32 * tile_n);
        let first_replaced = k.add(range.begin, self.config.stages as i32 * tile_n);
        let first_arrived = k.add(range.begin, ahead as i32 * tile_n);
        // An empty range has no block that could arrive.
        let nonempty = k.compare(Compare::Lt, range.begin, range.end);
        k.if_uniform(nonempty, |k| {
            // As many groups as blocks, and so many empty ones after them that all have arrived.
            let groups = k.eval((last - range.begin + (tile_n - 1)).unsigned() / self.config.tile_n);
            k.for_uniform(0u32, groups, 1u32, |k, _| {
                let acquires = k.eval(self.next_key.lt(range.end) & self.next_key.ge(first_replaced));
                k.if_uniform(acquires, |k| {
                    let empty = self.empty_barrier(k, stage);
                    k.barrier_sync(empty, self.config.all_threads());
                });
                let arrives = k.compare(Compare::Ge, self.next_key, first_arrived);
                self.load_next(k, range);
                stage.advance(k);
                k.copy_async_wait(ahead);
                k.if_uniform(arrives, |k| {
                    let full = Self::full_barrier(k, arriving);
                    k.barrier_arrive(full, self.config.all_threads());
                    arriving.advance(k);
                });
            });
        });
    }

    /// The named barrier at which the block of a stage has arrived.
    fn full_barrier(k: &mut Builder, stage: StageIndex) -> Reg<U32> {
        NamedBarrier::Sm80Stages.indexed(k, stage.index())
    }

    /// The named barrier at which the block of a stage may be replaced.
    fn empty_barrier(&self, k: &mut Builder, stage: StageIndex) -> Reg<U32> {
        k.add(stage.index(), NamedBarrier::Sm80Stages.id() + self.config.stages)
    }

    /// Starts the copy of the next block, if there is one.
    fn load_next(&self, k: &mut Builder, range: &KvRange) {
        let exists = k.compare(Compare::Lt, self.next_key, range.end);
        k.if_uniform(exists, |k| {
            let left = match range.first_new_key {
                // Rows from there on are not in the cache, or on their way into it.
                Some(first_new) => k.section("cached rows", |k| {
                    k.eval((range.key_length.min(first_new) - self.next_key).max(0).unsigned())
                }),
                None => k.eval((range.key_length - self.next_key).unsigned()),
            };
            k.section("load keys", |k| {
                self.key_copy.start(k, Some(self.pipeline.write_stage()), left);
                self.key_copy.advance(k);
            });
            k.section("load values", |k| {
                let skipped = range.batch_begin.map(|first| k.sub(first, self.next_key));
                self.value_copy.start_from(k, Some(self.pipeline.write_stage()), skipped, left);
                self.value_copy.advance(k);
            });
            self.scale_copies.start(k, self.pipeline.write_stage(), range, (self.next_key, left));
        });
        k.add_to(self.next_key, self.config.tile_n as i32);
        self.pipeline.producer_commit(k);
    }
}
