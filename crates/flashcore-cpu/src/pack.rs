//! Bytes of the problem's type to numbers of the accumulator's, and back.

use crate::microkernel::Microkernel;
use crate::real::Real;
use flashcore_problem::{DType, Shape, Strides, TensorView};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// One head of one batch of a tensor.
#[derive(Clone, Copy)]
pub(crate) struct Head<'a> {
    tensor: TensorView<'a>,
    columns: usize,
    row_stride: usize,
    start: usize,
}

impl<'a> Head<'a> {
    pub(crate) fn new(tensor: TensorView<'a>, shape: Shape, strides: Strides, batch: usize, head: usize) -> Self {
        Self { tensor, columns: shape.columns, row_stride: strides.row, start: strides.row_start(batch, head, 0) }
    }

    /// Reads one row.
    pub(crate) fn load<R: Real>(self, kernel: &impl Microkernel<R>, row: usize, values: &mut [R]) {
        let size = self.tensor.dtype.size_bytes();
        let start = (self.start + row * self.row_stride) * size;
        kernel.load(self.tensor.dtype, &self.tensor.data[start..start + self.columns * size], values);
    }
}

/// Reads as many elements as there are in `bytes`.
pub(crate) fn load<R: Real>(dtype: DType, bytes: &[u8], values: &mut [R]) {
    match dtype {
        // In blocks, because one by one the conversion would look each time whether the processor has it.
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
    }
}

/// Writes `values`, each times `factor`, rounded to `dtype`.
pub(crate) fn store<R: Real>(dtype: DType, values: &[R], factor: R, bytes: &mut [u8]) {
    // In blocks, because one by one the conversion would look each time whether the processor has it.
    const BLOCK: usize = 32;
    match dtype {
        DType::F16 | DType::Bf16 => {
            for (values, bytes) in values.chunks(BLOCK).zip(bytes.chunks_mut(2 * BLOCK)) {
                let mut wide = [0.0_f32; BLOCK];
                for (element, &value) in wide.iter_mut().zip(values) {
                    *element = (value * factor).to_f64() as f32;
                }
                let bits = if dtype == DType::F16 {
                    let mut narrow = [f16::ZERO; BLOCK];
                    narrow.convert_from_f32_slice(&wide);
                    narrow.map(f16::to_bits)
                } else {
                    wide.map(|element| bf16::from_f32(element).to_bits())
                };
                for (pair, bits) in bytes.chunks_exact_mut(2).zip(bits) {
                    pair.copy_from_slice(&bits.to_le_bytes());
                }
            }
        }
        DType::F32 => {
            for (&value, four) in values.iter().zip(bytes.chunks_exact_mut(4)) {
                four.copy_from_slice(&((value * factor).to_f64() as f32).to_le_bytes());
            }
        }
        DType::F64 => {
            for (&value, eight) in values.iter().zip(bytes.chunks_exact_mut(8)) {
                DType::F64.encode((value * factor).to_f64(), eight);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_problem::Tensor;

    #[test]
    fn rows_survive_a_round_trip() {
        for dtype in DType::ALL {
            for count in [0, 1, 31, 32, 33, 100] {
                let values: Vec<f64> = (0..count).map(|index| f64::from(index) * 0.5 - 8.0).collect();
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
