//! The order in which CTAs that stay take tiles of query rows, as the host plans it.
//!
//! Under a causal mask the later rows attend more keys, and CTAs should be done at the same time. So heads are taken in
//! sections; in one the tiles come from the longest to the shortest, in the next the other way round, in the last from
//! the longest to the shortest again. They are dealt out round by round, and every other round begins with the CTA that
//! the one before ended with. How many heads make a section decides how even the loads are, and how many keys and values
//! are in use at a time, which should be no more than the L2 cache holds. Where it is as even, two tiles of a head come
//! one behind the other, for neighbouring CTAs.

use flashcore_problem::Problem;

use crate::hopper_config::HopperConfig;
use crate::parameters::Argument;
use crate::specialization::Specialization;

/// The tiles of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Order {
    /// Tiles of one head of one batch, or the most there can be.
    query_tiles: u32,
    /// Query heads.
    heads: u32,
    /// Heads of all batches.
    matrices: u32,
    /// All tiles; more than can be counted are more than a grid has.
    pub(crate) tiles: u32,
    /// Heads of a section; the last may have fewer.
    section: u32,
    /// Tiles of a head that come one behind the other, as a power of two: one or two.
    run_bits: u32,
}

/// Bytes of keys and values that are in use at a time: what an L2 cache of 50 MB keeps beside all else.
const CACHED_BYTES: usize = 40 << 20;
/// Tiles that are dealt out, on paper, in search of the best order: about a millisecond.
const MOST_PLANNED: u32 = 1 << 16;
/// Sections that are tried however many tiles there are.
const LEAST_CANDIDATES: u32 = 4;
/// Instead of its logarithm, for a section that is no power of two, or does not divide the heads.
pub(super) const NO_POWER: u32 = 32;
/// Runs of two before those of one, where loads are as even.
const RUN_BITS: [u32; 2] = [1, 0];
/// What a tile costs besides its keys, in tiles of keys.
const ENDS: u32 = 2;

impl Order {
    /// Those of a problem, where every tile may have a CTA of its own.
    pub(crate) fn of(problem: &Problem, config: HopperConfig) -> Self {
        let length = problem.query_length as u32;
        let ranges = config.range_tiles(Specialization::of(problem));
        let query_tiles = ranges.map_or_else(|| length.div_ceil(config.tile_m()), |ranges| ranges.most_tiles(length));
        let heads = problem.query_heads as u32;
        let matrices = (problem.batch as u32).saturating_mul(heads);
        Self { query_tiles, heads, matrices, tiles: query_tiles.saturating_mul(matrices), section: 1, run_bits: 0 }
    }

    /// The same with the sections that give so many CTAs the most even loads.
    #[must_use]
    pub(crate) fn for_ctas(self, problem: &Problem, config: HopperConfig, ctas: u32) -> Self {
        let is_sorted = config.sorts_tiles(Specialization::of(problem));
        let is_even = problem.mask.limits().1.is_none() && !is_sorted;
        if is_even || self.tiles <= ctas {
            return self;
        }
        let one_head = problem.key_length * (problem.head_dim + problem.value_dim) * problem.dtype.size_bytes();
        let sharing = problem.query_heads / problem.key_heads;
        let most = (CACHED_BYTES / one_head.max(1)).saturating_mul(sharing).clamp(1, self.matrices as usize) as u32;
        if is_sorted {
            // How long tiles are shows only when the kernel runs. Many of them are more even, few come to the same keys
            // more often while these are in the cache: half of what it holds was best.
            return Self { section: 1 << (most / 2).max(1).ilog2(), run_bits: RUN_BITS[0], ..self };
        }
        let lengths: Vec<_> = (0..self.query_tiles).map(|tile| length(problem, config, tile)).collect();
        let all: u64 = lengths.iter().map(|length| u64::from(*length)).sum();
        let even = (all * u64::from(self.matrices)).div_ceil(u64::from(ctas));
        let candidates = (MOST_PLANNED / self.tiles).max(LEAST_CANDIDATES).min(most);
        let orders = (1..=candidates)
            .chain((most > candidates).then_some(most))
            .flat_map(|section| RUN_BITS.map(|run_bits| Self { section, run_bits, ..self }));
        // Of orders that are within a hundredth of each other, one for which the kernel need not divide.
        let badness = |order: &Self| {
            let load = u64::from(order.longest_load(&lengths, ctas));
            (load * 100 / even.max(1), order.section_bits() == NO_POWER)
        };
        orders.min_by_key(badness).unwrap_or(self)
    }

    /// In the order of [`Schedule::load`](super::schedule::Schedule::load).
    pub(crate) fn arguments(self) -> [Argument; 8] {
        let Self { query_tiles, heads, matrices, tiles, section, run_bits } = self;
        [query_tiles, heads, matrices, tiles, section, self.last_section(), self.section_bits(), run_bits]
            .map(Argument::U32)
    }

    const fn section_bits(self) -> u32 {
        let is_power = self.section.is_power_of_two() && self.matrices.is_multiple_of(self.section);
        if is_power { self.section.ilog2() } else { NO_POWER }
    }

    const fn last_section(self) -> u32 {
        self.matrices.saturating_sub(1) / self.section
    }

    /// The most that one of so many CTAs has to do, if tiles are as long as said.
    fn longest_load(self, lengths: &[u32], ctas: u32) -> u32 {
        let mut loads = vec![0; ctas as usize];
        let tiles: Vec<_> = (0..self.tiles).map(|index| lengths[self.row_tile(index) as usize]).collect();
        for (round, tiles) in tiles.chunks(ctas as usize).enumerate() {
            for (place, length) in tiles.iter().enumerate() {
                let cta = if round.is_multiple_of(2) { place } else { loads.len() - 1 - place };
                loads[cta] += length;
            }
        }
        loads.into_iter().max().unwrap_or(0)
    }

    /// Where in its head the tile of a number is: what [`Schedule`](super::schedule::Schedule) computes on the GPU.
    fn row_tile(self, index: u32) -> u32 {
        let size = self.query_tiles * self.section;
        let (number, rest) = (index / size, index % size);
        let heads = self.section.min(self.matrices - number * self.section);
        let (run, within) = (rest / (heads << self.run_bits), rest % (heads << self.run_bits));
        let run = run << self.run_bits;
        let of_run = if run == self.query_tiles - 1 { 0 } else { within & ((1 << self.run_bits) - 1) };
        let from_one_end = run + of_run;
        if (self.last_section() - number).is_multiple_of(2) {
            self.query_tiles - 1 - from_one_end
        } else {
            from_one_end
        }
    }
}

/// How long one tile of a head takes, in tiles of keys.
fn length(problem: &Problem, config: HopperConfig, tile: u32) -> u32 {
    let first_row = (tile * config.tile_m()) as usize;
    let last_row = (first_row + config.tile_m() as usize).min(problem.query_length) - 1;
    let [first, end] = [first_row, last_row]
        .map(|row| problem.attended_keys(problem.key_length, row))
        .map(|keys| (keys.start, keys.end));
    let tiles = end.1.div_ceil(config.tile_n as usize).saturating_sub(first.0 / config.tile_n as usize);
    tiles as u32 + ENDS
}

#[cfg(test)]
mod tests {
    use flashcore_problem::{Alignment, DType, Mask, Problem};

    use super::*;
    use crate::hopper_config::HopperConfig;

    fn order(heads: usize, length: usize, ctas: u32) -> (Order, f64) {
        let config = HopperConfig::default();
        let problem = Problem::new(1, heads, length, 128, DType::F16).with_mask(Mask::Causal(Alignment::BottomRight));
        let order = Order::of(&problem, config).for_ctas(&problem, config, ctas);
        let lengths: Vec<_> = (0..order.query_tiles).map(|tile| super::length(&problem, config, tile)).collect();
        let even = f64::from(lengths.iter().sum::<u32>()) * f64::from(order.matrices) / f64::from(ctas);
        (order, f64::from(order.longest_load(&lengths, ctas)) / even)
    }

    #[test]
    fn every_tile_comes_once() {
        for (heads, section) in [(1, 1), (7, 1), (6, 2), (8, 4), (8, 8), (7, 3), (7, 7), (9, 4)] {
            for (query_tiles, run_bits) in [(5, 0), (5, 1), (6, 1), (1, 1)] {
                let tiles = query_tiles * heads;
                let order = Order { query_tiles, heads, matrices: heads, tiles, section, run_bits };
                let mut times = vec![0; query_tiles as usize];
                (0..order.tiles).for_each(|index| times[order.row_tile(index) as usize] += 1);
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
