//! Packed and paged sequences in the simulator: kernels that find rows and keys by sequence.

use flashcore_bench::testkit::simulate::simulate;
use flashcore_ir::Arch;
use flashcore_kernels::{Config, LaunchPlan};
use flashcore_problem::{
    Alignment, DType, Evidence, Inputs, Mask, PagedKv, Problem, ReferenceError, SplitMix64, judge, oracle,
};

const CAUSAL: Mask = Mask::Causal(Alignment::BottomRight);

fn check(config: &str, problem: &Problem, seed: u64) {
    let config: Config = config.parse().expect("a config");
    let plan = LaunchPlan::new(problem, config, Arch::Sm90a);
    let plan = plan.unwrap_or_else(|reasons| panic!("{config} {problem}: {}", reasons[0]));
    let inputs = Inputs::random(problem, seed);
    let simulation =
        simulate(&plan, problem, &inputs, seed).unwrap_or_else(|error| panic!("{config} {problem}: {error}"));
    let expected = oracle(problem, &inputs).expect("inputs that validate");
    let reference = ReferenceError::measure(problem, &inputs, &expected).expect("inputs that validate");
    let verdict = judge(problem, &expected, &reference, &Evidence::new(&inputs, &simulation.outputs));
    assert!(verdict.failures.is_empty(), "{config} {problem} seed {seed}: {:?}", verdict.failures);
}

/// Problems over every way in which sequences lie in memory.
fn problems(dtype: DType, queries: usize) -> Vec<Problem> {
    let mut base = Problem::new(5, 4, queries, 64, dtype).with_lse(true);
    (base.key_heads, base.key_length, base.mask) = (2, 300, CAUSAL);
    let paged = |page_size: usize, width: usize| PagedKv {
        table_stride: width + 3,
        ..PagedKv::new(page_size, 5 * width, width)
    };
    let packed_q = base.clone().with_total_q(Some(3 * queries + 1));
    vec![
        base.clone().with_seqused_q(true).with_seqused_k(true),
        packed_q.clone().with_total_k(Some(900)),
        packed_q.clone().with_total_k(Some(900)).with_seqused_q(true).with_seqused_k(true).with_leftpad_k(true),
        packed_q.clone().with_seqused_k(true).with_paged(Some(paged(16, 19))),
        packed_q.with_seqused_k(true).with_leftpad_k(true).with_paged(Some(paged(7, 50))),
        base.clone().with_seqused_k(true).with_kv_batch(Some(3)).with_paged(Some(paged(1, 300))),
        base.with_seqused_k(true).with_kv_batch(Some(4)).with_leftpad_k(true),
    ]
}

#[test]
fn sequences_of_the_ampere_kernel() {
    for (index, problem) in problems(DType::Bf16, 70).iter().enumerate() {
        check("ampere", problem, index as u64);
    }
    for (index, problem) in problems(DType::F16, 3).iter().enumerate() {
        check("ampere-16x64-2stage-swizzled-4kvwarps-packgqa-3splits", problem, index as u64);
    }
}

#[test]
fn chunks_of_sequences() {
    for (index, problem) in problems(DType::F16, 3).iter().enumerate() {
        check("ampere-16x64-2stage-swizzled-4kvwarps-packgqa-pdl-7persistent-64chunk", problem, index as u64);
        check("ampere-16x64-3stage-swizzled-4kvwarps-packgqa-3persistent-128chunk", problem, index as u64);
    }
    for (index, problem) in problems(DType::Bf16, 70).iter().enumerate() {
        check("ampere-64x64-2stage-swizzled-packgqa-pdl-9persistent-128chunk", problem, index as u64);
        check("ampere-64x64-2stage-swizzled-5persistent-192chunk", problem, index as u64);
    }
}

/// Splits that the CTAs of a cluster merge.
#[test]
fn clusters_of_splits_of_sequences() {
    for (index, problem) in problems(DType::F16, 3).iter().enumerate() {
        check("ampere-16x64-2stage-swizzled-4kvwarps-packgqa-cluster-8splits", problem, index as u64);
        check("ampere-16x64-2stage-swizzled-4kvwarps-cluster-2splits", problem, index as u64);
    }
    for (index, problem) in problems(DType::Bf16, 70).iter().enumerate() {
        check("ampere-64x64-2stage-swizzled-packgqa-cluster-4splits", problem, index as u64);
    }
}

#[test]
fn chunks_of_the_hopper_kernel() {
    let mut plain = Problem::new(2, 4, 70, 64, DType::Bf16).with_lse(true);
    (plain.key_heads, plain.key_length, plain.mask) = (2, 520, CAUSAL);
    let sequences = problems(DType::Bf16, 70).into_iter().filter(|problem| problem.paged.is_none());
    for (index, problem) in sequences.chain([plain]).enumerate() {
        check("hopper-64x64-4stage-2kvgroups-pdl-128chunk", &problem, index as u64);
        check("hopper-64x64-4stage-2kvgroups-packgqa-pdl-128chunk", &problem, index as u64);
        check("hopper-128x64-2stage-overlap-packgqa-pdl-192chunk", &problem, index as u64);
        check("hopper-128x128-2stage-pdl-128chunk", &problem, index as u64);
    }
}

#[test]
fn sequences_of_the_naive_kernel() {
    for (index, problem) in problems(DType::F32, 9).iter().enumerate() {
        check("scalar", problem, index as u64);
    }
}

#[test]
fn many_sequences_with_features() {
    let mut random = SplitMix64::new(7);
    for seed in 0..6 {
        let mut problem = Problem::new(1 + random.below(40), 2, 1 + random.below(30), 32, DType::F16);
        problem.key_length = 1 + random.below(260);
        problem.total_q = Some(random.below(problem.batch * problem.query_length + 1));
        problem.mask =
            [Mask::None, CAUSAL, Mask::Window { left: Some(40), right: Some(3), alignment: Alignment::BottomRight }]
                [random.below(3)];
        (problem.sinks, problem.alibi, problem.bias) =
            (random.below(2) == 0, random.below(2) == 0, random.below(3) == 0);
        let width = problem.key_length.div_ceil(4) + random.below(3);
        problem.paged = Some(PagedKv::new(4, problem.batch * width, width));
        problem.seqused_k = true;
        check("ampere", &problem, seed);
    }
}

#[test]
fn trial_of_packed_sequences() {
    let mut problem = Problem::new(2, 2, 203, 128, DType::Bf16).with_total_q(Some(1024)).with_total_k(Some(1024));
    (problem.key_heads, problem.query_length) = (1, 117);
    check("hopper-128x128-2stage-overlap-persistent", &problem, 0x5EED);
}
