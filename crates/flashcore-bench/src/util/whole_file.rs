//! Output files: regular files replaced as a whole, everything else written through.
//!
//! A rename replaces whatever has the name. That is right for a regular file, which is then there as a whole or not at
//! all, and destroys a device node, a pipe or a symbolic link. So links are followed to their end first, and what is no
//! regular file there is opened and written to, as a shell does with `>`.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process;

/// Symbolic links that are followed one after the other: as many as Linux follows.
const MOST_LINKS: usize = 40;

/// Writes an output file.
///
/// A regular file, or one that is not there yet, is replaced in one step: readers see the old file or the new one, never
/// a part, and an error leaves the old one. Its permissions stay. Symbolic links are followed, those that point nowhere
/// too. A device, a pipe, a socket or a descriptor of a process such as `/dev/stdout` is opened and written to.
pub fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    match Target::of(path)? {
        Target::Open(mut file) => file.write_all(bytes).and_then(|()| file.flush()),
        Target::Replaced { path, old } => replace(&path, old.as_ref(), bytes),
    }
}

/// True if a path names the standard output of this process, as `/dev/stdout` does.
pub fn is_standard_output(path: &Path) -> bool {
    matches!(last_link(path), Ok(End::Descriptor { own: Some(1) }))
}

/// True if two paths name one regular file, by whatever links and however they are spelt; for files that are not there
/// yet, if writing to both would make one.
pub fn is_same_file(one: &Path, other: &Path) -> bool {
    match (fs::metadata(one), fs::metadata(other)) {
        (Ok(found), Ok(others)) => {
            found.is_file() && others.is_file() && identity(one, &found) == identity(other, &others)
        }
        (Err(_), Err(_)) => future(one).is_some_and(|path| Some(path) == future(other)),
        (Ok(_), Err(_)) | (Err(_), Ok(_)) => false,
    }
}

#[cfg(unix)]
fn identity(_path: &Path, metadata: &Metadata) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt;
    (metadata.dev(), metadata.ino())
}

#[cfg(not(unix))]
fn identity(path: &Path, _metadata: &Metadata) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// The one name of a file that is yet to be written.
fn future(path: &Path) -> Option<PathBuf> {
    let End::Name(path) = last_link(path).ok()? else { return None };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Some(folder.canonicalize().ok()?.join(path.file_name()?))
}

/// Destination of the bytes for a path.
enum Target {
    /// Into what is open: no regular file of its own.
    Open(File),
    /// Under a name, in place of `old`.
    Replaced { path: PathBuf, old: Option<Metadata> },
}

impl Target {
    fn of(path: &Path) -> io::Result<Self> {
        let path = match last_link(path)? {
            // Another description of the same file would begin at its start, and so write over what was printed.
            End::Descriptor { own: Some(1) } => return standard(&io::stdout()).map(Self::Open),
            End::Descriptor { own: Some(2) } => return standard(&io::stderr()).map(Self::Open),
            End::Descriptor { .. } => return open(path).map(Self::Open),
            End::Name(path) => path,
        };
        let old = match fs::symlink_metadata(&path) {
            Ok(old) => old,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::Replaced { path, old: None }),
            Err(error) => return Err(error),
        };
        if is_socket(&old) {
            return connect(&path).map(Self::Open);
        }
        if !old.is_file() {
            return open(&path).map(Self::Open);
        }
        // Who may not write to the file may not replace it either, whatever the folder allows.
        OpenOptions::new().write(true).open(&path)?;
        Ok(Self::Replaced { path, old: Some(old) })
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).truncate(true).open(path)
}

#[cfg(unix)]
fn is_socket(metadata: &Metadata) -> bool {
    std::os::unix::fs::FileTypeExt::is_socket(&metadata.file_type())
}

#[cfg(unix)]
fn connect(path: &Path) -> io::Result<File> {
    let stream = std::os::unix::net::UnixStream::connect(path)?;
    Ok(std::os::fd::OwnedFd::from(stream).into())
}

#[cfg(not(unix))]
fn is_socket(_metadata: &Metadata) -> bool {
    false
}

#[cfg(not(unix))]
fn connect(path: &Path) -> io::Result<File> {
    open(path)
}

#[cfg(unix)]
fn standard(stream: &impl std::os::fd::AsFd) -> io::Result<File> {
    Ok(stream.as_fd().try_clone_to_owned()?.into())
}

#[cfg(not(unix))]
fn standard<T>(_stream: &T) -> io::Result<File> {
    Err(io::Error::other("this system has no names for open files"))
}

/// End of the links of a path.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// At a name, with a file or without.
    Name(PathBuf),
    /// At a descriptor of a process, in /proc; its number if the process is this one.
    Descriptor { own: Option<u32> },
}

fn last_link(path: &Path) -> io::Result<End> {
    let mut path = path.to_owned();
    for _ in 0..MOST_LINKS {
        if path.as_os_str().as_encoded_bytes().ends_with(b"/") || path.file_name().is_none() {
            return Err(io::Error::other("this is the name of a folder, not of a file"));
        }
        if !fs::symlink_metadata(&path).is_ok_and(|found| found.is_symlink()) {
            return Ok(End::Name(path));
        }
        if let Some(end) = descriptor(&path) {
            return Ok(end);
        }
        let linked = fs::read_link(&path)?;
        // From the folder of the link; an absolute one replaces it all.
        path = path.parent().unwrap_or(Path::new("")).join(linked);
    }
    Err(io::Error::other(format!("more than {MOST_LINKS} symbolic links follow one another")))
}

/// The descriptor that a link in /proc stands for; nothing for any other link.
fn descriptor(link: &Path) -> Option<End> {
    let folder = link.parent()?.canonicalize().ok()?;
    if !folder.starts_with("/proc") || folder.file_name()? != "fd" {
        return None;
    }
    let own = Path::new("/proc").join(process::id().to_string());
    let number = || link.file_name()?.to_str()?.parse().ok();
    Some(End::Descriptor { own: if folder.starts_with(own) { number() } else { None } })
}

fn replace(path: &Path, old: Option<&Metadata>, bytes: &[u8]) -> io::Result<()> {
    let (mut file, temporary) = create_temporary(path, old.is_some())?;
    let mut write = || {
        file.write_all(bytes)?;
        if let Some(old) = old {
            keep_attributes(&file, old)?;
        }
        file.sync_all()?;
        fs::rename(&temporary, path)
    };
    let written = write();
    if written.is_err() {
        // The error that is returned is the one to hear of.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// A new file in the folder of another: a rename cannot cross file systems. What will have the permissions of an old
/// file is closed to others until then.
fn create_temporary(path: &Path, is_private: bool) -> io::Result<(File, PathBuf)> {
    let mut options = OpenOptions::new();
    // Never a file, nor the end of a link, that somebody else has put there.
    options.write(true).create_new(true);
    #[cfg(unix)]
    if is_private {
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    }
    #[cfg(not(unix))]
    let _ = is_private;
    let mut number = 0u32;
    loop {
        let temporary = path.with_file_name(format!(".flashcore-{}-{number}.tmp", process::id()));
        match options.open(&temporary) {
            Ok(file) => return Ok((file, temporary)),
            // Another thread's, or left by an earlier process of the same number that was killed.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && number < u32::MAX => number += 1,
            Err(error) => {
                let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
                let reason = format!("no temporary file can be made in {}: {error}", folder.display());
                return Err(io::Error::new(error.kind(), reason));
            }
        }
    }
}

fn keep_attributes(file: &File, old: &Metadata) -> io::Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::{MetadataExt, fchown};
        let new = file.metadata()?;
        if (new.uid(), new.gid()) != (old.uid(), old.gid()) {
            // Only an administrator may give files away; for others the new file is theirs.
            let _ = fchown(file, Some(old.uid()), Some(old.gid()));
        }
    }
    file.set_permissions(old.permissions())
}
