//! Case workers: processes that verify cases, several at once.
//!
//! A driver compiles one kernel at a time in a process, however many threads ask it to, so threads do not make a suite
//! fast on a GPU; processes do. A worker knows the whole list of cases. It reads the number of a case, a line each, and
//! answers with one line of JSON: what came of the case, at every level that was asked for. Whoever is done gets the next
//! number, so that a slow case holds up nobody, and when somebody stops it all, what was begun is finished.

use std::io::{self, BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread;

use flashcore_cpu::Level;
use serde::{Deserialize, Serialize};

use crate::testkit::gpu::Gpu;
use crate::testkit::verify::{Outcome, verify, verify_at_levels};
use crate::testkit::{Backend, Case};

/// Result of a case, for tables and records.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Judged {
    /// The case.
    pub case: String,
    /// Complaints, one line each; none if it passed.
    pub complaints: Vec<String>,
    /// The command that repeats it.
    pub repeat: String,
    /// Time of the case.
    pub milliseconds: f64,
    /// Values of new rows that an FP8 cache saturates.
    pub saturated: usize,
    /// Largest error, that of the reference, and relative L2, as bits: JSON has no infinity.
    errors: [u64; 3],
}

impl Judged {
    /// Result of a case.
    pub fn new(case: &Case, outcome: &Outcome) -> Self {
        let errors = outcome
            .verdict
            .as_ref()
            .map_or([f64::NAN; 3], |verdict| [verdict.max_error, verdict.reference_max_error, verdict.relative_l2]);
        Self {
            case: case.to_string(),
            complaints: outcome.complaints(),
            repeat: case.command(),
            milliseconds: outcome.duration.as_secs_f64() * 1e3,
            saturated: outcome.saturated,
            errors: errors.map(f64::to_bits),
        }
    }

    /// A case whose process ended before it had an answer.
    fn lost(case: &Case, ended: ExitStatus) -> Self {
        Self {
            case: case.to_string(),
            complaints: vec![format!("the worker process exited: {ended}")],
            repeat: case.command(),
            milliseconds: f64::NAN,
            saturated: 0,
            errors: [f64::NAN.to_bits(); 3],
        }
    }

    /// True if there are no complaints.
    pub const fn passed(&self) -> bool {
        self.complaints.is_empty()
    }

    /// Largest error, that of the reference, and relative L2; NaN where nothing could be judged.
    pub fn errors(&self) -> [f64; 3] {
        self.errors.map(f64::from_bits)
    }
}

/// Reason why workers could not be used.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// A process could not be started, or talked to.
    #[error("a worker process of --jobs failed: {0}; try fewer of them, or --jobs 1")]
    Process(#[from] io::Error),
    /// It ended by itself before it had said anything; it has said why.
    #[error("a worker process of --jobs exited ({0}); its own message says why")]
    Ended(ExitStatus),
}

/// Runs and judges a case, one of the CPU at every one of `levels`.
pub fn judge_case(case: &Case, levels: &[Level], gpu: Option<&Gpu>) -> Vec<(Case, Outcome)> {
    match case.backend {
        Backend::Cpu(_) => verify_at_levels(case, levels),
        Backend::Sim(_) | Backend::Cuda(_) => vec![(case.clone(), verify(case, gpu))],
    }
}

/// Is a worker: judges the cases whose numbers `orders` name, until they end.
pub fn serve_cases(
    cases: &[Case],
    levels: &[Level],
    gpu: Option<&Gpu>,
    orders: impl BufRead,
    mut answers: impl Write,
) -> io::Result<()> {
    for order in orders.lines() {
        let order = order?;
        let case = order.parse::<usize>().ok().and_then(|number| cases.get(number));
        let case = case.ok_or_else(|| io::Error::other(format!("unknown case `{order}`")))?;
        let judged: Vec<Judged> =
            judge_case(case, levels, gpu).iter().map(|(case, outcome)| Judged::new(case, outcome)).collect();
        writeln!(answers, "{}", serde_json::to_string(&judged)?)?;
        answers.flush()?;
    }
    Ok(())
}

/// Has `jobs` processes judge the cases; `start` says how one is started. `is_stopped` is asked before each case, and
/// `found` hears of each that is done: how many there are, and which. Gives what was found in the order of the cases,
/// without those that were not reached.
pub fn judge_in_processes(
    jobs: usize,
    cases: &[Case],
    start: impl Fn() -> Command + Sync,
    is_stopped: impl Fn() -> bool + Sync,
    mut found: impl FnMut(usize, &[Judged]),
) -> Result<Vec<Vec<Judged>>, JobError> {
    let next = AtomicUsize::new(0);
    let failed = AtomicUsize::new(0);
    let mut all: Vec<Option<Vec<Judged>>> = vec![None; cases.len()];
    thread::scope(|scope| {
        let (sender, receiver) = mpsc::channel();
        let workers: Vec<_> = (0..jobs)
            .map(|_| {
                let sender = sender.clone();
                // One that cannot go on stops the others: they would only meet the same.
                let is_stopped = || is_stopped() || failed.load(Ordering::Relaxed) > 0;
                let (next, failed, start) = (&next, &failed, &start);
                scope.spawn(move || {
                    let done = one_after_the_other(cases, next, start, is_stopped, &sender);
                    failed.fetch_add(usize::from(done.is_err()), Ordering::Relaxed);
                    done
                })
            })
            .collect();
        drop(sender);
        for (done, (number, judged)) in receiver.into_iter().enumerate() {
            found(done + 1, &judged);
            all[number] = Some(judged);
        }
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })?;
    Ok(all.into_iter().flatten().collect())
}

/// Loop of one thread: takes the next case and asks its worker.
fn one_after_the_other(
    cases: &[Case],
    next: &AtomicUsize,
    start: impl Fn() -> Command,
    is_stopped: impl Fn() -> bool,
    found: &Sender<(usize, Vec<Judged>)>,
) -> Result<(), JobError> {
    let mut worker: Option<Worker> = None;
    while !is_stopped() {
        let number = next.fetch_add(1, Ordering::Relaxed);
        let Some(case) = cases.get(number) else { break };
        let asked = match &mut worker {
            Some(worker) => worker,
            None => worker.insert(Worker::start(start())?),
        };
        let judged = match asked.ask(number)? {
            Answer::Judged(judged) => judged,
            // Ctrl-C reaches a process that is only just starting, too.
            Answer::Ended(_) if is_stopped() => break,
            // It could not even begin: no case is at fault.
            Answer::Ended(ended) if ended.code().is_some() => return Err(JobError::Ended(ended)),
            Answer::Ended(ended) => {
                worker = None;
                vec![Judged::lost(case, ended)]
            }
        };
        if found.send((number, judged)).is_err() {
            break;
        }
    }
    Ok(())
}

/// A process that judges cases.
struct Worker {
    child: Child,
    orders: Option<ChildStdin>,
    answers: Lines<BufReader<ChildStdout>>,
}

/// Answer of a worker.
enum Answer {
    Judged(Vec<Judged>),
    /// The process has ended.
    Ended(ExitStatus),
}

impl Worker {
    fn start(mut command: Command) -> io::Result<Self> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let orders = child.stdin.take();
        let answers = child.stdout.take().ok_or_else(|| io::Error::other("it has no output"))?;
        Ok(Self { child, orders, answers: BufReader::new(answers).lines() })
    }

    fn ask(&mut self, number: usize) -> io::Result<Answer> {
        // One that has ended cannot be written to; that it has ended is seen below.
        let _ = self.orders.as_mut().map(|orders| writeln!(orders, "{number}").and_then(|()| orders.flush()));
        match self.answers.next().transpose()? {
            Some(line) => Ok(Answer::Judged(serde_json::from_str(&line)?)),
            None => Ok(Answer::Ended(self.child.wait()?)),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It ends when there are no more orders.
        drop(self.orders.take());
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::suites::{Runner, edge};

    fn cases() -> Vec<Case> {
        let mut cases = edge(Runner::Cpu(Level::Portable));
        cases.truncate(5);
        cases
    }

    #[test]
    fn a_worker_answers_each_number_with_every_level() {
        let levels = [Level::Portable, Level::Portable];
        let mut said = Vec::new();
        serve_cases(&cases(), &levels, None, "3\n0\n".as_bytes(), &mut said).expect("it works");
        let said = String::from_utf8(said).expect("text");
        let answers: Vec<Vec<Judged>> =
            said.lines().map(|line| serde_json::from_str(line).expect("an answer")).collect();
        let names: Vec<Vec<&str>> =
            answers.iter().map(|judged| judged.iter().map(|judged| judged.case.as_str()).collect()).collect();
        let (third, first) = (cases()[3].to_string(), cases()[0].to_string());
        assert_eq!(names, [[&*third, &*third], [&*first, &*first]]);
        assert!(answers.iter().flatten().all(Judged::passed));
        let beyond = serve_cases(&cases(), &levels, None, "5\n".as_bytes(), Vec::new());
        assert_eq!(beyond.expect_err("there are five").to_string(), "unknown case `5`");
    }

    #[test]
    fn what_is_infinite_survives_the_way() {
        let judged = Judged {
            case: "a".to_owned(),
            complaints: vec![],
            repeat: "b".to_owned(),
            saturated: 0,
            milliseconds: 1.5,
            errors: [f64::INFINITY, 0.25, -0.0].map(f64::to_bits),
        };
        let line = serde_json::to_string(&judged).expect("text");
        let read: Judged = serde_json::from_str(&line).expect("what was written");
        assert_eq!(read, judged);
        assert_eq!(read.errors()[..2], [f64::INFINITY, 0.25]);
    }

    /// A program of the shell that answers every number with its case as passed, but for those that `special` handles.
    #[cfg(unix)]
    fn shell(special: &str) -> Command {
        let answer = r#"echo "[{\"case\":\"$n\",\"complaints\":[],\"repeat\":\"\",\"milliseconds\":1.0,\"saturated\":0,\"errors\":[0,0,0]}]""#;
        let mut command = Command::new("sh");
        command.args(["-c", &format!("while read n; do case $n in {special} *) {answer};; esac; done")]);
        command
    }

    #[cfg(unix)]
    #[test]
    fn a_process_that_is_killed_fails_its_case_and_no_other() {
        let mut counts = Vec::new();
        let start = || shell("2) kill -KILL $$;;");
        let judged =
            judge_in_processes(2, &cases(), start, || false, |done, _| counts.push(done)).expect("others go on");
        let complaints: Vec<&[String]> = judged.iter().map(|judged| &judged[0].complaints[..]).collect();
        let lost = ["the worker process exited: signal: 9 (SIGKILL)".to_owned()];
        assert_eq!(complaints, [&[][..], &[], &lost, &[], &[]]);
        assert_eq!(judged[2][0].case, cases()[2].to_string());
        // In the order of the cases, whoever was first.
        assert_eq!([0, 1, 3, 4].map(|number| judged[number][0].case.clone()), ["0", "1", "3", "4"]);
        assert_eq!(counts, [1, 2, 3, 4, 5]);
    }

    #[cfg(unix)]
    #[test]
    fn a_process_that_cannot_begin_is_an_error() {
        let ended = judge_in_processes(3, &cases(), || shell("0) exit 3;;"), || false, |_, _| {});
        assert_eq!(
            ended.expect_err("it ended").to_string(),
            "a worker process of --jobs exited (exit status: 3); its own message says why"
        );
        let none = judge_in_processes(2, &cases(), || Command::new("no-such-program"), || false, |_, _| {});
        assert!(matches!(none, Err(JobError::Process(_))), "{none:?}");
    }

    #[cfg(unix)]
    #[test]
    fn what_was_begun_is_finished_when_it_is_stopped() {
        let asked = AtomicUsize::new(0);
        let stop = || asked.fetch_add(1, Ordering::Relaxed) >= 2;
        let judged = judge_in_processes(1, &cases(), || shell(""), stop, |_, _| {}).expect("no error");
        let names: Vec<&str> = judged.iter().map(|judged| judged[0].case.as_str()).collect();
        assert_eq!(names, ["0", "1"]);
    }
}
