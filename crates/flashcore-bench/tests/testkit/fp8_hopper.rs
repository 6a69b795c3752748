//! Query, key and value of 8 bits on Hopper, in the simulator: every feature, ragged tails, scales of every form, and what one
//! level of accumulation costs.

use flashcore_bench::testkit::resources;
use flashcore_bench::testkit::simulate::{simulate, simulate_with_sums};
use flashcore_bench::testkit::suites::{Kernels, Runner, fuzz, fuzz_serving};
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

/// A problem of 8 bits without an LSE, with the scales that are named: `q`, `k` and `v`.
fn bytes(shape: &str, mask: &str, kv_dtype: DType, scales: &str) -> Problem {
    let mut problem = problem(shape, DType::E4m3, mask);
    problem.lse = false;
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
    (everything.seqused_k, everything.scale) = (true, -0.3);
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
    (packed.total_q, packed.total_k) = (Some(160), Some(300));
    for seed in 0..3 {
        check_seed(SMALL, &packed, seed);
        check_seed(PLAIN, &packed, seed);
    }
}

/// Heads of more than 128 columns, whose P · V goes by slices of the columns: by three and by four, some of which overlap.
#[test]
fn wide_heads() {
    for (dims, kv_dtype) in [("192", DType::E4m3), ("256", DType::E5m2), ("144", DType::E4m3), ("208", DType::E4m3)] {
        check(SMALL, &bytes(&format!("1x2/1x33,109x{dims}"), "causal", kv_dtype, "qkv"));
    }
    check(SMALL, &bytes("1x2x20,109x64,240", "window:60,20", DType::E4m3, "v"));
    check(SMALL, &bytes("2x1x40,109x256,64", "full", DType::E4m3, ""));
    check("hopper-128x96-2stage-overlap-pingpong-persistent", &bytes("1x2/1x70,300x176", "full", DType::E4m3, "qk"));
    check("hopper-128x64-3stage-overlap-persistent", &bytes("1x1x130,203x256", "causal", DType::E4m3, "qkv"));
    check("hopper-64x32-2stage-1level", &bytes("1x1x33,109x256", "full", DType::E4m3, "qk"));
}

/// Seeds give scales of every form, of which those of tokens have units of their own in each block.
#[test]
fn wide_heads_with_everything() {
    let mut everything = bytes("2x4/2x33,109x208,160", "window:60,20", DType::E4m3, "qkv");
    (everything.softcap, everything.alibi, everything.bias, everything.sinks) = (Some(5.0), true, true, true);
    everything.seqused_k = true;
    let mut packed = bytes("3x2/1x40,150x256", "causal", DType::E4m3, "qkv");
    (packed.total_q, packed.total_k) = (Some(90), Some(300));
    for seed in 0..3 {
        check_seed(SMALL, &everything, seed);
        check_seed(SMALL, &packed, seed);
    }
}

/// A problem of 8 bits over a paged cache, whose pages lie in any order and whose unused ones hold anything.
fn paged(shape: &str, mask: &str, page_size: usize, scales: &str) -> Problem {
    let mut problem = bytes(shape, mask, DType::E4m3, scales);
    let width = problem.key_length.div_ceil(page_size);
    problem.paged = Some(PagedKv::new(page_size, problem.batch * width + 3, width + 1));
    problem.seqused_k = true;
    problem
}

/// Pages of 16, 48 and 128 rows: TMA boxes of 16 and 32, several pages of a block and several blocks of a page. Seeds give
/// scales of tokens, which lie in pages too, and of every other form.
#[test]
fn pages() {
    for (page_size, mask) in [(16, "causal"), (48, "full"), (128, "window:70,0")] {
        for seed in 0..5 {
            check_seed(SMALL, &paged("3x4/2x33,150x32", mask, page_size, "qkv"), seed);
        }
        check(PLAIN, &paged("2x2/1x70,300x64", mask, page_size, "kv"));
    }
    check(SMALL, &paged("2x2/1x20,109x256", "causal", 16, "qkv"));
    check(SMALL, &paged("2x2/1x20,109x128", "full", 16, "qkv"));
}

/// Rows of unused pages, and of a page past the length of a sequence, may hold anything: NaN too.
#[test]
fn pages_that_nobody_attends() {
    let numbers = Numbers::Planted(Planted::Unattended);
    let mut packed = paged("3x2/1x40,150x64", "causal", 16, "qkv");
    (packed.total_q, packed.kv_batch) = (Some(90), Some(4));
    packed.paged = Some(PagedKv::new(16, 50, 11));
    for problem in [packed, paged("2x2/1x33,109x192", "window:40,5", 16, "kv")] {
        for seed in 0..3 {
            let case = Case { numbers, ..Case::new(problem.clone(), seed, Backend::Sim(config(SMALL))) };
            let outcome = verify(&case, None);
            assert!(outcome.passed(), "{case}: {:#?}", outcome.complaints());
        }
    }
}

/// Few rows: splits of the keys by warpgroup, by CTA of a cluster and by chunk, and heads that share tiles.
#[test]
fn few_rows() {
    let problems = [
        bytes("2x4/2x20,260x64", "causal", DType::E4m3, "qkv"),
        paged("2x4/2x3,260x64", "full", 16, "qkv"),
        bytes("1x2/1x33,260x192", "window:200,0", DType::E5m2, "qkv"),
    ];
    for name in [
        "hopper-64x32-4stage-2kvgroups",
        "hopper-64x32-2stage-2cluster",
        "hopper-64x32-2stage-96chunk",
        "hopper-64x32-2stage-packgqa",
        "hopper-64x32-2stage-packgqa-64chunk",
    ] {
        for (problem, seed) in problems.iter().zip([1, 2, 3]) {
            check_seed(name, problem, seed);
        }
        check_seed(name, &problems[0], 7);
    }
}

/// Random cases, plain and of sequences, of the kernels that problems get; `FP8_CASES` asks for more of each.
#[test]
fn random_cases() {
    let count = std::env::var("FP8_CASES").ok().and_then(|count| count.parse().ok()).unwrap_or(4);
    let mut passed = 0;
    for (number, config) in (0..).zip(Config::fp8()) {
        let runner = Runner::Sim(Kernels::Only(config));
        let seed = 1000 * number;
        let cases = [fuzz(runner, count, seed), fuzz_serving(runner, count, seed)].concat();
        for case in cases.into_iter().filter(|case| case.problem.dtype.is_float8()) {
            let outcome = verify(&case, None);
            assert!(outcome.passed(), "{case}: {:#?}", outcome.complaints());
            passed += 1;
        }
    }
    assert!(passed >= 5 * count, "{passed}");
}

/// Where tensor cores keep 13 bits of their sums, as those of an H200 do, P · V that adds up over all keys in one
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
    for dim in [16, 64, 96, 128, 144, 160, 192, 208, 256] {
        for (queries, bias) in [(100, false), (5000, false), (5000, true)] {
            let mut problem = bytes(&format!("1x8x{queries}x{dim}"), "causal", DType::E4m3, "qkv");
            problem.bias = bias;
            let config = heuristics::select(&problem, Target::new(Arch::Sm90a, 132));
            assert!(Config::fp8().contains(&config), "{config}");
            LaunchPlan::new(&problem, config, Arch::Sm90a).expect("a plan");
        }
    }
}

#[test]
fn few_rows_over_many_keys_are_chunked() {
    let selected = |shape: &str| {
        let problem = bytes(shape, "causal", DType::E4m3, "qkv");
        let config = heuristics::select(&problem, Target::new(Arch::Sm90a, 132));
        LaunchPlan::new(&problem, config, Target::new(Arch::Sm90a, 132)).expect("a plan");
        config.to_string()
    };
    assert_eq!(selected("1x32/8x1,8192x128"), "hopper-64x64-2stage-overlap-packgqa-pdl-512chunk");
    assert_eq!(selected("2x8x20,4096x256"), "hopper-64x64-2stage-overlap-pdl-512chunk");
    assert_eq!(
        selected("1x32/8x1,1024x128"),
        "ampere-16x64-2stage-swizzled-4kvwarps-ifchanged-packgqa-pdl-264persistent-64chunk"
    );
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
        ("hopper-128x48-2stage", "tiles of keys that are no multiple of 32", "take 32, 64, 96, 128 or 192 keys"),
        ("hopper-128x96-2stage-threshold", "-threshold", "weights beyond 2^8 do not fit e4m3; leave it out"),
        (
            "hopper-128x64-2stage-1level",
            "-1level with v_scale",
            "scales of tokens have no place there; leave -1level out",
        ),
    ] {
        assert_eq!(refused(name, &plain), [fp8(what, instead)], "{name}");
    }
    let dynamic = "hopper-128x64-2stage-persistent-dynamic";
    let instead = "its transposers do not hear of tiles from a counter; leave it out";
    let rectangular = Reason::Dynamic { config: config(dynamic) };
    assert_eq!(refused(dynamic, &plain), [fp8("-dynamic", instead), rectangular]);
    let dim = |argument| Reason::Dim { kernel: "hopper", argument, dim: 264, multiple: 16, most: 256 };
    let wide = refused(PLAIN, &bytes("1x1x100x264", "full", DType::E4m3, ""));
    assert_eq!(wide[..2], [dim("head_dim"), dim("value_dim")]);
    let long = &bytes("1x1x100x256", "full", DType::E4m3, "");
    let reasons = LaunchPlan::new(long, config("hopper-128x128-2stage"), Arch::Sm90a).expect_err("registers");
    assert!(matches!(&reasons[..], [Reason::Registers { limit: 208, .. }]), "{reasons:?}");
    let mut paged = bytes("1x1x100x64", "full", DType::E4m3, "");
    paged.paged = Some(PagedKv::new(8, 14, 14));
    assert_eq!(refused(PLAIN, &paged), [Reason::PageSize { page_size: 8 }]);
    (paged.paged, paged.leftpad_k) = (Some(PagedKv::new(16, 7, 7)), true);
    assert_eq!(refused(PLAIN, &paged), [Reason::PaddedPages]);
    let with_lse = bytes("1x1x100x64", "full", DType::E4m3, "").with_lse(true);
    let instead =
        "wgmma adds products of 8 bits with 13 bits, so that the LSE is off by 1e-3 and more; take an ampere config";
    assert_eq!(refused(PLAIN, &with_lse), [fp8("an LSE", instead)]);
    let half = Problem::new(1, 1, 100, 64, DType::F16);
    let one_level = "hopper-128x96-2stage-1level";
    assert_eq!(refused(one_level, &half), [Reason::OneLevel { config: config(one_level) }]);
}

/// The defaults from head dim 64 on, full, causal and paged, with all scales.
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
        if ![64, 128, 192, 256].contains(&head_dim) || kind == resources::Kind::Fp8QueryUnbiased {
            continue;
        }
        let row = resources::row(config, head_dim, kind, Arch::Sm90a).expect("it assembles");
        assert!(row.complaints.is_empty(), "{config} {head_dim} {kind:?}: {:?}", row.complaints);
        assembled += 1;
    }
    assert!(assembled >= 40, "{assembled}");
}
