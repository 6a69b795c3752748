//! The tile vocabulary: the words in which the kernels are written.
//!
//! * [`SharedTile`] is a matrix in shared memory that knows its layout,
//! * [`TileCopy`] brings a tile there from global memory, asynchronously, by all threads of the CTA,
//! * [`CpAsyncPipeline`] turns a few such places into a stream of tiles,
//! * [`SwizzledTile`] is a matrix in shared memory for the copy engine and for products of warpgroups,
//! * [`TmaPipeline`] is the stream of such tiles, from one warp that copies to the warpgroups that read,
//! * [`LeftFragments`], [`RightFragments`] and [`Accumulator`] are the registers of tensor-core products,
//! * [`ScoreTerms`] turns products into scores, [`KeyMask`] takes keys out of them, and [`OnlineSoftmax`] turns them
//!   into weights.

mod mask;
mod mma;
mod pipeline;
mod score;
mod score_mod;
mod smem;
mod softmax;

pub use mask::KeyMask;
pub use mma::{Accumulation, Accumulator, LeftFragments, LeftOperand, RightFragments};
pub use pipeline::{CpAsyncPipeline, HeldStage, PipelineState, TmaPipeline, TmaStoreGuard};
pub use score::{BiasTerms, ScorePositions, ScoreTerms};
pub use score_mod::{
    AddedTerm, BoundExpression, ExpressionCode, ExpressionOfTile, ExpressionPlace, ExpressionTables, Span, TileSpan,
};
pub(crate) use smem::{CHUNK_BYTES, CHUNK_ELEMENTS};
pub use smem::{
    GlobalRows, LaneRows, PANEL_COLUMNS, PANEL_ROW_BYTES, PFragment, PackedHeads, SharedLayout, SharedTile,
    SwizzledTile, TensorRows, TileAddresses, TileCopy, WgmmaOperand,
};
pub(crate) use softmax::lse;
pub use softmax::{Exponential, OnlineSoftmax, Rescale, RowScale, RowStats, add_sink};

use flashcore_ir::types::U32;
use flashcore_ir::{Builder, Reg};

/// Lanes of a warp.
pub const LANES: u32 = 32;
/// Rows that one warp multiplies at a time: those of a tensor-core product.
pub const ROWS_PER_BLOCK: u32 = 16;
/// Rows from one of a lane's rows to the next.
pub const ROW_STEP: u32 = 8;
/// Columns of the 8-wide results of a tensor-core product.
pub const RESULT_COLUMNS: u32 = 8;
/// The depth of a tensor-core product of 16-bit elements.
pub const PRODUCT_DEPTH: u32 = 16;

/// Where a lane stands in a tensor-core fragment: results and left operands have rows `group` and `group + 8`, and
/// columns `2 * member` and the next.
#[derive(Debug, Clone, Copy)]
pub struct FragmentPosition {
    /// `lane / 4`.
    pub group: Reg<U32>,
    /// `lane % 4`.
    pub member: Reg<U32>,
}

impl FragmentPosition {
    /// That of `lane`.
    pub fn new(k: &mut Builder, lane: Reg<U32>) -> Self {
        Self { group: k.shr(lane, 2u32), member: k.and(lane, 3u32) }
    }
}
