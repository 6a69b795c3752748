//! Search space: the configs near a config, where a search for a better one goes next.

use flashcore_problem::{DType, Problem};

use super::select;
use crate::attention::sm80::heuristics as sm80;
use crate::attention::sm90::heuristics as sm90;
use crate::config::{AmpereConfig, Config, HopperConfig, QueryPlace, ScalarConfig, WarpScheduler};
use crate::launch_plan::LaunchPlan;
use crate::primitives::Rescale;
use crate::target::Target;

/// Keys of a tile that are worth trying.
const TILE_N: [u32; 6] = [16, 32, 48, 64, 96, 128];

/// Starting points of a search for the best config of a problem: the default, and the defaults of other problems that
/// can run this one.
pub fn starting_points(problem: &Problem, target: Target) -> Vec<Config> {
    let default = select(problem, target);
    let ampere = sm80::ALL.into_iter().filter(|config| config.num_splits == 1).map(Config::Ampere);
    let scalar = (problem.dtype == DType::F32).then(Config::scalar);
    let fp8 = sm80::ALL_FP8.into_iter().filter(|config| problem.dtype.is_float8() && config.chunk_keys == 0);
    let others = ampere.chain(fp8.map(Config::Ampere)).chain(sm90::ALL.map(Config::Hopper));
    let others = others.chain(scalar).filter(|config| *config != default);
    let mut points: Vec<_> = [default].into_iter().chain(others).collect();
    points.retain(|config| LaunchPlan::new(problem, *config, target).is_ok());
    points
}

/// The search space around a config: those that differ in one choice, or in two that belong together, and can run the
/// problem.
pub fn search_space(config: Config, problem: &Problem, target: impl Into<Target>) -> Vec<Config> {
    let target = target.into();
    let mut configs = match config {
        Config::Scalar(ScalarConfig { threads }) => {
            [threads / 2, threads.saturating_mul(2)].map(|threads| Config::Scalar(ScalarConfig { threads })).to_vec()
        }
        Config::Ladder(_) => Vec::new(),
        Config::Ampere(config) => config.near().into_iter().map(Config::Ampere).collect(),
        Config::Hopper(config) => config.near().into_iter().map(Config::Hopper).collect(),
    };
    if let Config::Ampere(config) = config
        && problem.dtypes().key_value.is_float8()
        && !problem.dtype.is_float8()
    {
        configs.push(Config::Ampere(AmpereConfig { fp8: config.fp8.other(), ..config }));
    }
    if let Some(keys) = config.chunk_keys() {
        // Chunks stay as long as they are, in whole blocks.
        let shorter = config.with_chunk_keys(keys / 2);
        configs = configs.into_iter().map(|config| config.with_chunk_keys(keys)).collect();
        configs.extend([shorter, config.with_chunk_keys(keys.saturating_mul(2))]);
        configs.retain(|near| *near != config);
    }
    configs.retain(|config| LaunchPlan::new(problem, *config, target).is_ok());
    configs
}

/// Every time at which the output can be rescaled.
const RESCALES: [Rescale; 3] = [Rescale::Always, Rescale::IfChanged, Rescale::Threshold];

impl HopperConfig {
    fn near(self) -> Vec<Self> {
        let mut configs = vec![
            Self { overlap_rescale: !self.overlap_rescale, ..self },
            Self { exponential: self.exponential.other(), ..self },
            Self { persistent: !self.persistent, dynamic: false, ..self },
            Self { dynamic: !self.dynamic, ..self },
            Self { cluster: self.cluster.saturating_mul(2), ..self },
            Self { cluster: self.cluster / 2, ..self },
            Self { warpgroups: self.warpgroups.saturating_add(1), ..self },
            Self { warpgroups: self.warpgroups.saturating_sub(1), ..self },
            Self { stages: self.stages.saturating_add(1), ..self },
            Self { stages: self.stages.saturating_sub(1), ..self },
            Self { tile_n: self.tile_n.saturating_add(16), ..self },
            Self { tile_n: self.tile_n.saturating_sub(16), ..self },
        ];
        configs.extend(RESCALES.map(|rescale| Self { rescale, ..self }));
        configs.extend(WarpScheduler::ALL.map(|warp_scheduler| Self { warp_scheduler, ..self }));
        configs.retain(|config| *config != self);
        configs
    }
}

impl AmpereConfig {
    fn near(self) -> Vec<Self> {
        let other_query = match self.query {
            QueryPlace::Registers => QueryPlace::Shared,
            QueryPlace::Shared => QueryPlace::Registers,
        };
        let mut configs = vec![
            Self { query: other_query, ..self },
            Self { exponential: self.exponential.other(), ..self },
            Self { pack_gqa: !self.pack_gqa, ..self },
            Self { rows_per_warp: 48 - self.rows_per_warp.min(32), ..self },
            Self { rows_per_warp: 48 - self.rows_per_warp.min(32), query: other_query, ..self },
            Self { stages: self.stages.saturating_add(1), ..self },
            Self { stages: self.stages.saturating_sub(1), ..self },
            Self { num_splits: self.num_splits.saturating_mul(2), ..self },
            Self { num_splits: (self.num_splits / 2).max(1), ..self },
        ];
        configs.extend(RESCALES.map(|rescale| Self { rescale, ..self }));
        for (warps, kv_split_warps) in [(2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (8, 2), (4, 4), (8, 4)] {
            configs.push(Self { warps, kv_split_warps, ..self });
        }
        let place = TILE_N.iter().position(|keys| *keys >= self.tile_n).unwrap_or(0);
        for tile_n in TILE_N.iter().skip(place.saturating_sub(1)).take(3) {
            configs.push(Self { tile_n: *tile_n, ..self });
        }
        configs.retain(|config| *config != self);
        configs
    }
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
