//! Reasons why a device does not take a problem.

use std::fmt;
use std::ops::Deref;
use std::slice;
use std::vec;

#[cfg(feature = "cuda")]
use flashcore_cuda::CudaError;
#[cfg(feature = "cuda")]
use flashcore_kernels::Config;
use flashcore_problem::ProblemError;

#[cfg(feature = "cuda")]
use crate::Forked;

/// One reason why a device does not take a problem. [`supports`](crate::supports()) gives all of them at once.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// The problem makes no sense on any device.
    #[error(transparent)]
    Problem(ProblemError),
    /// The problem makes sense, and the GPU kernel does not have it.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Kernel(flashcore_kernels::Reason),
    /// A size beyond what the CPU backend sets memory aside for.
    #[error("{argument} is {value}; the cpu backend takes at most {limit}")]
    TooWideForCpu {
        /// The field of the problem.
        argument: &'static str,
        /// The value.
        value: usize,
        /// The largest that is taken.
        limit: usize,
    },
    /// The backend of the device was left out when this program was built.
    #[error("this program was built without the {backend} backend of flashcore; turn on its cargo feature `{backend}`")]
    NotBuilt {
        /// The backend, and the name of its feature.
        backend: &'static str,
    },
    /// A kernel config was chosen for a device without kernels.
    #[cfg(feature = "cuda")]
    #[error("config is one of the {} kernel, which is for GPUs; the cpu backend has no configs: leave it out", config.family())]
    ConfigOnCpu {
        /// The config.
        config: Config,
    },
    /// The process that this one was forked from uses CUDA.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Forked(Forked),
    /// The driver or the GPU refused: the kernel does not compile, the GPU is too old, there is no memory.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(CudaError),
    /// The kernel gave wrong results when it was run for the first time on this driver.
    #[cfg(feature = "cuda")]
    #[error(
        "kernel `{kernel}`, as this driver compiles it, gave a wrong result on a small problem and is not used: \
         {complaint}; choose another config or another driver version, and please report it"
    )]
    SelfCheck {
        /// The kernel.
        kernel: String,
        /// Complaint of the gate.
        complaint: String,
    },
}

/// Every [`Reason`] why a device does not take a problem: the error of [`supports`](crate::supports()) and
/// [`Plan::new`](crate::Plan::new).
///
/// It is a slice of reasons, never empty, and an error like any other: `?` turns it into [`Error`](crate::Error),
/// `Box<dyn std::error::Error>` or what a program uses for errors.
///
/// ```
/// use flashcore::{DType, Device, Problem, supports};
///
/// let problem = Problem::new(2, 8, 1024, 0, DType::F16);
/// let unsupported = supports(&problem, &Device::cpu()).unwrap_err();
/// for reason in &unsupported {
///     println!("{reason}");
/// }
/// assert_eq!(unsupported[0].to_string(), "head_dim is 0; it must be at least 1");
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Unsupported(Vec<Reason>);

impl Unsupported {
    /// `reasons`, of which there is at least one.
    pub(crate) const fn new(reasons: Vec<Reason>) -> Self {
        Self(reasons)
    }
}

impl fmt::Display for Unsupported {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, reason) in self.0.iter().enumerate() {
            write!(formatter, "{}{reason}", if number == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}

impl std::error::Error for Unsupported {}

impl Deref for Unsupported {
    type Target = [Reason];

    fn deref(&self) -> &[Reason] {
        &self.0
    }
}

impl IntoIterator for Unsupported {
    type Item = Reason;
    type IntoIter = vec::IntoIter<Reason>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl<'a> IntoIterator for &'a Unsupported {
    type Item = &'a Reason;
    type IntoIter = slice::Iter<'a, Reason>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

impl From<ProblemError> for Reason {
    fn from(error: ProblemError) -> Self {
        Self::Problem(error)
    }
}

#[cfg(feature = "cuda")]
impl From<flashcore_kernels::Reason> for Reason {
    fn from(reason: flashcore_kernels::Reason) -> Self {
        match reason {
            flashcore_kernels::Reason::Problem(error) => Self::Problem(error),
            reason => Self::Kernel(reason),
        }
    }
}

#[cfg(feature = "cuda")]
impl From<CudaError> for Reason {
    fn from(error: CudaError) -> Self {
        Self::Cuda(error)
    }
}
