//! Heuristics for the Hopper kernel.
//!
//! The choices were measured on an H200: `notebook/hopper.md` has the figures. They follow these rules:
//!
//! * Scores, weights and output of a warpgroup stay in registers, and two stages of keys and values in shared memory:
//!   the wider the heads, the fewer keys a tile has.
//! * Narrow heads leave room for a third warpgroup, whose exponentials fill what the tensor cores leave.
//! * Long tiles of keys are read from shared memory less often, but what a tile has too many costs all the same.
//! * Sequences of any length get what the longest gets, except where the mean tells more.
//! * Where there are fewer tiles of 64 rows than SMs, a CTA has but those, and two warpgroups share the keys;
//!   with half as many tiles, two CTAs do, and with fewer still, four.

use flashcore_ir::Arch;
use flashcore_problem::Problem;

use crate::config::{HopperConfig, WarpScheduler};
use crate::grid::packed_rows;
use crate::primitives::Rescale;
use crate::specialization::Specialization;
use crate::target::Target;
use crate::unsupported::{can_pack_gqa, takes};

const BASE: HopperConfig = HopperConfig::BASE;
/// Problems with a `mask_mod`, whose block mask the preceding kernel computes.
const MASKED: HopperConfig = HopperConfig { rescale: Rescale::Threshold, pdl: true, ..BASE };
/// Many rows of heads of up to 64 columns.
const NARROW: HopperConfig = HopperConfig { warpgroups: 3, warp_scheduler: WarpScheduler::PingPong, ..BASE };
/// Many keys for heads of up to 128 columns.
const LONG: HopperConfig = HopperConfig { tile_n: 176, warp_scheduler: WarpScheduler::PingPong, ..BASE };
/// Heads of up to 192 columns.
const WIDE: HopperConfig = HopperConfig { tile_n: 112, warp_scheduler: WarpScheduler::PingPong, ..BASE };
/// Heads of up to 256 columns.
const WIDEST: HopperConfig = HopperConfig { tile_n: 80, ..BASE };
/// Few keys for those, and where a bias takes the registers.
const FEW_KEYS: HopperConfig = HopperConfig { tile_n: 64, warp_scheduler: WarpScheduler::PingPong, ..BASE };
/// Few rows: less than one tile of 64 for each SM.
const SHORT: HopperConfig =
    HopperConfig { kv_split_warpgroups: 2, stages: 4, overlap_rescale: false, pdl: true, persistent: false, ..BASE };
/// Few rows of wider heads.
const SHORT_WIDE: HopperConfig = HopperConfig { tile_n: 64, ..SHORT };
/// Few rows and few keys.
const TINY: HopperConfig = HopperConfig { warpgroups: 1, kv_split_warpgroups: 1, ..SHORT_WIDE };

/// Rows so few that two CTAs can share the keys of a tile.
const SPLIT: HopperConfig = HopperConfig { cluster: 2, ..SHORT_WIDE };
/// The same for many keys.
const SPLIT_LONG: HopperConfig = HopperConfig { cluster: 2, ..SHORT };
/// So few that four can.
const SPLIT_IN_FOUR: HopperConfig = HopperConfig { cluster: 4, ..SHORT_WIDE };

/// Few rows over many keys: CTAs have a chunk of the keys each.
const CHUNKED: HopperConfig = HopperConfig { chunk_keys: SHORT_WIDE.tile_n, ..SHORT_WIDE };
/// More than 64 rows, in tiles of 128.
const CHUNKED_TALL: HopperConfig = HopperConfig { chunk_keys: LONG.tile_n, pdl: true, persistent: false, ..LONG };
/// The same over pages, which long tiles would copy 16 rows at a time, and where something takes registers.
const CHUNKED_TALL_BASE: HopperConfig = HopperConfig { chunk_keys: BASE.tile_n, pdl: true, persistent: false, ..BASE };
/// Sequences of unequal lengths under a causal mask: their tiles take unequal times.
const UNEQUAL: HopperConfig = HopperConfig { dynamic: true, ..BASE };

/// Query, key and value of 8 bits: output and P · V of a block take as many registers each.
const FP8: HopperConfig = HopperConfig { tile_n: 96, stages: 3, ..BASE };
/// The same for heads wider than 160 columns. Not measured.
const FP8_MIDDLE: HopperConfig = HopperConfig { stages: 2, warp_scheduler: WarpScheduler::PingPong, ..FP8 };
/// The same for heads of up to 64 columns. Not measured.
const FP8_NARROW: HopperConfig = HopperConfig { tile_n: 192, ..FP8_MIDDLE };
/// The same where a bias or an expression takes registers.
const FP8_TERMS: HopperConfig = HopperConfig { tile_n: 64, stages: 2, ..FP8 };
/// The same for fewer tiles of 64 rows than SMs.
const FP8_SHORT: HopperConfig = HopperConfig { warpgroups: 1, pdl: true, persistent: false, ..FP8_TERMS };

/// The same for heads wider than 128 columns, whose P · V goes by slices of the columns. The panels of transposed values
/// leave Q one stage.
const FP8_WIDE: HopperConfig = HopperConfig { stages: 3, ..FP8_TERMS };
/// The same where a bias or an expression takes registers.
const FP8_WIDE_TERMS: HopperConfig = HopperConfig { tile_n: 32, ..FP8_TERMS };

/// The same for few rows over many keys: CTAs have a chunk of the keys each.
const FP8_CHUNKED: HopperConfig = HopperConfig { chunk_keys: FP8_SHORT.tile_n, ..FP8_SHORT };
/// The same where query heads share tiles.
const FP8_CHUNKED_GQA: HopperConfig = HopperConfig { pack_gqa: true, ..FP8_CHUNKED };

/// Every config that some problem of 8 bits gets; with chunks of any length.
pub(crate) const ALL_FP8: [HopperConfig; 9] =
    [FP8, FP8_MIDDLE, FP8_NARROW, FP8_TERMS, FP8_SHORT, FP8_WIDE, FP8_WIDE_TERMS, FP8_CHUNKED, FP8_CHUNKED_GQA];

/// Every config that some problem gets; with chunks of any length.
pub(crate) const ALL: [HopperConfig; 18] = [
    CHUNKED,
    CHUNKED_TALL,
    CHUNKED_TALL_BASE,
    UNEQUAL,
    BASE,
    MASKED,
    NARROW,
    LONG,
    WIDE,
    WIDEST,
    FEW_KEYS,
    SHORT,
    SHORT_WIDE,
    TINY,
    SPLIT,
    SPLIT_LONG,
    SPLIT_IN_FOUR,
    HopperConfig { pack_gqa: true, ..CHUNKED },
];

/// Fewer query rows than this are for kernels with smaller tiles.
const LEAST_ROWS: usize = 17;
/// The same for sequences of any length, most of which may be shorter than the longest.
const LEAST_ROWS_OF_SEQUENCES: usize = 65;
/// Keys from which on few rows are divided into chunks of keys.
const LEAST_KEYS_OF_CHUNKS: usize = 2048;
/// The most chunks of a sequence: what the combine kernel adds up must stay little.
const MAX_SPLITS: usize = 64;
/// Rows of a sequence of any length, on average, from which on few are without work in the last tile of three warpgroups.
const MANY_ROWS: usize = 1536;
/// Keys up to which one warpgroup is as fast as two that share them.
const FEW: usize = 128;
/// Keys from which on CTAs share them, if there are as many as that takes. With 256, sending costs more than it saves.
const SHARED: usize = 384;
/// Keys from which on the widest heads have more of them in a tile, and CTAs that share them.
const SEVERAL: usize = 1024;
/// Keys from which on long tiles pay, and under a causal mask, where a tile of rows attends half of them.
const MANY: usize = 4096;
const MANY_CAUSAL: usize = 8192;

/// The best config for a problem on a GPU, if the kernel takes it.
pub(crate) fn select(problem: &Problem, target: Target) -> Option<HopperConfig> {
    let num_sms = target.num_sms as usize;
    let is_long = problem.key_length >= LEAST_KEYS_OF_CHUNKS;
    let least_rows = if problem.is_ragged() && !is_long { LEAST_ROWS_OF_SEQUENCES } else { LEAST_ROWS };
    if target.arch != Arch::Sm90a || problem.query_length < least_rows {
        return None;
    }
    let rows = problem.query_length;
    let short_tiles = rows.div_ceil(64).saturating_mul(problem.query_heads).saturating_mul(problem.batch);
    let is_short = short_tiles <= num_sms;
    // Of packed sequences, the mean.
    let mean = |total: Option<usize>, longest: usize| total.map_or(longest, |total| total / problem.batch.max(1));
    let (mean_rows, keys) = (mean(problem.total_q, rows), mean(problem.total_k, problem.key_length));
    let (_, right) = problem.mask.limits();
    let (is_causal, is_unequal) = (right.is_some(), mean_rows != rows);
    let many = if is_causal { MANY_CAUSAL } else { MANY };
    // Under no mask, tiles of the longest sequences take most of the time.
    let most_keys = if is_unequal && !is_causal { problem.key_length } else { keys };
    // Of three warpgroups, not many rows may be without work in the last tile.
    let fills_three =
        if mean_rows == rows { rows.next_multiple_of(192) * 15 <= rows * 16 } else { mean_rows >= MANY_ROWS };
    // Clusters of four leave some SMs of each group of them empty.
    let can_share = |ctas: usize, most: usize| keys >= SHARED && short_tiles.saturating_mul(ctas) <= most;
    let choice = match problem.head_dim.max(problem.value_dim) {
        ..=128 if is_short && keys <= FEW => TINY,
        ..=64 if can_share(4, num_sms / 4 * 3) => SPLIT_IN_FOUR,
        ..=64 if can_share(2, num_sms) && keys >= SEVERAL => SPLIT_LONG,
        ..=128 if can_share(2, num_sms) => SPLIT,
        ..=64 if is_short => SHORT,
        65..=128 if is_short => SHORT_WIDE,
        ..=64 if fills_three => NARROW,
        // Long tiles would copy pages 16 rows at a time.
        65..=128 if most_keys >= many && problem.paged.is_none() => LONG,
        65..=128 if is_unequal && is_causal => UNEQUAL,
        ..=128 if problem.mask_mod.is_some() => MASKED,
        ..=128 => BASE,
        129..=192 => WIDE,
        _ if keys < SEVERAL => FEW_KEYS,
        _ => WIDEST,
    };
    let choice = if is_long { chunked(problem, keys, target).unwrap_or(choice) } else { choice };
    let alone = HopperConfig { cluster: 1, ..choice };
    let base = if problem.mask_mod.is_some() { MASKED } else { BASE };
    [choice, alone, base, FEW_KEYS].into_iter().find(|config| takes(problem, *config, target))
}

/// The config for query, key and value of 8 bits, if the kernel takes them.
pub(crate) fn select_fp8(problem: &Problem, target: Target) -> Option<HopperConfig> {
    let num_sms = target.num_sms as usize;
    let heads = problem.query_heads.saturating_mul(problem.batch);
    let is_short = problem.query_length.div_ceil(64).saturating_mul(heads) <= num_sms;
    let choice = match problem.head_dim.max(problem.value_dim) {
        _ if is_short => FP8_SHORT,
        ..=64 => FP8_NARROW,
        // Of 160 columns, ptxas spills with longer tiles of keys.
        129..=160 | 193.. => FP8_WIDE,
        161.. => FP8_MIDDLE,
        _ => FP8,
    };
    let is_long = problem.key_length >= LEAST_KEYS_OF_CHUNKS && problem.mask_mod.is_none();
    let keys = problem.total_k.map_or(problem.key_length, |total| total / problem.batch.max(1));
    let chunked = [FP8_CHUNKED_GQA, FP8_CHUNKED]
        .into_iter()
        .filter(|config| is_short && is_long && (!config.pack_gqa || problem.query_heads > problem.key_heads))
        .filter_map(|config| in_chunks(problem, config, keys, num_sms));
    let choices = [choice, FP8, FP8_MIDDLE, FP8_TERMS, FP8_WIDE_TERMS];
    chunked.chain(choices).find(|config| takes(problem, *config, target))
}

/// Tiles of rows of all heads and sequences.
fn tiles(problem: &Problem, config: HopperConfig) -> usize {
    let (rows, heads) = if config.pack_gqa {
        (packed_rows(problem), problem.key_heads)
    } else {
        (problem.query_length, problem.query_heads)
    };
    rows.div_ceil(config.tile_m() as usize).saturating_mul(heads).saturating_mul(problem.batch).max(1)
}

/// The config with as many chunks of keys as give every SM one, if that is more than one chunk.
fn in_chunks(problem: &Problem, config: HopperConfig, keys: usize, num_sms: usize) -> Option<HopperConfig> {
    let splits = (num_sms / tiles(problem, config)).min(MAX_SPLITS);
    let chunk_keys = keys.div_ceil(splits.max(1)).next_multiple_of(config.tile_n as usize);
    (splits > 1).then_some(HopperConfig { chunk_keys: chunk_keys as u32, ..config })
}

/// The config for few rows over many keys, if more than one chunk of keys gives every SM one. Query heads share tiles where
/// that makes fewer of them.
fn chunked(problem: &Problem, keys: usize, target: Target) -> Option<HopperConfig> {
    if problem.head_dim.max(problem.value_dim) > 128 || problem.mask_mod.is_some() {
        return None;
    }
    let group = problem.query_heads / problem.key_heads.max(1);
    let can_pack = can_pack_gqa(Specialization::of(problem));
    let rows = if can_pack { packed_rows(problem) } else { problem.query_length };
    let choices: &[_] = match problem.paged {
        _ if rows <= CHUNKED.tile_m() as usize => &[CHUNKED],
        None => &[CHUNKED_TALL, CHUNKED_TALL_BASE, CHUNKED],
        Some(_) => &[CHUNKED_TALL_BASE, CHUNKED],
    };
    choices.iter().find_map(|&config| {
        let packed = HopperConfig { pack_gqa: true, ..config };
        let can_pack = can_pack && (config.tile_m() as usize).is_multiple_of(group.max(1));
        let packs = can_pack && tiles(problem, packed) < tiles(problem, config);
        let config = in_chunks(problem, if packs { packed } else { config }, keys, target.num_sms as usize)?;
        takes(problem, config, target).then_some(config)
    })
}

/// The config for a few rows of several heads that fill a tile together, over many keys.
pub(crate) fn select_packed(problem: &Problem, target: Target) -> Option<HopperConfig> {
    let is_long = problem.key_length >= LEAST_KEYS_OF_CHUNKS;
    let is_few = problem.query_length < LEAST_ROWS && packed_rows(problem) >= LEAST_ROWS;
    let can_pack = can_pack_gqa(Specialization::of(problem));
    let chunks = (target.arch == Arch::Sm90a && is_long && is_few && can_pack)
        .then(|| chunked(problem, problem.key_length, target));
    chunks.flatten().filter(|config| config.pack_gqa)
}
