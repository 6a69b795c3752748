//! Atomic reads and writes of single files: a reader sees a whole file or none, whichever process dies when.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// File extension of files that are being written.
pub(super) const TEMPORARY: &str = "tmp";
/// The largest file that is read: far larger than any kernel, and far too small to exhaust the memory.
const MOST_BYTES: u64 = 256 << 20;

/// The result of reading a path.
#[derive(Debug)]
pub(super) enum FileContents {
    Nothing,
    Bytes(Vec<u8>),
    /// Something that this crate does not write: a link, a pipe, a folder, a file of another user.
    Foreign(String),
}

/// Reads a file, if it is a regular file of this user that nobody else can write to.
pub(super) fn read(path: &Path) -> io::Result<FileContents> {
    let mut options = OpenOptions::new();
    options.read(true);
    // Does not follow a link, nor wait for a writer if it is a pipe.
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let file = match options.open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(FileContents::Nothing),
        #[cfg(unix)]
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => {
            return Ok(FileContents::Foreign("a symbolic link".to_owned()));
        }
        Err(error) => return Err(error),
    };
    let metadata = file.metadata()?;
    if let Some(reason) = stranger(&metadata) {
        return Ok(FileContents::Foreign(reason));
    }
    let mut bytes = Vec::with_capacity(metadata.len() as usize);
    file.take(MOST_BYTES).read_to_end(&mut bytes)?;
    Ok(FileContents::Bytes(bytes))
}

fn stranger(metadata: &fs::Metadata) -> Option<String> {
    if !metadata.is_file() {
        return Some("not a regular file".to_owned());
    }
    if metadata.len() > MOST_BYTES {
        return Some(format!("a file of {} bytes; no kernel has more than {MOST_BYTES}", metadata.len()));
    }
    #[cfg(unix)]
    {
        use super::folder::{rule, user};
        use std::os::unix::fs::MetadataExt;
        match rule::folder(metadata.uid(), metadata.mode(), user()) {
            Ok(()) => {}
            Err(rule::Broken::Owner { owner, user }) => {
                return Some(format!("a file of user {owner}, read as user {user}"));
            }
            Err(rule::Broken::Mode { mode }) => {
                return Some(format!("a file with mode {mode:o}, which others can write to"));
            }
        }
    }
    None
}

/// Writes a whole file under a name of `folder`, replacing the file that is there.
///
/// The bytes go to a temporary file, reach the disk, and only then take the name, atomically. A process that dies
/// before that leaves a temporary file, which [`sweep`] removes.
pub(crate) fn write(folder: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    write_with(folder, name, |file| file.write_all(bytes))
}

fn write_with(folder: &Path, name: &str, fill: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    let (mut file, path) = create_temporary(folder, name)?;
    // Held until the file is closed, by this process or by its death: `sweep` tells by it that the writer lives. A file
    // system without locks has no sweep either.
    let _ = file.try_lock();
    let written = fill(&mut file).and_then(|()| file.sync_all()).and_then(|()| fs::rename(&path, folder.join(name)));
    // A process forked by another thread meanwhile has the file open too; its copy holds no lock after this.
    let _ = file.unlock();
    if written.is_err() {
        // The name is unique to this call, so the removed file is ours; if that fails too, `sweep` removes it.
        let _ = fs::remove_file(&path);
    }
    written
}

fn create_temporary(folder: &Path, name: &str) -> io::Result<(File, PathBuf)> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        // The clock tells apart processes with the same number in different containers; `create_new` decides.
        let clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.subsec_nanos());
        let path = folder.join(format!(".{name}.{}.{number}.{clock}.{TEMPORARY}", std::process::id()));
        match options.open(&path) {
            Ok(file) => return Ok((file, path)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
}

/// Removes temporary files whose writers are dead, and returns their number. The lock on a file tells that its writer
/// lives.
pub(super) fn sweep(folder: &Path) -> usize {
    let Ok(files) = fs::read_dir(folder) else { return 0 };
    let temporary = |path: &PathBuf| path.extension().is_some_and(|extension| extension == TEMPORARY);
    files.flatten().map(|file| file.path()).filter(temporary).filter(|path| remove_if_abandoned(path)).count()
}

fn remove_if_abandoned(path: &Path) -> bool {
    let mut options = OpenOptions::new();
    options.write(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NOFOLLOW | libc::O_NONBLOCK);
    // Between the creation of a file and its lock a living writer can lose it here; its rename then fails, and it
    // continues with what it has in memory.
    options.open(path).is_ok_and(|file| file.try_lock().is_ok()) && fs::remove_file(path).is_ok()
}

/// True for an error that says nothing about the next write: another process was faster, the network failed for a
/// moment, the process has too many files open.
pub(super) fn is_passing(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, IsADirectory, NotFound, ResourceBusy, StaleNetworkFileHandle, WouldBlock};
    #[cfg(unix)]
    if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) {
        return true;
    }
    matches!(error.kind(), NotFound | StaleNetworkFileHandle | ResourceBusy | Interrupted | WouldBlock | IsADirectory)
}

#[cfg(test)]
mod tests {
    use super::super::scratch::Scratch;
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(folder).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_failed_write_leaves_the_old_file_and_nothing_else() {
        let scratch = Scratch::new("failed-write");
        write(scratch.path(), "name", b"old").unwrap();
        let full = write_with(scratch.path(), "name", |file| {
            file.write_all(b"half of the n")?;
            Err(io::ErrorKind::StorageFull.into())
        });
        assert_eq!(full.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(fs::read(scratch.path().join("name")).unwrap(), b"old");
        assert_eq!(names(scratch.path()), ["name"]);
    }

    #[test]
    fn sweep_removes_what_the_dead_left_and_nothing_else() {
        let scratch = Scratch::new("sweep");
        let folder = scratch.path();
        fs::write(folder.join(".dead.1.0.0.tmp"), b"half").unwrap();
        fs::write(folder.join("entry"), b"whole").unwrap();
        let (alive, path) = create_temporary(folder, "alive").unwrap();
        alive.try_lock().unwrap();
        assert_eq!(sweep(folder), 1);
        assert_eq!(names(folder), [path.file_name().unwrap().to_str().unwrap(), "entry"]);
        drop(alive);
        assert_eq!(sweep(folder), 1);
        assert_eq!(names(folder), ["entry"]);
    }

    #[test]
    #[cfg(unix)]
    fn strangers_are_not_read() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let scratch = Scratch::new("strangers");
        let at = |name: &str| scratch.path().join(name);
        fs::write(at("file"), b"bytes").unwrap();
        symlink(at("file"), at("link")).unwrap();
        fs::create_dir(at("folder")).unwrap();
        fs::write(at("open"), b"bytes").unwrap();
        fs::set_permissions(at("open"), PermissionsExt::from_mode(0o666)).unwrap();
        let pipe = std::ffi::CString::new(at("pipe").into_os_string().into_encoded_bytes()).unwrap();
        // SAFETY: the function reads a path with a terminating zero.
        assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
        let huge = File::create(at("huge")).unwrap();
        huge.set_len(MOST_BYTES + 1).unwrap();
        for (name, expected) in [
            ("file", "Bytes([98, 121, 116, 101, 115])"),
            ("nothing", "Nothing"),
            ("link", "Foreign(\"a symbolic link\")"),
            ("folder", "Foreign(\"not a regular file\")"),
            ("pipe", "Foreign(\"not a regular file\")"),
            ("open", "Foreign(\"a file with mode 666, which others can write to\")"),
            ("huge", "Foreign(\"a file of 268435457 bytes; no kernel has more than 268435456\")"),
        ] {
            assert_eq!(format!("{:?}", read(&at(name)).unwrap()), expected, "{name}");
        }
    }

    #[test]
    fn which_errors_pass() {
        for (kind, passing) in [
            (io::ErrorKind::NotFound, true),
            (io::ErrorKind::StaleNetworkFileHandle, true),
            (io::ErrorKind::ResourceBusy, true),
            (io::ErrorKind::StorageFull, false),
            (io::ErrorKind::QuotaExceeded, false),
            (io::ErrorKind::ReadOnlyFilesystem, false),
            (io::ErrorKind::PermissionDenied, false),
        ] {
            assert_eq!(is_passing(&kind.into()), passing, "{kind:?}");
        }
    }
}
