//! Scales of a query of 8 bits, and of values under weights of 8 bits.
//!
//! The scale of a query row multiplies its scores. It is folded into the softmax scale of the row, unless something else is
//! done to scores first.
//!
//! Weights of 8 bits are 2^8 at the row max, and their products with scales of tokens take the place of weights: `e4m3` has
//! full precision from 2^8 down to 2^-6. Each row has a power of two, its unit, which follows the largest product, so that the
//! largest of a block is at most 2^8 units; the output is in that unit too. Where another block changes the unit, the factor
//! that the output is rescaled with for a new row max has both changes in it.

use flashcore_ir::types::{F32, U32};
use flashcore_ir::{Builder, Reg};
use flashcore_problem::Operand;

use super::scales::{GREATEST_EXPONENT, KvScales, LEAST_EXPONENT, ValueScales, inverse_of_power};
use crate::attention::TileContext;
use crate::parameters::ScaleParameters;
use crate::primitives::{Accumulator, E4M3_WEIGHT_EXPONENT, OnlineSoftmax, RowScale, ScorePositions, reduce_row};

/// Bits of the exponent of an `f32`, and all bits below.
const EXPONENT_BITS: u32 = 0x7f80_0000;
const FRACTION_BITS: u32 = 0x007f_ffff;
/// Bits of an exponent of [`E4M3_WEIGHT_EXPONENT`].
const WEIGHT_EXPONENT_BITS: u32 = (E4M3_WEIGHT_EXPONENT as u32) << 23;

/// Scales of a lane's query rows.
pub(super) struct RowScales {
    /// The softmax scale of each row, where the scales are folded into it.
    pub(super) softmax: Option<Vec<Reg<F32>>>,
    /// The factor of the scores of each row, where they are not.
    pub(super) of_scores: Option<Vec<Reg<F32>>>,
}

impl RowScales {
    /// The scales of a tile's query, if it has any; `softmax_scale` is what is left to the softmax.
    pub(super) fn new(
        k: &mut Builder,
        context: &TileContext,
        positions: &ScorePositions,
        softmax_scale: Option<Reg<F32>>,
    ) -> Self {
        let Some(scale) = context.parameters.scale(Operand::QScale) else {
            return Self { softmax: None, of_scores: None };
        };
        let factors = query_scales(k, context, positions, scale);
        // A `score_mod` that only adds a term does so before the softmax scales.
        match softmax_scale.filter(|_| !context.specialization.only_adds()) {
            Some(scale) => {
                let folded = factors.into_iter().map(|factor| k.mul(factor, scale)).collect();
                Self { softmax: Some(folded), of_scores: None }
            }
            None => Self { softmax: None, of_scores: Some(factors) },
        }
    }
}

/// The scale of each of a lane's rows.
fn query_scales(
    k: &mut Builder,
    context: &TileContext,
    positions: &ScorePositions,
    scale: ScaleParameters,
) -> Vec<Reg<F32>> {
    let group = context.parameters.heads_per_key_head;
    let first = k.eval(context.batch.mul_add(scale.sequence_stride, scale.first));
    // Packed rows are all of one batch.
    let first = match context.sequence.first_row {
        Some(_) => first,
        None => k.eval(context.batch.mul_add(scale.batch_stride, first)),
    };
    let first = k.eval(context.kv_head.mul_add(scale.key_head_stride, first));
    let member = k.eval(context.head - context.kv_head * group.widen());
    let rows = positions.rows.iter().map(|row| {
        // Rows of all heads of a KV head in one tile: those of the first row of each come first.
        let (row, member) = match context.packed {
            Some(group) => (k.div(*row, group), k.eval((*row % group).widen())),
            None => (*row, member),
        };
        let row = context.sequence.first_row.map_or(row, |first| k.add(row, first));
        let address = k.eval(row.widen().mul_add(scale.row_stride, member.mul_add(scale.query_head_stride, first)));
        k.load_one::<F32>(address)
    });
    rows.collect()
}

impl KvScales {
    /// Multiplies columns of weights by the scales of their values, where tokens have their own, and divides them by the units
    /// of their rows. Factors of the output in `row_scale` change with the units.
    pub(super) fn scale_e4m3_weights(
        &self,
        k: &mut Builder,
        weights: &Accumulator,
        row_scale: &RowScale,
        stage: Reg<U32>,
    ) {
        let Some(value) = &self.value else { return };
        k.section("value scales", |k| {
            k.if_uniform(value.columns.per_token, |k| {
                value.columns.multiply(k, weights, stage);
                value.divide_by_units(k, weights, row_scale);
            });
        });
    }

    /// Undoes the size of weights, and multiplies the output by what weights were not multiplied by.
    pub(super) fn finish_e4m3(&self, k: &mut Builder, softmax: &OnlineSoftmax, output: &Accumulator) {
        k.section("output scale", |k| {
            let factor = softmax.end_weight_exponent(k);
            let factors: Vec<Reg<F32>> = match &self.value {
                Some(value) => value.factors.iter().map(|unit| k.mul(*unit, factor)).collect(),
                None => vec![k.copy(factor); 2 * output.m_tiles.len()],
            };
            output.scale_rows(k, &factors);
        });
    }
}

impl ValueScales {
    /// Divides products of weights and scales by the units of their rows, after these have followed the largest product.
    fn divide_by_units(&self, k: &mut Builder, products: &Accumulator, row_scale: &RowScale) {
        let units = &self.factors;
        let largest: Vec<Reg<F32>> = units.iter().map(|_| k.copy(0.0f32)).collect();
        // NaN is no maximum.
        products.each(|row, _, product| k.max_to(largest[row], product));
        let rows = units.iter().zip(&largest).zip(row_scale.factors());
        let inverses: Vec<Reg<F32>> = rows
            .map(|((unit, largest), factor)| {
                reduce_row(k, *largest, |k, largest, other| k.max_to(largest, other));
                let output = k.mul(*unit, *factor);
                // That of the output, as far as a new row max has left it, or of the block, whichever is larger.
                let [output_power, power] = [output, *largest].map(|number| power_above(k, number));
                let power = k.eval(power.max(LEAST_EXPONENT + WEIGHT_EXPONENT_BITS) - WEIGHT_EXPONENT_BITS);
                let power = k.eval(power.max(output_power).max(LEAST_EXPONENT).min(GREATEST_EXPONENT));
                let power = k.reinterpret::<U32, F32>(power);
                let inverse = inverse_of_power(k, power);
                k.set(*unit, power);
                let rescaled = k.mul(output, inverse);
                k.set(*factor, rescaled);
                inverse
            })
            .collect();
        products.scale_rows(k, &inverses);
    }
}

/// Bits of the least power of two that is not below a number, which is not negative.
fn power_above(k: &mut Builder, number: Reg<F32>) -> Reg<U32> {
    let bits = k.reinterpret::<F32, U32>(number);
    k.eval((bits + FRACTION_BITS) & EXPONENT_BITS)
}
