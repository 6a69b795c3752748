//! Keys and values of 8 bits before the judge, with scales of every form, at every level that this machine has: contiguous,
//! packed and paged, decoded and in panels. Rows that no sequence uses hold NaN, and so do their scales.

use flashcore_cpu::{Level, attend_with};
use flashcore_problem::{
    Alignment, DType, Evidence, Inputs, Layout, Mask, Outputs, PagedKv, Problem, ReferenceError, Scale, ScaleStrides,
    ScoreMod, SplitMix64, Tensor, judge, oracle,
};

const TYPES: [(DType, DType, Option<DType>); 7] = [
    (DType::F16, DType::E4m3, None),
    (DType::F16, DType::E5m2, None),
    (DType::Bf16, DType::E4m3, None),
    (DType::F32, DType::E4m3, None),
    (DType::F32, DType::E5m2, None),
    (DType::E4m3, DType::E4m3, Some(DType::Bf16)),
    (DType::E4m3, DType::E5m2, Some(DType::F16)),
];

#[track_caller]
fn check(problem: &Problem, inputs: &Inputs) {
    let expected = oracle(problem, inputs).unwrap();
    let yardstick = ReferenceError::measure(problem, inputs, &expected).unwrap();
    for level in Level::available() {
        let mut outputs = Outputs::poisoned(problem);
        attend_with(level, problem, inputs, &mut outputs).unwrap();
        let verdict = judge(problem, &expected, &yardstick, &Evidence::new(inputs, &outputs));
        assert!(verdict.passed(), "{problem} at level {level}: {verdict}");
    }
}

/// A problem of any kind of sequences, with any features and scales.
fn random_problem(seed: u64) -> Problem {
    let mut random = SplitMix64::stream(seed, 8);
    let mut among = |count: usize| random.below(count);
    let (dtype, kv_dtype, out_dtype) = TYPES[among(TYPES.len())];
    let (query_heads, key_heads) = [(1, 1), (4, 2), (3, 1), (8, 1)][among(4)];
    let (head_dim, value_dim) = [(32, 32), (40, 24), (64, 64), (128, 128), (7, 3)][among(5)];
    let (queries, keys) = [(1, 700), (2, 430), (3, 385), (40, 390), (70, 401), (5, 9)][among(6)];
    let mut problem = Problem::new(1 + among(3), query_heads, queries, head_dim, dtype);
    (problem.key_heads, problem.key_length, problem.value_dim) = (key_heads, keys, value_dim);
    (problem.kv_dtype, problem.out_dtype, problem.layout) = (Some(kv_dtype), out_dtype, Layout::Bshd);
    problem.mask = [Mask::None, Mask::Causal(Alignment::BottomRight)][among(2)];
    (problem.k_scale, problem.v_scale, problem.q_scale) =
        (among(4) > 0, among(4) > 0, dtype.is_float8() && among(4) > 0);
    (problem.lse, problem.seqused_k) = (among(2) == 0, among(2) == 0);
    (problem.alibi, problem.sinks) = (among(4) == 0, among(4) == 0);
    problem.softcap = (among(4) == 0).then_some(20.0);
    if among(6) == 0 {
        problem.score_mod = Some(ScoreMod::new("halved", |score, _| score * 0.5));
    }
    match among(3) {
        0 => {
            problem.total_q = Some(problem.batch * queries);
            problem.total_k = Some(problem.batch * keys);
        }
        1 => {
            let page_size = [1, 3, 16, 64, 256][among(5)];
            let width = keys.div_ceil(page_size);
            problem.paged = Some(PagedKv::new(page_size, problem.batch * width, width));
        }
        _ => {}
    }
    problem
}

#[test]
fn caches_of_8_bits_of_every_kind_are_right() {
    for seed in 0..150 {
        let problem = random_problem(seed);
        check(&problem, &Inputs::random(&problem, seed));
    }
}

/// NaN and infinite codes in keys and values that no row attends change nothing; in one that is attended they show.
#[test]
fn codes_that_are_not_finite_reach_attended_rows_only() {
    for (dtype, kv_dtype, out_dtype) in TYPES {
        for queries in [1, 33] {
            let mut problem = Problem::new(1, 2, queries, 32, dtype).with_v_scale(true);
            (problem.kv_dtype, problem.out_dtype, problem.key_length) = (Some(kv_dtype), out_dtype, 300);
            problem.mask = Mask::Causal(Alignment::BottomRight);
            let mut inputs = Inputs::random(&problem, 3);
            inputs.v_scale = Some(Scale { data: vec![0.5, 2.0], strides: ScaleStrides::KEY_HEAD });
            // A value that only the last row attends.
            let plant = |tensor: &mut Tensor, code: u8| tensor.data[(299 * 32)..300 * 32].fill(code);
            plant(&mut inputs.value, 0x7F);
            check(&problem, &inputs);
            if kv_dtype == DType::E5m2 {
                plant(&mut inputs.value, 0x7C);
                check(&problem, &inputs);
            }
            plant(&mut inputs.value, 0x30);
            plant(&mut inputs.key, 0x7F);
            check(&problem, &inputs);
        }
    }
}
