//! The workbench as a user meets it: verdicts, exit codes, files.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

fn flashcore(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_flashcore")).args(arguments).output().expect("the command runs")
}

fn json(output: &Output) -> Value {
    let said = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}"))
}

/// A folder of one test, empty at first.
fn folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("a folder");
    folder
}

fn text(path: &std::path::Path) -> &str {
    path.to_str().expect("a path of letters")
}

#[test]
fn targets_are_judged() {
    let output = flashcore(&["roofline", "--device", "l4", "--historic", "--format", "json"]);
    assert_eq!(output.status.code(), Some(0));
    let verdicts: Vec<Value> =
        json(&output).as_array().expect("rows").iter().map(|row| row["verdict"].clone()).collect();
    let impossible = verdicts.iter().filter(|verdict| **verdict == "IMPOSSIBLE").count();
    assert_eq!((verdicts.len(), impossible), (11, 3));
    let check = |target: &str, code: i32| {
        let output = flashcore(&["roofline", "--device", "h200", "--target", target]);
        assert_eq!(output.status.code(), Some(code), "{target}");
    };
    check("1x8x512x64@5us", 0);
    check("4x16x2048x128@30us", 1);
    check("4x16x2048x128", 2);
}

#[test]
fn an_unknown_device_is_told_with_the_nearest() {
    let output = flashcore(&["roofline", "--device", "h20"]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        "flashcore: there is no device `h20`; did you mean `h200`? There are l4, l40s, a100, h100, h200, b200, rtx-4090, rtx-5090, this-cpu, this-gpu, all\n"
    );
}

#[test]
fn a_roofline_is_drawn_with_what_was_measured() {
    let folder = folder("roofline");
    let (record, picture) = (folder.join("bench.json"), folder.join("roofline.svg"));
    let bench = ["bench", "--backend", "cpu", "--shape", "1x2x64x32", "--seconds", "0.01", "--record", text(&record)];
    assert_eq!(flashcore(&bench).status.code(), Some(0));
    let output = flashcore(&[
        "roofline",
        "--device",
        "this-cpu",
        "--dtype",
        "f32",
        "--shape",
        "1x2x64x32",
        "--record",
        text(&record),
        "--svg",
        text(&picture),
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let picture = fs::read_to_string(picture).expect("a picture");
    // Two floors of one problem, two measured masks of it, and three dots of the legend.
    assert_eq!(picture.matches("<circle").count(), 7);
}

#[test]
fn a_clear_difference_is_found_and_written_down() {
    let folder = folder("compare");
    let record = folder.join("compare.json");
    let small = ["--shape", "1x1x64x32", "--seconds", "20"];
    let output = flashcore(
        &[&["compare", "cpu", "cpu", "--slow-b", "60", "--format", "json", "--record", text(&record)], &small[..]]
            .concat(),
    );
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stdout));
    assert_eq!(json(&output)[0]["verdict"], "SLOWER");
    let written: Value = serde_json::from_str(&fs::read_to_string(&record).expect("a record")).expect("JSON");
    assert_eq!((written["schema"].as_u64(), written["kind"].as_str()), (Some(2), Some("comparison")));
    let row = &written["content"]["rows"][0];
    assert_eq!(row["conclusion"]["finding"], "SLOWER");
    assert_eq!(row["rounds"].as_array().map(Vec::len), row["b"]["hot_seconds"].as_array().map(Vec::len));
    let expected = [&["compare", "cpu", "cpu", "--slow-b", "60", "--expect", "slower"], &small[..]].concat();
    assert_eq!(flashcore(&expected).status.code(), Some(0));
}

#[test]
fn too_little_time_is_ambiguous() {
    let output = flashcore(&["compare", "cpu", "cpu", "--shape", "1x1x64x32", "--seconds", "0"]);
    assert_eq!(output.status.code(), Some(4), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn programs_are_compared_in_processes_of_their_own() {
    let program = format!("bin:{}", env!("CARGO_BIN_EXE_flashcore"));
    let output = flashcore(&["compare", &program, "cpu", "--shape", "1x1x64x32", "--seconds", "3", "--format", "json"]);
    let rounds = json(&output)[0]["rounds"].as_f64();
    assert!(rounds.is_some_and(|rounds| rounds >= 40.0), "{rounds:?}");
    // A program that is none of ours.
    let output = flashcore(&["compare", "bin:/bin/true", "cpu", "--shape", "1x1x64x32"]);
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        "flashcore: /bin/true: it is no worker; builds from before `flashcore compare` cannot be compared. It said: nothing\n"
    );
    assert_eq!(output.status.code(), Some(3));
}

#[test]
fn a_record_of_another_schema_is_refused() {
    let folder = folder("schema");
    let old = folder.join("old.json");
    fs::write(&old, r#"{"schema": 1, "rows": []}"#).expect("a file");
    let output = flashcore(&["compare", text(&old), text(&old)]);
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        format!(
            "flashcore: {}: its schema is 1 and this program reads 2; make it anew with `flashcore bench --record FILE`\n",
            old.display()
        )
    );
    assert_eq!(output.status.code(), Some(2));
}

/// A bench record as a release build of a commit would have made it.
fn published(record: &std::path::Path) {
    let text = fs::read_to_string(record).expect("a record");
    let mut value: Value = serde_json::from_str(&text).expect("JSON");
    value["origin"]["build"] = serde_json::json!({
        "version": "0.1.0", "commit": "0123456789abcdef0123456789abcdef01234567", "dirty": false, "profile": "release",
    });
    fs::write(record, value.to_string()).expect("a file");
}

#[test]
fn a_leaderboard_admits_checks_and_refuses() {
    let folder = folder("leaderboard");
    let (record, board) = (folder.join("bench.json"), folder.join("leaderboard.json"));
    let bench = ["bench", "--backend", "cpu", "--shape", "1x2x64x32", "--seconds", "0.05", "--record", text(&record)];
    assert_eq!(flashcore(&bench).status.code(), Some(0));
    let leaderboard = |arguments: &[&str]| {
        flashcore(&[&["leaderboard", "--file", text(&board)], arguments, &["--experiments", text(&folder)]].concat())
    };
    // Tests are debug builds.
    let refused = leaderboard(&["promote", text(&record)]);
    assert_eq!(refused.status.code(), Some(1));
    let said = String::from_utf8_lossy(&refused.stdout).into_owned();
    assert!(said.starts_with("REFUSED the record comes from a debug build"), "{said}");
    assert!(!board.exists());
    published(&record);
    assert_eq!(leaderboard(&["promote", text(&record)]).status.code(), Some(0));
    assert_eq!(leaderboard(&["promote", text(&record)]).status.code(), Some(1), "it is there already");
    assert_eq!(leaderboard(&["check", text(&record)]).status.code(), Some(0));
    // The same record with every time doubled.
    let slow = folder.join("slow.json");
    let mut value: Value = serde_json::from_str(&fs::read_to_string(&record).expect("a record")).expect("JSON");
    for row in value["content"]["rows"].as_array_mut().expect("rows") {
        for time in row["hot_seconds"].as_array_mut().expect("times") {
            *time = (time.as_f64().expect("a time") * 2.0).into();
        }
    }
    fs::write(&slow, value.to_string()).expect("a file");
    let checked = leaderboard(&["check", text(&slow), "--format", "json"]);
    assert_eq!(checked.status.code(), Some(1));
    assert_eq!(json(&checked)[0]["verdict"], "REGRESSION");
    let picture = folder.join("history.svg");
    assert_eq!(leaderboard(&["history", "--svg", text(&picture)]).status.code(), Some(0));
    assert_eq!(fs::read_to_string(picture).expect("a picture").matches("<circle").count(), 2);
}

#[test]
fn an_experiment_is_written_shown_and_repeated() {
    let folder = folder("experiments");
    let (record, files) = (folder.join("compare.json"), folder.join("experiments"));
    let compare = [
        "compare",
        "cpu",
        "cpu",
        "--slow-b",
        "60",
        "--shape",
        "1x1x64x32",
        "--seconds",
        "20",
        "--record",
        text(&record),
    ];
    assert_eq!(flashcore(&compare).status.code(), Some(1));
    let experiments = |arguments: &[&str]| {
        flashcore(&[&["experiments"], arguments, &["--folder", text(&files), "--format", "json"]].concat())
    };
    let new =
        ["new", "waiting", "--from", text(&record), "--predicted", "-5", "--hypothesis", "Waiting makes it faster"];
    let written = experiments(&new);
    assert_eq!(written.status.code(), Some(0), "{}", String::from_utf8_lossy(&written.stderr));
    assert_eq!(json(&experiments(&["list"]))[0]["outcome"], "negative");
    assert_eq!(experiments(&new).status.code(), Some(2), "the name is taken");
    let again = flashcore(&["experiments", "run", "waiting", "--folder", text(&files)]);
    let said = String::from_utf8_lossy(&again.stdout).into_owned();
    assert!(said.ends_with("outcome then: negative; now: negative\n"), "{said}");
    assert_eq!(again.status.code(), Some(0));
    let misspelt = experiments(&["show", "wating"]);
    assert_eq!(
        String::from_utf8_lossy(&misspelt.stderr),
        "flashcore: there is no experiment `wating`; did you mean `waiting`? There are waiting\n"
    );
    let evidence = files.join("waiting.json");
    fs::write(&evidence, fs::read_to_string(&evidence).expect("evidence") + " ").expect("a file");
    assert_eq!(experiments(&["show", "waiting"]).status.code(), Some(1), "its evidence has changed");
}
