//! Tells the program which commit it is built from, for its records. Outside a checkout of flashcore it does not know,
//! and says so.
//!
//! Cargo runs this again when the commit changes or when a source of the program does, and at no other time: a second
//! cargo command compiles nothing. So the mark of a dirty build is that of the sources that were compiled. The index of
//! git is neither watched nor written: `git status` rewrites it whenever it likes.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Sources of the program, as git spells them: tests and documents change nothing in it.
const SOURCES: [&str; 5] = [
    ":(top,glob)crates/*/src/**",
    ":(top,glob)crates/*/Cargo.toml",
    ":(top,glob)crates/*/build.rs",
    ":(top)Cargo.toml",
    ":(top)Cargo.lock",
];

/// Output of git, if it succeeds; nothing in a checkout is written.
fn git(folder: &Path, arguments: &[&str]) -> Option<String> {
    let mut command = Command::new("git");
    command.arg("--no-optional-locks").args(arguments).current_dir(folder);
    let output = command.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The root of the checkout that the package belongs to; a package from elsewhere may lie in somebody else's checkout.
pub(crate) fn checkout(package: &Path) -> Option<PathBuf> {
    let root = PathBuf::from(git(package, &["rev-parse", "--show-toplevel"])?);
    let there = root.join("crates").join("flashcore-cli").canonicalize().ok()?;
    (there == package.canonicalize().ok()?).then_some(root)
}

/// The files and folders whose change can change the commit or the mark: where the commit is written, and the sources.
pub(crate) fn watched(root: &Path) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    let path = |name: &str| git(root, &["rev-parse", "--git-path", name]).map(|path| root.join(path));
    let mut add = |path: Option<PathBuf>| paths.extend(path.filter(|path| path.exists()));
    add(path("HEAD"));
    if let Some(branch) = git(root, &["symbolic-ref", "--quiet", "HEAD"]) {
        // A branch has a file of its own from its next commit on; until then it stands among the packed ones. Cargo takes
        // a file that is missing for one that has changed, so its folder is watched instead.
        let own = path(&branch);
        let is_packed = own.as_ref().is_some_and(|path| !path.exists());
        add(own.as_ref().and_then(|path| path.ancestors().find(|path| path.exists()).map(Path::to_owned)));
        add(path("packed-refs").filter(|_| is_packed));
    }
    add(path("reftable/tables.list"));
    let packages = std::fs::read_dir(root.join("crates")).into_iter().flatten().flatten();
    let mut packages: Vec<PathBuf> = packages.map(|package| package.path()).collect();
    packages.sort();
    for package in packages {
        for name in ["src", "Cargo.toml", "build.rs"] {
            add(Some(package.join(name)));
        }
    }
    add(Some(root.join("Cargo.toml")));
    add(Some(root.join("Cargo.lock")));
    paths
}

/// The commit of a checkout.
pub(crate) fn commit(root: &Path) -> Option<String> {
    git(root, &["rev-parse", "HEAD"])
}

/// True if a source differs from the commit, or belongs to none; true as well if git cannot tell.
pub(crate) fn is_dirty(root: &Path) -> bool {
    let arguments = [&["status", "--porcelain", "--untracked-files=all", "--"][..], &SOURCES].concat();
    git(root, &arguments).is_none_or(|files| !files.is_empty())
}

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=FLASHCORE_COMMIT");
    // Who builds an archive of a commit says which.
    let (commit, dirty) = match std::env::var("FLASHCORE_COMMIT") {
        Ok(commit) => (commit, false),
        Err(_) => match checkout(Path::new(".")) {
            Some(root) => {
                for path in watched(&root) {
                    println!("cargo:rerun-if-changed={}", path.display());
                }
                (commit(&root).unwrap_or_default(), is_dirty(&root))
            }
            None => (String::new(), false),
        },
    };
    println!("cargo:rustc-env=FLASHCORE_BUILD_COMMIT={commit}");
    println!("cargo:rustc-env=FLASHCORE_BUILD_DIRTY={dirty}");
}
