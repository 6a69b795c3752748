//! Configs that a search can reach: every two values of every two of its choices that go together.
//!
//! `tune` goes from config to config, one choice at a time, and ends at some that no list has. What it can change is
//! listed here, with the values at both ends of a choice and some between.

use flashcore_kernels::{AmpereConfig, Config, Exponential, HopperConfig, QueryPlace, Rescale, WarpScheduler};
use flashcore_problem::{Alignment, Mask, Problem};

use super::covering::{Setting, covering_rows};
use super::{DTYPES, Kernels, Runner};
use crate::testkit::{Backend, Case};

/// Seed of the design.
const SEED: u64 = 0xc0f1;

const WARPGROUPS: [u32; 4] = [1, 2, 3, 4];
const SHARES: [u32; 3] = [1, 2, 4];
const HOPPER_KEYS: [u32; 6] = [16, 48, 64, 80, 128, 176];
const HOPPER_STAGES: [u32; 5] = [2, 3, 4, 5, 8];
const RESCALES: [Rescale; 3] = [Rescale::Always, Rescale::IfChanged, Rescale::Threshold];
const EXPONENTIALS: [Exponential; 2] = [Exponential::Unit, Exponential::Shared];
const WARP_SCHEDULERS: [WarpScheduler; 3] = [WarpScheduler::Free, WarpScheduler::PingPong, WarpScheduler::ExclusiveExp];

const WARPS: [u32; 3] = [2, 4, 8];
const ROWS_PER_WARP: [u32; 2] = [16, 32];
const AMPERE_KEYS: [u32; 6] = [16, 32, 48, 64, 96, 128];
const AMPERE_STAGES: [u32; 4] = [1, 2, 3, 5];
const QUERY_PLACES: [QueryPlace; 2] = [QueryPlace::Registers, QueryPlace::Shared];
const NUM_SPLITS: [u32; 3] = [1, 2, 4];
const PACK_GQA: [bool; 2] = [false, true];

/// Every two choices of a search that go together, on small problems with several tiles, tails and groups of heads.
pub fn configs(runner: Runner) -> Vec<Case> {
    let configs = match runner {
        Runner::Sim(Kernels::Only(config)) | Runner::Cuda(Kernels::Only(config)) => vec![config],
        Runner::Sim(Kernels::All) | Runner::Cuda(Kernels::All) => hopper().into_iter().chain(ampere()).collect(),
        Runner::Cpu(_) => Vec::new(),
    };
    let case = |(number, config): (usize, Config)| {
        let backend = match runner {
            Runner::Cuda(_) => Backend::Cuda(config),
            Runner::Sim(_) | Runner::Cpu(_) => Backend::Sim(config),
        };
        Case::new(problem(number), number as u64, backend)
    };
    configs.into_iter().enumerate().map(case).collect()
}

fn problem(number: usize) -> Problem {
    let mut problem = Problem::new(1, 4, 97, 32, DTYPES[number % 2]);
    (problem.key_heads, problem.key_length, problem.lse) = (2, 331, true);
    problem.mask = [Mask::None, Mask::Causal(Alignment::BottomRight)][number / 2 % 2];
    problem
}

/// The choices of the Hopper kernel, in the order of their rows.
enum HopperChoice {
    Warpgroups,
    KvSplitWarpgroups,
    Cluster,
    TileN,
    Stages,
    Rescale,
    OverlapRescale,
    Exponential,
    WarpScheduler,
    Pdl,
    Persistent,
}

fn hopper() -> Vec<Config> {
    use HopperChoice as Choice;
    let sizes = [
        WARPGROUPS.len(),
        SHARES.len(),
        SHARES.len(),
        HOPPER_KEYS.len(),
        HOPPER_STAGES.len(),
        RESCALES.len(),
        2,
        EXPONENTIALS.len(),
        WARP_SCHEDULERS.len(),
        2,
        2,
    ];
    let excludes = |(first, x): Setting, (second, y): Setting| {
        let is = |choice: Choice, other: Choice| first == choice as usize && second == other as usize;
        if is(Choice::Warpgroups, Choice::KvSplitWarpgroups) {
            !WARPGROUPS[x].is_multiple_of(SHARES[y])
        } else if is(Choice::Warpgroups, Choice::TileN) {
            // Registers.
            HOPPER_KEYS[y] > [176, 176, 128, 80][x]
        } else if is(Choice::TileN, Choice::Stages) {
            // Shared memory.
            HOPPER_KEYS[x] * HOPPER_STAGES[y] > 640
        } else if is(Choice::KvSplitWarpgroups, Choice::TileN) {
            // With as many stages as such groups need, longer tiles do not fit.
            HOPPER_KEYS[y] > [176, 128, 64][x]
        } else if is(Choice::KvSplitWarpgroups, Choice::Stages) {
            SHARES[x] > 1 && !HOPPER_STAGES[y].is_multiple_of(2 * SHARES[x])
        } else if is(Choice::KvSplitWarpgroups, Choice::WarpScheduler) || is(Choice::Cluster, Choice::WarpScheduler) {
            SHARES[x] > 1 && WARP_SCHEDULERS[y] != WarpScheduler::Free
        } else if is(Choice::KvSplitWarpgroups, Choice::Persistent) || is(Choice::Cluster, Choice::Persistent) {
            SHARES[x] > 1 && y == 1
        } else {
            false
        }
    };
    let config = |row: Vec<usize>| {
        let at = |choice: Choice| row[choice as usize];
        let tile_n = HOPPER_KEYS[at(Choice::TileN)];
        let can_chunk = SHARES[at(Choice::Cluster)] == 1 && at(Choice::Persistent) == 0;
        Config::from(HopperConfig {
            warpgroups: WARPGROUPS[at(Choice::Warpgroups)],
            kv_split_warpgroups: SHARES[at(Choice::KvSplitWarpgroups)],
            cluster: SHARES[at(Choice::Cluster)],
            tile_n: HOPPER_KEYS[at(Choice::TileN)],
            stages: HOPPER_STAGES[at(Choice::Stages)],
            rescale: RESCALES[at(Choice::Rescale)],
            overlap_rescale: at(Choice::OverlapRescale) == 1,
            exponential: EXPONENTIALS[at(Choice::Exponential)],
            warp_scheduler: WARP_SCHEDULERS[at(Choice::WarpScheduler)],
            pdl: at(Choice::Pdl) == 1,
            persistent: at(Choice::Persistent) == 1,
            dynamic: false,
            chunk_keys: if can_chunk && at(Choice::Pdl) == 1 { 2 * tile_n } else { 0 },
            pack_gqa: at(Choice::Persistent) == 0 && at(Choice::OverlapRescale) == 1,
            one_level: false,
        })
    };
    covering_rows(&sizes, excludes, 0, SEED).into_iter().map(config).collect()
}

/// The choices of the Ampere kernel, in the order of their rows.
enum AmpereChoice {
    Warps,
    RowsPerWarp,
    TileN,
    KvSplitWarps,
    Stages,
    Query,
    Rescale,
    Exponential,
    NumSplits,
    PackGqa,
}

fn ampere() -> Vec<Config> {
    use AmpereChoice as Choice;
    let sizes = [
        WARPS.len(),
        ROWS_PER_WARP.len(),
        AMPERE_KEYS.len(),
        SHARES.len(),
        AMPERE_STAGES.len(),
        QUERY_PLACES.len(),
        RESCALES.len(),
        EXPONENTIALS.len(),
        NUM_SPLITS.len(),
        PACK_GQA.len(),
    ];
    let excludes = |(first, x): Setting, (second, y): Setting| {
        let is = |choice: Choice, other: Choice| first == choice as usize && second == other as usize;
        if is(Choice::Warps, Choice::KvSplitWarps) {
            SHARES[y] > WARPS[x]
        } else if is(Choice::TileN, Choice::KvSplitWarps) {
            !AMPERE_KEYS[x].is_multiple_of(16 * SHARES[y])
        } else {
            false
        }
    };
    let config = |row: Vec<usize>| {
        let at = |choice: Choice| row[choice as usize];
        Config::from(AmpereConfig {
            warps: WARPS[at(Choice::Warps)],
            rows_per_warp: ROWS_PER_WARP[at(Choice::RowsPerWarp)],
            tile_n: AMPERE_KEYS[at(Choice::TileN)],
            kv_split_warps: SHARES[at(Choice::KvSplitWarps)],
            stages: AMPERE_STAGES[at(Choice::Stages)],
            query: QUERY_PLACES[at(Choice::Query)],
            rescale: RESCALES[at(Choice::Rescale)],
            exponential: EXPONENTIALS[at(Choice::Exponential)],
            num_splits: NUM_SPLITS[at(Choice::NumSplits)],
            cluster: NUM_SPLITS[at(Choice::NumSplits)] == 4,
            pack_gqa: PACK_GQA[at(Choice::PackGqa)],
            ..AmpereConfig::default()
        })
    };
    covering_rows(&sizes, excludes, 0, SEED).into_iter().map(config).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::suites::takes;
    use crate::testkit::verify::SIMULATED_ARCH;
    use flashcore_kernels::heuristics::search_space;

    #[test]
    fn every_config_of_the_design_can_be_run_and_named() {
        let cases = configs(Runner::Sim(Kernels::All));
        for case in &cases {
            assert!(takes(case.backend, &case.problem), "{case}");
            let Backend::Sim(config) = case.backend else { panic!("{case}") };
            assert_eq!(config.to_string().parse::<Config>().ok(), Some(config), "{config}");
        }
        assert!((60..130).contains(&cases.len()), "{}", cases.len());
        let clusters_alone = |case: &&Case| {
            case.backend
                .config()
                .and_then(|config| HopperConfig::try_from(config).ok())
                .is_some_and(|config| config.cluster > 1 && config.kv_split_warpgroups == 1)
        };
        assert!(cases.iter().filter(clusters_alone).count() >= 5);
    }

    /// Every choice that a search can change is a choice of the design: a search that learns to change another fails
    /// this.
    #[test]
    fn a_search_changes_no_other_choice() {
        for number in 0..2 {
            let problem = problem(2 * number);
            for start in [Config::hopper(), Config::ampere()] {
                for config in search_space(start, &problem, SIMULATED_ARCH) {
                    match (AmpereConfig::try_from(start), AmpereConfig::try_from(config)) {
                        (Ok(start), Ok(config)) => {
                            let AmpereConfig { layout, load_bytes, accumulation, producers, persistent, l2, .. } =
                                start;
                            let same =
                                AmpereConfig { layout, load_bytes, accumulation, producers, persistent, l2, ..config };
                            assert_eq!(same, config);
                        }
                        _ => assert_eq!(start.family(), config.family()),
                    }
                }
            }
        }
    }
}
