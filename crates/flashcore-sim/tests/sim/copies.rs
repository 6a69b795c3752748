//! Asynchronous copies by `cp.async`: what goes wrong around them. What they move is a matter of the conformance cases.

use crate::support::{
    Place, SHARED, at, delay, faulty, handover, is_warp, kernel, missing_wait, one_after_the_other, race, slots,
    threads,
};
use flashcore_ir::builder::CopyBytes;
use flashcore_ir::types::{U32, U64};
use flashcore_ir::{Builder, Compare, GlobalAddress, L2Prefetch, Reg, SharedAddress};
use flashcore_sim::{Argument, CopySize, FaultKind, GlobalMemory, InFlight, TooEarly};

use CopyBytes::{All, ZeroFill};

/// Starts the copy of `count` from the parameter to the 16 bytes of a lane at the `stage`th half kilobyte, as section
/// "copy" and the number of the stage.
fn start_copy(k: &mut Builder, x: Reg<U64>, stage: u32, count: CopyBytes) -> Reg<U32> {
    let (lane, base) = (k.lane(), k.shared_base());
    let lane_target = k.mad::<U32>(lane, 16u32, base);
    let target = k.add::<U32>(lane_target, 512 * stage);
    let source = k.mad_wide(lane, 16u32, x);
    let source = GlobalAddress::from(source).plus(512 * stage as i32);
    k.section(&format!("copy {stage}"), |k| k.copy_async(target, source, count, L2Prefetch::None));
    target
}

/// A buffer to copy from.
fn source(bytes: usize) -> (GlobalMemory, u64) {
    let mut memory = GlobalMemory::new();
    let x = memory.allocate("x", &vec![3; bytes]);
    (memory, x)
}

/// The parameter, and shared memory of so many stages, of which the slot of the lane in the first.
fn declare(k: &mut Builder, stages: u32) -> (Reg<U64>, Reg<U32>, Reg<U32>) {
    let x = k.parameter::<U64>("x");
    let [lane, own] = slots(k, 16);
    k.reserve_shared(512 * (stages - 1), 16);
    (x, lane, own)
}

const COPY: Place = at("copy 0", "CopyAsync", 0);

/// The copy of a lane to its slot is in flight.
fn in_flight(touch: TooEarly, lane: u32, place: Place) -> crate::support::Expected {
    let address = SHARED + 16 * u64::from(lane);
    let [started, place] = [COPY, place].map(|place| place.lane(lane).address(address));
    missing_wait(touch, InFlight::CopyTarget, started, place)
}

/// Lane l reads l bytes, at most 16; lane 0 reads none, and points nowhere.
#[test]
fn fewer_bytes_are_read_than_written() {
    let (memory, x) = source(512);
    let kernel = kernel(32, |k| {
        let (x, lane, _) = declare(k, 1);
        let read = k.min::<U32>(lane, 16u32);
        let nothing = k.compare::<U32>(Compare::Eq, read, 0u32);
        let x = k.select::<U64>(nothing, 0x123u64, x);
        start_copy(k, x, 0, ZeroFill { written: 16, read });
        k.copy_async_wait_all();
    });
    let counters = threads(32).on(&memory, [x]).passes(&kernel).counters;
    assert_eq!(counters.copy_async_bytes, (0..32u64).map(|lane| lane.min(16)).sum());
    assert_eq!(counters.copy_async_writes.bytes, 512);
}

/// Groups end in order: of two, a wait that leaves one unfinished ends the first only.
#[test]
fn a_wait_covers_all_but_the_latest_groups() {
    let (memory, x) = source(1024);
    let write = |pending: u32, stage: usize| {
        kernel(32, |k| {
            let (x, ..) = declare(k, 2);
            let targets = [0, 1].map(|stage| {
                let target = start_copy(k, x, stage, All(16));
                k.copy_async_commit();
                target
            });
            k.copy_async_wait(pending);
            k.section("read", |k| k.load_shared::<U32>(targets[stage], 4));
            k.copy_async_wait_all();
        })
    };
    for (pending, stage, name) in [(1, 1, "copy 1"), (2, 0, "copy 0")] {
        let address = SHARED + 512 * stage as u64;
        let [started, read] =
            [at(name, "CopyAsync", 0), at("read", "Load", 0)].map(|place| place.lane(0).address(address));
        let expected = missing_wait(TooEarly::Read, InFlight::CopyTarget, started, read);
        threads(32).on(&memory, [x]).fails(&write(pending, stage), &expected);
    }
    for (pending, stage) in [(0, 0), (0, 1), (1, 0)] {
        threads(32).on(&memory, [x]).passes(&write(pending, stage));
    }
}

/// A copy that was not committed belongs to no group.
#[test]
fn a_wait_for_groups_needs_a_commit() {
    let (memory, x) = source(512);
    threads(32).on(&memory, [x]).check(
        |k, right| {
            let (x, lane, own) = declare(k, 1);
            start_copy(k, x, 0, All(16));
            if right {
                k.copy_async_commit();
            }
            k.copy_async_wait(0);
            k.section("overwrite", |k| k.store_shared(own, &[lane]));
            k.copy_async_wait_all();
        },
        &in_flight(TooEarly::Write, 0, at("overwrite", "Store", 0)),
    );
}

#[test]
fn a_copy_must_end_before_its_thread() {
    let (memory, x) = source(512);
    threads(32).on(&memory, [x]).check(
        |k, right| {
            let (x, ..) = declare(k, 1);
            start_copy(k, x, 0, All(16));
            if right {
                k.copy_async_wait_all();
            }
            k.section("end", |k| k.exit());
        },
        &in_flight(TooEarly::Exit, 0, at("end", "Exit", 0)),
    );
}

/// A wait is for the lanes that execute it.
#[test]
fn lanes_wait_for_themselves() {
    let (memory, x) = source(512);
    threads(32).on(&memory, [x]).check(
        |k, right| {
            let (x, lane, own) = declare(k, 1);
            start_copy(k, x, 0, All(16));
            let waits = k.compare::<U32>(Compare::Lt, lane, if right { 32u32 } else { 16 });
            k.when(waits, |k| k.copy_async_wait_all());
            k.section("read", |k| k.load_shared::<U32>(own, 4));
            k.copy_async_wait_all();
        },
        &in_flight(TooEarly::Read, 16, at("read", "Load", 0)),
    );
}

/// The wait is for the thread that copied; the others need a barrier after it.
#[test]
fn waiting_is_not_synchronising() {
    let (memory, x) = source(512);
    threads(64).on(&memory, [x]).check(
        |k, right| {
            let (x, _, own) = declare(k, 1);
            handover(
                k,
                right,
                |k| {
                    start_copy(k, x, 0, All(16));
                    k.copy_async_wait_all();
                },
                |k| {
                    k.section("read", |k| k.load_shared::<U32>(own, 4));
                },
            );
        },
        &race(SHARED, COPY.lane(0), at("read", "Load", 1).lane(0)),
    );
}

/// The copy counts as written at the wait, so a barrier between start and wait is too early.
#[test]
fn a_barrier_between_start_and_wait_orders_nothing() {
    let (memory, x) = source(512);
    threads(64).on(&memory, [x]).check(
        |k, right| {
            let (x, _, own) = declare(k, 1);
            one_after_the_other(
                k,
                |k| {
                    start_copy(k, x, 0, All(16));
                    if !right {
                        k.barrier_arrive(1u32, 64u32);
                    }
                    k.copy_async_wait_all();
                    if right {
                        k.barrier_arrive(1u32, 64u32);
                    }
                },
                |k| {
                    k.barrier_sync(1u32, 64u32);
                    k.section("read", |k| k.load_shared::<U32>(own, 4));
                },
            );
        },
        &race(SHARED, COPY.lane(0), at("read", "Load", 1).lane(0)),
    );
}

/// A barrier without a wait: the copy may still be under way.
#[test]
fn synchronising_is_not_waiting() {
    let (memory, x) = source(512);
    threads(64).on(&memory, [x]).check(
        |k, right| {
            let (x, _, own) = declare(k, 1);
            let first = is_warp(k, 0);
            k.if_uniform(first, |k| {
                start_copy(k, x, 0, All(16));
                if right {
                    k.copy_async_wait_all();
                }
            });
            k.cta_sync();
            k.if_else_uniform(
                first,
                |k| {
                    delay(k);
                    k.copy_async_wait_all();
                },
                |k| {
                    k.section("read", |k| k.load_shared::<U32>(own, 4));
                },
            );
        },
        &in_flight(TooEarly::Read, 0, at("read", "Load", 1)),
    );
}

/// The start of a copy is a write: whatever still reads the target must be done.
#[test]
fn a_copy_into_what_others_read() {
    let (memory, x) = source(512);
    threads(64).on(&memory, [x]).check(
        |k, right| {
            let (x, lane, own) = declare(k, 1);
            let first = is_warp(k, 0);
            k.if_uniform(first, |k| k.store_shared(own, &[lane, lane, lane, lane]));
            k.cta_sync();
            handover(
                k,
                right,
                |k| {
                    k.section("read", |k| k.load_shared::<U32>(SharedAddress::from(own).plus(8), 2));
                },
                |k| {
                    start_copy(k, x, 0, All(16));
                    k.copy_async_wait_all();
                },
            );
        },
        &race(SHARED + 8, at("read", "Load", 0).lane(0), at("copy 0", "CopyAsync", 1).lane(0)),
    );
}

#[test]
fn invalid_copy_size() {
    let (memory, x) = source(512);
    let kernel = kernel(32, |k| {
        let (x, lane, _) = declare(k, 1);
        let most = k.parameter::<U32>("most");
        let read = k.min::<U32>(lane, most);
        start_copy(k, x, 0, ZeroFill { written: 16, read });
        k.copy_async_wait_all();
    });
    let with = |most| threads(32).on(&memory, [x]).with(&[Argument::U32(most)]);
    let kind = FaultKind::InvalidCopySize { bytes: 17, allowed: CopySize::AtMost(16) };
    with(31).fails(&kernel, &faulty(kind, COPY.lane(17)));
    with(16).passes(&kernel);
}
