//! Load of the machine by other programs while something is timed.
//!
//! The load average of a system follows with a delay of a minute. The processor time of all programs, less that of this
//! process, tells at once.

use std::fs;
use std::time::Instant;

/// Seconds that are long enough for a count in hundredths of a second.
const LEAST_SECONDS: f64 = 0.2;
/// Units of processor time in a second (`USER_HZ`), the same on every Linux.
const TICKS_PER_SECOND: f64 = 100.0;

/// Largest load from other programs at which a time is not marked; the system itself needs a little.
pub fn most_others(threads: usize) -> f64 {
    0.5_f64.max(0.25 * threads as f64)
}

/// Processor time of others, from a moment on.
#[derive(Debug, Clone, Copy)]
pub struct OtherLoad {
    begin: Instant,
    ticks: Option<f64>,
}

impl OtherLoad {
    /// From now on.
    pub fn begin() -> Self {
        Self { begin: Instant::now(), ticks: ticks_of_others() }
    }

    /// Processors that others kept busy since then, on average; nothing after a moment too short to tell, and where the
    /// system does not tell.
    pub fn cpus(&self) -> Option<f64> {
        let seconds = self.begin.elapsed().as_secs_f64();
        let ticks = ticks_of_others()? - self.ticks?;
        (seconds >= LEAST_SECONDS).then(|| (ticks / TICKS_PER_SECOND / seconds).max(0.0))
    }
}

/// Ticks of all programs but this one since the machine started.
fn ticks_of_others() -> Option<f64> {
    let all = busy_ticks(&fs::read_to_string("/proc/stat").ok()?)?;
    Some(all - own_ticks(&fs::read_to_string("/proc/self/stat").ok()?)?)
}

/// The busy ticks in the first line of `/proc/stat`: user, nice, system, interrupts and what a hypervisor took, without
/// idle and waiting ones.
fn busy_ticks(stat: &str) -> Option<f64> {
    let ticks: Vec<f64> = stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace().flat_map(str::parse).collect();
    let [user, nice, system, _idle, _waiting, interrupts, soft_interrupts, stolen] = *ticks.get(..8)? else {
        return None;
    };
    Some(user + nice + system + interrupts + soft_interrupts + stolen)
}

/// The ticks of a process and its threads in its `stat`; the name in parentheses may hold anything.
fn own_ticks(stat: &str) -> Option<f64> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut times = fields.split_whitespace().skip(11).map(str::parse::<f64>);
    Some(times.next()?.ok()? + times.next()?.ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_read() {
        assert_eq!(busy_ticks("cpu  100 10 20 5000 60 1 2 7 50 0\ncpu0 1 2 3"), Some(140.0));
        assert_eq!(busy_ticks("cpu 1 2"), None);
        let stat = "42 (a ) b) S 1 42 42 0 -1 4194560 500 0 0 0 250 50 0 0 20 0 3 0";
        assert_eq!(own_ticks(stat), Some(300.0));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn own_work_is_not_of_others_and_that_of_another_process_is() {
        let spin = || {
            let start = Instant::now();
            while start.elapsed().as_secs_f64() < 0.6 {
                std::hint::spin_loop();
            }
        };
        let load = OtherLoad::begin();
        assert_eq!(load.cpus(), None);
        let mut other =
            std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().expect("a shell runs");
        spin();
        let beside = load.cpus();
        other.kill().expect("it is ours");
        other.wait().expect("it ends");
        // On a machine whose other programs leave it nothing, it shares with them, and all are others.
        assert!(beside.is_some_and(|cpus| cpus > 0.25), "{beside:?}");
    }
}
