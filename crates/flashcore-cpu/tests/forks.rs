//! Calls in forked children, whose threads are gone. Each test forks in a program of its own, which has one thread then, or
//! those that the test wants.

#![cfg(unix)]
#![expect(unsafe_code, reason = "fork is a function of C")]

use flashcore_cpu::{Level, attend_with};
use flashcore_problem::{Alignment, DType, Inputs, Mask, Outputs, Problem};
use rayon::ThreadPoolBuilder;
use std::ffi::{OsString, c_int};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

unsafe extern "C" {
    fn fork() -> c_int;
    fn waitpid(process: c_int, status: *mut c_int, options: c_int) -> c_int;
    fn kill(process: c_int, signal: c_int) -> c_int;
    fn _exit(status: c_int) -> !;
}

/// Timeout of a child whose work takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs `work` in a forked child, which is killed if it hangs. The exit status, 0 where `work` returned true.
fn in_child(work: impl FnOnce() -> bool) -> Result<c_int, &'static str> {
    // SAFETY: the child calls the library, which is what is tested, and ends without anything of the parent's.
    let child = unsafe { fork() };
    if child == 0 {
        let is_right = work();
        // SAFETY: it ends the child at once.
        unsafe { _exit(c_int::from(!is_right)) };
    }
    assert!(child > 0, "fork failed");
    let start = Instant::now();
    loop {
        let mut status = 0;
        // SAFETY: the status outlives the call.
        let ended = unsafe { waitpid(child, &raw mut status, 1) };
        if ended == child {
            return Ok(status);
        }
        if start.elapsed() > PATIENCE {
            // SAFETY: it is a child of ours that has not been waited for.
            unsafe {
                kill(child, 9);
                waitpid(child, &raw mut status, 0);
            }
            return Err("the child hangs");
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Prefill and decode, which use all threads.
fn problems() -> Vec<(Problem, Inputs)> {
    [(DType::F32, 300), (DType::Bf16, 300), (DType::F32, 1)]
        .into_iter()
        .map(|(dtype, queries)| {
            let mut problem = Problem::new(1, 4, queries, 64, dtype);
            (problem.key_length, problem.mask) = (2000, Mask::Causal(Alignment::BottomRight));
            let inputs = Inputs::random(&problem, 1);
            (problem, inputs)
        })
        .collect()
}

fn bits((problem, inputs): &(Problem, Inputs)) -> Vec<u8> {
    let mut outputs = Outputs::poisoned(problem);
    attend_with(Level::best(), problem, inputs, &mut outputs).unwrap();
    outputs.output.data
}

fn all_bits(problems: &[(Problem, Inputs)]) -> Vec<Vec<u8>> {
    problems.iter().map(bits).collect()
}

/// Runs the test of this name, in this file, in a program of its own with four threads.
fn in_own_program(name: &str, work: impl FnOnce()) {
    const CHILD: &str = "FLASHCORE_TEST_CHILD_OF_FORKS";
    if std::env::var_os(CHILD).is_some() {
        return work();
    }
    // Where an emulator runs the tests, it has to run their children too.
    let runner = std::env::var("FLASHCORE_TEST_RUNNER").unwrap_or_default();
    let program = std::env::current_exe().unwrap();
    let mut words = runner.split_whitespace().map(OsString::from).chain([program.into_os_string()]);
    let output = Command::new(words.next().unwrap())
        .args(words)
        .args(["--exact", name, "--nocapture", "--test-threads", "1"])
        .envs([(CHILD, "1"), ("RAYON_NUM_THREADS", "4")])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
    assert_eq!(said, "", "a library prints nothing");
}

#[test]
fn a_child_of_a_process_that_has_computed() {
    in_own_program("a_child_of_a_process_that_has_computed", || {
        let problems = problems();
        let expected = all_bits(&problems);
        assert_eq!(flashcore_cpu::thread_count(), 4);
        let status = in_child(|| {
            let is_right = all_bits(&problems) == expected && flashcore_cpu::thread_count() == 4;
            // And a child of the child, which has yet another pool.
            is_right && in_child(|| all_bits(&problems) == expected) == Ok(0)
        });
        assert_eq!(status, Ok(0));
        // The parent has its threads still.
        assert!(all_bits(&problems) == expected);
        // A child that calls from several threads at once, none of which has a pool yet.
        let status = in_child(|| {
            thread::scope(|scope| {
                let calls: Vec<_> = (0..4).map(|_| scope.spawn(|| all_bits(&problems))).collect();
                calls.into_iter().all(|call| call.join().is_ok_and(|bits| bits == expected))
            })
        });
        assert_eq!(status, Ok(0));
    });
}

#[test]
fn a_fork_while_other_threads_compute() {
    in_own_program("a_fork_while_other_threads_compute", || {
        let problems = problems();
        let expected = all_bits(&problems);
        let is_done = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !is_done.load(Ordering::Relaxed) {
                        assert!(all_bits(&problems) == expected);
                    }
                });
            }
            for round in 0..20 {
                let status = in_child(|| all_bits(&problems) == expected);
                if status != Ok(0) {
                    is_done.store(true, Ordering::Relaxed);
                }
                assert_eq!(status, Ok(0), "round {round}");
            }
            is_done.store(true, Ordering::Relaxed);
        });
    });
}

/// In the child of a thread of a pool, rayon takes the thread for a worker still.
#[test]
fn a_fork_inside_of_a_pool() {
    in_own_program("a_fork_inside_of_a_pool", || {
        let problems = problems();
        let expected = all_bits(&problems);
        let pool = ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let status = pool.install(|| {
            assert_eq!(flashcore_cpu::thread_count(), 3);
            in_child(|| {
                let alone = flashcore_cpu::thread_count() == 1;
                let is_right = alone && all_bits(&problems) == expected;
                // A pool of the child's own is used like any other.
                let pool = ThreadPoolBuilder::new().num_threads(2).build().unwrap();
                let in_new_pool = thread::scope(|scope| {
                    let call = || pool.install(|| (flashcore_cpu::thread_count(), all_bits(&problems)));
                    scope.spawn(call).join().unwrap()
                });
                is_right && in_new_pool == (2, expected.clone())
            })
        });
        assert_eq!(status, Ok(0));
        assert!(pool.install(|| all_bits(&problems)) == expected);
    });
}

/// A pool that a child makes is used inside of it, although the global one is dead.
#[test]
fn a_pool_of_the_child() {
    in_own_program("a_pool_of_the_child", || {
        let problems = problems();
        let expected = all_bits(&problems);
        let status = in_child(|| {
            let pool = ThreadPoolBuilder::new().num_threads(3).build().unwrap();
            pool.install(|| flashcore_cpu::thread_count() == 3 && all_bits(&problems) == expected)
        });
        assert_eq!(status, Ok(0));
    });
}
