//! The bf16 levels, AVX-512 BF16 and AMX: one microkernel, with different instructions for the products.
//!
//! Weights are rounded to `bf16` before the PV product, which the other levels do not do; sums stay in `f32`. The weights
//! come from [`softmax`], or where the problem allows it from the faster [`softmax16`]. The instructions flush subnormal
//! elements and sums to zero: see [`pack`] for what keeps small values alive.

pub(crate) mod amx;
mod amx_fused;
#[cfg(test)]
mod amx_fused_tests;
pub(crate) mod avx512_bf16;
mod kernel;
mod pack;
mod softmax;
mod softmax16;
mod survey;
#[cfg(test)]
mod tests;

pub(crate) use kernel::Bf16Kernel;

/// `product = left * right`, or that added to the product so far, on packed pairs.
#[derive(Clone, Copy)]
pub(crate) struct PairProduct {
    /// Rows of `left` and of `product`; a multiple of 16.
    pub(crate) rows: usize,
    /// Columns of `right` and of `product`; a multiple of 16.
    pub(crate) lanes: usize,
    /// Elements from one row of `right` and of `product` to the next.
    pub(crate) stride: usize,
    /// Slabs of `left`; `right` has a row for each of their pairs.
    pub(crate) slabs: usize,
    /// The first row of the first slab.
    pub(crate) left: *const u32,
    /// Pairs from one slab to the next.
    pub(crate) slab_size: usize,
    pub(crate) right: *const u32,
    pub(crate) product: *mut f32,
    pub(crate) adds: bool,
}

/// Instructions that multiply pairs. A value of it is a witness that the processor has them.
pub(crate) trait PairMultiplier: Sync {
    /// Query rows of a row panel: 32 or 64.
    const PANEL_LANES: usize;
    /// Keys of one tile.
    const TILE_ROWS: usize;
    /// True if units of their own multiply while vectors compute the softmax, so that
    /// [`attend_fused`](Self::attend_fused) is there.
    const IS_FUSED: bool = false;

    /// Multiplies.
    ///
    /// # Safety
    ///
    /// All operands of the product are valid.
    unsafe fn multiply(&self, product: PairProduct);

    /// Attends full blocks in the interleaved pipeline.
    ///
    /// # Safety
    ///
    /// As [`amx_fused::attend`].
    unsafe fn attend_fused(&self, args: &amx_fused::FusedArgs) {
        let _ = args;
        unreachable!("only called where `IS_FUSED`");
    }

    /// Runs `work`, which multiplies, on this thread.
    fn on_thread(&self, work: impl FnOnce()) {
        work();
    }
}
