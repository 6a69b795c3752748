//! The microkernel of every level whose operands are packed in the type of the scores, written once over its vectors.
//!
//! A level has one function with its `target_feature`, in [`SimdLevel::vectorize`]; what it calls is a [`SimdWork`], whose
//! `call` is inlined into it by force. With closures as work, which cannot be marked so, the compiler left products,
//! packing and decoding outside of that function, with a call for each vector instruction: 26 times slower on Zen 4.

use super::convert;
use super::head::Head;
use super::mask::{self, LaneRanges};
use super::score::{self, ScoreModifiers};
use super::{
    AccumulateArgs, Decode, Lse, MultiplyArgs, Products, Softmax, SoftmaxArgs, SoftmaxOutcome, decode, pack, softmax,
};
use crate::attend::blocked;
use crate::attend::decode::DecodeTile;
use crate::simd::vector::Vector;
use flashcore_problem::DType;
use std::ops::Range;

/// A level whose microkernel is made of its vectors. A value of it is a witness that the processor has the features.
pub(crate) trait SimdLevel: Sync + Sized {
    type Vector: Vector;

    /// See [`Products::TILE_ROWS`].
    const TILE_ROWS: usize = blocked::KV_TILE;

    /// Calls `work` in a function with the target features of the level.
    fn vectorize<W: SimdWork<Self::Vector>>(&self, work: W) -> W::Output;

    /// [`products::multiply`](super::products::multiply) in blocks that fill the registers. To be marked `#[inline(always)]`.
    ///
    /// # Safety
    ///
    /// The processor has the features.
    unsafe fn multiply_tile(args: &mut MultiplyArgs<'_, Self>);

    /// [`products::accumulate`](super::products::accumulate) in blocks that fill the registers. To be marked
    /// `#[inline(always)]`.
    ///
    /// # Safety
    ///
    /// The processor has the features.
    unsafe fn accumulate_tile(args: &mut AccumulateArgs<'_, Self>);
}

/// Arguments of a loop over vectors of type `V`.
pub(crate) trait SimdWork<V: Vector> {
    type Output;

    /// Runs the loop. To be marked `#[inline(always)]`.
    ///
    /// # Safety
    ///
    /// The processor has the instructions of `V`.
    unsafe fn call(self) -> Self::Output;
}

/// Implements [`SimdLevel`] with the one function that has the features. `$rows` by two vectors are the sums that stay in
/// registers, or while sums are accumulated `$columns` by one where they are given.
macro_rules! simd_level {
    (
        $level:ident $(<$real:ident>)?, $vector:ty, rows: $rows:literal $(, columns: $columns:literal)?
        $(, tile_rows: $tile_rows:literal)?
        $(, features: $features:literal)?
    ) => {
        impl $(<$real: crate::simd::real::Real>)? crate::microkernel::vector_kernel::SimdLevel for $level $(<$real>)? {
            type Vector = $vector;
            $(const TILE_ROWS: usize = $tile_rows;)?

            #[inline(always)]
            fn vectorize<W: crate::microkernel::vector_kernel::SimdWork<$vector>>(&self, work: W) -> W::Output {
                $(#[target_feature(enable = $features)])?
                unsafe fn run<V, W>(work: W) -> W::Output
                where
                    V: crate::simd::vector::Vector,
                    W: crate::microkernel::vector_kernel::SimdWork<V>,
                {
                    // SAFETY: the caller vouches for the features.
                    unsafe { work.call() }
                }
                // SAFETY: `self` is a witness of the features.
                unsafe { run::<$vector, W>(work) }
            }

            #[inline(always)]
            unsafe fn multiply_tile(args: &mut crate::microkernel::MultiplyArgs<'_, Self>) {
                // SAFETY: the caller vouches for the features.
                unsafe { crate::microkernel::products::multiply::<$vector, _, $rows>(args) }
            }

            #[inline(always)]
            unsafe fn accumulate_tile(args: &mut crate::microkernel::AccumulateArgs<'_, Self>) {
                // SAFETY: the caller vouches for the features.
                unsafe { crate::microkernel::products::accumulate::<$vector, _, $rows, { 0 $(+ $columns)? }>(args) }
            }
        }
    };
}
pub(crate) use simd_level;

type Real<L> = <<L as SimdLevel>::Vector as Vector>::Real;

impl<L: SimdLevel> Products for L {
    type Real = Real<L>;
    type Packed = Real<L>;

    const PANEL_LANES: usize = 2 * L::Vector::LANES;
    const LANE_BLOCK: usize = L::Vector::LANES;
    const ROW_ALIGNMENT: usize = 1;
    const ROW_BLOCK: usize = 1;
    const COLUMN_BLOCK: usize = 1;
    const TILE_ROWS: usize = L::TILE_ROWS;
    const FUSED_PREFETCH: bool = true;

    fn right_size(depth: usize) -> usize {
        depth * Self::PANEL_LANES
    }

    fn left_size(depth: usize, rows: usize) -> usize {
        depth * rows
    }

    fn transposed_size(columns: usize, rows: usize) -> usize {
        columns * rows
    }

    fn in_place(head: Head<'_>, rows: Range<usize>) -> Option<&[Self::Packed]> {
        head.in_place(rows)
    }

    fn pack_right(&self, head: Head<'_>, rows: Range<usize>, lanes: usize, packed: &mut [Self::Packed]) {
        self.vectorize(PackRight(head, rows, lanes, packed));
    }

    fn pack_left(&self, head: Head<'_>, rows: Range<usize>, packed: &mut [Self::Packed]) {
        self.vectorize(PackRows(head, rows, packed));
    }

    fn pack_transposed(&self, head: Head<'_>, rows: Range<usize>, packed: &mut [Self::Packed]) {
        self.pack_left(head, rows, packed);
    }

    fn scale_rows(&self, packed: &mut [Self::Packed], columns: usize, scales: &[Self::Real]) {
        self.vectorize(ScaleRows(packed, columns, scales));
    }

    fn multiply(&self, mut args: MultiplyArgs<'_, Self>) {
        self.vectorize(&mut args);
    }

    fn accumulate(&self, mut args: AccumulateArgs<'_, Self>) {
        self.vectorize(&mut args);
    }

    fn transpose(&self, columns: &[Self::Real], factors: &[Self::Real], rows: &mut [Self::Real]) {
        self.vectorize(Transpose(columns, factors, rows));
    }

    fn are_finite(&self, head: Head<'_>, rows: Range<usize>) -> bool {
        self.vectorize(AreFinite(head, rows))
    }

    fn store(&self, dtype: DType, values: &[Self::Real], factor: Self::Real, bytes: &mut [u8]) {
        self.vectorize(Store(dtype, values, factor, bytes));
    }
}

impl<L: SimdLevel> Softmax for L {
    fn modify_scores(&self, modifiers: ScoreModifiers<'_, Self::Real>) {
        self.vectorize(modifiers);
    }

    fn mask(&self, scores: &mut [Self::Real], lanes: usize, ranges: &LaneRanges) {
        self.vectorize(Mask(scores, lanes, ranges));
    }

    fn online_softmax(&self, args: &mut SoftmaxArgs<'_, Self>) -> SoftmaxOutcome {
        self.vectorize(args)
    }

    fn exp2_minus_lse(&self, scores: &mut [Self::Real], lanes: usize, factor: Self::Real, lse: Lse<'_, Self::Real>) {
        self.vectorize(Exp2MinusLse(scores, lanes, factor, lse));
    }
}

impl<L: SimdLevel> Decode for L {
    fn decode_tile(&self, tile: DecodeTile<'_, Self::Real>) {
        self.vectorize(tile);
    }
}

struct PackRight<'a, R>(Head<'a>, Range<usize>, usize, &'a mut [R]);
struct PackRows<'a, R>(Head<'a>, Range<usize>, &'a mut [R]);
struct ScaleRows<'a, R>(&'a mut [R], usize, &'a [R]);
struct Mask<'a, R>(&'a mut [R], usize, &'a LaneRanges);
struct Exp2MinusLse<'a, R>(&'a mut [R], usize, R, Lse<'a, R>);
struct Transpose<'a, R>(&'a [R], &'a [R], &'a mut [R]);
struct AreFinite<'a>(Head<'a>, Range<usize>);
struct Store<'a, R>(DType, &'a [R], R, &'a mut [u8]);

/// Implements [`SimdWork`] for the arguments of a function, over the vectors `V` or those of a level `L`.
macro_rules! simd_work {
    ($(<$parameter:ident: $bound:ident> $vector:ty, $work:ty => |$this:pat_param| -> $output:ty $body:block)*) => {$(
        impl<$parameter: $bound> SimdWork<$vector> for $work {
            type Output = $output;

            #[inline(always)]
            #[allow(unused_unsafe, reason = "loops that the compiler vectorizes are safe")]
            unsafe fn call(self) -> $output {
                let $this = self;
                // SAFETY: the caller vouches for the instructions.
                unsafe { $body }
            }
        }
    )*};
}

simd_work! {
    <V: Vector> V, PackRight<'_, V::Real> => |PackRight(head, rows, lanes, packed)| -> () {
        pack::pack_right::<V>(head, rows, lanes, packed);
    }
    <V: Vector> V, PackRows<'_, V::Real> => |PackRows(head, rows, packed)| -> () {
        pack::pack_rows::<V>(head, rows, packed);
    }
    <V: Vector> V, ScaleRows<'_, V::Real> => |ScaleRows(packed, columns, scales)| -> () {
        pack::scale_rows(packed, columns, scales);
    }
    <L: SimdLevel> L::Vector, &mut MultiplyArgs<'_, L> => |args| -> () { L::multiply_tile(args); }
    <L: SimdLevel> L::Vector, &mut SoftmaxArgs<'_, L> => |args| -> SoftmaxOutcome {
        softmax::online_softmax::<L::Vector, _>(args)
    }
    <L: SimdLevel> L::Vector, &mut AccumulateArgs<'_, L> => |args| -> () { L::accumulate_tile(args); }
    <V: Vector> V, ScoreModifiers<'_, V::Real> => |modifiers| -> () { score::modify_scores::<V>(modifiers); }
    <V: Vector> V, Mask<'_, V::Real> => |Mask(scores, lanes, ranges)| -> () { mask::mask(scores, lanes, ranges); }
    <V: Vector> V, Exp2MinusLse<'_, V::Real> => |Exp2MinusLse(scores, lanes, factor, lse)| -> () {
        softmax::exp2_minus_lse::<V>(scores, lanes, factor, lse);
    }
    <V: Vector> V, Transpose<'_, V::Real> => |Transpose(columns, factors, rows)| -> () {
        pack::transpose::<V>(columns, factors, rows);
    }
    <V: Vector> V, AreFinite<'_> => |AreFinite(head, rows)| -> bool { head.are_finite(rows) }
    <V: Vector> V, Store<'_, V::Real> => |Store(dtype, values, factor, bytes)| -> () {
        convert::store(dtype, values, factor, bytes);
    }
    <V: Vector> V, DecodeTile<'_, V::Real> => |mut tile| -> () { decode::attend_tile::<V>(&mut tile); }
}
