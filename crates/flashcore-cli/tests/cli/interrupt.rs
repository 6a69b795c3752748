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
    let notice = "flashcore: stopping, and writing down what is finished; press Ctrl-C again to stop at once\n";
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

#[test]
fn verify() {
    let text = said(&["verify", "--backend", "sim", "--suite", "seeds"], A_WHILE);
    let found = numbers(&text, " not run: interrupted");
    assert!(found.len() == 3 && found[1] == 0 && found[2] > 0, "{text}");
    assert_eq!(found.iter().sum::<usize>(), seeds(Runner::Sim(Kernels::All)).len(), "{text}");
}

#[test]
fn bench_in_the_simulator() {
    let text = said(&["bench", "--backend", "sim", "--shape", "1x1x16x32", "--shape", "1x64x2048x64"], A_WHILE);
    let found = numbers(&text, " not run: interrupted");
    assert!(found.len() == 2 && found.iter().sum::<usize>() == 4 && found[1] >= 2, "{text}");
    // What was finished is in the table.
    assert_eq!(text.lines().count(), found[0] + 2, "{text}");
}

/// A problem whose answer in f64 takes minutes.
const LONG: &str = "1x32x8192x128";

#[test]
fn a_step_of_minutes_is_abandoned() {
    let bench = ["bench", "--backend", "cpu", "--seconds", "0.01", "--shape", "1x1x32x32", "--shape", LONG];
    let scratch = Scratch::new("abandoned");
    let record = scratch.file("record.json");
    let rows = |arguments: &[&str]| {
        let text = said(&[arguments, &["--record", text(&record)]].concat(), A_WHILE);
        (text, json_of(&record)["content"].clone())
    };
    // What was finished is written down.
    let (text, content) = rows(&bench);
    assert_eq!(text.lines().last(), Some("2 measured, 2 not run: interrupted"), "{text}");
    assert_eq!(content["rows"].as_array().map(Vec::len), Some(2));
    let (text, content) = rows(&["verify", "--backend", "cpu", "--shape", LONG, "--dtype", "f32"]);
    assert!(text.ends_with("0 passed, 0 failed, 1 not run: interrupted\n"), "{text}");
    assert_eq!((&content["passed"], &content["is_complete"]), (&0.into(), &false.into()));
    let (text, content) = rows(&["compare", "cpu", "cpu", "--shape", LONG]);
    assert_eq!(text.lines().last(), Some("0 compared, 1 not run: interrupted"), "{text}");
    assert_eq!(content["rows"].as_array().map(Vec::len), Some(0));
    let lengths =
        ["--lengths", "1k,1m", "--queries", "512", "--types", "f32", "--options", "none", "--data", "gaussian"];
    let (_, content) = rows(&[&["accuracy"], &lengths[..]].concat());
    assert!(content["rows"].as_array().is_some_and(|rows| !rows.is_empty()), "{content}");
}

#[test]
fn cases_that_others_judge_are_abandoned() {
    let text = said(&["verify", "--backend", "sim", "--suite", "full", "--jobs", "2"], A_WHILE);
    let found = numbers(&text, " not run: interrupted");
    assert!(found.len() == 3 && found[1] == 0 && found[2] > 0, "{text}");
}

#[test]
fn a_bundle() {
    let scratch = Scratch::new("bundle");
    let folder = text(scratch.path());
    let mut repro =
        flashcore(&["repro", "--backend", "cpu", "--seconds", "60", "--out", text(&scratch.file("b.tar.gz"))]);
    let output = interrupted_output(repro.env("TMPDIR", folder), A_WHILE);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert_eq!(said.lines().last(), Some("stopped; no bundle is written"), "{said}");
    // Its folder goes with it.
    assert_eq!(scratch.names(), [""; 0]);
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
    let shapes = ["--shape", "1x1x512x64"].repeat(400);
    let kernel = "ampere-64x64-2stage-swizzled";
    let arguments = [&["profile", "--kernel", kernel, "--record", file][..], &shapes].concat();
    let said = said(&arguments, A_WHILE);
    let profiled = said.matches(&format!("\n{kernel} on ")).count();
    assert!(profiled < 400, "{said}");
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
