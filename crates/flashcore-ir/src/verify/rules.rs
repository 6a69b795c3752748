//! The rules beyond the table's columns: which combinations of modifiers exist, and the limits of hardware.

use super::hopper::{self, MOST_ARRIVALS};
use crate::builder::MOST_REGISTERS;
use crate::kernel::{Kernel, Parameter, ParameterType, SectionId};
use crate::operand::{
    CopyCache, FenceScope, L2Prefetch, LoadCache, Major, MatrixSource, MmaShape, Operand, ReduceOp, RegisterId,
    Rounding, Space, StoreCache,
};
use crate::operation::Op;
use crate::target::{Arch, Since};
use crate::types::Type;

/// A rule of the language, with the numbers that break it.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[expect(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum Rule {
    #[error("{name} is register {register}, which the kernel does not declare")]
    UnknownRegister { name: &'static str, register: RegisterId },
    #[error("{name} is register {register} of type {actual}; it must have type {expected}")]
    TypeMismatch { name: &'static str, register: RegisterId, actual: Type, expected: Type },
    #[error("the operation does not exist for type {ty}; it exists for {}", list(allowed))]
    TypeNotAllowed { ty: Type, allowed: &'static [Type] },
    #[error("{name} has {actual} registers; the modifiers ask for {expected}")]
    Length { name: &'static str, actual: usize, expected: usize },
    #[error("{name} of type {ty} must be a register; move the constant into one first")]
    ConstantNotAllowed { name: &'static str, ty: Type },
    #[error("the constant {bits:#x} of {name} has more bits than {ty}")]
    ConstantTooWide { name: &'static str, bits: u64, ty: Type },
    #[error("all lanes of a warp must execute this operation together, so it cannot have a guard")]
    GuardedCollective,
    #[error("{arch} does not have it; it needs {since}")]
    NotOnArchitecture { arch: Arch, since: Since },
    #[error("register {register} may be read before it is written")]
    ReadBeforeWrite { register: RegisterId },
    #[error("the kernel has no parameter {parameter}; it declares {declared}")]
    UnknownParameter { parameter: u32, declared: usize },
    #[error("parameter `{name}` has type {actual}, but is loaded as {loaded}")]
    ParameterType { name: String, actual: ParameterType, loaded: ParameterType },
    #[error("a tensor has 1 to 5 dimensions, not {rank}")]
    TensorRank { rank: u32 },
    #[error("{to} cannot take the bits of {from}: they must have the same width, and predicates have no bits to take")]
    ReinterpretWidth { to: Type, from: Type },
    #[error("there is no conversion from {from} to {to} with rounding `{rounding}`")]
    NoConversion { to: Type, from: Type, rounding: Rounding },
    #[error("a vector access has 1, 2 or 4 elements and at most 16 bytes, not {count} of {bytes} bytes each")]
    VectorSize { count: u32, bytes: u32 },
    #[error("shared memory has no cache hints or prefetches")]
    SharedCacheHint,
    #[error("the operation does not exist on {space} memory; the CTA's own shared memory has it")]
    NotInSpace { space: Space },
    #[error("an mbarrier counts 1 to {MOST_ARRIVALS} arrivals, not {count}")]
    MbarrierCount { count: u64 },
    #[error("an mbarrier counts at most {MOST_ARRIVALS} bytes in a phase; split the expect_tx of {bytes} bytes")]
    MbarrierBytes { bytes: u64 },
    #[error("the parity of a phase is 0 or 1, not {parity}")]
    Parity { parity: u64 },
    #[error("an mbarrier synchronises a CTA or a cluster, not scope `{scope}`")]
    MbarrierScope { scope: FenceScope },
    #[error("a cluster has 1 to 8 CTAs, not {} × {} × {}", cluster[0], cluster[1], cluster[2])]
    ClusterSize { cluster: [u32; 3] },
    #[error("{arch} has no clusters, and the kernel asks for {} × {} × {} CTAs in each", cluster[0], cluster[1], cluster[2])]
    NoClusters { arch: Arch, cluster: [u32; 3] },
    #[error("a load that bypasses the caches cannot prefetch")]
    VolatilePrefetch,
    #[error("there is no `{op}` of type {ty} here")]
    NoReduction { op: ReduceOp, ty: Type },
    #[error("cp.async copies 4, 8 or 16 bytes, and only 16 if it bypasses L1 (`cg`); not {bytes} with `{cache}`")]
    CopySize { bytes: u32, cache: CopyCache },
    #[error("a bulk copy moves a positive multiple of 16 bytes, not {bytes}")]
    BulkSize { bytes: u64 },
    #[error("a warpgroup has 24 to 256 registers per thread, a multiple of 8; not {count}")]
    RegisterCount { count: u32 },
    #[error("ldmatrix loads 1, 2 or 4 matrices, and stmatrix stores as many; not {count}")]
    MatrixCount { count: u32 },
    #[error("there is no {shape} mma of {operand} accumulated in {accumulate}")]
    NoProduct { shape: MmaShape, operand: Type, accumulate: Type },
    #[error("wgmma takes 8 to 256 columns (N), a multiple of 8; not {columns}")]
    ProductColumns { columns: u32 },
    #[error("there is no wgmma of {operand} accumulated in {accumulate}")]
    NoWarpgroupProduct { operand: Type, accumulate: Type },
    #[error("wgmma accumulates in place: `c` must be the registers of `d`")]
    AccumulatorMoved,
    #[error("a wgmma operand in registers is K-major: elements along the depth are adjacent")]
    RegisterMajor,
    #[error(
        "a wgmma of 8-bit floats has no transposed form: {operand} must be K-major, elements along the depth adjacent"
    )]
    TransposedFp8 { operand: &'static str },
    #[error("shuffle control {control:#x} has bits outside the clamp (0 to 4) and the segment mask (8 to 12)")]
    ShuffleControl { control: u32 },
    #[error("{name} of a bit field is {value}; hardware takes 0 to 255")]
    BitField { name: &'static str, value: u64 },
    #[error("named barriers are numbered 0 to 15; there is no barrier {barrier}")]
    BarrierNumber { barrier: u64 },
    #[error(
        "a named barrier counts whole warps, of which a CTA of {of} threads has {}: it waits for a multiple of 32 \
         threads up to that, not {threads}",
        of.div_ceil(LANES)
    )]
    BarrierThreads { threads: u64, of: u32 },
    #[error("a CTA has 1 to 1024 threads, not {threads}")]
    Threads { threads: u32 },
    #[error("{bytes} bytes of shared memory exceed the {limit} that a CTA can have on {arch}")]
    SharedMemory { bytes: u32, limit: u32, arch: Arch },
    #[error(
        "a register budget of {budget} for {threads} threads does not fit: 24 to 255 per thread, rounded up to a multiple \
         of 8, and 65,536 per CTA of whole warps"
    )]
    RegisterBudget { budget: u32, threads: u32 },
    #[error("parameters take {bytes} bytes; every PTX version accepts at most 4,096")]
    ParameterBytes { bytes: u32 },
    #[error("`{name}` is declared twice")]
    DuplicateParameter { name: String },
    #[error("parameter `{name}` has type {ty}; parameters have one of {}", list(allowed))]
    NoParameterType { name: String, ty: Type, allowed: &'static [Type] },
    #[error("`{name}` is not an identifier: a letter, then letters, digits and underscores, and not `WARP_SZ`")]
    Name { name: String },
    #[error("there is no section {}; the kernel has {declared}", section.0)]
    UnknownSection { section: SectionId, declared: usize },
    #[error("{register} is written twice by one operation, so its value afterwards is undefined")]
    WrittenTwice { register: RegisterId },
}

fn list(types: &[Type]) -> String {
    types.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// The most bytes of parameters that every PTX version accepts.
const MOST_PARAMETER_BYTES: u32 = 4096;
/// The types that `ld.param` loads.
const PARAMETER_TYPES: &[Type] = &[Type::U32, Type::S32, Type::F32, Type::U64, Type::S64];
/// Registers of one CTA.
const REGISTERS_PER_CTA: u32 = 65_536;
/// A warp gets its registers in multiples of 256, 8 for each lane.
const REGISTER_GRANULE: u32 = 8;
const LANES: u32 = 32;

pub(super) fn declarations(kernel: &Kernel, arch: Arch) -> Vec<Rule> {
    let mut broken = Vec::new();
    if !(1..=1024).contains(&kernel.threads) {
        broken.push(Rule::Threads { threads: kernel.threads });
    }
    let limit = arch.shared_bytes_per_cta();
    if kernel.shared_bytes > limit {
        broken.push(Rule::SharedMemory { bytes: kernel.shared_bytes, limit, arch });
    }
    let (budget, threads) = (kernel.register_budget, kernel.threads);
    if !(24..=MOST_REGISTERS).contains(&budget) || (budget < MOST_REGISTERS && !fits(budget, threads)) {
        broken.push(Rule::RegisterBudget { budget, threads });
    }
    broken.extend(hopper::cluster(kernel.cluster, arch));
    let bytes = parameter_bytes(&kernel.parameters);
    if bytes > MOST_PARAMETER_BYTES {
        broken.push(Rule::ParameterBytes { bytes });
    }
    for (index, parameter) in kernel.parameters.iter().enumerate() {
        if let ParameterType::Value(ty) = parameter.ty
            && !PARAMETER_TYPES.contains(&ty)
        {
            let name = parameter.name.clone();
            broken.push(Rule::NoParameterType { name, ty, allowed: PARAMETER_TYPES });
        }
        if kernel.parameters[..index].iter().any(|other| other.name == parameter.name) {
            broken.push(Rule::DuplicateParameter { name: parameter.name.clone() });
        }
    }
    let names = kernel.parameters.iter().map(|parameter| &parameter.name).chain([&kernel.name]);
    for name in names.filter(|name| !is_identifier(name)) {
        broken.push(Rule::Name { name: name.clone() });
    }
    let mut unknown: Vec<SectionId> = kernel.registers.iter().map(|register| register.section).collect();
    unknown.retain(|section| !has_section(kernel, *section));
    unknown.sort();
    unknown.dedup();
    broken.extend(unknown.into_iter().map(|section| Rule::UnknownSection { section, declared: kernel.sections.len() }));
    broken
}

pub(super) fn has_section(kernel: &Kernel, section: SectionId) -> bool {
    (section.0 as usize) < kernel.sections.len()
}

/// True if the registers of all warps of a CTA fit.
fn fits(budget: u32, threads: u32) -> bool {
    let warps = threads.div_ceil(LANES);
    let per_warp = budget.next_multiple_of(REGISTER_GRANULE) * LANES;
    warps.saturating_mul(per_warp) <= REGISTERS_PER_CTA
}

/// The end of the last parameter in bytes: each begins at a multiple of its own size, or of 64.
fn parameter_bytes(parameters: &[Parameter]) -> u32 {
    parameters.iter().fold(0u32, |end, parameter| {
        let (size, alignment) = (parameter.ty.bytes(), parameter.ty.alignment());
        end.next_multiple_of(alignment.max(1)).saturating_add(size.max(1))
    })
}

/// `WARP_SZ` is a constant of PTX, the one name that it reserves.
fn is_identifier(name: &str) -> bool {
    name != "WARP_SZ"
        && name.starts_with(|first: char| first.is_ascii_alphabetic())
        && name.chars().all(|character| character.is_ascii_alphanumeric() || character == '_')
}

/// True if instructions take constants of the type. Those of 16-bit floats must be moved into a register first.
pub(super) const fn may_be_constant(ty: Type) -> bool {
    match ty {
        Type::U32 | Type::S32 | Type::F32 | Type::U64 | Type::S64 => true,
        Type::Pred | Type::U16 | Type::F16 | Type::Bf16 | Type::Tf32 | Type::F16x2 | Type::Bf16x2 => false,
    }
}

/// The rules of one operation beyond the types of its operands.
#[expect(clippy::too_many_lines, reason = "one pattern per row of the table")]
pub(super) fn operation(op: &Op, kernel: &Kernel, broken: &mut Vec<Rule>) {
    match op {
        Op::LoadParam { ty, parameter, .. } => match kernel.parameters.get(*parameter as usize) {
            None => {
                broken.push(Rule::UnknownParameter { parameter: *parameter, declared: kernel.parameters.len() });
            }
            Some(declared) => parameter_is(declared, (*ty).into(), broken),
        },
        Op::TensorMapAddress { parameter, .. } => match kernel.parameters.get(*parameter as usize) {
            None => {
                broken.push(Rule::UnknownParameter { parameter: *parameter, declared: kernel.parameters.len() });
            }
            Some(declared) => parameter_is(declared, ParameterType::TensorMap, broken),
        },
        Op::TensorLoad { rank, .. } | Op::TensorStore { rank, .. } => {
            if !(1..=5).contains(rank) {
                broken.push(Rule::TensorRank { rank: *rank });
            }
        }
        Op::Reinterpret { to, from, .. } => {
            if to.bits() != from.bits() || *to == Type::Pred {
                broken.push(Rule::ReinterpretWidth { to: *to, from: *from });
            }
        }
        Op::Convert { to, from, rounding, .. } => {
            if !converts(*to, *from, *rounding) {
                broken.push(Rule::NoConversion { to: *to, from: *from, rounding: *rounding });
            }
        }
        Op::Load { space, cache, prefetch, ty, count, .. } => {
            vector(*ty, *count, broken);
            if *space != Space::Global && (*cache != LoadCache::All || *prefetch != L2Prefetch::None) {
                broken.push(Rule::SharedCacheHint);
            }
            if *cache == LoadCache::Volatile && *prefetch != L2Prefetch::None {
                broken.push(Rule::VolatilePrefetch);
            }
        }
        Op::Store { space, cache, ty, count, .. } => {
            vector(*ty, *count, broken);
            if *space != Space::Global && *cache != StoreCache::WriteBack {
                broken.push(Rule::SharedCacheHint);
            }
        }
        Op::Atomic { space, op, ty, .. } => {
            not_in(Space::Cluster, *space, broken);
            if !reduces(*op, *ty) {
                broken.push(Rule::NoReduction { op: *op, ty: *ty });
            }
        }
        Op::Reduce { space, op, ty, .. } => {
            not_in(Space::Cluster, *space, broken);
            if !reduces(*op, *ty) || *op == ReduceOp::Exchange {
                broken.push(Rule::NoReduction { op: *op, ty: *ty });
            }
        }
        Op::ReduceWarp { op, ty, .. } => {
            let bitwise = matches!(op, ReduceOp::And | ReduceOp::Or | ReduceOp::Xor);
            if *op == ReduceOp::Exchange || (bitwise && *ty != Type::U32) {
                broken.push(Rule::NoReduction { op: *op, ty: *ty });
            }
        }
        Op::CopyAsync { bytes, cache, .. } => {
            let exists = match cache {
                CopyCache::All => matches!(bytes, 4 | 8 | 16),
                CopyCache::L2 => *bytes == 16,
            };
            if !exists {
                broken.push(Rule::CopySize { bytes: *bytes, cache: *cache });
            }
        }
        Op::BulkStore { bytes: Operand::Constant(bytes), .. }
        | Op::BulkLoad { bytes: Operand::Constant(bytes), .. } => {
            if *bytes == 0 || bytes % 16 != 0 {
                broken.push(Rule::BulkSize { bytes: *bytes });
            }
        }
        Op::SetRegisterCount { count, .. } => {
            if !(24..=256).contains(count) || !count.is_multiple_of(8) {
                broken.push(Rule::RegisterCount { count: *count });
            }
        }
        Op::LoadMatrix { count, .. } | Op::StoreMatrix { count, .. } => {
            if !matches!(count, 1 | 2 | 4) {
                broken.push(Rule::MatrixCount { count: *count });
            }
        }
        Op::Mma { shape, operand, accumulate, .. } => {
            if !multiplies(*shape, *operand, *accumulate) {
                broken.push(Rule::NoProduct { shape: *shape, operand: *operand, accumulate: *accumulate });
            }
        }
        Op::Wgmma { columns, operand, accumulate, source, a_major, d, c, .. } => {
            hopper::product(*columns, *operand, *accumulate, broken);
            hopper::in_place(d, c, broken);
            if *source == MatrixSource::Registers && *a_major != Major::Depth {
                broken.push(Rule::RegisterMajor);
            }
        }
        Op::WgmmaFp8 { columns, a_major, b_major, d, c, .. } => {
            hopper::columns(*columns, broken);
            hopper::in_place(d, c, broken);
            for (operand, major) in [("A", a_major), ("B", b_major)] {
                if *major != Major::Depth {
                    broken.push(Rule::TransposedFp8 { operand });
                }
            }
        }
        Op::Shuffle { control, .. } => {
            if control & !0x1f1f != 0 {
                broken.push(Rule::ShuffleControl { control: *control });
            }
        }
        Op::BitFieldExtract { position, length, .. } | Op::BitFieldInsert { position, length, .. } => {
            for (name, operand) in [("position", position), ("length", length)] {
                if let Operand::Constant(value @ 256..) = *operand {
                    broken.push(Rule::BitField { name, value });
                }
            }
        }
        Op::BarrierSync { barrier, threads, .. } | Op::BarrierArrive { barrier, threads, .. } => {
            barrier_operands(*barrier, *threads, kernel.threads, broken);
        }
        Op::CompareAndSwap { space, .. } => not_in(Space::Cluster, *space, broken),
        Op::MbarrierInit { count, .. } => hopper::arrivals(*count, broken),
        Op::MbarrierArrive { space, count, .. } => {
            not_in(Space::Global, *space, broken);
            hopper::arrivals(*count, broken);
        }
        Op::MbarrierArriveExpect { space, bytes, .. } | Op::MbarrierExpect { space, bytes, .. } => {
            not_in(Space::Global, *space, broken);
            hopper::expected_bytes(*bytes, broken);
        }
        Op::MbarrierWait { scope, parity, .. } | Op::MbarrierTest { scope, parity, .. } => {
            hopper::phase(*scope, *parity, broken);
        }
        // The table's columns check everything there is.
        Op::Mov { .. }
        | Op::Special { .. }
        | Op::SharedBase { .. }
        | Op::SetPredicate { .. }
        | Op::Select { .. }
        | Op::Add { .. }
        | Op::Sub { .. }
        | Op::Mul { .. }
        | Op::MulHigh { .. }
        | Op::MulWide { .. }
        | Op::Mad { .. }
        | Op::MadWide { .. }
        | Op::Fma { .. }
        | Op::Div { .. }
        | Op::Rem { .. }
        | Op::Min { .. }
        | Op::Max { .. }
        | Op::Neg { .. }
        | Op::Abs { .. }
        | Op::And { .. }
        | Op::Or { .. }
        | Op::Xor { .. }
        | Op::Not { .. }
        | Op::Shl { .. }
        | Op::Shr { .. }
        | Op::Lop3 { .. }
        | Op::Permute { .. }
        | Op::PopCount { .. }
        | Op::LeadingZeros { .. }
        | Op::ConvertPair { .. }
        | Op::ConvertFp8 { .. }
        | Op::WidenFp8 { .. }
        | Op::MmaFp8 { .. }
        | Op::Pack { .. }
        | Op::Unpack { .. }
        | Op::Exp2 { .. }
        | Op::Log2 { .. }
        | Op::Reciprocal { .. }
        | Op::ReciprocalSqrt { .. }
        | Op::Sqrt { .. }
        | Op::Tanh { .. }
        | Op::Vote { .. }
        | Op::Ballot { .. }
        | Op::WarpSync { .. }
        | Op::Prefetch { .. }
        | Op::MbarrierInvalidate { .. }
        | Op::FenceMbarrierInit { .. }
        | Op::MapShared { .. }
        | Op::ClusterArrive { .. }
        | Op::ClusterWait { .. }
        | Op::CopyAsyncCommit { .. }
        | Op::CopyAsyncWait { .. }
        | Op::CopyAsyncWaitAll { .. }
        | Op::BulkStore { bytes: Operand::Register(_), .. }
        | Op::BulkLoad { bytes: Operand::Register(_), .. }
        | Op::PrefetchTensorMap { .. }
        | Op::Elect { .. }
        | Op::GridDependencyWait { .. }
        | Op::LaunchDependents { .. }
        | Op::WgmmaFence { .. }
        | Op::WgmmaCommit { .. }
        | Op::WgmmaWait { .. }
        | Op::BulkCommit { .. }
        | Op::BulkWait { .. }
        | Op::FenceProxyAsync { .. }
        | Op::Fence { .. }
        | Op::Exit { .. } => {}
    }
}

fn parameter_is(declared: &Parameter, loaded: ParameterType, broken: &mut Vec<Rule>) {
    if declared.ty != loaded {
        broken.push(Rule::ParameterType { name: declared.name.clone(), actual: declared.ty, loaded });
    }
}

fn not_in(excluded: Space, space: Space, broken: &mut Vec<Rule>) {
    if space == excluded {
        broken.push(Rule::NotInSpace { space });
    }
}

fn vector(ty: Type, count: u32, broken: &mut Vec<Rule>) {
    let bytes = ty.bytes();
    if !matches!(count, 1 | 2 | 4) || bytes * count > 16 {
        broken.push(Rule::VectorSize { count, bytes });
    }
}

fn barrier_operands(barrier: Operand, threads: Operand, cta: u32, broken: &mut Vec<Rule>) {
    if let Operand::Constant(barrier) = barrier
        && barrier > 15
    {
        broken.push(Rule::BarrierNumber { barrier });
    }
    if let Operand::Constant(threads) = threads
        && (threads == 0
            || !threads.is_multiple_of(u64::from(LANES))
            || threads.div_ceil(u64::from(LANES)) > u64::from(cta.div_ceil(LANES)))
    {
        broken.push(Rule::BarrierThreads { threads, of: cta });
    }
}

const fn converts(to: Type, from: Type, rounding: Rounding) -> bool {
    use Rounding::{Down, Exact, NearestAway, NearestEven, NearestInteger, ToZero, Up};
    match (from, to) {
        (Type::U32, Type::U64 | Type::U16)
        | (Type::S32, Type::S64)
        | (Type::U64 | Type::U16, Type::U32)
        | (Type::S64, Type::S32)
        | (Type::F16 | Type::Bf16, Type::F32) => matches!(rounding, Exact),
        (Type::U32 | Type::S32, Type::F32) | (Type::F32, Type::F16 | Type::Bf16) => matches!(rounding, NearestEven),
        (Type::F32, Type::U32 | Type::S32) => matches!(rounding, ToZero | Down | Up | NearestInteger),
        (Type::F32, Type::Tf32) => matches!(rounding, NearestAway),
        _ => false,
    }
}

const fn reduces(op: ReduceOp, ty: Type) -> bool {
    match op {
        ReduceOp::Add => matches!(ty, Type::U32 | Type::S32 | Type::U64 | Type::F32),
        ReduceOp::Min | ReduceOp::Max => matches!(ty, Type::U32 | Type::S32 | Type::U64),
        ReduceOp::And | ReduceOp::Or | ReduceOp::Xor | ReduceOp::Exchange => matches!(ty, Type::U32 | Type::U64),
    }
}

const fn multiplies(shape: MmaShape, operand: Type, accumulate: Type) -> bool {
    match (operand, accumulate) {
        (Type::F16x2, Type::F32 | Type::F16x2) | (Type::Bf16x2, Type::F32) => {
            matches!(shape, MmaShape::M16N8K8 | MmaShape::M16N8K16)
        }
        (Type::Tf32, Type::F32) => matches!(shape, MmaShape::M16N8K4 | MmaShape::M16N8K8),
        _ => false,
    }
}
