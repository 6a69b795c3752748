//! Query, key and value of 8-bit floats: weights in e4m3, P · V in two levels, and scales.
//!
//! Weights are 2^8 at the row max, since e4m3 has little room below 1; sums and output are as much larger until the
//! epilogue. The tensor cores keep about 13 bits when they add 8-bit products, so P · V of each block of keys goes into an
//! accumulator of its own, and the output is multiplied by the rescale factor and added to in `f32`:
//! `O = alpha · O + P · V`. That costs registers and no instruction.
//!
//! Output and P · V of heads wider than 128 columns do not both fit the registers. Their P · V is computed by slices of the
//! columns, one after the other in one accumulator: each slice is promoted before the next begins. The first runs during the
//! softmax of the next block, as all of P · V does for narrower heads.
//!
//! Scales of query and key multiply scores. They are folded into the softmax scale of a row, unless something else is done
//! to scores first. That of the value multiplies the output in the epilogue. Strides come with each launch, so a kernel
//! with scales has code for those of each token too, which a warp branches around: keys multiply columns of scores, and
//! values columns of weights, of which the largest in a row is then 2^8 again, and the product is added in that unit.

use flashcore_ir::builder::Adds;
use flashcore_ir::types::{F32, Pred, S32, U32, U64};
use flashcore_ir::{Builder, Compare, Fp8, Reg, ShuffleMode};
use flashcore_problem::{DType, Operand};

use super::Shared;
use super::mainloop::LANE_ROWS;
use crate::attention::TileContext;
use crate::config::HopperConfig;
use crate::parameters::ScaleParameters;
use crate::primitives::{
    Accumulator, Fp8PFragment, MMA_N, OnlineSoftmax, PANEL_ROW_BYTES, PagedRows, RowScale, ScorePositions, WgmmaOperand,
};
use crate::specialization::Specialization;
use crate::unsupported::PAGE_MULTIPLE;

/// Binary logarithm of the weight of the row max.
pub(super) const WEIGHT_EXPONENT: f32 = 8.0;
const LARGEST_WEIGHT: f32 = 256.0;

/// The type of 8-bit floats.
const fn fp8(dtype: DType) -> Fp8 {
    match dtype {
        DType::E5m2 => Fp8::E5m2,
        _ => Fp8::E4m3,
    }
}

/// P of 8-bit floats, and the first level of P · V.
pub(super) struct Fp8Weights {
    p: Fp8PFragment,
    kv_type: Fp8,
    /// P · V of a block; none with one level.
    block: Option<BlockProduct>,
}

/// P · V of one block of keys, or of a slice of its columns, and what it is added with.
struct BlockProduct {
    product: Accumulator,
    /// Columns of the value.
    value_columns: u32,
    /// The factor of the output, by row.
    factors: Vec<Reg<F32>>,
    /// The unit of the product, by row, where values have scales by token.
    units: Option<Vec<Reg<F32>>>,
}

impl Fp8Weights {
    pub(super) fn new(k: &mut Builder, config: HopperConfig, specialization: Specialization) -> Self {
        let p = k.section("p", |k| Fp8PFragment::unset(k, config.tile_n));
        let block = config.has_two_levels(specialization).then(|| {
            let mut ones = || (0..LANE_ROWS).map(|_| k.copy(1.0f32)).collect::<Vec<_>>();
            let (factors, units) = (ones(), specialization.has(Operand::VScale).then(ones));
            let columns = HopperConfig::product_columns(specialization);
            let product = k.section("product", |k| Accumulator::unset(k, columns));
            BlockProduct { product, value_columns: specialization.value_dim, factors, units }
        });
        Self { p, kv_type: fp8(specialization.key_value_dtype()), block }
    }

    pub(super) fn start_qk(
        &self,
        k: &mut Builder,
        scores: &Accumulator,
        operands: (&WgmmaOperand, &WgmmaOperand),
        depth: u32,
    ) {
        scores.start_qk_fp8(k, [Fp8::E4m3, self.kv_type], operands, depth);
    }

    /// Starts P · V of a block, or of the first slice of its columns.
    pub(super) fn start_pv(&self, k: &mut Builder, shared: &Shared, stage: Reg<U32>, output: &Accumulator) {
        if let Some(block) = &self.block {
            return self.start_slice(k, block, &block.slices()[0], shared, stage);
        }
        let values = shared.transposed_values().k_major(k, stage);
        output.start_pv_fp8(k, self.kv_type, &self.p, &values, Adds::Add);
    }

    /// Starts P · V of a slice of the columns of a block.
    fn start_slice(
        &self,
        k: &mut Builder,
        block: &BlockProduct,
        slice: &ProductSlice,
        shared: &Shared,
        stage: Reg<U32>,
    ) {
        // A column of V is a row of the transposed tile.
        let rows = if slice.first_column == 0 { stage } else { k.add(stage, slice.first_column * PANEL_ROW_BYTES) };
        let values = shared.transposed_values().k_major(k, rows);
        block.product.start_pv_fp8(k, self.kv_type, &self.p, &values, Adds::Replace);
    }

    /// True if the output is added to when P · V of a block has ended, and is not its accumulator.
    pub(super) const fn has_two_levels(&self) -> bool {
        self.block.is_some()
    }

    /// Keeps the factors that belong to the block whose P · V is under way, before those of the next replace them.
    pub(super) fn hold_factors(&self, k: &mut Builder, row_scale: &RowScale) {
        if let Some(block) = &self.block {
            k.section("hold factors", |k| {
                for (held, factor) in block.factors.iter().zip(row_scale.factors()) {
                    k.set(*held, *factor);
                }
            });
        }
    }

    /// Promotes the slices of P · V of a block but the last, the first of which has ended, and ends the last.
    pub(super) fn promote_but_last(
        &self,
        k: &mut Builder,
        scales: &Fp8Scales,
        output: &Accumulator,
        (shared, stage): (&Shared, Reg<U32>),
    ) {
        let Some(block) = &self.block else { return };
        let slices = block.slices();
        for (slice, next) in slices.iter().zip(&slices[1..]) {
            block.promote(k, scales, output, slice);
            k.section("next slice", |k| {
                k.wgmma_fence();
                self.start_slice(k, block, next, shared, stage);
                k.wgmma_wait(0);
            });
        }
    }

    /// Promotes the last slice of P · V of a block, which has ended.
    pub(super) fn promote_last(&self, k: &mut Builder, scales: &Fp8Scales, output: &Accumulator) {
        let Some(block) = &self.block else { return };
        if let Some(slice) = block.slices().last() {
            block.promote(k, scales, output, slice);
        }
    }

    /// Rounds weights to P, multiplied by the scales of values where each token has its own.
    pub(super) fn round(&self, k: &mut Builder, scales: &Fp8Scales, weights: &Accumulator, keys: &BlockKeys<'_>) {
        if let (Some(BlockProduct { units: Some(units), .. }), Some(value)) = (&self.block, scales.value) {
            k.if_uniform(value.is_per_token, |k| {
                k.section("value scales", |k| scale_weights(k, value, weights, keys, units));
            });
        }
        self.p.round(k, weights);
    }
}

/// A slice of the columns of P · V of a block.
struct ProductSlice {
    first_column: u32,
    /// Columns of it that belong to the slice before.
    overlap: u32,
}

impl BlockProduct {
    /// The slices of the columns, at least one. All have the columns of the accumulator, so the last may overlap the one
    /// before it.
    fn slices(&self) -> Vec<ProductSlice> {
        let columns = self.product.m_tiles[0].len() as u32 * MMA_N;
        let new_columns = (0..self.value_columns).step_by(columns as usize);
        let slice = |new_column: u32| {
            let first_column = new_column.min(self.value_columns.saturating_sub(columns));
            ProductSlice { first_column, overlap: new_column - first_column }
        };
        new_columns.map(slice).collect()
    }

    /// Promotes a slice that has ended: `O = factor · O + product`.
    fn promote(&self, k: &mut Builder, scales: &Fp8Scales, output: &Accumulator, slice: &ProductSlice) {
        let Self { factors, units, .. } = self;
        k.section("promote", |k| {
            let columns = self.product.m_tiles[0].len() as u32 * MMA_N - slice.overlap;
            let output = output.columns(slice.first_column + slice.overlap, columns);
            let elements = elements(&self.product.columns(slice.overlap, columns));
            let add = |k: &mut Builder| {
                output.each(|row, column, element| {
                    k.scale_add_to(element, factors[row], elements[index(row, column)]);
                });
            };
            let (Some(units), Some(value)) = (units, scales.value) else { return add(k) };
            k.if_else_uniform(
                value.is_per_token,
                |k| {
                    output.each(|row, column, element| {
                        k.mul_to(element, factors[row]);
                        k.fma_to(element, elements[index(row, column)], units[row]);
                    });
                },
                add,
            );
        });
    }
}

/// The elements of a lane of an accumulator of one warp, by [`index`].
fn elements(accumulator: &Accumulator) -> Vec<Reg<F32>> {
    let mut elements = Vec::new();
    for fragment in &accumulator.m_tiles[0] {
        elements.extend([fragment[0], fragment[2], fragment[1], fragment[3]]);
    }
    elements
}

/// The place of an element: by 8 columns, then by column, then by row.
const fn index(row: usize, column: u32) -> usize {
    (column / MMA_N * 4 + column % MMA_N * 2) as usize + row
}

/// Multiplies weights by the scales of their keys' values, in units of the largest product of a row.
fn scale_weights(k: &mut Builder, value: TokenScale, weights: &Accumulator, keys: &BlockKeys<'_>, units: &[Reg<F32>]) {
    let largest: Vec<Reg<F32>> = units.iter().map(|_| k.copy(0.0f32)).collect();
    value.each_column(k, weights, keys, |k, row, element, scale| {
        // Of a key that nobody attends the weight is 0, and the scale may be anything.
        let counts = k.compare(Compare::Ne, element, 0.0f32);
        let scale = k.select(counts, scale, 0.0f32);
        k.mul_to(element, scale);
        k.max_to(largest[row], element);
    });
    let inverse: Vec<Reg<F32>> = largest
        .iter()
        .zip(units)
        .map(|(largest, unit)| {
            for distance in [1u32, 2] {
                let other = k.shuffle(ShuffleMode::Butterfly, *largest, distance);
                k.max_to(*largest, other);
            }
            let scaled = k.mul(*largest, 1.0 / LARGEST_WEIGHT);
            k.set(*unit, scaled);
            let inverse = k.reciprocal(scaled);
            // A row without keys in the block has no product; one so small that its inverse overflows adds nothing.
            let counts = k.compare(Compare::Lt, inverse, f32::INFINITY);
            k.select(counts, inverse, 0.0f32)
        })
        .collect();
    weights.scale_rows(k, &inverse);
}

/// A block of keys, as scales of tokens are found.
pub(super) struct BlockKeys<'a> {
    pub(super) positions: &'a ScorePositions,
    pub(super) first_key: Reg<S32>,
}

/// The scales of the tensors of a tile.
#[derive(Clone)]
pub(super) struct Fp8Scales {
    /// The factor of the products of each of a lane's rows, unless it is folded into the softmax scale.
    row_factors: Option<Vec<Reg<F32>>>,
    key: Option<TokenScale>,
    value: Option<TokenScale>,
}

/// Scales of key or value.
#[derive(Debug, Clone, Copy)]
struct TokenScale {
    /// Holds if each token has its own.
    is_per_token: Reg<Pred>,
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
    fn each_column(
        self,
        k: &mut Builder,
        elements: &Accumulator,
        keys: &BlockKeys<'_>,
        mut visit: impl FnMut(&mut Builder, usize, Reg<F32>, Reg<F32>),
    ) {
        let key = k.add(keys.first_key, keys.positions.column);
        let by_index = self::elements(elements);
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
    /// The scales of a tile, and the softmax scale of each of a lane's rows, if there are any to fold into it. `nonempty` is
    /// false if no row of the tile attends any key.
    pub(super) fn new(
        k: &mut Builder,
        context: &TileContext,
        positions: &ScorePositions,
        softmax_scale: Option<Reg<F32>>,
        nonempty: Reg<Pred>,
    ) -> (Self, Option<Vec<Reg<F32>>>) {
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
