//! Programs of other revisions: built once, kept in a cache folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::util::temporary_folder::TemporaryFolder;

/// Reason why a revision has no program.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// No such revision, or no repository.
    #[error("{revision} is not a commit of the repository here: {said}")]
    Revision {
        /// The revision as given.
        revision: String,
        /// Output of git.
        said: String,
    },
    /// It does not build.
    #[error("{revision} does not build: {said}")]
    Build {
        /// The revision as given.
        revision: String,
        /// The end of what cargo said.
        said: String,
    },
    /// The cache folder cannot be used.
    #[error("the directory for builds, {folder}: {error}")]
    Folder {
        /// The folder.
        folder: String,
        /// The cause.
        error: std::io::Error,
    },
}

/// The program of a revision, built if it has not been: sources by `git archive`, `cargo build --release` in a target
/// folder that all revisions share. `say` hears what is being done.
pub fn binary_of_revision(revision: &str, folder: &Path, mut say: impl FnMut(&str)) -> Result<PathBuf, BuildError> {
    let commit = commit_of(revision)?;
    let name = format!("flashcore{}", std::env::consts::EXE_SUFFIX);
    let home = folder.join(&commit);
    let program = home.join(&name);
    if program.is_file() {
        return Ok(program);
    }
    let in_folder = |error| BuildError::Folder { folder: folder.display().to_string(), error };
    fs::create_dir_all(folder).map_err(in_folder)?;
    // Of this call alone: two that build the same revision do not meet until the program is there. Removed with it.
    let sources = TemporaryFolder::within(folder, "sources").map_err(in_folder)?;
    let built = build(revision, &commit, sources.path(), &folder.join("target"), &name, &mut say);
    built.and_then(|built| {
        fs::create_dir_all(&home).map_err(in_folder)?;
        let new = home.join(format!("{name}.{}", std::process::id()));
        fs::copy(built, &new).and_then(|_| fs::rename(&new, &program)).map_err(in_folder)
    })?;
    Ok(program)
}

fn commit_of(revision: &str) -> Result<String, BuildError> {
    let output =
        Command::new("git").args(["rev-parse", "--verify", "--quiet", &format!("{revision}^{{commit}}")]).output();
    let unknown = |said: String| BuildError::Revision { revision: revision.to_owned(), said };
    let output = output.map_err(|error| unknown(error.to_string()))?;
    if !output.status.success() {
        return Err(unknown("see `git log`, and run this in a checkout of flashcore".to_owned()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn build(
    revision: &str,
    commit: &str,
    sources: &Path,
    target: &Path,
    name: &str,
    say: &mut impl FnMut(&str),
) -> Result<PathBuf, BuildError> {
    let failed = |said: String| BuildError::Build { revision: revision.to_owned(), said };
    let archive = Command::new("git").args(["archive", "--format=tar", commit]).stdout(Stdio::piped()).spawn();
    let mut archive = archive.map_err(|error| failed(format!("git archive: {error}")))?;
    let stdin = archive.stdout.take().map_or_else(Stdio::null, Stdio::from);
    let unpacked = Command::new("tar").arg("-x").arg("-C").arg(sources).stdin(stdin).status();
    let archived = archive.wait();
    if !(unpacked.is_ok_and(|status| status.success()) && archived.is_ok_and(|status| status.success())) {
        return Err(failed("its sources could not be unpacked with git archive and tar".to_owned()));
    }
    say(&format!("building {revision}; the first build takes minutes"));
    let output = Command::new("cargo")
        .args(["build", "--release", "--locked", "--package", "flashcore-cli", "--target-dir"])
        .arg(target)
        .current_dir(sources)
        .env("FLASHCORE_COMMIT", commit)
        .output()
        .map_err(|error| failed(format!("cargo cannot be started: {error}; a Rust toolchain is needed")))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let last: Vec<&str> = said.lines().rev().take(5).collect();
        return Err(failed(last.into_iter().rev().collect::<Vec<_>>().join("\n")));
    }
    Ok(target.join("release").join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_revision_that_there_is_not() {
        let error = binary_of_revision("no-such-revision", Path::new("unused"), |_| {}).expect_err("there is none");
        assert!(matches!(error, BuildError::Revision { .. }), "{error}");
        assert!(!Path::new("unused").exists());
    }
}
