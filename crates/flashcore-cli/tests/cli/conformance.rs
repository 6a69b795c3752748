//! `flashcore conformance` as a user meets it on a machine without a GPU.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use flashcore_bench::testkit::conformance::{Header, OutputRecord, Record, SimExecutor, conduct};
use flashcore_cuda::{CudaError, Driver};
use serde_json::Value;

/// A file of one test, removed with it.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str, text: &str) -> Self {
        let file = std::env::temp_dir().join(format!("flashcore-conformance-{name}-{}.json", std::process::id()));
        fs::write(&file, text).expect("written");
        Self(file)
    }

    fn replay(&self, options: &[&str]) -> Output {
        let file = self.0.to_str().expect("text");
        flashcore(&[&["conformance", "--replay", file], options].concat())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn flashcore(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flashcore"));
    // Also where there is a GPU.
    command.args(arguments).env("CUDA_VISIBLE_DEVICES", "").output().expect("the command runs")
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
    let message = Driver::load().err().unwrap_or(CudaError::NoDevice).to_string();
    let file = std::env::temp_dir().join(format!("flashcore-conformance-none-{}.json", std::process::id()));
    let arguments = ["conformance", "--record", file.to_str().expect("text")];
    check(&flashcore(&arguments), 3, &format!("flashcore: {message}\n"));
    assert!(!file.exists());
}

#[test]
fn what_is_no_record_is_refused() {
    let nowhere = "flashcore: cannot read /nowhere.json: No such file or directory (os error 2); --replay needs a record of `flashcore conformance --record`\n";
    check(&flashcore(&["conformance", "--replay", "/nowhere.json"]), 2, nowhere);
    let later = Scratch::new("schema", "{\"schema\": 99}");
    let message = format!(
        "flashcore: {}: the record has schema 99, this program knows 1; \
         make a new one with `flashcore conformance` on the device\n",
        later.0.display()
    );
    check(&later.replay(&[]), 2, &message);
    let text = Scratch::new("text", "not JSON");
    assert_eq!(text.replay(&[]).status.code(), Some(2));
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
    let mut record: Record = conduct(header, &SimExecutor { seed: 5 }, &mut |_| {}).expect("the suite runs");
    let agreeing = Scratch::new("agreeing", &record.to_json().expect("JSON"));
    let output = agreeing.replay(&[]);
    check(&output, 0, "");
    let lines = String::from_utf8(output.stdout).expect("text");
    let title = "record of the simulator, driver none, sm_90, 2026-01-01, compared with this build's simulator";
    assert_eq!(lines.lines().next(), Some(title));
    let last = lines.lines().last().expect("a summary");
    assert!(last.ends_with(&format!(" {} cases: 0 disagree, 0 not run", record.cases.len())), "{last}");

    let case = record.cases.iter_mut().find(|case| case.name == "Add f16x2").expect("a case");
    case.outputs[0] = OutputRecord::Hash("0".repeat(32));
    record.cases.retain(|case| case.name != "Exit by guard");
    let output = Scratch::new("disagreeing", &record.to_json().expect("JSON")).replay(&["--format", "json"]);
    check(&output, 1, "");
    let rows: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let verdict = |name: &str| {
        let row = rows.as_array().unwrap().iter().find(|row| row["operation"] == name);
        row.map(|row| row["verdict"].as_str().unwrap().to_owned())
    };
    assert_eq!(verdict("Add").as_deref(), Some("DISAGREES"));
    assert_eq!(verdict("Exit").as_deref(), Some("NOT RUN"));
    assert_eq!(verdict("Mul").as_deref(), Some("agrees"));
}
