//! The folder of the cache, and the checks that it can be trusted with code that will run.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The folder of this version of the format. A later version uses another, so that two releases of this crate can be
/// used side by side and neither reads a format that it does not know.
const FORMAT_FOLDER: &str = "v1";

/// The reason why nothing is kept on disk.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoDisk {
    /// The caller or `FLASHCORE_CACHE=off` turned it off.
    #[error("the disk cache is turned off")]
    Off,
    /// No variable names a folder, and there is no home directory.
    #[error("there is no folder for the cache; set FLASHCORE_CACHE_DIR to one, or HOME")]
    NoHome,
    /// The path exists and is not a folder.
    #[error("{} is not a folder; remove it or set FLASHCORE_CACHE_DIR to another place", path.display())]
    NotAFolder {
        /// The path.
        path: PathBuf,
    },
    /// Another user owns the folder and could put code there.
    #[error(
        "{} belongs to user {owner} and this process runs as user {user}; \
         set FLASHCORE_CACHE_DIR to a folder of your own", path.display()
    )]
    ForeignOwner {
        /// The folder.
        path: PathBuf,
        /// The owner.
        owner: u32,
        /// The user this process runs as.
        user: u32,
    },
    /// Others can write to the folder and could put code there.
    #[error("{} has mode {mode:o}, so others can write to it; run `chmod 700` on it", path.display())]
    WritableByOthers {
        /// The folder.
        path: PathBuf,
        /// The permissions.
        mode: u32,
    },
    /// The system refused.
    #[error("cannot use {}: {reason}", path.display())]
    Unusable {
        /// The folder.
        path: PathBuf,
        /// The system's message.
        reason: String,
    },
}

/// The folder that the environment names.
pub(super) fn from_environment(
    variable: impl Fn(&str) -> Option<OsString>,
    home: Option<PathBuf>,
) -> Result<PathBuf, NoDisk> {
    let folder = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if variable("FLASHCORE_CACHE").is_some_and(|value| value == "off" || value == "0") {
        return Err(NoDisk::Off);
    }
    if let Some(folder) = folder("FLASHCORE_CACHE_DIR") {
        return Ok(folder);
    }
    // The XDG specification says to ignore a relative path there.
    if let Some(caches) = folder("XDG_CACHE_HOME").filter(|folder| folder.is_absolute()) {
        return Ok(caches.join("flashcore"));
    }
    if cfg!(windows)
        && let Some(local) = folder("LOCALAPPDATA")
    {
        return Ok(local.join("flashcore").join("cache"));
    }
    let home = home.filter(|home| home.is_absolute()).ok_or(NoDisk::NoHome)?;
    Ok(home.join(".cache").join("flashcore"))
}

/// Creates the folder of this format in `base` where it is missing, and checks both.
pub(super) fn prepare(base: &Path) -> Result<PathBuf, NoDisk> {
    let folder = base.join(FORMAT_FOLDER);
    create(&folder)?;
    // The base may be a link to another disk; the folder with the code may not.
    judge_base(base)?;
    judge_folder(&folder)?;
    Ok(folder)
}

fn create(folder: &Path) -> Result<(), NoDisk> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    match builder.create(folder) {
        Ok(()) => Ok(()),
        Err(error) => match error.kind() {
            io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory => {
                Err(NoDisk::NotAFolder { path: folder.to_owned() })
            }
            _ => Err(unusable(folder, &error)),
        },
    }
}

fn unusable(path: &Path, error: &io::Error) -> NoDisk {
    NoDisk::Unusable { path: path.to_owned(), reason: error.to_string() }
}

#[cfg(unix)]
fn judge_base(base: &Path) -> Result<(), NoDisk> {
    use std::os::unix::fs::MetadataExt;
    let metadata = fs::metadata(base).map_err(|error| unusable(base, &error))?;
    rule::base(metadata.uid(), metadata.mode(), user()).map_err(|broken| broken.of(base))
}

#[cfg(unix)]
fn judge_folder(folder: &Path) -> Result<(), NoDisk> {
    use std::os::unix::fs::MetadataExt;
    let metadata = fs::symlink_metadata(folder).map_err(|error| unusable(folder, &error))?;
    if !metadata.is_dir() {
        return Err(NoDisk::NotAFolder { path: folder.to_owned() });
    }
    rule::folder(metadata.uid(), metadata.mode(), user()).map_err(|broken| broken.of(folder))
}

/// On other systems a folder below the profile of a user is theirs by default.
#[cfg(not(unix))]
fn judge_base(_base: &Path) -> Result<(), NoDisk> {
    Ok(())
}

#[cfg(not(unix))]
fn judge_folder(folder: &Path) -> Result<(), NoDisk> {
    let metadata = fs::symlink_metadata(folder).map_err(|error| unusable(folder, &error))?;
    if metadata.is_dir() { Ok(()) } else { Err(NoDisk::NotAFolder { path: folder.to_owned() }) }
}

/// The effective user of this process.
#[cfg(unix)]
pub(super) fn user() -> u32 {
    // SAFETY: the call takes nothing, touches no memory of ours and cannot fail.
    unsafe { libc::geteuid() }
}

/// The allowed owners and permissions of a folder, as functions of owner and mode alone.
#[cfg(unix)]
pub(super) mod rule {
    use super::{NoDisk, Path};

    const WRITABLE_BY_GROUP: u32 = 0o020;
    const WRITABLE_BY_ALL: u32 = 0o002;
    /// Only owners may rename or remove files in such a folder.
    const STICKY: u32 = 0o1000;
    const PERMISSIONS: u32 = 0o7777;
    const ROOT: u32 = 0;

    /// A broken rule.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) enum Broken {
        Owner { owner: u32, user: u32 },
        Mode { mode: u32 },
    }

    impl Broken {
        pub(super) fn of(self, path: &Path) -> NoDisk {
            let path = path.to_owned();
            match self {
                Self::Owner { owner, user } => NoDisk::ForeignOwner { path, owner, user },
                Self::Mode { mode } => NoDisk::WritableByOthers { path, mode },
            }
        }
    }

    /// The parent folder: a user who can write to it can replace ours. A group may, because its members are the user's
    /// choice and on many systems the user alone.
    pub(crate) fn base(owner: u32, mode: u32, user: u32) -> Result<(), Broken> {
        if owner != user && owner != ROOT {
            return Err(Broken::Owner { owner, user });
        }
        if mode & WRITABLE_BY_ALL != 0 && mode & STICKY == 0 {
            return Err(Broken::Mode { mode: mode & PERMISSIONS });
        }
        Ok(())
    }

    /// The folder with the code, and each file in it: the user's own, writable by nobody else.
    pub(crate) fn folder(owner: u32, mode: u32, user: u32) -> Result<(), Broken> {
        if owner != user {
            return Err(Broken::Owner { owner, user });
        }
        if mode & (WRITABLE_BY_GROUP | WRITABLE_BY_ALL) != 0 {
            return Err(Broken::Mode { mode: mode & PERMISSIONS });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(variables: &[(&str, &str)], home: Option<&str>, expected: Result<&str, NoDisk>) {
        let variable = |name: &str| {
            variables.iter().find(|(variable, _)| *variable == name).map(|(_, value)| OsString::from(value))
        };
        assert_eq!(from_environment(variable, home.map(PathBuf::from)), expected.map(PathBuf::from), "{variables:?}");
    }

    #[test]
    #[cfg(unix)]
    fn the_environment_names_the_folder() {
        let home = Some("/home/me");
        check(&[], home, Ok("/home/me/.cache/flashcore"));
        check(&[("XDG_CACHE_HOME", "/var/me")], home, Ok("/var/me/flashcore"));
        check(&[("XDG_CACHE_HOME", "relative")], home, Ok("/home/me/.cache/flashcore"));
        check(&[("XDG_CACHE_HOME", "")], home, Ok("/home/me/.cache/flashcore"));
        check(&[("FLASHCORE_CACHE_DIR", "/fast"), ("XDG_CACHE_HOME", "/var/me")], home, Ok("/fast"));
        check(&[("FLASHCORE_CACHE_DIR", "")], home, Ok("/home/me/.cache/flashcore"));
        check(&[("FLASHCORE_CACHE", "off"), ("FLASHCORE_CACHE_DIR", "/fast")], home, Err(NoDisk::Off));
        check(&[("FLASHCORE_CACHE", "on")], home, Ok("/home/me/.cache/flashcore"));
        check(&[], None, Err(NoDisk::NoHome));
        check(&[], Some("relative"), Err(NoDisk::NoHome));
    }

    #[test]
    #[cfg(unix)]
    fn who_may_own_and_write() {
        use rule::Broken::{Mode, Owner};
        let me = 1000;
        for (owner, mode, base, folder) in [
            (me, 0o700, Ok(()), Ok(())),
            (me, 0o755, Ok(()), Ok(())),
            (me, 0o775, Ok(()), Err(Mode { mode: 0o775 })),
            (me, 0o40_777, Err(Mode { mode: 0o777 }), Err(Mode { mode: 0o777 })),
            (me, 0o1777, Ok(()), Err(Mode { mode: 0o1777 })),
            (0, 0o1777, Ok(()), Err(Owner { owner: 0, user: me })),
            (0, 0o755, Ok(()), Err(Owner { owner: 0, user: me })),
            (1001, 0o700, Err(Owner { owner: 1001, user: me }), Err(Owner { owner: 1001, user: me })),
        ] {
            assert_eq!(rule::base(owner, mode, me), base, "base of {owner} with {mode:o}");
            assert_eq!(rule::folder(owner, mode, me), folder, "folder of {owner} with {mode:o}");
        }
    }
}
