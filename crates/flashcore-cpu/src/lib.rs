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
//! The algorithm is that of `FlashAttention`: a tile of query rows stays, tiles of keys and values pass by, and a
//! running maximum and sum per row make the softmax of the parts into the softmax of the whole, so that the scores of
//! more than one tile never exist at once. Tiles are independent and run in parallel.
//!
//! Vector lanes are query rows, so that the softmax goes down columns and keys and values are used as they lie. The
//! instructions are chosen when the program runs: the best [`Level`] of the machine, or the one that
//! [`attend_with`], [`Level::set_default`] or the environment variable `FLASHCORE_CPU_LEVEL` names.
//!
//! | module | is |
//! |---|---|
//! | `driver` | from a problem to work items, and from what they give to the output |
//! | `split` | how a problem is cut into work items |
//! | `group` | the query rows that share keys |
//! | `tiles` | tiles of query rows and tiles of keys: which meet, and what happens when they do |
//! | `stream` | a few query rows over many keys, which are read where they lie |
//! | `workers`, `fork`, `linger` | the threads that compute, what becomes of them in a forked child, and how they wait |
//! | `once` | values that are computed at first use, without a lock |
//! | `scratch`, `output` | memory that threads keep from call to call, and memory that several write at once |
//! | `pack` | bytes of the problem's type to tiles of the accumulator's, and back |
//! | `scores`, `shaping`, `expressions` | from products to scores: softcap, `ALiBi`, bias, expressions, in base 2 |
//! | `masking` | what rows do not attend, taken out of their scores |
//! | `softmax` | the ends of the softmax: corrections, sinks, the log-sum-exp |
//! | `level` | the sets of instructions, and which of them the machine has |
//! | `microkernel` | what is worth writing by hand for each of them: products of tiles, exponentials, conversions |
//! | `vector` | the operations on vectors that a level has to offer |
//! | `blocks`, `weighing`, `packing`, `stream_blocks` | the microkernel made of them |
//! | `portable`, `neon`, `avx2`, `avx512` | the levels whose arithmetic is `f32` |
//! | `bf16`, `avx512_bf16`, `amx` | the levels whose products are `bf16`: what they share, and the instructions of each |
//! | `exp2`, `tanh` | the functions of the vector kernels, and how far they are from the exact ones |
//! | `peak` | what the processor's arithmetic units can do at most, measured |
//!
//! Sums, scores and weights are `f32`, or `f64` for `f64`; nothing is rounded to 16 bits but the output, and at the bf16
//! levels the weights.

#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "tile registers are used behind the detection of their processor")]
mod amx;
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "vector instructions are called behind the detection of their processor")]
mod avx2;
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "vector instructions are called behind the detection of their processor")]
mod avx512;
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "vector instructions are called behind the detection of their processor")]
mod avx512_bf16;
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "vector instructions are called behind the detection of their processor")]
mod bf16;
#[expect(unsafe_code, reason = "the loops of vectors that the levels share")]
mod blocks;
#[expect(unsafe_code, reason = "threads write parts of one output")]
mod driver;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64", test))]
mod exp2;
mod expressions;
#[cfg_attr(unix, expect(unsafe_code, reason = "the system is asked to tell of forks"))]
mod fork;
mod group;
#[cfg(test)]
mod kernel_tests;
mod level;
mod linger;
mod masking;
#[expect(unsafe_code, reason = "vector instructions may not be called everywhere")]
mod microkernel;
#[cfg(target_arch = "aarch64")]
#[expect(unsafe_code, reason = "vector instructions are called behind the detection of their processor")]
mod neon;
#[expect(unsafe_code, reason = "a value that is shared without a lock")]
mod once;
#[expect(unsafe_code, reason = "threads write parts of one output")]
mod output;
mod pack;
#[expect(unsafe_code, reason = "the loops of vectors that the levels share")]
mod packing;
#[expect(unsafe_code, reason = "vector instructions are called behind the detection of their processor")]
mod peak;
#[expect(unsafe_code, reason = "it implements the trait of vectors")]
mod portable;
#[cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "an instruction without effect but on caches"))]
mod prefetch;
mod real;
mod scores;
mod scratch;
#[expect(unsafe_code, reason = "the loops of vectors that the levels share")]
mod shaping;
mod softmax;
mod split;
mod stream;
#[expect(unsafe_code, reason = "the loops of vectors that the levels share")]
mod stream_blocks;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64", test))]
#[expect(unsafe_code, reason = "vector instructions may not be called everywhere")]
mod tanh;
mod tiles;
#[expect(unsafe_code, reason = "vector instructions may not be called everywhere")]
mod vector;
#[expect(unsafe_code, reason = "the loops of vectors that the levels share")]
mod weighing;
#[expect(unsafe_code, reason = "a pool that is shared without a lock")]
mod workers;

pub use level::{Level, LevelError};
pub use peak::{measured_peak, measured_peak_of};

use flashcore_problem::{DType, InputViews, Invalid, OutputViews, Problem};
use once::Once;

/// Why attention was not computed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CpuError {
    /// The problem or the tensors given for it are wrong.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The level asked for, or named in the environment, cannot be used.
    #[error(transparent)]
    Level(#[from] LevelError),
}

/// Computes attention, as [`flashcore_problem`] defines it, on all threads of rayon's current pool.
///
/// That is the pool that the calling thread is of, or else the global one. A process that was forked gets a pool of its own,
/// and where no threads can be made, the calling thread computes alone.
///
/// Inputs and outputs are borrowed: [`InputViews`] and [`OutputViews`] over slices, or owned
/// [`Inputs`](flashcore_problem::Inputs) and [`Outputs`](flashcore_problem::Outputs) by reference. Nothing is copied.
///
/// Every problem that validates is computed, and two runs give the same bits on any number of threads. Another level
/// gives other bits, equally right. On an error the outputs are as they were.
///
/// Keys and values that are past the key length of their batch, or outside of the mask for all rows, are not read: they
/// change neither a bit nor the time. Keys that a mask expression takes out are read, and take no part.
pub fn attend<'a>(
    problem: &Problem,
    inputs: impl Into<InputViews<'a>>,
    outputs: impl Into<OutputViews<'a>>,
) -> Result<(), CpuError> {
    attend_with(Level::default_level()?, problem, inputs, outputs)
}

/// How many threads [`attend`] uses when it is called from this thread.
pub fn thread_count() -> usize {
    workers::Workers::find().count()
}

/// [`attend`] with the instructions of one level, which is an error where the machine lacks them.
pub fn attend_with<'a>(
    level: Level,
    problem: &Problem,
    inputs: impl Into<InputViews<'a>>,
    outputs: impl Into<OutputViews<'a>>,
) -> Result<(), CpuError> {
    // Asked once, because the answer takes memory and stays the same.
    static AVAILABLE: Once<Vec<Level>> = Once::new();
    if !AVAILABLE.get(Level::available).contains(&level) {
        level.check()?;
    }
    let (inputs, outputs) = (inputs.into(), outputs.into());
    inputs.validate(problem)?;
    outputs.validate(problem)?;
    match problem.dtype.accumulator() {
        DType::F64 => driver::attend(&portable::Portable::<f64>::new(), problem, &inputs, outputs),
        DType::F16 | DType::Bf16 | DType::F32 => attend_in_f32(level, problem, &inputs, outputs),
    }
    Ok(())
}

/// At a level that was checked. A level that serves only some types gives the others to the next below it that does.
#[cfg(target_arch = "x86_64")]
fn attend_in_f32(level: Level, problem: &Problem, inputs: &InputViews<'_>, outputs: OutputViews<'_>) {
    let is_bf16 = problem.dtype == DType::Bf16;
    match level {
        Level::Amx if is_bf16 => {
            if let Some(kernel) = amx::detect() {
                return attend_in_pairs(kernel, problem, inputs, outputs);
            }
        }
        Level::Avx512Bf16 if is_bf16 => {
            if let Some(kernel) = avx512_bf16::detect() {
                return attend_in_pairs(kernel, problem, inputs, outputs);
            }
        }
        Level::Amx | Level::Avx512Bf16 | Level::Avx512 => {
            if let Some(kernel) = avx512::Avx512::detect() {
                return driver::attend(&kernel, problem, inputs, outputs);
            }
        }
        Level::Avx2 => {
            if let Some(kernel) = avx2::Avx2::detect() {
                return driver::attend(&kernel, problem, inputs, outputs);
            }
        }
        Level::Neon | Level::Portable => {}
    }
    driver::attend(&portable::Portable::<f32>::new(), problem, inputs, outputs);
}

/// In pairs of `bf16`, where their products are exact.
#[cfg(target_arch = "x86_64")]
fn attend_in_pairs<M: bf16::PairMultiplier>(
    kernel: bf16::Bf16Kernel<M>,
    problem: &Problem,
    inputs: &InputViews<'_>,
    outputs: OutputViews<'_>,
) {
    // A few rows are bound by reading the keys, which products in pairs do not make faster: all that a survey would do is
    // to read them twice.
    if split::is_streamed(problem) {
        return driver::attend(kernel.exact(), problem, inputs, outputs);
    }
    let survey = kernel.survey(problem, inputs);
    if survey.is_exact(problem) {
        driver::attend(&kernel.for_problem(problem, inputs, &survey), problem, inputs, outputs);
    } else {
        driver::attend(kernel.exact(), problem, inputs, outputs);
    }
}

/// At a level that was checked.
#[cfg(target_arch = "aarch64")]
fn attend_in_f32(level: Level, problem: &Problem, inputs: &InputViews<'_>, outputs: OutputViews<'_>) {
    if level == Level::Neon
        && let Some(kernel) = neon::Neon::detect()
    {
        return driver::attend(&kernel, problem, inputs, outputs);
    }
    driver::attend(&portable::Portable::<f32>::new(), problem, inputs, outputs);
}

/// At a level that was checked.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn attend_in_f32(_level: Level, problem: &Problem, inputs: &InputViews<'_>, outputs: OutputViews<'_>) {
    driver::attend(&portable::Portable::<f32>::new(), problem, inputs, outputs);
}
