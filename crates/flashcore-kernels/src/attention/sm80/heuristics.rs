//! Heuristics for the Ampere kernel.
//!
//! The choices for GPUs with much shared memory were measured on an H200, those for the others follow from what fits:
//! `notebook/ampere.md` has the figures. The measurements say:
//!
//! * 32 rows a warp read keys and values from shared memory half as often, which is what 16 rows wait for.
//! * With 32 rows and more than 64 columns the query leaves no room in the registers, and stays in shared memory.
//! * A problem with fewer CTAs than SMs takes as long as one CTA: smaller tiles, and warps that share keys.
//! * Few rows over many keys, as models write, wait for memory: the heads of a key head share a tile (`pack_gqa`), so that
//!   keys are read once, and the keys are split (split-KV) until all SMs read.

use flashcore_ir::Arch;
use flashcore_problem::{DType, Problem};

use crate::config::{AmpereConfig, QueryPlace};
use crate::primitives::{Rescale, Tf32Products};
use crate::specialization::Specialization;
use crate::target::Target;
use crate::unsupported::{can_pack_gqa, takes};

const BASE: AmpereConfig = AmpereConfig::BASE;

/// Few rows: a CTA ends sooner when two warps share its keys.
const FEW_ROWS: AmpereConfig = AmpereConfig { tile_n: 128, kv_split_warps: 2, ..BASE };
/// Few rows and few keys.
const TINY: AmpereConfig = AmpereConfig { kv_split_warps: 2, ..BASE };
/// One wave of CTAs of narrow heads.
const ONE_WAVE: AmpereConfig = AmpereConfig { tile_n: 128, ..BASE };
/// Narrow heads.
const NARROW: AmpereConfig = AmpereConfig { rows_per_warp: 32, tile_n: 128, query: QueryPlace::Shared, ..BASE };
/// Heads of up to 128 columns.
const MIDDLE: AmpereConfig =
    AmpereConfig { rows_per_warp: 32, query: QueryPlace::Shared, rescale: Rescale::IfChanged, ..BASE };
/// Heads of up to 192 columns.
const WIDE: AmpereConfig = AmpereConfig { warps: 8, ..BASE };
/// Heads of up to 256 columns.
const WIDEST: AmpereConfig = AmpereConfig { warps: 8, query: QueryPlace::Shared, ..BASE };
/// The same for an A100, which has not as much shared memory.
const WIDEST_A100: AmpereConfig = AmpereConfig { tile_n: 32, ..WIDEST };
/// Narrow heads where shared memory is small: two CTAs fit.
const NARROW_SMALL: AmpereConfig = AmpereConfig { rows_per_warp: 32, ..BASE };
/// Heads of up to 128 columns where shared memory is small.
const MIDDLE_SMALL: AmpereConfig = AmpereConfig { tile_n: 32, ..MIDDLE };
/// Wide heads where shared memory is small.
const WIDE_SMALL: AmpereConfig =
    AmpereConfig { tile_n: 32, query: QueryPlace::Shared, rescale: Rescale::IfChanged, ..BASE };

/// Few rows over many keys: four warps share the keys of one tile of 16 rows.
const DECODE: AmpereConfig = AmpereConfig { kv_split_warps: 4, ..BASE };
/// The same for up to 64 rows, packed.
const DECODE_ROWS: AmpereConfig = AmpereConfig { stages: 3, ..BASE };
/// The same for wide heads, whose query leaves no room in the registers.
const DECODE_WIDE: AmpereConfig = AmpereConfig { query: QueryPlace::Shared, ..DECODE };
/// The same where shared memory is small.
const DECODE_WIDE_SMALL: AmpereConfig = AmpereConfig { warps: 2, kv_split_warps: 2, tile_n: 32, ..DECODE_WIDE };

/// `f32` by three products of `tf32`.
const F32: AmpereConfig = AmpereConfig { tile_n: 32, tf32: Some(Tf32Products::Three), ..BASE };
/// Heads of more than 64 columns in `f32`, whose query leaves no room in the registers.
const F32_MIDDLE: AmpereConfig = AmpereConfig { query: QueryPlace::Shared, ..F32 };
/// The same with more rows, which read keys and values half as often.
const F32_TALL: AmpereConfig = AmpereConfig { warps: 8, ..F32_MIDDLE };
/// The same where something is added to scores, which takes registers.
const F32_WIDE: AmpereConfig = AmpereConfig { tile_n: 16, ..F32_MIDDLE };
/// The same where shared memory is small.
const F32_WIDE_SMALL: AmpereConfig = AmpereConfig { warps: 2, ..F32_WIDE };
/// Few rows over many keys in `f32`.
const F32_DECODE: AmpereConfig = AmpereConfig { kv_split_warps: 4, tile_n: 64, ..F32_MIDDLE };
/// The same where shared memory is small.
const F32_DECODE_SMALL: AmpereConfig = AmpereConfig { warps: 2, kv_split_warps: 2, tile_n: 32, ..F32_MIDDLE };

/// Every config that some problem of `f32` gets; those of few rows also packed, and with chunks.
pub(crate) const ALL_F32: [AmpereConfig; 7] = [
    F32,
    F32_MIDDLE,
    F32_TALL,
    F32_WIDE,
    F32_WIDE_SMALL,
    AmpereConfig { persistent: 5, chunk_keys: 64, pack_gqa: true, ..F32_DECODE },
    AmpereConfig { persistent: 5, chunk_keys: 64, ..F32_DECODE_SMALL },
];

/// Query, key and value of 8 bits, in heads of up to 64 columns. Nothing of these was measured on a GPU: they follow from what
/// fits. 16 rows a warp read shared memory half as often as it can be read, since a product has twice the depth.
const FP8: AmpereConfig = BASE;
/// The same in heads of up to 128 columns.
const FP8_MIDDLE: AmpereConfig = AmpereConfig { rescale: Rescale::IfChanged, ..BASE };
/// The same where something takes registers.
const FP8_MIDDLE_SMALL: AmpereConfig = AmpereConfig { tile_n: 32, ..FP8_MIDDLE };
/// The same in wider heads.
const FP8_WIDE: AmpereConfig = AmpereConfig { warps: 8, query: QueryPlace::Shared, ..FP8_MIDDLE_SMALL };
/// The same where that leaves too few registers.
const FP8_WIDE_SMALL: AmpereConfig = AmpereConfig { warps: 4, tile_n: 16, ..FP8_WIDE };
/// The same with few rows.
const FP8_TINY: AmpereConfig = AmpereConfig { kv_split_warps: 2, ..FP8_MIDDLE };
/// The same with few rows over many keys.
const FP8_DECODE: AmpereConfig = AmpereConfig { kv_split_warps: 4, ..FP8_MIDDLE };
/// The same for up to 64 rows, packed.
const FP8_DECODE_ROWS: AmpereConfig = AmpereConfig { stages: 4, ..FP8_MIDDLE_SMALL };
/// The same for wide heads. In the widest, chunks leave too few registers, and there are splits.
const FP8_DECODE_WIDE: AmpereConfig = AmpereConfig { query: QueryPlace::Shared, ..FP8_DECODE };

/// Every config that some problem of 8 bits gets; those of few rows with chunks.
pub(crate) const ALL_FP8: [AmpereConfig; 10] = [
    FP8,
    FP8_MIDDLE,
    FP8_MIDDLE_SMALL,
    FP8_WIDE,
    FP8_WIDE_SMALL,
    FP8_TINY,
    AmpereConfig { persistent: 5, chunk_keys: 128, pack_gqa: true, ..FP8_DECODE },
    AmpereConfig { persistent: 5, chunk_keys: 128, pack_gqa: true, ..FP8_DECODE_ROWS },
    AmpereConfig { persistent: 5, chunk_keys: 128, ..FP8_DECODE_WIDE },
    AmpereConfig { num_splits: 4, pack_gqa: true, ..FP8_DECODE_WIDE },
];

/// Every config that some problem gets; those of few rows also packed, and with several parts.
pub(crate) const ALL: [AmpereConfig; 16] = [
    BASE,
    FEW_ROWS,
    TINY,
    ONE_WAVE,
    NARROW,
    MIDDLE,
    WIDE,
    WIDEST,
    WIDEST_A100,
    NARROW_SMALL,
    MIDDLE_SMALL,
    WIDE_SMALL,
    AmpereConfig { num_splits: 4, pack_gqa: true, ..DECODE },
    AmpereConfig { num_splits: 8, pack_gqa: true, cluster: true, stages: 3, ..DECODE },
    AmpereConfig { num_splits: 3, ..DECODE_WIDE },
    AmpereConfig { num_splits: 2, pack_gqa: true, ..DECODE_WIDE_SMALL },
];

/// More query rows than this are no longer few.
const MOST_FEW_ROWS: usize = 16;
/// Keys from which on they are divided: fewer are not worth a second kernel.
const MIN_KEYS: usize = 512;
/// Keys of a chunk, at most, where sequences have lengths that only the device knows: one that is much longer than the
/// others is then spread over all SMs.
const MAX_CHUNK: usize = 2048;
/// CTAs that a SM is given where keys are divided: enough to keep its memory busy.
const CTAS_PER_SM: usize = 2;
/// The most KV splits: what the second kernel adds up must stay little.
const MAX_SPLITS: usize = 64;
/// Numbers of splits that the CTAs of a cluster can merge without a second kernel.
const CLUSTER_SPLITS: [usize; 3] = [8, 4, 2];
/// Keys of a CTA up to which a cluster merges splits sooner than a second kernel does, though there are fewer of them.
const MAX_CLUSTER_KEYS: usize = 512;
/// The most SMs of a GPU.
const MOST_SMS: usize = 160;

/// Shared memory of a CTA from which on the larger tiles fit twice.
const ROOMY_SHARED_BYTES: u32 = 160 * 1024;
/// Shared memory of a CTA from which on the largest tiles fit.
const ROOMIEST_SHARED_BYTES: u32 = 192 * 1024;

/// The best config for a problem on a GPU.
pub(crate) fn select(problem: &Problem, Target { arch, num_sms, .. }: Target) -> AmpereConfig {
    let columns = problem.head_dim.max(problem.value_dim);
    let is_roomy = has_room(arch);
    let ctas = |config: AmpereConfig| {
        let tiles = problem.query_length.div_ceil(config.tile_m() as usize);
        tiles.saturating_mul(problem.query_heads).saturating_mul(problem.batch)
    };
    let num_sms = num_sms as usize;
    // With no more CTAs than SMs, half as many rows for each cost nothing.
    let is_small = ctas(FEW_ROWS) <= num_sms;
    // Compilers for other GPUs run out of registers with these tiles.
    let is_hopper = matches!(arch, Arch::Sm90 | Arch::Sm90a);
    let is_one_wave = ctas(BASE) <= num_sms;
    let best = match (is_roomy, columns) {
        (true, ..=64) if is_small && problem.key_length > 64 => FEW_ROWS,
        (_, ..=128) if is_small => TINY,
        (true, ..=64) if is_one_wave => ONE_WAVE,
        (true, 65..=128) | (false, ..=64) if is_one_wave => BASE,
        (true, ..=64) if is_hopper => NARROW,
        (true, 65..=128) if is_hopper => MIDDLE,
        (_, ..=64) => NARROW_SMALL,
        (_, ..=128) => MIDDLE_SMALL,
        (true, ..=192) => WIDE,
        (true, _) if arch.shared_bytes_per_cta() >= ROOMIEST_SHARED_BYTES => WIDEST,
        (true, _) => WIDEST_A100,
        (false, _) => WIDE_SMALL,
    };
    // A bias takes registers that the large tiles have not left.
    let specialization = Specialization::of(problem);
    let is_fp8 = specialization.key_value_dtype().is_float8();
    // Two 16 rows of a warp share what is widened. Nothing of keys and values of 8 bits was measured on a GPU.
    let between: &[_] = if is_fp8 && !is_one_wave { &[MIDDLE, MIDDLE_SMALL] } else { &[] };
    let candidates = [best].into_iter().chain(between.iter().copied()).chain([BASE]);
    candidates.into_iter().find(|config| config.fits_registers(specialization, arch)).unwrap_or(WIDE_SMALL)
}

/// True if the larger tiles fit the shared memory of a CTA twice.
const fn has_room(arch: Arch) -> bool {
    arch.shared_bytes_per_cta() >= ROOMY_SHARED_BYTES
}

/// The config for decode: few rows over many keys, where the GPU would otherwise have little to do or read keys more often
/// than it must.
pub(crate) fn select_decode(problem: &Problem, target: Target) -> Option<AmpereConfig> {
    let Target { arch, num_sms, .. } = target;
    if problem.query_length > MOST_FEW_ROWS || problem.key_length < MIN_KEYS || problem.mask_mod.is_some() {
        return None;
    }
    let group = problem.query_heads / problem.key_heads.max(1);
    let can_pack = group > 1 && can_pack_gqa(Specialization::of(problem));
    let (pack_gqa, rows, heads) = if can_pack {
        (true, problem.query_length * group, problem.key_heads)
    } else {
        (false, problem.query_length, problem.query_heads)
    };
    let is_fp8 = problem.dtype.is_float8();
    let config = match (problem.head_dim.max(problem.value_dim), has_room(arch)) {
        (..=128, _) if is_fp8 && rows > FP8_DECODE.tile_m() as usize => FP8_DECODE_ROWS,
        (..=128, _) if is_fp8 => FP8_DECODE,
        _ if is_fp8 => FP8_DECODE_WIDE,
        _ if problem.dtype == DType::F32 => first(problem, target, &[F32_DECODE, F32_DECODE_SMALL, F32_WIDE_SMALL])?,
        (..=128, true) if rows > DECODE.tile_m() as usize => DECODE_ROWS,
        (..=128, true) => AmpereConfig { stages: 3, ..DECODE },
        (..=128, false) => DECODE,
        (_, true) => DECODE_WIDE,
        (_, false) => DECODE_WIDE_SMALL,
    };
    let tiles = rows.div_ceil(config.tile_m() as usize).saturating_mul(heads).saturating_mul(problem.batch);
    if config == (AmpereConfig { stages: 3, ..DECODE })
        && let Some(merged) = merged_in_cluster(problem, AmpereConfig { pack_gqa, ..config }, tiles, target)
    {
        return Some(merged);
    }
    // A plan for any number of SMs is for those of the largest.
    let slots = CTAS_PER_SM * (num_sms as usize).min(MOST_SMS);
    let splits = (slots / tiles.max(1)).clamp(1, MAX_SPLITS);
    let longest = if problem.has_device_lengths() { MAX_CHUNK } else { usize::MAX };
    let chunk_keys = problem.key_length.div_ceil(splits).min(longest).next_multiple_of(config.tile_n as usize) as u32;
    let pdl = matches!(arch, Arch::Sm90 | Arch::Sm90a);
    let chunked = AmpereConfig { chunk_keys, persistent: slots as u32, pack_gqa, pdl, ..config };
    if is_fp8 {
        let split = AmpereConfig { num_splits: splits as u32, pack_gqa, ..config };
        return first(problem, target, &[chunked, split]);
    }
    Some(chunked)
}

/// The config whose splits a cluster merges, if every SM has one at most and their keys are few.
fn merged_in_cluster(problem: &Problem, config: AmpereConfig, tiles: usize, target: Target) -> Option<AmpereConfig> {
    let num_sms = target.num_sms as usize;
    let splits = CLUSTER_SPLITS.into_iter().find(|splits| tiles.saturating_mul(*splits) <= num_sms)?;
    let merged = AmpereConfig { cluster: true, num_splits: splits as u32, ..config };
    let is_short = problem.key_length <= splits * MAX_CLUSTER_KEYS;
    (is_short && takes(problem, merged, target)).then_some(merged)
}

/// The config for `f32`, if the kernel takes the problem: by three products of `tf32`, never by one.
pub(crate) fn select_f32(problem: &Problem, target: Target) -> Option<AmpereConfig> {
    let candidates: &[_] = match problem.head_dim.max(problem.value_dim) {
        ..=64 => &[F32, F32_MIDDLE, F32_WIDE, F32_WIDE_SMALL],
        _ => &[F32_TALL, F32_MIDDLE, F32_WIDE, F32_WIDE_SMALL],
    };
    let decode = select_decode(problem, target).filter(|config| takes(problem, *config, target));
    decode.or_else(|| first(problem, target, candidates))
}

/// The config for query, key and value of 8 bits, if the kernel takes them.
pub(crate) fn select_fp8(problem: &Problem, target: Target) -> Option<AmpereConfig> {
    let columns = problem.head_dim.max(problem.value_dim);
    let tiles = problem.query_length.div_ceil(FP8_TINY.tile_m() as usize);
    // With no more CTAs than SMs, half as many rows for each cost nothing.
    let is_small = tiles.saturating_mul(problem.query_heads).saturating_mul(problem.batch) <= target.num_sms as usize;
    let best = match columns {
        ..=128 if is_small => FP8_TINY,
        ..=64 => FP8,
        65..=128 => FP8_MIDDLE,
        _ => FP8_WIDE,
    };
    first(problem, target, &[best, FP8_MIDDLE_SMALL, FP8_WIDE, FP8_WIDE_SMALL])
}

/// The first of some configs that takes a problem.
fn first(problem: &Problem, target: Target, candidates: &[AmpereConfig]) -> Option<AmpereConfig> {
    candidates.iter().copied().find(|config| takes(problem, *config, target))
}
