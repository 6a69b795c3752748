//! The command on a machine without a GPU, folders of single tests, and what commands print and write.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use flashcore_bench::util::temporary_folder::TemporaryFolder;
use flashcore_cuda::{CudaError, Driver};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;

/// The command, where there is no GPU and nothing is said about the kernel cache.
pub(crate) fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flashcore"));
    command.args(arguments).env_remove("FLASHCORE_CACHE").env("CUDA_VISIBLE_DEVICES", "");
    command
}

/// Runs the command.
pub(crate) fn flashcore(arguments: &[&str]) -> Output {
    command(arguments).output().expect("the command runs")
}

/// The reason why a process that sees no GPU has none.
pub(crate) fn no_gpu() -> String {
    Driver::load().err().unwrap_or(CudaError::NoDevice).to_string()
}

/// Output of a command, as JSON.
pub(crate) fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)))
}

/// Contents of a file, as JSON.
pub(crate) fn json_of(file: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(file).expect("a file")).expect("JSON")
}

/// A path as an argument.
pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("a path of letters")
}

/// A folder of one test, removed with it.
pub(crate) struct Scratch(TemporaryFolder);

impl Scratch {
    pub(crate) fn new(name: &str) -> Self {
        Self(TemporaryFolder::new(&format!("test-{name}")).expect("a folder"))
    }

    /// One in which other users may write, too.
    #[cfg(unix)]
    pub(crate) fn shared(name: &str) -> Self {
        use std::os::unix::fs::PermissionsExt;
        let scratch = Self::new(name);
        fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o777)).expect("it is ours");
        scratch
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        fs::write(self.file(name), contents).expect("written");
        self.file(name)
    }

    pub(crate) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.file(name)).expect("read")
    }

    /// The names in the folder, sorted.
    pub(crate) fn names(&self) -> Vec<String> {
        let files = fs::read_dir(self.path()).expect("a folder");
        let mut names: Vec<_> = files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// The command, in the folder.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = command(arguments);
        command.current_dir(self.path());
        command
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().expect("the command runs")
    }

    /// The command by a shell, which does something before it becomes the command, as `"$@"`.
    pub(crate) fn shell(&self, script: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh", env!("CARGO_BIN_EXE_flashcore")]).args(arguments);
        command.current_dir(self.path()).env("CUDA_VISIBLE_DEVICES", "");
        command
    }

    /// Checks the exit code of a command, and its standard error.
    pub(crate) fn check(&self, arguments: &[&str], code: i32, standard_error: &str) {
        let output = self.run(arguments);
        assert_eq!(String::from_utf8_lossy(&output.stderr), standard_error, "{arguments:?}");
        assert_eq!(output.status.code(), Some(code), "{arguments:?}");
    }

    /// Writes tensors of zeros.
    pub(crate) fn tensors(&self, name: &str, tensors: &[(&str, Dtype, &[usize])]) {
        let bytes = |dtype: Dtype, shape: &[usize]| vec![0; shape.iter().product::<usize>() * dtype.bitsize() / 8];
        let data: Vec<Vec<u8>> = tensors.iter().map(|(_, dtype, shape)| bytes(*dtype, shape)).collect();
        let views = tensors.iter().zip(&data).map(|((name, dtype, shape), data)| {
            ((*name).to_owned(), TensorView::new(*dtype, shape.to_vec(), data).expect("a tensor"))
        });
        self.write(name, safetensors::serialize(views, None).expect("a file"));
    }

    /// A file of a small problem, and of further tensors.
    pub(crate) fn problem(&self, name: &str, further: &[&str]) {
        let main = ["query", "key", "value"].map(|name| (name, Dtype::F32, &[1, 1, 4, 8][..]));
        let further = further.iter().map(|name| (*name, Dtype::F32, &[1][..]));
        self.tensors(name, &main.into_iter().chain(further).collect::<Vec<_>>());
    }
}
