//! The ladder as a family.

use flashcore_ir::types::{Bf16x2, F16x2};
use flashcore_ir::{Arch, Kernel};
use flashcore_problem::{DType, Operand, Problem};

use super::Tiles;
use crate::config::{LadderConfig, Table};
use crate::family::{Family, KernelTraits};
use crate::primitives::shared_bytes;
use crate::specialization::Specialization;
use crate::unsupported::Reason;

impl Family for LadderConfig {
    fn traits(&self) -> KernelTraits {
        KernelTraits::new(Self::FAMILY, self.tile_m(), Some(self.tile_n), &[DType::F16, DType::Bf16])
    }

    fn specialize(&self, specialization: Specialization, _: &Problem) -> Specialization {
        Specialization { nonpositive_scale: false, ..specialization }
    }

    fn registers(&self, specialization: Specialization, _: Arch) -> Option<(u32, u32)> {
        Some((self.operand_registers(specialization.value_dim), Self::MOST_OPERAND_REGISTERS))
    }

    fn shared_bytes(&self, specialization: Specialization) -> u32 {
        shared_bytes(|k| {
            Tiles::reserve(k, *self, specialization);
        })
    }

    fn sequence_reason(&self, _: &Problem, feature: Operand) -> Option<Reason> {
        Some(Reason::Sequences { kernel: Self::FAMILY, feature: feature.name() })
    }

    fn generate(&self, name: String, specialization: Specialization, _: Arch) -> Kernel {
        let write = match specialization.dtype {
            DType::Bf16 => super::kernel::<Bf16x2>,
            _ => super::kernel::<F16x2>,
        };
        write(name, *self, specialization)
    }
}
