//! What this machine's arithmetic units can do: the ceiling under which every time of the CPU backend is seen.

use std::time::Instant;

/// Independent sums per thread: more than the latency of a multiply-add times the units that do it, on any processor.
const SUMS: usize = 16;
/// Multiply-adds of each sum in one measurement; about a millisecond.
const ROUNDS: usize = 1 << 18;
/// Measurements of which the best counts: what disturbs a measurement only makes it slower.
const TRIES: usize = 12;

/// `f32` operations per second of fused multiply-adds on `threads` threads at once, with the widest vectors that the
/// processor has, measured now.
pub fn measured_peak(threads: usize) -> f64 {
    let best_of_one_thread = || (0..TRIES).map(|_| operations_per_second()).fold(0.0, f64::max);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(best_of_one_thread)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or(0.0)).sum()
    })
}

fn operations_per_second() -> f64 {
    let start = Instant::now();
    let lanes = multiply_adds();
    (2 * lanes * SUMS * ROUNDS) as f64 / start.elapsed().as_secs_f64()
}

/// Runs the loop and returns the lanes of its vectors.
#[cfg(target_arch = "x86_64")]
fn multiply_adds() -> usize {
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has AVX-512F, as just detected.
        unsafe { x86::avx512() };
        16
    } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: the processor has AVX2 and FMA, as just detected.
        unsafe { x86::avx2() };
        8
    } else {
        portable()
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn multiply_adds() -> usize {
    portable()
}

/// The loop as the compiler vectorises it for the least processor of the architecture: four lanes.
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
    LANES
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{ROUNDS, SUMS};
    use core::arch::x86_64::{_mm256_fmadd_ps, _mm256_set1_ps, _mm512_fmadd_ps, _mm512_set1_ps};
    use std::hint::black_box;

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
