//! Structs of callers that were compiled with an older or a newer header.

use std::mem::offset_of;

use super::*;

/// The bytes of a struct with others after them, its first field saying how many there are.
fn longer<T: Copy>(value: &T, extra: &[u64]) -> Vec<u64> {
    let words = size_of::<T>() / 8;
    let mut bytes = vec![0_u64; words];
    // SAFETY: as many bytes as the struct has, which is made of integers and addresses.
    unsafe { ptr::copy_nonoverlapping(ptr::from_ref(value).cast(), bytes.as_mut_ptr(), words) };
    bytes.extend(extra);
    bytes[0] = bytes.len() as u64 * 8;
    bytes
}

fn create_from(words: &[u64]) -> (Status, String) {
    let mut plan = ptr::null_mut();
    // SAFETY: the words are a problem of the size that the first of them says.
    let status = unsafe { flashcore_plan_create(words.as_ptr().cast(), FLASHCORE_DEVICE_CPU, 0, &raw mut plan) };
    let said = text(flashcore_last_error());
    assert_eq!(flashcore_plan_destroy(plan), FLASHCORE_OK);
    (status, said)
}

fn no_launch(tensors: &[u64]) -> (Status, String) {
    let plan = create(&problem(1, 1, 1, 8, FLASHCORE_DTYPE_F16)).unwrap();
    // SAFETY: the words are tensors of the size that the first of them says, and a plan on the CPU launches nothing.
    let status = unsafe { flashcore_plan_launch_tensors(plan, ptr::null_mut(), tensors.as_ptr().cast()) };
    let said = text(flashcore_last_error());
    assert_eq!(flashcore_plan_destroy(plan), FLASHCORE_OK);
    (status, said)
}

/// Sizes and places are the ABI: what changes one of these breaks every program that is compiled.
#[test]
fn sizes_are_those_of_the_header() {
    let words = |bytes: usize| bytes / 8;
    assert_eq!(words(offset_of!(Inputs, bias_strides)), 1 + 6 * 2);
    assert_eq!(words(offset_of!(Inputs, aux_f32)), 1 + 7 * 2 + 4);
    assert_eq!(words(offset_of!(Outputs, lse)), 1 + 2);
    assert_eq!(words(offset_of!(Tensors, bias_strides)), 1 + 9);
    assert_eq!(words(offset_of!(Tensors, workspace)), 1 + 9 + 4 + 2);
    assert_eq!(offset_of!(Problem, query_strides), 136);
    assert_eq!(offset_of!(Problem, output_strides), 136 + 3 * 3 * 8);
    assert_eq!(offset_of!(Problem, cu_seqlens_q), 232);
    assert_eq!(offset_of!(Problem, total_q), 232 + 6 * 4);
    assert_eq!(offset_of!(Problem, table_stride), 232 + 6 * 4 + 6 * 8);
    assert_eq!(offset_of!(Problem, lse_base), 232 + 6 * 4 + 7 * 8);
    assert_eq!(offset_of!(Problem, score_mod), 232 + 6 * 4 + 7 * 8 + 2 * 4);
    assert_eq!(offset_of!(Problem, kv_dtype), 320 + 4 * 8);
    assert_eq!(offset_of!(Problem, q_scale), 320 + 4 * 8 + 2 * 4);
    assert_eq!(size_of::<Problem>(), 320 + 4 * 8 + 6 * 4);
    assert_eq!(words(offset_of!(Inputs, cu_seqlens_q)), 1 + 7 * 2 + 4 + 2 * 2);
    assert_eq!(words(offset_of!(Inputs, q_scale)), 1 + 7 * 2 + 4 + 8 * 2);
    assert_eq!(words(size_of::<Inputs>()), 1 + 7 * 2 + 4 + 8 * 2 + 3 * 7);
    assert_eq!(words(offset_of!(Tensors, cu_seqlens_q)), 1 + 9 + 4 + 3);
    assert_eq!(words(offset_of!(Tensors, q_scale)), 1 + 9 + 4 + 3 + 6);
    assert_eq!(words(size_of::<Tensors>()), 1 + 9 + 4 + 3 + 6 + 3 * 6);
    assert_eq!(offset_of!(AppendProblem, cache_dtype), 256);
    assert_eq!(offset_of!(KvCacheProblem, compute_scales), 120);
    assert_eq!(words(offset_of!(AppendTensors, k_scale)), 14);
    assert_eq!(words(offset_of!(AppendInputs, k_scale)), 1 + 9 * 2);
    assert_eq!(words(offset_of!(AppendOutputs, k_scale)), 1 + 2 * 2 + 1 + 2);
    assert_eq!(words(offset_of!(KvCaches, k_scale)), 1 + 2 * 2 + 1);
}

/// A program of version 0.1 has room for 232 bytes, and one of a later version for more: each gets what it has room for.
#[test]
fn a_problem_is_filled_as_far_as_the_caller_has_room() {
    const GARBAGE: u64 = 0xAAAA_AAAA_AAAA_AAAA;
    let fill = |call: &dyn Fn(*mut Problem) -> Status| {
        let mut words = vec![GARBAGE; 64];
        let status = call(words.as_mut_ptr().cast());
        (status, words.iter().position(|&word| word == GARBAGE), words)
    };
    let sized = |struct_size: u64| {
        // SAFETY: 512 bytes can be written, and no call here says more.
        fill(&|at| unsafe { flashcore_problem_init_sized(at, struct_size, 1, 2, 4, 8, FLASHCORE_DTYPE_F32) })
    };
    // SAFETY: 512 bytes can be written.
    let old = fill(&|at| unsafe { flashcore_problem_init(at, 1, 2, 4, 8, FLASHCORE_DTYPE_F32) });
    assert_eq!((old.0, old.1, old.2[0]), (FLASHCORE_OK, Some(232 / 8), 232));
    for bytes in [136, 232, 256, 312, 320, 352, 360, 376, 400] {
        let (status, end, words) = sized(bytes);
        assert_eq!((status, end, words[0]), (FLASHCORE_OK, Some(bytes as usize / 8), bytes));
        assert_eq!(create_from(&words), (FLASHCORE_OK, String::new()));
    }
    for bytes in [0, 128, 140, 4104, u64::MAX] {
        let (status, end, _) = sized(bytes);
        assert_eq!((status, end), (FLASHCORE_INVALID_ARGUMENT, Some(0)));
        let said = format!("struct_size is {bytes}; it must be sizeof(flashcore_problem_t), which is 376");
        assert_eq!(text(flashcore_last_error()), said);
    }
}

#[test]
fn older_structs_lack_fields_that_are_off() {
    let mut given = problem(1, 2, 4, 8, FLASHCORE_DTYPE_F32);
    // What a shorter struct lacks is not read, whatever lies there.
    given.output_strides = Strides { batch: u64::MAX, head: u64::MAX, row: u64::MAX };
    let short = |given: &Problem| longer(given, &[])[..offset_of!(Problem, query_strides) / 8].to_vec_with_size();
    assert_eq!(create_from(&short(&given)), (FLASHCORE_OK, String::new()));
    let mut words = longer(&given, &[]);
    words[0] = offset_of!(Problem, query_strides) as u64;
    assert_eq!(create_from(&words), (FLASHCORE_OK, String::new()));
    // The strides that are missing are zeros, and a problem that asks for them is told so.
    given.layout = FLASHCORE_LAYOUT_STRIDED;
    let (status, said) = create_from(&short(&given));
    assert_eq!(
        (status, said.as_str()),
        (
            FLASHCORE_INVALID_ARGUMENT,
            "the output strides (batch 0, head 0, row 0) let elements of 1 batches, 2 heads, 4 rows and 8 columns overlap"
        )
    );
}

/// Words whose first says how many bytes they are.
trait WithSize {
    fn to_vec_with_size(&self) -> Vec<u64>;
}

impl WithSize for [u64] {
    fn to_vec_with_size(&self) -> Vec<u64> {
        let mut words = self.to_vec();
        words[0] = words.len() as u64 * 8;
        words
    }
}

#[test]
fn newer_structs_are_taken_where_their_new_fields_are_off() {
    let given = problem(1, 2, 4, 8, FLASHCORE_DTYPE_F32);
    assert_eq!(create_from(&longer(&given, &[0])), (FLASHCORE_OK, String::new()));
    assert_eq!(create_from(&longer(&given, &[0; 200])), (FLASHCORE_OK, String::new()));
    let size = size_of::<Problem>();
    let expected = format!(
        "problem.struct_size is {}, and byte {} of it is 1; this version of flashcore knows {size} bytes of \
         flashcore_problem_t: leave the fields after them 0, or use a newer library",
        size + 24,
        size + 18
    );
    assert_eq!(create_from(&longer(&given, &[0, 0, 0x1_0000])), (FLASHCORE_INVALID_ARGUMENT, expected));

    assert_eq!(no_launch(&longer(&zeroed::<Tensors>(), &[0; 3])).0, FLASHCORE_UNSUPPORTED);
    let (status, said) = no_launch(&longer(&zeroed::<Tensors>(), &[0, 0xFF00]));
    assert_eq!(status, FLASHCORE_INVALID_ARGUMENT);
    let size = size_of::<Tensors>();
    let expected = format!(
        "tensors.struct_size is {}, and byte {} of it is 255; this version of flashcore knows {size} bytes of \
         flashcore_tensors_t: leave the fields after them 0, or use a newer library",
        size + 16,
        size + 9
    );
    assert_eq!(said, expected);
}

#[test]
fn sizes_that_no_header_has() {
    let whole = size_of::<Problem>() as u64;
    let least = offset_of!(Problem, query_strides) as u64;
    for size in [0, 8, least - 8, least + 4, whole - 1, whole + 4, 4104, u64::MAX - 7, u64::MAX] {
        let mut given = problem(1, 2, 4, 8, FLASHCORE_DTYPE_F32);
        given.struct_size = size;
        let expected =
            format!("problem.struct_size is {size}; it must be sizeof(flashcore_problem_t), which is {whole}");
        assert_eq!(create(&given), Err((FLASHCORE_INVALID_ARGUMENT, expected)));
    }
    let mut none = zeroed::<Tensors>();
    let whole = size_of::<Tensors>();
    for size in [0, 32, 44, whole as u64 + 1, 4104, u64::MAX] {
        none.struct_size = size;
        // SAFETY: as many words as the struct has.
        let words = unsafe { *ptr::from_ref(&none).cast::<[u64; size_of::<Tensors>() / 8]>() };
        let expected =
            format!("tensors.struct_size is {size}; it must be sizeof(flashcore_tensors_t), which is {whole}");
        assert_eq!(no_launch(&words), (FLASHCORE_INVALID_ARGUMENT, expected));
    }
}

/// Inputs without anything optional and outputs without a log-sum-exp, as short as they may be; and with more at the end.
#[test]
fn structs_of_a_run_may_be_shorter_and_longer() {
    let plan = create(&problem(1, 1, 2, 1, FLASHCORE_DTYPE_F32)).unwrap();
    let numbers = [1.0_f32, 2.0];
    let run_words = |inputs: &[u64], outputs: &[u64]| {
        // SAFETY: the words are these structs, of the sizes that the first of them say.
        unsafe { flashcore_plan_run_host(plan, inputs.as_ptr().cast(), outputs.as_ptr().cast()) }
    };
    let mut output = [0.0_f32; 2];
    let whole_inputs = longer(&inputs(&[0.0_f32; 2], &[0.0; 2], &numbers), &[]);
    let whole_outputs = longer(&outputs(mut_bytes(&mut output), NO_MUT_BYTES), &[]);
    let short = |words: &[u64], bytes: usize| words[..bytes / 8].to_vec_with_size();
    let short_inputs = short(&whole_inputs, offset_of!(Inputs, alibi_slopes));
    let short_outputs = short(&whole_outputs, offset_of!(Outputs, lse));
    assert_eq!(run_words(&short_inputs, &short_outputs), FLASHCORE_OK);
    assert_eq!(output, [1.5, 1.5]);
    let padded = |words: &[u64], last: u64| [words, &[0, last]].concat().to_vec_with_size();
    assert_eq!(run_words(&padded(&whole_inputs, 0), &padded(&whole_outputs, 0)), FLASHCORE_OK);
    assert_eq!(run_words(&padded(&whole_inputs, 1), &whole_outputs), FLASHCORE_INVALID_ARGUMENT);
    assert_eq!(run_words(&whole_inputs, &padded(&whole_outputs, 1)), FLASHCORE_INVALID_ARGUMENT);
    let too_short = short(&whole_inputs, offset_of!(Inputs, alibi_slopes) - 8);
    assert_eq!(run_words(&too_short, &whole_outputs), FLASHCORE_INVALID_ARGUMENT);
    assert_eq!(flashcore_plan_destroy(plan), FLASHCORE_OK);
}
