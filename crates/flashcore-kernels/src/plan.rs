//! From a problem to a kernel that can be launched, or the reasons why not.

use flashcore_ir::tensor_map::InvalidTensorMap;
use flashcore_ir::{Arch, VerifiedKernel, VerifyError};
use flashcore_problem::{DType, Problem, ProblemError};

use crate::attention::combine;
use crate::attention::hopper::Order;
use crate::attention::partial::workspace_bytes;
use crate::attention::tile_ranges::RangeShape;
use crate::config::{AmpereConfig, Config, Flaw, L2Window, most_operand_registers};
use crate::hopper_config::HopperConfig;
use crate::ladder_config::LadderConfig;
use crate::parameters::{Argument, Buffers, Extra, arguments};
use crate::specialization::MOST_WIDTH;
use crate::tensor_maps::tensor_maps;

/// The most CTAs in the second and third dimension of a grid.
const MOST_GRID_ROWS: usize = 65_535;
/// The most CTAs in the first dimension of a grid, and the most tiles that CTAs take in turn.
const MOST_TILES: usize = i32::MAX as usize;
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
    /// What is launched before it, with the first of the same arguments.
    pub ranges: Option<SideKernel>,
    /// What is launched behind it, with the same arguments.
    pub combine: Option<SideKernel>,
    extra: Extra,
    range_shape: Option<RangeShape>,
    /// The order of tiles, where the kernel has one of its own.
    order: Option<Order>,
    problem: Problem,
}

/// A kernel that goes with another: one that finds out before it which tiles of keys an expression leaves, or one that adds up
/// behind it what it has for KV splits.
#[derive(Debug, Clone)]
pub struct SideKernel {
    /// The kernel.
    pub kernel: VerifiedKernel,
    /// CTAs by rows or tiles of them, query head and batch.
    pub grid: [u32; 3],
}

/// Why a kernel cannot run a problem.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[expect(missing_docs, reason = "the message of each variant says what its fields are")]
#[non_exhaustive]
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
        "the tiles of {config} take {registers} registers of a thread for this problem; more than {limit} are slow: take fewer keys or rows, the query from shared memory, or tensor cores"
    )]
    Registers { config: Config, registers: u32, limit: u32 },
    #[error(
        "the rows of several heads in one tile (packed) share what is added to their scores, so {feature} cannot be there: leave -packed out"
    )]
    Packed { feature: &'static str },
    #[error(
        "rows of some tensor begin at multiples of {width} bytes only; the {kernel} kernel takes multiples of {MOST_WIDTH}: pad the strides, or take an ampere config"
    )]
    Width { kernel: &'static str, width: u32 },
    #[error("the {kernel} kernel is for {needs}, and this is {arch}: take an ampere config, or name that architecture")]
    Arch { kernel: &'static str, needs: Arch, arch: Arch },
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
        let specialization = config.specialization(problem);
        let rules = |errors: Vec<VerifyError>| {
            let mut reasons: Vec<_> = errors.into_iter().map(Reason::Kernel).collect();
            reasons.dedup();
            reasons
        };
        let kernel = config.generate(specialization).verify(arch).map_err(rules)?;
        let shape = LaunchShape::new(problem, config);
        let combine = match shape.extra {
            Extra::Splits { .. } => {
                let kernel = Config::generate_combine(specialization).verify(arch).map_err(rules)?;
                let tiles = problem.query_length.div_ceil(combine::ROWS as usize) as u32;
                Some(SideKernel { kernel, grid: [tiles, problem.query_heads as u32, problem.batch as u32] })
            }
            Extra::Nothing | Extra::Tiles { .. } => None,
        };
        let range_shape = RangeShape::of(problem, config);
        let ranges = match (config.generate_ranges(specialization), range_shape) {
            (Some(kernel), Some(shape)) => {
                Some(SideKernel { kernel: kernel.verify(arch).map_err(rules)?, grid: shape.grid() })
            }
            _ => None,
        };
        let order = match config {
            Config::Hopper(hopper) => Some(Order::of(problem, hopper)),
            Config::Scalar(_) | Config::Ladder(_) | Config::Ampere(_) => None,
        };
        let (grid, extra, problem) = (shape.grid, shape.extra, problem.clone());
        Ok(Self { kernel, config, grid, ranges, combine, extra, range_shape, order, problem })
    }

    /// The kernels in the order in which they are launched, with their grids and arguments.
    pub fn launches(&self, buffers: Buffers) -> Vec<(&VerifiedKernel, [u32; 3], Vec<Argument>)> {
        let arguments = self.arguments(buffers);
        let ranges = self.ranges.iter().map(|side| (&side.kernel, side.grid, self.common_arguments(buffers)));
        let combine = self.combine.iter().map(|side| (&side.kernel, side.grid, arguments.clone()));
        ranges.chain([(&self.kernel, self.grid, arguments.clone())]).chain(combine).collect()
    }

    /// Bytes of memory that the kernels use among themselves.
    pub fn workspace_bytes(&self) -> u64 {
        self.ranges_offset() + self.range_shape.map_or(0, RangeShape::bytes)
    }

    /// Bytes of that memory before what is known of the tiles that an expression leaves.
    pub const fn ranges_offset(&self) -> u64 {
        match self.extra {
            Extra::Splits { num_splits, rows } => {
                workspace_bytes(num_splits as u64, rows, self.problem.value_dim as u64).next_multiple_of(16)
            }
            Extra::Nothing | Extra::Tiles { .. } => 0,
        }
    }

    /// Bytes that the key reaches over.
    pub fn key_bytes(&self) -> usize {
        let extent = self.problem.strides().key.extent(self.problem.key_shape());
        extent.unwrap_or(0).saturating_mul(self.problem.dtype.size_bytes())
    }

    /// Whether L2 is to keep the key.
    pub const fn keeps_keys_in_l2(&self) -> bool {
        matches!(self.config, Config::Ampere(AmpereConfig { l2: L2Window::Key, .. }))
    }

    /// The same plan on a GPU that runs so many CTAs of the kernel at a time: where a CTA takes one tile of query rows
    /// after the other, there are no more of them.
    #[must_use]
    pub fn with_at_most(self, ctas: u32) -> Self {
        match self.config {
            Config::Hopper(hopper) if hopper.persistent => {
                let ctas = self.grid[0].min(ctas.max(1));
                let order = self.order.map(|order| order.for_ctas(&self.problem, hopper, ctas));
                Self { grid: [ctas, 1, 1], order, ..self }
            }
            _ => self,
        }
    }

    /// The same plan with another kernel behind it, where there is one, which takes the same parameters.
    #[must_use]
    pub fn with_combine(&self, kernel: VerifiedKernel) -> Self {
        let combine = self.combine.as_ref().map(|side| SideKernel { kernel, grid: side.grid });
        Self { combine, ..self.clone() }
    }

    /// The same plan with CTAs for some of the rows only. For tools that look at those.
    #[must_use]
    pub fn with_grids(self, grid: [u32; 3], combine: Option<SideKernel>) -> Self {
        Self { grid, combine, ..self }
    }

    /// The arguments of a launch on tensors at these addresses.
    pub fn arguments(&self, buffers: Buffers) -> Vec<Argument> {
        let mut arguments = self.common_arguments(buffers);
        arguments.extend(self.extra.arguments(buffers));
        if let Config::Hopper(hopper) = self.config {
            arguments.extend(tensor_maps(&self.problem, hopper, buffers).map(|(_, map)| Argument::TensorMap(map)));
        }
        arguments.extend(self.order.into_iter().flat_map(Order::arguments));
        arguments
    }

    /// The arguments that all kernels have.
    pub fn common_arguments(&self, buffers: Buffers) -> Vec<Argument> {
        arguments(&self.problem, buffers, self.range_shape)
    }

    /// The same plan with another kernel, which takes the same parameters. For tools that transform kernels.
    #[must_use]
    pub fn with_kernel(&self, kernel: VerifiedKernel) -> Self {
        Self { kernel, ..self.clone() }
    }

    /// The same plan with another kernel before it, where there is one, which takes the same parameters.
    #[must_use]
    pub fn with_ranges(&self, kernel: VerifiedKernel) -> Self {
        let ranges = self.ranges.as_ref().map(|side| SideKernel { kernel, grid: side.grid });
        Self { ranges, ..self.clone() }
    }
}

/// The grid of the first kernel, and what it receives because of it.
struct LaunchShape {
    grid: [u32; 3],
    extra: Extra,
}

impl LaunchShape {
    fn new(problem: &Problem, config: Config) -> Self {
        let [heads, key_heads, batch] = [problem.query_heads, problem.key_heads, problem.batch].map(|size| size as u32);
        let tiles = |rows: usize| rows.div_ceil(config.tile_m() as usize) as u32;
        let one_head = tiles(problem.query_length);
        if let Config::Hopper(hopper) = config
            && hopper.persistent
        {
            return Self { grid: [Order::of(problem, hopper).tiles, 1, 1], extra: Extra::Nothing };
        }
        let Config::Ampere(AmpereConfig { persistent, num_splits, pack_gqa, .. }) = config else {
            let ctas = if let Config::Hopper(hopper) = config { hopper.cluster } else { 1 };
            return Self { grid: [one_head.saturating_mul(ctas), heads, batch], extra: Extra::Nothing };
        };
        if persistent > 0 {
            let all = one_head.saturating_mul(heads).saturating_mul(batch);
            return Self { grid: [persistent.min(all), 1, 1], extra: Extra::Tiles { tiles: one_head, heads, all } };
        }
        let (tiles, heads) = if pack_gqa { (tiles(packed_rows(problem)), key_heads) } else { (one_head, heads) };
        let rows = problem.batch.saturating_mul(problem.query_heads).saturating_mul(problem.query_length) as u64;
        let extra = if num_splits > 1 { Extra::Splits { num_splits, rows } } else { Extra::Nothing };
        Self { grid: [tiles.saturating_mul(num_splits), heads, batch], extra }
    }
}

impl LaunchShape {
    /// Tiles, whether each has a CTA of its own or not.
    const fn all_tiles(&self) -> u32 {
        match self.extra {
            Extra::Tiles { all, .. } => all,
            Extra::Nothing | Extra::Splits { .. } => self.grid[0],
        }
    }
}

/// Rows of all query heads of one key head.
const fn packed_rows(problem: &Problem) -> usize {
    let group = match problem.query_heads.checked_div(problem.key_heads) {
        Some(group) => group,
        None => 0,
    };
    problem.query_length.saturating_mul(group)
}

/// Whether nothing is against a kernel, as far as that can be told without writing it, and there is room for its tiles.
pub(crate) fn takes(problem: &Problem, config: Config, arch: Arch) -> bool {
    let fits = match config {
        Config::Hopper(hopper) => arch == Arch::Sm90a && hopper.fits_shared(config.specialization(problem)),
        Config::Scalar(_) | Config::Ampere(_) | Config::Ladder(_) => true,
    };
    fits && reasons(problem, config, arch).is_empty()
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
    if let Config::Ladder(steps) = config
        && reasons.is_empty()
    {
        let limit = LadderConfig::MOST_OPERAND_REGISTERS;
        let registers = steps.operand_registers(problem.value_dim as u32);
        if registers > limit {
            reasons.push(Reason::Registers { config, registers, limit });
        }
    }
    if let Config::Ampere(ampere) = config
        && reasons.is_empty()
    {
        let (registers, limit) =
            (ampere.operand_registers(config.specialization(problem)), most_operand_registers(arch));
        if registers > limit {
            reasons.push(Reason::Registers { config, registers, limit });
        }
    }
    if let Config::Hopper(hopper) = config {
        if arch != Arch::Sm90a {
            reasons.push(Reason::Arch { kernel, needs: Arch::Sm90a, arch });
        }
        if reasons.is_empty() {
            reasons.extend(hopper_reasons(problem, config, hopper));
        }
    }
    let is_packed = matches!(config, Config::Ampere(AmpereConfig { pack_gqa: true, .. }));
    if is_packed {
        let features = [
            (problem.alibi, "alibi"),
            (problem.bias, "a bias"),
            (problem.sinks, "sinks"),
            (problem.score_mod.is_some(), "a score_mod"),
            (problem.mask_mod.is_some(), "a mask_mod"),
        ];
        let there = features.into_iter().filter(|(is_there, _)| *is_there);
        reasons.extend(there.map(|(_, feature)| Reason::Packed { feature }));
    }
    // What is wrong already may not even have a shape.
    let all_tiles = if reasons.is_empty() { LaunchShape::new(problem, config).all_tiles() as usize } else { 0 };
    let limits = [
        ("the number of tiles", all_tiles, MOST_TILES),
        ("batch", problem.batch, MOST_GRID_ROWS),
        ("query_heads", problem.query_heads, MOST_GRID_ROWS),
        ("query_length", problem.query_length, LONGEST),
        ("key_length", problem.key_length, LONGEST),
    ];
    let packed = is_packed.then_some(("the rows of all heads of a key head", packed_rows(problem), LONGEST));
    for (argument, value, limit) in limits.into_iter().chain(packed) {
        if value > limit {
            reasons.push(Reason::Grid { argument, value, limit });
        }
    }
    if problem.output_shape().is_empty() {
        reasons.push(Reason::Empty);
    }
    reasons
}

/// What speaks against a problem that another config of the family could have as well.
fn hopper_reasons(problem: &Problem, config: Config, hopper: HopperConfig) -> Vec<Reason> {
    let (kernel, specialization, mut reasons) = (config.family(), config.specialization(problem), Vec::new());
    let (registers, limit) = (hopper.operand_registers(specialization), hopper.most_operand_registers());
    if registers > limit {
        reasons.push(Reason::Registers { config, registers, limit });
    }
    if specialization.width < MOST_WIDTH {
        reasons.push(Reason::Width { kernel, width: specialization.width });
    }
    if !problem.output_shape().is_empty() && reasons.is_empty() {
        let maps = tensor_maps(problem, hopper, Buffers::new(0, 0, 0, 0));
        let invalid = maps.filter_map(|(tensor, map)| Some((tensor, map.validate().err()?)));
        reasons.extend(invalid.map(|(tensor, error)| Reason::Tensor { kernel, tensor, error }));
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
