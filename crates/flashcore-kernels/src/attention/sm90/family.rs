//! The Hopper kernel as a family.

use flashcore_ir::target::ADA_FP8;
use flashcore_ir::types::{Bf16x2, F16x2};
use flashcore_ir::{Arch, Kernel, Since, TensorMap};
use flashcore_problem::{DType, DTypes, Operand, Problem};

use super::Shared;
use super::tensor_maps::tensor_maps;
use crate::attention::block_mask::BlockMaskTiles;
use crate::attention::block_mask::mode::BlockMaskMode;
use crate::attention::scheduler::lpt::LptOrder;
use crate::config::{Config, HopperConfig, Table};
use crate::family::{Family, KernelTraits};
use crate::grid::{GridShape, head_tiles, output_rows};
use crate::parameters::Extra;
use crate::primitives::{Rescale, shared_bytes};
use crate::specialization::{MAX_VEC_BYTES, Specialization};
use crate::unsupported::{PAGE_MULTIPLE, Reason, dtype_reason};

impl Family for HopperConfig {
    fn traits(&self) -> KernelTraits {
        let dtypes = &[DType::F16, DType::Bf16, DType::E4m3];
        KernelTraits {
            only_arch: Some(Arch::Sm90a),
            pack_gqa: self.pack_gqa,
            chunks: (self.chunk_keys > 0).then_some((self.chunk_keys, self.pdl)),
            resets_counter: self.dynamic.then_some(self.pdl),
            ..KernelTraits::new(Self::FAMILY, self.tile_m(), Some(self.tile_n), dtypes)
        }
    }

    fn specialize(&self, specialization: Specialization, problem: &Problem) -> Specialization {
        let page_box = problem.paged.map_or(0, |paged| self.page_box(paged.page_size));
        Specialization { page_box, ..specialization }
    }

    fn block_mask_tiles(&self, specialization: Specialization) -> Option<BlockMaskTiles> {
        Self::block_mask_tiles(*self, specialization)
    }

    fn registers(&self, specialization: Specialization, _: Arch) -> Option<(u32, u32)> {
        Some((self.operand_registers(specialization), self.most_operand_registers(specialization)))
    }

    fn shared_bytes(&self, specialization: Specialization) -> u32 {
        shared_bytes(|k| {
            Shared::reserve(k, *self, specialization, BlockMaskMode::of(*self, specialization));
        })
    }

    fn dtype_reasons(&self, problem: &Problem, _: Arch) -> Vec<Reason> {
        let types = problem.dtypes();
        if types.key_value.is_float8() && !types.query.is_float8() {
            return vec![Reason::Float8 { kernel: Self::FAMILY, types }];
        }
        dtype_reason(self.traits(), types.query).into_iter().collect()
    }

    /// A TMA box lies in one page, at a multiple of its rows.
    fn sequence_reason(&self, problem: &Problem, feature: Operand) -> Option<Reason> {
        match problem.paged {
            _ if problem.mask_mod.is_some() => Some(Reason::MaskOfSequences { feature: feature.name() }),
            Some(paged) if !paged.page_size.is_multiple_of(PAGE_MULTIPLE) => {
                Some(Reason::PageSize { page_size: paged.page_size })
            }
            Some(_) if problem.leftpad_k => Some(Reason::PaddedPages),
            _ => None,
        }
    }

    fn reasons(&self, problem: &Problem, specialization: Specialization) -> Vec<Reason> {
        let (kernel, config, mut reasons) = (Self::FAMILY, Config::from(*self), Vec::new());
        if specialization.has_fp8_query() {
            reasons.extend(self.fp8_reasons(specialization));
        } else if self.one_level {
            reasons.push(Reason::OneLevel { config });
        }
        let (group, tile_m) = (problem.query_heads / problem.key_heads.max(1), self.tile_m() as usize);
        if self.pack_gqa && !tile_m.is_multiple_of(group) {
            reasons.push(Reason::Group { group, tile_m });
        }
        if self.dynamic && !specialization.has_query_lengths() {
            reasons.push(Reason::Dynamic { config });
        }
        if specialization.vec_bytes < MAX_VEC_BYTES {
            reasons.push(Reason::Width { kernel, width: specialization.vec_bytes });
        }
        if !problem.output_shape().is_empty() && reasons.is_empty() {
            let maps = tensor_maps(problem, *self);
            let invalid = maps.filter_map(|(operand, map)| Some((operand.name(), map.validate().err()?)));
            reasons.extend(invalid.map(|(tensor, error)| Reason::Tensor { kernel, tensor, error }));
        }
        reasons
    }

    /// Weights become codes.
    fn fp8_since(&self, types: DTypes) -> Option<Since> {
        types.query.is_float8().then_some(ADA_FP8)
    }

    fn grid(&self, problem: &Problem) -> GridShape {
        if self.persistent {
            return GridShape { grid: [LptOrder::of(problem, *self).tiles, 1, 1], extra: Extra::Nothing };
        }
        let (tiles, heads) = head_tiles(problem, self.tile_m(), self.pack_gqa);
        let (batch, chunk_keys) = (problem.batch as u32, self.chunk_keys);
        if chunk_keys == 0 {
            return GridShape { grid: [tiles.saturating_mul(self.cluster), heads, batch], extra: Extra::Nothing };
        }
        let max_chunks = problem.key_length.div_ceil(chunk_keys as usize).max(1) as u32;
        let extra = Extra::Chunks { max_chunks, rows: output_rows(problem), chunk_keys, sequences: batch, heads };
        GridShape { grid: [tiles.saturating_mul(max_chunks), heads, batch], extra }
    }

    fn tensor_maps(&self, problem: &Problem) -> Vec<(Operand, TensorMap)> {
        tensor_maps(problem, *self).collect()
    }

    fn order(
        &self,
        problem: &Problem,
        specialization: Specialization,
        num_sms: u32,
    ) -> Option<(LptOrder, Option<u32>)> {
        let order = LptOrder::of(problem, *self);
        if !self.persistent {
            return Some((order, None));
        }
        let mut ctas = order.tiles.min(num_sms.max(1));
        let heads = problem.query_heads as u32;
        if specialization.has_query_lengths() && specialization.right && heads <= ctas && !self.dynamic {
            // Sequences of equal length: long and short tiles alternate for each CTA.
            ctas -= ctas % heads;
        }
        Some((order.for_ctas(problem, *self, ctas), Some(ctas)))
    }

    fn generate(&self, name: String, specialization: Specialization, _: Arch) -> Kernel {
        let write = match specialization.output_dtype() {
            DType::Bf16 => super::kernel::<Bf16x2>,
            _ => super::kernel::<F16x2>,
        };
        write(name, *self, specialization)
    }

    fn compiled(&self) -> Option<Config> {
        (self.chunk_keys > 0).then(|| Self { chunk_keys: self.tile_n, ..*self }.into())
    }

    fn with_chunk_keys(&self, keys: u32) -> Option<Config> {
        Some(Self { chunk_keys: keys.next_multiple_of(self.tile_n), ..*self }.into())
    }

    fn near(&self, _: &Problem) -> Vec<Config> {
        vec![Self { persistent: !self.persistent, dynamic: false, ..*self }.into()]
    }
}

impl HopperConfig {
    /// Reasons against query, key and value of 8 bits.
    fn fp8_reasons(self, specialization: Specialization) -> impl Iterator<Item = Reason> {
        let refused = [
            (
                specialization.has(Operand::Lse),
                "an LSE",
                "wgmma adds products of 8 bits with 13 bits, so that the LSE is off by 1e-3 and more; take an ampere config",
            ),
            (
                !self.tile_n.is_multiple_of(32),
                "tiles of keys that are no multiple of 32",
                "take 32, 64, 96, 128 or 192 keys",
            ),
            (self.rescale == Rescale::Threshold, "-threshold", "weights beyond 2^8 do not fit e4m3; leave it out"),
            (self.dynamic, "-dynamic", "its transposers do not hear of tiles from a counter; leave it out"),
            (
                self.one_level && specialization.has(Operand::VScale),
                "-1level with v_scale",
                "scales of tokens have no place there; leave -1level out",
            ),
        ];
        let refused = refused.into_iter().filter(|(is_there, ..)| *is_there);
        refused.map(|(_, what, instead)| Reason::Fp8 { what, instead })
    }
}
