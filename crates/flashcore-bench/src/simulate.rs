//! A planned kernel in the simulator, on the tensors of a problem.

use flashcore_kernels::{Argument, Buffers, Plan};
use flashcore_problem::{DType, Inputs, Outputs, Problem, Tensor};
use flashcore_sim::{Counters, GlobalMemory, Launch, Options, SimError, launch};

/// What a simulated launch left behind.
#[derive(Debug)]
pub struct Simulation {
    /// The outputs, where something was written; poison elsewhere.
    pub outputs: Outputs,
    /// The inputs afterwards.
    pub inputs_after: Inputs,
    /// What the simulator counted.
    pub counters: Counters,
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
    let rows = outputs.log_sum_exp.as_ref().map_or(0, Vec::len);
    let log_sum_exp = memory.allocate_uninitialised("log_sum_exp", rows * 4);
    let mut buffers = Buffers { log_sum_exp, ..Buffers::new(query, key, value, output) };
    allocate_numbers(&mut memory, inputs, &mut buffers);
    buffers.workspace = memory.allocate_uninitialised("workspace", plan.workspace_bytes() as usize);
    let mut counters = Counters::default();
    buffers.tile_ranges = buffers.workspace + plan.ranges_offset();
    for (kernel, grid, arguments) in plan.launches(buffers) {
        let arguments = arguments.into_iter().map(argument).collect();
        let options = Options { seed, ..Options::default() };
        counters += launch(kernel, &Launch { grid, arguments }, &memory, &options)?.counters;
    }

    copy_written(&memory, output, &mut outputs.output.data);
    if let Some(values) = &mut outputs.log_sum_exp {
        let mut bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        copy_written(&memory, log_sum_exp, &mut bytes);
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
    Ok(Simulation { outputs, inputs_after, counters })
}

/// Key lengths, slopes, sinks, bias and tables, where there are any.
fn allocate_numbers(memory: &mut GlobalMemory, inputs: &Inputs, buffers: &mut Buffers) {
    let mut allocate = |name, bytes: Option<Vec<u8>>| bytes.map_or(0, |bytes| memory.allocate(name, &bytes));
    let floats = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let lengths = |values: &[u32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    buffers.key_lengths = allocate("key_lengths", inputs.key_lengths.as_deref().map(lengths));
    buffers.alibi_slopes = allocate("alibi_slopes", inputs.alibi_slopes.as_deref().map(floats));
    buffers.sinks = allocate("sinks", inputs.sinks.as_deref().map(floats));
    buffers.bias = allocate("bias", inputs.bias.as_ref().map(|bias| floats(&bias.data)));
    let integers = |values: &[i32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    buffers.number_table = allocate("number_table", inputs.number_table.as_deref().map(floats));
    buffers.integer_table = allocate("integer_table", inputs.integer_table.as_deref().map(integers));
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
