//! Choices of the Hopper kernel (`sm_90a`): TMA, `mbarrier`s and `wgmma`.

use flashcore_ir::Arch;

use crate::attention::block_mask::BlockMaskTiles;
use crate::attention::block_mask::mode::BlockMaskMode;
use crate::attention::scheduler::sorted;
use crate::attention::sm90::{WARPGROUP, WARPGROUP_ROWS};
use crate::config::config_table;
use crate::element::ElementLayout;
use crate::primitives::{Exponential, LANES, MMA_N, Rescale, SwizzledTile};
use crate::specialization::Specialization;
use flashcore_problem::Operand;

config_table! {
    /// The choices of the Hopper kernel.
    pub struct HopperConfig is "hopper" {
        /// Consumer warpgroups, each with 64 query rows; one more is the producer.
        warpgroups: u32 = 2, name [tile], allowed { "1 to 4" => (1..=4).contains(&warpgroups) },
            near [warpgroups.saturating_add(1), warpgroups.saturating_sub(1)];
        /// Keys of a tile.
        tile_n: u32 = 128, name [],
            allowed { "a multiple of 16 up to 256" => tile_n.is_multiple_of(16) && (16..=256).contains(&tile_n) },
            near [tile_n.saturating_add(16), tile_n.saturating_sub(16)];
        /// Tiles of keys, and tiles of values, in shared memory at a time.
        stages: u32 = 2, name [always N "stage"], allowed { "2 to 8" => (2..=8).contains(&stages) },
            near [stages.saturating_add(1), stages.saturating_sub(1)];
        /// Split-KV by warpgroup: warpgroups that share the keys for the same rows, and merge their partial results at the end:
        /// 1, 2 or 4.
        kv_split_warpgroups: u32 = 1, name ["2kvgroups" => 2, "4kvgroups" => 4],
            allowed {
                "1; or 2 or 4, the warpgroups a multiple of it and the stages of its double, without a warp-scheduler barrier and persistent CTAs" =>
                    kv_split_warpgroups == 1
                        || matches!(kv_split_warpgroups, 2 | 4)
                            && warpgroups.is_multiple_of(kv_split_warpgroups)
                            && stages.is_multiple_of(2 * kv_split_warpgroups)
                            && warp_scheduler == WarpScheduler::Free
                            && !persistent,
            };
        /// Split-KV by CTA: CTAs of a cluster that share the keys for the same rows in the same way: 1, 2 or 4.
        cluster: u32 = 1, name ["2cluster" => 2, "4cluster" => 4],
            allowed {
                "1; or 2 or 4, without a warp-scheduler barrier and persistent CTAs" =>
                    cluster == 1 || matches!(cluster, 2 | 4) && warp_scheduler == WarpScheduler::Free && !persistent,
            },
            near [cluster.saturating_mul(2), cluster / 2];
        /// The blocks after which the output is rescaled to a new row max.
        rescale: Rescale = Rescale::Always, name ["ifchanged" => Rescale::IfChanged, "threshold" => Rescale::Threshold],
            near [Rescale::Always, Rescale::IfChanged, Rescale::Threshold];
        /// True if the rescale is overlapped with QK of the next block, and not done before it.
        overlap_rescale: bool = true, name ["overlap" => true], unnamed false, near [!overlap_rescale];
        /// The units that compute exponentials of scores.
        exponential: Exponential = Exponential::Unit, name ["exp2mix" => Exponential::Shared], near [Exponential::Unit, Exponential::Shared];
        /// The phase that consumer warpgroups go through one at a time (warp-scheduler barrier).
        warp_scheduler: WarpScheduler = WarpScheduler::Free,
            name ["pingpong" => WarpScheduler::PingPong, "exclusive" => WarpScheduler::ExclusiveExp],
            near [WarpScheduler::Free, WarpScheduler::PingPong, WarpScheduler::ExclusiveExp];
        /// True if the query heads of a key head share tiles: their rows alternate.
        pack_gqa: bool = false, name ["packgqa" => true];
        /// True if P · V of 8-bit floats adds up over all keys in an accumulator of the tensor cores, which keep about 13 bits
        /// of it. Never a default: it shows what the second level is for. Of 16-bit elements there is one level anyway.
        one_level: bool = false, name ["1level" => true];
        /// True with programmatic dependent launch (PDL): the kernel may start while the preceding kernel on the stream ends,
        /// and waits for it itself.
        pdl: bool = false, name ["pdl" => true];
        /// True with persistent CTAs: each loops over tiles of query rows, as long as there are any.
        persistent: bool = true, name ["persistent" => true], unnamed false,
            allowed {
                "0 with pack_gqa, where the query heads of a key head share tiles" => !persistent || !pack_gqa,
            };
        /// True if persistent CTAs take the next tile from a counter when they have none, and not in turn: for sequences whose
        /// query lengths only the device knows.
        dynamic: bool = false, name ["dynamic" => true],
            allowed { "0 unless CTAs are persistent" => !dynamic || persistent },
            near [!dynamic];
        /// Split-KV by CTA: keys of a chunk, each with a CTA of its own, which the combine kernel merges; 0 is all keys.
        chunk_keys: u32 = 0, name [N "chunk"],
            allowed {
                "0; or a multiple of tile_n, without clusters and persistent CTAs" =>
                    chunk_keys == 0 || chunk_keys.is_multiple_of(tile_n.max(1)) && !persistent && cluster == 1,
            };
    }
}

/// The warp-scheduler barrier: the phase that consumer warpgroups go through one at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WarpScheduler {
    /// No barrier: they run as they come.
    Free,
    /// Ping-pong: they start products one after the other, so that the tensor cores work for one during the softmax of another.
    PingPong,
    /// They compute exponentials one after the other, so that one has all special-function units while the others have products.
    ExclusiveExp,
}

/// Bytes of shared memory for tiles; the rest is for barriers, and for the work-tile info that the producer broadcasts.
const SMEM_BYTES: u32 = Arch::Sm90a.shared_bytes_per_cta() - 1024;

impl HopperConfig {
    /// Query rows of a CTA.
    pub const fn tile_m(self) -> u32 {
        self.row_groups().saturating_mul(WARPGROUP_ROWS)
    }

    /// Sets the query rows of a CTA.
    pub(crate) fn set_tile_m(&mut self, rows: u32) -> Option<()> {
        self.warpgroups = (rows / WARPGROUP_ROWS).checked_mul(self.kv_split_warpgroups)?;
        Some(())
    }

    /// Warpgroups with rows of their own.
    pub const fn row_groups(self) -> u32 {
        match self.warpgroups.checked_div(self.kv_split_warpgroups) {
            Some(groups) => groups,
            None => 0,
        }
    }

    /// KV splits of the same rows: by warpgroup, times by CTA of the cluster.
    pub(crate) const fn kv_splits(self) -> u32 {
        self.kv_split_warpgroups.saturating_mul(self.cluster)
    }

    /// Rows of a page that one TMA copy moves: the largest power of two that divides pages and KV blocks.
    pub(crate) const fn page_box(self, page_size: usize) -> u32 {
        let bits = (page_size as u32 | self.tile_n).trailing_zeros();
        if bits < u32::BITS { 1 << bits } else { 0 }
    }

    /// Threads of a CTA.
    pub const fn threads(self) -> u32 {
        self.warpgroups.saturating_add(1).saturating_mul(WARPGROUP)
    }

    /// Consumer warps.
    pub(crate) const fn consumer_warps(self) -> u32 {
        self.warpgroups.saturating_mul(WARPGROUP / LANES)
    }

    /// Registers of each thread when a CTA starts: those of an SM, shared equally.
    pub(crate) const fn registers_at_launch(self) -> u32 {
        match self.warpgroups {
            0 | 1 => 240,
            2 => 168,
            3 => 128,
            _ => 96,
        }
    }

    /// Registers of each producer thread, and of each consumer thread (`setmaxnreg`).
    pub(crate) const fn registers_by_role(self, specialization: Specialization) -> (u32, u32) {
        // Warps that transpose values need more than one that starts TMA loads, and 40 are enough.
        match (self.warpgroups, specialization.has_fp8_query()) {
            (0 | 1, _) => (240, 240),
            (2, _) => (40, 232),
            (3, false) => (32, 160),
            (3, true) => (56, 152),
            (_, false) => (32, 112),
            (_, true) => (56, 104),
        }
    }

    /// The tiles of query, keys and values in shared memory.
    pub(crate) const fn tiles(self, specialization: Specialization) -> [SwizzledTile; 3] {
        let Specialization { dtype, head_dim, value_dim, .. } = specialization;
        let [element, kv_element] = [ElementLayout::of(dtype), ElementLayout::of(specialization.key_value_dtype())];
        [
            SwizzledTile { rows: self.tile_m(), columns: head_dim, element },
            SwizzledTile { rows: self.tile_n, columns: head_dim, element: kv_element },
            SwizzledTile { rows: self.tile_n, columns: value_dim, element: kv_element },
        ]
    }

    /// The tile of output in shared memory, where TMA stores it.
    pub(crate) const fn output_tile(self, specialization: Specialization) -> SwizzledTile {
        let element = ElementLayout::of(specialization.output_dtype());
        SwizzledTile { rows: self.tile_m(), columns: specialization.value_dim, element }
    }

    /// The tile of values transposed, where they are of 8 bits: `wgmma` has no transposed form of those.
    pub(crate) const fn transposed_values(self, specialization: Specialization) -> Option<SwizzledTile> {
        if !specialization.has_fp8_query() {
            return None;
        }
        let element = ElementLayout::of(specialization.key_value_dtype());
        Some(SwizzledTile { rows: specialization.value_dim, columns: self.tile_n, element })
    }

    /// True if P · V of each block of keys has an accumulator of its own, which is added to the output in `f32`.
    pub(crate) const fn has_two_levels(self, specialization: Specialization) -> bool {
        specialization.has_fp8_query() && !self.one_level
    }

    /// Slices of the columns that P · V of a block is multiplied by, one after the other, where it has an accumulator of its
    /// own: wide outputs leave it few registers, and so do the pages of scales.
    pub(crate) const fn product_slices(specialization: Specialization) -> u32 {
        let has_scales = specialization.has(Operand::KScale) || specialization.has(Operand::VScale);
        match specialization.value_dim {
            97..=128 if has_scales && specialization.has(Operand::PageTable) => 2,
            ..=128 => 1,
            129..=192 => 3,
            _ => 4,
        }
    }

    /// Columns of a slice of P · V of a block. The last slice begins before the end of the one before it, if that is what it takes:
    /// of products of several widths in one accumulator, ptxas serializes some.
    pub(crate) const fn product_columns(specialization: Specialization) -> u32 {
        specialization.value_dim.div_ceil(Self::product_slices(specialization)).next_multiple_of(MMA_N)
    }

    /// Registers per thread that hold scores, weights (16-bit pairs, or four 8-bit floats) and output, and what is done with scores beyond scaling them. Of a
    /// bias, loads begin long before they are needed; the other terms need little, but more with long tiles.
    pub fn operand_registers(self, specialization: Specialization) -> u32 {
        let (scores, weights) = (self.tile_n / 2, self.tile_n / if specialization.has_fp8_query() { 8 } else { 4 });
        let product = if self.has_two_levels(specialization) { Self::product_columns(specialization) } else { 0 };
        let output = specialization.value_dim.next_multiple_of(MMA_N) / 2 + product / 2;
        let terms = match (specialization.has(Operand::Bias), specialization.has_terms()) {
            (true, _) => self.tile_n / 4 * 3 + 4,
            // Scales of 8-bit floats too; where P · V goes by slices, ptxas finds room for all but 4.
            (false, true) if specialization.has_fp8_query() && Self::product_slices(specialization) == 1 => 24,
            (false, true) if self.tile_n > 128 => 24,
            (false, true) => 4,
            (false, false) => 0,
        };
        // What is read of tables, a quarter of a tile at a time; and long tiles leave it no room.
        let expressions = match specialization.has_expressions() {
            true if self.tile_n > 128 => self.tile_n / 4 + 24,
            true => self.tile_n / 4,
            false => 0,
        };
        scores + weights + output + terms + expressions
    }

    /// The most of [`operand_registers`](Self::operand_registers).
    pub(crate) const fn most_operand_registers(self, specialization: Specialization) -> u32 {
        let has_slices = self.has_two_levels(specialization) && Self::product_slices(specialization) > 1;
        match self.warpgroups {
            0..=2 if has_slices => 208,
            0..=2 => 200,
            3 => 128,
            _ => 80,
        }
    }

    /// Bytes of shared memory that the tiles take with `q_stages` stages for Q.
    fn tile_bytes(self, specialization: Specialization, q_stages: u32) -> u32 {
        let [query, key, value] = self.tiles(specialization);
        let transposed = self.transposed_values(specialization).map_or(0, SwizzledTile::bytes);
        let stages = key.bytes().saturating_add(value.bytes()).saturating_add(transposed).saturating_mul(self.stages);
        let others = self.exchange_bytes(specialization).saturating_add(self.sort_bytes(specialization));
        stages.saturating_add(query.bytes().saturating_mul(q_stages)).saturating_add(others)
    }

    /// The tiles that a block mask is precomputed for, where there is a `mask_mod`.
    pub(crate) fn block_mask_tiles(self, specialization: Specialization) -> Option<BlockMaskTiles> {
        BlockMaskMode::of(self, specialization).map(|mode| mode.tiles(self))
    }

    /// Bytes of shared memory of the sorted scheduler.
    pub(crate) fn sort_bytes(self, specialization: Specialization) -> u32 {
        if BlockMaskMode::of(self, specialization).is_some_and(|mode| mode.sorted) { sorted::BYTES } else { 0 }
    }

    /// Bytes of shared memory through which warpgroups that share keys merge their partial results: for each lane of all
    /// but the first of them in a CTA, and of the first of all but the first CTA, its output, and `row_max` and `row_sum`
    /// of two rows.
    pub(crate) const fn exchange_bytes(self, specialization: Specialization) -> u32 {
        let words = specialization.value_dim.next_multiple_of(MMA_N) / 2 + 4;
        let senders = self.kv_split_warpgroups.saturating_add(self.cluster).saturating_sub(2);
        let others = self.row_groups().saturating_mul(senders);
        others.saturating_mul(WARPGROUP * words * 4)
    }

    /// Stages of Q: two, where they fit, so that TMA loads the next tile while one is in use.
    pub(crate) fn q_stages(self, specialization: Specialization) -> u32 {
        if self.persistent && self.tile_bytes(specialization, 2) <= SMEM_BYTES { 2 } else { 1 }
    }

    /// True if TMA stores the output: from the stage of its Q, if the next tile has another stage.
    pub(crate) fn tma_store(self, specialization: Specialization) -> bool {
        let [query, _, _] = self.tiles(specialization);
        let output = self.output_tile(specialization);
        self.kv_splits() == 1 && self.q_stages(specialization) > 1 && output.panels() <= query.panels()
    }
}
