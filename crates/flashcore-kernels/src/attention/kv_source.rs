//! KV source: the address of key and value row `j`, computed here for every kernel.
//!
//! Keys and values are contiguous or strided: row `j` of a head lies `j` row strides from its first, whatever strides rows,
//! heads and batches have. Kernels with `cp.async` or plain loads take addresses from [`KvSource`], kernels with TMA take
//! coordinates from [`TmaKvSource`].

use flashcore_ir::types::{S32, U64};
use flashcore_ir::{Builder, Reg};

use super::TileContext;
use crate::parameters::Parameters;
use crate::primitives::{GlobalRows, TensorRows};

/// Addresses of the keys and values of one KV head of one batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KvSource {
    pub(crate) key: GlobalRows,
    pub(crate) value: GlobalRows,
}

impl KvSource {
    /// The source of a tile's KV head.
    pub(crate) fn new(k: &mut Builder, context: &TileContext) -> Self {
        let Parameters {
            key,
            key_batch_stride,
            key_head_stride,
            key_row_stride,
            value,
            value_batch_stride,
            value_head_stride,
            value_row_stride,
            ..
        } = context.parameters;
        let first_key = context.matrix(k, key, key_batch_stride, key_head_stride, context.kv_head);
        let first_value = context.matrix(k, value, value_batch_stride, value_head_stride, context.kv_head);
        Self {
            key: context.rows(first_key, key_row_stride, context.specialization.head_dim),
            value: context.rows(first_value, value_row_stride, context.specialization.value_dim),
        }
    }

    /// The rows from a key on, loaded in vectors of at most `vec_bytes` bytes.
    pub(crate) fn starting_at(self, k: &mut Builder, first_key: Reg<S32>, vec_bytes: u32) -> Self {
        let [key, value] = [self.key, self.value].map(|rows| {
            let first = k.eval(first_key.unsigned().widen().mul_add(rows.stride, rows.first));
            GlobalRows { first, vec_bytes: rows.vec_bytes.min(vec_bytes), ..rows }
        });
        Self { key, value }
    }
}

/// TMA coordinates of the keys and values of one KV head of one batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TmaKvSource {
    pub(crate) head: Reg<S32>,
    pub(crate) batch: Reg<S32>,
    /// The L2 policy: every tile of query rows of a head reads its keys and values again.
    pub(crate) policy: Reg<U64>,
}

impl TmaKvSource {
    /// The rows of the tensor of `map` from a key on.
    pub(crate) const fn rows(self, map: Reg<U64>, first_key: Reg<S32>) -> TensorRows {
        TensorRows { map, row: first_key, head: self.head, batch: self.batch, policy: Some(self.policy) }
    }
}
