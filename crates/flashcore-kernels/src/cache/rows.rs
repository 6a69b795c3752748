//! Rows that are copied, normalized, rotated and quantised on the way: those of one tensor, by the CTAs of one part of the grid.

use flashcore_ir::types::{Pred, S32, U32, U64};
use flashcore_ir::{Builder, Compare, Reg, SpecialRegister};

use super::quantize::{CachePlace, Quantizer, is_first_lane};
use super::rotary_rows::{Item, Norm, TableRow, Tables, normalize};
use super::spec::RowShape;
use crate::primitives::VectorType;

/// The row of a lane: one head of one row of a tensor.
pub(super) struct LaneRow {
    /// True if there is one.
    pub(super) exists: Reg<Pred>,
    /// Index among the rows of all heads together: the token.
    pub(super) row: Reg<U32>,
    pub(super) head: Reg<U64>,
    lane_in_row: Reg<U32>,
}

/// Place that a row is stored to.
pub(super) struct RowTarget {
    pub(super) address: Reg<U64>,
    /// True if it is stored.
    pub(super) is_stored: Reg<Pred>,
    /// Place in a cache, for rows that go to one.
    pub(super) place: Option<CachePlace>,
}

/// Places and positions of rows.
pub(super) trait Placement {
    /// Everything about a row that several of the methods need.
    type Place;

    /// Looks a row up.
    fn find(&self, k: &mut Builder, row: &LaneRow) -> Self::Place;
    /// The address it is loaded from.
    fn source(&self, k: &mut Builder, row: &LaneRow, found: &Self::Place) -> Reg<U64>;
    /// The place it is stored to.
    fn target(&self, k: &mut Builder, row: &LaneRow, found: &Self::Place) -> RowTarget;
    /// The position of the rotary embedding, clamped into its tables.
    fn position(&self, k: &mut Builder, row: &LaneRow, found: &Self::Place) -> Reg<S32>;
}

/// Rows of one tensor and the work on them.
pub(super) struct Pass {
    pub(super) shape: RowShape,
    pub(super) first_cta: Reg<U32>,
    pub(super) heads: Reg<U32>,
    /// Rows of all heads.
    pub(super) rows: Reg<U32>,
    /// A row that nobody writes, which lanes without a vector of their own load in place of one that its owner may store
    /// at the same time: the source may be the target.
    pub(super) unwritten: Option<Reg<U64>>,
    pub(super) transforms: bool,
    pub(super) norm: Option<Norm>,
    pub(super) tables: Tables,
    /// Quantisation to an FP8 cache.
    pub(super) quantize: Option<Quantizer>,
}

impl Pass {
    /// The row of this lane; one past the last is the last again, which is not stored.
    fn row(&self, k: &mut Builder, cta: Reg<U32>) -> LaneRow {
        let thread = k.special(SpecialRegister::ThreadX);
        let lane_in_row = k.and(thread, self.shape.lanes - 1);
        let row_in_cta = k.shr(thread, self.shape.lanes.ilog2());
        let cta = k.sub(cta, self.first_cta);
        let row = k.mad(cta, self.shape.rows_per_cta(), row_in_cta);
        let exists = k.compare(Compare::Lt, row, self.rows);
        let last = k.sub(self.rows, 1u32);
        let row = k.min(row, last);
        let token = k.div(row, self.heads);
        let first = k.mul(token, self.heads);
        let head = k.sub(row, first);
        LaneRow { exists, row: token, head: k.widen(head), lane_in_row }
    }

    /// Loads, transforms and stores the rows of a CTA.
    pub(super) fn write<P: Placement>(&self, k: &mut Builder, cta: Reg<U32>, placement: &P) {
        let Self { shape, .. } = *self;
        let vector = shape.vector;
        let element = vector.dtype.size_bytes() as u32;
        let row = self.row(k, cta);
        let found = placement.find(k, &row);
        let source = placement.source(k, &row, &found);
        let steps = shape.items.div_ceil(shape.lanes);
        let items: Vec<_> = (0..steps).map(|step| Item::new(k, shape, row.lane_in_row, step)).collect();
        // All loads of the row before anything waits for one of them.
        let mut bits: Vec<_> = items
            .iter()
            .map(|item| {
                [0, 1].map(|side| {
                    let source = self.unwritten.map_or(source, |unwritten| {
                        let exists = item.exists[side].map_or(row.exists, |exists| k.and(row.exists, exists));
                        k.select(exists, source, unwritten)
                    });
                    let address = k.mad_wide(item.columns[side], element, source);
                    vector.load(k, address)
                })
            })
            .collect();
        let RowTarget { address: target, is_stored, place } = placement.target(k, &row, &found);
        let (mut stored, mut stored_element) = (vector, element);
        if self.transforms || self.quantize.is_some() {
            let mut values: Vec<_> =
                bits.iter().map(|[first, second]| [vector.widen(k, first), vector.widen(k, second)]).collect();
            let tables = shape.rotary.filter(|_| self.transforms).map(|rotary| {
                let position = placement.position(k, &row, &found);
                (rotary.style, TableRow::new(k, shape, rotary, self.tables, position))
            });
            if let Some(norm) = &self.norm {
                normalize(k, shape, norm, &items, &mut values);
            }
            if let Some((style, tables)) = tables {
                for (item, values) in items.iter().zip(&mut values) {
                    tables.rotate(k, style, item, values);
                }
            }
            if let (Some(quantize), Some(place)) = (self.quantize, &place) {
                let is_first = is_first_lane(k, row.lane_in_row);
                quantize.divide(k, shape, (place, row.head), [is_stored, is_first], &mut values);
                (stored, stored_element) = (VectorType::new(quantize.dtype, vector.elements), 1);
            }
            bits = values.iter().map(|[first, second]| [stored.round(k, first), stored.round(k, second)]).collect();
        }
        for (item, vectors) in items.iter().zip(&bits) {
            for ((column, exists), bits) in item.columns.into_iter().zip(item.exists).zip(vectors) {
                let is_stored = match exists {
                    Some(exists) => k.and(is_stored, exists),
                    None => is_stored,
                };
                let address = k.mad_wide(column, stored_element, target);
                k.when(is_stored, |k| stored.store(k, address, bits));
            }
        }
    }
}

/// CTAs for so many rows.
pub(super) fn ctas(k: &mut Builder, shape: RowShape, rows: Reg<U32>) -> Reg<U32> {
    let per_cta = shape.rows_per_cta();
    let last = k.add(rows, per_cta - 1);
    k.shr(last, per_cta.ilog2())
}

/// Quotient and remainder: the page of a row, and the row in it.
pub(super) fn page_and_row(k: &mut Builder, row: Reg<U32>, page_size: Reg<U32>) -> (Reg<U32>, Reg<U32>) {
    let page = k.div(row, page_size);
    let first = k.mul(page, page_size);
    (page, k.sub(row, first))
}

/// Address of a head of a row of a page, by page, row and head strides.
pub(super) fn cache_address(
    k: &mut Builder,
    cache: Reg<U64>,
    [page_stride, row_stride, head_stride]: [Reg<U64>; 3],
    [page, row]: [Reg<U32>; 2],
    head: Reg<U64>,
) -> Reg<U64> {
    let (page, row) = (k.widen(page), k.widen(row));
    let address = k.mad(page, page_stride, cache);
    let address = k.mad(row, row_stride, address);
    k.mad(head, head_stride, address)
}
