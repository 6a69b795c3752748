//! A planned kernel in the simulator, on the tensors of a problem.

use flashcore_kernels::{Argument, Buffers, Plan};
use flashcore_problem::{BiasStrides, DType, Inputs, Outputs, Problem, Shape, Strides, Tensor};
use flashcore_sim::{Counters, GlobalMemory, Launch, Options, SimError, launch};

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
pub fn simulate(plan: &Plan, problem: &Problem, inputs: &Inputs, seed: u64) -> Result<Simulation, SimError> {
    let mut outputs = Outputs::poisoned(problem);
    let mut memory = GlobalMemory::new();
    let query = memory.allocate("query", &inputs.query.data);
    let key = memory.allocate("key", &inputs.key.data);
    let value = memory.allocate("value", &inputs.value.data);
    let output = memory.allocate_uninitialised("output", outputs.output.data.len());
    let rows = outputs.lse.as_ref().map_or(0, Vec::len);
    let lse = memory.allocate_uninitialised("lse", rows * 4);
    let mut buffers = Buffers { lse, ..Buffers::new(query, key, value, output) };
    allocate_numbers(&mut memory, inputs, &mut buffers);
    buffers.workspace = memory.allocate_uninitialised("workspace", plan.workspace_bytes() as usize);
    let counters = launch_all(plan, buffers, &memory, seed)?;

    copy_written(&memory, output, &mut outputs.output.data);
    if let Some(values) = &mut outputs.lse {
        let mut bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        copy_written(&memory, lse, &mut bytes);
        for (value, bytes) in values.iter_mut().zip(bytes.chunks_exact(4)) {
            *value = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
    }
    let after = |dtype: DType, address: u64| Tensor { dtype, data: memory.read(address) };
    let inputs_after = Inputs {
        query: after(problem.dtype, query),
        key: after(problem.dtype, key),
        value: after(problem.dtype, value),
        ..inputs.clone()
    };
    Ok(Simulation { outputs, inputs_after, counters, workspace: memory.read(buffers.workspace) })
}

/// Runs the plan of a problem whose tensors lie `far` apart, on the numbers of `problem`, which lie close. What is stored
/// outside of the rows of the output is not looked for.
pub fn simulate_far(
    plan: &Plan,
    far: &FarApart,
    problem: &Problem,
    inputs: &Inputs,
    seed: u64,
) -> Result<Simulation, SimError> {
    let mut memory = GlobalMemory::new();
    let (near, wide) = (problem.strides(), far.problem.strides());
    let query = Rows::new(problem.query_shape(), near.query, wide.query, problem.dtype);
    let key = Rows::new(problem.key_shape(), near.key, wide.key, problem.dtype);
    let value = Rows::new(problem.value_shape(), near.value, wide.value, problem.dtype);
    let output = Rows::new(problem.output_shape(), near.output, wide.output, problem.dtype);
    let reach = |shape: Shape, strides: Strides| strides.extent(shape).unwrap_or(0);
    let mut place = |name, rows: Rows, shape: Shape, strides: Strides, data: Option<&Tensor>| {
        let bytes = reach(shape, strides) as u64 * problem.dtype.size_bytes() as u64;
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
    let mut buffers = Buffers { lse, ..Buffers::new(query_address, key_address, value_address, output_address) };
    allocate_numbers(&mut memory, inputs, &mut buffers);
    if let (Some(strides), Some(bias)) = (far.bias, &inputs.bias) {
        let last = |size: usize| size.saturating_sub(1);
        let [batch, heads, rows, keys] = [problem.batch, problem.query_heads, problem.query_length, problem.key_length];
        let length = strides.index(last(batch), last(heads), last(rows), last(keys)) as u64 * 4 + 4;
        buffers.bias = memory.allocate_sparse("bias", length);
        buffers.bias_strides = strides;
        for (batch, head, row) in problem.output_shape().each_row() {
            for key in 0..keys {
                let term = bias.data[bias.strides.index(batch, head, row, key)];
                let to = strides.index(batch, head, row, key) as u64 * 4;
                memory.write_at(buffers.bias, to, &term.to_le_bytes());
            }
        }
    }
    buffers.workspace = memory.allocate_sparse("workspace", plan.workspace_bytes());
    let counters = launch_all(plan, buffers, &memory, seed)?;

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

fn launch_all(plan: &Plan, mut buffers: Buffers, memory: &GlobalMemory, seed: u64) -> Result<Counters, SimError> {
    let mut counters = Counters::default();
    buffers.tile_ranges = buffers.workspace + plan.ranges_offset();
    for (kernel, grid, arguments) in plan.launches(buffers) {
        let arguments = arguments.into_iter().map(argument).collect();
        let options = Options { seed, ..Options::default() };
        counters += launch(kernel, &Launch { grid, arguments }, memory, &options)?.counters;
    }
    Ok(counters)
}

/// Key lengths, slopes, sinks, bias and tables, where there are any.
fn allocate_numbers(memory: &mut GlobalMemory, inputs: &Inputs, buffers: &mut Buffers) {
    let mut allocate = |name, bytes: Option<Vec<u8>>| bytes.map_or(0, |bytes| memory.allocate(name, &bytes));
    let floats = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let lengths = |values: &[u32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    buffers.seqused_k = allocate("seqused_k", inputs.seqused_k.as_deref().map(lengths));
    buffers.alibi_slopes = allocate("alibi_slopes", inputs.alibi_slopes.as_deref().map(floats));
    buffers.sinks = allocate("sinks", inputs.sinks.as_deref().map(floats));
    buffers.bias = allocate("bias", inputs.bias.as_ref().map(|bias| floats(&bias.data)));
    let integers = |values: &[i32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    buffers.aux_f32 = allocate("aux_f32", inputs.aux_f32.as_deref().map(floats));
    buffers.aux_i32 = allocate("aux_i32", inputs.aux_i32.as_deref().map(integers));
    if let Some(bias) = &inputs.bias {
        buffers.bias_strides = bias.strides;
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

fn argument(argument: Argument) -> flashcore_sim::Argument {
    match argument {
        Argument::U32(value) => flashcore_sim::Argument::U32(value),
        Argument::S32(value) => flashcore_sim::Argument::S32(value),
        Argument::F32(value) => flashcore_sim::Argument::F32(value),
        Argument::U64(value) => flashcore_sim::Argument::U64(value),
        Argument::S64(value) => flashcore_sim::Argument::S64(value),
        Argument::TensorMap(map) => flashcore_sim::Argument::TensorMap(map),
    }
}
