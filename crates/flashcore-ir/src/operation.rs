//! The one table of operations.
//!
//! Each row has an operation's name, its form in the notation of the PTX manual, the section of the manual that defines
//! it, its modifiers and operands with their types, its class, the memory it touches, whether a whole warp must execute
//! it together, and the first PTX version and architecture that have it. The printer, the simulator and the verifier
//! match on [`Op`] without a wildcard arm, so a new row breaks the build in each place that must learn it;
//! `docs/add-an-operation.md` lists those places.

pub use crate::columns::{Class, Effect, Entry, LengthMismatch, Role, Slot};
use crate::forms::{ANY, Choices, Modifier};
use crate::operand::{
    Accumulation, Address, Compare, CopyCache, FenceScope, Fp8, L2Prefetch, LoadCache, Major, MatrixSource, MmaShape,
    Operand, ReduceOp, RegisterChange, RegisterId, Rounding, ShuffleMode, Space, SpecialRegister, StoreCache, VoteMode,
};
use crate::target::{
    ADA_FP8, ADA_FP8_MMA, AMPERE, AMPERE_BF16, AMPERE_PREFETCH, HOPPER, HOPPER_ONLY, HOPPER_PAIRS, Since,
};
use crate::types::Type;

const fn address_type(space: Space) -> Type {
    match space {
        Space::Global => Type::U64,
        Space::Shared | Space::Cluster => Type::U32,
    }
}

const fn arithmetic(ty: Type) -> Class {
    match ty {
        Type::F16 | Type::Bf16 | Type::F32 | Type::Tf32 | Type::F16x2 | Type::Bf16x2 => Class::Float,
        Type::Pred | Type::U16 | Type::U32 | Type::S32 | Type::U64 | Type::S64 => Class::Integer,
    }
}

/// `add`, `sub` and `mul` of `bf16x2` came with Hopper; `fma`, `min` and `max` were there before.
const fn pair_arithmetic(ty: Type) -> Since {
    match ty {
        Type::Bf16x2 => HOPPER_PAIRS,
        _ => AMPERE,
    }
}

/// Accesses with an L2 prefetch came with a later PTX than plain ones.
const fn with_prefetch(prefetch: L2Prefetch) -> Since {
    match prefetch {
        L2Prefetch::None => AMPERE,
        L2Prefetch::Bytes64 | L2Prefetch::Bytes128 | L2Prefetch::Bytes256 => AMPERE_PREFETCH,
    }
}

/// DSMEM, the shared memory of other CTAs, came with clusters.
const fn in_space(space: Space) -> Since {
    match space {
        Space::Global | Space::Shared => AMPERE,
        Space::Cluster => HOPPER,
    }
}

const fn special(register: SpecialRegister) -> Since {
    match register {
        SpecialRegister::ThreadX
        | SpecialRegister::ThreadY
        | SpecialRegister::ThreadZ
        | SpecialRegister::BlockX
        | SpecialRegister::CtaX
        | SpecialRegister::CtaY
        | SpecialRegister::CtaZ
        | SpecialRegister::GridX
        | SpecialRegister::GridY
        | SpecialRegister::GridZ
        | SpecialRegister::Lane => AMPERE,
        SpecialRegister::ClusterCtaX
        | SpecialRegister::ClusterCtaY
        | SpecialRegister::ClusterCtaZ
        | SpecialRegister::ClusterX
        | SpecialRegister::ClusterY
        | SpecialRegister::ClusterZ
        | SpecialRegister::ClusterRank
        | SpecialRegister::ClusterSize => HOPPER,
    }
}

const fn scoped(scope: FenceScope) -> Since {
    match scope {
        FenceScope::Cta | FenceScope::Gpu | FenceScope::System => AMPERE,
        FenceScope::Cluster => HOPPER,
    }
}

operations! {
    // ---- moves, comparisons, selection ----------------------------------------------------------------------------

    /// `d = a`.
    Mov "mov.type d, a" @ "data-movement-and-conversion-instructions-mov"
        { ty: Type } out (d: ty) in (a: ty)
        : arithmetic(ty), Effect::None, false, AMPERE;
    /// `d` is the bits of `a`, as another type of the same width.
    Reinterpret "mov.b32 d, a" @ "data-movement-and-conversion-instructions-mov"
        { to: Type, from: Type } out (d: to) in (a: from)
        : Class::Integer, Effect::None, false, AMPERE;
    /// `d` is the value of a special register of the thread.
    Special "mov.u32 d, %sreg" @ "special-registers"
        { register: SpecialRegister } out (d: Type::U32)
        : Class::Integer, Effect::None, false, special(register);
    /// `d` is the address at which the shared memory of the CTA begins.
    SharedBase "mov.u32 d, shared_variable" @ "data-movement-and-conversion-instructions-mov"
        out (d: Type::U32)
        : Class::Integer, Effect::None, false, AMPERE;
    /// `d` is the value of a kernel parameter, by its index.
    LoadParam "ld.param.type d, [parameter]" @ "data-movement-and-conversion-instructions-ld"
        { ty: Type, parameter: u32 } out (d: ty)
        for ty in [U32 S32 F32 U64 S64]
        : Class::Memory, Effect::None, false, AMPERE;
    /// `d` is the address of a kernel parameter that is a tensor map, by its index.
    TensorMapAddress "cvta.param.u64 d, parameter" @ "data-movement-and-conversion-instructions-cvta"
        { parameter: u32 } out (d: Type::U64)
        : Class::Integer, Effect::None, false, HOPPER;
    /// `d = a compare b`.
    SetPredicate "setp.compare.type d, a, b" @ "comparison-and-selection-instructions-setp"
        { compare: Compare, ty: Type } out (d: Type::Pred) in (a: ty, b: ty)
        for ty in [U32 S32 U64 S64 F32]
        : arithmetic(ty), Effect::None, false, AMPERE;
    /// `d = condition ? a : b`.
    Select "selp.type d, a, b, condition" @ "comparison-and-selection-instructions-selp"
        { ty: Type } out (d: ty) in (a: ty, b: ty) ins (condition[1]: Type::Pred)
        for ty in [U32 S32 U64 S64 F32]
        : arithmetic(ty), Effect::None, false, AMPERE;

    // ---- arithmetic -----------------------------------------------------------------------------------------------

    /// `d = a + b`. Integers wrap; floats round to nearest even.
    Add "add.type d, a, b" @ "integer-arithmetic-instructions-add"
        { ty: Type } out (d: ty) in (a: ty, b: ty)
        for ty in [U32 S32 U64 S64 F32 F16x2 Bf16x2]
        : arithmetic(ty), Effect::None, false, pair_arithmetic(ty);
    /// `d = a - b`. Integers wrap; floats round to nearest even.
    Sub "sub.type d, a, b" @ "integer-arithmetic-instructions-sub"
        { ty: Type } out (d: ty) in (a: ty, b: ty)
        for ty in [U32 S32 U64 S64 F32 F16x2 Bf16x2]
        : arithmetic(ty), Effect::None, false, pair_arithmetic(ty);
    /// `d = a * b`: the low half for integers; floats round to nearest even.
    Mul "mul{.lo}.type d, a, b" @ "integer-arithmetic-instructions-mul"
        { ty: Type } out (d: ty) in (a: ty, b: ty)
        for ty in [U32 S32 U64 S64 F32 F16x2 Bf16x2]
        : arithmetic(ty), Effect::None, false, pair_arithmetic(ty);
    /// `d` is the high half of `a * b`.
    MulHigh "mul.hi.type d, a, b" @ "integer-arithmetic-instructions-mul"
        { ty: Type } out (d: ty) in (a: ty, b: ty)
        for ty in [U32 S32]
        : Class::Integer, Effect::None, false, AMPERE;
    /// `d` is the full product of two 32-bit integers.
    MulWide "mul.wide.type d, a, b" @ "integer-arithmetic-instructions-mul"
        { ty: Type } out (d: wide(ty)) in (a: ty, b: ty)
        for ty in [U32 S32]
        : Class::Integer, Effect::None, false, AMPERE;
    /// `d = a * b + c`, the low half.
    Mad "mad.lo.type d, a, b, c" @ "integer-arithmetic-instructions-mad"
        { ty: Type } out (d: ty) in (a: ty, b: ty, c: ty)
        for ty in [U32 S32 U64 S64]
        : Class::Integer, Effect::None, false, AMPERE;
    /// `d = a * b + c`, where the product of the 32-bit `a` and `b` and the sum are 64 bits wide.
    MadWide "mad.wide.type d, a, b, c" @ "integer-arithmetic-instructions-mad"
        { ty: Type } out (d: wide(ty)) in (a: ty, b: ty, c: wide(ty))
        for ty in [U32 S32]
        : Class::Integer, Effect::None, false, AMPERE;
    /// `d = a * b + c`, rounded once, to nearest even.
    Fma "fma.rn.type d, a, b, c" @ "floating-point-instructions-fma"
        { ty: Type } out (d: ty) in (a: ty, b: ty, c: ty)
        for ty in [F32 F16x2 Bf16x2]
        : Class::Float, Effect::None, false, AMPERE;
    /// `d = a / b`: truncated for integers, all ones where `b` is 0; rounded to nearest even for floats.
    Div "div{.rn}.type d, a, b" @ "integer-arithmetic-instructions-div"
        { ty: Type } out (d: ty) in (a: ty, b: ty)
        for ty in [U32 F32]
        : arithmetic(ty), Effect::None, false, AMPERE;
    /// `d = a mod b`; all ones where `b` is 0.
    Rem "rem.type d, a, b" @ "integer-arithmetic-instructions-rem"
        { ty: Type } out (d: ty) in (a: ty, b: ty)
        for ty in [U32]
        : Class::Integer, Effect::None, false, AMPERE;
    /// The smaller of `a` and `b`; of a number and a NaN, the number.
    Min "min.type d, a, b" @ "integer-arithmetic-instructions-min"
        { ty: Type } out (d: ty) in (a: ty, b: ty)
        for ty in [U32 S32 U64 S64 F32 F16x2 Bf16x2]
        : arithmetic(ty), Effect::None, false, AMPERE;
    /// The larger of `a` and `b`; of a number and a NaN, the number.
    Max "max.type d, a, b" @ "integer-arithmetic-instructions-max"
        { ty: Type } out (d: ty) in (a: ty, b: ty)
        for ty in [U32 S32 U64 S64 F32 F16x2 Bf16x2]
        : arithmetic(ty), Effect::None, false, AMPERE;
    /// `d = -a`.
    Neg "neg.type d, a" @ "integer-arithmetic-instructions-neg"
        { ty: Type } out (d: ty) in (a: ty)
        for ty in [S32 F32 F16x2 Bf16x2]
        : arithmetic(ty), Effect::None, false, AMPERE;
    /// `d = |a|`.
    Abs "abs.type d, a" @ "integer-arithmetic-instructions-abs"
        { ty: Type } out (d: ty) in (a: ty)
        for ty in [S32 F32 F16x2 Bf16x2]
        : arithmetic(ty), Effect::None, false, AMPERE;

    // ---- bits -----------------------------------------------------------------------------------------------------

    /// `d = a & b`.
    And "and.type d, a, b" @ "logic-and-shift-instructions-and"
        { ty: Type } out (d: ty) in (a: ty, b: ty)
        for ty in [Pred U32 S32 U64 S64]
        : Class::Integer, Effect::None, false, AMPERE;
    /// `d = a | b`.
    Or "or.type d, a, b" @ "logic-and-shift-instructions-or"
        { ty: Type } out (d: ty) in (a: ty, b: ty)
        for ty in [Pred U32 S32 U64 S64]
        : Class::Integer, Effect::None, false, AMPERE;
    /// `d = a ^ b`.
    Xor "xor.type d, a, b" @ "logic-and-shift-instructions-xor"
        { ty: Type } out (d: ty) in (a: ty, b: ty)
        for ty in [Pred U32 S32 U64 S64]
        : Class::Integer, Effect::None, false, AMPERE;
    /// `d = ~a`.
    Not "not.type d, a" @ "logic-and-shift-instructions-not"
        { ty: Type } out (d: ty) in (a: ty)
        for ty in [Pred U32 S32 U64 S64]
        : Class::Integer, Effect::None, false, AMPERE;
    /// `d = a << b`; 0 where `b` reaches the width.
    Shl "shl.b d, a, b" @ "logic-and-shift-instructions-shl"
        { ty: Type } out (d: ty) in (a: ty, b: Type::U32)
        for ty in [U32 S32 U64 S64]
        : Class::Integer, Effect::None, false, AMPERE;
    /// `d = a >> b`, filled with the sign for signed types; `b` is clamped to the width.
    Shr "shr.type d, a, b" @ "logic-and-shift-instructions-shr"
        { ty: Type } out (d: ty) in (a: ty, b: Type::U32)
        for ty in [U32 S32 U64 S64]
        : Class::Integer, Effect::None, false, AMPERE;
    /// Any bitwise function of three words, by its truth table.
    Lop3 "lop3.b32 d, a, b, c, table" @ "logic-and-shift-instructions-lop3"
        { table: u8 } out (d: Type::U32) in (a: Type::U32, b: Type::U32, c: Type::U32)
        : Class::Integer, Effect::None, false, AMPERE;
    /// `length` bits of `a` from bit `position` on.
    BitFieldExtract "bfe.u32 d, a, position, length" @ "integer-arithmetic-instructions-bfe"
        out (d: Type::U32) in (a: Type::U32, position: Type::U32, length: Type::U32)
        : Class::Integer, Effect::None, false, AMPERE;
    /// `b` with `length` bits from bit `position` on replaced by the low bits of `a`.
    BitFieldInsert "bfi.b32 d, a, b, position, length" @ "integer-arithmetic-instructions-bfi"
        out (d: Type::U32) in (a: Type::U32, b: Type::U32, position: Type::U32, length: Type::U32)
        : Class::Integer, Effect::None, false, AMPERE;
    /// Four bytes chosen from the eight of `a` and `b` by the nibbles of `selector`; bit 3 of a nibble replicates the sign.
    Permute "prmt.b32 d, a, b, selector" @ "data-movement-and-conversion-instructions-prmt"
        out (d: Type::U32) in (a: Type::U32, b: Type::U32, selector: Type::U32)
        : Class::Integer, Effect::None, false, AMPERE;
    /// The number of ones in `a`.
    PopCount "popc.b32 d, a" @ "integer-arithmetic-instructions-popc"
        out (d: Type::U32) in (a: Type::U32)
        : Class::Integer, Effect::None, false, AMPERE;
    /// The number of zeros above the highest one of `a`.
    LeadingZeros "clz.b32 d, a" @ "integer-arithmetic-instructions-clz"
        out (d: Type::U32) in (a: Type::U32)
        : Class::Integer, Effect::None, false, AMPERE;

    // ---- conversions ----------------------------------------------------------------------------------------------

    /// `d` is `a` in another type. The verifier lists the pairs that exist.
    Convert "cvt{.rounding}.to.from d, a" @ "data-movement-and-conversion-instructions-cvt"
        { to: Type, from: Type, rounding: Rounding } out (d: to) in (a: from)
        : Class::Convert, Effect::None, false, if matches!(from, Type::Bf16) { AMPERE_BF16 } else { AMPERE };
    /// Two `f32` rounded to nearest even into one pair: `low` into the lower half.
    ConvertPair "cvt.rn.to.f32 d, high, low" @ "data-movement-and-conversion-instructions-cvt"
        { to: Type } out (d: to) in (high: Type::F32, low: Type::F32)
        for to in [F16x2 Bf16x2]
        : Class::Convert, Effect::None, false, AMPERE;
    /// Two `f32` rounded to nearest even into two 8-bit floats: `low` into the lower byte. What is beyond the largest
    /// number becomes that, infinities too; a NaN becomes `0x7f`.
    ConvertFp8 "cvt.rn.satfinite.tox2.f32 d, high, low" @ "data-movement-and-conversion-instructions-cvt"
        { to: Fp8 } out (d: Type::U16) in (high: Type::F32, low: Type::F32)
        : Class::Convert, Effect::None, false, ADA_FP8;
    /// Two 8-bit floats as `f16`, which has all their values: the lower byte into the lower half.
    WidenFp8 "cvt.rn.f16x2.fromx2 d, a" @ "data-movement-and-conversion-instructions-cvt"
        { from: Fp8 } out (d: Type::F16x2) ins (a[1]: Type::U16)
        : Class::Convert, Effect::None, false, ADA_FP8;
    /// Two registers as the halves of one of twice the width.
    Pack "mov.b32 d, {low, high}" @ "data-movement-and-conversion-instructions-mov"
        { to: Type } out (d: to) ins (low[1]: half_of(to), high[1]: half_of(to))
        for to in [U32 F16x2 Bf16x2 U64]
        : Class::Integer, Effect::None, false, AMPERE;
    /// The two halves of a register.
    Unpack "mov.b32 {low, high}, a" @ "data-movement-and-conversion-instructions-mov"
        { from: Type } out (low: half_of(from), high: half_of(from)) ins (a[1]: from)
        for from in [U32 F16x2 Bf16x2 U64]
        : Class::Integer, Effect::None, false, AMPERE;

    // ---- special functions ----------------------------------------------------------------------------------------

    /// `d = 2^a`, approximately: 2 ULP for `f32`, subnormals flushed.
    Exp2 "ex2.approx{.ftz}.type d, a" @ "floating-point-instructions-ex2"
        { ty: Type } out (d: ty) in (a: ty)
        for ty in [F32 F16x2 Bf16x2]
        : Class::SpecialFunction, Effect::None, false, pair_arithmetic(ty);
    /// `d = log2(a)`, approximately, subnormals flushed.
    Log2 "lg2.approx.ftz.f32 d, a" @ "floating-point-instructions-lg2"
        out (d: Type::F32) in (a: Type::F32)
        : Class::SpecialFunction, Effect::None, false, AMPERE;
    /// `d = 1/a`, to 1 ULP, subnormals flushed.
    Reciprocal "rcp.approx.ftz.f32 d, a" @ "floating-point-instructions-rcp"
        out (d: Type::F32) in (a: Type::F32)
        : Class::SpecialFunction, Effect::None, false, AMPERE;
    /// `d = 1/sqrt(a)`, approximately, subnormals flushed.
    ReciprocalSqrt "rsqrt.approx.ftz.f32 d, a" @ "floating-point-instructions-rsqrt"
        out (d: Type::F32) in (a: Type::F32)
        : Class::SpecialFunction, Effect::None, false, AMPERE;
    /// `d = sqrt(a)`, approximately, subnormals flushed.
    Sqrt "sqrt.approx.ftz.f32 d, a" @ "floating-point-instructions-sqrt"
        out (d: Type::F32) in (a: Type::F32)
        : Class::SpecialFunction, Effect::None, false, AMPERE;
    /// `d = tanh(a)`, approximately: relative error 2^-11.
    Tanh "tanh.approx.type d, a" @ "floating-point-instructions-tanh"
        { ty: Type } out (d: ty) in (a: ty)
        for ty in [F32 F16x2 Bf16x2]
        : Class::SpecialFunction, Effect::None, false, pair_arithmetic(ty);

    // ---- exchange within a warp -----------------------------------------------------------------------------------

    /// `d` is `a` of another lane. `control` is the manual's operand c: segment mask in bits 8 to 12, clamp in bits 0 to 4.
    Shuffle "shfl.sync.mode.b32 d, a, index, control, 0xffffffff" @ "data-movement-and-conversion-instructions-shfl-sync"
        { mode: ShuffleMode, control: u32, ty: Type } out (d: ty) in (index: Type::U32) ins (a[1]: ty)
        for ty in [U32 S32 F32 Tf32 F16x2 Bf16x2]
        : Class::Warp, Effect::None, true, AMPERE;
    /// `d` is the vote of all lanes on a predicate.
    Vote "vote.sync.mode.pred d, a, 0xffffffff" @ "parallel-synchronization-and-communication-instructions-vote-sync"
        { mode: VoteMode } out (d: Type::Pred) ins (a[1]: Type::Pred)
        : Class::Warp, Effect::None, true, AMPERE;
    /// Bit `n` of `d` is the predicate of lane `n`.
    Ballot "vote.sync.ballot.b32 d, a, 0xffffffff" @ "parallel-synchronization-and-communication-instructions-vote-sync"
        out (d: Type::U32) ins (a[1]: Type::Pred)
        : Class::Warp, Effect::None, true, AMPERE;
    /// `d` is the reduction of `a` over the lanes of the warp.
    ReduceWarp "redux.sync.op.type d, a, 0xffffffff" @ "parallel-synchronization-and-communication-instructions-redux-sync"
        { op: ReduceOp, ty: Type } out (d: ty) ins (a[1]: ty)
        for ty in [U32 S32]
        : Class::Warp, Effect::None, true, AMPERE;
    /// `d` holds in one lane of the warp, always the same one, which the hardware chooses.
    Elect "elect.sync _|d, 0xffffffff" @ "parallel-synchronization-and-communication-instructions-elect-sync"
        out (d: Type::Pred)
        : Class::Warp, Effect::None, true, HOPPER;
    /// Synchronises the lanes of the warp and orders their accesses to memory.
    WarpSync "bar.warp.sync 0xffffffff" @ "parallel-synchronization-and-communication-instructions-bar-warp-sync"
        : Class::Barrier, Effect::Order, true, AMPERE;

    // ---- memory ---------------------------------------------------------------------------------------------------

    /// Loads `d.len()` adjacent elements; the address is a multiple of their total size.
    Load "ld.space{.cache}{.prefetch}{.vec}.type d, [source]" @ "data-movement-and-conversion-instructions-ld"
        { space: Space, cache: LoadCache, prefetch: L2Prefetch, ty: Type, count: u32 } outs (d[count]: ty) at (source: space)
        for ty in [U16 F16 Bf16 U32 S32 F32 Tf32 F16x2 Bf16x2 U64 S64]
        : Class::Memory, Effect::Read(space), false, with_prefetch(prefetch).and(in_space(space));
    /// Stores `a.len()` adjacent elements; the address is a multiple of their total size.
    Store "st.space{.cache}{.vec}.type [target], a" @ "data-movement-and-conversion-instructions-st"
        { space: Space, cache: StoreCache, ty: Type, count: u32 } ins (a[count]: ty) at (target: space)
        for ty in [U16 F16 Bf16 U32 S32 F32 Tf32 F16x2 Bf16x2 U64 S64]
        : Class::Memory, Effect::Write(space), false, in_space(space);
    /// Prefetches the cache line at the address into L2.
    Prefetch "prefetch.global.L2 [source]" @ "data-movement-and-conversion-instructions-prefetch-prefetchu"
        at (source: Space::Global)
        : Class::Memory, Effect::None, false, AMPERE;
    /// `d` is the old value at the address, which becomes `op(old, a)`, atomically for the whole GPU. Relaxed.
    Atomic "atom.space.op.type d, [target], a" @ "parallel-synchronization-and-communication-instructions-atom"
        { space: Space, op: ReduceOp, ty: Type } out (d: ty) ins (a[1]: ty) at (target: space)
        for ty in [U32 S32 U64 F32]
        : Class::Memory, Effect::Atomic(space), false, AMPERE;
    /// `d` is the old value at the address, which becomes `value` if it was `compare`. Relaxed.
    CompareAndSwap "atom.space.cas.type d, [target], compare, value" @ "parallel-synchronization-and-communication-instructions-atom"
        { space: Space, ty: Type } out (d: ty) ins (compare[1]: ty, value[1]: ty) at (target: space)
        for ty in [U32 U64]
        : Class::Memory, Effect::Atomic(space), false, AMPERE;
    /// The value at the address becomes `op(old, a)`, atomically for the whole GPU. Relaxed.
    Reduce "red.space.op.type [target], a" @ "parallel-synchronization-and-communication-instructions-red"
        { space: Space, op: ReduceOp, ty: Type } ins (a[1]: ty) at (target: space)
        for ty in [U32 S32 U64 F32]
        : Class::Memory, Effect::Atomic(space), false, AMPERE;

    // ---- asynchronous copies --------------------------------------------------------------------------------------

    /// Starts a copy of `bytes` from global to shared memory. With `zero_fill`, only `source_bytes` are read and the
    /// rest becomes 0. The copy is complete, and visible to this thread alone, once its group has been waited for.
    CopyAsync "cp.async.cache.shared.global{.prefetch} [target], [source], bytes{, source_bytes}" @ "data-movement-and-conversion-instructions-cp-async"
        { bytes: u32, cache: CopyCache, prefetch: L2Prefetch, zero_fill: bool }
        ins (source_bytes[zero_fill]: Type::U32) at (target: Space::Shared, source: Space::Global)
        : Class::Asynchronous, Effect::CopyToShared, false, with_prefetch(prefetch);
    /// Closes the group of all copies this thread started since the last commit.
    CopyAsyncCommit "cp.async.commit_group" @ "data-movement-and-conversion-instructions-cp-async-commit-group"
        : Class::Asynchronous, Effect::None, false, AMPERE;
    /// Waits until at most `pending` of this thread's groups are unfinished.
    CopyAsyncWait "cp.async.wait_group pending" @ "data-movement-and-conversion-instructions-cp-async-wait-group"
        { pending: u32 }
        : Class::Asynchronous, Effect::Order, false, AMPERE;
    /// Waits for all of this thread's copies, committed or not.
    CopyAsyncWaitAll "cp.async.wait_all" @ "data-movement-and-conversion-instructions-cp-async-wait-group"
        : Class::Asynchronous, Effect::Order, false, AMPERE;
    /// Starts a bulk copy (TMA) of `bytes` (a multiple of 16) from shared to global memory by the async proxy, which
    /// sees ordinary writes to shared memory only after an [`Op::FenceProxyAsync`].
    BulkStore "cp.async.bulk.global.shared::cta.bulk_group [target], [source], bytes" @ "data-movement-and-conversion-instructions-cp-async-bulk"
        in (bytes: Type::U32) at (target: Space::Global, source: Space::Shared)
        : Class::Asynchronous, Effect::CopyToGlobal, false, HOPPER;
    /// Closes the group of all bulk copies this thread started since the last commit.
    BulkCommit "cp.async.bulk.commit_group" @ "data-movement-and-conversion-instructions-cp-async-bulk-commit-group"
        : Class::Asynchronous, Effect::None, false, HOPPER;
    /// Waits until at most `pending` of this thread's bulk groups are unfinished; with `read`, until the others have
    /// read their source.
    BulkWait "cp.async.bulk.wait_group{.read} pending" @ "data-movement-and-conversion-instructions-cp-async-bulk-wait-group"
        { pending: u32, read: bool }
        : Class::Asynchronous, Effect::Order, false, HOPPER;
    /// Makes this thread's earlier accesses to shared memory visible to the async proxy.
    FenceProxyAsync "fence.proxy.async.shared::cta" @ "parallel-synchronization-and-communication-instructions-membar-fence"
        : Class::Barrier, Effect::Order, false, HOPPER;

    // ---- TMA: bulk loads and tensors -------------------------------------------------------------------------------

    /// Starts a bulk copy (TMA) of `bytes` (a multiple of 16) from global to shared memory by the async proxy. Its
    /// completion is counted by the `mbarrier` (`complete_tx`) and visible to those who see the phase complete.
    BulkLoad "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [target], [source], bytes, [barrier]" @ "data-movement-and-conversion-instructions-cp-async-bulk"
        in (bytes: Type::U32) at (target: Space::Shared, source: Space::Global, barrier: Space::Shared)
        : Class::Asynchronous, Effect::CopyToShared, false, HOPPER;
    /// Starts a TMA load of a box of a tensor to shared memory, with `multicast` to that of several CTAs of the
    /// cluster. Its completion is counted by the `mbarrier` of each CTA (`complete_tx` of the box's bytes).
    TensorLoad "cp.async.bulk.tensor.rank.shared::cluster.global.tile.mbarrier::complete_tx::bytes{.multicast::cluster}{.L2::cache_hint} [target], [map, {coordinates}], [barrier]{, mask}{, policy}" @ "data-movement-and-conversion-instructions-cp-async-bulk-tensor"
        { rank: u32, multicast: bool, hinted: bool }
        ins (map[1]: Type::U64, coordinates[rank]: Type::S32, mask[multicast]: Type::U16, policy[hinted]: Type::U64)
        at (target: Space::Shared, barrier: Space::Shared)
        : Class::Asynchronous, Effect::CopyToShared, false, HOPPER;
    /// Starts a TMA store from shared memory to a box of a tensor. The async proxy sees ordinary writes only after an
    /// [`Op::FenceProxyAsync`]. The store belongs to a bulk group, as [`Op::BulkStore`] does.
    TensorStore "cp.async.bulk.tensor.rank.global.shared::cta.tile.bulk_group{.L2::cache_hint} [map, {coordinates}], [source]{, policy}" @ "data-movement-and-conversion-instructions-cp-async-bulk-tensor"
        { rank: u32, hinted: bool }
        ins (map[1]: Type::U64, coordinates[rank]: Type::S32, policy[hinted]: Type::U64)
        at (source: Space::Shared)
        : Class::Asynchronous, Effect::CopyToGlobal, false, HOPPER;
    /// Prefetches a tensor map (TMA descriptor) into the cache.
    PrefetchTensorMap "prefetch.tensormap [map]" @ "data-movement-and-conversion-instructions-prefetch-prefetchu"
        ins (map[1]: Type::U64)
        : Class::Memory, Effect::None, false, HOPPER;

    // ---- tensor cores ---------------------------------------------------------------------------------------------

    /// Loads `count` 8 × 8 matrices of 16-bit elements; lane `8i + r` gives the address of row `r` of matrix `i`, and
    /// lane `l` receives the pair at row `l / 4`, columns `2(l % 4)` and the next, or the transpose.
    LoadMatrix "ldmatrix.sync.aligned.m8n8.count{.trans}.shared.b16 d, [source]" @ "warp-level-matrix-instructions-ldmatrix"
        { count: u32, transposed: bool, ty: Type } outs (d[count]: ty) at (source: Space::Shared)
        for ty in [U32 F16x2 Bf16x2 Tf32]
        : Class::Tensor, Effect::Read(Space::Shared), true, AMPERE;
    /// Stores `count` 8 × 8 matrices of 16-bit elements, as [`Op::LoadMatrix`] loads them.
    StoreMatrix "stmatrix.sync.aligned.m8n8.count{.trans}.shared.b16 [target], a" @ "warp-level-matrix-instructions-stmatrix"
        { count: u32, transposed: bool, ty: Type } ins (a[count]: ty) at (target: Space::Shared)
        for ty in [F16x2 Bf16x2 Tf32]
        : Class::Tensor, Effect::Write(Space::Shared), true, HOPPER;
    /// `d = a · b + c` on the tensor cores; `a` is 16 × depth by rows, `b` depth × 8 by columns.
    Mma "mma.sync.aligned.shape.row.col.accumulate.operand.operand.accumulate d, a, b, c" @ "warp-level-matrix-instructions-mma"
        { shape: MmaShape, operand: Type, accumulate: Type }
        outs (d[accumulator_registers(accumulate)]: accumulate)
        ins (
            a[fragment_registers(16, shape, operand)]: operand,
            b[fragment_registers(8, shape, operand)]: operand,
            c[accumulator_registers(accumulate)]: accumulate
        )
        for operand in [F16x2 Bf16x2 Tf32]
        : Class::Tensor, Effect::None, true, AMPERE;

    /// `d = a · b + c` of 8-bit floats on the tensor cores; `a` is 16 × 32 by rows, `b` 32 × 8 by columns, four elements to
    /// a register.
    MmaFp8 "mma.sync.aligned.m16n8k32.row.col.f32.left.right.f32 d, a, b, c" @ "warp-level-matrix-instructions-mma"
        { left: Fp8, right: Fp8 }
        outs (d[4]: Type::F32) ins (a[4]: Type::U32, b[2]: Type::U32, c[4]: Type::F32)
        : Class::Tensor, Effect::None, true, ADA_FP8_MMA;

    // ---- wgmma: warpgroup products ---------------------------------------------------------------------------------

    /// Starts a product of 64 × 16 by 16 × `columns` elements on the tensor cores of a warpgroup, `d = a · b` or `d = a
    /// · b + d`. Descriptors give the layout of operands in shared memory, which the async proxy reads. `d`, and `a` in
    /// registers, are in use until the group of the product has been waited for.
    Wgmma "wgmma.mma_async.sync.aligned.m64n(columns)k16.accumulate.operand.operand d{=c}, a, b, scale, 1, 1{, a_major, b_major}" @ "asynchronous-warpgroup-level-matrix-instructions-wgmma-mma-async"
        {
            columns: u32, operand: Type, accumulate: Type, accumulation: Accumulation, source: MatrixSource,
            a_major: Major, b_major: Major,
        }
        outs (d[warpgroup_registers(columns, accumulate)]: accumulate)
        ins (
            c[if matches!(accumulation, Accumulation::Replace) { 0 } else { warpgroup_registers(columns, accumulate) }]: accumulate,
            scale[matches!(accumulation, Accumulation::AddWhere)]: Type::Pred,
            a[if matches!(source, MatrixSource::Shared) { 1 } else { 4 }]: if matches!(source, MatrixSource::Shared) { Type::U64 } else { operand },
            b[1]: Type::U64
        )
        for operand in [F16x2 Bf16x2]
        : Class::Tensor, Effect::Read(Space::Shared), true, HOPPER_ONLY;
    /// The same of 8-bit floats: 64 × 32 by 32 × `columns` elements, four to a register of A, accumulated in `f32`. Both
    /// operands are K-major: there is no transposed form.
    WgmmaFp8 "wgmma.mma_async.sync.aligned.m64n(columns)k32.f32.left.right d{=c}, a, b, scale, 1, 1" @ "asynchronous-warpgroup-level-matrix-instructions-wgmma-mma-async"
        {
            columns: u32, left: Fp8, right: Fp8, accumulation: Accumulation, source: MatrixSource,
            a_major: Major, b_major: Major,
        }
        outs (d[columns / 2]: Type::F32)
        ins (
            c[if matches!(accumulation, Accumulation::Replace) { 0 } else { columns / 2 }]: Type::F32,
            scale[matches!(accumulation, Accumulation::AddWhere)]: Type::Pred,
            a[if matches!(source, MatrixSource::Shared) { 1 } else { 4 }]: if matches!(source, MatrixSource::Shared) { Type::U64 } else { Type::U32 },
            b[1]: Type::U64
        )
        : Class::Tensor, Effect::Read(Space::Shared), true, HOPPER_ONLY;
    /// Orders earlier accesses of the warpgroup to registers before its products that use them.
    WgmmaFence "wgmma.fence.sync.aligned" @ "asynchronous-warpgroup-level-matrix-instructions-wgmma-fence"
        : Class::Tensor, Effect::Order, true, HOPPER_ONLY;
    /// Closes the group of all `wgmma`s this warpgroup started since the last commit.
    WgmmaCommit "wgmma.commit_group.sync.aligned" @ "asynchronous-warpgroup-level-matrix-instructions-wgmma-commit-group"
        : Class::Tensor, Effect::None, true, HOPPER_ONLY;
    /// Waits until at most `pending` `wgmma` groups are unfinished.
    WgmmaWait "wgmma.wait_group.sync.aligned pending" @ "asynchronous-warpgroup-level-matrix-instructions-wgmma-wait-group"
        { pending: u32 }
        : Class::Tensor, Effect::Order, true, HOPPER_ONLY;

    // ---- barriers and fences --------------------------------------------------------------------------------------

    /// Waits at named barrier `barrier` until `threads` threads have arrived, and orders their accesses to memory.
    BarrierSync "barrier.sync.aligned barrier, threads" @ "parallel-synchronization-and-communication-instructions-bar"
        in (barrier: Type::U32, threads: Type::U32)
        : Class::Barrier, Effect::Order, true, AMPERE;
    /// Arrives at named barrier `barrier` of `threads` threads without waiting.
    BarrierArrive "barrier.arrive.aligned barrier, threads" @ "parallel-synchronization-and-communication-instructions-bar"
        in (barrier: Type::U32, threads: Type::U32)
        : Class::Barrier, Effect::Order, true, AMPERE;
    /// Orders this thread's accesses to memory before it and after it, as seen by the threads of the scope.
    Fence "fence.acq_rel.scope" @ "parallel-synchronization-and-communication-instructions-membar-fence"
        { scope: FenceScope }
        : Class::Barrier, Effect::Order, false, scoped(scope);

    // ---- mbarriers ------------------------------------------------------------------------------------------------

    /// Makes the 8 bytes at the address an `mbarrier`. Its phases, numbered from 0, complete one after the other, each
    /// when `count` arrivals and all its expected bytes (`expect_tx`) have come.
    MbarrierInit "mbarrier.init.shared::cta.b64 [target], count" @ "parallel-synchronization-and-communication-instructions-mbarrier-init"
        in (count: Type::U32) at (target: Space::Shared)
        : Class::Barrier, Effect::Write(Space::Shared), false, HOPPER;
    /// Invalidates the `mbarrier` at the address, whose bytes can then be used for something else.
    MbarrierInvalidate "mbarrier.inval.shared::cta.b64 [target]" @ "parallel-synchronization-and-communication-instructions-mbarrier-inval"
        at (target: Space::Shared)
        : Class::Barrier, Effect::Write(Space::Shared), false, HOPPER;
    /// Arrives `count` times at the `mbarrier`, and releases what this thread has done before.
    MbarrierArrive "mbarrier.arrive{.release.cluster}.space.b64 _, [target], count" @ "parallel-synchronization-and-communication-instructions-mbarrier-arrive"
        { space: Space } in (count: Type::U32) at (target: space)
        : Class::Barrier, Effect::Order, false, HOPPER;
    /// Adds `bytes` to those that the current phase expects of asynchronous copies, then arrives once.
    MbarrierArriveExpect "mbarrier.arrive.expect_tx{.release.cluster}.space.b64 _, [target], bytes" @ "parallel-synchronization-and-communication-instructions-mbarrier-arrive"
        { space: Space } in (bytes: Type::U32) at (target: space)
        : Class::Barrier, Effect::Order, false, HOPPER;
    /// Adds `bytes` to those that the current phase expects of asynchronous copies.
    MbarrierExpect "mbarrier.expect_tx.relaxed.scope.space.b64 [target], bytes" @ "parallel-synchronization-and-communication-instructions-mbarrier-expect-tx"
        { space: Space } in (bytes: Type::U32) at (target: space)
        : Class::Barrier, Effect::Order, false, HOPPER;
    /// Waits until the phase of this parity is complete: the one before the current phase, which may be the one before
    /// the first, of parity 1. Acquires what was released to it by threads of the scope.
    MbarrierWait "mbarrier.try_wait.parity{.acquire.cluster}.shared::cta.b64 complete, [source], parity" @ "parallel-synchronization-and-communication-instructions-mbarrier-test-wait-try-wait"
        { scope: FenceScope } in (parity: Type::U32) at (source: Space::Shared)
        : Class::Barrier, Effect::Order, false, HOPPER;
    /// `d` is true if the phase of this parity is complete, as in [`Op::MbarrierWait`]; with `suspends`, after waiting
    /// for some time.
    MbarrierTest "mbarrier.test_wait.parity{.acquire.cluster}.shared::cta.b64 d, [source], parity" @ "parallel-synchronization-and-communication-instructions-mbarrier-test-wait-try-wait"
        { suspends: bool, scope: FenceScope } out (d: Type::Pred) in (parity: Type::U32) at (source: Space::Shared)
        : Class::Barrier, Effect::Order, false, HOPPER;
    /// Makes the `mbarrier`s that this thread has initialised visible to the cluster and to asynchronous copies.
    FenceMbarrierInit "fence.mbarrier_init.release.cluster" @ "parallel-synchronization-and-communication-instructions-membar-fence"
        : Class::Barrier, Effect::Order, false, HOPPER;

    // ---- clusters -------------------------------------------------------------------------------------------------

    /// `d` is the address (DSMEM) of `a` in the CTA of the cluster that has the rank.
    MapShared "mapa.shared::cluster.u32 d, a, rank" @ "data-movement-and-conversion-instructions-mapa"
        out (d: Type::U32) in (a: Type::U32, rank: Type::U32)
        : Class::Integer, Effect::None, false, HOPPER;
    /// Arrives at the cluster barrier, releases, and does not wait.
    ClusterArrive "barrier.cluster.arrive.release.aligned" @ "parallel-synchronization-and-communication-instructions-barrier-cluster"
        : Class::Barrier, Effect::Order, true, HOPPER;
    /// Waits until all threads of the cluster have arrived at the cluster barrier, and acquires.
    ClusterWait "barrier.cluster.wait.acquire.aligned" @ "parallel-synchronization-and-communication-instructions-barrier-cluster"
        : Class::Barrier, Effect::Order, true, HOPPER;

    // ---- control --------------------------------------------------------------------------------------------------

    /// Changes the number of registers per thread of a warpgroup: it gives some back, or takes them once others of the
    /// CTA have. It starts with what the kernel declares.
    SetRegisterCount "setmaxnreg.change.sync.aligned.u32 count" @ "miscellaneous-instructions-setmaxnreg"
        { change: RegisterChange, count: u32 }
        : Class::Control, Effect::None, true, HOPPER_ONLY;
    /// Programmatic dependent launch (PDL): waits until the preceding kernels on the stream, if this launch overlaps
    /// with them, have finished.
    GridDependencyWait "griddepcontrol.wait" @ "parallel-synchronization-and-communication-instructions-griddepcontrol"
        : Class::Control, Effect::Order, false, HOPPER;
    /// Programmatic dependent launch (PDL): lets the next kernel on the stream start, if it overlaps with this one.
    LaunchDependents "griddepcontrol.launch_dependents" @ "parallel-synchronization-and-communication-instructions-griddepcontrol"
        : Class::Control, Effect::None, false, HOPPER;
    /// Ends the thread.
    Exit "exit" @ "control-flow-instructions-exit"
        : Class::Control, Effect::None, false, AMPERE;
}

const fn wide(ty: Type) -> Type {
    match ty {
        Type::S32 => Type::S64,
        _ => Type::U64,
    }
}

const fn half_of(ty: Type) -> Type {
    match ty {
        Type::F16x2 => Type::F16,
        Type::Bf16x2 => Type::Bf16,
        Type::U64 => Type::U32,
        _ => Type::U16,
    }
}

/// Registers per lane of an operand of `rows` × depth elements.
const fn fragment_registers(rows: u32, shape: MmaShape, operand: Type) -> u32 {
    let elements_per_register = match operand {
        Type::Tf32 => 1,
        _ => 2,
    };
    rows * shape.depth() / 32 / elements_per_register
}

/// Registers per lane of a 64 × `columns` accumulator over four warps.
const fn warpgroup_registers(columns: u32, accumulate: Type) -> u32 {
    match accumulate {
        Type::F16x2 => columns / 4,
        _ => columns / 2,
    }
}

/// Registers per lane of a 16 × 8 accumulator.
const fn accumulator_registers(accumulate: Type) -> u32 {
    match accumulate {
        Type::F16x2 => 2,
        _ => 4,
    }
}
