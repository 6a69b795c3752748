//! Quantisation: errors of codes within their rounding, options that leave attention unchanged, and what is refused.

use flashcore_problem::{
    Alignment, DType, DTypes, Expected, Inputs, Layout, Mask, Operand, PagedKv, Problem, Quantization, QuantizeError,
    Quantized, ScaleMode, SequenceLengths, Shape, Tensor, oracle, quantize,
};

const SEED: u64 = 7;

/// Every mode.
const MODES: [ScaleMode; 6] = [
    ScaleMode::Fixed(1.0 / 4096.0),
    ScaleMode::Tensor,
    ScaleMode::KeyHead,
    ScaleMode::Sequence,
    ScaleMode::Token,
    ScaleMode::Block(16),
];

fn types(text: &str) -> DTypes {
    text.parse().unwrap()
}

/// Problems with grouped heads, ragged ends, packed and paged sequences.
fn problems() -> Vec<Problem> {
    let mut plain = Problem::new(3, 4, 37, 64, DType::F32).with_layout(Layout::Bshd);
    (plain.key_heads, plain.key_length, plain.value_dim, plain.lse) = (2, 150, 32, true);
    plain.mask = Mask::Causal(Alignment::BottomRight);
    let window =
        plain.clone().with_mask(Mask::Window { left: Some(40), right: Some(3), alignment: Alignment::TopLeft });
    let additive = plain.clone().with_alibi(true).with_bias(true).with_seqused_k(true);
    let mut varlen = plain.clone().with_total_q(Some(80)).with_total_k(Some(300));
    varlen.head_dim = 96;
    let paged = plain.clone().with_paged(Some(PagedKv::new(16, 40, 10))).with_seqused_k(true);
    vec![plain, window, additive, varlen, paged]
}

fn inputs(problem: &Problem) -> Inputs {
    // Sequences have rows of their own, so that all modes are possible.
    Inputs::random_sequences(problem, SequenceLengths::Ragged, SEED)
}

/// Magnitudes that differ between all rows, heads and batches by more than quantisation errors.
fn spread(tensor: &mut Tensor, problem: &Problem, operand: Operand) {
    let strides = problem.strides();
    let (shape, strides) = match operand {
        Operand::Query => (problem.query_shape(), strides.query),
        Operand::Key => (problem.key_shape(), strides.key),
        _ => (problem.value_shape(), strides.value),
    };
    for (batch, head, row) in shape.each_row() {
        let start = strides.row_start(batch, head, row);
        let factor = 3.0_f64.powi(((batch * 5 + head * 3 + row) % 7) as i32 - 3);
        for column in start..start + shape.columns {
            tensor.set(column, tensor.get(column) * factor);
        }
    }
}

fn largest_difference(left: &[f64], right: &[f64]) -> f64 {
    let both = left.iter().zip(right).filter(|(left, right)| left.is_finite() || right.is_finite());
    both.fold(0.0, |largest, (left, right)| {
        let difference = (left - right).abs();
        if difference.is_nan() { f64::INFINITY } else { largest.max(difference) }
    })
}

fn answer(problem: &Problem, inputs: &Inputs) -> Expected {
    oracle(problem, inputs).unwrap()
}

/// The oracle's answer to what was quantised, the log-sum-exp restored.
fn restored(quantized: &Quantized) -> Expected {
    let mut answer = answer(&quantized.problem, &quantized.inputs);
    for (lse, shift) in answer.lse.iter_mut().zip(quantized.lse_shift.iter().flatten()) {
        *lse += f64::from(*shift);
    }
    answer
}

#[test]
fn smoothing_and_rotation_leave_exact_attention_unchanged() {
    for problem in problems() {
        let mut inputs = inputs(&problem);
        // Keys with a mean, without which smoothing does nothing.
        for index in 0..inputs.key.len() {
            let number = inputs.key.get(index);
            inputs.key.set(index, number + 1.0 + (index % problem.head_dim) as f64 / 64.0);
        }
        let expected = answer(&problem, &inputs);
        for (smooth, rotation) in [(true, None), (false, Some(3)), (true, Some(4))] {
            let options = Quantization::new(types("f32"), ScaleMode::Tensor);
            let options = options.with_smooth_keys(smooth).with_rotation(rotation);
            let quantized = quantize(&problem, &inputs.views(), options).unwrap();
            assert_eq!((quantized.problem.dtypes(), quantized.saturated.total()), (types("f32"), 0));
            assert_ne!(quantized.inputs.key, inputs.key);
            let found = restored(&quantized);
            // Each element is rounded to f32 once more.
            let difference = largest_difference(&found.output, &expected.output);
            assert!(difference < 2e-6, "{problem}, {options:?}: {difference:e}");
            let difference = largest_difference(&found.lse, &expected.lse);
            assert!(difference < 1e-5, "{problem}, {options:?}: LSE {difference:e}");
        }
    }
}

#[test]
fn what_is_wrong_changes_attention() {
    let problem = problems().remove(0);
    let mut inputs = inputs(&problem);
    for index in 0..inputs.key.len() {
        inputs.key.set(index, inputs.key.get(index) + 1.0);
    }
    let expected = answer(&problem, &inputs);
    let options = Quantization::new(types("f32"), ScaleMode::Tensor).with_smooth_keys(true).with_rotation(Some(3));
    let right = quantize(&problem, &inputs.views(), options).unwrap();
    let check = |wrong: &Quantized, what: &str| {
        let difference = largest_difference(&restored(wrong).output, &expected.output);
        assert!(difference > 0.05, "{what}: {difference:e}");
    };
    // Other signs of the key than of the query.
    let other = quantize(&problem, &inputs.views(), options.with_rotation(Some(4))).unwrap();
    let mut wrong = right.clone();
    wrong.inputs.key = other.inputs.key;
    check(&wrong, "signs");
    // The mean subtracted from the first half of the storage only.
    let other = quantize(&problem, &inputs.views(), options.with_smooth_keys(false)).unwrap();
    let mut wrong = right.clone();
    let half = wrong.inputs.key.data.len() / 2;
    wrong.inputs.key.data[half..].copy_from_slice(&other.inputs.key.data[half..]);
    let strides = problem.strides().key;
    assert!(strides.row_start(1, 0, 0) * 4 < half && half < strides.row_start(2, 0, 0) * 4, "it is within a sequence");
    check(&wrong, "mean");
    // Scales of the neighbour.
    spread(&mut inputs.value, &problem, Operand::Value);
    let expected = answer(&problem, &inputs);
    let options = Quantization::new(types("f32 kv e4m3"), ScaleMode::Token);
    let mut quantized = quantize(&problem, &inputs.views(), options).unwrap();
    let right = largest_difference(&restored(&quantized).output, &expected.output);
    quantized.inputs.v_scale.as_mut().unwrap().data.rotate_left(1);
    let wrong = largest_difference(&restored(&quantized).output, &expected.output);
    assert!(wrong > 4.0 * right, "scales: {wrong:e} {right:e}");
}

/// Every element is its code times its scale, but for the rounding of the code.
#[test]
fn codes_times_scales_are_the_elements() {
    for problem in problems() {
        let mut inputs = inputs(&problem);
        for (tensor, operand) in
            [(&mut inputs.query, Operand::Query), (&mut inputs.key, Operand::Key), (&mut inputs.value, Operand::Value)]
        {
            spread(tensor, &problem, operand);
        }
        for mode in MODES {
            for types in [types("e4m3 out bf16"), types("e4m3 kv e5m2 out f16"), types("bf16 kv e4m3")] {
                let options = Quantization::new(types, mode);
                let quantized = quantize(&problem, &inputs.views(), options).unwrap();
                quantized.inputs.validate(&quantized.problem).unwrap();
                check_elements(&problem, &inputs, &quantized, mode);
            }
        }
    }
}

fn check_elements(problem: &Problem, inputs: &Inputs, quantized: &Quantized, mode: ScaleMode) {
    let (strides, types) = (problem.strides(), quantized.problem.dtypes());
    let views = quantized.inputs.views();
    let near = |actual: f64, expected: f64, scale: f64, dtype: DType| {
        let subnormal = if dtype == DType::E4m3 { 2.0_f64.powi(-10) } else { 2.0_f64.powi(-17) };
        let expected = expected.clamp(-dtype.largest() * scale, dtype.largest() * scale);
        let bound = 1.000_001 * (dtype.unit_roundoff() * expected.abs()).max(subnormal * scale);
        assert!((actual - expected).abs() <= bound, "{problem} {mode}: {actual} for {expected}, scale {scale}");
    };
    let mut largest = [0.0_f64; 3];
    for sequence in views.sequences(problem) {
        for row in 0..sequence.query_length {
            for head in 0..problem.query_heads {
                let (batch, place) = sequence.query_row(row);
                let start = strides.query.row_start(batch, head, place);
                let scale = views.q_scale.map(|scale| f64::from(scale.of_query(problem, &sequence, row, head)));
                for column in start..start + problem.head_dim {
                    let (code, expected) = (quantized.inputs.query.get(column), inputs.query.get(column));
                    match scale {
                        Some(scale) => near(code * scale, expected, scale, types.query),
                        None => assert_eq!(code, types.query.round(expected)),
                    }
                    largest[0] = largest[0].max(code.abs());
                }
            }
        }
        for key in sequence.attended_range(problem) {
            let (batch, place) = sequence.key_row(key);
            for head in 0..problem.key_heads {
                let tensors = [
                    (strides.key, problem.head_dim, &quantized.inputs.key, &inputs.key, views.k_scale),
                    (strides.value, problem.value_dim, &quantized.inputs.value, &inputs.value, views.v_scale),
                ];
                for (number, (strides, columns, codes, wide, scale)) in tensors.into_iter().enumerate() {
                    let scale = f64::from(scale.unwrap().of_key(&sequence, key, head));
                    let start = strides.row_start(batch, head, place);
                    for column in start..start + columns {
                        near(codes.get(column) * scale, wide.get(column), scale, types.key_value);
                        largest[number + 1] = largest[number + 1].max(codes.get(column).abs());
                    }
                }
            }
        }
    }
    // The whole range of the type is in use.
    assert_eq!(largest[1..], [types.key_value.largest(); 2], "{problem} {mode}");
    assert_eq!(quantized.saturated.total() > 0, matches!(mode, ScaleMode::Fixed(_)), "{problem} {mode}");
}

/// Finer scales are smaller: the mean of a mode's scales falls from one to the next.
#[test]
fn scales_are_as_many_as_their_mode_says() {
    let problem = problems().remove(0);
    let inputs = inputs(&problem);
    let Shape { batch, rows, .. } = problem.key_shape();
    let mean = |mode| {
        let options = Quantization::new(types("f32 kv e4m3"), mode);
        let scale = quantize(&problem, &inputs.views(), options).unwrap().inputs.k_scale.unwrap();
        let numbers: Vec<f64> = scale.data.iter().map(|&number| f64::from(number)).collect();
        (numbers.len(), numbers.iter().sum::<f64>() / numbers.len() as f64)
    };
    let per_token = batch * rows * problem.key_heads;
    let counts = [1, problem.key_heads, batch * problem.key_heads, per_token, per_token];
    let modes = [ScaleMode::Tensor, ScaleMode::KeyHead, ScaleMode::Sequence, ScaleMode::Block(64), ScaleMode::Token];
    let mut last = f64::INFINITY;
    for (mode, count) in modes.into_iter().zip(counts) {
        let (found, mean) = mean(mode);
        assert_eq!(found, count, "{mode}");
        assert!(mean <= last, "{mode}: {mean} {last}");
        last = mean;
    }
    // Of a paged cache, one per page where the block is a page.
    let paged = problems().remove(4);
    let options = Quantization::new(types("f32 kv e4m3"), ScaleMode::Block(16));
    let quantized = quantize(&paged, &self::inputs(&paged).views(), options).unwrap();
    assert_eq!(quantized.inputs.v_scale.map(|scale| scale.data.len()), Some(40 * 2));
}

#[test]
fn saturated_elements_are_counted() {
    let mut problem = Problem::new(1, 1, 1, 4, DType::F32);
    (problem.key_length, problem.value_dim) = (2, 4);
    let tensor = |values: &[f64]| Tensor::from_values(DType::F32, values);
    let inputs = Inputs::new(
        tensor(&[1.0, -500.0, 464.0, 465.0]),
        tensor(&[0.0, 448.0, -449.0, 1e30, 0.0, 0.0, 0.0, 0.0]),
        tensor(&[0.0; 8]),
    );
    let fixed = Quantization::new(types("e4m3 out f16"), ScaleMode::Fixed(1.0));
    let quantized = quantize(&problem, &inputs.views(), fixed).unwrap();
    let saturated = quantized.saturated;
    assert_eq!((saturated.query, saturated.key, saturated.value), (2, 1, 0));
    assert_eq!(quantized.inputs.key.data, [0x00, 0x7E, 0xFE, 0x7E, 0, 0, 0, 0]);
    // Rows of zeros have a scale that validates.
    let token =
        quantize(&problem, &inputs.views(), Quantization::new(types("e4m3 out f16"), ScaleMode::Token)).unwrap();
    assert_eq!(token.saturated.total(), 0);
    assert_eq!(token.inputs.v_scale.as_ref().unwrap().data, [1.0, 1.0]);
    assert_eq!(token.inputs.k_scale.as_ref().unwrap().data[1], 1.0);
    token.inputs.validate(&token.problem).unwrap();
}

#[test]
fn what_cannot_be_quantised_is_refused() {
    let problem = Problem::new(1, 2, 5, 24, DType::F32);
    let inputs = Inputs::random(&problem, SEED);
    let kv = Quantization::new(types("f32 kv e4m3"), ScaleMode::Tensor);
    let error = |problem: &Problem, inputs: &Inputs, options| quantize(problem, &inputs.views(), options).unwrap_err();
    assert_eq!(error(&problem, &inputs, kv.with_rotation(Some(1))), QuantizeError::HeadDim { head_dim: 24, least: 16 });
    for scales in [ScaleMode::Fixed(0.0), ScaleMode::Fixed(f32::INFINITY), ScaleMode::Block(0)] {
        assert_eq!(error(&problem, &inputs, Quantization { scales, ..kv }), QuantizeError::ScaleMode(scales));
    }
    let mut wrong = inputs.clone();
    wrong.value.set(24 + 3, f64::NEG_INFINITY);
    let expected = "value has -inf in row 1 of batch or page 0, head 0; a scale needs finite numbers";
    assert_eq!(error(&problem, &wrong, kv).to_string(), expected);
    let smooth = kv.with_smooth_keys(true);
    for (feature, problem) in
        [("a softcap", problem.clone().with_softcap(Some(5.0))), ("sinks", problem.clone().with_sinks(true))]
    {
        let inputs = Inputs::random(&problem, SEED);
        assert_eq!(error(&problem, &inputs, smooth), QuantizeError::Smoothing { feature });
        assert!(quantize(&problem, &inputs.views(), kv).is_ok());
    }
    let coded = quantize(&problem, &inputs.views(), kv).unwrap();
    let again = error(&coded.problem, &coded.inputs, kv);
    assert_eq!(again, QuantizeError::Codes { tensor: "key", dtype: DType::E4m3 });
    assert!(matches!(error(&problem, &inputs, Quantization { types: types("e4m3"), ..kv }), QuantizeError::Invalid(_)));
    // Two sequences that share a cache.
    let mut shared = Problem::new(2, 2, 5, 32, DType::F32).with_kv_batch(Some(1));
    shared.key_length = 40;
    let mut inputs = Inputs::random(&shared, SEED);
    inputs.kv_batch_idx = Some(vec![0, 0]);
    assert!(quantize(&shared, &inputs.views(), kv).is_ok());
    for options in [smooth, Quantization { scales: ScaleMode::Sequence, ..kv }] {
        let found = error(&shared, &inputs, options);
        let QuantizeError::SharedRow { batch: 0, row: 0, first: 0, second: 1, .. } = found else { panic!("{found}") };
    }
}
