//! Every combination of modifiers of the operations that have few of them: the lists of those that exist, which
//! ptxas was asked about one by one.

use flashcore_ir::{
    Address, Arch, Builder, Instruction, Kernel, L2Prefetch, LoadCache, MmaShape, Op, Operand, Origin, ReduceOp,
    RegisterId, Rounding, SectionId, Space, Statement, Type,
};

/// True if a kernel of just this operation keeps the rules, given its registers by `types` in order.
fn accepts(op: Op, types: &[Type]) -> bool {
    let mut kernel = Builder::new("kernel", 32).finish();
    let origin = Origin { section: SectionId(0), file: file!(), line: line!() };
    for ty in types {
        let d = kernel.add_register(*ty, SectionId(0));
        append(&mut kernel, Op::Mov { ty: *ty, d, a: Operand::Constant(0) }, origin);
    }
    append(&mut kernel, op, origin);
    kernel.verify(Arch::Sm90a).is_ok()
}

fn append(kernel: &mut Kernel, op: Op, origin: Origin) {
    kernel.body.statements.push(Statement::Instruction(Instruction { op, guard: None, origin }));
}

const FIRST: RegisterId = RegisterId(0);
const SECOND: RegisterId = RegisterId(1);
const THIRD: RegisterId = RegisterId(2);

#[test]
fn constants_of_every_type_can_be_moved() {
    let accepted =
        Type::ALL.into_iter().filter(|ty| accepts(Op::Mov { ty: *ty, d: FIRST, a: Operand::Constant(1) }, &[*ty]));
    assert_eq!(accepted.collect::<Vec<_>>(), Type::ALL);
}

#[test]
fn conversions() {
    use Rounding::{Down, Exact, NearestAway, NearestEven, NearestInteger, ToZero, Up};
    use Type::{Bf16, F16, F32, S32, S64, Tf32, U16, U32, U64};
    let mut accepted = Vec::new();
    for from in Type::ALL {
        for to in Type::ALL {
            for rounding in Rounding::ALL {
                let op = Op::Convert { to, from, rounding: *rounding, d: FIRST, a: Operand::Register(SECOND) };
                if accepts(op, &[to, from]) {
                    accepted.push((from, to, *rounding));
                }
            }
        }
    }
    assert_eq!(
        accepted,
        [
            (U16, U32, Exact),
            (F16, F32, Exact),
            (Bf16, F32, Exact),
            (U32, U16, Exact),
            (U32, F32, NearestEven),
            (U32, U64, Exact),
            (S32, F32, NearestEven),
            (S32, S64, Exact),
            (F32, F16, NearestEven),
            (F32, Bf16, NearestEven),
            (F32, U32, ToZero),
            (F32, U32, Down),
            (F32, U32, Up),
            (F32, U32, NearestInteger),
            (F32, S32, ToZero),
            (F32, S32, Down),
            (F32, S32, Up),
            (F32, S32, NearestInteger),
            (F32, Tf32, NearestAway),
            (U64, U32, Exact),
            (S64, S32, Exact),
        ]
    );
}

/// Types of the same width, predicates apart.
#[test]
fn reinterpretations() {
    let widths = [vec![Type::U16, Type::F16, Type::Bf16], Type::ALL[4..10].to_vec(), vec![Type::U64, Type::S64]];
    for to in Type::ALL {
        let accepted: Vec<Type> = Type::ALL
            .into_iter()
            .filter(|from| {
                let op = Op::Reinterpret { to, from: *from, d: FIRST, a: Operand::Register(SECOND) };
                accepts(op, &[to, *from])
            })
            .collect();
        let expected = widths.iter().find(|types| types.contains(&to)).cloned().unwrap_or_default();
        assert_eq!(accepted, expected, "to {to}");
    }
}

fn reductions(op: impl Fn(ReduceOp, Type) -> Op) -> Vec<(ReduceOp, Type)> {
    let all = ReduceOp::ALL.iter().flat_map(|reduce| Type::ALL.map(|ty| (*reduce, ty)));
    all.filter(|(reduce, ty)| accepts(op(*reduce, *ty), &[*ty, *ty, Type::U64])).collect()
}

#[test]
fn atomics_and_reductions() {
    use ReduceOp::{Add, And, Exchange, Max, Min, Or, Xor};
    use Type::{F32, S32, U32, U64};
    let target = Address { base: THIRD, offset: 0 };
    let space = Space::Global;
    let returned = [
        (Add, U32),
        (Add, S32),
        (Add, F32),
        (Add, U64),
        (Min, U32),
        (Min, S32),
        (Min, U64),
        (Max, U32),
        (Max, S32),
        (Max, U64),
        (And, U32),
        (And, U64),
        (Or, U32),
        (Or, U64),
        (Xor, U32),
        (Xor, U64),
        (Exchange, U32),
        (Exchange, U64),
    ];
    let atomic = |op, ty| Op::Atomic { space, op, ty, d: FIRST, a: vec![SECOND], target };
    assert_eq!(reductions(atomic), returned);
    let reduce = |op, ty| Op::Reduce { space, op, ty, a: vec![SECOND], target };
    assert_eq!(reductions(reduce), returned[..16]);
    let warp = |op, ty| Op::ReduceWarp { op, ty, d: FIRST, a: vec![SECOND] };
    assert_eq!(
        reductions(warp),
        [(Add, U32), (Add, S32), (Min, U32), (Min, S32), (Max, U32), (Max, S32), (And, U32), (Or, U32), (Xor, U32)]
    );
}

/// With the registers of each fragment as many as the manual shows.
#[test]
fn products() {
    use MmaShape::{M16N8K4, M16N8K8, M16N8K16};
    use Type::{Bf16x2, F16x2, F32, Tf32};
    let mut accepted = Vec::new();
    for operand in Type::ALL {
        for accumulate in Type::ALL {
            for shape in MmaShape::ALL {
                for (a, b, c) in [(1, 0, 4), (2, 1, 2), (2, 1, 4), (4, 2, 2), (4, 2, 4), (8, 4, 4)] {
                    let accumulator: Vec<RegisterId> = (1..=c).map(RegisterId).collect();
                    let op = Op::Mma {
                        shape: *shape,
                        operand,
                        accumulate,
                        d: accumulator.clone(),
                        a: vec![FIRST; a],
                        b: vec![FIRST; b],
                        c: accumulator,
                    };
                    if accepts(op, &[operand, accumulate, accumulate, accumulate, accumulate]) {
                        accepted.push((operand, accumulate, *shape, (a, b, c)));
                    }
                }
            }
        }
    }
    assert_eq!(
        accepted,
        [
            (Tf32, F32, M16N8K8, (4, 2, 4)),
            (Tf32, F32, M16N8K4, (2, 1, 4)),
            (F16x2, F32, M16N8K8, (2, 1, 4)),
            (F16x2, F32, M16N8K16, (4, 2, 4)),
            (F16x2, F16x2, M16N8K8, (2, 1, 2)),
            (F16x2, F16x2, M16N8K16, (4, 2, 2)),
            (Bf16x2, F32, M16N8K8, (2, 1, 4)),
            (Bf16x2, F32, M16N8K16, (4, 2, 4)),
        ]
    );
}

/// Global loads have every hint, except prefetches with loads that bypass the caches; shared loads have none.
#[test]
fn load_hints() {
    let all = || LoadCache::ALL.iter().flat_map(|cache| L2Prefetch::ALL.iter().map(|prefetch| (*cache, *prefetch)));
    let accepted = |space, base| {
        all().filter(move |(cache, prefetch)| {
            let op = Op::Load {
                space,
                cache: *cache,
                prefetch: *prefetch,
                ty: Type::U32,
                count: 1,
                d: vec![FIRST],
                source: Address { base: SECOND, offset: 0 },
            };
            accepts(op, &[Type::U32, base])
        })
    };
    let global: Vec<_> = accepted(Space::Global, Type::U64).collect();
    let expected: Vec<_> =
        all().filter(|(cache, prefetch)| *cache != LoadCache::Volatile || *prefetch == L2Prefetch::None).collect();
    assert_eq!(global, expected);
    let shared: Vec<_> = accepted(Space::Shared, Type::U32).collect();
    assert_eq!(shared, [(LoadCache::All, L2Prefetch::None)]);
}
