//! Calls where no thread can be made: the calling one computes, nothing is printed, and threads are used when there are some.

#![cfg(target_os = "linux")]
#![expect(unsafe_code, reason = "limits are set by a function of C")]

use flashcore_cpu::{Level, attend_with, thread_count};
use flashcore_problem::{DType, Inputs, Outputs, Problem};
use std::ffi::c_int;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

#[repr(C)]
struct Limit {
    current: u64,
    most: u64,
}

unsafe extern "C" {
    fn getrlimit(resource: c_int, limit: *mut Limit) -> c_int;
    fn setrlimit(resource: c_int, limit: *const Limit) -> c_int;
}

/// The size of the address space.
const ADDRESS_SPACE: c_int = 9;

fn set_address_space(bytes: u64) {
    let mut limit = Limit { current: 0, most: 0 };
    // SAFETY: both calls take a limit and nothing else.
    unsafe {
        assert_eq!(getrlimit(ADDRESS_SPACE, &raw mut limit), 0);
        limit.current = bytes.min(limit.most);
        assert_eq!(setrlimit(ADDRESS_SPACE, &raw const limit), 0);
    }
}

/// The bytes of the address space that are in use.
fn address_space_in_use() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').next().unwrap().parse::<u64>().unwrap() * 4096
}

fn bits(problem: &Problem, inputs: &Inputs) -> Vec<u8> {
    let mut outputs = Outputs::poisoned(problem);
    attend_with(Level::best(), problem, inputs, &mut outputs).unwrap();
    outputs.output.data
}

/// In a program of its own: a limit of the address space leaves no room for the stack of a thread, which `RUST_MIN_STACK`
/// makes larger than anything else that is allocated.
#[test]
fn the_calling_thread_computes_alone() {
    const CHILD: &str = "FLASHCORE_TEST_CHILD_WITHOUT_THREADS";
    if std::env::var_os(CHILD).is_some() {
        let problem = Problem::new(1, 4, 200, 64, DType::F32);
        let inputs = Inputs::random(&problem, 1);
        set_address_space(address_space_in_use() + (64 << 20));
        assert!(thread::Builder::new().spawn(|| ()).is_err(), "a thread can be made");
        assert_eq!(thread_count(), 1);
        let alone = bits(&problem, &inputs);
        set_address_space(u64::MAX);
        let start = Instant::now();
        while thread_count() == 1 {
            assert!(start.elapsed() < Duration::from_secs(60), "threads are never tried again");
            thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(thread_count(), 4);
        assert!(bits(&problem, &inputs) == alone);
        return;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_calling_thread_computes_alone", "--nocapture", "--test-threads", "1"])
        .envs([(CHILD, "1"), ("RAYON_NUM_THREADS", "4"), ("RUST_MIN_STACK", "1073741824")])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
    assert_eq!(said, "", "a library prints nothing");
}
