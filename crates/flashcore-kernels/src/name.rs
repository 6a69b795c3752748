//! Configs by name.

use core::fmt;
use core::str::FromStr;

use crate::attention::hopper::WARPGROUP_ROWS;
use crate::config::{AmpereConfig, Config, L2Window, Packing, QueryPlace, ScalarConfig};
use crate::hopper_config::{HopperConfig, InTurn};
use crate::steps_config::{Product, StepsConfig};
use crate::tile::{Accumulation, Exponential, Rescale, SharedLayout};

/// A choice that differs from the default: its name, whether a config has it, and how a config gets it.
type Choice<C> = (&'static str, fn(&C) -> bool, fn(&mut C));

/// In the order in which they stand in names.
const CHOICES: [Choice<AmpereConfig>; 14] = [
    ("32rows", |config| config.rows_per_warp == 32, |config| config.rows_per_warp = 32),
    ("2keys", |config| config.key_warps == 2, |config| config.key_warps = 2),
    ("4keys", |config| config.key_warps == 4, |config| config.key_warps = 4),
    ("qshared", |config| config.query == QueryPlace::Shared, |config| config.query = QueryPlace::Shared),
    ("lazy", |config| config.rescale == Rescale::WhenRaised, |config| config.rescale = Rescale::WhenRaised),
    ("far", |config| config.rescale == Rescale::WhenFar, |config| config.rescale = Rescale::WhenFar),
    ("load4", |config| config.load_bytes == 4, |config| config.load_bytes = 4),
    ("load8", |config| config.load_bytes == 8, |config| config.load_bytes = 8),
    ("f16sums", |config| config.accumulation == Accumulation::F16, |config| config.accumulation = Accumulation::F16),
    ("exp2mix", |config| config.exponential == Exponential::Shared, |config| config.exponential = Exponential::Shared),
    ("1producer", |config| config.producers == 1, |config| config.producers = 1),
    ("2producers", |config| config.producers == 2, |config| config.producers = 2),
    ("packed", |config| config.packing == Packing::KeyHead, |config| config.packing = Packing::KeyHead),
    ("l2keep", |config| config.l2 == L2Window::Key, |config| config.l2 = L2Window::Key),
];

/// What a Hopper config is without any of its choices.
const PLAIN_HOPPER: HopperConfig = HopperConfig {
    warpgroups: 2,
    key_groups: 1,
    cluster: 1,
    key_rows: 128,
    stages: 2,
    rescale: Rescale::Always,
    hidden_rescale: false,
    exponential: Exponential::Unit,
    in_turn: InTurn::Nothing,
    dependent: false,
    persistent: false,
};

/// The same for the kernel of the history.
const STEP_CHOICES: [Choice<StepsConfig>; 4] = [
    ("load4", |config| config.load_bytes == 4, |config| config.load_bytes = 4),
    ("load8", |config| config.load_bytes == 8, |config| config.load_bytes = 8),
    ("tensorqk", |config| config.scores == Product::Tensor, |config| config.scores = Product::Tensor),
    ("tensorpv", |config| config.output == Product::Tensor, |config| config.output = Product::Tensor),
];

/// The same for the kernel for Hopper.
const HOPPER_CHOICES: [Choice<HopperConfig>; 12] = [
    ("2keys", |config| config.key_groups == 2, |config| config.key_groups = 2),
    ("4keys", |config| config.key_groups == 4, |config| config.key_groups = 4),
    ("2ctas", |config| config.cluster == 2, |config| config.cluster = 2),
    ("4ctas", |config| config.cluster == 4, |config| config.cluster = 4),
    ("lazy", |config| config.rescale == Rescale::WhenRaised, |config| config.rescale = Rescale::WhenRaised),
    ("far", |config| config.rescale == Rescale::WhenFar, |config| config.rescale = Rescale::WhenFar),
    ("hidden", |config| config.hidden_rescale, |config| config.hidden_rescale = true),
    ("exp2mix", |config| config.exponential == Exponential::Shared, |config| config.exponential = Exponential::Shared),
    ("pingpong", |config| config.in_turn == InTurn::Products, |config| config.in_turn = InTurn::Products),
    ("exclusive", |config| config.in_turn == InTurn::Exponentials, |config| config.in_turn = InTurn::Exponentials),
    ("dependent", |config| config.dependent, |config| config.dependent = true),
    ("persistent", |config| config.persistent, |config| config.persistent = true),
];

/// How many CTAs stay and how many parts the keys have: a number and this.
const CTAS: &str = "ctas";
const PARTS: &str = "parts";

/// A name that no config has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "there is no kernel `{name}`; there are scalar, steps, ampere, hopper, scalar-THREADS, steps-64xKEYS-STAGESstage-LAYOUT such as {}, to which {} can be added, ampere-ROWSxKEYS-STAGESstage-LAYOUT such as {}, to which {}, -Nctas and -Nparts can be added, and hopper-ROWSxKEYS-STAGESstage such as {}, to which {} can be added",
    Config::Steps(StepsConfig { load_bytes: 16, ..StepsConfig::default() }),
    STEP_CHOICES.map(|(name, _, _)| format!("-{name}")).join(", "),
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
            ["steps"] => Some(Self::Steps(StepsConfig::default())),
            ["ampere"] => Some(Self::ampere()),
            ["hopper"] => Some(Self::hopper()),
            ["hopper", tile, stages, ref choices @ ..] => {
                let (query_rows, key_rows) = tile.split_once('x')?;
                let query_rows: u32 = query_rows.parse().ok()?;
                let mut config = HopperConfig {
                    key_rows: key_rows.parse().ok()?,
                    stages: stages.strip_suffix("stage")?.parse().ok()?,
                    ..PLAIN_HOPPER
                };
                for choice in choices {
                    let (_, _, choose) = HOPPER_CHOICES.iter().find(|(name, _, _)| name == choice)?;
                    choose(&mut config);
                }
                config.warpgroups = (query_rows / WARPGROUP_ROWS).checked_mul(config.key_groups)?;
                Some(Self::Hopper(config))
            }
            ["scalar", threads] => Some(Self::Scalar(ScalarConfig { threads: threads.parse().ok()? })),
            ["steps", tile, stages, layout, ref choices @ ..] => {
                let mut config = StepsConfig {
                    key_rows: tile.strip_prefix("64x")?.parse().ok()?,
                    stages: stages.strip_suffix("stage")?.parse().ok()?,
                    layout: SharedLayout::ALL.into_iter().find(|known| known.name() == layout)?,
                    load_bytes: 16,
                    ..StepsConfig::default()
                };
                for choice in choices {
                    let (_, _, choose) = STEP_CHOICES.iter().find(|(name, _, _)| name == choice)?;
                    choose(&mut config);
                }
                Some(Self::Steps(config))
            }
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
                    if let Some(ctas) = choice.strip_suffix(CTAS) {
                        config.persistent = ctas.parse().ok()?;
                        continue;
                    }
                    if let Some(parts) = choice.strip_suffix(PARTS) {
                        config.parts = parts.parse().ok()?;
                        continue;
                    }
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
            Self::Steps(config) => {
                let StepsConfig { key_rows, stages, layout, .. } = config;
                write!(formatter, "steps-{}x{key_rows}-{stages}stage-{layout}", config.query_rows())?;
                let chosen = STEP_CHOICES.iter().filter(|(_, is_chosen, _)| is_chosen(config));
                chosen.into_iter().try_for_each(|(name, _, _)| write!(formatter, "-{name}"))
            }
            Self::Ampere(config) => {
                let AmpereConfig { key_rows, stages, layout, .. } = config;
                write!(formatter, "ampere-{}x{key_rows}-{stages}stage-{layout}", config.query_rows())?;
                let chosen = CHOICES.iter().filter(|(_, is_chosen, _)| is_chosen(config));
                chosen.into_iter().try_for_each(|(name, _, _)| write!(formatter, "-{name}"))?;
                if config.persistent > 0 {
                    write!(formatter, "-{}{CTAS}", config.persistent)?;
                }
                if config.parts != 1 {
                    write!(formatter, "-{}{PARTS}", config.parts)?;
                }
                Ok(())
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
