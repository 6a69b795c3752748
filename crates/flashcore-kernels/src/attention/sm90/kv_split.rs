//! Split-KV within a CTA and within a cluster: warpgroups with the same rows and every second or fourth KV block each.

use flashcore_ir::types::{Pred, S32, U32};
use flashcore_ir::{Builder, Compare, Reg};

use super::{Cta, WARPGROUP};
use crate::attention::kv_range::KvBlockRange;
use crate::attention::split_kv::merge::SplitExchange;
use crate::config::HopperConfig;
use crate::primitives::{Accumulator, LANES, NamedBarrier, OnlineSoftmax};

/// Warps of a warpgroup.
const WARPS: u32 = WARPGROUP / LANES;
/// Bytes that a lane stores at a time.
const WORD_BYTES: u32 = 4;

/// The split of a consumer warpgroup.
#[derive(Debug, Clone, Copy)]
pub(super) struct KvSplit {
    /// The split among those of the CTA. KV blocks are dealt out to the CTAs of a cluster in turn, from the last on, and in
    /// a CTA to its splits.
    pub(super) split: Reg<U32>,
    /// The rank of the CTA in its cluster, where it has one.
    rank: Option<Reg<U32>>,
    ctas: u32,
    /// The rows of the warpgroup, among those of the CTA by 64.
    pub(super) row_group: Reg<U32>,
    /// The warp among those with rows of their own.
    pub(super) row_warp: Reg<U32>,
    /// The address of the lane's words of split 1.
    exchange: Reg<U32>,
}

impl KvSplit {
    pub(super) fn new(k: &mut Builder, cta: &Cta, warp: Reg<U32>, lane: Reg<U32>, warpgroup: Reg<U32>) -> Self {
        let splits = cta.config.kv_split_warpgroups;
        let row_group = k.div(warpgroup, splits);
        let split = k.rem(warpgroup, splits);
        let row_warp = k.eval(row_group.mul_add(WARPS, warp & (WARPS - 1)));
        let memory = k.add(cta.base, cta.shared.exchange);
        let exchange = k.eval(row_warp.mul_add(bytes_per_warp(cta), lane.mul_add(WORD_BYTES, memory)));
        let ctas = cta.config.cluster;
        let rank = (ctas > 1).then(|| k.cluster_rank());
        Self { split, rank, ctas, row_group, row_warp, exchange }
    }

    /// The last KV block of the split.
    pub(super) fn last_block(&self, k: &mut Builder, range: &KvBlockRange) -> Reg<S32> {
        let before = match self.rank {
            Some(rank) => k.mad(self.split, self.ctas, rank),
            None => self.split,
        };
        k.eval(range.last - before.signed())
    }

    /// True if the split has a KV block at all.
    pub(super) fn is_nonempty(&self, k: &mut Builder, range: &KvBlockRange) -> Reg<Pred> {
        let last = self.last_block(k, range);
        k.eval(last.ge(range.first) & range.nonempty)
    }

    /// The index of a thread among those of the same split.
    pub(super) fn thread(&self, k: &mut Builder, thread: Reg<U32>) -> Reg<U32> {
        k.eval(self.row_group.mul_add(WARPGROUP, thread & (WARPGROUP - 1)))
    }

    /// The named barrier of the warpgroups of the same split.
    pub(super) fn barrier(&self, k: &mut Builder) -> Reg<U32> {
        NamedBarrier::KvSplit.indexed(k, self.split)
    }

    /// True for the split that stores the rows.
    pub(super) fn is_first(&self, k: &mut Builder) -> Reg<Pred> {
        k.section("is first", |k| {
            let before = self.rank.map_or(self.split, |rank| k.or(self.split, rank));
            k.compare(Compare::Eq, before, 0u32)
        })
    }

    /// Merges, in the first split of each rows, the partial results of all splits.
    pub(super) fn reduce_splits(
        &self,
        k: &mut Builder,
        config: HopperConfig,
        softmax: &OnlineSoftmax,
        output: &Accumulator,
    ) {
        let splits = config.kv_split_warpgroups;
        let stride = config.row_groups() * WARPS * softmax.partial_bytes(output);
        let exchange = SplitExchange { address: self.exchange, stride };
        if splits > 1 {
            exchange.reduce_splits(k, (self.split, splits), softmax, output, |k| {
                k.barrier_sync(NamedBarrier::Consumers.id(), config.warpgroups * WARPGROUP);
            });
        }
        if let Some(rank) = self.rank {
            k.section("reduce cluster", |k| {
                self.reduce_cluster(k, rank, exchange, (splits - 1) * stride, softmax, output);
            });
        }
    }

    /// Merges, in the first CTA of the cluster, the partial results of the first splits of all, which they store in its
    /// shared memory (DSMEM) from `offset` on.
    fn reduce_cluster(
        &self,
        k: &mut Builder,
        rank: Reg<U32>,
        exchange: SplitExchange,
        offset: u32,
        softmax: &OnlineSoftmax,
        output: &Accumulator,
    ) {
        let is_first = k.compare(Compare::Eq, self.split, 0u32);
        // The CTA that is stored to has started.
        k.cluster_wait();
        let stores = k.eval(is_first & rank.gt(0));
        k.if_uniform(stores, |k| {
            let address = k.eval((rank - 1).mul_add(exchange.stride, exchange.address));
            let address = k.map_shared(address, 0u32).plus(offset as i32);
            softmax.store_partial_to_cluster(k, output, address);
        });
        k.cluster_sync();
        let merges = self.is_first(k);
        k.if_uniform(merges, |k| exchange.merge(k, offset, self.ctas - 1, softmax, output));
    }
}

/// Bytes of the partial result of one warp.
fn bytes_per_warp(cta: &Cta) -> u32 {
    let others =
        cta.config.row_groups() * (cta.config.kv_split_warpgroups + cta.config.cluster).saturating_sub(2) * WARPS;
    cta.config.exchange_bytes(cta.specialization) / others.max(1)
}
