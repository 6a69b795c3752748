//! Packing of operands in the type of the scores, and the transposition of sums.

#![expect(clippy::inline_always, reason = "instructions of a level must end up in its functions")]

use crate::microkernel::convert;
use crate::microkernel::head::Head;
use crate::simd::real::Real;
use crate::simd::vector::{SQUARE, Vector};
use std::ops::Range;

/// Packs rows side by side in lanes: transposed, a square of vectors at a time.
///
/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn pack_right<V: Vector>(head: Head<'_>, rows: Range<usize>, lanes: usize, packed: &mut [V::Real]) {
    let (dtype, columns, size) = (head.dtype(), head.columns(), head.dtype().size_bytes());
    let packed = &mut packed[..columns * lanes];
    // Read in place, if that needs no conversion.
    let stride = head.row_stride().filter(|_| dtype == V::Real::DTYPE);
    for first_lane in (0..lanes).step_by(V::LANES) {
        let present = rows.len().saturating_sub(first_lane).min(V::LANES);
        for column in (0..columns).step_by(V::LANES) {
            let count = V::LANES.min(columns - column);
            if let Some(row_stride) = stride.filter(|_| count == V::LANES && present == V::LANES) {
                let (first, last) = (rows.start + first_lane, rows.start + first_lane + V::LANES - 1);
                let _ = head.row(last);
                let from = head.row(first)[column * size..].as_ptr().cast::<V::Real>();
                // SAFETY: rows and columns of the head are there, those of the packed panel from its place on too, and
                // no alignment is needed.
                unsafe { V::transpose(from, row_stride, packed[column * lanes + first_lane..].as_mut_ptr(), lanes) };
                continue;
            }
            let (mut square, mut turned) = ([V::Real::ZERO; SQUARE], [V::Real::ZERO; SQUARE]);
            for (lane, square) in square.chunks_exact_mut(V::LANES).take(present).enumerate() {
                let bytes = &head.row(rows.start + first_lane + lane)[column * size..(column + count) * size];
                if count == V::LANES {
                    // SAFETY: there is a whole vector of both.
                    unsafe { V::widen(dtype, bytes.as_ptr()).store(square.as_mut_ptr()) };
                } else {
                    convert::load(dtype, bytes, &mut square[..count]);
                }
            }
            let place = &mut packed[column * lanes + first_lane..];
            // SAFETY: a square fits into the arrays, and into the packed panel where all of its columns are there.
            unsafe {
                if count == V::LANES {
                    V::transpose(square.as_ptr(), V::LANES, place.as_mut_ptr(), lanes);
                } else {
                    V::transpose(square.as_ptr(), V::LANES, turned.as_mut_ptr(), V::LANES);
                    for (index, row) in turned.chunks_exact(V::LANES).take(count).enumerate() {
                        place[index * lanes..][..V::LANES].copy_from_slice(row);
                    }
                }
            }
        }
    }
}

/// `rows[lane][column] = columns[column][lane] * factors[lane]`, with a factor for each lane.
///
/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn transpose<V: Vector>(columns: &[V::Real], factors: &[V::Real], rows: &mut [V::Real]) {
    assert_eq!(columns.len(), rows.len(), "transposed into another size");
    let lanes = factors.len();
    let count = columns.len() / lanes;
    let whole = if lanes.is_multiple_of(V::LANES) { count - count % V::LANES } else { 0 };
    for lane in (0..lanes - lanes % V::LANES).step_by(V::LANES) {
        // SAFETY: there is a factor for each lane.
        let factor = unsafe { V::load(factors[lane..].as_ptr()) };
        for column in (0..whole).step_by(V::LANES) {
            let (from, to) = (&columns[column * lanes + lane..], &mut rows[lane * count + column..]);
            // SAFETY: as many columns and lanes as a vector has are left.
            unsafe { factor.transpose_times(from.as_ptr(), lanes, to.as_mut_ptr(), count) };
        }
    }
    for column in whole..count {
        for lane in 0..lanes {
            rows[lane * count + column] = columns[column * lanes + lane] * factors[lane];
        }
    }
}

/// Packs rows as they are, converted to the type of the scores.
///
/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn pack_rows<V: Vector>(head: Head<'_>, rows: Range<usize>, packed: &mut [V::Real]) {
    let (dtype, columns, size) = (head.dtype(), head.columns(), head.dtype().size_bytes());
    let whole = columns - columns % V::LANES;
    for (packed, row) in packed.chunks_exact_mut(columns).zip(rows) {
        let bytes = head.row(row);
        for column in (0..whole).step_by(V::LANES) {
            // SAFETY: both have a whole vector left.
            unsafe { V::widen(dtype, bytes.as_ptr().add(column * size)).store(packed.as_mut_ptr().add(column)) };
        }
        convert::load(dtype, &bytes[whole * size..], &mut packed[whole..]);
    }
}

/// Multiplies packed rows of so many columns by a scale each. Inlined into functions with vector instructions.
#[inline(always)]
pub(crate) fn scale_rows<R: Real>(packed: &mut [R], columns: usize, scales: &[R]) {
    for (row, &scale) in packed.chunks_exact_mut(columns).zip(scales) {
        for element in row {
            *element *= scale;
        }
    }
}
