//! The command as a user meets it: exit codes, where messages go, formats.

use std::process::{Command, Output};

fn flashcore(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_flashcore")).args(arguments).output().expect("the command runs")
}

fn check(arguments: &[&str], code: i32, standard_error: &str) {
    let output = flashcore(arguments);
    assert_eq!(String::from_utf8_lossy(&output.stderr), standard_error, "{arguments:?}");
    assert_eq!(output.status.code(), Some(code), "{arguments:?}");
}

#[test]
fn a_case_that_passes_exits_with_0() {
    check(&["verify", "--shape", "1x1x20,70x32", "--kernel", "ampere", "--mask", "causal", "--lse"], 0, "");
    check(&["verify", "--backend", "cpu", "--shape", "1x2/1x5,9x24", "--mask", "window:3,0"], 0, "");
}

#[test]
fn wrong_usage_exits_with_2_and_says_what_is_allowed() {
    check(
        &["verify", "--shape", "1x8x512"],
        2,
        "flashcore: `1x8x512` has 3 parts; a shape has four: batch x heads[/key heads] x queries[,keys] x dim[,value dim], such as 1x8x512x64 or 2x8/2x97,203x64\n",
    );
    check(
        &["verify", "--shape", "1x8/3x64x64"],
        2,
        "flashcore: query_heads is 8 and key_heads is 3; query_heads must be a multiple of key_heads\n",
    );
    check(
        &["verify", "--shape", "1x8x64x60"],
        2,
        "flashcore: head_dim is 60; the ampere kernel takes multiples of 8 up to 256\nvalue_dim is 60; the ampere kernel takes multiples of 8 up to 256\n",
    );
    check(
        &["resources", "--arch", "sm_75"],
        2,
        "flashcore: unknown architecture `sm_75`; known are sm_80, sm_86, sm_89, sm_90, sm_90a and sm_120\n",
    );
}

#[test]
fn a_missing_tool_exits_with_3() {
    let output = Command::new(env!("CARGO_BIN_EXE_flashcore"))
        .args(["resources"])
        .env("FLASHCORE_PTXAS", "/nowhere/ptxas")
        .output()
        .expect("the command runs");
    assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn results_are_machine_readable() {
    let output = flashcore(&["verify", "--shape", "1x1x20,70x32", "--format", "json"]);
    let rows: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(rows[0]["verdict"], "passed");
    assert_eq!(rows[0]["case"], "sim ampere-64x64-2stage-swizzled 1x1x20,70x32 f16 full seed 0");
}

#[test]
fn a_reader_who_leaves_early_is_no_error() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_flashcore"))
        .arg("ptx")
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("the command runs");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn the_kernels_of_any_problem_can_be_printed() {
    let entries = |arguments: &[&str]| {
        let output = flashcore(&[&["ptx"], arguments].concat());
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let names = text.lines().filter_map(|line| line.strip_prefix(".visible .entry "));
        names.map(|name| name.trim_end_matches('(').to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(entries(&["--kernel", "ampere"]), ["flashcore_ampere_64x64_2stage_swizzled_f16_d64"]);
    // The kernel that finds the tiles of a formula, and the one behind it; by default that of the architecture.
    let formula = entries(&["--shape", "2x16x8192x128+documents", "--mask", "causal", "--arch", "sm_90a"]);
    assert_eq!(formula.len(), 2);
    assert!(formula[0].starts_with("flashcore_ranges_") && formula[1].starts_with("flashcore_hopper_"), "{formula:?}");
    let refused = flashcore(&["ptx", "--kernel", "hopper", "--arch", "sm_80"]);
    assert_eq!(refused.status.code(), Some(2));
}

#[test]
fn every_level_has_its_line() {
    let output = flashcore(&["verify", "--backend", "cpu", "--cpu-level", "all", "--shape", "1x2/1x5,390x24", "--lse"]);
    let text = String::from_utf8_lossy(&output.stdout);
    let tallies: Vec<&str> = text.lines().filter(|line| line.ends_with(" failed")).collect();
    let levels = flashcore_cpu::Level::available();
    let mut expected: Vec<String> = levels.iter().map(|level| format!("cpu {level}: 1 passed, 0 failed")).collect();
    if levels.len() > 1 {
        expected.push(format!("all levels: {} passed, 0 failed", levels.len()));
    }
    assert_eq!(tallies, expected);
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn one_case_of_a_suite_can_be_repeated() {
    let check = |only: &str| {
        let output = flashcore(&["verify", "--backend", "cpu", "--suite", "full", "--only", only, "--format", "json"]);
        let rows: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        rows.as_array().map(|rows| (rows.len(), rows[0]["verdict"].clone()))
    };
    assert_eq!(check("600"), Some((1, "passed".into())));
    let beyond = flashcore(&["verify", "--backend", "cpu", "--suite", "seeds", "--only", "84"]);
    assert_eq!(String::from_utf8_lossy(&beyond.stderr), "flashcore: --only 84: the suite has cases 0 to 83\n");
    assert_eq!(beyond.status.code(), Some(2));
}
