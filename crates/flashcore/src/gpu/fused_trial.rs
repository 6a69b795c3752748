//! Self-check of attention that appends: a small problem whose kernels are the same, once in one launch and once in two,
//! which must give the same bits.

use std::sync::Arc;

use flashcore_cuda::{CudaError, Kernel};
use flashcore_kernels::cache::{AppendSpec, MAX_NEW_KEYS};
use flashcore_kernels::{Config, LaunchPlan, Specialization, Target};
use flashcore_problem::{KvCacheData, KvCacheOutputs, KvCacheProblem, Outputs, SequenceLengths, Tensor};

use super::append::trial_rotary;
use super::kv_cache::GpuKvCache;
use super::self_check::{SEED, Trial, layout_of_widths};
use super::{Executor, Gpu, TRIAL_CTAS};
use crate::{Error, PlanOptions, Reason};

/// New keys of a sequence of the trial, at most.
const NEW_KEYS: usize = MAX_NEW_KEYS as usize - 1;

/// Runs the kernels on a small problem. Gives what is wrong with the result, if anything is.
pub(super) fn complaint(
    gpu: &Gpu,
    problem: &KvCacheProblem,
    config: Config,
    kernels: &[Arc<Kernel>],
) -> Result<Option<String>, Vec<Reason>> {
    let small = trial(problem);
    let target = Target { num_sms: TRIAL_CTAS, ..gpu.target };
    // Several chunks of keys where there is a kernel that combines them, else one.
    let config = config.with_chunk_keys(if kernels.len() > 1 { 1 } else { small.attention.key_length as u32 });
    let plan = LaunchPlan::with_append(&small, config, target)
        .map_err(|reasons| reasons.into_iter().map(Reason::from).collect::<Vec<_>>())?;
    let one = |error: CudaError| vec![Reason::Cuda(error)];
    let executor = Executor::new(&plan, kernels.to_vec(), gpu).map_err(one)?;
    let fused = gpu.with_fused(&small, executor);
    // Two launches are trusted after trials of their own.
    let attention = gpu.prepare(&small.attended(), PlanOptions::default().with_config(config))?;
    let separate = gpu.separate_kv_cache(&small, attention.map(|prepared| prepared.executor))?;
    let data = KvCacheData::random(&small, SequenceLengths::Ragged, SEED);
    let expected = match run(&separate, &small, &data) {
        Ok(results) => results,
        Err(error) => return judged(error),
    };
    let found = match run(&fused, &small, &data) {
        Ok(results) => results,
        Err(error) => return judged(error),
    };
    let names = ["key cache", "value cache", "output", "LSE"];
    let different: Vec<_> = names
        .into_iter()
        .zip(expected.iter().zip(&found))
        .filter(|(_, (expected, found))| expected != found)
        .map(|(name, _)| name)
        .collect();
    Ok((!different.is_empty()).then(|| format!("{} of one launch and of two differ", different.join(", "))))
}

/// The verdict on a kernel whose run failed: one that ended all work here is wrong.
fn judged(error: Error) -> Result<Option<String>, Vec<Reason>> {
    match error {
        Error::Cuda(CudaError::Call(failure)) if failure.is_sticky() => Ok(Some(failure.to_string())),
        Error::Cuda(error) => Err(vec![Reason::Cuda(error)]),
        other => Ok(Some(other.to_string())),
    }
}

/// The bits of caches, output and LSE after a run.
fn run(launches: &GpuKvCache, problem: &KvCacheProblem, data: &KvCacheData) -> Result<[Vec<u8>; 4], Error> {
    let (mut key, mut value): (Tensor, Tensor) = (data.key_cache.clone(), data.value_cache.clone());
    let mut outputs = Outputs::poisoned(&problem.attention);
    launches.run(problem, &data.inputs(), KvCacheOutputs::new(&mut key, &mut value, outputs.views_mut()))?;
    let lse = outputs.lse.iter().flatten().flat_map(|value| value.to_le_bytes()).collect();
    Ok([key.data, value.data, outputs.output.data, lse])
}

/// The trial of the kernels of a problem: all that is compiled in is the same.
fn trial(problem: &KvCacheProblem) -> KvCacheProblem {
    let wanted = AppendSpec::of_sequences(problem);
    let mut attention = Trial::problem(&problem.attention);
    let bytes = attention.dtype.size_bytes() as u32;
    let width = Specialization::of(&problem.attention).vec_bytes;
    let widths = [wanted.key_vec * bytes, wanted.value_vec * bytes, width].map(|bytes| bytes.max(width));
    attention.layout = layout_of_widths(&attention, widths);
    let mut small = KvCacheProblem::new(attention, NEW_KEYS).with_total_new(problem.total_new.map(|_| NEW_KEYS + 2));
    small.rotary_seqlens = problem.rotary_seqlens;
    small.rotary = problem.rotary.map(|rotary| trial_rotary(rotary, &problem.append(0), &wanted));
    let natural = AppendSpec::of_sequences(&small);
    let rows = small.new_key_shape().rows;
    if natural.key_vec != wanted.key_vec {
        small.new_key.row = small.new_key.row.next_multiple_of(16) + wanted.key_vec as usize;
        small.new_key.batch = small.new_key.row * rows;
    }
    if natural.value_vec != wanted.value_vec {
        small.new_value.row = small.new_value.row.next_multiple_of(16) + wanted.value_vec as usize;
        small.new_value.batch = small.new_value.row * rows;
    }
    small
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_ir::Arch;
    use flashcore_kernels::heuristics;
    use flashcore_problem::{Alignment, DType, Layout, Mask, PagedKv, Problem, Rotary, RotaryStyle};

    /// The kernels that are tried must be the kernels that are used, whatever is compiled into them.
    #[test]
    fn the_trial_of_a_problem_has_its_kernels() {
        let mut with_kernels = 0;
        for number in 0..128_usize {
            let is = |bit: usize| number >> bit & 1 == 1;
            let (head_dim, dim) = [(128, 128), (128, 64), (80, 24), (64, 48)][number % 4];
            let dtype = [DType::F16, DType::Bf16][number % 2];
            let mut attention = Problem::new(9, 8, 1, head_dim, dtype).with_layout(Layout::Bshd).with_lse(is(3));
            (attention.key_heads, attention.key_length) = (2, 1500);
            attention.mask = if is(2) { Mask::Causal(Alignment::BottomRight) } else { Mask::None };
            attention.total_q = is(3).then_some(9);
            attention.kv_batch = is(4).then_some(12);
            attention.paged = is(5).then(|| PagedKv::new(16, 1000, 94));
            attention.leftpad_k = is(6);
            if is(1) && is(4) {
                let mut strides = attention.strides();
                strides.key.row += 2;
                strides.key.batch += 4096;
                attention.layout = Layout::Strided(strides);
            }
            let mut problem = KvCacheProblem::new(attention, 4).with_total_new(is(1).then_some(30));
            if is(0) || is(3) {
                let table_stride = dim / 2 + [0, 1, 2, 4][number / 8 % 4];
                let style = if is(5) { RotaryStyle::Neox } else { RotaryStyle::GptJ };
                problem = problem.with_rotary(Rotary { table_stride, ..Rotary::new(style, dim, 4096) });
                problem.rotary_seqlens = is(6);
            }
            let padding = [0, 4, 2, 8][number / 16 % 4];
            problem.new_key.row += padding;
            problem.new_key.batch += problem.new_length * padding;
            let small = trial(&problem);
            let config = heuristics::select(&problem.attended(), Arch::Sm90a);
            let specs = |problem: &KvCacheProblem, config: Config| {
                let plan = LaunchPlan::with_append(problem, config, Arch::Sm90a);
                plan.map(|plan| plan.launches.iter().map(|launch| launch.key).collect::<Vec<_>>())
            };
            let of_problem = specs(&problem, config);
            assert_eq!(of_problem, specs(&small, config.with_chunk_keys(1)), "{problem}");
            with_kernels += usize::from(of_problem.is_ok());
        }
        assert_eq!(with_kernels, 128);
    }
}
