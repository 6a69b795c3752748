//! NVIDIA's PTX assembler, ptxas: finds it and runs it.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use flashcore_ir::Arch;

/// The environment variable that names the ptxas to use.
pub const PTXAS_VARIABLE: &str = "FLASHCORE_PTXAS";

/// The folder that `scripts/install-ptxas.sh` installs into, from the root of the repository.
const INSTALLATION: &str = ".venv/ptxas";

/// The reason why a module was not assembled.
#[derive(Debug, thiserror::Error)]
pub enum PtxasError {
    /// No ptxas is installed where [`find`] looks.
    #[error(
        "ptxas was found neither in {INSTALLATION} here or in a directory above, nor on PATH; in a checkout run \
         scripts/install-ptxas.sh, elsewhere `pip install nvidia-cuda-nvcc` (or the CUDA toolkit) and set {PTXAS_VARIABLE} \
         to its ptxas"
    )]
    NotFound,
    /// The environment names a file that is not there.
    #[error("{PTXAS_VARIABLE} is {path:?}, which is not a file; set it to an existing ptxas, or unset it")]
    NoSuchFile {
        /// The value of the variable.
        path: PathBuf,
    },
    /// ptxas could not be run.
    #[error("could not run {path:?} on a temporary file: {source}")]
    Run {
        /// The ptxas.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// ptxas refuses the module.
    #[error("ptxas refuses the module for {arch}:\n{message}")]
    Refused {
        /// The architecture.
        arch: Arch,
        /// The whole output, each complaint followed by the line of PTX that it is about.
        message: String,
    },
    /// ptxas accepted the module, but its report lacks figures; another version may word it otherwise.
    #[error("ptxas reported no resource usage, or in an unknown format:\n{report}")]
    Unreadable {
        /// The report.
        report: String,
    },
}

/// The ptxas to use: the one that the environment names, or the one that `scripts/install-ptxas.sh` installed in the
/// current folder or one above it, or the one on the `PATH`.
pub fn find() -> Result<PathBuf, PtxasError> {
    if let Some(path) = std::env::var_os(PTXAS_VARIABLE) {
        let path = PathBuf::from(path);
        return if path.is_file() { Ok(path) } else { Err(PtxasError::NoSuchFile { path }) };
    }
    let here = std::env::current_dir().unwrap_or_default();
    installed(&here).or_else(|| on_path(&std::env::var_os("PATH")?)).ok_or(PtxasError::NotFound)
}

fn installed(folder: &Path) -> Option<PathBuf> {
    folder.ancestors().find_map(|ancestor| search(&ancestor.join(INSTALLATION)))
}

/// The first file of that name in the folder or below it.
fn search(folder: &Path) -> Option<PathBuf> {
    let file = folder.join(file_name());
    if file.is_file() {
        return Some(file);
    }
    let mut folders: Vec<PathBuf> = fs::read_dir(folder)
        .ok()?
        .filter_map(Result::ok)
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect();
    folders.sort();
    folders.iter().find_map(|folder| search(folder))
}

fn on_path(path: &OsStr) -> Option<PathBuf> {
    std::env::split_paths(path).map(|folder| folder.join(file_name())).find(|file| file.is_file())
}

fn file_name() -> String {
    format!("ptxas{}", std::env::consts::EXE_SUFFIX)
}

/// Compiles a module for an architecture with the ptxas of [`find`], and returns the file for the GPU.
pub fn cubin(ptx: &str, arch: Arch) -> Result<Vec<u8>, PtxasError> {
    Ok(compile(&find()?, ptx, arch)?.1)
}

/// Runs the ptxas at `path` on a module and returns its report.
pub(crate) fn run(path: &Path, ptx: &str, arch: Arch) -> Result<String, PtxasError> {
    Ok(compile(path, ptx, arch)?.0)
}

/// Runs the ptxas at `path` and returns its report and the compiled file.
fn compile(path: &Path, ptx: &str, arch: Arch) -> Result<(String, Vec<u8>), PtxasError> {
    let failed = |source| PtxasError::Run { path: path.to_owned(), source };
    let scratch = Scratch::new().map_err(failed)?;
    let module = scratch.0.join("kernel.ptx");
    let compiled = scratch.0.join("kernel.cubin");
    fs::write(&module, ptx).map_err(failed)?;
    let output = Command::new(path)
        .args(["-v", &format!("-arch={arch}"), "-o"])
        .args([&compiled, &module])
        .output()
        .map_err(failed)?;
    let report = [output.stdout, output.stderr].concat();
    let report = String::from_utf8_lossy(&report).replace(&*module.to_string_lossy(), "kernel.ptx");
    if output.status.success() {
        Ok((report, fs::read(&compiled).map_err(failed)?))
    } else {
        Err(PtxasError::Refused { arch, message: crate::log::with_lines(&report, ptx) })
    }
}

/// A folder of one run, removed with it.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> io::Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let folder = std::env::temp_dir().join(format!("flashcore-ptxas-{}-{number}", std::process::id()));
            match fs::create_dir(&folder) {
                Ok(()) => return Ok(Self(folder)),
                // Left by an earlier process of the same number that was killed.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A folder left over among the temporary files harms nobody.
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_installation_above_is_found() {
        let root = Scratch::new().unwrap();
        let (work, tools) = (root.0.join("crates/kernels"), root.0.join(".venv/ptxas/lib/python/nvidia/bin"));
        fs::create_dir_all(&work).unwrap();
        fs::create_dir_all(&tools).unwrap();
        assert_eq!(search(&root.0.join(INSTALLATION)), None);
        let ptxas = tools.join(file_name());
        fs::write(&ptxas, "").unwrap();
        assert_eq!(installed(&work), Some(ptxas.clone()));
        let path = std::env::join_paths([work, tools]).unwrap();
        assert_eq!(on_path(&path), Some(ptxas));
    }

    #[test]
    fn scratch_folders_are_distinct_and_removed() {
        let (first, second) = (Scratch::new().unwrap(), Scratch::new().unwrap());
        assert_ne!(first.0, second.0);
        let folder = first.0.clone();
        drop(first);
        assert!(!folder.exists());
    }
}
