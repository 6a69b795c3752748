//! The tile vocabulary: the words in which the kernels are written.
//!
//! * [`SharedTile`] is a matrix in shared memory that knows its layout,
//! * [`TileCopy`] brings a tile there from global memory, asynchronously, by all threads of the CTA,
//! * [`Ring`] turns a few such places into a stream of tiles,
//! * [`PanelTile`] is a matrix in shared memory for the copy engine and for products of warpgroups,
//! * [`TransferRing`] is the stream of such tiles, from one warp that copies to the warpgroups that read,
//! * [`LeftFragments`], [`RightFragments`] and [`Accumulator`] are the registers of tensor-core products,
//! * [`ScoreTerms`] turns products into scores, [`KeyMask`] takes keys out of them, and [`OnlineSoftmax`] turns them
//!   into weights.

mod block_verdict;
mod copy;
mod expression;
mod expression_bound;
mod expression_tables;
mod fragment;
mod interval;
mod logarithm;
mod mask;
mod panel;
mod ring;
mod scores;
mod shared;
mod softmax;
mod softmax_steps;
mod transfer;

pub use copy::{GlobalRows, PackedHeads, TileCopy};
pub use expression::{AddedTerm, ExpressionCode, ExpressionOfTile, ExpressionPlace};
pub use expression_bound::BoundExpression;
pub use expression_tables::ExpressionTables;
pub use fragment::{Accumulation, Accumulator, LeftFragments, LeftOperand, RightFragments};
pub use interval::{Span, TileSpan};
pub(crate) use logarithm::lse;
pub use mask::KeyMask;
pub use panel::{PANEL_COLUMNS, PANEL_ROW_BYTES, PanelMatrix, PanelTile, Rounded, TensorRows};
pub use ring::Ring;
pub use scores::{BiasTerms, ScorePlaces, ScoreTerms};
pub(crate) use shared::{CHUNK_BYTES, CHUNK_ELEMENTS};
pub use shared::{LaneRows, SharedLayout, SharedTile, TileAddresses};
pub use softmax::{Exponential, OnlineSoftmax, Raised, Rescale, RowSums, add_sink};
pub use transfer::{LeftStage, StoredStage, TransferCursor, TransferRing};

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
