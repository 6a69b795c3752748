//! The portable level, for any processor: arrays that the compiler turns into vectors.

#![expect(clippy::inline_always, reason = "instructions of a level must end up in its functions")]

use crate::microkernel::vector_kernel::simd_level;
use crate::microkernel::{FusedForward, convert};
use crate::simd::real::Real;
use crate::simd::vector::{Vector, vector_methods};
use flashcore_problem::DType;
use std::marker::PhantomData;

/// Four rows by eight lanes of `f32` are eight 128-bit sums: half of what SSE2 has.
const LANES: usize = 8;

/// The portable level.
pub(crate) struct Portable<R>(PhantomData<R>);

impl<R> Portable<R> {
    pub(crate) const fn new() -> Self {
        Self(PhantomData)
    }
}

simd_level!(Portable<R>, Array<R>, rows: 4);

impl<R: Real> FusedForward for Portable<R> {}

/// A vector for any processor.
#[derive(Clone, Copy)]
pub(crate) struct Array<R>([R; LANES]);

impl<R: Real> Array<R> {
    #[inline(always)]
    fn zip(self, other: Self, operation: impl Fn(R, R) -> R) -> Self {
        let mut result = self;
        for lane in 0..LANES {
            result.0[lane] = operation(self.0[lane], other.0[lane]);
        }
        result
    }
}

impl<R: Real> Vector for Array<R> {
    type Real = R;
    const LANES: usize = LANES;

    vector_methods! {
        fn splat(value: R) -> Self { Self([value; LANES]) }
        fn load(from: *const R) -> Self { Self(from.cast::<[R; LANES]>().read_unaligned()) }
        fn store(self, to: *mut R) { to.cast::<[R; LANES]>().write_unaligned(self.0); }

        fn widen(dtype: DType, from: *const u8) -> Self {
            let mut values = [R::ZERO; LANES];
            let bytes = std::slice::from_raw_parts(from, LANES * dtype.size_bytes());
            convert::load(dtype, bytes, &mut values);
            Self(values)
        }

        fn add(self, other: Self) -> Self { self.zip(other, |left, right| left + right) }
        fn sub(self, other: Self) -> Self { self.zip(other, |left, right| left - right) }
        fn mul(self, other: Self) -> Self { self.zip(other, |left, right| left * right) }
        fn max(self, other: Self) -> Self { self.zip(other, |left, right| right.maximum(left)) }
        fn exp2(self) -> Self { self.zip(self, |exponent, _| exponent.exp2()) }
        fn tanh(self) -> Self { self.zip(self, |x, _| x.tanh()) }

        fn mul_add(self, factor: Self, term: Self) -> Self {
            self.zip(factor, |left, right| left * right).zip(term, |left, right| left + right)
        }

        fn if_equal(self, other: Self, yes: Self, no: Self) -> Self {
            let mut result = no;
            for lane in 0..LANES {
                result.0[lane] = if self.0[lane] == other.0[lane] { yes.0[lane] } else { no.0[lane] };
            }
            result
        }
    }
}
