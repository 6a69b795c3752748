//! The workbench as a user meets it: verdicts, exit codes, files.

use std::fs;
use std::path::Path;
use std::process::Output;

use flashcore_bench::lab::problems::BenchSuite;
use flashcore_bench::lab::profile::DEFINITIONS;
use flashcore_bench::util::digest::sha256_of_numbers;
use flashcore_problem::DType;
use serde_json::Value;

use crate::scratch::{Scratch, flashcore, json, json_of, text};

#[test]
fn targets_are_judged() {
    let output = flashcore(&["roofline", "--device", "l4", "--historic", "--format", "json"]);
    assert_eq!(output.status.code(), Some(0));
    // No target needs more than the peak and is possible, and there are some of either kind.
    let rows = json(&output);
    let rows = rows.as_array().expect("rows");
    let is_impossible = |row: &&Value| row["verdict"] == "IMPOSSIBLE";
    for row in rows {
        let percent = row["part_of_peak_percent"].as_f64().unwrap_or_else(|| panic!("{row}"));
        assert!(percent <= 100.0 || is_impossible(&row), "{row}");
    }
    let impossible = rows.iter().filter(is_impossible).count();
    assert!((1..rows.len()).contains(&impossible), "{impossible} of {}", rows.len());
    let check = |target: &str, code: i32| {
        let output = flashcore(&["roofline", "--device", "h200", "--target", target]);
        assert_eq!(output.status.code(), Some(code), "{target}");
    };
    check("1x8x512x64@5us", 0);
    check("4x16x2048x128@30us", 1);
    check("4x16x2048x128", 2);
}

/// The targets of the project's history are judged for whoever asks for them.
#[test]
fn the_history_is_judged_when_asked_for() {
    let judged = |arguments: &[&str]| {
        let output = flashcore(&[&["roofline"], arguments].concat());
        assert_eq!(output.status.code(), Some(0), "{arguments:?}");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        (said.contains("cold floor us"), said.contains("IMPOSSIBLE"))
    };
    assert_eq!(judged(&["--device", "l4"]), (true, false));
    assert_eq!(judged(&["--device", "l4", "--historic"]), (true, true));
    assert_eq!(judged(&["--device", "h200"]), (true, false));
    assert_eq!(judged(&["--device", "h200", "--historic"]), (true, true));
}

/// Without a device it is the one of this machine, and no floor is shown as nothing.
#[test]
fn the_roofline_of_this_machine_is_the_default() {
    let rows = json(&flashcore(&["roofline", "--format", "json"]));
    assert_eq!((&rows[0]["device"], &rows[0]["dtype"]), (&Value::from("this-cpu"), &Value::from("f32")));
    let tiny = flashcore(&["roofline", "--device", "b200", "--shape", "1x2x64x64", "--format", "csv"]);
    let text = String::from_utf8_lossy(&tiny.stdout).into_owned();
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split(',').collect()).collect();
    let floor = lines[0].iter().position(|key| *key == "hot_floor_us").expect("a column");
    assert_eq!(lines[1][floor], "0.0037");
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
fn an_unknown_kernel_is_told_with_the_nearest() {
    let output = flashcore(&["profile", "--kernel", "ampere-64x64-2stage-swizled"]);
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.ends_with("; did you mean `ampere-64x64-2stage-swizzled`?\n"), "{said}");
}

#[test]
fn a_roofline_is_drawn_with_what_was_measured() {
    let folder = Scratch::new("roofline");
    let (record, picture) = (folder.file("bench.json"), folder.file("roofline.svg"));
    let bench = ["bench", "--backend", "cpu", "--shape", "1x2x64x32", "--seconds", "0.01", "--record", text(&record)];
    assert_eq!(flashcore(&bench).status.code(), Some(0));
    let dots = |arguments: &[&str]| {
        let roofline = ["roofline", "--device", "this-cpu", "--dtype", "f32", "--shape", "1x2x64x32", "--svg"];
        let output = flashcore(&[&roofline[..], &[text(&picture)], arguments].concat());
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        fs::read_to_string(&picture).expect("a picture").matches("<circle").count()
    };
    // One for each row of the record, and one in the legend.
    let rows = json_of(&record)["content"]["rows"].as_array().map_or(0, Vec::len);
    assert_eq!(dots(&["--record", text(&record)]), dots(&[]) + rows + 1);
}

#[test]
fn a_clear_difference_is_found_and_written_down() {
    let folder = Scratch::new("compare");
    let record = folder.file("compare.json");
    let small = ["--shape", "1x1x64x32", "--seconds", "20"];
    let output = flashcore(
        &[&["compare", "cpu", "cpu", "--slow-b", "60", "--format", "json", "--record", text(&record)], &small[..]]
            .concat(),
    );
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stdout));
    assert_eq!(json(&output)[0]["verdict"], "SLOWER");
    let written = json_of(&record);
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
        "flashcore: /bin/true: it does not answer as a build of flashcore with `compare` does, so it cannot be compared; it said: nothing\n"
    );
    assert_eq!(output.status.code(), Some(3));
}

#[test]
fn a_record_of_another_schema_is_refused() {
    let folder = Scratch::new("schema");
    let old = folder.file("old.json");
    fs::write(&old, r#"{"schema": 1, "rows": []}"#).expect("a file");
    let output = flashcore(&["compare", text(&old), text(&old)]);
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        format!(
            "flashcore: {}: it has schema 1, and this program reads schema 2; write a new one with `flashcore bench --record FILE`\n",
            old.display()
        )
    );
    assert_eq!(output.status.code(), Some(2));
}

/// A bench record as a release build of a commit would have made it on a machine at rest: the times are made, since a
/// test of the verdicts is not a test of how quiet the machine is that runs it.
fn published(record: &Path) {
    let mut value = json_of(record);
    value["origin"]["build"] = serde_json::json!({
        "version": "0.1.0", "commit": "0123456789abcdef0123456789abcdef01234567", "dirty": false, "profile": "release",
    });
    value["origin"]["machine"]["state"] = serde_json::json!([["load average", "0.50"]]);
    for row in value["content"]["rows"].as_array_mut().expect("rows") {
        let times: Vec<f64> = (0..40).map(|sample| 1e-3 * (1.0 + 0.001 * f64::from(sample % 7))).collect();
        row["samples_sha256"] = sha256_of_numbers(&times).into();
        row["hot_seconds"] = times.into();
    }
    fs::write(record, value.to_string()).expect("a file");
}

#[test]
fn a_leaderboard_admits_checks_and_refuses() {
    let folder = Scratch::new("leaderboard");
    let (record, board) = (folder.file("bench.json"), folder.file("leaderboard.json"));
    let bench = ["bench", "--backend", "cpu", "--shape", "1x2x64x32", "--seconds", "0.05", "--record", text(&record)];
    assert_eq!(flashcore(&bench).status.code(), Some(0));
    let leaderboard = |arguments: &[&str]| flashcore(&[&["leaderboard", "--file", text(&board)], arguments].concat());
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
    let slow = folder.file("slow.json");
    let mut value = json_of(&record);
    for row in value["content"]["rows"].as_array_mut().expect("rows") {
        for time in row["hot_seconds"].as_array_mut().expect("times") {
            *time = (time.as_f64().expect("a time") * 2.0).into();
        }
    }
    fs::write(&slow, value.to_string()).expect("a file");
    let checked = leaderboard(&["check", text(&slow), "--format", "json"]);
    assert_eq!(checked.status.code(), Some(1));
    assert_eq!(json(&checked)[0]["verdict"], "REGRESSION");
    let picture = folder.file("history.svg");
    assert_eq!(leaderboard(&["history", "--svg", text(&picture)]).status.code(), Some(0));
    let rows = value["content"]["rows"].as_array().map_or(0, Vec::len);
    assert_eq!(fs::read_to_string(picture).expect("a picture").matches("<circle").count(), rows);
}

#[test]
fn an_experiment_is_written_shown_and_repeated() {
    let folder = Scratch::new("experiments");
    let (record, files) = (folder.file("compare.json"), folder.file("experiments"));
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
    assert!(said.ends_with("recorded outcome: negative; outcome now: negative\n"), "{said}");
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

#[test]
fn a_bundle_is_repeated_and_a_changed_one_is_refused() {
    let folder = Scratch::new("repro");
    let bundle = folder.file("bundle.tar.gz");
    let made = flashcore(&["repro", "--backend", "cpu", "--seconds", "0.01", "--out", text(&bundle)]);
    assert_eq!(made.status.code(), Some(0), "{}", String::from_utf8_lossy(&made.stderr));
    let replay = |file: &Path| flashcore(&["repro", "--replay", text(file), "--seconds", "0.01"]);
    let repeated = replay(&bundle);
    let said = String::from_utf8_lossy(&repeated.stdout).into_owned();
    assert_eq!(repeated.status.code(), Some(0), "{said}");
    // Every problem is computed to the same bits.
    let problems = BenchSuite::Quick.problems(DType::F32).len();
    assert_eq!(said.matches("the same bits").count(), problems, "{said}");
    let bytes = fs::read(&bundle).expect("a bundle");
    let changed = folder.file("changed.tar.gz");
    for place in [4, bytes.len() / 2, bytes.len() - 30] {
        let mut other = bytes.clone();
        other[place] ^= 1;
        fs::write(&changed, other).expect("a file");
        let refused = replay(&changed);
        assert_eq!(refused.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&refused.stdout).starts_with("REFUSED "), "byte {place}");
    }
}

#[test]
fn a_page_is_written_of_what_there_is() {
    let folder = Scratch::new("report");
    let (record, page) = (folder.file("bench.json"), folder.file("report.html"));
    let bench = ["bench", "--backend", "cpu", "--shape", "1x2x64x32", "--seconds", "0.01", "--record", text(&record)];
    assert_eq!(flashcore(&bench).status.code(), Some(0));
    let report = |file: &str| {
        flashcore(&[
            "report",
            file,
            "--errors",
            "cpu",
            "--errors-shape",
            "1x1x64x32",
            "--out",
            text(&page),
            "--experiments",
            text(folder.path()),
            "--leaderboard",
            "none",
        ])
    };
    let written = report(text(&record));
    assert_eq!(written.status.code(), Some(0), "{}", String::from_utf8_lossy(&written.stderr));
    // Times, roofline, errors.
    assert_eq!(fs::read_to_string(&page).expect("a page").matches("<figure>").count(), 3);
    let wrong = folder.file("wrong.json");
    fs::write(&wrong, r#"{"schema": 2, "kind": "manifest"}"#).expect("a file");
    assert_eq!(
        String::from_utf8_lossy(&report(text(&wrong)).stderr),
        format!(
            "flashcore: {}: this is the manifest of a bundle; `flashcore repro --replay` reads the whole bundle, which has \
             a page of its own\n",
            wrong.display()
        )
    );
}

#[test]
fn a_profile_without_a_gpu_is_from_the_simulator() {
    let folder = Scratch::new("profile");
    let gates = folder.file("gates.toml");
    fs::write(&gates, "[[gate]]\nmetric = \"shared bank conflicts\"\nmost = 0\n").expect("a file");
    let profile = |layout: &str| {
        let kernel = format!("ampere-64x64-2stage-{layout}");
        let arguments = ["profile", "--shape", "1x1x64x64", "--kernel", &kernel, "--gates", text(&gates)];
        flashcore(&[&arguments[..], &["--format", "json"]].concat())
    };
    let gate = |output: &Output| {
        let rows = json(output);
        let row = rows.as_array().expect("rows").iter().find(|row| row["metric"] == "shared bank conflicts").cloned();
        row.expect("a row")["gate"].clone()
    };
    let swizzled = profile("swizzled");
    assert_eq!(gate(&swizzled), "ok: 0 in the simulator, allowed is at most 0");
    assert_eq!(swizzled.status.code(), Some(0));
    let plain = profile("plain");
    let failed = gate(&plain).as_str().expect("text").to_owned();
    assert!(failed.starts_with("FAILED: ") && failed.ends_with(" in the simulator, allowed is at most 0"), "{failed}");
    assert_eq!(plain.status.code(), Some(1), "the plain layout has conflicts");
    fs::write(&gates, "[[gate]]\nmetric = \"shared bank conflict\"\nmost = 0\n").expect("a file");
    let unknown = profile("plain");
    let metrics: Vec<&str> =
        DEFINITIONS.iter().map(|definition| definition.name).chain(["sectors per request"]).collect();
    let expected = format!(
        "flashcore: {}, line 2: there is no metric `shared bank conflict`; did you mean `shared bank conflicts`? There are {}\n",
        gates.display(),
        metrics.join(", ")
    );
    assert_eq!(String::from_utf8_lossy(&unknown.stderr), expected);
    assert_eq!(unknown.status.code(), Some(2));
}

#[test]
fn the_status_follows_from_the_records() {
    let folder = Scratch::new("status");
    let record = folder.file("verify.json");
    let verify = ["verify", "--backend", "cpu", "--shape", "1x1x5x8", "--record", text(&record)];
    assert_eq!(flashcore(&verify).status.code(), Some(0));
    let status = flashcore(&[
        "status",
        "--results",
        text(folder.path()),
        "--experiments",
        text(folder.path()),
        "--format",
        "json",
    ]);
    assert_eq!(status.status.code(), Some(0));
    let rows = json(&status);
    let state = |what: &str| {
        let rows = rows.as_array().expect("rows");
        rows.iter().find(|row| row["what"] == what).map(|row| row["state"].clone())
    };
    assert_eq!(state("verified on a CPU"), Some("done".into()));
    assert_eq!(state("verified on a GPU"), Some("missing".into()));
    let strict =
        flashcore(&["status", "--results", text(folder.path()), "--experiments", text(folder.path()), "--strict"]);
    assert_eq!(strict.status.code(), Some(1));
}

#[test]
fn every_command_has_help_with_examples_and_completions_know_it() {
    let help = String::from_utf8(flashcore(&["--help"]).stdout).expect("text");
    let under = |heading: &str| -> Vec<&str> {
        let lines = help.lines().skip_while(|line| *line != heading).skip(1).take_while(|line| !line.is_empty());
        lines.filter_map(|line| line.strip_prefix("  ")?.split(' ').next().filter(|name| !name.is_empty())).collect()
    };
    let commands = [under("Commands:"), under("Commands for the development of flashcore:")].concat();
    assert!(commands.contains(&"bench") && commands.contains(&"mutants"), "{commands:?}");
    let completions = String::from_utf8(flashcore(&["completions", "bash"]).stdout).expect("text");
    for command in commands {
        let help = String::from_utf8(flashcore(&[command, "--help"]).stdout).expect("text");
        let has_line = |text: &str, wanted: &[&str]| text.lines().any(|line| wanted.contains(&line.trim()));
        assert!(has_line(&help, &["Examples:", "Example:"]), "`flashcore {command} --help` has no example");
        assert!(has_line(&completions, &[&format!("flashcore,{command})")]), "{command} cannot be completed");
    }
}

#[cfg(unix)]
#[test]
fn ctrl_c_leaves_a_complete_record_of_what_was_finished() {
    let folder = Scratch::new("interrupt");
    let record = folder.file("bench.json");
    let bench = ["bench", "--backend", "cpu", "--suite", "seeds", "--seconds", "0.5", "--record", "bench.json"];
    // Longer than it takes to watch for Ctrl-C, and shorter than the suite.
    let status = crate::interrupted::interrupted(&mut folder.command(&bench), 4);
    assert_eq!(status.code(), Some(130));
    let written = json_of(&record);
    let rows = written["content"]["rows"].as_array().expect("rows").len();
    assert!((1..16).contains(&rows), "{rows} rows");
    // Nothing half-written is left beside it.
    assert_eq!(folder.names(), ["bench.json"]);
}
