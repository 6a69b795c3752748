//! The 16-bit element types that the kernels are generic over.

use flashcore_ir::types::{Bf16x2, F16x2, F32, HalfPair, MatrixOperand, U32};
use flashcore_ir::{Builder, Reg};

/// Bytes of one element.
pub(crate) const ELEMENT_BYTES: u32 = 2;

/// A pair of 16-bit floats that memory holds, tensor cores multiply, and the scalar kernel takes apart.
pub trait Element: HalfPair + MatrixOperand {
    /// The two elements as `f32`, the one with the lower index first.
    fn widen(k: &mut Builder, pair: Reg<Self>) -> [Reg<F32>; 2];
}

impl Element for F16x2 {
    fn widen(k: &mut Builder, pair: Reg<Self>) -> [Reg<F32>; 2] {
        let (low, high) = k.unpack(pair);
        [k.f16_to_f32(low), k.f16_to_f32(high)]
    }
}

impl Element for Bf16x2 {
    /// A `bf16` is the upper half of an `f32`, so two bit operations take a pair apart without unpacking it.
    fn widen(k: &mut Builder, pair: Reg<Self>) -> [Reg<F32>; 2] {
        let bits = k.reinterpret::<Self, U32>(pair);
        let low = k.shl(bits, 16u32);
        let high = k.and(bits, 0xffff_0000u32);
        [k.reinterpret(low), k.reinterpret(high)]
    }
}
