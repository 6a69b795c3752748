//! Guards, choices, loops and the end of a thread, where the lanes of a warp go different ways.

use flashcore_ir::{Compare, Op, RegisterId, ShuffleMode, Type};

use crate::testkit::conformance::case::{ConformanceCase, Tolerance};
use crate::testkit::conformance::inputs::Fill;
use crate::testkit::conformance::writer::{Writer, constant, register};

pub(super) fn add(list: &mut Vec<ConformanceCase>) {
    list.push(guards());
    list.push(nested_choices());
    list.push(trip_counts());
    list.push(uniform_loop());
    list.push(exit_by_guard());
    list.push(exit_in_a_branch());
}

fn add_to(target: RegisterId, bits: u32) -> Op {
    Op::Add { ty: Type::U32, d: target, a: register(target), b: constant(bits) }
}

fn mul_to(target: RegisterId, bits: u32) -> Op {
    Op::Mul { ty: Type::U32, d: target, a: register(target), b: constant(bits) }
}

/// Operations of the lanes for which a predicate holds, and of those for which it does not.
fn guards() -> ConformanceCase {
    let mut writer = Writer::new("Add by guard");
    let value = writer.input("value", Type::U32, Fill::Bits);
    let first = writer.input("first", Type::Pred, Fill::Below(2));
    let second = writer.input("second", Type::Pred, Fill::WarpPredicate);
    writer.push_where(first, false, add_to(value, 1));
    writer.push_where(second, true, mul_to(value, 3));
    let changed = writer.register(Type::Pred);
    writer.push(Op::Xor { ty: Type::Pred, d: changed, a: register(first), b: register(second) });
    writer.push_where(changed, false, add_to(value, 0x1_0000));
    // A predicate written under a guard keeps its value in the other lanes.
    let set =
        Op::SetPredicate { compare: Compare::Gt, ty: Type::U32, d: first, a: register(value), b: constant(1u32 << 31) };
    writer.push_where(second, false, set);
    writer.output("value", Type::U32, value);
    writer.output("first", Type::Pred, first);
    writer.finish("Add", Tolerance::Bits)
}

/// Choices inside choices; after each, all lanes are together again, or the shuffle would not be allowed.
fn nested_choices() -> ConformanceCase {
    let mut writer = Writer::new("Shuffle behind choices");
    let value = writer.input("value", Type::U32, Fill::Bits);
    let outer = writer.input("outer", Type::Pred, Fill::WarpPredicate);
    let inner = writer.input("inner", Type::Pred, Fill::Below(2));
    writer.choice(
        outer,
        false,
        |writer| {
            writer.push(add_to(value, 1));
            writer.choice(
                inner,
                false,
                |writer| writer.push(mul_to(value, 5)),
                |writer| {
                    writer.push(add_to(value, 9));
                },
            );
        },
        |writer| {
            writer.choice(inner, false, |writer| writer.push(mul_to(value, 7)), |_| {});
            writer.push(add_to(value, 11));
        },
    );
    let d = writer.register(Type::U32);
    let (mode, control) = (ShuffleMode::Butterfly, 0x1f);
    writer.push(Op::Shuffle { mode, control, ty: Type::U32, d, index: constant(1u32), a: vec![value] });
    writer.output("value", Type::U32, value);
    writer.output("of the neighbour", Type::U32, d);
    writer.finish("Shuffle", Tolerance::Bits)
}

/// Each lane repeats as often as its input says, some not at all, with a choice inside.
fn trip_counts() -> ConformanceCase {
    let mut writer = Writer::new("SetPredicate of divergent loops");
    let trips = writer.input("trips", Type::U32, Fill::Below(20));
    let value = writer.input("value", Type::U32, Fill::Bits);
    let index = writer.set(Type::U32, 0);
    let goes_on = writer.register(Type::Pred);
    let is_odd = writer.register(Type::Pred);
    let less = |d, a, b| Op::SetPredicate { compare: Compare::Lt, ty: Type::U32, d, a: register(a), b: register(b) };
    writer.repeat(
        goes_on,
        false,
        |writer| writer.push(less(goes_on, index, trips)),
        |writer| {
            let bit = writer.mask(value, 1);
            let b = constant(0u32);
            writer.push(Op::SetPredicate { compare: Compare::Ne, ty: Type::U32, d: is_odd, a: register(bit), b });
            writer.choice(
                is_odd,
                false,
                |writer| {
                    writer.push(mul_to(value, 3));
                    writer.push(add_to(value, 1));
                },
                |writer| {
                    let b = constant(1u32);
                    writer.push(Op::Shr { ty: Type::U32, d: value, a: register(value), b });
                },
            );
            writer.push(add_to(index, 1));
        },
    );
    writer.output("value", Type::U32, value);
    writer.output("index", Type::U32, index);
    writer.finish("SetPredicate", Tolerance::Bits)
}

/// A loop that all lanes of a warp leave together, each warp after another number of rounds.
fn uniform_loop() -> ConformanceCase {
    let mut writer = Writer::new("ReduceWarp in a uniform loop");
    let value = writer.input("value", Type::U32, Fill::Bits);
    let warp = writer.register(Type::U32);
    writer.push(Op::Shr { ty: Type::U32, d: warp, a: register(writer.thread), b: constant(5u32) });
    let trips = writer.mask(warp, 7);
    let index = writer.set(Type::U32, 0);
    let goes_on = writer.register(Type::Pred);
    let sum = writer.register(Type::U32);
    let (ty, compare) = (Type::U32, Compare::Lt);
    writer.repeat(
        goes_on,
        true,
        |writer| writer.push(Op::SetPredicate { compare, ty, d: goes_on, a: register(index), b: register(trips) }),
        |writer| {
            writer.push(Op::ReduceWarp { op: flashcore_ir::ReduceOp::Add, ty, d: sum, a: vec![value] });
            writer.push(Op::Xor { ty, d: value, a: register(value), b: register(sum) });
            writer.push(add_to(index, 1));
        },
    );
    writer.output("value", Type::U32, value);
    writer.finish("ReduceWarp", Tolerance::Bits)
}

/// Some lanes end; what they would have stored stays zero.
fn exit_by_guard() -> ConformanceCase {
    let mut writer = Writer::new("Exit by guard");
    let value = writer.input("value", Type::U32, Fill::Bits);
    let ends = writer.input("ends", Type::Pred, Fill::WarpPredicate);
    let stays = writer.input("stays", Type::Pred, Fill::Below(2));
    writer.output("before", Type::U32, value);
    writer.push_where(ends, false, Op::Exit {});
    writer.output("between", Type::U32, value);
    writer.push_where(stays, true, Op::Exit {});
    writer.output("behind", Type::U32, value);
    writer.finish("Exit", Tolerance::Bits)
}

/// Lanes that end in one branch, and those of the other, which go on after it and through a loop.
fn exit_in_a_branch() -> ConformanceCase {
    let mut writer = Writer::new("Exit in a branch");
    let value = writer.input("value", Type::U32, Fill::Bits);
    let ends = writer.input("ends", Type::Pred, Fill::Below(2));
    let trips = writer.input("trips", Type::U32, Fill::Below(9));
    writer.choice(
        ends,
        false,
        |writer| {
            writer.output("of those that end", Type::U32, value);
            writer.push(Op::Exit {});
        },
        |writer| writer.push(add_to(value, 1)),
    );
    let index = writer.set(Type::U32, 0);
    let (goes_on, leaves) = (writer.register(Type::Pred), writer.register(Type::Pred));
    let (ty, compare) = (Type::U32, Compare::Lt);
    writer.repeat(
        goes_on,
        false,
        |writer| writer.push(Op::SetPredicate { compare, ty, d: goes_on, a: register(index), b: register(trips) }),
        |writer| {
            writer.push(mul_to(value, 3));
            writer.push(add_to(index, 1));
            let b = constant(6u32);
            writer.push(Op::SetPredicate { compare: Compare::Eq, ty, d: leaves, a: register(index), b });
            writer.push_where(leaves, false, Op::Exit {});
        },
    );
    writer.output("of those that stay", Type::U32, value);
    writer.finish("Exit", Tolerance::Bits)
}
