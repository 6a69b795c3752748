//! Buffers between pages that nobody may touch: the bytes are all there, and the next one is a fault.

#![cfg(any(target_os = "linux", target_os = "macos"))]
#![expect(unsafe_code, reason = "the fault is what is tested, and safe code has none")]

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};
use std::sync::Arc;

use flashcore_bench::testkit::guard_pages::{Edge, GuardedBuffer, GuardedInputs, GuardedOutputs, Label};
use flashcore_problem::{DType, Inputs, Outputs, Problem};

/// Variable that tells the child what to touch.
const VARIABLE: &str = "FLASHCORE_TEST_TOUCH";

fn buffer(payload: &[u8], edge: Edge) -> GuardedBuffer {
    let label = Label { tensor: "key", case: "the case\n  repeat: the command".into() };
    GuardedBuffer::new(payload, edge, label).expect("memory")
}

/// Runs a test of this file in a process of its own, which is to end by touching something.
fn child(touch: &str) -> Output {
    Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "guard_pages::touches_what_it_is_told", "--nocapture"])
        .env(VARIABLE, touch)
        .output()
        .expect("a process")
}

/// The other half of the tests below. Alone it touches nothing.
#[test]
fn touches_what_it_is_told() {
    let Ok(touch) = std::env::var(VARIABLE) else { return };
    let payload = [7; 5000];
    let (edge, offset) = match touch.as_str() {
        "after" => (Edge::End, 5000),
        "before" => (Edge::Start, -1),
        _ => (Edge::End, 4999),
    };
    let mut buffer = buffer(&payload, edge);
    if touch == "write" {
        let read_only = buffer.read_only().expect("pages that can be protected");
        let first = read_only.bytes().as_ptr().cast_mut();
        // SAFETY: not safe at all: writing to this page is the fault that the test is about.
        unsafe { first.add(4).write_volatile(1) };
        return;
    }
    let first = buffer.bytes_mut().as_ptr();
    // SAFETY: within the payload for "inside"; otherwise the fault that the test is about.
    let byte = unsafe { first.offset(offset).read_volatile() };
    assert_eq!(byte, 7);
}

#[track_caller]
fn check_dies(touch: &str, expected: &str) {
    let output = child(touch);
    let signal = output.status.signal();
    assert!([Some(libc::SIGSEGV), Some(libc::SIGBUS)].contains(&signal), "{touch}: {:?}", output.status);
    let report = String::from_utf8_lossy(&output.stderr);
    let report: Vec<&str> = report.lines().filter(|line| !line.is_empty()).collect();
    assert_eq!(report, [expected, "  the case", "  repeat: the command"], "{touch}");
}

#[test]
fn one_byte_too_far_is_a_fault_that_says_where() {
    check_dies("after", "flashcore: fault 1 bytes after the last of key");
    check_dies("before", "flashcore: fault 1 bytes before the start of key");
    check_dies("write", "flashcore: fault at byte 4 of key, which is only to be read");
    let inside = child("inside");
    assert!(inside.status.success(), "{inside:?}");
}

#[test]
fn payloads_of_any_size_are_whole_at_either_end() {
    for edge in [Edge::End, Edge::Start] {
        for length in [0, 1, 4095, 4096, 4097, 100_000] {
            let payload: Vec<u8> = (0..length).map(|index: usize| (index % 251) as u8).collect();
            let mut buffer = buffer(&payload, edge);
            assert_eq!(buffer.bytes(), payload, "{edge:?} {length}");
            buffer.bytes_mut().fill(3);
            assert!(buffer.bytes().iter().all(|&byte| byte == 3));
        }
    }
}

#[test]
fn guarded_tensors_are_the_same_as_their_originals() {
    let mut problem = Problem::new(3, 3, 5, 7, DType::Bf16);
    (problem.alibi, problem.sinks, problem.bias) = (true, true, true);
    (problem.seqused_k, problem.lse) = (true, true);
    let case: Arc<str> = "".into();
    let inputs = Inputs::random(&problem, 4);
    for edge in [Edge::End, Edge::Start] {
        let guarded = GuardedInputs::new(&inputs, edge, &case).expect("memory");
        assert_eq!(guarded.views(), inputs.views());
        let mut outputs = GuardedOutputs::poisoned(&problem, edge, &case).expect("memory");
        assert_eq!(outputs.to_outputs().output, Outputs::poisoned(&problem).output);
        assert_eq!(outputs.views_mut().validate(&problem), Ok(()));
    }
}
