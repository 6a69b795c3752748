//! A planned kernel in the simulator, on the tensors of a problem.

use flashcore_kernels::{KernelLaunch, LaunchPlan, LaunchValues};
use flashcore_problem::{BiasStrides, DType, Inputs, Operand, Outputs, Problem, Shape, Strides, Tensor};
use flashcore_sim::{Counters, GlobalMemory, Launch, Options, SimError, Stream, TensorSum};

use crate::testkit::next_launch::NextLaunch;

/// Results of a simulated launch.
#[derive(Debug)]
pub struct Simulation {
    /// The outputs, where something was written; poison elsewhere.
    pub outputs: Outputs,
    /// The inputs afterwards.
    pub inputs_after: Inputs,
    /// Counters of the simulator.
    pub counters: Counters,
    /// The memory that the kernels use among themselves, as they left it; none where it reaches far.
    pub workspace: Vec<u8>,
}

/// Tensors that lie further apart than a machine has memory for: the same numbers in a sparse memory.
#[derive(Debug, Clone)]
pub struct FarApart {
    /// The problem, as the plan has it: the same but for its layout, and for rows past the end.
    pub problem: Problem,
    /// Strides of the bias, where there is one.
    pub bias: Option<BiasStrides>,
}

/// Runs the plan of `problem` on `inputs`, the warps in an order that follows from `seed`.
///
/// Each tensor is a buffer of its own with unmapped memory around it, so that an access outside is a fault.
pub fn simulate(plan: &LaunchPlan, problem: &Problem, inputs: &Inputs, seed: u64) -> Result<Simulation, SimError> {
    simulate_with_sums(plan, problem, inputs, seed, None)
}

/// The same with tensor cores that add in the given way, and not in the way by which kernels of that type are judged.
pub fn simulate_with_sums(
    plan: &LaunchPlan,
    problem: &Problem,
    inputs: &Inputs,
    seed: u64,
    sums: Option<TensorSum>,
) -> Result<Simulation, SimError> {
    let mut outputs = Outputs::poisoned(problem);
    let mut memory = GlobalMemory::new();
    let mut values = allocate_inputs(&mut memory, inputs);
    let rows = outputs.lse.as_ref().map_or(0, Vec::len);
    values.set(Operand::Output, memory.allocate_uninitialised("output", outputs.output.data.len()));
    values.set(Operand::Lse, memory.allocate_uninitialised("lse", rows * 4));
    values.workspace = memory.allocate_uninitialised("workspace", plan.workspace_bytes as usize);
    let counters = launch_all_with_sums(plan, &values, &memory, seed, sums)?;

    copy_outputs(&memory, &values, &mut outputs);
    let after: Vec<_> = Operand::ALL.iter().map(|&operand| memory_of(&memory, &values, inputs, operand)).collect();
    let inputs_after = inputs.views().in_other_memory(|operand| &after[operand as usize]).to_owned_inputs();
    Ok(Simulation { outputs, inputs_after, counters, workspace: memory.read(values.workspace) })
}

/// Runs the plan of a problem whose tensors lie `far` apart, on the numbers of `problem`, which lie close. What is stored
/// outside of the rows of the output is not looked for.
pub fn simulate_far(
    plan: &LaunchPlan,
    far: &FarApart,
    problem: &Problem,
    inputs: &Inputs,
    seed: u64,
) -> Result<Simulation, SimError> {
    let mut memory = GlobalMemory::new();
    let (near, wide, types) = (problem.strides(), far.problem.strides(), problem.dtypes());
    let query = Rows::new(problem.query_shape(), near.query, wide.query, types.query);
    let key = Rows::new(problem.key_shape(), near.key, wide.key, types.key_value);
    let value = Rows::new(problem.value_shape(), near.value, wide.value, types.key_value);
    let output = Rows::new(problem.output_shape(), near.output, wide.output, types.output);
    let reach = |shape: Shape, strides: Strides| strides.extent(shape).unwrap_or(0);
    let mut place = |name, rows: Rows, shape: Shape, strides: Strides, data: Option<&Tensor>| {
        let bytes = reach(shape, strides) as u64 * rows.element as u64;
        let address = memory.allocate_sparse(name, bytes);
        for (from, to) in
            data.iter().flat_map(|data| rows.each().map(move |(near, far)| (&data.data[near..][..rows.bytes], far)))
        {
            memory.write_at(address, to, from);
        }
        address
    };
    let query_address = place("query", query, far.problem.query_shape(), wide.query, Some(&inputs.query));
    let key_address = place("key", key, far.problem.key_shape(), wide.key, Some(&inputs.key));
    let value_address = place("value", value, far.problem.value_shape(), wide.value, Some(&inputs.value));
    let output_address = place("output", output, far.problem.output_shape(), wide.output, None);
    let all_rows = Shape { columns: 1, ..far.problem.output_shape() };
    let sums = Strides::bhsd(all_rows);
    let lse = memory.allocate_sparse("lse", reach(all_rows, sums) as u64 * 4);
    let mut values = allocate_inputs(&mut memory, inputs);
    for (operand, address) in [
        (Operand::Query, query_address),
        (Operand::Key, key_address),
        (Operand::Value, value_address),
        (Operand::Output, output_address),
        (Operand::Lse, lse),
    ] {
        values.set(operand, address);
    }
    if let (Some(strides), Some(bias)) = (far.bias, &inputs.bias) {
        let last = |size: usize| size.saturating_sub(1);
        let [batch, heads, rows, keys] = [problem.batch, problem.query_heads, problem.query_length, problem.key_length];
        let length = strides.index(last(batch), last(heads), last(rows), last(keys)) as u64 * 4 + 4;
        let address = memory.allocate_sparse("bias", length);
        values.set(Operand::Bias, address);
        values.strides.bias = strides;
        for (batch, head, row) in problem.output_shape().each_row() {
            for key in 0..keys {
                let term = bias.data[bias.strides.index(batch, head, row, key)];
                let to = strides.index(batch, head, row, key) as u64 * 4;
                memory.write_at(address, to, &term.to_le_bytes());
            }
        }
    }
    values.workspace = memory.allocate_sparse("workspace", plan.workspace_bytes);
    let counters = launch_all(plan, &values, &memory, seed)?;

    let mut outputs = Outputs::poisoned(problem);
    for (near, far) in output.each() {
        let bytes = memory.read_at(output_address, far, output.bytes);
        outputs.output.data[near..][..output.bytes].copy_from_slice(&bytes);
    }
    if let Some(values) = &mut outputs.lse {
        for (value, (batch, head, row)) in values.iter_mut().zip(problem.output_shape().each_row()) {
            let bytes = memory.read_at(lse, sums.row_start(batch, head, row) as u64 * 4, 4);
            *value = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
    }
    let mut inputs_after = inputs.clone();
    for (tensor, rows, address) in [
        (&mut inputs_after.query, query, query_address),
        (&mut inputs_after.key, key, key_address),
        (&mut inputs_after.value, value, value_address),
    ] {
        for (near, far) in rows.each() {
            tensor.data[near..][..rows.bytes].copy_from_slice(&memory.read_at(address, far, rows.bytes));
        }
    }
    Ok(Simulation { outputs, inputs_after, counters, workspace: Vec::new() })
}

/// Rows that lie close in one place and far apart in another.
#[derive(Clone, Copy)]
struct Rows {
    shape: Shape,
    near: Strides,
    far: Strides,
    element: usize,
    /// Of a row.
    bytes: usize,
}

impl Rows {
    const fn new(shape: Shape, near: Strides, far: Strides, dtype: DType) -> Self {
        let element = dtype.size_bytes();
        Self { shape, near, far, element, bytes: shape.columns * element }
    }

    /// The bytes at which each begins, in both places.
    fn each(self) -> impl Iterator<Item = (usize, u64)> {
        self.shape.each_row().map(move |(batch, head, row)| {
            let near = self.near.row_start(batch, head, row) * self.element;
            (near, self.far.row_start(batch, head, row) as u64 * self.element as u64)
        })
    }
}

/// Runs the kernels of a plan, as [`launch_all_with_sums`] does.
pub(super) fn launch_all(
    plan: &LaunchPlan,
    values: &LaunchValues,
    memory: &GlobalMemory,
    seed: u64,
) -> Result<Counters, SimError> {
    launch_all_with_sums(plan, values, memory, seed, None)
}

/// Runs the kernels of a plan. Where some overlap with the launch before them (PDL), an unknown launch still runs as they
/// begin, and another follows.
fn launch_all_with_sums(
    plan: &LaunchPlan,
    values: &LaunchValues,
    memory: &GlobalMemory,
    seed: u64,
    sums: Option<TensorSum>,
) -> Result<Counters, SimError> {
    let mut counters = Counters::default();
    let kernels: Vec<_> = plan.launches.iter().map(KernelLaunch::kernel).collect();
    let overlaps = plan.launches.iter().any(KernelLaunch::overlaps_previous);
    let next;
    let mut stream = if overlaps { Stream::busy(memory) } else { Stream::idle(memory) };
    for (planned, kernel) in plan.launches.iter().zip(&kernels) {
        // Tensor cores cut sums off: below what 16 bits show, and not below what `f32` does. How early they do of 8 bits
        // nobody has measured here, so that kernels of those are judged by exact sums.
        let tensor_sum =
            sums.unwrap_or(match planned.key.spec.specialization().map(|specialization| specialization.dtype) {
                Some(DType::F32) => TensorSum::H200,
                _ => TensorSum::Exact,
            });
        let options = Options { seed, tensor_sum, ..Options::default() };
        let grid = planned.grid_of(values);
        if grid.contains(&0) {
            continue;
        }
        let described = Launch { grid, arguments: planned.arguments(values) };
        counters += stream.launch(kernel, &described, planned.overlaps_previous(), &options)?.counters;
    }
    if overlaps {
        next = NextLaunch::new(plan, values, memory);
        next.launch(&mut stream, &Options { seed, ..Options::default() })?;
    }
    Ok(counters)
}

/// A buffer for each input that is there.
fn allocate_inputs(memory: &mut GlobalMemory, inputs: &Inputs) -> LaunchValues {
    let views = inputs.views();
    let mut values = LaunchValues::NONE;
    for operand in Operand::inputs() {
        if let Some(bytes) = views.bytes(operand) {
            values.set(operand, memory.allocate(operand.name(), bytes));
        }
    }
    values.strides = views.call_strides();
    values
}

/// The bytes of an input after the launch; nothing for one that is not there.
fn memory_of(memory: &GlobalMemory, values: &LaunchValues, inputs: &Inputs, operand: Operand) -> Vec<u8> {
    inputs.views().bytes(operand).map_or_else(Vec::new, |_| memory.read(values.address(operand)))
}

/// Copies what was written of the outputs.
pub(super) fn copy_outputs(memory: &GlobalMemory, values: &LaunchValues, outputs: &mut Outputs) {
    copy_written(memory, values.address(Operand::Output), &mut outputs.output.data);
    if let Some(rows) = &mut outputs.lse {
        let mut bytes: Vec<u8> = rows.iter().flat_map(|value| value.to_le_bytes()).collect();
        copy_written(memory, values.address(Operand::Lse), &mut bytes);
        for (value, bytes) in rows.iter_mut().zip(bytes.chunks_exact(4)) {
            *value = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
    }
}

fn copy_written(memory: &GlobalMemory, address: u64, target: &mut [u8]) {
    let poison = target.to_vec();
    target.copy_from_slice(&memory.read(address));
    for range in memory.unwritten(address) {
        let range = range.start as usize..range.end as usize;
        target[range.clone()].copy_from_slice(&poison[range]);
    }
}
