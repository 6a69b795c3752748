//! Warp-specialized Hopper kernel for `sm_90a`: one producer warp with TMA, one to four consumer warpgroups with `wgmma`.
//!
//! Each consumer warpgroup has 64 rows of a tile of query rows. The producer's warpgroup gives most of its registers to the
//! consumers (`setmaxnreg`); one lane of one warp starts the TMA loads of Q, and of K and V blocks into a [`TmaPipeline`]
//! each. Consumers go through the KV blocks from the last to the first, so that partial blocks come first:
//!
//! ```text
//!  TMA        K4 | K3 V4 | K2 V3 | K1 V2 | K0 V1 |  V0
//!  wgmma      S4 | S3 O4 | S2 O3 | S1 O2 | S0 O1 |  O0          S = Q · Kᵀ, O += P · V
//!  softmax        P4     P3      P2      P1      P0             P = softmax(S), while PV of the block before runs
//! ```
//!
//! So the tensor cores have PV of the block before while exponentials are computed. P never leaves the registers of the
//! warps that computed it. With ping-pong (the warp-scheduler barrier), warpgroups start products one after the other, so
//! that one has the tensor cores while another computes its softmax.
//!
//! Where there are few rows, the keys can be split instead (split-KV): each warpgroup takes every second or fourth block for
//! the same rows, and the first merges what they have. So can the CTAs of a cluster, through the shared memory of the first
//! (DSMEM).
//!
//! The output goes back to the stage of its Q, from which TMA stores it while the next tile is worked on.
//!
//! The `TileScheduler` says which tiles a CTA works on: one, or, with as many persistent CTAs as SMs, one after the other.
//! V of 8-bit floats is transposed on the way (`transposer`), since `wgmma` has no transposed form of those; what
//! else is different is in a `PvStrategy`.
//!
//! With programmatic dependent launch (PDL), the kernel starts while the one before it on the stream ends, waits for it as
//! late as possible, and then lets the next one start.

pub(crate) mod config;
mod consumer;
mod epilogue;
mod family;
mod fp8;
mod fp8_scales;
pub(crate) mod heuristics;
mod kv_split;
mod mainloop;
mod producer;
mod pv;
pub(crate) mod tensor_maps;
mod transposer;
mod value_padding;
mod warp_scheduler;

pub(crate) use consumer::Consumer;
pub(crate) use mainloop::Mainloop;
pub(crate) use pv::PvStrategy;

use flashcore_ir::types::{U32, U64};
use flashcore_ir::{Builder, Compare, Kernel, Reg, ShuffleMode, SpecialRegister};

use crate::attention::block_mask::mode::{BlockMaskMode, RangePer};
use crate::attention::block_mask::work_info::WorkInfoSlots;
use crate::attention::scheduler::TileScheduler;
use crate::attention::scheduler::chunks::ChunkParameters;
use crate::attention::scheduler::dynamic::TileSlots;
use crate::config::HopperConfig;
use crate::element::Element;
use crate::parameters::Parameters;
use crate::primitives::{CHUNK_BYTES, LANES, SwizzledTile, TmaPipeline};
use crate::specialization::Specialization;
use flashcore_problem::Operand;

/// Threads of a warpgroup.
pub(crate) const WARPGROUP: u32 = 4 * LANES;
/// Query rows of a warpgroup.
pub(crate) const WARPGROUP_ROWS: u32 = 64;

/// Writes the kernel, with an output of pairs of `T`.
pub(crate) fn kernel<T: Element>(name: String, config: HopperConfig, specialization: Specialization) -> Kernel {
    let write = if specialization.has_fp8_query() { kernel_of::<fp8::Fp8Pv<T>> } else { kernel_of::<pv::PlainPv<T>> };
    write(name, config, specialization)
}

fn kernel_of<P: PvStrategy>(name: String, config: HopperConfig, specialization: Specialization) -> Kernel {
    let mut builder = Builder::new(name, config.threads());
    let k = &mut builder;
    k.set_register_budget(config.registers_at_launch());
    if config.cluster > 1 {
        k.set_cluster([config.cluster, 1, 1]);
    }
    let (cta, thread) = prologue(k, config, specialization);
    let group = k.shr(thread, WARPGROUP.ilog2());
    // All lanes of a warp agree, which compilers cannot see.
    let group = k.shuffle(ShuffleMode::Index, group, 0u32);
    let is_producer = k.compare(Compare::Eq, group, 0u32);
    let (producer_registers, consumer_registers) = config.registers_by_role(specialization);
    k.if_else_uniform(
        is_producer,
        |k| {
            if producer_registers < config.registers_at_launch() {
                k.decrease_registers(producer_registers);
            }
            k.section("producer", |k| producer::run(k, &cta, thread));
        },
        |k| {
            if consumer_registers > config.registers_at_launch() {
                k.increase_registers(consumer_registers);
            }
            let warpgroup = k.sub(group, 1u32);
            consumer::run::<P>(k, &cta, thread, warpgroup);
        },
    );
    builder.finish()
}

/// Loads the parameters and initializes the pipelines; returns what the warps of the CTA share, and the thread.
fn prologue(k: &mut Builder, config: HopperConfig, specialization: Specialization) -> (Cta, Reg<U32>) {
    let parameters = Parameters::load(k, specialization);
    let chunks = (config.chunk_keys > 0).then(|| ChunkParameters::load(k, &parameters));
    let maps = TensorMaps::declare(k, config, specialization);
    let mut scheduler = TileScheduler::load(k, config, &parameters, specialization, chunks);
    let block_mask = BlockMaskMode::of(config, specialization);
    let shared = Shared::reserve(k, config, specialization, block_mask);
    let thread = k.special(SpecialRegister::ThreadX);
    let base = k.shared_base();
    k.section("barriers", |k| {
        let is_first = k.compare(Compare::Eq, thread, 0u32);
        k.if_then(is_first, |k| {
            for map in [maps.query, maps.key, maps.value].into_iter().chain(maps.output) {
                k.prefetch_tensor_map(map);
            }
            shared.init_barriers(k, base, config);
            if let Some(raw) = shared.raw_values {
                raw.init(k, base);
            }
            k.fence_mbarrier_init();
        });
        k.cta_sync();
        if config.cluster > 1 {
            // The CTA has started: those that store to its shared memory wait for this.
            k.cluster_arrive();
        }
    });
    if block_mask.is_some_and(|mode| mode.sorted) {
        grid_dependency_wait(k, config);
        let memory = k.add(base, shared.sort);
        scheduler = scheduler.sorted(k, memory);
    }
    (Cta { config, specialization, block_mask, maps, scheduler, shared, base }, thread)
}

/// The CTA, as all its warps see it.
pub(crate) struct Cta {
    pub(crate) config: HopperConfig,
    pub(crate) specialization: Specialization,
    pub(crate) block_mask: Option<BlockMaskMode>,
    maps: TensorMaps,
    scheduler: TileScheduler,
    pub(crate) shared: Shared,
    /// The address of shared memory.
    base: Reg<U32>,
}

impl Cta {
    /// True if the place of a tile's sequence or its KV range is read from device memory.
    fn loads_kv_range(&self) -> bool {
        self.specialization.has(Operand::SequsedK) || self.specialization.is_ragged() || self.block_mask.is_some()
    }

    /// The row group whose KV blocks a warp goes through: that of its warpgroup, or the one of the CTA.
    fn block_mask_group(&self, k: &mut Builder, warpgroup: Option<Reg<U32>>) -> Option<Reg<U32>> {
        match self.block_mask?.range {
            RangePer::Cta => Some(k.copy(0u32)),
            RangePer::Warpgroup => warpgroup,
        }
    }

    /// Waits for the preceding kernel on the stream (PDL), as late as possible: before this thread touches device
    /// memory. Every role does it where it first may; the first of them lets the next kernel start.
    fn grid_dependency_wait(&self, k: &mut Builder) {
        grid_dependency_wait(k, self.config);
    }
}

/// Waits, and only then lets the next kernel start: it waits for this kernel alone, so whatever older kernels wrote must
/// be visible by then.
fn grid_dependency_wait(k: &mut Builder, config: HopperConfig) {
    if config.pdl {
        k.section("grid dependency wait", |k| {
            k.grid_dependency_wait();
            k.launch_dependents();
        });
    }
}

/// The tensor maps of TMA.
#[derive(Debug, Clone, Copy)]
struct TensorMaps {
    query: Reg<U64>,
    key: Reg<U64>,
    value: Reg<U64>,
    /// Set where TMA stores the output.
    output: Option<Reg<U64>>,
}

impl TensorMaps {
    fn declare(k: &mut Builder, config: HopperConfig, specialization: Specialization) -> Self {
        let [query, key, value] = ["query_map", "key_map", "value_map"].map(|name| k.tensor_map(name));
        let output = config.tma_store(specialization).then(|| k.tensor_map("output_map"));
        Self { query, key, value, output }
    }
}

/// Shared memory: tiles, pipelines, and what is exchanged.
pub(crate) struct Shared {
    query: SwizzledTile,
    key: SwizzledTile,
    value: SwizzledTile,
    query_pipeline: TmaPipeline,
    key_pipeline: TmaPipeline,
    value_pipeline: TmaPipeline,
    /// V of 8-bit floats before it is transposed into [`value_pipeline`](Self::value_pipeline).
    raw_values: Option<transposer::RawValues>,
    /// Partial results that KV splits exchange.
    exchange: u32,
    /// Memory of the sorted scheduler.
    sort: u32,
    /// Work-tile info beside the Q stages, under a sorted scheduler.
    pub(crate) work_info: Option<WorkInfoSlots>,
    /// The tile beside its Q stage, under a dynamic scheduler.
    tile_slots: Option<TileSlots>,
}

impl Shared {
    fn reserve(
        k: &mut Builder,
        config: HopperConfig,
        specialization: Specialization,
        block_mask: Option<BlockMaskMode>,
    ) -> Self {
        let [query, key, value] = config.tiles(specialization);
        let q_stages = config.q_stages(specialization);
        let mut query_pipeline = TmaPipeline::reserve(k, q_stages, query.bytes());
        let mut key_pipeline = TmaPipeline::reserve(k, config.stages, key.bytes());
        let transposed = config.transposed_values(specialization);
        let mut value_pipeline = TmaPipeline::reserve(k, config.stages, transposed.unwrap_or(value).bytes());
        let mut raw_pipeline = transposed.map(|_| TmaPipeline::reserve(k, config.stages, value.bytes()));
        let pipelines = [&mut query_pipeline, &mut key_pipeline, &mut value_pipeline];
        for pipeline in pipelines.into_iter().chain(&mut raw_pipeline) {
            pipeline.reserve_barriers(k);
        }
        let raw_values = raw_pipeline.zip(transposed).map(|(pipeline, transposed)| {
            let zeros = k.reserve_shared(CHUNK_BYTES, CHUNK_BYTES);
            transposer::RawValues::new(pipeline, value, transposed, zeros)
        });
        let exchange = k.reserve_shared(config.exchange_bytes(specialization), 128);
        let sort = k.reserve_shared(config.sort_bytes(specialization), 16);
        let work_info = block_mask.filter(|mode| mode.sorted);
        let work_info = work_info.map(|mode| WorkInfoSlots::reserve(k, q_stages, mode.tiles(config)));
        let tile_slots = config.dynamic.then(|| TileSlots::reserve(k, q_stages));
        Self {
            query,
            key,
            value,
            query_pipeline,
            key_pipeline,
            value_pipeline,
            raw_values,
            exchange,
            sort,
            work_info,
            tile_slots,
        }
    }

    /// The tile of V transposed, where it is of 8-bit floats.
    fn transposed_values(&self) -> SwizzledTile {
        self.raw_values.map_or(self.value, |raw| raw.transposed())
    }

    /// True if the producer says beside the Q stage of a tile which tile that is.
    pub(crate) const fn broadcasts_tiles(&self) -> bool {
        self.work_info.is_some() || self.tile_slots.is_some()
    }

    fn init_barriers(&self, k: &mut Builder, base: Reg<U32>, config: HopperConfig) {
        self.query_pipeline.init_barriers(k, base, config.consumer_warps());
        let consumers = config.consumer_warps() / config.kv_split_warpgroups.max(1);
        self.key_pipeline.init_barriers(k, base, consumers);
        match self.raw_values {
            None => self.value_pipeline.init_barriers(k, base, consumers),
            Some(raw) => {
                self.value_pipeline.init_barriers_of_warps(k, base, transposer::TRANSPOSERS, consumers);
                raw.pipeline.init_barriers(k, base, transposer::TRANSPOSERS);
            }
        }
    }
}
