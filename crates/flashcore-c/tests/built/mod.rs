//! The library as cargo builds it, for tests that are not linked with it.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The folder of the built library: that which `FLASHCORE_LIBRARY_FOLDER` names, or else that of this build. Nothing here
/// is linked with it, so cargo has not built it yet.
pub(crate) fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = env::var_os("FLASHCORE_LIBRARY_FOLDER").map_or_else(build, PathBuf::from);
        name_for_loader(&folder);
        folder
    })
}

fn build() -> PathBuf {
    // target/PROFILE/deps/THIS, or target/PROFILE/examples/THIS
    let program = env::current_exe().unwrap();
    let profile = program.parent().and_then(Path::parent).unwrap().to_owned();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--package", "flashcore-c", "--lib", "--target-dir"]).arg(profile.parent().unwrap());
    if profile.file_name().is_some_and(|name| name == "release") {
        cargo.arg("--release");
    }
    let output = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    profile
}

/// The name by which programs that are linked with the library look for it; see build.rs.
pub(crate) const SONAME: &str = "libflashcore.so.0.1";

/// Gives the library in a folder that name, as an installation does.
fn name_for_loader(folder: &Path) {
    #[cfg(unix)]
    if folder.join("libflashcore.so").exists() && !folder.join(SONAME).exists() {
        // Another test may be faster.
        let _ = std::os::unix::fs::symlink("libflashcore.so", folder.join(SONAME));
    }
}
