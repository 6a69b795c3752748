//! The grid of the attention kernel.

use flashcore_problem::Problem;

use crate::parameters::Extra;

/// Rows of all query heads of one key head.
pub(crate) const fn packed_rows(problem: &Problem) -> usize {
    let group = match problem.query_heads.checked_div(problem.key_heads) {
        Some(group) => group,
        None => 0,
    };
    problem.query_length.saturating_mul(group)
}

/// Tiles of the rows of a head, and heads; or of the rows of all query heads of a key head, and key heads.
pub(crate) fn head_tiles(problem: &Problem, tile_m: u32, pack_gqa: bool) -> (u32, u32) {
    let (rows, heads) =
        if pack_gqa { (packed_rows(problem), problem.key_heads) } else { (problem.query_length, problem.query_heads) };
    (rows.div_ceil(tile_m as usize) as u32, heads as u32)
}

/// Rows of the output, of all heads and batches.
pub(crate) fn output_rows(problem: &Problem) -> u64 {
    let shape = problem.output_shape();
    shape.batch.saturating_mul(shape.heads).saturating_mul(shape.rows) as u64
}

/// The grid of the attention kernel, and the parameters it has because of it.
pub(crate) struct GridShape {
    pub(crate) grid: [u32; 3],
    pub(crate) extra: Extra,
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
