//! Programs in other languages, compiled and run against the library.

#![expect(clippy::print_stdout, reason = "a test that did not run says why")]

mod built;

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use built::folder as library_folder;

/// Runs a command; what it said, or `None`, with the reason printed, if there is no such program.
fn run(command: &mut Command) -> Option<String> {
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => {
            println!("not tried: {} cannot be run: {error}", command.get_program().display());
            return None;
        }
    };
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{command:?}: {said}{}", String::from_utf8_lossy(&output.stderr));
    Some(said)
}

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(name)
}

/// Compiles a program in C, linked in one way or the other, and runs it. What it said, or `None` where there is no compiler.
fn run_c(name: &str, source: &Path, link: &[&str]) -> Option<String> {
    if !cfg!(target_os = "linux") {
        println!("not tried: this test knows how to link on Linux alone");
        return None;
    }
    run(Command::new("cc").arg("--version"))?;
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

/// Runs `examples/attend.c`.
fn check_c(name: &str, link: &[&str]) {
    let Some(said) = run_c(name, &example("attend.c"), link) else { return };
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
fn python() {
    if run(Command::new("python3").arg("--version")).is_none() || !cfg!(target_os = "linux") {
        return;
    }
    run(Command::new("python3").arg(example("attend.py")).arg(library_folder().join("libflashcore.so")));
}

fn in_tests(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name)
}

#[test]
fn forked_children_in_c() {
    if let Some(said) = run_c("fork", &in_tests("fork.c"), &["-lflashcore", "-lm", "-lpthread"]) {
        assert_eq!(said, "forked children compute\n");
    }
}

#[test]
fn forked_children_in_python() {
    if run(Command::new("python3").arg("--version")).is_none() || !cfg!(target_os = "linux") {
        return;
    }
    let mut python = Command::new("python3");
    python.arg(in_tests("fork.py")).arg(library_folder().join("libflashcore.so")).arg(example(""));
    assert_eq!(run(&mut python).unwrap(), "the processes of a pool compute\n");
}
