//! The microkernel: what is worth writing by hand for each processor.
//!
//! Vector lanes are query rows. The scores of a row panel lie key by key, with one lane per query row, so that row max,
//! exponential and row sum of the softmax go down the columns and nothing is ever added up across lanes. Keys and values
//! are then the left factors of both products, an element at a time for all lanes.
//!
//! The layout of packed queries, keys and values is up to the kernel: the driver lends it memory, says what to pack, and
//! hands the packed tiles back for the products.

pub(crate) mod convert;
#[expect(unsafe_code, reason = "the loops of vectors that the levels share")]
pub(crate) mod decode;
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

/// The inner loops of attention on packed tiles. One implementation per instruction set.
pub(crate) trait Microkernel: Sync {
    /// Type of scores, weights, sums and outputs: `f32` or `f64`.
    type Real: Real;
    /// Type that operands are packed into: that of the scores, or something narrower such as two `bf16` in a `u32`.
    /// Every pattern of bits is a value, and packed memory may hold what an earlier tile left there.
    type Packed: Copy + Default + Send + Sync + FromBytes + IntoBytes + 'static;

    /// Query rows of a row panel: the lanes of the widest block that stays in registers.
    const PANEL_ROWS: usize;
    /// Lanes of one vector. The lanes that a panel uses are padded to a multiple of it.
    const LANE_BLOCK: usize;
    /// Alignment, in keys, of the first key of a tile that a panel attends.
    const KEY_ALIGNMENT: usize;
    /// Keys are scored in multiples of this; the scores of those past the last are undefined.
    const KEY_BLOCK: usize;
    /// The columns of the output are padded to a multiple of this.
    const VALUE_BLOCK: usize;

    /// Keys of one tile, a multiple of [`KEY_ALIGNMENT`](Self::KEY_ALIGNMENT) and at most
    /// [`MAX_KV_TILE`](blocked::MAX_KV_TILE).
    const KV_TILE: usize = blocked::KV_TILE;

    /// Tiles that are packed before the first panel attends them. A panel then attends one after the other, and stays in
    /// the first-level cache between them.
    const PACKED_TILES: usize = 1;

    /// Upper bound of the query rows that share packed keys and values.
    const MAX_ITEM_ROWS: usize = scheduler::MAX_ITEM_ROWS;

    /// True if [`online_softmax`](Self::online_softmax) can multiply scores by a factor above zero, so that
    /// [`qk_product`](Self::qk_product) need not.
    const SCALES_IN_SOFTMAX: bool = false;

    /// True if [`pv_product`](Self::pv_product) executes its [prefetch plan](PvArgs::prefetch).
    const FUSED_PREFETCH: bool = false;

    /// Runs `work`, which calls the other methods, on this thread, with whatever a thread must set up before it can.
    fn on_thread(&self, work: impl FnOnce()) {
        work();
    }

    /// Number of elements of a packed panel of queries.
    fn query_size(head_dim: usize) -> usize;

    /// Number of elements of a packed tile of so many keys.
    fn key_size(head_dim: usize, keys: usize) -> usize;

    /// Number of elements of a packed tile of so many values.
    fn value_size(value_dim: usize, keys: usize) -> usize;

    /// Number of elements of the packed weights of so many keys, for kernels that do not use the scores themselves.
    fn weight_size(keys: usize) -> usize {
        let _ = keys;
        0
    }

    /// Keys or values as they lie, if that is how they would be packed.
    fn in_place(head: Head<'_>, rows: Range<usize>) -> Option<&[Self::Packed]> {
        let _ = (head, rows);
        None
    }

    /// Packs `rows` of the query into the first of `lanes` lanes; the others become zero.
    fn pack_query(&self, query: Head<'_>, rows: Range<usize>, lanes: usize, packed: &mut [Self::Packed]);

    /// Packs `keys`.
    fn pack_keys(&self, key: Head<'_>, keys: Range<usize>, packed: &mut [Self::Packed]);

    /// Packs the values of `keys`. The padding that an odd key is paired with must not be a NaN that an earlier tile left.
    fn pack_values(&self, value: Head<'_>, keys: Range<usize>, packed: &mut [Self::Packed]);

    /// Multiplies the rows of packed values, of so many columns, by a scale each. Only values of 8 bits have scales.
    fn scale_values(&self, packed: &mut [Self::Packed], columns: usize, scales: &[Self::Real]);

    /// Computes scores, the products of keys and queries.
    fn qk_product(&self, args: QkArgs<'_, Self>);

    /// One step of the online softmax: turns scores into weights and updates row max and row sum.
    fn online_softmax(&self, args: &mut SoftmaxArgs<'_, Self>) -> SoftmaxOutcome;

    /// [`qk_product`](Self::qk_product) fused with [`online_softmax`](Self::online_softmax), for scores to which nothing is
    /// done between them. Returns false if a kernel does not have it, or not for this panel; then nothing is changed but
    /// the scratch for scores and weights, and [`updates_row_max`](SoftmaxArgs::updates_row_max), which is set where scores
    /// were too far above a stale row max.
    fn qk_softmax_fused(&self, operands: QkOperands<'_, Self>, args: &mut SoftmaxArgs<'_, Self>) -> bool {
        let _ = (operands, args);
        false
    }

    /// [`qk_product`](Self::qk_product), [`online_softmax`](Self::online_softmax) and [`pv_product`](Self::pv_product)
    /// for many keys at once. Returns false if a kernel does not have it, or not for these; then nothing is changed but the
    /// scratch.
    fn attend_full_blocks(&self, args: FullBlocksArgs<'_, Self>) -> bool {
        let _ = args;
        false
    }

    /// Adds the products of weights and values to the output.
    fn pv_product(&self, args: PvArgs<'_, Self>);

    /// Applies softcap, `ALiBi` and bias: from products times a factor to scores.
    fn modify_scores(&self, modifiers: ScoreModifiers<'_, Self::Real>);

    /// `rows[lane][column] = columns[column][lane] * factors[lane]`: the output of a panel as rows.
    fn transpose(&self, columns: &[Self::Real], factors: &[Self::Real], rows: &mut [Self::Real]);

    /// Sets the scores of keys that a row does not attend to minus infinity.
    fn mask(&self, scores: &mut [Self::Real], lanes: usize, ranges: &LaneRanges);

    /// True if rows have neither a NaN nor an infinity.
    fn are_finite(&self, head: Head<'_>, rows: Range<usize>) -> bool;

    /// Writes `values`, each times `factor`, rounded to `dtype`.
    fn store(&self, dtype: DType, values: &[Self::Real], factor: Self::Real, bytes: &mut [u8]);

    /// Attends keys that are read in place with a few query rows.
    fn decode_tile(&self, tile: DecodeTile<'_, Self::Real>);
}

/// Operands of the QK product.
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only kernels of x86 fuse QK and softmax"))]
pub(crate) struct QkOperands<'a, K: Microkernel + ?Sized> {
    pub(crate) head_dim: usize,
    /// Keys of the tile; the first is a multiple of [`Microkernel::KEY_ALIGNMENT`].
    pub(crate) keys: Range<usize>,
    /// A tile that [`Microkernel::pack_keys`] has packed.
    pub(crate) key: &'a [K::Packed],
    /// A panel that [`Microkernel::pack_query`] has packed.
    pub(crate) query: &'a [K::Packed],
}

/// Full blocks: a row panel, and keys that all of its rows attend, with scores to which nothing is done before the softmax.
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only kernels of x86 attend full blocks at once"))]
pub(crate) struct FullBlocksArgs<'a, K: Microkernel + ?Sized> {
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
    /// Lanes of the panel; a multiple of [`Microkernel::LANE_BLOCK`].
    pub(crate) lanes: usize,
    /// Keys of the tiles. The first is a multiple of [`Microkernel::KEY_ALIGNMENT`], and so is their number.
    pub(crate) keys: Range<usize>,
    /// Consecutive tiles that [`Microkernel::pack_keys`] has packed.
    pub(crate) key: &'a [K::Packed],
    /// Consecutive tiles that [`Microkernel::pack_values`] has packed.
    pub(crate) value: &'a [K::Packed],
    /// A panel that [`Microkernel::pack_query`] has packed.
    pub(crate) query: &'a [K::Packed],
    /// Factor of the scores; above zero.
    pub(crate) factor: K::Real,
    /// Scratch for the scores and weights of one tile.
    pub(crate) scores: &'a mut [K::Real],
    pub(crate) weights: &'a mut [K::Packed],
    /// As in [`SoftmaxArgs`].
    pub(crate) row_max: &'a mut [K::Real],
    pub(crate) row_sum: &'a mut [K::Real],
    /// As in [`PvArgs`].
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

/// Upper bound of the blocks of lanes of a panel.
const MAX_LANE_BLOCKS: usize = 4;

/// Number of keys, from the first on, that some row of each [block of lanes](Microkernel::LANE_BLOCK) attends at most: never
/// fewer than of the block before. A kernel may leave out the keys past them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaneKeys([usize; MAX_LANE_BLOCKS]);

impl LaneKeys {
    /// From the keys of each block.
    pub(crate) fn new(keys: impl FnMut(usize) -> usize) -> Self {
        Self(std::array::from_fn(keys))
    }

    /// Number of keys of a block.
    pub(crate) fn of_block(self, block: usize) -> usize {
        self.0[block]
    }

    fn largest(self) -> usize {
        self.0.into_iter().max().unwrap_or(0)
    }
}

/// `scores[key][lane] = factor * dot(key, query[lane])`.
pub(crate) struct QkArgs<'a, K: Microkernel + ?Sized> {
    pub(crate) head_dim: usize,
    /// Lanes of the panel; a multiple of [`Microkernel::LANE_BLOCK`].
    pub(crate) lanes: usize,
    /// Keys of the tile; the first is a multiple of [`Microkernel::KEY_ALIGNMENT`].
    pub(crate) keys: Range<usize>,
    pub(crate) lane_keys: LaneKeys,
    /// A tile that [`Microkernel::pack_keys`] has packed.
    pub(crate) key: &'a [K::Packed],
    /// A panel that [`Microkernel::pack_query`] has packed.
    pub(crate) query: &'a [K::Packed],
    pub(crate) factor: K::Real,
    /// A row of `lanes` for each key, padded to a multiple of [`Microkernel::KEY_BLOCK`] rows.
    pub(crate) scores: &'a mut [K::Real],
}

impl<K: Microkernel + ?Sized> QkArgs<'_, K> {
    /// True if the scratch for scores is large enough.
    pub(crate) fn fits(&self) -> bool {
        self.lanes.is_multiple_of(K::LANE_BLOCK)
            && self.lane_keys.largest() <= self.keys.len()
            && self.scores.len() >= padded(self.keys.len(), K::KEY_BLOCK) * self.lanes
    }
}

/// The scores of some keys for a row panel, and the online softmax of its rows so far.
///
/// The row max of the scores, in base 2, is minus infinity before anything was attended. A NaN never becomes the row max; it
/// shows in the row sum. The row max may be a little above the largest score, and, if stale, below it as far as
/// [`updates_row_max`](Self::updates_row_max) says.
pub(crate) struct SoftmaxArgs<'a, K: Microkernel + ?Sized> {
    /// Lanes of each of the following; a multiple of [`Microkernel::LANE_BLOCK`].
    pub(crate) lanes: usize,
    /// Number of keys that have scores. What lies past them in `scores` is to be left alone, and to get no weight.
    pub(crate) keys: usize,
    pub(crate) lane_keys: LaneKeys,
    /// True if the row max must follow the scores. Otherwise it may be stale (lazy rescale): weights may exceed 1, as
    /// long as they are not [too large](SoftmaxOutcome::StaleRowMax).
    pub(crate) updates_row_max: bool,
    /// Factor of the scores: 1, or above zero where [`Microkernel::SCALES_IN_SOFTMAX`].
    pub(crate) factor: K::Real,
    /// A row of `lanes` for each key. Scores come in, weights `2^(score - row_max)` go out.
    pub(crate) scores: &'a mut [K::Real],
    /// Out: the weights packed for [`Microkernel::pv_product`], with zeros for keys that only pad. For kernels whose
    /// [`Microkernel::weight_size`] is not zero.
    pub(crate) weights: &'a mut [K::Packed],
    /// True if weights must be left in `scores`; a kernel that packs them need not otherwise.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only kernels of x86 pack weights"))]
    pub(crate) keeps_weights: bool,
    /// Row max of each lane.
    pub(crate) row_max: &'a mut [K::Real],
    /// Sum of the weights of each lane.
    pub(crate) row_sum: &'a mut [K::Real],
    /// Out: the factor that rescales the output so far.
    pub(crate) row_scale: &'a mut [K::Real],
}

impl<K: Microkernel + ?Sized> SoftmaxArgs<'_, K> {
    /// True if every element that a kernel touches is there.
    pub(crate) fn fits(&self) -> bool {
        self.lanes.is_multiple_of(K::LANE_BLOCK)
            && self.scores.len() >= self.keys * self.lanes
            && self.lane_keys.largest() <= self.keys
            && self.weights.len() >= K::weight_size(self.keys)
            && [self.row_max.len(), self.row_sum.len(), self.row_scale.len()].iter().all(|&len| len >= self.lanes)
    }
}

/// `output[column][lane] = output[column][lane] * row_scale[lane] + sum over keys of value[key][column] * weight[key][lane]`.
pub(crate) struct PvArgs<'a, K: Microkernel + ?Sized> {
    pub(crate) value_dim: usize,
    /// Lanes of the panel; a multiple of [`Microkernel::LANE_BLOCK`].
    pub(crate) lanes: usize,
    /// Keys of the tile; the first is a multiple of [`Microkernel::KEY_ALIGNMENT`].
    pub(crate) keys: Range<usize>,
    pub(crate) lane_keys: LaneKeys,
    /// A tile that [`Microkernel::pack_values`] has packed.
    pub(crate) value: &'a [K::Packed],
    /// The weights, a row of `lanes` for each of `keys`.
    pub(crate) scores: &'a [K::Real],
    /// The weights as [`Microkernel::online_softmax`] has packed them.
    pub(crate) weights: &'a [K::Packed],
    pub(crate) row_scale: &'a [K::Real],
    /// A row of `lanes` for each column of the value, padded to a multiple of [`Microkernel::VALUE_BLOCK`] rows.
    pub(crate) output: &'a mut [K::Real],
    /// True if the output counts as zero, whatever lies there.
    pub(crate) is_first: bool,
    pub(crate) prefetch: PrefetchPlan,
}

impl<K: Microkernel + ?Sized> PvArgs<'_, K> {
    /// True if every element that a kernel touches, but for those of the packed value, is there.
    pub(crate) fn fits(&self) -> bool {
        self.lanes.is_multiple_of(K::LANE_BLOCK)
            && self.scores.len() >= self.keys.len() * self.lanes
            && self.lane_keys.largest() <= self.keys.len()
            && self.weights.len() >= K::weight_size(self.keys.len())
            && self.row_scale.len() >= self.lanes
            && self.output.len() >= padded(self.value_dim, K::VALUE_BLOCK) * self.lanes
    }
}

/// Rounds `size` up to a multiple of `block`.
pub(crate) const fn padded(size: usize, block: usize) -> usize {
    size.div_ceil(block) * block
}
