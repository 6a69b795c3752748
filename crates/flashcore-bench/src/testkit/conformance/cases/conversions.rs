//! Conversions, packing and unpacking: exact. Conversions from 16 bits see every value there is.

use flashcore_ir::forms::of_registers;
use flashcore_ir::{Op, Operand, Rounding, Type};

use crate::testkit::conformance::case::{ConformanceCase, Tolerance};
use crate::testkit::conformance::elementwise::{self, Form};
use crate::testkit::conformance::inputs::Fill;
use crate::testkit::conformance::writer::{CTAS, THREADS, Writer, register};

/// With 128 threads, all values of 16 bits.
const CTAS_FOR_EVERY_HALF: u32 = (1 << 16) / THREADS;

pub(super) fn add(list: &mut Vec<ConformanceCase>) {
    for op in of_registers("Convert") {
        // Which of the bits of a `tf32` mean something is said below.
        let Op::Convert { to, from, .. } = op else { continue };
        if to != Type::Tf32 {
            let narrow = from.bits() == 16;
            let every = |_: &str| narrow.then_some(Fill::Index);
            let launch = (THREADS, if narrow { CTAS_FOR_EVERY_HALF } else { CTAS });
            elementwise::add(list, &Form { tolerance: Tolerance::Exact, fill: &every, launch, ..Form::new(op) });
        }
    }
    list.push(to_tf32());
    elementwise::add_row(list, "ConvertFp8");
    for op in of_registers("WidenFp8") {
        // Every pair of codes.
        let launch = (THREADS, CTAS_FOR_EVERY_HALF);
        let form = Form { tolerance: Tolerance::Exact, fill: &|_| Some(Fill::Index), launch, ..Form::new(op) };
        elementwise::add(list, &form);
    }
    for op in of_registers("ConvertPair") {
        elementwise::add(list, &Form { tolerance: Tolerance::Exact, ..Form::new(op) });
    }
    elementwise::add_row(list, "Pack");
    elementwise::add_row(list, "Unpack");
}

/// The manual leaves the layout of `tf32` in its register open beyond "the lower 13 bits are ignored"; so those that
/// the tensor core reads are compared.
fn to_tf32() -> ConformanceCase {
    const READ_BITS: u32 = 0xffff_e000;
    let mut writer = Writer::new("Convert f32 to tf32 rna");
    let a = writer.input("a", Type::F32, Fill::Mixed { operand: 0, of: 1 });
    let converted = writer.register(Type::Tf32);
    let rounding = Rounding::NearestAway;
    writer.push(Op::Convert { to: Type::Tf32, from: Type::F32, rounding, d: converted, a: register(a) });
    let word = writer.register(Type::U32);
    writer.push(Op::Reinterpret { to: Type::U32, from: Type::Tf32, d: word, a: Operand::Register(converted) });
    let read = writer.mask(word, READ_BITS);
    let number = writer.register(Type::F32);
    writer.push(Op::Reinterpret { to: Type::F32, from: Type::U32, d: number, a: register(read) });
    writer.output("d", Type::F32, number);
    writer.finish("Convert", Tolerance::Exact)
}
