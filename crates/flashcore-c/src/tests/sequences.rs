//! Packed and paged sequences: what the problem says of them, and errors of their offsets, lengths and tables.

use super::*;

/// Three sequences of up to 4 rows and 8 keys.
fn sequences(change: impl FnOnce(&mut Problem)) -> Problem {
    let mut problem = problem(3, 2, 4, 8, FLASHCORE_DTYPE_F32);
    problem.key_length = 8;
    change(&mut problem);
    problem
}

fn packed_queries(problem: &mut Problem) {
    (problem.cu_seqlens_q, problem.total_q) = (1, 10);
}

fn packed_keys(problem: &mut Problem) {
    (problem.cu_seqlens_k, problem.total_k) = (1, 20);
}

fn paged(problem: &mut Problem) {
    problem.page_table = 1;
    (problem.page_size, problem.num_pages, problem.table_width) = (3, 7, 4);
}

#[test]
fn every_field_reaches_the_problem() {
    let api = |change: fn(&mut Problem)| to_api(&sequences(change));
    let none = api(|_| {});
    assert!(!none.is_ragged());
    assert_eq!(api(packed_queries), none.clone().with_total_q(Some(10)));
    assert_eq!(api(packed_keys), none.clone().with_total_k(Some(20)));
    assert_eq!(api(|problem| problem.seqused_q = 1), none.clone().with_seqused_q(true));
    assert_eq!(api(|problem| problem.leftpad_k = 1), none.clone().with_leftpad_k(true));
    assert_eq!(api(|problem| (problem.kv_batch_idx, problem.kv_batch) = (1, 5)), none.clone().with_kv_batch(Some(5)));
    assert_eq!(api(paged), none.clone().with_paged(Some(api::PagedKv::new(3, 7, 4))));
    let sliced = |problem: &mut Problem| {
        paged(problem);
        problem.table_stride = 9;
    };
    let expected = api::PagedKv { table_stride: 9, ..api::PagedKv::new(3, 7, 4) };
    assert_eq!(api(sliced), none.with_paged(Some(expected)));
}

/// Nothing of a problem is ignored: a size whose switch is off is refused, and so is a problem that cannot be.
#[test]
fn sizes_and_switches_belong_together() {
    let check = |change: fn(&mut Problem), words: &str| {
        assert_eq!(create(&sequences(change)), Err((FLASHCORE_INVALID_ARGUMENT, words.to_owned())));
    };
    check(
        |problem| problem.total_q = 10,
        "problem.total_q is 10 and problem.cu_seqlens_q is 0; set cu_seqlens_q to 1, or total_q to 0",
    );
    check(
        |problem| problem.total_k = 10,
        "problem.total_k is 10 and problem.cu_seqlens_k is 0; set cu_seqlens_k to 1, or total_k to 0",
    );
    check(
        |problem| problem.kv_batch = 2,
        "problem.kv_batch is 2 and problem.kv_batch_idx is 0; set kv_batch_idx to 1, or kv_batch to 0",
    );
    check(
        |problem| problem.num_pages = 7,
        "problem.num_pages is 7 and problem.page_table is 0; set page_table to 1, or num_pages to 0",
    );
    check(
        |problem| problem.table_stride = 7,
        "problem.table_stride is 7 and problem.page_table is 0; set page_table to 1, or table_stride to 0",
    );
    check(|problem| problem.lse_base = 2, "problem.lse_base is 2; it must be one of FLASHCORE_LSE_*");
    check(|problem| problem.lse_without_sink = 7, "problem.lse_without_sink is 7; it must be 0 or 1");
    check(|problem| problem.cu_seqlens_q = 2, "problem.cu_seqlens_q is 2; it must be 0 or 1");
    check(|problem| problem.page_table = -1, "problem.page_table is -1; it must be 0 or 1");
    check(
        |problem| {
            paged(problem);
            problem.page_size = 0;
        },
        "page_size is 0; it must be at least 1; a row of the page table has 4 pages of 0 rows; key_length is 8, which needs \
         8 pages",
    );
    check(
        |problem| {
            paged(problem);
            packed_keys(problem);
        },
        "total_k (cu_seqlens_k) and paged are both given; keys are packed, or they lie in a cache",
    );
    check(
        |problem| {
            paged(problem);
            problem.table_stride = 3;
        },
        "table_stride is 3; it must be at least table_width, which is 4",
    );
}

/// Runs a problem of three sequences on zeros, with the vectors that `change` sets, and expects that it is refused.
fn check_refused(problem: fn(&mut Problem), change: &dyn Fn(&mut Inputs), words: &str) {
    let problem = sequences(problem);
    let plan = create(&problem).unwrap();
    let shape = to_api(&problem);
    let elements = |shape: api::Shape| shape.elements().unwrap();
    let (query, key) = (vec![0.0_f32; elements(shape.query_shape())], vec![0.0_f32; elements(shape.key_shape())]);
    let mut output = vec![7.0_f32; query.len()];
    let mut inputs = inputs(&query, &key, &key);
    change(&mut inputs);
    let outputs = outputs(mut_bytes(&mut output), NO_MUT_BYTES);
    assert_eq!(run(plan, &inputs, &outputs), (FLASHCORE_INVALID_ARGUMENT, words.to_owned()));
    assert_eq!(flashcore_plan_destroy(plan), FLASHCORE_OK);
    assert!(output.iter().all(|&element| element == 7.0), "nothing was written");
}

#[test]
fn offsets_that_are_none() {
    let check = |offsets: &[u32], words: &str| {
        check_refused(packed_queries, &|inputs| inputs.cu_seqlens_q = bytes(offsets), words);
    };
    check(&[], "cu_seqlens_q has 0 entries; the problem needs 4");
    check(&[0, 4, 8], "cu_seqlens_q has 3 entries; the problem needs 4");
    check(&[1, 4, 8, 10], "cu_seqlens_q begins with 1; it must begin with 0");
    check(&[0, 4, 3, 3], "cu_seqlens_q falls from 4 to 3 at sequence 1; each sequence must begin where the last ended");
    check(&[0, 4, 9, 10], "cu_seqlens_q of sequence 1 is 5; it may be at most 4, query_length");
    check(&[0, 4, 8, 11], "cu_seqlens_q of sequence 2 is 11; it may be at most 10, the rows of all sequences");
    check_refused(packed_queries, &|_| {}, "cu_seqlens_q is missing; the problem has it switched on");
    let keys: &[u32] = &[0, 8, 8, 21];
    check_refused(
        packed_keys,
        &|inputs| inputs.cu_seqlens_k = bytes(keys),
        "cu_seqlens_k of sequence 2 is 13; it may be at most 8, key_length",
    );
    check_refused(
        |_| {},
        &|inputs| inputs.cu_seqlens_k = bytes(keys),
        "cu_seqlens_k was given; the problem has it switched off",
    );
}

#[test]
fn lengths_beyond_their_bounds() {
    let lengths = |lengths: [u32; 3]| lengths;
    let given = lengths([4, 5, 0]);
    check_refused(
        |problem| problem.seqused_q = 1,
        &|inputs| inputs.seqused_q = bytes(&given),
        "seqused_q of sequence 1 is 5; it may be at most 4, the bound of the problem",
    );
    let given = lengths([8, 0, 9]);
    check_refused(
        |problem| problem.leftpad_k = 1,
        &|inputs| inputs.leftpad_k = bytes(&given),
        "leftpad_k of sequence 2 is 9; it may be at most 8, the keys of the sequence",
    );
    let given = lengths([1, 2, 0]);
    check_refused(
        |problem| (problem.kv_batch_idx, problem.kv_batch) = (1, 2),
        &|inputs| inputs.kv_batch_idx = bytes(&given),
        "kv_batch_idx of sequence 1 is 2; it may be at most 1, the last batch of the cache",
    );
}

/// The second sequence has 4 keys, so the third and fourth entry of its row may hold anything.
#[test]
fn pages_that_the_cache_does_not_have() {
    let check = |table: &[i32], words: &str| {
        let lengths = [8_u32, 4, 0];
        let problem = |problem: &mut Problem| {
            paged(problem);
            problem.seqused_k = 1;
        };
        let set = |inputs: &mut Inputs| (inputs.page_table, inputs.seqused_k) = (bytes(table), bytes(&lengths));
        check_refused(problem, &set, words);
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

/// Runs a problem on the CPU on random inputs, with poison in rows, pages and entries that no sequence uses, and judges it.
fn check_right(change: fn(&mut Problem)) {
    let problem = sequences(|problem| {
        problem.query_heads = 4;
        problem.lse = 1;
        (problem.mask, problem.query_length, problem.key_length) = (FLASHCORE_MASK_CAUSAL, 40, 150);
        change(problem);
    });
    let plan = create(&problem).unwrap();
    let shape = to_api(&problem);
    for seed in 0..3 {
        let random = api::verify::Inputs::random(&shape, seed);
        let views = random.views();
        let of = |values: Option<&[u32]>| values.map_or(NO_BYTES, bytes);
        let inputs = Inputs {
            seqused_k: of(views.seqused_k),
            cu_seqlens_q: of(views.cu_seqlens_q),
            cu_seqlens_k: of(views.cu_seqlens_k),
            seqused_q: of(views.seqused_q),
            leftpad_k: of(views.leftpad_k),
            kv_batch_idx: of(views.kv_batch_idx),
            page_table: views.page_table.map_or(NO_BYTES, bytes),
            ..inputs(views.query.data, views.key.data, views.value.data)
        };
        let mut results = api::verify::Outputs::poisoned(&shape);
        let lse = results.lse.as_mut().map_or(NO_MUT_BYTES, |lse| mut_bytes(lse));
        let outputs = outputs(mut_bytes(&mut results.output.data), lse);
        assert_eq!(run(plan, &inputs, &outputs), (FLASHCORE_OK, String::new()), "{shape}");
        let expected = api::verify::oracle(&shape, &random).unwrap();
        let yardstick = api::verify::ReferenceError::measure(&shape, &random, &expected).unwrap();
        let evidence = api::verify::Evidence::new(&random, &results);
        let verdict = api::verify::judge(&shape, &expected, &yardstick, &evidence);
        assert!(verdict.passed(), "{shape}: {:?}", verdict.failures);
    }
    assert_eq!(flashcore_plan_destroy(plan), FLASHCORE_OK);
}

#[test]
fn sequences_are_computed() {
    check_right(|problem| {
        (problem.cu_seqlens_q, problem.total_q, problem.cu_seqlens_k, problem.total_k) = (1, 100, 1, 300);
        problem.layout = FLASHCORE_LAYOUT_BSHD;
    });
    check_right(|problem| {
        (problem.seqused_q, problem.seqused_k, problem.leftpad_k) = (1, 1, 1);
        (problem.kv_batch_idx, problem.kv_batch) = (1, 5);
    });
    check_right(|problem| {
        (problem.cu_seqlens_q, problem.total_q, problem.seqused_k, problem.page_table) = (1, 90, 1, 1);
        (problem.page_size, problem.num_pages, problem.table_width, problem.table_stride) = (16, 33, 10, 13);
    });
    check_right(|problem| {
        (problem.query_length, problem.seqused_k, problem.page_table) = (1, 1, 1);
        (problem.page_size, problem.num_pages, problem.table_width) = (1, 450, 150);
        (problem.kv_batch_idx, problem.kv_batch) = (1, 4);
    });
}

/// Weights 1 and 1 of the keys and 2 of the sink, in base 2 and without the sink.
#[test]
fn the_lse_has_the_form_of_the_problem() {
    let sinks = [std::f32::consts::LN_2];
    for (base, without_sink, expected) in [
        (FLASHCORE_LSE_NATURAL, 0, 4.0_f32.ln()),
        (FLASHCORE_LSE_BASE_2, 0, 2.0),
        (FLASHCORE_LSE_NATURAL, 1, std::f32::consts::LN_2),
        (FLASHCORE_LSE_BASE_2, 1, 1.0),
    ] {
        let problem = sequences(|problem| {
            (problem.batch, problem.query_heads, problem.key_heads) = (1, 1, 1);
            (problem.query_length, problem.key_length, problem.head_dim, problem.value_dim) = (1, 2, 1, 1);
            (problem.sinks, problem.lse) = (1, 1);
        });
        let problem = Problem { lse_base: base, lse_without_sink: without_sink, ..problem };
        let plan = create(&problem).unwrap();
        let (mut output, mut lse) = ([0.0_f32], [0.0_f32]);
        let inputs = Inputs { sinks: bytes(&sinks), ..inputs(&[0.0_f32], &[0.0, 0.0], &[1.0, 2.0]) };
        let outputs = outputs(mut_bytes(&mut output), mut_bytes(&mut lse));
        assert_eq!(run(plan, &inputs, &outputs), (FLASHCORE_OK, String::new()));
        assert_eq!(output, [0.75]);
        assert!((lse[0] - expected).abs() < 1e-6, "{lse:?}, and {expected} was expected");
        assert_eq!(flashcore_plan_destroy(plan), FLASHCORE_OK);
    }
}
