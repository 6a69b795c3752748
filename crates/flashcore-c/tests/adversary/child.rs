//! Tests that need a process of their own.

use std::env;
use std::process::Command;

use crate::abi::built::folder;

const VARIABLE: &str = "FLASHCORE_ADVERSARY_CHILD";

/// True in the process that [`run`] has started for this test.
pub(crate) fn is_child(test: &str) -> bool {
    env::var_os(VARIABLE).is_some_and(|name| name == test)
}

/// Runs this test again in a process of its own, with these variables, and returns what it printed after `child found: `.
pub(crate) fn run(test: &str, variables: &[(&str, &str)]) -> Vec<String> {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]);
    command.env(VARIABLE, test).env("FLASHCORE_LIBRARY_FOLDER", folder());
    for (name, value) in variables {
        command.env(name, value);
    }
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{test} {variables:?}: {}\n{said}\n{errors}", output.status);
    said.lines().filter_map(|line| Some(line.split_once("child found: ")?.1.to_owned())).collect()
}
