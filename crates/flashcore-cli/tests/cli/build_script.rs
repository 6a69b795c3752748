//! The build script: the commit and the mark of a dirty build are right, and nothing is compiled without need.

#[path = "../../build.rs"]
#[expect(dead_code, clippy::print_stdout, reason = "cargo calls its main, which talks to cargo")]
mod script;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use script::{checkout, commit, is_dirty, watched};

/// A checkout of one commit, removed with the test.
struct Checkout(PathBuf);

impl Checkout {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("flashcore-build-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        for package in ["flashcore-cli", "flashcore-sim"] {
            let package = folder.join("crates").join(package);
            fs::create_dir_all(package.join("src")).expect("a folder");
            fs::create_dir_all(package.join("tests")).expect("a folder");
            fs::write(package.join("Cargo.toml"), "").expect("a file");
            fs::write(package.join("src").join("lib.rs"), "").expect("a file");
            fs::write(package.join("tests").join("test.rs"), "").expect("a file");
        }
        let folder = folder.canonicalize().expect("a folder");
        fs::write(folder.join("Cargo.toml"), "").expect("a file");
        let checkout = Self(folder);
        checkout.git(&["init", "--quiet", "--initial-branch=main"]);
        checkout.git(&["add", "."]);
        checkout.commit("first");
        checkout
    }

    fn git(&self, arguments: &[&str]) {
        let name = ["-c", "user.name=Test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false"];
        let done = Command::new("git").args(name).args(arguments).current_dir(&self.0).output().expect("git runs");
        assert!(done.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
    }

    fn commit(&self, message: &str) {
        self.git(&["commit", "--quiet", "--allow-empty", "-m", message]);
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn watched(&self) -> Vec<String> {
        let name = |path: &PathBuf| path.strip_prefix(&self.0).expect("within").to_string_lossy().into_owned();
        watched(&self.0).iter().map(name).collect()
    }
}

impl Drop for Checkout {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_source_makes_a_build_dirty_and_a_test_does_not() {
    let checkout = Checkout::new("dirty");
    let changed = |name: &str| {
        fs::write(checkout.file(name), "// changed\n").expect("a file");
        let dirty = is_dirty(&checkout.0);
        checkout.git(&["checkout", "--quiet", "."]);
        dirty
    };
    assert!(!is_dirty(&checkout.0));
    assert!(!changed("crates/flashcore-sim/tests/test.rs"));
    assert!(changed("crates/flashcore-sim/src/lib.rs"));
    assert!(changed("crates/flashcore-cli/Cargo.toml"));
    assert!(changed("Cargo.toml"));
    assert!(!is_dirty(&checkout.0));
    // A module that git has never seen may be compiled too.
    fs::write(checkout.file("crates/flashcore-sim/src/new.rs"), "").expect("a file");
    assert!(is_dirty(&checkout.0));
}

#[test]
fn the_index_stays_as_it_is() {
    let checkout = Checkout::new("index");
    let index = checkout.file(".git/index");
    // A time that the index does not know: `git status` would write it down.
    let source =
        fs::File::options().write(true).open(checkout.file("crates/flashcore-sim/src/lib.rs")).expect("a file");
    source.set_modified(SystemTime::now() - Duration::from_secs(1000)).expect("a time");
    let before = (fs::read(&index).expect("an index"), fs::metadata(&index).expect("an index").modified().ok());
    assert!(!is_dirty(&checkout.0));
    assert!((fs::read(&index).expect("an index"), fs::metadata(&index).expect("an index").modified().ok()) == before);
}

#[test]
fn what_is_watched_is_there_and_tells_of_a_commit() {
    let checkout = Checkout::new("watched");
    let sources = [
        "crates/flashcore-cli/src",
        "crates/flashcore-cli/Cargo.toml",
        "crates/flashcore-sim/src",
        "crates/flashcore-sim/Cargo.toml",
        "Cargo.toml",
    ];
    assert_eq!(checkout.watched(), [&[".git/HEAD", ".git/refs/heads/main"][..], &sources].concat());
    // Without a file of its own a branch is watched where it is, and where it will be.
    checkout.git(&["pack-refs", "--all"]);
    assert_eq!(checkout.watched(), [&[".git/HEAD", ".git/refs/heads", ".git/packed-refs"][..], &sources].concat());
    let modified = || fs::metadata(checkout.file(".git/refs/heads")).expect("a folder").modified().expect("a time");
    let (before, first) = (modified(), commit(&checkout.0));
    std::thread::sleep(Duration::from_millis(20));
    checkout.commit("second");
    assert!(modified() > before);
    assert!(first.is_some() && commit(&checkout.0) != first);
    // No branch at all.
    checkout.git(&["checkout", "--quiet", "--detach"]);
    assert_eq!(checkout.watched(), [&[".git/HEAD"][..], &sources].concat());
}

#[test]
fn a_package_in_the_checkout_of_another_project_has_no_commit() {
    let checkout_of_all = Checkout::new("other");
    let own = checkout_of_all.file("crates/flashcore-cli");
    assert_eq!(checkout(&own).as_deref(), Some(Path::new(&checkout_of_all.0)));
    let copied = checkout_of_all.file("vendor/flashcore-cli");
    fs::create_dir_all(&copied).expect("a folder");
    assert_eq!(checkout(&copied), None);
}
