//! The special-function unit: here PTX bounds the error, and the simulator rounds correctly, so machines may be apart
//! by the bound and half a unit in the last place.
//!
//! | operation | the manual's bound | allowed here |
//! |---|---|---|
//! | `ex2.approx.ftz.f32` | 2 ULP from the correctly rounded result | 2 ULP |
//! | `ex2.approx.f16x2` | relative 2^-9.9 | the same and 2^-11, or the least subnormal |
//! | `ex2.approx.ftz.bf16x2` | relative 2^-7 | the same and 2^-8, or the least normal number |
//! | `lg2.approx.ftz.f32` | absolute 2^-22 between 0.5 and 2, relative 2^-22 elsewhere | the same and 2^-24 |
//! | `rcp.approx.ftz.f32` | 1 ULP | 1 ULP |
//! | `rsqrt.approx.ftz.f32` | relative 2^-22.9 | the same and 2^-24 |
//! | `sqrt.approx.ftz.f32` | relative 2^-23 | the same and 2^-24 |
//! | `tanh.approx.f32` | relative 2^-11 | the same and 2^-24, or the least subnormal |
//! | `tanh.approx.f16x2` | absolute 2^-10.987 | the same and 2^-12 |
//! | `tanh.approx.bf16x2` | absolute 2^-8 | the same and 2^-9 |
//!
//! Half a unit in the last place is relative 2^-24, 2^-11 and 2^-8 of `f32`, `f16` and `bf16`; below 1, where `tanh`
//! ends, it is 2^-12 and 2^-9. The least numbers are there because a relative bound means nothing among subnormals.

use flashcore_ir::{Op, Type};

use crate::testkit::conformance::case::{ConformanceCase, Tolerance};
use crate::testkit::conformance::elementwise::{self, ANY, Form, NO_FILL, NextOperand};
use crate::testkit::conformance::inputs::Fill;
use crate::testkit::conformance::writer::{CTAS, THREADS};

/// 2^-9.9, 2^-10.987 and 2^-22.9.
const EX2_HALF: f64 = 0.001_046_653_8;
const TANH_HALF: f64 = 0.000_492_701;
const RSQRT: f64 = 1.277_653_6e-7;

const fn power(exponent: i32) -> f64 {
    f64::from_bits(((1023 + exponent) as u64) << 52)
}

pub(super) fn add(list: &mut Vec<ConformanceCase>) {
    let within = |relative: f64, absolute: f64| Tolerance::Within { relative, absolute };
    for ty in Type::ALL {
        let exp2 = match ty {
            Type::F16x2 => within(EX2_HALF + power(-11), power(-24)),
            Type::Bf16x2 => within(power(-7) + power(-8), power(-126)),
            _ => Tolerance::Ulps { most: 2, flushed: true },
        };
        both(list, ty, exp2, |ty, next| Op::Exp2 { ty, d: ANY, a: next() });
    }
    let ulp = Tolerance::Ulps { most: 1, flushed: true };
    both(list, Type::F32, within(power(-22) + power(-24), power(-22)), |_, next| Op::Log2 { d: ANY, a: next() });
    both(list, Type::F32, ulp, |_, next| Op::Reciprocal { d: ANY, a: next() });
    both(list, Type::F32, within(RSQRT + power(-24), 0.0), |_, next| Op::ReciprocalSqrt { d: ANY, a: next() });
    both(list, Type::F32, within(power(-23) + power(-24), 0.0), |_, next| Op::Sqrt { d: ANY, a: next() });
    for ty in Type::ALL {
        let tanh = match ty {
            Type::F16x2 => within(0.0, TANH_HALF + power(-12)),
            Type::Bf16x2 => within(0.0, power(-8) + power(-9)),
            _ => within(power(-11) + power(-24), power(-149)),
        };
        both(list, ty, tanh, |ty, next| Op::Tanh { ty, d: ANY, a: next() });
    }
}

/// A form with special and random values, and with numbers as attention has them.
fn both(list: &mut Vec<ConformanceCase>, ty: Type, tolerance: Tolerance, make: fn(Type, NextOperand<'_>) -> Op) {
    let form = Form {
        modifiers: ty.to_string(),
        tolerance,
        fill: NO_FILL,
        launch: (THREADS, CTAS),
        make: &|next| make(ty, next),
    };
    elementwise::add(list, &form);
    let wide = Form { modifiers: format!("{ty} of ordinary numbers"), fill: &|_| Some(Fill::Wide), ..form };
    let op = make(ty, &mut || flashcore_ir::Operand::Register(ANY));
    let case = elementwise::write(&wide, "", &[op]);
    if case.verified(flashcore_ir::Arch::Sm120).is_ok() {
        list.push(case);
    }
}
