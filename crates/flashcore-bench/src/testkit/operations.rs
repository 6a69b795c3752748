//! Append and merge in the simulator, on tensors of their own with unmapped memory around each.

use flashcore_kernels::cache::{AppendPlan, AppendValues};
use flashcore_kernels::merge::{MergePlan, MergeValues};
use flashcore_kernels::{Argument, KernelKey};
use flashcore_problem::{
    AppendData, AppendProblem, CacheMemory, MergeData, MergeProblem, Tensor, append_oracle, merge_oracle,
};
use flashcore_sim::{GlobalMemory, Launch, Options, launch};

/// Runs a kernel whose first arguments are words.
fn run(
    key: KernelKey,
    grid: [u32; 3],
    template: &[Argument],
    words: &[u64],
    memory: &GlobalMemory,
    seed: u64,
) -> Result<(), String> {
    let kernel = key.kernel().map_err(|errors| format!("{errors:?}"))?;
    let mut arguments = template.to_vec();
    for (argument, &word) in arguments.iter_mut().zip(words) {
        *argument = Argument::U64(word);
    }
    let options = Options { seed, ..Options::default() };
    launch(&kernel, &Launch { grid, arguments }, memory, &options).map(|_| ()).map_err(|error| error.to_string())
}

pub(super) fn place(memory: &mut GlobalMemory, name: &'static str, bytes: &[u8]) -> u64 {
    if bytes.is_empty() { 0 } else { memory.allocate(name, bytes) }
}

fn integers<const N: usize>(values: &[i64], bytes: impl Fn(i64) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&value| bytes(value)).collect()
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

/// Appends random numbers in the simulator and judges the caches and the query against the oracle: nothing, or what is
/// wrong. Everything that is not to be read holds poison, and so does everything that is to be written.
pub fn check_append(plan: &AppendPlan, problem: &AppendProblem, placement: Placement, seed: u64) -> Result<(), String> {
    let data = AppendData::random(problem, seed);
    let expected = append_oracle(problem, &data.inputs()).map_err(|invalid| invalid.to_string())?;
    let mut before = CacheMemory::poisoned(problem);
    if let Placement::Interleaved { offset } = placement {
        let elements = before.key_cache.len().max(before.value_cache.len() + offset);
        before.key_cache = Tensor::poisoned(problem.dtype, elements);
        before.query = data.query.clone();
    }
    let mut memory = GlobalMemory::new();
    let element = problem.dtype.size_bytes();
    let mut values = AppendValues {
        key: place(&mut memory, "key", &data.key.data),
        value: place(&mut memory, "value", &data.value.data),
        key_cache: place(&mut memory, "key_cache", &before.key_cache.data),
        slot_mapping: place(&mut memory, "slot_mapping", &integers(&data.slot_mapping, i64::to_le_bytes)),
        query_output: place(&mut memory, "query_output", &before.query.data),
        cos: place(&mut memory, "cos", &data.cos.data),
        sin: place(&mut memory, "sin", &data.sin.data),
        query_norm: place(&mut memory, "query_norm", &data.query_norm.data),
        key_norm: place(&mut memory, "key_norm", &data.key_norm.data),
        tokens: problem.tokens as u64,
        ..AppendValues::default()
    };
    let positions = match problem.rotary.map(|rotary| rotary.positions.size_bytes()) {
        None => Vec::new(),
        Some(4) => integers(&data.positions, |position| (position as i32).to_le_bytes()),
        Some(_) => integers(&data.positions, i64::to_le_bytes),
    };
    values.positions = place(&mut memory, "positions", &positions);
    match placement {
        Placement::Separate => {
            values.value_cache = place(&mut memory, "value_cache", &before.value_cache.data);
            values.query = place(&mut memory, "query", &data.query.data);
        }
        Placement::Interleaved { offset } => {
            values.value_cache = values.key_cache + (offset * element) as u64;
            values.query = values.query_output;
        }
    }
    run(plan.key, plan.grid(problem.tokens), &plan.template, &values.words(), &memory, seed)?;
    let read = |address: u64| if address == 0 { Vec::new() } else { memory.read(address) };
    let key_cache = read(values.key_cache);
    match placement {
        Placement::Separate => {
            expected.check_key_cache(&before.key_cache.data, &key_cache)?;
            expected.check_value_cache(&before.value_cache.data, &read(values.value_cache))?;
        }
        Placement::Interleaved { offset } => {
            expected.check_interleaved(offset, &before.key_cache.data, &key_cache)?;
        }
    }
    expected.check_query(&before.query.data, &read(values.query_output))
}

/// Merges random parts in the simulator and judges the result against the oracle: nothing, or what is wrong.
pub fn check_merge(plan: &MergePlan, problem: &MergeProblem, seed: u64) -> Result<(), String> {
    check_merge_of(plan, problem, &MergeData::random(problem, seed), seed)
}

/// [`check_merge`] of given parts.
pub fn check_merge_of(plan: &MergePlan, problem: &MergeProblem, data: &MergeData, seed: u64) -> Result<(), String> {
    let parts = data.views();
    let inputs = flashcore_problem::MergeInputs { parts: &parts };
    let expected = merge_oracle(problem, &inputs).map_err(|invalid| invalid.to_string())?;
    let mut memory = GlobalMemory::new();
    let stacked: Vec<u8> = data.parts.iter().flat_map(|(output, _)| output.data.iter().copied()).collect();
    let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let stacked_lse: Vec<u8> = data.parts.iter().flat_map(|(_, lse)| bytes(lse)).collect();
    let (output, lse) = (MergeData::poisoned_output(problem), MergeData::poisoned_lse(problem));
    let values = MergeValues {
        part: place(&mut memory, "parts", &stacked),
        part_lse: place(&mut memory, "part_lse", &stacked_lse),
        part_stride: (stacked.len() / problem.num_parts) as u64,
        part_lse_stride: (stacked_lse.len() / problem.num_parts) as u64,
        output: place(&mut memory, "output", &output.data),
        lse: place(&mut memory, "lse", &bytes(&lse)),
        tokens: problem.tokens as u64,
    };
    run(plan.key, plan.grid(problem.tokens), &plan.template, &values.words(), &memory, seed)?;
    let found = Tensor { dtype: problem.dtype, data: memory.read(values.output) };
    let found_lse: Option<Vec<f32>> = problem.lse.then(|| {
        let bytes = memory.read(values.lse);
        bytes.chunks_exact(4).map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect()
    });
    expected.check(problem, &found, found_lse.as_deref())
}
