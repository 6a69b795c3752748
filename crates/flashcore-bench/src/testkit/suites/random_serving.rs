//! Random packed and paged sequences, from 1 to 2,048 of them.

use flashcore_kernels::{Config, heuristics};
use flashcore_problem::{
    Alignment, DType, Layout, LseForm, Mask, PagedKv, Problem, SequenceLengths, SplitMix64, Stress,
};

use super::cpu_features::{random_dim, random_mask};
use super::features::{EXPRESSIONS, LSE_FORMS, LayoutForm, SOFTCAPS};
use super::float8::{Float8Cache, give_float8, with_query};
use super::gpu_features::{self, named};
use super::kv_cache::{has_append_kernel, random_growing_cache};
use super::serving::{Sequences, interleaved, work};
use super::{Kernels, Runner, kernel_option, takes};
use crate::testkit::verify::H200;
use crate::testkit::{Arrays, Backend, BiasForm, Case, Numbers, Planted, expressions};

/// Keeps the numbers that shape a problem apart from those that fill its tensors.
const STREAM: u64 = 0x5e41;
/// Keeps the sizes of a problem apart from what its kernel is compiled for.
const SIZES: u64 = 1 << 32;
/// Keeps the append before attention apart from attention.
const GROWING: u64 = 1 << 33;
/// Cases that follow each other and have one kernel, which a GPU then compiles once; in the simulator each has its own.
const CASES_PER_KERNEL: u64 = 8;
/// Multiplications of a case at most: of the simulator, and of the CPU.
const MOST_WORK: (usize, usize) = (1_500_000, 3_000_000);
/// Sequences of a case at most.
const MOST_SEQUENCES: usize = 2048;
/// More sequences than these have no bias, which would be large.
const MANY: usize = 32;
/// More sequences than these are short.
const FEW: usize = 12;
/// Sequences around half of what a warp scans at a time, all of that, and twice as many.
const SCANNED: [usize; 9] = [15, 16, 17, 31, 32, 33, 63, 64, 65];
/// Keeps the place of a config in the list apart from all other choices.
const CONFIG: u64 = 1 << 34;

/// `count` random problems of packed, paged and ragged sequences that the runner takes. Each follows from its own number
/// alone, counted from `seed`.
pub fn fuzz_serving(runner: Runner, count: usize, seed: u64) -> Vec<Case> {
    (0..count as u64).map(|number| fuzz_case(runner, seed.wrapping_add(number))).collect()
}

fn fuzz_case(runner: Runner, number: u64) -> Case {
    let kernel = if matches!(runner, Runner::Cuda(_)) { number / CASES_PER_KERNEL } else { number };
    let (backend, kernels) = named(runner);
    let option = kernel_option(kernels);
    let command = format!("flashcore verify --backend {backend}{option} --suite serving --fuzz 1 --seed {number}");
    let mut sizes = SplitMix64::stream(number, STREAM ^ SIZES);
    let case = match runner {
        Runner::Cpu(level) => {
            let kind = Kind::random(&mut SplitMix64::stream(number, STREAM));
            let mut sequences = kind.sequences(&mut sizes, MOST_WORK.1);
            give_float8(&mut sequences.problem, number);
            growing(&sequences, number, number, Some(8), |_| Backend::Cpu(level))
                .unwrap_or_else(|| sequences.case(number, Backend::Cpu(level)))
        }
        Runner::Sim(_) | Runner::Cuda(_) => {
            let kind = Kind::random(&mut SplitMix64::stream(kernel, STREAM)).for_gpu(kernel, kernels);
            let sequences = kind.sequences(&mut sizes, MOST_WORK.0);
            let backend = |problem: &Problem| {
                let config = config(kernels, kernel, problem);
                if matches!(runner, Runner::Cuda(_)) { Backend::Cuda(config) } else { Backend::Sim(config) }
            };
            let has_kernel = |case: &Case| case.kv_cache.as_deref().is_none_or(has_append_kernel);
            // The host refuses such arrays before a GPU has them.
            let crowds = matches!(runner, Runner::Sim(_)).then_some(2);
            let case = growing(&sequences, kernel, number, crowds, backend).filter(has_kernel).unwrap_or_else(|| {
                let backend = backend(&sequences.problem);
                sequences.case(number, backend)
            });
            with_query(case, kernels, kernel, number)
        }
    };
    Case { command: Some(command), ..case }
}

/// One kernel in four appends new keys to the cache before it attends; one case of those in `crowds` has more new keys than
/// room, and padding that reaches into them.
fn growing(
    sequences: &Sequences,
    kernel: u64,
    number: u64,
    crowds: Option<usize>,
    backend: impl FnOnce(&Problem) -> Backend,
) -> Option<Case> {
    let mut kind = SplitMix64::stream(kernel, STREAM ^ GROWING);
    if kind.below(4) > 0 {
        return None;
    }
    let mut sizes = SplitMix64::stream(number, STREAM ^ GROWING ^ SIZES);
    let problem = random_growing_cache(sequences.problem.clone(), &mut kind, &mut sizes)?;
    let backend = backend(&problem.attended());
    let is_crowded = crowds.is_some_and(|crowds| sizes.below(crowds) == 0);
    let arrays = if is_crowded { Arrays::Crowded } else { Arrays::Right };
    Some(Case { lengths: sequences.lengths, arrays, ..Case::with_kv_cache(problem, number, backend) })
}

/// The config that was asked for or another of its family; else each in turn, and the problem's default where none takes it.
fn config(kernels: Kernels, turn: u64, problem: &Problem) -> Config {
    let mut order: Vec<_> = Config::all().into_iter().chain(Config::f32()).collect();
    let first = SplitMix64::stream(turn, STREAM ^ CONFIG).below(order.len());
    order.rotate_left(first);
    if let Kernels::Only(config) = kernels {
        order.retain(|other| other.family() == config.family());
        order.insert(0, config);
    }
    let taken = order.into_iter().find(|config| takes(Backend::Sim(*config), problem));
    taken.unwrap_or_else(|| match kernels {
        Kernels::Only(config) => config,
        Kernels::All => heuristics::select(problem, H200),
    })
}

/// Storage of the keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cache {
    /// A batch for each sequence, or for each that they choose.
    Contiguous,
    Packed,
    Paged {
        /// Rows of a page are a power of two.
        is_pow2: bool,
    },
}

/// Parameters that a kernel is compiled for.
#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "each says whether one independent optional tensor takes part")]
struct Kind {
    dims: (usize, usize),
    dtype: DType,
    mask: Mask,
    softcap: Option<f32>,
    expressions: (Option<&'static str>, Option<&'static str>),
    layout: usize,
    cache: Cache,
    is_packed: bool,
    seqused_q: bool,
    seqused_k: bool,
    leftpad_k: bool,
    kv_batch: bool,
    alibi: bool,
    sinks: bool,
    bias: Option<BiasForm>,
    lse: Option<LseForm>,
    /// The cache of 8 bits, on a GPU.
    float8: Option<Float8Cache>,
}

impl Kind {
    fn random(random: &mut SplitMix64) -> Self {
        let one_in = |random: &mut SplitMix64, count: usize| random.below(count) == 0;
        let dim = random_dim(random);
        let value_dim = if one_in(random, 4) { random_dim(random) } else { dim };
        let cache = match random.below(6) {
            0 => Cache::Contiguous,
            1 | 2 => Cache::Packed,
            _ => Cache::Paged { is_pow2: !one_in(random, 4) },
        };
        let mask = match random.below(3) {
            0 => Mask::Causal(Alignment::BottomRight),
            _ => random_mask(random, 300),
        };
        Self {
            dims: (dim, value_dim),
            dtype: DType::ALL[random.below(DType::ALL.len())],
            mask,
            softcap: SOFTCAPS[random.below(SOFTCAPS.len())],
            expressions: if one_in(random, 5) { EXPRESSIONS[random.below(EXPRESSIONS.len())] } else { (None, None) },
            layout: random.below(6),
            cache,
            is_packed: random.below(3) > 0,
            seqused_q: one_in(random, 4),
            seqused_k: random.below(4) > 0,
            leftpad_k: one_in(random, 4),
            kv_batch: cache != Cache::Packed && one_in(random, 3),
            alibi: one_in(random, 5),
            sinks: one_in(random, 5),
            bias: one_in(random, 6).then(|| BiasForm::ALL[random.below(BiasForm::ALL.len())]),
            lse: LSE_FORMS[random.below(LSE_FORMS.len())],
            float8: None,
        }
    }

    /// Dims and types that GPU kernels have, and no expression of a mask, which none has with sequences.
    fn for_gpu(mut self, kernel: u64, kernels: Kernels) -> Self {
        let round = |dim: usize| dim.next_multiple_of(8).min(256);
        self.dims = (round(self.dims.0), round(self.dims.1));
        self.dtype = kernels.dtype(gpu_features::DTYPES[kernel as usize % gpu_features::DTYPES.len()]);
        self.expressions.1 = None;
        self.float8 = Float8Cache::random(kernels, self.dtype, kernel);
        if self.float8.is_some() {
            (self.dims, self.layout) = (Float8Cache::dims(self.dims), self.layout.min(4));
        }
        self
    }

    /// A problem of this kind, small enough for `most_work` multiplications.
    fn sequences(self, random: &mut SplitMix64, most_work: usize) -> Sequences {
        let batch = match random.below(24) {
            0 => 1 + random.below(MOST_SEQUENCES),
            1..4 => 1 + random.below(128),
            4..8 => SCANNED[random.below(SCANNED.len())],
            _ => 1 + random.below(8),
        };
        let key_heads = 1 + random.below(3);
        let heads = key_heads * [1, 1, 2, 4, 8, 3][random.below(6)];
        let (queries, keys) = random_lengths(random, batch > FEW);
        let mut problem = Problem::new(batch, heads, queries, self.dims.0, self.dtype);
        (problem.key_heads, problem.key_length, problem.value_dim) = (key_heads, keys, self.dims.1);
        (problem.mask, problem.softcap, problem.lse) = (self.mask, self.softcap, self.lse.is_some());
        problem.lse_form = self.lse.unwrap_or_default();
        (problem.alibi, problem.sinks) = (self.alibi, self.sinks);
        shrink(&mut problem, most_work);
        (problem.seqused_q, problem.seqused_k, problem.leftpad_k) = (self.seqused_q, self.seqused_k, self.leftpad_k);
        // A bias has a term for every sequence, row and key.
        problem.bias = self.bias.is_some() && problem.batch <= MANY;
        if self.is_packed {
            problem.total_q = Some(total(random, problem.batch, problem.query_length));
        }
        if self.kv_batch {
            problem.kv_batch = Some(1 + random.below(problem.batch + 3));
        }
        match self.cache {
            Cache::Contiguous => {}
            Cache::Packed => problem.total_k = Some(total(random, problem.batch, problem.key_length)),
            Cache::Paged { is_pow2 } => problem.paged = Some(pages(random, &problem, is_pow2)),
        }
        let (score, mask) = self.expressions;
        expressions::give(&mut problem, score.and_then(expressions::score_mod), mask.and_then(expressions::mask_mod));
        problem.layout = match self.layout {
            0..=2 => Layout::Bshd,
            3 => Layout::Bhsd,
            4 => interleaved(&problem),
            _ => LayoutForm::PaddedBshd.of(&problem),
        };
        if let Some(float8) = self.float8 {
            float8.give(&mut problem);
        }
        let lengths = match random.below(12) {
            0 => SequenceLengths::ALL[random.below(SequenceLengths::ALL.len())],
            1 | 2 => SequenceLengths::OneLong,
            3..6 => SequenceLengths::Chunked,
            _ => SequenceLengths::Ragged,
        };
        let (numbers, lengths) = match random.below(16) {
            0 => (Numbers::Stress(Stress::ALL[random.below(Stress::ALL.len())]), SequenceLengths::Ragged),
            1 | 2 => (Numbers::Planted(Planted::Unattended), lengths),
            3 if problem.sinks => (Numbers::Planted(Planted::ExtremeSinks), lengths),
            4 if problem.bias => (Numbers::Planted(Planted::MinusInfiniteBias), lengths),
            _ => (Numbers::Normal, lengths),
        };
        Sequences { problem, lengths, numbers, bias: self.bias.unwrap_or_default() }
    }
}

/// Query rows and keys of a sequence at most: decode, few rows, chunks, prefill.
fn random_lengths(random: &mut SplitMix64, are_many: bool) -> (usize, usize) {
    if are_many {
        return (1 + random.below(6), random.below(60));
    }
    let many = |random: &mut SplitMix64| match random.below(3) {
        0 => [127, 128, 129, 255, 256, 257, 511, 512, 513][random.below(9)],
        1 => 200 + random.below(900),
        _ => 65 + random.below(300),
    };
    match random.below(8) {
        0..=2 => (1, many(random)),
        3 | 4 => (2 + random.below(20), many(random)),
        5 => (1 + random.below(130), many(random)),
        6 => {
            let both = 1 + random.below(200);
            (both, both)
        }
        _ => (random.below(9), random.below(9)),
    }
}

/// Takes away heads, then sequences, then rows, then keys; sequences that are scanned last.
fn shrink(problem: &mut Problem, most_work: usize) {
    while work(problem) > most_work {
        let group = problem.query_heads / problem.key_heads;
        let is_scanned = (FEW..=2 * MANY + 1).contains(&problem.batch) && problem.key_length > 1;
        if problem.key_heads > 1 {
            problem.key_heads -= 1;
            problem.query_heads = group * problem.key_heads;
        } else if problem.batch > 3 && !is_scanned {
            problem.batch -= problem.batch.div_ceil(4);
        } else if problem.query_length > if is_scanned { 1 } else { 8 } {
            problem.query_length -= problem.query_length.div_ceil(4);
        } else if problem.query_heads > 1 {
            problem.query_heads = problem.query_heads.div_ceil(2);
        } else {
            problem.key_length -= problem.key_length.div_ceil(4);
        }
    }
}

/// Rows of packed sequences: for all of them, or fewer.
fn total(random: &mut SplitMix64, batch: usize, longest: usize) -> usize {
    let all = batch * longest;
    match random.below(4) {
        0 => all,
        1 => random.below(all + 1),
        _ => all / 2 + random.below(all / 2 + 1),
    }
}

/// A paged cache with room in the table for every sequence, and pages for all, for some, or too many.
fn pages(random: &mut SplitMix64, problem: &Problem, is_pow2: bool) -> PagedKv {
    let page_size = if is_pow2 {
        [1, 2, 4, 8, 16, 16, 16, 32, 64, 128, 256][random.below(11)]
    } else {
        [3, 5, 6, 7, 12, 24, 48, 96, 100, 272][random.below(10)]
    };
    let needed = problem.key_length.div_ceil(page_size);
    let width = needed + [0, 0, 1, 7][random.below(4)];
    let all = problem.cache_batches() * needed;
    let num_pages = match random.below(4) {
        0 => 1 + random.below(all + 1),
        1 => all + random.below(9),
        _ => all,
    };
    // A cache without a page has no rows to be in.
    let paged = PagedKv::new(page_size, num_pages.max(1), width);
    PagedKv { table_stride: width + [0, 0, 1, 13][random.below(4)], ..paged }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_cpu::Level;
    use flashcore_kernels::HopperConfig;

    fn share(cases: &[Case], is: impl Fn(&Problem) -> bool) -> usize {
        100 * cases.iter().filter(|case| is(&case.problem)).count() / cases.len()
    }

    #[test]
    fn random_sequences_are_valid_broad_and_small() {
        let cases = fuzz_serving(Runner::Cpu(Level::Portable), 2000, 0);
        for case in &cases {
            assert_eq!(case.problem.validate(), Ok(()), "{case}");
            assert_eq!(case.inputs().validate(&case.problem), Ok(()), "{case}");
        }
        let parts: [(&str, usize, usize); 12] = [
            ("paged", 35, share(&cases, |problem| problem.paged.is_some())),
            ("packed keys", 20, share(&cases, |problem| problem.total_k.is_some())),
            ("packed queries", 50, share(&cases, |problem| problem.total_q.is_some())),
            ("seqused_q", 15, share(&cases, |problem| problem.seqused_q)),
            ("seqused_k", 50, share(&cases, |problem| problem.seqused_k)),
            ("leftpad_k", 15, share(&cases, |problem| problem.leftpad_k)),
            ("batch indices", 15, share(&cases, |problem| problem.kv_batch.is_some())),
            ("one row", 20, share(&cases, |problem| problem.query_length == 1)),
            ("three tiles of keys", 25, share(&cases, |problem| problem.key_length > 192)),
            ("grouped heads", 40, share(&cases, |problem| problem.query_heads > problem.key_heads)),
            ("more than 32 sequences", 5, share(&cases, |problem| problem.batch > 32)),
            ("a mask", 50, share(&cases, |problem| problem.mask != Mask::None)),
        ];
        for (what, least, percent) in parts {
            assert!(percent >= least, "{what}: {percent}% of the cases, and at least {least}% are meant to be");
        }
        assert!(cases.iter().any(|case| case.problem.batch > 1000));
        assert!(cases.iter().all(|case| work(&case.problem) <= MOST_WORK.1));
        assert_eq!(fuzz_serving(Runner::Cpu(Level::Portable), 1, 7)[0], cases[7]);
        let command = "flashcore verify --backend cpu --suite serving --fuzz 1 --seed 7 --cpu-level portable";
        assert_eq!(cases[7].command(), command);
    }

    /// Random cases have appends without room, padding that reaches into new keys, and for kernels that
    /// scan more sequences than half a scan, a whole one and two.
    #[test]
    fn crowded_caches_and_scans_are_drawn() {
        let is_crowded = |case: &Case| case.arrays == Arrays::Crowded;
        assert!(fuzz_serving(Runner::Sim(Kernels::All), 60, 0).iter().filter(|case| is_crowded(case)).count() >= 2);
        let cases = fuzz_serving(Runner::Sim(Kernels::All), 400, 0);
        let count = |is: &dyn Fn(&Case) -> bool| cases.iter().filter(|case| is(case)).count();
        assert!(count(&is_crowded) >= 20);
        assert!(count(&|case| is_crowded(case) && case.problem.leftpad_k) >= 3);
        let is_packed = |case: &Case| case.kv_cache.as_ref().is_some_and(|new| new.total_new.is_some());
        assert!(count(&|case| is_crowded(case) && is_packed(case)) >= 6);
        let scans = |case: &Case| {
            let has_rows = case.problem.total_q.is_some() || case.problem.seqused_q;
            let is_persistent = |config| HopperConfig::try_from(config).is_ok_and(|config| config.persistent);
            case.backend
                .config()
                .is_some_and(|config| config.chunk_keys().is_some() || has_rows && is_persistent(config))
        };
        for (most, least) in [(16, 5), (32, 3), (64, 1)] {
            let more = count(&|case| scans(case) && case.problem.batch > most);
            assert!(more >= least, "{more} cases scan more than {most} sequences");
        }
        let on_cpu = fuzz_serving(Runner::Cpu(Level::Portable), 300, 0);
        assert!(on_cpu.iter().any(is_crowded));
        assert!(on_cpu.iter().filter(|case| case.problem.batch > 16).count() >= 30);
    }

    /// With an append and without, of empty problems too: 919 and 50268 are two of those.
    #[test]
    fn kernels_take_random_sequences() {
        let on_gpu = Runner::Cuda(Kernels::All);
        let runs = [(Runner::Sim(Kernels::All), 200, 0), (on_gpu, 5000, 0), (on_gpu, 200, 50_200)];
        for case in runs.into_iter().flat_map(|(runner, count, seed)| fuzz_serving(runner, count, seed)) {
            let attended = case.kv_cache.as_ref().map_or(case.problem.clone(), |problem| problem.attended());
            let is_launched = case.kv_cache.is_some() || !attended.output_shape().is_empty();
            assert!(!is_launched || takes(case.backend, &attended), "{case}");
        }
    }
}
