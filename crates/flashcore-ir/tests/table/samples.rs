//! One operation of each row of the table, in its order.

use flashcore_ir::{
    Accumulation, Address, Compare, CopyCache, FenceScope, Fp8, L2Prefetch, LoadCache, Major, MatrixSource, MmaShape,
    Op, Operand, ReduceOp, RegisterChange, RegisterId, Rounding, ShuffleMode, Space, SpecialRegister, StoreCache, Type,
    VoteMode,
};

/// Registers below this are written by the sample, those from here on read.
pub(crate) const READ: u32 = 100;
/// Registers from here on are bases of addresses.
pub(crate) const BASE: u32 = 200;

const fn written(number: u32) -> RegisterId {
    RegisterId(number)
}

const fn read(number: u32) -> RegisterId {
    RegisterId(READ + number)
}

const fn operand(number: u32) -> Operand {
    Operand::Register(read(number))
}

const fn address(number: u32) -> Address {
    Address { base: RegisterId(BASE + number), offset: 16 }
}

const D: RegisterId = written(0);
const A: Operand = operand(0);
const B: Operand = operand(1);
const C: Operand = operand(2);
const GLOBAL: Space = Space::Global;
const SHARED: Space = Space::Shared;
const SOURCE: Address = address(0);
const TARGET: Address = address(1);

#[expect(clippy::too_many_lines, reason = "one entry per row of the table")]
pub(crate) fn one_of_each() -> Vec<Op> {
    let ty = Type::U32;
    let prefetch = L2Prefetch::None;
    vec![
        Op::Mov { ty, d: D, a: A },
        Op::Reinterpret { to: Type::F32, from: ty, d: D, a: A },
        Op::Special { register: SpecialRegister::Lane, d: D },
        Op::SharedBase { d: D },
        Op::LoadParam { ty, parameter: 3, d: D },
        Op::TensorMapAddress { parameter: 3, d: D },
        Op::SetPredicate { compare: Compare::Le, ty, d: D, a: A, b: Operand::Constant(15) },
        Op::Select { ty, d: D, a: A, b: B, condition: vec![read(2)] },
        Op::Add { ty, d: D, a: A, b: B },
        Op::Sub { ty, d: D, a: A, b: B },
        Op::Mul { ty: Type::Bf16x2, d: D, a: A, b: B },
        Op::MulHigh { ty, d: D, a: A, b: B },
        Op::MulWide { ty, d: D, a: A, b: B },
        Op::Mad { ty, d: D, a: A, b: B, c: C },
        Op::MadWide { ty: Type::S32, d: D, a: A, b: B, c: C },
        Op::Fma { ty: Type::F32, d: D, a: A, b: B, c: C },
        Op::Div { ty, d: D, a: A, b: B },
        Op::Rem { ty, d: D, a: A, b: B },
        Op::Min { ty, d: D, a: A, b: B },
        Op::Max { ty, d: D, a: A, b: B },
        Op::Neg { ty: Type::S32, d: D, a: A },
        Op::Abs { ty: Type::S32, d: D, a: A },
        Op::And { ty, d: D, a: A, b: B },
        Op::Or { ty, d: D, a: A, b: B },
        Op::Xor { ty, d: D, a: A, b: B },
        Op::Not { ty, d: D, a: A },
        Op::Shl { ty, d: D, a: A, b: B },
        Op::Shr { ty: Type::S64, d: D, a: A, b: B },
        Op::Lop3 { table: 0xea, d: D, a: A, b: B, c: C },
        Op::BitFieldExtract { d: D, a: A, position: B, length: C },
        Op::BitFieldInsert { d: D, a: A, b: B, position: C, length: operand(3) },
        Op::Permute { d: D, a: A, b: B, selector: C },
        Op::PopCount { d: D, a: A },
        Op::LeadingZeros { d: D, a: A },
        Op::Convert { to: Type::F32, from: Type::Bf16, rounding: Rounding::Exact, d: D, a: A },
        Op::ConvertPair { to: Type::F16x2, d: D, high: A, low: B },
        Op::ConvertFp8 { to: Fp8::E4m3, d: D, high: A, low: B },
        Op::WidenFp8 { from: Fp8::E5m2, d: D, a: vec![read(0)] },
        Op::Pack { to: Type::U64, d: D, low: vec![read(0)], high: vec![read(1)] },
        Op::Unpack { from: Type::Bf16x2, low: D, high: written(1), a: vec![read(0)] },
        Op::Exp2 { ty: Type::F32, d: D, a: A },
        Op::Log2 { d: D, a: A },
        Op::Reciprocal { d: D, a: A },
        Op::ReciprocalSqrt { d: D, a: A },
        Op::Sqrt { d: D, a: A },
        Op::Tanh { ty: Type::Bf16x2, d: D, a: A },
        Op::Shuffle { mode: ShuffleMode::Up, control: 0, ty, d: D, index: A, a: vec![read(1)] },
        Op::Vote { mode: VoteMode::Any, d: D, a: vec![read(0)] },
        Op::Ballot { d: D, a: vec![read(0)] },
        Op::ReduceWarp { op: ReduceOp::Max, ty, d: D, a: vec![read(0)] },
        Op::Elect { d: D },
        Op::WarpSync {},
        Op::Load {
            space: GLOBAL,
            cache: LoadCache::ReadOnly,
            prefetch: L2Prefetch::Bytes128,
            ty,
            count: 2,
            d: vec![D, written(1)],
            source: SOURCE,
        },
        Op::Store {
            space: SHARED,
            cache: StoreCache::WriteBack,
            ty,
            count: 2,
            a: vec![read(0), read(1)],
            target: TARGET,
        },
        Op::Prefetch { source: SOURCE },
        Op::Atomic { space: SHARED, op: ReduceOp::Add, ty, d: D, a: vec![read(0)], target: TARGET },
        Op::CompareAndSwap { space: GLOBAL, ty, d: D, compare: vec![read(0)], value: vec![read(1)], target: TARGET },
        Op::Reduce { space: GLOBAL, op: ReduceOp::Xor, ty, a: vec![read(0)], target: TARGET },
        Op::CopyAsync {
            bytes: 16,
            cache: CopyCache::L2,
            prefetch,
            zero_fill: true,
            source_bytes: vec![read(0)],
            target: TARGET,
            source: SOURCE,
        },
        Op::CopyAsyncCommit {},
        Op::CopyAsyncWait { pending: 1 },
        Op::CopyAsyncWaitAll {},
        Op::BulkStore { bytes: A, target: TARGET, source: SOURCE },
        Op::BulkCommit {},
        Op::BulkWait { pending: 0, read: true },
        Op::FenceProxyAsync {},
        Op::BulkLoad { bytes: A, target: TARGET, source: SOURCE, barrier: address(2) },
        Op::TensorLoad {
            rank: 2,
            multicast: true,
            hinted: true,
            map: vec![read(0)],
            coordinates: vec![read(1), read(2)],
            mask: vec![read(3)],
            policy: vec![read(4)],
            target: TARGET,
            barrier: address(2),
        },
        Op::TensorStore {
            rank: 2,
            hinted: false,
            map: vec![read(0)],
            coordinates: vec![read(1), read(2)],
            policy: vec![],
            source: SOURCE,
        },
        Op::PrefetchTensorMap { map: vec![read(0)] },
        Op::LoadMatrix { count: 2, transposed: true, ty: Type::F16x2, d: vec![D, written(1)], source: SOURCE },
        Op::StoreMatrix { count: 2, transposed: false, ty: Type::Bf16x2, a: vec![read(0), read(1)], target: TARGET },
        Op::Mma {
            shape: MmaShape::M16N8K8,
            operand: Type::F16x2,
            accumulate: Type::F16x2,
            d: vec![D, written(1)],
            a: vec![read(0), read(1)],
            b: vec![read(2)],
            c: vec![read(3), read(4)],
        },
        Op::MmaFp8 {
            left: Fp8::E4m3,
            right: Fp8::E5m2,
            d: (0..4).map(written).collect(),
            a: (0..4).map(read).collect(),
            b: (4..6).map(read).collect(),
            c: (6..10).map(read).collect(),
        },
        Op::Wgmma {
            columns: 8,
            operand: Type::F16x2,
            accumulate: Type::F16x2,
            accumulation: Accumulation::AddWhere,
            source: MatrixSource::Shared,
            a_major: Major::Depth,
            b_major: Major::Outer,
            d: vec![D, written(1)],
            c: vec![read(0), read(1)],
            scale: vec![read(2)],
            a: vec![read(3)],
            b: vec![read(4)],
        },
        Op::WgmmaFp8 {
            columns: 8,
            left: Fp8::E4m3,
            right: Fp8::E5m2,
            accumulation: Accumulation::AddWhere,
            source: MatrixSource::Registers,
            a_major: Major::Depth,
            b_major: Major::Depth,
            d: (0..4).map(written).collect(),
            c: (0..4).map(read).collect(),
            scale: vec![read(4)],
            a: (5..9).map(read).collect(),
            b: vec![read(9)],
        },
        Op::WgmmaFence {},
        Op::WgmmaCommit {},
        Op::WgmmaWait { pending: 1 },
        Op::BarrierSync { barrier: A, threads: B },
        Op::BarrierArrive { barrier: A, threads: B },
        Op::Fence { scope: FenceScope::Gpu },
        Op::MbarrierInit { count: A, target: TARGET },
        Op::MbarrierInvalidate { target: TARGET },
        Op::MbarrierArrive { space: Space::Cluster, count: A, target: TARGET },
        Op::MbarrierArriveExpect { space: SHARED, bytes: A, target: TARGET },
        Op::MbarrierExpect { space: SHARED, bytes: A, target: TARGET },
        Op::MbarrierWait { scope: FenceScope::Cta, parity: A, source: SOURCE },
        Op::MbarrierTest { suspends: false, scope: FenceScope::Cluster, d: D, parity: A, source: SOURCE },
        Op::FenceMbarrierInit {},
        Op::MapShared { d: D, a: A, rank: B },
        Op::ClusterArrive {},
        Op::ClusterWait {},
        Op::SetRegisterCount { change: RegisterChange::Decrease, count: 40 },
        Op::GridDependencyWait {},
        Op::LaunchDependents {},
        Op::Exit {},
    ]
}
