//! Tests that need a GPU. Where there is none they are counted, not passed.
//!
//! The harness is our own, because the usual one knows no outcome but passed and failed at run time. It takes parts of
//! names as filters, and passes over the usual options.

#![expect(clippy::print_stdout, reason = "a harness prints")]

mod api;
mod kernels;
mod operations;
#[path = "../testkit/support.rs"]
mod support;

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use flashcore_bench::testkit::gpu::Gpu;

/// A test and its name.
type Test = (&'static str, Check);
type Check = fn(&Gpu);

/// The tests of these functions, by their names.
macro_rules! tests {
    ($($test:ident),* $(,)?) => { &[$((stringify!($test), $test)),*] };
}
use tests;

fn main() -> ExitCode {
    let filters = filters(std::env::args().skip(1));
    let all = [("api", api::TESTS), ("kernels", kernels::TESTS), ("operations", operations::TESTS)];
    let named = all
        .into_iter()
        .flat_map(|(module, tests)| tests.iter().map(move |(name, test)| (format!("{module}::{name}"), *test)));
    let is_wanted = |name: &str| filters.is_empty() || filters.iter().any(|filter| name.contains(filter.as_str()));
    let tests: Vec<(String, Check)> = named.filter(|(name, _)| is_wanted(name)).collect();
    if std::env::args().any(|argument| argument == "--list") {
        for (name, _) in &tests {
            println!("{name}: test");
        }
        return ExitCode::SUCCESS;
    }
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(reason) => {
            println!("\n{} tests need a GPU and were not run: {reason}\n", tests.len());
            return ExitCode::SUCCESS;
        }
    };
    println!("\nrunning {} tests on {}", tests.len(), gpu.device());
    let mut failed = 0;
    for (name, test) in &tests {
        print!("test {name} ... ");
        // What a test prints stands after its name.
        let _ = std::io::stdout().flush();
        let is_ok = catch_unwind(AssertUnwindSafe(|| test(&gpu))).is_ok();
        failed += usize::from(!is_ok);
        println!("{}", if is_ok { "ok" } else { "FAILED" });
    }
    let verdict = if failed == 0 { "ok" } else { "FAILED" };
    println!("\ntest result: {verdict}. {} passed; {failed} failed\n", tests.len() - failed);
    ExitCode::from(u8::from(failed > 0))
}

/// The arguments that are parts of names: no options, and no values of options.
fn filters(arguments: impl Iterator<Item = String>) -> Vec<String> {
    const WITH_VALUE: [&str; 7] =
        ["--test-threads", "--skip", "--format", "--color", "--logfile", "--shuffle-seed", "-Z"];
    let mut filters = Vec::new();
    let mut arguments = arguments;
    while let Some(argument) = arguments.next() {
        if WITH_VALUE.contains(&argument.as_str()) {
            arguments.next();
        } else if !argument.starts_with('-') {
            filters.push(argument);
        }
    }
    filters
}
