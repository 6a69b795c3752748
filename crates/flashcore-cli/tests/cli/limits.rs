//! Sizes and numbers that no machine has, and machines that have little: errors with the number, never an abort.

use crate::scratch::Scratch;
use safetensors::tensor::Dtype;

/// The end of a message that says how much memory there is: that depends on the machine.
fn without_available(text: &str) -> String {
    let (before, after) = text.split_once(", and ").unwrap_or((text, ""));
    let end = after.split_once("; ").map_or(after, |(_, end)| end);
    format!("{before}; {end}")
}

#[test]
fn a_problem_larger_than_the_memory_is_an_error() {
    let scratch = Scratch::new("memory");
    let check = |arguments: &[&str], code: i32, message: &str| {
        let output = scratch.run(arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(without_available(&said), format!("flashcore: {message}"), "{arguments:?}");
        assert_eq!(output.status.code(), Some(code), "{arguments:?}");
    };
    let needed = "a smaller problem, or a larger machine, is needed\n";
    let large = "1x1x1000000000000x64";
    let words =
        |dtype: &str| format!("batch 1 heads 1/1 queries 1000000000000 keys 1000000000000 dims 64/64 {dtype} unmasked");
    for backend in ["cpu", "sim"] {
        check(
            &["verify", "--backend", backend, "--shape", large],
            3,
            &format!(
                "judging {} would take at least 3648000000000000 bytes of memory (3.2 PiB); {needed}",
                words("f16")
            ),
        );
    }
    let f32 = format!("{} would take at least 2048000000000000 bytes of memory (1.8 PiB); {needed}", words("f32"));
    check(&["bench", "--backend", "cpu", "--shape", large], 3, &f32);
    check(&["compare", "cpu", "cpu", "--shape", large], 3, &f32);
    let f16 = format!("{} would take at least 1024000000000000 bytes of memory (931.3 TiB); {needed}", words("f16"));
    check(&["ladder", "--backend", "sim", "--shape", large], 3, &f16);
    check(&["tune", "--shape", large], 3, &f16);
    // What does not fit 64 bits either is no problem at all.
    let heads = "query_heads is 3 and key_heads is 2; query_heads must be a multiple of key_heads\n";
    for command in
        [&["verify", "--shape"][..], &["bench", "--shape"], &["compare", "cpu", "cpu", "--shape"], &["ptx", "--shape"]]
    {
        let output = scratch.run(&[command, &["1x3/2x64x64"]].concat());
        assert_eq!(String::from_utf8_lossy(&output.stderr), format!("flashcore: {heads}"), "{command:?}");
        assert_eq!(output.status.code(), Some(2), "{command:?}");
        let output = scratch.run(&[command, &["1x1x18446744073709551615,1x64"]].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let first = "flashcore: query_length is 18446744073709551615; it may be at most 9223372036854775807";
        assert_eq!(said.lines().next(), Some(first), "{command:?}");
        assert_eq!(output.status.code(), Some(2), "{command:?}");
        let output = scratch.run(&[command, &["1x1152921504606846976x1x64+relative"]].concat());
        assert_eq!(output.status.code(), Some(2), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    // A floor needs no memory.
    let floors = scratch.run(&["roofline", "--device", "h200", "--shape", large, "--format", "json"]);
    let rows: serde_json::Value = serde_json::from_slice(&floors.stdout).expect("JSON");
    assert_eq!(rows[0]["gflop"].as_f64(), Some(2.56e17));
}

#[test]
fn an_output_larger_than_the_memory_is_an_error() {
    let scratch = Scratch::new("output");
    scratch.tensors(
        "in.safetensors",
        &[
            ("query", Dtype::F16, &[1, 1, 1 << 22, 1]),
            ("key", Dtype::F16, &[1, 1, 1, 1]),
            ("value", Dtype::F16, &[1, 1, 1, 1 << 16]),
        ],
    );
    let output = scratch.run(&["attend", "in.safetensors", "out.safetensors", "--lse"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(
        without_available(&said),
        "flashcore: in.safetensors: the output and its file would take at least 1099545182208 bytes of memory (1.0 TiB); a smaller problem, or a larger machine, is needed\n"
    );
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(scratch.names(), ["in.safetensors"]);
}

/// A file of a size that only its name has, and a device that never ends.
#[cfg(target_os = "linux")]
#[test]
fn a_file_larger_than_the_memory_is_an_error() {
    let scratch = Scratch::new("file");
    std::fs::File::create(scratch.file("huge")).and_then(|file| file.set_len(1 << 43)).expect("a sparse file");
    for arguments in [&["attend", "huge", "out"][..], &["repro", "--replay", "huge"]] {
        let output = scratch.run(arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let (start, end) = said.split_once("the file would take").expect("that it is too large");
        assert_eq!(&end[..end.find(", and").expect("numbers")], " at least 8796093022208 bytes of memory (8.0 TiB)");
        assert_eq!(output.status.code(), Some(2), "{start}");
    }
}

/// With little address space: threads that cannot be started, tensors that do not fit.
#[cfg(target_os = "linux")]
#[test]
fn a_small_address_space_is_an_error() {
    let scratch = Scratch::new("address-space");
    let rows = 1 << 18;
    scratch.tensors(
        "in.safetensors",
        &[
            ("query", Dtype::F32, &[1, 1, rows, 8]),
            ("key", Dtype::F32, &[1, 1, 1, 8]),
            ("value", Dtype::F32, &[1, 1, 1, 64]),
        ],
    );
    // The output has 64 MiB, and its file as many.
    let check = |kilobytes: u32, codes: &[i32]| {
        let script = format!("ulimit -v {kilobytes}; exec \"$@\"");
        let output = scratch.shell(&script, &["attend", "in.safetensors", "out", "--device", "cpu"]).output();
        let output = output.expect("sh runs");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let code = output.status.code().unwrap_or_else(|| panic!("{kilobytes}: {}: {said}", output.status));
        assert!(codes.contains(&code), "{kilobytes}: exit code {code}: {said}");
        let _ = std::fs::remove_file(scratch.file("out"));
        let is_message =
            said.starts_with("flashcore: in.safetensors: the ") || said.starts_with("flashcore: the threads ");
        assert!(is_message == (code == 3), "{kilobytes}: {said}");
    };
    check(4_000_000, &[0]);
    for kilobytes in (140_000..500_000).step_by(72_000) {
        check(kilobytes, &[0, 3]);
    }
    for kilobytes in [120_000, 60_000] {
        check(kilobytes, &[3]);
    }
    assert_eq!(scratch.names(), ["in.safetensors"]);
}

#[test]
fn numbers_that_are_no_durations_are_refused_with_the_range() {
    let scratch = Scratch::new("numbers");
    let seconds = "seconds are a number from 0 to 86400, such as 0.5";
    let percent = "a percentage is a number from 0 to 1000, such as 2.5";
    let finite = "it must be a finite number, such as -5";
    let bench = ["bench", "--backend", "cpu", "--shape", "1x1x5x8"];
    let compare = ["compare", "cpu", "cpu", "--shape", "1x1x5x8"];
    let new = ["experiments", "new", "a", "--from", "b", "--hypothesis", "c"];
    let options: [(&[&str], &str, &str, &str); 8] = [
        (&bench, "--seconds", "SECONDS", seconds),
        (&compare, "--seconds", "SECONDS", seconds),
        (&["repro"], "--seconds", "SECONDS", seconds),
        (&["tune", "--shape", "1x1x5x8"], "--seconds", "SECONDS", seconds),
        (&compare, "--slow-b", "PERCENT", percent),
        (&["leaderboard", "check", "a"], "--tolerance", "PERCENT", percent),
        (&new, "--predicted", "PERCENT", finite),
        (&new, "--hours", "HOURS", finite),
    ];
    for (command, option, name, range) in options {
        let negative: &[&str] = if range == finite { &[] } else { &["-1", "1e300"] };
        for value in [&["inf", "-inf", "nan", "five"], negative].concat() {
            let output = scratch.run(&[command, &[&format!("{option}={value}")]].concat());
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            let expected = format!("error: invalid value '{value}' for '{option} <{name}>': {range}");
            assert_eq!(said.lines().next(), Some(expected.as_str()), "{command:?}");
            assert_eq!(output.status.code(), Some(2), "{command:?} {option} {value}");
        }
    }
    assert_eq!(scratch.run(&[&bench[..], &["--seconds", "-1"]].concat()).status.code(), Some(2));
    assert_eq!(scratch.run(&[&bench[..], &["--seconds", "0"]].concat()).status.code(), Some(0));
    assert_eq!(scratch.names(), [""; 0]);
}
