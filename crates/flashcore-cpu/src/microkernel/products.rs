//! The kernel of every level whose operands are packed as the scores are: blocks of rows by vectors that stay in
//! registers.
//!
//! Everything here is inlined into functions with the `target_feature` of a level, which [`vector_kernel`] writes.

#![expect(clippy::inline_always, reason = "instructions of a level must end up in its functions")]

use crate::microkernel::prefetch::{CacheLines, Prefetch, PrefetchPlan};
use crate::microkernel::{Microkernel, PvArgs, QkArgs};
use crate::simd::real::Real;
use crate::simd::vector::{Vector, compiler_fence};
use std::array::from_fn;
use std::hint::black_box;
use std::ops::Range;

/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn qk<V, K, const ROWS: usize>(product: &mut QkArgs<'_, K>)
where
    V: Vector,
    K: Microkernel<Real = V::Real, Packed = V::Real>,
{
    assert!(product.fits(), "room for scores that is too small");
    let key = &product.key[product.keys.start * product.head_dim..product.keys.end * product.head_dim];
    assert!(product.query.len() >= product.head_dim * product.lanes, "a panel of queries that is too small");
    let tiles = Tiles {
        depth: product.head_dim,
        lanes: product.lanes,
        left: key.as_ptr(),
        left_stride: product.head_dim,
        right: product.query.as_ptr(),
        target: Target::Scaled(product.factor),
        product: product.scores.as_mut_ptr(),
        prefetch: PrefetchPlan::NOTHING,
    };
    for (block, lane) in (0..product.lanes).step_by(V::LANES).enumerate().step_by(2) {
        let near = product.lane_keys.of_block(block);
        // SAFETY: the tiles are as large as was just asserted, and keys of lanes are among all keys.
        unsafe {
            if product.lanes - lane >= 2 * V::LANES {
                let far = product.lane_keys.of_block(block + 1);
                multiply_lanes::<V, ROWS, 2, true>(&tiles, 0..near, lane);
                multiply_lanes::<V, ROWS, 1, true>(&tiles, near..far, lane + V::LANES);
            } else {
                multiply_lanes::<V, ROWS, 1, true>(&tiles, 0..near, lane);
            }
        }
    }
}

/// In blocks of `COLUMNS` by one vector, or where that is 0, of `ROWS` columns by two.
///
/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn pv<V, K, const ROWS: usize, const COLUMNS: usize>(product: &mut PvArgs<'_, K>)
where
    V: Vector,
    K: Microkernel<Real = V::Real, Packed = V::Real>,
{
    assert!(product.fits(), "tiles of an output that are too small");
    let value = &product.value[product.keys.start * product.value_dim..product.keys.end * product.value_dim];
    let is_corrected = || product.row_scale[..product.lanes].iter().any(|&factor| factor != V::Real::ONE);
    let tiles = Tiles {
        depth: product.keys.len(),
        lanes: product.lanes,
        left: value.as_ptr(),
        left_stride: product.value_dim,
        right: product.scores.as_ptr(),
        target: match product.is_first {
            true => Target::Scaled(V::Real::ONE),
            false if is_corrected() => Target::Corrected(product.row_scale.as_ptr()),
            false => Target::Added,
        },
        product: product.output.as_mut_ptr(),
        prefetch: product.prefetch,
    };
    if COLUMNS > 0 {
        for column in (0..product.value_dim).step_by(COLUMNS) {
            let columns = column..product.value_dim.min(column + COLUMNS);
            for (block, lane) in (0..product.lanes).step_by(V::LANES).enumerate() {
                let tiles = Tiles { depth: product.lane_keys.of_block(block), ..tiles };
                // SAFETY: the tiles are as large as was just asserted, and keys of lanes are among all keys.
                unsafe { multiply_lanes::<V, COLUMNS, 1, false>(&tiles, columns.clone(), lane) };
            }
        }
        return;
    }
    for (block, lane) in (0..product.lanes).step_by(V::LANES).enumerate().step_by(2) {
        let near = product.lane_keys.of_block(block);
        let first = Tiles { depth: near, ..tiles };
        // SAFETY: the tiles are as large as was just asserted, and keys of lanes are among all keys.
        unsafe {
            if product.lanes - lane >= 2 * V::LANES {
                multiply_lanes::<V, ROWS, 2, false>(&first, 0..product.value_dim, lane);
                let far = product.lane_keys.of_block(block + 1);
                if far > near {
                    let rest = Tiles {
                        depth: far - near,
                        left: tiles.left.add(near * tiles.left_stride),
                        right: tiles.right.add(near * tiles.lanes),
                        target: Target::Added,
                        ..tiles
                    };
                    multiply_lanes::<V, ROWS, 1, false>(&rest, 0..product.value_dim, lane + V::LANES);
                }
            } else {
                multiply_lanes::<V, ROWS, 1, false>(&first, 0..product.value_dim, lane);
            }
        }
    }
}

/// What a product does with what was there before.
#[derive(Clone, Copy)]
enum Target<R> {
    /// `product = left * right * factor`: scores.
    Scaled(R),
    /// `product = product * row_scale + left * right`, with a row_scale for each lane: the output.
    Corrected(*const R),
    /// `product = product + left * right`: the output where all row_scales are 1.
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
    /// What a product that does not lie row by row asks for, a line in each step.
    prefetch: PrefetchPlan,
}

/// Steps of a product in which it asks for one line: faster, what is asked for gets in the way of what is needed.
const STEPS_PER_LINE: usize = 4;

/// Some rows of some lanes: in large blocks, and what remains in smaller ones.
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

/// The part of a product that stays in registers. Returns its rows.
///
/// # Safety
///
/// That of [`multiply_lanes`], and `ROWS` rows are left from `row` on.
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
        if tiles.depth > 0 {
            let left = tiles.left.add(if ROW_BY_ROW { row * stride } else { row });
            let right = tiles.right.add(lane);
            // Opaque, or they would be computed again in each step, by units that some processors multiply with.
            let row_offsets: [usize; ROWS] =
                if ROW_BY_ROW { black_box(from_fn(|index| index * stride)) } else { [0; ROWS] };
            if ROW_BY_ROW {
                for step in 0..tiles.depth {
                    // The next rows, which lie behind these, a line in each step.
                    V::prefetch_near(left.add(ROWS * stride).cast::<u8>().wrapping_add(CacheLines::SIZE * step));
                    let mut factors = [zero; VECTORS];
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
            } else if tiles.depth > V::Real::TERMS_AT_ONCE {
                for first in (0..tiles.depth).step_by(V::Real::TERMS_AT_ONCE) {
                    let mut part = [[zero; VECTORS]; ROWS];
                    for step in first..tiles.depth.min(first + V::Real::TERMS_AT_ONCE) {
                        add_step(left.add(step * stride), right.add(step * lanes), &mut part);
                    }
                    for (sum, part) in sums.as_flattened_mut().iter_mut().zip(part.as_flattened()) {
                        *sum = sum.add(*part);
                    }
                }
            } else {
                let lines = tiles.depth / STEPS_PER_LINE;
                let blocks = row / ROWS * (lanes / (VECTORS * V::LANES)) + lane / (VECTORS * V::LANES);
                let ask = tiles.prefetch.for_block(blocks, lines.max(1));
                for line in 0..lines {
                    match ask {
                        Prefetch::Nothing => (),
                        Prefetch::Read(first) => V::prefetch_near(first.wrapping_add(CacheLines::SIZE * line)),
                        Prefetch::Written(first) => {
                            V::prefetch_for_writing(first.wrapping_add(CacheLines::SIZE * line))
                        }
                    }
                    for step in 0..STEPS_PER_LINE {
                        let step = line * STEPS_PER_LINE + step;
                        add_step(left.add(step * stride), right.add(step * lanes), &mut sums);
                        compiler_fence();
                    }
                }
                for step in lines * STEPS_PER_LINE..tiles.depth {
                    add_step(left.add(step * stride), right.add(step * lanes), &mut sums);
                }
            }
        }
        // What was there before is added last, so that a long sum is one of sums of single tiles and rounds less often.
        match tiles.target {
            Target::Scaled(factor) if factor == V::Real::ONE => (),
            Target::Scaled(factor) => {
                for sum in sums.as_flattened_mut() {
                    *sum = sum.mul(V::splat(factor));
                }
            }
            Target::Corrected(row_scale) => {
                for vector in 0..VECTORS {
                    let factor = V::load(row_scale.add(lane + vector * V::LANES));
                    for index in 0..ROWS {
                        let before = V::load(place.add(index * lanes + vector * V::LANES));
                        sums[index][vector] = before.mul_add(factor, sums[index][vector]);
                    }
                }
            }
            Target::Added => {
                for index in 0..ROWS {
                    for vector in 0..VECTORS {
                        let before = V::load(place.add(index * lanes + vector * V::LANES));
                        sums[index][vector] = before.add(sums[index][vector]);
                    }
                }
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

/// One step of a product: neighbouring elements of `left` times vectors of `right`.
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
