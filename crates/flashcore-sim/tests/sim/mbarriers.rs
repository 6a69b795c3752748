//! `mbarrier`s: phases, arrivals, `expect_tx`, and what goes wrong with them.

use crate::support::{At, SHARED, fault, kernel, location, one_after_the_other, run, run_seeded, words};
use flashcore_ir::types::{Pred, U32, U64};
use flashcore_ir::{Builder, Compare, Reg, Space, VerifiedKernel};
use flashcore_sim::{
    AccessKind, Argument, Fault, FaultKind, GlobalMemory, Location, MbarrierProblem, MbarrierState, SimError,
    WaitingWarp, WaitsFor,
};

/// The barrier of most kernels here lies at the start of shared memory.
const AT: u32 = SHARED as u32;

fn state(phase: u32, pending: u32, count: u32, bytes: i64) -> MbarrierState {
    MbarrierState { address: AT, phase, pending, count, bytes }
}

/// Initialises a barrier of `count` arrivals in the first thread and synchronises the CTA.
fn with_barrier(k: &mut Builder, count: u32) -> Reg<U32> {
    k.reserve_mbarrier();
    let base = k.shared_base();
    let first = first_thread(k);
    k.section("init", |k| k.when(first, |k| k.mbarrier_init(base, count)));
    k.cta_sync();
    base
}

fn first_thread(k: &mut Builder) -> Reg<Pred> {
    let thread = k.special(flashcore_ir::SpecialRegister::ThreadX);
    k.compare::<U32>(Compare::Eq, thread, 0u32)
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
        let (warp, leader) = (k.warp(), k.compare::<U32>(Compare::Eq, lane, 0u32));
        let produces = k.compare::<U32>(Compare::Eq, warp, 0u32);
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
                crate::support::delay(k);
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

fn run_ring(how: Ring, seed: u64) -> (VerifiedKernel, Result<Vec<u32>, SimError>) {
    let kernel = ring_kernel(how);
    let mut memory = GlobalMemory::new();
    let y = memory.allocate_uninitialised("y", (ROUNDS * 128) as usize);
    let result = run_seeded(&kernel, &[Argument::U64(y)], &memory, seed).map(|_| words(&memory.read(y)));
    (kernel, result)
}

#[test]
fn a_ring_passes_values() {
    let expected: Vec<u32> = (0..ROUNDS).flat_map(|round| (0..32).map(move |lane| 100 * round + (31 - lane))).collect();
    for how in [Ring::Right, Ring::ElectedArrival, Ring::ByTesting] {
        for seed in 0..20 {
            assert_eq!(run_ring(how, seed).1, Ok(expected.clone()));
        }
    }
}

fn race(kernel: &VerifiedKernel, [earlier, later]: [(&str, &str, u32, u32); 2], address: u64) -> Fault {
    let kind = |name: &str| if name == "Store" { AccessKind::Write } else { AccessKind::Read };
    let at = |(section, name, warp, lane): (&str, &str, u32, u32)| {
        location(kernel, section, name, warp).lane(lane).address(address)
    };
    Fault {
        kind: FaultKind::Race {
            space: Space::Shared,
            access: kind(later.1),
            earlier_access: kind(earlier.1),
            earlier: Box::new(at(earlier)),
        },
        location: at(later),
    }
}

/// Without waiting for the barrier that says the slot is full, nothing orders the read after the write.
#[test]
fn a_ring_without_a_wait_for_full() {
    let (kernel, result) = run_ring(Ring::WithoutFull, 0);
    let slot = SHARED + 4 * 31;
    assert_eq!(fault(result), race(&kernel, [("write", "Store", 0, 31), ("read", "Load", 1, 0)], slot));
}

/// The barriers of a pipeline: after its stages.
const FULL: u64 = SHARED + 128;
const EMPTY: u64 = FULL + 8;

fn waiting(kernel: &VerifiedKernel, section: &str, warp: u32, address: u64, phase: u32) -> WaitingWarp {
    let state = MbarrierState { address: address as u32, phase, pending: 32, count: 32, bytes: 0 };
    let location = location(kernel, section, "MbarrierWait", warp).address(address);
    WaitingWarp { waits_for: WaitsFor::Mbarrier(state), location }
}

/// When the late consumer waits for the phase of parity 1, it is the first that is complete.
#[test]
fn a_ring_with_the_wrong_parity() {
    let (kernel, result) = run_ring(Ring::WrongParity, 0);
    let waiting = vec![waiting(&kernel, "empty", 0, EMPTY, 0), waiting(&kernel, "full", 1, FULL, 1)];
    let location = waiting[0].location.clone();
    assert_eq!(fault(result), Fault { kind: FaultKind::Deadlock { waiting }, location });
}

/// The producer runs away: after an even number of rounds the late consumer takes the ring for empty.
#[test]
fn a_ring_without_a_wait_for_empty() {
    let (kernel, result) = run_ring(Ring::WithoutEmpty, 0);
    let waiting = vec![waiting(&kernel, "full", 1, FULL, ROUNDS)];
    let location = waiting[0].location.clone();
    assert_eq!(fault(result), Fault { kind: FaultKind::Deadlock { waiting }, location });
}

/// An arrival of the first lane does not release the writes of the others, unless the warp synchronises.
#[test]
fn an_elected_arrival_without_warp_sync() {
    let (kernel, result) = run_ring(Ring::ElectedArrivalWithoutWarpSync, 0);
    let slot = SHARED + 4 * 31;
    assert_eq!(fault(result), race(&kernel, [("write", "Store", 0, 31), ("read", "Load", 1, 0)], slot));
}

/// The wait of one lane holds for the others only after a `warp_sync`.
#[test]
fn a_wait_of_one_lane_is_its_own() {
    let write = |synchronised: bool| {
        kernel(64, |k| {
            let barrier = with_barrier(k, 32);
            let data = k.reserve_shared(128, 128);
            let lane = k.lane();
            let own = k.mad::<U32>(lane, 4u32, barrier);
            let own = k.add(own, data);
            let leader = k.compare::<U32>(Compare::Eq, lane, 0u32);
            one_after_the_other(
                k,
                |k| {
                    k.section("write", |k| k.store_shared(own, &[lane]));
                    k.mbarrier_arrive(barrier, 1u32);
                },
                |k| {
                    k.when(leader, |k| k.mbarrier_wait(barrier, 0u32));
                    if synchronised {
                        k.warp_sync();
                    }
                    k.section("read", |k| k.load_shared::<U32>(own, 1));
                },
            );
        })
    };
    let wrong = write(false);
    let slot = SHARED + 128 + 4;
    let expected = race(&wrong, [("write", "Store", 0, 1), ("read", "Load", 1, 1)], slot);
    assert_eq!(fault(run(&wrong, &[], &GlobalMemory::new())), expected);
    assert!(run(&write(true), &[], &GlobalMemory::new()).is_ok());
}

/// A mistake in the use of one barrier, by a CTA of one warp.
fn check(
    write: impl Fn(&mut Builder, bool),
    name: &str,
    lane: u32,
    problem: MbarrierProblem,
    state: Option<MbarrierState>,
) {
    let written = |wrong: bool| kernel(32, |k| write(k, wrong));
    let wrong = written(true);
    let expected = Fault {
        kind: FaultKind::Mbarrier { problem, state },
        location: location(&wrong, "wrong", name, 0).lane(lane).address(SHARED),
    };
    assert_eq!(fault(run(&wrong, &[], &GlobalMemory::new())), expected);
    let right = run(&written(false), &[], &GlobalMemory::new());
    assert!(right.is_ok(), "{right:?}");
}

#[test]
fn use_before_init() {
    check(
        |k, wrong| {
            let barrier = if wrong {
                k.reserve_mbarrier();
                k.shared_base()
            } else {
                with_barrier(k, 32)
            };
            k.section("wrong", |k| k.mbarrier_arrive(barrier, 1u32));
        },
        "MbarrierArrive",
        0,
        MbarrierProblem::NotInitialised,
        None,
    );
}

/// Initialised by another thread that nothing orders before.
#[test]
fn use_not_ordered_after_init() {
    let write = |synchronised: bool| {
        kernel(32, |k| {
            k.reserve_mbarrier();
            let base = k.shared_base();
            let first = first_thread(k);
            k.section("init", |k| k.when(first, |k| k.mbarrier_init(base, 32u32)));
            if synchronised {
                k.warp_sync();
            }
            k.section("arrive", |k| k.mbarrier_arrive(base, 1u32));
        })
    };
    let wrong = write(false);
    let expected = Fault {
        kind: FaultKind::Race {
            space: Space::Shared,
            access: AccessKind::Atomic,
            earlier_access: AccessKind::Write,
            earlier: Box::new(location(&wrong, "init", "MbarrierInit", 0).lane(0).address(SHARED)),
        },
        location: location(&wrong, "arrive", "MbarrierArrive", 0).lane(1).address(SHARED),
    };
    assert_eq!(fault(run(&wrong, &[], &GlobalMemory::new())), expected);
    assert!(run(&write(true), &[], &GlobalMemory::new()).is_ok());
}

#[test]
fn more_arrivals_than_the_count() {
    check(
        |k, wrong| {
            let barrier = with_barrier(k, 64);
            k.section("wrong", |k| k.mbarrier_arrive(barrier, if wrong { 3u32 } else { 2u32 }));
        },
        "MbarrierArrive",
        21,
        MbarrierProblem::OverCount { arrivals: 3 },
        Some(state(0, 1, 64, 0)),
    );
}

#[test]
fn more_bytes_than_it_counts() {
    let most = (1u32 << 20) - 1;
    check(
        |k, wrong| {
            let barrier = with_barrier(k, 1);
            let first = first_thread(k);
            k.when(first, |k| {
                k.mbarrier_expect(barrier, most - 16);
                k.section("wrong", |k| k.mbarrier_expect(barrier, if wrong { 17u32 } else { 16u32 }));
            });
        },
        "MbarrierExpect",
        0,
        MbarrierProblem::Bytes { bytes: i64::from(most) + 1 },
        Some(state(0, 1, 1, i64::from(most) - 16)),
    );
}

#[test]
fn initialised_twice() {
    check(
        |k, wrong| {
            let barrier = with_barrier(k, 32);
            k.mbarrier_arrive(barrier, 1u32);
            k.warp_sync();
            let first = first_thread(k);
            k.when(first, |k| {
                if !wrong {
                    k.mbarrier_invalidate(barrier);
                }
                k.section("wrong", |k| k.mbarrier_init(barrier, 1u32));
                k.mbarrier_arrive(barrier, 1u32);
            });
        },
        "MbarrierInit",
        0,
        MbarrierProblem::Reinitialised,
        Some(state(1, 32, 32, 0)),
    );
}

#[test]
fn ordinary_write_to_a_barrier() {
    check(
        |k, wrong| {
            let barrier = with_barrier(k, 32);
            let first = first_thread(k);
            k.when(first, |k| {
                if !wrong {
                    k.mbarrier_invalidate(barrier);
                }
                k.section("wrong", |k| k.store_shared(barrier, &[barrier]));
            });
        },
        "Store",
        0,
        MbarrierProblem::Touched,
        Some(state(0, 32, 32, 0)),
    );
}

#[test]
fn a_parity_that_is_no_bit() {
    check(
        |k, wrong| {
            let barrier = with_barrier(k, 1);
            let parity = k.copy(if wrong { 3u32 } else { 1u32 });
            k.section("wrong", |k| k.mbarrier_wait(barrier, parity));
        },
        "MbarrierWait",
        0,
        MbarrierProblem::Parity { parity: 3 },
        None,
    );
}

/// The report of a phase that cannot complete names the barrier and its counts.
#[test]
fn deadlock_at_a_barrier() {
    let write = |arrivals: u32| {
        kernel(64, |k| {
            let barrier = with_barrier(k, 64);
            k.section("arrive", |k| k.mbarrier_arrive(barrier, 1u32));
            let warp = k.warp();
            let again = k.compare::<U32>(Compare::Eq, warp, 1u32);
            k.if_uniform(again, |k| {
                k.section("first", |k| k.mbarrier_wait(barrier, 0u32));
                k.mbarrier_arrive(barrier, arrivals);
                k.section("second", |k| k.mbarrier_wait(barrier, 1u32));
            });
        })
    };
    let wrong = write(1);
    let at = location(&wrong, "second", "MbarrierWait", 1).address(SHARED);
    let waiting = vec![WaitingWarp { waits_for: WaitsFor::Mbarrier(state(1, 32, 64, 0)), location: at.clone() }];
    let expected = Fault { kind: FaultKind::Deadlock { waiting }, location: at };
    let actual = fault(run(&wrong, &[], &GlobalMemory::new()));
    assert_eq!(actual, expected);
    assert_eq!(
        actual.kind.to_string(),
        "deadlock, no warp can proceed: warp 1 at mbarrier 0x400 (phase 1, 32 of 64 arrived, 0 bytes in flight); some warp \
         has exited or waits elsewhere"
    );
    assert!(run(&write(2), &[], &GlobalMemory::new()).is_ok());
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
    let at = location(&wrong, "wait", "MbarrierWait", 0).address(SHARED);
    let waiting = vec![WaitingWarp { waits_for: WaitsFor::Mbarrier(state(0, 0, 1, 64)), location: at.clone() }];
    let expected = Fault { kind: FaultKind::Deadlock { waiting }, location: at };
    assert_eq!(fault(run(&wrong, &[], &GlobalMemory::new())), expected);
}

#[test]
fn invalidated_while_others_use_it() {
    let write = |synchronised: bool| {
        kernel(64, |k| {
            let barrier = with_barrier(k, 32);
            let first = first_thread(k);
            one_after_the_other(
                k,
                |k| {
                    k.section("arrive", |k| k.mbarrier_arrive(barrier, 1u32));
                    if synchronised {
                        k.cta_sync();
                    }
                },
                |k| {
                    if synchronised {
                        k.cta_sync();
                    }
                    let leader = k.lane();
                    let leader = k.compare::<U32>(Compare::Eq, leader, 0u32);
                    k.section("end", |k| k.when(leader, |k| k.mbarrier_invalidate(barrier)));
                },
            );
            let _ = first;
        })
    };
    let wrong = write(false);
    let expected = Fault {
        kind: FaultKind::Race {
            space: Space::Shared,
            access: AccessKind::Atomic,
            earlier_access: AccessKind::Atomic,
            earlier: Box::new(Location {
                lane: None,
                ..location(&wrong, "arrive", "MbarrierArrive", 0).address(SHARED)
            }),
        },
        location: location(&wrong, "end", "MbarrierInvalidate", 1).lane(0).address(SHARED),
    };
    assert_eq!(fault(run(&wrong, &[], &GlobalMemory::new())), expected);
    assert!(run(&write(true), &[], &GlobalMemory::new()).is_ok());
}

/// Waits are counted once, however often a warp looks.
#[test]
fn waits_are_counted() {
    let kernel = ring_kernel(Ring::Right);
    for seed in 0..4 {
        let mut memory = GlobalMemory::new();
        let y = memory.allocate_uninitialised("y", (ROUNDS * 128) as usize);
        let report = run_seeded(&kernel, &[Argument::U64(y)], &memory, seed);
        assert_eq!(report.map(|report| report.counters.mbarrier_waits), Ok(u64::from(2 * ROUNDS)));
    }
}
