//! Every value of every choice of the configs, in the simulator: the ladder's kernel, and the choices of the Ampere and
//! Hopper kernels beyond their defaults.

use flashcore_bench::testkit::simulate::simulate;
use flashcore_bench::testkit::verify::{verify, verify_far};
use flashcore_bench::testkit::{Backend, Case, suites};
use flashcore_ir::Arch;
use flashcore_kernels::{AmpereConfig, LaunchPlan, Reason};
use flashcore_problem::{DType, Inputs, Layout, Problem};

use crate::support::{config, problem};

fn check(name: &str, problem: &Problem) {
    // Under two orders of warps, which must give the same bits.
    let case = Case::new(problem.clone(), 5, Backend::Sim(config(name)));
    let outcome = verify(&case, None);
    assert!(outcome.passed(), "{case}: {:#?}", outcome.complaints());
}

/// Several tiles with tails, groups of heads, and every kind of mask.
fn check_everywhere(name: &str) {
    check(name, &problem("1x4/2x97,203x64", DType::F16, "causal"));
    check(name, &problem("2x1x70,150x32,48", DType::Bf16, "full"));
    check(name, &problem("1x1x130,77x96", DType::F16, "window:20,3"));
    check(name, &problem("1x1x5,0x64", DType::F16, "full"));
}

#[test]
fn ladder_with_every_product_and_layout() {
    for products in ["", "-tensorqk", "-tensorpv", "-tensorqk-tensorpv"] {
        for layout in ["plain", "padded", "swizzled"] {
            check_everywhere(&format!("ladder-64x64-1stage-{layout}{products}"));
        }
    }
}

#[test]
fn ladder_with_every_load_width_and_number_of_stages() {
    for name in ["1stage-plain-load4", "2stage-padded-load8", "3stage-swizzled-tensorqk-tensorpv"] {
        check_everywhere(&format!("ladder-64x32-{name}"));
    }
}

#[test]
fn ladder_has_every_feature() {
    for name in ["ladder-64x64-1stage-plain-load4", "ladder-64x32-2stage-swizzled-tensorqk-tensorpv"] {
        let mut everything = problem("2x4/2x97,203x40,24", DType::F16, "window:90,20");
        (everything.softcap, everything.alibi, everything.bias, everything.sinks) = (Some(5.0), true, true, true);
        (everything.seqused_k, everything.scale) = (true, -0.3);
        check(name, &everything);
        let mut wide = problem("1x1x66,130x256,192", DType::Bf16, "causal");
        wide.layout = Layout::Bshd;
        check(name, &wide);
    }
}

#[test]
fn loads_of_every_width_and_stages_from_one_on() {
    for name in ["64x64-1stage-swizzled", "64x64-2stage-swizzled-load4", "32x48-3stage-padded-load8"] {
        check_everywhere(&format!("ampere-{name}"));
    }
}

#[test]
fn a_share_of_the_exponentials_by_polynomial() {
    check_everywhere("ampere-64x64-2stage-swizzled-exp2mix");
    let mut extreme = Case::new(
        problem("1x2x97,203x64", DType::F16, "causal"),
        0,
        Backend::Sim(config("ampere-64x64-2stage-swizzled-exp2mix")),
    );
    for stress in flashcore_problem::Stress::ALL {
        extreme.numbers = Some(stress).into();
        let outcome = verify(&extreme, None);
        assert!(outcome.passed(), "{extreme}: {:#?}", outcome.complaints());
    }
}

#[test]
fn warps_that_only_copy() {
    for name in [
        "64x64-2stage-swizzled-1producer",
        "64x64-2stage-swizzled-2producers",
        "64x32-3stage-plain-1producer",
        "128x64-1stage-swizzled-32rows-qshared-1producer",
        "32x64-2stage-swizzled-2kvwarps-1producer",
    ] {
        check_everywhere(&format!("ampere-{name}"));
    }
}

#[test]
fn persistent_ctas() {
    for name in [
        "64x64-2stage-swizzled-1persistent",
        "32x64-2stage-swizzled-3persistent",
        "32x64-2stage-swizzled-2kvwarps-5persistent",
        "64x64-2stage-swizzled-1producer-2persistent",
        "64x64-1stage-swizzled-1000persistent",
    ] {
        check_everywhere(&format!("ampere-{name}"));
    }
}

#[test]
fn split_kv() {
    for name in
        ["64x64-2stage-swizzled-2splits", "32x32-2stage-swizzled-7splits", "32x64-2stage-swizzled-2kvwarps-3splits"]
    {
        let name = format!("ampere-{name}");
        check_everywhere(&name);
        check(&name, &problem("2x8/2x1,515x128", DType::Bf16, "causal"));
        let mut everything = problem("2x4/2x9,203x40,24", DType::F16, "window:90,20");
        (everything.softcap, everything.alibi, everything.bias, everything.sinks) = (Some(5.0), true, true, true);
        everything.seqused_k = true;
        check(&name, &everything);
    }
}

/// More splits than a warp has lanes, all of them with keys; and more splits than there are tiles of keys.
#[test]
fn many_splits() {
    for (name, shape, dtype, mask, with_keys) in [
        ("ampere-32x32-2stage-swizzled-40splits", "1x2x1,2560x64", DType::F16, "full", 40),
        ("ampere-32x32-2stage-swizzled-70splits", "1x1x3,2300x32", DType::Bf16, "causal", 36),
        ("ampere-32x32-2stage-swizzled-40splits", "1x2x1,1400x64", DType::F16, "full", 22),
        ("ampere-16x32-2stage-swizzled-2kvwarps-packgqa-64splits", "1x4/2x1,2048x32", DType::Bf16, "full", 64),
    ] {
        let problem = problem(shape, dtype, mask);
        check(name, &problem);
        assert_eq!(splits_with_keys(name, &problem), with_keys, "{name} {shape}");
    }
}

/// Number of splits whose row max is not minus infinity for the first row, as the kernels left them.
fn splits_with_keys(name: &str, problem: &Problem) -> usize {
    let Ok(ampere) = AmpereConfig::try_from(config(name)) else { panic!("{name} has no parts") };
    let plan = LaunchPlan::new(problem, config(name), Arch::Sm90a).expect("a plan");
    let workspace = simulate(&plan, problem, &Inputs::random(problem, 5), 5).expect("no fault").workspace;
    let rows = problem.query_heads * problem.query_length;
    let outputs = ampere.num_splits as usize * rows * problem.value_dim * 4;
    let maxima = workspace[outputs..]
        .chunks_exact(rows * 8)
        .map(|part| f32::from_le_bytes([part[0], part[1], part[2], part[3]]));
    maxima.filter(|maximum| *maximum > f32::NEG_INFINITY).count()
}

/// Rows, keys, heads, batches, terms of the bias, row sums and splits, 4 GiB and more apart, for every
/// family of kernels: 32 bits hold none of these offsets.
#[test]
fn offsets_beyond_4_gib() {
    for name in [
        "scalar",
        "ladder-64x32-2stage-swizzled-tensorqk-tensorpv",
        "ladder-64x64-1stage-plain-load4",
        "ampere",
        "ampere-64x64-2stage-swizzled-1producer",
        "ampere-32x32-2stage-swizzled-2kvwarps-3splits",
        "hopper-64x48-2stage",
        "hopper-64x48-2stage-persistent",
    ] {
        for (near, far) in suites::far_trials() {
            let is_long = near.query_length != far.problem.query_length;
            if is_long && name.ends_with("persistent") {
                continue; // its CTAs would go through all rows
            }
            let verdict = verify_far(config(name), &near, &far, 3, 0, &mut None).expect("no fault");
            assert!(verdict.passed(), "{name}, {near}, {}: {verdict}", far.problem);
        }
    }
    let packed = "ampere-32x32-2stage-swizzled-packgqa-3splits";
    // The rows of all heads of a key head, which are one tile's, have a limit that the long trials pass.
    let is_taken = |near: &Problem, far: &Problem| !near.bias && near.query_length == far.query_length;
    for (near, far) in suites::far_trials().into_iter().filter(|(near, far)| is_taken(near, &far.problem)) {
        let verdict = verify_far(config(packed), &near, &far, 3, 0, &mut None).expect("no fault");
        assert!(verdict.passed(), "{packed}, {near}, {}: {verdict}", far.problem);
    }
}

#[test]
fn the_heads_of_a_key_head_in_one_tile() {
    for name in ["64x64-2stage-swizzled-packgqa", "32x32-2stage-swizzled-2kvwarps-packgqa-4splits"] {
        let name = format!("ampere-{name}");
        check_everywhere(&name);
        check(&name, &problem("2x8/2x1,300x64", DType::F16, "full"));
        check(&name, &problem("1x6/2x37,90x32", DType::Bf16, "causal"));
        let mut strided = problem("2x6/2x5,90x32", DType::F16, "window:30,0");
        (strided.layout, strided.seqused_k) = (Layout::Bshd, true);
        check(&name, &strided);
    }
}

#[test]
fn a_window_of_l2_changes_no_result() {
    check("ampere-64x64-2stage-swizzled-l2keep", &problem("1x4/2x97,203x64", DType::F16, "causal"));
}

/// Sums in `f16` run without a fault and are near; whether they are near enough is for the gate to say, case by case.
#[test]
fn sums_in_f16() {
    let mut case = Case::new(
        problem("1x2x97,203x64", DType::F16, "causal"),
        0,
        Backend::Sim(config("ampere-64x64-2stage-swizzled-f16sums")),
    );
    // Small integers are exact in f16, and so are their sums.
    case.numbers = Some(flashcore_problem::Stress::SmallIntegers).into();
    let outcome = verify(&case, None);
    assert!(outcome.passed(), "{case}: {:#?}", outcome.complaints());
    case.numbers = flashcore_bench::testkit::Numbers::Normal;
    let verdict = verify(&case, None).verdict.expect("no fault");
    assert!(verdict.relative_l2 < 3e-3, "{verdict}");
}

#[test]
fn what_does_not_go_together_is_refused() {
    let check = |name: &str, change: fn(&mut Problem), expected: &[Reason]| {
        let mut problem = problem("1x4/2x97,203x64", DType::F16, "causal");
        change(&mut problem);
        assert_eq!(LaunchPlan::new(&problem, config(name), Arch::Sm90).map(|_| ()), Err(expected.to_vec()), "{name}");
    };
    let flaw = |kernel, argument, value, allowed| Reason::Config { kernel, argument, value, allowed };
    let persistent = "1 with persistent CTAs";
    check("ampere-64x64-2stage-swizzled-3persistent-2splits", |_| {}, &[flaw("ampere", "num_splits", 2, persistent)]);
    check("ampere-64x64-2stage-swizzled-257splits", |_| {}, &[flaw("ampere", "num_splits", 257, "1 to 256")]);
    let heads = "0 with pack_gqa, where the query heads of a key head share tiles";
    check("ampere-64x64-2stage-swizzled-packgqa-3persistent", |_| {}, &[flaw("ampere", "persistent", 3, heads)]);
    let barriers = "at most 7 with producers";
    check("ampere-64x16-8stage-swizzled-1producer", |_| {}, &[flaw("ampere", "stages", 8, barriers)]);
    check(
        "ladder-64x48-9stage-plain",
        |_| {},
        &[flaw("ladder", "tile_n", 48, "32 or 64"), flaw("ladder", "stages", 9, "1 to 8")],
    );
    check(
        "ampere-64x64-2stage-swizzled-packgqa",
        |problem| (problem.alibi, problem.sinks) = (true, true),
        &[Reason::Packed { feature: "alibi" }, Reason::Packed { feature: "sinks" }],
    );
    let wide = config("ladder-64x32-1stage-plain-tensorqk");
    check(
        "ladder-64x32-1stage-plain-tensorqk",
        |problem| problem.value_dim = 256,
        &[Reason::Registers { config: wide, registers: 192, limit: 176 }],
    );
    let has: &[DType] = &[DType::F16];
    check(
        "ampere-64x64-2stage-swizzled-f16sums",
        |problem| problem.dtype = DType::Bf16,
        &[Reason::DType { kernel: "ampere", dtype: DType::Bf16, has }],
    );
}
