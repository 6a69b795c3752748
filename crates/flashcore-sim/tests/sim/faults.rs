//! One test for each class of fault but races: the whole located report, and the corrected kernel that passes.

use crate::support::{At, SHARED, fault, kernel, location, one_after_the_other, run, structure};
use flashcore_ir::builder::LoadOptions;
use flashcore_ir::types::{U32, U64};
use flashcore_ir::{
    Builder, Compare, GlobalAddress, L2Prefetch, LoadCache, Reg, SharedAddress, ShuffleMode, Space, VerifiedKernel,
};
use flashcore_sim::{
    Argument, BarrierProblem, Fault, FaultKind, GlobalMemory, Launch, LaunchError, Location, Nearest, Options,
    SimError, WaitingWarp, WaitsFor, launch,
};

fn passes(kernel: &VerifiedKernel, arguments: &[Argument], memory: &GlobalMemory) {
    assert_eq!(run(kernel, arguments, memory).map(|_| ()), Ok(()));
}

#[test]
fn out_of_bounds_in_shared_memory() {
    let write = |add_base: bool| {
        kernel(32, |k| {
            k.reserve_shared(128, 16);
            let (lane, base) = (k.lane(), k.shared_base());
            let offset = k.mul::<U32>(lane, 4u32);
            let location = if add_base { k.add::<U32>(offset, base) } else { offset };
            k.section("store", |k| k.store_shared(location, &[lane]));
        })
    };
    let wrong = write(false);
    let nearest = Nearest { buffer: "shared memory".to_owned(), offset: -1024, length: 128 };
    let expected = Fault {
        kind: FaultKind::OutOfBounds { space: Space::Shared, bytes: 4, nearest },
        location: location(&wrong, "store", "Store", 0).lane(0).address(0),
    };
    assert_eq!(fault(run(&wrong, &[], &GlobalMemory::new())), expected);
    passes(&write(true), &[], &GlobalMemory::new());
}

#[test]
fn out_of_bounds_in_global_memory() {
    let write = |elements: u32, shift: i32| {
        kernel(32, |k| {
            let x = k.parameter::<U64>("x");
            let lane = k.lane();
            let inside = k.compare::<U32>(Compare::Lt, lane, elements);
            let from = k.mad_wide(lane, 4u32, x);
            k.section("load", |k| k.when(inside, |k| k.load_one::<U32>(GlobalAddress::from(from).plus(shift))));
        })
    };
    let mut memory = GlobalMemory::new();
    memory.allocate("before", &[0; 400]);
    let x = memory.allocate("x", &[0; 40]);
    memory.allocate("next", &[0; 400]);
    let check = |wrong: &VerifiedKernel, lane: u32, offset: i64| {
        let nearest = Nearest { buffer: "x".to_owned(), offset, length: 40 };
        let expected = Fault {
            kind: FaultKind::OutOfBounds { space: Space::Global, bytes: 4, nearest },
            location: location(wrong, "load", "Load", 0).lane(lane).address(x.wrapping_add_signed(offset)),
        };
        assert_eq!(fault(run(wrong, &[Argument::U64(x)], &memory)), expected);
    };
    check(&write(11, 0), 10, 40);
    check(&write(10, -4), 0, -4);
    passes(&write(10, 0), &[Argument::U64(x)], &memory);
    // An address far from every buffer is measured from the nearest.
    let wrong = write(10, 0);
    let nearest = Nearest { buffer: "before".to_owned(), offset: 4096 - 0x1000_0000_0100, length: 400 };
    let expected = Fault {
        kind: FaultKind::OutOfBounds { space: Space::Global, bytes: 4, nearest },
        location: location(&wrong, "load", "Load", 0).lane(0).address(4096),
    };
    assert_eq!(fault(run(&wrong, &[Argument::U64(4096)], &memory)), expected);
}

#[test]
fn misaligned() {
    let write = |bytes: u32| {
        kernel(32, |k| {
            let x = k.parameter::<U64>("x");
            let lane = k.lane();
            let from = k.mad_wide(lane, bytes, x);
            k.section("load", |k| k.load::<U32>(from, 4));
        })
    };
    let mut memory = GlobalMemory::new();
    let x = memory.allocate("x", &[0; 512]);
    let wrong = write(8);
    let expected = Fault {
        kind: FaultKind::Misaligned { space: Space::Global, alignment: 16 },
        location: location(&wrong, "load", "Load", 0).lane(1).address(x + 8),
    };
    assert_eq!(fault(run(&wrong, &[Argument::U64(x)], &memory)), expected);
    passes(&write(16), &[Argument::U64(x)], &memory);
}

#[test]
fn uninitialised_shared_memory() {
    let write = |lanes: u32| {
        kernel(32, |k| {
            k.reserve_shared(128, 16);
            let (lane, base) = (k.lane(), k.shared_base());
            let own = k.mad::<U32>(lane, 4u32, base);
            let some = k.compare::<U32>(Compare::Lt, lane, lanes);
            k.when(some, |k| k.store_shared(own, &[lane]));
            k.section("load", |k| k.load_shared::<U32>(own, 1));
        })
    };
    let wrong = write(20);
    let expected = Fault {
        kind: FaultKind::UninitialisedMemory { space: Space::Shared },
        location: location(&wrong, "load", "Load", 0).lane(20).address(SHARED + 80),
    };
    assert_eq!(fault(run(&wrong, &[], &GlobalMemory::new())), expected);
    passes(&write(32), &[], &GlobalMemory::new());
}

#[test]
fn uninitialised_global_memory() {
    let write = |elements: i32| {
        kernel(32, |k| {
            let y = k.parameter::<U64>("y");
            let lane = k.lane();
            let own = k.mad_wide(lane, 8u32, y);
            for element in 0..elements {
                k.store_one(GlobalAddress::from(own).plus(4 * element), lane);
            }
            k.section("load", |k| k.load::<U32>(own, 2));
        })
    };
    let mut memory = GlobalMemory::new();
    let y = memory.allocate_uninitialised("y", 256);
    let wrong = write(1);
    let expected = Fault {
        kind: FaultKind::UninitialisedMemory { space: Space::Global },
        location: location(&wrong, "load", "Load", 0).lane(0).address(y + 4),
    };
    assert_eq!(fault(run(&wrong, &[Argument::U64(y)], &memory)), expected);
    passes(&write(2), &[Argument::U64(y)], &memory);
    // What one launch wrote, the next may read.
    passes(&write(0), &[Argument::U64(y)], &memory);
}

#[test]
fn stale_read() {
    let write = |cache: LoadCache| {
        kernel(32, |k| {
            let y = k.parameter::<U64>("y");
            let lane = k.lane();
            let own = k.mad_wide(lane, 4u32, y);
            k.section("store", |k| k.store_one(own, lane));
            let options = LoadOptions { cache, prefetch: L2Prefetch::None };
            k.section("load", |k| k.load_with::<U32, GlobalAddress>(own, 1, options));
        })
    };
    let mut memory = GlobalMemory::new();
    let y = memory.allocate("y", &[0; 128]);
    let wrong = write(LoadCache::ReadOnly);
    let expected = Fault {
        kind: FaultKind::StaleRead { written: Box::new(location(&wrong, "store", "Store", 0).lane(0).address(y)) },
        location: location(&wrong, "load", "Load", 0).lane(0).address(y),
    };
    assert_eq!(fault(run(&wrong, &[Argument::U64(y)], &memory)), expected);
    passes(&write(LoadCache::All), &[Argument::U64(y)], &memory);
}

/// Lanes that have left are missed by those that stay.
#[test]
fn divergent_collective() {
    let write = |leave: bool| {
        kernel(64, |k| {
            let thread = k.special(flashcore_ir::SpecialRegister::ThreadX);
            let late = k.compare::<U32>(Compare::Ge, thread, 60u32);
            if leave {
                k.when(late, |k| k.exit());
            }
            k.section("outer", |k| k.section("meet", |k| k.cta_sync()));
        })
    };
    let wrong = write(true);
    let expected = Fault {
        kind: FaultKind::DivergentCollective { active: 0x0fff_ffff },
        location: location(&wrong, "outer / meet", "BarrierSync", 1),
    };
    assert_eq!(fault(run(&wrong, &[], &GlobalMemory::new())), expected);
    passes(&write(false), &[], &GlobalMemory::new());
}

#[test]
fn divergent_collective_in_a_branch() {
    let write = |inside: bool| {
        kernel(32, |k| {
            let lane = k.lane();
            let low = k.compare::<U32>(Compare::Lt, lane, 16u32);
            let sum = |k: &mut Builder| k.section("sum", |k| k.shuffle(ShuffleMode::Butterfly, lane, 1u32));
            if inside {
                k.if_then(low, |k| {
                    sum(k);
                });
            } else {
                sum(k);
            }
        })
    };
    let wrong = write(true);
    let expected = Fault {
        kind: FaultKind::DivergentCollective { active: 0xffff },
        location: location(&wrong, "sum", "Shuffle", 0),
    };
    assert_eq!(fault(run(&wrong, &[], &GlobalMemory::new())), expected);
    passes(&write(false), &[], &GlobalMemory::new());
}

/// The last warp of a CTA that is not full cannot exchange values, but it can meet the others at a barrier.
#[test]
fn divergent_collective_in_the_last_warp() {
    let write = |exchange: bool| {
        kernel(48, |k| {
            let lane = k.lane();
            k.cta_sync();
            if exchange {
                k.section("sum", |k| k.shuffle(ShuffleMode::Butterfly, lane, 1u32));
            }
            k.cta_sync();
        })
    };
    let wrong = write(true);
    let expected = Fault {
        kind: FaultKind::DivergentCollective { active: 0xffff },
        location: location(&wrong, "sum", "Shuffle", 1),
    };
    assert_eq!(fault(run(&wrong, &[], &GlobalMemory::new())), expected);
    passes(&write(false), &[], &GlobalMemory::new());
}

#[test]
fn non_uniform_branch() {
    let write = |limit: u32| {
        kernel(32, |k| {
            let lane = k.lane();
            let low = k.compare::<U32>(Compare::Lt, lane, limit);
            k.section("choose", |k| k.if_uniform(low, |k| k.warp_sync()));
        })
    };
    let wrong = write(16);
    let expected = Fault {
        kind: FaultKind::NonUniformBranch { holds: 0xffff, active: 0xffff_ffff },
        location: Location { operation: "If condition=%1".to_owned(), ..structure(&wrong, "choose", 0) },
    };
    assert_eq!(fault(run(&wrong, &[], &GlobalMemory::new())), expected);
    passes(&write(0), &[], &GlobalMemory::new());
    passes(&write(32), &[], &GlobalMemory::new());
}

#[test]
fn non_uniform_loop() {
    let write = |uniform: bool| {
        kernel(32, |k| {
            let lane = k.lane();
            let end = k.add::<U32>(lane, 1u32);
            k.section("repeat", |k| {
                if uniform {
                    k.for_uniform::<U32>(0u32, end, 1u32, |_, _| {});
                } else {
                    k.for_lanes(0u32, end, |_, _| {});
                }
            });
        })
    };
    let wrong = write(true);
    let expected = Fault {
        kind: FaultKind::NonUniformBranch { holds: 0xffff_fffe, active: 0xffff_ffff },
        location: Location { operation: "Loop condition=%3".to_owned(), ..structure(&wrong, "repeat", 0) },
    };
    assert_eq!(fault(run(&wrong, &[], &GlobalMemory::new())), expected);
    passes(&write(false), &[], &GlobalMemory::new());
}

/// A kernel of two warps, of which `second` has its own count, given as arguments where the verifier cannot see them.
fn barrier_kernel() -> VerifiedKernel {
    kernel(64, |k| {
        let [barrier, threads, second] = ["barrier", "threads", "second"].map(|name| k.parameter::<U32>(name));
        one_after_the_other(
            k,
            |k| k.section("first", |k| k.barrier_sync(barrier, threads)),
            |k| k.section("second", |k| k.barrier_sync(barrier, second)),
        );
    })
}

#[test]
fn barrier_count() {
    let kernel = barrier_kernel();
    let run = |[barrier, threads, second]: [u32; 3]| {
        run(&kernel, &[barrier, threads, second].map(Argument::U32), &GlobalMemory::new())
    };
    for (arguments, warp, problem) in [
        ([16, 64, 64], 0, BarrierProblem::NoSuchBarrier),
        ([1, 48, 64], 0, BarrierProblem::NotWholeWarps),
        ([1, 0, 64], 0, BarrierProblem::NotWholeWarps),
        ([1, 96, 96], 0, BarrierProblem::MoreThanCta { threads: 64 }),
        ([1, 64, 32], 1, BarrierProblem::Disagrees { expected: 64 }),
    ] {
        let [barrier, first, second] = arguments;
        let (section, threads) = if warp == 0 { ("first", first) } else { ("second", second) };
        let expected = Fault {
            kind: FaultKind::BarrierCount { barrier, threads, problem },
            location: location(&kernel, section, "BarrierSync", warp),
        };
        assert_eq!(fault(run(arguments)), expected);
    }
    assert_eq!(run([1, 64, 64]).map(|_| ()), Ok(()));
    assert_eq!(run([15, 64, 64]).map(|_| ()), Ok(()));
    assert_eq!(run([1, 32, 32]).map(|_| ()), Ok(()));
}

#[test]
fn barrier_count_by_lanes() {
    let write = |uniform: bool| {
        kernel(32, |k| {
            let lane = k.lane();
            let one = k.copy::<U32>(1u32);
            let barrier = if uniform { one } else { k.and::<U32>(lane, 1u32) };
            k.section("meet", |k| k.barrier_sync(barrier, 32u32));
        })
    };
    let wrong = write(false);
    let expected = Fault {
        kind: FaultKind::BarrierCount { barrier: 0, threads: 32, problem: BarrierProblem::LanesDisagree },
        location: location(&wrong, "meet", "BarrierSync", 0),
    };
    assert_eq!(fault(run(&wrong, &[], &GlobalMemory::new())), expected);
    passes(&write(true), &[], &GlobalMemory::new());
}

#[test]
fn deadlock() {
    let write = |second: u32| {
        kernel(96, |k| {
            let warp = k.warp();
            let [first, last] = [0, 2].map(|index| k.compare::<U32>(Compare::Eq, warp, index));
            k.if_uniform(last, |k| k.exit());
            k.if_else_uniform(
                first,
                |k| k.section("first", |k| k.barrier_sync(1u32, 64u32)),
                |k| k.section("second", |k| k.barrier_sync(second, 64u32)),
            );
        })
    };
    let wrong = write(2);
    let waiting = |barrier: u32, section: &str, warp: u32| WaitingWarp {
        waits_for: WaitsFor::Barrier { barrier, arrived: 32, expected: 64 },
        location: location(&wrong, section, "BarrierSync", warp),
    };
    let expected = Fault {
        kind: FaultKind::Deadlock { waiting: vec![waiting(1, "first", 0), waiting(2, "second", 1)] },
        location: location(&wrong, "first", "BarrierSync", 0),
    };
    assert_eq!(fault(run(&wrong, &[], &GlobalMemory::new())), expected);
    passes(&write(1), &[], &GlobalMemory::new());
}

#[test]
fn step_limit() {
    let kernel = kernel(32, |k| {
        let end = k.parameter::<U32>("end");
        k.section("spin", |k| {
            let zero = k.copy::<U32>(0u32);
            k.while_uniform(|k| k.compare::<U32>(Compare::Lt, zero, end), |k| k.warp_sync());
        });
    });
    let run = |end: u32| {
        let options = Options { step_limit: 1000, ..Options::default() };
        let launched = Launch { grid: [1, 1, 1], arguments: vec![Argument::U32(end)] };
        launch(&kernel, &launched, &GlobalMemory::new(), &options)
    };
    // Three steps come before the first round, and a round has four: after 1000, the next is the second of a round.
    let expected = Fault {
        kind: FaultKind::StepLimit { limit: 1000 },
        location: Location { operation: "Loop condition=%2".to_owned(), ..structure(&kernel, "spin", 0) },
    };
    assert_eq!(fault(run(1)), expected);
    assert_eq!(run(0).map(|_| ()), Ok(()));
}

/// With several faults, the one of the first CTA, however the CTAs run.
#[test]
fn the_first_cta_reports() {
    let kernel = kernel(32, |k| {
        let (x, first) = (k.parameter::<U64>("x"), k.parameter::<U32>("first"));
        crate::support::delay(k);
        let cta = k.special(flashcore_ir::SpecialRegister::CtaX);
        let late = k.compare::<U32>(Compare::Ge, cta, first);
        let wrong = k.mad_wide(cta, 1024u32, x);
        k.when(late, |k| k.section("load", |k| k.load_one::<U32>(wrong)));
    });
    let mut memory = GlobalMemory::new();
    let x = memory.allocate("x", &[0; 4]);
    for first in [5, 40, 90] {
        let launched = Launch { grid: [100, 1, 1], arguments: vec![Argument::U64(x), Argument::U32(first)] };
        let offset = i64::from(first) * 1024;
        let nearest = Nearest { buffer: "x".to_owned(), offset, length: 4 };
        let expected = Fault {
            kind: FaultKind::OutOfBounds { space: Space::Global, bytes: 4, nearest },
            location: location(&kernel, "load", "Load", 0).cta(first).lane(0).address(x + offset as u64),
        };
        assert_eq!(fault(launch(&kernel, &launched, &memory, &Options::default())), expected);
    }
}

#[test]
fn launches_that_do_not_fit() {
    let kernel = kernel(32, |k| {
        let (_x, _n): (Reg<U64>, Reg<U32>) = (k.parameter("x"), k.parameter("n"));
    });
    let run = |grid: [u32; 3], arguments: Vec<Argument>| {
        launch(&kernel, &Launch { grid, arguments }, &GlobalMemory::new(), &Options::default()).map(|_| ())
    };
    let right = || vec![Argument::U64(0), Argument::U32(0)];
    let error = |error: LaunchError| Err(SimError::Launch(error));
    let count = LaunchError::ArgumentCount { kernel: "test".to_owned(), expected: 2, actual: 1 };
    assert_eq!(run([1, 1, 1], vec![Argument::U64(0)]), error(count));
    let ty = LaunchError::ArgumentType {
        index: 1,
        name: "n".to_owned(),
        expected: flashcore_ir::Type::U32.into(),
        actual: flashcore_ir::Type::F32.into(),
    };
    assert_eq!(run([1, 1, 1], vec![Argument::U64(0), Argument::F32(0.0)]), error(ty));
    assert_eq!(run([1, 0, 1], right()), error(LaunchError::EmptyGrid { grid: [1, 0, 1] }));
    let grid = [1, 65536, 1];
    assert_eq!(run(grid, right()), error(LaunchError::GridTooLarge { grid, most: 1 << 28 }));
    let grid = [1 << 20, 1 << 9, 1];
    assert_eq!(run(grid, right()), error(LaunchError::GridTooLarge { grid, most: 1 << 28 }));
    assert_eq!(run([2, 3, 4], right()), Ok(()));
}

/// A fault as its reader sees it.
#[test]
fn faults_say_where_and_what_to_change() {
    let wrong = kernel(32, |k| {
        k.reserve_shared(128, 16);
        let (lane, base) = (k.lane(), k.shared_base());
        let own = k.mad::<U32>(lane, 4u32, base);
        let other = k.xor::<U32>(lane, 1u32);
        let other = k.mad::<U32>(other, 4u32, base);
        k.section("scores", |k| k.section("write", |k| k.store_shared(own, &[lane])));
        k.section("scores", |k| k.section("read", |k| k.load_shared::<U32>(SharedAddress::from(other), 1)));
    });
    let store = location(&wrong, "scores / write", "Store", 0);
    let load = location(&wrong, "scores / read", "Load", 0);
    let expected = format!(
        "race in shared memory: this read is not ordered after the write at `{}` in \"scores / write\" ({}:{}), \
         CTA (0, 0, 0), warp 0, lane 1, address 0x404; synchronise between them (a barrier between warps, `warp_sync` \
         within one; CTAs of a launch cannot)\n  at `{}` in \"scores / read\" ({}:{}), CTA (0, 0, 0), warp 0, lane 0, \
         address 0x404",
        store.operation, store.file, store.line, load.operation, load.file, load.line
    );
    assert_eq!(fault(run(&wrong, &[], &GlobalMemory::new())).to_string(), expected);
}
