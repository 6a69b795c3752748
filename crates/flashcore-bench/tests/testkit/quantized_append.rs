//! The append kernels that quantise to an FP8 cache, in the simulator: codes and scales equal those of the definition.

use flashcore_bench::testkit::kv_cache::KvCacheTrial;
use flashcore_bench::testkit::operations::{Placement, check_append};
use flashcore_ir::Arch;
use flashcore_kernels::LaunchPlan;
use flashcore_problem::{
    Alignment, AppendProblem, DType, KvCacheProblem, Layout, Mask, PagedKv, Problem, Rotary, RotaryStyle,
    SequenceLengths, Strides,
};

#[track_caller]
fn check(problem: &AppendProblem, placement: Placement) {
    let plan = LaunchPlan::append(problem, Arch::Sm89).unwrap_or_else(|reasons| panic!("{reasons:?}"));
    for seed in 0..3 {
        check_append(&plan, problem, placement, seed).unwrap_or_else(|wrong| panic!("{problem:?}: {wrong}"));
    }
}

/// Given scales, computed ones, those of one tensor, and none.
fn with_scales(problem: AppendProblem) -> [AppendProblem; 4] {
    [
        problem.with_scales(true, true),
        problem.with_scales(true, true).with_compute_scales(true),
        problem.with_scales(false, true).with_compute_scales(true),
        problem,
    ]
}

#[test]
fn rows_are_quantised_by_slot() {
    for dtype in [DType::F16, DType::Bf16, DType::F32] {
        for cache in DType::FLOAT8 {
            for (head_dim, value_dim, dim) in [(128, 128, 128), (72, 40, 24), (34, 64, 0), (256, 512, 64)] {
                let mut problem = AppendProblem::new(41, 3, head_dim, dtype, 12, 8)
                    .with_value_dim(value_dim)
                    .with_query(6)
                    .with_cache_dtype(Some(cache));
                if dim > 0 {
                    let style = if dim == 64 { RotaryStyle::GptJ } else { RotaryStyle::Neox };
                    problem = problem.with_rotary(Rotary::new(style, dim, 33));
                }
                if value_dim == 40 {
                    problem = problem.with_qk_norm(1e-6);
                }
                for problem in with_scales(problem) {
                    check(&problem, Placement::Separate);
                }
            }
        }
    }
}

/// Keys beside values, and rows at multiples of 2 codes only.
#[test]
fn caches_may_share_a_memory_and_have_strides() {
    for (dim, padding) in [(64, 0), (34, 2)] {
        let problem = AppendProblem::new(29, 3, dim, DType::Bf16, 6, 16).with_cache_dtype(Some(DType::E4m3));
        let row = 2 * dim + padding;
        let mut strides = problem.strides;
        strides.key_cache = Strides { row, head: 16 * row, batch: 3 * 16 * row };
        strides.value_cache = strides.key_cache;
        for problem in with_scales(problem.with_strides(strides)) {
            check(&problem, Placement::Interleaved { offset: dim });
        }
    }
}

fn sequences(number: usize) -> KvCacheProblem {
    let is = |bit: usize| number >> bit & 1 == 1;
    let dtype = if is(0) { DType::F16 } else { DType::Bf16 };
    let mut attention = Problem::new(5, 6, 3, 64, dtype).with_layout(Layout::Bshd).with_key_length(203);
    (attention.key_heads, attention.mask) = (3, Mask::Causal(Alignment::BottomRight));
    attention.kv_dtype = Some(DType::FLOAT8[number / 2 % 2]);
    (attention.k_scale, attention.v_scale) = (true, !is(3));
    attention.kv_batch = is(2).then_some(7);
    attention.paged = is(3).then(|| PagedKv::new(16, 7 * 13 + 1, 13));
    let problem = KvCacheProblem::new(attention, 9).with_total_new(is(4).then_some(31)).with_compute_scales(is(5));
    if is(1) { problem.with_rotary(Rotary::new(RotaryStyle::Neox, 64, 210)) } else { problem.with_qk_norm(1e-5) }
}

/// Scales of each sequence and head among the given ones.
#[test]
fn rows_are_quantised_by_sequence() {
    let mut saturated = 0;
    for number in 0..64 {
        let problem = sequences(number);
        let trial = KvCacheTrial::of(&problem, SequenceLengths::Ragged, number as u64).unwrap();
        trial.verify_append(None, number as u64).unwrap_or_else(|wrong| panic!("{number} {problem}: {wrong}"));
        saturated += trial.saturated();
    }
    assert!(saturated > 1000, "{saturated}");
}

#[test]
fn what_no_kernel_quantises_is_refused_with_the_reason() {
    let problem = AppendProblem::new(4, 2, 64, DType::F16, 4, 4).with_cache_dtype(Some(DType::E5m2));
    let text = |problem: &AppendProblem, arch| match LaunchPlan::append(problem, arch) {
        Ok(_) => String::new(),
        Err(reasons) => reasons.iter().map(ToString::to_string).collect(),
    };
    assert_eq!(text(&problem, Arch::Sm89), "");
    let end = ": append on the CPU, or quantise before and copy codes";
    let expected = format!("the append to an e5m2 cache needs the conversions of sm_89 and later GPUs{end}");
    assert_eq!(text(&problem, Arch::Sm86), expected);
    let odd = AppendProblem::new(4, 2, 33, DType::F16, 4, 4).with_cache_dtype(Some(DType::E5m2));
    let why = "takes an even number of columns, strides that are even, and a rotary dim that is a multiple of 4";
    assert_eq!(text(&odd, Arch::Sm90a), format!("the append to an e5m2 cache {why}{end}"));
    assert!(LaunchPlan::kv_cache(&sequences(0), None, Arch::Sm80).is_err());
}
