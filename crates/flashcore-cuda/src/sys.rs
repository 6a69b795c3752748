//! Types of the driver: the part of NVIDIA's `cuda.h` that this crate needs, under its names.
//!
//! They are written out here because crates that declare all of it let exactly one CUDA version be chosen in a build;
//! then a program could not have this crate beside another that chooses a version. The driver never changes these
//! declarations: a function gets a new name when one of its types changes (`cuMemAlloc_v2`).
//!
//! In tests the compiler compares every number, every layout and every signature with those that `cudarc` generated from
//! NVIDIA's header.

#![expect(non_camel_case_types, non_snake_case, reason = "the names of the driver")]

use core::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

/// The type of the same name in `cudarc`.
#[cfg(test)]
pub(crate) trait Declared {
    type Type;
}

#[cfg(test)]
use cudarc::driver::sys as declared;

/// Opaque handles.
macro_rules! handles {
    ($($handle:ident = *mut $target:ident;)*) => {
        $(
            #[repr(C)]
            #[derive(Debug)]
            pub(crate) struct $target {
                _opaque: [u8; 0],
            }

            pub(crate) type $handle = *mut $target;

            #[cfg(test)]
            impl Declared for $target {
                type Type = declared::$target;
            }
        )*
    };
}

handles! {
    CUcontext = *mut CUctx_st;
    CUevent = *mut CUevent_st;
    CUfunction = *mut CUfunc_st;
    CUgraph = *mut CUgraph_st;
    CUgraphExec = *mut CUgraphExec_st;
    CUgraphNode = *mut CUgraphNode_st;
    CUlinkState = *mut CUlinkState_st;
    CUmodule = *mut CUmod_st;
    CUstream = *mut CUstream_st;
}

/// The number of a device.
pub(crate) type CUdevice = c_int;
/// An address on a device.
pub(crate) type CUdeviceptr = c_ulonglong;

/// Enums that are passed to the driver, with the values that are used here. None is ever read from the driver, which
/// may know more values than these.
macro_rules! numbers {
    ($($name:ident { $($value:ident = $number:literal,)* })*) => {
        $(
            #[repr(u32)]
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            pub(crate) enum $name {
                $($value = $number,)*
            }

            #[cfg(test)]
            impl Declared for $name {
                type Type = declared::$name;
            }

            #[cfg(test)]
            const _: () = {
                assert!(size_of::<$name>() == size_of::<declared::$name>());
                $(assert!($name::$value as u32 == declared::$name::$value as u32);)*
            };
        )*
    };
}

numbers! {
    CUaccessProperty {
        CU_ACCESS_PROPERTY_STREAMING = 1,
        CU_ACCESS_PROPERTY_PERSISTING = 2,
    }
    CUdevice_attribute {
        CU_DEVICE_ATTRIBUTE_CLOCK_RATE = 13,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
        CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE = 36,
        CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH = 37,
        CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 81,
        CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR = 82,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
        CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE = 108,
    }
    CUevent_flags {
        CU_EVENT_DEFAULT = 0,
    }
    CUfunction_attribute {
        CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0,
        CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1,
        CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES = 3,
        CU_FUNC_ATTRIBUTE_NUM_REGS = 4,
        CU_FUNC_ATTRIBUTE_BINARY_VERSION = 6,
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
    }
    CUjit_option {
        CU_JIT_INFO_LOG_BUFFER = 3,
        CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES = 4,
        CU_JIT_ERROR_LOG_BUFFER = 5,
        CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES = 6,
        CU_JIT_OPTIMIZATION_LEVEL = 7,
        CU_JIT_TARGET = 9,
        CU_JIT_LOG_VERBOSE = 12,
        CU_JIT_GENERATE_LINE_INFO = 13,
    }
    CUjit_target {
        CU_TARGET_COMPUTE_90A = 0x1_005A,
    }
    CUjitInputType {
        CU_JIT_INPUT_PTX = 1,
    }
    CUlaunchAttributeID {
        CU_LAUNCH_ATTRIBUTE_IGNORE = 0,
        CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW = 1,
        CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4,
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6,
    }
    CUlimit {
        CU_LIMIT_PERSISTING_L2_CACHE_SIZE = 6,
    }
    CUstream_flags {
        CU_STREAM_NON_BLOCKING = 1,
    }
    CUstreamCaptureMode {
        CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
        CU_STREAM_CAPTURE_MODE_RELAXED = 2,
    }
    CUtensorMapDataType {
        CU_TENSOR_MAP_DATA_TYPE_UINT8 = 0,
        CU_TENSOR_MAP_DATA_TYPE_UINT16 = 1,
        CU_TENSOR_MAP_DATA_TYPE_UINT32 = 2,
        CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6,
        CU_TENSOR_MAP_DATA_TYPE_FLOAT32 = 7,
        CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9,
    }
    CUtensorMapFloatOOBfill {
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA = 1,
    }
    CUtensorMapInterleave {
        CU_TENSOR_MAP_INTERLEAVE_NONE = 0,
    }
    CUtensorMapL2promotion {
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B = 2,
    }
    CUtensorMapSwizzle {
        CU_TENSOR_MAP_SWIZZLE_NONE = 0,
        CU_TENSOR_MAP_SWIZZLE_32B = 1,
        CU_TENSOR_MAP_SWIZZLE_64B = 2,
        CU_TENSOR_MAP_SWIZZLE_128B = 3,
    }
}

/// A state that the driver returns: a number, because a newer driver may have more of them.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CUstreamCaptureStatus(pub(crate) c_uint);

impl CUstreamCaptureStatus {
    pub(crate) const CU_STREAM_CAPTURE_STATUS_NONE: Self = Self(0);
}

/// Structures that the driver reads or writes.
macro_rules! structures {
    ($($(#[$attribute:meta])* $kind:ident $name:ident { $($field:ident: $type:ty,)* })*) => {
        $(
            $(#[$attribute])*
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub(crate) $kind $name {
                $(pub(crate) $field: $type,)*
            }

            #[cfg(test)]
            impl Declared for $name {
                type Type = declared::$name;
            }

            #[cfg(test)]
            const _: () = {
                assert!(size_of::<$name>() == size_of::<declared::$name>());
                assert!(align_of::<$name>() == align_of::<declared::$name>());
                $(assert!(core::mem::offset_of!($name, $field) == core::mem::offset_of!(declared::$name, $field));)*
            };
        )*
    };
}

structures! {
    struct CUuuid {
        bytes: [c_char; 16],
    }
    #[repr(align(64))]
    struct CUtensorMap {
        opaque: [u64; 16],
    }
    struct CUaccessPolicyWindow {
        base_ptr: *mut c_void,
        num_bytes: usize,
        hitRatio: f32,
        hitProp: CUaccessProperty,
        missProp: CUaccessProperty,
    }
    struct CUlaunchAttributeValue_union__bindgen_ty_1 {
        x: c_uint,
        y: c_uint,
        z: c_uint,
    }
    union CUlaunchAttributeValue {
        pad: [c_char; 64],
        accessPolicyWindow: CUaccessPolicyWindow,
        clusterDim: CUlaunchAttributeValue_union__bindgen_ty_1,
        programmaticStreamSerializationAllowed: c_int,
    }
    struct CUlaunchAttribute {
        id: CUlaunchAttributeID,
        pad: [c_char; 4],
        value: CUlaunchAttributeValue,
    }
    struct CUlaunchConfig {
        gridDimX: c_uint,
        gridDimY: c_uint,
        gridDimZ: c_uint,
        blockDimX: c_uint,
        blockDimY: c_uint,
        blockDimZ: c_uint,
        sharedMemBytes: c_uint,
        hStream: CUstream,
        attrs: *mut CUlaunchAttribute,
        numAttrs: c_uint,
    }
}

/// Types that are the same everywhere.
#[cfg(test)]
mod checks {
    use super::{CUstreamCaptureStatus, Declared, c_void, declared};

    macro_rules! plain {
        ($($plain:ty)*) => {
            $(impl Declared for $plain {
                type Type = Self;
            })*
        };
    }

    plain!(u8 i8 u32 i32 u64 usize f32 c_void);

    impl<T: Declared> Declared for *mut T {
        type Type = *mut T::Type;
    }

    impl<T: Declared> Declared for *const T {
        type Type = *const T::Type;
    }

    impl Declared for CUstreamCaptureStatus {
        type Type = declared::CUstreamCaptureStatus;
    }

    const _: () = {
        assert!(size_of::<CUstreamCaptureStatus>() == size_of::<declared::CUstreamCaptureStatus>());
        let none = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE.0;
        assert!(none == declared::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32);
    };
}
