//! Subjects of other builds: each in a process of its own, which runs on request and returns its time.
//!
//! A worker verifies its problem, writes one line of JSON, a [`Greeting`], and then answers every line `run` with the
//! seconds of one run and the line `judge` with one more line of JSON, the measurement of what it writes.

use std::io::{self, BufRead, BufReader, Lines, Write};
use std::iter;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde::{Deserialize, Serialize};

use super::comparison::ComparedRow;
use super::in_process::{CpuArm, CpuTensors, judge_gpu, measure_ceilings, slack, trusted};
use super::rounds::{Options, Progress, rounds};
use super::subject::Subject;
use crate::lab::peak::working_threads;
use crate::lab::record::{Build, Measurement};
use crate::testkit::gpu::{Gpu, GpuArm};
use crate::testkit::verify::NoVerdict;
use crate::testkit::{Workload, mask_text};

/// The version of what workers and those who ask them say.
const PROTOCOL: u32 = 1;

/// The first thing that a worker says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Greeting {
    /// The version of the protocol.
    pub flashcore_worker: u32,
    /// The build.
    pub build: Build,
    /// The measurement without its times.
    pub measurement: Measurement,
}

/// Reason why two subjects could not be compared.
#[derive(Debug, thiserror::Error)]
pub enum CompareError {
    /// The CPU backend refused.
    #[error(transparent)]
    Cpu(#[from] flashcore_cpu::CpuError),
    /// The level cannot be used.
    #[error(transparent)]
    Level(#[from] flashcore_cpu::LevelError),
    /// It could not be run or judged.
    #[error(transparent)]
    NoVerdict(#[from] NoVerdict),
    /// The GPU failed.
    #[error(transparent)]
    Gpu(#[from] flashcore::Error),
    /// There is no GPU.
    #[error("there is no GPU here; compare CPU levels, or records")]
    NoGpu,
    /// Only a CPU can be made slower.
    #[error("--slow-b works on the CPU only; a GPU kernel cannot be made to wait")]
    SlowOnGpu,
    /// One of them is on the CPU and the other is not.
    #[error("A and B must run on the same device; one runs on the CPU and the other on a GPU")]
    TwoMachines,
    /// The gates complain: a wrong result is not worth timing.
    #[error("{kernel} is wrong on {problem}, so it is not timed: {complaints}")]
    Wrong {
        /// The kernel.
        kernel: String,
        /// The problem.
        problem: String,
        /// Complaints of the gates.
        complaints: String,
    },
    /// A worker did not do as it should.
    #[error("{program}: {said}")]
    Worker {
        /// The program.
        program: String,
        /// Output of the program, or the reason.
        said: String,
    },
    /// Talking to a worker failed.
    #[error("the connection to a worker process failed: {0}")]
    Talk(#[from] io::Error),
}

/// Is a worker: runs a subject on a problem when `orders` say so, until they end.
pub fn serve(
    subject: Subject,
    workload: &Workload,
    seed: u64,
    build: &Build,
    orders: impl BufRead,
    answers: impl Write,
) -> Result<(), CompareError> {
    let gpu = match subject {
        Subject::Cpu(_) => None,
        Subject::Cuda(_) => Some(Gpu::open(0)?),
    };
    let ceilings = measure_ceilings(subject, workload, gpu.as_ref())?;
    match (subject, &gpu) {
        (Subject::Cpu(level), _) => {
            let mut tensors = CpuTensors::new(workload, seed);
            let arm = CpuArm::new(level, &mut tensors, 0.0)?;
            let mut times = Vec::new();
            obey(build, orders, answers, |order| match order {
                Order::Run => {
                    let seconds = arm.seconds(&mut tensors)?;
                    times.push(seconds);
                    Ok(Done::Ran(seconds))
                }
                Order::Judge => {
                    let mut judged = arm.judge(&mut tensors, &ceilings, seed)?;
                    if !times.is_empty() {
                        arm.settle_floor(&mut judged, &ceilings, &times);
                    }
                    Ok(Done::Judged(Box::new(judged)))
                }
            })
        }
        (Subject::Cuda(config), Some(gpu)) => {
            let inputs = workload.inputs(seed);
            let arm = GpuArm::new(gpu, workload, config, &inputs)?;
            let mut timer = arm.timer()?;
            obey(build, orders, answers, |order| match order {
                Order::Run => Ok(Done::Ran(timer.seconds()?)),
                Order::Judge => {
                    judge_gpu(&arm, workload, &inputs, &ceilings, seed).map(|judged| Done::Judged(Box::new(judged)))
                }
            })
        }
        (Subject::Cuda(_), None) => Err(CompareError::NoGpu),
    }
}

/// An order to a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Run,
    Judge,
}

/// A worker's answer.
enum Done {
    /// In so many seconds.
    Ran(f64),
    Judged(Box<Measurement>),
}

/// Has itself judged, greets, and then follows orders.
fn obey(
    build: &Build,
    orders: impl BufRead,
    mut answers: impl Write,
    mut carry_out: impl FnMut(Order) -> Result<Done, CompareError>,
) -> Result<(), CompareError> {
    let mut greeted = false;
    let first = iter::once(Ok("judge".to_owned()));
    for order in first.chain(orders.lines()) {
        let order = if order? == "run" { Order::Run } else { Order::Judge };
        let answer = match carry_out(order)? {
            Done::Ran(seconds) => format!("{seconds:e}"),
            Done::Judged(measurement) => {
                let json = if greeted {
                    serde_json::to_string(&measurement)
                } else {
                    // What is wrong is not worth timing.
                    let measurement = trusted(*measurement)?;
                    serde_json::to_string(&Greeting { flashcore_worker: PROTOCOL, build: build.clone(), measurement })
                };
                json.map_err(io::Error::from)?
            }
        };
        greeted = true;
        writeln!(answers, "{answer}")?;
        answers.flush()?;
    }
    Ok(())
}

/// A worker, from outside.
struct Worker {
    program: String,
    child: Child,
    orders: Option<ChildStdin>,
    answers: Lines<BufReader<ChildStdout>>,
    greeting: Greeting,
}

impl Worker {
    fn start(program: &Path, subject: Subject, workload: &Workload, seed: u64) -> Result<Self, CompareError> {
        let name = program.display().to_string();
        let complain = |said: String| CompareError::Worker { program: name.clone(), said };
        let mut child = Command::new(program)
            .args(["compare-worker", "--subject", &subject.to_string(), "--shape", &workload.shape()])
            .args(["--dtype", &workload.dtypes().to_string(), "--mask", &mask_text(workload.mask)])
            .args(["--seed", &seed.to_string()])
            // As many threads as the record of the comparison says, whatever the other build would take.
            .env("RAYON_NUM_THREADS", working_threads().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| complain(format!("it cannot be started: {error}")))?;
        let orders = child.stdin.take();
        let stdout = child.stdout.take().ok_or_else(|| complain("it has no output".to_owned()))?;
        let mut answers = BufReader::new(stdout).lines();
        let first = answers.next().transpose()?.unwrap_or_default();
        let Ok(greeting) = serde_json::from_str::<Greeting>(&first) else {
            drop(orders);
            let said = child.wait_with_output().map(|output| String::from_utf8_lossy(&output.stderr).into_owned());
            let said = said.unwrap_or_default();
            let line = said.lines().next().unwrap_or("nothing").to_owned();
            return Err(complain(format!(
                "it does not answer as a build of flashcore with `compare` does, so it cannot be compared; it said: {line}"
            )));
        };
        if greeting.flashcore_worker != PROTOCOL {
            let found = greeting.flashcore_worker;
            return Err(complain(format!(
                "it speaks version {found} of the worker protocol, and this program version {PROTOCOL}; compare builds that are closer to each other"
            )));
        }
        Ok(Self { program: name, child, orders, answers, greeting })
    }

    fn ask(&mut self, order: &str) -> Result<String, CompareError> {
        if let Some(orders) = &mut self.orders {
            writeln!(orders, "{order}")?;
            orders.flush()?;
        }
        let answer = self.answers.next().transpose()?;
        answer.ok_or_else(|| CompareError::Worker {
            program: self.program.clone(),
            said: "it ended during the comparison".to_owned(),
        })
    }

    fn seconds(&mut self) -> Result<f64, CompareError> {
        let answer = self.ask("run")?;
        answer.parse().map_err(|_| CompareError::Worker { program: self.program.clone(), said: answer })
    }

    fn judge(&mut self) -> Result<Measurement, CompareError> {
        let answer = self.ask("judge")?;
        let measurement = serde_json::from_str(&answer);
        trusted(measurement.map_err(|_| CompareError::Worker { program: self.program.clone(), said: answer })?)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Without orders a worker ends; who does not listen is ended.
        drop(self.orders.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Compares what two programs make of a problem. Gives the builds too.
pub fn compare_workers(
    programs: [&Path; 2],
    subjects: [Subject; 2],
    workload: &Workload,
    options: &Options,
    go_on: impl FnMut(Progress) -> bool,
) -> Result<(ComparedRow, [Build; 2]), CompareError> {
    let start = |side: usize| Worker::start(programs[side], subjects[side], workload, options.seed);
    let mut workers = [start(0)?, start(0)?, start(1)?];
    let (rounds, conclusion) = rounds(options, |arm| workers[arm as usize].seconds(), go_on)?;
    let (a, b) = (workers[0].judge()?, workers[2].judge()?);
    let builds = [&workers[0], &workers[2]].map(|worker| worker.greeting.build.clone());
    let slack = slack(subjects[0]).max(slack(subjects[1]));
    Ok((ComparedRow::new(a, b, rounds, conclusion, slack), builds))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_problem::{DType, Problem};

    #[test]
    fn a_worker_greets_runs_and_judges() {
        let problem = Workload::from(Problem::new(1, 2, 40, 16, DType::F32));
        let build = crate::lab::record::Origin::for_tests().build;
        let mut said = Vec::new();
        serve(Subject::Cpu(None), &problem, 3, &build, "run\nrun\njudge\n".as_bytes(), &mut said).expect("it works");
        let said = String::from_utf8(said).expect("text");
        let lines: Vec<&str> = said.lines().collect();
        let greeting: Greeting = serde_json::from_str(lines[0]).expect("a greeting");
        assert_eq!((greeting.flashcore_worker, &greeting.build), (PROTOCOL, &build));
        assert!(lines[1..3].iter().all(|line| line.parse::<f64>().is_ok_and(|seconds| seconds > 0.0)), "{said}");
        let after: Measurement = serde_json::from_str(lines[3]).expect("a measurement");
        // What was timed is what was judged.
        assert!(after.verified.passed);
        assert_eq!(after.output_sha256, greeting.measurement.output_sha256);
        assert_eq!(lines.len(), 4);
    }
}
