//! Tuning results: the configs that were measured to be best on this machine, by class of problem.

use std::collections::HashMap;

use flashcore_cuda::Context;
use flashcore_cuda::cache::KernelCache;
use flashcore_cuda::tuning::TuningStore;
use flashcore_kernels::{Config, Specialization};
use flashcore_problem::Problem;

/// Environment variable that switches tuning results off with `off`.
pub(crate) const TUNING_VARIABLE: &str = "FLASHCORE_TUNING";

/// The class of a problem: everything that its kernel is compiled for but the texts of `score_mod` and `mask_mod`, and its
/// sizes up to the next power of two. Problems of one class share what `flashcore tune` measured for one of them.
pub fn problem_class(problem: &Problem) -> String {
    let specialization = Specialization::of(problem);
    let Specialization { dtype, head_dim, value_dim, vec_bytes, .. } = specialization;
    let features: String = specialization.features().flat_map(|feature| [" ", feature]).collect();
    let size = |size: usize| size.checked_next_power_of_two().unwrap_or(usize::MAX);
    let (queries, keys) = (size(problem.query_length), size(problem.key_length));
    let heads = size(problem.batch.saturating_mul(problem.query_heads));
    let group = problem.query_heads.checked_div(problem.key_heads).unwrap_or(0);
    format!("{dtype} d{head_dim}x{value_dim} w{vec_bytes}{features} heads{heads}/{group} q{queries} k{keys}")
}

/// Names of a device and its driver under which measurements are kept.
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
    /// The results on disk. A file that cannot be read counts as empty: results only make kernels faster.
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
    use flashcore_problem::{Alignment, DType, Mask, MaskMod, ScoreMod};

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

    /// Whatever changes the kernel changes the class.
    #[test]
    fn a_class_tells_features_apart() {
        let features: [fn(&mut Problem); 9] = [
            |_| {},
            |problem| problem.lse = true,
            |problem| problem.seqused_k = true,
            |problem| problem.softcap = Some(3.0),
            |problem| problem.alibi = true,
            |problem| problem.bias = true,
            |problem| problem.sinks = true,
            |problem| problem.mask_mod = Some(MaskMod::new("earlier", |at| at.query.at_least(at.key))),
            |problem| problem.score_mod = Some(ScoreMod::new("twice", |score, _| score * 2.0)),
        ];
        let classes: Vec<_> = features
            .iter()
            .map(|change| {
                let mut problem = Problem::new(1, 8, 512, 64, DType::F16);
                change(&mut problem);
                problem_class(&problem)
            })
            .collect();
        for (index, class) in classes.iter().enumerate() {
            assert!(!classes[..index].contains(class), "{class}");
        }
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
