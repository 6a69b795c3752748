//! The C ABI from Rust: its answers by value, and 100,000 random calls.

use std::ffi::{CStr, c_char, c_void};
use std::mem::{MaybeUninit, size_of};
use std::ptr;

use api::verify::SplitMix64;

use crate::sized::zeroed;
use crate::status::guarded;
use crate::*;

mod expressions;
mod kvcache;
mod launches;
mod operations;
mod scales;
mod sequences;
mod sizes;

fn text(pointer: *const c_char) -> String {
    assert!(!pointer.is_null());
    // SAFETY: not null, and every text of the ABI ends with a zero.
    unsafe { CStr::from_ptr(pointer) }.to_str().unwrap().to_owned()
}

fn problem(batch: u64, heads: u64, length: u64, head_dim: u64, dtype: i32) -> Problem {
    let mut problem = MaybeUninit::uninit();
    let size = size_of::<Problem>() as u64;
    // SAFETY: the pointer is to a problem that can be written.
    let status =
        unsafe { flashcore_problem_init_sized(problem.as_mut_ptr(), size, batch, heads, length, head_dim, dtype) };
    assert_eq!(status, FLASHCORE_OK);
    // SAFETY: written by the call above.
    unsafe { problem.assume_init() }
}

fn to_api(problem: &Problem) -> api::Problem {
    // SAFETY: expressions of tests are null or texts that end.
    unsafe { problem.to_api() }.unwrap()
}

fn create(problem: &Problem) -> Result<*mut PlanHandle, (Status, String)> {
    let mut plan = ptr::dangling_mut();
    // SAFETY: both pointers are to what they say.
    let status = unsafe { flashcore_plan_create(problem, FLASHCORE_DEVICE_CPU, 0, &raw mut plan) };
    if status == FLASHCORE_OK {
        assert_eq!(text(flashcore_last_error()), "");
        return Ok(plan);
    }
    assert!(plan.is_null(), "a plan that was not made is null");
    Err((status, text(flashcore_last_error())))
}

fn bytes<T>(values: &[T]) -> Bytes {
    Bytes { data: values.as_ptr().cast(), bytes: size_of_val(values) as u64 }
}

fn mut_bytes<T>(values: &mut [T]) -> BytesMut {
    BytesMut { data: values.as_mut_ptr().cast(), bytes: size_of_val(values) as u64 }
}

const NO_BYTES: Bytes = Bytes { data: ptr::null(), bytes: 0 };
const NO_MUT_BYTES: BytesMut = BytesMut { data: ptr::null_mut(), bytes: 0 };

fn inputs<T>(query: &[T], key: &[T], value: &[T]) -> Inputs {
    Inputs { query: bytes(query), key: bytes(key), value: bytes(value), ..zeroed() }
}

fn outputs(output: BytesMut, lse: BytesMut) -> Outputs {
    Outputs { output, lse, ..zeroed() }
}

fn run(plan: *const PlanHandle, inputs: &Inputs, outputs: &Outputs) -> (Status, String) {
    // SAFETY: the structs are what they say, and what they point to is checked by the call or valid in these tests.
    let status = unsafe { flashcore_plan_run_host(plan, inputs, outputs) };
    (status, text(flashcore_last_error()))
}

#[test]
fn a_call_from_beginning_to_end() {
    let mut problem = problem(1, 1, 2, 1, FLASHCORE_DTYPE_F32);
    problem.mask = FLASHCORE_MASK_CAUSAL;
    problem.lse = 1;
    let plan = create(&problem).unwrap();
    let description = text(flashcore_plan_describe(plan));
    assert!(description.starts_with("batch 1 heads 1/1 queries 2 keys 2 dims 1/1 f32 causal bottom-right"));

    let (mut output, mut lse) = ([f32::NAN; 2], [f32::NAN; 2]);
    let inputs = inputs(&[0.0_f32; 2], &[0.0; 2], &[1.0, 2.0]);
    let outputs = outputs(mut_bytes(&mut output), mut_bytes(&mut lse));
    assert_eq!(run(plan, &inputs, &outputs), (FLASHCORE_OK, String::new()));
    assert_eq!(output, [1.0, 1.5]);
    assert_eq!(lse, [0.0, std::f32::consts::LN_2]);
    assert_eq!(flashcore_plan_destroy(plan), FLASHCORE_OK);
}

/// Plans that are gone, null or made up are errors in every function.
#[test]
fn plans_that_are_none() {
    let gone = create(&problem(1, 1, 1, 8, FLASHCORE_DTYPE_F32)).unwrap();
    assert_eq!(flashcore_plan_destroy(gone), FLASHCORE_OK);
    let (inputs, outputs) = (inputs::<f32>(&[], &[], &[]), outputs(NO_MUT_BYTES, NO_MUT_BYTES));
    for plan in [gone, ptr::null_mut(), ptr::without_provenance_mut(0xDEAD_BEEF)] {
        assert_eq!(run(plan, &inputs, &outputs).0, FLASHCORE_INVALID_PLAN);
        assert!(flashcore_plan_describe(plan).is_null());
        let null = ptr::null_mut::<c_void>();
        // SAFETY: there is no such plan, so nothing is launched.
        let launched = unsafe { flashcore_plan_launch(plan, null, null, null, null, null, ptr::null_mut()) };
        assert_eq!(launched, FLASHCORE_INVALID_PLAN);
        assert_ne!(text(flashcore_last_error()), "");
    }
    assert_eq!(flashcore_plan_destroy(gone), FLASHCORE_INVALID_PLAN);
    assert_eq!(flashcore_plan_destroy(ptr::null_mut()), FLASHCORE_OK);
}

#[test]
fn null_and_misaligned_structs() {
    let good = problem(1, 1, 1, 8, FLASHCORE_DTYPE_F32);
    let mut plan = ptr::null_mut();
    let storage = [0_u64; 64];
    let misaligned: *const Problem = storage.as_ptr().cast::<u8>().wrapping_add(1).cast();
    let cases: [(*const Problem, *mut *mut PlanHandle, &str); 3] = [
        (ptr::null(), &raw mut plan, "problem is null; it must not be"),
        (&raw const good, ptr::null_mut(), "plan is null; it must not be"),
        (misaligned, &raw mut plan, "it must be a multiple of 8"),
    ];
    for (problem, plan, words) in cases {
        // SAFETY: the call checks for null and alignment before it reads or writes.
        let status = unsafe { flashcore_plan_create(problem, FLASHCORE_DEVICE_CPU, 0, plan) };
        assert_eq!(status, FLASHCORE_INVALID_ARGUMENT);
        assert!(text(flashcore_last_error()).ends_with(words), "{}", text(flashcore_last_error()));
    }
    // SAFETY: the call checks for null before it writes.
    let status = unsafe { flashcore_problem_init(ptr::null_mut(), 1, 1, 1, 1, FLASHCORE_DTYPE_F32) };
    assert_eq!(status, FLASHCORE_INVALID_ARGUMENT);
}

#[test]
fn wrong_fields_are_named() {
    let check = |change: fn(&mut Problem), status: Status, words: &str| {
        let mut problem = problem(1, 2, 4, 8, FLASHCORE_DTYPE_F32);
        change(&mut problem);
        assert_eq!(create(&problem), Err((status, words.to_owned())));
    };
    let invalid = FLASHCORE_INVALID_ARGUMENT;
    check(|problem| problem.dtype = 9, invalid, "problem.dtype is 9; it must be one of FLASHCORE_DTYPE_*");
    check(|problem| problem.mask = -1, invalid, "problem.mask is -1; it must be one of FLASHCORE_MASK_*");
    check(|problem| problem.alignment = 2, invalid, "problem.alignment is 2; it must be one of FLASHCORE_ALIGNMENT_*");
    check(|problem| problem.layout = 4, invalid, "problem.layout is 4; it must be one of FLASHCORE_LAYOUT_*");
    check(|problem| problem.alibi = 2, invalid, "problem.alibi is 2; it must be 0 or 1");
    check(|problem| problem.reserved = 1, invalid, "problem.reserved is 1; it must be 0");
    check(
        |problem| (problem.mask, problem.window_left) = (FLASHCORE_MASK_WINDOW, -2),
        invalid,
        "problem.window_left is -2; it must be 0 or more, or -1 for no limit",
    );
    check(
        |problem| (problem.key_heads, problem.scale) = (0, f64::NAN),
        invalid,
        "key_heads is 0; it must be at least 1; scale is NaN; it must be finite, usually 1 / sqrt(head_dim)",
    );
    check(
        |problem| problem.head_dim = 1 << 20,
        FLASHCORE_UNSUPPORTED,
        "head_dim is 1048576; the cpu backend takes at most 65536",
    );
}

#[test]
fn devices_and_configs() {
    let problem = problem(1, 2, 4, 8, FLASHCORE_DTYPE_F32);
    let check = |kind: i32, ordinal: i32, config: &CStr, expected: Status| {
        let mut plan = ptr::null_mut();
        let config = if config.is_empty() { ptr::null() } else { config.as_ptr() };
        // SAFETY: the pointers are to what they say.
        let status =
            unsafe { flashcore_plan_create_with_config(&raw const problem, kind, ordinal, config, &raw mut plan) };
        assert_eq!(status, expected, "{}", text(flashcore_last_error()));
        assert_eq!(flashcore_plan_destroy(plan), FLASHCORE_OK);
    };
    check(FLASHCORE_DEVICE_CPU, -7, c"", FLASHCORE_OK);
    check(7, 0, c"", FLASHCORE_INVALID_ARGUMENT);
    check(FLASHCORE_DEVICE_CUDA, -1, c"", FLASHCORE_INVALID_ARGUMENT);
    check(FLASHCORE_DEVICE_CUDA, i32::MAX, c"", FLASHCORE_NO_DEVICE);
    check(FLASHCORE_DEVICE_CPU, 0, c"ampere", FLASHCORE_UNSUPPORTED);
    check(FLASHCORE_DEVICE_CPU, 0, c"amper\xFF", FLASHCORE_INVALID_ARGUMENT);
    if api::Device::best_or_reason().no_gpu.is_some() {
        check(FLASHCORE_DEVICE_BEST, 0, c"", FLASHCORE_OK);
        check(FLASHCORE_DEVICE_CUDA, 0, c"ampere", FLASHCORE_NO_DEVICE);
    }
}

#[test]
fn wrong_host_tensors_are_named() {
    let plan = create(&problem(1, 1, 2, 1, FLASHCORE_DTYPE_F32)).unwrap();
    let (good, mut output) = ([0.0_f32; 2], [7.0_f32; 4]);
    let data = output.as_mut_ptr();
    let check = |change: &dyn Fn(&mut Inputs, &mut Outputs), words: &str| {
        let mut inputs = inputs(&good, &good, &good);
        let mut outputs = outputs(BytesMut { data: data.cast(), bytes: 8 }, NO_MUT_BYTES);
        change(&mut inputs, &mut outputs);
        let (status, said) = run(plan, &inputs, &outputs);
        assert_eq!(status, FLASHCORE_INVALID_ARGUMENT, "{said}");
        assert!(said.contains(words), "{said}");
    };
    check(&|inputs, _| inputs.query = NO_BYTES, "query has 0 elements; its shape and strides need 2");
    check(&|inputs, _| inputs.key.data = ptr::null(), "inputs.key is null and has 8 bytes");
    check(&|inputs, _| inputs.key.data = good.as_ptr().cast::<u8>().wrapping_add(2).cast(), "a multiple of 4");
    check(&|inputs, _| inputs.value.bytes = 7, "inputs.value has 7 bytes; its elements have 4 each");
    check(&|inputs, _| inputs.value.bytes = u64::MAX - 3, "it must end within the address space");
    check(&|inputs, _| inputs.sinks = bytes(&good), "sinks was given; the problem has it switched off");
    check(&|inputs, _| inputs.struct_size = 0, "inputs.struct_size is 0");
    check(&|_, outputs| outputs.struct_size = 0, "outputs.struct_size is 0");
    check(&|_, outputs| outputs.output.bytes = 4, "output has 1 elements; its shape and strides need 2");
    check(
        &|inputs, outputs| inputs.query = Bytes { data: outputs.output.data, bytes: 8 },
        "outputs.output overlaps inputs.query; what is written must be apart",
    );
    check(
        &|_, outputs| outputs.lse = BytesMut { data: outputs.output.data.wrapping_add(4), bytes: 8 },
        "outputs.output overlaps outputs.lse",
    );
    // SAFETY: null structs are looked at by the call.
    assert_eq!(unsafe { flashcore_plan_run_host(plan, ptr::null(), ptr::null()) }, FLASHCORE_INVALID_ARGUMENT);
    assert_eq!(flashcore_plan_destroy(plan), FLASHCORE_OK);
    // SAFETY: the memory of `output`.
    assert_eq!(unsafe { data.cast::<[f32; 4]>().read() }, [7.0; 4], "nothing was written");
}

#[test]
fn launches_need_a_gpu() {
    let plan = create(&problem(1, 1, 1, 8, FLASHCORE_DTYPE_F16)).unwrap();
    let null = ptr::null_mut::<c_void>();
    // SAFETY: a plan on the CPU launches nothing.
    let status = unsafe { flashcore_plan_launch(plan, null, null, null, null, null, ptr::null_mut()) };
    assert_eq!(status, FLASHCORE_UNSUPPORTED);
    assert_eq!(flashcore_plan_destroy(plan), FLASHCORE_OK);
}

#[test]
fn panics_stop_at_the_boundary() {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let status = guarded(|| panic!("for a {}", "test"));
    std::panic::set_hook(hook);
    assert_eq!(status, FLASHCORE_INTERNAL);
    assert_eq!(text(flashcore_last_error()), "a bug of flashcore, please report it: for a test");
}

#[test]
fn texts() {
    assert_eq!(text(flashcore_version()), env!("CARGO_PKG_VERSION"));
    assert!(text(flashcore_configs()).lines().any(|name| name == "ampere-64x64-2stage-swizzled"));
    assert_eq!(text(flashcore_status_name(FLASHCORE_OUT_OF_MEMORY)), "FLASHCORE_OUT_OF_MEMORY");
    assert_eq!(text(flashcore_status_name(-5)), "an unknown status");
}

const CALLS: u64 = 100_000;
/// Numbers of 8 bytes in each piece of memory.
const MEMORY: usize = 4096;

/// A problem of small sizes, or absurd ones.
fn random_problem(random: &mut SplitMix64) -> Problem {
    let size = |random: &mut SplitMix64| match random.below(60) {
        0 => [1 << 32, 1 << 48, u64::MAX / 2, u64::MAX][random.below(4)],
        _ => [0, 1, 1, 2, 2, 3, 4, 8][random.below(8)],
    };
    let mut problem = problem(size(random), size(random), size(random), size(random), random.below(4) as i32);
    if random.below(3) == 0 {
        (problem.key_heads, problem.key_length, problem.value_dim) = (size(random), size(random), size(random));
    }
    let choice = |random: &mut SplitMix64, usual: i32, choices: usize| match random.below(60) {
        0 => [-1, 9, i32::MIN, i32::MAX][random.below(4)],
        number if number < 20 => random.below(choices) as i32,
        _ => usual,
    };
    problem.dtype = choice(random, problem.dtype, 4);
    problem.mask = choice(random, 0, 3);
    problem.alignment = choice(random, 1, 2);
    problem.layout = choice(random, 0, 4);
    problem.alibi = choice(random, 0, 2);
    problem.sinks = choice(random, 0, 2);
    problem.bias = choice(random, 0, 2);
    problem.seqused_k = choice(random, 0, 2);
    problem.lse = choice(random, 0, 2);
    problem.scale = [1.0, 1.0, 1.0, 0.0, f64::NAN, f64::from(f32::MAX)][random.below(6)];
    problem.softcap = [0.0, 0.0, 0.0, 1.0, -1.0, f32::INFINITY][random.below(6)];
    problem.window_left = [-1, 0, 1, 3, i64::MIN, i64::MAX][random.below(6)];
    problem.window_right = [-1, 0, 1, 3, i64::MIN, i64::MAX][random.below(6)];
    for strides in [&mut problem.query_strides, &mut problem.key_strides, &mut problem.value_strides] {
        *strides = Strides { batch: size(random), head: size(random), row: size(random) };
    }
    problem.output_strides = Strides { batch: 64, head: 8, row: [8, 16, 0, u64::MAX][random.below(4)] };
    if random.below(3) == 0 {
        random_sequences(random, &mut problem);
    }
    if random.below(100) == 0 {
        problem.struct_size = size(random);
    }
    problem
}

/// Packed and paged sequences, with sizes that fit their switches, or do not.
fn random_sequences(random: &mut SplitMix64, problem: &mut Problem) {
    let size = |random: &mut SplitMix64| match random.below(40) {
        0 => [1 << 32, u64::MAX / 2, u64::MAX][random.below(3)],
        _ => [0, 1, 2, 3, 4, 8, 16][random.below(7)],
    };
    let on = |random: &mut SplitMix64, one_in: usize| match random.below(80) {
        0 => [-1, 2, i32::MAX][random.below(3)],
        _ => i32::from(random.below(one_in) == 0),
    };
    problem.cu_seqlens_q = on(random, 3);
    problem.cu_seqlens_k = on(random, 4);
    problem.seqused_q = on(random, 4);
    problem.leftpad_k = on(random, 4);
    problem.kv_batch_idx = on(random, 4);
    problem.page_table = on(random, 3);
    let sized = |random: &mut SplitMix64, switch: i32| {
        if switch == 1 || random.below(30) == 0 { size(random) } else { 0 }
    };
    problem.total_q = sized(random, problem.cu_seqlens_q);
    problem.total_k = sized(random, problem.cu_seqlens_k);
    problem.kv_batch = sized(random, problem.kv_batch_idx);
    problem.page_size = sized(random, problem.page_table);
    problem.num_pages = sized(random, problem.page_table);
    problem.table_width = sized(random, problem.page_table);
    problem.table_stride = sized(random, problem.page_table);
}

/// Memory that a struct points into: enough of it for every small problem, or a wrong piece.
fn random_bytes(random: &mut SplitMix64, memory: *const u64, wanted: bool) -> Bytes {
    let whole = Bytes { data: memory.cast(), bytes: MEMORY as u64 * 8 };
    match random.below(60) {
        0 => NO_BYTES,
        1 => Bytes { data: ptr::null(), ..whole },
        2 => Bytes { data: whole.data.wrapping_byte_add(1), bytes: 64 },
        3 => Bytes { bytes: [0, 3, 8, u64::MAX, u64::MAX / 2][random.below(5)].min(whole.bytes), ..whole },
        // A length beyond the address space is refused before anything is read.
        4 => Bytes { bytes: u64::MAX - 7, ..whole },
        _ if wanted => whole,
        _ => NO_BYTES,
    }
}

#[test]
fn random_arguments_are_answered() {
    // Ones in every type are small numbers, and 1 as `seqused_k`.
    let memory: Vec<Vec<u64>> = (0..7).map(|_| vec![0x0000_0001_0000_0001; MEMORY]).collect();
    // Numbers of 32 bits: 0, 1, 2 and so on as offsets, zeros as indices, and any bits.
    let counted: Vec<u64> = (0..MEMORY as u64).map(|index| ((2 * index + 1) << 32) | (2 * index)).collect();
    let zeros = vec![0_u64; MEMORY];
    let mut any = SplitMix64::new(1);
    let garbage: Vec<u64> = (0..MEMORY).map(|_| any.next_u64()).collect();
    let mut of_sequences = 0;
    let (mut output_memory, mut rows_memory) = (vec![0_u64; MEMORY], vec![0_u64; MEMORY]);
    let (mut computed, mut refused) = (0, 0);
    for seed in 0..CALLS {
        let mut random = SplitMix64::new(seed);
        let problem = random_problem(&mut random);
        let kind = if random.below(50) == 0 { random.below(5) as i32 - 1 } else { FLASHCORE_DEVICE_CPU };
        let config = [c"ampere", c"", c"scalar-0", c"\xC3\x28"][random.below(4)];
        let config = if random.below(50) == 0 { config.as_ptr() } else { ptr::null() };
        let mut plan = ptr::null_mut();
        let target = if random.below(200) == 0 { ptr::null_mut() } else { &raw mut plan };
        let source = if random.below(200) == 0 { ptr::null() } else { &raw const problem };
        // SAFETY: the pointers are null or to what they say.
        let status = unsafe { flashcore_plan_create_with_config(source, kind, 1, config, target) };
        assert!((FLASHCORE_OK..FLASHCORE_INTERNAL).contains(&status), "{seed}: {}", text(flashcore_last_error()));
        assert_eq!(status == FLASHCORE_OK, !plan.is_null(), "{seed}");
        let sizes = [problem.batch, problem.query_heads, problem.query_length, problem.key_length];
        let pages = [problem.page_size, problem.num_pages, problem.table_width, problem.table_stride];
        let rows = [problem.total_q, problem.total_k, problem.kv_batch];
        let is_small = sizes.iter().all(|&size| size <= 8) && pages.iter().chain(&rows).all(|&size| size <= 16);
        if status != FLASHCORE_OK || !is_small {
            refused += 1;
            assert_eq!(text(flashcore_last_error()).is_empty(), status == FLASHCORE_OK, "{seed}");
            flashcore_plan_destroy(plan);
            continue;
        }
        let rows = match problem.cu_seqlens_q {
            1 => problem.query_heads * problem.total_q,
            _ => problem.batch * problem.query_heads * problem.query_length,
        };
        let exact = |count: u64, wanted: i32, data: *const u64| match wanted {
            0 => NO_BYTES,
            _ => Bytes { data: data.cast(), bytes: 4 * count },
        };
        let stride = if problem.table_stride == 0 { problem.table_width } else { problem.table_stride };
        let cache_batches = if problem.kv_batch_idx == 1 { problem.kv_batch } else { problem.batch };
        let entries = cache_batches.saturating_sub(1) * stride + problem.table_width;
        let offsets = [counted.as_ptr(), garbage.as_ptr(), memory[6].as_ptr()][[0, 0, 0, 1, 2][random.below(5)]];
        let small = [zeros.as_ptr(), zeros.as_ptr(), memory[6].as_ptr(), garbage.as_ptr()][random.below(4)];
        let mut piece = |index: usize| random_bytes(&mut random, memory[index].as_ptr(), true);
        let inputs = Inputs {
            query: piece(0),
            key: piece(1),
            value: piece(2),
            alibi_slopes: exact(problem.query_heads, problem.alibi, memory[3].as_ptr()),
            sinks: exact(problem.query_heads, problem.sinks, memory[4].as_ptr()),
            bias: random_bytes(&mut random, memory[5].as_ptr(), problem.bias == 1),
            bias_strides: BiasStrides { batch: 64, head: 0, row: [0, 8, u64::MAX][random.below(3)], key: 1 },
            seqused_k: exact(problem.batch, problem.seqused_k, memory[6].as_ptr()),
            cu_seqlens_q: exact(problem.batch + 1, problem.cu_seqlens_q, offsets),
            cu_seqlens_k: exact(problem.batch + 1, problem.cu_seqlens_k, offsets),
            seqused_q: exact(problem.batch, problem.seqused_q, memory[6].as_ptr()),
            leftpad_k: exact(problem.batch, problem.leftpad_k, small),
            kv_batch_idx: exact(problem.batch, problem.kv_batch_idx, small),
            page_table: exact(entries, problem.page_table, small),
            ..zeroed()
        };
        let lse = exact(rows, problem.lse, rows_memory.as_mut_ptr());
        let output = random_bytes(&mut random, output_memory.as_mut_ptr(), true);
        let outputs = Outputs {
            output: BytesMut { data: output.data.cast_mut(), bytes: output.bytes },
            lse: BytesMut { data: lse.data.cast_mut(), bytes: lse.bytes },
            ..zeroed()
        };
        let (status, said) = run(plan, &inputs, &outputs);
        assert!((FLASHCORE_OK..FLASHCORE_INTERNAL).contains(&status), "{seed}: {said}");
        assert_eq!(status == FLASHCORE_OK, said.is_empty(), "{seed}");
        if status == FLASHCORE_OK {
            computed += 1;
            of_sequences += usize::from(problem.cu_seqlens_q + problem.page_table + problem.cu_seqlens_k > 0);
        } else {
            refused += 1;
        }
        assert_eq!(flashcore_plan_destroy(plan), FLASHCORE_OK, "{seed}");
    }
    assert!(computed > 5_000 && refused > 10_000 && of_sequences > 300, "{computed} {refused} {of_sequences}");
}
