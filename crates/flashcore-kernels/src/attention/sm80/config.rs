//! Choices of the Ampere kernel (`sm_80` and everything later): `mma.sync`, `ldmatrix` and `cp.async`.

use flashcore_ir::Arch;
use flashcore_problem::Operand;

use crate::attention::sm80::kv_pipeline::KvPipelineConfig;
use crate::config::Flaw;
use crate::element::ElementLayout;
use crate::primitives::{Accumulation, Exponential, Fp8Widening, LANES, Rescale, SharedLayout, Tf32Products};
use crate::specialization::{MAX_VEC_BYTES, Specialization};

/// The choices of the Ampere kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AmpereConfig {
    /// Warps of a CTA.
    pub warps: u32,
    /// Query rows of each warp: 16, or 32, which read each key and value from shared memory half as often.
    pub rows_per_warp: u32,
    /// Keys of a tile.
    pub tile_n: u32,
    /// Warps that share the keys of a tile for the same rows, and add up what they have at the end: 1, 2 or 4.
    pub kv_split_warps: u32,
    /// Tiles of keys and values in shared memory at a time: one is read while the others are on their way; with 1, each is
    /// waited for as soon as it is asked for.
    pub stages: u32,
    /// The layout of tiles in shared memory.
    pub layout: SharedLayout,
    /// Where the query is between products.
    pub query: QueryPlace,
    /// The blocks after which the output is rescaled to a new row max.
    pub rescale: Rescale,
    /// Bytes that one copy from global memory moves, at most: 4, 8 or 16.
    pub load_bytes: u32,
    /// The type of accumulators.
    pub accumulation: Accumulation,
    /// The products of `tf32` that make up one of `f32`; none for elements of 16 bits.
    pub tf32: Option<Tf32Products>,
    /// The way in which 8-bit keys and values become 16-bit ones; without effect where they are not of 8 bits, or the query is
    /// too.
    pub fp8: Fp8Widening,
    /// The units that compute exponentials.
    pub exponential: Exponential,
    /// Warps that only copy keys and values for the others: 0, 1 or 2.
    pub producers: u32,
    /// Persistent CTAs, each of which loops over tiles; with 0, each tile has a CTA of its own.
    pub persistent: u32,
    /// Split-KV: splits of the keys, each with CTAs of its own, which the combine kernel merges; 1 is all keys.
    pub num_splits: u32,
    /// True if the splits of a tile are the CTAs of a cluster, which merge their results in shared memory (DSMEM), and no
    /// combine kernel follows; that takes `sm_90`.
    pub cluster: bool,
    /// Balanced split-KV: keys of a chunk. Persistent CTAs take the chunks of all sequences in turn, and the combine kernel
    /// merges them; 0 is no chunks.
    pub chunk_keys: u32,
    /// True if the combine kernel starts while the chunks end (PDL), which takes `sm_90`.
    pub pdl: bool,
    /// True if a tile has the rows of all query heads that share a key head.
    pub pack_gqa: bool,
    /// The access-policy window of L2.
    pub l2: L2Window,
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

impl Default for AmpereConfig {
    fn default() -> Self {
        Self::BASE
    }
}

impl AmpereConfig {
    /// The default.
    pub(crate) const BASE: Self = Self {
        warps: 4,
        rows_per_warp: 16,
        tile_n: 64,
        kv_split_warps: 1,
        stages: 2,
        layout: SharedLayout::Swizzled,
        query: QueryPlace::Registers,
        rescale: Rescale::Always,
        load_bytes: MAX_VEC_BYTES,
        accumulation: Accumulation::F32,
        tf32: None,
        fp8: Fp8Widening::Integer,
        exponential: Exponential::Unit,
        producers: 0,
        persistent: 0,
        num_splits: 1,
        cluster: false,
        chunk_keys: 0,
        pdl: false,
        pack_gqa: false,
        l2: L2Window::Default,
    };

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
    /// The choices that no kernel can be generated with.
    pub(crate) fn flaws(self) -> Vec<Flaw> {
        let Self {
            warps,
            rows_per_warp,
            tile_n,
            kv_split_warps,
            stages,
            load_bytes,
            producers,
            persistent,
            num_splits,
            chunk_keys,
            pdl,
            cluster,
            ..
        } = self;
        let flaw =
            |argument, value, allowed, is_allowed: bool| (!is_allowed).then_some(Flaw { argument, value, allowed });
        let flaws = [
            // Fewer would not copy a whole pattern of the swizzle at a time.
            flaw("warps", warps, "2, 4 or 8", matches!(warps, 2 | 4 | 8)),
            flaw(
                "kv_split_warps",
                kv_split_warps,
                "1, 2 or 4, at most the warps, with a multiple of 16 keys for each",
                matches!(kv_split_warps, 1 | 2 | 4) && kv_split_warps <= warps && tile_n % (16 * kv_split_warps) == 0,
            ),
            flaw("rows_per_warp", rows_per_warp, "16 or 32", matches!(rows_per_warp, 16 | 32)),
            flaw("tile_n", tile_n, "a multiple of 16 up to 128", tile_n % 16 == 0 && (16..=128).contains(&tile_n)),
            // Two barriers for each stage, where there are producers, and two others.
            flaw("stages", stages, "1 to 8", (1..=8).contains(&stages)),
            flaw("stages", stages, "at most 7 with producers", producers == 0 || stages <= 7),
            flaw("load_bytes", load_bytes, "4, 8 or 16", matches!(load_bytes, 4 | 8 | 16)),
            flaw("producers", producers, "0, 1 or 2", producers <= 2),
            flaw("num_splits", num_splits, "1 to 256", (1..=MAX_SPLITS).contains(&num_splits)),
            flaw("num_splits", num_splits, "1 with persistent CTAs", num_splits == 1 || persistent == 0),
            flaw(
                "num_splits",
                num_splits,
                "2, 4 or 8 in a cluster, without producers",
                !cluster || matches!(num_splits, 2 | 4 | 8) && producers == 0,
            ),
            flaw(
                "persistent",
                persistent,
                "0 with pack_gqa, where the query heads of a key head share tiles",
                persistent == 0 || !self.pack_gqa || chunk_keys > 0,
            ),
            flaw(
                "chunk_keys",
                chunk_keys,
                "0, or a multiple of tile_n",
                tile_n == 0 || chunk_keys.is_multiple_of(tile_n),
            ),
            flaw("chunk_keys", chunk_keys, "0 unless CTAs are persistent", chunk_keys == 0 || persistent > 0),
            flaw("chunk_keys", chunk_keys, "0 with splits", chunk_keys == 0 || num_splits == 1),
            flaw("producers", producers, "0 with chunks", chunk_keys == 0 || producers == 0),
            flaw(
                "accumulation",
                16,
                "f32 with products of tf32: leave -f16sums out",
                self.tf32.is_none() || matches!(self.accumulation, Accumulation::F32),
            ),
            flaw("pdl", u32::from(pdl), "0 without chunks", !pdl || chunk_keys > 0),
        ];
        flaws.into_iter().flatten().collect()
    }

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
