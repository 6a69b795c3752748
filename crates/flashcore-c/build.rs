//! Gives the shared library its name for programs that are linked with it, which says what they are compatible with.

use std::env;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let variable = |name: &str| env::var(name).unwrap_or_default();
    let (major, minor) = (variable("CARGO_PKG_VERSION_MAJOR"), variable("CARGO_PKG_VERSION_MINOR"));
    // Before 1.0 every minor version may change the ABI.
    let version = if major == "0" { format!("0.{minor}") } else { major };
    match variable("CARGO_CFG_TARGET_OS").as_str() {
        "linux" | "android" | "freebsd" | "netbsd" | "openbsd" | "dragonfly" => {
            println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libflashcore.so.{version}");
        }
        "macos" => println!("cargo:rustc-cdylib-link-arg=-Wl,-install_name,@rpath/libflashcore.{version}.dylib"),
        _ => {}
    }
}
