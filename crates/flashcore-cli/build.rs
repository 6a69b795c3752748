//! Tells the program which commit it is built from, for its records. Outside a checkout it does not know, and says so.

use std::process::Command;

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn main() {
    // The commit changes with these; whether files differ from it, with any of the sources.
    for file in ["HEAD", "index"] {
        if let Some(path) = git(&["rev-parse", "--git-path", file]) {
            println!("cargo:rerun-if-changed={path}");
        }
    }
    println!("cargo:rerun-if-changed=..");
    println!("cargo:rerun-if-env-changed=FLASHCORE_COMMIT");
    let given = std::env::var("FLASHCORE_COMMIT").ok();
    let commit = given.clone().or_else(|| git(&["rev-parse", "HEAD"])).unwrap_or_default();
    let dirty = given.is_none()
        && git(&["status", "--porcelain", "--", ":/crates", ":/Cargo.toml", ":/Cargo.lock"])
            .is_some_and(|files| !files.is_empty());
    println!("cargo:rustc-env=FLASHCORE_BUILD_COMMIT={commit}");
    println!("cargo:rustc-env=FLASHCORE_BUILD_DIRTY={dirty}");
}
