//! Which config a problem gets unless another is asked for.
//!
//! The choices for GPUs with much shared memory were measured on an H200, those for the others follow from what fits:
//! `docs/experiments.md` has the figures. What the measurements say:
//!
//! * 32 rows a warp read keys and values from shared memory half as often, which is what 16 rows wait for.
//! * With 32 rows and more than 64 columns the query leaves no room in the registers, and stays in shared memory.
//! * A problem with fewer CTAs than multiprocessors takes as long as one CTA: smaller tiles, and warps that share keys.

use flashcore_ir::Arch;
use flashcore_problem::Problem;

use crate::config::{AmpereConfig, Config, QueryPlace};
use crate::hopper_config::HopperConfig;
use crate::specialisation::Specialisation;
use crate::tile::{Rescale, SharedLayout};

const BASE: AmpereConfig = AmpereConfig {
    warps: 4,
    rows_per_warp: 16,
    key_rows: 64,
    key_warps: 1,
    stages: 2,
    layout: SharedLayout::Swizzled,
    query: QueryPlace::Registers,
    rescale: Rescale::Always,
};

/// Few rows: a CTA ends sooner when two warps share its keys.
const FEW_ROWS: AmpereConfig = AmpereConfig { key_rows: 128, key_warps: 2, ..BASE };
/// Few rows and few keys.
const TINY: AmpereConfig = AmpereConfig { key_warps: 2, ..BASE };
/// One wave of CTAs of narrow heads.
const ONE_WAVE: AmpereConfig = AmpereConfig { key_rows: 128, ..BASE };
/// Narrow heads.
const NARROW: AmpereConfig = AmpereConfig { rows_per_warp: 32, key_rows: 128, query: QueryPlace::Shared, ..BASE };
/// Heads of up to 128 columns.
const MIDDLE: AmpereConfig =
    AmpereConfig { rows_per_warp: 32, query: QueryPlace::Shared, rescale: Rescale::WhenRaised, ..BASE };
/// Heads of up to 192 columns.
const WIDE: AmpereConfig = AmpereConfig { warps: 8, ..BASE };
/// Heads of up to 256 columns.
const WIDEST: AmpereConfig = AmpereConfig { warps: 8, query: QueryPlace::Shared, rescale: Rescale::WhenRaised, ..BASE };
/// The same for an A100, which has not as much shared memory.
const WIDEST_A100: AmpereConfig = AmpereConfig { key_rows: 32, ..WIDEST };
/// Narrow heads where shared memory is small: two CTAs fit.
const NARROW_SMALL: AmpereConfig = AmpereConfig { rows_per_warp: 32, ..BASE };
/// Heads of up to 128 columns where shared memory is small.
const MIDDLE_SMALL: AmpereConfig = AmpereConfig { key_rows: 32, ..MIDDLE };
/// Wide heads where shared memory is small.
const WIDE_SMALL: AmpereConfig =
    AmpereConfig { key_rows: 32, query: QueryPlace::Shared, rescale: Rescale::WhenRaised, ..BASE };

/// Every config that some problem gets.
pub(crate) const ALL: [AmpereConfig; 12] =
    [BASE, FEW_ROWS, TINY, ONE_WAVE, NARROW, MIDDLE, WIDE, WIDEST, WIDEST_A100, NARROW_SMALL, MIDDLE_SMALL, WIDE_SMALL];

const HOPPER_BASE: HopperConfig = HopperConfig {
    warpgroups: 2,
    key_rows: 128,
    stages: 2,
    rescale: Rescale::Always,
    hidden_rescale: true,
    ping_pong: true,
    persistent: true,
};
/// Narrow heads on Hopper.
const HOPPER_NARROW: HopperConfig = HopperConfig { warpgroups: 3, ..HOPPER_BASE };
/// The widest heads on Hopper.
const HOPPER_WIDEST: HopperConfig = HopperConfig { key_rows: 80, ping_pong: false, ..HOPPER_BASE };

/// Every Hopper config that some problem gets.
pub(crate) const HOPPER: [HopperConfig; 3] = [HOPPER_BASE, HOPPER_NARROW, HOPPER_WIDEST];

/// Shared memory of a CTA from which on the larger tiles fit twice.
const ROOMY_SHARED_BYTES: u32 = 160 * 1024;
/// Shared memory of a CTA from which on the largest tiles fit.
const ROOMIEST_SHARED_BYTES: u32 = 192 * 1024;

impl Config {
    /// The config for a problem unless another is asked for, on a GPU with so many multiprocessors.
    pub fn tuned(problem: &Problem, arch: Arch, multiprocessors: u32) -> Self {
        if !Self::ampere().dtypes().contains(&problem.dtype) {
            return Self::scalar();
        }
        let columns = problem.head_dim.max(problem.value_dim);
        let is_roomy = arch.shared_bytes_per_cta() >= ROOMY_SHARED_BYTES;
        let ctas = |config: AmpereConfig| {
            let tiles = problem.query_length.div_ceil(config.query_rows() as usize);
            tiles.saturating_mul(problem.query_heads).saturating_mul(problem.batch)
        };
        let multiprocessors = multiprocessors as usize;
        // With no more CTAs than multiprocessors, half as many rows for each cost nothing.
        let is_small = ctas(FEW_ROWS) <= multiprocessors;
        // Compilers for other GPUs run out of registers with these tiles.
        let is_hopper = matches!(arch, Arch::Sm90 | Arch::Sm90a);
        let is_one_wave = ctas(BASE) <= multiprocessors;
        let best = match (is_roomy, columns) {
            (true, ..=64) if is_small && problem.key_length > 64 => FEW_ROWS,
            (_, ..=128) if is_small => TINY,
            (true, ..=64) if is_one_wave => ONE_WAVE,
            (true, 65..=128) | (false, ..=64) if is_one_wave => BASE,
            (true, ..=64) if is_hopper => NARROW,
            (true, 65..=128) if is_hopper => MIDDLE,
            (_, ..=64) => NARROW_SMALL,
            (_, ..=128) => MIDDLE_SMALL,
            (true, ..=192) => WIDE,
            (true, _) if arch.shared_bytes_per_cta() >= ROOMIEST_SHARED_BYTES => WIDEST,
            (true, _) => WIDEST_A100,
            (false, _) => WIDE_SMALL,
        };
        // A bias takes registers that the large tiles have not left.
        let specialisation = Specialisation::of(problem);
        let fitting = [best, BASE].into_iter().find(|config| config.fits_registers(specialisation, arch));
        Self::Ampere(fitting.unwrap_or(WIDE_SMALL))
    }
}
