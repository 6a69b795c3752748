//! From a problem to a kernel that can be launched, or the reasons why not.

use flashcore_ir::{Arch, VerifiedKernel, VerifyError};
use flashcore_problem::{DType, Mask, Problem, ProblemError};

use crate::config::{Config, Flaw, Specialisation};
use crate::parameters::{Argument, Buffers, arguments};

/// The most CTAs in the second and third dimension of a grid.
const MOST_GRID_ROWS: usize = 65_535;
/// Bytes that the rows of tensors must be a multiple of, for 16-byte accesses.
const ALIGNMENT_BYTES: usize = 16;

/// A kernel for a problem, and how it is launched.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The kernel.
    pub kernel: VerifiedKernel,
    /// The config it came from.
    pub config: Config,
    /// CTAs by query tile, query head and batch.
    pub grid: [u32; 3],
    problem: Problem,
}

/// Why a kernel cannot run a problem.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[expect(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum Reason {
    #[error(transparent)]
    Problem(#[from] ProblemError),
    #[error("the {kernel} kernel has no {dtype}; it has f16 and bf16")]
    DType { kernel: &'static str, dtype: DType },
    #[error("the {kernel} kernel has no head_dim {head_dim}; it has 32, 64, 96 and 128")]
    HeadDim { kernel: &'static str, head_dim: usize },
    #[error("the {kernel} kernel needs value_dim = head_dim, not {value_dim} and {head_dim}")]
    ValueDim { kernel: &'static str, head_dim: usize, value_dim: usize },
    #[error("the {kernel} kernel has no {feature} yet; the cpu backend has it")]
    Feature { kernel: &'static str, feature: &'static str },
    #[error("the scale must be positive on a GPU, not {scale}; negate the query instead")]
    Scale { scale: f32 },
    #[error("{argument} is {value}; a GPU grid takes at most {limit}")]
    Grid { argument: &'static str, value: usize, limit: usize },
    #[error("the {stride} stride of the {tensor} is {elements} elements; it must be a multiple of {multiple}")]
    Stride { tensor: &'static str, stride: &'static str, elements: usize, multiple: usize },
    #[error("the problem is empty: there is nothing to launch")]
    Empty,
    #[error("{argument} of the {kernel} config is {value}; it must be {allowed}")]
    Config { kernel: &'static str, argument: &'static str, value: u32, allowed: &'static str },
    #[error("the kernel breaks a rule: {0}")]
    Kernel(#[from] VerifyError),
}

impl Plan {
    /// The kernel of `config` for `problem` on `arch`, or all reasons against it.
    pub fn new(problem: &Problem, config: Config, arch: Arch) -> Result<Self, Vec<Reason>> {
        let reasons = reasons(problem, config);
        if !reasons.is_empty() {
            return Err(reasons);
        }
        let specialisation = Specialisation {
            dtype: problem.dtype,
            head_dim: problem.head_dim as u32,
            causal: matches!(problem.mask, Mask::Causal(_)),
            log_sum_exp: problem.log_sum_exp,
        };
        let kernel = config.generate(specialisation).verify(arch).map_err(|errors| {
            let mut reasons: Vec<_> = errors.into_iter().map(Reason::Kernel).collect();
            reasons.dedup();
            reasons
        })?;
        let query_tiles = problem.query_length.div_ceil(config.query_rows() as usize);
        let grid = [query_tiles as u32, problem.query_heads as u32, problem.batch as u32];
        Ok(Self { kernel, config, grid, problem: problem.clone() })
    }

    /// The arguments of a launch on tensors at these addresses.
    pub fn arguments(&self, buffers: Buffers) -> Vec<Argument> {
        arguments(&self.problem, buffers)
    }

    /// The same plan with another kernel, which takes the same parameters. For tools that transform kernels.
    #[must_use]
    pub fn with_kernel(&self, kernel: VerifiedKernel) -> Self {
        Self { kernel, ..self.clone() }
    }
}

fn reasons(problem: &Problem, config: Config) -> Vec<Reason> {
    let mut reasons: Vec<_> = problem.validate().err().unwrap_or_default().into_iter().map(Reason::from).collect();
    let kernel = config.family();
    let (head_dim, value_dim) = (problem.head_dim, problem.value_dim);
    if !Specialisation::DTYPES.contains(&problem.dtype) {
        reasons.push(Reason::DType { kernel, dtype: problem.dtype });
    }
    if !Specialisation::HEAD_DIMS.iter().any(|&supported| supported as usize == head_dim) {
        reasons.push(Reason::HeadDim { kernel, head_dim });
    }
    if value_dim != head_dim {
        reasons.push(Reason::ValueDim { kernel, head_dim, value_dim });
    }
    reasons.extend(config.flaws().into_iter().map(|flaw| {
        let Flaw { argument, value, allowed } = flaw;
        Reason::Config { kernel, argument, value, allowed }
    }));
    let features = [
        ("sliding window", matches!(problem.mask, Mask::Window { .. })),
        ("softcap", problem.softcap.is_some()),
        ("ALiBi", problem.alibi),
        ("attention sinks", problem.sinks),
        ("additive bias", problem.bias),
        ("per-batch key lengths", problem.key_lengths),
    ];
    reasons.extend(features.into_iter().filter(|(_, on)| *on).map(|(feature, _)| Reason::Feature { kernel, feature }));
    if problem.scale.is_nan() || problem.scale <= 0.0 {
        reasons.push(Reason::Scale { scale: problem.scale });
    }
    let limits = [
        ("batch", problem.batch, MOST_GRID_ROWS),
        ("query_heads", problem.query_heads, MOST_GRID_ROWS),
        ("query_length", problem.query_length, i32::MAX as usize),
        ("key_length", problem.key_length, i32::MAX as usize),
    ];
    for (argument, value, limit) in limits {
        if value > limit {
            reasons.push(Reason::Grid { argument, value, limit });
        }
    }
    if problem.output_shape().is_empty() {
        reasons.push(Reason::Empty);
    }
    if reasons.is_empty() {
        reasons.extend(misaligned_strides(problem));
    }
    reasons
}

/// Strides that would put a row at an address that 16-byte accesses cannot start from.
fn misaligned_strides(problem: &Problem) -> Vec<Reason> {
    let multiple = ALIGNMENT_BYTES / problem.dtype.size_bytes();
    let strides = problem.strides();
    let shapes = [
        ("query", strides.query, problem.query_shape()),
        ("key", strides.key, problem.key_shape()),
        ("value", strides.value, problem.value_shape()),
        ("output", strides.output, problem.output_shape()),
    ];
    let mut reasons = Vec::new();
    for (tensor, strides, shape) in shapes {
        let dimensions = [
            ("batch", strides.batch, shape.batch),
            ("head", strides.head, shape.heads),
            ("row", strides.row, shape.rows),
        ];
        for (stride, elements, size) in dimensions {
            // The stride of a dimension of size 1 is never used.
            if size > 1 && elements % multiple != 0 {
                reasons.push(Reason::Stride { tensor, stride, elements, multiple });
            }
        }
    }
    reasons
}
