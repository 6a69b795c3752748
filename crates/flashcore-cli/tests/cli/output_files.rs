//! Output files: regular files are replaced whole, everything else is written to, nothing is destroyed.

#![cfg(unix)]
#![expect(clippy::print_stderr, reason = "a test that cannot run here says why")]

use std::fs::{self, Permissions};
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;

use crate::scratch::Scratch;

/// A command that writes a file of a few kilobytes at once, the same one every time.
const DRAW: [&str; 6] = ["roofline", "--device", "h200", "--shape", "1x8x512x64", "--svg"];

fn draw(scratch: &Scratch, file: &str) -> Output {
    scratch.run(&[&DRAW[..], &[file]].concat())
}

/// The picture.
fn drawn(scratch: &Scratch) -> String {
    assert_eq!(draw(scratch, "drawn.svg").status.code(), Some(0));
    let text = scratch.read("drawn.svg");
    fs::remove_file(scratch.file("drawn.svg")).expect("it is ours");
    assert!(text.len() > 1024, "{} bytes", text.len());
    text
}

fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}

fn check_error(output: &Output, code: i32, expected: &str) {
    assert_eq!(String::from_utf8_lossy(&output.stderr), format!("flashcore: {expected}\n"));
    assert_eq!(output.status.code(), Some(code));
}

#[test]
fn links_are_followed_to_their_end() {
    let scratch = Scratch::shared("links");
    let expected = drawn(&scratch);
    fs::create_dir(scratch.file("folder")).expect("a folder");
    // Each: links as (name, what it points at), the name that is written to, the file that must then be there.
    let check = |links: &[(&str, &str)], name: &str, file: &str, has_old: bool| {
        if has_old {
            scratch.write(file, "old");
        }
        for (link, target) in links {
            symlink(target, scratch.file(link)).expect("a link");
        }
        let output = draw(&scratch, name);
        assert_eq!(output.status.code(), Some(0), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(scratch.read(file), expected, "{name}");
        assert!(fs::symlink_metadata(scratch.file(file)).expect("it is there").is_file(), "{name}");
        for (link, target) in links {
            assert_eq!(fs::read_link(scratch.file(link)).expect("still a link"), Path::new(target), "{link}");
        }
    };
    check(&[], "plain.svg", "plain.svg", false);
    check(&[], "old.svg", "old.svg", true);
    check(&[("link.svg", "real.svg")], "link.svg", "real.svg", true);
    check(&[("dangling.svg", "new.svg")], "dangling.svg", "new.svg", false);
    check(&[("first.svg", "second.svg"), ("second.svg", "third.svg")], "first.svg", "third.svg", true);
    check(&[("into.svg", "folder/back.svg"), ("folder/back.svg", "../last.svg")], "into.svg", "last.svg", true);
    check(&[("deep.svg", "folder/deep.svg")], "deep.svg", "folder/deep.svg", false);
    let absolute = scratch.file("absolute-target.svg");
    check(&[("absolute.svg", absolute.to_str().unwrap())], "absolute.svg", "absolute-target.svg", false);
    // Nothing temporary is left anywhere.
    let is_temporary = |name: &String| name.starts_with('.');
    assert!(!scratch.names().iter().any(is_temporary), "{:?}", scratch.names());

    symlink("loop.svg", scratch.file("loop.svg")).expect("a link");
    check_error(
        &draw(&scratch, "loop.svg"),
        3,
        "cannot write loop.svg: more than 40 symbolic links follow one another",
    );
    symlink("nowhere/file.svg", scratch.file("lost.svg")).expect("a link");
    check_error(
        &draw(&scratch, "lost.svg"),
        3,
        "cannot write lost.svg: no temporary file can be made in nowhere: No such file or directory (os error 2)",
    );
    check_error(&draw(&scratch, "folder"), 3, "cannot write folder: Is a directory (os error 21)");
    check_error(&draw(&scratch, "folder/"), 3, "cannot write folder/: this is the name of a folder, not of a file");
}

#[test]
fn a_pipe_and_a_socket_are_written_to() {
    let scratch = Scratch::shared("pipe");
    let expected = drawn(&scratch);
    assert!(Command::new("mkfifo").arg(scratch.file("pipe")).status().expect("mkfifo runs").success());
    let pipe = scratch.file("pipe");
    let reader = thread::spawn(move || fs::read_to_string(pipe).expect("what was written"));
    assert_eq!(draw(&scratch, "pipe").status.code(), Some(0));
    // Before the reader is waited for: it would wait for ever at a pipe that is gone.
    assert!(fs::symlink_metadata(scratch.file("pipe")).expect("it is there").file_type().is_fifo());
    assert_eq!(reader.join().expect("it read"), expected);

    let listener = UnixListener::bind(scratch.file("socket")).expect("a socket");
    let reader = thread::spawn(move || {
        let mut text = String::new();
        listener.accept().expect("a writer").0.read_to_string(&mut text).expect("what was written");
        text
    });
    assert_eq!(draw(&scratch, "socket").status.code(), Some(0));
    assert!(fs::symlink_metadata(scratch.file("socket")).expect("it is there").file_type().is_socket());
    assert_eq!(reader.join().expect("it read"), expected);
    assert_eq!(scratch.names(), ["pipe", "socket"]);
}

/// The names of a device that takes everything and of one that is full: own nodes where they can be made, so that a
/// command that replaces them hurts nobody; those of the system where a command cannot replace them.
fn devices(scratch: &Scratch) -> Option<[String; 2]> {
    if !is_root() {
        return Some(["/dev/null".to_owned(), "/dev/full".to_owned()]);
    }
    for (name, minor) in [("null", "3"), ("full", "7")] {
        let made = Command::new("mknod").arg(scratch.file(name)).args(["c", "1", minor]).output();
        if !made.is_ok_and(|made| made.status.success()) {
            eprintln!("not run: mknod makes no device here, and those of the system are not to be risked");
            return None;
        }
    }
    if fs::OpenOptions::new().write(true).open(scratch.file("null")).is_err() {
        eprintln!("not run: devices cannot be opened in {}", scratch.path().display());
        return None;
    }
    Some(["null".to_owned(), "full".to_owned()])
}

#[test]
fn a_device_stays_a_device() {
    let scratch = Scratch::shared("device");
    let Some([null, full]) = devices(&scratch) else { return };
    symlink(&null, scratch.file("link")).expect("a link");
    let check = |arguments: &[&str], code: i32, standard_error: &str| {
        scratch.check(arguments, code, standard_error);
        for device in [&null, &full] {
            let device = fs::symlink_metadata(scratch.path().join(device)).expect("it is there");
            assert!(device.file_type().is_char_device(), "{arguments:?}");
        }
        assert!(fs::symlink_metadata(scratch.file("link")).expect("it is there").is_symlink(), "{arguments:?}");
    };
    scratch.problem("in.safetensors", &[]);
    let small = ["--backend", "cpu", "--shape", "1x1x5x8", "--seconds", "0"];
    check(&[&DRAW[..], &[&null]].concat(), 0, "");
    check(&[&DRAW[..], &["link"]].concat(), 0, "");
    check(&["attend", "in.safetensors", &null], 0, "");
    // What it says of the load is another matter.
    let bench = scratch.command(&[&["bench", "--record", &null], &small[..]].concat()).output().expect("it runs");
    assert_eq!(bench.status.code(), Some(0), "{bench:?}");
    check(&["verify", "--backend", "cpu", "--shape", "1x1x5x8", "--record", &null], 0, "");
    let no_space = format!("flashcore: cannot write {full}: No space left on device (os error 28)\n");
    check(&[&DRAW[..], &[&full]].concat(), 3, &no_space);
    check(&["attend", "in.safetensors", &full], 3, &no_space);
}

#[test]
fn an_old_file_survives_a_disk_that_is_full() {
    let scratch = Scratch::shared("full");
    drawn(&scratch);
    scratch.write("old.svg", "old");
    // A file may have no more than 512 or 1024 bytes; the signal for more is not to end the process.
    let mut limited = scratch.shell(r#"trap "" XFSZ; ulimit -f 1; exec "$@""#, &[&DRAW[..], &["old.svg"]].concat());
    check_error(&limited.output().expect("sh runs"), 3, "cannot write old.svg: File too large (os error 27)");
    assert_eq!(scratch.read("old.svg"), "old");
    assert_eq!(scratch.names(), ["old.svg"]);
}

/// Runs as a user for whom permissions count; nothing where that cannot be.
fn as_user(scratch: &Scratch, arguments: &[&str]) -> Option<Output> {
    const NOBODY: u32 = 65_534;
    let mut command = scratch.command(arguments);
    if is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    match command.output() {
        Ok(output) => Some(output),
        Err(error) => {
            eprintln!(
                "not run: an administrator may write everywhere, and no other user can start the program: {error}"
            );
            None
        }
    }
}

#[test]
fn permissions_are_asked_and_kept() {
    let scratch = Scratch::shared("permissions");
    let expected = drawn(&scratch);
    let mode = |name: &str, mode: u32| {
        fs::set_permissions(scratch.file(name), Permissions::from_mode(mode)).expect("it is ours");
    };
    for kept in [0o600, 0o640, 0o604, 0o755] {
        scratch.write("kept.svg", "old");
        mode("kept.svg", kept);
        assert_eq!(draw(&scratch, "kept.svg").status.code(), Some(0));
        assert_eq!(scratch.read("kept.svg"), expected);
        assert_eq!(fs::metadata(scratch.file("kept.svg")).expect("it is there").mode() & 0o777, kept);
    }
    fs::create_dir(scratch.file("closed")).expect("a folder");
    scratch.write("closed/old.svg", "old");
    mode("closed/old.svg", 0o666);
    mode("closed", 0o555);
    let Some(output) = as_user(&scratch, &[&DRAW[..], &["closed/old.svg"]].concat()) else { return };
    check_error(
        &output,
        3,
        "cannot write closed/old.svg: no temporary file can be made in closed: Permission denied (os error 13)",
    );
    assert_eq!(scratch.read("closed/old.svg"), "old");
    // Who may not write to a file may not replace it either.
    scratch.write("read-only.svg", "old");
    mode("read-only.svg", 0o444);
    let Some(output) = as_user(&scratch, &[&DRAW[..], &["read-only.svg"]].concat()) else { return };
    check_error(&output, 3, "cannot write read-only.svg: Permission denied (os error 13)");
    assert_eq!(scratch.read("read-only.svg"), "old");
    mode("closed", 0o755);
}

#[test]
fn standard_output_is_written_to_as_it_is() {
    let scratch = Scratch::shared("stdout");
    let expected = drawn(&scratch);
    let printed = String::from_utf8(draw(&scratch, "drawn.svg").stdout).expect("text");
    fs::remove_file(scratch.file("drawn.svg")).expect("it is ours");
    // A link such as that of the system, which a command that replaces links is not to be let at as an administrator.
    symlink("/proc/self/fd/1", scratch.file("stdout")).expect("a link");
    let link = if is_root() { "stdout" } else { "/dev/stdout" };
    // Into a pipe, and into a file, whose beginning is not to be written over.
    let output = draw(&scratch, link);
    assert_eq!(String::from_utf8(output.stdout).expect("text"), format!("{printed}{expected}"));
    for (script, old) in [(r#""$@" > out"#, ""), (r#"printf old > out; "$@" >> out"#, "old")] {
        for name in ["stdout", link, "/proc/self/fd/1", "/dev/fd/1"] {
            let status = scratch.shell(script, &[&DRAW[..], &[name]].concat()).status().expect("sh runs");
            assert!(status.success());
            assert_eq!(scratch.read("out"), format!("{old}{printed}{expected}"), "{name}");
        }
    }
    // A file of tensors and nothing else.
    scratch.problem("in.safetensors", &[]);
    assert_eq!(scratch.run(&["attend", "in.safetensors", "out"]).status.code(), Some(0));
    let tensors = fs::read(scratch.file("out")).expect("written");
    assert_eq!(scratch.run(&["attend", "in.safetensors", link]).stdout, tensors);
    let status = scratch.shell(r#""$@" > out"#, &["attend", "in.safetensors", link]).status().expect("sh runs");
    assert!(status.success());
    assert_eq!(fs::read(scratch.file("out")).expect("written"), tensors);
    assert!(fs::symlink_metadata(scratch.file("stdout")).expect("it is there").is_symlink());
}

#[test]
fn a_planted_temporary_file_is_passed_over() {
    let scratch = Scratch::shared("planted");
    let expected = drawn(&scratch);
    scratch.write("victim", "precious");
    let script = r#"ln -s victim .flashcore-$$-0.tmp; : > .flashcore-$$-1.tmp; exec "$@""#;
    let status = scratch.shell(script, &[&DRAW[..], &["new.svg"]].concat()).stdout(Stdio::null()).status();
    assert!(status.expect("sh runs").success());
    assert_eq!((scratch.read("victim").as_str(), scratch.read("new.svg")), ("precious", expected));
    assert_eq!(scratch.names().len(), 4, "what others put there stays: {:?}", scratch.names());
}

#[test]
fn what_is_read_is_not_written_to() {
    let scratch = Scratch::shared("overwriting");
    fs::create_dir(scratch.file("folder")).expect("a folder");
    scratch.problem("in.safetensors", &[]);
    let tensors = fs::read(scratch.file("in.safetensors")).expect("written");
    symlink("in.safetensors", scratch.file("link")).expect("a link");
    symlink("link", scratch.file("second-link")).expect("a link");
    fs::hard_link(scratch.file("in.safetensors"), scratch.file("hard")).expect("a link");
    let whole = scratch.file("in.safetensors");
    let refuse = |input: &str, output: &str| {
        let also = if input == output { String::new() } else { format!(" as {input}") };
        let message = format!(
            "flashcore: {output} is also read{also}, and writing it would destroy that; give the output another name\n"
        );
        scratch.check(&["attend", input, output], 2, &message);
        assert_eq!(fs::read(scratch.file("in.safetensors")).expect("still there"), tensors, "{input} {output}");
    };
    refuse("in.safetensors", "in.safetensors");
    refuse("in.safetensors", "./in.safetensors");
    refuse("folder/../in.safetensors", "in.safetensors");
    refuse("in.safetensors", whole.to_str().unwrap());
    refuse("in.safetensors", "link");
    refuse("second-link", "in.safetensors");
    refuse("in.safetensors", "hard");
    refuse("hard", "second-link");
    // Other commands read files and write files, too.
    let bench = ["bench", "--backend", "cpu", "--shape", "1x1x5x8", "--seconds", "0", "--record", "bench.json"];
    assert_eq!(scratch.run(&bench).status.code(), Some(0));
    let record = scratch.read("bench.json");
    let refused = |arguments: &[&str], message: &str| {
        scratch.check(arguments, 2, &format!("flashcore: {message}\n"));
        assert_eq!(scratch.read("bench.json"), record, "{arguments:?}");
    };
    let also = "bench.json is also read, and writing it would destroy that; give the output another name";
    refused(&["report", "bench.json", "--out", "bench.json"], also);
    refused(&["compare", "bench.json", "bench.json", "--record", "bench.json"], also);
    refused(&["roofline", "--record", "bench.json", "--svg", "bench.json"], also);
    refused(&["ladder", "--from", "bench.json", "--svg", "bench.json"], also);
    refused(&["leaderboard", "--file", "bench.json", "history", "--svg", "bench.json"], {
        // Its board is read first.
        "bench.json: its kind is `measurements`, and `leaderboard` is needed here; `flashcore leaderboard promote FILE` writes one"
    });
    refused(
        &["ladder", "--backend", "sim", "--record", "new.json", "--svg", "./new.json"],
        "new.json and ./new.json are one file; give each output a name of its own",
    );
}
