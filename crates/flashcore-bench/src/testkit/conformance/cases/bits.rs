//! Bitwise logic, shifts, bit fields: exact.

use flashcore_ir::{Op, Operand, Type};

use crate::testkit::conformance::case::{ConformanceCase, Tolerance};
use crate::testkit::conformance::elementwise::{self, ANY, Form, NO_FILL, NextOperand};
use crate::testkit::conformance::inputs::Fill;
use crate::testkit::conformance::writer::{CTAS, THREADS};

type MakeTyped = fn(Type, NextOperand<'_>) -> Op;
type Make = fn(NextOperand<'_>) -> Op;

const TYPED: &[MakeTyped] = &[
    |ty, next| Op::And { ty, d: ANY, a: next(), b: next() },
    |ty, next| Op::Or { ty, d: ANY, a: next(), b: next() },
    |ty, next| Op::Xor { ty, d: ANY, a: next(), b: next() },
    |ty, next| Op::Not { ty, d: ANY, a: next() },
    |ty, next| Op::Shl { ty, d: ANY, a: next(), b: next() },
    |ty, next| Op::Shr { ty, d: ANY, a: next(), b: next() },
];

const UNTYPED: &[Make] = &[
    |next| Op::BitFieldExtract { d: ANY, a: next(), position: next(), length: next() },
    |next| Op::BitFieldInsert { d: ANY, a: next(), b: next(), position: next(), length: next() },
    |next| Op::Permute { d: ANY, a: next(), b: next(), selector: next() },
    |next| Op::PopCount { d: ANY, a: next() },
    |next| Op::LeadingZeros { d: ANY, a: next() },
];

/// Shifts reach past 64 bits, fields past 32.
const MOST_SHIFT: u64 = 70;
const MOST_FIELD: u64 = 36;

pub(super) fn add(list: &mut Vec<ConformanceCase>) {
    let launch = (THREADS, CTAS);
    for make in TYPED {
        for ty in Type::ALL {
            let shifts = matches!(make(ty, &mut || Operand::Register(ANY)), Op::Shl { .. } | Op::Shr { .. });
            let count = |name: &str| (shifts && name == "b").then_some(Fill::Count(MOST_SHIFT));
            let form = Form {
                modifiers: ty.to_string(),
                tolerance: Tolerance::Bits,
                fill: &count,
                launch,
                make: &|next| make(ty, next),
            };
            elementwise::add(list, &form);
        }
    }
    truth_tables(list);
    for make in UNTYPED {
        let fields = |name: &str| matches!(name, "position" | "length").then_some(Fill::Count(MOST_FIELD));
        let form = Form { modifiers: String::new(), tolerance: Tolerance::Bits, fill: &fields, launch, make: &make };
        elementwise::add(list, &form);
    }
}

/// All 256 functions of three bits, 32 of them in a kernel.
fn truth_tables(list: &mut Vec<ConformanceCase>) {
    const TABLES_PER_KERNEL: u8 = 32;
    let make = |table: u8, next: NextOperand<'_>| Op::Lop3 { table, d: ANY, a: next(), b: next(), c: next() };
    for first in (0..=255u8).step_by(TABLES_PER_KERNEL.into()) {
        let last = first + (TABLES_PER_KERNEL - 1);
        let form = Form {
            modifiers: format!("tables {first:#04x} to {last:#04x}"),
            tolerance: Tolerance::Bits,
            fill: NO_FILL,
            launch: (THREADS, 1),
            make: &|next| make(first, next),
        };
        let ops: Vec<Op> = (first..=last).map(|table| make(table, &mut || Operand::Register(ANY))).collect();
        list.push(elementwise::write(&form, "", &ops));
    }
    let form = Form {
        modifiers: "table 0x96".to_owned(),
        tolerance: Tolerance::Bits,
        fill: NO_FILL,
        launch: (THREADS, CTAS),
        make: &|next| make(0x96, next),
    };
    elementwise::add(list, &form);
}
