//! Errors of the driver and of the GPU.

use core::fmt;
use std::sync::Arc;

use flashcore_ir::{Arch, Argument, InvalidTensorMap, ParameterType};

use crate::arguments::{MOST_ARGUMENTS, MOST_TENSOR_MAPS};
use crate::driver::{DriverVersion, LIBRARIES, OLDEST_DRIVER};

/// A driver function that did not succeed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The function.
    pub call: &'static str,
    /// The number of the error.
    pub code: u32,
    /// The name, like `CUDA_ERROR_OUT_OF_MEMORY`.
    pub name: String,
    /// The driver's description.
    pub text: String,
    /// The kernel launched last before the call: errors of kernels surface at any later call.
    pub last_launch: Option<Arc<str>>,
}

/// The numbers of the errors that this crate handles.
pub(crate) mod code {
    pub(crate) const SUCCESS: u32 = 0;
    pub(crate) const INVALID_VALUE: u32 = 1;
    pub(crate) const OUT_OF_MEMORY: u32 = 2;
    pub(crate) const DEINITIALIZED: u32 = 4;
    pub(crate) const STUB_LIBRARY: u32 = 34;
    pub(crate) const NO_DEVICE: u32 = 100;
    pub(crate) const INVALID_IMAGE: u32 = 200;
    pub(crate) const NO_BINARY_FOR_GPU: u32 = 209;
    pub(crate) const UNSUPPORTED_PTX_VERSION: u32 = 222;
    pub(crate) const INVALID_SOURCE: u32 = 300;
    pub(crate) const NOT_READY: u32 = 600;
}

impl Failure {
    /// True for a sticky error, after which nothing works in this context: data on the GPU is lost, and every later
    /// call fails too.
    pub const fn is_sticky(&self) -> bool {
        matches!(
            self.code,
            214 // ECC_UNCORRECTABLE
                | 220 // NVLINK_UNCORRECTABLE
                | 226 // CONTAINED
                | 700 // ILLEGAL_ADDRESS
                | 702 // LAUNCH_TIMEOUT
                | 709 // CONTEXT_IS_DESTROYED
                | 710 // ASSERT
                | 714 // HARDWARE_STACK_ERROR
                | 715 // ILLEGAL_INSTRUCTION
                | 716 // MISALIGNED_ADDRESS
                | 717 // INVALID_ADDRESS_SPACE
                | 718 // INVALID_PC
                | 719 // LAUNCH_FAILED
                | 721 // TENSOR_MEMORY_LEAK
        )
    }

    /// A remedy, where one is known.
    const fn advice(&self) -> Option<&'static str> {
        match self.code {
            code::UNSUPPORTED_PTX_VERSION => Some("the driver is older than this kernel needs: update it"),
            code::NO_BINARY_FOR_GPU => Some("the kernel was generated for another GPU"),
            // SYSTEM_DRIVER_MISMATCH
            803 => Some("the kernel module and the library of the driver have different versions: reboot"),
            _ => None,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { call, code, name, text, last_launch } = self;
        write!(formatter, "{call} failed with {name} ({code}): {text}")?;
        if let Some(kernel) = last_launch.as_ref().filter(|_| self.is_sticky()) {
            write!(formatter, "; the last kernel launched was `{kernel}`")?;
        }
        self.advice().map_or(Ok(()), |advice| write!(formatter, "; {advice}"))
    }
}

impl std::error::Error for Failure {}

/// The reason why a call did not succeed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// No driver is installed, or it cannot be loaded.
    #[error(
        "no NVIDIA driver: {reason} (tried {}); install one: only the cpu backend needs none", LIBRARIES.join(", ")
    )]
    NoDriver {
        /// The loader's message.
        reason: String,
    },
    /// The driver is older than the oldest this crate works with.
    #[error("the NVIDIA driver is for CUDA {found}; CUDA {needed} is the oldest that works: update the driver")]
    DriverTooOld {
        /// The version of the driver.
        found: DriverVersion,
        /// The oldest that works.
        needed: DriverVersion,
    },
    /// The driver lacks a function that its version should have.
    #[error("the NVIDIA driver has no `{symbol}`, which every driver since CUDA {OLDEST_DRIVER} has: reinstall it")]
    MissingSymbol {
        /// The function.
        symbol: &'static str,
    },
    /// There is a driver and no GPU, or none that this process may see.
    #[error("the NVIDIA driver sees no GPU; is CUDA_VISIBLE_DEVICES set to hide it?")]
    NoDevice,
    /// There is no GPU of this number.
    #[error("there is no GPU {ordinal}; there are {count}, numbered from 0")]
    UnknownDevice {
        /// The number.
        ordinal: usize,
        /// The number of GPUs.
        count: usize,
    },
    /// The GPU lacks instructions that every kernel here needs.
    #[error("{name} has compute capability {}.{}; kernels need 8.0 or higher", compute.0, compute.1)]
    DeviceTooOld {
        /// The GPU.
        name: String,
        /// The compute capability.
        compute: (u32, u32),
    },
    /// The kernel was generated for an architecture that this GPU does not run.
    #[error("kernel `{kernel}` is for {arch}; {device} has compute capability {}.{}", compute.0, compute.1)]
    WrongArch {
        /// The kernel.
        kernel: String,
        /// The architecture of the kernel.
        arch: Arch,
        /// The GPU.
        device: String,
        /// The compute capability.
        compute: (u32, u32),
    },
    /// A driver function failed.
    #[error(transparent)]
    Call(Box<Failure>),
    /// An earlier error has ended all work on this GPU in this process.
    #[error("this process can no longer use the GPU because earlier {first}; restart the process")]
    Poisoned {
        /// The error.
        first: Box<Failure>,
    },
    /// Not enough memory on the GPU.
    #[error("out of GPU memory: {bytes} bytes requested, {free} of {total} bytes are free")]
    OutOfMemory {
        /// Bytes requested.
        bytes: usize,
        /// Bytes free.
        free: usize,
        /// Bytes in all.
        total: usize,
    },
    /// A copy from or to bytes outside a buffer.
    #[error("bytes {offset}..{} are outside a buffer of {bytes} bytes", offset.saturating_add(*length))]
    OutOfBounds {
        /// The start of the range.
        offset: usize,
        /// Bytes of the range.
        length: usize,
        /// Bytes of the buffer.
        bytes: usize,
    },
    /// A wait or a copy to the host while the stream captures a graph, which executes nothing.
    #[error("{call} on a stream that is recording a graph; do it before or after the capture")]
    Capturing {
        /// The call.
        call: &'static str,
    },
    /// A captured launch that needs a workspace and brings none.
    #[error(
        "a launch that is captured in a graph needs a workspace of {bytes} bytes: bring one with its tensors, memory that \
         nothing else uses while an executable graph of it runs"
    )]
    CapturedWorkspace {
        /// Bytes of the workspace.
        bytes: usize,
    },
    /// The driver cannot compile the kernel.
    #[error("the driver cannot compile kernel `{kernel}`: {failure}\n{log}")]
    Compile {
        /// The kernel.
        kernel: String,
        /// The call that failed.
        failure: Box<Failure>,
        /// The compiler's log, with the lines it is about.
        log: String,
    },
    /// The kernel needs more of something than the GPU gives to one CTA.
    #[error("kernel `{kernel}` needs {needed} {what} per CTA; {device} gives at most {available}")]
    TooLarge {
        /// The kernel.
        kernel: String,
        /// The resource.
        what: &'static str,
        /// The amount that it needs.
        needed: u32,
        /// The amount that there is.
        available: u32,
        /// The GPU.
        device: String,
    },
    /// A launch with another number of arguments than the kernel has parameters.
    #[error("kernel `{kernel}` takes {expected} arguments, not {found}")]
    ArgumentCount {
        /// The kernel.
        kernel: String,
        /// The number of parameters.
        expected: usize,
        /// The number of arguments.
        found: usize,
    },
    /// An argument of another type than its parameter.
    #[error("argument {index} of kernel `{kernel}`, `{parameter}`, is a {expected}, not {found:?}")]
    ArgumentType {
        /// The kernel.
        kernel: String,
        /// The position.
        index: usize,
        /// The name of the parameter.
        parameter: String,
        /// The type of the parameter.
        expected: ParameterType,
        /// The argument.
        found: Box<Argument>,
    },
    /// A tensor map that hardware cannot encode.
    #[error("not a tensor map that hardware can encode: {0}")]
    TensorMap(#[from] InvalidTensorMap),
    /// A kernel with more tensor maps than a launch can have.
    #[error("kernel `{kernel}` has {tensor_maps} tensor maps as parameters; a launch has room for {MOST_TENSOR_MAPS}")]
    TooManyTensorMaps {
        /// The kernel.
        kernel: String,
        /// The number of tensor maps.
        tensor_maps: usize,
    },
    /// A kernel with more parameters than a launch can have.
    #[error("kernel `{kernel}` has {parameters} parameters; a launch has room for {MOST_ARGUMENTS}")]
    TooManyParameters {
        /// The kernel.
        kernel: String,
        /// The number of parameters.
        parameters: usize,
    },
    /// A grid that no GPU takes.
    #[error(
        "a grid of {grid:?} CTAs: each dimension must be at least 1, the first at most 2147483647, \
         the others at most 65535"
    )]
    Grid {
        /// The grid.
        grid: [u32; 3],
    },
    /// Clusters that do not fill the grid.
    #[error("clusters of {cluster:?} CTAs do not fill a grid of {grid:?}: each dimension must divide that of the grid")]
    Cluster {
        /// CTAs of a cluster.
        cluster: [u32; 3],
        /// CTAs of the grid.
        grid: [u32; 3],
    },
}

impl From<Failure> for CudaError {
    fn from(failure: Failure) -> Self {
        Self::Call(Box::new(failure))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_say_what_happened_and_what_to_do() {
        let failure = Failure {
            call: "cuStreamSynchronize",
            code: 700,
            name: "CUDA_ERROR_ILLEGAL_ADDRESS".to_owned(),
            text: "an illegal memory access was encountered".to_owned(),
            last_launch: Some(Arc::from("ampere_f16_64")),
        };
        let said = "cuStreamSynchronize failed with CUDA_ERROR_ILLEGAL_ADDRESS (700): \
                    an illegal memory access was encountered; the last kernel launched was `ampere_f16_64`";
        assert_eq!(failure.to_string(), said);
        let poisoned = CudaError::Poisoned { first: Box::new(failure) };
        let later = format!("this process can no longer use the GPU because earlier {said}; restart the process");
        assert_eq!(poisoned.to_string(), later);
        let old = CudaError::DriverTooOld { found: DriverVersion(11_040), needed: OLDEST_DRIVER };
        assert_eq!(
            old.to_string(),
            "the NVIDIA driver is for CUDA 11.4; CUDA 12.0 is the oldest that works: update the driver"
        );
    }
}
