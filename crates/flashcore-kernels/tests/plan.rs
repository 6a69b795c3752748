//! Launch plans: the problems that kernels take, the reasons for those they refuse, and the names of configs.

use std::collections::HashSet;

use flashcore_ir::Arch;
use flashcore_kernels::heuristics::{search_space, select};
use flashcore_kernels::primitives::SharedLayout;
use flashcore_kernels::{AmpereConfig, Config, LaunchPlan, Reason, Specialization, Stage, Target};
use flashcore_problem::{Alignment, DType, Layout, Mask, MaskMod, Problem, ScoreMod, Strides, TensorStrides};

fn check(change: impl FnOnce(&mut Problem), expected: &[Reason]) {
    let mut problem = Problem::new(1, 8, 512, 64, DType::F16);
    change(&mut problem);
    match LaunchPlan::new(&problem, Config::ampere(), Arch::Sm80) {
        Ok(_) => assert!(expected.is_empty(), "a plan where there should be {expected:?}"),
        Err(reasons) => assert_eq!(reasons, expected),
    }
}

const KERNEL: &str = "ampere";

#[test]
fn a_problem_that_fits_has_a_plan() {
    check(|_| {}, &[]);
    check(|problem| problem.mask = Mask::Causal(Alignment::TopLeft), &[]);
    check(|problem| problem.key_heads = 2, &[]);
    check(|problem| problem.layout = Layout::Bshd, &[]);
}

#[test]
fn each_thing_a_kernel_lacks_is_a_reason() {
    let has: &[DType] = &[DType::F16, DType::Bf16, DType::E4m3];
    check(|problem| problem.dtype = DType::F64, &[Reason::DType { kernel: KERNEL, dtype: DType::F64, has }]);
    check(|problem| problem.dtype = DType::F32, &[Reason::Tf32 { config: Config::ampere() }]);
    let dim = |argument, dim| Reason::Dim { kernel: KERNEL, argument, dim, multiple: 8, most: 256 };
    check(|problem| problem.head_dim = 81, &[dim("head_dim", 81)]);
    check(|problem| problem.value_dim = 264, &[dim("value_dim", 264)]);
    check(|problem| problem.batch = 70_000, &[Reason::Grid { argument: "batch", value: 70_000, limit: 65_535 }]);
    check(|problem| problem.query_length = 0, &[Reason::Empty]);
    assert_eq!(dim("head_dim", 81).to_string(), "head_dim is 81; the ampere kernel takes multiples of 8 up to 256");
}

#[test]
fn every_feature_has_a_plan() {
    check(|problem| problem.softcap = Some(30.0), &[]);
    check(|problem| (problem.alibi, problem.bias, problem.sinks, problem.seqused_k) = (true, true, true, true), &[]);
    check(|problem| problem.scale = -1.0, &[]);
    check(|problem| (problem.head_dim, problem.value_dim) = (80, 32), &[]);
    let window = Mask::Window { left: Some(3), right: None, alignment: Alignment::TopLeft };
    check(|problem| problem.mask = window, &[]);
}

#[test]
fn all_reasons_come_at_once() {
    check(
        |problem| (problem.head_dim, problem.value_dim) = (7, 300),
        &[("head_dim", 7), ("value_dim", 300)].map(|(argument, dim)| Reason::Dim {
            kernel: KERNEL,
            argument,
            dim,
            multiple: 8,
            most: 256,
        }),
    );
}

#[test]
fn rows_may_start_anywhere() {
    for row in [72, 68, 66, 65] {
        let strides = Strides { batch: 8 * 512 * row, head: 512 * row, row };
        let all = TensorStrides { query: strides, key: strides, value: strides, output: strides };
        check(|problem| problem.layout = Layout::Strided(all), &[]);
        let mut problem = Problem::new(1, 8, 512, 64, DType::F16);
        problem.layout = Layout::Strided(all);
        let width = Specialization::of(&problem).vec_bytes as usize;
        assert_eq!(row * 2 % (2 * width), if width == 16 { 144 % 32 } else { width }, "{row}");
    }
}

#[test]
fn a_config_that_would_spill_is_refused() {
    let problem = Problem::new(1, 8, 512, 128, DType::F16);
    let config: Config = "ampere-128x64-2stage-swizzled-32rows".parse().expect("a config");
    let reasons = LaunchPlan::new(&problem, config, Arch::Sm90).expect_err("64 registers too many");
    assert_eq!(reasons, [Reason::Registers { config, registers: 256, limit: 192 }]);
    let shared: Config = "ampere-128x64-2stage-swizzled-32rows-qshared".parse().expect("a config");
    assert!(LaunchPlan::new(&problem, shared, Arch::Sm90).is_ok());
}

#[test]
fn a_config_too_large_for_an_architecture_is_refused_by_rule() {
    let problem = Problem::new(1, 1, 64, 128, DType::F16);
    let large = Config::from(AmpereConfig { stages: 3, ..Default::default() });
    assert!(LaunchPlan::new(&problem, large, Arch::Sm80).is_ok());
    let reasons = LaunchPlan::new(&problem, large, Arch::Sm89).expect_err("three stages of 32 KB do not fit 99 KB");
    let [Reason::Kernel(error)] = &reasons[..] else { panic!("{reasons:?}") };
    let expected = flashcore_ir::verify::Rule::SharedMemory { bytes: 112 * 1024, limit: 99 * 1024, arch: Arch::Sm89 };
    assert_eq!(error.rule, expected);
}

#[test]
fn padding_costs_memory_and_swizzling_does_not() {
    let bytes = |layout| {
        let problem = Problem::new(1, 1, 64, 64, DType::F16);
        LaunchPlan::new(&problem, Config::ampere_with_layout(layout), Arch::Sm80)
            .expect("a plan")
            .attention()
            .kernel()
            .shared_bytes
    };
    assert_eq!(bytes(SharedLayout::Plain), 5 * 64 * 64 * 2);
    assert_eq!(bytes(SharedLayout::Swizzled), bytes(SharedLayout::Plain));
    assert_eq!(bytes(SharedLayout::Padded), 5 * 64 * (64 + 8) * 2);
}

#[test]
fn a_config_that_no_kernel_has_is_refused_with_what_is_allowed() {
    let problem = Problem::new(1, 1, 64, 64, DType::F16);
    let config = Config::from(AmpereConfig { warps: 1, tile_n: 24, stages: 9, ..Default::default() });
    let reasons = LaunchPlan::new(&problem, config, Arch::Sm80).expect_err("three flaws");
    let reason = |argument, value, allowed| Reason::Config { kernel: KERNEL, argument, value, allowed };
    let expected = [
        reason("warps", 1, "2, 4 or 8"),
        reason("tile_n", 24, "a multiple of 16 up to 128"),
        reason("stages", 9, "1 to 8"),
        reason("kv_split_warps", 1, "1, 2 or 4, at most the warps, with a multiple of 16 keys for each"),
    ];
    assert_eq!(reasons, expected);
}

/// Records and caches know a config by its name: one with the name of another would be taken for it.
#[test]
fn every_config_round_trips_through_its_name() {
    let problem = Problem::new(1, 8, 512, 32, DType::F16);
    let near = Config::defaults().into_iter().flat_map(|config| search_space(config, &problem, Arch::Sm90a));
    let listed = [Config::all(), Config::f32(), Config::fp8(), Config::fp8_mma()].concat();
    let configs: HashSet<_> = listed.into_iter().chain(near).collect();
    assert!(configs.len() > 200, "{}", configs.len());
    for config in configs {
        assert_eq!(config.to_string().parse(), Ok(config));
    }
}

#[test]
fn configs_have_names() {
    assert_eq!("ampere".parse(), Ok(Config::ampere()));
    assert_eq!("scalar".parse(), Ok(Config::scalar()));
    let other = AmpereConfig { warps: 8, tile_n: 128, stages: 3, layout: SharedLayout::Padded, ..Default::default() };
    assert_eq!("ampere-128x128-3stage-padded".parse(), Ok(Config::from(other)));
    for name in ["", "Ampere", "ampere-64x64", "scalar-064", "ampere-70x64-2stage-plain", "ampere-64x64-2stage-"] {
        let unknown = flashcore_kernels::UnknownConfig { name: name.to_owned() };
        assert_eq!(name.parse::<Config>(), Err(unknown));
    }
}

/// Whatever the shape, the default runs it.
#[test]
fn every_default_fits() {
    for arch in [Arch::Sm80, Arch::Sm86, Arch::Sm89, Arch::Sm90, Arch::Sm120] {
        for head_dim in (8..=256).step_by(24) {
            for value_dim in [8, 64, 128, 200, 256] {
                for (heads, length) in [(1, 16), (4, 200), (64, 4096)] {
                    let mut problem = Problem::new(1, heads, length, head_dim, DType::Bf16);
                    problem.value_dim = value_dim;
                    (problem.bias, problem.alibi) = (length == 200, length == 200);
                    let config = select(&problem, Target::new(arch, 58));
                    let plan = LaunchPlan::new(&problem, config, arch);
                    assert!(plan.is_ok(), "{config} {problem} on {arch}: {:?}", plan.err());
                }
            }
        }
    }
}

/// Expressions take registers, and do not go with packed heads: whatever the shape, the default runs them.
#[test]
fn every_default_fits_with_expressions() {
    let relative = ScoreMod::new("relative", |score, at| score + at.number(at.query - at.key));
    let documents = MaskMod::new("documents", |at| at.integer(at.query).equals(at.integer(at.key)));
    for arch in Arch::ALL {
        for head_dim in [8, 64, 96, 128, 192, 256] {
            for (heads, queries, keys) in [(8, 1, 4096), (8, 200, 200), (64, 4096, 4096)] {
                let mut problem = Problem::new(1, heads, keys, head_dim, DType::F16);
                (problem.key_heads, problem.query_length) = (2, queries);
                (problem.score_mod, problem.mask_mod) = (Some(relative), Some(documents));
                (problem.aux_f32, problem.aux_i32) = (9, 4096);
                let config = select(&problem, Target::new(arch, 132));
                let plan = LaunchPlan::new(&problem, config, arch);
                assert!(plan.is_ok(), "{config} {problem} on {arch}: {:?}", plan.err());
            }
        }
    }
}

/// Decode: few rows over many keys. A GPU with many SMs splits the keys, and the plan has a kernel and the memory for it.
#[test]
fn decode_splits_the_keys() {
    let check = |change: fn(&mut Problem), arch| {
        let mut problem = Problem::new(1, 32, 1, 128, DType::F16);
        (problem.key_heads, problem.key_length) = (8, 8192);
        change(&mut problem);
        let config = select(&problem, Target::new(arch, 132));
        let num_splits = config.chunk_keys().map_or(1, |keys| problem.key_length.div_ceil(keys as usize) as u32);
        let plan = LaunchPlan::new(&problem, config, arch).expect("a plan");
        assert_eq!(plan.launch(Stage::Combine).is_some(), num_splits > 1, "{problem}");
        let rows = (problem.batch * problem.query_heads * problem.query_length) as u64;
        let partial =
            if num_splits > 1 { u64::from(num_splits) * rows * (problem.value_dim as u64 + 2) * 4 } else { 0 };
        assert_eq!(plan.workspace_bytes, partial);
        num_splits
    };
    assert!(check(|_| {}, Arch::Sm90) > 1);
    assert!(check(|problem| problem.sinks = true, Arch::Sm90) > 1);
    assert!(check(|problem| (problem.head_dim, problem.value_dim) = (256, 256), Arch::Sm89) > 1);
    assert_eq!(check(|problem| problem.batch = 640, Arch::Sm89), 1);
    assert_eq!(check(|problem| problem.key_length = 100, Arch::Sm90), 1);
}

fn hopper(name: &str) -> Config {
    name.parse().expect("a config")
}

#[test]
fn hopper_configs_have_names() {
    let name = "hopper-64x128-4stage-2kvgroups-pdl";
    assert_eq!((hopper(name).to_string().as_str(), hopper(name).tile_m()), (name, 64));
    for name in ["hopper-100x128-2stage", "hopper-128x128", "hopper-128x128-2stage-fast", "hopper-128x128-02stage"] {
        assert!(name.parse::<Config>().is_err(), "{name}");
    }
}

#[test]
fn the_hopper_kernel_is_for_sm_90a_alone() {
    let problem = Problem::new(1, 8, 512, 64, DType::F16);
    assert!(LaunchPlan::new(&problem, Config::hopper(), Arch::Sm90a).is_ok());
    let reasons = LaunchPlan::new(&problem, Config::hopper(), Arch::Sm90).expect_err("it has no wgmma");
    assert_eq!(reasons, [Reason::Arch { kernel: "hopper", needs: Arch::Sm90a, arch: Arch::Sm90 }]);
    let message =
        "the hopper kernel is for sm_90a, and this is sm_90: take an ampere config, or name that architecture";
    assert_eq!(reasons[0].to_string(), message);
}

#[test]
fn rows_that_tma_cannot_address_are_refused_with_the_reason() {
    let mut problem = Problem::new(1, 8, 512, 64, DType::F16);
    let mut strides = problem.strides();
    strides.key.row += 4;
    problem.layout = Layout::Strided(strides);
    let reasons = LaunchPlan::new(&problem, Config::hopper(), Arch::Sm90a).expect_err("rows at multiples of 8 bytes");
    assert_eq!(reasons, [Reason::Width { kernel: "hopper", width: 8 }]);
    assert_eq!(select(&problem, Target::new(Arch::Sm90a, 132)).family(), "ampere");
    let wide = Problem::new(1, 8, 512, 256, DType::F16);
    let reasons = LaunchPlan::new(&wide, Config::hopper(), Arch::Sm90a).expect_err("224 registers");
    assert_eq!(reasons, [Reason::Registers { config: Config::hopper(), registers: 224, limit: 200 }]);
}

#[test]
fn hopper_flaws_are_named() {
    let problem = Problem::new(1, 8, 512, 64, DType::F16);
    for (name, argument) in [
        ("hopper-320x16-2stage", "warpgroups"),
        ("hopper-128x24-2stage", "tile_n"),
        ("hopper-128x128-1stage", "stages"),
        ("hopper-64x64-2stage-2kvgroups", "kv_split_warpgroups"),
        ("hopper-64x64-4stage-2kvgroups-persistent", "kv_split_warpgroups"),
    ] {
        let reasons = LaunchPlan::new(&problem, hopper(name), Arch::Sm90a).expect_err(name);
        assert!(
            matches!(reasons[..], [Reason::Config { argument: found, .. }] if found == argument),
            "{name}: {reasons:?}"
        );
    }
}

/// On an H200, whatever the shape.
#[test]
fn every_problem_on_hopper_gets_a_plan() {
    for (dim, value_dim) in [(8, 8), (64, 64), (64, 128), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)] {
        for (batch, length) in [(1, 20), (1, 512), (8, 512), (32, 1000), (4, 2048), (1, 16384)] {
            for mask in [Mask::None, Mask::Causal(Alignment::BottomRight)] {
                for bias in [false, true] {
                    let mut problem = Problem::new(batch, 8, length, dim, DType::Bf16);
                    (problem.value_dim, problem.mask, problem.bias) = (value_dim, mask, bias);
                    let config = select(&problem, Target::new(Arch::Sm90a, 132));
                    let plan = LaunchPlan::new(&problem, config, Arch::Sm90a);
                    assert!(plan.is_ok(), "{problem} {config}: {:?}", plan.err());
                }
            }
        }
    }
}
