//! `flashcore::attention` against the oracle, on ragged random tensors.

use flashcore::half::{bf16, f16};
use flashcore::verify::{Evidence, Inputs, Outputs, ReferenceError, judge, oracle};
use flashcore::{Alignment, AttentionOptions, DType, HostElement, Mask, Problem, Tensor, TensorView, attention};

/// Three key tiles of any kernel and a rest, six query heads on two key heads, a value dimension of its own.
fn problem(dtype: DType) -> Problem {
    let mut problem = Problem::new(2, 6, 77, 40, dtype);
    (problem.key_heads, problem.key_length, problem.value_dim) = (2, 3 * 128 + 21, 24);
    problem
}

/// The outputs for random inputs of a problem's shapes, computed with these options, before the judge of that problem.
fn passes<T: HostElement>(problem: &Problem, options: AttentionOptions) -> bool {
    let inputs = Inputs::random(problem, 23);
    let elements = |tensor: &Tensor| tensor.to_elements::<T>();
    let (query, key, value) = (elements(&inputs.query), elements(&inputs.key), elements(&inputs.value));
    let &Problem { batch, query_heads, key_heads, query_length, key_length, head_dim, value_dim, .. } = problem;
    let output = attention(
        (&query, [batch, query_heads, query_length, head_dim]),
        (&key, [batch, key_heads, key_length, head_dim]),
        (&value, [batch, key_heads, key_length, value_dim]),
        options,
    );
    let mut outputs = Outputs::poisoned(problem);
    outputs.output.data = TensorView::from(&output.unwrap()).data.to_vec();
    let expected = oracle(problem, &inputs).unwrap();
    let yardstick = ReferenceError::measure(problem, &inputs, &expected).unwrap();
    judge(problem, &expected, &yardstick, &Evidence::new(&inputs, &outputs)).passed()
}

/// The options give the problem that `change` makes; the default options do not, where `change` does anything.
fn check(options: AttentionOptions, change: impl Fn(&mut Problem)) {
    let is_default = options == AttentionOptions::default();
    for dtype in DType::ALL {
        let mut problem = problem(dtype);
        change(&mut problem);
        let passes = match dtype {
            DType::F16 => passes::<f16>,
            DType::Bf16 => passes::<bf16>,
            DType::F32 => passes::<f32>,
            DType::F64 => passes::<f64>,
            DType::E4m3 | DType::E5m2 => unreachable!("no problem is of 8 bits throughout"),
        };
        assert!(passes(&problem, options), "{problem} by {options:?}");
        assert_eq!(
            passes(&problem, AttentionOptions::default()),
            is_default,
            "{problem} does not depend on {options:?}"
        );
    }
}

#[test]
fn defaults_are_plain_attention() {
    check(AttentionOptions::default(), |_| {});
}

#[test]
fn each_option_is_what_its_name_says() {
    let options = AttentionOptions::default;
    let alignment = Alignment::BottomRight;
    check(options().causal(), |problem| problem.mask = Mask::Causal(alignment));
    check(options().window(Some(150), Some(20)), |problem| {
        problem.mask = Mask::Window { left: Some(150), right: Some(20), alignment };
    });
    check(options().softmax_scale(0.5), |problem| problem.scale = 0.5);
    check(options().softcap(0.3), |problem| problem.softcap = Some(0.3));
}

#[test]
fn options_go_together() {
    check(AttentionOptions::default().causal().window(Some(130), None).softmax_scale(-0.4).softcap(1.5), |problem| {
        problem.mask = Mask::Window { left: Some(130), right: Some(0), alignment: Alignment::BottomRight };
        (problem.scale, problem.softcap) = (-0.4, Some(1.5));
    });
}
