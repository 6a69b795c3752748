//! What kernels take, and what they say of what they do not take.

use flashcore_ir::Arch;
use flashcore_kernels::tile::SharedLayout;
use flashcore_kernels::{Config, Plan, Reason};
use flashcore_problem::{Alignment, DType, Layout, Mask, Problem, Strides, TensorStrides};

fn check(change: impl FnOnce(&mut Problem), expected: &[Reason]) {
    let mut problem = Problem::new(1, 8, 512, 64, DType::F16);
    change(&mut problem);
    match Plan::new(&problem, Config::ampere(), Arch::Sm80) {
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
    check(|problem| problem.dtype = DType::F32, &[Reason::DType { kernel: KERNEL, dtype: DType::F32 }]);
    check(
        |problem| (problem.head_dim, problem.value_dim) = (80, 80),
        &[Reason::HeadDim { kernel: KERNEL, head_dim: 80 }],
    );
    check(|problem| problem.value_dim = 32, &[Reason::ValueDim { kernel: KERNEL, head_dim: 64, value_dim: 32 }]);
    check(|problem| problem.scale = -1.0, &[Reason::Scale { scale: -1.0 }]);
    check(|problem| problem.softcap = Some(30.0), &[Reason::Feature { kernel: KERNEL, feature: "softcap" }]);
    check(|problem| problem.batch = 70_000, &[Reason::Grid { argument: "batch", value: 70_000, limit: 65_535 }]);
    check(|problem| problem.query_length = 0, &[Reason::Empty]);
}

#[test]
fn all_reasons_come_at_once() {
    check(
        |problem| (problem.alibi, problem.bias) = (true, true),
        &[
            Reason::Feature { kernel: KERNEL, feature: "ALiBi" },
            Reason::Feature { kernel: KERNEL, feature: "additive bias" },
        ],
    );
}

#[test]
fn rows_must_start_where_sixteen_bytes_can_be_read() {
    let strides = Strides { batch: 8 * 512 * 68, head: 512 * 68, row: 68 };
    let all = TensorStrides { query: strides, key: strides, value: strides, output: strides };
    let reason = |tensor| Reason::Stride { tensor, stride: "row", elements: 68, multiple: 8 };
    check(
        |problem| problem.layout = Layout::Strided(all),
        &[reason("query"), reason("key"), reason("value"), reason("output")],
    );
}

#[test]
fn a_config_too_large_for_an_architecture_is_refused_by_rule() {
    let problem = Problem::new(1, 1, 64, 128, DType::F16);
    let large = Config::Ampere(flashcore_kernels::AmpereConfig { stages: 3, ..Default::default() });
    assert!(Plan::new(&problem, large, Arch::Sm80).is_ok());
    let reasons = Plan::new(&problem, large, Arch::Sm89).expect_err("three stages of 32 KB do not fit 99 KB");
    let [Reason::Kernel(error)] = &reasons[..] else { panic!("{reasons:?}") };
    let expected = flashcore_ir::verify::Rule::SharedMemory { bytes: 112 * 1024, limit: 99 * 1024, arch: Arch::Sm89 };
    assert_eq!(error.rule, expected);
}

#[test]
fn padding_costs_memory_and_swizzling_does_not() {
    let bytes = |layout| {
        let problem = Problem::new(1, 1, 64, 64, DType::F16);
        Plan::new(&problem, Config::ampere_with_layout(layout), Arch::Sm80).expect("a plan").kernel.shared_bytes
    };
    assert_eq!(bytes(SharedLayout::Plain), 5 * 64 * 64 * 2);
    assert_eq!(bytes(SharedLayout::Swizzled), bytes(SharedLayout::Plain));
    assert_eq!(bytes(SharedLayout::Padded), 5 * 64 * (64 + 8) * 2);
}

#[test]
fn a_config_that_no_kernel_has_is_refused_with_what_is_allowed() {
    let problem = Problem::new(1, 1, 64, 64, DType::F16);
    let config =
        Config::Ampere(flashcore_kernels::AmpereConfig { warps: 1, key_rows: 24, stages: 1, ..Default::default() });
    let reasons = Plan::new(&problem, config, Arch::Sm80).expect_err("three flaws");
    let reason = |argument, value, allowed| Reason::Config { kernel: KERNEL, argument, value, allowed };
    let expected = [
        reason("warps", 1, "2, 4 or 8"),
        reason("key_rows", 24, "a multiple of 16 up to 128"),
        reason("stages", 1, "2 to 8"),
    ];
    assert_eq!(reasons, expected);
}

#[test]
fn configs_have_names() {
    for config in Config::all() {
        assert_eq!(config.to_string().parse(), Ok(config));
    }
    assert_eq!("ampere".parse(), Ok(Config::ampere()));
    assert_eq!("scalar".parse(), Ok(Config::scalar()));
    let other = flashcore_kernels::AmpereConfig { warps: 8, key_rows: 128, stages: 3, layout: SharedLayout::Padded };
    assert_eq!("ampere-128x128-3stage-padded".parse(), Ok(Config::Ampere(other)));
    for name in ["", "Ampere", "ampere-64x64", "scalar-064", "ampere-70x64-2stage-plain", "ampere-64x64-2stage-"] {
        let unknown = flashcore_kernels::UnknownConfig { name: name.to_owned() };
        assert_eq!(name.parse::<Config>(), Err(unknown));
    }
}

#[test]
fn the_default_follows_head_dim_architecture_and_size() {
    const DEFAULT: &str = "ampere-64x64-2stage-swizzled";
    const WIDE: &str = "ampere-64x128-2stage-swizzled";
    const TALL: &str = "ampere-128x128-2stage-swizzled";
    let check = |shape: [usize; 4], causal: bool, arch, expected: &str| {
        let [batch, heads, length, dim] = shape;
        let mut problem = Problem::new(batch, heads, length, dim, DType::F16);
        if causal {
            problem.mask = Mask::Causal(Alignment::BottomRight);
        }
        let config = Config::tuned(&problem, arch, 132);
        assert_eq!(config.to_string(), expected, "{problem}");
        assert!(Plan::new(&problem, config, arch).is_ok(), "{problem}");
    };
    check([1, 2, 64, 64], false, Arch::Sm90, DEFAULT);
    check([1, 8, 512, 64], false, Arch::Sm90, WIDE);
    check([1, 8, 512, 64], true, Arch::Sm90, WIDE);
    check([32, 32, 512, 64], false, Arch::Sm90, WIDE);
    check([32, 32, 512, 64], true, Arch::Sm90, DEFAULT);
    check([8, 32, 2048, 64], true, Arch::Sm90, WIDE);
    check([1, 8, 512, 128], false, Arch::Sm90, DEFAULT);
    check([16, 16, 1024, 128], false, Arch::Sm90, TALL);
    check([16, 16, 1024, 128], false, Arch::Sm80, TALL);
    check([16, 16, 1024, 128], true, Arch::Sm90, DEFAULT);
    check([4, 16, 4096, 128], true, Arch::Sm90, TALL);
    check([4, 16, 4096, 128], true, Arch::Sm89, DEFAULT);
    check([4, 32, 4096, 64], false, Arch::Sm120, DEFAULT);
}
