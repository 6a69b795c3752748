//! Elements of the Ampere kernel: pairs of 16-bit floats, with keys and values of 16 or of 8 bits, and `f32` as `tf32`.
//!
//! The mainloop and the epilogue are the same for all; here is what is not: fragments, products, and the way of the output
//! through shared memory.

use core::marker::PhantomData;

use flashcore_ir::types::{F32, Tf32, U32};
use flashcore_ir::{Builder, Fp8, Reg, SharedAddress};

use super::{Tiles, Warp};
use crate::config::{AmpereConfig, QueryPlace};
use crate::element::{Element, ElementLayout};
use crate::primitives::{
    Accumulator, Fp8Query, Fp8Target, LaneColumns, LaneRows, LeftFragments, LeftOperand, MMA_M, MMA_N, ROW_STEP,
    RightFragments, SharedTile, Tf32Query, TileAddresses, ValueWords, adjacent_columns, multiply_fp8_keys,
    multiply_fp8_values, multiply_scores, multiply_values,
};
use flashcore_problem::DType;

/// An element type of the Ampere kernel.
pub(crate) trait TensorElement: Sized + 'static {
    /// The layout of query and output in memory.
    const LAYOUT: ElementLayout;
    /// The columns of a lane in [`output`](Self::output).
    const COLUMNS: LaneColumns = LaneColumns::Pairs;
    /// The query between products.
    type Query;
    /// Addresses of a lane in the tile of values.
    type Values: Copy;

    /// The addresses of a lane in the first 16 rows of the query.
    fn query_addresses(k: &mut Builder, tile: SharedTile, base: Reg<U32>, lane: Reg<U32>) -> TileAddresses {
        tile.addresses(k, base, lane, LaneRows::DownFirst)
    }

    /// The query of a warp: `columns` columns of each 16 rows.
    fn query(k: &mut Builder, config: AmpereConfig, m_tiles: Vec<TileAddresses>, columns: u32) -> Self::Query;

    /// The addresses of a lane in stage 0 of the values.
    fn values(k: &mut Builder, tile: SharedTile, base: Reg<U32>, lane: Reg<U32>) -> Self::Values;

    /// Adds the products of query and keys to the scores.
    fn multiply_scores(
        k: &mut Builder,
        config: AmpereConfig,
        scores: &Accumulator,
        query: &Self::Query,
        keys: TileAddresses,
    );

    /// Adds the products of weights and values to the output.
    fn multiply_values(
        k: &mut Builder,
        config: AmpereConfig,
        output: &Accumulator,
        weights: &Accumulator,
        values: Self::Values,
        stage: Reg<U32>,
    );

    /// The output of all products, with adjacent columns in pairs.
    fn output(output: &Accumulator) -> Accumulator {
        output.clone()
    }

    /// Writes the warp's rows of the output to the shared-memory tile of the query.
    fn stage_output(k: &mut Builder, warp: &Warp, tiles: &Tiles, output: &Accumulator);

    /// Columns beside each other as they are in memory.
    fn words(k: &mut Builder, columns: &[Reg<F32>]) -> Vec<Reg<U32>>;
}

impl<T: Element> TensorElement for T {
    const LAYOUT: ElementLayout = T::LAYOUT;
    type Query = LeftOperand<'static, T>;
    type Values = TileAddresses;

    fn query(k: &mut Builder, config: AmpereConfig, m_tiles: Vec<TileAddresses>, columns: u32) -> Self::Query {
        match config.query {
            QueryPlace::Registers => LeftOperand::Registers(LeftFragments::<T>::load(k, &m_tiles, columns)),
            QueryPlace::Shared => LeftOperand::Shared(m_tiles, columns),
        }
    }

    fn values(k: &mut Builder, tile: SharedTile, base: Reg<U32>, lane: Reg<U32>) -> Self::Values {
        tile.addresses(k, base, lane, LaneRows::DownFirst)
    }

    fn multiply_scores(
        k: &mut Builder,
        config: AmpereConfig,
        scores: &Accumulator,
        query: &Self::Query,
        keys: TileAddresses,
    ) {
        scores.multiply_add(k, query, RightFragments::Transposed(keys), config.accumulation);
    }

    fn multiply_values(
        k: &mut Builder,
        config: AmpereConfig,
        output: &Accumulator,
        weights: &Accumulator,
        values: Self::Values,
        stage: Reg<U32>,
    ) {
        let weights = LeftOperand::<T>::Accumulator(weights);
        let values = RightFragments::Straight(values.in_stage(k, stage));
        output.multiply_add(k, &weights, values, config.accumulation);
    }

    fn stage_output(k: &mut Builder, warp: &Warp, tiles: &Tiles, output: &Accumulator) {
        let tile = tiles.query;
        let row = k.add(warp.first_row, warp.position.group);
        let within_chunk = k.mul(warp.position.member, 2 * <T as Element>::LAYOUT.bytes);
        // A fragment's columns, in 16-bit pairs, are a chunk.
        for column in (0..columns(output)).step_by(MMA_N as usize) {
            let (panel, chunk) = (column / tile.panel_columns(), column % tile.panel_columns() / MMA_N);
            let chunk = k.copy(chunk);
            let chunk_address = tile.chunk_address(k, warp.shared_base, row, chunk);
            let address = k.add(chunk_address, within_chunk);
            stage_columns(k, tile, (address, panel), output, column, |k, to, pair| {
                let rounded = k.pair::<T>(pair[0], pair[1]);
                k.store_shared(to, &[rounded]);
            });
        }
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
    type Query = Fp8Query<T>;
    type Values = TileAddresses;

    fn query_addresses(k: &mut Builder, tile: SharedTile, base: Reg<U32>, lane: Reg<U32>) -> TileAddresses {
        tile.quads(k, base, lane)
    }

    fn query(k: &mut Builder, config: AmpereConfig, m_tiles: Vec<TileAddresses>, columns: u32) -> Self::Query {
        match config.query {
            QueryPlace::Registers => Fp8Query::load(k, &m_tiles, columns),
            QueryPlace::Shared => Fp8Query::Shared(m_tiles, columns),
        }
    }

    fn values(k: &mut Builder, tile: SharedTile, base: Reg<U32>, lane: Reg<U32>) -> Self::Values {
        tile.addresses(k, base, lane, LaneRows::DownFirst)
    }

    fn multiply_scores(
        k: &mut Builder,
        config: AmpereConfig,
        scores: &Accumulator,
        query: &Self::Query,
        keys: TileAddresses,
    ) {
        multiply_fp8_keys(k, (Self::FROM, config.fp8), scores, query, keys);
    }

    fn multiply_values(
        k: &mut Builder,
        config: AmpereConfig,
        output: &Accumulator,
        weights: &Accumulator,
        values: Self::Values,
        stage: Reg<U32>,
    ) {
        let values = values.in_stage(k, stage);
        multiply_fp8_values::<T>(k, (Self::FROM, config.fp8), output, weights, values);
    }

    fn output(output: &Accumulator) -> Accumulator {
        adjacent_columns(output)
    }

    fn stage_output(k: &mut Builder, warp: &Warp, tiles: &Tiles, output: &Accumulator) {
        let tile = tiles.query;
        let row = k.add(warp.first_row, warp.position.group);
        // A lane's four columns are half a chunk, those of two tiles two chunks.
        let lane_chunk = k.shr(warp.position.member, 1u32);
        let half = k.and(warp.position.member, 1u32);
        for column in (0..columns(output)).step_by(2 * MMA_N as usize) {
            let panel = column / tile.panel_columns();
            let chunk = k.add(lane_chunk, column % tile.panel_columns() / tile.element.chunk_elements());
            let chunk_address = tile.chunk_address(k, warp.shared_base, row, chunk);
            let address = k.mad(half, 4 * tile.element.bytes, chunk_address);
            for (m_tile, fragments) in output.m_tiles.iter().enumerate() {
                let [left, right] = [0, 1].map(|index| fragments[(column / MMA_N) as usize + index]);
                for upper in [0, 2] {
                    let pairs = [left, right].map(|pair| k.pair::<T>(pair[upper], pair[upper + 1]));
                    let rows_below = m_tile as u32 * MMA_M + upper as u32 / 2 * ROW_STEP;
                    let below = rows_below * tile.row_bytes() + tile.panel_step(panel);
                    k.store_shared(SharedAddress::from(address).plus(below as i32), &pairs);
                }
            }
        }
    }

    fn words(k: &mut Builder, columns: &[Reg<F32>]) -> Vec<Reg<U32>> {
        <T as TensorElement>::words(k, columns)
    }
}

/// `f32`, multiplied as `tf32`.
impl TensorElement for Tf32 {
    const LAYOUT: ElementLayout = ElementLayout::of(DType::F32);
    type Query = Tf32Query;
    type Values = ValueWords;

    fn query(k: &mut Builder, config: AmpereConfig, m_tiles: Vec<TileAddresses>, columns: u32) -> Self::Query {
        match config.query {
            QueryPlace::Registers => Tf32Query::load(k, &m_tiles, columns),
            QueryPlace::Shared => Tf32Query::Shared(m_tiles, columns),
        }
    }

    fn values(k: &mut Builder, tile: SharedTile, base: Reg<U32>, lane: Reg<U32>) -> Self::Values {
        ValueWords::new(k, tile, base, lane)
    }

    fn multiply_scores(
        k: &mut Builder,
        config: AmpereConfig,
        scores: &Accumulator,
        query: &Self::Query,
        keys: TileAddresses,
    ) {
        multiply_scores(k, config.tf32_products(), scores, query, keys);
    }

    fn multiply_values(
        k: &mut Builder,
        config: AmpereConfig,
        output: &Accumulator,
        weights: &Accumulator,
        values: Self::Values,
        stage: Reg<U32>,
    ) {
        let values = values.in_stage(k, stage);
        multiply_values(k, config.tf32_products(), output, weights, values);
    }

    fn stage_output(k: &mut Builder, warp: &Warp, tiles: &Tiles, output: &Accumulator) {
        let tile = tiles.query;
        let row = k.add(warp.first_row, warp.position.group);
        // A lane's two columns are half a chunk; a fragment's are two chunks.
        let lane_chunk = k.shr(warp.position.member, 1u32);
        let half = k.and(warp.position.member, 1u32);
        for column in (0..columns(output)).step_by(MMA_N as usize) {
            let panel = column / tile.panel_columns();
            let chunk = k.add(lane_chunk, column % tile.panel_columns() / tile.element.chunk_elements());
            let chunk_address = tile.chunk_address(k, warp.shared_base, row, chunk);
            let address = k.mad(half, 2 * tile.element.bytes, chunk_address);
            stage_columns(k, tile, (address, panel), output, column, |k, to, pair| k.store_shared(to, pair));
        }
    }

    fn words(k: &mut Builder, columns: &[Reg<F32>]) -> Vec<Reg<U32>> {
        columns.iter().map(|column| k.reinterpret::<F32, U32>(*column)).collect()
    }
}

/// Columns of the output, padded.
fn columns(output: &Accumulator) -> u32 {
    output.m_tiles.first().map_or(0, Vec::len) as u32 * MMA_N
}

/// Stores the lane's pairs of columns of one fragment in each of its rows; `address` is that of the first row in panel 0.
fn stage_columns(
    k: &mut Builder,
    tile: SharedTile,
    (address, panel): (Reg<U32>, u32),
    output: &Accumulator,
    column: u32,
    mut store: impl FnMut(&mut Builder, SharedAddress, &[Reg<F32>]),
) {
    for (m_tile, fragments) in output.m_tiles.iter().enumerate() {
        for (half, pair) in fragments[(column / MMA_N) as usize].chunks_exact(2).enumerate() {
            let rows_below = m_tile as u32 * MMA_M + half as u32 * ROW_STEP;
            let below = rows_below * tile.row_bytes() + tile.panel_step(panel);
            store(k, SharedAddress::from(address).plus(below as i32), pair);
        }
    }
}
