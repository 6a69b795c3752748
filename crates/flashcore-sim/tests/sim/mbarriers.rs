//! `mbarrier`s: phases, arrivals, `expect_tx`, and what goes wrong with them.

use crate::support::{
    Expected, SHARED, at, deadlock, delay, faulty, first_thread, handover, is_lane, is_warp, kernel,
    one_after_the_other, race, threads, words,
};
use flashcore_ir::types::{Pred, U32, U64};
use flashcore_ir::{Builder, Compare, Reg, VerifiedKernel};
use flashcore_sim::{FaultKind, GlobalMemory, MbarrierProblem, MbarrierState, WaitsFor};

fn state(address: u64, phase: u32, [pending, count]: [u32; 2], bytes: i64) -> MbarrierState {
    MbarrierState { address: address as u32, phase, pending, count, bytes }
}

/// Initialises a barrier of `count` arrivals at the start of shared memory and synchronises the CTA.
fn with_barrier(k: &mut Builder, count: u32) -> Reg<U32> {
    k.reserve_mbarrier();
    let base = k.shared_base();
    let first = first_thread(k);
    k.section("init", |k| k.when(first, |k| k.mbarrier_init(base, count)));
    k.cta_sync();
    base
}

/// A pipeline of one stage that passes numbers from warp 0 to warp 1, and the ways to get it wrong.
#[derive(Clone, Copy, PartialEq)]
enum Ring {
    Right,
    ElectedArrival,
    ElectedArrivalWithoutWarpSync,
    WithoutFull,
    WithoutEmpty,
    WrongParity,
    ByTesting,
}

const ROUNDS: u32 = 6;

/// Each lane of warp 0 writes its slot; each lane of warp 1 reads that of its mirror image.
fn ring_kernel(how: Ring) -> VerifiedKernel {
    kernel(64, |k| {
        let y = k.parameter::<U64>("y");
        let slots = k.reserve_shared(128, 128);
        let [full, empty] = [k.reserve_mbarrier(), k.reserve_mbarrier()];
        let base = k.shared_base();
        let [slots, full, empty] = [slots, full, empty].map(|offset| k.add(base, offset));
        let first = first_thread(k);
        let elected = matches!(how, Ring::ElectedArrival | Ring::ElectedArrivalWithoutWarpSync);
        k.when(first, |k| {
            k.mbarrier_init(full, if elected { 1u32 } else { 32u32 });
            k.mbarrier_init(empty, 32u32);
        });
        k.cta_sync();
        let lane = k.lane();
        let own = k.mad::<U32>(lane, 4u32, slots);
        let mirror = k.xor(lane, 31u32);
        let other = k.mad::<U32>(mirror, 4u32, slots);
        let (leader, produces) = (is_lane(k, 0), is_warp(k, 0));
        k.if_else_uniform(
            produces,
            |k| {
                k.for_uniform(0u32, ROUNDS, 1u32, |k, round| {
                    let parity = k.and(round, 1u32);
                    let before = k.xor(parity, 1u32);
                    if how != Ring::WithoutEmpty {
                        k.section("empty", |k| k.mbarrier_wait(empty, before));
                    }
                    let value = k.mad::<U32>(round, 100u32, lane);
                    k.section("write", |k| k.store_shared(own, &[value]));
                    if how == Ring::ElectedArrival {
                        k.warp_sync();
                    }
                    if elected {
                        k.when(leader, |k| k.mbarrier_arrive(full, 1u32));
                    } else if how != Ring::WithoutFull {
                        k.mbarrier_arrive(full, 1u32);
                    }
                });
            },
            |k| {
                delay(k);
                k.for_uniform(0u32, ROUNDS, 1u32, |k, round| {
                    let parity = k.and(round, 1u32);
                    let parity = if how == Ring::WrongParity { k.xor(parity, 1u32) } else { parity };
                    match how {
                        Ring::WithoutFull => {}
                        Ring::ByTesting => {
                            let complete = k.register::<Pred>();
                            let never = k.compare::<U32>(Compare::Ne, round, round);
                            k.set(complete, never);
                            k.while_lanes(
                                |k| k.not(complete),
                                |k| {
                                    let asked = k.mbarrier_test(full, parity);
                                    k.set(complete, asked);
                                },
                            );
                        }
                        _ => k.section("full", |k| k.mbarrier_wait(full, parity)),
                    }
                    let value = k.section("read", |k| k.load_shared::<U32>(other, 1))[0];
                    let index = k.mad::<U32>(round, 32u32, lane);
                    let target = k.mad_wide(index, 4u32, y);
                    k.store_one(target, value);
                    k.mbarrier_arrive(empty, 1u32);
                });
            },
        );
    })
}

/// Runs a ring under 20 seeds and checks what it has passed on. Returns the number of waits.
fn ring_passes(how: Ring) -> u64 {
    let expected: Vec<u32> = (0..ROUNDS).flat_map(|round| (0..32).map(move |lane| 100 * round + (31 - lane))).collect();
    let kernel = ring_kernel(how);
    let waits = (0..20).map(|seed| {
        let mut memory = GlobalMemory::new();
        let y = memory.allocate_uninitialised("y", (ROUNDS * 128) as usize);
        let report = threads(64).on(&memory, [y]).seeds(seed..seed + 1).passes(&kernel);
        assert_eq!(words(&memory.read(y)), expected);
        report.counters.mbarrier_waits
    });
    waits.max().unwrap_or(0)
}

/// Waits are counted once, however often a warp looks.
#[test]
fn a_ring_passes_values() {
    assert_eq!(ring_passes(Ring::Right), u64::from(2 * ROUNDS));
    ring_passes(Ring::ElectedArrival);
    ring_passes(Ring::ByTesting);
}

fn ring_fails(how: Ring, expected: &Expected) {
    let mut memory = GlobalMemory::new();
    let y = memory.allocate_uninitialised("y", (ROUNDS * 128) as usize);
    threads(64).on(&memory, [y]).fails(&ring_kernel(how), expected);
}

/// The read of the first lane, whose slot the last one wrote.
fn race_for_a_slot() -> Expected {
    race(SHARED + 4 * 31, at("write", "Store", 0).lane(31), at("read", "Load", 1).lane(0))
}

/// Without waiting for the barrier that says the slot is full, nothing orders the read after the write. Nor does an arrival
/// of the first lane release the writes of the others, unless the warp synchronises.
#[test]
fn a_ring_without_order() {
    ring_fails(Ring::WithoutFull, &race_for_a_slot());
    ring_fails(Ring::ElectedArrivalWithoutWarpSync, &race_for_a_slot());
}

/// The barriers of a pipeline: after its stages.
const FULL: u64 = SHARED + 128;
const EMPTY: u64 = FULL + 8;

/// A wait for a phase at which none of 32 has arrived.
fn waiting(section: &'static str, warp: u32, address: u64, phase: u32) -> (WaitsFor, crate::support::Place) {
    let place = at(section, "MbarrierWait", warp).address(address);
    (WaitsFor::Mbarrier(state(address, phase, [32, 32], 0)), place)
}

/// When the late consumer waits for the phase of parity 1, it is the first that is complete.
#[test]
fn a_ring_with_the_wrong_parity() {
    ring_fails(Ring::WrongParity, &deadlock([waiting("empty", 0, EMPTY, 0), waiting("full", 1, FULL, 1)]));
}

/// The producer runs away: after an even number of rounds the late consumer takes the ring for empty.
#[test]
fn a_ring_without_a_wait_for_empty() {
    ring_fails(Ring::WithoutEmpty, &deadlock([waiting("full", 1, FULL, ROUNDS)]));
}

/// The wait of one lane holds for the others only after a `warp_sync`.
#[test]
fn a_wait_of_one_lane_is_its_own() {
    threads(64).check(
        |k, right| {
            let barrier = with_barrier(k, 32);
            let data = k.reserve_shared(128, 128);
            let (lane, leader) = (k.lane(), is_lane(k, 0));
            let own = k.mad::<U32>(lane, 4u32, barrier);
            let own = k.add(own, data);
            one_after_the_other(
                k,
                |k| {
                    k.section("write", |k| k.store_shared(own, &[lane]));
                    k.mbarrier_arrive(barrier, 1u32);
                },
                |k| {
                    k.when(leader, |k| k.mbarrier_wait(barrier, 0u32));
                    if right {
                        k.warp_sync();
                    }
                    k.section("read", |k| k.load_shared::<U32>(own, 1));
                },
            );
        },
        &race(SHARED + 128 + 4, at("write", "Store", 0).lane(1), at("read", "Load", 1).lane(1)),
    );
}

/// A mistake in the use of the barrier at the start of shared memory, in section "wrong" of a CTA of one warp.
fn check(
    write: impl Fn(&mut Builder, bool),
    (name, lane): (&'static str, u32),
    problem: MbarrierProblem,
    before: Option<(u32, [u32; 2], i64)>,
) {
    let state = before.map(|(phase, arrivals, bytes)| state(SHARED, phase, arrivals, bytes));
    let place = at("wrong", name, 0).lane(lane).address(SHARED);
    threads(32).check(write, &faulty(FaultKind::Mbarrier { problem, state }, place));
}

#[test]
fn use_before_init() {
    check(
        |k, right| {
            let barrier = if right {
                with_barrier(k, 32)
            } else {
                k.reserve_mbarrier();
                k.shared_base()
            };
            k.section("wrong", |k| k.mbarrier_arrive(barrier, 1u32));
        },
        ("MbarrierArrive", 0),
        MbarrierProblem::NotInitialised,
        None,
    );
}

/// Initialised by another thread that nothing orders before.
#[test]
fn use_not_ordered_after_init() {
    threads(32).check(
        |k, right| {
            k.reserve_mbarrier();
            let base = k.shared_base();
            let first = first_thread(k);
            k.section("init", |k| k.when(first, |k| k.mbarrier_init(base, 32u32)));
            if right {
                k.warp_sync();
            }
            k.section("arrive", |k| k.mbarrier_arrive(base, 1u32));
        },
        &race(SHARED, at("init", "MbarrierInit", 0).lane(0), at("arrive", "MbarrierArrive", 0).lane(1)),
    );
}

#[test]
fn more_arrivals_than_the_count() {
    check(
        |k, right| {
            let barrier = with_barrier(k, 64);
            k.section("wrong", |k| k.mbarrier_arrive(barrier, if right { 2u32 } else { 3 }));
        },
        ("MbarrierArrive", 21),
        MbarrierProblem::OverCount { arrivals: 3 },
        Some((0, [1, 64], 0)),
    );
}

#[test]
fn more_bytes_than_it_counts() {
    let most = (1u32 << 20) - 1;
    check(
        |k, right| {
            let barrier = with_barrier(k, 1);
            let first = first_thread(k);
            k.when(first, |k| {
                k.mbarrier_expect(barrier, most - 16);
                k.section("wrong", |k| k.mbarrier_expect(barrier, if right { 16u32 } else { 17 }));
            });
        },
        ("MbarrierExpect", 0),
        MbarrierProblem::Bytes { bytes: i64::from(most) + 1 },
        Some((0, [1, 1], i64::from(most) - 16)),
    );
}

#[test]
fn initialised_twice() {
    check(
        |k, right| {
            let barrier = with_barrier(k, 32);
            k.mbarrier_arrive(barrier, 1u32);
            k.warp_sync();
            let first = first_thread(k);
            k.when(first, |k| {
                if right {
                    k.mbarrier_invalidate(barrier);
                }
                k.section("wrong", |k| k.mbarrier_init(barrier, 1u32));
                k.mbarrier_arrive(barrier, 1u32);
            });
        },
        ("MbarrierInit", 0),
        MbarrierProblem::Reinitialised,
        Some((1, [32, 32], 0)),
    );
}

#[test]
fn ordinary_write_to_a_barrier() {
    check(
        |k, right| {
            let barrier = with_barrier(k, 32);
            let first = first_thread(k);
            k.when(first, |k| {
                if right {
                    k.mbarrier_invalidate(barrier);
                }
                k.section("wrong", |k| k.store_shared(barrier, &[barrier]));
            });
        },
        ("Store", 0),
        MbarrierProblem::Touched,
        Some((0, [32, 32], 0)),
    );
}

#[test]
fn a_parity_that_is_no_bit() {
    check(
        |k, right| {
            let barrier = with_barrier(k, 1);
            let parity = k.copy(if right { 1u32 } else { 3 });
            k.section("wrong", |k| k.mbarrier_wait(barrier, parity));
        },
        ("MbarrierWait", 0),
        MbarrierProblem::Parity { parity: 3 },
        None,
    );
}

/// The report of a phase that cannot complete names the barrier and its counts.
#[test]
fn deadlock_at_a_barrier() {
    let write = |k: &mut Builder, right: bool| {
        let barrier = with_barrier(k, 64);
        k.section("arrive", |k| k.mbarrier_arrive(barrier, 1u32));
        let again = is_warp(k, 1);
        k.if_uniform(again, |k| {
            k.section("first", |k| k.mbarrier_wait(barrier, 0u32));
            k.mbarrier_arrive(barrier, if right { 2u32 } else { 1 });
            k.section("second", |k| k.mbarrier_wait(barrier, 1u32));
        });
    };
    let waits_for = WaitsFor::Mbarrier(state(SHARED, 1, [32, 64], 0));
    let expected = deadlock([(waits_for, at("second", "MbarrierWait", 1).address(SHARED))]);
    threads(64).check(write, &expected);
    assert_eq!(
        expected(&kernel(64, |k| write(k, false))).kind.to_string(),
        "deadlock, no warp can proceed: warp 1 at mbarrier 0x400 (phase 1, 32 of 64 arrived, 0 bytes in flight); some warp \
         has exited or waits elsewhere"
    );
}

/// A phase does not complete before the bytes of its `expect_tx` have come.
#[test]
fn deadlock_without_the_expected_bytes() {
    let wrong = kernel(32, |k| {
        let barrier = with_barrier(k, 1);
        let first = first_thread(k);
        k.when(first, |k| k.mbarrier_arrive_expect(barrier, 64u32));
        k.section("wait", |k| k.mbarrier_wait(barrier, 0u32));
    });
    let waits_for = WaitsFor::Mbarrier(state(SHARED, 0, [0, 1], 64));
    threads(32).fails(&wrong, &deadlock([(waits_for, at("wait", "MbarrierWait", 0).address(SHARED))]));
}

#[test]
fn invalidated_while_others_use_it() {
    threads(64).check(
        |k, right| {
            let barrier = with_barrier(k, 32);
            let leader = is_lane(k, 0);
            handover(
                k,
                right,
                |k| k.section("arrive", |k| k.mbarrier_arrive(barrier, 1u32)),
                |k| k.section("end", |k| k.when(leader, |k| k.mbarrier_invalidate(barrier))),
            );
        },
        &race(SHARED, at("arrive", "MbarrierArrive", 0), at("end", "MbarrierInvalidate", 1).lane(0)),
    );
}
