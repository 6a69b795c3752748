//! The table of driver functions that this crate calls, found at run time.
//!
//! They are looked up all at once, so that a missing library or symbol is an ordinary error. They return their code as
//! a number, because a newer driver may return codes that no enum here has. The compiler checks in tests that each
//! signature is the one that `cudarc` generated from NVIDIA's header.
//!
//! The table is data: tests fill it with functions of their own (see `fake`) and so exercise, without a GPU, how this
//! crate handles a driver's answers.

#![expect(non_snake_case, reason = "the names of the driver")]

use core::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use libloading::Library;

#[cfg(test)]
use crate::sys::Declared;
use crate::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction, CUfunction_attribute, CUgraph,
    CUgraphExec, CUgraphNode, CUjit_option, CUjitInputType, CUlaunchConfig, CUlimit, CUlinkState, CUmodule, CUstream,
    CUstreamCaptureMode, CUstreamCaptureStatus, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill,
    CUtensorMapInterleave, CUtensorMapL2promotion, CUtensorMapSwizzle, CUuuid,
};

/// The return type of every function: 0, or the number of an error.
pub(crate) type Code = c_uint;

macro_rules! functions {
    (
        checked { $($checked:ident($($checked_type:ty),* $(,)?);)* }
        unchecked { $($unchecked:ident($($unchecked_type:ty),* $(,)?);)* }
    ) => {
        /// The functions of a driver.
        pub(crate) struct Api {
            $(pub(crate) $checked: unsafe extern "C" fn($($checked_type),*) -> Code,)*
            $(pub(crate) $unchecked: unsafe extern "C" fn($($unchecked_type),*) -> Code,)*
        }

        impl Api {
            /// Finds every function, or says which one is missing.
            pub(crate) fn resolve(library: &Library) -> Result<Self, &'static str> {
                Ok(Self {
                    $($checked: {
                        let name = concat!(stringify!($checked), "\0");
                        // SAFETY: the symbol is a function of NVIDIA's driver with the signature of its header,
                        // as checked below; it stays valid while the library is loaded.
                        *unsafe { library.get(name.as_bytes()) }.map_err(|_| stringify!($checked))?
                    },)*
                    $($unchecked: {
                        let name = concat!(stringify!($unchecked), "\0");
                        // SAFETY: as above, with the differences that the table explains.
                        *unsafe { library.get(name.as_bytes()) }.map_err(|_| stringify!($unchecked))?
                    },)*
                })
            }
        }

        // Each signature above is the generated one, which returns the enum where ours returns its number.
        #[cfg(test)]
        mod declared {
            use super::*;
            use cudarc::driver::sys::{self, CUresult};

            $(const _: unsafe fn($(<$checked_type as Declared>::Type),*) -> CUresult = sys::$checked;)*
            const _: [unsafe fn(CUresult, *mut *const c_char) -> CUresult; 2] =
                [sys::cuGetErrorName, sys::cuGetErrorString];
            const _: () = assert!(size_of::<CUresult>() == size_of::<Code>());
        }
    };
}

functions! {
    checked {
        cuInit(c_uint);
        cuDriverGetVersion(*mut c_int);

        cuDeviceGetCount(*mut c_int);
        cuDeviceGet(*mut CUdevice, c_int);
        cuDeviceGetName(*mut c_char, c_int, CUdevice);
        cuDeviceGetUuid_v2(*mut CUuuid, CUdevice);
        cuDeviceTotalMem_v2(*mut usize, CUdevice);
        cuDeviceGetAttribute(*mut c_int, CUdevice_attribute, CUdevice);

        cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
        cuDevicePrimaryCtxRelease_v2(CUdevice);
        cuCtxGetCurrent(*mut CUcontext);
        cuCtxPushCurrent_v2(CUcontext);
        cuCtxPopCurrent_v2(*mut CUcontext);
        cuCtxSynchronize();
        cuCtxSetLimit(CUlimit, usize);

        cuStreamCreate(*mut CUstream, c_uint);
        cuStreamDestroy_v2(CUstream);
        cuStreamSynchronize(CUstream);
        cuStreamWaitEvent(CUstream, CUevent, c_uint);
        cuStreamIsCapturing(CUstream, *mut CUstreamCaptureStatus);
        cuStreamBeginCapture_v2(CUstream, CUstreamCaptureMode);
        cuStreamEndCapture(CUstream, *mut CUgraph);
        cuStreamGetId(CUstream, *mut c_ulonglong);
        cuThreadExchangeStreamCaptureMode(*mut CUstreamCaptureMode);

        cuGraphInstantiateWithFlags(*mut CUgraphExec, CUgraph, c_ulonglong);
        cuGraphGetNodes(CUgraph, *mut CUgraphNode, *mut usize);
        cuGraphLaunch(CUgraphExec, CUstream);
        cuGraphExecDestroy(CUgraphExec);
        cuGraphDestroy(CUgraph);

        cuEventCreate(*mut CUevent, c_uint);
        cuEventDestroy_v2(CUevent);
        cuEventRecord(CUevent, CUstream);
        cuEventQuery(CUevent);
        cuEventSynchronize(CUevent);

        cuMemGetInfo_v2(*mut usize, *mut usize);
        cuMemAlloc_v2(*mut CUdeviceptr, usize);
        cuMemFree_v2(CUdeviceptr);
        cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
        cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
        cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, CUstream);
        cuMemsetD8Async(CUdeviceptr, u8, usize, CUstream);

        cuLinkCreate_v2(c_uint, *mut CUjit_option, *mut *mut c_void, *mut CUlinkState);
        cuLinkAddData_v2(
            CUlinkState, CUjitInputType, *mut c_void, usize, *const c_char, c_uint, *mut CUjit_option, *mut *mut c_void,
        );
        cuLinkComplete(CUlinkState, *mut *mut c_void, *mut usize);
        cuLinkDestroy(CUlinkState);

        cuModuleLoadData(*mut CUmodule, *const c_void);
        cuModuleLoadDataEx(*mut CUmodule, *const c_void, c_uint, *mut CUjit_option, *mut *mut c_void);
        cuModuleUnload(CUmodule);
        cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
        cuFuncGetAttribute(*mut c_int, CUfunction_attribute, CUfunction);
        cuFuncSetAttribute(CUfunction, CUfunction_attribute, c_int);
        cuOccupancyMaxActiveBlocksPerMultiprocessor(*mut c_int, CUfunction, c_int, usize);
        cuLaunchKernelEx(*const CUlaunchConfig, CUfunction, *mut *mut c_void, *mut *mut c_void);
        cuTensorMapEncodeTiled(
            *mut CUtensorMap, CUtensorMapDataType, u32, *mut c_void, *const u64, *const u64, *const u32, *const u32,
            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill,
        );
    }
    unchecked {
        // Every driver has this symbol; the headers of CUDA 13 give the name to `cuEventElapsedTime_v2`, which drivers
        // before 12.8 lack.
        cuEventElapsedTime(*mut f32, CUevent, CUevent);
        // With the number in place of the enum, so that any code can be passed.
        cuGetErrorName(Code, *mut *const c_char);
        cuGetErrorString(Code, *mut *const c_char);
    }
}
