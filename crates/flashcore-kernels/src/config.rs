//! Every choice in a kernel.

use flashcore_ir::types::{Bf16, Bf16x2, F16, F16x2, F32};
use flashcore_ir::{Arch, Kernel};
use flashcore_problem::{DType, Problem};

use crate::attention::tile_ranges::RangeTiles;
use crate::attention::{ampere, combine, hopper, ladder, scalar, tile_ranges};
use crate::hopper_config::HopperConfig;
use crate::ladder_config::LadderConfig;
use crate::specialization::{MOST_WIDTH, Specialization};
use crate::tile::{Accumulation, Exponential, LANES, Rescale, SharedLayout};
use crate::{tuned, tuned_hopper};

/// A kernel and every choice in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Config {
    /// One thread a row.
    Scalar(ScalarConfig),
    /// Tiles in shared memory, scores too: the steps of the history between the other two.
    Ladder(LadderConfig),
    /// Tensor cores, `ldmatrix` and `cp.async`: everything from `sm_80` on.
    Ampere(AmpereConfig),
    /// Tensor copies, `mbarrier`s and products of warpgroups: `sm_90a`.
    Hopper(HopperConfig),
}

/// The choices of the scalar kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ScalarConfig {
    /// Threads, and so query rows, of a CTA.
    pub threads: u32,
}

impl Default for ScalarConfig {
    fn default() -> Self {
        Self { threads: 64 }
    }
}

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
    /// How tiles lie in shared memory.
    pub layout: SharedLayout,
    /// Where the query is between products.
    pub query: QueryPlace,
    /// When the output is brought to a new maximum.
    pub rescale: Rescale,
    /// Bytes that one copy from global memory moves, at most: 4, 8 or 16.
    pub load_bytes: u32,
    /// What products are added up in.
    pub accumulation: Accumulation,
    /// How exponentials are computed.
    pub exponential: Exponential,
    /// Warps that only copy keys and values for the others: 0, 1 or 2.
    pub producers: u32,
    /// CTAs that stay and take tile after tile; with 0, each tile has its own.
    pub persistent: u32,
    /// Parts of the keys, each with CTAs of its own, which a second kernel combines; 1 is all keys.
    pub num_splits: u32,
    /// Which rows are in a tile.
    pub pack_gqa: bool,
    /// Whether L2 is asked to keep the key.
    pub l2: L2Window,
}

/// Whether L2 is asked to keep the key.
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
        load_bytes: MOST_WIDTH,
        accumulation: Accumulation::F32,
        exponential: Exponential::Unit,
        producers: 0,
        persistent: 0,
        num_splits: 1,
        pack_gqa: false,
        l2: L2Window::Default,
    };

    /// The config with the same code: how many CTAs stay, how many parts the keys have and what L2 keeps is not compiled
    /// in.
    pub(crate) const fn compiled(self) -> Self {
        let persistent = if self.persistent > 0 { 1 } else { 0 };
        let num_splits = if self.num_splits > 1 { 2 } else { 1 };
        Self { persistent, num_splits, l2: L2Window::Default, ..self }
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
    pub(crate) const fn exchange_bytes(self, value_dim: u32) -> u32 {
        let rows = self.tile_m() * (self.kv_split_warps - 1);
        // The output, and a maximum and a sum for each of four lanes.
        rows * (value_dim.next_multiple_of(16) + 8) * 4
    }

    /// Threads of a CTA.
    pub const fn threads(self) -> u32 {
        self.warps.saturating_add(self.producers).saturating_mul(LANES)
    }

    /// Registers per thread that hold operands and results: query, scores and output, what is added
    /// to scores, and what warps that share keys send each other.
    pub const fn operand_registers(self, specialization: Specialization) -> u32 {
        let [head_dim, value_dim] = [specialization.head_dim, specialization.value_dim];
        let query = match self.query {
            QueryPlace::Registers => head_dim.next_multiple_of(16) / 4,
            QueryPlace::Shared => 0,
        };
        let (output, scores) = (value_dim.next_multiple_of(16) / 2, self.keys_per_warp() / 2);
        // Loads of a bias begin before they are needed, and have addresses.
        let bias = if specialization.bias { scores + scores / 4 } else { 0 };
        // So do those of tables, and the places of the scores are known.
        let expressions = if specialization.has_expressions() { self.keys_per_warp() / 4 } else { 0 };
        let exchange = if self.kv_split_warps > 1 { 24 } else { 0 };
        let halves = match self.accumulation {
            Accumulation::F32 => 0,
            Accumulation::F16 if output > scores => output / 2,
            Accumulation::F16 => scores / 2,
        };
        self.rows_per_warp / 16 * (query + output + scores + bias + expressions + halves) + exchange
    }

    /// Whether operands and results stay in registers.
    pub(crate) const fn fits_registers(self, specialization: Specialization, arch: Arch) -> bool {
        self.operand_registers(specialization) <= most_operand_registers(arch)
    }

    /// Registers per thread that the kernel may take: as many as leave room for three CTAs of four warps on a
    /// SM where the output is small, and for two where it is large.
    pub fn register_budget(self, specialization: Specialization) -> u32 {
        let is_small = specialization.value_dim <= 64 && self.rows_per_warp == 16;
        if is_small && !specialization.has_terms() && !specialization.has_expressions() { 168 } else { 255 }
    }
}

/// The most of [`AmpereConfig::operand_registers`]: with more, compilers move registers to memory and back in each tile.
/// That for Hopper gets along with the fewest others.
pub(crate) const fn most_operand_registers(arch: Arch) -> u32 {
    match arch {
        Arch::Sm90 | Arch::Sm90a => 192,
        _ => 176,
    }
}

/// A choice that no kernel can be generated with.
pub(crate) struct Flaw {
    pub(crate) argument: &'static str,
    pub(crate) value: u32,
    pub(crate) allowed: &'static str,
}

impl Config {
    /// The scalar kernel as it is by default.
    pub fn scalar() -> Self {
        Self::Scalar(ScalarConfig::default())
    }

    /// The Ampere kernel as it is by default.
    pub fn ampere() -> Self {
        Self::Ampere(AmpereConfig::default())
    }

    /// The Hopper kernel as it is by default.
    pub fn hopper() -> Self {
        Self::Hopper(HopperConfig::default())
    }

    /// The Ampere kernel with another layout of shared memory.
    pub fn ampere_with_layout(layout: SharedLayout) -> Self {
        Self::Ampere(AmpereConfig { layout, ..AmpereConfig::default() })
    }

    /// Every config that some problem gets by default, on some GPU.
    pub fn defaults() -> Vec<Self> {
        let ampere = tuned::ALL.map(Self::Ampere);
        let hopper = tuned_hopper::ALL.map(Self::Hopper);
        [Self::scalar()].into_iter().chain(ampere).chain(hopper).collect()
    }

    /// The configs that resource gates, snapshots and tests go through.
    pub fn all() -> Vec<Self> {
        let ampere = AmpereConfig::default();
        let mut configs = vec![
            Self::scalar(),
            Self::Ampere(ampere),
            Self::ampere_with_layout(SharedLayout::Plain),
            Self::ampere_with_layout(SharedLayout::Padded),
            Self::Ampere(AmpereConfig { tile_n: 32, stages: 3, ..ampere }),
            Self::Ampere(AmpereConfig { tile_n: 128, ..ampere }),
            Self::Ampere(AmpereConfig { warps: 8, tile_n: 128, ..ampere }),
        ];
        let others = [AmpereConfig { rows_per_warp: 32, ..ampere }].into_iter().chain(tuned::ALL).map(Self::Ampere);
        let others = others.chain(LadderConfig::LISTED.map(Self::Ladder)).chain(AmpereConfig::LISTED.map(Self::Ampere));
        for config in others {
            if !configs.contains(&config) {
                configs.push(config);
            }
        }
        configs.extend(tuned_hopper::ALL.map(Self::Hopper));
        configs
    }

    /// The name of the kernel.
    pub const fn family(self) -> &'static str {
        match self {
            Self::Scalar(_) => "scalar",
            Self::Ladder(_) => "ladder",
            Self::Ampere(_) => "ampere",
            Self::Hopper(_) => "hopper",
        }
    }

    /// Query rows of a CTA.
    pub const fn tile_m(self) -> u32 {
        match self {
            Self::Scalar(config) => config.threads,
            Self::Ladder(config) => config.tile_m(),
            Self::Ampere(config) => config.tile_m(),
            Self::Hopper(config) => config.tile_m(),
        }
    }

    /// The tiles for which it is found out what an expression leaves, where keys come in tiles.
    pub(crate) fn range_tiles(self, specialization: Specialization) -> Option<RangeTiles> {
        let (tile_m, tile_n) = (self.tile_m(), self.tile_n()?);
        match self {
            Self::Hopper(config) => config.range_tiles(specialization),
            _ => specialization.mask_mod.map(|_| RangeTiles::at_multiples(tile_m, tile_n)),
        }
    }

    /// Keys of a tile, where keys come in tiles.
    pub const fn tile_n(self) -> Option<u32> {
        match self {
            Self::Scalar(_) => None,
            Self::Ladder(config) => Some(config.tile_n),
            Self::Ampere(config) => Some(config.tile_n),
            Self::Hopper(config) => Some(config.tile_n),
        }
    }

    /// What `problem` fixes when this kernel is generated for it.
    pub fn specialization(self, problem: &Problem) -> Specialization {
        let specialization = Specialization::of(problem);
        match self {
            // Element by element, whatever their alignment, and scaled before anything else.
            Self::Scalar(_) => Specialization { width: MOST_WIDTH, scaled_first: false, ..specialization },
            Self::Ladder(_) => Specialization { scaled_first: false, ..specialization },
            Self::Ampere(_) | Self::Hopper(_) => specialization,
        }
    }

    /// The element types the kernel has.
    pub(crate) const fn dtypes(self) -> &'static [DType] {
        match self {
            Self::Scalar(_) => &[DType::F16, DType::Bf16, DType::F32],
            // Tensor cores add up products of `bf16` in `f32` alone.
            Self::Ampere(AmpereConfig { accumulation: Accumulation::F16, .. }) => &[DType::F16],
            Self::Ladder(_) | Self::Ampere(_) | Self::Hopper(_) => &[DType::F16, DType::Bf16],
        }
    }

    /// What head and value dimensions are a multiple of, and the largest of them.
    pub(crate) const fn dims(self) -> (usize, usize) {
        match self {
            Self::Scalar(_) => (1, 1024),
            Self::Ladder(_) | Self::Ampere(_) | Self::Hopper(_) => (8, 256),
        }
    }

    /// What no kernel can be generated with.
    pub(crate) fn flaws(self) -> Vec<Flaw> {
        let flaw =
            |argument, value, allowed, is_allowed: bool| (!is_allowed).then_some(Flaw { argument, value, allowed });
        let flaws = match self {
            Self::Scalar(ScalarConfig { threads }) => {
                vec![flaw("threads", threads, "1 to 256", (1..=256).contains(&threads))]
            }
            Self::Ladder(config) => return config.flaws(),
            Self::Ampere(config) => return config.flaws(),
            Self::Hopper(config) => config.flaws(),
        };
        flaws.into_iter().flatten().collect()
    }

    /// Whether the kernel has room in registers and shared memory.
    pub fn fits(self, specialization: Specialization, arch: Arch) -> bool {
        let in_registers = match self {
            Self::Scalar(_) => true,
            Self::Ladder(config) => {
                config.operand_registers(specialization.value_dim) <= LadderConfig::MOST_OPERAND_REGISTERS
            }
            Self::Ampere(config) => config.fits_registers(specialization, arch),
            Self::Hopper(config) => arch == Arch::Sm90a && config.fits_registers(specialization),
        };
        in_registers && self.generate(specialization).shared_bytes <= arch.shared_bytes_per_cta()
    }

    /// Writes the kernel for a specialization. What can be generated is [`crate::Plan::new`]'s to decide.
    pub fn generate(self, specialization: Specialization) -> Kernel {
        let name = self.kernel_name(specialization);
        match (self, specialization.dtype) {
            (Self::Scalar(config), DType::F16) => scalar::kernel::<F16>(name, config, specialization),
            (Self::Scalar(config), DType::Bf16) => scalar::kernel::<Bf16>(name, config, specialization),
            (Self::Scalar(config), DType::F32 | DType::F64) => scalar::kernel::<F32>(name, config, specialization),
            (Self::Ladder(config), DType::Bf16) => ladder::kernel::<Bf16x2>(name, config, specialization),
            (Self::Ladder(config), _) => ladder::kernel::<F16x2>(name, config, specialization),
            (Self::Ampere(config), DType::Bf16) => ampere::kernel::<Bf16x2>(name, config, specialization),
            (Self::Ampere(config), _) => ampere::kernel::<F16x2>(name, config, specialization),
            (Self::Hopper(config), DType::Bf16) => hopper::kernel::<Bf16x2>(name, config, specialization),
            (Self::Hopper(config), _) => hopper::kernel::<F16x2>(name, config, specialization),
        }
    }

    /// Writes the kernel that adds up what others have for KV splits.
    pub(crate) fn generate_combine(specialization: Specialization) -> Kernel {
        let Specialization { dtype, value_dim, sinks, lse, .. } = specialization;
        let features = [(sinks, "_sinks"), (lse, "_lse")];
        let features: String = features.into_iter().filter(|(is_on, _)| *is_on).map(|(_, feature)| feature).collect();
        let name = format!("flashcore_combine_{dtype}_d{value_dim}{features}");
        match dtype {
            DType::Bf16 => combine::kernel::<Bf16>(name, specialization),
            DType::F16 => combine::kernel::<F16>(name, specialization),
            DType::F32 | DType::F64 => combine::kernel::<F32>(name, specialization),
        }
    }

    /// Writes the kernel that finds out which tiles of keys an expression leaves to each tile of query rows, where there is one
    /// and this kernel makes use of it.
    pub(crate) fn generate_ranges(self, specialization: Specialization) -> Option<Kernel> {
        let tiles = self.range_tiles(specialization)?;
        let name = format!("flashcore_ranges_{}x{}", tiles.range_rows, tiles.tile_n);
        tile_ranges::kernel(name, specialization, tiles)
    }

    fn kernel_name(self, specialization: Specialization) -> String {
        let Specialization { dtype, head_dim, value_dim, width, .. } = specialization;
        let compiled = match self {
            Self::Ampere(config) => Self::Ampere(config.compiled()),
            other => other,
        };
        let config = compiled.to_string().replace('-', "_");
        let value = if value_dim == head_dim { String::new() } else { format!("x{value_dim}") };
        let features = [
            (specialization.left, "left"),
            (specialization.right, "right"),
            (specialization.seqused_k, "lengths"),
            (specialization.softcap, "softcap"),
            (specialization.alibi, "alibi"),
            (specialization.bias, "bias"),
            (specialization.sinks, "sinks"),
            (specialization.score_mod.is_some(), "scoremod"),
            (specialization.mask_mod.is_some(), "maskmod"),
            (specialization.scaled_first, "scaled"),
            (specialization.lse, "lse"),
        ];
        let features: String =
            features.into_iter().filter(|(is_on, _)| *is_on).flat_map(|(_, feature)| ["_", feature]).collect();
        let width = if width == MOST_WIDTH { String::new() } else { format!("_w{width}") };
        format!("flashcore_{config}_{dtype}_d{head_dim}{value}{features}{width}")
    }
}
