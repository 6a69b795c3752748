//! Conversions, packing and unpacking: exact. Conversions from 16 bits see every value there is.

use flashcore_ir::{Fp8, Op, Operand, Rounding, Type};

use crate::testkit::conformance::case::{ConformanceCase, Tolerance};
use crate::testkit::conformance::elementwise::{self, ANY, Form, NO_FILL, any};
use crate::testkit::conformance::inputs::Fill;
use crate::testkit::conformance::writer::{CTAS, THREADS, Writer, register};

/// With 128 threads, all values of 16 bits.
const CTAS_FOR_EVERY_HALF: u32 = (1 << 16) / THREADS;

pub(super) fn add(list: &mut Vec<ConformanceCase>) {
    for to in Type::ALL {
        for from in Type::ALL {
            for rounding in Rounding::ALL {
                // Which of its bits mean something is said below.
                if to == Type::Tf32 {
                    continue;
                }
                let narrow = from.bits() == 16;
                let every = |_: &str| narrow.then_some(Fill::Index);
                let form = Form {
                    modifiers: format!("{from} to {to} {rounding}"),
                    tolerance: Tolerance::Exact,
                    fill: &every,
                    launch: (THREADS, if narrow { CTAS_FOR_EVERY_HALF } else { CTAS }),
                    make: &|next| Op::Convert { to, from, rounding: *rounding, d: ANY, a: next() },
                };
                elementwise::add(list, &form);
            }
        }
    }
    list.push(to_tf32());
    for ty in Fp8::ALL {
        let narrow = Form {
            modifiers: format!("f32 to {ty}"),
            tolerance: Tolerance::Bits,
            fill: NO_FILL,
            launch: (THREADS, CTAS),
            make: &|next| {
                let high = next();
                Op::ConvertFp8 { to: *ty, d: ANY, high, low: next() }
            },
        };
        elementwise::add(list, &narrow);
        // Every pair of codes.
        let widen = Form {
            modifiers: format!("{ty}"),
            tolerance: Tolerance::Exact,
            fill: &|_| Some(Fill::Index),
            launch: (THREADS, CTAS_FOR_EVERY_HALF),
            make: &|_| Op::WidenFp8 { from: *ty, d: ANY, a: any(1) },
        };
        elementwise::add(list, &widen);
    }
    for to in Type::ALL {
        let form = Form {
            modifiers: to.to_string(),
            tolerance: Tolerance::Exact,
            fill: NO_FILL,
            launch: (THREADS, CTAS),
            make: &|next| Op::ConvertPair { to, d: ANY, high: next(), low: next() },
        };
        elementwise::add(list, &form);
        let pack = Form {
            modifiers: to.to_string(),
            tolerance: Tolerance::Bits,
            fill: NO_FILL,
            launch: (THREADS, CTAS),
            make: &|_| Op::Pack { to, d: ANY, low: any(1), high: any(1) },
        };
        elementwise::add(list, &pack);
        let unpack = Form {
            modifiers: to.to_string(),
            tolerance: Tolerance::Bits,
            fill: NO_FILL,
            launch: (THREADS, CTAS),
            make: &|_| Op::Unpack { from: to, low: ANY, high: ANY, a: any(1) },
        };
        elementwise::add(list, &unpack);
    }
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
