//! The subcommands, one file each.

pub(crate) mod accuracy;
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
pub(crate) mod microbench;
pub(crate) mod mutants;
mod origin;
mod overwriting;
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

use flashcore_bench::testkit::memory::{Impossible, require_tensors};
use flashcore_bench::testkit::{ShapeError, Workload, parse_mask, parse_workload};
use flashcore_bench::util::nearest::nearest;
use flashcore_kernels::{Config, UnknownConfig, heuristics};
use flashcore_problem::{DType, DTypes, Problem};

use crate::Failure;

/// The element types of a problem that has one.
const fn one_type(dtype: DType) -> DTypes {
    DTypes { query: dtype, key_value: dtype, output: dtype }
}

/// The problem of a shape, element types and a mask, or what is wrong with it.
fn problem(shape: &str, types: DTypes, mask: &str) -> Result<Workload, Failure> {
    let usage = |error: ShapeError| Failure::Usage(error.to_string());
    let problem = parse_workload(shape, types).map_err(usage)?.with_mask(parse_mask(mask).map_err(usage)?);
    valid(&problem)?;
    Ok(problem)
}

/// Problems of a suite with element types, or what is wrong with them.
fn suite_of_types(problems: Vec<Problem>, types: DTypes) -> Result<Vec<Workload>, Failure> {
    let problems: Vec<Workload> = problems.into_iter().map(|problem| problem.with_dtypes(types).into()).collect();
    problems.iter().try_for_each(|problem| valid(problem))?;
    Ok(problems)
}

/// Everything that is wrong with a problem, a line each.
fn valid(problem: &Problem) -> Result<(), Failure> {
    let errors: Vec<_> = problem.errors().iter().map(ToString::to_string).collect();
    if errors.is_empty() { Ok(()) } else { Err(Failure::Usage(errors.join("\n"))) }
}

/// A problem that fits the memory, for commands that compute it.
fn computable_problem(shape: &str, types: DTypes, mask: &str) -> Result<Workload, Failure> {
    let problem = problem(shape, types, mask)?;
    require_tensors(&problem).map_err(impossible)?;
    Ok(problem)
}

/// A problem that nobody can compute is a wrong call; one that is larger than the memory misses something here.
#[expect(clippy::needless_pass_by_value, reason = "map_err hands it over")]
fn impossible(error: Impossible) -> Failure {
    match error {
        Impossible::Invalid(_) => Failure::Usage(error.to_string()),
        Impossible::Memory(_) => Failure::Environment(error.to_string()),
    }
}

/// Seconds of an argument: from 0 to a day, so that they are a duration whatever is done with them.
fn parse_seconds(text: &str) -> Result<f64, String> {
    const DAY: f64 = 86_400.0;
    number_in(text, 0.0, DAY).ok_or_else(|| format!("seconds are a number from 0 to {DAY}, such as 0.5"))
}

/// Percents of an argument: from 0 to 1000.
fn parse_percent(text: &str) -> Result<f64, String> {
    const MOST: f64 = 1000.0;
    number_in(text, 0.0, MOST).ok_or_else(|| format!("a percentage is a number from 0 to {MOST}, such as 2.5"))
}

/// A finite number of an argument.
fn parse_finite(text: &str) -> Result<f64, String> {
    number_in(text, f64::MIN, f64::MAX).ok_or_else(|| "it must be a finite number, such as -5".to_owned())
}

/// The number that a text says, if it is in the range; NaN is in none.
fn number_in(text: &str, least: f64, most: f64) -> Option<f64> {
    text.parse().ok().filter(|number| (least..=most).contains(number))
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

/// The GPU kernel that is simulated where none is named: that for 16 bits, or the one that an H200 takes for FP8 queries.
fn simulated_config(problem: &Problem) -> Config {
    if problem.dtype.is_float8() { heuristics::select(problem, reference_gpu::TARGET) } else { Config::ampere() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_arguments_are_in_their_range() {
        let seconds = "seconds are a number from 0 to 86400, such as 0.5";
        for (text, expected) in [("0", 0.0), ("0.5", 0.5), ("86400", 86_400.0), ("1e3", 1000.0), ("-0", 0.0)] {
            assert_eq!(parse_seconds(text), Ok(expected), "{text}");
        }
        for text in ["inf", "-inf", "nan", "NaN", "1e300", "86400.1", "-1", "-1e-9", "", "1s", "0x10"] {
            assert_eq!(parse_seconds(text), Err(seconds.to_owned()), "{text}");
        }
        let percent = "a percentage is a number from 0 to 1000, such as 2.5";
        for text in ["inf", "nan", "-1", "1001", "5%"] {
            assert_eq!(parse_percent(text), Err(percent.to_owned()), "{text}");
        }
        assert_eq!((parse_percent("60"), parse_finite("-5")), (Ok(60.0), Ok(-5.0)));
        for text in ["inf", "-inf", "nan", "1e309", "five"] {
            assert_eq!(parse_finite(text), Err("it must be a finite number, such as -5".to_owned()), "{text}");
        }
    }
}
