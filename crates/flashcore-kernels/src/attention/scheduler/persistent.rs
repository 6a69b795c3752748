//! Persistent scheduler: each CTA loops over tiles, a whole grid of CTAs apart.
//!
//! Grids are made for the longest sequence, so most tiles of a ragged batch may not exist. Where the next one does not, a
//! warp looks at the 32 after it, one a lane, and goes on with the first that does.

use flashcore_ir::types::U32;
use flashcore_ir::{Builder, Compare, Reg, SpecialRegister};

use super::TileScheduler;

/// The linear index that a CTA is at.
#[derive(Debug, Clone, Copy)]
pub(super) struct LinearIndex {
    pub(super) index: Reg<U32>,
    ctas: Reg<U32>,
    /// Where tiles differ in length the order is serpentine, every other round goes back over the CTAs: the length of two
    /// rounds, and the distance to the next index.
    serpentine: Option<(Reg<U32>, Reg<U32>)>,
}

/// Writes `body`, which advances, for each linear index of this CTA.
pub(super) fn each_index(
    k: &mut Builder,
    scheduler: &TileScheduler,
    cta: Reg<U32>,
    body: impl FnOnce(&mut Builder, LinearIndex),
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
        |k| body(k, LinearIndex { index, ctas, serpentine }),
    );
}

impl LinearIndex {
    /// Goes on to the next index.
    pub(super) fn advance(self, k: &mut Builder) {
        if let Some((both, step)) = self.serpentine {
            k.section("serpentine", |k| {
                k.add_to(self.index, step);
                let back = k.sub(both, step);
                k.set(step, back);
            });
        } else {
            k.add_to(self.index, self.ctas);
        }
    }
}

/// The head of all batches, and the tile in it, of a linear index: head by head.
pub(super) fn tile_at(k: &mut Builder, tiles_per_head: Reg<U32>, index: Reg<U32>) -> (Reg<U32>, Reg<U32>) {
    let matrix = k.div(index, tiles_per_head);
    (matrix, k.eval(index - matrix * tiles_per_head))
}
