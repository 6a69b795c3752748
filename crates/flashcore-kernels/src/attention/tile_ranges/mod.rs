//! Which rows and tiles of keys an expression leaves together, found out before attention begins.
//!
//! An expression that takes keys out says for each query row and key whether they meet, and nothing about tiles. So a small
//! kernel asks it about all of them, and keeps numbers for each tile of query rows: its rows, the keys between which all
//! that they attend lies, and for each part of the rows the first and the last tile of keys of which anything is attended,
//! and the range of those that all rows attend whole. The kernel behind it leaves out what is outside of the first, and
//! asks the expression only about what is outside of the second.
//!
//! Where tiles of keys may begin at any key, they begin at the first that some row of the CTA attends: that takes fewer of
//! them, and fewer that are attended in part. Behind the last such key there are none for the CTA, as at the end of all
//! keys. And where tiles of query rows may begin at any row, they begin anew where rows attend other keys than those before
//! them, as those of another document do.

mod cuts;
mod search;

use flashcore_ir::types::{S32, U32, U64};
use flashcore_ir::{Builder, GlobalAddress, Reg};
use flashcore_problem::Problem;
use flashcore_problem::expression::Expression;

use super::Work;
use crate::config::Config;
use crate::parameters::Parameters;
pub(crate) use search::kernel;

/// Numbers that are stored together, and their bytes.
const QUAD: u32 = 4;
const QUAD_BYTES: u32 = 16;

/// The tiles of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RangeTiles {
    /// Query rows of a CTA.
    pub(crate) tile_m: u32,
    /// Query rows with tiles of keys of their own; they divide those of a CTA.
    pub(crate) range_rows: u32,
    /// Keys of a tile.
    pub(crate) tile_n: u32,
    /// Whether tiles of keys may begin at any key, and not at multiples of their keys alone.
    pub(crate) keys_anywhere: bool,
    /// Whether tiles of query rows may, at any row.
    pub(crate) rows_anywhere: bool,
    /// Whether the kernel behind may start before it is known which these are, and waits for that itself.
    pub(crate) is_awaited: bool,
}

impl RangeTiles {
    /// Bytes of the numbers of a part, which come behind as many of the tile.
    pub(crate) const PART_BYTES: u32 = QUAD_BYTES;

    /// Those that begin at multiples of their rows and keys, for all rows of a CTA.
    pub(crate) const fn at_multiples(tile_m: u32, tile_n: u32) -> Self {
        Self { tile_m, range_rows: tile_m, tile_n, keys_anywhere: false, rows_anywhere: false, is_awaited: false }
    }

    /// Parts of the rows of a CTA that have tiles of keys of their own.
    pub(crate) const fn parts(self) -> u32 {
        self.tile_m / self.range_rows
    }

    /// The most tiles of so many query rows; how many there are shows when the kernel runs.
    pub(crate) const fn most_tiles(self, query_length: u32) -> u32 {
        let tiles = query_length.div_ceil(self.tile_m);
        if self.rows_anywhere { tiles + cuts::most(tiles) } else { tiles }
    }

    /// Bytes of the numbers of one tile of query rows: four of it, and four of each part.
    pub(crate) const fn bytes(self) -> u32 {
        (1 + self.parts()) * QUAD_BYTES
    }
}

/// How many tiles of query rows have numbers: in one head, of how many heads, of how many batches. What an expression does not
/// look at counts once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RangeShape {
    tiles: u32,
    heads: u32,
    batches: u32,
    tile_bytes: u64,
}

impl RangeShape {
    /// That of a problem with an expression, for a kernel that makes use of it.
    pub(crate) fn of(problem: &Problem, config: Config) -> Option<Self> {
        let mask_mod = problem.mask_mod?;
        let tiles = config.range_tiles(config.specialization(problem))?;
        let expression: &Expression = mask_mod.expression();
        let uses = expression.uses(expression.result());
        let counted = |is_used: bool, size: usize| if is_used { size as u32 } else { 1 };
        Some(Self {
            tiles: tiles.most_tiles(problem.query_length as u32),
            heads: counted(uses.head, problem.query_heads),
            batches: counted(uses.batch, problem.batch),
            tile_bytes: u64::from(tiles.bytes()),
        })
    }

    pub(crate) const fn bytes(self) -> u64 {
        self.head_bytes() * self.heads as u64 * self.batches as u64
    }

    pub(crate) const fn grid(self) -> [u32; 3] {
        [self.tiles, self.heads, self.batches]
    }

    const fn head_bytes(self) -> u64 {
        self.tile_bytes * self.tiles as u64
    }

    /// Bytes from one batch to the next, and from one head to the next.
    pub(crate) const fn strides(self) -> [u64; 2] {
        let head = self.head_bytes();
        [if self.batches > 1 { head * self.heads as u64 } else { 0 }, if self.heads > 1 { head } else { 0 }]
    }
}

/// The rows of a tile, and the keys between which all that they attend lies.
#[derive(Debug, Clone, Copy)]
pub(super) struct TileExtent {
    pub(super) first_row: Reg<U32>,
    /// Behind its last row; of a tile that does not exist, its first.
    pub(super) end_row: Reg<U32>,
    /// The key with which tile 0 of its keys begins.
    pub(super) origin: Reg<S32>,
    /// No row attends a key from this one on.
    pub(super) end_key: Reg<S32>,
}

impl TileExtent {
    /// That of the tile whose numbers stand at an address.
    pub(super) fn load(k: &mut Builder, address: Reg<U64>) -> Option<Self> {
        k.section("tile extent", |k| match k.load::<S32>(address, QUAD)[..] {
            [first_row, end_row, origin, end_key] => {
                let [first_row, end_row] = [first_row, end_row].map(|row| k.reinterpret::<S32, U32>(row));
                Some(Self { first_row, end_row, origin, end_key })
            }
            _ => None,
        })
    }
}

/// Tiles of keys by number, as the expression alone leaves them.
#[derive(Debug, Clone, Copy)]
pub(super) struct TileRanges {
    /// The first of which anything is attended.
    pub(super) first: Reg<S32>,
    /// The last of which anything is attended; before the first, where there is none.
    pub(super) last: Reg<S32>,
    /// From here on up to `whole_end` they are attended whole.
    pub(super) whole_first: Reg<S32>,
    pub(super) whole_end: Reg<S32>,
}

impl TileRanges {
    /// Those of a part of the tile whose numbers stand at an address.
    pub(super) fn load(k: &mut Builder, tile: Reg<U64>, part: Reg<U32>) -> Option<Self> {
        k.section("tile ranges", |k| {
            let address = part_address(k, tile, part);
            match k.load::<S32>(address, QUAD)[..] {
                [first, last, whole_first, whole_end] => Some(Self { first, last, whole_first, whole_end }),
                _ => None,
            }
        })
    }
}

/// Where the numbers of a tile stand.
pub(super) fn address(k: &mut Builder, work: &Work, tiles: RangeTiles, tile: Reg<U32>) -> Reg<U64> {
    let Parameters { tile_ranges, ranges_batch_stride, ranges_head_stride, .. } = work.parameters;
    let of_matrix = work.matrix(k, tile_ranges, ranges_batch_stride, ranges_head_stride, work.head);
    k.mad_wide(tile, tiles.bytes(), of_matrix)
}

/// Where what is known of a part stands behind what is known of its tile.
fn part_address(k: &mut Builder, tile: Reg<U64>, part: Reg<U32>) -> GlobalAddress {
    GlobalAddress::from(k.mad_wide(part, QUAD_BYTES, tile)).plus(QUAD_BYTES as i32)
}
