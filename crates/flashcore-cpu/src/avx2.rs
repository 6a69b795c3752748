//! The microkernel for processors with AVX2, FMA and F16C: eight query rows to a vector, sixteen registers.

use crate::exp2::{COEFFICIENTS, LEAST};
use crate::level::Level;
use crate::microkernel::{Microkernel, Order, Strip, Target, TileProduct};
use crate::pack;
use core::arch::x86_64::{
    __m128i, __m256, _CMP_EQ_OQ, _CMP_NLT_UQ, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128,
    _mm256_add_epi32, _mm256_add_ps, _mm256_and_ps, _mm256_blendv_ps, _mm256_castsi256_ps, _mm256_cmp_ps,
    _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_cvtps_epi32, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_max_ps,
    _mm256_mul_ps, _mm256_round_ps, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps, _mm256_slli_epi32,
    _mm256_storeu_ps, _mm256_sub_ps,
};
use flashcore_problem::DType;

const LANES: usize = 8;

/// Six rows by two vectors are twelve sums; with two vectors of the right factor and one of the left, 15 of 16
/// registers. The latency of a multiply-add (4 or 5 cycles, two at a time) asks for ten sums.
const ROWS: usize = 6;

/// Rows that remain are done four or two at a time, so that 64 and 128 columns of a value waste nothing.
const LEAST_ROWS: usize = 2;

/// A witness that the processor has what the kernel needs.
pub(crate) struct Avx2(());

impl Avx2 {
    /// `None` where the processor lacks something.
    pub(crate) fn detect() -> Option<Self> {
        Level::Avx2.missing().is_empty().then_some(Self(()))
    }
}

impl Microkernel<f32> for Avx2 {
    const ROW_BLOCK: usize = LEAST_ROWS;
    const COLUMN_BLOCK: usize = LANES;
    const STRIP: usize = 2 * LANES;

    fn multiply(&self, product: TileProduct<'_, f32>) {
        assert!(product.fits(LEAST_ROWS, LANES), "a product of tiles that are too small");
        // SAFETY: `self` is a witness of the processor's features, and the tiles hold what the product touches.
        unsafe {
            match product.left_order {
                Order::RowByRow => multiply::<true>(product),
                Order::ColumnByColumn => multiply::<false>(product),
            }
        }
    }

    fn weigh(&self, mut strip: Strip<'_, f32>) {
        assert!(strip.fits(LANES), "a strip of scores that is too small");
        // SAFETY: `self` is a witness of the processor's features, and the strip holds whole rows of its columns.
        unsafe { weigh(&mut strip) }
    }

    fn load(&self, dtype: DType, bytes: &[u8], values: &mut [f32]) {
        let count = (bytes.len() / 2).min(values.len());
        let whole = match dtype {
            DType::F16 | DType::Bf16 => count - count % LANES,
            DType::F32 | DType::F64 => 0,
        };
        let (first_bytes, rest_bytes) = bytes.split_at(2 * whole);
        let (first, rest) = values.split_at_mut(whole);
        // SAFETY: `self` is a witness of the processor's features, and both parts hold the same number of vectors.
        unsafe { widen(dtype, first_bytes, first) };
        pack::load(dtype, rest_bytes, rest);
    }
}

/// # Safety
///
/// The tiles fit: see [`TileProduct::fits`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn multiply<const ROW_BY_ROW: bool>(mut product: TileProduct<'_, f32>) {
    let mut column = 0;
    while column < product.columns {
        let is_pair = product.columns - column >= 2 * LANES;
        let mut row = 0;
        while row < product.rows {
            let rows = (product.rows - row).min(ROWS);
            // SAFETY: the block lies within the tiles: rows and columns are multiples of the least block, and what
            // remains of them is at least as large as the block chosen here.
            unsafe {
                match (rows, is_pair) {
                    (ROWS, true) => block::<ROWS, 2, ROW_BY_ROW>(&mut product, row, column),
                    (ROWS, false) => block::<ROWS, 1, ROW_BY_ROW>(&mut product, row, column),
                    (4, true) => block::<4, 2, ROW_BY_ROW>(&mut product, row, column),
                    (4, false) => block::<4, 1, ROW_BY_ROW>(&mut product, row, column),
                    (_, true) => block::<LEAST_ROWS, 2, ROW_BY_ROW>(&mut product, row, column),
                    (_, false) => block::<LEAST_ROWS, 1, ROW_BY_ROW>(&mut product, row, column),
                }
            }
            row += rows;
        }
        column += if is_pair { 2 * LANES } else { LANES };
    }
}

/// The part of a product that stays in registers.
///
/// # Safety
///
/// The tiles fit, and hold `ROW_COUNT` rows from `row` on and `VECTORS` vectors from `column` on.
#[target_feature(enable = "avx2,fma,f16c")]
#[expect(clippy::needless_range_loop, reason = "rows and vectors count registers and addresses alike")]
unsafe fn block<const ROW_COUNT: usize, const VECTORS: usize, const ROW_BY_ROW: bool>(
    tiles: &mut TileProduct<'_, f32>,
    row: usize,
    column: usize,
) {
    let (columns, stride) = (tiles.columns, tiles.left_stride);
    let mut sums = [[_mm256_setzero_ps(); VECTORS]; ROW_COUNT];
    // SAFETY: the caller vouches that the block lies within each of the tiles, which is all that is touched.
    unsafe {
        let place = tiles.product.as_mut_ptr().add(row * columns + column);
        if let Target::Corrected(correction) = tiles.target {
            for vector in 0..VECTORS {
                let factor = _mm256_loadu_ps(correction.as_ptr().add(column + vector * LANES));
                for index in 0..ROW_COUNT {
                    let before = _mm256_loadu_ps(place.add(index * columns + vector * LANES));
                    sums[index][vector] = _mm256_mul_ps(before, factor);
                }
            }
        }
        if tiles.depth > 0 {
            let left = tiles.left.as_ptr().add(if ROW_BY_ROW { row * stride } else { row });
            let right = tiles.right.as_ptr().add(column);
            for step in 0..tiles.depth {
                let mut factors = [_mm256_setzero_ps(); VECTORS];
                for vector in 0..VECTORS {
                    factors[vector] = _mm256_loadu_ps(right.add(step * columns + vector * LANES));
                }
                for index in 0..ROW_COUNT {
                    let offset = if ROW_BY_ROW { index * stride + step } else { step * stride + index };
                    let element = _mm256_set1_ps(*left.add(offset));
                    for vector in 0..VECTORS {
                        sums[index][vector] = _mm256_fmadd_ps(element, factors[vector], sums[index][vector]);
                    }
                }
            }
        }
        if let Target::Scaled(factor) = tiles.target {
            for sum in sums.as_flattened_mut() {
                *sum = _mm256_mul_ps(*sum, _mm256_set1_ps(factor));
            }
        }
        for index in 0..ROW_COUNT {
            for vector in 0..VECTORS {
                _mm256_storeu_ps(place.add(index * columns + vector * LANES), sums[index][vector]);
            }
        }
    }
}

/// # Safety
///
/// The strip fits: see [`Strip::fits`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn weigh(strip: &mut Strip<'_, f32>) {
    let (columns, keys) = (strip.columns, strip.scores.len() / strip.columns);
    let negative_infinity = _mm256_set1_ps(f32::NEG_INFINITY);
    for column in (0..columns).step_by(LANES) {
        // SAFETY: the caller vouches that every row of the strip has a vector at this column.
        unsafe {
            let scores = strip.scores.as_mut_ptr().add(column);
            let old = _mm256_loadu_ps(strip.maximum.as_ptr().add(column));
            let mut new = old;
            for key in 0..keys {
                // The second operand is the result where either is a NaN.
                new = _mm256_max_ps(_mm256_loadu_ps(scores.add(key * columns)), new);
            }
            let is_empty = _mm256_cmp_ps::<_CMP_EQ_OQ>(new, negative_infinity);
            let shift = _mm256_blendv_ps(new, _mm256_setzero_ps(), is_empty);
            let mut added = _mm256_setzero_ps();
            for key in 0..keys {
                let score = scores.add(key * columns);
                let weight = exp2(_mm256_sub_ps(_mm256_loadu_ps(score), shift));
                _mm256_storeu_ps(score, weight);
                added = _mm256_add_ps(added, weight);
            }
            let is_same = _mm256_cmp_ps::<_CMP_EQ_OQ>(old, new);
            let correction = _mm256_blendv_ps(exp2(_mm256_sub_ps(old, new)), _mm256_set1_ps(1.0), is_same);
            let sum = strip.sum.as_mut_ptr().add(column);
            _mm256_storeu_ps(sum, _mm256_fmadd_ps(_mm256_loadu_ps(sum), correction, added));
            _mm256_storeu_ps(strip.maximum.as_mut_ptr().add(column), new);
            _mm256_storeu_ps(strip.correction.as_mut_ptr().add(column), correction);
        }
    }
}

/// `2^exponent` for exponents up to 0, as [`crate::exp2`] says.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn exp2(exponent: __m256) -> __m256 {
    const EXPONENT_BIAS: i32 = 127;
    const FRACTION_BITS: i32 = 23;
    let whole = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(exponent);
    let fraction = _mm256_sub_ps(exponent, whole);
    let mut power = _mm256_set1_ps(COEFFICIENTS[0]);
    for coefficient in &COEFFICIENTS[1..] {
        power = _mm256_fmadd_ps(power, fraction, _mm256_set1_ps(*coefficient));
    }
    let biased = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(EXPONENT_BIAS));
    let scale = _mm256_castsi256_ps(_mm256_slli_epi32::<FRACTION_BITS>(biased));
    // Not less than, which a NaN is not either.
    let is_normal = _mm256_cmp_ps::<_CMP_NLT_UQ>(exponent, _mm256_set1_ps(LEAST));
    _mm256_and_ps(is_normal, _mm256_mul_ps(power, scale))
}

/// Elements of 16 bits to 32.
///
/// # Safety
///
/// `bytes` holds two bytes for each of `values`, which are whole vectors.
#[target_feature(enable = "avx2,fma,f16c")]
#[expect(clippy::cast_ptr_alignment, reason = "the load asks for no alignment")]
unsafe fn widen(dtype: DType, bytes: &[u8], values: &mut [f32]) {
    for index in (0..values.len()).step_by(LANES) {
        // SAFETY: the caller vouches that a whole vector is left in both.
        unsafe {
            let narrow = _mm_loadu_si128(bytes.as_ptr().add(2 * index).cast::<__m128i>());
            let wide = match dtype {
                DType::F16 => _mm256_cvtph_ps(narrow),
                DType::Bf16 | DType::F32 | DType::F64 => {
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(narrow)))
                }
            };
            _mm256_storeu_ps(values.as_mut_ptr().add(index), wide);
        }
    }
}
