//! Packing of `bf16` elements in pairs (VNNI layout), as the products of both bf16 levels read them.
//!
//! A pair is two elements that one instruction multiplies and adds together, in 32 bits: two neighbouring columns of both
//! operands, or two neighbouring rows of a transposed operand and its weights. A slab is a slice of the depth: sixteen pairs
//! of each row of a left operand, row after row of 64 bytes, so that sixteen rows of it fill a tile register.
//!
//! | operand | layout |
//! |---|---|
//! | right | pairs of columns, a row of `lanes` for each |
//! | left | slabs of 32 columns, a row for each row |
//! | left, transposed | slabs of 32 rows, a row for each column |
//! | weights | pairs of rows, a row of `lanes` for each |

use crate::microkernel::head::Head;
use crate::microkernel::padded;
use core::arch::x86_64::{
    __m512i, _mm512_and_si512, _mm512_castps_si512, _mm512_castsi512_ps, _mm512_cmpge_epu16_mask,
    _mm512_cmplt_epu16_mask, _mm512_mask_blend_epi16, _mm512_maskz_loadu_epi16, _mm512_max_epu16, _mm512_min_epu16,
    _mm512_mul_ps, _mm512_reduce_max_epu32, _mm512_set1_epi16, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_si512,
    _mm512_shuffle_i32x4, _mm512_slli_epi32, _mm512_srli_epi32, _mm512_storeu_si512, _mm512_sub_epi16,
    _mm512_unpackhi_epi16, _mm512_unpackhi_epi32, _mm512_unpackhi_epi64, _mm512_unpacklo_epi16, _mm512_unpacklo_epi32,
    _mm512_unpacklo_epi64,
};
use std::ops::Range;

/// Pairs of a row of a slab.
pub(crate) const PAIRS: usize = 16;
/// Elements of a row of a slab.
pub(crate) const DEPTH: usize = 2 * PAIRS;
/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// Header of a transposed operand: nonzero if its elements are tiny, below [`TINY`].
pub(crate) const HEADER: usize = PAIRS;

/// Bits of 2^-62. The products flush subnormal elements, products and sums to zero; elements none of which reaches this are
/// packed times [`TINY_FACTOR`], and their sums are divided by it.
const TINY: u16 = (127 - 62) << 7;
/// 2^64: the least subnormal, 2^-133, becomes 2^-69.
const TINY_FACTOR: f32 = 18_446_744_073_709_551_616.0;

/// Number of slabs that hold `depth` elements of a row.
pub(crate) const fn slabs(depth: usize) -> usize {
    depth.div_ceil(DEPTH)
}

/// Number of pairs of a right operand of `depth` columns.
pub(crate) const fn right_size(depth: usize, lanes: usize) -> usize {
    slabs(depth) * PAIRS * lanes
}

/// Number of pairs of a left operand of `depth` columns.
pub(crate) const fn left_size(depth: usize, rows: usize) -> usize {
    slabs(depth) * padded(rows, LANES) * PAIRS
}

/// Number of pairs of a transposed left operand, with its header.
pub(crate) const fn transposed_size(columns: usize, rows: usize) -> usize {
    HEADER + slabs(rows) * padded(columns, LANES) * PAIRS
}

/// Divisor of the products of a packed transposed operand, unless it is 1.
pub(crate) fn divisor(transposed: &[u32]) -> Option<f32> {
    (transposed[0] != 0).then_some(TINY_FACTOR)
}

/// Mask of the elements below `count` in a vector of `SIZE` elements that begins at `first`.
fn elements<const SIZE: usize>(first: usize, count: usize) -> u32 {
    ((1_u64 << count.saturating_sub(first).min(SIZE)) - 1) as u32
}

/// Address of the first element of a vector in a row of bytes. Where the row ends before it, no element of the vector is
/// read.
fn address(row: &[u8], first: usize) -> *const i16 {
    row.as_ptr().wrapping_add(2 * first).cast()
}

/// Extreme magnitudes of some rows.
pub(crate) struct Magnitudes {
    /// True if some element is subnormal, which the instructions would flush to zero.
    pub(crate) has_subnormal: bool,
    /// Bits of the largest. Infinities and NaNs are larger than all numbers.
    pub(crate) largest: u32,
}

/// Magnitudes of all elements of some rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(crate) fn magnitudes(head: Head<'_>, rows: Range<usize>) -> Magnitudes {
    const LARGEST_SUBNORMAL: i16 = 0x7F;
    let columns = head.columns();
    let (magnitude, one) = (_mm512_set1_epi16(0x7FFF), _mm512_set1_epi16(1));
    // The smallest of every element less one: zero becomes the largest number.
    let (mut largest, mut smallest) = (_mm512_setzero_si512(), _mm512_set1_epi16(-1));
    for row in rows {
        let row = head.row(row);
        for first in (0..columns).step_by(DEPTH) {
            // SAFETY: only elements that the row has are read.
            let vector = unsafe { _mm512_maskz_loadu_epi16(elements::<DEPTH>(first, columns), address(row, first)) };
            let vector = _mm512_and_si512(vector, magnitude);
            largest = _mm512_max_epu16(largest, vector);
            smallest = _mm512_min_epu16(smallest, _mm512_sub_epi16(vector, one));
        }
    }
    let has_subnormal = _mm512_cmplt_epu16_mask(smallest, _mm512_set1_epi16(LARGEST_SUBNORMAL));
    let lower = _mm512_and_si512(largest, _mm512_set1_epi32(0xFFFF));
    let largest = _mm512_reduce_max_epu32(lower).max(_mm512_reduce_max_epu32(_mm512_srli_epi32::<16>(largest)));
    Magnitudes { has_subnormal: has_subnormal != 0, largest }
}

/// Packs a right operand. Lanes without a row, and columns that only pad, are zero.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(crate) fn pack_right(head: Head<'_>, rows: Range<usize>, lanes: usize, packed: &mut [u32]) {
    let columns = head.columns();
    for (slab, pairs) in packed.chunks_exact_mut(PAIRS * lanes).take(slabs(columns)).enumerate() {
        let mask = elements::<DEPTH>(slab * DEPTH, columns);
        for first_lane in (0..lanes).step_by(LANES) {
            let mut block = [_mm512_setzero_si512(); LANES];
            for (vector, row) in block.iter_mut().zip(rows.clone().skip(first_lane)) {
                // SAFETY: only elements that the row has are read.
                *vector = unsafe { _mm512_maskz_loadu_epi16(mask, address(head.row(row), slab * DEPTH)) };
            }
            for (place, vector) in pairs[first_lane..].chunks_mut(lanes).zip(transposed(&block)) {
                store(vector, &mut place[..PAIRS]);
            }
        }
    }
}

/// Packs a left operand. Columns that only pad are zero; rows that only pad are undefined.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(crate) fn pack_left(head: Head<'_>, rows: Range<usize>, packed: &mut [u32]) {
    let columns = head.columns();
    let slab_size = packed.len() / slabs(columns);
    for (slab, places) in packed.chunks_exact_mut(slab_size).enumerate() {
        let mask = elements::<DEPTH>(slab * DEPTH, columns);
        for (place, row) in places.chunks_exact_mut(PAIRS).zip(rows.clone()) {
            // SAFETY: only elements that the row has are read.
            let vector = unsafe { _mm512_maskz_loadu_epi16(mask, address(head.row(row), slab * DEPTH)) };
            store(vector, place);
        }
    }
}

/// Packs a left operand, transposed. Columns and rows that only pad are zero.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(crate) fn pack_transposed(head: Head<'_>, rows: Range<usize>, packed: &mut [u32]) {
    let columns = head.columns();
    let is_tiny = are_tiny(head, rows.clone());
    let (header, slabs) = packed.split_at_mut(HEADER);
    header.fill(u32::from(is_tiny));
    let slab_size = padded(columns, LANES) * PAIRS;
    for (slab, first_row) in slabs.chunks_exact_mut(slab_size).zip(rows.clone().step_by(DEPTH)) {
        let rows = first_row..rows.end.min(first_row + DEPTH);
        for (places, first_column) in slab.chunks_mut(DEPTH * PAIRS).zip((0..columns).step_by(DEPTH)) {
            if is_tiny {
                pack_columns(head, rows.clone(), first_column, places, |row| times(row, TINY_FACTOR));
            } else {
                pack_columns(head, rows.clone(), first_column, places, |row| row);
            }
        }
    }
}

/// Packs up to 32 columns of up to 32 rows, each row as `change` makes it.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
fn pack_columns(
    head: Head<'_>,
    rows: Range<usize>,
    first_column: usize,
    places: &mut [u32],
    change: impl Fn(__m512i) -> __m512i,
) {
    let mask = elements::<DEPTH>(first_column, head.columns());
    let row = |row: usize| {
        if row >= rows.end {
            return _mm512_setzero_si512();
        }
        // SAFETY: only elements that the row has are read.
        change(unsafe { _mm512_maskz_loadu_epi16(mask, address(head.row(row), first_column)) })
    };
    let mut low = [_mm512_setzero_si512(); LANES];
    let mut high = low;
    for (pair, (low, high)) in low.iter_mut().zip(&mut high).enumerate() {
        let (even, odd) = (row(rows.start + 2 * pair), row(rows.start + 2 * pair + 1));
        *low = _mm512_unpacklo_epi16(even, odd);
        *high = _mm512_unpackhi_epi16(even, odd);
    }
    // Of eight columns in a row, the first four are in `low`, the others in `high`.
    for (half, pairs) in [low, high].iter().enumerate() {
        for (index, vector) in transposed(pairs).into_iter().enumerate() {
            let column = index / 4 * 8 + half * 4 + index % 4;
            if let Some(place) = places.get_mut(column * PAIRS..(column + 1) * PAIRS) {
                store(vector, place);
            }
        }
    }
}

/// True if no element of some rows reaches [`TINY`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn are_tiny(head: Head<'_>, mut rows: Range<usize>) -> bool {
    let columns = head.columns();
    rows.all(|row| {
        (0..columns).step_by(DEPTH).all(|first| {
            let mask = elements::<DEPTH>(first, columns);
            // SAFETY: only elements that the row has are read.
            let vector = unsafe { _mm512_maskz_loadu_epi16(mask, address(head.row(row), first)) };
            let magnitude = _mm512_and_si512(vector, _mm512_set1_epi16(0x7FFF));
            _mm512_cmpge_epu16_mask(magnitude, _mm512_set1_epi16(TINY.cast_signed())) == 0
        })
    })
}

/// Multiplies elements by a power of two that leaves them numbers of 16 bits.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn times(elements: __m512i, factor: f32) -> __m512i {
    const ODD_ELEMENTS: u32 = 0xAAAA_AAAA;
    let product = |wide: __m512i| _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(wide), _mm512_set1_ps(factor)));
    let even = _mm512_srli_epi32::<16>(product(_mm512_slli_epi32::<16>(elements)));
    let odd = product(_mm512_and_si512(elements, _mm512_set1_epi32(0xFFFF_0000_u32.cast_signed())));
    _mm512_mask_blend_epi16(ODD_ELEMENTS, even, odd)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn store(vector: __m512i, place: &mut [u32]) {
    assert!(place.len() >= PAIRS, "a place too small for a row of a slab");
    // SAFETY: the place has room for the vector, as just asserted.
    unsafe { _mm512_storeu_si512(place.as_mut_ptr().cast(), vector) };
}

/// Transposes 16 by 16: element `j` of vector `i` becomes element `i` of vector `j`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
fn transposed(rows: &[__m512i; 16]) -> [__m512i; 16] {
    // Within each quarter of 128 bits, blocks of four by four.
    let mut quarters = [_mm512_setzero_si512(); 16];
    for block in 0..4 {
        let row = |index: usize| rows[4 * block + index];
        let (low, high) = (_mm512_unpacklo_epi32(row(0), row(1)), _mm512_unpackhi_epi32(row(0), row(1)));
        let (next_low, next_high) = (_mm512_unpacklo_epi32(row(2), row(3)), _mm512_unpackhi_epi32(row(2), row(3)));
        quarters[4 * block] = _mm512_unpacklo_epi64(low, next_low);
        quarters[4 * block + 1] = _mm512_unpackhi_epi64(low, next_low);
        quarters[4 * block + 2] = _mm512_unpacklo_epi64(high, next_high);
        quarters[4 * block + 3] = _mm512_unpackhi_epi64(high, next_high);
    }
    // Then the quarters: quarter `q` of `quarters[4 b + c]` holds rows `4 b` to `4 b + 3` of column `4 q + c`.
    let mut columns = [_mm512_setzero_si512(); 16];
    for column in 0..4 {
        let block = |index: usize| quarters[4 * index + column];
        let even = [
            _mm512_shuffle_i32x4::<0b10_00_10_00>(block(0), block(1)),
            _mm512_shuffle_i32x4::<0b10_00_10_00>(block(2), block(3)),
        ];
        let odd = [
            _mm512_shuffle_i32x4::<0b11_01_11_01>(block(0), block(1)),
            _mm512_shuffle_i32x4::<0b11_01_11_01>(block(2), block(3)),
        ];
        columns[column] = _mm512_shuffle_i32x4::<0b10_00_10_00>(even[0], even[1]);
        columns[8 + column] = _mm512_shuffle_i32x4::<0b11_01_11_01>(even[0], even[1]);
        columns[4 + column] = _mm512_shuffle_i32x4::<0b10_00_10_00>(odd[0], odd[1]);
        columns[12 + column] = _mm512_shuffle_i32x4::<0b11_01_11_01>(odd[0], odd[1]);
    }
    columns
}
