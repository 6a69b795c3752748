//! Kernel configs: every choice in a kernel that the problem does not make.

mod name;

use flashcore_ir::types::{Bf16, Bf16x2, F16, F16x2, F32, Tf32};
use flashcore_ir::{Arch, Kernel};
use flashcore_problem::{DType, Problem};

use crate::attention::block_mask::BlockMaskTiles;
use crate::attention::sm80::heuristics as sm80;
use crate::attention::sm90::heuristics as sm90;
use crate::attention::{self, scalar};
use crate::cache::FusedAppend;
use crate::primitives::{Accumulation, Exponential, Fp8Widening, Rescale, SharedLayout, Tf32Products};
use crate::specialization::{MAX_VEC_BYTES, Specialization};
use crate::target::Target;

pub use crate::attention::ladder::config::{LadderConfig, Product};
pub use crate::attention::sm80::config::{AmpereConfig, L2Window, QueryPlace};
pub use crate::attention::sm90::config::{HopperConfig, WarpScheduler};
pub use name::UnknownConfig;

/// A kernel and every choice in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Config {
    /// One thread a row.
    Scalar(ScalarConfig),
    /// The ladder's kernel, with tiles in shared memory, scores too: the steps from the scalar kernel to the Ampere kernel.
    Ladder(LadderConfig),
    /// Tensor cores, `ldmatrix` and `cp.async`: everything from `sm_80` on.
    Ampere(AmpereConfig),
    /// TMA, `mbarrier`s and `wgmma`: `sm_90a`.
    Hopper(HopperConfig),
}

/// The choices of the scalar kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ScalarConfig {
    /// Threads, and so query rows, of a CTA.
    pub threads: u32,
}

impl Default for ScalarConfig {
    fn default() -> Self {
        Self { threads: 64 }
    }
}

/// A choice that no kernel can be generated with.
pub(crate) struct Flaw {
    pub(crate) argument: &'static str,
    pub(crate) value: u32,
    pub(crate) allowed: &'static str,
}

impl Config {
    /// The scalar kernel as it is by default.
    pub fn scalar() -> Self {
        Self::Scalar(ScalarConfig::default())
    }

    /// The Ampere kernel as it is by default.
    pub fn ampere() -> Self {
        Self::Ampere(AmpereConfig::default())
    }

    /// The Hopper kernel as it is by default.
    pub fn hopper() -> Self {
        Self::Hopper(HopperConfig::default())
    }

    /// The Ampere kernel with another layout of shared memory.
    pub fn ampere_with_layout(layout: SharedLayout) -> Self {
        Self::Ampere(AmpereConfig { layout, ..AmpereConfig::default() })
    }

    /// Every config that some problem gets by default, on some GPU.
    pub fn defaults() -> Vec<Self> {
        let ampere = sm80::ALL.into_iter().chain(sm80::ALL_F32).map(Self::Ampere);
        let hopper = sm90::ALL.into_iter().chain(sm90::ALL_FP8).map(Self::Hopper);
        [Self::scalar()].into_iter().chain(ampere).chain(hopper).collect()
    }

    /// The configs that resource gates, snapshots and tests go through.
    pub fn all() -> Vec<Self> {
        let ampere = AmpereConfig::default();
        let mut configs = vec![
            Self::scalar(),
            Self::Ampere(ampere),
            Self::ampere_with_layout(SharedLayout::Plain),
            Self::ampere_with_layout(SharedLayout::Padded),
            Self::Ampere(AmpereConfig { tile_n: 32, stages: 3, ..ampere }),
            Self::Ampere(AmpereConfig { tile_n: 128, ..ampere }),
            Self::Ampere(AmpereConfig { warps: 8, tile_n: 128, ..ampere }),
        ];
        let others = [AmpereConfig { rows_per_warp: 32, ..ampere }].into_iter().chain(sm80::ALL).map(Self::Ampere);
        let others = others.chain(LadderConfig::LISTED.map(Self::Ladder)).chain(AmpereConfig::LISTED.map(Self::Ampere));
        for config in others {
            if !configs.contains(&config) {
                configs.push(config);
            }
        }
        configs.extend(sm90::ALL.map(Self::Hopper));
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
        sm80::ALL_F32.into_iter().chain(others).map(Self::Ampere).collect()
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
        sm90::ALL_FP8.into_iter().chain(others).map(Self::Hopper).collect()
    }

    /// The configs that some problem with a query of 8 bits gets by default, where it is multiplied by `mma.sync`. All of them
    /// take problems of 16 bits too.
    pub fn fp8_mma_defaults() -> Vec<Self> {
        sm80::ALL_FP8.map(Self::Ampere).to_vec()
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
        Self::fp8_mma_defaults().into_iter().chain(others.map(Self::Ampere)).collect()
    }

    /// The name of the kernel.
    pub const fn family(self) -> &'static str {
        match self {
            Self::Scalar(_) => "scalar",
            Self::Ladder(_) => "ladder",
            Self::Ampere(_) => "ampere",
            Self::Hopper(_) => "hopper",
        }
    }

    /// Query rows of a CTA.
    pub const fn tile_m(self) -> u32 {
        match self {
            Self::Scalar(config) => config.threads,
            Self::Ladder(config) => config.tile_m(),
            Self::Ampere(config) => config.tile_m(),
            Self::Hopper(config) => config.tile_m(),
        }
    }

    /// The tiles of the block mask of a `mask_mod`, where keys come in tiles.
    pub(crate) fn block_mask_tiles(self, specialization: Specialization) -> Option<BlockMaskTiles> {
        let (tile_m, tile_n) = (self.tile_m(), self.tile_n()?);
        match self {
            Self::Hopper(config) => config.block_mask_tiles(specialization),
            _ => specialization.mask_mod.map(|_| BlockMaskTiles::aligned(tile_m, tile_n)),
        }
    }

    /// Keys of a tile, where keys come in tiles.
    pub const fn tile_n(self) -> Option<u32> {
        match self {
            Self::Scalar(_) => None,
            Self::Ladder(config) => Some(config.tile_n),
            Self::Ampere(config) => Some(config.tile_n),
            Self::Hopper(config) => Some(config.tile_n),
        }
    }

    /// The specialization of this kernel for `problem`.
    pub fn specialization(self, problem: &Problem) -> Specialization {
        let specialization = Specialization::of(problem);
        match self {
            // Element by element, whatever their alignment, and scaled before anything else.
            Self::Scalar(_) => Specialization { vec_bytes: MAX_VEC_BYTES, nonpositive_scale: false, ..specialization },
            Self::Ladder(_) => Specialization { nonpositive_scale: false, ..specialization },
            Self::Hopper(config) => {
                let page_box = problem.paged.map_or(0, |paged| config.page_box(paged.page_size));
                Specialization { page_box, ..specialization }
            }
            Self::Ampere(_) => specialization,
        }
    }

    /// The element types the kernel has.
    pub(crate) const fn dtypes(self) -> &'static [DType] {
        match self {
            Self::Scalar(_) => &[DType::F16, DType::Bf16, DType::F32],
            Self::Ampere(AmpereConfig { tf32: Some(_), .. }) => &[DType::F32],
            // Tensor cores add up products of `bf16` in `f32` alone.
            Self::Ampere(AmpereConfig { accumulation: Accumulation::F16, .. }) => &[DType::F16],
            Self::Ampere(_) | Self::Hopper(_) => &[DType::F16, DType::Bf16, DType::E4m3],
            Self::Ladder(_) => &[DType::F16, DType::Bf16],
        }
    }

    /// The number that head and value dimensions are a multiple of, and the largest of them.
    pub(crate) const fn dims(self) -> (usize, usize) {
        match self {
            Self::Scalar(_) => (1, 1024),
            // Wider outputs leave no registers for the parts of `f32`: ptxas spills.
            Self::Ampere(AmpereConfig { tf32: Some(_), .. }) => (8, 128),
            Self::Ladder(_) | Self::Ampere(_) | Self::Hopper(_) => (8, 256),
        }
    }

    /// The choices that no kernel can be generated with.
    pub(crate) fn flaws(self) -> Vec<Flaw> {
        let flaw =
            |argument, value, allowed, is_allowed: bool| (!is_allowed).then_some(Flaw { argument, value, allowed });
        let flaws = match self {
            Self::Scalar(ScalarConfig { threads }) => {
                vec![flaw("threads", threads, "1 to 256", (1..=256).contains(&threads))]
            }
            Self::Ladder(config) => return config.flaws(),
            Self::Ampere(config) => return config.flaws(),
            Self::Hopper(config) => config.flaws(),
        };
        flaws.into_iter().flatten().collect()
    }

    /// True if the kernel fits into registers and shared memory.
    pub fn fits(self, specialization: Specialization, arch: Arch) -> bool {
        let in_registers = match self {
            Self::Scalar(_) => true,
            Self::Ladder(config) => {
                config.operand_registers(specialization.value_dim) <= LadderConfig::MOST_OPERAND_REGISTERS
            }
            Self::Ampere(config) => config.fits_registers(specialization, arch),
            Self::Hopper(config) => arch == Arch::Sm90a && config.fits_registers(specialization),
        };
        in_registers && self.generate(specialization, arch).shared_bytes <= arch.shared_bytes_per_cta()
    }

    /// The config with the same text of the attention kernel: what is a run-time parameter is left out.
    pub(crate) const fn compiled(self) -> Self {
        match self {
            Self::Ampere(config) => Self::Ampere(config.compiled()),
            Self::Hopper(_) => self.with_chunk_keys(1),
            Self::Scalar(_) | Self::Ladder(_) => self,
        }
    }

    /// True if the query heads of a key head share tiles.
    pub(crate) const fn pack_gqa(self) -> bool {
        matches!(
            self,
            Self::Ampere(AmpereConfig { pack_gqa: true, .. }) | Self::Hopper(HopperConfig { pack_gqa: true, .. })
        )
    }

    /// Keys of a chunk, where the config has chunks.
    pub const fn chunk_keys(self) -> Option<u32> {
        match self {
            Self::Ampere(AmpereConfig { chunk_keys: keys @ 1.., .. })
            | Self::Hopper(HopperConfig { chunk_keys: keys @ 1.., .. }) => Some(keys),
            _ => None,
        }
    }

    /// The config with chunks of at least so many keys, where it has chunks: their length is not compiled in.
    #[must_use]
    pub const fn with_chunk_keys(self, keys: u32) -> Self {
        let keys = if keys == 0 { 1 } else { keys };
        match self {
            Self::Ampere(config @ AmpereConfig { chunk_keys: 1.., tile_n, .. }) => {
                Self::Ampere(AmpereConfig { chunk_keys: keys.next_multiple_of(tile_n), ..config })
            }
            Self::Hopper(config @ HopperConfig { chunk_keys: 1.., tile_n, .. }) => {
                Self::Hopper(HopperConfig { chunk_keys: keys.next_multiple_of(tile_n), ..config })
            }
            _ => self,
        }
    }

    /// The config with the default way of a GPU to widen keys and values of 8 bits, where the problem has those.
    pub(crate) fn with_fp8_widening(self, problem: &Problem, target: Target) -> Self {
        let types = problem.dtypes();
        match self {
            Self::Ampere(config) if types.key_value.is_float8() => {
                let fp8 = Fp8Widening::of(target, types.query, types.key_value);
                Self::Ampere(AmpereConfig { fp8, ..config })
            }
            _ => self,
        }
    }

    /// Writes the attention kernel for an architecture.
    pub fn generate(self, specialization: Specialization, arch: Arch) -> Kernel {
        let name = self.kernel_name(specialization);
        match (self, specialization.dtype) {
            (Self::Scalar(config), DType::F16) => scalar::kernel::<F16>(name, config, specialization),
            (Self::Scalar(config), DType::Bf16) => scalar::kernel::<Bf16>(name, config, specialization),
            (Self::Scalar(config), _) => scalar::kernel::<F32>(name, config, specialization),
            (Self::Ladder(config), DType::Bf16) => attention::ladder::kernel::<Bf16x2>(name, config, specialization),
            (Self::Ladder(config), _) => attention::ladder::kernel::<F16x2>(name, config, specialization),
            (Self::Ampere(config @ AmpereConfig { tf32: Some(_), .. }), _) => {
                attention::sm80::kernel::<Tf32>(name, config, specialization)
            }
            (Self::Ampere(config), _) if specialization.key_value_dtype().is_float8() => {
                attention::sm80::fp8_kernel(name, config, specialization, arch)
            }
            (Self::Ampere(config), DType::Bf16) => attention::sm80::kernel::<Bf16x2>(name, config, specialization),
            (Self::Ampere(config), _) => attention::sm80::kernel::<F16x2>(name, config, specialization),
            (Self::Hopper(config), _) => match specialization.output_dtype() {
                DType::Bf16 => attention::sm90::kernel::<Bf16x2>(name, config, specialization),
                _ => attention::sm90::kernel::<F16x2>(name, config, specialization),
            },
        }
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
