//! Elections and the reallocation of registers.

use crate::support::{at, delay, fault, faulty, kernel, run, threads, words};
use flashcore_ir::types::{U32, U64};
use flashcore_ir::{Compare, VerifiedKernel};
use flashcore_sim::{Fault, FaultKind, GlobalMemory, WaitingWarp, WaitsFor};

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
    threads(32).on(&memory, [y]).passes(&kernel);
    let ballot = words(&memory.read(y))[0];
    assert_eq!(ballot.count_ones(), 1);
    assert_ne!(ballot, 1);
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
                delay(k);
                k.section("decrease", |k| k.decrease_registers(producer));
            },
            |k| k.section("increase", |k| k.increase_registers(consumer)),
        );
    })
}

#[test]
fn registers_move_between_warpgroups() {
    threads(384).seeds(0..8).passes(&roles(168, 24, 240));
}

/// 144 registers are given back for 2 times 80: some of the warps wait forever.
#[test]
fn more_registers_than_there_are() {
    let wrong = roles(168, 24, 248);
    let found = fault(run(&wrong, &[], &GlobalMemory::new()));
    let FaultKind::Deadlock { waiting } = found.kind else { panic!("{found}") };
    // Four warps give 576; seven increases by 80 take 560 of them.
    let location = at("increase", "SetRegisterCount", waiting[0].location.warp).of(&wrong);
    assert_eq!(waiting, [WaitingWarp { waits_for: WaitsFor::Registers { wanted: 80, free: 16 }, location }]);
}

#[test]
fn a_change_in_the_wrong_direction() {
    for (increases, count) in [(true, 160), (false, 176)] {
        let kernel = kernel(128, |k| {
            k.set_register_budget(168);
            k.section("change", |k| if increases { k.increase_registers(count) } else { k.decrease_registers(count) });
        });
        let found: Fault = fault(run(&kernel, &[], &GlobalMemory::new()));
        let place = at("change", "SetRegisterCount", found.location.warp);
        assert_eq!(found, faulty(FaultKind::RegisterCount { count, current: 168 }, place)(&kernel));
    }
}
