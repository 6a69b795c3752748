//! The loops of [decoding](crate::attend::decode): vectors along the columns of keys and values, a few keys or columns at
//! a time.

#![expect(clippy::inline_always, reason = "instructions of a level must end up in its functions")]

use crate::attend::decode::{DecodeTile, KV_TILE, MAX_ROWS, PrefetchRows};
use crate::attend::softmax::{finite_shift, row_scale};
use crate::microkernel::convert;
use crate::microkernel::head::Head;
use crate::microkernel::prefetch::CacheLines;
use crate::microkernel::score::modify_row;
use crate::simd::real::Real;
use crate::simd::vector::{MAX_LANES, Vector};
use flashcore_problem::DType;
use std::mem::MaybeUninit;
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
            let (of_keys, of_values) = (Rows::strided(key, &keys), Rows::strided(value, &keys));
            attend_rows::<V, _>(tile, of_keys, of_values);
        } else {
            // Keys of several pages: the address of each.
            let mut lists = [[MaybeUninit::uninit(); KV_TILE]; 2];
            let [of_keys, of_values] = &mut lists;
            let of_keys = Rows::listed(key, keys.clone(), of_keys);
            let of_values = Rows::listed(value, keys, of_values);
            attend_rows::<V, _>(tile, of_keys, of_values);
        }
    }
}

/// Attends a tile whose keys and values are at these addresses.
///
/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
unsafe fn attend_rows<V: Vector, A: Addresses>(tile: &mut DecodeTile<'_, V::Real>, key: Rows<A>, value: Rows<A>) {
    // Once for each type, so that the innermost loops need not branch on it.
    // SAFETY: the caller vouches for the instructions.
    unsafe {
        match tile.key.dtype() {
            DType::F16 => attend_typed::<V, A>(DType::F16, tile, key, value),
            DType::Bf16 => attend_typed::<V, A>(DType::Bf16, tile, key, value),
            DType::F32 => attend_typed::<V, A>(DType::F32, tile, key, value),
            DType::F64 => attend_typed::<V, A>(DType::F64, tile, key, value),
            DType::E4m3 => attend_typed::<V, A>(DType::E4m3, tile, key, value),
            DType::E5m2 => attend_typed::<V, A>(DType::E5m2, tile, key, value),
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
) {
    // Every tile begins elsewhere than the last ended, where the hardware prefetcher does not see it coming.
    let [while_scoring, while_adding] = tile.prefetch.clone();
    // SAFETY: the caller vouches for the instructions.
    unsafe {
        if let (Some(scoring), Some(adding)) =
            (StridedLookahead::new(&while_scoring), StridedLookahead::new(&while_adding))
        {
            return attend_ahead::<V, A, _>(dtype, tile, key, value, [scoring, adding]);
        }
        let mut lists = [[MaybeUninit::uninit(); KV_TILE]; 2];
        let [scoring, adding] = &mut lists;
        let ahead = [Lookahead::new::<V>(&while_scoring, scoring), Lookahead::new::<V>(&while_adding, adding)];
        attend_ahead::<V, A, _>(dtype, tile, key, value, ahead);
    }
}

/// Attends a tile, with a prefetch while scores are computed and another while values are added.
///
/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
unsafe fn attend_ahead<V: Vector, A: Addresses, L: Prefetches>(
    dtype: DType,
    tile: &mut DecodeTile<'_, V::Real>,
    key: Rows<A>,
    value: Rows<A>,
    [while_scoring, while_adding]: [L; 2],
) {
    let (rows, count) = (tile.rows, tile.keys.len());
    assert!(rows <= MAX_ROWS && count <= KV_TILE && tile.query.len() >= rows * key.columns, "a tile of wrong size");
    assert!(
        tile.scores.len() >= rows * KV_TILE && tile.output.len() >= rows * value.columns,
        "scratch or an output of wrong size"
    );
    let mut row = 0;
    while row < rows {
        let next = (row == 0).then_some(while_scoring);
        let query = &tile.query[row * key.columns..];
        let scores = &mut tile.scores[row * KV_TILE..];
        // SAFETY: what remains of the rows is at least as much as the block chosen here.
        row += unsafe {
            match rows - row {
                4.. => dot_products::<V, A, L, 4>(dtype, key, next, query, tile.factor, scores),
                2.. => dot_products::<V, A, L, 2>(dtype, key, next, query, tile.factor, scores),
                _ => dot_products::<V, A, L, 1>(dtype, key, next, query, tile.factor, scores),
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
        let next = (row == 0).then_some(while_adding);
        let weights = &tile.scores[row * KV_TILE..];
        let output = &mut tile.output[row * value.columns..];
        let row_scales = &row_scales[row..];
        // SAFETY: what remains of the rows is at least as much as the block chosen here.
        row += unsafe {
            match rows - row {
                4.. => add_values::<V, A, L, 4, 4>(dtype, value, next, weights, row_scales, output),
                2.. => add_values::<V, A, L, 2, 8>(dtype, value, next, weights, row_scales, output),
                _ => add_values::<V, A, L, 1, 8>(dtype, value, next, weights, row_scales, output),
            }
        };
    }
}

/// Addresses of rows.
trait Addresses: Copy {
    /// Address of a row.
    ///
    /// # Safety
    ///
    /// There is such a row.
    unsafe fn get(self, row: usize) -> *const u8;
}

/// Addresses of rows that are equally far apart.
#[derive(Clone, Copy)]
struct Strided {
    first: *const u8,
    stride_bytes: usize,
}

impl Addresses for Strided {
    #[inline(always)]
    unsafe fn get(self, row: usize) -> *const u8 {
        self.first.wrapping_add(row * self.stride_bytes)
    }
}

/// An address for each row: all of them are written.
#[derive(Clone, Copy)]
struct Listed<'a>(&'a [MaybeUninit<*const u8>]);

impl Addresses for Listed<'_> {
    #[inline(always)]
    unsafe fn get(self, row: usize) -> *const u8 {
        // SAFETY: the caller vouches that there is such a row.
        unsafe { self.0.get_unchecked(row).assume_init() }
    }
}

/// Some rows of keys or values in memory. All elements of all rows can be read.
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
}

impl<'a> Rows<Listed<'a>> {
    /// Rows of several pages.
    fn listed(head: Head<'_>, rows: Range<usize>, list: &'a mut [MaybeUninit<*const u8>; KV_TILE]) -> Self {
        let stride_bytes = head.row_bytes();
        let mut count = 0;
        for (bytes, rows) in head.runs(rows) {
            let first = bytes.as_ptr();
            for (index, place) in list[count..count + rows].iter_mut().enumerate() {
                place.write(first.wrapping_add(index * stride_bytes));
            }
            count += rows;
        }
        Self { addresses: Listed(&list[..count]), count, columns: head.columns() }
    }
}

/// Software prefetch of as many pieces of memory as a tile has keys, one with every key: what is asked for at once keeps loads
/// from being served.
#[derive(Clone, Copy)]
struct Lookahead<'a> {
    /// All of them are written.
    pieces: &'a [MaybeUninit<*const u8>],
    /// Bytes of a piece that are prefetched.
    first: usize,
    end: usize,
}

impl<'a> Lookahead<'a> {
    /// Of rows, each of which is as many pieces as it has heads. Of each page the first and the last piece are prefetched at
    /// once: pages are anywhere in memory, and so their addresses are translated side by side, before any is waited for.
    ///
    /// # Safety
    ///
    /// The processor has the instructions of `V`.
    #[inline(always)]
    unsafe fn new<V: Vector>(of: &PrefetchRows<'_>, list: &'a mut [MaybeUninit<*const u8>; KV_TILE]) -> Self {
        let PrefetchRows { head, heads, rows } = of.clone();
        let (bytes, row_bytes) = (head.columns() * head.dtype().size_bytes(), head.row_bytes());
        let (mut count, mut row) = (0, rows.start);
        while row < rows.end
            && let Some(first) = head.address(row)
        {
            let of_page = head.rows_of_page_from(row).min(rows.end - row);
            let Some(pieces) = list.get_mut(count..count + of_page * heads) else { break };
            for (index, pieces) in pieces.chunks_exact_mut(heads).enumerate() {
                let row = first.wrapping_add(index.wrapping_mul(row_bytes));
                for (index, piece) in pieces.iter_mut().enumerate() {
                    piece.write(row.wrapping_add(index * bytes));
                }
            }
            if of_page < rows.len() {
                // SAFETY: the caller vouches for the instructions.
                unsafe {
                    V::prefetch(first);
                    let last_row = first.wrapping_add((of_page - 1).wrapping_mul(row_bytes));
                    V::prefetch(last_row.wrapping_add(heads * bytes - 1));
                }
            }
            (count, row) = (count + of_page * heads, row + of_page);
        }
        Self { pieces: &list[..count], first: 0, end: bytes }
    }
}

/// Prefetch of a piece of memory with every key.
trait Prefetches: Copy {
    /// One of so many parts of every piece, in whole cache lines.
    fn part(self, part: usize, parts: usize) -> Self;

    /// Prefetches the piece that goes with a key.
    ///
    /// # Safety
    ///
    /// The processor has the instructions of `V`.
    unsafe fn advance<V: Vector>(self, key: usize);
}

/// The bytes of one of so many parts of `bytes` bytes, in whole cache lines.
#[inline(always)]
fn part_of(bytes: usize, part: usize, parts: usize) -> (usize, usize) {
    let cut = |part: usize| (bytes * part / parts).next_multiple_of(CacheLines::SIZE).min(bytes);
    (cut(part), cut(part + 1))
}

impl Prefetches for Lookahead<'_> {
    #[inline(always)]
    fn part(self, part: usize, parts: usize) -> Self {
        let (first, end) = part_of(self.end, part, parts);
        Self { first, end, ..self }
    }

    #[inline(always)]
    unsafe fn advance<V: Vector>(self, key: usize) {
        let Some(piece) = self.pieces.get(key) else { return };
        // SAFETY: all of the pieces are written.
        let address = unsafe { piece.assume_init() };
        for byte in (self.first..self.end).step_by(CacheLines::SIZE) {
            // SAFETY: the caller vouches for the instructions.
            unsafe { V::prefetch(address.wrapping_add(byte)) };
        }
    }
}

/// Software prefetch of rows of one head that are equally far apart: no list of them is made.
#[derive(Clone, Copy)]
struct StridedLookahead {
    rows: Strided,
    first: usize,
    end: usize,
}

impl StridedLookahead {
    /// Of rows, if they are of one head and equally far apart.
    fn new(of: &PrefetchRows<'_>) -> Option<Self> {
        let PrefetchRows { head, heads, rows } = of.clone();
        let is_strided = heads == 1 && head.rows_of_page_from(rows.start) == usize::MAX;
        let first = head.address(rows.start).filter(|_| is_strided)?;
        let end = head.columns() * head.dtype().size_bytes();
        Some(Self { rows: Strided { first, stride_bytes: head.row_bytes() }, first: 0, end })
    }
}

impl Prefetches for StridedLookahead {
    #[inline(always)]
    fn part(self, part: usize, parts: usize) -> Self {
        let (first, end) = part_of(self.end, part, parts);
        Self { first, end, ..self }
    }

    #[inline(always)]
    unsafe fn advance<V: Vector>(self, key: usize) {
        let Strided { first, stride_bytes } = self.rows;
        let address = first.wrapping_add(key.wrapping_mul(stride_bytes));
        for byte in (self.first..self.end).step_by(CacheLines::SIZE) {
            // SAFETY: the caller vouches for the instructions.
            unsafe { V::prefetch(address.wrapping_add(byte)) };
        }
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
        unsafe { self.addresses.get(row).add(byte) }
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
unsafe fn dot_products<V: Vector, A: Addresses, L: Prefetches, const ROWS: usize>(
    dtype: DType,
    key: Rows<A>,
    next: Option<L>,
    query: &[V::Real],
    factor: V::Real,
    scores: &mut [V::Real],
) -> usize {
    let mut first = 0;
    while first < key.count {
        if let Some(next) = next {
            for key in first..first + 4 {
                // SAFETY: the caller vouches for the instructions.
                unsafe { next.advance::<V>(key) };
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
unsafe fn add_values<V: Vector, A: Addresses, L: Prefetches, const ROWS: usize, const VECTORS: usize>(
    dtype: DType,
    value: Rows<A>,
    next: Option<L>,
    weights: &[V::Real],
    row_scales: &[V::Real],
    output: &mut [V::Real],
) -> usize {
    let (columns, vectors) = (value.columns, value.columns / V::LANES);
    let mut vector = 0;
    while vector < vectors {
        let column = vector * V::LANES;
        // All passes over the keys take part: with only the first, memory has nothing to do in the others.
        let passes = vectors.div_ceil(VECTORS);
        let next = next.map(|next| next.part(vector / VECTORS, passes));
        // SAFETY: the caller vouches for the rows, and what remains of the vectors is at least what is chosen here.
        vector += unsafe {
            match vectors - vector {
                rest if rest >= VECTORS => {
                    add_value_block::<V, A, L, ROWS, VECTORS>(dtype, value, next, column, weights, row_scales, output)
                }
                4.. => add_value_block::<V, A, L, ROWS, 4>(dtype, value, next, column, weights, row_scales, output),
                2.. => add_value_block::<V, A, L, ROWS, 2>(dtype, value, next, column, weights, row_scales, output),
                _ => add_value_block::<V, A, L, ROWS, 1>(dtype, value, next, column, weights, row_scales, output),
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
unsafe fn add_value_block<V: Vector, A: Addresses, L: Prefetches, const ROWS: usize, const VECTORS: usize>(
    dtype: DType,
    value: Rows<A>,
    next: Option<L>,
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
                next.advance::<V>(key);
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
