//! Append and merge from C, against values worked out by hand and errors by text.

use super::*;

fn append_problem() -> AppendProblem {
    let mut problem = MaybeUninit::uninit();
    // SAFETY: the pointer is to a problem that can be written.
    let status = unsafe {
        let size = size_of::<AppendProblem>() as u64;
        flashcore_append_problem_init_sized(problem.as_mut_ptr(), size, 3, 1, 1, 2, 2, 2, FLASHCORE_DTYPE_F32)
    };
    assert_eq!(status, FLASHCORE_OK);
    // SAFETY: written by the call above.
    let problem: AppendProblem = unsafe { problem.assume_init() };
    AppendProblem { rotary: FLASHCORE_ROTARY_NEOX, rotary_dim: 2, max_position: 2, table_stride: 1, ..problem }
}

fn create_append(problem: &AppendProblem) -> Result<*mut AppendHandle, (Status, String)> {
    let mut plan = ptr::dangling_mut();
    // SAFETY: both pointers are to what they say.
    let status = unsafe { flashcore_append_create(problem, FLASHCORE_DEVICE_CPU, 0, &raw mut plan) };
    if status == FLASHCORE_OK { Ok(plan) } else { Err((status, text(flashcore_last_error()))) }
}

/// Position 1 turns by a right angle; the second token is skipped, its query is not.
#[test]
fn an_append_from_beginning_to_end() {
    let plan = create_append(&append_problem()).unwrap();
    let (key, value) = ([1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0], [0.5_f32, 1.5, 2.5, 3.5, 4.5, 5.5]);
    let (cos, sin, positions) = ([1.0_f32, 0.0], [0.0_f32, 1.0], [1_i64, 0, 1]);
    let (mut keys, mut values, mut query) = ([9.0_f32; 8], [9.0_f32; 8], [1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let inputs = AppendInputs {
        key: bytes(&key),
        value: bytes(&value),
        slot_mapping: bytes(&[3_i64, -1, 0]),
        positions: bytes(&positions),
        cos: bytes(&cos),
        sin: bytes(&sin),
        ..zeroed()
    };
    let outputs = AppendOutputs {
        key_cache: mut_bytes(&mut keys),
        value_cache: mut_bytes(&mut values),
        query: mut_bytes(&mut query),
        ..zeroed()
    };
    // SAFETY: the structs are what they say.
    let status = unsafe { flashcore_append_run_host(plan, &raw const inputs, &raw const outputs) };
    assert_eq!((status, text(flashcore_last_error())), (FLASHCORE_OK, String::new()));
    assert_eq!(keys, [-6.0, 5.0, 9.0, 9.0, 9.0, 9.0, -2.0, 1.0]);
    assert_eq!(values, [4.5, 5.5, 9.0, 9.0, 9.0, 9.0, 0.5, 1.5]);
    assert_eq!(query, [-2.0, 1.0, 3.0, 4.0, -6.0, 5.0]);

    // A position without a row of the tables, and a slot without a row of the cache: nothing is written.
    for (positions, slots, expected) in [
        (
            [1_i64, 0, 2],
            [3_i64, -1, 0],
            "token 2 is at position 2; cos and sin have 2 rows (max_position), for positions from 0 on: make them longer",
        ),
        ([1, 0, 1], [3, -1, 4], "the slot of token 2 is 4; the cache has 4 slots, and -1 skips a token"),
    ] {
        let wrong = AppendInputs { positions: bytes(&positions), slot_mapping: bytes(&slots), ..inputs };
        // SAFETY: the structs are what they say.
        let status = unsafe { flashcore_append_run_host(plan, &raw const wrong, &raw const outputs) };
        assert_eq!((status, text(flashcore_last_error()).as_str()), (FLASHCORE_INVALID_ARGUMENT, expected));
        assert_eq!(keys, [-6.0, 5.0, 9.0, 9.0, 9.0, 9.0, -2.0, 1.0]);
    }

    // Values over the first column of keys.
    let together = AppendOutputs { value_cache: NO_MUT_BYTES, value_offset: 1, ..outputs };
    // SAFETY: the structs are what they say.
    let status = unsafe { flashcore_append_run_host(plan, &raw const inputs, &raw const together) };
    assert_eq!(status, FLASHCORE_INVALID_ARGUMENT);
    let tensors: AppendTensors = zeroed();
    // SAFETY: the tensors are what they say, and the plan is on the CPU.
    assert_eq!(unsafe { flashcore_append_launch(plan, ptr::null_mut(), &raw const tensors) }, FLASHCORE_UNSUPPORTED);
    assert_eq!(flashcore_append_destroy(plan), FLASHCORE_OK);
    assert_eq!(flashcore_append_destroy(plan), FLASHCORE_INVALID_PLAN);
    assert_eq!(flashcore_append_destroy(ptr::null_mut()), FLASHCORE_OK);
}

#[test]
fn problems_of_appends_are_checked() {
    let check = |change: fn(&mut AppendProblem), expected: &str| {
        let mut problem = append_problem();
        change(&mut problem);
        assert_eq!(create_append(&problem), Err((FLASHCORE_INVALID_ARGUMENT, expected.to_owned())));
    };
    check(|problem| problem.rotary = 3, "problem.rotary is 3; it must be one of FLASHCORE_ROTARY_*");
    check(|problem| problem.position_bits = 16, "problem.position_bits is 16; it must be 32 or 64");
    check(
        |problem| problem.rotary_dim = 3,
        "the dim of rotary is 3; it must be even, at least 2 and at most head_dim, which is 2",
    );
    check(|problem| problem.dtype = FLASHCORE_DTYPE_F64, "dtype is f64; it must be f16, bf16 or f32");
    check(|problem| problem.page_size = 0, "page_size is 0; it must be at least 1");
    check(
        |problem| problem.key_cache_strides.row = 0,
        "the (page, head, row) strides of key_cache is (4, 2, 0); it must be so far apart that no rows overlap",
    );
    check(
        |problem| problem.struct_size = 8,
        "problem.struct_size is 8; it must be sizeof(flashcore_append_problem_t), which is 272",
    );
}

/// Three parts of which one is empty and holds NaN; the second token has nothing but empty parts.
#[test]
fn a_merge_from_beginning_to_end() {
    let mut problem = MaybeUninit::uninit();
    // SAFETY: the pointer is to a problem that can be written.
    let status = unsafe { flashcore_merge_problem_init(problem.as_mut_ptr(), 3, 2, 1, 2, FLASHCORE_DTYPE_F32) };
    assert_eq!(status, FLASHCORE_OK);
    // SAFETY: written by the call above.
    let problem: MergeProblem = unsafe { problem.assume_init() };
    let mut plan = ptr::dangling_mut();
    // SAFETY: both pointers are to what they say.
    let status = unsafe { flashcore_merge_create(&raw const problem, FLASHCORE_DEVICE_CPU, 0, &raw mut plan) };
    assert_eq!((status, text(flashcore_last_error())), (FLASHCORE_OK, String::new()));
    let nan = f32::NAN;
    let outputs = [[1.0_f32, 2.0, nan, nan], [nan; 4], [3.0, 6.0, nan, nan]];
    let lses = [[0.0_f32, f32::NEG_INFINITY], [f32::INFINITY, f32::INFINITY], [0.0, f32::NEG_INFINITY]];
    let (part_outputs, part_lses) =
        (outputs.each_ref().map(|part| bytes(part)), lses.each_ref().map(|part| bytes(part)));
    let inputs = MergeInputs { part_outputs: part_outputs.as_ptr(), part_lses: part_lses.as_ptr(), ..zeroed() };
    let (mut output, mut lse) = ([9.0_f32; 4], [9.0_f32; 2]);
    let written = MergeOutputs { output: mut_bytes(&mut output), lse: mut_bytes(&mut lse), ..zeroed() };
    // SAFETY: the structs are what they say.
    let status = unsafe { flashcore_merge_run_host(plan, &raw const inputs, &raw const written) };
    assert_eq!((status, text(flashcore_last_error())), (FLASHCORE_OK, String::new()));
    assert_eq!(output, [2.0, 4.0, 0.0, 0.0]);
    assert_eq!(lse, [std::f32::consts::LN_2, f32::NEG_INFINITY]);

    let missing = MergeOutputs { lse: NO_MUT_BYTES, ..written };
    // SAFETY: the structs are what they say.
    let status = unsafe { flashcore_merge_run_host(plan, &raw const inputs, &raw const missing) };
    let message = "lse is missing; the problem has it switched on".to_owned();
    assert_eq!((status, text(flashcore_last_error())), (FLASHCORE_INVALID_ARGUMENT, message));
    let overlapping = MergeOutputs { output: mut_bytes(&mut lse), ..written };
    // SAFETY: the structs are what they say.
    let status = unsafe { flashcore_merge_run_host(plan, &raw const inputs, &raw const overlapping) };
    let message = "outputs.output overlaps outputs.lse; what is written must be apart".to_owned();
    assert_eq!((status, text(flashcore_last_error())), (FLASHCORE_INVALID_ARGUMENT, message));
    // SAFETY: null is an error.
    assert_eq!(unsafe { flashcore_merge_run_host(plan, ptr::null(), &raw const written) }, FLASHCORE_INVALID_ARGUMENT);
    assert_eq!(flashcore_merge_destroy(plan), FLASHCORE_OK);
    // SAFETY: a plan that is gone is an error.
    assert_eq!(unsafe { flashcore_merge_launch(plan, ptr::null_mut(), ptr::null()) }, FLASHCORE_INVALID_PLAN);
}

/// One key at a time, of equal scores: the output is the mean of the values so far.
#[test]
fn attention_continues_from_beginning_to_end() {
    let mut problem = problem(1, 1, 1, 2, FLASHCORE_DTYPE_F32);
    let create = |problem: &Problem| {
        let mut plan = ptr::null_mut();
        // SAFETY: the problem is one, and the plan can be written.
        let status = unsafe { flashcore_continue_create(problem, FLASHCORE_DEVICE_CPU, 0, &raw mut plan) };
        (status, plan, text(flashcore_last_error()))
    };
    let (status, plan, said) = create(&problem);
    let words = "lse is false; it must be true to continue from an LSE";
    assert_eq!((status, plan.is_null(), said.as_str()), (FLASHCORE_INVALID_ARGUMENT, true, words));
    problem.lse = 1;
    let (status, plan, said) = create(&problem);
    assert_eq!((status, said.as_str()), (FLASHCORE_OK, ""));
    let (mut output, mut lse) = ([0.0_f32; 2], [f32::NEG_INFINITY]);
    for value in [[1.0_f32, 2.0], [3.0, 6.0]] {
        let inputs = inputs(&[0.0_f32; 2], &[0.0; 2], &value);
        let outputs = outputs(mut_bytes(&mut output), mut_bytes(&mut lse));
        // SAFETY: the structs are what they say, and what they point to is valid.
        assert_eq!(unsafe { flashcore_continue_run_host(plan, &raw const inputs, &raw const outputs) }, FLASHCORE_OK);
    }
    assert_eq!((output, lse), ([2.0, 4.0], [std::f32::consts::LN_2]));
    assert_eq!(flashcore_continue_workspace_bytes(plan), 0);
    let none = Tensors { struct_size: size_of::<Tensors>() as u64, ..zeroed() };
    // SAFETY: a plan on the CPU launches nothing.
    let status = unsafe { flashcore_continue_launch(plan, ptr::null_mut(), &raw const none) };
    assert_eq!(status, FLASHCORE_UNSUPPORTED);
    assert_eq!(flashcore_continue_destroy(plan), FLASHCORE_OK);
    assert_eq!(flashcore_continue_destroy(plan), FLASHCORE_INVALID_PLAN);
}
