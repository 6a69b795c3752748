//! Ctrl-C in every long command: exit code 130, what was finished is written down, what was not run is said.

#![cfg(unix)]

use std::process::Command;
use std::time::Duration;

use flashcore_bench::testkit::suites::{Kernels, Runner, seeds};

use crate::interrupted::{interrupt, interrupted_output, wait_until_watching};
use crate::scratch::{Scratch, command, json, json_of, text};

fn flashcore(arguments: &[&str]) -> Command {
    let mut command = command(arguments);
    command.env("FLASHCORE_PTXAS", "/nowhere/ptxas");
    command
}

/// Standard output of a command that gets Ctrl-C after a while, which must end with 130.
fn said(arguments: &[&str], after: Duration) -> String {
    let output = interrupted_output(&mut flashcore(arguments), after);
    let standard_error = String::from_utf8_lossy(&output.stderr).into_owned();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(130), "{arguments:?}: {text}{standard_error}");
    let notice = "flashcore: stopping after the current step; press Ctrl-C again to stop at once\n";
    assert_eq!(standard_error.matches(notice).count(), 1, "{arguments:?}: {standard_error}");
    text
}

/// The numbers of a last line such as `3 passed, 0 failed, 225 not run: interrupted`.
fn numbers(text: &str, ending: &str) -> Vec<usize> {
    let last = text.lines().last().expect("a line");
    assert!(last.ends_with(ending), "{text}");
    last.split(|letter: char| !letter.is_ascii_digit()).filter_map(|number| number.parse().ok()).collect()
}

const A_WHILE: Duration = Duration::from_secs(3);
/// Before the first of many steps is over.
const AT_ONCE: Duration = Duration::from_millis(100);

#[test]
fn verify() {
    let text = said(&["verify", "--backend", "sim", "--suite", "seeds"], A_WHILE);
    let found = numbers(&text, " not run: interrupted");
    assert!(found.len() == 3 && found[1] == 0 && found[2] > 0, "{text}");
    assert_eq!(found.iter().sum::<usize>(), seeds(Runner::Sim(Kernels::All)).len(), "{text}");
}

#[test]
fn bench_in_the_simulator() {
    let text = said(&["bench", "--backend", "sim", "--shape", "1x8x512x64"], AT_ONCE);
    assert_eq!(text.lines().last(), Some("1 simulated, 1 not run: interrupted"), "{text}");
    // What was finished is in the table.
    assert_eq!(text.lines().count(), 3, "{text}");
}

#[test]
fn ladder() {
    let scratch = Scratch::new("ladder");
    let record = scratch.file("ladder.json");
    let file = text(&record);
    let arguments = ["ladder", "--backend", "sim", "--record", file, "--format", "json"];
    let output = interrupted_output(&mut flashcore(&arguments), A_WHILE);
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
    let shown = json(&output).as_array().expect("one array of rows").len();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let last = said.lines().last().expect("a line");
    let found: Vec<usize> =
        last.split(|letter: char| !letter.is_ascii_digit()).filter_map(|number| number.parse().ok()).collect();
    assert!(last.starts_with("steps: ") && last.ends_with(" not run: interrupted"), "{said}");
    assert_eq!(found[0], shown, "{said}");
    let written = json_of(&record);
    let ladders = written["content"]["ladders"].as_array().expect("ladders");
    let rungs: usize = ladders.iter().map(|ladder| ladder["rungs"].as_array().map_or(0, Vec::len)).sum();
    assert_eq!(rungs, found[0]);
}

#[test]
fn mutants() {
    // While the kernels as they are go through the trials.
    let text = said(&["mutants", "--only", "swizzle"], A_WHILE);
    let found = numbers(&text, " not run: interrupted");
    assert!(found[0] == 0 && found[1] > 0, "{text}");
}

#[test]
fn profile() {
    let scratch = Scratch::new("profile");
    let record = scratch.file("profile.json");
    let file = text(&record);
    let shapes = ["--shape", "1x1x2048x64"].repeat(20);
    let kernel = "ampere-64x64-2stage-swizzled";
    let arguments = [&["profile", "--kernel", kernel, "--record", file][..], &shapes].concat();
    let said = said(&arguments, AT_ONCE);
    let profiled = said.matches(&format!("\n{kernel} on ")).count();
    assert!((1..20).contains(&profiled), "{said}");
    let written = json_of(&record);
    assert_eq!(written["content"]["rows"].as_array().map(Vec::len), Some(profiled));
}

#[test]
fn an_experiment() {
    let scratch = Scratch::new("experiment");
    let experiment = "title = \"t\"\ndate = \"2026-01-01\"\nhypothesis = \"h\"\npredicted_percent = 0.0\na = \"cpu\"\nb = \"cpu\"\n\
                arguments = [\"--shape\", \"1x4x1024x64\", \"--seconds\", \"600\", \"--minimum\", \"0.001\"]\n\
                conclusion = \"\"\n";
    scratch.write("long.toml", experiment);
    let path = text(scratch.path());
    let output = interrupted_output(&mut flashcore(&["experiments", "run", "long", "--folder", path]), A_WHILE);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert_eq!(said.lines().last(), Some("the comparison was interrupted; `long` stays as it is"), "{said}");
    assert_eq!(scratch.read("long.toml"), experiment);
}

#[test]
fn a_second_ctrl_c_ends_it_at_once() {
    let mut child = flashcore(&["bench", "--backend", "sim", "--shape", "4x16x1024x64"])
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("the command runs");
    wait_until_watching(&child);
    let start = std::time::Instant::now();
    for _ in 0..2 {
        interrupt(&child);
        std::thread::sleep(Duration::from_millis(300));
    }
    assert_eq!(child.wait().expect("it ends").code(), Some(130));
    assert!(start.elapsed() < Duration::from_secs(20));
}
