//! The suite `serving`: packed (varlen) and paged sequences, decode, few rows over many keys, chunked prefill, growing caches.
//!
//! Small enough for the simulator: three tiles of keys and a tail, a few heads.

use flashcore_kernels::{Config, heuristics};
use flashcore_problem::{
    Alignment, DType, Layout, LseBase, Mask, PagedKv, Problem, SequenceLengths, Strides, TensorStrides,
};

use super::features::LayoutForm;
use super::float8;
use super::gpu_features::named;
use super::kv_cache::{GrowingCache, growing_caches, quantized_caches};
use super::{Kernels, Runner, kernel_option, takes};
use crate::testkit::verify::H200;
use crate::testkit::{Arrays, Backend, BiasForm, Case, Numbers, Planted, expressions};

pub(super) const CAUSAL: Mask = Mask::Causal(Alignment::BottomRight);
pub(super) const WINDOW: Mask = Mask::Window { left: Some(40), right: Some(0), alignment: Alignment::BottomRight };
const BOTH_SIDES: Mask = Mask::Window { left: Some(70), right: Some(9), alignment: Alignment::BottomRight };
/// A decode config: rows of a group of heads in one tile, warps and CTAs that share the keys.
const SPLIT: &str = "ampere-16x64-2stage-swizzled-4kvwarps-packgqa-3splits";
/// Multiplications up to which the scalar kernel has a case too.
const SMALL: usize = 400_000;

/// A problem with the lengths of its sequences and what its tensors hold.
#[derive(Clone)]
pub(super) struct Sequences {
    pub(super) problem: Problem,
    pub(super) lengths: SequenceLengths,
    pub(super) numbers: Numbers,
    pub(super) bias: BiasForm,
}

impl Sequences {
    fn new(problem: Problem, lengths: SequenceLengths) -> Self {
        Self { problem, lengths, numbers: Numbers::Normal, bias: BiasForm::default() }
    }

    /// The case of a backend.
    pub(super) fn case(self, seed: u64, backend: Backend) -> Case {
        let Self { problem, lengths, numbers, bias } = self;
        Case { numbers, bias, lengths, ..Case::new(problem, seed, backend) }
    }
}

/// Packed and paged sequences as serving engines pass them, by every kernel that takes them.
pub fn serving(runner: Runner) -> Vec<Case> {
    let groups = [varlen(), paged(), decode(), few_rows(), chunked(), features(), kv_cache(), float8::sequences()];
    let mut cases = Vec::new();
    for (seed, sequences) in groups.into_iter().flatten().enumerate() {
        let backends = backends(runner, &sequences.problem);
        cases.extend(backends.into_iter().map(|backend| sequences.clone().case(seed as u64, backend)));
    }
    let quantized = quantized_caches(!matches!(runner, Runner::Cpu(_)));
    for (seed, GrowingCache { problem, lengths }) in growing_caches().into_iter().chain(quantized).enumerate() {
        let case =
            |arrays, backend| Case { lengths, arrays, ..Case::with_kv_cache(problem.clone(), seed as u64, backend) };
        // Without room for all new keys, as a device takes it and the CPU does not.
        let crowded = (seed % 3 == 1).then_some(Arrays::Crowded);
        for backend in backends(runner, &problem.attended()) {
            let arrays = match backend {
                Backend::Cpu(_) => [Some(Arrays::Right), crowded],
                Backend::Sim(_) => [crowded.or(Some(Arrays::Right)), None],
                Backend::Cuda(_) => [Some(Arrays::Right), None],
            };
            cases.extend(arrays.into_iter().flatten().map(|arrays| case(arrays, backend)));
        }
    }
    let (backend, kernels) = named(runner);
    let option = kernel_option(kernels);
    let command =
        |number: usize| format!("flashcore verify --backend {backend}{option} --suite serving --only {number}");
    cases.into_iter().enumerate().map(|(number, case)| Case { command: Some(command(number)), ..case }).collect()
}

/// The backends of a problem: each kernel family that takes it, with what the problem gets by default and with splits.
fn backends(runner: Runner, problem: &Problem) -> Vec<Backend> {
    let (Runner::Sim(kernels) | Runner::Cuda(kernels)) = runner else { return runner.backends(0) };
    // Sequences have no block mask: expressions of masks are the CPU's.
    if problem.mask_mod.is_some() {
        return Vec::new();
    }
    let default = heuristics::select(problem, H200);
    let mut configs = match kernels {
        Kernels::Only(config) => vec![config],
        Kernels::All => {
            let split = SPLIT.parse().ok();
            let scalar = (work(problem) <= SMALL).then(Config::scalar);
            let families = [Config::ampere(), Config::hopper()];
            [default].into_iter().chain(families).chain(split).chain(scalar).collect()
        }
    };
    let mut known = Vec::new();
    configs.retain(|config| {
        let is_new = !known.contains(config);
        known.push(*config);
        is_new && (problem.output_shape().is_empty() || takes(Backend::Sim(*config), problem))
    });
    if configs.is_empty() && kernels == Kernels::All {
        // Refused by all: a case that fails with the reason.
        configs.push(default);
    }
    let backend = |config| match runner {
        Runner::Cuda(_) => Backend::Cuda(config),
        Runner::Sim(_) | Runner::Cpu(_) => Backend::Sim(config),
    };
    configs.into_iter().map(backend).collect()
}

/// Multiplications, if every sequence is as long as it may be.
pub(super) fn work(problem: &Problem) -> usize {
    let rows = problem.total_q.unwrap_or(usize::MAX).min(problem.batch * problem.query_length);
    rows * problem.query_heads * problem.key_length * (problem.head_dim + problem.value_dim)
}

/// A problem of sequences; types, heads, dims, layouts and LSE take turns by `number`.
pub(super) fn base(number: usize, batch: usize, (queries, keys): (usize, usize)) -> Problem {
    const DTYPES: [DType; 5] = [DType::F16, DType::Bf16, DType::Bf16, DType::F16, DType::F32];
    const HEADS: [(usize, usize); 4] = [(2, 1), (2, 2), (4, 1), (6, 2)];
    const DIMS: [usize; 4] = [64, 32, 128, 96];
    let mut problem = Problem::new(batch, HEADS[number % 4].0, queries, DIMS[number / 2 % 4], DTYPES[number % 5]);
    (problem.key_heads, problem.key_length) = (HEADS[number % 4].1, keys);
    problem.lse = !number.is_multiple_of(3);
    problem
}

/// Sets the layout by `number`, once the shapes are known.
pub(super) fn laid_out(number: usize, mut problem: Problem) -> Problem {
    problem.layout = match number % 5 {
        0 | 1 => Layout::Bshd,
        2 => Layout::Bhsd,
        3 => interleaved(&problem),
        _ => LayoutForm::PaddedBshd.of(&problem),
    };
    problem
}

/// Key and value of a row side by side, `[batch or page, head, row, key and value]`.
pub(super) fn interleaved(problem: &Problem) -> Layout {
    let shape = problem.key_shape();
    let row = problem.head_dim + problem.value_dim;
    let head = row * shape.rows.max(1);
    let cache = Strides { batch: head * shape.heads, head, row };
    Layout::Strided(TensorStrides {
        query: Strides::bshd(problem.query_shape()),
        key: cache,
        value: cache,
        output: Strides::bshd(problem.output_shape()),
    })
}

/// Every pattern of lengths, with each mask, packed on both sides; some with lengths below the packed rows.
fn varlen() -> Vec<Sequences> {
    let mut all = Vec::new();
    for lengths in SequenceLengths::ALL {
        for mask in [Mask::None, CAUSAL, WINDOW] {
            let number = all.len();
            let batch = [4, 3, 7][number % 3];
            let mut problem = base(number, batch, (70, 203)).with_mask(mask);
            let (rows, keys) = (batch * 70, batch * 203);
            // Room for all, or for some of them.
            let cut = |total: usize| if lengths == SequenceLengths::Full { total } else { total * 2 / 3 + 1 };
            (problem.total_q, problem.total_k) = (Some(cut(rows)), Some(cut(keys)));
            (problem.seqused_q, problem.seqused_k) = (number % 4 == 1, number % 4 >= 2);
            problem.leftpad_k = number % 6 == 5;
            all.push(Sequences::new(laid_out(number, problem), lengths));
        }
    }
    // Lengths of rectangular batches, and self-attention of packed rows side by side.
    let used = base(1, 3, (33, 203)).with_mask(CAUSAL).with_seqused_q(true).with_seqused_k(true);
    all.push(Sequences::new(laid_out(0, used), SequenceLengths::Ragged));
    let mut side_by_side = base(1, 4, (65, 65)).with_mask(CAUSAL).with_total_q(Some(200)).with_total_k(Some(200));
    side_by_side.layout = Layout::PackedQkv;
    all.push(Sequences::new(side_by_side, SequenceLengths::Full));
    all
}

/// Ways in which a page table lies and is used.
#[derive(Clone, Copy)]
enum Table {
    /// As wide as the longest sequence needs, pages in any order.
    Exact,
    /// Wider than needed.
    Wide,
    /// Columns of a wider table.
    Sliced,
    /// Fewer pages than sequences use: some have the same.
    Shared,
    /// Sequences choose their row.
    Chosen,
    /// Padding before the first key.
    Padded,
}

impl Table {
    const ALL: [Self; 6] = [Self::Exact, Self::Wide, Self::Sliced, Self::Shared, Self::Chosen, Self::Padded];

    /// Gives a problem a paged cache.
    fn give(self, problem: &mut Problem, page_size: usize) {
        let needed = problem.key_length.div_ceil(page_size);
        let mut rows = problem.batch;
        let mut paged = PagedKv::new(page_size, rows * needed, needed);
        match self {
            Self::Exact => {}
            Self::Wide => (paged.table_width, paged.table_stride) = (needed + 3, needed + 3),
            Self::Sliced => paged.table_stride = needed + 5,
            Self::Shared => paged.num_pages = (rows * needed).div_ceil(2),
            Self::Chosen => {
                rows += 2;
                problem.kv_batch = Some(rows);
                paged.num_pages = rows * needed + 1;
            }
            Self::Padded => problem.leftpad_k = true,
        }
        problem.paged = Some(paged);
        problem.seqused_k = true;
    }
}

/// Every page size with every kind of table.
fn paged() -> Vec<Sequences> {
    const PAGES: [usize; 6] = [1, 4, 16, 64, 128, 256];
    let mut all = Vec::new();
    for page_size in PAGES {
        for table in Table::ALL {
            let number = all.len();
            let queries = [1, 5, 40][(number + number / 6) % 3];
            let keys = if page_size == 256 { 300 } else { 203 };
            let mut problem = base(number + number / 6, 3, (queries, keys));
            problem.mask = [CAUSAL, Mask::None, WINDOW, CAUSAL, BOTH_SIDES][number % 5];
            table.give(&mut problem, page_size);
            if number % 2 == 1 {
                problem.total_q = Some(3 * queries);
            }
            let lengths =
                [SequenceLengths::Ragged, SequenceLengths::Chunked, SequenceLengths::Full, SequenceLengths::OneLong]
                    [number % 4];
            all.push(Sequences::new(laid_out(number, problem), lengths));
        }
    }
    all
}

/// One row over many keys: groups of 1, 4 and 8 heads, several dims, contiguous and paged.
fn decode() -> Vec<Sequences> {
    let mut all = Vec::new();
    for (heads, key_heads) in [(2, 2), (8, 2), (8, 1)] {
        for dim in [32, 64, 128, 256] {
            for pages in [None, Some(16)] {
                let number = all.len();
                let mut problem = base(number, 2, (1, 390)).with_mask([Mask::None, CAUSAL][number / 3 % 2]);
                (problem.query_heads, problem.key_heads) = (heads, key_heads);
                (problem.head_dim, problem.value_dim, problem.scale) = (dim, dim, 1.0 / (dim as f64).sqrt());
                problem.seqused_k = true;
                if let Some(page_size) = pages {
                    Table::ALL[number % 6].give(&mut problem, page_size);
                }
                all.push(Sequences::new(laid_out(number, problem), SequenceLengths::Ragged));
            }
        }
    }
    all
}

/// 2 to 64 rows over more keys, full and causal.
fn few_rows() -> Vec<Sequences> {
    let mut all = Vec::new();
    for queries in [2, 16, 17, 64] {
        for pages in [None, Some(16)] {
            let number = all.len();
            let mut problem = base(number, 2, (queries, 500)).with_mask([CAUSAL, Mask::None][number / 2 % 2]);
            problem.seqused_k = true;
            if let Some(page_size) = pages {
                Table::Sliced.give(&mut problem, page_size);
                problem.total_q = Some(2 * queries);
            }
            all.push(Sequences::new(laid_out(number, problem), SequenceLengths::Ragged));
        }
    }
    all
}

/// Chunks of prefill among rows that decode, in one batch.
fn chunked() -> Vec<Sequences> {
    let mut all = Vec::new();
    for page_size in [None, Some(16), Some(64)] {
        for mask in [CAUSAL, WINDOW] {
            let number = all.len();
            let mut problem = base(number, 5, (48, 260)).with_mask(mask).with_total_q(Some(130));
            if let Some(page_size) = page_size {
                Table::ALL[number].give(&mut problem, page_size);
            } else {
                (problem.total_k, problem.seqused_k) = (Some(900), true);
            }
            all.push(Sequences::new(laid_out(number, problem), SequenceLengths::Chunked));
        }
    }
    all
}

/// Everything that changes scores, and numbers that must leave no trace, with packed and with paged sequences.
fn features() -> Vec<Sequences> {
    /// Switched-on operands, the numbers that find it wrong, and where the bias lies.
    type Change = (fn(&mut Problem), Numbers, BiasForm);
    let changes: [Change; 12] = [
        (|problem| problem.softcap = Some(5.0), Numbers::Normal, BiasForm::PerHead),
        (|problem| problem.alibi = true, Numbers::Normal, BiasForm::PerHead),
        (|problem| problem.sinks = true, Numbers::Planted(Planted::ExtremeSinks), BiasForm::PerHead),
        (|problem| problem.bias = true, Numbers::Normal, BiasForm::PerBatchAndHead),
        (|problem| problem.bias = true, Numbers::Planted(Planted::MinusInfiniteBias), BiasForm::Padded),
        (|problem| problem.scale = -0.3, Numbers::Normal, BiasForm::PerHead),
        (|problem| problem.mask = WINDOW, Numbers::Planted(Planted::Unattended), BiasForm::PerHead),
        (
            |problem| expressions::give(problem, expressions::score_mod("relative"), None),
            Numbers::Normal,
            BiasForm::PerHead,
        ),
        (
            |problem| expressions::give(problem, None, expressions::mask_mod("documents")),
            Numbers::Normal,
            BiasForm::PerHead,
        ),
        (
            |problem| (problem.alibi, problem.sinks, problem.bias, problem.softcap) = (true, true, true, Some(50.0)),
            Numbers::Normal,
            BiasForm::KeyMajor,
        ),
        (|problem| problem.lse_form.base = LseBase::Two, Numbers::Normal, BiasForm::PerHead),
        (
            |problem| (problem.sinks, problem.lse_form.includes_sink) = (true, false),
            Numbers::Planted(Planted::ExtremeSinks),
            BiasForm::PerHead,
        ),
    ];
    let mut all = Vec::new();
    for (change, numbers, bias) in changes {
        for is_paged in [false, true] {
            let number = all.len();
            let mut problem = base(number, 3, (40, 203)).with_mask(CAUSAL).with_total_q(Some(100)).with_lse(true);
            if is_paged {
                Table::ALL[number / 2 % 6].give(&mut problem, [16, 7][number / 2 % 2]);
            } else {
                problem.total_k = Some(500);
            }
            change(&mut problem);
            let sequences = Sequences::new(laid_out(number, problem), SequenceLengths::Ragged);
            all.push(Sequences { numbers, bias, ..sequences });
        }
    }
    all
}

/// The combinations that FlashAttention-3 tests its KV cache with, as far as nothing is appended: pages of 1, 4, 128 or
/// none, padding, batch indices, packed queries. Splits are those of the backends.
fn kv_cache() -> Vec<Sequences> {
    let mut all = Vec::new();
    for page_size in [None, Some(1), Some(4), Some(128)] {
        for (has_leftpad, has_batch_idx) in [(false, false), (true, false), (false, true), (true, true)] {
            for is_packed in [false, true] {
                let number = all.len();
                let (queries, keys) = [(1, 128), (1, 339), (3, 257), (64, 128), (17, 300)][number % 5];
                let mut problem = base(number, 4, (queries, keys)).with_mask([Mask::None, CAUSAL, WINDOW][number % 3]);
                problem.seqused_k = true;
                if let Some(page_size) = page_size {
                    Table::Exact.give(&mut problem, page_size);
                }
                if has_batch_idx {
                    problem.kv_batch = Some(6);
                }
                problem.leftpad_k = has_leftpad;
                if is_packed {
                    problem.total_q = Some(4 * queries);
                }
                all.push(Sequences::new(laid_out(number, problem), SequenceLengths::Ragged));
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_cpu::Level;
    use std::collections::HashSet;

    #[test]
    fn the_suite_is_valid_and_has_every_operand() {
        let cases = serving(Runner::Cpu(Level::Portable));
        assert!(cases.len() > 130, "{}", cases.len());
        let mut operands = HashSet::new();
        for case in &cases {
            assert_eq!(case.problem.validate(), Ok(()), "{case}");
            assert_eq!(case.inputs().validate(&case.problem), Ok(()), "{case}");
            operands.extend(flashcore_problem::OperandSet::of(&case.problem).iter());
        }
        let of_attention = Problem::OPERANDS.iter().map(|row| row.operand);
        let missing: Vec<_> = of_attention.filter(|operand| !operands.contains(operand)).collect();
        assert!(missing.is_empty(), "{missing:?}");
        let names: HashSet<String> = cases.iter().map(ToString::to_string).collect();
        assert_eq!(names.len(), cases.len(), "each case has a name of its own");
    }

    #[test]
    fn every_family_of_kernels_has_cases() {
        let cases = serving(Runner::Sim(Kernels::All));
        for family in ["scalar", "ampere"] {
            let count =
                cases.iter().filter(|case| case.backend.config().is_some_and(|config| config.family() == family));
            assert!(count.count() > 20, "{family}");
        }
        for case in &cases {
            assert!(case.problem.output_shape().is_empty() || takes(case.backend, &case.problem), "{case}");
        }
    }
}
