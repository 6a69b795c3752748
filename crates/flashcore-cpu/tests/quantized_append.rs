//! Append to an FP8 cache on the CPU against the oracle, with poison wherever nothing may be read or written.

use flashcore_problem::{
    AppendProblem, DType, InputViews, OutputViews, Rotary, RotaryStyle, ScaleStrides, ScaleView, ScaleViewMut,
    TensorViewMut, append_oracle_with,
};

/// Appends random rows and returns how many values saturated.
#[track_caller]
fn check(problem: &AppendProblem, seed: u64) -> usize {
    let (inputs, before) = (problem.random(seed), problem.poisoned());
    let strides = before.scale_strides(problem.key_cache_shape());
    let expected = append_oracle_with(problem, &inputs.views(), strides).unwrap();
    let mut after = before.clone();
    flashcore_cpu::append(problem, &inputs.views(), after.views_mut()).unwrap();
    expected.check(&before, &after).unwrap();
    expected.with_computed_scales(before.scales(), after.scales()).unwrap().saturated()
}

#[test]
fn appends_to_fp8_caches_are_right() {
    let mut saturated = [0; 2];
    for (number, dtype) in [DType::F16, DType::Bf16, DType::F32].into_iter().enumerate() {
        for (head_dim, value_dim, page_size) in [(128, 128, 16), (72, 40, 1), (33, 64, 7)] {
            for cache in DType::FLOAT8 {
                let problem = AppendProblem::new(45, 2, head_dim, dtype, 128 / page_size, page_size)
                    .with_value_dim(value_dim)
                    .with_query(4)
                    .with_cache_dtype(Some(cache));
                let rotary = Rotary::new(RotaryStyle::Neox, head_dim / 4 * 2, 50);
                for problem in [problem, problem.with_rotary(rotary), problem.with_rotary(rotary).with_qk_norm(1e-5)] {
                    for (mode, problem) in [
                        (0, problem.with_scales(true, true)),
                        (0, problem.with_scales(number == 1, number != 1)),
                        (1, problem.with_scales(true, true).with_compute_scales(true)),
                        (1, problem.with_scales(number == 1, number != 1).with_compute_scales(true)),
                    ] {
                        saturated[mode] += (0..3).map(|seed| check(&problem, seed)).sum::<usize>();
                    }
                }
            }
        }
    }
    // Given scales saturate some values; the largest of a row has the largest code and is not beyond it.
    assert!(saturated[0] > 1000, "{saturated:?}");
    assert_eq!(saturated[1], 0);
}

const KEYS: [f32; 4] = [1.0, -2.0, 0.25, 1000.0];

fn appended<'a>(values: &'a [f32; 4], slots: &'a [i64]) -> InputViews<'a> {
    InputViews::default().with_new_key(&KEYS).with_new_value(values).with_slot_mapping(slots)
}

fn append(
    problem: &AppendProblem,
    inputs: &InputViews<'_>,
    scales: Option<(&mut [f32], &mut [f32])>,
) -> Result<[Vec<u8>; 2], String> {
    let cache = problem.cache_dtype();
    let (mut keys, mut values) = (vec![0xAA; 4], vec![0xAA; 4]);
    let mut outputs = OutputViews::default()
        .with_key_cache(TensorViewMut { dtype: cache, data: &mut keys })
        .with_value_cache(TensorViewMut { dtype: cache, data: &mut values });
    if let Some((key, value)) = scales {
        let strides = ScaleStrides::per_cache_row(problem.key_cache_shape());
        outputs = outputs
            .with_k_scale(ScaleViewMut { data: key, strides })
            .with_v_scale(ScaleViewMut { data: value, strides });
    }
    flashcore_cpu::append(problem, inputs, outputs).map_err(|error| error.to_string())?;
    Ok([keys, values])
}

/// Codes by hand: two tokens of one head of two columns into one page of two rows, the second first.
#[test]
fn codes_and_scales_are_those_of_the_definition() {
    let problem = AppendProblem::new(2, 1, 2, DType::F32, 1, 2).with_cache_dtype(Some(DType::E4m3));
    let values = [0.0, -0.0, f32::NAN, 3.0];
    let inputs = appended(&values, &[1, 0]);
    // Without scales: 1000 saturates at 448.
    let codes = append(&problem, &inputs, None);
    assert_eq!(codes, Ok([vec![0x28, 0x7E, 0x38, 0xC0], vec![0x7F, 0x44, 0x00, 0x80]]));
    // Given ones: 2 of keys, 0.5 of values.
    let given = problem.with_scales(true, true);
    let scaled = inputs.with_k_scale(ScaleView::of_tensor(&[2.0])).with_v_scale(ScaleView::of_tensor(&[0.5]));
    assert_eq!(append(&given, &scaled, None), Ok([vec![0x20, 0x7E, 0x30, 0xB8], vec![0x7F, 0x4C, 0x00, 0x80]]));
    // Computed ones: the largest magnitude of each row has the code of 448, and a row of zeros a scale of 1.
    let computed = given.with_compute_scales(true);
    let (mut key_scales, mut value_scales) = ([7.0; 2], [7.0; 2]);
    let codes = append(&computed, &inputs, Some((&mut key_scales, &mut value_scales)));
    assert_eq!(codes, Ok([vec![0x1E, 0x7E, 0x76, 0xFE], vec![0x7F, 0x7E, 0x00, 0x80]]));
    assert_eq!(key_scales, [1000.0 / 448.0, 2.0 / 448.0]);
    assert_eq!(value_scales, [3.0 / 448.0, 1.0]);
}

#[test]
fn wrong_scales_are_named_and_nothing_is_written() {
    let problem =
        AppendProblem::new(2, 1, 2, DType::F32, 1, 2).with_cache_dtype(Some(DType::E4m3)).with_scales(true, true);
    let inputs = appended(&KEYS, &[1, -1]);
    let with = |k_scale| inputs.with_k_scale(k_scale).with_v_scale(ScaleView::of_tensor(&[1.0]));
    let wrong = [[0.0], [-1.0], [f32::NAN], [f32::INFINITY]];
    for (scale, text) in wrong.iter().zip(["0", "-1", "NaN", "inf"]) {
        let expected = format!("k_scale[0] is {text}; scales must be finite and above 0");
        assert_eq!(append(&problem, &with(ScaleView::of_tensor(scale)), None), Err(expected));
    }
    // Of the slots, one is skipped: its scale may be anything.
    let strides = ScaleStrides::per_cache_row(problem.key_cache_shape());
    assert!(append(&problem, &with(ScaleView { data: &[f32::NAN, 1.0], strides }), None).is_ok());
    let error = append(&problem, &with(ScaleView { data: &[1.0, f32::NAN], strides }), None);
    assert_eq!(error, Err("k_scale[1] is NaN; scales must be finite and above 0".to_owned()));
    let per_sequence = ScaleStrides { sequence: 1, ..ScaleStrides::TENSOR };
    let error = append(&problem, &with(ScaleView { data: &[1.0], strides: per_sequence }), None);
    let expected = "the strides of k_scale are (sequence 1, page 0, row 0, head 0); by slot there are no sequences: its \
                    sequence stride must be 0";
    assert_eq!(error, Err(expected.to_owned()));
    assert_eq!(
        append(&problem, &inputs, None),
        Err("k_scale is missing; the problem has it switched on; v_scale is missing; the problem has it switched on"
            .to_owned())
    );
    let computed = problem.with_compute_scales(true);
    let mut codes = [vec![0; 4], vec![0; 4]];
    let [keys, values] = &mut codes;
    let e4m3 = |data| TensorViewMut { dtype: DType::E4m3, data };
    let (mut one, mut two) = ([1.0], [1.0; 2]);
    let outputs = OutputViews::default()
        .with_key_cache(e4m3(keys))
        .with_value_cache(e4m3(values))
        .with_k_scale(ScaleViewMut { data: &mut one, strides: ScaleStrides::TENSOR })
        .with_v_scale(ScaleViewMut { data: &mut two, strides });
    let error = flashcore_cpu::append(&computed, &inputs, outputs).unwrap_err().to_string();
    let expected = "the strides of k_scale are (sequence 0, page 0, row 0, head 0); each row and head must have a \
                    computed scale of its own, [page or batch, row, head]";
    assert_eq!(error, expected);
}

#[test]
fn impossible_types_are_refused() {
    let problem = AppendProblem::new(2, 1, 2, DType::F16, 1, 2);
    for (problem, expected) in [
        (
            problem.with_cache_dtype(Some(DType::Bf16)),
            "cache_dtype is bf16; it must be that of the tensors, f16, or e4m3 or e5m2",
        ),
        (problem.with_scales(true, false), "k_scale is on and its tensor is f16; scales are for e4m3 and e5m2"),
        (
            problem.with_cache_dtype(Some(DType::E4m3)).with_compute_scales(true),
            "compute_scales is true; it must be false without k_scale and v_scale",
        ),
    ] {
        assert_eq!(problem.validate().unwrap_err().to_string(), expected);
    }
}
