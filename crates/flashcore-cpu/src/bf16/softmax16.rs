//! The online softmax in 16 bits: weights are `bf16` from the start, 32 to a vector.
//!
//! A weight is rounded to `bf16` anyway, and where neither the log-sum-exp nor a NaN needs more, it never is an `f32`: the
//! exponent, an integer in [steps](STEPS) of 1/512, is already the bits of a `bf16` as far as its whole part goes, and
//! two more instructions turn the fraction `f` into `2^f - 1`. The row sum is that of the rounded weights, with
//! which the values are multiplied, so that an error that all of them have in common cancels.
//!
//! The *reference* of a lane is the value that is subtracted from its scores: an integer, and the row max less [`LIFT`]. It
//! may be stale (lazy rescale).
//!
//! Relative to the exact one, a weight is within [`MAX_ERROR`] of it, 1.8e-3 in the mean square and 5e-5 in the mean;
//! rounding alone makes that 3.9e-3, 1.6e-3 and 0.

use super::pack::{DEPTH, LANES};
use super::softmax::exp2;
use crate::microkernel::{Products, SoftmaxArgs, padded, softmax};
use crate::simd::avx512::Zmm;
use core::arch::x86_64::{
    __m512, __m512bh, __m512i, _CMP_EQ_OQ, _CMP_GT_OQ, _MM_FROUND_TO_POS_INF, _mm_setr_epi8, _mm512_add_ps,
    _mm512_adds_epu16, _mm512_and_si512, _mm512_broadcast_i32x4, _mm512_cmp_ps_mask, _mm512_cvtps_epi32,
    _mm512_dpbf16_ps, _mm512_fmadd_ps, _mm512_fnmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mask_mov_ps,
    _mm512_maskz_permutexvar_epi8, _mm512_max_ps, _mm512_mul_ps, _mm512_packus_epi32, _mm512_roundscale_ps,
    _mm512_set1_epi16, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512, _mm512_shuffle_epi8,
    _mm512_srli_epi16, _mm512_storeu_ps, _mm512_storeu_si512, _mm512_sub_ps,
};

/// Largest error of a weight, relative to the exact one, from 2^-111 of the reference on.
#[cfg(test)]
pub(crate) const MAX_ERROR: f64 = 6.1e-3;

/// Steps of 1 that an exponent is rounded to.
const STEPS: f32 = 512.0;

/// Exponent of the reference in the bits of a `bf16`. Its weight is 2^-15, which leaves as much headroom above it; below
/// 2^-112 of it weights are zero.
const REFERENCE: f32 = 112.0;

/// Distance, in base 2, of the weight of the reference from 1: `bf16` has 127 for that exponent.
pub(super) const LIFT: f32 = 127.0 - REFERENCE;

/// Excess of [`TO_POWER`], by which the steps are too small.
const OFFSET: f32 = 48.0;

/// Rounds the fraction down, so that rounding its power at the halves is right in the mean.
const HALF: f32 = 0.5;

/// Upper bound of the sum of a lane's weights before the reference must be updated: some score is 2^3 or more above it then,
/// whereas 256 weights up to that of the reference are 2^-7.
pub(super) const MAX_SUM: f32 = 1.0 / 16.0;

/// Upper bound of the products for which steps are numbers of 32 bits.
pub(crate) const LARGEST_SCORE: f64 = (1 << 20) as f64;

/// Increments of the steps of an exponent, in 64 parts of 1, that turn its fraction `f` into `2^f - 1`, and 2 for
/// rounding; the first part is the one that [`OFFSET`] leaves zero steps in.
const TO_POWER: [u8; 64] = [
    35, 33, 31, 29, 28, 26, 24, 23, 21, 20, 18, 17, 16, 14, 13, 12, 11, 10, 10, 9, 8, 8, 7, 7, 6, 6, 6, 6, 6, 6, 6, 7,
    7, 7, 8, 9, 9, 10, 11, 12, 13, 14, 16, 17, 19, 20, 22, 24, 26, 28, 30, 32, 35, 37, 40, 43, 46, 48, 49, 46, 44, 42,
    40, 37,
];

/// One step of the softmax, as [`softmax::online_softmax`](super::softmax::online_softmax) does it, for finite scores up to [`LARGEST_SCORE`] and
/// those of minus infinity. Weights are left in `weights` alone.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
pub(crate) fn online_softmax<K: Products<Real = f32, Packed = u32>>(args: &mut SoftmaxArgs<'_, K>) {
    assert!(
        args.fits() && !args.keeps_weights,
        "a row panel of scores that is too small, or whose weights are to be kept"
    );
    let (lanes, pairs) = (args.lanes, padded(args.rows, DEPTH) / 2);
    let nothing = _mm512_set1_ps(f32::NEG_INFINITY);
    for (block, lane) in (0..lanes).step_by(LANES).enumerate() {
        let rows = args.lane_rows.of_block(block);
        // SAFETY: every row of the panel has a vector at this lane, as asserted.
        unsafe {
            let column = Column {
                scores: args.scores.as_ptr().add(lane),
                weights: args.weights.as_mut_ptr().add(lane),
                lanes,
                rows,
                pairs,
                factor: args.factor,
            };
            let (row_max, sum) = (args.row_max.as_mut_ptr().add(lane), args.row_sum.as_mut_ptr().add(lane));
            let old = _mm512_sub_ps(_mm512_loadu_ps(row_max), _mm512_set1_ps(LIFT));
            let (mut new, mut row_scale) = (old, _mm512_set1_ps(1.0));
            let mut added = _mm512_setzero_ps();
            let is_new = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(old, nothing) != 0;
            if !is_new {
                added = column.exp_and_sum(old);
            }
            if is_new || _mm512_cmp_ps_mask::<_CMP_GT_OQ>(added, _mm512_set1_ps(MAX_SUM)) != 0 {
                new = update_row_max(old, &column);
                let is_empty = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(new, nothing);
                added = column.exp_and_sum(_mm512_mask_mov_ps(new, is_empty, _mm512_setzero_ps()));
                // The reference is an integer, unless other weights of the lane are relative to another.
                row_scale = exp2(_mm512_sub_ps(old, new));
                row_scale = _mm512_mask_mov_ps(row_scale, is_empty, _mm512_set1_ps(1.0));
            }
            _mm512_storeu_ps(sum, _mm512_fmadd_ps(_mm512_loadu_ps(sum), row_scale, added));
            _mm512_storeu_ps(row_max, _mm512_add_ps(new, _mm512_set1_ps(LIFT)));
            _mm512_storeu_ps(args.row_scale.as_mut_ptr().add(lane), row_scale);
        }
    }
}

/// Map from scores to the steps of their exponents, in one vector of lanes.
#[derive(Clone, Copy)]
pub(super) struct Scale {
    factor: __m512,
    origin: __m512,
}

impl Scale {
    /// For weights `2^(score * factor - reference - LIFT)`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
    #[inline]
    pub(super) fn new(factor: f32, reference: __m512) -> Self {
        let origin =
            _mm512_fnmadd_ps(reference, _mm512_set1_ps(STEPS), _mm512_set1_ps(REFERENCE * STEPS - OFFSET - HALF));
        Self { factor: _mm512_set1_ps(factor * STEPS), origin }
    }

    /// Steps of the exponents of a vector of scores.
    ///
    /// # Safety
    ///
    /// There is a vector of scores at the place.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
    #[inline]
    unsafe fn steps(&self, scores: *const f32) -> __m512i {
        // SAFETY: the caller vouches for the scores.
        _mm512_cvtps_epi32(_mm512_fmadd_ps(unsafe { _mm512_loadu_ps(scores) }, self.factor, self.origin))
    }

    /// The weights of an even and an odd key, side by side.
    ///
    /// # Safety
    ///
    /// There are vectors of scores at both places.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
    #[inline]
    pub(super) unsafe fn pair(&self, even: *const f32, odd: *const f32) -> __m512i {
        // SAFETY: the caller vouches for the scores.
        unsafe { weights(self.steps(even), self.steps(odd)) }
    }
}

/// New reference, given the `old` one and the scores of a column.
///
/// # Safety
///
/// The scores have a vector at each of their places.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
#[inline]
pub(super) unsafe fn update_row_max(old: __m512, column: &Column) -> __m512 {
    let scores = softmax::Column { scores: column.scores.cast_mut(), lanes: column.lanes };
    // SAFETY: the caller vouches for the scores.
    let highest = unsafe { scores.largest::<Zmm>(column.rows) };
    let highest = _mm512_mul_ps(highest.0, _mm512_set1_ps(column.factor));
    _mm512_max_ps(old, _mm512_roundscale_ps::<_MM_FROUND_TO_POS_INF>(highest))
}

/// The scores and weights of one vector of lanes.
pub(super) struct Column {
    pub(super) scores: *const f32,
    pub(super) weights: *mut u32,
    /// Elements from one row of both to the next.
    pub(super) lanes: usize,
    pub(super) rows: usize,
    /// Pairs of rows that have a place for weights; those past the last row get zero.
    pub(super) pairs: usize,
    pub(super) factor: f32,
}

impl Column {
    /// Writes the weights `2^(score * factor - reference - LIFT)` and returns their sums.
    ///
    /// # Safety
    ///
    /// Scores and weights of all rows have a vector at their places.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
    #[inline]
    pub(super) unsafe fn exp_and_sum(&self, reference: __m512) -> __m512 {
        let scale = Scale::new(self.factor, reference);
        let (rows, lanes) = (self.rows, self.lanes);
        // SAFETY: the caller vouches for the places.
        unsafe {
            let score = |row: usize| self.scores.add(row * lanes);
            let store = |pair: usize, bits: __m512i| _mm512_storeu_si512(self.weights.add(pair * lanes).cast(), bits);
            let mut sums = [_mm512_setzero_ps(); CHAINS];
            let pairs = rows / 2;
            let whole = pairs - pairs % CHAINS;
            for first in (0..whole).step_by(CHAINS) {
                for (pair, sum) in (first..).zip(&mut sums) {
                    let bits = scale.pair(score(2 * pair), score(2 * pair + 1));
                    store(pair, bits);
                    *sum = added(*sum, bits);
                }
            }
            for pair in whole..pairs {
                let bits = scale.pair(score(2 * pair), score(2 * pair + 1));
                store(pair, bits);
                sums[0] = added(sums[0], bits);
            }
            if !rows.is_multiple_of(2) {
                let bits = weights(scale.steps(score(rows - 1)), _mm512_setzero_si512());
                let bits = _mm512_and_si512(bits, _mm512_set1_epi32(0xFFFF));
                store(pairs, bits);
                sums[0] = added(sums[0], bits);
            }
            for pair in rows.div_ceil(2)..self.pairs {
                store(pair, _mm512_setzero_si512());
            }
            let [first, second, third, fourth] = sums;
            _mm512_add_ps(_mm512_add_ps(first, second), _mm512_add_ps(third, fourth))
        }
    }
}

/// Independent sums of one lane, so that none waits for the latency of another.
const CHAINS: usize = 4;

/// The weights of an even and an odd key, side by side, from the steps of their exponents. Steps below 0 count as 0, whose
/// weight is subnormal, which the products flush to zero.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
#[inline]
fn weights(even: __m512i, odd: __m512i) -> __m512i {
    const LOWER_BYTES: u64 = 0x5555_5555_5555_5555;
    /// From steps to 64 parts of 1.
    const TO_PARTS: u32 = 3;
    /// From steps to the 128 parts of 1 that the bits of a `bf16` count.
    const TO_BITS: u32 = 2;
    // Packing leaves four even ones before four odd ones.
    let in_turns = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
    let steps = _mm512_shuffle_epi8(_mm512_packus_epi32(even, odd), in_turns);
    // SAFETY: the table is a vector of bytes.
    let table = unsafe { _mm512_loadu_si512(TO_POWER.as_ptr().cast()) };
    let to_power = _mm512_maskz_permutexvar_epi8(LOWER_BYTES, _mm512_srli_epi16::<TO_PARTS>(steps), table);
    _mm512_srli_epi16::<TO_BITS>(_mm512_adds_epu16(steps, to_power))
}

/// Adds both weights of each lane to its sum.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
#[inline]
pub(super) fn added(sum: __m512, weights: __m512i) -> __m512 {
    const ONE: i16 = 0x3F80;
    let as_pairs = |bits: __m512i| -> __m512bh {
        // SAFETY: both are 64 bytes of which every pattern is a value.
        unsafe { core::mem::transmute(bits) }
    };
    _mm512_dpbf16_ps(sum, as_pairs(weights), as_pairs(_mm512_set1_epi16(ONE)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bf16::Bf16Kernel;
    use crate::bf16::avx512_bf16::DotProducts;
    use crate::microkernel::LaneRows;

    /// State of the softmax of one vector of lanes after some scores, and their weights.
    struct Lanes {
        row_max: [f32; LANES],
        row_sum: [f32; LANES],
        row_scale: [f32; LANES],
        /// A row for each key.
        weights: Vec<[f32; LANES]>,
    }

    fn has_instructions() -> bool {
        is_x86_feature_detected!("avx512vbmi") && is_x86_feature_detected!("avx512bf16")
    }

    fn softmax_of(row_max: f32, factor: f32, scores: &[[f32; LANES]]) -> Lanes {
        let rows = scores.len();
        let mut lanes =
            Lanes { row_max: [row_max; LANES], row_sum: [0.0; LANES], row_scale: [9.0; LANES], weights: Vec::new() };
        let mut weights = vec![u32::MAX; Bf16Kernel::<DotProducts>::weight_size(rows)];
        // SAFETY: the processor has the instructions, as its callers have checked.
        unsafe {
            online_softmax(&mut SoftmaxArgs::<Bf16Kernel<DotProducts>> {
                lanes: LANES,
                rows,
                lane_rows: LaneRows::new(|_| rows),
                updates_row_max: false,
                factor,
                scores: scores.to_vec().as_flattened_mut(),
                weights: &mut weights,
                row_max: &mut lanes.row_max,
                row_sum: &mut lanes.row_sum,
                row_scale: &mut lanes.row_scale,
                keeps_weights: false,
            });
        }
        let weight = |row: usize, lane: usize| {
            let bits = weights[row / 2 * LANES + lane] >> (16 * (row % 2)) << 16;
            // As the products read it.
            let value = f32::from_bits(bits);
            if value.is_subnormal() { 0.0 } else { value }
        };
        lanes.weights = (0..padded(rows, DEPTH)).map(|row| std::array::from_fn(|lane| weight(row, lane))).collect();
        lanes
    }

    /// Exponents from -130 to 14, 37 to a step, all lanes and both places of a pair.
    #[test]
    fn weights_are_as_exact_as_stated() {
        if !has_instructions() {
            return;
        }
        let count = (144.0 * f64::from(STEPS)) as usize * 37;
        let exponent = |index: usize| (index as f64 / (37.0 * f64::from(STEPS)) - 130.0) as f32;
        let (mut worst, mut squares, mut mean, mut normal) = (0.0_f64, 0.0, 0.0, 0.0);
        for first in (0..count).step_by(LANES) {
            let scores = [std::array::from_fn(|lane| exponent(first + lane) / 2.0)];
            let lanes = softmax_of(LIFT, 2.0, &scores);
            for (lane, score) in scores[0].into_iter().enumerate() {
                let (exact, weight) = (f64::from(2.0 * score - LIFT).exp2(), f64::from(lanes.weights[0][lane]));
                if f64::from(lanes.row_max[lane]) != f64::from(LIFT) {
                    continue;
                }
                if 2.0 * score < -112.0 {
                    assert_eq!(weight, 0.0, "{score}");
                } else if 2.0 * score > -111.0 {
                    let error = weight / exact - 1.0;
                    worst = worst.max(error.abs());
                    (squares, mean, normal) = (squares + error * error, mean + error, normal + 1.0);
                }
                assert_eq!(lanes.row_sum[lane], lanes.weights[0][lane], "{score}");
            }
        }
        assert!(worst <= MAX_ERROR && worst > 0.98 * MAX_ERROR, "{worst:e}");
        assert!((squares / normal).sqrt() < 1.84e-3 && (mean / normal).abs() < 5.2e-5, "{squares} {mean} of {normal}");
    }

    /// Lanes that have attended nothing, and scores that rise by a little, by much and by very much.
    #[test]
    fn the_reference_is_updated_lazily() {
        if !has_instructions() {
            return;
        }
        for (old, score, row_max, row_scale) in [
            (f32::NEG_INFINITY, -700.5, -700.0, 0.0),
            (f32::NEG_INFINITY, f32::NEG_INFINITY, f32::NEG_INFINITY, 1.0),
            (3.0, f32::NEG_INFINITY, 3.0, 1.0),
            (3.0, 9.0, 3.0, 1.0),
            (3.0, 15.0, 15.0, (-12.0_f32).exp2()),
            (3.0, 18.5, 19.0, (-16.0_f32).exp2()),
            (3.0, 200.0, 200.0, 0.0),
            (3.0, 20_000.0, 20_000.0, 0.0),
        ] {
            let lanes = softmax_of(old + LIFT, 1.0, &[[score; LANES], [f32::NEG_INFINITY; LANES], [score; LANES]]);
            let state = (lanes.row_max, lanes.row_scale);
            assert_eq!(state, ([row_max + LIFT; LANES], [row_scale; LANES]), "{old} {score}");
            let weight = lanes.weights[0][0];
            let exact = (score - lanes.row_max[0]).exp2();
            let is_right = if score == f32::NEG_INFINITY { weight == 0.0 } else { (weight / exact - 1.0).abs() < 7e-3 };
            assert!(is_right, "{old} {score}: {weight} instead of {exact}");
            assert_eq!(lanes.row_sum[0], 2.0 * weight, "{old} {score}");
            assert!(lanes.weights.iter().skip(3).chain([&lanes.weights[1]]).all(|row| *row == [0.0; LANES]));
        }
    }
}
