//! Configs by name.

use core::fmt;
use core::str::FromStr;

use crate::attention::hopper::WARPGROUP_ROWS;
use crate::config::{AmpereConfig, Config, QueryPlace, ScalarConfig};
use crate::hopper_config::HopperConfig;
use crate::tile::{Rescale, SharedLayout};

/// A choice that differs from the default: its name, whether a config has it, and how a config gets it.
type Choice = (&'static str, fn(&AmpereConfig) -> bool, fn(&mut AmpereConfig));

/// In the order in which they stand in names.
const CHOICES: [Choice; 5] = [
    ("32rows", |config| config.rows_per_warp == 32, |config| config.rows_per_warp = 32),
    ("2keys", |config| config.key_warps == 2, |config| config.key_warps = 2),
    ("4keys", |config| config.key_warps == 4, |config| config.key_warps = 4),
    ("qshared", |config| config.query == QueryPlace::Shared, |config| config.query = QueryPlace::Shared),
    ("lazy", |config| config.rescale == Rescale::WhenRaised, |config| config.rescale = Rescale::WhenRaised),
];

/// What a Hopper config is without any of its choices.
const PLAIN_HOPPER: HopperConfig = HopperConfig {
    warpgroups: 2,
    key_rows: 128,
    stages: 2,
    rescale: Rescale::Always,
    hidden_rescale: false,
    ping_pong: false,
    persistent: false,
};

/// A choice of a Hopper config.
type HopperChoice = (&'static str, fn(&HopperConfig) -> bool, fn(&mut HopperConfig));

/// In the order in which they stand in names.
const HOPPER_CHOICES: [HopperChoice; 5] = [
    ("lazy", |config| config.rescale == Rescale::WhenRaised, |config| config.rescale = Rescale::WhenRaised),
    ("far", |config| config.rescale == Rescale::WhenFar, |config| config.rescale = Rescale::WhenFar),
    ("hidden", |config| config.hidden_rescale, |config| config.hidden_rescale = true),
    ("pingpong", |config| config.ping_pong, |config| config.ping_pong = true),
    ("persistent", |config| config.persistent, |config| config.persistent = true),
];

/// A name that no config has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "there is no kernel `{name}`; there are scalar, ampere, hopper, scalar-THREADS, ampere-ROWSxKEYS-STAGESstage-LAYOUT such as {}, to which {} can be added, and hopper-ROWSxKEYS-STAGESstage such as {}, to which {} can be added",
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
            ["ampere"] => Some(Self::ampere()),
            ["hopper"] => Some(Self::hopper()),
            ["hopper", tile, stages, ref choices @ ..] => {
                let (query_rows, key_rows) = tile.split_once('x')?;
                let query_rows: u32 = query_rows.parse().ok()?;
                let mut config = HopperConfig {
                    warpgroups: query_rows / WARPGROUP_ROWS,
                    key_rows: key_rows.parse().ok()?,
                    stages: stages.strip_suffix("stage")?.parse().ok()?,
                    ..PLAIN_HOPPER
                };
                for choice in choices {
                    let (_, _, choose) = HOPPER_CHOICES.iter().find(|(name, _, _)| name == choice)?;
                    choose(&mut config);
                }
                Some(Self::Hopper(config))
            }
            ["scalar", threads] => Some(Self::Scalar(ScalarConfig { threads: threads.parse().ok()? })),
            ["ampere", tile, stages, layout, ref choices @ ..] => {
                let (query_rows, key_rows) = tile.split_once('x')?;
                let query_rows: u32 = query_rows.parse().ok()?;
                let mut config = AmpereConfig {
                    key_rows: key_rows.parse().ok()?,
                    stages: stages.strip_suffix("stage")?.parse().ok()?,
                    layout: SharedLayout::ALL.into_iter().find(|known| known.name() == layout)?,
                    ..AmpereConfig::default()
                };
                for choice in choices {
                    let (_, _, choose) = CHOICES.iter().find(|(name, _, _)| name == choice)?;
                    choose(&mut config);
                }
                config.warps = (query_rows / config.rows_per_warp).checked_mul(config.key_warps)?;
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
            Self::Ampere(config) => {
                let AmpereConfig { key_rows, stages, layout, .. } = config;
                write!(formatter, "ampere-{}x{key_rows}-{stages}stage-{layout}", config.query_rows())?;
                let chosen = CHOICES.iter().filter(|(_, is_chosen, _)| is_chosen(config));
                chosen.into_iter().try_for_each(|(name, _, _)| write!(formatter, "-{name}"))
            }
            Self::Hopper(config) => {
                let HopperConfig { key_rows, stages, .. } = config;
                write!(formatter, "hopper-{}x{key_rows}-{stages}stage", config.query_rows())?;
                let chosen = HOPPER_CHOICES.iter().filter(|(_, is_chosen, _)| is_chosen(config));
                chosen.into_iter().try_for_each(|(name, _, _)| write!(formatter, "-{name}"))
            }
        }
    }
}
