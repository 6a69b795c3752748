//! The microkernel of both bf16 levels.

use super::pack::{self, DEPTH, LANES, PAIRS, VALUE_HEADER};
use super::survey::Survey;
use super::{PairMultiplier, PairProduct, amx_fused, softmax, softmax16};
use crate::attend::blocked;
use crate::attend::decode::DecodeTile;
use crate::attend::scoring::is_plain;
use crate::driver::scheduler;
use crate::microkernel::head::Head;
use crate::microkernel::mask::LaneRanges;
use crate::microkernel::score::ScoreModifiers;
use crate::microkernel::{FullBlocksArgs, LaneKeys, Microkernel, PvArgs, QkArgs, SoftmaxArgs, SoftmaxOutcome, padded};
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
    /// Lanes of the first half of a row panel, and keys that some of their rows attends; the other half may attend more.
    /// `None` if all lanes are of the first half.
    fn first_half(lanes: usize, lane_keys: LaneKeys) -> Option<(usize, usize)> {
        const { assert!(M::PANEL_ROWS.is_multiple_of(2 * LANES)) };
        let half = M::PANEL_ROWS / 2;
        (lanes > half).then(|| (half, lane_keys.of_block(half / LANES - 1)))
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
pub(super) const MAX_PANEL_ROWS: usize = 4 * LANES;

impl<M: PairMultiplier> Microkernel for Bf16Kernel<M> {
    type Real = f32;
    type Packed = u32;

    const PANEL_ROWS: usize = M::PANEL_ROWS;
    const LANE_BLOCK: usize = LANES;
    const KEY_ALIGNMENT: usize = DEPTH;
    const KEY_BLOCK: usize = LANES;
    const VALUE_BLOCK: usize = LANES;
    const KV_TILE: usize = M::KV_TILE;
    const PACKED_TILES: usize = if M::IS_FUSED { blocked::MAX_PACKED_TILES } else { 1 };
    const MAX_ITEM_ROWS: usize = if M::IS_FUSED { scheduler::MAX_FUSED_ITEM_ROWS } else { scheduler::MAX_ITEM_ROWS };
    const SCALES_IN_SOFTMAX: bool = true;

    fn query_size(head_dim: usize) -> usize {
        pack::query_size(head_dim, M::PANEL_ROWS)
    }

    fn key_size(head_dim: usize, keys: usize) -> usize {
        pack::key_size(head_dim, keys)
    }

    fn value_size(value_dim: usize, keys: usize) -> usize {
        pack::value_size(value_dim, keys)
    }

    fn weight_size(keys: usize) -> usize {
        padded(keys, DEPTH) / 2 * M::PANEL_ROWS
    }

    fn on_thread(&self, work: impl FnOnce()) {
        self.multiplier.on_thread(work);
    }

    fn pack_query(&self, query: Head<'_>, rows: Range<usize>, lanes: usize, packed: &mut [u32]) {
        // SAFETY: `self.vectors` is a witness of AVX-512.
        unsafe { pack::pack_query(query, rows, lanes, packed) }
    }

    fn pack_keys(&self, key: Head<'_>, keys: Range<usize>, packed: &mut [u32]) {
        // SAFETY: `self.vectors` is a witness of AVX-512.
        unsafe { pack::pack_keys(key, keys, packed) }
    }

    fn pack_values(&self, value: Head<'_>, keys: Range<usize>, packed: &mut [u32]) {
        // SAFETY: `self.vectors` is a witness of AVX-512.
        unsafe { pack::pack_values(value, keys, packed) }
    }

    fn scale_values(&self, _packed: &mut [u32], _columns: usize, _scales: &[f32]) {
        unreachable!("values of 8 bits are computed in f32")
    }

    fn qk_product(&self, args: QkArgs<'_, Self>) {
        let slabs = pack::slabs(args.head_dim);
        let slab_size = args.key.len() / slabs;
        let rows = padded(args.keys.len(), LANES);
        assert!(
            args.fits()
                && (args.keys.start + rows) * PAIRS <= slab_size
                && args.query.len() >= pack::query_size(args.head_dim, args.lanes),
            "a product of tiles that are too small"
        );
        let lanes = args.lanes;
        let (first, near) = Self::first_half(lanes, args.lane_keys)
            .map_or((lanes, rows), |(first, keys)| (first, padded(keys, LANES).min(rows)));
        // SAFETY: the keys have so many rows in each slab, the query a row for each pair of a slab, and the scores a
        // row for each key, as asserted.
        unsafe {
            let whole = PairProduct {
                rows: near,
                lanes,
                stride: lanes,
                slabs,
                left: args.key.as_ptr().add(args.keys.start * PAIRS),
                slab_size,
                right: args.query.as_ptr(),
                product: args.scores.as_mut_ptr(),
                adds: false,
            };
            self.multiplier.multiply(whole);
            if near < rows {
                self.multiplier.multiply(PairProduct {
                    rows: rows - near,
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
            unsafe { scale(&mut args.scores[..rows * args.lanes], args.factor) };
        }
    }

    fn online_softmax(&self, args: &mut SoftmaxArgs<'_, Self>) -> SoftmaxOutcome {
        assert!(args.fits(), "a row panel of scores that is too small");
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

    fn attend_full_blocks(&self, args: FullBlocksArgs<'_, Self>) -> bool {
        let (lanes, keys) = (args.lanes, args.keys);
        let columns = padded(args.value_dim, LANES);
        let [key_tile, value_tile] =
            [Self::key_size(args.head_dim, M::KV_TILE), Self::value_size(args.value_dim, M::KV_TILE)];
        let tiles = keys.end.div_ceil(M::KV_TILE);
        assert!(
            keys.start < keys.end
                && args.key.len() >= tiles * key_tile
                && args.value.len() >= tiles * value_tile
                && args.query.len() >= pack::query_size(args.head_dim, lanes)
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
        const { assert!(!M::IS_FUSED || M::KV_TILE == amx_fused::TILE_BLOCKS * amx_fused::BLOCK) };
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
                value: args.value.as_ptr().add(VALUE_HEADER),
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

    fn pv_product(&self, args: PvArgs<'_, Self>) {
        let columns = padded(args.value_dim, LANES);
        assert!(
            args.fits() && args.value.len() >= pack::value_size(args.value_dim, args.keys.end),
            "a product of tiles that are too small"
        );
        let lanes = args.lanes;
        let output = &mut args.output[..columns * lanes];
        if args.is_first {
            output.fill(0.0);
        } else {
            // SAFETY: `self.vectors` is a witness of AVX-512, and there is a row scale for each lane.
            unsafe { rescale(output, &args.row_scale[..lanes]) };
        }
        let slab_size = columns * PAIRS;
        let first_slab = &args.value[VALUE_HEADER + args.keys.start / DEPTH * slab_size..];
        let whole_slabs = args.keys.len() / DEPTH;
        let values = PairProduct {
            rows: columns,
            lanes,
            stride: lanes,
            slabs: whole_slabs,
            left: first_slab.as_ptr(),
            slab_size,
            right: args.weights.as_ptr(),
            product: output.as_mut_ptr(),
            adds: true,
        };
        // The last keys do not fill their slab: what is beside them there may be NaNs of keys that are not attended.
        let last_keys = args.keys.len() % DEPTH;
        let last = (last_keys > 0).then(|| Last {
            keys: last_keys,
            slab: &first_slab[whole_slabs * slab_size..][..slab_size],
            weights: &args.weights[whole_slabs * PAIRS * lanes..][..PAIRS * lanes],
        });
        let divisor = pack::divisor(args.value);
        // SAFETY: the values have so many columns in each slab, the weights a row for each pair of a slab, and the
        // output a row for each column.
        unsafe {
            if divisor.is_none() {
                let (first, near) = Self::first_half(lanes, args.lane_keys)
                    .map_or((lanes, whole_slabs), |(first, keys)| (first, keys.div_ceil(DEPTH).min(whole_slabs)));
                self.multiplier.multiply(PairProduct { slabs: near, ..values });
                if near < whole_slabs {
                    self.multiplier.multiply(PairProduct {
                        lanes: lanes - first,
                        slabs: whole_slabs - near,
                        left: values.left.add(near * slab_size),
                        right: values.right.add(near * PAIRS * lanes + first),
                        product: values.product.add(first),
                        ..values
                    });
                }
                if last.is_none() {
                    return;
                }
            }
            self.accumulate_in_parts(values, divisor, last.as_ref());
        }
    }

    fn modify_scores(&self, modifiers: ScoreModifiers<'_, f32>) {
        self.vectors.modify_scores(modifiers);
    }

    fn mask(&self, scores: &mut [f32], lanes: usize, ranges: &LaneRanges) {
        self.vectors.mask(scores, lanes, ranges);
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

    /// A few rows are bound by reading the keys, which products in pairs do not make faster.
    fn decode_tile(&self, tile: DecodeTile<'_, f32>) {
        self.vectors.decode_tile(tile);
    }
}

impl<M> Bf16Kernel<M> {
    /// The AVX-512 level, for problems whose products in pairs would not be exact.
    pub(crate) fn exact(&self) -> &Avx512 {
        &self.vectors
    }
}

/// The last keys, which do not fill their slab.
struct Last<'a> {
    keys: usize,
    slab: &'a [u32],
    weights: &'a [u32],
}

impl<M: PairMultiplier> Bf16Kernel<M> {
    /// The rare cases of the PV product, for a few columns at a time: values that were scaled when they were packed, and the
    /// last keys.
    ///
    /// # Safety
    ///
    /// As [`PairMultiplier::multiply`].
    unsafe fn accumulate_in_parts(&self, values: PairProduct, divisor: Option<f32>, last: Option<&Last<'_>>) {
        const COLUMNS: usize = 2 * LANES;
        for first in (0..values.rows).step_by(COLUMNS) {
            let rows = (values.rows - first).min(COLUMNS);
            let mut slab = [[0; PAIRS]; COLUMNS];
            let mut products = [0.0; COLUMNS * MAX_PANEL_ROWS];
            // SAFETY: the caller vouches for the whole, of which these are some rows; `slab` and `products` are large
            // enough for these, and the lanes of a row panel.
            unsafe {
                let output = values.product.add(first * values.lanes);
                let target = if divisor.is_some() { products.as_mut_ptr() } else { output };
                let left = values.left.wrapping_add(first * PAIRS);
                let part = PairProduct { rows, left, product: target, ..values };
                if divisor.is_some() {
                    self.multiplier.multiply(PairProduct { adds: false, ..part });
                }
                if let Some(last) = last {
                    copy_first_elements(&last.slab[first * PAIRS..], &mut slab[..rows], last.keys);
                    let (left, right) = (slab.as_ptr().cast(), last.weights.as_ptr());
                    self.multiplier.multiply(PairProduct { slabs: 1, left, right, adds: true, ..part });
                }
                if let Some(divisor) = divisor {
                    add_times(&products[..rows * values.lanes], 1.0 / divisor, output);
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

/// Multiplies rows of the output by the row scale of each lane, unless all row scales are 1.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn rescale(output: &mut [f32], row_scale: &[f32]) {
    let lanes = row_scale.len();
    for lane in (0..lanes).step_by(LANES) {
        // SAFETY: the lanes are whole vectors, and so are the rows of the output.
        unsafe {
            let factor = _mm512_loadu_ps(row_scale.as_ptr().add(lane));
            if _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(factor, _mm512_set1_ps(1.0)) == 0 {
                continue;
            }
            for row in output.chunks_exact_mut(lanes) {
                let place = row.as_mut_ptr().add(lane);
                _mm512_storeu_ps(place, _mm512_mul_ps(_mm512_loadu_ps(place), factor));
            }
        }
    }
}

/// Adds `products` times `factor` to as many elements of the output.
///
/// # Safety
///
/// The output has as many elements, which are whole vectors.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn add_times(products: &[f32], factor: f32, output: *mut f32) {
    for (index, products) in products.chunks_exact(LANES).enumerate() {
        // SAFETY: the caller vouches for the output.
        unsafe {
            let place = output.add(index * LANES);
            let sum =
                _mm512_fmadd_ps(_mm512_loadu_ps(products.as_ptr()), _mm512_set1_ps(factor), _mm512_loadu_ps(place));
            _mm512_storeu_ps(place, sum);
        }
    }
}
