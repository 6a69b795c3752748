//! The problems that mutants are tried on, with kernels that pass them.

use flashcore_kernels::{Config, HopperConfig, WarpScheduler};
use flashcore_problem::{Alignment, DType, LseBase, LseForm, Mask, MaskMod, PagedKv, Problem, Stress};

use crate::testkit::simulate::FarApart;
use crate::testkit::suites::far_trials;
use crate::testkit::{BiasForm, Numbers, Planted, expressions};

/// A group of trials, by the bugs they are made to find. A bug is planted in the kernels of one group only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// Everything that the other groups are not about.
    Plain,
    /// The wrong batch, head, row or key.
    Addressing,
    /// Offsets of 4 GiB and more.
    Far,
    /// More splits of the keys than a warp has lanes.
    Parts,
    /// Counts far past every constant, and scores that rise along the keys.
    Counts,
    /// Numbers that are slightly off, lengths one beyond a tile.
    Numeric,
    /// Many tiles of keys, and many tiles of rows for each CTA.
    Late,
    /// Clusters of CTAs that share keys, with one warpgroup in each.
    Clusters,
    /// Packed and paged sequences.
    Sequences,
    /// Sequences whose tiles come from a counter.
    Dynamic,
    /// One sequence twice in a batch.
    Invariance,
    /// Merges of partial results.
    Merge,
    /// Appends to a growing KV cache.
    KvCache,
    /// Appends to an FP8 cache.
    Quantize,
    /// Appends inside of the attention launch.
    FusedAppend,
    /// An LSE in base 2 and without the sink.
    LseForms,
    /// `f32` on tensor cores.
    Tf32,
    /// Keys and values of 8 bits.
    Fp8,
    /// Query, key and value of 8 bits on Hopper.
    Fp8Query,
    /// Query, key and value of 8 bits by `mma.sync`.
    Fp8Mma,
    /// Launches that overlap with the ones before them.
    Overlap,
    /// Device arrays that the host refuses.
    WrongArrays,
    /// More sequences than a warp scans at a time.
    Scans,
}

/// A trial before it is prepared.
pub(super) struct Start {
    pub(super) group: Group,
    pub(super) problem: Problem,
    pub(super) config: Config,
    pub(super) bias: BiasForm,
    pub(super) far: Option<FarApart>,
    /// The seed of the inputs.
    pub(super) seed: u64,
    /// Contents of the inputs.
    pub(super) numbers: Numbers,
}

/// All of them.
pub(super) fn all() -> Vec<Start> {
    let start = |group| {
        move |(problem, config): (Problem, Config)| Start {
            group,
            problem,
            config,
            bias: BiasForm::PerHead,
            far: None,
            seed: 0,
            numbers: Numbers::Normal,
        }
    };
    let mut all: Vec<Start> = plain().into_iter().map(start(Group::Plain)).collect();
    for (problem, bias) in addressed() {
        for config in [Config::scalar(), Config::ampere(), small_hopper()] {
            all.push(Start { bias, ..start(Group::Addressing)((problem.clone(), config)) });
        }
    }
    for (problem, far) in far_trials() {
        for config in [
            Config::scalar(),
            Config::ampere(),
            named("hopper-64x48-2stage"),
            named("ampere-32x32-2stage-swizzled-3splits"),
        ] {
            all.push(Start { far: Some(far.clone()), ..start(Group::Far)((problem.clone(), config)) });
        }
    }
    let mut decoding = Problem::new(1, 2, 1, 32, DType::F16);
    (decoding.key_length, decoding.lse) = (1280, true);
    all.push(start(Group::Parts)((decoding, named("ampere-32x32-2stage-swizzled-40splits"))));
    for (numbers, problem, config) in counted() {
        all.push(Start { numbers, seed: 2, ..start(Group::Counts)((problem, config)) });
    }
    for problem in numeric() {
        for config in [Config::scalar(), Config::ampere(), small_hopper()] {
            all.push(start(Group::Numeric)((problem.clone(), config)));
        }
    }
    for problem in long() {
        all.extend([Config::ampere(), small_hopper()].map(|config| start(Group::Late)((problem.clone(), config))));
    }
    let mut shared = Problem::new(1, 2, 97, 64, DType::F16);
    (shared.key_length, shared.lse) = (203, true);
    all.push(start(Group::Clusters)((shared, named("hopper-64x64-4stage-2cluster"))));
    all.extend(sequences().into_iter().map(start(Group::Sequences)));
    let mut packed =
        Problem::new(6, 4, 200, 32, DType::F16).with_total_q(Some(600)).with_total_k(Some(600)).with_lse(true);
    packed.mask = Mask::Causal(Alignment::BottomRight);
    all.push(start(Group::Dynamic)((packed, named("hopper-64x48-2stage-persistent-dynamic"))));
    let mut of_keys = Problem::new(1, 4, 97, 64, DType::F16).with_sinks(true).with_lse(true);
    (of_keys.key_heads, of_keys.key_length) = (2, 203);
    of_keys.lse_form = LseForm::default().with_base(LseBase::Two).without_sink();
    for config in [Config::ampere(), small_hopper(), named("ampere-32x32-2stage-swizzled-3splits")] {
        all.push(start(Group::LseForms)((of_keys.clone(), config)));
    }
    let mut singles = Problem::new(1, 2, 33, 32, DType::F32).with_lse(true);
    (singles.key_heads, singles.key_length) = (1, 109);
    all.push(start(Group::Tf32)((singles, named("ampere-64x32-2stage-swizzled-3xtf32"))));
    for (seed, numbers, problem, config) in fp8_query() {
        all.push(Start { seed, numbers, ..start(Group::Fp8Query)((problem, config)) });
    }
    for (seed, numbers, problem, config) in fp8_mma() {
        all.push(Start { seed, numbers, ..start(Group::Fp8Mma)((problem, config)) });
    }
    for (seed, numbers, problem, config) in fp8() {
        all.push(Start { seed, numbers, ..start(Group::Fp8)((problem, config)) });
    }
    all.extend(overlapping().into_iter().map(start(Group::Overlap)));
    let mut many =
        Problem::new(41, 1, 3, 32, DType::F16).with_total_q(Some(82)).with_total_k(Some(1200)).with_lse(true);
    many.key_length = 70;
    let chunks = "ampere-32x32-2stage-swizzled-packgqa-3persistent-64chunk";
    all.extend([chunks, "hopper-64x48-2stage-persistent"].map(|name| start(Group::Scans)((many.clone(), named(name)))));
    all
}

/// Every kernel that is launched to overlap (PDL), with the kernels before and after it: with lengths and without, with
/// chunks, a counter, a block mask, and 8 bits.
fn overlapping() -> Vec<(Problem, Config)> {
    let mut plain = Problem::new(2, 4, 20, 64, DType::F16).with_lse(true);
    (plain.key_heads, plain.key_length) = (2, 203);
    let lengths = plain.clone().with_seqused_k(true);
    let mut packed = plain.clone().with_total_q(Some(30)).with_total_k(Some(350));
    packed.mask = Mask::Causal(Alignment::BottomRight);
    let mut bytes = Problem::new(2, 4, 20, 32, DType::E4m3).with_seqused_k(true);
    (bytes.key_heads, bytes.key_length, bytes.out_dtype) = (2, 109, Some(DType::F16));
    (bytes.q_scale, bytes.k_scale, bytes.v_scale) = (true, true, true);
    let documents = masked(expressions::mask_mod("documents"));
    let mut short = plain.clone().with_total_q(Some(30)).with_total_k(Some(60));
    (short.batch, short.key_length) = (4, 70);
    [
        (plain, "hopper-64x64-4stage-2kvgroups-2cluster-pdl"),
        (lengths.clone(), "hopper-64x64-2stage-pdl-128chunk"),
        (lengths.clone(), "ampere-32x32-2stage-swizzled-packgqa-pdl-3persistent-64chunk"),
        // No sequence has a second chunk, though one could.
        (short, "ampere-32x32-2stage-swizzled-packgqa-pdl-3persistent-64chunk"),
        (packed, "hopper-64x48-2stage-pdl-persistent-dynamic"),
        (documents, "hopper-64x48-2stage-pdl-persistent"),
        (bytes, "hopper-64x32-2stage-pdl"),
    ]
    .map(|(problem, name)| (problem, named(name)))
    .into()
}

/// Keys and values of 8 bits, contiguous and paged: with scales of tokens, with scales of sequences, with a window, with
/// scales that grow along the keys, and with a NaN.
fn fp8() -> Vec<(u64, Numbers, Problem, Config)> {
    /// Seeds with which both scales are those of tokens, and those of sequences and heads.
    const TOKENS: u64 = 13;
    const SEQUENCES: u64 = 25;
    let mut plain = Problem::new(3, 4, 33, 32, DType::F16).with_kv_dtype(Some(DType::E4m3)).with_lse(true);
    (plain.key_heads, plain.key_length, plain.seqused_k) = (2, 109, true);
    (plain.k_scale, plain.v_scale) = (true, true);
    let mut paged = plain.clone();
    (paged.query_length, paged.paged) = (3, Some(PagedKv::new(16, 30, 8)));
    let ampere = named("ampere-64x32-2stage-swizzled");
    let chunks = named("ampere-16x64-2stage-swizzled-4kvwarps-packgqa-3persistent-64chunk");
    // Tiles begin before the first key that any row attends.
    let window = Mask::Window { left: Some(20), right: Some(0), alignment: Alignment::BottomRight };
    let with_nan = Numbers::Planted(Planted::NanKey);
    vec![
        (TOKENS, Numbers::Normal, plain.clone(), ampere),
        (SEQUENCES, Numbers::Normal, plain.clone(), ampere),
        (TOKENS, Numbers::Normal, paged, chunks),
        (TOKENS, Numbers::Normal, plain.clone().with_mask(window), ampere),
        (TOKENS, Numbers::Planted(Planted::GrowingScales), plain.clone(), ampere),
        (TOKENS, with_nan, plain.with_seqused_k(false), ampere),
    ]
}

/// Packed and paged sequences, some of them empty, with lengths and padding of their own.
fn sequences() -> Vec<(Problem, Config)> {
    let chunks = named("ampere-32x32-2stage-swizzled-packgqa-3persistent-64chunk");
    let mut base = Problem::new(5, 2, 9, 32, DType::F16).with_lse(true);
    (base.key_heads, base.key_length) = (1, 150);
    base.mask = Mask::Causal(Alignment::BottomRight);
    let mut packed = base.clone().with_total_q(Some(40)).with_total_k(Some(500));
    (packed.seqused_q, packed.leftpad_k) = (true, true);
    let mut paged = base.clone().with_kv_batch(Some(4)).with_total_q(Some(40));
    (paged.paged, paged.seqused_k, paged.leftpad_k) = (Some(PagedKv::new(16, 40, 10)), true, true);
    let wide = |problem: &Problem| {
        let mut problem = problem.clone();
        (problem.head_dim, problem.value_dim, problem.query_length, problem.leftpad_k) = (64, 64, 70, false);
        problem.total_q = problem.total_q.map(|_| 200);
        problem
    };
    let rows = base.with_seqused_q(true).with_seqused_k(true);
    let mut all = Vec::new();
    for problem in [&packed, &paged, &rows] {
        all.extend([Config::scalar(), chunks].map(|config| (problem.clone(), config)));
    }
    all.extend([&packed, &paged, &rows].map(|problem| (wide(problem), small_hopper())));
    all
}

/// Query, key and value of 8 bits with scales, whose form follows from the seed: keys that nobody attends and that hold
/// anything, pages, wide heads, and keys that CTAs share.
fn fp8_query() -> impl Iterator<Item = (u64, Numbers, Problem, Config)> {
    let base = |batch, dim| {
        let mut problem = Problem::new(batch, 4, 20, dim, DType::E4m3);
        (problem.key_heads, problem.key_length, problem.out_dtype) = (2, 109, Some(DType::F16));
        (problem.q_scale, problem.k_scale, problem.v_scale) = (true, true, true);
        problem
    };
    let others = (0..5u64).flat_map(move |seed| {
        let mut paged = base(2, 32);
        (paged.paged, paged.seqused_k) = (Some(PagedKv::new(16, 20, 8)), true);
        [
            (paged.clone(), "hopper-64x32-2stage"),
            (base(1, 256).with_query_heads(2).with_key_heads(1), "hopper-64x32-2stage"),
            (base(1, 32), "hopper-64x32-2stage-2cluster"),
            (paged, "hopper-64x32-2stage-packgqa-64chunk"),
        ]
        .map(|(problem, name)| (seed, Numbers::Normal, problem, named(name)))
    });
    let lengths = (0..14u64).map(|seed| {
        let (batch, dim) = [(2, 64), (3, 32), (1, 48)][seed as usize % 3];
        let mut problem = Problem::new(batch, 4, 97, dim, DType::E4m3);
        (problem.key_heads, problem.key_length, problem.out_dtype) = (2, 203, Some(DType::F16));
        (problem.q_scale, problem.k_scale, problem.v_scale) = (true, true, true);
        problem.seqused_k = batch == 3;
        let numbers = if batch == 3 { Numbers::Planted(Planted::Unattended) } else { Numbers::Normal };
        (seed, numbers, problem, named("hopper-128x32-2stage-overlap-persistent"))
    });
    lengths.chain(others)
}

/// The same by `mma.sync`: rescaled as products are added and before, with the query in shared memory, and packed and paged
/// with chunks.
fn fp8_mma() -> Vec<(u64, Numbers, Problem, Config)> {
    let mut plain = Problem::new(3, 4, 97, 32, DType::E4m3).with_lse(true);
    (plain.key_heads, plain.key_length, plain.out_dtype) = (2, 203, Some(DType::F16));
    (plain.q_scale, plain.k_scale, plain.v_scale) = (true, true, true);
    let mut paged = plain.clone().with_seqused_k(true);
    (paged.query_length, paged.paged) = (3, Some(PagedKv::new(16, 50, 13)));
    let chunks = named("ampere-16x64-2stage-swizzled-4kvwarps-packgqa-3persistent-64chunk");
    let seeds = (0..8).map(|seed| (seed, Numbers::Normal, plain.clone(), named("ampere-64x32-2stage-swizzled")));
    let mut all: Vec<_> = seeds.collect();
    all.extend((0..4).map(|seed| (seed, Numbers::Normal, paged.clone(), chunks)));
    for (seed, planted) in [(13, Planted::GrowingScales), (13, Planted::FallingScales)] {
        let config = named("ampere-64x32-2stage-swizzled-qshared-ifchanged");
        all.push((seed, Numbers::Planted(planted), plain.clone(), config));
    }
    all
}

fn named(name: &str) -> Config {
    name.parse().unwrap_or_else(|_| Config::ampere())
}

/// Groups of 3 and of 7 query heads, five batches of different lengths, with everything that has heads or batches.
fn addressed() -> Vec<(Problem, BiasForm)> {
    let problem = |batch, (heads, key_heads): (usize, usize)| {
        let mut problem = Problem::new(batch, heads, 17, 32, DType::F16);
        (problem.key_heads, problem.key_length, problem.lse) = (key_heads, 70, true);
        problem
    };
    let mut everything = problem(5, (6, 2)).with_alibi(true).with_sinks(true).with_bias(true).with_seqused_k(true);
    everything.mask = Mask::Causal(Alignment::BottomRight);
    vec![
        (problem(5, (6, 2)), BiasForm::PerHead),
        (problem(5, (3, 3)).with_bias(true), BiasForm::PerKey),
        (problem(5, (2, 2)).with_bias(true), BiasForm::PerBatchAndHead),
        (problem(1, (14, 2)), BiasForm::PerHead),
        (everything, BiasForm::PerBatchAndHead),
    ]
}

/// Both 16-bit types, and one key beyond a tile.
fn numeric() -> Vec<Problem> {
    let problem = |queries, keys, dtype| {
        let mut problem = Problem::new(1, 4, queries, 64, dtype);
        (problem.key_heads, problem.key_length, problem.lse) = (2, keys, true);
        problem
    };
    vec![problem(97, 203, DType::F16), problem(97, 203, DType::Bf16), problem(33, 257, DType::F16)]
}

/// A hundred splits, and a few tiles; scores that rise or fall by 1,000, as [`Stress`] has it with the seed of these trials.
fn counted() -> Vec<(Numbers, Problem, Config)> {
    let mut splits = Problem::new(1, 2, 1, 32, DType::F16).with_lse(true);
    splits.key_length = 1600;
    let rising = Numbers::Stress(Stress::Rising);
    let hundred = named("ampere-32x16-2stage-swizzled-100splits");
    let tiles = numeric().swap_remove(0);
    vec![
        (Numbers::Normal, splits.clone(), hundred),
        (rising, splits, hundred),
        (rising, tiles.clone(), Config::ampere()),
        // It takes the last tile first.
        (Numbers::Stress(Stress::Falling), tiles, small_hopper()),
    ]
}

/// More than ten tiles of keys; more than five tiles of rows for each CTA.
fn long() -> Vec<Problem> {
    let mut keys = Problem::new(1, 2, 33, 32, DType::F16);
    (keys.key_length, keys.lse, keys.scale) = (780, true, 1.0);
    let mut heads = Problem::new(1, 18, 33, 32, DType::F16);
    (heads.key_length, heads.lse) = (150, true);
    vec![keys, heads]
}

/// The Hopper kernel with tiles so small that every problem here has several of them.
fn small_hopper() -> Config {
    Config::from(HopperConfig { tile_n: 48, ..HopperConfig::default() })
}

/// The Hopper kernel whose warpgroups share keys, in the two CTAs of a cluster.
fn sharing_hopper() -> Config {
    Config::from(HopperConfig {
        kv_split_warpgroups: 2,
        cluster: 2,
        tile_n: 16,
        stages: 4,
        persistent: false,
        ..HopperConfig::default()
    })
}

/// The Hopper kernel whose warpgroups start products in turn.
fn ping_pong_hopper() -> Config {
    Config::from(HopperConfig { tile_n: 48, warp_scheduler: WarpScheduler::PingPong, ..HopperConfig::default() })
}

/// Every problem with every kernel, and a `mask_mod` with those that have a block-mask precompute kernel.
fn plain() -> Vec<(Problem, Config)> {
    let configs = [Config::ampere(), Config::scalar(), small_hopper(), sharing_hopper()];
    let plain = problems().into_iter().flat_map(|problem| configs.map(|config| (problem.clone(), config)));
    // Documents that end within tiles of rows and of keys; rows of which each attends one key less than the one before, or
    // one more; two documents, the second of which begins within a tile of rows.
    let documents = masked(expressions::mask_mod("documents"));
    let later = masked(Some(MaskMod::new("later", |at| at.key.at_least(at.query))));
    let earlier = masked(Some(MaskMod::new("earlier", |at| at.query.at_least(at.key))));
    let halves = masked(Some(MaskMod::new("halves", |at| {
        let [row, key] = [at.query, at.key].map(|position| position.less(150));
        (row & key) | (!row & !key)
    })));
    // Several tiles of rows for each CTA, with one of keys each.
    let short = earlier.clone().with_query_heads(12).with_key_heads(12).with_query_length(33).with_key_length(40);
    let on_hopper = [documents.clone(), later, earlier, halves, short].map(|problem| (problem, small_hopper()));
    let ping_pong = problems().into_iter().take(1).map(|problem| (problem, ping_pong_hopper()));
    plain.chain(on_hopper).chain(ping_pong).chain([(documents, Config::ampere())]).collect()
}

fn masked(mask_mod: Option<MaskMod>) -> Problem {
    let mut problem = Problem::new(1, 2, 300, 64, DType::F16);
    problem.lse = true;
    expressions::give(&mut problem, None, mask_mod);
    problem
}

/// Independent inputs, more than three tiles of keys with a ragged tail, groups of heads, rows that attend nothing.
fn problems() -> Vec<Problem> {
    let problem = |query_length, key_length, mask| {
        let mut problem = Problem::new(1, 4, query_length, 64, DType::F16);
        (problem.key_heads, problem.key_length) = (2, key_length);
        (problem.mask, problem.lse) = (mask, true);
        problem
    };
    vec![
        problem(97, 203, Mask::Causal(Alignment::BottomRight)),
        problem(97, 203, Mask::None),
        problem(203, 97, Mask::Causal(Alignment::BottomRight)),
        // Scores that raise the maximum far, and more than once.
        problem(33, 70, Mask::None).with_scale(4.0),
        // Several tiles of rows for each CTA, with one of keys each: copies run furthest ahead.
        problem(33, 40, Mask::None).with_query_heads(12),
    ]
}
