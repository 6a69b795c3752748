//! Which tiles of query rows a CTA works on, and in which order.
//!
//! The tiles of one head come together, so that its keys and values stay in the L2 cache; where some are longer than
//! others those of a section of heads, in the order that [`Order`](super::Order) has planned.

use flashcore_ir::types::{S32, U32, U64};
use flashcore_ir::{Builder, Compare, Reg, SpecialRegister};

use super::by_length::ByLength;
use super::order::NO_POWER;
use crate::attention::tile_ranges::{self, TileExtent, TileRanges};
use crate::attention::{QueryTile, Work};
use crate::hopper_config::HopperConfig;
use crate::parameters::Parameters;
use crate::specialization::Specialization;

/// The order of tiles, in a kernel.
#[derive(Debug, Clone, Copy)]
pub(super) struct Schedule {
    /// Tiles of a head.
    pub(super) query_tiles: Reg<U32>,
    heads: Reg<U32>,
    pub(super) matrices: Reg<U32>,
    pub(super) tiles: Reg<U32>,
    section: Reg<U32>,
    last_section: Reg<U32>,
    section_bits: Reg<U32>,
    run_bits: Reg<U32>,
    config: HopperConfig,
    parameters: Parameters,
    pub(super) specialization: Specialization,
    /// Where tiles are sorted.
    pub(super) by_length: Option<ByLength>,
}

impl Schedule {
    pub(super) fn load(
        k: &mut Builder,
        config: HopperConfig,
        parameters: &Parameters,
        specialization: Specialization,
    ) -> Self {
        let [query_tiles, heads, matrices, tiles, section, last_section, section_bits, run_bits] =
            ["query_tiles", "heads", "matrices", "tiles", "section", "last_section", "section_bits", "run_bits"]
                .map(|name| k.parameter::<U32>(name));
        Self {
            query_tiles,
            heads,
            matrices,
            tiles,
            section,
            last_section,
            section_bits,
            run_bits,
            config,
            parameters: *parameters,
            specialization,
            by_length: None,
        }
    }

    /// Does `body` with each tile of this CTA. Where `read` does not say what is known of it and of a part of its rows, it is
    /// looked up.
    pub(super) fn each_tile(
        &self,
        k: &mut Builder,
        part: Option<Reg<U32>>,
        read: impl FnOnce(&mut Builder) -> Option<Found>,
        body: impl FnOnce(&mut Builder, &Tile),
    ) {
        let cta = k.special(SpecialRegister::CtaX);
        if !self.config.persistent {
            let found = self.tile_of_cta(k, cta, part);
            let tile = self.tile(k, found);
            return body(k, &tile);
        }
        let ctas = k.special(SpecialRegister::GridX);
        let index = k.copy(cta);
        // Every other round goes back over the CTAs.
        let round_trip = self.has_sections().then(|| {
            let both = k.shl(ctas, 1u32);
            let before = k.mad(cta, 2u32, 1u32);
            (both, k.sub(both, before))
        });
        k.while_uniform(
            |k| k.compare(Compare::Lt, index, self.tiles),
            |k| {
                let found = read(k).unwrap_or_else(|| self.look_up(k, index, part));
                let tile = self.tile(k, found);
                body(k, &tile);
                if let Some((both, step)) = round_trip {
                    k.section("round trip", |k| {
                        k.add_to(index, step);
                        let back = k.sub(both, step);
                        k.set(step, back);
                    });
                } else {
                    k.add_to(index, ctas);
                }
            },
        );
    }

    /// Whether the tiles of a head differ in length, as far as is known.
    const fn has_sections(&self) -> bool {
        self.specialization.right || self.by_length.is_some()
    }

    /// The tile of a CTA that has but one: the grid is by tile, head and batch, and nothing needs to be divided.
    fn tile_of_cta(&self, k: &mut Builder, cta: Reg<U32>, part: Option<Reg<U32>>) -> Found {
        k.section("schedule", |k| {
            // All CTAs of a cluster have the same tile.
            let cluster = if self.config.cluster > 1 { k.shr(cta, self.config.cluster.ilog2()) } else { cta };
            let row_tile = if self.specialization.right {
                let last = k.sub(self.query_tiles, 1u32);
                k.sub(last, cluster)
            } else {
                cluster
            };
            let [head, batch] = [SpecialRegister::CtaY, SpecialRegister::CtaZ].map(|index| k.special(index));
            self.find(k, [row_tile, head, batch], part)
        })
    }

    /// What is known of the tile with a number in its head, and of a part of its rows.
    pub(super) fn find(&self, k: &mut Builder, [number, head, batch]: [Reg<U32>; 3], part: Option<Reg<U32>>) -> Found {
        let first_row = k.mul(number, self.config.tile_m());
        let place = QueryTile { first_row, head, key_head: head, batch };
        let work = Work::of_tile(k, &self.parameters, self.specialization, place, Some(self.heads));
        let tiles = self.config.range_tiles(self.specialization);
        let record = tiles.map(|tiles| tile_ranges::address(k, &work, tiles, number));
        let extent = record.and_then(|record| TileExtent::load(k, record));
        let ranges = record.zip(part).and_then(|(record, part)| TileRanges::load(k, record, part));
        Found { first_row, head, batch, record, extent, ranges }
    }

    /// The tile of which that is known.
    pub(super) fn tile(&self, k: &mut Builder, found: Found) -> Tile {
        let Found { first_row, head, batch, record, extent, ranges } = found;
        let key_head = k.div(head, self.parameters.heads_per_key_head);
        let place = QueryTile { first_row, head, key_head, batch };
        let work = Work::of_tile(k, &self.parameters, self.specialization, place, Some(self.heads));
        match extent {
            // As if there were no other rows, and no keys behind.
            Some(TileExtent { first_row, end_row, origin, end_key }) => {
                let key_length = k.min(work.key_length, end_key);
                let work = Work { first_row, row_count: end_row, key_length, ..work };
                Tile { place: QueryTile { first_row, ..place }, work, record, ranges, origin: Some(origin) }
            }
            None => Tile { place, work, record, ranges: None, origin: None },
        }
    }

    /// What is known of the tile of an index.
    fn look_up(&self, k: &mut Builder, index: Reg<U32>, part: Option<Reg<U32>>) -> Found {
        k.section("schedule", |k| {
            let (matrix, row_tile) = if let Some(by_length) = self.by_length {
                self.in_order(k, by_length, index)
            } else if self.has_sections() {
                self.in_section(k, index)
            } else {
                let matrix = k.div(index, self.query_tiles);
                let skipped = k.mul(matrix, self.query_tiles);
                (matrix, k.sub(index, skipped))
            };
            let batch = k.div(matrix, self.heads);
            let skipped = k.mul(batch, self.heads);
            let head = k.sub(matrix, skipped);
            self.find(k, [row_tile, head, batch], part)
        })
    }

    /// The head and the tile in it of a number, where tiles are sorted: group by group where several have the same keys,
    /// and section by section elsewhere.
    fn in_order(&self, k: &mut Builder, by_length: ByLength, index: Reg<U32>) -> (Reg<U32>, Reg<U32>) {
        let (matrix, tile) = (k.register(), k.register());
        k.if_else_uniform(
            by_length.is_grouped,
            |k| {
                let (of_group, number) = by_length.in_group(k, self.matrices, index);
                k.set(matrix, of_group);
                k.set(tile, number);
            },
            |k| {
                let (of_section, place) = self.in_section(k, index);
                let number = by_length.tile(k, place);
                k.set(matrix, of_section);
                k.set(tile, number);
            },
        );
        (matrix, tile)
    }

    /// The head and the place in it of the tile of a number: in the last section and every other one before it, the last
    /// tiles of all heads come first, a run of each head at a time.
    fn in_section(&self, k: &mut Builder, index: Reg<U32>) -> (Reg<U32>, Reg<U32>) {
        let size = k.mul(self.query_tiles, self.section);
        let number = k.div(index, size);
        let skipped = k.mul(number, size);
        let rest = k.sub(index, skipped);
        let first = k.mul(number, self.section);
        let last = k.sub(self.query_tiles, 1u32);
        // The last section may have fewer heads.
        let heads = k.sub(self.matrices, first);
        let heads = k.min(heads, self.section);
        let tiles_of_runs = k.shl(heads, self.run_bits);
        let run = k.register();
        let is_power_of_two = k.compare(Compare::Lt, self.section_bits, NO_POWER);
        k.if_else_uniform(
            is_power_of_two,
            |k| {
                let bits = k.add(self.section_bits, self.run_bits);
                let quotient = k.shr(rest, bits);
                k.set(run, quotient);
            },
            |k| {
                let quotient = k.div(rest, tiles_of_runs);
                k.set(run, quotient);
            },
        );
        let skipped = k.mul(run, tiles_of_runs);
        let within = k.sub(rest, skipped);
        let run = k.shl(run, self.run_bits);
        let head = k.shr(within, self.run_bits);
        let skipped = k.shl(head, self.run_bits);
        let of_run = k.sub(within, skipped);
        // The last tile, where it has no run to be in.
        let is_alone = k.compare(Compare::Eq, run, last);
        let head = k.select(is_alone, within, head);
        let of_run = k.select(is_alone, 0u32, of_run);
        let from_one_end = k.add(run, of_run);
        let behind = k.sub(self.last_section, number);
        let behind = k.and(behind, 1u32);
        let from_last = k.compare(Compare::Eq, behind, 0u32);
        let turned = k.sub(last, from_one_end);
        (k.add(first, head), k.select(from_last, turned, from_one_end))
    }
}

/// What has to be looked up for a tile.
#[derive(Debug, Clone, Copy)]
pub(super) struct Found {
    /// Its first row, unless `extent` says.
    pub(super) first_row: Reg<U32>,
    pub(super) head: Reg<U32>,
    pub(super) batch: Reg<U32>,
    /// Where it stands which rows and keys it has, and tiles of keys for a part of its rows, where an expression leaves some.
    pub(super) record: Option<Reg<U64>>,
    pub(super) extent: Option<TileExtent>,
    pub(super) ranges: Option<TileRanges>,
}

/// A tile of query rows, and the work on it.
pub(super) struct Tile {
    pub(super) place: QueryTile,
    pub(super) work: Work,
    /// Where it stands what an expression leaves.
    pub(super) record: Option<Reg<U64>>,
    /// What an expression leaves to a part of the rows.
    pub(super) ranges: Option<TileRanges>,
    /// The key that tile 0 of its keys begins with, where that is not the first.
    pub(super) origin: Option<Reg<S32>>,
}
