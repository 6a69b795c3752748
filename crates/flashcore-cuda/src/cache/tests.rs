//! The rules of the cache, one by one.

use std::convert::Infallible;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::entry::tests::entry;
use super::scratch::Scratch;
use super::*;

/// A cache and all its warnings.
struct Heard {
    cache: KernelCache,
    warnings: Arc<Mutex<Vec<Warning>>>,
}

impl Heard {
    fn open(base: &Path) -> Self {
        let warnings = Arc::new(Mutex::new(Vec::new()));
        let listener = warnings.clone();
        let options =
            CacheOptions::folder(base).with_warnings(move |warning| listener.lock().unwrap().push(warning.clone()));
        Self { cache: KernelCache::open(options), warnings }
    }

    /// Looks an entry up as a user does, and returns its origin.
    fn get(&self, wanted: &Entry) -> Source {
        let found = self.cache.get_or_compile(wanted.key, || Ok::<_, Infallible>(compiled(wanted)));
        let Ok(found) = found;
        assert_eq!(found.entry.payload, wanted.payload);
        found.source
    }

    fn warnings(&self) -> Vec<Warning> {
        self.warnings.lock().unwrap().clone()
    }
}

fn compiled(entry: &Entry) -> Compiled {
    Compiled { metadata: entry.metadata.clone(), payload: entry.payload.clone() }
}

fn file_of(base: &Path, key: Key) -> PathBuf {
    base.join("v1").join(format!("{key}.kernel"))
}

fn bad_of(base: &Path, key: Key) -> PathBuf {
    base.join("v1").join(format!("{key}.bad"))
}

#[test]
fn memory_then_disk() {
    let scratch = Scratch::new("memory-then-disk");
    let wanted = entry("k", b"code");
    let first = Heard::open(scratch.path());
    assert_eq!(first.get(&wanted), Source::Compiled);
    assert_eq!(first.get(&wanted), Source::Memory);
    let second = Heard::open(scratch.path());
    assert_eq!(second.get(&wanted), Source::Disk);
    assert_eq!(second.get(&wanted), Source::Memory);
    assert_eq!((first.warnings(), second.warnings()), (vec![], vec![]));
    // One file for the entry, and nothing else: no lock, no temporary file.
    let names: Vec<_> =
        fs::read_dir(scratch.path().join("v1")).unwrap().map(|file| file.unwrap().file_name()).collect();
    assert_eq!(names, [file_of(scratch.path(), wanted.key).file_name().unwrap()]);
}

#[test]
fn the_folder_and_its_files_are_the_users_alone() {
    let scratch = Scratch::new("modes");
    let base = scratch.path().join("new/folders");
    let wanted = entry("k", b"code");
    assert_eq!(Heard::open(&base).get(&wanted), Source::Compiled);
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
    assert_eq!((mode(&base), mode(&base.join("v1")), mode(&file_of(&base, wanted.key))), (0o700, 0o700, 0o600));
}

#[test]
fn what_is_not_the_entry_is_set_aside_and_compiled_again() {
    let wanted = entry("k", b"code");
    let other = entry("other", b"other code");
    let sound = wanted.encode();
    let flipped = [&sound[..sound.len() - 1], &[sound[sound.len() - 1] ^ 1]].concat();
    let cases: [(&str, Vec<u8>, Corruption); 6] = [
        ("flipped", flipped, Corruption::Checksum),
        ("truncated", sound[..20].to_vec(), Corruption::Truncated { bytes: 20 }),
        ("empty", Vec::new(), Corruption::Truncated { bytes: 0 }),
        (
            "cut off",
            sound[..sound.len() - 1].to_vec(),
            Corruption::Length { announced: sound.len() as u64, bytes: sound.len() as u64 - 1 },
        ),
        ("foreign", vec![b'x'; 200], Corruption::Magic),
        ("renamed", other.encode(), Corruption::Key { stored: other.key, requested: wanted.key }),
    ];
    for (name, bytes, corruption) in cases {
        let scratch = Scratch::new("unsound");
        let path = file_of(scratch.path(), wanted.key);
        fs::create_dir(scratch.path().join("v1")).unwrap();
        fs::set_permissions(scratch.path().join("v1"), PermissionsExt::from_mode(0o700)).unwrap();
        fs::write(&path, &bytes).unwrap();
        fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        let heard = Heard::open(scratch.path());
        assert_eq!(heard.get(&wanted), Source::Compiled, "{name}");
        assert_eq!(heard.warnings(), [Warning::Quarantined { path, reason: corruption.into() }], "{name}");
        assert_eq!(fs::read(bad_of(scratch.path(), wanted.key)).unwrap(), bytes, "{name}");
        assert_eq!(Heard::open(scratch.path()).get(&wanted), Source::Disk, "{name}");
    }
}

#[test]
fn links_are_not_followed() {
    let scratch = Scratch::new("links");
    let wanted = entry("k", b"code");
    Heard::open(scratch.path()).get(&wanted);
    // Sound bytes reached through a link: whoever could place the link could exchange them after the check.
    let path = file_of(scratch.path(), wanted.key);
    let elsewhere = scratch.path().join("elsewhere");
    fs::rename(&path, &elsewhere).unwrap();
    symlink(&elsewhere, &path).unwrap();
    let heard = Heard::open(scratch.path());
    assert_eq!(heard.get(&wanted), Source::Compiled);
    let reason = Unsound::Foreign { what: "a symbolic link".to_owned() };
    assert_eq!(heard.warnings(), [Warning::Quarantined { path: path.clone(), reason }]);
    assert!(fs::symlink_metadata(&path).unwrap().is_file());

    // The folder itself as a link.
    let linked = scratch.path().join("linked");
    fs::create_dir(&linked).unwrap();
    symlink(scratch.path().join("v1"), linked.join("v1")).unwrap();
    let reason = NoDisk::NotAFolder { path: linked.join("v1") };
    assert_eq!(KernelCache::open(CacheOptions::folder(&linked)).disk(), Err(&reason));
}

#[test]
fn a_folder_that_others_can_write_to_is_refused() {
    let scratch = Scratch::new("writable");
    let folder = scratch.path().join("v1");
    fs::create_dir(&folder).unwrap();
    for (path, mode) in [(&folder, 0o777), (&folder, 0o770), (&scratch.path().to_owned(), 0o777)] {
        fs::set_permissions(&folder, PermissionsExt::from_mode(0o700)).unwrap();
        fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
        let heard = Heard::open(scratch.path());
        let reason = NoDisk::WritableByOthers { path: path.clone(), mode };
        assert_eq!(heard.cache.disk(), Err(&reason));
        assert_eq!(heard.get(&entry("k", b"code")), Source::Compiled);
        assert_eq!(heard.get(&entry("k", b"code")), Source::Memory);
        assert_eq!(heard.warnings(), [Warning::NoDisk { reason }]);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    }
}

#[test]
fn a_folder_of_somebody_else_is_refused() {
    let user = folder::user();
    if user != 0 {
        // Only root can give a folder away; for everybody else `folder::rule` is tested by itself.
        return;
    }
    let scratch = Scratch::new("foreign");
    let folder = scratch.path().join("v1");
    fs::create_dir(&folder).unwrap();
    fs::set_permissions(&folder, PermissionsExt::from_mode(0o700)).unwrap();
    std::os::unix::fs::chown(&folder, Some(65_534), None).unwrap();
    let heard = Heard::open(scratch.path());
    assert_eq!(heard.cache.disk(), Err(&NoDisk::ForeignOwner { path: folder, owner: 65_534, user }));
    assert_eq!(heard.get(&entry("k", b"code")), Source::Compiled);
}

#[test]
fn a_place_that_cannot_exist_leaves_the_memory() {
    let scratch = Scratch::new("no-place");
    let file = scratch.path().join("file");
    fs::write(&file, b"").unwrap();
    let heard = Heard::open(&file);
    let reason = NoDisk::NotAFolder { path: file.join("v1") };
    assert_eq!(heard.cache.disk(), Err(&reason));
    assert_eq!(heard.get(&entry("k", b"code")), Source::Compiled);
    assert_eq!(heard.get(&entry("k", b"code")), Source::Memory);
    assert_eq!(heard.get(&entry("l", b"code")), Source::Compiled);
    assert_eq!(heard.warnings(), [Warning::NoDisk { reason }]);
}

/// Root may write to any folder that exists, so here the folder turns into a file: for root too, no write can succeed.
#[test]
fn a_disk_that_stops_taking_writes_is_warned_of_once_and_still_read() {
    let scratch = Scratch::new("read-only");
    let kept = entry("kept", b"code");
    assert_eq!(Heard::open(scratch.path()).get(&kept), Source::Compiled);
    let heard = Heard::open(scratch.path());
    let folder = scratch.path().join("v1");
    let moved = scratch.path().join("moved");
    fs::rename(&folder, &moved).unwrap();
    fs::write(&folder, b"").unwrap();
    assert_eq!(heard.get(&entry("a", b"a")), Source::Compiled);
    assert_eq!(heard.get(&entry("b", b"b")), Source::Compiled);
    assert_eq!(heard.get(&entry("a", b"a")), Source::Memory);
    fs::remove_file(&folder).unwrap();
    fs::rename(&moved, &folder).unwrap();
    assert_eq!(heard.get(&kept), Source::Disk);
    assert_eq!(heard.get(&entry("c", b"c")), Source::Compiled);
    let warning = Warning::ReadOnly { folder, reason: "Not a directory (os error 20)".to_owned() };
    assert_eq!(heard.warnings(), std::slice::from_ref(&warning));
    assert_eq!(heard.cache.read_only(), Some(&warning));
    assert_eq!(heard.cache.list().unwrap().len(), 1);
}

#[test]
fn a_folder_that_cannot_be_written_to_is_read() {
    if folder::user() == 0 {
        // Modes do not stop root; the test above has a disk that does.
        return;
    }
    let scratch = Scratch::new("mode-500");
    let kept = entry("kept", b"code");
    Heard::open(scratch.path()).get(&kept);
    let folder = scratch.path().join("v1");
    fs::set_permissions(&folder, PermissionsExt::from_mode(0o500)).unwrap();
    let heard = Heard::open(scratch.path());
    assert_eq!(heard.get(&kept), Source::Disk);
    assert_eq!(heard.get(&entry("a", b"a")), Source::Compiled);
    assert_eq!(heard.get(&entry("b", b"b")), Source::Compiled);
    fs::set_permissions(&folder, PermissionsExt::from_mode(0o700)).unwrap();
    let warning = Warning::ReadOnly { folder, reason: "Permission denied (os error 13)".to_owned() };
    assert_eq!(heard.warnings(), [warning]);
}

#[test]
fn a_folder_that_vanishes_is_made_again() {
    let scratch = Scratch::new("vanishes");
    let heard = Heard::open(scratch.path());
    fs::remove_dir(scratch.path().join("v1")).unwrap();
    assert_eq!(heard.get(&entry("k", b"code")), Source::Compiled);
    assert_eq!(Heard::open(scratch.path()).get(&entry("k", b"code")), Source::Disk);
    assert_eq!(heard.warnings(), []);
}

#[test]
fn errors_of_the_compiler_are_passed_on_and_not_kept() {
    let scratch = Scratch::new("errors");
    let heard = Heard::open(scratch.path());
    let wanted = entry("k", b"code");
    let refused = heard.cache.get_or_compile(wanted.key, || Err("line 12")).unwrap_err();
    assert_eq!(refused, "line 12");
    assert_eq!(heard.get(&wanted), Source::Compiled);
}

#[test]
fn a_panic_of_the_compiler_holds_nobody_up() {
    let scratch = Scratch::new("panic");
    let heard = Heard::open(scratch.path());
    let wanted = entry("k", b"code");
    let compile = || -> Result<Compiled, Infallible> { std::panic::resume_unwind(Box::new("bug")) };
    let panic =
        std::thread::scope(|scope| scope.spawn(|| heard.cache.get_or_compile(wanted.key, compile).map(|_| ())).join());
    assert!(panic.is_err());
    assert_eq!(heard.get(&wanted), Source::Compiled);
}

#[test]
fn threads_compile_once() {
    let scratch = Scratch::new("threads");
    let wanted = entry("k", &[3; 10_000]);
    for options in [CacheOptions::memory(), CacheOptions::folder(scratch.path())] {
        let cache = KernelCache::open(options);
        let compilations = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..16 {
                scope.spawn(|| {
                    let Ok(found) = cache.get_or_compile(wanted.key, || {
                        compilations.fetch_add(1, Ordering::Relaxed);
                        std::thread::sleep(Duration::from_millis(20));
                        Ok::<_, Infallible>(compiled(&wanted))
                    });
                    assert_eq!(found.entry.payload, wanted.payload);
                });
            }
        });
        assert_eq!(compilations.into_inner(), 1);
    }
}

#[test]
fn caches_of_one_folder_compile_once() {
    // Two caches in one process share no memory: they share the lock and the file, as processes do.
    let scratch = Scratch::new("processes");
    let wanted = entry("k", b"code");
    let compilations = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let cache = KernelCache::open(CacheOptions::folder(scratch.path()));
                let Ok(found) = cache.get_or_compile(wanted.key, || {
                    compilations.fetch_add(1, Ordering::Relaxed);
                    std::thread::sleep(Duration::from_millis(50));
                    Ok::<_, Infallible>(compiled(&wanted))
                });
                assert_eq!(found.entry.payload, wanted.payload);
            });
        }
    });
    // A waiter that opened the lock file just before its holder removed it finds the entry on disk, so still one.
    assert_eq!(compilations.into_inner(), 1);
}

#[test]
fn who_waits_too_long_compiles_too() {
    let scratch = Scratch::new("wait");
    let wanted = entry("k", b"code");
    let options = CacheOptions { lock_wait: Duration::from_millis(30), ..CacheOptions::folder(scratch.path()) };
    let cache = KernelCache::open(options);
    let _held = Disk::open(scratch.path()).unwrap().lock(wanted.key, Duration::ZERO).expect("nobody holds it");
    let Ok(found) = cache.get_or_compile(wanted.key, || Ok::<_, Infallible>(compiled(&wanted)));
    assert_eq!(found.source, Source::Compiled);
    assert_eq!(Heard::open(scratch.path()).get(&wanted), Source::Disk);
}

#[test]
fn verdicts_are_kept() {
    let scratch = Scratch::new("verdicts");
    let wanted = entry("k", b"code");
    let verdict = |cache: &KernelCache| {
        let Ok(found) = cache.get_or_compile(wanted.key, || Ok::<_, Infallible>(compiled(&wanted)));
        found.entry.metadata.self_check.clone()
    };
    let heard = Heard::open(scratch.path());
    assert!(!heard.cache.set_verdict(wanted.key, SelfCheck::Passed));
    assert_eq!(verdict(&heard.cache), SelfCheck::NotRun);
    let failed = SelfCheck::Failed { reason: "row 3 is NaN".to_owned() };
    for given in [SelfCheck::Passed, failed, SelfCheck::NotRun] {
        // By a cache that has it in memory, and by one that has not.
        for cache in [&heard.cache, &KernelCache::open(CacheOptions::folder(scratch.path()))] {
            assert!(cache.set_verdict(wanted.key, given.clone()));
            assert_eq!(verdict(cache), given);
            assert_eq!(verdict(&KernelCache::open(CacheOptions::folder(scratch.path()))), given);
        }
    }
    assert_eq!(heard.warnings(), []);
}

#[test]
fn list_verify_and_clear() {
    let scratch = Scratch::new("list");
    let heard = Heard::open(scratch.path());
    let mut entries = [entry("a", b"code of a"), entry("b", b"b"), entry("c", b"")];
    entries.sort_by_key(|entry| entry.key);
    for entry in &entries {
        heard.get(entry);
    }
    let listed = |entry: &Entry| ListedEntry {
        key: entry.key,
        metadata: entry.metadata.clone(),
        payload_bytes: entry.payload.len(),
    };
    assert_eq!(heard.cache.list().unwrap(), entries.iter().map(listed).collect::<Vec<_>>());
    assert_eq!(heard.cache.verify().unwrap(), VerifyReport { sound: 3, ..VerifyReport::default() });

    fs::write(file_of(scratch.path(), entries[1].key), b"short").unwrap();
    fs::write(scratch.path().join("v1/notes.txt"), b"of the user").unwrap();
    assert_eq!(heard.cache.list().unwrap(), [listed(&entries[0]), listed(&entries[2])]);
    let reason = Unsound::Corrupt(Corruption::Truncated { bytes: 5 });
    let expected = VerifyReport { sound: 2, quarantined: vec![(entries[1].key, reason)], unreadable: vec![] };
    assert_eq!(heard.cache.verify().unwrap(), expected);
    assert_eq!(heard.cache.verify().unwrap(), VerifyReport { sound: 2, ..VerifyReport::default() });

    assert_eq!(heard.cache.clear().unwrap(), ClearReport { removed: 2, kept: vec![] });
    let left: Vec<_> = fs::read_dir(scratch.path().join("v1")).unwrap().map(|file| file.unwrap().file_name()).collect();
    assert_eq!(left, ["notes.txt"]);
    assert_eq!(heard.get(&entries[0]), Source::Compiled);
}

#[test]
fn what_the_driver_refuses_is_discarded() {
    let scratch = Scratch::new("discard");
    let wanted = entry("k", b"code");
    let heard = Heard::open(scratch.path());
    heard.get(&wanted);
    let reason = Unsound::Refused { reason: "CUDA_ERROR_INVALID_IMAGE".to_owned() };
    heard.cache.discard(wanted.key, reason.clone());
    let path = file_of(scratch.path(), wanted.key);
    assert_eq!(heard.warnings(), [Warning::Quarantined { path, reason }]);
    assert!(bad_of(scratch.path(), wanted.key).exists());
    assert_eq!(heard.get(&wanted), Source::Compiled);
}
