//! Every option is honoured or refused: what would be ignored is exit code 2 and says why.

use crate::scratch::{Scratch, flashcore};

/// A command that must be refused, and what its message must name.
fn check(arguments: &[&str], named: &[&str]) {
    let output = flashcore(arguments);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
    for name in named {
        assert!(said.contains(name), "{arguments:?}: no {name} in {said}");
    }
}

#[test]
fn options_of_a_single_case_are_none_of_suites_and_random_ones() {
    let options: [&[&str]; 9] = [
        &["--dtype", "bf16 kv e4m3"],
        &["--kv-dtype", "e4m3"],
        &["--out-dtype", "bf16"],
        &["--scales"],
        &["--mask", "causal"],
        &["--lse"],
        &["--lse", "--lse-base2"],
        &["--layout", "bshd"],
        &["--stress", "one-hot"],
    ];
    let selections: [&[&str]; 4] = [&["--fuzz", "2"], &["--suite", "seeds"], &["--suite", "seeds", "--only", "0"], &[]];
    for selection in selections {
        for option in options {
            let arguments = [&["verify", "--backend", "cpu"], selection, option].concat();
            check(&arguments, &option[..1]);
        }
    }
    check(&["verify", "--backend", "cpu", "--suite", "seeds", "--seed", "3"], &["--seed 3", "--fuzz"]);
    check(&["verify", "--backend", "cpu", "--shape", "1x1x8x8", "--scales"], &["--scales", "bf16 kv e4m3"]);
    check(&["verify", "--backend", "cpu", "--fuzz", "2", "--shape", "1x1x8x8"], &["--shape"]);
    check(&["verify", "--backend", "cpu", "--fuzz", "2", "--only", "1"], &["--only"]);
    // With a shape they are honoured.
    for option in options {
        let shape = if option[0].starts_with("--scales") { "--dtype=bf16 kv e4m3" } else { "--seed=2" };
        let query = if option[0] == "--out-dtype" { "--dtype=e4m3" } else { "--repeats=1" };
        let arguments = [&["verify", "--backend", "cpu", "--shape", "1x2x9x8", shape, query], option].concat();
        let output = flashcore(&arguments);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn a_bench_ignores_no_option() {
    let scratch = Scratch::new("options");
    let record = scratch.file("bench.json");
    let record = record.to_str().expect("a path of letters");
    check(&["bench", "--backend", "sim", "--shape", "1x1x16x32", "--record", record], &["--record", "--backend sim"]);
    check(&["bench", "--backend", "sim", "--shape", "1x1x16x32", "--seconds", "1"], &["--seconds 1", "--backend sim"]);
    for option in
        [["--dtype", "f16"], ["--kernel", "ampere"], ["--seconds", "1"], ["--backend", "cpu"], ["--threads", "1"]]
    {
        check(&[&["bench", "--peers-record", record], &option[..]].concat(), &option[..1]);
    }
    assert_eq!(scratch.names(), [""; 0]);
    // Of a suite the simulator runs one shape, and says so.
    let output =
        flashcore(&["bench", "--backend", "sim", "--shape", "1x1x16x32", "--shape", "1x1x20x32", "--format", "csv"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout).lines().count(), 5, "two shapes with two masks each");
}

#[test]
fn a_comparison_ignores_no_option() {
    check(&["compare", "cpu", "cpu", "--run", "cpu:portable"], &["--run cpu:portable"]);
    check(&["compare", "cpu", "cpu", "--suite", "seeds", "--mask", "causal"], &["--mask"]);
    for option in [
        ["--run", "cpu"],
        ["--suite", "seeds"],
        ["--shape", "1x1x8x8"],
        ["--dtype", "f16"],
        ["--mask", "causal"],
        ["--seconds", "1"],
        ["--slow-b", "5"],
        ["--threads", "1"],
    ] {
        check(&[&["compare", "a.json", "b.json"], &option[..]].concat(), &option[..1]);
    }
}

#[test]
fn what_other_commands_would_ignore_is_refused() {
    let refused: [(&[&str], &str); 18] = [
        (&["tune", "--list", "--dtype", "bf16"], "--dtype"),
        (&["tune", "--list", "--seconds", "1"], "--seconds"),
        (&["tune", "--forget", "all", "--lse"], "--lse"),
        (&["tune", "--forget", "all", "--dry-run"], "--dry-run"),
        (&["roofline", "--device", "h200", "--record", "a.json"], "--svg"),
        (&["report", "a.json", "--errors-shape", "1x1x64x64"], "--errors"),
        (&["report", "a.json", "--errors-dtype", "f16"], "--errors"),
        (&["report", "a.json", "--errors-mask", "full"], "--errors"),
        (&["accuracy", "--trials", "8"], "--trials"),
        (&["accuracy", "--haystack", "2k"], "--haystack"),
        (&["accuracy", "--needle", "--types", "f16"], "--types"),
        (&["accuracy", "--gate", "--head-dim", "64"], "--head-dim"),
        (&["ladder", "--from", "a.json", "--mask", "causal"], "--mask"),
        (&["profile", "--import", "a.csv", "--kernel", "ampere", "--cold"], "--cold"),
        (&["profile", "--import", "a.csv", "--kernel", "ampere", "--kernel", "hopper"], "--import"),
        (&["repro", "--replay", "a.tar.gz", "--suite", "seeds"], "--suite"),
        (&["microbench", "--backend", "sim", "--shape", "8x32/8x1,4096x128"], "--shape"),
        (&["leaderboard", "check", "a.json", "--experiments", "b"], "--experiments"),
    ];
    for (arguments, named) in refused {
        check(arguments, &[named]);
    }
}

/// Without a GPU a shape would not help.
#[test]
fn tune_says_first_that_there_is_no_gpu() {
    let output = flashcore(&["tune"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), said), (Some(3), format!("flashcore: {}\n", crate::scratch::no_gpu())));
}
