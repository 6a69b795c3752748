//! Every combination of modifiers of the operations that have few of them: the lists of those that exist, which
//! ptxas was asked about one by one.

use std::sync::LazyLock;

use flashcore_ir::{Arch, L2Prefetch, LoadCache, MmaShape, Op, Operand, ReduceOp, Rounding, Space, Type, forms};

/// Results of `found` for the accepted forms, each once.
fn accepted<T: PartialEq>(found: impl Fn(&Op) -> Option<T>) -> Vec<T> {
    static FORMS: LazyLock<Vec<Op>> = LazyLock::new(|| forms::accepted(Arch::Sm90a));
    let mut list = Vec::new();
    for op in &*FORMS {
        if let Some(form) = found(op)
            && !list.contains(&form)
        {
            list.push(form);
        }
    }
    list
}

#[test]
fn constants_of_every_type_can_be_moved() {
    let moved = accepted(|op| match op {
        Op::Mov { ty, a: Operand::Constant(_), .. } => Some(*ty),
        _ => None,
    });
    assert_eq!(moved, Type::ALL);
}

#[test]
fn conversions() {
    use Rounding::{Down, Exact, NearestAway, NearestEven, NearestInteger, ToZero, Up};
    use Type::{Bf16, F16, F32, S32, S64, Tf32, U16, U32, U64};
    let mut accepted = accepted(|op| match op {
        Op::Convert { to, from, rounding, .. } => Some((*from, *to, *rounding)),
        _ => None,
    });
    accepted.sort_by_key(|(from, to, _)| (*from, *to));
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
    let accepted = accepted(|op| match op {
        Op::Reinterpret { to, from, .. } => Some((*to, *from)),
        _ => None,
    });
    let pairs = widths.iter().flat_map(|types| types.iter().flat_map(|to| types.iter().map(|from| (*to, *from))));
    assert_eq!(accepted, pairs.collect::<Vec<_>>());
}

#[test]
fn atomics_and_reductions() {
    use ReduceOp::{Add, And, Exchange, Max, Min, Or, Xor};
    use Type::{F32, S32, U32, U64};
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
    for of_space in [Space::Global, Space::Shared] {
        let atomics = accepted(|op| match op {
            Op::Atomic { space, op, ty, .. } if *space == of_space => Some((*op, *ty)),
            _ => None,
        });
        assert_eq!(atomics, returned);
        let reductions = accepted(|op| match op {
            Op::Reduce { space, op, ty, .. } if *space == of_space => Some((*op, *ty)),
            _ => None,
        });
        assert_eq!(reductions, returned[..16]);
    }
    let of_warps = accepted(|op| match op {
        Op::ReduceWarp { op, ty, .. } => Some((*op, *ty)),
        _ => None,
    });
    assert_eq!(
        of_warps,
        [(Add, U32), (Add, S32), (Min, U32), (Min, S32), (Max, U32), (Max, S32), (And, U32), (Or, U32), (Xor, U32)]
    );
}

/// With the registers of each fragment as many as the manual shows.
#[test]
fn products() {
    use MmaShape::{M16N8K4, M16N8K8, M16N8K16};
    use Type::{Bf16x2, F16x2, F32, Tf32};
    let mut accepted = accepted(|op| match op {
        Op::Mma { shape, operand, accumulate, a, b, c, .. } => {
            Some((*operand, *accumulate, *shape, (a.len(), b.len(), c.len())))
        }
        _ => None,
    });
    accepted.sort_by_key(|(operand, accumulate, ..)| (*operand, *accumulate));
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
    let all = LoadCache::ALL.iter().flat_map(|cache| L2Prefetch::ALL.iter().map(|prefetch| (*cache, *prefetch)));
    let hints = |of_space: Space| {
        accepted(|op| match op {
            Op::Load { space, cache, prefetch, .. } if *space == of_space => Some((*cache, *prefetch)),
            _ => None,
        })
    };
    let exist = all.filter(|(cache, prefetch)| *cache != LoadCache::Volatile || *prefetch == L2Prefetch::None);
    assert_eq!(hints(Space::Global), exist.collect::<Vec<_>>());
    assert_eq!(hints(Space::Shared), [(LoadCache::All, L2Prefetch::None)]);
}
