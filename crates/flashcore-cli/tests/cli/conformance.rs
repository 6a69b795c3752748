//! `flashcore conformance` as a user meets it on a machine without a GPU.

use std::path::Path;
use std::process::Output;

use flashcore_bench::testkit::conformance::{Header, OutputRecord, Record, SimExecutor, conduct};

use crate::scratch::{Scratch, flashcore, json, no_gpu, text};

fn replay(record: &Path, options: &[&str]) -> Output {
    flashcore(&[&["conformance", "--replay", text(record)], options].concat())
}

fn check(output: &Output, code: i32, standard_error: &str) {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    // A slow machine hears how far it is: `236/951 Min s32`.
    let is_progress = |line: &&str| line.starts_with(|first: char| first.is_ascii_digit());
    let complaints: String = said.split_inclusive('\n').filter(|line| !is_progress(line)).collect();
    assert_eq!(complaints, standard_error);
    assert_eq!(output.status.code(), Some(code));
}

#[test]
fn without_a_gpu_there_is_nothing_to_record() {
    let scratch = Scratch::new("no-record");
    let output = scratch.run(&["conformance", "--record", "record.json"]);
    let reason = no_gpu();
    // Not the driver's advice to compute on the CPU, which conforms to nothing.
    let reason = reason.split(" (tried ").next().expect("a reason");
    let advice = "run this where there is a GPU, or compare the simulator with the record of one: flashcore conformance --replay results/conformance/h200.json";
    check(&output, 3, &format!("flashcore: {reason}; {advice}\n"));
    assert!(scratch.names().is_empty());
}

#[test]
fn what_is_no_record_is_refused() {
    let nowhere = "flashcore: cannot read /nowhere.json: No such file or directory (os error 2); --replay needs a record of `flashcore conformance --record`\n";
    check(&flashcore(&["conformance", "--replay", "/nowhere.json"]), 2, nowhere);
    let scratch = Scratch::new("conformance");
    let later = scratch.write("schema.json", "{\"schema\": 99}");
    let message = format!(
        "flashcore: {}: the record has schema 99, this program knows 1; \
         make a new one with `flashcore conformance` on the device\n",
        later.display()
    );
    check(&replay(&later, &[]), 2, &message);
    assert_eq!(replay(&scratch.write("text.json", "not JSON"), &[]).status.code(), Some(2));
}

/// A record that the simulator wrote stands in for that of a GPU: it agrees, until a result in it is another.
#[test]
fn a_record_is_replayed() {
    let header = Header {
        device: "the simulator".to_owned(),
        driver: "none".to_owned(),
        date: "2026-01-01".to_owned(),
        target: "sm_90".to_owned(),
        seed: 3,
    };
    let mut record: Record =
        conduct(header, &SimExecutor { seed: 5, ..SimExecutor::default() }, &mut |_| {}).expect("the suite runs");
    let scratch = Scratch::new("replayed");
    let output = replay(&scratch.write("agreeing.json", record.to_json().expect("JSON")), &[]);
    check(&output, 0, "");
    let lines = String::from_utf8(output.stdout).expect("text");
    let title = "record of the simulator, driver none, sm_90, 2026-01-01, compared with this build's simulator";
    assert_eq!(lines.lines().next(), Some(title));
    let last = lines.lines().last().expect("a summary");
    assert!(last.ends_with(&format!(" {} cases: 0 disagree, 0 not run", record.cases.len())), "{last}");

    let case = record.cases.iter_mut().find(|case| case.name == "Add f16x2").expect("a case");
    case.outputs[0] = OutputRecord::Hash("0".repeat(32));
    record.cases.retain(|case| case.name != "Exit by guard");
    let disagreeing = scratch.write("disagreeing.json", record.to_json().expect("JSON"));
    let output = replay(&disagreeing, &["--format", "json"]);
    check(&output, 1, "");
    let rows = json(&output);
    let verdict = |name: &str| {
        let row = rows.as_array().unwrap().iter().find(|row| row["operation"] == name);
        row.map(|row| row["verdict"].as_str().unwrap().to_owned())
    };
    assert_eq!(verdict("Add").as_deref(), Some("DISAGREES"));
    assert_eq!(verdict("Exit").as_deref(), Some("NOT RUN"));
    assert_eq!(verdict("Mul").as_deref(), Some("agrees"));
}
