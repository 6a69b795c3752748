//! Every operation from beginning to end, against values worked out by hand and errors by text.

use crate::abi::header::{Header, Struct, Tensors};
use crate::abi::library::{Library, Plan};
use crate::abi::random::normal_at;
use crate::fuzz::element::Element;

/// Codes of e4m3: 1, 2, 0.5, 4.
const CODES: [u8; 4] = [0x38, 0x40, 0x30, 0x48];

fn constant(name: &str) -> i128 {
    Header::get().constant(name).into()
}

/// A plan on the CPU, destroyed at the end.
pub(crate) struct Made(Plan);

impl Made {
    pub(crate) fn new(problem: &Struct) -> Self {
        Self(Library::get().create(problem).unwrap())
    }

    pub(crate) fn run(&self, tensors: &Tensors) -> Result<(), (i32, String)> {
        // SAFETY: the tensors of these tests are arrays that live longer, or are refused.
        unsafe { Library::get().try_run(self.0, tensors) }
    }

    /// The words of a run that is refused as wrong.
    pub(crate) fn refuse(&self, tensors: &Tensors) -> String {
        let (status, words) = self.run(tensors).expect_err("refused");
        assert_eq!(status, Header::get().constant("INVALID_ARGUMENT"), "{words}");
        words
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        Library::get().destroy(self.0);
    }
}

/// The words of a problem that is refused as wrong.
pub(crate) fn refuse(problem: &Struct) -> String {
    let (status, words) = Library::get().create(problem).expect_err("refused");
    assert_eq!(status, Header::get().constant("INVALID_ARGUMENT"), "{words}");
    words
}

fn attention(batch: u64, heads: u64, length: u64, dim: u64) -> Struct {
    Library::get().problem(batch, heads, length, dim, Element::F32.code())
}

fn kv_cache(attention: &Struct, new_length: u64) -> Struct {
    let library = Library::get();
    // SAFETY: both structs are as large as the header says.
    library.filled("kvcache", |problem| unsafe {
        (library.kvcache_problem_init)(problem, attention.address(), new_length)
    })
}

/// Tokens of one head of two columns, two pages of two rows.
fn append(tokens: u64, query_heads: u64, num_pages: u64) -> Struct {
    let (library, dtype) = (Library::get(), Element::F32.code());
    // SAFETY: the struct is as large as the header says.
    library.filled("append", |problem| unsafe {
        (library.append_problem_init)(problem, tokens, query_heads, 1, 2, num_pages, 2, dtype)
    })
}

fn merge(parts: u64, tokens: u64) -> Struct {
    let (library, dtype) = (Library::get(), Element::F32.code());
    // SAFETY: the struct is as large as the header says.
    library.filled("merge", |problem| unsafe { (library.merge_problem_init)(problem, parts, tokens, 1, 2, dtype) })
}

/// A rotary embedding of two columns and two positions.
fn rotate(problem: &mut Struct, style: &str) {
    problem.set("rotary.style", constant(style));
    problem.set("rotary.dim", 2).set("rotary.max_position", 2).set("rotary.table_stride", 1);
}

#[test]
fn attention_from_beginning_to_end() {
    let mut problem = attention(1, 1, 2, 1);
    problem.set("mask", constant("MASK_CAUSAL")).set("lse", 1);
    let plan = Made::new(&problem);
    // SAFETY: a plan.
    let described = crate::abi::library::text(unsafe { (Library::get().plan_describe)(plan.0) });
    assert!(
        described.starts_with("batch 1 heads 1/1 queries 2 keys 2 dims 1/1 f32 causal bottom-right"),
        "{described}"
    );
    let (zeros, values, mut output, mut lse) = ([0.0_f32; 2], [1.0_f32, 2.0], [f32::NAN; 2], [f32::NAN; 2]);
    let tensors = Tensors::default().with("query", &zeros, &[]).with("key", &zeros, &[]).with("value", &values, &[]);
    plan.run(&tensors.with_mut("output", &mut output, &[]).with_mut("lse", &mut lse, &[])).unwrap();
    assert_eq!((output, lse), ([1.0, 1.5], [0.0, std::f32::consts::LN_2]));
}

/// One key at a time, of equal scores: the output is the mean of the values so far.
#[test]
fn attention_continues_from_beginning_to_end() {
    let mut problem = attention(1, 1, 1, 2);
    problem.set("base.operation", constant("OPERATION_CONTINUE"));
    assert_eq!(refuse(&problem), "lse is false; it must be true to continue from an LSE");
    let plan = Made::new(problem.set("lse", 1));
    let (zeros, mut output, mut lse) = ([0.0_f32; 2], [0.0_f32; 2], [f32::NEG_INFINITY]);
    for value in [[1.0_f32, 2.0], [3.0, 6.0]] {
        let tensors = Tensors::default().with("query", &zeros, &[]).with("key", &zeros, &[]).with("value", &value, &[]);
        plan.run(&tensors.with_mut("output", &mut output, &[]).with_mut("lse", &mut lse, &[])).unwrap();
    }
    assert_eq!((output, lse), ([2.0, 4.0], [std::f32::consts::LN_2]));
}

/// Two sequences with room for three keys each. The second one appends at row 1, which turns by a right angle. Queries are
/// 0: outputs are means of values.
#[test]
fn a_growing_cache_from_beginning_to_end() {
    let mut attention = attention(2, 1, 1, 2);
    attention.set("key_length", 3).set("seqused_k", 1);
    let mut problem = kv_cache(&attention, 1);
    rotate(&mut problem, "ROTARY_GPTJ");
    let plan = Made::new(&problem);
    let (query, new_key, new_value) = ([0.0_f32; 4], [1.0_f32, 2.0, 3.0, 4.0], [10.0_f32, 20.0, 30.0, 40.0]);
    let (cos, sin) = ([1.0_f32, 0.0], [0.0_f32, 1.0]);
    let (mut keys, mut values, mut output) = ([9.0_f32; 12], [9.0_f32; 12], [0.0_f32; 4]);
    let mut tensors = Tensors::default()
        .with("query", &query, &[])
        .with("new_key", &new_key, &[])
        .with("new_value", &new_value, &[])
        .with("cos", &cos, &[])
        .with("sin", &sin, &[])
        .with_mut("key_cache", &mut keys, &[])
        .with_mut("value_cache", &mut values, &[])
        .with_mut("output", &mut output, &[]);
    let with_lengths = |tensors: &Tensors, lengths: &[u32; 2]| tensors.clone().with("seqused_k", lengths, &[]);
    plan.run(&with_lengths(&tensors, &[0, 1])).unwrap();
    let nine = 9.0;
    let written = (
        [1.0, 2.0, nine, nine, nine, nine, nine, nine, -4.0, 3.0, nine, nine],
        [10.0, 20.0, nine, nine, nine, nine, nine, nine, 30.0, 40.0, nine, nine],
        [10.0, 20.0, 19.5, 24.5],
    );
    assert_eq!((keys, values, output), written);
    // No room for a fourth key, no row of the tables for the position of the new one: nothing is written.
    assert_eq!(
        plan.refuse(&with_lengths(&tensors, &[0, 3])),
        "sequence 1 uses 3 rows of the cache and gets 1 more; key_length is 3: plan for longer sequences, or append less"
    );
    assert_eq!(
        plan.refuse(&with_lengths(&tensors, &[0, 2])),
        "sequence 1 is at position 2; cos and sin have 2 rows (max_position), for positions from 0 on: make them longer"
    );
    let inside = tensors.get("output").unwrap().get("data");
    tensors.get("value_cache").unwrap().set("data", inside);
    let words = plan.refuse(&with_lengths(&tensors, &[0, 1]));
    assert!(words.starts_with("tensors.value_cache overlaps tensors."), "{words}");
    assert_eq!((keys, values, output), written);
}

#[test]
fn problems_of_growing_caches_are_checked() {
    let check = |change: fn(&mut Struct), expected: &str| {
        let mut attention = attention(2, 1, 1, 2);
        attention.set("key_length", 3).set("seqused_k", 1);
        let mut problem = kv_cache(&attention, 1);
        rotate(&mut problem, "ROTARY_GPTJ");
        change(&mut problem);
        assert_eq!(refuse(&problem), expected);
    };
    check(
        |problem| {
            problem.set("rotary.style", 3);
        },
        "problem.rotary.style is 3; it must be one of FLASHCORE_ROTARY_*",
    );
    check(
        |problem| {
            problem.set("new_length", 0);
        },
        "new_length is 0; it must be at least 1",
    );
    check(
        |problem| {
            problem.set("attention.seqused_k", 0);
        },
        "seqused_k of the attention is false; it must be true: cache_seqlens are the lengths before the append",
    );
    for (field, name) in [("base.struct_size", "kvcache"), ("attention.base.struct_size", "attention")] {
        let mut problem = kv_cache(&attention(2, 1, 1, 2), 1);
        problem.set(field, 8);
        let known = Struct::zeroed(&format!("flashcore_{name}_problem_t")).bytes();
        let expected = format!(
            "problem.{field} is 8; it must be sizeof(flashcore_{name}_problem_t), which is {known}: fill the struct with \
             flashcore_{name}_problem_init, and compile with the header of this library"
        );
        assert_eq!(refuse(&problem), expected);
    }
}

/// Position 1 turns by a right angle; the second token is skipped, its query is not. The query is rotated in place.
#[test]
fn an_append_from_beginning_to_end() {
    let mut problem = append(3, 1, 2);
    rotate(&mut problem, "ROTARY_NEOX");
    let plan = Made::new(&problem);
    let (key, value) = ([1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0], [0.5_f32, 1.5, 2.5, 3.5, 4.5, 5.5]);
    let (cos, sin) = ([1.0_f32, 0.0], [0.0_f32, 1.0]);
    for is_query_given in [false, true] {
        let (mut keys, mut values, mut query) = ([9.0_f32; 8], [9.0_f32; 8], [1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let mut tensors = Tensors::default()
            .with("new_key", &key, &[])
            .with("new_value", &value, &[])
            .with("cos", &cos, &[])
            .with("sin", &sin, &[])
            .with_mut("key_cache", &mut keys, &[])
            .with_mut("value_cache", &mut values, &[])
            .with_mut("query_output", &mut query, &[]);
        if is_query_given {
            let mut same = tensors.get("query_output").unwrap().clone();
            same.set("operand", constant("QUERY"));
            tensors.entries.push(same);
        }
        let with = |positions: &[i64; 3], slots: &[i64; 3]| {
            tensors.clone().with("positions", positions, &[]).with("slot_mapping", slots, &[])
        };
        plan.run(&with(&[1, 0, 1], &[3, -1, 0])).unwrap();
        assert_eq!(keys, [-6.0, 5.0, 9.0, 9.0, 9.0, 9.0, -2.0, 1.0]);
        assert_eq!(values, [4.5, 5.5, 9.0, 9.0, 9.0, 9.0, 0.5, 1.5]);
        assert_eq!(query, [-2.0, 1.0, 3.0, 4.0, -6.0, 5.0]);
        // A position without a row of the tables, and a slot without a row of the cache: nothing is written.
        assert_eq!(
            plan.refuse(&with(&[1, 0, 2], &[3, -1, 0])),
            "token 2 is at position 2; cos and sin have 2 rows (max_position), for positions from 0 on: make them longer"
        );
        assert_eq!(
            plan.refuse(&with(&[1, 0, 1], &[3, -1, 4])),
            "the slot of token 2 is 4; the cache has 4 slots, and -1 skips a token"
        );
        assert_eq!(keys, [-6.0, 5.0, 9.0, 9.0, 9.0, 9.0, -2.0, 1.0]);
    }
}

/// The value cache among the rows of the key cache: in each page two rows of keys, then two of values.
#[test]
fn caches_in_one_memory() {
    let mut problem = append(3, 0, 2);
    problem.set("key_cache_strides.batch", 8).set("value_cache_strides.batch", 8);
    let plan = Made::new(&problem);
    let (key, value, slots) = ([1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0], [0.5_f32, 1.5, 2.5, 3.5, 4.5, 5.5], [3_i64, -1, 0]);
    let mut memory = [9.0_f32; 16];
    let tensors = Tensors::default()
        .with("new_key", &key, &[])
        .with("new_value", &value, &[])
        .with("slot_mapping", &slots, &[])
        .with_mut("key_cache", &mut memory, &[]);
    let with_values = |first: i128| {
        let mut tensors = tensors.clone();
        let mut values = tensors.get("key_cache").unwrap().clone();
        let data = values.get("data") + 4 * first;
        values.set("operand", constant("VALUE_CACHE")).set("data", data).set("bytes", 12 * 4);
        tensors.entries.push(values);
        tensors
    };
    plan.run(&with_values(4)).unwrap();
    let nine = 9.0;
    let expected = [5.0, 6.0, nine, nine, 4.5, 5.5, nine, nine, nine, nine, 1.0, 2.0, nine, nine, 0.5, 1.5];
    assert_eq!(memory, expected);
    // Values over the second column of the keys.
    let words = plan.refuse(&with_values(1));
    assert!(words.contains("overlap") || words.contains("cache"), "{words}");
    assert_eq!(memory, expected);
}

#[test]
fn problems_of_appends_are_checked() {
    let check = |field: &str, value: i128, expected: &str| {
        let mut problem = append(3, 1, 2);
        rotate(&mut problem, "ROTARY_NEOX");
        problem.set(field, value);
        assert_eq!(refuse(&problem), expected);
    };
    check("rotary.style", 3, "problem.rotary.style is 3; it must be one of FLASHCORE_ROTARY_*");
    check(
        "position_dtype",
        16,
        "problem.position_dtype is 16; it must be one of FLASHCORE_DTYPE_I32, FLASHCORE_DTYPE_I64",
    );
    check("dtype", constant("DTYPE_F64"), "dtype is f64; it must be f16, bf16 or f32");
    check("page_size", 0, "page_size is 0; it must be at least 1");
    check(
        "key_cache_strides.row",
        0,
        "the (page, head, row) strides of key_cache is (4, 2, 0); it must be so far apart that no rows overlap",
    );
}

/// Three parts of which one is empty and holds NaN; the second token has nothing but empty parts. Parts are a list, or one
/// memory with the distance between them.
#[test]
fn a_merge_from_beginning_to_end() {
    let plan = Made::new(&merge(3, 2));
    let nan = f32::NAN;
    let outputs = [[1.0_f32, 2.0, nan, nan], [nan; 4], [3.0, 6.0, nan, nan]];
    let lses = [[0.0_f32, f32::NEG_INFINITY], [f32::INFINITY, f32::INFINITY], [0.0, f32::NEG_INFINITY]];
    let listed = outputs.iter().zip(&lses).fold(Tensors::default(), |tensors, (output, lse)| {
        tensors.with("part_outputs", output, &[]).with("part_lses", lse, &[])
    });
    let stacked = Tensors::default().with("part_outputs", outputs.as_flattened(), &[4]).with(
        "part_lses",
        lses.as_flattened(),
        &[2],
    );
    for parts in [&listed, &stacked] {
        let (mut output, mut lse) = ([9.0_f32; 4], [9.0_f32; 2]);
        let written = parts.clone().with_mut("output", &mut output, &[]);
        plan.run(&written.clone().with_mut("lse", &mut lse, &[])).unwrap();
        assert_eq!(output, [2.0, 4.0, 0.0, 0.0]);
        assert_eq!(lse, [std::f32::consts::LN_2, f32::NEG_INFINITY]);
        assert_eq!(plan.refuse(&written), "lse is missing; the problem has it switched on");
        let over = written.clone().with_mut("lse", &mut output[1..3], &[]);
        let words = plan.refuse(&over);
        assert_eq!(words, "tensors.output overlaps tensors.lse; what is written must be apart");
        let fewer = Tensors { entries: written.entries[2..].to_vec() }.with_mut("lse", &mut lse, &[]);
        assert!(plan.refuse(&fewer).contains("part_"), "{}", plan.refuse(&fewer));
    }
}

/// Two heads of one row each; a query of zeros gives the values, multiplied by their scale.
#[test]
fn values_are_multiplied_by_the_scale_of_their_head() {
    let mut problem = attention(1, 2, 1, 2);
    problem.set("kv_dtype", constant("DTYPE_E4M3")).set("k_scale", 1).set("v_scale", 1);
    let plan = Made::new(&problem);
    let (query, mut output, scales) = ([0.0_f32; 4], [0.0_f32; 4], [0.5_f32, 4.0]);
    let tensors = Tensors::default().with("query", &query, &[]).with("key", &CODES, &[]).with("value", &CODES, &[]);
    let tensors = tensors.with_mut("output", &mut output, &[]);
    let with = |scales: &[f32; 2]| tensors.clone().with("v_scale", scales, &[0, 0, 0, 1]);
    plan.run(&with(&scales).with("k_scale", &scales, &[0, 0, 0, 1])).unwrap();
    assert_eq!(output, [0.5, 1.0, 2.0, 16.0]);
    let wrong = with(&[0.5, -4.0]).with("k_scale", &scales, &[0, 0, 0, 1]);
    assert_eq!(plan.refuse(&wrong), "v_scale[1] is -4; scales must be finite and above 0");
    assert_eq!(plan.refuse(&with(&scales)), "k_scale is missing; the problem has it switched on");
}

/// One token of one head of two columns into the second of two slots: given scales, then computed ones.
#[test]
fn an_append_quantizes() {
    let make = |compute_scales: i128| {
        let mut problem = append(1, 0, 1);
        problem.set("cache_dtype", constant("DTYPE_E4M3")).set("k_scale", 1).set("v_scale", 1);
        Made::new(problem.set("compute_scales", compute_scales))
    };
    let (key, value, slots) = ([1.0_f32, -2.0], [3.0_f32, 1000.0], [1_i64]);
    let (mut keys, mut values, mut k_scale, mut v_scale) = ([0xAA_u8; 4], [0xAA_u8; 4], [7.0_f32; 2], [7.0_f32; 2]);
    let tensors = Tensors::default()
        .with("new_key", &key, &[])
        .with("new_value", &value, &[])
        .with("slot_mapping", &slots, &[])
        .with_mut("key_cache", &mut keys, &[])
        .with_mut("value_cache", &mut values, &[]);
    make(0).run(&tensors.clone().with("k_scale", &[2.0_f32], &[]).with("v_scale", &[0.5_f32], &[])).unwrap();
    // 1000 / 0.5 saturates.
    assert_eq!((keys, values), ([0xAA, 0xAA, 0x30, 0xB8], [0xAA, 0xAA, 0x4C, 0x7E]));
    let strides = [0, 2, 1, 1];
    make(1)
        .run(&tensors.with_mut("k_scale", &mut k_scale, &strides).with_mut("v_scale", &mut v_scale, &strides))
        .unwrap();
    assert_eq!((keys, values), ([0xAA, 0xAA, 0x76, 0xFE], [0xAA, 0xAA, 0x3B, 0x7E]));
    assert_eq!((k_scale, v_scale), ([7.0, 2.0 / 448.0], [7.0, 1000.0 / 448.0]));
}

/// One sequence with one key in an FP8 cache gets another; a query of zeros gives the mean of both values.
#[test]
fn a_growing_fp8_cache() {
    for compute_scales in [0, 1] {
        let mut attention = attention(1, 1, 1, 2);
        attention.set("key_length", 2).set("seqused_k", 1);
        attention.set("kv_dtype", constant("DTYPE_E4M3")).set("k_scale", 1).set("v_scale", 1);
        let plan = Made::new(kv_cache(&attention, 1).set("compute_scales", compute_scales));
        let (query, new_key, new_value, lengths) = ([0.0_f32; 2], [1.0_f32, 1.0], [14.0_f32, -7.0], [1_u32]);
        let (mut keys, mut values, mut output) = (CODES, CODES, [0.0_f32; 2]);
        let (mut k_scale, mut v_scale) = ([1.0_f32, 1.0], [1.0_f32, 1.0]);
        let tensors = Tensors::default()
            .with("query", &query, &[])
            .with("new_key", &new_key, &[])
            .with("new_value", &new_value, &[])
            .with("seqused_k", &lengths, &[])
            .with_mut("key_cache", &mut keys, &[])
            .with_mut("value_cache", &mut values, &[])
            .with_mut("output", &mut output, &[])
            .with_mut("k_scale", &mut k_scale, &[0, 2, 1, 1])
            .with_mut("v_scale", &mut v_scale, &[0, 2, 1, 1]);
        plan.run(&tensors).unwrap();
        // The mean of (1, 2) and (14, -7).
        assert_eq!(output, [7.5, -2.5]);
        assert_eq!(v_scale, [1.0, if compute_scales == 1 { 14.0 / 448.0 } else { 1.0 }]);
    }
}

const HEADS: usize = 2;
const LENGTH: usize = 203;
const DIM: usize = 8;

/// Softmax by hand, with what the texts mean written in Rust.
#[test]
fn expressions_change_scores_and_masks() {
    let mut problem = attention(1, HEADS as u64, LENGTH as u64, DIM as u64);
    problem.set("lse", 1).set("aux_f32", HEADS as i128).set("aux_i32", LENGTH as i128);
    problem.set("score_mod", c"score + aux_f32[h] * (q - k)".as_ptr().addr() as i128);
    problem.set("mask_mod", c"documents && k != 5".as_ptr().addr() as i128);
    let plan = Made::new(&problem);
    // SAFETY: a plan.
    let described = crate::abi::library::text(unsafe { (Library::get().plan_describe)(plan.0) });
    assert!(described.contains("score + aux_f32[h] * (q - k)"), "{described}");
    assert!(described.contains("documents && k != #"), "{described}");

    let random = |seed: u64| -> Vec<f32> {
        (0..HEADS * LENGTH * DIM).map(|index| normal_at(seed, index as u64) as f32).collect()
    };
    let (query, key, value) = (random(1), random(2), random(3));
    let (mut output, mut lse) = (vec![f32::NAN; HEADS * LENGTH * DIM], vec![f32::NAN; HEADS * LENGTH]);
    let slopes = [0.01_f32, -0.02];
    let documents: Vec<i32> = (0..LENGTH as i32).map(|position| position / 80).collect();
    let tensors = Tensors::default()
        .with("query", &query, &[])
        .with("key", &key, &[])
        .with("value", &value, &[])
        .with("aux_f32", &slopes, &[])
        .with("aux_i32", &documents, &[])
        .with_mut("output", &mut output, &[])
        .with_mut("lse", &mut lse, &[]);
    plan.run(&tensors).unwrap();
    for head in 0..HEADS {
        for row in 0..LENGTH {
            let at =
                |tensor: &[f32], row: usize, column: usize| f64::from(tensor[(head * LENGTH + row) * DIM + column]);
            let weight = |other: usize| {
                let product: f64 = (0..DIM).map(|column| at(&query, row, column) * at(&key, other, column)).sum();
                let distance = row as f64 - other as f64;
                let score = product / (DIM as f64).sqrt() + f64::from(slopes[head]) * distance;
                let is_attended = documents[row] == documents[other] && other != 5;
                if is_attended { score.exp() } else { 0.0 }
            };
            let weights: Vec<f64> = (0..LENGTH).map(weight).collect();
            let sum: f64 = weights.iter().sum();
            for column in 0..DIM {
                let expected: f64 =
                    (0..LENGTH).map(|other| weights[other] * at(&value, other, column)).sum::<f64>() / sum;
                assert!((expected - at(&output, row, column)).abs() < 2e-5, "{head} {row} {column}");
            }
            assert!((sum.ln() - f64::from(lse[head * LENGTH + row])).abs() < 2e-5, "{head} {row}");
        }
    }
    // What is missing is named; what is there without being asked for, too.
    assert!(plan.refuse(&tensors.clone().without("aux_f32")).contains("aux_f32"));
    assert!(plan.refuse(&tensors.with("sinks", &slopes, &[])).contains("sinks"));
}

#[test]
fn wrong_texts_are_told_where() {
    let check = |field: &str, words: &std::ffi::CStr, expected: &str| {
        let mut problem = attention(1, 1, 4, 8);
        problem.set(field, words.as_ptr().addr() as i128);
        assert_eq!(refuse(&problem), expected);
    };
    check("score_mod", c"score + exp(score", "problem.score_mod: column 18: a `,` or a `)` is missing here");
    check(
        "mask_mod",
        c"q > k == 3",
        "problem.mask_mod: column 7, at `== 3`: comparisons are not chained; write a < b && b < c",
    );
    check("score_mod", c"score \xFF", "problem.score_mod is not UTF-8: invalid utf-8 sequence of 1 bytes from index 6");
    check(
        "score_mod",
        c"score + aux_f32[k]",
        "score_mod reads the aux_f32, which is 0; give it the number of its entries",
    );
}
