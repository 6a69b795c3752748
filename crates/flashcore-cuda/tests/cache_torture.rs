//! The cache under processes that are killed and files that are damaged.
//!
//! Sixteen processes read and write one small set of entries. Two hundred times one of them is killed with SIGKILL at a
//! random moment and replaced, while bits of random files are flipped and files are cut off. Every payload is a function
//! of its key, so whoever loads one knows whether it is right. Nothing may hang, crash or load a wrong payload.
//!
//! A worker is this test binary run again, with a variable that names the folder and the seed.

#![cfg(unix)]

use std::convert::Infallible;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use flashcore_cuda::cache::{CacheOptions, Compiled, KernelCache, Key, KeySource, Metadata, SelfCheck};

const PROCESSES: usize = 16;
const KILLS: usize = 200;
const ENTRIES: u64 = 24;
const LARGEST_PAYLOAD: u64 = 96 * 1024;
/// A kill comes at most this long after the previous one.
const LONGEST_PAUSE: Duration = Duration::from_millis(80);
/// All of it ends by then, or something hangs.
const LIMIT: Duration = Duration::from_secs(55);
/// The time in which a worker must end after it is told to stop.
const LAST_STEPS: Duration = Duration::from_secs(20);

const FOLDER: &str = "FLASHCORE_TORTURE_FOLDER";
const SEED: &str = "FLASHCORE_TORTURE_SEED";
/// Workers leave when this file exists.
const STOP: &str = "stop";

/// A generator of random numbers (xorshift64*), the same on every machine.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) % limit
    }
}

fn key(number: u64) -> Key {
    let ptx = format!("kernel {number}");
    Key::of(&KeySource { ptx: &ptx, options: "", arch: "sm_90", driver: "13000", crate_version: "0.1.0" })
}

/// The payload of an entry: its bytes follow from the key alone.
fn payload(key: Key) -> Vec<u8> {
    let seed = u64::from_le_bytes(*key.bytes().first_chunk().unwrap());
    let mut random = Random::new(seed);
    let length = random.below(LARGEST_PAYLOAD);
    (0..length).map(|_| random.below(256) as u8).collect()
}

fn compile(key: Key, random: &mut Random) -> Compiled {
    // Time to be killed in.
    thread::sleep(Duration::from_micros(random.below(3_000)));
    let metadata = Metadata {
        kernel: key.to_string(),
        arch: "sm_90".to_owned(),
        driver: "13000".to_owned(),
        log: "x".repeat(random.below(500) as usize),
        compile_milliseconds: 1,
        self_check: SelfCheck::NotRun,
    };
    Compiled { metadata, payload: payload(key) }
}

/// A worker process: uses all operations of the cache, in random order, until it is told to stop or killed.
#[test]
fn worker() {
    let (Some(folder), Ok(seed)) = (std::env::var_os(FOLDER).map(PathBuf::from), std::env::var(SEED)) else {
        // A test run, not a worker.
        return;
    };
    let mut random = Random::new(seed.parse().unwrap());
    let start = Instant::now();
    let mut cache = KernelCache::open(CacheOptions::folder(&folder));
    while !folder.join(STOP).exists() {
        assert!(start.elapsed() < LIMIT, "nobody has told me to stop");
        let key = key(random.below(ENTRIES));
        match random.below(200) {
            // Without its memory, so that the disk is read.
            0..80 => cache = KernelCache::open(CacheOptions::folder(&folder)),
            80..90 => {
                let verdicts = [SelfCheck::Passed, SelfCheck::Failed { reason: "x".repeat(300) }, SelfCheck::NotRun];
                cache.set_verdict(key, verdicts[random.below(3) as usize].clone());
            }
            90..93 => drop(cache.verify().unwrap()),
            93 => drop(cache.clear().unwrap()),
            94..97 => {
                for listed in cache.list().unwrap() {
                    assert_eq!(listed.metadata.kernel, listed.key.to_string());
                    assert_eq!(listed.payload_bytes, payload(listed.key).len());
                }
            }
            _ => {
                let Ok(found) = cache.get_or_compile(key, || Ok::<_, Infallible>(compile(key, &mut random)));
                assert!(found.entry.payload == payload(key), "a wrong payload from {:?}", found.source);
                assert_eq!(found.entry.metadata.kernel, key.to_string());
            }
        }
    }
    assert_eq!(cache.read_only(), None);
}

fn spawn(folder: &Path, seed: u64) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["worker", "--exact", "--quiet", "--nocapture"])
        .env(FOLDER, folder)
        .env(SEED, seed.to_string())
        .stdout(Stdio::null())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap()
}

/// Flips bits, truncates files and lets them grow, until told to stop. Returns how often.
fn damage(folder: &Path, stop: &AtomicBool) -> usize {
    let mut random = Random::new(3);
    let mut damaged = 0;
    while !stop.load(Ordering::Relaxed) {
        thread::sleep(Duration::from_millis(2));
        let Ok(files) = fs::read_dir(folder.join("v1")) else { continue };
        let files: Vec<_> = files.flatten().map(|file| file.path()).collect();
        if files.is_empty() {
            continue;
        }
        let path = &files[random.below(files.len() as u64) as usize];
        let Ok(file) = OpenOptions::new().read(true).write(true).open(path) else { continue };
        let Ok(length) = file.metadata().map(|metadata| metadata.len()) else { continue };
        let position = random.below(length.max(1));
        let done = match random.below(3) {
            0 => {
                let mut byte = [0];
                file.read_at(&mut byte, position)
                    .and_then(|_| file.write_at(&[byte[0] ^ 1 << random.below(8)], position))
            }
            1 => file.set_len(position).map(|()| 1),
            _ => file.write_at(b"more", length),
        };
        damaged += usize::from(done.is_ok());
    }
    damaged
}

/// Processes that do not outlive the test, however it ends.
struct Workers(Vec<Child>);

impl Drop for Workers {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // Most have ended by themselves.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Tells a thread to stop, however its scope ends.
struct StopAtEnd<'flag>(&'flag AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Waits for a process, with a time limit.
fn wait(child: &mut Child, limit: Duration) -> Option<std::process::ExitStatus> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        if Instant::now() > deadline {
            return None;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn nothing_hangs_crashes_or_loads_a_wrong_payload() {
    let folder = std::env::temp_dir().join(format!("flashcore-torture-{}", std::process::id()));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    let start = Instant::now();
    let mut random = Random::new(7);
    let mut seeds = 1..;
    let mut workers = Workers((0..PROCESSES).map(|_| spawn(&folder, seeds.next().unwrap())).collect());

    let stop = AtomicBool::new(false);
    let damaged = AtomicUsize::new(0);
    thread::scope(|scope| {
        scope.spawn(|| damaged.store(damage(&folder, &stop), Ordering::Relaxed));
        let _stop = StopAtEnd(&stop);
        for kill in 0..KILLS {
            thread::sleep(Duration::from_micros(random.below(LONGEST_PAUSE.as_micros() as u64)));
            let victim = &mut workers.0[random.below(PROCESSES as u64) as usize];
            assert_eq!(victim.try_wait().unwrap(), None, "a worker ended by itself before kill {kill}");
            victim.kill().unwrap();
            victim.wait().unwrap();
            *victim = spawn(&folder, seeds.next().unwrap());
        }
    });

    fs::write(folder.join(STOP), b"").unwrap();
    for child in &mut workers.0 {
        let status = wait(child, LAST_STEPS).expect("a worker hangs");
        assert!(status.success(), "a worker failed: {status}");
    }
    // After all that the cache is consistent again, and usable.
    let cache = KernelCache::open(CacheOptions::folder(&folder));
    let verified = cache.verify().unwrap();
    assert!(verified.sound <= ENTRIES as usize && verified.unreadable.is_empty(), "{verified:?}");
    assert_eq!(cache.verify().unwrap().quarantined, []);
    for number in 0..ENTRIES {
        let Ok(found) = cache.get_or_compile(key(number), || Ok::<_, Infallible>(compile(key(number), &mut random)));
        assert!(found.entry.payload == payload(key(number)));
    }
    assert_eq!(cache.verify().unwrap().sound, ENTRIES as usize);
    cache.clear().unwrap();
    assert_eq!(fs::read_dir(folder.join("v1")).unwrap().count(), 0, "clear leaves nothing, not even of the dead");
    fs::remove_dir_all(&folder).unwrap();

    let damaged = damaged.into_inner();
    assert!(damaged > KILLS, "only {damaged} files were damaged");
    assert!(start.elapsed() < LIMIT, "it took {:?}", start.elapsed());
    // Seen with `--nocapture`, and in the report of a failure.
    let mut out = std::io::stdout();
    let _ = writeln!(out, "{KILLS} kills, {damaged} damaged files, {:.1} s", start.elapsed().as_secs_f64());
}
