//! Epilogue pieces that the kernels share.

use flashcore_ir::types::{F32, Pred, U32};
use flashcore_ir::{Builder, Reg};

use super::TileContext;

/// Stores the LSE of a row that exists if `exists`. The lanes of a row have the same value; the one with `member` 0 stores
/// it.
pub(crate) fn store_lse(
    k: &mut Builder,
    context: &TileContext,
    (row, exists): (Reg<U32>, Reg<Pred>),
    member: Reg<U32>,
    lse: Reg<F32>,
) {
    let stores = k.eval(exists & member.eq(0));
    let address = context.lse_address(k, row);
    k.when(stores, |k| k.store_one(address, lse));
}
