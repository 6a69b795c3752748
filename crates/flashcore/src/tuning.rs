//! What was measured to be best on this machine, and for which problems that holds.

use std::collections::HashMap;

use flashcore_cuda::Context;
use flashcore_cuda::cache::KernelCache;
use flashcore_cuda::tuning::TuningStore;
use flashcore_kernels::{Config, Specialization};
use flashcore_problem::Problem;

/// Turns what was measured off where it is `off`.
pub(crate) const TUNING_VARIABLE: &str = "FLASHCORE_TUNING";

/// The class of a problem: what its kernel is compiled for, and its sizes up to the next power of two. Problems of one class
/// share what `flashcore tune` measured for one of them.
pub fn problem_class(problem: &Problem) -> String {
    let Specialization { dtype, head_dim, value_dim, left, right, width, .. } = Specialization::of(problem);
    let features = [
        (left, "left"),
        (right, "right"),
        (problem.seqused_k, "lengths"),
        (problem.softcap.is_some(), "softcap"),
        (problem.alibi, "alibi"),
        (problem.bias, "bias"),
        (problem.sinks, "sinks"),
        (problem.scale <= 0.0, "scaled"),
        (problem.lse, "lse"),
    ];
    let features: String =
        features.into_iter().filter(|(is_on, _)| *is_on).flat_map(|(_, feature)| [" ", feature]).collect();
    let size = |size: usize| size.checked_next_power_of_two().unwrap_or(usize::MAX);
    let (queries, keys) = (size(problem.query_length), size(problem.key_length));
    let heads = size(problem.batch.saturating_mul(problem.query_heads));
    let group = problem.query_heads.checked_div(problem.key_heads).unwrap_or(0);
    format!("{dtype} d{head_dim}x{value_dim} w{width}{features} heads{heads}/{group} q{queries} k{keys}")
}

/// How a device and its driver are called where measurements are kept.
pub fn machine(context: &Context) -> (String, String) {
    let device = context.device();
    let (major, minor) = device.compute;
    let name = format!("{} {major}.{minor} with {} SMs", device.name, device.attributes.num_sms);
    (name, device.driver().fingerprint())
}

/// The configs that were measured to be best on a device, by the class of their problems.
#[derive(Debug, Default)]
pub(crate) struct Measured(HashMap<String, Config>);

impl Measured {
    /// Those that are remembered. What cannot be read is as if it were not there: it only makes kernels faster.
    pub(crate) fn load(cache: &KernelCache, context: &Context) -> Self {
        if std::env::var(TUNING_VARIABLE).is_ok_and(|value| value == "off") {
            return Self::default();
        }
        let (device, driver) = machine(context);
        let configs = TuningStore::of(cache).and_then(|store| store.configs(&device, &driver)).unwrap_or_default();
        let known = configs.into_iter().filter_map(|(class, config)| Some((class, config.parse().ok()?)));
        Self(known.collect())
    }

    /// The config for a problem, if one of its class was measured.
    pub(crate) fn config(&self, problem: &Problem) -> Option<Config> {
        // Most have none, and naming a class takes longer than that.
        if self.0.is_empty() { None } else { self.0.get(&problem_class(problem)).copied() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_problem::{Alignment, DType, Mask};

    #[test]
    fn a_class_has_what_is_compiled_in_and_sizes() {
        let mut problem = Problem::new(2, 16, 1000, 64, DType::F16);
        assert_eq!(problem_class(&problem), "f16 d64x64 w16 heads32/1 q1024 k1024");
        problem.query_length = 513;
        assert_eq!(problem_class(&problem), "f16 d64x64 w16 heads32/1 q1024 k1024");
        (problem.query_length, problem.key_length, problem.key_heads) = (1, 5000, 4);
        (problem.mask, problem.lse) = (Mask::Causal(Alignment::TopLeft), true);
        assert_eq!(problem_class(&problem), "f16 d64x64 w16 right lse heads32/4 q1 k8192");
        problem.key_heads = 0;
        assert_eq!(problem_class(&problem), "f16 d64x64 w16 right lse heads32/0 q1 k8192");
    }

    #[test]
    fn a_measured_config_is_found_by_class() {
        let problem = Problem::new(1, 8, 512, 64, DType::F16);
        let config = Config::scalar();
        let measured = Measured(HashMap::from([(problem_class(&problem), config)]));
        assert_eq!(measured.config(&problem), Some(config));
        assert_eq!(measured.config(&Problem::new(1, 8, 100, 64, DType::F16)), None);
        assert_eq!(Measured::default().config(&problem), None);
    }
}
