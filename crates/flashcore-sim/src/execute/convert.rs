//! Conversions between types, packing and unpacking.

use flashcore_ir::{Fp8, Operand, RegisterId, Rounding, Type};

use crate::error::Stop;
use crate::execute::lanes::Lanes;
use crate::fp8;
use crate::numeric::{Bf16, F16, Half, canonical, join, to_tf32};

/// A value between decoding and encoding: every integer and float type is exact in one of the two.
#[derive(Clone, Copy)]
enum Number {
    Integer(i128),
    Float(f64),
}

fn decode(ty: Type, bits: u64) -> Option<Number> {
    Some(match ty {
        Type::U16 => Number::Integer((bits as u16).into()),
        Type::U32 => Number::Integer((bits as u32).into()),
        Type::S32 => Number::Integer((bits as i32).into()),
        Type::U64 => Number::Integer(bits.into()),
        Type::S64 => Number::Integer((bits as i64).into()),
        Type::F16 => Number::Float(F16::decode(bits as u16).into()),
        Type::Bf16 => Number::Float(Bf16::decode(bits as u16).into()),
        Type::F32 | Type::Tf32 => Number::Float(f32::from_bits(bits as u32).into()),
        Type::Pred | Type::F16x2 | Type::Bf16x2 => return None,
    })
}

/// A float rounded to an integer value; NaN is kept.
fn round(value: f64, rounding: Rounding) -> Option<f64> {
    Some(match rounding {
        Rounding::ToZero => value.trunc(),
        Rounding::Down => value.floor(),
        Rounding::Up => value.ceil(),
        Rounding::NearestInteger => value.round_ties_even(),
        Rounding::Exact | Rounding::NearestEven | Rounding::NearestAway => return None,
    })
}

/// An integer of a type: integers wrap, floats saturate, and a NaN is 0, or the lowest number of 64 bits.
fn encode_integer(ty: Type, number: Number, rounding: Rounding) -> Option<u64> {
    let value = match number {
        Number::Integer(value) => {
            return Some(match ty {
                Type::U16 => (value as u16).into(),
                Type::U32 | Type::S32 => (value as u32).into(),
                _ => value as u64,
            });
        }
        Number::Float(value) => round(value, rounding)?,
    };
    Some(match ty {
        Type::U64 | Type::S64 if value.is_nan() => 1 << 63,
        Type::U16 => (value as u16).into(),
        Type::U32 => (value as u32).into(),
        Type::S32 => (value as i32 as u32).into(),
        Type::U64 => value as u64,
        _ => value as i64 as u64,
    })
}

fn encode_float(ty: Type, number: Number, rounding: Rounding) -> Option<u64> {
    let value = match number {
        // Directly to `f32`: a detour through `f64` would round long integers twice.
        Number::Integer(value) if ty == Type::F32 => return Some((value as f32).to_bits().into()),
        Number::Integer(value) => value as f64,
        Number::Float(value) => value,
    };
    match (ty, rounding) {
        (Type::F32, Rounding::Exact | Rounding::NearestEven) => Some(canonical(value as f32).into()),
        (Type::F16, Rounding::Exact | Rounding::NearestEven) => Some(F16::encode(value).into()),
        (Type::Bf16, Rounding::Exact | Rounding::NearestEven) => Some(Bf16::encode(value).into()),
        _ => None,
    }
}

fn convert_one(to: Type, from: Type, rounding: Rounding, bits: u64) -> Option<u64> {
    // By its bits: a conversion through a number would not keep the payload of a NaN.
    if (to, from, rounding) == (Type::Tf32, Type::F32, Rounding::NearestAway) {
        return Some(to_tf32(bits as u32).into());
    }
    let number = decode(from, bits)?;
    match to {
        Type::U16 | Type::U32 | Type::S32 | Type::U64 | Type::S64 => encode_integer(to, number, rounding),
        Type::F16 | Type::Bf16 | Type::F32 | Type::Tf32 => encode_float(to, number, rounding),
        Type::Pred | Type::F16x2 | Type::Bf16x2 => None,
    }
}

/// `d` is `a` in another type.
pub(crate) fn convert(
    lanes: &mut Lanes<'_, '_>,
    to: Type,
    from: Type,
    rounding: Rounding,
    d: RegisterId,
    a: Operand,
) -> Result<(), Stop> {
    let no_such_form = || Stop::no_such_form("Convert", format_args!("{to} from {from}, rounding {rounding}"));
    let bits = if from.bits() == 64 { lanes.wide(a) } else { lanes.word(a).map(u64::from) };
    let mut results = [0u64; 32];
    for (result, bits) in results.iter_mut().zip(bits) {
        *result = convert_one(to, from, rounding, bits).ok_or_else(no_such_form)?;
    }
    if to.bits() == 64 {
        lanes.set_wide(d, &results);
    } else {
        lanes.set_word(d, &results.map(|bits| bits as u32));
    }
    Ok(())
}

/// Two `f32` rounded into a pair.
pub(crate) fn convert_pair(
    lanes: &mut Lanes<'_, '_>,
    to: Type,
    d: RegisterId,
    high: Operand,
    low: Operand,
) -> Result<(), Stop> {
    let encode: fn(f64) -> u16 = match to {
        Type::F16x2 => F16::encode,
        Type::Bf16x2 => Bf16::encode,
        Type::Pred
        | Type::U16
        | Type::F16
        | Type::Bf16
        | Type::U32
        | Type::S32
        | Type::F32
        | Type::Tf32
        | Type::U64
        | Type::S64 => return Err(Stop::no_such_form("ConvertPair", to)),
    };
    lanes.words2(d, [low, high], |low, high| join([low, high].map(|bits| encode(f32::from_bits(bits).into()))));
    Ok(())
}

/// Two `f32` rounded into two bytes.
pub(crate) fn to_fp8(lanes: &mut Lanes<'_, '_>, to: Fp8, d: RegisterId, high: Operand, low: Operand) {
    let encode = |bits| u32::from(fp8::encode(to, f32::from_bits(bits)));
    lanes.words2(d, [low, high], |low, high| encode(low) | encode(high) << 8);
}

/// Two bytes as a pair of `f16`.
pub(crate) fn from_fp8(lanes: &mut Lanes<'_, '_>, from: Fp8, d: RegisterId, a: RegisterId) {
    let pairs = *lanes.registers.word_of(a);
    let widen = |code: u32| F16::encode(fp8::decode(from, code as u8).into());
    lanes.set_word(d, &pairs.map(|pair| join([widen(pair), widen(pair >> 8)])));
}

/// Two registers as the halves of one.
pub(crate) fn pack(lanes: &mut Lanes<'_, '_>, to: Type, d: RegisterId, low: RegisterId, high: RegisterId) {
    let (low, high) = (*lanes.registers.word_of(low), *lanes.registers.word_of(high));
    if to.bits() == 64 {
        lanes.set_wide(d, &core::array::from_fn(|lane| u64::from(low[lane]) | u64::from(high[lane]) << 32));
    } else {
        lanes.set_word(d, &core::array::from_fn(|lane| low[lane] & 0xffff | high[lane] << 16));
    }
}

/// The two halves of a register.
pub(crate) fn unpack(lanes: &mut Lanes<'_, '_>, from: Type, low: RegisterId, high: RegisterId, a: RegisterId) {
    if from.bits() == 64 {
        let a = *lanes.registers.wide_of(a);
        lanes.set_word(low, &a.map(|a| a as u32));
        lanes.set_word(high, &a.map(|a| (a >> 32) as u32));
    } else {
        let a = *lanes.registers.word_of(a);
        lanes.set_word(low, &a.map(|a| a & 0xffff));
        lanes.set_word(high, &a.map(|a| a >> 16));
    }
}
