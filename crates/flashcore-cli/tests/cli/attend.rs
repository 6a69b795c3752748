//! `flashcore attend` as a user meets it: files in, files out, and every way a file can be wrong.

use std::fs;
use std::path::Path;
use std::process::Output;

use flashcore_bench::testkit::ScaleForm;
use flashcore_problem::{
    Alignment, DType, Evidence, Inputs, Layout, Mask, Outputs, Problem, ReferenceError, Scale, ScaleStrides, Tensor,
    judge, oracle,
};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

use crate::scratch::{Scratch, json, no_gpu};

fn attend(scratch: &Scratch, options: &[&str]) -> Output {
    scratch.run(&[&["attend", "in.safetensors", "out.safetensors"], options].concat())
}

/// A tensor of a file: name, type, shape, bytes.
type Entry = (&'static str, Dtype, Vec<usize>, Vec<u8>);

fn write(path: &Path, entries: &[Entry]) {
    let views = entries
        .iter()
        .map(|(name, dtype, shape, data)| (*name, TensorView::new(*dtype, shape.clone(), data).expect("a tensor")));
    fs::write(path, safetensors::serialize(views, None).expect("a file")).expect("written");
}

fn zeros(name: &'static str, dtype: Dtype, shape: &[usize]) -> Entry {
    let elements: usize = shape.iter().product();
    (name, dtype, shape.to_vec(), vec![0; elements * dtype.bitsize() / 8])
}

fn file_dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F16 => Dtype::F16,
        DType::Bf16 => Dtype::BF16,
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
        DType::E4m3 => Dtype::F8_E4M3,
        DType::E5m2 => Dtype::F8_E5M2,
    }
}

fn axes(problem: &Problem, heads: usize, rows: usize, columns: usize) -> Vec<usize> {
    if problem.layout == Layout::Bshd {
        vec![problem.batch, rows, heads, columns]
    } else {
        vec![problem.batch, heads, rows, columns]
    }
}

fn bytes<const N: usize, T: Copy>(values: &[T], encode: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&value| encode(value)).collect()
}

/// The inputs of a problem as the entries of a file.
fn entries(problem: &Problem, inputs: &Inputs) -> Vec<Entry> {
    let types = problem.dtypes();
    let (dtype, key_dtype) = (file_dtype(types.query), file_dtype(types.key_value));
    let key = |columns| axes(problem, problem.key_heads, problem.key_length, columns);
    let mut entries = vec![
        (
            "query",
            dtype,
            axes(problem, problem.query_heads, problem.query_length, problem.head_dim),
            inputs.query.data.clone(),
        ),
        ("key", key_dtype, key(problem.head_dim), inputs.key.data.clone()),
        ("value", key_dtype, key(problem.value_dim), inputs.value.data.clone()),
    ];
    let heads = vec![problem.query_heads];
    for (name, values) in [("alibi_slopes", &inputs.alibi_slopes), ("sinks", &inputs.sinks)] {
        entries.extend(values.iter().map(|list| (name, Dtype::F32, heads.clone(), bytes(list, f32::to_le_bytes))));
    }
    if let Some(lengths) = &inputs.seqused_k {
        let lengths = bytes(lengths, |length| i64::from(length).to_le_bytes());
        entries.push(("seqused_k", Dtype::I64, vec![problem.batch], lengths));
    }
    if let Some(bias) = &inputs.bias {
        let size = |stride: usize, size: usize| if stride == 0 { 1 } else { size };
        let shape = vec![
            size(bias.strides.batch, problem.batch),
            size(bias.strides.head, problem.query_heads),
            size(bias.strides.row, problem.query_length),
            size(bias.strides.key, problem.key_length),
        ];
        entries.push(("bias", Dtype::F32, shape, bytes(&bias.data, f32::to_le_bytes)));
    }
    let key_size = (problem.key_heads, problem.key_length);
    for (name, scale, size) in [
        ("q_scale", &inputs.q_scale, (problem.query_heads, problem.query_length)),
        ("k_scale", &inputs.k_scale, key_size),
        ("v_scale", &inputs.v_scale, key_size),
    ] {
        entries.extend(scale.as_ref().map(|scale| scale_entry(name, problem, scale, size)));
    }
    entries
}

/// A scale of one of the forms of a shape; that of tokens in the order of the axes.
fn scale_entry(name: &'static str, problem: &Problem, scale: &Scale, (heads, rows): (usize, usize)) -> Entry {
    let Problem { batch, key_heads, .. } = *problem;
    let ScaleStrides { sequence, row, key_head, .. } = scale.strides;
    let mut data = scale.data.clone();
    let shape = match (row, sequence, key_head) {
        (0, 0, 0) => vec![1],
        (0, 0, _) => vec![key_heads],
        (0, ..) => vec![batch, key_heads],
        _ if problem.layout == Layout::Bshd => vec![batch, rows, heads],
        _ => {
            let place = |index: usize| (index / (heads * rows), index / rows % heads, index % rows);
            let from = |(batch, head, row): (usize, usize, usize)| scale.data[(batch * rows + row) * heads + head];
            data = (0..data.len()).map(|index| from(place(index))).collect();
            vec![batch, heads, rows]
        }
    };
    (name, Dtype::F32, shape, bytes(&data, f32::to_le_bytes))
}

fn round_trip(name: &str, problem: &Problem, options: &[&str]) {
    round_trip_of(name, problem, &Inputs::random(problem, 7), options);
}

fn round_trip_of(name: &str, problem: &Problem, inputs: &Inputs, options: &[&str]) {
    let scratch = Scratch::new(name);
    write(&scratch.file("in.safetensors"), &entries(problem, inputs));
    let output = attend(&scratch, options);
    assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{name}");
    assert_eq!(output.status.code(), Some(0), "{name}");
    assert_eq!(scratch.names(), ["in.safetensors", "out.safetensors"]);

    let file = fs::read(scratch.file("out.safetensors")).expect("written");
    let file = SafeTensors::deserialize(&file).expect("a safetensors file");
    let written = file.tensor("output").expect("an output");
    let output_type = problem.dtypes().output;
    assert_eq!(written.dtype(), file_dtype(output_type));
    assert_eq!(written.shape(), axes(problem, problem.query_heads, problem.query_length, problem.value_dim));
    let sums = file.tensor("lse").ok().map(|sums| {
        assert_eq!(sums.shape(), [problem.batch, problem.query_heads, problem.query_length]);
        sums.data().as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
    });
    let outputs = Outputs {
        output: Tensor { dtype: output_type, data: written.data().to_vec() },
        lse: sums,
        ..Outputs::default()
    };
    let expected = oracle(problem, inputs).expect("a valid problem");
    let yardstick = ReferenceError::measure(problem, inputs, &expected).expect("a valid problem");
    let verdict = judge(problem, &expected, &yardstick, &Evidence::new(inputs, &outputs));
    assert!(verdict.passed(), "{name}: {verdict}");
}

#[test]
fn what_is_written_is_attention() {
    for dtype in DType::ALL {
        let mut problem = Problem::new(2, 4, 9, 16, dtype);
        (problem.key_heads, problem.key_length, problem.value_dim) = (2, 13, 24);
        round_trip(dtype.name(), &problem, &[]);
    }
    let mut problem = Problem::new(2, 4, 9, 16, DType::F32);
    problem.layout = Layout::Bshd;
    problem.mask = Mask::Causal(Alignment::BottomRight);
    problem.lse = true;
    (problem.scale, problem.softcap) = (-0.5, Some(3.0));
    let options = ["--layout", "bshd", "--mask", "causal", "--lse", "--scale", "-0.5", "--softcap", "3"];
    round_trip("options", &problem, &options);
    let mut problem = Problem::new(3, 4, 9, 16, DType::F16);
    (problem.alibi, problem.sinks, problem.bias, problem.seqused_k) = (true, true, true, true);
    round_trip("optional-tensors", &problem, &["--device", "cpu"]);
}

/// FP8 caches and queries with scales of every form, on the CPU and in the simulator.
#[test]
fn scales_of_every_form_are_read() {
    for (form, layout) in ScaleForm::ALL.into_iter().flat_map(|form| [(form, Layout::Bhsd), (form, Layout::Bshd)]) {
        let check = |types: &str, options: &[&str]| {
            let problem = Problem::new(3, 4, 9, 16, DType::F16).with_dtypes(types.parse().expect("types"));
            let mut problem = problem.with_layout(layout).with_k_scale(true).with_v_scale(true);
            problem.q_scale = problem.dtype.is_float8();
            (problem.key_heads, problem.key_length, problem.seqused_k) = (2, 70, true);
            let mut inputs = Inputs::random(&problem, 7);
            form.draw(&problem, &mut inputs, 7);
            let layout = if layout == Layout::Bshd { "bshd" } else { "bhsd" };
            let name = format!("{form}-{layout}-{}", types.replace(' ', "-"));
            round_trip_of(&name, &problem, &inputs, &[&["--layout", layout], options].concat());
        };
        check("bf16 kv e4m3", &["--device", "cpu"]);
        check("e4m3 kv e5m2 out f16", &["--device", "cpu", "--out-dtype", "f16"]);
        check("f16 kv e5m2", &["--device", "sim", "--kernel", "ampere", "--verify"]);
    }
}

#[test]
fn bad_scales_are_named() {
    let scratch = Scratch::new("bad-scales");
    let wrong = |types: [Dtype; 2], scale: Entry, message: &str| {
        let [query, key] = types;
        let file = [
            zeros("query", query, &[2, 4, 5, 16]),
            zeros("key", key, &[2, 2, 6, 16]),
            zeros("value", key, &[2, 2, 6, 16]),
            scale,
        ];
        write(&scratch.file("in.safetensors"), &file);
        check(&scratch, &["--device", "cpu"], 2, &format!("in.safetensors: {message}"));
    };
    let cache = [Dtype::BF16, Dtype::F8_E4M3];
    wrong(
        cache,
        zeros("k_scale", Dtype::F32, &[3]),
        "k_scale has shape [3]; it must be [1], one of the tensor, [2], one per KV head, [2, 2], one per batch and KV head, or [2, 2, 6], one per token: [batch, heads, rows]",
    );
    wrong(
        cache,
        zeros("q_scale", Dtype::F32, &[1]),
        "q_scale scales a query of F8_E4M3 or F8_E5M2, and the query is bf16",
    );
    wrong(cache, zeros("v_scale", Dtype::F64, &[1]), "v_scale is F64; it must be F16, BF16 or F32");
    wrong(
        [Dtype::F8_E4M3; 2],
        zeros("q_scale", Dtype::F32, &[1]),
        "query is e4m3, which no output is; --out-dtype f16 or --out-dtype bf16 says what the output is",
    );
    wrong(
        cache,
        zeros("k_descale", Dtype::F32, &[1]),
        "`k_descale` would not be used: scales of 8-bit tensors are `q_scale`, `k_scale` and `v_scale`; --ignore k_descale leaves it out",
    );
}

#[test]
fn gpu_kernels_run_in_the_simulator() {
    let mut problem = Problem::new(3, 4, 9, 16, DType::F16);
    (problem.key_heads, problem.key_length) = (2, 70);
    (problem.alibi, problem.sinks, problem.bias, problem.seqused_k) = (true, true, true, true);
    (problem.mask, problem.lse) = (Mask::Causal(Alignment::BottomRight), true);
    for kernel in ["scalar", "ladder", "ampere", "hopper-64x64-2stage"] {
        let options = ["--device", "sim", "--kernel", kernel, "--mask", "causal", "--lse", "--verify"];
        round_trip(kernel, &problem, &options);
    }
    let scratch = Scratch::new("simulator");
    let problem = Problem::new(1, 2, 5, 8, DType::Bf16);
    write(&scratch.file("in.safetensors"), &entries(&problem, &Inputs::random(&problem, 0)));
    let output = attend(&scratch, &["--device", "sim", "--format", "json"]);
    let rows = json(&output);
    assert_eq!(
        (&rows[0]["device"], &rows[0]["kernel"]),
        (&"simulator".into(), &"ampere-32x64-2stage-swizzled-2kvwarps".into())
    );
    let problem = Problem::new(1, 2, 5, 12, DType::Bf16);
    fs::remove_file(scratch.file("out.safetensors")).expect("written");
    write(&scratch.file("in.safetensors"), &entries(&problem, &Inputs::random(&problem, 0)));
    let message = "head_dim is 12; the hopper kernel takes multiples of 8 up to 256\nvalue_dim is 12; the hopper kernel takes multiples of 8 up to 256";
    check(&scratch, &["--device", "sim", "--kernel", "hopper"], 2, message);
}

#[test]
fn what_was_done_is_said() {
    let scratch = Scratch::new("said");
    let problem = Problem::new(1, 2, 5, 8, DType::F32);
    let mut file = entries(&problem, &Inputs::random(&problem, 0));
    file.push(zeros("notes", Dtype::F32, &[2]));
    write(&scratch.file("in.safetensors"), &file);
    let output = attend(&scratch, &["--device", "cpu", "--format", "json"]);
    let rows = json(&output);
    assert_eq!(rows[0]["kernel"], "native");
    assert_eq!(rows[0]["problem"], "batch 1 heads 2/2 queries 5 keys 5 dims 8/8 f32 unmasked");
    let output = attend(&scratch, &[]);
    let lines = String::from_utf8(output.stdout).expect("text");
    let lines: Vec<&str> = lines.lines().skip(2).collect();
    let no_gpu = format!("not on a GPU: {}", no_gpu());
    assert_eq!(lines, [no_gpu.as_str(), "not used: notes", "wrote out.safetensors"]);
}

fn check(scratch: &Scratch, options: &[&str], code: i32, message: &str) {
    let output = attend(scratch, options);
    assert_eq!(String::from_utf8_lossy(&output.stderr), format!("flashcore: {message}\n"), "{options:?}");
    assert_eq!(output.status.code(), Some(code), "{message}");
    assert!(!scratch.names().iter().any(|name| name.contains("out")), "nothing is written: {:?}", scratch.names());
}

#[test]
fn every_bad_tensor_is_named() {
    let scratch = Scratch::new("bad");
    // Queries of 2 batches, 4 heads, 5 rows and 8 columns.
    let wrong = |replaced: Entry, message: &str| {
        let shapes = [("query", [2, 4, 5, 8]), ("key", [2, 2, 6, 8]), ("value", [2, 2, 6, 8])];
        let mut file: Vec<Entry> = shapes.iter().map(|(name, shape)| zeros(name, Dtype::F16, shape)).collect();
        file.retain(|(name, ..)| *name != replaced.0);
        file.push(replaced);
        write(&scratch.file("in.safetensors"), &file);
        check(&scratch, &[], 2, &format!("in.safetensors: {message}"));
    };
    let f16 = |name, shape: &[usize]| zeros(name, Dtype::F16, shape);
    wrong(
        zeros("query", Dtype::I32, &[2, 4, 5, 8]),
        "query is I32; it must be F16, BF16, F32, F64, F8_E4M3 or F8_E5M2",
    );
    wrong(f16("key", &[2, 6, 8]), "key has shape [2, 6, 8], 3 axes; it must have 4: [batch, heads, rows, dim]");
    wrong(
        zeros("key", Dtype::BF16, &[2, 2, 6, 8]),
        "key has shape [2, 2, 6, 8] and dtype bf16; its dtype must be f16, like that of query",
    );
    wrong(f16("key", &[1, 2, 6, 8]), "key has shape [1, 2, 6, 8] and batch 1; its batch must be 2, like that of query");
    wrong(f16("key", &[2, 2, 6, 4]), "key has shape [2, 2, 6, 4] and dim 4; its dim must be 8, like that of query");
    wrong(
        f16("value", &[2, 4, 6, 8]),
        "value has shape [2, 4, 6, 8] and heads 4; its heads must be 2, like that of key",
    );
    wrong(f16("value", &[2, 2, 7, 8]), "value has shape [2, 2, 7, 8] and rows 7; its rows must be 6, like that of key");
    wrong(zeros("sinks", Dtype::F64, &[4]), "sinks is F64; it must be F16, BF16 or F32");
    wrong(zeros("alibi_slopes", Dtype::F32, &[2]), "alibi_slopes has shape [2]; it must be [4], [query heads]");
    wrong(
        zeros("bias", Dtype::F32, &[2, 2, 5, 6]),
        "bias has shape [2, 2, 5, 6]; it must be [2, 4, 5, 6], [batch, heads, queries, keys], or 1 to broadcast an axis",
    );
    wrong(zeros("seqused_k", Dtype::F32, &[2]), "seqused_k is F32; it must be I32, U32 or I64");
    wrong(zeros("seqused_k", Dtype::I32, &[3]), "seqused_k has shape [3]; it must be [2], [batch]");
    let lengths = bytes(&[6, -1], i32::to_le_bytes);
    wrong(
        ("seqused_k", Dtype::I32, vec![2], lengths),
        "seqused_k has -1 for batch 1; it must be from 0 to 6, the rows of key",
    );
}

#[test]
fn bad_files_and_options() {
    let scratch = Scratch::new("files");
    let path = scratch.file("in.safetensors");
    check(&scratch, &[], 2, "cannot read in.safetensors: No such file or directory (os error 2)");
    write(&path, &[zeros("query", Dtype::F16, &[1, 1, 4, 8]), zeros("keys", Dtype::F16, &[1, 1, 4, 8])]);
    check(
        &scratch,
        &[],
        2,
        "in.safetensors: there is no tensor `key`; query, key and value are needed, and the file has keys, query; --key-name says what the key is called",
    );
    fs::write(&path, b"no header").unwrap();
    let output = attend(&scratch, &[]);
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.starts_with("flashcore: in.safetensors is not a safetensors file: "), "{said}");

    let problem = Problem::new(1, 3, 4, 8, DType::F16);
    write(&path, &entries(&problem, &Inputs::random(&problem, 0)));
    check(
        &scratch,
        &["--softcap", "-1"],
        2,
        "--softcap is -1; it must be finite and above 0; leave it out for no softcap",
    );
    check(
        &scratch,
        &["--device", "cpu", "--kernel", "ampere"],
        2,
        "--kernel chooses a GPU kernel; --device cpu has none",
    );
    check(&scratch, &["--device", "cuda"], 3, &no_gpu());
    check(&scratch, &["--kernel", "scalar"], 3, &no_gpu());

    // An output that cannot be put in its place leaves nothing.
    fs::create_dir(scratch.file("out.safetensors")).unwrap();
    let output = attend(&scratch, &[]);
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(scratch.names(), ["in.safetensors", "out.safetensors"]);
}

#[test]
fn the_threads_are_those_that_were_asked_for() {
    round_trip("threads", &Problem::new(1, 2, 5, 8, DType::F32), &["--device", "cpu", "--threads", "2"]);
}

#[test]
fn tensors_may_have_other_names() {
    let scratch = Scratch::new("names");
    let problem = Problem::new(1, 2, 5, 8, DType::F32);
    let usual = entries(&problem, &Inputs::random(&problem, 3));
    write(&scratch.file("in.safetensors"), &usual);
    assert_eq!(attend(&scratch, &[]).status.code(), Some(0));
    let expected = fs::read(scratch.file("out.safetensors")).expect("written");
    fs::remove_file(scratch.file("out.safetensors")).expect("it is ours");
    let renamed: Vec<Entry> = usual
        .iter()
        .zip(["q", "layer.0.k", "v"])
        .map(|((_, dtype, shape, data), name)| (name, *dtype, shape.clone(), data.clone()))
        .collect();
    write(&scratch.file("in.safetensors"), &renamed);
    check(
        &scratch,
        &[],
        2,
        "in.safetensors: there is no tensor `query`; query, key and value are needed, and the file has layer.0.k, q, v; --query-name says what the query is called",
    );
    let names = ["--query-name", "q", "--key-name", "layer.0.k", "--value-name", "v"];
    assert_eq!(attend(&scratch, &names).status.code(), Some(0));
    assert_eq!(fs::read(scratch.file("out.safetensors")).expect("written"), expected);
    fs::remove_file(scratch.file("out.safetensors")).expect("it is ours");
    // One that looks like an input is none that can be passed over.
    let with = |name: &'static str, message: &str| {
        let mut file = usual.clone();
        file.push(zeros(name, Dtype::F32, &[1]));
        write(&scratch.file("in.safetensors"), &file);
        check(
            &scratch,
            &[],
            2,
            &format!("in.safetensors: `{name}` would not be used: {message}; --ignore {name} leaves it out"),
        );
        let ignoring = attend(&scratch, &["--ignore", name, "--device", "cpu"]);
        let said = String::from_utf8(ignoring.stdout).expect("text");
        assert_eq!(said.lines().nth(2), Some(format!("not used: {name}").as_str()));
        assert_eq!(fs::read(scratch.file("out.safetensors")).expect("written"), expected);
        fs::remove_file(scratch.file("out.safetensors")).expect("it is ours");
    };
    let mask = "a mask of tensors is `bias` [batch, heads, queries, keys] with -inf for masked keys; --mask has causal masks and windows, and `seqused_k` [batch] the keys in use of each batch";
    with("mask", mask);
    with("attn_mask", mask);
    with("attn_bias", "what is added to scores is `bias` [batch, heads, queries, keys]");
    with("sink", "sinks are `sinks` [heads]");
    with("cache_seqlens", "the keys in use of each batch are `seqused_k` [batch]");
    with("k", "name it with --key-name, in place of the key");
}
