//! The vector trait: operations that a level provides; everything above them is written once.

#![expect(clippy::inline_always, reason = "instructions of a level must end up in its functions")]

use crate::simd::real::Real;
use flashcore_problem::DType;

/// Upper bound of the lanes of a vector.
pub(crate) const MAX_LANES: usize = 16;

/// Elements of the largest square of vectors.
pub(crate) const SQUARE: usize = MAX_LANES * MAX_LANES;

/// A SIMD vector: numbers side by side in a register.
///
/// Every method is to be marked `#[inline(always)]`, because it becomes the instructions it stands for only inside of a
/// function with the `target_feature` of the level.
///
/// # Safety
///
/// All methods may only be called where the processor has the instructions of the level. Pointers need no alignment,
/// and must be valid for [`LANES`](Self::LANES) elements.
pub(crate) trait Vector: Copy {
    type Real: Real;
    const LANES: usize;

    unsafe fn splat(value: Self::Real) -> Self;
    unsafe fn load(from: *const Self::Real) -> Self;
    unsafe fn store(self, to: *mut Self::Real);
    /// Loads and converts as many elements of `dtype`.
    unsafe fn widen(dtype: DType, from: *const u8) -> Self;

    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    /// `self * factor + term`, rounded once where the processor can.
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self;
    /// The larger one; `other` where `self` is a quiet NaN. Undefined where only `other` is a NaN.
    unsafe fn max(self, other: Self) -> Self;
    /// `yes` in lanes where `self` equals `other`, `no` elsewhere.
    unsafe fn if_equal(self, other: Self, yes: Self, no: Self) -> Self;
    /// `2^self` for exponents up to 100, as [`crate::simd::exp2`] says; above that, anything above `2^100`.
    unsafe fn exp2(self) -> Self;

    /// True if no lane is infinite or a NaN.
    #[inline(always)]
    unsafe fn is_finite(self) -> bool {
        // SAFETY: the caller vouches for the instructions.
        let lanes = unsafe { self.to_array() };
        lanes[..Self::LANES].iter().all(|lane| lane.is_finite())
    }

    /// True if some lane is above the limit.
    #[inline(always)]
    unsafe fn is_any_above(self, limit: Self::Real) -> bool {
        // SAFETY: the caller vouches for the instructions.
        let lanes = unsafe { self.to_array() };
        lanes[..Self::LANES].iter().any(|&lane| lane > limit)
    }

    /// Prefetches a cache line for reading, into the second-level cache. Any address may be given.
    #[inline(always)]
    unsafe fn prefetch(_address: *const u8) {}

    /// Prefetches a cache line that is read next while decoding, into the first-level cache. Any address may be given.
    #[inline(always)]
    unsafe fn prefetch_next(_address: *const u8) {}

    /// Prefetches a cache line for reading during a product, into the first-level cache. Any address may be given.
    #[inline(always)]
    unsafe fn prefetch_near(_address: *const u8) {}

    /// Prefetches a cache line for writing. Any address may be given.
    #[inline(always)]
    unsafe fn prefetch_for_writing(_address: *const u8) {}

    /// The numbers of all lanes, padded with `R::ZERO`.
    #[inline(always)]
    unsafe fn to_array(self) -> [Self::Real; MAX_LANES] {
        const { assert!(Self::LANES <= MAX_LANES) };
        let mut lanes = [Self::Real::ZERO; MAX_LANES];
        // SAFETY: there is room for all lanes.
        unsafe { self.store(lanes.as_mut_ptr()) };
        lanes
    }

    /// Sum of all lanes, always in the same order.
    #[inline(always)]
    unsafe fn sum(self) -> Self::Real {
        // SAFETY: the caller vouches for the instructions.
        let mut lanes = unsafe { self.to_array() };
        let mut half = Self::LANES / 2;
        while half > 0 {
            for lane in 0..half {
                lanes[lane] += lanes[lane + half];
            }
            half /= 2;
        }
        lanes[0]
    }

    /// Largest of all lanes that are not NaN.
    #[inline(always)]
    unsafe fn largest(self) -> Self::Real {
        // SAFETY: the caller vouches for the instructions.
        let lanes = unsafe { self.to_array() };
        lanes[..Self::LANES].iter().fold(Self::Real::NEGATIVE_INFINITY, |largest, &lane| largest.maximum(lane))
    }

    /// `tanh` to within [`crate::simd::tanh::MAX_ERROR`].
    #[inline(always)]
    unsafe fn tanh(self) -> Self {
        // SAFETY: the caller vouches for the instructions, and there is room for all lanes.
        unsafe { Self::load(self.to_array().map(Real::tanh).as_ptr()) }
    }

    /// `to[column][row] = from[row][column]` of as many rows and columns as there are lanes. `to` is aligned for its type.
    ///
    /// # Safety
    ///
    /// Each row of both is valid for as many elements as there are lanes.
    #[inline(always)]
    unsafe fn transpose(from: *const Self::Real, from_stride: usize, to: *mut Self::Real, to_stride: usize) {
        for row in 0..Self::LANES {
            for column in 0..Self::LANES {
                // SAFETY: the caller vouches for the rows.
                unsafe { *to.add(column * to_stride + row) = from.add(row * from_stride + column).read_unaligned() };
            }
        }
    }

    /// `to[column][row] = from[row][column] * self[column]`, as [`transpose`](Self::transpose).
    ///
    /// # Safety
    ///
    /// As [`transpose`](Self::transpose).
    #[inline(always)]
    unsafe fn transpose_times(
        self,
        from: *const Self::Real,
        from_stride: usize,
        to: *mut Self::Real,
        to_stride: usize,
    ) {
        let mut square = [Self::Real::ZERO; SQUARE];
        // SAFETY: the caller vouches for instructions and rows, and a square of vectors has room for them.
        unsafe {
            for row in 0..Self::LANES {
                Self::load(from.add(row * from_stride)).mul(self).store(square.as_mut_ptr().add(row * Self::LANES));
            }
            Self::transpose(square.as_ptr(), Self::LANES, to, to_stride);
        }
    }
}

/// Compiler fence: loads that follow are not moved up across it. Those of several steps at once would take more registers
/// than there are.
#[inline(always)]
pub(crate) fn compiler_fence() {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    // SAFETY: it does nothing.
    unsafe {
        core::arch::asm!("", options(nostack, preserves_flags));
    }
}

/// Methods of [`Vector`] for one level: unsafe, as the trait says, and inlined by force.
macro_rules! vector_methods {
    ($($(#[$attribute:meta])* fn $name:ident($($arguments:tt)*) $(-> $output:ty)? $body:block)*) => {$(
        $(#[$attribute])*
        #[inline(always)]
        #[allow(unused_unsafe, reason = "an array has no instructions")]
        unsafe fn $name($($arguments)*) $(-> $output)? {
            // SAFETY: the caller vouches for the instructions of the level, and for pointers.
            unsafe { $body }
        }
    )*};
}
pub(super) use vector_methods;
