//! FP8 in every command that takes element types: computed, or refused with what to do.

use serde_json::Value;

use crate::scratch::{Scratch, flashcore, json, json_of, no_gpu};

const CACHE: &str = "bf16 kv e4m3";
const ALL_FP8: &str = "e4m3 out bf16";

/// The rows of a command that ends well, its output in JSON.
fn rows(arguments: &[&str]) -> Vec<Value> {
    let output = flashcore(&[arguments, &["--format", "json"]].concat());
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    json(&output).as_array().expect("rows").clone()
}

fn refused(arguments: &[&str], code: i32, message: &str) {
    let output = flashcore(arguments);
    assert_eq!(String::from_utf8_lossy(&output.stderr), format!("flashcore: {message}\n"), "{arguments:?}");
    assert_eq!(output.status.code(), Some(code), "{arguments:?}");
}

#[test]
fn conversions_are_exact_and_counted_in_the_simulator() {
    let scratch = Scratch::new("microbench");
    let output = scratch.run(&["microbench", "--backend", "sim", "--record", "m.json", "--format", "json"]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let rows = json(&output);
    let rows = rows.as_array().expect("rows");
    let of = |what: &str| rows.iter().filter(|row| row["what"] == what).collect::<Vec<_>>();
    let found: Vec<_> = of("e4m3 to f16")
        .into_iter()
        .map(|row| {
            let text = |key: &str| row[key].as_str().expect("a text").to_owned();
            let count = row["ptx_instructions_per_4_codes"].as_u64();
            (text("by"), text("bytes_of"), text("default"), text("verdict"), count)
        })
        .collect();
    let row = |by: &str, of: &str, default: &str, count| {
        (by.to_owned(), of.to_owned(), default.to_owned(), "exact".to_owned(), Some(count))
    };
    let expected = [
        row("integer", "keys", "", 18),
        row("integer", "values", "", 18),
        row("cvt", "keys", "default", 2),
        row("cvt", "values", "default", 4),
    ];
    assert_eq!(found, expected);
    assert_eq!(of("m16n8k32 e4m3")[0]["verdict"], "right");
    // Counts are no times: there is no column of any.
    assert!(rows.iter().all(|row| row.get("decode_us").is_none() && row.get("tflops_per_s").is_none()));
    let record = json_of(&scratch.file("m.json"));
    assert_eq!((&record["kind"], &record["origin"]["machine"]["backend"]), (&"microbenchmark".into(), &"sim".into()));
    assert_eq!(record["content"]["conversions"][0]["measured"], Value::Null);
    refused(&["microbench", "--backend", "cuda"], 3, &no_gpu());
}

#[test]
fn bench_draws_scales_of_the_form_that_was_asked_for() {
    let cpu = ["bench", "--backend", "cpu", "--seconds", "0.01", "--dtype"];
    for (types, form) in [(CACHE, ""), (CACHE, "+scales=head"), (ALL_FP8, "+scales=token"), (ALL_FP8, "+scales")] {
        let shape = format!("2x4/2x1,70x32{form}");
        let found = rows(&[&cpu[..], &[types, "--shape", &shape]].concat());
        for row in found {
            let row = [&row["shape"], &row["dtype"], &row["verdict"]];
            assert_eq!(row, [&Value::from(shape.as_str()), &types.into(), &"passed".into()]);
        }
    }
    let shape = "1x4/2x1,70x32+scales=token";
    for types in [CACHE, ALL_FP8] {
        let sim = rows(&["bench", "--backend", "sim", "--shape", shape, "--dtype", types]);
        assert_eq!((&sim[0]["shape"], &sim[0]["verdict"]), (&shape.into(), &"passed".into()));
    }
}

#[test]
fn verify_takes_types_and_forms() {
    for (backend, types, kernel) in
        [("cpu", CACHE, &[][..]), ("cpu", ALL_FP8, &[]), ("sim", CACHE, &["--kernel", "ampere"]), ("sim", ALL_FP8, &[])]
    {
        for form in ["head", "sequence", "token", "tensor"] {
            let shape = format!("1x4/2x5,70x64+scales={form}");
            let arguments = ["verify", "--backend", backend, "--shape", &shape, "--dtype", types];
            let row = &rows(&[&arguments, kernel].concat())[0];
            assert_eq!(row["verdict"], "passed", "{row}");
            // The name has the form, so that the command that repeats it has it too.
            assert!(row["case"].as_str().is_some_and(|case| case.contains(&shape)), "{row}");
        }
    }
    let said = "`scales=row` in `1x2x9x64+scales=row` is no form of scales; allowed are scales (a form drawn by the seed), scales=tensor (one of a tensor), scales=head (one per KV head), scales=sequence (one per sequence and KV head) and scales=token (one per token and head), or q_scale, k_scale and v_scale for some of them";
    refused(&["verify", "--backend", "cpu", "--shape", "1x2x9x64+scales=row", "--dtype", CACHE], 2, said);
    let said = "`scales` in `1x2x9x64+scales`: scales belong to e4m3 and e5m2, and the element types are f16; give --dtype 'bf16 kv e4m3' or 'e4m3 out bf16', or leave the scales out";
    refused(&["verify", "--backend", "cpu", "--shape", "1x2x9x64+scales"], 2, said);
}

/// In one process, and in workers, which get types and form by the command line.
#[test]
fn compare_runs_fp8() {
    let scratch = Scratch::new("compare-fp8");
    let program = format!("bin:{}", env!("CARGO_BIN_EXE_flashcore"));
    for (types, sides) in [(CACHE, ["cpu", "cpu"]), (ALL_FP8, ["cpu", "cpu"]), (CACHE, ["cpu", program.as_str()])] {
        let shape = "1x4/2x1,70x32+scales=head";
        let limits = ["--seconds", "0.1", "--record", "c.json", "--shape", shape, "--dtype", types];
        let output = scratch.run(&[&["compare"], &sides[..], &limits].concat());
        let code = output.status.code();
        assert!(matches!(code, Some(0 | 1 | 4)), "{code:?}: {}", String::from_utf8_lossy(&output.stderr));
        let record = json_of(&scratch.file("c.json"));
        for side in ["a", "b"] {
            let measured = &record["content"]["rows"][0][side];
            let problem = [&measured["problem"]["shape"], &measured["problem"]["dtype"]];
            assert_eq!(problem, [&Value::from(shape), &types.into()]);
            assert_eq!(measured["verified"]["passed"], true, "{measured}");
        }
    }
}

#[test]
fn roofline_knows_the_rates_of_fp8() {
    let floor = |device: &str, types: &str| {
        let shape = "1x16x16384x128";
        let found = rows(&["roofline", "--device", device, "--shape", shape, "--dtype", types]);
        assert_eq!(found[0]["dtype"], types);
        found[0]["products_us"].as_f64().expect("a time")
    };
    let (half, cache, bytes) = (floor("h200", "bf16"), floor("h200", CACHE), floor("h200", ALL_FP8));
    assert!((half - cache).abs() < 0.01 && (half / bytes - 2.0).abs() < 1e-3, "{half} {cache} {bytes}");
    let said = "NVIDIA A100 SXM 80 GB has no tensor cores for e4m3; use --dtype 'bf16 kv e4m3', whose products are of 16 bits, or a --device from Ada or Hopper on";
    refused(&["roofline", "--device", "a100", "--dtype", ALL_FP8], 2, said);
}

#[test]
fn kernels_of_fp8_are_printed_and_profiled() {
    let shape = "1x4/2x1,70x64+scales";
    let text = |types: &str, arch: &str| {
        let output = flashcore(&["ptx", "--shape", shape, "--dtype", types, "--arch", arch]);
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).lines().filter(|line| line.starts_with(".target")).count()
    };
    assert!(text(CACHE, "sm_80") >= 1 && text(ALL_FP8, "sm_90a") >= 1);
    for types in [CACHE, ALL_FP8] {
        let found = rows(&["profile", "--shape", shape, "--dtype", types]);
        let row = [&found[0]["shape"], &found[0]["dtype"]];
        assert_eq!(row, [&Value::from(shape), &types.into()]);
    }
}

#[test]
fn commands_without_fp8_say_what_to_do() {
    let said = "--dtype bf16 kv e4m3: the steps of the ladder are kernels of one element type; use f16 or bf16 here, and `flashcore bench` or `flashcore profile` for FP8";
    refused(&["ladder", "--backend", "sim", "--dtype", CACHE], 2, said);
    refused(&["tune", "--shape", "1x4/2x1,70x64+scales=head", "--dtype", CACHE], 3, &no_gpu());
}
