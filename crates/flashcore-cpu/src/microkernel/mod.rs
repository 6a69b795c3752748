//! The microkernels: what is worth writing by hand for each processor, in four traits.
//!
//! A *tile* of scores has a row for each row of the left operand, and a *lane* for each row of the right one, which lie side by
//! side in vectors. Row max, exponential and row sum of the softmax go down the lanes of a forward pass, and nothing is ever
//! added up across lanes. Left operands are read an element at a time for all lanes.
//!
//! | trait | what |
//! |---|---|
//! | [`Products`] | packing by layout, and the two products of a tile |
//! | [`Softmax`] | from a tile of products to scores, and from scores to weights |
//! | [`Decode`] | a few rows over keys that are read in place |
//! | [`FusedForward`] | steps of the forward pass that a level can do at once; none need be there |
//!
//! Operands have no roles: a driver chooses what is a row and what is a lane.
//!
//! | pass | rows | lanes | [`multiply`](Products::multiply) | [`accumulate`](Products::accumulate) |
//! |---|---|---|---|---|
//! | forward | keys | queries | `K Q^T` | `V^T P`: the output |
//! | gradients of key and value | queries | keys | `Q K^T`, `dO V^T` | `dO^T P`: `dV`; `Q^T dS`: `dK` |
//! | gradient of the query | keys | queries | `K Q^T`, `V dO^T` | `K^T dS`: `dQ` |
//!
//! Results of `accumulate` lie column by column. Packed layouts are up to a level: the driver lends it memory, says what to
//! pack, and hands packed tiles back for the products.

pub(crate) mod convert;
#[expect(unsafe_code, reason = "the loops of vectors that the levels share")]
pub(crate) mod decode;
#[cfg(test)]
mod gradient_tests;
pub(crate) mod head;
#[expect(unsafe_code, reason = "the loops of vectors that the levels share")]
mod lookahead;
pub(crate) mod mask;
#[expect(unsafe_code, reason = "the loops of vectors that the levels share")]
pub(crate) mod pack;
#[cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "an instruction without effect but on caches"))]
pub(crate) mod prefetch;
#[expect(unsafe_code, reason = "the loops of vectors that the levels share")]
pub(crate) mod products;
#[expect(unsafe_code, reason = "the loops of vectors that the levels share")]
pub(crate) mod score;
#[expect(unsafe_code, reason = "the loops of vectors that the levels share")]
pub(crate) mod softmax;
#[cfg(test)]
pub(crate) mod tests;
#[expect(unsafe_code, reason = "vector instructions are called where the level has them")]
pub(crate) mod vector_kernel;

use crate::attend::blocked;
use crate::attend::decode::DecodeTile;
use crate::driver::scheduler;
use crate::simd::real::Real;
use flashcore_problem::DType;
use head::Head;
use mask::LaneRanges;
use prefetch::PrefetchPlan;
use score::ScoreModifiers;
use std::ops::Range;
use zerocopy::{FromBytes, IntoBytes};

/// Packing, and the products of tiles.
pub(crate) trait Products: Sync {
    /// Type of scores, weights and sums: `f32` or `f64`.
    type Real: Real;
    /// Type that operands are packed into: that of the scores, or something narrower such as two `bf16` in a `u32`.
    /// Every pattern of bits is a value, and packed memory may hold what an earlier tile left there.
    type Packed: Copy + Default + Send + Sync + FromBytes + IntoBytes + 'static;

    /// Lanes of a panel: those of the widest block that stays in registers.
    const PANEL_LANES: usize;
    /// Lanes of one vector. The lanes that a panel uses are padded to a multiple of it.
    const LANE_BLOCK: usize;
    /// Alignment of the first row of a tile that a product takes.
    const ROW_ALIGNMENT: usize;
    /// Rows are multiplied in multiples of this; the products of those past the last are undefined.
    const ROW_BLOCK: usize;
    /// Columns of an accumulated product are padded to a multiple of this.
    const COLUMN_BLOCK: usize;

    /// Rows of one tile, a multiple of [`ROW_ALIGNMENT`](Self::ROW_ALIGNMENT) and at most
    /// [`MAX_KV_TILE`](blocked::MAX_KV_TILE).
    const TILE_ROWS: usize = blocked::KV_TILE;

    /// True if [`accumulate`](Self::accumulate) executes its [prefetch plan](AccumulateArgs::prefetch).
    const FUSED_PREFETCH: bool = false;

    /// Runs `work`, which calls the other methods, on this thread, with whatever a thread must set up before it can.
    fn on_thread(&self, work: impl FnOnce()) {
        work();
    }

    /// Number of elements of a packed right operand of so many columns.
    fn right_size(depth: usize) -> usize;

    /// Number of elements of a packed left operand of so many columns.
    fn left_size(depth: usize, rows: usize) -> usize;

    /// Number of elements of a left operand that is packed for its transposed product.
    fn transposed_size(columns: usize, rows: usize) -> usize;

    /// Number of elements of the packed weights of so many rows, for kernels that do not use the scores themselves.
    fn weight_size(rows: usize) -> usize {
        let _ = rows;
        0
    }

    /// A left operand as it lies, if that is how it would be packed for either product.
    fn in_place(head: Head<'_>, rows: Range<usize>) -> Option<&[Self::Packed]> {
        let _ = (head, rows);
        None
    }

    /// Packs `rows` of a right operand into the first of `lanes` lanes; the others become zero.
    fn pack_right(&self, head: Head<'_>, rows: Range<usize>, lanes: usize, packed: &mut [Self::Packed]);

    /// Packs a left operand for [`multiply`](Self::multiply).
    fn pack_left(&self, head: Head<'_>, rows: Range<usize>, packed: &mut [Self::Packed]);

    /// Packs a left operand for [`accumulate`](Self::accumulate), which transposes it. The padding that an odd row is paired
    /// with must not be a NaN that an earlier tile left.
    fn pack_transposed(&self, head: Head<'_>, rows: Range<usize>, packed: &mut [Self::Packed]);

    /// Packs weights, a row of `lanes` for each row of a tile, where [`weight_size`](Self::weight_size) is not zero.
    #[cfg_attr(not(test), expect(dead_code, reason = "the forward softmax packs its weights itself"))]
    fn pack_weights(&self, weights: &[Self::Real], lanes: usize, packed: &mut [Self::Packed]) {
        let _ = (weights, lanes, packed);
    }

    /// Multiplies the rows of an operand that was [packed for its transposed product](Self::pack_transposed), of so many
    /// columns, by a scale each. Only operands of 8 bits have scales.
    fn scale_rows(&self, packed: &mut [Self::Packed], columns: usize, scales: &[Self::Real]);

    /// Multiplies a left and a right operand: a tile of scores.
    fn multiply(&self, args: MultiplyArgs<'_, Self>);

    /// Adds the product of a transposed left operand and weights to sums.
    fn accumulate(&self, args: AccumulateArgs<'_, Self>);

    /// `rows[lane][column] = columns[column][lane] * factors[lane]`: accumulated sums as rows.
    fn transpose(&self, columns: &[Self::Real], factors: &[Self::Real], rows: &mut [Self::Real]);

    /// True if rows have neither a NaN nor an infinity.
    fn are_finite(&self, head: Head<'_>, rows: Range<usize>) -> bool;

    /// Writes `values`, each times `factor`, rounded to `dtype`.
    fn store(&self, dtype: DType, values: &[Self::Real], factor: Self::Real, bytes: &mut [u8]);
}

/// From products to scores, and from scores to weights.
pub(crate) trait Softmax: Products {
    /// Applies scales, softcap, `ALiBi` and bias: from products times a factor to scores.
    fn modify_scores(&self, modifiers: ScoreModifiers<'_, Self::Real>);

    /// Sets the scores of rows that a lane does not attend to minus infinity.
    fn mask(&self, scores: &mut [Self::Real], lanes: usize, ranges: &LaneRanges);

    /// One step of the online softmax: turns scores into weights and updates row max and row sum.
    fn online_softmax(&self, args: &mut SoftmaxArgs<'_, Self>) -> SoftmaxOutcome;

    /// Turns scores into the normalized weights `2^(score * factor - lse)`, for lanes or rows whose log-sum-exp in base 2 is
    /// known. A log-sum-exp of minus infinity, where nothing is attended, counts as 0.
    #[allow(dead_code, reason = "a forward pass does not know its log-sum-exp")]
    fn exp2_minus_lse(&self, scores: &mut [Self::Real], lanes: usize, factor: Self::Real, lse: Lse<'_, Self::Real>);
}

/// In-place attention of a few rows.
pub(crate) trait Decode: Products {
    /// Attends keys that are read in place with a few query rows.
    fn decode_tile(&self, tile: DecodeTile<'_, Self::Real>);
}

/// Steps of the forward pass that a level can do at once.
pub(crate) trait FusedForward: Softmax {
    /// Tiles that are packed before the first panel attends them. A panel then attends one after the other, and stays in
    /// the first-level cache between them.
    const PACKED_TILES: usize = 1;

    /// Upper bound of the query rows that share packed keys and values.
    const MAX_ITEM_ROWS: usize = scheduler::MAX_ITEM_ROWS;

    /// [`multiply`](Products::multiply) fused with [`online_softmax`](Softmax::online_softmax), for scores to which nothing is
    /// done between them. Returns false if a level does not have it, or not for this panel; then nothing is changed but the
    /// scratch for scores and weights, and [`updates_row_max`](SoftmaxArgs::updates_row_max), which is set where scores were
    /// too far above a stale row max.
    fn qk_softmax_fused(&self, operands: &Operands<'_, Self>, args: &mut SoftmaxArgs<'_, Self>) -> bool {
        let _ = (operands, args);
        false
    }

    /// [`multiply`](Products::multiply), [`online_softmax`](Softmax::online_softmax) and [`accumulate`](Products::accumulate)
    /// for many keys at once. Returns false if a level does not have it, or not for these; then nothing is changed but the
    /// scratch for scores and weights.
    fn attend_full_blocks(&self, args: FullBlocksArgs<'_, Self>) -> bool {
        let _ = args;
        false
    }
}

/// The operands of [`Products::multiply`].
pub(crate) struct Operands<'a, K: Products + ?Sized> {
    /// Columns of both.
    pub(crate) depth: usize,
    /// Rows of the left one; the first is a multiple of [`Products::ROW_ALIGNMENT`].
    pub(crate) rows: Range<usize>,
    /// A tile that [`Products::pack_left`] has packed.
    pub(crate) left: &'a [K::Packed],
    /// A panel that [`Products::pack_right`] has packed.
    pub(crate) right: &'a [K::Packed],
}

/// Full blocks: a row panel, and keys that all of its rows attend, with scores to which nothing is done before the softmax.
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only kernels of x86 attend full blocks at once"))]
pub(crate) struct FullBlocksArgs<'a, K: Products + ?Sized> {
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
    /// Lanes of the panel; a multiple of [`Products::LANE_BLOCK`].
    pub(crate) lanes: usize,
    /// Keys of the tiles. The first is a multiple of [`Products::ROW_ALIGNMENT`], and so is their number.
    pub(crate) keys: Range<usize>,
    /// Consecutive tiles that [`Products::pack_left`] has packed.
    pub(crate) key: &'a [K::Packed],
    /// Consecutive tiles that [`Products::pack_transposed`] has packed.
    pub(crate) value: &'a [K::Packed],
    /// A panel that [`Products::pack_right`] has packed.
    pub(crate) query: &'a [K::Packed],
    /// Factor of the scores; above zero.
    pub(crate) factor: K::Real,
    /// Scratch for the scores and weights of one tile.
    pub(crate) scores: &'a mut [K::Real],
    pub(crate) weights: &'a mut [K::Packed],
    /// As in [`SoftmaxArgs`].
    pub(crate) row_max: &'a mut [K::Real],
    pub(crate) row_sum: &'a mut [K::Real],
    /// As the sums of [`AccumulateArgs`].
    pub(crate) output: &'a mut [K::Real],
}

/// Outcome of a softmax step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SoftmaxOutcome {
    /// The scores have become weights.
    Done,
    /// The scores were too far above a stale row max: they are gone, and nothing else is changed. Compute them again, with a
    /// row max that is updated.
    StaleRowMax,
}

/// Log-sum-exps of the lanes of a tile or of its rows, in base 2.
#[cfg_attr(not(test), expect(dead_code, reason = "a forward pass does not know its log-sum-exp"))]
#[derive(Clone, Copy)]
pub(crate) enum Lse<'a, R> {
    OfLanes(&'a [R]),
    OfRows(&'a [R]),
}

/// Upper bound of the blocks of lanes of a panel.
const MAX_LANE_BLOCKS: usize = 4;

/// Number of rows, from the first on, that some lane of each [block](Products::LANE_BLOCK) takes part in at most: never fewer
/// than of the block before. A kernel may leave out the rows past them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaneRows([usize; MAX_LANE_BLOCKS]);

impl LaneRows {
    /// From the rows of each block.
    pub(crate) fn new(rows: impl FnMut(usize) -> usize) -> Self {
        Self(std::array::from_fn(rows))
    }

    /// Number of rows of a block.
    pub(crate) fn of_block(self, block: usize) -> usize {
        self.0[block]
    }

    fn largest(self) -> usize {
        self.0.into_iter().max().unwrap_or(0)
    }
}

/// `product[row][lane] = factor * dot(left[row], right[lane])`.
pub(crate) struct MultiplyArgs<'a, K: Products + ?Sized> {
    pub(crate) operands: &'a Operands<'a, K>,
    /// Lanes of the right operand; a multiple of [`Products::LANE_BLOCK`].
    pub(crate) lanes: usize,
    pub(crate) lane_rows: LaneRows,
    pub(crate) factor: K::Real,
    /// A row of `lanes` for each row, padded to a multiple of [`Products::ROW_BLOCK`] rows.
    pub(crate) product: &'a mut [K::Real],
}

impl<K: Products + ?Sized> MultiplyArgs<'_, K> {
    /// True if the memory for the product is large enough.
    pub(crate) fn fits(&self) -> bool {
        let rows = self.operands.rows.len();
        self.lanes.is_multiple_of(K::LANE_BLOCK)
            && self.lane_rows.largest() <= rows
            && self.product.len() >= padded(rows, K::ROW_BLOCK) * self.lanes
    }
}

/// The scores of a tile, whose lanes are rows of attention, and the online softmax of these so far.
///
/// The row max of the scores, in base 2, is minus infinity before anything was attended. A NaN never becomes the row max; it
/// shows in the row sum. The row max may be a little above the largest score, and, if stale, below it as far as
/// [`updates_row_max`](Self::updates_row_max) says.
pub(crate) struct SoftmaxArgs<'a, K: Products + ?Sized> {
    /// Lanes of each of the following; a multiple of [`Products::LANE_BLOCK`].
    pub(crate) lanes: usize,
    /// Rows of the tile that have scores. What lies past them in `scores` is to be left alone, and to get no weight.
    pub(crate) rows: usize,
    pub(crate) lane_rows: LaneRows,
    /// True if the row max must follow the scores. Otherwise it may be stale (lazy rescale): weights may exceed 1, as
    /// long as they are not [too large](SoftmaxOutcome::StaleRowMax).
    pub(crate) updates_row_max: bool,
    /// Factor of the scores; above zero.
    pub(crate) factor: K::Real,
    /// A lane for each score of a row. Scores come in, weights `2^(score * factor - row_max)` go out.
    pub(crate) scores: &'a mut [K::Real],
    /// Out: the weights packed for [`Products::accumulate`], with zeros for rows that only pad. For kernels whose
    /// [`Products::weight_size`] is not zero.
    pub(crate) weights: &'a mut [K::Packed],
    /// True if weights must be left in `scores`; a kernel that packs them need not otherwise.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only kernels of x86 pack weights"))]
    pub(crate) keeps_weights: bool,
    /// Row max of each lane.
    pub(crate) row_max: &'a mut [K::Real],
    /// Sum of the weights of each lane.
    pub(crate) row_sum: &'a mut [K::Real],
    /// Out: the factor that rescales the sums so far.
    pub(crate) row_scale: &'a mut [K::Real],
}

impl<K: Products + ?Sized> SoftmaxArgs<'_, K> {
    /// True if every element that a kernel touches is there.
    pub(crate) fn fits(&self) -> bool {
        self.lanes.is_multiple_of(K::LANE_BLOCK)
            && self.lanes <= K::PANEL_LANES
            && self.scores.len() >= self.rows * self.lanes
            && self.lane_rows.largest() <= self.rows
            && self.weights.len() >= K::weight_size(self.rows)
            && [self.row_max.len(), self.row_sum.len(), self.row_scale.len()].iter().all(|&len| len >= self.lanes)
    }
}

/// `sums[column][lane] = sums[column][lane] * lane_scale[lane] + sum over rows of left[row][column] * weight[row][lane]`.
pub(crate) struct AccumulateArgs<'a, K: Products + ?Sized> {
    /// Columns of the left operand.
    pub(crate) columns: usize,
    /// Lanes of weights and sums; a multiple of [`Products::LANE_BLOCK`].
    pub(crate) lanes: usize,
    /// Rows of the left operand; the first is a multiple of [`Products::ROW_ALIGNMENT`].
    pub(crate) rows: Range<usize>,
    pub(crate) lane_rows: LaneRows,
    /// A tile that [`Products::pack_transposed`] has packed.
    pub(crate) left: &'a [K::Packed],
    /// The weights, a row of `lanes` for each of `rows`.
    pub(crate) weights: &'a [K::Real],
    /// The weights as [`Softmax::online_softmax`] or [`Products::pack_weights`] has packed them.
    pub(crate) packed_weights: &'a [K::Packed],
    pub(crate) lane_scale: &'a [K::Real],
    /// A row of `lanes` for each column, padded to a multiple of [`Products::COLUMN_BLOCK`] rows.
    pub(crate) sums: &'a mut [K::Real],
    /// True if the sums count as zero, whatever lies there.
    pub(crate) is_first: bool,
    pub(crate) prefetch: PrefetchPlan,
}

impl<K: Products + ?Sized> AccumulateArgs<'_, K> {
    /// True if every element that a kernel touches, but for those of the left operand, is there.
    pub(crate) fn fits(&self) -> bool {
        self.lanes.is_multiple_of(K::LANE_BLOCK)
            && self.weights.len() >= self.rows.len() * self.lanes
            && self.lane_rows.largest() <= self.rows.len()
            && self.packed_weights.len() >= K::weight_size(self.rows.len())
            && self.lane_scale.len() >= self.lanes
            && self.sums.len() >= padded(self.columns, K::COLUMN_BLOCK) * self.lanes
    }
}

/// Rounds `size` up to a multiple of `block`.
pub(crate) const fn padded(size: usize, block: usize) -> usize {
    size.div_ceil(block) * block
}
