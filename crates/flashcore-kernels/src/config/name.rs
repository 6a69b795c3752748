//! Names of configs: each field of a config is in its name, and each name parses to the config it came from.

use core::fmt;
use core::str::FromStr;

use super::{
    AmpereConfig, Config, HopperConfig, L2Window, LadderConfig, Product, QueryPlace, ScalarConfig, WarpScheduler,
};
use crate::attention::sm90::WARPGROUP_ROWS;
use crate::primitives::{Accumulation, Exponential, Fp8Widening, Rescale, SharedLayout, Tf32Products};

/// A choice that differs from the default: its name, a test if a config has it, and a setter.
type Choice<C> = (&'static str, fn(&C) -> bool, fn(&mut C));

/// The choices of the Ampere kernel, in the order of names.
const AMPERE_CHOICES: [Choice<AmpereConfig>; 19] = [
    ("32rows", |config| config.rows_per_warp == 32, |config| config.rows_per_warp = 32),
    ("2kvwarps", |config| config.kv_split_warps == 2, |config| config.kv_split_warps = 2),
    ("4kvwarps", |config| config.kv_split_warps == 4, |config| config.kv_split_warps = 4),
    ("qshared", |config| config.query == QueryPlace::Shared, |config| config.query = QueryPlace::Shared),
    ("ifchanged", |config| config.rescale == Rescale::IfChanged, |config| config.rescale = Rescale::IfChanged),
    ("threshold", |config| config.rescale == Rescale::Threshold, |config| config.rescale = Rescale::Threshold),
    ("load4", |config| config.load_bytes == 4, |config| config.load_bytes = 4),
    ("load8", |config| config.load_bytes == 8, |config| config.load_bytes = 8),
    ("f16sums", |config| config.accumulation == Accumulation::F16, |config| config.accumulation = Accumulation::F16),
    ("3xtf32", |config| config.tf32 == Some(Tf32Products::Three), |config| config.tf32 = Some(Tf32Products::Three)),
    ("1xtf32", |config| config.tf32 == Some(Tf32Products::One), |config| config.tf32 = Some(Tf32Products::One)),
    ("cvt", |config| config.fp8 == Fp8Widening::Convert, |config| config.fp8 = Fp8Widening::Convert),
    ("exp2mix", |config| config.exponential == Exponential::Shared, |config| config.exponential = Exponential::Shared),
    ("1producer", |config| config.producers == 1, |config| config.producers = 1),
    ("2producers", |config| config.producers == 2, |config| config.producers = 2),
    ("packgqa", |config| config.pack_gqa, |config| config.pack_gqa = true),
    ("cluster", |config| config.cluster, |config| config.cluster = true),
    ("pdl", |config| config.pdl, |config| config.pdl = true),
    ("l2keep", |config| config.l2 == L2Window::Key, |config| config.l2 = L2Window::Key),
];

/// A Hopper config without any of its choices.
const PLAIN_HOPPER: HopperConfig = HopperConfig {
    warpgroups: 2,
    kv_split_warpgroups: 1,
    cluster: 1,
    tile_n: 128,
    stages: 2,
    rescale: Rescale::Always,
    overlap_rescale: false,
    exponential: Exponential::Unit,
    warp_scheduler: WarpScheduler::Free,
    pdl: false,
    persistent: false,
    dynamic: false,
    chunk_keys: 0,
    pack_gqa: false,
};

/// The choices of the ladder's kernel, in the order of names.
const LADDER_CHOICES: [Choice<LadderConfig>; 4] = [
    ("load4", |config| config.load_bytes == 4, |config| config.load_bytes = 4),
    ("load8", |config| config.load_bytes == 8, |config| config.load_bytes = 8),
    ("tensorqk", |config| config.scores == Product::Tensor, |config| config.scores = Product::Tensor),
    ("tensorpv", |config| config.output == Product::Tensor, |config| config.output = Product::Tensor),
];

/// The choices of the Hopper kernel, in the order of names.
const HOPPER_CHOICES: [Choice<HopperConfig>; 14] = [
    ("2kvgroups", |config| config.kv_split_warpgroups == 2, |config| config.kv_split_warpgroups = 2),
    ("4kvgroups", |config| config.kv_split_warpgroups == 4, |config| config.kv_split_warpgroups = 4),
    ("2cluster", |config| config.cluster == 2, |config| config.cluster = 2),
    ("4cluster", |config| config.cluster == 4, |config| config.cluster = 4),
    ("ifchanged", |config| config.rescale == Rescale::IfChanged, |config| config.rescale = Rescale::IfChanged),
    ("threshold", |config| config.rescale == Rescale::Threshold, |config| config.rescale = Rescale::Threshold),
    ("overlap", |config| config.overlap_rescale, |config| config.overlap_rescale = true),
    ("exp2mix", |config| config.exponential == Exponential::Shared, |config| config.exponential = Exponential::Shared),
    (
        "pingpong",
        |config| config.warp_scheduler == WarpScheduler::PingPong,
        |config| config.warp_scheduler = WarpScheduler::PingPong,
    ),
    (
        "exclusive",
        |config| config.warp_scheduler == WarpScheduler::ExclusiveExp,
        |config| config.warp_scheduler = WarpScheduler::ExclusiveExp,
    ),
    ("packgqa", |config| config.pack_gqa, |config| config.pack_gqa = true),
    ("pdl", |config| config.pdl, |config| config.pdl = true),
    ("persistent", |config| config.persistent, |config| config.persistent = true),
    ("dynamic", |config| config.dynamic, |config| config.dynamic = true),
];

/// Suffixes of the number of persistent CTAs and of the number of splits.
const PERSISTENT: &str = "persistent";
const SPLITS: &str = "splits";
/// Suffix of the keys of a chunk.
const CHUNK: &str = "chunk";

/// A name that no config has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "there is no kernel `{name}`; there are scalar, ladder, ampere, hopper, scalar-THREADS, ladder-64xKEYS-STAGESstage-LAYOUT such as {}, to which {} can be added, ampere-ROWSxKEYS-STAGESstage-LAYOUT such as {}, to which {}, -Npersistent, -Nsplits and -Nchunk can be added, and hopper-ROWSxKEYS-STAGESstage such as {}, to which {} can be added",
    Config::Ladder(LadderConfig { load_bytes: 16, ..LadderConfig::default() }),
    LADDER_CHOICES.map(|(name, _, _)| format!("-{name}")).join(", "),
    Config::ampere(),
    AMPERE_CHOICES.map(|(name, _, _)| format!("-{name}")).join(", "),
    Config::Hopper(PLAIN_HOPPER),
    HOPPER_CHOICES.map(|(name, _, _)| format!("-{name}")).join(", ")
)]
pub struct UnknownConfig {
    /// The name.
    pub name: String,
}

/// Parses the name of a [`Config`], or the name of a family for its default. [`crate::LaunchPlan::new`] decides if a kernel
/// can be generated from it.
impl FromStr for Config {
    type Err = UnknownConfig;

    fn from_str(name: &str) -> Result<Self, UnknownConfig> {
        let parse = || match name.split('-').collect::<Vec<_>>()[..] {
            ["scalar"] => Some(Self::scalar()),
            ["ladder"] => Some(Self::Ladder(LadderConfig::default())),
            ["ampere"] => Some(Self::ampere()),
            ["hopper"] => Some(Self::hopper()),
            ["hopper", tile, stages, ref choices @ ..] => {
                let (tile_m, tile_n) = tile.split_once('x')?;
                let tile_m: u32 = tile_m.parse().ok()?;
                let mut config = HopperConfig {
                    tile_n: tile_n.parse().ok()?,
                    stages: stages.strip_suffix("stage")?.parse().ok()?,
                    ..PLAIN_HOPPER
                };
                for choice in choices {
                    if let Some(keys) = choice.strip_suffix(CHUNK) {
                        config.chunk_keys = keys.parse().ok()?;
                        continue;
                    }
                    let (_, _, choose) = HOPPER_CHOICES.iter().find(|(name, _, _)| name == choice)?;
                    choose(&mut config);
                }
                config.warpgroups = (tile_m / WARPGROUP_ROWS).checked_mul(config.kv_split_warpgroups)?;
                Some(Self::Hopper(config))
            }
            ["scalar", threads] => Some(Self::Scalar(ScalarConfig { threads: threads.parse().ok()? })),
            ["ladder", tile, stages, layout, ref choices @ ..] => {
                let mut config = LadderConfig {
                    tile_n: tile.strip_prefix("64x")?.parse().ok()?,
                    stages: stages.strip_suffix("stage")?.parse().ok()?,
                    layout: SharedLayout::ALL.into_iter().find(|known| known.name() == layout)?,
                    load_bytes: 16,
                    ..LadderConfig::default()
                };
                for choice in choices {
                    let (_, _, choose) = LADDER_CHOICES.iter().find(|(name, _, _)| name == choice)?;
                    choose(&mut config);
                }
                Some(Self::Ladder(config))
            }
            ["ampere", tile, stages, layout, ref choices @ ..] => {
                let (tile_m, tile_n) = tile.split_once('x')?;
                let tile_m: u32 = tile_m.parse().ok()?;
                let mut config = AmpereConfig {
                    tile_n: tile_n.parse().ok()?,
                    stages: stages.strip_suffix("stage")?.parse().ok()?,
                    layout: SharedLayout::ALL.into_iter().find(|known| known.name() == layout)?,
                    ..AmpereConfig::default()
                };
                for choice in choices {
                    if let Some(ctas) = choice.strip_suffix(PERSISTENT) {
                        config.persistent = ctas.parse().ok()?;
                        continue;
                    }
                    if let Some(keys) = choice.strip_suffix(CHUNK) {
                        config.chunk_keys = keys.parse().ok()?;
                        continue;
                    }
                    if let Some(num_splits) = choice.strip_suffix(SPLITS) {
                        config.num_splits = num_splits.parse().ok()?;
                        continue;
                    }
                    let (_, _, choose) = AMPERE_CHOICES.iter().find(|(name, _, _)| name == choice)?;
                    choose(&mut config);
                }
                config.warps = (tile_m / config.rows_per_warp).checked_mul(config.kv_split_warps)?;
                Some(Self::Ampere(config))
            }
            _ => None,
        };
        // A name that is not displayed as it was written (row counts that are no multiple of 16, leading zeros) is none.
        parse()
            .filter(|config| config.to_string() == name || config.family() == name)
            .ok_or_else(|| UnknownConfig { name: name.to_owned() })
    }
}

/// Writes the name. Each config is taken apart without `..`: a new field does not compile until it has a name here or
/// in the table of choices.
impl fmt::Display for Config {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Scalar(ScalarConfig { threads }) => write!(formatter, "scalar-{threads}"),
            Self::Ladder(config) => {
                // In the table of choices: load_bytes, scores, output.
                let LadderConfig { tile_n, stages, layout, load_bytes: _, scores: _, output: _ } = config;
                write!(formatter, "ladder-{}x{tile_n}-{stages}stage-{layout}", config.tile_m())?;
                write_choices(formatter, config, &LADDER_CHOICES)
            }
            Self::Ampere(config) => {
                // In `tile_m`: warps. In the table of choices: the others.
                let AmpereConfig {
                    warps: _,
                    rows_per_warp: _,
                    tile_n,
                    kv_split_warps: _,
                    stages,
                    layout,
                    query: _,
                    rescale: _,
                    load_bytes: _,
                    accumulation: _,
                    tf32: _,
                    fp8: _,
                    exponential: _,
                    producers: _,
                    persistent,
                    num_splits,
                    cluster: _,
                    chunk_keys,
                    pdl: _,
                    pack_gqa: _,
                    l2: _,
                } = *config;
                write!(formatter, "ampere-{}x{tile_n}-{stages}stage-{layout}", config.tile_m())?;
                write_choices(formatter, config, &AMPERE_CHOICES)?;
                if persistent > 0 {
                    write!(formatter, "-{persistent}{PERSISTENT}")?;
                }
                if num_splits != 1 {
                    write!(formatter, "-{num_splits}{SPLITS}")?;
                }
                if chunk_keys > 0 {
                    write!(formatter, "-{chunk_keys}{CHUNK}")?;
                }
                Ok(())
            }
            Self::Hopper(config) => {
                // In `tile_m`: warpgroups. In the table of choices: the others.
                let HopperConfig {
                    warpgroups: _,
                    kv_split_warpgroups: _,
                    cluster: _,
                    tile_n,
                    stages,
                    rescale: _,
                    overlap_rescale: _,
                    exponential: _,
                    warp_scheduler: _,
                    pdl: _,
                    persistent: _,
                    dynamic: _,
                    chunk_keys,
                    pack_gqa: _,
                } = config;
                write!(formatter, "hopper-{}x{tile_n}-{stages}stage", config.tile_m())?;
                write_choices(formatter, config, &HOPPER_CHOICES)?;
                if *chunk_keys > 0 {
                    write!(formatter, "-{chunk_keys}{CHUNK}")?;
                }
                Ok(())
            }
        }
    }
}

fn write_choices<C>(formatter: &mut fmt::Formatter<'_>, config: &C, choices: &[Choice<C>]) -> fmt::Result {
    let mut chosen = choices.iter().filter(|(_, is_chosen, _)| is_chosen(config));
    chosen.try_for_each(|(name, _, _)| write!(formatter, "-{name}"))
}
