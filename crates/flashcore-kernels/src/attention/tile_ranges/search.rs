//! The small kernel that asks an expression about tiles.

use flashcore_ir::types::{Pred, S32, U32};
use flashcore_ir::{Builder, Compare, Kernel, ReduceOp, Reg, SpecialRegister, VoteMode};

use super::{QUAD, RangeTiles, address, cuts, part_address};
use crate::attention::{Place, Rows, Work};
use crate::parameters::Parameters;
use crate::specialization::Specialization;
use crate::tile::{BoundExpression, ExpressionCode, LANES, TileSpan};

/// Warps of a CTA.
pub(super) const WARPS: u32 = 16;
/// Tiles of keys that are told apart for all parts of the rows of a CTA; those behind are attended in part by all rows.
const MOST_TILES: u32 = 4096;
pub(super) const WORD_BYTES: u32 = 4;
/// What is known of a tile: that something of it is attended, and that all of it is.
const SOME: u32 = 1;
const WHOLE: u32 = 2;
/// Tiles of keys that a warp looks at together, so that they wait for memory together.
const TILES_AT_ONCE: u32 = 4;

/// Writes the kernel.
pub(crate) fn kernel(name: String, specialization: Specialization, tiles: RangeTiles) -> Option<Kernel> {
    let mut builder = Builder::new(name, WARPS * LANES);
    let k = &mut builder;
    if tiles.is_awaited {
        k.section("kernel behind", Builder::launch_dependents);
    }
    let parameters = Parameters::load(k, specialization);
    let expression = parameters.mask_mod?;
    // How rows are limited besides is not looked at.
    let plain = specialization.without_limits();
    let work = Work::at(k, &parameters, plain, tiles.tile_m, Place::Grid, Rows::OfHead);
    let [known, exchange] = [MOST_TILES, 2 * WARPS].map(|words| k.reserve_shared(words * WORD_BYTES, 16));
    let base = k.shared_base();
    let [known, exchange] = [known, exchange].map(|offset| k.add(base, offset));
    let thread = k.special(SpecialRegister::ThreadX);
    let (warp, lane) = (k.shr(thread, LANES.ilog2()), k.and(thread, LANES - 1));
    let tile = k.special(SpecialRegister::CtaX);
    let mut search = Search { work, expression, tiles, tile, known, exchange, warp, lane };
    let [first_row, end_row] = if tiles.rows_anywhere {
        k.section("rows", |k| cuts::rows_of_tile(k, &search))
    } else {
        let behind = k.add(work.first_row, tiles.tile_m);
        [work.first_row, k.min(behind, parameters.query_length)]
    };
    search.work = Work { first_row, row_count: end_row, ..work };
    search.run(k);
    Some(builder.finish())
}

/// What the warps of a CTA, which has a tile of query rows, look for together.
pub(super) struct Search {
    pub(super) work: Work,
    pub(super) expression: BoundExpression,
    pub(super) tiles: RangeTiles,
    /// The number of the tile.
    pub(super) tile: Reg<U32>,
    /// The address of what is known of tiles.
    pub(super) known: Reg<U32>,
    /// The address through which warps exchange numbers.
    exchange: Reg<U32>,
    pub(super) warp: Reg<U32>,
    pub(super) lane: Reg<U32>,
}

/// Tiles of keys from one key to another.
#[derive(Clone, Copy)]
struct Counted {
    origin: Reg<S32>,
    end: Reg<S32>,
    tiles: Reg<U32>,
    /// How many of them are told apart.
    told_apart: Reg<U32>,
}

impl Search {
    fn run(&self, k: &mut Builder) {
        let zero = k.copy(0i32);
        let length = k.reinterpret::<U32, S32>(self.work.parameters.key_length);
        let mut counted = self.count(k, zero, length);
        if self.tiles.keys_anywhere {
            counted = self.between_attended(k, counted);
        }
        k.section("tiles", |k| self.find(k, counted));
        // A warp for each part of the rows.
        let gathers = k.compare(Compare::Lt, self.warp, self.tiles.parts());
        k.if_uniform(gathers, |k| k.section("gather", |k| self.gather(k, counted)));
    }

    /// The tiles of keys from one key to another.
    fn count(&self, k: &mut Builder, origin: Reg<S32>, end: Reg<S32>) -> Counted {
        let first = k.min(origin, end);
        let keys = k.sub(end, first);
        let keys = k.reinterpret::<S32, U32>(keys);
        let behind = k.add(keys, self.tiles.tile_n - 1);
        let tiles = k.div(behind, self.tiles.tile_n);
        Counted { origin, end, tiles, told_apart: k.min(tiles, MOST_TILES / self.tiles.parts()) }
    }

    /// Rows of a part, or of the CTA: from the first to behind the last, of those there are.
    fn rows(&self, k: &mut Builder, first: Reg<U32>, count: u32) -> [Reg<U32>; 2] {
        let behind = k.add(first, count);
        [first, behind].map(|row| k.min(row, self.work.row_count))
    }

    /// Finds out what is attended of each tile of keys by each part of the rows, and meets the other warps.
    fn find(&self, k: &mut Builder, counted: Counted) {
        let (parts, tile_m, tile_n) = (self.tiles.parts(), self.tiles.range_rows, self.tiles.tile_n);
        let count = k.mul(counted.told_apart, parts);
        k.for_uniform(self.warp, count, WARPS, |k, number| {
            let tile = k.div(number, parts);
            let skipped = k.mul(tile, parts);
            let part = k.sub(number, skipped);
            let tile = k.reinterpret::<U32, S32>(tile);
            let first_key = k.mad(tile, tile_n as i32, counted.origin);
            let first_row = k.mad(part, tile_m, self.work.first_row);
            let rows = self.rows(k, first_row, tile_m);
            let flags = k.copy(0u32);
            let exists = k.compare(Compare::Lt, rows[0], rows[1]);
            k.if_uniform(exists, |k| {
                let asked = AskedTile { rows, tile_m, first_key, end_key: counted.end, tile_n };
                let (some, whole) = tile_of_keys(k, &self.work, self.expression, asked, self.lane);
                let some = k.select(some, SOME, 0u32);
                let whole = k.select(whole, WHOLE, 0u32);
                let both = k.add(some, whole);
                k.set(flags, both);
            });
            let first = k.compare(Compare::Eq, self.lane, 0u32);
            let place = k.mad(number, WORD_BYTES, self.known);
            k.when(first, |k| k.store_shared(place, &[flags]));
        });
        k.cta_sync();
    }

    /// From the first key that some row of the CTA attends to behind the last, of the tiles that some row may attend.
    fn between_attended(&self, k: &mut Builder, counted: Counted) -> Counted {
        let tile_n = self.tiles.tile_n as i32;
        let (first, last) = k.section("may attend", |k| self.may_attend(k, counted));
        // Where nothing is attended, behind all keys.
        let begin = k.mul(first, tile_n);
        let begin = k.min(begin, counted.end);
        let last_begin = k.mul(last, tile_n);
        let last_begin = k.max(last_begin, 0i32);
        let (origin, end) = k.section("attended keys", |k| self.attended_keys(k, counted, [begin, last_begin]));
        self.count(k, origin, end)
    }

    /// The first and the last tile that some row may attend, without asking about single ones.
    fn may_attend(&self, k: &mut Builder, counted: Counted) -> (Reg<S32>, Reg<S32>) {
        let (work, tile_m, tile_n) = (&self.work, self.tiles.tile_m, self.tiles.tile_n);
        let tiles = k.reinterpret::<U32, S32>(counted.tiles);
        let last_of_all = k.sub(tiles, 1i32);
        let rows = self.rows(k, work.first_row, tile_m);
        let code = work.expression(k, self.expression, work.first_row, 0);
        let (first, last) = (k.copy(tiles), k.copy(-1i32));
        k.for_uniform(self.warp, counted.tiles, WARPS * TILES_AT_ONCE, |k, tile| {
            for next in 0..TILES_AT_ONCE {
                let tile = k.add(tile, next * WARPS);
                let tile = k.reinterpret::<U32, S32>(tile);
                // A warp that has fewer tiles than others looks at the last one again.
                let tile = k.min(tile, last_of_all);
                let first_key = k.mul(tile, tile_n as i32);
                let asked = AskedTile { rows, tile_m, first_key, end_key: counted.end, tile_n };
                let span = asked.span(k);
                let attended = code.of_whole_tile(k, span, self.lane).map(|[may_hold, _]| may_hold);
                let (lower, higher) = (k.min(first, tile), k.max(last, tile));
                if let Some(attended) = attended {
                    k.set_where(first, attended, lower);
                    k.set_where(last, attended, higher);
                } else {
                    k.set(first, lower);
                    k.set(last, higher);
                }
            }
        });
        self.of_all_warps(k, first, last)
    }

    /// The lowest and the highest that all warps have together, each of which has one of either.
    fn of_all_warps(&self, k: &mut Builder, lowest: Reg<S32>, highest: Reg<S32>) -> (Reg<S32>, Reg<S32>) {
        k.section("all warps", |k| {
            let is_first = k.compare(Compare::Eq, self.lane, 0u32);
            let place = k.mad(self.warp, 2 * WORD_BYTES, self.exchange);
            k.when(is_first, |k| k.store_shared(place, &[lowest, highest]));
            k.cta_sync();
            let of_warp = k.min(self.lane, WARPS - 1);
            let place = k.mad(of_warp, 2 * WORD_BYTES, self.exchange);
            let numbers = k.load_shared::<S32>(place, 2);
            k.cta_sync();
            (k.reduce_warp(ReduceOp::Min, numbers[0]), k.reduce_warp(ReduceOp::Max, numbers[1]))
        })
    }

    /// The first key that some row attends, of the tile that begins at one key, and behind the last of the tile that begins
    /// at another; where there is none, the whole tile.
    fn attended_keys(&self, k: &mut Builder, counted: Counted, begins: [Reg<S32>; 2]) -> (Reg<S32>, Reg<S32>) {
        let (work, rows, tile_n) = (&self.work, self.tiles.tile_m, self.tiles.tile_n);
        let [first_row, end_row, warp, lane] =
            [work.first_row, work.row_count, self.warp, self.lane].map(|number| k.reinterpret::<U32, S32>(number));
        let (last_key, last_row) = (k.sub(counted.end, 1i32), k.sub(end_row, 1i32));
        let [begin, last_begin] = begins;
        let (found, last_found) = (k.copy(counted.end), k.copy(-1i32));
        let some_rows = k.compare(Compare::Lt, first_row, end_row);
        let some_keys = k.compare(Compare::Lt, begin, counted.end);
        let exists = k.and(some_rows, some_keys);
        k.if_uniform(exists, |k| {
            let mut code = work.expression(k, self.expression, work.first_row, 0);
            let mut keys = keys_of_lane(k, lane, begin, last_key, tile_n);
            let firsts = keys.len();
            keys.extend(keys_of_lane(k, lane, last_begin, last_key, tile_n));
            code.read_keys(k, &keys);
            for row in (0..rows).step_by(WARPS as usize) {
                let row = k.add(warp, row as i32);
                let row = k.add(row, first_row);
                let row = k.min(row, last_row);
                let of_row = code.for_row(k, row);
                let mut of_tile = of_row.of_tile(begin);
                for (column, key) in keys.iter().enumerate() {
                    let attended = of_tile.attended(k, 0, column as u32);
                    if column < firsts {
                        let lower = k.min(found, *key);
                        k.set_where(found, attended, lower);
                    } else {
                        let higher = k.max(last_found, *key);
                        k.set_where(last_found, attended, higher);
                    }
                }
            }
        });
        let found = k.reduce_warp(ReduceOp::Min, found);
        let last_found = k.reduce_warp(ReduceOp::Max, last_found);
        let (found, last_found) = self.of_all_warps(k, found, last_found);
        let is_there = k.compare(Compare::Lt, found, counted.end);
        let first = k.select(is_there, found, begin);
        let is_there = k.compare(Compare::Ge, last_found, 0i32);
        let behind_tile = k.add(last_begin, tile_n as i32);
        let behind_tile = k.min(behind_tile, counted.end);
        let behind = k.add(last_found, 1i32);
        (first, k.select(is_there, behind, behind_tile))
    }

    /// Does something with every tile of which something is known for a part of the rows; every lane has each 32nd.
    fn each(&self, k: &mut Builder, counted: Counted, part: Reg<U32>, visit: Visit<'_>) {
        let behind = k.add(counted.told_apart, LANES - 1);
        let rounds = k.shr(behind, LANES.ilog2());
        k.for_uniform(0u32, rounds, 1u32, |k, round| {
            let tile = k.mad(round, LANES, self.lane);
            let is_there = k.compare(Compare::Lt, tile, counted.told_apart);
            k.if_then(is_there, |k| {
                let number = k.mad(tile, self.tiles.parts(), part);
                let place = k.mad(number, WORD_BYTES, self.known);
                let flags = k.load_shared::<U32>(place, 1)[0];
                let tile = k.reinterpret::<U32, S32>(tile);
                visit(k, tile, flags);
            });
        });
    }

    /// Stores what one warp finds in what is known of the tiles for its part of the rows.
    fn gather(&self, k: &mut Builder, counted: Counted) {
        let part = self.warp;
        let [tiles, told_apart] = [counted.tiles, counted.told_apart].map(|count| k.reinterpret::<U32, S32>(count));
        let (first, last, whole_end) = (k.copy(tiles), k.copy(-1i32), k.copy(0i32));
        self.each(k, counted, part, &|k, tile, flags| {
            let some = k.and(flags, SOME);
            let is_some = k.compare(Compare::Ne, some, 0u32);
            let lower = k.min(first, tile);
            k.set_where(first, is_some, lower);
            k.set_where(last, is_some, tile);
            let whole = k.and(flags, WHOLE);
            let is_whole = k.compare(Compare::Ne, whole, 0u32);
            let behind = k.add(tile, 1i32);
            k.set_where(whole_end, is_whole, behind);
        });
        let first = k.reduce_warp(ReduceOp::Min, first);
        let last = k.reduce_warp(ReduceOp::Max, last);
        let whole_end = k.reduce_warp(ReduceOp::Max, whole_end);
        let whole_first = k.copy(0i32);
        self.each(k, counted, part, &|k, tile, flags| {
            let whole = k.and(flags, WHOLE);
            let is_cut = k.compare(Compare::Eq, whole, 0u32);
            let is_before = k.compare(Compare::Lt, tile, whole_end);
            let is_cut_before = k.and(is_cut, is_before);
            let behind = k.add(tile, 1i32);
            k.set_where(whole_first, is_cut_before, behind);
        });
        let whole_first = k.reduce_warp(ReduceOp::Max, whole_first);
        // Tiles behind those that are told apart are there.
        let has_more = k.compare(Compare::Gt, tiles, told_apart);
        let last_of_all = k.sub(tiles, 1i32);
        let last = k.select(has_more, last_of_all, last);
        let lower = k.min(first, told_apart);
        let first = k.select(has_more, lower, first);
        let is_first = k.compare(Compare::Eq, self.lane, 0u32);
        let tile = address(k, &self.work, self.tiles, self.tile);
        let of_part = part_address(k, tile, part);
        k.when(is_first, |k| k.store(of_part, &[first, last, whole_first, whole_end]));
        let is_first_part = k.compare(Compare::Eq, part, 0u32);
        let stores = k.and(is_first, is_first_part);
        let [first_row, end_row] = [self.work.first_row, self.work.row_count].map(|row| k.reinterpret::<U32, S32>(row));
        let extent: [_; QUAD as usize] = [first_row, end_row, counted.origin, counted.end];
        k.when(stores, |k| k.store(tile, &extent));
    }
}

/// What is done with a tile, of which something is known.
type Visit<'a> = &'a dyn Fn(&mut Builder, Reg<S32>, Reg<U32>);

/// A tile of query rows and keys.
#[derive(Debug, Clone, Copy)]
struct AskedTile {
    /// From the first row to behind the last.
    rows: [Reg<U32>; 2],
    tile_m: u32,
    first_key: Reg<S32>,
    /// Behind the last key there is, in this tile or behind it.
    end_key: Reg<S32>,
    tile_n: u32,
}

impl AskedTile {
    /// Its rows and keys, of those there are.
    fn span(self, k: &mut Builder) -> TileSpan {
        let Self { rows: [first_row, end_row], tile_m, first_key, end_key, tile_n } = self;
        let [first_row, end_row] = [first_row, end_row].map(|number| k.reinterpret::<U32, S32>(number));
        let (last_row, last_that_exists) = (k.sub(end_row, 1i32), k.sub(end_key, 1i32));
        let last_key = k.add(first_key, tile_n as i32 - 1);
        let last_key = k.min(last_key, last_that_exists);
        TileSpan { rows: [first_row, last_row], most_rows: tile_m, keys: [first_key, last_key], most_keys: tile_n }
    }
}

/// Rows that are asked about before it is looked whether more need be: far apart, because neighbours are often alike.
const ROWS_AT_ONCE: u32 = 8;

/// Whether some row attends some key of a tile, and whether all rows attend all keys there are.
fn tile_of_keys(
    k: &mut Builder,
    work: &Work,
    expression: BoundExpression,
    tile: AskedTile,
    lane: Reg<U32>,
) -> (Reg<Pred>, Reg<Pred>) {
    let code = work.expression(k, expression, work.first_row, 0);
    let span = tile.span(k);
    let one = k.copy(1u32);
    let some = k.compare(Compare::Eq, one, 0u32);
    let whole = k.not(some);
    let Some([may_hold, may_fail]) = code.of_whole_tile(k, span, lane) else {
        ask_each(k, code, span, lane, (some, whole));
        return (some, whole);
    };
    let unknown = k.and(may_hold, may_fail);
    k.if_else_uniform(
        unknown,
        |k| ask_each(k, code, span, lane, (some, whole)),
        |k| {
            k.set(some, may_hold);
            k.set(whole, may_hold);
        },
    );
    (some, whole)
}

/// The same by asking about every row and key, until both is known. `some` does not hold yet, and `whole` does.
fn ask_each(
    k: &mut Builder,
    mut code: ExpressionCode,
    tile: TileSpan,
    lane: Reg<U32>,
    (some, whole): (Reg<Pred>, Reg<Pred>),
) {
    let lane = k.reinterpret::<U32, S32>(lane);
    let ([first_row, last_row], [first_key, last_key]) = (tile.rows, tile.keys);
    let keys = keys_of_lane(k, lane, first_key, last_key, tile.most_keys);
    code.read_keys(k, &keys);
    let step = tile.most_rows.div_ceil(ROWS_AT_ONCE) as i32;
    let row = k.copy(first_row);
    let behind = k.add(first_row, step);
    let is_known = k.copy(0u32);
    k.while_uniform(
        |k| {
            let left = k.compare(Compare::Lt, row, behind);
            let unknown = k.compare(Compare::Eq, is_known, 0u32);
            k.and(left, unknown)
        },
        |k| {
            for index in 0..ROWS_AT_ONCE {
                let row = k.add(row, index as i32 * step);
                let row = k.min(row, last_row);
                let of_row = code.for_row(k, row);
                let mut of_tile = of_row.of_tile(first_key);
                for column in 0..keys.len() {
                    let attended = of_tile.attended(k, 0, column as u32);
                    let some_yet = k.or(some, attended);
                    k.set(some, some_yet);
                    let whole_yet = k.and(whole, attended);
                    k.set(whole, whole_yet);
                }
            }
            let any = k.vote(VoteMode::Any, some);
            let all = k.vote(VoteMode::All, whole);
            let missing = k.not(all);
            let both = k.and(any, missing);
            let both = k.select(both, 1u32, 0u32);
            k.set(is_known, both);
            k.add_to(row, 1i32);
        },
    );
    let any = k.vote(VoteMode::Any, some);
    let all = k.vote(VoteMode::All, whole);
    k.set(some, any);
    k.set(whole, all);
}

/// The keys that a lane asks about, of `count` from `first` on. A lane that has fewer than others asks about the last one
/// again.
fn keys_of_lane(k: &mut Builder, lane: Reg<S32>, first: Reg<S32>, last: Reg<S32>, count: u32) -> Vec<Reg<S32>> {
    let key_of = |index: u32| {
        let key = k.add(first, (index * LANES) as i32);
        let key = k.add(key, lane);
        k.min(key, last)
    };
    (0..count.div_ceil(LANES)).map(key_of).collect()
}
