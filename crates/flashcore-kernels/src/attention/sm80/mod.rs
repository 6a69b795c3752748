//! Ampere kernel: `cp.async`, `ldmatrix` and `mma.sync`, for everything from `sm_80` on.
//!
//! A CTA has one tile of query rows, 16 or 32 for each warp. Q goes through shared memory into registers once; KV blocks go
//! through a pipeline of stages, copied by all threads while the block before is multiplied. For each block a warp
//! multiplies its rows of Q by K, masks the scores, turns them into P with the [`OnlineSoftmax`], and multiplies P, which
//! never leaves its registers, by V.
//!
//! There is one barrier per block: it says that the block has arrived for everybody, and that everybody has finished with
//! the block before, whose stage the next copy takes.
//!
//! The choices of its [`AmpereConfig`] change who copies (`kv_pipeline`), which rows a tile has (`tile_coord`), how many
//! tiles a CTA takes, and whether it has all keys or a split of them (`split_kv`).

mod append;
pub(crate) mod config;
pub(crate) mod element;
pub(crate) mod epilogue;
mod family;
pub(crate) mod heuristics;
pub(crate) mod kv_pipeline;
mod mainloop;
pub(crate) mod scales;
mod scales_fp8;

use flashcore_ir::types::{Bf16x2, F16x2, S32, U32};
use flashcore_ir::{Arch, Builder, Compare, Kernel, Reg, SpecialRegister};

use super::kv_range::KvRange;
use super::kv_source::KvSource;
use super::scheduler::chunks::{ChunkParameters, ChunkUnit, each_unit};
use super::split_kv::cluster::ClusterMerge;
use super::{TileContext, TileSource};
use crate::config::{AmpereConfig, QueryPlace};
use crate::element::ElementLayout;
use crate::parameters::{Parameters, SplitParameters, TileParameters};
#[cfg(doc)]
use crate::primitives::OnlineSoftmax;
use crate::primitives::{Fp8Target, FragmentPosition, LANES, MMA_M, NamedBarrier, OperandA, ROW_STEP, SharedTile};
use crate::specialization::Specialization;
use append::NewRowTiles;
use element::{Fp8Kv, Fp8Qkv, TensorElement};
use flashcore_problem::DType;
use kv_pipeline::{KvPipeline, KvTiles};

/// Writes the kernel for keys and values of 8 bits, under a query of 16 bits or of 8.
pub(crate) fn fp8_kernel(name: String, config: AmpereConfig, specialization: Specialization, arch: Arch) -> Kernel {
    let write = if specialization.output_dtype() == DType::Bf16 {
        fp8_kernel_of::<Bf16x2>(specialization, arch)
    } else {
        fp8_kernel_of::<F16x2>(specialization, arch)
    };
    write(name, config, specialization)
}

type Write = fn(String, AmpereConfig, Specialization) -> Kernel;

/// The same with an output of pairs of `T`.
fn fp8_kernel_of<T: Fp8Target>(specialization: Specialization, arch: Arch) -> Write {
    let is_e5m2 = specialization.key_value_dtype() == DType::E5m2;
    match (specialization.has_fp8_query(), is_e5m2, arch.has_fp8_mma()) {
        (false, true, _) => kernel::<Fp8Kv<T, true>>,
        (false, false, _) => kernel::<Fp8Kv<T, false>>,
        (true, true, true) => kernel::<Fp8Qkv<T, true, true>>,
        (true, true, false) => kernel::<Fp8Qkv<T, true, false>>,
        (true, false, true) => kernel::<Fp8Qkv<T, false, true>>,
        (true, false, false) => kernel::<Fp8Qkv<T, false, false>>,
    }
}

/// Writes the kernel.
pub(crate) fn kernel<T: TensorElement>(name: String, config: AmpereConfig, specialization: Specialization) -> Kernel {
    let mut builder = Builder::new(name, config.threads());
    let k = &mut builder;
    k.set_register_budget(config.register_budget(specialization));
    if config.cluster {
        k.set_cluster([config.num_splits, 1, 1]);
    }
    let parameters = Parameters::load(k, specialization);
    let context = |k: &mut Builder, source| {
        TileContext::new(k, &parameters, specialization, config.tile_m(), source, config.pack_gqa)
    };
    if config.chunk_keys > 0 {
        chunks::<T>(k, config, &parameters, specialization);
    } else if config.persistent > 0 {
        let parameters = TileParameters::load(k);
        let first = k.special(SpecialRegister::CtaX);
        let ctas = k.special(SpecialRegister::GridX);
        let warp = Warp::new(k, config);
        let tiles = Tiles::reserve(k, config, specialization);
        k.for_uniform(first, parameters.all, ctas, |k, index| {
            let context = context(k, TileSource::Persistent { index, parameters });
            existing_tile(k, &context, |k| tile::<T>(k, config, &context, &warp, &tiles, None));
            // The next tile takes the shared memory of this one.
            k.cta_sync();
        });
    } else {
        let split = (config.num_splits > 1).then(|| {
            if !config.cluster {
                return Split::Cta(SplitParameters::load(k, &parameters));
            }
            let merge = ClusterMerge::reserve(k, config.num_splits, config.tile_m(), specialization.value_dim);
            Split::Cluster { num_splits: k.copy(config.num_splits), merge }
        });
        let source = match split {
            Some(Split::Cta(SplitParameters { num_splits, .. }) | Split::Cluster { num_splits, .. }) => {
                TileSource::SplitGrid { num_splits }
            }
            Some(Split::Chunk { .. }) | None => TileSource::Grid,
        };
        let context = context(k, source);
        let warp = Warp::new(k, config);
        let tiles = Tiles::reserve(k, config, specialization);
        existing_tile(k, &context, |k| tile::<T>(k, config, &context, &warp, &tiles, split));
    }
    builder.finish()
}

/// The split of the keys that a CTA computes.
#[derive(Debug, Clone, Copy)]
enum Split {
    /// One of as many as the grid has for each tile.
    Cta(SplitParameters),
    /// One of as many as the cluster has CTAs.
    Cluster { num_splits: Reg<U32>, merge: ClusterMerge },
    /// A chunk, one of `count` of its sequence.
    Chunk { splits: SplitParameters, index: Reg<U32>, count: Reg<U32>, first_key: Reg<S32>, chunk_keys: Reg<U32> },
}

/// Persistent CTAs: each takes chunks of the keys of all sequences in turn.
fn chunks<T: TensorElement>(
    k: &mut Builder,
    config: AmpereConfig,
    parameters: &Parameters,
    specialization: Specialization,
) {
    let chunks = ChunkParameters::load(k, parameters);
    let warp = Warp::new(k, config);
    let tiles = Tiles::reserve(k, config, specialization);
    if config.pdl {
        k.section("launch dependents", Builder::launch_dependents);
    }
    let tile_shape = (config.tile_m(), config.pack_gqa);
    each_unit(k, parameters, chunks.into(), specialization, tile_shape, |k, unit| {
        let group = parameters.heads_per_key_head;
        let heads = if config.pack_gqa { k.mul(chunks.heads, group) } else { chunks.heads };
        let context = TileContext::at(k, parameters, specialization, unit.coord, Some(heads));
        let context = context.with_packed_heads(k, config.pack_gqa.then_some(group));
        let ChunkUnit { index, first_key, count, .. } = unit;
        let split = Split::Chunk { splits: chunks.splits, index, count, first_key, chunk_keys: chunks.chunk_keys };
        tile::<T>(k, config, &context, &warp, &tiles, Some(split));
        // The next unit takes the shared memory of this one.
        k.cta_sync();
    });
}

/// The keys of a tile, or of its split.
fn kv_range(k: &mut Builder, config: AmpereConfig, context: &TileContext, splits: Option<Split>) -> KvRange {
    let range = KvRange::new(k, context, config.tile_m(), config.tile_n);
    let range = match splits {
        Some(Split::Cta(SplitParameters { num_splits, .. }) | Split::Cluster { num_splits, .. }) => {
            range.split(k, num_splits)
        }
        Some(Split::Chunk { first_key, chunk_keys, .. }) => range.chunk(k, first_key, chunk_keys),
        None => range,
    };
    if context.sequence.new_keys.is_none() || !context.specialization.has_query_lengths() {
        return range;
    }
    // The tile of a sequence without rows is there to append.
    let has_rows = k.compare(Compare::Lt, context.first_row, context.end_row);
    range.only_if(k, has_rows)
}

/// Computes a tile unless its sequence ends before it: grids are made for the longest.
fn existing_tile(k: &mut Builder, context: &TileContext, tile: impl FnOnce(&mut Builder)) {
    if !context.specialization.has_query_lengths() {
        return tile(k);
    }
    let mut exists = k.compare(Compare::Lt, context.first_row, context.end_row);
    if context.sequence.new_keys.is_some() {
        // All splits, since those of a cluster wait for each other.
        let appends = append::is_first_tile(k, context);
        exists = k.or(exists, appends);
    }
    k.if_uniform(exists, tile);
}

/// One tile of query rows, by all warps or by warps specialized as producers and consumers.
fn tile<T: TensorElement>(
    k: &mut Builder,
    config: AmpereConfig,
    context: &TileContext,
    warp: &Warp,
    tiles: &Tiles,
    splits: Option<Split>,
) {
    let range = kv_range(k, config, context, splits);
    if config.producers == 0 {
        mainloop::run::<T>(k, config, context, warp, tiles, &range, splits);
        return;
    }
    let is_producer = k.compare(Compare::Ge, warp.thread, config.warps * LANES);
    k.if_else_uniform(
        is_producer,
        |k| {
            let thread = k.sub(warp.thread, config.warps * LANES);
            let pipeline = k.section("copies", |k| {
                let source = KvSource::new(k, context);
                KvPipeline::new(k, config.kv_pipeline(), &tiles.kv, &range, source, warp.shared_base, thread)
            });
            pipeline.produce(k, &range);
        },
        |k| mainloop::run::<T>(k, config, context, warp, tiles, &range, splits),
    );
}

/// A thread and its warp.
pub(crate) struct Warp {
    thread: Reg<U32>,
    lane: Reg<U32>,
    /// The first of the warp's rows in the tile of the CTA.
    first_row: Reg<U32>,
    pub(super) position: FragmentPosition,
    shared_base: Reg<U32>,
    /// The rows of the warp, by 16.
    m_tiles: u32,
    /// The warp's split of the keys of each block.
    split: Reg<U32>,
    /// Threads of the consumer warps, where there are producers.
    consumer_threads: Option<u32>,
}

impl Warp {
    fn new(k: &mut Builder, config: AmpereConfig) -> Self {
        let thread = k.special(SpecialRegister::ThreadX);
        let warp = k.shr(thread, LANES.ilog2());
        let lane = k.and(thread, LANES - 1);
        let row_warps = config.row_warps();
        let (row_warp, split) = match config.kv_split_warps {
            1 => (warp, k.copy(0u32)),
            _ => (k.rem(warp, row_warps), k.div(warp, row_warps)),
        };
        let first_row = k.mul(row_warp, config.rows_per_warp);
        let (position, shared_base) = (FragmentPosition::new(k, lane), k.shared_base());
        let m_tiles = config.rows_per_warp / MMA_M;
        let consumer_threads = (config.producers > 0).then_some(config.warps * LANES);
        Self { thread, lane, first_row, position, shared_base, m_tiles, split, consumer_threads }
    }

    /// Waits for all consumer warps.
    fn sync_consumers(&self, k: &mut Builder) {
        match self.consumer_threads {
            None => k.cta_sync(),
            Some(threads) => k.barrier_sync(NamedBarrier::Sm80Consumers.id(), threads),
        }
    }

    /// The first key of its split of the block that begins at `first_key`.
    fn first_key(&self, k: &mut Builder, config: AmpereConfig, first_key: Reg<S32>) -> Reg<S32> {
        if config.kv_split_warps == 1 {
            return first_key;
        }
        k.eval(self.split.signed().mul_add(config.keys_per_warp() as i32, first_key))
    }

    /// The base of shared memory, moved to its split of a tile of keys or values.
    fn split_base(&self, k: &mut Builder, config: AmpereConfig, tile: SharedTile) -> Reg<U32> {
        match config.kv_split_warps {
            1 => self.shared_base,
            _ => k.mad(self.split, config.keys_per_warp() * tile.row_bytes(), self.shared_base),
        }
    }

    /// The query row of one of the lane's rows, of which it has two in each 16.
    pub(super) fn row(&self, k: &mut Builder, context: &TileContext, index: u32) -> Reg<U32> {
        k.eval(context.first_row + (self.first_row + self.position.group) + index * ROW_STEP)
    }

    /// The row in the tile of one of the lane's rows.
    fn tile_row(&self, k: &mut Builder, index: u32) -> Reg<U32> {
        k.eval(self.first_row + self.position.group + index * ROW_STEP)
    }
}

/// The tiles in shared memory. The output goes out through the memory of the query, which nobody reads any more by then.
pub(crate) struct Tiles {
    query: SharedTile,
    /// The tile of the query itself, unless elements of the output are wider: then rows lie where those of other warps did.
    output: SharedTile,
    kv: KvTiles,
    /// New keys and values, where the launch appends them.
    new_rows: Option<NewRowTiles>,
}

impl Tiles {
    fn reserve(k: &mut Builder, config: AmpereConfig, specialization: Specialization) -> Self {
        let (query, output) = Self::reserve_query(k, config, specialization);
        let kv = KvTiles::reserve(k, config.kv_pipeline(), config.layout, specialization);
        k.reserve_shared(config.exchange_bytes(specialization).saturating_sub(config.stages * kv.stage_bytes), 128);
        let new_rows = specialization.append.map(|_| NewRowTiles::reserve(k, specialization));
        Self { query, output, kv, new_rows }
    }

    /// The tiles of query and output, in the same memory.
    fn reserve_query(
        k: &mut Builder,
        config: AmpereConfig,
        specialization: Specialization,
    ) -> (SharedTile, SharedTile) {
        let Specialization { dtype, head_dim, value_dim, .. } = specialization;
        let [element, output_element] = [dtype, specialization.output_dtype()].map(ElementLayout::of);
        let mut reserve = |dim, element| {
            let columns = SharedTile::columns_for(dim, element);
            SharedTile::reserve(k, config.tile_m(), columns, config.layout, element)
        };
        if element == output_element {
            let query = reserve(head_dim.max(value_dim), element);
            return (query, query);
        }
        // Elements of the output are twice as wide.
        let output = reserve((head_dim / 2).max(value_dim), output_element);
        let columns = SharedTile::columns_for(head_dim, element);
        (
            SharedTile { columns, element, ..output },
            SharedTile { columns: SharedTile::columns_for(value_dim, output_element), ..output },
        )
    }

    /// The warp's rows of the query.
    fn query_of_warp<T: TensorElement>(
        &self,
        k: &mut Builder,
        config: AmpereConfig,
        warp: &Warp,
        columns: u32,
    ) -> OperandA<'static, T::Fragment> {
        let base = k.eval(warp.shared_base + warp.first_row * self.query.row_bytes());
        let first = T::query(k, self.query, base, warp.lane);
        let m_tiles: Vec<_> = (0..warp.m_tiles).map(|m_tile| first.from_outer(m_tile * MMA_M)).collect();
        match config.query {
            QueryPlace::Registers => OperandA::load(k, &m_tiles, columns),
            QueryPlace::Shared => OperandA::Shared(m_tiles, columns),
        }
    }
}
