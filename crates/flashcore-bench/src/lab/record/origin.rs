//! Origin of a record: build, command, moment, machine.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde::{Deserialize, Serialize};

use crate::floor::Ceilings;
use crate::util::command_line::command_line;
use crate::util::moment;

/// The program that made a record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Build {
    /// The version of flashcore.
    pub version: String,
    /// The commit it was built from; nothing outside a checkout.
    pub commit: Option<String>,
    /// True if files differed from that commit.
    pub dirty: bool,
    /// `release` or `debug`.
    pub profile: String,
}

/// Origin of a record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Origin {
    /// The program.
    pub build: Build,
    /// The command line.
    pub command: String,
    /// When it ended, in UTC.
    pub time: String,
    /// The machine.
    pub machine: Machine,
}

/// The field of the state that holds the load of a CPU.
const LOAD_AVERAGE: &str = "load average";

/// A machine, as far as times depend on it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// `cpu`, `cuda` or `sim`.
    pub backend: String,
    /// The name of the processor or of the GPU.
    pub device: String,
    /// The architecture of a GPU, the level of a CPU.
    pub arch: String,
    /// Threads that computed, on a CPU.
    pub threads: Option<usize>,
    /// The driver, on a GPU.
    pub driver: Option<String>,
    /// Peak rates.
    pub ceilings: Option<Ceilings>,
    /// Clocks, temperature and power of a GPU, the load of a CPU, at the end.
    pub state: Vec<(String, String)>,
}

impl Origin {
    /// Of the process that runs, on this machine, now.
    pub fn now(build: Build, machine: Machine) -> Self {
        // Where programs and files lie is nobody's business.
        let file = |path: &str| Path::new(path).file_name().unwrap_or_default().to_string_lossy().into_owned();
        let name = |argument: String| match argument.strip_prefix("bin:") {
            Some(program) => format!("bin:{}", file(program)),
            None if Path::new(&argument).is_absolute() => file(&argument),
            None => argument,
        };
        let arguments: Vec<String> = std::env::args().skip(1).map(name).collect();
        let command = format!("flashcore {}", command_line(&arguments));
        Self { build, command, time: moment::now(), machine }
    }
}

impl Build {
    /// The commit in few characters, with a mark when files differed from it.
    pub fn short(&self) -> String {
        let commit = self.commit.as_deref().map_or("unknown", |commit| commit.get(..10).unwrap_or(commit));
        if self.dirty { format!("{commit}+") } else { commit.to_owned() }
    }
}

impl Machine {
    /// This machine's processor at a level.
    pub fn cpu(level: &str, threads: usize, ceilings: Option<Ceilings>) -> Self {
        let information = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = information.lines().filter_map(|line| line.split_once(':'));
        let model = model.filter(|(key, _)| key.trim() == "model name").map(|(_, value)| value.trim()).next();
        let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let load = load.split_whitespace().next().map(|load| (LOAD_AVERAGE.to_owned(), load.to_owned()));
        Self {
            backend: "cpu".to_owned(),
            device: model.unwrap_or(std::env::consts::ARCH).to_owned(),
            arch: level.to_owned(),
            threads: Some(threads),
            driver: None,
            ceilings,
            state: load.into_iter().collect(),
        }
    }

    /// A GPU.
    pub fn gpu(device: &flashcore_cuda::Device, ceilings: Option<Ceilings>) -> Self {
        let state = gpu_state();
        let driver = state.iter().find(|(field, _)| field == "driver_version").map(|(_, value)| value.clone());
        Self {
            backend: "cuda".to_owned(),
            device: device.name.clone(),
            arch: device.arch().map_or_else(|_| "unknown".to_owned(), |arch| arch.to_string()),
            threads: None,
            driver,
            ceilings,
            state,
        }
    }

    /// The load average of a CPU when it was measured, if the record has it.
    pub fn load_average(&self) -> Option<f64> {
        self.state.iter().find(|(field, _)| field == LOAD_AVERAGE).and_then(|(_, value)| value.parse().ok())
    }

    /// A peak rate that no machine has, in words.
    pub(super) fn impossible(&self) -> Option<String> {
        const MOST: f64 = 1e30;
        let Ceilings { flops, bytes, exponentials } = self.ceilings?;
        let rates = [("flops", flops), ("bytes", bytes), ("exponentials", exponentials)];
        let is_possible = |rate: f64| rate == f64::INFINITY || (rate > 0.0 && rate <= MOST);
        let (name, rate) = rates.into_iter().find(|(_, rate)| !is_possible(*rate))?;
        Some(format!(
            "the machine's peak rate of {name} is {rate:e} a second; it must be above 0 and at most {MOST:e}, or null where it is unknown"
        ))
    }

    /// True if times of the two machines can be compared.
    pub fn is_like(&self, other: &Self) -> bool {
        (&self.backend, &self.device, &self.arch, self.threads)
            == (&other.backend, &other.device, &other.arch, other.threads)
    }

    /// The machine in one line.
    pub fn words(&self) -> String {
        let plural = if self.threads == Some(1) { "" } else { "s" };
        let threads = self.threads.map_or(String::new(), |threads| format!(", {threads} thread{plural}"));
        let driver = self.driver.as_ref().map_or(String::new(), |driver| format!(", driver {driver}"));
        format!("{} ({}){threads}{driver}", self.device, self.arch)
    }
}

/// Clocks, temperature and power of the first GPU right now; nothing where nvidia-smi does not tell.
pub fn gpu_state() -> Vec<(String, String)> {
    const FIELDS: [&str; 6] = ["name", "driver_version", "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw"];
    let output = Command::new("nvidia-smi")
        .arg(format!("--query-gpu={}", FIELDS.join(",")))
        .args(["--format=csv,noheader"])
        .output();
    let Ok(output) = output else { return Vec::new() };
    let text = String::from_utf8_lossy(&output.stdout);
    let values = text.lines().next().unwrap_or("").split(", ").filter(|value| !value.is_empty());
    FIELDS.into_iter().zip(values).map(|(field, value)| (field.to_owned(), value.to_owned())).collect()
}

#[cfg(test)]
impl Origin {
    /// One for tests.
    pub(crate) fn for_tests() -> Self {
        Self {
            build: Build {
                version: "0.1.0".to_owned(),
                commit: Some("0123456789abcdef0123456789abcdef01234567".to_owned()),
                dirty: false,
                profile: "release".to_owned(),
            },
            command: "flashcore bench".to_owned(),
            time: "2026-11-15T09:40:00Z".to_owned(),
            machine: Machine {
                backend: "cpu".to_owned(),
                device: "Test processor".to_owned(),
                arch: "avx2".to_owned(),
                threads: Some(2),
                driver: None,
                ceilings: None,
                state: Vec::new(),
            },
        }
    }
}
