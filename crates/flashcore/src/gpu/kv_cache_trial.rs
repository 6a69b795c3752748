//! Self-check of the append by sequence: a small problem whose kernel is the same.

use flashcore_cuda::CudaError;
use flashcore_kernels::cache::{AppendSpec, SequencePlan, SequenceValues};
use flashcore_problem::{
    Alignment, KvCacheData, KvCacheProblem, Layout, Mask, PagedKv, Problem, Scale, SequenceLengths, Tensor,
    kv_cache_oracle_with,
};
use zerocopy::IntoBytes;

use super::Gpu;
use super::append::{trial_rotary, upload_scale};
use super::kv_cache::upload;
use super::operation::{Operation, Uploads};

const SEED: u64 = 0x5EED;

/// Runs the kernel on a small problem. Gives what is wrong with the result, if anything is.
pub(super) fn complaint(gpu: &Gpu, problem: &KvCacheProblem) -> Result<Option<String>, CudaError> {
    let small = trial(problem);
    let Ok(plan) = SequencePlan::new(&small, gpu.target) else {
        return Ok(Some("the trial is no problem of this kernel".to_owned()));
    };
    let (kernel, _) = gpu.load(plan.key)?;
    let operation = Operation::new(kernel, &plan.template, gpu.stream.clone())?;
    let data = KvCacheData::random(&small, SequenceLengths::Ragged, SEED);
    let inputs = data.inputs();
    let expected = match kv_cache_oracle_with(&small, &inputs, data.scale_strides(&small)) {
        Ok(expected) => expected,
        Err(invalid) => return Ok(Some(invalid.to_string())),
    };
    let mut uploads = Uploads::new(&operation.stream);
    let mut tensors = upload(&mut uploads, &inputs)?;
    let (mut k_scale, mut v_scale) = (data.k_scale.clone(), data.v_scale.clone());
    tensors.attention.k_scale =
        upload_scale(&mut uploads, inputs.attention.k_scale, k_scale.as_mut().map(Scale::view_mut).as_ref())?;
    tensors.attention.v_scale =
        upload_scale(&mut uploads, inputs.attention.v_scale, v_scale.as_mut().map(Scale::view_mut).as_ref())?;
    let mut lengths = vec![0_u32; small.attention.batch];
    let mut query = Tensor::poisoned(small.attention.dtype, if small.transforms() { expected.query.len() } else { 0 });
    let mut words = |values: Option<&[u32]>| values.map_or(Ok(0), |values| uploads.add(values.as_bytes()));
    let values = SequenceValues {
        new_key: tensors.new_key,
        new_value: tensors.new_value,
        cos: tensors.cos,
        sin: tensors.sin,
        query_norm: tensors.query_norm,
        key_norm: tensors.key_norm,
        cu_seqlens_k_new: tensors.cu_seqlens_k_new,
        rotary_seqlens: tensors.rotary_seqlens,
        cache_seqlens: words(inputs.attention.seqused_k)?,
        cu_seqlens_q: words(inputs.attention.cu_seqlens_q)?,
        kv_batch_idx: words(inputs.attention.kv_batch_idx)?,
        lengths: words(Some(&lengths))?,
        page_table: inputs.attention.page_table.map_or(Ok(0), |table| uploads.add(table.as_bytes()))?,
        key_cache: uploads.add(&data.key_cache.data)?,
        value_cache: uploads.add(&data.value_cache.data)?,
        query: if small.transforms() { uploads.add(&data.attention.query.data)? } else { 0 },
        query_output: uploads.add(&query.data)?,
    };
    // SAFETY: the buffers hold the whole tensors, which belong to the problem, and are used by nobody else; freeing them
    // waits for the kernel. The stream was made in the context of the kernel.
    unsafe {
        let scales = tensors.scale_words(&small);
        operation.launch_quantized(&operation.stream, plan.grid, scales, &values.words())
    }?;
    let (mut key_cache, mut value_cache) = (data.key_cache.clone(), data.value_cache.clone());
    uploads.read(values.key_cache, &mut key_cache.data)?;
    uploads.read(values.value_cache, &mut value_cache.data)?;
    uploads.read(values.query_output, &mut query.data)?;
    uploads.read(values.lengths, lengths.as_mut_bytes())?;
    let written = [(&mut k_scale, tensors.attention.k_scale), (&mut v_scale, tensors.attention.v_scale)];
    for (scale, device) in written {
        scale.as_mut().map_or(Ok(()), |scale| uploads.read(device.address, scale.data.as_mut_bytes()))?;
    }
    let after = [&k_scale, &v_scale].map(|scale| scale.as_ref().map_or(&[][..], |scale| &scale.data));
    let append = match expected.append.with_computed_scales(data.scales(), after) {
        Ok(append) => append,
        Err(complaint) => return Ok(Some(complaint)),
    };
    let judged = append
        .check_key_cache(&data.key_cache.data, &key_cache.data)
        .and_then(|()| append.check_value_cache(&data.value_cache.data, &value_cache.data))
        .and_then(|()| if small.transforms() { append.check_query_rows(&query.data) } else { Ok(()) })
        .and_then(|()| {
            if lengths == expected.lengths {
                return Ok(());
            }
            Err(format!("lengths after the append are {lengths:?}; they must be {:?}", expected.lengths))
        });
    Ok(judged.err())
}

/// The trial of the kernel of a problem: all that is compiled in is the same.
fn trial(problem: &KvCacheProblem) -> KvCacheProblem {
    let wanted = AppendSpec::of_sequences(problem);
    let given = &problem.attention;
    let mut attention = Problem::new(5, 6, 4, given.head_dim, given.dtype).with_layout(Layout::Bshd);
    (attention.key_heads, attention.key_length, attention.value_dim) = (3, 23, given.value_dim);
    if given.mask != Mask::None {
        attention.mask = Mask::Causal(Alignment::BottomRight);
    }
    attention.total_q = given.total_q.map(|_| 17);
    attention.kv_dtype = given.kv_dtype;
    (attention.k_scale, attention.v_scale) = (given.k_scale, given.v_scale);
    attention.kv_batch = given.kv_batch.map(|_| 7);
    attention.paged = given.paged.map(|_| PagedKv::new(4, 43, 6));
    let mut small = KvCacheProblem::new(attention, 3).with_total_new(problem.total_new.map(|_| 11));
    (small.qk_norm, small.rotary_seqlens) = (problem.qk_norm, problem.rotary_seqlens);
    small.compute_scales = problem.compute_scales;
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
    use flashcore_problem::{DType, Rotary, RotaryStyle};

    /// The kernel that is tried must be the kernel that is used, whatever is compiled into it, and its data must exist.
    #[test]
    fn the_trial_of_a_problem_has_its_kernel() {
        for number in 0..256_usize {
            let is = |bit: usize| number >> bit & 1 == 1;
            let (head_dim, dim) = [(128, 128), (128, 64), (80, 20), (64, 48)][number % 4];
            let dtype = [DType::F16, DType::Bf16, DType::F32][number % 3];
            let mut attention = Problem::new(9, 8, 5, head_dim, dtype);
            (attention.key_heads, attention.key_length) = (2, 300);
            attention.mask = if is(2) { Mask::Causal(Alignment::BottomRight) } else { Mask::None };
            attention.total_q = is(3).then_some(40);
            attention.kv_batch = is(4).then_some(12);
            attention.paged = is(5).then(|| PagedKv::new(16, 300, 20));
            attention.leftpad_k = is(6);
            if number % 5 == 4 {
                attention.kv_dtype = Some(DType::E4m3);
                (attention.k_scale, attention.v_scale) = (true, is(7));
            }
            let mut problem = KvCacheProblem::new(attention, 4).with_total_new(is(7).then_some(30));
            if is(0) || is(3) {
                let table_stride = dim / 2 + [0, 1, 2, 4][number / 8 % 4];
                problem = problem.with_rotary(Rotary { table_stride, ..Rotary::new(RotaryStyle::GptJ, dim, 4096) });
                problem.rotary_seqlens = is(6);
            }
            if is(1) {
                problem = problem.with_qk_norm(1e-6);
            }
            problem.compute_scales = number % 10 == 9;
            let padding = [0, 4, 2, 1][number / 16 % 4];
            problem.new_key.row += padding;
            problem.new_key.batch += problem.new_length * padding;
            let small = trial(&problem);
            let key = |problem| SequencePlan::new(problem, Arch::Sm90a).map(|plan| plan.key);
            assert_eq!(key(&small), key(&problem), "{problem}");
            let data = KvCacheData::random(&small, SequenceLengths::Ragged, SEED);
            assert!(!small.key_moves(&data.inputs()).is_empty(), "{problem}");
        }
    }
}
