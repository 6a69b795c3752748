//! AVX-512 BF16 products: each instruction (`VDPBF16PS`) multiplies sixteen pairs by one, and adds.

use crate::bf16::pack::{LANES, PAIRS};
use crate::bf16::{Bf16Kernel, PairMultiplier, PairProduct};
use crate::driver::once::Once;
use crate::simd::level::Level;
use core::arch::x86_64::{
    __m512bh, __m512i, _mm512_dpbf16_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_set1_epi32, _mm512_setzero_ps,
    _mm512_setzero_si512, _mm512_storeu_ps,
};

/// A witness that the processor has AVX-512 BF16.
pub(crate) struct DotProducts(());

/// `None` if the processor lacks something.
pub(crate) fn detect() -> Option<Bf16Kernel<DotProducts>> {
    static IS_THERE: Once<bool> = Once::new();
    IS_THERE.get(|| Level::Avx512Bf16.missing().is_empty()).then_some(DotProducts(())).and_then(Bf16Kernel::new)
}

/// As in the kernel for `f32`: twelve rows by two vectors are 24 sums, with the factors 27 of 32 registers.
const ROWS: usize = 12;

impl PairMultiplier for DotProducts {
    const PANEL_LANES: usize = 2 * LANES;
    const TILE_ROWS: usize = crate::attend::blocked::KV_TILE;

    unsafe fn multiply(&self, product: PairProduct) {
        // SAFETY: `self` is a witness of the processor's features, and the caller vouches for the operands.
        unsafe { multiply(product) }
    }
}

/// Multiplies in blocks whose sums stay in registers.
///
/// # Safety
///
/// As [`PairMultiplier::multiply`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn multiply(product: PairProduct) {
    let mut lane = 0;
    while lane < product.lanes {
        let is_pair = product.lanes - lane >= 2 * LANES;
        let mut row = 0;
        while row < product.rows {
            let rows = (product.rows - row).min(ROWS);
            // SAFETY: the block lies within the operands: rows are a multiple of four and lanes of sixteen, and what
            // remains of them is at least as large as the block chosen here.
            unsafe {
                match (rows, is_pair) {
                    (ROWS, true) => block::<ROWS, 2>(&product, row, lane),
                    (ROWS, false) => block::<ROWS, 1>(&product, row, lane),
                    (8, true) => block::<8, 2>(&product, row, lane),
                    (8, false) => block::<8, 1>(&product, row, lane),
                    (_, true) => block::<4, 2>(&product, row, lane),
                    (_, false) => block::<4, 1>(&product, row, lane),
                }
            }
            row += rows;
        }
        lane += if is_pair { 2 * LANES } else { LANES };
    }
}

/// Multiplies the part of a product whose sums stay in registers.
///
/// # Safety
///
/// As [`PairMultiplier::multiply`], and there are `ROW_COUNT` rows from `row` on and `VECTORS` vectors from `lane` on.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
#[expect(clippy::needless_range_loop, reason = "rows and vectors count registers and addresses alike")]
unsafe fn block<const ROW_COUNT: usize, const VECTORS: usize>(product: &PairProduct, row: usize, lane: usize) {
    let lanes = product.stride;
    let mut sums = [[_mm512_setzero_ps(); VECTORS]; ROW_COUNT];
    // SAFETY: the caller vouches that the block lies within the operands, which is all that is touched.
    unsafe {
        let place = product.product.add(row * lanes + lane);
        if product.adds {
            for index in 0..ROW_COUNT {
                for vector in 0..VECTORS {
                    sums[index][vector] = _mm512_loadu_ps(place.add(index * lanes + vector * LANES));
                }
            }
        }
        for slab in 0..product.slabs {
            let left = product.left.add(slab * product.slab_size + row * PAIRS);
            let right = product.right.add(slab * PAIRS * lanes + lane);
            for pair in 0..PAIRS {
                let mut factors = [_mm512_setzero_si512(); VECTORS];
                for vector in 0..VECTORS {
                    factors[vector] = _mm512_loadu_si512(right.add(pair * lanes + vector * LANES).cast());
                }
                for index in 0..ROW_COUNT {
                    let element = pairs(_mm512_set1_epi32(*left.add(index * PAIRS + pair) as i32));
                    for vector in 0..VECTORS {
                        sums[index][vector] = _mm512_dpbf16_ps(sums[index][vector], element, pairs(factors[vector]));
                    }
                }
            }
        }
        for index in 0..ROW_COUNT {
            for vector in 0..VECTORS {
                _mm512_storeu_ps(place.add(index * lanes + vector * LANES), sums[index][vector]);
            }
        }
    }
}

/// Reinterprets bits as pairs of `bf16`.
fn pairs(bits: __m512i) -> __m512bh {
    // SAFETY: both are 512 bits, and every pattern of them is a value of each.
    unsafe { core::mem::transmute(bits) }
}
