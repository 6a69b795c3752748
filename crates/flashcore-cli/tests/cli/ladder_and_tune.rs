//! `flashcore ladder` and `flashcore tune` as a user meets them, where there is no GPU.

use std::fs;
use std::process::Output;

use serde_json::Value;

use crate::scratch::{Scratch, json, json_of};

/// Runs the command with its kernel cache in a folder, and without ptxas.
fn run(scratch: &Scratch, arguments: &[&str]) -> Output {
    let mut command = scratch.command(arguments);
    command.env("FLASHCORE_PTXAS", "/nowhere/ptxas").env("FLASHCORE_CACHE_DIR", scratch.path());
    command.output().expect("the command runs")
}

fn check(scratch: &Scratch, arguments: &[&str], code: i32, standard_output: &str, standard_error: &str) {
    let output = run(scratch, arguments);
    assert_eq!(String::from_utf8_lossy(&output.stderr), standard_error, "{arguments:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), standard_output, "{arguments:?}");
    assert_eq!(output.status.code(), Some(code), "{arguments:?}");
}

#[test]
fn a_ladder_is_walked_in_the_simulator_recorded_and_drawn() {
    let scratch = Scratch::new("ladder");
    let (record, svg, again) = ("l.json", "l.svg", "again.svg");
    let walk = ["ladder", "--backend", "sim", "--shape", "1x2x64x32", "--format", "json", "--record", record];
    let output = run(&scratch, &[&walk[..], &["--svg", svg]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let rows = json(&output);
    let rows = rows.as_array().expect("rows");
    assert!(rows.len() >= 20, "{}", rows.len());
    assert_eq!((&rows[0]["name"], &rows[0]["kernel"]), (&Value::from("scalar"), &Value::from("scalar-64")));
    // Counters, and no times.
    assert_eq!(rows[1]["p50_us"], Value::Null);
    let part = |name: &str| {
        let row = rows.iter().find(|row| row["name"] == name).unwrap_or_else(|| panic!("no step `{name}`"));
        row["tensor_core_fraction"].as_f64().expect("a number")
    };
    assert!(part("shared tiles") < 0.01 && part("tensor cores for both") > 0.99);
    let recorded = json_of(&scratch.file(record));
    assert_eq!(recorded["kind"], "ladder");
    assert_eq!(recorded["content"]["ladders"][0]["shape"], "1x2x64x32");
    assert_eq!(run(&scratch, &["ladder", "--from", record, "--svg", again]).status.code(), Some(0));
    assert_eq!(scratch.read(svg), scratch.read(again));
}

#[test]
fn what_is_no_ladder_is_refused() {
    let scratch = Scratch::new("no-ladder");
    scratch.write("other.json", "{}");
    let message = "flashcore: other.json: not a record of flashcore, since it has no `schema`; `flashcore ladder --record FILE` writes one\n";
    check(&scratch, &["ladder", "--from", "other.json"], 2, "", message);
}

#[test]
fn what_was_tuned_can_be_listed_and_forgotten() {
    let scratch = Scratch::new("tune");
    let file = scratch.file("v1").join("tuned.json");
    let nothing = format!("nothing is stored in {}\n", file.display());
    check(&scratch, &["tune", "--list"], 0, &nothing, "");
    check(&scratch, &["tune", "--forget", "all"], 0, "there was nothing to remove\n", "");
    let entry = serde_json::json!({
        "device": "a GPU", "driver": "13000 580", "class": "f16 d64x64", "config": "scalar-64", "seconds": 1e-6,
        "default_config": "scalar-32", "default_seconds": 2e-6, "problem": "1x8x512x64 f16 full",
    });
    let write = |schema: u32| {
        fs::write(&file, serde_json::json!({"schema": schema, "tuned": [entry]}).to_string()).expect("written");
    };
    write(1);
    let output = run(&scratch, &["tune", "--list", "--format", "json"]);
    let rows = json(&output);
    assert_eq!((&rows[0]["class"], &rows[0]["kernel"]), (&Value::from("f16 d64x64"), &Value::from("scalar-64")));
    let unknown = "flashcore: nothing is stored for `f16`; --list shows what is\n";
    check(&scratch, &["tune", "--forget", "f16"], 2, "", unknown);
    check(&scratch, &["tune", "--forget", "f16 d64x64"], 0, "removed 1 for `f16 d64x64`\n", "");
    check(&scratch, &["tune", "--list"], 0, &nothing, "");
    write(7);
    let refused = format!(
        "flashcore: {} cannot be read: its schema is Some(7), and this version reads 1; `flashcore tune --forget all` removes it\n",
        file.display()
    );
    check(&scratch, &["tune", "--list"], 3, "", &refused);
    check(&scratch, &["tune", "--forget", "all"], 0, "removed all stored results\n", "");
}

#[test]
fn tuning_needs_a_gpu_and_says_so() {
    let scratch = Scratch::new("tune-without");
    let output = run(&scratch, &["tune", "--shape", "1x8x512x64"]);
    assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stderr));
}
