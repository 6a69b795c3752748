//! KV source: the address of key and value row `j`, computed here for every kernel.
//!
//! Keys and values are contiguous, strided, packed (varlen) or paged. Row `j` of a head lies `j` row strides from its first,
//! whatever strides rows, heads and batches have; of a paged cache, in the page that the page table names. Kernels with `cp.async` or plain loads take addresses from [`KvSource`], kernels with TMA take
//! coordinates from [`TmaKvSource`].

use flashcore_ir::types::{Pred, S32, U32, U64};
use flashcore_ir::{Builder, Compare, Reg, ShuffleMode};

use super::TileContext;
use crate::parameters::{Parameters, ScaleParameters};
use crate::primitives::{GlobalRows, PagedRows, TensorRows};
use crate::specialization::Specialization;
use flashcore_problem::Operand;

/// Addresses of the keys and values of one KV head of one batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KvSource {
    pub(crate) key: GlobalRows,
    pub(crate) value: GlobalRows,
    /// The scales of keys and of values of 8 bits, those there are.
    pub(crate) scales: [Option<ScaleSource>; 2],
}

/// Addresses of the scales of the keys, or values, of one KV head of one sequence: rows of one `f32`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScaleSource {
    pub(crate) rows: GlobalRows,
    /// True if rows have scales of their own; else the first is that of all.
    pub(crate) per_token: Reg<Pred>,
}

impl KvSource {
    /// The source of a tile's KV head.
    pub(crate) fn new(k: &mut Builder, context: &TileContext) -> Self {
        let Parameters {
            key,
            key_batch_stride,
            key_head_stride,
            key_row_stride,
            value,
            value_batch_stride,
            value_head_stride,
            value_row_stride,
            ..
        } = context.parameters;
        let matrix = |k: &mut Builder, tensor, batch_stride, head_stride, row_stride, columns| {
            let sequence = &context.sequence;
            let first = k.eval(context.kv_head.mul_add(head_stride, tensor));
            if context.specialization.has(Operand::PageTable) {
                let paged = PagedRows::load(k, context, batch_stride);
                return GlobalRows { paged: Some(paged), ..context.rows(first, row_stride, columns) };
            }
            let first = match sequence.cache_batch {
                Some(batch) => k.mad(batch, batch_stride, first),
                None => first,
            };
            let first = match sequence.first_key {
                Some(rows) => k.eval(rows.widen().mul_add(row_stride, first)),
                None => first,
            };
            context.rows(first, row_stride, columns)
        };
        let Specialization { head_dim, value_dim, .. } = context.specialization;
        Self {
            key: matrix(k, key, key_batch_stride, key_head_stride, key_row_stride, head_dim),
            value: matrix(k, value, value_batch_stride, value_head_stride, value_row_stride, value_dim),
            scales: [Operand::KScale, Operand::VScale].map(|scale| {
                let parameters = context.parameters.scale(scale)?;
                Some(k.section("scales", |k| ScaleSource::new(k, context, parameters)))
            }),
        }
    }

    /// The rows from a key on, loaded in vectors of at most `vec_bytes` bytes.
    pub(crate) fn starting_at(self, k: &mut Builder, first_key: Reg<S32>, vec_bytes: u32) -> Self {
        let [key, value] = [self.key, self.value].map(|rows| {
            if let Some(paged) = rows.paged {
                let first_row = k.eval(paged.first_row + first_key.unsigned());
                let paged = Some(PagedRows { first_row, ..paged });
                return GlobalRows { paged, vec_bytes: rows.vec_bytes.min(vec_bytes), ..rows };
            }
            let first = k.eval(first_key.unsigned().widen().mul_add(rows.stride, rows.first));
            GlobalRows { first, vec_bytes: rows.vec_bytes.min(vec_bytes), ..rows }
        });
        Self { key, value, ..self }
    }
}

impl ScaleSource {
    /// The source of a tile's KV head.
    fn new(k: &mut Builder, context: &TileContext, scale: ScaleParameters) -> Self {
        let ScaleParameters { first, sequence_stride, batch_stride, row_stride, key_head_stride, .. } = scale;
        let sequence = &context.sequence;
        let first = k.eval(context.kv_head.mul_add(key_head_stride, first));
        let first = k.mad(context.batch, sequence_stride, first);
        let rows = GlobalRows { vec_bytes: 4, ..context.rows(first, row_stride, 1) };
        if context.specialization.has(Operand::PageTable) {
            let paged = PagedRows::load(k, context, batch_stride);
            let per_token = k.eval(row_stride.ne(0) | batch_stride.ne(0));
            return Self { rows: GlobalRows { paged: Some(paged), ..rows }, per_token };
        }
        let first = match sequence.cache_batch {
            Some(batch) => k.mad(batch, batch_stride, first),
            None => first,
        };
        let first = match sequence.first_key {
            Some(rows) => k.eval(rows.widen().mul_add(row_stride, first)),
            None => first,
        };
        Self { rows: GlobalRows { first, ..rows }, per_token: k.eval(row_stride.ne(0)) }
    }
}

impl PagedRows {
    /// The pages of the tile's sequence.
    pub(crate) fn load(k: &mut Builder, context: &TileContext, page_stride: Reg<U64>) -> Self {
        let Parameters { page_table, table_stride, page_size, last_page, .. } = context.parameters;
        let row = context.sequence.cache_batch.unwrap_or(context.batch);
        let stride = k.widen(table_stride);
        let stride = k.mul(stride, 4u64);
        Self {
            table: k.mad(row, stride, page_table),
            page_stride,
            page_size,
            is_log2: context.specialization.pow2_pages,
            last_page,
            first_row: context.sequence.first_key.unwrap_or_else(|| k.copy(0u32)),
            may_be_none: context.specialization.append.is_some(),
        }
    }
}

/// TMA coordinates of the keys and values of one KV head of one batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TmaKvSource {
    pub(crate) head: Reg<S32>,
    pub(crate) batch: Reg<S32>,
    /// The row of key 0, unless it is row 0 of the batch.
    pub(crate) first_key: Option<Reg<S32>>,
    /// The pages of the sequence, where it has some.
    pub(crate) pages: Option<TmaPages>,
    /// The L2 policy: every tile of query rows of a head reads its keys and values again.
    pub(crate) policy: Reg<U64>,
}

/// Pages of a sequence. A KV block is copied in boxes of [`Specialization::page_box`] rows, each within a page; lane `l` of
/// the producer looks up the page of box `l`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TmaPages {
    rows: PagedRows,
    box_rows: u32,
    key_length: Reg<S32>,
}

impl TmaPages {
    fn new(k: &mut Builder, context: &TileContext) -> Self {
        let box_rows = context.specialization.page_box;
        let rows = PagedRows::load(k, context, context.parameters.key_batch_stride);
        Self { rows, box_rows, key_length: context.key_length }
    }

    /// The first key of the lane's box of the block from a key on.
    fn lane_key(&self, k: &mut Builder, first_key: Reg<S32>) -> Reg<S32> {
        let lane = k.lane();
        k.eval(lane.signed().mul_add(self.box_rows as i32, first_key))
    }

    /// Looks up the page of the lane's box of the block from a key on. Past the last key it is out of bounds, and TMA fills
    /// the box with zeros.
    pub(crate) fn look_up(&self, k: &mut Builder, first_key: Reg<S32>) -> Reg<U32> {
        k.section("page table", |k| {
            let key = self.lane_key(k, first_key);
            let exists = k.compare(Compare::Lt, key, self.key_length);
            // Only pages that the sequence has are in the table.
            let existing = k.eval(key.min(self.key_length - 1).max(0).unsigned());
            let (entry, _) = self.rows.entry(k, existing);
            let page = self.rows.page(k, entry);
            let no_page = k.add(self.rows.last_page, 1u32);
            k.select(exists, page, no_page)
        })
    }

    /// Writes `load` for each box of a block of `tile_n` keys: its first row in the block, and its TMA coordinates. `block`
    /// has the first key for a row, and `page` the page of the lane's box. All lanes of the warp take part.
    pub(crate) fn each_box(
        &self,
        k: &mut Builder,
        block: TensorRows,
        page: Reg<U32>,
        tile_n: u32,
        mut load: impl FnMut(&mut Builder, u32, TensorRows),
    ) {
        let key = self.lane_key(k, block.row);
        let key = k.reinterpret::<S32, U32>(key);
        let (_, row) = self.rows.entry(k, key);
        for (number, first) in (0..).zip((0..tile_n).step_by(self.box_rows as usize)) {
            let [row, batch] = [row, page].map(|index| {
                let index = k.shuffle(ShuffleMode::Index, index, number);
                k.reinterpret::<U32, S32>(index)
            });
            load(k, first, TensorRows { row, batch, ..block });
        }
    }
}

impl TmaKvSource {
    /// The source of a tile, given its KV head and batch.
    pub(crate) fn new(k: &mut Builder, context: &TileContext, [head, batch]: [Reg<S32>; 2], policy: Reg<U64>) -> Self {
        let sequence = &context.sequence;
        let batch = match sequence.cache_batch {
            Some(cache_batch) if context.specialization.has(Operand::KvBatchIdx) => {
                let cache_batch = k.truncate(cache_batch);
                k.reinterpret::<U32, S32>(cache_batch)
            }
            Some(_) => batch,
            None => k.copy(0i32),
        };
        let first_key = sequence.first_key.map(|first| k.reinterpret::<U32, S32>(first));
        let pages = context.specialization.has(Operand::PageTable).then(|| TmaPages::new(k, context));
        Self { head, batch, first_key, pages, policy }
    }

    /// The rows of the tensor of `map` from a key on.
    pub(crate) fn rows(self, k: &mut Builder, map: Reg<U64>, key: Reg<S32>) -> TensorRows {
        let row = self.first_key.map_or(key, |first| k.add(first, key));
        TensorRows { map, row, head: self.head, batch: self.batch, policy: Some(self.policy) }
    }
}
