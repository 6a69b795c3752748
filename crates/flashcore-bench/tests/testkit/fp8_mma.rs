//! Query, key and value of 8 bits by `mma.sync`, in the simulator: every feature, ragged tails, scales of every form, two levels
//! of accumulation, and ptxas.

use flashcore_bench::testkit::resources::{self, Kind};
use flashcore_bench::testkit::simulate::{simulate, simulate_with_sums};
use flashcore_bench::testkit::verify::verify;
use flashcore_bench::testkit::{Backend, Case, Numbers, Planted};
use flashcore_ir::Arch;
use flashcore_kernels::{Config, LaunchPlan, Target, heuristics};
use flashcore_problem::{Alignment, DType, Inputs, Layout, Mask, PagedKv, Problem, SequenceLengths};
use flashcore_ptx::ptxas;
use flashcore_sim::TensorSum;

use crate::support::{config, problem};

/// Three tiles of keys and more in small problems.
const SMALL: &str = "ampere-64x32-2stage-swizzled";

/// A problem of 8 bits with an LSE, and the scales that are named: `q`, `k` and `v`.
fn bytes(shape: &str, mask: &str, kv_dtype: DType, scales: &str) -> Problem {
    let mut problem = problem(shape, DType::E4m3, mask).with_lse(true);
    (problem.kv_dtype, problem.out_dtype) = (Some(kv_dtype), Some(DType::Bf16));
    [problem.q_scale, problem.k_scale, problem.v_scale] = ["q", "k", "v"].map(|scale| scales.contains(scale));
    problem
}

fn check(name: &str, problem: &Problem) {
    check_seed(name, problem, 7);
}

fn check_seed(name: &str, problem: &Problem, seed: u64) {
    check_case(&Case::new(problem.clone(), seed, Backend::Sim(config(name))));
}

fn check_case(case: &Case) {
    let outcome = verify(case, None);
    assert!(outcome.passed(), "{case}: {:#?}", outcome.complaints());
}

#[test]
fn both_types_masks_and_tails() {
    check(SMALL, &bytes("1x2/1x97,203x128", "full", DType::E4m3, ""));
    check(SMALL, &bytes("1x2/1x130,313x64", "causal", DType::E5m2, ""));
    check(SMALL, &bytes("2x2x65,109x32,48", "window:40,5", DType::E4m3, "qkv"));
    check(SMALL, &bytes("1x1x17,140x16,112", "full", DType::E5m2, "k"));
    check(SMALL, &bytes("1x1x17,140x112,16", "causal", DType::E4m3, "q"));
    check(SMALL, &bytes("1x1x5,0x64", "full", DType::E4m3, "qkv"));
    check(SMALL, &bytes("1x2x33,100x80", "full", DType::E4m3, "v").with_out_dtype(Some(DType::F16)));
}

#[test]
fn every_layout_of_shared_memory() {
    for (number, name) in [
        "ampere",
        "ampere-64x64-2stage-swizzled-ifchanged",
        "ampere-128x32-2stage-swizzled-32rows-qshared-ifchanged",
        "ampere-32x128-2stage-padded-2kvwarps-load4",
        "ampere-64x16-3stage-plain-qshared-1producer",
        "ampere-64x48-1stage-swizzled-load8",
        "ampere-64x32-3stage-swizzled-2producers",
        "ampere-64x64-2stage-swizzled-5persistent",
    ]
    .into_iter()
    .enumerate()
    {
        let kv_dtype = DType::FLOAT8[number % 2];
        check_seed(name, &bytes("1x2/1x165,209x64", "causal", kv_dtype, "qkv"), number as u64);
        check_seed(name, &bytes("1x1x17,150x48,80", "window:20,3", kv_dtype, "qkv"), number as u64 + 1);
        check_seed(name, &bytes("1x1x70,0x48,80", "full", kv_dtype, "qkv"), number as u64 + 1);
    }
}

/// Heads that the Hopper kernel does not have.
#[test]
fn wide_heads() {
    for (dim, name) in [
        (192, "ampere-128x32-2stage-swizzled-qshared-ifchanged"),
        (256, "ampere-64x16-2stage-swizzled-qshared-ifchanged"),
        (208, "ampere-64x16-2stage-swizzled-qshared-ifchanged"),
        (144, "ampere-32x64-2stage-padded-2kvwarps-ifchanged"),
    ] {
        check(name, &bytes(&format!("1x2/1x33,109x{dim}"), "causal", DType::E4m3, "qkv"));
    }
}

/// Seeds give scales of the tensor, of heads, of sequences and of tokens.
#[test]
fn scales_of_every_form() {
    for seed in 0..12 {
        check_seed(SMALL, &bytes("2x4/2x33,109x32", "causal", DType::E4m3, "qkv"), seed);
        let name = "ampere-64x32-2stage-swizzled-ifchanged-packgqa";
        check_seed(name, &bytes("2x6/2x33,109x32", "causal", DType::E5m2, "qkv"), seed);
    }
}

/// Scales of values that grow along the keys, and scales that fall: no product of a weight and a scale leaves e4m3, and the
/// output has the unit of its row.
#[test]
fn value_scales_far_from_each_other() {
    for planted in [Planted::GrowingScales, Planted::FallingScales] {
        for (number, name) in [
            SMALL,
            "ampere-64x32-2stage-swizzled-qshared-ifchanged",
            "ampere-32x128-2stage-padded-2kvwarps",
            "ampere-64x64-2stage-swizzled-3splits",
            "ampere-64x32-2stage-swizzled-cluster-2splits",
            "ampere-16x64-3stage-swizzled-4kvwarps-packgqa-3persistent-128chunk",
        ]
        .into_iter()
        .enumerate()
        {
            let (numbers, backend) = (Numbers::Planted(planted), Backend::Sim(config(name)));
            for mask in ["full", "causal", "window:50,3"] {
                let problem = bytes("2x4/2x33,309x64,48", mask, DType::FLOAT8[number % 2], "qkv");
                check_case(&Case { numbers, ..Case::new(problem, number as u64, backend) });
            }
        }
    }
}

#[test]
fn every_split() {
    for (number, splits) in [
        "ampere-16x64-3stage-swizzled-4kvwarps-packgqa-3persistent-128chunk",
        "ampere-16x64-3stage-swizzled-4kvwarps-packgqa-pdl-3persistent-64chunk",
        "ampere-64x64-2stage-swizzled-3splits",
        "ampere-16x64-2stage-swizzled-4kvwarps-packgqa-cluster-4splits",
        "ampere-64x32-2stage-swizzled-cluster-2splits",
        "ampere-64x32-4stage-swizzled-7persistent-64chunk",
    ]
    .into_iter()
    .enumerate()
    {
        for seed in 0..4 {
            let kv_dtype = DType::FLOAT8[(number + seed) % 2];
            check_seed(splits, &bytes("2x4/2x5,309x64,48", "causal", kv_dtype, "qkv"), seed as u64);
        }
    }
}

#[test]
fn every_feature() {
    for seed in 0..4 {
        let mut everything = bytes("2x4/2x33,209x48,32", "window:60,20", DType::FLOAT8[seed as usize % 2], "qkv");
        (everything.softcap, everything.alibi, everything.bias, everything.sinks) = (Some(5.0), true, true, true);
        (everything.seqused_k, everything.scale) = (true, -0.3);
        check_seed("ampere-64x32-2stage-swizzled-qshared", &everything, seed);
    }
}

/// Pages, packed and padded sequences, batches of the cache: the scale of a token lies like the token.
#[test]
fn sequences() {
    for seed in 0..6 {
        let kv_dtype = DType::FLOAT8[seed as usize % 2];
        for page_size in [16, 12] {
            let mut paged = bytes("3x4/2x3,309x64", "causal", kv_dtype, "qkv").with_layout(Layout::Bshd);
            (paged.seqused_k, paged.paged) = (true, Some(PagedKv::new(page_size, 90, 30)));
            paged.kv_batch = (seed % 3 == 0).then_some(4);
            paged.leftpad_k = seed % 4 == 1;
            let backend = Backend::Sim(config("ampere-16x64-3stage-swizzled-4kvwarps-packgqa-3persistent-128chunk"));
            let lengths = [SequenceLengths::Ragged, SequenceLengths::OneLong][seed as usize % 2];
            check_case(&Case { lengths, ..Case::new(paged.clone(), seed, backend) });
            let numbers = Numbers::Planted(Planted::Unattended);
            check_case(&Case { numbers, ..Case::new(paged.clone(), seed, backend) });
        }
        let mut packed = bytes("3x4/2x40,150x32", "window:30,0", kv_dtype, "qkv").with_layout(Layout::Bshd);
        (packed.total_q, packed.total_k) = (Some(100), Some(310));
        check_seed(SMALL, &packed, seed);
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
            check_case(&Case { numbers, ..Case::new(problem.clone(), seed, Backend::Sim(config(SMALL))) });
        }
    }
}

/// A NaN code in a key makes the rows NaN that attend it, and no others; one in a value its column of the output.
#[test]
fn nan_codes_reach_the_rows_that_attend_them() {
    for (kv_dtype, of_value) in [(DType::E4m3, false), (DType::E4m3, true), (DType::E5m2, false), (DType::E5m2, true)] {
        let problem = bytes("1x1x90,90x32", if of_value { "full" } else { "causal" }, kv_dtype, "");
        let mut inputs = Inputs::random(&problem, 3);
        let tensor = if of_value { &mut inputs.value } else { &mut inputs.key };
        tensor.data[40 * 32 + 5] = 0xff;
        let plan = LaunchPlan::new(&problem, config(SMALL), Arch::Sm89).expect("a plan");
        let outputs = simulate(&plan, &problem, &inputs, 0).expect("it runs").outputs.output;
        let dense = outputs.dense(problem.output_shape(), problem.strides().output);
        for (index, value) in dense.iter().enumerate() {
            let (row, column) = (index / 32, index % 32);
            let is_nan = if of_value { column == 5 } else { row >= 40 };
            assert_eq!(value.is_nan(), is_nan, "{kv_dtype} row {row} column {column} is {value}");
        }
    }
}

/// Where tensor cores keep 13 bits of their sums, two levels keep what is small beside the sum over all keys.
#[test]
fn two_levels_keep_small_products() {
    let problem = bytes("1x1x16,4096x32", "full", DType::E4m3, "");
    let mut inputs = Inputs::random(&problem, 3);
    for index in 0..4096 * 32 {
        inputs.value.set(index, 1.0);
    }
    for name in ["ampere-64x64-2stage-swizzled", "ampere-64x64-2stage-swizzled-ifchanged"] {
        // All values are 1, so what is missing from 1 is the bias of the sums.
        let plan = LaunchPlan::new(&problem, config(name), Arch::Sm89).expect("a plan");
        let simulated = simulate_with_sums(&plan, &problem, &inputs, 0, Some(TensorSum::H200)).expect("it runs");
        let dense = simulated.outputs.output.dense(problem.output_shape(), problem.strides().output);
        let error = dense.iter().map(|value| 1.0 - value).sum::<f64>() / dense.len() as f64;
        assert!(error.abs() < 0.004, "{name}: {error}");
    }
}

/// Half the products of 16 bits, and no bank conflict.
#[test]
fn counters() {
    for dim in ["64", "128", "256"] {
        let counters = |problem: &Problem| {
            let name = "ampere-64x32-2stage-swizzled-qshared-ifchanged";
            let plan = LaunchPlan::new(problem, config(name), Arch::Sm89).expect("a plan");
            simulate(&plan, problem, &Inputs::random(problem, 1), 0).expect("it runs").counters
        };
        let shape = format!("1x1x64,256x{dim}");
        let narrow = counters(&bytes(&shape, "full", DType::E4m3, ""));
        let wide = counters(&problem(&shape, DType::F16, "full"));
        assert_eq!(2 * narrow.mma, wide.mma);
        assert_eq!(2 * narrow.load_matrix.requests, wide.load_matrix.requests);
        assert_eq!(narrow.load_matrix.transactions, narrow.load_matrix.requests);
        assert_eq!(narrow.copy_async_writes.transactions, narrow.copy_async_writes.requests);
    }
}

/// Every problem gets a config that takes it, from `sm_89` on; below, the reason says what to do.
#[test]
fn defaults() {
    for arch in [Arch::Sm89, Arch::Sm90, Arch::Sm90a, Arch::Sm120, Arch::Sm80] {
        let target = Target::new(arch, 58);
        for dim in [16, 64, 80, 128, 192, 256] {
            for (queries, keys) in [(1, 4096), (7, 300), (33, 33), (2048, 2048)] {
                let mut problem = Problem::new(2, 8, queries, dim, DType::E4m3).with_key_length(keys);
                (problem.out_dtype, problem.key_heads) = (Some(DType::Bf16), 2);
                (problem.q_scale, problem.k_scale, problem.v_scale) = (true, true, true);
                let mut paged = problem.clone().with_seqused_k(true).with_mask(Mask::Causal(Alignment::BottomRight));
                paged.paged = Some(PagedKv::new(16, 600, 300));
                let biased = problem.clone().with_bias(true);
                for problem in [problem, paged, biased] {
                    let config = heuristics::select(&problem, target);
                    let plan = LaunchPlan::new(&problem, config, target);
                    if arch == Arch::Sm80 {
                        let reasons = plan.expect_err("sm_80 has no such products");
                        let expected = "sm_80 has no tensor cores for 8-bit floats, which begin with sm_89: take a query of f16 or bf16 over the same keys and values, or the CPU";
                        assert_eq!(reasons[0].to_string(), expected);
                        continue;
                    }
                    assert!(plan.is_ok(), "{arch} {problem}: {config} {:?}", plan.err());
                }
            }
        }
    }
}

#[test]
fn what_is_refused_says_what_to_do() {
    let reasons = |problem: &Problem, name: &str| {
        LaunchPlan::new(problem, config(name), Arch::Sm89).expect_err("refused").remove(0).to_string()
    };
    let plain = bytes("1x2x33,100x64", "full", DType::E4m3, "");
    let threshold = "ampere-64x64-2stage-swizzled-threshold";
    assert_eq!(
        reasons(&plain, threshold),
        format!("{threshold} lets weights grow beyond 2^8, which e4m3 has no room for: leave -threshold out")
    );
    assert!(reasons(&plain, "ampere-64x64-2stage-swizzled-f16sums").ends_with("leave -f16sums out"));
    assert_eq!(
        reasons(&plain, "scalar"),
        "the scalar kernel has no e4m3 out bf16: take an ampere config for keys and values of 8 bits under f16 or bf16, or from sm_89 on under e4m3, and the CPU for other types"
    );
    assert!(reasons(&bytes("1x1x33,100x40", "full", DType::E4m3, ""), "ampere").ends_with("multiples of 16 up to 256"));
}

/// The defaults at head dims 64, 128 and 256, with all scales.
#[test]
#[expect(clippy::print_stderr, reason = "a test that checks less than usual says so")]
fn ptxas_needs_no_spills() {
    if let Err(reason) = ptxas::find() {
        return eprintln!("not assembled: {reason}");
    }
    for arch in [Arch::Sm89, Arch::Sm120] {
        let mut assembled = 0;
        for (config, head_dim, kind) in resources::fp8_mma_kernels(true, arch) {
            if ![64, 128, 256].contains(&head_dim) || kind == Kind::Fp8QueryUnbiased {
                continue;
            }
            let row = resources::row(config, head_dim, kind, arch).expect("it assembles");
            assert!(row.complaints.is_empty(), "{arch} {config} {head_dim} {kind:?}: {:?}", row.complaints);
            assembled += 1;
        }
        assert!(assembled >= 40, "{assembled}");
    }
}

/// Suites draw these configs, and each takes some problem of 8 bits.
#[test]
fn every_listed_config_takes_bytes() {
    let problem = bytes("1x2/1x65,209x64", "causal", DType::E4m3, "qkv");
    for config in Config::fp8_mma() {
        LaunchPlan::new(&problem, config, Arch::Sm90).unwrap_or_else(|reasons| panic!("{config}: {}", reasons[0]));
    }
}
