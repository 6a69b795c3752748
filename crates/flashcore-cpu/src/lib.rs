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
//! | `driver` | which tiles meet which, in one loop for all types and features |
//! | `output_tiles` | the output cut into one part per tile of query rows |
//! | `pack` | bytes of the problem's type to tiles of the accumulator's, and back |
//! | `scores` | from products to scores: softcap, `ALiBi`, bias, in base 2 |
//! | `softmax` | the ends of the softmax: corrections, sinks, the log-sum-exp |
//! | `level` | the sets of instructions, and which of them the machine has |
//! | `microkernel` | what is worth writing by hand for each of them: products of tiles, exponentials, conversions |
//! | `portable`, `avx2`, `avx512` | the microkernels |
//! | `exp2` | the power of two of the vector kernels, and how far it is from the exact one |
//! | `peak` | what the processor's arithmetic units can do at most, measured |
//!
//! Sums, scores and weights are `f32`, or `f64` for `f64`; nothing is rounded to 16 bits but the output.

#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "vector instructions are called behind the detection of their processor")]
mod avx2;
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "vector instructions are called behind the detection of their processor")]
mod avx512;
mod driver;
#[cfg(target_arch = "x86_64")]
mod exp2;
#[cfg(test)]
mod kernel_tests;
mod level;
mod microkernel;
mod output_tiles;
mod pack;
#[expect(unsafe_code, reason = "vector instructions are called behind the detection of their processor")]
mod peak;
mod portable;
mod real;
mod scores;
mod softmax;

pub use level::{Level, LevelError};
pub use peak::measured_peak;

use flashcore_problem::{DType, InputViews, Invalid, OutputViews, Problem};

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

/// Computes attention, as [`flashcore_problem`] defines it, on all cores of rayon's current pool.
///
/// Inputs and outputs are borrowed: [`InputViews`] and [`OutputViews`] over slices, or owned
/// [`Inputs`](flashcore_problem::Inputs) and [`Outputs`](flashcore_problem::Outputs) by reference. Nothing is copied.
///
/// Every problem that validates is computed, and two runs give the same bits on any number of threads. Another level
/// gives other bits, equally right. On an error the outputs are as they were.
pub fn attend<'a>(
    problem: &Problem,
    inputs: impl Into<InputViews<'a>>,
    outputs: impl Into<OutputViews<'a>>,
) -> Result<(), CpuError> {
    attend_with(Level::default_level()?, problem, inputs, outputs)
}

/// [`attend`] with the instructions of one level, which is an error where the machine lacks them.
pub fn attend_with<'a>(
    level: Level,
    problem: &Problem,
    inputs: impl Into<InputViews<'a>>,
    outputs: impl Into<OutputViews<'a>>,
) -> Result<(), CpuError> {
    level.check()?;
    let (inputs, outputs) = (inputs.into(), outputs.into());
    inputs.validate(problem)?;
    outputs.validate(problem)?;
    match problem.dtype.accumulator() {
        DType::F64 => driver::attend::<f64, _>(&portable::Portable, problem, &inputs, outputs),
        DType::F16 | DType::Bf16 | DType::F32 => attend_in_f32(level, problem, &inputs, outputs),
    }
    Ok(())
}

/// At a level that was checked.
#[cfg(target_arch = "x86_64")]
fn attend_in_f32(level: Level, problem: &Problem, inputs: &InputViews<'_>, outputs: OutputViews<'_>) {
    match level {
        Level::Avx512 => {
            if let Some(kernel) = avx512::Avx512::detect() {
                return driver::attend(&kernel, problem, inputs, outputs);
            }
        }
        Level::Avx2 => {
            if let Some(kernel) = avx2::Avx2::detect() {
                return driver::attend(&kernel, problem, inputs, outputs);
            }
        }
        Level::Portable => {}
    }
    driver::attend::<f32, _>(&portable::Portable, problem, inputs, outputs);
}

/// At a level that was checked.
#[cfg(not(target_arch = "x86_64"))]
fn attend_in_f32(_level: Level, problem: &Problem, inputs: &InputViews<'_>, outputs: OutputViews<'_>) {
    driver::attend::<f32, _>(&portable::Portable, problem, inputs, outputs);
}
