//! Recomputes a case on any backend that can.

use flashcore_cpu::Level;
use flashcore_kernels::{Config, LaunchPlan};
use flashcore_problem::{Inputs, Outputs, Problem};

use super::manifest::CaseEntry;
use crate::floor::Work;
use crate::testkit::gpu::Gpu;
use crate::testkit::simulate::simulate;
use crate::testkit::verify::{NoVerdict, SIMULATED_ARCH};
use crate::util::digest::sha256;

/// Result of a case on this machine.
#[derive(Debug)]
pub enum Computed {
    /// By the same backend.
    Same(Outputs),
    /// By the simulator, in place of the GPU.
    Simulated(Outputs),
    /// Not at all, with the reason.
    Not(String),
}

/// Operations up to which the simulator stands in for a GPU; more takes minutes.
const MOST_SIMULATED_FLOPS: f64 = 6e8;

/// The SHA-256 of query, key and value, and of the scales that there are.
pub fn inputs_sha256(inputs: &Inputs) -> String {
    let mut bytes = [&inputs.query.data[..], &inputs.key.data, &inputs.value.data].concat();
    for scale in [&inputs.q_scale, &inputs.k_scale, &inputs.v_scale].into_iter().flatten() {
        bytes.extend(scale.data.iter().flat_map(|number| number.to_le_bytes()));
    }
    sha256(&bytes)
}

/// Computes a case by the backend and kernel that it names, or as near to that as this machine comes.
pub fn compute(case: &CaseEntry, problem: &Problem, inputs: &Inputs, gpu: Option<&Gpu>) -> Result<Computed, NoVerdict> {
    if case.backend == "cpu" {
        let level: Level = case.kernel.parse().map_err(flashcore_cpu::CpuError::from)?;
        if !Level::available().contains(&level) {
            return Ok(Computed::Not(format!("this machine has no level {level}")));
        }
        let mut outputs = Outputs::poisoned(problem);
        flashcore_cpu::attend_with(level, problem, inputs, &mut outputs)?;
        return Ok(Computed::Same(outputs));
    }
    let Ok(config) = case.kernel.parse::<Config>() else {
        return Ok(Computed::Not(format!("this program has no kernel {}", case.kernel)));
    };
    if let Some(gpu) = gpu {
        return Ok(Computed::Same(gpu.outputs(problem, Some(config), inputs)?));
    }
    if Work::of(problem).flops > MOST_SIMULATED_FLOPS {
        return Ok(Computed::Not("there is no GPU, and it is too large for the simulator".to_owned()));
    }
    let plan = match LaunchPlan::new(problem, config, SIMULATED_ARCH) {
        Ok(plan) => plan,
        Err(reasons) => {
            return Ok(Computed::Not(reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")));
        }
    };
    Ok(Computed::Simulated(simulate(&plan, problem, inputs, case.seed)?.outputs))
}
