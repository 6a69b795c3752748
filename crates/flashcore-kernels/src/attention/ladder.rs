//! The steps of the history: tiles of query, keys and values in shared memory, and the scores there too.
//!
//! A CTA has 64 query rows, 16 for each warp. For each tile of keys a warp multiplies its rows by the keys and stores the
//! scores in shared memory; two lanes for each row turn them into weights there, and store what the output so far is to be
//! multiplied by; then the warp multiplies the weights by the values. Either product is the lanes' own or that of tensor
//! cores. What the [`super::ampere`] kernel gains by keeping scores in registers is what this one lacks.

use core::f32::consts::LN_2;

use flashcore_ir::types::{F32, Pred, S32, U32};
use flashcore_ir::{Builder, Compare, GlobalAddress, Kernel, Reg, SharedAddress, ShuffleMode, SpecialRegister};
use flashcore_problem::Operand;

use super::Work;
use super::scalar::modified;
use super::stream::{KeyRange, Stream, StreamTiles};
use crate::config::{LadderConfig, Product};
use crate::element::{ELEMENT_BYTES, Element};
use crate::specialization::Specialization;
use crate::tile::{
    Accumulation, Accumulator, CHUNK_ELEMENTS, ExpressionCode, FragmentPosition, GlobalRows, LANES, LaneRows,
    LeftOperand, PRODUCT_DEPTH, ROWS_PER_BLOCK, RightFragments, ScoreTerms, SharedLayout, SharedTile, TileCopy,
    add_sink,
};

const ROWS: u32 = ROWS_PER_BLOCK;
/// Bytes of an `f32`.
const WORD_BYTES: u32 = 4;
/// Words that a lane reads at a time.
const WORDS_AT_ONCE: u32 = 4;
/// Lanes that share a row in the softmax.
const LANES_PER_ROW: u32 = LANES / ROWS;
/// Columns of the output that a warp has at a time, two for each lane.
const COLUMNS_AT_ONCE: u32 = 2 * LANES;

/// Writes the kernel.
pub(crate) fn kernel<T: Element>(name: String, config: LadderConfig, specialization: Specialization) -> Kernel {
    let mut builder = Builder::new(name, config.threads());
    let k = &mut builder;
    let work = Work::new(k, specialization, config.tile_m());
    let thread = k.special(SpecialRegister::ThreadX);
    let warp = Warp::new(k, thread);
    let tiles = Tiles::reserve(k, config, specialization);
    let keys = KeyRange::new(k, &work, config.tile_m(), config.tile_n);
    let supply = config.supply();
    let (query_copy, stream) = k.section("copies", |k| {
        let (query, key, value) = (work.query(k), work.key(k), work.value(k));
        let query = supply.rows(query);
        let query_copy = TileCopy::new(k, tiles.query, query, warp.shared_base, thread, config.threads());
        (query_copy, Stream::new(k, supply, &tiles.stream, &keys, [key, value], warp.shared_base, thread))
    });
    k.section("load query", |k| {
        let rows_left = k.sub(work.row_count, work.first_row);
        query_copy.start(k, None, rows_left);
        k.copy_async_commit();
    });
    stream.start(k, &keys);
    k.section("wait for query", |k| {
        k.copy_async_wait(stream.groups_behind_query());
        k.cta_sync();
    });
    let softmax = k.section("softmax", |k| SharedSoftmax::new(k, &work, &warp));
    let output = k.section("output", |k| match config.output {
        Product::Scalar => Output::Scalar(ScalarOutput::zero(k, &warp, tiles.stream.value)),
        Product::Tensor => Output::Tensor(Accumulator::zero(k, 1, padded_columns(specialization.value_dim))),
    });
    k.for_uniform(keys.first, keys.end, config.tile_n as i32, |k, first_key| {
        stream.arrive(k, &keys);
        let stage = stream.ring.reading();
        k.section("scores", |k| match config.scores {
            Product::Scalar => scalar_scores::<T>(k, &tiles, &warp, stage),
            Product::Tensor => tensor_scores::<T>(k, &tiles, &warp, stage, specialization.head_dim),
        });
        k.warp_sync();
        k.section("softmax", |k| softmax.update::<T>(k, &work, &tiles, &warp, config, first_key));
        k.warp_sync();
        k.section("output", |k| output.multiply_add::<T>(k, &tiles, &warp, stage));
        // The scores of the next tile take the place of these weights.
        k.warp_sync();
        stream.release(k, &keys, first_key);
    });
    k.section("epilogue", |k| {
        softmax.finish(k, &work, &tiles, &warp);
        k.warp_sync();
        output.store::<T>(k, &work, &tiles, &warp);
    });
    builder.finish()
}

const fn padded_columns(columns: u32) -> u32 {
    columns.next_multiple_of(PRODUCT_DEPTH)
}

/// Where a lane stands.
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
        let bytes = k.mul(self.first_row, tile.row_bytes());
        k.add(self.shared_base, bytes)
    }
}

/// What is in shared memory.
struct Tiles {
    query: SharedTile,
    stream: StreamTiles,
    /// Scores in `f32`, and then weights where lanes multiply them: offset, keys and words of a row.
    scores: u32,
    tile_n: u32,
    score_words: u32,
    /// Weights, where tensor cores multiply them.
    weights: SharedTile,
    /// An `f32` for each row: what its output is multiplied by.
    factors: u32,
}

impl Tiles {
    fn reserve(k: &mut Builder, config: LadderConfig, specialization: Specialization) -> Self {
        let (rows, tile_n) = (config.tile_m(), config.tile_n);
        let query = SharedTile::reserve(k, rows, SharedTile::columns_for(specialization.head_dim), config.layout);
        let stream = StreamTiles::reserve(k, config.supply(), config.layout, specialization);
        let score_words = match config.layout {
            SharedLayout::Plain => tile_n,
            SharedLayout::Padded | SharedLayout::Swizzled => tile_n + WORDS_AT_ONCE,
        };
        let scores = k.reserve_shared(rows * score_words * WORD_BYTES, 128);
        let weight_rows = if config.output == Product::Tensor { rows } else { 0 };
        let weights = SharedTile::reserve(k, weight_rows, tile_n, config.layout);
        let factors = k.reserve_shared(rows * WORD_BYTES, 128);
        Self { query, stream, scores, tile_n, score_words, weights, factors }
    }

    /// The address of a row of scores.
    fn score_row(&self, k: &mut Builder, warp: &Warp, row: Reg<U32>) -> Reg<U32> {
        let row = k.add(warp.first_row, row);
        let within = k.mad(row, self.score_words * WORD_BYTES, self.scores);
        k.add(warp.shared_base, within)
    }

    /// The address of the factor of the warp's first row.
    fn factors_of_warp(&self, k: &mut Builder, warp: &Warp) -> Reg<U32> {
        let within = k.mad(warp.first_row, WORD_BYTES, self.factors);
        k.add(warp.shared_base, within)
    }
}

/// Each lane multiplies all 16 rows by some keys: 8 columns at a time, those of the query the same for all lanes.
fn scalar_scores<T: Element>(k: &mut Builder, tiles: &Tiles, warp: &Warp, stage: Reg<U32>) {
    let (query, key) = (tiles.query, tiles.stream.key);
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

/// 8 elements of shared memory.
fn load_chunk<T: Element>(k: &mut Builder, address: SharedAddress) -> Vec<Reg<F32>> {
    let words = k.load_shared::<U32>(address, CHUNK_ELEMENTS / 2);
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
    let query = tiles.query.addresses(k, query_base, warp.lane, LaneRows::DownFirst);
    let keys = tiles.stream.key.addresses(k, key_base, warp.lane, LaneRows::AcrossFirst);
    let scores = Accumulator::zero(k, 1, tiles.tile_n);
    let query = LeftOperand::<T>::Shared(vec![query], padded_columns(head_dim));
    scores.multiply_add(k, &query, RightFragments::Transposed(keys), Accumulation::F32);
    let first = tiles.score_row(k, warp, warp.position.group);
    let first = k.mad(warp.position.member, 2 * WORD_BYTES, first);
    each_pair(&scores, |row, column, pair| {
        let offset = (row * 8 * tiles.score_words + column) * WORD_BYTES;
        k.store_shared(SharedAddress::from(first).plus(offset as i32), &pair);
    });
}

/// Visits two neighbouring elements at a time: which of the lane's two rows they are in, and the column of the first, less
/// twice the lane's member.
fn each_pair(accumulator: &Accumulator, mut visit: impl FnMut(u32, u32, [Reg<F32>; 2])) {
    let mut left = None;
    accumulator.each(|row, column, element| match left.take() {
        None => left = Some(element),
        Some(first) => visit(row as u32, column - 1, [first, element]),
    });
}

/// The online softmax of the row that a lane shares with its neighbour.
struct SharedSoftmax {
    /// Its row among those of the warp.
    row: Reg<U32>,
    /// Which of the lanes of the row this is.
    member: Reg<U32>,
    query_row: Reg<U32>,
    position: Reg<S32>,
    /// The keys that the row attends.
    first_key: Reg<S32>,
    end_key: Reg<S32>,
    terms: ScoreTerms,
    mask: Option<ExpressionCode>,
    maximum: Reg<F32>,
    /// Of this lane's keys.
    sum: Reg<F32>,
}

impl SharedSoftmax {
    fn new(k: &mut Builder, work: &Work, warp: &Warp) -> Self {
        let row = k.shr(warp.lane, LANES_PER_ROW.ilog2());
        let within = k.add(warp.first_row, row);
        let query_row = k.add(work.first_row, within);
        Self {
            row,
            member: k.and(warp.lane, LANES_PER_ROW - 1),
            query_row,
            position: work.position(k, query_row),
            first_key: work.first_key(k, query_row),
            end_key: work.end_key(k, query_row),
            terms: work.score_terms(k, query_row, 1),
            mask: work.mask_expression(k, query_row, 1),
            maximum: k.copy(f32::NEG_INFINITY),
            sum: k.copy(0.0f32),
        }
    }

    /// Turns the scores of a tile into weights, and stores what the output so far is multiplied by.
    fn update<T: Element>(
        &self,
        k: &mut Builder,
        work: &Work,
        tiles: &Tiles,
        warp: &Warp,
        config: LadderConfig,
        first_key: Reg<S32>,
    ) {
        let keys = tiles.tile_n / LANES_PER_ROW;
        let first = k.mul(self.member, keys);
        let row = tiles.score_row(k, warp, self.row);
        let scores = k.mad(first, WORD_BYTES, row);
        let before = k.copy(self.maximum);
        k.section("maximum", |k| {
            k.for_uniform(0u32, keys, 2u32, |k, index| {
                let address = k.mad(index, WORD_BYTES, scores);
                let products = k.load_shared::<F32>(address, 2);
                let key = k.add(first, index);
                let key = k.reinterpret::<U32, S32>(key);
                let key = k.add(first_key, key);
                let scores: Vec<_> = (0..)
                    .zip(products)
                    .map(|(next, product)| {
                        let key = k.add(key, next);
                        let score = self.score(k, work, product, key);
                        k.max_to(self.maximum, score);
                        score
                    })
                    .collect();
                k.store_shared(address, &scores);
            });
            let other = k.shuffle(ShuffleMode::Butterfly, self.maximum, 1u32);
            k.max_to(self.maximum, other);
        });
        let none = k.compare(Compare::Eq, self.maximum, f32::NEG_INFINITY);
        let shift = k.select(none, 0.0f32, self.maximum);
        let lost = k.sub(before, shift);
        let factor = k.exp2(lost);
        k.mul_to(self.sum, factor);
        self.set_factor(k, tiles, warp, factor);
        k.section("weights", |k| {
            k.for_uniform(0u32, keys, 2u32, |k, index| {
                let address = k.mad(index, WORD_BYTES, scores);
                let weights: Vec<_> = k
                    .load_shared::<F32>(address, 2)
                    .into_iter()
                    .map(|score| {
                        let below = k.sub(score, shift);
                        let weight = k.exp2(below);
                        k.add_to(self.sum, weight);
                        weight
                    })
                    .collect();
                match config.output {
                    Product::Scalar => k.store_shared(address, &weights),
                    Product::Tensor => {
                        let column = k.add(first, index);
                        let row = k.add(warp.first_row, self.row);
                        let chunk = k.shr(column, CHUNK_ELEMENTS.ilog2());
                        let chunk = tiles.weights.chunk_address(k, warp.shared_base, row, chunk);
                        let within = k.and(column, CHUNK_ELEMENTS - 1);
                        let address = k.mad(within, ELEMENT_BYTES, chunk);
                        let pair = k.pair::<T>(weights[0], weights[1]);
                        k.store_shared(address, &[pair]);
                    }
                }
            });
        });
    }

    /// The score of a key in base 2; minus infinity where the row does not attend it.
    fn score(&self, k: &mut Builder, work: &Work, product: Reg<F32>, key: Reg<S32>) -> Reg<F32> {
        let distance = self.terms.slope.map(|_| {
            let distance = k.sub(self.position, key);
            k.to_f32(distance)
        });
        let bias = self.terms.bias.map(|bias| {
            // Rows and keys behind the last read that of the last.
            let last_row = k.sub(work.row_count, 1u32);
            let row = k.min(self.query_row, last_row);
            let row = k.widen(row);
            let row = k.mad(row, bias.row_stride, bias.first);
            let last_key = k.sub(work.key_length, 1i32);
            let key = k.min(key, last_key);
            let key = k.reinterpret::<S32, U32>(key);
            let key = k.widen(key);
            let address = k.mad(key, bias.key_stride, row);
            k.load_one::<F32>(address)
        });
        let score = self.terms.score(k, product, distance, bias);
        let score = modified(k, &self.terms, self.mask.as_ref(), score, key);
        k.section("mask", |k| {
            let before = k.compare(Compare::Lt, key, self.first_key);
            let behind = k.compare(Compare::Ge, key, self.end_key);
            let masked = k.or(before, behind);
            k.select(masked, f32::NEG_INFINITY, score)
        })
    }

    /// Stores what the row is multiplied by: one lane does.
    fn set_factor(&self, k: &mut Builder, tiles: &Tiles, warp: &Warp, factor: Reg<F32>) {
        let factors = tiles.factors_of_warp(k, warp);
        let address = k.mad(self.row, WORD_BYTES, factors);
        let first = k.compare(Compare::Eq, self.member, 0u32);
        k.when(first, |k| k.store_shared(address, &[factor]));
    }

    /// Stores what rows are divided by, and their log-sum-exp.
    fn finish(&self, k: &mut Builder, work: &Work, tiles: &Tiles, warp: &Warp) {
        let other = k.shuffle(ShuffleMode::Butterfly, self.sum, 1u32);
        k.add_to(self.sum, other);
        let (maximum, factor) = match work.sink(k) {
            Some(sink) => {
                let (maximum, factor) = add_sink(k, self.maximum, self.sum, sink);
                (maximum, Some(factor))
            }
            None => (self.maximum, None),
        };
        let empty = k.compare(Compare::Eq, self.sum, 0.0f32);
        let inverse = k.reciprocal(self.sum);
        let mut inverse = k.select(empty, 0.0f32, inverse);
        if let Some(factor) = factor {
            inverse = k.mul(inverse, factor);
        }
        self.set_factor(k, tiles, warp, inverse);
        if work.specialization.has(Operand::Lse) {
            let logarithm = k.log2(self.sum);
            let base_two = k.add(maximum, logarithm);
            let natural = k.mul(base_two, LN_2);
            let exists = k.compare(Compare::Lt, self.query_row, work.row_count);
            let first = k.compare(Compare::Eq, self.member, 0u32);
            let stores = k.and(exists, first);
            let address = work.lse(k, self.query_row);
            k.when(stores, |k| k.store_one(address, natural));
        }
    }
}

/// The output of a warp's rows, in registers.
enum Output {
    Scalar(ScalarOutput),
    Tensor(Accumulator),
}

/// Two columns of all 16 rows for each lane, in each 64 columns.
struct ScalarOutput {
    /// By 64 columns: where they are, then by row.
    parts: Vec<(LaneColumns, Vec<[Reg<F32>; 2]>)>,
}

/// Two neighbouring columns of a lane.
struct LaneColumns {
    column: Reg<U32>,
    /// Their chunk within its panel, and what is added to its address.
    chunk: Reg<U32>,
    within: Reg<U32>,
}

impl ScalarOutput {
    fn zero(k: &mut Builder, warp: &Warp, values: SharedTile) -> Self {
        let parts = (0..values.columns.div_ceil(COLUMNS_AT_ONCE)).map(|part| {
            let column = k.mad(warp.lane, 2u32, part * COLUMNS_AT_ONCE);
            // Lanes behind the last columns have those of the last, and store nothing.
            let inside = k.min(column, values.columns - 2);
            let (panel, in_panel) = (k.div(inside, values.panel_columns()), k.rem(inside, values.panel_columns()));
            let (chunk, in_chunk) = (k.div(in_panel, CHUNK_ELEMENTS), k.rem(in_panel, CHUNK_ELEMENTS));
            let within = k.mul(in_chunk, ELEMENT_BYTES);
            let within = k.mad(panel, values.panel_step(1), within);
            let rows = (0..ROWS).map(|_| [k.copy(0.0f32), k.copy(0.0f32)]).collect();
            (LaneColumns { column, chunk, within }, rows)
        });
        Self { parts: parts.collect() }
    }

    fn multiply_add<T: Element>(&self, k: &mut Builder, tiles: &Tiles, warp: &Warp, stage: Reg<U32>) {
        let value = tiles.stream.value;
        let base = k.add(warp.shared_base, stage);
        let row = k.copy(0u32);
        let weights = tiles.score_row(k, warp, row);
        k.for_uniform(0u32, tiles.tile_n, WORDS_AT_ONCE, |k, first_key| {
            let weights = k.mad(first_key, WORD_BYTES, weights);
            let weights: Vec<_> = (0..ROWS)
                .map(|row| {
                    let offset = row * tiles.score_words * WORD_BYTES;
                    k.load_shared::<F32>(SharedAddress::from(weights).plus(offset as i32), WORDS_AT_ONCE)
                })
                .collect();
            for next in 0..WORDS_AT_ONCE {
                let key = k.add(first_key, next);
                for (columns, rows) in &self.parts {
                    let chunk = value.chunk_address(k, base, key, columns.chunk);
                    let address = k.add(chunk, columns.within);
                    let pair = k.load_shared::<T>(address, 1)[0];
                    let values = T::widen(k, pair);
                    for (row, weights) in rows.iter().zip(&weights) {
                        for (result, value) in row.iter().zip(values) {
                            k.fma_to(*result, weights[next as usize], value);
                        }
                    }
                }
            }
        });
    }
}

impl Output {
    /// Multiplies all rows by their factors.
    fn scale(&self, k: &mut Builder, tiles: &Tiles, warp: &Warp) {
        let factors = tiles.factors_of_warp(k, warp);
        match self {
            Self::Scalar(output) => {
                for row in 0..ROWS {
                    let offset = (row * WORD_BYTES) as i32;
                    let factor = k.load_shared::<F32>(SharedAddress::from(factors).plus(offset), 1)[0];
                    for (_, rows) in &output.parts {
                        rows[row as usize].iter().for_each(|result| k.mul_to(*result, factor));
                    }
                }
            }
            Self::Tensor(output) => {
                let first = k.mad(warp.position.group, WORD_BYTES, factors);
                let factors: Vec<_> = [0, 8]
                    .into_iter()
                    .map(|row| {
                        let offset = (row * WORD_BYTES) as i32;
                        k.load_shared::<F32>(SharedAddress::from(first).plus(offset), 1)[0]
                    })
                    .collect();
                output.scale_rows(k, &factors);
            }
        }
    }

    /// Brings the rows to the new maximum, and adds the product of weights and values.
    fn multiply_add<T: Element>(&self, k: &mut Builder, tiles: &Tiles, warp: &Warp, stage: Reg<U32>) {
        k.section("rescale", |k| self.scale(k, tiles, warp));
        match self {
            Self::Scalar(output) => output.multiply_add::<T>(k, tiles, warp, stage),
            Self::Tensor(output) => {
                let (weights, value) = (tiles.weights, tiles.stream.value);
                let (weight_base, value_base) = (warp.base_of_rows(k, weights), k.add(warp.shared_base, stage));
                let left = weights.addresses(k, weight_base, warp.lane, LaneRows::DownFirst);
                let right = value.addresses(k, value_base, warp.lane, LaneRows::DownFirst);
                let left = LeftOperand::<T>::Shared(vec![left], tiles.tile_n);
                output.multiply_add(k, &left, RightFragments::Straight(right), Accumulation::F32);
            }
        }
    }

    /// Divides the rows by their sums and stores them, two columns at a time.
    fn store<T: Element>(&self, k: &mut Builder, work: &Work, tiles: &Tiles, warp: &Warp) {
        self.scale(k, tiles, warp);
        let rows = work.output(k);
        match self {
            Self::Scalar(output) => {
                for (columns, results) in &output.parts {
                    let there = k.compare(Compare::Lt, columns.column, rows.columns);
                    for (row, pair) in (0..).zip(results) {
                        let row = k.add(warp.first_row, row);
                        store_pair::<T>(k, work, rows, (row, columns.column), *pair, Some(there));
                    }
                }
            }
            Self::Tensor(output) => {
                let column = k.mul(warp.position.member, 2u32);
                each_pair(output, |row, further, pair| {
                    if further < rows.columns {
                        let row = row * 8;
                        let row = k.add(warp.position.group, row);
                        let row = k.add(warp.first_row, row);
                        let column = k.add(column, further);
                        store_pair::<T>(k, work, rows, (row, column), pair, None);
                    }
                });
            }
        }
    }
}

/// Stores two neighbouring elements, by their row in the tile and their column, where they exist.
fn store_pair<T: Element>(
    k: &mut Builder,
    work: &Work,
    rows: GlobalRows,
    (row, column): (Reg<U32>, Reg<U32>),
    pair: [Reg<F32>; 2],
    there: Option<Reg<Pred>>,
) {
    let start = rows.row(k, row);
    let to = GlobalAddress::from(k.mad_wide(column, ELEMENT_BYTES, start));
    let query_row = k.add(work.first_row, row);
    let exists = k.compare(Compare::Lt, query_row, work.row_count);
    let exists = match there {
        Some(there) => k.and(exists, there),
        None => exists,
    };
    let rounded = k.pair::<T>(pair[0], pair[1]);
    if rows.width > ELEMENT_BYTES {
        k.when(exists, |k| k.store_one(to, rounded));
    } else {
        let (low, high) = k.unpack(rounded);
        k.when(exists, |k| {
            k.store_one(to, low);
            k.store_one(to.plus(ELEMENT_BYTES as i32), high);
        });
    }
}
