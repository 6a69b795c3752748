//! The microkernel of both bf16 levels.

use super::pack::{self, DEPTH, HEADER, LANES, PAIRS};
use super::survey::Survey;
use super::{PairMultiplier, PairProduct, amx_fused, softmax, softmax16};
use crate::attend::blocked;
use crate::attend::decode::DecodeTile;
use crate::attend::scoring::is_plain;
use crate::driver::scheduler;
use crate::microkernel::head::Head;
use crate::microkernel::mask::LaneRanges;
use crate::microkernel::score::ScoreModifiers;
use crate::microkernel::{
    AccumulateArgs, Decode, FullBlocksArgs, FusedForward, LaneRows, Lse, MultiplyArgs, Operands, Products, Softmax,
    SoftmaxArgs, SoftmaxOutcome, padded,
};
use crate::simd::avx512::Avx512;
use core::arch::x86_64::{
    _CMP_NEQ_UQ, _mm512_cmp_ps_mask, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_maskz_loadu_epi16, _mm512_mul_ps,
    _mm512_set1_ps, _mm512_storeu_ps, _mm512_storeu_si512,
};
use flashcore_problem::{DType, InputViews, Problem};
use std::ops::Range;

/// The microkernel with the instructions of a multiplier. What is not worth writing in pairs is left to the AVX-512 level.
pub(crate) struct Bf16Kernel<M> {
    pub(super) multiplier: M,
    pub(super) vectors: Avx512,
    /// True if weights need be no more exact than `bf16`, and the processor has the instructions of [`softmax16`].
    pub(super) has_softmax16: bool,
}

impl<M: PairMultiplier> Bf16Kernel<M> {
    /// Lanes of the first half of a panel, and rows that some of them takes part in; the other half may have more.
    /// `None` if all lanes are of the first half.
    fn first_half(lanes: usize, lane_rows: LaneRows) -> Option<(usize, usize)> {
        const { assert!(M::PANEL_LANES.is_multiple_of(2 * LANES)) };
        let half = M::PANEL_LANES / 2;
        (lanes > half).then(|| (half, lane_rows.of_block(half / LANES - 1)))
    }

    /// `None` if the processor lacks AVX-512, which no multiplier is without.
    pub(crate) fn new(multiplier: M) -> Option<Self> {
        Avx512::detect().map(|vectors| Self { multiplier, vectors, has_softmax16: false })
    }

    /// The kernel for a problem whose operands were surveyed.
    pub(crate) fn for_problem(self, problem: &Problem, inputs: &InputViews<'_>, survey: &Survey) -> Self {
        let has_instructions = is_x86_feature_detected!("avx512vbmi") && is_x86_feature_detected!("avx512bf16");
        let has_softmax16 = has_instructions
            && is_plain(problem, inputs)
            && !problem.lse
            && survey.largest_score(problem) < softmax16::LARGEST_SCORE;
        Self { has_softmax16, ..self }
    }
}

/// Upper bound of the lanes of a row panel.
pub(super) const MAX_PANEL_LANES: usize = 4 * LANES;

impl<M: PairMultiplier> Products for Bf16Kernel<M> {
    type Real = f32;
    type Packed = u32;

    const PANEL_LANES: usize = M::PANEL_LANES;
    const LANE_BLOCK: usize = LANES;
    const ROW_ALIGNMENT: usize = DEPTH;
    const ROW_BLOCK: usize = LANES;
    const COLUMN_BLOCK: usize = LANES;
    const TILE_ROWS: usize = M::TILE_ROWS;

    fn right_size(depth: usize) -> usize {
        pack::right_size(depth, M::PANEL_LANES)
    }

    fn left_size(depth: usize, rows: usize) -> usize {
        pack::left_size(depth, rows)
    }

    fn transposed_size(columns: usize, rows: usize) -> usize {
        pack::transposed_size(columns, rows)
    }

    fn weight_size(rows: usize) -> usize {
        padded(rows, DEPTH) / 2 * M::PANEL_LANES
    }

    fn on_thread(&self, work: impl FnOnce()) {
        self.multiplier.on_thread(work);
    }

    fn pack_right(&self, head: Head<'_>, rows: Range<usize>, lanes: usize, packed: &mut [u32]) {
        // SAFETY: `self.vectors` is a witness of AVX-512.
        unsafe { pack::pack_right(head, rows, lanes, packed) }
    }

    fn pack_left(&self, head: Head<'_>, rows: Range<usize>, packed: &mut [u32]) {
        // SAFETY: `self.vectors` is a witness of AVX-512.
        unsafe { pack::pack_left(head, rows, packed) }
    }

    fn pack_transposed(&self, head: Head<'_>, rows: Range<usize>, packed: &mut [u32]) {
        // SAFETY: `self.vectors` is a witness of AVX-512.
        unsafe { pack::pack_transposed(head, rows, packed) }
    }

    fn pack_weights(&self, weights: &[f32], lanes: usize, packed: &mut [u32]) {
        // SAFETY: `self.vectors` is a witness of AVX-512.
        unsafe { softmax::pack_weights(weights, lanes, packed) }
    }

    fn scale_rows(&self, _packed: &mut [u32], _columns: usize, _scales: &[f32]) {
        unreachable!("operands of 8 bits are multiplied in f32")
    }

    fn multiply(&self, args: MultiplyArgs<'_, Self>) {
        let Operands { depth, rows, left, right } = args.operands;
        let (slabs, lanes) = (pack::slabs(*depth), args.lanes);
        let slab_size = left.len() / slabs;
        let count = padded(rows.len(), LANES);
        assert!(
            args.fits() && (rows.start + count) * PAIRS <= slab_size && right.len() >= pack::right_size(*depth, lanes),
            "a product of tiles that are too small"
        );
        let (first, near) = Self::first_half(lanes, args.lane_rows)
            .map_or((lanes, count), |(first, rows)| (first, padded(rows, LANES).min(count)));
        // SAFETY: the left operand has so many rows in each slab, the right one a row for each pair of a slab, and the
        // product a row for each row, as asserted.
        unsafe {
            let whole = PairProduct {
                rows: near,
                lanes,
                stride: lanes,
                slabs,
                left: left.as_ptr().add(rows.start * PAIRS),
                slab_size,
                right: right.as_ptr(),
                product: args.product.as_mut_ptr(),
                adds: false,
            };
            self.multiplier.multiply(whole);
            if near < count {
                self.multiplier.multiply(PairProduct {
                    rows: count - near,
                    lanes: lanes - first,
                    left: whole.left.add(near * PAIRS),
                    right: whole.right.add(first),
                    product: whole.product.add(near * lanes + first),
                    ..whole
                });
            }
        }
        if args.factor != 1.0 {
            // SAFETY: `self.vectors` is a witness of AVX-512.
            unsafe { scale(&mut args.product[..count * lanes], args.factor) };
        }
    }

    fn accumulate(&self, args: AccumulateArgs<'_, Self>) {
        let columns = padded(args.columns, LANES);
        assert!(
            args.fits() && args.left.len() >= pack::transposed_size(args.columns, args.rows.end),
            "a product of tiles that are too small"
        );
        let lanes = args.lanes;
        let sums = &mut args.sums[..columns * lanes];
        if args.is_first {
            sums.fill(0.0);
        } else {
            // SAFETY: `self.vectors` is a witness of AVX-512, and there is a scale for each lane.
            unsafe { rescale(sums, &args.lane_scale[..lanes]) };
        }
        let slab_size = columns * PAIRS;
        let first_slab = &args.left[HEADER + args.rows.start / DEPTH * slab_size..];
        let whole_slabs = args.rows.len() / DEPTH;
        let whole = PairProduct {
            rows: columns,
            lanes,
            stride: lanes,
            slabs: whole_slabs,
            left: first_slab.as_ptr(),
            slab_size,
            right: args.packed_weights.as_ptr(),
            product: sums.as_mut_ptr(),
            adds: true,
        };
        // The last rows do not fill their slab: what is beside them there may be NaNs of rows that take no part.
        let last_rows = args.rows.len() % DEPTH;
        let last = (last_rows > 0).then(|| Last {
            rows: last_rows,
            slab: &first_slab[whole_slabs * slab_size..][..slab_size],
            weights: &args.packed_weights[whole_slabs * PAIRS * lanes..][..PAIRS * lanes],
        });
        let divisor = pack::divisor(args.left);
        // SAFETY: the left operand has so many columns in each slab, the weights a row for each pair of a slab, and the
        // sums a row for each column.
        unsafe {
            if divisor.is_none() {
                let (first, near) = Self::first_half(lanes, args.lane_rows)
                    .map_or((lanes, whole_slabs), |(first, rows)| (first, rows.div_ceil(DEPTH).min(whole_slabs)));
                self.multiplier.multiply(PairProduct { slabs: near, ..whole });
                if near < whole_slabs {
                    self.multiplier.multiply(PairProduct {
                        lanes: lanes - first,
                        slabs: whole_slabs - near,
                        left: whole.left.add(near * slab_size),
                        right: whole.right.add(near * PAIRS * lanes + first),
                        product: whole.product.add(first),
                        ..whole
                    });
                }
                if last.is_none() {
                    return;
                }
            }
            self.accumulate_in_parts(whole, divisor, last.as_ref());
        }
    }

    fn transpose(&self, columns: &[f32], factors: &[f32], rows: &mut [f32]) {
        self.vectors.transpose(columns, factors, rows);
    }

    fn are_finite(&self, head: Head<'_>, rows: Range<usize>) -> bool {
        self.vectors.are_finite(head, rows)
    }

    fn store(&self, dtype: DType, values: &[f32], factor: f32, bytes: &mut [u8]) {
        self.vectors.store(dtype, values, factor, bytes);
    }
}

impl<M: PairMultiplier> Softmax for Bf16Kernel<M> {
    fn modify_scores(&self, modifiers: ScoreModifiers<'_, f32>) {
        self.vectors.modify_scores(modifiers);
    }

    fn mask(&self, scores: &mut [f32], lanes: usize, ranges: &LaneRanges) {
        self.vectors.mask(scores, lanes, ranges);
    }

    fn online_softmax(&self, args: &mut SoftmaxArgs<'_, Self>) -> SoftmaxOutcome {
        // SAFETY: `self.vectors` is a witness of AVX-512, and `for_problem` has detected the rest of what `softmax16` needs.
        unsafe {
            if self.has_softmax16 && !args.keeps_weights {
                softmax16::online_softmax(args);
            } else {
                softmax::online_softmax(args);
            }
        }
        SoftmaxOutcome::Done
    }

    fn exp2_minus_lse(&self, scores: &mut [f32], lanes: usize, factor: f32, lse: Lse<'_, f32>) {
        self.vectors.exp2_minus_lse(scores, lanes, factor, lse);
    }
}

impl<M: PairMultiplier> Decode for Bf16Kernel<M> {
    /// A few rows are bound by reading the keys, which products in pairs do not make faster.
    fn decode_tile(&self, tile: DecodeTile<'_, f32>) {
        self.vectors.decode_tile(tile);
    }
}

impl<M: PairMultiplier> FusedForward for Bf16Kernel<M> {
    const PACKED_TILES: usize = if M::IS_FUSED { blocked::MAX_PACKED_TILES } else { 1 };
    const MAX_ITEM_ROWS: usize = if M::IS_FUSED { scheduler::MAX_FUSED_ITEM_ROWS } else { scheduler::MAX_ITEM_ROWS };

    fn attend_full_blocks(&self, args: FullBlocksArgs<'_, Self>) -> bool {
        let (lanes, keys) = (args.lanes, args.keys);
        let columns = padded(args.value_dim, LANES);
        let [key_tile, value_tile] =
            [Self::left_size(args.head_dim, M::TILE_ROWS), Self::transposed_size(args.value_dim, M::TILE_ROWS)];
        let tiles = keys.end.div_ceil(M::TILE_ROWS);
        assert!(
            keys.start < keys.end
                && args.key.len() >= tiles * key_tile
                && args.value.len() >= tiles * value_tile
                && args.query.len() >= pack::right_size(args.head_dim, lanes)
                && [args.row_max.len(), args.row_sum.len()].iter().all(|&length| length >= lanes)
                && args.output.len() >= columns * lanes,
            "full blocks of tiles that are too small"
        );
        let is_first = args.row_max[0] == f32::NEG_INFINITY;
        if !(M::IS_FUSED
            && self.has_softmax16
            && [keys.start, keys.end, lanes].iter().all(|size| size.is_multiple_of(amx_fused::BLOCK))
            && args.row_max[..lanes].iter().all(|&row_max| (row_max == f32::NEG_INFINITY) == is_first)
            && args.value.chunks_exact(value_tile).take(tiles).all(|tile| pack::divisor(tile).is_none()))
        {
            return false;
        }
        const { assert!(!M::IS_FUSED || M::TILE_ROWS == amx_fused::TILE_BLOCKS * amx_fused::BLOCK) };
        assert!(
            args.scores.len() >= amx_fused::SCORE_SCRATCH && args.weights.len() >= amx_fused::WEIGHT_SCRATCH,
            "full blocks in scratch that is too small"
        );
        // SAFETY: keys and values have so many tiles, the query a row for each pair of a slab, and scores, weights and output
        // are large enough, as asserted. `for_problem` has detected what `softmax16` needs.
        unsafe {
            self.multiplier.attend_fused(&amx_fused::FusedArgs {
                lanes,
                columns,
                first_block: keys.start / amx_fused::BLOCK,
                blocks: keys.len() / amx_fused::BLOCK,
                slabs: pack::slabs(args.head_dim),
                key: args.key.as_ptr(),
                key_slab: key_tile / pack::slabs(args.head_dim),
                key_tile,
                value: args.value.as_ptr().add(HEADER),
                value_tile,
                query: args.query.as_ptr(),
                factor: args.factor,
                scores: args.scores.as_mut_ptr(),
                weights: args.weights.as_mut_ptr(),
                row_max: args.row_max.as_mut_ptr(),
                row_sum: args.row_sum.as_mut_ptr(),
                output: args.output.as_mut_ptr(),
            });
        }
        true
    }
}

impl<M> Bf16Kernel<M> {
    /// The AVX-512 level, for problems whose products in pairs would not be exact.
    pub(crate) fn exact(&self) -> &Avx512 {
        &self.vectors
    }
}

/// The last rows, which do not fill their slab.
struct Last<'a> {
    rows: usize,
    slab: &'a [u32],
    weights: &'a [u32],
}

impl<M: PairMultiplier> Bf16Kernel<M> {
    /// The rare cases of [`Products::accumulate`], for a few columns at a time: elements that were scaled when they were
    /// packed, and the last rows.
    ///
    /// # Safety
    ///
    /// As [`PairMultiplier::multiply`].
    unsafe fn accumulate_in_parts(&self, whole: PairProduct, divisor: Option<f32>, last: Option<&Last<'_>>) {
        const COLUMNS: usize = 2 * LANES;
        for first in (0..whole.rows).step_by(COLUMNS) {
            let rows = (whole.rows - first).min(COLUMNS);
            let mut slab = [[0; PAIRS]; COLUMNS];
            let mut products = [0.0; COLUMNS * MAX_PANEL_LANES];
            // SAFETY: the caller vouches for the whole, of which these are some rows; `slab` and `products` are large
            // enough for these, and the lanes of a row panel.
            unsafe {
                let sums = whole.product.add(first * whole.lanes);
                let target = if divisor.is_some() { products.as_mut_ptr() } else { sums };
                let left = whole.left.wrapping_add(first * PAIRS);
                let part = PairProduct { rows, left, product: target, ..whole };
                if divisor.is_some() {
                    self.multiplier.multiply(PairProduct { adds: false, ..part });
                }
                if let Some(last) = last {
                    copy_first_elements(&last.slab[first * PAIRS..], &mut slab[..rows], last.rows);
                    let (left, right) = (slab.as_ptr().cast(), last.weights.as_ptr());
                    self.multiplier.multiply(PairProduct { slabs: 1, left, right, adds: true, ..part });
                }
                if let Some(divisor) = divisor {
                    add_times(&products[..rows * whole.lanes], 1.0 / divisor, sums);
                }
            }
        }
    }
}

/// Copies rows of a slab, with zeros for all but the first elements of each.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn copy_first_elements(slab: &[u32], rows: &mut [[u32; PAIRS]], elements: usize) {
    let mask = (1_u32 << elements) - 1;
    for (row, source) in rows.iter_mut().zip(slab.chunks_exact(PAIRS)) {
        // SAFETY: both have a whole vector.
        unsafe {
            let vector = _mm512_maskz_loadu_epi16(mask, source.as_ptr().cast());
            _mm512_storeu_si512(row.as_mut_ptr().cast(), vector);
        }
    }
}

/// Multiplies scores by a factor.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn scale(scores: &mut [f32], factor: f32) {
    for score in scores {
        *score *= factor;
    }
}

/// Multiplies rows of sums by the scale of each lane, unless all scales are 1.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn rescale(sums: &mut [f32], lane_scale: &[f32]) {
    let lanes = lane_scale.len();
    for lane in (0..lanes).step_by(LANES) {
        // SAFETY: the lanes are whole vectors, and so are the rows of the sums.
        unsafe {
            let factor = _mm512_loadu_ps(lane_scale.as_ptr().add(lane));
            if _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(factor, _mm512_set1_ps(1.0)) == 0 {
                continue;
            }
            for row in sums.chunks_exact_mut(lanes) {
                let place = row.as_mut_ptr().add(lane);
                _mm512_storeu_ps(place, _mm512_mul_ps(_mm512_loadu_ps(place), factor));
            }
        }
    }
}

/// Adds `products` times `factor` to as many sums.
///
/// # Safety
///
/// There are as many sums, which are whole vectors.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn add_times(products: &[f32], factor: f32, sums: *mut f32) {
    for (index, products) in products.chunks_exact(LANES).enumerate() {
        // SAFETY: the caller vouches for the sums.
        unsafe {
            let place = sums.add(index * LANES);
            let sum =
                _mm512_fmadd_ps(_mm512_loadu_ps(products.as_ptr()), _mm512_set1_ps(factor), _mm512_loadu_ps(place));
            _mm512_storeu_ps(place, sum);
        }
    }
}
