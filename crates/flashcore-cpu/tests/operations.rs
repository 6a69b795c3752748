//! Append and merge on the CPU against the oracle, with poison wherever nothing may be read or written.

use flashcore_problem::{
    AppendProblem, DType, InputViews, LseBase, MergeProblem, OutputViews, PositionType, Rotary, RotaryStyle, Strides,
    Tensor, TensorView, append_oracle, merge_oracle,
};

const DTYPES: [DType; 3] = [DType::F16, DType::Bf16, DType::F32];

#[track_caller]
fn check_append(problem: &AppendProblem) {
    for seed in 0..2 {
        let inputs = problem.random(seed);
        let before = problem.poisoned();
        let mut after = before.clone();
        flashcore_cpu::append(problem, &inputs.views(), after.views_mut()).unwrap();
        append_oracle(problem, &inputs.views()).unwrap().check(&before, &after).unwrap();
    }
}

#[test]
fn appends_are_right() {
    for dtype in DTYPES {
        for (head_dim, value_dim, page_size) in [(128, 128, 16), (72, 40, 1), (33, 64, 7), (576, 512, 64)] {
            let problem = AppendProblem::new(45, 2, head_dim, dtype, 128 / page_size, page_size)
                .with_value_dim(value_dim)
                .with_query(4);
            check_append(&problem);
            check_append(&problem.with_qk_norm(1e-6));
            for style in [RotaryStyle::Neox, RotaryStyle::GptJ] {
                let rotary = Rotary {
                    table_dtype: (head_dim == 72).then_some(DType::F32),
                    positions: if page_size == 1 { PositionType::I32 } else { PositionType::I64 },
                    ..Rotary::new(style, head_dim / 4 * 2, 50)
                };
                check_append(&problem.with_rotary(rotary));
                check_append(&problem.with_rotary(rotary).with_qk_norm(1e-5));
            }
        }
    }
}

/// K and V of a row side by side in one memory, and the query rotated in place.
#[test]
fn caches_may_share_a_memory() {
    let problem = AppendProblem::new(40, 2, 64, DType::Bf16, 5, 16).with_query(4).with_rotary(Rotary::new(
        RotaryStyle::Neox,
        64,
        30,
    ));
    let mut strides = problem.strides;
    strides.key_cache = Strides { row: 128, head: 16 * 128, batch: 2 * 16 * 128 };
    strides.value_cache = strides.key_cache;
    let problem = problem.with_strides(strides);
    let data = problem.random(5);
    let expected = append_oracle(&problem, &data.views()).unwrap();
    let before = Tensor::poisoned(problem.dtype, 5 * 2 * 16 * 128);
    let (mut cache, mut query) = (before.clone(), data.query.clone());
    let mut inputs = data.views();
    inputs.query = TensorView::default();
    let mut append = |offset| {
        let outputs = OutputViews::default().with_key_cache(&mut cache).with_value_offset(offset);
        flashcore_cpu::append(&problem, &inputs, outputs.with_query_output(&mut query))
    };
    append(64).unwrap();
    // One element nearer, and the last column of a key would be the first of a value.
    let refused = append(63);
    expected.check_interleaved(64, &before.data, &cache.data).unwrap();
    expected.check_query(&data.query.data, &query.data).unwrap();
    assert_eq!(
        refused.unwrap_err().to_string(),
        "value_cache begins 63 elements into key_cache; it must lie beside each of its rows, with the same strides, or \
         past its end"
    );
}

/// Where two tokens have one slot, the last stays.
#[test]
fn the_last_token_of_a_slot_stays() {
    let problem = AppendProblem::new(2, 1, 2, DType::F32, 1, 2);
    let (key, value) = (vec![1.0_f32, 2.0, 3.0, 4.0], vec![5.0_f32, 6.0, 7.0, 8.0]);
    let inputs = InputViews::default().with_new_key(&key).with_new_value(&value).with_slot_mapping(&[1, 1]);
    let (mut keys, mut values) = (vec![0.0_f32; 4], vec![0.0_f32; 4]);
    let outputs = OutputViews::default().with_key_cache(&mut keys).with_value_cache(&mut values);
    flashcore_cpu::append(&problem, &inputs, outputs).unwrap();
    assert_eq!((keys, values), (vec![0.0, 0.0, 3.0, 4.0], vec![0.0, 0.0, 7.0, 8.0]));
}

#[test]
fn merges_are_right() {
    for dtype in DTYPES {
        for part_dtype in DTYPES {
            for (parts, value_dim, base) in [(2, 128, LseBase::Natural), (7, 33, LseBase::Two), (256, 8, LseBase::Two)]
            {
                let problem = MergeProblem::new(parts, 30, 3, value_dim, dtype).with_part_dtype(part_dtype);
                let by_token = problem.with_base(base).with_token_major_lse();
                for problem in [problem, by_token, by_token.with_lse(false)] {
                    let (inputs, mut outputs) = (problem.random(9), problem.poisoned());
                    flashcore_cpu::merge(&problem, &inputs.views(), outputs.views_mut()).unwrap();
                    merge_oracle(&problem, &inputs.views()).unwrap().check(&problem, &outputs).unwrap();
                }
            }
        }
    }
}
