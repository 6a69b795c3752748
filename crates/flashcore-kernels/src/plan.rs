//! From a problem to a kernel that can be launched, or the reasons why not.

use flashcore_ir::tensor_map::InvalidTensorMap;
use flashcore_ir::{Arch, VerifiedKernel, VerifyError};
use flashcore_problem::{DType, Problem, ProblemError};

use crate::attention::hopper::Order;
use crate::config::{Config, Flaw, most_operand_registers};
use crate::parameters::{Argument, Buffers, arguments};
use crate::specialisation::MOST_WIDTH;
use crate::tensor_maps::tensor_maps;

/// The most CTAs in the second and third dimension of a grid.
const MOST_GRID_ROWS: usize = 65_535;
/// The longest sequence: sums of positions, keys and windows then stay within 32 bits.
pub(crate) const LONGEST: usize = 1 << 29;

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
    #[error("the {kernel} kernel has no {dtype}; it has {}", listed(has))]
    DType { kernel: &'static str, dtype: DType, has: &'static [DType] },
    #[error("{argument} is {dim}; the {kernel} kernel takes {}", dims(*multiple, *most))]
    Dim { kernel: &'static str, argument: &'static str, dim: usize, multiple: usize, most: usize },
    #[error("{argument} is {value}; a GPU grid takes at most {limit}")]
    Grid { argument: &'static str, value: usize, limit: usize },
    #[error("the problem is empty: there is nothing to launch")]
    Empty,
    #[error("{argument} of the {kernel} config is {value}; it must be {allowed}")]
    Config { kernel: &'static str, argument: &'static str, value: u32, allowed: &'static str },
    #[error(
        "the tiles of {config} take {registers} registers of a thread for this problem; more than {limit} are slow: take fewer keys or rows, or the query from shared memory"
    )]
    Registers { config: Config, registers: u32, limit: u32 },
    #[error(
        "rows of some tensor begin at multiples of {width} bytes only; the {kernel} kernel takes multiples of {MOST_WIDTH}: pad the strides, or take an ampere config"
    )]
    Width { kernel: &'static str, width: u32 },
    #[error("the {kernel} kernel cannot copy {tensor}: {error}; take an ampere config")]
    Tensor { kernel: &'static str, tensor: &'static str, error: InvalidTensorMap },
    #[error("the kernel breaks a rule: {0}")]
    Kernel(#[from] VerifyError),
}

impl Plan {
    /// The kernel of `config` for `problem` on `arch`, or all reasons against it.
    pub fn new(problem: &Problem, config: Config, arch: Arch) -> Result<Self, Vec<Reason>> {
        let reasons = reasons(problem, config, arch);
        if !reasons.is_empty() {
            return Err(reasons);
        }
        let specialisation = config.specialisation(problem);
        let kernel = config.generate(specialisation).verify(arch).map_err(|errors| {
            let mut reasons: Vec<_> = errors.into_iter().map(Reason::Kernel).collect();
            reasons.dedup();
            reasons
        })?;
        let query_tiles = problem.query_length.div_ceil(config.query_rows() as usize);
        let grid = match config {
            Config::Hopper(hopper) => [Order::of(problem, hopper.query_rows()).tiles, 1, 1],
            Config::Scalar(_) | Config::Ampere(_) => {
                [query_tiles as u32, problem.query_heads as u32, problem.batch as u32]
            }
        };
        Ok(Self { kernel, config, grid, problem: problem.clone() })
    }

    /// The same plan on a GPU that runs so many CTAs of the kernel at a time: where a CTA takes one tile of query rows
    /// after the other, there are no more of them.
    #[must_use]
    pub fn with_at_most(self, ctas: u32) -> Self {
        let [tiles, heads, batches] = self.grid;
        match self.config {
            Config::Hopper(hopper) if hopper.persistent => Self { grid: [tiles.min(ctas.max(1)), 1, 1], ..self },
            Config::Hopper(_) | Config::Scalar(_) | Config::Ampere(_) => Self { grid: [tiles, heads, batches], ..self },
        }
    }

    /// The arguments of a launch on tensors at these addresses.
    pub fn arguments(&self, buffers: Buffers) -> Vec<Argument> {
        let mut arguments = arguments(&self.problem, buffers);
        if let Config::Hopper(hopper) = self.config {
            arguments.extend(tensor_maps(&self.problem, hopper, buffers).map(|(_, map)| Argument::TensorMap(map)));
            arguments.extend(Order::of(&self.problem, hopper.query_rows()).arguments());
        }
        arguments
    }

    /// The same plan with another kernel, which takes the same parameters. For tools that transform kernels.
    #[must_use]
    pub fn with_kernel(&self, kernel: VerifiedKernel) -> Self {
        Self { kernel, ..self.clone() }
    }
}

fn reasons(problem: &Problem, config: Config, arch: Arch) -> Vec<Reason> {
    let mut reasons: Vec<_> = problem.validate().err().unwrap_or_default().into_iter().map(Reason::from).collect();
    let kernel = config.family();
    if !config.dtypes().contains(&problem.dtype) {
        reasons.push(Reason::DType { kernel, dtype: problem.dtype, has: config.dtypes() });
    }
    for (argument, dim) in [("head_dim", problem.head_dim), ("value_dim", problem.value_dim)] {
        let (multiple, most) = config.dims();
        if !dim.is_multiple_of(multiple) || dim > most {
            reasons.push(Reason::Dim { kernel, argument, dim, multiple, most });
        }
    }
    reasons.extend(config.flaws().into_iter().map(|flaw| {
        let Flaw { argument, value, allowed } = flaw;
        Reason::Config { kernel, argument, value, allowed }
    }));
    if let Config::Ampere(ampere) = config
        && reasons.is_empty()
    {
        let (registers, limit) =
            (ampere.operand_registers(config.specialisation(problem)), most_operand_registers(arch));
        if registers > limit {
            reasons.push(Reason::Registers { config, registers, limit });
        }
    }
    if let Config::Hopper(hopper) = config
        && reasons.is_empty()
    {
        let specialisation = config.specialisation(problem);
        let (registers, limit) = (hopper.operand_registers(specialisation), hopper.most_operand_registers());
        if registers > limit {
            reasons.push(Reason::Registers { config, registers, limit });
        }
        if specialisation.width < MOST_WIDTH {
            reasons.push(Reason::Width { kernel, width: specialisation.width });
        }
        if !problem.output_shape().is_empty() && reasons.is_empty() {
            let maps = tensor_maps(problem, hopper, Buffers::new(0, 0, 0, 0));
            let invalid = maps.into_iter().filter_map(|(tensor, map)| Some((tensor, map.validate().err()?)));
            reasons.extend(invalid.map(|(tensor, error)| Reason::Tensor { kernel, tensor, error }));
        }
    }
    let limits = [
        ("batch", problem.batch, MOST_GRID_ROWS),
        ("query_heads", problem.query_heads, MOST_GRID_ROWS),
        ("query_length", problem.query_length, LONGEST),
        ("key_length", problem.key_length, LONGEST),
    ];
    for (argument, value, limit) in limits {
        if value > limit {
            reasons.push(Reason::Grid { argument, value, limit });
        }
    }
    if problem.output_shape().is_empty() {
        reasons.push(Reason::Empty);
    }
    reasons
}

fn listed(dtypes: &[DType]) -> String {
    dtypes.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ")
}

fn dims(multiple: usize, most: usize) -> String {
    match multiple {
        1 => format!("1 to {most}"),
        _ => format!("multiples of {multiple} up to {most}"),
    }
}
