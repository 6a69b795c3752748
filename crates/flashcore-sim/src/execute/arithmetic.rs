//! Moves, comparisons, arithmetic and special functions.

use flashcore_ir::{Compare, Operand, RegisterId, Type};

use crate::error::Stop;
use crate::execute::lanes::Lanes;
use crate::numeric::{Bf16, F16, add_to_odd, flush, fma, maximum, minimum};
use crate::state::registers::{LANES, Wides, Words};

type Outcome = Result<(), Stop>;

/// `d = a`, also for [`flashcore_ir::Op::Reinterpret`], which changes no bits.
pub(crate) fn copy(lanes: &mut Lanes<'_, '_>, ty: Type, d: RegisterId, a: Operand) {
    match ty {
        Type::Pred => {
            let holds = lanes.registers.predicate(a);
            lanes.set_predicate(d, holds);
        }
        Type::U64 | Type::S64 => lanes.wides1(d, a, |a| a),
        Type::U16 | Type::F16 | Type::Bf16 => lanes.words1(d, a, |a| a & 0xffff),
        Type::U32 | Type::S32 | Type::F32 | Type::Tf32 | Type::F16x2 | Type::Bf16x2 => lanes.words1(d, a, |a| a),
    }
}

/// The lanes of a mask for which `f` holds.
fn bits(f: impl Fn(usize) -> bool) -> u32 {
    (0..LANES).fold(0, |mask, lane| mask | u32::from(f(lane)) << lane)
}

fn ordering<T: PartialOrd>(compare: Compare) -> fn(&T, &T) -> bool {
    match compare {
        Compare::Eq => |a, b| a == b,
        Compare::Ne => |a, b| a != b,
        Compare::Lt => |a, b| a < b,
        Compare::Le => |a, b| a <= b,
        Compare::Gt => |a, b| a > b,
        Compare::Ge => |a, b| a >= b,
    }
}

/// `d = a compare b`.
pub(crate) fn set_predicate(
    lanes: &mut Lanes<'_, '_>,
    compare: Compare,
    ty: Type,
    d: RegisterId,
    [a, b]: [Operand; 2],
) -> Outcome {
    fn words<T: PartialOrd>(compare: Compare, a: &Words, b: &Words, view: fn(u32) -> T) -> u32 {
        let holds = ordering(compare);
        bits(|lane| holds(&view(a[lane]), &view(b[lane])))
    }
    fn wides<T: PartialOrd>(compare: Compare, a: &Wides, b: &Wides, view: fn(u64) -> T) -> u32 {
        let holds = ordering(compare);
        bits(|lane| holds(&view(a[lane]), &view(b[lane])))
    }
    let holds = match ty {
        Type::U32 => words(compare, &lanes.word(a), &lanes.word(b), |a| a),
        Type::S32 => words(compare, &lanes.word(a), &lanes.word(b), |a| a as i32),
        Type::F32 => words(compare, &lanes.word(a), &lanes.word(b), f32::from_bits),
        Type::U64 => wides(compare, &lanes.wide(a), &lanes.wide(b), |a| a),
        Type::S64 => wides(compare, &lanes.wide(a), &lanes.wide(b), |a| a as i64),
        Type::Pred | Type::U16 | Type::F16 | Type::Bf16 | Type::Tf32 | Type::F16x2 | Type::Bf16x2 => {
            return Err(Stop::no_such_form("SetPredicate", ty));
        }
    };
    lanes.set_predicate(d, holds);
    Ok(())
}

/// `d = condition ? a : b`.
pub(crate) fn select(
    lanes: &mut Lanes<'_, '_>,
    ty: Type,
    d: RegisterId,
    [a, b]: [Operand; 2],
    condition: RegisterId,
) -> Outcome {
    let holds = lanes.registers.predicate_of(condition);
    match ty {
        Type::U32 | Type::S32 | Type::F32 => {
            let (a, b) = (lanes.word(a), lanes.word(b));
            lanes.set_word(d, &core::array::from_fn(|lane| if holds >> lane & 1 == 1 { a[lane] } else { b[lane] }));
        }
        Type::U64 | Type::S64 => {
            let (a, b) = (lanes.wide(a), lanes.wide(b));
            lanes.set_wide(d, &core::array::from_fn(|lane| if holds >> lane & 1 == 1 { a[lane] } else { b[lane] }));
        }
        Type::Pred | Type::U16 | Type::F16 | Type::Bf16 | Type::Tf32 | Type::F16x2 | Type::Bf16x2 => {
            return Err(Stop::no_such_form("Select", ty));
        }
    }
    Ok(())
}

/// An operation on two numbers of one type, by the function for each kind of type.
macro_rules! binary {
    ($(#[$doc:meta])* $name:ident = $text:literal {
        unsigned: $unsigned:expr, signed: $signed:expr, wide: $wide:expr, signed_wide: $signed_wide:expr,
        single: $single:expr, half: $half:expr $(,)?
    }) => {
        $(#[$doc])*
        pub(crate) fn $name(lanes: &mut Lanes<'_, '_>, ty: Type, d: RegisterId, ab: [Operand; 2]) -> Outcome {
            match ty {
                Type::U32 => lanes.words2(d, ab, $unsigned),
                Type::S32 => lanes.words2(d, ab, $signed),
                Type::U64 => lanes.wides2(d, ab, $wide),
                Type::S64 => lanes.wides2(d, ab, $signed_wide),
                Type::F32 => lanes.floats2(d, ab, $single),
                Type::F16x2 => lanes.pairs2::<F16>(d, ab, $half),
                Type::Bf16x2 => lanes.pairs2::<Bf16>(d, ab, $half),
                Type::Pred | Type::U16 | Type::F16 | Type::Bf16 | Type::Tf32 => {
                    return Err(Stop::no_such_form($text, ty));
                }
            }
            Ok(())
        }
    };
}

binary! {
    /// `d = a + b`.
    add = "Add" {
        unsigned: u32::wrapping_add, signed: u32::wrapping_add, wide: u64::wrapping_add, signed_wide: u64::wrapping_add,
        single: |a, b| a + b, half: add_to_odd,
    }
}
binary! {
    /// `d = a - b`.
    sub = "Sub" {
        unsigned: u32::wrapping_sub, signed: u32::wrapping_sub, wide: u64::wrapping_sub, signed_wide: u64::wrapping_sub,
        single: |a, b| a - b, half: |a, b| add_to_odd(a, -b),
    }
}
binary! {
    /// `d = a * b`.
    mul = "Mul" {
        unsigned: u32::wrapping_mul, signed: u32::wrapping_mul, wide: u64::wrapping_mul, signed_wide: u64::wrapping_mul,
        single: |a, b| a * b, half: |a, b| a * b,
    }
}
binary! {
    /// The smaller of `a` and `b`.
    min = "Min" {
        unsigned: u32::min, signed: |a, b| (a as i32).min(b as i32) as u32,
        wide: u64::min, signed_wide: |a, b| (a as i64).min(b as i64) as u64,
        single: minimum, half: |a, b| minimum(a as f32, b as f32).into(),
    }
}
binary! {
    /// The larger of `a` and `b`.
    max = "Max" {
        unsigned: u32::max, signed: |a, b| (a as i32).max(b as i32) as u32,
        wide: u64::max, signed_wide: |a, b| (a as i64).max(b as i64) as u64,
        single: maximum, half: |a, b| maximum(a as f32, b as f32).into(),
    }
}

/// The high half of `a * b`.
pub(crate) fn mul_high(lanes: &mut Lanes<'_, '_>, ty: Type, d: RegisterId, ab: [Operand; 2]) -> Outcome {
    let product = wide_product("MulHigh", ty)?;
    lanes.words2(d, ab, |a, b| (product(a, b) >> 32) as u32);
    Ok(())
}

/// The full product of 32-bit numbers, by their signedness.
fn wide_product(operation: &str, ty: Type) -> Result<fn(u32, u32) -> u64, Stop> {
    match ty {
        Type::U32 => Ok(|a, b| u64::from(a) * u64::from(b)),
        Type::S32 => Ok(|a, b| (i64::from(a as i32) * i64::from(b as i32)) as u64),
        Type::Pred
        | Type::U16
        | Type::F16
        | Type::Bf16
        | Type::F32
        | Type::Tf32
        | Type::F16x2
        | Type::Bf16x2
        | Type::U64
        | Type::S64 => Err(Stop::no_such_form(operation, ty)),
    }
}

/// `d = a * b + c`, where product and sum are 64 bits wide; without `c`, the product.
pub(crate) fn mad_wide(
    lanes: &mut Lanes<'_, '_>,
    ty: Type,
    d: RegisterId,
    [a, b]: [Operand; 2],
    c: Operand,
) -> Outcome {
    let product = wide_product("MadWide", ty)?;
    let (a, b, c) = (lanes.word(a), lanes.word(b), lanes.wide(c));
    lanes.set_wide(d, &core::array::from_fn(|lane| product(a[lane], b[lane]).wrapping_add(c[lane])));
    Ok(())
}

/// `d = a * b + c`, the low half.
pub(crate) fn mad(lanes: &mut Lanes<'_, '_>, ty: Type, d: RegisterId, abc: [Operand; 3]) -> Outcome {
    match ty {
        Type::U32 | Type::S32 => lanes.words3(d, abc, |a, b, c| a.wrapping_mul(b).wrapping_add(c)),
        Type::U64 | Type::S64 => lanes.wides3(d, abc, |a, b, c| a.wrapping_mul(b).wrapping_add(c)),
        Type::Pred | Type::U16 | Type::F16 | Type::Bf16 | Type::F32 | Type::Tf32 | Type::F16x2 | Type::Bf16x2 => {
            return Err(Stop::no_such_form("Mad", ty));
        }
    }
    Ok(())
}

/// `d = a * b + c`, rounded once.
pub(crate) fn fused(lanes: &mut Lanes<'_, '_>, ty: Type, d: RegisterId, abc: [Operand; 3]) -> Outcome {
    match ty {
        Type::F32 => lanes.floats3(d, abc, fma),
        Type::F16x2 => lanes.pairs3::<F16>(d, abc, |a, b, c| add_to_odd(a * b, c)),
        Type::Bf16x2 => lanes.pairs3::<Bf16>(d, abc, |a, b, c| add_to_odd(a * b, c)),
        Type::Pred
        | Type::U16
        | Type::F16
        | Type::Bf16
        | Type::Tf32
        | Type::U32
        | Type::S32
        | Type::U64
        | Type::S64 => return Err(Stop::no_such_form("Fma", ty)),
    }
    Ok(())
}

/// `d = a / b`.
pub(crate) fn div(lanes: &mut Lanes<'_, '_>, ty: Type, d: RegisterId, ab: [Operand; 2]) -> Outcome {
    match ty {
        Type::U32 => lanes.words2(d, ab, |a, b| a.checked_div(b).unwrap_or(u32::MAX)),
        Type::F32 => lanes.floats2(d, ab, |a, b| a / b),
        Type::Pred
        | Type::U16
        | Type::F16
        | Type::Bf16
        | Type::Tf32
        | Type::S32
        | Type::F16x2
        | Type::Bf16x2
        | Type::U64
        | Type::S64 => return Err(Stop::no_such_form("Div", ty)),
    }
    Ok(())
}

/// `d = a mod b`.
pub(crate) fn rem(lanes: &mut Lanes<'_, '_>, ty: Type, d: RegisterId, ab: [Operand; 2]) -> Outcome {
    if ty != Type::U32 {
        return Err(Stop::no_such_form("Rem", ty));
    }
    lanes.words2(d, ab, |a, b| a.checked_rem(b).unwrap_or(u32::MAX));
    Ok(())
}

/// `d = -a`.
pub(crate) fn neg(lanes: &mut Lanes<'_, '_>, ty: Type, d: RegisterId, a: Operand) -> Outcome {
    match ty {
        Type::S32 => lanes.words1(d, a, u32::wrapping_neg),
        Type::F32 => lanes.words1(d, a, |a| a ^ 0x8000_0000),
        Type::F16x2 | Type::Bf16x2 => lanes.words1(d, a, |a| a ^ 0x8000_8000),
        Type::Pred | Type::U16 | Type::F16 | Type::Bf16 | Type::Tf32 | Type::U32 | Type::U64 | Type::S64 => {
            return Err(Stop::no_such_form("Neg", ty));
        }
    }
    Ok(())
}

/// `d = |a|`.
pub(crate) fn abs(lanes: &mut Lanes<'_, '_>, ty: Type, d: RegisterId, a: Operand) -> Outcome {
    match ty {
        Type::S32 => lanes.words1(d, a, |a| (a as i32).wrapping_abs() as u32),
        Type::F32 => lanes.words1(d, a, |a| a & 0x7fff_ffff),
        Type::F16x2 | Type::Bf16x2 => lanes.words1(d, a, |a| a & 0x7fff_7fff),
        Type::Pred | Type::U16 | Type::F16 | Type::Bf16 | Type::Tf32 | Type::U32 | Type::U64 | Type::S64 => {
            return Err(Stop::no_such_form("Abs", ty));
        }
    }
    Ok(())
}

/// A function of an `f32` evaluated in `f64`, with subnormal inputs and results flushed to zero.
fn flushing(f: impl Fn(f64) -> f64) -> impl Fn(f32) -> f32 {
    move |a| flush(f(f64::from(flush(a))) as f32)
}

/// `d = 2^a`.
pub(crate) fn exp2(lanes: &mut Lanes<'_, '_>, ty: Type, d: RegisterId, a: Operand) -> Outcome {
    match ty {
        Type::F32 => lanes.floats1(d, a, flushing(f64::exp2)),
        Type::F16x2 => lanes.pairs1::<F16>(d, a, f64::exp2),
        // The manual has this form with `.ftz` only.
        Type::Bf16x2 => lanes.pairs1::<Bf16>(d, a, |a| flush(flush(a as f32).exp2()).into()),
        Type::Pred
        | Type::U16
        | Type::F16
        | Type::Bf16
        | Type::Tf32
        | Type::U32
        | Type::S32
        | Type::U64
        | Type::S64 => return Err(Stop::no_such_form("Exp2", ty)),
    }
    Ok(())
}

/// `d = tanh(a)`; subnormals are kept.
pub(crate) fn tanh(lanes: &mut Lanes<'_, '_>, ty: Type, d: RegisterId, a: Operand) -> Outcome {
    match ty {
        Type::F32 => lanes.floats1(d, a, |a| f64::from(a).tanh() as f32),
        Type::F16x2 => lanes.pairs1::<F16>(d, a, f64::tanh),
        Type::Bf16x2 => lanes.pairs1::<Bf16>(d, a, f64::tanh),
        Type::Pred
        | Type::U16
        | Type::F16
        | Type::Bf16
        | Type::Tf32
        | Type::U32
        | Type::S32
        | Type::U64
        | Type::S64 => return Err(Stop::no_such_form("Tanh", ty)),
    }
    Ok(())
}

/// `d = f(a)` for the special functions that exist for `f32` only.
pub(crate) fn special_function(lanes: &mut Lanes<'_, '_>, d: RegisterId, a: Operand, f: impl Fn(f64) -> f64) {
    lanes.floats1(d, a, flushing(f));
}
