//! Programs in other languages, compiled and run against the library.

// How to link is known for Linux alone.
#![cfg(target_os = "linux")]

mod built;

use std::env;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use built::folder as library_folder;

/// Runs a command and returns what it printed.
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?} cannot be run: {error}"));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{command:?}: {said}{}", String::from_utf8_lossy(&output.stderr));
    said
}

/// Python, or `None` and a line that no harness captures, so that a test without it does not look as if it had passed.
fn python(test: &str) -> Option<Command> {
    match Command::new("python3").arg("--version").output() {
        Ok(_) => Some(Command::new("python3")),
        Err(error) => {
            let line = format!("test {test} needs Python and was not run: python3: {error}\n");
            std::io::stderr().write_all(line.as_bytes()).unwrap();
            None
        }
    }
}

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(name)
}

/// Compiles a program in C, linked in one way or the other, and runs it. The compiler is the one that links Rust.
fn run_c(name: &str, source: &Path, link: &[&str]) -> String {
    let folder = library_folder();
    let program = env::temp_dir().join(format!("flashcore-{name}-{}", std::process::id()));
    let mut compiler = Command::new("cc");
    compiler.args(["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I"]);
    compiler.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("include"));
    compiler.arg(source).arg("-o").arg(&program).arg("-L").arg(folder);
    run(compiler.args(link));
    let said = run(Command::new(&program).env("LD_LIBRARY_PATH", folder));
    std::fs::remove_file(program).unwrap();
    said
}

/// The value after the last mention of a name in what a program said.
fn number_after(said: &str, name: &str) -> f64 {
    let (_, rest) = said.rsplit_once(name).unwrap_or_else(|| panic!("no {name} in {said}"));
    rest.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("{said}"))
}

/// Runs `examples/attend.c`.
fn check_c(name: &str, link: &[&str]) {
    let said = run_c(name, &example("attend.c"), link);
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines[2], "key has 223 elements; its shape and strides need 224", "{said}");
}

#[test]
fn c_with_the_shared_library() {
    check_c("shared", &["-lflashcore", "-lm"]);
}

#[test]
fn c_with_the_static_library() {
    check_c("static", &["-l:libflashcore.a", "-lm", "-lpthread", "-ldl"]);
}

#[test]
fn decode_in_c() {
    let said = run_c("decode", &example("decode.c"), &["-lflashcore", "-lm"]);
    let (steps, _) = said.rsplit_once(", largest error ").unwrap_or_else(|| panic!("{said}"));
    assert_eq!(steps, format!("flashcore {}: 20 steps, lengths 20 23 37", env!("CARGO_PKG_VERSION")));
    assert!(number_after(&said, "largest error ") < 1e-5, "{said}");
}

#[test]
fn a_message_outlives_the_next_call() {
    let said = run_c("last-error", &in_tests("last_error.c"), &["-lflashcore", "-lpthread"]);
    assert_eq!(said, "1 there is no kernel `last`;\n");
}

#[test]
fn attend_in_python() {
    let Some(mut python) = python("attend_in_python") else { return };
    run(python.arg(example("attend.py")).arg(library_folder().join("libflashcore.so")));
}

fn in_tests(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name)
}

#[test]
fn forked_children_in_c() {
    let said = run_c("fork", &in_tests("fork.c"), &["-lflashcore", "-lm", "-lpthread"]);
    assert_eq!(said, "forked children compute\n");
}

#[test]
fn forked_children_in_python() {
    let Some(mut python) = python("forked_children_in_python") else { return };
    python.arg(in_tests("fork.py")).arg(library_folder().join("libflashcore.so")).arg(example(""));
    assert_eq!(run(&mut python), "the processes of a pool compute\n");
}
