//! `FlashAttention` for Rust with nothing to compile.
//!
//! Fused attention on NVIDIA GPUs from compute capability 8.0 up, with only the driver installed, and on the CPU where
//! there is no GPU. Kernels are written in Rust, generated for the GPU that is there, and compiled by its driver in a
//! fraction of a second; after that they come from a cache.
//!
//! # The first call
//!
//! Say what is to be computed, ask a device for a plan, run it:
//!
//! ```
//! use flashcore::half::f16;
//! use flashcore::{Plan, Alignment, DType, Device, InputViews, Mask, OutputViews, Problem};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Two batches, eight heads, 128 rows of 64 columns, each row attending itself and what is before it.
//! let mut problem = Problem::new(2, 8, 128, 64, DType::F16);
//! problem.mask = Mask::Causal(Alignment::BottomRight);
//!
//! let plan = Plan::new(&problem, &Device::cpu())?;
//!
//! let elements = 2 * 8 * 128 * 64;
//! let (query, key, value) = (vec![f16::ONE; elements], vec![f16::ONE; elements], vec![f16::ONE; elements]);
//! let mut output = vec![f16::ZERO; elements];
//! plan.run(InputViews::new(&query, &key, &value), OutputViews::new(&mut output))?;
//! assert!(output.iter().all(|&element| element == f16::ONE));
//! # Ok(())
//! # }
//! ```
//!
//! [`Device::best`] takes a GPU where there is one and says why where there is none; [`Device::cuda`] insists on one, and
//! its absence is an ordinary error:
//!
//! ```
//! use flashcore::Device;
//!
//! match Device::cuda(0) {
//!     Ok(device) => println!("found {device}"),
//!     Err(error) => println!("{error}"), // "no NVIDIA driver: libcuda.so.1: cannot open shared object file ..."
//! }
//! ```
//!
//! # What is computed
//!
//! A [`Problem`] is everything about attention but the numbers in its tensors. Every field is public; what is switched
//! on has its tensor in [`InputViews`]. For each batch and query head, query row `i` and key `j`:
//!
//! 1. `score = scale * dot(query[i], key[j])`;
//! 2. with a softcap `c`, `score = c * tanh(score / c)`; `None` is none (not 0, not 1);
//! 3. with `ALiBi`, `score -= slope[head] * |i + offset - j|`, where `offset` follows the mask's [`Alignment`];
//! 4. with a bias, `score += bias[batch, head, i, j]`;
//! 5. with a [`ScoreMod`], `score` becomes what its closure says;
//! 6. keys outside the [`Mask`], past the batch's key length, or taken out by a [`MaskMod`], take no part: see
//!    [`flashcore_problem`](flashcore_problem#nan-in-keys-that-take-no-part) for what that means where they hold a NaN;
//! 7. `output[i] = sum(exp(score) * value) / (sum(exp(score)) + exp(sink[head]))`, the sink only where there is one;
//! 8. `lse[i]` is the natural logarithm of that denominator.
//!
//! A row that attends nothing gives 0 and a log-sum-exp of minus infinity. Conventions in which libraries differ are
//! spelled out instead of assumed:
//!
//! | other libraries say | here |
//! |---|---|
//! | `is_causal=True` of `PyTorch` | [`Mask::Causal`]`(`[`Alignment::TopLeft`]`)` |
//! | `causal=True` of `FlashAttention`, candle | [`Mask::Causal`]`(`[`Alignment::BottomRight`]`)` |
//! | `window_size=(l, r)` of `FlashAttention` | [`Mask::Window`] with the same numbers, -1 becomes `None` |
//! | `sliding_window=w` of Hugging Face | [`Mask::Window`] with `left: Some(w - 1), right: Some(0)` |
//! | `softcap=0.0` of `FlashAttention`, `1.0` of candle | `softcap: None` |
//! | tensors `[batch, head, row, column]` of `PyTorch` | [`Layout::Bhsd`] |
//! | tensors `[batch, row, head, column]` of `FlashAttention`, candle | [`Layout::Bshd`] |
//! | a boolean mask where true means masked (burn), or attended (`PyTorch`) | a bias of minus infinity where masked |
//!
//! # What a device takes
//!
//! [`supports`] answers with a [`Plan`] or, as an [`Unsupported`] error, with every [`Reason`] against it, never with a slow path in disguise. The CPU
//! takes everything that makes sense. GPU kernels take `f16` and `bf16` with head
//! dimensions that are multiples of 8 up to 256, and `f32` on the slower `scalar` kernel, each with every mask, term and
//! stride of a problem.
//!
//! What is compiled in is the element type, the head dimensions, which features are on and how strides are aligned. A
//! longer key cache or another batch makes another plan, and compiles at most another config for another size.
//!
//! `flashcore tune` measures configs on a GPU and remembers the best for problems of that class; plans on that GPU then take
//! it, and [`Plan::report`] names it. `FLASHCORE_TUNING=off` leaves it aside.
//!
//! # What is not here
//!
//! Attention forward, for inference: there is no backward pass and no dropout, no packed sequences of different lengths
//! (varlen, `cu_seqlens`; a batch can have [key lengths](Problem::seqused_k), and a [`MaskMod`] can keep documents
//! apart), no paged KV cache, no appending to a cache, no rotary embedding, no FP8, no kernels for what `sm_100` has, and
//! no other vendor's GPUs.
//!
//! # Where the tensors are
//!
//! In the host's memory: [`Plan::run`] borrows slices of `f16`, `bf16`, `f32` or `f64` and checks their lengths and
//! types. Where elements lie is for [`Problem::layout`] to say: a named [`Layout`], or any [`Strides`] in elements, 0 for a
//! dimension that is repeated. Columns are adjacent. On a GPU, `run` copies everything there and back.
//!
//! On the GPU: [`Plan::launch`] takes addresses ([`DeviceTensors`]) and the caller's stream ([`StreamRef`]), checks what
//! can be checked, allocates nothing, waits for nothing, and can be captured into a CUDA graph. The primary context is
//! used, so buffers and streams of `cudarc`, candle, burn or `PyTorch` are as good as those of [`cuda`]. Make plans before
//! a capture begins: compiling and checking a kernel allocates memory.
//!
//! The examples `host_tensors`, `custom_strides`, `cudarc_buffers` and `cuda_graph` show each; `expressions` shows attention of
//! one's own.
//!
//! # What is trusted
//!
//! Drivers have compiled valid PTX into wrong programs. So a kernel that is new to a driver first computes a small problem
//! and is judged against an `f64` oracle; one that fails is a [`Reason::SelfCheck`] and is not used. The verdict is kept
//! in the cache with the kernel, so this happens once per driver, GPU and kernel, and takes milliseconds.
//! [`SelfCheckPolicy::Off`] or `FLASHCORE_SELF_CHECK=off` turn it off. [`Plan::report`] tells what was done and how long it took.
//!
//! [`verify`] has that oracle and that judge, for anyone's kernels.
//!
//! # Cargo features
//!
//! | feature | brings |
//! |---|---|
//! | `cpu` (default) | the CPU backend |
//! | `cuda` (default) | NVIDIA GPUs: the kernel generator, and the driver, which is found at run time |
//!
//! Any combination builds, none included. A backend that was left out is an ordinary error ([`Error::NotBuilt`],
//! [`Reason::NotBuilt`]) that names its feature; what needs `cuda` to make sense is there with it alone. No crate here
//! depends on `cudarc`, so a program may choose any CUDA version of it.
//!
//! # Forks
//!
//! The CPU works in forked children, on threads of their own. CUDA does not survive a fork: where the process before it has
//! used CUDA, devices and plans of a GPU are an error in the child (`Forked`).
//!
//! # When something is wrong
//!
//! Nothing panics for what a caller passes, but helpers of tests that say so ([`Inputs::random`] of an impossible problem,
//! [`Tensor::get`] past the end). Every error names the argument, its value and what is allowed; overflowing
//! products of dimensions are errors; a missing driver, a GPU that is too old, full memory are errors. After an illegal
//! address on the GPU, which ends all work there, the call that meets it says so, and so does every later one.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod attention;
mod device;
mod error;
#[cfg(feature = "cuda")]
#[expect(unsafe_code, reason = "kernels are launched on addresses")]
mod gpu;
#[cfg_attr(feature = "cuda", expect(unsafe_code, reason = "addresses and streams are the caller's word"))]
mod plan;
#[cfg(feature = "cuda")]
mod process;
mod reason;
mod report;

pub use attention::{AttentionOptions, ShapedTensor, attention};
pub use device::{Best, Device, DeviceInfo, Devices};
pub use error::Error;
#[cfg(feature = "cpu")]
pub use flashcore_cpu::LevelError as CpuLevelError;
#[cfg(feature = "cuda")]
pub use flashcore_cuda as cuda;
#[cfg(feature = "cuda")]
pub use flashcore_kernels::{
    Accumulation, AmpereConfig, Config, Exponential, HopperConfig, L2Window, LadderConfig, Product, QueryPlace,
    Reason as KernelReason, Rescale, ScalarConfig, SharedLayout, UnknownConfig, WarpScheduler,
};
pub use flashcore_problem::expression;
#[doc(hidden)]
pub use flashcore_problem::operands;
pub use flashcore_problem::{
    Alignment, Bias, BiasStrides, BiasView, DType, HostElement, InputViews, Inputs, Invalid, Layout, Mask, MaskMod,
    Operand, OutputViews, Outputs, ParseDTypeError, Problem, ProblemBuilder, ProblemError, ScoreMod, Shape, Strides,
    Tensor, TensorError, TensorStrides, TensorView, TensorViewMut,
};
#[cfg(feature = "cuda")]
pub use gpu::{
    Bound, BoundBytes, BoundContents, BoundGraph, DeviceTensors, SelfCheckPolicy, StreamRef, TENSOR_ALIGNMENT, tuning,
};
pub use half;
pub use plan::{Plan, PlanOptions, supports};
#[cfg(feature = "cuda")]
pub use process::Forked;
pub use reason::{Reason, Unsupported};
pub use report::Report;
#[cfg(feature = "cuda")]
pub use report::{KernelReport, SelfCheckReport};

/// What is right, and who decides whether a result is.
///
/// ```
/// use flashcore::verify::{Evidence, ReferenceError, judge, oracle};
/// use flashcore::{DType, Device, Inputs, Outputs, Problem};
///
/// # fn main() -> Result<(), flashcore::Error> {
/// let problem = Problem::new(1, 2, 97, 64, DType::Bf16);
/// let inputs = Inputs::random(&problem, 7);
/// let mut outputs = Outputs::poisoned(&problem);
/// Plan::new(&problem, &Device::cpu())?.run(&inputs, &mut outputs)?;
///
/// let expected = oracle(&problem, &inputs)?;
/// let yardstick = ReferenceError::measure(&problem, &inputs, &expected)?;
/// let verdict = judge(&problem, &expected, &yardstick, &Evidence::new(&inputs, &outputs));
/// assert!(verdict.passed(), "{verdict}");
/// # Ok(())
/// # }
/// ```
pub mod verify {
    pub use flashcore_problem::{
        Element, Evidence, Expected, Failure, GuardError, Guarded, Limits, ReferenceError, SplitMix64, Stress, Verdict,
        Worst, judge, oracle, reference,
    };
}

/// What the README shows compiles and runs.
#[cfg(all(doctest, feature = "cpu"))]
#[doc = include_str!("../README.md")]
struct Readme;
