//! Folders of single tests, and commands in them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use flashcore_bench::util::temporary_folder::TemporaryFolder;
use safetensors::tensor::{Dtype, TensorView};

/// A folder of one test, removed with it.
pub(crate) struct Scratch(TemporaryFolder);

impl Scratch {
    pub(crate) fn new(name: &str) -> Self {
        let folder = TemporaryFolder::new(&format!("test-{name}")).expect("a folder");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            // Tests run commands as other users, too.
            fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).expect("it is ours");
        }
        Self(folder)
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

    /// The command, in the folder, on a machine without a GPU.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flashcore"));
        command.args(arguments).current_dir(self.path()).env("CUDA_VISIBLE_DEVICES", "");
        command
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().expect("the command runs")
    }

    /// The same by a shell, which does something before it becomes the command, as `"$@"`.
    pub(crate) fn shell(&self, script: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh", env!("CARGO_BIN_EXE_flashcore")]).args(arguments);
        command.current_dir(self.path()).env("CUDA_VISIBLE_DEVICES", "");
        command
    }

    /// How a command ends, and what it says on standard error.
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
