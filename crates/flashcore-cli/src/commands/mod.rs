//! The subcommands, one file each.

pub(crate) mod bench;
pub(crate) mod mutants;
pub(crate) mod ptx;
pub(crate) mod resources;
pub(crate) mod verify;

use flashcore_kernels::Config;

use crate::Failure;

/// The config by its name, or by the name of its kernel.
fn config(name: &str) -> Result<Config, Failure> {
    let all = Config::all();
    let found = all.iter().find(|config| config.to_string() == name || config.family() == name);
    found.copied().ok_or_else(|| {
        let known: Vec<String> = all.iter().map(ToString::to_string).collect();
        Failure::Usage(format!(
            "there is no kernel `{name}`; there are scalar, ampere, and by config {}",
            known.join(", ")
        ))
    })
}
