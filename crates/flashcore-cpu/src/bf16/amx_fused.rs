//! A strip meets keys that all of its rows attend, with the instructions of both products woven into those that weigh.
//!
//! Tile units multiply on their own while vectors weigh, but a processor that looks a few hundred instructions ahead sees
//! only one of the two where they follow each other. So a product of tiles comes behind every pair or two of keys that are
//! weighed. A *part* of a strip is 32 lanes, a *block* 32 keys, and a *unit* two blocks in one part:
//!
//! ```text
//! products   scores of unit 1    | output of unit 0    | scores of unit 2    | output of unit 1    | ..
//! weights    block 1 of unit 0   | block 0 of unit 1   | block 1 of unit 1   | block 0 of unit 2   | ..
//! ```
//!
//! Loads are what tile units wait for, so that registers keep what they can: a query of up to 64 columns while its products
//! with the keys of a unit are made, and the weights of a unit while those with its values are.
//!
//! The scores of a unit go where those of the unit before have just been weighed, and weights where they have just been
//! loaded. With query, output, keys and values of 64 columns these are the 40 KiB that a part touches from one unit to the
//! next, and a first-level cache has 48: wider panels were slower, and asking for keys and values early was too
//! (`docs/experiments.md`). Little that is stored is loaded before it can have left the store buffer, since stores are not
//! forwarded to tile registers or from them.

use super::pack::{LANES, PAIRS};
use super::softmax::exp2;
use super::softmax16::{Column, LIFT, MOST, Scale, added, update_row_max};
use core::arch::x86_64::{
    __m512, _CMP_GT_OQ, _mm512_add_ps, _mm512_cmp_ps_mask, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mul_ps,
    _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps, _mm512_storeu_si512, _mm512_sub_ps,
};

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

/// Blocks of a unit, but for the last: the output is loaded and stored once for each, and four registers hold its weights.
const UNIT_BLOCKS: usize = 2;

/// Panels of a query that four registers hold.
const PANELS_HELD: usize = 2;

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

/// BlockScratch for scores: those of a unit, and of one whose reference must follow.
pub(crate) const SCORE_SCRATCH: usize = 2 * UNIT_BLOCKS * BLOCK_SCORES;

/// BlockScratch for the weights of a unit.
pub(crate) const WEIGHT_SCRATCH: usize = UNIT_WEIGHTS;

/// What meets: operands as [`pack`](super::pack) has packed them, and the softmax of the strip so far.
#[derive(Clone, Copy)]
pub(crate) struct FusedArgs {
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
    /// BlockScratch for [`SCORE_ROOM`] elements.
    pub(crate) scores: *mut f32,
    /// BlockScratch for [`WEIGHT_ROOM`] pairs.
    pub(crate) weights: *mut u32,
    /// The running maximum of each lane: finite, or minus infinity for all lanes.
    pub(crate) row_max: *mut f32,
    pub(crate) row_sum: *mut f32,
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

/// Where the scores of a unit go: of the first sixteen lanes and keys, and how far behind them those of the other lanes and
/// of the next block are.
#[derive(Clone, Copy)]
struct ScorePlace {
    first: *mut f32,
    column_size: usize,
    block_size: usize,
}

impl ScorePlace {
    /// The scores of a block in sixteen lanes.
    fn column(self, block: usize, half: usize) -> *mut f32 {
        self.first.wrapping_add(block * self.block_size + half * self.column_size)
    }

    /// Those of sixteen keys, counted from the first of the unit.
    fn tile(self, sixteen: usize, half: usize) -> *mut u8 {
        self.column(sixteen / 2, half).wrapping_add(sixteen % 2 * TILE).cast()
    }
}

impl FusedArgs {
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

    fn lane_bytes(&self) -> usize {
        self.lanes * size_of::<f32>()
    }

    /// Sixteen lanes of the query.
    fn query(&self, part: usize, half: usize, panel: usize) -> *const u8 {
        self.query.wrapping_add(panel * PAIRS * self.lanes + part * BLOCK + half * LANES).cast()
    }

    /// Sixteen keys, counted from the first of a unit.
    fn key(&self, unit: Unit, sixteen: usize, panel: usize) -> *const u8 {
        let block = self.first_block + unit.first_block + sixteen / 2;
        let row = block % TILE_BLOCKS * BLOCK + sixteen % 2 * LANES;
        self.key.wrapping_add(block / TILE_BLOCKS * self.key_tile + panel * self.key_panel + row * PAIRS).cast()
    }

    /// Sixteen columns of the values of a block of a unit.
    fn value(&self, unit: Unit, column: usize, block: usize) -> *const u8 {
        let block = self.first_block + unit.first_block + block;
        let panel = block % TILE_BLOCKS * self.columns;
        self.value.wrapping_add(block / TILE_BLOCKS * self.value_tile + (panel + column * LANES) * PAIRS).cast()
    }

    /// The weights of a block of a unit, in sixteen lanes.
    fn weights(&self, block: usize, half: usize) -> *mut u32 {
        self.weights.wrapping_add((half * UNIT_BLOCKS + block) * TILE)
    }

    /// Sixteen columns of the output, in sixteen lanes.
    fn output(&self, column: usize, part: usize, half: usize) -> *mut u8 {
        self.output.wrapping_add(column * LANES * self.lanes + part * BLOCK + half * LANES).cast()
    }

    /// The scores of a unit.
    fn unit_scores(&self) -> ScorePlace {
        ScorePlace { first: self.scores, column_size: BLOCK * LANES, block_size: BLOCK_SCORES }
    }

    /// Where all keys of a unit lie one behind the other, beside [`unit_scores`](Self::unit_scores).
    fn spare_scores(&self) -> ScorePlace {
        let first = self.scores.wrapping_add(UNIT_BLOCKS * BLOCK_SCORES);
        ScorePlace { first, column_size: UNIT_BLOCKS * BLOCK * LANES, block_size: BLOCK * LANES }
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
        _mm512_sub_ps(unsafe { _mm512_loadu_ps(self.row_max.add(lane)) }, _mm512_set1_ps(LIFT))
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
/// Everything that [`FusedArgs`] speaks of is there, and the processor has what is named here.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
pub(crate) unsafe fn attend(tiles: &impl TileUnit, args: &FusedArgs) {
    let units = args.units();
    let place = args.unit_scores();
    // SAFETY: the caller vouches for everything; blocks and parts are those of the meeting.
    unsafe {
        let is_first = *args.row_max == f32::NEG_INFINITY;
        let begin_unit = |unit: Unit| {
            if is_first && unit.index < args.parts() {
                init_row_max(args, unit.part);
            }
            BlockSoftmax::new(args, unit, 0)
        };
        let mut unit = args.unit(0);
        score(tiles, args, unit, place, &mut BlockSoftmax::idle());
        let mut softmax = begin_unit(unit);
        softmax.advance_to(BLOCK_PAIRS);
        loop {
            let mut sums = softmax.sums;
            softmax = BlockSoftmax::idle();
            if unit.blocks > 1 {
                softmax = BlockSoftmax { sums, ..BlockSoftmax::new(args, unit, 1) };
            }
            let next = (unit.index + 1 < units).then(|| args.unit(unit.index + 1));
            if let Some(next) = next {
                score(tiles, args, next, place, &mut softmax);
            }
            softmax.advance_to(softmax.pairs);
            if unit.blocks > 1 {
                sums = softmax.sums;
            }
            commit_sums(tiles, args, unit, sums);
            softmax = next.map_or(BlockSoftmax::idle(), begin_unit);
            accumulate(tiles, args, unit, &mut softmax);
            let Some(next) = next else { return };
            unit = next;
        }
    }
}

/// The scores of a unit. Weighs some pairs of the unit before behind each product; its first block has been weighed.
///
/// An instruction takes 16 cycles, but 52 until its sums are there; those of other sums stand between.
///
/// # Safety
///
/// Everything that the meeting and the softmax speak of is there, and room for the scores.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
unsafe fn score(tiles: &impl TileUnit, args: &FusedArgs, unit: Unit, place: ScorePlace, softmax: &mut BlockSoftmax) {
    let (stride, panels) = (args.lane_bytes(), args.panels);
    // A copy, so that its sums stay in registers.
    let mut local = *softmax;
    local.pace(4 * unit.blocks * panels);
    // SAFETY: the caller vouches for the operands. Scores of a second block replace those that have been weighed.
    unsafe {
        if panels <= PANELS_HELD {
            tiles.load::<4>(args.query(unit.part, 0, 0), stride);
            tiles.load::<5>(args.query(unit.part, 1, 0), stride);
            if panels == PANELS_HELD {
                tiles.load::<6>(args.query(unit.part, 0, 1), stride);
                tiles.load::<7>(args.query(unit.part, 1, 1), stride);
            }
            for sixteen in 0..2 * unit.blocks {
                tiles.zero::<0>();
                tiles.zero::<1>();
                tiles.load::<2>(args.key(unit, sixteen, 0), ROW_BYTES);
                tiles.multiply::<0, 2, 4>();
                local.step();
                tiles.multiply::<1, 2, 5>();
                local.step();
                if panels == PANELS_HELD {
                    tiles.load::<3>(args.key(unit, sixteen, 1), ROW_BYTES);
                    tiles.multiply::<0, 3, 6>();
                    local.step();
                    tiles.multiply::<1, 3, 7>();
                    local.step();
                }
                debug_assert!(local.has_consumed(sixteen), "scores that are still to be weighed");
                tiles.store::<0>(place.tile(sixteen, 0), ROW_BYTES);
                tiles.store::<1>(place.tile(sixteen, 1), ROW_BYTES);
            }
        } else {
            for sixteen in (0..2 * unit.blocks).step_by(2) {
                tiles.zero::<0>();
                tiles.zero::<1>();
                tiles.zero::<2>();
                tiles.zero::<3>();
                for panel in 0..panels {
                    tiles.load::<4>(args.key(unit, sixteen, panel), ROW_BYTES);
                    tiles.load::<6>(args.query(unit.part, 0, panel), stride);
                    tiles.multiply::<0, 4, 6>();
                    local.step();
                    tiles.load::<7>(args.query(unit.part, 1, panel), stride);
                    tiles.multiply::<1, 4, 7>();
                    local.step();
                    tiles.load::<5>(args.key(unit, sixteen + 1, panel), ROW_BYTES);
                    tiles.multiply::<2, 5, 6>();
                    local.step();
                    tiles.multiply::<3, 5, 7>();
                    local.step();
                }
                debug_assert!(local.has_consumed(sixteen + 1), "scores that are still to be weighed");
                tiles.store::<0>(place.tile(sixteen, 0), ROW_BYTES);
                tiles.store::<1>(place.tile(sixteen, 1), ROW_BYTES);
                tiles.store::<2>(place.tile(sixteen + 1, 0), ROW_BYTES);
                tiles.store::<3>(place.tile(sixteen + 1, 1), ROW_BYTES);
            }
        }
    }
    *softmax = local;
}

/// Adds the products of the weights of a unit and its values to the output. Weighs some pairs of the next unit behind each.
///
/// # Safety
///
/// As [`score`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
unsafe fn accumulate(tiles: &impl TileUnit, args: &FusedArgs, unit: Unit, softmax: &mut BlockSoftmax) {
    let (stride, columns) = (args.lane_bytes(), args.columns / LANES);
    let mut local = *softmax;
    local.pace(2 * unit.blocks * columns);
    // SAFETY: the caller vouches for the operands. Weights of the next unit replace those that have been loaded.
    unsafe {
        tiles.load::<4>(args.weights(0, 0).cast(), ROW_BYTES);
        tiles.load::<5>(args.weights(0, 1).cast(), ROW_BYTES);
        if unit.blocks > 1 {
            tiles.load::<6>(args.weights(1, 0).cast(), ROW_BYTES);
            tiles.load::<7>(args.weights(1, 1).cast(), ROW_BYTES);
        }
        for column in 0..columns {
            let output = [args.output(column, unit.part, 0), args.output(column, unit.part, 1)];
            tiles.load::<0>(output[0], stride);
            tiles.load::<2>(args.value(unit, column, 0), ROW_BYTES);
            tiles.multiply::<0, 2, 4>();
            local.step();
            tiles.load::<1>(output[1], stride);
            tiles.multiply::<1, 2, 5>();
            local.step();
            if unit.blocks > 1 {
                tiles.load::<3>(args.value(unit, column, 1), ROW_BYTES);
                tiles.multiply::<0, 3, 6>();
                local.step();
                tiles.multiply::<1, 3, 7>();
                local.step();
            }
            tiles.store::<0>(output[0], stride);
            tiles.store::<1>(output[1], stride);
        }
        local.advance_to(local.pairs);
    }
    *softmax = local;
}

/// Weighs the scores of a block, a pair of keys in 32 lanes at a time.
#[derive(Clone, Copy)]
struct BlockSoftmax {
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

impl BlockSoftmax {
    /// For a block of a unit, whose scores are there. Its sums begin with zero.
    ///
    /// # Safety
    ///
    /// The meeting has such a unit.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
    #[inline]
    unsafe fn new(args: &FusedArgs, unit: Unit, block: usize) -> Self {
        let lane = unit.part * BLOCK;
        // SAFETY: the caller vouches for the lanes.
        let references = unsafe { [args.reference(lane), args.reference(lane + LANES)] };
        Self {
            scales: [Scale::new(args.factor, references[0]), Scale::new(args.factor, references[1])],
            scores: [0, 1].map(|half| args.unit_scores().column(block, half).cast_const()),
            weights: [0, 1].map(|half| args.weights(block, half)),
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
        self.pace = (self.pairs << 16).div_ceil(steps);
    }

    /// Whether the scores of sixteen keys of the next unit, counted from its first, may take their place: this is the
    /// second block of the unit before.
    fn has_consumed(&self, sixteen: usize) -> bool {
        self.pair >= ((sixteen + 1) * LANES / 2).saturating_sub(BLOCK_PAIRS).min(self.pairs)
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
        unsafe { self.advance_to((self.due >> 16).min(self.pairs)) }
    }

    /// Weighs all pairs before `end`.
    ///
    /// # Safety
    ///
    /// As [`step`](Self::step), and there are so many pairs.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
    #[inline]
    unsafe fn advance_to(&mut self, end: usize) {
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
/// There is such a part, and the scores of a unit of it.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
unsafe fn init_row_max(args: &FusedArgs, part: usize) {
    for half in 0..2 {
        let lane = part * BLOCK + half * LANES;
        // SAFETY: the caller vouches for the block.
        unsafe {
            let column = args.column(args.unit_scores().column(0, half), core::ptr::null_mut(), 1);
            let new = update_row_max(args.reference(lane), &column);
            _mm512_storeu_ps(args.row_max.add(lane), _mm512_add_ps(new, _mm512_set1_ps(LIFT)));
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
unsafe fn commit_sums(tiles: &impl TileUnit, args: &FusedArgs, unit: Unit, sums: [__m512; 2]) {
    let most = _mm512_set1_ps(MOST);
    // SAFETY: the caller vouches for the meeting.
    unsafe {
        if sums.iter().any(|&sum| _mm512_cmp_ps_mask::<_CMP_GT_OQ>(sum, most) != 0) {
            redo_softmax(tiles, args, unit);
            return;
        }
        for (half, added) in sums.into_iter().enumerate() {
            let place = args.row_sum.add(unit.part * BLOCK + half * LANES);
            _mm512_storeu_ps(place, _mm512_add_ps(_mm512_loadu_ps(place), added));
        }
    }
}

/// The weights of a unit again, with references as high as its scores. All units before it are in the output.
///
/// # Safety
///
/// As [`commit_sums`].
#[cold]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
unsafe fn redo_softmax(tiles: &impl TileUnit, args: &FusedArgs, unit: Unit) {
    // Where the scores of the unit were, those of the next are already.
    let place = args.spare_scores();
    // SAFETY: the caller vouches for the meeting.
    unsafe {
        score(tiles, args, unit, place, &mut BlockSoftmax::idle());
        for half in 0..2 {
            let lane = unit.part * BLOCK + half * LANES;
            let column = args.column(place.column(0, half), args.weights(0, half), unit.blocks);
            let old = args.reference(lane);
            let new = update_row_max(old, &column);
            let added = column.exp_and_sum(new);
            let row_scale = exp2(_mm512_sub_ps(old, new));
            let sum = args.row_sum.add(lane);
            _mm512_storeu_ps(sum, _mm512_fmadd_ps(_mm512_loadu_ps(sum), row_scale, added));
            _mm512_storeu_ps(args.row_max.add(lane), _mm512_add_ps(new, _mm512_set1_ps(LIFT)));
            for column in 0..args.columns {
                let place = args.output.add(column * args.lanes + lane);
                _mm512_storeu_ps(place, _mm512_mul_ps(_mm512_loadu_ps(place), row_scale));
            }
        }
    }
}
