//! Reference GPU of commands about GPU kernels: the first of this machine, or an H200 where there is none.

use flashcore_cuda::Driver;
use flashcore_ir::Arch;
use flashcore_kernels::Target;

/// The name of the GPU that stands in where there is none.
pub(super) const NAME: &str = "h200";
/// Architecture, with its own instructions.
pub(super) const ARCH: Arch = Arch::Sm90a;
/// The same with its SMs, which decide between configs for short problems.
pub(super) const TARGET: Target = Target::new(ARCH, 132);

/// The architecture of the first GPU, or of the one that stands in.
pub(super) fn arch() -> Arch {
    Driver::load().and_then(|driver| driver.device(0)).and_then(|device| device.specific_arch()).unwrap_or(ARCH)
}
