//! The subcommands, one file each.

pub(crate) mod attend;
pub(crate) mod bench;
pub(crate) mod cache;
pub(crate) mod compare;
pub(crate) mod completions;
pub(crate) mod conformance;
pub(crate) mod doctor;
pub(crate) mod experiments;
pub(crate) mod ladder;
pub(crate) mod leaderboard;
pub(crate) mod mutants;
mod origin;
pub(crate) mod profile;
pub(crate) mod ptx;
mod reference_gpu;
pub(crate) mod report;
pub(crate) mod repro;
pub(crate) mod resources;
pub(crate) mod roofline;
pub(crate) mod status;
mod threads;
pub(crate) mod tune;
pub(crate) mod verify;
mod whole_file;

use flashcore_bench::nearest::nearest;
use flashcore_bench::{ShapeError, parse_mask, parse_shape};
use flashcore_kernels::{Config, UnknownConfig};
use flashcore_problem::{DType, Problem, ProblemError};

use crate::Failure;

/// The problem of a shape, a type and a mask, or what is wrong with it.
fn problem(shape: &str, dtype: DType, mask: &str) -> Result<Problem, Failure> {
    let usage = |error: ShapeError| Failure::Usage(error.to_string());
    let problem = parse_shape(shape, dtype).map_err(usage)?.with_mask(parse_mask(mask).map_err(usage)?);
    let lines = |errors: Vec<ProblemError>| errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
    problem.validate().map_err(|errors| Failure::Usage(lines(errors)))?;
    Ok(problem)
}

/// The config by its name, or by the name of its kernel.
fn config(name: &str) -> Result<Config, Failure> {
    name.parse().map_err(|unknown: UnknownConfig| {
        let known: Vec<String> = Config::all().iter().map(ToString::to_string).collect();
        let meant = nearest(name, known.iter().map(String::as_str));
        let meant = meant.map_or_else(String::new, |meant| format!("; did you mean `{meant}`?"));
        Failure::Usage(format!("{unknown}{meant}"))
    })
}
