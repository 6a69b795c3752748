//! Keys of kernels: everything that the text of a kernel depends on, and the key of every kernel cache.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use flashcore_ir::{Arch, Kernel, VerifiedKernel, VerifyError};

use crate::attention::block_mask::{self, BlockMaskTiles};
use crate::attention::scheduler::dynamic;
use crate::attention::split_kv::combine::CombineSpec;
use crate::cache::AppendSpec;
use crate::config::Config;
use crate::merge::MergeSpec;
use crate::specialization::Specialization;

/// The key of generated and loaded kernels: everything that the text of a kernel depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KernelKey {
    /// The kernel.
    pub spec: KernelSpec,
    /// The architecture.
    pub arch: Arch,
}

/// A kernel, and what is compiled into it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KernelSpec {
    /// Attention.
    Attention(Config, Specialization),
    /// Block-mask precompute: classifies blocks of the score matrix as empty, partial or full before attention.
    BlockMask(BlockMaskTiles, Specialization),
    /// Combines the partial results of split-KV.
    Combine(CombineSpec),
    /// Sets the counter that a dynamic scheduler takes tiles from to zero.
    ResetCounter {
        /// True if the kernel waits for the one before it (PDL).
        pdl: bool,
    },
    /// Append to a KV cache.
    Append(AppendSpec),
    /// Merge of partial results.
    Merge(MergeSpec),
}

/// The step of an operation that a kernel takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[expect(missing_docs, reason = "each is a variant of KernelSpec")]
pub enum Stage {
    ResetCounter,
    BlockMask,
    Attention,
    Combine,
    Append,
    Merge,
}

/// Generated kernels that are kept for the plan that is loaded next.
const KEPT_KERNELS: usize = 16;

/// The verdict on every kernel that was generated in this process, and the last ones themselves.
#[derive(Default)]
struct Generated {
    verdicts: HashMap<KernelKey, Result<(u8, u8), Vec<VerifyError>>>,
    kept: VecDeque<(KernelKey, Arc<VerifiedKernel>)>,
}

fn generated() -> &'static Mutex<Generated> {
    static GENERATED: OnceLock<Mutex<Generated>> = OnceLock::new();
    GENERATED.get_or_init(Mutex::default)
}

impl KernelSpec {
    /// The step that the kernel takes.
    pub const fn stage(self) -> Stage {
        match self {
            Self::Attention(..) => Stage::Attention,
            Self::BlockMask(..) => Stage::BlockMask,
            Self::Combine(_) => Stage::Combine,
            Self::ResetCounter { .. } => Stage::ResetCounter,
            Self::Append(_) => Stage::Append,
            Self::Merge(_) => Stage::Merge,
        }
    }

    /// The specialization of a kernel of attention.
    pub const fn specialization(self) -> Option<Specialization> {
        match self {
            Self::Attention(_, specialization)
            | Self::BlockMask(_, specialization)
            | Self::Combine(CombineSpec { specialization, .. }) => Some(specialization),
            Self::ResetCounter { .. } | Self::Append(_) | Self::Merge(_) => None,
        }
    }

    /// Writes the kernel.
    fn generate(self, arch: Arch) -> Kernel {
        match self {
            Self::Attention(config, specialization) => config.generate(specialization, arch),
            Self::BlockMask(tiles, specialization) => block_mask::kernel(tiles, specialization),
            Self::Combine(spec) => spec.generate(),
            Self::ResetCounter { pdl } => dynamic::reset_kernel(pdl),
            Self::Append(spec) => spec.generate(),
            Self::Merge(spec) => spec.generate(),
        }
    }
}

impl KernelKey {
    /// The PTX version that the kernel is printed in, or the rules that it breaks: shared memory that the architecture has
    /// not, say. Generates the kernel the first time only.
    pub fn check(self) -> Result<(u8, u8), Vec<VerifyError>> {
        let known = || generated().lock().unwrap_or_else(PoisonError::into_inner).verdicts.get(&self).cloned();
        known().unwrap_or_else(|| self.kernel().map(|kernel| kernel.ptx()))
    }

    /// The kernel, generated and verified now, or kept from a moment ago.
    pub fn kernel(self) -> Result<Arc<VerifiedKernel>, Vec<VerifyError>> {
        let lock = || generated().lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, kernel)) = lock().kept.iter().find(|(key, _)| *key == self) {
            return Ok(kernel.clone());
        }
        let kernel = self.spec.generate(self.arch).verify(self.arch).map(Arc::new);
        let mut generated = lock();
        generated.verdicts.insert(self, kernel.as_ref().map(|kernel| kernel.ptx()).map_err(Clone::clone));
        if let Ok(kernel) = &kernel {
            generated.kept.push_back((self, kernel.clone()));
            if generated.kept.len() > KEPT_KERNELS {
                generated.kept.pop_front();
            }
        }
        kernel
    }
}
