//! The append kernel in the simulator.

use flashcore_bench::testkit::operations::{Placement, check_append};
use flashcore_ir::Arch;
use flashcore_kernels::LaunchPlan;
use flashcore_problem::{AppendProblem, DType, PositionType, Rotary, RotaryStyle, Strides};

#[track_caller]
fn check(problem: &AppendProblem, placement: Placement) {
    let plan = LaunchPlan::append(problem, Arch::Sm80).unwrap_or_else(|reasons| panic!("{reasons:?}"));
    for seed in 0..2 {
        check_append(&plan, problem, placement, seed).unwrap_or_else(|wrong| panic!("{problem:?}: {wrong}"));
    }
}

const DTYPES: [DType; 3] = [DType::F16, DType::Bf16, DType::F32];

/// Pages of 1, 4 and 16 rows, every element type, values wider and narrower than keys.
#[test]
fn keys_and_values_go_to_their_slots() {
    for (dtype, page_size) in DTYPES.into_iter().zip([1, 4, 16]) {
        for (tokens, head_dim, value_dim) in [(1, 128, 128), (37, 64, 128), (67, 72, 40), (19, 576, 512)] {
            let problem = AppendProblem::new(tokens, 2, head_dim, dtype, 160 / page_size, page_size);
            check(&problem.with_value_dim(value_dim), Placement::Separate);
        }
    }
}

/// Both styles, all or some of the columns rotated, tables of both types, positions of both types.
#[test]
fn query_and_key_are_rotated() {
    for dtype in DTYPES {
        for style in [RotaryStyle::Neox, RotaryStyle::GptJ] {
            for (head_dim, dim) in [(128, 128), (128, 64), (64, 16), (80, 20), (96, 94), (256, 256)] {
                let rotary = Rotary {
                    table_dtype: (dim % 3 == 1).then_some(DType::F32),
                    positions: if dim == 64 { PositionType::I32 } else { PositionType::I64 },
                    ..Rotary::new(style, dim, 33)
                };
                let problem = AppendProblem::new(41, 2, head_dim, dtype, 12, 8).with_query(6).with_rotary(rotary);
                check(&problem, Placement::Separate);
            }
        }
    }
}

/// One tensor of cosines beside sines, `[max_position, dim]`.
#[test]
fn tables_may_have_strides() {
    let rotary = Rotary { table_stride: 130, ..Rotary::new(RotaryStyle::Neox, 128, 33) };
    check(&AppendProblem::new(41, 2, 128, DType::Bf16, 12, 8).with_rotary(rotary), Placement::Separate);
}

#[test]
fn query_and_key_are_normalized() {
    for dtype in DTYPES {
        for head_dim in [128, 64, 72, 80, 256, 34] {
            let problem = AppendProblem::new(35, 2, head_dim, dtype, 12, 8).with_query(4).with_qk_norm(1e-6);
            check(&problem, Placement::Separate);
            let rotary = Rotary::new(RotaryStyle::Neox, head_dim / 4 * 2, 17);
            check(&problem.with_rotary(rotary), Placement::Separate);
        }
    }
}

/// K and V halves of one row, heads outside of rows, as one tensor `[page, head, row, 2 * head_dim]`; the query in place.
#[test]
fn values_lie_beside_keys_and_the_query_is_rotated_in_place() {
    for dtype in DTYPES {
        let problem = AppendProblem::new(29, 3, 64, dtype, 6, 16)
            .with_query(6)
            .with_rotary(Rotary::new(RotaryStyle::GptJ, 64, 40))
            .with_qk_norm(1e-5);
        let mut strides = problem.strides;
        strides.key_cache = Strides { row: 128, head: 16 * 128, batch: 3 * 16 * 128 };
        strides.value_cache = strides.key_cache;
        check(&problem.with_strides(strides), Placement::Interleaved { offset: 64 });
        // Rows of an odd number of vectors, with lanes that have none.
        for head_dim in [72, 68, 33] {
            let odd = AppendProblem::new(29, 3, head_dim, dtype, 6, 16).with_query(6).with_qk_norm(1e-5);
            let mut strides = odd.strides;
            strides.key_cache = Strides { row: 2 * head_dim, head: 32 * head_dim, batch: 96 * head_dim };
            strides.value_cache = strides.key_cache;
            check(&odd.with_strides(strides), Placement::Interleaved { offset: head_dim });
        }
        // Pages of keys beside pages of values.
        strides.key_cache = Strides { row: 3 * 64, head: 64, batch: 2 * 16 * 3 * 64 };
        strides.value_cache = strides.key_cache;
        check(&problem.with_strides(strides), Placement::Interleaved { offset: 16 * 3 * 64 });
    }
}

/// Strides that leave 8, 4 and 2 bytes of alignment, and rows of an odd number of columns.
#[test]
fn rows_of_any_alignment_are_written() {
    for dtype in DTYPES {
        for (padding, head_dim) in [(4, 64), (2, 64), (1, 64), (0, 33), (0, 34)] {
            let problem = AppendProblem::new(23, 2, head_dim, dtype, 5, 8).with_query(4).with_rotary(Rotary::new(
                RotaryStyle::Neox,
                32,
                9,
            ));
            let mut strides = problem.strides;
            for tensor in [&mut strides.query, &mut strides.query_output, &mut strides.key, &mut strides.value] {
                tensor.row += padding;
            }
            for cache in [&mut strides.key_cache, &mut strides.value_cache] {
                *cache = Strides { row: 2 * (head_dim + padding), head: head_dim + padding, batch: 4000 + padding };
            }
            check(&problem.with_strides(strides), Placement::Separate);
        }
    }
}

/// More tokens than slots: what has no slot is skipped.
#[test]
fn a_full_cache_takes_no_more() {
    check(&AppendProblem::new(100, 1, 64, DType::F16, 3, 5), Placement::Separate);
}
