//! The kernels.

pub mod ampere;
pub mod combine;
pub mod hopper;
pub mod ladder;
pub(crate) mod partial;
pub mod scalar;
pub(crate) mod stream;
pub(crate) mod tile_ranges;

use core::f32::consts::LOG2_E;

use flashcore_ir::types::{F32, S32, U32, U64};
use flashcore_ir::{Builder, Reg, SpecialRegister};
use flashcore_problem::{DType, Operand};

use crate::parameters::{Parameters, SplitParameters, TileParameters};
use crate::specialization::Specialization;
use crate::tile::{
    AddedTerm, BiasTerms, BoundExpression, ExpressionCode, ExpressionPlace, ExpressionTables, GlobalRows, PackedHeads,
    ScoreTerms, TileSpan,
};

/// Which rows of which head a CTA works on.
#[derive(Debug, Clone, Copy)]
enum Place {
    /// By its place in the grid.
    Grid,
    /// By its place in the grid, which has a CTA for each part of the keys.
    GridOfSplits(SplitParameters),
    /// One of many in turn.
    Turn { number: Reg<U32>, parameters: TileParameters },
}

/// How heads and rows become the rows of a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rows {
    /// Rows of one query head.
    OfHead,
    /// Rows of all query heads of a key head: the first row of each, then the second, and so on.
    OfKeyHead,
}

/// What one CTA works on: some query rows of one head of one batch.
#[derive(Debug, Clone, Copy)]
struct Work {
    parameters: Parameters,
    specialization: Specialization,
    /// Its first query row.
    first_row: Reg<U32>,
    /// The rows there are, in its tile and in others.
    row_count: Reg<U32>,
    batch: Reg<U64>,
    /// The head of the query; the first of several where rows are those of a key head.
    head: Reg<U64>,
    /// The query heads, where the grid does not say.
    heads: Option<Reg<U32>>,
    /// The head of key and value.
    key_head: Reg<U64>,
    /// Query heads in one tile, where there are several.
    packed: Option<Reg<U32>>,
    /// The keys of the batch.
    key_length: Reg<S32>,
    /// What is added to a query row to give its position among the keys.
    position_offset: Reg<S32>,
}

/// A tile of query rows.
#[derive(Debug, Clone, Copy)]
struct QueryTile {
    /// Its first row.
    first_row: Reg<U32>,
    head: Reg<U32>,
    /// The head of key and value.
    key_head: Reg<U32>,
    batch: Reg<U32>,
}

impl Work {
    /// That of this CTA, which has `tile_m` rows of one head.
    fn new(k: &mut Builder, specialization: Specialization, tile_m: u32) -> Self {
        let parameters = Parameters::load(k, specialization);
        Self::at(k, &parameters, specialization, tile_m, Place::Grid, Rows::OfHead)
    }

    /// That of a place.
    fn at(
        k: &mut Builder,
        parameters: &Parameters,
        specialization: Specialization,
        tile_m: u32,
        place: Place,
        rows: Rows,
    ) -> Self {
        let (mut query_tile, tiles, turn) = match place {
            Place::Grid => (k.special(SpecialRegister::CtaX), None, None),
            Place::GridOfSplits(splits) => {
                let place = k.special(SpecialRegister::CtaX);
                let tiles = k.special(SpecialRegister::GridX);
                (k.div(place, splits.num_splits), Some(k.div(tiles, splits.num_splits)), None)
            }
            Place::Turn { number, parameters: TileParameters { tiles, heads, .. } } => {
                let matrix = k.div(number, tiles);
                let turn = (k.rem(matrix, heads), k.div(matrix, heads), heads);
                (k.rem(number, tiles), Some(tiles), Some(turn))
            }
        };
        if specialization.right {
            // The last rows attend most keys: begun first, their work ends with that of the others.
            let tiles = tiles.unwrap_or_else(|| k.special(SpecialRegister::GridX));
            let last = k.sub(tiles, 1u32);
            query_tile = k.sub(last, query_tile);
        }
        let first_row = k.mul(query_tile, tile_m);
        let head = turn.map_or_else(|| k.special(SpecialRegister::CtaY), |(head, _, _)| head);
        let (head, key_head, row_count, packed) = match rows {
            Rows::OfHead => (head, k.div(head, parameters.heads_per_key_head), parameters.query_length, None),
            Rows::OfKeyHead => {
                let group = parameters.heads_per_key_head;
                (k.mul(head, group), head, k.mul(parameters.query_length, group), Some(group))
            }
        };
        let batch = turn.map_or_else(|| k.special(SpecialRegister::CtaZ), |(_, batch, _)| batch);
        let heads = turn.map(|(_, _, heads)| heads);
        let work = Self::of_tile(k, parameters, specialization, QueryTile { first_row, head, key_head, batch }, heads);
        Self { row_count, packed, ..work }
    }

    /// That of a tile of rows of one head. `heads` are the query heads, unless the grid says.
    fn of_tile(
        k: &mut Builder,
        parameters: &Parameters,
        specialization: Specialization,
        tile: QueryTile,
        heads: Option<Reg<U32>>,
    ) -> Self {
        let QueryTile { first_row, head, key_head, batch } = tile;
        let (batch, head, key_head) = (k.widen(batch), k.widen(head), k.widen(key_head));
        let (key_length, position_offset) = if specialization.has(Operand::SequsedK) {
            let address = k.mad(batch, 4u64, parameters.seqused_k);
            let length = k.load_one::<U32>(address);
            // Nothing but this kernel looks at them before it runs: too large a length must not lead past the tensors.
            let length = k.min(length, parameters.key_length);
            let length = k.reinterpret::<U32, S32>(length);
            (length, k.mad(length, parameters.position_per_key, parameters.position_offset))
        } else {
            (k.reinterpret(parameters.key_length), parameters.position_offset)
        };
        let row_count = parameters.query_length;
        Self {
            parameters: *parameters,
            specialization,
            first_row,
            row_count,
            batch,
            head,
            heads,
            key_head,
            packed: None,
            key_length,
            position_offset,
        }
    }

    /// The rows of this CTA's query, from its first on.
    fn query(&self, k: &mut Builder) -> GlobalRows {
        let Parameters { query, query_batch_stride, query_head_stride, query_row_stride: stride, .. } = self.parameters;
        let head = self.matrix(k, query, query_batch_stride, query_head_stride, self.head);
        self.rows_of_cta(k, head, stride, query_head_stride, self.specialization.head_dim)
    }

    /// The rows of this CTA's output, from its first on.
    fn output(&self, k: &mut Builder) -> GlobalRows {
        let Parameters { output, output_batch_stride, output_head_stride, output_row_stride: stride, .. } =
            self.parameters;
        let head = self.matrix(k, output, output_batch_stride, output_head_stride, self.head);
        self.rows_of_cta(k, head, stride, output_head_stride, self.specialization.value_dim)
    }

    /// All rows of its key.
    fn key(&self, k: &mut Builder) -> GlobalRows {
        let Parameters { key, key_batch_stride, key_head_stride, key_row_stride: stride, .. } = self.parameters;
        let first = self.matrix(k, key, key_batch_stride, key_head_stride, self.key_head);
        self.rows(first, stride, self.specialization.head_dim)
    }

    /// All rows of its value.
    fn value(&self, k: &mut Builder) -> GlobalRows {
        let Parameters { value, value_batch_stride, value_head_stride, value_row_stride: stride, .. } = self.parameters;
        let first = self.matrix(k, value, value_batch_stride, value_head_stride, self.key_head);
        self.rows(first, stride, self.specialization.value_dim)
    }

    fn matrix(
        &self,
        k: &mut Builder,
        tensor: Reg<U64>,
        batch_stride: Reg<U64>,
        head_stride: Reg<U64>,
        head: Reg<U64>,
    ) -> Reg<U64> {
        let batch = k.mad(self.batch, batch_stride, tensor);
        k.mad(head, head_stride, batch)
    }

    fn rows_of_cta(
        &self,
        k: &mut Builder,
        head: Reg<U64>,
        stride: Reg<U64>,
        head_stride: Reg<U64>,
        columns: u32,
    ) -> GlobalRows {
        if let Some(group) = self.packed {
            let packed = PackedHeads { group, head_stride, first_row: self.first_row };
            return GlobalRows { packed: Some(packed), ..self.rows(head, stride, columns) };
        }
        let first_row = k.widen(self.first_row);
        let first = k.mad(first_row, stride, head);
        self.rows(first, stride, columns)
    }

    const fn rows(&self, first: Reg<U64>, stride: Reg<U64>, columns: u32) -> GlobalRows {
        GlobalRows { first, stride, columns, width: self.specialization.width, packed: None }
    }

    /// The number of a row among all rows of the output.
    fn row_of_all(&self, k: &mut Builder, row: Reg<U32>) -> Reg<U64> {
        let heads = match (self.heads, self.packed) {
            (Some(heads), _) => heads,
            (None, None) => k.special(SpecialRegister::GridY),
            (None, Some(group)) => {
                let key_heads = k.special(SpecialRegister::GridY);
                k.mul(key_heads, group)
            }
        };
        let heads = k.widen(heads);
        let length = k.widen(self.parameters.query_length);
        let matrix = k.mad(self.batch, heads, self.head);
        let (matrix, row) = match self.packed {
            None => (matrix, row),
            Some(group) => {
                let head = k.rem(row, group);
                let head = k.widen(head);
                (k.add(matrix, head), k.div(row, group))
            }
        };
        let row = k.widen(row);
        k.mad(matrix, length, row)
    }

    /// The address of the log-sum-exp of a row.
    fn lse(&self, k: &mut Builder, row: Reg<U32>) -> Reg<U64> {
        let index = self.row_of_all(k, row);
        k.mad(index, 4u64, self.parameters.lse)
    }

    /// The position of a query row among the keys.
    fn position(&self, k: &mut Builder, row: Reg<U32>) -> Reg<S32> {
        let row = match self.packed {
            None => row,
            Some(group) => k.div(row, group),
        };
        let row = k.reinterpret::<U32, S32>(row);
        k.add(row, self.position_offset)
    }

    /// The first key that a query row attends.
    fn first_key(&self, k: &mut Builder, row: Reg<U32>) -> Reg<S32> {
        if !self.specialization.left {
            return k.copy(0i32);
        }
        k.section("window", |k| {
            let position = self.position(k, row);
            let first = k.sub(position, self.parameters.window_left);
            let first = k.max(first, 0i32);
            k.min(first, self.key_length)
        })
    }

    /// Behind the last key that a query row attends; never before the first.
    fn end_key(&self, k: &mut Builder, row: Reg<U32>) -> Reg<S32> {
        if !self.specialization.right {
            return self.key_length;
        }
        k.section("window", |k| {
            let position = self.position(k, row);
            let last = k.add(position, self.parameters.window_right);
            let end = k.add(last, 1i32);
            let end = k.min(end, self.key_length);
            k.max(end, 0i32)
        })
    }

    /// A number of the query head, from an array of one `f32` for each.
    fn of_head(&self, k: &mut Builder, array: Reg<U64>) -> Reg<F32> {
        let address = k.mad(self.head, 4u64, array);
        k.load_one::<F32>(address)
    }

    /// The sink of the head in base 2, where there is one.
    fn sink(&self, k: &mut Builder) -> Option<Reg<F32>> {
        self.specialization.has(Operand::Sinks).then(|| {
            let sink = self.of_head(k, self.parameters.sinks);
            k.mul(sink, LOG2_E)
        })
    }

    /// An expression, for rows of a lane from `row` on, of which there are `rows`.
    fn expression(&self, k: &mut Builder, expression: BoundExpression, row: Reg<U32>, rows: usize) -> ExpressionCode {
        k.section("expression", |k| {
            let parameters = self.parameters;
            let tables = ExpressionTables {
                numbers: (parameters.aux_f32, parameters.last_number),
                integers: (parameters.aux_i32, parameters.last_integer),
            };
            let [batch, head] = [self.batch, self.head].map(|number| k.truncate(number));
            let [batch, head, query] = [batch, head, row].map(|number| k.reinterpret::<U32, S32>(number));
            let exact = self.specialization.dtype == DType::F32;
            ExpressionCode::new(k, expression, tables, ExpressionPlace { batch, head, query }, rows, exact)
        })
    }

    /// The term that an expression adds to products, where nothing else is done to them but scaling.
    fn added_term(&self, k: &mut Builder, row: Reg<U32>, rows: usize) -> Option<AddedTerm> {
        let score_mod = self.parameters.score_mod.filter(|_| self.specialization.only_adds())?;
        let code = self.expression(k, score_mod, row, rows);
        Some(AddedTerm { code, inverse_scale: self.parameters.inverse_scale })
    }

    /// The scores of the tile of this CTA's rows that begins at `first_key`.
    fn tile_span(&self, k: &mut Builder, rows: u32, first_key: Reg<S32>, keys: u32) -> TileSpan {
        let first_row = k.reinterpret::<U32, S32>(self.first_row);
        let rows_span = [first_row, k.add(first_row, rows as i32 - 1)];
        let keys_span = [first_key, k.add(first_key, keys as i32 - 1)];
        TileSpan { rows: rows_span, most_rows: rows, keys: keys_span, most_keys: keys }
    }

    /// Which keys take part, besides those that the mask takes out.
    fn mask_expression(&self, k: &mut Builder, row: Reg<U32>, rows: usize) -> Option<ExpressionCode> {
        self.parameters.mask_mod.map(|mask_mod| self.expression(k, mask_mod, row, rows))
    }

    /// What is added to and done with the products to give scores, for rows of a lane from `row` on, of which there are
    /// `rows`.
    fn score_terms(&self, k: &mut Builder, row: Reg<U32>, rows: usize) -> ScoreTerms {
        let parameters = self.parameters;
        let specialization = self.specialization;
        ScoreTerms {
            scale: parameters.scale_log2,
            softcap: specialization.softcap.then_some(parameters.softcap_log2),
            scale_rest: (specialization.dtype == DType::F32).then_some(parameters.scale_log2_rest),
            slope: specialization.has(Operand::AlibiSlopes).then(|| {
                let slope = self.of_head(k, parameters.alibi_slopes);
                k.mul(slope, -LOG2_E)
            }),
            bias: specialization.has(Operand::Bias).then(|| {
                let Parameters { bias, bias_batch_stride, bias_head_stride, .. } = parameters;
                let first = self.matrix(k, bias, bias_batch_stride, bias_head_stride, self.head);
                BiasTerms { first, row_stride: parameters.bias_row_stride, key_stride: parameters.bias_key_stride }
            }),
            expression: parameters.score_mod.map(|score_mod| self.expression(k, score_mod, row, rows)),
        }
    }
}
