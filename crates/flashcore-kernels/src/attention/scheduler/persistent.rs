//! Persistent scheduler: each CTA loops over tiles, a whole grid of CTAs apart.

use flashcore_ir::types::U32;
use flashcore_ir::{Builder, Compare, Reg, SpecialRegister};

use super::TileScheduler;

/// Writes `body` for each linear index of this CTA. Where tiles differ in length the order is serpentine: every other round
/// goes back over the CTAs.
pub(super) fn each_index(
    k: &mut Builder,
    scheduler: &TileScheduler,
    cta: Reg<U32>,
    body: impl FnOnce(&mut Builder, Reg<U32>),
) {
    let ctas = k.special(SpecialRegister::GridX);
    let index = k.copy(cta);
    let serpentine = scheduler.has_sections().then(|| {
        let both = k.shl(ctas, 1u32);
        let before = k.mad(cta, 2u32, 1u32);
        (both, k.sub(both, before))
    });
    k.while_uniform(
        |k| k.compare(Compare::Lt, index, scheduler.tiles),
        |k| {
            body(k, index);
            if let Some((both, step)) = serpentine {
                k.section("serpentine", |k| {
                    k.add_to(index, step);
                    let back = k.sub(both, step);
                    k.set(step, back);
                });
            } else {
                k.add_to(index, ctas);
            }
        },
    );
}

/// The head of all batches, and the tile in it, of a linear index: head by head.
pub(super) fn tile_at(k: &mut Builder, tiles_per_head: Reg<U32>, index: Reg<U32>) -> (Reg<U32>, Reg<U32>) {
    let matrix = k.div(index, tiles_per_head);
    (matrix, k.eval(index - matrix * tiles_per_head))
}
