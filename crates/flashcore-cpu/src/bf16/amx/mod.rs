//! AMX products: each instruction (`TDPBF16PS`) multiplies sixteen rows of sixteen pairs by as many, and adds.

mod detect;
mod tiles;

use crate::bf16::pack::{LANES, PAIRS};
use crate::bf16::{Bf16Kernel, PairMultiplier, PairProduct, amx_fused};
use crate::driver::once::Once;
use crate::simd::level::Level;
use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
use tiles::{Block, ROW_BYTES, with_tiles};

pub(crate) use detect::missing;

/// A witness that this process may use tile registers, and that the processor has AVX-512 BF16.
pub(crate) struct TileProducts(());

/// `None` if the machine lacks something.
pub(crate) fn detect() -> Option<Bf16Kernel<TileProducts>> {
    static IS_THERE: Once<bool> = Once::new();
    IS_THERE.get(|| Level::Amx.missing().is_empty()).then_some(TileProducts(())).and_then(Bf16Kernel::new)
}

/// Multiplies for about a millisecond, where [`Level::Amx`] lacks nothing, and returns how many multiply-adds that was.
pub(crate) fn multiply_adds() -> usize {
    const ROUNDS: usize = 1 << 16;
    // SAFETY: the caller has checked that the level lacks nothing.
    unsafe { with_tiles(|tiles| tiles.multiply_in_place(ROUNDS)) }
}

impl PairMultiplier for TileProducts {
    /// Keys and values come from the second-level cache once for each row panel, but query and output of a wider one leave too
    /// little of the first: 64 rows were a sixth slower.
    const PANEL_LANES: usize = 2 * LANES;
    const TILE_ROWS: usize = 128;
    const IS_FUSED: bool = true;

    unsafe fn multiply(&self, product: PairProduct) {
        let lane_bytes = product.stride * size_of::<f32>();
        let block_at = |row: usize, lane: usize| Block {
            left: product.left.wrapping_add(row * PAIRS).cast(),
            left_stride: ROW_BYTES,
            left_step: product.slab_size * size_of::<u32>(),
            right: product.right.wrapping_add(lane).cast(),
            right_stride: lane_bytes,
            product: product.product.wrapping_add(row * product.stride + lane).cast(),
            product_stride: lane_bytes,
            steps: product.slabs,
            adds: product.adds,
        };
        // SAFETY: `self` is a witness that tiles may be used. Rows and lanes are multiples of sixteen, blocks lie within
        // them, and the caller vouches for the operands.
        unsafe {
            with_tiles(|tiles| {
                // All lanes of some rows, so that these come into the first-level cache once.
                for row in (0..product.rows).step_by(2 * LANES) {
                    prefetch(product, row + 2 * LANES);
                    for lane in (0..product.lanes).step_by(2 * LANES) {
                        if product.lanes - lane >= 2 * LANES && product.rows - row >= 2 * LANES {
                            tiles.multiply_32_by_32(block_at(row, lane));
                            continue;
                        }
                        for row in (row..product.rows.min(row + 2 * LANES)).step_by(LANES) {
                            for lane in (lane..product.lanes.min(lane + 2 * LANES)).step_by(LANES) {
                                tiles.multiply_16_by_16(block_at(row, lane));
                            }
                        }
                    }
                }
            });
        }
    }

    unsafe fn attend_fused(&self, args: &amx_fused::FusedArgs) {
        // SAFETY: `self` is a witness that tiles may be used, and the caller vouches for the rest.
        unsafe { with_tiles(|tiles| amx_fused::attend(tiles, args)) }
    }

    fn on_thread(&self, work: impl FnOnce()) {
        // SAFETY: `self` is a witness that tiles may be used.
        unsafe { with_tiles(|_| work()) }
    }
}

/// Prefetches the left factor of the rows from `row` on into the first-level cache.
fn prefetch(product: PairProduct, row: usize) {
    if row >= product.rows {
        return;
    }
    let rows = (product.rows - row).min(2 * LANES);
    for slab in 0..product.slabs {
        let first = product.left.wrapping_add(slab * product.slab_size + row * PAIRS);
        for index in 0..rows {
            // SAFETY: a hint that reads nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(first.wrapping_add(index * PAIRS).cast()) };
        }
    }
}
