//! The library under attack, through its shared object alone: random cases judged by an independent reference, wrong
//! arguments, many threads, sizes that overflow, tensors of many gigabytes, limits, leaks.

#![cfg(target_os = "linux")]
#![expect(unsafe_code, reason = "calls a C ABI and maps memory")]
#![expect(clippy::print_stdout, reason = "a child process tells its parent what it found")]

mod abi;
mod arguments;
mod child;
mod extents;
mod fuzz;
mod limits;
mod operations;
mod quick_fuzz;
mod sequences;
mod simple;
mod threads;
