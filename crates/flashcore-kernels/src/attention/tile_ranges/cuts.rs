//! Where rows attend other keys than those before them.
//!
//! Of two documents in one sequence, a tile of rows that has the end of the one and the beginning of the other goes through
//! the keys of both. So tiles begin anew where a document does: at rows that do not attend what the row before them has in
//! its own place, nor the other way round. That is a guess, for which two scores of each row are looked at; what the rows of
//! a tile attend is asked afterwards, whatever rows they are. It is left alone where rows are cut so often that tiles which
//! are cut short would cost more than they save.

use flashcore_ir::types::{Pred, S32, U32};
use flashcore_ir::{Builder, Compare, ReduceOp, Reg, SharedAddress, ShuffleMode};

use super::search::{Search, WARPS, WORD_BYTES};
use crate::tile::LANES;

/// Rows that a thread looks at together.
const ROWS_AT_ONCE: u32 = 16;
const THREADS: u32 = WARPS * LANES;
/// Where, in the memory for tiles of keys, of which nothing is known yet: the beginnings, how many there are, and what one
/// warp makes of them for all.
const COUNT: i32 = (LANES * WORD_BYTES) as i32;
const ROWS: i32 = COUNT + 8;

/// The most cuts of rows that would be so many tiles without: one for every other tile, and no more than the lanes of a
/// warp can hold with the beginning of all rows.
pub(super) const fn most(tiles: u32) -> u32 {
    let half = tiles / 2;
    if half < LANES - 1 { half } else { LANES - 1 }
}

/// The first row of the CTA's tile, and behind its last; of a tile that does not exist, twice the number of rows.
pub(super) fn rows_of_tile(k: &mut Builder, search: &Search) -> [Reg<U32>; 2] {
    let length = search.work.parameters.query_length;
    let list = SharedAddress::from(search.known);
    let own_place = k.mad(search.lane, WORD_BYTES, search.known);
    let is_first = k.compare(Compare::Eq, search.lane, 0u32);
    let is_first_warp = k.compare(Compare::Eq, search.warp, 0u32);
    k.if_uniform(is_first_warp, |k| {
        let beginning = k.select(is_first, 0u32, length);
        k.store_shared(own_place, &[beginning]);
        let one = k.copy(1u32);
        k.when(is_first, |k| k.store_shared(list.plus(COUNT), &[one]));
    });
    k.cta_sync();
    k.section("cuts", |k| find(k, search));
    k.cta_sync();
    k.if_uniform(is_first_warp, |k| {
        k.section("tile of rows", |k| {
            let beginning = k.load_shared::<U32>(own_place, 1)[0];
            let count = k.load_shared::<U32>(list.plus(COUNT), 1)[0];
            let rows = rows_between(k, search, beginning, count);
            k.when(is_first, |k| k.store_shared(list.plus(ROWS), &rows));
        });
    });
    k.cta_sync();
    let rows = k.load_shared::<U32>(list.plus(ROWS), 2);
    // The memory is for tiles of keys from here on.
    k.cta_sync();
    [rows[0], rows[1]]
}

/// Adds all cuts to the list, as far as it reaches, and counts them.
fn find(k: &mut Builder, search: &Search) {
    let length = search.work.parameters.query_length;
    let first = k.mad(search.warp, LANES, search.lane);
    k.for_uniform(0u32, length, THREADS * ROWS_AT_ONCE, |k, start| {
        let first = k.add(start, first);
        let rows: Vec<_> = (0..ROWS_AT_ONCE).map(|index| k.add(first, index * THREADS)).collect();
        let cuts: Vec<_> = rows.iter().map(|row| is_cut(k, search, *row)).collect();
        for (row, cut) in rows.into_iter().zip(cuts) {
            k.if_then(cut, |k| {
                let one = k.copy(1u32);
                let place =
                    k.atomic::<U32, SharedAddress>(ReduceOp::Add, SharedAddress::from(search.known).plus(COUNT), one);
                let fits = k.compare(Compare::Lt, place, LANES);
                let place = k.mad(place, WORD_BYTES, search.known);
                k.when(fits, |k| k.store_shared(place, &[row]));
            });
        }
    });
}

/// Whether there is a row, and it and the one before it do not attend each other's place.
fn is_cut(k: &mut Builder, search: &Search, row: Reg<U32>) -> Reg<Pred> {
    let work = &search.work;
    let last = k.sub(work.parameters.query_length, 1u32);
    let there = k.compare(Compare::Le, row, last);
    let behind_first = k.compare(Compare::Gt, row, 0u32);
    let exists = k.and(there, behind_first);
    // Where there is none, some other two.
    let row = k.min(row, last);
    let row = k.max(row, 1u32);
    let before = k.sub(row, 1u32);
    let last_key = k.sub(work.parameters.key_length, 1u32);
    let [before, row, last_key] = [before, row, last_key].map(|number| k.reinterpret::<U32, S32>(number));
    let keys = [before, row].map(|key| k.min(key, last_key));
    let mut code = work.expression(k, search.expression, work.first_row, 0);
    code.read_keys(k, &keys);
    let mut attended = |row, column| {
        let of_row = code.for_row(k, row);
        of_row.of_tile(keys[0]).attended(k, 0, column)
    };
    let (back, forth) = (attended(row, 0), attended(before, 1));
    let either = k.or(back, forth);
    let neither = k.not(either);
    k.and(neither, exists)
}

/// The rows of the CTA's tile, where tiles begin anew at the rows that lanes have, in any order; those without one have the
/// number of rows. All that counts if there are too many is that they begin with the first.
fn rows_between(k: &mut Builder, search: &Search, beginning: Reg<U32>, count: Reg<U32>) -> [Reg<U32>; 2] {
    let (length, tile_m) = (search.work.parameters.query_length, search.tiles.tile_m);
    let tiles_of = |k: &mut Builder, rows: Reg<U32>| {
        let behind = k.add(rows, tile_m - 1);
        k.div(behind, tile_m)
    };
    let all = tiles_of(k, length);
    let most_cuts = k.shr(all, 1u32);
    let most_cuts = k.min(most_cuts, LANES - 1);
    // That of all rows is among them.
    let most = k.add(most_cuts, 1u32);
    let too_many = k.compare(Compare::Gt, count, most);
    let is_cut = k.compare(Compare::Gt, beginning, 0u32);
    let dropped = k.and(is_cut, too_many);
    let beginning = k.select(dropped, length, beginning);
    // Where the next one begins.
    let next = k.copy(length);
    for lane in 0..LANES {
        let other = k.shuffle(ShuffleMode::Index, beginning, lane);
        let is_behind = k.compare(Compare::Gt, other, beginning);
        let nearer = k.min(next, other);
        k.set_where(next, is_behind, nearer);
    }
    let rows = k.sub(next, beginning);
    let tiles = tiles_of(k, rows);
    // Tiles of rows before these.
    let before = k.copy(0u32);
    for lane in 0..LANES {
        let [other, others] = [beginning, tiles].map(|number| k.shuffle(ShuffleMode::Index, number, lane));
        let is_before = k.compare(Compare::Lt, other, beginning);
        let more = k.add(before, others);
        k.set_where(before, is_before, more);
    }
    let behind = k.add(before, tiles);
    let not_before = k.compare(Compare::Ge, search.tile, before);
    let not_behind = k.compare(Compare::Lt, search.tile, behind);
    let is_here = k.and(not_before, not_behind);
    let of_these = k.sub(search.tile, before);
    let first = k.mad(of_these, tile_m, beginning);
    let end = k.add(first, tile_m);
    let end = k.min(end, next);
    [first, end].map(|row| {
        let row = k.select(is_here, row, length);
        k.reduce_warp(ReduceOp::Min, row)
    })
}
