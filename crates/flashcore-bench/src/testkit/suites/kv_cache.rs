//! Cases of the suite `serving` with a KV cache that grows: new keys are appended, rotated and attended.
//!
//! The combinations that FlashAttention-3 tests its KV cache with: pages of 1, 4, 128 or none, padding, batch indices, new
//! keys as many as query rows, one, or packed; rotary embedding of all columns or half of them, in both styles; packed
//! queries; masks. Splits are those of the backends.

use flashcore_kernels::LaunchPlan;
use flashcore_problem::{
    DType, KvCacheProblem, Mask, PagedKv, Problem, Rotary, RotaryStyle, SequenceLengths, SplitMix64, Strides,
};

use crate::testkit::verify::SIMULATED_ARCH;

use super::serving::{CAUSAL, WINDOW, base, laid_out};

/// The most elements of a tensor of a random case, from its first to its last.
const MOST_ELEMENTS: usize = 1 << 24;

/// A problem with a growing cache, and the lengths of its sequences after the append.
#[derive(Clone)]
pub(super) struct GrowingCache {
    pub(super) problem: KvCacheProblem,
    pub(super) lengths: SequenceLengths,
}

/// Gives attention a cache in which every sequence has rows of its own: contiguous, or paged with a page to spare.
fn give_cache(problem: &mut Problem, page_size: Option<usize>, batches: Option<usize>) {
    problem.kv_batch = batches;
    problem.paged = page_size.map(|page_size| {
        let width = problem.key_length.div_ceil(page_size);
        PagedKv::new(page_size, problem.cache_batches() * width + 1, width)
    });
}

/// A rotary embedding by number: none, all columns or half of them, in both styles, tables of either type.
fn rotary(number: usize, attention: &Problem) -> Option<Rotary> {
    let (style, dim) = match number % 5 {
        0 => return None,
        1 => (RotaryStyle::Neox, attention.head_dim),
        2 => (RotaryStyle::GptJ, attention.head_dim / 2),
        3 => (RotaryStyle::Neox, attention.head_dim / 2),
        _ => (RotaryStyle::GptJ, attention.head_dim),
    };
    let max_position = attention.key_length + attention.query_length + if number % 7 == 3 { 0 } else { 3 };
    let table_dtype = (number % 4 == 1).then_some(DType::F32);
    Some(Rotary { table_dtype, ..Rotary::new(style, dim, max_position) })
}

/// Every page size with padding, batch indices and each form of new keys.
pub(super) fn growing_caches() -> Vec<GrowingCache> {
    let mut all = Vec::new();
    for page_size in [None, Some(1), Some(4), Some(128)] {
        for (has_leftpad, has_batch_idx) in [(false, false), (true, false), (false, true), (true, true)] {
            for form in 0..3 {
                let number = all.len();
                let (queries, keys) = [(1, 128), (3, 257), (1, 339), (17, 203), (5, 128)][number % 5];
                let mut attention = base(number + number / 12, 4, (queries, keys))
                    .with_mask([Mask::None, CAUSAL, WINDOW][number % 4 % 3]);
                give_cache(&mut attention, page_size, has_batch_idx.then_some(6));
                attention.leftpad_k = has_leftpad;
                attention.total_q = (number % 2 == 1).then_some(4 * queries);
                let attention = laid_out(number, attention);
                let mut problem = match form {
                    0 => KvCacheProblem::new(attention, 1),
                    1 => KvCacheProblem::new(attention, queries),
                    _ => KvCacheProblem::new(attention, 9).with_total_new(Some(25)),
                };
                problem.rotary = rotary(number + number / 5, &problem.attention);
                problem.rotary_seqlens = problem.rotary.is_some() && number % 6 == 4;
                if number % 9 == 5 {
                    problem = problem.with_qk_norm(1e-5);
                }
                if number % 8 == 6 {
                    let row = problem.new_key.row + 24;
                    let strides = Strides { batch: row * problem.new_key_shape().rows + 8, row, ..problem.new_key };
                    problem = problem.with_new_strides(strides, strides);
                }
                let lengths = [SequenceLengths::Ragged, SequenceLengths::Full, SequenceLengths::Chunked];
                all.push(GrowingCache { problem, lengths: lengths[number / 2 % 3] });
            }
        }
    }
    all
}

/// FP8 caches, quantised on append: every page size with scales that are given, computed, of one tensor and of none.
/// GPU kernels have 16-bit queries alone.
pub(super) fn quantized_caches(is_gpu: bool) -> Vec<GrowingCache> {
    let mut all = Vec::new();
    for cache_dtype in DType::FLOAT8 {
        for page_size in [None, Some(4), Some(16), Some(128)] {
            for (form, (k_scale, v_scale, compute_scales)) in [
                (true, true, false),
                (true, true, true),
                (true, false, true),
                (false, true, false),
                (false, false, false),
            ]
            .into_iter()
            .enumerate()
            {
                let number = all.len();
                let (queries, keys) = [(1, 257), (3, 203), (17, 339)][number % 3];
                let mut attention = base(number + number / 20, 4, (queries, keys))
                    .with_mask([Mask::None, CAUSAL, WINDOW][number % 4 % 3])
                    .with_kv_dtype(Some(cache_dtype))
                    .with_k_scale(k_scale)
                    .with_v_scale(v_scale);
                give_cache(&mut attention, page_size, (number % 3 == 1).then_some(6));
                attention.leftpad_k = number % 5 == 3;
                let attention = laid_out(number, attention);
                let mut problem = match form % 3 {
                    0 => KvCacheProblem::new(attention, queries),
                    1 => KvCacheProblem::new(attention, 9).with_total_new(Some(25)),
                    _ => KvCacheProblem::new(attention, 7),
                };
                problem.rotary = rotary(number + number / 5, &problem.attention);
                if number % 7 == 5 {
                    problem = problem.with_qk_norm(1e-5);
                }
                problem = problem.with_compute_scales(compute_scales);
                all.push(GrowingCache { problem, lengths: SequenceLengths::Ragged });
            }
        }
    }
    all.retain(|cache| !is_gpu || cache.problem.attention.dtype != DType::F32 && has_append_kernel(&cache.problem));
    all
}

/// True if a GPU kernel appends: those that quantise take rows at multiples of 2 codes.
pub(super) fn has_append_kernel(problem: &KvCacheProblem) -> bool {
    !problem.append(0).cache_dtype().is_float8() || LaunchPlan::kv_cache(problem, None, SIMULATED_ARCH).is_ok()
}

/// A random problem with a growing cache, or nothing where attention has no use for one. `kind` decides what the kernel is
/// compiled for, `sizes` the rest.
pub(super) fn random_growing_cache(
    mut attention: Problem,
    kind: &mut SplitMix64,
    sizes: &mut SplitMix64,
) -> Option<KvCacheProblem> {
    if attention.dtype == DType::F64 || attention.dtype.is_float8() || attention.batch == 0 || attention.key_length == 0
    {
        return None;
    }
    (attention.total_k, attention.seqused_k) = (None, true);
    let page_size = attention.paged.map(|paged| paged.page_size);
    let batches = attention.kv_batch.map(|_| attention.batch + sizes.below(3));
    give_cache(&mut attention, page_size, batches);
    let most = attention.key_length.min(12);
    let mut problem = KvCacheProblem::new(attention, 1 + sizes.below(most));
    if kind.below(2) == 0 {
        let total = 1 + sizes.below(problem.attention.batch * problem.new_length);
        problem = problem.with_total_new(Some(total));
    }
    problem.rotary = rotary(kind.below(140), &problem.attention).filter(|rotary| rotary.dim.is_multiple_of(2));
    problem.rotary_seqlens = problem.rotary.is_some() && kind.below(4) == 0;
    if kind.below(4) == 0 {
        problem = problem.with_qk_norm(1e-6);
    }
    let has_scales = problem.attention.k_scale || problem.attention.v_scale;
    problem.compute_scales = has_scales && kind.below(2) == 0;
    (problem.validate().is_ok() && is_small(&problem.attention)).then_some(problem)
}

/// True if no tensor, with all that strides leave out between its elements, is too large for a quick case.
fn is_small(problem: &Problem) -> bool {
    let strides = problem.strides();
    let tensors = [
        strides.query.extent(problem.query_shape()),
        strides.key.extent(problem.key_shape()),
        strides.value.extent(problem.value_shape()),
        strides.output.extent(problem.output_shape()),
    ];
    tensors.into_iter().all(|extent| extent.is_some_and(|elements| elements <= MOST_ELEMENTS))
}
