//! One test for each class of fault but races: the whole located report, and the corrected kernel that passes.

use crate::support::{
    SHARED, at, deadlock, delay, fault, faulty, is_warp, kernel, of_structure, one_after_the_other, run, slot_of,
    slots, threads, unseen,
};
use flashcore_ir::builder::LoadOptions;
use flashcore_ir::types::{U32, U64};
use flashcore_ir::{Builder, Compare, GlobalAddress, L2Prefetch, LoadCache, Reg, ShuffleMode, Space, SpecialRegister};
use flashcore_sim::{
    Argument, BarrierProblem, FaultKind, GlobalMemory, Launch, LaunchError, Nearest, Options, SimError, WaitsFor,
    launch,
};

fn out_of_bounds(space: Space, buffer: &str, offset: i64, length: u64) -> FaultKind {
    FaultKind::OutOfBounds { space, bytes: 4, nearest: Nearest { buffer: buffer.to_owned(), offset, length } }
}

#[test]
fn out_of_bounds_in_shared_memory() {
    threads(32).check(
        |k, right| {
            k.reserve_shared(128, 16);
            let (lane, base) = (k.lane(), k.shared_base());
            let offset = k.mul::<U32>(lane, 4u32);
            let location = if right { k.add::<U32>(offset, base) } else { offset };
            k.section("store", |k| k.store_shared(location, &[lane]));
        },
        &faulty(out_of_bounds(Space::Shared, "shared memory", -1024, 128), at("store", "Store", 0).lane(0).address(0)),
    );
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
    let load = at("load", "Load", 0);
    for (kernel, lane, offset) in [(write(11, 0), 10, 40), (write(10, -4), 0, -4)] {
        let place = load.lane(lane).address(x.wrapping_add_signed(offset));
        threads(32).on(&memory, [x]).fails(&kernel, &faulty(out_of_bounds(Space::Global, "x", offset, 40), place));
    }
    threads(32).on(&memory, [x]).passes(&write(10, 0));
    // An address far from every buffer is measured from the nearest.
    let far = out_of_bounds(Space::Global, "before", 4096 - 0x1000_0000_0100, 400);
    threads(32).on(&memory, [4096]).fails(&write(10, 0), &faulty(far, load.lane(0).address(4096)));
}

#[test]
fn misaligned() {
    let mut memory = GlobalMemory::new();
    let x = memory.allocate("x", &[0; 512]);
    threads(32).on(&memory, [x]).check(
        |k, right| {
            let x = k.parameter::<U64>("x");
            let lane = k.lane();
            let from = k.mad_wide(lane, if right { 16u32 } else { 8 }, x);
            k.section("load", |k| k.load::<U32>(from, 4));
        },
        &faulty(
            FaultKind::Misaligned { space: Space::Global, alignment: 16 },
            at("load", "Load", 0).lane(1).address(x + 8),
        ),
    );
}

#[test]
fn uninitialised_shared_memory() {
    threads(32).check(
        |k, right| {
            let [lane, own] = slots(k, 4);
            let some = k.compare::<U32>(Compare::Lt, lane, if right { 32u32 } else { 20 });
            k.when(some, |k| k.store_shared(own, &[lane]));
            k.section("load", |k| k.load_shared::<U32>(own, 1));
        },
        &faulty(
            FaultKind::UninitialisedMemory { space: Space::Shared },
            at("load", "Load", 0).lane(20).address(SHARED + 80),
        ),
    );
}

#[test]
fn uninitialised_global_memory() {
    let write = |k: &mut Builder, elements: i32| {
        let y = k.parameter::<U64>("y");
        let lane = k.lane();
        let own = k.mad_wide(lane, 8u32, y);
        for element in 0..elements {
            k.store_one(GlobalAddress::from(own).plus(4 * element), lane);
        }
        k.section("load", |k| k.load::<U32>(own, 2));
    };
    let mut memory = GlobalMemory::new();
    let y = memory.allocate_uninitialised("y", 256);
    threads(32).on(&memory, [y]).check(
        |k, right| write(k, if right { 2 } else { 1 }),
        &faulty(FaultKind::UninitialisedMemory { space: Space::Global }, at("load", "Load", 0).lane(0).address(y + 4)),
    );
    // What one launch wrote, the next may read.
    threads(32).on(&memory, [y]).passes(&kernel(32, |k| write(k, 0)));
}

#[test]
fn stale_read() {
    let mut memory = GlobalMemory::new();
    let y = memory.allocate("y", &[0; 128]);
    let [store, load] = [("store", "Store"), ("load", "Load")].map(|(section, name)| at(section, name, 0).lane(0));
    threads(32).on(&memory, [y]).check(
        |k, right| {
            let y = k.parameter::<U64>("y");
            let lane = k.lane();
            let own = k.mad_wide(lane, 4u32, y);
            k.section("store", |k| k.store_one(own, lane));
            let cache = if right { LoadCache::All } else { LoadCache::ReadOnly };
            let options = LoadOptions { cache, prefetch: L2Prefetch::None };
            k.section("load", |k| k.load_with::<U32, GlobalAddress>(own, 1, options));
        },
        &unseen(|written| FaultKind::StaleRead { written }, y, store, load),
    );
}

/// Lanes that have left are missed by those that stay.
#[test]
fn divergent_collective() {
    threads(64).check(
        |k, right| {
            let thread = k.special(SpecialRegister::ThreadX);
            let late = k.compare::<U32>(Compare::Ge, thread, 60u32);
            if !right {
                k.when(late, |k| k.exit());
            }
            k.section("outer", |k| k.section("meet", |k| k.cta_sync()));
        },
        &faulty(FaultKind::DivergentCollective { active: 0x0fff_ffff }, at("outer / meet", "BarrierSync", 1)),
    );
}

#[test]
fn divergent_collective_in_a_branch() {
    threads(32).check(
        |k, right| {
            let lane = k.lane();
            let low = k.compare::<U32>(Compare::Lt, lane, 16u32);
            let sum = |k: &mut Builder| {
                k.section("sum", |k| k.shuffle(ShuffleMode::Butterfly, lane, 1u32));
            };
            if right { sum(k) } else { k.if_then(low, sum) }
        },
        &faulty(FaultKind::DivergentCollective { active: 0xffff }, at("sum", "Shuffle", 0)),
    );
}

/// The last warp of a CTA that is not full cannot exchange values, but it can meet the others at a barrier.
#[test]
fn divergent_collective_in_the_last_warp() {
    threads(48).check(
        |k, right| {
            let lane = k.lane();
            k.cta_sync();
            if !right {
                k.section("sum", |k| k.shuffle(ShuffleMode::Butterfly, lane, 1u32));
            }
            k.cta_sync();
        },
        &faulty(FaultKind::DivergentCollective { active: 0xffff }, at("sum", "Shuffle", 1)),
    );
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
    let kind = FaultKind::NonUniformBranch { holds: 0xffff, active: 0xffff_ffff };
    threads(32).fails(&write(16), &of_structure(kind, "choose", "If condition=%1"));
    threads(32).passes(&write(0));
    threads(32).passes(&write(32));
}

#[test]
fn non_uniform_loop() {
    let kind = FaultKind::NonUniformBranch { holds: 0xffff_fffe, active: 0xffff_ffff };
    threads(32).check(
        |k, right| {
            let lane = k.lane();
            let end = k.add::<U32>(lane, 1u32);
            k.section("repeat", |k| {
                if right {
                    k.for_lanes(0u32, end, |_, _| {});
                } else {
                    k.for_uniform::<U32>(0u32, end, 1u32, |_, _| {});
                }
            });
        },
        &of_structure(kind, "repeat", "Loop condition=%3"),
    );
}

/// A kernel of two warps, of which `second` has its own count, given as arguments where the verifier cannot see them.
#[test]
fn barrier_count() {
    let kernel = kernel(64, |k| {
        let [barrier, threads, second] = ["barrier", "threads", "second"].map(|name| k.parameter::<U32>(name));
        one_after_the_other(
            k,
            |k| k.section("first", |k| k.barrier_sync(barrier, threads)),
            |k| k.section("second", |k| k.barrier_sync(barrier, second)),
        );
    });
    let launched = |arguments: [u32; 3]| threads(64).with(&arguments.map(Argument::U32));
    for (arguments, warp, problem) in [
        ([16, 64, 64], 0, BarrierProblem::NoSuchBarrier),
        ([1, 48, 64], 0, BarrierProblem::NotWholeWarps),
        ([1, 0, 64], 0, BarrierProblem::NotWholeWarps),
        ([1, 96, 96], 0, BarrierProblem::MoreThanCta { threads: 64 }),
        ([1, 64, 32], 1, BarrierProblem::Disagrees { expected: 64 }),
    ] {
        let [barrier, first, second] = arguments;
        let (section, threads) = if warp == 0 { ("first", first) } else { ("second", second) };
        let kind = FaultKind::BarrierCount { barrier, threads, problem };
        launched(arguments).fails(&kernel, &faulty(kind, at(section, "BarrierSync", warp)));
    }
    for arguments in [[1, 64, 64], [15, 64, 64], [1, 32, 32]] {
        launched(arguments).passes(&kernel);
    }
}

#[test]
fn barrier_count_by_lanes() {
    let problem = BarrierProblem::LanesDisagree;
    threads(32).check(
        |k, right| {
            let (lane, one) = (k.lane(), k.copy::<U32>(1u32));
            let barrier = if right { one } else { k.and::<U32>(lane, 1u32) };
            k.section("meet", |k| k.barrier_sync(barrier, 32u32));
        },
        &faulty(FaultKind::BarrierCount { barrier: 0, threads: 32, problem }, at("meet", "BarrierSync", 0)),
    );
}

#[test]
fn a_deadlock_at_two_barriers() {
    let waits_for = |barrier| WaitsFor::Barrier { barrier, arrived: 32, expected: 64 };
    threads(96).check(
        |k, right| {
            let [first, last] = [0, 2].map(|warp| is_warp(k, warp));
            k.if_uniform(last, |k| k.exit());
            k.if_else_uniform(
                first,
                |k| k.section("first", |k| k.barrier_sync(1u32, 64u32)),
                |k| k.section("second", |k| k.barrier_sync(if right { 1u32 } else { 2 }, 64u32)),
            );
        },
        &deadlock([(waits_for(1), at("first", "BarrierSync", 0)), (waits_for(2), at("second", "BarrierSync", 1))]),
    );
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
    let expected = of_structure(FaultKind::StepLimit { limit: 1000 }, "spin", "Loop condition=%2");
    assert_eq!(fault(run(1)), expected(&kernel));
    assert_eq!(run(0).map(|_| ()), Ok(()));
}

/// With several faults, the one of the first CTA, however the CTAs run.
#[test]
fn the_first_cta_reports() {
    let kernel = kernel(32, |k| {
        let (x, first) = (k.parameter::<U64>("x"), k.parameter::<U32>("first"));
        delay(k);
        let cta = k.special(SpecialRegister::CtaX);
        let late = k.compare::<U32>(Compare::Ge, cta, first);
        let wrong = k.mad_wide(cta, 1024u32, x);
        k.when(late, |k| k.section("load", |k| k.load_one::<U32>(wrong)));
    });
    let mut memory = GlobalMemory::new();
    let x = memory.allocate("x", &[0; 4]);
    for first in [5, 40, 90] {
        let offset = i64::from(first) * 1024;
        let place = at("load", "Load", 0).cta([first, 0, 0]).lane(0).address(x + offset as u64);
        let launched = threads(32).on(&memory, [x]).with(&[Argument::U32(first)]).grid([100, 1, 1]);
        launched.fails(&kernel, &faulty(out_of_bounds(Space::Global, "x", offset, 4), place));
    }
}

#[test]
fn launches_that_do_not_fit() {
    let kernel = kernel(32, |k| {
        let (_x, _n): (Reg<U64>, Reg<U32>) = (k.parameter("x"), k.parameter("n"));
    });
    let run = |grid: [u32; 3], arguments: &[Argument]| {
        let launched = Launch { grid, arguments: arguments.to_vec() };
        launch(&kernel, &launched, &GlobalMemory::new(), &Options::default()).map(|_| ())
    };
    let (x, n) = (Argument::U64(0), Argument::U32(0));
    let error = |error: LaunchError| Err(SimError::Launch(error));
    let count = LaunchError::ArgumentCount { kernel: "test".to_owned(), expected: 2, actual: 1 };
    assert_eq!(run([1, 1, 1], &[x]), error(count));
    let ty = LaunchError::ArgumentType {
        index: 1,
        name: "n".to_owned(),
        expected: flashcore_ir::Type::U32.into(),
        actual: flashcore_ir::Type::F32.into(),
    };
    assert_eq!(run([1, 1, 1], &[x, Argument::F32(0.0)]), error(ty));
    assert_eq!(run([1, 0, 1], &[x, n]), error(LaunchError::EmptyGrid { grid: [1, 0, 1] }));
    for grid in [[1, 65536, 1], [1 << 20, 1 << 9, 1]] {
        assert_eq!(run(grid, &[x, n]), error(LaunchError::GridTooLarge { grid, most: 1 << 28 }));
    }
    assert_eq!(run([2, 3, 4], &[x, n]), Ok(()));
}

/// A fault as its reader sees it.
#[test]
fn faults_say_where_and_what_to_change() {
    let wrong = kernel(32, |k| {
        let [lane, own] = slots(k, 4);
        let other = slot_of(k, lane, 1, 4);
        k.section("scores", |k| k.section("write", |k| k.store_shared(own, &[lane])));
        k.section("scores", |k| k.section("read", |k| k.load_shared::<U32>(other, 1)));
    });
    let (store, load) = (at("scores / write", "Store", 0).of(&wrong), at("scores / read", "Load", 0).of(&wrong));
    let expected = format!(
        "race in shared memory: this read is not ordered after the write at `{}` in \"scores / write\" ({}:{}), \
         CTA (0, 0, 0), warp 0, lane 1, address 0x404; synchronise between them (a barrier between warps, `warp_sync` \
         within one; CTAs of a launch cannot)\n  at `{}` in \"scores / read\" ({}:{}), CTA (0, 0, 0), warp 0, lane 0, \
         address 0x404",
        store.operation, store.file, store.line, load.operation, load.file, load.line
    );
    assert_eq!(fault(run(&wrong, &[], &GlobalMemory::new())).to_string(), expected);
}
