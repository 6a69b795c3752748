//! The examples run. `cargo test` has built them, beside this test.

#![expect(clippy::print_stdout, reason = "a test that did not run says why")]

use std::path::PathBuf;
use std::process::Command;

fn check(name: &str) {
    let Some(program) = example(name).filter(|program| program.exists()) else {
        println!("example {name} was not built with this test; cargo test -p flashcore builds it");
        return;
    };
    let output = Command::new(program).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{name}: {said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(!said.is_empty(), "{name} says what it did");
}

/// Tests are in `deps`, examples in `examples`.
fn example(name: &str) -> Option<PathBuf> {
    let folder = std::env::current_exe().ok()?.parent()?.parent()?.join("examples");
    Some(folder.join(name).with_extension(std::env::consts::EXE_EXTENSION))
}

#[test]
fn host_tensors() {
    check("host_tensors");
}

#[test]
fn custom_strides() {
    check("custom_strides");
}

#[test]
fn cudarc_buffers() {
    check("cudarc_buffers");
}

#[test]
fn cuda_graph() {
    check("cuda_graph");
}

#[test]
fn expressions() {
    check("expressions");
}
