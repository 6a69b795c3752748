//! Packed and paged sequences: what the problem says of them, and errors of their offsets, lengths and tables.

use crate::abi::header::{Header, Struct, Tensors};
use crate::abi::library::Library;
use crate::fuzz::element::Element;
use crate::operations::{Made, refuse};

/// Three sequences of up to 4 rows and 8 keys.
fn sequences(fields: &[(&str, i128)]) -> Struct {
    let mut problem = Library::get().problem(3, 2, 4, 8, Element::F32.code());
    problem.set("key_length", 8);
    for (field, value) in fields {
        problem.set(field, *value);
    }
    problem
}

const PACKED_QUERIES: &[(&str, i128)] = &[("cu_seqlens_q", 1), ("total_q", 10)];
const PACKED_KEYS: &[(&str, i128)] = &[("cu_seqlens_k", 1), ("total_k", 20)];
const PAGED: &[(&str, i128)] = &[("page_table", 1), ("page_size", 3), ("num_pages", 7), ("table_width", 4)];

/// Nothing of a problem is ignored: a size whose switch is off is refused, and so is a problem that cannot be.
#[test]
fn sizes_and_switches_belong_together() {
    let check = |fields: &[&[(&str, i128)]], words: &str| assert_eq!(refuse(&sequences(&fields.concat())), words);
    check(
        &[&[("total_q", 10)]],
        "problem.total_q is 10 and problem.cu_seqlens_q is 0; set cu_seqlens_q to 1, or total_q to 0",
    );
    check(
        &[&[("table_stride", 7)]],
        "problem.table_stride is 7 and problem.page_table is 0; set page_table to 1, or table_stride to 0",
    );
    check(&[&[("lse_base", 2)]], "problem.lse_base is 2; it must be one of FLASHCORE_LSE_*");
    check(
        &[PAGED, &[("page_size", 0)]],
        "page_size is 0; it must be at least 1; a row of the page table has 4 pages of 0 rows; key_length is 8, which needs \
         8 pages",
    );
    check(
        &[PAGED, PACKED_KEYS],
        "total_k (cu_seqlens_k) and paged are both given; keys are packed, or they lie in a cache",
    );
    check(&[PAGED, &[("table_stride", 3)]], "table_stride is 3; it must be at least table_width, which is 4");
}

/// Runs a problem of three sequences on zeros, with the vectors that `change` adds, and expects that it is refused.
fn check_refused(problem: &[(&str, i128)], change: impl FnOnce(Tensors) -> Tensors, words: &str) {
    // As many as any of the problems here has.
    let (zeros, mut output) = (vec![0.0_f32; 512], vec![7.0_f32; 192]);
    let tensors = Tensors::default()
        .with("query", &zeros[..192], &[])
        .with("key", &zeros, &[])
        .with("value", &zeros, &[])
        .with_mut("output", &mut output, &[]);
    assert_eq!(Made::new(&sequences(problem)).refuse(&change(tensors)), words);
    assert!(output.iter().all(|&element| element == 7.0), "nothing was written");
}

#[test]
fn offsets_that_are_none() {
    let check = |offsets: &[u32], words: &str| {
        check_refused(PACKED_QUERIES, |tensors| tensors.with("cu_seqlens_q", offsets, &[]), words);
    };
    check(&[0, 4, 8], "cu_seqlens_q has 3 entries; the problem needs 4");
    check(&[1, 4, 8, 10], "cu_seqlens_q begins with 1; it must begin with 0");
    check(&[0, 4, 3, 3], "cu_seqlens_q falls from 4 to 3 at sequence 1; each sequence must begin where the last ended");
    check(&[0, 4, 9, 10], "cu_seqlens_q of sequence 1 is 5; it may be at most 4, query_length");
    check(&[0, 4, 8, 11], "cu_seqlens_q of sequence 2 is 11; it may be at most 10, the rows of all sequences");
    check_refused(PACKED_QUERIES, |tensors| tensors, "cu_seqlens_q is missing; the problem has it switched on");
    let keys: &[u32] = &[0, 8, 8, 21];
    check_refused(
        PACKED_KEYS,
        |tensors| tensors.with("cu_seqlens_k", keys, &[]),
        "cu_seqlens_k of sequence 2 is 13; it may be at most 8, key_length",
    );
    check_refused(
        &[],
        |tensors| tensors.with("cu_seqlens_k", keys, &[]),
        "cu_seqlens_k was given; the problem has it switched off",
    );
}

#[test]
fn lengths_beyond_their_bounds() {
    let check = |fields: &[(&str, i128)], operand: &str, values: [u32; 3], words: &str| {
        check_refused(fields, |tensors| tensors.with(operand, &values, &[]), words);
    };
    check(
        &[("seqused_q", 1)],
        "seqused_q",
        [4, 5, 0],
        "seqused_q of sequence 1 is 5; it may be at most 4, the bound of the problem",
    );
    check(
        &[("leftpad_k", 1)],
        "leftpad_k",
        [8, 0, 9],
        "leftpad_k of sequence 2 is 9; it may be at most 8, the keys of the sequence",
    );
    check(
        &[("kv_batch_idx", 1), ("kv_batch", 2)],
        "kv_batch_idx",
        [1, 2, 0],
        "kv_batch_idx of sequence 1 is 2; it may be at most 1, the last batch of the cache",
    );
}

/// The second sequence has 4 keys, so the third and fourth entry of its row may hold anything.
#[test]
fn pages_that_the_cache_does_not_have() {
    let check = |table: &[i32], words: &str| {
        let change = |tensors: Tensors| tensors.with("page_table", table, &[]).with("seqused_k", &[8_u32, 4, 0], &[]);
        check_refused(&[PAGED, &[("seqused_k", 1)]].concat(), change, words);
    };
    let (any, low) = (i32::MAX, i32::MIN);
    check(&[0, 1, 2], "page_table has 3 entries; the problem needs 12");
    check(
        &[0, 1, 7, any, 5, 6, any, low, -1, -1, any, low],
        "entry 2 of the page table of sequence 0 is 7; the cache has 7 pages",
    );
    check(
        &[0, 1, 6, any, 5, -1, any, low, -1, -1, any, low],
        "entry 1 of the page table of sequence 1 is -1; the cache has 7 pages",
    );
}

/// Queries of zeros: each output is the mean of the values of its sequence, wherever they lie.
#[test]
fn sequences_are_computed() {
    const COLUMNS: usize = 8;
    let lengths = [8_u32, 4, 1];
    // Row `key` of sequence `sequence` holds 10 * sequence + key; everything else poison.
    let check = |fields: &[(&str, i128)],
                 rows: usize,
                 place: &dyn Fn(usize, usize) -> usize,
                 more: &dyn Fn(Tensors) -> Tensors| {
        let mut problem = sequences(fields);
        problem.set("query_heads", 1).set("key_heads", 1).set("query_length", 1);
        problem.set("layout", Header::get().constant("LAYOUT_BSHD").into());
        let (query, mut key, mut value) =
            ([0.0_f32; 3 * COLUMNS], vec![f32::NAN; rows * COLUMNS], vec![f32::NAN; rows * COLUMNS]);
        for (sequence, &length) in lengths.iter().enumerate() {
            for row in 0..length as usize {
                let start = place(sequence, row) * COLUMNS;
                key[start..][..COLUMNS].fill(1.0);
                value[start..][..COLUMNS].fill((10 * sequence + row) as f32);
            }
        }
        let mut output = [0.0_f32; 3 * COLUMNS];
        let tensors = Tensors::default().with("query", &query, &[]).with("key", &key, &[]).with("value", &value, &[]);
        Made::new(&problem).run(&more(tensors.with_mut("output", &mut output, &[]))).unwrap();
        for (sequence, &length) in lengths.iter().enumerate() {
            let expected = 10.0 * sequence as f32 + (length - 1) as f32 / 2.0;
            assert!(
                output[sequence * COLUMNS..][..COLUMNS].iter().all(|found| (found - expected).abs() < 1e-5),
                "{output:?}"
            );
        }
    };
    check(&[("cu_seqlens_k", 1), ("total_k", 13)], 13, &|sequence, row| [0, 8, 12][sequence] + row, &|tensors| {
        tensors.with("cu_seqlens_k", &[0_u32, 8, 12, 13], &[])
    });
    let batches = [3_u32, 0, 1];
    check(
        &[("seqused_k", 1), ("kv_batch_idx", 1), ("kv_batch", 4)],
        32,
        &|sequence, row| batches[sequence] as usize * 8 + row,
        &|tensors| tensors.with("seqused_k", &lengths, &[]).with("kv_batch_idx", &batches, &[]),
    );
    let table = [6, 0, 3, 99, 2, 1, 99, 99, 5, 99, 99, 99];
    check(
        &[PAGED, &[("seqused_k", 1)]].concat(),
        21,
        &|sequence, row| table[sequence * 4 + row / 3] as usize * 3 + row % 3,
        &|tensors| tensors.with("seqused_k", &lengths, &[]).with("page_table", &table, &[]),
    );
}

/// Weights 1 and 1 of the keys and 2 of the sink, in base 2 and without the sink.
#[test]
fn the_lse_has_the_form_of_the_problem() {
    for (base, without_sink, expected) in [
        ("LSE_NATURAL", 0, 4.0_f32.ln()),
        ("LSE_BASE_2", 0, 2.0),
        ("LSE_NATURAL", 1, std::f32::consts::LN_2),
        ("LSE_BASE_2", 1, 1.0),
    ] {
        let mut problem = Library::get().problem(1, 1, 1, 1, Element::F32.code());
        problem.set("key_length", 2).set("sinks", 1).set("lse", 1).set("lse_without_sink", without_sink);
        problem.set("lse_base", Header::get().constant(base).into());
        let (mut output, mut lse) = ([0.0_f32], [0.0_f32]);
        let tensors = Tensors::default()
            .with("query", &[0.0_f32], &[])
            .with("key", &[0.0_f32; 2], &[])
            .with("value", &[1.0_f32, 2.0], &[])
            .with("sinks", &[std::f32::consts::LN_2], &[])
            .with_mut("output", &mut output, &[])
            .with_mut("lse", &mut lse, &[]);
        Made::new(&problem).run(&tensors).unwrap();
        assert_eq!(output, [0.75]);
        assert!((lse[0] - expected).abs() < 1e-6, "{lse:?}, and {expected} was expected");
    }
}
