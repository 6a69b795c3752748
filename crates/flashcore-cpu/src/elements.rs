//! Rows of elements as `f32` and back, for operations beside attention.

use flashcore_problem::DType;
use half::{bf16, f16};

/// The elements of a row as `f32`, exactly.
pub(crate) fn widen(dtype: DType, bytes: &[u8], values: &mut [f32]) {
    let halves = bytes.chunks_exact(2).map(|half| u16::from_le_bytes([half[0], half[1]]));
    match dtype {
        DType::F16 => values.iter_mut().zip(halves).for_each(|(value, bits)| *value = f16::from_bits(bits).to_f32()),
        DType::Bf16 => values.iter_mut().zip(halves).for_each(|(value, bits)| *value = bf16::from_bits(bits).to_f32()),
        DType::F32 | DType::F64 => {
            let words = bytes.chunks_exact(4).map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]));
            values.iter_mut().zip(words).for_each(|(value, word)| *value = word);
        }
        DType::E4m3 | DType::E5m2 => {
            let numbers = bytes.iter().map(|code| dtype.decode(std::slice::from_ref(code)) as f32);
            values.iter_mut().zip(numbers).for_each(|(value, number)| *value = number);
        }
    }
}

/// `f32` numbers as the elements of a row, rounded to nearest even.
pub(crate) fn round(dtype: DType, values: &[f32], bytes: &mut [u8]) {
    match dtype {
        DType::F16 => bytes
            .chunks_exact_mut(2)
            .zip(values)
            .for_each(|(half, &value)| half.copy_from_slice(&f16::from_f32(value).to_le_bytes())),
        DType::Bf16 => bytes
            .chunks_exact_mut(2)
            .zip(values)
            .for_each(|(half, &value)| half.copy_from_slice(&bf16::from_f32(value).to_le_bytes())),
        DType::F32 | DType::F64 => {
            bytes.chunks_exact_mut(4).zip(values).for_each(|(word, &value)| word.copy_from_slice(&value.to_le_bytes()));
        }
        DType::E4m3 | DType::E5m2 => {
            bytes.chunks_exact_mut(1).zip(values).for_each(|(code, &value)| dtype.encode(f64::from(value), code));
        }
    }
}
