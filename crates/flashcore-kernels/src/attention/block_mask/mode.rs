//! Block-mask mode: how an sm90 kernel uses the block mask of a `mask_mod`.

use flashcore_problem::expression::Expression;

use super::BlockMaskTiles;
use crate::attention::sm90::WARPGROUP_ROWS;
use crate::config::{HopperConfig, WarpScheduler};
use crate::specialization::Specialization;
use flashcore_problem::Operand;

/// The use of a block mask. Kernels without a `mask_mod` have none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockMaskMode {
    /// The rows that share a range of KV blocks.
    pub(crate) range: RangePer,
    /// True if persistent CTAs sort tiles by their nonempty KV blocks. Tiles of query rows then begin at
    /// document boundaries, and the producer broadcasts work-tile info.
    pub(crate) sorted: bool,
}

/// The rows that share a range of KV blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RangePer {
    /// All rows of a CTA.
    Cta,
    /// The rows of a warpgroup, which passes over the blocks that only others attend.
    Warpgroup,
}

impl BlockMaskMode {
    /// The mode of a kernel.
    pub(crate) fn of(config: HopperConfig, specialization: Specialization) -> Option<Self> {
        let mask_mod = specialization.mask_mod?;
        // Warpgroups with ranges of their own must not wait for each other, and unattended V rows are zeroed by all
        // warpgroups of the CTA together.
        let is_per_warpgroup = !specialization.has(Operand::SequsedK)
            && !specialization.left
            && config.row_groups() > 1
            && config.kv_splits() == 1
            && config.warp_scheduler == WarpScheduler::Free;
        Some(Self {
            range: if is_per_warpgroup { RangePer::Warpgroup } else { RangePer::Cta },
            sorted: config.persistent && !specialization.has(Operand::SequsedK) && is_same_for_all_heads(mask_mod),
        })
    }

    /// The tiles that the block mask is precomputed for.
    pub(crate) fn tiles(self, config: HopperConfig) -> BlockMaskTiles {
        BlockMaskTiles {
            tile_m: config.tile_m(),
            group_rows: match self.range {
                RangePer::Cta => config.tile_m(),
                RangePer::Warpgroup => WARPGROUP_ROWS,
            },
            tile_n: config.tile_n,
            // Chunks begin where blocks do, and their number is that of the sequence, which the combine kernel counts too.
            unaligned_kv: config.chunk_keys == 0,
            unaligned_q: self.sorted,
            pdl: config.pdl,
        }
    }
}

/// True if an expression depends on neither the head nor the batch.
fn is_same_for_all_heads(expression: &Expression) -> bool {
    let uses = expression.uses(expression.result());
    !(uses.head || uses.batch)
}
