//! Success that is none: a verdict outlives whoever reads it, and nothing run is nothing passed.

use std::process::{Command, Stdio};

use crate::scratch::Scratch;
use serde_json::{Value, json};

/// Exit code and standard error of a command whose reader is gone before the first word.
fn unread(command: &mut Command) -> (Option<i32>, String) {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command runs");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("it ends");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn a_verdict_outlives_its_reader() {
    let scratch = Scratch::new("unread");
    let verify = ["verify", "--backend", "cpu", "--shape", "1x1x5x8", "--record", "verify.json"];
    assert_eq!(scratch.run(&verify).status.code(), Some(0));
    let mut record: Value = serde_json::from_str(&scratch.read("verify.json")).expect("JSON");
    record["content"]["failed"] = json!([{"case": "cpu", "complaints": ["wrong"], "repeat": "flashcore verify"}]);
    scratch.write("verify.json", record.to_string());
    scratch.write("none.tar.gz", "none");
    scratch.write("gates.toml", "[[gate]]\nmetric = \"shared bank conflicts\"\nmost = 0\n");
    let check = |arguments: &[&str], code: i32| {
        assert_eq!(scratch.run(arguments).status.code(), Some(code), "{arguments:?}, read");
        assert_eq!(unread(&mut scratch.command(arguments)), (Some(code), String::new()), "{arguments:?}, not read");
    };
    check(&["ptx"], 0);
    check(&["roofline", "--device", "h200", "--target", "1x8x512x64@5us"], 0);
    check(&["roofline", "--device", "h200", "--target", "4x16x2048x128@30us"], 1);
    check(&["repro", "--replay", "none.tar.gz"], 1);
    check(&["status", "--results", ".", "--experiments", "."], 1);
    check(&["verify", "--backend", "cpu", "--shape", "1x1x5x8"], 0);
    let plain = ["profile", "--import", "none", "--kernel", "ampere-64x64-2stage-plain"];
    assert_eq!(scratch.run(&plain).status.code(), Some(2));
    let compare = ["compare", "cpu", "cpu", "--shape", "1x1x64x32", "--seconds", "0"];
    check(&compare, 4);
    check(&[&compare[..], &["--expect", "same"]].concat(), 1);
}

#[test]
fn a_record_is_written_though_nobody_reads() {
    let scratch = Scratch::new("unread-record");
    let verify = ["verify", "--backend", "cpu", "--shape", "1x1x5x8", "--record", "verify.json"];
    assert_eq!(unread(&mut scratch.command(&verify)), (Some(0), String::new()));
    let record: Value = serde_json::from_str(&scratch.read("verify.json")).expect("JSON");
    assert_eq!(record["content"]["passed"], 1);
}

/// Words that cannot be written for another reason are an error.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_error() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("Linux has it");
    let scratch = Scratch::new("full-stdout");
    let output = scratch.command(&["ptx"]).stdout(full).output().expect("the command runs");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "flashcore: No space left on device (os error 28)\n");
    assert_eq!(output.status.code(), Some(3));
}

#[test]
fn nothing_run_is_nothing_passed() {
    let scratch = Scratch::new("nothing");
    let check = |arguments: &[&str], message: &str| {
        scratch.check(&[&["verify", "--backend", "cpu"], arguments].concat(), 2, &format!("flashcore: {message}\n"));
    };
    check(&["--fuzz", "0"], "--fuzz 0: nothing was verified; it takes from 1 to 1000000 cases");
    check(&["--fuzz", "1000001"], "--fuzz 1000001: nothing was verified; it takes from 1 to 1000000 cases");
    check(
        &["--fuzz", "18446744073709551615", "--seed", "5"],
        "--fuzz 18446744073709551615: nothing was verified; it takes from 1 to 1000000 cases",
    );
    check(
        &["--suite", "seeds", "--part", "900/1000"],
        "--part 900/1000: there are 84 cases, so this part has none and nothing was verified",
    );
    check(
        &["--fuzz", "3", "--part", "3/4"],
        "--part 3/4: there are 3 cases, so this part has none and nothing was verified",
    );
    check(&["--suite", "seeds", "--only", "84"], "--only 84: the suite has cases 0 to 83");
    check(
        &["--suite", "edge", "--fuzz", "3"],
        "--fuzz takes the place of a suite; only --suite serving has random cases of its own",
    );
    // The last seed there is, and the one after it.
    assert_eq!(
        scratch.run(&["verify", "--backend", "cpu", "--fuzz", "2", "--seed", "18446744073709551615"]).status.code(),
        Some(0)
    );
}

/// A case of the suite and a random one by the commands that failures print.
#[test]
fn sequences_are_repeated_by_number() {
    let scratch = Scratch::new("serving");
    let verify = ["verify", "--backend", "cpu", "--cpu-level", "portable", "--suite", "serving"];
    let said = |arguments: &[&str]| {
        let output = scratch.run(&[&verify, arguments].concat());
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let case = said(&["--only", "30"]);
    assert_eq!((case.matches("+pages=").count(), case.lines().last()), (1, Some("cpu portable: 1 passed, 0 failed")));
    let random = said(&["--fuzz", "1", "--seed", "7"]);
    assert_eq!((random.matches(" seed 7 ").count(), random.lines().last()), (1, case.lines().last()));
}
