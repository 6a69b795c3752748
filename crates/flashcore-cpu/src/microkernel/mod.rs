//! What is worth writing by hand for each processor.
//!
//! Vector lanes are query rows. The scores of a strip of query rows lie key by key, with one lane per query row, so that
//! maximum, exponential and sum of the softmax go down the columns and nothing is ever added up across lanes. Keys and
//! values are then the left factors of both products, an element at a time for all lanes.
//!
//! How query, keys and values are packed is the kernel's own affair: the driver lends it room, says what to pack, and
//! hands the packed tiles back when they attend_block.

pub(crate) mod convert;
#[expect(unsafe_code, reason = "the loops of vectors that the levels share")]
pub(crate) mod decode;
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
mod tests;
#[expect(unsafe_code, reason = "vector instructions are called where the level has them")]
pub(crate) mod vector_kernel;

use crate::attend::decode::DecodeTile;
use crate::simd::real::Real;
use convert::Head;
use flashcore_problem::DType;
use mask::LaneRanges;
use prefetch::PrefetchPlan;
use score::ScoreModifiers;
use std::ops::Range;
use zerocopy::{FromBytes, IntoBytes};

/// The inner loops of the driver on packed tiles. One implementation per instruction set.
pub(crate) trait Microkernel: Sync {
    /// Scores, weights, sums and outputs: `f32` or `f64`.
    type Real: Real;
    /// What operands are packed into: the type of the scores, or something narrower such as two `bf16` in a `u32`.
    /// Every pattern of bits is a value, and packed room may hold what an earlier tile left there.
    type Packed: Copy + Default + Send + Sync + FromBytes + IntoBytes + 'static;

    /// Query rows of a strip: the lanes of the widest block that stays in registers.
    const PANEL_ROWS: usize;
    /// The lanes that a strip uses are padded to a multiple of this: those of one vector.
    const LANE_BLOCK: usize;
    /// Where the keys of a tile that a strip attends may begin: at multiples of this.
    const KEY_ALIGNMENT: usize;
    /// Keys are scored in multiples of this; the scores of those past the last mean nothing.
    const KEY_BLOCK: usize;
    /// The columns of the output are padded to a multiple of this.
    const VALUE_BLOCK: usize;

    /// Keys of one tile, a multiple of [`KEY_ALIGNMENT`](Self::KEY_ALIGNMENT) and at most
    /// [`MAX_KV_TILE`](crate::attend::blocked::MAX_KV_TILE).
    const KV_TILE: usize = crate::attend::blocked::KV_TILE;

    /// Tiles that are packed before the first strip meets them. A strip then meets one after the other, and is not
    /// forgotten by the first-level cache between them.
    const PACKED_TILES: usize = 1;

    /// Query rows that share packed keys and values, at most.
    const MAX_ITEM_ROWS: usize = crate::driver::scheduler::MAX_ITEM_ROWS;

    /// Whether [`weigh`](Self::weigh) can multiply scores by a factor above zero on its way, so that
    /// [`score`](Self::score) need not.
    const SCALES_IN_SOFTMAX: bool = false;

    /// Whether [`accumulate`](Self::accumulate) asks for what its product says is needed [prefetch](PvArgs::prefetch).
    const FUSED_PREFETCH: bool = false;

    /// Runs `work`, which calls the other methods, on this thread: for what a thread must have before it can.
    fn on_thread(&self, work: impl FnOnce()) {
        work();
    }

    /// Elements of a packed strip of queries.
    fn query_size(head_dim: usize) -> usize;

    /// Elements of a packed tile of so many keys.
    fn key_size(head_dim: usize, keys: usize) -> usize;

    /// Elements of a packed tile of so many values.
    fn value_size(value_dim: usize, keys: usize) -> usize;

    /// Elements of the packed weights of so many keys, for kernels that do not use the scores themselves.
    fn weight_size(keys: usize) -> usize {
        let _ = keys;
        0
    }

    /// Keys or values as they lie, where that is how they would be packed.
    fn in_place(head: Head<'_>, rows: Range<usize>) -> Option<&[Self::Packed]> {
        let _ = (head, rows);
        None
    }

    /// Packs `rows` of the query into the first of `lanes` lanes; the others become zero.
    fn pack_query(&self, query: Head<'_>, rows: Range<usize>, lanes: usize, packed: &mut [Self::Packed]);

    /// Packs `keys`.
    fn pack_keys(&self, key: Head<'_>, keys: Range<usize>, packed: &mut [Self::Packed]);

    /// Packs the values of `keys`. What an odd key is paired with must not be a NaN that an earlier tile left.
    fn pack_values(&self, value: Head<'_>, keys: Range<usize>, packed: &mut [Self::Packed]);

    /// The products of keys and queries.
    fn qk_product(&self, product: QkArgs<'_, Self>);

    /// One step of the softmax: scores to weights, running maximum and sum brought up to date.
    fn online_softmax(&self, panel: &mut SoftmaxArgs<'_, Self>) -> SoftmaxOutcome;

    /// [`score`](Self::score) and [`weigh`](Self::weigh) at once, for scores to which nothing is done between them. Whether
    /// it was done: a kernel may not have it, or not for this strip, and then nothing is changed but the room for scores and
    /// weights, and [`updates_row_max`](Strip::updates_row_max), which is set where scores were too large without it.
    fn qk_softmax_fused(&self, factors: QkOperands<'_, Self>, panel: &mut SoftmaxArgs<'_, Self>) -> bool {
        let _ = (factors, panel);
        false
    }

    /// [`score`](Self::score), [`weigh`](Self::weigh) and [`accumulate`](Self::accumulate) for many keys at once. Whether
    /// it was done: a kernel may not have it, or not for these, and then nothing is changed but the room.
    fn attend_full_blocks(&self, meeting: FullBlocksArgs<'_, Self>) -> bool {
        let _ = meeting;
        false
    }

    /// Adds the products of values and weights to the output.
    fn pv_product(&self, product: PvArgs<'_, Self>);

    /// Softcap, `ALiBi` and bias: from products times a factor to scores.
    fn modify_scores(&self, modifiers: ScoreModifiers<'_, Self::Real>);

    /// `rows[lane][column] = columns[column][lane] * factors[lane]`: the output of a strip as rows.
    fn transpose(&self, columns: &[Self::Real], factors: &[Self::Real], rows: &mut [Self::Real]);

    /// Takes what rows do not attend out of their scores.
    fn mask(&self, scores: &mut [Self::Real], lanes: usize, ranges: &LaneRanges);

    /// Whether rows have neither a NaN nor an infinity.
    fn are_finite(&self, head: Head<'_>, rows: Range<usize>) -> bool;

    /// Writes `values`, each times `factor`, rounded to `dtype`.
    fn store(&self, dtype: DType, values: &[Self::Real], factor: Self::Real, bytes: &mut [u8]);

    /// A few query rows attend some keys that are read where they lie.
    fn decode_tile(&self, tile: DecodeTile<'_, Self::Real>);
}

/// What scores are products of.
pub(crate) struct QkOperands<'a, K: Microkernel + ?Sized> {
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only kernels of x86 score and weigh at once"))]
    pub(crate) head_dim: usize,
    /// Which keys of the tile; the first is a multiple of [`Microkernel::KEY_ALIGNMENT`].
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only kernels of x86 score and weigh at once"))]
    pub(crate) keys: Range<usize>,
    /// A tile that [`Microkernel::pack_keys`] has packed.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only kernels of x86 score and weigh at once"))]
    pub(crate) key: &'a [K::Packed],
    /// A strip that [`Microkernel::pack_query`] has packed.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only kernels of x86 score and weigh at once"))]
    pub(crate) query: &'a [K::Packed],
}

/// A strip of query rows, and keys that all of them attend, with scores to which nothing is done before they are weighed.
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only kernels of x86 attend at once"))]
pub(crate) struct FullBlocksArgs<'a, K: Microkernel + ?Sized> {
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
    /// Lanes of the strip; a multiple of [`Microkernel::LANE_BLOCK`].
    pub(crate) lanes: usize,
    /// Which keys of the tiles. The first is a multiple of [`Microkernel::KEY_ALIGNMENT`], and so is their number.
    pub(crate) keys: Range<usize>,
    /// Tiles that [`Microkernel::pack_keys`] has packed, one behind the other.
    pub(crate) key: &'a [K::Packed],
    /// Tiles that [`Microkernel::pack_values`] has packed, one behind the other.
    pub(crate) value: &'a [K::Packed],
    /// A strip that [`Microkernel::pack_query`] has packed.
    pub(crate) query: &'a [K::Packed],
    /// What scores are multiplied by; above zero.
    pub(crate) factor: K::Real,
    /// BlockScratch for the scores and weights of one tile.
    pub(crate) scores: &'a mut [K::Real],
    pub(crate) weights: &'a mut [K::Packed],
    /// As in [`Strip`].
    pub(crate) row_max: &'a mut [K::Real],
    pub(crate) row_sum: &'a mut [K::Real],
    /// As in [`PvArgs`].
    pub(crate) output: &'a mut [K::Real],
}

/// What became of a strip of scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SoftmaxOutcome {
    /// They are weights now.
    Done,
    /// They were too far above a maximum that was to stay: they are gone, and nothing else is changed. To be computed and
    /// weighed again with a maximum that follows.
    StaleRowMax,
}

/// No strip has more blocks of lanes.
const MAX_LANE_BLOCKS: usize = 4;

/// How many keys, from the first on, some row of each [block of lanes](Microkernel::LANE_BLOCK) attends, at most: never
/// fewer than of the block before. A kernel may leave out what is behind them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaneKeys([usize; MAX_LANE_BLOCKS]);

impl LaneKeys {
    /// From the keys of each block.
    pub(crate) fn new(keys: impl FnMut(usize) -> usize) -> Self {
        Self(std::array::from_fn(keys))
    }

    /// The keys of a block.
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
    /// The lanes of the strip; a multiple of [`Microkernel::LANE_BLOCK`].
    pub(crate) lanes: usize,
    /// Which keys of the tile; the first is a multiple of [`Microkernel::KEY_ALIGNMENT`].
    pub(crate) keys: Range<usize>,
    pub(crate) lane_keys: LaneKeys,
    /// A tile that [`Microkernel::pack_keys`] has packed.
    pub(crate) key: &'a [K::Packed],
    /// A strip that [`Microkernel::pack_query`] has packed.
    pub(crate) query: &'a [K::Packed],
    pub(crate) factor: K::Real,
    /// A row of `lanes` for each key, padded to a multiple of [`Microkernel::KEY_BLOCK`] rows.
    pub(crate) scores: &'a mut [K::Real],
}

impl<K: Microkernel + ?Sized> QkArgs<'_, K> {
    /// Whether the room for scores is large enough.
    pub(crate) fn fits(&self) -> bool {
        self.lanes.is_multiple_of(K::LANE_BLOCK)
            && self.lane_keys.largest() <= self.keys.len()
            && self.scores.len() >= padded(self.keys.len(), K::KEY_BLOCK) * self.lanes
    }
}

/// The scores of some keys for a strip of query rows, and the softmax of these rows so far.
///
/// The running maximum of the scores, in base 2, is minus infinity before anything was attended. A NaN never becomes the
/// maximum; it shows in the sum. It may be a little above the largest score, and below it as far as
/// [`updates_row_max`](Self::updates_row_max) says.
pub(crate) struct SoftmaxArgs<'a, K: Microkernel + ?Sized> {
    /// Lanes of each of the following; a multiple of [`Microkernel::LANE_BLOCK`].
    pub(crate) lanes: usize,
    /// How many keys there are scores of. What lies behind them in `scores` is to be left alone, and to get no weight.
    pub(crate) keys: usize,
    pub(crate) lane_keys: LaneKeys,
    /// Whether the maximum must follow the scores. Where it need not, it may stay below them, and weights be above 1, as
    /// long as they are not [too large](SoftmaxOutcome::StaleRowMax).
    pub(crate) updates_row_max: bool,
    /// What scores are to be multiplied by first: 1, or above zero where [`Microkernel::SCALES_IN_SOFTMAX`].
    pub(crate) factor: K::Real,
    /// A row of `lanes` for each key. Scores come in, weights `2^(score - maximum)` go out.
    pub(crate) scores: &'a mut [K::Real],
    /// Out: the weights as [`Microkernel::accumulate`] likes them, with zeros for keys that only pad. For kernels whose
    /// [`Microkernel::weight_size`] is not zero.
    pub(crate) weights: &'a mut [K::Packed],
    /// Whether weights must be left in `scores`; a kernel that packs them need not otherwise.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only kernels of x86 pack weights"))]
    pub(crate) keeps_weights: bool,
    /// The running maximum of each lane.
    pub(crate) row_max: &'a mut [K::Real],
    /// The sum of the weights of each lane.
    pub(crate) row_sum: &'a mut [K::Real],
    /// Out: what the weighted sum of the values so far is to be multiplied by.
    pub(crate) row_scale: &'a mut [K::Real],
}

impl<K: Microkernel + ?Sized> SoftmaxArgs<'_, K> {
    /// Whether every element that a kernel touches is there.
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
    /// The lanes of the strip; a multiple of [`Microkernel::LANE_BLOCK`].
    pub(crate) lanes: usize,
    /// Which keys of the tile; the first is a multiple of [`Microkernel::KEY_ALIGNMENT`].
    pub(crate) keys: Range<usize>,
    pub(crate) lane_keys: LaneKeys,
    /// A tile that [`Microkernel::pack_values`] has packed.
    pub(crate) value: &'a [K::Packed],
    /// The weights, a row of `lanes` for each of `keys`.
    pub(crate) scores: &'a [K::Real],
    /// The weights as [`Microkernel::weigh`] has packed them.
    pub(crate) weights: &'a [K::Packed],
    pub(crate) row_scale: &'a [K::Real],
    /// A row of `lanes` for each column of the value, padded to a multiple of [`Microkernel::VALUE_BLOCK`] rows.
    pub(crate) output: &'a mut [K::Real],
    /// Whether the output is taken as zero, whatever lies there.
    pub(crate) is_first: bool,
    pub(crate) prefetch: PrefetchPlan,
}

impl<K: Microkernel + ?Sized> PvArgs<'_, K> {
    /// Whether every element that a kernel touches, but for those of the packed value, is there.
    pub(crate) fn fits(&self) -> bool {
        self.lanes.is_multiple_of(K::LANE_BLOCK)
            && self.scores.len() >= self.keys.len() * self.lanes
            && self.lane_keys.largest() <= self.keys.len()
            && self.weights.len() >= K::weight_size(self.keys.len())
            && self.row_scale.len() >= self.lanes
            && self.output.len() >= padded(self.value_dim, K::VALUE_BLOCK) * self.lanes
    }
}

/// `size` rounded up to a multiple of `block`.
pub(crate) const fn padded(size: usize, block: usize) -> usize {
    size.div_ceil(block) * block
}
