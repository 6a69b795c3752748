//! Tensors of more than 4 GiB: offsets that overflow 32 bits.
//!
//! The problems are small and their rows, heads or batches lie far apart. The simulator keeps such tensors in a sparse
//! memory; a GPU has to have them whole, with about 30 GiB for each case, and a host with twice as much.

use flashcore_kernels::Config;
use flashcore_problem::{BiasStrides, DType, Layout, Problem, Shape, Strides, TensorStrides};

use super::{Kernels, Runner, takes};
use crate::testkit::BiasForm;
use crate::testkit::simulate::FarApart;
use crate::testkit::{Backend, Case};

/// Elements from one row to the next, where rows lie far apart: 96 of them are 6 GiB of 16 bits.
const FAR_ROWS: usize = (1 << 25) + 64;
/// Elements from one head to the next, where heads lie far apart: three of them are 6 GiB.
const FAR_HEADS: usize = (1 << 30) + 64;
/// Elements from one batch to the next, where batches lie far apart: one of them is 4 GiB.
const FAR_BATCHES: usize = (1 << 31) + 64;
/// Terms from one row of a bias to the next: 96 of them are 6 GiB.
pub(crate) const FAR_BIAS_ROWS: usize = (1 << 24) + 16;
/// Least reach of a tensor, in bytes, that no other suite has.
const HUGE: usize = 1 << 32;

/// Rows, heads or batches far apart, for every family of kernels.
pub fn huge(runner: Runner) -> Vec<Case> {
    let configs: Vec<Config> = match runner {
        Runner::Sim(Kernels::Only(config)) | Runner::Cuda(Kernels::Only(config)) => vec![config],
        Runner::Sim(Kernels::All) | Runner::Cuda(Kernels::All) => families(),
        Runner::Cpu(_) => Vec::new(),
    };
    let rows = |shape: Shape| Strides { batch: shape.heads * shape.columns, head: shape.columns, row: FAR_ROWS };
    let heads = |shape: Shape| Strides { batch: shape.columns, head: FAR_HEADS, row: shape.batch * shape.columns };
    let batches = |shape: Shape| Strides { batch: FAR_BATCHES, ..Strides::bhsd(shape) };
    let far: [fn(Shape) -> Strides; 3] = [rows, heads, batches];
    let mut cases = Vec::new();
    for config in configs {
        for (strides, (number, [batch, heads])) in far.into_iter().zip([[1, 2], [1, 4], [2, 2]].into_iter().enumerate())
        {
            let mut problem = Problem::new(batch, heads, 97, 64, [DType::F16, DType::Bf16][number % 2]);
            (problem.lse, problem.bias) = (true, number == 0 && !config.traits().pack_gqa);
            problem.layout = Layout::Strided(TensorStrides {
                query: strides(problem.query_shape()),
                key: strides(problem.key_shape()),
                value: strides(problem.value_shape()),
                output: strides(problem.output_shape()),
            });
            let (backend, name) = match runner {
                Runner::Cuda(_) => (Backend::Cuda(config), "cuda"),
                Runner::Sim(_) | Runner::Cpu(_) => (Backend::Sim(config), "sim"),
            };
            if takes(backend, &problem) {
                let command = format!("flashcore verify --backend {name} --suite huge --only {}", cases.len());
                let bias = BiasForm::FarRows;
                cases.push(Case { bias, command: Some(command), ..Case::new(problem, number as u64, backend) });
            }
        }
    }
    cases
}

/// One config for each way to address memory.
fn families() -> Vec<Config> {
    let names = [
        "scalar",
        "ladder",
        "ampere",
        "ampere-32x32-2stage-swizzled-packgqa-3splits",
        "ampere-64x64-2stage-swizzled-1producer",
        "hopper",
        "hopper-64x64-2stage",
    ];
    names.iter().filter_map(|name| name.parse().ok()).collect()
}

/// Memory layout of the tensors of a case, where some of them reach over 4 GiB and more.
pub(crate) fn far_apart(case: &Case) -> Option<FarApart> {
    let problem = &case.problem;
    if !matches!(problem.layout, Layout::Strided(_)) {
        return None;
    }
    let strides = problem.strides();
    let reaches = |shape: Shape, strides: Strides| {
        strides.extent(shape).is_some_and(|extent| extent.saturating_mul(problem.dtype.size_bytes()) >= HUGE)
    };
    let is_huge = reaches(problem.query_shape(), strides.query) || reaches(problem.key_shape(), strides.key);
    let bias = problem.bias.then_some(BiasStrides { batch: 0, head: problem.key_length, row: FAR_BIAS_ROWS, key: 1 });
    is_huge.then(|| FarApart { problem: problem.clone(), bias })
}

/// Small problems with rows, keys, heads, batches and terms of the bias 4 GiB and more apart, and with so many rows that
/// LSEs of rows and partial results of split-KV lie that far apart as well: with what each is compared with.
pub fn far_trials() -> Vec<(Problem, FarApart)> {
    let mut near = Problem::new(2, 4, 40, 32, DType::F16);
    (near.key_heads, near.key_length, near.lse) = (2, 70, true);
    let apart = |shape: Shape| {
        let row = (1 << 31) + 64;
        Strides { row, head: row * shape.rows + 64, batch: (row * shape.rows + 64) * shape.heads + 64 }
    };
    let layout = Layout::Strided(TensorStrides {
        query: apart(near.query_shape()),
        key: apart(near.key_shape()),
        value: apart(near.value_shape()),
        output: apart(near.output_shape()),
    });
    let strided = near.clone().with_layout(layout);
    // Whole tiles of rows: CTAs for the others are not launched, but a tile must not reach into them.
    let many = near.clone().with_query_length(128);
    let long = near.clone().with_query_length(1 << 29);
    let biased = near.clone().with_query_length(5).with_key_length(9).with_bias(true);
    let term = (1 << 30) + 4;
    let bias = BiasStrides { key: term, row: 9 * term + 8, head: 46 * term, batch: 185 * term };
    vec![
        (near, FarApart { problem: strided, bias: None }),
        (many, FarApart { problem: long, bias: None }),
        (biased.clone(), FarApart { problem: biased, bias: Some(bias) }),
    ]
}
