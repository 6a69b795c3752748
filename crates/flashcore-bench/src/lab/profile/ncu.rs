//! ncu, NVIDIA's kernel profiler, run as a process.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::metrics::{DEFINITIONS, Definition};
use crate::util::whole_file::write_whole;

/// Reason why nothing was counted.
#[derive(Debug, thiserror::Error)]
pub enum NcuError {
    /// There is no ncu.
    #[error(
        "ncu was not found ({error}); install Nsight Compute, which is part of the CUDA toolkit, and put ncu on PATH or use --ncu PATH. Counters are from the simulator, times from events"
    )]
    Missing {
        /// Error of the operating system.
        error: io::Error,
    },
    /// It may not read the counters.
    #[error(
        "the driver lets only administrators read counters (ERR_NVGPUCTRPERM); run this as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
    )]
    Forbidden,
    /// It failed.
    #[error("ncu failed: {said}")]
    Failed {
        /// The end of what it said.
        said: String,
    },
    /// It profiled nothing.
    #[error("ncu recorded no launch of a flashcore kernel")]
    NoLaunch,
}

/// An ncu that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ncu {
    program: PathBuf,
    with_sudo: bool,
    /// Version.
    pub version: String,
}

/// Counters of one launch.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    /// The name of the kernel.
    pub kernel: String,
    /// CTAs of the launch, where it says.
    pub ctas: Option<u32>,
    /// By ncu's own names, in base units.
    pub counted: BTreeMap<String, f64>,
}

impl Ncu {
    /// The ncu of this name or path.
    pub fn find(program: &Path) -> Result<Self, NcuError> {
        let output = Command::new(program).arg("--version").output().map_err(|error| NcuError::Missing { error })?;
        let said = String::from_utf8_lossy(&output.stdout);
        let version = said.lines().find_map(|line| line.strip_prefix("Version ")).unwrap_or("unknown").to_owned();
        Ok(Self { program: program.to_owned(), with_sudo: false, version })
    }

    fn command(&self) -> Command {
        if self.with_sudo {
            let mut command = Command::new("sudo");
            command.arg("-n").arg(&self.program);
            command
        } else {
            Command::new(&self.program)
        }
    }

    /// The metrics that it has on this GPU, of those that are looked at.
    fn known_metrics(&self) -> Result<Vec<&'static str>, NcuError> {
        let output = self.command().arg("--query-metrics").output().map_err(|error| NcuError::Missing { error })?;
        let said = String::from_utf8_lossy(&output.stdout);
        let known: BTreeSet<&str> = said.lines().filter_map(|line| line.split_whitespace().next()).collect();
        let is_known = |name: &&str| known.contains(name.split('.').next().unwrap_or(name));
        Ok(DEFINITIONS.iter().flat_map(Definition::names).filter(is_known).collect())
    }

    /// Profiles a command. Leaves `report`.ncu-rep and `report`.csv, and gives what was counted during the last launch of
    /// each kernel of flashcore. Clocks stay as they are; caches too, unless `is_cold`.
    pub fn profile(
        &self,
        target: &Path,
        arguments: &[String],
        report: &Path,
        is_cold: bool,
    ) -> Result<Vec<Sampled>, NcuError> {
        let found = self.run(target, arguments, report, is_cold);
        match found {
            // Whoever may use sudo without a word need not be asked.
            Err(NcuError::Forbidden) if !self.with_sudo && may_sudo() => {
                Self { with_sudo: true, ..self.clone() }.run(target, arguments, report, is_cold)
            }
            found => found,
        }
    }

    fn run(&self, target: &Path, arguments: &[String], report: &Path, is_cold: bool) -> Result<Vec<Sampled>, NcuError> {
        let metrics = self.known_metrics()?.join(",");
        let output = self
            .command()
            .args(["--clock-control", "none", "--cache-control", if is_cold { "all" } else { "none" }])
            .args([
                "--kernel-name",
                "regex:^flashcore_",
                "--target-processes",
                "all",
                "--metrics",
                &metrics,
                "--force-overwrite",
                "--export",
            ])
            .arg(report)
            .arg(target)
            .args(arguments)
            .output()
            .map_err(|error| NcuError::Missing { error })?;
        complain(&output)?;
        let import = report.with_extension("ncu-rep");
        let output = self
            .command()
            .arg("--import")
            .arg(&import)
            .args(["--csv", "--page", "raw", "--print-units", "base"])
            .output()
            .map_err(|error| NcuError::Missing { error })?;
        complain(&output)?;
        let csv = String::from_utf8_lossy(&output.stdout).into_owned();
        write_whole(&report.with_extension("csv"), csv.as_bytes())
            .map_err(|error| NcuError::Failed { said: format!("{}: {error}", report.display()) })?;
        let launches = parse_csv(&csv);
        if launches.is_empty() { Err(NcuError::NoLaunch) } else { Ok(launches) }
    }
}

fn may_sudo() -> bool {
    Command::new("sudo").args(["-n", "true"]).output().is_ok_and(|output| output.status.success())
}

fn complain(output: &Output) -> Result<(), NcuError> {
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if said.contains("ERR_NVGPUCTRPERM") {
        return Err(NcuError::Forbidden);
    }
    if !output.status.success() {
        let last: Vec<&str> = said.lines().rev().take(4).collect();
        return Err(NcuError::Failed { said: last.into_iter().rev().collect::<Vec<_>>().join(" / ") });
    }
    Ok(())
}

/// Reads the raw page of a report: a line of names, a line of units, a line for each launch. Gives the last launch of each
/// kernel, in the order in which kernels were first launched.
pub fn parse_csv(text: &str) -> Vec<Sampled> {
    let mut lines = text.lines().skip_while(|line| !line.starts_with("\"ID\"")).map(fields);
    let (Some(names), Some(_units)) = (lines.next(), lines.next()) else { return Vec::new() };
    let mut launches: Vec<Sampled> = Vec::new();
    for values in lines.filter(|values| values.len() == names.len()) {
        let value = |name: &str| names.iter().position(|known| known == name).map(|place| values[place].as_str());
        let kernel = value("Kernel Name").unwrap_or_default().to_owned();
        let ctas = value("Grid Size").and_then(product);
        let number = |text: &str| text.replace(',', "").parse::<f64>().ok();
        let counted = names.iter().zip(&values).filter(|(name, _)| name.contains("__"));
        let counted = counted.filter_map(|(name, value)| Some((name.clone(), number(value)?))).collect();
        launches.retain(|launch| launch.kernel != kernel);
        launches.push(Sampled { kernel, ctas, counted });
    }
    launches
}

/// The product of `(32, 8, 1)` or `(32,8,1)`.
fn product(text: &str) -> Option<u32> {
    let numbers = text.trim_matches(['(', ')', ' ']).split([',', 'x']);
    numbers.map(|number| number.trim().parse::<u32>().ok()).product()
}

/// The fields of a line of CSV, in which quotes may stand.
fn fields(line: &str) -> Vec<String> {
    let mut fields = vec![String::new()];
    let mut letters = line.chars().peekable();
    let mut is_quoted = false;
    while let Some(letter) = letters.next() {
        match letter {
            '"' if is_quoted && letters.peek() == Some(&'"') => {
                letters.next();
                fields.last_mut().expect("there is one").push('"');
            }
            '"' => is_quoted = !is_quoted,
            ',' if !is_quoted => fields.push(String::new()),
            letter => fields.last_mut().expect("there is one").push(letter),
        }
    }
    fields
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = r#"==PROF== Connected
"ID","Process Name","Kernel Name","Grid Size","dram__bytes.sum","gpu__time_duration.sum"
"","","","","byte","nsecond"
"0","flashcore","flashcore_ampere","(1, 1, 1)","1,024","2000"
"1","flashcore","flashcore_ampere","(8, 8, 1)","2097152","5500"
"2","flashcore","flashcore_combine","(4, 1, 1)","64","n/a"
"#;

    #[test]
    fn the_last_launch_of_each_kernel_counts() {
        let launches = parse_csv(PAGE);
        assert_eq!(launches.len(), 2);
        assert_eq!((launches[0].kernel.as_str(), launches[0].ctas), ("flashcore_ampere", Some(64)));
        assert_eq!(launches[0].counted["dram__bytes.sum"], 2_097_152.0);
        assert_eq!(launches[1].counted.len(), 1);
        assert_eq!(parse_csv("no such thing"), []);
    }

    #[test]
    fn a_missing_ncu_says_how_to_get_it() {
        let error = Ncu::find(Path::new("/nowhere/ncu")).expect_err("it is not there").to_string();
        let missing = Command::new("/nowhere/ncu").output().expect_err("it is not there");
        assert_eq!(
            error,
            format!(
                "ncu was not found ({missing}); install Nsight Compute, which is part of the CUDA toolkit, and put ncu on PATH or use --ncu PATH. Counters are from the simulator, times from events"
            )
        );
    }
}
