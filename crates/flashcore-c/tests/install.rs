//! `scripts/install-c.sh`, and programs that are compiled and linked with what it installs.

#![cfg(target_os = "linux")]
#![expect(clippy::print_stdout, reason = "a test that did not run says why")]

mod built;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

const CRATE: &str = env!("CARGO_MANIFEST_DIR");

/// Runs a command; `None`, with the reason printed, if there is no such program.
fn run(command: &mut Command) -> Option<Output> {
    match command.output() {
        Ok(output) => Some(output),
        Err(error) => {
            println!("not tried: {} cannot be run: {error}", command.get_program().display());
            None
        }
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn install(prefix: &str, root: Option<&Path>) -> Output {
    let mut script = Command::new("bash");
    script.arg(Path::new(CRATE).join("../../scripts/install-c.sh")).arg(prefix);
    script.env("FLASHCORE_LIBRARY_FOLDER", built::folder()).env_remove("DESTDIR");
    if let Some(root) = root {
        script.env("DESTDIR", root);
    }
    script.output().unwrap()
}

/// Where the library was installed, once.
fn prefix() -> &'static Path {
    static PREFIX: OnceLock<PathBuf> = OnceLock::new();
    PREFIX.get_or_init(|| {
        let prefix = Path::new(env!("CARGO_TARGET_TMPDIR")).join("flashcore-c-prefix");
        if prefix.exists() {
            fs::remove_dir_all(&prefix).unwrap();
        }
        let output = install(prefix.to_str().unwrap(), None);
        assert!(output.status.success(), "{}", text(&output.stderr));
        prefix
    })
}

/// Compiles a program with every warning an error; `None` where there is no compiler.
fn compile(compiler: &str, standard: &str, source: &str, libraries: &[&str]) -> Option<PathBuf> {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(source.replace(['/', '.'], "-"));
    let (include, lib) = (prefix().join("include"), prefix().join("lib"));
    let mut command = Command::new(compiler);
    command.args([standard, "-Wall", "-Wextra", "-Wpedantic", "-Werror"]).arg("-I").arg(include);
    command.arg(Path::new(CRATE).join(source)).arg("-o").arg(&program).arg("-L").arg(lib).args(libraries);
    let output = run(&mut command)?;
    assert!(output.status.success(), "{command:?}: {}", text(&output.stderr));
    Some(program)
}

fn execute(program: &Path) -> Output {
    Command::new(program).env("LD_LIBRARY_PATH", prefix().join("lib")).output().unwrap()
}

#[test]
fn everything_is_in_its_place() {
    let (root, version) = (prefix(), env!("CARGO_PKG_VERSION"));
    let link = |name: &str| fs::read_link(root.join("lib").join(name)).unwrap();
    assert_eq!(link("libflashcore.so"), Path::new(built::SONAME));
    assert_eq!(link(built::SONAME), PathBuf::from(format!("libflashcore.so.{version}")));
    let header = fs::read(Path::new(CRATE).join("include/flashcore.h")).unwrap();
    assert_eq!(fs::read(root.join("include/flashcore.h")).unwrap(), header);
    let wrapper = fs::read(Path::new(CRATE).join("include/flashcore.hpp")).unwrap();
    assert_eq!(fs::read(root.join("include/flashcore.hpp")).unwrap(), wrapper);
    assert!(root.join("lib/libflashcore.a").is_file());
    let expected = format!(
        "prefix={}\nincludedir=${{prefix}}/include\nlibdir=${{prefix}}/lib\n\nName: flashcore\n\
         Description: Fused attention on NVIDIA GPUs and on the CPU\nURL: https://github.com/flashcore/flashcore\n\
         Version: {version}\nCflags: -I${{includedir}}\nLibs: -L${{libdir}} -lflashcore\n\
         Libs.private: -lm -lpthread -ldl -lgcc_s\n",
        root.display()
    );
    assert_eq!(fs::read_to_string(root.join("lib/pkgconfig/flashcore.pc")).unwrap(), expected);
}

/// A package is built in one folder and unpacked in another.
#[test]
fn installed_for_another_root() {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("flashcore-c-root");
    let output = install("/opt/flashcore/", Some(&root));
    assert!(output.status.success(), "{}", text(&output.stderr));
    let config = fs::read_to_string(root.join("opt/flashcore/lib/pkgconfig/flashcore.pc")).unwrap();
    assert_eq!(config.lines().next(), Some("prefix=/opt/flashcore"));
    assert!(root.join("opt/flashcore/lib/libflashcore.so").exists());
}

#[test]
fn a_relative_prefix_is_refused() {
    let output = install("somewhere", None);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).starts_with("usage: "), "{}", text(&output.stderr));
}

/// Programs look for the library by a name that says what they are compatible with.
#[test]
fn programs_ask_for_a_version() {
    let Some(program) = compile("cc", "-std=c11", "examples/attend.c", &["-lflashcore", "-lm"]) else { return };
    let bytes = fs::read(&program).unwrap();
    let needed = format!("\0{}\0", built::SONAME);
    assert!(bytes.windows(needed.len()).any(|window| window == needed.as_bytes()), "no {}", built::SONAME);
    assert!(execute(&program).status.success());
}

#[test]
fn cpp() {
    let Some(program) = compile("c++", "-std=c++11", "tests/attend.cpp", &["-lflashcore"]) else { return };
    let output = execute(&program);
    assert_eq!(text(&output.stdout), format!("flashcore {}: 15\n", env!("CARGO_PKG_VERSION")));
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn cpp_wrapper() {
    let Some(program) = compile("c++", "-std=c++17", "examples/attend.cpp", &["-lflashcore"]) else { return };
    let output = execute(&program);
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{said}{}", text(&output.stderr));
    let last = "FLASHCORE_INVALID_ARGUMENT: problem.score_mod: column 9, at `distances`: there is no `di...";
    assert_eq!(said.lines().last(), Some(last), "{said}");
}

/// The program of many streams is compiled everywhere, and says where it cannot run.
#[test]
fn two_streams() {
    let libraries = ["-lflashcore", "-pthread", "-ldl", "-lm"];
    let Some(program) = compile("cc", "-std=c11", "examples/two_streams.c", &libraries) else { return };
    let output = Command::new(&program).arg("20").env("LD_LIBRARY_PATH", prefix().join("lib")).output().unwrap();
    let said = text(&output.stdout);
    match output.status.code() {
        Some(0) => assert!(said.ends_with("20 rounds of each, 0 wrong\n"), "{said}"),
        Some(3) => assert!(said.starts_with("no GPU: "), "{said}"),
        code => panic!("{code:?}: {said}"),
    }
}

/// Every operand from C, on the CPU, and on a GPU where there is one.
#[test]
fn all_operands() {
    let Some(program) = compile("cc", "-std=c11", "examples/all_operands.c", &["-lflashcore", "-ldl", "-lm"]) else {
        return;
    };
    let output = execute(&program);
    let said = text(&output.stdout);
    assert!(matches!(output.status.code(), Some(0 | 3)), "{said}{}", text(&output.stderr));
    assert_eq!(said.lines().last(), Some("20 operands, 0 wrong"), "{said}");
}
