//! Cases of GPU kernels over every feature they have: a pairwise design, and random ones.

use flashcore_cpu::Level;
use flashcore_kernels::{Config, HopperConfig, Specialization, heuristics};
use flashcore_problem::{DType, Problem, SplitMix64, Stress};

use super::cpu_features::{random_features, shrink};
use super::design::{Design, Feature, Row};
use super::features::{Features, LayoutForm};
use super::float8::{self, Float8Cache};
use super::{Kernels, Runner, kernel_option, takes};
use crate::testkit::verify::H200;
use crate::testkit::{Backend, BiasForm, Case, Numbers, Planted};

/// Cases of the pairwise design, at least.
const COVERING_CASES: usize = 560;
/// Every so many of them there is another with plain scores.
const PLAIN_STEP: usize = 16;
/// Every so many of them there is another with keys and values of 8 bits, if its kernels have those.
const FLOAT8_STEP: usize = 4;
/// Seed of the design.
const COVERING_SEED: u64 = 0x69c0;
/// Multiplications of a random case: what the simulator does in a fraction of a second.
const MOST_WORK: usize = 1_500_000;

const HEAD_DIMS: [usize; 12] = [8, 16, 24, 32, 40, 64, 80, 96, 128, 136, 192, 256];
/// The first four: the head dimension itself.
const VALUE_DIMS: [usize; 9] = [0, 0, 0, 0, 8, 48, 64, 128, 256];
const HEADS: [(usize, usize); 8] = [(1, 1), (2, 2), (4, 2), (3, 1), (8, 1), (6, 2), (14, 2), (24, 2)];
const BATCHES: [usize; 4] = [1, 2, 3, 5];
/// The most scores of one head, where there are more heads than this.
const MANY_HEADS: (usize, usize) = (8, 7_000);
/// The most scores of one head where there are more batches than this, and the most heads there.
const MANY_BATCHES: (usize, usize, usize) = (3, 17_000, 7);
const LENGTHS: [(usize, usize); 12] = [
    (1, 1),
    (1, 300),
    (7, 131),
    (33, 203),
    (65, 389),
    (97, 203),
    (130, 257),
    (203, 97),
    (63, 63),
    (128, 128),
    (161, 161),
    (5, 0),
];
pub(super) const DTYPES: [DType; 5] = [DType::F16, DType::Bf16, DType::F16, DType::Bf16, DType::F32];
/// Numbers with which tensor cores, which flush subnormals, compute like the oracle. Keys that no row attends hold NaN
/// and infinities in some; a NaN that some rows of a tile attend and others do not is not among them.
const NUMBERS: [Numbers; 21] = [
    Numbers::Normal,
    Numbers::Normal,
    Numbers::Normal,
    Numbers::Normal,
    Numbers::Normal,
    Numbers::Normal,
    Numbers::Normal,
    Numbers::Normal,
    Numbers::Stress(Stress::LargeScores),
    Numbers::Stress(Stress::OneHot),
    Numbers::Stress(Stress::Constant),
    Numbers::Stress(Stress::SmallIntegers),
    Numbers::Stress(Stress::Rising),
    Numbers::Stress(Stress::Falling),
    Numbers::Stress(Stress::SpikeFirst),
    Numbers::Stress(Stress::SpikeLast),
    Numbers::Stress(Stress::OneKey),
    Numbers::Stress(Stress::ZerosAndSubnormals),
    Numbers::Planted(Planted::MinusInfiniteBias),
    Numbers::Planted(Planted::ExtremeSinks),
    Numbers::Planted(Planted::Unattended),
];

const BIASES: [Option<BiasForm>; 11] = [
    None,
    None,
    None,
    Some(BiasForm::PerHead),
    Some(BiasForm::PerBatchAndHead),
    Some(BiasForm::PerKey),
    Some(BiasForm::Padded),
    Some(BiasForm::KeyMajor),
    Some(BiasForm::PerRowAndKey),
    Some(BiasForm::PerRow),
    Some(BiasForm::Single),
];

/// A pairwise design: every two values of every two features meet in a case. Kernels take turns.
pub(super) fn covering(runner: Runner) -> Vec<Case> {
    let design = Design {
        head_dims: &HEAD_DIMS,
        value_dims: &VALUE_DIMS,
        heads: &HEADS,
        batches: &BATCHES,
        lengths: &LENGTHS,
        dtypes: &DTYPES,
        biases: BIASES.to_vec(),
        numbers: NUMBERS.to_vec(),
    };
    let scores = |lengths: usize| LENGTHS[lengths].0 * LENGTHS[lengths].1;
    let excludes = |(first, x): (Feature, usize), (second, y): (Feature, usize)| match (first, second) {
        (Feature::Heads, Feature::Lengths) => HEADS[x].0 > MANY_HEADS.0 && scores(y) > MANY_HEADS.1,
        (Feature::Batch, Feature::Lengths) => BATCHES[x] > MANY_BATCHES.0 && scores(y) > MANY_BATCHES.1,
        (Feature::Heads, Feature::Batch) => BATCHES[y] > MANY_BATCHES.0 && HEADS[x].0 > MANY_BATCHES.2,
        _ => false,
    };
    let mut rows = design.rows(excludes, COVERING_CASES, COVERING_SEED);
    // Configs that pack heads take problems in which nothing is done to scores, and few of the design are.
    let plain: Vec<_> = rows.iter().step_by(PLAIN_STEP).cloned().collect();
    rows.extend(plain.into_iter().map(|mut row| {
        for feature in [Feature::Alibi, Feature::Sinks, Feature::Bias, Feature::Expressions, Feature::Numbers] {
            row[feature as usize] = 0;
        }
        row[Feature::Expressions as usize + 1..].fill(0);
        row
    }));
    let first_float8 = rows.len();
    // The config that had the fewest cases so far comes first: some take few.
    let mut configs: Vec<(usize, Config)> =
        Config::all().into_iter().chain(Config::f32()).map(|config| (0, config)).collect();
    let case = |(index, row): (usize, Row)| {
        let (backend, kernels) = named(runner);
        let option = kernel_option(kernels);
        let command = format!("flashcore verify --backend {backend}{option} --suite features --only {index}");
        let order: Vec<Config> = configs.iter().map(|(_, config)| *config).collect();
        let mut features = design.features(&row);
        let float8 = if index < first_float8 { None } else { float8_cache(&mut features, kernels, index as u64) };
        let case = case((features, float8), runner, index as u64, &order, command);
        if let Some(position) = configs.iter().position(|(_, config)| case.backend.config() == Some(*config)) {
            configs[position].0 += 1;
            configs.sort_by_key(|(count, _)| *count);
        }
        case
    };
    // The designs of kernels that have keys and values of 8 bits come last.
    let float8 = rows.iter().step_by(FLOAT8_STEP).cloned();
    rows = rows.iter().cloned().chain(float8).collect();
    rows.into_iter().enumerate().map(case).collect()
}

/// Random problems that follow each other and have one kernel: a GPU compiles it once, and runs them in less time.
const CASES_PER_KERNEL: u64 = 8;
/// Keeps the sizes of a problem apart from what its kernel is compiled for.
const SIZES: u64 = 1;

/// A random problem over every feature that kernels have. What is compiled in follows from the number of its kernel, sizes
/// and contents from its own.
pub(super) fn fuzz_case(runner: Runner, number: u64, stream: u64) -> Case {
    let kernel = number / CASES_PER_KERNEL;
    let mut random = SplitMix64::stream(kernel, stream);
    let mut features = random_features(&mut random);
    features.dtype = DTYPES[random.below(DTYPES.len())];
    if !NUMBERS.contains(&features.numbers) {
        features.numbers = Numbers::Normal;
    }
    let sizes = random_features(&mut SplitMix64::stream(number, stream ^ SIZES << 32));
    (features.batch, features.heads, features.lengths) = (sizes.batch, sizes.heads, sizes.lengths);
    if features.layout == LayoutForm::PackedQkv {
        features.lengths.0 = features.lengths.1.min(LONGEST_PACKED);
        features.lengths.1 = features.lengths.0;
    }
    let (backend, kernels) = named(runner);
    features.dtype = kernels.dtype(features.dtype);
    let float8 = float8_cache(&mut features, kernels, kernel);
    shrink(&mut features, MOST_WORK);
    let option = kernel_option(kernels);
    let command = format!("flashcore verify --backend {backend}{option} --fuzz 1 --seed {number}");
    let mut order: Vec<_> = Config::all().into_iter().chain(Config::f32()).collect();
    let turn = kernel as usize % order.len();
    order.rotate_left(turn);
    let case = case((features, float8), runner, number, &order, command);
    float8::with_query(case, kernels, kernel, number)
}

/// The cache of 8 bits that the kernel of a number has, if it has one; the layout is then such that kernels take it.
fn float8_cache(features: &mut Features, kernels: Kernels, kernel: u64) -> Option<Float8Cache> {
    let float8 = Float8Cache::random(kernels, features.dtype, kernel)?;
    if !matches!(features.layout, LayoutForm::Bhsd | LayoutForm::HeadsOutermost) {
        features.layout = LayoutForm::Bshd;
    }
    Some(float8)
}

/// The problem of some features, with a cache of 8 bits where there is one.
fn problem((features, float8): (&Features, Option<Float8Cache>)) -> Problem {
    let mut problem = features.problem();
    if let Some(float8) = float8 {
        float8.give(&mut problem);
    }
    problem
}

/// Queries and keys where there are as many of both: none can be taken away alone.
const LONGEST_PACKED: usize = 465;

pub(super) fn named(runner: Runner) -> (&'static str, Kernels) {
    match runner {
        Runner::Sim(kernels) => ("sim", kernels),
        Runner::Cuda(kernels) => ("cuda", kernels),
        Runner::Cpu(_) => ("cpu", Kernels::All),
    }
}

/// The case with the first of the configs that takes it; with the default where none does.
fn case(
    (mut features, float8): (Features, Option<Float8Cache>),
    runner: Runner,
    number: u64,
    order: &[Config],
    command: String,
) -> Case {
    let round = |dim: usize| dim.next_multiple_of(8).min(256);
    features.dims = (round(features.dims.0), round(features.dims.1));
    if float8.is_some() {
        features.dims = Float8Cache::dims(features.dims);
    }
    let kernels = named(runner).1;
    features.dtype = kernels.dtype(features.dtype);
    if matches!(kernels, Kernels::Only(config) if HopperConfig::try_from(config).is_ok())
        && Specialization::of(&features.problem()).vec_bytes < 16
    {
        // Rows that TMA cannot address.
        features.layout = LayoutForm::Bshd;
    }
    let config = match kernels {
        Kernels::Only(config) => of_family(config, &mut features, float8),
        Kernels::All => {
            let problem = problem((&features, float8));
            let fitting = order.iter().copied().find(|config| takes(Backend::Sim(*config), &problem));
            fitting.unwrap_or_else(|| heuristics::select(&problem, H200))
        }
    };
    let backend = match runner {
        Runner::Sim(_) => Backend::Sim(config),
        Runner::Cuda(_) | Runner::Cpu(_) => Backend::Cuda(config),
    };
    let problem = problem((&features, float8));
    Case { problem, backend, ..features.case(number, Level::Portable, command) }
}

/// The config, or another of its family where its tiles do not fit; where those of none do, the heads get narrower.
fn of_family(config: Config, features: &mut Features, float8: Option<Float8Cache>) -> Config {
    const WIDTHS: [usize; 4] = [256, 192, 128, 64];
    let family = Config::all()
        .into_iter()
        .chain(Config::f32())
        .filter(|other| other.family() == config.family() && other.accuracy() == config.accuracy());
    let configs: Vec<Config> = [config].into_iter().chain(family).collect();
    for width in WIDTHS {
        features.dims = (features.dims.0.min(width), features.dims.1.min(width));
        let problem = problem((features, float8));
        if let Some(fitting) = configs.iter().find(|config| takes(Backend::Sim(**config), &problem)) {
            return *fitting;
        }
    }
    config
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::suites::FUZZ_STREAM;

    #[test]
    fn every_case_of_the_design_has_a_config_of_the_family_that_was_asked_for() {
        for config in [Config::scalar(), Config::ampere(), Config::hopper()] {
            let cases = covering(Runner::Sim(Kernels::Only(config)));
            assert!(cases.len() >= COVERING_CASES, "{}", cases.len());
            for case in cases {
                let Backend::Sim(taken) = case.backend else { panic!("{case}") };
                assert_eq!(taken.family(), config.family(), "{case}");
                assert!(case.problem.output_shape().is_empty() || takes(case.backend, &case.problem), "{case}");
            }
        }
    }

    /// Dims that a large problem has halved are those of a cache of 8 bits too: 148 is such a case.
    #[test]
    fn kernels_take_random_problems() {
        for case in (0..5000).map(|number| fuzz_case(Runner::Cuda(Kernels::All), number, FUZZ_STREAM)) {
            assert!(case.problem.output_shape().is_empty() || takes(case.backend, &case.problem), "{case}");
        }
    }

    #[test]
    fn cases_that_follow_each_other_share_a_kernel() {
        let specialization = |number| {
            let case = fuzz_case(Runner::Sim(Kernels::All), number, 7);
            let Backend::Sim(config) = case.backend else { panic!("{case}") };
            (case.problem.output_shape().is_empty(), config, config.specialization(&case.problem))
        };
        let (mut kernels, mut shared) = (Vec::new(), 0);
        for number in 0..400 {
            let (is_empty, config, specialization) = specialization(number);
            let kernel = (config, specialization);
            shared += usize::from(is_empty || kernels.contains(&kernel));
            kernels.push(kernel);
        }
        // Most of seven in eight; strides of a size of 1 and dims of large problems make the others.
        assert!(shared > 250, "{shared}");
    }

    #[test]
    fn the_design_is_large_and_meets_every_config() {
        let cases = covering(Runner::Sim(Kernels::All));
        assert!(cases.len() >= COVERING_CASES, "{}", cases.len());
        // Tiles come from a counter where sequences have query lengths, as in the suite `serving`.
        let is_here = |config: &Config| !HopperConfig::try_from(*config).is_ok_and(|hopper| hopper.dynamic);
        for config in Config::all().into_iter().filter(is_here) {
            let count = cases.iter().filter(|case| case.backend == Backend::Sim(config)).count();
            assert!(count >= 5, "{config} is in {count} cases");
        }
        for case in &cases {
            assert_eq!(case.problem.validate(), Ok(()), "{case}");
        }
    }
}
