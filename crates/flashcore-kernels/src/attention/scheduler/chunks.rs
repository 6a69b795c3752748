//! Chunk scheduler: balanced split-KV for sequences whose lengths only the device knows.
//!
//! The keys of every sequence are divided into chunks of `chunk_keys` keys, counted from its key 0. A chunk of one tile of
//! query rows of one head is a unit of work; persistent CTAs take units in turn, so that one long sequence among short ones
//! is spread over all SMs. Units are numbered sequence by sequence; a warp finds the sequence of a unit with a prefix sum
//! over the numbers of units of 32 sequences at a time, from lengths that it reads itself.
//!
//! The boundaries of chunks depend on the plan alone, every chunk is computed for itself, and the combine kernel merges
//! chunks in the order of keys: the bits of a row depend on its query, its keys and the plan, not on the rest of the batch
//! (batch invariance).

use flashcore_ir::types::{S32, U32};
use flashcore_ir::{Builder, ReduceOp, Reg, ShuffleMode, SpecialRegister};

use super::dynamic;
use crate::attention::TileContext;
use crate::attention::tile_coord::TileCoord;
use crate::parameters::{Parameters, SplitParameters};
use crate::primitives::LANES;
use crate::specialization::Specialization;

/// Parameters of kernels with chunks, after the others.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ChunkParameters {
    /// Partial results: as many splits as the longest sequence has chunks.
    pub(crate) splits: SplitParameters,
    /// Keys of a chunk.
    pub(crate) chunk_keys: Reg<U32>,
    /// Sequences of the batch.
    pub(crate) sequences: Reg<U32>,
    /// Query heads, or KV heads where their rows are packed.
    pub(crate) heads: Reg<U32>,
}

impl ChunkParameters {
    /// Declares and loads them.
    pub(crate) fn load(k: &mut Builder, parameters: &Parameters) -> Self {
        Self {
            splits: SplitParameters::load(k, parameters),
            chunk_keys: k.parameter("chunk_keys"),
            sequences: k.parameter("sequences"),
            heads: k.parameter("chunk_heads"),
        }
    }
}

/// The chunks of a sequence: from the first that some row attends to the last.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SequenceChunks {
    pub(crate) first: Reg<U32>,
    /// At least 1, so that rows without keys are written too.
    pub(crate) count: Reg<U32>,
}

impl SequenceChunks {
    /// The chunks of the sequence of a tile, whichever tile of it that is.
    pub(crate) fn of(k: &mut Builder, context: &TileContext, chunk_keys: Reg<U32>) -> Self {
        let first_row = k.copy(0u32);
        let last_row = k.eval(context.end_row.max(1) - 1);
        let begin = context.first_key(k, first_row);
        let end = context.end_key(k, last_row);
        let (begin, end) = (begin.unsigned(), end.unsigned());
        let first = k.eval(begin / chunk_keys);
        let last = k.eval((end + (chunk_keys - 1)) / chunk_keys);
        let count = k.eval((last.max(first + 1)) - first);
        Self { first, count }
    }
}

/// A unit of work: a chunk of the keys of one tile of query rows.
pub(crate) struct ChunkUnit {
    pub(crate) coord: TileCoord,
    /// The chunk among those of the sequence.
    pub(crate) index: Reg<U32>,
    /// The first key of the chunk.
    pub(crate) first_key: Reg<S32>,
    /// True if the sequence has this chunk alone.
    pub(crate) count: Reg<U32>,
}

/// The units of a batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Units {
    /// Keys of a chunk; `None` where a unit has all keys of its tile.
    pub(crate) chunk_keys: Option<Reg<U32>>,
    /// Sequences of the batch.
    pub(crate) sequences: Reg<U32>,
    /// Query heads, or KV heads where their rows are packed.
    pub(crate) heads: Reg<U32>,
    /// True for LPT order: of a sequence, the last tiles of all heads first, which attend most keys.
    pub(crate) last_tiles_first: bool,
    /// True if the next unit comes from a counter, and is not a round of CTAs further on.
    pub(crate) dynamic: bool,
}

impl From<ChunkParameters> for Units {
    fn from(ChunkParameters { chunk_keys, sequences, heads, .. }: ChunkParameters) -> Self {
        Self { chunk_keys: Some(chunk_keys), sequences, heads, last_tiles_first: false, dynamic: false }
    }
}

/// Visits the units of this CTA.
pub(crate) fn each_unit(
    k: &mut Builder,
    parameters: &Parameters,
    chunks: Units,
    specialization: Specialization,
    (tile_m, pack_gqa): (u32, bool),
    visit: impl FnOnce(&mut Builder, ChunkUnit),
) {
    let thread = k.special(SpecialRegister::ThreadX);
    let lane = k.and(thread, LANES - 1);
    let cta = k.special(SpecialRegister::CtaX);
    let unit = k.copy(cta);
    let ctas = k.special(SpecialRegister::GridX);
    // Serpentine: a CTA that was first in a round is last in the next, which evens out tiles of different length.
    let serpentine = (!chunks.dynamic).then(|| {
        let both = k.mul(ctas, 2u32);
        (both, k.eval(both - 1 - cta * 2))
    });
    let group = parameters.heads_per_key_head;

    // The sequences of this warp's lanes: from `first_sequence` on, with `before` units in those before them.
    let first_sequence = k.copy(0u32);
    let before = k.copy(0u32);
    let scan = Scan::unset(k);
    let rows_per_head = |k: &mut Builder, rows| if pack_gqa { k.mul(rows, group) } else { rows };
    let scan_sequences = |k: &mut Builder| {
        let sequence = k.add(first_sequence, lane);
        let exists = k.eval(sequence.lt(chunks.sequences));
        let last = k.sub(chunks.sequences, 1u32);
        let batch = k.min(sequence, last);
        let zero = k.copy(0u32);
        let coord = TileCoord { first_row: zero, head: zero, kv_head: zero, batch };
        let context = TileContext::at(k, parameters, specialization, coord, Some(chunks.heads));
        let of_sequence = match chunks.chunk_keys {
            Some(chunk_keys) => SequenceChunks::of(k, &context, chunk_keys),
            None => SequenceChunks { first: zero, count: k.copy(1u32) },
        };
        let rows = rows_per_head(k, context.end_row);
        let mut tiles = k.eval((rows + (tile_m - 1)) / tile_m);
        let mut of_sequence = of_sequence;
        if specialization.append.is_some() {
            // New keys are appended whether or not a row attends them: a sequence without rows has one empty tile.
            let has_rows = k.eval(rows.gt(0));
            of_sequence.count = k.select(has_rows, of_sequence.count, 1u32);
            tiles = k.max(tiles, 1u32);
        }
        let units = k.eval(of_sequence.count * tiles * chunks.heads);
        let units = k.select(exists, units, 0u32);
        scan.set(k, lane, of_sequence, tiles, units);
    };
    k.section("scan", scan_sequences);
    k.while_uniform(
        |k| k.eval(first_sequence.lt(chunks.sequences)),
        |k| {
            let end = k.add(before, scan.total);
            let is_here = k.eval(unit.lt(end));
            k.if_else_uniform(
                is_here,
                |k| {
                    let found = k.section("find", |k| scan.find(k, lane, unit, before));
                    let (index, tile_and_head, first_key) = match chunks.chunk_keys {
                        Some(chunk_keys) => {
                            let index = k.rem(found.unit, found.chunks.count);
                            let first_key = k.eval(((found.chunks.first + index) * chunk_keys).signed());
                            (index, k.div(found.unit, found.chunks.count), first_key)
                        }
                        None => (k.copy(0u32), found.unit, k.copy(0i32)),
                    };
                    let (tile, head) = if chunks.last_tiles_first {
                        let tile = k.eval(found.tiles - 1 - tile_and_head / chunks.heads);
                        (tile, k.rem(tile_and_head, chunks.heads))
                    } else {
                        (k.rem(tile_and_head, found.tiles), k.div(tile_and_head, found.tiles))
                    };
                    let batch = k.add(first_sequence, found.lane);
                    let (head, kv_head) =
                        if pack_gqa { (k.mul(head, group), head) } else { (head, k.div(head, group)) };
                    let first_row = k.mul(tile, tile_m);
                    let coord = TileCoord { first_row, head, kv_head, batch };
                    visit(k, ChunkUnit { coord, index, first_key, count: found.chunks.count });
                    if let Some((both, step)) = serpentine {
                        k.add_to(unit, step);
                        let back = k.sub(both, step);
                        k.set(step, back);
                    } else {
                        let next = dynamic::next_unit(k, parameters, lane);
                        k.set(unit, next);
                    }
                },
                |k| {
                    k.set(before, end);
                    k.add_to(first_sequence, LANES);
                    k.section("scan", scan_sequences);
                },
            );
        },
    );
}

/// The units of 32 sequences, one for each lane.
struct Scan {
    first: Reg<U32>,
    count: Reg<U32>,
    tiles: Reg<U32>,
    /// Units of the lane's sequence.
    units: Reg<U32>,
    /// Units of the lane's sequence and of those before it.
    inclusive: Reg<U32>,
    /// Units of all lanes.
    total: Reg<U32>,
}

/// The sequence of a unit.
struct UnitSequence {
    lane: Reg<U32>,
    chunks: SequenceChunks,
    tiles: Reg<U32>,
    /// The unit among those of the sequence.
    unit: Reg<U32>,
}

impl Scan {
    fn unset(k: &mut Builder) -> Self {
        let [first, count, tiles, units, inclusive, total] = [(); 6].map(|()| k.copy(0u32));
        Self { first, count, tiles, units, inclusive, total }
    }

    fn set(&self, k: &mut Builder, lane: Reg<U32>, chunks: SequenceChunks, tiles: Reg<U32>, units: Reg<U32>) {
        k.set(self.first, chunks.first);
        k.set(self.count, chunks.count);
        k.set(self.tiles, tiles);
        k.set(self.units, units);
        k.set(self.inclusive, units);
        for distance in [1u32, 2, 4, 8, 16] {
            let lower = k.shuffle(ShuffleMode::Up, self.inclusive, distance);
            let has_lower = k.eval(lane.ge(distance));
            let lower = k.select(has_lower, lower, 0u32);
            k.add_to(self.inclusive, lower);
        }
        let total = k.shuffle(ShuffleMode::Index, self.inclusive, LANES - 1);
        k.set(self.total, total);
    }

    /// The sequence of a unit that one of the lanes has.
    fn find(&self, k: &mut Builder, lane: Reg<U32>, unit: Reg<U32>, before: Reg<U32>) -> UnitSequence {
        let unit = k.sub(unit, before);
        let is_past = k.eval(self.inclusive.gt(unit));
        let candidate = k.select(is_past, lane, LANES - 1);
        let lane = k.reduce_warp(ReduceOp::Min, candidate);
        let exclusive = k.sub(self.inclusive, self.units);
        let [first, count, tiles, exclusive] = [self.first, self.count, self.tiles, exclusive]
            .map(|register| k.shuffle(ShuffleMode::Index, register, lane));
        UnitSequence { lane, chunks: SequenceChunks { first, count }, tiles, unit: k.sub(unit, exclusive) }
    }
}

/// The most units of a batch, and the most chunks of a sequence.
pub(crate) fn most_units([sequences, heads, tiles, key_length, chunk_keys]: [u64; 5]) -> (u64, u64) {
    let chunks = key_length.div_ceil(chunk_keys).max(1);
    (sequences * heads * tiles * chunks, chunks)
}
