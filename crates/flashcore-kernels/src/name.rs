//! Configs by name.

use core::fmt;
use core::str::FromStr;

use crate::attention::hopper::WARPGROUP_ROWS;
use crate::config::{AmpereConfig, Config, L2Window, QueryPlace, ScalarConfig};
use crate::hopper_config::{HopperConfig, WarpScheduler};
use crate::ladder_config::{LadderConfig, Product};
use crate::tile::{Accumulation, Exponential, Rescale, SharedLayout};

/// A choice that differs from the default: its name, whether a config has it, and how a config gets it.
type Choice<C> = (&'static str, fn(&C) -> bool, fn(&mut C));

/// In the order in which they stand in names.
const CHOICES: [Choice<AmpereConfig>; 14] = [
    ("32rows", |config| config.rows_per_warp == 32, |config| config.rows_per_warp = 32),
    ("2kvwarps", |config| config.kv_split_warps == 2, |config| config.kv_split_warps = 2),
    ("4kvwarps", |config| config.kv_split_warps == 4, |config| config.kv_split_warps = 4),
    ("qshared", |config| config.query == QueryPlace::Shared, |config| config.query = QueryPlace::Shared),
    ("ifchanged", |config| config.rescale == Rescale::IfChanged, |config| config.rescale = Rescale::IfChanged),
    ("threshold", |config| config.rescale == Rescale::Threshold, |config| config.rescale = Rescale::Threshold),
    ("load4", |config| config.load_bytes == 4, |config| config.load_bytes = 4),
    ("load8", |config| config.load_bytes == 8, |config| config.load_bytes = 8),
    ("f16sums", |config| config.accumulation == Accumulation::F16, |config| config.accumulation = Accumulation::F16),
    ("exp2mix", |config| config.exponential == Exponential::Shared, |config| config.exponential = Exponential::Shared),
    ("1producer", |config| config.producers == 1, |config| config.producers = 1),
    ("2producers", |config| config.producers == 2, |config| config.producers = 2),
    ("packgqa", |config| config.pack_gqa, |config| config.pack_gqa = true),
    ("l2keep", |config| config.l2 == L2Window::Key, |config| config.l2 = L2Window::Key),
];

/// What a Hopper config is without any of its choices.
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
};

/// The same for the kernel of the history.
const LADDER_CHOICES: [Choice<LadderConfig>; 4] = [
    ("load4", |config| config.load_bytes == 4, |config| config.load_bytes = 4),
    ("load8", |config| config.load_bytes == 8, |config| config.load_bytes = 8),
    ("tensorqk", |config| config.scores == Product::Tensor, |config| config.scores = Product::Tensor),
    ("tensorpv", |config| config.output == Product::Tensor, |config| config.output = Product::Tensor),
];

/// The same for the kernel for Hopper.
const HOPPER_CHOICES: [Choice<HopperConfig>; 12] = [
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
    ("pdl", |config| config.pdl, |config| config.pdl = true),
    ("persistent", |config| config.persistent, |config| config.persistent = true),
];

/// How many CTAs stay and how many parts the keys have: a number and this.
const PERSISTENT: &str = "persistent";
const SPLITS: &str = "splits";

/// A name that no config has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "there is no kernel `{name}`; there are scalar, ladder, ampere, hopper, scalar-THREADS, ladder-64xKEYS-STAGESstage-LAYOUT such as {}, to which {} can be added, ampere-ROWSxKEYS-STAGESstage-LAYOUT such as {}, to which {}, -Npersistent and -Nsplits can be added, and hopper-ROWSxKEYS-STAGESstage such as {}, to which {} can be added",
    Config::Ladder(LadderConfig { load_bytes: 16, ..LadderConfig::default() }),
    LADDER_CHOICES.map(|(name, _, _)| format!("-{name}")).join(", "),
    Config::ampere(),
    CHOICES.map(|(name, _, _)| format!("-{name}")).join(", "),
    Config::Hopper(PLAIN_HOPPER),
    HOPPER_CHOICES.map(|(name, _, _)| format!("-{name}")).join(", ")
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
                    if let Some(num_splits) = choice.strip_suffix(SPLITS) {
                        config.num_splits = num_splits.parse().ok()?;
                        continue;
                    }
                    let (_, _, choose) = CHOICES.iter().find(|(name, _, _)| name == choice)?;
                    choose(&mut config);
                }
                config.warps = (tile_m / config.rows_per_warp).checked_mul(config.kv_split_warps)?;
                Some(Self::Ampere(config))
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
            Self::Ladder(config) => {
                let LadderConfig { tile_n, stages, layout, .. } = config;
                write!(formatter, "ladder-{}x{tile_n}-{stages}stage-{layout}", config.tile_m())?;
                let chosen = LADDER_CHOICES.iter().filter(|(_, is_chosen, _)| is_chosen(config));
                chosen.into_iter().try_for_each(|(name, _, _)| write!(formatter, "-{name}"))
            }
            Self::Ampere(config) => {
                let AmpereConfig { tile_n, stages, layout, .. } = config;
                write!(formatter, "ampere-{}x{tile_n}-{stages}stage-{layout}", config.tile_m())?;
                let chosen = CHOICES.iter().filter(|(_, is_chosen, _)| is_chosen(config));
                chosen.into_iter().try_for_each(|(name, _, _)| write!(formatter, "-{name}"))?;
                if config.persistent > 0 {
                    write!(formatter, "-{}{PERSISTENT}", config.persistent)?;
                }
                if config.num_splits != 1 {
                    write!(formatter, "-{}{SPLITS}", config.num_splits)?;
                }
                Ok(())
            }
            Self::Hopper(config) => {
                let HopperConfig { tile_n, stages, .. } = config;
                write!(formatter, "hopper-{}x{tile_n}-{stages}stage", config.tile_m())?;
                let chosen = HOPPER_CHOICES.iter().filter(|(_, is_chosen, _)| is_chosen(config));
                chosen.into_iter().try_for_each(|(name, _, _)| write!(formatter, "-{name}"))
            }
        }
    }
}
