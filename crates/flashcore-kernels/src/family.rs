//! Family: the attention kernels of one kind, one of which a config picks.
//!
//! Everything that depends on the family of a config is asked here; each family answers in its folder below
//! [`attention`](crate::attention).

use flashcore_ir::{Arch, Kernel, Since, TensorMap};
use flashcore_problem::{DType, DTypes, Operand, Problem};

use crate::accuracy::Accuracy;
use crate::attention::block_mask::BlockMaskTiles;
use crate::attention::scheduler::lpt::LptOrder;
use crate::config::Config;
use crate::grid::{GridShape, head_tiles};
use crate::parameters::Extra;
use crate::primitives::Fp8Widening;
use crate::specialization::Specialization;
use crate::unsupported::{Reason, dtype_reason};

/// Kernel traits: what follows from a config alone.
#[derive(Debug, Clone, Copy)]
pub struct KernelTraits {
    /// The name of the family.
    pub family: &'static str,
    /// Query rows of a CTA.
    pub tile_m: u32,
    /// Keys of a tile, where keys come in tiles.
    pub tile_n: Option<u32>,
    /// The element types of the query.
    pub dtypes: &'static [DType],
    /// The number that head and value dimensions are a multiple of, and the largest of them.
    pub dims: (usize, usize),
    /// The precision of the operands as the kernel multiplies them.
    pub accuracy: Accuracy,
    /// The one architecture that the kernel is for.
    pub only_arch: Option<Arch>,
    /// True if the kernel needs clusters of CTAs and is not for one architecture alone.
    pub needs_clusters: bool,
    /// True if the query heads of a key head share tiles.
    pub pack_gqa: bool,
    /// Keys of a chunk, and true if the combine kernel starts while the chunks end (PDL), where there are chunks.
    pub chunks: Option<(u32, bool)>,
    /// True if a part of L2 is set aside for the key.
    pub keeps_key_in_l2: bool,
    /// Where tiles come from a counter: true if the kernel that resets it starts early (PDL).
    pub resets_counter: Option<bool>,
}

impl KernelTraits {
    /// A kernel with tiles of rows and keys, and nothing else.
    pub(crate) const fn new(family: &'static str, tile_m: u32, tile_n: Option<u32>, dtypes: &'static [DType]) -> Self {
        Self {
            family,
            tile_m,
            tile_n,
            dtypes,
            dims: (8, 256),
            accuracy: Accuracy::Exact,
            only_arch: None,
            needs_clusters: false,
            pack_gqa: false,
            chunks: None,
            keeps_key_in_l2: false,
            resets_counter: None,
        }
    }
}

/// A config of a family, and what the family says of it.
pub(crate) trait Family {
    /// The kernel traits.
    fn traits(&self) -> KernelTraits;

    /// The specialization of this kernel, from that of the problem.
    fn specialize(&self, specialization: Specialization, _problem: &Problem) -> Specialization {
        specialization
    }

    /// The tiles of the block mask of a `mask_mod`, where keys come in tiles.
    fn block_mask_tiles(&self, specialization: Specialization) -> Option<BlockMaskTiles> {
        specialization.mask_mod?;
        let KernelTraits { tile_m, tile_n, .. } = self.traits();
        Some(BlockMaskTiles::aligned(tile_m, tile_n?))
    }

    /// Registers of a thread that hold operands and results, and the most that compilers leave in registers.
    fn registers(&self, _specialization: Specialization, _arch: Arch) -> Option<(u32, u32)> {
        None
    }

    /// Bytes of shared memory of a CTA.
    fn shared_bytes(&self, specialization: Specialization) -> u32;

    /// Reasons against the element types of a problem.
    fn dtype_reasons(&self, problem: &Problem, _arch: Arch) -> Vec<Reason> {
        let (types, traits) = (problem.dtypes(), self.traits());
        if types.key_value.is_float8() {
            return vec![Reason::Float8 { kernel: traits.family, types }];
        }
        dtype_reason(traits, types.query).into_iter().collect()
    }

    /// The reason against packed, paged and padded sequences, one operand of which is `feature`.
    fn sequence_reason(&self, problem: &Problem, feature: Operand) -> Option<Reason> {
        problem.mask_mod.map(|_| Reason::MaskOfSequences { feature: feature.name() })
    }

    /// Other reasons against a problem, whose shape, types and sequences the kernel takes.
    fn reasons(&self, _problem: &Problem, _specialization: Specialization) -> Vec<Reason> {
        Vec::new()
    }

    /// The needs of the 8-bit floats of a problem, which drivers and GPUs in use may lack.
    fn fp8_since(&self, _types: DTypes) -> Option<Since> {
        None
    }

    /// The grid, and the parameters that follow from it.
    fn grid(&self, problem: &Problem) -> GridShape {
        let (tiles, heads) = head_tiles(problem, self.traits().tile_m, false);
        GridShape { grid: [tiles, heads, problem.batch as u32], extra: Extra::Nothing }
    }

    /// The tensor maps of TMA, in the order of the parameters. Their addresses come with each launch.
    fn tensor_maps(&self, _problem: &Problem) -> Vec<(Operand, TensorMap)> {
        Vec::new()
    }

    /// The order of tiles, and the number of persistent CTAs where they are.
    fn order(
        &self,
        _problem: &Problem,
        _specialization: Specialization,
        _num_sms: u32,
    ) -> Option<(LptOrder, Option<u32>)> {
        None
    }

    /// Writes the kernel.
    fn generate(&self, name: String, specialization: Specialization, arch: Arch) -> Kernel;

    /// The config without what is not compiled in, where that is another.
    fn compiled(&self) -> Option<Config> {
        None
    }

    /// The config with chunks of `keys` keys, where it has chunks.
    fn with_chunk_keys(&self, _keys: u32) -> Option<Config> {
        None
    }

    /// The config with a way to widen keys and values of 8 bits, where the kernel widens them.
    fn with_fp8_widening(&self, _widening: Fp8Widening) -> Option<Config> {
        None
    }

    /// Configs that a search tries next, beside those with one other value of [the table](crate::config::Table).
    fn near(&self, _problem: &Problem) -> Vec<Config> {
        Vec::new()
    }
}
