//! Several broken rules in one kernel.

use flashcore_ir::types::{U32, U64};
use flashcore_ir::verify::{Place, Rule};
use flashcore_ir::{Arch, Builder, Compare, RegisterId, VerifyError};

use crate::declared;
use crate::support::{at, check};

/// The sections that a report names.
fn within(section: &str, mut error: VerifyError) -> VerifyError {
    if let Place::Statement { section: present, .. } = &mut error.place {
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
