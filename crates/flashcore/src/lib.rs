//! `FlashAttention` for Rust with nothing to compile.
//!
//! Fused attention on NVIDIA GPUs from compute capability 8.0 up, with only the driver installed, and on the CPU where
//! there is no GPU. Kernels are written in Rust, generated for the GPU that is there, and compiled by its driver in a
//! fraction of a second; after that they come from a cache.
//!
//! # Three lines
//!
//! [`attention`] takes tensors `[batch, head, row, column]` in the host's memory, and the best device there is:
//!
//! ```
//! # fn main() -> Result<(), flashcore::Error> {
//! let (query, key) = (vec![1.0_f32; 8 * 100 * 64], vec![1.0_f32; 2 * 300 * 64]); // 8 query heads share 2 key heads (GQA)
//! let kv = (&key, [1, 2, 300, 64]);
//! let output = flashcore::attention((&query, [1, 8, 100, 64]), kv, kv, flashcore::AttentionOptions::default().causal())?;
//! # assert!(output.len() == query.len() && output.iter().all(|element| (element - 1.0).abs() < 1e-6));
//! # Ok(())
//! # }
//! ```
//!
//! # A plan
//!
//! What is computed more than once, or with more than four options, is a [`Problem`]; a [`Plan`] is a problem on a
//! [`Device`], compiled and ready to be run any number of times, from any thread:
//!
//! ```
//! use flashcore::half::f16;
//! use flashcore::{Alignment, DType, Device, InputViews, Layout, Mask, OutputViews, Plan, Problem};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let problem = Problem::new(2, 8, 1, 64, DType::F16)
//!     .with_key_heads(2)
//!     .with_key_length(128)
//!     .with_layout(Layout::Bshd)
//!     .with_mask(Mask::Causal(Alignment::BottomRight))
//!     .with_lse(true);
//! let plan = Plan::new(&problem, &Device::cpu())?;
//!
//! let (query, key, value) = (vec![f16::ONE; 2 * 8 * 64], vec![f16::ONE; 2 * 128 * 2 * 64], vec![f16::ONE; 2 * 128 * 2 * 64]);
//! let (mut output, mut lse) = (vec![f16::ZERO; 2 * 8 * 64], vec![0.0; 2 * 8]);
//! plan.run(InputViews::new(&query, &key, &value), OutputViews::new(&mut output).with_lse(&mut lse))?;
//! assert!(output.iter().all(|&element| element == f16::ONE));
//! # Ok(())
//! # }
//! ```
//!
//! [`Plan::run`] borrows slices of `f16`, `bf16`, `f32` or `f64` and checks their lengths and types. On a GPU it copies
//! everything there and back. Where elements lie is for [`Problem::layout`] to say: a named [`Layout`], or any [`Strides`]
//! in elements, 0 for a dimension that is repeated. Columns are adjacent.
//!
//! [`Device::best`] takes a GPU where there is one, and [`Device::best_or_reason`] says why where there is none;
//! [`Device::cuda`] insists on one, and its absence is an ordinary error:
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
//! [`Plan::new`] gives a plan or, as an [`Unsupported`] error, every [`Reason`] against it, never a slow path in disguise;
//! [`supports`] asks the same without compiling. The CPU takes everything that makes sense. GPU kernels take `f16` and
//! `bf16` with head dimensions that are multiples of 8 up to 256, and `f32` on the slower `scalar` kernel, each with every
//! mask, term and stride of a problem.
//!
//! What is compiled in is the element type, the head dimensions, which features are on and how strides are aligned. A
//! longer key cache or another batch makes another plan, and compiles at most another config for another size.
//! `flashcore tune` measures configs on a GPU and remembers the best for problems of that class; plans on that GPU then
//! take it, and [`Plan::report`] names it. `FLASHCORE_TUNING=off` leaves it aside.
//!
//! # Tensors on the GPU
//!
//! [`Plan::launch`] takes addresses ([`DeviceTensors`]) and the caller's stream ([`StreamRef`]), checks what can be
//! checked, waits for nothing, and can be captured into a CUDA graph:
//!
//! ```no_run
//! use flashcore::cuda::{DeviceBuffer, Stream};
//! # use flashcore::{DType, Device, DeviceTensors, Plan, Problem};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let device = Device::cuda(0)?;
//! # let plan = Plan::new(&Problem::new(1, 8, 1000, 64, DType::F16), &device)?;
//! # let context = device.context().ok_or("no GPU")?;
//! let stream = Stream::new(context)?;
//! let tensor = || DeviceBuffer::filled(&stream, 8 * 1000 * 64 * 2, 0);
//! let (query, key, value, output) = (tensor()?, tensor()?, tensor()?, tensor()?);
//! let tensors = DeviceTensors::new(query.address(), key.address(), value.address(), output.address());
//! // SAFETY: the buffers hold the tensors of the problem, and nobody else uses them until the stream has finished.
//! unsafe { plan.launch(&stream, tensors) }?;
//! stream.synchronize()?;
//! # Ok(())
//! # }
//! ```
//!
//! The primary context is used, so buffers and streams of `cudarc`, candle, burn or `PyTorch` are as good as those of
//! [`cuda`]. With the cargo feature `cudarc`, `flashcore::cudarc::launch` takes a `CudaSlice` for each tensor and needs no
//! `unsafe`. Make plans before a capture begins: compiling and checking a kernel allocates memory.
//!
//! The examples `host_tensors`, `custom_strides`, `cudarc_buffers` and `cuda_graph` show each; `expressions` shows attention
//! of one's own, and `decode` generation over a paged KV cache.
//!
//! # Beside attention
//!
//! An [`AppendProblem`] writes new keys and values into a paged KV cache by `slot_mapping`, with optional rotary embedding
//! (`RoPE`) and QK-norm of keys and query, in one launch. A [`MergeProblem`] merges partial results of attention over disjoint
//! keys by their log-sum-exp. A [`KvCacheProblem`] appends to the cache of each sequence and attends it
//! (`flash_attn_with_kvcache`), with one call for both launches. All run on host tensors and, on a GPU, on addresses and the caller's stream.
//!
//! # The definition
//!
//! A [`Problem`] is everything about attention but the numbers in its tensors. Every field is public; what is switched
//! on has its tensor in [`InputViews`]. For each batch and query head, query row `i` and key `j`:
//!
//! 1. `score = scale * dot(query[i], key[j])`;
//! 2. with a softcap `c`, `score = c * tanh(score / c)`; `None` is none (not 0, not 1);
//! 3. with `ALiBi`, `score -= slope[head] * |i + offset - j|`, where `offset` follows the mask's [`Alignment`];
//! 4. with a bias, `score += bias[batch, head, i, j]`;
//! 5. with a [`ScoreMod`], `score` becomes what its closure says;
//! 6. keys outside the [`Mask`], past the batch's key length, or taken out by a [`MaskMod`], take no part;
//! 7. `output[i] = sum(exp(score) * value) / (sum(exp(score)) + exp(sink[head]))`, the sink only where there is one;
//! 8. `lse[i]` is the logarithm of that denominator, natural unless [`Problem::lse_form`] says otherwise.
//!
//! A row that attends no key gives output 0 and a log-sum-exp of minus infinity, or of the sink where there is one.
//!
//! # Names that you know
//!
//! | elsewhere | here |
//! |---|---|
//! | `seqlen_q`, `seqlen_k` | [`Problem::query_length`], [`Problem::key_length`] |
//! | `num_heads`, `num_heads_kv` (`num_kv_heads`, GQA, MQA) | [`Problem::query_heads`], [`Problem::key_heads`] |
//! | `headdim`, `headdim_v` | [`Problem::head_dim`], [`Problem::value_dim`] |
//! | `softmax_scale`, `scale` | [`Problem::scale`]; `1 / sqrt(head_dim)` unless changed |
//! | `is_causal=True` of `PyTorch` | [`Mask::Causal`]`(`[`Alignment::TopLeft`]`)` |
//! | `causal=True` of `FlashAttention`, candle | [`Mask::Causal`]`(`[`Alignment::BottomRight`]`)`, also [`AttentionOptions::is_causal`] |
//! | `window_size=(l, r)` of `FlashAttention` | [`Mask::Window`] with the same numbers, -1 becomes `None` |
//! | `sliding_window=w` of Hugging Face | [`Mask::Window`] with `left: Some(w - 1), right: Some(0)` |
//! | `softcap=0.0` of `FlashAttention`, `1.0` of candle | [`Problem::softcap`] of `None` |
//! | `softmax_lse`, `return_lse` | [`Problem::lse`] and [`OutputViews::lse`], `[batch, head, row]`; [`LseForm`]: natural or base 2, with or without the sink |
//! | `seqused_k`, `cache_seqlens` | [`Problem::seqused_k`] and [`InputViews::with_seqused_k`] |
//! | `cu_seqlens_q`, `cu_seqlens_k` (varlen) | [`Problem::total_q`], [`Problem::total_k`] and [`InputViews::with_cu_seqlens_q`] |
//! | `page_table`, `block_table` | [`Problem::paged`] and [`InputViews::with_page_table`] |
//! | `cache_batch_idx`, `leftpad_k` | [`Problem::kv_batch`], [`Problem::leftpad_k`] |
//! | `flash_attn_with_kvcache` with new keys, `cu_seqlens_k_new` | [`KvCacheProblem`] |
//! | `reshape_and_cache`, `slot_mapping`, `rotary_cos` | [`AppendProblem`] |
//! | `merge_attn_states`, `flash_attn_combine` | [`MergeProblem`] |
//! | `alibi_slopes` | [`Problem::alibi`] and [`InputViews::with_alibi_slopes`]; positive slopes lower scores |
//! | `sinks`, `learnable_sink`, `s_aux` | [`Problem::sinks`] and [`InputViews::with_sinks`] |
//! | `attn_mask`, `attn_bias` of floats | [`Problem::bias`] and [`InputViews::with_bias`], in `f32` |
//! | a boolean mask where true means masked (burn), or attended (`PyTorch`) | a bias of minus infinity where masked |
//! | `score_mod`, `mask_mod` of `FlexAttention` | [`ScoreMod`], [`MaskMod`]: closures of Rust |
//! | tensors `[batch, head, row, column]` of `PyTorch` | [`Layout::Bhsd`] |
//! | tensors `[batch, row, head, column]` of `FlashAttention`, candle | [`Layout::Bshd`] |
//! | `num_splits` (split-KV), `pack_gqa` | chosen by the plan; [`PlanOptions::config`] forces them |
//!
//! # NaN
//!
//! A KV cache has rows that nobody has written yet. K and V of keys that no row of a batch attends, by the mask and the
//! batch's key length, never reach an output, whatever they hold, on any backend. V of a key that *another* row attends, or
//! that only a [`MaskMod`] takes out, must be finite: tensor cores multiply whole tiles, and `0 * NaN` is NaN. A score
//! that is NaN or plus infinity makes output and log-sum-exp of its row NaN. The
//! [whole table](flashcore_problem#nan-in-keys-that-take-no-part) is with the definition.
//!
//! # What is not here
//!
//! Attention forward, for inference: there is no backward pass and no dropout, no [`MaskMod`] with packed or paged
//! sequences on GPUs, an append inside of the attention kernel only for few new keys (elsewhere
//! a plan launches two kernels), no FP8 queries on GPUs below `sm_89`, no MLA, no kernels for what `sm_100` has, and no other vendor's GPUs.
//!
//! # Trust
//!
//! Drivers have compiled valid PTX into wrong programs. So a kernel that is new to a driver first computes a small problem
//! and is judged against an `f64` oracle; one that fails is a [`Reason::SelfCheck`] and is not used. The verdict is kept
//! in the cache with the kernel, so this happens once per driver, GPU and kernel, and takes milliseconds.
//! [`SelfCheckPolicy::Off`] or `FLASHCORE_SELF_CHECK=off` turn it off. [`Plan::report`] tells what was done and how long it
//! took. [`verify`] has that oracle and that judge, for anyone's kernels.
//!
//! # Cargo features
//!
//! | feature | brings |
//! |---|---|
//! | `cpu` (default) | the CPU backend |
//! | `cuda` (default) | NVIDIA GPUs: the kernel generator, and the driver, which is found at run time |
//! | `cudarc` | launches on typed buffers of `cudarc`, whose CUDA version the program chooses |
//!
//! Any combination builds, none included. A backend that was left out is an ordinary error ([`Error::NotBuilt`],
//! [`Reason::NotBuilt`]) that names its feature; what needs `cuda` to make sense is there with it alone. Without the
//! feature `cudarc` no crate here depends on it. With it, the program chooses a CUDA version by a feature of `cudarc`
//! itself, as it has to anyway: `cudarc = { version = "0.19", features = ["cuda-12000"] }`.
//!
//! # Forks
//!
//! The CPU works in forked children, on threads of their own. CUDA does not survive a fork: where the process before it has
//! used CUDA, devices and plans of a GPU are an error in the child (`Forked`).
//!
//! # Errors
//!
//! Nothing panics for what a caller passes, but helpers of tests that say so ([`verify::Inputs::random`] of an impossible
//! problem, [`Tensor::get`] past the end). Every error names the argument, its value and what is allowed; overflowing
//! products of dimensions are errors; a missing driver, a GPU that is too old, full memory are errors. After an illegal
//! address on the GPU, which ends all work there, the call that meets it says so, and so does every later one.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod attention;
#[cfg(feature = "cudarc")]
#[expect(unsafe_code, reason = "a launch takes addresses")]
pub mod cudarc;
mod device;
mod error;
#[cfg(feature = "cuda")]
#[expect(unsafe_code, reason = "kernels are launched on addresses")]
mod gpu;
#[cfg(feature = "cpu")]
mod host;
mod operation;
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
    Accumulation, AmpereConfig, Config, Exponential, Fp8Widening, HopperConfig, L2Window, LadderConfig, Product,
    QueryPlace, Reason as KernelReason, Rescale, ScalarConfig, SharedLayout, UnknownConfig, WarpScheduler,
};
pub use flashcore_problem::expression;
#[doc(hidden)]
pub use flashcore_problem::operands;
pub use flashcore_problem::{
    Alignment, Bias, BiasStrides, BiasView, CallStrides, DType, DTypes, HostElement, InputViews, Invalid, Layout, Mask,
    MaskMod, Operand, OutputViews, PagedKv, Paging, ParseDTypeError, ParseDTypesError, Problem, ProblemError, Scale,
    ScaleStrides, ScaleView, ScaleViewMut, ScoreMod, Sequence, Shape, Strides, Tensor, TensorError, TensorStrides,
    TensorView, TensorViewMut, TotalRows,
};
pub use flashcore_problem::{
    AppendProblem, AppendStrides, KvCacheInputs, KvCacheOutputs, KvCacheProblem, LseBase, LseForm, MergeProblem,
    MergeStrides, PositionType, Positions, QkNorm, Rotary, RotaryStyle, ValueCache,
};
pub use flashcore_problem::{
    ParseScaleModeError, Quantization, QuantizeError, Quantized, Rotation, Saturated, ScaleMode, quantize,
};
#[cfg(feature = "cuda")]
pub use gpu::{DeviceBias, DeviceScale, DeviceTensors, SelfCheckPolicy, StreamRef, TENSOR_ALIGNMENT, tuning};
pub use half;
pub use operation::{Operation, Use};
#[cfg(feature = "cuda")]
pub use plan::AppendPolicy;
pub use plan::{Plan, PlanOptions, supports};
#[cfg(feature = "cuda")]
pub use process::Forked;
pub use reason::{Reason, Unsupported};
pub use report::Report;
#[cfg(feature = "cuda")]
pub use report::{KernelReport, SelfCheckReport};

/// Verification, for judging kernels: random inputs, an `f64` oracle, and gates with measured limits.
///
/// It serves the self-check and whoever writes kernels of their own; to compute attention nobody needs it.
///
/// ```
/// use flashcore::verify::{Evidence, Inputs, Outputs, ReferenceError, judge, oracle};
/// use flashcore::{DType, Device, Plan, Problem};
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
        AppendExpected, KvCacheData, KvCacheExpected, MergeExpected, SequenceLengths, append_oracle, kv_cache_oracle,
        merge_oracle,
    };
    pub use flashcore_problem::{
        Element, Evidence, Expected, Failure, GuardError, Guarded, Inputs, Limits, Outputs, ReferenceError, SplitMix64,
        Stress, Verdict, Worst, judge, oracle, reference,
    };
}

/// The README, so that its programs are compiled and run.
#[cfg(all(doctest, feature = "cpu"))]
#[doc = include_str!("../README.md")]
struct Readme;
