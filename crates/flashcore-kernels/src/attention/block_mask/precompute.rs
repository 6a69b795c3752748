//! Block-mask precompute kernel: evaluates a `mask_mod` for every tile of query rows and KV block.

use flashcore_ir::types::{Pred, S32, U32};
use flashcore_ir::{Builder, Compare, Kernel, ReduceOp, Reg, SpecialRegister, VoteMode};

use super::{BlockMaskTiles, QUAD, doc_boundaries, group_address, record_address};
use crate::attention::{TileContext, TileSource};
use crate::parameters::Parameters;
use crate::primitives::{BoundExpression, ExpressionCode, LANES, ScoreBlock};
use crate::specialization::Specialization;

/// Warps of a CTA.
pub(super) const WARPS: u32 = 16;
/// The most KV blocks that are classified, for all row groups of a CTA together; those after them count as partial.
const MAX_BLOCKS: u32 = 4096;
pub(super) const WORD_BYTES: u32 = 4;
/// Flags of a block: something of it is attended, and all of it is.
const SOME: u32 = 1;
const FULL: u32 = 2;
/// Blocks that a warp looks at together, so that they wait for memory together.
const BLOCKS_AT_ONCE: u32 = 4;
/// Rows that are evaluated before the verdict is looked at: far apart, because adjacent rows are often alike.
const ROWS_AT_ONCE: u32 = 8;

/// Writes the kernel.
///
/// # Panics
///
/// For a specialization without a `mask_mod`.
pub(crate) fn kernel(tiles: BlockMaskTiles, specialization: Specialization) -> Kernel {
    let name = format!("flashcore_block_mask_{}x{}", tiles.group_rows, tiles.tile_n);
    let mut builder = Builder::new(name, WARPS * LANES);
    let k = &mut builder;
    if tiles.pdl {
        k.section("launch dependents", Builder::launch_dependents);
    }
    let parameters = Parameters::load(k, specialization);
    let mask_mod = parameters.mask_mod.expect("a block mask is of a mask_mod");
    // Windows and lengths are the attention kernel's own.
    let plain = specialization.without_limits();
    let context = TileContext::new(k, &parameters, plain, tiles.tile_m, TileSource::Grid, false);
    let [flags, exchange] = [MAX_BLOCKS, 2 * WARPS].map(|words| k.reserve_shared(words * WORD_BYTES, 16));
    let base = k.shared_base();
    let [flags, exchange] = [flags, exchange].map(|offset| k.add(base, offset));
    let thread = k.special(SpecialRegister::ThreadX);
    let (warp, lane) = (k.shr(thread, LANES.ilog2()), k.and(thread, LANES - 1));
    let tile = k.special(SpecialRegister::CtaX);
    let mut precompute = BlockMaskPrecompute { context, mask_mod, tiles, tile, flags, exchange, warp, lane };
    let [first_row, end_row] = if tiles.unaligned_q {
        k.section("rows", |k| doc_boundaries::rows_of_tile(k, &precompute))
    } else {
        let end_row = k.eval((context.first_row + tiles.tile_m).min(parameters.query_length));
        [context.first_row, end_row]
    };
    precompute.context = TileContext { first_row, end_row, ..context };
    precompute.run(k);
    builder.finish()
}

/// The tile of query rows of a CTA, and the memory of its warps.
pub(super) struct BlockMaskPrecompute {
    pub(super) context: TileContext,
    pub(super) mask_mod: BoundExpression,
    pub(super) tiles: BlockMaskTiles,
    /// The index of the tile.
    pub(super) tile: Reg<U32>,
    /// The address of the flags of blocks.
    pub(super) flags: Reg<U32>,
    /// The address through which warps exchange integers.
    exchange: Reg<U32>,
    pub(super) warp: Reg<U32>,
    pub(super) lane: Reg<U32>,
}

/// KV blocks from one key to another.
#[derive(Clone, Copy)]
struct Blocks {
    origin: Reg<S32>,
    end: Reg<S32>,
    count: Reg<U32>,
    /// The number of blocks that are classified.
    classified: Reg<U32>,
}

impl BlockMaskPrecompute {
    fn run(&self, k: &mut Builder) {
        let zero = k.copy(0i32);
        let length = k.reinterpret::<U32, S32>(self.context.parameters.key_length);
        let mut blocks = self.blocks(k, zero, length);
        if self.tiles.unaligned_kv {
            blocks = self.between_attended(k, blocks);
        }
        k.section("classify", |k| self.classify(k, blocks));
        // A warp for each row group.
        let stores = k.compare(Compare::Lt, self.warp, self.tiles.row_groups());
        k.if_uniform(stores, |k| k.section("store record", |k| self.store_record(k, blocks)));
    }

    /// The KV blocks from one key to another.
    fn blocks(&self, k: &mut Builder, origin: Reg<S32>, end: Reg<S32>) -> Blocks {
        let first = k.min(origin, end);
        let tile_n = self.tiles.tile_n;
        let count = k.eval(((end - first).unsigned() + (tile_n - 1)) / tile_n);
        Blocks { origin, end, count, classified: k.min(count, MAX_BLOCKS / self.tiles.row_groups()) }
    }

    /// The first of `count` rows, and one past the last, of those there are.
    fn rows(&self, k: &mut Builder, first: Reg<U32>, count: u32) -> [Reg<U32>; 2] {
        let end = k.add(first, count);
        [first, end].map(|row| k.min(row, self.context.end_row))
    }

    /// Stores the flags of each block for each row group, and waits for the other warps.
    fn classify(&self, k: &mut Builder, blocks: Blocks) {
        let (groups, tile_m, tile_n) = (self.tiles.row_groups(), self.tiles.group_rows, self.tiles.tile_n);
        let count = k.mul(blocks.classified, groups);
        k.for_uniform(self.warp, count, WARPS, |k, index| {
            let block = k.div(index, groups);
            let group = k.eval(index - block * groups);
            let first_key = k.eval(block.signed().mul_add(tile_n as i32, blocks.origin));
            let first_row = k.mad(group, tile_m, self.context.first_row);
            let rows = self.rows(k, first_row, tile_m);
            let flags = k.copy(0u32);
            let exists = k.compare(Compare::Lt, rows[0], rows[1]);
            k.if_uniform(exists, |k| {
                let block = CandidateBlock { rows, tile_m, first_key, end_key: blocks.end, tile_n };
                let (some, full) = self.verdict(k, block);
                let some = k.select(some, SOME, 0u32);
                let full = k.select(full, FULL, 0u32);
                let both = k.add(some, full);
                k.set(flags, both);
            });
            let is_first = k.compare(Compare::Eq, self.lane, 0u32);
            let address = k.mad(index, WORD_BYTES, self.flags);
            k.when(is_first, |k| k.store_shared(address, &[flags]));
        });
        k.cta_sync();
    }

    /// The blocks from the first key that some row of the CTA attends to the last.
    fn between_attended(&self, k: &mut Builder, blocks: Blocks) -> Blocks {
        let tile_n = self.tiles.tile_n as i32;
        let (first, last) = k.section("may attend", |k| self.may_attend(k, blocks));
        // Where nothing is attended, past all keys.
        let begin = k.eval((first * tile_n).min(blocks.end));
        let last_begin = k.eval((last * tile_n).max(0));
        let (origin, end) = k.section("attended keys", |k| self.attended_keys(k, blocks, [begin, last_begin]));
        self.blocks(k, origin, end)
    }

    /// The first and the last block that some row may attend, by interval arithmetic.
    fn may_attend(&self, k: &mut Builder, blocks: Blocks) -> (Reg<S32>, Reg<S32>) {
        let (context, tile_m, tile_n) = (&self.context, self.tiles.tile_m, self.tiles.tile_n);
        let count = k.reinterpret::<U32, S32>(blocks.count);
        let last_block = k.sub(count, 1i32);
        let rows = self.rows(k, context.first_row, tile_m);
        let code = context.expression(k, self.mask_mod, context.first_row, 0);
        let (first, last) = (k.copy(count), k.copy(-1i32));
        k.for_uniform(self.warp, blocks.count, WARPS * BLOCKS_AT_ONCE, |k, block| {
            for next in 0..BLOCKS_AT_ONCE {
                // A warp that has fewer blocks than others looks at the last one again.
                let block = k.eval((block + next * WARPS).signed().min(last_block));
                let first_key = k.mul(block, tile_n as i32);
                let candidate = CandidateBlock { rows, tile_m, first_key, end_key: blocks.end, tile_n };
                let scores = candidate.scores(k);
                let attended = code.block_verdict(k, scores, self.lane).map(|[may_hold, _]| may_hold);
                let (lower, higher) = (k.min(first, block), k.max(last, block));
                if let Some(attended) = attended {
                    k.set_where(first, attended, lower);
                    k.set_where(last, attended, higher);
                } else {
                    k.set(first, lower);
                    k.set(last, higher);
                }
            }
        });
        self.reduce_warps(k, first, last)
    }

    /// The lowest of the integers that each warp has, and the highest of the others.
    fn reduce_warps(&self, k: &mut Builder, lowest: Reg<S32>, highest: Reg<S32>) -> (Reg<S32>, Reg<S32>) {
        k.section("all warps", |k| {
            let is_first = k.compare(Compare::Eq, self.lane, 0u32);
            let address = k.mad(self.warp, 2 * WORD_BYTES, self.exchange);
            k.when(is_first, |k| k.store_shared(address, &[lowest, highest]));
            k.cta_sync();
            let address = k.eval(self.lane.min(WARPS - 1).mul_add(2 * WORD_BYTES, self.exchange));
            let both = k.load_shared::<S32>(address, 2);
            k.cta_sync();
            (k.reduce_warp(ReduceOp::Min, both[0]), k.reduce_warp(ReduceOp::Max, both[1]))
        })
    }

    /// The first key that some row attends, of the block that begins at one key, and one past the last of the block that
    /// begins at another; where there is none, the whole block.
    fn attended_keys(&self, k: &mut Builder, blocks: Blocks, begins: [Reg<S32>; 2]) -> (Reg<S32>, Reg<S32>) {
        let (context, rows, tile_n) = (&self.context, self.tiles.tile_m, self.tiles.tile_n);
        let [first_row, end_row, warp, lane] =
            [context.first_row, context.end_row, self.warp, self.lane].map(|index| k.reinterpret::<U32, S32>(index));
        let (last_key, last_row) = (k.sub(blocks.end, 1i32), k.sub(end_row, 1i32));
        let [begin, last_begin] = begins;
        let (first, last) = (k.copy(blocks.end), k.copy(-1i32));
        let exists = k.eval(first_row.lt(end_row) & begin.lt(blocks.end));
        k.if_uniform(exists, |k| {
            let mut code = context.expression(k, self.mask_mod, context.first_row, 0);
            let mut keys = lane_keys(k, lane, begin, last_key, tile_n);
            let first_block_keys = keys.len();
            keys.extend(lane_keys(k, lane, last_begin, last_key, tile_n));
            code.read_keys(k, &keys);
            for row in (0..rows).step_by(WARPS as usize) {
                let row = k.eval((warp + row as i32 + first_row).min(last_row));
                let row_code = code.for_row(k, row);
                let mut block = row_code.block(begin);
                for (column, key) in keys.iter().enumerate() {
                    let attended = block.attended(k, 0, column as u32);
                    if column < first_block_keys {
                        let lower = k.min(first, *key);
                        k.set_where(first, attended, lower);
                    } else {
                        let higher = k.max(last, *key);
                        k.set_where(last, attended, higher);
                    }
                }
            }
        });
        let first = k.reduce_warp(ReduceOp::Min, first);
        let last = k.reduce_warp(ReduceOp::Max, last);
        let (first, last) = self.reduce_warps(k, first, last);
        let has_first = k.compare(Compare::Lt, first, blocks.end);
        let first = k.select(has_first, first, begin);
        let has_last = k.compare(Compare::Ge, last, 0i32);
        let block_end = k.eval((last_begin + tile_n as i32).min(blocks.end));
        let end = k.add(last, 1i32);
        (first, k.select(has_last, end, block_end))
    }

    /// Visits every classified block of a row group with its flags; every lane has each 32nd.
    fn each_block(&self, k: &mut Builder, blocks: Blocks, group: Reg<U32>, visit: Visit<'_>) {
        let rounds = k.eval((blocks.classified + (LANES - 1)) >> LANES.ilog2());
        k.for_uniform(0u32, rounds, 1u32, |k, round| {
            let block = k.mad(round, LANES, self.lane);
            let exists = k.compare(Compare::Lt, block, blocks.classified);
            k.if_then(exists, |k| {
                let address = k.eval(block.mul_add(self.tiles.row_groups(), group).mul_add(WORD_BYTES, self.flags));
                let flags = k.load_shared::<U32>(address, 1)[0];
                let block = k.reinterpret::<U32, S32>(block);
                visit(k, block, flags);
            });
        });
    }

    /// Stores the record of the row group of this warp; the first warp stores that of the tile as well.
    fn store_record(&self, k: &mut Builder, blocks: Blocks) {
        let group = self.warp;
        let [count, classified] = [blocks.count, blocks.classified].map(|count| k.reinterpret::<U32, S32>(count));
        let (first, last, full_end) = (k.copy(count), k.copy(-1i32), k.copy(0i32));
        self.each_block(k, blocks, group, &|k, block, flags| {
            let is_some = k.eval((flags & SOME).ne(0));
            let lower = k.min(first, block);
            k.set_where(first, is_some, lower);
            k.set_where(last, is_some, block);
            let is_full = k.eval((flags & FULL).ne(0));
            let next = k.add(block, 1i32);
            k.set_where(full_end, is_full, next);
        });
        let first = k.reduce_warp(ReduceOp::Min, first);
        let last = k.reduce_warp(ReduceOp::Max, last);
        let full_end = k.reduce_warp(ReduceOp::Max, full_end);
        let full_begin = k.copy(0i32);
        self.each_block(k, blocks, group, &|k, block, flags| {
            let is_partial_before = k.eval((flags & FULL).eq(0) & block.lt(full_end));
            let next = k.add(block, 1i32);
            k.set_where(full_begin, is_partial_before, next);
        });
        let full_begin = k.reduce_warp(ReduceOp::Max, full_begin);
        // Blocks that are not classified count as attended.
        let has_more = k.compare(Compare::Gt, count, classified);
        let last_block = k.sub(count, 1i32);
        let last = k.select(has_more, last_block, last);
        let lower = k.min(first, classified);
        let first = k.select(has_more, lower, first);
        let is_first = k.compare(Compare::Eq, self.lane, 0u32);
        let record = record_address(k, &self.context, self.tiles, self.tile);
        let group_record = group_address(k, record, group);
        k.when(is_first, |k| k.store(group_record, &[first, last, full_begin, full_end]));
        let stores = k.eval(is_first & group.eq(0));
        let [first_row, end_row] =
            [self.context.first_row, self.context.end_row].map(|row| k.reinterpret::<U32, S32>(row));
        let extent: [_; QUAD as usize] = [first_row, end_row, blocks.origin, blocks.end];
        k.when(stores, |k| k.store(record, &extent));
    }

    /// True if some row attends some key of a block, and true if all rows attend all keys there are.
    fn verdict(&self, k: &mut Builder, block: CandidateBlock) -> (Reg<Pred>, Reg<Pred>) {
        let code = self.context.expression(k, self.mask_mod, self.context.first_row, 0);
        let scores = block.scores(k);
        let one = k.copy(1u32);
        let some = k.compare(Compare::Eq, one, 0u32);
        let full = k.not(some);
        let Some([may_hold, may_fail]) = code.block_verdict(k, scores, self.lane) else {
            evaluate(k, code, scores, self.lane, (some, full));
            return (some, full);
        };
        let unknown = k.and(may_hold, may_fail);
        k.if_else_uniform(
            unknown,
            |k| evaluate(k, code, scores, self.lane, (some, full)),
            |k| {
                k.set(some, may_hold);
                k.set(full, may_hold);
            },
        );
        (some, full)
    }
}

/// Visitor of a block and its flags.
type Visit<'a> = &'a dyn Fn(&mut Builder, Reg<S32>, Reg<U32>);

/// A block of query rows and keys.
#[derive(Debug, Clone, Copy)]
struct CandidateBlock {
    /// The first row, and one past the last.
    rows: [Reg<U32>; 2],
    tile_m: u32,
    first_key: Reg<S32>,
    /// One past the last key there is, in this block or after it.
    end_key: Reg<S32>,
    tile_n: u32,
}

impl CandidateBlock {
    /// The scores of the block, of the rows and keys there are.
    fn scores(self, k: &mut Builder) -> ScoreBlock {
        let Self { rows: [first_row, end_row], tile_m, first_key, end_key, tile_n } = self;
        let [first_row, end_row] = [first_row, end_row].map(|row| k.reinterpret::<U32, S32>(row));
        let (last_row, last_that_exists) = (k.sub(end_row, 1i32), k.sub(end_key, 1i32));
        let last_key = k.eval((first_key + (tile_n as i32 - 1)).min(last_that_exists));
        ScoreBlock { rows: [first_row, last_row], max_rows: tile_m, keys: [first_key, last_key], max_keys: tile_n }
    }
}

/// Evaluates the expression for every row and key, until the verdict is known. `some` is false before, and `full` true.
fn evaluate(
    k: &mut Builder,
    mut code: ExpressionCode,
    scores: ScoreBlock,
    lane: Reg<U32>,
    (some, full): (Reg<Pred>, Reg<Pred>),
) {
    let lane = k.reinterpret::<U32, S32>(lane);
    let ([first_row, last_row], [first_key, last_key]) = (scores.rows, scores.keys);
    let keys = lane_keys(k, lane, first_key, last_key, scores.max_keys);
    code.read_keys(k, &keys);
    let step = scores.max_rows.div_ceil(ROWS_AT_ONCE) as i32;
    let row = k.copy(first_row);
    let end = k.add(first_row, step);
    let is_known = k.copy(0u32);
    k.while_uniform(
        |k| k.eval(row.lt(end) & is_known.eq(0)),
        |k| {
            for index in 0..ROWS_AT_ONCE {
                let row = k.eval((row + index as i32 * step).min(last_row));
                let row_code = code.for_row(k, row);
                let mut block = row_code.block(first_key);
                for column in 0..keys.len() {
                    let attended = block.attended(k, 0, column as u32);
                    let some_yet = k.or(some, attended);
                    k.set(some, some_yet);
                    let full_yet = k.and(full, attended);
                    k.set(full, full_yet);
                }
            }
            let any = k.vote(VoteMode::Any, some);
            let all = k.vote(VoteMode::All, full);
            let is_partial = k.eval(any & !all);
            let is_partial = k.select(is_partial, 1u32, 0u32);
            k.set(is_known, is_partial);
            k.add_to(row, 1i32);
        },
    );
    let any = k.vote(VoteMode::Any, some);
    let all = k.vote(VoteMode::All, full);
    k.set(some, any);
    k.set(full, all);
}

/// The keys that a lane evaluates, of `count` from `first` on. A lane that has fewer than others takes the last one again.
fn lane_keys(k: &mut Builder, lane: Reg<S32>, first: Reg<S32>, last: Reg<S32>, count: u32) -> Vec<Reg<S32>> {
    let key = |index: u32| k.eval((first + (index * LANES) as i32 + lane).min(last));
    (0..count.div_ceil(LANES)).map(key).collect()
}
