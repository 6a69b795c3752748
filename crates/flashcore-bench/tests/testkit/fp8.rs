//! Keys and values of 8 bits under queries of 16, in the simulator: every code, every choice of the config, every feature,
//! scales of every form, ragged tails.

use flashcore_bench::testkit::simulate::simulate;
use flashcore_bench::testkit::verify::verify;
use flashcore_bench::testkit::{Backend, Case, Numbers, Planted};
use flashcore_ir::types::{Bf16x2, F16x2, U32};
use flashcore_ir::{Arch, Argument, Builder, Fp8};
use flashcore_kernels::primitives::{Fp8Target, Fp8Widener, Fp8Widening};
use flashcore_kernels::{LaunchPlan, Reason, Target, heuristics};
use flashcore_problem::{
    Alignment, DType, Inputs, Layout, Mask, PagedKv, Problem, Scale, ScaleStrides, SequenceLengths, Stress,
};
use flashcore_sim::{GlobalMemory, Launch, Options, launch};
use half::{bf16, f16};

use crate::support::{config, problem};

/// Seeds with scales of every form, of tokens, of sequences, of heads and of tensors, for keys and for values.
const SEEDS: [u64; 6] = [0, 2, 7, 12, 13, 16];

fn check_case(case: &Case) {
    let outcome = verify(case, None);
    assert!(outcome.passed(), "{case}: {:#?}", outcome.complaints());
}

fn check(name: &str, problem: &Problem, seed: u64) {
    check_case(&Case::new(problem.clone(), seed, Backend::Sim(config(name))));
}

/// A problem with an 8-bit cache and both scales; their form follows from the seed.
fn fp8(shape: &str, [query, cache]: [DType; 2], mask: &str) -> Problem {
    problem(shape, query, mask).with_kv_dtype(Some(cache)).with_k_scale(true).with_v_scale(true)
}

const TYPES: [[DType; 2]; 4] =
    [[DType::F16, DType::E4m3], [DType::Bf16, DType::E4m3], [DType::F16, DType::E5m2], [DType::Bf16, DType::E5m2]];

/// Every code in every byte of a word, widened by a warp: as `DType::decode` has it.
fn check_codes<T: Fp8Target>(from: Fp8, way: Fp8Widening, decode: impl Fn(u16) -> f32) {
    let pairs = [[0, 1], [2, 3], [0, 2], [1, 3]];
    let mut builder = Builder::new("widen", 256);
    let k = &mut builder;
    let (source, target) = (k.parameter::<flashcore_ir::types::U64>("s"), k.parameter::<flashcore_ir::types::U64>("t"));
    let thread = k.special(flashcore_ir::SpecialRegister::ThreadX);
    let from_word = k.mad_wide(thread, 4u32, source);
    let word = k.load_one::<U32>(from_word);
    let widener = Fp8Widener::<T>::new(k, from, way);
    let words: Vec<_> = pairs
        .iter()
        .map(|bytes| {
            let pair = widener.widen(k, word, *bytes);
            k.reinterpret::<T, U32>(pair)
        })
        .collect();
    let to = k.mad_wide(thread, 16u32, target);
    k.store(to, &words);
    let kernel = builder.finish().verify(if way == Fp8Widening::Integer { Arch::Sm80 } else { Arch::Sm89 });
    let kernel = kernel.unwrap_or_else(|errors| panic!("{errors:#?}"));
    let mut memory = GlobalMemory::new();
    // The bytes of a word differ, and each takes every code.
    let codes = |thread: u8| [thread, thread.wrapping_mul(3), !thread, thread.wrapping_mul(5).wrapping_add(7)];
    let words: Vec<u8> = (0..=255).flat_map(codes).collect();
    let source = memory.allocate("codes", &words);
    let target = memory.allocate_uninitialised("pairs", 256 * 16);
    let arguments = vec![Argument::U64(source), Argument::U64(target)];
    launch(&kernel, &Launch { grid: [1, 1, 1], arguments }, &memory, &Options::default()).expect("it runs");
    let results = memory.read(target);
    let dtype = if from == Fp8::E4m3 { DType::E4m3 } else { DType::E5m2 };
    for thread in 0..=255_u8 {
        for (index, bytes) in pairs.iter().enumerate() {
            for (half, byte) in bytes.iter().enumerate() {
                let at = usize::from(thread) * 16 + index * 4 + half * 2;
                let actual = decode(u16::from_le_bytes([results[at], results[at + 1]]));
                let code = codes(thread)[*byte as usize];
                let expected = dtype.decode(&[code]) as f32;
                let is_same = actual.to_bits() == expected.to_bits() || actual.is_nan() && expected.is_nan();
                assert!(is_same, "{dtype} {code:#04x} by {way:?} is {actual}, not {expected}");
            }
        }
    }
}

#[test]
fn every_code_is_widened_exactly() {
    for from in [Fp8::E4m3, Fp8::E5m2] {
        for way in [Fp8Widening::Integer, Fp8Widening::Convert] {
            check_codes::<F16x2>(from, way, |bits| f16::from_bits(bits).to_f32());
            check_codes::<Bf16x2>(from, way, |bits| bf16::from_bits(bits).to_f32());
        }
    }
}

/// Several tiles with tails, groups of heads, masks, and dims that are no multiple of a panel, of every type.
#[test]
fn every_layout_of_shared_memory() {
    for (number, name) in [
        "ampere",
        "ampere-64x64-2stage-swizzled-cvt",
        "ampere-128x64-2stage-swizzled-32rows-qshared-ifchanged",
        "ampere-32x128-2stage-padded-2kvwarps-load4",
        "ampere-64x16-3stage-plain-qshared-threshold-1producer",
        "ampere-64x32-1stage-swizzled-load8",
        "ampere-64x32-3stage-swizzled-2producers",
        "ampere-64x64-2stage-swizzled-5persistent",
    ]
    .into_iter()
    .enumerate()
    {
        for (index, types) in TYPES.into_iter().enumerate() {
            let seed = (number * TYPES.len() + index) as u64;
            check(name, &fp8("1x2/1x65,209x64", types, "causal"), seed);
            check(name, &fp8("1x1x17,150x48,80", types, "window:20,3"), seed);
        }
    }
    check("ampere", &fp8("1x1x5,0x64", TYPES[0], "full"), 1);
    check("ampere", &fp8("1x2x33,200x16", TYPES[0], "full"), 1);
    check("ampere-64x64-2stage-swizzled", &fp8("1x2x33,200x128", TYPES[1], "causal"), 2);
    check("ampere-128x32-2stage-swizzled-qshared", &fp8("1x1x33,100x256", TYPES[1], "causal"), 3);
    check("ampere-64x64-2stage-swizzled", &fp8("1x1x33,200x96,144", TYPES[2], "full"), 4);
}

/// Scales of the whole tensor, of heads, of sequences and of tokens, and none.
#[test]
fn every_form_of_scale() {
    for seed in SEEDS {
        let mut problem = fp8("3x4/2x17,209x32", TYPES[seed as usize % 4], "causal");
        problem.seqused_k = seed % 2 == 0;
        check("ampere-64x64-2stage-swizzled", &problem, seed);
        check("ampere-64x64-2stage-swizzled", &problem.clone().with_k_scale(false), seed);
        check("ampere-64x64-2stage-swizzled", &problem.clone().with_v_scale(false), seed);
        check("ampere-64x64-2stage-swizzled", &problem.with_k_scale(false).with_v_scale(false), seed);
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
        for seed in SEEDS {
            let types = TYPES[(number + seed as usize) % 4];
            check(splits, &fp8("2x4/2x5,309x64,48", types, "causal"), seed);
        }
    }
}

#[test]
fn every_feature() {
    for seed in SEEDS {
        let mut everything = fp8("2x4/2x33,209x48,32", TYPES[seed as usize % 4], "window:60,20");
        (everything.softcap, everything.alibi, everything.bias, everything.sinks) = (Some(5.0), true, true, true);
        (everything.seqused_k, everything.scale) = (true, -0.3);
        check("ampere-64x32-2stage-swizzled-qshared", &everything, seed);
    }
}

/// Pages, packed and padded sequences, batches of the cache: the scale of a token lies like the token.
#[test]
fn sequences() {
    for seed in 0..12 {
        for page_size in [16, 12] {
            let types = TYPES[seed as usize % 4];
            let mut paged = fp8("3x4/2x3,309x64", types, "causal").with_layout(Layout::Bshd);
            (paged.seqused_k, paged.paged) = (true, Some(PagedKv::new(page_size, 90, 30)));
            paged.kv_batch = (seed % 3 == 0).then_some(4);
            paged.leftpad_k = seed % 4 == 1;
            let name = "ampere-16x64-3stage-swizzled-4kvwarps-packgqa-3persistent-128chunk";
            for lengths in [SequenceLengths::Ragged, SequenceLengths::OneLong] {
                check_case(&Case { lengths, ..Case::new(paged.clone(), seed, Backend::Sim(config(name))) });
            }
            let numbers = Numbers::Planted(Planted::Unattended);
            check_case(&Case { numbers, ..Case::new(paged.clone(), seed, Backend::Sim(config(name))) });
        }
        let mut packed = fp8("3x4/2x40,150x32", TYPES[seed as usize % 4], "window:30,0").with_layout(Layout::Bshd);
        (packed.total_q, packed.total_k) = (Some(100), Some(310));
        check("ampere-64x32-2stage-swizzled", &packed, seed);
    }
}

/// NaN and infinities in keys and values that no row attends, and stress.
#[test]
fn numbers() {
    for seed in SEEDS {
        let mut masked = fp8("3x4/2x17,170x32", TYPES[seed as usize % 4], "window:9,3");
        masked.seqused_k = true;
        let numbers = Numbers::Planted(Planted::Unattended);
        check_case(&Case { numbers, ..Case::new(masked, seed, Backend::Sim(config("ampere-64x32-2stage-swizzled"))) });
    }
    for stress in Stress::ALL {
        for types in TYPES {
            let problem = fp8("1x2x33,209x32", types, "causal");
            let case = Case::new(problem, 1, Backend::Sim(config("ampere")));
            check_case(&Case { numbers: Some(stress).into(), ..case });
        }
    }
}

/// Scales that are powers of each other's tenth, up to far from 1: weights keep their bits.
#[test]
fn scales_far_from_one() {
    for (number, magnitude) in [1e-6_f32, 1e-3, 1e4].into_iter().enumerate() {
        let problem = fp8("1x2x17,209x32", TYPES[number % 2], "causal");
        let mut inputs = Inputs::random(&problem, 5);
        for (index, scale) in [&mut inputs.k_scale, &mut inputs.v_scale].into_iter().enumerate() {
            let strides = ScaleStrides { batch: 418, row: 2, key_head: 1, ..ScaleStrides::TENSOR };
            let factor = if index == 0 { 1.0 } else { magnitude };
            let data = (0..418).map(|token| factor * (1.0 + token as f32 % 7.0 / 3.0)).collect();
            *scale = Some(Scale { data, strides });
        }
        let plan = LaunchPlan::new(&problem, config("ampere-64x64-2stage-swizzled"), Arch::Sm80).expect("a plan");
        let simulated = simulate(&plan, &problem, &inputs, 0).expect("it runs").outputs;
        let expected = flashcore_problem::oracle(&problem, &inputs).expect("valid");
        let actual = simulated.output.dense(problem.output_shape(), problem.strides().output);
        let largest = expected.output.iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
        for (actual, expected) in actual.iter().zip(&expected.output) {
            assert!((actual - expected).abs() <= 0.01 * largest, "{actual} is not {expected} of {largest}");
        }
    }
}

/// Scales of values that grow along the keys, the first token's far smaller than the others, and scales that fall: no
/// product of a weight and a scale overflows, and none loses its bits. Rows of a tile attend different keys.
#[test]
fn value_scales_far_from_each_other() {
    for planted in [Planted::GrowingScales, Planted::FallingScales] {
        for (number, name) in [
            "ampere-64x32-2stage-swizzled",
            "ampere-64x32-2stage-swizzled-qshared-threshold",
            "ampere-128x64-2stage-swizzled-32rows-qshared-ifchanged",
            "ampere-32x128-2stage-padded-2kvwarps",
            "ampere-64x64-2stage-swizzled-3splits",
            "ampere-64x32-2stage-swizzled-cluster-2splits",
            "ampere-16x64-3stage-swizzled-4kvwarps-packgqa-3persistent-128chunk",
        ]
        .into_iter()
        .enumerate()
        {
            let (numbers, backend) = (Numbers::Planted(planted), Backend::Sim(config(name)));
            let types = [[DType::F16, DType::E4m3], [DType::F16, DType::E5m2]][number % 2];
            for mask in ["full", "causal", "window:50,3"] {
                let problem = fp8("2x4/2x33,309x64,48", types, mask);
                check_case(&Case { numbers, ..Case::new(problem, number as u64, backend) });
            }
            let mut paged = fp8("3x4/2x3,309x64", types, "causal").with_layout(Layout::Bshd);
            (paged.seqused_k, paged.paged) = (true, Some(PagedKv::new(16, 90, 30)));
            check_case(&Case { numbers, ..Case::new(paged, number as u64, backend) });
        }
        let case = Case::new(fp8("1x2x33,309x64", TYPES[1], "causal"), 1, Backend::Sim(config("ampere")));
        check_case(&Case { numbers: Numbers::Planted(planted), ..case });
    }
}

/// The scale of a value changes no bit of the rows that do not attend it, whatever it does to others of their tile. Each
/// column of the output is that of three keys, and weights differ by far, so that the least shows its bits.
#[test]
fn scales_of_values_reach_the_rows_that_attend_them() {
    let problem = problem("1x1x90,90x32", DType::F16, "causal").with_kv_dtype(Some(DType::E4m3)).with_v_scale(true);
    let rows = |changed: usize, scale: f32| {
        let mut inputs = Inputs::random(&problem, 3);
        for index in 0..inputs.query.data.len() / 2 {
            inputs.query.set(index, inputs.query.get(index) * 8.0);
        }
        for index in (0..90 * 32).filter(|index| index % 32 != index / 32 % 32) {
            inputs.value.set(index, 0.0);
        }
        // Products of the second block are larger than those of the first, and not by so much that a power grows.
        let mut data: Vec<f32> = (0..90).map(|key| if key < 32 { 192.0 } else { 15e3 }).collect();
        data[changed] = scale;
        inputs.v_scale = Some(Scale { data, strides: ScaleStrides { row: 1, ..ScaleStrides::TENSOR } });
        let plan = LaunchPlan::new(&problem, config("ampere-64x32-2stage-swizzled"), Arch::Sm80).expect("a plan");
        let output = simulate(&plan, &problem, &inputs, 0).expect("it runs").outputs.output;
        let dense = output.dense(problem.output_shape(), problem.strides().output);
        dense.chunks(32).map(<[f64]>::to_vec).collect::<Vec<_>>()
    };
    for key in [33, 38, 40] {
        let (ordinary, large, huge) = (rows(key, 15e3), rows(key, 1e9), rows(key, 1e30));
        assert_eq!(ordinary[..key], large[..key]);
        assert_eq!(ordinary[..key], huge[..key]);
        assert!(ordinary[key..].iter().zip(&large[key..]).any(|(ordinary, large)| ordinary != large));
    }
}

/// A NaN code in a key makes the rows NaN that attend it, and no others; one in a value its column of the output.
#[test]
fn nan_codes_reach_the_rows_that_attend_them() {
    for types in TYPES {
        for (way, of_value) in [("", false), ("", true), ("-cvt", false), ("-cvt", true)] {
            let (name, mask) = (format!("ampere-64x32-2stage-swizzled{way}"), if of_value { "full" } else { "causal" });
            let problem = problem("1x1x90,90x32", types[0], mask).with_kv_dtype(Some(types[1]));
            let mut inputs = Inputs::random(&problem, 3);
            let tensor = if of_value { &mut inputs.value } else { &mut inputs.key };
            tensor.data[40 * 32 + 5] = 0xff;
            let plan = LaunchPlan::new(&problem, config(&name), Arch::Sm89).expect("a plan");
            let outputs = simulate(&plan, &problem, &inputs, 0).expect("it runs").outputs.output;
            let dense = outputs.dense(problem.output_shape(), problem.strides().output);
            for (index, value) in dense.iter().enumerate() {
                let (row, column) = (index / 32, index % 32);
                let is_nan = if of_value { column == 5 } else { row >= 40 };
                assert_eq!(value.is_nan(), is_nan, "{types:?} row {row} column {column} is {value}");
            }
        }
    }
}

/// As many products as with 16 bits, half the bytes of keys and values, and no bank conflict among their loads.
#[test]
fn counters() {
    for dim in ["64", "128"] {
        let counters = |cache: Option<DType>, name: &str| {
            let problem = problem(&format!("1x1x64,256x{dim}"), DType::F16, "full").with_kv_dtype(cache);
            let plan = LaunchPlan::new(&problem, config(name), Arch::Sm80).expect("a plan");
            simulate(&plan, &problem, &Inputs::random(&problem, 1), 0).expect("it runs").counters
        };
        for name in ["ampere-64x64-2stage-swizzled", "ampere-64x64-2stage-padded"] {
            let (wide, narrow) = (counters(None, name), counters(Some(DType::E4m3), name));
            assert_eq!(wide.mma, narrow.mma, "{name}");
            assert_eq!(narrow.load_matrix.transactions, narrow.load_matrix.requests, "{name}");
            if name.ends_with("swizzled") {
                assert_eq!(narrow.copy_async_writes.transactions, narrow.copy_async_writes.requests, "{name}");
            }
            // The query takes `ldmatrix` with 16 bits, and other loads with 8: 4 warps, 4 matrices for each 16 columns.
            let query = 4 * 4 * dim.parse::<u64>().expect("a number") / 16;
            assert_eq!(2 * narrow.load_matrix.requests, wide.load_matrix.requests - query, "{name}");
        }
    }
}

/// Problems that no kernel takes are refused with what to do.
#[test]
fn refusals() {
    let reasons = |problem: &Problem, name: &str| {
        LaunchPlan::new(problem, config(name), Arch::Sm80).expect_err("refused").remove(0).to_string()
    };
    let cache = fp8("1x2x33,100x64", TYPES[0], "full");
    assert_eq!(
        reasons(&cache, "scalar"),
        "the scalar kernel has no f16 kv e4m3: take an ampere config for keys and values of 8 bits under f16 or bf16, or from sm_89 on under e4m3, and the CPU for other types"
    );
    assert!(reasons(&cache, "ampere-64x64-2stage-swizzled-f16sums").ends_with("leave -f16sums out"));
    assert!(reasons(&cache, "ampere-64x64-2stage-swizzled-cvt").ends_with("sm_80 does not have: leave -cvt out"));
    let narrow = fp8("1x2x33,100x40", TYPES[0], "full");
    assert!(matches!(
        LaunchPlan::new(&narrow, config("ampere"), Arch::Sm80).expect_err("refused")[..],
        [Reason::Dim { dim: 40, multiple: 16, .. }, Reason::Dim { .. }]
    ));
    let mut odd = fp8("1x2x33,100x32", TYPES[0], "full");
    let mut strides = odd.strides();
    strides.key.row += 1;
    strides.key.head += 100;
    odd.layout = Layout::Strided(strides);
    assert!(reasons(&odd, "ampere").ends_with("keys and values of 8 bits take multiples of 2: pad the strides"));
}

/// Every problem with a cache of 8 bits gets a config that takes it, with the way of the architecture to widen codes.
#[test]
fn defaults() {
    for arch in [Arch::Sm80, Arch::Sm86, Arch::Sm89, Arch::Sm90, Arch::Sm90a, Arch::Sm120] {
        let target = Target::new(arch, 108);
        for types in TYPES {
            for dim in [16, 64, 80, 128, 192, 256] {
                for (queries, keys) in [(1, 4096), (7, 300), (33, 33), (2048, 2048)] {
                    let mut problem = Problem::new(2, 8, queries, dim, types[0]).with_key_length(keys);
                    (problem.kv_dtype, problem.key_heads) = (Some(types[1]), 2);
                    (problem.k_scale, problem.v_scale) = (true, true);
                    let mut paged =
                        problem.clone().with_seqused_k(true).with_mask(Mask::Causal(Alignment::BottomRight));
                    paged.paged = Some(PagedKv::new(16, 600, 300));
                    let biased = problem.clone().with_bias(true);
                    for problem in [problem, paged, biased] {
                        let config = heuristics::select(&problem, target);
                        let plan = LaunchPlan::new(&problem, config, target);
                        assert!(plan.is_ok(), "{arch} {problem}: {config} {:?}", plan.err());
                        let converts = types != [DType::F16, DType::E5m2] && arch.compute() >= 89;
                        assert_eq!(config.to_string().contains("-cvt"), converts, "{arch} {config}");
                    }
                }
            }
        }
    }
}
