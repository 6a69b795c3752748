//! The kernel cache: its folder, its integrity, its write access.

use std::fs::{self, File};
use std::path::Path;

use flashcore_cuda::cache::{CacheOptions, KernelCache, NoDisk};
use serde_json::{Value, json};

use super::finding::{Finding, Section, State};

pub(super) fn section() -> Section {
    let cache = KernelCache::open(CacheOptions::default());
    let (state, text, value) = match cache.disk() {
        Ok(folder) => examine(&cache, folder),
        Err(reason) => {
            // Somebody turned it off, or the place cannot be used; kernels are compiled in each process then.
            let state = if *reason == NoDisk::Off { State::Absent } else { State::Note };
            let text = format!("kernels are compiled again in each process: {reason}");
            (state, text, json!({ "folder": Value::Null, "reason": reason.to_string() }))
        }
    };
    Section { key: "cache", value, findings: vec![Finding::new("kernel cache", state, text)] }
}

fn examine(cache: &KernelCache, folder: &Path) -> (State, String, Value) {
    let shown = folder.display();
    let (verified, entries) = match cache.verify().and_then(|verified| Ok((verified, cache.list()?))) {
        Ok(found) => found,
        Err(error) => {
            let text = format!("{shown} cannot be read: {error}");
            return (State::Failed, text.clone(), json!({ "folder": folder, "reason": text }));
        }
    };
    let bytes: usize = entries.iter().map(|entry| entry.payload_bytes).sum();
    let (aside, unreadable) = (verified.quarantined.len(), verified.unreadable.len());
    let earlier = set_aside(folder).saturating_sub(aside);
    let writing = try_writing(folder);
    let mut parts = vec![format!("{shown}: {} valid entries with {bytes} bytes of code", verified.sound)];
    let mut state = State::Well;
    if earlier > 0 {
        parts.push(format!("{earlier} damaged earlier and renamed to *.bad (`flashcore cache clear` removes them)"));
    }
    if let Err(error) = &writing {
        state = State::Note;
        parts.push(format!("READ-ONLY, new kernels stay in memory: {error}"));
    }
    if aside + unreadable > 0 {
        state = State::Failed;
        let set_aside = verified.quarantined.iter().map(|(_, reason)| reason.to_string());
        let reasons: Vec<String> = set_aside.chain(verified.unreadable.iter().map(|(_, said)| said.clone())).collect();
        parts
            .push(format!("{aside} DAMAGED and renamed to *.bad now, {unreadable} unreadable: {}", reasons.join("; ")));
    }
    let value = json!({
        "folder": folder,
        "sound": verified.sound,
        "bytes": bytes,
        "quarantined_now": aside,
        "quarantined_earlier": earlier,
        "unreadable": unreadable,
        "writable": writing.is_ok(),
    });
    (state, parts.join("; "), value)
}

/// Files that were found damaged and renamed, now or earlier.
fn set_aside(folder: &Path) -> usize {
    let Ok(files) = fs::read_dir(folder) else { return 0 };
    files.flatten().filter(|file| file.path().extension().is_some_and(|extension| extension == "bad")).count()
}

/// Tries to make a file there. The cache itself finds out at its first write.
fn try_writing(folder: &Path) -> Result<(), String> {
    // Ends like the cache's own temporary files, so that it is swept if this process dies here.
    let path = folder.join(format!(".doctor.{}.tmp", std::process::id()));
    File::create_new(&path).and_then(|_| fs::remove_file(&path)).map_err(|error| error.to_string())
}
