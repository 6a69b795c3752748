//! The loops of [decoding](crate::attend::decode): vectors along the columns of keys and values, a few keys or columns at
//! a time.

#![expect(clippy::inline_always, reason = "instructions of a level must end up in its functions")]

use crate::attend::decode::{DecodeTile, FarRows, KV_TILE, MAX_ROWS, PrefetchRows, WhileAdding};
use crate::attend::softmax::{finite_shift, row_scale};
use crate::microkernel::convert;
use crate::microkernel::head::Head;
use crate::microkernel::lookahead::{FarLines, LineList, Lookahead, NextRows, RowList};
use crate::microkernel::prefetch::CacheLines;
use crate::microkernel::score::modify_row;
use crate::simd::real::Real;
use crate::simd::vector::{MAX_LANES, Vector};
use flashcore_problem::DType;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Attends a tile with a few query rows; see [`Decode::decode_tile`](super::Decode::decode_tile).
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
        let mut lists = [[MaybeUninit::uninit(); KV_TILE]; 2];
        let [of_keys, of_values] = &mut lists;
        attend_rows::<V>(tile, Rows::new(key, keys.clone(), of_keys), Rows::new(value, keys, of_values));
    }
}

/// Attends a tile whose keys and values are at these addresses.
///
/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
unsafe fn attend_rows<V: Vector>(tile: &mut DecodeTile<'_, V::Real>, key: Rows<'_>, value: Rows<'_>) {
    // Once for each type, so that the innermost loops need not branch on it.
    // SAFETY: the caller vouches for the instructions.
    unsafe {
        match tile.key.dtype() {
            DType::F16 => attend_typed::<V>(DType::F16, tile, key, value),
            DType::Bf16 => attend_typed::<V>(DType::Bf16, tile, key, value),
            DType::F32 => attend_typed::<V>(DType::F32, tile, key, value),
            DType::F64 => attend_typed::<V>(DType::F64, tile, key, value),
            DType::E4m3 => attend_typed::<V>(DType::E4m3, tile, key, value),
            DType::E5m2 => attend_typed::<V>(DType::E5m2, tile, key, value),
        }
    }
}

/// Attends a tile whose elements are of type `dtype`.
///
/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
unsafe fn attend_typed<V: Vector>(dtype: DType, tile: &mut DecodeTile<'_, V::Real>, key: Rows<'_>, value: Rows<'_>) {
    // Every tile begins elsewhere than the last ended, where the hardware prefetcher does not see it coming.
    let mut lists: [RowList; 2] = [[MaybeUninit::uninit(); _]; 2];
    let [while_scoring, while_adding] = &mut lists;
    let keys = tile.keys.len();
    // SAFETY: the caller vouches for the instructions.
    unsafe {
        let adding = match &tile.prefetch.while_adding {
            WhileAdding::NextHead => {
                let bytes = key.columns * dtype.size_bytes();
                NextRows::listed(while_adding, keys, bytes, |row| key.row(row).wrapping_add(bytes))
            }
            WhileAdding::NextTile(rows) => NextRows::new::<V>(rows, keys, while_adding),
        };
        match &tile.prefetch.far {
            None => {
                let values = PrefetchRows { head: &tile.value, rows: tile.keys.clone() };
                let scoring = NextRows::new::<V>(&values, keys, while_scoring);
                attend_ahead::<V>(dtype, tile, key, value, [scoring, adding], FarLines::NONE);
            }
            Some(FarRows { rows, heads }) => {
                let mut list: LineList = [MaybeUninit::uninit(); _];
                let far = FarLines::new(rows, [&tile.key, &tile.value], *heads, &mut list);
                // Once more, since some of the lines that were prefetched a tile ago may have been dropped.
                let bytes = value.columns * dtype.size_bytes();
                let scoring = NextRows::listed(while_scoring, keys, bytes, |row| value.row(row));
                attend_ahead::<V>(dtype, tile, key, value, [scoring, adding], far);
            }
        }
    }
}

/// Attends a tile, while rows and lines are prefetched: rows while scores are computed, others while values are added, and
/// lines all the time.
///
/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
unsafe fn attend_ahead<V: Vector>(
    dtype: DType,
    tile: &mut DecodeTile<'_, V::Real>,
    key: Rows<'_>,
    value: Rows<'_>,
    [scoring, adding]: [NextRows<'_>; 2],
    far: FarLines<'_>,
) {
    let mut ahead = Lookahead { next: scoring, far };
    let (rows, count) = (tile.rows, tile.keys.len());
    let far_fours_of_row = ahead.far.count() / (8 * 4 * rows.max(1));
    assert!(rows <= MAX_ROWS && count <= KV_TILE && tile.query.len() >= rows * key.columns, "a tile of wrong size");
    assert!(
        tile.scores.len() >= rows * KV_TILE && tile.output.len() >= rows * value.columns,
        "scratch or an output of wrong size"
    );
    let mut row = 0;
    while row < rows {
        let query = &tile.query[row * key.columns..];
        let scores = &mut tile.scores[row * KV_TILE..];
        // SAFETY: what remains of the rows is at least as much as the block chosen here.
        row += unsafe {
            match rows - row {
                4.. => dot_products::<V, 4>(dtype, key, &mut ahead, query, tile.factor, scores),
                2.. => dot_products::<V, 2>(dtype, key, &mut ahead, query, tile.factor, scores),
                _ => dot_products::<V, 1>(dtype, key, &mut ahead, query, tile.factor, scores),
            }
        };
        ahead.next = NextRows::NOTHING;
    }
    ahead.next = adding;
    let mut row_scales = [V::Real::ONE; MAX_ROWS];
    for (row, row_scale) in row_scales.iter_mut().enumerate().take(rows) {
        let scores = &mut tile.scores[row * KV_TILE..(row + 1) * KV_TILE];
        // SAFETY: the caller vouches for the instructions.
        unsafe {
            if let Some(modifiers) = tile.modifiers {
                modify_row::<V>(modifiers.of_row(row, scores), count);
            }
            for _ in 0..far_fours_of_row {
                ahead.far.advance::<V, 4>();
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
        let weights = &tile.scores[row * KV_TILE..];
        let output = &mut tile.output[row * value.columns..];
        let row_scales = &row_scales[row..];
        // SAFETY: what remains of the rows is at least as much as the block chosen here.
        row += unsafe {
            match rows - row {
                4.. => add_values::<V, 4, 4>(dtype, value, &mut ahead, weights, row_scales, output),
                2.. => add_values::<V, 2, 8>(dtype, value, &mut ahead, weights, row_scales, output),
                _ => add_values::<V, 1, 8>(dtype, value, &mut ahead, weights, row_scales, output),
            }
        };
        ahead.next = NextRows::NOTHING;
    }
}

/// Some rows of keys or values in memory, each by its address. All elements of all rows can be read.
///
/// Rows that are equally far apart could do without a list, but loops for them were half of the time of a build and no
/// faster: each address is loaded once for all columns.
#[derive(Clone, Copy)]
struct Rows<'a> {
    /// All of them are written.
    addresses: &'a [MaybeUninit<*const u8>],
    columns: usize,
}

impl<'a> Rows<'a> {
    fn new(head: Head<'_>, rows: Range<usize>, list: &'a mut [MaybeUninit<*const u8>; KV_TILE]) -> Self {
        let stride_bytes = head.row_bytes();
        let mut count = 0;
        let mut add = |bytes: &[u8], rows: usize| {
            let first = bytes.as_ptr();
            for (index, place) in list[count..count + rows].iter_mut().enumerate() {
                place.write(first.wrapping_add(index.wrapping_mul(stride_bytes)));
            }
            count += rows;
        };
        match head.strided(&rows) {
            Some(bytes) => add(bytes, rows.len()),
            None => head.runs(rows).for_each(|(bytes, rows)| add(bytes, rows)),
        }
        Self { addresses: &list[..count], columns: head.columns() }
    }

    /// Number of rows.
    #[inline(always)]
    const fn count(self) -> usize {
        self.addresses.len()
    }

    /// Address of a row.
    ///
    /// # Safety
    ///
    /// There is such a row.
    #[inline(always)]
    unsafe fn row(self, row: usize) -> *const u8 {
        // SAFETY: the caller vouches that there is such a row, and all are written.
        unsafe { self.addresses.get_unchecked(row).assume_init() }
    }

    /// Address of an element.
    ///
    /// # Safety
    ///
    /// The element is there.
    #[inline(always)]
    unsafe fn at(self, row: usize, byte: usize) -> *const u8 {
        // SAFETY: the caller vouches that it lies within the tensor.
        unsafe { self.row(row).add(byte) }
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

/// `scores[row][key] = factor * dot(query[row], key)`, while prefetching `ahead`. Returns the rows.
///
/// # Safety
///
/// The processor has the instructions of `V`, and there are `ROWS` rows of queries and scores.
#[inline(always)]
unsafe fn dot_products<V: Vector, const ROWS: usize>(
    dtype: DType,
    key: Rows<'_>,
    ahead: &mut Lookahead<'_>,
    query: &[V::Real],
    factor: V::Real,
    scores: &mut [V::Real],
) -> usize {
    let mut first = 0;
    while first < key.count() {
        // SAFETY: the caller vouches for the rows, and what remains of the keys is at least as much as is chosen here.
        first += unsafe {
            match key.count() - first {
                4.. => dot_product_block::<V, ROWS, 4>(dtype, key, ahead, first, query, factor, scores),
                _ => dot_product_block::<V, ROWS, 1>(dtype, key, ahead, first, query, factor, scores),
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
unsafe fn dot_product_block<V: Vector, const ROWS: usize, const KEYS: usize>(
    dtype: DType,
    key: Rows<'_>,
    ahead: &mut Lookahead<'_>,
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
            let byte = column * size;
            if byte.is_multiple_of(CacheLines::SIZE) {
                ahead.next.lines::<V, KEYS>(first, byte, 1);
            }
            // As many as the keys of this step.
            for _ in 0..(KEYS * V::LANES * size).div_ceil(2 * CacheLines::SIZE) {
                ahead.far.advance::<V, 2>();
            }
            let mut factors = [V::splat(V::Real::ZERO); ROWS];
            for row in 0..ROWS {
                factors[row] = V::load(query.as_ptr().add(row * columns + column));
            }
            for index in 0..KEYS {
                let elements = V::widen(dtype, key.at(first + index, byte));
                for row in 0..ROWS {
                    sums[index][row] = elements.mul_add(factors[row], sums[index][row]);
                }
            }
        }
        ahead.next.rest::<V, KEYS>(first, whole * size);
        ahead.far.advance::<V, 4>();
        // In a loop of its own, which is unrolled: else the sums would not stay in registers.
        let mut totals = [[V::Real::ZERO; ROWS]; KEYS];
        for index in 0..KEYS {
            for row in 0..ROWS {
                totals[index][row] = sums[index][row].sum();
            }
        }
        for index in 0..KEYS {
            let mut rest = [V::Real::ZERO; MAX_LANES];
            if whole < columns {
                key.rest(dtype, first + index, whole, &mut rest);
            }
            for row in 0..ROWS {
                let mut sum = totals[index][row];
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

/// `output[row] = output[row] * row_scale[row] + weights[row] * values`, while prefetching `ahead`. Returns the rows.
///
/// # Safety
///
/// The processor has the instructions of `V`, and there are `ROWS` rows of weights, row scales and outputs.
#[inline(always)]
unsafe fn add_values<V: Vector, const ROWS: usize, const VECTORS: usize>(
    dtype: DType,
    value: Rows<'_>,
    ahead: &mut Lookahead<'_>,
    weights: &[V::Real],
    row_scales: &[V::Real],
    output: &mut [V::Real],
) -> usize {
    let (columns, vectors) = (value.columns, value.columns / V::LANES);
    let mut vector = 0;
    while vector < vectors {
        let column = vector * V::LANES;
        // SAFETY: the caller vouches for the rows, and what remains of the vectors is at least what is chosen here.
        vector += unsafe {
            match vectors - vector {
                rest if rest >= VECTORS => {
                    add_value_block::<V, ROWS, VECTORS>(dtype, value, ahead, column, weights, row_scales, output)
                }
                4.. => add_value_block::<V, ROWS, 4>(dtype, value, ahead, column, weights, row_scales, output),
                2.. => add_value_block::<V, ROWS, 2>(dtype, value, ahead, column, weights, row_scales, output),
                _ => add_value_block::<V, ROWS, 1>(dtype, value, ahead, column, weights, row_scales, output),
            }
        };
    }
    let whole = vectors * V::LANES;
    for key in 0..value.count() {
        // SAFETY: the caller vouches for the instructions.
        unsafe { ahead.next.rest::<V, 1>(key, whole * dtype.size_bytes()) };
    }
    if whole < columns {
        let mut rest = [V::Real::ZERO; MAX_LANES];
        for row in 0..ROWS {
            for place in &mut output[row * columns + whole..(row + 1) * columns] {
                *place *= row_scales[row];
            }
        }
        for key in 0..value.count() {
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
unsafe fn add_value_block<V: Vector, const ROWS: usize, const VECTORS: usize>(
    dtype: DType,
    value: Rows<'_>,
    ahead: &mut Lookahead<'_>,
    column: usize,
    weights: &[V::Real],
    row_scales: &[V::Real],
    output: &mut [V::Real],
) -> usize {
    let (columns, size) = (value.columns, dtype.size_bytes());
    // The same columns of the next keys, as far as these begin a line.
    let (byte, lines) = (column * size, (VECTORS * V::LANES * size).div_ceil(CacheLines::SIZE));
    let next = if byte.is_multiple_of(CacheLines::SIZE) { ahead.next } else { NextRows::NOTHING };
    // SAFETY: the caller vouches for rows and columns.
    unsafe {
        let mut sums = [[V::splat(V::Real::ZERO); VECTORS]; ROWS];
        for key in 0..value.count() {
            next.lines::<V, 1>(key, byte, lines);
            for _ in 0..lines.div_ceil(2) {
                ahead.far.advance::<V, 1>();
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
