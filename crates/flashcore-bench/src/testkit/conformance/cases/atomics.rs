//! Atomics: each on a place of its own, where the old value is known, and many on few places, where only the sum over
//! all of them is. Exact: integers in any order, and floats because their sums are.

use flashcore_ir::{Address, Arch, Compare, Op, ReduceOp, RegisterId, Space, Type};

use crate::testkit::conformance::case::{ConformanceCase, Tolerance};
use crate::testkit::conformance::inputs::Fill;
use crate::testkit::conformance::writer::{Writer, at, constant, register};

/// Places that the threads of a CTA contend for.
const PLACES: u32 = 32;
/// Atomics of each thread on them.
const ROUNDS: u32 = 4;
const CONTENDING_THREADS: u32 = 256;

/// An atomic that returns the old value, or one that does not.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Atomic,
    Reduce,
}

impl Kind {
    const fn row(self) -> &'static str {
        match self {
            Self::Atomic => "Atomic",
            Self::Reduce => "Reduce",
        }
    }
}

/// Operation, type and space of an atomic.
#[derive(Clone, Copy)]
struct Form {
    kind: Kind,
    space: Space,
    op: ReduceOp,
    ty: Type,
}

impl Form {
    fn name(self, how: &str) -> String {
        format!("{} {} {} {} {how}", self.kind.row(), self.space, self.op, self.ty)
    }

    /// Writes the operation and returns the old value, if it gives one.
    fn push(self, writer: &mut Writer, a: RegisterId, target: Address) -> Option<RegisterId> {
        let Self { space, op, ty, .. } = self;
        match self.kind {
            Kind::Atomic => {
                let d = writer.register(ty);
                writer.push(Op::Atomic { space, op, ty, d, a: vec![a], target });
                Some(d)
            }
            Kind::Reduce => {
                writer.push(Op::Reduce { space, op, ty, a: vec![a], target });
                None
            }
        }
    }
}

pub(super) fn add(list: &mut Vec<ConformanceCase>) {
    for kind in [Kind::Atomic, Kind::Reduce] {
        for space in [Space::Global, Space::Shared] {
            for op in ReduceOp::ALL {
                for ty in Type::ALL.into_iter().filter(|ty| *ty != Type::Pred) {
                    let form = Form { kind, space, op: *op, ty };
                    let alone = alone(form);
                    if alone.verified(Arch::Sm120).is_err() {
                        continue;
                    }
                    list.push(alone);
                    // Which of several values is left after exchanges depends on their order.
                    if *op != ReduceOp::Exchange {
                        list.push(contended(form));
                    }
                }
            }
        }
    }
    list.push(across_ctas());
    for space in [Space::Global, Space::Shared] {
        for ty in [Type::U32, Type::U64] {
            list.push(compare_and_swap(space, ty));
        }
    }
}

/// Address of a thread's own value: in the output, or in shared memory, from which it is copied there in the end.
fn own_place(writer: &mut Writer, space: Space, ty: Type) -> (Address, Option<RegisterId>) {
    match space {
        Space::Global => {
            let base = writer.output_address("memory", ty, writer.count());
            (at(writer.element(base, writer.thread, ty.bytes()), 0), None)
        }
        Space::Shared | Space::Cluster => {
            let slot = writer.shared_slots(8);
            (at(slot, 0), Some(slot))
        }
    }
}

fn alone(form: Form) -> ConformanceCase {
    let Form { space, ty, .. } = form;
    let mut writer = Writer::new(form.name("alone"));
    let old = writer.input("old", ty, Fill::Mixed { operand: 0, of: 2 });
    let a = writer.input("a", ty, Fill::Mixed { operand: 1, of: 2 });
    let (place, shared) = own_place(&mut writer, space, ty);
    writer.store_many(space, ty, vec![old], place);
    let returned = form.push(&mut writer, a, place);
    if shared.is_some() {
        let memory = writer.load_many(space, ty, 1, place);
        writer.output("memory", ty, memory[0]);
    }
    if let Some(returned) = returned {
        writer.output("returned", ty, returned);
    }
    writer.finish(form.kind.row(), Tolerance::Exact)
}

fn contended(form: Form) -> ConformanceCase {
    let Form { space, ty, .. } = form;
    let bytes = ty.bytes();
    let fill = match form.op {
        _ if ty == Type::F32 => Fill::SmallInteger,
        ReduceOp::And => Fill::Dense,
        ReduceOp::Or => Fill::Sparse,
        _ => Fill::Bits,
    };
    let mut writer = Writer::with_launch(form.name("contended"), CONTENDING_THREADS, [1, 1, 1]);
    let total = CONTENDING_THREADS * ROUNDS;
    let old = writer.input_address("old", ty, PLACES as usize, fill);
    let values = writer.input_address("a", ty, total as usize, fill);
    let places = writer.input_address("place", Type::U32, total as usize, Fill::Below(PLACES.into()));
    let memory = writer.output_address("memory", ty, PLACES as usize);
    let target = match space {
        Space::Global => memory,
        Space::Shared | Space::Cluster => writer.shared(PLACES * bytes),
    };
    let place = |writer: &mut Writer, index: RegisterId| match space {
        Space::Global => at(writer.element(target, index, bytes), 0),
        Space::Shared | Space::Cluster => at(writer.mad(index, bytes, target), 0),
    };
    let is_owner = writer.compare(Compare::Lt, writer.local, PLACES);
    writer.choice(
        is_owner,
        false,
        |writer| {
            let source = writer.element(old, writer.local, bytes);
            let value = writer.load(ty, source);
            let own = place(writer, writer.local);
            writer.store_many(space, ty, vec![value], own);
        },
        |_| {},
    );
    writer.barrier();
    for round in 0..ROUNDS {
        let index = writer.add(writer.local, constant(round * CONTENDING_THREADS));
        let (value, chosen) = (writer.element(values, index, bytes), writer.element(places, index, 4));
        let (value, chosen) = (writer.load(ty, value), writer.load(Type::U32, chosen));
        let target = place(&mut writer, chosen);
        form.push(&mut writer, value, target);
    }
    writer.barrier();
    if space == Space::Shared {
        writer.choice(
            is_owner,
            false,
            |writer| {
                let own = place(writer, writer.local);
                let value = writer.load_many(space, ty, 1, own);
                let target = writer.element(memory, writer.local, bytes);
                writer.store_many(Space::Global, ty, value, at(target, 0));
            },
            |_| {},
        );
    }
    writer.finish(form.kind.row(), Tolerance::Exact)
}

/// All CTAs of a grid count into the same places.
fn across_ctas() -> ConformanceCase {
    let form = Form { kind: Kind::Reduce, space: Space::Global, op: ReduceOp::Add, ty: Type::U64 };
    let mut writer = Writer::new(form.name("across CTAs"));
    let value = writer.input("a", Type::U64, Fill::Bits);
    let place = writer.input("place", Type::U32, Fill::Below(PLACES.into()));
    let memory = writer.output_address("memory", Type::U64, PLACES as usize);
    let target = writer.element(memory, place, 8);
    form.push(&mut writer, value, at(target, 0));
    writer.finish("Reduce", Tolerance::Bits)
}

/// About half of the comparisons hold.
fn compare_and_swap(space: Space, ty: Type) -> ConformanceCase {
    let mut writer = Writer::new(format!("CompareAndSwap {space} {ty}"));
    let old = writer.input("old", ty, Fill::Mixed { operand: 0, of: 2 });
    let other = writer.input("other", ty, Fill::Mixed { operand: 1, of: 2 });
    let value = writer.input("value", ty, Fill::Bits);
    let holds = writer.input("holds", Type::Pred, Fill::Below(2));
    let compare = writer.register(ty);
    writer.push(Op::Select { ty, d: compare, a: register(old), b: register(other), condition: vec![holds] });
    let (place, shared) = own_place(&mut writer, space, ty);
    writer.store_many(space, ty, vec![old], place);
    let returned = writer.register(ty);
    let (compare, value) = (vec![compare], vec![value]);
    writer.push(Op::CompareAndSwap { space, ty, d: returned, compare, value, target: place });
    if shared.is_some() {
        let memory = writer.load_many(space, ty, 1, place);
        writer.output("memory", ty, memory[0]);
    }
    writer.output("returned", ty, returned);
    writer.finish("CompareAndSwap", Tolerance::Bits)
}
