//! Small problems whose kernels are those of a given one: what self-checks run.

use flashcore_kernels::Specialization;
use flashcore_kernels::cache::{AppendSpec, MAX_NEW_KEYS};
use flashcore_kernels::merge::MergeSpec;
use flashcore_problem::{
    Alignment, AppendProblem, KvCacheProblem, Layout, Mask, MergeProblem, PagedKv, Problem, Rotary,
};

use super::super::self_check::{AttentionTrial, layout_of_widths};

/// New keys of a sequence of the trial of a fused append, at most.
const NEW_KEYS: usize = MAX_NEW_KEYS as usize - 1;

/// Elements of one access to contiguous tables.
fn natural_table_vec(problem: &AppendProblem, key_vec: u32) -> u32 {
    key_vec.min(16 / problem.table_dtype().size_bytes() as u32)
}

/// A rotary embedding with a small table, whose rows are aligned as those of the problem.
fn trial_rotary(rotary: Rotary, problem: &AppendProblem, wanted: &AppendSpec) -> Rotary {
    let table_vec = wanted.rotary.map_or(1, |rotary| rotary.table_vec);
    // Rows of tables that begin at multiples of so many elements and of no more, if that is less than an access.
    let table_stride = (rotary.dim / 2).next_multiple_of(16) + table_vec as usize;
    let table_stride =
        if table_vec >= natural_table_vec(problem, wanted.key_vec) { rotary.dim / 2 } else { table_stride };
    Rotary { max_position: 50, table_stride, ..rotary }
}

/// The trial of the kernel of a problem: all that is compiled in is the same.
pub(super) fn append(problem: &AppendProblem) -> AppendProblem {
    let wanted = AppendSpec::of(problem);
    let mut small = AppendProblem::new(37, 3, problem.head_dim, problem.dtype, 9, 5).with_value_dim(problem.value_dim);
    if wanted.query {
        small = small.with_query(6);
    }
    small.qk_norm = problem.qk_norm;
    small.cache_dtype = problem.cache_dtype;
    small = small.with_scales(problem.k_scale, problem.v_scale).with_compute_scales(problem.compute_scales);
    small.rotary = problem.rotary.map(|rotary| trial_rotary(rotary, problem, &wanted));
    let natural = AppendSpec::of(&small);
    if natural.key_vec != wanted.key_vec {
        small.strides.key.row = small.strides.key.row.next_multiple_of(16) + wanted.key_vec as usize;
    }
    if natural.value_vec != wanted.value_vec {
        small.strides.value.row = small.strides.value.row.next_multiple_of(16) + wanted.value_vec as usize;
    }
    small
}

/// The trial of the kernel of a problem: all that is compiled in is the same.
pub(super) fn sequences(problem: &KvCacheProblem) -> KvCacheProblem {
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
    aligned(small, &wanted)
}

/// The trial of the kernels of a problem: all that is compiled in is the same.
pub(super) fn fused(problem: &KvCacheProblem) -> KvCacheProblem {
    let wanted = AppendSpec::of_sequences(problem);
    let mut attention = AttentionTrial::problem(&problem.attention);
    let bytes = attention.dtype.size_bytes() as u32;
    let width = Specialization::of(&problem.attention).vec_bytes;
    let widths = [wanted.key_vec * bytes, wanted.value_vec * bytes, width].map(|bytes| bytes.max(width));
    attention.layout = layout_of_widths(&attention, widths);
    let mut small = KvCacheProblem::new(attention, NEW_KEYS).with_total_new(problem.total_new.map(|_| NEW_KEYS + 2));
    small.rotary_seqlens = problem.rotary_seqlens;
    small.rotary = problem.rotary.map(|rotary| trial_rotary(rotary, &problem.append(0), &wanted));
    aligned(small, &wanted)
}

/// The problem with new keys and values that are aligned as the kernel wants them and no more.
fn aligned(mut small: KvCacheProblem, wanted: &AppendSpec) -> KvCacheProblem {
    let natural = AppendSpec::of_sequences(&small);
    let rows = small.new_key_shape().rows;
    for (strides, natural, wanted) in [
        (&mut small.new_key, natural.key_vec, wanted.key_vec),
        (&mut small.new_value, natural.value_vec, wanted.value_vec),
    ] {
        if natural != wanted {
            strides.row = strides.row.next_multiple_of(16) + wanted as usize;
            strides.batch = strides.row * rows;
        }
    }
    small
}

/// The trial of the kernel of a problem: all that is compiled in is the same.
pub(super) fn merge(problem: &MergeProblem) -> MergeProblem {
    let wanted = MergeSpec::of(problem);
    let parts = if wanted.unrolled.is_some() { problem.num_parts } else { 11 };
    let mut small = MergeProblem::new(parts, 37, 3, problem.value_dim, problem.dtype)
        .with_part_dtype(problem.part_dtype)
        .with_lse(problem.lse)
        .with_base(problem.base);
    // Rows that begin at multiples of so many elements and of no more, if that is less than an access.
    if MergeSpec::of(&small).vec != wanted.vec {
        small.strides.part.row = small.strides.part.row.next_multiple_of(16) + wanted.vec as usize;
    }
    small
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_ir::Arch;
    use flashcore_kernels::{Config, LaunchPlan, heuristics};
    use flashcore_problem::{DType, KvCacheData, LseBase, PositionType, RotaryStyle, SequenceLengths};

    /// The kernel that is tried must be the kernel that is used, whatever is compiled into it.
    #[test]
    fn the_trial_of_an_append_has_its_kernel() {
        for dtype in [DType::F16, DType::Bf16, DType::F32] {
            for (head_dim, dim, padding) in [(128, 128, 0), (128, 64, 4), (80, 20, 2), (33, 32, 0), (64, 48, 1)] {
                for table_padding in [0, 1, 2, 4] {
                    let rotary = Rotary {
                        table_stride: dim / 2 + table_padding,
                        table_dtype: (padding == 4).then_some(DType::F32),
                        positions: PositionType::I32,
                        ..Rotary::new(RotaryStyle::GptJ, dim, 4096)
                    };
                    let mut problem = AppendProblem::new(1000, 8, head_dim, dtype, 50, 16).with_rotary(rotary);
                    problem.strides.key_cache.batch += 3 * padding;
                    problem.strides.value.row += padding;
                    let quantized = problem.with_cache_dtype(Some(DType::E4m3)).with_scales(true, padding == 2);
                    for problem in [
                        problem,
                        problem.with_query(32).with_qk_norm(1e-6),
                        quantized,
                        quantized.with_compute_scales(true),
                    ] {
                        let key = |problem| LaunchPlan::append(problem, Arch::Sm90a).map(|plan| plan.launches[0].key);
                        assert_eq!(key(&append(&problem)), key(&problem), "{problem:?}");
                    }
                }
            }
        }
    }

    /// The kernel that is tried must be the kernel that is used, whatever is compiled into it, and its data must exist.
    #[test]
    fn the_trial_of_an_append_by_sequence_has_its_kernel() {
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
            let small = sequences(&problem);
            let key = |problem| LaunchPlan::kv_cache(problem, None, Arch::Sm90a).map(|plan| plan.launches[0].key);
            assert_eq!(key(&small), key(&problem), "{problem}");
            let data = KvCacheData::random(&small, SequenceLengths::Ragged, super::super::SEED);
            assert!(!small.key_moves(&data.inputs()).is_empty(), "{problem}");
        }
    }

    /// The kernels that are tried must be the kernels that are used, whatever is compiled into them.
    #[test]
    fn the_trial_of_a_fused_append_has_its_kernels() {
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
            let small = fused(&problem);
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

    /// The kernel that is tried must be the kernel that is used, whatever is compiled into it.
    #[test]
    fn the_trial_of_a_merge_has_its_kernel() {
        for part_dtype in [DType::F16, DType::F32] {
            for (parts, value_dim, padding) in [(2, 128, 0), (4, 128, 4), (5, 128, 2), (200, 33, 0), (3, 40, 1)] {
                let mut problem = MergeProblem::new(parts, 1000, 8, value_dim, DType::Bf16)
                    .with_part_dtype(part_dtype)
                    .with_lse(padding == 0)
                    .with_base(LseBase::Two);
                problem.strides.output.row += padding;
                let key = |problem| LaunchPlan::merge(problem, Arch::Sm90a).map(|plan| plan.launches[0].key);
                assert_eq!(key(&merge(&problem)), key(&problem), "{problem:?}");
            }
        }
    }
}
