//! Architectures and PTX versions: the needs of a kernel, and the abilities of a GPU.

use core::fmt;
use core::str::FromStr;

/// The first PTX version and architecture that have an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Since {
    /// PTX version as (major, minor).
    pub ptx: (u8, u8),
    /// Compute capability, 80 for 8.0.
    pub compute: u32,
    /// True if only GPUs of exactly this capability have it, under the target whose name ends in `a`.
    pub specific: bool,
}

impl Since {
    /// The first version and the lowest architecture of a feature that all later ones have as well.
    pub const fn new(ptx: (u8, u8), compute: u32) -> Self {
        Self { ptx, compute, specific: false }
    }

    /// The requirement that includes both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            ptx: self.ptx.max(other.ptx),
            compute: self.compute.max(other.compute),
            specific: self.specific || other.specific,
        }
    }
}

/// PTX 7.0 on `sm_80`: the least that any operation here needs.
pub const AMPERE: Since = Since::new((7, 0), 80);
/// PTX 7.1 on `sm_80`: `bf16` as `f32` in one conversion.
pub const AMPERE_BF16: Since = Since::new((7, 1), 80);
/// PTX 7.4 on `sm_80`: L2 prefetches beside loads and copies.
pub const AMPERE_PREFETCH: Since = Since::new((7, 4), 80);
/// PTX 8.1 on `sm_89`: conversions of 8-bit floats.
pub const ADA_FP8: Since = Since::new((8, 1), 89);
/// PTX 8.4 on `sm_89`: `mma` of 8-bit floats.
pub const ADA_FP8_MMA: Since = Since::new((8, 4), 89);
/// PTX 7.8 on `sm_90`: the arithmetic of `bf16` pairs.
pub const HOPPER_PAIRS: Since = Since::new((7, 8), 90);
/// PTX 8.0 on `sm_90`: TMA, bulk copies and the async proxy.
pub const HOPPER: Since = Since::new((8, 0), 90);
/// PTX 8.0 on `sm_90a`: `wgmma` and `setmaxnreg`, which later GPUs do not have.
pub const HOPPER_ONLY: Since = Since { ptx: (8, 0), compute: 90, specific: true };

/// The first CUDA release whose drivers compile each PTX version, both as (major, minor), from the release notes of the PTX
/// manual.
const PTX_OF_CUDA: [((u8, u8), (u8, u8)); 10] = [
    ((12, 0), (8, 0)),
    ((12, 1), (8, 1)),
    ((12, 2), (8, 2)),
    ((12, 3), (8, 3)),
    ((12, 4), (8, 4)),
    ((12, 5), (8, 5)),
    ((12, 7), (8, 6)),
    ((12, 8), (8, 7)),
    ((12, 9), (8, 8)),
    ((13, 0), (9, 0)),
];

/// The newest PTX version that a driver of a CUDA release compiles; at least the first and at most the last that is known
/// here.
pub fn ptx_of_cuda(cuda: (u8, u8)) -> (u8, u8) {
    let known = PTX_OF_CUDA.iter().rfind(|(first, _)| *first <= cuda);
    known.unwrap_or(&PTX_OF_CUDA[0]).1
}

/// The first CUDA release whose drivers compile a PTX version; the last that is known here for versions after it.
pub fn cuda_of_ptx(ptx: (u8, u8)) -> (u8, u8) {
    let known = PTX_OF_CUDA.iter().find(|(_, has)| *has >= ptx);
    known.unwrap_or(&PTX_OF_CUDA[PTX_OF_CUDA.len() - 1]).0
}

/// The newest PTX version that is known here: no kernel needs a later one.
pub const NEWEST_PTX: (u8, u8) = PTX_OF_CUDA[PTX_OF_CUDA.len() - 1].1;

impl fmt::Display for Since {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ptx: (major, minor), compute, specific } = self;
        write!(formatter, "sm_{compute}{} and PTX {major}.{minor}", if *specific { "a" } else { "" })
    }
}

/// A GPU architecture that kernels are generated for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Arch {
    /// A100.
    Sm80,
    /// A10, RTX 30.
    Sm86,
    /// L4, L40S, RTX 40.
    Sm89,
    /// H100, H200.
    Sm90,
    /// H100, H200 with the instructions that only they have (`wgmma`, `setmaxnreg`).
    Sm90a,
    /// RTX 50.
    Sm120,
}

impl Arch {
    /// Every architecture, in order.
    pub const ALL: [Self; 6] = [Self::Sm80, Self::Sm86, Self::Sm89, Self::Sm90, Self::Sm90a, Self::Sm120];

    /// The name as compilers spell it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sm80 => "sm_80",
            Self::Sm86 => "sm_86",
            Self::Sm89 => "sm_89",
            Self::Sm90 => "sm_90",
            Self::Sm90a => "sm_90a",
            Self::Sm120 => "sm_120",
        }
    }

    /// Compute capability, 80 for 8.0.
    pub const fn compute(self) -> u32 {
        match self {
            Self::Sm80 => 80,
            Self::Sm86 => 86,
            Self::Sm89 => 89,
            Self::Sm90 | Self::Sm90a => 90,
            Self::Sm120 => 120,
        }
    }

    /// The lowest PTX version that knows the architecture.
    pub const fn ptx(self) -> (u8, u8) {
        match self {
            Self::Sm80 => (7, 0),
            Self::Sm86 => (7, 1),
            Self::Sm89 | Self::Sm90 => (7, 8),
            Self::Sm90a => (8, 0),
            Self::Sm120 => (8, 7),
        }
    }

    /// True for a target with the instructions of exactly one capability.
    pub const fn is_specific(self) -> bool {
        match self {
            Self::Sm90a => true,
            Self::Sm80 | Self::Sm86 | Self::Sm89 | Self::Sm90 | Self::Sm120 => false,
        }
    }

    /// Bytes of shared memory that one CTA can have.
    pub const fn shared_bytes_per_cta(self) -> u32 {
        match self {
            Self::Sm80 => 163 * 1024,
            Self::Sm86 | Self::Sm89 | Self::Sm120 => 99 * 1024,
            Self::Sm90 | Self::Sm90a => 227 * 1024,
        }
    }

    /// Bytes of shared memory of one SM.
    pub const fn shared_bytes_per_sm(self) -> u32 {
        match self {
            Self::Sm80 => 164 * 1024,
            Self::Sm86 | Self::Sm89 | Self::Sm120 => 100 * 1024,
            Self::Sm90 | Self::Sm90a => 228 * 1024,
        }
    }

    /// Warps that one SM can hold.
    pub const fn warps_per_sm(self) -> u32 {
        match self {
            Self::Sm80 | Self::Sm90 | Self::Sm90a => 64,
            Self::Sm86 | Self::Sm89 | Self::Sm120 => 48,
        }
    }

    /// True if tensor cores multiply 8-bit floats by `mma.sync`. For the others that take the instruction, those of Hopper,
    /// ptxas converts its operands to `f16`: two products of depth 16, which start at zero, and an addition of the accumulator
    /// in `f32`. Of each register the first has the lower two bytes, the second the upper two.
    pub const fn has_fp8_mma(self) -> bool {
        match self {
            Self::Sm89 | Self::Sm120 => true,
            Self::Sm80 | Self::Sm86 | Self::Sm90 | Self::Sm90a => false,
        }
    }

    /// True if it has clusters of CTAs.
    pub const fn has_clusters(self) -> bool {
        self.has(HOPPER)
    }

    /// True if the architecture has everything that `since` requires.
    pub const fn has(self, since: Since) -> bool {
        if since.specific {
            self.is_specific() && self.compute() == since.compute
        } else {
            self.compute() >= since.compute
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// A name that is not a supported architecture.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown architecture `{name}`; supported are sm_80, sm_86, sm_89, sm_90, sm_90a and sm_120")]
pub struct UnknownArch {
    /// The name.
    pub name: String,
}

impl FromStr for Arch {
    type Err = UnknownArch;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|arch| arch.name() == name).ok_or_else(|| UnknownArch { name: name.to_owned() })
    }
}
