//! Kernel specification: everything that the text of a kernel depends on, and the key of every kernel cache.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use flashcore_ir::{Arch, VerifiedKernel, VerifyError};

use crate::cache::AppendSpec;
use crate::config::{AmpereConfig, Config, HopperConfig};
use crate::merge::MergeSpec;
use crate::specialization::Specialization;
use flashcore_problem::DType;

/// The key of generated and loaded kernels: everything that the text of a kernel depends on, for each operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KernelKey {
    /// A kernel of attention.
    Attention(KernelSpec),
    /// Append to a KV cache.
    Append(AppendSpec, Arch),
    /// Merge of partial results.
    Merge(MergeSpec, Arch),
}

impl From<KernelSpec> for KernelKey {
    fn from(spec: KernelSpec) -> Self {
        Self::Attention(spec)
    }
}

/// Everything that the text of a kernel of attention depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KernelSpec {
    /// The kernel of a plan.
    pub stage: Stage,
    /// The config, without what is not compiled in.
    pub config: Config,
    /// The specialization, without what the stage does not look at.
    pub specialization: Specialization,
    /// The architecture.
    pub arch: Arch,
}

/// Kernels of a plan, in the order in which they are launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
    /// Sets the counter that a dynamic scheduler takes tiles from to zero.
    ResetCounter,
    /// Block-mask precompute: classifies blocks of the score matrix as empty, partial or full before attention.
    BlockMask,
    /// Attention.
    Attention,
    /// Combines the partial results of split-KV.
    Combine,
}

/// Generated kernels that are kept for whoever asks for them next: those of a plan that is loaded just after.
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
    /// The specification, with what does not reach the text of the kernel left out.
    pub fn new(stage: Stage, config: Config, specialization: Specialization, arch: Arch) -> Self {
        let (config, specialization) = match stage {
            Stage::Combine => match config {
                Config::Ampere(AmpereConfig { chunk_keys: 1.., pdl, .. })
                | Config::Hopper(HopperConfig { chunk_keys: 1.., pdl, .. }) => {
                    let config = AmpereConfig {
                        persistent: 1,
                        chunk_keys: AmpereConfig::BASE.tile_n,
                        pdl,
                        ..AmpereConfig::BASE
                    };
                    (Config::Ampere(config), specialization.for_chunk_combine())
                }
                _ => (Config::scalar(), specialization.for_combine()),
            },
            Stage::ResetCounter => {
                let pdl = matches!(config, Config::Hopper(HopperConfig { pdl: true, .. }));
                let config = HopperConfig { dynamic: true, pdl, ..HopperConfig::BASE };
                (Config::Hopper(config), Specialization::new(DType::F16, 64))
            }
            Stage::Attention | Stage::BlockMask => (config.compiled(), specialization),
        };
        Self { stage, config, specialization, arch }
    }

    /// As [`KernelKey::check`].
    pub fn check(self) -> Result<(u8, u8), Vec<VerifyError>> {
        KernelKey::from(self).check()
    }

    /// The kernel, generated and verified now, or kept from a moment ago.
    pub fn kernel(self) -> Result<Arc<VerifiedKernel>, Vec<VerifyError>> {
        KernelKey::from(self).kernel()
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
        if let Some((_, kernel)) = lock().kept.iter().find(|(spec, _)| *spec == self) {
            return Ok(kernel.clone());
        }
        let kernel = self.generate().map(Arc::new);
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

    fn generate(self) -> Result<VerifiedKernel, Vec<VerifyError>> {
        match self {
            Self::Attention(KernelSpec { stage, config, specialization, arch }) => {
                config.generate(stage, specialization, arch).verify(arch)
            }
            Self::Append(spec, arch) => spec.generate().verify(arch),
            Self::Merge(spec, arch) => spec.generate().verify(arch),
        }
    }
}
