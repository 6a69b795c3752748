//! Scales of query, key and value of 8-bit floats.
//!
//! Scales of query and key multiply scores. They are folded into the softmax scale of a row, unless something else is done
//! to scores first. That of the value multiplies the output in the epilogue. Strides come with each launch, so a kernel
//! with scales has code for those of each token too, which a warp branches around: keys multiply columns of scores, and
//! values columns of weights, of which the largest in a row is then 2^8 again, and the product is added in that unit.

use flashcore_ir::types::{F32, Pred, S32, U32, U64};
use flashcore_ir::{Builder, Compare, Reg};
use flashcore_problem::Operand;

use super::mainloop::LANE_ROWS;
use super::pv::{BlockKeys, TileRows};
use crate::attention::TileContext;
use crate::parameters::ScaleParameters;
use crate::primitives::{Accumulator, MMA_N, OnlineSoftmax, PagedRows, ScorePositions};
use crate::unsupported::PAGE_MULTIPLE;

/// The scales of the tensors of a tile.
#[derive(Clone)]
pub(super) struct Fp8Scales {
    /// The factor of the products of each of a lane's rows, unless it is folded into the softmax scale.
    row_factors: Option<Vec<Reg<F32>>>,
    key: Option<TokenScale>,
    pub(super) value: Option<TokenScale>,
}

/// Scales of key or value.
#[derive(Debug, Clone, Copy)]
pub(super) struct TokenScale {
    /// Holds if each token has its own.
    pub(super) is_per_token: Reg<Pred>,
    /// The address of that of the sequence's first token.
    first: Reg<U64>,
    row_stride: Reg<U64>,
    /// The scale of all tokens; 1 if each has its own.
    of_all: Reg<F32>,
    /// The pages of the sequence, where it has some.
    pages: Option<PagedRows>,
}

impl TokenScale {
    fn new(k: &mut Builder, context: &TileContext, scale: ScaleParameters, nonempty: Reg<Pred>) -> Self {
        let is_paged = context.specialization.has(Operand::PageTable);
        let pages = is_paged.then(|| PagedRows::load(k, context, scale.batch_stride));
        let zero = k.copy(0u64);
        let sequence = &context.sequence;
        // Of pages, each has a place of its own.
        let batch = sequence.cache_batch.filter(|_| !is_paged).unwrap_or(zero);
        let row = sequence.first_key.map_or(zero, |row| k.widen(row));
        let first =
            k.eval(context.batch.mul_add(scale.sequence_stride, batch.mul_add(scale.batch_stride, scale.first)));
        let first = k.eval(row.mul_add(scale.row_stride, context.kv_head.mul_add(scale.key_head_stride, first)));
        let is_per_token = match pages {
            Some(_) => k.eval(scale.row_stride.ne(0) | scale.batch_stride.ne(0)),
            None => k.compare(Compare::Ne, scale.row_stride, 0u64),
        };
        let of_all = k.copy(1.0f32);
        // Of a sequence whose keys nobody attends it may be anything, or not there.
        let is_used = match pages {
            Some(_) => k.eval(scale.row_stride.eq(0) & scale.batch_stride.eq(0) & nonempty),
            None => k.eval(scale.row_stride.eq(0) & nonempty),
        };
        k.if_uniform(is_used, |k| {
            let loaded = k.load_one::<F32>(first);
            k.set(of_all, loaded);
        });
        Self { is_per_token, first, row_stride: scale.row_stride, of_all, pages }
    }

    /// Visits each element with its row and the scale of its column; that of a token that nobody attends may be anything.
    pub(super) fn each_column(
        self,
        k: &mut Builder,
        elements: &Accumulator,
        keys: &BlockKeys<'_>,
        mut visit: impl FnMut(&mut Builder, usize, Reg<F32>, Reg<F32>),
    ) {
        let key = k.add(keys.first_key, keys.positions.column);
        let by_index = lane_elements(elements);
        let columns = elements.m_tiles[0].len() as u32 * 2;
        let mut page = None;
        for pair in 0..columns {
            let column = pair / 2 * MMA_N + pair % 2;
            let address = match self.pages {
                None => {
                    let token = k.eval((key + column as i32).min(keys.positions.last_key).unsigned().widen());
                    k.eval(token.mul_add(self.row_stride, self.first))
                }
                Some(pages) => {
                    if column.is_multiple_of(PAGE_MULTIPLE as u32) {
                        page = Some(self.page(k, pages, keys, column));
                    }
                    let token = k.eval((key + column as i32).min(keys.positions.last_key));
                    let ScalePage { token: first, address } = page.unwrap_or(ScalePage { token, address: self.first });
                    let row = k.eval((token - first).unsigned().widen());
                    k.eval(row.mul_add(self.row_stride, address))
                }
            };
            let scale = k.load_one::<F32>(address);
            for row in 0..LANE_ROWS as usize {
                visit(k, row, by_index[index(row, column)], scale);
            }
        }
    }
}

/// The keys of a page from a column of the block on.
#[derive(Debug, Clone, Copy)]
struct ScalePage {
    /// The first of them.
    token: Reg<S32>,
    /// The address of its scale.
    address: Reg<U64>,
}

impl TokenScale {
    /// Looks up the page of a column of a block, a multiple of the rows that pages are a multiple of.
    fn page(self, k: &mut Builder, pages: PagedRows, keys: &BlockKeys<'_>, column: u32) -> ScalePage {
        k.section("scale page", |k| {
            let token = k.eval((keys.first_key + column as i32).min(keys.positions.last_key));
            let index = k.reinterpret::<S32, U32>(token);
            let (entry, row) = pages.entry(k, index);
            let page = pages.page(k, entry);
            let (page, row) = (k.widen(page), k.widen(row));
            let address = k.eval(row.mul_add(self.row_stride, page.mul_add(pages.page_stride, self.first)));
            ScalePage { token, address }
        })
    }
}

impl Fp8Scales {
    /// The scales of a tile, and the softmax scale of each of a lane's rows, if there are any to fold into it.
    pub(super) fn new(k: &mut Builder, tile: &TileRows<'_>) -> (Self, Option<Vec<Reg<F32>>>) {
        let TileRows { context, positions, softmax_scale, nonempty } = *tile;
        let scale = |operand| context.parameters.scale(operand);
        let [key, value] = [Operand::KScale, Operand::VScale]
            .map(|operand| scale(operand).map(|scale| TokenScale::new(k, context, scale, nonempty)));
        let query = scale(Operand::QScale).map(|scale| query_scales(k, context, positions, scale));
        let of_keys = key.map(|key| key.of_all);
        let factors = match (query, of_keys) {
            (None, None) => return (Self { row_factors: None, key, value }, None),
            (None, Some(key)) => vec![key; LANE_ROWS as usize],
            (Some(rows), None) => rows,
            (Some(rows), Some(key)) => rows.into_iter().map(|row| k.mul(row, key)).collect(),
        };
        // A `score_mod` that only adds a term does so before the softmax scales.
        match softmax_scale.filter(|_| !context.specialization.only_adds()) {
            Some(scale) => {
                let folded = factors.into_iter().map(|factor| k.mul(factor, scale)).collect();
                (Self { row_factors: None, key, value }, Some(folded))
            }
            None => (Self { row_factors: Some(factors), key, value }, None),
        }
    }

    /// Multiplies the products of a block by the scales that are not folded into the softmax scale.
    pub(super) fn apply(&self, k: &mut Builder, scores: &Accumulator, keys: &BlockKeys<'_>) {
        if let Some(factors) = &self.row_factors {
            k.section("row scales", |k| scores.scale_rows(k, factors));
        }
        if let Some(key) = self.key {
            k.if_uniform(key.is_per_token, |k| {
                k.section("key scales", |k| {
                    key.each_column(k, scores, keys, |k, _, element, scale| k.mul_to(element, scale));
                });
            });
        }
    }

    /// Undoes the size of weights, and multiplies the output by the scale of the values.
    pub(super) fn finish(&self, k: &mut Builder, softmax: &OnlineSoftmax, output: &Accumulator) {
        k.section("output scale", |k| {
            let factor = softmax.end_weight_exponent(k);
            let factor = match self.value {
                Some(value) => k.mul(value.of_all, factor),
                None => k.copy(factor),
            };
            output.scale_rows(k, &[factor; LANE_ROWS as usize]);
        });
    }
}

/// The scale of each of a lane's rows.
fn query_scales(
    k: &mut Builder,
    context: &TileContext,
    positions: &ScorePositions,
    scale: ScaleParameters,
) -> Vec<Reg<F32>> {
    let group = k.widen(context.parameters.heads_per_key_head);
    let member = k.eval(context.head - context.kv_head * group);
    let first = k.eval(context.batch.mul_add(scale.sequence_stride, scale.first));
    // Packed rows are all of one batch.
    let first = match context.sequence.first_row {
        Some(_) => first,
        None => k.eval(context.batch.mul_add(scale.batch_stride, first)),
    };
    let first = k.eval(context.kv_head.mul_add(scale.key_head_stride, member.mul_add(scale.query_head_stride, first)));
    let rows = positions.rows.iter().map(|row| {
        // Rows of several heads alternate (`pack_gqa`).
        let (row, first) = match context.packed {
            Some(group) => {
                let (member, row) = (k.rem(*row, group), k.div(*row, group));
                (row, k.eval(member.widen().mul_add(scale.query_head_stride, first)))
            }
            None => (*row, first),
        };
        let row = context.sequence.first_row.map_or(row, |first| k.add(row, first));
        let address = k.eval(row.widen().mul_add(scale.row_stride, first));
        k.load_one::<F32>(address)
    });
    rows.collect()
}

/// The elements of a lane of an accumulator of one warp, by [`index`].
pub(super) fn lane_elements(accumulator: &Accumulator) -> Vec<Reg<F32>> {
    let mut elements = Vec::new();
    for fragment in &accumulator.m_tiles[0] {
        elements.extend([fragment[0], fragment[2], fragment[1], fragment[3]]);
    }
    elements
}

/// The place of an element: by 8 columns, then by column, then by row.
pub(super) const fn index(row: usize, column: u32) -> usize {
    (column / MMA_N * 4 + column % MMA_N * 2) as usize + row
}
