//! The online softmax of both bf16 levels: scores to weights in pairs of `bf16`.

use core::arch::x86_64::{
    __m512, __m512i, _CMP_EQ_OQ, _CMP_GT_OQ, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEG_INF, _mm512_add_epi32, _mm512_add_ps,
    _mm512_castps_si512, _mm512_cmp_ps_mask, _mm512_fmadd_ps, _mm512_fmsub_ps, _mm512_loadu_ps,
    _mm512_mask_blend_epi16, _mm512_mask_mov_ps, _mm512_mul_ps, _mm512_reduce_ps, _mm512_scalef_ps, _mm512_set1_epi32,
    _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512, _mm512_srli_epi32, _mm512_storeu_ps, _mm512_storeu_si512,
    _mm512_sub_ps,
};

use super::pack::{DEPTH, LANES};
use crate::microkernel::softmax::Column;
use crate::microkernel::{Products, SoftmaxArgs, padded};
use crate::simd::avx512::Zmm;

/// Coefficients of `2^x` on [0, 1], highest power first. Interpolates `(2^x - 1) / x` at Chebyshev nodes; the last is exact, so that
/// `2^0` is.
const COEFFICIENTS: [f32; 5] = [1.276_311_4e-2, 5.344_103e-2, 0.240_647_05, 0.693_134, 1.0];

/// Largest error of the power of two relative to the value, measured over every `f32` from -126 to 0. It is a
/// five-hundredth of the rounding of a weight to `bf16`, 2^-8.
#[cfg(test)]
pub(crate) const MAX_ERROR: f64 = 7.6e-6;

/// Threshold of the lazy rescale: excess, in base 2, of scores above a stale row max before it is updated. Weights are then
/// up to 2^4 and as exact as below 1, and the output is spared most rescales: of random scores, all after the first few.
const RESCALE_THRESHOLD: f32 = 4.0;

/// One step of the online softmax. The row sum is that of weights before they are rounded: good enough for the log-sum-exp,
/// which a sum of weights with eight bits is not.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(crate) fn online_softmax<K: Products<Real = f32, Packed = u32>>(args: &mut SoftmaxArgs<'_, K>) {
    assert!(args.fits(), "a row panel of scores that is too small");
    let (lanes, pairs) = (args.lanes, padded(args.rows, DEPTH) / 2);
    let factor = _mm512_set1_ps(args.factor);
    for (block, lane) in (0..lanes).step_by(LANES).enumerate() {
        let rows = args.lane_rows.of_block(block);
        // SAFETY: every row of the panel has a vector at this lane, as asserted.
        unsafe {
            let scores = args.scores.as_mut_ptr().add(lane);
            let weights = args.weights.as_mut_ptr().add(lane);
            let old = _mm512_loadu_ps(args.row_max.as_ptr().add(lane));
            let new = update_row_max(old, _mm512_mul_ps(Column { scores, lanes }.largest::<Zmm>(rows).0, factor));
            let is_empty = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(new, _mm512_set1_ps(f32::NEG_INFINITY));
            let shift = _mm512_mask_mov_ps(new, is_empty, _mm512_setzero_ps());
            let weight = |row: usize| {
                let place = scores.add(row * lanes);
                let weight = exp2(_mm512_fmsub_ps(_mm512_loadu_ps(place), factor, shift));
                if args.keeps_weights {
                    _mm512_storeu_ps(place, weight);
                }
                weight
            };
            let (mut even_sum, mut odd_sum) = (_mm512_setzero_ps(), _mm512_setzero_ps());
            for pair in 0..rows / 2 {
                let (even, odd) = (weight(2 * pair), weight(2 * pair + 1));
                even_sum = _mm512_add_ps(even_sum, even);
                odd_sum = _mm512_add_ps(odd_sum, odd);
                _mm512_storeu_si512(weights.add(pair * lanes).cast(), rounded(even, odd));
            }
            if !rows.is_multiple_of(2) {
                let last = weight(rows - 1);
                even_sum = _mm512_add_ps(even_sum, last);
                _mm512_storeu_si512(weights.add(rows / 2 * lanes).cast(), rounded(last, _mm512_setzero_ps()));
            }
            for pair in rows.div_ceil(2)..pairs {
                _mm512_storeu_si512(weights.add(pair * lanes).cast(), _mm512_setzero_si512());
            }
            let is_same = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(old, new);
            let row_scale = _mm512_mask_mov_ps(exp2(_mm512_sub_ps(old, new)), is_same, _mm512_set1_ps(1.0));
            let sum = args.row_sum.as_mut_ptr().add(lane);
            let added = _mm512_add_ps(even_sum, odd_sum);
            _mm512_storeu_ps(sum, _mm512_fmadd_ps(_mm512_loadu_ps(sum), row_scale, added));
            _mm512_storeu_ps(args.row_max.as_mut_ptr().add(lane), new);
            _mm512_storeu_ps(args.row_scale.as_mut_ptr().add(lane), row_scale);
        }
    }
}

/// Packs weights: see [`Products::pack_weights`]. Rows that only pad get zeros.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(crate) fn pack_weights(weights: &[f32], lanes: usize, packed: &mut [u32]) {
    let rows = weights.len() / lanes;
    for (pair, places) in packed.chunks_exact_mut(lanes).enumerate() {
        for (vector, place) in places.chunks_exact_mut(LANES).enumerate() {
            let load = |row: usize| {
                if row >= rows {
                    return _mm512_setzero_ps();
                }
                let weights = &weights[row * lanes + vector * LANES..][..LANES];
                // SAFETY: the slice is a vector.
                unsafe { _mm512_loadu_ps(weights.as_ptr()) }
            };
            let pairs = rounded(load(2 * pair), load(2 * pair + 1));
            // SAFETY: the place has room for a vector.
            unsafe { _mm512_storeu_si512(place.as_mut_ptr().cast(), pairs) };
        }
    }
}

/// New row max, given the `old` one and the largest of the new scores (lazy rescale).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn update_row_max(old: __m512, largest: __m512) -> __m512 {
    let is_far_above = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(largest, _mm512_add_ps(old, _mm512_set1_ps(RESCALE_THRESHOLD)));
    _mm512_mask_mov_ps(old, is_far_above, largest)
}

/// `2^exponent`, to within `MAX_ERROR` where that is no subnormal; of minus infinity it is 0, of a NaN a NaN.
///
/// `VREDUCE` gives the excess over the next integer below, and 0 for an infinity; `VSCALEF` takes that integer off the
/// exponent itself. Adding a magic number and shifting it into place is three instructions more: the whole softmax was
/// measured 22% slower with it on Zen 4 and 34% on Emerald Rapids.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
pub(super) fn exp2(exponent: __m512) -> __m512 {
    let fraction = _mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(exponent);
    let mut power = _mm512_set1_ps(COEFFICIENTS[0]);
    for coefficient in &COEFFICIENTS[1..] {
        power = _mm512_fmadd_ps(power, fraction, _mm512_set1_ps(*coefficient));
    }
    _mm512_scalef_ps(power, exponent)
}

/// Rounds both to `bf16`, side by side, halves away from zero. A NaN may become something else; it shows in the row sum.
///
/// Four instructions of one cycle; the softmax was measured 2% to 5% slower with `VCVTNE2PS2BF16` and the permutation that
/// would have to follow it.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
fn rounded(even: __m512, odd: __m512) -> __m512i {
    const ODD_ELEMENTS: u32 = 0xAAAA_AAAA;
    let half = _mm512_set1_epi32(0x8000);
    let even = _mm512_srli_epi32::<16>(_mm512_add_epi32(_mm512_castps_si512(even), half));
    let odd = _mm512_add_epi32(_mm512_castps_si512(odd), half);
    _mm512_mask_blend_epi16(ODD_ELEMENTS, even, odd)
}
