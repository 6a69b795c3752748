//! Types of 8 bits (FP8) and their scales: for random cases, and sequences of the suite `serving`.

use flashcore_kernels::{Accuracy, Config};
use flashcore_problem::{Alignment, DType, Layout, Mask, PagedKv, Problem, SequenceLengths, SplitMix64};

use super::Kernels;
use super::serving::Sequences;
use crate::testkit::{BiasForm, Numbers};

/// Keeps the choice of types apart from all other choices, which stay what they were before there were types of 8 bits.
const STREAM: u64 = 0xf8;

/// Gives one problem in four key and value of 8 bits, or all inputs, with some of their scales.
pub(super) fn give_float8(problem: &mut Problem, number: u64) {
    let mut random = SplitMix64::stream(number, STREAM);
    if problem.dtype == DType::F64 || random.below(4) > 0 {
        return;
    }
    let kv_dtype = DType::FLOAT8[random.below(2)];
    // Query, key and value that lie side by side have one type.
    if problem.layout == Layout::PackedQkv || random.below(3) == 0 {
        let output = [DType::F16, DType::Bf16][random.below(2)];
        let key_value = if problem.layout == Layout::PackedQkv { DType::E4m3 } else { kv_dtype };
        (problem.dtype, problem.kv_dtype, problem.out_dtype) = (DType::E4m3, Some(key_value), Some(output));
    } else {
        problem.kv_dtype = Some(kv_dtype);
    }
    problem.q_scale = problem.dtype.is_float8() && random.below(3) > 0;
    (problem.k_scale, problem.v_scale) = (random.below(3) > 0, random.below(3) > 0);
}

/// A cache of 8 bits under a query of 16, as GPU kernels have it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Float8Cache {
    kv_dtype: DType,
    k_scale: bool,
    v_scale: bool,
}

impl Float8Cache {
    /// The cache of one kernel in four, of those that may have one.
    pub(super) fn random(kernels: Kernels, dtype: DType, kernel: u64) -> Option<Self> {
        let is_ampere = match kernels {
            Kernels::All => true,
            Kernels::Only(config) => matches!(config, Config::Ampere(_)) && config.accuracy() == Accuracy::Exact,
        };
        let mut random = SplitMix64::stream(kernel, STREAM);
        let is_one = is_ampere && matches!(dtype, DType::F16 | DType::Bf16) && random.below(4) == 0;
        is_one.then(|| Self {
            kv_dtype: DType::FLOAT8[random.below(2)],
            k_scale: random.below(3) > 0,
            v_scale: random.below(3) > 0,
        })
    }

    /// Dims that kernels have with such a cache.
    pub(super) fn dims((head_dim, value_dim): (usize, usize)) -> (usize, usize) {
        (head_dim.next_multiple_of(16), value_dim.next_multiple_of(16))
    }

    /// Gives it to a problem of such dims whose rows do not begin at odd bytes.
    pub(super) fn give(self, problem: &mut Problem) {
        (problem.kv_dtype, problem.k_scale, problem.v_scale) = (Some(self.kv_dtype), self.k_scale, self.v_scale);
    }
}

/// Decode, chunks and prefill over caches of 8 bits: packed, contiguous and paged. GPU kernels have no query of 8 bits.
pub(super) fn sequences(is_gpu: bool) -> Vec<Sequences> {
    let types = [
        (DType::F16, DType::E4m3, None),
        (DType::Bf16, DType::E5m2, None),
        (DType::E4m3, DType::E4m3, Some(DType::Bf16)),
    ];
    let mut all = Vec::new();
    for (dtype, kv_dtype, out_dtype) in types.into_iter().filter(|(dtype, ..)| !is_gpu || !dtype.is_float8()) {
        for (queries, keys) in [(1, 500), (20, 420), (70, 390)] {
            for page_size in [None, Some(16), Some(48)] {
                let mut problem = Problem::new(3, 6, queries, 64, dtype).with_layout(Layout::Bshd);
                (problem.key_heads, problem.key_length, problem.kv_dtype) = (2, keys, Some(kv_dtype));
                (problem.out_dtype, problem.lse) = (out_dtype, true);
                problem.mask = Mask::Causal(Alignment::BottomRight);
                (problem.q_scale, problem.k_scale, problem.v_scale) = (dtype.is_float8(), true, true);
                if let Some(size) = page_size {
                    let width = keys.div_ceil(size);
                    (problem.paged, problem.seqused_k) = (Some(PagedKv::new(size, 3 * width, width)), true);
                } else {
                    (problem.total_q, problem.total_k) = (Some(3 * queries), Some(3 * keys));
                }
                let (lengths, numbers, bias) = (SequenceLengths::Ragged, Numbers::Normal, BiasForm::default());
                all.push(Sequences { problem, lengths, numbers, bias });
            }
        }
    }
    all
}
