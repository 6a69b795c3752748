//! Tests of the `flashcore` command, one binary: each runs the command and looks at what it says, writes and returns.

mod accuracy;
mod attend;
mod build_script;
mod command;
mod conformance;
mod doctor_and_cache;
mod fp8;
mod hostile_files;
mod interrupt;
mod interrupted;
mod jobs;
mod ladder_and_tune;
mod limits;
mod options;
mod output_files;
mod scratch;
mod verdicts;
mod workbench;
