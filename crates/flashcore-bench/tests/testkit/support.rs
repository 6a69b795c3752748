//! Problems and configs by name, and the kernel cases that the simulator and a GPU run.

use flashcore_bench::testkit::{parse_mask, parse_shape};
use flashcore_kernels::Config;
use flashcore_problem::{DType, Problem};

/// A problem with a log-sum-exp.
pub(crate) fn problem(shape: &str, dtype: DType, mask: &str) -> Problem {
    let problem = parse_shape(shape, dtype).expect("a shape").with_mask(parse_mask(mask).expect("a mask"));
    problem.with_lse(true)
}

/// The config of a name.
pub(crate) fn config(name: &str) -> Config {
    name.parse().expect("a config")
}

/// Hands the kernel cases to a macro: a name, a config, a shape, a type and a mask each.
macro_rules! each_kernel_case {
    ($macro:ident) => {
        $macro! {
            scalar_f16_d64_causal: "scalar", "1x4/2x97,203x64", F16, "causal";
            scalar_bf16_d32_full: "scalar", "1x2x65,130x32", Bf16, "full";
            ampere_f16_d64_causal: "ampere", "1x4/2x97,203x64", F16, "causal";
            ampere_bf16_d64_full: "ampere", "1x2x97,203x64", Bf16, "full";
            ampere_f16_d32_full: "ampere", "1x2x97,203x32", F16, "full";
            ampere_bf16_d96_causal: "ampere", "1x2x97,203x96", Bf16, "causal";
            ampere_f16_d128_causal: "ampere", "1x2x97,203x128", F16, "causal";
            hopper_f16_d64_causal: "hopper", "1x4/2x150,403x64", F16, "causal";
            hopper_bf16_d128_full: "hopper", "1x2x150,403x128", Bf16, "full";
            ampere_plain_f16_d64_causal: "ampere-64x64-2stage-plain", "1x2x97,203x64", F16, "causal";
            ampere_padded_bf16_d96_full: "ampere-64x64-2stage-padded", "1x2x97,203x96", Bf16, "full";
            ampere_three_stages_f16_d64_causal: "ampere-64x32-3stage-swizzled", "1x2x97,203x64", F16, "causal";
            steps_f16_d64_causal: "ladder-64x64-1stage-padded-load4-tensorqk", "1x2x97,203x64", F16, "causal";
            ampere_producer_f16_d64_full: "ampere-64x64-2stage-swizzled-1producer", "1x2x97,203x64", F16, "full";
            ampere_parts_bf16_d128_full:
                "ampere-16x64-2stage-swizzled-4kvwarps-packgqa-3splits", "1x4/2x1,515x128", Bf16, "full";
        }
    };
}
pub(crate) use each_kernel_case;
