//! The merge kernel in the simulator.

use flashcore_bench::testkit::operations::{check_merge, check_merge_in_place, check_merge_of};
use flashcore_ir::Arch;
use flashcore_kernels::LaunchPlan;
use flashcore_problem::{DType, LseBase, MergeProblem, Strides};

fn plan(problem: &MergeProblem) -> LaunchPlan {
    LaunchPlan::merge(problem, Arch::Sm80).unwrap_or_else(|reasons| panic!("{reasons:?}"))
}

#[track_caller]
fn check(problem: &MergeProblem) {
    let plan = plan(problem);
    for seed in 0..2 {
        check_merge(&plan, problem, seed).unwrap_or_else(|wrong| panic!("{problem:?}: {wrong}"));
    }
}

const DTYPES: [DType; 3] = [DType::F16, DType::Bf16, DType::F32];

#[test]
fn few_and_many_parts_are_merged() {
    for parts in [2, 3, 4, 5, 8, 31, 256] {
        for dtype in DTYPES {
            check(&MergeProblem::new(parts, if parts > 100 { 5 } else { 23 }, 3, 128, dtype));
        }
    }
}

/// Parts in `f32` with a result in 16 bits, and the reverse.
#[test]
fn parts_may_have_another_type() {
    for (part, dtype) in [(DType::F32, DType::Bf16), (DType::F16, DType::F32), (DType::Bf16, DType::F16)] {
        for parts in [2, 6] {
            check(&MergeProblem::new(parts, 17, 4, 64, dtype).with_part_dtype(part));
        }
    }
}

#[test]
fn every_width_is_merged() {
    for value_dim in [1, 2, 33, 40, 72, 96, 192, 256, 512] {
        for dtype in DTYPES {
            check(&MergeProblem::new(3, 9, 2, value_dim, dtype));
            check(&MergeProblem::new(7, 9, 2, value_dim, dtype).with_lse(false));
        }
    }
}

/// LSE by token, base 2, and strides with gaps.
#[test]
fn layouts_and_bases() {
    for base in [LseBase::Natural, LseBase::Two] {
        for parts in [2, 9] {
            let problem = MergeProblem::new(parts, 21, 5, 64, DType::Bf16).with_base(base);
            check(&problem);
            check(&problem.with_token_major_lse());
            let mut strides = problem.strides;
            strides.part = Strides { batch: 0, head: 21 * 66, row: 66 };
            strides.output = Strides { batch: 0, head: 72, row: 5 * 72 + 4 };
            strides.lse = Strides { batch: 0, head: 25, row: 1 };
            check(&problem.with_strides(strides));
        }
    }
}

/// An LSE that is NaN makes its row NaN, in one part or in all; other rows stay what they are.
#[test]
fn a_nan_is_not_hidden() {
    for parts in [2, 5] {
        let problem = MergeProblem::new(parts, 4, 2, 64, DType::F16);
        let mut data = problem.random(3);
        data.part_lses[1].set(0, f64::NAN);
        data.part_lses.iter_mut().for_each(|lse| lse.set(3, f64::NAN));
        check_merge_of(&plan(&problem), &problem, &data, 3).unwrap_or_else(|wrong| panic!("{wrong}"));
    }
}

/// Into the first part, in which rows that the second has not written stay as they are.
#[test]
fn a_part_is_merged_into_another() {
    for dtype in DTYPES {
        for (heads, value_dim) in [(3, 128), (2, 33), (5, 72), (1, 512), (4, 64)] {
            for base in [LseBase::Natural, LseBase::Two] {
                let problem = MergeProblem::new(2, 23, heads, value_dim, dtype).with_base(base);
                let plan =
                    LaunchPlan::merge_in_place(&problem, Arch::Sm80).unwrap_or_else(|reasons| panic!("{reasons:?}"));
                for seed in 0..2 {
                    check_merge_in_place(&plan, &problem, seed).unwrap_or_else(|wrong| panic!("{problem:?}: {wrong}"));
                }
            }
        }
    }
}
