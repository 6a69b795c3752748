//! Several broken rules in one kernel.

use flashcore_ir::types::{U32, U64};
use flashcore_ir::verify::{Location, Rule};
use flashcore_ir::{Arch, Builder, Compare, RegisterId, VerifyError};

use crate::declared;
use crate::support::{at, check};

/// The sections that a report names.
fn within(section: &str, mut error: VerifyError) -> VerifyError {
    if let Location::Statement { section: present, .. } = &mut error.location {
        section.clone_into(present);
    }
    error
}

/// Declarations first, then statements in program order with all that each breaks, then the assignments.
#[test]
fn all_of_them_are_reported() {
    let mut k = Builder::new("kernel", 0);
    k.set_register_budget(8);
    let rows = k.parameter::<U64>("1st");
    let unwritten = k.register::<U32>();
    let first = k.compare(Compare::Eq, unwritten, 0u32);
    let lines = [line!() + 3, line!() + 6, line!() + 8];
    k.section("scores", |k| {
        k.section("mask", |k| {
            k.when(first, |k| k.barrier_sync(16u32, 33u32));
        });
        k.if_then(first, |k| {
            k.load::<U64>(rows, 3);
        });
        k.bulk_commit();
    });
    let compared = lines[0] - 4;
    let barrier = "BarrierSync barrier=0x10, threads=0x21";
    let load = "Load space=Global cache=All prefetch=None ty=U64 count=3 d=%3, d=%4, d=%5, source=[%0]";
    let hopper = Rule::NotOnArchitecture { arch: Arch::Sm86, since: flashcore_ir::target::HOPPER };
    check(
        k.finish(),
        Arch::Sm86,
        &[
            declared(Rule::Threads { threads: 0 }),
            declared(Rule::RegisterBudget { budget: 8, threads: 0 }),
            declared(Rule::Name { name: "1st".to_owned() }),
            within("scores / mask", at(lines[0], 2, barrier, Rule::GuardedCollective)),
            within("scores / mask", at(lines[0], 2, barrier, Rule::BarrierNumber { barrier: 16 })),
            within("scores / mask", at(lines[0], 2, barrier, Rule::BarrierThreads { threads: 33, of: 0 })),
            within("scores", at(lines[1], 3, load, Rule::VectorSize { count: 3, bytes: 8 })),
            within("scores", at(lines[2], 4, "BulkCommit", hopper)),
            at(
                compared,
                1,
                "SetPredicate compare=Eq ty=U32 d=%2, a=%1, b=0x0",
                Rule::ReadBeforeWrite { register: RegisterId(1) },
            ),
        ],
    );
}

/// Each sequence of statements, with its mistake counted among the instructions before it.
#[test]
fn every_sequence_is_visited() {
    let mut k = Builder::new("kernel", 32);
    let first = line!();
    k.barrier_sync(20u32, 32u32);
    let p = k.compare(Compare::Eq, 0u32, 0u32);
    k.if_else(p, |k| k.barrier_sync(21u32, 32u32), |k| k.barrier_sync(22u32, 32u32));
    k.while_uniform(
        |k| {
            k.barrier_sync(23u32, 32u32);
            p
        },
        |k| k.barrier_sync(24u32, 32u32),
    );
    k.barrier_sync(25u32, 32u32);
    let error = |line, index, barrier: u64| {
        let text = format!("BarrierSync barrier={barrier:#x}, threads=0x20");
        at(first + line, index, &text, Rule::BarrierNumber { barrier })
    };
    check(
        k.finish(),
        Arch::Sm80,
        &[error(1, 0, 20), error(3, 2, 21), error(3, 3, 22), error(6, 4, 23), error(9, 5, 24), error(11, 6, 25)],
    );
}
