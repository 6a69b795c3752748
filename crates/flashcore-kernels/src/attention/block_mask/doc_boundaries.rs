//! Document boundaries: rows that attend other keys than those before them.
//!
//! Of two documents in one sequence, a tile of rows that has the end of the one and the beginning of the other goes through
//! the keys of both. So tiles begin anew where a document does: at rows that do not attend the position of the row before
//! them, nor the other way round. That is a guess, for which two scores of each row are looked at; what the rows of a tile
//! attend is evaluated afterwards, whatever rows they are. Where there are so many boundaries that short tiles would cost
//! more than they save, they are ignored.

use flashcore_ir::builder::Expr;
use flashcore_ir::types::{Pred, S32, U32};
use flashcore_ir::{Builder, Compare, ReduceOp, Reg, SharedAddress, ShuffleMode};

use super::precompute::{BlockMaskPrecompute, WARPS, WORD_BYTES};
use crate::primitives::LANES;

/// Rows that a thread looks at together.
const ROWS_AT_ONCE: u32 = 16;
const THREADS: u32 = WARPS * LANES;
/// Offsets in the memory of the block flags, which are not there yet: after the list of boundaries their number, and the
/// rows that one warp finds for all.
const COUNT: i32 = (LANES * WORD_BYTES) as i32;
const ROWS: i32 = COUNT + 8;

/// The most boundaries of rows that make `tiles` tiles without: one for every other tile, and no more than the lanes of a
/// warp can hold with the beginning of all rows.
pub(super) const fn max_boundaries(tiles: u32) -> u32 {
    let half = tiles / 2;
    if half < LANES - 1 { half } else { LANES - 1 }
}

/// The first row of the CTA's tile, and one past its last; of a tile that does not exist, twice the number of rows.
pub(super) fn rows_of_tile(k: &mut Builder, precompute: &BlockMaskPrecompute) -> [Reg<U32>; 2] {
    let BlockMaskPrecompute { context, flags: memory, warp, lane, .. } = *precompute;
    let length = context.parameters.query_length;
    let list = SharedAddress::from(memory);
    let lane_entry = k.mad(lane, WORD_BYTES, memory);
    let is_first = k.compare(Compare::Eq, lane, 0u32);
    let is_first_warp = k.compare(Compare::Eq, warp, 0u32);
    k.if_uniform(is_first_warp, |k| {
        let beginning = k.select(is_first, 0u32, length);
        k.store_shared(lane_entry, &[beginning]);
        let one = k.copy(1u32);
        k.when(is_first, |k| k.store_shared(list.plus(COUNT), &[one]));
    });
    k.cta_sync();
    k.section("doc boundaries", |k| find(k, precompute));
    k.cta_sync();
    k.if_uniform(is_first_warp, |k| {
        k.section("tile rows", |k| {
            let beginning = k.load_shared::<U32>(lane_entry, 1)[0];
            let count = k.load_shared::<U32>(list.plus(COUNT), 1)[0];
            let rows = rows_between(k, precompute, beginning, count);
            k.when(is_first, |k| k.store_shared(list.plus(ROWS), &rows));
        });
    });
    k.cta_sync();
    let rows = k.load_shared::<U32>(list.plus(ROWS), 2);
    // The memory is for block flags from here on.
    k.cta_sync();
    [rows[0], rows[1]]
}

/// Adds all boundaries to the list, as far as it reaches, and counts them.
fn find(k: &mut Builder, precompute: &BlockMaskPrecompute) {
    let BlockMaskPrecompute { context, flags: memory, warp, lane, .. } = *precompute;
    let first = k.mad(warp, LANES, lane);
    k.for_uniform(0u32, context.parameters.query_length, THREADS * ROWS_AT_ONCE, |k, start| {
        let first = k.add(start, first);
        let rows: Vec<_> = (0..ROWS_AT_ONCE).map(|index| k.add(first, index * THREADS)).collect();
        let boundaries: Vec<_> = rows.iter().map(|row| is_boundary(k, precompute, *row)).collect();
        for (row, is_boundary) in rows.into_iter().zip(boundaries) {
            k.if_then(is_boundary, |k| {
                let one = k.copy(1u32);
                let count = SharedAddress::from(memory).plus(COUNT);
                let index = k.atomic::<U32, SharedAddress>(ReduceOp::Add, count, one);
                let fits = k.compare(Compare::Lt, index, LANES);
                let entry = k.mad(index, WORD_BYTES, memory);
                k.when(fits, |k| k.store_shared(entry, &[row]));
            });
        }
    });
}

/// True if a row exists, and it and the one before it do not attend each other's position.
fn is_boundary(k: &mut Builder, precompute: &BlockMaskPrecompute, row: Reg<U32>) -> Reg<Pred> {
    let context = &precompute.context;
    let last = k.sub(context.parameters.query_length, 1u32);
    let exists = k.eval(row.le(last) & row.gt(0));
    // Of a row that does not exist, some other two.
    let row = k.eval(row.min(last).max(1));
    let before = k.sub(row, 1u32);
    let last_key = k.sub(context.parameters.key_length, 1u32);
    let [before, row, last_key] = [before, row, last_key].map(|index| k.reinterpret::<U32, S32>(index));
    let keys = [before, row].map(|key| k.min(key, last_key));
    let mut code = context.expression(k, precompute.mask_mod, context.first_row, 0);
    code.read_keys(k, &keys);
    let mut attended = |row, column| {
        let row_code = code.for_row(k, row);
        row_code.block(keys[0]).attended(k, 0, column)
    };
    let (back, forth) = (attended(row, 0), attended(before, 1));
    k.eval(!(back | forth) & exists)
}

/// The rows of the CTA's tile, where tiles begin anew at the rows that lanes have, in any order; those without one have the
/// number of rows. If there are too many, only the beginning of all rows counts.
fn rows_between(
    k: &mut Builder,
    precompute: &BlockMaskPrecompute,
    beginning: Reg<U32>,
    count: Reg<U32>,
) -> [Reg<U32>; 2] {
    let (length, tile_m) = (precompute.context.parameters.query_length, precompute.tiles.tile_m);
    let tiles_of = |rows: Expr<U32>| (rows + (tile_m - 1)) / tile_m;
    // The beginning of all rows is among them.
    let too_many = k.eval(count.gt((tiles_of(length.into()) >> 1).min(LANES - 1) + 1));
    let is_dropped = k.eval(beginning.gt(0) & too_many);
    let beginning = k.select(is_dropped, length, beginning);
    // The beginning of the next document.
    let next = k.copy(length);
    for lane in 0..LANES {
        let other = k.shuffle(ShuffleMode::Index, beginning, lane);
        let is_after = k.compare(Compare::Gt, other, beginning);
        let nearer = k.min(next, other);
        k.set_where(next, is_after, nearer);
    }
    let tiles = k.eval(tiles_of(next - beginning));
    // The tiles of the documents before this.
    let before = k.copy(0u32);
    for lane in 0..LANES {
        let [other, others] = [beginning, tiles].map(|value| k.shuffle(ShuffleMode::Index, value, lane));
        let is_before = k.compare(Compare::Lt, other, beginning);
        let more = k.add(before, others);
        k.set_where(before, is_before, more);
    }
    let after = k.add(before, tiles);
    let is_here = k.eval(precompute.tile.ge(before) & precompute.tile.lt(after));
    let first = k.eval((precompute.tile - before).mul_add(tile_m, beginning));
    let end = k.eval((first + tile_m).min(next));
    [first, end].map(|row| {
        let row = k.select(is_here, row, length);
        k.reduce_warp(ReduceOp::Min, row)
    })
}
