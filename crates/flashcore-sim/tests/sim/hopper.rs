//! Elections, stores of matrices, and the reallocation of registers.

use crate::support::{At, SHARED, fault, kernel, location, run, run_seeded, words};
use flashcore_ir::types::{F16x2, U32, U64};
use flashcore_ir::{Compare, GlobalAddress, RegisterChange, SharedAddress, Space, VerifiedKernel};
use flashcore_sim::{AccessKind, Argument, Fault, FaultKind, GlobalMemory, WaitingWarp, WaitsFor};

/// One lane, and not the first: kernels must not rely on which.
#[test]
fn one_lane_is_elected() {
    let kernel = kernel(32, |k| {
        let y = k.parameter::<U64>("y");
        let elected = k.elect();
        let ballot = k.ballot(elected);
        k.when(elected, |k| k.store_one(y, ballot));
        k.grid_dependency_wait();
        k.launch_dependents();
    });
    let mut memory = GlobalMemory::new();
    let y = memory.allocate_uninitialised("y", 4);
    assert!(run(&kernel, &[Argument::U64(y)], &memory).is_ok());
    let ballot = words(&memory.read(y))[0];
    assert_eq!(ballot.count_ones(), 1);
    assert_ne!(ballot, 1);
}

/// Matrices stored as fragments are read by rows, or by columns where they were transposed.
#[test]
fn matrices_are_stored_by_rows() {
    for count in [1u32, 2, 4] {
        for transposed in [false, true] {
            let kernel = kernel(32, |k| {
                let y = k.parameter::<U64>("y");
                k.reserve_shared(512, 128);
                let (base, lane) = (k.shared_base(), k.lane());
                let row = k.mad::<U32>(lane, 16u32, base);
                // Element (r, c) of matrix m is 64 m + 8 r + c: lane 4 r + c / 2 has columns c and c + 1.
                let values: Vec<_> = (0..count)
                    .map(|matrix| {
                        let low = k.mad::<U32>(lane, 2u32, 64 * matrix);
                        let high = k.add(low, 1u32);
                        let high = k.shl(high, 16u32);
                        let pair = k.or(low, high);
                        k.reinterpret::<U32, F16x2>(pair)
                    })
                    .collect();
                k.store_matrix(row, &values, transposed);
                k.warp_sync();
                let inside = k.compare::<U32>(Compare::Lt, lane, 8 * count);
                k.if_then(inside, |k| {
                    let read = k.load_shared::<U32>(SharedAddress::from(row), 4);
                    let target = k.mad_wide(lane, 16u32, y);
                    k.store(GlobalAddress::from(target), &read);
                });
            });
            let mut memory = GlobalMemory::new();
            let y = memory.allocate_uninitialised("y", (128 * count) as usize);
            let report = run(&kernel, &[Argument::U64(y)], &memory).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(report.counters.store_matrix.requests, u64::from(count));
            let halves: Vec<u32> = words(&memory.read(y)).iter().flat_map(|pair| [pair & 0xffff, pair >> 16]).collect();
            let element = |index: u32| {
                let (matrix, row, column) = (index / 64, index / 8 % 8, index % 8);
                64 * matrix + if transposed { 8 * column + row } else { 8 * row + column }
            };
            assert_eq!(halves, (0..64 * count).map(element).collect::<Vec<_>>(), "x{count}, {transposed}");
        }
    }
}

/// The lane that reads a row is not the one that stored it.
#[test]
fn a_matrix_read_without_warp_sync() {
    let wrong = kernel(32, |k| {
        k.reserve_shared(128, 128);
        let (base, lane) = (k.shared_base(), k.lane());
        let row = k.and(lane, 7u32);
        let row = k.mad::<U32>(row, 16u32, base);
        let pair = k.reinterpret::<U32, F16x2>(lane);
        k.section("store", |k| k.store_matrix(row, &[pair], false));
        k.section("load", |k| k.load_shared::<U32>(row, 1));
    });
    let expected = Fault {
        kind: FaultKind::Race {
            space: Space::Shared,
            access: AccessKind::Read,
            earlier_access: AccessKind::Write,
            earlier: Box::new(location(&wrong, "store", "StoreMatrix", 0).address(SHARED)),
        },
        location: location(&wrong, "load", "Load", 0).lane(0).address(SHARED),
    };
    assert_eq!(fault(run(&wrong, &[], &GlobalMemory::new())), expected);
}

/// A producer warpgroup gives back what two consumer warpgroups take.
fn roles(budget: u32, producer: u32, consumer: u32) -> VerifiedKernel {
    kernel(384, |k| {
        k.set_register_budget(budget);
        let warp = k.warp();
        let produces = k.compare::<U32>(Compare::Lt, warp, 4u32);
        k.if_else_uniform(
            produces,
            |k| {
                crate::support::delay(k);
                k.section("decrease", |k| k.decrease_registers(producer));
            },
            |k| k.section("increase", |k| k.increase_registers(consumer)),
        );
    })
}

#[test]
fn registers_move_between_warpgroups() {
    for seed in 0..8 {
        let result = run_seeded(&roles(168, 24, 240), &[], &GlobalMemory::new(), seed);
        assert!(result.is_ok(), "{result:?}");
    }
}

/// 144 registers are given back for 2 times 80: some of the warps wait forever.
#[test]
fn more_registers_than_there_are() {
    let wrong = roles(168, 24, 248);
    let found = fault(run(&wrong, &[], &GlobalMemory::new()));
    let FaultKind::Deadlock { waiting } = found.kind else { panic!("{found}") };
    // Four warps give 576; seven increases by 80 take 560 of them.
    let at = |warp: u32| location(&wrong, "increase", "SetRegisterCount", warp);
    let expected =
        |warp: u32| WaitingWarp { waits_for: WaitsFor::Registers { wanted: 80, free: 16 }, location: at(warp) };
    assert_eq!(waiting, [expected(waiting[0].location.warp)]);
}

#[test]
fn a_change_in_the_wrong_direction() {
    for (change, count) in [(RegisterChange::Increase, 160), (RegisterChange::Decrease, 176)] {
        let kernel = kernel(128, |k| {
            k.set_register_budget(168);
            k.section("change", |k| match change {
                RegisterChange::Increase => k.increase_registers(count),
                RegisterChange::Decrease => k.decrease_registers(count),
            });
        });
        let Fault { kind, location: at } = fault(run(&kernel, &[], &GlobalMemory::new()));
        assert_eq!(kind, FaultKind::RegisterCount { count, current: 168 });
        assert_eq!(at, location(&kernel, "change", "SetRegisterCount", at.warp));
    }
}
