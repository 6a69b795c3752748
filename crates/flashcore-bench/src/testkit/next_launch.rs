//! The launch after a plan in the simulator, which begins as early as programmatic dependent launch (PDL) lets it.

use flashcore_ir::types::{U16, U64};
use flashcore_ir::{Arch, Builder, Compare, VerifiedKernel};
use flashcore_kernels::{LaunchPlan, LaunchValues, Stage};
use flashcore_problem::Operand;
use flashcore_sim::{Argument, GlobalMemory, Launch, Options, SimError, Stream};

/// The inputs that it begins with: no plan writes them, and none of them is empty.
const INPUTS: [Operand; 7] = [
    Operand::Query,
    Operand::CuSeqlensQ,
    Operand::CuSeqlensK,
    Operand::SequsedQ,
    Operand::SequsedK,
    Operand::LeftpadK,
    Operand::KvBatchIdx,
];

/// The kernel, and the addresses it is launched with.
pub(super) struct NextLaunch {
    kernel: VerifiedKernel,
    arguments: Vec<Argument>,
}

impl NextLaunch {
    /// A launch on memory of a plan that has run.
    ///
    /// Before its wait it reads what the last launch of the plan does not write, but older ones may: the first bytes of each
    /// input, and of what the kernels of the plan hand each other. A launch that triggers after its own wait vouches for the
    /// ones before. After its wait it overwrites these bytes with the same, which nothing must read any more.
    pub(super) fn new(plan: &LaunchPlan, values: &LaunchValues, memory: &GlobalMemory) -> Self {
        let inputs = INPUTS.iter().map(|&operand| values.address(operand)).filter(|&address| address != 0);
        // The counter of a dynamic scheduler is written by the last launch.
        let handed = plan.launch(Stage::ResetCounter).is_none().then(|| first_written(plan, values, memory)).flatten();
        let addresses: Vec<u64> = inputs.chain(handed).collect();
        let mut builder = Builder::new("next_launch", 32);
        let k = &mut builder;
        let inputs: Vec<_> = (0..addresses.len()).map(|index| k.parameter::<U64>(&format!("input{index}"))).collect();
        let lane = k.lane();
        let is_first = k.compare(Compare::Eq, lane, 0u32);
        k.if_then(is_first, |k| {
            let bytes: Vec<_> = inputs.iter().map(|&input| k.load_one::<U16>(input)).collect();
            k.grid_dependency_wait();
            inputs.iter().zip(bytes).for_each(|(&input, bytes)| k.store_one(input, bytes));
        });
        let kernel = builder.finish().verify(Arch::Sm90).expect("it keeps the rules");
        Self { kernel, arguments: addresses.into_iter().map(Argument::U64).collect() }
    }

    /// Launches it.
    pub(super) fn launch<'k>(&'k self, stream: &mut Stream<'k, '_>, options: &Options) -> Result<(), SimError> {
        let described = Launch { grid: [1, 1, 1], arguments: self.arguments.clone() };
        stream.launch(&self.kernel, &described, true, options).map(|_| ())
    }
}

/// The first bytes of the workspace that hold something.
fn first_written(plan: &LaunchPlan, values: &LaunchValues, memory: &GlobalMemory) -> Option<u64> {
    let unwritten = memory.unwritten(values.workspace);
    let offset = unwritten.first().filter(|range| range.start == 0).map_or(0, |range| range.end);
    (offset < plan.workspace_bytes).then_some(values.workspace + offset)
}
