//! Single-tile scheduler: the grid is by tile, head and batch, and nothing needs to be divided.

use flashcore_ir::types::U32;
use flashcore_ir::{Builder, Reg, SpecialRegister};

use super::TileScheduler;

/// The tile of a CTA: its index in its head, the head and the batch. All CTAs of a cluster have the same.
pub(super) fn tile(k: &mut Builder, scheduler: &TileScheduler, cta: Reg<U32>) -> [Reg<U32>; 3] {
    let cluster = scheduler.config.cluster;
    let index = if cluster > 1 { k.shr(cta, cluster.ilog2()) } else { cta };
    // LPT order: the last rows attend most keys.
    let tile = if scheduler.specialization.right { k.eval(scheduler.tiles_per_head - 1 - index) } else { index };
    let [head, batch] = [SpecialRegister::CtaY, SpecialRegister::CtaZ].map(|index| k.special(index));
    [tile, head, batch]
}
