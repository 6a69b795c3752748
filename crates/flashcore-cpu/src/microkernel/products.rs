//! The products of tiles: blocks of rows by vectors whose sums stay in registers.
//!
//! Everything here is inlined into the function with the `target_feature` of a level.

#![expect(clippy::inline_always, reason = "instructions of a level must end up in its functions")]

use super::prefetch::{CacheLines, Prefetch, PrefetchPlan};
use super::{AccumulateArgs, MultiplyArgs, Operands, Products};
use crate::simd::real::Real;
use crate::simd::vector::{Vector, compiler_fence};
use std::array::from_fn;
use std::hint::black_box;
use std::ops::Range;

/// [`Products::multiply`], in blocks of `ROWS` rows by two vectors of lanes.
///
/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn multiply<V, K, const ROWS: usize>(args: &mut MultiplyArgs<'_, K>)
where
    V: Vector,
    K: Products<Real = V::Real, Packed = V::Real>,
{
    assert!(args.fits(), "memory for a product that is too small");
    let Operands { depth, ref rows, left, right } = *args.operands;
    let left = &left[rows.start * depth..rows.end * depth];
    assert!(right.len() >= depth * args.lanes, "a right operand that is too small");
    let tiles = Tiles {
        depth,
        lanes: args.lanes,
        left: left.as_ptr(),
        left_stride: depth,
        right: right.as_ptr(),
        target: Target::Scaled(args.factor),
        product: args.product.as_mut_ptr(),
        prefetch: PrefetchPlan::NOTHING,
    };
    for (block, lane) in (0..args.lanes).step_by(V::LANES).enumerate().step_by(2) {
        let near = args.lane_rows.of_block(block);
        // SAFETY: the tiles are as large as was just asserted, and rows of lanes are among all rows.
        unsafe {
            if args.lanes - lane >= 2 * V::LANES {
                let far = args.lane_rows.of_block(block + 1);
                multiply_lanes::<V, ROWS, 2, true>(&tiles, 0..near, lane);
                multiply_lanes::<V, ROWS, 1, true>(&tiles, near..far, lane + V::LANES);
            } else {
                multiply_lanes::<V, ROWS, 1, true>(&tiles, 0..near, lane);
            }
        }
    }
}

/// [`Products::accumulate`], in blocks of `COLUMNS` by one vector, or where that is 0, of `ROWS` columns by two.
///
/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn accumulate<V, K, const ROWS: usize, const COLUMNS: usize>(args: &mut AccumulateArgs<'_, K>)
where
    V: Vector,
    K: Products<Real = V::Real, Packed = V::Real>,
{
    assert!(args.fits(), "tiles of sums that are too small");
    let left = &args.left[args.rows.start * args.columns..args.rows.end * args.columns];
    let is_rescaled = || args.lane_scale[..args.lanes].iter().any(|&factor| factor != V::Real::ONE);
    let tiles = Tiles {
        depth: args.rows.len(),
        lanes: args.lanes,
        left: left.as_ptr(),
        left_stride: args.columns,
        right: args.weights.as_ptr(),
        target: match args.is_first {
            true => Target::Scaled(V::Real::ONE),
            false if is_rescaled() => Target::Rescaled(args.lane_scale.as_ptr()),
            false => Target::Added,
        },
        product: args.sums.as_mut_ptr(),
        prefetch: args.prefetch,
    };
    if COLUMNS > 0 {
        for column in (0..args.columns).step_by(COLUMNS) {
            let columns = column..args.columns.min(column + COLUMNS);
            for (block, lane) in (0..args.lanes).step_by(V::LANES).enumerate() {
                let tiles = Tiles { depth: args.lane_rows.of_block(block), ..tiles };
                // SAFETY: the tiles are as large as was just asserted, and rows of lanes are among all rows.
                unsafe { multiply_lanes::<V, COLUMNS, 1, false>(&tiles, columns.clone(), lane) };
            }
        }
        return;
    }
    for (block, lane) in (0..args.lanes).step_by(V::LANES).enumerate().step_by(2) {
        let near = args.lane_rows.of_block(block);
        let first = Tiles { depth: near, ..tiles };
        // SAFETY: the tiles are as large as was just asserted, and rows of lanes are among all rows.
        unsafe {
            if args.lanes - lane >= 2 * V::LANES {
                multiply_lanes::<V, ROWS, 2, false>(&first, 0..args.columns, lane);
                let far = args.lane_rows.of_block(block + 1);
                if far > near {
                    let rest = Tiles {
                        depth: far - near,
                        left: tiles.left.add(near * tiles.left_stride),
                        right: tiles.right.add(near * tiles.lanes),
                        target: Target::Added,
                        ..tiles
                    };
                    multiply_lanes::<V, ROWS, 1, false>(&rest, 0..args.columns, lane + V::LANES);
                }
            } else {
                multiply_lanes::<V, ROWS, 1, false>(&first, 0..args.columns, lane);
            }
        }
    }
}

/// Epilogue of a product: what becomes of the values that were there before.
#[derive(Clone, Copy)]
enum Target<R> {
    /// `product = left * right * factor`.
    Scaled(R),
    /// `product = product * lane_scale + left * right`, with a scale for each lane.
    Rescaled(*const R),
    /// `product = product + left * right`, where all scales are 1.
    Added,
}

/// The operands of a product of tiles.
#[derive(Clone, Copy)]
struct Tiles<R> {
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
    /// Software prefetch of a product whose `left` does not lie row by row.
    prefetch: PrefetchPlan,
}

/// Steps of a product for one prefetched line: more often, prefetches get in the way of loads.
const STEPS_PER_LINE: usize = 4;

/// Multiplies some rows of some lanes: in large blocks, and what remains in smaller ones.
///
/// # Safety
///
/// The processor has the instructions of `V`, the tiles are valid for their sizes, `VECTORS` vectors of lanes are left
/// from `lane` on, and the rows are among those of `left` and of `product`.
#[inline(always)]
unsafe fn multiply_lanes<V: Vector, const ROWS: usize, const VECTORS: usize, const ROW_BY_ROW: bool>(
    tiles: &Tiles<V::Real>,
    rows: Range<usize>,
    lane: usize,
) {
    let mut row = rows.start;
    while row < rows.end {
        // SAFETY: what remains of the rows is at least as much as the block chosen here.
        row += unsafe {
            match rows.end - row {
                rest if rest >= ROWS => block::<V, ROWS, VECTORS, ROW_BY_ROW>(tiles, row, lane),
                8.. => block::<V, 8, VECTORS, ROW_BY_ROW>(tiles, row, lane),
                4.. => block::<V, 4, VECTORS, ROW_BY_ROW>(tiles, row, lane),
                2.. => block::<V, 2, VECTORS, ROW_BY_ROW>(tiles, row, lane),
                _ => block::<V, 1, VECTORS, ROW_BY_ROW>(tiles, row, lane),
            }
        };
    }
}

/// Multiplies the part of a product whose sums stay in registers. Returns its rows.
///
/// # Safety
///
/// As [`multiply_lanes`], and `ROWS` rows are left from `row` on.
#[inline(always)]
unsafe fn block<V: Vector, const ROWS: usize, const VECTORS: usize, const ROW_BY_ROW: bool>(
    tiles: &Tiles<V::Real>,
    row: usize,
    lane: usize,
) -> usize {
    // SAFETY: the caller vouches that the block lies within each of the tiles, which is all that is touched.
    unsafe {
        let mut sums = [[V::splat(V::Real::ZERO); VECTORS]; ROWS];
        if tiles.depth == 0 {
        } else if ROW_BY_ROW {
            add_rows(tiles, row, lane, &mut sums);
        } else if tiles.depth > V::Real::TERMS_AT_ONCE {
            add_in_parts(tiles, row, lane, &mut sums);
        } else {
            add_with_prefetch(tiles, row, lane, &mut sums);
        }
        finish(tiles, row, lane, sums);
    }
    ROWS
}

/// Adds the products of a `left` that lies row by row.
///
/// # Safety
///
/// As [`block`].
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "rows and vectors count registers and addresses alike")]
unsafe fn add_rows<V: Vector, const ROWS: usize, const VECTORS: usize>(
    tiles: &Tiles<V::Real>,
    row: usize,
    lane: usize,
    sums: &mut [[V; VECTORS]; ROWS],
) {
    let (lanes, stride) = (tiles.lanes, tiles.left_stride);
    // SAFETY: the caller vouches for the block.
    unsafe {
        let (left, right) = (tiles.left.add(row * stride), tiles.right.add(lane));
        // Opaque, or they would be computed again in each step, by units that some processors multiply with.
        let row_offsets: [usize; ROWS] = black_box(from_fn(|index| index * stride));
        for step in 0..tiles.depth {
            // The following rows, a line in each step.
            V::prefetch_near(left.add(ROWS * stride).cast::<u8>().wrapping_add(CacheLines::SIZE * step));
            let mut factors = [V::splat(V::Real::ZERO); VECTORS];
            for vector in 0..VECTORS {
                factors[vector] = V::load(right.add(step * lanes + vector * V::LANES));
            }
            for index in 0..ROWS {
                let element = V::splat(*left.add(row_offsets[index] + step));
                for vector in 0..VECTORS {
                    sums[index][vector] = element.mul_add(factors[vector], sums[index][vector]);
                }
            }
        }
    }
}

/// Adds the products of a `left` that lies column by column, as sums of [`Real::TERMS_AT_ONCE`] terms.
///
/// # Safety
///
/// As [`block`].
#[inline(always)]
unsafe fn add_in_parts<V: Vector, const ROWS: usize, const VECTORS: usize>(
    tiles: &Tiles<V::Real>,
    row: usize,
    lane: usize,
    sums: &mut [[V; VECTORS]; ROWS],
) {
    // SAFETY: the caller vouches for the block.
    unsafe {
        let (left, right) = (tiles.left.add(row), tiles.right.add(lane));
        for first in (0..tiles.depth).step_by(V::Real::TERMS_AT_ONCE) {
            let mut part = [[V::splat(V::Real::ZERO); VECTORS]; ROWS];
            for step in first..tiles.depth.min(first + V::Real::TERMS_AT_ONCE) {
                add_step(left.add(step * tiles.left_stride), right.add(step * tiles.lanes), &mut part);
            }
            for (sum, part) in sums.as_flattened_mut().iter_mut().zip(part.as_flattened()) {
                *sum = sum.add(*part);
            }
        }
    }
}

/// Adds the products of a `left` that lies column by column, with a software prefetch every few steps.
///
/// # Safety
///
/// As [`block`].
#[inline(always)]
unsafe fn add_with_prefetch<V: Vector, const ROWS: usize, const VECTORS: usize>(
    tiles: &Tiles<V::Real>,
    row: usize,
    lane: usize,
    sums: &mut [[V; VECTORS]; ROWS],
) {
    let (lanes, stride) = (tiles.lanes, tiles.left_stride);
    let lines = tiles.depth / STEPS_PER_LINE;
    let blocks = row / ROWS * (lanes / (VECTORS * V::LANES)) + lane / (VECTORS * V::LANES);
    let prefetch = tiles.prefetch.for_block(blocks, lines.max(1));
    // SAFETY: the caller vouches for the block.
    unsafe {
        let (left, right) = (tiles.left.add(row), tiles.right.add(lane));
        for line in 0..lines {
            match prefetch {
                Prefetch::Nothing => (),
                Prefetch::Read(first) => V::prefetch_near(first.wrapping_add(CacheLines::SIZE * line)),
                Prefetch::Write(first) => V::prefetch_for_writing(first.wrapping_add(CacheLines::SIZE * line)),
            }
            for step in 0..STEPS_PER_LINE {
                let step = line * STEPS_PER_LINE + step;
                add_step(left.add(step * stride), right.add(step * lanes), sums);
                compiler_fence();
            }
        }
        for step in lines * STEPS_PER_LINE..tiles.depth {
            add_step(left.add(step * stride), right.add(step * lanes), sums);
        }
    }
}

/// Adds one step of a product: neighbouring elements of `left` times vectors of `right`.
///
/// # Safety
///
/// The processor has the instructions of `V`, and there are `ROWS` elements and `VECTORS` vectors.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "rows and vectors count registers and addresses alike")]
unsafe fn add_step<V: Vector, const ROWS: usize, const VECTORS: usize>(
    left: *const V::Real,
    right: *const V::Real,
    sums: &mut [[V; VECTORS]; ROWS],
) {
    // SAFETY: the caller vouches for all that is read.
    unsafe {
        let mut factors = [V::splat(V::Real::ZERO); VECTORS];
        for vector in 0..VECTORS {
            factors[vector] = V::load(right.add(vector * V::LANES));
        }
        for index in 0..ROWS {
            let element = V::splat(*left.add(index));
            for vector in 0..VECTORS {
                sums[index][vector] = element.mul_add(factors[vector], sums[index][vector]);
            }
        }
    }
}

/// Applies the epilogue of a product to the sums of a block, and stores them.
///
/// The product so far is added last, so that a long sum is one of sums of single tiles and rounds less often.
///
/// # Safety
///
/// As [`block`].
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "rows and vectors count registers and addresses alike")]
unsafe fn finish<V: Vector, const ROWS: usize, const VECTORS: usize>(
    tiles: &Tiles<V::Real>,
    row: usize,
    lane: usize,
    mut sums: [[V; VECTORS]; ROWS],
) {
    // SAFETY: the caller vouches for the block.
    unsafe {
        let place = tiles.product.add(row * tiles.lanes + lane);
        let at = |index: usize, vector: usize| place.add(index * tiles.lanes + vector * V::LANES);
        match tiles.target {
            Target::Scaled(factor) if factor == V::Real::ONE => (),
            Target::Scaled(factor) => {
                for sum in sums.as_flattened_mut() {
                    *sum = sum.mul(V::splat(factor));
                }
            }
            Target::Rescaled(lane_scale) => {
                for vector in 0..VECTORS {
                    let factor = V::load(lane_scale.add(lane + vector * V::LANES));
                    for index in 0..ROWS {
                        sums[index][vector] = V::load(at(index, vector)).mul_add(factor, sums[index][vector]);
                    }
                }
            }
            Target::Added => {
                for index in 0..ROWS {
                    for vector in 0..VECTORS {
                        sums[index][vector] = V::load(at(index, vector)).add(sums[index][vector]);
                    }
                }
            }
        }
        for index in 0..ROWS {
            for vector in 0..VECTORS {
                sums[index][vector].store(at(index, vector));
            }
        }
    }
}
