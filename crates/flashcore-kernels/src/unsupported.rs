//! Every reason why a kernel cannot run a problem.

use flashcore_ir::target::cuda_of_ptx;
use flashcore_ir::tensor_map::InvalidTensorMap;
use flashcore_ir::{Arch, VerifyError};
use flashcore_problem::{DType, DTypes, OperandSet, Problem, ProblemError};

use crate::config::Config;
use crate::family::KernelTraits;
use crate::grid::packed_rows;
use crate::primitives::HALF_BYTES;
use crate::spec::KernelKey;
use crate::specialization::{MAX_VEC_BYTES, Specialization, is_ragged};
use crate::target::Target;

/// The most CTAs in the second and third dimension of a grid.
const MOST_GRID_ROWS: usize = 65_535;
/// The most CTAs in the first dimension of a grid, and the most tiles that CTAs take in turn.
const MOST_TILES: usize = i32::MAX as usize;
/// Rows that pages are a multiple of, for TMA: the fewest of a KV block.
pub(crate) const PAGE_MULTIPLE: usize = 16;
/// The longest sequence: sums of positions, keys and windows then stay within 32 bits.
pub(crate) const LONGEST: usize = 1 << 29;

/// The features that rows of several heads in one tile (`pack_gqa`) may have: they do not depend on the head.
const PACKABLE: [&str; 18] = [
    "append",
    "left",
    "right",
    "total_q",
    "total_k",
    "seqused_q",
    "seqused_k",
    "leftpad_k",
    "kv_batch",
    "paged",
    "pow2_pages",
    "softcap",
    "nonpositive_scale",
    "lse",
    "lse_base2",
    "q_scale",
    "k_scale",
    "v_scale",
];

/// The features of a problem that rows of several heads in one tile cannot have.
fn unpackable(specialization: Specialization) -> impl Iterator<Item = &'static str> {
    specialization.features().filter(|feature| !PACKABLE.contains(feature))
}

/// True if rows of several heads can share a tile (`pack_gqa`).
pub(crate) fn can_pack_gqa(specialization: Specialization) -> bool {
    unpackable(specialization).next().is_none()
}

/// A reason why a kernel cannot run a problem.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[expect(missing_docs, reason = "the message of each variant says what its fields are")]
#[non_exhaustive]
pub enum Reason {
    #[error(transparent)]
    Problem(#[from] ProblemError),
    #[error("the {kernel} kernel has no {dtype}; it has {}", listed(has))]
    DType { kernel: &'static str, dtype: DType, has: &'static [DType] },
    #[error(
        "the ampere kernel multiplies f32 as tf32: add -3xtf32, with errors near those of f32, or -1xtf32, with those of f16, to {config}, or take the scalar kernel"
    )]
    Tf32 { config: Config },
    #[error(
        "the {kernel} kernel has no {types}: take an ampere config for keys and values of 8 bits under f16 or bf16, or from sm_89 on under e4m3, and the CPU for other types"
    )]
    Float8 { kernel: &'static str, types: DTypes },
    #[error("{config} has no sums in f16 with keys and values of 8 bits: leave -f16sums out")]
    Float8Sums { config: Config },
    #[error(
        "{arch} has no tensor cores for 8-bit floats, which begin with sm_89: take a query of f16 or bf16 over the same keys and values, or the CPU"
    )]
    Float8Query { arch: Arch },
    #[error("{config} lets weights grow beyond 2^8, which e4m3 has no room for: leave -threshold out")]
    Float8Threshold { config: Config },
    #[error("{config} converts 8-bit floats by an instruction that {arch} does not have: leave -cvt out")]
    Float8Convert { config: Config, arch: Arch },
    #[error(
        "rows of some tensor begin at multiples of {width} byte only; keys and values of 8 bits take multiples of {HALF_BYTES}: pad the strides"
    )]
    Float8Width { width: u32 },
    #[error("{argument} is {dim}; the {kernel} kernel takes {}", dims(*multiple, *most))]
    Dim { kernel: &'static str, argument: &'static str, dim: usize, multiple: usize, most: usize },
    #[error("{argument} is {value}; a GPU grid takes at most {limit}")]
    Grid { argument: &'static str, value: usize, limit: usize },
    #[error("the problem is empty: there is nothing to launch")]
    Empty,
    #[error("{argument} of the {kernel} config is {value}; it must be {allowed}")]
    Config { kernel: &'static str, argument: &'static str, value: u32, allowed: &'static str },
    #[error(
        "the tiles of {config} take {registers} registers of a thread for this problem; more than {limit} are slow: take fewer keys or rows, the query from shared memory, or tensor cores"
    )]
    Registers { config: Config, registers: u32, limit: u32 },
    #[error(
        "the rows of several heads in one tile (pack_gqa) share what is added to their scores, so {feature} cannot be there: leave -packgqa out"
    )]
    Packed { feature: &'static str },
    #[error(
        "{group} query heads share a key head, which do not divide the {tile_m} rows of a tile: leave -packgqa out"
    )]
    Group { group: usize, tile_m: usize },
    #[error(
        "{config} takes tiles from a counter, which is for query lengths on the device (cu_seqlens_q, seqused_q): leave -dynamic out"
    )]
    Dynamic { config: Config },
    #[error(
        "rows of some tensor begin at multiples of {width} bytes only; the {kernel} kernel takes multiples of {MAX_VEC_BYTES}: pad the strides, or take an ampere config"
    )]
    Width { kernel: &'static str, width: u32 },
    #[error("the {kernel} kernel is for {needs}, and this is {arch}: take an ampere config, or name that architecture")]
    Arch { kernel: &'static str, needs: Arch, arch: Arch },
    #[error("{config} needs clusters of CTAs, which {arch} does not have: leave -cluster out")]
    Clusters { config: Config, arch: Arch },
    #[error("the {kernel} kernel cannot copy {tensor}: {error}; take an ampere config")]
    Tensor { kernel: &'static str, tensor: &'static str, error: InvalidTensorMap },
    #[error("the {kernel} kernel has no {feature}: take an ampere config")]
    Sequences { kernel: &'static str, feature: &'static str },
    #[error("page_size is {page_size}; the hopper kernel takes multiples of {PAGE_MULTIPLE}: take an ampere config")]
    PageSize { page_size: usize },
    #[error("leftpad_k and page_table are both given, which the hopper kernel does not take: take an ampere config")]
    PaddedPages,
    #[error("mask_mod and {feature} are both given, which no GPU kernel has: take the CPU, a mask, or a score_mod")]
    MaskOfSequences { feature: &'static str },
    #[error("{feature} and an append inside of the attention launch do not go together: append in a launch of its own")]
    Append { feature: &'static str },
    #[error(
        "new_length is {new_length}; an append inside of the attention launch takes at most {most}: append in a launch of its own"
    )]
    NewKeys { new_length: usize, most: u32 },
    #[error("the hopper kernel of 8-bit floats does not take {what}: {instead}")]
    Fp8 { what: &'static str, instead: &'static str },
    #[error("{config} is for a query of 8 bits, which the problem has not: leave -1level out")]
    OneLevel { config: Config },
    #[error("the append to an {cache_dtype} cache {why}: append on the CPU, or quantise before and copy codes")]
    Quantize { cache_dtype: DType, why: &'static str },
    #[error(
        "the kernel needs PTX {}, and the driver compiles PTX {} at most: update it to CUDA {} or later, or take another element type", version(*needs), version(*ptx), version(cuda_of_ptx(*needs))
    )]
    Driver { needs: (u8, u8), ptx: (u8, u8) },
    #[error("the kernel breaks a rule: {0}")]
    Kernel(#[from] VerifyError),
}

/// True if a config takes a problem, as far as that can be told without generating the kernel, and its tiles fit.
pub(crate) fn takes(problem: &Problem, config: impl Into<Config>, target: Target) -> bool {
    let config = config.into();
    let fits = || config.shared_bytes(config.specialization(problem)) <= target.arch.shared_bytes_per_cta();
    reasons(problem, config, target).is_empty() && fits()
}

/// Ok if a kernel keeps all rules and the driver of a target compiles it. Generates the kernel the first time only.
pub(crate) fn check_kernel(key: KernelKey, Target { ptx, .. }: Target) -> Result<(), Vec<Reason>> {
    let needs = key.check().map_err(|errors| {
        let mut reasons: Vec<_> = errors.into_iter().map(Reason::Kernel).collect();
        reasons.dedup();
        reasons
    })?;
    if needs <= ptx { Ok(()) } else { Err(vec![Reason::Driver { needs, ptx }]) }
}

/// The reason against an element type of the query.
pub(crate) fn dtype_reason(traits: KernelTraits, dtype: DType) -> Option<Reason> {
    let KernelTraits { family: kernel, dtypes: has, .. } = traits;
    (!has.contains(&dtype)).then_some(Reason::DType { kernel, dtype, has })
}

/// Every reason against a config for a problem that can be told without generating the kernel.
pub(crate) fn reasons(problem: &Problem, config: Config, target: Target) -> Vec<Reason> {
    let Target { arch, ptx, .. } = target;
    let mut reasons: Vec<_> = problem.errors().into_iter().map(Reason::from).collect();
    let family = config.as_family();
    let (traits, types) = (family.traits(), problem.dtypes());
    let kernel = traits.family;
    reasons.extend(family.dtype_reasons(problem, arch));
    for (argument, dim) in [("head_dim", problem.head_dim), ("value_dim", problem.value_dim)] {
        let (multiple, most) = traits.dims;
        // Copies move 16 bytes at a time.
        let multiple = if types.key_value.is_float8() { multiple.next_multiple_of(16) } else { multiple };
        if !dim.is_multiple_of(multiple) || dim > most {
            reasons.push(Reason::Dim { kernel, argument, dim, multiple, most });
        }
    }
    let ragged = OperandSet::of(problem).iter().find(|&operand| is_ragged(operand));
    reasons.extend(ragged.and_then(|feature| family.sequence_reason(problem, feature)));
    reasons.extend(config.flaws());
    if traits.needs_clusters && !arch.has_clusters() {
        reasons.push(Reason::Clusters { config, arch });
    }
    if let Some(needs) = traits.only_arch.filter(|&needs| needs != arch) {
        reasons.push(Reason::Arch { kernel, needs, arch });
    }
    if reasons.is_empty() {
        let specialization = config.specialization(problem);
        let registers = family.registers(specialization, arch).filter(|(registers, limit)| registers > limit);
        reasons.extend(registers.map(|(registers, limit)| Reason::Registers { config, registers, limit }));
        reasons.extend(family.reasons(problem, specialization));
    }
    if let Some(since) = family.fp8_since(types)
        && arch.has(since)
        && since.ptx > ptx
    {
        reasons.push(Reason::Driver { needs: since.ptx, ptx });
    }
    if traits.pack_gqa {
        let features = unpackable(config.specialization(problem));
        reasons.extend(features.map(|feature| Reason::Packed { feature }));
    }
    // What is wrong already may not even have a shape.
    let all_tiles = if reasons.is_empty() { family.grid(problem).all_tiles() as usize } else { 0 };
    let limits = [
        ("the number of tiles", all_tiles, MOST_TILES),
        ("batch", problem.batch, MOST_GRID_ROWS),
        ("query_heads", problem.query_heads, MOST_GRID_ROWS),
        ("query_length", problem.query_length, LONGEST),
        ("key_length", problem.key_length, LONGEST),
    ];
    let packed = ("the rows of all heads of a key head", packed_rows(problem), LONGEST);
    for (argument, value, limit) in limits.into_iter().chain(traits.pack_gqa.then_some(packed)) {
        if value > limit {
            reasons.push(Reason::Grid { argument, value, limit });
        }
    }
    if problem.output_shape().is_empty() {
        reasons.push(Reason::Empty);
    }
    reasons
}

fn listed(dtypes: &[DType]) -> String {
    dtypes.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ")
}

fn version((major, minor): (u8, u8)) -> String {
    format!("{major}.{minor}")
}

fn dims(multiple: usize, most: usize) -> String {
    match multiple {
        1 => format!("1 to {most}"),
        _ => format!("multiples of {multiple} up to {most}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heuristics;
    use crate::launch_plan::LaunchPlan;

    const OLDEST: (u8, u8) = (8, 0);

    fn problem(
        batch: usize,
        heads: usize,
        length: usize,
        dim: usize,
        (dtype, cache): (DType, Option<DType>),
    ) -> Problem {
        let output = dtype.is_float8().then_some(DType::Bf16);
        Problem::new(batch, heads, length, dim, dtype).with_kv_dtype(cache).with_out_dtype(output)
    }

    /// Problems with every choice of 8-bit floats: query, cache, or neither; one row over many keys, and many rows.
    fn problems() -> Vec<Problem> {
        let mut problems = Vec::new();
        for types in [
            (DType::F16, None),
            (DType::F32, None),
            (DType::F16, Some(DType::E4m3)),
            (DType::Bf16, Some(DType::E5m2)),
            (DType::E4m3, None),
        ] {
            for (dim, rows) in [(64, 1), (128, 1), (128, 300), (256, 300)] {
                let mut problem = problem(2, 8, rows, dim, types);
                (problem.key_heads, problem.key_length) = (2, 4096);
                problems.push(problem);
            }
        }
        problems
    }

    /// Early reasons are those of the generated kernel, in every default config.
    #[test]
    fn a_driver_is_refused_exactly_the_kernels_that_need_a_later_one() {
        let configs = [Config::all(), Config::defaults(), Config::fp8_mma_defaults()].concat();
        let mut needed = Vec::new();
        for problem in problems() {
            for arch in [Arch::Sm80, Arch::Sm89, Arch::Sm90a] {
                for &config in &configs {
                    let config = heuristics::with_fp8_widening(config, &problem, arch.into());
                    let Ok(plan) = LaunchPlan::new(&problem, config, arch) else { continue };
                    let needs = plan.launches.iter().map(|launch| launch.kernel().ptx()).max().unwrap();
                    let oldest = Target::from(arch).with_ptx(OLDEST);
                    let refused = vec![Reason::Driver { needs, ptx: OLDEST }];
                    let expected = if needs > OLDEST { refused } else { Vec::new() };
                    assert_eq!(reasons(&problem, config, oldest), expected, "{config} {problem} on {arch}");
                    assert_eq!(LaunchPlan::new(&problem, config, oldest).err().unwrap_or_default(), expected);
                    assert!(LaunchPlan::new(&problem, config, oldest.with_ptx(needs)).is_ok());
                    needed.push(needs);
                }
            }
        }
        needed.sort_unstable();
        needed.dedup();
        assert_eq!(needed[needed.len() - 2..], [(8, 1), (8, 4)]);
    }

    /// Whatever the driver, the kernel that a problem gets is one that the driver compiles, if there is one.
    #[test]
    fn an_old_driver_gets_another_kernel_or_the_reason() {
        let choice = |problem: &Problem, arch, ptx| {
            let target = Target::new(arch, 58).with_ptx(ptx);
            let config = heuristics::select(problem, target);
            LaunchPlan::new(problem, config, target).map(|plan| plan.config.expect("a config of attention"))
        };
        for problem in problems() {
            for arch in [Arch::Sm89, Arch::Sm90a] {
                // Query, key and value of 8 bits have no kernel without an instruction.
                let drivers = [(8, 0), (8, 1), (8, 2), (8, 4)];
                let Some(needs) = drivers.into_iter().find(|&ptx| choice(&problem, arch, ptx).is_ok()) else {
                    panic!("{problem} on {arch} has no kernel under any driver");
                };
                assert!(needs == OLDEST || problem.dtype.is_float8(), "{problem} on {arch}");
                for ptx in drivers {
                    let expected = if ptx < needs { vec![Reason::Driver { needs, ptx }] } else { Vec::new() };
                    assert_eq!(choice(&problem, arch, ptx).err().unwrap_or_default(), expected, "{problem} on {arch}");
                }
            }
        }
        // R535 on an L4: codes of a cache are widened by an instruction, and there is no product of codes.
        let [cache, codes] =
            [(DType::F16, Some(DType::E4m3)), (DType::E4m3, None)].map(|types| problem(1, 8, 500, 128, types));
        let widens = |ptx| choice(&cache, Arch::Sm89, ptx).map(|config| config.to_string().contains("-cvt"));
        assert_eq!([(8, 0), (8, 2)].map(widens), [Ok(false), Ok(true)]);
        let reasons = choice(&codes, Arch::Sm89, (8, 2)).unwrap_err();
        assert_eq!(reasons, [Reason::Driver { needs: (8, 4), ptx: (8, 2) }]);
        assert_eq!(
            reasons[0].to_string(),
            "the kernel needs PTX 8.4, and the driver compiles PTX 8.2 at most: update it to CUDA 12.4 or later, or take \
             another element type"
        );
        assert!(choice(&codes, Arch::Sm89, (8, 4)).is_ok());
        // On an H100 there is another kernel.
        let mut decode = codes;
        (decode.query_length, decode.key_length, decode.batch) = (1, 4096, 64);
        assert_eq!(choice(&decode, Arch::Sm90a, (8, 4)).unwrap().family(), "ampere");
        assert_eq!(choice(&decode, Arch::Sm90a, (8, 2)).unwrap().family(), "hopper");
    }
}
