//! What the tests share: running a kernel over bytes.

#![allow(dead_code, reason = "each test binary uses a part")]

use flashcore_ir::{Arch, Builder, Kernel, VerifiedKernel};
use flashcore_sim::{Argument, Fault, GlobalMemory, Launch, Options, Report, SimError, launch};

/// The architecture that has every operation.
pub(crate) const ARCH: Arch = Arch::Sm90a;

/// The kernel that a closure writes.
pub(crate) fn kernel(threads: u32, write: impl FnOnce(&mut Builder)) -> VerifiedKernel {
    let mut builder = Builder::new("test", threads);
    write(&mut builder);
    verified(builder.finish())
}

/// A kernel that keeps the rules.
pub(crate) fn verified(kernel: Kernel) -> VerifiedKernel {
    kernel.verify(ARCH).unwrap_or_else(|errors| panic!("{errors:#?}"))
}

/// A run of one CTA.
pub(crate) fn run(kernel: &VerifiedKernel, arguments: &[Argument], memory: &GlobalMemory) -> Result<Report, SimError> {
    run_seeded(kernel, arguments, memory, 0)
}

/// A run of one CTA under a seed.
pub(crate) fn run_seeded(
    kernel: &VerifiedKernel,
    arguments: &[Argument],
    memory: &GlobalMemory,
    seed: u64,
) -> Result<Report, SimError> {
    let options = Options { seed, ..Options::default() };
    launch(kernel, &Launch { grid: [1, 1, 1], arguments: arguments.to_vec() }, memory, &options)
}

/// The fault of a run.
pub(crate) fn fault(result: Result<Report, SimError>) -> Fault {
    match result {
        Err(SimError::Fault(fault)) => *fault,
        other => panic!("expected a fault, got {other:#?}"),
    }
}

/// Numbers as bytes.
pub(crate) fn bytes<const N: usize, T>(values: &[T], to_bytes: impl Fn(&T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(to_bytes).collect()
}

/// Bytes as words.
pub(crate) fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|chunk| u32::from_le_bytes([chunk[0], chunk[1], chunk[2], chunk[3]])).collect()
}
