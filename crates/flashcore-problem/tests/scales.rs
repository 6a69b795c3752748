//! Scales of 8-bit tensors, against values worked out by hand, and what is refused.

use flashcore_problem::{
    DType, DTypes, Inputs, Invalid, Operand, PagedKv, Problem, Scale, ScaleStrides, Tensor, TensorError, oracle,
    reference,
};
use std::f64::consts::LN_2;

/// One column, the scale `ln 2`: a query of 1 gives a key `k` the weight `2^k`.
fn problem(batch: usize, heads: (usize, usize), queries: usize, keys: usize) -> Problem {
    let mut problem = Problem::new(batch, heads.0, queries, 1, DType::E4m3).with_out_dtype(Some(DType::F16));
    (problem.key_heads, problem.key_length, problem.scale) = (heads.1, keys, LN_2);
    problem
}

fn inputs(query: &[f64], key: &[f64], value: &[f64]) -> Inputs {
    let tensor = |values| Tensor::from_values(DType::E4m3, values);
    Inputs::new(tensor(query), tensor(key), tensor(value))
}

#[track_caller]
fn check(problem: &Problem, inputs: &Inputs, expected: &[f64]) {
    let near = |found: &[f64], bound: f64, who: &str| {
        let is_near = |(found, expected): (&f64, &f64)| (found - expected).abs() <= bound * expected.abs();
        assert!(
            found.len() == expected.len() && found.iter().zip(expected).all(is_near),
            "{who}: {found:?} {expected:?}"
        );
    };
    near(&oracle(problem, inputs).unwrap().output, 1e-7, "oracle");
    let found = reference(problem, inputs).unwrap().output;
    // Weights of the reference are e4m3.
    near(&found.dense(problem.output_shape(), problem.strides().output), 0.07, "reference");
}

#[test]
fn a_scale_of_the_tensor_multiplies_every_code() {
    let problem = problem(1, (1, 1), 1, 2).with_q_scale(true).with_k_scale(true).with_v_scale(true);
    let mut inputs = inputs(&[2.0], &[0.0, 4.0], &[1.0, 8.0]);
    inputs.q_scale = Some(Scale::of_tensor(0.5));
    inputs.k_scale = Some(Scale::of_tensor(0.25));
    inputs.v_scale = Some(Scale::of_tensor(3.0));
    // Scores 0 and 1: weights 1 and 2; values 3 and 24.
    check(&problem, &inputs, &[51.0 / 3.0]);
}

#[test]
fn heads_have_scales_of_their_own() {
    // Four query heads share two KV heads.
    let problem = problem(1, (4, 2), 1, 2).with_q_scale(true).with_k_scale(true).with_v_scale(true);
    let mut inputs = inputs(&[1.0; 4], &[0.0, 1.0, 0.0, 1.0], &[1.0, 4.0, 1.0, 4.0]);
    inputs.k_scale = Some(Scale { data: vec![1.0, 2.0], strides: ScaleStrides::KEY_HEAD });
    inputs.v_scale = Some(Scale { data: vec![1.0, 10.0], strides: ScaleStrides::KEY_HEAD });
    inputs.q_scale = Some(Scale { data: vec![1.0, 0.5], strides: ScaleStrides::KEY_HEAD });
    // Weights 1 and 2 in all heads: of the second pair by a key of 2 and a query of 1/2.
    check(&problem, &inputs, &[3.0, 3.0, 30.0, 30.0]);
    // One of the query per query head.
    let strides = ScaleStrides { key_head: 2, query_head: 1, ..ScaleStrides::TENSOR };
    inputs.q_scale = Some(Scale { data: vec![1.0, 2.0, 0.5, 1.0], strides });
    check(&problem, &inputs, &[3.0, 17.0 / 5.0, 30.0, 34.0]);
}

#[test]
fn sequences_have_scales_of_their_own() {
    let problem = problem(2, (1, 1), 1, 2).with_k_scale(true);
    let mut inputs = inputs(&[1.0, 1.0], &[0.0, 1.0, 0.0, 1.0], &[1.0, 4.0, 1.0, 4.0]);
    inputs.k_scale = Some(Scale { data: vec![1.0, 2.0], strides: ScaleStrides::per_sequence(&problem) });
    check(&problem, &inputs, &[3.0, 17.0 / 5.0]);
}

/// Of a paged cache the scale of a token lies where its row does: by page and row.
#[test]
fn tokens_have_scales_of_their_own_in_their_pages() {
    let mut problem = problem(1, (1, 1), 1, 3).with_k_scale(true).with_v_scale(true);
    problem.paged = Some(PagedKv::new(2, 3, 2));
    // The sequence has page 2, then the first row of page 0.
    let mut inputs = inputs(&[1.0], &[4.0, 9.0, 9.0, 9.0, 0.0, 1.0], &[1.0, 9.0, 9.0, 9.0, 1.0, 2.0]);
    inputs.page_table = Some(vec![2, 0]);
    let unused = f32::NAN;
    let strides = ScaleStrides::per_token(Operand::KScale, &problem);
    inputs.k_scale = Some(Scale { data: vec![0.5, unused, unused, unused, 7.0, 1.0], strides });
    inputs.v_scale = Some(Scale { data: vec![3.0, unused, unused, unused, 5.0, 2.0], strides });
    // Keys 0, 1 and 2; values 5, 4 and 3.
    check(&problem, &inputs, &[(5.0 + 8.0 + 12.0) / 7.0]);
}

#[test]
fn scales_that_are_in_use_must_be_positive() {
    let mut problem = problem(1, (1, 1), 1, 2).with_v_scale(true).with_seqused_k(true);
    problem.key_length = 3;
    let mut inputs = inputs(&[1.0], &[0.0, 1.0, 2.0], &[1.0, 2.0, 3.0]);
    inputs.seqused_k = Some(vec![2]);
    let strides = ScaleStrides::per_token(Operand::VScale, &problem);
    for (wrong, text) in [(0.0, "0"), (-1.0, "-1"), (f32::NAN, "NaN"), (f32::INFINITY, "inf"), (-0.0, "-0")] {
        inputs.v_scale = Some(Scale { data: vec![1.0, wrong, 1.0], strides });
        let error = TensorError::ScaleNotPositive { tensor: "v_scale", index: 1, value: text.to_owned() };
        assert_eq!(inputs.validate(&problem), Err(Invalid::Tensors(vec![error])));
        // Past the end of the sequence it may be anything.
        inputs.v_scale = Some(Scale { data: vec![1.0, 1.0, wrong], strides });
        assert_eq!(inputs.validate(&problem), Ok(()));
    }
    let text = TensorError::ScaleNotPositive { tensor: "v_scale", index: 1, value: "0".to_owned() }.to_string();
    assert_eq!(text, "v_scale[1] is 0; scales must be finite and above 0");
    inputs.v_scale = Some(Scale { data: vec![1.0, 1.0], strides });
    let error = TensorError::TooShort { tensor: "v_scale", actual: 2, needed: 3 };
    assert_eq!(inputs.validate(&problem), Err(Invalid::Tensors(vec![error])));
    inputs.v_scale = None;
    assert_eq!(inputs.validate(&problem), Err(Invalid::Tensors(vec![TensorError::Missing { tensor: "v_scale" }])));
    problem.v_scale = false;
    inputs.k_scale = Some(Scale::of_tensor(1.0));
    let error = TensorError::Unexpected { tensor: "k_scale" };
    assert_eq!(inputs.validate(&problem), Err(Invalid::Tensors(vec![error])));
}

#[test]
fn random_scales_take_every_form_and_are_valid() {
    let mut forms = std::collections::HashSet::new();
    for seed in 0..200 {
        let mut problem = problem(3, (4, 2), 5, 40).with_k_scale(true).with_v_scale(true).with_q_scale(true);
        (problem.head_dim, problem.value_dim, problem.seqused_k) = (8, 8, true);
        if seed % 2 == 0 {
            problem.paged = Some(PagedKv::new(8, 15, 5));
        }
        let inputs = Inputs::random(&problem, seed);
        assert_eq!(inputs.validate(&problem), Ok(()), "seed {seed}");
        forms.extend([&inputs.q_scale, &inputs.k_scale, &inputs.v_scale].map(|scale| scale.as_ref().unwrap().strides));
    }
    assert!(forms.len() >= 5, "{forms:?}");
}

#[test]
fn types_without_a_common_backend_are_refused() {
    let types = DTypes { query: DType::F16, key_value: DType::E4m3, output: DType::Bf16 };
    let problem =
        Problem::new(1, 1, 1, 8, DType::F16).with_kv_dtype(Some(DType::E4m3)).with_out_dtype(Some(DType::Bf16));
    assert_eq!(
        problem.validate().unwrap_err().to_string(),
        "dtype, kv_dtype and out_dtype are f16, e4m3 and bf16; key and value may be e4m3 or e5m2 with a query of f16, \
         bf16 or f32 and an output of the same, or with a query of e4m3 and an output of f16 or bf16"
    );
    assert_eq!(problem.dtypes(), types);
}
