//! Every register is written before it is read, on every path.

mod support;

use flashcore_ir::types::{Pred, U32};
use flashcore_ir::verify::Rule;
use flashcore_ir::{Arch, Builder, Compare, Reg, RegisterId, VerifyError};

use support::{at, check};

/// The lane is register 0, `low` (the lane is below 16) register 1, and `x`, which nothing has written, register 2.
struct Start {
    k: Builder,
    low: Reg<Pred>,
    x: Reg<U32>,
}

fn start() -> Start {
    let mut k = Builder::new("kernel", 32);
    let lane = k.lane();
    let low = k.compare(Compare::Lt, lane, 16u32);
    let x = k.register();
    Start { k, low, x }
}

const LOW: RegisterId = RegisterId(1);
const X: RegisterId = RegisterId(2);

/// Nothing is wrong with the kernel.
#[track_caller]
fn accepted(k: Builder) {
    check(k.finish(), Arch::Sm80, &[]);
}

#[track_caller]
fn refused(k: Builder, errors: &[VerifyError]) {
    check(k.finish(), Arch::Sm80, errors);
}

fn unwritten(register: RegisterId) -> Rule {
    Rule::ReadBeforeWrite { register }
}

#[test]
fn written_by_both_arms() {
    let Start { mut k, low, x } = start();
    k.if_else(low, |k| k.set(x, 1u32), |k| k.set(x, 2u32));
    k.add(x, 1u32);
    accepted(k);
}

#[test]
fn written_by_then_alone() {
    let Start { mut k, low, x } = start();
    k.if_then(low, |k| k.set(x, 1u32));
    let line = line!() + 1;
    k.add(x, 1u32);
    refused(k, &[at(line, 3, "Add ty=U32 d=%3, a=%2, b=0x1", unwritten(X))]);
}

#[test]
fn written_by_otherwise_alone() {
    let Start { mut k, low, x } = start();
    k.if_else(low, |_| {}, |k| k.set(x, 1u32));
    let line = line!() + 1;
    k.add(x, 1u32);
    refused(k, &[at(line, 3, "Add ty=U32 d=%3, a=%2, b=0x1", unwritten(X))]);
}

/// A write in one arm is not seen in the other.
#[test]
fn written_by_then_and_read_by_otherwise() {
    let Start { mut k, low, x } = start();
    let line = line!() + 1;
    k.if_else(low, |k| k.set(x, 1u32), |k| k.add_to(x, 1u32));
    refused(k, &[at(line, 3, "Add ty=U32 d=%2, a=%2, b=0x1", unwritten(X))]);
}

#[test]
fn read_within_the_arm_that_wrote_it() {
    let Start { mut k, low, x } = start();
    k.if_then(low, |k| {
        k.set(x, 1u32);
        k.add_to(x, 1u32);
    });
    accepted(k);
}

#[test]
fn written_by_both_arms_of_a_choice_within_both_arms() {
    let Start { mut k, low, x } = start();
    k.if_else_uniform(low, |k| k.if_else(low, |k| k.set(x, 1u32), |k| k.set(x, 2u32)), |k| k.set(x, 3u32));
    k.add(x, 1u32);
    accepted(k);
}

/// A read is reported once on the path that makes it; a path that has not made it has its own.
#[test]
fn reported_once_on_each_path() {
    let Start { mut k, low, x } = start();
    let lines = [line!() + 2, line!() + 5];
    k.if_then(low, |k| {
        k.add(x, 1u32);
        k.add(x, 2u32);
    });
    k.add(x, 3u32);
    k.add(x, 4u32);
    refused(
        k,
        &[
            at(lines[0], 2, "Add ty=U32 d=%3, a=%2, b=0x1", unwritten(X)),
            at(lines[1], 4, "Add ty=U32 d=%5, a=%2, b=0x3", unwritten(X)),
        ],
    );
}

/// One report though two operands are the same register.
#[test]
fn read_twice_by_one_operation() {
    let Start { mut k, x, .. } = start();
    let line = line!() + 1;
    k.add(x, x);
    refused(k, &[at(line, 2, "Add ty=U32 d=%3, a=%2, b=%2", unwritten(X))]);
}

#[test]
fn written_by_the_header_of_a_loop() {
    let Start { mut k, low, x } = start();
    k.while_lanes(
        |k| {
            k.set(x, 1u32);
            low
        },
        |k| k.add_to(x, 1u32),
    );
    k.add(x, 1u32);
    accepted(k);
}

/// The body may not run.
#[test]
fn written_by_the_body_of_a_loop_and_read_after_it() {
    let Start { mut k, low, x } = start();
    k.while_lanes(|_| low, |k| k.set(x, 1u32));
    let line = line!() + 1;
    k.add(x, 1u32);
    refused(k, &[at(line, 3, "Add ty=U32 d=%3, a=%2, b=0x1", unwritten(X))]);
}

/// The header runs before the body does.
#[test]
fn written_by_the_body_of_a_loop_and_read_by_its_header() {
    let Start { mut k, x, .. } = start();
    let line = line!() + 1;
    k.while_lanes(|k| k.compare(Compare::Lt, x, 4u32), |k| k.set(x, 4u32));
    refused(k, &[at(line, 2, "SetPredicate compare=Lt ty=U32 d=%3, a=%2, b=0x4", unwritten(X))]);
}

/// The body runs once before it runs again.
#[test]
fn read_by_the_body_of_a_loop_before_it_writes() {
    let Start { mut k, low, x } = start();
    let line = line!() + 3;
    k.while_lanes(
        |_| low,
        |k| {
            k.add(x, 1u32);
            k.set(x, 1u32);
        },
    );
    refused(k, &[at(line + 1, 2, "Add ty=U32 d=%3, a=%2, b=0x1", unwritten(X))]);
}

#[test]
fn written_and_read_by_the_body_of_a_loop() {
    let Start { mut k, low, x } = start();
    k.while_lanes(
        |_| low,
        |k| {
            k.set(x, 1u32);
            k.add_to(x, 1u32);
        },
    );
    accepted(k);
}

#[test]
fn written_before_a_loop_that_counts() {
    let Start { mut k, x, .. } = start();
    k.set(x, 0u32);
    k.for_uniform(0u32, 8u32, 1u32, |k, index: Reg<U32>| k.add_to(x, index));
    k.add(x, 1u32);
    accepted(k);
}

/// Lanes for which the guard does not hold skip the write.
#[test]
fn written_under_a_guard() {
    let Start { mut k, low, x } = start();
    k.when(low, |k| k.set(x, 1u32));
    let line = line!() + 1;
    k.add(x, 1u32);
    refused(k, &[at(line, 3, "Add ty=U32 d=%3, a=%2, b=0x1", unwritten(X))]);
}

/// The analysis does not compare guards.
#[test]
fn written_under_a_guard_and_its_opposite() {
    let Start { mut k, low, x } = start();
    k.when(low, |k| k.set(x, 1u32));
    k.unless(low, |k| k.set(x, 2u32));
    let line = line!() + 1;
    k.add(x, 1u32);
    refused(k, &[at(line, 4, "Add ty=U32 d=%3, a=%2, b=0x1", unwritten(X))]);
}

#[test]
fn written_under_a_guard_after_a_full_write() {
    let Start { mut k, low, x } = start();
    k.set(x, 0u32);
    k.when(low, |k| k.set(x, 1u32));
    k.add(x, 1u32);
    accepted(k);
}

#[test]
fn read_under_a_guard() {
    let Start { mut k, low, x } = start();
    let line = line!() + 1;
    k.when(low, |k| k.add_to(x, 1u32));
    refused(k, &[at(line, 2, "Add ty=U32 d=%2, a=%2, b=0x1", unwritten(X))]);
}

/// A guard is read, and before the operands are.
#[test]
fn unwritten_guard() {
    let mut k = Builder::new("kernel", 32);
    let (guard, x) = (k.register::<Pred>(), k.register::<U32>());
    let line = line!() + 1;
    k.unless(guard, |k| k.add_to(x, 1u32));
    let text = "Add ty=U32 d=%1, a=%1, b=0x1";
    refused(k, &[at(line, 0, text, unwritten(RegisterId(0))), at(line, 0, text, unwritten(RegisterId(1)))]);
}

#[test]
fn unwritten_condition_of_a_choice() {
    let mut k = Builder::new("kernel", 32);
    let condition = k.register::<Pred>();
    k.lane();
    let line = line!() + 1;
    k.if_uniform(condition, |_| {});
    k.if_then(condition, |_| {});
    refused(k, &[at(line, 1, "if", unwritten(RegisterId(0)))]);
}

#[test]
fn unwritten_condition_of_a_loop() {
    let mut k = Builder::new("kernel", 32);
    let condition = k.register::<Pred>();
    let line = line!() + 1;
    k.while_lanes(
        |k| {
            k.lane();
            condition
        },
        |k| {
            k.set(condition, condition);
        },
    );
    refused(k, &[at(line, 1, "loop", unwritten(RegisterId(0)))]);
}

/// The body begins with all lanes that the condition let in.
#[test]
fn condition_written_by_the_header() {
    let Start { mut k, low, x } = start();
    let again = k.register::<Pred>();
    k.set(x, 0u32);
    k.while_lanes(
        |k| {
            k.set(again, low);
            again
        },
        |k| k.when(again, |k| k.add_to(x, 1u32)),
    );
    accepted(k);
}

/// The condition of a choice may be overwritten within it.
#[test]
fn condition_read_before_the_arms_write_it() {
    let Start { mut k, low, .. } = start();
    let line = line!() + 2;
    let fresh = k.register::<Pred>();
    k.if_then(fresh, |k| k.set(fresh, low));
    refused(k, &[at(line, 2, "if", unwritten(RegisterId(3)))]);
    assert_eq!(low.id(), LOW);
}

/// Lanes that have left do not read.
#[test]
fn an_arm_that_exits_writes_everything() {
    let Start { mut k, low, x } = start();
    k.if_else(low, |k| k.exit(), |k| k.set(x, 1u32));
    k.add(x, 1u32);
    accepted(k);
}

#[test]
fn an_arm_that_exits_under_a_guard_writes_nothing() {
    let Start { mut k, low, x } = start();
    k.if_else(low, |k| k.when(low, |k| k.exit()), |k| k.set(x, 1u32));
    let line = line!() + 1;
    k.add(x, 1u32);
    refused(k, &[at(line, 4, "Add ty=U32 d=%3, a=%2, b=0x1", unwritten(X))]);
}

/// A loop whose body exits may not run it.
#[test]
fn a_body_that_exits_writes_nothing_after_the_loop() {
    let Start { mut k, low, x } = start();
    k.while_lanes(|_| low, |k| k.exit());
    let line = line!() + 1;
    k.add(x, 1u32);
    refused(k, &[at(line, 3, "Add ty=U32 d=%3, a=%2, b=0x1", unwritten(X))]);
}

/// An operation reads its operands before it writes its results, and reads the base of an address.
#[test]
fn addresses_and_vectors_are_read() {
    let mut k = Builder::new("kernel", 32);
    let base = k.register::<U32>();
    let values = [k.copy(0u32), k.register(), k.register()];
    let line = line!() + 1;
    k.store_shared(base, &values[..2]);
    let other = k.register::<U32>();
    k.load_shared::<U32>(other, 2);
    let store = "Store space=Shared cache=WriteBack ty=U32 count=2 a=%1, a=%2, target=[%0]";
    let load = "Load space=Shared cache=All prefetch=None ty=U32 count=2 d=%5, d=%6, source=[%4]";
    refused(
        k,
        &[
            at(line, 1, store, unwritten(RegisterId(2))),
            at(line, 1, store, unwritten(RegisterId(0))),
            at(line + 2, 2, load, unwritten(RegisterId(4))),
        ],
    );
}
