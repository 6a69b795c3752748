//! Block mask in the consumers of the sm90 kernel: ranges of their own, skipped blocks, and the `mask_mod` of partial ones.

use flashcore_ir::types::S32;
use flashcore_ir::{Builder, Reg};

use super::mode::{BlockMaskMode, RangePer};
use crate::attention::kv_range::KvBlockRange;
use crate::attention::scheduler::WorkTile;
use crate::attention::sm90::{Consumer, Cta, Mainloop, PvStrategy};
use crate::element::ElementLayout;
use crate::primitives::Accumulator;

/// Keys that a `mask_mod` is evaluated for at a time, since registers are few.
const KEYS_AT_ONCE: u32 = 32;

/// True if each warpgroup has a range of its own.
fn is_per_warpgroup(cta: &Cta) -> bool {
    matches!(cta.block_mask, Some(BlockMaskMode { range: RangePer::Warpgroup, .. }))
}

/// The KV blocks that a warpgroup attends, of those that the CTA goes through.
pub(crate) fn own_range(k: &mut Builder, cta: &Cta, tile: &WorkTile, range: KvBlockRange) -> KvBlockRange {
    if is_per_warpgroup(cta) { tile.warpgroup_blocks(k, range) } else { range }
}

/// Goes through the KV blocks of the CTA, `all`: past those that only other warpgroups attend, where each has a range of
/// its own.
pub(crate) fn attend<P: PvStrategy>(k: &mut Builder, mainloop: &Mainloop<'_, P>, all: &KvBlockRange) {
    let Mainloop { consumer, cta, range: own, .. } = mainloop;
    if !is_per_warpgroup(cta) {
        return mainloop.run(k);
    }
    k.if_else_uniform(
        own.nonempty,
        |k| {
            skip_blocks(k, consumer, own.last, all.last);
            mainloop.run(k);
            skip_blocks(k, consumer, all.first, own.first);
        },
        |k| {
            consumer.wait_for_query(k, cta);
            consumer.wait_for_store(k);
            consumer.release_query(k);
            let before_first = k.sub(all.first, 1i32);
            skip_blocks(k, consumer, before_first, all.last);
        },
    );
}

/// Releases as many KV blocks as lie from one index to another.
fn skip_blocks<P: PvStrategy>(k: &mut Builder, consumer: &Consumer<P>, from: Reg<S32>, to: Reg<S32>) {
    k.section("skipped blocks", |k| {
        k.for_uniform(from, to, 1i32, |k, _| {
            for state in [&consumer.keys, &consumer.values] {
                state.consumer_wait(k);
                state.consumer_release(k, consumer.leader);
            }
        });
    });
}

/// Passes over a tile without keys: its Q stage has no Q, but says which tile it is where the producer broadcasts that.
pub(crate) fn skip_tile<P: PvStrategy>(k: &mut Builder, consumer: &Consumer<P>, cta: &Cta) {
    if cta.shared.broadcasts_tiles() {
        consumer.wait_for_store(k);
        consumer.query.consumer_release(k, consumer.leader);
    }
}

/// Writes `body` for the scores of the first block that is gone through. Under a block mask it is the last of the tile and
/// may have but some keys: if it has no more than half of them, for the columns of those alone.
pub(crate) fn with_existing_columns<P: PvStrategy>(
    k: &mut Builder,
    mainloop: &Mainloop<'_, P>,
    scores: &Accumulator,
    first_key: Reg<S32>,
    body: impl Fn(&mut Builder, &Accumulator),
) {
    if mainloop.cta.block_mask.is_none() {
        return body(k, scores);
    }
    let element = ElementLayout::of(mainloop.cta.specialization.dtype);
    let half = element.padded_columns(mainloop.cta.config.tile_n / 2);
    let is_short = k.eval((mainloop.context.key_length - first_key).le(half as i32));
    let short = scores.first_columns(half);
    k.if_else_uniform(is_short, |k| body(k, &short), |k| body(k, scores));
}

/// Masks scores by the `mask_mod`, some keys at a time.
pub(crate) fn apply_mask_mod<P: PvStrategy>(
    k: &mut Builder,
    mainloop: &Mainloop<'_, P>,
    scores: &Accumulator,
    first_key: Reg<S32>,
) {
    let Some(mask_mod) = &mainloop.scoring.mask_mod else { return };
    let key = k.add(first_key, mainloop.scoring.positions.column);
    for (index, scores) in (0..).zip(scores.column_slices(KEYS_AT_ONCE)) {
        let key = k.add(key, index * KEYS_AT_ONCE as i32);
        mask_mod.read_block(k, &scores, key).mask(k, &scores);
    }
}
