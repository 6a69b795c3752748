//! Packed and paged sequences of the Hopper kernel, in the simulator: few persistent CTAs, so that each goes from one sequence to
//! the next, and lengths around every edge of a tile.

use flashcore_bench::testkit::simulate::simulate;
use flashcore_ir::Arch;
use flashcore_kernels::heuristics::select;
use flashcore_kernels::{Config, HopperConfig, LaunchPlan, Reason, Target};
use flashcore_problem::{
    Alignment, DType, Evidence, Inputs, Mask, PagedKv, Problem, ReferenceError, Shape, Strides, Tensor, judge, oracle,
};

const CAUSAL: Mask = Mask::Causal(Alignment::BottomRight);
const TOP_LEFT: Mask = Mask::Causal(Alignment::TopLeft);
const WINDOW: Mask = Mask::Window { left: Some(90), right: Some(3), alignment: Alignment::BottomRight };
/// Fewer SMs than tiles.
const TARGET: Target = Target::new(Arch::Sm90a, 3);

/// The default, without persistent CTAs, with ping-pong, and with the keys split by warpgroup and by CTA.
const CONFIGS: [&str; 5] = [
    "hopper",
    "hopper-128x128-2stage",
    "hopper-192x64-2stage-overlap-pingpong-persistent",
    "hopper-64x64-4stage-2kvgroups-pdl",
    "hopper-64x64-4stage-2kvgroups-2cluster-pdl",
];

/// Tiles from a counter: with one stage of Q and with two, with ping-pong and without.
const DYNAMIC: [&str; 3] = [
    "hopper-128x128-2stage-overlap-persistent-dynamic",
    "hopper-192x64-2stage-overlap-pingpong-pdl-persistent-dynamic",
    "hopper-64x176-2stage-persistent-dynamic",
];

fn check(config: Config, problem: &Problem, inputs: &Inputs, seed: u64) {
    let plan = LaunchPlan::new(problem, config, TARGET);
    let plan = plan.unwrap_or_else(|reasons| panic!("{config} {problem}: {}", reasons[0]));
    let simulation =
        simulate(&plan, problem, inputs, seed).unwrap_or_else(|error| panic!("{config} {problem}: {error}"));
    let expected = oracle(problem, inputs).expect("inputs that validate");
    let reference = ReferenceError::measure(problem, inputs, &expected).expect("inputs that validate");
    let verdict = judge(problem, &expected, &reference, &Evidence::new(inputs, &simulation.outputs));
    assert!(verdict.failures.is_empty(), "{config} {problem} seed {seed}: {:?}", verdict.failures);
}

fn check_random(config: &str, problem: &Problem, seed: u64) {
    check(config.parse().expect("a config"), problem, &Inputs::random(problem, seed), seed);
}

/// Sets rows of a tensor that have only one batch to NaN.
fn poison(tensor: &mut Tensor, shape: Shape, strides: Strides, is_poison: impl Fn(usize) -> bool) {
    for (batch, head, row) in shape.each_row().filter(|&(_, _, row)| is_poison(row)) {
        let start = strides.row_start(batch, head, row);
        (start..start + shape.columns).for_each(|index| tensor.set(index, f64::NAN));
    }
}

/// A batch of packed sequences of these numbers of rows and keys, with NaN in the rows before, after and between that belong
/// to none, and in keys that no row attends.
fn packed(base: &Problem, lengths: &[(usize, usize)], seed: u64) -> (Problem, Inputs) {
    let offsets = |lengths: Vec<usize>| {
        let ends = lengths.iter().scan(0, |end, length| {
            *end += length;
            Some(*end as u32)
        });
        std::iter::once(0).chain(ends).collect::<Vec<_>>()
    };
    let queries: Vec<_> = lengths.iter().map(|&(queries, _)| queries).collect();
    let keys: Vec<_> = lengths.iter().map(|&(_, keys)| keys).collect();
    let (cu_seqlens_q, cu_seqlens_k) = (offsets(queries.clone()), offsets(keys.clone()));
    let end = |offsets: &[u32]| offsets.last().copied().unwrap_or(0) as usize;
    // Rows after the last sequence too.
    let (total_q, total_k) = (end(&cu_seqlens_q) + 5, end(&cu_seqlens_k) + 7);
    let mut problem = base.clone();
    problem.batch = lengths.len();
    problem.query_length = queries.into_iter().max().unwrap_or(0);
    problem.key_length = keys.into_iter().max().unwrap_or(0);
    let mut flat = base.clone();
    (flat.batch, flat.query_length, flat.key_length) = (1, total_q, total_k);
    let tensors = Inputs::random(&flat, seed);
    let others = Inputs::random(&problem, seed);
    let problem = problem.with_total_q(Some(total_q)).with_total_k(Some(total_k));
    let mut inputs = Inputs { query: tensors.query, key: tensors.key, value: tensors.value, ..others };
    (inputs.cu_seqlens_q, inputs.cu_seqlens_k) = (Some(cu_seqlens_q.clone()), Some(cu_seqlens_k.clone()));
    let strides = problem.strides();
    poison(&mut inputs.query, problem.query_shape(), strides.query, |row| row >= end(&cu_seqlens_q));
    let mut is_attended = vec![false; total_k];
    for sequence in inputs.views().sequences(&problem) {
        for row in 0..sequence.query_length {
            sequence.attended_keys(&problem, row).for_each(|key| is_attended[sequence.key_row(key).1] = true);
        }
    }
    poison(&mut inputs.key, problem.key_shape(), strides.key, |row| !is_attended[row]);
    poison(&mut inputs.value, problem.value_shape(), strides.value, |row| !is_attended[row]);
    (problem, inputs)
}

/// Lengths around the edges of tiles of 64 and 128 rows, and of up to four KV blocks.
const EDGES: [(usize, usize); 9] =
    [(128, 128), (0, 200), (1, 1), (127, 450), (64, 0), (129, 129), (257, 385), (1, 300), (0, 0)];

fn base(dtype: DType, head_dim: usize, mask: Mask) -> Problem {
    let mut problem = Problem::new(1, 2, 1, head_dim, dtype).with_lse(true).with_mask(mask);
    problem.key_heads = 1;
    problem
}

#[test]
fn packed_lengths_around_every_edge() {
    for (seed, config) in CONFIGS.iter().chain(&DYNAMIC).enumerate() {
        for mask in [Mask::None, CAUSAL] {
            let (problem, inputs) = packed(&base(DType::Bf16, 64, mask), &EDGES, seed as u64);
            check(config.parse().expect("a config"), &problem, &inputs, seed as u64);
        }
    }
}

/// One long sequence and many short ones: runs of more than 32 tiles that do not exist, of each CTA.
#[test]
fn one_long_sequence_among_short_ones() {
    let mut lengths: Vec<_> =
        (0..90).map(|index| if index % 5 == 0 { (1 + index / 9, 20 + index) } else { (0, 0) }).collect();
    lengths[37] = (1100, 1100);
    for (seed, config) in CONFIGS[..3].iter().chain(&DYNAMIC[..2]).enumerate() {
        for mask in [Mask::None, CAUSAL] {
            let (problem, inputs) = packed(&base(DType::F16, 32, mask), &lengths, seed as u64);
            check(config.parse().expect("a config"), &problem, &inputs, seed as u64);
        }
    }
}

#[test]
fn packed_sequences_of_default_configs() {
    for (seed, (head_dim, dtype, mask)) in [
        (64, DType::F16, WINDOW),
        (128, DType::F16, CAUSAL),
        (128, DType::Bf16, TOP_LEFT),
        (256, DType::Bf16, CAUSAL),
        (80, DType::F16, Mask::None),
    ]
    .into_iter()
    .enumerate()
    {
        let lengths = [(200, 300), (1, 77), (0, 5), (70, 410), (129, 64)];
        let (problem, inputs) = packed(&base(dtype, head_dim, mask), &lengths, seed as u64);
        let config = select(&problem, TARGET);
        assert!(HopperConfig::try_from(config).is_ok(), "{config}");
        check(config, &problem, &inputs, seed as u64);
    }
}

#[test]
fn packed_sequences_with_score_terms() {
    let lengths = [(140, 300), (3, 129), (64, 200)];
    for (seed, config) in CONFIGS[..3].iter().chain(&DYNAMIC[2..]).enumerate() {
        let mut problem = base(DType::F16, 64, CAUSAL);
        (problem.alibi, problem.sinks, problem.softcap) = (true, true, Some(5.0));
        let (problem, inputs) = packed(&problem, &lengths, seed as u64);
        check(config.parse().expect("a config"), &problem, &inputs, seed as u64);
    }
    let mut problem = base(DType::Bf16, 64, WINDOW);
    problem.bias = true;
    let (problem, inputs) = packed(&problem, &lengths, 9);
    check("hopper-128x64-2stage-overlap-persistent".parse().expect("a config"), &problem, &inputs, 9);
}

/// Every way in which sequences have lengths, but for pages.
#[test]
fn lengths_padding_and_batches_of_a_cache() {
    for (seed, config) in CONFIGS.iter().enumerate() {
        let seed = seed as u64;
        let mut base = Problem::new(4, 2, 150, 64, DType::F16).with_lse(true).with_mask(CAUSAL);
        (base.key_heads, base.key_length) = (1, 300);
        check_random(config, &base.clone().with_seqused_q(true).with_seqused_k(true), seed);
        check_random(config, &base.clone().with_total_q(Some(420)).with_seqused_k(true).with_kv_batch(Some(6)), seed);
        check_random(config, &base.clone().with_kv_batch(Some(3)).with_leftpad_k(true).with_mask(TOP_LEFT), seed);
        let packed = base.with_total_q(Some(400)).with_total_k(Some(900)).with_leftpad_k(true);
        check_random(config, &packed.with_seqused_q(true).with_seqused_k(true).with_mask(WINDOW), seed);
    }
}

/// Which CTA takes a tile depends on when it asks, and the bits of no row do.
#[test]
fn tiles_from_a_counter_give_the_same_bits() {
    let lengths = [(70, 300), (400, 410), (1, 77), (0, 5), (129, 64), (260, 260)];
    let (problem, inputs) = packed(&base(DType::Bf16, 64, CAUSAL), &lengths, 3);
    let run = |config: &str, seed: u64| {
        let plan = LaunchPlan::new(&problem, config.parse().expect("a config"), TARGET).expect("a plan");
        let outputs =
            simulate(&plan, &problem, &inputs, seed).unwrap_or_else(|error| panic!("{config}: {error}")).outputs;
        // Rows of no sequence are NaN.
        (outputs.output.data, outputs.lse.map(|lse| lse.into_iter().map(f32::to_bits).collect::<Vec<_>>()))
    };
    let in_turn = run("hopper-128x128-2stage-overlap-persistent", 0);
    for seed in 0..4 {
        assert!(run(DYNAMIC[0], seed) == in_turn, "other bits with seed {seed}");
    }
}

#[test]
fn a_counter_is_for_query_lengths() {
    let problem = Problem::new(2, 2, 300, 64, DType::F16).with_seqused_k(true);
    let config = DYNAMIC[0].parse().expect("a config");
    assert_eq!(LaunchPlan::new(&problem, config, TARGET).err(), Some(vec![Reason::Dynamic { config }]));
}

/// A cache of pages in random order, with more pages and a longer table than sequences need.
fn paged(problem: Problem, page_size: usize) -> Problem {
    let width = problem.key_length.div_ceil(page_size) + 1;
    let num_pages = problem.batch * width + 2;
    problem.with_paged(Some(PagedKv { table_stride: width + 3, ..PagedKv::new(page_size, num_pages, width) }))
}

/// Pages smaller than a KV block, as large, larger, and such that neither is a multiple of the other.
#[test]
fn pages_of_every_size() {
    for (seed, page_size) in [16, 48, 64, 128, 160, 256, 512].into_iter().enumerate() {
        let seed = seed as u64;
        let mut base = Problem::new(4, 2, 150, 64, DType::Bf16).with_lse(true).with_mask(CAUSAL).with_seqused_k(true);
        (base.key_heads, base.key_length) = (1, 450);
        let problem = paged(base.with_total_q(Some(420)), page_size);
        check_random(CONFIGS[seed as usize % CONFIGS.len()], &problem, seed);
        check_random("hopper", &problem.with_mask(Mask::None), seed + 1);
    }
}

#[test]
fn pages_of_default_configs() {
    for (seed, (head_dim, dtype, mask, page_size)) in [
        (64, DType::F16, WINDOW, 16),
        (128, DType::F16, CAUSAL, 16),
        (128, DType::Bf16, TOP_LEFT, 32),
        (192, DType::F16, CAUSAL, 64),
        (256, DType::Bf16, CAUSAL, 16),
        (80, DType::F16, Mask::None, 256),
    ]
    .into_iter()
    .enumerate()
    {
        let mut base = Problem::new(3, 4, 200, head_dim, dtype).with_lse(true).with_mask(mask).with_seqused_k(true);
        (base.key_heads, base.key_length) = (2, 410);
        (base.alibi, base.sinks) = (seed % 2 == 0, seed % 3 == 0);
        base = if seed % 2 == 0 { base.with_total_q(Some(400)) } else { base.with_seqused_q(true) };
        let problem = paged(base, page_size);
        let config = select(&problem, TARGET);
        assert!(HopperConfig::try_from(config).is_ok(), "{config}");
        check(config, &problem, &Inputs::random(&problem, seed as u64), seed as u64);
    }
}

/// Pages without lengths, whose last has rows that no sequence has; of a table with rows of its own.
#[test]
fn pages_of_full_sequences() {
    for (seed, config) in CONFIGS.iter().enumerate() {
        let mut problem = Problem::new(3, 2, 70, 64, DType::F16).with_lse(true);
        (problem.key_heads, problem.key_length) = (1, 277);
        check_random(config, &paged(problem.clone(), 32), seed as u64);
        check_random(config, &paged(problem, 80).with_kv_batch(Some(2)).with_mask(WINDOW), seed as u64);
    }
}

#[test]
fn pages_that_tma_does_not_take() {
    let mut problem = Problem::new(2, 1, 100, 64, DType::F16).with_seqused_k(true);
    problem.key_length = 200;
    let reason =
        |problem: &Problem| LaunchPlan::new(problem, Config::hopper(), TARGET).err().map(|mut all| all.remove(0));
    assert_eq!(reason(&paged(problem.clone(), 24)), Some(Reason::PageSize { page_size: 24 }));
    assert_eq!(reason(&paged(problem.clone(), 32).with_leftpad_k(true)), Some(Reason::PaddedPages));
    assert_eq!(reason(&paged(problem.clone(), 32)), None);
    assert_eq!(select(&paged(problem, 24), TARGET).family(), "ampere");
}
