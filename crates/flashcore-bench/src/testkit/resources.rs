//! ptxas gates: registers, spills, stack and shared memory of the kernels on each architecture.

use flashcore_ir::{Arch, VerifyError};
use flashcore_kernels::{Accuracy, Config, Fp8Widening, Specialization};
use flashcore_problem::{DType, MaskMod, Operand, ScoreMod};
use flashcore_ptx::{PtxasError, Resources, assemble, print};
use serde::Serialize;

use crate::testkit::expressions;

/// Registers of an SM, on every architecture here.
const REGISTERS_PER_SM: u32 = 65_536;
/// The registers of a thread are handed out in eights.
const REGISTER_GRANULARITY: u32 = 8;
/// Shared memory that the system takes for each CTA.
const RESERVED_SHARED_BYTES: u32 = 1024;

/// One kernel on one architecture.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// The config.
    pub config: String,
    /// The element type.
    pub dtype: String,
    /// The head dimension.
    pub head_dim: u32,
    /// Features that are compiled in.
    pub kind: Kind,
    /// Threads of a CTA.
    pub threads: u32,
    /// Registers per thread that the config declares as its budget.
    pub register_budget: u32,
    /// Bytes of shared memory of a CTA.
    pub shared_bytes: u32,
    /// CTAs that one SM holds at a time.
    pub ctas_per_sm: u32,
    /// Resources by ptxas.
    pub resources: Resources,
    /// Complaints of the gates; none if they pass.
    pub complaints: Vec<String>,
}

/// Reason why a row could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ResourcesError {
    /// The kernel breaks a rule of the language.
    #[error("{config}: {error}")]
    Verify {
        /// The config.
        config: Config,
        /// The rule and its place.
        error: Box<VerifyError>,
    },
    /// ptxas is missing, or refuses the kernel.
    #[error(transparent)]
    Ptxas(#[from] PtxasError),
}

/// Features that are compiled into a listed kernel beyond the least.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Nothing but the log-sum-exp.
    Full,
    /// A causal mask.
    Causal,
    /// Every feature but the bias.
    Unbiased,
    /// Every feature.
    Everything,
    /// Expressions for scores and for masks.
    Expressions,
    /// Keys and values in `e4m3` under `f16`, with scales.
    Fp8,
    /// Paged keys and values in `e4m3` under `bf16`, with scales, lengths and a causal mask.
    #[serde(rename = "fp8 pages")]
    Fp8Pages,
    /// Every feature, and keys and values in `e4m3` with scales.
    #[serde(rename = "fp8 everything")]
    Fp8Everything,
    /// Query, key and value of 8 bits with their scales.
    #[serde(rename = "fp8 query")]
    Fp8Query,
    /// The same with a causal mask.
    #[serde(rename = "fp8 query causal")]
    Fp8QueryCausal,
    /// The same with a paged cache and lengths.
    #[serde(rename = "fp8 query pages")]
    Fp8QueryPages,
    /// The same with every feature but the bias.
    #[serde(rename = "fp8 query unbiased")]
    Fp8QueryUnbiased,
}

impl Kind {
    /// The name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Causal => "causal",
            Self::Unbiased => "unbiased",
            Self::Everything => "everything",
            Self::Expressions => "expressions",
            Self::Fp8 => "fp8",
            Self::Fp8Pages => "fp8 pages",
            Self::Fp8Everything => "fp8 everything",
            Self::Fp8Query => "fp8 query",
            Self::Fp8QueryCausal => "fp8 query causal",
            Self::Fp8QueryPages => "fp8 query pages",
            Self::Fp8QueryUnbiased => "fp8 query unbiased",
        }
    }

    /// The specialization of a config: in `f32` for those that have nothing else.
    fn specialization_for(self, config: Config, head_dim: u32) -> Specialization {
        let specialization = self.specialization(head_dim);
        match config.accuracy() {
            Accuracy::Exact => specialization,
            Accuracy::NearF32 | Accuracy::Tf32 => Specialization { dtype: DType::F32, ..specialization },
        }
    }

    fn specialization(self, head_dim: u32) -> Specialization {
        let [f16, bf16] = [DType::F16, DType::Bf16].map(|dtype| Specialization::new(dtype, head_dim));
        let fp8 = |specialization: Specialization| {
            let specialization = Operand::SCALES.into_iter().fold(specialization, Specialization::with);
            Specialization { dtype: DType::E4m3, out_dtype: Some(specialization.dtype), ..specialization }
        };
        match self {
            Self::Fp8Query => fp8(Self::Full.specialization(head_dim)),
            Self::Fp8QueryCausal => fp8(Self::Causal.specialization(head_dim)),
            Self::Fp8QueryPages => {
                let causal = Self::Fp8QueryCausal.specialization(head_dim);
                let paged = causal.with(Operand::SequsedK).with(Operand::PageTable);
                Specialization { pow2_pages: true, page_box: 16, ..paged }
            }
            Self::Fp8QueryUnbiased => fp8(Self::Unbiased.specialization(head_dim)),
            Self::Full => f16.with(Operand::Lse),
            Self::Causal => Specialization { right: true, ..bf16.with(Operand::Lse) },
            Self::Unbiased => {
                let everything = Self::Everything.specialization(head_dim);
                Specialization { operands: everything.operands.without(Operand::Bias), ..everything }
            }
            Self::Expressions => Specialization {
                right: true,
                score_mod: expressions::score_mod("relative").map(ScoreMod::expression),
                mask_mod: expressions::mask_mod("documents").map(MaskMod::expression),
                ..bf16.with(Operand::Lse)
            },
            Self::Fp8Everything => {
                let scaled = Self::Everything.specialization(head_dim).with(Operand::KScale).with(Operand::VScale);
                Specialization { kv_dtype: Some(DType::E4m3), ..scaled }
            }
            Self::Fp8 => {
                let scaled = f16.with(Operand::Lse).with(Operand::KScale).with(Operand::VScale);
                Specialization { kv_dtype: Some(DType::E4m3), ..scaled }
            }
            Self::Fp8Pages => Specialization {
                right: true,
                pow2_pages: true,
                kv_dtype: Some(DType::E4m3),
                ..bf16
                    .with(Operand::Lse)
                    .with(Operand::KScale)
                    .with(Operand::VScale)
                    .with(Operand::SequsedK)
                    .with(Operand::PageTable)
            },
            Self::Everything => Specialization {
                left: true,
                right: true,
                softcap: true,
                operands: Operand::optional()
                    .filter(|operand| !matches!(operand, Operand::AuxF32 | Operand::AuxI32) && !operand.is_scale())
                    // A problem has some of those of sequences at most.
                    .filter(|operand| {
                        use Operand::{CuSeqlensK, CuSeqlensQ, KvBatchIdx, LeftpadK, PageTable, SequsedQ};
                        !matches!(operand, CuSeqlensQ | CuSeqlensK | SequsedQ | LeftpadK | KvBatchIdx | PageTable)
                    })
                    .collect(),
                nonpositive_scale: true,
                ..f16
            },
        }
    }
}

/// The kernels that are listed for an architecture: each config with the head dimensions that fit. For `sm_90a`,
/// those that only it has.
pub fn kernels(configs: &[Config], arch: Arch) -> Vec<(Config, u32, Kind)> {
    let mut kernels = Vec::new();
    for &config in configs {
        let kinds = match config.accuracy() {
            Accuracy::Exact if Config::fp8().contains(&config) => {
                &[Kind::Fp8Query, Kind::Fp8QueryCausal, Kind::Fp8QueryPages, Kind::Fp8QueryUnbiased]
            }
            Accuracy::Exact => &[Kind::Full, Kind::Causal, Kind::Unbiased, Kind::Everything, Kind::Expressions][..],
            Accuracy::NearF32 | Accuracy::Tf32 => &[Kind::Full, Kind::Unbiased, Kind::Everything],
        };
        for head_dim in Specialization::HEAD_DIMS {
            kernels.extend(kinds.iter().map(|&kind| (config, head_dim, kind)));
        }
    }
    // The others are those of `sm_90`.
    kernels.retain(|(config, _, _)| arch != Arch::Sm90a || config.traits().only_arch == Some(arch));
    kernels.extend(configs.iter().flat_map(|&config| fp8_kernels(config, arch)));
    kernels.retain(|(config, _, _)| config.is_for(arch));
    // What does not fit is refused for every caller: it is no kernel there.
    kernels.retain(|&(config, head_dim, kind)| config.fits(kind.specialization_for(config, head_dim), arch));
    kernels
}

/// The kernels of a config with keys and values of 8 bits: with bits that are moved, and by the instruction where there is
/// one.
fn fp8_kernels(config: Config, arch: Arch) -> Vec<(Config, u32, Kind)> {
    let Some(convert) = config.with_fp8_widening(Fp8Widening::Convert) else { return Vec::new() };
    let mut kernels = Vec::new();
    for head_dim in [64, 128, 256] {
        kernels.extend([Kind::Fp8, Kind::Fp8Pages, Kind::Fp8Everything].map(|kind| (config, head_dim, kind)));
        if arch.compute() >= 89 {
            kernels.push((convert, head_dim, Kind::Fp8));
        }
    }
    kernels
}

/// The kernels of query, key and value of 8 bits by `mma.sync`, where the architecture has it: those of configs that are a
/// default of some problem, or all that are listed.
pub fn fp8_mma_kernels(defaults: bool, arch: Arch) -> Vec<(Config, u32, Kind)> {
    // `sm_90a` has those of `sm_90`.
    if arch.compute() < 89 || arch == Arch::Sm90a {
        return Vec::new();
    }
    let mut kernels = Vec::new();
    for config in if defaults { Config::fp8_mma_defaults() } else { Config::fp8_mma() } {
        for head_dim in Specialization::HEAD_DIMS {
            let kinds = [Kind::Fp8Query, Kind::Fp8QueryCausal, Kind::Fp8QueryUnbiased, Kind::Fp8QueryPages];
            kernels.extend(kinds.map(|kind| (config, head_dim, kind)));
        }
    }
    kernels.retain(|&(config, head_dim, kind)| config.fits(kind.specialization_for(config, head_dim), arch));
    kernels
}

/// Compiles one kernel and holds it against the gates: no spills, no stack, registers within the budget.
pub fn row(config: Config, head_dim: u32, kind: Kind, arch: Arch) -> Result<Row, ResourcesError> {
    let specialization = kind.specialization_for(config, head_dim);
    let kernel = config
        .generate(specialization, arch)
        .verify(arch)
        .map_err(|mut errors| ResourcesError::Verify { config, error: Box::new(errors.swap_remove(0)) })?;
    let resources = assemble(&print(&kernel), arch)?;
    let complaints = complaints(&resources, kernel.register_budget);
    Ok(Row {
        config: config.to_string(),
        dtype: specialization.dtype.to_string(),
        head_dim,
        kind,
        threads: kernel.threads,
        register_budget: kernel.register_budget,
        shared_bytes: kernel.shared_bytes,
        ctas_per_sm: occupancy(arch, kernel.threads, resources.registers, kernel.shared_bytes),
        resources,
        complaints,
    })
}

fn complaints(resources: &Resources, budget: u32) -> Vec<String> {
    let mut complaints = Vec::new();
    if resources.spill_store_bytes + resources.spill_load_bytes > 0 {
        let Resources { spill_store_bytes, spill_load_bytes, .. } = resources;
        complaints.push(format!("spills {spill_store_bytes} bytes out and {spill_load_bytes} in; none are allowed"));
    }
    if resources.stack_frame_bytes > 0 {
        complaints.push(format!("has a stack of {} bytes; none is allowed", resources.stack_frame_bytes));
    }
    if resources.registers > budget {
        complaints.push(format!("uses {} registers; its budget is {budget}", resources.registers));
    }
    // Products of warpgroups that wait for each other, registers that are not reallocated.
    let losses = resources.remarks.iter().filter(|remark| remark.contains("Potential Performance Loss"));
    complaints.extend(losses.map(|remark| format!("ptxas says: {remark}")));
    complaints
}

/// CTAs that one SM holds: by warps, by registers, by shared memory.
pub fn occupancy(arch: Arch, threads: u32, registers: u32, shared_bytes: u32) -> u32 {
    let warps = threads.div_ceil(32);
    let by_warps = arch.warps_per_sm() / warps;
    let registers_per_cta = registers.next_multiple_of(REGISTER_GRANULARITY) * 32 * warps;
    let by_registers = REGISTERS_PER_SM / registers_per_cta.max(1);
    let by_shared = arch.shared_bytes_per_sm() / (shared_bytes + RESERVED_SHARED_BYTES);
    by_warps.min(by_registers).min(by_shared)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn occupancy_is_the_least_of_three_limits() {
        // By warps: 48 on Ada, 64 on Ampere.
        assert_eq!(occupancy(Arch::Sm89, 128, 32, 0), 12);
        assert_eq!(occupancy(Arch::Sm80, 128, 32, 0), 16);
        // By registers: 168 × 128 threads fit three times, 169 round up to 176 and fit twice.
        assert_eq!(occupancy(Arch::Sm89, 128, 168, 0), 3);
        assert_eq!(occupancy(Arch::Sm89, 128, 169, 0), 2);
        // By shared memory: 40 KB and the reserved one fit twice into 100.
        assert_eq!(occupancy(Arch::Sm89, 128, 32, 40 * 1024), 2);
    }

    #[test]
    fn gates_name_every_excess() {
        let resources = Resources {
            arch: "sm_89".to_owned(),
            registers: 170,
            static_shared_bytes: 0,
            stack_frame_bytes: 8,
            spill_store_bytes: 12,
            spill_load_bytes: 4,
            barriers: 1,
            compile_milliseconds: 1.0,
            remarks: vec![
                "warpgroup.arrive is injected".to_owned(),
                "Potential Performance Loss: wgmma.mma_async instructions are serialized".to_owned(),
            ],
        };
        let expected = [
            "spills 12 bytes out and 4 in; none are allowed",
            "has a stack of 8 bytes; none is allowed",
            "uses 170 registers; its budget is 168",
            "ptxas says: Potential Performance Loss: wgmma.mma_async instructions are serialized",
        ];
        assert_eq!(complaints(&resources, 168), expected);
    }
}
