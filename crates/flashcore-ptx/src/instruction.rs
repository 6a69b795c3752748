//! The text of each operation: one arm per row of the table.

use flashcore_ir::{
    Accumulation, Address, Compare, FenceScope, Kernel, L2Prefetch, LoadCache, Major, MatrixSource, Op, Operand,
    ReduceOp, RegisterId, Rounding, Space, StoreCache, Type,
};

use crate::names::{Names, storage};

/// The name of the variable that stands for the shared memory of a CTA.
pub(crate) const SHARED_MEMORY: &str = "shared_memory";

/// The predicate that ends a wait loop, in a scope of its own.
const COMPLETE: &str = "complete";

/// The member mask of warp-wide operations: all lanes.
const WHOLE_WARP: &str = "0xffffffff";

/// The lines of an instruction with its guard. An instruction that takes several lines has a scope of its own for its
/// labels.
pub(crate) fn lines(op: &Op, guard: &str, kernel: &Kernel, names: &Names) -> Vec<String> {
    let text = text(op, kernel, names);
    let Op::MbarrierWait { .. } = op else { return vec![format!("{guard}{text};")] };
    // A lane that a guard excludes does not enter the loop.
    let (enter, leave) = match guard.strip_prefix('@').map(str::trim_end) {
        None => (None, None),
        Some(guard) => {
            let excluded = guard.strip_prefix('!').map_or_else(|| format!("!{guard}"), str::to_owned);
            (Some(format!("    @{excluded} bra done;")), Some("    done:".to_owned()))
        }
    };
    let mut lines = vec!["{".to_owned(), format!("    .reg .pred {COMPLETE};")];
    lines.extend(enter);
    lines.extend(["    wait:".to_owned(), format!("    {text};"), format!("    @!{COMPLETE} bra wait;")]);
    lines.extend(leave);
    lines.push("}".to_owned());
    lines
}

/// The instruction, without its guard and semicolon.
#[expect(clippy::too_many_lines, reason = "one arm per row of the table")]
pub(crate) fn text(op: &Op, kernel: &Kernel, names: &Names) -> String {
    let r = |register: &RegisterId| names.register(*register);
    let v = |operand: &Operand, ty: Type| match operand {
        Operand::Register(register) => names.register(*register).to_owned(),
        Operand::Constant(bits) => constant(*bits, ty),
    };
    let list = |registers: &[RegisterId]| registers.iter().map(r).collect::<Vec<_>>().join(", ");
    // An operand that may be absent, of at most one register.
    let optional = |registers: &[RegisterId]| match registers {
        [register] => format!(", {}", r(register)),
        _ => String::new(),
    };
    // A vector of one element is written without braces.
    let vector = |registers: &[RegisterId]| match registers {
        [register] => r(register).to_owned(),
        _ => format!("{{{}}}", list(registers)),
    };
    let m = |address: &Address| match address.offset {
        0 => format!("[{}]", r(&address.base)),
        offset => format!("[{}+{offset}]", r(&address.base)),
    };

    match op {
        Op::Mov { ty, d, a } => format!("mov.{} {}, {}", select_type(*ty), r(d), v(a, *ty)),
        Op::Reinterpret { to, from, d, a } => format!("mov.{} {}, {}", storage(*to), r(d), v(a, untyped(*from))),
        Op::Special { register, d } => format!("mov.u32 {}, %{register}", r(d)),
        Op::SharedBase { d } => format!("mov.u32 {}, {SHARED_MEMORY}", r(d)),
        Op::LoadParam { ty, parameter, d } => {
            format!("ld.param.{ty} {}, [{}]", r(d), kernel.parameters[*parameter as usize].name)
        }
        Op::TensorMapAddress { parameter, d } => {
            format!("cvta.param.u64 {}, {}", r(d), kernel.parameters[*parameter as usize].name)
        }
        Op::SetPredicate { compare, ty, d, a, b } => {
            format!("setp.{}.{ty} {}, {}, {}", comparison(*compare, *ty), r(d), v(a, *ty), v(b, *ty))
        }
        Op::Select { ty, d, a, b, condition } => {
            format!("selp.{} {}, {}, {}, {}", select_type(*ty), r(d), v(a, *ty), v(b, *ty), list(condition))
        }

        Op::Add { ty, d, a, b } => format!("add{}.{ty} {}, {}, {}", rounded(*ty), r(d), v(a, *ty), v(b, *ty)),
        Op::Sub { ty, d, a, b } => format!("sub{}.{ty} {}, {}, {}", rounded(*ty), r(d), v(a, *ty), v(b, *ty)),
        Op::Mul { ty, d, a, b } => {
            let part = if is_float(*ty) { ".rn" } else { ".lo" };
            format!("mul{part}.{ty} {}, {}, {}", r(d), v(a, *ty), v(b, *ty))
        }
        Op::MulHigh { ty, d, a, b } => format!("mul.hi.{ty} {}, {}, {}", r(d), v(a, *ty), v(b, *ty)),
        Op::MulWide { ty, d, a, b } => format!("mul.wide.{ty} {}, {}, {}", r(d), v(a, *ty), v(b, *ty)),
        Op::Mad { ty, d, a, b, c } => {
            format!("mad.lo.{ty} {}, {}, {}, {}", r(d), v(a, *ty), v(b, *ty), v(c, *ty))
        }
        Op::MadWide { ty, d, a, b, c } => {
            let wide = if *ty == Type::S32 { Type::S64 } else { Type::U64 };
            format!("mad.wide.{ty} {}, {}, {}, {}", r(d), v(a, *ty), v(b, *ty), v(c, wide))
        }
        Op::Fma { ty, d, a, b, c } => {
            format!("fma.rn.{ty} {}, {}, {}, {}", r(d), v(a, *ty), v(b, *ty), v(c, *ty))
        }
        Op::Div { ty, d, a, b } => format!("div{}.{ty} {}, {}, {}", rounded(*ty), r(d), v(a, *ty), v(b, *ty)),
        Op::Rem { ty, d, a, b } => format!("rem.{ty} {}, {}, {}", r(d), v(a, *ty), v(b, *ty)),
        Op::Min { ty, d, a, b } => format!("min.{ty} {}, {}, {}", r(d), v(a, *ty), v(b, *ty)),
        Op::Max { ty, d, a, b } => format!("max.{ty} {}, {}, {}", r(d), v(a, *ty), v(b, *ty)),
        Op::Neg { ty, d, a } => format!("neg.{ty} {}, {}", r(d), v(a, *ty)),
        Op::Abs { ty, d, a } => format!("abs.{ty} {}, {}", r(d), v(a, *ty)),

        Op::And { ty, d, a, b } => format!("and.{} {}, {}, {}", storage(*ty), r(d), v(a, *ty), v(b, *ty)),
        Op::Or { ty, d, a, b } => format!("or.{} {}, {}, {}", storage(*ty), r(d), v(a, *ty), v(b, *ty)),
        Op::Xor { ty, d, a, b } => format!("xor.{} {}, {}, {}", storage(*ty), r(d), v(a, *ty), v(b, *ty)),
        Op::Not { ty, d, a } => format!("not.{} {}, {}", storage(*ty), r(d), v(a, *ty)),
        Op::Shl { ty, d, a, b } => format!("shl.{} {}, {}, {}", storage(*ty), r(d), v(a, *ty), v(b, Type::U32)),
        Op::Shr { ty, d, a, b } => format!("shr.{ty} {}, {}, {}", r(d), v(a, *ty), v(b, Type::U32)),
        Op::Lop3 { table, d, a, b, c } => {
            let [a, b, c] = [a, b, c].map(|operand| v(operand, Type::U32));
            format!("lop3.b32 {}, {a}, {b}, {c}, {table:#04x}", r(d))
        }
        Op::BitFieldExtract { d, a, position, length } => {
            let [a, position, length] = [a, position, length].map(|operand| v(operand, Type::U32));
            format!("bfe.u32 {}, {a}, {position}, {length}", r(d))
        }
        Op::BitFieldInsert { d, a, b, position, length } => {
            let [a, b, position, length] = [a, b, position, length].map(|operand| v(operand, Type::U32));
            format!("bfi.b32 {}, {a}, {b}, {position}, {length}", r(d))
        }
        Op::Permute { d, a, b, selector } => {
            let [a, b, selector] = [a, b, selector].map(|operand| v(operand, Type::U32));
            format!("prmt.b32 {}, {a}, {b}, {selector}", r(d))
        }
        Op::PopCount { d, a } => format!("popc.b32 {}, {}", r(d), v(a, Type::U32)),
        Op::LeadingZeros { d, a } => format!("clz.b32 {}, {}", r(d), v(a, Type::U32)),

        Op::Convert { to, from, rounding, d, a } => {
            format!("cvt{}.{to}.{from} {}, {}", rounding_suffix(*rounding), r(d), v(a, *from))
        }
        Op::ConvertPair { to, d, high, low } => {
            format!("cvt.rn.{to}.f32 {}, {}, {}", r(d), v(high, Type::F32), v(low, Type::F32))
        }
        Op::ConvertFp8 { to, d, high, low } => {
            format!("cvt.rn.satfinite.{to}x2.f32 {}, {}, {}", r(d), v(high, Type::F32), v(low, Type::F32))
        }
        Op::WidenFp8 { from, d, a } => format!("cvt.rn.f16x2.{from}x2 {}, {}", r(d), list(a)),
        Op::Pack { to, d, low, high } => {
            format!("mov.{} {}, {{{}, {}}}", storage(*to), r(d), list(low), list(high))
        }
        Op::Unpack { from, low, high, a } => {
            format!("mov.{} {{{}, {}}}, {}", storage(*from), r(low), r(high), list(a))
        }

        Op::Exp2 { ty, d, a } => {
            // Of the pairs, `f16x2` keeps subnormals and `bf16x2` has no form that does.
            let flush = if *ty == Type::F16x2 { "" } else { ".ftz" };
            format!("ex2.approx{flush}.{ty} {}, {}", r(d), v(a, *ty))
        }
        Op::Log2 { d, a } => format!("lg2.approx.ftz.f32 {}, {}", r(d), v(a, Type::F32)),
        Op::Reciprocal { d, a } => format!("rcp.approx.ftz.f32 {}, {}", r(d), v(a, Type::F32)),
        Op::ReciprocalSqrt { d, a } => format!("rsqrt.approx.ftz.f32 {}, {}", r(d), v(a, Type::F32)),
        Op::Sqrt { d, a } => format!("sqrt.approx.ftz.f32 {}, {}", r(d), v(a, Type::F32)),
        Op::Tanh { ty, d, a } => format!("tanh.approx.{ty} {}, {}", r(d), v(a, *ty)),

        Op::Shuffle { mode, control, ty: _, d, index, a } => {
            let index = v(index, Type::U32);
            format!("shfl.sync.{mode}.b32 {}, {}, {index}, {control:#x}, {WHOLE_WARP}", r(d), list(a))
        }
        Op::Vote { mode, d, a } => format!("vote.sync.{mode}.pred {}, {}, {WHOLE_WARP}", r(d), list(a)),
        Op::Ballot { d, a } => format!("vote.sync.ballot.b32 {}, {}, {WHOLE_WARP}", r(d), list(a)),
        Op::ReduceWarp { op, ty, d, a } => {
            format!("redux.sync.{op}.{} {}, {}, {WHOLE_WARP}", reduced_type(*op, *ty), r(d), list(a))
        }
        Op::Elect { d } => format!("elect.sync _|{}, {WHOLE_WARP}", r(d)),
        Op::WarpSync {} => format!("bar.warp.sync {WHOLE_WARP}"),

        Op::Load { space, cache, prefetch, ty, count, d, source } => {
            let qualifiers = [load_cache(*cache), prefetch_suffix(*prefetch), vector_suffix(*count)].concat();
            format!("ld.{space}{qualifiers}.{} {}, {}", storage(*ty), vector(d), m(source))
        }
        Op::Store { space, cache, ty, count, a, target } => {
            let qualifiers = [store_cache(*cache), vector_suffix(*count)].concat();
            format!("st.{space}{qualifiers}.{} {}, {}", storage(*ty), m(target), vector(a))
        }
        Op::Prefetch { source } => format!("prefetch.global.L2 {}", m(source)),
        Op::Atomic { space, op, ty, d, a, target } => {
            format!("atom.{space}.{op}.{} {}, {}, {}", reduced_type(*op, *ty), r(d), m(target), list(a))
        }
        Op::CompareAndSwap { space, ty, d, compare, value, target } => {
            let (compare, value) = (list(compare), list(value));
            format!("atom.{space}.cas.{} {}, {}, {compare}, {value}", storage(*ty), r(d), m(target))
        }
        Op::Reduce { space, op, ty, a, target } => {
            format!("red.{space}.{op}.{} {}, {}", reduced_type(*op, *ty), m(target), list(a))
        }

        Op::CopyAsync { bytes, cache, prefetch, zero_fill: _, source_bytes, target, source } => {
            let read = source_bytes.first().map_or_else(String::new, |register| format!(", {}", r(register)));
            let prefetch = prefetch_suffix(*prefetch);
            format!("cp.async.{cache}.shared.global{prefetch} {}, {}, {bytes}{read}", m(target), m(source))
        }
        Op::CopyAsyncCommit {} => "cp.async.commit_group".to_owned(),
        Op::CopyAsyncWait { pending } => format!("cp.async.wait_group {pending}"),
        Op::CopyAsyncWaitAll {} => "cp.async.wait_all".to_owned(),
        Op::BulkStore { bytes, target, source } => {
            let bytes = v(bytes, Type::U32);
            format!("cp.async.bulk.global.shared::cta.bulk_group {}, {}, {bytes}", m(target), m(source))
        }
        Op::BulkCommit {} => "cp.async.bulk.commit_group".to_owned(),
        Op::BulkWait { pending, read } => {
            format!("cp.async.bulk.wait_group{} {pending}", if *read { ".read" } else { "" })
        }
        Op::FenceProxyAsync {} => "fence.proxy.async.shared::cta".to_owned(),

        Op::BulkLoad { bytes, target, source, barrier } => {
            let (bytes, brings) = (v(bytes, Type::U32), "mbarrier::complete_tx::bytes");
            let (target, source, barrier) = (m(target), m(source), m(barrier));
            format!("cp.async.bulk.shared::cluster.global.{brings} {target}, {source}, {bytes}, {barrier}")
        }
        Op::TensorLoad { rank, multicast, hinted, coordinates, mask, policy, target, map, barrier } => {
            let multicast = if *multicast { ".multicast::cluster" } else { "" };
            let hint = if *hinted { ".L2::cache_hint" } else { "" };
            let rest = [&mask[..], policy].map(optional).concat();
            format!(
                "cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{multicast}{hint} \
                 {}, [{}, {{{}}}], {}{rest}",
                m(target),
                list(map),
                list(coordinates),
                m(barrier)
            )
        }
        Op::TensorStore { rank, hinted, coordinates, policy, map, source } => {
            let hint = if *hinted { ".L2::cache_hint" } else { "" };
            let rest = optional(policy);
            let (map, coordinates, source) = (list(map), list(coordinates), m(source));
            format!(
                "cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group{hint} \
                 [{map}, {{{coordinates}}}], {source}{rest}"
            )
        }
        Op::PrefetchTensorMap { map } => format!("prefetch.tensormap [{}]", list(map)),

        Op::LoadMatrix { count, transposed, ty: _, d, source } => {
            let transposed = if *transposed { ".trans" } else { "" };
            format!("ldmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 {{{}}}, {}", list(d), m(source))
        }
        Op::StoreMatrix { count, transposed, ty: _, a, target } => {
            let transposed = if *transposed { ".trans" } else { "" };
            format!("stmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 {}, {{{}}}", m(target), list(a))
        }
        Op::Mma { shape, operand, accumulate, d, a, b, c } => {
            let (operand, accumulate) = (element(*operand), element(*accumulate));
            format!(
                "mma.sync.aligned.{shape}.row.col.{accumulate}.{operand}.{operand}.{accumulate} {{{}}}, {{{}}}, {{{}}}, {{{}}}",
                list(d),
                list(a),
                list(b),
                list(c)
            )
        }

        Op::MmaFp8 { left, right, d, a, b, c } => format!(
            "mma.sync.aligned.m16n8k32.row.col.f32.{left}.{right}.f32 {{{}}}, {{{}}}, {{{}}}, {{{}}}",
            list(d),
            list(a),
            list(b),
            list(c)
        ),

        Op::Wgmma { columns, operand, accumulate, accumulation, source, a_major, b_major, d, c: _, scale, a, b } => {
            let (operand, accumulate) = (element(*operand), element(*accumulate));
            let scale = scale_of_accumulator(*accumulation, list(scale));
            let transposed = |major: &Major| u32::from(*major == Major::Outer);
            let (a, majors) = match source {
                MatrixSource::Shared => (list(a), format!("{}, {}", transposed(a_major), transposed(b_major))),
                MatrixSource::Registers => (format!("{{{}}}", list(a)), transposed(b_major).to_string()),
            };
            format!(
                "wgmma.mma_async.sync.aligned.m64n{columns}k16.{accumulate}.{operand}.{operand} \
                 {{{}}}, {a}, {}, {scale}, 1, 1, {majors}",
                list(d),
                list(b)
            )
        }
        // K-major both, as the verifier has seen: there are no operands that say so.
        Op::WgmmaFp8 { columns, left, right, accumulation, source, a_major: _, b_major: _, d, c: _, scale, a, b } => {
            let scale = scale_of_accumulator(*accumulation, list(scale));
            let a = match source {
                MatrixSource::Shared => list(a),
                MatrixSource::Registers => format!("{{{}}}", list(a)),
            };
            format!(
                "wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.{left}.{right} {{{}}}, {a}, {}, {scale}, 1, 1",
                list(d),
                list(b)
            )
        }
        Op::WgmmaFence {} => "wgmma.fence.sync.aligned".to_owned(),
        Op::WgmmaCommit {} => "wgmma.commit_group.sync.aligned".to_owned(),
        Op::WgmmaWait { pending } => format!("wgmma.wait_group.sync.aligned {pending}"),

        Op::BarrierSync { barrier, threads } => {
            format!("barrier.sync.aligned {}, {}", v(barrier, Type::U32), v(threads, Type::U32))
        }
        Op::BarrierArrive { barrier, threads } => {
            format!("barrier.arrive.aligned {}, {}", v(barrier, Type::U32), v(threads, Type::U32))
        }
        Op::Fence { scope } => format!("fence.acq_rel.{scope}"),

        Op::MbarrierInit { count, target } => {
            format!("mbarrier.init.shared::cta.b64 {}, {}", m(target), v(count, Type::U32))
        }
        Op::MbarrierInvalidate { target } => format!("mbarrier.inval.shared::cta.b64 {}", m(target)),
        Op::MbarrierArrive { space, count, target } => {
            format!("mbarrier.arrive{}.b64 _, {}, {}", released(*space), m(target), v(count, Type::U32))
        }
        Op::MbarrierArriveExpect { space, bytes, target } => {
            format!("mbarrier.arrive.expect_tx{}.b64 _, {}, {}", released(*space), m(target), v(bytes, Type::U32))
        }
        Op::MbarrierExpect { space, bytes, target } => {
            let place = if *space == Space::Cluster { "cluster.shared::cluster" } else { "cta.shared::cta" };
            format!("mbarrier.expect_tx.relaxed.{place}.b64 {}, {}", m(target), v(bytes, Type::U32))
        }
        Op::MbarrierWait { scope, parity, source } => {
            let (acquire, parity) = (acquired(*scope), v(parity, Type::U32));
            format!("mbarrier.try_wait.parity{acquire}.shared::cta.b64 {COMPLETE}, {}, {parity}", m(source))
        }
        Op::MbarrierTest { suspends, scope, d, parity, source } => {
            let ask = if *suspends { "try_wait" } else { "test_wait" };
            let (acquire, parity) = (acquired(*scope), v(parity, Type::U32));
            format!("mbarrier.{ask}.parity{acquire}.shared::cta.b64 {}, {}, {parity}", r(d), m(source))
        }
        Op::FenceMbarrierInit {} => "fence.mbarrier_init.release.cluster".to_owned(),

        Op::MapShared { d, a, rank } => {
            format!("mapa.shared::cluster.u32 {}, {}, {}", r(d), v(a, Type::U32), v(rank, Type::U32))
        }
        Op::ClusterArrive {} => "barrier.cluster.arrive.release.aligned".to_owned(),
        Op::ClusterWait {} => "barrier.cluster.wait.acquire.aligned".to_owned(),

        Op::SetRegisterCount { change, count } => format!("setmaxnreg.{change}.sync.aligned.u32 {count}"),
        Op::GridDependencyWait {} => "griddepcontrol.wait".to_owned(),
        Op::LaunchDependents {} => "griddepcontrol.launch_dependents".to_owned(),
        Op::Exit {} => "exit".to_owned(),
    }
}

/// The release scope of an arrival, by the space of its address; CTA scope is the default of PTX and not written.
const fn released(space: Space) -> &'static str {
    match space {
        Space::Cluster => ".release.cluster.shared::cluster",
        Space::Shared | Space::Global => ".shared::cta",
    }
}

/// The acquire scope of a wait; CTA scope is the default of PTX and not written.
const fn acquired(scope: FenceScope) -> &'static str {
    match scope {
        FenceScope::Cluster => ".acquire.cluster",
        FenceScope::Cta | FenceScope::Gpu | FenceScope::System => "",
    }
}

/// The operand `scale-d` of a `wgmma`.
fn scale_of_accumulator(accumulation: Accumulation, predicate: String) -> String {
    match accumulation {
        Accumulation::Replace => "0".to_owned(),
        Accumulation::Add => "1".to_owned(),
        Accumulation::AddWhere => predicate,
    }
}

/// A constant as PTX reads it for an operand of the type.
fn constant(bits: u64, ty: Type) -> String {
    /// Up to here a number reads best in decimal: a count, an offset. Larger ones are likely bit patterns.
    const LARGEST_DECIMAL: u64 = 0xffff;
    match ty {
        Type::F32 => format!("0f{bits:08X}"),
        Type::Pred => (bits & 1).to_string(),
        Type::F16 | Type::Bf16 => format!("{bits:#06x}"),
        Type::Tf32 | Type::F16x2 | Type::Bf16x2 => format!("{bits:#010x}"),
        Type::S32 => (bits as u32 as i32).to_string(),
        Type::S64 if (bits as i64).unsigned_abs() <= LARGEST_DECIMAL => (bits as i64).to_string(),
        Type::U16 | Type::U32 | Type::U64 if bits <= LARGEST_DECIMAL => bits.to_string(),
        Type::U16 | Type::U32 | Type::U64 | Type::S64 => format!("{bits:#x}"),
    }
}

const fn is_float(ty: Type) -> bool {
    match ty {
        Type::F16 | Type::Bf16 | Type::F32 | Type::Tf32 | Type::F16x2 | Type::Bf16x2 => true,
        Type::Pred | Type::U16 | Type::U32 | Type::S32 | Type::U64 | Type::S64 => false,
    }
}

/// `.rn` of float arithmetic is the default of plain `add` and `mul`, but the compiler may contract those into one
/// `fma`, which rounds once where the kernel and the simulator round twice.
const fn rounded(ty: Type) -> &'static str {
    if is_float(ty) { ".rn" } else { "" }
}

/// The unsigned type of the same width, whose constants are plain bits.
const fn untyped(ty: Type) -> Type {
    match ty {
        Type::Pred => Type::Pred,
        Type::U16 | Type::F16 | Type::Bf16 => Type::U16,
        Type::U32 | Type::S32 | Type::F32 | Type::Tf32 | Type::F16x2 | Type::Bf16x2 => Type::U32,
        Type::U64 | Type::S64 => Type::U64,
    }
}

/// The type as `mov` and `selp` name it: numeric types, and bits for the rest.
const fn select_type(ty: Type) -> &'static str {
    match ty {
        Type::U16 | Type::U32 | Type::S32 | Type::F32 | Type::U64 | Type::S64 => ty.name(),
        Type::Pred | Type::F16 | Type::Bf16 | Type::Tf32 | Type::F16x2 | Type::Bf16x2 => storage(ty),
    }
}

/// The type of a reduction: logic and exchange take bit types only.
const fn reduced_type(op: ReduceOp, ty: Type) -> &'static str {
    match op {
        ReduceOp::Add | ReduceOp::Min | ReduceOp::Max => ty.name(),
        ReduceOp::And | ReduceOp::Or | ReduceOp::Xor | ReduceOp::Exchange => storage(ty),
    }
}

/// The element of a pair: `mma` names its matrices by their element type.
const fn element(ty: Type) -> &'static str {
    match ty {
        Type::F16x2 => Type::F16.name(),
        Type::Bf16x2 => Type::Bf16.name(),
        _ => ty.name(),
    }
}

/// Comparisons of floats are false for NaN, except "not equal", whose form with that meaning is `neu`.
const fn comparison(compare: Compare, ty: Type) -> &'static str {
    match compare {
        Compare::Ne if is_float(ty) => "neu",
        Compare::Eq | Compare::Ne | Compare::Lt | Compare::Le | Compare::Gt | Compare::Ge => compare.name(),
    }
}

const fn rounding_suffix(rounding: Rounding) -> &'static str {
    match rounding {
        Rounding::Exact => "",
        Rounding::NearestEven => ".rn",
        Rounding::NearestAway => ".rna",
        Rounding::ToZero => ".rzi",
        Rounding::Down => ".rmi",
        Rounding::Up => ".rpi",
        Rounding::NearestInteger => ".rni",
    }
}

const fn load_cache(cache: LoadCache) -> &'static str {
    match cache {
        LoadCache::All => "",
        LoadCache::L2 => ".cg",
        LoadCache::Streaming => ".cs",
        LoadCache::ReadOnly => ".nc",
        LoadCache::Volatile => ".cv",
    }
}

const fn store_cache(cache: StoreCache) -> &'static str {
    match cache {
        StoreCache::WriteBack => "",
        StoreCache::L2 => ".cg",
        StoreCache::Streaming => ".cs",
        StoreCache::WriteThrough => ".wt",
    }
}

const fn prefetch_suffix(prefetch: L2Prefetch) -> &'static str {
    match prefetch {
        L2Prefetch::None => "",
        L2Prefetch::Bytes64 => ".L2::64B",
        L2Prefetch::Bytes128 => ".L2::128B",
        L2Prefetch::Bytes256 => ".L2::256B",
    }
}

const fn vector_suffix(count: u32) -> &'static str {
    match count {
        2 => ".v2",
        4 => ".v4",
        _ => "",
    }
}
