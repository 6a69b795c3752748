//! `flashcore report`: records as one HTML page.

use std::path::{Path, PathBuf};

use clap::Args;
use flashcore_bench::lab::compare::Subject;
use flashcore_bench::lab::experiments;
use flashcore_bench::lab::report::{ErrorMap, MOST_BYTES, Sources, error_map, html};
use flashcore_bench::testkit::verify::NoVerdict;
use flashcore_cpu::Level;
use flashcore_kernels::LaunchPlan;
use flashcore_problem::{DType, DTypes, Inputs, Outputs, Problem};

use super::origin::write_file;
use super::overwriting::refuse_overwriting;
use super::reference_gpu;
use crate::output::Output;
use crate::{Ending, Failure};

/// Write an HTML page of records: verdicts, times, roofline, ladder, errors, resources, raw data
///
/// The page needs no network, has a light and a dark theme, and prints well. It takes records of bench, compare, profile
/// and ladder, and the output of `flashcore resources --format json`; the leaderboard and the experiments are added if
/// they exist. With --errors a subject computes a problem whose values show which tile of keys made which error, and the
/// map is added.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashcore report bench.json compare.json --out report.html\n  flashcore report ladder.json --errors cpu --errors-shape 1x2x512x64 --title 'Ladder on an H200'"
)]
pub(crate) struct ReportCommand {
    /// The files to show
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The HTML file to write
    #[arg(long, value_name = "FILE", default_value = "report.html")]
    out: PathBuf,
    /// The title of the page
    #[arg(long, default_value = "flashcore")]
    title: String,
    /// The file of the leaderboard
    #[arg(long, value_name = "FILE", default_value = "results/leaderboard.json")]
    leaderboard: PathBuf,
    /// The directory of experiments
    #[arg(long, value_name = "DIR", default_value = "experiments")]
    experiments: PathBuf,
    /// Add an error map of cpu[:LEVEL], or of a GPU kernel, which runs in the simulator; several are allowed
    #[arg(long, value_name = "SUBJECT")]
    errors: Vec<Subject>,
    /// The shape of the problem of --errors
    #[arg(long, value_name = "SHAPE", default_value = "1x2x512x64", requires = "errors")]
    errors_shape: String,
    /// The element type of the problem of --errors, or those of query, key and value, and output, such as 'bf16 kv e4m3'
    #[arg(long, value_name = "DTYPE", default_value_t = super::one_type(DType::F16), requires = "errors")]
    errors_dtype: DTypes,
    /// The mask of the problem of --errors
    #[arg(long, value_name = "MASK", default_value = "causal", requires = "errors")]
    errors_mask: String,
}

impl ReportCommand {
    pub(crate) fn run(&self, output: &Output) -> Result<Ending, Failure> {
        let read: Vec<&Path> = self.files.iter().chain([&self.leaderboard]).map(PathBuf::as_path).collect();
        refuse_overwriting(&read, &[&self.out])?;
        let mut sources = Sources { title: self.title.clone(), ..Sources::default() };
        for file in &self.files {
            sources.add(file).map_err(|error| Failure::Usage(error.to_string()))?;
        }
        if sources.leaderboard.promotions.is_empty() {
            sources.leaderboard = super::leaderboard::read(&self.leaderboard)?;
        }
        sources.experiments =
            experiments::list(&self.experiments).map_err(|error| Failure::Usage(error.to_string()))?;
        for subject in &self.errors {
            sources.errors.push(self.map(*subject)?);
        }
        let page = html(&sources);
        if page.len() > MOST_BYTES {
            let bytes = page.len();
            return Err(Failure::Usage(format!(
                "the page would have {bytes} bytes, more than {MOST_BYTES}; give it fewer records"
            )));
        }
        write_file(&self.out, page.as_bytes())?;
        output.note(&format!("wrote {}, {} KB", self.out.display(), page.len() / 1000));
        Ok(Ending::Well)
    }

    fn map(&self, subject: Subject) -> Result<ErrorMap, Failure> {
        let problem = super::computable_problem(&self.errors_shape, self.errors_dtype, &self.errors_mask)?;
        let attend = |problem: &Problem, inputs: &Inputs| -> Result<Outputs, NoVerdict> {
            match subject {
                Subject::Cpu(level) => {
                    let mut outputs = Outputs::poisoned(problem);
                    let level = level.map_or_else(Level::default_level, Ok).map_err(flashcore_cpu::CpuError::from)?;
                    flashcore_cpu::attend_with(level, problem, inputs, &mut outputs)?;
                    Ok(outputs)
                }
                Subject::Cuda(config) => {
                    let config = config.unwrap_or_else(|| super::simulated_config(problem));
                    let plan = LaunchPlan::new(problem, config, reference_gpu::ARCH).map_err(NoVerdict::Refused)?;
                    Ok(flashcore_bench::testkit::simulate::simulate(&plan, problem, inputs, 0)?.outputs)
                }
            }
        };
        error_map(&problem, &subject.to_string(), 0, attend).map_err(|error| Failure::Usage(error.to_string()))
    }
}
