//! Bitwise logic, shifts and bit fields.

use flashcore_ir::{Operand, RegisterId, Type};

use crate::error::Stop;
use crate::execute::lanes::Lanes;

/// A bitwise function of two values.
pub(crate) fn logic(
    lanes: &mut Lanes<'_, '_>,
    ty: Type,
    d: RegisterId,
    [a, b]: [Operand; 2],
    f: impl Fn(u64, u64) -> u64,
) -> Result<(), Stop> {
    match ty {
        Type::Pred => {
            let (a, b) = (lanes.registers.predicate(a), lanes.registers.predicate(b));
            lanes.set_predicate(d, f(a.into(), b.into()) as u32);
        }
        Type::U32 | Type::S32 => lanes.words2(d, [a, b], |a, b| f(a.into(), b.into()) as u32),
        Type::U64 | Type::S64 => lanes.wides2(d, [a, b], f),
        Type::U16 | Type::F16 | Type::Bf16 | Type::F32 | Type::Tf32 | Type::F16x2 | Type::Bf16x2 => {
            return Err(Stop::no_such_form("bitwise logic", ty));
        }
    }
    Ok(())
}

/// A direction of shifting.
#[derive(Clone, Copy)]
pub(crate) enum Shift {
    Left,
    Right,
}

/// `d = a << b` or `a >> b`, where `b` is clamped to the width.
pub(crate) fn shift(
    lanes: &mut Lanes<'_, '_>,
    direction: Shift,
    ty: Type,
    d: RegisterId,
    a: Operand,
    b: Operand,
) -> Result<(), Stop> {
    match (ty, direction) {
        (Type::U32 | Type::S32, Shift::Left) => lanes.words2(d, [a, b], |a, b| a.checked_shl(b).unwrap_or(0)),
        (Type::U32, Shift::Right) => lanes.words2(d, [a, b], |a, b| a.checked_shr(b).unwrap_or(0)),
        (Type::S32, Shift::Right) => lanes.words2(d, [a, b], |a, b| (a as i32 >> b.min(31)) as u32),
        (Type::U64 | Type::S64, direction) => {
            let (a, b) = (lanes.wide(a), lanes.word(b));
            let shifted = |a: u64, b: u32| match (direction, ty) {
                (Shift::Left, _) => a.checked_shl(b).unwrap_or(0),
                (Shift::Right, Type::S64) => (a as i64 >> b.min(63)) as u64,
                (Shift::Right, _) => a.checked_shr(b).unwrap_or(0),
            };
            lanes.set_wide(d, &core::array::from_fn(|lane| shifted(a[lane], b[lane])));
        }
        (
            Type::Pred | Type::U16 | Type::F16 | Type::Bf16 | Type::F32 | Type::Tf32 | Type::F16x2 | Type::Bf16x2,
            Shift::Left | Shift::Right,
        ) => {
            return Err(Stop::no_such_form("a shift", ty));
        }
    }
    Ok(())
}

/// Bit `n` of the result is bit `4a + 2b + c` of the table, with bit `n` of the operands.
pub(crate) fn lop3(table: u8, a: u32, b: u32, c: u32) -> u32 {
    (0..8u32).filter(|row| table >> row & 1 == 1).fold(0, |result, row| {
        let pick = |value: u32, bit: u32| if row >> bit & 1 == 1 { value } else { !value };
        result | pick(a, 2) & pick(b, 1) & pick(c, 0)
    })
}

/// The mask of a bit field; position and length are bytes, and bits above the word are cut off.
fn field(position: u32, length: u32) -> (u32, u32) {
    let (position, length) = (position & 0xff, length & 0xff);
    let ones = 1u32.checked_shl(length).map_or(u32::MAX, |bit| bit - 1);
    (position, ones)
}

/// `length` bits of `a` from bit `position` on.
pub(crate) fn extract(a: u32, position: u32, length: u32) -> u32 {
    let (position, ones) = field(position, length);
    a.checked_shr(position).unwrap_or(0) & ones
}

/// `b` with `length` bits from `position` on replaced by the low bits of `a`.
pub(crate) fn insert(a: u32, b: u32, position: u32, length: u32) -> u32 {
    let (position, ones) = field(position, length);
    let mask = ones.checked_shl(position).unwrap_or(0);
    b & !mask | a.checked_shl(position).unwrap_or(0) & mask
}

/// Four bytes chosen from the eight of `a` and `b`.
pub(crate) fn permute(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = u64::from(a) | u64::from(b) << 32;
    (0..4).fold(0, |result, position| {
        let nibble = selector >> (4 * position) & 0xf;
        let byte = (bytes >> (8 * (nibble & 7))) as u8;
        let chosen = if nibble & 8 == 0 { byte } else { (byte as i8 >> 7) as u8 };
        result | u32::from(chosen) << (8 * position)
    })
}
