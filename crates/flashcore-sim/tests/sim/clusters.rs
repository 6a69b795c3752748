//! Clusters: CTAs that reach each other's shared memory, and what goes wrong between them.

use crate::support::{At, SHARED, fault, kernel, location, words};
use flashcore_ir::types::{U32, U64};
use flashcore_ir::{Builder, Compare, Space, SpecialRegister, VerifiedKernel};
use flashcore_sim::{
    AccessKind, Argument, ClusterBarrierProblem, Fault, FaultKind, GlobalMemory, Launch, LaunchError, Options,
    SimError, WaitingWarp, WaitsFor, launch,
};

/// Addresses of the shared memory of CTAs, as other CTAs of the cluster know them.
const SECOND: u64 = 2 << 24;
const FIRST: u64 = 1 << 24;

fn run_grid(
    kernel: &VerifiedKernel,
    grid: [u32; 3],
    arguments: Vec<Argument>,
    memory: &GlobalMemory,
    seed: u64,
) -> Result<flashcore_sim::Report, SimError> {
    launch(kernel, &Launch { grid, arguments }, memory, &Options { seed, ..Options::default() })
}

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
        k.if_uniform(is_second, crate::support::delay);
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

fn run_exchange(how: Exchange, seed: u64) -> (VerifiedKernel, Result<Vec<u32>, SimError>) {
    let mut kernel = exchange_kernel(how);
    if how == Exchange::ByMbarrierOfTheCta {
        let mut narrowed = kernel.into_kernel();
        narrowed.instructions_mut(&mut |instruction| {
            if let flashcore_ir::Op::MbarrierWait { scope, .. } = &mut instruction.op {
                *scope = flashcore_ir::FenceScope::Cta;
            }
        });
        kernel = crate::support::verified(narrowed);
    }
    let mut memory = GlobalMemory::new();
    let y = memory.allocate_uninitialised("y", (CTAS * 128) as usize);
    let result = run_grid(&kernel, [CTAS, 1, 1], vec![Argument::U64(y)], &memory, seed);
    (kernel, result.map(|_| words(&memory.read(y))))
}

#[test]
fn words_go_to_the_other_cta() {
    let expected: Vec<u32> = (0..CTAS).flat_map(|cta| (0..32).map(move |lane| (cta ^ 1) * 1000 + lane)).collect();
    for how in [Exchange::Right, Exchange::ByMbarrier, Exchange::WithoutLastBarrier] {
        for seed in 0..10 {
            assert_eq!(run_exchange(how, seed).1, Ok(expected.clone()));
        }
    }
}

/// The first CTA of the first cluster reads what the second, which is late, overwrites.
#[test]
fn missing_cluster_barrier() {
    let (kernel, result) = run_exchange(Exchange::WithoutBarrier, 0);
    let expected = Fault {
        kind: FaultKind::UninitialisedMemory { space: Space::Shared },
        location: location(&kernel, "read", "Load", 0).lane(0).address(SHARED),
    };
    assert_eq!(fault(result), expected);
}

/// A wait of the CTA's scope acquires nothing of other CTAs.
#[test]
fn wait_of_too_small_a_scope() {
    let (kernel, result) = run_exchange(Exchange::ByMbarrierOfTheCta, 0);
    let expected = Fault {
        kind: FaultKind::Race {
            space: Space::Shared,
            access: AccessKind::Read,
            earlier_access: AccessKind::Write,
            earlier: Box::new(location(&kernel, "write", "Store", 0).lane(0).address(SHARED)),
        },
        location: location(&kernel, "read", "Load", 0).cta(1).lane(0).address(SHARED),
    };
    assert_eq!(fault(result), expected);
}

#[test]
fn arriving_twice_and_waiting_first() {
    for (how, section, name, problem) in [
        (Exchange::Twice, "arrive again", "ClusterArrive", ClusterBarrierProblem::ArrivesTwice),
        (Exchange::WaitFirst, "wait", "ClusterWait", ClusterBarrierProblem::WaitsBeforeArriving),
    ] {
        let (kernel, result) = run_exchange(how, 0);
        let Fault { kind, location: at } = fault(result);
        assert_eq!(kind, FaultKind::ClusterBarrier { problem });
        assert_eq!(at, location(&kernel, section, name, 0).cta(at.cta[0]));
    }
}

#[test]
fn a_rank_that_the_cluster_does_not_have() {
    let (kernel, result) = run_exchange(Exchange::NoSuchRank, 0);
    let expected = Fault {
        kind: FaultKind::NoSuchCta { rank: 2, ctas: 2 },
        location: location(&kernel, "map", "MapShared", 0).cta(1).lane(0),
    };
    assert_eq!(fault(result), expected);
}

/// The first CTA ends; the second reads its shared memory long after.
#[test]
fn the_memory_of_a_cta_that_has_ended() {
    let write = |together: bool| {
        kernel(32, |k| {
            k.set_cluster([1, 2, 1]);
            k.reserve_shared(128, 128);
            let (base, lane, rank) = (k.shared_base(), k.lane(), k.cluster_rank());
            let own = k.mad::<U32>(lane, 4u32, base);
            k.store_shared(own, &[lane]);
            k.cluster_sync();
            let reads = k.compare::<U32>(Compare::Eq, rank, 1u32);
            k.if_uniform(reads, |k| {
                crate::support::delay(k);
                let remote = k.map_shared(own, 0u32);
                k.section("read", |k| k.load_cluster::<U32>(remote, 1));
            });
            if together {
                k.cluster_sync();
            }
        })
    };
    let memory = GlobalMemory::new();
    let wrong = write(false);
    let mut at = location(&wrong, "read", "Load", 0).lane(0).address(FIRST + SHARED);
    at.cta = [0, 1, 0];
    let expected = Fault { kind: FaultKind::EndedCta { cta: [0, 0, 0] }, location: at };
    assert_eq!(fault(run_grid(&wrong, [1, 2, 1], Vec::new(), &memory, 0)), expected);
    assert!(run_grid(&write(true), [1, 2, 1], Vec::new(), &memory, 0).is_ok());
}

/// Stores to another CTA do not pass the banks of this one.
#[test]
fn stores_to_another_cta_are_counted_apart() {
    let kernel = kernel(32, |k| {
        k.set_cluster([2, 1, 1]);
        k.reserve_shared(128, 128);
        let (base, lane) = (k.shared_base(), k.lane());
        let own = k.mad::<U32>(lane, 4u32, base);
        let rank = k.cluster_rank();
        let other = k.xor(rank, 1u32);
        let remote = k.map_shared(own, other);
        k.cluster_sync();
        k.store_cluster(remote, &[lane]);
        k.cluster_sync();
        k.load_shared::<U32>(own, 1);
    });
    let counters = run_grid(&kernel, [2, 1, 1], Vec::new(), &GlobalMemory::new(), 0).unwrap().counters;
    assert_eq!((counters.cluster_bytes, counters.shared_stores.requests, counters.shared_loads.requests), (256, 0, 2));
}

/// A write to another CTA out of bounds is reported at the address that was used.
#[test]
fn out_of_bounds_in_another_cta() {
    let wrong = kernel(32, |k| {
        k.set_cluster([2, 1, 1]);
        k.reserve_shared(128, 128);
        let (base, lane) = (k.shared_base(), k.lane());
        let own = k.mad::<U32>(lane, 4u32, base);
        let remote = k.map_shared(own, 1u32);
        k.section("write", |k| k.store_cluster(remote.plus(4), &[lane]));
        k.cluster_sync();
    });
    let Fault { kind, location: at } = fault(run_grid(&wrong, [2, 1, 1], Vec::new(), &GlobalMemory::new(), 0));
    let FaultKind::OutOfBounds { space: Space::Cluster, bytes: 4, nearest } = kind else { panic!("{kind}") };
    assert_eq!((nearest.offset, nearest.length), (128, 128));
    assert_eq!(at, location(&wrong, "write", "Store", 0).cta(at.cta[0]).lane(31).address(SECOND + SHARED + 128));
}

#[test]
fn special_registers() {
    let kernel = kernel(1, |k: &mut Builder| {
        k.set_cluster([2, 1, 2]);
        let y = k.parameter::<U64>("y");
        let [x, z] = [SpecialRegister::CtaX, SpecialRegister::CtaZ].map(|special| k.special(special));
        let cta = k.mad::<U32>(z, 4u32, x);
        let y = k.mad_wide(cta, 32u32, y);
        let registers = [
            SpecialRegister::ClusterCtaX,
            SpecialRegister::ClusterCtaY,
            SpecialRegister::ClusterCtaZ,
            SpecialRegister::ClusterX,
            SpecialRegister::ClusterY,
            SpecialRegister::ClusterZ,
            SpecialRegister::ClusterRank,
            SpecialRegister::ClusterSize,
        ];
        for (index, special) in registers.into_iter().enumerate() {
            let value = k.special(special);
            k.store_one(flashcore_ir::GlobalAddress::from(y).plus(4 * index as i32), value);
        }
    });
    let mut memory = GlobalMemory::new();
    let y = memory.allocate_uninitialised("y", 8 * 32);
    assert!(run_grid(&kernel, [4, 1, 2], vec![Argument::U64(y)], &memory, 0).is_ok());
    let expected: Vec<u32> = [0, 1]
        .into_iter()
        .flat_map(|z| [0u32, 1, 2, 3].map(|x| [x % 2, 0, z, 2, 1, 2, x % 2 + 2 * z, 4]))
        .flatten()
        .collect();
    assert_eq!(words(&memory.read(y)), expected);
}

#[test]
fn a_grid_of_part_of_a_cluster() {
    let kernel = exchange_kernel(Exchange::Right);
    let mut memory = GlobalMemory::new();
    let y = memory.allocate_uninitialised("y", 128);
    let error = run_grid(&kernel, [3, 1, 1], vec![Argument::U64(y)], &memory, 0);
    let expected = LaunchError::NotWholeClusters { grid: [3, 1, 1], cluster: [2, 1, 1] };
    assert_eq!(error, Err(SimError::Launch(expected)));
}

/// One warp of each CTA waits for all; one has ended without arriving, which counts as arrived.
#[test]
fn an_ended_warp_counts_as_arrived() {
    let kernel = kernel(64, |k| {
        k.set_cluster([2, 1, 1]);
        let warp = k.warp();
        let waits = k.compare::<U32>(Compare::Eq, warp, 1u32);
        k.if_uniform(waits, |k| k.cluster_sync());
    });
    assert!(run_grid(&kernel, [2, 1, 1], Vec::new(), &GlobalMemory::new(), 0).is_ok());
}

#[test]
fn deadlock_at_the_barrier_of_the_cluster() {
    let wrong = kernel(32, |k| {
        k.set_cluster([2, 1, 1]);
        k.reserve_mbarrier();
        let (base, lane, rank) = (k.shared_base(), k.lane(), k.cluster_rank());
        let first = k.compare::<U32>(Compare::Eq, lane, 0u32);
        k.when(first, |k| k.mbarrier_init(base, 1u32));
        k.warp_sync();
        let is_first = k.compare::<U32>(Compare::Eq, rank, 0u32);
        k.if_uniform(is_first, |k| k.section("phase", |k| k.mbarrier_wait(base, 0u32)));
        k.cluster_arrive();
        k.section("wait", |k| k.cluster_wait());
    });
    let state = flashcore_sim::MbarrierState { address: SHARED as u32, phase: 0, pending: 1, count: 1, bytes: 0 };
    let at = location(&wrong, "phase", "MbarrierWait", 0).address(SHARED);
    let waiting = vec![
        WaitingWarp { waits_for: WaitsFor::Mbarrier(state), location: at.clone() },
        WaitingWarp {
            waits_for: WaitsFor::Cluster { arrived: 1, expected: 2 },
            location: location(&wrong, "wait", "ClusterWait", 0).cta(1),
        },
    ];
    let result = run_grid(&wrong, [2, 1, 1], Vec::new(), &GlobalMemory::new(), 0);
    assert_eq!(fault(result), Fault { kind: FaultKind::Deadlock { waiting }, location: at });
}
