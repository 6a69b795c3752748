//! Bulk stores by the asynchronous proxy: what they write, and what goes wrong around them.

use crate::support::{
    Expected, Place, SHARED, at, faulty, is_lane, kernel, missing_wait, one_after_the_other, race, structure, threads,
    unfenced, words,
};
use flashcore_ir::types::{U32, U64};
use flashcore_ir::{Builder, GlobalAddress, SharedAddress, VerifiedKernel};
use flashcore_sim::{Argument, CopySize, Fault, FaultKind, GlobalMemory, InFlight, Location, TooEarly};

/// A bulk store of a tile, and the ways to get it wrong.
#[derive(Clone, Copy, PartialEq)]
enum Store {
    Right,
    WithoutFence,
    FencedByOneLane,
    FencedByTheIssuer,
    FencedAfterTheBarrier,
    WithoutBarrier,
    WithoutWait,
    OverwrittenTooEarly,
    OverwrittenAfterRead,
    ReadBack,
    ReadBackAfterRead,
}

/// Warp 0 writes 512 bytes; the first thread of warp 1 stores them.
fn store_kernel(how: Store) -> VerifiedKernel {
    kernel(64, |k| {
        let (y, bytes) = (k.parameter::<U64>("y"), k.parameter::<U32>("bytes"));
        k.reserve_shared(512, 16);
        let (lane, base) = (k.lane(), k.shared_base());
        let own = k.mad::<U32>(lane, 16u32, base);
        let first = is_lane(k, 0);
        one_after_the_other(
            k,
            |k| {
                k.section("write", |k| k.store_shared(own, &[lane, lane, lane, lane]));
                match how {
                    Store::WithoutFence | Store::FencedByTheIssuer | Store::FencedAfterTheBarrier => {}
                    Store::FencedByOneLane => k.when(first, |k| k.fence_proxy_async()),
                    _ => k.fence_proxy_async(),
                }
                if how != Store::WithoutBarrier {
                    k.cta_sync();
                }
                if how == Store::FencedAfterTheBarrier {
                    k.fence_proxy_async();
                }
            },
            |k| {
                if how != Store::WithoutBarrier {
                    k.cta_sync();
                }
                if how == Store::FencedByTheIssuer {
                    k.fence_proxy_async();
                }
                // Two threads could not store the same tile.
                k.if_then(first, |k| {
                    k.section("delay lanes", |k| k.for_lanes(0u32, 2000u32, |_, _| {}));
                    k.section("store", |k| k.bulk_store(y, base, bytes));
                    k.bulk_commit();
                    if matches!(how, Store::OverwrittenAfterRead | Store::ReadBackAfterRead) {
                        k.bulk_wait(0, true);
                    }
                    if matches!(how, Store::OverwrittenTooEarly | Store::OverwrittenAfterRead) {
                        k.section("overwrite", |k| k.store_shared(own, &[lane]));
                    }
                    if how != Store::WithoutWait && !matches!(how, Store::ReadBackAfterRead) {
                        k.bulk_wait(0, false);
                    }
                    if matches!(how, Store::ReadBack | Store::ReadBackAfterRead) {
                        k.section("read back", |k| k.load_one::<U32>(y));
                    }
                });
            },
        );
    })
}

const WRITE: Place = at("write", "Store", 0).lane(0);
const STORE: Place = at("store", "BulkStore", 1).lane(0);

fn fails(how: Store, bytes: u32, expected: impl FnOnce(u64) -> Expected) {
    let mut memory = GlobalMemory::new();
    let y = memory.allocate_uninitialised("y", 512);
    threads(64).on(&memory, [y]).with(&[Argument::U32(bytes)]).fails(&store_kernel(how), &expected(y));
}

#[test]
fn bulk_store() {
    let stored: Vec<u32> = (0..128).map(|word| word / 4).collect();
    let half = [&stored[..64], &[u32::MAX; 64]].concat();
    for (how, bytes, expected) in [
        (Store::Right, 512, &stored),
        (Store::OverwrittenAfterRead, 512, &stored),
        (Store::ReadBack, 512, &stored),
        (Store::Right, 256, &half),
    ] {
        let mut memory = GlobalMemory::new();
        let y = memory.allocate_uninitialised("y", 512);
        threads(64).on(&memory, [y]).with(&[Argument::U32(bytes)]).passes(&store_kernel(how));
        assert_eq!(words(&memory.read(y)), *expected);
    }
}

#[test]
fn missing_proxy_fence() {
    for how in [Store::WithoutFence, Store::FencedByTheIssuer, Store::FencedAfterTheBarrier] {
        fails(how, 512, |_| unfenced(SHARED, WRITE, STORE));
    }
    // A fence is for the lanes that execute it: of the tile, only the 16 bytes of the first are fenced.
    fails(Store::FencedByOneLane, 512, |_| unfenced(SHARED + 16, WRITE.lane(1), STORE));
}

#[test]
fn bulk_store_without_barrier() {
    fails(Store::WithoutBarrier, 512, |_| race(SHARED, WRITE, STORE));
}

#[test]
fn bulk_store_without_wait() {
    fails(Store::OverwrittenTooEarly, 512, |_| {
        let [store, overwrite] = [STORE, at("overwrite", "Store", 1).lane(0)].map(|place| place.address(SHARED));
        missing_wait(TooEarly::Write, InFlight::BulkSource, store, overwrite)
    });
    fails(Store::ReadBackAfterRead, 512, |y| {
        let [store, read] = [STORE, at("read back", "Load", 1).lane(0)].map(|place| place.address(y));
        missing_wait(TooEarly::Read, InFlight::BulkTarget, store, read)
    });
    // The end of the kernel has no operation of its own: its location is that of the last statement, the choice of roles.
    fails(Store::WithoutWait, 512, |_| {
        Box::new(|kernel| {
            let store = STORE.address(SHARED);
            let Fault { kind, .. } = missing_wait(TooEarly::Exit, InFlight::BulkSource, store, store)(kernel);
            let (lane, address, roles) = (Some(0), Some(SHARED), structure(kernel, "prologue"));
            Fault { kind, location: Location { operation: "End".to_owned(), warp: 1, lane, address, ..roles } }
        })
    });
}

/// The source is free for others only after a barrier that follows the wait.
#[test]
fn others_overwrite_the_source_of_a_bulk_store() {
    let mut memory = GlobalMemory::new();
    let y = memory.allocate_uninitialised("y", 16);
    threads(64).on(&memory, [y]).check(
        |k, right| {
            let y = k.parameter::<U64>("y");
            k.reserve_shared(16, 16);
            let (lane, base, first) = (k.lane(), k.shared_base(), is_lane(k, 0));
            one_after_the_other(
                k,
                |k| {
                    k.when(first, |k| {
                        k.store_shared(base, &[lane, lane, lane, lane]);
                        k.fence_proxy_async();
                        k.section("store", |k| k.bulk_store(y, base, 16u32));
                        k.bulk_commit();
                    });
                    if !right {
                        k.barrier_arrive(1u32, 64u32);
                    }
                    k.bulk_wait(0, true);
                    if right {
                        k.barrier_arrive(1u32, 64u32);
                    }
                },
                |k| {
                    k.barrier_sync(1u32, 64u32);
                    k.section("overwrite", |k| k.when(first, |k| k.store_shared(base, &[lane])));
                },
            );
        },
        &race(SHARED, at("store", "BulkStore", 0).lane(0), at("overwrite", "Store", 1).lane(0)),
    );
    assert_eq!(memory.read(y), [0; 16]);
}

#[test]
fn bulk_store_of_an_invalid_size() {
    for bytes in [0, 24] {
        let kind = FaultKind::InvalidCopySize { bytes, allowed: CopySize::MultipleOf(16) };
        fails(Store::Right, bytes, |_| faulty(kind, STORE));
    }
}

/// In a pipeline, a fence after a later write does not hide that the earlier one was fenced in time.
#[test]
fn fences_of_earlier_tiles_count() {
    let kernel = kernel(64, |k: &mut Builder| {
        let y = k.parameter::<U64>("y");
        k.reserve_shared(1024, 16);
        let (lane, base, first) = (k.lane(), k.shared_base(), is_lane(k, 0));
        let own = k.mad::<U32>(lane, 16u32, base);
        one_after_the_other(
            k,
            |k| {
                for stage in 0..2 {
                    k.store_shared(SharedAddress::from(own).plus(512 * stage), &[lane, lane, lane, lane]);
                    k.fence_proxy_async();
                    k.barrier_arrive(1 + stage as u32, 64u32);
                }
            },
            |k| {
                for stage in 0..2 {
                    k.barrier_sync(1 + stage as u32, 64u32);
                    k.if_then(first, |k| {
                        let from = SharedAddress::from(base).plus(512 * stage);
                        k.bulk_store(GlobalAddress::from(y).plus(512 * stage), from, 512u32);
                        k.bulk_commit();
                    });
                }
                k.bulk_wait(0, false);
            },
        );
    });
    let mut memory = GlobalMemory::new();
    let y = memory.allocate_uninitialised("y", 1024);
    threads(64).on(&memory, [y]).passes(&kernel);
    assert!(memory.is_written(y));
}
