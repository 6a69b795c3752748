//! The Ampere kernel as a family.

use flashcore_ir::target::{ADA_FP8, ADA_FP8_MMA};
use flashcore_ir::types::{Bf16x2, F16x2, Tf32};
use flashcore_ir::{Arch, Kernel, Since};
use flashcore_problem::{DType, DTypes, Problem};

use super::config::most_operand_registers;
use super::{ClusterMerge, Tiles};
use crate::accuracy::Accuracy;
use crate::attention::scheduler::chunks::most_units;
use crate::config::{AmpereConfig, Config, L2Window, QueryPlace, Table};
use crate::family::{Family, KernelTraits};
use crate::grid::{GridShape, head_tiles, output_rows};
use crate::parameters::Extra;
use crate::primitives::{Accumulation, Fp8Widening, HALF_BYTES, Rescale, Tf32Products, shared_bytes};
use crate::specialization::Specialization;
use crate::unsupported::{Reason, dtype_reason};

/// Keys of a tile that are worth trying.
const TILE_N: [u32; 6] = [16, 32, 48, 64, 96, 128];
/// Warps, and how many of them share keys, that are worth trying.
const WARPS: [(u32, u32); 8] = [(2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (8, 2), (4, 4), (8, 4)];

impl Family for AmpereConfig {
    fn traits(&self) -> KernelTraits {
        let dtypes: &[_] = match (self.tf32, self.accumulation) {
            (Some(_), _) => &[DType::F32],
            // Tensor cores add up products of `bf16` in `f32` alone.
            (None, Accumulation::F16) => &[DType::F16],
            (None, Accumulation::F32) => &[DType::F16, DType::Bf16, DType::E4m3],
        };
        KernelTraits {
            // Wider outputs leave no registers for the parts of `f32`: ptxas spills.
            dims: (8, if self.tf32.is_some() { 128 } else { 256 }),
            accuracy: match self.tf32 {
                Some(Tf32Products::Three) => Accuracy::NearF32,
                Some(Tf32Products::One) => Accuracy::Tf32,
                None => Accuracy::Exact,
            },
            needs_clusters: self.cluster,
            pack_gqa: self.pack_gqa,
            chunks: (self.chunk_keys > 0).then_some((self.chunk_keys, self.pdl)),
            keeps_key_in_l2: self.l2 == L2Window::Key,
            ..KernelTraits::new(Self::FAMILY, self.tile_m(), Some(self.tile_n), dtypes)
        }
    }

    fn registers(&self, specialization: Specialization, arch: Arch) -> Option<(u32, u32)> {
        Some((self.operand_registers(specialization), most_operand_registers(arch, specialization)))
    }

    fn shared_bytes(&self, specialization: Specialization) -> u32 {
        shared_bytes(|k| {
            if self.cluster {
                ClusterMerge::reserve(k, self.num_splits, self.tile_m(), specialization.value_dim);
            }
            Tiles::reserve(k, *self, specialization);
        })
    }

    fn dtype_reasons(&self, problem: &Problem, arch: Arch) -> Vec<Reason> {
        let types = problem.dtypes();
        match (types.query, self.tf32) {
            (DType::F32, None) => vec![Reason::Tf32 { config: (*self).into() }],
            _ if !types.key_value.is_float8() => dtype_reason(self.traits(), types.query).into_iter().collect(),
            (_, Some(_)) => vec![Reason::Float8 { kernel: Self::FAMILY, types }],
            (_, None) => self.fp8_reasons(problem, arch),
        }
    }

    fn fp8_since(&self, types: DTypes) -> Option<Since> {
        match self.fp8 {
            _ if types.query.is_float8() => Some(ADA_FP8_MMA),
            Fp8Widening::Convert if types.key_value.is_float8() => Some(ADA_FP8),
            _ => None,
        }
    }

    fn grid(&self, problem: &Problem) -> GridShape {
        let Self { persistent, num_splits, cluster, chunk_keys, .. } = *self;
        let (tiles, heads) = head_tiles(problem, self.tile_m(), self.pack_gqa);
        let (batch, rows) = (problem.batch as u32, output_rows(problem));
        if chunk_keys > 0 {
            let bounds = [batch, heads, tiles, problem.key_length as u32, chunk_keys].map(u64::from);
            let (units, max_chunks) = most_units(bounds);
            let max_chunks = max_chunks as u32;
            let extra = Extra::Chunks { max_chunks, rows, chunk_keys, sequences: batch, heads };
            return GridShape { grid: [units.min(persistent.into()) as u32, 1, 1], extra };
        }
        if persistent > 0 {
            let all = tiles.saturating_mul(heads).saturating_mul(batch);
            return GridShape { grid: [persistent.min(all), 1, 1], extra: Extra::Tiles { tiles, heads, all } };
        }
        let extra = if num_splits > 1 && !cluster { Extra::Splits { num_splits, rows } } else { Extra::Nothing };
        GridShape { grid: [tiles.saturating_mul(num_splits), heads, batch], extra }
    }

    fn generate(&self, name: String, specialization: Specialization, arch: Arch) -> Kernel {
        let write = match specialization.dtype {
            _ if self.tf32.is_some() => super::kernel::<Tf32>,
            _ if specialization.key_value_dtype().is_float8() => {
                return super::fp8_kernel(name, *self, specialization, arch);
            }
            DType::Bf16 => super::kernel::<Bf16x2>,
            _ => super::kernel::<F16x2>,
        };
        write(name, *self, specialization)
    }

    fn compiled(&self) -> Option<Config> {
        Some(Self::compiled(*self).into())
    }

    fn with_chunk_keys(&self, keys: u32) -> Option<Config> {
        Some(Self { chunk_keys: keys.next_multiple_of(self.tile_n), ..*self }.into())
    }

    fn with_fp8_widening(&self, fp8: Fp8Widening) -> Option<Config> {
        (self.tf32.is_none() && self.accumulation == Accumulation::F32).then_some(Self { fp8, ..*self }.into())
    }

    fn near(&self, problem: &Problem) -> Vec<Config> {
        let types = problem.dtypes();
        let rows_per_warp = 48 - self.rows_per_warp.min(32);
        let mut configs =
            [QueryPlace::Registers, QueryPlace::Shared].map(|query| Self { rows_per_warp, query, ..*self }).to_vec();
        configs.extend(WARPS.map(|(warps, kv_split_warps)| Self { warps, kv_split_warps, ..*self }));
        let place = TILE_N.iter().position(|keys| *keys >= self.tile_n).unwrap_or(0);
        let tiles = TILE_N.into_iter().skip(place.saturating_sub(1)).take(3);
        configs.extend(tiles.map(|tile_n| Self { tile_n, ..*self }));
        if types.key_value.is_float8() && !types.query.is_float8() {
            configs.extend([Fp8Widening::Integer, Fp8Widening::Convert].map(|fp8| Self { fp8, ..*self }));
        }
        configs.into_iter().map(Config::from).collect()
    }
}

impl AmpereConfig {
    /// Reasons against keys and values of 8 bits.
    fn fp8_reasons(self, problem: &Problem, arch: Arch) -> Vec<Reason> {
        let (types, config) = (problem.dtypes(), Config::from(self));
        let width = Specialization::of(problem).vec_bytes;
        let lacks = |needed: Since| self.fp8_since(types) == Some(needed) && !arch.has(needed);
        let reasons = [
            (!self.traits().dtypes.contains(&types.query) && self.accumulation == Accumulation::F32)
                .then_some(Reason::Float8 { kernel: Self::FAMILY, types }),
            (self.accumulation == Accumulation::F16).then_some(Reason::Float8Sums { config }),
            lacks(ADA_FP8).then_some(Reason::Float8Convert { config, arch }),
            lacks(ADA_FP8_MMA).then_some(Reason::Float8Query { arch }),
            (types.query.is_float8() && self.rescale == Rescale::Threshold)
                .then_some(Reason::Float8Threshold { config }),
            (width < HALF_BYTES).then_some(Reason::Float8Width { width }),
        ];
        reasons.into_iter().flatten().collect()
    }
}
