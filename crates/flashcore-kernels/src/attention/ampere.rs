//! Tensor cores from end to end, for everything from `sm_80` on.
//!
//! A CTA has one tile of query rows, 16 for each warp. The query goes through shared memory into registers once;
//! tiles of keys and values stream through a [`Ring`] of stages, copied by all threads while the tile before is
//! multiplied. For each tile a warp multiplies its query rows by the keys, masks the scores, turns them into weights
//! with the [`OnlineSoftmax`], and multiplies the weights, which never leave its registers, by the values.
//!
//! There is one barrier per tile: it says that the tile has arrived for everybody, and that everybody is done with
//! the tile before, whose place the next copy takes.

use flashcore_ir::types::{Pred, S32, U32};
use flashcore_ir::{Builder, Compare, GlobalAddress, Kernel, Reg, SharedAddress, SpecialRegister};

use super::Work;
use crate::config::{AmpereConfig, Specialisation};
use crate::element::{ELEMENT_BYTES, Element};
use crate::tile::{
    Accumulator, FragmentPosition, GlobalRows, KeyMask, LANES, LaneRows, LeftFragments, OnlineSoftmax, RESULT_COLUMNS,
    ROWS_PER_WARP, RightFragments, Ring, SharedTile, TileAddresses, TileCopy,
};

/// Writes the kernel.
pub(crate) fn kernel<T: Element>(name: String, config: AmpereConfig, specialisation: Specialisation) -> Kernel {
    let mut builder = Builder::new(name, config.threads());
    let k = &mut builder;
    k.set_register_budget(AmpereConfig::register_budget(specialisation.head_dim));
    let work = Work::new(k, config.query_rows());
    let warp = Warp::new(k);
    let tiles = Tiles::reserve(k, config, specialisation.head_dim);
    let keys = KeyRange::new(k, &work, config, specialisation.causal);

    let (query_copy, stream) = k.section("copies", |k| {
        let (query, key, value) = (work.query(k), work.key(k), work.value(k));
        let query_copy = TileCopy::new(k, tiles.query, query, warp.shared_base, warp.thread);
        (query_copy, Stream::new(k, config, &tiles, key, value, &warp))
    });
    k.section("load query", |k| {
        let rows_left = k.sub(work.parameters.query_length, work.first_row);
        query_copy.start(k, None, rows_left);
        k.copy_async_commit();
    });
    for _ in 0..stream.ring.ahead() {
        stream.load_next(k, &keys);
    }
    let query = k.section("query fragments", |k| {
        k.copy_async_wait(stream.ring.ahead());
        k.cta_sync();
        let rows = tiles.query_of_warp(k, &warp);
        LeftFragments::<T>::load(k, rows, specialisation.head_dim)
    });

    let output = k.section("output", |k| Accumulator::zero(k, specialisation.head_dim));
    let softmax = k.section("softmax", |k| OnlineSoftmax::new(k, work.parameters.scale_log2));
    let mask = k.section("mask", |k| key_mask(k, &work, &warp, specialisation.causal));
    let scores = k.section("scores", |k| Accumulator::zero(k, config.key_rows));
    k.for_uniform(0i32, keys.end, config.key_rows as i32, |k, first_key| {
        stream.ring.wait(k);
        stream.load_next(k, &keys);
        k.section("scores", |k| {
            scores.clear(k);
            let keys = RightFragments::Transposed(stream.keys.in_stage(k, stream.ring.reading()));
            scores.multiply_add(k, &query, keys);
        });
        k.section("mask", |k| {
            let partly = keys.is_partly_masked(k, first_key);
            k.if_uniform(partly, |k| mask.apply(k, &scores, first_key));
        });
        k.section("softmax", |k| softmax.update(k, &scores, &output));
        k.section("output", |k| {
            let weights = LeftFragments::<T>::round(k, &scores);
            let values = RightFragments::Straight(stream.values.in_stage(k, stream.ring.reading()));
            output.multiply_add(k, &weights, values);
        });
        stream.ring.read(k);
    });

    k.section("epilogue", |k| {
        let sums = softmax.finish(k, &output);
        if specialisation.log_sum_exp {
            let values = sums.log_sum_exp(k);
            for (half, value) in values.into_iter().enumerate() {
                let row = warp.row(k, &work, half as u32);
                let exists = k.compare(Compare::Lt, row, work.parameters.query_length);
                // The four lanes of a row have the same value; one stores it.
                let first = k.compare(Compare::Eq, warp.position.member, 0u32);
                let stores = k.and(exists, first);
                let address = work.log_sum_exp(k, row);
                k.when(stores, |k| k.store_one(address, value));
            }
        }
        store_output::<T>(k, &work, &warp, &tiles, &output);
    });
    builder.finish()
}

/// Where a thread stands.
struct Warp {
    thread: Reg<U32>,
    lane: Reg<U32>,
    /// The first of the warp's rows in the tile of the CTA.
    first_row: Reg<U32>,
    position: FragmentPosition,
    shared_base: Reg<U32>,
}

impl Warp {
    fn new(k: &mut Builder) -> Self {
        let thread = k.special(SpecialRegister::ThreadX);
        let warp = k.shr(thread, LANES.ilog2());
        let lane = k.and(thread, LANES - 1);
        let first_row = k.mul(warp, ROWS_PER_WARP);
        Self { thread, lane, first_row, position: FragmentPosition::new(k, lane), shared_base: k.shared_base() }
    }

    /// The query row that the lane's results of half 0 or 1 are in.
    fn row(&self, k: &mut Builder, work: &Work, half: u32) -> Reg<U32> {
        let within = k.add(self.first_row, self.position.group);
        let row = k.add(work.first_row, within);
        k.add(row, half * 8)
    }
}

/// The tiles in shared memory. The output goes out through the place of the query, which is in registers by then.
struct Tiles {
    query: SharedTile,
    /// Of stage 0; the others follow behind both.
    key: SharedTile,
    value: SharedTile,
    stage_bytes: u32,
}

impl Tiles {
    fn reserve(k: &mut Builder, config: AmpereConfig, head_dim: u32) -> Self {
        let query = SharedTile::reserve(k, config.query_rows(), head_dim, config.layout);
        let key = SharedTile::reserve(k, config.key_rows, head_dim, config.layout);
        let value = SharedTile::reserve(k, config.key_rows, head_dim, config.layout);
        let stage_bytes = key.bytes() + value.bytes();
        for _ in 1..config.stages {
            k.reserve_shared(stage_bytes, 128);
        }
        Self { query, key, value, stage_bytes }
    }

    /// The addresses of the warp's 16 rows of the query.
    fn query_of_warp(&self, k: &mut Builder, warp: &Warp) -> TileAddresses {
        let bytes = k.mul(warp.first_row, self.query.row_bytes());
        let base = k.add(warp.shared_base, bytes);
        self.query.addresses(k, base, warp.lane, LaneRows::DownFirst)
    }
}

/// The stream of tiles of keys and values.
struct Stream {
    ring: Ring,
    key_copy: TileCopy,
    value_copy: TileCopy,
    keys: TileAddresses,
    values: TileAddresses,
    /// The first key of the tile that is copied next.
    next_key: Reg<S32>,
    key_rows: u32,
}

impl Stream {
    fn new(
        k: &mut Builder,
        config: AmpereConfig,
        tiles: &Tiles,
        key: GlobalRows,
        value: GlobalRows,
        warp: &Warp,
    ) -> Self {
        Self {
            ring: Ring::new(k, config.stages, tiles.stage_bytes),
            key_copy: TileCopy::new(k, tiles.key, key, warp.shared_base, warp.thread),
            value_copy: TileCopy::new(k, tiles.value, value, warp.shared_base, warp.thread),
            keys: tiles.key.addresses(k, warp.shared_base, warp.lane, LaneRows::AcrossFirst),
            values: tiles.value.addresses(k, warp.shared_base, warp.lane, LaneRows::DownFirst),
            next_key: k.copy(0i32),
            key_rows: config.key_rows,
        }
    }

    /// Starts copying the next tile, if there is one.
    fn load_next(&self, k: &mut Builder, keys: &KeyRange) {
        let exists = k.compare(Compare::Lt, self.next_key, keys.end);
        k.if_uniform(exists, |k| {
            let left = k.sub(keys.length, self.next_key);
            let left = k.reinterpret(left);
            k.section("load keys", |k| {
                self.key_copy.start(k, Some(self.ring.filling()), left);
                self.key_copy.advance(k);
            });
            k.section("load values", |k| {
                self.value_copy.start(k, Some(self.ring.filling()), left);
                self.value_copy.advance(k);
            });
        });
        k.add_to(self.next_key, self.key_rows as i32);
        self.ring.filled(k);
    }
}

/// Which keys the rows of a CTA attend.
struct KeyRange {
    /// All there are.
    length: Reg<S32>,
    /// Behind the last that any row attends.
    end: Reg<S32>,
    /// Behind the last that every row attends.
    attended_by_all: Reg<S32>,
    key_rows: u32,
}

impl KeyRange {
    fn new(k: &mut Builder, work: &Work, config: AmpereConfig, causal: bool) -> Self {
        k.section("key range", |k| {
            let length = k.reinterpret(work.parameters.key_length);
            let last_row = k.add(work.first_row, config.query_rows() - 1);
            let last_that_exists = k.sub(work.parameters.query_length, 1u32);
            let last_row = k.min(last_row, last_that_exists);
            let end = work.key_limit(k, last_row, causal);
            let attended_by_all = work.key_limit(k, work.first_row, causal);
            Self { length, end, attended_by_all, key_rows: config.key_rows }
        })
    }

    /// Whether some row does not attend some key of the tile.
    fn is_partly_masked(&self, k: &mut Builder, first_key: Reg<S32>) -> Reg<Pred> {
        let end = k.add(first_key, self.key_rows as i32);
        k.compare(Compare::Gt, end, self.attended_by_all)
    }
}

/// The mask of the lane's two rows, counted from its first column.
fn key_mask(k: &mut Builder, work: &Work, warp: &Warp, causal: bool) -> KeyMask {
    let column = k.shl(warp.position.member, 1u32);
    let column = k.reinterpret::<U32, S32>(column);
    let limits = core::array::from_fn(|half| {
        let row = warp.row(k, work, half as u32);
        let limit = work.key_limit(k, row, causal);
        k.sub(limit, column)
    });
    KeyMask::new(limits)
}

/// Stores the warp's rows: through shared memory, so that lanes store 16 bytes beside each other.
fn store_output<T: Element>(k: &mut Builder, work: &Work, warp: &Warp, tiles: &Tiles, output: &Accumulator) {
    let tile = tiles.query;
    // The rows of this warp are its own, so that only its lanes wait for each other.
    k.warp_sync();
    k.section("stage output", |k| {
        let row = k.add(warp.first_row, warp.position.group);
        let within_chunk = k.mul(warp.position.member, 2 * ELEMENT_BYTES);
        for (index, elements) in output.tiles.iter().enumerate() {
            let column = index as u32 * RESULT_COLUMNS;
            let (panel, chunk) = (column / tile.panel_columns(), column % tile.panel_columns() / RESULT_COLUMNS);
            let chunk = k.copy(chunk);
            let chunk_address = tile.chunk_address(k, warp.shared_base, row, chunk);
            let address = k.add(chunk_address, within_chunk);
            for (half, pair) in elements.chunks_exact(2).enumerate() {
                let rounded = k.pair::<T>(pair[0], pair[1]);
                let below = half as u32 * 8 * tile.row_bytes() + tile.panel_step(panel);
                k.store_shared(SharedAddress::from(address).plus(below as i32), &[rounded]);
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
        for step in 0..ROWS_PER_WARP / rows_per_step {
            let row = k.add(row, step * rows_per_step);
            let source = tile.chunk_address(k, warp.shared_base, row, chunk);
            let row_wide = k.widen(row);
            let row_start = k.mad(row_wide, rows.stride, rows.first);
            let target = k.mad_wide(chunk, 16u32, row_start);
            let query_row = k.add(work.first_row, row);
            let exists = k.compare(Compare::Lt, query_row, work.parameters.query_length);
            for panel in 0..tile.panels() {
                let from = SharedAddress::from(source).plus(tile.panel_step(panel) as i32);
                let to = GlobalAddress::from(target).plus((panel * tile.panel_columns() * ELEMENT_BYTES) as i32);
                let values = k.load_shared::<U32>(from, 4);
                k.when(exists, |k| k.store(to, &values));
            }
        }
    });
}
