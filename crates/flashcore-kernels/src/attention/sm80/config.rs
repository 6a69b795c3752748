//! Choices of the Ampere kernel (`sm_80` and everything later): `mma.sync`, `ldmatrix` and `cp.async`.

use flashcore_ir::Arch;
use flashcore_problem::Operand;

use crate::attention::sm80::kv_pipeline::KvPipelineConfig;
use crate::config::config_table;
use crate::element::ElementLayout;
use crate::primitives::{Accumulation, Exponential, Fp8Widening, LANES, Rescale, SharedLayout, Tf32Products};
use crate::specialization::{MAX_VEC_BYTES, Specialization};

config_table! {
    /// The choices of the Ampere kernel.
    pub struct AmpereConfig is "ampere" {
        /// Warps of a CTA.
        // Fewer would not copy a whole pattern of the swizzle at a time.
        warps: u32 = 4, name [tile], allowed { "2, 4 or 8" => matches!(warps, 2 | 4 | 8) };
        /// Keys of a tile.
        tile_n: u32 = 64, name [],
            allowed { "a multiple of 16 up to 128" => tile_n % 16 == 0 && (16..=128).contains(&tile_n) };
        /// Tiles of keys and values in shared memory at a time: one is read while the others are on their way; with 1, each is
        /// waited for as soon as it is asked for.
        // Two barriers for each stage, where there are producers, and two others.
        stages: u32 = 2, name [always N "stage"],
            allowed {
                "1 to 8" => (1..=8).contains(&stages),
                "at most 7 with producers" => producers == 0 || stages <= 7,
            },
            near [stages.saturating_add(1), stages.saturating_sub(1)];
        /// The layout of tiles in shared memory.
        layout: SharedLayout = SharedLayout::Swizzled, name [always
            "plain" => SharedLayout::Plain, "padded" => SharedLayout::Padded, "swizzled" => SharedLayout::Swizzled];
        /// Query rows of each warp: 16, or 32, which read each key and value from shared memory half as often.
        rows_per_warp: u32 = 16, name ["32rows" => 32], allowed { "16 or 32" => matches!(rows_per_warp, 16 | 32) };
        /// Warps that share the keys of a tile for the same rows, and add up what they have at the end: 1, 2 or 4.
        kv_split_warps: u32 = 1, name ["2kvwarps" => 2, "4kvwarps" => 4],
            allowed {
                "1, 2 or 4, at most the warps, with a multiple of 16 keys for each" =>
                    matches!(kv_split_warps, 1 | 2 | 4) && kv_split_warps <= warps && tile_n % (16 * kv_split_warps) == 0,
            };
        /// Where the query is between products.
        query: QueryPlace = QueryPlace::Registers, name ["qshared" => QueryPlace::Shared],
            near [QueryPlace::Registers, QueryPlace::Shared];
        /// The blocks after which the output is rescaled to a new row max.
        rescale: Rescale = Rescale::Always, name ["ifchanged" => Rescale::IfChanged, "threshold" => Rescale::Threshold],
            near [Rescale::Always, Rescale::IfChanged, Rescale::Threshold];
        /// Bytes that one copy from global memory moves, at most: 4, 8 or 16.
        load_bytes: u32 = MAX_VEC_BYTES, name ["load4" => 4, "load8" => 8],
            allowed { "4, 8 or 16" => matches!(load_bytes, 4 | 8 | 16) };
        /// The type of accumulators.
        accumulation: Accumulation = Accumulation::F32, name ["f16sums" => Accumulation::F16],
            allowed {
                "f32 with products of tf32: leave -f16sums out" =>
                    tf32.is_none() || matches!(accumulation, Accumulation::F32),
            };
        /// The products of `tf32` that make up one of `f32`; none for elements of 16 bits.
        tf32: Option<Tf32Products> = None,
            name ["3xtf32" => Some(Tf32Products::Three), "1xtf32" => Some(Tf32Products::One)];
        /// The way in which 8-bit keys and values become 16-bit ones; without effect where they are not of 8 bits, or the query
        /// is too.
        fp8: Fp8Widening = Fp8Widening::Integer, name ["cvt" => Fp8Widening::Convert];
        /// The units that compute exponentials.
        exponential: Exponential = Exponential::Unit, name ["exp2mix" => Exponential::Shared], near [Exponential::Unit, Exponential::Shared];
        /// Warps that only copy keys and values for the others: 0, 1 or 2.
        producers: u32 = 0, name ["1producer" => 1, "2producers" => 2],
            allowed { "0, 1 or 2" => producers <= 2, "0 with chunks" => chunk_keys == 0 || producers == 0 };
        /// True if a tile has the rows of all query heads that share a key head.
        pack_gqa: bool = false, name ["packgqa" => true], near [!pack_gqa];
        /// True if the splits of a tile are the CTAs of a cluster, which merge their results in shared memory (DSMEM), and no
        /// combine kernel follows; that takes `sm_90`.
        cluster: bool = false, name ["cluster" => true];
        /// True if the combine kernel starts while the chunks end (PDL), which takes `sm_90`.
        pdl: bool = false, name ["pdl" => true], allowed { "0 without chunks" => !pdl || chunk_keys > 0 };
        /// The access-policy window of L2.
        l2: L2Window = L2Window::Default, name ["l2keep" => L2Window::Key];
        /// Persistent CTAs, each of which loops over tiles; with 0, each tile has a CTA of its own.
        persistent: u32 = 0, name [N "persistent"],
            allowed {
                "0 with pack_gqa, where the query heads of a key head share tiles" =>
                    persistent == 0 || !pack_gqa || chunk_keys > 0,
            };
        /// Split-KV: splits of the keys, each with CTAs of its own, which the combine kernel merges; 1 is all keys.
        num_splits: u32 = 1, name [N "splits"],
            allowed {
                "1 to 256" => (1..=MAX_SPLITS).contains(&num_splits),
                "1 with persistent CTAs" => num_splits == 1 || persistent == 0,
                "2, 4 or 8 in a cluster, without producers" =>
                    !cluster || matches!(num_splits, 2 | 4 | 8) && producers == 0,
            },
            near [num_splits.saturating_mul(2), (num_splits / 2).max(1)];
        /// Balanced split-KV: keys of a chunk. Persistent CTAs take the chunks of all sequences in turn, and the combine kernel
        /// merges them; 0 is no chunks.
        chunk_keys: u32 = 0, name [N "chunk"],
            allowed {
                "0, or a multiple of tile_n" => tile_n == 0 || chunk_keys.is_multiple_of(tile_n),
                "0 unless CTAs are persistent" => chunk_keys == 0 || persistent > 0,
                "0 with splits" => chunk_keys == 0 || num_splits == 1,
            };
    }
}

/// The access-policy window of L2: a hint to keep the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum L2Window {
    /// It keeps what it wants.
    Default,
    /// A part of it is set aside for the key, as far as that fits: hardware has one window for each launch.
    Key,
}

/// Where the query is between products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QueryPlace {
    /// In registers.
    Registers,
    /// In shared memory, read again for each tile of keys.
    Shared,
}

impl AmpereConfig {
    /// The config with the same code: the number of persistent CTAs, the number of splits outside of clusters and the L2
    /// window are not compiled in.
    pub(crate) const fn compiled(self) -> Self {
        let persistent = if self.persistent > 0 { 1 } else { 0 };
        let num_splits = if self.num_splits > 1 && !self.cluster { 2 } else { self.num_splits };
        let chunk_keys = if self.chunk_keys > 0 { self.tile_n } else { 0 };
        Self { persistent, num_splits, chunk_keys, l2: L2Window::Default, ..self }
    }

    /// Query rows of a CTA.
    pub const fn tile_m(self) -> u32 {
        self.row_warps().saturating_mul(self.rows_per_warp)
    }

    /// Sets the query rows of a CTA.
    pub(crate) fn set_tile_m(&mut self, rows: u32) -> Option<()> {
        self.warps = (rows / self.rows_per_warp).checked_mul(self.kv_split_warps)?;
        Some(())
    }

    /// Warps with rows of their own.
    pub const fn row_warps(self) -> u32 {
        match self.warps.checked_div(self.kv_split_warps) {
            Some(warps) => warps,
            None => 0,
        }
    }

    /// Keys of a tile that one warp multiplies.
    pub const fn keys_per_warp(self) -> u32 {
        match self.tile_n.checked_div(self.kv_split_warps) {
            Some(keys) => keys,
            None => 0,
        }
    }

    /// Bytes of shared memory through which warps that share keys add up what they have.
    pub(crate) const fn exchange_bytes(self, specialization: Specialization) -> u32 {
        let rows = self.tile_m() * (self.kv_split_warps - 1);
        // The output, and a maximum and a sum for each of four lanes.
        let columns = ElementLayout::of(specialization.output_dtype()).padded_columns(specialization.value_dim);
        rows * (columns + 8) * 4
    }

    /// Threads of a CTA.
    pub const fn threads(self) -> u32 {
        self.warps.saturating_add(self.producers).saturating_mul(LANES)
    }

    /// The products of `tf32`, for `f32`.
    pub(crate) const fn tf32_products(self) -> Tf32Products {
        match self.tf32 {
            Some(products) => products,
            None => Tf32Products::Three,
        }
    }

    /// Registers per thread that hold operands and results: query (16-bit pairs, or `f32`), scores and output, what is
    /// added to scores, and what warps that share keys send each other. `f32` has the sums of chains beside them, and P
    /// twice.
    pub fn operand_registers(self, specialization: Specialization) -> u32 {
        if specialization.has_fp8_query() {
            return self.fp8_operand_registers(specialization);
        }
        let [head_dim, value_dim] = [specialization.head_dim, specialization.value_dim];
        let query = match (self.query, self.tf32) {
            (QueryPlace::Registers, None) => head_dim.next_multiple_of(16) / 4,
            (QueryPlace::Registers, Some(_)) => head_dim.next_multiple_of(8) / 2,
            (QueryPlace::Shared, _) => 0,
        };
        let (output, scores) = (value_dim.next_multiple_of(16) / 2, self.keys_per_warp() / 2);
        // Sums of chains, and the parts of operands: those of both rows of a warp meet those of the other operand.
        let m_tiles = self.rows_per_warp / 16;
        // What is added to scores takes what ptxas has left at 128 columns, and more.
        let terms = if specialization.has_terms() || specialization.has_expressions() { 44 } else { 0 };
        let parts = 16 * m_tiles * m_tiles + terms;
        let chains = if m_tiles * output >= MANY_OUTPUT_REGISTERS { 16 } else { 32 };
        let (scores, chains) = match self.tf32 {
            None => (scores, 0),
            Some(Tf32Products::One) => (scores, chains / 2 + parts / 2),
            Some(Tf32Products::Three) => (2 * scores, chains + parts),
        };
        // Loads of a bias begin before they are needed, and have addresses.
        let bias = if specialization.has(Operand::Bias) { scores + scores / 4 } else { 0 };
        // So do those of tables, and the coordinates of the scores are known.
        let expressions = if specialization.has_expressions() { self.keys_per_warp() / 4 } else { 0 };
        let exchange = if self.kv_split_warps > 1 { 24 } else { 0 };
        let halves = match self.accumulation {
            Accumulation::F32 => 0,
            Accumulation::F16 if output > scores => output / 2,
            Accumulation::F16 => scores / 2,
        };
        // Codes are widened ahead of their products, the further the more keys a warp has.
        let is_fp8 = specialization.key_value_dtype().is_float8();
        let widened = if is_fp8 { self.keys_per_warp() * self.keys_per_warp() / 128 } else { 0 };
        let tiles = query + output + scores + bias + expressions + halves;
        self.rows_per_warp / 16 * tiles + chains + exchange + widened
    }

    /// The same for query, key and value of 8 bits: products of a block are there beside the output, as many as it has columns
    /// where nothing keeps ptxas from computing them ahead.
    fn fp8_operand_registers(self, specialization: Specialization) -> u32 {
        let query = match self.query {
            QueryPlace::Registers => specialization.head_dim.next_multiple_of(32) / 8,
            QueryPlace::Shared => 0,
        };
        let (output, scores) = (specialization.value_dim.next_multiple_of(16) / 2, self.keys_per_warp() / 2);
        let products = match (self.rescale, output) {
            (Rescale::Always, ..=64) => output.min(48),
            (Rescale::Always, _) => output,
            _ => 20,
        };
        let bias = if specialization.has(Operand::Bias) { (scores + scores / 4).saturating_sub(4) } else { 0 };
        let exchange = if self.kv_split_warps > 1 { 7 } else { 0 };
        // What a CTA keeps from one chunk to the next.
        let chunks = if self.chunk_keys > 0 { 16 } else { 0 };
        self.rows_per_warp / 16 * (query + output + scores + products + bias) + exchange + chunks
    }

    /// True if operands and results stay in registers.
    pub(crate) fn fits_registers(self, specialization: Specialization, arch: Arch) -> bool {
        self.operand_registers(specialization) <= most_operand_registers(arch, specialization)
    }

    /// Registers per thread that the kernel may take: as many as leave room for three CTAs of four warps on a
    /// SM where the output is small, and for two where it is large.
    pub fn register_budget(self, specialization: Specialization) -> u32 {
        let is_small = specialization.value_dim <= 64 && self.rows_per_warp == 16 && self.tf32.is_none();
        // Codes are widened beside the scores of all keys of a warp.
        let is_small = is_small && (!specialization.key_value_dtype().is_float8() || self.keys_per_warp() <= 32);
        if is_small && !specialization.has_terms() && !specialization.has_expressions() { 168 } else { 255 }
    }
}

/// The most of [`AmpereConfig::operand_registers`]: with more, compilers move registers to memory and back in each tile.
/// The one for `sm_90` needs the fewest registers beyond the tile's own, unless codes of 8 bits are widened.
pub(crate) const fn most_operand_registers(arch: Arch, specialization: Specialization) -> u32 {
    match arch {
        // ptxas takes more registers there for `mma.sync` of 8-bit floats.
        Arch::Sm90 | Arch::Sm90a if specialization.has_fp8_query() => 163,
        _ if specialization.has_fp8_query() => 170,
        Arch::Sm90 | Arch::Sm90a if !specialization.key_value_dtype().is_float8() => 192,
        _ => 176,
    }
}

/// Registers of the output from which on fewer tiles of `f32` are multiplied at a time.
const MANY_OUTPUT_REGISTERS: u32 = 64;
/// The most KV splits.
pub(crate) const MAX_SPLITS: u32 = 256;

impl AmpereConfig {
    /// The KV pipeline.
    pub(crate) const fn kv_pipeline(self) -> KvPipelineConfig {
        let Self { stages, tile_n, warps, producers, load_bytes, .. } = self;
        KvPipelineConfig { stages, tile_n, warps, producers, load_bytes }
    }

    /// Configs that no problem gets by default, and that gates, snapshots and tests go through all the same: between them
    /// they have every value of every choice.
    pub(crate) const LISTED: [Self; 12] = [
        Self { stages: 1, ..Self::BASE },
        Self { load_bytes: 4, layout: SharedLayout::Padded, ..Self::BASE },
        Self { load_bytes: 8, query: QueryPlace::Shared, ..Self::BASE },
        Self { exponential: Exponential::Shared, ..Self::BASE },
        Self { producers: 1, ..Self::BASE },
        Self { producers: 2, stages: 3, tile_n: 32, ..Self::BASE },
        Self { persistent: 5, ..Self::BASE },
        Self { persistent: 7, chunk_keys: 128, stages: 4, tile_n: 32, ..Self::BASE },
        Self { persistent: 7, chunk_keys: 128, pack_gqa: true, kv_split_warps: 4, stages: 3, pdl: true, ..Self::BASE },
        Self { l2: L2Window::Key, warps: 8, ..Self::BASE },
        Self { num_splits: 3, pack_gqa: true, warps: 2, ..Self::BASE },
        Self { num_splits: 4, cluster: true, pack_gqa: true, kv_split_warps: 4, ..Self::BASE },
    ];
}
