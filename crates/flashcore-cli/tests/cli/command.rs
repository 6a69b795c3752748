//! The command as a user meets it: exit codes, where messages go, formats.

use std::process::Stdio;

use flashcore_bench::testkit::suites::{Runner, seeds};
use flashcore_cpu::Level;

use crate::scratch::{Scratch, command, flashcore, json, json_of};

fn check(arguments: &[&str], code: i32, standard_error: &str) {
    let output = flashcore(arguments);
    assert_eq!(String::from_utf8_lossy(&output.stderr), standard_error, "{arguments:?}");
    assert_eq!(output.status.code(), Some(code), "{arguments:?}");
}

#[test]
fn a_case_that_passes_exits_with_0() {
    check(&["verify", "--shape", "1x1x20,70x32", "--kernel", "ampere", "--mask", "causal", "--lse"], 0, "");
    check(&["verify", "--shape", "1x1x20,70x32", "--kernel", "ampere", "--lse", "--lse-base2"], 0, "");
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
        &["verify", "--kernel", "ampere", "--shape", "1x8x64x60"],
        2,
        "flashcore: head_dim is 60; the ampere kernel takes multiples of 8 up to 256\nvalue_dim is 60; the ampere kernel takes multiples of 8 up to 256\n",
    );
    check(
        &["resources", "--arch", "sm_75"],
        2,
        "flashcore: unknown architecture `sm_75`; supported are sm_80, sm_86, sm_89, sm_90, sm_90a and sm_120\n",
    );
}

#[test]
fn a_missing_tool_exits_with_3() {
    let output = command(&["resources"]).env("FLASHCORE_PTXAS", "/nowhere/ptxas").output().expect("the command runs");
    assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn results_are_machine_readable() {
    let verify = ["verify", "--kernel", "ampere-64x64-2stage-swizzled", "--shape", "1x1x20,70x32", "--format"];
    let rows = json(&flashcore(&[&verify[..], &["json"]].concat()));
    assert_eq!(rows[0]["verdict"], "passed");
    assert_eq!(rows[0]["case"], "sim ampere-64x64-2stage-swizzled 1x1x20,70x32 f16 full seed 0");
    let keys: Vec<&str> = rows[0].as_object().expect("an object").keys().map(String::as_str).collect();
    let expected = [
        "case",
        "verdict",
        "max_error",
        "reference_max_error",
        "relative_l2",
        "milliseconds",
        "backend",
        "kernel",
        "seed",
        "shape",
        "dtype",
        "mask",
        "batch",
        "query_heads",
        "key_heads",
        "query_length",
        "key_length",
        "head_dim",
        "value_dim",
    ];
    assert_eq!(keys, expected);
    let count = |key: &str| rows[0][key].as_u64();
    assert_eq!(["query_length", "key_length", "head_dim"].map(count), [Some(20), Some(70), Some(32)]);
    // The header of CSV has the same keys.
    let output = flashcore(&[&verify[..], &["csv"]].concat());
    assert_eq!(String::from_utf8_lossy(&output.stdout).lines().next(), Some(expected.join(",").as_str()));
}

/// No key occurs twice, and all are written in one way.
#[test]
fn keys_are_snake_case_and_unique() {
    let commands: [&[&str]; 9] = [
        &["bench", "--backend", "cpu", "--shape", "1x1x32x32", "--seconds", "0.01"],
        &["bench", "--backend", "sim", "--shape", "1x1x64x32"],
        &["compare", "cpu", "cpu", "--shape", "1x1x32x32", "--seconds", "0"],
        &["roofline", "--device", "h200", "--shape", "1x8x512x64"],
        &["roofline", "--device", "h200", "--target", "1x8x512x64@5us"],
        &["profile", "--shape", "1x1x64x64", "--kernel", "ampere"],
        &["ladder", "--backend", "sim", "--shape", "1x1x64x32"],
        &["leaderboard", "--file", "../../results/leaderboard.json"],
        &["experiments", "list", "--folder", "../../experiments"],
    ];
    for command in commands {
        let output = flashcore(&[command, &["--format", "csv"]].concat());
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let keys: Vec<&str> = text.lines().next().expect("a header").split(',').collect();
        for (index, key) in keys.iter().enumerate() {
            let is_plain =
                key.chars().all(|letter| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '_');
            assert!(
                is_plain && !key.starts_with('_') && !key.ends_with('_') && !key.contains("__"),
                "{command:?}: {key}"
            );
            assert!(!keys[..index].contains(key), "{command:?}: {key} twice");
        }
    }
}

#[test]
fn the_threads_that_work_are_those_that_are_said() {
    let scratch = Scratch::new("threads");
    let bench = ["bench", "--backend", "cpu", "--shape", "1x1x32x32", "--seconds", "0.01", "--record", "threads.json"];
    let check = |arguments: &[&str], variable: Option<&str>, expected: u64| {
        let mut command = scratch.command(&bench);
        command.args(arguments).env_remove("RAYON_NUM_THREADS");
        command.envs(variable.map(|threads| ("RAYON_NUM_THREADS", threads)));
        let output = command.output().expect("the command runs");
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let plural = if expected == 1 { "" } else { "s" };
        let first = said.lines().next().expect("a line");
        assert_eq!(first.split(", ").nth(2), Some(format!("{expected} thread{plural}").as_str()), "{said}");
        let written = json_of(&scratch.file("threads.json"));
        assert_eq!(written["origin"]["machine"]["threads"], expected);
    };
    check(&[], Some("1"), 1);
    check(&["--threads", "1"], None, 1);
    // Whoever says it on the command line means it.
    check(&["--threads", "3"], Some("1"), 3);
}

#[test]
fn a_gpu_kernel_is_refused_on_the_cpu() {
    let message = "flashcore: --kernel chooses a GPU kernel; --backend cpu has none\n";
    check(&["bench", "--backend", "cpu", "--kernel", "ampere"], 2, message);
    let output = flashcore(&["bench", "--kernel", "ampere", "--shape", "1x1x32x32"]);
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "");
}

#[test]
fn a_table_fits_the_terminal_and_has_colours_where_they_are_wanted() {
    let run = |variables: &[(&str, &str)]| {
        let mut command = command(&["verify", "--backend", "cpu", "--shape", "1x1x32x32"]);
        let output = command.envs(variables.iter().copied()).output().expect("the command runs");
        String::from_utf8(output.stdout).expect("text")
    };
    let widest = |text: &str| text.lines().map(|line| line.chars().count()).max().unwrap_or(0);
    let plain = run(&[]);
    assert!(widest(&plain) > 80 && !plain.contains('\x1b'), "{plain}");
    let narrow = run(&[("COLUMNS", "72")]);
    assert!(widest(&narrow) <= 72, "{narrow}");
    // Every word is whole.
    let words = |text: &str| text.split_whitespace().filter(|word| word.starts_with("1x1x32x32")).count();
    assert_eq!((words(&plain), words(&narrow)), (1, 1));
    assert_eq!(run(&[("CLICOLOR_FORCE", "1")]).matches("\x1b[32mpassed\x1b[0m").count(), 1);
    assert_eq!(run(&[("CLICOLOR_FORCE", "1"), ("NO_COLOR", "1")]).matches('\x1b').count(), 0);
}

#[test]
fn outside_a_checkout_a_command_says_what_it_needs() {
    let check = |arguments: &[&str], expected: &str| {
        let output = command(arguments).current_dir(std::env::temp_dir()).output().expect("the command runs");
        assert_eq!(String::from_utf8_lossy(&output.stderr), expected);
        assert_eq!(output.status.code(), Some(2));
    };
    check(
        &["experiments", "show", "three-stages", "--folder", "no-such-folder"],
        "flashcore: `no-such-folder` is not a directory; run this in a checkout of flashcore, or use --folder DIR\n",
    );
    check(
        &["status", "--results", "no-such-folder"],
        "flashcore: `no-such-folder` is not a directory; run this in a checkout of flashcore, or use --results DIR\n",
    );
}

#[test]
fn a_reader_who_leaves_early_is_no_error() {
    let mut command = command(&["ptx"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command runs");
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
    let kernel = "ampere-64x64-2stage-swizzled";
    assert_eq!(entries(&["--kernel", kernel]), ["flashcore_ampere_64x64_2stage_swizzled_f16_d64"]);
    // The kernel that precomputes the block mask, and the attention kernel: by default that of the architecture.
    let expression = entries(&["--shape", "2x16x8192x128+documents", "--mask", "causal", "--arch", "sm_90a"]);
    assert_eq!(expression.len(), 2);
    assert!(expression[1].starts_with("flashcore_hopper_"), "{expression:?}");
    let refused = flashcore(&["ptx", "--kernel", "hopper", "--arch", "sm_80"]);
    assert_eq!(refused.status.code(), Some(2));
}

#[test]
fn every_level_has_its_line() {
    let output = flashcore(&["verify", "--backend", "cpu", "--cpu-level", "all", "--shape", "1x2/1x5,390x24", "--lse"]);
    let text = String::from_utf8_lossy(&output.stdout);
    let tallies: Vec<&str> = text.lines().filter(|line| line.ends_with(" failed")).collect();
    let levels = Level::available();
    let mut expected: Vec<String> = levels.iter().map(|level| format!("cpu {level}: 1 passed, 0 failed")).collect();
    if levels.len() > 1 {
        expected.push(format!("all levels: {} passed, 0 failed", levels.len()));
    }
    assert_eq!(tallies, expected);
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn one_case_of_a_suite_can_be_repeated() {
    let repeated = |only: &str| {
        let output = flashcore(&["verify", "--backend", "cpu", "--suite", "full", "--only", only, "--format", "json"]);
        let rows = json(&output);
        rows.as_array().map(|rows| (rows.len(), rows[0]["verdict"].clone()))
    };
    assert_eq!(repeated("600"), Some((1, "passed".into())));
    let count = seeds(Runner::Cpu(Level::Portable)).len();
    let message = format!("flashcore: --only {count}: the suite has cases 0 to {}\n", count - 1);
    check(&["verify", "--backend", "cpu", "--suite", "seeds", "--only", &count.to_string()], 2, &message);
}
