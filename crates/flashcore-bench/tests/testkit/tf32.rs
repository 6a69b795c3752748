//! `f32` on tensor cores, in the simulator with the sums of an H200: every feature, ragged tails, and what it costs.

use flashcore_bench::testkit::simulate::simulate;
use flashcore_bench::testkit::verify::verify;
use flashcore_bench::testkit::{Backend, Case, Numbers};
use flashcore_ir::Arch;
use flashcore_kernels::{Accuracy, Config, LaunchPlan, Reason, Target, heuristics};
use flashcore_problem::{DType, Inputs, Problem, Stress};

use crate::support::{config, problem};

fn check(name: &str, problem: &Problem) {
    check_numbers(name, problem, Numbers::Normal);
}

fn check_numbers(name: &str, problem: &Problem, numbers: Numbers) {
    let case = Case { numbers, ..Case::new(problem.clone(), 7, Backend::Sim(config(name))) };
    let outcome = verify(&case, None);
    assert!(outcome.passed(), "{case}: {:#?}", outcome.complaints());
}

const NARROW: &str = "ampere-64x32-2stage-swizzled-3xtf32";

/// Several tiles with tails, groups of heads, masks, and dims that are no multiple of a panel.
#[test]
fn every_layout_and_number_of_products() {
    for name in [
        NARROW,
        "ampere-64x32-2stage-swizzled-1xtf32",
        "ampere-128x16-2stage-swizzled-32rows-qshared-3xtf32",
        "ampere-32x64-2stage-padded-2kvwarps-load4-3xtf32",
        "ampere-64x16-3stage-plain-qshared-3xtf32-1producer",
    ] {
        check(name, &problem("1x2/1x65,109x64", DType::F32, "causal"));
        check(name, &problem("1x1x17,70x40,24", DType::F32, "window:20,3"));
    }
    check(NARROW, &problem("1x1x5,0x64", DType::F32, "full"));
    check("ampere-64x16-2stage-swizzled-qshared-3xtf32", &problem("1x1x17,40x128,96", DType::F32, "full"));
}

#[test]
fn every_feature() {
    let mut everything = problem("2x4/2x33,109x40,24", DType::F32, "window:60,20");
    (everything.softcap, everything.alibi, everything.bias, everything.sinks) = (Some(5.0), true, true, true);
    (everything.seqused_k, everything.scale) = (true, -0.3);
    check("ampere-64x16-2stage-swizzled-qshared-3xtf32", &everything);
    for splits in ["-3splits", "-packgqa-3splits", "-packgqa-3persistent-64chunk", "-cluster-2splits"] {
        check(&format!("{NARROW}{splits}"), &problem("1x4/2x17,109x32", DType::F32, "causal"));
    }
}

/// Scores to 10,000, tiny numbers and the other stresses pass the gate of `f32` as it is.
#[test]
fn stresses() {
    for stress in Stress::ALL {
        check_numbers(NARROW, &problem("1x2x33,97x32", DType::F32, "causal"), Some(stress).into());
    }
}

/// Sums are cut off by tensor cores: over many keys that must not add up.
#[test]
fn many_keys() {
    check(NARROW, &problem("1x1x16,2048x32", DType::F32, "full"));
}

/// Where a row attends an infinite value, its output is infinite, as in `f32`, and no NaN.
#[test]
fn infinities_stay() {
    let problem = problem("1x1x17,40x32", DType::F32, "full");
    let mut inputs = Inputs::random(&problem, 3);
    inputs.value.set(5 * 32 + 3, f64::INFINITY);
    let plan = LaunchPlan::new(&problem, config(NARROW), Arch::Sm80).expect("a plan");
    let outputs = simulate(&plan, &problem, &inputs, 0).expect("it runs").outputs.output;
    let dense = outputs.dense(problem.output_shape(), problem.strides().output);
    for (index, value) in dense.iter().enumerate() {
        assert_eq!(*value == f64::INFINITY, index % 32 == 3, "element {index} is {value}");
        assert!(!value.is_nan(), "element {index}");
    }
}

/// Three products for one, and no bank conflict among the loads of values.
#[test]
fn counters() {
    let problem = problem("1x1x64,128x64", DType::F32, "full");
    let counters = |name: &str| {
        let plan = LaunchPlan::new(&problem, config(name), Arch::Sm80).expect("a plan");
        simulate(&plan, &problem, &Inputs::random(&problem, 1), 0).expect("it runs").counters
    };
    let [one, three] = ["1", "3"].map(|products| counters(&format!("ampere-64x32-2stage-swizzled-{products}xtf32")));
    // 4 warps of 16 rows, 128 keys and 64 columns in steps of 8, two products.
    assert_eq!((one.mma, three.mma), (4 * 16 * 8 * 2, 3 * one.mma));
    for counters in [one, three, counters("ampere-64x32-2stage-padded-3xtf32")] {
        assert_eq!(counters.shared_loads.transactions, counters.shared_loads.requests);
        assert_eq!(counters.load_matrix.transactions, counters.load_matrix.requests);
        assert_eq!(counters.copy_async_writes.transactions, counters.copy_async_writes.requests);
    }
}

/// The default is 3xTF32 wherever the kernel takes the problem, never 1xTF32; a search tries the scalar kernel too.
#[test]
fn starting_points() {
    for arch in [Arch::Sm80, Arch::Sm86, Arch::Sm89, Arch::Sm90a, Arch::Sm120] {
        let target = Target::new(arch, 108);
        for dim in [8, 64, 96, 128, 256] {
            for (queries, keys) in [(300, 300), (1, 4096)] {
                let problem = Problem::new(1, 4, queries, dim, DType::F32).with_key_length(keys);
                let points = heuristics::starting_points(&problem, target);
                assert_eq!(heuristics::select(&problem, target), points[0]);
                let accuracies: Vec<_> = points.into_iter().map(Config::accuracy).collect();
                let expected: &[_] =
                    if dim <= 128 { &[Accuracy::NearF32, Accuracy::Exact] } else { &[Accuracy::Exact] };
                assert_eq!(accuracies, expected, "{arch}, {dim}");
            }
        }
    }
    let refused = LaunchPlan::new(&Problem::new(1, 1, 9, 64, DType::F32), Config::ampere(), Arch::Sm80);
    assert!(matches!(&refused.expect_err("no products")[..], [Reason::Tf32 { .. }]));
}
