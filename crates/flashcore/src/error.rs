//! Errors of devices, plans and launches.

#[cfg(feature = "cuda")]
use flashcore_cuda::CudaError;
#[cfg(feature = "cuda")]
use flashcore_kernels::UnknownConfig;
use flashcore_problem::Invalid;

#[cfg(feature = "cuda")]
use crate::Forked;
use crate::Unsupported;

/// Reason why something was not computed. The message names the argument, its value and what is allowed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The problem is impossible, or the host tensors do not belong to it.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The device does not take the problem.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// An address that is needed is missing.
    #[error("{argument} is null; it must be the address of device memory")]
    Null {
        /// The tensor.
        argument: &'static str,
    },
    /// An address was given for a tensor that the problem does not have.
    #[error("{argument} is {address:#x}; the problem has it switched off, so it must be 0")]
    Unexpected {
        /// The tensor.
        argument: &'static str,
        /// The address.
        address: u64,
    },
    /// An address that kernels cannot begin from.
    #[error("{argument} is {address:#x}; it must be a multiple of {multiple}")]
    Misaligned {
        /// The tensor.
        argument: &'static str,
        /// The address.
        address: u64,
        /// Number of which it must be a multiple.
        multiple: u64,
    },
    /// A tensor that ends past the end of the address space.
    #[error("{argument} is {address:#x} and has {bytes} bytes; it must end before {:#x}", u64::MAX)]
    AddressOverflow {
        /// The tensor.
        argument: &'static str,
        /// The address.
        address: u64,
        /// Size of the tensor.
        bytes: u64,
    },
    /// Something that is written has the address of something else.
    #[error("{written} and {other} are both {address:#x}; what is written must have a place of its own")]
    Aliased {
        /// The tensor that is written.
        written: &'static str,
        /// The tensor that lies in the same place.
        other: &'static str,
        /// The address.
        address: u64,
    },
    /// A stream or a buffer of another CUDA context than the plan's.
    #[cfg(feature = "cudarc")]
    #[error(
        "{argument} belongs to another CUDA context than the plan on {device} or the stream; make stream and buffers from \
         one CudaContext::new of that device"
    )]
    OtherContext {
        /// The stream or the tensor.
        argument: &'static str,
        /// The device of the plan.
        device: String,
    },
    /// Lengths are read back, and the stream captures a graph, which executes nothing.
    #[cfg(feature = "cuda")]
    #[error(
        "lengths on the device cannot be checked while the stream captures a graph; call check_lengths before the capture \
         or before a replay, and leave FLASHCORE_CHECK_LENGTHS unset"
    )]
    CheckWhileCapturing,
    /// A call that this plan's device does not have.
    #[error("{call} is for device tensors, and this plan is on {device}; use run, or plan for Device::cuda")]
    NotOnCuda {
        /// The call.
        call: &'static str,
        /// The device of the plan.
        device: String,
    },
    /// A backend that was left out when this program was built.
    #[error("this program was built without the {backend} backend of flashcore; turn on its cargo feature `{backend}`")]
    NotBuilt {
        /// The backend, and the name of its feature.
        backend: &'static str,
    },
    /// A name that is no kernel config.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    UnknownConfig(#[from] UnknownConfig),
    /// `FLASHCORE_CPU_LEVEL` names a level that is unknown, or that this machine lacks.
    #[cfg(feature = "cpu")]
    #[error(transparent)]
    CpuLevel(#[from] flashcore_cpu::LevelError),
    /// The process that this one was forked from uses CUDA.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Forked(#[from] Forked),
    /// The driver or the GPU failed.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

#[cfg(feature = "cpu")]
impl From<flashcore_cpu::CpuError> for Error {
    fn from(error: flashcore_cpu::CpuError) -> Self {
        match error {
            flashcore_cpu::CpuError::Invalid(invalid) => Self::Invalid(invalid),
            flashcore_cpu::CpuError::Level(level) => Self::CpuLevel(level),
        }
    }
}
