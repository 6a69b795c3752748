//! Tensor maps (TMA descriptors) as hardware reads them: 128 bytes that the driver encodes.

use core::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr;

use flashcore_ir::{OutOfBounds, Swizzle, TensorElement, TensorMap};

use crate::context::{Context, cuda};
use crate::error::CudaError;
use crate::sys::{
    CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion,
    CUtensorMapSwizzle,
};

/// Bytes of a tensor map.
pub(crate) const TENSOR_MAP_BYTES: usize = 128;

/// A tensor map as hardware reads it.
pub type EncodedTensorMap = [u8; TENSOR_MAP_BYTES];

impl Context {
    /// Encodes the description of a tensor for TMA. Its address is in the memory of this device; nothing is read from
    /// there.
    pub fn encode_tensor_map(&self, map: &TensorMap) -> Result<EncodedTensorMap, CudaError> {
        map.validate()?;
        let _current = self.enter()?;
        let mut encoded = MaybeUninit::<CUtensorMap>::zeroed();
        let element = match map.element {
            TensorElement::U8 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            TensorElement::U16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT16,
            TensorElement::U32 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT32,
            TensorElement::F16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            TensorElement::Bf16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            TensorElement::F32 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        };
        let swizzle = match map.swizzle {
            Swizzle::None => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
            Swizzle::Bytes32 => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_32B,
            Swizzle::Bytes64 => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            Swizzle::Bytes128 => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        };
        let fill = match map.fill {
            OutOfBounds::Zero => CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            OutOfBounds::Nan => CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA,
        };
        let base: *mut c_void = ptr::without_provenance_mut(map.base as usize);
        // SAFETY: the driver reads `rank` numbers of each array, which have five, and `rank - 1` strides of four; it
        // writes one tensor map. The address is a number to it.
        unsafe {
            cuda!(
                self,
                cuTensorMapEncodeTiled(
                    encoded.as_mut_ptr(),
                    element,
                    map.rank,
                    base,
                    map.dimensions.as_ptr(),
                    map.strides.as_ptr(),
                    map.box_dimensions.as_ptr(),
                    map.element_strides.as_ptr(),
                    CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                    swizzle,
                    CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                    fill,
                )
            )?;
        }
        // SAFETY: it was zeroed, and every pattern of bits is a value of it.
        let words = unsafe { encoded.assume_init() }.opaque;
        let mut bytes = [0; TENSOR_MAP_BYTES];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
            chunk.copy_from_slice(&word.to_ne_bytes());
        }
        Ok(bytes)
    }
}
