//! Files that somebody else has written: bundles, records, tensors, and what lies in the folder for temporary files.

use std::io::{BufRead, BufReader};
use std::process::{Output, Stdio};

use crate::scratch::Scratch;
use flashcore_bench::lab::record::{Build, Machine, Origin, ProblemKey, Record};
use flashcore_bench::lab::repro::{CaseEntry, FileEntry, KernelEntry, MANIFEST, Manifest, inputs_sha256, pack};
use flashcore_bench::util::digest::sha256;
use flashcore_bench::util::printable::printable_json;
use flashcore_cpu::Level;
use flashcore_problem::{DType, Inputs, Outputs, Problem};
use serde_json::Value;

/// Text that a terminal would obey: the title, the screen, a colour, a control sequence in one character, text from right to
/// left, and a line that another could be taken for.
const HOSTILE: &str = "x\u{1b}]0;owned\u{7}\u{1b}[2J\u{9b}31m\u{202e}\r\n28 agree\u{7f}";
/// The text above, as it is shown.
const SHOWN: &str = r"x\u{1b}]0;owned\u{7}\u{1b}[2J\u{9b}31m\u{202e}\r\n28 agree\u{7f}";

/// The parts of a bundle of one case.
struct Bundle {
    origin: Origin,
    manifest: Manifest,
}

impl Bundle {
    fn new() -> Self {
        let problem = Problem::new(1, 2, 40, 16, DType::F32);
        let (inputs, mut outputs) = (Inputs::random(&problem, 5), Outputs::poisoned(&problem));
        flashcore_cpu::attend_with(Level::Portable, &problem, &inputs, &mut outputs).expect("every machine has it");
        let case = CaseEntry {
            backend: "cpu".to_owned(),
            kernel: "portable".to_owned(),
            problem: ProblemKey::of(&problem),
            seed: 5,
            inputs_sha256: inputs_sha256(&inputs),
            output_sha256: sha256(&outputs.output.data),
            output_file: None,
            median_seconds: 1.0,
        };
        let build = Build {
            version: "0.1.0".to_owned(),
            commit: Some("0123456789abcdef".to_owned()),
            dirty: false,
            profile: "release".to_owned(),
        };
        let machine = Machine { device: "Test processor".to_owned(), ..Machine::cpu("portable", 1, None) };
        let origin = Origin { build, command: "flashcore repro".to_owned(), time: "2026-11-16".to_owned(), machine };
        let manifest = Manifest {
            commands: vec![],
            left_out: vec![],
            environment: Value::Null,
            cases: vec![case],
            kernels: vec![],
            files: vec![FileEntry::of("a", b"hello")],
        };
        Self { origin, manifest }
    }

    /// Writes it, and has it repeated.
    fn replay(self, scratch: &Scratch) -> Output {
        let manifest = Record::new(self.origin, self.manifest).to_json().into_bytes();
        let files = vec![(MANIFEST.to_owned(), manifest), ("a".to_owned(), b"hello".to_vec())];
        scratch.write("bundle.tar.gz", pack(&files).expect("a bundle"));
        scratch.run(&["repro", "--replay", "bundle.tar.gz", "--seconds", "0"])
    }
}

fn said(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("text");
    (text(&output.stdout), text(&output.stderr))
}

fn check_printable(text: &str) {
    let wrong = |letter: &char| letter.is_control() && *letter != '\n' || *letter == '\u{202e}';
    assert_eq!(text.chars().find(wrong), None, "{text:?}");
    assert!(!text.lines().any(|line| line.starts_with("28 agree")), "{text:?}");
}

#[test]
fn bundles_that_make_no_sense_are_refused_or_not_repeated() {
    let scratch = Scratch::new("bundles");
    let check = |change: &dyn Fn(&mut Bundle), code: i32, last_line: &str| {
        let mut bundle = Bundle::new();
        change(&mut bundle);
        let output = bundle.replay(&scratch);
        let (out, error) = said(&output);
        let line = out.lines().chain(error.lines()).last().unwrap_or_default();
        assert_eq!(line, last_line);
        assert_eq!(output.status.code(), Some(code), "{out}{error}");
    };
    check(&|_| {}, 0, "2 agree, 0 disagree, 1 cannot be checked on this machine");
    let shape =
        |shape: &'static str| move |bundle: &mut Bundle| bundle.manifest.cases[0].problem.shape = shape.to_owned();
    let none = "REFUSED bundle.tar.gz: the manifest names an invalid problem:";
    check(
        &shape("1x3/2x40x16"),
        1,
        &format!(
            "{none} `1x3/2x40x16 f32 full`: query_heads is 3 and key_heads is 2; query_heads must be a multiple of key_heads"
        ),
    );
    check(
        &shape("1x0x40x16"),
        1,
        &format!(
            "{none} `1x0x40x16 f32 full`: query_heads is 0; it must be at least 1; key_heads is 0; it must be at least 1"
        ),
    );
    check(
        &shape("1x1x18446744073709551615,0x1"),
        1,
        &format!(
            "{none} `1x1x18446744073709551615,0x1 f32 full`: query_length is 18446744073709551615; it may be at most 9223372036854775807; query of 1 batches, 1 heads, 18446744073709551615 rows and 1 columns spans more than 9223372036854775807 bytes; output of 1 batches, 1 heads, 18446744073709551615 rows and 1 columns spans more than 9223372036854775807 bytes"
        ),
    );
    let nothing = "flashcore: none of the computed results could be repeated on this machine";
    check(&shape("1x1x1000000000,1x65536"), 3, nothing);
    check(&|bundle| bundle.manifest.cases.clear(), 3, nothing);
    // What is wrong is not taken for a time, whatever it calls itself.
    let pretends = |bundle: &mut Bundle| {
        bundle.manifest.cases[0].inputs_sha256 = String::new();
        bundle.manifest.kernels.push(KernelEntry {
            config: "time of ampere".to_owned(),
            problem: bundle.manifest.cases[0].problem.clone(),
            arch: "sm_90".to_owned(),
            ptx: "missing.ptx".to_owned(),
            cubin: None,
        });
        bundle.manifest.cases[0].kernel = "time of portable".to_owned();
        bundle.manifest.cases[0].backend = "cuda".to_owned();
    };
    check(&pretends, 1, "0 agree, 2 disagree, 2 cannot be checked on this machine");
    let twice = |bundle: &mut Bundle| bundle.manifest.files.push(FileEntry::of("a", b"hello"));
    check(
        &twice,
        1,
        "REFUSED bundle.tar.gz: a does not match the manifest: the manifest lists it twice, or lists itself",
    );
}

#[test]
fn words_of_bundles_are_shown_and_not_obeyed() {
    let scratch = Scratch::new("words");
    let changes: [fn(&mut Bundle); 10] = [
        |bundle| bundle.origin.build.version = HOSTILE.to_owned(),
        |bundle| bundle.origin.build.commit = Some(HOSTILE.to_owned()),
        |bundle| bundle.origin.machine.device = HOSTILE.to_owned(),
        |bundle| bundle.origin.machine.arch = HOSTILE.to_owned(),
        |bundle| bundle.origin.time = HOSTILE.to_owned(),
        |bundle| bundle.manifest.cases[0].kernel = HOSTILE.to_owned(),
        |bundle| bundle.manifest.cases[0].backend = HOSTILE.to_owned(),
        |bundle| bundle.manifest.cases[0].problem.shape = HOSTILE.to_owned(),
        |bundle| bundle.manifest.cases[0].problem.mask = HOSTILE.to_owned(),
        |bundle| bundle.manifest.files[0].path = HOSTILE.to_owned(),
    ];
    for change in changes {
        let mut bundle = Bundle::new();
        change(&mut bundle);
        let (out, error) = said(&bundle.replay(&scratch));
        check_printable(&out);
        check_printable(&error);
    }
    let mut bundle = Bundle::new();
    bundle.origin.build.version = HOSTILE.to_owned();
    let (out, _) = said(&bundle.replay(&scratch));
    let first = format!(
        "bundle.tar.gz: sealed, every file as the manifest says; made by flashcore {SHOWN} at 0123456789 on Test processor (portable), 1 thread, 2026-11-16"
    );
    assert_eq!(out.lines().next(), Some(first.as_str()));
}

#[test]
fn words_of_other_files_are_shown_and_not_obeyed() {
    let scratch = Scratch::new("other-words");
    let escaped = Value::from(HOSTILE).to_string();
    // TOML has the same escapes, and wants more of them.
    let spelt = printable_json(&escaped);
    scratch.write("record.json", format!(r#"{{"schema": 2, "kind": {escaped}}}"#));
    scratch.write("schema.json", format!(r#"{{"schema": {escaped}}}"#));
    scratch.write("variant.json", format!(r#"{{"schema": 2, "kind": "measurements", {escaped}: 1}}"#));
    scratch.write(
        "peers.json",
        format!(r#"{{"schema": 1, "machine": {{"device": {escaped}}}, "rows": [], "peers": []}}"#),
    );
    scratch.write("gates.toml", format!("[[gate]]\nmetric = {spelt}\nmost = 0\n"));
    std::fs::create_dir(scratch.file("experiments")).expect("a folder");
    let experiment = format!(
        "title = {spelt}\ndate = {spelt}\nhypothesis = {spelt}\npredicted_percent = 1.0\na = {spelt}\nb = \"cpu\"\n"
    );
    scratch.write("experiments/one.toml", experiment);
    for arguments in [
        &["compare", "record.json", "record.json"][..],
        &["compare", "schema.json", "schema.json"],
        &["compare", "variant.json", "variant.json"],
        &["bench", "--peers-record", "peers.json"],
        &["profile", "--gates", "gates.toml"],
        &["experiments", "list"],
        &["experiments", "list", "--format", "csv"],
        &["experiments", "list", "--format", "markdown"],
        &["experiments", "list", "--format", "json"],
        &["experiments", "show", "one"],
        &["conformance", "--replay", "record.json"],
        &["leaderboard", "--file", "record.json"],
        &["report", "record.json"],
    ] {
        let output = scratch.run(arguments);
        let (out, error) = said(&output);
        check_printable(&out);
        check_printable(&error);
        assert!(matches!(output.status.code(), Some(0 | 2)), "{arguments:?}");
    }
    let listed: Value =
        serde_json::from_slice(&scratch.run(&["experiments", "list", "--format", "json"]).stdout).expect("JSON");
    assert_eq!(listed[0]["title"], HOSTILE, "programs read what is there");
    scratch.check(
        &["compare", "record.json", "record.json"],
        2,
        &format!(
            "flashcore: record.json: its kind is `{SHOWN}`, and `measurements` is needed here; `flashcore bench --record FILE` writes one\n"
        ),
    );
    // Names of tensors that are not used, and of one that looks like an input.
    scratch.problem("in.safetensors", &[HOSTILE]);
    let (out, _) = said(&scratch.run(&["attend", "in.safetensors", "out"]));
    check_printable(&out);
    assert!(out.lines().any(|line| line == format!("not used: {SHOWN}")), "{out}");
    let mask = format!("{HOSTILE}mask");
    scratch.problem("in.safetensors", &[&mask]);
    let (_, error) = said(&scratch.run(&["attend", "in.safetensors", "out"]));
    check_printable(&error);
}

#[test]
fn the_colours_of_verdicts_are_all_that_is_obeyed() {
    let scratch = Scratch::new("colours");
    let bench = ["bench", "--backend", "cpu", "--shape", "1x1x5x8", "--seconds", "0", "--record", "bench.json"];
    assert_eq!(scratch.run(&bench).status.code(), Some(0));
    let hostile = "x\u{1b}]0;owned\u{7}.json";
    scratch.write(hostile, scratch.read("bench.json"));
    let mut compare = scratch.command(&["compare", hostile, "bench.json"]);
    let output = compare.env("CLICOLOR_FORCE", "1").env_remove("NO_COLOR").output().expect("the command runs");
    let (out, _) = said(&output);
    // A record of so few samples is too little to tell.
    let start = "1x1x5x8 f32 full: \u{1b}[33mAMBIGUOUS\u{1b}[0m: bench.json takes 0.0 % more time than \
                 x\\u{1b}]0;owned\\u{7}.json (";
    assert_eq!(out.lines().filter(|line| line.starts_with(start)).count(), 1, "{out:?}");
    check_printable(&out.replace("\u{1b}[33mAMBIGUOUS\u{1b}[0m", "AMBIGUOUS"));
}

/// The shell has the number of the process that the command will have, and can plant what an earlier version trusted.
#[cfg(unix)]
#[test]
fn folders_that_somebody_else_has_made_are_not_used() {
    let scratch = Scratch::new("planted");
    scratch.write("victim", "precious");
    let compare = [
        "compare",
        "cpu",
        "cpu",
        "--slow-b",
        "60",
        "--shape",
        "1x1x64x32",
        "--seconds",
        "0",
        "--record",
        "compare.json",
    ];
    assert_eq!(scratch.run(&compare).status.code(), Some(4));
    let new = ["experiments", "new", "one", "--from", "compare.json", "--predicted", "-5", "--hypothesis", "none"];
    assert_eq!(scratch.run(&new).status.code(), Some(0));
    // Evidence of another experiment, whose file is gone, is not written over.
    scratch.write("experiments/two.json", "precious");
    let mut other = new;
    other[2] = "two";
    scratch.check(&other, 2, "flashcore: experiments/two.json exists; choose another name\n");
    assert_eq!(scratch.read("experiments/two.json"), "precious");
    std::fs::create_dir(scratch.file("tmp")).expect("a folder");
    let plant = r#"
        mkdir tmp/flashcore-repro-$$ tmp/flashcore-experiment-$$ tmp/flashcore-doctor-$$
        ln -s "$PWD/victim" tmp/flashcore-experiment-$$.json
        for file in doctor.json verify.txt bench.txt; do ln -s "$PWD/victim" tmp/flashcore-repro-$$/$file; done
        TMPDIR=$PWD/tmp exec "$@""#;
    // The outcome of a comparison that had no time is undecided, then and now.
    let output = scratch.shell(plant, &["experiments", "run", "one"]).output().expect("sh runs");
    let (out, error) = said(&output);
    assert!(out.ends_with("recorded outcome: undecided; outcome now: undecided\n"), "{out}{error}");
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(scratch.read("victim"), "precious");
    // What the first step finds is written down before the second begins.
    let mut child =
        scratch.shell(plant, &["repro", "--backend", "cpu"]).stderr(Stdio::piped()).spawn().expect("sh runs");
    let lines = BufReader::new(child.stderr.take().expect("it is piped")).lines();
    let second = lines.map_while(Result::ok).find(|line| line.starts_with("flashcore verify"));
    assert!(second.is_some());
    child.kill().and_then(|()| child.wait()).expect("it is ours");
    assert_eq!(scratch.read("victim"), "precious");
    let made = std::fs::read_dir(scratch.file("tmp")).expect("a folder").flatten().filter(|entry| {
        let name = entry.file_name().into_string().expect("letters");
        name.starts_with("flashcore-repro-")
            && entry.path().join("doctor.json").symlink_metadata().is_ok_and(|file| file.is_file())
    });
    assert_eq!(made.count(), 1, "one folder of its own");
}
