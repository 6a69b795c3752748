//! Moves, parameters, special registers, comparisons and selection.

use flashcore_ir::{Op, SpecialRegister, Type};

use crate::testkit::conformance::case::{ConformanceCase, Scalar, Tolerance};
use crate::testkit::conformance::writer::{Writer, constant, register};
use crate::testkit::conformance::{elementwise, inputs};

pub(super) fn add(list: &mut Vec<ConformanceCase>) {
    elementwise::add_row(list, "Mov");
    elementwise::add_row(list, "Reinterpret");
    list.push(special_registers());
    list.push(shared_base());
    list.push(parameters());
    elementwise::add_row(list, "SetPredicate");
    elementwise::add_row(list, "Select");
}

/// Every special register, in a grid of three dimensions and a CTA whose last warp is not full.
fn special_registers() -> ConformanceCase {
    let mut writer = Writer::with_launch("Special", 80, [2, 3, 4]);
    for special in SpecialRegister::ALL.iter().filter(|special| !special.name().starts_with("cluster")) {
        let value = writer.special(*special);
        writer.output(special.name(), Type::U32, value);
    }
    writer.finish("Special", Tolerance::Bits)
}

/// Base address of shared memory: the machine chooses it, but kernels rely on its alignment.
fn shared_base() -> ConformanceCase {
    let mut writer = Writer::new("SharedBase");
    writer.shared(256);
    let base = writer.register(Type::U32);
    writer.push(Op::SharedBase { d: base });
    let below_alignment = writer.mask(base, 127);
    writer.output("base modulo 128", Type::U32, below_alignment);
    let again = writer.register(Type::U32);
    writer.push(Op::SharedBase { d: again });
    let difference = writer.register(Type::U32);
    writer.push(Op::Sub { ty: Type::U32, d: difference, a: register(again), b: register(base) });
    writer.output("difference", Type::U32, difference);
    writer.finish("SharedBase", Tolerance::Bits)
}

/// Parameters of every type, each with several values, in an order that leaves gaps between them.
fn parameters() -> ConformanceCase {
    let mut writer = Writer::with_launch("LoadParam", 32, [1, 1, 1]);
    for position in 0..5 {
        for ty in [Type::U32, Type::U64, Type::F32, Type::S64, Type::S32] {
            let bits = inputs::special_values(ty)[2 + 3 * position];
            let value = writer.scalar(Scalar { ty, bits });
            writer.output(&format!("{ty} {bits:#x}"), ty, value);
        }
    }
    // A value that differs between lanes, so that the outputs are not all alike.
    let lane = writer.special(SpecialRegister::Lane);
    let sum = writer.add(lane, constant(1u32));
    writer.output("lane + 1", Type::U32, sum);
    writer.finish("LoadParam", Tolerance::Bits)
}
