//! Lists of cases.

use flashcore_kernels::Config;
use flashcore_problem::{Alignment, DType, Mask, Problem};

use crate::case::{Backend, Case};

/// The head dimensions of the history of this project, and their neighbours.
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

/// Who a suite is run by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Runner {
    /// The native CPU kernels.
    Cpu,
    /// GPU kernels in the simulator.
    Sim(Kernels),
}

impl Runner {
    /// The backends for a problem of some length.
    fn backends(self, length: usize) -> Vec<Backend> {
        match self {
            Self::Cpu => vec![Backend::Cpu],
            Self::Sim(Kernels::Only(config)) => vec![Backend::Sim(config)],
            Self::Sim(Kernels::All) if length <= LONGEST_FOR_SCALAR => {
                vec![Backend::Sim(Config::scalar()), Backend::Sim(Config::ampere())]
            }
            Self::Sim(Kernels::All) => vec![Backend::Sim(Config::ampere())],
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
                    (problem.mask, problem.dtype, problem.log_sum_exp) = (mask, dtype, true);
                    let length = if small { 0 } else { problem.query_length };
                    let backends = runner.backends(length);
                    cases.extend(backends.into_iter().map(|backend| Case::new(problem.clone(), seed, backend)));
                }
            }
        }
    }
    cases
}

/// Every head dimension, both alignments, lengths around the tiles, rows that attend nothing, other layouts.
pub fn edge(runner: Runner) -> Vec<Case> {
    let lengths = [(1, 1), (1, 203), (63, 65), (64, 64), (65, 63), (97, 203), (203, 97), (130, 257), (5, 0)];
    let masks = [Mask::None, Mask::Causal(Alignment::BottomRight), Mask::Causal(Alignment::TopLeft)];
    let mut cases = Vec::new();
    for (number, (dim, (query_length, key_length))) in
        [32, 64, 96, 128].into_iter().flat_map(|dim| lengths.map(|lengths| (dim, lengths))).enumerate()
    {
        for (mask_number, mask) in masks.into_iter().enumerate() {
            let mut problem = Problem::new(1, 2, query_length, dim, DTYPES[(number + mask_number) % 2]);
            (problem.key_length, problem.mask, problem.log_sum_exp) = (key_length, mask, number % 2 == 0);
            if number % 3 == 0 {
                problem.layout = flashcore_problem::Layout::Bshd;
            }
            if number % 4 == 0 {
                problem.key_heads = 1;
            }
            let backends = runner.backends(0);
            cases.extend(backends.into_iter().map(|backend| Case::new(problem.clone(), number as u64, backend)));
        }
    }
    cases
}
