//! Arithmetic. PTX defines all of it exactly, down to the bits, except which NaN comes out.

use flashcore_ir::{Op, Operand, Type};

use crate::testkit::conformance::case::{ConformanceCase, Tolerance};
use crate::testkit::conformance::elementwise::{self, ANY, Form, NextOperand};
use crate::testkit::conformance::inputs::Fill;
use crate::testkit::conformance::writer::{CTAS, THREADS};

/// Makes an operation of a type.
type Make = fn(Type, NextOperand<'_>) -> Op;

const OPERATIONS: &[Make] = &[
    |ty, next| Op::Add { ty, d: ANY, a: next(), b: next() },
    |ty, next| Op::Sub { ty, d: ANY, a: next(), b: next() },
    |ty, next| Op::Mul { ty, d: ANY, a: next(), b: next() },
    |ty, next| Op::MulHigh { ty, d: ANY, a: next(), b: next() },
    |ty, next| Op::MulWide { ty, d: ANY, a: next(), b: next() },
    |ty, next| Op::Mad { ty, d: ANY, a: next(), b: next(), c: next() },
    |ty, next| Op::MadWide { ty, d: ANY, a: next(), b: next(), c: next() },
    |ty, next| Op::Fma { ty, d: ANY, a: next(), b: next(), c: next() },
    |ty, next| Op::Div { ty, d: ANY, a: next(), b: next() },
    |ty, next| Op::Rem { ty, d: ANY, a: next(), b: next() },
    |ty, next| Op::Min { ty, d: ANY, a: next(), b: next() },
    |ty, next| Op::Max { ty, d: ANY, a: next(), b: next() },
    |ty, next| Op::Neg { ty, d: ANY, a: next() },
    |ty, next| Op::Abs { ty, d: ANY, a: next() },
];

pub(super) fn add(list: &mut Vec<ConformanceCase>) {
    for make in OPERATIONS {
        for ty in Type::ALL {
            // What an integer divided by zero gives PTX leaves to the machine: that is a case of its own.
            let probe = make(ty, &mut || Operand::Register(ANY));
            let divides = matches!(probe, Op::Div { .. } | Op::Rem { .. }) && ty != Type::F32;
            let divisor = |name: &str| (divides && name == "b").then_some(Fill::NonZero { operand: 1, of: 2 });
            let form = Form {
                modifiers: ty.to_string(),
                tolerance: Tolerance::Exact,
                fill: &divisor,
                launch: (THREADS, CTAS),
                make: &|next| make(ty, next),
            };
            elementwise::add(list, &form);
        }
    }
    by_zero(list, |next| Op::Div { ty: Type::U32, d: ANY, a: next(), b: next() });
    by_zero(list, |next| Op::Rem { ty: Type::U32, d: ANY, a: next(), b: next() });
    nearly_cancelling(list);
}

/// PTX: "Division by zero yields an unspecified, machine-specific value." Our table promises one, so it is asked for.
fn by_zero(list: &mut Vec<ConformanceCase>, make: fn(NextOperand<'_>) -> Op) {
    let zero = |name: &str| (name == "b").then_some(Fill::Among(&[0]));
    let form = Form {
        modifiers: "u32 by zero".to_owned(),
        tolerance: Tolerance::Bits,
        fill: &zero,
        launch: (THREADS, CTAS),
        make: &make,
    };
    let op = make(&mut || Operand::Register(ANY));
    list.push(elementwise::write(&form, "", &[op]));
}

/// Sums of numbers of like magnitude, where the rounding of a fused operation shows.
fn nearly_cancelling(list: &mut Vec<ConformanceCase>) {
    for ty in [Type::F32, Type::F16x2, Type::Bf16x2] {
        for (name, fill) in [("of normal numbers", Fill::Normal), ("of tiny numbers", Fill::Tiny)] {
            let fill = |_: &str| Some(fill);
            let form = Form {
                modifiers: format!("{ty} {name}"),
                tolerance: Tolerance::Exact,
                fill: &fill,
                launch: (THREADS, CTAS),
                make: &|next| Op::Fma { ty, d: ANY, a: next(), b: next(), c: next() },
            };
            let op = (form.make)(&mut || Operand::Register(ANY));
            list.push(elementwise::write(&form, "", &[op]));
        }
    }
}
