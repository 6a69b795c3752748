//! Hopper's asynchronous machines from end to end, for `sm_90a`.
//!
//! A CTA has one warpgroup that copies and one to three that compute, each on 64 rows of a tile of query rows. The
//! copying one gives most of its registers to the others; one lane of it starts the tensor copies of the query, and of
//! tiles of keys and values into a [`TransferRing`] each. The computing ones go through the tiles from the last to the
//! first, so that what masks cut comes first:
//!
//! ```text
//!  copies     K4 | K3 V4 | K2 V3 | K1 V2 | K0 V1 |  V0
//!  products   S4 | S3 O4 | S2 O3 | S1 O2 | S0 O1 |  O0          S: scores = query · keysᵀ, O: output += weights · values
//!  softmax        P4     P3      P2      P1      P0             P: scores -> weights, while O of the tile before runs
//! ```
//!
//! So the tensor cores have the product of the tile before while exponentials are computed. The weights never leave the
//! registers of the warps that computed them. With ping-pong, warpgroups also take turns in starting products, so that
//! one has the tensor cores while another computes its softmax.
//!
//! Where there are few rows, warpgroups can share the keys instead: each takes every second or fourth tile of them for the
//! same rows, and the first adds up what they have, in `gather`. So can the CTAs of a cluster, through the shared memory of
//! the first.
//!
//! The output goes back to the place of its query, from which the copy engine stores it while the next rows are worked on.
//!
//! `Schedule` says which tiles a CTA works on: one, or, with as many CTAs as SMs, one after the other.

pub(crate) mod by_length;
mod consumer;
mod epilogue;
mod key_group;
mod key_tiles;
mod order;
mod producer;
mod schedule;
mod ticket;

pub(crate) use order::Order;

use flashcore_ir::types::{U32, U64};
use flashcore_ir::{Builder, Compare, Kernel, Reg, ShuffleMode, SpecialRegister};
use flashcore_problem::Operand;

use crate::config::HopperConfig;
use crate::element::Element;
use crate::parameters::Parameters;
use crate::specialization::Specialization;
use crate::tile::{LANES, PanelTile, TransferRing};
use by_length::ByLength;
use schedule::Schedule;
use ticket::Tickets;

/// Threads of a warpgroup.
pub(crate) const WARPGROUP: u32 = 4 * LANES;
/// Query rows of a warpgroup.
pub(crate) const WARPGROUP_ROWS: u32 = 64;

/// Writes the kernel.
pub(crate) fn kernel<T: Element>(name: String, config: HopperConfig, specialization: Specialization) -> Kernel {
    let mut builder = Builder::new(name, config.threads());
    let k = &mut builder;
    k.set_register_budget(config.registers_at_launch());
    if config.cluster > 1 {
        k.set_cluster([config.cluster, 1, 1]);
    }
    let parameters = Parameters::load(k, specialization);
    let maps = Maps::declare(k, config, specialization);
    let mut schedule = Schedule::load(k, config, &parameters, specialization);
    let shared = Shared::reserve(k, config, specialization);
    let thread = k.special(SpecialRegister::ThreadX);
    let base = k.shared_base();
    k.section("barriers", |k| {
        let first = k.compare(Compare::Eq, thread, 0u32);
        k.if_then(first, |k| {
            for map in [maps.query, maps.key, maps.value].into_iter().chain(maps.output) {
                k.prefetch_tensor_map(map);
            }
            shared.initialise(k, base, config);
            k.fence_mbarrier_init();
        });
        k.cta_sync();
        if config.cluster > 1 {
            // That this CTA is there; who stores to its memory waits for that.
            k.cluster_arrive();
        }
    });
    if config.pdl {
        k.section("kernel behind", Builder::launch_dependents);
    }
    if config.sorts_tiles(specialization) {
        wait_for_kernel_before(k, config);
        let memory = k.add(base, shared.order);
        ByLength::sort(k, &mut schedule, config, memory);
    }
    let cta = Cta { config, specialization, maps, schedule, shared, base };
    let group = k.shr(thread, WARPGROUP.ilog2());
    // All lanes of a warp agree, which compilers cannot see.
    let group = k.shuffle(ShuffleMode::Index, group, 0u32);
    let produces = k.compare(Compare::Eq, group, 0u32);
    let (fewer, more) = config.registers_by_role();
    k.if_else_uniform(
        produces,
        |k| {
            if fewer < config.registers_at_launch() {
                k.decrease_registers(fewer);
            }
            k.section("producer", |k| producer::run(k, &cta, thread));
        },
        |k| {
            if more > config.registers_at_launch() {
                k.increase_registers(more);
            }
            let warpgroup = k.sub(group, 1u32);
            consumer::run::<T>(k, &cta, thread, warpgroup);
        },
    );
    builder.finish()
}

/// What all warps of a CTA share.
struct Cta {
    config: HopperConfig,
    specialization: Specialization,
    maps: Maps,
    schedule: Schedule,
    shared: Shared,
    /// The address of shared memory.
    base: Reg<U32>,
}

impl Cta {
    /// Whether which keys are needed stands in memory.
    const fn reads_early(&self) -> bool {
        self.specialization.has(Operand::SequsedK) || self.specialization.mask_mod.is_some()
    }

    /// The part of the rows that has tiles of keys of those that an expression leaves, where it is all of them.
    fn common_part(&self, k: &mut Builder) -> Option<Reg<U32>> {
        self.config.has_common_ranges(self.specialization).then(|| k.copy(0u32))
    }

    /// Waits for the kernel before this one on the stream, as late as possible: before this thread touches memory of the
    /// device. Every role does it where it first may.
    fn wait_for_kernel_before(&self, k: &mut Builder) {
        wait_for_kernel_before(k, self.config);
    }
}

fn wait_for_kernel_before(k: &mut Builder, config: HopperConfig) {
    if config.pdl {
        k.section("kernel before", Builder::grid_dependency_wait);
    }
}

/// The tensors that are copied.
#[derive(Debug, Clone, Copy)]
struct Maps {
    query: Reg<U64>,
    key: Reg<U64>,
    value: Reg<U64>,
    /// Where the copy engine stores it.
    output: Option<Reg<U64>>,
}

impl Maps {
    fn declare(k: &mut Builder, config: HopperConfig, specialization: Specialization) -> Self {
        let [query, key, value] = ["query_map", "key_map", "value_map"].map(|name| k.tensor_map(name));
        let output = config.stores_by_copy(specialization).then(|| k.tensor_map("output_map"));
        Self { query, key, value, output }
    }
}

/// The tiles in shared memory, and the rings they go through.
struct Shared {
    query: PanelTile,
    key: PanelTile,
    value: PanelTile,
    query_ring: TransferRing,
    key_ring: TransferRing,
    value_ring: TransferRing,
    /// Where warpgroups that share keys add up what they have.
    exchange: u32,
    /// Where tiles of query rows are sorted.
    order: u32,
    /// What is handed over beside queries, where tiles are sorted.
    tickets: Option<Tickets>,
}

impl Shared {
    fn reserve(k: &mut Builder, config: HopperConfig, specialization: Specialization) -> Self {
        let [query, key, value] = config.tiles(specialization);
        let mut query_ring = TransferRing::reserve(k, config.query_places(specialization), query.bytes());
        let mut key_ring = TransferRing::reserve(k, config.stages, key.bytes());
        let mut value_ring = TransferRing::reserve(k, config.stages, value.bytes());
        for ring in [&mut query_ring, &mut key_ring, &mut value_ring] {
            ring.reserve_barriers(k);
        }
        let exchange = k.reserve_shared(config.exchange_bytes(specialization), 128);
        let order = k.reserve_shared(config.order_bytes(specialization), 16);
        let ranges = config.range_tiles(specialization).filter(|ranges| ranges.rows_anywhere);
        let tickets = ranges.map(|ranges| Tickets::reserve(k, config.query_places(specialization), ranges));
        Self { query, key, value, query_ring, key_ring, value_ring, exchange, order, tickets }
    }

    fn initialise(&self, k: &mut Builder, base: Reg<U32>, config: HopperConfig) {
        self.query_ring.initialise(k, base, config.consumer_warps());
        for ring in [&self.key_ring, &self.value_ring] {
            ring.initialise(k, base, config.consumer_warps() / config.kv_split_warpgroups.max(1));
        }
    }
}
