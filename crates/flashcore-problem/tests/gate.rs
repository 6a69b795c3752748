//! The gate on trial: it must pass right answers and fail wrong ones.

mod flash;

use flash::{Mistake, flash};
use flashcore_problem::{
    Alignment, DType, Element, Evidence, Expected, Failure, GuardError, Guarded, Inputs, Invalid, Layout, Limits, Mask,
    Outputs, Problem, ReferenceError, Stress, Tensor, TensorError, Verdict, Worst, judge, oracle, reference,
};

/// A problem with its answer, ready to judge.
struct Trial {
    problem: Problem,
    inputs: Inputs,
    expected: Expected,
    yardstick: ReferenceError,
}

impl Trial {
    fn new(problem: &Problem, inputs: Inputs) -> Self {
        let expected = oracle(problem, &inputs).unwrap();
        let yardstick = ReferenceError::measure(problem, &inputs, &expected).unwrap();
        Self { problem: problem.clone(), inputs, expected, yardstick }
    }

    fn judge(&self, outputs: &Outputs) -> Verdict {
        judge(&self.problem, &self.expected, &self.yardstick, &Evidence::new(&self.inputs, outputs))
    }

    fn flash(&self, tile: usize, mistake: Mistake) -> Verdict {
        self.judge(&flash(&self.problem, &self.inputs, tile, mistake))
    }
}

const DTYPES: [DType; 3] = [DType::F16, DType::Bf16, DType::F32];
const LENGTHS: [usize; 4] = [64, 97, 203, 512];
const MASKS: [Mask; 2] = [Mask::None, Mask::Causal(Alignment::BottomRight)];

/// Keys per tile of the kernel on trial: every length has at least two tiles, two have a ragged tail.
const TILE: usize = 32;

fn problems(query_length: usize) -> impl Iterator<Item = Problem> {
    let cases = DTYPES.into_iter().flat_map(|dtype| LENGTHS.map(|length| (dtype, length)));
    cases.flat_map(move |(dtype, length)| {
        MASKS.map(|mask| {
            let mut problem = Problem::new(1, 4, length, 64, dtype);
            problem.key_heads = 2;
            problem.query_length = query_length;
            problem.mask = mask;
            problem.lse = true;
            problem
        })
    })
}

#[test]
fn correct_answers_pass() {
    for problem in problems(48) {
        for seed in 0..2 {
            let trial = Trial::new(&problem, Inputs::random(&problem, seed));
            let verdict = trial.judge(&reference(&problem, &trial.inputs).unwrap());
            assert!(verdict.passed(), "reference, {problem}, seed {seed}: {verdict}");
            for tile in [TILE, 128] {
                let verdict = trial.flash(tile, Mistake::None);
                assert!(verdict.passed(), "tiles of {tile}, {problem}, seed {seed}: {verdict}");
            }
        }
    }
}

#[test]
fn expected_values_of_another_problem_are_a_failure() {
    let problem = Problem::new(1, 2, 5, 8, DType::F32).with_lse(true);
    let mut trial = Trial::new(&problem, Inputs::random(&problem, 1));
    let outputs = reference(&problem, &trial.inputs).unwrap();
    assert_eq!(trial.judge(&outputs).failures, []);
    trial.expected.output.truncate(79);
    assert_eq!(trial.judge(&outputs).failures, [Failure::WrongExpected { actual: [79, 10], needed: [80, 10] }]);
    trial.expected.output.push(0.0);
    trial.expected.lse.clear();
    assert_eq!(trial.judge(&outputs).failures, [Failure::WrongExpected { actual: [80, 0], needed: [80, 10] }]);
}

#[test]
fn correct_answers_to_stress_pass() {
    for problem in problems(16) {
        for stress in Stress::ALL {
            let trial = Trial::new(&problem, Inputs::stress(&problem, stress, 5));
            let verdict = trial.flash(TILE, Mistake::None);
            assert!(verdict.passed(), "{problem}, {stress:?}: {verdict}");
        }
    }
}

/// Few elements: the reference can be lucky on all of them, and the kernel must not fail for it.
#[test]
fn correct_answers_to_tiny_problems_pass() {
    for dtype in DTYPES {
        for (query_length, key_length) in [(1, 1), (1, 2), (1, 3), (3, 3), (1, 97), (7, 5)] {
            for seed in 0..150 {
                let mut problem = Problem::new(1, 1, key_length, 8, dtype);
                problem.query_length = query_length;
                problem.lse = true;
                let trial = Trial::new(&problem, Inputs::random(&problem, seed));
                let verdict = trial.flash(TILE, Mistake::None);
                assert!(verdict.passed(), "{problem}, seed {seed}: {verdict}");
            }
        }
    }
}

/// One element, whose weights cancel: with weights relative to the row max it may be several times as wrong as with
/// normalized ones, or the other way round.
#[test]
fn correct_answers_of_one_element_pass() {
    for dtype in [DType::F16, DType::Bf16] {
        let mut problem = Problem::new(1, 1, 22, 8, dtype);
        (problem.query_length, problem.value_dim) = (1, 1);
        for seed in 0..5_000 {
            let trial = Trial::new(&problem, Inputs::random(&problem, seed));
            let verdict = trial.flash(TILE, Mistake::None);
            assert!(verdict.passed(), "{problem}, seed {seed}: {verdict}");
        }
    }
}

#[test]
fn every_mistake_is_caught() {
    for problem in problems(40) {
        let trial = Trial::new(&problem, Inputs::random(&problem, 11));
        for mistake in Mistake::ALL {
            // These change nothing where there is no mask, or no tail.
            let harmless = match mistake {
                Mistake::MaskShifted => problem.mask == Mask::None,
                Mistake::TailNotMasked => problem.key_length % TILE == 0,
                Mistake::WeightsCut | Mistake::OutputCut => problem.dtype == DType::F32,
                _ => false,
            };
            let verdict = trial.flash(TILE, mistake);
            assert_eq!(verdict.passed(), harmless, "{mistake:?}, {problem}: {verdict}");
        }
    }
}

/// The bounds of few elements are the widest. Truncation needs more elements to show.
#[test]
fn every_mistake_is_caught_in_few_elements() {
    let cases = [DType::F16, DType::Bf16].into_iter().flat_map(|dtype| [1, 4, 8].map(|columns| (dtype, columns)));
    for (dtype, columns) in cases {
        let mut problem = Problem::new(1, 4, 97, 64, dtype);
        (problem.key_heads, problem.query_length, problem.value_dim) = (2, 1, columns);
        problem.lse = true;
        let caught = Mistake::ALL.into_iter().filter(|mistake| match mistake {
            Mistake::WeightsCut | Mistake::OutputCut | Mistake::MaskShifted | Mistake::KeyValueSwapped => false,
            // Two columns, or four, are needed to make these; and four elements hardly tell roundings apart.
            Mistake::ColumnsExchanged | Mistake::ElementZeroed | Mistake::WeightsInFp8 => columns > 1,
            _ => true,
        });
        let trials: Vec<Trial> = (10..16).map(|seed| Trial::new(&problem, Inputs::random(&problem, seed))).collect();
        for mistake in caught {
            for trial in &trials {
                let verdict = trial.flash(TILE, mistake);
                assert!(!verdict.passed(), "{mistake:?}, {problem}: {verdict}");
            }
        }
    }
}

/// One bad element among many shows in the largest error only, a small error everywhere in the norm only, and a smaller
/// one that is the same everywhere in the bias only.
#[test]
fn largest_error_norm_and_bias_see_different_things() {
    for dtype in [DType::F16, DType::Bf16] {
        let problem = Problem::new(1, 1, 203, 64, dtype);
        let trial = Trial::new(&problem, Inputs::random(&problem, 11));
        let limits = Limits::new(&problem, &trial.expected, &trial.yardstick);
        let judge_values = |change: &dyn Fn(usize, f64) -> f64| {
            let values = trial.expected.output.iter().enumerate().map(|(index, &value)| change(index, value));
            let output = Tensor::from_values(dtype, &values.collect::<Vec<f64>>());
            trial.judge(&Outputs { output, ..Outputs::default() })
        };

        let one_far_off = |index: usize, value: f64| if index == 77 { value + 1.5 * limits.max_error } else { value };
        let verdict = judge_values(&one_far_off);
        assert!(matches!(verdict.failures[..], [Failure::MaxError { .. }]), "{verdict}");

        let roundoff = dtype.unit_roundoff();
        let verdict = judge_values(&|index, value| value * (1.0 + [2.5, -2.5][(index + index / 64) % 2] * roundoff));
        assert!(matches!(verdict.failures[..], [Failure::RelativeL2 { .. }]), "{verdict}");

        let verdict = judge_values(&|_, value| value * (1.0 - 0.6 * roundoff));
        assert!(matches!(verdict.failures[..], [Failure::Biased { .. }]), "{verdict}");
        assert!((verdict.relative_bias / roundoff + 0.6).abs() < 0.02, "{verdict:?}");
    }
}

/// Problems with key and value in FP8, under a wide query and under one in FP8.
fn float8_problems(query_length: usize) -> impl Iterator<Item = Problem> {
    let types = [
        (DType::F16, DType::E4m3, None),
        (DType::Bf16, DType::E5m2, None),
        (DType::F32, DType::E4m3, None),
        (DType::E4m3, DType::E4m3, Some(DType::F16)),
        (DType::E4m3, DType::E5m2, Some(DType::Bf16)),
    ];
    types.into_iter().flat_map(move |(dtype, kv_dtype, out_dtype)| {
        [97, 203].map(|length| {
            let mut problem = Problem::new(1, 4, length, 64, dtype).with_kv_dtype(Some(kv_dtype));
            (problem.key_heads, problem.query_length, problem.out_dtype) = (2, query_length, out_dtype);
            (problem.mask, problem.lse) = (Mask::Causal(Alignment::BottomRight), true);
            problem
        })
    })
}

#[test]
fn correct_answers_of_8_bits_pass() {
    for problem in float8_problems(48) {
        let stresses = Stress::ALL.map(|stress| Inputs::stress(&problem, stress, 5));
        for inputs in (0..3).map(|seed| Inputs::random(&problem, seed)).chain(stresses) {
            let trial = Trial::new(&problem, inputs);
            let verdict = trial.judge(&reference(&problem, &trial.inputs).unwrap());
            assert!(verdict.passed(), "reference, {problem}: {verdict}");
            for tile in [TILE, 128] {
                let verdict = trial.flash(tile, Mistake::None);
                assert!(verdict.passed(), "tiles of {tile}, {problem}: {verdict}");
            }
        }
    }
    for (key_length, seed) in [1, 2, 3, 5, 97].into_iter().flat_map(|length| (0..50).map(move |seed| (length, seed))) {
        let mut problem = Problem::new(1, 1, key_length, 8, DType::E4m3).with_out_dtype(Some(DType::F16));
        problem.query_length = 1;
        let trial = Trial::new(&problem, Inputs::random(&problem, seed));
        let verdict = trial.flash(TILE, Mistake::None);
        assert!(verdict.passed(), "{problem}, seed {seed}: {verdict}");
    }
}

#[test]
fn every_mistake_is_caught_in_8_bits() {
    for problem in float8_problems(40) {
        let trial = Trial::new(&problem, Inputs::random(&problem, 11));
        let is_float8 = problem.dtype.is_float8();
        for mistake in Mistake::ALL {
            let harmless = match mistake {
                Mistake::WeightsCut => problem.dtype == DType::F32,
                // Half a step of 16 bits is nothing beside that of weights of 8.
                Mistake::OutputCut => problem.dtype == DType::F32 || is_float8,
                // That is what they are.
                Mistake::WeightsInFp8 => is_float8,
                _ => false,
            };
            let verdict = trial.flash(TILE, mistake);
            assert_eq!(verdict.passed(), harmless, "{mistake:?}, {problem}: {verdict}");
        }
    }
}

/// Key and value of 8 bits have the bounds of the query's type, to the same figures; all of 8 bits those of weights in
/// e4m3.
#[test]
fn limits_of_8_bits_are_as_documented() {
    for problem in float8_problems(64) {
        let trial = Trial::new(&problem, Inputs::random(&problem, 3));
        let limits = Limits::new(&problem, &trial.expected, &trial.yardstick);
        let documented = match problem.dtype {
            DType::F16 => 1e-3,
            DType::Bf16 => 8e-3,
            DType::F32 => 1e-6 * (problem.key_length as f64).sqrt(),
            _ => 0.13,
        };
        assert!(limits.relative_l2 <= documented, "{problem}: {limits:?}");
        assert!(limits.lse < 2.2e-5, "{problem}: {limits:?}");
        if problem.dtype.is_float8() {
            assert!(limits.relative_bias < 0.4 / 16.0, "{problem}: {limits:?}");
        }
    }
}

/// The figures in the documentation of the limits.
#[test]
fn limits_are_as_documented() {
    for problem in problems(64) {
        let trial = Trial::new(&problem, Inputs::random(&problem, 3));
        let limits = Limits::new(&problem, &trial.expected, &trial.yardstick);
        let documented = match problem.dtype {
            DType::F16 => 1e-3,
            DType::Bf16 => 8e-3,
            DType::F32 | DType::F64 => 1e-6 * (problem.key_length as f64).sqrt(),
            DType::E4m3 | DType::E5m2 => unreachable!("not among the problems"),
        };
        assert!(limits.relative_l2 <= documented, "{problem}: {limits:?}");
        if problem.dtype != DType::F32 {
            let largest = trial.expected.output.iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
            assert!(limits.max_error <= 5.0 * problem.dtype.unit_roundoff() * largest, "{problem}: {limits:?}");
        }
        assert!(limits.lse < 2.2e-5, "{problem}: {limits:?}");
        if problem.dtype != DType::F32 {
            let bias = limits.relative_bias / problem.dtype.unit_roundoff();
            assert!(bias < 0.4, "{problem}: a bias of {bias} unit roundoffs");
        }
    }
}

/// The state of a run that passes, to be spoilt.
struct Run {
    inputs_after: Inputs,
    outputs: Outputs,
    repeats: Vec<Outputs>,
    guarded: Guarded,
}

/// Three queries on two keys, so that the first row attends nothing, and two elements of padding after each output row.
fn strided_problem() -> Problem {
    let mut problem = Problem::new(2, 2, 3, 4, DType::F16);
    problem.lse = true;
    problem.mask = Mask::Causal(Alignment::BottomRight);
    problem.key_length = 2;
    let mut strides = problem.strides();
    strides.output.row = 6;
    strides.output.head = 18;
    strides.output.batch = 36;
    problem.layout = Layout::Strided(strides);
    problem
}

/// Spoils a run that passes and compares the failures.
fn check(spoil: impl FnOnce(&mut Run), expected: impl FnOnce(&Trial, &Limits) -> Vec<Failure>) {
    let problem = strided_problem();
    let trial = Trial::new(&problem, Inputs::random(&problem, 1));

    let outputs = reference(&problem, &trial.inputs).unwrap();
    let mut run = Run {
        inputs_after: trial.inputs.clone(),
        repeats: vec![outputs.clone(), outputs.clone()],
        outputs,
        guarded: Guarded::new(&[0; 16]),
    };
    spoil(&mut run);
    let guards = [("output".to_owned(), run.guarded.check())];
    let evidence = Evidence {
        inputs: &trial.inputs,
        inputs_after: &run.inputs_after,
        outputs: &run.outputs,
        repeats: &run.repeats,
        guards: &guards,
    };
    let verdict = judge(&problem, &trial.expected, &trial.yardstick, &evidence);
    let limits = Limits::new(&problem, &trial.expected, &trial.yardstick);
    // As text, because a NaN is not equal to itself.
    assert_eq!(format!("{:?}", verdict.failures), format!("{:?}", expected(&trial, &limits)));
}

/// The last element of the output of [`check`], and its index in the storage and among the elements.
const LAST: Element = Element { batch: 1, head: 1, row: 2, column: 3 };
const LAST_STORED: usize = 36 + 18 + 12 + 3;
const LAST_DENSE: usize = 47;

#[test]
fn what_is_right_has_no_failures() {
    check(|_| {}, |_, _| vec![]);
}

#[test]
fn elements_must_be_written() {
    check(
        |run| {
            run.outputs.output = Tensor::poisoned(DType::F16, run.outputs.output.len());
            run.repeats.clear();
        },
        |trial, _| {
            let first = Element { batch: 0, head: 0, row: 0, column: 0 };
            let expected = trial.expected.output[0];
            vec![
                Failure::Unwritten { count: 48, first },
                Failure::NotFinite { count: 48, first: Worst { element: first, expected, actual: f64::NAN } },
            ]
        },
    );
    check(
        |run| {
            let untouched = Outputs::poisoned(&strided_problem()).lse;
            run.outputs.lse = untouched;
            run.repeats.clear();
        },
        |trial, limits| {
            let element = Element { batch: 1, head: 1, row: 2, column: 0 };
            let expected = trial.expected.lse[11];
            let worst = Worst { element, expected, actual: f64::NAN };
            vec![
                Failure::LseUnwritten { count: 12, first: Element { batch: 0, head: 0, row: 0, column: 0 } },
                Failure::Lse { worst, limit: limits.lse },
            ]
        },
    );
}

#[test]
fn gaps_must_not_be_written() {
    check(
        |run| {
            for run in run.repeats.iter_mut().chain([&mut run.outputs]) {
                run.output.set(10, 0.0);
                run.output.set(11, 1.0);
            }
        },
        |_, _| vec![Failure::GapWritten { count: 2, first_index: 10 }],
    );
}

#[test]
fn not_a_number_is_never_close() {
    check(
        |run| {
            run.outputs.output.set(LAST_STORED, f64::NAN);
            run.repeats.clear();
        },
        |trial, _| {
            let expected = trial.expected.output[LAST_DENSE];
            vec![Failure::NotFinite { count: 1, first: Worst { element: LAST, expected, actual: f64::NAN } }]
        },
    );
}

/// The other way round: a NaN that was attended must not be swallowed.
#[test]
fn attended_not_a_number_must_be_seen() {
    let problem = Problem::new(1, 1, 3, 4, DType::Bf16);
    let clean = Inputs::random(&problem, 2);
    let mut inputs = clean.clone();
    inputs.value.set(5, f64::NAN);
    let trial = Trial::new(&problem, inputs);
    assert!(trial.flash(TILE, Mistake::None).passed());
    let verdict = trial.judge(&flash(&problem, &clean, TILE, Mistake::None));
    assert!(matches!(verdict.failures[..], [Failure::NotFinite { count: 3, .. }]), "{verdict}");
}

#[test]
fn rows_that_attend_nothing_must_be_exactly_zero() {
    check(
        |run| {
            run.outputs.output.set(1, 1e-6);
            run.repeats.clear();
        },
        |trial, _| {
            assert_eq!(trial.expected.lse[0], f64::NEG_INFINITY);
            let element = Element { batch: 0, head: 0, row: 0, column: 1 };
            let actual = DType::F16.round(1e-6);
            vec![Failure::EmptyRowNotZero { count: 1, first: Worst { element, expected: 0.0, actual } }]
        },
    );
    check(
        |run| {
            run.outputs.lse.iter_mut().for_each(|rows| rows[0] = -1e30);
            run.repeats.clear();
        },
        |_, limits| {
            let element = Element { batch: 0, head: 0, row: 0, column: 0 };
            let worst = Worst { element, expected: f64::NEG_INFINITY, actual: f64::from(-1e30_f32) };
            vec![Failure::Lse { worst, limit: limits.lse }]
        },
    );
}

#[test]
fn inputs_guards_and_repeats_are_compared() {
    check(
        |run| {
            run.inputs_after.key.data[3] ^= 1;
            run.inputs_after.value.data[0] ^= 0x80;
        },
        |_, _| vec![Failure::InputChanged { tensor: "key" }, Failure::InputChanged { tensor: "value" }],
    );
    check(
        |run| {
            let end = run.guarded.payload_start() + 16;
            run.guarded.bytes_mut()[end + 1] = 0;
        },
        |_, _| {
            let error = GuardError::After { distance: 1, found: 0 };
            vec![Failure::Guard { buffer: "output".to_owned(), error }]
        },
    );
    check(
        |run| {
            run.repeats[1].output.data[2 * LAST_STORED] ^= 1;
            run.repeats[0].lse.iter_mut().for_each(|rows| rows[11] = rows[11].next_up());
        },
        |_, _| {
            vec![
                Failure::NotRepeatable { run: 1, tensor: "lse", byte: 44 },
                Failure::NotRepeatable { run: 2, tensor: "output", byte: 2 * LAST_STORED },
            ]
        },
    );
}

#[test]
fn outputs_of_another_problem_are_refused() {
    check(
        |run| {
            run.outputs.output.data.pop();
            run.outputs.lse = None;
        },
        |_, _| {
            vec![Failure::WrongOutputs(Invalid::Tensors(vec![
                TensorError::TooShort { tensor: "output", actual: 69, needed: 70 },
                TensorError::Missing { tensor: "lse" },
            ]))]
        },
    );
}

/// The messages for a wrong kernel.
#[test]
fn failures_explain_themselves() {
    let worst = Worst { element: LAST, expected: 0.25, actual: -0.5 };
    let verdict = Verdict {
        failures: vec![
            Failure::MaxError { worst, limit: 1e-3 },
            Failure::Guard { buffer: "output".to_owned(), error: GuardError::Before { distance: 4, found: 0 } },
        ],
        max_error: 0.75,
        reference_max_error: 2.5e-4,
        relative_l2: 0.125,
        relative_bias: 0.0,
        worst: Some(worst),
    };
    assert_eq!(
        verdict.to_string(),
        "failed: max error 7.500e-1 (reference 2.500e-4), relative L2 1.250e-1\n  \
         largest error 7.500e-1 is above 1.000e-3, at (batch 1, head 1, row 2, column 3): expected 2.500000e-1, got \
         -5.000000e-1\n  \
         output: the byte 4 bytes before the buffer was overwritten with 0x00"
    );
}
