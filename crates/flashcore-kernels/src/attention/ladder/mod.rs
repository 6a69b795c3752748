//! Ladder kernel: the steps between the scalar and the fast kernels, with Q, K, V and the scores in shared memory.
//!
//! A CTA has 64 query rows, 16 for each warp. For each KV block a warp multiplies its rows by the keys and stores the
//! scores in shared memory; two lanes for each row turn them into weights there, and store the row scale of the output;
//! then the warp multiplies the weights by the values. Either product is the lanes' own or that of tensor cores. What the
//! [`super::sm80`] kernel gains by keeping scores in registers is what this one lacks. `flashcore ladder` measures it.

pub(crate) mod config;
mod family;
mod output;
mod softmax;

use flashcore_ir::types::{F32, U32};
use flashcore_ir::{Builder, Kernel, Major, Reg, SharedAddress, SpecialRegister};

use super::TileContext;
use super::kv_range::KvRange;
use super::kv_source::KvSource;
use super::sm80::kv_pipeline::{KvPipeline, KvTiles};
use crate::config::{LadderConfig, Product};
use crate::element::{Element, ElementLayout};
use crate::primitives::{
    Accumulation, Accumulator, CHUNK_BYTES, FragmentPosition, GlobalRows, LANES, MMA_M, OperandA, ROW_STEP,
    SharedLayout, SharedTile, TileCopy,
};
use crate::specialization::Specialization;
use output::{Output, ScalarOutput, each_pair};
use softmax::SharedSoftmax;

const ROWS: u32 = MMA_M;
/// Bytes of an `f32`.
const WORD_BYTES: u32 = 4;
/// Words that a lane loads at a time.
const WORDS_AT_ONCE: u32 = 4;

/// Writes the kernel.
pub(crate) fn kernel<T: Element>(name: String, config: LadderConfig, specialization: Specialization) -> Kernel {
    let mut builder = Builder::new(name, config.threads());
    let k = &mut builder;
    let context = TileContext::of_grid(k, specialization, config.tile_m());
    let thread = k.special(SpecialRegister::ThreadX);
    let warp = Warp::new(k, thread);
    let tiles = Tiles::reserve(k, config, specialization);
    let range = KvRange::new(k, &context, config.tile_m(), config.tile_n);
    let pipeline = config.kv_pipeline();
    let (query_copy, pipeline) = k.section("copies", |k| {
        let query = context.query(k);
        let source = KvSource::new(k, &context);
        let query = GlobalRows { vec_bytes: query.vec_bytes.min(pipeline.load_bytes), ..query };
        let query_copy = TileCopy::new(k, tiles.query, query, warp.shared_base, thread, config.threads());
        (query_copy, KvPipeline::new(k, pipeline, &tiles.kv, &range, source, warp.shared_base, thread))
    });
    k.section("load query", |k| {
        let rows_left = k.sub(context.end_row, context.first_row);
        query_copy.start(k, None, rows_left);
        k.copy_async_commit();
    });
    pipeline.prefetch(k, &range);
    k.section("wait for query", |k| {
        k.copy_async_wait(pipeline.prefetched_groups());
        k.cta_sync();
    });
    let softmax = k.section("softmax", |k| SharedSoftmax::new(k, &context, &warp));
    let output = k.section("output", |k| match config.output {
        Product::Scalar => Output::Scalar(ScalarOutput::zero(k, &warp, tiles.kv.value)),
        Product::Tensor => Output::Tensor(Accumulator::zero(k, 1, T::LAYOUT.padded_columns(specialization.value_dim))),
    });
    k.for_uniform(range.begin, range.end, config.tile_n as i32, |k, first_key| {
        pipeline.consumer_wait(k, &range);
        let stage = pipeline.read_stage();
        k.section("scores", |k| match config.scores {
            Product::Scalar => scalar_scores::<T>(k, &tiles, &warp, stage),
            Product::Tensor => tensor_scores::<T>(k, &tiles, &warp, stage, specialization.head_dim),
        });
        k.warp_sync();
        k.section("softmax", |k| softmax.update::<T>(k, &context, &tiles, &warp, config, first_key));
        k.warp_sync();
        k.section("output", |k| output.multiply_add::<T>(k, &tiles, &warp, stage));
        // The scores of the next block overwrite these weights.
        k.warp_sync();
        pipeline.consumer_release(k, &range, first_key);
    });
    k.section("epilogue", |k| {
        softmax.finish(k, &context, &tiles, &warp);
        k.warp_sync();
        output.store::<T>(k, &context, &tiles, &warp);
    });
    builder.finish()
}

/// A lane and its warp.
struct Warp {
    lane: Reg<U32>,
    /// The first of the warp's rows in the tile of the CTA.
    first_row: Reg<U32>,
    position: FragmentPosition,
    shared_base: Reg<U32>,
}

impl Warp {
    fn new(k: &mut Builder, thread: Reg<U32>) -> Self {
        let warp = k.shr(thread, LANES.ilog2());
        let lane = k.and(thread, LANES - 1);
        let first_row = k.mul(warp, ROWS);
        Self { lane, first_row, position: FragmentPosition::new(k, lane), shared_base: k.shared_base() }
    }

    fn base_of_rows(&self, k: &mut Builder, tile: SharedTile) -> Reg<U32> {
        k.eval(self.shared_base + self.first_row * tile.row_bytes())
    }
}

/// Shared memory.
struct Tiles {
    query: SharedTile,
    kv: KvTiles,
    /// Scores in `f32`, and then weights where lanes multiply them: offset, keys and words of a row.
    scores: u32,
    tile_n: u32,
    score_words: u32,
    /// Weights, where tensor cores multiply them.
    weights: SharedTile,
    /// An `f32` for each row: its row scale.
    factors: u32,
}

impl Tiles {
    fn reserve(k: &mut Builder, config: LadderConfig, specialization: Specialization) -> Self {
        let (rows, tile_n) = (config.tile_m(), config.tile_n);
        let element = ElementLayout::of(specialization.dtype);
        let columns = SharedTile::columns_for(specialization.head_dim, element);
        let query = SharedTile::reserve(k, rows, columns, config.layout, element);
        let kv = KvTiles::reserve(k, config.kv_pipeline(), config.layout, specialization);
        let score_words = match config.layout {
            SharedLayout::Plain => tile_n,
            SharedLayout::Padded | SharedLayout::Swizzled => tile_n + WORDS_AT_ONCE,
        };
        let scores = k.reserve_shared(rows * score_words * WORD_BYTES, 128);
        let weight_rows = if config.output == Product::Tensor { rows } else { 0 };
        let weights = SharedTile::reserve(k, weight_rows, tile_n, config.layout, element);
        let factors = k.reserve_shared(rows * WORD_BYTES, 128);
        Self { query, kv, scores, tile_n, score_words, weights, factors }
    }

    /// The address of a row of scores.
    fn score_row(&self, k: &mut Builder, warp: &Warp, row: Reg<U32>) -> Reg<U32> {
        k.eval(warp.shared_base + (warp.first_row + row).mul_add(self.score_words * WORD_BYTES, self.scores))
    }

    /// The address of the factor of the warp's first row.
    fn factors_of_warp(&self, k: &mut Builder, warp: &Warp) -> Reg<U32> {
        k.eval(warp.shared_base + warp.first_row.mul_add(WORD_BYTES, self.factors))
    }
}

/// Each lane multiplies all 16 rows by some keys: a chunk of columns at a time, those of the query the same for all lanes.
fn scalar_scores<T: Element>(k: &mut Builder, tiles: &Tiles, warp: &Warp, stage: Reg<U32>) {
    let (query, key) = (tiles.query, tiles.kv.key);
    let keys: Vec<_> = (0..tiles.tile_n / LANES).map(|step| k.add(warp.lane, step * LANES)).collect();
    let sums: Vec<Vec<_>> = (0..ROWS).map(|_| keys.iter().map(|_| k.copy(0.0f32)).collect()).collect();
    let (query_base, key_base) = (warp.base_of_rows(k, query), k.add(warp.shared_base, stage));
    for panel in 0..key.panels() {
        k.for_uniform(0u32, key.panel_chunks(), 1u32, |k, chunk| {
            let keys: Vec<_> = keys
                .iter()
                .map(|row| {
                    let address = key.chunk_address(k, key_base, *row, chunk);
                    load_chunk::<T>(k, SharedAddress::from(address).plus(key.panel_step(panel) as i32))
                })
                .collect();
            for (row, sums) in sums.iter().enumerate() {
                let row = k.copy(row as u32);
                let address = query.chunk_address(k, query_base, row, chunk);
                let query = load_chunk::<T>(k, SharedAddress::from(address).plus(query.panel_step(panel) as i32));
                for (sum, key) in sums.iter().zip(&keys) {
                    for (left, right) in query.iter().zip(key) {
                        k.fma_to(*sum, *left, *right);
                    }
                }
            }
        });
    }
    let row = k.copy(0u32);
    let first = tiles.score_row(k, warp, row);
    let first = k.mad(warp.lane, WORD_BYTES, first);
    for (row, sums) in sums.iter().enumerate() {
        for (step, sum) in sums.iter().enumerate() {
            let offset = (row as u32 * tiles.score_words + step as u32 * LANES) * WORD_BYTES;
            k.store_shared(SharedAddress::from(first).plus(offset as i32), &[*sum]);
        }
    }
}

/// A chunk of shared memory, widened: words of 16-bit pairs.
fn load_chunk<T: Element>(k: &mut Builder, address: SharedAddress) -> Vec<Reg<F32>> {
    let words = k.load_shared::<U32>(address, CHUNK_BYTES / WORD_BYTES);
    words
        .into_iter()
        .flat_map(|word| {
            let pair = k.reinterpret::<U32, T>(word);
            T::widen(k, pair)
        })
        .collect()
}

fn tensor_scores<T: Element>(k: &mut Builder, tiles: &Tiles, warp: &Warp, stage: Reg<U32>, head_dim: u32) {
    let (query_base, key_base) = (warp.base_of_rows(k, tiles.query), k.add(warp.shared_base, stage));
    let query = tiles.query.operand_a(k, query_base, warp.lane, Major::Depth);
    let keys = tiles.kv.key.operand_b(k, key_base, warp.lane, Major::Depth);
    let scores = Accumulator::zero(k, 1, tiles.tile_n);
    let query = OperandA::<T>::Shared(vec![query], T::LAYOUT.padded_columns(head_dim));
    scores.multiply(k, &query, keys, Accumulation::F32);
    let first = tiles.score_row(k, warp, warp.position.group);
    let first = k.mad(warp.position.member, 2 * WORD_BYTES, first);
    each_pair(&scores, |row, column, pair| {
        let offset = (row * ROW_STEP * tiles.score_words + column) * WORD_BYTES;
        k.store_shared(SharedAddress::from(first).plus(offset as i32), &pair);
    });
}
