//! A strip meets keys that all of its rows attend, with the instructions of both products woven into those that weigh.
//!
//! Tile units multiply on their own while vectors weigh, but a processor that looks a few hundred instructions ahead sees
//! only one of the two where they follow each other. So a product of tiles comes behind every pair or two of keys that are
//! weighed. A *part* of a strip is 32 lanes, a *block* 32 keys, and a *unit* two blocks in one part:
//!
//! ```text
//! weights    block 0    block 1    of a unit   | block 0    block 1    of the next    |
//! scores     block 1    block 0    of the next | block 1    ..                        |
//! output     of the unit before                | of the unit                          | ..
//! ```
//!
//! The scores of a block live in a ring of two, and the weights of two units are kept. With query, output, keys and values
//! of 64 columns these are the 44 KiB that a part touches from one unit to the next, and a first-level cache has 48: wider
//! strips were slower, and asking for keys and values early was too (`docs/experiments.md`). Nothing that is stored is
//! loaded before it can have left the store buffer, since stores are not forwarded to tile registers or from them.

use super::narrow::{Column, LIFT, MOST, Scale, added, raised};
use super::pack::{LANES, PAIRS};
use core::arch::x86_64::{
    __m512, _CMP_GT_OQ, _mm512_add_ps, _mm512_cmp_ps_mask, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mul_ps,
    _mm512_scalef_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps, _mm512_storeu_si512, _mm512_sub_ps,
};
use core::ops::Range;

/// Eight registers of sixteen rows of 64 bytes. What one call leaves in them, the next finds.
pub(crate) trait TileUnit {
    fn zero<const TILE: usize>(&self);

    /// # Safety
    ///
    /// Sixteen rows of 64 bytes are at the place, `stride` bytes apart.
    unsafe fn load<const TILE: usize>(&self, place: *const u8, stride: usize);

    /// # Safety
    ///
    /// As [`load`](Self::load).
    unsafe fn store<const TILE: usize>(&self, place: *mut u8, stride: usize);

    /// Adds the product of two tiles of pairs to a tile of sums.
    fn multiply<const SUM: usize, const LEFT: usize, const RIGHT: usize>(&self);
}

/// Keys of a block, and lanes of a part.
pub(crate) const BLOCK: usize = 2 * LANES;

/// Blocks of a tile of keys.
pub(crate) const TILE_BLOCKS: usize = 4;

/// Blocks of a unit, but for the last: the output is loaded and stored once for each.
const UNIT_BLOCKS: usize = 2;

/// Elements of a tile register of sums or pairs.
const TILE: usize = LANES * LANES;

/// Bytes from a row to the next of a tile that lies by itself.
const ROW_BYTES: usize = 64;

/// Scores of a block.
const BLOCK_SCORES: usize = BLOCK * BLOCK;

/// Pairs of keys of a block.
const BLOCK_PAIRS: usize = BLOCK / 2;

/// Weights of a unit, in pairs.
const UNIT_WEIGHTS: usize = UNIT_BLOCKS * BLOCK_SCORES / 2;

/// Room for scores: the ring, and those of a unit whose reference must follow.
pub(crate) const SCORE_ROOM: usize = (2 + UNIT_BLOCKS) * BLOCK_SCORES;

/// Room for the weights of two units.
pub(crate) const WEIGHT_ROOM: usize = 2 * UNIT_WEIGHTS;

/// What meets: operands as [`pack`](super::pack) has packed them, and the softmax of the strip so far.
#[derive(Clone, Copy)]
pub(crate) struct Meeting {
    /// A multiple of [`BLOCK`].
    pub(crate) lanes: usize,
    /// Columns of the values; a multiple of sixteen.
    pub(crate) columns: usize,
    /// The first block of the tiles, and how many; at least one.
    pub(crate) first_block: usize,
    pub(crate) blocks: usize,
    /// Panels of query and keys.
    pub(crate) panels: usize,
    /// The first tile, and pairs from one panel and one tile to the next.
    pub(crate) key: *const u32,
    pub(crate) key_panel: usize,
    pub(crate) key_tile: usize,
    /// The first panel of the first tile, and pairs from one tile to the next.
    pub(crate) value: *const u32,
    pub(crate) value_tile: usize,
    pub(crate) query: *const u32,
    /// What scores are multiplied by; above zero.
    pub(crate) factor: f32,
    /// Room for [`SCORE_ROOM`] elements.
    pub(crate) scores: *mut f32,
    /// Room for [`WEIGHT_ROOM`] pairs.
    pub(crate) weights: *mut u32,
    /// The running maximum of each lane: finite, or minus infinity for all lanes.
    pub(crate) maximum: *mut f32,
    pub(crate) sum: *mut f32,
    /// A row of `lanes` for each column.
    pub(crate) output: *mut f32,
}

/// Some blocks of a part.
#[derive(Clone, Copy)]
struct Unit {
    index: usize,
    part: usize,
    first_block: usize,
    blocks: usize,
}

/// A block of a part.
#[derive(Clone, Copy)]
struct Place {
    part: usize,
    block: usize,
}

/// Where the scores of the first sixteen lanes of a block go, and how far behind them those of the others.
#[derive(Clone, Copy)]
struct ScorePlace {
    first: *mut f32,
    column_size: usize,
}

impl Meeting {
    fn parts(&self) -> usize {
        self.lanes / BLOCK
    }

    fn units(&self) -> usize {
        self.blocks.div_ceil(UNIT_BLOCKS) * self.parts()
    }

    /// All parts of some keys, then those of the next.
    fn unit(&self, index: usize) -> Unit {
        let first_block = index / self.parts() * UNIT_BLOCKS;
        Unit { index, part: index % self.parts(), first_block, blocks: UNIT_BLOCKS.min(self.blocks - first_block) }
    }

    /// The block that is weighed behind a block of a unit.
    fn next(&self, unit: Unit, block: usize) -> Option<Place> {
        if block + 1 < unit.blocks {
            return Some(Place { part: unit.part, block: unit.first_block + block + 1 });
        }
        let next = (unit.index + 1 < self.units()).then(|| self.unit(unit.index + 1));
        next.map(|unit| Place { part: unit.part, block: unit.first_block })
    }

    /// What of the output of the unit before is added up while a block of a unit is weighed.
    fn output_due(&self, unit: Unit, block: usize) -> Option<(Unit, Range<usize>)> {
        let before = unit.index.checked_sub(1).map(|index| self.unit(index))?;
        let columns = self.columns / LANES;
        Some((before, columns * block / unit.blocks..columns * (block + 1) / unit.blocks))
    }

    fn lane_bytes(&self) -> usize {
        self.lanes * size_of::<f32>()
    }

    /// Sixteen lanes of the query.
    fn query(&self, place: Place, half: usize, panel: usize) -> *const u8 {
        self.query.wrapping_add(panel * PAIRS * self.lanes + place.part * BLOCK + half * LANES).cast()
    }

    /// Sixteen keys.
    fn key(&self, place: Place, half: usize, panel: usize) -> *const u8 {
        let block = self.first_block + place.block;
        let row = block % TILE_BLOCKS * BLOCK + half * LANES;
        self.key.wrapping_add(block / TILE_BLOCKS * self.key_tile + panel * self.key_panel + row * PAIRS).cast()
    }

    /// Sixteen columns of the values of a block of keys.
    fn value(&self, column: usize, block: usize) -> *const u8 {
        let block = self.first_block + block;
        let panel = block % TILE_BLOCKS * self.columns;
        self.value.wrapping_add(block / TILE_BLOCKS * self.value_tile + (panel + column * LANES) * PAIRS).cast()
    }

    /// The weights of a block of a unit, in sixteen lanes.
    fn weights(&self, unit: Unit, block: usize, half: usize) -> *mut u32 {
        self.weights.wrapping_add(unit.index % 2 * UNIT_WEIGHTS + (half * UNIT_BLOCKS + block) * TILE)
    }

    /// Sixteen columns of the output, in sixteen lanes.
    fn output(&self, column: usize, part: usize, half: usize) -> *mut u8 {
        self.output.wrapping_add(column * LANES * self.lanes + part * BLOCK + half * LANES).cast()
    }

    /// One of the two places of the ring.
    fn ring(&self, turn: usize) -> ScorePlace {
        ScorePlace { first: self.scores.wrapping_add(turn % 2 * BLOCK_SCORES), column_size: BLOCK * LANES }
    }

    /// What is subtracted from the scores of sixteen lanes.
    ///
    /// # Safety
    ///
    /// There are so many lanes.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
    #[inline]
    unsafe fn reference(&self, lane: usize) -> __m512 {
        // SAFETY: the caller vouches for the lanes.
        _mm512_sub_ps(unsafe { _mm512_loadu_ps(self.maximum.add(lane)) }, _mm512_set1_ps(LIFT))
    }

    /// Sixteen lanes of scores that are all there, and their weights.
    fn column(&self, scores: *const f32, weights: *mut u32, blocks: usize) -> Column {
        let (keys, pairs) = (blocks * BLOCK, blocks * BLOCK_PAIRS);
        Column { scores, weights, lanes: LANES, keys, pairs, factor: self.factor }
    }
}

/// The whole meeting.
///
/// # Safety
///
/// Everything that [`Meeting`] speaks of is there, and the processor has what is named here.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
pub(crate) unsafe fn attend(tiles: &impl TileUnit, meeting: &Meeting) {
    let (parts, units) = (meeting.parts(), meeting.units());
    let mut turn = 0;
    // SAFETY: the caller vouches for everything; blocks and parts are those of the meeting.
    unsafe {
        let is_first = *meeting.maximum == f32::NEG_INFINITY;
        let scores = Some((Place { part: 0, block: 0 }, meeting.ring(turn)));
        weave(tiles, meeting, &mut Weigher::idle(), Products { scores, output: None });
        for unit in (0..units).map(|index| meeting.unit(index)) {
            if is_first && unit.index < parts {
                begin(meeting, unit.part, meeting.ring(turn));
            }
            let mut sums = [_mm512_setzero_ps(); 2];
            for block in 0..unit.blocks {
                let mut weigher = Weigher::new(meeting, unit, block, meeting.ring(turn), sums);
                turn += 1;
                let scores = meeting.next(unit, block).map(|next| (next, meeting.ring(turn)));
                let output = meeting.output_due(unit, block);
                weave(tiles, meeting, &mut weigher, Products { scores, output });
                sums = weigher.sums;
            }
            settle(tiles, meeting, unit, sums);
        }
        let output = Some((meeting.unit(units - 1), 0..meeting.columns / LANES));
        weave(tiles, meeting, &mut Weigher::idle(), Products { scores: None, output });
    }
}

/// Products that are done while a block is weighed.
struct Products {
    /// A block whose scores are wanted, and where they go.
    scores: Option<(Place, ScorePlace)>,
    /// A unit whose weights are there, and the columns of its output that are due, in sixteens.
    output: Option<(Unit, Range<usize>)>,
}

/// Does products, those of scores and those of the output in turn, so that neither waits for its last sums: an instruction
/// takes 16 cycles, but 52 until they are there. Weighs some pairs behind each.
///
/// # Safety
///
/// Everything that the meeting and the weigher speak of is there.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
unsafe fn weave(tiles: &impl TileUnit, meeting: &Meeting, weigher: &mut Weigher, products: Products) {
    let stride = meeting.lane_bytes();
    let score_turns = if products.scores.is_some() { 2 * meeting.panels } else { 0 };
    let output_turns = products.output.as_ref().map_or(0, |(unit, columns)| unit.blocks * columns.len());
    let (place, scores) = products.scores.unwrap_or((Place { part: 0, block: 0 }, meeting.ring(0)));
    let (unit, columns) = products.output.unwrap_or((meeting.unit(0), 0..0));
    let (mut half, mut panel) = (0, 0);
    let (mut column, mut block) = (columns.start, 0);
    // A copy, so that its sums stay in registers.
    let mut local = *weigher;
    local.pace(2 * (score_turns + output_turns));
    // SAFETY: the caller vouches for the operands.
    unsafe {
        for turn in 0..score_turns.max(output_turns) {
            if turn < score_turns {
                if panel == 0 {
                    tiles.zero::<0>();
                    tiles.zero::<1>();
                }
                tiles.load::<4>(meeting.key(place, half, panel), ROW_BYTES);
                tiles.load::<5>(meeting.query(place, 0, panel), stride);
                tiles.multiply::<0, 4, 5>();
                local.step();
                tiles.load::<5>(meeting.query(place, 1, panel), stride);
                tiles.multiply::<1, 4, 5>();
                local.step();
                panel += 1;
            }
            if turn < output_turns {
                if block == 0 {
                    tiles.load::<2>(meeting.output(column, unit.part, 0), stride);
                    tiles.load::<3>(meeting.output(column, unit.part, 1), stride);
                }
                tiles.load::<6>(meeting.value(column, unit.first_block + block), ROW_BYTES);
                tiles.load::<7>(meeting.weights(unit, block, 0).cast(), ROW_BYTES);
                tiles.multiply::<2, 6, 7>();
                local.step();
                tiles.load::<7>(meeting.weights(unit, block, 1).cast(), ROW_BYTES);
                tiles.multiply::<3, 6, 7>();
                local.step();
                block += 1;
            }
            if turn < score_turns && panel == meeting.panels {
                tiles.store::<0>(scores.first.wrapping_add(half * TILE).cast(), ROW_BYTES);
                tiles.store::<1>(scores.first.wrapping_add(scores.column_size + half * TILE).cast(), ROW_BYTES);
                (half, panel) = (half + 1, 0);
            }
            if turn < output_turns && block == unit.blocks {
                tiles.store::<2>(meeting.output(column, unit.part, 0), stride);
                tiles.store::<3>(meeting.output(column, unit.part, 1), stride);
                (column, block) = (column + 1, 0);
            }
        }
        local.weigh_to(local.pairs);
    }
    *weigher = local;
}

/// Weighs the scores of a block, a pair of keys in 32 lanes at a time.
#[derive(Clone, Copy)]
struct Weigher {
    scales: [Scale; 2],
    sums: [__m512; 2],
    scores: [*const f32; 2],
    weights: [*mut u32; 2],
    /// Pairs that there are, and that have been weighed.
    pairs: usize,
    pair: usize,
    /// Pairs that should have been weighed, and pairs of a step, in 2^16 parts of 1.
    due: usize,
    pace: usize,
}

impl Weigher {
    /// For a block of a unit, whose scores are there.
    ///
    /// # Safety
    ///
    /// The meeting has such a unit.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
    #[inline]
    unsafe fn new(meeting: &Meeting, unit: Unit, block: usize, scores: ScorePlace, sums: [__m512; 2]) -> Self {
        let lane = unit.part * BLOCK;
        // SAFETY: the caller vouches for the lanes.
        let references = unsafe { [meeting.reference(lane), meeting.reference(lane + LANES)] };
        Self {
            scales: [Scale::new(meeting.factor, references[0]), Scale::new(meeting.factor, references[1])],
            sums,
            scores: [scores.first, scores.first.wrapping_add(scores.column_size)],
            weights: [meeting.weights(unit, block, 0), meeting.weights(unit, block, 1)],
            pairs: BLOCK_PAIRS,
            ..Self::idle()
        }
    }

    /// With nothing to weigh.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
    #[inline]
    fn idle() -> Self {
        Self {
            scales: [Scale::new(0.0, _mm512_setzero_ps()); 2],
            sums: [_mm512_setzero_ps(); 2],
            scores: [core::ptr::null(); 2],
            weights: [core::ptr::null_mut(); 2],
            pairs: 0,
            pair: 0,
            due: 0,
            pace: 0,
        }
    }

    /// Spreads the block over so many steps.
    fn pace(&mut self, steps: usize) {
        self.pace = (self.pairs << 16).div_ceil(steps.max(1));
    }

    /// Weighs what is due.
    ///
    /// # Safety
    ///
    /// The scores of the block are there, and room for its weights.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
    #[inline]
    unsafe fn step(&mut self) {
        self.due += self.pace;
        // SAFETY: the caller vouches for the block.
        unsafe { self.weigh_to((self.due >> 16).min(self.pairs)) }
    }

    /// Weighs all pairs before `end`.
    ///
    /// # Safety
    ///
    /// As [`step`](Self::step), and there are so many pairs.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
    #[inline]
    unsafe fn weigh_to(&mut self, end: usize) {
        while self.pair < end {
            for half in 0..2 {
                // SAFETY: the caller vouches for the block.
                unsafe {
                    let scores = self.scores[half].add(2 * self.pair * LANES);
                    let bits = self.scales[half].pair(scores, scores.add(LANES));
                    _mm512_storeu_si512(self.weights[half].add(self.pair * LANES).cast(), bits);
                    self.sums[half] = added(self.sums[half], bits);
                }
            }
            self.pair += 1;
        }
    }
}

/// The first reference of a part, from the scores of its first block.
///
/// # Safety
///
/// There is such a part, and the scores of a block.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
unsafe fn begin(meeting: &Meeting, part: usize, scores: ScorePlace) {
    for half in 0..2 {
        let lane = part * BLOCK + half * LANES;
        // SAFETY: the caller vouches for the block.
        unsafe {
            let column = meeting.column(scores.first.add(half * scores.column_size), core::ptr::null_mut(), 1);
            let new = raised(meeting.reference(lane), &column);
            _mm512_storeu_ps(meeting.maximum.add(lane), _mm512_add_ps(new, _mm512_set1_ps(LIFT)));
        }
    }
}

/// Adds the weights of a unit to its sums, unless some score was too far above its reference: then the unit is weighed
/// again with one that follows.
///
/// # Safety
///
/// Everything that the meeting speaks of is there, and it has such a unit.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
unsafe fn settle(tiles: &impl TileUnit, meeting: &Meeting, unit: Unit, sums: [__m512; 2]) {
    let most = _mm512_set1_ps(MOST);
    // SAFETY: the caller vouches for the meeting.
    unsafe {
        if sums.iter().any(|&sum| _mm512_cmp_ps_mask::<_CMP_GT_OQ>(sum, most) != 0) {
            weigh_again(tiles, meeting, unit);
            return;
        }
        for (half, added) in sums.into_iter().enumerate() {
            let place = meeting.sum.add(unit.part * BLOCK + half * LANES);
            _mm512_storeu_ps(place, _mm512_add_ps(_mm512_loadu_ps(place), added));
        }
    }
}

/// The weights of a unit again, with references as high as its scores. All units before it are in the output.
///
/// # Safety
///
/// As [`settle`].
#[cold]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
unsafe fn weigh_again(tiles: &impl TileUnit, meeting: &Meeting, unit: Unit) {
    // Behind the ring, where scores of the next unit are already.
    let room = meeting.scores.wrapping_add(2 * BLOCK_SCORES);
    let column_size = UNIT_BLOCKS * BLOCK * LANES;
    // SAFETY: the caller vouches for the meeting.
    unsafe {
        for block in 0..unit.blocks {
            let place = Place { part: unit.part, block: unit.first_block + block };
            let scores = ScorePlace { first: room.add(block * BLOCK * LANES), column_size };
            weave(tiles, meeting, &mut Weigher::idle(), Products { scores: Some((place, scores)), output: None });
        }
        for half in 0..2 {
            let lane = unit.part * BLOCK + half * LANES;
            let column = meeting.column(room.add(half * column_size), meeting.weights(unit, 0, half), unit.blocks);
            let old = meeting.reference(lane);
            let new = raised(old, &column);
            let added = column.weigh(new);
            let correction = _mm512_scalef_ps(_mm512_set1_ps(1.0), _mm512_sub_ps(old, new));
            let sum = meeting.sum.add(lane);
            _mm512_storeu_ps(sum, _mm512_fmadd_ps(_mm512_loadu_ps(sum), correction, added));
            _mm512_storeu_ps(meeting.maximum.add(lane), _mm512_add_ps(new, _mm512_set1_ps(LIFT)));
            for column in 0..meeting.columns {
                let place = meeting.output.add(column * meeting.lanes + lane);
                _mm512_storeu_ps(place, _mm512_mul_ps(_mm512_loadu_ps(place), correction));
            }
        }
    }
}
