//! Choices of the ladder's kernel: the steps from the scalar kernel to the Ampere kernel, one choice at a time.

use crate::attention::sm80::kv_pipeline::KvPipelineConfig;
use crate::config::config_table;
use crate::primitives::{LANES, MMA_M, SharedLayout};
use crate::specialization::MAX_VEC_BYTES;

/// Warps of a CTA.
const WARPS: u32 = 4;

config_table! {
    /// The choices of the ladder's kernel: tiles of 64 query rows, and scores in shared memory.
    pub struct LadderConfig is "ladder" {
        /// Keys of a tile: 32 or 64.
        tile_n: u32 = 64, name [tile], allowed { "32 or 64" => matches!(tile_n, 32 | 64) };
        /// Tiles of keys and values in shared memory at a time; with 1, each is waited for as soon as it is asked for.
        stages: u32 = 1, name [always N "stage"], allowed { "1 to 8" => (1..=8).contains(&stages) };
        /// The layout of tiles in shared memory.
        layout: SharedLayout = SharedLayout::Plain, name [always
            "plain" => SharedLayout::Plain, "padded" => SharedLayout::Padded, "swizzled" => SharedLayout::Swizzled];
        /// Bytes that one copy from global memory moves, at most: 4, 8 or 16.
        load_bytes: u32 = 4, name ["load4" => 4, "load8" => 8], unnamed MAX_VEC_BYTES,
            allowed { "4, 8 or 16" => matches!(load_bytes, 4 | 8 | 16) };
        /// Who multiplies query and key.
        scores: Product = Product::Scalar, name ["tensorqk" => Product::Tensor];
        /// Who multiplies weights and values.
        output: Product = Product::Scalar, name ["tensorpv" => Product::Tensor];
    }
}

/// Who multiplies matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Product {
    /// Lanes, one multiplication at a time, in `f32`.
    Scalar,
    /// Tensor cores.
    Tensor,
}

impl LadderConfig {
    const LAST: Self = Self {
        tile_n: 64,
        stages: 2,
        layout: SharedLayout::Swizzled,
        load_bytes: MAX_VEC_BYTES,
        scores: Product::Tensor,
        output: Product::Tensor,
    };

    /// Those that gates, snapshots and tests go through: between them they have every value of every choice.
    pub(crate) const LISTED: [Self; 6] = [
        Self::BASE,
        Self { layout: SharedLayout::Padded, load_bytes: 8, ..Self::BASE },
        Self { layout: SharedLayout::Swizzled, load_bytes: MAX_VEC_BYTES, stages: 2, ..Self::BASE },
        Self { output: Product::Scalar, tile_n: 32, stages: 3, ..Self::LAST },
        Self { scores: Product::Scalar, layout: SharedLayout::Padded, ..Self::LAST },
        Self::LAST,
    ];

    /// The most of [`operand_registers`](Self::operand_registers): with more, compilers move registers to memory and back.
    pub(crate) const MOST_OPERAND_REGISTERS: u32 = 176;

    /// Query rows of a CTA.
    pub const fn tile_m(self) -> u32 {
        WARPS * MMA_M
    }

    /// Sets the query rows of a CTA, which are always the same.
    pub(crate) fn set_tile_m(&mut self, rows: u32) -> Option<()> {
        (rows == self.tile_m()).then_some(())
    }

    /// Threads of a CTA.
    pub const fn threads(self) -> u32 {
        WARPS * LANES
    }

    /// Registers per thread that hold the output and the weights it is multiplied by, where lanes do that: two columns of
    /// 16 rows in each 64, and four weights of each row.
    pub(crate) const fn operand_registers(self, value_dim: u32) -> u32 {
        match self.output {
            Product::Scalar => 2 * MMA_M * value_dim.div_ceil(2 * LANES) + 4 * MMA_M,
            Product::Tensor => value_dim.next_multiple_of(16) / 2,
        }
    }

    /// The KV pipeline.
    pub(crate) const fn kv_pipeline(self) -> KvPipelineConfig {
        let Self { stages, tile_n, load_bytes, .. } = self;
        KvPipelineConfig { stages, tile_n, warps: WARPS, producers: 0, load_bytes }
    }
}
