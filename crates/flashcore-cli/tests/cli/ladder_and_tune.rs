//! `flashcore ladder` and `flashcore tune` as a user meets them, where there is no GPU.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

/// A folder of one test, removed with it.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("flashcore-cli-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder).expect("a folder");
        Self(folder)
    }

    fn file(&self, name: &str) -> String {
        self.0.join(name).to_string_lossy().into_owned()
    }

    fn flashcore(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flashcore"));
        // Also where there is a GPU, or a ptxas.
        command.args(arguments).env_remove("FLASHCORE_CACHE").env("CUDA_VISIBLE_DEVICES", "");
        command.env("FLASHCORE_PTXAS", "/nowhere/ptxas").env("FLASHCORE_CACHE_DIR", &self.0);
        command.output().expect("the command runs")
    }

    fn check(&self, arguments: &[&str], code: i32, standard_output: &str, standard_error: &str) {
        let output = self.flashcore(arguments);
        assert_eq!(String::from_utf8_lossy(&output.stderr), standard_error, "{arguments:?}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), standard_output, "{arguments:?}");
        assert_eq!(output.status.code(), Some(code), "{arguments:?}");
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_ladder_is_walked_in_the_simulator_recorded_and_drawn() {
    let scratch = Scratch::new("ladder");
    let (record, svg, again) = (scratch.file("l.json"), scratch.file("l.svg"), scratch.file("again.svg"));
    let walk = ["ladder", "--backend", "sim", "--shape", "1x2x64x32", "--format", "json", "--record", &record];
    let output = scratch.flashcore(&[&walk[..], &["--svg", &svg]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let rows: Vec<Value> = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(rows.len() >= 20, "{}", rows.len());
    assert_eq!((&rows[0]["name"], &rows[0]["kernel"]), (&Value::from("scalar"), &Value::from("scalar-64")));
    // Counters, and no times.
    assert_eq!(rows[1]["p50_us"], Value::Null);
    let part = |name: &str| {
        let row = rows.iter().find(|row| row["name"] == name).unwrap_or_else(|| panic!("no step `{name}`"));
        row["tensor_core_fraction"].as_f64().expect("a number")
    };
    assert!(part("shared tiles") < 0.01 && part("tensor cores for both") > 0.99);
    let recorded: Value = serde_json::from_str(&fs::read_to_string(&record).expect("a file")).expect("JSON");
    assert_eq!(recorded["kind"], "ladder");
    assert_eq!(recorded["content"]["ladders"][0]["shape"], "1x2x64x32");
    assert_eq!(scratch.flashcore(&["ladder", "--from", &record, "--svg", &again]).status.code(), Some(0));
    assert_eq!(fs::read(&svg).expect("a picture"), fs::read(&again).expect("a picture"));
}

#[test]
fn what_is_no_ladder_is_refused() {
    let scratch = Scratch::new("no-ladder");
    let file = scratch.file("other.json");
    fs::write(&file, "{}").expect("written");
    let message = format!(
        "flashcore: {file}: not a record of flashcore, since it has no `schema`; `flashcore ladder --record FILE` writes one\n"
    );
    scratch.check(&["ladder", "--from", &file], 2, "", &message);
}

#[test]
fn what_was_tuned_can_be_listed_and_forgotten() {
    let scratch = Scratch::new("tune");
    let file = scratch.0.join("v1").join("tuned.json");
    let nothing = format!("nothing is stored in {}\n", file.display());
    scratch.check(&["tune", "--list"], 0, &nothing, "");
    scratch.check(&["tune", "--forget", "all"], 0, "there was nothing to remove\n", "");
    let entry = serde_json::json!({
        "device": "a GPU", "driver": "13000 580", "class": "f16 d64x64", "config": "scalar-64", "seconds": 1e-6,
        "default_config": "scalar-32", "default_seconds": 2e-6, "problem": "1x8x512x64 f16 full",
    });
    let write = |schema: u32| {
        fs::write(&file, serde_json::json!({"schema": schema, "tuned": [entry]}).to_string()).expect("written");
    };
    write(1);
    let output = scratch.flashcore(&["tune", "--list", "--format", "json"]);
    let rows: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((&rows[0]["class"], &rows[0]["kernel"]), (&Value::from("f16 d64x64"), &Value::from("scalar-64")));
    let unknown = "flashcore: nothing is stored for `f16`; --list shows what is\n";
    scratch.check(&["tune", "--forget", "f16"], 2, "", unknown);
    scratch.check(&["tune", "--forget", "f16 d64x64"], 0, "removed 1 for `f16 d64x64`\n", "");
    scratch.check(&["tune", "--list"], 0, &nothing, "");
    write(7);
    let refused = format!(
        "flashcore: {} cannot be read: its schema is Some(7), and this version reads 1; `flashcore tune --forget all` removes it\n",
        file.display()
    );
    scratch.check(&["tune", "--list"], 3, "", &refused);
    scratch.check(&["tune", "--forget", "all"], 0, "removed all stored results\n", "");
}

#[test]
fn tuning_needs_a_gpu_and_says_so() {
    let scratch = Scratch::new("tune-without");
    let output = scratch.flashcore(&["tune", "--shape", "1x8x512x64"]);
    assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stderr));
}
