//! Elements of the Ampere kernel: pairs of 16-bit floats, with keys and values of 16 or of 8 bits, `f32` as `tf32`, and query,
//! key and value of 8 bits.
//!
//! The mainloop and the epilogue are the same for all; here is what is not: fragments and products.

use core::marker::PhantomData;

use flashcore_ir::types::{F32, Tf32, U32};
use flashcore_ir::{Builder, Fp8, Major, Reg};

use super::scales::KvScales;
use crate::config::AmpereConfig;
use crate::element::{Element, ElementLayout};
use crate::primitives::{
    Accumulator, E4m3, Fp8Target, FragmentA, LaneColumns, OnlineSoftmax, OperandA, Quads, Rescale, RowScale,
    SharedOperand, SharedTile, StoredElement, ValueWords, adjacent_columns, multiply_e4m3_k_major,
    multiply_e4m3_mn_major, multiply_tf32_k_major, multiply_tf32_mn_major, multiply_widened_k_major,
    multiply_widened_mn_major,
};
use flashcore_problem::DType;

/// An element type of the Ampere kernel.
pub(crate) trait TensorElement: Sized + 'static {
    /// The layout of the output in memory.
    const LAYOUT: ElementLayout;
    /// The layout of the query in memory.
    const QUERY_LAYOUT: ElementLayout = Self::LAYOUT;
    /// The columns of a lane in [`output`](Self::output).
    const COLUMNS: LaneColumns = LaneColumns::Pairs;
    /// The output in memory.
    type Stored: StoredElement;
    /// Fragments of A.
    type Fragment: FragmentA;
    /// V as the B operand.
    type Values: Copy;

    /// The first 16 rows of the query.
    fn query(k: &mut Builder, tile: SharedTile, base: Reg<U32>, lane: Reg<U32>) -> SharedOperand {
        tile.operand_a(k, base, lane, Major::Depth)
    }

    /// V in stage 0.
    fn values(k: &mut Builder, tile: SharedTile, base: Reg<U32>, lane: Reg<U32>) -> Self::Values;

    /// Adds the products of query and keys to the scores.
    fn multiply_scores(
        k: &mut Builder,
        config: AmpereConfig,
        scores: &Accumulator,
        query: &OperandA<'_, Self::Fragment>,
        keys: SharedOperand,
    );

    /// Makes weights of the scores of a block, and adds their products with the values to the output.
    fn multiply_values(k: &mut Builder, block: &BlockOperands<'_, Self>);

    /// The output of all products, with adjacent columns in pairs.
    fn output(output: &Accumulator) -> Accumulator {
        output.clone()
    }

    /// Columns beside each other as they are in memory.
    fn words(k: &mut Builder, columns: &[Reg<F32>]) -> Vec<Reg<U32>>;
}

/// Operands of P · V of one KV block.
pub(crate) struct BlockOperands<'a, T: TensorElement> {
    pub(super) config: AmpereConfig,
    pub(super) softmax: &'a OnlineSoftmax,
    pub(super) scales: &'a KvScales,
    /// Scores, which become weights.
    pub(super) scores: &'a Accumulator,
    pub(super) output: &'a Accumulator,
    pub(super) values: T::Values,
    pub(super) stage: Reg<U32>,
}

impl<T: TensorElement> BlockOperands<'_, T> {
    /// Makes weights of scores, and rescales the output to the new row max.
    fn softmax(&self, k: &mut Builder) {
        k.section("softmax", |k| self.softmax.update(k, self.scores, self.output));
        self.scales.scale_weights(k, self.scores, self.output, self.stage);
    }
}

impl<T: Element> TensorElement for T {
    const LAYOUT: ElementLayout = T::LAYOUT;
    type Stored = T;
    type Fragment = T;
    type Values = SharedOperand;

    fn values(k: &mut Builder, tile: SharedTile, base: Reg<U32>, lane: Reg<U32>) -> Self::Values {
        tile.operand_b(k, base, lane, Major::Outer)
    }

    fn multiply_scores(
        k: &mut Builder,
        config: AmpereConfig,
        scores: &Accumulator,
        query: &OperandA<'_, Self::Fragment>,
        keys: SharedOperand,
    ) {
        scores.multiply(k, query, keys, config.accumulation);
    }

    fn multiply_values(k: &mut Builder, block: &BlockOperands<'_, Self>) {
        block.softmax(k);
        k.section("output", |k| {
            let values = block.values.in_stage(k, block.stage);
            block.output.multiply::<T>(k, &OperandA::Accumulator(block.scores), values, block.config.accumulation);
        });
    }

    fn words(k: &mut Builder, columns: &[Reg<F32>]) -> Vec<Reg<U32>> {
        let pairs = columns.chunks_exact(2).map(|pair| {
            let pair = k.pair::<T>(pair[0], pair[1]);
            k.reinterpret::<T, U32>(pair)
        });
        pairs.collect()
    }
}

/// Pairs of `T` with keys and values of 8 bits: `e5m2` if `IS_E5M2`, else `e4m3`.
pub(crate) struct Fp8Kv<T, const IS_E5M2: bool>(PhantomData<T>);

impl<T: Fp8Target, const IS_E5M2: bool> Fp8Kv<T, IS_E5M2> {
    const FROM: Fp8 = if IS_E5M2 { Fp8::E5m2 } else { Fp8::E4m3 };
}

impl<T: Fp8Target, const IS_E5M2: bool> TensorElement for Fp8Kv<T, IS_E5M2> {
    const LAYOUT: ElementLayout = <T as Element>::LAYOUT;
    const COLUMNS: LaneColumns = LaneColumns::Quads;
    type Stored = T;
    type Fragment = Quads<T>;
    type Values = SharedOperand;

    fn query(k: &mut Builder, tile: SharedTile, base: Reg<U32>, lane: Reg<U32>) -> SharedOperand {
        tile.quads(k, base, lane)
    }

    fn values(k: &mut Builder, tile: SharedTile, base: Reg<U32>, lane: Reg<U32>) -> Self::Values {
        tile.operand_b(k, base, lane, Major::Outer)
    }

    fn multiply_scores(
        k: &mut Builder,
        config: AmpereConfig,
        scores: &Accumulator,
        query: &OperandA<'_, Self::Fragment>,
        keys: SharedOperand,
    ) {
        multiply_widened_k_major(k, (Self::FROM, config.fp8), scores, query, keys);
    }

    fn multiply_values(k: &mut Builder, block: &BlockOperands<'_, Self>) {
        block.softmax(k);
        k.section("output", |k| {
            let values = block.values.in_stage(k, block.stage);
            let weights = OperandA::Accumulator(block.scores);
            multiply_widened_mn_major::<T>(k, (Self::FROM, block.config.fp8), block.output, &weights, values);
        });
    }

    fn output(output: &Accumulator) -> Accumulator {
        adjacent_columns(output)
    }

    fn words(k: &mut Builder, columns: &[Reg<F32>]) -> Vec<Reg<U32>> {
        <T as TensorElement>::words(k, columns)
    }
}

/// Query, key and value of 8 bits, and an output of pairs of `T`: key and value are `e5m2` if `IS_E5M2`, else `e4m3`. P · V
/// adds up in two levels if `TWO_LEVELS`.
pub(crate) struct Fp8Qkv<T, const IS_E5M2: bool, const TWO_LEVELS: bool>(PhantomData<T>);

impl<T, const IS_E5M2: bool, const TWO_LEVELS: bool> Fp8Qkv<T, IS_E5M2, TWO_LEVELS> {
    const KV_TYPE: Fp8 = if IS_E5M2 { Fp8::E5m2 } else { Fp8::E4m3 };
}

impl<T: Element, const IS_E5M2: bool, const TWO_LEVELS: bool> TensorElement for Fp8Qkv<T, IS_E5M2, TWO_LEVELS> {
    const LAYOUT: ElementLayout = <T as Element>::LAYOUT;
    const QUERY_LAYOUT: ElementLayout = ElementLayout::of(DType::E4m3);
    const COLUMNS: LaneColumns = LaneColumns::Quads;
    type Stored = T;
    type Fragment = E4m3;
    type Values = SharedOperand;

    fn values(k: &mut Builder, tile: SharedTile, base: Reg<U32>, lane: Reg<U32>) -> Self::Values {
        tile.operand_b(k, base, lane, Major::Outer)
    }

    fn multiply_scores(
        k: &mut Builder,
        _: AmpereConfig,
        scores: &Accumulator,
        query: &OperandA<'_, Self::Fragment>,
        keys: SharedOperand,
    ) {
        multiply_e4m3_k_major(k, Self::KV_TYPE, scores, query, keys);
    }

    /// In two levels with [`Rescale::Always`], the output is rescaled as the product of the block is added,
    /// `O = factor * O + P * V`, which costs no instruction more than adding it. Else there is a branch between softmax and
    /// products, without which ptxas spills where outputs are wide.
    fn multiply_values(k: &mut Builder, block: &BlockOperands<'_, Self>) {
        let BlockOperands { softmax, scales, scores, output, stage, .. } = *block;
        let row_scale = k.section("softmax", |k| {
            let row_scale = RowScale::none(k, 2 * output.m_tiles.len() as u32);
            softmax.update_row_max(k, scores, &row_scale);
            softmax.exp_and_sum(k, scores, &row_scale);
            row_scale
        });
        scales.scale_e4m3_weights(k, scores, &row_scale, stage);
        let is_fused = TWO_LEVELS && block.config.rescale == Rescale::Always;
        if !is_fused {
            softmax.rescale_output(k, output, &row_scale);
        }
        k.section("output", |k| {
            let weights = OperandA::round(k, scores);
            let values = block.values.in_stage(k, stage);
            let promote = |k: &mut Builder, row: usize, element, product| {
                if is_fused {
                    k.scale_add_to(element, row_scale.factors()[row], product);
                } else {
                    k.add_to(element, product);
                }
            };
            multiply_e4m3_mn_major(k, Self::KV_TYPE, output, &weights, values, TWO_LEVELS.then_some(promote));
        });
    }

    fn output(output: &Accumulator) -> Accumulator {
        adjacent_columns(output)
    }

    fn words(k: &mut Builder, columns: &[Reg<F32>]) -> Vec<Reg<U32>> {
        <T as TensorElement>::words(k, columns)
    }
}

/// `f32`, multiplied as `tf32`.
impl TensorElement for Tf32 {
    const LAYOUT: ElementLayout = ElementLayout::of(DType::F32);
    type Stored = Self;
    type Fragment = Self;
    type Values = ValueWords;

    fn values(k: &mut Builder, tile: SharedTile, base: Reg<U32>, lane: Reg<U32>) -> Self::Values {
        ValueWords::new(k, tile, base, lane)
    }

    fn multiply_scores(
        k: &mut Builder,
        config: AmpereConfig,
        scores: &Accumulator,
        query: &OperandA<'_, Self::Fragment>,
        keys: SharedOperand,
    ) {
        multiply_tf32_k_major(k, config.tf32_products(), scores, query, keys);
    }

    fn multiply_values(k: &mut Builder, block: &BlockOperands<'_, Self>) {
        block.softmax(k);
        k.section("output", |k| {
            let values = block.values.in_stage(k, block.stage);
            let weights = OperandA::Accumulator(block.scores);
            multiply_tf32_mn_major(k, block.config.tf32_products(), block.output, &weights, values);
        });
    }

    fn words(k: &mut Builder, columns: &[Reg<F32>]) -> Vec<Reg<U32>> {
        columns.iter().map(|column| k.reinterpret::<F32, U32>(*column)).collect()
    }
}
