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

use flashcore_ir::forms::of_registers;
use flashcore_ir::{Arch, Op, Type};

use crate::testkit::conformance::case::{ConformanceCase, Tolerance};
use crate::testkit::conformance::elementwise::{self, Form};
use crate::testkit::conformance::inputs::Fill;

/// 2^-9.9, 2^-10.987 and 2^-22.9.
const EX2_HALF: f64 = 0.001_046_653_8;
const TANH_HALF: f64 = 0.000_492_701;
const RSQRT: f64 = 1.277_653_6e-7;

const fn power(exponent: i32) -> f64 {
    f64::from_bits(((1023 + exponent) as u64) << 52)
}

pub(super) fn add(list: &mut Vec<ConformanceCase>) {
    let within = |relative: f64, absolute: f64| Tolerance::Within { relative, absolute };
    let ulps = |most| Tolerance::Ulps { most, flushed: true };
    for row in ["Exp2", "Log2", "Reciprocal", "ReciprocalSqrt", "Sqrt", "Tanh"] {
        for op in of_registers(row) {
            let ty = op.type_choice().map_or(Type::F32, |(ty, _)| ty);
            let tolerance = match (row, ty) {
                ("Exp2", Type::F16x2) => within(EX2_HALF + power(-11), power(-24)),
                ("Exp2", Type::Bf16x2) => within(power(-7) + power(-8), power(-126)),
                ("Exp2", _) => ulps(2),
                ("Log2", _) => within(power(-22) + power(-24), power(-22)),
                ("Reciprocal", _) => ulps(1),
                ("ReciprocalSqrt", _) => within(RSQRT + power(-24), 0.0),
                ("Sqrt", _) => within(power(-23) + power(-24), 0.0),
                (_, Type::F16x2) => within(0.0, TANH_HALF + power(-12)),
                (_, Type::Bf16x2) => within(0.0, power(-8) + power(-9)),
                _ => within(power(-11) + power(-24), power(-149)),
            };
            both(list, ty, tolerance, &op);
        }
    }
}

/// A form with special and random values, and with numbers as attention has them.
fn both(list: &mut Vec<ConformanceCase>, ty: Type, tolerance: Tolerance, op: &Op) {
    elementwise::add(list, &Form { modifiers: ty.to_string(), tolerance, ..Form::new(op.clone()) });
    let modifiers = format!("{ty} of ordinary numbers");
    let wide = Form { modifiers, tolerance, fill: &|_| Some(Fill::Wide), ..Form::new(op.clone()) };
    let case = wide.case();
    if case.verified(Arch::Sm120).is_ok() {
        list.push(case);
    }
}
