//! Versions of this program and of ptxas.

use std::process::Command;

use serde_json::{Value, json};

use super::finding::{Finding, Section, State};

pub(super) fn version() -> Section {
    let version = env!("CARGO_PKG_VERSION");
    let build = if cfg!(debug_assertions) { "debug" } else { "release" };
    let (system, arch) = (std::env::consts::OS, std::env::consts::ARCH);
    let text = format!("{version}, {build} build for {system} on {arch}");
    let value = json!({ "version": version, "build": build, "system": system, "arch": arch });
    Section { key: "flashcore", value, findings: vec![Finding::new("flashcore", State::Well, text)] }
}

/// Kernels run without it; `flashcore resources` does not.
pub(super) fn ptxas() -> Section {
    let (state, text, value) = match flashcore_ptx::ptxas::find() {
        Err(error) => (State::Absent, error.to_string(), json!({ "path": Value::Null, "reason": error.to_string() })),
        Ok(path) => {
            let shown = path.display().to_string();
            match Command::new(&path).arg("--version").output() {
                Ok(output) => {
                    let said = String::from_utf8_lossy(&output.stdout).into_owned();
                    let release = release(&said);
                    let text = format!("{} at {shown}", release.as_deref().unwrap_or("of unknown version"));
                    (State::Well, text, json!({ "path": shown, "version": release }))
                }
                Err(error) => {
                    let text = format!("{shown} cannot be run: {error}");
                    (State::Note, text.clone(), json!({ "path": shown, "reason": text }))
                }
            }
        }
    };
    Section { key: "ptxas", value, findings: vec![Finding::new("ptxas", state, text)] }
}

/// The version in `Cuda compilation tools, release 13.0, V13.0.88`.
fn release(said: &str) -> Option<String> {
    let line = said.lines().find(|line| line.contains("release "))?;
    Some(line.rsplit_once(", V").map_or(line, |(_, version)| version).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_of_ptxas() {
        let said = "ptxas: NVIDIA (R) Ptx optimizing assembler\nCuda compilation tools, release 13.0, V13.0.88\n";
        assert_eq!(release(said), Some("13.0.88".to_owned()));
        assert_eq!(release("no such thing"), None);
    }
}
