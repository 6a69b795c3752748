//! Suites: lists of cases.
//!
//! Suites for GPU kernels hold what those have; the CPU has every feature, and its own lists in `cpu_features`.

mod configs;
mod counts;
mod covering;
mod cpu_features;
mod design;
mod features;
mod float8;
mod gpu_features;
pub(crate) mod huge;
mod kv_cache;
mod random_serving;
mod serving;
mod wrong_arrays;

use flashcore_cpu::Level;
use flashcore_kernels::{Accuracy, Config, HopperConfig};
use flashcore_problem::{Alignment, DType, Layout, Mask, Problem, Stress};

use crate::testkit::case::other_operands;
use crate::testkit::verify::{SIMULATED_ARCH, launch_plan};
use crate::testkit::{Backend, BiasForm, Case, Numbers, Planted};

pub use configs::configs;
pub use counts::{counts, merges};
pub use huge::{far_trials, huge};
pub use random_serving::fuzz_serving;
pub use serving::serving;
pub use wrong_arrays::wrong_arrays;

/// The element types that GPU kernels have.
const DTYPES: [DType; 2] = [DType::F16, DType::Bf16];
/// Sequences longer than this are left to the fast kernels.
const LONGEST_FOR_SCALAR: usize = 128;

/// A kernel family to restrict a suite to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernels {
    /// Each case with every kernel that suits it.
    All,
    /// One config.
    Only(Config),
}

/// Backend of a suite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Runner {
    /// The native CPU kernels, at a level.
    Cpu(Level),
    /// GPU kernels in the simulator.
    Sim(Kernels),
    /// GPU kernels on the first GPU.
    Cuda(Kernels),
}

impl Kernels {
    /// The type of a case's problem: `dtype`, or `f32` for the config that only has that, or `bf16` for those that lack it.
    fn dtype(self, dtype: DType) -> DType {
        match self {
            Self::Only(config) if config.accuracy() != Accuracy::Exact => DType::F32,
            Self::Only(config) if dtype == DType::F32 && !config.traits().dtypes.contains(&dtype) => DType::Bf16,
            Self::Only(_) | Self::All => dtype,
        }
    }
}

impl Runner {
    /// The type of a case's problem, see [`Kernels`].
    fn dtype(self, dtype: DType) -> DType {
        match self {
            Self::Cpu(_) => dtype,
            Self::Sim(kernels) | Self::Cuda(kernels) => kernels.dtype(dtype),
        }
    }

    /// The backends for a problem of some length.
    fn backends(self, length: usize) -> Vec<Backend> {
        let configs = |kernels| match kernels {
            Kernels::Only(config) => vec![config],
            Kernels::All if length <= LONGEST_FOR_SCALAR => {
                vec![Config::scalar(), Config::ampere(), Config::hopper()]
            }
            Kernels::All => vec![Config::ampere(), Config::hopper()],
        };
        match self {
            Self::Cpu(level) => vec![Backend::Cpu(level)],
            Self::Sim(kernels) => configs(kernels).into_iter().map(Backend::Sim).collect(),
            Self::Cuda(kernels) => configs(kernels).into_iter().map(Backend::Cuda).collect(),
        }
    }

    /// Every config, for the suites that go through all of them.
    fn every_backend(self) -> Vec<Backend> {
        match self {
            Self::Sim(Kernels::All) => Config::all().into_iter().map(Backend::Sim).collect(),
            Self::Cuda(Kernels::All) => Config::all().into_iter().map(Backend::Cuda).collect(),
            Self::Cpu(_) | Self::Sim(Kernels::Only(_)) | Self::Cuda(Kernels::Only(_)) => self.backends(0),
        }
    }
}

/// The shapes of the project's history, three seeds each, with a ragged one and a grouped one.
pub fn seeds(runner: Runner) -> Vec<Case> {
    let shapes = [[1, 2, 64, 64], [1, 4, 128, 64], [2, 2, 64, 64], [1, 8, 512, 64], [2, 8, 256, 64]];
    let mut problems: Vec<(Problem, bool)> = shapes
        .into_iter()
        .map(|[batch, heads, length, dim]| {
            (Problem::new(batch, heads, length, dim, DType::F16), length <= LONGEST_FOR_SCALAR)
        })
        .collect();
    let mut ragged = Problem::new(1, 2, 97, 64, DType::F16);
    ragged.key_length = 203;
    let mut grouped = Problem::new(1, 8, 97, 64, DType::F16);
    grouped.key_heads = 2;
    grouped.key_length = 203;
    problems.push((ragged, true));
    problems.push((grouped, true));
    let mut cases = Vec::new();
    for (problem, small) in problems {
        for mask in [Mask::None, Mask::Causal(Alignment::BottomRight)] {
            for dtype in DTYPES {
                for seed in 0..3 {
                    let mut problem = problem.clone();
                    (problem.mask, problem.dtype, problem.lse) = (mask, runner.dtype(dtype), true);
                    let length = if small { 0 } else { problem.query_length };
                    let backends = runner.backends(length);
                    cases.extend(backends.into_iter().map(|backend| Case::new(problem.clone(), seed, backend)));
                }
            }
        }
    }
    cases
}

/// Every head dimension, both alignments, lengths around the tiles, rows that attend nothing, other layouts, groups of
/// heads, several batches and every form of bias.
pub fn edge(runner: Runner) -> Vec<Case> {
    let lengths = [(1, 1), (1, 203), (63, 65), (64, 64), (65, 63), (97, 203), (203, 97), (130, 257), (5, 0)];
    let masks = [Mask::None, Mask::Causal(Alignment::BottomRight), Mask::Causal(Alignment::TopLeft)];
    let mut cases = Vec::new();
    for (number, (dim, (query_length, key_length))) in
        [32, 64, 96, 128].into_iter().flat_map(|dim| lengths.map(|lengths| (dim, lengths))).enumerate()
    {
        for (mask_number, mask) in masks.into_iter().enumerate() {
            let dtype = runner.dtype(DTYPES[(number + mask_number) % 2]);
            let mut problem = Problem::new(1, 2, query_length, dim, dtype);
            (problem.key_length, problem.mask, problem.lse) = (key_length, mask, number % 2 == 0);
            if number % 3 == 0 {
                problem.layout = Layout::Bshd;
            }
            if number % 4 == 0 {
                problem.key_heads = 1;
            }
            let backends = runner.backends(0);
            cases.extend(backends.into_iter().map(|backend| Case::new(problem.clone(), number as u64, backend)));
        }
    }
    cases.extend(addressing(runner, cases.len()));
    cases
}

/// Cases that find the wrong head, batch or term: groups of 3, 7 and 12 query heads, five batches, and every form of
/// bias, with slopes, sinks and `seqused_k` that differ; and NaN and infinities in keys that no row attends. The first has
/// the number `first_number` in its suite.
fn addressing(runner: Runner, first_number: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    let problem = |number: usize, batch: usize, (heads, key_heads): (usize, usize)| {
        let mut problem = Problem::new(batch, heads, 17, 32, runner.dtype(DTYPES[number % 2]));
        (problem.key_heads, problem.key_length, problem.lse) = (key_heads, 70, true);
        problem
    };
    let groups = [(1, (6, 2)), (5, (3, 3)), (2, (14, 2)), (1, (24, 2)), (5, (6, 2)), (2, (28, 4))];
    for (number, (batch, heads)) in groups.into_iter().enumerate() {
        let mut problem = problem(number, batch, heads);
        if number % 2 == 1 {
            (problem.alibi, problem.sinks, problem.seqused_k) = (true, true, true);
            other_operands().for_each(|operand| operand.switch_on(&mut problem));
        }
        problem.layout = [Layout::Bhsd, Layout::Bshd][number / 2 % 2];
        cases.push((problem, BiasForm::default()));
    }
    for (number, form) in BiasForm::ALL.into_iter().enumerate() {
        cases.push((problem(number, 5, (6, 2)).with_bias(true), form));
    }
    let first_unattended = cases.len();
    let window = Mask::Window { left: Some(9), right: Some(3), alignment: Alignment::BottomRight };
    for (number, mask) in [Mask::None, Mask::Causal(Alignment::TopLeft), window].into_iter().enumerate() {
        cases.push((problem(number, 3, (4, 2)).with_mask(mask).with_seqused_k(true), BiasForm::default()));
    }
    let (backend, option) = match runner {
        Runner::Cpu(_) => ("cpu", String::new()),
        Runner::Sim(kernels) => ("sim", kernel_option(kernels)),
        Runner::Cuda(kernels) => ("cuda", kernel_option(kernels)),
    };
    let case = |(number, (problem, bias)): (usize, (Problem, BiasForm))| {
        let backends = runner.backends(0).into_iter().filter_map(|backend| fitting(backend, &problem));
        let numbers = if number < first_unattended { Numbers::Normal } else { Numbers::Planted(Planted::Unattended) };
        let cases =
            backends.map(|backend| Case { numbers, bias, ..Case::new(problem.clone(), number as u64, backend) });
        cases.collect::<Vec<_>>()
    };
    let numbered = cases.into_iter().enumerate().flat_map(case).enumerate();
    let command = |number: usize| format!("flashcore verify --backend {backend}{option} --suite edge --only {number}");
    numbered.map(|(number, case)| Case { command: Some(command(first_number + number)), ..case }).collect()
}

/// Every config that some problem gets by default, each on one small problem with tails of rows and keys: few enough for a
/// tool that makes every access slow.
pub fn defaults(runner: Runner) -> Vec<Case> {
    let backends: Vec<Backend> = match runner {
        Runner::Cpu(level) => vec![Backend::Cpu(level)],
        Runner::Sim(Kernels::All) => Config::defaults().into_iter().map(Backend::Sim).collect(),
        Runner::Cuda(Kernels::All) => Config::defaults().into_iter().map(Backend::Cuda).collect(),
        Runner::Sim(Kernels::Only(_)) | Runner::Cuda(Kernels::Only(_)) => runner.backends(0),
    };
    let fp8_mma = match runner {
        Runner::Sim(Kernels::All) => Config::fp8_mma().into_iter().map(Backend::Sim).collect(),
        Runner::Cuda(Kernels::All) => Config::fp8_mma().into_iter().map(Backend::Cuda).collect(),
        _ => Vec::new(),
    };
    let problem = |dim: usize, number: usize, backend: Backend, is_fp8: bool| {
        let dtype = DTYPES[number % 2];
        let dtype = backend.config().map_or(dtype, |config| Kernels::Only(config).dtype(dtype));
        let mut problem = Problem::new(1, 4, 97, dim, dtype);
        (problem.key_heads, problem.key_length, problem.lse) = (2, 203, true);
        problem.mask = [Mask::None, Mask::Causal(Alignment::BottomRight)][number / 2 % 2];
        if is_fp8 {
            (problem.dtype, problem.out_dtype) = (DType::E4m3, Some(dtype));
            (problem.q_scale, problem.k_scale, problem.v_scale) = (true, true, true);
        }
        problem
    };
    let is_fp8 = |backend: &Backend| backend.config().is_some_and(|config| Config::fp8().contains(&config));
    let backends = backends.into_iter().map(|backend| (backend, is_fp8(&backend)));
    let backends = backends.chain(fp8_mma.into_iter().map(|backend| (backend, true)));
    let cases = backends.enumerate().filter_map(|(number, (backend, is_fp8))| {
        // The widest heads that fit the config.
        let dims = [128, 64, 192, 256].map(|dim| problem(dim, number, backend, is_fp8));
        let problem = dims.into_iter().find(|problem| takes(backend, problem))?;
        Some(Case::new(problem, number as u64, backend))
    });
    cases.collect()
}

/// Everything: the other suites and `counts`, a grid of lengths, head dimensions, masks and types, every config, and inputs made to
/// find trouble, and a pairwise design over every feature: of 2,000 cases for the CPU, of some hundred for kernels.
pub fn full(runner: Runner) -> Vec<Case> {
    let mut cases = seeds(runner);
    cases.extend(edge(runner));
    let lengths = [
        (1, 1),
        (1, 129),
        (2, 3),
        (3, 513),
        (17, 40),
        (63, 64),
        (64, 65),
        (113, 203),
        (128, 217),
        (239, 1),
        (256, 511),
        (257, 255),
        (300, 300),
    ];
    let masks = [Mask::None, Mask::Causal(Alignment::BottomRight), Mask::Causal(Alignment::TopLeft)];
    let mut number = 1000;
    for (query_length, key_length) in lengths {
        for dim in [32, 64, 96, 128] {
            for mask in masks {
                for dtype in DTYPES {
                    let mut problem = Problem::new(1 + number % 2, 4, query_length, dim, runner.dtype(dtype));
                    (problem.key_length, problem.mask, problem.lse) = (key_length, mask, true);
                    problem.key_heads = [4, 2, 1][number % 3];
                    problem.layout = [Layout::Bhsd, Layout::Bshd][number / 2 % 2];
                    let backends = runner.backends(usize::MAX);
                    cases
                        .extend(backends.into_iter().map(|backend| Case::new(problem.clone(), number as u64, backend)));
                    number += 1;
                }
            }
        }
    }
    for dim in [32, 64, 96, 128] {
        let mut problem = Problem::new(1, 2, 97, dim, runner.dtype(DTYPES[dim / 32 % 2]));
        (problem.key_length, problem.mask, problem.lse) = (203, masks[1], true);
        for backend in runner.every_backend().into_iter().filter(|backend| takes(*backend, &problem)) {
            cases.push(Case::new(problem.clone(), dim as u64, backend));
            for stress in Stress::ALL {
                cases
                    .push(Case { numbers: Numbers::Stress(stress), ..Case::new(problem.clone(), dim as u64, backend) });
            }
        }
    }
    if let Runner::Cpu(level) = runner {
        cases.extend(cpu_features::covering(level, cases.len()));
    } else {
        cases.extend(features(runner));
    }
    cases.extend(counts(runner));
    cases
}

/// The backend, or the Hopper kernel with shorter tiles where the default does not fit with a bias; none that does not take
/// the problem.
fn fitting(backend: Backend, problem: &Problem) -> Option<Backend> {
    let short =
        |config| HopperConfig::try_from(config).map_or(config, |hopper| HopperConfig { tile_n: 64, ..hopper }.into());
    let shorter = match backend {
        Backend::Cpu(_) => backend,
        Backend::Sim(config) => Backend::Sim(short(config)),
        Backend::Cuda(config) => Backend::Cuda(short(config)),
    };
    [backend, shorter].into_iter().find(|backend| takes(*backend, problem))
}

/// True if a backend takes a problem, on the architecture with most shared memory.
fn takes(backend: Backend, problem: &Problem) -> bool {
    match backend {
        Backend::Cpu(_) => true,
        Backend::Sim(config) | Backend::Cuda(config) => launch_plan(problem, config, SIMULATED_ARCH).is_ok(),
    }
}

/// A pairwise design over every feature. Kernels take turns.
pub fn features(runner: Runner) -> Vec<Case> {
    match runner {
        Runner::Cpu(level) => cpu_features::covering(level, 0),
        Runner::Sim(_) | Runner::Cuda(_) => gpu_features::covering(runner),
    }
}

/// `count` random problems that the runner takes. Each follows from its own number alone, counted from `seed`, so that
/// one can be repeated without the others.
pub fn fuzz(runner: Runner, count: usize, seed: u64) -> Vec<Case> {
    (0..count as u64).map(|number| fuzz_case(runner, seed.wrapping_add(number))).collect()
}

/// Keeps the numbers that shape a problem apart from those that fill its tensors.
const FUZZ_STREAM: u64 = 0xf022;

fn fuzz_case(runner: Runner, number: u64) -> Case {
    match runner {
        Runner::Cpu(level) => cpu_features::fuzz_case(level, number),
        Runner::Sim(_) | Runner::Cuda(_) => gpu_features::fuzz_case(runner, number, FUZZ_STREAM),
    }
}

fn kernel_option(kernels: Kernels) -> String {
    match kernels {
        Kernels::All => String::new(),
        Kernels::Only(config) => format!(" --kernel {config}"),
    }
}
