//! Which tiles of keys a formula leaves to each tile of query rows, found out before attention begins.
//!
//! A formula that takes keys out says for each query row and key whether they meet, and nothing about tiles. So a small
//! kernel asks it about all of them, and keeps four numbers for each tile of query rows: the first and the last tile of
//! keys of which anything is attended, and the range of those that all rows attend whole. The kernel behind it leaves out
//! what is outside of the first, and asks the formula only about what is outside of the second.

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
/// Tiles of keys that are told apart; those behind are attended in part by all rows.
const MOST_TILES: u32 = 4096;
/// Bytes of the numbers of one tile of query rows.
const BYTES: u64 = 16;
const WORD_BYTES: u32 = 4;
/// What is known of a tile: that something of it is attended, and that all of it is.
const SOME: u32 = 1;
const WHOLE: u32 = 2;

/// How many tiles of query rows there are: in one head, of how many heads, of how many batches. What a formula does not
/// look at counts once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RangeShape {
    pub(crate) tiles: u32,
    pub(crate) heads: u32,
    pub(crate) batches: u32,
}

impl RangeShape {
    /// That of a problem with a formula, for a kernel that makes use of it.
    pub(crate) fn of(problem: &Problem, config: Config) -> Option<Self> {
        let mask_mod = problem.mask_mod.filter(|_| config.key_rows().is_some())?;
        let formula: &Formula = mask_mod.formula();
        let uses = formula.uses(formula.result());
        let counted = |is_used: bool, size: usize| if is_used { size as u32 } else { 1 };
        Some(Self {
            tiles: problem.query_length.div_ceil(config.range_rows(config.specialisation(problem)).max(1) as usize)
                as u32,
            heads: counted(uses.head, problem.query_heads),
            batches: counted(uses.batch, problem.batch),
        })
    }

    pub(crate) const fn bytes(self) -> u64 {
        BYTES * self.tiles as u64 * self.heads as u64 * self.batches as u64
    }

    pub(crate) const fn grid(self) -> [u32; 3] {
        [self.tiles, self.heads, self.batches]
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
            match k.load::<S32>(address, 4)[..] {
                [first, last, whole_first, whole_end] => Some(Self { first, last, whole_first, whole_end }),
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

/// Writes the kernel that finds them for tiles of so many query rows and keys.
pub(crate) fn kernel(name: String, specialisation: Specialisation, query_rows: u32, key_rows: u32) -> Option<Kernel> {
    let formula = specialisation.mask_mod?.formula();
    let mut builder = Builder::new(name, WARPS * LANES);
    let k = &mut builder;
    let parameters = Parameters::load(k);
    // How rows are limited besides is not looked at.
    let plain = Specialisation { left: false, right: false, key_lengths: false, ..specialisation };
    let work = Work::at(k, parameters, plain, query_rows, Place::Grid, Rows::OfHead);
    let known = k.reserve_shared(MOST_TILES * WORD_BYTES, 16);
    let base = k.shared_base();
    let known = k.add(base, known);
    let thread = k.special(SpecialRegister::ThreadX);
    let (warp, lane) = (k.shr(thread, LANES.ilog2()), k.and(thread, LANES - 1));
    let behind = k.add(parameters.key_length, key_rows - 1);
    let tiles = k.div(behind, key_rows);
    let told_apart = k.min(tiles, MOST_TILES);

    let rows_behind = k.add(work.first_row, query_rows);
    let end_row = k.min(rows_behind, parameters.query_length);
    k.for_uniform(warp, told_apart, WARPS, |k, tile| {
        let first_key = k.mul(tile, key_rows);
        let asked = AskedTile { rows: [work.first_row, end_row], query_rows, first_key, key_rows };
        let (some, whole) = tile_of_keys(k, &work, formula, asked, lane);
        let first = k.compare(Compare::Eq, lane, 0u32);
        let some = k.select(some, SOME, 0u32);
        let whole = k.select(whole, WHOLE, 0u32);
        let flags = k.add(some, whole);
        let place = k.mad(tile, WORD_BYTES, known);
        k.when(first, |k| k.store_shared(place, &[flags]));
    });
    k.cta_sync();
    let gathers = k.compare(Compare::Eq, warp, 0u32);
    k.if_uniform(gathers, |k| gather(k, &work, query_rows, known, [tiles, told_apart], lane));
    Some(builder.finish())
}

/// A tile of query rows and keys.
#[derive(Debug, Clone, Copy)]
struct AskedTile {
    /// From the first row to behind the last.
    rows: [Reg<U32>; 2],
    query_rows: u32,
    first_key: Reg<U32>,
    key_rows: u32,
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
    let AskedTile { rows: [first_row, end_row], query_rows, key_rows, .. } = tile;
    let [first_row, end_row, first_key, length] = [first_row, end_row, tile.first_key, work.parameters.key_length]
        .map(|number| k.reinterpret::<U32, S32>(number));
    let last_that_exists = k.sub(length, 1i32);
    let last_row = k.sub(end_row, 1i32);
    let last_key = k.add(first_key, key_rows as i32 - 1);
    let last_key = k.min(last_key, last_that_exists);
    let code = work.formula(k, formula, work.first_row, 0);
    let span = TileSpan {
        rows: [first_row, last_row],
        most_rows: query_rows,
        keys: [first_key, last_key],
        most_keys: key_rows,
    };
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
    // A lane that has fewer keys than others asks about the last ones again.
    let keys: Vec<_> = (0..tile.most_keys.div_ceil(LANES))
        .map(|index| {
            let key = k.add(first_key, (index * LANES) as i32);
            let key = k.add(key, lane);
            k.min(key, last_key)
        })
        .collect();
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

/// What is done with a tile, of which something is known.
type Visit<'a> = &'a dyn Fn(&mut Builder, Reg<S32>, Reg<U32>);

/// Stores what one warp finds in what is known of the tiles.
fn gather(
    k: &mut Builder,
    work: &Work,
    query_rows: u32,
    known: Reg<U32>,
    [tiles, told_apart]: [Reg<U32>; 2],
    lane: Reg<U32>,
) {
    let [tiles_signed, apart_signed] = [tiles, told_apart].map(|count| k.reinterpret::<U32, S32>(count));
    let first = k.copy(tiles_signed);
    let (last, whole_end) = (k.copy(-1i32), k.copy(0i32));
    let behind = k.add(told_apart, LANES - 1);
    let rounds = k.shr(behind, LANES.ilog2());
    // Every lane has each 32nd tile.
    let each = |k: &mut Builder, visit: Visit<'_>| {
        k.for_uniform(0u32, rounds, 1u32, |k, round| {
            let tile = k.mad(round, LANES, lane);
            let is_there = k.compare(Compare::Lt, tile, told_apart);
            k.if_then(is_there, |k| {
                let place = k.mad(tile, WORD_BYTES, known);
                let flags = k.load_shared::<U32>(place, 1)[0];
                let tile = k.reinterpret::<U32, S32>(tile);
                visit(k, tile, flags);
            });
        });
    };
    each(k, &|k, tile, flags| {
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
    each(k, &|k, tile, flags| {
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
    let last_of_all = k.sub(tiles_signed, 1i32);
    let last = k.select(has_more, last_of_all, last);
    let lower = k.min(first, apart_signed);
    let first = k.select(has_more, lower, first);
    let is_first = k.compare(Compare::Eq, lane, 0u32);
    let address = address(k, work, work.first_row, query_rows);
    k.when(is_first, |k| k.store(address, &[first, last, whole_first, whole_end]));
}
