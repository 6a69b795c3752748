//! Launches of a kernel on the simulated device.

use core::sync::atomic::{AtomicU64, Ordering};

use flashcore_ir::{Argument, Space, TensorMap, VerifiedKernel};
use rayon::prelude::*;

use crate::counters::Counters;
use crate::error::{LaunchError, SimError};
use crate::execute::Scene;
use crate::fault::{Fault, FaultKind};
use crate::memory::global::GlobalMemory;
use crate::memory::grid::{GridHistory, GridRace, MOST_CTAS};
use crate::placement::Placement;
use crate::program::Program;
use crate::race::MOST_STEPS;
use crate::random::Random;
use crate::schedule::{Failure, run};
use crate::state::registers::LANES;
use crate::stream::{GridDependency, Stream, Unfinished};
use crate::tensor_sum::TensorSum;

/// Runs a kernel over a grid of CTAs and checks everything it does.
///
/// With several faults, the one of the cluster that comes first in the grid is returned, so the result is
/// deterministic. Writes before a fault remain.
pub fn launch(
    kernel: &VerifiedKernel,
    launch: &Launch,
    memory: &GlobalMemory,
    options: &Options,
) -> Result<Report, SimError> {
    Stream::idle(memory).launch(kernel, launch, false, options)
}

/// A launch that has run.
#[derive(Debug)]
pub(crate) struct Finished<'k> {
    pub(crate) counters: Counters,
    pub(crate) program: Program<'k>,
    pub(crate) grid: [u32; 3],
    /// The accesses of all clusters to global memory.
    pub(crate) history: GridHistory,
    pub(crate) dependency: GridDependency,
}

/// Runs a launch while `unfinished` ones may still run.
pub(crate) fn run_launch<'k>(
    kernel: &'k VerifiedKernel,
    launch: &Launch,
    memory: &GlobalMemory,
    unfinished: Option<Unfinished<'_>>,
    options: &Options,
) -> Result<Finished<'k>, SimError> {
    let arguments = launch.check(kernel)?;
    let program = Program::new(kernel);
    if program.steps.len() > MOST_STEPS {
        return Err(LaunchError::TooLong { steps: program.steps.len(), most: MOST_STEPS }.into());
    }
    let _guard = memory.begin_launch().ok_or(LaunchError::MemoryInUse)?;
    let history = GridHistory::new(memory);
    let Ran { counters, dependency } =
        run_grid(&program, launch.grid, &arguments, memory, unfinished, &history, options)?;
    Ok(Finished { counters, program, grid: launch.grid, history, dependency })
}

/// Grid and arguments of a launch.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    /// CTAs in x, y and z.
    pub grid: [u32; 3],
    /// One argument for each parameter.
    pub arguments: Vec<Argument>,
}

/// The arguments of a launch.
#[derive(Debug)]
pub(crate) struct Arguments {
    /// As the bits of their types; tensor maps as their addresses.
    pub(crate) bits: Vec<u64>,
    tensor_maps: Vec<Option<TensorMap>>,
}

/// The start of the addresses of tensor maps, outside every buffer.
const TENSOR_MAPS: u64 = 1 << 62;

impl Arguments {
    fn new(arguments: &[Argument]) -> Self {
        let bits = arguments.iter().zip(0..).map(|(&argument, index)| bits(argument, index)).collect();
        let tensor_maps = arguments.iter().map(|argument| match argument {
            Argument::TensorMap(map) => Some(*map),
            Argument::U32(_) | Argument::S32(_) | Argument::F32(_) | Argument::U64(_) | Argument::S64(_) => None,
        });
        Self { bits, tensor_maps: tensor_maps.collect() }
    }

    /// The tensor map at an address.
    pub(crate) fn tensor_map(&self, address: u64) -> Option<TensorMap> {
        let index = address.checked_sub(TENSOR_MAPS)?;
        let index = index.is_multiple_of(MAP_BYTES).then_some(index / MAP_BYTES)?;
        *self.tensor_maps.get(usize::try_from(index).ok()?)?
    }
}

/// Bytes of a tensor map.
const MAP_BYTES: u64 = 128;

/// The bits of an argument; of a tensor map, its address.
fn bits(argument: Argument, index: u64) -> u64 {
    match argument {
        Argument::U32(value) => value.into(),
        Argument::S32(value) => (value as u32).into(),
        Argument::F32(value) => value.to_bits().into(),
        Argument::U64(value) => value,
        Argument::S64(value) => value as u64,
        Argument::TensorMap(_) => TENSOR_MAPS + MAP_BYTES * index,
    }
}

/// Options of the simulation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Decides how the warps of a CTA interleave. A kernel without faults gives the same results under every seed.
    pub seed: u64,
    /// The most steps that one CTA may take, counted over its warps; more are taken for an endless loop.
    pub step_limit: u64,
    /// The most steps that a warp takes before another may run.
    pub longest_turn: u32,
    /// The addition of tensor cores in `f32`.
    pub tensor_sum: TensorSum,
}

impl Default for Options {
    fn default() -> Self {
        Self { seed: 0, step_limit: 100_000_000, longest_turn: 64, tensor_sum: TensorSum::Exact }
    }
}

/// The outcome of a launch without faults.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// The counters.
    pub counters: Counters,
}

impl Launch {
    /// The bits of the arguments, if the launch fits the kernel.
    fn check(&self, kernel: &VerifiedKernel) -> Result<Arguments, LaunchError> {
        let Self { grid, ref arguments } = *self;
        if arguments.len() != kernel.parameters.len() {
            return Err(LaunchError::ArgumentCount {
                kernel: kernel.name.clone(),
                expected: kernel.parameters.len(),
                actual: arguments.len(),
            });
        }
        for (index, (argument, parameter)) in arguments.iter().zip(&kernel.parameters).enumerate() {
            if argument.ty() != parameter.ty {
                return Err(LaunchError::ArgumentType {
                    index,
                    name: parameter.name.clone(),
                    expected: parameter.ty,
                    actual: argument.ty(),
                });
            }
            if let Argument::TensorMap(map) = argument {
                let invalid = |reason| LaunchError::TensorMap { index, name: parameter.name.clone(), reason };
                map.validate().map_err(invalid)?;
            }
        }
        if grid.contains(&0) {
            return Err(LaunchError::EmptyGrid { grid });
        }
        if grid[0] > i32::MAX as u32 || grid[1].max(grid[2]) > 0xffff || cta_count(grid) > u128::from(MOST_CTAS) {
            return Err(LaunchError::GridTooLarge { grid, most: MOST_CTAS });
        }
        let cluster = kernel.cluster;
        if grid.iter().zip(cluster).any(|(&ctas, of)| !ctas.is_multiple_of(of)) {
            return Err(LaunchError::NotWholeClusters { grid, cluster });
        }
        Ok(Arguments::new(arguments))
    }
}

fn cta_count(grid: [u32; 3]) -> u128 {
    grid.into_iter().map(u128::from).product()
}

/// A cluster by its number.
pub(crate) fn placement(program: &Program<'_>, grid: [u32; 3], cluster: u64) -> Placement {
    let kernel = program.kernel;
    Placement::new(grid, kernel.cluster, kernel.threads.div_ceil(LANES as u32) as usize, cluster)
}

/// The sums over the clusters of a launch.
#[derive(Debug, Clone, Copy, Default)]
struct Ran {
    counters: Counters,
    dependency: GridDependency,
}

impl Ran {
    fn merge(mut self, other: Self) -> Self {
        self.counters += other.counters;
        Self { counters: self.counters, dependency: self.dependency.merge(other.dependency) }
    }
}

fn run_grid(
    program: &Program<'_>,
    grid: [u32; 3],
    arguments: &Arguments,
    memory: &GlobalMemory,
    unfinished: Option<Unfinished<'_>>,
    history: &GridHistory,
    options: &Options,
) -> Result<Ran, SimError> {
    let clusters = core::array::from_fn(|axis| grid[axis] / program.kernel.cluster[axis]);
    let count = cta_count(clusters) as u64;
    // Clusters after one that failed need not run, but all before it must: one of them may fail as well.
    let first_failed = AtomicU64::new(u64::MAX);
    let run_cluster = |cluster: u64| -> Result<Ran, (u64, Failure)> {
        if cluster > first_failed.load(Ordering::Relaxed) {
            return Ok(Ran::default());
        }
        let tensor_sum = options.tensor_sum;
        let scene = Scene { program, arguments, placement: placement(program, grid, cluster), tensor_sum };
        let random = Random::new(options.seed, cluster);
        let finished = run(scene, memory, unfinished, options, random).map_err(|failure| {
            first_failed.fetch_min(cluster, Ordering::Relaxed);
            (cluster, failure)
        })?;
        history.add(cluster, &finished.history);
        Ok(Ran { counters: finished.counters, dependency: finished.dependency })
    };
    let merge = |one: Result<Ran, (u64, Failure)>, other: Result<Ran, (u64, Failure)>| match (one, other) {
        (Ok(one), Ok(other)) => Ok(one.merge(other)),
        (Err(one), Err(other)) => Err(if one.0 < other.0 { one } else { other }),
        (Err(failure), Ok(_)) | (Ok(_), Err(failure)) => Err(failure),
    };
    let result = (0..count).into_par_iter().map(run_cluster).reduce(|| Ok(Ran::default()), merge);
    let ran = result.map_err(|(_, failure)| match failure {
        Failure::Fault(fault) => SimError::Fault(fault),
        Failure::Internal(error) => SimError::Internal(error),
    })?;
    match history.race() {
        Some(race) => Err(SimError::Fault(Box::new(grid_fault(program, grid, race)))),
        None => Ok(ran),
    }
}

fn grid_fault(program: &Program<'_>, grid: [u32; 3], race: GridRace) -> Fault {
    let GridRace { address, first, second } = race;
    let kind = FaultKind::Race {
        space: Space::Global,
        access: second.kind,
        earlier_access: first.kind,
        earlier: Box::new(program.location_of(first.stamp, &placement(program, grid, first.cluster), address)),
    };
    Fault { kind, location: program.location_of(second.stamp, &placement(program, grid, second.cluster), address) }
}
