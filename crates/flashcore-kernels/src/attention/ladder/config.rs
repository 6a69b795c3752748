//! Choices of the ladder's kernel: the steps from the scalar kernel to the Ampere kernel, one choice at a time.

use crate::attention::sm80::kv_pipeline::KvPipelineConfig;
use crate::config::Flaw;
use crate::primitives::{LANES, MMA_M, SharedLayout};
use crate::specialization::MAX_VEC_BYTES;

/// Warps of a CTA.
const WARPS: u32 = 4;

/// The choices of the ladder's kernel: tiles of 64 query rows, and scores in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LadderConfig {
    /// Keys of a tile: 32 or 64.
    pub tile_n: u32,
    /// Tiles of keys and values in shared memory at a time; with 1, each is waited for as soon as it is asked for.
    pub stages: u32,
    /// The layout of tiles in shared memory.
    pub layout: SharedLayout,
    /// Bytes that one copy from global memory moves, at most: 4, 8 or 16.
    pub load_bytes: u32,
    /// Who multiplies query and key.
    pub scores: Product,
    /// Who multiplies weights and values.
    pub output: Product,
}

/// Who multiplies matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Product {
    /// Lanes, one multiplication at a time, in `f32`.
    Scalar,
    /// Tensor cores.
    Tensor,
}

impl Default for LadderConfig {
    fn default() -> Self {
        Self::FIRST
    }
}

impl LadderConfig {
    /// The first step: tiles in shared memory, and nothing else.
    const FIRST: Self = Self {
        tile_n: 64,
        stages: 1,
        layout: SharedLayout::Plain,
        load_bytes: 4,
        scores: Product::Scalar,
        output: Product::Scalar,
    };
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
        Self::FIRST,
        Self { layout: SharedLayout::Padded, load_bytes: 8, ..Self::FIRST },
        Self { layout: SharedLayout::Swizzled, load_bytes: MAX_VEC_BYTES, stages: 2, ..Self::FIRST },
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

    /// The choices that no kernel can be generated with.
    pub(crate) fn flaws(self) -> Vec<Flaw> {
        let Self { tile_n, stages, load_bytes, .. } = self;
        let flaw =
            |argument, value, allowed, is_allowed: bool| (!is_allowed).then_some(Flaw { argument, value, allowed });
        let flaws = [
            flaw("tile_n", tile_n, "32 or 64", matches!(tile_n, 32 | 64)),
            flaw("stages", stages, "1 to 8", (1..=8).contains(&stages)),
            flaw("load_bytes", load_bytes, "4, 8 or 16", matches!(load_bytes, 4 | 8 | 16)),
        ];
        flaws.into_iter().flatten().collect()
    }
}
