//! Kernel configs: every choice in a kernel that the problem does not make.

mod table;

use core::fmt;
use core::str::FromStr;

use flashcore_ir::{Arch, Kernel};
use flashcore_problem::Problem;

use crate::accuracy::Accuracy;
use crate::attention::block_mask::BlockMaskTiles;
use crate::attention::sm80::heuristics as sm80;
use crate::attention::sm90::heuristics as sm90;
use crate::cache::FusedAppend;
use crate::family::{Family, KernelTraits};
use crate::primitives::{Exponential, Fp8Widening, Rescale, SharedLayout, Tf32Products};
use crate::specialization::{MAX_VEC_BYTES, Specialization};
use crate::unsupported::Reason;

pub use crate::attention::ladder::config::{LadderConfig, Product};
pub use crate::attention::scalar::config::ScalarConfig;
pub use crate::attention::sm80::config::{AmpereConfig, L2Window, QueryPlace};
pub use crate::attention::sm90::config::{HopperConfig, WarpScheduler};
pub(crate) use table::{NameToken, Table, config_table};

/// Declares the families of kernels. Nothing else names a variant outside of the family's folder.
macro_rules! families {
    ($($(#[$doc:meta])* $Family:ident($Config:ident),)*) => {
        /// A kernel and every choice in it.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Config {
            $($(#[$doc])* $Family($Config),)*
        }

        $(
            impl From<$Config> for Config {
                fn from(config: $Config) -> Self {
                    Self::$Family(config)
                }
            }

            /// The choices, if the config is of this family.
            impl TryFrom<Config> for $Config {
                type Error = Config;

                fn try_from(config: Config) -> Result<Self, Config> {
                    match config {
                        Config::$Family(config) => Ok(config),
                        other => Err(other),
                    }
                }
            }
        )*

        impl Config {
            pub(crate) fn as_family(&self) -> &dyn Family {
                match self {
                    $(Self::$Family(config) => config,)*
                }
            }

            /// The choices that no kernel can be generated with.
            pub(crate) fn flaws(self) -> Vec<Reason> {
                match self {
                    $(Self::$Family(config) => config.flaws(),)*
                }
            }

            /// Configs that a search tries next.
            pub(crate) fn near(self, problem: &Problem) -> Vec<Self> {
                let mut near = match self {
                    $(Self::$Family(config) => config.near_in_table(),)*
                };
                near.extend(self.as_family().near(problem));
                near
            }
        }

        impl fmt::Display for Config {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$Family(config) => config.write_name(formatter),)*
                }
            }
        }

        /// Parses the name of a [`Config`], or the name of a family for its default. [`crate::LaunchPlan::new`] decides if a
        /// kernel can be generated from it.
        impl FromStr for Config {
            type Err = UnknownConfig;

            fn from_str(name: &str) -> Result<Self, UnknownConfig> {
                let mut parsed = [$($Config::parse(name)),*].into_iter().flatten();
                // A name that is written otherwise (row counts that are no multiple of 16, leading zeros) is none.
                let is_name = |config: &Self| config.to_string() == name || config.family() == name;
                parsed.find(is_name).ok_or_else(|| UnknownConfig { name: name.to_owned() })
            }
        }

        /// A name that no config has.
        #[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
        #[error("there is no kernel `{name}`; there are {}", [$($Config::names()),*].join("; "))]
        pub struct UnknownConfig {
            /// The name.
            pub name: String,
        }
    };
}

families! {
    /// One thread a row.
    Scalar(ScalarConfig),
    /// The ladder's kernel, with tiles in shared memory, scores too: the steps from the scalar kernel to the Ampere kernel.
    Ladder(LadderConfig),
    /// Tensor cores, `ldmatrix` and `cp.async`: everything from `sm_80` on.
    Ampere(AmpereConfig),
    /// TMA, `mbarrier`s and `wgmma`: `sm_90a`.
    Hopper(HopperConfig),
}

impl Config {
    /// The default of the scalar kernel.
    pub fn scalar() -> Self {
        ScalarConfig::BASE.into()
    }

    /// The default of the Ampere kernel.
    pub fn ampere() -> Self {
        AmpereConfig::BASE.into()
    }

    /// The default of the Hopper kernel.
    pub fn hopper() -> Self {
        HopperConfig::BASE.into()
    }

    /// The Ampere kernel with another layout of shared memory.
    pub fn ampere_with_layout(layout: SharedLayout) -> Self {
        AmpereConfig { layout, ..AmpereConfig::BASE }.into()
    }

    /// Every config that some problem gets by default, on some GPU.
    pub fn defaults() -> Vec<Self> {
        let ampere = sm80::ALL.into_iter().chain(sm80::ALL_F32).map(Self::from);
        let hopper = sm90::ALL.into_iter().chain(sm90::ALL_FP8).map(Self::from);
        [Self::scalar()].into_iter().chain(ampere).chain(hopper).collect()
    }

    /// The configs that resource gates, snapshots and tests go through.
    pub fn all() -> Vec<Self> {
        let ampere = AmpereConfig::default();
        let mut configs = vec![
            Self::scalar(),
            ampere.into(),
            Self::ampere_with_layout(SharedLayout::Plain),
            Self::ampere_with_layout(SharedLayout::Padded),
            Self::from(AmpereConfig { tile_n: 32, stages: 3, ..ampere }),
            Self::from(AmpereConfig { tile_n: 128, ..ampere }),
            Self::from(AmpereConfig { warps: 8, tile_n: 128, ..ampere }),
        ];
        let others = [AmpereConfig { rows_per_warp: 32, ..ampere }].into_iter().chain(sm80::ALL).map(Self::from);
        let others = others.chain(LadderConfig::LISTED.map(Self::from)).chain(AmpereConfig::LISTED.map(Self::from));
        for config in others {
            if !configs.contains(&config) {
                configs.push(config);
            }
        }
        configs.extend(sm90::ALL.map(Self::from));
        configs
    }

    /// The configs of `f32` on tensor cores that suites go through: every default, and one of each other choice.
    pub fn f32() -> Vec<Self> {
        let base = sm80::ALL_F32[0];
        let others = [
            AmpereConfig { tf32: Some(Tf32Products::One), ..base },
            AmpereConfig {
                rows_per_warp: 32,
                tile_n: 16,
                query: QueryPlace::Shared,
                rescale: Rescale::IfChanged,
                ..base
            },
            AmpereConfig { layout: SharedLayout::Padded, load_bytes: 4, tile_n: 64, ..base },
            AmpereConfig { producers: 1, stages: 3, tile_n: 16, ..base },
            AmpereConfig { num_splits: 3, pack_gqa: true, ..base },
            AmpereConfig { num_splits: 2, cluster: true, ..base },
        ];
        sm80::ALL_F32.into_iter().chain(others).map(Self::from).collect()
    }

    /// The configs of a query of 8 bits that suites go through: every default, and one of each other choice.
    pub fn fp8() -> Vec<Self> {
        let base = sm90::ALL_FP8[0];
        let others = [
            HopperConfig {
                tile_n: 128,
                overlap_rescale: false,
                rescale: Rescale::IfChanged,
                warp_scheduler: WarpScheduler::Free,
                warpgroups: 1,
                ..base
            },
            HopperConfig { tile_n: 32, stages: 3, warp_scheduler: WarpScheduler::ExclusiveExp, ..base },
            HopperConfig { tile_n: 64, warpgroups: 3, exponential: Exponential::Shared, ..base },
        ];
        sm90::ALL_FP8.into_iter().chain(others).map(Self::from).collect()
    }

    /// The configs that some problem with a query of 8 bits gets by default, where it is multiplied by `mma.sync`. All of them
    /// take problems of 16 bits too.
    pub fn fp8_mma_defaults() -> Vec<Self> {
        sm80::ALL_FP8.map(Self::from).to_vec()
    }

    /// The same with one of each other choice: those that suites go through.
    pub fn fp8_mma() -> Vec<Self> {
        let base = AmpereConfig::BASE;
        let others = [
            AmpereConfig { rows_per_warp: 32, tile_n: 32, query: QueryPlace::Shared, ..base },
            AmpereConfig { layout: SharedLayout::Padded, load_bytes: 4, tile_n: 48, ..base },
            AmpereConfig {
                layout: SharedLayout::Plain,
                stages: 1,
                tile_n: 128,
                exponential: Exponential::Shared,
                ..base
            },
            AmpereConfig { producers: 1, stages: 3, tile_n: 16, ..base },
            AmpereConfig { num_splits: 3, pack_gqa: true, tile_n: 32, ..base },
            AmpereConfig { num_splits: 2, cluster: true, tile_n: 32, ..base },
            AmpereConfig { persistent: 3, tile_n: 32, load_bytes: 8, ..base },
        ];
        Self::fp8_mma_defaults().into_iter().chain(others.map(Self::from)).collect()
    }

    /// The kernel traits.
    pub fn traits(self) -> KernelTraits {
        self.as_family().traits()
    }

    /// The name of the family.
    pub fn family(self) -> &'static str {
        self.traits().family
    }

    /// Query rows of a CTA.
    pub fn tile_m(self) -> u32 {
        self.traits().tile_m
    }

    /// Keys of a tile, where keys come in tiles.
    pub fn tile_n(self) -> Option<u32> {
        self.traits().tile_n
    }

    /// The precision of the operands as the kernel multiplies them.
    pub fn accuracy(self) -> Accuracy {
        self.traits().accuracy
    }

    /// True if an architecture has what the kernel is made of.
    pub fn is_for(self, arch: Arch) -> bool {
        let KernelTraits { only_arch, needs_clusters, .. } = self.traits();
        only_arch.is_none_or(|only| only == arch) && (arch.has_clusters() || !needs_clusters)
    }

    /// Keys of a chunk, where the config has chunks.
    pub fn chunk_keys(self) -> Option<u32> {
        self.traits().chunks.map(|(keys, _)| keys)
    }

    /// The config with chunks of at least `keys` keys, where it has chunks: their length is not compiled in.
    #[must_use]
    pub fn with_chunk_keys(self, keys: u32) -> Self {
        let chunks = self.chunk_keys().and_then(|_| self.as_family().with_chunk_keys(keys.max(1)));
        chunks.unwrap_or(self)
    }

    /// The config with a way to widen keys and values of 8 bits, where the kernel widens them.
    pub fn with_fp8_widening(self, widening: Fp8Widening) -> Option<Self> {
        self.as_family().with_fp8_widening(widening)
    }

    /// The config without what is not compiled in.
    pub(crate) fn compiled(self) -> Self {
        self.as_family().compiled().unwrap_or(self)
    }

    /// The specialization of this kernel for `problem`.
    pub fn specialization(self, problem: &Problem) -> Specialization {
        self.as_family().specialize(Specialization::of(problem), problem)
    }

    /// The tiles of the block mask of a `mask_mod`, where keys come in tiles.
    pub(crate) fn block_mask_tiles(self, specialization: Specialization) -> Option<BlockMaskTiles> {
        self.as_family().block_mask_tiles(specialization)
    }

    /// Bytes of shared memory of a CTA.
    pub fn shared_bytes(self, specialization: Specialization) -> u32 {
        self.as_family().shared_bytes(specialization)
    }

    /// True if the kernel fits into registers and shared memory.
    pub fn fits(self, specialization: Specialization, arch: Arch) -> bool {
        let registers = self.as_family().registers(specialization, arch);
        registers.is_none_or(|(registers, limit)| registers <= limit)
            && self.traits().only_arch.is_none_or(|only| only == arch)
            && self.shared_bytes(specialization) <= arch.shared_bytes_per_cta()
    }

    /// Writes the attention kernel for an architecture.
    pub fn generate(self, specialization: Specialization, arch: Arch) -> Kernel {
        self.as_family().generate(self.kernel_name(specialization), specialization, arch)
    }

    fn kernel_name(self, specialization: Specialization) -> String {
        let Specialization { dtype, head_dim, value_dim, vec_bytes, page_box, .. } = specialization;
        let config = self.compiled().to_string().replace('-', "_");
        let value = if value_dim == head_dim { String::new() } else { format!("x{value_dim}") };
        let alignment = if vec_bytes == MAX_VEC_BYTES { String::new() } else { format!("_w{vec_bytes}") };
        let page_box = if page_box == 0 { String::new() } else { format!("_p{page_box}") };
        let append = specialization.append.map(FusedAppend::suffix).unwrap_or_default();
        let kv_dtype = specialization.kv_dtype.map(|dtype| format!("_kv{dtype}")).unwrap_or_default();
        let out_dtype = specialization.out_dtype.map(|dtype| format!("_out{dtype}")).unwrap_or_default();
        let features = specialization.suffix();
        format!(
            "flashcore_{config}_{dtype}{kv_dtype}{out_dtype}_d{head_dim}{value}{features}{alignment}{page_box}{append}"
        )
    }
}
