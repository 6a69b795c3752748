//! The CPU backend before the judge, at every level that this machine has.

use flashcore_cpu::{CpuError, Level, LevelError, attend, attend_with};
use flashcore_problem::{
    Alignment, Bias, BiasStrides, DType, Evidence, Inputs, Invalid, Layout, Mask, Outputs, Problem, ProblemError,
    ReferenceError, Stress, Tensor, TensorError, judge, oracle,
};
use rayon::ThreadPoolBuilder;

/// Computes twice at each level, with all threads and with one, and lets the gate judge. One thread uses its tiles again
/// and again, and takes them larger.
fn check_inputs(problem: &Problem, inputs: &Inputs) {
    let expected = oracle(problem, inputs).unwrap();
    let yardstick = ReferenceError::measure(problem, inputs, &expected).unwrap();
    let one_thread = ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let many_threads = ThreadPoolBuilder::new().num_threads(16).build().unwrap();
    for level in Level::available() {
        let run = || {
            let mut outputs = Outputs::poisoned(problem);
            attend_with(level, problem, inputs, &mut outputs).unwrap();
            outputs
        };
        let (outputs, repeats) = (run(), [one_thread.install(run), many_threads.install(run)]);
        let evidence = Evidence { repeats: &repeats, ..Evidence::new(inputs, &outputs) };
        let verdict = judge(problem, &expected, &yardstick, &evidence);
        assert!(verdict.passed(), "{problem} at level {level}: {verdict}");
    }
}

/// Self-attention with two heads of 32 columns, changed, in every type.
fn check(length: usize, change: impl Fn(&mut Problem)) {
    for dtype in DType::ALL {
        let mut problem = Problem::new(1, 2, length, 32, dtype);
        problem.lse = true;
        change(&mut problem);
        check_inputs(&problem, &Inputs::random(&problem, 1));
    }
}

const TOP_LEFT: Alignment = Alignment::TopLeft;
const BOTTOM_RIGHT: Alignment = Alignment::BottomRight;

fn masks() -> Vec<Mask> {
    let mut masks = vec![Mask::None];
    for alignment in [TOP_LEFT, BOTTOM_RIGHT] {
        masks.push(Mask::Causal(alignment));
        for (left, right) in
            [(Some(0), Some(0)), (Some(70), Some(0)), (Some(5), Some(9)), (None, Some(40)), (Some(33), None)]
        {
            masks.push(Mask::Window { left, right, alignment });
        }
    }
    masks
}

#[test]
fn ragged_lengths() {
    for length in [1, 2, 3, 63, 64, 65, 97, 128, 129, 203, 257] {
        check(length, |_| {});
        check(length, |problem| problem.mask = Mask::Causal(BOTTOM_RIGHT));
    }
}

#[test]
fn every_mask_on_unequal_lengths() {
    for mask in masks() {
        for (queries, keys) in [(97, 203), (203, 97), (1, 130), (130, 1)] {
            check(keys, |problem| {
                problem.query_length = queries;
                problem.mask = mask;
            });
        }
    }
}

#[test]
fn head_dimensions() {
    for (head_dim, value_dim) in [(1, 1), (8, 8), (40, 40), (59, 3), (64, 128), (111, 64), (128, 128), (256, 17)] {
        check(70, |problem| {
            problem.head_dim = head_dim;
            problem.value_dim = value_dim;
            problem.scale = 1.0 / (head_dim as f64).sqrt();
        });
    }
}

#[test]
fn grouped_heads() {
    for (query_heads, key_heads) in [(4, 4), (4, 2), (4, 1), (6, 3), (7, 1)] {
        check(70, |problem| {
            problem.batch = 2;
            problem.query_heads = query_heads;
            problem.key_heads = key_heads;
        });
    }
}

/// Each alone, then all of them, with each mask.
#[test]
fn features() {
    let features: [fn(&mut Problem); 6] = [
        |problem| problem.softcap = Some(1.5),
        |problem| problem.alibi = true,
        |problem| problem.sinks = true,
        |problem| problem.bias = true,
        |problem| problem.seqused_k = true,
        |problem| problem.lse = false,
    ];
    let shape = |problem: &mut Problem| {
        problem.batch = 3;
        problem.query_length = 66;
    };
    for feature in features {
        check(75, |problem| {
            shape(problem);
            feature(problem);
        });
    }
    for mask in masks() {
        check(75, |problem| {
            shape(problem);
            problem.mask = mask;
            for feature in &features[..5] {
                feature(problem);
            }
        });
    }
}

/// Few rows are decoded, and keys that are enough for several splits are split: alone and with all features.
#[test]
fn few_rows_over_many_keys() {
    for (queries, keys) in [(1, 1), (1, 63), (1, 1300), (2, 129), (3, 1100), (8, 70), (9, 1100), (40, 1500)] {
        for (query_heads, key_heads) in [(2, 2), (4, 2), (6, 1)] {
            let shape = |problem: &mut Problem| {
                (problem.query_length, problem.query_heads, problem.key_heads) = (queries, query_heads, key_heads);
                (problem.head_dim, problem.value_dim) = (40, 24);
            };
            check(keys, shape);
            check(keys, |problem| {
                shape(problem);
                problem.batch = 2;
                problem.mask = Mask::Window { left: Some(600), right: Some(1), alignment: BOTTOM_RIGHT };
                (problem.alibi, problem.sinks, problem.bias, problem.seqused_k) = (true, true, true, true);
                problem.softcap = Some(1.5);
                problem.layout = Layout::Bshd;
            });
        }
    }
}

/// Heads beside each other take turns at every tile, 2 to 8 of them.
#[test]
fn heads_that_lie_beside_each_other() {
    for (key_heads, query_length, mask) in [2, 5, 6, 8, 11, 16]
        .into_iter()
        .flat_map(|heads| masks().into_iter().map(move |mask| (heads, 1 + heads % 2, mask)))
    {
        check(query_length, |problem| {
            (problem.batch, problem.query_heads, problem.key_heads) = (2, 2 * key_heads, key_heads);
            (problem.key_length, problem.mask, problem.layout) = (333, mask, Layout::Bshd);
            (problem.alibi, problem.sinks, problem.lse) = (true, true, true);
        });
    }
}

#[test]
fn layouts() {
    for layout in [Layout::Bshd, Layout::PackedQkv] {
        check(70, |problem| {
            problem.batch = 2;
            problem.query_heads = 4;
            problem.layout = layout;
        });
    }
    check(70, |problem| {
        problem.batch = 2;
        let mut strides = problem.strides();
        for strides in [&mut strides.query, &mut strides.key, &mut strides.value, &mut strides.output] {
            (strides.row, strides.batch, strides.head) = (2 * 33 + 5, 33, 71 * 70 + 3);
        }
        // One key for all batches.
        strides.key.batch = 0;
        problem.layout = Layout::Strided(strides);
    });
}

#[test]
fn stress() {
    for stress in Stress::ALL {
        for dtype in DType::ALL {
            for mask in [Mask::None, Mask::Causal(TOP_LEFT)] {
                let mut problem = Problem::new(1, 1, 150, 64, dtype);
                problem.lse = true;
                problem.mask = mask;
                check_inputs(&problem, &Inputs::stress(&problem, stress, 2));
            }
        }
    }
}

/// Scores far above the row max of the keys before, from the middle of a tile on, in some rows.
#[test]
fn scores_that_rise() {
    for dtype in [DType::F16, DType::F32] {
        for (first_key, factor) in [(8, 4.0), (70, 16.0), (200, 30.0)] {
            let mut problem = Problem::new(1, 1, 256, 64, dtype);
            problem.lse = true;
            let mut inputs = Inputs::random(&problem, 4);
            let keys = inputs.key.dense(problem.key_shape(), problem.strides().key);
            for (index, key) in keys.into_iter().enumerate().skip(first_key * 64) {
                inputs.key.set(index, key * factor);
            }
            check_inputs(&problem, &inputs);
        }
    }
}

/// Rising scores with values so large that sums of weights far above 1 would leave their range.
#[test]
fn scores_that_rise_with_large_values() {
    for dtype in [DType::Bf16, DType::F32] {
        let mut problem = Problem::new(1, 1, 545, 16, dtype);
        problem.scale = 0.8;
        let mut inputs = Inputs::random(&problem, 7);
        let values = inputs.value.dense(problem.value_shape(), problem.strides().value);
        for (index, value) in values.into_iter().enumerate() {
            inputs.value.set(index, value * 2.0_f64.powi(112));
        }
        check_inputs(&problem, &inputs);
    }
}

/// The factor of the scores is above zero almost always, but need not be.
#[test]
fn every_sign_of_the_scale() {
    for scale in [0.3, 0.0, -0.3] {
        for mask in [Mask::None, Mask::Causal(BOTTOM_RIGHT)] {
            check(140, |problem| {
                problem.scale = scale;
                problem.mask = mask;
            });
        }
    }
}

/// The scale of problems in `f64` is not rounded to `f32`: 1 / sqrt(8) would lose 29 bits.
#[test]
fn the_scale_of_f64_is_f64() {
    let mut problem = Problem::new(1, 1, 1, 8, DType::F64);
    (problem.key_length, problem.value_dim) = (2, 1);
    let mut inputs = Inputs::random(&problem, 1);
    inputs.query = Tensor::from_values(DType::F64, &[1.0; 8]);
    inputs.key = Tensor::from_values(DType::F64, &[[0.5; 8], [0.25; 8]].concat());
    inputs.value = Tensor::from_values(DType::F64, &[1.0, 0.0]);
    // Scores of 4 and 2 times the scale.
    let expected = 1.0 / (1.0 + (-2.0 / 8.0_f64.sqrt()).exp());
    for level in Level::available() {
        let mut outputs = Outputs::poisoned(&problem);
        attend_with(level, &problem, &inputs, &mut outputs).unwrap();
        let error = (outputs.output.get(0) - expected).abs();
        assert!(error < 4.0 * f64::EPSILON, "{error:e} at level {level}");
    }
}

/// Long sums in `f64` round less often than those of the reference, which adds term by term: outputs that are small beside
/// the values they are sums of are judged by luck otherwise.
#[test]
fn long_sums_in_f64() {
    let mut problem = Problem::new(1, 1, 128, 64, DType::F64);
    (problem.key_length, problem.scale) = (1000, 0.0);
    let inputs = Inputs::random(&problem, 5);
    let expected = oracle(&problem, &inputs).unwrap();
    let yardstick = ReferenceError::measure(&problem, &inputs, &expected).unwrap();
    let mut outputs = Outputs::poisoned(&problem);
    attend(&problem, &inputs, &mut outputs).unwrap();
    let verdict = judge(&problem, &expected, &yardstick, &Evidence::new(&inputs, &outputs));
    assert!(verdict.passed(), "{verdict}");
    let (own, plain) = (verdict.relative_l2, yardstick.relative_l2);
    assert!(own < 0.5 * plain, "a relative error of {own:e}, where plain sums have {plain:e}");
}

/// Sums in `f32` of values that have a mean are those of tiles, added up: plain sums over all keys, as the reference has
/// them, are rounded to the size of the whole sum with every key.
#[test]
fn long_sums_of_values_with_a_mean() {
    for queries in [1, 64] {
        let mut problem = Problem::new(1, 2, queries, 64, DType::F32);
        // Too few for split-KV, whose splits would be sums of their own.
        problem.key_length = 1000;
        let mut inputs = Inputs::random(&problem, 5);
        let values = inputs.value.dense(problem.value_shape(), problem.strides().value);
        for (index, value) in values.into_iter().enumerate() {
            inputs.value.set(index, value + 100.0);
        }
        let expected = oracle(&problem, &inputs).unwrap();
        let yardstick = ReferenceError::measure(&problem, &inputs, &expected).unwrap();
        for level in Level::available() {
            let mut outputs = Outputs::poisoned(&problem);
            attend_with(level, &problem, &inputs, &mut outputs).unwrap();
            let verdict = judge(&problem, &expected, &yardstick, &Evidence::new(&inputs, &outputs));
            assert!(verdict.passed(), "{verdict}");
            let (own, plain) = (verdict.relative_l2, yardstick.relative_l2);
            assert!(own < 0.35 * plain, "{queries} rows at level {level}: {own:e}, where plain sums have {plain:e}");
        }
    }
}

/// A score of plus infinity makes output and log-sum-exp of its row NaN, for the oracle and at every level.
#[test]
fn a_score_of_plus_infinity() {
    for queries in [1, 40] {
        check(queries, |problem| (problem.key_length, problem.lse) = (70, true));
        for dtype in DType::ALL {
            let mut problem = Problem::new(1, 1, queries, 32, dtype);
            (problem.key_length, problem.lse) = (70, true);
            problem.mask = Mask::Causal(BOTTOM_RIGHT);
            let mut inputs = Inputs::random(&problem, 1);
            // The last key, which only the last row attends. Its query is 1 in the first column and 0 elsewhere.
            let key_start = 69 * 32;
            let query_start = (queries - 1) * 32;
            for column in 0..32 {
                inputs.query.set(query_start + column, f64::from(u8::from(column == 0)));
                inputs.key.set(key_start + column, if column == 0 { f64::INFINITY } else { 1.0 });
            }
            let expected = oracle(&problem, &inputs).unwrap();
            let last = expected.lse.len() - 1;
            assert!(expected.lse[last].is_nan() && expected.output[query_start..].iter().all(|x| x.is_nan()));
            assert!(expected.lse[..last].iter().all(|x| x.is_finite()));
            check_inputs(&problem, &inputs);
        }
    }
}

/// Values down to subnormal ones, all of them or those of the first keys only: instructions that take subnormals as zero
/// must not show.
#[test]
fn small_values() {
    for dtype in [DType::Bf16, DType::F32] {
        for (exponent, keys) in [(-60, 150), (-70, 150), (-120, 150), (-127, 150), (-131, 150), (-127, 128), (-131, 64)]
        {
            for mask in [Mask::None, Mask::Causal(TOP_LEFT)] {
                let mut problem = Problem::new(1, 1, 150, 64, dtype);
                problem.mask = mask;
                let mut inputs = Inputs::random(&problem, 3);
                let values = inputs.value.dense(problem.value_shape(), problem.strides().value);
                for (index, value) in values.into_iter().enumerate().take(keys * 64) {
                    inputs.value.set(index, value * 2.0_f64.powi(exponent));
                }
                check_inputs(&problem, &inputs);
            }
        }
    }
}

#[test]
fn empty_problems() {
    for (batch, queries, keys) in [(0, 5, 5), (2, 0, 5), (2, 5, 0), (0, 0, 0)] {
        check(keys, |problem| {
            problem.batch = batch;
            problem.query_length = queries;
            problem.sinks = true;
        });
        check(keys, |problem| {
            problem.batch = batch;
            problem.query_length = queries;
        });
    }
}

/// Key or value 70 of the first head is not a number: rows that attend it are not either, and all others are as if
/// nothing were, those of the heads computed after it too.
#[test]
fn not_a_number_goes_where_it_is_attended() {
    for (poisoned, query_length) in [(f64::NAN, 100), (f64::INFINITY, 100), (f64::NAN, 6), (f64::INFINITY, 6)] {
        for dtype in DType::ALL {
            for mask in masks() {
                let mut problem = Problem::new(1, 3, 100, 8, dtype);
                problem.query_length = query_length;
                problem.lse = true;
                problem.mask = mask;
                for in_key in [true, false] {
                    // An infinite key gives scores of either infinity; what comes of that is not defined.
                    if in_key && poisoned.is_infinite() {
                        continue;
                    }
                    let mut inputs = Inputs::random(&problem, 3);
                    let tensor = if in_key { &mut inputs.key } else { &mut inputs.value };
                    for index in 560..568 {
                        tensor.set(index, poisoned);
                    }
                    check_inputs(&problem, &inputs);
                }
            }
        }
    }
}

/// A tile with a NaN that some rows attend takes another path than those after it.
#[test]
fn tiles_after_one_with_a_nan() {
    for dtype in DType::ALL {
        for nan in [3, 70, 130] {
            let mut problem = Problem::new(1, 1, 400, 32, dtype);
            problem.mask = Mask::Window { left: Some(90), right: Some(63), alignment: TOP_LEFT };
            let mut inputs = Inputs::random(&problem, 6);
            inputs.value.set(nan * 32 + 5, f64::NAN);
            check_inputs(&problem, &inputs);
        }
    }
}

#[test]
fn keys_past_the_key_length_are_not_read() {
    for dtype in DType::ALL {
        let mut problem = Problem::new(3, 1, 100, 8, dtype);
        problem.seqused_k = true;
        problem.query_length = 5;
        let mut inputs = Inputs::random(&problem, 3);
        inputs.seqused_k = Some(vec![67, 0, 100]);
        for index in 67 * 8..200 * 8 {
            inputs.key.set(index, f64::NAN);
            inputs.value.set(index, f64::NAN);
        }
        check_inputs(&problem, &inputs);
    }
}

#[test]
fn a_bias_of_minus_infinity_removes_keys_and_rows() {
    let mut problem = Problem::new(2, 2, 70, 8, DType::F32);
    problem.bias = true;
    problem.lse = true;
    let mut inputs = Inputs::random(&problem, 3);
    // Row 3 attends nothing, the others every third key.
    let bias = |row: usize, key: usize| if row == 3 || !key.is_multiple_of(3) { f32::NEG_INFINITY } else { 0.25 };
    let data = (0..70 * 70).map(|index| bias(index / 70, index % 70)).collect();
    inputs.bias = Some(Bias { data, strides: BiasStrides { batch: 0, head: 0, row: 70, key: 1 } });
    check_inputs(&problem, &inputs);

    // Unlike a mask, the bias does not hide what is not a number; a row of nothing else is empty all the same.
    inputs.value.set(8, f64::NAN);
    check_inputs(&problem, &inputs);
}

#[test]
fn wrong_arguments_are_errors() {
    let problem = Problem::new(1, 2, 5, 8, DType::F16);
    let inputs = Inputs::random(&problem, 1);
    let check = |problem: &Problem, outputs: &mut Outputs, expected: Invalid| {
        let before = outputs.clone();
        assert_eq!(attend(problem, &inputs, &mut *outputs), Err(CpuError::Invalid(expected)));
        assert_eq!(outputs.output, before.output);
    };

    let mut no_heads = problem.clone();
    no_heads.key_heads = 0;
    let expected = Invalid::Problem(vec![ProblemError::Zero { argument: "key_heads" }]);
    check(&no_heads, &mut Outputs::poisoned(&problem), expected);

    let mut longer = problem.clone();
    longer.key_length = 6;
    let expected = Invalid::Tensors(vec![
        TensorError::TooShort { tensor: "key", actual: 80, needed: 96 },
        TensorError::TooShort { tensor: "value", actual: 80, needed: 96 },
    ]);
    check(&longer, &mut Outputs::poisoned(&problem), expected);

    let mut outputs = Outputs { output: Tensor::zeros(DType::F32, 79), lse: Some(vec![]), ..Outputs::default() };
    let expected = Invalid::Tensors(vec![
        TensorError::DType { tensor: "output", actual: DType::F32, expected: DType::F16 },
        TensorError::TooShort { tensor: "output", actual: 79, needed: 80 },
        TensorError::Unexpected { tensor: "lse" },
    ]);
    check(&problem, &mut outputs, expected);
}

#[test]
fn levels_that_the_machine_lacks_are_errors() {
    let problem = Problem::new(1, 2, 5, 8, DType::F16);
    let inputs = Inputs::random(&problem, 1);
    for level in Level::ALL {
        let mut outputs = Outputs::poisoned(&problem);
        let result = attend_with(level, &problem, &inputs, &mut outputs);
        if Level::available().contains(&level) {
            assert_eq!(result, Ok(()), "{level}");
        } else {
            let Err(CpuError::Level(LevelError::Missing { level: refused, missing })) = result else {
                panic!("{level}: {result:?}");
            };
            assert_eq!(refused, level);
            assert!(!missing.is_empty());
            if cfg!(target_arch = "x86_64") && level == Level::Neon {
                assert_eq!(missing, ["an AArch64 processor"]);
            }
            assert_eq!(outputs.output, Outputs::poisoned(&problem).output);
        }
    }
}
