//! Attention over keys in several calls, each of which continues from the output and LSE of those before, against attention
//! over all keys at once.

use std::ops::Range;

use flashcore::verify::{Evidence, Inputs, Outputs, ReferenceError, judge, oracle};
use flashcore::{
    DType, Device, InputViews, Layout, LseBase, LseForm, Operation, OutputViews, Plan, Problem, Reason, Unsupported,
};

/// The problem of some of the keys, whose tensors lie in those of all.
fn chunk(problem: &Problem, keys: &Range<usize>) -> Problem {
    problem.clone().with_key_length(keys.len()).with_layout(Layout::Strided(problem.strides()))
}

/// The inputs of some of the keys.
fn chunk_inputs<'a>(problem: &Problem, inputs: &'a Inputs, keys: &Range<usize>) -> InputViews<'a> {
    let (strides, element) = (problem.strides(), problem.dtype.size_bytes());
    let mut views = inputs.views();
    views.key.data = &views.key.data[keys.start * strides.key.row * element..];
    views.value.data = &views.value.data[keys.start * strides.value.row * element..];
    views
}

fn continuation(problem: &Problem) -> Result<Plan, Unsupported> {
    Plan::new(Operation::Continue(problem.clone()), &Device::cpu())
}

/// Attends the first keys, continues with the rest, and lets the gate judge the state as the result of all keys.
fn check(problem: &Problem, chunks: &[Range<usize>]) {
    let problem = problem.clone().with_lse(true);
    let inputs = Inputs::random(&problem, 5);
    // Rows of no sequence are poisoned, and must stay so.
    let mut state = Outputs::poisoned(&problem);
    for (number, keys) in chunks.iter().enumerate() {
        let mut part = chunk(&problem, keys);
        let mut views = chunk_inputs(&problem, &inputs, keys);
        if number == 0 {
            Plan::new(&part, &Device::cpu()).unwrap().run(views, &mut state).unwrap();
            continue;
        }
        // A sink belongs to one of the parts.
        (part.sinks, views.sinks) = (false, None);
        continuation(&part).unwrap().run(views, &mut state).unwrap();
    }
    let expected = oracle(&problem, &inputs).unwrap();
    let yardstick = ReferenceError::measure(&problem, &inputs, &expected).unwrap();
    let verdict = judge(&problem, &expected, &yardstick, &Evidence::new(&inputs, &state));
    assert!(verdict.passed(), "{problem} in {chunks:?}: {verdict}");
}

#[test]
fn continuing_is_attention_over_all_keys() {
    let chunks = [0..97, 97..227, 227..300];
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        let mut problem = Problem::new(3, 4, 21, 40, dtype);
        (problem.key_heads, problem.key_length, problem.value_dim) = (2, 300, 24);
        check(&problem, &chunks);
        check(&problem.clone().with_layout(Layout::Bshd), &chunks);
        check(&problem.clone().with_query_length(1), &chunks);
        check(&problem.clone().with_sinks(true), &chunks);
        check(&problem.clone().with_lse_form(LseForm::default().with_base(LseBase::Two)), &chunks);
        // Packed queries, of which the last rows belong to no sequence.
        check(&problem.clone().with_total_q(Some(70)).with_layout(Layout::Bshd), &chunks);
        check(&problem.clone().with_seqused_q(true), &chunks);
        // A chunk without keys changes nothing.
        check(&problem, &[0..150, 150..150, 150..300]);
    }
}

/// The start of a state is output 0 and LSE minus infinity; a row that still attends nothing stays that.
#[test]
fn a_state_begins_empty() {
    let problem = Problem::new(1, 1, 1, 8, DType::F32).with_key_length(0).with_lse(true);
    let plan = continuation(&problem).unwrap();
    let (mut output, mut lse) = ([0.0_f32; 8], [f32::NEG_INFINITY]);
    let none: [f32; 0] = [];
    plan.run(InputViews::new(&[1.0_f32; 8], &none, &none), OutputViews::new(&mut output).with_lse(&mut lse)).unwrap();
    assert_eq!((output, lse), ([0.0; 8], [f32::NEG_INFINITY]));
}

#[test]
fn what_cannot_be_continued_is_refused() {
    let refused = |problem: &Problem| continuation(problem).unwrap_err().to_string();
    let problem = Problem::new(1, 2, 3, 8, DType::F32);
    assert_eq!(refused(&problem), "lse is false; it must be true to continue from an LSE");
    let of_keys = problem.with_lse(true).with_sinks(true).with_lse_form(LseForm::default().without_sink());
    let reasons = continuation(&of_keys).unwrap_err();
    assert!(matches!(&reasons[..], [Reason::Problem(_)]), "{reasons}");
}
