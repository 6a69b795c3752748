//! Warpgroups that share the keys of the same rows, in one CTA or in those of a cluster.

use flashcore_ir::types::{Pred, S32, U32};
use flashcore_ir::{Builder, Compare, Reg};

use super::consumer::ALL_CONSUMERS;
use super::key_tiles::KeyTiles;
use super::{Cta, WARPGROUP};
use crate::hopper_config::HopperConfig;
use crate::tile::{Accumulator, LANES, OnlineSoftmax};

/// Warps of a warpgroup.
const WARPS: u32 = WARPGROUP / LANES;
/// Bytes of what a lane sends at a time.
const WORD_BYTES: u32 = 4;

/// Where a warpgroup stands among those that compute.
#[derive(Debug, Clone, Copy)]
pub(super) struct KeyGroup {
    /// Its number among those of the same rows in the CTA. The tiles of keys are dealt out to the CTAs of a cluster in
    /// turn, from the last on, and in a CTA to them.
    pub(super) number: Reg<U32>,
    /// The rank of its CTA, where there are others.
    rank: Option<Reg<U32>>,
    ctas: u32,
    /// The number of its rows.
    pub(super) row_group: Reg<U32>,
    /// The number of the warp among those with rows of their own.
    pub(super) row_warp: Reg<U32>,
    /// Where the lane sends to or receives from, for the first of the others.
    exchange: Reg<U32>,
}

impl KeyGroup {
    pub(super) fn new(k: &mut Builder, cta: &Cta, warp: Reg<U32>, lane: Reg<U32>, warpgroup: Reg<U32>) -> Self {
        let groups = cta.config.kv_split_warpgroups;
        let row_group = k.div(warpgroup, groups);
        let number = k.rem(warpgroup, groups);
        let within = k.and(warp, WARPS - 1);
        let row_warp = k.mad(row_group, WARPS, within);
        let place = k.add(cta.base, cta.shared.exchange);
        let lane_place = k.mad(lane, WORD_BYTES, place);
        let exchange = k.mad(row_warp, bytes_per_warp(cta), lane_place);
        let ctas = cta.config.cluster;
        let rank = (ctas > 1).then(|| k.cluster_rank());
        Self { number, rank, ctas, row_group, row_warp, exchange }
    }

    /// Its own last tile of keys.
    pub(super) fn last_tile(&self, k: &mut Builder, tiles: &KeyTiles) -> Reg<S32> {
        let before = match self.rank {
            Some(rank) => k.mad(self.number, self.ctas, rank),
            None => self.number,
        };
        let before = k.reinterpret::<U32, S32>(before);
        k.sub(tiles.last, before)
    }

    /// Whether it has a tile of keys at all.
    pub(super) fn has_some(&self, k: &mut Builder, tiles: &KeyTiles) -> Reg<Pred> {
        let last = self.last_tile(k, tiles);
        let some = k.compare(Compare::Ge, last, tiles.first);
        k.and(some, tiles.any)
    }

    /// The number of a thread among those of the warpgroups that have the same keys.
    pub(super) fn thread(&self, k: &mut Builder, thread: Reg<U32>) -> Reg<U32> {
        let within = k.and(thread, WARPGROUP - 1);
        k.mad(self.row_group, WARPGROUP, within)
    }

    /// The barrier at which those meet.
    pub(super) fn barrier(&self, k: &mut Builder) -> Reg<U32> {
        k.add(self.number, ALL_CONSUMERS + 1)
    }

    /// Whether it is the one that stores the rows.
    pub(super) fn is_first(&self, k: &mut Builder) -> Reg<Pred> {
        k.section("is first", |k| {
            let before = self.rank.map_or(self.number, |rank| k.or(self.number, rank));
            k.compare(Compare::Eq, before, 0u32)
        })
    }

    /// Brings together, in the first warpgroup of each rows, what those of the same rows have for their keys.
    pub(super) fn gather(&self, k: &mut Builder, config: HopperConfig, softmax: &OnlineSoftmax, output: &Accumulator) {
        let step = config.row_groups() * WARPS * softmax.sent_bytes(output);
        if config.kv_split_warpgroups > 1 {
            let is_other = k.compare(Compare::Gt, self.number, 0u32);
            k.if_uniform(is_other, |k| {
                let before = k.sub(self.number, 1u32);
                let address = k.mad(before, step, self.exchange);
                softmax.send(k, output, address);
            });
            k.barrier_sync(ALL_CONSUMERS, config.warpgroups * WARPGROUP);
            let is_first = k.compare(Compare::Eq, self.number, 0u32);
            k.if_uniform(is_first, |k| {
                for other in 1..config.kv_split_warpgroups {
                    let address = k.add(self.exchange, (other - 1) * step);
                    softmax.receive(k, output, address);
                }
            });
        }
        if let Some(rank) = self.rank {
            let first_sender = (config.kv_split_warpgroups - 1) * step;
            k.section("other CTAs", |k| self.gather_cluster(k, rank, (first_sender, step), softmax, output));
        }
    }

    /// The same in the first CTA of the cluster, of the first warpgroups of all. What they send begins there, and is so
    /// many bytes.
    fn gather_cluster(
        &self,
        k: &mut Builder,
        rank: Reg<U32>,
        (first_sender, step): (u32, u32),
        softmax: &OnlineSoftmax,
        output: &Accumulator,
    ) {
        let is_first = k.compare(Compare::Eq, self.number, 0u32);
        // The CTA that is sent to has begun.
        k.cluster_wait();
        let has_others = k.compare(Compare::Gt, rank, 0u32);
        let sends = k.and(is_first, has_others);
        k.if_uniform(sends, |k| {
            let before = k.sub(rank, 1u32);
            let address = k.mad(before, step, self.exchange);
            let address = k.map_shared(address, 0u32).plus(first_sender as i32);
            softmax.send_to_cta(k, output, address);
        });
        k.cluster_sync();
        let stores = self.is_first(k);
        k.if_uniform(stores, |k| {
            for other in 1..self.ctas {
                let address = k.add(self.exchange, first_sender + (other - 1) * step);
                softmax.receive(k, output, address);
            }
        });
    }
}

/// Bytes that one warp sends.
fn bytes_per_warp(cta: &Cta) -> u32 {
    let others =
        cta.config.row_groups() * (cta.config.kv_split_warpgroups + cta.config.cluster).saturating_sub(2) * WARPS;
    cta.config.exchange_bytes(cta.specialization) / others.max(1)
}
