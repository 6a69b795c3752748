//! Commands that are stopped by Ctrl-C.

use std::io::Read;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::{Duration, Instant};

/// The most time that Ctrl-C may take: a second on a machine of its own, and more on one that is loaded.
const MOST: Duration = Duration::from_secs(8);

/// Exit status of a command that gets the signal of Ctrl-C after so many seconds.
pub(crate) fn interrupted(command: &mut Command, seconds: u64) -> ExitStatus {
    interrupted_output(command, Duration::from_secs(seconds)).status
}

/// Output and exit status of a command that gets the signal of Ctrl-C after a while.
pub(crate) fn interrupted_output(command: &mut Command, after: Duration) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command runs");
    // Read while it runs: a table of many rows is more than a pipe holds.
    let (stdout, stderr) = (read(child.stdout.take()), read(child.stderr.take()));
    wait_until_watching(&child);
    sleep(after);
    interrupt(&child);
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("it is ours") {
            break status;
        }
        if start.elapsed() > MOST {
            child.kill().expect("it is ours");
            panic!("{command:?} goes on after Ctrl-C");
        }
        sleep(Duration::from_millis(50));
    };
    let said = |reader: JoinHandle<Vec<u8>>| reader.join().expect("it read");
    Output { status, stdout: said(stdout), stderr: said(stderr) }
}

/// Reads a pipe to its end, in a thread.
fn read(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<Vec<u8>> {
    let mut pipe = pipe.expect("it is piped");
    spawn(move || {
        let mut bytes = Vec::new();
        pipe.read_to_end(&mut bytes).expect("what was said");
        bytes
    })
}

/// Waits until the command catches the signal of Ctrl-C, as far as the system tells.
pub(crate) fn wait_until_watching(child: &Child) {
    const SIGINT: u64 = 1 << 1;
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(60) {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        match caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()) {
            Some(mask) if mask & SIGINT == 0 => sleep(Duration::from_millis(5)),
            Some(_) => return,
            // Not Linux, or it has ended.
            None => return sleep(Duration::from_secs(1)),
        }
    }
}

/// Sends the signal of Ctrl-C.
pub(crate) fn interrupt(child: &Child) {
    let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill runs");
    assert!(sent.success());
}
