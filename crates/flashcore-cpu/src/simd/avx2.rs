//! The AVX2 level, for processors with AVX2, FMA and F16C: eight query rows to a vector, sixteen registers.

use crate::driver::once::Once;
use crate::microkernel::FusedForward;
use crate::microkernel::vector_kernel::simd_level;
use crate::simd::exp2::{COEFFICIENTS, MAX_EXPONENT, MIN_EXPONENT};
use crate::simd::level::Level;
use crate::simd::tanh::{TanhVector, tanh};
use crate::simd::vector::{Vector, vector_methods};
use core::arch::x86_64::{
    __m128i, __m256, _CMP_EQ_OQ, _CMP_LT_OQ, _CMP_NLT_UQ, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEAREST_INT,
    _mm_loadu_si128, _mm256_add_epi32, _mm256_add_ps, _mm256_and_ps, _mm256_blendv_ps, _mm256_castpd_ps,
    _mm256_castps_pd, _mm256_castsi256_ps, _mm256_cmp_ps, _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_cvtps_epi32,
    _mm256_div_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_max_ps, _mm256_min_ps, _mm256_mul_ps,
    _mm256_permute2f128_ps, _mm256_round_ps, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps, _mm256_slli_epi32,
    _mm256_storeu_ps, _mm256_sub_ps, _mm256_unpackhi_pd, _mm256_unpackhi_ps, _mm256_unpacklo_pd, _mm256_unpacklo_ps,
};
use core::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
use core::arch::x86_64::{
    _mm_and_si128, _mm_cmpeq_epi16, _mm_cvtepu8_epi16, _mm_loadl_epi64, _mm_or_si128, _mm_set1_epi16, _mm_slli_epi16,
    _mm_srai_epi16,
};
use flashcore_problem::DType;

/// The level, and a witness that the processor has its instructions.
pub(crate) struct Avx2(());

impl Avx2 {
    /// `None` if the processor lacks something.
    pub(crate) fn detect() -> Option<Self> {
        static IS_THERE: Once<bool> = Once::new();
        IS_THERE.get(|| Level::Avx2.missing().is_empty()).then_some(Self(()))
    }
}

// Six rows by two vectors are twelve sums; with two vectors of the right factor and one of the left, 15 of 16
// registers. The latency of a multiply-add (4 or 5 cycles, two at a time) needs ten sums.
simd_level!(Avx2, Ymm, rows: 6, features: "avx2,fma,f16c");

impl FusedForward for Avx2 {}

#[derive(Clone, Copy)]
pub(crate) struct Ymm(__m256);

impl Vector for Ymm {
    type Real = f32;
    const LANES: usize = 8;

    vector_methods! {
        fn splat(value: f32) -> Self { Self(_mm256_set1_ps(value)) }
        fn load(from: *const f32) -> Self { Self(_mm256_loadu_ps(from)) }
        fn store(self, to: *mut f32) { _mm256_storeu_ps(to, self.0); }
        fn add(self, other: Self) -> Self { Self(_mm256_add_ps(self.0, other.0)) }
        fn sub(self, other: Self) -> Self { Self(_mm256_sub_ps(self.0, other.0)) }
        fn mul(self, other: Self) -> Self { Self(_mm256_mul_ps(self.0, other.0)) }
        fn mul_add(self, factor: Self, term: Self) -> Self { Self(_mm256_fmadd_ps(self.0, factor.0, term.0)) }
        fn max(self, other: Self) -> Self { Self(_mm256_max_ps(self.0, other.0)) }
        fn prefetch(address: *const u8) { _mm_prefetch::<_MM_HINT_T1>(address.cast()); }
        fn prefetch_next(address: *const u8) { _mm_prefetch::<_MM_HINT_T0>(address.cast()); }
        fn tanh(self) -> Self { tanh(self) }

        #[expect(clippy::cast_ptr_alignment, reason = "the load needs no alignment")]
        fn widen(dtype: DType, from: *const u8) -> Self {
            Self(match dtype {
                DType::F16 => _mm256_cvtph_ps(_mm_loadu_si128(from.cast::<__m128i>())),
                DType::Bf16 => {
                    let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast::<__m128i>()));
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
                }
                DType::F32 => _mm256_loadu_ps(from.cast::<f32>()),
                DType::F64 => unreachable!("problems in f64 are computed in f64"),
                DType::E4m3 => {
                    // As a half, whose exponent has another bias: a factor of 2^8, exact for subnormal numbers too.
                    let high = _mm_slli_epi16::<8>(_mm_cvtepu8_epi16(_mm_loadl_epi64(from.cast::<__m128i>())));
                    let half = _mm_and_si128(_mm_srai_epi16::<1>(high), _mm_set1_epi16(!0x4000));
                    let signed = _mm_or_si128(half, _mm_set1_epi16(i16::MIN));
                    let is_nan = _mm_cmpeq_epi16(signed, _mm_set1_epi16(0x3F80 | i16::MIN));
                    let half = _mm_or_si128(half, _mm_and_si128(is_nan, _mm_set1_epi16(0x7E00)));
                    _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0))
                }
                // The upper half of a half.
                DType::E5m2 => {
                    let wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(from.cast::<__m128i>()));
                    _mm256_cvtph_ps(_mm_slli_epi16::<8>(wide))
                }
            })
        }

        fn if_equal(self, other: Self, yes: Self, no: Self) -> Self {
            Self(_mm256_blendv_ps(no.0, yes.0, _mm256_cmp_ps::<_CMP_EQ_OQ>(self.0, other.0)))
        }

        fn exp2(self) -> Self {
            const EXPONENT_BIAS: i32 = 127;
            const FRACTION_BITS: i32 = 23;
            // The second operand is the result where it is a NaN.
            let exponent = _mm256_min_ps(_mm256_set1_ps(MAX_EXPONENT), self.0);
            let whole = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(exponent);
            let fraction = _mm256_sub_ps(exponent, whole);
            let mut power = _mm256_set1_ps(COEFFICIENTS[0]);
            for coefficient in &COEFFICIENTS[1..] {
                power = _mm256_fmadd_ps(power, fraction, _mm256_set1_ps(*coefficient));
            }
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(EXPONENT_BIAS));
            let scale = _mm256_castsi256_ps(_mm256_slli_epi32::<FRACTION_BITS>(biased));
            // Not less than, which a NaN is not either.
            let is_normal = _mm256_cmp_ps::<_CMP_NLT_UQ>(self.0, _mm256_set1_ps(MIN_EXPONENT));
            Self(_mm256_and_ps(is_normal, _mm256_mul_ps(power, scale)))
        }

        #[expect(clippy::needless_range_loop, reason = "rows and columns count registers and addresses alike")]
        fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
            // The lower and the upper halves of two vectors.
            const LOWER: i32 = 0x20;
            const UPPER: i32 = 0x31;
            // Half `h` of `fours[g][c]` is column `4 h + c` of rows `4 g` to `4 g + 3`.
            let mut fours = [[_mm256_setzero_ps(); 4]; 2];
            for group in 0..2 {
                let row = |index: usize| _mm256_loadu_ps(from.add((4 * group + index) * from_stride));
                let (first, second, third, fourth) = (row(0), row(1), row(2), row(3));
                let pairs = |low: __m256, high: __m256| {
                    let (low, high) = (_mm256_castps_pd(low), _mm256_castps_pd(high));
                    [_mm256_unpacklo_pd(low, high), _mm256_unpackhi_pd(low, high)].map(|pair| _mm256_castpd_ps(pair))
                };
                let [zeroth_column, first_column] =
                    pairs(_mm256_unpacklo_ps(first, second), _mm256_unpacklo_ps(third, fourth));
                let [second_column, third_column] =
                    pairs(_mm256_unpackhi_ps(first, second), _mm256_unpackhi_ps(third, fourth));
                fours[group] = [zeroth_column, first_column, second_column, third_column];
            }
            for column in 0..4 {
                let [low, high] = fours.map(|columns| columns[column]);
                _mm256_storeu_ps(to.add(column * to_stride), _mm256_permute2f128_ps::<LOWER>(low, high));
                _mm256_storeu_ps(to.add((4 + column) * to_stride), _mm256_permute2f128_ps::<UPPER>(low, high));
            }
        }
    }
}

impl TanhVector for Ymm {
    vector_methods! {
        fn div(self, other: Self) -> Self { Self(_mm256_div_ps(self.0, other.0)) }

        fn if_less(self, other: Self, yes: Self, no: Self) -> Self {
            Self(_mm256_blendv_ps(no.0, yes.0, _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, other.0)))
        }
    }
}
