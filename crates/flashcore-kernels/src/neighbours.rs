//! Configs near a config: where a search for a better one goes next.

use flashcore_ir::Arch;
use flashcore_problem::Problem;

use crate::config::{AmpereConfig, Config, QueryPlace, ScalarConfig};
use crate::hopper_config::{HopperConfig, WarpScheduler};
use crate::plan::Plan;
use crate::tile::Rescale;
use crate::{tuned, tuned_hopper};

/// Keys of a tile that are worth trying.
const KEY_ROWS: [u32; 6] = [16, 32, 48, 64, 96, 128];

impl Config {
    /// Where a search for the best config of a problem begins: the default, and the defaults of other problems that can run
    /// this one.
    pub fn starting_points(problem: &Problem, arch: Arch, num_sms: u32) -> Vec<Self> {
        let default = Self::tuned(problem, arch, num_sms);
        let ampere = tuned::ALL.into_iter().filter(|config| config.num_splits == 1).map(Self::Ampere);
        let others = ampere.chain(tuned_hopper::ALL.map(Self::Hopper)).filter(|config| *config != default);
        let mut points: Vec<_> = [default].into_iter().chain(others).collect();
        points.retain(|config| Plan::new(problem, *config, arch).is_ok());
        points
    }

    /// The configs that differ in one choice, or in two that belong together, and can run the problem.
    pub fn neighbours(self, problem: &Problem, arch: Arch) -> Vec<Self> {
        let mut configs = match self {
            Self::Scalar(ScalarConfig { threads }) => {
                [threads / 2, threads.saturating_mul(2)].map(|threads| Self::Scalar(ScalarConfig { threads })).to_vec()
            }
            Self::Ladder(_) => Vec::new(),
            Self::Ampere(config) => config.neighbours().into_iter().map(Self::Ampere).collect(),
            Self::Hopper(config) => config.neighbours().into_iter().map(Self::Hopper).collect(),
        };
        configs.retain(|config| Plan::new(problem, *config, arch).is_ok());
        configs
    }
}

/// Every time at which the output can be rescaled.
const RESCALES: [Rescale; 3] = [Rescale::Always, Rescale::IfChanged, Rescale::Threshold];

impl HopperConfig {
    fn neighbours(self) -> Vec<Self> {
        let mut configs = vec![
            Self { overlap_rescale: !self.overlap_rescale, ..self },
            Self { exponential: self.exponential.other(), ..self },
            Self { persistent: !self.persistent, ..self },
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
    fn neighbours(self) -> Vec<Self> {
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
        let place = KEY_ROWS.iter().position(|keys| *keys >= self.tile_n).unwrap_or(0);
        for tile_n in KEY_ROWS.iter().skip(place.saturating_sub(1)).take(3) {
            configs.push(Self { tile_n: *tile_n, ..self });
        }
        configs.retain(|config| *config != self);
        configs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_problem::DType;

    #[test]
    fn every_neighbour_can_run_and_is_another() {
        for (heads, key_heads, queries, keys, dim) in
            [(8, 8, 512, 512, 64), (32, 8, 1, 4096, 128), (4, 4, 100, 100, 256)]
        {
            let mut problem = Problem::new(1, heads, queries, dim, DType::F16);
            (problem.key_heads, problem.key_length) = (key_heads, keys);
            let points = Config::starting_points(&problem, Arch::Sm90, 132);
            assert_eq!(points[0], Config::tuned(&problem, Arch::Sm90, 132));
            let neighbours = points[0].neighbours(&problem, Arch::Sm90);
            assert!(neighbours.len() >= 6, "{neighbours:?}");
            for config in neighbours {
                assert_ne!(config, points[0]);
                assert!(Plan::new(&problem, config, Arch::Sm90).is_ok(), "{config}");
            }
        }
        let problem = Problem::new(1, 1, 64, 64, DType::F32);
        let names: Vec<_> = Config::scalar().neighbours(&problem, Arch::Sm80).iter().map(Config::to_string).collect();
        assert_eq!(names, ["scalar-32", "scalar-128"]);
    }
}
