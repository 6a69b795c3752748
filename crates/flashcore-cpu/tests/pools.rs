//! Whose threads are used, and that the bits do not depend on it.

use flashcore_cpu::{Level, attend_with};
use flashcore_problem::{Alignment, DType, Inputs, Layout, Mask, Outputs, Problem};
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

fn pool(threads: usize) -> ThreadPool {
    ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
}

fn problems() -> Vec<Problem> {
    let mut problems = Vec::new();
    for (heads, key_heads, queries, keys) in
        [(2, 2, 300, 300), (4, 1, 70, 200), (8, 2, 1, 3000), (1, 1, 40, 9000), (3, 3, 1, 10)]
    {
        let mut problem = Problem::new(2, heads, queries, 32, DType::F32);
        (problem.key_heads, problem.key_length) = (key_heads, keys);
        problem.mask = Mask::Causal(Alignment::BottomRight);
        problem.lse = true;
        problems.push(problem);
    }
    // As many heads share an item as leave enough items for the threads.
    let mut adjacent = problems[2].clone();
    (adjacent.key_heads, adjacent.layout) = (8, Layout::Bshd);
    problems.push(adjacent);
    problems
}

fn bits(level: Level, problem: &Problem, inputs: &Inputs) -> (Vec<u8>, Vec<u32>) {
    let mut outputs = Outputs::poisoned(problem);
    attend_with(level, problem, inputs, &mut outputs).unwrap();
    let lse = outputs.lse.unwrap_or_default();
    (outputs.output.data, lse.into_iter().map(f32::to_bits).collect())
}

#[test]
fn bits_do_not_depend_on_threads() {
    for level in Level::available() {
        for problem in problems() {
            let inputs = Inputs::random(&problem, 1);
            let expected = pool(1).install(|| bits(level, &problem, &inputs));
            for threads in [2, 3, 16, 100] {
                let actual = pool(threads).install(|| bits(level, &problem, &inputs));
                assert!(actual == expected, "{problem} at level {level} on {threads} threads");
            }
        }
    }
}

/// Many calls at once from the threads of one pool, each of which uses the pool in turn.
#[test]
fn calls_nest_in_the_callers_pool() {
    let level = Level::best();
    let problems: Vec<(Problem, Inputs)> =
        problems().into_iter().map(|problem| (problem.clone(), Inputs::random(&problem, 1))).collect();
    let expected: Vec<_> = problems.iter().map(|(problem, inputs)| bits(level, problem, inputs)).collect();
    for threads in [1, 2, 7] {
        let (problems, expected) = (&problems, &expected);
        pool(threads).install(|| {
            let nested: Vec<_> = (0..20_usize)
                .into_par_iter()
                .map(|index| bits(level, &problems[index % 5].0, &problems[index % 5].1))
                .collect();
            for (index, bits) in nested.iter().enumerate() {
                assert!(*bits == expected[index % 5], "{} on {threads} threads", problems[index % 5].0);
            }
            rayon::scope(|scope| {
                for ((problem, inputs), expected) in problems.iter().zip(expected) {
                    scope.spawn(move |_| assert!(bits(level, problem, inputs) == *expected, "{problem}"));
                }
            });
        });
    }
}

/// In a program of its own: with a pool of the caller's, the threads of the process are those of that pool.
#[test]
fn no_other_pool_is_made() {
    const CHILD: &str = "FLASHCORE_TEST_CHILD_OF_POOLS";
    if std::env::var_os(CHILD).is_some() {
        let problem = &problems()[0];
        let inputs = Inputs::random(problem, 1);
        pool(2).install(|| bits(Level::best(), problem, &inputs));
        // A global pool that existed could not be made again.
        assert!(ThreadPoolBuilder::new().num_threads(1).build_global().is_ok(), "there is a global pool");
        return;
    }
    // Where an emulator runs the tests, it has to run their children too.
    let runner = std::env::var("FLASHCORE_TEST_RUNNER").unwrap_or_default();
    let program = std::env::current_exe().unwrap();
    let mut words = runner.split_whitespace().map(std::ffi::OsString::from).chain([program.into_os_string()]);
    let status = std::process::Command::new(words.next().unwrap())
        .args(words)
        .args(["--exact", "no_other_pool_is_made", "--nocapture"])
        .env(CHILD, "1")
        .stdout(std::process::Stdio::null())
        .status()
        .unwrap();
    assert!(status.success(), "{status}");
}
