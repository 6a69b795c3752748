//! The functions of candle-flash-attn, on CUDA *and* CPU tensors, with no CUDA code to compile.
//!
//! ```toml
//! candle-flash-attn = { package = "flashcore-candle", version = "0.1" } # features = ["cuda"] for CUDA tensors
//! ```
//!
//! Names, argument order, shapes and conventions are those of candle-flash-attn 0.11, so that programs stay as they are;
//! [`v3`] has those of candle-flash-attn-v3. Each function has a second one, `..._with_lse`, that also returns the
//! log-sum-exp of each row.
//!
//! ```
//! use candle_core::{Device, Tensor};
//!
//! # fn main() -> candle_core::Result<()> {
//! let q = Tensor::randn(0f32, 1., (1, 100, 8, 64), &Device::Cpu)?; // batch, rows, heads, head dim
//! let k = Tensor::randn(0f32, 1., (1, 300, 2, 64), &Device::Cpu)?; // 8 query heads share 2 KV heads (GQA)
//! let output = flashcore_candle::flash_attn(&q, &k, &k, 0.125, true)?;
//! assert_eq!(output.dims(), q.dims());
//! # Ok(())
//! # }
//! ```
//!
//! # Conventions
//!
//! * Tensors are `(batch, rows, heads, head_dim)`; packed sequences (varlen) are `(rows, heads, head_dim)` with cumulative
//!   lengths in `u32` on the same device; pages are `(page, row, heads, head_dim)`. Columns are adjacent, all other
//!   strides are free, and nothing is copied.
//! * Element types are `f16`, `bf16` and `f32`, on the CPU also `f64`. On a GPU, `f32` has a slower kernel.
//! * `causal` and windows are aligned with the last row and the last key. A window is a number of keys before or after
//!   the row's own position; `None`, or more than there are keys, is no limit. `(None, Some(0))` is causal.
//! * `ALiBi` subtracts `slope * distance` from the score. A softcap of 0 is none.
//! * A row that attends no key gives 0. Rows that no sequence has are 0.
//! * The log-sum-exp is natural and `f32`, `(batch, heads, rows)`; of packed sequences, `(heads, rows)`.
//!
//! # Differences
//!
//! | | candle-flash-attn | here |
//! |---|---|---|
//! | CPU tensors, `f32` | refused | computed |
//! | head dims | multiples of 8 up to 512; v3: 64, 128, 256, 512 | on a GPU multiples of 8 up to 256; on the CPU any |
//! | V with another head dim than K | refused | computed |
//! | page sizes | multiples of 32 | any |
//! | rows of a block table that is a slice of a wider one | taken from wrong places | right |
//! | lengths or pages that are impossible | undefined | an error on the CPU; on a GPU clamped into the tensors |
//! | `mm_prefix_ranges` | any number for a sequence | [`MOST_PREFIX_RANGES`] for a sequence |
//! | a left window alone, more rows than keys | `right` is the number of keys | `right` is unlimited |
//! | backward | none | none, and the error says what to do |
//!
//! # On a GPU
//!
//! The feature `cuda` turns on that of candle-core, which needs nvcc for candle's own kernels; this crate adds none. A
//! launch goes onto the stream of candle's device, waits for nothing, and takes its output and its workspace from candle's
//! stream-ordered allocator. Kernels are generated for the GPU that is there and compiled by its driver when a shape class
//! is seen for the first time; after that they come from a cache on disk. Plans are kept by problem, for all threads.
//!
//! # Errors
//!
//! A tensor on another device, a wrong element type, columns that are not adjacent, a shape that does not belong, a head
//! dim that the device lacks: `candle_core::Error` with the argument, its value, what is allowed and what to do.

mod cpu;
#[cfg(feature = "cuda")]
#[expect(unsafe_code, reason = "kernels are launched on addresses")]
mod cuda;
mod operation;
mod plans;
mod problem;
pub mod v3;

use candle_core::{Result, Tensor};

pub use operation::FlashAttn;
use operation::{Operation, Pages, Sequences};
pub use problem::MOST_PREFIX_RANGES;

/// Defines a function and the one that also returns the log-sum-exp, from the arguments after q, k and v.
macro_rules! functions {
    ($($(#[$doc:meta])* $name:ident, $with_lse:ident($($argument:ident: $type:ty),* $(,)?) = $operation:expr;)*) => {$(
        $(#[$doc])*
        #[expect(clippy::allow_attributes, reason = "functions have more or fewer arguments")]
        #[allow(clippy::too_many_arguments)]
        pub fn $name(q: &Tensor, k: &Tensor, v: &Tensor, $($argument: $type),*) -> Result<Tensor> {
            $operation.apply(q, k, v)
        }

        #[doc = concat!("[`", stringify!($name), "`] with the log-sum-exp of each row.")]
        #[expect(clippy::allow_attributes, reason = "functions have more or fewer arguments")]
        #[allow(clippy::too_many_arguments)]
        pub fn $with_lse(q: &Tensor, k: &Tensor, v: &Tensor, $($argument: $type),*) -> Result<(Tensor, Tensor)> {
            $operation.apply_with_lse(q, k, v)
        }
    )*};
}
pub(crate) use functions;

/// The window of a causal mask, or of none.
const fn causal_window(causal: bool) -> (Option<usize>, Option<usize>) {
    (None, if causal { Some(0) } else { None })
}

functions! {
    /// Attention of `(batch, rows, heads, head_dim)`, with a causal mask or without: `softmax(scale * q kᵀ) v`.
    flash_attn, flash_attn_with_lse(softmax_scale: f32, causal: bool) =
        Operation::new(softmax_scale, causal_window(causal));

    /// Attention of `(batch, rows, heads, head_dim)` in a sliding window.
    flash_attn_windowed, flash_attn_windowed_with_lse(
        softmax_scale: f32,
        window_size_left: Option<usize>,
        window_size_right: Option<usize>,
    ) = Operation::new(softmax_scale, (window_size_left, window_size_right));

    /// Attention of `(batch, rows, heads, head_dim)` with `ALiBi`: `alibi_slopes` are `f32`, one for each query head.
    flash_attn_alibi, flash_attn_alibi_with_lse(alibi_slopes: &Tensor, softmax_scale: f32, causal: bool) =
        Operation::new(softmax_scale, causal_window(causal)).alibi(Some(alibi_slopes));

    /// Attention of `(batch, rows, heads, head_dim)` with `ALiBi` in a sliding window.
    flash_attn_alibi_windowed, flash_attn_alibi_windowed_with_lse(
        alibi_slopes: &Tensor,
        softmax_scale: f32,
        window_size_left: Option<usize>,
        window_size_right: Option<usize>,
    ) = Operation::new(softmax_scale, (window_size_left, window_size_right)).alibi(Some(alibi_slopes));

    /// Attention of `(batch, rows, heads, head_dim)` in a sliding window, with a softcap and optional `ALiBi`.
    flash_attn_alibi_windowed_softcap, flash_attn_alibi_windowed_softcap_with_lse(
        alibi_slopes: Option<&Tensor>,
        softmax_scale: f32,
        window_size_left: Option<usize>,
        window_size_right: Option<usize>,
        softcap: f32,
    ) = Operation::new(softmax_scale, (window_size_left, window_size_right)).alibi(alibi_slopes).softcap(softcap);

    /// Attention of packed sequences (varlen), `(rows, heads, head_dim)`, with a causal mask or without.
    ///
    /// `seqlens_q` and `seqlens_k` are cumulative lengths, `u32`: 0, the length of the first sequence, that of the first
    /// two, and so on. `max_seqlen_q` and `max_seqlen_k` are upper bounds of the lengths.
    flash_attn_varlen, flash_attn_varlen_with_lse(
        seqlens_q: &Tensor,
        seqlens_k: &Tensor,
        max_seqlen_q: usize,
        max_seqlen_k: usize,
        softmax_scale: f32,
        causal: bool,
    ) = Operation::new(softmax_scale, causal_window(causal))
        .sequences(Sequences::new(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k));

    /// Attention of packed sequences (varlen) in a sliding window.
    flash_attn_varlen_windowed, flash_attn_varlen_windowed_with_lse(
        seqlens_q: &Tensor,
        seqlens_k: &Tensor,
        max_seqlen_q: usize,
        max_seqlen_k: usize,
        softmax_scale: f32,
        window_size_left: Option<usize>,
        window_size_right: Option<usize>,
    ) = Operation::new(softmax_scale, (window_size_left, window_size_right))
        .sequences(Sequences::new(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k));

    /// Attention of packed query rows over a paged KV cache, in a sliding window.
    ///
    /// * `k` and `v` are pages, `(pages, page_block_size, heads, head_dim)`.
    /// * `block_table` has the pages of each sequence, `(batch, most pages)`, `u32` or `i32`. Entries past the last key of
    ///   a sequence may hold anything.
    /// * `seqlens_k` is cumulative here too: differences are the numbers of keys.
    /// * `mm_prefix_ranges`, `(batch, ranges, 2)` of `i32`, are ranges of positions within which rows attend all keys
    ///   whatever the mask says; an empty range is none.
    flash_attn_varlen_paged_windowed, flash_attn_varlen_paged_windowed_with_lse(
        seqlens_q: &Tensor,
        seqlens_k: &Tensor,
        block_table: &Tensor,
        mm_prefix_ranges: Option<&Tensor>,
        max_seqlen_q: usize,
        max_seqlen_k: usize,
        softmax_scale: f32,
        window_size_left: Option<usize>,
        window_size_right: Option<usize>,
        page_block_size: usize,
        softcap: Option<f32>,
    ) = Operation::new(softmax_scale, (window_size_left, window_size_right))
        .softcap(softcap.unwrap_or(0.0))
        .sequences(
            Sequences::new(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k)
                .paged(Pages::new(block_table, mm_prefix_ranges, page_block_size)),
        );

    /// Attention of packed sequences (varlen) with `ALiBi`.
    flash_attn_varlen_alibi, flash_attn_varlen_alibi_with_lse(
        alibi_slopes: &Tensor,
        seqlens_q: &Tensor,
        seqlens_k: &Tensor,
        max_seqlen_q: usize,
        max_seqlen_k: usize,
        softmax_scale: f32,
        causal: bool,
    ) = Operation::new(softmax_scale, causal_window(causal))
        .alibi(Some(alibi_slopes))
        .sequences(Sequences::new(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k));

    /// Attention of packed sequences (varlen) with `ALiBi` in a sliding window.
    flash_attn_varlen_alibi_windowed, flash_attn_varlen_alibi_windowed_with_lse(
        alibi_slopes: &Tensor,
        seqlens_q: &Tensor,
        seqlens_k: &Tensor,
        max_seqlen_q: usize,
        max_seqlen_k: usize,
        softmax_scale: f32,
        window_size_left: Option<usize>,
        window_size_right: Option<usize>,
    ) = Operation::new(softmax_scale, (window_size_left, window_size_right))
        .alibi(Some(alibi_slopes))
        .sequences(Sequences::new(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k));

    /// Attention of packed sequences (varlen) in a sliding window, with a softcap and optional `ALiBi`.
    flash_attn_varlen_alibi_windowed_softcap, flash_attn_varlen_alibi_windowed_softcap_with_lse(
        alibi_slopes: Option<&Tensor>,
        seqlens_q: &Tensor,
        seqlens_k: &Tensor,
        max_seqlen_q: usize,
        max_seqlen_k: usize,
        softmax_scale: f32,
        window_size_left: Option<usize>,
        window_size_right: Option<usize>,
        softcap: f32,
    ) = Operation::new(softmax_scale, (window_size_left, window_size_right))
        .alibi(alibi_slopes)
        .softcap(softcap)
        .sequences(Sequences::new(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k));
}
