//! Each convention that libraries have differently, at the level of the public API, with values worked out by hand.
//!
//! Queries of zero give every attended key the same weight, and key `j` has the value `2^j`: the output times the number
//! of attended keys spells out in binary which keys those were.

use std::f32::consts::LN_2;

use flashcore::{
    Alignment, BiasStrides, BiasView, DType, Device, InputViews, Layout, LseForm, Mask, OutputViews, Plan, Problem,
    supports,
};

/// One head with one column of `queries` rows and `keys` keys.
fn problem(queries: usize, keys: usize) -> Problem {
    let mut problem = Problem::new(1, 1, keys, 1, DType::F64);
    problem.query_length = queries;
    problem.lse = true;
    problem
}

/// Output and log-sum-exp of a problem with one head and one column.
fn attend(problem: &Problem, query: &[f64], complete: impl FnOnce(&mut InputViews<'_>)) -> (Vec<f64>, Vec<f32>) {
    let rows = problem.batch * problem.query_heads * problem.query_length;
    let keys = vec![1.0; problem.batch * problem.key_heads * problem.key_length];
    let values: Vec<f64> = (0..keys.len()).map(|key| f64::from(1 << (key % problem.key_length.max(1)))).collect();
    let (mut output, mut lse) = (vec![f64::NAN; rows], vec![f32::NAN; rows]);
    let mut inputs = InputViews::new(query, &keys, &values);
    complete(&mut inputs);
    let plan = Plan::new(problem, &Device::cpu()).unwrap();
    plan.run(inputs, OutputViews::new(&mut output).with_lse(&mut lse)).unwrap();
    (output, lse)
}

/// Keys that each row attends, drawn: the first key on the left.
fn check_attended(problem: &Problem, complete: impl FnOnce(&mut InputViews<'_>), expected: &[&str]) {
    let query = vec![0.0; problem.batch * problem.query_length];
    let (output, lse) = attend(problem, &query, complete);
    let drawn: Vec<String> = output
        .iter()
        .zip(&lse)
        .map(|(output, lse)| {
            // All scores are 0, so the log-sum-exp is that of the number of keys.
            let count = f64::from(lse.exp()).round();
            let bits = (output * count).round() as u64;
            (0..problem.key_length).map(|key| if bits >> key & 1 == 1 { 'x' } else { '.' }).collect()
        })
        .collect();
    assert_eq!(drawn, expected, "{problem}");
}

#[test]
fn causal_is_top_left_or_bottom_right() {
    let mut problem = problem(2, 4);
    problem.mask = Mask::Causal(Alignment::TopLeft);
    check_attended(&problem, |_| {}, &["x...", "xx.."]);
    problem.mask = Mask::Causal(Alignment::BottomRight);
    check_attended(&problem, |_| {}, &["xxx.", "xxxx"]);
}

/// `FlashAttention`'s `window_size=(2, 0)` attends three keys; Hugging Face's `sliding_window=2` attends two, which is
/// `left: Some(1)`.
#[test]
fn windows_include_both_ends() {
    let mut problem = problem(4, 4);
    let window = |left, right| Mask::Window { left, right, alignment: Alignment::BottomRight };
    problem.mask = window(Some(2), Some(0));
    check_attended(&problem, |_| {}, &["x...", "xx..", "xxx.", ".xxx"]);
    problem.mask = window(Some(1), Some(0));
    check_attended(&problem, |_| {}, &["x...", "xx..", ".xx.", "..xx"]);
    problem.mask = window(Some(0), Some(1));
    check_attended(&problem, |_| {}, &["xx..", ".xx.", "..xx", "...x"]);
    problem.mask = window(None, Some(0));
    check_attended(&problem, |_| {}, &["x...", "xx..", "xxx.", "xxxx"]);
    problem.mask = window(Some(100), Some(100));
    check_attended(&problem, |_| {}, &["xxxx"; 4]);
}

/// There is no boolean mask whose polarity could be mistaken: what is not to be attended has a bias of minus infinity.
#[test]
fn a_bias_of_minus_infinity_masks() {
    const MASKED: f32 = f32::NEG_INFINITY;
    const DATA: &[f32] = &[0.0, MASKED, 0.0, 0.0, MASKED, MASKED, MASKED, 0.0];
    let mut problem = problem(2, 4);
    problem.bias = true;
    let strides = BiasStrides { batch: 0, head: 0, row: 4, key: 1 };
    check_attended(&problem, |inputs| inputs.bias = Some(BiasView { data: DATA, strides }), &["x.xx", "...x"]);
}

/// The same numbers in memory mean other tensors in other layouts, inputs and output alike.
#[test]
fn layouts_are_those_of_inputs_and_output() {
    // Two heads, two rows, one column; no key but one, so that the output is the value of the row's head.
    let mut problem = Problem::new(1, 2, 2, 1, DType::F32);
    problem.mask = Mask::Window { left: Some(0), right: Some(0), alignment: Alignment::TopLeft };
    let zeros = [0.0_f32; 4];
    let values = [1.0_f32, 2.0, 3.0, 4.0];
    let run = |problem: &Problem| {
        let mut output = [0.0_f32; 4];
        let plan = Plan::new(problem, &Device::cpu()).unwrap();
        plan.run(InputViews::new(&zeros[..], &zeros[..], &values[..]), OutputViews::new(&mut output[..])).unwrap();
        output
    };
    problem.layout = Layout::Bhsd;
    assert_eq!(run(&problem), values);
    problem.layout = Layout::Bshd;
    assert_eq!(run(&problem), values);
    // candle's CPU kernel takes one layout and gives the other; here that is said with strides.
    let mut strides = problem.strides();
    strides.output = {
        let mut bhsd = problem.clone();
        bhsd.layout = Layout::Bhsd;
        bhsd.strides().output
    };
    problem.layout = Layout::Strided(strides);
    assert_eq!(run(&problem), [1.0, 3.0, 2.0, 4.0]);
}

#[test]
fn no_softcap_is_none_and_nothing_else() {
    let mut problem = problem(1, 2);
    let lse = |problem: &Problem| attend(problem, &[3.0], |_| {}).1[0];
    let close = |actual: f32, expected: f64| {
        assert!((f64::from(actual) - expected).abs() < 1e-6, "{actual} is not {expected}");
    };
    problem.scale = 1.0;
    close(lse(&problem), 3.0 + 2.0_f64.ln());
    // candle's "1.0 means none" is a softcap like any other.
    problem.softcap = Some(1.0);
    close(lse(&problem), 3.0_f64.tanh() + 2.0_f64.ln());
    // FlashAttention's "0.0 means none" is refused.
    problem.softcap = Some(0.0);
    let reasons = supports(&problem, &Device::cpu()).unwrap_err();
    assert_eq!(reasons[0].to_string(), "softcap is 0; it must be finite and above 0, or None for no softcap");
}

#[test]
fn rows_that_attend_nothing_are_zero_and_minus_infinity() {
    let mut problem = problem(3, 1);
    problem.mask = Mask::Causal(Alignment::BottomRight);
    let (output, lse) = attend(&problem, &[0.0; 3], |_| {});
    assert_eq!(output, [0.0, 0.0, 1.0]);
    assert_eq!(lse, [f32::NEG_INFINITY, f32::NEG_INFINITY, 0.0]);
}

/// Lengths of each batch, not their running sum, and the bottom-right corner is that of the batch.
#[test]
fn seqused_k_are_lengths() {
    let mut problem = problem(1, 4);
    problem.batch = 3;
    problem.seqused_k = true;
    problem.mask = Mask::Causal(Alignment::BottomRight);
    check_attended(&problem, |inputs| inputs.seqused_k = Some(&[2, 4, 1]), &["xx..", "xxxx", "x..."]);
}

#[test]
fn the_lse_is_natural_and_scaled() {
    let mut problem = problem(1, 4);
    problem.scale = 0.5;
    let (_, lse) = attend(&problem, &[6.0], |_| {});
    assert!((f64::from(lse[0]) - (3.0 + 4.0_f64.ln())).abs() < 1e-6, "{lse:?}");
}

/// `-slope * |i + keys - queries - j|`, with a positive slope.
#[test]
fn alibi_takes_away_with_distance() {
    let mut problem = problem(1, 3);
    problem.alibi = true;
    let (output, _) = attend(&problem, &[0.0], |inputs| inputs.alibi_slopes = Some(&[LN_2]));
    // The row stands at key 2: weights 1/4, 1/2 and 1 for values 1, 2 and 4.
    assert!((output[0] - (0.25 + 1.0 + 4.0) / 1.75).abs() < 1e-6, "{output:?}");
}

#[test]
fn sinks_are_in_the_denominator_only() {
    let mut problem = problem(1, 2);
    problem.sinks = true;
    let (output, lse) = attend(&problem, &[0.0], |inputs| inputs.sinks = Some(&[LN_2]));
    assert!((output[0] - 3.0 / 4.0).abs() < 1e-6, "{output:?}");
    assert!((f64::from(lse[0]) - 4.0_f64.ln()).abs() < 1e-6, "{lse:?}");
}

/// Weights 1 and 1 of the keys, 2 of the sink: 2 without it, 4 with it, in either base.
#[test]
fn the_lse_has_the_form_of_the_problem() {
    for (form, expected) in LseForm::ALL.into_iter().zip([4.0_f64.ln(), 2.0, 2.0_f64.ln(), 1.0]) {
        let problem = problem(1, 2).with_sinks(true).with_lse_form(form);
        let (output, lse) = attend(&problem, &[0.0], |inputs| inputs.sinks = Some(&[LN_2]));
        assert!((output[0] - 3.0 / 4.0).abs() < 1e-6, "{form:?} {output:?}");
        assert!((f64::from(lse[0]) - expected).abs() < 1e-6, "{form:?} {lse:?}");
    }
}
