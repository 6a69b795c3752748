//! P · V of 8-bit floats: weights in e4m3, and products that are added to the output in two levels.
//!
//! Weights are 2^8 at the row max, since e4m3 has little room below 1; sums and output are as much larger until the
//! epilogue. The tensor cores keep about 13 bits when they add 8-bit products, so P · V of each block of keys goes into an
//! accumulator of its own, and the output is multiplied by the rescale factor and added to in `f32`:
//! `O = alpha · O + P · V`. That costs registers and no instruction.
//!
//! Output and P · V of heads wider than 128 columns do not both fit the registers. Their P · V is computed by slices of the
//! columns, one after the other in one accumulator: each slice is promoted before the next begins. The first runs during the
//! softmax of the next block, as all of P · V does for narrower heads.

use core::marker::PhantomData;

use flashcore_ir::builder::Adds;
use flashcore_ir::types::{F32, U32};
use flashcore_ir::{Builder, Compare, Fp8, Reg, ShuffleMode};
use flashcore_problem::{DType, Operand};

use super::Cta;
use super::fp8_scales::{Fp8Scales, TokenScale, index, lane_elements};
use super::mainloop::LANE_ROWS;
use super::pv::{BlockKeys, PvStrategy, TileRows};
use crate::config::HopperConfig;
use crate::element::Element;
use crate::primitives::{
    Accumulator, MMA_N, OnlineSoftmax, PANEL_ROW_BYTES, RowScale, SwizzledTile, WgmmaA, WgmmaFragments,
};

/// Binary logarithm of the weight of the row max.
const WEIGHT_EXPONENT: f32 = 8.0;
const LARGEST_WEIGHT: f32 = 256.0;

/// The type of 8-bit floats.
const fn fp8(dtype: DType) -> Fp8 {
    match dtype {
        DType::E5m2 => Fp8::E5m2,
        _ => Fp8::E4m3,
    }
}

/// P · V of 8-bit floats, under an output of pairs of `T`.
pub(super) struct Fp8Pv<T> {
    p: WgmmaFragments<U32>,
    kv_type: Fp8,
    /// V transposed.
    value: SwizzledTile,
    /// The first level of P · V; none with one level.
    block: Option<BlockProduct>,
    output: PhantomData<T>,
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

impl<T: Element> PvStrategy for Fp8Pv<T> {
    type Output = T;
    type Types = [Fp8; 2];
    type Scales = Fp8Scales;

    fn new(k: &mut Builder, cta: &Cta) -> Self {
        let Cta { config, specialization, shared, .. } = cta;
        let p = k.section("p", |k| WgmmaFragments::unset_e4m3(k, config.tile_n));
        let block = config.has_two_levels(*specialization).then(|| {
            let mut ones = || (0..LANE_ROWS).map(|_| k.copy(1.0f32)).collect::<Vec<_>>();
            let (factors, units) = (ones(), specialization.has(Operand::VScale).then(ones));
            let columns = HopperConfig::product_columns(*specialization);
            let product = k.section("product", |k| Accumulator::unset(k, columns));
            BlockProduct { product, value_columns: specialization.value_dim, factors, units }
        });
        let kv_type = fp8(specialization.key_value_dtype());
        Self { p, kv_type, value: shared.transposed_values(), block, output: PhantomData }
    }

    fn query_key_types(&self) -> [Fp8; 2] {
        [Fp8::E4m3, self.kv_type]
    }

    fn load_scales(k: &mut Builder, softmax: OnlineSoftmax, tile: &TileRows<'_>) -> (OnlineSoftmax, Fp8Scales) {
        let (scales, row_scales) = k.section("scales", |k| Fp8Scales::new(k, tile));
        (softmax.with_weight_exponent(WEIGHT_EXPONENT, row_scales), scales)
    }

    fn scale_scores(k: &mut Builder, scales: &Fp8Scales, scores: &Accumulator, block: &BlockKeys<'_>) {
        scales.apply(k, scores, block);
    }

    /// Rounds weights to P, multiplied by the scales of values where each token has its own.
    fn round(&self, k: &mut Builder, scales: &Fp8Scales, weights: &Accumulator, block: &BlockKeys<'_>) {
        if let (Some(BlockProduct { units: Some(units), .. }), Some(value)) = (&self.block, scales.value) {
            k.if_uniform(value.is_per_token, |k| {
                k.section("value scales", |k| scale_weights(k, value, weights, block, units));
            });
        }
        self.p.round_e4m3(k, weights);
    }

    fn rescale_output(&self, k: &mut Builder, softmax: &OnlineSoftmax, output: &Accumulator, row_scale: &RowScale) {
        // In two levels, the output is rescaled as the product of the block is added.
        if self.block.is_none() {
            softmax.rescale_output(k, output, row_scale);
        }
    }

    /// Starts P · V of a block, or of the first slice of its columns.
    fn start(&self, k: &mut Builder, values: Reg<U32>, output: &Accumulator) {
        match &self.block {
            Some(block) => self.start_slice(k, block, &block.slices()[0], values),
            None => self.multiply(k, values, output, Adds::Add),
        }
    }

    fn keep_row_scale(&self, k: &mut Builder, row_scale: &RowScale) {
        if let Some(block) = &self.block {
            k.section("hold factors", |k| {
                for (held, factor) in block.factors.iter().zip(row_scale.factors()) {
                    k.set(*held, *factor);
                }
            });
        }
    }

    /// Promotes the slices of P · V of a block, the first of which has ended; V is read no more when the last has ended.
    fn finish(
        &self,
        k: &mut Builder,
        scales: &Fp8Scales,
        values: Reg<U32>,
        output: &Accumulator,
        release: impl FnOnce(&mut Builder),
    ) {
        let Some(block) = &self.block else { return release(k) };
        let slices = block.slices();
        for (slice, next) in slices.iter().zip(&slices[1..]) {
            block.promote(k, scales, output, slice);
            k.section("next slice", |k| {
                k.wgmma_fence();
                self.start_slice(k, block, next, values);
                k.wgmma_wait(0);
            });
        }
        release(k);
        if let Some(slice) = slices.last() {
            block.promote(k, scales, output, slice);
        }
    }

    fn scale_output(k: &mut Builder, scales: &Fp8Scales, softmax: &OnlineSoftmax, output: &Accumulator) {
        scales.finish(k, softmax, output);
    }
}

impl<T> Fp8Pv<T> {
    /// Starts P · V of a slice of the columns of a block.
    fn start_slice(&self, k: &mut Builder, block: &BlockProduct, slice: &ProductSlice, values: Reg<U32>) {
        // A column of V is a row of the transposed tile.
        let rows = if slice.first_column == 0 { values } else { k.add(values, slice.first_column * PANEL_ROW_BYTES) };
        self.multiply(k, rows, &block.product, Adds::Replace);
    }

    /// Starts P · V of the columns of V that are the rows of the transposed tile from an address on.
    fn multiply(&self, k: &mut Builder, rows: Reg<U32>, product: &Accumulator, adds: Adds) {
        let values = self.value.k_major(k, rows);
        product.multiply_async(k, [Fp8::E4m3, self.kv_type], WgmmaA::Registers(&self.p), &values, adds);
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
            let elements = lane_elements(&self.product.columns(slice.overlap, columns));
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
