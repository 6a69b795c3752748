//! Types of 8 bits (FP8) and their scales: for random cases, and sequences of the suite `serving`.

use flashcore_kernels::{Config, Fp8Widening, HopperConfig};
use flashcore_problem::{Alignment, DType, Layout, Mask, PagedKv, Problem, SequenceLengths, SplitMix64};

use super::serving::Sequences;
use super::{Kernels, kernel_option, takes};
use crate::testkit::{Backend, BiasForm, Case, Numbers};

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

/// One random case in eight with a query of 8 bits too, where a kernel takes that; all, if that is the only kernel.
const QUERY_CASES: usize = 8;
/// Keeps that choice apart from the one of a cache of 8 bits.
const QUERY_STREAM: u64 = 0xf88;

/// The case with query, key and value of 8 bits and some of their scales, in some cases; types follow from the number of the
/// kernel, as everything that is compiled in.
pub(super) fn with_query(case: Case, kernels: Kernels, kernel: u64, number: u64) -> Case {
    const WIDEST: usize = 256;
    let mut random = SplitMix64::stream(kernel, QUERY_STREAM);
    let mut configs = Config::fp8();
    match kernels {
        Kernels::Only(config) if configs.contains(&config) => configs.insert(0, config),
        Kernels::Only(config) if !has_float8(config) => return case,
        _ if random.below(QUERY_CASES) > 0 => return case,
        Kernels::Only(config) => configs = vec![config],
        Kernels::All => {
            configs.extend(Config::fp8_mma());
            let first = kernel as usize % configs.len();
            configs.rotate_left(first);
        }
    }
    let mut problem = case.problem.clone();
    if problem.output_shape().is_empty() || case.kv_cache.is_some() {
        return case;
    }
    // Strides are those of other dims.
    if matches!(problem.layout, Layout::Strided(_)) {
        problem.layout = Layout::Bshd;
    }
    let key_value = if problem.layout == Layout::PackedQkv { DType::E4m3 } else { DType::FLOAT8[random.below(2)] };
    let output = [DType::F16, DType::Bf16][random.below(2)];
    (problem.dtype, problem.kv_dtype, problem.out_dtype) = (DType::E4m3, Some(key_value), Some(output));
    [problem.q_scale, problem.k_scale, problem.v_scale] = [(); 3].map(|()| random.below(3) > 0);
    let dim = |dim: usize| dim.next_multiple_of(16).min(WIDEST);
    (problem.head_dim, problem.value_dim) = (dim(problem.head_dim), dim(problem.value_dim));
    // Wide heads are rare among all, and have code of their own.
    if random.below(3) == 0 {
        let wider = |dim: usize| (2 * dim).min(WIDEST);
        (problem.head_dim, problem.value_dim) = (wider(problem.head_dim), wider(problem.value_dim));
    }
    let taken = configs.into_iter().find_map(|config| {
        let mut problem = problem.clone();
        // `wgmma` keeps too few bits of 8-bit sums for an LSE.
        let is_hopper = HopperConfig::try_from(config).is_ok();
        problem.lse &= !is_hopper;
        if let Some(paged) = problem.paged.as_mut().filter(|_| is_hopper) {
            // Pages as TMA copies them; those of a power of two stay such.
            let multiple = if paged.page_size.is_power_of_two() { 16 } else { 48 };
            (paged.page_size, problem.leftpad_k) = (paged.page_size.next_multiple_of(multiple), false);
        }
        takes(Backend::Sim(config), &problem).then_some((problem, config))
    });
    let Some((problem, config)) = taken else { return case };
    let backend = match case.backend {
        Backend::Cuda(_) => Backend::Cuda(config),
        _ => Backend::Sim(config),
    };
    let name = match backend {
        Backend::Cuda(_) => "cuda",
        _ => "sim",
    };
    let option = kernel_option(kernels);
    let command = format!("flashcore verify --backend {name}{option} --fuzz 1 --seed {number}");
    Case { problem, backend, command: Some(command), ..case }
}

/// True if a config takes keys and values of 8 bits under a query of 16 or of 8.
fn has_float8(config: Config) -> bool {
    config.with_fp8_widening(Fp8Widening::Integer).is_some()
}

/// A cache of 8 bits, under a query of 16 or of 8.
#[derive(Debug, Clone, Copy)]
pub(super) struct Float8Cache {
    kv_dtype: DType,
    k_scale: bool,
    v_scale: bool,
    /// The scale of a query of 8 bits, if the query has those.
    query: Option<bool>,
}

impl Float8Cache {
    /// The cache of one kernel in four, of those that may have one.
    pub(super) fn random(kernels: Kernels, dtype: DType, kernel: u64) -> Option<Self> {
        let is_ampere = match kernels {
            Kernels::All => true,
            Kernels::Only(config) => has_float8(config),
        };
        let mut random = SplitMix64::stream(kernel, STREAM);
        let is_one = is_ampere && matches!(dtype, DType::F16 | DType::Bf16) && random.below(4) == 0;
        is_one.then(|| Self {
            kv_dtype: DType::FLOAT8[random.below(2)],
            k_scale: random.below(3) > 0,
            v_scale: random.below(3) > 0,
            query: (random.below(2) == 0).then(|| random.below(3) > 0),
        })
    }

    /// Dims that kernels have with such a cache.
    pub(super) fn dims((head_dim, value_dim): (usize, usize)) -> (usize, usize) {
        (head_dim.next_multiple_of(16), value_dim.next_multiple_of(16))
    }

    /// Gives it to a problem of such dims whose rows do not begin at odd bytes.
    pub(super) fn give(self, problem: &mut Problem) {
        (problem.kv_dtype, problem.k_scale, problem.v_scale) = (Some(self.kv_dtype), self.k_scale, self.v_scale);
        if let Some(q_scale) = self.query {
            (problem.dtype, problem.out_dtype, problem.q_scale) = (DType::E4m3, Some(problem.dtype), q_scale);
        }
    }
}

/// Decode, chunks and prefill over caches of 8 bits: packed, contiguous and paged; of a query of 8 bits with wide heads too.
pub(super) fn sequences() -> Vec<Sequences> {
    let types = [
        (DType::F16, DType::E4m3, None),
        (DType::Bf16, DType::E5m2, None),
        (DType::E4m3, DType::E4m3, Some(DType::Bf16)),
    ];
    let mut all = Vec::new();
    for (dtype, kv_dtype, out_dtype) in types {
        for (queries, keys) in [(1, 500), (20, 420), (70, 390)] {
            for page_size in [None, Some(16), Some(48)] {
                let dim = if dtype.is_float8() && page_size == Some(48) { 192 } else { 64 };
                let mut problem = Problem::new(3, 6, queries, dim, dtype).with_layout(Layout::Bshd);
                (problem.key_heads, problem.key_length, problem.kv_dtype) = (2, keys, Some(kv_dtype));
                // Of a query of 8 bits, `wgmma` gives no LSE, and `mma` does.
                (problem.out_dtype, problem.lse) = (out_dtype, !dtype.is_float8() || queries == 1);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::suites::{Runner, fuzz, fuzz_serving, serving};

    /// Of a kernel of 8 bits, random cases and the suite `serving` have queries of 8 bits over pages and with wide heads.
    #[test]
    fn queries_of_8_bits_are_drawn_with_pages_and_wide_heads() {
        // Its tiles are narrow enough for wide heads.
        let config = "hopper-128x96-2stage-overlap-pingpong-persistent".parse().expect("a config");
        assert!(Config::fp8().contains(&config));
        let runner = Runner::Sim(Kernels::Only(config));
        let count = |cases: &[Case], is_one: fn(&Problem) -> bool| {
            cases.iter().filter(|case| case.problem.dtype.is_float8() && is_one(&case.problem)).count()
        };
        let (plain, sequences, suite) = (fuzz(runner, 160, 0), fuzz_serving(runner, 160, 0), serving(runner));
        assert!(count(&plain, |problem| problem.value_dim > 128) >= 8);
        assert!(count(&sequences, |problem| problem.value_dim > 128) >= 8);
        assert!(count(&sequences, |problem| problem.paged.is_some() && problem.k_scale) >= 8);
        assert!(count(&suite, |problem| problem.paged.is_some() && problem.value_dim > 128) >= 2);
        let queries = [plain, sequences].concat().into_iter().filter(|case| case.problem.dtype.is_float8());
        queries.for_each(|case| assert!(takes(case.backend, &case.problem), "{case}"));
    }
}
