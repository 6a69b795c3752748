//! The AVX-512 level, for processors with AVX-512: sixteen query rows to a vector, thirty-two registers.

use crate::driver::once::Once;
use crate::microkernel::vector_kernel::simd_level;
use crate::simd::exp2::MIN_EXPONENT;
use crate::simd::exp2::short::COEFFICIENTS;
use crate::simd::level::Level;
use crate::simd::tanh::{TanhVector, tanh};
use crate::simd::vector::{Vector, vector_methods};
use core::arch::asm;
use core::arch::x86_64::{
    __m128i, _mm_loadu_si128, _mm256_and_si256, _mm256_cmpeq_epi16_mask, _mm256_cvtepu8_epi16, _mm256_mask_mov_epi16,
    _mm256_or_si256, _mm256_set1_epi16, _mm256_slli_epi16, _mm256_srai_epi16,
};
use core::arch::x86_64::{
    __m256i, __m512, _CMP_EQ_OQ, _CMP_GT_OQ, _CMP_LT_OQ, _CMP_NLT_UQ, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEAREST_INT,
    _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch, _mm256_loadu_si256, _mm512_abs_ps, _mm512_add_ps, _mm512_castpd_ps,
    _mm512_castps_pd, _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_div_ps,
    _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mask_mov_ps, _mm512_maskz_scalef_ps, _mm512_max_ps, _mm512_mul_ps,
    _mm512_reduce_add_ps, _mm512_reduce_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_shuffle_f32x4, _mm512_slli_epi32,
    _mm512_storeu_ps, _mm512_sub_ps, _mm512_unpackhi_pd, _mm512_unpackhi_ps, _mm512_unpacklo_pd, _mm512_unpacklo_ps,
};
use flashcore_problem::DType;
use std::array::from_fn;

/// The level, and a witness that the processor has its instructions.
pub(crate) struct Avx512(());

impl Avx512 {
    /// `None` if the processor lacks something.
    pub(crate) fn detect() -> Option<Self> {
        static IS_THERE: Once<bool> = Once::new();
        IS_THERE.get(|| Level::Avx512.missing().is_empty()).then_some(Self(()))
    }
}

// Twelve rows by two vectors are twenty-four sums; with two vectors of the right factor and one of the left, 27 of 32
// registers. Each step is 14 loads for 24 multiply-adds, whose latency (4 cycles, two at a time) needs eight sums.
// Sixteen columns of a value are a cache line, which both vectors of weights find in the first-level cache when the first
// has brought it there; of twelve by two vectors, every second block would bring half of its lines once more.
// Tiles of 256 keys read and write the output half as often as those of 128, which is worth more than weights that fit into
// a first-level cache.
simd_level!(
    Avx512, Zmm, rows: 12, columns: 16, tile_rows: 256, features: "avx512f,avx512bw,avx512vl,avx512dq"
);

#[derive(Clone, Copy)]
pub(crate) struct Zmm(pub(crate) __m512);

impl Vector for Zmm {
    type Real = f32;
    const LANES: usize = 16;

    vector_methods! {
        fn splat(value: f32) -> Self { Self(_mm512_set1_ps(value)) }
        fn load(from: *const f32) -> Self { Self(_mm512_loadu_ps(from)) }
        fn store(self, to: *mut f32) { _mm512_storeu_ps(to, self.0); }
        fn add(self, other: Self) -> Self { Self(_mm512_add_ps(self.0, other.0)) }
        fn sub(self, other: Self) -> Self { Self(_mm512_sub_ps(self.0, other.0)) }
        fn mul(self, other: Self) -> Self { Self(_mm512_mul_ps(self.0, other.0)) }
        fn mul_add(self, factor: Self, term: Self) -> Self { Self(_mm512_fmadd_ps(self.0, factor.0, term.0)) }
        fn max(self, other: Self) -> Self { Self(_mm512_max_ps(self.0, other.0)) }
        fn prefetch(address: *const u8) { _mm_prefetch::<_MM_HINT_T1>(address.cast()); }
        fn prefetch_next(address: *const u8) { _mm_prefetch::<_MM_HINT_T0>(address.cast()); }
        fn prefetch_near(address: *const u8) { _mm_prefetch::<_MM_HINT_T0>(address.cast()); }
        fn tanh(self) -> Self { tanh(self) }
        fn sum(self) -> f32 { _mm512_reduce_add_ps(self.0) }

        fn is_finite(self) -> bool {
            _mm512_cmp_ps_mask::<_CMP_LT_OQ>(_mm512_abs_ps(self.0), _mm512_set1_ps(f32::INFINITY)) == u16::MAX
        }

        fn is_any_above(self, limit: f32) -> bool {
            _mm512_cmp_ps_mask::<_CMP_GT_OQ>(self.0, _mm512_set1_ps(limit)) != 0
        }

        // Where a processor lacks it, it does nothing.
        fn prefetch_for_writing(address: *const u8) {
            asm!("prefetchw [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
        }

        #[expect(clippy::cast_ptr_alignment, reason = "the load needs no alignment")]
        fn widen(dtype: DType, from: *const u8) -> Self {
            Self(match dtype {
                DType::F16 => _mm512_cvtph_ps(_mm256_loadu_si256(from.cast::<__m256i>())),
                DType::Bf16 => {
                    let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast::<__m256i>()));
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
                }
                DType::F32 => _mm512_loadu_ps(from.cast::<f32>()),
                DType::F64 => unreachable!("problems in f64 are computed in f64"),
                DType::E4m3 => {
                    // As a half, whose exponent has another bias: a factor of 2^8, exact for subnormal numbers too.
                    let high = _mm256_slli_epi16::<8>(_mm256_cvtepu8_epi16(_mm_loadu_si128(from.cast::<__m128i>())));
                    let half = _mm256_and_si256(_mm256_srai_epi16::<1>(high), _mm256_set1_epi16(!0x4000));
                    let signed = _mm256_or_si256(half, _mm256_set1_epi16(i16::MIN));
                    let is_nan = _mm256_cmpeq_epi16_mask(signed, _mm256_set1_epi16(0x3F80 | i16::MIN));
                    let half = _mm256_mask_mov_epi16(half, is_nan, _mm256_set1_epi16(0x7E00));
                    _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0))
                }
                // The upper half of a half.
                DType::E5m2 => {
                    let wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(from.cast::<__m128i>()));
                    _mm512_cvtph_ps(_mm256_slli_epi16::<8>(wide))
                }
            })
        }

        fn if_equal(self, other: Self, yes: Self, no: Self) -> Self {
            Self(_mm512_mask_mov_ps(no.0, _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(self.0, other.0), yes.0))
        }

        /// `VREDUCE` and `VSCALEF` leave the units that multiply alone on Zen 4.
        fn exp2(self) -> Self {
            let rest = _mm512_reduce_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0);
            let mut power = _mm512_set1_ps(COEFFICIENTS[0]);
            for coefficient in &COEFFICIENTS[1..] {
                power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(*coefficient));
            }
            // Not less than, which a NaN is not either.
            let is_normal = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(self.0, _mm512_set1_ps(MIN_EXPONENT));
            // The power of the rest times that of the integer.
            Self(_mm512_maskz_scalef_ps(is_normal, power, _mm512_sub_ps(self.0, rest)))
        }

        fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
            transpose(|row| _mm512_loadu_ps(from.add(row * from_stride)), to, to_stride);
        }

        fn transpose_times(self, from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
            transpose(|row| _mm512_mul_ps(_mm512_loadu_ps(from.add(row * from_stride)), self.0), to, to_stride);
        }
    }
}

/// Transposes 16 by 16: `to[column][row]` is the element of `row` in its `column`.
///
/// # Safety
///
/// The processor has the instructions, and each of 16 rows of `to` is valid for 16 elements.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "rows and columns count registers and addresses alike")]
unsafe fn transpose(row: impl Fn(usize) -> __m512, to: *mut f32, to_stride: usize) {
    // The even and the odd quarters of two vectors.
    const EVEN: i32 = 0b10_00_10_00;
    const ODD: i32 = 0b11_01_11_01;
    // SAFETY: the caller vouches for the instructions and the pointer.
    unsafe {
        // Quarter `q` of `fours[g][c]` is column `4 q + c` of rows `4 g` to `4 g + 3`.
        let mut fours = [[_mm512_setzero_ps(); 4]; 4];
        for group in 0..4 {
            let [first, second, third, fourth] = from_fn(|index| row(4 * group + index));
            let pairs = |low: __m512, high: __m512| {
                let (low, high) = (_mm512_castps_pd(low), _mm512_castps_pd(high));
                [_mm512_unpacklo_pd(low, high), _mm512_unpackhi_pd(low, high)].map(|pair| _mm512_castpd_ps(pair))
            };
            let [zeroth_column, first_column] =
                pairs(_mm512_unpacklo_ps(first, second), _mm512_unpacklo_ps(third, fourth));
            let [second_column, third_column] =
                pairs(_mm512_unpackhi_ps(first, second), _mm512_unpackhi_ps(third, fourth));
            fours[group] = [zeroth_column, first_column, second_column, third_column];
        }
        for column in 0..4 {
            let [first, second, third, fourth] = fours.map(|columns| columns[column]);
            let even = [_mm512_shuffle_f32x4::<EVEN>(first, second), _mm512_shuffle_f32x4::<EVEN>(third, fourth)];
            let odd = [_mm512_shuffle_f32x4::<ODD>(first, second), _mm512_shuffle_f32x4::<ODD>(third, fourth)];
            let quarters = [
                _mm512_shuffle_f32x4::<EVEN>(even[0], even[1]),
                _mm512_shuffle_f32x4::<EVEN>(odd[0], odd[1]),
                _mm512_shuffle_f32x4::<ODD>(even[0], even[1]),
                _mm512_shuffle_f32x4::<ODD>(odd[0], odd[1]),
            ];
            for quarter in 0..4 {
                _mm512_storeu_ps(to.add((4 * quarter + column) * to_stride), quarters[quarter]);
            }
        }
    }
}

impl TanhVector for Zmm {
    vector_methods! {
        fn div(self, other: Self) -> Self { Self(_mm512_div_ps(self.0, other.0)) }

        fn if_less(self, other: Self, yes: Self, no: Self) -> Self {
            Self(_mm512_mask_mov_ps(no.0, _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, other.0), yes.0))
        }
    }
}
