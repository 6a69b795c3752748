//! A GPU as far as plans depend on it.

use flashcore_ir::Arch;
use flashcore_ir::target::NEWEST_PTX;

/// A GPU as far as plans depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Target {
    /// The architecture that kernels are generated for.
    pub arch: Arch,
    /// Number of SMs: as many persistent CTAs run at a time.
    pub num_sms: u32,
    /// The newest PTX version that the driver compiles.
    pub ptx: (u8, u8),
}

impl Target {
    /// A GPU under a driver that compiles every kernel.
    pub const fn new(arch: Arch, num_sms: u32) -> Self {
        Self { arch, num_sms, ptx: NEWEST_PTX }
    }

    /// The GPU under a driver that compiles PTX up to this version.
    #[must_use]
    pub const fn with_ptx(self, ptx: (u8, u8)) -> Self {
        Self { ptx, ..self }
    }
}

/// A GPU with an SM for every CTA, under a driver that compiles every kernel.
impl From<Arch> for Target {
    fn from(arch: Arch) -> Self {
        Self::new(arch, u32::MAX)
    }
}
