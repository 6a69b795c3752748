//! Row vectors: adjacent elements of a row that a lane loads, computes on in `f32`, and stores, 16 bytes an access at most.

use flashcore_ir::types::{Bf16, Bf16x2, F16, F16x2, F32, Pred, U16, U32, U64};
use flashcore_ir::{Builder, GlobalAddress, Reg};
use flashcore_problem::DType;

use crate::attention::scalar::MemoryElement;
use crate::cache::quantize::codes;
use crate::element::Element;
use crate::specialization::MAX_VEC_BYTES;

/// Adjacent elements of one type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct VectorType {
    /// The element type: `f16`, `bf16` or `f32`; of vectors that are stored and not loaded, also `e4m3` or `e5m2`.
    pub(crate) dtype: DType,
    /// Elements: a power of two.
    pub(crate) elements: u32,
    /// Bytes of one access: a power of two from the size of an element to 16.
    pub(crate) access_bytes: u32,
}

/// The bits of a vector in registers.
#[derive(Debug, Clone)]
pub(crate) enum VectorBits {
    /// 32-bit words.
    Words(Vec<Reg<U32>>),
    /// 16-bit elements that memory does not align to words.
    Halves(Vec<Reg<U16>>),
}

impl VectorType {
    /// Vectors with the widest accesses that they fill.
    pub(crate) const fn new(dtype: DType, elements: u32) -> Self {
        let bytes = elements * dtype.size_bytes() as u32;
        Self { dtype, elements, access_bytes: if bytes < MAX_VEC_BYTES { bytes } else { MAX_VEC_BYTES } }
    }

    /// Bytes of a vector.
    pub(crate) const fn bytes(self) -> u32 {
        self.elements * self.dtype.size_bytes() as u32
    }

    /// Loads the vector at an address, which is a multiple of the bytes of an access.
    pub(crate) fn load(self, k: &mut Builder, address: Reg<U64>) -> VectorBits {
        let offsets = (0..self.bytes()).step_by(self.access_bytes as usize);
        let at = |offset: u32| GlobalAddress::from(address).plus(offset as i32);
        if self.access_bytes < 4 {
            return VectorBits::Halves(offsets.map(|offset| k.load_one::<U16>(at(offset))).collect());
        }
        VectorBits::Words(offsets.flat_map(|offset| k.load::<U32>(at(offset), self.access_bytes / 4)).collect())
    }

    /// Loads the vector at an address where `exists`, and zeros elsewhere; words, so that it has at least 4 bytes.
    pub(crate) fn load_where(self, k: &mut Builder, exists: Reg<Pred>, address: Reg<U64>) -> VectorBits {
        let words: Vec<_> = (0..self.bytes() / 4).map(|_| k.copy(0u32)).collect();
        for (number, words) in words.chunks(self.access_bytes as usize / 4).enumerate() {
            let offset = number as u32 * self.access_bytes;
            k.when(exists, |k| k.load_vector_into(words, GlobalAddress::from(address).plus(offset as i32)));
        }
        VectorBits::Words(words)
    }

    /// Stores the vector at an address, which is a multiple of the bytes of an access.
    pub(crate) fn store(self, k: &mut Builder, address: Reg<U64>, bits: &VectorBits) {
        let at = |offset: u32| GlobalAddress::from(address).plus(offset as i32);
        match bits {
            VectorBits::Words(words) => {
                let count = self.access_bytes / 4;
                for (number, words) in words.chunks(count as usize).enumerate() {
                    k.store(at(number as u32 * self.access_bytes), words);
                }
            }
            VectorBits::Halves(halves) => {
                for (number, half) in halves.iter().enumerate() {
                    k.store_one(at(number as u32 * 2), *half);
                }
            }
        }
    }

    /// The elements as `f32`, exactly.
    pub(crate) fn widen(self, k: &mut Builder, bits: &VectorBits) -> Vec<Reg<F32>> {
        match bits {
            VectorBits::Words(words) => words.iter().flat_map(|&word| self.widen_word(k, word)).collect(),
            VectorBits::Halves(halves) => halves.iter().map(|&half| self.widen_half(k, half)).collect(),
        }
    }

    /// The elements as `f32`, exactly; zeros where `empty`, whatever the bits are.
    pub(crate) fn widen_unless(self, k: &mut Builder, bits: &VectorBits, empty: Reg<Pred>) -> Vec<Reg<F32>> {
        match bits {
            VectorBits::Words(words) => {
                let words = words.iter().map(|&word| k.select(empty, 0u32, word)).collect();
                self.widen(k, &VectorBits::Words(words))
            }
            VectorBits::Halves(_) => {
                let elements = self.widen(k, bits);
                elements.into_iter().map(|element| k.select(empty, 0.0f32, element)).collect()
            }
        }
    }

    fn widen_word(self, k: &mut Builder, word: Reg<U32>) -> Vec<Reg<F32>> {
        match self.dtype {
            DType::F16 => {
                let pair = k.reinterpret::<U32, F16x2>(word);
                F16x2::widen(k, pair).to_vec()
            }
            DType::Bf16 => {
                let pair = k.reinterpret::<U32, Bf16x2>(word);
                Bf16x2::widen(k, pair).to_vec()
            }
            // Of other types there are no kernels: problems that have them are refused.
            DType::F32 | DType::F64 | DType::E4m3 | DType::E5m2 => vec![k.reinterpret(word)],
        }
    }

    fn widen_half(self, k: &mut Builder, half: Reg<U16>) -> Reg<F32> {
        if self.dtype == DType::F16 {
            let element = k.reinterpret::<U16, F16>(half);
            F16::widen(k, element)
        } else {
            let element = k.reinterpret::<U16, Bf16>(half);
            Bf16::widen(k, element)
        }
    }

    /// `f32` numbers rounded to nearest even.
    pub(crate) fn round(self, k: &mut Builder, values: &[Reg<F32>]) -> VectorBits {
        if self.dtype.is_float8() {
            let pairs = codes(k, self.dtype, values);
            if self.access_bytes < 4 {
                return VectorBits::Halves(pairs);
            }
            let word = |pair: &[Reg<U16>]| {
                let (low, high) = (k.widen_half(pair[0]), k.widen_half(pair[1]));
                let high = k.shl(high, 16u32);
                k.or(low, high)
            };
            return VectorBits::Words(pairs.chunks_exact(2).map(word).collect());
        }
        if self.access_bytes < 4 {
            let half = |k: &mut Builder, value| {
                if self.dtype == DType::F16 {
                    let element = F16::round(k, value);
                    k.reinterpret::<F16, U16>(element)
                } else {
                    let element = Bf16::round(k, value);
                    k.reinterpret::<Bf16, U16>(element)
                }
            };
            return VectorBits::Halves(values.iter().map(|&value| half(k, value)).collect());
        }
        let words = match self.dtype {
            DType::F16 => values
                .chunks_exact(2)
                .map(|pair| {
                    let pair = k.pair::<F16x2>(pair[0], pair[1]);
                    k.reinterpret::<F16x2, U32>(pair)
                })
                .collect(),
            DType::Bf16 => values
                .chunks_exact(2)
                .map(|pair| {
                    let pair = k.pair::<Bf16x2>(pair[0], pair[1]);
                    k.reinterpret::<Bf16x2, U32>(pair)
                })
                .collect(),
            DType::F32 | DType::F64 | DType::E4m3 | DType::E5m2 => {
                values.iter().map(|&value| k.reinterpret::<F32, U32>(value)).collect()
            }
        };
        VectorBits::Words(words)
    }
}

/// The most elements of a vector of which every number, an element count, is a multiple, and which one access of 16 bytes
/// holds.
pub(crate) fn vector_elements(dtype: DType, multiples: impl IntoIterator<Item = usize>) -> u32 {
    let most = MAX_VEC_BYTES as usize / dtype.size_bytes();
    // The lowest bit that is set in any of them.
    1 << multiples.into_iter().fold(most, |all, count| all | count).trailing_zeros()
}

/// The token and head strides of a tensor that are used: those of dimensions of more than one.
pub(crate) fn used_strides(
    shape: flashcore_problem::Shape,
    strides: flashcore_problem::Strides,
) -> impl Iterator<Item = usize> {
    [(shape.batch, strides.batch), (shape.heads, strides.head), (shape.rows, strides.row)]
        .into_iter()
        .filter(|&(size, _)| size > 1)
        .map(|(_, stride)| stride)
}
