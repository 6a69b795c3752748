//! Transposition of an 8-bit tile in shared memory: rows of values become columns of a K-major `wgmma` operand.
//!
//! A warp takes 32 rows (keys) and 16 columns at a time. `ldmatrix.trans` moves pairs of columns: a lane gets, of two rows,
//! the two bytes of one pair. Two such registers, of rows 8 apart, have four rows of both columns, and a byte permute each
//! puts those of one column together: a word of the transposed tile, which `stmatrix` stores, 8 rows of 16 bytes at a time.
//! The order of keys that this gives is the one in which P is multiplied, see [`WgmmaFragments`](crate::primitives::WgmmaFragments).
//!
//! Rows of the transposed tile that are 8 apart lie in the same banks. A lane has words of two neighbouring rows, so the
//! upper half of the lanes stores the odd one first: then the 8 rows of a matrix lie in different banks.

use flashcore_ir::types::{F16x2, S32, U32};
use flashcore_ir::{Builder, Compare, Reg, SharedAddress};

use super::swizzle::{CHUNKS_PER_ROW, PANEL_ROW_BYTES, SwizzledTile};
use super::tile::CHUNK_BYTES;

/// Rows that a warp transposes at a time.
const STEP_ROWS: u32 = 32;
/// Columns of them: a chunk.
const STEP_COLUMNS: u32 = 16;
/// Selectors of a byte permute: the even bytes of two words, and the odd ones.
const EVEN: u32 = 0x6420;
const ODD: u32 = 0x7531;

/// The transposition of tiles of one shape by several warps: what a lane computes once.
#[derive(Debug, Clone, Copy)]
pub struct TileTranspose {
    source: SwizzledTile,
    target: SwizzledTile,
    lane: Reg<U32>,
    /// The first chunk of columns of this warp, and the number of warps.
    first_chunk: Reg<U32>,
    warps: u32,
    /// Bytes from a block of 16 rows of the target to the chunk that the lane points `stmatrix` at.
    target_offset: Reg<U32>,
    /// Selectors of the words that are stored first and second.
    selectors: [Reg<U32>; 2],
}

/// Rows of the source that count; the others become zeros, whatever they hold.
#[derive(Debug, Clone, Copy)]
pub struct TransposedRows {
    /// The first.
    pub begin: Reg<S32>,
    /// One past the last.
    pub end: Reg<S32>,
    /// The address of a chunk of zeros.
    pub zeros: Reg<U32>,
}

impl TileTranspose {
    /// Prepares warp `warp` of `warps` for tiles of 8-bit elements, with whole chunks of columns and 32 rows.
    pub fn new(
        k: &mut Builder,
        (source, target): (SwizzledTile, SwizzledTile),
        lane: Reg<U32>,
        (warp, warps): (Reg<U32>, u32),
    ) -> Self {
        let is_low = k.eval((lane >> 4).eq(0));
        let selectors = [k.select(is_low, EVEN, ODD), k.select(is_low, ODD, EVEN)];
        // Lane 8i + r points at row r of matrix i: matrices 0 and 2 are stored first, 2 and 3 have the second 16 keys.
        let (row, matrix) = (k.and(lane, 7u32), k.shr(lane, 3u32));
        let target_row = k.eval((row << 1) + ((row >> 2) ^ (matrix & 1)));
        let chunk = k.eval((matrix >> 1) ^ (target_row & (CHUNKS_PER_ROW - 1)));
        let target_offset = k.eval(target_row * PANEL_ROW_BYTES + (chunk << CHUNK_BYTES.ilog2()));
        Self { source, target, lane, first_chunk: warp, warps, target_offset, selectors }
    }

    /// Transposes the warp's columns of the tile at `source` to the tile at `target`.
    pub fn run(&self, k: &mut Builder, source: Reg<U32>, target: Reg<U32>, rows: Option<TransposedRows>) {
        let chunk = k.copy(self.first_chunk);
        let chunks = self.source.columns / STEP_COLUMNS;
        let row = k.mad(self.lane, PANEL_ROW_BYTES, source);
        let target = k.add(target, self.target_offset);
        k.while_uniform(
            |k| k.compare(Compare::Lt, chunk, chunks),
            |k| {
                let swizzled = k.eval((chunk ^ self.lane) & (CHUNKS_PER_ROW - 1));
                let panel = k.eval(chunk >> CHUNKS_PER_ROW.ilog2());
                let from = k.eval(row + panel * self.source.panel_bytes() + swizzled * CHUNK_BYTES);
                let to = k.mad(chunk, STEP_COLUMNS * PANEL_ROW_BYTES, target);
                for step in 0..self.source.rows / STEP_ROWS {
                    self.step(k, from, to, step, rows);
                }
                k.add_to(chunk, self.warps);
            },
        );
    }

    /// Transposes 32 rows of a chunk.
    fn step(&self, k: &mut Builder, from: Reg<U32>, to: Reg<U32>, step: u32, rows: Option<TransposedRows>) {
        let offset = (step * STEP_ROWS * PANEL_ROW_BYTES) as i32;
        let from = match rows {
            None => SharedAddress::from(from).plus(offset),
            Some(TransposedRows { begin, end, zeros }) => {
                let row = k.eval((self.lane + step * STEP_ROWS).signed());
                let counts = k.eval(row.ge(begin) & row.lt(end));
                let from = k.add(from, offset as u32);
                SharedAddress::from(k.select(counts, from, zeros))
            }
        };
        let loaded = k.load_matrix::<F16x2>(from, 4, true);
        let loaded: Vec<Reg<U32>> = loaded.into_iter().map(|register| k.reinterpret(register)).collect();
        let words = loaded.chunks_exact(2).flat_map(|pair| {
            self.selectors.map(|selector| {
                let word = k.permute(pair[0], pair[1], selector);
                k.reinterpret::<U32, F16x2>(word)
            })
        });
        let words: Vec<_> = words.collect();
        // Two chunks of a row of the target; the swizzle exchanges chunks within a panel.
        let (panel, pair) = (2 * step / CHUNKS_PER_ROW, 2 * step % CHUNKS_PER_ROW);
        let to = if pair == 0 { to } else { k.xor(to, pair * CHUNK_BYTES) };
        k.store_matrix(SharedAddress::from(to).plus((panel * self.target.panel_bytes()) as i32), &words, false);
    }
}
