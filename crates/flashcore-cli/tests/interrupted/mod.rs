//! Commands that are stopped by Ctrl-C.

use std::process::{Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How a command ends that gets the signal of Ctrl-C after so many seconds.
pub(crate) fn interrupted(command: &mut Command, seconds: u64) -> ExitStatus {
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the command runs");
    sleep(Duration::from_secs(seconds));
    let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill runs");
    assert!(sent.success());
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("it is ours") {
            return status;
        }
        assert!(start.elapsed() < Duration::from_secs(120), "it goes on");
        sleep(Duration::from_millis(50));
    }
}
