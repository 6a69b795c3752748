//! Temporary folders that did not exist before.

use std::fs::{self, DirBuilder};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};

/// A new folder that only this user can look into, removed with everything in it when it is dropped.
///
/// Whoever can guess the name of a folder that is used when it is there already can put links into it first.
#[derive(Debug)]
pub struct TemporaryFolder(PathBuf);

impl TemporaryFolder {
    /// Makes a folder among the temporary files of the system; its name begins with what it is for.
    pub fn new(purpose: &str) -> io::Result<Self> {
        Self::within(&std::env::temp_dir(), purpose)
    }

    /// Makes a folder in another one.
    pub fn within(parent: &Path, purpose: &str) -> io::Result<Self> {
        let name = || format!("flashcore-{purpose}-{}-{:016x}", std::process::id(), random());
        Self::first_free(parent, std::iter::repeat_with(name))
    }

    /// Makes the first folder of these names that is not there yet, in whatever form.
    fn first_free(parent: &Path, names: impl Iterator<Item = String>) -> io::Result<Self> {
        let mut builder = DirBuilder::new();
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        for name in names {
            let folder = parent.join(name);
            match builder.create(&folder) {
                Ok(()) => return Ok(Self(folder)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    let reason = format!("no temporary folder can be made in {}: {error}", parent.display());
                    return Err(io::Error::new(error.kind(), reason));
                }
            }
        }
        Err(io::Error::new(io::ErrorKind::AlreadyExists, "every name for a temporary folder is taken"))
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        // A folder that stays in the temporary files harms nobody.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// 64 bits that other processes cannot foresee: each hash map of the standard library begins with such.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_planted_is_passed_over() {
        let outer = TemporaryFolder::new("test").expect("a folder");
        let victim = outer.path().join("victim");
        fs::create_dir(&victim).expect("a folder");
        fs::create_dir(outer.path().join("folder")).expect("a folder");
        fs::write(outer.path().join("file"), "").expect("a file");
        let mut planted = vec!["folder", "file"];
        #[cfg(unix)]
        for (name, target) in [("link", victim.as_path()), ("dangling", Path::new("nowhere"))] {
            std::os::unix::fs::symlink(target, outer.path().join(name)).expect("a link");
            planted.push(name);
        }
        let names = planted.iter().chain([&"free", &"further"]).map(ToString::to_string);
        let made = TemporaryFolder::first_free(outer.path(), names).expect("a folder");
        assert_eq!(made.path(), outer.path().join("free"));
        assert_eq!(fs::read_dir(made.path()).expect("it is there").count(), 0);
        fs::write(made.path().join("inside"), "1").expect("it is ours");
        let path = made.path().to_owned();
        drop(made);
        assert!(!path.exists());
        assert_eq!(fs::read_dir(&victim).expect("it is there").count(), 0);
        let taken = TemporaryFolder::first_free(outer.path(), planted.iter().map(ToString::to_string));
        assert_eq!(taken.expect_err("all are taken").kind(), io::ErrorKind::AlreadyExists);
    }

    #[test]
    fn nobody_else_looks_into_it() {
        let (one, other) =
            (TemporaryFolder::new("test").expect("a folder"), TemporaryFolder::new("test").expect("two"));
        assert_ne!(one.path(), other.path());
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            assert_eq!(fs::metadata(one.path()).expect("it is there").permissions().mode() & 0o777, 0o700);
        }
        let missing =
            TemporaryFolder::within(&one.path().join("nowhere"), "test").expect_err("there is no such folder");
        let reason = format!(
            "no temporary folder can be made in {}: No such file or directory (os error 2)",
            one.path().join("nowhere").display()
        );
        assert_eq!(missing.to_string(), reason);
    }
}
