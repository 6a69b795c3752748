//! `flashcore accuracy`: its rows, needles, records and exit codes, on few keys.

use std::time::Duration;

use crate::scratch::{Scratch, flashcore, json, json_of};

const SMALL: [&str; 8] = ["accuracy", "--queries", "2", "--heads", "1", "--head-dim", "32", "--seed"];

fn small<'a>(arguments: &[&'a str]) -> Vec<&'a str> {
    [&SMALL[..], &["3"], arguments].concat()
}

#[test]
fn rows_say_who_computed_them() {
    let arguments = small(&["--lengths", "200", "--types", "f32,bf16 kv e4m3,e4m3 out bf16", "--scales", "head"]);
    let arguments = [&arguments[..], &["--options", "none,rotate", "--data", "outliers", "--format", "json"]].concat();
    let rows = json(&flashcore(&arguments));
    let rows = rows.as_array().expect("rows");
    let said: Vec<String> = rows
        .iter()
        .map(|row| ["types", "options", "computed_by"].map(|key| row[key].as_str().expect("a text")).join("|"))
        .collect();
    let expected = [
        "f32||cpu",
        "f32||model 3xTF32, 25 bits",
        "f32||model 1xTF32, 25 bits",
        "bf16 kv e4m3||f64",
        "bf16 kv e4m3||cpu",
        "bf16 kv e4m3||model, 25 bits",
        "bf16 kv e4m3|rotate|f64",
        "bf16 kv e4m3|rotate|cpu",
        "e4m3 out bf16||f64",
        "e4m3 out bf16||cpu",
        "e4m3 out bf16||model two levels, 13 bits",
        "e4m3 out bf16||model one level, 13 bits",
        "e4m3 out bf16|rotate|f64",
        "e4m3 out bf16|rotate|cpu",
        "e4m3 out bf16|rotate|model two levels, 13 bits",
    ];
    assert_eq!(said, expected);
    let error = |row: usize| rows[row]["relative_l2"].as_f64().expect("a number");
    assert!(error(0) < 1e-6 && error(1) < 1e-6 && (1e-5..1e-2).contains(&error(2)), "{rows:?}");
    assert!((3..15).all(|row| (1e-3..0.5).contains(&error(row))), "{rows:?}");
    assert!(rows.iter().all(|row| row["keys"] == 200 && row["data"] == "outliers" && row["refused"].is_null()));
}

#[test]
fn needles_are_found_recorded_and_missed() {
    let scratch = Scratch::new("needles");
    let search =
        ["accuracy", "--needle", "--haystack", "2k", "--trials", "8", "--format", "json", "--record", "a.json"];
    let output = scratch.run(&search);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let rows = json(&output);
    assert_eq!(rows.as_array().map(Vec::len), Some(5));
    assert_eq!(rows[3]["computed_by"], "model two levels, 13 bits");
    assert!(rows.as_array().into_iter().flatten().take(4).all(|row| row["found"] == 8), "{rows}");
    let record = json_of(&scratch.file("a.json"));
    assert_eq!((&record["kind"], &record["content"]["needles"][3]["found"]), (&"accuracy".into(), &8.into()));
    // A tensor core that keeps 4 bits loses needles with two levels as well, and the exit code says so.
    let coarse = ["accuracy", "--needle", "--haystack", "2k", "--trials", "8", "--fp8-bits", "4", "--format", "csv"];
    let output = flashcore(&coarse);
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn what_is_impossible_is_refused() {
    let check = |arguments: &[&str], code: i32, said: &str| {
        let output = flashcore(arguments);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(code) && text.contains(said), "{arguments:?}: {text}");
    };
    check(&["accuracy", "--lengths", "0"], 2, "a length is a number of keys from 1");
    check(&["accuracy", "--scales", "row"], 2, "'row' is no scale mode");
    check(&["accuracy", "--data", "uniform"], 2, "there are gaussian, outliers and key-mean");
    check(&["accuracy", "--lengths", "100", "--queries", "1", "--types", "f64 kv e4m3"], 0, "");
    check(&["accuracy", "--needle", "--haystack", "150"], 2, "150 keys hold no 100 needles");
    check(&["accuracy", "--lengths", "1024m"], 3, "bytes of memory");
    check(&["accuracy", "--backend", "cuda"], 3, "");
}

#[cfg(unix)]
#[test]
fn what_was_finished_is_shown_after_ctrl_c() {
    let mut command = crate::scratch::command(&["accuracy", "--lengths", "1k,4k", "--format", "json"]);
    let output = crate::interrupted::interrupted_output(&mut command, Duration::from_secs(4));
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
    let rows = json(&output);
    let rows = rows.as_array().expect("rows");
    assert!(rows.len() < 300 && rows.iter().all(|row| row["relative_l2"].is_number()), "{}", rows.len());
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains(&format!("cases: {} run, ", rows.len())), "{text}");
}
