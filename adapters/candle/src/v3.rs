//! The functions of candle-flash-attn-v3, for programs that call those:
//! `candle-flash-attn-v3 = { package = "flashcore-candle" }` and `use candle_flash_attn_v3::v3`.
//!
//! They are those of the crate's root with one more argument, `use_gqa_packing`. It is not looked at: a plan packs the
//! query heads of a KV head where that makes fewer tiles. On Hopper the kernel has TMA and `wgmma` under either name.

use candle_core::{CpuStorage, CudaStorage, CustomOp3, Layout, MetalStorage, Result, Shape, Tensor};

use crate::operation::{Operation, Sequences};
use crate::{causal_window, functions};

/// Attention as an operation of candle, for `Tensor::apply_op3`.
#[derive(Clone, Debug)]
pub struct FlashAttn {
    /// Factor of the product of query and key.
    pub softmax_scale: f32,
    /// Slopes of `ALiBi`, `f32`, one for each query head.
    pub alibi_slopes: Option<Tensor>,
    /// Keys that a row attends before its own position; `None` is no limit.
    pub window_size_left: Option<usize>,
    /// Keys that a row attends after its own position; `None` is no limit.
    pub window_size_right: Option<usize>,
    /// Not looked at: the plan decides.
    pub use_gqa_packing: bool,
}

impl FlashAttn {
    fn operation(&self) -> Operation {
        Operation::new(self.softmax_scale, (self.window_size_left, self.window_size_right))
            .alibi(self.alibi_slopes.as_ref())
    }
}

crate::operation::delegate!(FlashAttn);

functions! {
    /// [`flash_attn`](crate::flash_attn).
    flash_attn, flash_attn_with_lse(softmax_scale: f32, causal: bool, use_gqa_packing: bool) =
        Operation::new(softmax_scale, causal_window(causal)).gqa_packing(use_gqa_packing);

    /// [`flash_attn_windowed`](crate::flash_attn_windowed).
    flash_attn_windowed, flash_attn_windowed_with_lse(
        softmax_scale: f32,
        window_size_left: Option<usize>,
        window_size_right: Option<usize>,
        use_gqa_packing: bool,
    ) = Operation::new(softmax_scale, (window_size_left, window_size_right)).gqa_packing(use_gqa_packing);

    /// [`flash_attn_alibi`](crate::flash_attn_alibi).
    flash_attn_alibi, flash_attn_alibi_with_lse(
        alibi_slopes: &Tensor,
        softmax_scale: f32,
        causal: bool,
        use_gqa_packing: bool,
    ) = Operation::new(softmax_scale, causal_window(causal)).alibi(Some(alibi_slopes)).gqa_packing(use_gqa_packing);

    /// [`flash_attn_alibi_windowed`](crate::flash_attn_alibi_windowed).
    flash_attn_alibi_windowed, flash_attn_alibi_windowed_with_lse(
        alibi_slopes: &Tensor,
        softmax_scale: f32,
        window_size_left: Option<usize>,
        window_size_right: Option<usize>,
        use_gqa_packing: bool,
    ) = Operation::new(softmax_scale, (window_size_left, window_size_right))
        .alibi(Some(alibi_slopes))
        .gqa_packing(use_gqa_packing);

    /// [`flash_attn_varlen`](crate::flash_attn_varlen).
    flash_attn_varlen, flash_attn_varlen_with_lse(
        seqlens_q: &Tensor,
        seqlens_k: &Tensor,
        max_seqlen_q: usize,
        max_seqlen_k: usize,
        softmax_scale: f32,
        causal: bool,
        use_gqa_packing: bool,
    ) = Operation::new(softmax_scale, causal_window(causal))
        .sequences(Sequences::new(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k))
        .gqa_packing(use_gqa_packing);

    /// [`flash_attn_varlen_windowed`](crate::flash_attn_varlen_windowed).
    flash_attn_varlen_windowed, flash_attn_varlen_windowed_with_lse(
        seqlens_q: &Tensor,
        seqlens_k: &Tensor,
        max_seqlen_q: usize,
        max_seqlen_k: usize,
        softmax_scale: f32,
        window_size_left: Option<usize>,
        window_size_right: Option<usize>,
        use_gqa_packing: bool,
    ) = Operation::new(softmax_scale, (window_size_left, window_size_right))
        .sequences(Sequences::new(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k))
        .gqa_packing(use_gqa_packing);

    /// [`flash_attn_varlen_alibi`](crate::flash_attn_varlen_alibi).
    flash_attn_varlen_alibi, flash_attn_varlen_alibi_with_lse(
        alibi_slopes: &Tensor,
        seqlens_q: &Tensor,
        seqlens_k: &Tensor,
        max_seqlen_q: usize,
        max_seqlen_k: usize,
        softmax_scale: f32,
        causal: bool,
        use_gqa_packing: bool,
    ) = Operation::new(softmax_scale, causal_window(causal))
        .alibi(Some(alibi_slopes))
        .sequences(Sequences::new(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k))
        .gqa_packing(use_gqa_packing);

    /// [`flash_attn_varlen_alibi_windowed`](crate::flash_attn_varlen_alibi_windowed).
    flash_attn_varlen_alibi_windowed, flash_attn_varlen_alibi_windowed_with_lse(
        alibi_slopes: &Tensor,
        seqlens_q: &Tensor,
        seqlens_k: &Tensor,
        max_seqlen_q: usize,
        max_seqlen_k: usize,
        softmax_scale: f32,
        window_size_left: Option<usize>,
        window_size_right: Option<usize>,
        use_gqa_packing: bool,
    ) = Operation::new(softmax_scale, (window_size_left, window_size_right))
        .alibi(Some(alibi_slopes))
        .sequences(Sequences::new(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k))
        .gqa_packing(use_gqa_packing);
}
