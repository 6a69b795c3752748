//! Gates on metrics, from a TOML file.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::metrics::{DEFINITIONS, Metric};
use crate::lab::experiments::{ExperimentError, parse_toml};
use crate::lab::svg::short;
use crate::util::nearest::unknown;

/// A file of gates.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gates {
    /// The gates.
    #[serde(default)]
    pub gate: Vec<Gate>,
}

/// Bounds of a metric.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gate {
    /// The metric.
    pub metric: String,
    /// At least this.
    pub least: Option<f64>,
    /// At most this.
    pub most: Option<f64>,
    /// Only for kernels whose name begins so.
    pub kernel: Option<String>,
    /// Reason for the bounds.
    pub why: Option<String>,
}

/// Result of a gate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GateResult {
    /// True if the kernel passed.
    pub passed: bool,
    /// The value and the limit.
    pub words: String,
}

impl Gates {
    /// Reads a file; a metric that there is not is an error with the nearest that there is.
    pub fn read(path: &Path) -> Result<Self, ExperimentError> {
        let file = path.display().to_string();
        let text = fs::read_to_string(path).map_err(|error| ExperimentError::File { file: file.clone(), error })?;
        Self::parse(&text, &file)
    }

    /// Reads a text; `file` is for complaints.
    pub fn parse(text: &str, file: &str) -> Result<Self, ExperimentError> {
        let gates: Self = parse_toml(text, file)?;
        let known: Vec<&str> =
            DEFINITIONS.iter().map(|definition| definition.name).chain(["sectors per request"]).collect();
        for gate in &gates.gate {
            let quoted = format!("\"{}\"", gate.metric);
            let line = 1 + text.lines().position(|line| line.contains(&quoted)).unwrap_or(0);
            if !known.contains(&gate.metric.as_str()) {
                let complaint = unknown("metric", &gate.metric, &known);
                return Err(ExperimentError::Unknown(format!("{file}, line {line}: {complaint}")));
            }
            if gate.least.is_none() && gate.most.is_none() {
                let metric = &gate.metric;
                return Err(ExperimentError::Unknown(format!(
                    "{file}, line {line}: the gate on `{metric}` has no limit; give it `least` or `most`"
                )));
            }
        }
        Ok(gates)
    }

    /// Holds the metrics of a kernel against the gates: what the hardware counted, or else the simulator.
    pub fn apply(&self, kernel: &str, metrics: &mut [Metric]) {
        for gate in &self.gate {
            if gate.kernel.as_ref().is_some_and(|prefix| !kernel.starts_with(prefix.as_str())) {
                continue;
            }
            let Some(metric) = metrics.iter_mut().find(|metric| metric.name == gate.metric) else { continue };
            let Some(value) = metric.hardware.or(metric.simulator) else { continue };
            let by = if metric.hardware.is_some() { "" } else { " in the simulator" };
            let passed = gate.least.is_none_or(|least| value >= least) && gate.most.is_none_or(|most| value <= most);
            let limits = [
                gate.least.map(|least| format!("at least {}", short(least))),
                gate.most.map(|most| format!("at most {}", short(most))),
            ];
            let limits = limits.into_iter().flatten().collect::<Vec<_>>().join(" and ");
            let why = gate.why.as_ref().filter(|_| !passed).map_or(String::new(), |why| format!(": {why}"));
            let words = format!("{}{by}, allowed is {limits}{why}", short(value));
            metric.gate = Some(GateResult { passed, words });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metric(name: &str, hardware: Option<f64>, simulator: Option<f64>) -> Metric {
        Metric { name: name.to_owned(), unit: String::new(), hardware, simulator, difference: None, gate: None }
    }

    #[test]
    fn gates_hold_or_say_why_not() {
        let text = "[[gate]]\nmetric = \"tensor pipe\"\nleast = 40\n\n[[gate]]\nmetric = \"shared bank conflicts\"\nmost = 0\nkernel = \"ampere\"\nwhy = \"tiles are swizzled\"\n";
        let gates = Gates::parse(text, "gates.toml").expect("gates");
        let mut metrics = [metric("tensor pipe", Some(55.0), None), metric("shared bank conflicts", None, Some(12.0))];
        gates.apply("ampere-64x64", &mut metrics);
        let words = |metric: &Metric| metric.gate.clone().map(|gate| (gate.passed, gate.words));
        assert_eq!(words(&metrics[0]), Some((true, "55.0, allowed is at least 40.0".to_owned())));
        assert_eq!(
            words(&metrics[1]),
            Some((false, "12.0 in the simulator, allowed is at most 0: tiles are swizzled".to_owned()))
        );
        let mut others = [metric("shared bank conflicts", None, Some(12.0))];
        gates.apply("scalar-64", &mut others);
        assert_eq!(words(&others[0]), None);
    }

    #[test]
    fn what_is_no_gate_is_told_with_file_line_and_the_nearest_name() {
        let check = |text: &str, expected: &str| {
            let error = Gates::parse(text, "gates.toml").expect_err("no gates").to_string();
            assert!(error.starts_with(expected), "{error}");
        };
        check(
            "[[gate]]\nmetric = \"tensor pip\"\nleast = 4\n",
            "gates.toml, line 2: there is no metric `tensor pip`; did you mean `tensor pipe`?",
        );
        check("[[gate]]\nmetric = \"tensor pipe\"\n", "gates.toml, line 2: the gate on `tensor pipe` has no limit");
        check("[[gate]\n", "gates.toml: TOML parse error at line 1, column 8");
    }
}
