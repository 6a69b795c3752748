//! Search space: the configs near a config, where a search for a better one goes next.

use flashcore_problem::{DType, Problem};

use super::select;
use crate::attention::sm80::heuristics as sm80;
use crate::attention::sm90::heuristics as sm90;
use crate::config::Config;
use crate::launch_plan::LaunchPlan;
use crate::target::Target;

/// Starting points of a search for the best config of a problem: the default, and the defaults of other problems that
/// can run this one.
pub fn starting_points(problem: &Problem, target: Target) -> Vec<Config> {
    let default = select(problem, target);
    let ampere = sm80::ALL.into_iter().filter(|config| config.num_splits == 1).map(Config::from);
    let scalar = (problem.dtype == DType::F32).then(Config::scalar);
    let fp8 = sm80::ALL_FP8.into_iter().filter(|config| problem.dtype.is_float8() && config.chunk_keys == 0);
    let others = ampere.chain(fp8.map(Config::from)).chain(sm90::ALL.map(Config::from));
    let others = others.chain(scalar).filter(|config| *config != default);
    let mut points: Vec<_> = [default].into_iter().chain(others).collect();
    points.retain(|config| LaunchPlan::new(problem, *config, target).is_ok());
    points
}

/// The search space around a config: those that differ in one choice, or in two that belong together, and can run the
/// problem.
pub fn search_space(config: Config, problem: &Problem, target: impl Into<Target>) -> Vec<Config> {
    let target = target.into();
    let mut configs = config.near(problem);
    if let Some(keys) = config.chunk_keys() {
        // Chunks stay as long as they are, in whole blocks.
        let shorter = config.with_chunk_keys(keys / 2);
        configs = configs.into_iter().map(|config| config.with_chunk_keys(keys)).collect();
        configs.extend([shorter, config.with_chunk_keys(keys.saturating_mul(2))]);
    }
    configs.retain(|near| *near != config && LaunchPlan::new(problem, *near, target).is_ok());
    configs
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_ir::Arch;

    /// Every config that a search can reach runs the problem, is another, and is found again by its name.
    #[test]
    fn the_search_space_has_other_configs_with_names() {
        for (arch, heads, key_heads, queries, keys, dim) in [
            (Arch::Sm90, 8, 8, 512, 512, 64),
            (Arch::Sm90, 32, 8, 1, 4096, 128),
            (Arch::Sm90, 4, 4, 100, 100, 256),
            (Arch::Sm90a, 16, 16, 4096, 4096, 128),
            (Arch::Sm90a, 1, 1, 200, 2000, 64),
        ] {
            let mut problem = Problem::new(1, heads, queries, dim, DType::F16);
            (problem.key_heads, problem.key_length) = (key_heads, keys);
            let points = starting_points(&problem, Target::new(arch, 132));
            assert_eq!(points[0], select(&problem, Target::new(arch, 132)));
            for point in points {
                let space = search_space(point, &problem, arch);
                assert!(space.len() >= 6, "{space:?}");
                for config in space {
                    assert_ne!(config, point);
                    assert!(LaunchPlan::new(&problem, config, arch).is_ok(), "{config}");
                    assert_eq!(config.to_string().parse(), Ok(config));
                }
            }
        }
        let problem = Problem::new(1, 1, 64, 64, DType::F32);
        let cache = Problem::new(1, 8, 512, 64, DType::F16).with_kv_dtype(Some(DType::E4m3));
        let converts = |arch| {
            let space = search_space(Config::ampere(), &cache, arch);
            space.iter().filter(|config| config.to_string().ends_with("-cvt")).count()
        };
        assert_eq!([Arch::Sm80, Arch::Sm89].map(converts), [0, 1]);
        let names: Vec<_> =
            search_space(Config::scalar(), &problem, Arch::Sm80).iter().map(Config::to_string).collect();
        assert_eq!(names, ["scalar-32", "scalar-128"]);
    }
}
