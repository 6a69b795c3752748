//! Why a device does not take a problem.

use flashcore_cuda::CudaError;
use flashcore_kernels::Config;
use flashcore_problem::ProblemError;

use crate::Forked;

/// One reason why a device does not take a problem. [`supports`](crate::supports()) gives all of them at once.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// The problem makes no sense on any device.
    #[error(transparent)]
    Problem(ProblemError),
    /// The problem makes sense, and the GPU kernel does not have it.
    #[error(transparent)]
    Kernel(flashcore_kernels::Reason),
    /// A size beyond what the CPU backend sets memory aside for.
    #[error("{argument} is {value}; the cpu backend takes at most {limit}")]
    TooWideForCpu {
        /// The field of the problem.
        argument: &'static str,
        /// Its value.
        value: usize,
        /// The largest that is taken.
        limit: usize,
    },
    /// A kernel config was chosen for a device without kernels.
    #[error("config is one of the {} kernel, which is for GPUs; the cpu backend has no configs: leave it out", config.family())]
    ConfigOnCpu {
        /// The config.
        config: Config,
    },
    /// The process that this one was forked from uses CUDA.
    #[error(transparent)]
    Forked(Forked),
    /// The driver or the GPU refused: the kernel does not compile, the GPU is too old, there is no memory.
    #[error(transparent)]
    Cuda(CudaError),
    /// The kernel gave wrong results when it was run for the first time on this driver.
    #[error(
        "kernel `{kernel}`, as this driver compiles it, gave a wrong result on a small problem and is not used: \
         {complaint}; choose another config or another driver version, and please report it"
    )]
    SelfCheck {
        /// The kernel.
        kernel: String,
        /// What the gate said.
        complaint: String,
    },
}

impl From<ProblemError> for Reason {
    fn from(error: ProblemError) -> Self {
        Self::Problem(error)
    }
}

impl From<flashcore_kernels::Reason> for Reason {
    fn from(reason: flashcore_kernels::Reason) -> Self {
        match reason {
            flashcore_kernels::Reason::Problem(error) => Self::Problem(error),
            reason => Self::Kernel(reason),
        }
    }
}

impl From<CudaError> for Reason {
    fn from(error: CudaError) -> Self {
        Self::Cuda(error)
    }
}
