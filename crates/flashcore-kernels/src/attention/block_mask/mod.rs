//! Block mask: the KV blocks that a `mask_mod` leaves each tile of query rows (block sparsity).
//!
//! A `mask_mod` says for each query row and key whether they meet, and nothing about blocks. So a precompute kernel
//! evaluates it for all of them and stores a record for each tile of query rows: its rows, the keys between which all that
//! they attend lies, and for each row group the first and the last KV block of which anything is attended, and the range of
//! full blocks. The attention kernel skips what is outside of the first, and evaluates the expression only outside of the
//! second.
//!
//! Where KV tiles may be unaligned, block 0 begins at the first key that some row of the CTA attends: that takes fewer
//! blocks, and fewer partial ones. After the last such key there are none for the CTA, as at the end of all keys. And where
//! Q tiles may be unaligned, they begin anew at document boundaries: where rows attend other keys than those before them.

pub(crate) mod consumer;
mod doc_boundaries;
pub(crate) mod mode;
mod precompute;
pub(crate) mod work_info;

use flashcore_ir::types::{S32, U32, U64};
use flashcore_ir::{Builder, GlobalAddress, Reg};
use flashcore_problem::Problem;
use flashcore_problem::expression::Expression;

use crate::attention::TileContext;
use crate::config::Config;
use crate::parameters::Parameters;
pub(crate) use precompute::kernel;

/// Integers that are stored together, and their bytes.
const QUAD: u32 = 4;
const QUAD_BYTES: u32 = 16;

/// The tiles of the attention kernel that a block mask is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockMaskTiles {
    /// Query rows of a CTA.
    pub(crate) tile_m: u32,
    /// Query rows of a row group, which has a range of KV blocks of its own; they divide those of a CTA.
    pub(crate) group_rows: u32,
    /// Keys of a KV block.
    pub(crate) tile_n: u32,
    /// True if KV blocks may begin at any key, and not only at multiples of `tile_n`.
    pub(crate) unaligned_kv: bool,
    /// True if tiles of query rows may begin at any row.
    pub(crate) unaligned_q: bool,
    /// True if the attention kernel may start before the block mask is there (PDL), and waits for it itself.
    pub(crate) pdl: bool,
}

impl BlockMaskTiles {
    /// Bytes of the record of a row group, which follow as many of the tile.
    pub(crate) const GROUP_BYTES: u32 = QUAD_BYTES;

    /// Tiles and blocks at multiples of their sizes, with one row group.
    pub(crate) const fn aligned(tile_m: u32, tile_n: u32) -> Self {
        Self { tile_m, group_rows: tile_m, tile_n, unaligned_kv: false, unaligned_q: false, pdl: false }
    }

    /// Row groups of a CTA.
    pub(crate) const fn row_groups(self) -> u32 {
        self.tile_m / self.group_rows
    }

    /// The most tiles of so many query rows; their number shows when the kernel runs.
    pub(crate) const fn max_tiles(self, query_length: u32) -> u32 {
        let tiles = query_length.div_ceil(self.tile_m);
        if self.unaligned_q { tiles + doc_boundaries::max_boundaries(tiles) } else { tiles }
    }

    /// Bytes of the record of one tile of query rows: four integers of it, and four of each row group.
    pub(crate) const fn bytes(self) -> u32 {
        (1 + self.row_groups()) * QUAD_BYTES
    }
}

/// Shape of a block mask: tiles per head, heads and batches. Heads or batches that the expression does not depend on
/// count once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockMaskShape {
    tiles: u32,
    heads: u32,
    batches: u32,
    tile_bytes: u64,
}

impl BlockMaskShape {
    /// The shape for a problem with a `mask_mod`, for a kernel that uses a block mask.
    pub(crate) fn of(problem: &Problem, config: Config) -> Option<Self> {
        let mask_mod = problem.mask_mod?;
        let tiles = config.block_mask_tiles(config.specialization(problem))?;
        let expression: &Expression = mask_mod.expression();
        let uses = expression.uses(expression.result());
        let counted = |is_used: bool, size: usize| if is_used { size as u32 } else { 1 };
        Some(Self {
            tiles: tiles.max_tiles(problem.query_length as u32),
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

/// Extent of a tile: its rows, and the keys between which all that they attend lies.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TileExtent {
    pub(crate) first_row: Reg<U32>,
    /// One past its last row; of a tile that does not exist, its first.
    pub(crate) end_row: Reg<U32>,
    /// The first key of KV block 0.
    pub(crate) origin: Reg<S32>,
    /// No row attends a key from this one on.
    pub(crate) end_key: Reg<S32>,
}

impl TileExtent {
    /// Loads the extent from the record of a tile.
    pub(crate) fn load(k: &mut Builder, address: Reg<U64>) -> Option<Self> {
        k.section("tile extent", |k| match k.load::<S32>(address, QUAD)[..] {
            [first_row, end_row, origin, end_key] => {
                let [first_row, end_row] = [first_row, end_row].map(|row| k.reinterpret::<S32, U32>(row));
                Some(Self { first_row, end_row, origin, end_key })
            }
            _ => None,
        })
    }
}

/// KV blocks that the `mask_mod` alone leaves a row group.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KvBlocks {
    /// The first block of which anything is attended.
    pub(crate) first: Reg<S32>,
    /// The last block of which anything is attended; before the first, where there is none.
    pub(crate) last: Reg<S32>,
    /// The first full block.
    pub(crate) full_begin: Reg<S32>,
    /// One past the last full block.
    pub(crate) full_end: Reg<S32>,
}

impl KvBlocks {
    /// Loads the blocks of a row group from the record of its tile.
    pub(crate) fn load(k: &mut Builder, record: Reg<U64>, row_group: Reg<U32>) -> Option<Self> {
        k.section("kv blocks", |k| {
            let address = group_address(k, record, row_group);
            match k.load::<S32>(address, QUAD)[..] {
                [first, last, full_begin, full_end] => Some(Self { first, last, full_begin, full_end }),
                _ => None,
            }
        })
    }
}

/// The address of the record of a tile.
pub(crate) fn record_address(
    k: &mut Builder,
    context: &TileContext,
    tiles: BlockMaskTiles,
    tile: Reg<U32>,
) -> Reg<U64> {
    let Parameters { block_mask, block_mask_batch_stride, block_mask_head_stride, .. } = context.parameters;
    let of_matrix = context.matrix(k, block_mask, block_mask_batch_stride, block_mask_head_stride, context.head);
    k.mad_wide(tile, tiles.bytes(), of_matrix)
}

/// The address of a row group in the record of its tile.
fn group_address(k: &mut Builder, record: Reg<U64>, row_group: Reg<U32>) -> GlobalAddress {
    GlobalAddress::from(k.mad_wide(row_group, QUAD_BYTES, record)).plus(QUAD_BYTES as i32)
}
