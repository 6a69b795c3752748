//! Which tiles of keys a formula leaves to each tile of query rows, found out before attention begins.
//!
//! A formula that takes keys out says for each query row and key whether they meet, and nothing about tiles. So a small
//! kernel asks it about all of them, and keeps numbers for each tile of query rows: the first and the last tile of keys of
//! which anything is attended, and the range of those that all rows attend whole. The kernel behind it leaves out what is
//! outside of the first, and asks the formula only about what is outside of the second.
//!
//! Where tiles of keys may begin at any key, they begin at the first that some row of the CTA attends: that takes fewer of
//! them, and fewer that are attended in part.

use flashcore_ir::types::{Pred, S32, U32};
use flashcore_ir::{Builder, Compare, GlobalAddress, Kernel, ReduceOp, Reg, SpecialRegister, VoteMode};
use flashcore_problem::Problem;
use flashcore_problem::formula::Formula;

use super::{Place, Rows, Work};
use crate::config::Config;
use crate::parameters::Parameters;
use crate::specialisation::Specialisation;
use crate::tile::{FormulaCode, LANES, TileSpan};

/// Warps of a CTA.
const WARPS: u32 = 16;
/// Tiles of keys that are told apart for all parts of the rows of a CTA; those behind are attended in part by all rows.
const MOST_TILES: u32 = 4096;
/// Bytes of the numbers of one tile of query rows: where tiles are counted from comes behind the others.
const BYTES: u64 = 32;
const ORIGIN_BYTES: i32 = 16;
const WORD_BYTES: u32 = 4;
/// What is known of a tile: that something of it is attended, and that all of it is.
const SOME: u32 = 1;
const WHOLE: u32 = 2;
/// Tiles of keys that a warp looks at together, so that they wait for memory together.
const TILES_AT_ONCE: u32 = 4;

/// The tiles of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RangeTiles {
    /// Query rows of a CTA.
    pub(crate) query_rows: u32,
    /// Query rows with tiles of keys of their own; they divide those of a CTA.
    pub(crate) range_rows: u32,
    /// Keys of a tile.
    pub(crate) key_rows: u32,
    /// Whether tiles of keys may begin at any key, and not at multiples of their keys alone.
    pub(crate) begin_anywhere: bool,
}

/// How many tiles of query rows there are: in one head, of how many heads, of how many batches. What a formula does not
/// look at counts once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RangeShape {
    /// Those of CTAs.
    ctas: u32,
    /// Those that have numbers.
    tiles: u32,
    heads: u32,
    batches: u32,
}

impl RangeShape {
    /// That of a problem with a formula, for a kernel that makes use of it.
    pub(crate) fn of(problem: &Problem, config: Config) -> Option<Self> {
        let mask_mod = problem.mask_mod?;
        let tiles = config.range_tiles(config.specialisation(problem))?;
        let formula: &Formula = mask_mod.formula();
        let uses = formula.uses(formula.result());
        let counted = |is_used: bool, size: usize| if is_used { size as u32 } else { 1 };
        let [ctas, tiles] =
            [tiles.query_rows, tiles.range_rows].map(|rows| problem.query_length.div_ceil(rows.max(1) as usize) as u32);
        Some(Self {
            ctas,
            tiles,
            heads: counted(uses.head, problem.query_heads),
            batches: counted(uses.batch, problem.batch),
        })
    }

    pub(crate) const fn bytes(self) -> u64 {
        BYTES * self.tiles as u64 * self.heads as u64 * self.batches as u64
    }

    pub(crate) const fn grid(self) -> [u32; 3] {
        [self.ctas, self.heads, self.batches]
    }

    /// Bytes from one batch to the next, and from one head to the next.
    pub(crate) const fn strides(self) -> [u64; 2] {
        let head = BYTES * self.tiles as u64;
        [if self.batches > 1 { head * self.heads as u64 } else { 0 }, if self.heads > 1 { head } else { 0 }]
    }
}

/// Tiles of keys by number, as the formula alone leaves them.
#[derive(Debug, Clone, Copy)]
pub(super) struct TileRanges {
    /// The key with which tile 0 begins; the same for all rows of a CTA.
    pub(super) origin: Reg<S32>,
    /// The first of which anything is attended.
    pub(super) first: Reg<S32>,
    /// The last of which anything is attended; before the first, where there is none.
    pub(super) last: Reg<S32>,
    /// From here on up to `whole_end` they are attended whole.
    pub(super) whole_first: Reg<S32>,
    pub(super) whole_end: Reg<S32>,
}

impl TileRanges {
    /// Those of `query_rows` rows from `first_row` on, where there is a formula.
    pub(super) fn load(k: &mut Builder, work: &Work, first_row: Reg<U32>, query_rows: u32) -> Option<Self> {
        work.specialisation.mask_mod?;
        k.section("tile ranges", |k| {
            let address = address(k, work, first_row, query_rows);
            let origin = k.load_one::<S32>(address.plus(ORIGIN_BYTES));
            match k.load::<S32>(address, 4)[..] {
                [first, last, whole_first, whole_end] => Some(Self { origin, first, last, whole_first, whole_end }),
                _ => None,
            }
        })
    }
}

fn address(k: &mut Builder, work: &Work, first_row: Reg<U32>, query_rows: u32) -> GlobalAddress {
    let Parameters { tile_ranges, ranges_batch_stride, ranges_head_stride, .. } = work.parameters;
    let tile = k.div(first_row, query_rows);
    let of_matrix = work.matrix(k, tile_ranges, ranges_batch_stride, ranges_head_stride, work.head);
    k.mad_wide(tile, BYTES as u32, of_matrix).into()
}

/// Writes the kernel that finds them.
pub(crate) fn kernel(name: String, specialisation: Specialisation, tiles: RangeTiles) -> Option<Kernel> {
    let formula = specialisation.mask_mod?.formula();
    let mut builder = Builder::new(name, WARPS * LANES);
    let k = &mut builder;
    let parameters = Parameters::load(k);
    // How rows are limited besides is not looked at.
    let plain = Specialisation { left: false, right: false, key_lengths: false, ..specialisation };
    let work = Work::at(k, parameters, plain, tiles.query_rows, Place::Grid, Rows::OfHead);
    let [known, exchange] = [MOST_TILES, WARPS].map(|words| k.reserve_shared(words * WORD_BYTES, 16));
    let base = k.shared_base();
    let [known, exchange] = [known, exchange].map(|offset| k.add(base, offset));
    let thread = k.special(SpecialRegister::ThreadX);
    let (warp, lane) = (k.shr(thread, LANES.ilog2()), k.and(thread, LANES - 1));
    let search = Search { work, formula, tiles, known, exchange, warp, lane };
    search.run(k);
    Some(builder.finish())
}

/// What the warps of a CTA, which has a tile of query rows, look for together.
struct Search {
    work: Work,
    formula: &'static Formula,
    tiles: RangeTiles,
    /// The address of what is known of tiles.
    known: Reg<U32>,
    /// The address through which warps exchange numbers.
    exchange: Reg<U32>,
    warp: Reg<U32>,
    lane: Reg<U32>,
}

/// Tiles of keys from a key on.
#[derive(Clone, Copy)]
struct Counted {
    origin: Reg<S32>,
    tiles: Reg<U32>,
    /// How many of them are told apart.
    told_apart: Reg<U32>,
}

impl Search {
    fn run(&self, k: &mut Builder) {
        let zero = k.copy(0i32);
        let mut counted = self.count(k, zero, self.work.parameters.key_length);
        if self.tiles.begin_anywhere {
            counted = self.beginning_anywhere(k, counted);
        }
        k.section("tiles", |k| self.find(k, counted));
        // A warp for each part of the rows.
        let gathers = k.compare(Compare::Lt, self.warp, self.parts());
        k.if_uniform(gathers, |k| k.section("gather", |k| self.gather(k, counted)));
    }

    /// Parts of the rows of a CTA that have tiles of keys of their own.
    const fn parts(&self) -> u32 {
        self.tiles.query_rows / self.tiles.range_rows
    }

    /// The tiles of keys from one key to another.
    fn count(&self, k: &mut Builder, origin: Reg<S32>, end: Reg<U32>) -> Counted {
        let first = k.reinterpret::<S32, U32>(origin);
        let first = k.min(first, end);
        let keys = k.sub(end, first);
        let behind = k.add(keys, self.tiles.key_rows - 1);
        let tiles = k.div(behind, self.tiles.key_rows);
        Counted { origin, tiles, told_apart: k.min(tiles, MOST_TILES / self.parts()) }
    }

    /// Rows of a part, or of the CTA: from the first to behind the last, of those there are.
    fn rows(&self, k: &mut Builder, first: Reg<U32>, count: u32) -> [Reg<U32>; 2] {
        let behind = k.add(first, count);
        [first, behind].map(|row| k.min(row, self.work.parameters.query_length))
    }

    /// Finds out what is attended of each tile of keys by each part of the rows, and meets the other warps.
    fn find(&self, k: &mut Builder, counted: Counted) {
        let (parts, query_rows, key_rows) = (self.parts(), self.tiles.range_rows, self.tiles.key_rows);
        let count = k.mul(counted.told_apart, parts);
        k.for_uniform(self.warp, count, WARPS, |k, number| {
            let tile = k.div(number, parts);
            let skipped = k.mul(tile, parts);
            let part = k.sub(number, skipped);
            let tile = k.reinterpret::<U32, S32>(tile);
            let first_key = k.mad(tile, key_rows as i32, counted.origin);
            let first_row = k.mad(part, query_rows, self.work.first_row);
            let rows = self.rows(k, first_row, query_rows);
            let flags = k.copy(0u32);
            let exists = k.compare(Compare::Lt, rows[0], rows[1]);
            k.if_uniform(exists, |k| {
                let asked = AskedTile { rows, query_rows, first_key, key_rows };
                let (some, whole) = tile_of_keys(k, &self.work, self.formula, asked, self.lane);
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

    /// From the first key that some row of the CTA attends on, up to the last tile that some row may, of the tiles there are.
    fn beginning_anywhere(&self, k: &mut Builder, counted: Counted) -> Counted {
        let key_rows = self.tiles.key_rows as i32;
        let (first, last) = k.section("may attend", |k| self.may_attend(k, counted));
        let length = k.reinterpret::<U32, S32>(self.work.parameters.key_length);
        // Where nothing is attended, behind all keys.
        let begin = k.mul(first, key_rows);
        let begin = k.min(begin, length);
        let origin = k.section("first key", |k| self.first_key(k, begin));
        let behind = k.add(last, 1i32);
        let end = k.mul(behind, key_rows);
        let end = k.min(end, length);
        let end = k.reinterpret::<S32, U32>(end);
        self.count(k, origin, end)
    }

    /// The first and the last tile that some row may attend, without asking about single ones.
    fn may_attend(&self, k: &mut Builder, counted: Counted) -> (Reg<S32>, Reg<S32>) {
        let (work, query_rows, key_rows) = (&self.work, self.tiles.query_rows, self.tiles.key_rows);
        let tiles = k.reinterpret::<U32, S32>(counted.tiles);
        let last_of_all = k.sub(tiles, 1i32);
        let rows = self.rows(k, work.first_row, query_rows);
        let code = work.formula(k, self.formula, work.first_row, 0);
        let (first, last) = (k.copy(tiles), k.copy(-1i32));
        k.for_uniform(self.warp, counted.tiles, WARPS * TILES_AT_ONCE, |k, tile| {
            for next in 0..TILES_AT_ONCE {
                let tile = k.add(tile, next * WARPS);
                let tile = k.reinterpret::<U32, S32>(tile);
                // A warp that has fewer tiles than others looks at the last one again.
                let tile = k.min(tile, last_of_all);
                let first_key = k.mul(tile, key_rows as i32);
                let span = AskedTile { rows, query_rows, first_key, key_rows }.span(k, work);
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
        (self.of_all_warps(k, ReduceOp::Min, first), self.of_all_warps(k, ReduceOp::Max, last))
    }

    /// What all warps have together, each of which has one number.
    fn of_all_warps(&self, k: &mut Builder, op: ReduceOp, number: Reg<S32>) -> Reg<S32> {
        k.section("all warps", |k| {
            let is_first = k.compare(Compare::Eq, self.lane, 0u32);
            let place = k.mad(self.warp, WORD_BYTES, self.exchange);
            k.when(is_first, |k| k.store_shared(place, &[number]));
            k.cta_sync();
            let of_warp = k.min(self.lane, WARPS - 1);
            let place = k.mad(of_warp, WORD_BYTES, self.exchange);
            let number = k.load_shared::<S32>(place, 1)[0];
            k.cta_sync();
            k.reduce_warp(op, number)
        })
    }

    /// The first key from `begin` on, among as many as a tile has, that some row attends; `begin`, where there is none.
    fn first_key(&self, k: &mut Builder, begin: Reg<S32>) -> Reg<S32> {
        let (work, rows) = (&self.work, self.tiles.query_rows);
        let [first_row, length, query_length, warp, lane] =
            [work.first_row, work.parameters.key_length, work.parameters.query_length, self.warp, self.lane]
                .map(|number| k.reinterpret::<U32, S32>(number));
        let (last_key, last_row) = (k.sub(length, 1i32), k.sub(query_length, 1i32));
        let found = k.copy(length);
        let exists = k.compare(Compare::Lt, begin, length);
        k.if_uniform(exists, |k| {
            let mut code = work.formula(k, self.formula, work.first_row, 0);
            let keys = keys_of_lane(k, lane, begin, last_key, self.tiles.key_rows);
            code.read_keys(k, &keys);
            for row in (0..rows).step_by(WARPS as usize) {
                let row = k.add(warp, row as i32);
                let row = k.add(row, first_row);
                let row = k.min(row, last_row);
                let of_row = code.for_row(k, row);
                let mut of_tile = of_row.of_tile(begin);
                for (column, key) in keys.iter().enumerate() {
                    let attended = of_tile.attended(k, 0, column as u32);
                    let lower = k.min(found, *key);
                    k.set_where(found, attended, lower);
                }
            }
        });
        let found = k.reduce_warp(ReduceOp::Min, found);
        let found = self.of_all_warps(k, ReduceOp::Min, found);
        let is_there = k.compare(Compare::Lt, found, length);
        k.select(is_there, found, begin)
    }

    /// Does something with every tile of which something is known for a part of the rows; every lane has each 32nd.
    fn each(&self, k: &mut Builder, counted: Counted, part: Reg<U32>, visit: Visit<'_>) {
        let behind = k.add(counted.told_apart, LANES - 1);
        let rounds = k.shr(behind, LANES.ilog2());
        k.for_uniform(0u32, rounds, 1u32, |k, round| {
            let tile = k.mad(round, LANES, self.lane);
            let is_there = k.compare(Compare::Lt, tile, counted.told_apart);
            k.if_then(is_there, |k| {
                let number = k.mad(tile, self.parts(), part);
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
        let first_row = k.mad(part, self.tiles.range_rows, self.work.first_row);
        let exists = k.compare(Compare::Lt, first_row, self.work.parameters.query_length);
        let is_first = k.compare(Compare::Eq, self.lane, 0u32);
        let stores = k.and(exists, is_first);
        let address = address(k, &self.work, first_row, self.tiles.range_rows);
        k.when(stores, |k| {
            k.store(address, &[first, last, whole_first, whole_end]);
            k.store_one(address.plus(ORIGIN_BYTES), counted.origin);
        });
    }
}

/// What is done with a tile, of which something is known.
type Visit<'a> = &'a dyn Fn(&mut Builder, Reg<S32>, Reg<U32>);

/// A tile of query rows and keys.
#[derive(Debug, Clone, Copy)]
struct AskedTile {
    /// From the first row to behind the last.
    rows: [Reg<U32>; 2],
    query_rows: u32,
    first_key: Reg<S32>,
    key_rows: u32,
}

impl AskedTile {
    /// Its rows and keys, of those there are.
    fn span(self, k: &mut Builder, work: &Work) -> TileSpan {
        let Self { rows: [first_row, end_row], query_rows, first_key, key_rows } = self;
        let [first_row, end_row, length] =
            [first_row, end_row, work.parameters.key_length].map(|number| k.reinterpret::<U32, S32>(number));
        let (last_row, last_that_exists) = (k.sub(end_row, 1i32), k.sub(length, 1i32));
        let last_key = k.add(first_key, key_rows as i32 - 1);
        let last_key = k.min(last_key, last_that_exists);
        TileSpan {
            rows: [first_row, last_row],
            most_rows: query_rows,
            keys: [first_key, last_key],
            most_keys: key_rows,
        }
    }
}

/// Rows that are asked about before it is looked whether more need be: far apart, because neighbours are often alike.
const ROWS_AT_ONCE: u32 = 8;

/// Whether some row attends some key of a tile, and whether all rows attend all keys there are.
fn tile_of_keys(
    k: &mut Builder,
    work: &Work,
    formula: &'static Formula,
    tile: AskedTile,
    lane: Reg<U32>,
) -> (Reg<Pred>, Reg<Pred>) {
    let code = work.formula(k, formula, work.first_row, 0);
    let span = tile.span(k, work);
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
    mut code: FormulaCode,
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
