//! Attention with a growing KV cache from C, against values worked out by hand and errors by text.

use super::*;

/// Two sequences of one head of two columns, room for three keys each, one new key for each.
fn problems() -> (Problem, KvCacheProblem) {
    let mut attention = problem(2, 1, 1, 2, FLASHCORE_DTYPE_F32);
    (attention.key_length, attention.seqused_k) = (3, 1);
    let mut append = MaybeUninit::uninit();
    // SAFETY: the pointers are to a problem, and to one that can be written.
    let status = unsafe {
        let size = size_of::<KvCacheProblem>() as u64;
        flashcore_kvcache_problem_init_sized(append.as_mut_ptr(), size, &raw const attention, 1)
    };
    assert_eq!(status, FLASHCORE_OK);
    // SAFETY: written by the call above.
    let append: KvCacheProblem = unsafe { append.assume_init() };
    let append =
        KvCacheProblem { rotary: FLASHCORE_ROTARY_GPTJ, rotary_dim: 2, max_position: 2, table_stride: 1, ..append };
    (attention, append)
}

fn create_kv_cache((attention, append): &(Problem, KvCacheProblem)) -> Result<*mut KvCacheHandle, (Status, String)> {
    let mut plan = ptr::dangling_mut();
    // SAFETY: the pointers are to what they say.
    let status = unsafe { flashcore_kvcache_create(attention, append, FLASHCORE_DEVICE_CPU, 0, &raw mut plan) };
    if status == FLASHCORE_OK { Ok(plan) } else { Err((status, text(flashcore_last_error()))) }
}

/// The second sequence appends at row 1, which turns by a right angle. Queries are 0: outputs are means of values.
#[test]
fn a_growing_cache_from_beginning_to_end() {
    let plan = create_kv_cache(&problems()).unwrap();
    let (query, new_key, new_value) = ([0.0_f32; 4], [1.0_f32, 2.0, 3.0, 4.0], [10.0_f32, 20.0, 30.0, 40.0]);
    let (cos, sin) = ([1.0_f32, 0.0], [0.0_f32, 1.0]);
    let (mut keys, mut values, mut output) = ([9.0_f32; 12], [9.0_f32; 12], [0.0_f32; 4]);
    let mut step = |lengths: [u32; 2], outputs_of: &mut dyn FnMut(KvCaches, Outputs) -> (KvCaches, Outputs)| {
        let attention = Inputs { seqused_k: bytes(&lengths), ..inputs(&query, &new_key, &new_value) };
        let append = KvCacheInputs { cos: bytes(&cos), sin: bytes(&sin), ..zeroed() };
        let caches = KvCaches { key_cache: mut_bytes(&mut keys), value_cache: mut_bytes(&mut values), ..zeroed() };
        let (caches, outputs) = outputs_of(caches, outputs(mut_bytes(&mut output), NO_MUT_BYTES));
        // SAFETY: the structs are what they say.
        let status = unsafe {
            flashcore_kvcache_run_host(
                plan,
                &raw const attention,
                &raw const append,
                &raw const caches,
                &raw const outputs,
            )
        };
        (status, text(flashcore_last_error()), (keys, values, output))
    };
    let (status, message, (keys, values, output)) = step([0, 1], &mut |caches, outputs| (caches, outputs));
    assert_eq!((status, message.as_str()), (FLASHCORE_OK, ""));
    let nine = 9.0;
    assert_eq!(keys, [1.0, 2.0, nine, nine, nine, nine, nine, nine, -4.0, 3.0, nine, nine]);
    assert_eq!(values, [10.0, 20.0, nine, nine, nine, nine, nine, nine, 30.0, 40.0, nine, nine]);
    assert_eq!(output, [10.0, 20.0, 19.5, 24.5]);

    // No room for a fourth key: nothing is written.
    let (status, message, after) = step([0, 3], &mut |caches, outputs| (caches, outputs));
    assert_eq!(status, FLASHCORE_INVALID_ARGUMENT);
    assert_eq!(
        message,
        "sequence 1 uses 3 rows of the cache and gets 1 more; key_length is 3: plan for longer sequences, or append less"
    );
    assert_eq!(after, (keys, values, output));

    // No row of the tables for the position of the new key.
    let (status, message, after) = step([0, 2], &mut |caches, outputs| (caches, outputs));
    assert_eq!(status, FLASHCORE_INVALID_ARGUMENT);
    assert_eq!(
        message,
        "sequence 1 is at position 2; cos and sin have 2 rows (max_position), for positions from 0 on: make them longer"
    );
    assert_eq!(after, (keys, values, output));

    // The value cache in the memory of the output.
    let (status, message, _) =
        step([0, 1], &mut |caches, outputs| (KvCaches { value_cache: outputs.output, ..caches }, outputs));
    assert_eq!(status, FLASHCORE_INVALID_ARGUMENT);
    assert_eq!(message, "outputs.output overlaps caches.value_cache; what is written must be apart");

    let (attention, tensors): (Tensors, KvCacheTensors) = (zeroed(), zeroed());
    // SAFETY: the tensors are what they say, and the plan is on the CPU.
    let status = unsafe { flashcore_kvcache_launch(plan, ptr::null_mut(), &raw const attention, &raw const tensors) };
    assert_eq!(status, FLASHCORE_UNSUPPORTED);
    assert_eq!(flashcore_kvcache_workspace_bytes(plan), 0);
    assert_eq!(flashcore_kvcache_destroy(plan), FLASHCORE_OK);
    assert_eq!(flashcore_kvcache_destroy(plan), FLASHCORE_INVALID_PLAN);
    assert_eq!(flashcore_kvcache_destroy(ptr::null_mut()), FLASHCORE_OK);
}

#[test]
fn problems_of_growing_caches_are_checked() {
    let check = |change: fn(&mut Problem, &mut KvCacheProblem), expected: &str| {
        let (mut attention, mut append) = problems();
        change(&mut attention, &mut append);
        assert_eq!(create_kv_cache(&(attention, append)), Err((FLASHCORE_INVALID_ARGUMENT, expected.to_owned())));
    };
    check(|_, append| append.rotary = 3, "problem.rotary is 3; it must be one of FLASHCORE_ROTARY_*");
    check(|_, append| append.new_length = 0, "new_length is 0; it must be at least 1");
    check(|_, append| append.reserved = 1, "problem.reserved is 1; it must be 0");
    check(
        |attention, _| attention.seqused_k = 0,
        "seqused_k of the attention is false; it must be true: cache_seqlens are the lengths before the append",
    );
    check(
        |_, append| append.struct_size = 8,
        "problem.struct_size is 8; it must be sizeof(flashcore_kvcache_problem_t), which is 128",
    );
}
