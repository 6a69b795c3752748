//! The append inside of the attention launch, in the simulator: the same bits as in two launches.

use flashcore_bench::testkit::kv_cache::KvCacheTrial;
use flashcore_ir::Arch;
use flashcore_kernels::{Config, LaunchPlan};
use flashcore_problem::{
    Alignment, DType, KvCacheProblem, Layout, Mask, PagedKv, Problem, Rotary, RotaryStyle, SequenceLengths,
};

const CAUSAL: Mask = Mask::Causal(Alignment::BottomRight);
const WINDOW: Mask = Mask::Window { left: Some(5), right: Some(1), alignment: Alignment::BottomRight };
const TOP_LEFT: Mask = Mask::Causal(Alignment::TopLeft);

/// Between them: chunks and splits of CTAs and clusters, packed heads or not, every layout, one stage and several, the
/// query in registers and in shared memory, persistent CTAs, narrow copies.
const CONFIGS: [&str; 8] = [
    "ampere-16x64-3stage-swizzled-4kvwarps-packgqa-3persistent-64chunk",
    "ampere-32x32-2stage-swizzled-3splits",
    "ampere-64x32-1stage-swizzled",
    "ampere-16x64-2stage-swizzled-4kvwarps-packgqa-cluster-4splits",
    "ampere-64x32-2stage-padded-load4-5persistent",
    "ampere-32x32-4stage-swizzled-packgqa-5persistent-96chunk",
    "ampere-16x32-2stage-swizzled-2kvwarps-qshared-3persistent-128chunk",
    "ampere-32x64-2stage-plain-packgqa-2splits",
];

/// For the widest heads, whose accumulators leave the other configs too few registers.
const WIDE: &str = "ampere-16x64-2stage-swizzled-4kvwarps-qshared-packgqa-3persistent-64chunk";

fn config(number: usize) -> Config {
    named(CONFIGS[number % CONFIGS.len()])
}

fn named(name: &str) -> Config {
    name.parse().unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// A problem by number: everything that the kernel is compiled for and all that it reads takes turns.
fn problem(number: usize) -> KvCacheProblem {
    let (head_dim, value_dim) = [(64, 64), (128, 128), (40, 40), (64, 72), (256, 256), (24, 8)][number % 6];
    let dtype = [DType::F16, DType::Bf16][number / 2 % 2];
    let queries = [1, 1, 3, 8, 17][number % 5];
    let mut attention =
        Problem::new(4, 4, queries, head_dim, dtype).with_layout(Layout::Bshd).with_lse(number % 3 == 1);
    attention.value_dim = value_dim;
    attention = attention.with_layout(Layout::Bshd);
    attention.key_heads = [2, 1, 4][number % 3];
    attention.key_length = [203, 130, 97, 64][number % 4];
    attention.mask = [Mask::None, CAUSAL, WINDOW, TOP_LEFT][number / 3 % 4];
    attention.kv_batch = (number % 4 == 2).then_some(6);
    let page_size = [None, Some(16), Some(1), Some(4), Some(128), Some(5)][number / 2 % 6];
    attention.paged = page_size.map(|page_size| {
        let width = attention.key_length.div_ceil(page_size);
        PagedKv::new(page_size, attention.cache_batches() * width + 1, width)
    });
    attention.leftpad_k = number % 5 == 3;
    attention.total_q = number.is_multiple_of(3).then_some(3 * queries);
    attention.seqused_q = number % 7 == 4;
    if attention.paged.is_none() && number % 4 == 1 {
        let mut strides = attention.strides();
        (strides.key.row, strides.key.batch) = (strides.key.row + 4, strides.key.batch + 4 * attention.key_length);
        attention.layout = Layout::Strided(strides);
    }
    let new_length = [1, 2, 16, 7][number % 4];
    let total_new = (number % 3 == 2).then_some(2 * new_length + 1);
    let mut problem = KvCacheProblem::new(attention, new_length).with_total_new(total_new);
    let style = if number.is_multiple_of(2) { RotaryStyle::Neox } else { RotaryStyle::GptJ };
    let dim = [head_dim, head_dim / 2 / 8 * 8, 8][number / 2 % 3].max(8);
    let table_dtype = (number % 4 == 1).then_some(DType::F32);
    let max_position = if number % 6 == 5 { 60 } else { problem.attention.key_length + 3 };
    problem.rotary =
        (!number.is_multiple_of(4)).then(|| Rotary { table_dtype, ..Rotary::new(style, dim, max_position) });
    problem.rotary_seqlens = problem.rotary.is_some() && number % 5 == 1;
    problem
}

fn trial(problem: &KvCacheProblem, seed: u64) -> KvCacheTrial {
    let lengths = [SequenceLengths::Ragged, SequenceLengths::Full, SequenceLengths::Chunked][seed as usize % 3];
    KvCacheTrial::of(problem, lengths, seed).unwrap_or_else(|error| panic!("{problem}: {error}"))
}

#[test]
fn one_launch_gives_the_bits_of_two() {
    for number in 0..24 {
        let problem = problem(number);
        let is_wide = problem.attention.head_dim == 256;
        let config = if is_wide { named(WIDE) } else { config(number + number / 8) };
        match trial(&problem, number as u64).verify_fused(config, number as u64) {
            Ok(verdict) => assert!(verdict.passed(), "{number} {config} {problem}: {verdict}"),
            Err(error) => panic!("{number} {config} {problem}: {error}"),
        }
    }
}

/// Gives every entry of a page table a page that no other has: lengths that were changed may append to any.
fn pages_of_their_own(page_table: &mut [i32]) {
    page_table.iter_mut().zip(0..).for_each(|(entry, page)| *entry = page);
}

/// Caches that are full, and lengths far beyond: new keys without a row are skipped, and nothing else is touched.
#[test]
fn full_caches() {
    for (number, lengths) in [[203, 202, 200, 0], [u32::MAX, 204, 1, 203]].into_iter().enumerate() {
        for paged in [None, Some(PagedKv::new(16, 53, 13))] {
            let mut attention = Problem::new(4, 4, 2, 64, DType::F16).with_layout(Layout::Bshd).with_mask(CAUSAL);
            (attention.key_heads, attention.key_length, attention.paged) = (2, 203, paged);
            let rotary = Rotary::new(RotaryStyle::Neox, 64, 210);
            let problem = KvCacheProblem::new(attention, 3).with_rotary(rotary);
            let differences = trial(&problem, 1)
                .differences(config(number), |cache_seqlens, page_table| {
                    cache_seqlens.copy_from_slice(&lengths);
                    pages_of_their_own(page_table);
                })
                .unwrap_or_else(|error| panic!("{problem}: {error}"));
            assert_eq!(differences, [""; 0], "{problem}");
        }
    }
}

/// A new key on a page that the cache does not have is not written. It is attended all the same, unlike in two launches,
/// which read what another page holds.
#[test]
fn pages_out_of_range() {
    let mut attention = Problem::new(4, 4, 1, 64, DType::Bf16).with_layout(Layout::Bshd);
    (attention.key_heads, attention.key_length) = (2, 203);
    attention.paged = Some(PagedKv::new(16, 53, 13));
    let problem = KvCacheProblem::new(attention, 2);
    let differences = trial(&problem, 0).differences(config(0), |cache_seqlens, page_table| {
        cache_seqlens.copy_from_slice(&[100, 31, 64, 5]);
        pages_of_their_own(page_table);
        page_table[6] = -1;
        page_table[13 + 2] = 53;
        page_table[2 * 13 + 4] = i32::MAX;
    });
    let caches = ["key cache", "value cache"];
    assert!(differences.unwrap().iter().all(|name| !caches.contains(name)));
}

#[test]
fn refusals_say_why() {
    let problem = || {
        let mut attention = Problem::new(4, 4, 1, 64, DType::F16).with_layout(Layout::Bshd);
        (attention.key_heads, attention.key_length) = (2, 203);
        KvCacheProblem::new(attention, 1)
    };
    let check = |problem: &KvCacheProblem, config: Config, expected: &str| {
        let reasons = LaunchPlan::with_append(problem, config, Arch::Sm90a).map(|_| ()).unwrap_err();
        assert_eq!(reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "), expected);
    };
    assert!(LaunchPlan::with_append(&problem(), config(0), Arch::Sm80).is_ok());
    let alone = "and an append inside of the attention launch do not go together: append in a launch of its own";
    check(&problem().with_qk_norm(1e-6), config(0), &format!("qk_norm {alone}"));
    check(&problem(), Config::hopper(), &format!("a kernel other than ampere {alone}"));
    let rotary = Rotary::new(RotaryStyle::GptJ, 6, 210);
    let narrow = "vectors of 2 bytes, by its strides or half of the rotary dim,";
    check(&problem().with_rotary(rotary), config(0), &format!("{narrow} {alone}"));
    let mut many = problem();
    many.new_length = 17;
    check(
        &many.contiguous(),
        config(0),
        "new_length is 17; an append inside of the attention launch takes at most 16: append in a launch of its own",
    );
}
