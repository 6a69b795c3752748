//! `flashcore doctor` and `flashcore cache` as a user meets them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use flashcore_cuda::cache::{CacheOptions, Compiled, KernelCache, Key, KeySource, Metadata, SelfCheck};
use serde_json::Value;

use crate::scratch::{Scratch, command, json, no_gpu};

/// A folder with a kernel cache.
struct Cache(Scratch);

impl Cache {
    fn new(name: &str) -> Self {
        Self(Scratch::new(name))
    }

    /// The folder of the entries, as the cache spells it.
    fn entries(&self) -> PathBuf {
        self.0.file("v1")
    }

    fn flashcore(&self, arguments: &[&str]) -> Output {
        command(arguments).env("FLASHCORE_CACHE_DIR", self.0.path()).output().expect("the command runs")
    }

    /// Puts an entry into the cache, and gives its file.
    fn store(&self, kernel: &str) -> (Key, PathBuf) {
        let cache = KernelCache::open(CacheOptions::folder(self.0.path()));
        let source = KeySource { ptx: kernel, options: "", arch: "sm_90", driver: "13000", crate_version: "0" };
        let key = Key::of(&source);
        let metadata = Metadata {
            kernel: kernel.to_owned(),
            arch: "sm_90".to_owned(),
            driver: "13000 580".to_owned(),
            log: String::new(),
            compile_milliseconds: 120,
            self_check: SelfCheck::Passed,
        };
        let compile = || Ok::<_, std::convert::Infallible>(Compiled { metadata, payload: b"code".to_vec() });
        cache.get_or_compile(key, compile).expect("it cannot fail");
        (key, self.entries().join(format!("{key}.kernel")))
    }
}

fn check(output: &Output, code: i32, standard_output: &str, standard_error: &str) {
    assert_eq!(String::from_utf8_lossy(&output.stderr), standard_error);
    assert_eq!(String::from_utf8_lossy(&output.stdout), standard_output);
    assert_eq!(output.status.code(), Some(code));
}

fn damage(path: &Path) {
    let mut bytes = fs::read(path).expect("an entry");
    *bytes.last_mut().expect("bytes") ^= 1;
    fs::write(path, bytes).expect("written");
}

#[test]
fn an_empty_cache() {
    let cache = Cache::new("empty");
    let folder = cache.entries();
    let folder = folder.display();
    check(&cache.flashcore(&["cache", "list"]), 0, &format!("0 entries with 0 bytes of code in {folder}\n"), "");
    let verified = format!("0 ok, 0 damaged and renamed to *.bad, 0 unreadable in {folder}\n");
    check(&cache.flashcore(&["cache", "verify"]), 0, &verified, "");
    check(&cache.flashcore(&["cache", "clear"]), 0, &format!("removed 0 entries from {folder}\n"), "");
    check(&cache.flashcore(&["cache", "list", "--format", "json"]), 0, "[]\n", "");
}

#[test]
fn a_cache_is_listed_verified_and_cleared() {
    let cache = Cache::new("full");
    let (sound, _) = cache.store("one");
    let (damaged, file) = cache.store("two");
    let output = cache.flashcore(&["cache", "list", "--format", "json"]);
    let rows = json(&output);
    assert_eq!(rows.as_array().map(Vec::len), Some(2));
    let row = rows.as_array().unwrap().iter().find(|row| row["kernel"] == "one").expect("the entry");
    assert_eq!(row["key"], sound.to_string());
    assert_eq!((row["bytes"].as_u64(), row["self_check"].as_str()), (Some(4), Some("passed")));

    damage(&file);
    let output = cache.flashcore(&["cache", "verify", "--format", "csv"]);
    let reason = "the checksum does not match: the file has changed since it was written";
    check(&output, 1, &format!("key,state,reason\n{sound},ok,\n{damaged},DAMAGED,{reason}\n"), "");
    assert!(file.with_extension("bad").exists() && !file.exists());
    assert_eq!(cache.flashcore(&["cache", "verify"]).status.code(), Some(0), "what is set aside is out of the way");

    let removed = format!("removed 1 entry from {}\n", cache.entries().display());
    check(&cache.flashcore(&["cache", "clear"]), 0, &removed, "");
    assert_eq!(fs::read_dir(cache.entries()).unwrap().count(), 0);
}

#[test]
fn a_cache_that_is_off_or_has_no_place() {
    let off = command(&["cache", "list"]).env("FLASHCORE_CACHE", "off").output().expect("the command runs");
    check(&off, 0, "the disk cache is turned off (FLASHCORE_CACHE=off); nothing to show\n", "");
    let cache = Cache::new("place");
    fs::write(cache.entries(), b"a file").unwrap();
    let folder = cache.entries();
    let message = format!(
        "flashcore: {} is not a folder; remove it or set FLASHCORE_CACHE_DIR to another place\n",
        folder.display()
    );
    check(&cache.flashcore(&["cache", "verify"]), 3, "", &message);
}

fn examined(cache: &Cache, arguments: &[&str], code: i32) -> Value {
    let mut command = command(&[&["doctor", "--format", "json"], arguments].concat());
    command.env("FLASHCORE_CACHE_DIR", cache.0.path()).env("RAYON_NUM_THREADS", "1");
    let output = command.output().expect("the command runs");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert_eq!(output.status.code(), Some(code));
    json(&output)
}

#[test]
fn the_doctor_without_a_gpu() {
    let cache = Cache::new("doctor");
    let found = examined(&cache, &["--timings"], 0);
    let keys: Vec<&str> = found.as_object().expect("an object").keys().map(String::as_str).collect();
    assert_eq!(keys, ["flashcore", "driver", "gpus", "cpu", "ptxas", "cache", "noise", "timings"]);
    let no_gpu = no_gpu();
    assert_eq!(found["driver"]["reason"], no_gpu);
    assert_eq!(found["timings"]["reason"], no_gpu);
    assert_eq!(found["gpus"], serde_json::json!([]));
    assert_eq!(found["flashcore"]["version"], env!("CARGO_PKG_VERSION"));
    let level = flashcore_cpu::Level::default_level().expect("a level").to_string();
    assert_eq!((&found["cpu"]["level"], &found["cpu"]["threads"]), (&Value::from(level), &Value::from(1)));
    assert!(found["cpu"]["f32_flops"].as_f64().is_some_and(|flops| flops > 1e8));
    assert_eq!((found["cache"]["sound"].as_u64(), found["cache"]["writable"].as_bool()), (Some(0), Some(true)));
    assert_eq!(fs::read_dir(cache.entries()).unwrap().count(), 0, "the doctor leaves nothing there");
}

#[test]
fn the_doctor_finds_a_damaged_cache() {
    let cache = Cache::new("damaged");
    cache.store("one");
    let (_, file) = cache.store("two");
    damage(&file);
    let found = examined(&cache, &[], 1);
    assert_eq!((found["cache"]["sound"].as_u64(), found["cache"]["quarantined_now"].as_u64()), (Some(1), Some(1)));
    let found = examined(&cache, &[], 0);
    assert_eq!(found["cache"]["quarantined_earlier"].as_u64(), Some(1));
}

/// A driver that is there and too old, made by the compiler that made this test.
#[test]
#[cfg(target_os = "linux")]
fn the_doctor_finds_an_unusable_driver() {
    let scratch = Scratch::new("driver");
    let text = "#[unsafe(no_mangle)] pub unsafe extern \"C\" fn cuDriverGetVersion(version: *mut i32) -> u32 {\n\
                unsafe { *version = 11040 }; 0 }";
    let source = scratch.write("libcuda.rs", text);
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let built = Command::new(compiler)
        .args(["--edition", "2024", "--crate-type", "cdylib", "-o"])
        .args([scratch.file("libcuda.so"), source])
        .status();
    assert!(built.is_ok_and(|status| status.success()), "rustc builds a library");
    let output = command(&["doctor"])
        .env("FLASHCORE_CACHE_DIR", scratch.file("cache"))
        .env("LD_LIBRARY_PATH", scratch.path())
        .output()
        .expect("the command runs");
    let message = "flashcore: driver: the NVIDIA driver is for CUDA 11.4; CUDA 12.0 is the oldest that works: \
                   update the driver\n";
    assert_eq!(String::from_utf8_lossy(&output.stderr), message);
    assert_eq!(output.status.code(), Some(3));
}
