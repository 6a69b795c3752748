//! Primitives: what attention kernels are made of.
//!
//! * [`SharedTile`] is a shared-memory tile that knows its layout, [`TileCopy`] its `cp.async` copy by all threads of a
//!   CTA, [`CpAsyncPipeline`] the stages of such tiles;
//! * [`SwizzledTile`] is the shared-memory tile of TMA and `wgmma`, [`TmaPipeline`] its stages between a producer warp and
//!   consumer warpgroups;
//! * [`LeftFragments`], [`RightFragments`] and [`Accumulator`] are the registers of tensor-core products,
//!   [`Tf32Query`] and [`ValueWords`] the operands of those of `f32`, [`WgmmaOperand`] and [`WgmmaFragments`] those of `wgmma`;
//! * [`ScoreTerms`] turns products into scores, [`KeyMask`] masks them, and [`OnlineSoftmax`] turns them into weights;
//! * [`ExpressionCode`] is the code of a `score_mod` or `mask_mod`.

mod mask;
mod mma;
mod pipeline;
mod score;
mod score_mod;
mod smem;
mod softmax;
mod vector;

pub use mask::KeyMask;
pub use mma::{
    Accumulation, Accumulator, E4m3Query, E4m3Weights, Fp8Placement, Fp8Query, Fp8Target, Fp8Widener, Fp8Widening,
    HalfTypes, LaneColumns, LeftFragments, LeftOperand, RightFragments, Tf32Products, Tf32Query, ValueWords, WgmmaA,
    WgmmaFragments, WgmmaOperand, WgmmaTypes, adjacent_columns, multiply_e4m3_query, multiply_e4m3_weights,
    multiply_fp8_keys, multiply_fp8_values, multiply_scores, multiply_values,
};
pub(crate) use pipeline::named_barrier::NamedBarrier;
pub use pipeline::{CpAsyncPipeline, HeldStage, PipelineState, StageIndex, TmaPipeline, TmaStoreGuard};
pub use score::{BiasTerms, ScorePositions, ScoreTerms};
pub use score_mod::{
    AddedTerm, BoundExpression, ExpressionBlock, ExpressionCode, ExpressionTables, Interval, LaneScores, ScoreBlock,
};
pub(crate) use smem::{CHUNK_BYTES, CHUNKS_PER_ROW, HALF_BYTES};
pub use smem::{
    GlobalRows, LaneRows, PANEL_ROW_BYTES, PackedHeads, PagedRows, SharedLayout, SharedTile, SwizzledTile, TensorRows,
    TileAddresses, TileCopy, TileTranspose, TransposedRows,
};
pub use softmax::{
    E4M3_WEIGHT_EXPONENT, Exponential, FinishedRows, OnlineSoftmax, Rescale, RowScale, RowStats, add_sink,
};
pub(crate) use softmax::{lse_exact, lse_log2, normalize_row, reduce_row};
pub(crate) use vector::{VectorBits, VectorType, used_strides, vector_elements};

use flashcore_ir::types::U32;
use flashcore_ir::{Builder, Reg};

/// Lanes of a warp.
pub const LANES: u32 = 32;
/// Rows of an `m16n8` product, the tensor-core operation of a warp.
pub const MMA_M: u32 = 16;
/// Distance of a lane's rows in a fragment.
pub const ROW_STEP: u32 = 8;
/// Columns of the result of an `m16n8` product.
pub const MMA_N: u32 = 8;

/// Position of a lane in a tensor-core fragment: results and left operands have rows `group` and `group + 8`, and
/// columns `2 * member` and the next.
#[derive(Debug, Clone, Copy)]
pub struct FragmentPosition {
    /// `lane / 4`.
    pub group: Reg<U32>,
    /// `lane % 4`.
    pub member: Reg<U32>,
}

impl FragmentPosition {
    /// The position of `lane`.
    pub fn new(k: &mut Builder, lane: Reg<U32>) -> Self {
        Self { group: k.shr(lane, 2u32), member: k.and(lane, 3u32) }
    }
}
