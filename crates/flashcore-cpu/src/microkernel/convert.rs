//! Conversions: bytes of the problem's type to numbers of the accumulator's, and back.

#![expect(clippy::inline_always, reason = "instructions of a level must end up in its functions")]

use crate::simd::real::Real;
use flashcore_problem::DType;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// True if no element is a NaN or an infinity.
#[inline(always)]
#[expect(clippy::inline_always, reason = "instructions of a level must end up in its functions")]
#[expect(clippy::needless_bitwise_bool, reason = "without leaving early, the loop becomes vectors")]
pub(super) fn are_finite(dtype: DType, bytes: &[u8]) -> bool {
    // All bits of the exponent are set in these two, and in nothing else.
    let sixteen = |exponent: u16| {
        let bits = bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
        bits.fold(true, |all, bits| all & (bits & exponent != exponent))
    };
    match dtype {
        DType::F16 => sixteen(f16::INFINITY.to_bits()),
        DType::Bf16 => sixteen(bf16::INFINITY.to_bits()),
        DType::F32 => {
            let elements = bytes.chunks_exact(4).map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]]));
            elements.fold(true, |all, element| all & element.is_finite())
        }
        DType::F64 => bytes.chunks_exact(8).all(|eight| DType::F64.decode(eight).is_finite()),
        // All other bits than the sign are set in the NaN of e4m3, and there is no infinity.
        DType::E4m3 => bytes.iter().fold(true, |all, code| all & (code & 0x7F != 0x7F)),
        DType::E5m2 => bytes.iter().fold(true, |all, code| all & (code & 0x7C != 0x7C)),
    }
}

/// Hands each element of `bytes`, with its index, to `take`.
pub(crate) fn for_each<R: Real>(dtype: DType, bytes: &[u8], mut take: impl FnMut(usize, R)) {
    const BLOCK: usize = 64;
    let mut values = [R::ZERO; BLOCK];
    for (block, bytes) in bytes.chunks(BLOCK * dtype.size_bytes()).enumerate() {
        let values = &mut values[..bytes.len() / dtype.size_bytes()];
        load(dtype, bytes, values);
        for (index, &value) in values.iter().enumerate() {
            take(block * BLOCK + index, value);
        }
    }
}

/// Reads as many elements as there are in `bytes`.
pub(crate) fn load<R: Real>(dtype: DType, bytes: &[u8], values: &mut [R]) {
    match dtype {
        // In blocks, because one by one the conversion would check each time whether the processor has it.
        DType::F16 => {
            const BLOCK: usize = 32;
            for (bytes, values) in bytes.chunks(2 * BLOCK).zip(values.chunks_mut(BLOCK)) {
                let count = bytes.len() / 2;
                let (mut narrow, mut wide) = ([f16::ZERO; BLOCK], [0.0_f32; BLOCK]);
                for (element, pair) in narrow.iter_mut().zip(bytes.chunks_exact(2)) {
                    *element = f16::from_le_bytes([pair[0], pair[1]]);
                }
                narrow[..count].convert_to_f32_slice(&mut wide[..count]);
                for (value, &element) in values.iter_mut().zip(&wide[..count]) {
                    *value = R::from_f64(f64::from(element));
                }
            }
        }
        DType::Bf16 => {
            for (value, pair) in values.iter_mut().zip(bytes.chunks_exact(2)) {
                let bits = u32::from(u16::from_le_bytes([pair[0], pair[1]])) << 16;
                *value = R::from_f64(f64::from(f32::from_bits(bits)));
            }
        }
        DType::F32 => {
            for (value, four) in values.iter_mut().zip(bytes.chunks_exact(4)) {
                *value = R::from_f64(f64::from(f32::from_le_bytes([four[0], four[1], four[2], four[3]])));
            }
        }
        DType::F64 => {
            for (value, eight) in values.iter_mut().zip(bytes.chunks_exact(8)) {
                *value = R::from_f64(DType::F64.decode(eight));
            }
        }
        DType::E4m3 | DType::E5m2 => {
            let table = dtype.float8_table().expect("types of 8 bits have a table");
            for (value, &code) in values.iter_mut().zip(bytes) {
                *value = R::from_f64(f64::from(table[usize::from(code)]));
            }
        }
    }
}

/// Writes `values`, each times `factor`, rounded to `dtype`.
#[inline(always)]
pub(crate) fn store<R: Real>(dtype: DType, values: &[R], factor: R, bytes: &mut [u8]) {
    let rounded = |value: R| (value * factor).to_f64() as f32;
    match dtype {
        // In blocks, because one by one the conversion would check each time whether the processor has it.
        DType::F16 => {
            const BLOCK: usize = 64;
            for (values, bytes) in values.chunks(BLOCK).zip(bytes.chunks_mut(2 * BLOCK)) {
                let (mut wide, mut narrow) = ([0.0_f32; BLOCK], [f16::ZERO; BLOCK]);
                for (element, &value) in wide.iter_mut().zip(values) {
                    *element = rounded(value);
                }
                narrow[..values.len()].convert_from_f32_slice(&wide[..values.len()]);
                for (pair, element) in bytes.chunks_exact_mut(2).zip(&narrow) {
                    pair.copy_from_slice(&element.to_le_bytes());
                }
            }
        }
        DType::Bf16 => {
            for (&value, pair) in values.iter().zip(bytes.chunks_exact_mut(2)) {
                pair.copy_from_slice(&bf16_bits(rounded(value)).to_le_bytes());
            }
        }
        DType::F32 => {
            for (&value, four) in values.iter().zip(bytes.chunks_exact_mut(4)) {
                four.copy_from_slice(&rounded(value).to_le_bytes());
            }
        }
        DType::F64 => {
            for (&value, eight) in values.iter().zip(bytes.chunks_exact_mut(8)) {
                DType::F64.encode((value * factor).to_f64(), eight);
            }
        }
        DType::E4m3 | DType::E5m2 => {
            for (&value, code) in values.iter().zip(bytes) {
                dtype.encode((value * factor).to_f64(), std::slice::from_mut(code));
            }
        }
    }
}

/// Rounds to the nearest even `bf16`; a NaN stays one. Without a branch, so that a loop over it becomes vector instructions.
#[inline(always)]
fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    let to_even = bits >> 16 & 1;
    let rounded = bits.wrapping_add(0x7FFF + to_even) >> 16;
    let quiet = bits >> 16 | 0x40;
    (if value.is_nan() { quiet } else { rounded }) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_problem::Tensor;

    #[test]
    fn bf16_is_rounded_as_half_rounds_it() {
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
                let value = f32::from_bits(u32::from(high) << 16 | low);
                assert_eq!(bf16_bits(value), bf16::from_f32(value).to_bits(), "{:#x}", value.to_bits());
            }
        }
    }

    #[test]
    fn rows_survive_a_round_trip() {
        for dtype in DType::ALL.into_iter().chain(DType::FLOAT8) {
            for count in [0, 1, 31, 32, 33, 100] {
                // Few enough bits for types of 8.
                let values: Vec<f64> = (0..count).map(|index| f64::from(index % 9) * 0.5 - 2.0).collect();
                let tensor = Tensor::from_values(dtype, &values);
                let mut loaded = vec![0.0_f64; values.len()];
                load(dtype, &tensor.data, &mut loaded);
                assert_eq!(loaded, values, "{dtype}");
                let mut bytes = vec![0; tensor.data.len()];
                store(dtype, &loaded, 1.0, &mut bytes);
                assert_eq!(bytes, tensor.data, "{dtype}");
            }
        }
    }
}
