//! The examples run. `cargo test` has built them beside this test; `cargo test --test examples` has not, so it builds them.

use std::path::{Path, PathBuf};
use std::process::Command;

fn check(name: &str) {
    let output = Command::new(example(name)).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{name}: {said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(!said.is_empty(), "{name} says what it did");
}

/// The program of an example: tests are in `target/PROFILE/deps`, examples in `target/PROFILE/examples`.
fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let profile = test.parent().and_then(Path::parent).unwrap();
    let program = profile.join("examples").join(name).with_extension(std::env::consts::EXE_EXTENSION);
    if !program.exists() {
        let mut cargo = Command::new(env!("CARGO"));
        cargo
            .args(["build", "--package", "flashcore", "--example", name, "--target-dir"])
            .arg(profile.parent().unwrap());
        if profile.ends_with("release") {
            cargo.arg("--release");
        }
        let output = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    program
}

#[test]
fn host_tensors() {
    check("host_tensors");
}

#[test]
fn custom_strides() {
    check("custom_strides");
}

#[cfg(feature = "cudarc")]
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

#[test]
fn decode() {
    check("decode");
}
