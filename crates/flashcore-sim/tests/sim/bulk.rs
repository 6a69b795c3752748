//! Bulk stores by the asynchronous proxy: what they write, and what goes wrong around them.

use crate::support::{At, SHARED, fault, kernel, location, missing_wait, one_after_the_other, run, structure, words};
use flashcore_ir::types::{U32, U64};
use flashcore_ir::{Builder, Compare, GlobalAddress, SharedAddress, Space, VerifiedKernel};
use flashcore_sim::{
    AccessKind, Argument, CopySize, Fault, FaultKind, GlobalMemory, InFlight, Location, SimError, TooEarly,
};

/// A bulk store of a tile, and the ways to get it wrong.
#[derive(Clone, Copy, PartialEq)]
enum Store {
    Right,
    WithoutFence,
    FencedByOneLane,
    FencedByTheIssuer,
    FencedBehindTheBarrier,
    WithoutBarrier,
    WithoutWait,
    OverwrittenTooEarly,
    OverwrittenAfterRead,
    ReadBack,
    ReadBackAfterRead,
    OfSize(u32),
}

/// Warp 0 writes 512 bytes; the first thread of warp 1 stores them.
fn store_kernel(how: Store) -> VerifiedKernel {
    kernel(64, |k| {
        let (y, bytes) = (k.parameter::<U64>("y"), k.parameter::<U32>("bytes"));
        k.reserve_shared(512, 16);
        let (lane, base) = (k.lane(), k.shared_base());
        let own = k.mad::<U32>(lane, 16u32, base);
        let first = k.compare::<U32>(Compare::Eq, lane, 0u32);
        one_after_the_other(
            k,
            |k| {
                k.section("write", |k| k.store_shared(own, &[lane, lane, lane, lane]));
                match how {
                    Store::WithoutFence | Store::FencedByTheIssuer | Store::FencedBehindTheBarrier => {}
                    Store::FencedByOneLane => k.when(first, |k| k.fence_proxy_async()),
                    _ => k.fence_proxy_async(),
                }
                if how != Store::WithoutBarrier {
                    k.cta_sync();
                }
                if how == Store::FencedBehindTheBarrier {
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
                    delay_lanes(k);
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

/// Like [`delay`], where not all lanes are active.
fn delay_lanes(k: &mut Builder) {
    k.section("delay lanes", |k| k.for_lanes(0u32, 2000u32, |_, _| {}));
}

fn run_store(how: Store) -> (VerifiedKernel, u64, Result<Vec<u32>, SimError>) {
    let kernel = store_kernel(how);
    let mut memory = GlobalMemory::new();
    let y = memory.allocate_uninitialised("y", 512);
    let size = if let Store::OfSize(size) = how { size } else { 512 };
    let result = run(&kernel, &[Argument::U64(y), Argument::U32(size)], &memory);
    let result = result.map(|_| words(&memory.read(y)));
    (kernel, y, result)
}

#[test]
fn bulk_store() {
    let expected: Vec<u32> = (0..128).map(|word| word / 4).collect();
    for how in [Store::Right, Store::OverwrittenAfterRead, Store::ReadBack] {
        assert_eq!(run_store(how).2, Ok(expected.clone()));
    }
    let mut half = expected[..64].to_vec();
    half.resize(128, u32::MAX);
    assert_eq!(run_store(Store::OfSize(256)).2, Ok(half));
}

#[test]
fn missing_proxy_fence() {
    for how in [Store::WithoutFence, Store::FencedByTheIssuer, Store::FencedBehindTheBarrier] {
        let (kernel, _, result) = run_store(how);
        let expected = Fault {
            kind: FaultKind::MissingProxyFence {
                written: Box::new(location(&kernel, "write", "Store", 0).lane(0).address(SHARED)),
            },
            location: location(&kernel, "store", "BulkStore", 1).lane(0).address(SHARED),
        };
        assert_eq!(fault(result), expected);
    }
}

/// A fence is for the lanes that execute it: of the tile, only the 16 bytes of the first are fenced.
#[test]
fn missing_proxy_fence_of_a_lane() {
    let (kernel, _, result) = run_store(Store::FencedByOneLane);
    let expected = Fault {
        kind: FaultKind::MissingProxyFence {
            written: Box::new(location(&kernel, "write", "Store", 0).lane(1).address(SHARED + 16)),
        },
        location: location(&kernel, "store", "BulkStore", 1).lane(0).address(SHARED + 16),
    };
    assert_eq!(fault(result), expected);
}

#[test]
fn bulk_store_without_barrier() {
    let (kernel, _, result) = run_store(Store::WithoutBarrier);
    let expected = Fault {
        kind: FaultKind::Race {
            space: Space::Shared,
            access: AccessKind::Read,
            earlier_access: AccessKind::Write,
            earlier: Box::new(location(&kernel, "write", "Store", 0).lane(0).address(SHARED)),
        },
        location: location(&kernel, "store", "BulkStore", 1).lane(0).address(SHARED),
    };
    assert_eq!(fault(result), expected);
}

#[test]
fn bulk_store_without_wait() {
    let fault_of = |how: Store| {
        let (kernel, y, result) = run_store(how);
        (kernel, y, fault(result))
    };
    let (kernel, _, actual) = fault_of(Store::OverwrittenTooEarly);
    let started = location(&kernel, "store", "BulkStore", 1).lane(0).address(SHARED);
    let at = location(&kernel, "overwrite", "Store", 1).lane(0).address(SHARED);
    assert_eq!(actual, missing_wait(TooEarly::Write, InFlight::BulkSource, started, at));

    let (kernel, y, actual) = fault_of(Store::ReadBackAfterRead);
    let started = location(&kernel, "store", "BulkStore", 1).lane(0).address(y);
    let at = location(&kernel, "read back", "Load", 1).lane(0).address(y);
    assert_eq!(actual, missing_wait(TooEarly::Read, InFlight::BulkTarget, started, at));

    // The end of the kernel has no operation of its own: its location is that of the last statement, the choice of roles.
    let (kernel, _, actual) = fault_of(Store::WithoutWait);
    let started = location(&kernel, "store", "BulkStore", 1).lane(0).address(SHARED);
    let roles = structure(&kernel, "prologue", 0);
    let at = Location { operation: "End".to_owned(), warp: 1, ..roles }.lane(0).address(SHARED);
    assert_eq!(actual, missing_wait(TooEarly::Exit, InFlight::BulkSource, started, at));
}

/// The source is free for others only after a barrier that follows the wait.
#[test]
fn others_overwrite_the_source_of_a_bulk_store() {
    let write = |barrier_last: bool| {
        kernel(64, |k| {
            let y = k.parameter::<U64>("y");
            k.reserve_shared(16, 16);
            let (lane, base) = (k.lane(), k.shared_base());
            let first = k.compare::<U32>(Compare::Eq, lane, 0u32);
            one_after_the_other(
                k,
                |k| {
                    k.when(first, |k| {
                        k.store_shared(base, &[lane, lane, lane, lane]);
                        k.fence_proxy_async();
                        k.section("store", |k| k.bulk_store(y, base, 16u32));
                        k.bulk_commit();
                    });
                    if !barrier_last {
                        k.barrier_arrive(1u32, 64u32);
                    }
                    k.bulk_wait(0, true);
                    if barrier_last {
                        k.barrier_arrive(1u32, 64u32);
                    }
                },
                |k| {
                    k.barrier_sync(1u32, 64u32);
                    k.section("overwrite", |k| k.when(first, |k| k.store_shared(base, &[lane])));
                },
            );
        })
    };
    let mut memory = GlobalMemory::new();
    let y = memory.allocate_uninitialised("y", 16);
    let wrong = write(false);
    let expected = Fault {
        kind: FaultKind::Race {
            space: Space::Shared,
            access: AccessKind::Write,
            earlier_access: AccessKind::Read,
            earlier: Box::new(location(&wrong, "store", "BulkStore", 0).lane(0).address(SHARED)),
        },
        location: location(&wrong, "overwrite", "Store", 1).lane(0).address(SHARED),
    };
    assert_eq!(fault(run(&wrong, &[Argument::U64(y)], &memory)), expected);
    assert_eq!(run(&write(true), &[Argument::U64(y)], &memory).map(|_| ()), Ok(()));
    assert_eq!(memory.read(y), [0; 16]);
}

#[test]
fn bulk_store_of_an_invalid_size() {
    for bytes in [0, 24] {
        let (kernel, _, result) = run_store(Store::OfSize(bytes));
        let expected = Fault {
            kind: FaultKind::InvalidCopySize { bytes, allowed: CopySize::MultipleOf(16) },
            location: location(&kernel, "store", "BulkStore", 1).lane(0),
        };
        assert_eq!(fault(result), expected);
    }
}

/// In a pipeline, a fence after a later write does not hide that the earlier one was fenced in time.
#[test]
fn fences_of_earlier_tiles_count() {
    let kernel = kernel(64, |k| {
        let y = k.parameter::<U64>("y");
        k.reserve_shared(1024, 16);
        let (lane, base) = (k.lane(), k.shared_base());
        let own = k.mad::<U32>(lane, 16u32, base);
        let own = [own, k.add::<U32>(own, 512u32)];
        let first = k.compare::<U32>(Compare::Eq, lane, 0u32);
        one_after_the_other(
            k,
            |k| {
                for (stage, own) in own.into_iter().enumerate() {
                    k.store_shared(own, &[lane, lane, lane, lane]);
                    k.fence_proxy_async();
                    k.barrier_arrive(1 + stage as u32, 64u32);
                }
            },
            |k| {
                for stage in 0..2u32 {
                    k.barrier_sync(1 + stage, 64u32);
                    k.if_then(first, |k| {
                        let to = GlobalAddress::from(y).plus(512 * stage as i32);
                        let from = SharedAddress::from(base).plus(512 * stage as i32);
                        k.bulk_store(to, from, 512u32);
                        k.bulk_commit();
                    });
                }
                k.bulk_wait(0, false);
            },
        );
    });
    let mut memory = GlobalMemory::new();
    let y = memory.allocate_uninitialised("y", 1024);
    assert_eq!(run(&kernel, &[Argument::U64(y)], &memory).map(|_| ()), Ok(()));
    assert!(memory.is_written(y));
}
