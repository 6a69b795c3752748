//! Reduction of the KV splits of a CTA: the first split of each rows merges the partial results of the others.

use flashcore_ir::types::U32;
use flashcore_ir::{Builder, Compare, Reg};

use crate::primitives::{Accumulator, OnlineSoftmax};

/// Shared memory through which the warps of different splits exchange partial results.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SplitExchange {
    /// The address of this lane's words of split 1.
    pub(crate) address: Reg<U32>,
    /// Bytes from one split to the next.
    pub(crate) stride: u32,
}

impl SplitExchange {
    /// Reduces `num_splits` splits, of which this warp has `split`: all but the first store what they have, `sync` waits
    /// for them, and the first merges it.
    pub(crate) fn reduce_splits(
        self,
        k: &mut Builder,
        (split, num_splits): (Reg<U32>, u32),
        softmax: &OnlineSoftmax,
        output: &Accumulator,
        sync: impl FnOnce(&mut Builder),
    ) {
        let stores = k.compare(Compare::Gt, split, 0u32);
        k.if_uniform(stores, |k| {
            let address = k.eval((split - 1).mul_add(self.stride, self.address));
            softmax.store_partial(k, output, address);
        });
        sync(k);
        let merges = k.compare(Compare::Eq, split, 0u32);
        k.if_uniform(merges, |k| self.merge(k, 0, num_splits - 1, softmax, output));
    }

    /// Merges `count` partial results from `offset` bytes on.
    pub(crate) fn merge(self, k: &mut Builder, offset: u32, count: u32, softmax: &OnlineSoftmax, output: &Accumulator) {
        for index in 0..count {
            let address = k.add(self.address, offset + index * self.stride);
            softmax.merge_partial(k, output, address);
        }
    }
}
