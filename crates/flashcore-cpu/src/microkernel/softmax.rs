//! The online softmax of every level whose weights are of the type of the scores: down the columns of a row panel.
//!
//! Everything here is inlined into the function with the `target_feature` of a level.

#![expect(clippy::inline_always, reason = "instructions of a level must end up in its functions")]

use crate::microkernel::{Lse, Products, SoftmaxArgs, SoftmaxOutcome};
use crate::planted::planted;
use crate::simd::real::Real;
use crate::simd::vector::Vector;

/// Independent maxima and sums of one lane, so that none waits for the latency of another.
const CHAINS: usize = 4;

/// The scores of one vector of lanes.
#[derive(Clone, Copy)]
pub(crate) struct Column<R> {
    pub(crate) scores: *mut R,
    /// Elements from one row to the next.
    pub(crate) lanes: usize,
}

impl<R: Real> Column<R> {
    /// Updates each of `largest` with the score of one of `COUNT` rows from `row` on.
    ///
    /// # Safety
    ///
    /// The processor has the instructions of `V`, and there are scores of these rows.
    #[inline(always)]
    unsafe fn update_max<V: Vector<Real = R>, const COUNT: usize>(self, row: usize, largest: &mut [V; CHAINS]) {
        for (chain, largest) in largest.iter_mut().enumerate().take(COUNT) {
            // SAFETY: the caller vouches for both.
            *largest = unsafe { V::load(self.scores.add((row + chain) * self.lanes)).max(*largest) };
        }
    }

    /// Turns the scores of `COUNT` rows from `row` on into weights `2^(score * factor + shift)`, each added to one of `sums`.
    ///
    /// # Safety
    ///
    /// As [`update_max`](Self::update_max).
    #[inline(always)]
    unsafe fn exp_and_sum<V: Vector<Real = R>, const COUNT: usize>(
        self,
        row: usize,
        factor: V,
        shift: V,
        sums: &mut [V; CHAINS],
    ) {
        for (chain, sum) in sums.iter_mut().enumerate().take(COUNT) {
            // SAFETY: the caller vouches for both.
            unsafe {
                let score = self.scores.add((row + chain) * self.lanes);
                let weight = V::load(score).mul_add(factor, shift).exp2();
                weight.store(score);
                *sum = sum.add(weight);
            }
        }
    }

    /// Multiplies the scores of `rows` rows by `factor`, and rounds them.
    ///
    /// # Safety
    ///
    /// As [`update_max`](Self::update_max).
    #[inline(always)]
    unsafe fn scale<V: Vector<Real = R>>(self, rows: usize, factor: V) {
        for row in 0..rows {
            // SAFETY: the caller vouches for both.
            unsafe {
                let score = self.scores.add(row * self.lanes);
                V::load(score).mul(factor).store(score);
            }
        }
    }

    /// The largest score of `rows` rows.
    ///
    /// # Safety
    ///
    /// As [`update_max`](Self::update_max).
    #[inline(always)]
    pub(crate) unsafe fn largest<V: Vector<Real = R>>(self, rows: usize) -> V {
        let whole = rows - rows % CHAINS;
        // SAFETY: the caller vouches for both.
        unsafe {
            let mut largest = [V::splat(R::NEGATIVE_INFINITY); CHAINS];
            for row in (0..whole).step_by(CHAINS) {
                self.update_max::<V, CHAINS>(row, &mut largest);
            }
            for row in whole..rows {
                self.update_max::<V, 1>(row, &mut largest);
            }
            let [first, second, third, fourth] = largest;
            first.max(second).max(third.max(fourth))
        }
    }

    /// Turns the scores of `rows` rows into weights and returns their sum.
    ///
    /// # Safety
    ///
    /// As [`update_max`](Self::update_max).
    #[inline(always)]
    pub(crate) unsafe fn exp_and_sum_all<V: Vector<Real = R>>(self, rows: usize, factor: V, subtracted: V) -> V {
        let whole = rows - rows % CHAINS;
        // SAFETY: the caller vouches for both.
        unsafe {
            let shift = V::splat(R::ZERO).sub(subtracted);
            let mut added = [V::splat(R::ZERO); CHAINS];
            for row in (0..whole).step_by(CHAINS) {
                self.exp_and_sum::<V, CHAINS>(row, factor, shift, &mut added);
            }
            for row in whole..rows {
                self.exp_and_sum::<V, 1>(row, factor, shift, &mut added);
            }
            let [first, second, third, fourth] = added;
            first.add(second).add(third.add(fourth))
        }
    }
}

/// Upper bound of the sum of one tile's weights in a lane whose row max is stale (lazy rescale): eight times what it can be
/// where the row max is updated. Weights are as exact then as below 1, and leave the values their range but for three bits.
pub(crate) const MAX_TILE_SUM: f64 = 2048.0;

/// Scores, in base 2, from which on they are rounded before the row max is subtracted. A fused multiply-add subtracts a
/// rounded row max from a product that is not rounded, and what rounding took from the row max, here up to 4 and at 2^31
/// more than any exponent, would be the weight of the maximum itself: all weights of a row zero, or infinite.
pub(crate) const COARSE: f64 = (1 << 26) as f64;

/// Vectors of a row panel.
const VECTORS: usize = 2;

/// One step of the online softmax; see [`Softmax::online_softmax`](super::Softmax::online_softmax).
///
/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn online_softmax<V: Vector, K: Products<Real = V::Real>>(
    args: &mut SoftmaxArgs<'_, K>,
) -> SoftmaxOutcome {
    let lanes = args.lanes;
    assert!(args.fits() && lanes <= VECTORS * V::LANES, "a row panel of scores that is too small");
    // SAFETY: every row of the panel has a vector at each lane where one begins.
    unsafe {
        let nothing = V::splat(V::Real::NEGATIVE_INFINITY);
        let (factor, zero) = (V::splat(args.factor), V::splat(V::Real::ZERO));
        // Row max and row sum of each vector: nothing is stored before all are known to be done.
        let mut states = [[zero; 2]; VECTORS];
        for (block, lane) in (0..lanes).step_by(V::LANES).enumerate() {
            let rows = args.lane_rows.of_block(block);
            let column = Column { scores: args.scores.as_mut_ptr().add(lane), lanes };
            let (old, sum) = (V::load(args.row_max.as_ptr().add(lane)), V::load(args.row_sum.as_ptr().add(lane)));
            let row_scale = args.row_scale.as_mut_ptr().add(lane);
            if !args.updates_row_max && old.is_finite() {
                let added = column.exp_and_sum_all(rows, factor, old);
                if added.is_any_above(V::Real::from_f64(planted!(StaleRowMax: f64::INFINITY, MAX_TILE_SUM))) {
                    return SoftmaxOutcome::StaleRowMax;
                }
                V::splat(V::Real::ONE).store(row_scale);
                states[block] = [old, sum.add(added)];
                continue;
            }
            let new = column.largest::<V>(rows).mul(factor).max(old);
            let subtracted = new.if_equal(nothing, zero, new);
            let added = if subtracted.max(zero.sub(subtracted)).is_any_above(V::Real::from_f64(COARSE)) {
                column.scale(rows, factor);
                column.exp_and_sum_all(rows, V::splat(V::Real::ONE), subtracted)
            } else {
                column.exp_and_sum_all(rows, factor, subtracted)
            };
            let old_factor = old.if_equal(new, V::splat(V::Real::ONE), old.sub(new).exp2());
            let old_factor =
                planted!(RescaleNeverBelow: old_factor.max(V::splat(V::Real::from_f64(1.0 / 65536.0))), old_factor);
            old_factor.store(row_scale);
            states[block] = [new, sum.mul_add(old_factor, added)];
        }
        for ([row_max, sum], lane) in states.into_iter().zip((0..lanes).step_by(V::LANES)) {
            row_max.store(args.row_max.as_mut_ptr().add(lane));
            sum.store(args.row_sum.as_mut_ptr().add(lane));
        }
    }
    SoftmaxOutcome::Done
}

/// Normalized weights; see [`Softmax::exp2_minus_lse`](super::Softmax::exp2_minus_lse).
///
/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn exp2_minus_lse<V: Vector>(
    scores: &mut [V::Real],
    lanes: usize,
    factor: V::Real,
    lse: Lse<'_, V::Real>,
) {
    assert!(lanes.is_multiple_of(V::LANES), "scores of half a vector");
    for (row, scores) in scores.chunks_exact_mut(lanes).enumerate() {
        for (vector, place) in scores.chunks_exact_mut(V::LANES).enumerate() {
            // SAFETY: the caller vouches for the instructions, and both slices have a whole vector.
            unsafe {
                let lse = match lse {
                    Lse::OfLanes(lse) => V::load(lse[vector * V::LANES..][..V::LANES].as_ptr()),
                    Lse::OfRows(lse) => V::splat(lse[row]),
                };
                let lse = lse.if_equal(V::splat(V::Real::NEGATIVE_INFINITY), V::splat(V::Real::ZERO), lse);
                // Rounded as the log-sum-exp was, see `COARSE`.
                V::load(place.as_ptr()).mul(V::splat(factor)).sub(lse).exp2().store(place.as_mut_ptr());
            }
        }
    }
}
