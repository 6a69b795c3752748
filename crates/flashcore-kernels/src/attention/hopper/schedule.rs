//! Which tiles of query rows a CTA works on, and in which order.
//!
//! The tiles of some heads form a *section*: together their keys and values fit the L2 cache. Sections come one after the
//! other; within one, the tiles of all its heads that attend most keys come first, so that the work that is left at the
//! end comes in small pieces.

use flashcore_ir::types::U32;
use flashcore_ir::{Builder, Reg, SpecialRegister};
use flashcore_problem::Problem;

use crate::attention::{QueryTile, Work};
use crate::hopper_config::HopperConfig;
use crate::parameters::{Argument, Parameters};
use crate::specialisation::Specialisation;

/// Bytes of keys and values that one section may have.
const SECTION_BYTES: usize = 24 << 20;

/// The order of the tiles of a problem, as the host computes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Order {
    /// Tiles of one head of one batch.
    query_tiles: u32,
    /// Query heads.
    heads: u32,
    /// Heads of all batches.
    matrices: u32,
    /// Of which so many form a section.
    section: u32,
}

impl Order {
    /// That of a problem with so many query rows in a tile.
    pub(crate) fn of(problem: &Problem, query_rows: u32) -> Self {
        let query_tiles = problem.query_length.div_ceil(query_rows as usize);
        let matrices = problem.batch * problem.query_heads;
        let per_key_head = (problem.query_heads / problem.key_heads).max(1);
        let columns = problem.head_dim + problem.value_dim;
        let bytes = problem.key_length.max(1).saturating_mul(columns * problem.dtype.size_bytes());
        let (_, right) = problem.mask.limits();
        // Where all tiles take as long, those of one head may as well come together.
        let key_heads = if right.is_some() { (SECTION_BYTES / bytes).max(1) } else { 1 };
        let section = (key_heads * per_key_head).min(matrices);
        let [query_tiles, heads, matrices, section] =
            [query_tiles, problem.query_heads, matrices, section].map(|size| size as u32);
        Self { query_tiles, heads, matrices, section }
    }

    /// All tiles; more than can be counted are more than a grid has.
    pub(crate) const fn tiles(self) -> u32 {
        self.query_tiles.saturating_mul(self.matrices)
    }

    /// In the order of [`Schedule::load`].
    pub(crate) fn arguments(self) -> [Argument; 4] {
        [self.query_tiles, self.heads, self.matrices, self.section].map(Argument::U32)
    }
}

/// The same in a kernel.
#[derive(Debug, Clone, Copy)]
pub(super) struct Schedule {
    query_tiles: Reg<U32>,
    heads: Reg<U32>,
    matrices: Reg<U32>,
    section: Reg<U32>,
    config: HopperConfig,
    parameters: Parameters,
    specialisation: Specialisation,
}

impl Schedule {
    pub(super) fn load(
        k: &mut Builder,
        config: HopperConfig,
        parameters: Parameters,
        specialisation: Specialisation,
    ) -> Self {
        let [query_tiles, heads, matrices, section] =
            ["query_tiles", "heads", "matrices", "section"].map(|name| k.parameter::<U32>(name));
        Self { query_tiles, heads, matrices, section, config, parameters, specialisation }
    }

    /// Does `body` with each tile of this CTA.
    pub(super) fn each_tile(&self, k: &mut Builder, body: impl FnOnce(&mut Builder, &Tile)) {
        let first = k.special(SpecialRegister::CtaX);
        if !self.config.persistent {
            let tile = self.tile(k, first);
            return body(k, &tile);
        }
        let ctas = k.special(SpecialRegister::GridX);
        let tiles = k.mul(self.query_tiles, self.matrices);
        k.for_uniform(first, tiles, ctas, |k, index| {
            let tile = self.tile(k, index);
            body(k, &tile);
        });
    }

    /// The tile of a number.
    fn tile(&self, k: &mut Builder, index: Reg<U32>) -> Tile {
        k.section("schedule", |k| {
            let in_section = k.mul(self.section, self.query_tiles);
            let section = k.div(index, in_section);
            let skipped = k.mul(section, in_section);
            let within = k.sub(index, skipped);
            let first = k.mul(section, self.section);
            // The last section may have fewer.
            let left = k.sub(self.matrices, first);
            let matrices = k.min(self.section, left);
            let row_tile = k.div(within, matrices);
            let skipped = k.mul(row_tile, matrices);
            let matrix = k.sub(within, skipped);
            let matrix = k.add(first, matrix);
            let batch = k.div(matrix, self.heads);
            let skipped = k.mul(batch, self.heads);
            let head = k.sub(matrix, skipped);
            let row_tile = if self.specialisation.right {
                // The last rows attend most keys.
                let last = k.sub(self.query_tiles, 1u32);
                k.sub(last, row_tile)
            } else {
                row_tile
            };
            let first_row = k.mul(row_tile, self.config.query_rows());
            let key_head = k.div(head, self.parameters.heads_per_key_head);
            let place = QueryTile { first_row, head, key_head, batch };
            let work = Work::of_tile(k, self.parameters, self.specialisation, place, Some(self.heads));
            Tile { place, work }
        })
    }
}

/// A tile of query rows, and the work on it.
pub(super) struct Tile {
    pub(super) place: QueryTile,
    pub(super) work: Work,
}
