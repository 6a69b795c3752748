//! Attention on the CPU in pure Rust.
//!
//! ```
//! use flashcore_problem::{DType, Inputs, Outputs, Problem};
//!
//! let problem = Problem::new(1, 8, 100, 64, DType::F16);
//! let inputs = Inputs::random(&problem, 1);
//! let mut outputs = Outputs::poisoned(&problem);
//! flashcore_cpu::attend(&problem, &inputs, &mut outputs)?;
//! # Ok::<(), flashcore_cpu::CpuError>(())
//! ```
//!
//! The algorithm is `FlashAttention`: a panel of query rows stays, KV tiles pass by, and an online softmax with a row max and
//! a row sum merges the tiles, so that the scores of more than one tile never exist at once. Work items are independent and
//! run in parallel.
//!
//! Vector lanes are query rows, so that the softmax goes down columns and keys and values are used as they lie. The
//! instructions are chosen when the program runs: the best [`Level`] of the machine, or the one that
//! [`attend_with`], [`Level::set_default`] or the environment variable `FLASHCORE_CPU_LEVEL` names.
//!
//! | folder | what |
//! |---|---|
//! | `driver` | a call: tile scheduler, split-KV, threads, scratch memory, output |
//! | `attend` | one work item: row panels over KV tiles, or decoding; GQA groups, scores, `score_mod` |
//! | `microkernel` | the inner loops of a level: packing and products of tiles, softmax, decoding, prefetch |
//! | `simd` | vectors of each instruction set, the mathematics on them, and the [`Level`] to use |
//! | `append`, `kv_cache`, `merge` | operations beside attention: append to a KV cache, with attention after it, merge of partial results |
//! | `bf16` | the levels whose products are `bf16`: AVX-512 BF16 and AMX |
//!
//! Keys and values of 8 bits (FP8) are widened as they are packed, or read in place where a few rows decode; their scales
//! multiply scores and values. Sums, scores and weights are `f32`, or `f64` for `f64`; nothing is rounded to 16 bits but the output, and at the bf16
//! levels the weights.

#[expect(unsafe_code, reason = "threads write disjoint rows of one cache")]
mod append;
mod attend;
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "vector and tile instructions are called after the detection of their processor")]
mod bf16;
mod driver;
mod elements;
#[expect(unsafe_code, reason = "threads write disjoint rows of one cache")]
mod kv_cache;
mod limits;
#[expect(unsafe_code, reason = "threads write disjoint rows of one output")]
mod merge;
mod microkernel;
mod planted;
#[expect(unsafe_code, reason = "threads write disjoint rows of one tensor")]
mod rows;
mod simd;

pub use append::append;
pub use kv_cache::{kv_cache, kv_cache_and_query, kv_cache_with};
#[doc(hidden)]
pub use limits::LIMITS;
pub use merge::merge;
#[cfg(feature = "planted")]
#[doc(hidden)]
pub use planted::{Bug as PlantedBug, plant};
pub use simd::level::{Level, LevelError};
pub use simd::peak::{measured_peak, measured_peak_of};

use driver::once::Once;
use flashcore_problem::{DType, InputViews, Invalid, OutputViews, Problem, Validated};

/// Reason why attention was not computed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CpuError {
    /// The problem or the tensors given for it are wrong.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The requested level, or the one named in the environment, cannot be used.
    #[error(transparent)]
    Level(#[from] LevelError),
}

/// Computes attention, as [`flashcore_problem`] defines it, on all threads of rayon's current pool.
///
/// This is the pool that the calling thread is of, or else the global one. A process that was forked gets a pool of its own,
/// and where no threads can be made, the calling thread computes alone.
///
/// Inputs and outputs are borrowed: [`InputViews`] and [`OutputViews`] over slices, or owned
/// [`Inputs`](flashcore_problem::Inputs) and [`Outputs`](flashcore_problem::Outputs) by reference. Nothing is copied.
///
/// Every problem that validates is computed, and two runs give the same bits on any number of threads. Another level
/// gives other bits, equally right. On an error the outputs are as they were.
///
/// Keys and values that are past the key length of their sequence, or outside of the mask for all rows, are not read: they
/// change neither a bit nor the time. Rows of the output that belong to no sequence are not written. Keys that a mask expression takes out are read, and take no part.
pub fn attend<'a>(
    problem: &Problem,
    inputs: impl Into<InputViews<'a>>,
    outputs: impl Into<OutputViews<'a>>,
) -> Result<(), CpuError> {
    attend_with(Level::default_level()?, problem, inputs, outputs)
}

/// Number of threads that [`attend`] uses when it is called from this thread.
pub fn thread_count() -> usize {
    driver::workers::Workers::find().count()
}

/// [`attend`] with the instructions of one level, which is an error where the machine lacks them.
pub fn attend_with<'a>(
    level: Level,
    problem: &Problem,
    inputs: impl Into<InputViews<'a>>,
    outputs: impl Into<OutputViews<'a>>,
) -> Result<(), CpuError> {
    Ok(attend_validated(level, Validated::new(problem, inputs.into(), outputs.into())?)?)
}

/// [`attend_with`] for tensors that have been checked already.
pub fn attend_validated(level: Level, call: Validated<'_>) -> Result<(), LevelError> {
    // Detected once, because the list takes memory and stays the same.
    static AVAILABLE: Once<Vec<Level>> = Once::new();
    if !AVAILABLE.get(Level::available).contains(&level) {
        level.check()?;
    }
    let (problem, inputs, outputs) = call.into_parts();
    match problem.dtype.accumulator() {
        DType::F64 => driver::attend(&simd::portable::Portable::<f64>::new(), problem, &inputs, outputs),
        DType::F16 | DType::Bf16 | DType::F32 | DType::E4m3 | DType::E5m2 => {
            attend_in_f32(level, problem, &inputs, outputs);
        }
    }
    Ok(())
}

/// Computes at a level that was checked. A level that serves only some types gives the others to the next below it that
/// does.
#[cfg(target_arch = "x86_64")]
fn attend_in_f32(level: Level, problem: &Problem, inputs: &InputViews<'_>, outputs: OutputViews<'_>) {
    let is_bf16 = problem.dtype == DType::Bf16 && problem.dtypes().are_same();
    match level {
        Level::Amx if is_bf16 => {
            if let Some(kernel) = bf16::amx::detect() {
                return attend_in_pairs(kernel, problem, inputs, outputs);
            }
        }
        Level::Avx512Bf16 if is_bf16 => {
            if let Some(kernel) = bf16::avx512_bf16::detect() {
                return attend_in_pairs(kernel, problem, inputs, outputs);
            }
        }
        Level::Amx | Level::Avx512Bf16 | Level::Avx512 => {
            if let Some(kernel) = simd::avx512::Avx512::detect() {
                return driver::attend(&kernel, problem, inputs, outputs);
            }
        }
        Level::Avx2 => {
            if let Some(kernel) = simd::avx2::Avx2::detect() {
                return driver::attend(&kernel, problem, inputs, outputs);
            }
        }
        Level::Neon | Level::Portable => {}
    }
    driver::attend(&simd::portable::Portable::<f32>::new(), problem, inputs, outputs);
}

/// Computes in pairs of `bf16`, where their products are exact.
#[cfg(target_arch = "x86_64")]
fn attend_in_pairs<M: bf16::PairMultiplier>(
    kernel: bf16::Bf16Kernel<M>,
    problem: &Problem,
    inputs: &InputViews<'_>,
    outputs: OutputViews<'_>,
) {
    // A few rows are bound by reading the keys, which products in pairs do not make faster: a survey would only read them
    // twice.
    if driver::scheduler::is_all_decode(problem, inputs) {
        return driver::attend(kernel.exact(), problem, inputs, outputs);
    }
    let survey = kernel.survey(problem, inputs);
    if survey.is_exact(problem) {
        driver::attend(&kernel.for_problem(problem, inputs, &survey), problem, inputs, outputs);
    } else {
        driver::attend(kernel.exact(), problem, inputs, outputs);
    }
}

/// Computes at a level that was checked.
#[cfg(target_arch = "aarch64")]
fn attend_in_f32(level: Level, problem: &Problem, inputs: &InputViews<'_>, outputs: OutputViews<'_>) {
    if level == Level::Neon
        && let Some(kernel) = simd::neon::Neon::detect()
    {
        return driver::attend(&kernel, problem, inputs, outputs);
    }
    driver::attend(&simd::portable::Portable::<f32>::new(), problem, inputs, outputs);
}

/// Computes at a level that was checked.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn attend_in_f32(_level: Level, problem: &Problem, inputs: &InputViews<'_>, outputs: OutputViews<'_>) {
    driver::attend(&simd::portable::Portable::<f32>::new(), problem, inputs, outputs);
}
