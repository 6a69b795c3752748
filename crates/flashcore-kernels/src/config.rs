//! Every choice in a kernel, and what a problem fixes when its kernel is generated.

use core::fmt;
use core::str::FromStr;

use flashcore_ir::types::{Bf16x2, F16x2};
use flashcore_ir::{Arch, Kernel};
use flashcore_problem::{DType, Mask, Problem};

use crate::attention::{ampere, scalar};
use crate::tile::{LANES, ROWS_PER_WARP, SharedLayout};

/// A kernel and every choice in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Config {
    /// One thread a row.
    Scalar(ScalarConfig),
    /// Tensor cores, `ldmatrix` and `cp.async`: everything from `sm_80` on.
    Ampere(AmpereConfig),
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

/// The choices of the Ampere kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AmpereConfig {
    /// Warps of a CTA, each with 16 query rows.
    pub warps: u32,
    /// Keys of a tile.
    pub key_rows: u32,
    /// Tiles of keys and values in shared memory at a time: one is read while the others are on their way.
    pub stages: u32,
    /// How tiles lie in shared memory.
    pub layout: SharedLayout,
}

impl Default for AmpereConfig {
    fn default() -> Self {
        Self { warps: 4, key_rows: 64, stages: 2, layout: SharedLayout::Swizzled }
    }
}

impl AmpereConfig {
    /// Query rows of a CTA.
    pub const fn query_rows(self) -> u32 {
        self.warps.saturating_mul(ROWS_PER_WARP)
    }

    /// Threads of a CTA.
    pub const fn threads(self) -> u32 {
        self.warps.saturating_mul(LANES)
    }

    /// Registers per thread that the kernel may take: as many as leave room for three CTAs of four warps on a
    /// multiprocessor where the output is small, and for two where it is large.
    pub const fn register_budget(head_dim: u32) -> u32 {
        if head_dim <= 64 { 168 } else { 255 }
    }
}

/// A choice that no kernel can be generated with.
pub(crate) struct Flaw {
    pub(crate) argument: &'static str,
    pub(crate) value: u32,
    pub(crate) allowed: &'static str,
}

/// What a problem fixes when its kernel is generated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Specialisation {
    /// The element type, `F16` or `Bf16`.
    pub dtype: DType,
    /// Columns of query, key, value and output.
    pub head_dim: u32,
    /// Whether rows attend no key behind their own position.
    pub causal: bool,
    /// Whether the log-sum-exp is written.
    pub log_sum_exp: bool,
}

impl Specialisation {
    /// The head dimensions that kernels are generated for.
    pub const HEAD_DIMS: [u32; 4] = [32, 64, 96, 128];
    /// The element types that kernels are generated for.
    pub const DTYPES: [DType; 2] = [DType::F16, DType::Bf16];
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

    /// The Ampere kernel with another layout of shared memory.
    pub fn ampere_with_layout(layout: SharedLayout) -> Self {
        Self::Ampere(AmpereConfig { layout, ..AmpereConfig::default() })
    }

    /// The config for a problem unless another is asked for, on a GPU with so many multiprocessors.
    ///
    /// Wider tiles of keys cost registers and shared memory and save barriers and maxima, except that causal problems waste
    /// more of them at the diagonal; `docs/experiments.md` has the measurements, on an H200. Where shared memory is small
    /// (`sm_86`, `sm_89`, `sm_120`) one CTA of a wide config would fill a multiprocessor, and two of the default are better.
    pub fn tuned(problem: &Problem, arch: Arch, multiprocessors: u32) -> Self {
        const ROOMY_SHARED_BYTES: u32 = 160 * 1024;
        let default = AmpereConfig::default();
        let wide = AmpereConfig { key_rows: 128, ..default };
        let tall = AmpereConfig { warps: 8, ..wide };
        let ctas = |config: AmpereConfig| {
            let tiles = problem.query_length.div_ceil(config.query_rows() as usize);
            tiles.saturating_mul(problem.query_heads).saturating_mul(problem.batch)
        };
        let (keys, causal) = (problem.key_length, matches!(problem.mask, Mask::Causal(_)));
        let multiprocessors = multiprocessors as usize;
        let is_roomy = arch.shared_bytes_per_cta() >= ROOMY_SHARED_BYTES;
        // In one wave the longest CTA decides, and it is the faster one; in several, so does what all of them waste.
        let wide_pays = keys > 64 && (!causal || keys >= 2048 || ctas(default) <= multiprocessors);
        // Twice the rows halve the CTAs: only where enough are left for every multiprocessor.
        let tall_pays = ctas(tall) >= multiprocessors && keys >= if causal { 4096 } else { 1024 };
        Self::Ampere(match problem.head_dim {
            _ if !is_roomy => default,
            ..=64 if wide_pays => wide,
            65.. if tall_pays => tall,
            _ => default,
        })
    }

    /// The configs that resource gates, snapshots and tests go through.
    pub fn all() -> Vec<Self> {
        let ampere = AmpereConfig::default();
        vec![
            Self::scalar(),
            Self::Ampere(ampere),
            Self::ampere_with_layout(SharedLayout::Plain),
            Self::ampere_with_layout(SharedLayout::Padded),
            Self::Ampere(AmpereConfig { key_rows: 32, stages: 3, ..ampere }),
            Self::Ampere(AmpereConfig { key_rows: 128, ..ampere }),
            Self::Ampere(AmpereConfig { warps: 8, key_rows: 128, ..ampere }),
        ]
    }

    /// The name of the kernel.
    pub const fn family(self) -> &'static str {
        match self {
            Self::Scalar(_) => "scalar",
            Self::Ampere(_) => "ampere",
        }
    }

    /// Query rows of a CTA.
    pub const fn query_rows(self) -> u32 {
        match self {
            Self::Scalar(config) => config.threads,
            Self::Ampere(config) => config.query_rows(),
        }
    }

    /// What no kernel can be generated with.
    pub(crate) fn flaws(self) -> Vec<Flaw> {
        let flaw =
            |argument, value, allowed, is_allowed: bool| (!is_allowed).then_some(Flaw { argument, value, allowed });
        let flaws = match self {
            Self::Scalar(ScalarConfig { threads }) => {
                vec![flaw("threads", threads, "1 to 256", (1..=256).contains(&threads))]
            }
            Self::Ampere(AmpereConfig { warps, key_rows, stages, .. }) => vec![
                // Fewer would not copy a whole pattern of the swizzle at a time.
                flaw("warps", warps, "2, 4 or 8", matches!(warps, 2 | 4 | 8)),
                flaw(
                    "key_rows",
                    key_rows,
                    "a multiple of 16 up to 128",
                    key_rows % 16 == 0 && (16..=128).contains(&key_rows),
                ),
                flaw("stages", stages, "2 to 8", (2..=8).contains(&stages)),
            ],
        };
        flaws.into_iter().flatten().collect()
    }

    /// Writes the kernel for a specialisation. What can be generated is [`crate::Plan::new`]'s to decide.
    pub fn generate(self, specialisation: Specialisation) -> Kernel {
        let name = self.kernel_name(specialisation);
        let bf16 = specialisation.dtype == DType::Bf16;
        match (self, bf16) {
            (Self::Scalar(config), false) => scalar::kernel::<F16x2>(name, config, specialisation),
            (Self::Scalar(config), true) => scalar::kernel::<Bf16x2>(name, config, specialisation),
            (Self::Ampere(config), false) => ampere::kernel::<F16x2>(name, config, specialisation),
            (Self::Ampere(config), true) => ampere::kernel::<Bf16x2>(name, config, specialisation),
        }
    }

    fn kernel_name(self, specialisation: Specialisation) -> String {
        let Specialisation { dtype, head_dim, causal, log_sum_exp } = specialisation;
        let mask = if causal { "_causal" } else { "" };
        let lse = if log_sum_exp { "_lse" } else { "" };
        format!("flashcore_{}_{dtype}_d{head_dim}{mask}{lse}", self.to_string().replace('-', "_"))
    }
}

/// A name that no config has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "there is no kernel `{name}`; there are scalar, ampere, scalar-THREADS, and ampere-ROWSxKEYS-STAGESstage-LAYOUT such as {}",
    Config::ampere()
)]
pub struct UnknownConfig {
    /// The name.
    pub name: String,
}

/// Reads what [`Config`] is displayed as, or the name of a family for its default. Whether a kernel can be generated
/// from it is [`crate::Plan::new`]'s to decide.
impl FromStr for Config {
    type Err = UnknownConfig;

    fn from_str(name: &str) -> Result<Self, UnknownConfig> {
        let parse = || match name.split('-').collect::<Vec<_>>()[..] {
            ["scalar"] => Some(Self::scalar()),
            ["ampere"] => Some(Self::ampere()),
            ["scalar", threads] => Some(Self::Scalar(ScalarConfig { threads: threads.parse().ok()? })),
            ["ampere", tile, stages, layout] => {
                let (query_rows, key_rows) = tile.split_once('x')?;
                let query_rows: u32 = query_rows.parse().ok()?;
                Some(Self::Ampere(AmpereConfig {
                    warps: query_rows / ROWS_PER_WARP,
                    key_rows: key_rows.parse().ok()?,
                    stages: stages.strip_suffix("stage")?.parse().ok()?,
                    layout: SharedLayout::ALL.into_iter().find(|known| known.name() == layout)?,
                }))
            }
            _ => None,
        };
        // What is not displayed as it was written (row counts that are no multiple of 16, leading zeros) is no name.
        parse()
            .filter(|config| config.to_string() == name || config.family() == name)
            .ok_or_else(|| UnknownConfig { name: name.to_owned() })
    }
}

impl fmt::Display for Config {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Scalar(ScalarConfig { threads }) => write!(formatter, "scalar-{threads}"),
            Self::Ampere(config) => {
                let AmpereConfig { key_rows, stages, layout, .. } = config;
                write!(formatter, "ampere-{}x{key_rows}-{stages}stage-{layout}", config.query_rows())
            }
        }
    }
}
