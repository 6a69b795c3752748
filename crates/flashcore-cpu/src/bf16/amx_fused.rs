//! The interleaved AMX pipeline: a row panel attends full blocks, with the instructions of QK and PV among those of the
//! softmax.
//!
//! Tile units multiply on their own while vectors compute the softmax, but a processor that looks a few hundred instructions
//! ahead sees only one of the two where they follow each other. So a product of tiles follows every pair or two of keys of
//! the softmax. A *part* of a row panel is 32 lanes, a *block* 32 keys, and a *unit* two blocks in one part:
//!
//! ```text
//! products   QK of unit 1        | PV of unit 0        | QK of unit 2        | PV of unit 1        | ..
//! softmax    block 1 of unit 0   | block 0 of unit 1   | block 1 of unit 1   | block 0 of unit 2   | ..
//! ```
//!
//! Loads are what tile units wait for, so that registers keep what they can: a query of up to 64 columns during the QK
//! product of a unit, and the weights of a unit during its PV product.
//!
//! The scores of a unit replace those of the unit before whose softmax is done, and weights replace those that have just
//! been loaded. With query, output, keys and values of 64 columns these are the 40 KiB that a part touches from one unit to
//! the next, and a first-level cache has 48: wider row panels were slower, and prefetching keys and values was too
//! (`notebook/cpu-bf16.md`). Little that is stored is loaded before it can have left the store buffer, since stores are not
//! forwarded to tile registers or from them.

use super::pack::{LANES, PAIRS};
use super::softmax::exp2;
use super::softmax16::{Column, LIFT, MAX_SUM, Scale, added, update_row_max};
use core::arch::x86_64::{
    __m512, _CMP_GT_OQ, _mm512_add_ps, _mm512_cmp_ps_mask, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mul_ps,
    _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps, _mm512_storeu_si512, _mm512_sub_ps,
};

/// Tile registers: eight, of sixteen rows of 64 bytes. Their content stays from call to call.
pub(crate) trait TileUnit {
    /// `TILEZERO`.
    fn zero<const TILE: usize>(&self);

    /// `TILELOADD`.
    ///
    /// # Safety
    ///
    /// Sixteen rows of 64 bytes are at the place, `stride` bytes apart.
    unsafe fn load<const TILE: usize>(&self, place: *const u8, stride: usize);

    /// `TILESTORED`.
    ///
    /// # Safety
    ///
    /// As [`load`](Self::load).
    unsafe fn store<const TILE: usize>(&self, place: *mut u8, stride: usize);

    /// `TDPBF16PS`: adds the product of two tiles of pairs to a tile of sums.
    fn multiply<const SUM: usize, const LEFT: usize, const RIGHT: usize>(&self);
}

/// Keys of a block, and lanes of a part.
pub(crate) const BLOCK: usize = 2 * LANES;

/// Blocks of a tile of keys.
pub(crate) const TILE_BLOCKS: usize = 4;

/// Blocks of a unit, but for the last: the output is loaded and stored once per unit, and four registers hold its weights.
const UNIT_BLOCKS: usize = 2;

/// Slabs of a query that four registers hold.
const SLABS_HELD: usize = 2;

/// Elements of a tile register of sums or pairs.
const TILE: usize = LANES * LANES;

/// Bytes from a row to the next of a contiguous tile.
const ROW_BYTES: usize = 64;

/// Scores of a block.
const BLOCK_SCORES: usize = BLOCK * BLOCK;

/// Pairs of keys of a block.
const BLOCK_PAIRS: usize = BLOCK / 2;

/// Weights of a unit, in pairs.
const UNIT_WEIGHTS: usize = UNIT_BLOCKS * BLOCK_SCORES / 2;

/// Elements of scratch for scores: those of a unit, and of one whose row max must be updated.
pub(crate) const SCORE_SCRATCH: usize = 2 * UNIT_BLOCKS * BLOCK_SCORES;

/// Pairs of scratch for the weights of a unit.
pub(crate) const WEIGHT_SCRATCH: usize = UNIT_WEIGHTS;

/// Operands as [`pack`](super::pack) has packed them, and the softmax of the row panel so far.
#[derive(Clone, Copy)]
pub(crate) struct FusedArgs {
    /// A multiple of [`BLOCK`].
    pub(crate) lanes: usize,
    /// Columns of the values; a multiple of sixteen.
    pub(crate) columns: usize,
    /// The first block of the tiles, and how many; at least one.
    pub(crate) first_block: usize,
    pub(crate) blocks: usize,
    /// Slabs of query and keys.
    pub(crate) slabs: usize,
    /// The first tile, and pairs from one slab and one tile to the next.
    pub(crate) key: *const u32,
    pub(crate) key_slab: usize,
    pub(crate) key_tile: usize,
    /// The first slab of the first tile, and pairs from one tile to the next.
    pub(crate) value: *const u32,
    pub(crate) value_tile: usize,
    pub(crate) query: *const u32,
    /// Factor of the scores; above zero.
    pub(crate) factor: f32,
    /// [`SCORE_SCRATCH`] elements.
    pub(crate) scores: *mut f32,
    /// [`WEIGHT_SCRATCH`] pairs.
    pub(crate) weights: *mut u32,
    /// Row max of each lane: finite, or minus infinity for all lanes.
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

/// Scratch of the scores of a unit: those of the first sixteen lanes and keys, and the distances to those of the other lanes
/// and of the next block.
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

    /// The scores of sixteen keys, counted from the first of the unit.
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
    fn query(&self, part: usize, half: usize, slab: usize) -> *const u8 {
        self.query.wrapping_add(slab * PAIRS * self.lanes + part * BLOCK + half * LANES).cast()
    }

    /// Sixteen keys, counted from the first of a unit.
    fn key(&self, unit: Unit, sixteen: usize, slab: usize) -> *const u8 {
        let block = self.first_block + unit.first_block + sixteen / 2;
        let row = block % TILE_BLOCKS * BLOCK + sixteen % 2 * LANES;
        self.key.wrapping_add(block / TILE_BLOCKS * self.key_tile + slab * self.key_slab + row * PAIRS).cast()
    }

    /// Sixteen columns of the values of a block of a unit.
    fn value(&self, unit: Unit, column: usize, block: usize) -> *const u8 {
        let block = self.first_block + unit.first_block + block;
        let slab = block % TILE_BLOCKS * self.columns;
        self.value.wrapping_add(block / TILE_BLOCKS * self.value_tile + (slab + column * LANES) * PAIRS).cast()
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

    /// Scratch in which all keys of a unit are contiguous, apart from [`unit_scores`](Self::unit_scores).
    fn spare_scores(&self) -> ScorePlace {
        let first = self.scores.wrapping_add(UNIT_BLOCKS * BLOCK_SCORES);
        ScorePlace { first, column_size: UNIT_BLOCKS * BLOCK * LANES, block_size: BLOCK * LANES }
    }

    /// Reference of sixteen lanes: the value that is subtracted from their scores.
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
        let (rows, pairs) = (blocks * BLOCK, blocks * BLOCK_PAIRS);
        Column { scores, weights, lanes: LANES, rows, pairs, factor: self.factor }
    }
}

/// Attends all blocks.
///
/// # Safety
///
/// All operands are valid, and the processor has the features named here.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
pub(crate) unsafe fn attend(tiles: &impl TileUnit, args: &FusedArgs) {
    let units = args.units();
    let place = args.unit_scores();
    // SAFETY: the caller vouches for everything; blocks and parts are those of the arguments.
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

/// QK of a unit. After each product come some pairs of the softmax of the unit before, whose first block is done.
///
/// An instruction takes 16 cycles, but 52 until its sums are there; those of other sums stand between.
///
/// # Safety
///
/// All operands of both are valid, and so is the scratch for scores.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
unsafe fn score(tiles: &impl TileUnit, args: &FusedArgs, unit: Unit, place: ScorePlace, softmax: &mut BlockSoftmax) {
    let (stride, slabs) = (args.lane_bytes(), args.slabs);
    // A copy, so that its sums stay in registers.
    let mut local = *softmax;
    local.pace(4 * unit.blocks * slabs);
    // SAFETY: the caller vouches for the operands. Scores of a second block replace those whose softmax is done.
    unsafe {
        if slabs <= SLABS_HELD {
            tiles.load::<4>(args.query(unit.part, 0, 0), stride);
            tiles.load::<5>(args.query(unit.part, 1, 0), stride);
            if slabs == SLABS_HELD {
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
                if slabs == SLABS_HELD {
                    tiles.load::<3>(args.key(unit, sixteen, 1), ROW_BYTES);
                    tiles.multiply::<0, 3, 6>();
                    local.step();
                    tiles.multiply::<1, 3, 7>();
                    local.step();
                }
                debug_assert!(local.has_consumed(sixteen), "scores that the softmax has not read yet");
                tiles.store::<0>(place.tile(sixteen, 0), ROW_BYTES);
                tiles.store::<1>(place.tile(sixteen, 1), ROW_BYTES);
            }
        } else {
            for sixteen in (0..2 * unit.blocks).step_by(2) {
                tiles.zero::<0>();
                tiles.zero::<1>();
                tiles.zero::<2>();
                tiles.zero::<3>();
                for slab in 0..slabs {
                    tiles.load::<4>(args.key(unit, sixteen, slab), ROW_BYTES);
                    tiles.load::<6>(args.query(unit.part, 0, slab), stride);
                    tiles.multiply::<0, 4, 6>();
                    local.step();
                    tiles.load::<7>(args.query(unit.part, 1, slab), stride);
                    tiles.multiply::<1, 4, 7>();
                    local.step();
                    tiles.load::<5>(args.key(unit, sixteen + 1, slab), ROW_BYTES);
                    tiles.multiply::<2, 5, 6>();
                    local.step();
                    tiles.multiply::<3, 5, 7>();
                    local.step();
                }
                debug_assert!(local.has_consumed(sixteen + 1), "scores that the softmax has not read yet");
                tiles.store::<0>(place.tile(sixteen, 0), ROW_BYTES);
                tiles.store::<1>(place.tile(sixteen, 1), ROW_BYTES);
                tiles.store::<2>(place.tile(sixteen + 1, 0), ROW_BYTES);
                tiles.store::<3>(place.tile(sixteen + 1, 1), ROW_BYTES);
            }
        }
    }
    *softmax = local;
}

/// PV of a unit, added to the output. After each product come some pairs of the softmax of the next unit.
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

/// Softmax of a block, a pair of keys in 32 lanes at a time.
#[derive(Clone, Copy)]
struct BlockSoftmax {
    scales: [Scale; 2],
    sums: [__m512; 2],
    scores: [*const f32; 2],
    weights: [*mut u32; 2],
    /// Number of pairs, and of those that are done.
    pairs: usize,
    pair: usize,
    /// Pairs that should be done, and pairs of a step, in 2^16 parts of 1.
    due: usize,
    pace: usize,
}

impl BlockSoftmax {
    /// For a block of a unit, whose scores are there. Its sums begin with zero.
    ///
    /// # Safety
    ///
    /// There is such a unit.
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

    /// Softmax of no pairs.
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

    /// True if the scores of sixteen keys of the next unit, counted from its first, may take their place: this is the second
    /// block of the unit before.
    fn has_consumed(&self, sixteen: usize) -> bool {
        self.pair >= ((sixteen + 1) * LANES / 2).saturating_sub(BLOCK_PAIRS).min(self.pairs)
    }

    /// Computes the pairs that are due.
    ///
    /// # Safety
    ///
    /// Scores and weights of the block are valid.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
    #[inline]
    unsafe fn step(&mut self) {
        self.due += self.pace;
        // SAFETY: the caller vouches for the block.
        unsafe { self.advance_to((self.due >> 16).min(self.pairs)) }
    }

    /// Computes all pairs before `end`.
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

/// Initializes the row max of a part from the scores of its first block.
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

/// Adds the sums of a unit to the row sums, unless some score was too far above a stale row max: then the softmax of the
/// unit is computed again with one that is updated.
///
/// # Safety
///
/// All operands are valid, and there is such a unit.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
unsafe fn commit_sums(tiles: &impl TileUnit, args: &FusedArgs, unit: Unit, sums: [__m512; 2]) {
    let max_sum = _mm512_set1_ps(MAX_SUM);
    // SAFETY: the caller vouches for the operands.
    unsafe {
        if sums.iter().any(|&sum| _mm512_cmp_ps_mask::<_CMP_GT_OQ>(sum, max_sum) != 0) {
            redo_softmax(tiles, args, unit);
            return;
        }
        for (half, added) in sums.into_iter().enumerate() {
            let place = args.row_sum.add(unit.part * BLOCK + half * LANES);
            _mm512_storeu_ps(place, _mm512_add_ps(_mm512_loadu_ps(place), added));
        }
    }
}

/// Computes the softmax of a unit again, with a row max as high as its scores, and rescales the output, which has all units
/// before it.
///
/// # Safety
///
/// As [`commit_sums`].
#[cold]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
unsafe fn redo_softmax(tiles: &impl TileUnit, args: &FusedArgs, unit: Unit) {
    // The scores of the next unit have replaced those of this one.
    let place = args.spare_scores();
    // SAFETY: the caller vouches for the operands.
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
