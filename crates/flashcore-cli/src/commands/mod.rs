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
pub(crate) mod report;
pub(crate) mod repro;
pub(crate) mod resources;
pub(crate) mod roofline;
pub(crate) mod status;
pub(crate) mod tune;
pub(crate) mod verify;
mod whole_file;

use flashcore_bench::nearest::nearest;
use flashcore_kernels::{Config, UnknownConfig};

use crate::Failure;

/// The config by its name, or by the name of its kernel.
fn config(name: &str) -> Result<Config, Failure> {
    name.parse().map_err(|unknown: UnknownConfig| {
        let known: Vec<String> = Config::all().iter().map(ToString::to_string).collect();
        let meant = nearest(name, known.iter().map(String::as_str));
        let meant = meant.map_or_else(String::new, |meant| format!("; did you mean `{meant}`?"));
        Failure::Usage(format!("{unknown}{meant}"))
    })
}
