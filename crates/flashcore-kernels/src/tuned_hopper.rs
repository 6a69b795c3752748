//! Which Hopper config a problem gets, and which problems get none.
//!
//! The choices were measured on an H200: `docs/experiments.md` has the figures. What they follow:
//!
//! * Scores, weights and output of a warpgroup stay in registers, and two stages of keys and values in shared memory:
//!   the wider the heads, the fewer keys a tile has.
//! * Narrow heads leave room for a third warpgroup, and its exponentials fill what the tensor cores leave.

use flashcore_ir::Arch;
use flashcore_problem::Problem;

use crate::config::Config;
use crate::hopper_config::HopperConfig;
use crate::plan::takes;
use crate::tile::{Exponential, Rescale};

const BASE: HopperConfig = HopperConfig {
    warpgroups: 2,
    key_groups: 1,
    key_rows: 128,
    stages: 2,
    rescale: Rescale::Always,
    hidden_rescale: true,
    exponential: Exponential::Unit,
    ping_pong: true,
    persistent: true,
};
/// Heads of up to 64 columns.
const NARROW: HopperConfig = HopperConfig { warpgroups: 3, ..BASE };
/// Heads of up to 192 columns.
const WIDE: HopperConfig = HopperConfig { key_rows: 112, ..BASE };
/// Heads of up to 256 columns.
const WIDEST: HopperConfig = HopperConfig { key_rows: 80, ..BASE };
/// Where a bias takes the registers.
const FEW_KEYS: HopperConfig = HopperConfig { key_rows: 64, ..BASE };

/// Every config that some problem gets.
pub(crate) const ALL: [HopperConfig; 5] = [BASE, NARROW, WIDE, WIDEST, FEW_KEYS];

/// The best config for a problem, if the kernel takes it.
pub(crate) fn best(problem: &Problem, arch: Arch) -> Option<HopperConfig> {
    if arch != Arch::Sm90a {
        return None;
    }
    let by_columns = match problem.head_dim.max(problem.value_dim) {
        ..=64 => NARROW,
        65..=128 => BASE,
        129..=192 => WIDE,
        _ => WIDEST,
    };
    [by_columns, BASE, FEW_KEYS].into_iter().find(|config| takes(problem, Config::Hopper(*config), arch))
}
