//! The architectures, among those that kernels are generated for, that a GPU runs.

use flashcore_ir::Arch;

/// True if a GPU of this compute capability runs kernels generated for `arch`.
///
/// PTX of one architecture is compiled for every later one, except PTX of an architecture with the suffix `a`, which is
/// for that one alone.
pub fn runs(compute: (u32, u32), arch: Arch) -> bool {
    let compute = number(compute);
    match arch {
        Arch::Sm90a => compute == arch.compute(),
        Arch::Sm80 | Arch::Sm86 | Arch::Sm89 | Arch::Sm90 | Arch::Sm120 => compute >= arch.compute(),
    }
}

/// The newest architecture without the suffix `a` that a GPU of this compute capability runs; `None` for those before
/// 8.0.
///
/// A GPU that is newer than all of them gets the newest of them: a driver that knows the GPU compiles it. The size of
/// its shared memory is in the device's own attributes.
pub fn best(compute: (u32, u32)) -> Option<Arch> {
    Arch::ALL.into_iter().filter(|&arch| arch != Arch::Sm90a && runs(compute, arch)).max()
}

/// The architecture with all instructions of a GPU of this compute capability, with the suffix `a` where there is one.
pub fn specific(compute: (u32, u32)) -> Option<Arch> {
    if runs(compute, Arch::Sm90a) { Some(Arch::Sm90a) } else { best(compute) }
}

const fn number((major, minor): (u32, u32)) -> u32 {
    10 * major + minor
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table() {
        for (compute, expected) in [
            ((7, 5), None),
            ((8, 0), Some(Arch::Sm80)),
            ((8, 6), Some(Arch::Sm86)),
            ((8, 7), Some(Arch::Sm86)),
            ((8, 9), Some(Arch::Sm89)),
            ((9, 0), Some(Arch::Sm90)),
            ((10, 0), Some(Arch::Sm90)),
            ((10, 3), Some(Arch::Sm90)),
            ((11, 0), Some(Arch::Sm90)),
            ((12, 0), Some(Arch::Sm120)),
            ((12, 1), Some(Arch::Sm120)),
            ((13, 0), Some(Arch::Sm120)),
        ] {
            assert_eq!(best(compute), expected, "{compute:?}");
        }
    }

    #[test]
    fn everything_that_a_gpu_has() {
        let found = [(7, 5), (8, 9), (9, 0), (10, 0), (12, 0)].map(specific);
        assert_eq!(found, [None, Some(Arch::Sm89), Some(Arch::Sm90a), Some(Arch::Sm90), Some(Arch::Sm120)]);
    }

    #[test]
    fn accelerated_kernels_run_on_one_architecture() {
        let accelerated: Vec<_> =
            [(8, 9), (9, 0), (10, 0), (12, 0)].into_iter().filter(|&compute| runs(compute, Arch::Sm90a)).collect();
        assert_eq!(accelerated, [(9, 0)]);
        assert!(runs((9, 0), Arch::Sm80) && runs((12, 0), Arch::Sm90) && !runs((8, 0), Arch::Sm86));
    }
}
