//! Every feature of a problem, alone and with others, on a few kernels in the simulator. `flashcore verify --backend sim
//! --suite features` goes through all of them.

use flashcore_bench::testkit::verify::verify;
use flashcore_bench::testkit::{Backend, Case, Numbers, Planted};
use flashcore_ir::Arch;
use flashcore_kernels::{Config, LaunchPlan, Reason};
use flashcore_problem::{Alignment, DType, Layout, LseForm, Mask, Problem};

fn problem(dtype: DType, [queries, keys, head_dim, value_dim]: [usize; 4]) -> Problem {
    let mut problem = Problem::new(2, 4, queries, head_dim, dtype);
    (problem.key_heads, problem.key_length, problem.value_dim) = (2, keys, value_dim);
    problem.lse = true;
    problem
}

fn window(left: Option<usize>, right: Option<usize>, alignment: Alignment) -> Mask {
    Mask::Window { left, right, alignment }
}

/// Rows that begin at multiples of `elements` elements and of no more.
fn narrow(problem: &mut Problem, elements: usize) {
    let mut strides = problem.strides();
    let tensors = [
        (&mut strides.query, problem.query_shape()),
        (&mut strides.key, problem.key_shape()),
        (&mut strides.value, problem.value_shape()),
        (&mut strides.output, problem.output_shape()),
    ];
    for (strides, shape) in tensors {
        strides.row = shape.columns + elements;
        strides.head = strides.row * shape.rows + elements;
        strides.batch = strides.head * shape.heads;
    }
    problem.layout = Layout::Strided(strides);
}

fn check(dtype: DType, sizes: [usize; 4], change: impl Fn(&mut Problem)) {
    let mut problem = problem(dtype, sizes);
    change(&mut problem);
    let kernels = [
        "scalar",
        "ampere-64x48-2stage-swizzled-32rows-qshared-ifchanged",
        "ampere-32x64-2stage-swizzled-2kvwarps",
        "hopper-128x48-2stage-overlap-pingpong-persistent",
        "hopper-64x64-3stage-threshold",
    ];
    for name in kernels {
        let config: Config = name.parse().expect("a config");
        if (dtype == DType::F32) != (name == "scalar") {
            continue;
        }
        // The widest tiles of the widest heads are more than there is room for.
        let plan = LaunchPlan::new(&problem, config, Arch::Sm90a);
        if let Err(reasons) = &plan
            && reasons.iter().all(|reason| matches!(reason, Reason::Width { .. }))
        {
            continue;
        }
        if plan.is_err_and(|reasons| {
            reasons.iter().all(|reason| matches!(reason, Reason::Kernel(_) | Reason::Registers { .. }))
        }) {
            assert!(sizes[2] + sizes[3] > 256, "{name} does not fit {problem}");
            continue;
        }
        let case = Case::new(problem.clone(), 7, Backend::Sim(config));
        let outcome = verify(&case, None);
        assert!(outcome.passed(), "{case}: {:#?}", outcome.complaints());
    }
}

#[test]
fn windows() {
    use Alignment::{BottomRight, TopLeft};
    for mask in [
        window(Some(20), Some(0), BottomRight),
        window(Some(0), Some(0), TopLeft),
        window(None, Some(9), BottomRight),
        window(Some(100), None, TopLeft),
        window(Some(3), Some(70), BottomRight),
        window(Some(usize::MAX), Some(usize::MAX - 1), TopLeft),
    ] {
        check(DType::F16, [77, 203, 32, 32], |problem| problem.mask = mask);
    }
    // More queries than keys: some rows attend nothing.
    check(DType::Bf16, [203, 77, 32, 32], |problem| problem.mask = window(Some(5), Some(5), BottomRight));
}

#[test]
fn seqused_k() {
    for mask in [Mask::None, Mask::Causal(Alignment::BottomRight), Mask::Causal(Alignment::TopLeft)] {
        check(DType::F16, [65, 203, 32, 32], |problem| (problem.mask, problem.seqused_k) = (mask, true));
    }
}

#[test]
fn score_terms() {
    check(DType::F16, [65, 203, 32, 32], |problem| problem.softcap = Some(3.0));
    check(DType::Bf16, [65, 203, 32, 32], |problem| problem.alibi = true);
    check(DType::F16, [65, 203, 32, 32], |problem| problem.bias = true);
    check(DType::F16, [65, 203, 32, 32], |problem| problem.sinks = true);
    check(DType::F16, [65, 203, 32, 32], |problem| problem.scale = -0.3);
    check(DType::F16, [65, 203, 32, 32], |problem| problem.scale = 0.0);
    check(DType::Bf16, [97, 203, 64, 64], |problem| {
        (problem.softcap, problem.alibi, problem.bias, problem.sinks) = (Some(5.0), true, true, true);
        (problem.seqused_k, problem.mask) = (true, Mask::Causal(Alignment::BottomRight));
    });
    check(DType::F16, [203, 60, 24, 40], |problem| {
        (problem.alibi, problem.sinks) = (true, true);
        problem.mask = window(Some(20), Some(3), Alignment::BottomRight);
    });
}

#[test]
fn head_dims() {
    for (head_dim, value_dim) in [(8, 8), (16, 24), (40, 16), (72, 80), (96, 32), (128, 136), (192, 128)] {
        check(DType::F16, [65, 130, head_dim, value_dim], |_| {});
    }
    check(DType::Bf16, [33, 130, 256, 256], |problem| problem.mask = Mask::Causal(Alignment::BottomRight));
}

#[test]
fn strides() {
    for elements in [1, 2, 4, 8] {
        check(DType::F16, [65, 130, 40, 24], |problem| narrow(problem, elements));
    }
    check(DType::Bf16, [65, 130, 40, 40], |problem| problem.layout = Layout::Bshd);
}

#[test]
fn f32_on_the_scalar_kernel() {
    check(DType::F32, [65, 203, 33, 7], |problem| problem.alibi = true);
    check(DType::F32, [40, 203, 64, 130], |problem| problem.mask = Mask::Causal(Alignment::BottomRight));
    check(DType::F32, [65, 203, 32, 32], |problem| narrow(problem, 3));
}

/// NaN and infinities in keys and values past the length of a batch: TMA brings them, and weights of zero do not
/// make them go away.
#[test]
fn what_lies_behind_the_keys_of_a_batch_leaves_no_trace() {
    for name in ["hopper-128x48-2stage-overlap-pingpong-persistent", "hopper-64x64-4stage-2kvgroups", "ampere"] {
        let mut problem = problem(DType::F16, [65, 203, 72, 136]);
        problem.seqused_k = true;
        let config: Config = name.parse().expect("a config");
        for seed in [3, 8] {
            let numbers = Numbers::Planted(Planted::Unattended);
            let case = Case { numbers, ..Case::new(problem.clone(), seed, Backend::Sim(config)) };
            let outcome = verify(&case, None);
            assert!(outcome.passed(), "{case}: {:#?}", outcome.complaints());
        }
    }
}

/// Every form of the LSE on every kind of kernel that writes one, with sinks so large that they swallow all keys, and so
/// small that they count for nothing; partial results of splits and chunks stay in their own form.
#[test]
fn forms_of_the_lse() {
    let kernels = [
        ("scalar", DType::F32),
        ("ladder-64x64-1stage-padded-load4-tensorqk", DType::F16),
        ("ampere-32x64-2stage-swizzled-2kvwarps", DType::F16),
        ("ampere-32x32-2stage-swizzled-3splits", DType::Bf16),
        ("ampere-32x32-2stage-swizzled-3persistent-64chunk", DType::F16),
        ("hopper-64x64-3stage-threshold", DType::Bf16),
        ("hopper-128x48-2stage-overlap-pingpong-persistent", DType::F16),
        ("hopper-64x64-4stage-2cluster", DType::F16),
    ];
    for (name, dtype) in kernels {
        let config: Config = name.parse().expect("a config");
        for form in LseForm::ALL {
            for (sinks, numbers) in [(false, Numbers::Normal), (true, Numbers::Planted(Planted::ExtremeSinks))] {
                let mut problem = problem(dtype, [35, 203, 64, 64]).with_sinks(sinks).with_lse_form(form);
                problem.mask = Mask::Causal(Alignment::BottomRight);
                problem.seqused_k = name.contains("chunk");
                let case = Case { numbers, ..Case::new(problem, 3, Backend::Sim(config)) };
                let outcome = verify(&case, None);
                assert!(outcome.passed(), "{case}: {:#?}", outcome.complaints());
            }
        }
    }
}
