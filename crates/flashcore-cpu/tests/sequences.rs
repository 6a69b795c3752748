//! Packed sequences (varlen), lengths of their own and paged KV caches before the judge, at every level that this machine
//! has. Rows, pages and table entries that no sequence uses hold NaN and garbage.

use flashcore_cpu::{Level, attend_with};
use flashcore_problem::{
    Alignment, DType, Evidence, Inputs, Layout, Mask, MaskMod, Outputs, PagedKv, Problem, ReferenceError, ScoreMod,
    SplitMix64, judge, oracle,
};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::sync::LazyLock;

static ONE_THREAD: LazyLock<ThreadPool> = LazyLock::new(|| ThreadPoolBuilder::new().num_threads(1).build().unwrap());
static MANY_THREADS: LazyLock<ThreadPool> = LazyLock::new(|| ThreadPoolBuilder::new().num_threads(16).build().unwrap());

fn run(level: Level, problem: &Problem, inputs: &Inputs) -> Outputs {
    let mut outputs = Outputs::poisoned(problem);
    attend_with(level, problem, inputs, &mut outputs).unwrap();
    outputs
}

/// Computes with one thread and with many at each level, and lets the gate judge.
fn check_inputs(problem: &Problem, inputs: &Inputs) {
    let expected = oracle(problem, inputs).unwrap();
    let yardstick = ReferenceError::measure(problem, inputs, &expected).unwrap();
    for level in Level::available() {
        let outputs = ONE_THREAD.install(|| run(level, problem, inputs));
        let repeats = [MANY_THREADS.install(|| run(level, problem, inputs))];
        let evidence = Evidence { repeats: &repeats, ..Evidence::new(inputs, &outputs) };
        let verdict = judge(problem, &expected, &yardstick, &evidence);
        assert!(verdict.passed(), "{problem} {:?} at level {level}: {verdict}", problem.paged);
    }
}

fn check(problem: &Problem) {
    check_inputs(problem, &Inputs::random(problem, 1));
}

/// A cache of which each sequence has pages of its own.
fn paged(problem: &Problem, page_size: usize) -> PagedKv {
    let table_width = problem.key_length.div_ceil(page_size);
    PagedKv::new(page_size, problem.cache_batches() * table_width, table_width)
}

const PAGE_SIZES: [usize; 7] = [1, 3, 4, 16, 64, 128, 256];

/// Chooses at random.
struct Choice(SplitMix64);

impl Choice {
    fn among<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.0.below(all.len())]
    }

    /// True once in `times`.
    fn once_in(&mut self, times: usize) -> bool {
        self.0.below(times) == 0
    }
}

/// A problem of any kind of sequences, with any features.
fn random_problem(seed: u64, dtype: DType) -> Problem {
    let mut choice = Choice(SplitMix64::stream(seed, 100));
    let batch = choice.among(&[1, 2, 3, 5, 9, 64]);
    let (query_heads, key_heads) = choice.among(&[(1, 1), (2, 2), (4, 2), (3, 1), (8, 1)]);
    let (head_dim, value_dim) = choice.among(&[(32, 32), (40, 24), (64, 64), (16, 8), (7, 3)]);
    let mut problem = Problem::new(batch, query_heads, 1, head_dim, dtype);
    (problem.key_heads, problem.value_dim) = (key_heads, value_dim);
    // Some decode, some do not, and the oracle is done soon.
    let lengths: &[(usize, usize)] = if batch > 9 {
        &[(1, 130), (3, 400), (20, 60), (9, 200)]
    } else {
        &[(1, 1300), (1, 530), (3, 700), (12, 1100), (70, 600), (150, 270), (33, 1), (40, 0)]
    };
    (problem.query_length, problem.key_length) = choice.among(lengths);

    if choice.once_in(2) {
        // Mostly more than there is room for, or with rows left that belong to no sequence.
        problem.total_q = Some(problem.query_length * (1 + choice.0.below(batch + 1)));
    }
    problem.seqused_q = choice.once_in(3);
    problem.seqused_k = choice.once_in(2);
    problem.leftpad_k = choice.once_in(3);
    match choice.0.below(5) {
        0 => {}
        1 => problem.total_k = Some(problem.key_length * (1 + choice.0.below(batch + 1))),
        others => {
            if choice.once_in(2) {
                problem.kv_batch = Some(1 + choice.0.below(2 * batch));
            }
            if others > 2 {
                let mut pages = paged(&problem, choice.among(&PAGE_SIZES));
                pages.table_width += choice.among(&[0, 0, 1, 7]);
                pages.table_stride = pages.table_width + choice.among(&[0, 0, 1, 5]);
                // Fewer pages than entries are shared.
                pages.num_pages = choice.among(&[pages.num_pages, pages.num_pages / 2 + 1, pages.num_pages + 9]);
                problem.paged = Some(pages);
            }
        }
    }

    let alignment = choice.among(&[Alignment::TopLeft, Alignment::BottomRight]);
    problem.mask = match choice.0.below(5) {
        0 | 1 => Mask::None,
        2 => Mask::Causal(alignment),
        3 => Mask::Window { left: Some(choice.0.below(300)), right: Some(choice.0.below(9)), alignment },
        _ => Mask::Window { left: None, right: Some(choice.0.below(200)), alignment },
    };
    (problem.alibi, problem.sinks, problem.bias) = (choice.once_in(4), choice.once_in(3), choice.once_in(4));
    problem.softcap = choice.once_in(4).then_some(1.5);
    problem.lse = !choice.once_in(3);
    problem.layout = choice.among(&[Layout::Bhsd, Layout::Bshd]);
    if choice.once_in(6) {
        problem.score_mod =
            Some(ScoreMod::new("by sequence", |score, at| score + (at.batch + at.query - at.key).to_number() * 0.01));
    }
    if choice.once_in(6) {
        problem.mask_mod = Some(MaskMod::new("three in four", |at| {
            let place = at.batch + at.query + at.key;
            !(place - (place >> 2) * 4).equals(1)
        }));
    }
    problem
}

/// Every combination of operands, features and types.
fn check_random(seeds: std::ops::Range<u64>) {
    for seed in seeds {
        for dtype in DType::ALL {
            let problem = random_problem(seed, dtype);
            check_inputs(&problem, &Inputs::random(&problem, seed));
        }
    }
}

#[test]
fn random_sequences() {
    check_random(0..16);
}

#[test]
fn more_random_sequences() {
    check_random(16..32);
}

/// Pages of every size, a few rows and many, with and without padding and sharing.
#[test]
fn every_page_size() {
    for page_size in PAGE_SIZES {
        for dtype in DType::ALL {
            for queries in [1, 2, 70] {
                let mut problem = Problem::new(3, 4, queries, 32, dtype);
                (problem.key_heads, problem.key_length, problem.lse) = (2, 700, true);
                (problem.seqused_k, problem.leftpad_k) = (queries != 2, queries == 2);
                problem.mask = Mask::Causal(Alignment::BottomRight);
                problem.paged = Some(PagedKv { table_stride: 800, ..paged(&problem, page_size) });
                check(&problem);
            }
        }
    }
}

/// A paged cache gives the bits of a contiguous one with the same rows.
#[test]
fn pages_give_the_bits_of_contiguous_rows() {
    for dtype in DType::ALL {
        for (queries, page_size) in
            [(1, 1), (1, 16), (1, 64), (2, 3), (2, 256), (70, 1), (70, 16), (70, 100), (70, 256)]
        {
            let mut problem = Problem::new(3, 4, queries, 64, dtype);
            (problem.key_heads, problem.key_length, problem.lse) = (2, 1100, true);
            (problem.seqused_k, problem.mask) = (true, Mask::Causal(Alignment::BottomRight));
            let contiguous = Inputs::random(&problem, 3);
            let pages = problem.clone().with_paged(Some(paged(&problem, page_size)));
            let mut inputs = Inputs::random(&pages, 3);
            inputs.query = contiguous.query.clone();
            inputs.seqused_k.clone_from(&contiguous.seqused_k);
            // The table of random inputs has garbage in entries that it does not use.
            let table_width = problem.key_length.div_ceil(page_size);
            inputs.page_table = Some((0..3 * table_width as i32).rev().collect());
            let views = inputs.views();
            let places: Vec<_> = views
                .sequences(&pages)
                .flat_map(|sequence| (0..sequence.key_length).map(move |key| (sequence, key)))
                .flat_map(|(sequence, key)| (0..2).map(move |head| (sequence.index, sequence.key_row(key), head, key)))
                .collect();
            let (of_pages, of_rows) = (pages.strides(), problem.strides());
            for (index, (page, row), head, key) in places {
                let (to, from) = (of_pages.key.row_start(page, head, row), of_rows.key.row_start(index, head, key));
                for column in 0..64 {
                    inputs.key.set(to + column, contiguous.key.get(from + column));
                    inputs.value.set(to + column, contiguous.value.get(from + column));
                }
            }
            for level in Level::available() {
                let (actual, expected) = (run(level, &pages, &inputs), run(level, &problem, &contiguous));
                assert!(actual.output == expected.output, "{pages} in pages of {page_size} at level {level}");
                assert_eq!(actual.lse, expected.lse, "{pages} in pages of {page_size} at level {level}");
            }
        }
    }
}

/// Prompts and single rows in one batch, one of them over many keys, which are split.
#[test]
fn prompts_beside_decoding() {
    for dtype in DType::ALL {
        for page_size in [None, Some(16), Some(128)] {
            let mut problem = Problem::new(6, 4, 300, 32, dtype);
            (problem.key_heads, problem.key_length, problem.lse) = (1, 3000, true);
            (problem.total_q, problem.seqused_k) = (Some(310), true);
            problem.mask = Mask::Causal(Alignment::BottomRight);
            problem.paged = page_size.map(|page_size| paged(&problem, page_size));
            let mut inputs = Inputs::random(&problem, 7);
            inputs.cu_seqlens_q = Some(vec![0, 1, 2, 2, 130, 133, 134]);
            inputs.seqused_k = Some(vec![3000, 5, 40, 600, 1000, 0]);
            // Every row and page, because the random lengths are others.
            let table_width = problem.key_length.div_ceil(page_size.unwrap_or(1));
            inputs.page_table = page_size.map(|_| (0..6 * table_width as i32).map(|entry| entry ^ 1).collect());
            let mut random = SplitMix64::stream(7, 101);
            for tensor in [&mut inputs.key, &mut inputs.value] {
                (0..tensor.len()).for_each(|index| tensor.set(index, random.normal()));
            }
            check_inputs(&problem, &inputs);
        }
    }
}

/// Sequences without rows, without keys, or without both; all of them, and some.
#[test]
fn empty_sequences() {
    for dtype in DType::ALL {
        for sinks in [false, true] {
            let mut problem = Problem::new(4, 2, 40, 16, dtype);
            (problem.sinks, problem.lse, problem.total_q, problem.total_k) = (sinks, true, Some(50), Some(60));
            let mut inputs = Inputs::random(&problem, 2);
            for (queries, keys) in [
                ([0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
                ([0, 0, 0, 0, 0], [0, 10, 10, 40, 40]),
                ([0, 0, 40, 41, 41], [0, 0, 0, 0, 0]),
                ([0, 0, 3, 43, 50], [0, 40, 40, 60, 60]),
            ] {
                (inputs.cu_seqlens_q, inputs.cu_seqlens_k) = (Some(queries.to_vec()), Some(keys.to_vec()));
                let mut random = SplitMix64::stream(7, 101);
                for tensor in [&mut inputs.key, &mut inputs.value] {
                    (0..tensor.len()).for_each(|index| tensor.set(index, random.normal()));
                }
                check_inputs(&problem, &inputs);
            }
            let mut no_sequences = problem.clone();
            no_sequences.batch = 0;
            check(&no_sequences);
            let mut no_pages = Problem::new(3, 2, 5, 16, dtype);
            (no_pages.key_length, no_pages.lse, no_pages.sinks) = (0, true, sinks);
            no_pages.paged = Some(PagedKv::new(16, 0, 0));
            check(&no_pages);
        }
    }
}

/// As many sequences as a server has, each of a few rows and keys.
#[test]
fn thousands_of_sequences() {
    for (dtype, page_size) in [(DType::F16, Some(4)), (DType::Bf16, None), (DType::F32, Some(16)), (DType::F64, None)] {
        let mut problem = Problem::new(2048, 2, 12, 16, dtype);
        (problem.key_heads, problem.key_length, problem.lse) = (1, 30, true);
        (problem.total_q, problem.mask) = (Some(11_000), Mask::Causal(Alignment::BottomRight));
        match page_size {
            Some(page_size) => {
                (problem.paged, problem.seqused_k) = (Some(paged(&problem, page_size)), true);
            }
            None => problem.total_k = Some(28_000),
        }
        check(&problem);
    }
}
