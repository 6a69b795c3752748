//! The verifier (being written): proof that a kernel keeps the rules of the language.

use core::ops::Deref;

use crate::kernel::Kernel;
use crate::target::Arch;

/// A kernel that keeps every rule of the language on an architecture. Printer and simulator accept nothing else.
#[derive(Debug, Clone, PartialEq)]
pub struct VerifiedKernel {
    kernel: Kernel,
    arch: Arch,
}

impl VerifiedKernel {
    /// The architecture it was verified for.
    pub const fn arch(&self) -> Arch {
        self.arch
    }

    /// The kernel, to be changed and verified again.
    pub fn into_kernel(self) -> Kernel {
        self.kernel
    }
}

impl Deref for VerifiedKernel {
    type Target = Kernel;

    fn deref(&self) -> &Kernel {
        &self.kernel
    }
}

/// A broken rule and its place.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("broken")]
pub struct VerifyError {}

impl Kernel {
    /// Checks every rule; returns all that are broken.
    pub fn verify(self, arch: Arch) -> Result<VerifiedKernel, Vec<VerifyError>> {
        Ok(VerifiedKernel { kernel: self, arch })
    }
}
