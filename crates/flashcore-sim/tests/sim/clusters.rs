//! Clusters: CTAs that reach each other's shared memory, and what goes wrong between them.

use crate::support::{
    Expected, SHARED, at, deadlock, delay, fault, faulty, is_lane, is_warp, kernel, race, slots, threads, verified,
    words,
};
use flashcore_ir::types::{U32, U64};
use flashcore_ir::{Compare, FenceScope, Op, Space, SpecialRegister, VerifiedKernel};
use flashcore_sim::{
    Argument, ClusterBarrierProblem, FaultKind, GlobalMemory, Launch, LaunchError, MbarrierState, Nearest, Options,
    SimError, WaitsFor, launch,
};

/// Addresses of the shared memory of CTAs, as other CTAs of the cluster know them.
const SECOND: u64 = 2 << 24;
const FIRST: u64 = 1 << 24;

/// An exchange in which each thread of a CTA gives a word to the next CTA of its cluster, and the ways to get it wrong.
#[derive(Clone, Copy, PartialEq)]
enum Exchange {
    Right,
    WithoutBarrier,
    WithoutLastBarrier,
    ByMbarrier,
    ByMbarrierOfTheCta,
    Twice,
    WaitFirst,
    NoSuchRank,
}

const CTAS: u32 = 4;

fn exchange_kernel(how: Exchange) -> VerifiedKernel {
    kernel(32, |k| {
        k.set_cluster([2, 1, 1]);
        let y = k.parameter::<U64>("y");
        let slots = k.reserve_shared(128, 128);
        let barrier = k.reserve_mbarrier();
        let base = k.shared_base();
        let (slots, barrier) = (k.add(base, slots), k.add(base, barrier));
        let lane = k.lane();
        let rank = k.cluster_rank();
        let other = if how == Exchange::NoSuchRank { k.add(rank, 1u32) } else { k.xor(rank, 1u32) };
        let own = k.mad::<U32>(lane, 4u32, slots);
        let cta = k.special(SpecialRegister::CtaX);
        let value = k.mad::<U32>(cta, 1000u32, lane);
        let by_mbarrier = matches!(how, Exchange::ByMbarrier | Exchange::ByMbarrierOfTheCta);
        if by_mbarrier {
            let first = k.compare::<U32>(Compare::Eq, lane, 0u32);
            k.when(first, |k| k.mbarrier_init(barrier, 32u32));
            k.cluster_sync();
        }
        let remote = k.section("map", |k| k.map_shared(own, other));
        if how == Exchange::WaitFirst {
            k.section("wait", |k| k.cluster_wait());
        }
        // The second CTA of a cluster is late.
        let is_second = k.compare::<U32>(Compare::Eq, rank, 1u32);
        k.if_uniform(is_second, delay);
        k.section("write", |k| k.store_cluster(remote, &[value]));
        if by_mbarrier {
            let target = k.map_shared(barrier, other);
            k.mbarrier_arrive_remote(target, 1u32);
            k.section("wait", |k| k.mbarrier_wait(barrier, 0u32));
        } else if how != Exchange::WithoutBarrier {
            k.cluster_arrive();
            if how == Exchange::Twice {
                k.section("arrive again", |k| k.cluster_arrive());
            }
            k.cluster_wait();
        }
        let received = k.section("read", |k| k.load_shared::<U32>(own, 1))[0];
        let index = k.mad::<U32>(cta, 32u32, lane);
        let target = k.mad_wide(index, 4u32, y);
        k.store_one(target, received);
        if how != Exchange::WithoutLastBarrier {
            k.section("end", |k| k.cluster_sync());
        }
    })
}

/// Runs the exchange of two clusters on a buffer of their words.
fn exchange(how: Exchange, run: impl FnOnce(&VerifiedKernel, u64, &GlobalMemory)) {
    let mut kernel = exchange_kernel(how);
    if how == Exchange::ByMbarrierOfTheCta {
        let mut narrowed = kernel.into_kernel();
        narrowed.instructions_mut(&mut |instruction| {
            if let Op::MbarrierWait { scope, .. } = &mut instruction.op {
                *scope = FenceScope::Cta;
            }
        });
        kernel = verified(narrowed);
    }
    let mut memory = GlobalMemory::new();
    let y = memory.allocate_uninitialised("y", (CTAS * 128) as usize);
    run(&kernel, y, &memory);
}

fn exchange_fails(how: Exchange, expected: &Expected) {
    exchange(how, |kernel, y, memory| {
        threads(32).on(memory, [y]).grid([CTAS, 1, 1]).fails(kernel, expected);
    });
}

#[test]
fn words_go_to_the_other_cta() {
    let expected: Vec<u32> = (0..CTAS).flat_map(|cta| (0..32).map(move |lane| (cta ^ 1) * 1000 + lane)).collect();
    for how in [Exchange::Right, Exchange::ByMbarrier, Exchange::WithoutLastBarrier] {
        exchange(how, |kernel, y, memory| {
            threads(32).on(memory, [y]).grid([CTAS, 1, 1]).seeds(0..10).passes(kernel);
            assert_eq!(words(&memory.read(y)), expected);
        });
    }
}

/// The first CTA of the first cluster reads what the second, which is late, overwrites.
#[test]
fn missing_cluster_barrier() {
    let kind = FaultKind::UninitialisedMemory { space: Space::Shared };
    exchange_fails(Exchange::WithoutBarrier, &faulty(kind, at("read", "Load", 0).lane(0).address(SHARED)));
}

/// A wait of the CTA's scope acquires nothing of other CTAs.
#[test]
fn wait_of_too_small_a_scope() {
    let race = race(SHARED, at("write", "Store", 0).lane(0), at("read", "Load", 0).cta([1, 0, 0]).lane(0));
    exchange_fails(Exchange::ByMbarrierOfTheCta, &race);
}

#[test]
fn arriving_twice_and_waiting_first() {
    for (how, section, name, problem) in [
        (Exchange::Twice, "arrive again", "ClusterArrive", ClusterBarrierProblem::ArrivesTwice),
        (Exchange::WaitFirst, "wait", "ClusterWait", ClusterBarrierProblem::WaitsBeforeArriving),
    ] {
        exchange(how, |kernel, y, memory| {
            let launched = Launch { grid: [CTAS, 1, 1], arguments: vec![Argument::U64(y)] };
            let found = fault(launch(kernel, &launched, memory, &Options::default()));
            let place = at(section, name, 0).cta([found.location.cta[0], 0, 0]);
            assert_eq!(found, faulty(FaultKind::ClusterBarrier { problem }, place)(kernel));
        });
    }
}

#[test]
fn a_rank_that_the_cluster_does_not_have() {
    let place = at("map", "MapShared", 0).cta([1, 0, 0]).lane(0);
    exchange_fails(Exchange::NoSuchRank, &faulty(FaultKind::NoSuchCta { rank: 2, ctas: 2 }, place));
}

#[test]
fn a_grid_of_part_of_a_cluster() {
    exchange(Exchange::Right, |kernel, y, memory| {
        let launched = Launch { grid: [3, 1, 1], arguments: vec![Argument::U64(y)] };
        let expected = LaunchError::NotWholeClusters { grid: [3, 1, 1], cluster: [2, 1, 1] };
        let error = launch(kernel, &launched, memory, &Options::default());
        assert_eq!(error, Err(SimError::Launch(expected)));
    });
}

/// The first CTA ends; the second reads its shared memory long after.
#[test]
fn the_memory_of_a_cta_that_has_ended() {
    let place = at("read", "Load", 0).cta([0, 1, 0]).lane(0).address(FIRST + SHARED);
    threads(32).grid([1, 2, 1]).check(
        |k, right| {
            k.set_cluster([1, 2, 1]);
            let [lane, own] = slots(k, 4);
            let rank = k.cluster_rank();
            k.store_shared(own, &[lane]);
            k.cluster_sync();
            let reads = k.compare::<U32>(Compare::Eq, rank, 1u32);
            k.if_uniform(reads, |k| {
                delay(k);
                let remote = k.map_shared(own, 0u32);
                k.section("read", |k| k.load_cluster::<U32>(remote, 1));
            });
            if right {
                k.cluster_sync();
            }
        },
        &faulty(FaultKind::EndedCta { cta: [0, 0, 0] }, place),
    );
}

/// Stores to another CTA do not pass the banks of this one.
#[test]
fn stores_to_another_cta_are_counted_apart() {
    let kernel = kernel(32, |k| {
        k.set_cluster([2, 1, 1]);
        let [lane, own] = slots(k, 4);
        let rank = k.cluster_rank();
        let other = k.xor(rank, 1u32);
        let remote = k.map_shared(own, other);
        k.cluster_sync();
        k.store_cluster(remote, &[lane]);
        k.cluster_sync();
        k.load_shared::<U32>(own, 1);
    });
    let counters = threads(32).grid([2, 1, 1]).passes(&kernel).counters;
    assert_eq!((counters.cluster_bytes, counters.shared_stores.requests, counters.shared_loads.requests), (256, 0, 2));
}

/// A write to another CTA out of bounds is reported at the address that was used.
#[test]
fn out_of_bounds_in_another_cta() {
    let wrong = kernel(32, |k| {
        k.set_cluster([2, 1, 1]);
        let [lane, own] = slots(k, 4);
        let remote = k.map_shared(own, 1u32);
        k.section("write", |k| k.store_cluster(remote.plus(4), &[lane]));
        k.cluster_sync();
    });
    let launched = Launch { grid: [2, 1, 1], arguments: Vec::new() };
    let found = fault(launch(&wrong, &launched, &GlobalMemory::new(), &Options::default()));
    let FaultKind::OutOfBounds { space: Space::Cluster, bytes: 4, nearest: Nearest { offset: 128, length: 128, .. } } =
        found.kind
    else {
        panic!("{found}")
    };
    let place = at("write", "Store", 0).cta([found.location.cta[0], 0, 0]).lane(31).address(SECOND + SHARED + 128);
    assert_eq!(found.location, place.of(&wrong));
}

/// One warp of each CTA waits for all; one has ended without arriving, which counts as arrived.
#[test]
fn an_ended_warp_counts_as_arrived() {
    let kernel = kernel(64, |k| {
        k.set_cluster([2, 1, 1]);
        let waits = is_warp(k, 1);
        k.if_uniform(waits, |k| k.cluster_sync());
    });
    threads(64).grid([2, 1, 1]).passes(&kernel);
}

#[test]
fn deadlock_at_the_barrier_of_the_cluster() {
    let wrong = kernel(32, |k| {
        k.set_cluster([2, 1, 1]);
        k.reserve_mbarrier();
        let (base, first, rank) = (k.shared_base(), is_lane(k, 0), k.cluster_rank());
        k.when(first, |k| k.mbarrier_init(base, 1u32));
        k.warp_sync();
        let is_first = k.compare::<U32>(Compare::Eq, rank, 0u32);
        k.if_uniform(is_first, |k| k.section("phase", |k| k.mbarrier_wait(base, 0u32)));
        k.cluster_arrive();
        k.section("wait", |k| k.cluster_wait());
    });
    let state = MbarrierState { address: SHARED as u32, phase: 0, pending: 1, count: 1, bytes: 0 };
    let waiting = [
        (WaitsFor::Mbarrier(state), at("phase", "MbarrierWait", 0).address(SHARED)),
        (WaitsFor::Cluster { arrived: 1, expected: 2 }, at("wait", "ClusterWait", 0).cta([1, 0, 0])),
    ];
    threads(32).grid([2, 1, 1]).fails(&wrong, &deadlock(waiting));
}
