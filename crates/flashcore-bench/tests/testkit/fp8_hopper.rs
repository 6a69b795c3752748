//! Query, key and value of 8 bits on Hopper, in the simulator: every feature, ragged tails, scales of every form, and what one
//! level of accumulation costs.

use flashcore_bench::testkit::resources;
use flashcore_bench::testkit::simulate::{simulate, simulate_with_sums};
use flashcore_bench::testkit::verify::verify;
use flashcore_bench::testkit::{Backend, Case, Numbers, Planted};
use flashcore_ir::Arch;
use flashcore_kernels::{Config, LaunchPlan, Reason, Target, heuristics};
use flashcore_problem::{DType, Inputs, PagedKv, Problem};
use flashcore_ptx::ptxas;
use flashcore_sim::TensorSum;

use crate::support::{config, problem};

const PLAIN: &str = "hopper-128x96-2stage-overlap-pingpong-persistent";
/// Three tiles of keys and more in small problems.
const SMALL: &str = "hopper-64x32-2stage";

/// A problem of 8 bits, with the scales that are named: `q`, `k` and `v`.
fn bytes(shape: &str, mask: &str, kv_dtype: DType, scales: &str) -> Problem {
    let mut problem = problem(shape, DType::E4m3, mask);
    (problem.kv_dtype, problem.out_dtype) = (Some(kv_dtype), Some(DType::Bf16));
    [problem.q_scale, problem.k_scale, problem.v_scale] = ["q", "k", "v"].map(|scale| scales.contains(scale));
    problem
}

fn check(name: &str, problem: &Problem) {
    check_seed(name, problem, 7);
}

fn check_seed(name: &str, problem: &Problem, seed: u64) {
    let case = Case::new(problem.clone(), seed, Backend::Sim(config(name)));
    let outcome = verify(&case, None);
    assert!(outcome.passed(), "{case}: {:#?}", outcome.complaints());
}

#[test]
fn both_types_masks_and_tails() {
    check(PLAIN, &bytes("1x2/1x97,203x128", "full", DType::E4m3, ""));
    check(PLAIN, &bytes("1x2/1x130,313x64", "causal", DType::E5m2, ""));
    check("hopper-128x192-2stage-overlap-pingpong-persistent", &bytes("1x1x65,401x64", "full", DType::E4m3, "v"));
    check(SMALL, &bytes("2x2x65,109x32,48", "window:40,5", DType::E4m3, "qkv"));
    check(SMALL, &bytes("1x1x17,40x16,112", "full", DType::E5m2, "k"));
    check(SMALL, &bytes("1x1x5,0x64", "full", DType::E4m3, "qkv"));
}

/// Seeds give scales of the tensor, of heads, of sequences and of tokens.
#[test]
fn scales_of_every_form() {
    for seed in 0..12 {
        check_seed(SMALL, &bytes("2x4/2x33,109x32", "causal", DType::E4m3, "qkv"), seed);
    }
}

#[test]
fn every_feature() {
    let mut everything = bytes("2x4/2x33,109x48,32", "window:60,20", DType::E4m3, "qkv");
    (everything.softcap, everything.alibi, everything.bias, everything.sinks) = (Some(5.0), true, true, true);
    (everything.seqused_k, everything.scale, everything.lse) = (true, -0.3, true);
    for seed in 0..3 {
        check_seed(SMALL, &everything, seed);
    }
}

/// Keys that nobody attends may hold anything, NaN too: past a length, and before a window.
#[test]
fn keys_that_nobody_attends() {
    let numbers = Numbers::Planted(Planted::Unattended);
    let mut lengths = bytes("3x2/1x33,109x32", "full", DType::E4m3, "kv");
    lengths.seqused_k = true;
    let windows = bytes("1x2x20,300x32", "window:40,0", DType::E5m2, "qkv");
    for problem in [lengths, windows, bytes("1x1x40,203x64", "causal-top-left", DType::E4m3, "v")] {
        for seed in 0..4 {
            let case = Case { numbers, ..Case::new(problem.clone(), seed, Backend::Sim(config(SMALL))) };
            let outcome = verify(&case, None);
            assert!(outcome.passed(), "{case}: {:#?}", outcome.complaints());
        }
    }
}

/// Sequences whose rows and keys are packed.
#[test]
fn packed_sequences() {
    let mut packed = bytes("3x2/1x70,150x64", "causal", DType::E4m3, "qkv");
    (packed.total_q, packed.total_k, packed.lse) = (Some(160), Some(300), true);
    for seed in 0..3 {
        check_seed(SMALL, &packed, seed);
        check_seed(PLAIN, &packed, seed);
    }
}

/// Where tensor cores keep 13 bits of their sums, as others report of Hopper, P · V that adds up over all keys in one
/// accumulator loses what is small beside it; in two levels it does not.
#[test]
fn two_levels_keep_what_one_loses() {
    let problem = bytes("1x1x16,4096x32", "full", DType::E4m3, "");
    let mut inputs = Inputs::random(&problem, 3);
    for index in 0..4096 * 32 {
        inputs.value.set(index, 1.0);
    }
    // All values are 1, so what is missing from 1 is the bias of the sums.
    let mean_error = |name: &str, sums: TensorSum| {
        let plan = LaunchPlan::new(&problem, config(name), Arch::Sm90a).expect("a plan");
        let simulated = simulate_with_sums(&plan, &problem, &inputs, 0, Some(sums)).expect("it runs");
        let dense = simulated.outputs.output.dense(problem.output_shape(), problem.strides().output);
        dense.iter().map(|value| 1.0 - value).sum::<f64>() / dense.len() as f64
    };
    let (one, two) = ("hopper-64x128-2stage-1level", "hopper-64x128-2stage");
    assert!(mean_error(one, TensorSum::Exact).abs() < 0.004);
    assert!(mean_error(two, TensorSum::H200).abs() < 0.004);
    assert!(mean_error(one, TensorSum::H200) > 0.05, "{}", mean_error(one, TensorSum::H200));
}

/// The transposition of values has no bank conflict.
#[test]
fn counters() {
    let problem = bytes("1x1x64,256x64", "full", DType::E4m3, "");
    let plan = LaunchPlan::new(&problem, config("hopper-64x128-2stage"), Arch::Sm90a).expect("a plan");
    let counters = simulate(&plan, &problem, &Inputs::random(&problem, 1), 0).expect("it runs").counters;
    assert_eq!(counters.load_matrix.transactions, counters.load_matrix.requests);
    assert!(counters.store_matrix.requests > 0);
    assert_eq!(counters.store_matrix.transactions, counters.store_matrix.requests);
}

#[test]
fn the_default_is_a_kernel_of_8_bits() {
    for dim in [16, 64, 96, 128] {
        for queries in [100, 5000] {
            let problem = bytes(&format!("1x8x{queries}x{dim}"), "causal", DType::E4m3, "qkv");
            let config = heuristics::select(&problem, Target { arch: Arch::Sm90a, num_sms: 132 });
            assert!(Config::fp8().contains(&config), "{config}");
            LaunchPlan::new(&problem, config, Arch::Sm90a).expect("a plan");
        }
    }
}

#[test]
fn what_is_refused_says_what_to_do() {
    // Tiles that take too many registers are another matter.
    let refused = |name: &str, problem: &Problem| -> Vec<Reason> {
        let reasons = LaunchPlan::new(problem, config(name), Arch::Sm90a).expect_err("it is refused");
        reasons.into_iter().filter(|reason| !matches!(reason, Reason::Registers { .. })).collect()
    };
    let fp8 = |what, instead| Reason::Fp8 { what, instead };
    let plain = bytes("1x1x100x64", "full", DType::E4m3, "v");
    for (name, what, instead) in [
        ("hopper-128x48-2stage", "tiles of keys that are no multiple of 32", "take 96 or 128 keys"),
        ("hopper-128x96-2stage-threshold", "-threshold", "weights beyond 2^8 do not fit e4m3; leave it out"),
        ("hopper-128x64-4stage-2kvgroups", "-kvgroups and -cluster", "leave them out"),
        ("hopper-128x64-4stage-2cluster", "-kvgroups and -cluster", "leave them out"),
        ("hopper-128x64-2stage-packgqa", "-packgqa", "leave it out"),
        (
            "hopper-128x64-2stage-1level",
            "-1level with v_scale",
            "scales of tokens have no place there; leave -1level out",
        ),
    ] {
        assert_eq!(refused(name, &plain), [fp8(what, instead)], "{name}");
    }
    let dim = |argument| Reason::Dim { kernel: "hopper (8 bits)", argument, dim: 256, multiple: 16, most: 128 };
    let wide = refused(PLAIN, &bytes("1x1x100x256", "full", DType::E4m3, ""));
    assert_eq!(wide, [dim("head_dim"), dim("value_dim")]);
    let mut paged = bytes("1x1x100x64", "full", DType::E4m3, "");
    paged.paged = Some(PagedKv::new(16, 7, 7));
    assert_eq!(refused(PLAIN, &paged), [fp8("page_table", "gather the pages, or take the CPU")]);
    let half = Problem::new(1, 1, 100, 64, DType::F16);
    let one_level = "hopper-128x96-2stage-1level";
    assert_eq!(refused(one_level, &half), [Reason::OneLevel { config: config(one_level) }]);
}

/// The defaults at head dims 64 and 128, full and causal, with all scales.
#[test]
#[expect(clippy::print_stderr, reason = "a test that checks less than usual says so")]
fn ptxas_needs_no_spills() {
    if let Err(reason) = ptxas::find() {
        return eprintln!("not assembled: {reason}");
    }
    let defaults: Vec<Config> =
        Config::defaults().into_iter().filter(|config| Config::fp8().contains(config)).collect();
    let mut assembled = 0;
    for (config, head_dim, kind) in resources::kernels(&defaults, Arch::Sm90a) {
        if ![64, 128].contains(&head_dim) || kind == resources::Kind::Fp8QueryUnbiased {
            continue;
        }
        let row = resources::row(config, head_dim, kind, Arch::Sm90a).expect("it assembles");
        assert!(row.complaints.is_empty(), "{config} {head_dim} {kind:?}: {:?}", row.complaints);
        assembled += 1;
    }
    assert!(assembled >= 12, "{assembled}");
}
