//! Append and merge in the simulator, on tensors of their own with unmapped memory around each.

use flashcore_kernels::merge::UNWRITTEN;
use flashcore_kernels::{LaunchPlan, LaunchValues};
use flashcore_problem::{
    AppendProblem, Inputs, MergeProblem, Operand, Outputs, Scale, ScaleStrides, Tensor, append_oracle_with,
    merge_oracle,
};
use flashcore_sim::GlobalMemory;

use crate::testkit::simulate::launch_all;

/// Reason why the kernel of an operation is not right.
#[derive(Debug, thiserror::Error)]
pub enum OperationError {
    /// The simulator stopped it.
    #[error("{0}")]
    Simulator(String),
    /// The oracle gives other numbers.
    #[error("{0}")]
    Wrong(String),
}

/// Runs a plan.
fn run(plan: &LaunchPlan, values: &LaunchValues, memory: &GlobalMemory, seed: u64) -> Result<(), OperationError> {
    launch_all(plan, values, memory, seed).map(|_| ()).map_err(|error| OperationError::Simulator(error.to_string()))
}

pub(super) fn place(memory: &mut GlobalMemory, name: &'static str, bytes: &[u8]) -> u64 {
    if bytes.is_empty() { 0 } else { memory.allocate(name, bytes) }
}

/// Place of the outputs of a simulated append.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// Two caches; the query goes to another tensor.
    Separate,
    /// One memory for both caches, values so many elements after keys; the query is rotated in place.
    Interleaved {
        /// The elements.
        offset: usize,
    },
}

/// The words of scales in the memory of the simulator, and the addresses of those that are written.
pub(super) fn place_scales(
    memory: &mut GlobalMemory,
    given: [Option<&Scale>; 2],
    written: [Option<&Scale>; 2],
) -> [(u64, ScaleStrides); 2] {
    let mut placed = [(0, ScaleStrides::TENSOR); 2];
    for (index, name) in ["k_scale", "v_scale"].into_iter().enumerate() {
        if let Some(scale) = written[index].or(given[index]) {
            let bytes: Vec<u8> = scale.data.iter().flat_map(|number| number.to_le_bytes()).collect();
            placed[index] = (place(memory, name, &bytes), scale.strides);
        }
    }
    placed
}

/// Sets addresses and strides of the scales of keys and values.
pub(super) fn set_scales(values: &mut LaunchValues, scales: [(u64, ScaleStrides); 2]) {
    for (operand, (address, strides)) in [Operand::KScale, Operand::VScale].into_iter().zip(scales) {
        if let (Some(index), true) = (operand.scale_index(), address != 0) {
            values.set(operand, address);
            values.strides.scales[index] = strides;
        }
    }
}

/// Scales as they are in the memory of the simulator.
pub(super) fn read_scale(memory: &GlobalMemory, address: u64, scale: &mut Scale) {
    let words = memory.read(address);
    scale.data = words.chunks_exact(4).map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect();
}

/// Appends random numbers in the simulator and judges the caches and the query against the oracle: nothing, or what is
/// wrong. Everything that is not to be read holds poison, and so does everything that is to be written.
pub fn check_append(
    plan: &LaunchPlan,
    problem: &AppendProblem,
    placement: Placement,
    seed: u64,
) -> Result<(), OperationError> {
    let wrong = OperationError::Wrong;
    let data = problem.random_with_strays(seed);
    let mut before = problem.poisoned();
    let strides = before.scale_strides(problem.key_cache_shape());
    let expected = append_oracle_with(problem, &data.views(), strides).map_err(|invalid| wrong(invalid.to_string()))?;
    if let Placement::Interleaved { offset } = placement {
        let elements = before.key_cache.len().max(before.value_cache.len() + offset);
        before.key_cache = Tensor::poisoned(problem.cache_dtype(), elements);
        before.query_output = data.query.clone();
    }
    let mut memory = GlobalMemory::new();
    let element = problem.cache_dtype().size_bytes();
    let (mut values, views) = (LaunchValues::NONE, data.views());
    for operand in Operand::ALL.iter().copied().filter(|&operand| operand != Operand::Query && !operand.is_scale()) {
        let bytes = views.bytes(operand).or_else(|| match operand {
            Operand::KeyCache => Some(&before.key_cache.data[..]),
            Operand::QueryOutput => Some(&before.query_output.data[..]),
            _ => None,
        });
        values.set(operand, place(&mut memory, operand.name(), bytes.unwrap_or_default()));
    }
    match placement {
        Placement::Separate => {
            values.set(Operand::ValueCache, place(&mut memory, "value_cache", &before.value_cache.data));
            values.set(Operand::Query, place(&mut memory, "query", &data.query.data));
        }
        Placement::Interleaved { offset } => {
            values.set(Operand::ValueCache, values.address(Operand::KeyCache) + (offset * element) as u64);
            values.set(Operand::Query, values.address(Operand::QueryOutput));
        }
    }
    let scales = place_scales(
        &mut memory,
        [data.k_scale.as_ref(), data.v_scale.as_ref()],
        [before.k_scale.as_ref(), before.v_scale.as_ref()],
    );
    set_scales(&mut values, scales);
    run(plan, &values, &memory, seed)?;
    let mut after = before.clone();
    for (scale, (address, _)) in [&mut after.k_scale, &mut after.v_scale].into_iter().zip(scales) {
        if let Some(scale) = scale {
            read_scale(&memory, address, scale);
        }
    }
    let expected = expected.with_computed_scales(before.scales(), after.scales()).map_err(wrong)?;
    let read = |address: u64| if address == 0 { Vec::new() } else { memory.read(address) };
    let key_cache = read(values.address(Operand::KeyCache));
    match placement {
        Placement::Separate => {
            expected.check_key_cache(&before.key_cache.data, &key_cache).map_err(wrong)?;
            expected
                .check_value_cache(&before.value_cache.data, &read(values.address(Operand::ValueCache)))
                .map_err(wrong)?;
        }
        Placement::Interleaved { offset } => {
            expected.check_interleaved(offset, &before.key_cache.data, &key_cache).map_err(wrong)?;
        }
    }
    expected.check_query(&before.query_output.data, &read(values.address(Operand::QueryOutput))).map_err(wrong)
}

/// Merges the second of two random parts into the first in the simulator, with some rows of the second unwritten, and
/// judges output and LSE against the oracle: nothing, or what is wrong. Unwritten rows of both parts hold poison, and those
/// of the first must keep it.
pub fn check_merge_in_place(plan: &LaunchPlan, problem: &MergeProblem, seed: u64) -> Result<(), OperationError> {
    let mut data = problem.random(seed);
    let (strides, bytes) = (problem.strides, problem.value_dim * problem.dtype.size_bytes());
    let rows = (0..problem.tokens).flat_map(|token| (0..problem.heads).map(move |head| (token, head)));
    let unwritten: Vec<_> = rows.filter(|(token, head)| (token * problem.heads + head) % 5 == 2).collect();
    for &(token, head) in &unwritten {
        let start = strides.part.row_start(0, head, token) * problem.dtype.size_bytes();
        let index = strides.part_lse.row_start(0, head, token);
        data.part_outputs.iter_mut().for_each(|output| output.data[start..start + bytes].fill(0xFF));
        for lse in &mut data.part_lses {
            lse.data[index * 4..][..4].copy_from_slice(&UNWRITTEN.to_le_bytes());
        }
    }
    let mut memory = GlobalMemory::new();
    let [output, part] = [0, 1].map(|part| place(&mut memory, "output", &data.part_outputs[part].data));
    let [lse, part_lse] = [0, 1].map(|part| place(&mut memory, "lse", &data.part_lses[part].data));
    let mut values = LaunchValues::NONE;
    for (operand, address) in
        [(Operand::Output, output), (Operand::Lse, lse), (Operand::PartOutputs, part), (Operand::PartLses, part_lse)]
    {
        values.set(operand, address);
    }
    run(plan, &values, &memory, seed)?;
    let mut found = Tensor { dtype: problem.dtype, data: memory.read(output) };
    let words = memory.read(lse);
    let mut found_lse: Vec<f32> =
        words.chunks_exact(4).map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect();
    // Rows that must be as they were are taken out of the comparison: both parts are empty there for the oracle.
    for &(token, head) in &unwritten {
        let start = strides.part.row_start(0, head, token) * problem.dtype.size_bytes();
        let index = strides.part_lse.row_start(0, head, token);
        if found.data[start..start + bytes].iter().any(|&byte| byte != 0xFF) || found_lse[index].to_bits() != UNWRITTEN
        {
            let complaint = format!("head {head} of token {token} was written, and the second part has no such row");
            return Err(OperationError::Wrong(complaint));
        }
        found.data[start..start + bytes].fill(0);
        found_lse[index] = f32::NEG_INFINITY;
        data.part_lses.iter_mut().for_each(|lse| lse.set(index, f64::NEG_INFINITY));
    }
    let expected =
        merge_oracle(problem, &data.views()).map_err(|invalid| OperationError::Simulator(invalid.to_string()))?;
    let found = Outputs { output: found, lse: Some(found_lse), ..Outputs::default() };
    expected.check(problem, &found).map_err(OperationError::Wrong)
}

/// Merges random parts in the simulator and judges the result against the oracle: nothing, or what is wrong.
pub fn check_merge(plan: &LaunchPlan, problem: &MergeProblem, seed: u64) -> Result<(), OperationError> {
    check_merge_of(plan, problem, &problem.random(seed), seed)
}

/// Merges random parts on the CPU and judges the result against the oracle: nothing, or what is wrong.
pub fn check_merge_on_cpu(problem: &MergeProblem, seed: u64) -> Result<(), String> {
    let (inputs, mut outputs) = (problem.random(seed), problem.poisoned());
    let expected = merge_oracle(problem, &inputs.views()).map_err(|invalid| invalid.to_string())?;
    flashcore_cpu::merge(problem, &inputs.views(), outputs.views_mut()).map_err(|invalid| invalid.to_string())?;
    expected.check(problem, &outputs)
}

/// [`check_merge`] of given parts.
pub fn check_merge_of(
    plan: &LaunchPlan,
    problem: &MergeProblem,
    data: &Inputs,
    seed: u64,
) -> Result<(), OperationError> {
    let expected =
        merge_oracle(problem, &data.views()).map_err(|invalid| OperationError::Simulator(invalid.to_string()))?;
    let mut memory = GlobalMemory::new();
    let stack = |parts: &[Tensor]| parts.iter().flat_map(|part| part.data.iter().copied()).collect::<Vec<u8>>();
    let (stacked, stacked_lse) = (stack(&data.part_outputs), stack(&data.part_lses));
    let outputs = problem.poisoned();
    let mut values = LaunchValues::NONE;
    values.part_strides = [&stacked, &stacked_lse].map(|stacked| (stacked.len() / problem.num_parts) as u64);
    for (operand, bytes) in [
        (Operand::PartOutputs, &stacked[..]),
        (Operand::PartLses, &stacked_lse),
        (Operand::Output, &outputs.output.data),
        (Operand::Lse, outputs.slot(Operand::Lse).map_or(&[], |slot| slot.data)),
    ] {
        values.set(operand, place(&mut memory, operand.name(), bytes));
    }
    run(plan, &values, &memory, seed)?;
    let found = Tensor { dtype: problem.dtype, data: memory.read(values.address(Operand::Output)) };
    let found_lse: Option<Vec<f32>> = problem.lse.then(|| {
        let bytes = memory.read(values.address(Operand::Lse));
        bytes.chunks_exact(4).map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect()
    });
    let found = Outputs { output: found, lse: found_lse, ..Outputs::default() };
    expected.check(problem, &found).map_err(OperationError::Wrong)
}
