//! Peak FLOP/s of this machine's arithmetic units: the ceiling (roofline) of the CPU backend, measured.

use crate::simd::level::Level;
use flashcore_problem::DType;
use std::time::Instant;

/// Independent sums per thread: more than the latency of a multiply-add times the units that do it, on any processor.
const SUMS: usize = 16;
/// Multiply-adds of each sum in one measurement; about a millisecond.
const ROUNDS: usize = 1 << 18;
/// Measurements of which the best counts: what disturbs a measurement only makes it slower.
const TRIES: usize = 12;

/// Measures the peak: `f32` operations per second of fused multiply-adds on `threads` threads at once, with the widest
/// vectors that the processor has.
pub fn measured_peak(threads: usize) -> f64 {
    measured(threads, multiply_adds)
}

/// Measures the peak of a level for problems of a type: operations per second of the instructions that multiply, on
/// `threads` threads at once. These are `bf16` products at the bf16 levels, and else multiply-adds of vectors as wide as
/// those of the level; of a level that this processor lacks, as [`measured_peak`].
///
/// ```
/// use flashcore_cpu::{Level, measured_peak_of};
/// use flashcore_problem::DType;
///
/// assert!(measured_peak_of(Level::best(), DType::Bf16, 1) > 0.0);
/// ```
pub fn measured_peak_of(level: Level, dtype: DType, threads: usize) -> f64 {
    if !level.missing().is_empty() {
        return measured_peak(threads);
    }
    match (level, dtype) {
        #[cfg(target_arch = "x86_64")]
        (Level::Amx, DType::Bf16) => measured(threads, crate::bf16::amx::multiply_adds),
        #[cfg(target_arch = "x86_64")]
        (Level::Avx512Bf16, DType::Bf16) => measured(threads, x86::bf16_multiply_adds),
        #[cfg(target_arch = "x86_64")]
        (Level::Avx512 | Level::Avx512Bf16 | Level::Amx, _) => measured(threads, avx512),
        #[cfg(target_arch = "x86_64")]
        (Level::Avx2, _) => measured(threads, avx2),
        #[cfg(not(target_arch = "aarch64"))]
        (Level::Portable, _) => measured(threads, portable),
        _ => measured_peak(threads),
    }
}

/// Operations per second of a loop that returns its number of multiply-adds.
fn measured(threads: usize, multiply_adds: fn() -> usize) -> f64 {
    let operations_per_second = || {
        let start = Instant::now();
        let count = multiply_adds();
        (2 * count) as f64 / start.elapsed().as_secs_f64()
    };
    let best_of_one_thread = || (0..TRIES).map(|_| operations_per_second()).fold(0.0, f64::max);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(best_of_one_thread)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or(0.0)).sum()
    })
}

/// Runs the loop and returns its number of multiply-adds.
#[cfg(target_arch = "x86_64")]
fn multiply_adds() -> usize {
    if Level::Avx512.missing().is_empty() {
        avx512()
    } else if Level::Avx2.missing().is_empty() {
        avx2()
    } else {
        portable()
    }
}

/// The loop with 512-bit vectors. The processor must have AVX-512F.
#[cfg(target_arch = "x86_64")]
fn avx512() -> usize {
    // SAFETY: the caller has looked whether the level lacks something.
    unsafe { x86::avx512() };
    16 * SUMS * ROUNDS
}

/// The loop with 256-bit vectors. The processor must have AVX2 and FMA.
#[cfg(target_arch = "x86_64")]
fn avx2() -> usize {
    // SAFETY: the caller has looked whether the level lacks something.
    unsafe { x86::avx2() };
    8 * SUMS * ROUNDS
}

#[cfg(target_arch = "aarch64")]
fn multiply_adds() -> usize {
    // SAFETY: every AArch64 processor that Rust's standard library runs on has NEON.
    unsafe { neon() };
    4 * SUMS * ROUNDS
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn multiply_adds() -> usize {
    portable()
}

/// The loop as the compiler vectorizes it for the least processor of the architecture: four lanes.
#[cfg(not(target_arch = "aarch64"))]
fn portable() -> usize {
    const LANES: usize = 4;
    let mut sums = [[1.0f32; LANES]; SUMS];
    let (factor, term) = (std::hint::black_box(0.999_9f32), std::hint::black_box(1e-4f32));
    for _ in 0..ROUNDS {
        for sum in sums.as_flattened_mut() {
            *sum = *sum * factor + term;
        }
    }
    std::hint::black_box(sums);
    LANES * SUMS * ROUNDS
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
fn neon() {
    use core::arch::aarch64::{vdupq_n_f32, vfmaq_f32};
    use std::hint::black_box;

    let mut sums = [vdupq_n_f32(1.0); SUMS];
    let (factor, term) = (vdupq_n_f32(black_box(0.999_9)), vdupq_n_f32(black_box(1e-4)));
    for _ in 0..ROUNDS {
        for sum in &mut sums {
            // The instruction leaves its result in the addend.
            *sum = vfmaq_f32(*sum, factor, term);
        }
    }
    black_box(sums);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{ROUNDS, SUMS};
    use core::arch::x86_64::{
        _mm256_fmadd_ps, _mm256_set1_ps, _mm512_cvtne2ps_pbh, _mm512_dpbf16_ps, _mm512_fmadd_ps, _mm512_set1_ps,
    };
    use std::hint::black_box;

    /// Runs the loop of [`Level::Avx512Bf16`](crate::Level::Avx512Bf16), which must lack nothing.
    pub(super) fn bf16_multiply_adds() -> usize {
        // SAFETY: the caller has looked whether the level lacks something.
        unsafe { avx512_bf16() };
        32 * SUMS * ROUNDS
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    fn avx512_bf16() {
        let mut sums = [_mm512_set1_ps(1.0); SUMS];
        let pairs = |value: f32| _mm512_cvtne2ps_pbh(_mm512_set1_ps(value), _mm512_set1_ps(value));
        let (left, right) = (pairs(black_box(0.5)), pairs(black_box(0.25)));
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, left, right);
            }
        }
        black_box(sums);
    }

    #[target_feature(enable = "avx512f")]
    pub(super) fn avx512() {
        let mut sums = [_mm512_set1_ps(1.0); SUMS];
        let (factor, term) = (_mm512_set1_ps(black_box(0.999_9)), _mm512_set1_ps(black_box(1e-4)));
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, factor, term);
            }
        }
        black_box(sums);
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn avx2() {
        let mut sums = [_mm256_set1_ps(1.0); SUMS];
        let (factor, term) = (_mm256_set1_ps(black_box(0.999_9)), _mm256_set1_ps(black_box(1e-4)));
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, factor, term);
            }
        }
        black_box(sums);
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    /// A level of narrow vectors is not measured against a peak of wide ones.
    #[test]
    fn the_peak_is_that_of_the_level() {
        if !Level::Avx2.missing().is_empty() {
            return;
        }
        // Four lanes without fused multiply-adds against eight or sixteen with them: a factor of four or more.
        let (narrow, wide) = (measured_peak_of(Level::Portable, DType::F32, 1), measured_peak(1));
        assert!(narrow < 0.6 * wide, "{narrow:e} {wide:e}");
    }
}
