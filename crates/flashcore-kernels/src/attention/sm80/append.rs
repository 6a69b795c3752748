//! Append inside of the attention launch: new keys and values are attended and written to the cache by the same kernel,
//! with the rotary embedding (`RoPE`) of query and new keys on the way.
//!
//! Every CTA takes new rows from the tensors of new keys and values, never from the cache, so that none depends on what
//! another writes: no fence, no order. A CTA whose keys include new ones rotates them once, before its accumulators are
//! live, into shared memory of their own; the blocks of keys that have new rows take them from there after the copies from
//! the cache have arrived. That costs such a block one barrier, and no registers in the mainloop.
//!
//! One CTA for each sequence and KV head writes the rows to the cache: that of the last split or chunk of the first tile
//! of the first query head. Rows that no query row attends are written too.

use flashcore_ir::types::{Pred, S32, U32, U64};
use flashcore_ir::{Builder, Compare, Reg, SharedAddress, SpecialRegister};
use flashcore_problem::Operand;

use super::{Split, Tiles, Warp};
use crate::attention::TileContext;
use crate::attention::kv_range::KvRange;
use crate::attention::kv_source::KvSource;
use crate::attention::tile_coord::NewKeys;
use crate::cache::rotary_rows::{Item, TableRow};
use crate::cache::spec::RowShape;
use crate::cache::{FusedAppend, FusedParameters, MAX_NEW_KEYS};
use crate::config::AmpereConfig;
use crate::element::ElementLayout;
use crate::parameters::SplitParameters;
use crate::primitives::{CHUNK_BYTES, GlobalRows, LANES, SharedTile, VectorBits};
use crate::specialization::Specialization;

/// Steps of query rows whose loads are in flight together: more take registers of which large tiles have none to spare.
const QUERY_STEPS_IN_FLIGHT: u32 = 2;

/// True for the first tile of the first query head of a KV head.
pub(super) fn is_first_tile(k: &mut Builder, context: &TileContext) -> Reg<Pred> {
    let is_first_row = k.compare(Compare::Eq, context.first_row, 0u32);
    if context.packed.is_some() {
        return is_first_row;
    }
    let group = k.widen(context.parameters.heads_per_key_head);
    let first_head = k.mul(context.kv_head, group);
    let is_first_head = k.compare(Compare::Eq, context.head, first_head);
    k.and(is_first_row, is_first_head)
}

/// True for the last split of the keys, by the grid, the cluster or the chunks.
fn is_last_split(k: &mut Builder, splits: Option<Split>) -> Option<Reg<Pred>> {
    let (index, count) = match splits? {
        Split::Cta(SplitParameters { num_splits, .. }) | Split::Cluster { num_splits, .. } => {
            let cta = k.special(SpecialRegister::CtaX);
            (k.rem(cta, num_splits), num_splits)
        }
        Split::Chunk { index, count, .. } => (index, count),
    };
    Some(k.eval((index + 1).eq(count)))
}

/// Shared memory of the new keys and values of one KV head, rotated.
#[derive(Debug, Clone, Copy)]
pub(super) struct NewRowTiles {
    key: RowBuffer,
    value: RowBuffer,
}

/// Rows in shared memory, one after the other.
#[derive(Debug, Clone, Copy)]
struct RowBuffer {
    offset: u32,
    row_bytes: u32,
}

impl NewRowTiles {
    pub(super) fn reserve(k: &mut Builder, specialization: Specialization) -> Self {
        let element = ElementLayout::of(specialization.dtype).bytes;
        let [key, value] = [specialization.head_dim, specialization.value_dim].map(|columns| {
            let row_bytes = columns * element;
            RowBuffer { offset: k.reserve_shared(MAX_NEW_KEYS * row_bytes, CHUNK_BYTES), row_bytes }
        });
        Self { key, value }
    }
}

/// The new rows of a tile, and the rotation of its query.
pub(super) struct FusedRows<'a> {
    config: AmpereConfig,
    context: &'a TileContext,
    warp: &'a Warp,
    tiles: &'a Tiles,
    buffers: NewRowTiles,
    range: &'a KvRange,
    spec: FusedAppend,
    parameters: FusedParameters,
    new_keys: NewKeys,
    /// True if this CTA writes the rows to the cache.
    writes: Reg<Pred>,
    /// True if this CTA needs the new rows: to attend them or to write them.
    needs_rows: Reg<Pred>,
    /// The position of new key 0 and query row 0, within the tables.
    start: Option<Reg<U32>>,
}

/// Rows that were asked for: the first of the query, of the new keys and of the new values.
pub(super) struct LoadedRows {
    query: Vec<LaneVectors>,
    new: [(NewSource, LaneVectors); 2],
}

/// New keys or values of a KV head, and where they go.
#[derive(Debug, Clone, Copy)]
struct NewSource {
    threads: RowThreads,
    /// True if this thread is one of them, and their rows are needed.
    is_loaded: Reg<Pred>,
    shape: RowShape,
    /// The address of the first.
    first: Reg<U64>,
    row_stride: Reg<U64>,
    cache: GlobalRows,
    buffer: RowBuffer,
}

/// The vectors of a lane of one row.
struct LaneVectors {
    /// The index among the rows.
    row: Reg<U32>,
    /// True if the lane has the row.
    exists: Reg<Pred>,
    items: Vec<Item>,
    bits: Vec<[VectorBits; 2]>,
    /// The tables at the position of the row, with cosines and sines of each item.
    tables: Option<(TableRow, Vec<[VectorBits; 2]>)>,
    /// The address in the cache, and true if it is written there.
    target: Option<(Reg<U64>, Reg<Pred>)>,
}

/// Threads that have rows in turn.
#[derive(Debug, Clone, Copy)]
struct RowThreads {
    /// The index of this thread among them.
    index: Reg<U32>,
    count: u32,
}

impl<'a> FusedRows<'a> {
    /// The rows of a tile, where the launch appends.
    pub(super) fn new(
        k: &mut Builder,
        config: AmpereConfig,
        context: &'a TileContext,
        warp: &'a Warp,
        tiles: &'a Tiles,
        range: &'a KvRange,
        splits: Option<Split>,
    ) -> Option<Self> {
        let (spec, parameters) = (context.specialization.append?, context.parameters.append?);
        let (buffers, new_keys) = (tiles.new_rows?, context.sequence.new_keys?);
        Some(k.section("new keys", |k| {
            let writes = k.section("writer", |k| {
                let is_first = is_first_tile(k, context);
                is_last_split(k, splits).map_or(is_first, |is_last| k.and(is_first, is_last))
            });
            let attends = k.compare(Compare::Gt, range.end, new_keys.first_key);
            let some = k.compare(Compare::Gt, new_keys.count, 0u32);
            let needs_rows = k.eval(writes | attends);
            let needs_rows = k.and(needs_rows, some);
            let start = spec.rotary.map(|_| {
                let start = if spec.rotary_seqlens {
                    let address = k.mad(context.batch, 4u64, parameters.rotary_seqlens);
                    k.load_one::<U32>(address)
                } else {
                    new_keys.cache_seqlen
                };
                k.min(start, parameters.last_position)
            });
            Self { config, context, warp, tiles, buffers, range, spec, parameters, new_keys, writes, needs_rows, start }
        }))
    }

    /// True if the query is rotated on its way to shared memory.
    pub(super) const fn rotates_query(&self) -> bool {
        self.spec.rotary.is_some()
    }

    const fn threads(&self) -> u32 {
        self.config.warps * LANES
    }

    fn key_rows(&self) -> RowShape {
        self.spec.key_rows(self.context.specialization.dtype, self.context.specialization.head_dim)
    }

    fn value_rows(&self) -> RowShape {
        self.spec.value_rows(self.context.specialization.dtype, self.context.specialization.value_dim)
    }

    /// Asks for the first query rows, new keys and new values, and waits for none of them. Half of the threads have keys,
    /// the others values.
    pub(super) fn load(&self, k: &mut Builder) -> LoadedRows {
        let half = self.threads() / 2;
        let query = if self.rotates_query() {
            let steps = self.query_steps().min(QUERY_STEPS_IN_FLIGHT);
            k.section("load query", |k| (0..steps).map(|step| self.load_query(k, step)).collect())
        } else {
            Vec::new()
        };
        let cache = KvSource::new(k, self.context);
        let new = k.section("new keys", |k| {
            let p = self.parameters;
            let is_key = k.compare(Compare::Lt, self.warp.thread, half);
            let is_value = k.compare(Compare::Ge, self.warp.thread, half);
            let key_threads = RowThreads { index: self.warp.thread, count: half };
            let value_threads = RowThreads { index: k.sub(self.warp.thread, half), count: self.threads() - half };
            let key_strides = [p.new_key_batch_stride, p.new_key_row_stride, p.new_key_head_stride];
            let value_strides = [p.new_value_batch_stride, p.new_value_row_stride, p.new_value_head_stride];
            let key = NewSource {
                threads: key_threads,
                is_loaded: k.and(self.needs_rows, is_key),
                shape: self.key_rows(),
                first: self.first_new_row(k, p.new_key, key_strides),
                row_stride: p.new_key_row_stride,
                cache: cache.key,
                buffer: self.buffers.key,
            };
            let value = NewSource {
                threads: value_threads,
                is_loaded: k.and(self.needs_rows, is_value),
                shape: self.value_rows(),
                first: self.first_new_row(k, p.new_value, value_strides),
                row_stride: p.new_value_row_stride,
                cache: cache.value,
                buffer: self.buffers.value,
            };
            [key, value].map(|source| (source, self.load_new(k, &source, 0)))
        });
        LoadedRows { query, new }
    }

    /// Steps in which all threads have all query rows of the tile.
    fn query_steps(&self) -> u32 {
        self.query_threads().steps(self.key_rows(), self.config.tile_m())
    }

    fn query_threads(&self) -> RowThreads {
        RowThreads { index: self.warp.thread, count: self.threads() }
    }

    /// The address of the first new row of the sequence and KV head.
    fn first_new_row(
        &self,
        k: &mut Builder,
        tensor: Reg<U64>,
        [batch_stride, row_stride, head_stride]: [Reg<U64>; 3],
    ) -> Reg<U64> {
        let first = match self.new_keys.first_row {
            Some(first) => k.eval(first.widen().mul_add(row_stride, tensor)),
            None => k.mad(self.context.batch, batch_stride, tensor),
        };
        k.mad(self.context.kv_head, head_stride, first)
    }

    /// The position of a row so many after the first, within the tables.
    fn position(&self, k: &mut Builder, start: Reg<U32>, row: Option<Reg<U32>>) -> Reg<S32> {
        let last = self.parameters.last_position;
        let position = row.map_or(start, |row| k.eval((start + row.min(last)).min(last)));
        k.reinterpret(position)
    }

    /// The tables of a row, where it is rotated.
    fn tables(
        &self,
        k: &mut Builder,
        shape: RowShape,
        items: &[Item],
        row: Option<Reg<U32>>,
    ) -> Option<(TableRow, Vec<[VectorBits; 2]>)> {
        let (rotary, start) = (shape.rotary?, self.start?);
        let position = self.position(k, start, row);
        let row = TableRow::new(k, shape, rotary, self.parameters.tables(), position);
        let loaded = items.iter().map(|item| row.load(k, item)).collect();
        Some((row, loaded))
    }

    fn load_query(&self, k: &mut Builder, step: u32) -> LaneVectors {
        let (shape, tile_m, context) = (self.key_rows(), self.config.tile_m(), self.context);
        let threads = self.query_threads();
        let query = context.query(k);
        let (row, items) = threads.row(k, shape, step);
        let rows_left = k.eval(context.end_row.max(context.first_row) - context.first_row);
        let mut exists = k.compare(Compare::Lt, row, rows_left);
        if threads.overhangs(shape, tile_m) {
            let inside = k.compare(Compare::Lt, row, tile_m);
            exists = k.and(exists, inside);
        }
        let source = query.row(k, row);
        let bits = load_items(k, shape, &items, exists, source);
        let tables = k.section("positions", |k| {
            let index = self.spec.consecutive.then(|| {
                let row = k.add(row, context.first_row);
                context.packed.map_or(row, |group| k.div(row, group))
            });
            self.tables(k, shape, &items, index)
        });
        LaneVectors { row, exists, items, bits, tables, target: None }
    }

    fn load_new(&self, k: &mut Builder, source: &NewSource, step: u32) -> LaneVectors {
        let NewSource { threads, is_loaded, shape, first, row_stride, cache, .. } = *source;
        let (row, items) = threads.row(k, shape, step);
        let exists = k.compare(Compare::Lt, row, self.new_keys.count);
        let exists = k.and(exists, is_loaded);
        let address = k.eval(row.widen().mul_add(row_stride, first));
        let bits = load_items(k, shape, &items, exists, address);
        let tables = self.tables(k, shape, &items, Some(row));
        let target = Some(k.section("cache row", |k| self.cache_row(k, row, exists, cache)));
        LaneVectors { row, exists, items, bits, tables, target }
    }

    /// The address of the row of the cache that a new key goes to, and true if it is written: one past the bound, on a
    /// page or in a batch that the cache does not have is not.
    fn cache_row(&self, k: &mut Builder, row: Reg<U32>, exists: Reg<Pred>, cache: GlobalRows) -> (Reg<U64>, Reg<Pred>) {
        let (context, parameters, new_keys) = (self.context, self.context.parameters, self.new_keys);
        let room = k.sub(self.parameters.cache_length, new_keys.cached);
        let has_room = k.compare(Compare::Lt, row, room);
        let mut is_written = k.and(exists, self.writes);
        is_written = k.and(is_written, has_room);
        if context.specialization.has(Operand::KvBatchIdx) {
            let address = k.mad(context.batch, 4u64, parameters.kv_batch_idx);
            let index = k.load_one::<U32>(address);
            let is_batch = k.compare(Compare::Le, index, parameters.last_cache_batch);
            is_written = k.and(is_written, is_batch);
        }
        let cache_row = k.add(new_keys.cached, row);
        let Some(paged) = cache.paged else {
            // The rows of a KV source begin after the padding.
            let unpadded = match context.sequence.first_key {
                Some(padding) => k.sub(cache_row, padding),
                None => cache_row,
            };
            let unpadded = k.reinterpret::<U32, S32>(unpadded);
            let unpadded = k.widen_signed(unpadded);
            let unpadded = k.reinterpret(unpadded);
            return (k.mad(unpadded, cache.stride, cache.first), is_written);
        };
        let (entry, row_in_page) = paged.entry(k, cache_row);
        let address = k.mad_wide(entry, 4u32, paged.table);
        let page = k.copy(0u32);
        k.when(is_written, |k| k.load_into(page, address));
        // As an unsigned number, a negative page is past every cache.
        let is_page = k.compare(Compare::Le, page, paged.last_page);
        is_written = k.and(is_written, is_page);
        let page = k.widen(page);
        let address = k.eval(row_in_page.widen().mul_add(cache.stride, page.mul_add(paged.page_stride, cache.first)));
        (address, is_written)
    }

    /// Rotates what was loaded and the rest, and stores it to shared memory; new rows also to the cache. Everybody sees it
    /// after the next barrier.
    pub(super) fn store(&self, k: &mut Builder, loaded: LoadedRows) {
        let LoadedRows { query, new } = loaded;
        if self.rotates_query() {
            k.section("load query", |k| {
                for vectors in query {
                    self.store_query(k, vectors);
                }
                for step in QUERY_STEPS_IN_FLIGHT..self.query_steps() {
                    let vectors = self.load_query(k, step);
                    self.store_query(k, vectors);
                }
                self.clear_query_padding(k);
            });
        }
        k.section("new keys", |k| {
            k.if_uniform(self.needs_rows, |k| {
                for (source, vectors) in new {
                    self.store_new(k, &source, vectors);
                    let rows_per_step = source.threads.rows_per_step(source.shape);
                    for step in 1..source.threads.steps(source.shape, MAX_NEW_KEYS) {
                        // Most sequences have one new key.
                        let exists = k.compare(Compare::Gt, self.new_keys.count, step * rows_per_step);
                        k.if_uniform(exists, |k| {
                            let vectors = self.load_new(k, &source, step);
                            self.store_new(k, &source, vectors);
                        });
                    }
                }
            });
        });
    }

    fn store_query(&self, k: &mut Builder, vectors: LaneVectors) {
        let (shape, tile, tile_m) = (self.key_rows(), self.tiles.query, self.config.tile_m());
        let row = vectors.row;
        let overhangs = self.query_threads().overhangs(shape, tile_m);
        let inside = overhangs.then(|| k.compare(Compare::Lt, row, tile_m));
        vectors.transformed(k, shape, |k, column, exists, bits| {
            let address = tile_address(k, tile, self.warp.shared_base, row, column, shape.vector.elements);
            let exists = both(k, inside, exists);
            store_shared_where(k, exists, address, bits);
        });
    }

    /// Clears the columns of the query that products have and the tensor has not.
    fn clear_query_padding(&self, k: &mut Builder) {
        let (tile, tile_m) = (self.tiles.query, self.config.tile_m());
        let (head_dim, element) = (self.context.specialization.head_dim, tile.element);
        for chunk in (head_dim..element.padded_columns(head_dim)).step_by(element.chunk_elements() as usize) {
            let column = k.copy(chunk);
            for first in (0..tile_m).step_by(self.threads() as usize) {
                let row = k.add(self.warp.thread, first);
                let inside = (first + self.threads() > tile_m).then(|| k.compare(Compare::Lt, row, tile_m));
                let address = tile_address(k, tile, self.warp.shared_base, row, column, element.chunk_elements());
                let zeros = VectorBits::Words((0..CHUNK_BYTES / 4).map(|_| k.copy(0u32)).collect());
                store_shared_where(k, inside, address, &zeros);
            }
        }
    }

    fn store_new(&self, k: &mut Builder, source: &NewSource, vectors: LaneVectors) {
        let NewSource { shape, buffer, .. } = *source;
        let element = shape.vector.dtype.size_bytes() as u32;
        let (row, row_exists, target) = (vectors.row, vectors.exists, vectors.target);
        let base = k.eval(self.warp.shared_base + row.mul_add(buffer.row_bytes, buffer.offset));
        vectors.transformed(k, shape, |k, column, exists, bits| {
            let kept = both(k, Some(row_exists), exists);
            let address = k.mad(column, element, base);
            store_shared_where(k, kept, address.into(), bits);
            if let Some((target, is_written)) = target {
                let address = k.mad_wide(column, element, target);
                if let Some(is_written) = both(k, Some(is_written), exists) {
                    k.when(is_written, |k| shape.vector.store(k, address, bits));
                }
            }
        });
    }

    /// Fills the new rows of the block from `block_key` on, whose other rows have arrived for everybody.
    pub(super) fn fill_block(&self, k: &mut Builder, stage: Reg<U32>, block_key: Reg<S32>) {
        let new_keys = self.new_keys;
        k.section("fill block", |k| {
            // Rows of the last block that no row of the tile attends are masked, and need not be there.
            let has_new = k.eval((block_key + self.config.tile_n as i32).gt(new_keys.first_key));
            let has_new = k.and(has_new, self.needs_rows);
            k.if_uniform(has_new, |k| {
                let base = k.add(self.warp.shared_base, stage);
                let kv = &self.tiles.kv;
                self.fill_tile(k, (kv.key, base), self.buffers.key, block_key, None);
                self.fill_tile(k, (kv.value, base), self.buffers.value, block_key, self.range.batch_begin);
                self.warp.sync_consumers(k);
            });
        });
    }

    /// Copies the new rows of a block to its tile. Those before `begin` stay zero: no row of the batch attends them.
    fn fill_tile(
        &self,
        k: &mut Builder,
        (tile, base): (SharedTile, Reg<U32>),
        buffer: RowBuffer,
        block_key: Reg<S32>,
        begin: Option<Reg<S32>>,
    ) {
        let chunks = buffer.row_bytes / CHUNK_BYTES;
        let lanes = chunks.next_power_of_two();
        let rows_per_step = self.threads() / lanes;
        let chunk = k.and(self.warp.thread, lanes - 1);
        let thread_row = k.shr(self.warp.thread, lanes.ilog2());
        for first in (0..MAX_NEW_KEYS).step_by(rows_per_step as usize) {
            let new_row = k.add(thread_row, first);
            let key = k.eval(new_row.signed() + self.new_keys.first_key);
            let row = k.eval((key - block_key).unsigned());
            let mut exists =
                k.eval(new_row.lt(self.new_keys.count) & key.lt(self.range.key_length) & row.lt(tile.rows));
            if lanes > chunks {
                let is_chunk = k.compare(Compare::Lt, chunk, chunks);
                exists = k.and(exists, is_chunk);
            }
            if let Some(begin) = begin {
                let is_attended = k.compare(Compare::Ge, key, begin);
                exists = k.and(exists, is_attended);
            }
            k.if_then(exists, |k| {
                let from = k.eval(
                    self.warp.shared_base
                        + chunk.mul_add(CHUNK_BYTES, new_row.mul_add(buffer.row_bytes, buffer.offset)),
                );
                let words = k.load_shared::<U32>(from, CHUNK_BYTES / 4);
                let column = k.mul(chunk, tile.element.chunk_elements());
                let to = tile_address(k, tile, base, row, column, tile.element.chunk_elements());
                k.store_shared(to, &words);
            });
        }
    }
}

impl RowThreads {
    /// Rows that the threads have at a time.
    const fn rows_per_step(self, shape: RowShape) -> u32 {
        self.count / shape.lanes
    }

    /// Steps in which the threads have all of `rows`.
    const fn steps(self, shape: RowShape, rows: u32) -> u32 {
        rows.div_ceil(self.rows_per_step(shape))
    }

    /// True if threads have rows past the last of `rows`.
    const fn overhangs(self, shape: RowShape, rows: u32) -> bool {
        !rows.is_multiple_of(self.rows_per_step(shape))
    }

    /// The row of this thread in a step, and its items.
    fn row(self, k: &mut Builder, shape: RowShape, step: u32) -> (Reg<U32>, Vec<Item>) {
        let lane_in_row = k.and(self.index, shape.lanes - 1);
        let first = k.shr(self.index, shape.lanes.ilog2());
        let row = k.add(first, step * self.rows_per_step(shape));
        let items = 0..shape.items.div_ceil(shape.lanes);
        (row, items.map(|step| Item::new(k, shape, lane_in_row, step)).collect())
    }
}

/// Loads the vectors of a row that exist, and zeros for the others.
fn load_items(
    k: &mut Builder,
    shape: RowShape,
    items: &[Item],
    row_exists: Reg<Pred>,
    source: Reg<U64>,
) -> Vec<[VectorBits; 2]> {
    let element = shape.vector.dtype.size_bytes() as u32;
    let vectors = items.iter().map(|item| {
        [0, 1].map(|side| {
            let exists = item.exists[side].map_or(row_exists, |exists| k.and(row_exists, exists));
            let address = k.mad_wide(item.columns[side], element, source);
            shape.vector.load_where(k, exists, address)
        })
    });
    vectors.collect()
}

impl LaneVectors {
    /// Rotates and rounds the vectors as the append kernel does, and hands each to `store`: its first column, and true if
    /// it is there, where it is not always.
    fn transformed(
        self,
        k: &mut Builder,
        shape: RowShape,
        mut store: impl FnMut(&mut Builder, Reg<U32>, Option<Reg<Pred>>, &VectorBits),
    ) {
        let Self { items, bits, tables, .. } = self;
        for (number, (item, mut vectors)) in items.iter().zip(bits).enumerate() {
            if let (Some((row, loaded)), Some(rotary)) = (&tables, shape.rotary) {
                let [first, second] = &vectors;
                let mut values = [shape.vector.widen(k, first), shape.vector.widen(k, second)];
                row.rotate_loaded(k, rotary.style, item, &mut values, &loaded[number]);
                vectors = values.map(|values| shape.vector.round(k, &values));
            }
            for ((column, exists), bits) in item.columns.into_iter().zip(item.exists).zip(&vectors) {
                store(k, column, exists, bits);
            }
        }
    }
}

/// The address of a row and column of a tile; columns are multiples of `elements`.
fn tile_address(
    k: &mut Builder,
    tile: SharedTile,
    base: Reg<U32>,
    row: Reg<U32>,
    column: Reg<U32>,
    elements: u32,
) -> SharedAddress {
    let per_chunk = tile.element.chunk_elements();
    let chunk = k.shr(column, per_chunk.ilog2());
    let in_panel = k.and(chunk, tile.panel_chunks() - 1);
    let mut address = tile.chunk_address(k, base, row, in_panel);
    if tile.panels() > 1 {
        let panel = k.shr(chunk, tile.panel_chunks().ilog2());
        address = k.mad(panel, tile.panel_step(1), address);
    }
    if elements < per_chunk {
        let in_chunk = k.and(column, per_chunk - 1);
        address = k.mad(in_chunk, tile.element.bytes, address);
    }
    address.into()
}

/// Stores a vector to shared memory, where it exists.
fn store_shared_where(k: &mut Builder, exists: Option<Reg<Pred>>, address: SharedAddress, bits: &VectorBits) {
    let store = |k: &mut Builder| match bits {
        VectorBits::Words(words) => k.store_shared(address, words),
        VectorBits::Halves(halves) => {
            for (number, &half) in halves.iter().enumerate() {
                k.store_shared(address.plus(2 * number as i32), &[half]);
            }
        }
    };
    match exists {
        Some(exists) => k.when(exists, store),
        None => store(k),
    }
}

/// Both conditions, where there are any.
fn both(k: &mut Builder, first: Option<Reg<Pred>>, second: Option<Reg<Pred>>) -> Option<Reg<Pred>> {
    match (first, second) {
        (Some(first), Some(second)) => Some(k.and(first, second)),
        (one, None) | (None, one) => one,
    }
}
