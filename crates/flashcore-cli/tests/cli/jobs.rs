//! `verify --jobs`: several processes find what one finds, and leave one record.

use serde_json::Value;

use crate::scratch::{Scratch, flashcore, json, json_of};

/// Rows of a command, without their times.
fn rows(arguments: &[&str]) -> Vec<Value> {
    let output = flashcore(&[arguments, &["--format", "json"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let mut rows = json(&output).as_array().expect("rows").clone();
    for row in &mut rows {
        row.as_object_mut().expect("an object").remove("milliseconds");
    }
    rows
}

#[test]
fn several_processes_find_what_one_finds() {
    let check = |arguments: &[&str]| {
        let alone = rows(arguments);
        assert!(alone.len() > 3, "{arguments:?}: {}", alone.len());
        assert_eq!(rows(&[arguments, &["--jobs", "3"]].concat()), alone, "{arguments:?}");
    };
    check(&["verify", "--backend", "cpu", "--cpu-level", "portable", "--suite", "edge"]);
    check(&["verify", "--backend", "sim", "--suite", "edge", "--part", "0/81"]);
}

#[test]
fn there_is_one_record() {
    let scratch = Scratch::new("jobs");
    let verify = ["verify", "--backend", "cpu", "--cpu-level", "portable", "--fuzz", "50", "--jobs", "4"];
    let output = scratch.run(&[&verify[..], &["--record", "jobs.json"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let written = json_of(&scratch.file("jobs.json"));
    let content = serde_json::json!({"backend": "cpu portable", "passed": 50, "failed": [], "is_complete": true});
    assert_eq!(written["content"], content);
    assert_eq!(written["origin"]["command"], format!("flashcore {} --record jobs.json", verify.join(" ")));
}

#[cfg(unix)]
#[test]
fn ctrl_c_leaves_a_record_of_what_the_processes_finished() {
    let scratch = Scratch::new("interrupted");
    let verify = ["verify", "--backend", "cpu", "--fuzz", "20000", "--jobs", "2", "--record", "interrupted.json"];
    // Longer than it takes to watch for Ctrl-C, and shorter than the list.
    let status = crate::interrupted::interrupted(&mut scratch.command(&verify), 6);
    assert_eq!(status.code(), Some(130));
    let written = json_of(&scratch.file("interrupted.json"));
    assert_eq!(written["content"]["is_complete"], false);
    assert_eq!(written["content"]["failed"], Value::Array(Vec::new()));
    assert!((1..20_000).contains(&written["content"]["passed"].as_u64().expect("a number")), "{written}");
}
