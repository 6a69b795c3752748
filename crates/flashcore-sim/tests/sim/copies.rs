//! Asynchronous copies: what they write, and what goes wrong around them.

use crate::support::{At, SHARED, bytes, delay, fault, kernel, location, missing_wait, one_after_the_other, run};
use flashcore_ir::builder::CopyBytes;
use flashcore_ir::types::{U32, U64};
use flashcore_ir::{Builder, Compare, GlobalAddress, L2Prefetch, Reg, SharedAddress, Space};
use flashcore_sim::{AccessKind, Argument, CopySize, Fault, FaultKind, GlobalMemory, InFlight, TooEarly};

/// Starts the copy of `CopyBytes` from `x` to the 16 bytes of a lane at the `stage`th half kilobyte, as section "copy".
fn start_copy(k: &mut Builder, x: Reg<U64>, stage: u32, count: CopyBytes) -> Reg<U32> {
    let (lane, base) = (k.lane(), k.shared_base());
    let lane_target = k.mad::<U32>(lane, 16u32, base);
    let target = k.add::<U32>(lane_target, 512 * stage);
    let source = k.mad_wide(lane, 16u32, x);
    let source = GlobalAddress::from(source).plus(512 * stage as i32);
    k.section(&format!("copy {stage}"), |k| k.copy_async(target, source, count, L2Prefetch::None));
    target
}

fn input(memory: &mut GlobalMemory, count: u32) -> (u64, Vec<u32>) {
    let values: Vec<u32> = (0..count).map(|index| index * 3 + 1).collect();
    (memory.allocate("x", &bytes(&values, |value| value.to_le_bytes())), values)
}

#[test]
fn copies_and_fills_with_zeros() {
    let kernel = kernel(32, |k| {
        let (x, y) = (k.parameter::<U64>("x"), k.parameter::<U64>("y"));
        k.reserve_shared(512, 16);
        let lane = k.lane();
        // Lane l reads l bytes, at most 16; lane 0 reads none, and points nowhere.
        let read = k.min::<U32>(lane, 16u32);
        let nothing = k.compare::<U32>(Compare::Eq, read, 0u32);
        let x = k.select::<U64>(nothing, 0x123u64, x);
        let target = start_copy(k, x, 0, CopyBytes::ZeroFill { written: 16, read });
        k.copy_async_commit();
        k.copy_async_wait(0);
        let copied = k.load_shared::<U32>(target, 4);
        let to = k.mad_wide(lane, 16u32, y);
        k.store(to, &copied);
    });
    let mut memory = GlobalMemory::new();
    let (x, _) = input(&mut memory, 128);
    let y = memory.allocate_uninitialised("y", 512);
    let report = run(&kernel, &[x, y].map(Argument::U64), &memory).unwrap();
    let (source, result) = (memory.read(x), memory.read(y));
    for lane in 0..32 {
        let length = lane.min(16);
        let mut expected = [0; 16];
        expected[..length].copy_from_slice(&source[16 * lane..][..length]);
        assert_eq!(result[16 * lane..][..16], expected, "lane {lane}");
    }
    assert_eq!(report.counters.copy_async_bytes, (0..32u64).map(|lane| lane.min(16)).sum());
    assert_eq!(report.counters.copy_async_writes.bytes, 512);
}

/// Groups end in order: of two, a wait that leaves one unfinished ends the first only.
#[test]
fn a_wait_covers_all_but_the_latest_groups() {
    let write = |pending: u32, stage: u32| {
        kernel(32, |k| {
            let x = k.parameter::<U64>("x");
            k.reserve_shared(1024, 16);
            let targets = [0, 1].map(|stage| {
                let target = start_copy(k, x, stage, CopyBytes::All(16));
                k.copy_async_commit();
                target
            });
            k.copy_async_wait(pending);
            k.section("read", |k| k.load_shared::<U32>(targets[stage as usize], 4));
            k.copy_async_wait_all();
        })
    };
    let mut memory = GlobalMemory::new();
    let (x, _) = input(&mut memory, 256);
    for (pending, stage, covered) in [(0, 0, true), (0, 1, true), (1, 0, true), (1, 1, false), (2, 0, false)] {
        let kernel = write(pending, stage);
        let result = run(&kernel, &[Argument::U64(x)], &memory);
        if covered {
            assert_eq!(result.map(|_| ()), Ok(()));
            continue;
        }
        let address = SHARED + 512 * u64::from(stage);
        let started = location(&kernel, &format!("copy {stage}"), "CopyAsync", 0).lane(0).address(address);
        let expected = missing_wait(
            TooEarly::Read,
            InFlight::CopyTarget,
            started,
            location(&kernel, "read", "Load", 0).lane(0).address(address),
        );
        assert_eq!(fault(result), expected, "{pending} pending, stage {stage}");
    }
}

/// A copy that was not committed belongs to no group.
#[test]
fn a_wait_for_groups_needs_a_commit() {
    let write = |commit: bool| {
        kernel(32, |k| {
            let x = k.parameter::<U64>("x");
            k.reserve_shared(512, 16);
            let target = start_copy(k, x, 0, CopyBytes::All(16));
            if commit {
                k.copy_async_commit();
            }
            k.copy_async_wait(0);
            k.section("overwrite", |k| {
                let lane = k.lane();
                k.store_shared(target, &[lane]);
            });
            k.copy_async_wait_all();
        })
    };
    let mut memory = GlobalMemory::new();
    let (x, _) = input(&mut memory, 128);
    let wrong = write(false);
    let started = location(&wrong, "copy 0", "CopyAsync", 0).lane(0).address(SHARED);
    let at = location(&wrong, "overwrite", "Store", 0).lane(0).address(SHARED);
    let expected = missing_wait(TooEarly::Write, InFlight::CopyTarget, started, at);
    assert_eq!(fault(run(&wrong, &[Argument::U64(x)], &memory)), expected);
    assert_eq!(run(&write(true), &[Argument::U64(x)], &memory).map(|_| ()), Ok(()));
}

#[test]
fn a_copy_must_end_before_its_thread() {
    let write = |wait: bool| {
        kernel(32, |k| {
            let x = k.parameter::<U64>("x");
            k.reserve_shared(512, 16);
            start_copy(k, x, 0, CopyBytes::All(16));
            if wait {
                k.copy_async_wait_all();
            }
            k.section("end", |k| k.exit());
        })
    };
    let mut memory = GlobalMemory::new();
    let (x, _) = input(&mut memory, 128);
    let wrong = write(false);
    let started = location(&wrong, "copy 0", "CopyAsync", 0).lane(0).address(SHARED);
    let at = location(&wrong, "end", "Exit", 0).lane(0).address(SHARED);
    let expected = missing_wait(TooEarly::Exit, InFlight::CopyTarget, started, at);
    assert_eq!(fault(run(&wrong, &[Argument::U64(x)], &memory)), expected);
    assert_eq!(run(&write(true), &[Argument::U64(x)], &memory).map(|_| ()), Ok(()));
}

/// The wait is for the thread that copied; the others need a barrier after it.
#[test]
fn waiting_is_not_synchronising() {
    let write = |synchronise: bool| {
        kernel(64, |k| {
            let x = k.parameter::<U64>("x");
            k.reserve_shared(512, 16);
            let (lane, base) = (k.lane(), k.shared_base());
            let own = k.mad::<U32>(lane, 16u32, base);
            one_after_the_other(
                k,
                |k| {
                    start_copy(k, x, 0, CopyBytes::All(16));
                    k.copy_async_wait_all();
                    if synchronise {
                        k.cta_sync();
                    }
                },
                |k| {
                    if synchronise {
                        k.cta_sync();
                    }
                    k.section("read", |k| k.load_shared::<U32>(own, 4));
                },
            );
        })
    };
    let mut memory = GlobalMemory::new();
    let (x, _) = input(&mut memory, 128);
    let wrong = write(false);
    let expected = Fault {
        kind: FaultKind::Race {
            space: Space::Shared,
            access: AccessKind::Read,
            earlier_access: AccessKind::Write,
            earlier: Box::new(location(&wrong, "copy 0", "CopyAsync", 0).lane(0).address(SHARED)),
        },
        location: location(&wrong, "read", "Load", 1).lane(0).address(SHARED),
    };
    assert_eq!(fault(run(&wrong, &[Argument::U64(x)], &memory)), expected);
    assert_eq!(run(&write(true), &[Argument::U64(x)], &memory).map(|_| ()), Ok(()));
}

/// A wait is for the lanes that execute it.
#[test]
fn lanes_wait_for_themselves() {
    let write = |lanes: u32| {
        kernel(32, |k| {
            let x = k.parameter::<U64>("x");
            k.reserve_shared(512, 16);
            let target = start_copy(k, x, 0, CopyBytes::All(16));
            let lane = k.lane();
            let waits = k.compare::<U32>(Compare::Lt, lane, lanes);
            k.when(waits, |k| k.copy_async_wait_all());
            k.section("read", |k| k.load_shared::<U32>(target, 4));
            k.copy_async_wait_all();
        })
    };
    let mut memory = GlobalMemory::new();
    let (x, _) = input(&mut memory, 128);
    let wrong = write(16);
    let started = location(&wrong, "copy 0", "CopyAsync", 0).lane(16).address(SHARED + 256);
    let at = location(&wrong, "read", "Load", 0).lane(16).address(SHARED + 256);
    let expected = missing_wait(TooEarly::Read, InFlight::CopyTarget, started, at);
    assert_eq!(fault(run(&wrong, &[Argument::U64(x)], &memory)), expected);
    assert_eq!(run(&write(32), &[Argument::U64(x)], &memory).map(|_| ()), Ok(()));
}

/// The copy counts as written at the wait, so a barrier between start and wait is too early.
#[test]
fn a_barrier_between_start_and_wait_orders_nothing() {
    let write = |barrier_last: bool| {
        kernel(64, |k| {
            let x = k.parameter::<U64>("x");
            k.reserve_shared(512, 16);
            let (lane, base) = (k.lane(), k.shared_base());
            let own = k.mad::<U32>(lane, 16u32, base);
            one_after_the_other(
                k,
                |k| {
                    start_copy(k, x, 0, CopyBytes::All(16));
                    if !barrier_last {
                        k.barrier_arrive(1u32, 64u32);
                    }
                    k.copy_async_wait_all();
                    if barrier_last {
                        k.barrier_arrive(1u32, 64u32);
                    }
                },
                |k| {
                    k.barrier_sync(1u32, 64u32);
                    k.section("read", |k| k.load_shared::<U32>(own, 4));
                },
            );
        })
    };
    let mut memory = GlobalMemory::new();
    let (x, _) = input(&mut memory, 128);
    let wrong = write(false);
    let expected = Fault {
        kind: FaultKind::Race {
            space: Space::Shared,
            access: AccessKind::Read,
            earlier_access: AccessKind::Write,
            earlier: Box::new(location(&wrong, "copy 0", "CopyAsync", 0).lane(0).address(SHARED)),
        },
        location: location(&wrong, "read", "Load", 1).lane(0).address(SHARED),
    };
    assert_eq!(fault(run(&wrong, &[Argument::U64(x)], &memory)), expected);
    assert_eq!(run(&write(true), &[Argument::U64(x)], &memory).map(|_| ()), Ok(()));
}

/// A barrier without a wait: the copy may still be under way.
#[test]
fn synchronising_is_not_waiting() {
    let write = |wait_first: bool| {
        kernel(64, |k| {
            let x = k.parameter::<U64>("x");
            k.reserve_shared(512, 16);
            let (lane, base, warp) = (k.lane(), k.shared_base(), k.warp());
            let own = k.mad::<U32>(lane, 16u32, base);
            let first = k.compare::<U32>(Compare::Eq, warp, 0u32);
            k.if_uniform(first, |k| {
                start_copy(k, x, 0, CopyBytes::All(16));
                if wait_first {
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
        })
    };
    let mut memory = GlobalMemory::new();
    let (x, _) = input(&mut memory, 128);
    let wrong = write(false);
    let started = location(&wrong, "copy 0", "CopyAsync", 0).lane(0).address(SHARED);
    let at = location(&wrong, "read", "Load", 1).lane(0).address(SHARED);
    let expected = missing_wait(TooEarly::Read, InFlight::CopyTarget, started, at);
    assert_eq!(fault(run(&wrong, &[Argument::U64(x)], &memory)), expected);
    assert_eq!(run(&write(true), &[Argument::U64(x)], &memory).map(|_| ()), Ok(()));
}

/// The start of a copy is a write: whoever still reads the target must be done.
#[test]
fn a_copy_into_what_others_read() {
    let write = |synchronise: bool| {
        kernel(64, |k| {
            let x = k.parameter::<U64>("x");
            k.reserve_shared(512, 16);
            let (lane, base, warp) = (k.lane(), k.shared_base(), k.warp());
            let own = k.mad::<U32>(lane, 16u32, base);
            let first = k.compare::<U32>(Compare::Eq, warp, 0u32);
            k.if_uniform(first, |k| k.store_shared(own, &[lane, lane, lane, lane]));
            k.cta_sync();
            one_after_the_other(
                k,
                |k| {
                    k.section("read", |k| k.load_shared::<U32>(SharedAddress::from(own).plus(8), 2));
                    if synchronise {
                        k.cta_sync();
                    }
                },
                |k| {
                    if synchronise {
                        k.cta_sync();
                    }
                    start_copy(k, x, 0, CopyBytes::All(16));
                    k.copy_async_wait_all();
                },
            );
        })
    };
    let mut memory = GlobalMemory::new();
    let (x, _) = input(&mut memory, 128);
    let wrong = write(false);
    let expected = Fault {
        kind: FaultKind::Race {
            space: Space::Shared,
            access: AccessKind::Write,
            earlier_access: AccessKind::Read,
            earlier: Box::new(location(&wrong, "read", "Load", 0).lane(0).address(SHARED + 8)),
        },
        location: location(&wrong, "copy 0", "CopyAsync", 1).lane(0).address(SHARED + 8),
    };
    assert_eq!(fault(run(&wrong, &[Argument::U64(x)], &memory)), expected);
    assert_eq!(run(&write(true), &[Argument::U64(x)], &memory).map(|_| ()), Ok(()));
}

#[test]
fn invalid_copy_size() {
    let kernel = kernel(32, |k| {
        let (x, most) = (k.parameter::<U64>("x"), k.parameter::<U32>("most"));
        k.reserve_shared(512, 16);
        let lane = k.lane();
        let read = k.min::<U32>(lane, most);
        start_copy(k, x, 0, CopyBytes::ZeroFill { written: 16, read });
        k.copy_async_wait_all();
    });
    let mut memory = GlobalMemory::new();
    let (x, _) = input(&mut memory, 128);
    let expected = Fault {
        kind: FaultKind::InvalidCopySize { bytes: 17, allowed: CopySize::AtMost(16) },
        location: location(&kernel, "copy 0", "CopyAsync", 0).lane(17),
    };
    assert_eq!(fault(run(&kernel, &[Argument::U64(x), Argument::U32(31)], &memory)), expected);
    assert_eq!(run(&kernel, &[Argument::U64(x), Argument::U32(16)], &memory).map(|_| ()), Ok(()));
}
