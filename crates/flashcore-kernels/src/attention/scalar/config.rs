//! Choices of the scalar kernel, and what follows from them.

use flashcore_ir::types::{Bf16, F16, F32};
use flashcore_ir::{Arch, Kernel};
use flashcore_problem::{DType, Problem};

use crate::config::{Table, config_table};
use crate::family::{Family, KernelTraits};
use crate::specialization::{MAX_VEC_BYTES, Specialization};

config_table! {
    /// The choices of the scalar kernel.
    pub struct ScalarConfig is "scalar" {
        /// Threads, and so query rows, of a CTA.
        threads: u32 = 64, name [always N ""], allowed { "1 to 256" => (1..=256).contains(&threads) },
            near [threads / 2, threads.saturating_mul(2)];
    }
}

impl Family for ScalarConfig {
    fn traits(&self) -> KernelTraits {
        let dtypes = &[DType::F16, DType::Bf16, DType::F32];
        KernelTraits { dims: (1, 1024), ..KernelTraits::new(Self::FAMILY, self.threads, None, dtypes) }
    }

    /// Element by element, whatever their alignment, and scaled before anything else.
    fn specialize(&self, specialization: Specialization, _: &Problem) -> Specialization {
        Specialization { vec_bytes: MAX_VEC_BYTES, nonpositive_scale: false, ..specialization }
    }

    fn shared_bytes(&self, _: Specialization) -> u32 {
        0
    }

    fn generate(&self, name: String, specialization: Specialization, _: Arch) -> Kernel {
        let write = match specialization.dtype {
            DType::F16 => super::kernel::<F16>,
            DType::Bf16 => super::kernel::<Bf16>,
            _ => super::kernel::<F32>,
        };
        write(name, *self, specialization)
    }
}
