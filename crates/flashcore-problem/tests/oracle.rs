//! The oracle against values worked out by hand. Each of these is a convention that some library has the other way.

use flashcore_problem::{
    Alignment, Bias, BiasStrides, DType, Inputs, Layout, LseBase, LseForm, Mask, MaskMod, Problem, ScoreMod, Tensor,
    oracle, reference,
};
use std::f32::consts::{E, LN_2};

/// A problem with one column, in which queries are 1 and the scale is `ln 2`: key `k` has the weight `2^k`.
struct Case {
    problem: Problem,
    keys: Vec<f64>,
    values: Vec<f64>,
    slope: Option<f32>,
    sink: Option<f32>,
    bias: Option<Vec<f32>>,
    seqused_k: Option<Vec<u32>>,
}

impl Case {
    /// One head; `keys` and `values` are shared out over `batch` batches.
    fn new(batch: usize, query_length: usize, keys: &[f64], values: &[f64]) -> Self {
        let mut problem = Problem::new(batch, 1, query_length, 1, DType::F64);
        problem.key_length = keys.len() / batch;
        problem.scale = f64::from(LN_2);
        problem.lse = true;
        Self {
            problem,
            keys: keys.to_vec(),
            values: values.to_vec(),
            slope: None,
            sink: None,
            bias: None,
            seqused_k: None,
        }
    }

    fn masked(mut self, mask: Mask) -> Self {
        self.problem.mask = mask;
        self
    }

    /// Compares output and log-sum-exp of every row. The log-sum-exp is given as what it is the logarithm of.
    fn check(self, expected: &[f64], expected_sums: &[f64]) {
        let logarithms: Vec<f64> = expected_sums.iter().map(|sum| sum.ln()).collect();
        self.check_logarithms(expected, &logarithms);
    }

    fn check_logarithms(mut self, expected: &[f64], expected_lse: &[f64]) {
        let problem = &mut self.problem;
        problem.alibi = self.slope.is_some();
        problem.sinks = self.sink.is_some();
        problem.bias = self.bias.is_some();
        problem.seqused_k = self.seqused_k.is_some();
        let inputs = Inputs {
            alibi_slopes: self.slope.map(|slope| vec![slope]),
            sinks: self.sink.map(|sink| vec![sink]),
            bias: self
                .bias
                .map(|data| Bias { data, strides: BiasStrides { batch: 0, head: 0, row: problem.key_length, key: 1 } }),
            seqused_k: self.seqused_k,
            aux_f32: (problem.aux_f32 > 0).then(|| NUMBERS.to_vec()),
            aux_i32: (problem.aux_i32 > 0).then(|| INTEGERS.to_vec()),
            ..Inputs::new(
                Tensor::from_values(DType::F64, &vec![1.0; problem.batch * problem.query_length]),
                Tensor::from_values(DType::F64, &self.keys),
                Tensor::from_values(DType::F64, &self.values),
            )
        };
        let oracle = oracle(problem, &inputs).unwrap();
        assert_close(&oracle.output, expected, "output");
        assert_close(&oracle.lse, expected_lse, "log-sum-exp");

        // The reference is another piece of code with the same conventions.
        let reference = reference(problem, &inputs).unwrap();
        let output = reference.output.dense(problem.output_shape(), problem.strides().output);
        assert_close(&output, expected, "output of the reference");
        let lse: Vec<f64> = reference.lse.iter().flatten().map(|&value| f64::from(value)).collect();
        assert_close(&lse, expected_lse, "log-sum-exp of the reference");
    }
}

/// Equal to seven digits: the scale is an `f32`.
fn assert_close(actual: &[f64], expected: &[f64], what: &str) {
    let close = |(actual, expected): (&f64, &f64)| {
        actual == expected
            || (actual.is_nan() && expected.is_nan())
            || (actual - expected).abs() <= 2e-7 * expected.abs().max(1.0)
    };
    assert!(
        actual.len() == expected.len() && actual.iter().zip(expected).all(close),
        "{what} is {actual:?}, expected {expected:?}"
    );
}

const TOP_LEFT: Alignment = Alignment::TopLeft;
const BOTTOM_RIGHT: Alignment = Alignment::BottomRight;

fn window(left: impl Into<Option<usize>>, right: impl Into<Option<usize>>, alignment: Alignment) -> Mask {
    Mask::Window { left: left.into(), right: right.into(), alignment }
}

#[test]
fn two_by_two_by_hand() {
    let mut problem = Problem::new(1, 1, 2, 2, DType::F32);
    problem.scale = f64::from(LN_2);
    let identity = Tensor::from_values(DType::F32, &[1.0, 0.0, 0.0, 1.0]);
    let value = Tensor::from_values(DType::F32, &[1.0, 2.0, 3.0, 4.0]);
    let inputs = Inputs::new(identity.clone(), identity, value);
    let expected = oracle(&problem, &inputs).unwrap();
    // Weights 2:1 in the first row and 1:2 in the second.
    assert_close(&expected.output, &[5.0 / 3.0, 8.0 / 3.0, 7.0 / 3.0, 10.0 / 3.0], "output");
    assert_close(&expected.lse, &[3_f64.ln(), 3_f64.ln()], "log-sum-exp");
    assert_close(&[expected.largest_score], &[f64::from(LN_2)], "largest score");
}

#[test]
fn scale_and_softmax() {
    Case::new(1, 1, &[0.0, 1.0, 2.0], &[7.0, 14.0, 28.0]).check(&[(7.0 + 28.0 + 112.0) / 7.0], &[7.0]);
}

/// The table that expressions read.
const NUMBERS: [f32; 3] = [LN_2, 0.0, 2.0 * LN_2];
const INTEGERS: [i32; 4] = [5, 5, 6, 6];

/// Weights of 1 by the keys, times 2, 1 and 4 by the table.
#[test]
fn a_score_mod_comes_last() {
    let mut case = Case::new(1, 1, &[0.0; 3], &[7.0, 14.0, 28.0]);
    case.problem.score_mod = Some(ScoreMod::new("table", |score, at| score + at.number(at.key)));
    case.problem.aux_f32 = NUMBERS.len();
    case.check(&[(14.0 + 14.0 + 112.0) / 7.0], &[7.0]);
}

/// Keys of the same number; a NaN in the others is not seen.
#[test]
fn a_mask_mod_takes_keys_out() {
    let mut case = Case::new(1, 4, &[0.0, 0.0, f64::NAN, 0.0], &[1.0, 3.0, 8.0, f64::NAN]);
    case.problem.mask_mod =
        Some(MaskMod::new("documents", |at| at.integer(at.query).equals(at.integer(at.key)) & at.query.less(2)));
    case.problem.aux_i32 = INTEGERS.len();
    case.check(&[2.0, 2.0, 0.0, 0.0], &[2.0, 2.0, 0.0, 0.0]);
}

#[test]
fn causal_is_top_left_or_bottom_right() {
    let case = || Case::new(1, 2, &[0.0; 4], &[1.0, 2.0, 4.0, 8.0]);
    case().masked(Mask::Causal(TOP_LEFT)).check(&[1.0, 1.5], &[1.0, 2.0]);
    case().masked(Mask::Causal(BOTTOM_RIGHT)).check(&[7.0 / 3.0, 15.0 / 4.0], &[3.0, 4.0]);
}

/// A window of one to the left is two keys wide.
#[test]
fn windows_include_both_ends() {
    let case = || Case::new(1, 4, &[0.0; 4], &[1.0, 2.0, 4.0, 8.0]);
    case().masked(window(1, 0, TOP_LEFT)).check(&[1.0, 1.5, 3.0, 6.0], &[1.0, 2.0, 2.0, 2.0]);
    case().masked(window(0, 0, BOTTOM_RIGHT)).check(&[1.0, 2.0, 4.0, 8.0], &[1.0; 4]);
    let one_row = || Case::new(1, 1, &[0.0; 4], &[1.0, 2.0, 4.0, 8.0]);
    one_row().masked(window(2, None, BOTTOM_RIGHT)).check(&[14.0 / 3.0], &[3.0]);
    one_row().masked(window(None, 2, TOP_LEFT)).check(&[7.0 / 3.0], &[3.0]);
}

#[test]
fn rows_that_attend_nothing_are_zero() {
    let case = || Case::new(1, 3, &[0.0], &[5.0]).masked(Mask::Causal(BOTTOM_RIGHT));
    case().check(&[0.0, 0.0, 5.0], &[0.0, 0.0, 1.0]);
    // With a sink the output is still 0; the denominator is the sink alone.
    let mut with_sink = case();
    with_sink.sink = Some(2.0 * LN_2);
    with_sink.check(&[0.0, 0.0, 1.0], &[4.0, 4.0, 5.0]);
    Case::new(1, 2, &[], &[]).check(&[0.0, 0.0], &[0.0, 0.0]);
}

/// After the scale, before everything else.
#[test]
fn softcap_bends_the_scaled_score() {
    let mut case = Case::new(1, 1, &[0.0, 1000.0], &[0.0, 1.0]);
    case.problem.softcap = Some(1.0);
    let e = f64::from(E);
    case.check(&[e / (1.0 + e)], &[1.0 + e]);

    let mut case = Case::new(1, 1, &[0.0, 1.0], &[0.0, 1.0]);
    case.problem.scale = 3.0;
    case.problem.softcap = Some(2.0);
    let weight = (2.0 * 1.5_f64.tanh()).exp();
    case.check(&[weight / (1.0 + weight)], &[1.0 + weight]);

    // A bias is not capped.
    let mut case = Case::new(1, 1, &[0.0, 1000.0], &[0.0, 1.0]);
    case.problem.softcap = Some(LN_2);
    case.bias = Some(vec![0.0, 2.0 * LN_2]);
    case.check(&[8.0 / 9.0], &[9.0]);
}

/// Distance is subtracted, on both sides, from the aligned position.
#[test]
fn alibi_lowers_distant_keys() {
    let case = |mask: Mask| {
        let mut case = Case::new(1, 1, &[0.0; 3], &[4.0, 2.0, 1.0]).masked(mask);
        case.slope = Some(LN_2);
        case
    };
    // At key 2: weights 1/4, 1/2, 1.
    case(Mask::None).check(&[3.0 / 1.75], &[1.75]);
    case(Mask::Causal(BOTTOM_RIGHT)).check(&[3.0 / 1.75], &[1.75]);
    // At key 0: weights 1, 1/2, 1/4.
    case(window(None, 5, TOP_LEFT)).check(&[5.25 / 1.75], &[1.75]);
}

#[test]
fn sinks_enter_the_denominator_only() {
    let mut case = Case::new(1, 1, &[0.0, 0.0], &[4.0, 8.0]);
    case.sink = Some(LN_2);
    case.check(&[3.0], &[4.0]);
    // Also when the sink is the largest score by far.
    let mut case = Case::new(1, 1, &[0.0], &[1.0]);
    case.sink = Some(1000.0);
    case.check_logarithms(&[0.0], &[1000.0]);
}

#[test]
fn bias_is_added_and_minus_infinity_removes() {
    let mut case = Case::new(1, 3, &[0.0, 0.0], &[3.0, 6.0]);
    case.bias = Some(vec![0.0, LN_2, f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY, f32::NEG_INFINITY]);
    case.check(&[5.0, 6.0, 0.0], &[3.0, 1.0, 0.0]);
}

/// Bottom-right alignment follows the batch's own length.
#[test]
fn seqused_k_move_the_diagonal() {
    let case = |mask: Mask| {
        let mut case = Case::new(2, 2, &[0.0; 8], &[1.0, 2.0, 4.0, 8.0, 1.0, 2.0, 4.0, 8.0]).masked(mask);
        case.seqused_k = Some(vec![3, 1]);
        case
    };
    case(Mask::None).check(&[7.0 / 3.0, 7.0 / 3.0, 1.0, 1.0], &[3.0, 3.0, 1.0, 1.0]);
    case(Mask::Causal(BOTTOM_RIGHT)).check(&[1.5, 7.0 / 3.0, 0.0, 1.0], &[2.0, 3.0, 0.0, 1.0]);
    case(Mask::Causal(TOP_LEFT)).check(&[1.0, 1.5, 1.0, 1.0], &[1.0, 2.0, 1.0, 1.0]);
}

#[test]
fn masked_nan_does_not_leak_and_attended_nan_does() {
    let nan = f64::NAN;
    Case::new(1, 2, &[0.0, nan], &[3.0, 5.0]).masked(Mask::Causal(TOP_LEFT)).check(&[3.0, nan], &[1.0, nan]);
    Case::new(1, 2, &[0.0, 0.0], &[3.0, nan]).masked(Mask::Causal(TOP_LEFT)).check(&[3.0, nan], &[1.0, 2.0]);
    Case::new(1, 1, &[nan], &[3.0]).check(&[nan], &[nan]);
    let mut case = Case::new(1, 1, &[0.0, nan], &[3.0, nan]);
    case.seqused_k = Some(vec![1]);
    case.check(&[3.0], &[1.0]);
}

#[test]
fn neighbouring_query_heads_share_a_key_head() {
    let mut problem = Problem::new(1, 4, 1, 1, DType::F64);
    problem.key_heads = 2;
    let mut inputs = Inputs::random(&problem, 1);
    inputs.value = Tensor::from_values(DType::F64, &[10.0, 20.0]);
    assert_eq!(oracle(&problem, &inputs).unwrap().output, [10.0, 10.0, 20.0, 20.0]);
}

/// The values in another layout are the same problem.
#[test]
fn layouts_do_not_change_the_answer() {
    let mut problem = Problem::new(2, 4, 5, 3, DType::F32);
    problem.key_heads = 2;
    problem.value_dim = 2;
    let contiguous = oracle(&problem, &Inputs::random(&problem, 4)).unwrap();
    let mut padded = problem.strides();
    padded.query.row = 7;
    padded.output.row = 11;
    padded.query.head = 5 * 7 + 1;
    padded.query.batch = 300;
    padded.output.head = 55;
    padded.output.batch = 220;
    for layout in [Layout::Bshd, Layout::PackedQkv, Layout::Strided(padded)] {
        problem.layout = layout;
        assert_eq!(oracle(&problem, &Inputs::random(&problem, 4)).unwrap(), contiguous, "{layout:?}");
    }
}

#[test]
fn empty_problems_have_empty_answers() {
    for (batch, query_length) in [(0, 5), (2, 0)] {
        let mut problem = Problem::new(batch, 2, query_length, 4, DType::F16);
        problem.key_length = 3;
        let expected = oracle(&problem, &Inputs::random(&problem, 1)).unwrap();
        assert_eq!((expected.output.len(), expected.lse.len()), (0, 0));
    }
}

/// Weights 1, 4 and 8 of the keys and 2^6 of the sink: 13 without it, 77 with it.
#[test]
fn the_lse_has_a_base_and_may_leave_the_sink_out() {
    for (form, expected) in [
        (LseForm::default(), 77.0_f64.ln()),
        (LseForm::default().with_base(LseBase::Two), 77.0_f64.log2()),
        (LseForm::default().without_sink(), 13.0_f64.ln()),
        (LseForm::default().with_base(LseBase::Two).without_sink(), 13.0_f64.log2()),
    ] {
        let mut case = Case::new(1, 1, &[0.0, 2.0, 3.0], &[77.0, 0.0, 154.0]);
        case.sink = Some(6.0 * LN_2);
        case.problem.lse_form = form;
        // The output has the sink in its denominator whatever the form.
        case.check_logarithms(&[1.0 + 16.0], &[expected]);
    }
}

/// A sink so large that all weights of keys vanish beside it leaves their LSE as it is; without keys it is minus infinity.
#[test]
fn a_huge_sink_does_not_swallow_the_lse_of_the_keys() {
    let form = LseForm::default().without_sink();
    let mut case = Case::new(1, 1, &[0.0, 2.0, 3.0], &[1.0, 1.0, 1.0]);
    (case.sink, case.problem.lse_form) = (Some(2000.0), form);
    case.check_logarithms(&[0.0], &[13.0_f64.ln()]);
    let mut case = Case::new(1, 1, &[], &[]);
    (case.sink, case.problem.lse_form) = (Some(1.0), form);
    case.check_logarithms(&[0.0], &[f64::NEG_INFINITY]);
}

/// Results in `f64` are judged by more bits than they have. The number is that of 60 decimal digits, rounded once; a plain
/// `f64` computation of it is wrong by 15 roundoffs.
#[test]
fn the_oracle_of_f64_is_right_to_the_last_bit() {
    let mut problem = Problem::new(1, 1, 1, 4, DType::F64);
    (problem.value_dim, problem.scale) = (1, 0.5);
    (problem.softcap, problem.sinks) = (Some(50.0), true);
    let tensor = |values: &[f64]| Tensor::from_values(DType::F64, values);
    let (query, key) = (tensor(&[-1.84, 1.718, 0.873, -1.62]), tensor(&[1.927, -0.969, -1.367, 1.886]));
    let inputs = Inputs { sinks: Some(vec![2.875]), ..Inputs::new(query, key, tensor(&[1.0])) };
    assert_eq!(oracle(&problem, &inputs).unwrap().output, [0.000_504_967_778_673_276_9]);
}
