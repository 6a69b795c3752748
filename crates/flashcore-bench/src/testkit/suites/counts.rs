//! The suite `counts`: each count that code loops over is 0, 1, each constant of the code, one more, and far more.
//!
//! The constants come from the code (`LIMITS` of the CPU backend and of the kernels), so that cases move with them, and all
//! backends have the cases of all constants: a loop that is right up to a bound is right up to that of another backend too,
//! until somebody changes it.

use std::collections::BTreeSet;

use flashcore_kernels::{AmpereConfig, Config, HopperConfig};
use flashcore_problem::{DType, KvCacheProblem, Layout, MergeProblem, PagedKv, Problem, Rotary, RotaryStyle, Stress};

use super::gpu_features::named;
use super::{Kernels, Runner, kernel_option, takes};
use crate::testkit::{Backend, Case, Numbers};

/// A count that code loops over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Count {
    /// Rows of a group of heads.
    Rows,
    /// Keys of a sequence.
    Keys,
    /// Tiles of keys, through a pipeline of so many stages.
    Tiles,
    /// Splits of the keys of a few rows.
    Splits,
    /// Chunks of the keys of a sequence.
    Chunks,
    /// Heads of keys.
    KeyHeads,
    /// Query heads of a group.
    GroupHeads,
    /// Sequences of a batch.
    Sequences,
    /// Sequences that new keys are appended to.
    NewSequences,
    /// Pages of a sequence.
    Pages,
    /// Partial results of a merge.
    Parts,
}

/// Each constant, and the counts that are compared with it.
const TABLE: &[(&str, &[Count])] = &[
    ("blocked::KV_TILE", &[Count::Keys]),
    ("blocked::MAX_KV_TILE", &[Count::Keys]),
    ("blocked::MAX_LANES", &[Count::Rows]),
    ("blocked::MAX_PACKED_TILES", &[Count::Tiles]),
    ("decode::INTERLEAVED_KV_TILE", &[Count::Keys]),
    ("decode::KV_TILE", &[Count::Keys]),
    ("decode::MAX_HEADS", &[Count::KeyHeads]),
    ("decode::MAX_ROWS", &[Count::Rows, Count::GroupHeads]),
    ("scheduler::MAX_FUSED_ITEM_ROWS", &[Count::Rows]),
    ("scheduler::MAX_ITEM_ROWS", &[Count::Rows]),
    ("scheduler::MIN_ITEMS", &[Count::Splits]),
    ("scheduler::MIN_SPLIT_KEYS", &[Count::Keys]),
    ("combine::SPLITS_AT_ONCE", &[Count::Splits, Count::Chunks]),
    ("merge::MOST_UNROLLED", &[Count::Parts]),
    ("merge::PARTS_AT_ONCE", &[Count::Parts]),
    ("primitives::LANES", &[Count::Splits, Count::Chunks, Count::Sequences, Count::NewSequences]),
    ("config::MAX_SPLITS", &[Count::Splits]),
];

/// Every constant with its value.
fn limits() -> impl Iterator<Item = (&'static str, usize)> {
    flashcore_cpu::LIMITS.iter().chain(flashcore_kernels::LIMITS).copied()
}

/// The value of a constant.
fn limit(name: &str) -> usize {
    limits().find(|(other, _)| *other == name).map_or(1, |(_, value)| value)
}

impl Count {
    const ALL: [Self; 11] = [
        Self::Rows,
        Self::Keys,
        Self::Tiles,
        Self::Splits,
        Self::Chunks,
        Self::KeyHeads,
        Self::GroupHeads,
        Self::Sequences,
        Self::NewSequences,
        Self::Pages,
        Self::Parts,
    ];

    /// Far more than any constant: on the CPU, and on a GPU, which the simulator stands in for.
    const fn far(self) -> (usize, usize) {
        match self {
            Self::Rows => (2500, 1500),
            Self::Keys => (9000, 2100),
            Self::Tiles | Self::KeyHeads => (40, 40),
            Self::Splits | Self::Chunks => (65, 100),
            Self::GroupHeads => (71, 71),
            Self::Sequences => (5000, 500),
            Self::NewSequences => (300, 100),
            Self::Pages => (5000, 1100),
            // The most that there can be.
            Self::Parts => (256, 256),
        }
    }

    /// The numbers that it takes.
    fn numbers(self, is_gpu: bool) -> BTreeSet<usize> {
        let of_this =
            |(name, _): &(&str, usize)| TABLE.iter().any(|(other, counts)| name == other && counts.contains(&self));
        let constants = limits().filter(of_this).map(|(_, value)| value);
        let far = if is_gpu { self.far().1 } else { self.far().0 };
        // Problems have a head, and merges two parts.
        let least = match self {
            Self::KeyHeads | Self::GroupHeads => 1,
            Self::Parts => 2,
            _ => 0,
        };
        let all = constants.flat_map(|value| [value, value + 1]).chain([0, 1, 2, far]);
        all.filter(|&number| number >= least).collect()
    }
}

/// The merges of so many parts, by each element type in turn.
pub fn merges() -> Vec<MergeProblem> {
    let numbers = Count::Parts.numbers(true).into_iter();
    let merge = |parts: usize| MergeProblem::new(parts, 5, 2, 24, [DType::F32, DType::F16, DType::Bf16][parts % 3]);
    numbers.map(merge).collect()
}

/// Each count at each of its numbers.
pub fn counts(runner: Runner) -> Vec<Case> {
    let (backend, kernels) = named(runner);
    let is_gpu = !matches!(runner, Runner::Cpu(_));
    let mut cases = Vec::new();
    for count in Count::ALL {
        for number in count.numbers(is_gpu) {
            for (problem, configs) in problems(count, number, is_gpu) {
                let backends: Vec<Backend> = match (runner, kernels) {
                    (Runner::Cpu(level), _) => vec![Backend::Cpu(level)],
                    (_, Kernels::Only(config)) => vec![Backend::Sim(config)],
                    (_, Kernels::All) => configs.into_iter().map(Backend::Sim).collect(),
                };
                for backend in backends {
                    let dtype = if is_gpu { kernels.dtype(problem.dtype) } else { problem.dtype };
                    let mut problem = problem.clone();
                    problem.dtype = dtype;
                    if takes(backend, &problem) {
                        cases.extend(of_all_numbers(count, number, &problem, backend, cases.len()));
                    }
                }
            }
        }
    }
    let option = kernel_option(kernels);
    let command =
        |number: usize| format!("flashcore verify --backend {backend}{option} --suite counts --only {number}");
    let on_gpu = |backend| match (runner, backend) {
        (Runner::Cuda(_), Backend::Sim(config)) => Backend::Cuda(config),
        (_, other) => other,
    };
    let case =
        |(number, case): (usize, Case)| Case { command: Some(command(number)), backend: on_gpu(case.backend), ..case };
    cases.into_iter().enumerate().map(case).collect()
}

/// The case with what its tensors hold by turns; scores that rise and fall along splits, chunks and tiles of their own.
fn of_all_numbers(count: Count, number: usize, problem: &Problem, backend: Backend, index: usize) -> Vec<Case> {
    /// The seed of the largest scores, see [`Stress::Rising`].
    const LARGEST: u64 = 2;
    let stress = |stress| Case {
        numbers: Numbers::Stress(stress),
        ..Case::new(problem.clone(), LARGEST + 3 * index as u64, backend)
    };
    let plain = Case::new(problem.clone(), index as u64, backend);
    // The many sequences of the CPU take long where they have many rows.
    let is_cheap = problem.batch * problem.query_length <= limit("scheduler::MIN_ITEMS");
    match count {
        Count::NewSequences => {
            let mut growing = KvCacheProblem::new(problem.clone(), 2);
            growing.rotary = (number % 2 == 1)
                .then(|| Rotary::new(RotaryStyle::Neox, problem.head_dim, problem.key_length + problem.query_length));
            vec![Case::with_kv_cache(growing, index as u64, backend)]
        }
        Count::Tiles | Count::Splits | Count::Chunks if number > 2 && is_cheap => {
            const ALONG: [Stress; 4] = [Stress::Falling, Stress::SpikeFirst, Stress::SpikeLast, Stress::OneKey];
            vec![plain, stress(Stress::Rising), stress(ALONG[index / 3 % ALONG.len()])]
        }
        _ => vec![plain],
    }
}

/// Problems in which a count is a number, each with the configs of GPUs that make it so.
fn problems(count: Count, number: usize, is_gpu: bool) -> Vec<(Problem, Vec<Config>)> {
    const DTYPES: [DType; 3] = [DType::F16, DType::Bf16, DType::F32];
    let dim = if is_gpu { 32 } else { 4 };
    let dtype = if is_gpu { DTYPES[number % 2] } else { DTYPES[number % 3] };
    let base = |batch: usize, heads: usize, queries: usize, keys: usize| {
        Problem::new(batch, heads, queries, dim, dtype).with_key_length(keys).with_lse(true)
    };
    let ampere = AmpereConfig { warps: 2, tile_n: 16, ..AmpereConfig::default() };
    let hopper = HopperConfig {
        warpgroups: 1,
        tile_n: 16,
        persistent: false,
        overlap_rescale: false,
        ..HopperConfig::default()
    };
    let chunked = [
        Config::from(AmpereConfig { persistent: 3, pack_gqa: true, chunk_keys: 16, ..ampere }),
        Config::from(HopperConfig { pdl: true, chunk_keys: 16, ..hopper }),
    ];
    let both = || vec![Config::from(ampere), Config::from(hopper)];
    // Few rows, which a CPU decodes, and more than it decodes.
    let (few, more) = (1, limit("decode::MAX_ROWS") + 1);
    match count {
        Count::Rows => vec![(base(1, 1, number, 40), both())],
        Count::Keys => {
            vec![(base(1, 2, few, number).with_layout(Layout::Bshd), both()), (base(1, 2, more, number), both())]
        }
        Count::Tiles if is_gpu => {
            let stages = |stages: u32| {
                let pipelines = [
                    Config::from(AmpereConfig { stages, ..ampere }),
                    Config::from(HopperConfig { stages: stages.max(2), ..hopper }),
                ];
                let tiles = [number, stages as usize, stages as usize + 1];
                tiles.map(|tiles| (base(1, 1, more, 16 * tiles), pipelines.to_vec()))
            };
            if number == 2 {
                [1, 2, 3, 5, 8].into_iter().flat_map(stages).collect()
            } else {
                vec![(base(1, 1, more, 16 * number), both())]
            }
        }
        Count::Tiles => {
            // So many sequences that none is split, of the same keys.
            let shared = |queries: usize, dtype: DType, tile: &str| {
                let mut problem = base(limit("scheduler::MIN_ITEMS"), 1, queries, number * limit(tile));
                (problem.head_dim, problem.value_dim, problem.kv_batch, problem.dtype) = (2, 2, Some(1), dtype);
                (problem, Vec::new())
            };
            let mut all = vec![shared(few, dtype, "decode::KV_TILE")];
            if number <= limit("blocked::MAX_PACKED_TILES") + 1 {
                all.push(shared(more, DType::Bf16, "blocked::KV_TILE"));
                all.push(shared(more, DType::F32, "blocked::MAX_KV_TILE"));
            }
            all
        }
        Count::Splits if is_gpu => {
            let config = Config::from(AmpereConfig { num_splits: number as u32, pack_gqa: true, ..ampere });
            vec![(base(1, 2, few, 16 * number), vec![config])]
        }
        Count::Chunks if !is_gpu => Vec::new(),
        Count::Splits => {
            let keys = number * limit("scheduler::MIN_SPLIT_KEYS");
            vec![(base(1, 1, few, keys), Vec::new()), (base(1, 1, more, keys), Vec::new())]
        }
        Count::Chunks => vec![(base(1, 2, few, 16 * number).with_seqused_k(true), chunked.to_vec())],
        Count::KeyHeads => vec![(base(1, number, few, 40).with_layout(Layout::Bshd), both())],
        Count::GroupHeads => {
            vec![(base(1, number, 3, 40).with_key_heads(1), chunked.into_iter().chain(both()).collect())]
        }
        Count::Sequences => vec![(base(number, 1, few, 20).with_seqused_k(true), chunked.to_vec())],
        Count::NewSequences => vec![(base(number, 1, few, 140), vec![chunked[0]])],
        Count::Pages => {
            let paged = |page_size: usize| {
                let mut problem = base(1, 1, few, number * page_size).with_seqused_k(true).with_layout(Layout::Bshd);
                problem.paged = Some(PagedKv::new(page_size, number.max(1), number));
                problem
            };
            vec![(paged(1), vec![Config::from(ampere)]), (paged(4).with_leftpad_k(true), vec![Config::from(ampere)])]
        }
        Count::Parts => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_cpu::Level;
    use std::fs;
    use std::path::Path;

    /// Bounds in the code that no case is made for, and why.
    const OTHERS: &[(&str, &str)] = &[
        ("amx::TILE_ROWS", "that of blocked, by an assertion"),
        ("avx512_bf16::TILE_ROWS", "that of blocked"),
        ("kernel::TILE_ROWS", "that of blocked"),
        ("kernel::MAX_ITEM_ROWS", "those of the scheduler"),
        ("kernel::MAX_PANEL_LANES", "that of blocked::MAX_LANES"),
        ("microkernel::TILE_ROWS", "that of blocked"),
        ("microkernel::MAX_ITEM_ROWS", "that of the scheduler"),
        ("vector_kernel::TILE_ROWS", "that of blocked, or twice as many keys"),
        ("parallel::MIN_MULTIPLY_ADDS", "work worth a thread"),
        ("scheduler::MAX_GUIDED_ITEM", "a ratio of work"),
        ("decode::MIN_INTERLEAVED_BYTES", "bytes"),
        ("lookahead::MAX_FAR_LINES", "lines to prefetch"),
        ("detect::AMX_TILE", "a bit of the processor"),
        ("microkernel::MAX_LANE_BLOCKS", "blocks of a panel, whose rows are counted"),
        ("real::TERMS_AT_ONCE", "terms of a sum over keys, of which tiles have a multiple"),
        ("vector::MAX_LANES", "a quarter of blocked::MAX_LANES"),
        ("specialization::MAX_VEC_BYTES", "bytes"),
        ("unsupported::MOST_GRID_ROWS", "more is refused"),
        ("unsupported::MOST_TILES", "more is refused"),
        ("config::MOST_OPERAND_REGISTERS", "registers"),
        ("ladder::WORDS_AT_ONCE", "compiled in"),
        ("config::MANY_OUTPUT_REGISTERS", "registers"),
        ("fused::MOST_OPERAND_REGISTERS", "registers"),
        ("mma_fp8::MOST_UNORDERED_REGISTERS", "registers"),
        ("scales::LEAST_EXPONENT", "bits of a number"),
        ("dynamic::NO_TILE", "a number of no tile"),
        ("output::COLUMNS_AT_ONCE", "compiled in"),
        ("tf32::TILES_AT_A_TIME", "compiled in"),
        ("tf32::MANY_TILES", "compiled in"),
        ("consumer::KEYS_AT_ONCE", "keys of a tile"),
        ("doc_boundaries::ROWS_AT_ONCE", "block masks: the suite features, and tests of their own"),
        ("precompute::ROWS_AT_ONCE", "block masks: the suite features, and tests of their own"),
        ("precompute::BLOCKS_AT_ONCE", "block masks: the suite features, and tests of their own"),
        ("precompute::MAX_BLOCKS", "65,536 keys and more under a block mask: too much for the simulator"),
        ("sorted::MAX_TILES", "16,384 rows and more under a block mask: too much for the simulator"),
        ("interval::MAX_ENTRIES", "entries of a table of an expression: tests of their own"),
        ("lpt::MAX_PLANNED", "the order of tiles alone"),
        ("lpt::MIN_CANDIDATES", "the order of tiles alone"),
        ("fused::MAX_NEW_KEYS", "more is refused, and as many are in tests of their own"),
    ];

    /// A bound that the code gains or renames is given cases here, or a reason.
    #[test]
    fn every_bound_of_the_code_has_cases() {
        let limits: Vec<_> = limits().map(|(name, _)| name).collect();
        for name in &limits {
            assert!(TABLE.iter().any(|(known, _)| known == name), "what is compared with {name}? No case has it");
        }
        assert_eq!(limits.len(), TABLE.len(), "the table has a constant that the code has no more");
        let mut found = Vec::new();
        for package in ["flashcore-cpu", "flashcore-kernels"] {
            bounds(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(package).join("src"), &mut found);
        }
        assert!(found.len() > 40, "{found:?}");
        for bound in &found {
            let is_known = limits.contains(&bound.as_str()) || OTHERS.iter().any(|(other, _)| other == bound);
            assert!(is_known, "{bound} is new: add it to the `LIMITS` of its package, or to the reasons here");
        }
        for (name, reason) in OTHERS {
            assert!(found.iter().any(|bound| bound == name), "{name} is no more ({reason})");
        }
    }

    /// Constants of the files of a folder whose names are those of bounds, each after the name of its module.
    fn bounds(folder: &Path, found: &mut Vec<String>) {
        for entry in fs::read_dir(folder).expect("a folder of the workspace") {
            let path = entry.expect("an entry").path();
            let name = |path: &Path| path.file_stem().expect("a name").to_string_lossy().into_owned();
            let module = if name(&path) == "mod" { name(folder) } else { name(&path) };
            // What heuristics choose between is right in any case.
            if module == "heuristics" || module.ends_with("tests") {
                continue;
            }
            if path.is_dir() {
                bounds(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).expect("a file of text");
                found.extend(text.lines().filter_map(bound).map(|bound| format!("{module}::{bound}")));
            }
        }
    }

    /// The name of a constant integer, if it is that of a bound.
    fn bound(line: &str) -> Option<&str> {
        let (before, rest) = line.split_once("const ")?;
        let (name, rest) = rest.split_once(": ")?;
        let is_integer = ["usize = ", "u32 = ", "i32 = "].iter().any(|ty| rest.starts_with(ty));
        let is_bound = ["MAX_", "MIN_", "MOST_", "LEAST_", "MANY_"].iter().any(|start| name.starts_with(start))
            || ["_AT_ONCE", "_AT_A_TIME", "_TILE", "TILE_ROWS"].iter().any(|end| name.ends_with(end));
        (is_integer && is_bound && !before.contains("//")).then_some(name)
    }

    /// Every case is taken by some backend, and counts are what they are meant to be.
    #[test]
    fn counts_reach_far_past_every_constant() {
        let cases = counts(Runner::Cpu(Level::Portable));
        let most = |count: fn(&Problem) -> usize| cases.iter().map(|case| count(&case.problem)).max();
        assert!(most(|problem| problem.key_length) > Some(257 * 512 - 1));
        assert!(most(|problem| problem.batch) > Some(4096));
        assert!(most(|problem| problem.query_length) > Some(1025));
        assert!(most(|problem| problem.query_heads / problem.key_heads) > Some(64));
        assert!(most(|problem| problem.paged.map_or(0, |paged| paged.table_width)) > Some(4096));
        for case in cases.iter().chain(&counts(Runner::Sim(Kernels::All))) {
            assert_eq!(case.problem.validate(), Ok(()), "{case}");
        }
        let splits = |case: &&Case| {
            case.backend
                .config()
                .and_then(|config| AmpereConfig::try_from(config).ok())
                .is_some_and(|config| config.num_splits > 32)
        };
        assert!(counts(Runner::Sim(Kernels::All)).iter().filter(splits).count() > 4);
    }
}
