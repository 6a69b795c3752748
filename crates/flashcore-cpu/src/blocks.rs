//! The kernel of every level whose operands are packed as the scores are: blocks of rows by vectors that stay in
//! registers, the softmax down the columns, conversions.
//!
//! Everything here is inlined into functions with the `target_feature` of a level, which [`vector_kernel`] writes.

#![expect(clippy::inline_always, reason = "instructions of a level must end up in its functions")]

use crate::microkernel::Microkernel;
use crate::microkernel::{OutputProduct, ScoreProduct, Strip};
use crate::real::Real;
use crate::vector::Vector;
use std::array::from_fn;
use std::hint::black_box;

/// Implements [`Microkernel`] for a level that is a witness of the features it names.
///
/// `$rows` by two vectors are the sums that stay in registers.
macro_rules! vector_kernel {
    ($level:ident $(<$real:ident>)?, $vector:ty, rows: $rows:literal $(, features: $features:literal)?) => {
        impl $(<$real: crate::real::Real>)? crate::microkernel::Microkernel for $level $(<$real>)? {
            type Real = <$vector as crate::vector::Vector>::Real;
            type Packed = Self::Real;

            const STRIP: usize = 2 * <$vector as crate::vector::Vector>::LANES;
            const LANE_BLOCK: usize = <$vector as crate::vector::Vector>::LANES;
            const FIRST_KEY_BLOCK: usize = 1;
            const KEY_BLOCK: usize = 1;
            const VALUE_BLOCK: usize = 1;
            const MULTIPLIES_IN_WEIGH: bool = true;

            fn query_size(head_dim: usize) -> usize {
                head_dim * Self::STRIP
            }

            fn key_size(head_dim: usize, keys: usize) -> usize {
                head_dim * keys
            }

            fn value_size(value_dim: usize, keys: usize) -> usize {
                value_dim * keys
            }

            fn in_place(head: crate::pack::Head<'_>, rows: std::ops::Range<usize>) -> Option<&[Self::Packed]> {
                head.in_place(rows)
            }

            fn pack_query(
                &self,
                query: crate::pack::Head<'_>,
                rows: std::ops::Range<usize>,
                lanes: usize,
                packed: &mut [Self::Packed],
            ) {
                $(#[target_feature(enable = $features)])?
                unsafe fn run $(<$real: crate::real::Real>)? (
                    query: crate::pack::Head<'_>,
                    rows: std::ops::Range<usize>,
                    lanes: usize,
                    packed: &mut [<$vector as crate::vector::Vector>::Real],
                ) {
                    // SAFETY: the caller vouches for the features.
                    unsafe { crate::packing::pack_query::<$vector>(query, rows, lanes, packed) }
                }
                // SAFETY: `self` is a witness of the features.
                unsafe { run(query, rows, lanes, packed) }
            }

            fn pack_keys(
                &self,
                key: crate::pack::Head<'_>,
                keys: std::ops::Range<usize>,
                packed: &mut [Self::Packed],
            ) {
                $(#[target_feature(enable = $features)])?
                unsafe fn run $(<$real: crate::real::Real>)? (
                    rows: crate::pack::Head<'_>,
                    range: std::ops::Range<usize>,
                    packed: &mut [<$vector as crate::vector::Vector>::Real],
                ) {
                    // SAFETY: the caller vouches for the features.
                    unsafe { crate::packing::pack_rows::<$vector>(rows, range, packed) }
                }
                // SAFETY: `self` is a witness of the features.
                unsafe { run(key, keys, packed) }
            }

            fn pack_values(
                &self,
                value: crate::pack::Head<'_>,
                keys: std::ops::Range<usize>,
                packed: &mut [Self::Packed],
            ) {
                self.pack_keys(value, keys, packed);
            }

            fn score(&self, mut product: crate::microkernel::ScoreProduct<'_, Self>) {
                $(#[target_feature(enable = $features)])?
                unsafe fn run $(<$real: crate::real::Real>)? (
                    product: &mut crate::microkernel::ScoreProduct<'_, $level $(<$real>)?>,
                ) {
                    // SAFETY: the caller vouches for the features.
                    unsafe { crate::blocks::score::<$vector, _, $rows>(product) }
                }
                // SAFETY: `self` is a witness of the features.
                unsafe { run(&mut product) }
            }

            fn weigh(&self, mut strip: crate::microkernel::Strip<'_, Self>) {
                $(#[target_feature(enable = $features)])?
                unsafe fn run $(<$real: crate::real::Real>)? (
                    strip: &mut crate::microkernel::Strip<'_, $level $(<$real>)?>,
                ) {
                    // SAFETY: the caller vouches for the features.
                    unsafe { crate::blocks::weigh::<$vector, _>(strip) }
                }
                // SAFETY: `self` is a witness of the features.
                unsafe { run(&mut strip) }
            }

            fn accumulate(&self, mut product: crate::microkernel::OutputProduct<'_, Self>) {
                $(#[target_feature(enable = $features)])?
                unsafe fn run $(<$real: crate::real::Real>)? (
                    product: &mut crate::microkernel::OutputProduct<'_, $level $(<$real>)?>,
                ) {
                    // SAFETY: the caller vouches for the features.
                    unsafe { crate::blocks::accumulate::<$vector, _, $rows>(product) }
                }
                // SAFETY: `self` is a witness of the features.
                unsafe { run(&mut product) }
            }

            fn shape(&self, shaping: crate::shaping::Shaping<'_, Self::Real>) {
                $(#[target_feature(enable = $features)])?
                unsafe fn run $(<$real: crate::real::Real>)? (
                    shaping: crate::shaping::Shaping<'_, <$vector as crate::vector::Vector>::Real>,
                ) {
                    // SAFETY: the caller vouches for the features.
                    unsafe { crate::shaping::shape::<$vector>(shaping) }
                }
                // SAFETY: `self` is a witness of the features.
                unsafe { run(shaping) }
            }

            fn transpose(&self, columns: &[Self::Real], lanes: usize, rows: &mut [Self::Real]) {
                $(#[target_feature(enable = $features)])?
                unsafe fn run $(<$real: crate::real::Real>)? (
                    columns: &[<$vector as crate::vector::Vector>::Real],
                    lanes: usize,
                    rows: &mut [<$vector as crate::vector::Vector>::Real],
                ) {
                    // SAFETY: the caller vouches for the features.
                    unsafe { crate::packing::transpose::<$vector>(columns, lanes, rows) }
                }
                // SAFETY: `self` is a witness of the features.
                unsafe { run(columns, lanes, rows) }
            }

            fn are_finite(&self, head: crate::pack::Head<'_>, rows: std::ops::Range<usize>) -> bool {
                $(#[target_feature(enable = $features)])?
                unsafe fn run(head: crate::pack::Head<'_>, mut rows: std::ops::Range<usize>) -> bool {
                    rows.all(|row| head.is_finite(row))
                }
                // SAFETY: `self` is a witness of the features.
                unsafe { run(head, rows) }
            }

            fn stream(&self, mut tile: crate::stream::StreamTile<'_, Self::Real>) {
                $(#[target_feature(enable = $features)])?
                unsafe fn run $(<$real: crate::real::Real>)? (
                    tile: &mut crate::stream::StreamTile<'_, <$vector as crate::vector::Vector>::Real>,
                ) {
                    // SAFETY: the caller vouches for the features.
                    unsafe { crate::stream_blocks::attend_tile::<$vector>(tile) }
                }
                // SAFETY: `self` is a witness of the features.
                unsafe { run(&mut tile) }
            }
        }
    };
}
pub(crate) use vector_kernel;

/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn score<V, K, const ROWS: usize>(product: &mut ScoreProduct<'_, K>)
where
    V: Vector,
    K: Microkernel<Real = V::Real, Packed = V::Real>,
{
    assert!(product.fits(), "room for scores that is too small");
    let key = &product.key[product.keys.start * product.head_dim..product.keys.end * product.head_dim];
    assert!(product.query.len() >= product.head_dim * product.lanes, "a strip of queries that is too small");
    let tiles = Tiles {
        rows: product.keys.len(),
        depth: product.head_dim,
        lanes: product.lanes,
        left: key.as_ptr(),
        left_stride: product.head_dim,
        right: product.query.as_ptr(),
        target: Target::Scaled(product.factor),
        product: product.scores.as_mut_ptr(),
    };
    // SAFETY: the tiles are as large as was just asserted.
    unsafe { multiply::<V, ROWS, true>(&tiles) }
}

/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn accumulate<V, K, const ROWS: usize>(product: &mut OutputProduct<'_, K>)
where
    V: Vector,
    K: Microkernel<Real = V::Real, Packed = V::Real>,
{
    assert!(product.fits(), "tiles of an output that are too small");
    let value = &product.value[product.keys.start * product.value_dim..product.keys.end * product.value_dim];
    let tiles = Tiles {
        rows: product.value_dim,
        depth: product.keys.len(),
        lanes: product.lanes,
        left: value.as_ptr(),
        left_stride: product.value_dim,
        right: product.scores.as_ptr(),
        target: Target::Corrected(product.correction.as_ptr()),
        product: product.output.as_mut_ptr(),
    };
    // SAFETY: the tiles are as large as was just asserted.
    unsafe { multiply::<V, ROWS, false>(&tiles) }
}

/// What a product does with what was there before.
#[derive(Clone, Copy)]
enum Target<R> {
    /// `product = left * right * factor`: scores.
    Scaled(R),
    /// `product = product * correction + left * right`, with a correction for each lane: the output.
    Corrected(*const R),
}

/// The operands of a product of tiles.
struct Tiles<R> {
    /// Rows of `left` and of `product`.
    rows: usize,
    /// Columns of `left` and rows of `right`.
    depth: usize,
    /// Columns of `right` and of `product`.
    lanes: usize,
    left: *const R,
    /// Elements from one row of `left` to the next, or, where it lies column by column, from one column to the next.
    left_stride: usize,
    right: *const R,
    target: Target<R>,
    product: *mut R,
}

/// # Safety
///
/// The processor has the instructions of `V`, the lanes are whole vectors, and the tiles are valid for their sizes.
#[inline(always)]
unsafe fn multiply<V: Vector, const ROWS: usize, const ROW_BY_ROW: bool>(tiles: &Tiles<V::Real>) {
    let mut lane = 0;
    while lane < tiles.lanes {
        // SAFETY: what remains of the lanes is at least as much as the vectors chosen here.
        unsafe {
            if tiles.lanes - lane >= 2 * V::LANES {
                multiply_lanes::<V, ROWS, 2, ROW_BY_ROW>(tiles, lane);
                lane += 2 * V::LANES;
            } else {
                multiply_lanes::<V, ROWS, 1, ROW_BY_ROW>(tiles, lane);
                lane += V::LANES;
            }
        }
    }
}

/// All rows of some lanes: in large blocks, and what remains in smaller ones.
///
/// # Safety
///
/// That of [`multiply`], and `VECTORS` vectors of lanes are left from `lane` on.
#[inline(always)]
unsafe fn multiply_lanes<V: Vector, const ROWS: usize, const VECTORS: usize, const ROW_BY_ROW: bool>(
    tiles: &Tiles<V::Real>,
    lane: usize,
) {
    let mut row = 0;
    while row < tiles.rows {
        // SAFETY: what remains of the rows is at least as much as the block chosen here.
        row += unsafe {
            match tiles.rows - row {
                rest if rest >= ROWS => block::<V, ROWS, VECTORS, ROW_BY_ROW>(tiles, row, lane),
                8.. => block::<V, 8, VECTORS, ROW_BY_ROW>(tiles, row, lane),
                4.. => block::<V, 4, VECTORS, ROW_BY_ROW>(tiles, row, lane),
                2.. => block::<V, 2, VECTORS, ROW_BY_ROW>(tiles, row, lane),
                _ => block::<V, 1, VECTORS, ROW_BY_ROW>(tiles, row, lane),
            }
        };
    }
}

/// The part of a product that stays in registers. Returns its rows.
///
/// # Safety
///
/// That of [`multiply`], and `ROWS` rows are left from `row` on and `VECTORS` vectors of lanes from `lane` on.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "rows and vectors count registers and addresses alike")]
unsafe fn block<V: Vector, const ROWS: usize, const VECTORS: usize, const ROW_BY_ROW: bool>(
    tiles: &Tiles<V::Real>,
    row: usize,
    lane: usize,
) -> usize {
    let (lanes, stride) = (tiles.lanes, tiles.left_stride);
    // SAFETY: the caller vouches that the block lies within each of the tiles, which is all that is touched.
    unsafe {
        let zero = V::splat(V::Real::ZERO);
        let mut sums = [[zero; VECTORS]; ROWS];
        let place = tiles.product.add(row * lanes + lane);
        if let Target::Corrected(correction) = tiles.target {
            for vector in 0..VECTORS {
                let factor = V::load(correction.add(lane + vector * V::LANES));
                for index in 0..ROWS {
                    sums[index][vector] = V::load(place.add(index * lanes + vector * V::LANES)).mul(factor);
                }
            }
        }
        if tiles.depth > 0 {
            let left = tiles.left.add(if ROW_BY_ROW { row * stride } else { row });
            let right = tiles.right.add(lane);
            // Opaque, or they would be computed again in each step, by units that some processors multiply with.
            let row_offsets: [usize; ROWS] =
                if ROW_BY_ROW { black_box(from_fn(|index| index * stride)) } else { [0; ROWS] };
            for step in 0..tiles.depth {
                let mut factors = [zero; VECTORS];
                for vector in 0..VECTORS {
                    factors[vector] = V::load(right.add(step * lanes + vector * V::LANES));
                }
                for index in 0..ROWS {
                    let element = if ROW_BY_ROW {
                        *left.add(row_offsets[index] + step)
                    } else {
                        *left.add(step * stride + index)
                    };
                    let element = V::splat(element);
                    for vector in 0..VECTORS {
                        sums[index][vector] = element.mul_add(factors[vector], sums[index][vector]);
                    }
                }
            }
        }
        if let Target::Scaled(factor) = tiles.target
            && factor != V::Real::ONE
        {
            for sum in sums.as_flattened_mut() {
                *sum = sum.mul(V::splat(factor));
            }
        }
        for index in 0..ROWS {
            for vector in 0..VECTORS {
                sums[index][vector].store(place.add(index * lanes + vector * V::LANES));
            }
        }
    }
    ROWS
}

/// Running maxima and sums of one lane, so that none need wait for the last.
const CHAINS: usize = 4;

/// The scores of one vector of lanes.
#[derive(Clone, Copy)]
struct Column<R> {
    scores: *mut R,
    /// Elements from one key to the next.
    lanes: usize,
}

impl<R: Real> Column<R> {
    /// The maxima of `COUNT` keys from `key` on, each with one of `largest`.
    ///
    /// # Safety
    ///
    /// The processor has the instructions of `V`, and there are scores of these keys.
    #[inline(always)]
    unsafe fn find_largest<V: Vector<Real = R>, const COUNT: usize>(self, key: usize, largest: &mut [V; CHAINS]) {
        for (chain, largest) in largest.iter_mut().enumerate().take(COUNT) {
            // SAFETY: the caller vouches for both.
            *largest = unsafe { V::load(self.scores.add((key + chain) * self.lanes)).max(*largest) };
        }
    }

    /// The weights `2^(score * factor + shift)` of `COUNT` keys from `key` on, each added to one of `sums`.
    ///
    /// # Safety
    ///
    /// As of [`find_largest`](Self::find_largest).
    #[inline(always)]
    unsafe fn weigh<V: Vector<Real = R>, const COUNT: usize>(
        self,
        key: usize,
        factor: V,
        shift: V,
        sums: &mut [V; CHAINS],
    ) {
        for (chain, sum) in sums.iter_mut().enumerate().take(COUNT) {
            // SAFETY: the caller vouches for both.
            unsafe {
                let score = self.scores.add((key + chain) * self.lanes);
                let weight = V::load(score).mul_add(factor, shift).exp2();
                weight.store(score);
                *sum = sum.add(weight);
            }
        }
    }
}

/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn weigh<V: Vector, K: Microkernel<Real = V::Real>>(strip: &mut Strip<'_, K>) {
    assert!(strip.fits(), "a strip of scores that is too small");
    let (lanes, keys, whole) = (strip.lanes, strip.keys, strip.keys - strip.keys % CHAINS);
    for lane in (0..lanes).step_by(V::LANES) {
        // SAFETY: every row of the strip has a vector at this lane.
        unsafe {
            let column = Column { scores: strip.scores.as_mut_ptr().add(lane), lanes };
            let (factor, old) = (V::splat(strip.factor), V::load(strip.maximum.as_ptr().add(lane)));
            let mut largest = [V::splat(V::Real::NEGATIVE_INFINITY); CHAINS];
            for key in (0..whole).step_by(CHAINS) {
                column.find_largest::<V, CHAINS>(key, &mut largest);
            }
            for key in whole..keys {
                column.find_largest::<V, 1>(key, &mut largest);
            }
            let [first, second, third, fourth] = largest;
            let new = first.max(second).max(third.max(fourth)).mul(factor).max(old);
            let nothing = V::splat(V::Real::NEGATIVE_INFINITY);
            let shift = V::splat(V::Real::ZERO).sub(new.if_equal(nothing, V::splat(V::Real::ZERO), new));
            let mut added = [V::splat(V::Real::ZERO); CHAINS];
            for key in (0..whole).step_by(CHAINS) {
                column.weigh::<V, CHAINS>(key, factor, shift, &mut added);
            }
            for key in whole..keys {
                column.weigh::<V, 1>(key, factor, shift, &mut added);
            }
            let [first, second, third, fourth] = added;
            let added = first.add(second).add(third.add(fourth));
            let correction = old.if_equal(new, V::splat(V::Real::ONE), old.sub(new).exp2());
            let sum = strip.sum.as_mut_ptr().add(lane);
            V::load(sum).mul_add(correction, added).store(sum);
            new.store(strip.maximum.as_mut_ptr().add(lane));
            correction.store(strip.correction.as_mut_ptr().add(lane));
        }
    }
}
