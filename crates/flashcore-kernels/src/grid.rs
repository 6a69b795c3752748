//! The grid of the attention kernel.

use flashcore_problem::Problem;

use crate::attention::scheduler::chunks::most_units;
use crate::attention::scheduler::lpt::LptOrder;
use crate::config::{AmpereConfig, Config, HopperConfig};
use crate::parameters::Extra;

/// Rows of all query heads of one key head.
pub(crate) const fn packed_rows(problem: &Problem) -> usize {
    let group = match problem.query_heads.checked_div(problem.key_heads) {
        Some(group) => group,
        None => 0,
    };
    problem.query_length.saturating_mul(group)
}

/// The grid of the attention kernel, and the parameters it has because of it.
pub(crate) struct GridShape {
    pub(crate) grid: [u32; 3],
    pub(crate) extra: Extra,
}

impl GridShape {
    pub(crate) fn new(problem: &Problem, config: Config) -> Self {
        let [heads, key_heads, batch] = [problem.query_heads, problem.key_heads, problem.batch].map(|size| size as u32);
        let tiles = |rows: usize| rows.div_ceil(config.tile_m() as usize) as u32;
        let is_packed = config.pack_gqa();
        let (one_head, heads) =
            if is_packed { (tiles(packed_rows(problem)), key_heads) } else { (tiles(problem.query_length), heads) };
        if let Config::Hopper(hopper) = config
            && hopper.persistent
        {
            return Self { grid: [LptOrder::of(problem, hopper).tiles, 1, 1], extra: Extra::Nothing };
        }
        let Config::Ampere(AmpereConfig { persistent, num_splits, cluster, chunk_keys, .. }) = config else {
            if let Config::Hopper(HopperConfig { chunk_keys: chunk_keys @ 1.., .. }) = config {
                let shape = problem.output_shape();
                let rows = shape.batch.saturating_mul(shape.heads).saturating_mul(shape.rows) as u64;
                let max_chunks = problem.key_length.div_ceil(chunk_keys as usize).max(1) as u32;
                let extra = Extra::Chunks { max_chunks, rows, chunk_keys, sequences: batch, heads };
                return Self { grid: [one_head.saturating_mul(max_chunks), heads, batch], extra };
            }
            let ctas = if let Config::Hopper(hopper) = config { hopper.cluster } else { 1 };
            return Self { grid: [one_head.saturating_mul(ctas), heads, batch], extra: Extra::Nothing };
        };
        let shape = problem.output_shape();
        let rows = shape.batch.saturating_mul(shape.heads).saturating_mul(shape.rows) as u64;
        if chunk_keys > 0 {
            let bounds = [batch, heads, one_head, problem.key_length as u32, chunk_keys].map(u64::from);
            let (units, max_chunks) = most_units(bounds);
            let ctas = units.min(persistent.into()) as u32;
            let max_chunks = max_chunks as u32;
            return Self {
                grid: [ctas, 1, 1],
                extra: Extra::Chunks { max_chunks, rows, chunk_keys, sequences: batch, heads },
            };
        }
        if persistent > 0 {
            let all = one_head.saturating_mul(heads).saturating_mul(batch);
            return Self { grid: [persistent.min(all), 1, 1], extra: Extra::Tiles { tiles: one_head, heads, all } };
        }
        let extra = if num_splits > 1 && !cluster { Extra::Splits { num_splits, rows } } else { Extra::Nothing };
        Self { grid: [one_head.saturating_mul(num_splits), heads, batch], extra }
    }
}

impl GridShape {
    /// Query tiles in all, persistent CTAs or not.
    pub(crate) const fn all_tiles(&self) -> u32 {
        match self.extra {
            Extra::Tiles { all, .. } => all,
            Extra::Nothing | Extra::Splits { .. } | Extra::Chunks { .. } => self.grid[0],
        }
    }
}
