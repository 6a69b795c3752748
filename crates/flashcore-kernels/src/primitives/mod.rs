//! Primitives: what attention kernels are made of.
//!
//! * [`SharedTile`] is a shared-memory tile that knows its layout, [`TileCopy`] its `cp.async` copy by all threads of a
//!   CTA, [`CpAsyncPipeline`] the stages of such tiles;
//! * [`SwizzledTile`] is the shared-memory tile of TMA and `wgmma`, [`TmaPipeline`] its stages between a producer warp and
//!   consumer warpgroups;
//! * a product of tensor cores is `accumulator += A · B`: [`Accumulator::multiply`] is that of a warp, of an [`OperandA`] in
//!   registers or shared memory and a [`SharedOperand`], [`Accumulator::multiply_async`] that of a warpgroup (`wgmma`), of a
//!   [`WgmmaA`] in registers or shared memory and a [`WgmmaOperand`]. Operands in shared memory are K-major or MN-major;
//! * [`ScoreTerms`] turns products into scores, [`KeyMask`] masks them, and [`OnlineSoftmax`] turns them into weights;
//! * [`Window`] gives the keys that rows attend, and the rows that attend keys;
//! * [`ExpressionCode`] is the code of a `score_mod` or `mask_mod`.

mod mask;
mod mma;
mod pipeline;
mod score;
mod score_mod;
mod smem;
mod softmax;
mod vector;
mod window;

pub use mask::KeyMask;
pub use mma::{
    Accumulation, Accumulator, E4m3, Fp8Placement, Fp8Target, Fp8Widener, Fp8Widening, FragmentA, HalfTypes,
    LaneColumns, OperandA, Quads, Tf32Products, ValueWords, WgmmaA, WgmmaFragments, WgmmaOperand, WgmmaTypes,
    adjacent_columns, multiply_e4m3_k_major, multiply_e4m3_mn_major, multiply_tf32_k_major, multiply_tf32_mn_major,
    multiply_widened_k_major, multiply_widened_mn_major,
};
pub(crate) use pipeline::named_barrier::NamedBarrier;
pub use pipeline::{CpAsyncPipeline, HeldStage, PipelineState, StageIndex, TmaPipeline, TmaStoreGuard};
pub use score::{BiasTerms, ScorePositions, ScoreTerms};
pub use score_mod::{
    AddedTerm, BoundExpression, ExpressionBlock, ExpressionCode, ExpressionTables, Interval, LaneScores, ScoreBlock,
};
pub(crate) use smem::{CHUNK_BYTES, CHUNKS_PER_ROW, HALF_BYTES, shared_bytes};
pub use smem::{
    GlobalRows, PANEL_ROW_BYTES, PackedHeads, PagedRows, SharedLayout, SharedOperand, SharedTile, StoredElement,
    SwizzledTile, TensorRows, TileCopy, TileTranspose, TransposedRows,
};
pub use softmax::{
    E4M3_WEIGHT_EXPONENT, Exponential, FinishedRows, OnlineSoftmax, Rescale, RowScale, RowStats, add_sink,
};
pub(crate) use softmax::{lse_exact, lse_log2, normalize_row, reduce_row};
pub(crate) use vector::{VectorBits, VectorType, used_strides, vector_elements};
pub use window::Window;

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

/// Position of a lane in a tensor-core fragment: results and A have rows `group` and `group + 8`, and
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
