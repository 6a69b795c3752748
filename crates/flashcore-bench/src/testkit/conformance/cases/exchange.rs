//! Exchange between the lanes of a warp: exact, and for shuffles a move of bits.

use flashcore_ir::forms::{ANY, of_registers};
use flashcore_ir::{Op, Operand, ReduceOp, ShuffleMode, Space, Type};

use crate::testkit::conformance::case::{ConformanceCase, Tolerance};
use crate::testkit::conformance::elementwise::{self, Form, any};
use crate::testkit::conformance::inputs::Fill;
use crate::testkit::conformance::writer::{CTAS, THREADS, Writer, at, constant, register};

/// Controls of a shuffle, segment mask above clamp: the whole warp both ways, segments of 16, 8, 4, 2 and 1 lanes both
/// ways, and combinations that no width gives.
const CONTROLS: [u32; 16] = [
    0x001f, 0x0000, 0x101f, 0x1000, 0x181f, 0x1800, 0x1c1f, 0x1c00, 0x1e1f, 0x1e00, 0x1f1f, 0x0007, 0x0013, 0x110a,
    0x0a15, 0x1f00,
];
/// Range of the source lane operand, of which the five low bits count.
const INDICES: u64 = 64;

pub(super) fn add(list: &mut Vec<ConformanceCase>) {
    for mode in ShuffleMode::ALL {
        for control in CONTROLS {
            shuffle(list, *mode, control, Type::U32);
        }
        for ty in Type::ALL.into_iter().filter(|ty| *ty != Type::U32) {
            shuffle(list, *mode, CONTROLS[0], ty);
        }
    }
    for op in ["Vote", "Ballot"].into_iter().flat_map(of_registers) {
        elementwise::add(list, &Form { fill: &|_| Some(Fill::WarpPredicate), ..Form::new(op) });
    }
    for op in of_registers("ReduceWarp") {
        let fill = match op {
            Op::ReduceWarp { op: ReduceOp::And, .. } => Fill::Dense,
            Op::ReduceWarp { op: ReduceOp::Or, .. } => Fill::Sparse,
            _ => Fill::Mixed { operand: 0, of: 2 },
        };
        elementwise::add(list, &Form { fill: &|_| Some(fill), ..Form::new(op) });
    }
    list.push(warp_sync());
}

fn shuffle(list: &mut Vec<ConformanceCase>, mode: ShuffleMode, control: u32, ty: Type) {
    let op = Op::Shuffle { mode, control, ty, d: ANY, index: Operand::Register(ANY), a: any(1) };
    let fill = |name: &str| Some(if name == "index" { Fill::Below(INDICES) } else { Fill::Bits });
    elementwise::add(list, &Form { fill: &fill, launch: (THREADS, CTAS / 2), ..Form::new(op) });
}

/// Values that lanes pass to each other through shared memory, with nothing but a warp barrier in between.
fn warp_sync() -> ConformanceCase {
    let mut writer = Writer::new("WarpSync");
    let value = writer.input("value", Type::U32, Fill::Bits);
    let own = writer.shared_slots(4);
    for distance in [1u32, 2, 4, 8, 16, 31] {
        let changed = writer.add(value, constant(distance));
        writer.store_many(Space::Shared, Type::U32, vec![changed], at(own, 0));
        writer.push(Op::WarpSync {});
        let other = writer.register(Type::U32);
        let bytes = 4 * distance;
        // The slots begin at a multiple of 128, so this stays within those of the warp.
        writer.push(Op::Xor { ty: Type::U32, d: other, a: register(own), b: constant(bytes) });
        let read = writer.load_many(Space::Shared, Type::U32, 1, at(other, 0));
        writer.output(&format!("of lane ^ {distance}"), Type::U32, read[0]);
        writer.push(Op::WarpSync {});
    }
    writer.finish("WarpSync", Tolerance::Bits)
}
