//! LPT (longest-processing-time) tile order with an L2 head swizzle: planned on the host, followed on the GPU.
//!
//! Under a causal mask the later rows attend more keys, and persistent CTAs should end together. So heads are taken in
//! sections; in one the tiles come from the longest to the shortest, in the next the other way round, in the last from
//! the longest to the shortest again. They are dealt out round by round in serpentine order: every other round begins with
//! the CTA that the one before ended with. The number of heads of a section decides how even the loads are, and how many
//! keys and values are in use at a time, which should be no more than L2 holds. Where loads are as even, two tiles of a
//! head follow each other, for neighbouring CTAs.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use flashcore_ir::types::U32;
use flashcore_ir::{Builder, Compare, Reg};
use flashcore_problem::Problem;

use super::TileScheduler;
use crate::attention::block_mask::mode::BlockMaskMode;
use crate::config::HopperConfig;
use crate::grid::packed_rows;
use crate::specialization::Specialization;
use flashcore_ir::Argument;

/// The planned order of the tiles of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LptOrder {
    /// Tiles of one head of one batch, or the most there can be.
    tiles_per_head: u32,
    /// Query heads.
    heads: u32,
    /// Heads of all batches.
    matrices: u32,
    /// All tiles; more than can be counted are more than a grid has.
    pub(crate) tiles: u32,
    /// Heads of a section; the last may have fewer.
    section: u32,
    /// Binary logarithm of the tiles of a head that follow each other: one or two.
    run_bits: u32,
}

/// Bytes of keys and values in use at a time: what an L2 cache of 50 MB keeps beside all else.
const L2_BYTES: usize = 40 << 20;
/// Tiles that are dealt out, on the host, in search of the best order: about a millisecond.
const MAX_PLANNED: u32 = 1 << 16;
/// Section sizes that are tried however many tiles there are.
const MIN_CANDIDATES: u32 = 4;
/// In place of its logarithm, for a section that is no power of two, or does not divide the heads.
const NO_POWER: u32 = 32;
/// Runs of two before those of one, where loads are as even.
const RUN_BITS: [u32; 2] = [1, 0];
/// Orders that are kept for the next plan of the same tiles.
const KEPT_ORDERS: usize = 32;
/// Cost of the prologue and the epilogue of a tile, in KV blocks.
const PROLOGUE_AND_EPILOGUE: u32 = 2;

impl LptOrder {
    /// The tiles of a problem, where every tile may have a CTA of its own.
    pub(crate) fn of(problem: &Problem, config: HopperConfig) -> Self {
        let length = if config.pack_gqa { packed_rows(problem) } else { problem.query_length } as u32;
        let masked = config.block_mask_tiles(Specialization::of(problem));
        let tiles_per_head = masked.map_or_else(|| length.div_ceil(config.tile_m()), |tiles| tiles.max_tiles(length));
        let heads = problem.query_heads as u32;
        let matrices = (problem.batch as u32).saturating_mul(heads);
        Self {
            tiles_per_head,
            heads,
            matrices,
            tiles: tiles_per_head.saturating_mul(matrices),
            section: 1,
            run_bits: 0,
        }
    }

    /// The order with the sections that give `ctas` CTAs the most even loads.
    #[must_use]
    pub(crate) fn for_ctas(self, problem: &Problem, config: HopperConfig, ctas: u32) -> Self {
        let mode = BlockMaskMode::of(config, Specialization::of(problem));
        let is_sorted = mode.is_some_and(|mode| mode.sorted);
        let is_even = problem.mask.limits().1.is_none() && !is_sorted;
        if is_even || self.tiles <= ctas {
            return self;
        }
        let one_head = problem.key_length * (problem.head_dim + problem.value_dim) * problem.dtype.size_bytes();
        let sharing = problem.query_heads / problem.key_heads;
        let most = (L2_BYTES / one_head.max(1)).saturating_mul(sharing).clamp(1, self.matrices as usize) as u32;
        if is_sorted {
            // The lengths of tiles show only when the kernel runs. Large sections are more even, small ones reuse keys
            // more often while these are in L2: half of what it holds was best.
            return Self { section: 1 << (most / 2).max(1).ilog2(), run_bits: RUN_BITS[0], ..self };
        }
        let lengths: Vec<_> = (0..self.tiles_per_head).map(|tile| length(problem, config, tile)).collect();
        self.most_even(lengths, ctas, most, Specialization::of(problem).has_query_lengths())
    }

    /// The most even order of sections of up to `most` heads, searched for once in a while: an engine plans the same tiles
    /// for many lengths.
    fn most_even(self, lengths: Vec<u32>, ctas: u32, most: u32, ragged: bool) -> Self {
        static SEARCHED: Mutex<VecDeque<(Tiles, LptOrder)>> = Mutex::new(VecDeque::new());
        let tiles = Tiles { order: self, lengths, ctas, most, ragged };
        let searched = || SEARCHED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, order)) = searched().iter().find(|(known, _)| *known == tiles) {
            return *order;
        }
        let order = tiles.search();
        let mut searched = searched();
        searched.push_front((tiles, order));
        searched.truncate(KEPT_ORDERS);
        order
    }

    /// The arguments of a launch, in the order of [`TileScheduler::load`].
    pub(crate) fn arguments(self) -> [Argument; 8] {
        let Self { tiles_per_head, heads, matrices, tiles, section, run_bits } = self;
        [tiles_per_head, heads, matrices, tiles, section, self.last_section(), self.section_bits(), run_bits]
            .map(Argument::U32)
    }

    const fn section_bits(self) -> u32 {
        let is_power = self.section.is_power_of_two() && self.matrices.is_multiple_of(self.section);
        if is_power { self.section.ilog2() } else { NO_POWER }
    }

    const fn last_section(self) -> u32 {
        self.matrices.saturating_sub(1) / self.section
    }
}

/// Everything that the most even order depends on.
#[derive(PartialEq, Eq)]
struct Tiles {
    /// The tiles, in any order.
    order: LptOrder,
    /// The lengths of the tiles of a head.
    lengths: Vec<u32>,
    ctas: u32,
    /// The most heads of a section.
    most: u32,
    /// True if sequences may have fewer tiles than the longest. The existing ones then go to all CTAs only if sections have
    /// few divisors in common with the number of CTAs: powers of two, of which GPUs with this kernel have 2 or 4.
    ragged: bool,
}

impl Tiles {
    fn search(&self) -> LptOrder {
        let Self { order: planned, lengths, ctas, most, ragged } = self;
        let all: u64 = lengths.iter().map(|length| u64::from(*length)).sum();
        let even = (all * u64::from(planned.matrices)).div_ceil(u64::from(*ctas));
        let candidates = (MAX_PLANNED / planned.tiles).max(MIN_CANDIDATES).min(*most);
        let orders = (1..=candidates)
            .chain((*most > candidates).then_some(if *ragged { 1 << most.ilog2() } else { *most }))
            .filter(|section| !ragged || section.is_power_of_two())
            .flat_map(|section| RUN_BITS.map(|run_bits| LptOrder { section, run_bits, ..*planned }));
        // Of orders within a hundredth of each other, the first for which the kernel need not divide.
        let mut loads = Loads::new(*ctas);
        let mut best: Option<((u64, bool), LptOrder)> = None;
        for order in orders {
            let load = loads.longest(order, lengths);
            let imbalance = (load * 100 / even.max(1), order.section_bits() == NO_POWER);
            if best.is_none_or(|(least, _)| imbalance < least) {
                best = Some((imbalance, order));
            }
            // No order is more even than this.
            if imbalance <= (100, false) {
                break;
            }
        }
        best.map_or(*planned, |(_, order)| order)
    }
}

/// Loads of persistent CTAs in serpentine order, added up a run of tiles at a time: what a plan is allowed to cost.
///
/// The tiles of a run have two lengths in turn, so every other slot is a chain of differences: `slot[i] - slot[i - 2]`.
struct Loads {
    ctas: usize,
    /// Differences in the slots of rounds that begin with the first CTA, and of those that begin with the last.
    rounds: [Vec<i64>; 2],
}

impl Loads {
    fn new(ctas: u32) -> Self {
        let ctas = ctas as usize;
        Self { ctas, rounds: [vec![0; ctas + 3], vec![0; ctas + 3]] }
    }

    /// The longest load of any CTA under an order, given the lengths of the tiles of a head.
    fn longest(&mut self, order: LptOrder, lengths: &[u32]) -> u64 {
        self.rounds.iter_mut().for_each(|slots| slots.fill(0));
        let LptOrder { tiles_per_head, matrices, section, run_bits, .. } = order;
        let mut index = 0;
        for number in 0..=order.last_section() {
            let heads = section.min(matrices - number * section) as usize;
            let is_descending = (order.last_section() - number).is_multiple_of(2);
            let length = |tile: u32| {
                let tile = if is_descending { tiles_per_head - 1 - tile } else { tile };
                i64::from(lengths[tile as usize])
            };
            for first in (0..tiles_per_head).step_by(1 << run_bits) {
                let is_pair = run_bits > 0 && first + 1 < tiles_per_head;
                let (one, other) = (length(first), length(if is_pair { first + 1 } else { first }));
                let tiles = if is_pair { 2 * heads } else { heads };
                self.add(index, tiles, one, other);
                index += tiles;
            }
        }
        self.maximum()
    }

    /// Adds tiles of two lengths in turn, beginning at a linear index.
    fn add(&mut self, mut index: usize, mut tiles: usize, mut one: i64, mut other: i64) {
        while tiles > 0 {
            let (round, slot) = (index / self.ctas, index % self.ctas);
            let count = tiles.min(self.ctas - slot);
            let slots = &mut self.rounds[round % 2];
            // Each chain ends at its first slot past the run.
            let odd = count % 2;
            slots[slot] += one;
            slots[slot + count + odd] -= one;
            slots[slot + 1] += other;
            slots[slot + count + 1 - odd] -= other;
            if odd == 1 {
                (one, other) = (other, one);
            }
            (index, tiles) = (index + count, tiles - count);
        }
    }

    fn maximum(&mut self) -> u64 {
        for slots in &mut self.rounds {
            for slot in 2..slots.len() {
                slots[slot] += slots[slot - 2];
            }
        }
        let [forth, back] = &self.rounds;
        let loads = forth[..self.ctas].iter().zip(back[..self.ctas].iter().rev()).map(|(forth, back)| forth + back);
        loads.max().unwrap_or(0) as u64
    }
}

/// The length of one tile of a head, in KV blocks.
fn length(problem: &Problem, config: HopperConfig, tile: u32) -> u32 {
    let first_row = (tile * config.tile_m()) as usize;
    let last_row = (first_row + config.tile_m() as usize).min(problem.query_length) - 1;
    let [first, end] = [first_row, last_row]
        .map(|row| problem.attended_keys(problem.key_length, row))
        .map(|keys| (keys.start, keys.end));
    let blocks = end.1.div_ceil(config.tile_n as usize).saturating_sub(first.0 / config.tile_n as usize);
    blocks as u32 + PROLOGUE_AND_EPILOGUE
}

/// The sections of an [`LptOrder`] in a kernel.
#[derive(Debug, Clone, Copy)]
pub(super) struct LptSections {
    /// Heads of a section; the last may have fewer.
    section: Reg<U32>,
    last_section: Reg<U32>,
    section_bits: Reg<U32>,
    run_bits: Reg<U32>,
}

impl LptSections {
    pub(super) fn load(k: &mut Builder) -> Self {
        let [section, last_section, section_bits, run_bits] =
            ["section", "last_section", "section_bits", "run_bits"].map(|name| k.parameter::<U32>(name));
        Self { section, last_section, section_bits, run_bits }
    }

    /// The head of all batches, and the tile in it, of a linear index: in the last section and every other one before it,
    /// the last tiles of all heads come first, a run of each head at a time.
    pub(super) fn tile_at(self, k: &mut Builder, scheduler: &TileScheduler, index: Reg<U32>) -> (Reg<U32>, Reg<U32>) {
        let Self { section, last_section, section_bits, run_bits } = self;
        let tiles = scheduler.tiles_per_head;
        let size = k.mul(tiles, section);
        let number = k.div(index, size);
        let rest = k.eval(index - number * size);
        let first_head = k.mul(number, section);
        let last_tile = k.sub(tiles, 1u32);
        // The last section may have fewer heads.
        let heads = k.eval((scheduler.matrices - first_head).min(section));
        let tiles_of_runs = k.shl(heads, run_bits);
        let run = k.register();
        let is_power_of_two = k.compare(Compare::Lt, section_bits, NO_POWER);
        k.if_else_uniform(
            is_power_of_two,
            |k| {
                let quotient = k.eval(rest >> (section_bits + run_bits));
                k.set(run, quotient);
            },
            |k| {
                let quotient = k.div(rest, tiles_of_runs);
                k.set(run, quotient);
            },
        );
        let within = k.eval(rest - run * tiles_of_runs);
        let run = k.shl(run, run_bits);
        let head = k.shr(within, run_bits);
        let in_run = k.eval(within - (head << run_bits));
        // The last tile may have no run to be in.
        let is_alone = k.compare(Compare::Eq, run, last_tile);
        let head = k.select(is_alone, within, head);
        let in_run = k.select(is_alone, 0u32, in_run);
        let ascending = k.add(run, in_run);
        let is_descending = k.eval(((last_section - number) & 1).eq(0));
        let descending = k.sub(last_tile, ascending);
        (k.add(first_head, head), k.select(is_descending, descending, ascending))
    }
}

#[cfg(test)]
mod tests {
    use flashcore_problem::{Alignment, DType, Mask, Problem};

    use super::*;
    use crate::config::HopperConfig;

    fn order(heads: usize, length: usize, ctas: u32) -> (LptOrder, f64) {
        let config = HopperConfig::default();
        let problem = Problem::new(1, heads, length, 128, DType::F16).with_mask(Mask::Causal(Alignment::BottomRight));
        let order = LptOrder::of(&problem, config).for_ctas(&problem, config, ctas);
        let lengths: Vec<_> = (0..order.tiles_per_head).map(|tile| super::length(&problem, config, tile)).collect();
        let even = f64::from(lengths.iter().sum::<u32>()) * f64::from(order.matrices) / f64::from(ctas);
        (order, f64::from(longest_load(order, &lengths, ctas)) / even)
    }

    /// The longest load, tile by tile.
    fn longest_load(order: LptOrder, lengths: &[u32], ctas: u32) -> u32 {
        let mut loads = vec![0; ctas as usize];
        let tiles: Vec<_> = (0..order.tiles).map(|index| lengths[tile_in_head(order, index) as usize]).collect();
        for (round, tiles) in tiles.chunks(ctas as usize).enumerate() {
            for (index, length) in tiles.iter().enumerate() {
                let cta = if round.is_multiple_of(2) { index } else { loads.len() - 1 - index };
                loads[cta] += length;
            }
        }
        loads.into_iter().max().unwrap_or(0)
    }

    /// The index in its head of the tile of a linear index: what [`LptSections::tile_at`] computes on the GPU.
    fn tile_in_head(order: LptOrder, index: u32) -> u32 {
        let size = order.tiles_per_head * order.section;
        let (number, rest) = (index / size, index % size);
        let heads = order.section.min(order.matrices - number * order.section);
        let (run, within) = (rest / (heads << order.run_bits), rest % (heads << order.run_bits));
        let run = run << order.run_bits;
        let of_run = if run == order.tiles_per_head - 1 { 0 } else { within & ((1 << order.run_bits) - 1) };
        let from_one_end = run + of_run;
        if (order.last_section() - number).is_multiple_of(2) {
            order.tiles_per_head - 1 - from_one_end
        } else {
            from_one_end
        }
    }

    /// The search stops early and adds up by runs; the order is that of looking at all of them tile by tile.
    #[test]
    fn the_search_finds_the_first_of_the_most_even_orders() {
        for (batch, length, tile_n) in [(2, 8192, 176), (1, 16384, 176), (4, 4096, 128), (16, 1024, 128), (3, 1000, 64)]
        {
            let config = HopperConfig { tile_n, ..HopperConfig::default() };
            let problem =
                Problem::new(batch, 16, length, 128, DType::F16).with_mask(Mask::Causal(Alignment::BottomRight));
            let order = LptOrder::of(&problem, config);
            let lengths: Vec<_> = (0..order.tiles_per_head).map(|tile| super::length(&problem, config, tile)).collect();
            let (ctas, most) = (132, 20);
            let all: u64 = lengths.iter().map(|length| u64::from(*length)).sum();
            let even = (all * u64::from(order.matrices)).div_ceil(u64::from(ctas));
            let candidates = (MAX_PLANNED / order.tiles).max(MIN_CANDIDATES).min(most);
            let orders = (1..=candidates)
                .chain((most > candidates).then_some(most))
                .flat_map(|section| RUN_BITS.map(|run_bits| LptOrder { section, run_bits, ..order }));
            let imbalance = |order: &LptOrder| {
                let load = u64::from(longest_load(*order, &lengths, ctas));
                (load * 100 / even.max(1), order.section_bits() == NO_POWER)
            };
            let expected = orders.min_by_key(imbalance).unwrap();
            assert_eq!(Tiles { order, lengths, ctas, most, ragged: false }.search(), expected, "{problem}");
        }
    }

    /// Loads that are added up run by run are those of tile by tile.
    #[test]
    fn loads_by_run_are_loads_by_tile() {
        for (matrices, section) in [(1, 1), (7, 1), (6, 2), (8, 4), (8, 8), (7, 3), (7, 7), (9, 4), (64, 5)] {
            for (tiles_per_head, run_bits) in [(5, 0), (5, 1), (6, 1), (1, 1), (1, 0), (16, 1)] {
                let tiles = tiles_per_head * matrices;
                let order = LptOrder { tiles_per_head, heads: matrices, matrices, tiles, section, run_bits };
                let lengths: Vec<_> = (0..tiles_per_head).map(|tile| 3 + tile * tile % 7).collect();
                for ctas in [1, 2, 3, 7, 132] {
                    let expected = u64::from(longest_load(order, &lengths, ctas));
                    assert_eq!(Loads::new(ctas).longest(order, &lengths), expected, "{order:?} {ctas}");
                }
            }
        }
    }

    #[test]
    fn every_tile_comes_once() {
        for (heads, section) in [(1, 1), (7, 1), (6, 2), (8, 4), (8, 8), (7, 3), (7, 7), (9, 4)] {
            for (tiles_per_head, run_bits) in [(5, 0), (5, 1), (6, 1), (1, 1)] {
                let tiles = tiles_per_head * heads;
                let order = LptOrder { tiles_per_head, heads, matrices: heads, tiles, section, run_bits };
                let mut times = vec![0; tiles_per_head as usize];
                (0..order.tiles).for_each(|index| times[tile_in_head(order, index) as usize] += 1);
                assert!(times.iter().all(|times| *times == heads), "{order:?}: {times:?}");
            }
        }
    }

    #[test]
    fn long_causal_problems_are_even() {
        let even = [(16, 16384), (32, 8192), (64, 4096), (21, 16384), (10, 16384)].map(|problem| (problem, 1.01));
        for ((heads, length), most) in even.into_iter().chain([((42, 8192), 1.02), ((84, 4096), 1.02)]) {
            let (order, load) = order(heads, length, 132);
            assert!(load < most, "{order:?}: the longest load is {load} of an even one");
        }
    }
}
