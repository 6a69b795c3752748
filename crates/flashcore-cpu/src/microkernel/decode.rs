//! The loops of [decoding](crate::attend::decode): vectors along the columns of keys and values, a few keys or columns at
//! a time.

#![expect(clippy::inline_always, reason = "instructions of a level must end up in its functions")]

use crate::attend::decode::{DecodeTile, KV_TILE, MAX_ROWS};
use crate::attend::softmax::{finite_shift, row_scale};
use crate::microkernel::convert;
use crate::microkernel::head::Head;
use crate::microkernel::prefetch::CacheLines;
use crate::microkernel::score::modify_row;
use crate::simd::real::Real;
use crate::simd::vector::{MAX_LANES, Vector};
use flashcore_problem::DType;
use std::ops::Range;

/// Attends a tile with a few query rows; see [`Microkernel::decode_tile`](super::Microkernel::decode_tile).
///
/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn attend_tile<V: Vector>(tile: &mut DecodeTile<'_, V::Real>) {
    let (key, value, keys) = (tile.key, tile.value, tile.keys.clone());
    assert!(keys.len() <= KV_TILE, "a tile of wrong size");
    // SAFETY: the caller vouches for the instructions.
    unsafe {
        if key.are_strided(&keys) {
            let of_keys = Rows::strided(key, &keys);
            attend_rows::<V, _>(tile, of_keys, Rows::strided(value, &keys), of_keys.following(key, &keys));
        } else {
            // Keys of several pages: the address of each.
            let mut lists = [[core::ptr::null(); KV_TILE]; 3];
            let [of_keys, of_values, of_following] = &mut lists;
            let following = key.following(&keys, KV_TILE).unwrap_or_default();
            let of_keys = Rows::listed::<V>(key, keys.clone(), of_keys);
            let of_values = Rows::listed::<V>(value, keys, of_values);
            attend_rows::<V, _>(tile, of_keys, of_values, Rows::listed::<V>(key, following, of_following));
        }
    }
}

/// Attends a tile whose keys and values are at these addresses, while prefetching the following keys.
///
/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
unsafe fn attend_rows<V: Vector, A: Addresses>(
    tile: &mut DecodeTile<'_, V::Real>,
    key: Rows<A>,
    value: Rows<A>,
    following: Rows<A>,
) {
    // Once for each type, so that the innermost loops need not branch on it.
    // SAFETY: the caller vouches for the instructions.
    unsafe {
        match tile.key.dtype() {
            DType::F16 => attend_typed::<V, A>(DType::F16, tile, key, value, following),
            DType::Bf16 => attend_typed::<V, A>(DType::Bf16, tile, key, value, following),
            DType::F32 => attend_typed::<V, A>(DType::F32, tile, key, value, following),
            DType::F64 => attend_typed::<V, A>(DType::F64, tile, key, value, following),
            DType::E4m3 => attend_typed::<V, A>(DType::E4m3, tile, key, value, following),
            DType::E5m2 => attend_typed::<V, A>(DType::E5m2, tile, key, value, following),
        }
    }
}

/// Attends a tile whose elements are of type `dtype`.
///
/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
unsafe fn attend_typed<V: Vector, A: Addresses>(
    dtype: DType,
    tile: &mut DecodeTile<'_, V::Real>,
    key: Rows<A>,
    value: Rows<A>,
    following: Rows<A>,
) {
    let (rows, count) = (tile.rows, tile.keys.len());
    assert!(rows <= MAX_ROWS && count <= KV_TILE && tile.query.len() >= rows * key.columns, "a tile of wrong size");
    assert!(
        tile.scores.len() >= rows * KV_TILE && tile.output.len() >= rows * value.columns,
        "scratch or an output of wrong size"
    );
    let mut row = 0;
    while row < rows {
        // The values of these keys, and later the following keys, are prefetched: every tile begins elsewhere than the
        // last ended, where the hardware prefetcher does not see it coming.
        let next = (row == 0).then_some(value);
        let query = &tile.query[row * key.columns..];
        let scores = &mut tile.scores[row * KV_TILE..];
        // SAFETY: what remains of the rows is at least as much as the block chosen here.
        row += unsafe {
            match rows - row {
                4.. => dot_products::<V, A, 4>(dtype, key, next, query, tile.factor, scores),
                2.. => dot_products::<V, A, 2>(dtype, key, next, query, tile.factor, scores),
                _ => dot_products::<V, A, 1>(dtype, key, next, query, tile.factor, scores),
            }
        };
    }
    let mut row_scales = [V::Real::ONE; MAX_ROWS];
    for (row, row_scale) in row_scales.iter_mut().enumerate().take(rows) {
        let scores = &mut tile.scores[row * KV_TILE..(row + 1) * KV_TILE];
        // SAFETY: the caller vouches for the instructions.
        unsafe {
            if let Some(modifiers) = tile.modifiers {
                modify_row::<V>(modifiers.of_row(row, scores), count);
            }
            *row_scale = online_softmax::<V>(scores, count, &mut tile.row_max[row], &mut tile.row_sum[row]);
            if let Some(scales) = tile.value_scales {
                for (place, scale) in scores.chunks_exact_mut(V::LANES).zip(scales.chunks_exact(V::LANES)) {
                    V::load(place.as_ptr()).mul(V::load(scale.as_ptr())).store(place.as_mut_ptr());
                }
            }
        }
    }
    let mut row = 0;
    while row < rows {
        let next = (row == 0).then_some(following);
        let weights = &tile.scores[row * KV_TILE..];
        let output = &mut tile.output[row * value.columns..];
        let row_scales = &row_scales[row..];
        // SAFETY: what remains of the rows is at least as much as the block chosen here.
        row += unsafe {
            match rows - row {
                4.. => add_values::<V, A, 4, 4>(dtype, value, next, weights, row_scales, output),
                2.. => add_values::<V, A, 2, 8>(dtype, value, next, weights, row_scales, output),
                _ => add_values::<V, A, 1, 8>(dtype, value, next, weights, row_scales, output),
            }
        };
    }
}

/// Addresses of rows.
trait Addresses: Copy {
    /// Address of a row; `None` where it is not known, which is that of no row to read.
    fn get(self, row: usize) -> Option<*const u8>;
}

/// Addresses of rows that are equally far apart.
#[derive(Clone, Copy)]
struct Strided {
    first: *const u8,
    stride_bytes: usize,
}

impl Addresses for Strided {
    #[inline(always)]
    fn get(self, row: usize) -> Option<*const u8> {
        Some(self.first.wrapping_add(row * self.stride_bytes))
    }
}

/// An address for each row.
#[derive(Clone, Copy)]
struct Listed<'a>(&'a [*const u8]);

impl Addresses for Listed<'_> {
    #[inline(always)]
    fn get(self, row: usize) -> Option<*const u8> {
        self.0.get(row).copied()
    }
}

/// Some rows of keys or values in memory. All elements of all rows can be read, unless they are only prefetched.
#[derive(Clone, Copy)]
struct Rows<A> {
    addresses: A,
    count: usize,
    columns: usize,
}

impl Rows<Strided> {
    /// Rows that are equally far apart.
    fn strided(head: Head<'_>, rows: &Range<usize>) -> Self {
        assert!(head.are_strided(rows), "rows of several pages");
        // For its bounds check: no row lies past it.
        let _ = head.row(rows.end - 1);
        let first = head.row(rows.start).as_ptr();
        // The stride of a single row is never used, and may be anything.
        let stride_bytes = if rows.len() == 1 { 0 } else { head.row_bytes() };
        Self { addresses: Strided { first, stride_bytes }, count: rows.len(), columns: head.columns() }
    }

    /// As many rows that follow these: those that the sequence has next, or else in memory. They may be outside of the
    /// tensor: good for prefetching and nothing else.
    fn following(self, head: Head<'_>, rows: &Range<usize>) -> Self {
        let Strided { first, stride_bytes } = self.addresses;
        let next = head.following(rows, 1).filter(|next| !next.is_empty());
        let first = next.map_or_else(
            || first.wrapping_add(self.count.wrapping_mul(stride_bytes)),
            |next| head.row(next.start).as_ptr(),
        );
        Self { addresses: Strided { first, stride_bytes }, ..self }
    }
}

impl<'a> Rows<Listed<'a>> {
    /// Rows of several pages, of each of which the first and the last are prefetched: pages are anywhere in memory, and so that
    /// their addresses are translated side by side, before any of them is waited for.
    ///
    /// # Safety
    ///
    /// The processor has the instructions of `V`.
    #[inline(always)]
    unsafe fn listed<V: Vector>(head: Head<'_>, rows: Range<usize>, list: &'a mut [*const u8; KV_TILE]) -> Self {
        let stride_bytes = head.row_bytes();
        let mut count = 0;
        for (bytes, rows) in head.runs(rows) {
            let first = bytes.as_ptr();
            // SAFETY: the caller vouches for the instructions.
            unsafe {
                V::prefetch(first);
                V::prefetch(first.wrapping_add(bytes.len() - 1));
            }
            for (index, place) in list[count..count + rows].iter_mut().enumerate() {
                *place = first.wrapping_add(index * stride_bytes);
            }
            count += rows;
        }
        Self { addresses: Listed(&list[..count]), count, columns: head.columns() }
    }
}

impl<A: Addresses> Rows<A> {
    /// Address of an element.
    ///
    /// # Safety
    ///
    /// The element is there.
    #[inline(always)]
    unsafe fn at(self, row: usize, byte: usize) -> *const u8 {
        // SAFETY: the caller vouches that it lies within the tensor.
        unsafe { self.addresses.get(row).unwrap_unchecked().add(byte) }
    }

    /// Prefetches a row.
    ///
    /// # Safety
    ///
    /// The processor has the instructions of `V`.
    #[inline(always)]
    unsafe fn prefetch<V: Vector>(self, dtype: DType, row: usize) {
        let Some(address) = self.addresses.get(row) else { return };
        for byte in (0..self.columns * dtype.size_bytes()).step_by(CacheLines::SIZE) {
            // SAFETY: the caller vouches for the instructions.
            unsafe { V::prefetch(address.wrapping_add(byte)) };
        }
    }

    /// Loads the columns from `first` on, one by one.
    #[inline(always)]
    fn rest<R: Real>(self, dtype: DType, row: usize, first: usize, rest: &mut [R; MAX_LANES]) {
        let (count, size) = (self.columns - first, dtype.size_bytes());
        // SAFETY: the row has all of its columns.
        let bytes = unsafe { std::slice::from_raw_parts(self.at(row, first * size), count * size) };
        convert::load(dtype, bytes, &mut rest[..count]);
    }
}

/// `scores[row][key] = factor * dot(query[row], key)`, while prefetching `next`. Returns the rows.
///
/// # Safety
///
/// The processor has the instructions of `V`, and there are `ROWS` rows of queries and scores.
#[inline(always)]
unsafe fn dot_products<V: Vector, A: Addresses, const ROWS: usize>(
    dtype: DType,
    key: Rows<A>,
    next: Option<Rows<A>>,
    query: &[V::Real],
    factor: V::Real,
    scores: &mut [V::Real],
) -> usize {
    let mut first = 0;
    while first < key.count {
        if let Some(next) = next {
            for row in first..first + 4 {
                // SAFETY: the caller vouches for the instructions.
                unsafe { next.prefetch::<V>(dtype, row) };
            }
        }
        // SAFETY: the caller vouches for the rows, and what remains of the keys is at least as much as is chosen here.
        first += unsafe {
            match key.count - first {
                4.. => dot_product_block::<V, A, ROWS, 4>(dtype, key, first, query, factor, scores),
                _ => dot_product_block::<V, A, ROWS, 1>(dtype, key, first, query, factor, scores),
            }
        };
    }
    ROWS
}

/// Dot products of `ROWS` rows and `KEYS` keys, whose sums stay in registers. Returns the keys.
///
/// # Safety
///
/// As [`dot_products`], and `KEYS` keys are left from `first` on.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "rows and keys count registers and addresses alike")]
unsafe fn dot_product_block<V: Vector, A: Addresses, const ROWS: usize, const KEYS: usize>(
    dtype: DType,
    key: Rows<A>,
    first: usize,
    query: &[V::Real],
    factor: V::Real,
    scores: &mut [V::Real],
) -> usize {
    let (columns, size) = (key.columns, dtype.size_bytes());
    let whole = columns - columns % V::LANES;
    // SAFETY: the caller vouches for rows and keys, and columns up to `whole` are whole vectors.
    unsafe {
        let mut sums = [[V::splat(V::Real::ZERO); ROWS]; KEYS];
        for column in (0..whole).step_by(V::LANES) {
            let mut factors = [V::splat(V::Real::ZERO); ROWS];
            for row in 0..ROWS {
                factors[row] = V::load(query.as_ptr().add(row * columns + column));
            }
            for index in 0..KEYS {
                let elements = V::widen(dtype, key.at(first + index, column * size));
                for row in 0..ROWS {
                    sums[index][row] = elements.mul_add(factors[row], sums[index][row]);
                }
            }
        }
        for index in 0..KEYS {
            let mut rest = [V::Real::ZERO; MAX_LANES];
            if whole < columns {
                key.rest(dtype, first + index, whole, &mut rest);
            }
            for row in 0..ROWS {
                let mut sum = sums[index][row].sum();
                for (column, &element) in (whole..columns).zip(&rest) {
                    sum += element * query[row * columns + column];
                }
                scores[row * KV_TILE + first + index] = sum * factor;
            }
        }
    }
    KEYS
}

/// One step of the online softmax of a row: turns scores into weights, updates row max and row sum. Returns the row scale.
///
/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
unsafe fn online_softmax<V: Vector>(
    scores: &mut [V::Real],
    count: usize,
    row_max: &mut V::Real,
    row_sum: &mut V::Real,
) -> V::Real {
    const { assert!(KV_TILE.is_multiple_of(V::LANES)) };
    let padded = count.next_multiple_of(V::LANES);
    scores[count..padded].fill(V::Real::NEGATIVE_INFINITY);
    let scores = &mut scores[..padded];
    // SAFETY: the scores are whole vectors now.
    unsafe {
        let old = *row_max;
        let mut largest = V::splat(old);
        for place in scores.chunks_exact(V::LANES) {
            largest = V::load(place.as_ptr()).max(largest);
        }
        let new = largest.largest();
        let shift = V::splat(finite_shift(new));
        let mut added = V::splat(V::Real::ZERO);
        for place in scores.chunks_exact_mut(V::LANES) {
            let weight = V::load(place.as_ptr()).sub(shift).exp2();
            weight.store(place.as_mut_ptr());
            added = added.add(weight);
        }
        let row_scale = row_scale(old, new);
        *row_sum = *row_sum * row_scale + added.sum();
        *row_max = new;
        row_scale
    }
}

/// `output[row] = output[row] * row_scale[row] + weights[row] * values`, while prefetching `next`. Returns the rows.
///
/// # Safety
///
/// The processor has the instructions of `V`, and there are `ROWS` rows of weights, row scales and outputs.
#[inline(always)]
unsafe fn add_values<V: Vector, A: Addresses, const ROWS: usize, const VECTORS: usize>(
    dtype: DType,
    value: Rows<A>,
    next: Option<Rows<A>>,
    weights: &[V::Real],
    row_scales: &[V::Real],
    output: &mut [V::Real],
) -> usize {
    let (columns, vectors) = (value.columns, value.columns / V::LANES);
    let mut vector = 0;
    while vector < vectors {
        let column = vector * V::LANES;
        let next = next.filter(|_| vector == 0);
        // SAFETY: the caller vouches for the rows, and what remains of the vectors is at least what is chosen here.
        vector += unsafe {
            match vectors - vector {
                rest if rest >= VECTORS => {
                    add_value_block::<V, A, ROWS, VECTORS>(dtype, value, next, column, weights, row_scales, output)
                }
                4.. => add_value_block::<V, A, ROWS, 4>(dtype, value, next, column, weights, row_scales, output),
                2.. => add_value_block::<V, A, ROWS, 2>(dtype, value, next, column, weights, row_scales, output),
                _ => add_value_block::<V, A, ROWS, 1>(dtype, value, next, column, weights, row_scales, output),
            }
        };
    }
    let whole = vectors * V::LANES;
    if whole < columns {
        let mut rest = [V::Real::ZERO; MAX_LANES];
        for row in 0..ROWS {
            for place in &mut output[row * columns + whole..(row + 1) * columns] {
                *place *= row_scales[row];
            }
        }
        for key in 0..value.count {
            value.rest(dtype, key, whole, &mut rest);
            for row in 0..ROWS {
                let weight = weights[row * KV_TILE + key];
                for (place, &element) in output[row * columns + whole..(row + 1) * columns].iter_mut().zip(&rest) {
                    *place += weight * element;
                }
            }
        }
    }
    ROWS
}

/// Adds to `VECTORS` vectors of columns of `ROWS` rows, whose sums stay in registers. Returns the vectors.
///
/// # Safety
///
/// As [`add_values`], and `VECTORS` vectors are left from `column` on.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "rows and vectors count registers and addresses alike")]
unsafe fn add_value_block<V: Vector, A: Addresses, const ROWS: usize, const VECTORS: usize>(
    dtype: DType,
    value: Rows<A>,
    next: Option<Rows<A>>,
    column: usize,
    weights: &[V::Real],
    row_scales: &[V::Real],
    output: &mut [V::Real],
) -> usize {
    let (columns, size) = (value.columns, dtype.size_bytes());
    // SAFETY: the caller vouches for rows and columns.
    unsafe {
        let mut sums = [[V::splat(V::Real::ZERO); VECTORS]; ROWS];
        for key in 0..value.count {
            if let Some(next) = next {
                next.prefetch::<V>(dtype, key);
            }
            let mut factors = [V::splat(V::Real::ZERO); ROWS];
            for row in 0..ROWS {
                factors[row] = V::splat(*weights.as_ptr().add(row * KV_TILE + key));
            }
            for vector in 0..VECTORS {
                let elements = V::widen(dtype, value.at(key, (column + vector * V::LANES) * size));
                for row in 0..ROWS {
                    sums[row][vector] = elements.mul_add(factors[row], sums[row][vector]);
                }
            }
        }
        // The output so far is added last, so that a long sum is one of sums of single tiles and rounds less often.
        for row in 0..ROWS {
            let row_scale = V::splat(row_scales[row]);
            for vector in 0..VECTORS {
                let place = output.as_mut_ptr().add(row * columns + column + vector * V::LANES);
                V::load(place).mul_add(row_scale, sums[row][vector]).store(place);
            }
        }
    }
    VECTORS
}
