//! Scales of 8-bit keys and values in the Ampere kernel.
//!
//! The scale of a key multiplies its column of scores, before everything else that is done to them; the scale of a value
//! multiplies its column of weights, after the row sum is taken and before they are rounded. The strides of scales come
//! with each launch, so it is decided at run time, by all threads alike, what there is to do:
//!
//! * Where all keys of a head of a sequence share one scale, it is multiplied into the softmax scale, or into the output
//!   at the end, and blocks know nothing of it.
//! * Where tokens have scales of their own, those of a block go through the stages of the KV pipeline beside its keys and
//!   values. Each row has a power of two, which grows with the products of its weights and their scales as the row max
//!   grows with its scores: the products are divided by it, and the output is multiplied by it at the end, so that they
//!   stay where `f16` has all its bits. Only keys that a row attends have a say in its power.
//!
//! Scales of rows past the last key, and those of values before the first that any row attends, become zero on the way, as
//! the values do: like those, they may be anything.

use flashcore_ir::builder::CopyBytes;
use flashcore_ir::types::{F32, Pred, S32, U32};
use flashcore_ir::{Builder, Compare, L2Prefetch, Reg, SharedAddress, VoteMode};
use flashcore_problem::Operand;

use super::Warp;
use super::kv_pipeline::{KvPipelineConfig, KvTiles};
use crate::attention::TileContext;
use crate::attention::kv_range::KvRange;
use crate::attention::kv_source::ScaleSource;
use crate::config::AmpereConfig;
use crate::primitives::{Accumulator, GlobalRows, MMA_N, reduce_row};
use crate::specialization::Specialization;

/// Bytes of a scale.
const SCALE_BYTES: u32 = 4;
/// Alignment of the scales of a block.
const ALIGNMENT: u32 = 128;
/// Bits of the exponent of an `f32`, and of the exponents of 2^-126 and 2^126.
const EXPONENT_BITS: u32 = 0x7f80_0000;
pub(super) const LEAST_EXPONENT: u32 = 1 << 23;
pub(super) const GREATEST_EXPONENT: u32 = 253 << 23;
/// The largest product over the power of its row: `f16` ends at 2^16.
const LARGEST_PRODUCT: f32 = 32768.0;
/// Bits of an exponent of 6: the largest product over a power that has grown is 2^6 or a little more. What is 2^20 times
/// smaller has all its bits in `f16`, and products may become 2^8 times larger before the power grows again.
const PRODUCT_EXPONENT: u32 = 6 << 23;

/// Shared memory for the scales of the keys and of the values of a block: offsets in stage 0.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScaleTiles {
    offsets: [Option<u32>; 2],
}

impl ScaleTiles {
    /// Reserves memory for the scales that there are, of `tile_n` keys.
    pub(super) fn reserve(k: &mut Builder, tile_n: u32, specialization: Specialization) -> Self {
        let reserve = |scale| specialization.has(scale).then(|| k.reserve_shared(bytes(tile_n), ALIGNMENT));
        Self { offsets: [Operand::KScale, Operand::VScale].map(reserve) }
    }

    /// The sources of keys and values, each with its offset.
    fn of_sources(self, [key, value]: [Option<ScaleSource>; 2]) -> [Option<(ScaleSource, u32)>; 2] {
        let [key_offset, value_offset] = self.offsets;
        [key.zip(key_offset), value.zip(value_offset)]
    }

    /// Bytes of a stage.
    pub(super) fn bytes(self, tile_n: u32) -> u32 {
        self.offsets.iter().flatten().count() as u32 * bytes(tile_n)
    }
}

const fn bytes(tile_n: u32) -> u32 {
    (tile_n * SCALE_BYTES).next_multiple_of(ALIGNMENT)
}

/// One thread's share of the copies of scales.
pub(crate) struct ScaleCopies {
    /// Of keys and of values: the source, and the address of the thread's first scale in stage 0.
    copies: [Option<(ScaleSource, Reg<U32>)>; 2],
    thread: Reg<U32>,
    config: KvPipelineConfig,
}

impl ScaleCopies {
    /// The copies of a thread; `thread` is its index among the copying threads.
    pub(super) fn new(
        k: &mut Builder,
        tiles: ScaleTiles,
        sources: [Option<ScaleSource>; 2],
        shared_base: Reg<U32>,
        (thread, config): (Reg<U32>, KvPipelineConfig),
    ) -> Self {
        let [key, value] = tiles.of_sources(sources);
        let copies = [key, value].map(|copy| {
            let (source, offset) = copy?;
            Some((source, k.eval(thread.mul_add(SCALE_BYTES, shared_base + offset))))
        });
        Self { copies, thread, config }
    }

    /// Starts the copies of the block that begins at `first_key`, of which `left` keys exist, into a stage.
    pub(super) fn start(
        &self,
        k: &mut Builder,
        stage: Reg<U32>,
        range: &KvRange,
        (first_key, left): (Reg<S32>, Reg<U32>),
    ) {
        for (index, copy) in self.copies.iter().enumerate() {
            let Some((source, target)) = *copy else { continue };
            let skipped = range.batch_begin.filter(|_| index == 1).map(|first| k.sub(first, first_key));
            k.section("load scales", |k| {
                k.if_uniform(source.per_token, |k| {
                    let target = k.add(target, stage);
                    self.copy_rows(k, source.rows, target, (first_key, skipped, left));
                });
            });
        }
    }

    fn copy_rows(
        &self,
        k: &mut Builder,
        rows: GlobalRows,
        target: Reg<U32>,
        (first_key, skipped, left): (Reg<S32>, Option<Reg<S32>>, Reg<U32>),
    ) {
        let (threads, tile_n) = (self.config.copying_threads(), self.config.tile_n);
        for first in (0..tile_n).step_by(threads as usize) {
            let row = k.add(self.thread, first);
            let exists = k.compare(Compare::Lt, row, left);
            let exists = skipped.map_or(exists, |skipped| k.eval(exists & row.signed().ge(skipped)));
            // Past the last key, that of the last: the table of pages has no more.
            let existing = k.eval(first_key.unsigned() + row.min(left - 1));
            let from = rows.row(k, existing);
            let read = k.select(exists, SCALE_BYTES, 0u32);
            let to = SharedAddress::from(target).plus((first * SCALE_BYTES) as i32);
            let copy = |k: &mut Builder| {
                k.copy_async(to, from, CopyBytes::ZeroFill { written: SCALE_BYTES, read }, L2Prefetch::None);
            };
            if first + threads > tile_n {
                let inside = k.compare(Compare::Lt, row, tile_n);
                k.when(inside, copy);
            } else {
                copy(k);
            }
        }
    }
}

/// The scales of a warp's keys and values.
pub(super) struct KvScales {
    key: Option<LaneScales>,
    pub(super) value: Option<ValueScales>,
}

/// Scales of the keys, or values, of a lane's columns.
#[derive(Clone, Copy)]
pub(super) struct LaneScales {
    pub(super) per_token: Reg<Pred>,
    /// The address of the scale of the lane's first column, in stage 0.
    address: Reg<U32>,
    /// The one scale of all keys; that of the first where tokens have their own.
    of_all: Reg<F32>,
}

/// Scales of values.
pub(super) struct ValueScales {
    pub(super) columns: LaneScales,
    /// Factors of the output, by row: the one scale of all values, or the power of two that products are divided by.
    pub(super) factors: Vec<Reg<F32>>,
}

impl KvScales {
    pub(super) fn new(
        k: &mut Builder,
        config: AmpereConfig,
        tiles: &KvTiles,
        sources: [Option<ScaleSource>; 2],
        warp: &Warp,
        range: &KvRange,
    ) -> Self {
        let [key, value] = tiles.scales.of_sources(sources).map(|scales| {
            let (source, offset) = scales?;
            Some(k.section("scales", |k| {
                let first_column = warp.split * config.keys_per_warp() + warp.position.member * 2;
                let address = k.eval(first_column.mul_add(SCALE_BYTES, warp.shared_base + offset));
                let scale = scale_of_first_key(k, source, range);
                LaneScales { per_token: source.per_token, address, of_all: scale }
            }))
        });
        // Tokens bring their own scales of keys; of those of values, powers of two are left to the output.
        let key = key.inspect(|key| k.set_where(key.of_all, key.per_token, 1.0f32));
        let value = value.map(|value| k.section("scales", |k| ValueScales::new(k, value, 2 * warp.m_tiles)));
        Self { key, value }
    }

    /// The context with the one scale of all keys in the softmax scale.
    pub(super) fn scaled_context(&self, k: &mut Builder, context: &TileContext) -> TileContext {
        let mut scaled = *context;
        if let Some(key) = self.key {
            scaled.parameters.scale_log2 =
                k.section("softmax scale", |k| k.mul(context.parameters.scale_log2, key.of_all));
            if context.specialization.only_adds() {
                scaled.parameters.inverse_scale = k.div(context.parameters.inverse_scale, key.of_all);
            }
        }
        scaled
    }

    /// Multiplies columns of scores by the scales of their keys, where tokens have their own.
    pub(super) fn scale_scores(&self, k: &mut Builder, scores: &Accumulator, stage: Reg<U32>) {
        if let Some(key) = self.key {
            k.section("key scales", |k| key.scale_columns(k, scores, stage));
        }
    }

    /// Multiplies columns of weights by the scales of their values, where tokens have their own. The output so far is
    /// rescaled where a power grows.
    pub(super) fn scale_weights(&self, k: &mut Builder, weights: &Accumulator, output: &Accumulator, stage: Reg<U32>) {
        if let Some(value) = &self.value {
            k.section("value scales", |k| {
                k.if_uniform(value.columns.per_token, |k| {
                    value.columns.multiply(k, weights, stage);
                    value.divide_by_powers(k, weights, output);
                });
            });
        }
    }

    /// Multiplies the output by what the weights were not.
    pub(super) fn scale_output(&self, k: &mut Builder, output: &Accumulator) {
        if let Some(value) = &self.value {
            k.section("value scales", |k| output.scale_rows(k, &value.factors));
        }
    }
}

impl ValueScales {
    fn new(k: &mut Builder, columns: LaneScales, rows: u32) -> Self {
        k.set_where(columns.of_all, columns.per_token, f32::from_bits(LEAST_EXPONENT));
        Self { columns, factors: (0..rows).map(|_| k.copy(columns.of_all)).collect() }
    }

    /// Divides products of weights and scales by the powers of their rows. Where some would be too large, powers grow.
    fn divide_by_powers(&self, k: &mut Builder, products: &Accumulator, output: &Accumulator) {
        let powers = &self.factors;
        let largest: Vec<Reg<F32>> = powers.iter().map(|_| k.copy(0.0f32)).collect();
        // NaN is no maximum.
        products.each(|row, _, product| k.max_to(largest[row], product));
        let inverses: Vec<Reg<F32>> = powers.iter().map(|power| inverse_of_power(k, *power)).collect();
        let mut too_large = None;
        for (largest, inverse) in largest.iter().zip(&inverses) {
            let product = k.mul(*largest, *inverse);
            let is_larger = k.compare(Compare::Gt, product, LARGEST_PRODUCT);
            too_large = Some(too_large.map_or(is_larger, |others| k.or(others, is_larger)));
        }
        let Some(too_large) = too_large else { return };
        let too_large = k.vote(VoteMode::Any, too_large);
        k.if_uniform(too_large, |k| {
            let rows = powers.iter().zip(&inverses).zip(&largest);
            let ratios: Vec<Reg<F32>> =
                rows.map(|((power, inverse), largest)| grow(k, [*power, *inverse], *largest)).collect();
            k.section("rescale", |k| output.scale_rows(k, &ratios));
        });
        products.scale_rows(k, &inverses);
    }
}

/// Lets the power of a row grow if the largest product of a lane, or of the lanes that share the row, is too large for it.
/// Returns the old power over the new.
fn grow(k: &mut Builder, [power, inverse]: [Reg<F32>; 2], largest: Reg<F32>) -> Reg<F32> {
    reduce_row(k, largest, |k, largest, other| k.max_to(largest, other));
    let exponent = k.reinterpret::<F32, U32>(largest);
    let exponent = k.and(exponent, EXPONENT_BITS);
    let exponent = k.eval(exponent.max(LEAST_EXPONENT + PRODUCT_EXPONENT).min(GREATEST_EXPONENT));
    let grown = k.sub(exponent, PRODUCT_EXPONENT);
    let grown = k.reinterpret::<U32, F32>(grown);
    // Other rows have no say in whether it does.
    let product = k.mul(largest, inverse);
    let is_too_large = k.compare(Compare::Gt, product, LARGEST_PRODUCT);
    let grown = k.select(is_too_large, grown, power);
    let new_inverse = inverse_of_power(k, grown);
    k.set(inverse, new_inverse);
    let ratio = k.mul(power, inverse);
    k.set(power, grown);
    ratio
}

/// One over a power of two from 2^-126 to 2^126.
pub(super) fn inverse_of_power(k: &mut Builder, power: Reg<F32>) -> Reg<F32> {
    let exponent = k.reinterpret::<F32, U32>(power);
    let inverse = k.sub(LEAST_EXPONENT + GREATEST_EXPONENT, exponent);
    k.reinterpret::<U32, F32>(inverse)
}

impl LaneScales {
    /// Multiplies columns by their scales, where tokens have their own.
    fn scale_columns(self, k: &mut Builder, matrix: &Accumulator, stage: Reg<U32>) {
        k.if_uniform(self.per_token, |k| self.multiply(k, matrix, stage));
    }

    /// Multiplies columns by their scales.
    pub(super) fn multiply(self, k: &mut Builder, matrix: &Accumulator, stage: Reg<U32>) {
        let address = k.add(self.address, stage);
        let tiles = matrix.m_tiles.first().map_or(0, Vec::len);
        for tile in 0..tiles {
            let from = SharedAddress::from(address).plus((tile as u32 * MMA_N * SCALE_BYTES) as i32);
            let pair = k.load_shared::<F32>(from, 2);
            for tiles in &matrix.m_tiles {
                for (index, element) in tiles[tile].iter().enumerate() {
                    k.mul_to(*element, pair[index % 2]);
                }
            }
        }
    }
}

/// The scale of the first key of a range that some row attends; 1 where there is none.
fn scale_of_first_key(k: &mut Builder, source: ScaleSource, range: &KvRange) -> Reg<F32> {
    let first = range.batch_begin.map_or(range.begin, |first| k.max(range.begin, first));
    let exists = k.compare(Compare::Lt, first, range.end);
    let scale = k.copy(1.0f32);
    k.if_uniform(exists, |k| {
        let row = k.reinterpret::<S32, U32>(first);
        let address = source.rows.row(k, row);
        k.load_into(scale, address);
    });
    scale
}
