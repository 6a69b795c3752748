//! Tensor cores from end to end, for everything from `sm_80` on.
//!
//! A CTA has one tile of query rows, 16 for each warp. The query goes through shared memory into registers once;
//! tiles of keys and values stream through a ring of stages, copied by all threads while the tile before is
//! multiplied. For each tile a warp multiplies its query rows by the keys, masks the scores, turns them into weights
//! with the [`OnlineSoftmax`], and multiplies the weights, which never leave its registers, by the values.
//!
//! There is one barrier per tile: it says that the tile has arrived for everybody, and that everybody is done with
//! the tile before, whose place the next copy takes.
//!
//! The choices of its [`AmpereConfig`] change who copies (`stream.rs`), which rows a tile has (`mod.rs`), how many
//! tiles a CTA takes, and whether it has all keys or a part of them (`partial.rs`).

use flashcore_ir::types::{F16x2, Pred, S32, U32};
use flashcore_ir::{Builder, Compare, GlobalAddress, Kernel, Reg, SharedAddress, SpecialRegister};
use flashcore_problem::Operand;

use super::partial::store_partials;
use super::stream::{KeyRange, MULTIPLYING_BARRIER, Stream, StreamTiles};
use super::{Place, Rows, Work};
use crate::config::{AmpereConfig, QueryPlace};
use crate::element::{ELEMENT_BYTES, Element};
use crate::parameters::{Parameters, SplitParameters, TileParameters};
use crate::specialization::Specialization;
use crate::tile::{
    Accumulator, CHUNK_BYTES, CHUNK_ELEMENTS, FragmentPosition, KeyMask, LANES, LaneRows, LeftFragments, LeftOperand,
    OnlineSoftmax, PRODUCT_DEPTH, RESULT_COLUMNS, ROWS_PER_BLOCK, RightFragments, ScorePlaces, SharedTile,
    TileAddresses, TileCopy,
};

/// Writes the kernel.
pub(crate) fn kernel<T: Element>(name: String, config: AmpereConfig, specialization: Specialization) -> Kernel {
    let mut builder = Builder::new(name, config.threads());
    let k = &mut builder;
    k.set_register_budget(config.register_budget(specialization));
    let parameters = Parameters::load(k, specialization);
    let rows = if config.pack_gqa { Rows::OfKeyHead } else { Rows::OfHead };
    let work = |k: &mut Builder, place| Work::at(k, &parameters, specialization, config.tile_m(), place, rows);
    if config.persistent > 0 {
        let parameters = TileParameters::load(k);
        let first = k.special(SpecialRegister::CtaX);
        let ctas = k.special(SpecialRegister::GridX);
        let warp = Warp::new(k, config);
        let tiles = Tiles::reserve(k, config, specialization);
        k.for_uniform(first, parameters.all, ctas, |k, number| {
            let work = work(k, Place::Turn { number, parameters });
            tile::<T>(k, config, &work, &warp, &tiles, None);
            // The next tile takes the place of this one.
            k.cta_sync();
        });
    } else {
        let num_splits = (config.num_splits > 1).then(|| SplitParameters::load(k, &parameters));
        let work = work(k, num_splits.map_or(Place::Grid, Place::GridOfSplits));
        let warp = Warp::new(k, config);
        let tiles = Tiles::reserve(k, config, specialization);
        tile::<T>(k, config, &work, &warp, &tiles, num_splits);
    }
    builder.finish()
}

/// One tile of query rows, by all warps or by those with that role.
fn tile<T: Element>(
    k: &mut Builder,
    config: AmpereConfig,
    work: &Work,
    warp: &Warp,
    tiles: &Tiles,
    num_splits: Option<SplitParameters>,
) {
    let keys = KeyRange::new(k, work, config.tile_m(), config.tile_n);
    let keys = match num_splits {
        Some(num_splits) => keys.part(k, num_splits),
        None => keys,
    };
    if config.producers == 0 {
        attend::<T>(k, config, work, warp, tiles, &keys, num_splits);
        return;
    }
    let producer = k.compare(Compare::Ge, warp.thread, config.warps * LANES);
    k.if_else_uniform(
        producer,
        |k| {
            let thread = k.sub(warp.thread, config.warps * LANES);
            let stream = k.section("copies", |k| {
                let (key, value) = (work.key(k), work.value(k));
                Stream::new(k, config.supply(), &tiles.stream, &keys, [key, value], warp.shared_base, thread)
            });
            stream.produce(k, &keys);
        },
        |k| attend::<T>(k, config, work, warp, tiles, &keys, num_splits),
    );
}

/// What the warps that multiply do.
fn attend<T: Element>(
    k: &mut Builder,
    config: AmpereConfig,
    work: &Work,
    warp: &Warp,
    tiles: &Tiles,
    keys: &KeyRange,
    num_splits: Option<SplitParameters>,
) {
    let specialization = work.specialization;
    let supply = config.supply();
    let (query_copy, stream) = k.section("copies", |k| {
        let (query, key, value) = (work.query(k), work.key(k), work.value(k));
        let query = supply.rows(query);
        let query_copy = TileCopy::new(k, tiles.query, query, warp.shared_base, warp.thread, config.warps * LANES);
        (query_copy, Stream::new(k, supply, &tiles.stream, keys, [key, value], warp.shared_base, warp.thread))
    });
    let operands = k.section("copies", |k| Operands::new(k, config, tiles, warp));
    k.section("load query", |k| {
        let rows_left = k.sub(work.row_count, work.first_row);
        query_copy.start(k, None, rows_left);
        k.copy_async_commit();
    });
    stream.start(k, keys);
    let query = k.section("query fragments", |k| {
        k.copy_async_wait(stream.groups_behind_query());
        warp.sync_all(k);
        let blocks = tiles.query_of_warp(k, warp);
        let columns = padded_columns(specialization.head_dim);
        match config.query {
            QueryPlace::Registers => LeftOperand::Registers(LeftFragments::<T>::load(k, &blocks, columns)),
            QueryPlace::Shared => LeftOperand::Shared(blocks, columns),
        }
    });

    let output = k.section("output", |k| Accumulator::zero(k, warp.blocks, padded_columns(specialization.value_dim)));
    let places = k.section("rows", |k| score_places(k, work, warp));
    let (row, rows) = (places.rows[0], places.rows.len());
    let terms = specialization.has_terms().then(|| k.section("score terms", |k| work.score_terms(k, row, rows)));
    let added = work.added_term(k, row, rows);
    let mask_expression = work.mask_expression(k, row, rows);
    let scale = if terms.is_none() { Some(work.parameters.scale_log2) } else { None };
    let softmax =
        k.section("softmax", |k| OnlineSoftmax::new(k, 2 * warp.blocks, scale, config.rescale, config.exponential));
    let mask = k.section("rows", |k| key_mask(k, work, warp, &places));
    let scores = k.section("scores", |k| Accumulator::zero(k, warp.blocks, config.keys_per_warp()));
    k.for_uniform(keys.first, keys.end, config.tile_n as i32, |k, tile_key| {
        stream.arrive(k, keys);
        let first_key = warp.first_key(k, config, tile_key);
        k.section("scores", |k| {
            scores.clear(k);
            let keys = RightFragments::Transposed(operands.keys.in_stage(k, stream.ring.reading()));
            scores.multiply_add(k, &query, keys, config.accumulation);
        });
        if let Some(terms) = &terms {
            k.section("score terms", |k| terms.apply(k, &scores, &places, first_key));
        }
        if let Some(added) = &added {
            k.section("score terms", |k| {
                let key = k.add(first_key, places.column);
                let span = work.tile_span(k, config.tile_m(), first_key, config.keys_per_warp());
                added.apply(k, &scores, key, span);
            });
        }
        k.section("mask", |k| {
            let partly = keys.is_partly_masked(k, first_key);
            k.if_uniform(partly, |k| {
                let expression = mask_expression.as_ref().map(|expression| {
                    let key = k.add(first_key, places.column);
                    expression.read_tile(k, &scores, key)
                });
                mask.apply_with(k, &scores, first_key, config.keys_per_warp(), expression);
            });
        });
        k.section("softmax", |k| softmax.update(k, &scores, &output));
        k.section("output", |k| {
            let weights = LeftOperand::<T>::Rounded(&scores);
            let values = RightFragments::Straight(operands.values.in_stage(k, stream.ring.reading()));
            output.multiply_add(k, &weights, values, config.accumulation);
        });
        stream.release(k, keys, tile_key);
    });

    let epilogue = |k: &mut Builder| {
        k.section("epilogue", |k| match num_splits {
            Some(num_splits) => store_partials(k, work, warp, num_splits, &softmax, &output),
            None => store::<T>(k, work, warp, tiles, &softmax, &output),
        });
    };
    if config.kv_split_warps > 1 {
        k.section("other keys", |k| gather(k, config, tiles, warp, &softmax, &output));
        // What is left is for the warps that have the sums of all keys.
        let has_all = k.compare(Compare::Eq, warp.key_part, 0u32);
        k.if_uniform(has_all, epilogue);
    } else {
        epilogue(k);
    }
}

/// Divides the warp's rows by their sums, and stores them and their log-sum-exp.
fn store<T: Element>(
    k: &mut Builder,
    work: &Work,
    warp: &Warp,
    tiles: &Tiles,
    softmax: &OnlineSoftmax,
    output: &Accumulator,
) {
    let sink = work.sink(k);
    let sums = softmax.finish(k, output, sink);
    if work.specialization.has(Operand::Lse) {
        let values = sums.lse(k);
        for (index, value) in values.into_iter().enumerate() {
            let row = warp.row(k, work, index as u32);
            let exists = k.compare(Compare::Lt, row, work.row_count);
            // The four lanes of a row have the same value; one stores it.
            let first = k.compare(Compare::Eq, warp.position.member, 0u32);
            let stores = k.and(exists, first);
            let address = work.lse(k, row);
            k.when(stores, |k| k.store_one(address, value));
        }
    }
    store_output::<T>(k, work, warp, tiles, output);
}

/// Columns as products go through them.
const fn padded_columns(columns: u32) -> u32 {
    columns.next_multiple_of(PRODUCT_DEPTH)
}

/// Where a thread stands.
pub(super) struct Warp {
    thread: Reg<U32>,
    lane: Reg<U32>,
    /// The first of the warp's rows in the tile of the CTA.
    first_row: Reg<U32>,
    pub(super) position: FragmentPosition,
    shared_base: Reg<U32>,
    /// Its rows, by 16.
    blocks: u32,
    /// Which part of each tile of keys is its own.
    key_part: Reg<U32>,
    /// Threads that multiply, where others do not.
    multiplying: Option<u32>,
}

impl Warp {
    fn new(k: &mut Builder, config: AmpereConfig) -> Self {
        let thread = k.special(SpecialRegister::ThreadX);
        let warp = k.shr(thread, LANES.ilog2());
        let lane = k.and(thread, LANES - 1);
        let row_warps = config.row_warps();
        let (row_warp, key_part) = match config.kv_split_warps {
            1 => (warp, k.copy(0u32)),
            _ => (k.rem(warp, row_warps), k.div(warp, row_warps)),
        };
        let first_row = k.mul(row_warp, config.rows_per_warp);
        let (position, shared_base) = (FragmentPosition::new(k, lane), k.shared_base());
        let blocks = config.rows_per_warp / ROWS_PER_BLOCK;
        let multiplying = (config.producers > 0).then_some(config.warps * LANES);
        Self { thread, lane, first_row, position, shared_base, blocks, key_part, multiplying }
    }

    /// Waits for all warps that multiply.
    fn sync_all(&self, k: &mut Builder) {
        match self.multiplying {
            None => k.cta_sync(),
            Some(threads) => k.barrier_sync(MULTIPLYING_BARRIER, threads),
        }
    }

    /// The first key of its part of the tile that begins at `first_key`.
    fn first_key(&self, k: &mut Builder, config: AmpereConfig, first_key: Reg<S32>) -> Reg<S32> {
        if config.kv_split_warps == 1 {
            return first_key;
        }
        let part = k.reinterpret::<U32, S32>(self.key_part);
        k.mad(part, config.keys_per_warp() as i32, first_key)
    }

    /// The base of shared memory, moved to its part of a tile of keys or values.
    fn base_of_part(&self, k: &mut Builder, config: AmpereConfig, tile: SharedTile) -> Reg<U32> {
        match config.kv_split_warps {
            1 => self.shared_base,
            _ => k.mad(self.key_part, config.keys_per_warp() * tile.row_bytes(), self.shared_base),
        }
    }

    /// The query row of one of the lane's rows, of which it has two in each 16.
    pub(super) fn row(&self, k: &mut Builder, work: &Work, index: u32) -> Reg<U32> {
        let within = k.add(self.first_row, self.position.group);
        let row = k.add(work.first_row, within);
        k.add(row, index * 8)
    }
}

/// The tiles in shared memory. The output goes out through the place of the query, which is in registers by then.
struct Tiles {
    query: SharedTile,
    stream: StreamTiles,
}

impl Tiles {
    fn reserve(k: &mut Builder, config: AmpereConfig, specialization: Specialization) -> Self {
        let Specialization { head_dim, value_dim, .. } = specialization;
        let [query_columns, value_columns] = [head_dim, value_dim].map(SharedTile::columns_for);
        // The output goes out through the place of the query.
        let widest = query_columns.max(value_columns);
        let query = SharedTile::reserve(k, config.tile_m(), widest, config.layout);
        let stream = StreamTiles::reserve(k, config.supply(), config.layout, specialization);
        k.reserve_shared(config.exchange_bytes(value_dim).saturating_sub(config.stages * stream.stage_bytes), 128);
        Self { query, stream }
    }

    /// The addresses of the warp's rows of the query, by 16.
    fn query_of_warp(&self, k: &mut Builder, warp: &Warp) -> Vec<TileAddresses> {
        let bytes = k.mul(warp.first_row, self.query.row_bytes());
        let base = k.add(warp.shared_base, bytes);
        let first = self.query.addresses(k, base, warp.lane, LaneRows::DownFirst);
        (0..warp.blocks).map(|block| first.rows_below(block * ROWS_PER_BLOCK)).collect()
    }
}

/// Where a warp finds its part of the tiles of keys and values, in stage 0.
struct Operands {
    keys: TileAddresses,
    values: TileAddresses,
}

impl Operands {
    fn new(k: &mut Builder, config: AmpereConfig, tiles: &Tiles, warp: &Warp) -> Self {
        let StreamTiles { key, value, .. } = tiles.stream;
        let [key_base, value_base] = [key, value].map(|tile| warp.base_of_part(k, config, tile));
        Self {
            keys: key.addresses(k, key_base, warp.lane, LaneRows::AcrossFirst),
            values: value.addresses(k, value_base, warp.lane, LaneRows::DownFirst),
        }
    }
}

/// Brings together, in the first warp of each rows, what the warps of the same rows have for their keys.
fn gather(
    k: &mut Builder,
    config: AmpereConfig,
    tiles: &Tiles,
    warp: &Warp,
    softmax: &OnlineSoftmax,
    output: &Accumulator,
) {
    let (row_warps, bytes) = (config.row_warps(), softmax.sent_bytes(output));
    // Through the place of keys and values, once nobody reads them any more.
    let place = k.add(warp.shared_base, tiles.stream.key.offset);
    let lane = k.mad(warp.lane, 4u32, place);
    let row_warp = k.div(warp.first_row, config.rows_per_warp);
    let of_rows = k.mad(row_warp, bytes, lane);
    warp.sync_all(k);
    let sends = k.compare(Compare::Gt, warp.key_part, 0u32);
    k.if_uniform(sends, |k| {
        let before = k.sub(warp.key_part, 1u32);
        let address = k.mad(before, row_warps * bytes, of_rows);
        softmax.send(k, output, address);
    });
    warp.sync_all(k);
    let receives = k.compare(Compare::Eq, warp.key_part, 0u32);
    k.if_uniform(receives, |k| {
        for part in 1..config.kv_split_warps {
            let address = k.add(of_rows, (part - 1) * row_warps * bytes);
            softmax.receive(k, output, address);
        }
    });
}

/// Where the scores of a lane stand.
fn score_places(k: &mut Builder, work: &Work, warp: &Warp) -> ScorePlaces {
    let column = k.shl(warp.position.member, 1u32);
    let column = k.reinterpret::<U32, S32>(column);
    let last_row = k.sub(work.row_count, 1u32);
    let rows: Vec<_> = (0..2 * warp.blocks).map(|index| warp.row(k, work, index)).collect();
    let position = work.position(k, rows[0]);
    let rows = rows.into_iter().map(|row| k.min(row, last_row)).collect();
    let last_key = k.sub(work.key_length, 1i32);
    ScorePlaces { rows, position, column, last_key }
}

/// Which keys the rows of a lane attend.
fn key_mask(k: &mut Builder, work: &Work, warp: &Warp, places: &ScorePlaces) -> KeyMask {
    let Work { parameters, specialization, key_length, .. } = *work;
    let (left, right) = (specialization.left, specialization.right);
    // Rows of several heads in turn are not as far apart as they are in the tile.
    let others = if work.packed.is_some() && (left || right) { 1..places.rows.len() as u32 } else { 1..1 };
    let others = others.map(|index| {
        let row = warp.row(k, work, index);
        work.position(k, row)
    });
    KeyMask {
        position: places.position,
        others: others.collect(),
        column: places.column,
        left: left.then_some(parameters.window_left),
        right: right.then_some(parameters.window_right),
        key_length,
        rows: places.rows.len() as u32,
    }
}

/// Stores the warp's rows: through shared memory, so that lanes store 16 bytes beside each other.
fn store_output<T: Element>(k: &mut Builder, work: &Work, warp: &Warp, tiles: &Tiles, output: &Accumulator) {
    let tile = tiles.query;
    // The rows of this warp are its own, so that only its lanes wait for each other.
    k.warp_sync();
    k.section("stage output", |k| {
        let row = k.add(warp.first_row, warp.position.group);
        let within_chunk = k.mul(warp.position.member, 2 * ELEMENT_BYTES);
        let columns = output.blocks.first().map_or(0, Vec::len) as u32 * RESULT_COLUMNS;
        for column in (0..columns).step_by(RESULT_COLUMNS as usize) {
            let (panel, chunk) = (column / tile.panel_columns(), column % tile.panel_columns() / RESULT_COLUMNS);
            let chunk = k.copy(chunk);
            let chunk_address = tile.chunk_address(k, warp.shared_base, row, chunk);
            let address = k.add(chunk_address, within_chunk);
            for (block, tiles) in output.blocks.iter().enumerate() {
                for (half, pair) in tiles[(column / RESULT_COLUMNS) as usize].chunks_exact(2).enumerate() {
                    let rounded = k.pair::<T>(pair[0], pair[1]);
                    let rows_below = block as u32 * ROWS_PER_BLOCK + half as u32 * 8;
                    let below = rows_below * tile.row_bytes() + tile.panel_step(panel);
                    k.store_shared(SharedAddress::from(address).plus(below as i32), &[rounded]);
                }
            }
        }
    });
    k.warp_sync();
    k.section("store output", |k| {
        let rows = work.output(k);
        let chunks = tile.panel_chunks();
        let rows_per_step = LANES / chunks;
        let lane_row = k.shr(warp.lane, chunks.ilog2());
        let chunk = k.and(warp.lane, chunks - 1);
        let row = k.add(warp.first_row, lane_row);
        for step in 0..warp.blocks * ROWS_PER_BLOCK / rows_per_step {
            let row = k.add(row, step * rows_per_step);
            let source = tile.chunk_address(k, warp.shared_base, row, chunk);
            let row_start = rows.row(k, row);
            let target = k.mad_wide(chunk, CHUNK_BYTES, row_start);
            let query_row = k.add(work.first_row, row);
            let exists = k.compare(Compare::Lt, query_row, work.row_count);
            for first in (0..rows.columns).step_by(tile.panel_columns() as usize) {
                let panel = first / tile.panel_columns();
                let chunks_there = (rows.columns - first) / CHUNK_ELEMENTS;
                let (exists, source) = if chunks_there < chunks {
                    // Lanes without a chunk read that of another, which is there.
                    let there = k.compare(Compare::Lt, chunk, chunks_there);
                    let nearest = k.min(chunk, chunks_there - 1);
                    (k.and(there, exists), tile.chunk_address(k, warp.shared_base, row, nearest))
                } else {
                    (exists, source)
                };
                let from = SharedAddress::from(source).plus(tile.panel_step(panel) as i32);
                let to = GlobalAddress::from(target).plus((first * ELEMENT_BYTES) as i32);
                let words = k.load_shared::<U32>(from, 4);
                store_chunk(k, to, &words, rows.width, exists);
            }
        }
    });
}

/// Stores 16 bytes, `width` at a time, where they exist.
fn store_chunk(k: &mut Builder, to: GlobalAddress, words: &[Reg<U32>], width: u32, exists: Reg<Pred>) {
    if width == ELEMENT_BYTES {
        for (index, word) in words.iter().enumerate() {
            let pair = k.reinterpret::<U32, F16x2>(*word);
            let (low, high) = k.unpack(pair);
            let to = to.plus((index as u32 * 2 * ELEMENT_BYTES) as i32);
            k.when(exists, |k| {
                k.store_one(to, low);
                k.store_one(to.plus(ELEMENT_BYTES as i32), high);
            });
        }
        return;
    }
    k.when(exists, |k| {
        for (index, words) in words.chunks_exact((width / 4) as usize).enumerate() {
            k.store(to.plus((index as u32 * width) as i32), words);
        }
    });
}
