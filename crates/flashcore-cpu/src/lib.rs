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
//! | module | is |
//! |---|---|
//! | `driver` | which tiles meet which, in one loop for all types and features |
//! | `output_tiles` | the output cut into one part per tile of query rows |
//! | `pack` | bytes of the problem's type to tiles of the accumulator's, and back |
//! | `scores` | from products to scores: scale, softcap, `ALiBi`, bias, in base 2 |
//! | `softmax` | the running maximum and sum of a row |
//! | `microkernel` | what is worth writing by hand for each processor: products of tiles, exponentials |
//! | `portable` | the microkernel that any processor runs |
//! | `peak` | what the processor's arithmetic units can do at most, measured |
//!
//! Sums, scores and weights are `f32`, or `f64` for `f64`; nothing is rounded to 16 bits but the output.

mod driver;
mod microkernel;
mod output_tiles;
mod pack;
#[expect(unsafe_code, reason = "vector instructions are called behind the detection of their processor")]
mod peak;
mod portable;
mod real;
mod scores;
mod softmax;

pub use peak::measured_peak;

use flashcore_problem::{DType, InputViews, Invalid, OutputViews, Problem};

/// Why attention was not computed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CpuError {
    /// The problem or the tensors given for it are wrong.
    #[error(transparent)]
    Invalid(#[from] Invalid),
}

/// Computes attention, as [`flashcore_problem`] defines it, on all cores of rayon's current pool.
///
/// Inputs and outputs are borrowed: [`InputViews`] and [`OutputViews`] over slices, or owned
/// [`Inputs`](flashcore_problem::Inputs) and [`Outputs`](flashcore_problem::Outputs) by reference. Nothing is copied.
///
/// Every problem that validates is computed, and two runs give the same bits. On an error the outputs are as they were.
pub fn attend<'a>(
    problem: &Problem,
    inputs: impl Into<InputViews<'a>>,
    outputs: impl Into<OutputViews<'a>>,
) -> Result<(), CpuError> {
    let (inputs, outputs) = (inputs.into(), outputs.into());
    inputs.validate(problem)?;
    outputs.validate(problem)?;
    match problem.dtype.accumulator() {
        DType::F64 => driver::attend::<f64, _>(&portable::Portable, problem, &inputs, outputs),
        DType::F16 | DType::Bf16 | DType::F32 => {
            driver::attend::<f32, _>(&portable::Portable, problem, &inputs, outputs);
        }
    }
    Ok(())
}
