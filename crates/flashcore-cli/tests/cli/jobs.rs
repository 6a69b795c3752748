//! `verify --jobs`: several processes find what one finds, and leave one record.

#[cfg(unix)]
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

fn flashcore(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_flashcore")).args(arguments).output().expect("the command runs")
}

/// A file of one test, which is not there at first.
fn file(name: &str) -> PathBuf {
    let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_file(&file);
    file
}

/// What a command found, without what took how long.
fn rows(arguments: &[&str]) -> Vec<Value> {
    let output = flashcore(&[arguments, &["--format", "json"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let mut rows: Vec<Value> = serde_json::from_slice(&output.stdout).expect("rows");
    for row in &mut rows {
        row.as_object_mut().expect("an object").remove("milliseconds");
    }
    rows
}

#[test]
fn several_processes_find_what_one_finds() {
    let check = |arguments: &[&str], count: usize| {
        let alone = rows(arguments);
        assert_eq!(alone.len(), count, "{arguments:?}");
        assert_eq!(rows(&[arguments, &["--jobs", "3"]].concat()), alone, "{arguments:?}");
    };
    check(&["verify", "--backend", "cpu", "--cpu-level", "portable", "--suite", "edge"], 125);
    check(&["verify", "--backend", "sim", "--suite", "edge", "--part", "0/81"], 5);
}

#[test]
fn there_is_one_record() {
    let record = file("jobs.json");
    let path = record.to_str().expect("a path of letters");
    let verify = ["verify", "--backend", "cpu", "--cpu-level", "portable", "--fuzz", "50", "--jobs", "4"];
    let output = flashcore(&[&verify[..], &["--record", path]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let written: Value = serde_json::from_str(&fs::read_to_string(&record).expect("a record")).expect("JSON");
    let content = serde_json::json!({"backend": "cpu portable", "passed": 50, "failed": [], "is_complete": true});
    assert_eq!(written["content"], content);
    assert_eq!(written["origin"]["command"], format!("flashcore {} --record jobs.json", verify.join(" ")));
}

#[cfg(unix)]
#[test]
fn ctrl_c_leaves_a_record_of_what_the_processes_finished() {
    let record = file("interrupted.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_flashcore"));
    command.args(["verify", "--backend", "cpu", "--fuzz", "20000", "--jobs", "2", "--record"]).arg(&record);
    // Longer than it takes to watch for Ctrl-C, and shorter than the list.
    let status = crate::interrupted::interrupted(&mut command, 6);
    assert_eq!(status.code(), Some(130));
    let written: Value = serde_json::from_str(&fs::read_to_string(&record).expect("a record")).expect("JSON");
    assert_eq!(written["content"]["is_complete"], false);
    assert_eq!(written["content"]["failed"], Value::Array(Vec::new()));
    assert!((1..20_000).contains(&written["content"]["passed"].as_u64().expect("a number")), "{written}");
}
