//! Which tiles of query rows a CTA works on, and in which order.
//!
//! The tiles of one head come together, so that its keys and values stay in the L2 cache. Under a causal mask the later
//! rows attend more keys: then the last tile comes first, the first second, the last but one third and so on, and a CTA
//! that takes tile after tile takes two at a time, which together are as long as any other two.

use flashcore_ir::types::U32;
use flashcore_ir::{Builder, Compare, Reg, SpecialRegister};
use flashcore_problem::Problem;

use crate::attention::{QueryTile, Work};
use crate::hopper_config::HopperConfig;
use crate::parameters::{Argument, Parameters};
use crate::specialisation::Specialisation;

/// The tiles of a problem, as the host counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Order {
    /// Tiles of one head of one batch.
    query_tiles: u32,
    /// Query heads.
    heads: u32,
    /// All tiles; more than can be counted are more than a grid has.
    pub(crate) tiles: u32,
}

impl Order {
    /// Those of a problem with so many query rows in a tile.
    pub(crate) fn of(problem: &Problem, query_rows: u32) -> Self {
        let query_tiles = problem.query_length.div_ceil(query_rows as usize) as u32;
        let matrices = (problem.batch as u32).saturating_mul(problem.query_heads as u32);
        Self { query_tiles, heads: problem.query_heads as u32, tiles: query_tiles.saturating_mul(matrices) }
    }

    /// In the order of [`Schedule::load`].
    pub(crate) fn arguments(self) -> [Argument; 3] {
        [self.query_tiles, self.heads, self.tiles].map(Argument::U32)
    }
}

/// The same in a kernel.
#[derive(Debug, Clone, Copy)]
pub(super) struct Schedule {
    query_tiles: Reg<U32>,
    heads: Reg<U32>,
    tiles: Reg<U32>,
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
        let [query_tiles, heads, tiles] = ["query_tiles", "heads", "tiles"].map(|name| k.parameter::<U32>(name));
        Self { query_tiles, heads, tiles, config, parameters, specialisation }
    }

    /// Does `body` with each tile of this CTA.
    pub(super) fn each_tile(&self, k: &mut Builder, body: impl FnOnce(&mut Builder, &Tile)) {
        let cta = k.special(SpecialRegister::CtaX);
        if !self.config.persistent {
            let tile = self.tile_of_cta(k, cta);
            return body(k, &tile);
        }
        let ctas = k.special(SpecialRegister::GridX);
        let in_pairs = self.specialisation.right;
        let index = if in_pairs { k.shl(cta, 1u32) } else { k.copy(cta) };
        k.while_uniform(
            |k| k.compare(Compare::Lt, index, self.tiles),
            |k| {
                let tile = self.tile(k, index);
                body(k, &tile);
                if in_pairs {
                    // From the first of a pair to the second; from that to the first of the next.
                    let second = k.and(index, 1u32);
                    let is_second = k.compare(Compare::Ne, second, 0u32);
                    let far = k.mad(ctas, 2u32, index);
                    let far = k.sub(far, 1u32);
                    let near = k.add(index, 1u32);
                    let next = k.select(is_second, far, near);
                    k.set(index, next);
                } else {
                    k.add_to(index, ctas);
                }
            },
        );
    }

    /// The tile of a CTA that has but one: the grid is by tile, head and batch, and nothing needs to be divided.
    fn tile_of_cta(&self, k: &mut Builder, cta: Reg<U32>) -> Tile {
        k.section("schedule", |k| {
            let row_tile = if self.specialisation.right {
                let last = k.sub(self.query_tiles, 1u32);
                k.sub(last, cta)
            } else {
                cta
            };
            let [head, batch] = [SpecialRegister::CtaY, SpecialRegister::CtaZ].map(|index| k.special(index));
            self.place(k, row_tile, head, batch)
        })
    }

    fn place(&self, k: &mut Builder, row_tile: Reg<U32>, head: Reg<U32>, batch: Reg<U32>) -> Tile {
        let first_row = k.mul(row_tile, self.config.query_rows());
        let key_head = k.div(head, self.parameters.heads_per_key_head);
        let place = QueryTile { first_row, head, key_head, batch };
        let work = Work::of_tile(k, self.parameters, self.specialisation, place, Some(self.heads));
        Tile { place, work }
    }

    /// The tile of a number.
    fn tile(&self, k: &mut Builder, index: Reg<U32>) -> Tile {
        k.section("schedule", |k| {
            let matrix = k.div(index, self.query_tiles);
            let skipped = k.mul(matrix, self.query_tiles);
            let mut row_tile = k.sub(index, skipped);
            if self.specialisation.right {
                // Every other head the other way round: where the tiles of a head are odd in number, the one that is left
                // over makes a pair with that of the next head.
                let last = k.sub(self.query_tiles, 1u32);
                let turned = k.sub(last, row_tile);
                let odd = k.and(matrix, 1u32);
                let is_odd = k.compare(Compare::Ne, odd, 0u32);
                row_tile = k.select(is_odd, turned, row_tile);
                let half = k.shr(row_tile, 1u32);
                let from_end = k.sub(last, half);
                let odd = k.and(row_tile, 1u32);
                let is_odd = k.compare(Compare::Ne, odd, 0u32);
                row_tile = k.select(is_odd, half, from_end);
            }
            let batch = k.div(matrix, self.heads);
            let skipped = k.mul(batch, self.heads);
            let head = k.sub(matrix, skipped);
            self.place(k, row_tile, head, batch)
        })
    }
}

/// A tile of query rows, and the work on it.
pub(super) struct Tile {
    pub(super) place: QueryTile,
    pub(super) work: Work,
}
