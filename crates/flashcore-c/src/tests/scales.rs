//! FP8 tensors with scales from C, against values worked out by hand and errors by text.

use super::*;

/// Codes of e4m3: 1, 2, 0.5, 4.
const CODES: [u8; 4] = [0x38, 0x40, 0x30, 0x48];

fn scale(data: &[f32], key_head: u64) -> ScaleBytes {
    ScaleBytes { data: bytes(data), strides: ScaleStrides { key_head, ..ScaleStrides::default() } }
}

/// Two heads of one row each; a query of zeros gives the values, multiplied by their scale.
#[test]
fn values_are_multiplied_by_the_scale_of_their_head() {
    let mut given = problem(1, 2, 1, 2, FLASHCORE_DTYPE_F32);
    (given.kv_dtype, given.k_scale, given.v_scale) = (FLASHCORE_DTYPE_E4M3, 1, 1);
    let plan = create(&given).unwrap();
    let (query, mut output, scales) = ([0.0_f32; 4], [0.0_f32; 4], [0.5_f32, 4.0]);
    let inputs = Inputs {
        query: bytes(&query),
        key: bytes(&CODES),
        value: bytes(&CODES),
        k_scale: scale(&scales, 1),
        v_scale: scale(&scales, 1),
        ..zeroed()
    };
    let outputs = outputs(mut_bytes(&mut output), NO_MUT_BYTES);
    let run = |inputs: &Inputs| {
        // SAFETY: the structs are what they say.
        let status = unsafe { flashcore_plan_run_host(plan, inputs, &raw const outputs) };
        (status, text(flashcore_last_error()))
    };
    assert_eq!(run(&inputs), (FLASHCORE_OK, String::new()));
    let expected = [0.5, 1.0, 2.0, 16.0];
    // SAFETY: written by the call above, and read by nobody else.
    assert_eq!(unsafe { *outputs.output.data.cast::<[f32; 4]>() }, expected);
    let tensors = Tensors {
        query: query.as_ptr().cast(),
        key: CODES.as_ptr().cast(),
        value: CODES.as_ptr().cast(),
        output: outputs.output.data,
        k_scale: Scale { data: scales.as_ptr(), strides: inputs.k_scale.strides },
        v_scale: Scale { data: scales.as_ptr(), strides: inputs.v_scale.strides },
        ..zeroed()
    };
    // SAFETY: the addresses are those of whole tensors.
    let status = unsafe { flashcore_plan_run_tensors(plan, &raw const tensors) };
    assert_eq!((status, text(flashcore_last_error())), (FLASHCORE_OK, String::new()));
    // SAFETY: as above.
    assert_eq!(unsafe { *outputs.output.data.cast::<[f32; 4]>() }, expected);
    let wrong = [0.5_f32, -4.0];
    let said = "v_scale[1] is -4; scales must be finite and above 0".to_owned();
    let found = run(&Inputs { v_scale: scale(&wrong, 1), ..inputs });
    assert_eq!(found, (FLASHCORE_INVALID_ARGUMENT, said));
    let said = "k_scale is missing; the problem has it switched on".to_owned();
    assert_eq!(run(&Inputs { k_scale: zeroed::<Inputs>().k_scale, ..inputs }), (FLASHCORE_INVALID_ARGUMENT, said));
    assert_eq!(flashcore_plan_destroy(plan), FLASHCORE_OK);
}

/// One token of one head of two columns into the second of two slots: given scales, then computed ones.
#[test]
fn an_append_quantises() {
    let make = |compute_scales: i32| {
        let mut problem = MaybeUninit::uninit();
        // SAFETY: the pointer is to a problem that can be written.
        let status = unsafe {
            let size = size_of::<AppendProblem>() as u64;
            flashcore_append_problem_init_sized(problem.as_mut_ptr(), size, 1, 0, 1, 2, 1, 2, FLASHCORE_DTYPE_F32)
        };
        assert_eq!(status, FLASHCORE_OK);
        // SAFETY: written by the call above.
        let problem: AppendProblem = unsafe { problem.assume_init() };
        let problem =
            AppendProblem { cache_dtype: FLASHCORE_DTYPE_E4M3, k_scale: 1, v_scale: 1, compute_scales, ..problem };
        let mut plan = ptr::dangling_mut();
        // SAFETY: both pointers are to what they say.
        let status = unsafe { flashcore_append_create(&raw const problem, FLASHCORE_DEVICE_CPU, 0, &raw mut plan) };
        assert_eq!((status, text(flashcore_last_error())), (FLASHCORE_OK, String::new()));
        plan
    };
    let (key, value, slots) = ([1.0_f32, -2.0], [3.0_f32, 1000.0], [1_i64]);
    let (mut keys, mut values, mut k_scale, mut v_scale) = ([0xAA_u8; 4], [0xAA_u8; 4], [7.0_f32; 2], [7.0_f32; 2]);
    let inputs = AppendInputs { key: bytes(&key), value: bytes(&value), slot_mapping: bytes(&slots), ..zeroed() };
    let outputs = AppendOutputs { key_cache: mut_bytes(&mut keys), value_cache: mut_bytes(&mut values), ..zeroed() };
    let given = AppendInputs { k_scale: scale(&[2.0], 0), v_scale: scale(&[0.5], 0), ..inputs };
    let plan = make(0);
    // SAFETY: the structs are what they say.
    let status = unsafe { flashcore_append_run_host(plan, &raw const given, &raw const outputs) };
    assert_eq!((status, text(flashcore_last_error())), (FLASHCORE_OK, String::new()));
    // 1000 / 0.5 saturates.
    assert_eq!((keys, values), ([0xAA, 0xAA, 0x30, 0xB8], [0xAA, 0xAA, 0x4C, 0x7E]));
    assert_eq!(flashcore_append_destroy(plan), FLASHCORE_OK);
    let strides = ScaleStrides { batch: 2, row: 1, key_head: 1, ..ScaleStrides::default() };
    let computed = AppendOutputs {
        key_cache: mut_bytes(&mut keys),
        value_cache: mut_bytes(&mut values),
        k_scale: ScaleMutBytes { data: mut_bytes(&mut k_scale), strides },
        v_scale: ScaleMutBytes { data: mut_bytes(&mut v_scale), strides },
        ..zeroed()
    };
    let plan = make(1);
    // SAFETY: the structs are what they say.
    let status = unsafe { flashcore_append_run_host(plan, &raw const inputs, &raw const computed) };
    assert_eq!((status, text(flashcore_last_error())), (FLASHCORE_OK, String::new()));
    assert_eq!((keys, values), ([0xAA, 0xAA, 0x76, 0xFE], [0xAA, 0xAA, 0x3B, 0x7E]));
    assert_eq!((k_scale, v_scale), ([7.0, 2.0 / 448.0], [7.0, 1000.0 / 448.0]));
    // SAFETY: the structs are what they say.
    let status = unsafe { flashcore_append_run_host(plan, &raw const given, &raw const computed) };
    assert_eq!(status, FLASHCORE_INVALID_ARGUMENT);
    let said = "k_scale was given; the problem has it switched off; v_scale was given; the problem has it switched off";
    assert_eq!(text(flashcore_last_error()), said);
    assert_eq!(flashcore_append_destroy(plan), FLASHCORE_OK);
}

/// One sequence with one key in an FP8 cache gets another; a query of zeros gives the mean of both values.
#[test]
fn a_growing_fp8_cache() {
    for compute_scales in [0, 1] {
        let mut attention = problem(1, 1, 1, 2, FLASHCORE_DTYPE_F32);
        (attention.key_length, attention.seqused_k) = (2, 1);
        (attention.kv_dtype, attention.k_scale, attention.v_scale) = (FLASHCORE_DTYPE_E4M3, 1, 1);
        let mut append = MaybeUninit::uninit();
        // SAFETY: the pointers are to a problem, and to one that can be written.
        let status = unsafe {
            let size = size_of::<KvCacheProblem>() as u64;
            flashcore_kvcache_problem_init_sized(append.as_mut_ptr(), size, &raw const attention, 1)
        };
        assert_eq!(status, FLASHCORE_OK);
        // SAFETY: written by the call above.
        let append = KvCacheProblem { compute_scales, ..unsafe { append.assume_init() } };
        let mut plan = ptr::dangling_mut();
        // SAFETY: the pointers are to what they say.
        let status = unsafe {
            flashcore_kvcache_create(&raw const attention, &raw const append, FLASHCORE_DEVICE_CPU, 0, &raw mut plan)
        };
        assert_eq!((status, text(flashcore_last_error())), (FLASHCORE_OK, String::new()));
        let (query, new_key, new_value) = ([0.0_f32; 2], [1.0_f32, 1.0], [14.0_f32, -7.0]);
        let (mut keys, mut values, mut output) = (CODES, CODES, [0.0_f32; 2]);
        let (mut k_scale, mut v_scale, lengths) = ([1.0_f32, 1.0], [1.0_f32, 1.0], [1_u32]);
        let strides = ScaleStrides { batch: 2, row: 1, key_head: 1, ..ScaleStrides::default() };
        let tensors = Tensors {
            query: query.as_ptr().cast(),
            key: keys.as_mut_ptr().cast(),
            value: values.as_mut_ptr().cast(),
            output: output.as_mut_ptr().cast(),
            seqused_k: lengths.as_ptr(),
            k_scale: Scale { data: k_scale.as_mut_ptr(), strides },
            v_scale: Scale { data: v_scale.as_mut_ptr(), strides },
            ..zeroed()
        };
        let rest =
            KvCacheTensors { new_key: new_key.as_ptr().cast(), new_value: new_value.as_ptr().cast(), ..zeroed() };
        // SAFETY: the addresses are those of whole tensors.
        let status = unsafe { flashcore_kvcache_run_tensors(plan, &raw const tensors, &raw const rest) };
        assert_eq!((status, text(flashcore_last_error())), (FLASHCORE_OK, String::new()));
        // The mean of (1, 2) and (14, -7).
        assert_eq!(output, [7.5, -2.5]);
        assert_eq!(v_scale, [1.0, if compute_scales == 1 { 14.0 / 448.0 } else { 1.0 }]);
        assert_eq!(flashcore_kvcache_destroy(plan), FLASHCORE_OK);
    }
}
