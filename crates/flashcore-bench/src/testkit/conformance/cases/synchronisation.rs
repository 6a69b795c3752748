//! Barriers and fences: values that threads pass to each other through shared memory.

use flashcore_ir::{Compare, FenceScope, Op, Operand, RegisterId, Space, Type};

use crate::testkit::conformance::case::{ConformanceCase, Tolerance};
use crate::testkit::conformance::inputs::Fill;
use crate::testkit::conformance::writer::{CTAS, THREADS, Writer, at, constant, register};

pub(super) fn add(list: &mut Vec<ConformanceCase>) {
    list.push(whole_cta());
    list.push(pairs_of_warps());
    list.push(arrive());
    for scope in FenceScope::ALL {
        list.push(fence(*scope));
    }
}

/// The slot of the thread as far from the end as this one is from the start, of `of` threads from `first` on.
fn mirrored(writer: &mut Writer, base: RegisterId, of: u32) -> RegisterId {
    let position = writer.mask(writer.local, of - 1);
    let group = writer.mask(writer.local, !(of - 1));
    let mirror = writer.register(Type::U32);
    writer.push(Op::Sub { ty: Type::U32, d: mirror, a: constant(of - 1), b: register(position) });
    let index = writer.add(group, register(mirror));
    writer.mad(index, 4, base)
}

/// Stores a word, synchronises by `synchronise`, loads that of the mirrored thread.
fn exchange(writer: &mut Writer, name: &str, of: u32, value: RegisterId, synchronise: impl FnOnce(&mut Writer)) {
    let base = writer.shared(4 * THREADS);
    let own = writer.mad(writer.local, 4, base);
    writer.store_many(Space::Shared, Type::U32, vec![value], at(own, 0));
    synchronise(writer);
    let other = mirrored(writer, base, of);
    let read = writer.load_many(Space::Shared, Type::U32, 1, at(other, 0));
    writer.output(name, Type::U32, read[0]);
}

/// Barriers of the whole CTA, by each number in turn, one after the other.
fn whole_cta() -> ConformanceCase {
    let mut writer = Writer::new("BarrierSync whole CTA");
    let value = writer.input("value", Type::U32, Fill::Bits);
    for barrier in [0u32, 1, 7, 15] {
        let changed = writer.add(value, constant(barrier));
        exchange(&mut writer, &format!("barrier {barrier}"), THREADS, changed, |writer| {
            writer.push(Op::BarrierSync { barrier: constant(barrier), threads: constant(THREADS) });
        });
    }
    writer.finish("BarrierSync", Tolerance::Bits)
}

/// Each pair of warps has a barrier of its own, whose number and count are in registers.
fn pairs_of_warps() -> ConformanceCase {
    const PAIR: u32 = 64;
    let mut writer = Writer::new("BarrierSync pairs of warps");
    let value = writer.input("value", Type::U32, Fill::Bits);
    let pair = writer.register(Type::U32);
    writer.push(Op::Shr { ty: Type::U32, d: pair, a: register(writer.local), b: constant(6u32) });
    let barrier = writer.add(pair, constant(3u32));
    let threads = writer.set(Type::U32, PAIR.into());
    for round in 0..2u32 {
        let changed = writer.add(value, constant(round));
        exchange(&mut writer, &format!("round {round}"), PAIR, changed, |writer| {
            writer.push(Op::BarrierSync { barrier: register(barrier), threads: register(threads) });
        });
    }
    writer.finish("BarrierSync", Tolerance::Bits)
}

/// Two warps produce into one buffer, two consume from it; producers wait only for its being empty.
fn arrive() -> ConformanceCase {
    const ROUNDS: u32 = 4;
    const HALF: u32 = THREADS / 2;
    let (full, empty) = (constant(1u32), constant(2u32));
    let threads: Operand = constant(THREADS);
    let mut writer = Writer::new("BarrierArrive");
    let value = writer.input("value", Type::U32, Fill::Bits);
    let base = writer.shared(4 * HALF);
    let produces = writer.compare(Compare::Lt, writer.local, HALF);
    let position = writer.mask(writer.local, HALF - 1);
    let slot = writer.mad(position, 4, base);
    let output = writer.output_address("consumed", Type::U32, writer.count() * ROUNDS as usize);
    let output = writer.element(output, writer.thread, 4 * ROUNDS);
    writer.choice(
        produces,
        true,
        |writer| {
            for round in 0..ROUNDS {
                if round > 0 {
                    writer.push(Op::BarrierSync { barrier: empty, threads });
                }
                let changed = writer.add(value, constant(round));
                writer.store_many(Space::Shared, Type::U32, vec![changed], at(slot, 0));
                writer.push(Op::BarrierArrive { barrier: full, threads });
            }
        },
        |writer| {
            for round in 0..ROUNDS {
                writer.push(Op::BarrierSync { barrier: full, threads });
                let read = writer.load_many(Space::Shared, Type::U32, 1, at(slot, 0));
                writer.store_many(Space::Global, Type::U32, read, at(output, 4 * round as i32));
                if round + 1 < ROUNDS {
                    writer.push(Op::BarrierArrive { barrier: empty, threads });
                }
            }
        },
    );
    writer.finish("BarrierArrive", Tolerance::Bits)
}

fn fence(scope: FenceScope) -> ConformanceCase {
    let mut writer = Writer::with_launch(format!("Fence {scope}"), THREADS, [CTAS / 2, 1, 1]);
    let value = writer.input("value", Type::U32, Fill::Bits);
    exchange(&mut writer, "mirrored", THREADS, value, |writer| {
        writer.push(Op::Fence { scope });
        writer.barrier();
    });
    writer.finish("Fence", Tolerance::Bits)
}
